"""The kinds of tensors that state dicts of live modules hold, and what of each lies in this process.

The one place that tells DTensor and ShardedTensor from plain tensors, and that makes new ones like given ones.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parameter import is_lazy

from fdsd.comms.dtensors import local_of_dtensor, make_like, same_placements
from fdsd.data.spec import TensorSpec, known_spec
from fdsd.data.ties import tie_key

__all__ = [
    "Once",
    "is_sharded_tensor",
    "kind_of",
    "misfit",
    "parts_of",
    "reduced",
    "spec_of_kind",
    "with_parts",
]


def is_sharded_tensor(value: object) -> bool:
    """Tell whether a value is a ShardedTensor, as FSDP1 gives it.

    >>> is_sharded_tensor(torch.ones(2))
    False
    """
    return isinstance(value, ShardedTensor)


def parts_of(tensor: Any) -> list[torch.Tensor]:
    """Give the plain tensors of this process that a tensor consists of.

    Args:
        tensor: A DTensor (its local tensor), a ShardedTensor (its local shards, perhaps none), or any other tensor.

    >>> parts_of(torch.ones(2))
    [tensor([1., 1.])]
    """
    if isinstance(tensor, DTensor):
        return [local_of_dtensor(tensor)]
    if isinstance(tensor, ShardedTensor):
        return [shard.tensor for shard in tensor.local_shards()]
    return [tensor]


def spec_of_kind(tensor: Any) -> TensorSpec:
    """Give the spec of the whole tensor; torch warns of ShardedTensor whenever one is asked by way of its attributes.

    >>> spec_of_kind(torch.ones(2))
    TensorSpec((2,), torch.float32)
    """
    if isinstance(tensor, ShardedTensor):
        metadata = tensor.metadata()
        return known_spec(metadata.size, metadata.tensor_properties.dtype)
    return known_spec(tensor.shape, tensor.dtype)


def with_parts(like: Any, parts: Sequence[torch.Tensor]) -> Any:
    """Make a tensor of other parts, of the class and layout of a given one.

    Args:
        like: A DTensor, a ShardedTensor, or any other tensor.
        parts: As many as it has, of the same shapes.

    >>> with_parts(torch.ones(2), [torch.zeros(2)])
    tensor([0., 0.])
    """
    if isinstance(like, DTensor):
        return make_like(like, parts[0])
    return _sharded_like(like, parts) if isinstance(like, ShardedTensor) else parts[0]


def _sharded_like(like: Any, parts: Sequence[torch.Tensor]) -> Any:
    metadata = copy.deepcopy(like.metadata())
    own: list[Any] = [copy.deepcopy(shard.metadata) for shard in like.local_shards()]
    for each in (*metadata.shards_metadata, *own):
        each.placement._device = parts[0].device  # a shard that says another device than its tensor's is refused
    make: Any = ShardedTensor
    return make._init_from_local_shards_and_global_metadata(
        [Shard(part, of) for part, of in zip(parts, own, strict=True)],
        sharded_tensor_metadata=metadata,
        process_group=like._process_group,
        init_rrefs=like._init_rrefs,
    )


def kind_of(tensor: Any) -> type[torch.Tensor]:
    """Give the class that matters here: DTensor, ShardedTensor, or Tensor for all others.

    >>> kind_of(torch.nn.Parameter(torch.ones(2)))
    <class 'torch.Tensor'>
    """
    return next((kind for kind in (DTensor, ShardedTensor) if isinstance(tensor, kind)), torch.Tensor)


def misfit(source: Any, target: Any) -> str | None:
    """Say why the parts of one tensor cannot be copied to those of another, one by one; ``None`` if they can.

    >>> misfit(torch.ones(5, 1), torch.ones(5, 4))
    'it has the shape (5, 1) against (5, 4)'
    """
    kind = kind_of(source)
    if kind is not kind_of(target):
        return f"it is a {kind.__name__} against a {kind_of(target).__name__}"
    whole, other = spec_of_kind(source).shape, spec_of_kind(target).shape
    if whole != other:
        return f"it has the shape {whole} against {other}"
    ours, theirs = parts_of(source), parts_of(target)
    if kind is DTensor:
        mesh, theirs_mesh = source.device_mesh, target.device_mesh
        same_mesh = mesh == theirs_mesh or torch.equal(mesh.mesh, theirs_mesh.mesh)
        if not same_mesh or not same_placements(source.placements, target.placements):
            return f"it lies as {source.placements} against {target.placements}, or over other ranks"
    shapes = [[tuple(part.shape) for part in parts] for parts in (ours, theirs)]
    return None if shapes[0] == shapes[1] else f"the local parts have the shapes {shapes[0]} against {shapes[1]}"


def reduced(tensor: Any) -> Any:
    """Add up partial sums of a DTensor, which are values yet to be computed, by torch's own means."""
    whole = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
    return tensor.detach().redistribute(placements=whole)


class Once:
    """Changes tensors, tied ones once, so that what was tied stays tied.

    >>> w = torch.ones(2)
    >>> once = Once(torch.clone)
    >>> once(w) is once(w)
    True
    """

    def __init__(self, change: Callable[[Any], Any]) -> None:
        self._change = change
        self._made: dict[Hashable, Any] = {}
        self._alive: list[Any] = []

    def __call__(self, tensor: Any) -> Any:
        """Give the changed tensor; one of a lazy module that has not run, which has no elements yet, as it is."""
        if is_lazy(tensor):
            return tensor
        key = tuple([tie_key(part) for part in parts_of(tensor)])
        if not key or None in key:
            return self._change(tensor)
        whole = (kind_of(tensor), spec_of_kind(tensor), key)  # one shard may be that of different wholes
        if whole not in self._made:
            made = self._change(tensor)
            if made is tensor:
                return tensor
            self._made[whole] = made
            self._alive.append(tensor)  # keys hold ids, which must not be used again
        return self._made[whole]
