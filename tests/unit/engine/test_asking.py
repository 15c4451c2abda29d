"""Ranks that ask for different things, or with different budgets, at the same time: no wrong values, and no hang."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fdsd
from fdsd.data.errors import FdsdError, RankDisagreement, Unsupported
from fdsd.engine.failures import RankFailed
from fdsd.engine.unions import everyone, together
from fdsd.layout import Layout, Mesh, Shard
from tests.helpers.worlds import MemoryWorld, run_world


class Scale:
    """A function with a state, which can be pickled."""

    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.by

    def method(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.by


class Fill:
    """Makes a tensor of one number."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __call__(self, spec: fdsd.TensorSpec) -> torch.Tensor:
        return torch.full(spec.shape, self.value, dtype=spec.dtype)


def times(x: torch.Tensor, by: Any) -> torch.Tensor:
    return torch.mul(x, by)


def kept(spec: fdsd.TensorSpec) -> fdsd.TensorSpec:
    return spec


MAKERS: dict[str, Callable[[float], Any]] = {
    "object": Scale,
    "method": lambda k: Scale(k).method,
    "partial": lambda k: partial(times, by=k),
    "partial of a tensor": lambda k: partial(times, by=torch.tensor(1 + k * 1e-6, dtype=torch.float64)),
}


def scaled(kind: str, state: dict[str, torch.Tensor]) -> Any:
    """Each tensor by a function of one class, with a state of its own."""
    steps = [fdsd.map_tensors(MAKERS[kind](i + 1.0), name, spec=kept) for i, name in enumerate(state)]
    return fdsd.pipe(*steps)


def small(num: int = 9, size: int = 300, first: float = 0) -> dict[str, torch.Tensor]:
    return {f"w{i}": torch.full((size,), first + i) for i in range(num)}


def mine(world: MemoryWorld, first: float = 0) -> dict[str, torch.Tensor]:
    return {name: x for i, (name, x) in enumerate(small(first=first).items()) if i % 2 == world.rank}


def equal(a: Any, b: Any) -> bool:
    return set(a) == set(b) and all(torch.equal(a[name], b[name]) for name in b)


def refused(world: MemoryWorld, call: Callable[[], Any]) -> str:
    """Give what all ranks raise; afterwards they work together as ever."""
    with pytest.raises(FdsdError) as caught:
        call()
    assert together(world, "afterwards", lambda: 1) == 1
    return f"{type(caught.value).__name__}: {caught.value}"


# -- functions with states ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MAKERS)
def test_functions_that_differ_in_their_state_alone(kind: str) -> None:
    """One rank has the checkpoint, and the functions travel; or each rank has a stage of its own."""
    state = {f"w{i}": torch.ones(2, dtype=torch.float64) for i in range(3)}
    expected = scaled(kind, state)(state)

    def one_has_it(world: MemoryWorld) -> Any:
        given = scaled(kind, state)(fdsd.defer(state)) if world.rank == 0 else {}
        return fdsd.materialize(given, group=world)

    def stages(world: MemoryWorld) -> Any:
        own = {f"s{world.rank}.{name}": x for name, x in state.items()}
        return fdsd.materialize(scaled(kind, own)(fdsd.defer(own)), group=world)

    assert all(equal(found, expected) for found in run_world(one_has_it, 2))
    staged = {f"s{rank}.{name}": x for rank in range(2) for name, x in expected.items()}
    assert all(equal(found, staged) for found in run_world(stages, 2))


def test_makers_of_new_tensors_that_differ_in_their_state_alone() -> None:
    def stages(world: MemoryWorld) -> Any:
        spec = fdsd.TensorSpec((2,), torch.float32)
        made = [fdsd.insert(f"s{world.rank}.{i}", spec, init=Fill(10 * world.rank + i)) for i in range(3)]
        return fdsd.materialize(fdsd.pipe(*made)({}), group=world)

    expected = {f"s{rank}.{i}": torch.full((2,), 10.0 * rank + i) for rank in range(2) for i in range(3)}
    assert all(equal(found, expected) for found in run_world(stages, 2))


@pytest.mark.parametrize("kind", MAKERS)
def test_ranks_that_mean_other_functions_by_one_name(kind: str) -> None:
    def other(world: MemoryWorld) -> str:
        state = {"w": torch.ones(2, dtype=torch.float64)}
        f = fdsd.map_tensors(MAKERS[kind](1.0 + world.rank), "w", spec=kept)
        return refused(world, lambda: fdsd.materialize(f(fdsd.defer(state)), group=world))

    (text,) = set(run_world(other, 2))
    assert text.startswith("RankDisagreement: The ranks state different things of 'w'")


# -- budgets -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budgets", [("1KB", None), (None, "1KB"), ("1KB", "100MB"), (None, None)])
def test_the_smallest_budget_counts(budgets: tuple[Any, Any]) -> None:
    """They may come from the free memory of each rank."""

    def work(world: MemoryWorld) -> int:
        given, budget = mine(world), budgets[world.rank]
        assert equal(fdsd.materialize(given, group=world, budget=budget), small())
        assert equal(dict(fdsd.stream(given, group=world, budget=budget or "1GB")), small())
        return world.agreements

    assert len(set(run_world(work, 2))) == 1


def test_a_checkpoint_is_cut_by_the_smallest_budget(tmp_path: Path) -> None:
    whole = {f"w{i}": torch.arange(100_000.0) + i for i in range(2)}

    def work(world: MemoryWorld) -> None:
        given = {f"w{world.rank}": whole[f"w{world.rank}"]}
        fdsd.save(given, tmp_path / "m.safetensors", group=world, budget=["1KB", "64MB"][world.rank])

    run_world(work, 2)
    assert equal(fdsd.materialize(fdsd.open(tmp_path / "m.safetensors")), whole)


# -- ranks that are out of step ----------------------------------------------------------------------------------------


def side_by_side(world: MemoryWorld, first: Any, second: Any) -> None:
    for _ in zip(first, second, strict=True):
        pass


OUT_OF_STEP: dict[str, tuple[Callable[[MemoryWorld], Any], list[str]]] = {
    "stream beside materialize": (
        lambda world: dict(fdsd.stream(small(), group=world)) if world.rank else fdsd.materialize(small(), group=world),
        ["rank 0: materialize", "rank 1: stream"],
    ),
    "streams to other ranks": (
        lambda world: dict(fdsd.stream(small(), to=world.rank, group=world)),
        ["rank 0: stream(to=0)", "rank 1: stream(to=1)"],
    ),
    "two streams to one rank side by side": (
        lambda world: side_by_side(
            world,
            fdsd.stream(mine(world), to=0, group=world, budget="2KB"),
            fdsd.stream(mine(world, 5), to=0, group=world, budget="2KB"),
        ),
        ["rank 0: stream", "rank 1: stream(to=0), number"],
    ),
    "everyone beside together": (
        lambda world: everyone(world, 1, "wishes") if world.rank else together(world, "deeds", lambda: 1),
        ["rank 0: deeds", "rank 1: wishes"],
    ),
}


@pytest.mark.parametrize("case", OUT_OF_STEP)
def test_ranks_that_ask_for_different_things(case: str) -> None:
    call, parts = OUT_OF_STEP[case]
    texts = set(run_world(lambda world: refused(world, lambda: call(world)), 2))
    assert len(texts) == 1
    text = texts.pop()
    assert text.startswith("RankDisagreement: The ranks of a group ask for different things")
    assert all(part in text for part in parts), text


def test_what_was_begun_before_the_ranks_were_out_of_step_has_ended() -> None:
    """Whether it is gone on with or let go of, and whether it has had its first step or not."""

    def work(world: MemoryWorld) -> list[str]:
        begun, fresh = (fdsd.stream(small(), group=world, budget=1) for _ in range(2))
        next(begun)
        with pytest.raises(RankDisagreement):
            together(world, f"deeds of rank {world.rank}", lambda: 1)
        told: list[str] = []
        for items in (begun, fresh):
            if world.rank:
                items.close()
            else:
                with pytest.raises(RankDisagreement) as caught:
                    next(items)
                told.append(str(caught.value))
        del begun, fresh
        assert equal(fdsd.materialize(mine(world), group=world), small())
        return told

    told, nothing = run_world(work, 2)
    assert len(told) == 2 and all("Begin it again" in text for text in told) and not nothing


def test_streams_that_the_garbage_collector_finds() -> None:
    """Nothing collective begins while it runs: the next word to the others comes first of all."""

    def work(world: MemoryWorld) -> int:
        items: Any = fdsd.stream(small(), group=world, budget=1)
        if world.rank:
            return len(list(items)) + together(world, "afterwards", lambda: 0)
        next(items)
        cycle: list[Any] = [items]
        cycle.append(cycle)
        before = world.agreements
        del items, cycle
        gc.collect()
        assert world.agreements == before
        return together(world, "afterwards", lambda: 0)

    gc.disable()
    try:
        none, seen = run_world(work, 2)
    finally:
        gc.enable()
    assert none == 0 and 0 < seen < len(small())


@pytest.mark.parametrize("how", ["used up", "closed", "closed before its first step", "let go of", "never begun"])
def test_a_stream_that_has_ended_leaves_no_hook_behind(how: str) -> None:
    before = list(gc.callbacks)

    def work(world: MemoryWorld) -> None:
        items: Any = fdsd.stream(small(), group=world, budget=1)
        if how == "used up":
            list(items)
            return
        if how not in ("closed before its first step", "never begun"):
            next(items)
        if how.startswith("closed"):
            items.close()
        del items

    run_world(work, 2)
    assert gc.callbacks == before


# -- what ranks raise --------------------------------------------------------------------------------------------------


class Odd(Exception):
    """A library's error with a fault of its own."""

    def __str__(self) -> str:
        raise KeyError("message")


def failing(world: MemoryWorld, error: BaseException) -> Any:
    def f(x: torch.Tensor) -> torch.Tensor:
        if world.rank == 1:
            raise error
        return x

    return fdsd.map_tensors(f, "a", spec=kept)(fdsd.defer({"a": torch.ones(2), "b": torch.ones(2)}))


def streamed(given: Any, world: MemoryWorld) -> Iterator[Any]:
    return iter(dict(fdsd.stream(given, group=world)))


@pytest.mark.parametrize("verb", [lambda x, world: fdsd.materialize(x, group=world), streamed])
def test_an_error_that_cannot_say_what_it_is(verb: Callable[[Any, MemoryWorld], Any]) -> None:
    texts = set(run_world(lambda world: refused(world, lambda: verb(failing(world, Odd()), world)), 2))
    assert texts == {"RankFailed: rank 1: 'a': Odd: <its text cannot be had: KeyError>"}


def stored(given: Any, world: MemoryWorld, path: Path) -> None:
    fdsd.save(fdsd.gather(to=1)(given), path, group=world)


INTERRUPTED: dict[str, Callable[[Any, MemoryWorld, Path], Any]] = {
    "materialize": lambda x, world, path: fdsd.materialize(x, group=world),
    "stream": lambda x, world, path: streamed(x, world),
    "save": lambda x, world, path: stored(x, world, path / "m.safetensors"),
    "save as torch": lambda x, world, path: stored(x, world, path / "m.pt"),
}


@pytest.mark.parametrize("verb", INTERRUPTED)
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_a_rank_that_is_interrupted_tells_the_others(verb: str, kind: type[BaseException], tmp_path: Path) -> None:
    def work(world: MemoryWorld) -> tuple[type[BaseException], bool]:
        with pytest.raises((RankFailed, kind)) as caught:
            INTERRUPTED[verb](failing(world, kind("now")), world, tmp_path)
        assert together(world, "afterwards", lambda: 1) == 1
        return type(caught.value), f"rank 1: 'a': {kind.__name__}: now" in str(caught.value)

    assert run_world(work, 2) == [(RankFailed, True), (kind, False)]
    assert not list(tmp_path.iterdir())


# -- what has to be equal, and is wanted where nobody is ---------------------------------------------------------------


SAVES: dict[str, tuple[list[dict[str, Any]], str]] = {
    "kinds": (
        [{"path": "m.safetensors"}, {"path": "m.pt"}],
        "path is '{}m.safetensors' on rank 0, '{}m.pt' on rank 1; format is 'safetensors' on rank 0, 'torch' on rank 1",
    ),
    "formats": (
        [{"path": "m", "format": "safetensors"}, {"path": "m", "format": "torch"}],
        "format is 'safetensors' on rank 0, 'torch' on rank 1",
    ),
    "paths": (
        [{"path": "model-0.safetensors"}, {"path": "model-1.safetensors"}],
        "path is '{}model-0.safetensors' on rank 0, '{}model-1.safetensors' on rank 1",
    ),
}


@pytest.mark.parametrize("case", SAVES)
def test_checkpoints_that_differ_by_rank(case: str, tmp_path: Path) -> None:
    given, told = SAVES[case]

    def work(world: MemoryWorld) -> str:
        how = {**given[world.rank]}
        path = tmp_path / how.pop("path")
        return refused(world, lambda: fdsd.save({"w": torch.ones(2)}, path, group=world, **how))

    folder = f"{tmp_path}/"
    assert set(run_world(work, 2)) == {
        f"RankDisagreement: save: the ranks ask for different things: {told.replace('{}', folder)}. Give all the same."
    }
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("num", [1, 2])
def test_tensors_that_are_wanted_on_ranks_outside_of_the_group(num: int) -> None:
    """A group of one rank is no different."""
    layout = Layout(Mesh({"dp": 4}), [Shard(0)])
    state = {"w": torch.arange(4.0)}

    def work(world: MemoryWorld) -> list[str]:
        return [
            refused(world, call)
            for call in (
                lambda: fdsd.materialize(fdsd.gather(to=3)(state), group=world),
                lambda: dict(fdsd.stream(state, to=3, group=world)),
                lambda: fdsd.materialize(fdsd.shard_with(layout)(state), group=world),
            )
        ]

    for texts in run_world(work, num):
        assert all("SpecMismatch" in text and "3, and the group has" in text for text in texts), texts


def test_a_process_alone_streams_to_no_other_rank() -> None:
    assert dict(fdsd.stream({"w": torch.ones(2)}, to=0)).keys() == {"w"}
    with pytest.raises(FdsdError, match=r"stream: tensors are wanted on rank 3, and this process, rank 0.*group="):
        dict(fdsd.stream({"w": torch.ones(2)}, to=3))


def test_a_name_that_looks_like_the_label_of_a_part(tmp_path: Path) -> None:
    whole = {"w": torch.arange(50_000.0), "w (part 0)": torch.ones(3), "w (part 1)": torch.arange(30_000.0)}

    def work(world: MemoryWorld) -> None:
        fdsd.save(whole, tmp_path / "m.safetensors", group=world, budget="1KB")

    run_world(work, 2)
    assert equal(fdsd.materialize(fdsd.open(tmp_path / "m.safetensors")), whole)


@pytest.mark.parametrize("error", [TimeoutError("slow"), FileNotFoundError(2, "No such file", "my.txt")])
def test_a_user_s_own_system_error_is_no_fault_of_the_disk(error: OSError) -> None:
    call = lambda world: fdsd.materialize(failing(world, error), group=world)  # noqa: E731
    (text,) = set(run_world(lambda world: refused(world, lambda: call(world)), 2))
    assert text == f"SystemFailed: rank 1: 'a': {type(error).__name__}: {error}"


KINDS: dict[str, Callable[[Any, MemoryWorld | None], Any]] = {
    "materialize": lambda x, world: fdsd.materialize(x, group=world),
    "stream": lambda x, world: dict(fdsd.stream(x, group=world)),
    "save": lambda x, world: fdsd.save(x, "never.safetensors", group=world),
    "restore": lambda x, world: fdsd.restore(x, nn.ParameterDict(dict.fromkeys(x, torch.ones(2, 2))), group=world),
    "defer": lambda x, world: fdsd.defer(x),
}


@pytest.mark.parametrize("verb", KINDS)
@pytest.mark.parametrize("num", [0, 2])
def test_all_tensors_of_a_kind_that_cannot_be_read_are_named(verb: str, num: int) -> None:
    state = {"ok": torch.ones(2, 2), "bad": torch.eye(2).to_sparse(), "worse": torch.eye(2).to_sparse()}

    def work(world: MemoryWorld | None) -> None:
        with pytest.raises(Unsupported, match=rf"{verb}: .*'bad'.*'worse'.*to_dense"):
            KINDS[verb](state, world)

    if num == 0 and verb == "materialize":
        assert fdsd.materialize(state)["bad"] is state["bad"], "what is here stays as it is"
    elif num:
        run_world(work, num)
    else:
        work(None)


@pytest.mark.parametrize("num", [0, 2])
def test_casts_that_cannot_be_done_are_named(num: int) -> None:
    state = {"a": torch.ones(2) * 1j, "b": torch.ones(2) * 1j, "ok": torch.ones(2)}

    def work(world: MemoryWorld | None) -> None:
        model = nn.ParameterDict(dict.fromkeys(state, torch.ones(2)))
        with pytest.raises(Unsupported, match=r"restore: 'a': .*imaginary.*'b': .*imaginary"):
            fdsd.restore(state, model, dtype="target", group=world)
        assert all(torch.equal(p, torch.ones(2)) for p in model.values())

    if num:
        run_world(work, num)
    else:
        work(None)


@pytest.mark.parametrize(
    "call, remedy",
    [
        (lambda: fdsd.save(fdsd.capture(nn.Linear(1, 1)), "never.pt"), r"save state\.model.*flatten_optim"),  # type: ignore[arg-type]
        (lambda: fdsd.materialize(nn.Linear(1, 1)), r"capture\(module\)"),  # type: ignore[call-overload]
        (lambda: fdsd.stream("m.safetensors"), r"open\(path\)"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_state_is_told_what_to_give(call: Callable[[], Any], remedy: str) -> None:
    with pytest.raises(Unsupported, match=remedy):
        call()
