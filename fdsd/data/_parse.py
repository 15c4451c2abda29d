"""Reading the text of one pattern into pieces, and the domains of its holes.

Only syntax lives here: what a hole may hold (`Domain`), how holes are written, and the messages for text
that is no pattern. Matching names lives in ``_matcher``; the class that users meet lives in ``template``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from attrs import evolve, field, frozen

from fdsd.data.errors import BadPattern, Unsupported

LIMIT = 10**100
"""Integers in names stay below this, so that no name can make a conversion fail or crawl."""

_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_INTEGER = r"0|[1-9][0-9]{0,17}"
_PLAIN = re.compile(rf"({_NAME})(\.\.\.)?")
_RANGE = re.compile(rf"({_NAME}):({_INTEGER})\.\.({_INTEGER})")
_WORDS = re.compile(rf"({_NAME})((?:\|[^|]*)+)", re.DOTALL)
_AFFINE = re.compile(rf"(?:({_INTEGER})\*)?({_NAME})(?:([+-])({_INTEGER}))?")
_CANONICAL = re.compile(r"0|[1-9][0-9]{0,99}")
_FORMS = "{name}, {name...}, {name:0..31}, {name|word|word}, {i+8}, {i-8}, {2*i} and {2*i+1}"


@frozen
class Domain:
    """The values that a hole may take: words, integers from ``lo`` to ``hi``, one segment, or many."""

    many: bool = False
    integer: bool = False
    lo: int = 0
    hi: int = LIMIT - 1
    words: tuple[str, ...] | None = None
    is_bounded: bool = field(init=False, eq=False, repr=False)
    """Whether an integer needs more than a look at its digits."""

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "is_bounded", self.integer and (self.lo > 0 or self.hi < LIMIT - 1))

    def merge(self, other: Domain) -> Domain:
        """Give the values that both allow; `BadPattern` with the reason alone where there is none."""
        if self.many != other.many:
            raise BadPattern("it is written both with and without '...'; write it one way")
        integer = self.integer or other.integer
        words = self.words if other.words is None else other.words
        if self.words is not None and other.words is not None:
            words = tuple(word for word in self.words if word in other.words)
        merged = Domain(self.many, integer, max(self.lo, other.lo), min(self.hi, other.hi), words)
        if merged.words is not None:
            merged = evolve(merged, words=tuple(w for w in merged.words if not merged.misfit(w)))
        if merged.lo > merged.hi or merged.words == ():
            raise BadPattern("no value fits all of its uses; widen a range or correct the words")
        return merged

    def misfit(self, value: str) -> str:
        """Say why a value is outside, or nothing if it is inside."""
        if self.words is not None and value not in self.words:
            return f"{value!r} is not one of {', '.join(map(repr, self.words))}"
        if self.integer:
            if not _CANONICAL.fullmatch(value):
                return f"{value!r} is not an integer in canonical decimal"
            if not self.lo <= int(value) <= self.hi:
                bounds = f"{self.lo}..{self.hi}" if self.hi < LIMIT - 1 else f"{self.lo} and above"
                return f"{value} is outside {bounds}"
            return ""
        if self.words is not None:
            return ""
        segments = value.split(".")
        if not all(segments):
            return f"{value!r} has an empty segment" if "." in value else "it is empty"
        return f"{value!r} holds a '.'" if len(segments) > 1 and not self.many else ""


@frozen
class Hole:
    """One hole as written: its name, and for affine holes the value ``scale * name + shift``."""

    text: str
    name: str
    many: bool = False
    scale: int = 1
    shift: int = 0
    is_affine: bool = field(init=False, eq=False, repr=False)
    is_unnamed: bool = field(init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "is_affine", (self.scale, self.shift) != (1, 0))
        object.__setattr__(self, "is_unnamed", self.name == "_")

    def decode(self, text: str, domain: Domain) -> str | None:
        """Give the value of the name from the text in this place, or None where there is none.

        The text must be what the matchers cut out: canonical digits for an integer, one of the words, ...
        """
        if not (self.is_affine or domain.is_bounded):
            return text
        value, rest = divmod(int(text) - self.shift, self.scale)
        if rest or not domain.lo <= value <= domain.hi:
            return None
        if not self.is_affine:
            return text
        return str(value) if domain.words is None or str(value) in domain.words else None

    def encode(self, value: str) -> str:
        """Give the text in this place from a value that fits the domain."""
        return str(self.scale * int(value) + self.shift) if self.is_affine else value


@frozen
class Parsed:
    """A pattern read: literals and holes in turn, never two alike in a row."""

    pieces: tuple[str | Hole, ...]
    domains: Mapping[str, Domain]
    is_optional: bool


def parse(text: str, *, unnamed: bool) -> Parsed:
    """Read a pattern.

    Args:
        text: the pattern.
        unnamed: whether ``{_}`` and ``{_...}`` may stand in it.

    Raises:
        BadPattern: it is not well-formed; the message shows the piece and the remedy.
    """
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]  # users pass anything
        raise Unsupported(f"a pattern is a str, not {type(text).__name__}: {text!r}.")
    pieces: list[str | Hole] = []
    domains: dict[str, Domain] = {}
    literal, at, is_optional = "", 0, False
    while at < len(text):
        char = text[at]
        if char in "{}?" and text[at : at + 2] == 2 * char:
            literal, at = literal + char, at + 2
        elif char == "{":
            hole, domain, at = _read_hole(text, at, unnamed)
            if literal:
                pieces.append(literal)
            pieces.append(hole)
            literal = ""
            _refuse_adjacent(text, pieces)
            _add_domain(text, domains, hole, domain)
        elif char == "?" and at == len(text) - 1:
            is_optional, at = True, at + 1
        else:
            _refuse_char(text, at)
            literal, at = literal + char, at + 1
    if literal:
        pieces.append(literal)
    if not pieces:
        raise BadPattern(f"pattern {text!r}: it is empty, and no name is; write the FQN that it should match.")
    _check_whole_segments(text, pieces)
    return Parsed(tuple(pieces), domains, is_optional)


def _refuse_char(text: str, at: int) -> None:
    if text[at] == "}":
        raise BadPattern(f"pattern {text!r}: {text[: at + 1]!r} closes a hole that is not open; a literal is '}}}}'.")
    if text[at] == "?":
        raise BadPattern(
            f"pattern {text!r}: the '?' after {text[:at]!r} is not at the end; a literal '?' is '??', "
            "and an optional pattern ends in '?'."
        )
    if text.startswith("...", at):
        raise BadPattern(
            f"pattern {text!r}: '...' stands outside braces, after {text[:at]!r}; for whole segments write "
            "{rest...}, with a name of your choice."
        )


def _refuse_adjacent(text: str, pieces: list[str | Hole]) -> None:
    first, second = pieces[-2:] if len(pieces) > 1 else ("", "")
    if isinstance(first, Hole) and isinstance(second, Hole):
        raise BadPattern(
            f"pattern {text!r}: the holes {first.text} and {second.text} touch, so nothing says where the "
            "first ends; put a literal between them, or make them one."
        )


def _add_domain(text: str, domains: dict[str, Domain], hole: Hole, domain: Domain) -> None:
    if hole.is_unnamed:
        return
    try:
        domains[hole.name] = domains[hole.name].merge(domain) if hole.name in domains else domain
    except BadPattern as error:
        raise BadPattern(f"pattern {text!r}: hole {hole.name}, as {hole.text}: {error}.") from None


def _check_whole_segments(text: str, pieces: list[str | Hole]) -> None:
    for at, piece in enumerate(pieces):
        if isinstance(piece, str) or not piece.many:
            continue
        before = pieces[at - 1] if at else "."
        after = pieces[at + 1] if at + 1 < len(pieces) else "."
        if str(before)[-1] != "." or str(after)[0] != ".":
            raise BadPattern(
                f"pattern {text!r}: {piece.text} stands for whole segments, so a '.' or an end must be on "
                f"both sides of it; for a part of one segment write {{{piece.name}}}."
            )


def _read_hole(text: str, at: int, unnamed: bool) -> tuple[Hole, Domain, int]:
    end = text.find("}", at)
    inner = text[at + 1 : end]
    if end < 0 or "{" in inner:
        raise BadPattern(f"pattern {text!r}: the '{{' of {text[at:]!r} is never closed; a literal is '{{{{'.")
    written = text[at : end + 1]
    found = _read_plain(written, inner) or _read_range(written, inner) or _read_words(written, inner)
    found = found or _read_affine(written, inner)
    if found is None:
        raise BadPattern(f"pattern {text!r}: {written} is no hole{_guess(inner)}; holes are {_FORMS}.")
    hole, domain = found
    if isinstance(domain, str):
        raise BadPattern(f"pattern {text!r}: {written}: {domain}.")
    if hole.is_unnamed and not unnamed:
        raise BadPattern(
            f"pattern {text!r}: the unnamed hole {written} is for select and drop only; give it a name, as "
            f"in {'{rest...}' if hole.many else '{x}'}."
        )
    if hole.is_unnamed and written not in ("{_}", "{_...}"):
        raise BadPattern(f"pattern {text!r}: {written} is unnamed, so it takes no range, words or sum; name it.")
    return hole, domain, end + 1


_Found = tuple[Hole, "Domain | str"]


def _read_plain(written: str, inner: str) -> _Found | None:
    found = _PLAIN.fullmatch(inner)
    if found is None:
        return None
    many = found[2] is not None
    return Hole(written, found[1], many), Domain(many=many)


def _read_range(written: str, inner: str) -> _Found | None:
    found = _RANGE.fullmatch(inner)
    if found is None:
        return None
    lo, hi = int(found[2]), int(found[3])
    if lo > hi:
        return Hole(written, found[1]), f"the range is empty; both ends are included, so write {hi}..{lo}"
    return Hole(written, found[1]), Domain(integer=True, lo=lo, hi=hi)


def _read_words(written: str, inner: str) -> _Found | None:
    found = _WORDS.fullmatch(inner)
    if found is None:
        return None
    hole, words = Hole(written, found[1]), tuple(found[2][1:].split("|"))
    if "" in words:
        return hole, "a word is empty; holes match one character or more"
    if "?" in found[2]:
        return hole, "words cannot hold '?'; write one rule for each word"
    if len(set(words)) < len(words):
        return hole, "a word stands twice; write each once"
    return hole, Domain(words=words)


def _read_affine(written: str, inner: str) -> _Found | None:
    found = _AFFINE.fullmatch(inner)
    if found is None:
        return None
    scale = int(found[1] or 1)
    shift = int(found[4] or 0) * (-1 if found[3] == "-" else 1)
    if scale == 0:
        return Hole(written, found[2]), "a factor of 0 forgets the index; write 1 or more"
    # scale * i + shift >= 0, so i starts at the quotient rounded up
    return Hole(written, found[2], scale=scale, shift=shift), Domain(integer=True, lo=max(0, -(shift // scale)))


def _guess(inner: str) -> str:
    """Word what the writer may have meant."""
    if inner in ("", "*", "..."):
        return ": it has no name"
    if re.search(r"\s", inner) and (_AFFINE.fullmatch("".join(inner.split())) or _PLAIN.fullmatch(inner.strip())):
        return ", as no space may stand in it"
    if re.fullmatch(r"[0-9]+", inner):
        return ": a name starts with a letter; write a fixed index without braces"
    if found := re.fullmatch(rf"({_NAME}):([0-9]+)(?:-|:|\.\.\.|,)([0-9]+)", inner):
        return f": write the range as {{{found[1]}:{found[2]}..{found[3]}}}"
    if found := re.fullmatch(rf"({_NAME})\*([0-9]+)(.*)", inner):
        return f": write the factor first, {{{found[2]}*{found[1]}{found[3]}}}"
    if found := re.fullmatch(rf"([0-9]+)\+({_NAME})", inner):
        return f": write the name first, {{{found[2]}+{found[1]}}}"
    return ""
