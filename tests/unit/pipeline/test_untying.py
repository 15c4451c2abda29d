"""Nothing is silently untied: what a step unties is shown by ``explain``, and a warning of ``check`` if it stays so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fdsd import (
    ModelSpec,
    Pipeline,
    StateDict,
    TensorEntry,
    TensorSpec,
    TrainState,
    cast,
    concat,
    crop,
    defer,
    drop,
    identity,
    insert,
    rename_fqns,
    reshape,
    specs,
    split,
    tie,
    transpose,
    untie,
)
from fdsd.testing.same import tied_names

W = torch.arange(6.0).reshape(2, 3)
STATE = StateDict({"embed": W, "norm": torch.ones(3), "head": W, "lm": W})


def warned(p: Pipeline, state: Any = STATE) -> list[str]:
    report = p.check(state)
    assert report.ok
    report.raise_for_problems()
    return [f"{finding.step}: {finding.problem.message}" for finding in report.warnings]


def shown(p: Pipeline, state: Any = STATE) -> list[str]:
    return [line.strip() for line in str(p.explain(state)).splitlines() if "unties" in line]


UNTYING = {
    transpose("head"): ("'head'", "'embed', 'lm'"),
    transpose("embed"): ("'embed'", "'head', 'lm'"),
    transpose(["head", "lm"]): ("'head', 'lm'", "'embed'"),
    cast(torch.bfloat16, "embed"): ("'embed'", "'head', 'lm'"),
    crop("lm", 1): ("'lm'", "'embed', 'head'"),
    split("head", ["a", "b"], dim=0, sizes=[1, 1]): ("'head'", "'embed', 'lm'"),
    concat(["embed", "head"], "both", dim=0): ("'lm'", "'embed', 'head'"),
}


@pytest.mark.parametrize("p", UNTYING, ids=str)
@pytest.mark.parametrize("form", [lambda x: x, defer, specs, lambda x: TrainState(StateDict(x))])
def test_what_is_untied_is_told(p: Pipeline, form: Any) -> None:
    parted, kept = UNTYING[p]
    if p.steps[0].verb == "concat":
        parted, kept = kept, parted  # lm is left as it was
    assert shown(p, form(STATE)) == [f"unties {parted} from {kept}"]
    (text,) = warned(p, form(STATE))
    assert text == (
        f"1: unties {parted} from {kept}, which were one tensor. Name all of them in this step; if it is meant, "
        f"untie({parted}) first."
    )
    assert str(p.check(form(STATE))).startswith("no problems\n1 warning:\n  step 1, ")


@pytest.mark.parametrize(
    "p",
    [
        identity,
        transpose(["embed", "head", "lm"]),
        cast(torch.bfloat16),
        rename_fqns({"head": "h"}),
        drop("head"),
        transpose("norm", 0, 0),
        cast(torch.float32, "head"),
        insert("new", TensorSpec((2, 3), torch.float32), init=0),
        tie({"alias": "embed"}),
        untie("head", "lm") >> transpose("head"),
        transpose("head") >> transpose("head"),
        transpose("head") >> transpose("embed") >> rename_fqns({"lm": "x"}) >> transpose("x"),
        transpose("head") >> rename_fqns({"head": "h"}) >> drop("h"),
        reshape("head", (6,)) >> drop("embed", "lm"),
        reshape("head", (6,)) >> reshape(["embed", "lm"], (6,)),
    ],
    ids=str,
)
def test_what_is_tied_at_the_end_or_gone_or_untied_by_name_is_no_warning(p: Pipeline) -> None:
    assert warned(p) == []


def test_what_untie_does_is_shown_and_no_warning() -> None:
    assert shown(untie("head")) == ["unties 'head' from 'embed', 'lm'"]
    assert warned(untie("head")) == []


def test_the_step_that_untied_is_named_whatever_comes_after() -> None:
    p = rename_fqns({"head": "h"}) >> cast(torch.bfloat16, "h") >> rename_fqns({"h": "out"})
    (text,) = warned(p)
    assert text.startswith("2: unties 'h' from 'embed', 'lm'")
    assert "step 2, cast(torch.bfloat16, 'h')" in str(p.check(STATE))


def test_ties_of_a_model_spec() -> None:
    spec = TensorSpec((2, 3), torch.float32)
    model = ModelSpec({"embed": TensorEntry(spec), "head": TensorEntry(spec, tied_to="embed")})
    assert shown(transpose("head"), model) == ["unties 'head' from 'embed'"]


def test_many_are_counted() -> None:
    pairs = {f"{i}.{x}": torch.full((2, 2), float(i)) for i in range(30) for x in "a"}
    state = StateDict({**pairs, **{name.replace("a", "b"): leaf for name, leaf in pairs.items()}})
    lines = shown(transpose("{i}.b"), state)
    assert len(lines) == 11 and lines[0] == "unties '0.b' from '0.a'" and lines[-1] == "unties names of 20 tensors more"
    assert len(warned(transpose("{i}.b"), state)) == 30


def test_what_fails_is_a_problem_and_no_warning() -> None:
    report = (transpose("head", 0, 5) >> transpose("embed")).check(STATE)
    assert [finding.step for finding in report.findings] == [1]


STEPS = st.builds(
    lambda verb, names: verb(names),
    st.sampled_from([transpose, lambda names: cast(torch.bfloat16, *names), drop, lambda names: untie(*names)]),
    st.lists(st.sampled_from(["embed", "head", "lm", "norm"]), min_size=1, max_size=3, unique=True),
)


@given(st.lists(STEPS.filter(lambda p: "drop" not in str(p) and "untie" not in str(p)), max_size=4))
def test_a_warning_is_given_exactly_if_names_come_out_untied(chain: list[Pipeline]) -> None:
    p = identity
    for step in chain:
        p = p >> step
    state = StateDict({**STATE, "norm": torch.ones(2, 2)})
    whole = tied_names(p(state)) == {frozenset(["embed", "head", "lm"])}
    assert (warned(p, state) == []) == whole
