"""`BoxSource`: a tensor that lies over ranks, of which one box at most is here; a ``PlacedSource``.

Flat parameters of FSDP1 are of this kind, and what a snapshot has copied of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch

from fdsd.algebra.dtypes import copy_elements
from fdsd.algebra.lazy import Lazy
from fdsd.algebra.ops.leaves import Origin
from fdsd.algebra.spans import view_of
from fdsd.data.errors import FdsdError, SpecMismatch, listing
from fdsd.data.protocols import Piece
from fdsd.data.region import Region
from fdsd.data.spec import TensorSpec
from fdsd.data.statedict import StateDict
from fdsd.layout.layout import Layout
from fdsd.layout.pieces import Box, Pieces, finder_of
from fdsd.layout.placed import Placement

__all__ = ["BoxSource"]


class BoxSource:
    """One tensor that lies over ranks, of which a box at most is here.

    Args:
        spec: The spec of the whole tensor.
        placement: Who holds what.
        local: The box that is here; ``None`` for nothing.
        starts: Where it begins.

    >>> halves = Pieces.of(1, [(((0,), (2,)), [0]), (((2,), (2,)), [1])])
    >>> source = BoxSource(TensorSpec((4,), torch.int64), halves, torch.tensor([7, 8]), (2,))
    >>> out = torch.zeros(1, dtype=torch.int64)
    >>> source.read("tensor", Region.box((3,), (1,)), out)
    >>> out
    tensor([8])
    """

    fqn: ClassVar[str] = "tensor"

    def __init__(
        self, spec: TensorSpec, placement: Placement, local: torch.Tensor | None, starts: Sequence[int]
    ) -> None:
        self._spec = spec
        self._placement = placement
        self._local = None if local is None else local.detach()
        self._starts = tuple(starts)

    def lazy(self) -> Lazy:
        """Give the tensor as a lazy one."""
        return Lazy(Origin(self, self.fqn, self._spec), (), [self._spec])

    def copied(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> BoxSource:
        """Give the same tensor over a copy of what is here."""
        local = None if self._local is None else copy(self._local)
        return BoxSource(self._spec, self._placement, local, self._starts)

    def specs(self) -> StateDict[TensorSpec]:
        return StateDict({self.fqn: self._spec})

    def pieces(self, fqn: str) -> Sequence[Piece]:
        return [Piece(Region.box(*box), ranks[0]) for box, ranks in self._holders()]

    def placement(self, fqn: str) -> Placement:
        return self._placement

    def local(self, fqn: str) -> torch.Tensor | None:
        return self._local

    def read(self, fqn: str, region: Region, out: torch.Tensor) -> None:
        region.check_inside(self._spec.shape, "reading a tensor that lies over ranks")
        if not region.numel:
            return
        here = Region(tuple([span.shift(-start) for span, start in zip(region.spans, self._starts, strict=True)]))
        if self._local is None or not here.inside(tuple(self._local.shape)):
            raise FdsdError(
                f"A part of a tensor {self._spec} is held by ranks {listing(self._needed(region))}; give group=. "
                "Where none is taken, materialize(state, group=...) first."
            )
        if self._local.is_meta:
            raise SpecMismatch(
                f"A tensor {self._spec} that lies over ranks is on the meta device here and has no data. Materialize "
                "the module first (to_empty, then load)."
            )
        with torch.no_grad():
            copy_elements(view_of(self._local, here), out)

    def _holders(self) -> Pieces:
        placement = self._placement
        return placement.holders(self._spec.shape) if isinstance(placement, Layout) else placement

    def _needed(self, region: Region) -> set[int]:
        holders = self._holders()
        covering: Box = (
            tuple([span.start for span in region.spans]),
            tuple([span.extent + 1 for span in region.spans]),
        )
        return {holders.ranks[i][0] for i in finder_of(holders).find(covering)}
