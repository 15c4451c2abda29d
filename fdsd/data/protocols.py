"""The protocols that edges implement: where tensors come from, where they go, and who else is there.

``storage`` and ``comms`` implement them and do not know each other; the engine joins any source to any sink.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from attrs import frozen

from fdsd.data.region import Region
from fdsd.data.spec import TensorSpec
from fdsd.data.statedict import StateDict

__all__ = ["Piece", "Sink", "Source", "World"]


@frozen
class Piece:
    """A part of a tensor and who holds it: a rank, a file, or nobody else but this process (``None``)."""

    region: Region
    owner: int | str | None = None


@runtime_checkable
class Source(Protocol):
    """Named tensors somewhere: in memory, in files, on ranks."""

    def specs(self) -> StateDict[TensorSpec]:
        """Give the spec of each tensor, in the order of the source."""
        ...

    def pieces(self, fqn: str) -> Sequence[Piece]:
        """List the parts that a tensor consists of, with their owners; together they cover it."""
        ...

    def read(self, fqn: str, region: Region, out: torch.Tensor) -> None:
        """Copy a region into ``out``, which has one dim for each pair and casts to its own dtype."""
        ...


@runtime_checkable
class Sink(Protocol):
    """A place that takes named tensors."""

    def specs(self) -> StateDict[TensorSpec]:
        """Give the spec of each tensor that the sink takes."""
        ...

    def wanted(self, fqn: str) -> Sequence[Region]:
        """List the regions of a tensor that this process has to write."""
        ...

    def write(self, fqn: str, region: Region, value: torch.Tensor) -> None:
        """Take a region of a tensor; ``value`` has one dim for each pair."""
        ...


@runtime_checkable
class World(Protocol):
    """The processes that work together."""

    @property
    def rank(self) -> int:
        """The number of this process."""
        ...

    @property
    def size(self) -> int:
        """How many processes there are."""
        ...

    def agree(self, statement: Hashable) -> Sequence[Any]:
        """Give each process's statement, in the order of ranks, on every process."""
        ...

    def exchange(
        self,
        sends: Sequence[tuple[int, torch.Tensor]],
        receives: Sequence[tuple[int, torch.Tensor]],
    ) -> None:
        """Send and receive buffers, each named by the other rank, in one order on every process."""
        ...
