"""Pipelines as values: composing, printing, inverting, binding, and what they run on."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from operator import invert
from types import MappingProxyType
from typing import Any

import pytest
import torch

from fdsd import (
    OptimState,
    ParamGroup,
    Pipeline,
    StateDict,
    TrainState,
    add_prefix,
    cast,
    concat,
    defer,
    drop,
    identity,
    map_tensors,
    pipe,
    rename_fqns,
    select,
    specs,
    split,
    transpose,
)
from fdsd.errors import FdsdError, NotInvertible, SpecMismatch, UnknownName, Unsupported
from fdsd.pipeline.step import Grade
from fdsd.testing import assert_same

W = torch.arange(6.0).reshape(2, 3)
P = rename_fqns({"a": "b"}) >> transpose("b") >> drop("c?")


class TestRunning:
    @pytest.mark.parametrize("kind", [dict, OrderedDict, StateDict, MappingProxyType])
    def test_any_mapping(self, kind: Any) -> None:
        made = P(kind({"a": W, "x": 3}))
        assert type(made) is StateDict and list(made) == ["b", "x"]
        assert_same(made["b"], W.t())

    def test_a_modules_state_dict(self) -> None:
        linear = torch.nn.Linear(3, 2)
        made = transpose("weight")(linear.state_dict())
        assert made["weight"].shape == (3, 2)
        kept = rename_fqns({"weight": "w"})(linear.state_dict(keep_vars=True))
        assert kept["w"] is linear.weight

    @pytest.mark.parametrize(
        "state", [torch.nn.Linear(1, 1), [1], None, "path", 3, {"a"}], ids=lambda s: type(s).__name__
    )
    def test_other_things_are_refused(self, state: Any) -> None:
        for p in (identity, P):
            with pytest.raises(Unsupported, match=type(state).__name__):
                p(state)

    @pytest.mark.parametrize("p", [identity, P, add_prefix("m."), select("a?"), cast(torch.float64)], ids=str)
    def test_names_that_are_no_text_are_refused(self, p: Pipeline) -> None:
        with pytest.raises(FdsdError, match="1"):
            p({1: W, "a": W})  # type: ignore[dict-item]

    def test_optimizer_and_training_states_keep_their_kind(self) -> None:
        optim = OptimState({"m": {"a": W}}, (ParamGroup(("a",), {"lr": 0.1}),))
        assert isinstance(P(optim), OptimState)
        assert isinstance(P(TrainState({"a": W}, optim)), TrainState)
        assert identity(optim) is optim
        assert P(TrainState({"a": W})).optim is None

    def test_errors_say_in_which_step_they_arose(self) -> None:
        p = rename_fqns({"a": "b"}) >> transpose("zz") >> drop("b")
        with pytest.raises(UnknownName) as caught:
            p({"a": W})
        assert getattr(caught.value, "__notes__", []) == ["step 2 of 3, transpose('zz')"]
        with pytest.raises(UnknownName) as caught:
            transpose("zz")({"a": W})
        assert not getattr(caught.value, "__notes__", [])

    def test_a_long_call_is_shortened_in_the_note(self) -> None:
        p = identity >> rename_fqns({f"long.name.{i}": f"other.{i}" for i in range(50)}) >> drop("a")
        with pytest.raises(UnknownName) as caught:
            p({"a": W})
        assert getattr(caught.value, "__notes__", []) == ["step 1 of 2, rename_fqns(...)"]

    def test_nothing_runs_if_anything_does_not_fit(self) -> None:
        calls: list[int] = []

        def count(x: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            return x

        with pytest.raises(SpecMismatch, match="'b'"):
            (map_tensors(count, "a") >> transpose("{_}"))({"a": W, "b": W[0]})
        with pytest.raises(UnknownName):
            map_tensors(count, "a", "zz")({"a": W})
        assert calls == [1]  # a step before may have run, the one that failed has not


class TestComposing:
    def test_flat(self) -> None:
        assert len((P >> P).steps) == 6 and (P >> P).steps == (*P.steps, *P.steps)
        assert pipe(P, identity, P) == P >> P

    @pytest.mark.parametrize("other", [3, None, "p", lambda state: state, [P]])
    def test_only_pipelines_compose(self, other: Any) -> None:
        with pytest.raises(TypeError):
            P >> other
        with pytest.raises(TypeError):
            other >> P
        with pytest.raises(Unsupported, match="pipe: "):
            pipe(P, other)

    def test_steps_only(self) -> None:
        with pytest.raises(Unsupported):
            Pipeline([P])  # type: ignore[list-item]
        assert Pipeline(iter(P.steps)) == P

    def test_immutable(self) -> None:
        with pytest.raises(AttributeError):
            P.steps = ()  # type: ignore[misc]

    def test_a_step_has_no_truth_that_surprises(self) -> None:
        assert P != 3 and identity != P and P != "P"
        assert identity == Pipeline()
        assert copy.deepcopy(P) == P == copy.copy(P) == pickle.loads(pickle.dumps(P))
        assert {P: 1}[rename_fqns({"a": "b"}) >> transpose("b") >> drop("c?")] == 1


class TestPrinting:
    def test_one_step_and_several(self) -> None:
        assert repr(identity) == "identity"
        assert repr(transpose("b")) == "transpose('b')"
        assert repr(P) == "pipe(\n    rename_fqns({'a': 'b'}),\n    transpose('b'),\n    drop('c?'),\n)"

    @pytest.mark.parametrize(
        ("text"),
        [
            "rename_fqns({'a': 'b', re.compile('x(.)'): '\\\\1'})",
            "rename_fqns([('a', 'b'), ('a', 'c')])",
            "rename_fqns({'{x}': 'm.{x}'}, inverse={'m.{x}': '{x}'})",
            "add_prefix('m.')",
            "drop_prefix('m.')",
            "strip_wrappers()",
            "select('a', 'b.{_}?')",
            "drop('a')",
            "~drop('a')",
            "~select('a')",
            "filter_frozen(['a', 'b'])",
            "~filter_frozen(['a'])",
            "insert('a', TensorSpec((2,), torch.float32), init=1.5)",
            "concat(['a', 'b'], 'c', dim=-1)",
            "concat(['a', 'b'], 'c', dim=0, sizes=(1, 2), groups=1)",
            "concat(['a', 'b'], 'c?', dim=0, sizes=(2, 2), groups=2)",
            "split('c', ['a', 'b'], dim=0, sizes=(2, 2), groups=2)",
            "stack('e.{x}', 'e', index='x', dim=1, num=2)",
            "unstack('e', 'e.{x}')",
            "transpose('a', 0, 1)",
            "transpose(['a', 'b'])",
            "permute('a', (1, 0))",
            "reshape('a', (6,), from_shape=(2, 3))",
            "index_select('a', [1, 0], dim=1)",
            "pad('a', 4, dim=1, from_size=3)",
            "crop('a', 3)",
            "permute_rope(['a', 'b'], heads=2, to='pairs')",
            "cast(torch.bfloat16)",
            "cast(torch.bfloat16, 'a', from_dtype=torch.float32)",
            "tie({'a': 'b'})",
            "~tie({'a': 'b'})",
            "untie('a', 'b')",
            "map_tensors(abs, 'a', spec=TensorSpec((2,), torch.float32))",
            "add_scalar('a', 1)",
            "add_scalar('a', 0.1)",
            "flatten_optim()",
            "unflatten_optim()",
        ],
    )
    def test_what_is_printed_can_be_pasted_back(self, text: str) -> None:
        import re

        import fdsd

        names = {name: getattr(fdsd, name) for name in fdsd.__all__}
        p = eval(text, {**names, "torch": torch, "re": re, "abs": abs})
        try:
            again = eval(repr(p), {**names, "torch": torch, "re": re, "abs": abs})
        except NameError:
            pytest.fail(f"{p!r} needs a name that neither fdsd nor torch has")
        assert again == p
        assert repr(again) == repr(p)

    def test_infinite_numbers(self) -> None:
        import fdsd

        p = fdsd.add_scalar("a", float("inf"))
        assert eval(repr(p), {"add_scalar": fdsd.add_scalar}) == p


class TestInverting:
    def test_notes_name_the_step(self) -> None:
        p = rename_fqns({"a": "b"}) >> cast(torch.bfloat16) >> transpose("b")
        with pytest.raises(NotInvertible, match="from_dtype=") as caught:
            invert(p)
        assert getattr(caught.value, "__notes__", []) == ["step 2 of 3, cast(torch.bfloat16)"]

    def test_steps_in_reverse(self) -> None:
        p = concat(["a", "b"], "ab", dim=0, sizes=[1, 2]) >> add_prefix("m.")
        assert ~p == pipe(~add_prefix("m."), split("ab", ["a", "b"], dim=0, sizes=[1, 2]))

    def test_grade_is_the_worst(self) -> None:
        exact, one_sided, none = add_prefix("a"), drop("a"), cast(torch.float16)
        assert (exact >> exact).grade is Grade.EXACT
        assert (exact >> one_sided).grade is (one_sided >> exact).grade is Grade.ONE_SIDED
        assert (one_sided >> none >> exact).grade is Grade.NONE
        assert str(Grade.ONE_SIDED) == "one-sided"


class TestBinding:
    STATE = StateDict({"q": torch.arange(4.0), "k": torch.arange(2.0)})
    P = concat(["q", "k"], "qk", dim=0) >> cast(torch.float64)

    def test_each_step_is_bound_to_what_it_will_see(self) -> None:
        bound = self.P.bind(self.STATE)
        assert bound == concat(["q", "k"], "qk", dim=0, sizes=[4, 2]) >> cast(torch.float64, from_dtype=torch.float32)

    @pytest.mark.parametrize("form", [dict, specs, defer])
    def test_every_form_of_a_source(self, form: Any) -> None:
        assert self.P.bind(form(self.STATE)) == self.P.bind(self.STATE)

    def test_training_states(self) -> None:
        state = TrainState(self.STATE, OptimState({}, (ParamGroup(("q", "k"), {}),)))
        p = concat(["q", "k"], "qk", dim=0)
        assert p.bind(state) == p.bind(self.STATE)

    def test_optimizer_states(self) -> None:
        optim = OptimState({"m": dict(self.STATE)}, (ParamGroup(("q", "k"), {}),))
        p = concat(["q", "k"], "qk", dim=0)
        assert p.bind(optim) == p.bind(self.STATE)

    def test_what_does_not_fit_is_refused_with_the_step(self) -> None:
        with pytest.raises(SpecMismatch) as caught:
            (self.P >> transpose("qk")).bind(self.STATE)
        assert getattr(caught.value, "__notes__", []) == ["step 3 of 3, transpose('qk')"]
        with pytest.raises(FdsdError, match="'z'"):
            transpose("z").bind(self.STATE)


def test_history_tells_what_was_done() -> None:
    made = P({"a": W})
    assert made.history == P.steps
    assert rename_fqns({"b": "c"})(made).history == (*P.steps, *rename_fqns({"b": "c"}).steps)
    assert identity({"a": W}).history == ()
