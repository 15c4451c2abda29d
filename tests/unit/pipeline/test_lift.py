"""Lifting to the optimizer: what follows, what must agree, what is refused; on exact values."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from fdsd import (
    OptimState,
    ParamGroup,
    Pipeline,
    StateDict,
    TrainState,
    add_scalar,
    cast,
    concat,
    defer,
    drop,
    filter_frozen,
    index_select,
    insert,
    map_tensors,
    materialize,
    pad,
    permute_rope,
    rename_fqns,
    reshape,
    select,
    specs,
    split,
    stack,
    tie,
    transpose,
    unstack,
    untie,
)
from fdsd.data.spec import TensorSpec
from fdsd.errors import FdsdError, IncompleteGroup, NotInvertible, SpecMismatch, UnknownName, Unsupported
from fdsd.testing import assert_laws, assert_same

MODEL = {
    "q": torch.arange(8.0).reshape(4, 2),
    "k": torch.arange(10.0, 14.0).reshape(2, 2),
    "v": torch.arange(20.0, 24.0).reshape(2, 2),
    "scale": torch.tensor(30.0),
}


def state(model: dict[str, Any] | None = None, *, groups: Any = None, **slots: dict[str, Any]) -> TrainState:
    """A trained model; ``exp_avg`` is the model plus 100, unless given."""
    model = MODEL if model is None else model
    default = {
        "exp_avg": {name: leaf + 100 for name, leaf in model.items()},
        "step": {name: torch.tensor(5.0) for name in model},
    }
    columns = slots or default
    return TrainState(model, OptimState(columns, groups or (ParamGroup(tuple(model), {"lr": 0.1}),)))


def values(made: TrainState, slot: Any = "exp_avg") -> dict[str, Any]:
    assert made.optim is not None
    return {name: leaf.tolist() if hasattr(leaf, "tolist") else leaf for name, leaf in made.optim.slots[slot].items()}


def groups(made: TrainState) -> list[tuple[str, ...]]:
    assert made.optim is not None
    return [group.fqns for group in made.optim.groups]


class TestMomentsFollow:
    @pytest.mark.parametrize(
        "p",
        [
            rename_fqns({"q": "query", "scale": "s"}),
            concat(["q", "k", "v"], "qkv", dim=0, groups=2),
            concat(["k", "v"], "kv", dim=1),
            split("q", ["a", "b"], dim=0, sizes=[1, 3]),
            transpose(["q", "k"]),
            reshape("q", (2, 4)),
            permute_rope("q", heads=2, to="pairs"),
            index_select("q", [3, 1, 0, 2]),
            pad("q", 6),
            unstack("q", "q.{x}"),
            unstack("q", "q.{x}", dim=1) >> stack("q.{x}", "w", dim=0),
            select("q", "scale"),
            drop("q"),
            tie({"alias": "q"}),
            filter_frozen(["k"]),
        ],
        ids=str,
    )
    def test_as_the_model_does(self, p: Pipeline) -> None:
        x = state()
        made = p(x)
        assert made.optim is not None
        moments: Any = p({name: leaf + 100 for name, leaf in MODEL.items()})
        kept = {name: leaf for name, leaf in moments.items() if name != "alias"}
        assert_same(made.optim.slots["exp_avg"], kept)
        assert set(values(made, "step").values()) == {5.0} and set(values(made, "step")) == set(kept)
        assert groups(made) == [tuple(name for name in made.model if name != "alias")]
        assert_laws(p, x)

    def test_nested_slots_and_odd_values(self) -> None:
        slots: dict[Any, Any] = {
            ("kron", 0): {"q": MODEL["q"] * 2},
            "none": {"q": None},
            "count": {"q": 7},
            "text": {"q": "x"},
        }
        x = TrainState(MODEL, OptimState(slots, (ParamGroup(("q",), {}),)))
        made = transpose("q")(x)
        assert made.optim is not None
        assert values(made, ("kron", 0)) == {"q": (MODEL["q"] * 2).t().tolist()}
        assert [values(made, slot)["q"] for slot in ("none", "count", "text")] == [None, 7, "x"]

    def test_stateless_optimizers(self) -> None:
        x = TrainState(MODEL, OptimState({}, (ParamGroup(("q", "k"), {"lr": 0.1}), ParamGroup((), {"lr": 0.2}))))
        made = concat(["q", "k"], "qk", dim=0)(x)
        assert groups(made) == [("qk",), ()] and made.optim is not None and not made.optim.slots
        assert_laws(concat(["q", "k"], "qk", dim=0), x)

    def test_a_model_alone(self) -> None:
        assert transpose("q")(TrainState(MODEL)).optim is None


class TestScalars:
    def joined(self, a: Any, b: Any) -> Any:
        x = state(step={"k": a, "v": b}, groups=(ParamGroup(("k", "v"), {}),))
        made = concat(["k", "v"], "kv", dim=0)(x)
        assert made.optim is not None
        return made.optim.slots["step"]["kv"]

    @pytest.mark.parametrize("value", [torch.tensor(5.0), torch.tensor(5), 5, 5.0, None, "x", (1, 2)])
    def test_equal_ones_pass(self, value: Any) -> None:
        again = value.clone() if isinstance(value, torch.Tensor) else value
        made = self.joined(value, again)
        assert made.item() == 5 if isinstance(value, torch.Tensor) else made == value

    @pytest.mark.parametrize(
        ("a", "b", "texts"),
        [
            (torch.tensor(5.0), torch.tensor(6.0), ["5.0", "6.0"]),
            (5, 6, ["5", "6"]),
            (None, 5, ["None", "5"]),
            (5, 5.0, ["5", "5.0"]),
            (torch.tensor(5.0), torch.tensor(5), ["5.0", "5"]),
            (torch.tensor(5.0), 5.0, ["5.0"]),
        ],
        ids=str,
    )
    def test_unequal_ones_are_refused_before_anything_moves(self, a: Any, b: Any, texts: list[str]) -> None:
        with pytest.raises(SpecMismatch) as caught:
            self.joined(a, b)
        for text in ("'step'", "'k'", "'v'", "'kv'", *texts):
            assert text in str(caught.value)

    def test_lazy_ones_are_checked_when_they_are_read(self) -> None:
        x = state(step={"k": torch.tensor(5.0), "v": torch.tensor(6.0)}, groups=(ParamGroup(("k", "v"), {}),))
        assert x.optim is not None
        lazy = TrainState(x.model, x.optim.replace(slots={"step": defer(x.optim.slots["step"])}))
        with pytest.raises(FdsdError, match="unequal"):
            materialize(concat(["k", "v"], "kv", dim=0)(lazy))

    def test_each_part_has_its_own(self) -> None:
        """A step count that two parameters shared would count twice as fast."""
        made = split("q", ["a", "b"], dim=0, sizes=[1, 3])(state())
        assert made.optim is not None
        steps = made.optim.slots["step"]
        assert steps["a"].tolist() == steps["b"].tolist() == 5.0
        assert steps["a"].data_ptr() != steps["b"].data_ptr()

    def test_a_parameter_without_dims_is_not_taken_for_a_step_count(self) -> None:
        made = reshape("scale", (1, 1))(state())
        assert values(made)["scale"] == [[130.0]] and values(made, "step")["scale"] == 5.0
        back = reshape("scale", ())(made)
        assert values(back)["scale"] == 130.0 and values(back, "step")["scale"] == 5.0

    def test_only_parameters_without_dims(self) -> None:
        x = state({f"e.{i}": torch.tensor(float(i)) for i in range(3)})
        made = stack("e.{x}", "e")(x)
        assert values(made) == {"e": [100.0, 101.0, 102.0]} and values(made, "step") == {"e": 5.0}
        assert_laws(stack("e.{x}", "e"), x)


class TestRefusals:
    @pytest.mark.parametrize(
        "p",
        [cast(torch.float64), cast(torch.bfloat16, "q"), add_scalar("q", 1.0), map_tensors(torch.neg, "q")],
        ids=str,
    )
    def test_computing_steps_say_why(self, p: Pipeline) -> None:
        with pytest.raises(Unsupported) as caught:
            p(state())
        for text in ("'q'", "optimizer", "because", "TrainState(p(state.model)"):
            assert text in str(caught.value)
        assert not p.check(state()).ok

    def test_computing_on_what_is_not_trained_is_fine(self) -> None:
        x = state({**MODEL}, exp_avg={"q": MODEL["q"]}, groups=(ParamGroup(("q",), {}),))
        made = cast(torch.float64, "k")(x)
        assert made.model["k"].dtype == torch.float64
        assert_laws(cast(torch.float64, "k"), x)

    @pytest.mark.parametrize("p", [cast(torch.float64, "alias"), map_tensors(torch.neg, "alias")], ids=str)
    def test_computing_on_an_alias_of_what_is_trained(self, p: Pipeline) -> None:
        x = TrainState({"q": MODEL["q"], "alias": MODEL["q"]}, OptimState({}, (ParamGroup(("q",), {}),)))
        with pytest.raises(Unsupported, match="'alias'"):
            p(x)

    def test_untie_of_a_trained_parameter(self) -> None:
        x = TrainState({"q": MODEL["q"], "alias": MODEL["q"]}, OptimState({}, (ParamGroup(("q",), {}),)))
        with pytest.raises(Unsupported, match="never trained by itself"):
            untie("alias")(x)

    @pytest.mark.parametrize(
        ("slot", "value"),
        [
            ("exp_avg_sq_row", torch.arange(4.0)),
            ("absmax", torch.arange(3.0)),
            ("moved", torch.zeros(2, 4)),
            ("list", [1, 2]),
        ],
    )
    def test_factored_and_blockwise_slots(self, slot: str, value: Any) -> None:
        x = state(**{slot: {"q": value}})
        for p in (transpose("q"), split("q", ["a", "b"], dim=0, sizes=[2, 2])):
            if isinstance(value, list):
                continue  # an object that is no tensor passes on as it is
            with pytest.raises(Unsupported) as caught:
                p(x)
            for text in (repr(slot), "'q'", "(4, 2)", "only rename"):
                assert text in str(caught.value)
        made = rename_fqns({"q": "w"})(x)
        assert made.optim is not None and made.optim.slots[slot]["w"] is value

    def test_partly_trained_groups(self) -> None:
        x = state(exp_avg={"k": MODEL["k"]}, step={"k": 1})
        with pytest.raises(IncompleteGroup) as caught:
            concat(["k", "v"], "kv", dim=0)(x)
        for text in ("'exp_avg'", "'step'", "'k' have it", "'v' have not", "'kv'"):
            assert text in str(caught.value)

    def test_untrained_groups_pass(self) -> None:
        x = state(exp_avg={"q": MODEL["q"]})
        made = concat(["k", "v"], "kv", dim=0)(x)
        assert values(made) == {"q": MODEL["q"].tolist()}
        assert groups(made) == [("q", "kv", "scale")]

    def test_parts_from_different_parameter_groups(self) -> None:
        x = state(groups=(ParamGroup(("q", "k"), {"lr": 0.1}), ParamGroup(("v", "scale"), {"lr": 0.2})))
        with pytest.raises(Unsupported) as caught:
            concat(["k", "v"], "kv", dim=0)(x)
        for text in ("'kv'", "'k' in group 0", "'v' in group 1"):
            assert text in str(caught.value)
        assert groups(concat(["q", "k"], "qk", dim=0)(x)) == [("qk",), ("v", "scale")]

    def test_a_trained_part_and_a_buffer(self) -> None:
        x = state(groups=(ParamGroup(("k",), {}),), exp_avg={"k": MODEL["k"]})
        with pytest.raises(FdsdError, match=r"'v' in no group|'v' have not"):
            concat(["k", "v"], "kv", dim=0)(x)

    def test_names_that_the_model_has_not(self) -> None:
        x = TrainState({"a": torch.ones(1)}, OptimState({}, (ParamGroup(("b", "module.a"), {}),)))
        with pytest.raises(UnknownName, match=r"'b', 'module\.a'"):
            rename_fqns({"a": "c"})(x)

    def test_all_problems_at_once_in_the_report(self) -> None:
        x = state(row={"q": torch.zeros(4)}, step={"k": torch.tensor(1.0), "v": torch.tensor(2.0)})
        p = transpose("q") >> concat(["k", "v"], "kv", dim=0) >> drop("zz")
        report = p.check(x)
        texts = str(report)
        assert "'row'" in texts and "'zz'" in texts and len(report.problems) >= 2


class TestTies:
    def tied(self, listed: str) -> TrainState:
        w = torch.arange(6.0).reshape(3, 2)
        optim = OptimState({"exp_avg": {listed: w + 100}}, (ParamGroup((listed, "norm"), {}),))
        return TrainState({"embed": w, "norm": torch.ones(2), "head": w}, optim)

    @pytest.mark.parametrize("listed", ["embed", "head"])
    def test_torch_lists_a_tied_parameter_once(self, listed: str) -> None:
        made = rename_fqns({"embed": "e", "head": "h"})(self.tied(listed))
        new = listed[0]
        assert list(values(made)) == [new] and groups(made) == [(new, "norm")]

    @pytest.mark.parametrize(("listed", "gone", "stays"), [("embed", "embed", "head"), ("head", "head", "embed")])
    def test_state_follows_to_the_name_that_stays(self, listed: str, gone: str, stays: str) -> None:
        made = drop(gone)(self.tied(listed))
        assert list(values(made)) == [stays] and groups(made) == [(stays, "norm")]

    def test_what_is_done_to_both_names_is_done_once(self) -> None:
        made = transpose(["embed", "head"])(self.tied("embed"))
        assert made.model["embed"] is made.model["head"]
        assert values(made)["embed"] == (torch.arange(6.0).reshape(3, 2) + 100).t().tolist()

    def test_frozen_aliases_go_with_their_state(self) -> None:
        made = filter_frozen(["head"])(self.tied("embed"))
        assert list(made.model) == ["norm"] and groups(made) == [("norm",)] and made.optim is not None
        assert not made.optim.slots

    def test_tying_what_was_trained_by_itself_does_not_lose_its_moments(self) -> None:
        w = torch.ones(2)
        x = state({"a": w, "b": w.clone()}, exp_avg={"a": w + 1, "b": w + 2})
        with pytest.raises(FdsdError, match="'b'"):
            tie({"b": "a"})(x)


class TestOptimizerAlone:
    def test_names_and_shapes_come_from_its_state(self) -> None:
        optim = state().optim
        assert optim is not None
        made = concat(["k", "v"], "kv", dim=0)(optim)
        assert made.slots["exp_avg"]["kv"].tolist() == [[110, 111], [112, 113], [120, 121], [122, 123]]
        assert made.groups[0].fqns == ("q", "kv", "scale")
        assert_laws(rename_fqns({"{x}": "m.{x}"}), optim)

    def test_an_unknown_shape_allows_renames_only(self) -> None:
        optim = OptimState({"row": {"q": torch.zeros(4)}, "col": {"q": torch.zeros(2)}}, (ParamGroup(("q",), {}),))
        assert list(rename_fqns({"q": "w"})(optim).slots["row"]) == ["w"]
        with pytest.raises(FdsdError, match=r"'q'.*TrainState|TrainState.*'q'|'q'"):
            transpose("q")(optim)
        with pytest.raises(FdsdError):
            unstack("q", "q.{x}")(optim)

    def test_computing_steps_refuse(self) -> None:
        optim = state().optim
        assert optim is not None
        with pytest.raises(Unsupported, match="'q'"):
            cast(torch.float64)(optim)

    def test_names_are_those_of_the_groups(self) -> None:
        optim = state().optim
        assert optim is not None
        with pytest.raises(UnknownName, match="'zz'"):
            drop("zz")(optim)
        assert drop("q")(optim).groups[0].fqns == ("k", "v", "scale")


def test_insert_adds_no_parameter() -> None:
    made = insert("new", TensorSpec((1,), torch.float32), init=0)(state())
    assert "new" in made.model and groups(made) == [tuple(MODEL)]


def test_the_inverse_of_a_choice_looks_at_the_model() -> None:
    p = select("q")
    with pytest.raises(NotInvertible):
        (~p)(state())
    assert (~p)(p(state())) is not None


def test_extra_and_options_are_untouched() -> None:
    option = torch.tensor(0.1)
    optim = OptimState({}, (ParamGroup(("q",), {"lr": option, "betas": (0.9, 0.95)}, named=True),), extra={"v": 1})
    made = rename_fqns({"q": "w"})(TrainState(MODEL, optim, {"epoch": 3}))
    assert made.optim is not None
    group = made.optim.groups[0]
    assert group.options["lr"] is option and group.options["betas"] == (0.9, 0.95) and group.named
    assert dict(made.optim.extra) == {"v": 1} and dict(made.extra) == {"epoch": 3}
    assert made.optim.to_torch(ids=True)["param_groups"][0]["param_names"] == ["w"]


def test_order_in_a_group_is_that_of_the_first_parts() -> None:
    x = state({"v": MODEL["v"], "q": MODEL["q"], "k": MODEL["k"]})
    assert groups(concat(["q", "v"], "qv", dim=0)(x)) == [("qv", "k")]
    assert groups(split("q", ["a", "b"], dim=0, sizes=[1, 3])(x)) == [("v", "a", "b", "k")]


def test_real_optimizers_train_on_after_a_rewrite_and_back() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.arange(12.0).reshape(4, 3)).square().sum().backward()
        optimizer.step()

    step()
    names = [name for name, _ in model.named_parameters()]
    x = TrainState(model.state_dict(), OptimState.from_torch(optimizer.state_dict(), names))
    p = rename_fqns({"{i}.weight": "l.{i}.w"}) >> transpose("l.{i}.w") >> unstack("0.bias", "b.{x}")
    back = (~p)(p(x))
    assert back.optim is not None
    assert_same(back, x, tied=False)
    order = {name: k for k, name in enumerate(names)}
    optim = back.optim.replace(
        groups=[ParamGroup(tuple(sorted(g.fqns, key=order.__getitem__)), g.options) for g in back.optim.groups]
    )
    twin = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    other = torch.optim.Adam(twin.parameters(), lr=0.5)
    twin.load_state_dict(StateDict({name: back.model[name].clone() for name in back.model}).to_dict())
    other.load_state_dict(copy.deepcopy(optim.to_torch(ids=True)))
    step()
    other.zero_grad()
    twin(torch.arange(12.0).reshape(4, 3)).square().sum().backward()
    other.step()
    assert_same(twin.state_dict(), model.state_dict())


def test_specs_of_training_states() -> None:
    x = state()
    assert x.optim is not None
    hollow = TrainState(specs(x.model), x.optim.replace(slots={s: specs(c) for s, c in x.optim.slots.items()}))
    made = concat(["k", "v"], "kv", dim=0)(hollow)
    assert made.optim is not None and made.optim.slots["exp_avg"]["kv"] == TensorSpec((4, 2), torch.float32)
