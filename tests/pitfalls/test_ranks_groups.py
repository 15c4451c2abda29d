"""Groups of optimizers, orders, arguments and verdicts over ranks, on every kind of parallelism.

The table of rows is that of ``test_ranks_optimizers``.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fdsd
from fdsd.compat.state_dict import get_optimizer_state_dict, get_state_dict, set_optimizer_state_dict, set_state_dict
from fdsd.errors import FdsdError
from tests.helpers.audit_optimizers import (
    FORMS,
    FULL,
    WAYS,
    adam,
    given,
    goes_on,
    reading,
    sorted_groups,
    split,
    writing,
)
from tests.helpers.audit_values import case, local_values, same
from tests.helpers.audited import SIZES, Kind, build, plain, train
from tests.helpers.auditing import Audit, Check, group, num_ranks
from tests.helpers.optimizers import told, told_optimizer

AUDIT = Audit()


# -- groups ----------------------------------------------------------------------------------------------------------


def without(state: dict[str, Any], names: list[str], key: str) -> dict[str, Any]:
    lost = {f"param_groups.{name}.{key}" for name in names}
    made = {name: value for name, value in state.items() if name not in lost}
    assert len(made) < len(state)
    return made


@AUDIT.check()
def flat_form(rank: int, kind: Kind) -> Any:
    """Seen: two learning rates regrouped silently take the first; an older file raises KeyError; so does full."""
    heard: list[str] = []
    model = build(kind, 1)
    first, rest = split(model)
    two = adam([{"params": first, "lr": 0.25}, {"params": rest, "lr": 0.75}])
    train(model, two)
    for way in flat_form.share(WAYS, kind, 3):
        with case(way):
            state: Any = get_optimizer_state_dict(model, two, options=reading(way, True))
            new = adam(model.parameters(), lr=9.0)
            for strict in (True, False):
                before = told_optimizer(new)
                with pytest.raises((RuntimeError, FdsdError), match=r"lr.*0\.25.*0\.75|lr.*0\.75.*0\.25") as caught:
                    set_optimizer_state_dict(
                        model, new, given(state, way, rank), options=writing(way, True, strict=strict)
                    )
                assert told_optimizer(new) == before
                heard.append(str(caught.value))
            again = adam([{"params": rest, "lr": 1.0}, {"params": first, "lr": 2.0}])  # by name, not by place
            set_optimizer_state_dict(model, again, given(state, way, rank), options=writing(way, True))
            assert [one["lr"] for one in again.param_groups] == [0.75, 0.25]
            names = [name for name, _ in plain().named_parameters()]
            for lost in (names, ["units.1.up.bias"]):
                older = without(state, lost, "eps")
                target = adam([{"params": rest, "eps": 1e-3}, {"params": first, "eps": 1e-3}])
                with pytest.raises(RuntimeError, match=r"param_groups\.\S+\.eps") as caught:
                    set_optimizer_state_dict(model, target, given(older, way, rank), options=writing(way, True))
                assert not any(target.state.values()) and target.param_groups[0]["lr"] == 0.5
                heard.append(str(caught.value))
            older = without(state, names, "eps")
            set_optimizer_state_dict(model, target, given(older, way, rank), options=writing(way, True, strict=False))
            assert [(one["eps"], one["lr"]) for one in target.param_groups] == [(1e-3, 0.75), (1e-3, 0.25)]
    return heard


@AUDIT.check()
def empty_groups(rank: int, kind: Kind) -> Any:
    """Seen: they are lost, or keep an optimizer from loading its own save."""
    heard: list[Any] = []
    for way, flat in empty_groups.share(FORMS, kind, 3):
        with case(way, flat):
            rates = [[0.125, 0.25, 0.375], [1.0, 2.0, 3.0]]
            pairs: list[tuple[Any, Any]] = []
            for model, (a, b, c) in zip((build(kind, 1), build(kind, 1)), rates, strict=True):
                groups = [
                    {"params": [], "lr": a},
                    {"params": list(model.parameters()), "lr": b},
                    {"params": [], "lr": c},
                ]
                pairs.append((model, adam(groups)))
            (model, optimizer), (other, new) = pairs
            state: Any = get_optimizer_state_dict(model, optimizer, options=reading(way, flat))
            set_optimizer_state_dict(other, new, given(state, way, rank), options=writing(way, flat))
            found = [one["lr"] for one in new.param_groups]
            assert found == ([1.0, 0.25, 3.0] if flat else rates[0])  # the flat form has no place for them
            heard.append(found)
            goes_on((model, optimizer), (other, new))
    return heard


@AUDIT.check()
def group_options(rank: int, kind: Kind) -> Any:
    """Seen: ``initial_lr`` reaches rank 0 only; ``betas`` comes back as a list."""
    heard: list[Any] = []
    model, other = build(kind, 1), build(kind, 2)
    extra = {"initial_lr": 0.125, "list": [1, 2], "tuple": (1, (2.0, None)), "flag": True, "text": "x", "none": None}
    for (way, flat), rate in group_options.share(itertools.product(FORMS, (0.25, torch.tensor(0.25))), kind, 3):
        with case(way, flat, rate):
            optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.75, 0.875))
            optimizer.param_groups[0].update(copy.deepcopy(extra))
            state: Any = get_optimizer_state_dict(model, optimizer, options=reading(way, flat))
            new = torch.optim.AdamW(other.parameters(), lr=torch.tensor(9.0) if torch.is_tensor(rate) else 9.0)
            set_optimizer_state_dict(other, new, given(state, way, rank), options=writing(way, flat))
            (found,) = new.param_groups
            for key, value in {**extra, "betas": (0.75, 0.875), "lr": rate}.items():
                with case(key):
                    same(found[key], value)
            heard.append(told({key: value for key, value in sorted(found.items()) if key != "params"}))
    return heard


# -- orders, arguments, verdicts -------------------------------------------------------------------------------------


def pinned(value: Any) -> Any:
    """Tell the objects and the contents of a state dict."""
    if isinstance(value, dict):
        return id(value), [(key, pinned(item)) for key, item in value.items()]
    if isinstance(value, list):
        return id(value), [pinned(item) for item in value]
    return id(value), told(value) if isinstance(value, torch.Tensor) and not hasattr(value, "local_shards") else None


def deep_copy(state: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # a ShardedTensor asks not to be used, whatever is done with it
        return copy.deepcopy(dict(state))


def turned(value: Any, rank: int) -> Any:
    """Give the same dict in an order of each rank's own."""
    if not isinstance(value, dict):
        return value
    items = list(value.items())
    items = items[rank % len(items) :] + items[: rank % len(items)] if items else items
    return {key: turned(item, rank) for key, item in (items[::-1] if rank % 2 else items)}


@AUDIT.check()
def orders_and_arguments(rank: int, kind: Kind) -> None:
    """Seen: weights are mixed where orders differ; dicts are renamed, filled, emptied, and trained on."""
    for way, flat in orders_and_arguments.share(FORMS, kind, 3):
        with case(way, flat):
            model, other = build(kind, 1), build(kind, 2)
            optimizer, new = adam(model.parameters()), adam(other.parameters(), lr=9.0)
            train(model, optimizer)
            weights, state = get_state_dict(model, optimizer, options=reading(way, flat))
            weights, state = (turned(deep_copy(x), rank) for x in (weights, state))
            expected = get_state_dict(model, optimizer, options=reading("full"))
            weights, state = (given(x, way, rank) for x in (weights, state))
            before = pinned(weights), pinned(state)
            set_state_dict(other, new, model_state_dict=weights, optim_state_dict=state, options=writing(way, flat))
            found = get_state_dict(other, new, options=reading("full"))
            same(dict(found[0]), dict(expected[0]))
            same(sorted_groups(found[1]), sorted_groups(expected[1]))
            goes_on((model, optimizer), (other, new))
            assert (pinned(weights), pinned(state)) == before


@AUDIT.check()
def both_or_neither(rank: int, kind: Kind) -> Any:
    """Seen: with broadcast and ``{}`` elsewhere the others skip the model and report success; half is written."""
    heard: list[str] = []
    model = build(kind, 1)
    optimizer = adam(model.parameters())
    train(model, optimizer)
    for way in both_or_neither.share(WAYS, kind, 3):
        weights, state = get_state_dict(model, optimizer, options=reading(way))
        expected = get_state_dict(model, optimizer, options=reading("full"))
        other = build(kind, 2)
        new = adam(other.parameters(), lr=9.0)
        before = local_values(other), told_optimizer(new)
        bad_weights = {name: value for name, value in weights.items() if name != "units.1.up.bias"}
        bad_state: Any = {**state, "state": {k: v for k, v in state["state"].items() if k != "units.1.up.bias"}}

        def load(some: Any, more: Any, other: Any = other, new: Any = new, way: str = way) -> None:
            parts = {"model_state_dict": given(some, way, rank), "optim_state_dict": given(more, way, rank)}
            set_state_dict(other, new, **parts, options=writing(way))

        for some, more in ((bad_weights, state), (weights, bad_state), (bad_weights, bad_state)):
            with case(way), pytest.raises(RuntimeError, match=r"units\.1\.up\.bias") as caught:
                load(some, more)
            same(local_values(other), before[0])
            assert told_optimizer(new) == before[1]
            heard.append(str(caught.value))
        load(weights, state)
        found = get_state_dict(other, new, options=reading("full"))
        same(dict(found[0]), dict(expected[0]))
        same(found[1], expected[1])
    return heard


SPOILED: dict[str, Callable[[Any], Any]] = {
    "no state": lambda row: None,
    "other shape": lambda row: {**row, "exp_avg": torch.ones(7, 1)},
    "no dims": lambda row: {**row, "exp_avg_sq": torch.ones(5, 7)},
}


@AUDIT.check(joined=True)
def on_one_rank_only(rank: int, kind: Kind) -> Any:
    """A fault of one rank is one of all, and nothing is written."""
    heard: list[str] = []
    model, other = build(kind, 1), build(kind, 2)
    optimizer, new = adam(model.parameters()), adam(other.parameters(), lr=9.0)
    train(model, optimizer)
    train(other, new)
    before = told_optimizer(new)
    state: Any = get_optimizer_state_dict(model, optimizer, options=FULL)
    name = "units.0.up.weight"
    cases = [(bad, fault, "full") for bad in range(num_ranks()) for fault in SPOILED]
    cases += [(0, fault, "broadcast") for fault in SPOILED]
    for bad, fault, way in on_one_rank_only.share(cases, kind, 2):
        rows = dict(state["state"])
        if rank == bad and (row := SPOILED[fault](rows.pop(name))) is not None:
            rows[name] = row
        with case(bad, fault, way), pytest.raises((RuntimeError, FdsdError), match=name) as caught:
            set_optimizer_state_dict(other, new, given({**state, "state": rows}, way, rank), options=writing(way))
        assert told_optimizer(new) == before
        heard.append(str(caught.value))
    captured = fdsd.materialize(fdsd.capture(model, optimizer), group=group())
    for bad in range(num_ranks()):
        slots = {slot: dict(column) for slot, column in captured.optim.slots.items()}
        if rank == bad:
            slots["exp_avg"][name] = torch.ones(7, 1)
        spoiled = fdsd.TrainState(captured.model, captured.optim.replace(slots=slots))
        values = local_values(other)
        with case(bad, "restore"), pytest.raises(FdsdError, match=name) as caught:
            fdsd.restore(spoiled, other, new, group=group())
        assert told_optimizer(new) == before
        same(local_values(other), values)
        heard.append(str(caught.value))
    return heard


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("check", AUDIT.checks, ids=repr)
def test_on_ranks(check: Check, n: int) -> None:
    AUDIT.verify(check, n)
