"""The law of training over real ranks: ``set(get(x))`` leaves it bit-identical, however a model lies over them.

A sample of cases, drawn once and for all: wrappers, optimizers, every legal combination of options, files and memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fdsd
from fdsd.compat.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from fdsd.errors import FdsdError
from tests.helpers.photos import differences, photo_of_training, unchanged
from tests.helpers.rank_trainings import OPTIONS, Case, Run, cache_meshes, cases
from tests.helpers.ranks import run_ranks
from tests.helpers.trainings import lacks_state, outcome

_EACH = 5
"""Cases of each way and number of ranks."""


def handed(value: Any, options: StateDictOptions, rank: int) -> Any:
    """Give each rank what it has to have for a setter: of a broadcast nothing but on rank 0."""
    if options.broadcast_from_rank0:
        return {} if rank else value
    if options.full_state_dict and options.cpu_offload:
        assert bool(value) == (rank == 0)
        box = [value]
        dist.broadcast_object_list(box, 0)
        return box[0]
    return value


def by_compat(case: Case, source: Run, target: Run, rank: int) -> None:
    options = case.options
    if case.route == "together":
        weights, state = get_state_dict(*source, options=options)
        weights, state = handed(weights, options, rank), handed(state, options, rank)
        set_state_dict(*target, model_state_dict=weights, optim_state_dict=state, options=options)
        return
    weights = handed(get_model_state_dict(source[0], options=options), options, rank)
    state = handed(get_optimizer_state_dict(*source, options=options), options, rank)
    set_optimizer_state_dict(*target, state, options=options)
    found = set_model_state_dict(target[0], weights, options=options)
    assert (found.missing_keys, found.unexpected_keys) == ([], [])


def by_engine(case: Case, source: Run, target: Run, folder: Path) -> None:
    state, world = fdsd.capture(*source), dist.group.WORLD
    assert state.optim is not None
    names = set(state.model)
    if case.route == "snapshot":
        state = fdsd.snapshot(state)
    elif case.route in ("file", "files"):
        fdsd.save(state.model, folder / "model.pt", group=world)
        weights = fdsd.open(folder / "model.pt")
        optim = fdsd.materialize(state.optim, group=world)
        if case.route == "files":
            fdsd.save(fdsd.flatten_optim()(state.optim), folder / "optim.pt", group=world)
            optim = fdsd.unflatten_optim(like=optim)(fdsd.open(folder / "optim.pt"))
        state = fdsd.TrainState(weights, optim)
    report = fdsd.restore(state, *target, staged=case.steps == 0)
    assert report.missing == report.unexpected == report.left_on_meta == report.untied == ()
    assert set(report.loaded) == names


def copy_frozen(source: Any, target: Any) -> None:
    with torch.no_grad():
        for p, q in zip(source.parameters(), target.parameters(), strict=True):
            if not p.requires_grad:
                getattr(q, "_local_tensor", q).copy_(getattr(p, "_local_tensor", p))


def other_run(case: Case) -> Run:
    """Make a run with other values and learning rates, new or in the midst of training."""
    if case.used:
        return case.begun(seed=1, lr=20.0)
    model, optimizers = case.make(seed=1, lr=20.0)
    case.reach_save(model)
    return model, optimizers


def holds(case: Case, rank: int, folder: Path) -> None:
    control, source, target = case.begun(), case.begun(), other_run(case)
    with unchanged(vars(case.options), model=source[0], optimizers=source[1], label="get"):
        get_state_dict(*source, options=case.options)
        fdsd.snapshot(fdsd.capture(*source)), fdsd.describe(*source)
    if case.route not in ("together", "apart"):
        by_engine(case, source, target, folder)
        others = [source, target]
    else:
        if case.options.ignore_frozen_params:
            copy_frozen(source[0], target[0])
        if case.options.strict and lacks_state(source[1]):
            before = photo_of_training(*target)
            with pytest.raises(FdsdError, match="Missing optimizer state for parameter"):
                by_compat(case, source, target, rank)
            assert not differences(before, photo_of_training(*target))
            others = [source]
        else:
            by_compat(case, source, target, rank)
            by_compat(case, source, source, rank)
            others = [source, target]
    told = case.goes_on(control)
    final = outcome(*control)
    for other in others:
        assert case.goes_on(other) == told
        assert outcome(*other) == final


def hold(rank: int, sample: list[Case], folder: str) -> None:
    cache_meshes()
    for i, case in enumerate(sample):
        place = Path(folder) / str(i)
        place.mkdir(exist_ok=True)
        try:
            holds(case, rank, place)
        except BaseException as error:
            error.args = (f"{case}: {error}",)
            raise


@pytest.mark.parametrize("way, n", cases(_EACH), ids=str)
def test_training_goes_on_bit_by_bit(way: str, n: int, tmp_path: Path) -> None:
    run_ranks(hold, n, cases(_EACH)[way, n], str(tmp_path), timeout=240)


def test_the_sample_has_everything() -> None:
    sample = [case for some in cases(_EACH).values() for case in some]
    by_options = [case.options for case in sample if case.route in ("together", "apart")]
    assert all(options in by_options for options in OPTIONS)
    assert {case.freeze for case in sample} == {"", "always", "at save", "before"}
    assert {case.steps for case in sample} == {0, 2} and len({case.optimizer for case in sample}) > 12
