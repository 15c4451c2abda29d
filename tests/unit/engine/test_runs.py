"""Runs of bytes for the kernel: whichever way bytes go, by the kernel or through memory, they are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fdsd
from fdsd.algebra.plan import plan_of
from fdsd.engine import runs
from fdsd.engine.runs import copy_runs
from fdsd.storage.drafts import Draft
from fdsd.storage.files import Extent, OpenFiles
from fdsd.storage.safetensors_sink import SafetensorsSink
from fdsd.storage.safetensors_source import SafetensorsSource
from tests.helpers.tensors import patterns

from .conftest import assert_same_state

ALWAYS, NEVER = 1, 1 << 60
PARTS = ["w.0", "w.1", "w.2"]
CUBES = {name: patterns((4, 4, 4), torch.int16, seed) for seed, name in enumerate(PARTS)}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "x.safetensors"
    fdsd.save({**CUBES, "scalar": torch.tensor(7), "none": torch.empty(0, 4)}, path)
    return path


class Copies:
    """Counts what the kernel is asked to copy."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes = 0
        self.calls = 0
        copy = Draft.copy

        def counted(draft: Draft, extent: Extent, offset: int, sources: OpenFiles) -> None:
            self.bytes += extent.nbytes
            self.calls += 1
            copy(draft, extent, offset, sources)

        monkeypatch.setattr(Draft, "copy", counted)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Copies:
    return Copies(monkeypatch)


dims = st.integers(0, 2)


@st.composite
def moves(draw: st.DrawFn) -> fdsd.Pipeline:
    """Steps that move the elements of three cubes into one tensor ``w``, or into several."""
    steps: list[fdsd.Pipeline] = []
    for _ in range(draw(st.integers(0, 2))):
        which = draw(st.sampled_from(["w.{_}", "w.1"]))
        steps.append(
            draw(
                st.one_of(
                    st.builds(fdsd.transpose, st.just(which), dims, dims),
                    st.builds(fdsd.permute, st.just(which), st.permutations([0, 1, 2])),
                    st.builds(fdsd.index_select, st.just(which), st.permutations([0, 1, 2, 3]), dim=dims),
                    st.just(fdsd.rename_fqns({"w.0": "w.2", "w.2": "w.0"})),
                )
            )
        )
    dim, order = draw(dims), draw(st.permutations(PARTS))
    steps.append(
        draw(
            st.sampled_from(
                [
                    fdsd.identity,
                    fdsd.stack("w.{i}", "w", dim=dim),
                    fdsd.concat(order, "w", dim=dim),
                    fdsd.concat(order, "w", dim=dim, groups=2),
                    fdsd.concat(order, "w", dim=dim) >> fdsd.crop("w", 7, dim=dim),
                    fdsd.concat(order, "w", dim=dim) >> fdsd.split("w", ["p", "w", "q"], dim=dim, sizes=[1, 6, 5]),
                    fdsd.concat(order, "w", dim=dim) >> fdsd.reshape("w", (2, -1)),
                    fdsd.concat(order, "w", dim=dim) >> fdsd.transpose("w", 0, 1),
                ]
            )
        )
    )
    return fdsd.pipe(*steps)


@given(moves(), st.sampled_from([0, 1 << 10, "256MB"]))
@settings(max_examples=150)
def test_both_ways_give_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory, source: Path, p: fdsd.Pipeline, budget: int | str
) -> None:
    folder = tmp_path_factory.mktemp("ways")
    lazy = p(fdsd.select(*PARTS)(fdsd.open(source)))
    expected = p(CUBES)
    for name, shortest in (("kernel", ALWAYS), ("memory", NEVER)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runs, "_SHORTEST", shortest)
            fdsd.save(lazy, folder / name, budget=budget)
        assert_same_state(fdsd.open(folder / name), expected)
    one, other = (SafetensorsSource(folder / name).metadata for name in ("kernel", "memory"))
    assert one == other


EIGHT = 4 * 4 * 4 * 2
"""The bytes of a cube."""


@pytest.mark.parametrize(
    "p, calls",
    [
        (fdsd.identity, 1),  # neighbours on both sides are one copy
        (fdsd.rename_fqns({"w.{i}": "v.{i}"}), 1),
        (fdsd.concat(PARTS, "w", dim=0), 3),
        (fdsd.concat(PARTS, "w", dim=0, groups=2), 6),
        (fdsd.concat(PARTS, "w", dim=1), 3 * 4),
        (fdsd.concat(PARTS, "w", dim=2), 3 * 16),
        (fdsd.stack("w.{i}", "w", dim=0), 3),
        (fdsd.stack("w.{i}", "w", dim=1), 3 * 4),
        (fdsd.reshape("w.{_}", (8, -1)), 3),
        (fdsd.permute("w.{_}", (0, 1, 2)), 3),
        (fdsd.permute("w.{_}", (1, 0, 2)), 3 * 16),
        (fdsd.split("w.0", ["w.0", "w.3"], dim=0, sizes=[1, 3]), 3),
        (fdsd.index_select("w.{_}", [2, 0, 3, 1]), 3 * 4),
    ],
    ids=repr,
)
def test_the_kernel_copies_runs_as_long_as_they_can_be(
    tmp_path: Path, source: Path, copies: Copies, monkeypatch: pytest.MonkeyPatch, p: fdsd.Pipeline, calls: int
) -> None:
    monkeypatch.setattr(runs, "_SHORTEST", ALWAYS)
    fdsd.save(p(fdsd.select(*PARTS)(fdsd.open(source))), tmp_path / "x.safetensors")
    assert (copies.bytes, copies.calls) == (3 * EIGHT, calls)
    assert_same_state(fdsd.open(tmp_path / "x.safetensors"), p(CUBES))


@pytest.mark.parametrize(
    "p",
    [
        fdsd.cast(torch.int32, "w.{_}"),
        fdsd.transpose("w.{_}"),
        fdsd.concat(PARTS, "w", dim=2),  # rows of 8 bytes, which no system call is worth
        fdsd.pad("w.{_}", 5),
        fdsd.add_scalar("w.{_}", 1),
        fdsd.map_tensors(lambda t: t + 1, "w.{_}"),
    ],
    ids=repr,
)
def test_what_is_no_run_goes_through_memory(tmp_path: Path, source: Path, copies: Copies, p: fdsd.Pipeline) -> None:
    fdsd.save(p(fdsd.select(*PARTS)(fdsd.open(source))), tmp_path / "x.safetensors")
    assert copies.calls == 0
    assert_same_state(fdsd.open(tmp_path / "x.safetensors"), p(CUBES))


def test_a_whole_small_tensor_is_a_run_and_an_empty_one_is_none(tmp_path: Path, source: Path, copies: Copies) -> None:
    state = fdsd.select("scalar", "none")(fdsd.open(source))
    fdsd.save(state, tmp_path / "x.safetensors")
    assert (copies.bytes, copies.calls) == (8, 1)
    assert_same_state(fdsd.open(tmp_path / "x.safetensors"), {"scalar": torch.tensor(7), "none": torch.empty(0, 4)})


def test_runs_say_which_bytes_go_where(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "_SHORTEST", ALWAYS)
    state: Any = fdsd.concat(["w.1", "w.0"], "w", dim=0, groups=2)(fdsd.select("w.0", "w.1")(fdsd.open(source)))
    found = copy_runs(plan_of([state["w"]]))
    assert found is not None
    data = source.read_bytes()
    made = bytearray(2 * EIGHT)
    for run in found:
        made[run.offset : run.offset + run.extent.nbytes] = data[run.extent.offset :][: run.extent.nbytes]
    blocks = [CUBES["w.1"][:2], CUBES["w.0"][:2], CUBES["w.1"][2:], CUBES["w.0"][2:]]
    assert made == torch.cat(blocks).numpy().tobytes()
    assert sorted(run.offset for run in found) == [0, 64, 128, 192]


def test_tensors_in_memory_have_no_runs() -> None:
    assert copy_runs(plan_of([fdsd.defer(CUBES)["w.0"]])) is None


SMALL = {f"layers.{i}.w": patterns((256, 8), torch.int16, i) for i in range(40)}


@pytest.mark.parametrize("name", ["x.safetensors", "folder"])
def test_a_rename_keeps_every_byte_at_its_place_in_a_page(tmp_path: Path, name: str) -> None:
    with SafetensorsSink.create(tmp_path / "in.safetensors", fdsd.specs(SMALL), metadata={"n": "n" * 777}) as sink:
        for fqn, leaf in SMALL.items():
            sink.write(fqn, 0, leaf)
    p = fdsd.rename_fqns({"layers.{i}.w": "a.much.longer.name.{i}.w"})
    fdsd.save(p(fdsd.open(tmp_path / "in.safetensors")), tmp_path / name)
    source, target = SafetensorsSource(tmp_path / "in.safetensors"), SafetensorsSource(tmp_path / name)
    for fqn in SMALL:
        there = target.extent(fqn.replace("layers", "a.much.longer.name")).offset
        assert (source.extent(fqn).offset - there) % 4096 == 0
    assert_same_state(fdsd.open(tmp_path / name), p(SMALL))


@given(st.permutations(list(SMALL)[:6]), st.integers(0, 6), st.sampled_from(["5GB", 4096, 3 * 4096]))
@settings(max_examples=40)
def test_any_order_and_any_shards_give_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory, order: list[str], filled: int, size: int | str
) -> None:
    folder = tmp_path_factory.mktemp("order")
    fdsd.save(SMALL, folder / "in", max_shard_size=20_000)
    found = fdsd.open(folder / "in")
    state: dict[str, Any] = {name: found[name] for name in order}
    for name in order[:filled]:
        state[name] = fdsd.add_scalar(name, 1)({name: found[name]})[name]
    expected = {name: SMALL[name] + (name in order[:filled]) for name in order}
    fdsd.save(state, folder / "out", max_shard_size=size)
    assert_same_state(fdsd.open(folder / "out"), expected)


def test_progress_advances_with_merged_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    monkeypatch.setattr("fdsd.engine.progress.Progress.advance", lambda self, count: counts.append(count))
    monkeypatch.setattr("fdsd.storage.slots._PART", 10_000)
    fdsd.save(SMALL, tmp_path / "in.safetensors")
    counts.clear()
    fdsd.save(fdsd.open(tmp_path / "in.safetensors"), tmp_path / "out.safetensors")
    assert sum(counts) == 40 * 4096 and max(counts) == 10_000
    assert_same_state(fdsd.open(tmp_path / "out.safetensors"), SMALL)


def test_a_tensor_of_many_runs_is_planned_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "_SHORTEST", ALWAYS)
    monkeypatch.setattr("fdsd.engine.streaming._REMEMBERED", 3)
    fdsd.save(SMALL, tmp_path / "in.safetensors")
    p = fdsd.concat(list(SMALL), "w", dim=0) >> fdsd.reshape("w", (-1, 64))
    fdsd.save(p(fdsd.open(tmp_path / "in.safetensors")), tmp_path / "out.safetensors")
    assert_same_state(fdsd.open(tmp_path / "out.safetensors"), p(SMALL))
