"""`Destination`: where a whole tensor goes in a local state dict, and what stands there then.

The entry that is there says it: the shards of a sharded tensor are filled, a plain tensor is replaced, and each keeps
its own dtype. How the elements come here is unknown.
"""

from __future__ import annotations

from typing import Any

import torch
from attrs import frozen

from fdsd.comms.alone import this_rank
from fdsd.comms.dtensors import layout_of_dtensor
from fdsd.comms.kinds import is_sharded_tensor, parts_of, spec_of_kind, with_parts
from fdsd.comms.modules import is_dtensor
from fdsd.data.errors import SpecMismatch, Unsupported
from fdsd.data.spec import TensorSpec
from fdsd.layout.pieces import Pieces
from fdsd.layout.wants import Target, local_shape_of

__all__ = ["Destination"]

_CPU = torch.device("cpu")


@frozen(eq=False)
class Destination:
    """Where a whole tensor goes.

    Attributes:
        target: The part of it that goes here; ``None`` for all.
        memory: The memory that the part is written to; ``None`` if nothing goes here.
        entry: What stands in the local state dict afterwards.
    """

    target: Target
    memory: torch.Tensor | None
    entry: Any

    @classmethod
    def nowhere(cls, spec: TensorSpec, entry: Any = None) -> Destination:
        """Give the destination of a tensor of which nothing goes here.

        >>> Destination.nowhere(TensorSpec((2,), torch.int8)).target
        Pieces.of(1, [])
        """
        return cls(Pieces.of(spec.ndim, []), None, entry)

    @classmethod
    def of(
        cls, local: Any, spec: TensorSpec, *, device: torch.device, in_place: bool = True, offload: bool = False
    ) -> Destination:
        """Find where a whole tensor goes.

        Args:
            local: The entry of the local state dict; ``None`` takes nothing.
            spec: The whole tensor.
            device: Where new memory is made.
            in_place: Whether the memory of a sharded entry is written, if it has some; else it gets new memory.
            offload: All goes to the CPU; sharded entries elsewhere get new memory there.

        Raises:
            SpecMismatch: The shapes differ.
            Unsupported: The entry has several local shards.

        >>> entry = torch.ones(2, dtype=torch.bfloat16)
        >>> found = Destination.of(entry, TensorSpec((2,), torch.float32), device=_CPU)
        >>> found.memory.dtype, found.entry is found.memory
        (torch.bfloat16, True)
        """
        if local is None:
            return cls.nowhere(spec)
        own = spec_of_kind(local) if isinstance(local, torch.Tensor) else spec
        if own.shape != spec.shape:
            raise SpecMismatch(f"the whole tensor has the shape {spec.shape}, and the local entry {own.shape}")
        target = _target(local)
        device = _CPU if offload else device
        if target is None:
            made = torch.empty(spec.shape, dtype=own.dtype, device=_CPU if not spec.ndim else device)
            return cls(None, made, made)
        shape = local_shape_of(target, spec.shape, this_rank())
        if shape is None:
            return cls.nowhere(spec, local)
        part = parts_of(local)[0]
        if in_place and not part.is_meta and (part.device == _CPU or not offload):
            return cls(target, part.detach(), local)
        made = torch.empty(shape, dtype=part.dtype, device=device)
        return cls(target, made, with_parts(local, [made]))


def _target(local: Any) -> Target:
    """Say which part of the whole a local entry is; ``None`` for all."""
    if is_dtensor(local):
        return layout_of_dtensor(local)
    if not is_sharded_tensor(local):
        return None
    shards = local.local_shards()
    if len(shards) > 1:
        raise Unsupported(f"this rank has {len(shards)} shards of a ShardedTensor {spec_of_kind(local)}; use DTensor.")
    boxes = [(tuple(s.metadata.shard_offsets), tuple(s.metadata.shard_sizes)) for s in shards]
    return Pieces.of(spec_of_kind(local).ndim, [(box, [this_rank()]) for box in boxes])
