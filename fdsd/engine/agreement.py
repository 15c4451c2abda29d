"""What all ranks have to agree on before anything travels: which tensors there are, and how.

Equal statements are recognised by a digest, and nothing else travels; else the union of all is formed, the same on
every rank. What is planned from it is ``wirings``' business.
"""

from __future__ import annotations

import hashlib
import pickle
from array import array
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import torch
from attrs import define, field, frozen

from fdsd.algebra.ops.leaves import Origin
from fdsd.data.errors import RankDisagreement, Unsupported, add_note, listing
from fdsd.data.protocols import World
from fdsd.data.ties import tie_key
from fdsd.engine.canonical import canonical
from fdsd.engine.failures import Failure, failure_of, raise_if_failed
from fdsd.engine.overwriting import placement_of
from fdsd.engine.request import Request
from fdsd.layout.expression import Expression, expression_of
from fdsd.layout.wants import Target

__all__ = ["Agreed", "Key", "Stated", "Statement", "agree", "state"]


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

    def digest(self) -> bytes:
        """Give what is equal for ranks that state the same."""
        made = hashlib.sha256()
        for part in ("\0".join(self.names).encode(), self.kinds.tobytes(), self.leaders.tobytes()):
            made.update(len(part).to_bytes(8, "little") + part)
        for key in self.keys:
            made.update(repr(canonical(key)).encode())
        return made.digest()

    def pack(self) -> bytes:
        """Write what other ranks have to know.

        Raises:
            Unsupported: A function of the user cannot be pickled.
        """
        try:
            return pickle.dumps((self.names, self.kinds, self.leaders, self.keys))
        except Exception as error:  # whatever pickle raises, and there is much
            raise Unsupported(
                "the ranks know of different tensors, so their expressions have to travel, and a function in them "
                f"cannot be pickled ({type(error).__name__}: {error}). Define it at the top of a module."
            ) from error


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
    given = [request.out for request in requests.values()]
    for name, request in requests.items():
        try:
            place = stating.place_of(request)
        except Exception as error:
            add_note(error, f"of {name!r}")
            raise
        leader = leaders.setdefault((name if request.node is None else id(request.node), place), len(made.names))
        made.leaders.append(leader if _same_memory(given[leader], request.out) else len(made.names))
        made.names.append(name)
        made.kinds.append(place)
    return made


class _Stating:
    """Sorts requests by their keys.

    Thousands of requests have few keys, and share the specs and layouts that they are made of. So they are told apart
    by
    identity first; placements are kept, so that no other one gets the identity of one that is gone.
    """

    def __init__(self, made: Statement, rank: int) -> None:
        self._made = made
        self._rank = rank
        self._places: dict[Key, int] = {}
        self._seen: dict[Hashable, int] = {}
        self._checked: set[Hashable] = set()
        self._alive: list[Target] = []

    def place_of(self, request: Request) -> int:
        """Give the place of a request's key among all keys, and note its source tensors."""
        node, out = request.node, request.out
        if node is None or not isinstance(node.op, Origin):
            return self._place_of_new(request)
        op = node.op
        placement = placement_of(op)
        memory = None if out is None else (out.shape, out.dtype, out.is_meta)
        seen = id(op.spec), id(placement), id(request.target), request.everyone, request.dtype, memory
        place = self._seen.get(seen)
        if place is None:
            place = self._seen[seen] = self._place_of_new(request)
        else:
            self._made.origins.append((op,))
        self._alive.append(placement)
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
    """

    names: tuple[str, ...]
    stated: tuple[Stated, ...]
    kinds: array[int]
    leaders: array[int]
    mine: array[int]


def agree(statement: Statement | None, error: BaseException | None, world: World) -> Agreed:
    """Compare what all ranks state, and form the union. Collective.

    Args:
        statement: What this rank states; ``None`` if there is an error.
        error: What went wrong on this rank before.
        world: The ranks.

    Raises:
        FdsdError: The same on all ranks: one of them failed before.
        RankDisagreement: The ranks state different expressions of one name, or one is missing where it is held.
        Unsupported: Expressions have to travel, and a function in one cannot be pickled.
    """
    digest = b""
    if error is None and statement is not None:
        try:
            digest = statement.digest()
        except Exception as found:  # told to all
            error = found
    answers = world.agree((digest, None if error is None else failure_of(error)))
    raise_if_failed([failure for _, failure in answers], world.ranks, error)
    assert statement is not None
    if all(other == digest for other, _ in answers):
        stated = tuple([((key, tuple(world.ranks)),) for key in statement.keys])
        order = array("q", range(len(statement.names)))
        return Agreed(tuple(statement.names), stated, statement.kinds, statement.leaders, order)
    return _Union(world.rank, world.ranks, _exchange(statement, world)).agreed(statement)


_Packed = tuple[list[str], "array[int]", "array[int]", list[Key]]


def _exchange(statement: Statement, world: World) -> list[_Packed]:
    packed, error = b"", None
    try:
        packed = statement.pack()
    except Unsupported as found:
        error = found
    answers = world.agree((packed, None if error is None else failure_of(error)))
    raise_if_failed([failure for _, failure in answers], world.ranks, error)
    made: list[_Packed] = []
    failure: Failure | None = None
    for rank, (other, _) in zip(world.ranks, answers, strict=True):
        try:
            mine: _Packed = (statement.names, statement.kinds, statement.leaders, statement.keys)
            made.append(mine if rank == world.rank else pickle.loads(other))
        except Exception as found:
            error = Unsupported(f"what rank {rank} states cannot be read here: {type(found).__name__}: {found}")
            failure = failure_of(error)
    raise_if_failed(world.agree(failure), world.ranks, error)
    return made


class _Union:
    """The union of what all ranks state, the same on each of them."""

    def __init__(self, rank: int, ranks: Sequence[int], statements: Sequence[_Packed]) -> None:
        self._ranks = ranks
        self._statements = statements
        self._places = [{name: i for i, name in enumerate(names)} for names, *_ in statements]
        self.names = list(dict.fromkeys([name for names, *_ in statements for name in names]))
        # Texts tell keys apart: a function that has travelled is none of this rank's, though it is the same.
        places: dict[str, int] = {}
        texts = [[repr(canonical(key)) for key in found] for *_, found in statements]
        self._numbers = [[places.setdefault(text, len(places)) for text in some] for some in texts]
        mine = ranks.index(rank)
        order = [*range(mine), *range(mine + 1, len(ranks)), mine]  # this rank's own keys count
        self._keys = dict([pair for i in order for pair in zip(self._numbers[i], statements[i][3], strict=True)])

    def agreed(self, statement: Statement) -> Agreed:
        """Give what all agree on, for the rank of a statement."""
        known: dict[tuple[int, ...], int] = {}
        kinds = array("q")
        for name in self.names:
            combo = tuple([self._number(i, name) for i in range(len(self._ranks))])
            kinds.append(known.setdefault(combo, len(known)))
        stated = [self._stated(combo) for combo in known]
        self._check(stated, kinds)
        places = {name: i for i, name in enumerate(self.names)}
        here = {name: i for i, name in enumerate(statement.names)}
        return Agreed(
            tuple(self.names),
            tuple(stated),
            kinds,
            array("q", [self._leader(name, places) for name in self.names]),
            array("q", [here.get(name, -1) for name in self.names]),
        )

    def _number(self, i: int, name: str) -> int:
        at = self._places[i].get(name)
        return -1 if at is None else self._numbers[i][self._statements[i][1][at]]

    def _stated(self, combo: tuple[int, ...]) -> Stated:
        by_key: dict[int, list[int]] = {}
        for rank, number in zip(self._ranks, combo, strict=True):
            if number >= 0:
                by_key.setdefault(number, []).append(rank)
        return tuple([(self._keys[number], tuple(ranks)) for number, ranks in by_key.items()])

    def _leader(self, name: str, places: Mapping[str, int]) -> int:
        """Find what a name is tied to: on all ranks the same, and known to the same ranks."""
        found: set[str | None] = set()
        for i, (names, _, leaders, _) in enumerate(self._statements):
            at = self._places[i].get(name)
            found.add(None if at is None else names[leaders[at]])
        ties = found - {None}
        (leader, *others) = ties or {name}
        if others or leader is None or leader == name or places[leader] > places[name]:
            return places[name]
        alike = all((name in some) == (leader in some) for some in self._places)
        return places[leader] if alike else places[name]

    def _check(self, stated: Sequence[Stated], kinds: Sequence[int]) -> None:
        """Raise if ranks state different expressions of one name."""
        problems: dict[int, str] = {}
        for place, some in enumerate(stated):
            known = [(key.expression, ranks) for key, ranks in some if key.expression is not None]
            if len({repr(canonical(expression)) for expression, _ in known}) > 1:
                by_spec = {expression.spec for expression, _ in known}
                told = [f"{_ranks(ranks)}: {expression.spec}" for expression, ranks in known]
                what = "; ".join(told)
                problems[place] = what if len(by_spec) > 1 else f"{what}, but made of other operations or sources"
        if not problems:
            return
        names = [(name, kind) for name, kind in zip(self.names, kinds, strict=True) if kind in problems]
        shown = ". ".join([f"{name!r} ({problems[kind]})" for name, kind in sorted(names)[:10]])
        rest = f", and {len(names) - 10} more" if len(names) > 10 else ""
        raise RankDisagreement(f"The ranks state different things of {shown}{rest}.")


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {listing(ranks)}"
