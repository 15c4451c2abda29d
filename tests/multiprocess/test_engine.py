"""The engine over real ranks: what is captured, brought together, streamed, saved and restored, however it lies."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fdsd
from fdsd import Sharded
from fdsd.errors import FdsdError, RankDisagreement, SpecMismatch, UnknownName
from fdsd.layout import Layout, Mesh, Replicate, Shard
from tests.helpers.parallelism import WAYS, build, num_ranks
from tests.helpers.ranks import run_ranks

CASES = [(way, n) for way in WAYS for n in num_ranks(way)]
P = fdsd.rename_fqns({"layers.{i}.{rest...}": "h.{i}.{rest...}"}) >> fdsd.transpose("h.{_}.up.weight")


def same(found: Mapping[str, Any], expected: Mapping[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def step(model: Any, optimizer: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    optimizer.zero_grad()
    model(torch.randn(4, 5)).square().sum().backward()
    optimizer.step()


# -- reading ---------------------------------------------------------------------------------------------------------


def reads(rank: int, way: str, path: str) -> None:
    model, expected = build(way)
    state = fdsd.capture(model).model
    world = dist.group.WORLD
    same(fdsd.materialize(state, group=world), expected)
    same(fdsd.materialize(P(state), group=world), fdsd.materialize(P(expected)))
    same(dict(fdsd.stream(state, group=world, budget="1KB")), expected)
    last = dist.get_world_size() - 1
    one = fdsd.materialize(fdsd.gather(to=last)(state), group=world)
    same(one, expected if rank == last else {})
    same(dict(fdsd.stream(state, to=last, group=world)), expected if rank == last else {})
    fdsd.save(P(state), path, group=world, budget="1KB")
    same(fdsd.materialize((~P)(fdsd.open(path))), expected)
    wide = Layout(Mesh({"x": dist.get_world_size()}), [Shard(0)])
    laid = fdsd.materialize(fdsd.reshard({"head.{_}": wide})(fdsd.select("head.{_}")(state)), group=world)
    local = fdsd.local_shards(fdsd.shard_with(wide)(fdsd.select("head.{_}")(expected)), rank)
    same(fdsd.local_shards(laid, rank), local)


@pytest.mark.parametrize("way, n", CASES)
def test_a_live_model_reads_as_the_unwrapped_one(way: str, n: int, tmp_path: Path) -> None:
    run_ranks(reads, n, way, str(tmp_path / "model.safetensors"))


def writes_torch(rank: int, path: str) -> None:
    model, _ = build("fsdp2")
    fdsd.save(fdsd.gather(to=1)(fdsd.capture(model).model), path, group=dist.group.WORLD)


def test_a_torch_file_over_ranks(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    run_ranks(writes_torch, 2, str(path))
    found = torch.load(path)
    expected = build("plain")[1]
    same(found, expected)


# -- writing ---------------------------------------------------------------------------------------------------------


def restores(rank: int, way: str, path: str, staged: bool) -> None:
    first, expected = build(way)
    optimizer = torch.optim.AdamW(first.parameters(), lr=0.01)
    step(first, optimizer, 1)
    world = dist.group.WORLD
    saved = fdsd.materialize(fdsd.capture(first, optimizer), group=world)
    fdsd.save(saved.model, path) if rank == 0 else None
    dist.barrier()
    second, _ = build(way, seed=7)
    other = torch.optim.AdamW(second.parameters(), lr=9.0)
    step(second, other, 5)
    file = fdsd.TrainState(fdsd.open(path), saved.optim)
    report = fdsd.restore(file, second, other, staged=staged)  # each rank reads what it needs; nothing is sent
    assert report.missing == report.unexpected == report.left_on_meta == () and set(report.loaded) == set(expected)
    assert other.param_groups[0]["lr"] == 0.01
    for seed in (2, 3):
        step(first, optimizer, seed)
        step(second, other, seed)
    both = [fdsd.materialize(fdsd.capture(m, o), group=world) for m, o in ((first, optimizer), (second, other))]
    same(both[1].model, both[0].model)
    for slot, column in both[0].optim.slots.items():
        same(both[1].optim.slots[slot], column)


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("way, n", CASES)
def test_training_goes_on_as_if_nothing_had_happened(way: str, n: int, staged: bool, tmp_path: Path) -> None:
    run_ranks(restores, n, way, str(tmp_path / "model.safetensors"), staged)


def moves_between(rank: int, source: str, target: str) -> None:
    """From one live model straight into another that lies otherwise."""
    first, expected = build(source)
    second, _ = build(target, seed=3)
    fdsd.restore(fdsd.capture(first).model, second, group=dist.group.WORLD)
    same(fdsd.materialize(fdsd.capture(second).model, group=dist.group.WORLD), expected)


@pytest.mark.parametrize(
    "source, target",
    [("fsdp2", "tp"), ("tp", "fsdp1"), ("fsdp1, flat", "fsdp2 and tp"), ("fsdp2 and tp", "hsdp"), ("hsdp", "plain")],
)
def test_one_live_model_into_another(source: str, target: str) -> None:
    run_ranks(moves_between, 4, source, target)


def fills_meta(rank: int, way: str, path: str) -> None:
    model, expected = build(way, device="meta")
    state = (~P)(fdsd.open(path))
    fdsd.restore(state, model)
    assert not any(p.is_meta for p in [*model.parameters(), *model.buffers()])
    same(fdsd.materialize(fdsd.capture(model).model, group=dist.group.WORLD), expected)


@pytest.mark.parametrize("way", ["plain", "fsdp2", "tp", "fsdp2 and tp", "hsdp"])
def test_a_file_straight_into_a_model_on_meta(way: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    fdsd.save(P(build("plain")[1]), path)
    run_ranks(fills_meta, 4, way, str(path))


# -- what goes wrong -------------------------------------------------------------------------------------------------


def bad_inputs(rank: int) -> list[tuple[str, str]]:
    model, expected = build("fsdp2")
    told: list[tuple[str, str]] = []
    cases: list[dict[str, torch.Tensor]] = [
        {name: value for name, value in expected.items() if rank or name != "head.bias"},  # missing on one rank
        {**expected, **({"stray": torch.ones(1)} if rank else {})},
        {**expected, "head.weight": torch.ones(5, 3)},
        {**expected, "head.weight": expected["head.weight"].double() if rank else expected["head.weight"]},
        {**expected, "scale": torch.ones(1)},
    ]
    for state in cases:
        with pytest.raises(FdsdError) as caught:
            fdsd.restore(state, model, group=dist.group.WORLD)
        told.append((type(caught.value).__name__, str(caught.value)))
    same(fdsd.materialize(fdsd.capture(model).model, group=dist.group.WORLD), expected)
    return told


def test_what_does_not_fit_is_the_same_error_on_all_ranks_and_changes_nothing() -> None:
    found = run_ranks(bad_inputs, 3)
    assert found[0] == found[1] == found[2]
    kinds, texts = zip(*found[0], strict=True)
    assert kinds == ("UnknownName", "UnknownName", "SpecMismatch", "SpecMismatch", "SpecMismatch")
    assert "rank 0" in texts[0] and "'head.bias'" in texts[0] and "'stray'" in texts[1] and "[5, 3]" in texts[2]


def one_raises(rank: int, staged: bool) -> list[str]:
    model, expected = build("fsdp2")

    def double(x: torch.Tensor) -> torch.Tensor:
        if rank == 1:
            raise ArithmeticError("not today")
        return x * 2

    state = fdsd.map_tensors(double, "head.weight", spec=fdsd.TensorSpec((3, 5), torch.float32))(fdsd.defer(expected))
    zeros = fdsd.drop("head.weight")(expected)
    state = fdsd.combine(fdsd.select("head.weight")(state), {k: v * 0 for k, v in zeros.items()})
    with pytest.raises(FdsdError, match="not today") as caught:
        fdsd.restore(state, model, group=dist.group.WORLD, staged=staged)
    if staged:
        same(fdsd.materialize(fdsd.capture(model).model, group=dist.group.WORLD), expected)
    return [str(caught.value).split(" (")[0]]


@pytest.mark.parametrize("staged", [False, True])
def test_a_function_that_raises_on_one_rank(staged: bool) -> None:
    found = run_ranks(one_raises, 3, staged)
    assert found[0] == found[1] == found[2] and "rank 1" in found[0][0] and "head.weight" in found[0][0]


def closes_early(rank: int) -> int:
    model, _ = build("fsdp2")
    seen = 0
    items = fdsd.stream(fdsd.capture(model).model, group=dist.group.WORLD, budget=1)
    for _ in items:
        seen += 1
        if rank == 1 and seen == 2:
            items.close()  # type: ignore[attr-defined]  # it is a generator
            break
    dist.barrier()
    return seen


def test_closing_a_stream_early_ends_it_on_all_ranks() -> None:
    found = run_ranks(closes_early, 3)
    assert found[1] == 2 and all(seen < len(build("plain")[1]) for seen in found)


def streams_often(rank: int) -> tuple[int, int]:
    from fdsd.engine.wirings import WIRINGS

    model, expected = build("fsdp2")
    state = fdsd.capture(model).model
    dict(fdsd.stream(state, group=dist.group.WORLD))
    before = WIRINGS.info().misses
    for _ in range(100):
        for name, value in fdsd.stream(fdsd.capture(model).model, group=dist.group.WORLD):
            assert torch.equal(value, expected[name])
    return before, WIRINGS.info().misses


def test_a_hundred_streams_are_planned_once() -> None:
    assert all(before == after > 0 for before, after in run_ranks(streams_often, 2))


# -- names that differ by rank ---------------------------------------------------------------------------------------


def stages(rank: int, path: str) -> None:
    torch.manual_seed(0)
    whole = {f"layers.{i}.weight": torch.randn(3, 4) for i in range(4)}
    mine = {name: value for i, (name, value) in enumerate(whole.items()) if i % 2 == rank % 2}
    world = dist.group.WORLD
    found = fdsd.materialize(mine, group=world)
    assert set(found) == set(whole) and all(torch.equal(found[name], whole[name]) for name in whole)
    fdsd.save(fdsd.add_prefix("model.")(mine), path, group=world)
    back = fdsd.materialize(fdsd.drop_prefix("model.")(fdsd.open(path)))
    assert set(back) == set(whole) and all(torch.equal(back[name], whole[name]) for name in whole)
    conflict = {"w": torch.ones(2 + rank)}
    with pytest.raises(RankDisagreement, match="'w'"):
        fdsd.materialize(conflict, group=world)


def test_pipeline_stages_have_other_names_on_other_ranks(tmp_path: Path) -> None:
    run_ranks(stages, 4, str(tmp_path / "model.safetensors"))


def other_order(rank: int) -> None:
    whole = {f"w{i}": torch.full((2, 3), float(i)) + torch.arange(6).view(2, 3) * 10 for i in range(5)}
    layout = Layout(Mesh({"x": 3}), [Shard(0)])
    names = list(whole) if rank != 1 else list(reversed(whole))
    laid = fdsd.shard_with(layout)(whole)
    mine = {name: Sharded(laid[name].spec, layout, shards={rank: laid[name].shard(rank)}) for name in names}
    found = fdsd.materialize(fdsd.gather()(mine), group=dist.group.WORLD)
    assert all(torch.equal(found[name], whole[name]) for name in whole)


def test_ranks_with_other_orders_are_matched_by_name() -> None:
    run_ranks(other_order, 3)


# -- without a group -------------------------------------------------------------------------------------------------


def without_group(rank: int) -> None:
    model, _ = build("fsdp2")
    state = fdsd.capture(model).model
    lazy = fdsd.transpose("head.weight")(state)
    with pytest.raises(FdsdError, match="group="):
        fdsd.materialize(lazy)
    other, _ = build("plain", seed=2)
    with pytest.raises(FdsdError, match="group="):
        fdsd.restore(state, other)


def test_a_local_call_that_needs_another_rank_says_so() -> None:
    run_ranks(without_group, 2)


def test_restore_in_one_process_reports_and_refuses() -> None:
    model, expected = build("plain")
    with pytest.raises(UnknownName, match=r"'head.bias'.*'head.bais'"):
        fdsd.restore(fdsd.rename_fqns({"head.bias": "head.bais"})(expected), model)
    report = fdsd.restore(fdsd.drop("head.{_}")(expected), model, allow_missing="head.{_}")
    assert report.missing == ("head.weight", "head.bias")
    report = fdsd.restore({**expected, "x": torch.ones(1)}, model, allow_unexpected=["x"])
    assert report.unexpected == ("x",)
    with pytest.raises(SpecMismatch, match=r"head.weight.*float64.*float32.*dtype="):
        fdsd.restore({**expected, "head.weight": expected["head.weight"].double()}, model)
    half = {name: value.bfloat16() for name, value in expected.items()}
    fdsd.restore(half, model, dtype="target")
    assert model.head.weight.dtype is torch.float32
    assert torch.equal(model.head.weight, half["head.weight"].float())
    fdsd.restore(half, model, dtype="source")
    assert model.head.weight.dtype is torch.bfloat16 and model.head.weight.requires_grad
    fdsd.restore(fdsd.drop("head.{_}")(half), model, filter=fdsd.drop("head.{_}"))
    with pytest.raises(SpecMismatch, match="only leave names out"):
        fdsd.restore(half, model, filter=fdsd.add_prefix("x."))


def test_the_layout_of_a_whole_tensor_on_one_rank() -> None:
    laid = fdsd.gather(to=3)({"w": torch.ones(2)})["w"]
    assert laid.layout == Layout(Mesh({"rank": 1}, [3]), [Replicate()])
