"""Saving over ranks: one of them writes; what it cannot write is an error on all, and leaves nothing behind."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import fdsd
from fdsd import Sharded
from fdsd.errors import FdsdError
from fdsd.layout import Layout, Mesh, Shard
from tests.helpers.models import make
from tests.helpers.parallelism import build
from tests.helpers.ranks import run_ranks
from tests.multiprocess.test_engine import same, world

LAYOUT = Layout(Mesh({"x": 3}), [Shard(0)])


@contextmanager
def limited(nbytes: int, here: bool) -> Iterator[None]:
    """Let no file of this process grow beyond a size, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if here:
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def here(whole: dict[str, torch.Tensor], rank: int) -> dict[str, Any]:
    """This rank's shards, tied names still tied."""
    laid = fdsd.shard_with(LAYOUT)(whole)
    made: dict[int, Sharded] = {}
    for leaf in laid.values():
        if id(leaf.kept) not in made:
            made[id(leaf.kept)] = Sharded(leaf.spec, LAYOUT, shards={rank: leaf.shard(rank)})
    return {name: made[id(leaf.kept)] for name, leaf in laid.items()}


def formats(rank: int, folder: Path) -> None:
    model, expected = build("fsdp2")
    state = fdsd.capture(model).model
    extra = fdsd.combine(state, {"note": {"by": "hand"}, "again": state["head.weight"]})
    fdsd.save(fdsd.gather(to=1)(extra), folder / "model.pt", group=world())
    if rank == 2:
        found = torch.load(folder / "model.pt", weights_only=True)
        same({name: found[name] for name in expected}, expected)
        assert found["note"] == {"by": "hand"} and found["again"] is not None
        assert found["again"].data_ptr() == found["head.weight"].data_ptr()
        assert "layers.0" in found._metadata
    (folder / "assets").mkdir(exist_ok=True)
    (folder / "assets" / "tokenizer.json").write_text("{}")
    how: dict[str, Any] = {
        "max_shard_size": 200,
        "assets": folder / "assets",
        "config": {"tied": True},
        "group": world(),
    }
    for target in (folder / "a", folder / "b"):
        fdsd.save(state, target, budget="1KB", **how)
    same(fdsd.materialize(fdsd.open(folder / "a")), expected)
    assert json.loads((folder / "a" / "config.json").read_text()) == {"tied": True}
    assert (folder / "a" / "tokenizer.json").exists() and len(list((folder / "a").glob("*.safetensors"))) > 3
    changed = {name: value + 1 for name, value in expected.items()}
    fdsd.save(changed, folder / "a", overwrite=True, **how)
    same(fdsd.materialize(fdsd.open(folder / "a")), changed)
    wide = fdsd.reshard({"head.weight": Layout(Mesh({"x": 3}), [Shard(1)])})(state)
    for suffix in (".safetensors", ".pt"):
        fdsd.save(wide, folder / f"wide{suffix}", group=world())
        same(fdsd.materialize(fdsd.open(folder / f"wide{suffix}")), expected)


def tied(rank: int, folder: Path) -> None:
    w, v = torch.arange(12.0).view(4, 3), torch.arange(5.0)
    state = here({"embed": w, "norm": v, "head": w, "copy": w.clone()}, rank)
    fdsd.save(state, folder / "tied.safetensors", group=world(), budget="1KB")
    found = fdsd.open(folder / "tied.safetensors")
    assert fdsd.data.ties.ties(found) == [("embed", "head")]
    got = fdsd.materialize(found)
    assert torch.equal(got["head"], w) and torch.equal(got["copy"], w) and torch.equal(got["norm"], v)
    # one stage has the embedding and its alias, another the alias and one more: all are one tensor
    stages = [{"embed": w, "head": w}, {"head": w, "again": w}, {"norm": v}]
    fdsd.save(stages[rank], folder / "stages.safetensors", group=world())
    assert fdsd.data.ties.ties(fdsd.open(folder / "stages.safetensors")) == [("embed", "head", "again")]
    model: Any = make()
    fdsd.save(fdsd.drop("counter._extra_state")(fdsd.capture(model).model), folder / "net", group=world())
    assert ("embed.weight", "head.weight") in fdsd.data.ties.ties(fdsd.open(folder / "net"))
    with pytest.raises(FdsdError, match=r"tied on some ranks.*'head' and 'embed'.*untie"):
        fdsd.save({"embed": w, "head": w if rank else w.clone()}, folder / "no.safetensors", group=world())


def refusals(rank: int, folder: Path) -> list[str]:
    folder = folder / "refusals"
    if rank == 0:
        folder.mkdir()
        (folder / "there.safetensors").write_text("mine")
        (folder / "file").write_text("no folder")
    state = here({"a": torch.arange(3000.0).view(30, 100), "b": torch.arange(7000.0).view(70, 100)}, rank)
    torch.distributed.barrier()
    told: list[str] = []

    def refused(call: Callable[[], Any]) -> None:
        before = sorted((str(p), p.stat().st_size) for p in folder.rglob("*"))
        torch.distributed.barrier()
        with pytest.raises(FdsdError) as caught:
            call()
        told.append(f"{type(caught.value).__name__}: {caught.value}")
        torch.distributed.barrier()
        assert sorted((str(p), p.stat().st_size) for p in folder.rglob("*")) == before

    def save(name: str, given: Any = None, **how: Any) -> Callable[[], None]:
        return lambda: fdsd.save(state if given is None else given, folder / name, group=world(), **how)

    refused(save("there.safetensors"))
    refused(save("file/model.safetensors"))
    refused(save("file/model.pt"))
    refused(save("new.safetensors", {**state, "note": "text"}))
    refused(save("new.safetensors", {**state, **({"spec": fdsd.TensorSpec((1,), torch.int8)} if rank == 2 else {})}))
    refused(save("new.pt", {**state, **({"spec": fdsd.TensorSpec((1,), torch.int8)} if rank == 2 else {})}))
    refused(save("new", format="gguf"))
    refused(save("new", budget="much" if rank == 1 else "1MB"))
    refused(save("new", 3 if rank == 1 else None))
    refused(save("new", assets=folder / "nowhere"))
    refused(save("new.safetensors", fdsd.gather(to=rank)(state)))
    refused(save("new.safetensors", fdsd.gather(to=9)(state)))
    for name in ("full.safetensors", "full.pt", "full"):
        with limited(9000, rank == 0):
            refused(save(name, budget="64KB"))
    with limited(9000, rank == 0):
        refused(save("there.safetensors", overwrite=True))
    return told


def all_of_it(rank: int, folder: str) -> list[str]:
    formats(rank, Path(folder))
    tied(rank, Path(folder))
    return refusals(rank, Path(folder))


def test_saving_over_ranks(tmp_path: Path) -> None:
    found = run_ranks(all_of_it, 3, str(tmp_path), timeout=120)
    assert found[0] == found[1] == found[2]
    parts = [
        "there.safetensors",
        "file",
        "file",
        "'note'",
        "'spec'",
        "'spec'",
        "gguf",
        "much",
        "int",
        "nowhere",
        "0, 1, 2",
        "9",
    ]
    for text, part in zip(found[0], parts, strict=False):
        assert part in text and "save: save" not in text, (part, text)
    assert all(text.startswith("DiskError") for text in found[0][len(parts) :]), found[0][len(parts) :]
    assert len(found[0]) == len(parts) + 4
