"""assert_laws and assert_round_trip find broken steps: each broken in one way."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from attrs import frozen

from fdsd import Pipeline, StateDict, cast, concat, drop, insert, map_tensors, rename_fqns, transpose
from fdsd.algebra.lazy import Lazy
from fdsd.data.spec import TensorSpec
from fdsd.errors import NotInvertible
from fdsd.pipeline.rewrite import Assign, Rewrite, Scope, keep
from fdsd.pipeline.step import Grade, Step
from fdsd.testing import assert_laws, assert_round_trip

W = torch.arange(6.0).reshape(2, 3)
STATE = StateDict({"w": W, "v": torch.tensor([7.0])})


@frozen
class Broken(Step):
    """A step that does nothing but what ``how`` breaks."""

    how: str = ""
    verb: ClassVar[str] = "broken"

    @property
    def grade(self) -> Grade:
        return Grade.NONE if self.how in ("none", "") else Grade.EXACT

    def rewrite(self, scope: Scope) -> Rewrite:
        if self.how == "order" and isinstance(scope.leaf(scope.names[0]), Lazy):
            return Rewrite.of([keep(name) for name in reversed(scope.names)])
        if self.how == "inverse":
            return Rewrite.of([Assign(name + "!", (name,)) for name in scope.names])
        return Rewrite.of([Assign(name, (name,), self._build) for name in scope.names])

    def _build(self, apply: Any, leaves: Any) -> Any:
        (leaf,) = leaves
        if self.how == "lazy" and isinstance(leaf, Lazy):
            return torch.zeros(leaf.shape)
        if self.how == "abstract" and isinstance(leaf, TensorSpec):
            return leaf.with_shape((9,))
        if self.how == "purity" and isinstance(leaf, torch.Tensor):
            leaf.add_(1)
        return leaf

    def invert(self) -> tuple[Step, ...]:
        if self.how == "":
            self.refuse_inverse("no.")
        return (self,)

    def bind(self, scope: Scope) -> tuple[Step, ...]:
        return (self, self) if self.how == "bind" else (self,)

    def call_text(self) -> str:
        return {"repr": "drop('w')", "text": "no code"}.get(self.how, f"Broken({self.how!r})")


@pytest.mark.parametrize(
    ("how", "law"),
    [
        ("lazy", "materialize(p(defer(state))) must be p(state)"),
        ("order", "materialize(p(defer(state))) must be p(state)"),
        ("abstract", "p(specs(state)) must be specs(p(state))"),
        ("purity", "The pipeline changed 'w'"),
        ("inverse", "(~p)(p(state)) must be the state"),
        ("none", "~p must raise NotInvertible"),
        ("bind", "must be bound already"),
        ("repr", "eval(repr(p)) must be p"),
        ("text", "repr(p) must be code that gives p"),
    ],
)
def test_each_law_is_looked_at(how: str, law: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import fdsd

    monkeypatch.setattr(fdsd, "Broken", lambda how: Pipeline((Broken(how),)), raising=False)
    monkeypatch.setattr(fdsd, "__all__", [*fdsd.__all__, "Broken"])
    state = StateDict({name: leaf.clone() for name, leaf in STATE.items()})
    with pytest.raises(AssertionError, match=re.escape(law)):
        assert_laws(Pipeline((Broken(how),)), state)


def test_what_is_not_broken_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    import fdsd

    monkeypatch.setattr(fdsd, "Broken", lambda how: Pipeline((Broken(how),)), raising=False)
    monkeypatch.setattr(fdsd, "__all__", [*fdsd.__all__, "Broken"])
    assert_laws(Pipeline((Broken(""),)), STATE)


@pytest.mark.parametrize("how", ["inverse"])
def test_round_trips(how: str) -> None:
    with pytest.raises(AssertionError, match=r"~p"):
        assert_round_trip(Pipeline((Broken(how),)), STATE)


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@pytest.mark.parametrize(
    "p",
    [
        transpose("w") >> rename_fqns({"w": "x"}),
        concat(["v", "n"], "vn", dim=0),
        drop("w") >> insert("w", TensorSpec((), torch.int8), init=3),
        map_tensors(doubled, "w"),
        map_tensors(lambda x: x + 1, "w"),
        rename_fqns(str.upper, inverse=str.lower),
        cast(torch.float64),
    ],
    ids=str,
)
def test_good_pipelines_of_every_grade(p: Pipeline) -> None:
    assert_laws(p, {"w": W, "v": torch.tensor([7.0]), "n": torch.tensor([8.0])})


def test_round_trip_binds_first_and_says_what_has_no_inverse() -> None:
    assert_round_trip(concat(["v", "n"], "vn", dim=0), {"v": torch.ones(2), "n": torch.zeros(1)})
    assert_round_trip(drop("w"), STATE)
    with pytest.raises(NotInvertible):
        assert_round_trip(cast(torch.float16), STATE)


def test_a_one_sided_pipeline_that_cannot_be_done_again() -> None:
    step: Callable[..., Any] = rename_fqns
    p = step({"w": "x"}) >> drop("x")
    assert_laws(p, STATE)
