"""Laws 2 and 3 for ties: tensors, lazy tensors and specs are tied alike, whatever was done in however many steps."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from fdsd import (
    Pipeline,
    StateDict,
    cast,
    crop,
    defer,
    filter_frozen,
    identity,
    index_select,
    materialize,
    permute,
    reshape,
    specs,
    split,
    tie,
    transpose,
    untie,
)
from fdsd.data.errors import FdsdError
from fdsd.testing.same import tied_names

NAMES = ["embed", "head", "third", "other"]
WHOLE = st.sampled_from([*NAMES, "{_}"])


def bases() -> st.SearchStrategy[torch.Tensor]:
    """Tensors of all kinds of strides; those of size 1 mean nothing."""
    whole = st.sampled_from([(2, 3), (3, 2), (4, 4), (1, 6), (6, 1), (2, 1, 3), (6,), (0, 2), ()]).map(
        lambda shape: torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
    )
    views = [lambda x: x, lambda x: x.mT if x.ndim > 1 else x, lambda x: x[1:] if x.ndim else x]
    return st.builds(lambda x, view: view(x), whole, st.sampled_from(views))


@st.composite
def tied_states(draw: st.DrawFn) -> StateDict[Any]:
    """Two or three names of one tensor, and one that may be a view of it."""
    base = draw(bases())
    state = dict.fromkeys(NAMES[: draw(st.integers(2, 3))], base)
    state["other"] = draw(
        st.sampled_from([base.mT if base.ndim > 1 else base, base[:1] if base.ndim else base, base + 1])
    )
    return StateDict(state)


def steps() -> st.SearchStrategy[Pipeline]:
    return st.one_of(
        st.builds(transpose, WHOLE),
        st.builds(permute, WHOLE, st.sampled_from([(1, 0), (0, 2, 1), (0,)])),
        st.builds(reshape, WHOLE, st.sampled_from([(6,), (2, 3), (3, 2), (1, 6), (2, 1, 3), (-1,), (4, 4)])),
        st.builds(crop, WHOLE, st.integers(1, 4), dim=st.integers(0, 1)),
        st.builds(cast, st.sampled_from([torch.float32, torch.float64]), WHOLE),
        st.builds(index_select, WHOLE, st.sampled_from([[0], [1, 0], [0, 1, 2]])),
        st.builds(untie, WHOLE),
        st.builds(lambda name: tie({"alias": name}), st.sampled_from(NAMES)),
        st.builds(lambda name: split(name, ["low", "high"], dim=0, sizes=[1, 1]), st.sampled_from(NAMES)),
        st.builds(lambda name: filter_frozen([name]), st.sampled_from(NAMES)),
    )


def outcome(p: Pipeline, state: Any) -> Any:
    try:
        return p(state)
    except FdsdError as error:
        return type(error)


PAIR = StateDict(dict.fromkeys(["embed", "head"], torch.arange(6.0).reshape(2, 3)))


@example(PAIR, [transpose("embed"), transpose("head"), filter_frozen(["head"])])
@example(PAIR, [transpose("embed"), transpose("embed")])
@example(PAIR, [cast(torch.float64, "embed"), cast(torch.float64, "head")])
@example(PAIR, [transpose("embed"), reshape("embed", (6,)), transpose("head"), reshape("head", (6,))])
@given(tied_states(), st.lists(steps(), max_size=6))
def test_all_kinds_of_leaves_are_tied_alike(state: StateDict[Any], chain: list[Pipeline]) -> None:
    eager, lazy, hollow = state, defer(state), specs(state)
    for step in chain:
        made = outcome(step, eager)
        others = outcome(step, lazy), outcome(step, hollow)
        if isinstance(made, type):
            if step.steps[0].verb == "tie":  # values that differ are known only when they are read
                return
            assert others == (made, made)
            continue
        eager, (lazy, hollow) = made, others
        assert list(eager) == list(lazy) == list(hollow)
        found = tied_names(eager)
        assert tied_names(lazy) == found
        assert tied_names(hollow) == found
        assert tied_names(specs(eager)) == tied_names(specs(lazy)) == found
        assert tied_names(materialize(lazy)) == found
    whole = identity
    for step in chain:
        whole = whole >> step
    if not isinstance(made := outcome(whole, state), type):
        assert tied_names(whole(defer(state))) == tied_names(whole(specs(state))) == tied_names(made)
        assert list(whole(defer(state))) == list(whole(specs(state))) == list(made)


VIEWS = st.one_of(st.builds(transpose, WHOLE), st.builds(crop, WHOLE, st.integers(1, 2)))


@given(tied_states(), st.lists(st.booleans(), min_size=4, max_size=4), st.lists(VIEWS, max_size=4))
def test_a_mixture_is_tied_like_tensors(state: StateDict[Any], choice: list[bool], chain: list[Pipeline]) -> None:
    """A lazy tensor over memory lies where the tensor lies, and so do views of both."""
    lazy = defer(state)
    mixed = StateDict({name: lazy[name] if now else state[name] for now, name in zip(choice, state, strict=False)})
    assert tied_names(mixed) == tied_names(state)
    for step in chain:
        made, other = outcome(step, state), outcome(step, mixed)
        assert isinstance(made, type) == isinstance(other, type)
        if not isinstance(made, type):
            state, mixed = made, other
        assert tied_names(state) == tied_names(mixed)
