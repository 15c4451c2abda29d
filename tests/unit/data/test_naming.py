"""Suggestions for names that are absent, and long lists of names folded to a few lines."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Hashable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fdsd.data.naming import Fold, fold, nearest, nearest_template
from fdsd.data.template import Template


def moe_names() -> list[str]:
    layers = range(61)
    dense = [f"model.layers.{i}.self_attn.{x}_proj.weight" for i in layers for x in "qkvo"]
    experts = [
        f"model.layers.{i}.mlp.experts.{e}.{x}_proj.weight"
        for i in layers
        for e in range(540)
        for x in ("gate", "up", "down")
    ]
    return ["model.embed_tokens.weight", *dense, *experts, "model.norm.weight", "lm_head.weight"]


# --------------------------------------------------------------------------------------------------- nearest


def test_what_is_no_text_is_like_no_name() -> None:
    odd: Any = ["ab", 1, ("a", "b"), "xyz"]
    assert nearest("abc", odd) == ["ab"] and nearest(odd[1], odd) == []


@pytest.mark.parametrize(
    "name, wanted",
    [
        ("lmhead.weight", "lm_head.weight"),
        ("layers.3.self_attn.q_proj.weight", "model.layers.3.self_attn.q_proj.weight"),
        ("model.layers.3.self_atn.q_proj.weight", "model.layers.3.self_attn.q_proj.weight"),
        (
            "model.layers.17.mlp.experts.345.gateproj.weight",
            "model.layers.17.mlp.experts.345.gate_proj.weight",
        ),
        ("model.nrm.weight", "model.norm.weight"),
    ],
)
def test_nearest_of_many(name: str, wanted: str) -> None:
    assert nearest(name, moe_names()) == [wanted]


@given(st.lists(st.text("abc._", min_size=4, max_size=12), min_size=1, max_size=300, unique=True), st.data())
def test_a_name_is_nearest_to_itself(names: list[str], data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(names))
    found = nearest(name, names, n=3)
    assert found[0] == name
    assert len(found) == len(set(found)) <= 3
    assert set(found) <= set(names)


def test_nothing_is_near() -> None:
    assert nearest("zzzz", ["model.norm.weight", "lm_head.weight"]) == []
    assert nearest("a", []) == []
    assert nearest("", ["a"]) == []
    assert nearest("qqqq", [f"model.{k}" for k in range(1000)]) == []
    assert nearest_template(Template("zzzz"), ["model.norm.weight"]) == (None, None)


@pytest.mark.parametrize(
    "text, name, wanted",
    [
        ("layers.{i}.wq", "model.layers.0.wq", "model.layers.{i}.wq"),
        ("model.layers.{i}.wq", "layers.0.wq", "layers.{i}.wq"),
        ("layers.{i}.attn.{x|wq|wk}", "layers.3.attention.wk", "layers.{i}.attention.{x|wq|wk}"),
        ("{r...}.wq.weight", "a.b.q.weight", "{r...}.q.weight"),
        ("m.{r...}.w", "n.a.b.w", "n.{r...}.w"),
        ("layers.{i:4..9}.wqq", "layers.5.wq", "layers.{i:4..9}.wq"),
        ("layers.{i+4}.wqq", "layers.5.wq", "layers.{i+4}.wq"),
        ("layers.{i}.{{q}}", "layers.5.{q}?", "layers.{i}.{{q}}??"),
        ("layers.{i}.w{x}", "layers.5.bias", None),
    ],
)
def test_the_pattern_that_would_match(text: str, name: str, wanted: str | None) -> None:
    found, close = nearest_template(Template(text), ["norm", name])
    assert close == name
    assert found == (None if wanted is None else Template(wanted))
    if found is not None:
        assert found.match(name) is not None


@given(st.text("a.{}?|:0", min_size=1, max_size=8), st.lists(st.text("a.{}?|:0", max_size=6), max_size=4))
def test_any_names_can_be_suggested(name: str, names: list[str]) -> None:
    template = Template.literal(name) if "..." not in name else Template("a.{x}")
    found, close = nearest_template(template, names)
    assert close is None or close in names
    assert found is None or (close is not None and found.match(close) is not None)


# ------------------------------------------------------------------------------------------------------ fold


def expand(text: str) -> list[str]:
    """Write out a fold's text as a reader would: ``{0..3,7}`` is each of these integers."""
    parts: list[list[str]] = []
    for literal, braces in re.findall(r"((?:[^{}]|\{\{|\}\})+)|\{([0-9.,]+)\}", text):
        if literal:
            parts.append([literal.replace("{{", "{").replace("}}", "}").replace("??", "?")])
            continue
        values: list[str] = []
        for run in braces.split(","):
            lo, _, hi = run.partition("..")
            values += map(str, range(int(lo), int(hi or lo) + 1))
        assert len(values) > 1
        parts.append(values)
    return ["".join(row) for row in itertools.product(*parts)]


segments = st.sampled_from(["a", "b", "{", "?", "0", "1", "2", "3", "7", "00", "01", "-1", "1a", "\u0663", ""])
names_lists = st.lists(st.lists(segments, max_size=4).map(".".join), max_size=40, unique=True)
keys: st.SearchStrategy[Callable[[str], Hashable] | None] = st.sampled_from(
    [None, len, lambda name: name.endswith("1"), lambda name: name]
)


@given(names_lists, keys)
def test_each_name_is_in_exactly_one_fold(names: list[str], key: Callable[[str], Hashable] | None) -> None:
    folds = fold(names, key)
    assert sorted(name for found in folds for name in found.names) == sorted(names)
    for found in folds:
        assert sorted(expand(found.text)) == sorted(found.names)
        assert [names.index(name) for name in found.names] == sorted(names.index(name) for name in found.names)
        assert key is None or len({key(name) for name in found.names}) == 1
    firsts = [names.index(found.names[0]) for found in folds]
    assert firsts == sorted(firsts)


@given(st.sets(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 2)), max_size=40))
@example({(0, 0, 0), (0, 1, 0), (1, 0, 0)})
def test_products_fold_whole(indices: set[tuple[int, int, int]]) -> None:
    names = [f"l.{i}.e.{e}.w.{k}" for i, e, k in sorted(indices)]
    folds = fold(names)
    assert sorted(name for found in folds for name in expand(found.text)) == sorted(names)
    sizes = [len(set(axis)) for axis in zip(*indices, strict=True)]
    if indices and math.prod(sizes) == len(indices):
        assert len(folds) == 1


@pytest.mark.parametrize(
    "names, texts",
    [
        ([], []),
        (["norm"], ["norm"]),
        (["l.0.q", "l.1.q", "l.2.q"], ["l.{0..2}.q"]),
        (["l.0.q", "l.1.q"], ["l.{0..1}.q"]),
        (["l.0.q", "l.2.q", "l.5.q"], ["l.{0,2,5}.q"]),
        (["l.0.q", "l.1.q", "l.2.q", "l.9.q"], ["l.{0..2,9}.q"]),
        (["l.2.q", "l.0.q", "l.1.q"], ["l.{0..2}.q"]),
        (["l.7.q"], ["l.7.q"]),
        (["l.0.q", "l.0.k", "l.1.q", "l.1.k"], ["l.{0..1}.q", "l.{0..1}.k"]),
        (["l.0.e.0", "l.0.e.1", "l.1.e.0", "l.1.e.1"], ["l.{0..1}.e.{0..1}"]),
        (["l.0.e.0", "l.0.e.1", "l.1.e.0"], ["l.0.e.{0..1}", "l.1.e.0"]),
        (["l.0.e.0", "l.0.e.1", "l.1.e.0", "l.2.e.0", "l.2.e.1"], ["l.{0,2}.e.{0..1}", "l.1.e.0"]),
        (["l.00.q", "l.01.q"], ["l.00.q", "l.01.q"]),
        (["w0", "w1"], ["w0", "w1"]),
        (["a{0}", "b?"], ["a{{0}}", "b??"]),
        (["0", "1"], ["{0..1}"]),
    ],
)
def test_folds(names: list[str], texts: list[str]) -> None:
    assert [found.text for found in fold(names)] == texts


def test_only_equal_attributes_fold() -> None:
    names = [f"l.{i}.q" for i in range(6)]
    assert [found.text for found in fold(names, lambda name: name == "l.3.q")] == ["l.{0..2,4,5}.q", "l.3.q"]
    assert fold(["a.0", "a.1"], lambda name: 1) == [Fold("a.{0..1}", ("a.0", "a.1"))]


def test_a_whole_model_folds_to_a_few_lines() -> None:
    assert [found.text for found in fold(moe_names())] == [
        "model.embed_tokens.weight",
        *(f"model.layers.{{0..60}}.self_attn.{x}_proj.weight" for x in "qkvo"),
        *(f"model.layers.{{0..60}}.mlp.experts.{{0..539}}.{x}_proj.weight" for x in ("gate", "up", "down")),
        "model.norm.weight",
        "lm_head.weight",
    ]


def test_a_name_of_many_numbers_does_not_recurse() -> None:
    long = ".".join(["0"] * 5000)
    assert [found.text for found in fold([long, long[:-1] + "1"])] == [long, long[:-1] + "1"]
