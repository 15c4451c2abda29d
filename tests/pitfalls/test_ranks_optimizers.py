"""Optimizers over ranks: each known fault, on every kind of parallelism, for each way to give a state dict.

| row of PITFALLS.md | checks |
| --- | --- |
| asking a fresh optimizer steps it; hooks fire | ``reading_changes_nothing``; LBFGS: ``test_state_dict_optim`` |
| frozen after training; never touched | ``partial_state``, ``partial_state_of_the_engine`` |
| stateless SGD | ``stateless`` |
| flat: empty entries, older files, two rates, full, empty groups | ``partial_state``, ``flat_form``, ``empty_groups`` |
| options only in the file reach rank 0 only; types of options | ``group_options`` |
| 20,000 parameters | ``test_live_optimizers`` |
| other key orders; the caller's dict is changed | ``orders_and_arguments`` |
| one verdict on all ranks | ``on_one_rank_only``, ``both_or_neither``; all that return what was raised |
| ``set_state_dict`` with broadcast and ``{}`` elsewhere | ``both_or_neither`` |
| a slot is filled by broadcasting | ``on_one_rank_only`` |
| training goes on, for all optimizers and kinds | ``multiprocess/test_compat_state_dict``, ``test_engine`` |
| memory of a load | ``test_ranks_traffic`` |
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
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
from fdsd.errors import FdsdError
from tests.helpers.audited import SIZES, Kind, build, case, local_values, plain, same, train
from tests.helpers.auditing import Audit, Check, group, num_ranks
from tests.helpers.optimizers import told, told_optimizer

AUDIT = Audit()
WAYS = ("sharded", "full", "broadcast")
FULL = StateDictOptions(full_state_dict=True)


def adam(params: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, **{"lr": 0.5, "betas": (0.8, 0.9), **options})


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": adam,
    "AdamW, tensor lr": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.5), amsgrad=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.5),
    "SGD, dampening": lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.9, dampening=0.5),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.5),
}


def reading(way: str, flat: bool = False) -> StateDictOptions:
    return StateDictOptions(full_state_dict=way != "sharded", flatten_optimizer_state_dict=flat)


def writing(way: str, flat: bool = False, strict: bool = True) -> StateDictOptions:
    return StateDictOptions(
        full_state_dict=way != "sharded",
        broadcast_from_rank0=way == "broadcast",
        flatten_optimizer_state_dict=flat,
        strict=strict,
    )


def given(state: Any, way: str, rank: int) -> Any:
    return {} if way == "broadcast" and rank else state


def unit(model: Any, number: int) -> Any:
    """Find a unit, whatever it is wrapped in."""
    return next(m for name, m in model.named_modules() if name.endswith(f"units.{number}"))


def split(model: Any) -> tuple[list[Any], list[Any]]:
    """Give the parameters of the first unit, and the others."""
    first = list(unit(model, 0).parameters())
    known = {id(p) for p in first}
    return first, [p for p in model.parameters() if id(p) not in known]


def sorted_groups(osd: Any) -> Any:
    """FSDP1's flat parameters have an order of their own, and slots that which they were given in."""
    groups = [dict(sorted({**one, "params": sorted(one["params"])}.items())) for one in osd["param_groups"]]
    return {
        "state": {name: dict(sorted(osd["state"][name].items())) for name in sorted(osd["state"])},
        "groups": groups,
    }


# -- reading ---------------------------------------------------------------------------------------------------------


def read_all(model: Any, optimizer: Any) -> None:
    for full, cpu, flat in itertools.product([False, True], repeat=3):
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
    for (name, make), steps in itertools.product(OPTIMIZERS.items(), (0, 1)):
        with case(name, steps):
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
    for way, flat in itertools.product(WAYS, (False, True)):
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


def goes_on(*pairs: tuple[Any, Any]) -> None:
    for model, optimizer in pairs:
        train(model, optimizer, 2, start=1)
    first, second = [[getattr(p, "_local_tensor", p).detach() for p in model.parameters()] for model, _ in pairs]
    same(second, first)


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
    for steps, way, flat in itertools.product((0, 1), WAYS, (False, True)):
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
    for way in WAYS:
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
    for way, flat in itertools.product(WAYS, (False, True)):
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
    for way, flat, rate in itertools.product(WAYS, (False, True), (0.25, torch.tensor(0.25))):
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
    for way, flat in itertools.product(WAYS, (False, True)):
        with case(way, flat):
            model, other = build(kind, 1), build(kind, 2)
            optimizer, new = adam(model.parameters()), adam(other.parameters(), lr=9.0)
            train(model, optimizer)
            weights, state = get_state_dict(model, optimizer, options=reading(way, flat))
            weights, state = (turned(copy.deepcopy(dict(x)), rank) for x in (weights, state))
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
    for way in WAYS:
        weights, state = get_state_dict(model, optimizer, options=reading(way))
        expected = get_state_dict(model, optimizer, options=reading("full"))
        other = build(kind, 2)
        new = adam(other.parameters(), lr=9.0)
        before = local_values(other), told_optimizer(new)
        bad_weights = {name: value for name, value in weights.items() if name != "units.1.up.bias"}
        bad_state: Any = {**state, "state": {k: v for k, v in state["state"].items() if k != "units.1.up.bias"}}
        for some, more in ((bad_weights, state), (weights, bad_state), (bad_weights, bad_state)):
            with case(way), pytest.raises(RuntimeError, match=r"units\.1\.up\.bias") as caught:
                set_state_dict(
                    other,
                    new,
                    model_state_dict=given(some, way, rank),
                    optim_state_dict=given(more, way, rank),
                    options=writing(way),
                )
            same(local_values(other), before[0])
            assert told_optimizer(new) == before[1]
            heard.append(str(caught.value))
        set_state_dict(
            other,
            new,
            model_state_dict=given(weights, way, rank),
            optim_state_dict=given(state, way, rank),
            options=writing(way),
        )
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
    for bad, (fault, spoil), way in itertools.product(range(num_ranks()), SPOILED.items(), ("full", "broadcast")):
        if way == "broadcast" and bad:
            continue
        rows = dict(state["state"])
        if rank == bad and (row := spoil(rows.pop(name))) is not None:
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


@pytest.mark.xfail(strict=False, reason="open: rows that do not hold yet")
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("check", AUDIT.checks, ids=repr)
def test_on_ranks(check: Check, n: int) -> None:
    AUDIT.verify(check, n)
