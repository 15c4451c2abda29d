"""`ShardSource`: a tensor of which this rank holds its own shard, and others theirs; a ``PlacedSource``.

Reading what is here works; the rest raises, and names who holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import ClassVar

import torch

from fdsd.algebra.apply import defer_leaf
from fdsd.algebra.fill import Session
from fdsd.algebra.lazy import Lazy
from fdsd.algebra.ops.leaves import Origin
from fdsd.data.errors import FdsdError, listing
from fdsd.data.protocols import Piece
from fdsd.data.region import Region
from fdsd.data.spec import TensorSpec
from fdsd.data.statedict import StateDict
from fdsd.layout.joining import cell_of, join_cells
from fdsd.layout.layout import Layout

__all__ = ["ShardSource"]


class ShardSource:
    """One tensor, laid out over ranks, of which the shard of one rank at most is here.

    Args:
        spec: The spec of the whole tensor.
        layout: How it lies.
        shards: The shard of this rank by its number; empty if it holds nothing.

    >>> from fdsd.layout.mesh import Mesh
    >>> from fdsd.layout.placed import PlacedSource
    >>> from fdsd.layout.placement import Shard
    >>> layout = Layout(Mesh({"dp": 2}), [Shard(0)])
    >>> source = ShardSource(TensorSpec((3,), torch.int64), layout, {1: torch.tensor([30])})
    >>> isinstance(source, PlacedSource), source.local(source.fqn)
    (True, tensor([30]))
    """

    fqn: ClassVar[str] = "tensor"

    def __init__(self, spec: TensorSpec, layout: Layout, shards: Mapping[int, torch.Tensor]) -> None:
        self._spec = spec
        self._layout = layout
        self._shards = {rank: shard.detach() for rank, shard in shards.items()}

    def specs(self) -> StateDict[TensorSpec]:
        return StateDict({self.fqn: self._spec})

    def pieces(self, fqn: str) -> Sequence[Piece]:
        holders = self._layout.holders(self._spec.shape)
        return [Piece(Region.box(*box), ranks[0]) for box, ranks in holders]

    def placement(self, fqn: str) -> Layout:
        return self._layout

    def local(self, fqn: str) -> torch.Tensor | None:
        return next(iter(self._shards.values()), None)

    def copied(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> ShardSource:
        """Give the same tensor over copies of what is here."""
        return ShardSource(self._spec, self._layout, {rank: copy(shard) for rank, shard in self._shards.items()})

    def read(self, fqn: str, region: Region, out: torch.Tensor) -> None:
        region.check_inside(self._spec.shape, "reading a sharded tensor")
        session = Session([self._cells])
        with torch.no_grad():
            session.fill(session.roots[0], region, out)

    @cached_property
    def _cells(self) -> Lazy:
        """The whole as an expression: cells that are cut out of the shard here, and others that raise when read."""
        made: dict[tuple[int, ...], Lazy] = {}
        shards = {rank: defer_leaf(shard) for rank, shard in self._shards.items()}
        for box, ranks in self._layout.holders(self._spec.shape):
            here = next((rank for rank in ranks if rank in shards), None)
            if here is None:
                spec = self._spec.with_shape(box[1])
                made[box[0]] = Lazy(Origin(_Elsewhere(self._spec, ranks), self.fqn, spec), (), [spec])
            else:
                made[box[0]] = cell_of(shards[here], self._layout, self._spec, here, box)
        joined = join_cells(made, self._spec)
        assert isinstance(joined, Lazy)
        return joined


class _Elsewhere:
    """A piece that other ranks hold."""

    def __init__(self, spec: TensorSpec, ranks: Sequence[int]) -> None:
        self._spec = spec
        self._ranks = ranks

    def specs(self) -> StateDict[TensorSpec]:
        return StateDict({})

    def pieces(self, fqn: str) -> Sequence[Piece]:
        return []

    def read(self, fqn: str, region: Region, out: torch.Tensor) -> None:
        held = f"rank {self._ranks[0]}" if len(self._ranks) == 1 else f"ranks {listing(self._ranks)}"
        raise FdsdError(
            f"A part of a tensor {self._spec} is held by {held}, and not here; give group=. Where none is "
            "taken, materialize(state, group=...) first."
        )
