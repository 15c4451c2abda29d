"""Renaming 100,000 names by 30 rules: a `RuleTable` beside `re.sub` with one expression after the other.

Run ``python tests/bench/rename_names.py``; it prints a table and JSON. The runs of both are interleaved, and the
ratio is that of the medians. Both must give the same names.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import statistics
import time
from collections.abc import Callable

from fdsd.data.rules import RuleTable

PROJECTIONS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
ATTENTION = {
    "q_a_proj": "wq_a",
    "q_a_layernorm": "q_norm",
    "q_b_proj": "wq_b",
    "kv_a_proj_with_mqa": "wkv_a",
    "kv_a_layernorm": "kv_norm",
    "kv_b_proj": "wkv_b",
    "o_proj": "wo",
}


def rules() -> dict[str, str]:
    """Rules of a mixture of experts with latent attention, from the Hugging Face names to short ones."""
    table = {
        "model.embed_tokens.weight": "embed.weight",
        "model.norm.weight": "norm.weight",
        "lm_head.weight": "head.weight",
        "model.layers.{i}.input_layernorm.weight": "layers.{i}.attn_norm.weight",
        "model.layers.{i}.post_attention_layernorm.weight": "layers.{i}.ffn_norm.weight",
        "model.layers.{i}.mlp.gate.weight": "layers.{i}.ffn.gate.weight",
        "model.layers.{i}.mlp.gate.e_score_correction_bias": "layers.{i}.ffn.gate.bias",
    }
    for old, new in ATTENTION.items():
        table[f"model.layers.{{i}}.self_attn.{old}.weight"] = f"layers.{{i}}.attn.{new}.weight"
    for old in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"):
        scale = f"layers.{{i}}.attn.{ATTENTION[old]}.scale"
        table[f"model.layers.{{i}}.self_attn.{old}.weight_scale_inv"] = scale
    for old, new in PROJECTIONS.items():
        table[f"model.layers.{{i}}.mlp.experts.{{e}}.{old}.weight"] = f"layers.{{i}}.ffn.experts.{{e}}.{new}.weight"
        shared = f"layers.{{i}}.ffn.shared_experts.{new}.weight"
        table[f"model.layers.{{i}}.mlp.shared_experts.{old}.weight"] = shared
        table[f"model.layers.{{i}}.mlp.{old}.weight"] = f"layers.{{i}}.ffn.{new}.weight"
    experts = "model.layers.{i}.mlp.experts.{e}.{x|gate_proj|up_proj|down_proj}.weight_scale_inv"
    table[experts] = "layers.{i}.ffn.experts.{e}.{x}.scale"
    table["model.layers.{i}.mlp.{r...}.weight_scale_inv"] = "layers.{i}.ffn.{r...}.scale"
    return table


def names(num: int) -> list[str]:
    """Give that many names: a few of the embedding and head, and layers with 3 dense and the others of experts."""
    found = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    layer = 0
    while len(found) < num:
        prefix = f"model.layers.{layer}"
        found += [f"{prefix}.{norm}.weight" for norm in ("input_layernorm", "post_attention_layernorm")]
        for old in ATTENTION:
            found.append(f"{prefix}.self_attn.{old}.weight")
            if "layernorm" not in old:
                found.append(f"{prefix}.self_attn.{old}.weight_scale_inv")
        blocks = ["mlp"] if layer < 3 else [f"mlp.experts.{e}" for e in range(256)] + ["mlp.shared_experts"]
        found += [f"{prefix}.mlp.gate.{x}" for x in ("weight", "e_score_correction_bias") if layer >= 3]
        for block in blocks:
            for old in PROJECTIONS:
                found += [f"{prefix}.{block}.{old}.weight", f"{prefix}.{block}.{old}.weight_scale_inv"]
        layer += 1
    return found[:num]


def expressions(table: dict[str, str]) -> list[tuple[re.Pattern[str], str]]:
    """Give the rules as a reader would write them for `re.sub`; ``\\A`` and ``\\Z`` as patterns are whole names."""
    found: list[tuple[re.Pattern[str], str]] = []
    for source, target in table.items():
        text = ""
        for literal, hole in re.findall(r"([^{]+)|\{([^}]+)\}", source):
            name = re.split(r"\W", hole)[0]
            inside = r".+" if hole.endswith("...") else "|".join(hole.split("|")[1:]) or r"[^.]+"
            text += re.escape(literal) if literal else f"(?P<{name}>{inside})"
        found.append((re.compile(rf"\A{text}\Z"), re.sub(r"\{(\w+)[^}]*\}", r"\\g<\1>", target)))
    return found


def one_after_another(table: list[tuple[re.Pattern[str], str]], given: list[str]) -> list[str]:
    found: list[str] = []
    for name in given:
        for expression, target in table:
            name = expression.sub(target, name)
        found.append(name)
    return found


def seconds(call: Callable[[], object]) -> float:
    gc.collect()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--names", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    source, given = rules(), names(options.names)
    table, peer = RuleTable.make(source), expressions(source)
    renaming = table.apply(given)
    assert renaming.problems == []
    assert renaming.targets == one_after_another(peer, given)
    timings: dict[str, list[float]] = {"RuleTable.apply": [], "of a new table": [], "re.sub": []}
    for _ in range(options.repeats):
        timings["RuleTable.apply"].append(seconds(lambda: table.apply(given)))
        timings["of a new table"].append(seconds(lambda: RuleTable.make(source).apply(given)))
        timings["re.sub"].append(seconds(lambda: one_after_another(peer, given)))
    per_name = {what: statistics.median(runs) / len(given) * 1e6 for what, runs in timings.items()}
    print(f"{len(given)} names, {len(source)} rules, medians of {options.repeats}")
    print(f"{'':<18}{'us a name':>10}{'ratio':>9}")
    for what, cost in per_name.items():
        print(f"{what:<18}{cost:>10.2f}{cost / per_name['re.sub']:>9.3f}")
    print(
        json.dumps(
            {
                "bench": "rename_names",
                "names": len(given),
                "rules": len(source),
                "repeats": options.repeats,
                "us_per_name": per_name,
                "ratio": per_name["RuleTable.apply"] / per_name["re.sub"],
                "target_us": 3.0,
            }
        )
    )


if __name__ == "__main__":
    main()
