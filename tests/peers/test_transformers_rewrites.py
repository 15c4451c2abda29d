"""Rewrites of real models against what transformers computes with them: tiny random configurations, on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fdsd import StateDict, concat, drop, permute_rope, rename_fqns, split, transpose
from fdsd.testing import assert_laws, assert_round_trip

transformers = pytest.importorskip("transformers")


def run(model: Any, tokens: int = 7) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        made: torch.Tensor = model(torch.arange(tokens)[None] % 11).logits
    return made


def llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=11,
        hidden_size=24,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=4,
        max_position_embeddings=16,
        tie_word_embeddings=False,
    )
    return transformers.LlamaForCausalLM(config)


def test_phi3_fuses_what_llama_keeps_apart() -> None:
    """qkv_proj is rows [H*d, G*d, G*d]; gate_up_proj is [gate, up]."""
    source = llama()
    config = transformers.Phi3Config(
        vocab_size=11,
        hidden_size=24,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=16,
        original_max_position_embeddings=16,
        pad_token_id=None,
        eos_token_id=None,
        bos_token_id=None,
        tie_word_embeddings=False,
        rms_norm_eps=source.config.rms_norm_eps,
    )
    target = transformers.Phi3ForCausalLM(config)
    layer = "model.layers.{i}"
    p = concat([f"{layer}.self_attn.{x}_proj.weight" for x in "qkv"], f"{layer}.self_attn.qkv_proj.weight", dim=0)
    p >>= concat([f"{layer}.mlp.{x}_proj.weight" for x in ("gate", "up")], f"{layer}.mlp.gate_up_proj.weight", dim=0)
    state = source.state_dict()
    assert p.check(state, expect=target.state_dict()).ok, p.check(state, expect=target.state_dict())
    target.load_state_dict(p(state).to_dict(), strict=True)
    assert torch.allclose(run(target), run(source), atol=1e-5)
    assert_round_trip(p, state)


def test_rope_in_pairs_is_what_transformers_computes_in_halves() -> None:
    """Meta's convention rotates neighbours; the permuted rows give the same attention scores."""
    source = llama()
    state = source.state_dict()
    config = source.config
    H, G, d = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    p = permute_rope("{_...}.q_proj.weight", heads=H, to="pairs") >> permute_rope(
        "{_...}.k_proj.weight", heads=G, to="pairs"
    )
    made = p(state)
    x = torch.randn(5, config.hidden_size, generator=torch.Generator().manual_seed(1))
    angles = torch.arange(5)[:, None] / config.rope_parameters["rope_theta"] ** (torch.arange(0, d, 2) / d)

    def halves(y: torch.Tensor) -> torch.Tensor:
        a, b = y.chunk(2, -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)

    def pairs(y: torch.Tensor) -> torch.Tensor:
        z = torch.view_as_complex(y.reshape(*y.shape[:-1], -1, 2).contiguous())
        return torch.view_as_real(z * torch.polar(torch.ones_like(angles), angles)).flatten(-2)

    def scores(weights: Any, rotate: Any) -> torch.Tensor:
        q, k = (
            rotate((x @ weights[f"model.layers.1.self_attn.{n}_proj.weight"].T).view(5, heads, d).transpose(0, 1))
            for n, heads in (("q", H), ("k", G))
        )
        return q @ k.repeat_interleave(H // G, 0).transpose(-1, -2)

    assert torch.allclose(scores(made, pairs), scores(state, halves), atol=1e-5)
    assert not torch.allclose(scores(state, pairs), scores(state, halves), atol=1e-3)
    assert_laws(p, StateDict(state))


def test_gpt_neox_rows_are_per_head() -> None:
    """query_key_value is (H, 3, d) rows, weight and bias."""
    torch.manual_seed(0)
    config = transformers.GPTNeoXConfig(
        vocab_size=11,
        hidden_size=24,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=6,
        max_position_embeddings=16,
    )
    model = transformers.GPTNeoXForCausalLM(config)
    layer = "gpt_neox.layers.{i}.attention"
    parts = [f"{layer}.{x}.{{y|weight|bias}}" for x in "qkv"]
    p = split(f"{layer}.query_key_value.{{y|weight|bias}}", parts, dim=0, sizes=[24] * 3, groups=6)
    state = model.state_dict()
    made = p(state)
    attention = model.gpt_neox.layers[0].attention
    x = torch.randn(1, 5, 24, generator=torch.Generator().manual_seed(1))
    fused = attention.query_key_value(x).view(1, 5, 6, 3 * 4)
    for n, name in enumerate("qkv"):
        weight, bias = (made[f"gpt_neox.layers.0.attention.{name}.{y}"] for y in ("weight", "bias"))
        own = (x @ weight.T + bias).view(1, 5, 6, 4)
        assert torch.allclose(own, fused[..., 4 * n : 4 * n + 4], atol=1e-5)
    assert_round_trip(p, state)


def test_gpt2_weights_are_transposed() -> None:
    """Conv1D keeps (in, out); c_attn is then rows of q, k and v."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=11, n_embd=24, n_layer=2, n_head=6, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    state = model.state_dict()
    p = drop("{_...}.attn.bias?", "{_...}.attn.masked_bias?") >> transpose(
        ["{_...}.c_attn.weight", "{_...}.c_proj.weight", "{_...}.c_fc.weight"]
    )
    p >>= split(
        "transformer.h.{i}.attn.c_attn.{y|weight|bias}",
        [f"transformer.h.{{i}}.attn.{x}.{{y|weight|bias}}" for x in "qkv"],
        dim=0,
        sizes=[24] * 3,
    )
    made = p(state)
    x = torch.randn(5, 24, generator=torch.Generator().manual_seed(1))
    block = model.transformer.h[1]
    for expected, name in zip(block.attn.c_attn(x).split(24, -1), "qkv", strict=True):
        weight, bias = (made[f"transformer.h.1.attn.{name}.{y}"] for y in ("weight", "bias"))
        assert torch.allclose(torch.nn.functional.linear(x, weight, bias), expected, atol=1e-5)
    square = "transformer.h.1.attn.c_proj.weight"
    assert torch.equal(made[square], state[square].T) and not torch.equal(made[square], state[square])
    assert made["lm_head.weight"].data_ptr() == made["transformer.wte.weight"].data_ptr()
    assert_round_trip(p, state)


def test_bert_of_the_demo_fuses_and_comes_back() -> None:
    config = transformers.BertConfig(
        vocab_size=11,
        hidden_size=24,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=6,
        max_position_embeddings=16,
    )
    torch.manual_seed(0)
    state = transformers.BertModel(config).state_dict()
    layer = "encoder.layer.{i}"
    p = concat(
        [f"{layer}.attention.self.{x}.{{y|weight|bias}}" for x in ("query", "key", "value")],
        f"{layer}.attention.qkv.{{y|weight|bias}}",
        dim=0,
        groups=6,
    ) >> rename_fqns({"encoder.layer.{i}.{rest...}": "blocks.{i}.{rest...}"})
    assert "blocks.1.attention.qkv.weight" in p(state)
    assert_laws(p, state)
