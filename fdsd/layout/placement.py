"""`Shard` and `Replicate`: what one mesh axis does to a tensor; torch's own placements are understood too.

torch's classes are told by their qualified names, so that nothing of ``torch.distributed`` is imported.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from attrs import field, frozen

from fdsd.data.errors import BadFile, SpecMismatch, Unsupported
from fdsd.data.values import is_dict, is_sequence
from fdsd.layout.mesh import whole

__all__ = ["Placement", "Replicate", "Shard", "Strided", "placement_of"]

Parts = int | tuple[int, ...] | None


def _to_dim(dim: Any) -> int:
    number = whole(dim)
    if number is None:
        raise SpecMismatch(f"Shard: a dim is a whole number, not {dim!r}.")
    return number


def _to_parts(parts: int | Iterable[int] | None) -> Parts:
    if parts is None:
        return None
    number = whole(parts)
    if number is not None:
        if number < 1:
            raise SpecMismatch(f"Shard: parts is how many there are, at least 1, or their sizes; not {parts!r}.")
        return None if number == 1 else number
    given: Any = parts
    sizes = [whole(size) for size in given] if is_sequence(given) else []
    made = tuple([size for size in sizes if size is not None and size >= 0])
    if not made or len(made) != len(sizes):
        raise SpecMismatch(f"Shard: parts is how many there are, at least 1, or their sizes; not {parts!r}.")
    return made


@frozen(repr=False, cache_hash=True)
class Shard:
    """An axis along which a dim is cut by torch's chunk rule: equal parts, rounded up, the last ones less or empty.

    Args:
        dim: The dim; negative ones count from the last.
        parts: For fused tensors: parts of what the axis cuts that are sharded each by itself, so that a rank holds
            a piece of every part, one after the other. Their sizes, or how many there are (cut by the same rule).

    Raises:
        SpecMismatch: ``dim`` is no whole number, or ``parts`` neither a count nor sizes.

    >>> Shard(0)
    Shard(0)
    >>> Shard(-1, parts=[6, 2])
    Shard(-1, parts=(6, 2))
    """

    dim: int = field(converter=_to_dim)
    parts: Parts = field(default=None, converter=_to_parts, kw_only=True)

    def __repr__(self) -> str:
        return f"Shard({self.dim})" if self.parts is None else f"Shard({self.dim}, parts={self.parts})"


@frozen(cache_hash=True)
class Replicate:
    """An axis along which every rank holds the same.

    >>> Replicate()
    Replicate()
    """


@frozen
class Strided:
    """torch's ``_StridedShard``, before a layout has read it: the dim is cut into ``split_factor`` chunks first."""

    dim: int
    split_factor: int


Placement = Shard | Replicate

_MODULES = ("torch.distributed.", "torch._C._distributed")


def _torch_name(kind: type[Any]) -> str | None:
    """Give the name by which torch's placements are known, of the class or of its nearest base."""
    for base in kind.__mro__:
        name = base.__qualname__.rpartition(".")[2]
        known = name in ("Shard", "Replicate", "_StridedShard", "StridedShard") or name.endswith("Partial")
        if known and base.__module__.startswith(_MODULES):
            return name
    return None


def placement_of(value: Any, where: str = "a placement") -> Placement | Strided:
    """Read a placement: one of ours, or torch's own.

    Args:
        value: The placement.
        where: How an error names it.

    Raises:
        Unsupported: It is a ``Partial``, or no placement.

    >>> placement_of(Shard(1))
    Shard(1)
    """
    if isinstance(value, Shard | Replicate | Strided):
        return value
    name = _torch_name(value.__class__)
    if name == "Replicate":
        return Replicate()
    if name == "Shard":
        return Shard(value.dim)
    if name is not None and name.endswith("StridedShard"):
        return Strided(_to_dim(value.dim), int(value.split_factor))
    if name is not None:
        raise Unsupported(
            f"{where} is {value!r}: the ranks hold summands of the tensor, not parts of it, and adding them up is "
            "no rewrite. Redistribute it to Replicate() or Shard(dim) first."
        )
    raise Unsupported(f"{where} is {value!r}, of type {type(value).__qualname__}. Give Shard(dim) or Replicate().")


def placement_data(value: Placement) -> Any:
    """Give a placement as data that JSON can hold.

    >>> placement_data(Replicate()), placement_data(Shard(0)), placement_data(Shard(0, parts=2))
    ('replicate', {'shard': 0}, {'shard': 0, 'parts': 2})
    """
    if isinstance(value, Replicate):
        return "replicate"
    parts = list(value.parts) if isinstance(value.parts, tuple) else value.parts
    return {"shard": value.dim} if parts is None else {"shard": value.dim, "parts": parts}


def placement_from_data(data: Any) -> Placement:
    """Read what ``placement_data`` gave.

    Raises:
        BadFile: It is no such data.

    >>> placement_from_data({"shard": 0, "parts": [6, 2]})
    Shard(0, parts=(6, 2))
    """
    if data == "replicate":
        return Replicate()
    if not is_dict(data) or not {"shard"} <= data.keys() <= {"shard", "parts"}:
        raise BadFile(f"{data!r} is no placement: neither 'replicate' nor an object with 'shard' and perhaps 'parts'.")
    try:
        return Shard(data["shard"], parts=data.get("parts"))
    except SpecMismatch as error:
        raise BadFile(str(error)) from error
