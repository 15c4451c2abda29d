"""Rename tables: the same as trying rule after rule, exact inverses, and every problem told at once."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fdsd.data.errors import BadPattern, NameConflict, NotInvertible, UnknownName, Unsupported
from fdsd.data.problem import Problem
from fdsd.data.rules import FunctionRule, PatternRule, RegexRule, RuleTable, check_round_trip
from fdsd.data.template import Template, bind_together

# ------------------------------------------------------------------------------------------------ strategies

words = st.sampled_from(["a", "b", "w", "0", "1", "2", "a_b", "b_1", "10"])
segments = st.one_of(words, st.sampled_from(["{x}", "{i}", "{i+1}", "{i:0..1}", "{y|a|w}", "{x}_{y}", "a{x}"]))
tails = st.sampled_from(["", "", ".w", ".a.w", ".b.a.w"])


@st.composite
def sides(draw: st.DrawFn) -> tuple[str, str]:
    """A source, and a target made of the same segments in another order, with other literals."""
    parts = draw(st.lists(segments, min_size=1, max_size=3))
    if draw(st.integers(0, 5)) == 0:
        parts[draw(st.integers(0, len(parts) - 1))] = "{r...}"
    source = ".".join(parts) + draw(tails)
    plain = [re.sub(r"\{i[^}]*\}", draw(st.sampled_from(["{i}", "{i}", "{i+2}"])), part) for part in parts]
    target = ".".join(draw(st.permutations(plain))) + draw(tails)
    if draw(st.booleans()):
        target = "t." + target
    return source + draw(st.sampled_from(["", "?"])), target


@st.composite
def names_of(draw: st.DrawFn) -> list[str]:
    found = st.lists(words, min_size=1, max_size=3).map(".".join)
    return draw(st.lists(st.builds(lambda a, b: a + b, found, tails), max_size=8, unique=True))


regex_rules = st.sampled_from(
    [
        (re.compile(r"(\w)\.(\w+)"), r"r.\2.\1"),
        (re.compile(r"A.*", re.IGNORECASE | re.DOTALL), "one"),
        (re.compile(r"(?P<head>.*)\.w"), r"\g<head>.weight"),
    ]
)
pattern_tables = st.lists(sides(), max_size=6)
mixed_tables = st.lists(st.one_of(sides(), sides(), regex_rules), max_size=6)


def make(pairs: list[Any]) -> RuleTable:
    """Read a table, without the rules whose sides do not fit."""
    kept: list[Any] = []
    for pair in pairs:
        try:
            RuleTable.make([pair])
        except BadPattern:
            continue
        kept.append(pair)
    return RuleTable.make(kept)


def naive(table: RuleTable, name: str) -> tuple[str, int]:
    """Try rule after rule, with the exact search alone."""
    for place, rule in enumerate(table.rules):
        if isinstance(rule, PatternRule):
            source, target = bind_together(rule.source, rule.target)
            bound = source.search(name)
            if bound is not None:
                return target.format(bound), place
        else:
            new = rule(name)
            if new is not None:
                return new, place
    return name, -1


# ------------------------------------------------------------------------------------------------ properties


@settings(max_examples=400)
@given(mixed_tables, names_of())
@example([("{i}.w", "{2*i}.w"), ("{2*i}.w", "t.{i}"), ("0.w", "u")], ["0.w", "1.w", "a.w"])
@example([("x.{2*i}.a.w", "t.{i}"), ("x.{2*i+1}.a.w", "u.{i}"), ("x.{r...}", "v.{r...}")], ["x.3.a.w", "x.b.a.w"])
def test_the_first_rule_wins(pairs: list[Any], names: list[str]) -> None:
    table = make(pairs)
    renaming = table.apply(names)
    wanted = [naive(table, name) for name in names]
    assert renaming.targets == [target for target, _ in wanted]
    assert renaming.winners == [winner for _, winner in wanted]
    assert table.apply(names) == renaming  # what is kept between calls changes nothing


@given(mixed_tables, names_of())
def test_problems_are_exactly_what_is_wrong(pairs: list[Any], names: list[str]) -> None:
    table = make(pairs)
    renaming = table.apply(names)
    wanted: set[tuple[str, Any]] = set()
    for target in renaming.targets:
        if renaming.targets.count(target) > 1:
            wanted.add(("collision", tuple(n for n, t in zip(names, renaming.targets, strict=True) if t == target)))
    for place, rule in enumerate(table.rules):
        is_optional = isinstance(rule, PatternRule) and rule.source.optional
        if place not in renaming.winners and not is_optional:
            alone = RuleTable((rule,))
            has_match = any(naive(alone, name)[1] == 0 for name in names)
            wanted.add(("shadowed rule" if has_match else "unmatched rule", place))
    assert {(p.kind, p.names if p.kind == "collision" else p.rule) for p in renaming.problems} == wanted
    assert len(renaming.problems) == len(wanted)
    for problem in renaming.problems:
        assert problem.message.endswith(".")


@given(pattern_tables)
def test_inversion_swaps_the_sides(pairs: list[tuple[str, str]]) -> None:
    table = make(pairs)
    inverse = table.invert()
    assert inverse.invert() == table
    assert [r.source.unoptional() for r in inverse.rules] == [r.target for r in table.rules]  # type: ignore[union-attr]
    assert [r.target for r in inverse.rules] == [r.source.unoptional() for r in table.rules]  # type: ignore[union-attr]
    assert [r.source.optional for r in inverse.rules] == [r.source.optional for r in table.rules]  # type: ignore[union-attr]


@settings(max_examples=300)
@given(pattern_tables, names_of())
def test_round_trips_are_exact_or_told(pairs: list[tuple[str, str]], names: list[str]) -> None:
    table = make(pairs)
    inverse = table.invert()
    problems = check_round_trip(table, inverse, names)
    bad = {name for name in names if naive(inverse, naive(table, name)[0])[0] != name}
    assert {problem.names[0] for problem in problems} == bad
    assert all(problem.kind == "round trip" and problem.error is NotInvertible for problem in problems)
    if not bad:
        assert len(set(table.rename(names).targets)) == len(names)  # what comes back whole did not collide


@given(sides(), names_of())
def test_one_rule_is_a_relation(pair: tuple[str, str], names: list[str]) -> None:
    table = make([pair])
    renaming = table.rename(names)
    back = table.invert().rename(renaming.targets)
    for winner, returned in zip(renaming.winners, back.winners, strict=True):
        assert winner == -1 or returned == 0  # what a rule writes, its inverse reads


@given(mixed_tables, st.one_of(st.none(), mixed_tables))
def test_a_table_is_a_value(pairs: list[Any], inverse: list[Any] | None) -> None:
    table = RuleTable.make(make(pairs), None if inverse is None else make(inverse))
    assert eval(repr(table)) == table
    assert pickle.loads(pickle.dumps(table)) == table
    assert hash(pickle.loads(pickle.dumps(table))) == hash(table)
    if inverse is not None:
        assert table.invert() != table or table.rules == table.backward
        assert table.invert().invert() == table


# -------------------------------------------------------------------------------------------------- examples


def test_many_names_with_tails_of_their_own() -> None:
    table = RuleTable.make({"e.weight{x:0..20000}": "w.{x}", "{r...}.w": "v.{r...}", "e.weight7.{y}": "q.{y}"})
    names = [f"e.weight{k}" for k in range(25_000)] + [f"a.{k}.w" for k in range(300)] + ["e.weight7.z"]
    wanted = [f"w.{k}" if k <= 20_000 else f"e.weight{k}" for k in range(25_000)]
    wanted += [f"v.a.{k}" for k in range(300)] + ["q.z"]
    assert table.apply(names).targets == wanted
    assert table.apply(names).problems == []


def test_a_table_of_one_rule_for_each_name() -> None:
    names = [f"m.{k}.w" for k in range(5000)]
    table = RuleTable.make({name: f"n.{name}" for name in reversed(names)})
    assert table.apply(names).targets == [f"n.{name}" for name in names]
    prefixed = [f"module.{name}" for name in names[:50]]
    problems = table.apply(prefixed).problems
    assert len(problems) == 5000
    assert sum("would match" in problem.message for problem in problems) == 10


@pytest.mark.parametrize(
    "rules, names, targets",
    [
        ({"a": "b"}, ["a", "c"], ["b", "c"]),
        ([("a", "b"), ("b", "a")], ["a", "b"], ["b", "a"]),  # all at once, not one after the other
        ({"{x}.w": "{x}.weight"}, ["a.w", "a.b.w"], ["a.weight", "a.b.w"]),
        ({"{r...}.w": "{r...}.100%"}, ["a.b.w"], ["a.b.100%"]),
        ({"l.{i}": "l.{i+8}"}, ["l.0", "l.1", "l.x"], ["l.8", "l.9", "l.x"]),
        ({"l.{i}": "s1.{i-8}"}, ["l.7", "l.8"], ["l.7", "s1.0"]),
        ({"l.{2*i}": "e.{i}", "l.{2*i+1}": "o.{i}"}, ["l.4", "l.5"], ["e.2", "o.2"]),
        ({"l.{i:0..3}": "a.{i}", "l.{i}": "b.{i}"}, ["l.3", "l.4", "l.x"], ["a.3", "b.4", "b.x"]),
        ({"{a}_{b}": "{b}.{a}"}, ["x_y_z"], ["y_z.x"]),
        ({"{i}.{j}": "{j}.{i}"}, ["3.4"], ["4.3"]),
        ({Template("a.{x}"): Template("b.{x}")}, ["a.q"], ["b.q"]),
        ({"a{{0}}??": "b"}, ["a{0}?"], ["b"]),
        ([[re.compile(r"(\w+)\.(\w+)"), r"\2.\g<1>"]], ["a.b", "a.b.c"], ["b.a", "a.b.c"]),
        ([(re.compile(r"a\d"), lambda found: found[0].upper())], ["a1", "a12"], ["A1", "a12"]),
        ([("a1", "first"), (re.compile(r"a\d"), "second"), ("a{x}", "third.{x}")], ["a1", "a2", "ab"],
         ["first", "second", "third.b"]),
        (lambda name: None if name == "a" else name + "!", ["a", "b"], ["a", "b!"]),
        (str.upper, ["a.b"], ["A.B"]),
        ({"gone.{x}?": "t.{x}"}, ["a"], ["a"]),
        ({}, ["a"], ["a"]),
    ],
)  # fmt: skip
def test_renames(rules: Any, names: list[str], targets: list[str]) -> None:
    renaming = RuleTable.make(rules).apply(names)
    assert renaming.targets == targets
    assert renaming.problems == []


def only(problems: list[Problem]) -> Problem:
    assert len(problems) == 1, problems
    return problems[0]


def test_collisions_name_all() -> None:
    problem = only(RuleTable.make({"y.w": "a.w", "x.w": "a.w"}).apply(["y.w", "x.w", "b"]).problems)
    assert problem.message == (
        "2 names map to 'a.w': 'x.w', 'y.w'. Renames must be one-to-one; drop one first, or use concat()."
    )
    assert problem.error is NameConflict
    assert problem.names == ("y.w", "x.w")
    many = only(RuleTable.make(lambda name: "t").apply([f"{k}" for k in range(13)]).problems)
    assert many.message.startswith(
        "13 names map to 't': '0', '1', '10', '11', '12', '2', '3', '4', '5', '6' and 3 more."
    )


def test_a_name_that_stays_collides_too() -> None:
    problem = only(RuleTable.make({"a": "b"}).apply(["a", "b"]).problems)
    assert problem.message.startswith("2 names map to 'b': 'a', 'b'.")


@pytest.mark.parametrize(
    "rules, names, message",
    [
        (
            {"layers.{i}.wq": "q.{i}"},
            ["model.layers.0.wq", "model.layers.1.wq", "norm"],
            "rule 'layers.{i}.wq' -> 'q.{i}' matches none of 3 names; 'model.layers.{i}.wq' would match 2 ",
        ),
        (
            {"model.layers.{i}.wq": "q.{i}"},
            ["layers.0.wq"],
            "matches none of 1 name; 'layers.{i}.wq' would match 1 name, such as 'layers.0.wq'.",
        ),
        (
            {"l.{i}.self_atn.{x|q|k}": "{i}.{x}"},
            ["l.0.self_attn.k"],
            "'l.{i}.self_attn.{x|q|k}' would match 1 name",
        ),
        (
            {"l.{i}.{r...}.wieght": "{i}.{r...}"},
            ["l.0.a.b.weight"],
            "'l.{i}.{r...}.weight' would match 1 name",
        ),
        ({"lm_haed": "h"}, ["lm_head", "norm"], "'lm_head' would match 1 name, such as 'lm_head'"),
        ({"l.{i:8..9}.w": "{i}"}, ["l.0.w"], "the nearest name is 'l.0.w'"),
        (
            {"l.{i}": "m.{i-8}"},
            ["l.7"],
            "the source alone matches 'l.7', but its values do not fit 'm.{i-8}'",
        ),
        (
            {re.compile(r"layers\.\d+\.wq"): "q"},
            ["layer.0.wq", "norm"],
            "the nearest name is 'layer.0.wq'. Correct it, or",
        ),
        ({"zzz": "y"}, ["a"], "matches none of 1 name. Correct it"),
        ({"zzz": "y"}, [], "matches none of 0 names. Correct it"),
        (
            lambda name: None,
            ["a"],
            "gives None for each of 1 name; give back the names that stay as they are.",
        ),
    ],
)
def test_unmatched_rules_show_what_would_match(rules: Any, names: list[str], message: str) -> None:
    problem = only(RuleTable.make(rules).apply(names).problems)
    assert problem.kind == "unmatched rule"
    assert problem.error is UnknownName
    assert issubclass(problem.error, KeyError)
    assert problem.rule == 0
    assert message in problem.message


def test_shadowed_rules_name_what_shadows_them() -> None:
    rules = {"l.{i:0..1}.w": "a.{i}", "l.{i}.{r...}": "b.{i}.{r...}", "l.{i}.w": "c.{i}", "l.5.w?": "d"}
    problem = only(RuleTable.make(rules).apply(["l.0.w", "l.1.w", "l.2.w"]).problems)
    assert problem.kind == "shadowed rule"
    assert problem.rule == 2
    assert problem.names == ("l.0.w", "l.1.w", "l.2.w")
    assert problem.message == (
        "rule 'l.{i}.w' -> 'c.{i}' wins no name: 3 names that it matches, such as 'l.0.w', go to "
        "rule 'l.{i:0..1}.w' -> 'a.{i}', rule 'l.{i}.{r...}' -> 'b.{i}.{r...}', which stand before it. "
        "Put it first, or remove it."
    )


def test_a_function_on_no_names_is_fine() -> None:
    assert RuleTable.make(lambda name: None).apply([]).problems == []


def test_functions_must_give_names() -> None:
    wrong: Callable[[str], Any] = len
    problem, collision = RuleTable.make(wrong).apply(["abc", "abc"]).problems[::2]
    assert problem.message == "function len gives 3 for 'abc'; a new name is a str, and None keeps the old one."
    assert problem.kind == "bad target"
    assert collision.kind == "collision"
    assert RuleTable.make(wrong).rename(["ab"]).targets == ["ab"]


def test_errors_of_functions_say_which_name() -> None:
    def fail(name: str) -> str:
        raise ZeroDivisionError(name)

    with pytest.raises(ZeroDivisionError) as caught:
        RuleTable.make(fail).apply(["a.b"])
    assert "asked for the new name of 'a.b'" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    "rules, error, message",
    [
        ({"a.{x}": "b"}, BadPattern, "the target lacks {x}; both sides of a rename have the same holes"),
        ({"a": "b.{x}"}, BadPattern, "the source lacks {x}"),
        ({"a.{r...}": "b.{r}"}, BadPattern, "hole r: it is written both with and without '...'"),
        ({"a": "b?"}, BadPattern, "the '?' stands on the source; write 'a?'"),
        ({"l.{i:0..3}": "m.{i-4}"}, BadPattern, "hole i: no value fits all of its uses"),
        ({"{x|a|b}": "t.{x|c}"}, BadPattern, "hole x: no value fits all of its uses"),
        ({Template.selector("{_}"): "t"}, BadPattern, "unnamed holes are for select and drop only"),
        ({"a": "b{"}, BadPattern, "is never closed"),
        ({re.compile(b"a"): "b"}, BadPattern, "of str, not of bytes"),
        ({re.compile("(a)"): r"\2"}, BadPattern, "the target is no template for this expression"),
        ({re.compile("(a)"): r"\g<x>"}, BadPattern, "the target is no template for this expression"),
        ({re.compile("(a)"): 3}, Unsupported, "its target is a template or a function, not 3"),
        ({"a": 3}, Unsupported, "a side of a rule is a pattern, or a compiled expression, not 3"),
        ({3: "a"}, Unsupported, "not 3"),
        ([("a", "b", "c")], Unsupported, "a rule is a pair"),
        (["ab"], Unsupported, "a rule is a pair of a source and a target, not 'ab'"),
        ("ab", Unsupported, "rules are a mapping, pairs or a function, not str: 'ab'"),
        (3, Unsupported, "not int: 3"),
    ],
)
def test_bad_tables(rules: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        RuleTable.make(rules)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "rules, names, pair",
    [
        ({"{a}_{b}": "{b}_{a}"}, ["x_y", "x_y_z"], ("x_y_z", "y_z_x", "z_x_y")),
        ({"a?": "b"}, ["b"], ("b", "b", "a")),
        ({"m.{r...}": "{r...}", "head": "output"}, ["m.a.w", "head"], ("head", "output", "m.output")),
        ({"{x}.w": "q.{x}", "a.b": "q.a"}, ["a.b"], ("a.b", "q.a", "a.w")),
    ],
)
def test_what_does_not_come_back(rules: Any, names: list[str], pair: tuple[str, ...]) -> None:
    table = RuleTable.make(rules)
    problem = only(check_round_trip(table, table.invert(), names))
    assert problem.names == pair
    assert repr(pair[0]) in problem.message
    assert repr(pair[2]) in problem.message


@pytest.mark.parametrize(
    "rules, names",
    [
        ({"l.{i:0..3}.w": "b.{i}.w"}, ["l.0.w", "b.7.w", "l.9.w"]),
        ({"{x|q|k}_proj": "w{x}"}, ["q_proj", "v_proj", "wv", "weight"]),
        ({"a.{i-8}": "b.{i}"}, ["a.0", "b.3"]),
        ({"l.{i}": "l.{i+8}"}, ["l.0", "l.1", "l.x"]),
        ({"l.{i}.norm": "h.{i}.n", "l.{i}.{r...}": "h.{i}.{r...}"}, ["l.0.norm", "l.0.a.b"]),
        ({"a": "b", "b": "a"}, ["a", "b", "c"]),
        ({"l.{2*i}.{r...}": "e.{i}.{r...}", "l.{2*i+1}.{r...}": "o.{i}.{r...}"}, ["l.4.a", "l.5.b.c"]),
    ],
)
def test_what_comes_back(rules: Any, names: list[str]) -> None:
    table = RuleTable.make(rules)
    assert check_round_trip(table, table.invert(), names) == []
    assert table.invert().apply(table.rename(names).targets).targets == names


def test_expressions_and_functions_invert_with_inverse_only() -> None:
    rules: Any = {re.compile("a(.)"): r"b\1"}
    for table in (RuleTable.make(rules), RuleTable.make(str.upper)):
        with pytest.raises(NotInvertible, match="inverse="):
            table.invert()
    back: Any = {re.compile("b(.)"): r"a\1"}
    table = RuleTable.make(rules, back)
    assert table.invert().apply(["bx"]).targets == ["ax"]
    assert table.invert().invert() == table
    assert check_round_trip(table, table.invert(), ["ax", "c"]) == []
    assert only(check_round_trip(table, table.invert(), ["ax", "bx"])).names == ("bx", "bx", "ax")
    assert repr(table) == r"RuleTable.make({re.compile('a(.)'): 'b\\1'}, inverse={re.compile('b(.)'): 'a\\1'})"


def test_reprs() -> None:
    assert RuleTable.make({"a.{x}?": "b.{x}"}).arguments() == "{'a.{x}?': 'b.{x}'}"
    assert RuleTable.make([("a", "b"), ("a", "c")]).arguments() == "[('a', 'b'), ('a', 'c')]"
    assert RuleTable.make(str.upper, str.lower).arguments() == "str.upper, inverse=str.lower"
    long: Any = {re.compile("a" * 300, re.MULTILINE): "b"}
    assert eval(repr(RuleTable.make(long))) == RuleTable.make(long)
    assert repr(RuleTable.make({re.compile("a"): str})) == "RuleTable.make({re.compile('a'): str})"


def test_rules_are_read_once() -> None:
    table = RuleTable.make({"a": "b"})
    assert RuleTable.make(table) is table
    assert RuleTable.make(table.rules) == table
    assert RuleTable.make(pair for pair in [("a", "b")]) == table
    kinds: list[Any] = [("a", "b"), (re.compile("c"), "d")]
    assert [type(rule) for rule in RuleTable.make(kinds).rules] == [PatternRule, RegexRule]
    assert [type(rule) for rule in RuleTable.make(str.upper).rules] == [FunctionRule]
