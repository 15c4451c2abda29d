"""The plan that brings tensors from how they lie to how they are wanted: a pure function, the same on every rank.

Tensors of one structure share one plan, so the cost grows with structures and pieces. Nothing is sent here.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from attrs import field, frozen

from fdsd.algebra.dtypes import check_cast
from fdsd.data.errors import SpecMismatch, Unsupported, listing, plural
from fdsd.data.spec import TensorSpec, dtype_name
from fdsd.layout.layout import Layout
from fdsd.layout.pieces import Pieces
from fdsd.layout.program import Program, program_of
from fdsd.layout.structure import LIMITS, Boxes, Limits, Structure, plan_structure, wire_dtype

__all__ = ["Move", "Traffic", "Transfers", "plan_transfers", "traffic_of", "wire_dtype"]


@frozen(cache_hash=True)
class Move:
    """What happens to one tensor: how it lies, and how it is wanted. Equal moves share a plan.

    Args:
        spec: Its shape and dtype.
        source: The layout of the tensor, or any pieces of it.
        target: The layout that is wanted, or any pieces.
        dtype: The dtype that is wanted, if it is another.

    >>> from fdsd.layout.mesh import Mesh
    >>> from fdsd.layout.placement import Shard
    >>> spec = TensorSpec((4,), torch.float32)
    >>> Move(spec, Layout(Mesh({"dp": 2}), [Shard(0)]), Pieces.whole((4,), [0]), torch.bfloat16).wire
    torch.bfloat16
    """

    spec: TensorSpec
    source: Layout | Pieces
    target: Layout | Pieces
    dtype: torch.dtype | None = None

    @property
    def result(self) -> TensorSpec:
        """The spec of the tensor as it is wanted."""
        return self.spec if self.dtype is None else self.spec.with_dtype(self.dtype)

    @property
    def wire(self) -> torch.dtype:
        """The dtype in which elements travel."""
        return wire_dtype(self.spec.dtype, self.result.dtype)

    def plan(self, limits: Limits) -> Boxes:
        """Plan the move.

        Raises:
            SpecMismatch: A layout does not fit the shape, or some wanted elements are held by no rank.
            Unsupported: torch has no such cast.
        """
        check_cast(self.spec.dtype, self.result.dtype)
        sides = [_pieces(side, self.spec.shape) for side in (self.source, self.target)]
        return plan_structure(*sides, itemsize=self.wire.itemsize, limits=limits)


def _pieces(side: Layout | Pieces, shape: tuple[int, ...]) -> Pieces:
    pieces = side.holders(shape) if isinstance(side, Layout) else side
    if pieces.ndim != len(shape):
        raise SpecMismatch(f"pieces of {plural(pieces.ndim, 'dim')} are none of a tensor of shape {shape}.")
    if odd := [box for box, _ in pieces if not pieces_inside(box, shape)] if pieces is side else []:
        raise SpecMismatch(f"boxes that do not lie within the shape {shape}: {listing(odd)}.")
    return pieces


def pieces_inside(box: tuple[tuple[int, ...], tuple[int, ...]], shape: tuple[int, ...]) -> bool:
    """Tell whether a box lies within a shape.

    >>> pieces_inside(((1,), (2,)), (3,)), pieces_inside(((2,), (2,)), (3,))
    (True, False)
    """
    return all(at >= 0 and at + size <= whole for at, size, whole in zip(*box, shape, strict=True))


class Traffic(NamedTuple):
    """The bytes that each rank receives from others, and sends to them."""

    received: dict[int, int]
    sent: dict[int, int]


def traffic_of(structures: Sequence[Structure], kinds: Sequence[int]) -> Traffic:
    """Count the bytes that each rank receives and sends, without padding.

    Args:
        structures: The plans.
        kinds: The structure of each instance, in the order of instances.

    >>> plan = plan_structure(Pieces.whole((2,), [0]), Pieces.whole((2,), [1]), itemsize=4)
    >>> traffic_of([plan], [0, 0, 0])
    Traffic(received={1: 24}, sent={0: 24})
    """
    received: Counter[int] = Counter()
    sent: Counter[int] = Counter()
    turns = Counter([(kind, i % structures[kind].period) for i, kind in enumerate(kinds)])
    for (kind, turn), num in turns.items():
        structure = structures[kind]
        for rank, overlaps in structure.receives.items():
            for overlap in overlaps:
                nbytes = structure.nbytes(overlap) * num
                received[rank] += nbytes
                sent[structure.sender(overlap, turn, rank)] += nbytes
    return Traffic(dict(sorted(received.items())), dict(sorted(sent.items())))


@frozen(eq=False, repr=False)
class Transfers:
    """The plan of many tensors.

    Attributes:
        names: The tensors in order; an instance is a place in it.
        moves: The moves that differ.
        structures: The plan of each of them.
        kinds: For each instance the place of its move.
        limits: The sizes of messages.
    """

    names: tuple[str, ...]
    moves: tuple[Move, ...]
    structures: tuple[Boxes, ...]
    kinds: array[int]
    limits: Limits = field(factory=Limits)

    def program(self, rank: int, *, lookahead: int | None = None) -> Program:
        """Write the messages of one rank, in the total order.

        Args:
            rank: The rank.
            lookahead: How many bytes of later tensors may come packed with earlier ones, about; no limit if left out.

        Raises:
            SpecMismatch: ``lookahead`` is negative.

        >>> move = Move(TensorSpec((4,), torch.float32), Pieces.whole((4,), [0]), Pieces.whole((4,), [0, 1]))
        >>> plan = plan_transfers({"a": move, "b": move})
        >>> plan.program(1)
        <Program of rank 1: 1 message, 2 items>
        """
        if lookahead is not None and lookahead < 0:
            raise SpecMismatch(f"program: lookahead is 0 bytes or more, not {lookahead}.")
        return program_of(rank, self.structures, self.kinds, self.limits, lookahead)

    def traffic(self) -> Traffic:
        """Count the bytes that each rank receives and sends, without padding.

        >>> move = Move(TensorSpec((4,), torch.float32), Pieces.whole((4,), [0]), Pieces.whole((4,), [0, 1]))
        >>> plan_transfers({"a": move, "b": move}).traffic()
        Traffic(received={1: 32}, sent={0: 32})
        """
        return traffic_of(self.structures, self.kinds)

    def __repr__(self) -> str:
        return f"<Transfers of {plural(len(self.names), 'tensor')} in {plural(len(self.structures), 'structure')}>"


def plan_transfers(moves: Mapping[str, Move], *, limits: Limits = LIMITS) -> Transfers:
    """Plan the moves of tensors.

    Args:
        moves: The move of each tensor by FQN; all ranks have to give them in one order.
        limits: The sizes of messages.

    Returns:
        The plan. Each rank's messages are ``plan.program(rank)``.

    Raises:
        SpecMismatch: Layouts that do not fit their tensors, or elements that no rank holds; all tensors are named.
        Unsupported: torch has no such cast.

    Law: an element travels at most once to each rank that wants it, and never to one that holds it.

    >>> from fdsd.layout.mesh import Mesh
    >>> from fdsd.layout.placement import Shard
    >>> two, three = (Layout(Mesh({"dp": n}), [Shard(0)]) for n in (2, 3))
    >>> plan = plan_transfers({"w": Move(TensorSpec((6,), torch.float32), two, three)})
    >>> plan.traffic()
    Traffic(received={1: 4, 2: 8}, sent={0: 4, 1: 8})
    """
    places: dict[Move, int] = {}
    names: list[str] = []
    kinds = array("q")
    for name, move in moves.items():
        names.append(name)
        kinds.append(places.setdefault(move, len(places)))
    structures: list[Boxes] = []
    problems: list[tuple[int, SpecMismatch | Unsupported]] = []
    for place, move in enumerate(places):
        try:
            structures.append(move.plan(limits))
        except (SpecMismatch, Unsupported) as error:
            problems.append((place, error))
    if problems:
        raise _worded(problems, list(places), names, kinds)
    return Transfers(tuple(names), tuple(places), tuple(structures), kinds, limits)


def _worded(
    problems: list[tuple[int, SpecMismatch | Unsupported]], moves: list[Move], names: list[str], kinds: array[int]
) -> SpecMismatch | Unsupported:
    told: list[str] = []
    for place, error in problems[:10]:
        some = [name for name, kind in zip(names, kinds, strict=True) if kind == place]
        spec = moves[place].spec
        told.append(f"{listing(some, limit=3)} ({dtype_name(spec.dtype)}{list(spec.shape)}): {error}")
    rest = f" And {len(problems) - 10} more structures." if len(problems) > 10 else ""
    kind = type(problems[0][1])
    return kind(f"plan_transfers: {plural(len(problems), 'problem')}. {' '.join(told)}{rest}")
