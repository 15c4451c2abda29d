"""check: all problems at once, each where it arose, with suggestions; and comparing with what is expected."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fdsd import (
    ModelSpec,
    OptimState,
    ParamGroup,
    Pipeline,
    StateDict,
    TensorEntry,
    TensorSpec,
    TrainState,
    add_prefix,
    cast,
    concat,
    defer,
    drop,
    flatten_optim,
    identity,
    map_tensors,
    rename_fqns,
    specs,
    stack,
    transpose,
    unstack,
)
from fdsd.errors import FdsdError, IncompleteGroup, SpecMismatch, UnknownName

STATE = StateDict(
    {
        "0.q": torch.ones(4, 2),
        "0.k": torch.ones(2, 2),
        "1.q": torch.ones(4, 2),
        "norm": torch.ones(2),
        "extra": "text",
    }
)


def test_fine() -> None:
    report = (rename_fqns({"norm": "n"}) >> drop("n")).check(STATE)
    assert report.ok and report.problems == () and str(report) == "no problems"
    report.raise_for_problems()
    with pytest.raises(TypeError, match=r"report\.ok"):
        bool(report)


def test_all_problems_of_all_steps_at_once() -> None:
    p = (
        concat(["{i}.q", "{i}.k"], "{i}.qk", dim=0)
        >> rename_fqns({"nrom": "n", "missing": "m"})
        >> transpose("norm")
        >> drop("zz")
    )
    report = p.check(STATE)
    text = str(report)
    assert [finding.step for finding in report.findings] == sorted(finding.step for finding in report.findings)
    for part in ("'1.k'", "'nrom'", "'norm'", "'missing'", "no dim -2", "'zz'"):
        assert part in text
    assert {"partial group", "unmatched rule", "spec"} <= {problem.kind for problem in report.problems}
    assert text.startswith(f"{len(report.problems)} problems:")
    assert "step 3, transpose('norm')" in text
    with pytest.raises(IncompleteGroup) as caught:
        report.raise_for_problems()
    assert "'zz'" in str(caught.value)


def test_a_tensor_whose_making_failed_raises_no_further_problems() -> None:
    p = transpose("norm") >> transpose("norm") >> cast(torch.float64, "norm") >> rename_fqns({"norm": "n"})
    assert len(p.check(STATE, expect={**specs(STATE), "n": TensorSpec((9,), torch.int8)}).problems) <= 3
    assert len(p.check(STATE).problems) == 1


@pytest.mark.parametrize("form", [dict, specs, defer])
def test_every_form_of_a_source(form: Any) -> None:
    assert transpose("norm").check(form(STATE)).problems == transpose("norm").check(STATE).problems


def test_nothing_is_read_or_run() -> None:
    calls: list[str] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        calls.append(x.device.type)
        return x + 1

    map_tensors(look, "norm").check(STATE)
    assert calls == ["meta"]
    calls.clear()
    map_tensors(look, "norm", spec=lambda spec: spec).check(STATE)
    assert calls == []


class TestExpected:
    def test_names_shapes_and_dtypes(self) -> None:
        expect = {
            "0.q": torch.ones(4, 2),
            "0.k": torch.ones(2, 3),
            "1.q": torch.ones(4, 2, dtype=torch.bfloat16),
            "nrom": torch.ones(2),
            "extra": "other text",
        }
        report = identity.check(STATE, expect)
        text = str(report)
        assert {problem.kind for problem in report.problems} == {"missing", "unexpected", "spec"}
        for part in (
            "1 name missing: 'nrom' (there is 'norm')",
            "1 name unexpected: 'norm'",
            "(2, 2), expected (2, 3)",
            "'1.q' has dtype float32, expected bfloat16",
            "cast()",
        ):
            assert part in text
        assert all(finding.step == 0 for finding in report.findings)

    def test_a_model_spec(self) -> None:
        model = ModelSpec({"n": TensorEntry(TensorSpec((2,), torch.float32))})
        p = rename_fqns({"norm": "n"}) >> drop("{i}.{_}", "extra")
        assert p.check(STATE, model).ok
        assert not identity.check(STATE, model).ok
        assert p.check(ModelSpec({"norm": TensorEntry(TensorSpec((2,), torch.float32))})).findings

    def test_a_tensor_where_an_object_is_and_the_other_way_round(self) -> None:
        report = identity.check({"a": torch.ones(1), "b": "x"}, {"a": "x", "b": torch.ones(1)})
        assert len(report.problems) == 2

    def test_many_missing_names_are_counted(self) -> None:
        report = identity.check({}, {f"n.{i}": torch.ones(1) for i in range(30)})
        assert "30 names missing" in str(report) and "and 20 more" in str(report)

    def test_training_states_expect_the_model(self) -> None:
        x = TrainState({"a": torch.ones(1)}, OptimState({}, (ParamGroup(("a",), {}),)))
        assert add_prefix("m.").check(x, expect={"m.a": torch.ones(1)}).ok
        assert not add_prefix("m.").check(x, expect={"a": torch.ones(1)}).ok


def test_states_of_other_kinds() -> None:
    optim = OptimState({"m": {"a": torch.ones(2, 3)}}, (ParamGroup(("a",), {"lr": 0.1}),))
    assert transpose("a").check(optim).ok
    assert not transpose("b").check(optim).ok
    assert flatten_optim().check(optim, expect={"state.a.m": torch.ones(2, 3), "param_groups.a.lr": 0.1}).ok
    assert not flatten_optim().check({"a": torch.ones(1)}).ok


@pytest.mark.parametrize(
    "p", [unstack("norm", "n.{x}", dim=5), stack("{i}.q", "q", dim=9), unstack("extra", "e.{x}")], ids=str
)
def test_problems_are_reported_not_raised(p: Pipeline) -> None:
    report = p.check(STATE)
    assert not report.ok
    with pytest.raises(FdsdError):
        report.raise_for_problems()


def test_what_is_no_state_is_refused_in_words() -> None:
    for source in (3, None, [torch.ones(1)]):
        with pytest.raises(FdsdError):
            identity.check(source)


@pytest.mark.parametrize(("p", "error"), [(transpose("norm"), SpecMismatch), (drop("zz"), UnknownName)], ids=str)
def test_the_error_is_that_of_running(p: Pipeline, error: Any) -> None:
    with pytest.raises(error):
        p(STATE)
    with pytest.raises(error):
        p.check(STATE).raise_for_problems()


class Unknown(torch.Tensor):
    """A class of tensors that nobody told fdsd of."""


class TestTensorsOfUnknownClasses:
    """``check`` refuses what running refuses, wherever in the pipeline it is."""

    STATE = StateDict({"x": torch.ones(2, 3).as_subclass(Unknown), "y": torch.ones(2)})

    @pytest.mark.parametrize(
        "p",
        [
            transpose("x"),
            cast(torch.float64),
            rename_fqns({"x": "z"}) >> transpose("z"),
            concat(["x", "y"], "z", dim=0),
            map_tensors(torch.neg, "x"),
            unstack("x", "x.{i}"),
        ],
        ids=str,
    )
    @pytest.mark.parametrize("form", [lambda x: x, TrainState])
    def test_operations_on_them_are_problems(self, p: Pipeline, form: Any) -> None:
        state = form(self.STATE)
        with pytest.raises(FdsdError):
            p(state)
        report = p.check(state)
        assert not report.ok
        if "concat" not in str(p):
            assert "Unknown can be renamed and chosen, but not computed on" in str(report)
        assert p.explain(state).problems == report.problems

    @pytest.mark.parametrize(
        "p", [identity, rename_fqns({"x": "z"}), drop("y"), transpose("y", 0, 0), drop("x")], ids=str
    )
    def test_what_runs_is_fine(self, p: Pipeline) -> None:
        p(self.STATE)
        assert p.check(self.STATE, expect=p(self.STATE)).ok

    def test_slots_of_an_optimizer(self) -> None:
        slots = {"exp_avg": {"x": torch.ones(2, 3).as_subclass(Unknown)}}
        state = OptimState(slots, (ParamGroup(("x",), {}),))
        assert not transpose("x").check(state).ok
        assert rename_fqns({"x": "z"}).check(state).ok
