"""Live optimizers in one process: what torch does right is the oracle, and where it errs the right value stands here.

What is tried on every kind of parallelism is tried there on one process too: ``test_ranks_optimizers``.

| row of PITFALLS.md | where |
| --- | --- |
| reading never changes; LBFGS; templates | ``TestTraining``, ``test_ranks_optimizers``, ``test_optimizers_templates`` |
| frozen, untouched | ``TestPartialState``, ``test_ranks_optimizers`` |
| stateless, flat, groups, options, types | ``test_ranks_optimizers``, ``test_optimizers`` (the data alone) |
| 20,000 parameters | ``test_work_grows_with_the_number_of_parameters`` |
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint import state_dict as peer
from torch.overrides import TorchFunctionMode

import fdsd
from fdsd.compat.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from tests.helpers.optimizers import Setup, setups, told, told_all, told_optimizer

STRICT, LAX = StateDictOptions(), StateDictOptions(strict=False)


class TestTraining:
    @settings(max_examples=80)
    @given(setups(), st.integers(0, 2), st.booleans(), st.booleans())
    def test_a_lax_load_of_ones_own_save_changes_nothing(
        self, setup: Setup, steps: int, flat: bool, full: bool
    ) -> None:
        """For all optimizers of torch, groups, frozen, untouched and tied parameters, whether or not they have
        stepped."""
        if setup.case.name == "OwnFormat" or (flat and setup.case.name == "Nested"):
            return  # torch's dict has no place for other entries, and its flat form none for lists of tensors
        options = StateDictOptions(strict=False, flatten_optimizer_state_dict=flat, full_state_dict=full)
        model, optimizers = setup.trained(steps)
        before = told_all(model, optimizers)
        weights, state = get_state_dict(model, optimizers, options=options)
        assert told_all(model, optimizers) == before
        twin, others = setup.trained(0, seed=5)
        set_state_dict(twin, others, model_state_dict=weights, optim_state_dict=state, options=options)
        assert told_all(model, optimizers) == before
        setup.train(model, optimizers, 2, seed=7)
        setup.train(twin, others, 2, seed=7)
        assert told(dict(twin.state_dict())) == told(dict(model.state_dict()))

    @settings(max_examples=80)
    @given(setups(), st.integers(0, 2))
    def test_capture_and_restore_round_trip_exactly(self, setup: Setup, steps: int) -> None:
        model, optimizers = setup.trained(steps)
        before = told_all(model, optimizers)
        state = fdsd.snapshot(fdsd.capture(model, optimizers))
        twin, others = setup.trained(0, seed=5)
        fdsd.restore(state, twin, others)
        assert told_all(model, optimizers) == before
        assert [told_optimizer(one) for one in others] == [told_optimizer(one) for one in optimizers]
        setup.train(model, optimizers, 2, seed=7)
        setup.train(twin, others, 2, seed=7)
        assert told(dict(twin.state_dict())) == told(dict(model.state_dict()))


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


def train(model: nn.Module, optimizer: Any, skip: Any = None) -> None:
    for name, p in model.named_parameters():
        p.grad = None if name == skip or not p.requires_grad else torch.arange(1.0, 1 + p.numel()).reshape(p.shape)
    optimizer.step()
    model.zero_grad()


class TestPartialState:
    def test_the_rule_and_the_message_are_torchs(self) -> None:
        model = network()
        optimizer = torch.optim.Adam(model.parameters())
        train(model, optimizer, skip="1.bias")
        state = get_optimizer_state_dict(model, optimizer)
        assert told(state) == told(peer.get_optimizer_state_dict(model, optimizer))
        new = torch.optim.Adam(model.parameters())
        with pytest.raises(RuntimeError, match=r"Missing optimizer state for parameter '1\.bias'") as ours:
            set_optimizer_state_dict(model, new, copy.deepcopy(state))
        with pytest.raises((RuntimeError, KeyError), match=r"1\.bias") as theirs:
            peer.set_optimizer_state_dict(model, new, copy.deepcopy(state))
        if not isinstance(theirs.value, KeyError):  # torch 2.6 has no message
            assert str(ours.value).startswith(str(theirs.value).split(". ")[0])

    def test_frozen_ones_need_no_state_and_keep_what_there_is(self) -> None:
        for trained_before in (True, False):
            model = network()
            model[0].weight.requires_grad_(trained_before)
            optimizer = torch.optim.Adam(model.parameters())
            train(model, optimizer)
            model[0].weight.requires_grad_(False)
            state = get_optimizer_state_dict(model, optimizer)
            assert ("0.weight" in state["state"]) is trained_before
            new = torch.optim.Adam(model.parameters())
            set_optimizer_state_dict(model, new, state)
            assert told_optimizer(new) == told_optimizer(optimizer)


# -- many parameters -------------------------------------------------------------------------------------------------


class Many(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.params = nn.ParameterList([torch.zeros(1) for _ in range(count)])


class Name(str):
    """A name whose comparisons are calls, so that they are counted where a list of names is searched."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other)


class Comparisons(TorchFunctionMode):
    """Makes each comparison of tensors a call, so that they are counted where a list of tensors is searched."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


SEARCHES = ("index", "count", "remove", "copy", "insert", "pop")


def work(run: Callable[[], Any]) -> int:
    """Count what is called meanwhile, and the elements of lists that their methods may go through."""
    total = 0

    def see(_: Any, event: str, called: Any) -> None:
        nonlocal total
        held = getattr(called, "__self__", None) if event == "c_call" else None
        searched = isinstance(held, list) and called.__name__ in SEARCHES
        total += event in ("call", "c_call") and (1 + len(held or ()) if searched else 1)

    before = sys.getprofile()
    with Comparisons():
        sys.setprofile(see)
        try:
            run()
        finally:
            sys.setprofile(before)
    return total


def named(state: Any) -> Any:
    """Give a state dict with names that count."""
    if isinstance(state, dict):
        return {Name(k) if isinstance(k, str) and "." in k else k: named(v) for k, v in state.items()}
    if isinstance(state, list):
        return [named(value) for value in state]
    return Name(state) if isinstance(state, str) and "." in state else state


def test_searches_of_lists_are_counted() -> None:
    """As many of each kind: 100 times 100 elements, or half of them where a search ends at what it finds."""
    names = [Name(f"a.{i}") for i in range(100)]
    tensors = [torch.zeros(1) for _ in range(100)]
    others = [torch.ones(1) for _ in range(100)]
    for search in (
        lambda: [f"b.{i}" in names for i in range(100)],
        lambda: [other in tensors for other in others],
        lambda: [names.index(name) for name in names],
    ):
        assert work(search) >= 10_000
    assert work(lambda: [name in set(names[:1]) for name in names]) < 1_000


@pytest.mark.parametrize("what", ["nested", "flat", "full", "by id", "engine", "read"])
def test_work_grows_with_the_number_of_parameters(what: str) -> None:
    """Seen: 20,000 parameters take seconds, as a list is searched for each. Four times as many are four times the
    work."""

    def done(count: int) -> int:
        model = Many(count)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for p in model.parameters():
            p.grad = torch.ones(1)
        optimizer.step()
        options = StateDictOptions(full_state_dict=what == "full", flatten_optimizer_state_dict=what == "flat")
        state: Any = named(get_optimizer_state_dict(model, optimizer, options=options))
        if what == "by id":
            state = optimizer.state_dict()
        captured = fdsd.snapshot(fdsd.capture(model, optimizer))

        def run() -> None:
            if what == "engine":
                fdsd.restore(captured, model, optimizer)
            elif what == "read":
                get_state_dict(model, optimizer, options=STRICT)
                get_model_state_dict(model, options=LAX)
            else:
                set_optimizer_state_dict(model, optimizer, state, options=options)

        run()  # imports and caches
        return work(run)

    few, many = done(500), done(2_000)
    assert few > 500 and many < 5 * few, f"{few} calls for 500 parameters and {many} for 2,000"
