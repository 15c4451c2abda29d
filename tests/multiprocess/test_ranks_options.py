"""Collective calls whose arguments differ by rank: one error on all ranks, and nothing is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fdsd
from fdsd.errors import RankDisagreement
from tests.helpers.ranks import run_ranks

STATE = {"a": torch.arange(4.0), "b": torch.ones(3)}


@pytest.mark.parametrize("name", ["new", "there", "new.safetensors", "there.safetensors", "new.pt", "there.pt"])
@pytest.mark.parametrize("who", [0, 1])
def test_overwrite(name: str, who: int, tmp_path: Path) -> None:
    fdsd.save({"old": torch.ones(1)}, tmp_path / name.replace("new", "there"))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def run(rank: int) -> str:
        with pytest.raises(RankDisagreement) as caught:
            fdsd.save(STATE, tmp_path / name, overwrite=rank == who, group=dist.group.WORLD)
        return str(caught.value)

    first, *others = run_ranks(run, 3)
    assert others == [first, first]
    rest = "ranks 1, 2" if who == 0 else "ranks 0, 2"
    assert f"True on rank {who}" in first and f"False on {rest}" in first and "overwrite is" in first
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_everything_that_the_writer_goes_by(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "tokenizer.json").write_text("{}")
    by_rank: dict[str, list[dict[str, Any]]] = {
        "max_shard_size is 1000 on rank 0, 2000 on rank 1": [{"max_shard_size": "1KB"}, {"max_shard_size": 2000}],
        "assets is None on rank 0, [": [{}, {"assets": tmp_path / "notes"}],
        "config is '{\"a\": 1}' on rank 0, '{\"a\": 2}' on rank 1": [{"config": {"a": 1}}, {"config": {"a": 2}}],
        "config is None on rank 0, 'a complex that is no JSON'": [{}, {"config": 3j}],
        "...": [{"config": {"a": "x" * 5000}}, {}],
        "format is 'torch' on rank 0, 'safetensors' on rank 1": [{"format": "torch"}, {"format": "safetensors"}],
    }

    def run(rank: int) -> list[str]:
        told: list[str] = []
        for how in by_rank.values():
            with pytest.raises(RankDisagreement) as caught:
                fdsd.save(STATE, tmp_path / "new", group=dist.group.WORLD, **how[rank])
            told.append(str(caught.value))
        assert not (tmp_path / "new").exists()
        dist.barrier()
        paths: list[Any] = [str(tmp_path / "notes"), [tmp_path / "notes" / "tokenizer.json"]]
        for i, assets in enumerate(paths):  # the same in other words is the same
            alike = [{"a": 1, "b": {"c": [2]}}, {"b": {"c": (2,)}, "a": 1}][rank]
            fdsd.save(STATE, tmp_path / f"m{i}", group=dist.group.WORLD, assets=assets, config=alike)
        fdsd.save(STATE, tmp_path / "m2", group=dist.group.WORLD, budget=["1MB", "2MB"][rank])
        return told

    first, second = run_ranks(run, 2)
    assert first == second
    for part, text in zip(by_rank, first, strict=True):
        assert part in text and len(text) < 500, (part, text)
    for name in ("m0", "m1", "m2"):
        assert torch.equal(fdsd.materialize(fdsd.open(tmp_path / name))["a"], STATE["a"])


def test_restore() -> None:
    by_rank: list[list[dict[str, Any]]] = [[{"staged": True}, {}], [{"dtype": "target"}, {"dtype": "source"}]]

    def run(rank: int) -> list[str]:
        told: list[str] = []
        model = torch.nn.Linear(2, 2, bias=False)
        before = model.weight.detach().clone()
        for how in by_rank:
            with pytest.raises(RankDisagreement) as caught:
                fdsd.restore({"weight": torch.ones(2, 2)}, model, group=dist.group.WORLD, **how[rank])
            told.append(str(caught.value))
            assert torch.equal(model.weight, before)
        return told

    first, second = run_ranks(run, 2)
    assert first == second
