"""`Alone`: the world of one process that works by itself, though it may be one rank of many. Nothing is sent here."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
import torch.distributed as dist
from attrs import frozen

from fdsd.data.errors import Unsupported
from fdsd.data.protocols import World

__all__ = ["Alone", "this_rank", "world_for"]


@frozen
class Alone:
    """One process by itself.

    Args:
        rank: Its number in the layouts of its tensors.

    >>> Alone(3).ranks, Alone(3).agree("so be it")
    ((3,), ['so be it'])
    """

    rank: int = 0

    @property
    def ranks(self) -> tuple[int, ...]:
        """Itself alone."""
        return (self.rank,)

    @property
    def device(self) -> torch.device:
        """The CPU: nothing travels."""
        return torch.device("cpu")

    def agree(self, statement: Any) -> list[Any]:
        """Give its own statement."""
        return [statement]

    def send(self, tensor: torch.Tensor, to: int) -> NoReturn:
        """Refuse."""
        raise Unsupported(f"rank {self.rank} works alone and cannot send to rank {to}. Give group=.")

    def receive(self, tensor: torch.Tensor, source: int) -> NoReturn:
        """Refuse."""
        raise Unsupported(f"rank {self.rank} works alone and cannot receive from rank {source}. Give group=.")


def world_for(group: Any) -> World:
    """Give the world of a group; without one, that of this process alone, by its number in the default group.

    Args:
        group: A process group, a 1-D device mesh, a world, or ``None``.

    >>> world_for(None)
    Alone(rank=0)
    """
    if group is not None:
        from fdsd.comms.world import world_of  # the group's own kinds are loaded when there is one

        return world_of(group)
    return Alone(this_rank())


def this_rank() -> int:
    """Give the number of this process in the default group; 0 if there is none.

    >>> this_rank()
    0
    """
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
