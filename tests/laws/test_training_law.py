"""The law of training: ``set(get(x))`` leaves it bit-identical, in place and into a fresh model with fresh optimizers.

Both by the drop-in, with every legal combination of its options, and by ``capture`` and ``restore``, through memory and
through files. And no function of either changes anything that it was not asked to change.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn
from torch.optim import Optimizer

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
from tests.helpers.calls import CALLS, FAULTS, Call, Scene, Watch, scene
from tests.helpers.photos import differences, photo_of_training, unchanged
from tests.helpers.rank_trainings import OPTIONS
from tests.helpers.trainings import Learner, Training, lacks_state, outcome, trainings

Run = tuple[Learner, list[Optimizer]]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Threads cost more than they save on tensors of a few elements, and a test beside this one wants the cores."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


def by_compat(source: Run, target: Run, options: StateDictOptions, *, together: bool) -> None:
    if together:
        weights, state = get_state_dict(*source, options=options)
        set_state_dict(*target, model_state_dict=weights, optim_state_dict=state, options=options)
        return
    weights = get_model_state_dict(source[0], options=options)
    state = get_optimizer_state_dict(*source, options=options)
    set_optimizer_state_dict(*target, state, options=options)
    found = set_model_state_dict(target[0], weights, options=options)
    assert (found.missing_keys, found.unexpected_keys) == ([], [])


def by_engine(source: Run, target: Run, folder: Path, route: str, *, staged: bool) -> None:
    state = fdsd.capture(*source)
    assert state.optim is not None
    if route == "snapshot":
        state = fdsd.snapshot(state)
    elif route == "file":
        fdsd.save(state.model, folder / "model.pt")
        state = fdsd.TrainState(fdsd.open(folder / "model.pt"), fdsd.materialize(state.optim))
    elif route == "files":
        tensors = fdsd.drop("_extra_state")(state.model)
        fdsd.save(tensors, folder / "model.safetensors")
        fdsd.save(fdsd.flatten_optim()(state.optim), folder / "optim.pt")
        like = state.optim
        weights = fdsd.combine(fdsd.open(folder / "model.safetensors"), fdsd.select("_extra_state")(state.model))
        state = fdsd.TrainState(weights, fdsd.unflatten_optim(like=like)(fdsd.open(folder / "optim.pt")))
    report = fdsd.restore(state, *target, staged=staged)
    assert report.missing == report.unexpected == report.left_on_meta == report.untied == ()
    assert set(report.loaded) == set(state.model)


def alike(training: Training, control: Run, others: list[Run], *, empty_groups: bool = True) -> None:
    """Train all of them on, and see that they do the same, bit by bit."""
    told = training.goes_on(*control)
    final = outcome(*control, empty_groups=empty_groups)
    for other in others:
        assert training.goes_on(*other) == told
        assert outcome(*other, empty_groups=empty_groups) == final


def copy_frozen(source: nn.Module, target: nn.Module) -> None:
    with torch.no_grad():
        for p, q in zip(source.parameters(), target.parameters(), strict=True):
            if not p.requires_grad:
                q.copy_(p)


def fresh_or_used(training: Training, used: bool) -> Run:
    """Make a run with other values and other learning rates, new or in the midst of training."""
    if used:
        return training.begun(seed=1000 + training.seed, lr=0.7)
    model, optimizers = training.make(seed=1000 + training.seed, lr=0.7)
    training.reach_save(model)
    return model, optimizers


@given(trainings(own_format=False), st.sampled_from(OPTIONS), st.booleans(), st.booleans())
def test_setting_what_was_got_leaves_training_bit_identical(
    training: Training, options: StateDictOptions, together: bool, used: bool
) -> None:
    control, source, target = training.begun(), training.begun(), fresh_or_used(training, used)
    with unchanged(options, model=source[0], optimizers=source[1]):
        get_state_dict(*source, options=options)
    if options.ignore_frozen_params:
        copy_frozen(source[0], target[0])
    if options.strict and lacks_state(source[1]):
        before = photo_of_training(*target)
        with pytest.raises(FdsdError, match="Missing optimizer state for parameter"):
            by_compat(source, target, options, together=together)
        assert not differences(before, photo_of_training(*target))
        alike(training, control, [source])
        return
    by_compat(source, target, options, together=together)
    by_compat(source, source, options, together=together)
    alike(training, control, [source, target], empty_groups=not options.flatten_optimizer_state_dict)


@given(trainings(), st.sampled_from(["live", "snapshot", "file", "files"]), st.booleans(), st.booleans())
def test_restoring_what_was_captured_leaves_training_bit_identical(
    tmp_path_factory: pytest.TempPathFactory, training: Training, route: str, staged: bool, used: bool
) -> None:
    folder = tmp_path_factory.mktemp("run")
    control, source, target = training.begun(), training.begun(), fresh_or_used(training, used)
    with unchanged(model=source[0], optimizers=source[1]):
        fdsd.snapshot(fdsd.capture(*source)), fdsd.describe(*source)
    by_engine(source, target, folder, route, staged=staged)
    if route in ("live", "snapshot"):
        by_engine(source, source, folder, route, staged=staged)
    alike(training, control, [source, target])


@given(trainings(own_format=False), st.booleans(), st.booleans())
def test_one_door_and_the_other_lead_to_the_same(training: Training, first: bool, used: bool) -> None:
    """What the engine captured is what the drop-in got, so either may write what the other has read.

    But for a fresh SGD with dampening: the drop-in gives memory to load momentum into, and no momentum is like none.
    """
    control, source, target = training.begun(), training.begun(), fresh_or_used(training, used)
    fresh = [part for part, optimizer in zip(training.parts, source[1], strict=True) if not optimizer.state]
    assume(not first or all(part.case.is_exact for part in fresh))
    options = StateDictOptions(strict=False)
    if first:
        weights, state = get_state_dict(*source, options=options)
        optim = fdsd.OptimState.from_torch({**state})
        fdsd.restore(fdsd.TrainState(weights, optim), *target)
    else:
        captured = fdsd.capture(*source)
        assert captured.optim is not None
        weights, state = captured.model.to_dict(), captured.optim.to_torch()
        set_state_dict(*target, model_state_dict=weights, optim_state_dict=state, options=options)  # type: ignore[arg-type]
    alike(training, control, [source, target])


# -- nothing else changes --------------------------------------------------------------------------------------------


def public_functions() -> set[str]:
    """List the functions of the engine and of both modules of the drop-in."""
    from fdsd.compat import _state_dict_utils, state_dict

    engine = {name for name, home in fdsd._HOME.items() if home.startswith("fdsd.engine.")}
    names = {*engine, *_state_dict_utils.__all__, *state_dict.__all__}
    names |= {name for name in vars(state_dict) if name.startswith(("_get_", "_patch_"))}
    homes = (fdsd, _state_dict_utils, state_dict)
    found = {name for name in names for home in homes if callable(getattr(home, name, None))}
    return {name for name in found if not name.endswith(("_T", "Type", "_TensorInfo")) and name not in NO_FUNCTIONS}


NO_FUNCTIONS = {"Diff", "LoadReport", "CompanionMismatch", "STATE_DICT_TYPE", "CONTAINER_TYPE", "FLATTEN_MAPPING"} | {
    "OBJ_PATH",
    "PATH_ITEM",
    "_all_gather_sharded_tensor",  # needs ranks
}


def test_every_function_is_called() -> None:
    assert set(CALLS) == public_functions()


@pytest.fixture
def collector() -> Iterator[None]:
    was = gc.isenabled()
    yield
    Watch.collects = was
    (gc.enable if was else gc.disable)()


def check(call: Call, s: Scene, label: str, *, fails: bool) -> None:
    """Make a call; see that only what it may change does."""
    spared = (
        contextlib.nullcontext()
        if call.writes == "target"
        else unchanged(model=s.target, optimizers=s.others, label=f"{label}: target")
    )
    with unchanged(*s.arguments, model=s.model, optimizers=s.optimizers, label=label), spared:
        if not fails:
            call.run(s)
            return
        with pytest.raises((FdsdError, ArithmeticError, ValueError, RuntimeError, TypeError)):
            call.run(s)


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("name", [*CALLS, *FAULTS])
def test_only_what_a_function_is_for_is_changed(name: str, steps: int, tmp_path: Path, collector: None) -> None:
    """No step, no argument, no random number, no hook, no setting; the collector rests for no user's code."""
    call = {**CALLS, **FAULTS}[name]
    (tmp_path / "first").mkdir()
    with contextlib.suppress(Exception):  # what is imported on the way may leave what it likes
        call.run(scene(tmp_path / "first", steps=steps))
    for collects in (True, False):
        (gc.enable if collects else gc.disable)()
        Watch.collects = collects
        folder = tmp_path / str(collects)
        folder.mkdir()
        s = scene(folder, steps=steps)
        check(call, s, name, fails=name in FAULTS)
        assert gc.isenabled() == collects


@pytest.mark.parametrize("name", [*CALLS, *FAULTS])
def test_nothing_is_kept(name: str, tmp_path: Path) -> None:
    """No table that outlives a call holds on to a model, an optimizer or a tensor."""
    gc.freeze()  # what was there before is no garbage of this call, and to look at all of it takes long
    try:
        s = scene(tmp_path)
        tensors = [t for one in (s.model, s.target) for t in (*one.parameters(), *one.buffers())]
        states = [t for o in (*s.optimizers, *s.others) for row in o.state.values() for t in row.values()]
        alive = [weakref.ref(one) for one in (s.model, s.target, *s.optimizers, *s.others, *tensors, *states)]
        with contextlib.suppress(Exception):
            {**CALLS, **FAULTS}[name].run(s)
        del s, tensors, states
        gc.collect()
    finally:
        gc.unfreeze()
    assert not [one() for one in alive if one() is not None]
