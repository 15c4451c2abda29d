"""Matching and writing names by the pieces of a pattern, under given domains.

A matcher is first a regular expression that is a little too lax (it knows nothing of factors, and of one
index in several sums), whose first match is checked. Only where that check fails, the exact search walks the
pieces. Both try values in one order, so a first match of the lax one that passes is the first match of the
exact one. Nothing of rules, groups or error texts for syntax lives here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from attrs import frozen

from fdsd.data._parse import LIMIT, Domain, Hole
from fdsd.data.errors import BadPattern, Unsupported

_DIGITS = 120
"""What an integer below ``LIMIT``, times a factor, plus a shift, has at most."""

_MANY = re.compile(r"[^.]+(?=\.|\Z)")


@frozen
class Alternative:
    """A pattern as the text of a regular expression, its groups numbered from a given number on."""

    regex: str
    slots: tuple[tuple[Hole, int], ...]
    num_groups: int
    needs_check: bool
    is_unique: bool

    def bindings(self, found: re.Match[str], domains: Mapping[str, Domain]) -> dict[str, str] | None:
        """Read the values of a match, or None if sums, ranges or repeats do not agree."""
        bound: dict[str, str] = {}
        for hole, group in self.slots:
            value = hole.decode(found[group], domains[hole.name])
            if value is None or bound.setdefault(hole.name, value) != value:
                return None
        return bound


class Matcher:
    """Matches and writes the names of one pattern under given domains."""

    __slots__ = ("_alternative", "_regex", "domains", "literal", "pieces", "prefix", "suffix", "text")

    def __init__(self, text: str, pieces: Sequence[str | Hole], domains: Mapping[str, Domain]) -> None:
        first, last = pieces[0], pieces[-1]
        self.text = text
        self.pieces = tuple(pieces)
        self.domains = domains
        self.prefix = first if isinstance(first, str) else ""
        self.suffix = last if isinstance(last, str) else ""
        self.literal = self.prefix if len(pieces) == 1 and isinstance(first, str) else None
        self._alternative: Alternative | None = None
        self._regex: re.Pattern[str] | None = None

    def alternative(self, first: int) -> Alternative:
        """Give the lax regular expression, its groups numbered from ``first``."""
        slots: dict[tuple[str, int, int], tuple[Hole, int]] = {}
        parts: list[str] = []
        is_unique = True
        for at, piece in enumerate(self.pieces):
            if isinstance(piece, str):
                parts.append(re.escape(piece))
                continue
            key = (piece.name, piece.scale, piece.shift)
            if key in slots:
                parts.append(rf"(?:\{slots[key][1]})")
                continue
            after = self.pieces[at + 1] if at + 1 < len(self.pieces) else ""
            values, is_forced = _values(piece, self._domain(piece), str(after))
            is_unique &= is_forced
            if piece.is_unnamed:
                parts.append(f"(?:{values})")
            else:
                slots[key] = piece, first + len(slots)
                parts.append(f"({values})")
        holes = [hole for hole, _ in slots.values()]
        needs_check = len({hole.name for hole in holes}) < len(holes) or any(hole.is_affine for hole in holes)
        return Alternative("".join(parts), tuple(slots.values()), len(slots), needs_check, is_unique)

    def match(self, name: str) -> dict[str, str] | None:
        """Bind the holes so that the pattern is the whole name, shortest first from the left; or None."""
        if self.literal is not None:
            return {} if name == self.literal else None
        if self._regex is None or self._alternative is None:
            self._alternative = self.alternative(1)
            self._regex = re.compile(self._alternative.regex, re.DOTALL)
        found = self._regex.fullmatch(name)
        if found is None:
            return None
        return self.check(found, self._alternative)

    def check(self, found: re.Match[str], alternative: Alternative) -> dict[str, str] | None:
        """Bind the holes from the first match of the lax expression, or else by the exact search."""
        bound = alternative.bindings(found, self.domains)
        return self.search(found.string) if bound is None and not alternative.is_unique else bound

    def search(self, name: str) -> dict[str, str] | None:
        """Do what `match` does by walking the pieces, exactly, without the regular expression."""
        walks: list[Iterator[tuple[int, dict[str, str]]]] = [self._walk(0, 0, name, {})]
        while walks:
            step = next(walks[-1], None)
            if step is None:
                walks.pop()
                continue
            end, bound = step
            if len(walks) < len(self.pieces):
                walks.append(self._walk(len(walks), end, name, bound))
            elif end == len(name):
                return bound
        return None

    def find(self, names: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
        """Give the index of each name that matches, with its bindings, in order.

        The literal ends of the pattern rule most names out before the regular expression is tried.
        """
        prefix, suffix = self.prefix, self.suffix
        if self.literal is not None:
            index = -1
            with suppress(ValueError):  # there may be thousands of such patterns: ten times as fast as a loop
                while True:
                    index = names.index(self.literal, index + 1)
                    yield index, {}
            return
        for index, name in enumerate(names):
            if name.endswith(suffix) and name.startswith(prefix):
                bound = self.match(name)
                if bound is not None:
                    yield index, bound

    def format(self, bindings: Mapping[str, str]) -> str:
        """Write the name that these values stand for.

        Raises:
            BadPattern: a value is absent or outside its domain, or a hole has no name.
        """
        parts: list[str] = []
        for piece in self.pieces:
            if isinstance(piece, str):
                parts.append(piece)
                continue
            if piece.is_unnamed:
                raise BadPattern(f"pattern {self.text!r}: the unnamed hole {piece.text} can be matched, not written.")
            if piece.name not in bindings:
                raise BadPattern(f"pattern {self.text!r}: no value for {piece.text}; give {piece.name}.")
            value = bindings[piece.name]
            if not isinstance(value, str):  # pyright: ignore[reportUnnecessaryIsInstance]  # users pass integers
                raise Unsupported(f"pattern {self.text!r}: {piece.name} = {value!r}: give the value as a str.")
            reason = self.domains[piece.name].misfit(value)
            if reason:
                sums = "" if not piece.is_affine else f", as {piece.text} must be an integer from 0 on"
                raise BadPattern(f"pattern {self.text!r}: {piece.name} = {value!r} does not fit: {reason}{sums}.")
            parts.append(piece.encode(value))
        return "".join(parts)

    def _domain(self, hole: Hole) -> Domain:
        return Domain(many=hole.many) if hole.is_unnamed else self.domains[hole.name]

    def _walk(self, at: int, start: int, name: str, bound: dict[str, str]) -> Iterator[tuple[int, dict[str, str]]]:
        piece = self.pieces[at]
        if isinstance(piece, str):
            if name.startswith(piece, start):
                yield start + len(piece), bound
        elif not piece.is_unnamed and piece.name in bound:
            text = piece.encode(bound[piece.name])
            if name.startswith(text, start):
                yield start + len(text), bound
        else:
            domain = self._domain(piece)
            for end in _ends(piece, domain, name, start):
                value = piece.decode(name[start:end], domain)
                if value is not None:
                    yield end, bound if piece.is_unnamed else {**bound, piece.name: value}


def _values(hole: Hole, domain: Domain, after: str) -> tuple[str, bool]:
    """Give the regular expression of a hole's text, shortest first, and whether what follows forces its end.

    Where it does, longest first is the same match, and faster.
    """
    if domain.words is not None and not hole.is_affine:
        return "|".join(re.escape(word) for word in sorted(domain.words, key=len)), False
    if domain.integer:
        is_forced = not after or not after[0].isdigit()
        lo, hi = (hole.scale * end + hole.shift for end in (domain.lo, domain.hi))
        is_open = domain.hi == LIMIT - 1
        return _integers(lo, None if is_open else hi, "" if is_forced else "?"), is_forced
    if hole.many:
        return r"[^.]+(?:\.[^.]+)*" + ("?" if after else ""), not after
    is_forced = not after or after[0] == "."
    return "[^.]+" if is_forced else "[^.]+?", is_forced


def _integers(lo: int, hi: int | None, lazy: str) -> str:
    """Give the regular expression of the canonical decimals from ``lo`` to ``hi``, shortest first.

    >>> _integers(0, 31, "")
    '[0-9]|[1-2][0-9]{1}|3[0-1]'
    """
    digits = len(str(lo))
    last = 10**digits - 1 if hi is None else hi
    parts: list[str] = []
    while lo <= last:
        zeros = 0  # the numbers from lo on that share all but their last `zeros` digits
        while lo and lo % 10 ** (zeros + 1) == 0 and lo + 10 ** (zeros + 1) - 1 <= last:
            zeros += 1
        head, digit = divmod(lo // 10**zeros, 10)
        count = min(10 - digit, (last - lo + 1) // 10**zeros)
        parts.append(f"{head or ''}[{digit}-{digit + count - 1}]" + (f"[0-9]{{{zeros}}}" if zeros else ""))
        lo += count * 10**zeros
    if hi is None:
        parts.append(f"[1-9][0-9]{{{digits},{_DIGITS - 1}}}{lazy}")
    return "|".join(parts)


def _ends(hole: Hole, domain: Domain, name: str, start: int) -> Iterator[int]:
    """Give where a hole that starts here may end, nearest first."""
    if domain.words is not None and not hole.is_affine:
        for word in sorted(domain.words, key=len):
            if name.startswith(word, start):
                yield start + len(word)
    elif domain.integer:
        for end in range(start + 1, min(len(name), start + _DIGITS) + 1):
            if not "0" <= name[end - 1] <= "9":
                return
            yield end
            if name[start] == "0":
                return
    elif hole.many:
        at = start
        while found := _MANY.match(name, at):
            yield found.end()
            at = found.end() + 1
    else:
        stop = name.find(".", start)
        yield from range(start + 1, (len(name) if stop < 0 else stop) + 1)
