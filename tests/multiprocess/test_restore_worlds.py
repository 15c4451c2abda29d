"""Saved on two ranks, restored on three and four where models lie otherwise, and in one process: through files alone.

What is restored equals what was saved, byte by byte; training goes on as it would have, but for the rounding of sums
that are taken over other numbers of ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attrs import evolve

import fdsd
from fdsd.compat.state_dict import StateDictOptions, get_state_dict, set_state_dict
from tests.helpers.optimizers import told
from tests.helpers.rank_trainings import Case, cache_meshes, can_change_what_trains, can_train
from tests.helpers.ranks import run_ranks

FULL = StateDictOptions(full_state_dict=True)
BROADCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
WAYS = [
    ("fsdp2", 3),
    ("fsdp2", 4),
    ("hsdp", 4),
    ("tp", 4),
    ("fsdp2 and tp", 4),
    ("ddp", 3),
    ("fsdp1", 3),
    ("fsdp1, flat", 4),
]
DOORS = ("engine", "nested", "flat")
SAVED = {
    "adam": Case("fsdp2", "Adam", "groups", FULL, "", tied=True),
    "nadam": Case("fsdp2", "NAdam", "one", FULL, ""),
    "momentum, frozen": Case("fsdp2", "SGD(momentum)", "two", FULL, "", freeze="at save"),
    "rmsprop, late": Case("fsdp2", "RMSprop(centered)", "part", FULL, "", late=True),
    "nested": Case("fsdp2", "Nested", "groups", FULL, "", tied=True),
    "sgd": Case("fsdp2", "SGD", "one", FULL, "", freeze="always"),
    "fresh": Case("fsdp2", "Adagrad", "one", FULL, "", steps=0),
}


def fits(case: Case, way: str) -> bool:
    """Whether a case can be trained on in another way."""
    if not can_train(way, case.optimizer) or (way == "fsdp1, flat" and (case.split != "one" or case.freeze)):
        return False
    return can_change_what_trains(way) or not (case.late or case.freeze == "at save")


def whole_state(run: Any) -> fdsd.TrainState:
    group = dist.group.WORLD if dist.is_initialized() else None
    return fdsd.materialize(fdsd.capture(*run), group=group)


def saves(rank: int, folder: str) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    cache_meshes()
    world, losses = dist.group.WORLD, {}
    for name, case in SAVED.items():
        place = Path(folder) / name
        place.mkdir(exist_ok=True)
        run = case.begun()
        state = fdsd.capture(*run)
        assert state.optim is not None
        tensors = fdsd.drop("_extra_state")(state.model)
        fdsd.save(tensors, place / "model", group=world, max_shard_size=700, budget="1KB")
        fdsd.save(fdsd.flatten_optim()(state.optim), place / "optim.pt", group=world)
        whole = whole_state(run)
        nested = get_state_dict(*run, options=evolve_options(cpu_offload=True))
        flat = get_state_dict(*run, options=evolve_options(cpu_offload=True, flatten_optimizer_state_dict=True))
        assert bool(nested[0]) == bool(flat[1]) == (rank == 0)
        if rank == 0:
            torch.save(whole.optim, place / "like.pt")
            torch.save({"model": nested[0], "nested": nested[1], "flat": flat[1]}, place / "compat.pt")
        state_told = told({**whole.model}), told(whole.optim.to_torch())  # type: ignore[union-attr]
        losses[name] = case.goes_on(run), *state_told  # told first, since what is not spread is the live memory
    return losses


def evolve_options(**changes: Any) -> StateDictOptions:
    return StateDictOptions(**{**vars(FULL), **changes})


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """Save all cases on two ranks; give the folder, the losses that followed, and what the states were."""
    folder = tmp_path_factory.mktemp("saved")
    found = run_ranks(saves, 2, str(folder), timeout=200)
    assert found[0] == found[1]
    return str(folder), found[0]


def by_engine(case: Case, run: Any, place: Path) -> None:
    like = torch.load(place / "like.pt", weights_only=False)
    optim = fdsd.unflatten_optim(like=like)(fdsd.open(place / "optim.pt"))
    report = fdsd.restore(
        fdsd.TrainState(fdsd.open(place / "model"), optim), *run, allow_missing="_extra_state", staged=case.tied
    )
    assert report.missing == ("_extra_state",) and report.unexpected == report.left_on_meta == ()


def by_compat(run: Any, place: Path, form: str, rank: int) -> None:
    """Every rank reads the file, or rank 0 does for all."""
    options = BROADCAST if form == "nested" else evolve_options(strict=False)
    if rank and options.broadcast_from_rank0:
        weights, state = {}, {}
    else:
        file = torch.load(place / "compat.pt", weights_only=False)
        weights, state = file["model"], file[form]
    found = set_state_dict(*run, model_state_dict=weights, optim_state_dict=state, options=options)
    assert (found.missing_keys, found.unexpected_keys) == ([], [])


def tried(way: str, n: int) -> Iterator[tuple[str, str]]:
    """Give cases and doors: in one process all; over ranks the doors take turns, so that ways and cases meet each."""
    fitting = [name for name, case in SAVED.items() if fits(case, way)]
    if n == 1:
        return itertools.product(fitting, DOORS)
    start = WAYS.index((way, n)) % len(DOORS)
    doors = itertools.islice(itertools.cycle(DOORS), start, start + max(len(fitting), len(DOORS)))
    return zip(itertools.cycle(fitting), doors, strict=False)


def restores(rank: int, way: str, folder: str, expected: dict[str, Any]) -> None:
    torch.set_default_dtype(torch.float64)
    cache_meshes()
    for name, door in tried(way, dist.get_world_size() if dist.is_initialized() else 1):
        case, place = evolve(SAVED[name], way=way), Path(folder) / name
        losses, model, optim = expected[name]
        try:
            run = case.make(seed=3, lr=9.0)
            case.reach_save(run[0])
            by_engine(case, run, place) if door == "engine" else by_compat(run, place, door, rank)
            if case.steps or door == "engine":  # the drop-in gives a fresh optimizer what it would start from
                assert_same(whole_state(run), model, optim, extra=door != "engine")
            assert case.goes_on(run) == pytest.approx(losses, rel=1e-11)
        except BaseException as error:
            error.args = (f"{name} by {door}: {error}",)
            raise


def assert_same(state: fdsd.TrainState, model: Any, optim: Any, *, extra: bool) -> None:
    assert state.optim is not None
    found = dict(told({**state.model}))
    for name, value in dict(model).items():
        if extra or name != "_extra_state":
            assert found[name] == value, name
    mine = dict(told(state.optim.to_torch()))
    assert dict(mine["state"]) == dict(dict(optim)["state"])


@pytest.mark.parametrize("way, n", WAYS, ids=str)
def test_restored_on_other_ranks(way: str, n: int, saved: tuple[str, dict[str, Any]]) -> None:
    run_ranks(restores, n, way, *saved, timeout=200)


def test_every_way_and_every_case_meets_every_door() -> None:
    met = {(way, name, door) for way, n in WAYS for name, door in tried(way, n)}
    assert {(way, door) for way, _, door in met} == set(itertools.product([way for way, _ in WAYS], DOORS))
    assert {(name, door) for _, name, door in met} == set(itertools.product(SAVED, DOORS))


def test_restored_in_one_process(saved: tuple[str, dict[str, Any]]) -> None:
    was, threads = torch.get_default_dtype(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        restores(0, "plain", *saved)
    finally:
        torch.set_default_dtype(was)
        torch.set_num_threads(threads)
