"""Whether a rewrite of tensors that lie over ranks needs communication: what each rank reads against what it holds.

Counted exactly, by walking every result down to its sources. Nothing is read, and nobody is asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

from attrs import field, frozen

from fdsd.algebra.graph import walk
from fdsd.algebra.lazy import Lazy
from fdsd.algebra.ops import Origin
from fdsd.data.errors import SpecMismatch, listing, plural
from fdsd.data.naming import fold
from fdsd.data.region import Region
from fdsd.data.spec import spec_of
from fdsd.data.statedict import StateDict
from fdsd.layout.derived import Lies, derive, fits
from fdsd.layout.layout import Layout
from fdsd.layout.sharded import Sharded, lazy_sharded
from fdsd.pipeline.coverage import trail
from fdsd.pipeline.grids import Grid, grids, spread
from fdsd.pipeline.placing import laid_out, wanted
from fdsd.pipeline.planning import through
from fdsd.pipeline.rewrite import Scope
from fdsd.pipeline.run import short
from fdsd.pipeline.step import Step

__all__ = ["Locality", "Travel", "locality"]

Received = Mapping[int, int]
"""Bytes by rank."""


@frozen
class Travel:
    """What ranks need of others for one result.

    Attributes:
        fqn: The name of the result; of tied ones the first.
        step: The number, from 1, of the first step that no rank can do with what it has; 0 if the steps can, but the
            results are wanted otherwise than they would lie.
        where: The step in words.
        nbytes: The bytes that come to each rank from others, in the dtype of the source; each element once.
    """

    fqn: str
    step: int
    where: str
    nbytes: Received


@frozen(repr=False)
class Locality:
    """Whether ranks need something of each other. It has no truth value: ask ``.ok``.

    Attributes:
        moves: The results that need something of other ranks.
        num: How many results there are, tied ones counted once.
        ranks: The ranks that hold or want something.

    >>> Locality((), 3, (0, 1))
    local: 3 tensors on 2 ranks, and nothing travels
    """

    moves: tuple[Travel, ...]
    num: int
    ranks: tuple[int, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing travels."""
        return not self.moves

    @property
    def received(self) -> dict[int, int]:
        """The bytes that come to each rank from others, of those ranks that need any."""
        total: Counter[int] = Counter()
        for move in self.moves:
            total.update(dict(move.nbytes))
        return dict(sorted(total.items()))

    def __bool__(self) -> NoReturn:
        raise TypeError("A Locality has no truth value; ask locality.ok.")

    def __str__(self) -> str:
        place = f"on {plural(len(self.ranks), 'rank')}"
        if self.ok:
            return f"local: {plural(self.num, 'tensor')} {place}, and nothing travels"
        total = sum(self.received.values())
        head = f"not local: {len(self.moves)} of {plural(self.num, 'tensor')} {place}; {total:,} bytes travel"
        return "\n".join([head, *self._lines()])

    __repr__ = __str__

    def _lines(self) -> Iterator[str]:
        by_step: dict[tuple[int, str], dict[str, Received]] = {}
        for move in sorted(self.moves, key=lambda move: move.step or 1 << 30):
            by_step.setdefault((move.step, move.where), {})[move.fqn] = move.nbytes
        for (_, where), some in by_step.items():
            yield f"{where}:"
            texts = {name: _bytes_text(nbytes) for name, nbytes in some.items()}
            found = fold(texts, texts.__getitem__)
            for one in found[:10]:
                text, num = texts[one.names[0]], len(one.names)
                yield f"  {one.text}: {f'{num} x ' if num > 1 else ''}{text}"
            if len(found) > 10:
                yield f"  and {len(found) - 10} more like these"


def _bytes_text(nbytes: Received) -> str:
    """Word what comes to each rank: ranks that get as much together."""
    by_size: dict[int, list[int]] = {}
    for rank, size in nbytes.items():
        by_size.setdefault(size, []).append(rank)
    texts = [
        f"{size:,} bytes to {'rank' if len(ranks) == 1 else 'each of ranks'} {listing(ranks, limit=8)}"
        for size, ranks in by_size.items()
    ]
    if len(texts) == 1:
        return texts[0]
    more = f"; and {plural(len(texts) - 4, 'other amount')}" if len(texts) > 4 else ""
    return f"({'; '.join(texts[:4])}{more})"


def locality(steps: Iterable[Step], layouts: Any, source: Any = None, target: Any = None) -> Locality:
    """Find what ranks need of each other; see ``Pipeline.locality``.

    Raises:
        Unsupported: There are no shapes: ``layouts`` has none, and ``source`` is left out; or the source is no state.
        SpecMismatch: Layouts do not fit, or it is not known how a result is wanted.
        UnknownName: A rule of layouts or of the target wins no name.
        FdsdError: The steps do not run on this source.

    Law: nothing travels exactly if every rank can run its part on what it holds.

    >>> import torch
    >>> from fdsd.data.spec import TensorSpec
    >>> from fdsd.layout import Layout, Mesh, Shard
    >>> from fdsd.transforms import transpose
    >>> rows, spec = Layout(Mesh({"tp": 2}), [Shard(0)]), {"w": TensorSpec((4, 2), torch.int8)}
    >>> transpose("w").locality(rows, spec)
    local: 1 tensor on 2 ranks, and nothing travels
    >>> transpose("w").locality(rows, spec, target=rows)
    not local: 1 of 1 tensor on 2 ranks; 4 bytes travel
    the layout that is wanted:
      w: 2 bytes to each of ranks 0, 1
    """
    every = tuple(steps)
    state, given = laid_out(layouts, source)
    states = through(every, state)
    return _Search(every, states, given, wanted(target, states[-1])).run()


@frozen
class _Search:
    """One question: what was run, how sources lie by their operations' ids, and what is wanted by name."""

    steps: tuple[Step, ...]
    states: list[StateDict[Any]]
    given: dict[int, Layout]
    wanted: dict[str, Layout]
    lies: dict[int, Lies] = field(factory=dict[int, Lies])  # of nodes, by id
    gathered: dict[int, tuple[int, Lies]] = field(factory=dict[int, tuple[int, Lies]])  # made whole by a step; before
    known: dict[Hashable, Received] = field(factory=dict[Hashable, Received])

    def run(self) -> Locality:
        self._find_gathered()
        wants: dict[str, tuple[Lazy, Lies]] = {}
        seen: set[tuple[int, Lies]] = set()
        odd: list[str] = []
        for name, leaf in self.states[-1].items():
            if spec_of(leaf) is None:
                continue
            node, want = _node(leaf), self.wanted.get(name) or self._lies_of(leaf)
            if want is None:
                odd.append(name)
            elif (id(node), want) not in seen:
                seen.add((id(node), want))
                wants[name] = node, want
        if odd:
            raise SpecMismatch(f"locality: it is not known how {listing(odd)} should lie. Say it with target=.")
        ranks = self._ranks(want for _, want in wants.values())
        firsts = self._firsts()
        moves: list[Travel] = []
        for name, (node, want) in wants.items():
            if nbytes := self._missing(node, want, ranks):
                moves.append(Travel(name, *self._blame(node, firsts, ranks), nbytes))
        return Locality(tuple(moves), len(wants), ranks)

    def _ranks(self, wants: Iterable[Lies]) -> tuple[int, ...]:
        layouts = {*self.given.values(), *[want for want in wants if isinstance(want, Layout)]}
        return tuple(sorted({rank for layout in layouts for rank in layout.mesh.ranks})) or (0,)

    # -- how tensors lie after each step ---------------------------------------------------------------------

    def _find_gathered(self) -> None:
        """Find the nodes that a step makes whole on all ranks, and how they lay before."""
        for number, step in enumerate(self.steps, start=1):
            if step.gathers:
                for assign in step.rewrite(Scope(self.states[number - 1])).assigns:
                    leaf = self.states[number][assign.target]
                    if assign.build is not None and isinstance(leaf, Lazy) and id(leaf) not in self.gathered:
                        self.gathered[id(leaf)] = number, self._lies_of(leaf)
                        self.lies[id(leaf)] = "everywhere"

    def _lies_of(self, leaf: Any, number: int | None = None) -> Lies:
        """Tell how a leaf lies, after a step or at the end, if every rank works on what it has."""
        if isinstance(leaf, Sharded):
            return leaf.layout
        for node in walk([leaf], set(self.lies)):
            is_source = isinstance(node.op, Origin)
            self.lies[id(node)] = self.given.get(id(node.op), "everywhere") if is_source else derive(node, self.lies)
        made_whole, before = self.gathered.get(id(leaf), (0, None))
        if number is not None and number < made_whole:
            return before
        found = self.lies[id(leaf)]
        return _like_sources(leaf, self.given) if found is None else found

    def _firsts(self) -> list[dict[int, tuple[Lazy, Lies]]]:
        """For each step the nodes that it brings, or lays out otherwise."""
        before = {(id(_node(leaf)), self._lies_of(leaf, 0)) for leaf in _tensors(self.states[0])}
        made: list[dict[int, tuple[Lazy, Lies]]] = []
        for number, state in enumerate(self.states[1:], start=1):
            made.append({})
            for leaf in _tensors(state):
                node, lies = _node(leaf), self._lies_of(leaf, number)
                if (id(node), lies) not in before:
                    before.add((id(node), lies))
                    made[-1][id(node)] = node, lies
        return made

    def _blame(
        self, node: Lazy, firsts: Sequence[Mapping[int, tuple[Lazy, Lies]]], ranks: tuple[int, ...]
    ) -> tuple[int, str]:
        """Name the first step on the way to a result that no rank can do with what it has."""
        below = [id(one) for one in walk([node])]
        for number, (step, first) in enumerate(zip(self.steps, firsts, strict=True), start=1):
            for key in below:
                one, lies = first.get(key, (node, None))
                if lies is not None and self._missing(one, lies, ranks):
                    return number, f"step {number}, {short(step.call_text(), 60)}"
        return 0, "the layout that is wanted"

    # -- what ranks read, and what they hold -----------------------------------------------------------------

    def _missing(self, node: Lazy, want: Lies, ranks: tuple[int, ...]) -> Received:
        """Count the bytes that each rank needs and does not hold; the same for all tensors of one structure."""
        key, origins = self._structure(node)
        if (key, want) not in self.known:
            self.known[key, want] = MappingProxyType(dict(self._count(node, want, ranks, origins)))
        return self.known[key, want]

    def _structure(self, node: Lazy) -> tuple[Hashable, dict[int, Layout]]:
        """Give what is equal for expressions that differ in names only, and the layouts of its sources."""
        numbers: dict[int, int] = {}
        rows: list[Hashable] = []
        origins: dict[int, Layout] = {}
        for one in walk([node]):
            op = one.op
            numbers[id(one)] = len(numbers)
            if isinstance(op, Origin):
                layout = self.given.get(id(op))
                rows.append((op.spec, layout))
                if layout is not None:
                    origins[id(op)] = layout
            else:
                rows.append((type(op), op, tuple([numbers[id(x)] for x in one.inputs]), one.outputs))
        return tuple(rows), origins

    def _count(
        self, node: Lazy, want: Lies, ranks: tuple[int, ...], origins: Mapping[int, Layout]
    ) -> Iterator[tuple[int, int]]:
        reads: dict[Region, list[tuple[Origin, Region]]] = {}
        for rank in (
            ranks if want == "everywhere" else [r for r in ranks if isinstance(want, Layout) and r in want.mesh]
        ):
            regions = want.regions(node.shape, rank) if isinstance(want, Layout) else (Region.whole(node.shape),)
            needs: dict[int, tuple[Origin, Counter[Grid]]] = {}
            for region in regions:
                if region not in reads:
                    ends = trail(node, region)
                    reads[region] = [(e.op, e.region) for e in ends if isinstance(e.op, Origin) and id(e.op) in origins]
                for op, part in reads[region]:
                    if not _holds(origins[id(op)], op.spec.shape, rank, part):
                        needs.setdefault(id(op), (op, Counter()))[1].update([grid for grid, _ in grids(part)])
            total = sum([_unheld(op, origins[key], rank, parts) for key, (op, parts) in needs.items()])
            if total:
                yield rank, total


def _tensors(state: StateDict[Any]) -> list[Any]:
    return [leaf for leaf in state.values() if spec_of(leaf) is not None]


def _node(leaf: Any) -> Lazy:
    """Give the expression of a leaf."""
    node = lazy_sharded(leaf) if isinstance(leaf, Sharded) else leaf
    assert isinstance(node, Lazy)
    return node


def _like_sources(node: Lazy, given: Mapping[int, Layout]) -> Lies:
    """Give the layout that all sources have, if the result has as many dims."""
    begins = [one for one in walk([node]) if isinstance(one.op, Origin) and id(one.op) in given]
    layouts = {given[id(one.op)] for one in begins}
    if len(layouts) == 1 and {one.ndim for one in begins} == {node.ndim}:
        (layout,) = layouts
        return layout if fits(layout, node.shape) else None
    return None


def _holds(layout: Layout, shape: tuple[int, ...], rank: int, region: Region) -> bool:
    """Tell quickly whether one box that a rank holds has all of a region; ``False`` may mean that several have."""
    return any(
        all(
            at <= span.start and span.start + span.extent < at + size
            for span, at, size in zip(region.spans, *box, strict=True)
        )
        for box in [(block.starts, block.sizes) for block in layout.blocks(shape, rank)]
    )


def _unheld(op: Origin, layout: Layout, rank: int, parts: Counter[Grid]) -> int:
    """Count the bytes of grids of a tensor that a rank does not hold, each element once."""
    shape = op.spec.shape
    blocks = layout.blocks(shape, rank)
    every = Counter(parts.keys())
    every.update([grid for block in blocks for grid, _ in grids(block.region)])
    held = sum([block.region.numel for block in blocks])
    return (op.spec.numel - spread(every, shape)[0] - held) * op.spec.dtype.itemsize
