"""`Wiring`: the structure of tensors that are an expression: which parts of sources go where, and what is done then.

Planned once for any number of tensors, whose names and data are unknown here. A structural expression is reads only,
each straight into the memory of the result; another has steps that run once all of its reads are there.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from attrs import define, field, frozen

from fdsd.algebra.fill import Session
from fdsd.algebra.plan import Copy, Fill, Read, Recorder, Run, View
from fdsd.data.errors import SpecMismatch, listing, plural
from fdsd.data.region import Region
from fdsd.data.spec import TensorSpec
from fdsd.data.strides import row_major
from fdsd.layout.cutting import Cutter, Spot, cells
from fdsd.layout.expression import Expression
from fdsd.layout.pieces import Pieces
from fdsd.layout.structure import LIMITS, Limits, Structure, wire_dtype
from fdsd.layout.wants import Want

__all__ = ["Recipe", "Wiring", "plan_wiring"]

Step = Copy | Fill | Run


@frozen(eq=False)
class Recipe:
    """What ranks that want the same do with what they read.

    Attributes:
        want: What they want. Buffer ``i`` is the memory of its block ``i``.
        staging: The dtype and the number of elements of other buffers that are read into.
        again: Memory that holds the same elements as other memory, which is read: from where, and where to.
        steps: What is done then, over the buffers.
    """

    want: Want
    staging: dict[int, tuple[torch.dtype, int]] = field(factory=dict)
    again: tuple[tuple[Spot, Spot], ...] = ()
    steps: tuple[Step, ...] = ()

    @property
    def nbytes(self) -> int:
        """The bytes of the result and of what is read beside it."""
        staged = sum([dtype.itemsize * numel for dtype, numel in self.staging.values()])
        return math.prod(self.want.shape) * self.want.dtype.itemsize + staged


@define(eq=False, slots=False, repr=False, kw_only=True)
class Wiring(Structure):
    """The structure of an expression.

    Attributes:
        expression: The expression.
        recipes: What is wanted, in all variants, and what is done for it.
        recipe_of: The recipe of each rank that wants something.
        origins: The source tensor of each overlap.
        regions: The region of the source tensor that each overlap is.
        spots: Where each overlap goes, in the buffers of its recipe.
        wires: The dtype in which each overlap travels.
        notes: What those who run it have worked out.
    """

    expression: Expression
    recipes: tuple[Recipe, ...] = ()
    recipe_of: dict[int, int] = field(factory=dict)
    origins: array[int] = field(factory=lambda: array("q"))
    regions: list[Region] = field(factory=list)
    spots: list[Spot] = field(factory=list)
    wires: list[torch.dtype] = field(factory=list)
    notes: dict[object, object] = field(factory=dict)

    def nbytes(self, overlap: int) -> int:
        return self.regions[overlap].numel * self.wires[overlap].itemsize

    def parts(self, overlap: int) -> list[tuple[Region, Spot]]:
        """Cut an overlap into the parts that travel by themselves, each with where it goes."""
        region, spot = self.regions[overlap], self.spots[overlap]
        if self.nbytes(overlap) <= self.limits.bucket:
            return [(region, spot)]
        most = self.limits.bucket // self.wires[overlap].itemsize
        return [(part, spot.part(where)) for part, where in region.chunks(most)]

    def part_sizes(self, overlap: int) -> list[int]:
        return [part.numel * self.wires[overlap].itemsize for part, _ in self.parts(overlap)]

    @property
    def load(self) -> int:
        """The most bytes that any rank takes for one tensor."""
        return max([recipe.nbytes for recipe in self.recipes], default=0)

    def add(self, piece: int, origin: int, region: Region, spot: Spot, wire: torch.dtype) -> int:
        """Add an overlap, and give its number."""
        self.piece.append(piece)
        self.origins.append(origin)
        self.regions.append(region)
        self.spots.append(spot)
        self.wires.append(wire)
        return len(self.piece) - 1


def plan_wiring(
    expression: Expression, placements: Sequence[Pieces], wants: Iterable[Want], *, limits: Limits = LIMITS
) -> Wiring:
    """Plan who sends what to whom for an expression: a pure function, so that every rank makes the same plan.

    Args:
        expression: The expression.
        placements: For each source tensor its pieces, with all ranks that hold each. They may overlap each other.
        wants: What is wanted, by whom.
        limits: The sizes of messages.

    Raises:
        SpecMismatch: Some elements that are needed are held by no rank.

    Law: an element that is read once travels at most once to each rank, and never to one that holds it.

    >>> from fdsd.layout.wants import wants_of
    >>> tensor = Expression.of(TensorSpec((4,), torch.float32))
    >>> halves = Pieces.of(1, [(((0,), (2,)), [0]), (((2,), (2,)), [1])])
    >>> plan = plan_wiring(tensor, [halves], wants_of((4,), torch.bfloat16, [(None, [0])]))
    >>> plan.rows(0, 0)
    (Row(peer=1, is_send=False, overlap=1, part=0, nbytes=4, is_small=True),)
    """
    disjoint = [cells(pieces) for pieces in placements]
    holders = tuple([ranks for pieces in disjoint for ranks in pieces.ranks])
    plan = Wiring(expression=expression, limits=limits, holders=holders)
    planner = _Planner(plan, expression.origins, disjoint)
    recipes: list[Recipe] = []
    for want in wants:
        plan.recipe_of.update(dict.fromkeys(want.ranks, len(recipes)))
        recipes.append(planner.want(want))
    plan.recipes = tuple(recipes)
    planner.finish()
    return plan


class _Recorder(Recorder):
    """Writes down what would be done, and how big the buffers are."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[tuple[torch.dtype, int]] = []

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        self.sizes.append((dtype, math.prod(shape)))
        return super().empty(shape, dtype)


_Reading = tuple[int, Region, Spot]
"""A source tensor, its region and where it goes."""


class _Planner:
    """Plans what is wanted, one after the other."""

    def __init__(self, plan: Wiring, specs: Sequence[TensorSpec], placements: Sequence[Pieces]) -> None:
        self._plan = plan
        self._specs = specs
        self._cutters = [Cutter(pieces) for pieces in placements]
        # the number of the first piece of each source tensor
        self._first = [0, *itertools.accumulate(map(len, placements))]
        self._root = plan.expression.build()
        self._holes: Counter[tuple[int, tuple[int, ...]]] = Counter()

    def want(self, want: Want) -> Recipe:
        """Plan one want."""
        if len(self._plan.expression.steps) == 1 and self._specs:
            reads = [
                (0, block.region, Spot(i, want.dtype, 0, block.sizes, row_major(block.sizes)))
                for i, block in enumerate(want.blocks)
            ]
            recipe = Recipe(want)
        else:
            reads, recipe = self._record(want)
        first, again = self._once(reads)
        for origin, region, spot in first:
            self._read(want, origin, region, spot)
        return Recipe(want, recipe.staging, tuple(again), recipe.steps)

    def _record(self, want: Want) -> tuple[list[_Reading], Recipe]:
        recorder = _Recorder()
        session = Session([self._root], executor=recorder, strict=False)
        outs = [recorder.empty(block.sizes, want.dtype) for block in want.blocks]
        for block, out in zip(want.blocks, outs, strict=True):
            session.fill(session.roots[0], block.region, out)
        reads = [
            (int(step.origin.fqn), step.region, _spot(step.out)) for step in recorder.steps if isinstance(step, Read)
        ]
        steps = [step for step in recorder.steps if not isinstance(step, Read)]
        staged = sorted({spot.buffer for _, _, spot in reads if spot.buffer >= len(outs)})
        return reads, Recipe(want, {i: recorder.sizes[i] for i in staged}, (), tuple(steps))

    def _once(self, reads: Sequence[_Reading]) -> tuple[list[_Reading], list[tuple[Spot, Spot]]]:
        """Read what is read several times once, in the source's dtype if any of them has it."""
        groups: dict[tuple[int, Region], list[Spot]] = {}
        for origin, region, spot in reads:
            groups.setdefault((origin, region), []).append(spot)
        first: list[_Reading] = []
        again: list[tuple[Spot, Spot]] = []
        for (origin, region), spots in groups.items():
            own = next((spot for spot in spots if spot.dtype == self._specs[origin].dtype), None)
            leaders: dict[torch.dtype, Spot] = {}
            for spot in spots:
                leader = leaders.setdefault(spot.dtype, spot) if own is None else own
                if leader is spot:
                    first.append((origin, region, spot))
                else:
                    again.append((leader, spot))
        return first, again

    def _read(self, want: Want, origin: int, region: Region, spot: Spot) -> None:
        """Cut what is read along the pieces of its source."""
        wire = wire_dtype(self._specs[origin].dtype, spot.dtype)
        for piece, part, where in self._cutters[origin].cut(region, spot):
            if piece is None:
                self._holes[origin, want.ranks] += part.numel
            else:
                overlap = self._plan.add(self._first[origin] + piece, origin, part, where, wire)
                self._plan.assign(want.ranks, overlap)

    def finish(self) -> None:
        """Raise if there are elements that nobody holds."""
        told = [
            f"{plural(missing, 'element')} of {'it' if len(self._specs) == 1 else f'source {origin + 1}'} that "
            f"{'rank' if len(ranks) == 1 else 'ranks'} {listing(ranks)} {'needs' if len(ranks) == 1 else 'need'}"
            for (origin, ranks), missing in self._holes.items()
        ]
        if told:
            rest = f", and {len(told) - 10} more" if len(told) > 10 else ""
            raise SpecMismatch(f"no rank of the group holds {'; '.join(told[:10])}{rest}.")


def _spot(view: View) -> Spot:
    return Spot(view.buffer, view.dtype, view.offset, view.shape, view.strides)
