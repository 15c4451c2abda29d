"""Patterns: every line of the grammar, the order in which holes match, and messages for bad text."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from attrs import frozen
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from fdsd.data._matcher import _integers
from fdsd.data._parse import LIMIT
from fdsd.data.errors import BadPattern, FdsdError, Unsupported
from fdsd.data.template import Template, as_template, bind_together, escape

# ------------------------------------------------- the oracle: the grammar read word for word, by brute force


@frozen
class P:
    """A piece of a pattern: a literal, or a hole of one of the kinds of the grammar."""

    kind: str
    name: str = ""
    text: str = ""
    lo: int = 0
    hi: int = 0
    words: tuple[str, ...] = ()
    scale: int = 1
    shift: int = 0

    def write(self) -> str:
        affine = f"{self.scale}*" if self.scale != 1 else ""
        affine += self.name + (f"{self.shift:+d}" if self.shift or self.scale == 1 else "")
        return {
            "literal": self.text.replace("{", "{{").replace("}", "}}").replace("?", "??"),
            "one": f"{{{self.name}}}",
            "many": f"{{{self.name}...}}",
            "range": f"{{{self.name}:{self.lo}..{self.hi}}}",
            "words": f"{{{'|'.join((self.name, *self.words))}}}",
            "affine": f"{{{affine}}}",
        }[self.kind]


def write(pieces: list[P]) -> str:
    return "".join(piece.write() for piece in pieces)


def value_of(piece: P, text: str, rules: list[P]) -> str | None:
    """The value that a name would have if this text stood in this hole, or None."""
    mine = [rule for rule in rules if rule.name == piece.name]
    value = text
    if any(rule.kind in ("range", "affine") for rule in mine):
        if not re.fullmatch(r"0|[1-9][0-9]*", text):
            return None
        if piece.kind == "affine":
            if int(text) < piece.shift or (int(text) - piece.shift) % piece.scale:
                return None
            value = str((int(text) - piece.shift) // piece.scale)
    for rule in mine:
        if rule.kind == "range" and not rule.lo <= int(value) <= rule.hi:
            return None
        if rule.kind == "words" and value not in rule.words:
            return None
        if rule.kind == "affine" and rule.scale * int(value) + rule.shift < 0:
            return None
    if not any(rule.kind in ("range", "affine", "words") for rule in mine):
        segments = text.split(".")
        if not all(segments) or (piece.kind != "many" and len(segments) > 1):
            return None
    return value


def oracle(pieces: list[P], name: str, rules: list[P] | None = None) -> dict[str, str] | None:
    """The first way to read the name: holes shortest first, from the left, going back if the rest fails."""

    def walk(at: int, start: int, bound: dict[str, str]) -> Iterator[dict[str, str]]:
        if at == len(pieces):
            if start == len(name):
                yield bound
            return
        piece = pieces[at]
        if piece.kind == "literal":
            if name.startswith(piece.text, start):
                yield from walk(at + 1, start + len(piece.text), bound)
            return
        for end in range(start + 1, len(name) + 1):
            value = value_of(piece, name[start:end], pieces if rules is None else rules)
            if value is not None and bound.get(piece.name, value) == value:
                yield from walk(at + 1, end, {**bound, piece.name: value})

    return next(walk(0, 0, {}), None)


literals = st.one_of(st.sampled_from("_10"), st.text("ab._10{?}", min_size=1, max_size=3))
kinds = {"i": ("one", "range", "affine"), "x": ("one", "words"), "r": ("many",)}


@st.composite
def holes(draw: st.DrawFn) -> P:
    name = draw(st.sampled_from("iijjxyr"))
    kind = draw(st.sampled_from(kinds[{"j": "i", "y": "x"}.get(name, name)]))
    lo = draw(st.integers(0, 12))
    words = draw(st.lists(st.text("ab.10", min_size=1, max_size=2), min_size=1, max_size=3, unique=True))
    shift = draw(st.integers(-12, 12))
    return P(kind, name, "", lo, lo + draw(st.integers(0, 100)), tuple(words), draw(st.integers(1, 3)), shift)


@st.composite
def patterns(draw: st.DrawFn) -> list[P]:
    pieces: list[P] = []
    for hole in draw(st.lists(holes(), max_size=4)):
        text = draw(literals) if pieces or draw(st.booleans()) else ""
        if hole.kind == "many" and text:
            text += "."
        if pieces and pieces[-1].kind == "many":
            text = "." + text
        if text:
            pieces.append(P("literal", text=text))
        pieces.append(hole)
    if not pieces or draw(st.booleans()):
        text = "." if pieces and pieces[-1].kind == "many" else ""
        pieces.append(P("literal", text=text + draw(literals)))
    assume("..." not in write([piece for piece in pieces if piece.kind == "literal"]))
    return pieces


def filled(draw: st.DrawFn, pieces: list[P], values: dict[str, str]) -> str:
    """A name that looks like the pattern, and often matches it."""
    text = ""
    for piece in pieces:
        if piece.kind == "literal":
            text += piece.text
            continue
        number = piece.kind in ("range", "affine") or draw(st.booleans())
        fresh = str(draw(st.integers(0, 40))) if number else draw(st.text("ab_1", min_size=1, max_size=2))
        value = values.setdefault(piece.name, draw(st.sampled_from(piece.words)) if piece.kind == "words" else fresh)
        is_sum = piece.kind == "affine" and value.isdecimal()
        text += str(piece.scale * int(value) + piece.shift) if is_sum else value
    return text


@st.composite
def patterns_and_names(draw: st.DrawFn) -> tuple[list[P], str]:
    pieces = draw(patterns())
    if draw(st.integers(0, 3)) == 0:
        return pieces, draw(st.text("ab._10{?}", max_size=12))
    return pieces, filled(draw, pieces, {})


def error_of(call: Callable[..., object], *args: object) -> str | None:
    try:
        call(*args)
    except BadPattern as error:
        return str(error)
    return None


def read(pieces: list[P]) -> Template:
    message = error_of(Template, write(pieces))
    assume(message is None or "no value fits" not in message)
    return Template(write(pieces))


@settings(max_examples=500)
@given(patterns_and_names())
@example(([P("one", "x"), P("literal", text="1"), P("range", "i", lo=0, hi=9)], "a114"))
@example(([P("affine", "i", scale=2), P("literal", text="0"), P("affine", "i", scale=1, shift=1)], "40203"))
@example(([P("one", "i"), P("literal", text="1"), P("affine", "i", scale=1, shift=1)], "112113"))
@example(([P("words", "x", words=("ab", "a")), P("literal", text="b"), P("one", "y")], "abbb"))
def test_matches_what_the_grammar_says(case: tuple[list[P], str]) -> None:
    pieces, name = case
    template = read(pieces)
    wanted = oracle(pieces, name)
    assert template.match(name) == wanted
    assert template.matcher.search(name) == wanted
    assert list(template.matcher.find(["", name, "a", name])) == [
        (at, bound) for at, other in enumerate(["", name, "a", name]) if (bound := oracle(pieces, other)) is not None
    ]


@given(patterns_and_names())
def test_format_undoes_match(case: tuple[list[P], str]) -> None:
    pieces, name = case
    template = read(pieces)
    bound = template.match(name)
    if bound is not None:
        assert tuple(bound) == template.holes
        assert template.format(bound) == name


@given(st.data())
def test_match_reads_back_what_format_writes(data: st.DataObject) -> None:
    pieces = data.draw(patterns())
    template = read(pieces)
    values = data.draw(st.fixed_dictionaries({hole: st.text("ab.01", max_size=3) for hole in template.holes}))
    message = error_of(template.format, values)
    if message is not None:
        assert any(repr(value) in message for value in values.values())
        return
    name = template.format(values)
    bound = template.match(name)
    assert bound is not None
    assert template.format(bound) == name


@given(st.data())
def test_bound_together_patterns_are_one_relation(data: st.DataObject) -> None:
    pieces = data.draw(patterns())
    names = sorted({piece.name for piece in pieces if piece.kind != "literal"})
    others = [P("literal", text="t")]
    for name in names:
        same = data.draw(holes().filter(lambda hole, name=name: hole.name == name or name in "ry"))
        others += [
            same if same.name == name else P("many" if name == "r" else "one", name),
            P("literal", text=".."),
        ]
    others = [
        P("literal", text=".") if piece.text == ".." else P("literal", text="t.") if piece.text == "t" else piece
        for piece in others
    ]
    name = filled(data.draw, pieces, {})
    template, other = read(pieces), read(others)
    message = error_of(bind_together, template, other)
    if message is not None:
        assert "no value fits" in message
        return
    matcher, writer = bind_together(template, other)
    wanted = oracle(pieces, name, pieces + others)
    assert matcher.match(name) == wanted
    assert matcher.search(name) == wanted
    if wanted is not None:
        assert oracle(others, writer.format(wanted), pieces + others) is not None
        assert matcher.format(wanted) == name


@given(st.text("ab.{}?|:", min_size=1, max_size=8).filter(lambda name: "..." not in name))
def test_a_literal_matches_its_own_name_only(name: str) -> None:
    template = Template.literal(name)
    assert template.is_literal
    assert not template.optional
    assert template.match(name) == {}
    assert template.format({}) == name
    assert template.match(name + "a") is None
    assert template.text == escape(name)


@given(st.text("ab.{}?*|:_+-0123456789", max_size=10), st.booleans())
def test_any_text_is_a_pattern_or_a_clear_error(text: str, unnamed: bool) -> None:
    message = error_of(Template, text, unnamed)
    if message is not None:
        assert repr(text) in message
        assert message.endswith(".")
        return
    template = Template(text, unnamed=unnamed)
    assert eval(repr(template)) == template
    assert pickle.loads(pickle.dumps(template)) == template
    assert template.as_optional().optional
    assert not template.unoptional().optional


@given(st.integers(0, 2000), st.integers(0, 2000), st.integers(0, 3000))
def test_an_expression_of_a_range_matches_exactly_it(lo: int, size: int, number: int) -> None:
    closed = re.compile(_integers(lo, lo + size, ""))
    assert bool(closed.fullmatch(str(number))) == (lo <= number <= lo + size)
    assert closed.fullmatch(f"0{number}") is None
    for lazy in ("", "?"):
        assert bool(re.fullmatch(_integers(lo, None, lazy), str(number))) == (lo <= number)


# --------------------------------------------------------------------------------------------------- examples


@pytest.mark.parametrize(
    "text, name, bound",
    [
        ("lm_head.weight", "lm_head.weight", {}),
        ("lm_head.weight", "lm_head_weight", None),
        ("{x}", "a", {"x": "a"}),
        ("{x}", "a.b", None),
        ("{x}", "", None),
        ("{x}", "a\nb", {"x": "a\nb"}),
        ("{a}_{b}", "x_y_z", {"a": "x", "b": "y_z"}),
        ("{a}_{b}", "_x", None),
        ("{a}_{b}", "__x", {"a": "_", "b": "x"}),
        ("{a}.{a}", "x.x", {"a": "x"}),
        ("{a}.{a}", "x.y", None),
        ("{a}x{a}", "axxaxx", None),
        ("{a}x{a}", "axxax", {"a": "ax"}),
        ("{r...}", "a.b.c", {"r": "a.b.c"}),
        ("{r...}", "a..b", None),
        ("{r...}.w", "a.b.w.w", {"r": "a.b.w"}),
        ("{r...}.w", ".w", None),
        ("{r...}.{s...}", "a.b.c", {"r": "a", "s": "b.c"}),
        ("m.{r...}", "m.", None),
        ("m.{r...}", "m", None),
        ("m.{r...}.m.{r...}", "m.a.m.m.a.m", {"r": "a.m"}),
        ("l.{i:0..31}", "l.31", {"i": "31"}),
        ("l.{i:0..31}", "l.32", None),
        ("l.{i:0..31}", "l.07", None),
        ("l.{i:0..31}", "l.x", None),
        ("l.{i:0..31}", "l.\u0663", None),
        ("l.{i:5..5}", "l.5", {"i": "5"}),
        ("l.{i:0..3}.{i}", "l.2.2", {"i": "2"}),
        ("l.{i}.{i:0..3}", "l.7.7", None),
        ("{x|q|k}_proj", "k_proj", {"x": "k"}),
        ("{x|q|k}_proj", "v_proj", None),
        ("{m|self_attn.q|mlp.up}.w", "mlp.up.w", {"m": "mlp.up"}),
        ("{x|ab|a}b", "abb", {"x": "ab"}),
        ("{x|ab|a}b{y}", "abbc", {"x": "a", "y": "bc"}),
        ("{x|ab|a}{{", "a{", {"x": "a"}),
        ("l.{i+8}", "l.8", {"i": "0"}),
        ("l.{i+8}", "l.7", None),
        ("l.{i-8}", "l.0", {"i": "8"}),
        ("l.{2*i}", "l.6", {"i": "3"}),
        ("l.{2*i}", "l.7", None),
        ("l.{2*i+1}", "l.7", {"i": "3"}),
        ("l.{2*i+1}", "l.0", None),
        ("l.{2*i-1}", "l.1", {"i": "1"}),
        ("{x}_{2*i}_{y}", "a_3_4_b", {"x": "a_3", "i": "2", "y": "b"}),
        ("{i+1}0{y}", "1200a", {"i": "11", "y": "0a"}),
        ("{i:5..999}0{y}", "1200a", {"i": "12", "y": "0a"}),
        ("l.{i}.{i+1}", "l.3.4", {"i": "3"}),
        ("l.{i}.{i+1}", "l.03.4", None),
        ("l.{i}.{i+1}", "l.3.5", None),
        ("l.{i+1}", "l." + "9" * 6000, None),
        ("a{{b}}??", "a{b}?", {}),
        ("a??", "a?", {}),
        ("a???", "a?", {}),
        ("a.*", "a.bc", None),
        ("{{{i}}}", "{x}", {"i": "x"}),
    ],
)
def test_match(text: str, name: str, bound: dict[str, str] | None) -> None:
    assert Template(text).match(name) == bound


@pytest.mark.parametrize(
    "text, name, is_match",
    [
        ("{_}", "a", True),
        ("{_}", "a.b", False),
        ("{_...}", "a.b", True),
        ("{_}.{_}", "a.b", True),  # unnamed holes are independent
        ("{_...}.bias", "a.b.bias", True),
        ("{_...}.bias", "bias", False),
        ("l.{i}.{_...}.{i}", "l.3.a.b.3", True),
        ("l.{i}.{_...}.{i}", "l.3.a.b.4", False),
    ],
)
def test_unnamed_holes(text: str, name: str, is_match: bool) -> None:
    selector = Template.selector(text)
    assert (selector.match(name) is not None) == is_match
    assert "_" not in selector.holes
    assert repr(selector) == f"Template.selector({text!r})"
    with pytest.raises(BadPattern, match=r"for select and drop only; give it a name"):
        Template(text)
    with pytest.raises(BadPattern, match="can be matched, not written"):
        selector.format({"i": "3"})


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "it is empty"),
        ("?", "it is empty"),
        ("a?b", "the '?' after 'a' is not at the end"),
        ("a?.{x}?", "the '?' after 'a' is not at the end"),
        ("a...b", "'...' stands outside braces, after 'a'; for whole segments write {rest...}"),
        ("...", "'...' stands outside braces"),
        ("{a}{b}", "the holes {a} and {b} touch"),
        ("{a}{b...}", "the holes {a} and {b...} touch"),
        ("x{r...}", "a '.' or an end must be on both sides of it; for a part of one segment write {r}"),
        ("{r...}x", "a '.' or an end must be on both sides of it"),
        ("a{b", "the '{' of '{b' is never closed; a literal is '{{'"),
        ("a{b{c}", "is never closed"),
        ("a}b", "closes a hole that is not open; a literal is '}}'"),
        ("{}", "it has no name"),
        ("{...}", "it has no name"),
        ("{*}", "it has no name"),
        ("{3}", "write a fixed index without braces"),
        ("{i + 8}", "no space may stand in it"),
        ("{8+i}", "write the name first, {i+8}"),
        ("{i*2+1}", "write the factor first, {2*i+1}"),
        ("{0*i}", "a factor of 0 forgets the index"),
        ("{i:0-31}", "write the range as {i:0..31}"),
        ("{i:0...31}", "write the range as {i:0..31}"),
        ("{i:3..1}", "the range is empty; both ends are included, so write 1..3"),
        ("{i:00..31}", "holes are {name}"),
        ("{i:-1..3}", "holes are {name}"),
        ("{i:0..9999999999999999999}", "holes are {name}"),
        ("{x|a|}", "a word is empty"),
        ("{x|}", "a word is empty"),
        ("{x|a|a}", "a word stands twice"),
        ("{x|a?}", "words cannot hold '?'"),
        ("{x|a}.{x|b}", "no value fits all of its uses"),
        ("{i:0..3}.{i:7..9}", "no value fits all of its uses"),
        ("{i:0..3}.{i-5}", "no value fits all of its uses"),
        ("{x|a|b}.{x+1}", "no value fits all of its uses"),
        ("{r...}.{r}", "written both with and without '...'"),
        ("{x.y}", "holes are {name}"),
        ("{_}", "for select and drop only"),
        ("{_+1}", "for select and drop only"),
    ],
)
def test_bad_patterns(text: str, message: str) -> None:
    with pytest.raises(BadPattern) as caught:
        Template(text)
    assert message in str(caught.value)
    assert f"pattern {text!r}: " in str(caught.value)
    assert isinstance(caught.value, FdsdError)
    assert isinstance(caught.value, ValueError)


def test_an_unnamed_hole_takes_no_range() -> None:
    with pytest.raises(BadPattern, match="is unnamed, so it takes no range, words or sum; name it"):
        Template.selector("{_:0..3}")


@pytest.mark.parametrize(
    "text, values, message",
    [
        ("{i}", {}, "no value for {i}; give i"),
        ("{i}", {"i": ""}, "it is empty"),
        ("{i}", {"i": "a.b"}, "holds a '.'"),
        ("a.{r...}", {"r": "a..b"}, "has an empty segment"),
        ("{i:0..3}", {"i": "4"}, "4 is outside 0..3"),
        ("{i:0..3}", {"i": "03"}, "not an integer in canonical decimal"),
        ("{i-8}", {"i": "7"}, "7 is outside 8 and above, as {i-8} must be an integer from 0 on"),
        ("{i+8}", {"i": "x"}, "not an integer in canonical decimal"),
        ("{i}.{i+1}", {"i": "-1"}, "not an integer in canonical decimal"),
        ("{i+1}", {"i": str(LIMIT)}, "not an integer in canonical decimal"),
        ("{x|a|b}", {"x": "c"}, "'c' is not one of 'a', 'b'"),
    ],
)
def test_values_that_do_not_fit(text: str, values: dict[str, str], message: str) -> None:
    with pytest.raises(BadPattern) as caught:
        Template(text).format(values)
    assert message in str(caught.value)
    assert repr(text) in str(caught.value)


def test_wrong_types() -> None:
    wrong: Any = 3
    with pytest.raises(Unsupported, match="a pattern is a str, not int: 3"):
        Template(wrong)
    with pytest.raises(Unsupported, match="i = 3: give the value as a str"):
        Template("{i}").format({"i": wrong})


def test_large_integers() -> None:
    assert Template("{1000*i+7}").format({"i": str(LIMIT - 1)}) == str(1000 * (LIMIT - 1) + 7)
    assert Template("{1000*i+7}").match(str(1000 * (LIMIT - 1) + 7)) == {"i": str(LIMIT - 1)}
    assert Template("{i+1}").match(str(LIMIT + 1)) is None
    assert Template("{i+1}").matcher.search("9" * 6000) is None


def test_a_template_is_a_value() -> None:
    template = Template("l.{2*i}.{x|q|k}.{i}.{r...}?")
    assert template.holes == ("i", "x", "r")
    assert template.many == {"r"}
    assert template.optional
    assert template.unoptional() == Template("l.{2*i}.{x|q|k}.{i}.{r...}")
    plain = template.unoptional()
    assert plain.unoptional() is plain
    assert template.unoptional().as_optional() == template
    assert template.as_optional() is template
    assert {template: 1}[Template(template.text)] == 1
    assert template != Template("l")
    assert str(template) == template.text
    assert repr(template) == "Template('l.{2*i}.{x|q|k}.{i}.{r...}?')"
    assert pickle.loads(pickle.dumps(template)).match("l.4.q.2.a.b") == {"i": "2", "x": "q", "r": "a.b"}
    assert as_template(template) is template
    assert as_template("a") == Template("a")
    frozen_template: Any = template
    with pytest.raises(AttributeError):
        frozen_template.text = "b"


def test_names_that_no_pattern_can_say() -> None:
    with pytest.raises(BadPattern, match="outside braces"):
        Template.literal("a...b")
    with pytest.raises(BadPattern, match="empty"):
        Template.literal("")


def test_a_long_pattern_neither_recurses_nor_crawls() -> None:
    text = ".".join(f"{{x{k}}}" for k in range(3000))
    name = ".".join(f"n{k}" for k in range(3000))
    template = Template(text)
    assert template.match(name) == {f"x{k}": f"n{k}" for k in range(3000)}
    short = ".".join(f"{{x{k}}}" for k in range(1500))
    assert Template(short).matcher.search(".".join("n" for _ in range(1500))) is not None


def test_conflicting_domains_name_both_patterns() -> None:
    with pytest.raises(BadPattern, match=r"patterns 'a.\{i:0..3\}' and 'b.\{i:5..9\}': hole i: no value fits"):
        bind_together(Template("a.{i:0..3}"), Template("b.{i:5..9}"))
