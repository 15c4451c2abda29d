"""The engine over real ranks: what is captured, brought together, streamed, saved and restored, however it lies."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fdsd
from fdsd.errors import FdsdError
from fdsd.layout import Layout, Mesh, Shard
from tests.helpers.parallelism import FORWARD, META, WAYS, build, num_ranks, step
from tests.helpers.ranks import run_ranks
from tests.helpers.tensors import same_bytes

P = fdsd.rename_fqns({"layers.{i}.{rest...}": "h.{i}.{rest...}"}) >> fdsd.transpose("h.{_}.up.weight")


def same(found: Mapping[str, Any], expected: Mapping[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert same_bytes(found[name], value), name


def same_columns(found: fdsd.TrainState, expected: fdsd.TrainState) -> None:
    """The same values, and the same groups; parameters of a slot may come in any order."""
    a, b = columns(found), columns(expected)
    assert a.keys() == b.keys()
    for slot, column in b.items():
        same({name: a[slot][name] for name in column}, column)
        assert len(a[slot]) == len(column)
    assert found.optim is not None and expected.optim is not None
    assert [dict(one.options) for one in found.optim.groups] == [dict(one.options) for one in expected.optim.groups]


def columns(state: fdsd.TrainState) -> dict[Any, Any]:
    assert state.optim is not None
    return {"model": state.model, **state.optim.slots}


def world() -> Any:
    return dist.group.WORLD


# -- every way to lay a model out --------------------------------------------------------------------------------------


def reads(way: str, model: Any, expected: Mapping[str, torch.Tensor], path: Path, rank: int) -> None:
    """A live model reads as the unwrapped one."""
    state = fdsd.capture(model).model
    same(fdsd.materialize(state, group=world()), expected)
    same(fdsd.materialize(P(state), group=world()), fdsd.materialize(P(expected)))
    same(dict(fdsd.stream(state, group=world(), budget="1KB")), expected)
    last = dist.get_world_size() - 1
    one = fdsd.materialize(fdsd.gather(to=last)(state), group=world())
    same(one, expected if rank == last else {})
    same(dict(fdsd.stream(state, to=last, group=world())), expected if rank == last else {})
    fdsd.save(P(state), path, group=world(), budget="1KB")
    same(fdsd.materialize((~P)(fdsd.open(path))), expected)
    wide = Layout(Mesh({"x": dist.get_world_size()}), [Shard(0)])
    laid = fdsd.materialize(fdsd.reshard({"head.{_}": wide})(fdsd.select("head.{_}")(state)), group=world())
    local = fdsd.local_shards(fdsd.shard_with(wide)(fdsd.select("head.{_}")(expected)), rank)
    same(fdsd.local_shards(laid, rank), local)
    told = fdsd.describe(model)
    assert fdsd.ModelSpec.from_json(told.to_json()) == told and list(told.specs()) == list(expected)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, told.to_json())
    if way != "fsdp2 and tp":  # where dense weights lie on each rank's own part of the mesh
        assert len(set(every)) == 1


def in_place(way: str, rank: int) -> None:
    """A live model into itself, with its parts in other places; and a copy of it, without the other ranks."""
    model, _ = build(way)
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer, 1)
    before = fdsd.snapshot(fdsd.materialize(fdsd.capture(model, optimizer), group=world()))
    kept = fdsd.snapshot(fdsd.capture(model, optimizer))
    turn = fdsd.rename_fqns({"layers.0.{x...}": "layers.1.{x...}", "layers.1.{x...}": "layers.0.{x...}"}) >> fdsd.pipe(
        fdsd.rename_fqns(
            {"layers.{i}.up.weight": "layers.{i}.down.weight", "layers.{i}.down.weight": "layers.{i}.up.weight"}
        ),
        fdsd.transpose(["layers.{_}.up.weight", "layers.{_}.down.weight"]),
    )
    for staged in (False, True):
        live = fdsd.capture(model, optimizer)
        turned = fdsd.materialize(turn(before), group=world())
        fdsd.restore(turn(live), model, optimizer, group=world(), staged=staged)
        same_columns(fdsd.materialize(fdsd.capture(model, optimizer), group=world()), turned)
        step(model, optimizer, 3)
        fdsd.restore(kept, model, optimizer, staged=staged)
        same_columns(fdsd.materialize(fdsd.capture(model, optimizer), group=world()), before)


def trains_on(way: str, path: Path, rank: int, *, staged: bool) -> None:
    """A file that each rank reads for itself: training goes on as if nothing had happened."""
    first, expected = build(way)
    optimizer = torch.optim.AdamW(first.parameters(), lr=0.01)
    step(first, optimizer, 1)
    saved = fdsd.materialize(fdsd.capture(first, optimizer), group=world())
    if rank == 0:
        fdsd.save(saved.model, path)
    dist.barrier()
    second, _ = build(way, seed=7)
    other = torch.optim.AdamW(second.parameters(), lr=9.0)
    step(second, other, 5)
    report = fdsd.restore(fdsd.TrainState(fdsd.open(path), saved.optim), second, other, staged=staged)
    assert report.missing == report.unexpected == report.left_on_meta == () and set(report.loaded) == set(expected)
    assert other.param_groups[0]["lr"] == 0.01
    for seed in (2, 3):
        step(first, optimizer, seed)
        step(second, other, seed)
    a, b = [fdsd.materialize(fdsd.capture(m, o), group=world()) for m, o in ((first, optimizer), (second, other))]
    same_columns(b, a)


def from_rank_0(way: str, rank: int, *, staged: bool) -> None:
    """What one rank has alone reaches all: the model, the optimizer's state, its options, and objects."""
    first, _ = build(way)
    optimizer = torch.optim.AdamW(first.parameters(), lr=0.01, betas=(0.5, 0.75))
    step(first, optimizer, 1)
    saved = fdsd.materialize(fdsd.capture(first, optimizer), group=world())
    second, _ = build(way, seed=7)
    other = torch.optim.AdamW(second.parameters(), lr=9.0)
    given: Any = saved if rank == 0 else {}
    report = fdsd.restore(given, second, other, group=world(), staged=staged)
    assert report.missing == report.unexpected == ()
    assert other.param_groups[0]["lr"] == 0.01 and other.param_groups[0]["betas"] == (0.5, 0.75)
    same_columns(fdsd.materialize(fdsd.capture(second, other), group=world()), saved)


def fills_meta(way: str, path: Path, rank: int) -> None:
    """A file, through a pipeline, straight into a model without memory."""
    model, expected = build(way, device="meta")
    if rank == 0:
        fdsd.save(P(expected), path)
    dist.barrier()
    fdsd.restore((~P)(fdsd.open(path)), model)
    assert not any(p.is_meta for p in [*model.parameters(), *model.buffers()])
    same(fdsd.materialize(fdsd.capture(model).model, group=world()), expected)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x = torch.arange(20.0).view(4, 5) / 7
    if FORWARD and "compile" not in way:
        plain, _ = build("plain")
        whole = model(x)
        assert torch.allclose(getattr(whole, "full_tensor", lambda: whole)(), plain(x), atol=1e-5)
    step(model, optimizer, 1)
    half, _ = build(way, device="meta")
    state = {name: value.bfloat16() for name, value in expected.items()}
    with pytest.raises(FdsdError, match="dtype="):
        fdsd.restore(state, half, group=world())
    assert all(p.is_meta for p in half.parameters())
    fdsd.restore(state, half, dtype="source")
    same(fdsd.materialize(fdsd.capture(half).model, group=world()), state)
    if FORWARD and "compile" not in way:
        assert half(x.bfloat16()).dtype is torch.bfloat16


def all_of_it(rank: int, way: str, folder: str) -> None:
    model, expected = build(way)
    in_place(way, rank)
    reads(way, model, expected, Path(folder) / "read.safetensors", rank)
    staged = list(WAYS).index(way) % 2 == 0  # in turn: half of the ways by each, and each way by both
    trains_on(way, Path(folder) / "train.safetensors", rank, staged=staged)
    from_rank_0(way, rank, staged=not staged)
    if way in META:
        fills_meta(way, Path(folder) / "meta.safetensors", rank)


@pytest.mark.parametrize("way", WAYS)
def test_a_model_in_every_layout(way: str, tmp_path: Path) -> None:
    run_ranks(all_of_it, num_ranks(way), way, str(tmp_path), timeout=120)


def moves_between(rank: int) -> None:
    """From one live model straight into another that lies otherwise."""
    ways = ["fsdp2", "tp", "fsdp1", "fsdp2 and tp", "fsdp1, flat", "hsdp", "plain", "fsdp2"]
    for source, target in itertools.pairwise(ways):
        first, second = build(source)[0], build(target, seed=3)[0]
        a, b = [torch.optim.Adam(model.parameters()) for model in (first, second)]
        step(first, a, 1)
        expected = fdsd.materialize(fdsd.capture(first, a), group=world())
        fdsd.restore(fdsd.capture(first, a), second, b, group=world())
        same_columns(fdsd.materialize(fdsd.capture(second, b), group=world()), expected)


def test_one_live_model_into_another() -> None:
    run_ranks(moves_between, 4, timeout=120)


# -- without a group ---------------------------------------------------------------------------------------------------


def without_group(rank: int) -> None:
    model, _ = build("fsdp2")
    state = fdsd.capture(model).model
    lazy = fdsd.transpose("head.weight")(state)
    with pytest.raises(FdsdError, match="group="):
        fdsd.materialize(lazy)
    other, expected = build("plain", seed=2)
    with pytest.raises(FdsdError, match="group="):
        fdsd.restore(state, other, staged=True)
    same(other.state_dict(), expected)
    fdsd.restore(state, build("fsdp2", seed=4)[0])  # laid out alike: nothing has to travel


def test_a_local_call_that_needs_another_rank_says_so() -> None:
    run_ranks(without_group, 2)
