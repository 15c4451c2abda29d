"""The strategies give what they promise, and all kinds of it."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample

import fdsd.testing
from fdsd import StateDict, TensorSpec, identity, specs
from fdsd.data.ties import ties
from fdsd.pipeline.step import Grade
from fdsd.testing import assert_same, pipelines, states
from fdsd.testing._values import DTYPES, LAYOUTS, Values, has_layout, lay_out
from fdsd.testing.same import same_tensors

FEW = settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
SEARCH = settings(max_examples=3000, deadline=None, database=None, derandomize=True, phases=[Phase.generate])


def exists(strategy: st.SearchStrategy[Any], condition: Callable[[Any], bool]) -> bool:
    try:
        find(strategy, condition, settings=SEARCH)
    except NoSuchExample:
        return False
    return True


def tensors(state: Any) -> list[torch.Tensor]:
    return [leaf for leaf in state.values() if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize(
    "condition",
    [
        lambda x: len(x) == 0,
        lambda x: "layers.2.norm.weight" in x,
        lambda x: any(t.ndim == 0 for t in tensors(x)),
        lambda x: any(t.numel() == 0 for t in tensors(x)),
        lambda x: any(not t.is_contiguous() and t.numel() for t in tensors(x)),
        lambda x: any(0 in t.stride() and t.numel() > 1 for t in tensors(x)),
        lambda x: any(t.is_conj() for t in tensors(x)),
        lambda x: any(t.is_neg() for t in tensors(x)),
        lambda x: any(t.storage_offset() for t in tensors(x)),
        lambda x: bool(ties(x)),
        lambda x: len(x) > len(tensors(x)),
        lambda x: any(not name.isascii() for name in x),
        lambda x: any("{" in name and "?" in name for name in x),
        lambda x: list(x) != sorted(x),
    ],
)
def test_random_states_are_of_every_kind(condition: Callable[[Any], bool]) -> None:
    assert exists(states(), condition)


def test_random_states_have_every_dtype() -> None:
    seen: set[torch.dtype] = set()  # in one search: each would begin with the same states

    def all_are_seen(state: Any) -> bool:
        seen.update([t.dtype for t in tensors(state) if t.numel() > 1])
        return seen >= set(DTYPES)

    exists(states(), all_are_seen)
    assert seen == set(DTYPES)


def test_without_unique_there_are_nans_and_repeated_values() -> None:
    state = StateDict({"w": TensorSpec((40,), torch.bfloat16)})
    assert exists(states(state, unique=False), lambda x: bool(x["w"].isnan().any()))
    assert exists(states(state, unique=False), lambda x: len(set(x["w"].tolist())) < 30)


WIDE = [dtype for dtype in DTYPES if dtype.itemsize > 1]


@FEW
@given(
    st.dictionaries(
        st.sampled_from("abcde"),
        st.builds(TensorSpec, st.sampled_from([(3, 4), (), (2, 0), (7,), (2, 3, 5)]), st.sampled_from(DTYPES)),
    ),
    st.data(),
)
def test_states_of_a_spec(wanted: dict[str, TensorSpec], data: st.DataObject) -> None:
    state = data.draw(states(wanted))
    assert specs(state) == StateDict(wanted) and list(state) == list(wanted)
    for dtype in WIDE:
        patterns = [
            tuple(row)
            for t in tensors(state)
            if t.dtype == dtype
            for row in (
                t.contiguous()
                .resolve_conj()
                .resolve_neg()
                .clone()
                .view(-1)
                .view(torch.uint8)
                .view(-1, dtype.itemsize)
                .tolist()
                if t.numel()
                else []
            )
        ]
        assert len(set(patterns)) == len(patterns)
    for t in tensors(state):
        if t.dtype.is_floating_point and t.numel():
            assert t.to(torch.float64).isfinite().all()


def test_a_state_is_imitated_with_its_objects_and_ties() -> None:
    w = torch.ones(2, 2)
    model = StateDict({"a": w, "o": "text", "b": w, "c": w.clone()}, metadata={"": {"version": 1}})

    @FEW
    @given(states(model))
    def check(state: StateDict[Any]) -> None:
        assert ties(state) == [("a", "b")] and state["o"] == "text" and state.metadata == model.metadata
        assert specs(state) == specs(model)

    check()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layouts_keep_the_values(dtype: torch.dtype) -> None:
    for kind, shape in itertools.product(LAYOUTS, [(), (1,), (2, 3), (0, 2), (2, 3, 2)]):
        spec = TensorSpec(shape, dtype)
        if has_layout(kind, spec):
            plain = Values(1, unique=True).tensor(spec)
            made = lay_out(plain, kind)
            assert made.shape == plain.shape and made.dtype == dtype
            if kind not in ("expanded", "conjugate", "negative"):
                assert same_tensors(made, plain)


@settings(FEW, max_examples=60)
@given(st.data())
def test_pipelines_fit(data: st.DataObject) -> None:
    state = data.draw(states())
    p = data.draw(pipelines(state, exact=True, structural=True, max_steps=3))
    assert p.check(state).ok
    bound = p.bind(state)
    assert bound.grade is Grade.EXACT
    assert not {step.verb for step in bound.steps} & {"cast", "add_scalar", "map_tensors", "untie"}


@pytest.mark.parametrize(
    "verb",
    [
        *("rename_fqns", "add_prefix", "tie", "transpose", "permute", "reshape", "index_select", "pad", "permute_rope"),
        *("split", "concat", "stack", "unstack", "cast", "add_scalar", "map_tensors", "untie", "crop", "drop"),
        *("select", "filter_frozen", "insert"),
    ],
)
def test_every_verb_is_drawn(verb: str) -> None:
    state = {f"l.{i}.w": torch.ones(4, 2, dtype=torch.bfloat16) for i in range(2)}
    assert exists(pipelines(state, max_steps=1), lambda p: any(step.verb == verb for step in p.steps))


@FEW
@given(states(), pipelines())
def test_pipelines_without_a_source_fit_every_state(state: StateDict[Any], p: Any) -> None:
    p(state)
    assert p.check(state).ok


@FEW
@given(pipelines({}, max_steps=2))
def test_nothing_fits_an_empty_state_but_the_identity(p: Any) -> None:
    assert p == identity


def test_states_are_drawn_without_warnings() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = Values(0, unique=True).tensor(TensorSpec((2,), torch.complex32))
    assert_same(made, made.clone())


def test_hypothesis_is_asked_for_when_it_is_needed(fresh_python: Any) -> None:
    printed = fresh_python(
        "import sys\n"
        "sys.modules['hypothesis'] = None\n"
        "import fdsd.testing\n"
        "fdsd.testing.assert_same({}, {})\n"
        "for make in (fdsd.testing.states, fdsd.testing.pipelines):\n"
        "    try:\n"
        "        make()\n"
        "    except ImportError as error:\n"
        "        print(type(error).__name__, error)\n"
    )
    assert printed.count("MissingExtra") == 2 and "pip install 'fdsd[testing]'" in printed


def test_hypothesis_is_not_imported_before(fresh_python: Any) -> None:
    assert fresh_python("import sys, fdsd.testing; print('hypothesis' in sys.modules)").strip() == "False"


def test_the_public_names() -> None:
    assert sorted(fdsd.testing.__all__) == [
        "assert_golden",
        "assert_laws",
        "assert_round_trip",
        "assert_same",
        "layouts",
        "pipelines",
        "states",
    ]
