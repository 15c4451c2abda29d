"""Reading live optimizers: by name, by reference, and without a trace."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import nn

from fdsd import OptimState
from fdsd.comms.modules import read_modules
from fdsd.comms.optimizer_templates import read_or_template, template_of
from fdsd.comms.optimizers import read_optimizers
from fdsd.data.errors import FdsdError, NameConflict, UnknownName, Unsupported
from tests.helpers.optimizers import CASES, Case, OwnFormat, Setup, setups, small_model, told, told_all, train

READERS = [read_optimizers, template_of, read_or_template]


def objects_of(optimizers: list[torch.optim.Optimizer]) -> list[int]:
    """The identities of everything mutable in optimizers."""
    found: list[int] = []
    for optimizer in optimizers:
        found += [id(optimizer.state), id(optimizer.param_groups), *map(id, optimizer.param_groups)]
        found += [id(value) for row in optimizer.state.values() for value in (row, *row.values())]
        found += [id(value) for group in optimizer.param_groups for value in group.values()]
        found += [id(value) for name, value in sorted(vars(optimizer).items())]
    return found


@given(setups())
def test_reading_never_changes_anything(setup: Setup) -> None:
    for steps in (0, 2):
        model, optimizers = setup.trained(steps)
        model.get_parameter("part0.weight").grad = torch.ones_like(model.get_parameter("part0.weight"))
        modules = read_modules(model)
        before, objects = told_all(model, optimizers), objects_of(optimizers)
        random = torch.get_rng_state()
        for read in READERS:
            try:
                read(modules, optimizers)
            except Unsupported:
                assert setup.case.needs_closure and read is not read_optimizers
        assert told_all(model, optimizers) == before
        assert objects_of(optimizers) == objects
        assert torch.equal(torch.get_rng_state(), random)


@given(setups())
def test_what_is_read_is_what_torch_has(setup: Setup) -> None:
    model, optimizers = setup.trained(2)
    modules = read_modules(model)
    names = {id(p): name for name, p in model.named_parameters()}
    for optimizer in optimizers:
        fqns = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
        assert read_optimizers(modules, optimizer) == OptimState.from_torch(optimizer.state_dict(), fqns)


@given(setups())
def test_several_optimizers_are_read_as_their_parts_one_after_the_other(setup: Setup) -> None:
    model, optimizers = setup.trained(1)
    if isinstance(optimizers[0], OwnFormat):
        return  # each has an entry of its own under one name; see below
    modules = read_modules(model)
    parts = [read_optimizers(modules, optimizer) for optimizer in optimizers]
    together = read_optimizers(modules, iter(optimizers))
    assert together.groups == tuple(group for part in parts for group in part.groups)
    rows = {
        (slot, fqn): value for part in parts for slot, column in part.slots.items() for fqn, value in column.items()
    }
    found = {(slot, fqn): value for slot, column in together.slots.items() for fqn, value in column.items()}
    assert found.keys() == rows.keys()
    assert all(found[key] is rows[key] or told(found[key]) == told(rows[key]) for key in rows)


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_no_hooks_run_but_those_of_the_state_dict(case: Case) -> None:
    model = small_model(only_matrices=case.only_matrices or case.sparse)
    optimizer = case.make(list(model.parameters()))
    calls: list[str] = []
    handles = [
        optimizer.register_step_pre_hook(lambda *_: calls.append("step")),
        optimizer.register_step_post_hook(lambda *_: calls.append("step")),
        optimizer.register_load_state_dict_pre_hook(lambda *_: calls.append("load")),
        optimizer.register_load_state_dict_post_hook(lambda *_: calls.append("load")),
        _global_hook(calls),
        optimizer.register_state_dict_pre_hook(lambda *_: calls.append("state_dict")),
    ]
    modules = read_modules(model)
    try:
        read_optimizers(modules, optimizer)
        assert calls == ["state_dict"]
        if not case.needs_closure:
            template_of(modules, optimizer)
            assert set(calls) == {"state_dict"}
        else:
            with pytest.raises(Unsupported, match="without stepping it"):
                template_of(modules, optimizer)
    finally:
        for handle in handles:
            handle.remove()


def _global_hook(calls: list[str]) -> Any:
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    return register_optimizer_step_pre_hook(lambda *_: calls.append("any step"))


def test_values_are_live() -> None:
    model = small_model()
    adam = torch.optim.Adam(model.parameters(), lr=0.1)
    train(model, [adam], 1)
    state = read_optimizers(read_modules(model), adam)
    for name, param in model.named_parameters():
        assert state.slots_of(name) == adam.state[param]
        assert all(state.slots[slot][name] is value for slot, value in adam.state[param].items())
    train(model, [adam], 1)
    assert state.slots["step"]["part0.weight"] == 2


def test_names_are_those_of_the_unwrapped_model() -> None:
    inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model = nn.DataParallel(inner)
    sgd = torch.optim.SGD(inner.parameters(), lr=0.1, momentum=0.9)
    train(inner, [sgd], 1)
    state = read_optimizers(read_modules(model), sgd)
    assert state.fqns == ("0.weight", "0.bias", "1.weight", "1.bias")
    assert list(state.slots["momentum_buffer"]) == list(state.fqns)


def test_a_tied_parameter_goes_by_its_first_name() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(4, 2), "head": nn.Linear(2, 4, bias=False)})
    model["head"].weight = model["embed"].weight
    adam = torch.optim.Adam(model.parameters())
    train(model, [adam], 1)
    assert read_optimizers(read_modules(model), adam).fqns == ("embed.weight",)


def test_parameters_of_several_parts_are_found() -> None:
    parts = [nn.ModuleDict({name: nn.Linear(2, 1)}) for name in ("a", "b")]
    sgd = torch.optim.SGD([p for part in parts for p in part.parameters()], lr=0.1)
    assert read_optimizers(read_modules(parts), sgd).fqns == ("a.weight", "a.bias", "b.weight", "b.bias")


def test_a_stateless_optimizer_and_empty_groups_are_states() -> None:
    model = nn.Linear(2, 1)
    sgd = torch.optim.SGD([{"params": []}, {"params": model.parameters(), "lr": 0.5}], lr=0.1)
    state = read_optimizers(read_modules(model), sgd)
    assert dict(state.slots) == {}
    assert [(group.fqns, group.options["lr"]) for group in state.groups] == [((), 0.1), (("weight", "bias"), 0.5)]


def test_an_empty_state_is_told_from_none() -> None:
    model = nn.Linear(2, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    sgd.state[model.weight] = {}
    state = read_optimizers(read_modules(model), sgd)
    assert dict(state.slots[()]) == {"weight": {}}
    assert state.slots[()]["weight"] is not sgd.state[model.weight]


def test_names_of_an_optimizer_made_from_named_parameters_are_marked() -> None:
    model = nn.Linear(2, 1)
    adam = torch.optim.Adam(model.named_parameters())
    [group] = read_optimizers(read_modules(model), adam).groups
    assert group.named == ("param_names" in adam.param_groups[0])
    assert "param_names" not in group.options


def test_entries_that_belong_to_no_parameter_are_kept() -> None:
    model = nn.Linear(2, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, [sgd], 1)
    sgd.state["global"] = {"count": 3}
    state = read_optimizers(read_modules(model), sgd)
    assert dict(state.slots["count"]) == {"global": 3}
    assert state.to_torch()["state"]["global"] == {"count": 3}


# -- state dicts of their own ----------------------------------------------------------------------------------------


def test_a_state_dict_of_the_optimizers_own_is_what_is_read() -> None:
    model = nn.Linear(2, 1)
    own = OwnFormat(model.parameters(), lr=0.1, momentum=0.9)
    train(model, [own], 3)
    state = read_optimizers(read_modules(model), own)
    assert dict(state.extra) == {"rounds": 3}
    assert state.slots["momentum_buffer"]["bias"] is own.state[model.bias]["momentum_buffer"]


def test_several_optimizers_may_not_differ_in_entries_of_one_name() -> None:
    a, b = nn.Linear(2, 1), nn.Linear(2, 1)
    model = nn.ModuleDict({"a": a, "b": b})
    own = [OwnFormat(part.parameters(), lr=0.1, momentum=0.9) for part in (a, b)]
    train(model, own[:1], 1)
    with pytest.raises(NameConflict, match="different entries under 'rounds'"):
        read_optimizers(read_modules(model), own)


def test_a_hook_may_put_names_into_the_state_dict() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(4, 2), "head": nn.Linear(2, 4, bias=False)})
    model["head"].weight = model["embed"].weight
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, [sgd], 1)

    def by_name(_optimizer: Any, osd: dict[str, Any]) -> dict[str, Any]:
        groups = [{**group, "params": ["head.weight"]} for group in osd["param_groups"]]
        return {"state": {"head.weight": osd["state"][0]}, "param_groups": groups}

    sgd.register_state_dict_post_hook(by_name)
    state = read_optimizers(read_modules(model), sgd)
    assert state.fqns == ("embed.weight",)
    assert list(state.slots["momentum_buffer"]) == ["embed.weight"]


def test_what_a_hook_spoils_is_told_of_that_optimizer() -> None:
    model = nn.Linear(2, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    sgd.register_state_dict_post_hook(lambda _optimizer, osd: {"state": {}})
    with pytest.raises(FdsdError) as caught:
        read_optimizers(read_modules(model), sgd)
    assert any("optimizers[0] (SGD)" in note for note in caught.value.__notes__)


# -- errors ----------------------------------------------------------------------------------------------------------


def test_parameters_that_are_not_in_the_model_are_counted_and_told_by_shape() -> None:
    model, other = nn.Linear(2, 1), nn.Linear(3, 5)
    sgd = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    with pytest.raises(UnknownName, match=r"2 parameters of optimizers\[0\] \(SGD\), of shapes \(5, 3\), \(5,\)"):
        read_optimizers(read_modules(model), sgd)


def test_a_parameter_in_two_optimizers_is_refused_by_name() -> None:
    model = nn.Linear(2, 1)
    two = [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.Adam([model.bias])]
    with pytest.raises(NameConflict, match=r"'bias' in optimizers\[0\] \(SGD\) group 0 and optimizers\[1\] \(Adam\)"):
        read_optimizers(read_modules(model), two)


@pytest.mark.parametrize("given", [None, 3, "adam", {"state": {}}, [nn.Linear(1, 1)]])
def test_what_is_no_optimizer_is_refused(given: Any) -> None:
    with pytest.raises(Unsupported, match=r"Optimizers are torch.optim.Optimizer"):
        read_optimizers(read_modules(nn.Linear(1, 1)), given)


def test_state_that_no_group_lists_is_refused() -> None:
    model = nn.Linear(2, 1)
    sgd = torch.optim.SGD([model.bias], lr=0.1)
    sgd.state[model.weight] = {"momentum_buffer": torch.ones(1, 2)}
    with pytest.raises(UnknownName, match=r"1 parameter in none of its groups, of shapes \(1, 2\)"):
        read_optimizers(read_modules(model), sgd)


def test_state_under_odd_keys_is_refused() -> None:
    model = nn.Linear(2, 1)
    sgd = torch.optim.SGD([model.bias], lr=0.1)
    sgd.state[(1, 2)] = {}
    with pytest.raises(Unsupported, match=r"state under \(1, 2\)"):
        read_optimizers(read_modules(model), sgd)


def test_no_optimizers_give_an_empty_state() -> None:
    assert read_optimizers(read_modules(nn.Linear(1, 1)), []) == OptimState()


def test_twins_are_not_kept() -> None:
    model = nn.Linear(2, 1)
    adam = torch.optim.Adam(model.parameters())
    gc.collect()
    before = sum(type(obj) is torch.optim.Adam for obj in gc.get_objects())
    template_of(read_modules(model), adam)
    gc.collect()
    assert sum(type(obj) is torch.optim.Adam for obj in gc.get_objects()) <= before
