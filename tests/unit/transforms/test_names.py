"""Verbs that change names: tables of names before and after, and of what is refused."""

from __future__ import annotations

import re
from operator import invert
from typing import Any

import pytest
import torch

from fdsd import (
    Pipeline,
    StateDict,
    Template,
    add_prefix,
    drop_prefix,
    identity,
    rename_fqns,
    strip_wrappers,
)
from fdsd.errors import BadPattern, NameConflict, NotInvertible, UnknownName
from fdsd.pipeline.step import Grade
from fdsd.testing import assert_laws, assert_same
from tests.helpers.refusing import assert_refused


def named(*names: str) -> StateDict[Any]:
    return StateDict({name: torch.tensor([k + 0.5]) for k, name in enumerate(names)})


LLAMA = {
    "model.embed_tokens.weight": "tok_embeddings.weight",
    "model.layers.{i}.self_attn.{x|q|k|v|o}_proj.weight": "layers.{i}.attention.w{x|q|k|v|o}.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight?": "output.weight",
}


@pytest.mark.parametrize(
    ("p", "before", "after"),
    [
        (rename_fqns({"a": "b"}), ["a", "c"], ["b", "c"]),
        (rename_fqns({}), ["a", "c"], ["a", "c"]),
        (rename_fqns({"a": "b", "b": "a"}), ["a", "b"], ["b", "a"]),
        (rename_fqns([("a", "b"), ("{x}", "r.{x}")]), ["a", "c"], ["b", "r.c"]),
        (rename_fqns({"l.{i}.w": "b.{i}.k"}), ["l.0.w", "l.10.w", "l.2.w"], ["b.0.k", "b.10.k", "b.2.k"]),
        (rename_fqns({"l.{i}": "l.{i+8}"}), ["l.0", "l.11"], ["l.8", "l.19"]),
        (rename_fqns({"l.{2*i+1}": "odd.{i}", "l.{2*i}": "even.{i}"}), ["l.3", "l.4"], ["odd.1", "even.2"]),
        (rename_fqns({"{x...}.old": "{x...}.new"}), ["a.b.old", "old"], ["a.b.new", "old"]),
        (rename_fqns({"{n:0..1}.w": "low.{n:0..1}"}), ["0.w", "2.w"], ["low.0", "2.w"]),
        (rename_fqns({"a?": "b"}), ["c"], ["c"]),
        (rename_fqns({Template("a"): Template("b")}), ["a"], ["b"]),
        (rename_fqns({"a{{0}}": "b??"}), ["a{0}"], ["b?"]),
        (rename_fqns({re.compile(r"h\.(\d+)\.(.*)"): r"layers.\1.\2"}), ["h.3.w.x"], ["layers.3.w.x"]),
        (rename_fqns(lambda name: name.upper()), ["a.b"], ["A.B"]),
        (rename_fqns(lambda name: None if name == "a" else "z"), ["a", "b"], ["a", "z"]),
        (
            rename_fqns(LLAMA),
            ["model.embed_tokens.weight", "model.layers.31.self_attn.q_proj.weight", "model.norm.weight"],
            ["tok_embeddings.weight", "layers.31.attention.wq.weight", "norm.weight"],
        ),
        (add_prefix("m."), ["a", "b.c"], ["m.a", "m.b.c"]),
        (add_prefix(""), ["a"], ["a"]),
        (add_prefix("m."), [], []),
        (drop_prefix("m."), ["m.a", "m.m.b"], ["a", "m.b"]),
        (drop_prefix("m."), [], []),
        (strip_wrappers(), ["module._orig_mod.0.weight", "b"], ["0.weight", "b"]),
        (strip_wrappers(), ["0._checkpoint_wrapped_module._orig_mod.weight"], ["0.weight"]),
        (strip_wrappers(), ["a._fsdp_wrapped_module.b.module"], ["a.b.module"]),
        (strip_wrappers(), ["module"], ["module"]),
        (strip_wrappers(), ["modules.0.orig_mod"], ["modules.0.orig_mod"]),
        (identity, ["b", "a"], ["b", "a"]),
    ],
    ids=str,
)
def test_names(p: Pipeline, before: list[str], after: list[str]) -> None:
    state = named(*before)
    made = p(state)
    assert list(made) == after
    assert all(made[new] is state[old] for old, new in zip(before, after, strict=True))
    assert_laws(p, state)


@pytest.mark.parametrize(
    ("p", "before", "error", "texts"),
    [
        (rename_fqns({"x": "a", "y": "a"}), ["y", "x"], NameConflict, ["2 names map to 'a': 'x', 'y'", "concat()"]),
        (rename_fqns({"x": "a"}), ["x", "a"], NameConflict, ["'a': 'a', 'x'"]),
        (rename_fqns({"x": "a"}), ["y"], UnknownName, ["rule 'x' -> 'a'", "1 name", "'?'"]),
        (rename_fqns({"x": "a"}), [], UnknownName, ["'x'", "0 names"]),
        (rename_fqns({"layer.{i}.w": "a.{i}"}), ["layers.0.w"], UnknownName, ["'layers.{i}.w' would match"]),
        (rename_fqns({"{x}": "r.{x}", "a": "b"}), ["a"], UnknownName, ["wins no name", "'a'", "Put it first"]),
        (rename_fqns({re.compile("x"): "a"}), ["y"], UnknownName, ["re.compile('x')"]),
        (rename_fqns(lambda name: None), ["y"], UnknownName, ["None"]),
        (rename_fqns(lambda name: 3), ["y"], NameConflict, ["gives 3 for 'y'"]),  # type: ignore[arg-type, return-value]
        (drop_prefix("m."), ["m.a", "b", "c"], UnknownName, ["2 of 3 names", "'b', 'c'", "'m.'", "{rest...}"]),
        (strip_wrappers(), ["module.a.w", "a.w"], NameConflict, ["'a.w'", "'module.a.w'"]),
    ],
    ids=str,
)
def test_refusals(p: Pipeline, before: list[str], error: Any, texts: list[str]) -> None:
    assert_refused(p, named(*before), error, *texts)


def test_all_offenders_are_named_at_once_and_counted() -> None:
    state = named(*[f"l.{i}" for i in range(14)])
    with pytest.raises(NameConflict, match=r"14 names map to 'w': 'l.0', .* and 4 more"):
        rename_fqns(lambda name: "w")(state)
    with pytest.raises(UnknownName) as caught:
        rename_fqns({"a": "x", "b": "y", "l.{i}": "k.{i}"})(state)
    assert "'a'" in str(caught.value) and "'b'" in str(caught.value)


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        ({"a.{i}": "b"}, "lacks {i}"),
        ({"a": "b.{i}"}, "lacks {i}"),
        ({"a": "b?"}, "'?' stands on the source"),
        ({"{a}{b}": "{b}.{a}"}, "{a}{b}"),
        ({"a...b": "c"}, "..."),
        ({"{_}": "a.{_}"}, "unnamed"),
        ({"{x": "a"}, "{x"),
        ({"": "a"}, "empty"),
    ],
    ids=str,
)
def test_malformed_rules_are_refused_when_they_are_made(rules: dict[str, str], text: str) -> None:
    with pytest.raises(BadPattern) as caught:
        rename_fqns(rules)
    assert text in str(caught.value)


def test_inverses_of_names() -> None:
    assert ~add_prefix("m.") == drop_prefix("m.")
    assert ~drop_prefix("m.") == add_prefix("m.")
    assert ~~rename_fqns(LLAMA) == rename_fqns(LLAMA)
    assert ~~~rename_fqns(LLAMA) == ~rename_fqns(LLAMA)
    assert rename_fqns({"a": "b"}).grade is Grade.EXACT
    assert strip_wrappers().grade is rename_fqns(str.upper).grade is Grade.NONE


@pytest.mark.parametrize(
    ("p", "text"),
    [
        (strip_wrappers(), "rename_fqns()"),
        (rename_fqns(str.upper), "inverse="),
        (rename_fqns({re.compile("a"): "b"}), "inverse="),
    ],
    ids=str,
)
def test_what_cannot_be_undone_says_what_would_help(p: Pipeline, text: str) -> None:
    with pytest.raises(NotInvertible, match=re.escape(text)):
        invert(p)


def test_an_inverse_is_the_rename_with_the_sides_swapped_and_checks_each_name() -> None:
    """It equals that rename and prints as it; of a name that it could not have given, it says so."""
    back, swapped = ~rename_fqns({"{x}.a?": "{x}.b"}), rename_fqns({"{x}.b?": "{x}.a"})
    state = named("m.b", "n.a")
    assert list(swapped(state)) == ["m.a", "n.a"]
    with pytest.raises(NotInvertible, match=r"'n\.a'"):
        back(state)
    assert back == swapped
    assert repr(back) == "rename_fqns({'{x}.b?': '{x}.a'})" and eval(repr(back)) == back
    f, g = rename_fqns({"m.{x}": "k.{x}"}), rename_fqns({"k.{x}": "{x}.k"})
    assert ~(f >> g) == ~g >> ~f and ~~(f >> g) == f >> g
    for p in (back, ~f, ~g >> ~f):
        assert (~p).grade is p.grade is Grade.EXACT
    assert_laws(back, named("m.b", "n.b"))


def test_given_inverses_are_checked_name_by_name() -> None:
    state = named("a.w", "b.w")
    right = rename_fqns(str.upper, inverse=str.lower)
    assert_same((~right)(right(state)), state, order=True)
    wrong = rename_fqns(str.upper, inverse=lambda name: name.lower().replace("b", "c"))
    with pytest.raises(NotInvertible, match=r"'b.w'"):
        wrong.bind(state)
    assert rename_fqns(str.upper, inverse=str.lower) != rename_fqns(str.upper)


@pytest.mark.parametrize(
    ("rules", "names", "pair"),
    [
        ({"{a}_{b}": "{b}_{a}"}, ["x_y_z"], ["'x_y_z'", "'y_z_x'"]),
        ({"{x}.gamma": "{x}.weight"}, ["m.gamma", "n.weight"], ["'n.weight'", "'n.gamma'"]),
        ({"a?": "b"}, ["b"], ["'b'", "'a'"]),
    ],
    ids=str,
)
def test_names_that_would_not_come_back_are_refused_by_bind(
    rules: dict[str, str], names: list[str], pair: list[str]
) -> None:
    with pytest.raises(NotInvertible) as caught:
        rename_fqns(rules).bind(named(*names))
    assert all(text in str(caught.value) for text in pair)


def test_undoing_twice_does_not_add_a_prefix_twice() -> None:
    p = rename_fqns({"{rest...}": "model.{rest...}"})
    with pytest.raises(UnknownName):
        (~p)(named("a", "b"))
    with pytest.raises(NotInvertible, match="'a'"):
        (~p)(named("model.b", "a"))


def test_objects_and_parameters_pass_through_by_identity() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    extra = object()
    made = rename_fqns({"{x}": "m.{x}"})({"w": weight, "_extra_state": extra, "n": None})
    assert made["m.w"] is weight and made["m._extra_state"] is extra and made["m.n"] is None
    assert type(made["m.w"]) is torch.nn.Parameter and made["m.w"].requires_grad


def test_a_regex_matches_whole_names_only() -> None:
    with pytest.raises(UnknownName):
        rename_fqns({re.compile("a"): "b"})(named("aa"))
