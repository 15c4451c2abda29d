"""What all ranks have to agree on before anything travels: which tensors there are, and how.

Equal statements are recognised by a digest, and nothing else travels; else the union of all is formed, the same on
every rank. What is planned from it is ``wirings``' business.
"""

from __future__ import annotations

import hashlib
import pickle
from array import array
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from attrs import define, evolve, field, frozen

from fdsd.algebra.ops.leaves import Origin
from fdsd.data.errors import RankDisagreement, Unsupported, add_note, listing
from fdsd.data.protocols import World
from fdsd.data.ties import tie_key
from fdsd.engine.asking import ask, number_for, settle_number, told_ranks
from fdsd.engine.canonical import canonical
from fdsd.engine.failures import failure_of, raise_if_failed, text_of
from fdsd.engine.overwriting import placement_of
from fdsd.engine.request import Request
from fdsd.layout.expression import Expression, expression_of
from fdsd.layout.wants import Target

__all__ = ["Agreed", "Key", "Stated", "Statement", "agree", "least", "state"]


class Key(NamedTuple):
    """What is to be known of a request to plan it; equal keys share a plan.

    Attributes:
        expression: The structure of the tensor; ``None`` if other ranks know it.
        placements: For each source tensor how it lies; ``None``: whole, on each rank that states it.
        target: Where the tensor is wanted.
        everyone: Whether ranks that do not state it want it too, if the target is ``None``.
        dtype: The dtype of the result; ``None``: that of the expression.
    """

    expression: Expression | None
    placements: tuple[Target, ...]
    target: Target
    everyone: bool
    dtype: torch.dtype | None


@define
class Statement:
    """What one rank knows of and wants.

    Attributes:
        names: The tensors, in order.
        kinds: The key of each, by its place among ``keys``.
        leaders: The name that each is tied to, by its place: its own, if it is to none before it.
        keys: The keys that differ.
        origins: For each name the source tensors by number.
    """

    names: list[str] = field(factory=list)
    kinds: array[int] = field(factory=lambda: array("q"))
    leaders: array[int] = field(factory=lambda: array("q"))
    keys: list[Key] = field(factory=list)
    origins: list[Sequence[Origin]] = field(factory=list)

    def digests(self) -> list[bytes]:
        """Give for each key what is equal for equal ones of other ranks."""
        return [_digest(canonical(key)) for key in self.keys]

    def digest(self, keys: Iterable[bytes]) -> bytes:
        """Give what is equal for ranks that state the same.

        Args:
            keys: The digests of the keys.
        """
        made = hashlib.sha256()
        for part in ("\0".join(self.names).encode(), self.kinds.tobytes(), self.leaders.tobytes()):
            made.update(len(part).to_bytes(8, "little") + part)
        for key in keys:
            made.update(key)
        return made.digest()

    def pack(self, places: Iterable[int]) -> bytes:
        """Write keys, by their places, for other ranks.

        Raises:
            Unsupported: Functions of the user cannot be pickled; the message names the tensors.
        """
        packed: dict[int, bytes] = {}
        odd: dict[int, Exception] = {}
        for place in places:
            try:
                packed[place] = pickle.dumps(self.keys[place])
            except Exception as error:  # whatever pickle raises, and there is much
                odd[place] = error
        if odd:
            names = [name for name, kind in zip(self.names, self.kinds, strict=True) if kind in odd]
            first = next(iter(odd.values()))
            raise Unsupported(
                f"other ranks state nothing, or something else, of {listing(names)}, so expressions have to travel, "
                f"and functions in them cannot be pickled ({type(first).__name__}: {text_of(first)}). Define them at "
                "the top of a module."
            ) from first
        return pickle.dumps(packed)


def state(requests: Mapping[str, Request], rank: int) -> Statement:
    """Say what this rank knows of and wants.

    Args:
        requests: The requests, by FQN.
        rank: This rank.

    Raises:
        FdsdError: A request does not fit together; the message names the tensor.
    """
    made = Statement()
    stating = _Stating(made, rank)
    leaders: dict[Hashable, int] = {}
    given = [*requests.values()]
    kinds: list[int] = []
    firsts: list[int] = []
    for number, (name, request) in enumerate(requests.items()):
        node = request.node
        try:
            place = stating.place_of(request)
        except Exception as error:
            add_note(error, f"of {name!r}")
            raise
        first = leaders.setdefault((name if node is None else id(node), place), number)
        firsts.append(first if first == number or _same_memory(given[first].out, request.out) else number)
        kinds.append(place)
    made.names.extend(requests)
    made.kinds.extend(kinds)
    made.leaders.extend(firsts)
    return made


class _Stating:
    """Sorts requests by their keys.

    Thousands of requests have few keys, and share the specs and layouts that they are made of. So they are told apart
    by identity first; what was seen is kept, so that nothing else gets the identity of what is gone.
    """

    def __init__(self, made: Statement, rank: int) -> None:
        self._made = made
        self._rank = rank
        self._places: dict[Key, int] = {}
        self._seen: dict[Hashable, int] = {}
        self._checked: set[Hashable] = set()
        self._alive: list[object] = []

    def place_of(self, request: Request) -> int:
        """Give the place of a request's key among all keys, and note its source tensors."""
        node, out = request.node, request.out
        if node is None or not isinstance(node.op, Origin):
            return self._place_of_new(request)
        op = node.op
        spec, placement, target = op.spec, placement_of(op), request.target
        shape, dtype, is_meta = (None, request.dtype, False) if out is None else (out.shape, out.dtype, out.is_meta)
        seen = id(spec), id(placement), id(target), request.everyone, shape, dtype, is_meta
        place = self._seen.get(seen)
        if place is not None:
            self._made.origins.append((op,))
            return place
        self._alive.append((spec, placement, target))
        place = self._seen[seen] = self._place_of_new(request)
        return place

    def _place_of_new(self, request: Request) -> int:
        made, out = self._made, request.out
        expression, origins = (None, ()) if request.node is None else expression_of(request.node)
        placements = tuple([placement_of(origin) for origin in origins])
        key = Key(expression, placements, request.target, request.everyone, request.result_dtype)
        if (shape := (key, None if out is None else out.shape, out is not None and out.is_meta)) not in self._checked:
            request.check(self._rank)
            self._checked.add(shape)
        place = self._places.setdefault(key, len(self._places))
        if place == len(made.keys):
            made.keys.append(key)
        made.origins.append(origins)
        return place


def _same_memory(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is b:
        return True
    return a is not None and b is not None and tie_key(a.detach()) == tie_key(b.detach())


Stated = tuple[tuple[Key, tuple[int, ...]], ...]
"""The keys that ranks state of one tensor, each with the ranks that do."""


@frozen
class Agreed:
    """What all ranks agree on.

    Attributes:
        names: All tensors, in one order.
        stated: What differs among what is stated of them.
        kinds: What is stated of each, by its place among ``stated``.
        leaders: The name that each is tied to, by its place; its own, if it is to none before it.
        mine: For each name its place in this rank's statement; -1 if this rank does not know it.
        budget: The smallest that any rank gives; ``None`` if none has a bound.
        number: What tells this delivery from all others of these ranks.
    """

    names: tuple[str, ...]
    stated: tuple[Stated, ...]
    kinds: array[int]
    leaders: array[int]
    mine: array[int]
    budget: int | None = None
    number: int = 0


def agree(
    statement: Statement | None,
    error: BaseException | None,
    world: World,
    *,
    asked: str = "a delivery",
    budget: int | None = None,
) -> Agreed:
    """Compare what all ranks state, and form the union. Collective.

    Args:
        statement: What this rank states; ``None`` if there is an error.
        error: What went wrong on this rank before.
        world: The ranks.
        asked: What is asked for, which has to be the same on all ranks.
        budget: The bytes that this rank can have under way.

    Raises:
        FdsdError: The same on all ranks: one of them failed before.
        RankDisagreement: The ranks ask for different things, or state different expressions of one name, or one is
            missing where it is held.
        Unsupported: Expressions have to travel, and a function in one cannot be pickled.
    """
    keys, digest = list[bytes](), b""
    if error is None and statement is not None:
        try:
            keys = statement.digests()
            digest = statement.digest(keys)
        except Exception as found:  # told to all
            error = found
    said = digest, budget, number_for(world), None if error is None else failure_of(error)
    answers = ask(world, asked, said, error)
    raise_if_failed([failure for *_, failure in answers], world.ranks, error)
    assert statement is not None
    number = max(number for _, _, number, _ in answers)
    settle_number(world, number)
    common = least([budget for _, budget, _, _ in answers])
    if all(other == digest for other, *_ in answers):
        stated = tuple([((key, tuple(world.ranks)),) for key in statement.keys])
        order = array("q", range(len(statement.names)))
        return Agreed(
            tuple(statement.names), stated, statement.kinds, statement.leaders, order, budget=common, number=number
        )
    return evolve(_Union(statement, keys, world, asked).agreed(statement), budget=common, number=number)


def least(budgets: Iterable[int | None]) -> int | None:
    """Give the smallest budget; ``None`` is without a bound.

    >>> least([None, 5, 7]), least([None])
    (5, None)
    """
    return min([budget for budget in budgets if budget is not None], default=None)


class _Outline(NamedTuple):
    """What a rank states, with digests instead of its keys."""

    names: list[str]
    kinds: array[int]
    leaders: array[int]
    keys: list[bytes]


class _Union:
    """The union of what all ranks state, the same on each of them.

    Two names are planned as one only if they have the same key on each rank that states them: a digest tells whether
    ranks mean the same by one name, not whether two names are made alike.
    """

    def __init__(self, statement: Statement, keys: list[bytes], world: World, asked: str) -> None:
        self._ranks = world.ranks
        self._mine = world.ranks.index(world.rank)
        mine = _Outline(statement.names, statement.kinds, statement.leaders, keys)
        self._outlines: list[_Outline] = [_Outline(*told) for told in ask(world, asked, tuple(mine))]
        self._places = [{name: i for i, name in enumerate(one.names)} for one in self._outlines]
        self.names = list(dict.fromkeys([name for one in self._outlines for name in one.names]))
        combos = [tuple([self._key(i, name) for i in range(len(self._ranks))]) for name in self.names]
        known: dict[tuple[int, ...], int] = {}
        self._kinds = array("q", [known.setdefault(combo, len(known)) for combo in combos])
        self._combos = list(known)
        self._keys = self._exchange(statement, world, asked)

    def _key(self, i: int, name: str) -> int:
        """Give the place of a rank's key of a name; -1 if it states none."""
        at = self._places[i].get(name)
        return -1 if at is None else self._outlines[i].kinds[at]

    def _lacking(self) -> list[set[int]]:
        """Say which keys of each rank have to travel: those of names of which some rank states nothing, or others."""
        found: list[set[int]] = [set() for _ in self._ranks]
        for combo in self._combos:
            digests = [self._outlines[i].keys[key] if key >= 0 else None for i, key in enumerate(combo)]
            if len(set(digests)) > 1:
                for digest in dict.fromkeys(digests):
                    if digest is not None:
                        i = digests.index(digest)
                        found[i].add(combo[i])
        return found

    def _exchange(self, statement: Statement, world: World, asked: str) -> dict[tuple[int, int], Key]:
        """Give the keys of this rank, and those of others that are needed, by rank and place; collective."""
        mine = self._mine
        made = {(mine, place): key for place, key in enumerate(statement.keys)}
        lacking = self._lacking()
        if not any(lacking):
            return made
        packed, error = b"", None
        try:
            packed = statement.pack(sorted(lacking[mine]))
        except Unsupported as found:
            error = found
        answers = ask(world, asked, (packed, None if error is None else failure_of(error)), error)
        raise_if_failed([failure for _, failure in answers], world.ranks, error)
        for i, (other, _) in enumerate(answers):
            try:
                given: dict[int, bytes] = {} if i == mine else pickle.loads(other)
                made.update({(i, place): pickle.loads(key) for place, key in given.items()})
            except Exception as found:
                error = Unsupported(
                    f"what rank {world.ranks[i]} states cannot be read here: {type(found).__name__}: {text_of(found)}"
                )
        agreed = ask(world, asked, None if error is None else failure_of(error), error)
        raise_if_failed(agreed, world.ranks, error)
        return made

    def agreed(self, statement: Statement) -> Agreed:
        """Give what all agree on, for the rank of a statement."""
        stated = [self._stated(combo) for combo in self._combos]
        self._check(stated)
        places = {name: i for i, name in enumerate(self.names)}
        here = {name: i for i, name in enumerate(statement.names)}
        return Agreed(
            tuple(self.names),
            tuple(stated),
            self._kinds,
            array("q", [self._leader(name, places) for name in self.names]),
            array("q", [here.get(name, -1) for name in self.names]),
        )

    def _stated(self, combo: tuple[int, ...]) -> Stated:
        """Give the keys of a name, equal ones once: this rank's own, if it has it, else that of the first."""
        by_digest: dict[bytes, list[int]] = {}
        for i, key in enumerate(combo):
            if key >= 0:
                by_digest.setdefault(self._outlines[i].keys[key], []).append(i)
        made: list[tuple[Key, tuple[int, ...]]] = []
        for some in by_digest.values():
            i = self._mine if self._mine in some else next(i for i in some if (i, combo[i]) in self._keys)
            made.append((self._keys[i, combo[i]], tuple([self._ranks[i] for i in some])))
        return tuple(made)

    def _leader(self, name: str, places: Mapping[str, int]) -> int:
        """Find what a name is tied to: on all ranks the same, and known to the same ranks."""
        found: set[str | None] = set()
        for i, one in enumerate(self._outlines):
            at = self._places[i].get(name)
            found.add(None if at is None else one.names[one.leaders[at]])
        ties = found - {None}
        (leader, *others) = ties or {name}
        if others or leader is None or leader == name or places[leader] > places[name]:
            return places[name]
        alike = all((name in some) == (leader in some) for some in self._places)
        return places[leader] if alike else places[name]

    def _check(self, stated: Sequence[Stated]) -> None:
        """Raise if ranks state different expressions of one name."""
        problems: dict[int, str] = {}
        for place, some in enumerate(stated):
            known = [(key.expression, ranks) for key, ranks in some if key.expression is not None]
            if len({repr(canonical(expression)) for expression, _ in known}) > 1:
                by_spec = {expression.spec for expression, _ in known}
                told = [f"{told_ranks(ranks)}: {expression.spec}" for expression, ranks in known]
                what = "; ".join(told)
                made = "made of other operations or sources, or by functions of another state"
                problems[place] = what if len(by_spec) > 1 else f"{what}, but {made}"
        if not problems:
            return
        names = [(name, kind) for name, kind in zip(self.names, self._kinds, strict=True) if kind in problems]
        shown = ". ".join([f"{name!r} ({problems[kind]})" for name, kind in sorted(names)[:10]])
        rest = f", and {len(names) - 10} more" if len(names) > 10 else ""
        raise RankDisagreement(f"The ranks state different things of {shown}{rest}.")


def _digest(written: object) -> bytes:
    return hashlib.sha256(repr(written).encode()).digest()
