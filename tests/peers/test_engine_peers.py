"""Files that fdsd writes load with safetensors, torch and transformers, to the same bits; and the other way round."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file, save_model

import fdsd
from fdsd.data.ties import ties
from fdsd.storage.safetensors_header import DTYPES
from tests.helpers.tensors import patterns, plain, same_bytes

STORABLE = sorted(DTYPES.values(), key=str)


@pytest.mark.parametrize("dtype", STORABLE, ids=str)
def test_safetensors_reads_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    state = {"b": patterns((3, 4), dtype), "a": patterns((0, 2), dtype), "c": patterns((7,), dtype, 2)}
    fdsd.save(state, tmp_path / "x.safetensors")
    loaded = load_file(tmp_path / "x.safetensors")
    assert loaded.keys() == state.keys()
    assert all(same_bytes(loaded[name], leaf) for name, leaf in state.items())
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        if "x2" not in str(dtype):  # it cannot slice packed ones
            assert same_bytes(file.get_slice("c")[2:5], state["c"][2:5])


@pytest.mark.parametrize("dtype", STORABLE, ids=str)
def test_what_safetensors_writes_is_read(tmp_path: Path, dtype: torch.dtype) -> None:
    state = {"b": patterns((3, 4), dtype), "a": patterns((0, 2), dtype), "c": patterns((7,), dtype, 2)}
    save_file(state, tmp_path / "a.safetensors", {"format": "pt", "note": "n"})
    found = fdsd.materialize(fdsd.open(tmp_path / "a.safetensors"))
    assert found.keys() == state.keys()
    assert all(same_bytes(found[name], leaf) for name, leaf in state.items())


def test_views_and_parameters_load_as_their_values(tmp_path: Path) -> None:
    base = patterns((4, 6), torch.complex64)
    state = {"t": base.t(), "conj": base.conj(), "p": torch.nn.Parameter(patterns((4, 6), torch.float32))}
    fdsd.save(state, tmp_path / "x.safetensors")
    fdsd.save(state, tmp_path / "x.pt")
    torch_file = torch.load(tmp_path / "x.pt", weights_only=True)
    for loaded in (load_file(tmp_path / "x.safetensors"), torch_file):
        assert all(same_bytes(plain(loaded[name]), plain(leaf)) for name, leaf in state.items())


class Tied(torch.nn.Module):
    """Two names of one weight."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(5, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.head = torch.nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight


def assert_same_module(a: torch.nn.Module, b: torch.nn.Module) -> None:
    for (name, x), (other, y) in zip(a.state_dict().items(), b.state_dict().items(), strict=True):
        assert name == other and same_bytes(x, y), name


def test_tied_modules_both_ways(tmp_path: Path) -> None:
    model, other = Tied(0), Tied(1)
    fdsd.save(model.state_dict(), tmp_path / "ours.safetensors")
    load_model(other, tmp_path / "ours.safetensors")
    assert_same_module(model, other)
    save_model(model, str(tmp_path / "theirs.safetensors"))
    found = fdsd.open(tmp_path / "theirs.safetensors")
    assert ties(found) == [("embed.weight", "head.weight")]
    other = Tied(2)
    other.load_state_dict(fdsd.materialize(found).to_dict())
    assert_same_module(model, other)


def test_torch_reads_what_was_saved(tmp_path: Path) -> None:
    model, other = Tied(0), Tied(1)
    fdsd.save(model.state_dict(), tmp_path / "x.pt")
    loaded = torch.load(tmp_path / "x.pt", weights_only=True, mmap=True)
    assert loaded["embed.weight"].data_ptr() == loaded["head.weight"].data_ptr()
    other.load_state_dict(loaded)
    assert_same_module(model, other)
    torch.save(other.state_dict(), tmp_path / "y.pt")
    assert fdsd.diff(fdsd.open(tmp_path / "y.pt"), model.state_dict()).same


# -- transformers ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def transformers() -> Any:
    os.environ["HF_HUB_OFFLINE"] = "1"  # it is read when transformers is imported
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("transformers")


TOKENS = torch.tensor([[1, 5, 9, 2], [3, 3, 7, 4]])


@pytest.fixture(scope="module")
def bert(transformers: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=11, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=12
    )
    return transformers.BertForMaskedLM(config).eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(TOKENS).logits
    return found


def load(transformers: Any, path: Path) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, info = transformers.BertForMaskedLM.from_pretrained(path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    return logits(model.eval())


PARTS = ("query", "key", "value")
FUSE = fdsd.pipe(
    fdsd.rename_fqns({"bert.encoder.layer.{i}.attention.self.{x...}": "blocks.{i}.{x...}"}),
    *[
        fdsd.concat([f"blocks.{{i}}.{x}.{end}" for x in PARTS], f"blocks.{{i}}.qkv.{end}", dim=0, sizes=[8, 8, 8])
        for end in ("weight", "bias")
    ],
)


@pytest.mark.parametrize("size", ["5GB", "1KB"])
@pytest.mark.parametrize("shards", ["5GB", 2000])
def test_a_model_is_rewritten_and_back(
    transformers: Any, bert: Any, tmp_path: Path, size: str, shards: int | str
) -> None:
    bert.save_pretrained(tmp_path / "a", max_shard_size=size)
    source = fdsd.open(tmp_path / "a")
    fdsd.save(FUSE(source), tmp_path / "b", assets=tmp_path / "a", max_shard_size=shards)
    fused = fdsd.open(tmp_path / "b")
    assert fused["blocks.1.qkv.weight"].shape == (24, 8)
    fdsd.save((~FUSE)(fused), tmp_path / "c", assets=tmp_path / "b", max_shard_size=shards)
    assert same_bytes(load(transformers, tmp_path / "c"), logits(bert))
    assert fdsd.diff(fdsd.open(tmp_path / "c"), source).same


def test_a_state_dict_with_ties_loads(transformers: Any, bert: Any, tmp_path: Path) -> None:
    bert.config.save_pretrained(tmp_path / "config")
    state = bert.state_dict()
    assert ties(state)
    fdsd.save(state, tmp_path / "out", assets=tmp_path / "config")
    assert same_bytes(load(transformers, tmp_path / "out"), logits(bert))
    assert ties(fdsd.open(tmp_path / "out")) == ties(state)


def test_a_config_that_was_edited_is_read(transformers: Any, bert: Any, tmp_path: Path) -> None:
    bert.save_pretrained(tmp_path / "a")
    half = fdsd.cast(torch.bfloat16)(fdsd.open(tmp_path / "a"))
    fdsd.save(half, tmp_path / "b", assets=tmp_path / "a", config={"dtype": "bfloat16"})
    model = transformers.BertForMaskedLM.from_pretrained(tmp_path / "b").eval()
    assert model.dtype == torch.bfloat16
    want = {name: leaf.to(torch.bfloat16) for name, leaf in bert.named_parameters()}
    assert all(same_bytes(leaf, want[name]) for name, leaf in model.named_parameters())


def test_what_transformers_saved_as_torch_files(transformers: Any, bert: Any, tmp_path: Path) -> None:
    torch.save(bert.state_dict(), tmp_path / "pytorch_model.bin")
    bert.config.save_pretrained(tmp_path)
    source = fdsd.open(tmp_path)
    assert ties(source) == ties(bert.state_dict())
    fdsd.save(source, tmp_path / "out", assets=tmp_path)
    assert same_bytes(load(transformers, tmp_path / "out"), logits(bert))
