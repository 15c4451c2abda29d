"""Writing into live optimizers: what was read comes back, in place, by name; what does not fit changes nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fdsd import OptimState, ParamGroup
from fdsd.comms.modules import read_modules
from fdsd.comms.optimizer_writing import write_optimizers
from fdsd.comms.optimizers import read_optimizers
from fdsd.data.errors import SpecMismatch
from fdsd.data.flat_optim import flatten, unflatten
from tests.helpers.optimizers import (
    CASES,
    Setup,
    by_name,
    copied,
    setups,
    told,
    told_all,
    told_optimizer,
    train,
)
from tests.helpers.optimizers import (
    trained_linear as trained,
)

# Own entries of several optimizers have one name, so these are tried one by one.
ALONE = tuple(case for case in CASES if case.name != "OwnFormat")
# torch makes a generator's name of a text
CASTABLE = tuple(case for case in ALONE if case.name not in ("Nested", "LBFGS"))


def params_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


# -- laws ------------------------------------------------------------------------------------------------------------


@given(setups(ALONE), st.booleans())
def test_what_was_read_written_back_changes_nothing(setup: Setup, is_copy: bool) -> None:
    model, optimizers = setup.trained(2)
    twin_model, twins = setup.trained(2)
    modules = read_modules(model)
    tensors = [id(v) for o in optimizers for row in o.state.values() for v in row.values() if torch.is_tensor(v)]
    state = read_optimizers(modules, optimizers)
    write_optimizers(copied(state) if is_copy else state, modules, optimizers, require="listed")
    after = [id(v) for o in optimizers for row in o.state.values() for v in row.values() if torch.is_tensor(v)]
    assert after == tensors
    assert told_all(model, optimizers) == told_all(twin_model, twins)
    for m, some in ((model, optimizers), (twin_model, twins)):
        setup.train(m, some, 2, seed=5)
    assert told_all(model, optimizers) == told_all(twin_model, twins)


@given(setups(ALONE), st.integers(0, 2), st.booleans())
def test_another_optimizer_becomes_the_same(setup: Setup, steps: int, adopt: bool) -> None:
    model, optimizers = setup.trained(2)
    other_model, others = setup.trained(steps, seed=9)
    other_model.load_state_dict(model.state_dict())
    state = copied(read_optimizers(read_modules(model), optimizers))
    write_optimizers(state, read_modules(other_model), others, require="listed", adopt=adopt, dtype="source")
    assert told_all(model, optimizers) == told_all(other_model, others)
    for m, some in ((model, optimizers), (other_model, others)):
        for p in m.parameters():
            p.requires_grad_(True)
        setup.train(m, some, 2, seed=5)
    assert told_all(model, optimizers) == told_all(other_model, others)


@given(setups(CASTABLE))
def test_values_are_cast_as_torch_casts_them(setup: Setup) -> None:
    """``Optimizer.load_state_dict`` into a fresh optimizer of another dtype is the oracle.

    But for values of a dtype of their own, such as NAdam's products: torch would bring them to that of the parameter,
    which changes training. A step of torch's own tells which they are.
    """
    model, optimizers = setup.trained(2)
    narrow = Setup(setup.case, setup.shapes, torch.bfloat16, setup.groups, setup.untouched, setup.frozen, setup.tied)
    ours_model, ours = narrow.make()
    theirs_model, theirs = narrow.make()
    for own, optimizer in zip(theirs, optimizers, strict=True):
        own.load_state_dict(optimizer.state_dict())
    for own, optimizer, stepped in zip(theirs, optimizers, narrow.trained(1)[1], strict=True):
        for q, p, like in zip(*map(params_of, (own, optimizer, stepped)), strict=True):
            for slot, value in stepped.state.get(like, {}).items():
                if torch.is_tensor(value) and value.dtype != torch.bfloat16 and slot != "step":
                    own.state[q][slot] = optimizer.state[p][slot].to(value.dtype)
    for p in ours_model.parameters():
        p.requires_grad_(True)
    state = read_optimizers(read_modules(model), optimizers)
    fresh = [setup.case.make([{"params": g["params"]} for g in o.param_groups]) for o in ours]
    for optimizer in fresh:  # Adagrad's state is there from the start, and keeps its dtype
        optimizer.state.clear()
    write_optimizers(state, read_modules(ours_model), fresh, require="listed")
    assert [told_optimizer(o) for o in fresh] == [told_optimizer(o) for o in theirs]
    del theirs_model


@given(setups(ALONE))
def test_the_flat_form_with_live_options_comes_back(setup: Setup) -> None:
    model, optimizers = setup.trained(2)
    modules = read_modules(model)
    state = read_optimizers(modules, optimizers)
    before = told_all(model, optimizers)
    write_optimizers(unflatten(flatten(state), like=state), modules, optimizers, require="listed")
    assert told_all(model, optimizers) == before


@given(setups(ALONE))
def test_without_adopt_nothing_is_shared(setup: Setup) -> None:
    model, optimizers = setup.trained(2)
    other_model, others = setup.make(seed=9)
    write_optimizers(
        read_optimizers(read_modules(model), optimizers), read_modules(other_model), others, require="listed"
    )
    before = told_all(model, optimizers)
    for p in other_model.parameters():
        p.requires_grad_(True)
    setup.train(other_model, others, 2)
    assert told_all(model, optimizers) == before


# -- in place --------------------------------------------------------------------------------------------------------


def test_live_tensors_are_filled_and_keep_their_dtype() -> None:
    model, adam, modules = trained()
    live = adam.state[model.weight]["exp_avg"]
    row, table = adam.state[model.weight], adam.state
    state = copied(read_optimizers(modules, adam))
    new = torch.arange(6.0, dtype=torch.float64).reshape(2, 3)
    write_optimizers(
        state.replace(slots={**state.slots, "exp_avg": {**state.slots["exp_avg"], "weight": new}}), modules, adam
    )
    assert adam.state[model.weight]["exp_avg"] is live
    assert adam.state[model.weight] is row and adam.state is table
    assert live.dtype == torch.float32
    assert torch.equal(live, new.float())


def test_source_dtypes_replace_live_tensors() -> None:
    _, adam, modules = trained()
    state = copied(read_optimizers(modules, adam))
    slots = {slot: {fqn: v.double() for fqn, v in column.items()} for slot, column in state.slots.items()}
    write_optimizers(state.replace(slots=slots), modules, adam, dtype="source")
    assert {v.dtype for row in adam.state.values() for v in row.values()} == {torch.float64}


def test_swapped_states_are_swapped() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    adam = torch.optim.Adam(model.parameters())
    train(model, [adam], 1)
    modules = read_modules(model)
    a, b = (told(adam.state[model[name].weight]) for name in ("a", "b"))
    state = read_optimizers(modules, adam)
    swapped = {
        slot: {"a.weight": column["b.weight"], "b.weight": column["a.weight"]} for slot, column in state.slots.items()
    }
    write_optimizers(state.replace(slots=swapped), modules, adam)
    assert (told(adam.state[model["b"].weight]), told(adam.state[model["a"].weight])) == (a, b)


def test_a_transposed_state_is_transposed_in_place() -> None:
    model = nn.Linear(2, 2, bias=False)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, [sgd], 1)
    modules = read_modules(model)
    state = read_optimizers(modules, sgd)
    live = state.slots["momentum_buffer"]["weight"]
    expected = live.t().clone()
    write_optimizers(state.replace(slots={"momentum_buffer": {"weight": live.t()}}), modules, sgd)
    assert sgd.state[model.weight]["momentum_buffer"] is live
    assert torch.equal(live, expected)


@pytest.mark.parametrize("adopt", [False, True])
def test_a_tensor_that_several_parameters_share_becomes_one_for_each(adopt: bool) -> None:
    model = nn.Linear(2, 1)
    adam = torch.optim.Adam(model.parameters())
    step = torch.tensor(4.0)
    slots = {
        "step": {"weight": step, "bias": step},
        "exp_avg": {"weight": torch.ones(1, 2), "bias": torch.ones(1)},
        "exp_avg_sq": {"weight": torch.ones(1, 2), "bias": torch.ones(1)},
    }
    write_optimizers(OptimState(slots, [ParamGroup(("weight", "bias"))]), read_modules(model), adam, adopt=adopt)
    train(model, [adam], 1)
    assert [adam.state[p]["step"].item() for p in model.parameters()] == [5.0, 5.0]


def test_a_live_tensor_that_several_parameters_share_is_not_written_twice() -> None:
    model, sgd, modules = trained(torch.optim.SGD, momentum=0.9)
    shared = torch.zeros(())
    for row in sgd.state.values():
        row["count"] = shared
    state = copied(read_optimizers(modules, sgd))
    counts = {"weight": torch.tensor(1.0), "bias": torch.tensor(2.0)}
    write_optimizers(state.replace(slots={**state.slots, "count": counts}), modules, sgd)
    assert [sgd.state[p]["count"].item() for p in model.parameters()] == [1.0, 2.0]


def test_adopted_tensors_are_taken_over() -> None:
    model, adam, modules = trained()
    fresh = torch.optim.Adam(model.parameters())
    state = copied(read_optimizers(modules, adam))
    write_optimizers(state, modules, fresh, adopt=True)
    assert fresh.state[model.weight]["exp_avg"].data_ptr() == state.slots["exp_avg"]["weight"].data_ptr()


def test_a_live_tensor_of_another_optimizer_is_not_taken_over() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    both = [torch.optim.SGD(model[name].parameters(), lr=0.1, momentum=0.9) for name in ("a", "b")]
    train(model, both[:1], 1)
    modules = read_modules(model)
    state = read_optimizers(modules, both)
    buffers = dict(state.slots["momentum_buffer"])
    same = {**buffers, "b.weight": buffers["a.weight"], "b.bias": buffers["a.bias"]}
    write_optimizers(state.replace(slots={"momentum_buffer": same}), modules, both, adopt=True)
    pairs = [
        (both[0].state[p], both[1].state[q])
        for p, q in zip(model["a"].parameters(), model["b"].parameters(), strict=True)
    ]
    assert all(p["momentum_buffer"].data_ptr() != q["momentum_buffer"].data_ptr() for p, q in pairs)
    assert all(torch.equal(p["momentum_buffer"], q["momentum_buffer"]) for p, q in pairs)


# -- what there is and is not ----------------------------------------------------------------------------------------


def test_slots_that_the_state_lacks_go_and_new_ones_come() -> None:
    model, adam, modules = trained(amsgrad=True)
    state = copied(read_optimizers(modules, adam))
    slots = {slot: column for slot, column in state.slots.items() if slot != "max_exp_avg_sq"}
    slots[("extra", 0)] = {"bias": torch.ones(5)}
    write_optimizers(state.replace(slots=slots), modules, adam)
    assert list(adam.state[model.weight]) == ["step", "exp_avg", "exp_avg_sq"]
    assert list(adam.state[model.bias]) == ["step", "exp_avg", "exp_avg_sq", "extra"]
    assert torch.equal(adam.state[model.bias]["extra"][0], torch.ones(5))


MISSING = (
    "Missing optimizer state for parameter 'bias' in checkpoint. The parameter requires gradients but has no saved "
    "optimizer state. To load anyway, use StateDictOptions(strict=False)."
)


@pytest.mark.parametrize("is_fresh", [False, True])
def test_a_parameter_without_saved_state_is_told_in_torchs_words(is_fresh: bool) -> None:
    model, adam, modules = trained()
    state = copied(read_optimizers(modules, adam))
    slots = {slot: {"weight": column["weight"]} for slot, column in state.slots.items()}
    if is_fresh:
        adam = torch.optim.Adam(model.parameters())
    before = told_optimizer(adam)
    with pytest.raises(RuntimeError) as caught:
        write_optimizers(state.replace(slots=slots), modules, adam)
    assert str(caught.value) == MISSING
    assert told_optimizer(adam) == before
    write_optimizers(state.replace(slots=slots), modules, adam, require="nothing")
    assert model.bias not in adam.state and adam.state[model.weight]["step"] == 2


def test_frozen_parameters_need_no_state_and_keep_what_is_saved() -> None:
    model, adam, modules = trained()
    model.bias.requires_grad_(False)
    state = copied(read_optimizers(modules, adam))
    write_optimizers(state, modules, adam)
    assert adam.state[model.bias]["step"] == 2
    slots = {slot: {"weight": column["weight"]} for slot, column in state.slots.items()}
    write_optimizers(state.replace(slots=slots), modules, adam)
    assert model.bias not in adam.state


def test_stateless_is_a_state() -> None:
    for cls in (torch.optim.SGD, torch.optim.Adam):
        model = nn.Linear(2, 1)
        optimizer = cls(model.parameters(), lr=0.1)
        state = read_optimizers(read_modules(model), optimizer)
        train(model, [optimizer], 1)
        write_optimizers(state, read_modules(model), optimizer)
        assert not any(optimizer.state.values())


def test_stateless_parameters_beside_others_are_not_missing() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 1), "b": nn.Linear(2, 1)})
    both = [torch.optim.Adam(model["a"].parameters()), torch.optim.SGD(model["b"].parameters(), lr=0.1)]
    train(model, both, 1)
    modules = read_modules(model)
    before = told_all(model, both)
    write_optimizers(copied(read_optimizers(modules, both)), modules, both)
    assert told_all(model, both) == before


def test_closures_optimizers_have_state_for_one_parameter_only() -> None:
    model = nn.Linear(2, 1)
    lbfgs = by_name("LBFGS").make(list(model.parameters()))
    train(model, [lbfgs], 1)
    state = copied(read_optimizers(read_modules(model), lbfgs))
    before = told_optimizer(lbfgs)
    write_optimizers(state, read_modules(model), lbfgs)
    assert told_optimizer(lbfgs) == before
    fresh = by_name("LBFGS").make(list(model.parameters()))
    write_optimizers(state, read_modules(model), fresh)
    assert told_optimizer(fresh) == before


def test_unlisted_parameters_are_missing_unless_nothing_is_required() -> None:
    _, sgd, modules = trained(torch.optim.SGD)
    state = OptimState({}, [ParamGroup(("weight",), {"lr": 0.7})])
    for require in ("state", "listed"):
        with pytest.raises(SpecMismatch, match="1 parameter that train are in no group of the state: 'bias'"):
            write_optimizers(state, modules, sgd, require=require)
    write_optimizers(state, modules, sgd, require="nothing")
    assert sgd.param_groups[0]["lr"] == 0.7


def test_kept_names_keep_their_live_state() -> None:
    _, adam, modules = trained()
    state = copied(read_optimizers(modules, adam))
    slots = {slot: {"weight": column["weight"]} for slot, column in state.slots.items()}
    before = told_optimizer(adam)
    write_optimizers(state.replace(slots=slots), modules, adam, keep=["bias"])
    assert told_optimizer(adam) == before


def test_unexpected_names_are_told_or_passed_over() -> None:
    _, adam, modules = trained()
    state = copied(read_optimizers(modules, adam))
    more = state.replace(
        slots={slot: {**column, "old.weight": torch.ones(2)} for slot, column in state.slots.items()},
        groups=[*state.groups, ParamGroup(("old.weight",), {"lr": 3.0})],
    )
    with pytest.raises(SpecMismatch, match=r"parameters that no optimizer has: 'old.weight'"):
        write_optimizers(more, modules, adam)
    before = told_optimizer(adam)
    write_optimizers(more, modules, adam, allow_unexpected=True)
    assert told_optimizer(adam) == before


def test_entries_that_belong_to_no_parameter_come_back() -> None:
    model, sgd, modules = trained(torch.optim.SGD, momentum=0.9)
    sgd.state["global"] = {"count": 3, "mean": torch.ones(2)}
    state = copied(read_optimizers(modules, sgd))
    fresh = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    write_optimizers(state, modules, fresh)
    assert told(fresh.state["global"]) == told({"count": 3, "mean": torch.ones(2)})
    two = [torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()]
    with pytest.raises(SpecMismatch, match="'global' belongs to no parameter, and several optimizers"):
        write_optimizers(state, modules, two)


def test_a_tied_parameter_may_go_by_any_of_its_names() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(4, 2), "head": nn.Linear(2, 4, bias=False)})
    model["head"].weight = model["embed"].weight
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    buffer = torch.arange(8.0).reshape(4, 2)
    modules = read_modules(model)
    for names in (["head.weight"], ["embed.weight"], ["embed.weight", "head.weight"]):
        state = OptimState({"momentum_buffer": dict.fromkeys(names, buffer)}, [ParamGroup(names, {"lr": 0.3})])
        write_optimizers(state, modules, sgd)
        assert torch.equal(sgd.state[model["embed"].weight]["momentum_buffer"], buffer)
        assert sgd.param_groups[0]["lr"] == 0.3
        sgd.state.clear()
    clash = {"embed.weight": buffer, "head.weight": buffer + 1}
    with pytest.raises(SpecMismatch, match=r"one tied parameter have different states: 'embed.weight'"):
        write_optimizers(OptimState({"momentum_buffer": clash}, state.groups), modules, sgd)
