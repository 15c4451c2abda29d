"""Random deliveries: what all ranks hold and want of random graphs, and what they have to get. No test lives here."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import torch
from attrs import frozen
from hypothesis import strategies as st

from fdsd.algebra.apply import defer_leaf
from fdsd.algebra.graph import walk
from fdsd.algebra.lazy import Lazy
from fdsd.algebra.ops import Origin
from fdsd.engine.messages import Window
from fdsd.engine.request import Request
from fdsd.layout import Layout, Mesh, Pieces
from fdsd.layout.structure import Limits
from fdsd.layout.wants import local_shape_of
from tests.helpers.chains import Grown, can_cast, grow
from tests.helpers.layouts import layouts
from tests.helpers.placed import part_of, shard
from tests.helpers.regions import memory
from tests.helpers.tensors import NUMERIC

__all__ = ["Wanted", "deliveries", "limits", "meshes_of", "pieces_of", "placements", "windows"]

Placement = Layout | Pieces | None

windows = st.builds(Window, st.integers(1, 3), st.integers(1, 5))
limits = st.sampled_from([Limits(), Limits(0, 24), Limits(16, 40), Limits(100, 100), Limits(1, 1), Limits(64, 1000)])


@st.composite
def meshes_of(draw: st.DrawFn, ranks: Sequence[int]) -> Mesh:
    """Meshes over some of the given ranks, in any order."""
    sizes = draw(st.lists(st.integers(1, len(ranks)), max_size=3))
    while torch.Size(sizes).numel() > len(ranks):
        sizes[sizes.index(max(sizes))] -= 1
    chosen = draw(st.permutations(ranks))[: torch.Size(sizes).numel()]
    return Mesh(list(zip(("dp", "tp", "ep"), sizes, strict=False)), chosen)


@st.composite
def pieces_of(draw: st.DrawFn, shape: tuple[int, ...], ranks: Sequence[int], *, cover: bool) -> Pieces:
    """Boxes of one dim's runs, at most one for each rank, which may overlap each other; all of it on demand."""
    if not shape:
        return Pieces.whole(shape, draw(st.sets(st.sampled_from(ranks), min_size=1)))
    dim = draw(st.integers(0, len(shape) - 1))
    order = draw(st.permutations(ranks))
    ends = sorted(draw(st.lists(st.integers(0, shape[dim]), max_size=len(ranks) - 1)))
    runs = list(itertools.pairwise([0, *ends, shape[dim]]))
    if not cover:
        runs = [run for run in runs if draw(st.booleans())]
    rows = []
    for i, rank in enumerate(order):
        if i < len(runs):
            start, stop = runs[i]
        elif runs and draw(st.booleans()):
            start, stop = draw(st.sampled_from(runs))
            stop = draw(st.integers(start, shape[dim]))
        else:
            continue
        starts, sizes = [0] * len(shape), list(shape)
        starts[dim], sizes[dim] = start, stop - start
        rows.append(((tuple(starts), tuple(sizes)), [rank]))
    return Pieces.of(len(shape), rows)


def placements(shape: tuple[int, ...], ranks: Sequence[int], *, cover: bool = True) -> st.SearchStrategy[Placement]:
    """Every way in which a tensor may lie, or be wanted."""
    return st.one_of(
        st.none(),
        meshes_of(ranks).flatmap(lambda mesh: layouts(shape, mesh)),
        pieces_of(shape, ranks, cover=cover),
    )


@frozen(repr=False)
class Wanted:
    """Random deliveries.

    Attributes:
        ranks: The ranks of the group.
        tensors: The source tensors, whole, with how each lies.
        results: By name the result, whole, the node, how it is wanted, in what dtype, and whether memory is given.
    """

    ranks: tuple[int, ...]
    tensors: Mapping[str, tuple[torch.Tensor, Placement]]
    results: Mapping[str, tuple[torch.Tensor, Lazy, Placement, bool, torch.dtype, bool]]
    seed: int = 0
    story: str = ""

    def __repr__(self) -> str:
        held = {name: placement for name, (_, placement) in self.tensors.items()}
        wanted = {name: (node, *rest) for name, (_, node, *rest) in self.results.items()}
        return f"<ranks {self.ranks}; held {held}; wanted {wanted}; {self.story}>"

    def _repr_pretty_(self, printer: Any, _cycle: bool) -> None:  # hypothesis would show elements, and not all can be
        printer.text(repr(self))

    def requests(self, rank: int) -> dict[str, Request]:
        """Give what a rank requests, over sources of its own."""
        placed = {name: (tensor, p) for name, (tensor, p) in self.tensors.items() if p is not None}
        source = shard(
            {name: tensor for name, (tensor, _) in placed.items()},
            {name: p for name, (_, p) in placed.items() if p is not None},
            rank,
        )
        leaves: dict[str, Lazy] = {}
        for name, (tensor, placement) in self.tensors.items():
            leaves[name] = defer_leaf(tensor.detach()) if placement is None else source.lazy(name)
        made: dict[int, Lazy] = {}
        given: dict[str, Request] = {}
        rng = Random(self.seed + rank)
        for name, (_, node, target, everyone, dtype, has_out) in self.results.items():
            root = _replanted(node, leaves, made)
            shape = local_shape_of(target, node.shape, rank)
            out = memory(rng, shape, dtype).out if has_out and shape is not None else None
            given[name] = Request(root, target, everyone, out, dtype)
        return given

    def expected(self, rank: int) -> dict[str, torch.Tensor]:
        """Say what a rank has to get."""
        made: dict[str, torch.Tensor] = {}
        for name, (whole, _, target, _, dtype, _) in self.results.items():
            part = part_of(whole if whole.dtype is dtype else whole.detach().to(dtype), target, rank)
            if part is not None:
                made[name] = part
        return made


def _replanted(node: Lazy, leaves: Mapping[str, Lazy], made: dict[int, Lazy]) -> Lazy:
    """Build the same graph over other source tensors."""
    for each in walk([node]):
        if id(each) not in made:
            if isinstance(each.op, Origin):
                made[id(each)] = leaves[each.op.fqn]
            else:
                made[id(each)] = Lazy(each.op, [made[id(x)] for x in each.inputs], each.outputs)
    return made[id(node)]


@st.composite
def deliveries(
    draw: st.DrawFn,
    *,
    calls: bool = True,
    values: str | None = None,
    max_ranks: int = 4,
    group: Sequence[int] | None = None,
) -> Wanted:
    """Random graphs over tensors that lie in every way, wanted in every way, on 1 to 4 ranks with any numbers."""
    if group is None:
        num = draw(st.integers(1, max_ranks))
        group = draw(st.sampled_from([tuple(range(num)), tuple(range(5, 5 + num)), tuple(reversed(range(num)))]))
    ranks = tuple(group)
    seed = draw(st.integers(0, 1 << 32))
    kind = draw(st.sampled_from(["numbers", "patterns"])) if values is None else values
    chain = grow(seed, values=kind, calls=calls)
    rng = Random(seed)
    tensors: dict[str, tuple[torch.Tensor, Placement]] = {}
    names: dict[int, str] = {}
    for i, x in enumerate(chain.pool[: len(chain.sources)]):
        names[id(x.lazy)] = f"x{i}"
        tensors[f"x{i}"] = x.eager, draw(placements(x.shape, ranks))
    roots = {id(x.lazy): _named(x.lazy, names) for x in chain.pool}
    results: dict[str, Any] = {}
    for i in draw(st.lists(st.integers(0, len(chain.pool) - 1), min_size=1, max_size=4)):
        x = chain.pool[i]
        target = draw(placements(x.shape, ranks, cover=False))
        dtype = _dtype(rng, x) if kind == "numbers" and draw(st.booleans()) else x.eager.dtype
        results[f"r{len(results)}"] = (
            x.eager, roots[id(x.lazy)], target, draw(st.booleans()), dtype, draw(st.booleans()),
        )  # fmt: skip
    return Wanted(ranks, tensors, results, seed, str(chain))


def _named(node: Lazy, names: Mapping[int, str]) -> Lazy:
    """Build the same graph whose source tensors are called by the given names."""
    made: dict[int, Lazy] = {}
    for each in walk([node]):
        if id(each) in names:
            assert isinstance(each.op, Origin)
            made[id(each)] = Lazy(Origin(each.op.source, names[id(each)], each.spec), (), [each.spec])
        else:
            made[id(each)] = Lazy(each.op, [made[id(x)] for x in each.inputs], each.outputs)
    return made[id(node)]


def _dtype(rng: Random, x: Grown) -> torch.dtype:
    fitting = [dtype for dtype in NUMERIC if can_cast(x, dtype)]
    return rng.choice(fitting)
