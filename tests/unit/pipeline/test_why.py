"""The sources of one element: against brute force on random graphs, and in words."""

from __future__ import annotations

import itertools
import pickle
from collections import Counter
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fdsd.algebra.ops import Origin
from fdsd.data.errors import SpecMismatch, UnknownName, Unsupported
from fdsd.data.model import ModelSpec, TensorEntry
from fdsd.data.optim import OptimState
from fdsd.data.spec import TensorSpec
from fdsd.data.statedict import specs
from fdsd.data.train import TrainState
from fdsd.pipeline.coverage import lazily
from fdsd.pipeline.pipeline import identity, pipe
from fdsd.pipeline.why import Element, Made, Part, Why, why
from fdsd.transforms import (
    add_prefix,
    add_scalar,
    cast,
    concat,
    index_select,
    insert,
    map_tensors,
    pad,
    permute_rope,
    reshape,
    split,
    stack,
    tie,
    transpose,
    untie,
)
from tests.helpers.chains import grow
from tests.helpers.provenance import Places, Regrow
from tests.helpers.tensors import numbers


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def filled(value: float, spec: TensorSpec) -> torch.Tensor:
    return torch.full(spec.shape, value, dtype=spec.dtype)


def numbered(**shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    return {name: numbers(shape, torch.float32, k) for k, (name, shape) in enumerate(shapes.items())}


# -- against brute force -------------------------------------------------------------------------------------


def elements_of(found: Why) -> Counter[tuple[str, tuple[int, ...]]]:
    """List all elements that are named, those of parts one by one."""
    made: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for source in found.sources:
        if isinstance(source, Element):
            made[source.fqn, source.index] += 1
        elif isinstance(source, Part):
            inside: set[tuple[int, ...]] = set()
            for region in source.regions:
                inside.update(itertools.product(*[span.indices() for span in region.spans]))
            assert len(inside) == source.numel
            made.update([(source.fqn, index) for index in inside])
    return made


@given(st.integers(0, 10**9))
@settings(max_examples=300)
def test_the_elements_named_are_those_of_brute_force(seed: int) -> None:
    rng = Random(seed)
    calls = seed % 2 == 0
    chain = grow(("why", seed), length=9, calls=calls)
    origins = {id(x.lazy): f"x{k}" for k, x in enumerate(chain.pool) if isinstance(x.lazy.op, Origin)}
    tensors = {f"x{k}": x.eager for k, x in enumerate(chain.pool) if isinstance(x.lazy.op, Origin)}
    step = Regrow({"y": chain.pool[-1].lazy}, origins)
    given_state, result = lazily([step], tensors)
    places = Places(given_state)
    shape = chain.pool[-1].shape
    if 0 in shape:
        return
    for _ in range(3):
        index = tuple([rng.randrange(size) for size in shape])
        found = why(
            [step], tensors, "y", tuple([i - size * rng.randrange(2) for i, size in zip(index, shape, strict=True)])
        )
        assert found.fqn == "y" and found.index == index
        expected = Counter({places.names[n]: times for n, times in places.at(result["y"], index).items()})
        named = elements_of(found)
        assert set(named) == set(expected)
        if not calls:
            assert named == expected


def test_every_element_of_a_fused_rope_weight_is_found_by_its_value() -> None:
    source = {
        f"layers.{i}.{n}": numbers((8, 4), torch.float32, 3 * i + k) for i in range(2) for k, n in enumerate("qkv")
    }
    p = pipe(
        permute_rope("layers.{_}.q", heads=2, to="halves"),
        concat(["layers.{i}.q", "layers.{i}.k", "layers.{i}.v"], "layers.{i}.qkv", dim=0, groups=2),
        stack("layers.{i}.qkv", "qkv", dim=1),
        transpose("qkv", 0, 2),
    )
    result = p(source)["qkv"]
    seen: Counter[Any] = Counter()
    for index in itertools.product(*map(range, result.shape)):
        (element,) = p.why(source, "qkv", index).sources
        assert isinstance(element, Element) and not element.through
        assert source[element.fqn][element.index] == result[index]
        seen[element.fqn, element.index] += 1
    assert len(seen) == 6 * 32 and set(seen.values()) == {1}


# -- in words ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("p", "fqn", "index", "text"),
    [
        (concat(["q", "k"], "qk", dim=0), "qk", (6, 2), "qk[6, 2] is k[2, 2]"),
        (concat(["q", "k"], "qk", dim=0), "qk", (-1, -3), "qk[7, 0] is k[3, 0]"),
        (cast(torch.bfloat16), "q", (1, 2), "q[1, 2] is q[1, 2] through cast to bfloat16"),
        (
            cast(torch.bfloat16) >> add_scalar("q", 1.0) >> cast(torch.float64),
            "q",
            (0, 0),
            "q[0, 0] is q[0, 0] through cast to bfloat16, add_scalar, cast to float64",
        ),
        (pad("q", 6), "q", (5, 0), "q[5, 0] is 0, made by pad"),
        (
            pad("q", 6) >> cast(torch.float64),
            "q",
            (4, 1),
            "q[4, 1] is 0, made by pad through cast to float64",
        ),
        (map_tensors(doubled, "q"), "q", (2, 2), "q[2, 2] is all of 'q' through doubled"),
        (
            index_select("q", [1, 3]) >> map_tensors(doubled, "q") >> cast(torch.bfloat16, "q"),
            "q",
            (0, 0),
            "q[0, 0] is 6 of 12 elements of 'q' through doubled, cast to bfloat16",
        ),
        (
            concat(["q", "k"], "qk", dim=1) >> map_tensors(doubled, "qk"),
            "qk",
            (0, 0),
            "qk[0, 0] is made of 2 sources:\n  all of 'q' through doubled\n  all of 'k' through doubled",
        ),
        (identity, "scale", (), "scale is scale"),
        (map_tensors(doubled, "scale"), "scale", (), "scale is scale through doubled"),
        (reshape("scale", (1,)), "scale", 0, "scale[0] is scale"),
        (insert("new", TensorSpec((2,), torch.float32), init=2.5), "new", 1, "new[1] is 2.5, made by insert"),
        (
            insert("new", TensorSpec((2,), torch.float32), init=partial(filled, 7.0)),
            "new",
            [0],
            "new[0] is a value of filled, made by insert",
        ),
        (untie("head"), "head", (3, 1), "head[3, 1] is q[3, 1]"),
    ],
)
def test_what_is_said(p: Any, fqn: str, index: Any, text: str) -> None:
    source = numbered(q=(4, 3), k=(4, 3), scale=())
    source["head"] = source["q"]
    made = p.why(source, fqn, index)
    assert str(made) == repr(made) == text
    assert str(p.why(specs(source), fqn, index)) == text


def test_a_tie_compares_what_was_there() -> None:
    made = tie({"head": "embed"}).why(numbered(embed=(3,), head=(3,)), "head", 1)
    assert made.sources == (
        Element("embed", (1,), ("comparison by tie",)),
        Element("head", (1,), ("comparison by tie",)),
    )


def test_parts_that_are_the_same_tensor_are_told_once() -> None:
    p = split("w", ["a", "b"], dim=0, sizes=[2, 3]) >> concat(["b", "a"], "w", dim=0) >> map_tensors(doubled)
    assert str(p.why(numbered(w=(5,)), "w", 0)) == "w[0] is all of 'w' through doubled"


def test_many_sources_are_listed_up_to_ten() -> None:
    source = {f"e.{i}": numbers((2,), torch.float32, i) for i in range(13)}
    p = stack("e.{i}", "e") >> map_tensors(doubled)
    made = p.why(source, "e", (0, 0))
    assert len(made.sources) == 13
    assert made.through == ("doubled",)
    assert str(made).splitlines()[0] == "e[0, 0] is made of 13 sources:"
    assert str(made).splitlines()[-1] == "  and 3 more"


def test_a_constant_is_traced_to_the_step_that_made_it_first() -> None:
    p = pipe(add_prefix("m."), pad("m.w", 4), pad("m.w", 6), add_prefix("x."))
    made = p.why(numbered(w=(3,)), "x.m.w", 5)
    assert made.sources == (Made("0", "pad"),)


def test_an_insert_into_nothing_has_no_source() -> None:
    made = insert("s", TensorSpec((2,), torch.float32), init=3.0).why({}, "s", 1)
    assert made.sources == (Made("3.0", "insert"),)


def test_names_are_those_of_the_source_even_if_its_leaves_are_expressions() -> None:
    under = lazily((), {"file.w": torch.zeros(4, 2)})[0]
    source = (add_prefix("now.") >> index_select("now.file.w", [2, 3]))(under)
    assert str(transpose("now.file.w").why(source, "now.file.w", (1, 0))) == "now.file.w[1, 0] is now.file.w[0, 1]"


def test_other_kinds_of_states() -> None:
    source = numbered(w=(2, 3))
    state = TrainState(source, OptimState({"exp_avg": numbered(w=(2, 3))}))
    assert str(transpose("w").why(state, "w", (2, 0))) == "w[2, 0] is w[0, 2]"
    model = ModelSpec({"w": TensorEntry(TensorSpec((2, 3), torch.float32))})
    assert str(transpose("w").why(model, "w", (2, 0))) == "w[2, 0] is w[0, 2]"
    with pytest.raises(Unsupported, match=r"state\.slots\[slot\]"):
        identity.why(OptimState(), "w", 0)
    with pytest.raises(Unsupported, match="int is no state"):
        identity.why(3, "w", 0)


@pytest.mark.parametrize(
    ("fqn", "index", "error", "text"),
    [
        ("m.wieght", (0, 0), UnknownName, r"has no 'm\.wieght'; the nearest name is 'm\.weight'\.$"),
        ("weight", (0, 0), UnknownName, r"is 'm\.weight'\. It is a name of the source"),
        ("m.weight", (0,), SpecMismatch, r"shape \(2, 3\), and \(0,\) does not name one .* Give 2 numbers, one"),
        ("m.weight", (0, 0, 0), SpecMismatch, r"Give 2 numbers, one for each dim\."),
        ("m.weight", (2, 0), SpecMismatch, r"\(2, 0\) lies outside 'm\.weight', which has shape \(2, 3\)\."),
        ("m.weight", (0, -4), SpecMismatch, r"\(0, -4\) lies outside"),
        ("m.weight", (0, 1.0), SpecMismatch, r"\(0, 1\.0\) is no index\. Give one whole number for each dim"),
        ("m.weight", "01", SpecMismatch, r"'01' is no index"),
        ("m.weight", None, SpecMismatch, r"None is no index"),
        ("m.extra", (), Unsupported, r"'m\.extra' is of class str, not a tensor"),
        ("m.none", 0, SpecMismatch, r"\(0,\) lies outside 'm\.none', which has shape \(0,\)"),
    ],
)
def test_what_cannot_be_asked(fqn: str, index: Any, error: type[Exception], text: str) -> None:
    source: dict[str, Any] = {**numbered(weight=(2, 3), none=(0,)), "extra": "tag"}
    with pytest.raises(error, match=text):
        add_prefix("m.").why(source, fqn, index)


def test_an_answer_is_a_value() -> None:
    made = concat(["q", "k"], "qk", dim=0).why(numbered(q=(4, 3), k=(4, 3)), "qk", (6, 2))
    assert made == Why("qk", (6, 2), (Element("k", (2, 2)),))
    assert pickle.loads(pickle.dumps(made)) == made
    with pytest.raises(AttributeError):
        made.fqn = "x"
