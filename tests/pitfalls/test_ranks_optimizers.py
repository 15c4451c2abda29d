"""Optimizers over ranks: each known fault, on every kind of parallelism, for each way to give a state dict.

| row of PITFALLS.md | checks; those of ``test_ranks_groups`` too |
| --- | --- |
| asking a fresh optimizer steps it; hooks fire | ``reading_changes_nothing``; LBFGS: ``test_live_optimizers`` |
| frozen after training; never touched | ``partial_state``, ``partial_state_of_the_engine`` |
| stateless SGD | ``stateless`` |
| flat: empty entries, older files, two rates, full, empty groups | ``partial_state``, ``flat_form``, ``empty_groups`` |
| options only in the file reach rank 0 only; types of options | ``group_options`` |
| 20,000 parameters | ``test_live_optimizers`` |
| other key orders; the caller's dict is changed | ``orders_and_arguments`` |
| one verdict on all ranks | ``on_one_rank_only``, ``both_or_neither``; all that return what was raised |
| ``set_state_dict`` with broadcast and ``{}`` elsewhere | ``both_or_neither`` |
| a slot is filled by broadcasting | ``on_one_rank_only`` |
| training goes on, for all optimizers and kinds | ``multiprocess/test_compat_state_dict``, ``test_training_law`` |
| memory of a load | ``test_ranks_traffic`` |
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import fdsd
from fdsd.compat.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from tests.helpers.audit_optimizers import FORMS, OPTIMIZERS, adam, given, goes_on, reading, unit, writing
from tests.helpers.audit_values import case, local_values, same
from tests.helpers.audited import SIZES, Kind, build, plain, train
from tests.helpers.auditing import Audit, Check, group
from tests.helpers.optimizers import told_optimizer

AUDIT = Audit()


# -- reading ---------------------------------------------------------------------------------------------------------


def read_all(model: Any, optimizer: Any) -> None:
    for full, cpu, flat in ((False, False, False), (True, False, True), (True, True, False), (False, True, True)):
        options = StateDictOptions(full_state_dict=full, cpu_offload=cpu, flatten_optimizer_state_dict=flat)
        get_optimizer_state_dict(model, optimizer, options=options)
    get_state_dict(model, optimizer)
    fdsd.describe(model, optimizer)
    captured = fdsd.capture(model, optimizer)
    fdsd.snapshot(captured)
    fdsd.materialize(captured, group=group())


@AUDIT.check()
def reading_changes_nothing(rank: int, kind: Kind) -> None:
    """Seen: a fresh Adam is stepped; the momentum of SGD starts from zeros; hooks fire; learning rates are swapped."""
    cases = (*[(name, 0) for name in OPTIMIZERS], ("Adam", 1), ("SGD, dampening", 1))
    for name, steps in reading_changes_nothing.share(cases, kind, 3):
        with case(name, steps):
            make = OPTIMIZERS[name]
            pairs = [(model, make(model.parameters())) for model in (build(kind, 1), build(kind, 1))]
            for model, optimizer in pairs:
                train(model, optimizer, steps)
            model, optimizer = pairs[0]
            fired: list[Any] = []
            hooks = [
                optimizer.register_step_pre_hook(lambda *args, to=fired: to.append(args)),
                optimizer.register_step_post_hook(lambda *args, to=fired: to.append(args)),
                register_optimizer_step_pre_hook(lambda *args, to=fired: to.append(args)),
                register_optimizer_step_post_hook(lambda *args, to=fired: to.append(args)),
            ]
            before = local_values(model), told_optimizer(optimizer), torch.get_rng_state()
            versions = [p._version for p in model.parameters()]
            rates = [id(one["lr"]) for one in optimizer.param_groups]
            read_all(model, optimizer)
            same(local_values(model), before[0])
            assert told_optimizer(optimizer) == before[1]
            assert torch.equal(torch.get_rng_state(), before[2])
            assert [p._version for p in model.parameters()] == versions
            assert [id(one["lr"]) for one in optimizer.param_groups] == rates
            assert not fired and all(p.grad is None for p in model.parameters())
            for hook in hooks:
                hook.remove()
            for each in pairs:
                train(*each, 2, start=1)
            same(local_values(pairs[0][0]), local_values(pairs[1][0]))


# -- parameters with and without state -------------------------------------------------------------------------------


def partly_trained(kind: Kind) -> tuple[Any, Any]:
    """The first unit is trained, and then frozen; the second is never touched."""
    model = build(kind, 1)
    optimizer = adam(model.parameters())
    train(model, optimizer, skip="units.1.")
    return freeze(model), optimizer


def freeze(model: Any) -> Any:
    for p in unit(model, 0).parameters():
        p.requires_grad_(False)
    return model


def names_with_state(state: Any) -> set[str]:
    if "state" in state:
        assert all(state["state"].values())  # no empty entries
        return set(state["state"])
    return {name.removeprefix("state.").rpartition(".")[0] for name in state if name.startswith("state.")}


TRAINED = {name for name, p in plain().named_parameters() if p.requires_grad and not name.startswith("units.1.")}


@AUDIT.check()
def partial_state(rank: int, kind: Kind) -> Any:
    """Seen: those frozen later lose their state; an optimizer cannot load its own save, even when lax."""
    heard: list[str] = []
    for way, flat in partial_state.share(FORMS, kind, 3):
        with case(way, "flat" if flat else "nested"):
            model, optimizer = partly_trained(kind)
            state = get_optimizer_state_dict(model, optimizer, options=reading(way, flat))
            assert names_with_state(state) == TRAINED
            other = freeze(build(kind, 2))
            for is_fresh in (True, False):
                new = adam(other.parameters(), lr=9.0)
                if not is_fresh:
                    train(other, new)
                before = told_optimizer(new)
                with pytest.raises(RuntimeError, match=r"Missing optimizer state for parameter 'units\.1\.") as caught:
                    set_optimizer_state_dict(other, new, given(state, way, rank), options=writing(way, flat))
                assert told_optimizer(new) == before
                heard.append(str(caught.value))
                weights = get_model_state_dict(model, options=reading(way))
                set_state_dict(
                    other,
                    new,
                    model_state_dict=given(weights, way, rank),
                    optim_state_dict=given(state, way, rank),
                    options=writing(way, flat, strict=False),
                )
                same(get_optimizer_state_dict(other, new, options=reading(way, flat)), state)
            goes_on((model, optimizer), (other, new))
    return heard


@AUDIT.check()
def partial_state_of_the_engine(rank: int, kind: Kind) -> None:
    for is_live in (True, False):
        model, optimizer = partly_trained(kind)
        state = fdsd.capture(model, optimizer)
        if not is_live:
            state = fdsd.materialize(state, group=group())
        other = freeze(build(kind, 2))
        new = adam(other.parameters(), lr=9.0)
        train(other, new)
        report = fdsd.restore(state, other, new, group=group())
        assert {name for name in report.without_state if name.startswith("units.")} == {
            f"units.1.{part}.{name}" for part in ("up", "down") for name in ("weight", "bias")
        }
        full = reading("full")
        same(
            get_optimizer_state_dict(other, new, options=full), get_optimizer_state_dict(model, optimizer, options=full)
        )
        goes_on((model, optimizer), (other, new))


@AUDIT.check()
def stateless(rank: int, kind: Kind) -> None:
    """Seen: a full load asserts, a flat one leaves empty entries."""
    for steps, (way, flat) in stateless.share(itertools.product((0, 1), FORMS), kind, 3):
        with case(steps, way, flat):
            model, other = build(kind, 1), build(kind, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            train(model, optimizer, steps)
            state: Any = get_optimizer_state_dict(model, optimizer, options=reading(way, flat))
            assert not any(name.startswith("state.") for name in state) if flat else state["state"] == {}
            new = torch.optim.SGD(other.parameters(), lr=9.0)
            set_optimizer_state_dict(other, new, given(state, way, rank), options=writing(way, flat))
            assert not any(new.state.values()) and new.param_groups[0]["lr"] == 0.5
            if not steps:
                goes_on((model, optimizer), (other, new))


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("check", AUDIT.checks, ids=repr)
def test_on_ranks(check: Check, n: int) -> None:
    AUDIT.verify(check, n)
