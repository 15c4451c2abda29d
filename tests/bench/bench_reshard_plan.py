"""Planning transfers of DeepSeek-V3's 91,000 tensors in one process, without data: seconds, and memory.

``python tests/bench/bench_reshard_plan.py [reshard] [gather] [growth] [--json PATH]`` prints tables and JSON;
``tox -e bench`` collects it. Nothing here is a gate. Each plan is made in a process of its own, so that its memory is
seen: the most resident memory that is no file's, over that of the imports and of the specs.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # so that it runs as a script

from fdsd.data.spec import TensorSpec  # noqa: E402
from fdsd.layout import Layout, Mesh, Move, Replicate, Shard, plan_transfers  # noqa: E402
from fdsd.layout.program import Program  # noqa: E402

Row = dict[str, Any]
HIDDEN, EXPERT, DENSE, VOCAB, HEADS = 7168, 2048, 18432, 129280, 128
LAYERS, EXPERTS, FIRST_SPARSE = 61, 256, 3


def tensors(layers: int = LAYERS, experts: int = EXPERTS) -> dict[str, TensorSpec]:
    """The tensors of DeepSeek-V3, as its checkpoint has them: float8 weights with scales of 128 x 128 blocks."""
    found: dict[str, TensorSpec] = {}

    def weight(name: str, *shape: int) -> None:
        found[f"{name}.weight"] = TensorSpec(shape, torch.float8_e4m3fn)
        found[f"{name}.weight_scale_inv"] = TensorSpec([-(-size // 128) for size in shape], torch.float32)

    def plain(name: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> None:
        found[name] = TensorSpec(shape, dtype)

    def mlp(name: str, inner: int) -> None:
        weight(f"{name}.gate_proj", inner, HIDDEN)
        weight(f"{name}.up_proj", inner, HIDDEN)
        weight(f"{name}.down_proj", HIDDEN, inner)

    plain("model.embed_tokens.weight", VOCAB, HIDDEN)
    for i in range(layers):
        at = f"model.layers.{i}"
        weight(f"{at}.self_attn.q_a_proj", 1536, HIDDEN)
        weight(f"{at}.self_attn.q_b_proj", HEADS * 192, 1536)
        weight(f"{at}.self_attn.kv_a_proj_with_mqa", 576, HIDDEN)
        weight(f"{at}.self_attn.kv_b_proj", HEADS * 256, 512)
        weight(f"{at}.self_attn.o_proj", HIDDEN, HEADS * 128)
        plain(f"{at}.self_attn.q_a_layernorm.weight", 1536)
        plain(f"{at}.self_attn.kv_a_layernorm.weight", 512)
        plain(f"{at}.input_layernorm.weight", HIDDEN)
        plain(f"{at}.post_attention_layernorm.weight", HIDDEN)
        if i < FIRST_SPARSE:
            mlp(f"{at}.mlp", DENSE)
            continue
        plain(f"{at}.mlp.gate.weight", experts, HIDDEN)
        plain(f"{at}.mlp.gate.e_score_correction_bias", experts, dtype=torch.float32)
        mlp(f"{at}.mlp.shared_experts", EXPERT)
        for e in range(experts):
            mlp(f"{at}.mlp.experts.{e}", EXPERT)
    plain("model.norm.weight", HIDDEN)
    plain("lm_head.weight", VOCAB, HIDDEN)
    return found


Place = Callable[[str, TensorSpec], Layout]


def sharded(world: int) -> Place:
    """Every tensor over all ranks, as FSDP2 does."""
    layout = Layout(Mesh({"dp": world}), [Shard(0)])
    return lambda _name, _spec: layout


def parallel(world: int, *, tp: int, ep: int, experts: int = EXPERTS) -> Place:
    """Dense weights over data x tensor parallel ranks, norms replicated, experts each on the ranks of its group."""
    dense = Mesh({"dp": world // tp, "tp": tp})
    rows = Layout(dense, {"dp": Shard(0), "tp": Shard(0)}, order=["tp", "dp"])
    columns = Layout(dense, {"dp": Shard(0), "tp": Shard(1)})
    same = Layout(dense, [Replicate(), Replicate()])
    group = world // ep
    of_group = [Layout(Mesh({"dp": group}, range(g * group, (g + 1) * group)), [Shard(0)]) for g in range(ep)]
    by_row = ("q_b_proj", "kv_b_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")

    def place(name: str, spec: TensorSpec) -> Layout:
        if ".experts." in name:
            expert = int(name.split(".experts.")[1].split(".")[0])
            return of_group[expert * ep // experts]
        if len(spec.shape) < 2 or ".mlp.gate." in name:
            return same
        return rows if any(part in name for part in by_row) else columns

    return place


def replicated(rank: int) -> Place:
    """The whole tensor on one rank."""
    layout = Layout(Mesh({}, [rank]), [])
    return lambda _name, _spec: layout


def plan(specs: Mapping[str, TensorSpec], source: Place, target: Place, ranks: list[int]) -> Row:
    """Make the plan, count the bytes of every rank, and write the programs of some ranks."""
    gc.collect()
    start = time.perf_counter()
    made = plan_transfers({name: Move(spec, source(name, spec), target(name, spec)) for name, spec in specs.items()})
    planned = time.perf_counter()
    traffic = made.traffic()
    counted = time.perf_counter()
    programs: list[Program] = []
    seconds: list[float] = []
    for rank in ranks:
        begin = time.perf_counter()
        programs.append(made.program(rank))
        seconds.append(time.perf_counter() - begin)
    assert sum(traffic.received.values()) == sum(traffic.sent.values())
    return {
        "tensors": len(specs),
        "structures": len(made.structures),
        "ranks": len({*traffic.received, *traffic.sent}),
        "plan s": planned - start,
        "traffic s": counted - planned,
        "slowest program s": max(seconds),
        "messages": max(map(len, programs)),
        "items": max(len(program.instances) for program in programs),
        "sent GB": sum(traffic.sent.values()) / 1e9,
        "most received GB": max(traffic.received.values(), default=0) / 1e9,
    }


def anonymous() -> int:
    """The resident memory of this process that is no file's, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this system does not tell RssAnon")


CASES: dict[str, Callable[[], Row]] = {}


def case(group: str, name: str, layers: int, experts: int, source: Place, target: Place, ranks: list[int]) -> None:
    CASES[f"{group}: {name}"] = lambda: plan(tensors(layers, experts), source, target, ranks)


case("reshard", "FSDP 256 to 384", LAYERS, EXPERTS, sharded(256), sharded(384), [0, 100, 383])
_mixed = parallel(256, tp=8, ep=64), parallel(384, tp=8, ep=32)
case("reshard", "dp x tp, ep 256 to 384", LAYERS, EXPERTS, *_mixed, [0, 100, 383])
case("gather", "FSDP 256 to one rank", LAYERS, EXPERTS, sharded(256), replicated(0), [0, 1, 255])
case("gather", "dp x tp, ep 256 to one", LAYERS, EXPERTS, parallel(256, tp=8, ep=64), replicated(0), [0, 1, 255])
for _layers in (16, 31, 61):
    case("growth", f"{_layers} layers", _layers, EXPERTS, sharded(256), sharded(384), [0])
for _world in (32, 64, 128, 256, 512, 1024):
    case("growth", f"{_world} ranks", LAYERS, EXPERTS, sharded(_world), sharded(_world * 3 // 2), [0])
for _ep in (4, 16, 64, 256):
    _places = parallel(256, tp=8, ep=_ep), parallel(512, tp=8, ep=_ep)
    case("growth", f"{_ep} groups of experts", LAYERS, EXPERTS, *_places, [0])


def measured(name: str) -> Row:
    """Run one case, watching the memory."""
    base, most, stop = anonymous(), [0], threading.Event()

    def watch() -> None:
        while not stop.wait(0.02):
            most[0] = max(most[0], anonymous())

    thread = threading.Thread(target=watch)
    thread.start()
    start, cpu = time.perf_counter(), time.process_time()
    try:
        row = CASES[name]()
    finally:
        stop.set()
        thread.join()
    return {
        "case": name,
        **row,
        "all s": time.perf_counter() - start,
        "cpu s": time.process_time() - cpu,
        "MB": (max(most[0], anonymous()) - base) / 1e6,
    }


def run(name: str) -> Row:
    """Run one case in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measured, (name,))


def table(rows: list[Row]) -> str:
    """Lay rows out as text."""
    cells = [list(rows[0]), *[[f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return "\n".join(
        ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    )


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("growth")])
def test_plan(name: str) -> None:
    print("\n" + table([run(name)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("groups", nargs="*", help="reshard, gather, growth; all if left out")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = [run(name) for name in CASES if not args.groups or name.split(":")[0] in args.groups]
    print(table(rows))
    text = json.dumps(rows, indent=1)
    print(text) if args.json is None else args.json.write_text(text)


if __name__ == "__main__":
    main()
