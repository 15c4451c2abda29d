"""Sources whose tensors lie over ranks: who holds which part, and what of it is here.

Process groups are unknown here; ``comms`` implements the protocol for live models.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch

from fdsd.data.protocols import Source
from fdsd.layout.layout import Layout
from fdsd.layout.pieces import Pieces

__all__ = ["PlacedSource", "Placement"]

Placement = Layout | Pieces
"""Who holds, or wants, which boxes of a tensor. By pieces, a rank has at most one box."""


@runtime_checkable
class PlacedSource(Source, Protocol):
    """A source whose tensors lie over ranks. ``read`` serves what this rank holds, and says who holds the rest."""

    def placement(self, fqn: str) -> Placement:
        """Say which rank holds what of a tensor."""
        ...

    def local(self, fqn: str) -> torch.Tensor | None:
        """Give what this rank holds: the local tensor of the layout, or its one box; ``None`` for nothing."""
        ...
