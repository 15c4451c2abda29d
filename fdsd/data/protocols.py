"""The protocols that edges implement: where tensors come from, where they go, and who else is there.

``storage`` and ``comms`` implement them and do not know each other; the engine joins any source to any sink.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from attrs import frozen

from fdsd.data.region import Region
from fdsd.data.spec import TensorSpec
from fdsd.data.statedict import StateDict

__all__ = ["Pending", "Piece", "Sink", "Source", "World"]


@frozen
class Piece:
    """A part of a tensor and who holds it: a rank, a file, or nobody else but this process (``None``)."""

    region: Region
    owner: int | str | None = None


@runtime_checkable
class Source(Protocol):
    """Named tensors somewhere: in memory, in files, on ranks.

    One that knows which of its tensors share memory has ``place(fqn) -> Place | None`` too; else each is taken to lie
    in memory of its own.
    """

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


class Pending(Protocol):
    """A message that is under way."""

    def wait(self) -> None:
        """Wait until the memory may be used again: until it is sent, or received."""
        ...


@runtime_checkable
class World(Protocol):
    """The processes that work together. Ranks are numbers that layouts use too: those of the default process group."""

    @property
    def rank(self) -> int:
        """The number of this process."""
        ...

    @property
    def ranks(self) -> tuple[int, ...]:
        """The numbers of all processes, in the order of the group."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the memory of messages has to lie."""
        ...

    def agree(self, statement: Any) -> list[Any]:
        """Give each process's statement, in the order of ``ranks``, on every process."""
        ...

    def send(self, tensor: torch.Tensor, to: int) -> Pending:
        """Begin to send contiguous memory on ``device`` to a rank."""
        ...

    def receive(self, tensor: torch.Tensor, source: int) -> Pending:
        """Begin to receive from a rank into contiguous memory on ``device``."""
        ...
