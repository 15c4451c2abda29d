"""Groups and options by name, load_state_dict of an optimizer's own, and what does not fit and is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fdsd import OptimState, ParamGroup, defer, specs
from fdsd.comms.modules import read_modules
from fdsd.comms.optimizer_writing import check_write, write_optimizers
from fdsd.comms.optimizers import read_optimizers
from fdsd.data.errors import FdsdError, SpecMismatch
from tests.helpers.optimizers import OwnFormat, copied, told, told_all, told_optimizer, train
from tests.helpers.optimizers import trained_linear as trained

# -- groups ----------------------------------------------------------------------------------------------------------


def test_options_go_by_name_not_by_position() -> None:
    model = nn.Linear(2, 1)
    sgd = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias]}], lr=0.1)
    groups = [ParamGroup(("bias",), {"lr": 0.5}), ParamGroup(("weight",), {"lr": 0.25})]
    write_optimizers(OptimState({}, groups), read_modules(model), sgd)
    assert [group["lr"] for group in sgd.param_groups] == [0.25, 0.5]


def test_groups_may_be_cut_finer_or_coarser() -> None:
    model = nn.Linear(2, 1)
    modules = read_modules(model)
    fine = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias]}], lr=0.1)
    write_optimizers(OptimState({}, [ParamGroup(("weight", "bias"), {"lr": 0.5})]), modules, fine)
    assert [group["lr"] for group in fine.param_groups] == [0.5, 0.5]
    coarse = torch.optim.SGD(model.parameters(), lr=0.1)
    two = [ParamGroup(("weight",), {"lr": 0.25}), ParamGroup(("bias",), {"lr": 0.25, "initial_lr": 1.0})]
    write_optimizers(OptimState({}, two), modules, coarse)
    assert (coarse.param_groups[0]["lr"], coarse.param_groups[0]["initial_lr"]) == (0.25, 1.0)


def test_options_that_one_group_would_need_two_of_are_named() -> None:
    model = nn.Linear(2, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    two = [ParamGroup(("weight",), {"lr": 0.25, "x": (1, 2)}), ParamGroup(("bias",), {"lr": 0.5, "x": [1, 2]})]
    with pytest.raises(
        SpecMismatch, match=r"group 0 of optimizers\[0\] \(SGD\) differ: 'lr' is 0.25 for 'weight' and 0.5"
    ):
        write_optimizers(OptimState({}, two), read_modules(model), sgd)
    assert sgd.param_groups[0]["lr"] == 0.1


def test_option_classes_and_tensors_stay() -> None:
    model = nn.Linear(2, 1)
    lr = torch.tensor(0.1)
    adam = torch.optim.Adam(model.parameters(), lr=lr, betas=(0.5, 0.6), foreach=False)
    given: dict[str, Any] = {
        "lr": torch.tensor(0.7),
        "betas": [0.8, 0.9],
        "initial_lr": torch.tensor(2.0),
        "more": [(1, 2)],
    }
    write_optimizers(OptimState({}, [ParamGroup(("weight", "bias"), given)]), read_modules(model), adam)
    options = adam.param_groups[0]
    assert options["lr"] is lr and torch.equal(lr, torch.tensor(0.7))
    assert options["betas"] == (0.8, 0.9) and type(options["betas"]) is tuple
    assert options["initial_lr"] == 2.0 and options["initial_lr"] is not given["initial_lr"]
    assert options["more"] == [(1, 2)] and options["more"] is not given["more"]
    assert options["eps"] == 1e-8
    write_optimizers(OptimState({}, [ParamGroup(("weight", "bias"), {"lr": 0.3})]), read_modules(model), adam)
    assert options["lr"] is lr and lr.item() == pytest.approx(0.3)
    assert adam.param_groups[0] is options


EMPTY: list[tuple[str, list[list[str]], list[list[str]], list[float]]] = [
    ("the only ones", [["weight", "bias"], []], [[], ["bias", "weight"]], [2.0, 1.0]),
    ("at the same place", [[], ["weight", "bias"], []], [[], ["weight", "bias"], []], [1.0, 2.0, 3.0]),
    ("none saved", [["weight", "bias"], []], [["weight", "bias"]], [1.0, 0.1]),
    ("several saved, another number", [["weight"], ["bias"], []], [["weight", "bias"], [], []], [1.0, 1.0, 3.0]),
    ("which one is unclear", [["weight", "bias"], []], [["weight"], ["bias"], [], []], [1.0, 0.1]),
]


@pytest.mark.parametrize("name, live, saved, expected", EMPTY, ids=[row[0] for row in EMPTY])
def test_groups_without_parameters(name: str, live: Any, saved: Any, expected: list[float]) -> None:
    model = nn.Linear(2, 1)
    sgd = torch.optim.SGD([{"params": [model.get_parameter(n) for n in names]} for names in live], lr=0.1)
    same = name == "which one is unclear"
    groups = [ParamGroup(names, {"lr": 1.0 if same else i + 1.0}) for i, names in enumerate(saved)]
    write_optimizers(OptimState({}, groups), read_modules(model), sgd)
    assert [group["lr"] for group in sgd.param_groups] == expected


def test_names_of_parameters_are_added_where_the_state_has_them() -> None:
    model = nn.Linear(2, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    write_optimizers(OptimState({}, [ParamGroup(("bias", "weight"), {}, named=True)]), read_modules(model), sgd)
    assert sgd.param_groups[0]["param_names"] == ["weight", "bias"]


# -- load_state_dict of their own ------------------------------------------------------------------------------------


def test_a_load_state_dict_of_the_optimizers_own_is_called() -> None:
    model, own, modules = trained(OwnFormat, momentum=0.9)
    state = copied(read_optimizers(modules, own))
    fresh = OwnFormat(model.parameters(), lr=0.4, momentum=0.9)
    write_optimizers(state, modules, fresh)
    assert fresh.rounds == 2 and len(fresh.loaded) == 1
    assert told_optimizer(fresh) == told_optimizer(own)
    with pytest.raises(SpecMismatch, match="entries 'rounds' beside state and groups"):
        write_optimizers(state, modules, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def test_hooks_on_load_state_dict_run_and_tensors_among_options_stay() -> None:
    model, adam, modules = trained(lr=torch.tensor(0.1), foreach=False)
    lr = adam.param_groups[0]["lr"]
    state = copied(read_optimizers(modules, adam))
    calls: list[Any] = []
    adam.register_load_state_dict_pre_hook(lambda _optimizer, osd: calls.append(sorted(osd["state"])))
    adam.register_load_state_dict_post_hook(lambda _optimizer: calls.append("after"))
    lr.fill_(0.5)
    write_optimizers(state, modules, adam)
    assert calls == [[0, 1], "after"]
    assert adam.param_groups[0]["lr"] is lr and lr.item() == pytest.approx(0.1)
    assert adam.state[model.bias]["step"] == 2
    adam.state[model.bias]["exp_avg"].zero_()
    assert state.slots["exp_avg"]["bias"].any()


def test_what_a_hook_raises_leaves_the_other_optimizers_alone() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 1), "b": nn.Linear(2, 1)})
    both = [torch.optim.SGD(model[name].parameters(), lr=0.1, momentum=0.9) for name in ("a", "b")]
    train(model, both, 1)
    modules = read_modules(model)
    state = copied(read_optimizers(modules, both))

    def refuse(*_: Any) -> None:
        raise ArithmeticError("no")

    both[1].register_load_state_dict_pre_hook(refuse)
    train(model, both, 1)
    before = told_all(model, both)
    with pytest.raises(ArithmeticError) as caught:
        write_optimizers(state, modules, both)
    assert "optimizers[1] (SGD)" in caught.value.__notes__[0]
    assert told_all(model, both) == before


def test_a_state_of_an_older_version_is_brought_up_to_date() -> None:
    model = nn.Linear(2, 1)
    adam = torch.optim.Adam(model.parameters())
    moments = {"weight": torch.ones(1, 2), "bias": torch.ones(1)}
    slots = {"step": {"weight": 7, "bias": 7}, "exp_avg": moments, "exp_avg_sq": moments}
    write_optimizers(OptimState(slots, [ParamGroup(("weight", "bias"))]), read_modules(model), adam)
    assert isinstance(adam.state[model.bias]["step"], torch.Tensor)
    train(model, [adam], 1)
    assert adam.state[model.bias]["step"] == 8


# -- what does not fit -----------------------------------------------------------------------------------------------

WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("shape", {"exp_avg": torch.ones(3, 2)}, r"'exp_avg' has the shape \(3, 2\) and should have \(2, 3\)"),
    ("broadcastable", {"exp_avg": torch.ones(2, 1)}, r"'exp_avg' has the shape \(2, 1\) and should have \(2, 3\)"),
    ("0-dim", {"exp_avg_sq": torch.ones(())}, r"'exp_avg_sq' has the shape \(\) and should have \(2, 3\)"),
    ("complex", {"exp_avg": torch.ones(2, 3, dtype=torch.complex64)}, "'exp_avg' is complex64 and would lose"),
]


@pytest.mark.parametrize("name, values, message", WRONG, ids=[row[0] for row in WRONG])
def test_what_does_not_fit_is_told_and_nothing_is_written(name: str, values: dict[str, Any], message: str) -> None:
    _, adam, modules = trained()
    state = copied(read_optimizers(modules, adam))
    for column in state.slots.values():
        column["bias"].add_(1.0)
    slots = {
        slot: {**column, "weight": values.get(str(slot), column["weight"])} for slot, column in state.slots.items()
    }
    before = told_optimizer(adam)
    with pytest.raises(SpecMismatch, match=message):
        write_optimizers(state.replace(slots=slots), modules, adam)
    assert told_optimizer(adam) == before
    [problem] = check_write(state.replace(slots=slots), modules, adam)
    assert problem.kind == "spec" and problem.names == ("weight",)


def test_shapes_are_checked_for_fresh_optimizers_too() -> None:
    model = nn.Linear(3, 2)
    wrong = {"step": {"weight": torch.ones(())}, "exp_avg": {"weight": torch.ones(3, 2)}}
    state = OptimState(wrong, [ParamGroup(("weight", "bias"))])
    with pytest.raises(SpecMismatch, match=r"'exp_avg' has the shape \(3, 2\) and should have \(2, 3\)"):
        write_optimizers(state, read_modules(model), torch.optim.Adam(model.parameters()), require="listed")


def test_factored_state_has_shapes_of_its_own() -> None:
    model, adafactor, modules = trained(torch.optim.Adafactor)
    state = copied(read_optimizers(modules, adafactor))
    fresh = torch.optim.Adafactor(model.parameters(), lr=0.1)
    write_optimizers(state, modules, fresh)
    assert told_optimizer(fresh) == told_optimizer(adafactor)
    slots = {**state.slots, "row_var": {"weight": torch.ones(1, 3)}}
    fresh = torch.optim.Adafactor(model.parameters(), lr=0.1)
    with pytest.raises(SpecMismatch, match=r"'row_var' has the shape \(1, 3\) and should have \(2, 1\)"):
        write_optimizers(state.replace(slots=slots), modules, fresh)


def test_values_may_come_later_when_checking_but_not_when_writing() -> None:
    _, adam, modules = trained()
    state = copied(read_optimizers(modules, adam))
    for later in (specs, defer):
        abstract = state.replace(slots={slot: later(column) for slot, column in state.slots.items()})
        assert check_write(abstract, modules, adam) == []
        with pytest.raises(SpecMismatch, match="materialize it first"):
            write_optimizers(abstract, modules, adam)


def test_all_problems_are_told_at_once() -> None:
    _, adam, modules = trained()
    state = copied(read_optimizers(modules, adam))
    slots: dict[Any, Any] = {
        "step": {"weight": torch.ones(())},
        "exp_avg": {"weight": torch.ones(7), "odd": torch.ones(1)},
    }
    wrong = OptimState(slots, [ParamGroup(("weight", "odd"), {"lr": 0.1})])
    kinds = [problem.kind for problem in check_write(wrong, modules, adam)]
    assert kinds == ["missing", "missing", "unexpected", "spec"]  # bias; a slot of weight; odd; a shape
    assert check_write(state, modules, adam) == []


def test_what_is_no_state_is_refused() -> None:
    _, adam, modules = trained()
    with pytest.raises(FdsdError, match=r"OptimState.from_torch\(osd, fqns\)"):
        write_optimizers(adam.state_dict(), modules, adam)  # type: ignore[arg-type]


def test_the_state_that_was_given_is_not_changed() -> None:
    model, adam, modules = trained()
    state = copied(read_optimizers(modules, adam))
    before = told({slot: dict(column) for slot, column in state.slots.items()}), told(dict(state.groups[0].options))
    fresh = torch.optim.Adam(model.parameters())
    write_optimizers(state, modules, fresh)
    train(model, [fresh], 2)
    after = told({slot: dict(column) for slot, column in state.slots.items()}), told(dict(state.groups[0].options))
    assert before == after
