"""Applying an operation to leaves of any kind.

A leaf that is wholly here runs now; a leaf that is not stays lazy; a spec gives a spec. The leaf's type decides,
never what this process happens to hold. Tensor subclasses are looked up by qualified name, so that their handlers
are loaded only when such a leaf is met; unknown ones are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from importlib import import_module
from typing import Any, NoReturn

import torch

from fdsd.algebra.lazy import Lazy, Op
from fdsd.algebra.memory import MemorySource, SpecSource
from fdsd.algebra.ops.call import Call, Item
from fdsd.algebra.ops.leaves import Constant, Origin
from fdsd.data.errors import SpecMismatch, Unsupported, listing
from fdsd.data.spec import OpaqueSpec, TensorSpec, VirtualTensor, is_exact, spec_of
from fdsd.data.statedict import StateDict, require_mapping
from fdsd.data.ties import place_of, place_over_ranks, tie_key

__all__ = ["HANDLERS", "MAPPERS", "Applier", "apply", "constant", "defer", "defer_leaf", "opaque_specs", "refuse_kinds"]

HANDLERS: dict[str, Callable[[Any], Lazy] | str] = {
    "torch.distributed.tensor.DTensor": "fdsd.comms.dtensors:lazy_dtensor",
    "torch.distributed._tensor.DTensor": "fdsd.comms.dtensors:lazy_dtensor",
    "torch.distributed.tensor._api.DTensor": "fdsd.comms.dtensors:lazy_dtensor",
    "torch.distributed._shard.sharded_tensor.api.ShardedTensor": "fdsd.comms.sharded_tensors:lazy_sharded_tensor",
    "fdsd.layout.sharded.Sharded": "fdsd.layout.sharded:lazy_sharded",
}
"""How to make a lazy tensor of a tensor subclass, by the qualified name of the class: a function, or where it is."""

MAPPERS: dict[str, Callable[[Op, Sequence[Any]], Any] | str] = {
    "fdsd.layout.sharded.Sharded": "fdsd.layout.sharded:map_sharded",
}
"""How a pointwise operation runs on leaves of which one is of a class, by its qualified name; ``NotImplemented`` if it
runs like any other operation."""


def defer_leaf(leaf: Any, fqn: str = "tensor") -> Any:
    """Make a lazy tensor of a tensor or a spec; anything else stays as it is.

    >>> defer_leaf(torch.ones(2))
    Lazy(Origin, float32[2])
    >>> defer_leaf("extra")
    'extra'
    """
    if isinstance(leaf, Lazy):
        return leaf
    if isinstance(leaf, TensorSpec):
        return Lazy(Origin(SpecSource({fqn: leaf}), fqn, leaf), (), [leaf])
    if is_exact(leaf):
        spec = spec_of(leaf)
        assert spec is not None
        return Lazy(Origin(MemorySource({fqn: leaf}), fqn, spec), (), [spec])
    if isinstance(leaf, torch.Tensor):
        made = _handler(leaf)(leaf)
        if not hasattr(getattr(made.op, "source", None), "place"):  # which tells it when it is asked
            made._place = place_over_ranks(leaf)  # pyright: ignore[reportPrivateUsage]  # only here, when it is new
        return made
    if isinstance(leaf, VirtualTensor):
        return _handler(leaf)(leaf)
    return leaf


def defer(state: Mapping[str, Any]) -> StateDict[Any]:
    """Make every tensor of a state lazy; other objects stay as they are. Nothing is read or copied.

    Args:
        state: Leaves by FQN: tensors, specs (known by shape alone) or lazy tensors.

    Returns:
        The same names in the same order; tied names share one lazy tensor.

    Law: ``materialize(f(defer(x)))`` equals ``f(x)``.

    >>> defer({"a": torch.ones(2)})["a"]
    Lazy(Origin, float32[2])
    """
    made: dict[str, Any] = {}
    seen: dict[Hashable, Any] = {}
    given = require_mapping(state, "defer")
    try:
        for fqn, leaf in given.items():
            key = None if isinstance(leaf, Lazy) else tie_key(leaf)
            if key is None:
                made[fqn] = defer_leaf(leaf, fqn)
            else:
                if key not in seen:
                    seen[key] = defer_leaf(leaf, fqn)
                made[fqn] = seen[key]
    except Unsupported as error:
        refuse_kinds(given, "defer", error)
    return StateDict.trusted(made, getattr(state, "_metadata", None), getattr(state, "_history", ()), "lazy")


def refuse_kinds(leaves: Mapping[str, Any], verb: str, first: Unsupported) -> NoReturn:
    """Name all tensors of kinds that cannot be read.

    Args:
        leaves: Leaves by FQN.
        verb: How errors call the asker.
        first: What was raised for one of them.

    Raises:
        Unsupported: In the place of ``first``.
    """
    found: dict[str, list[str]] = {}
    for name, leaf in leaves.items():
        try:
            spec_of(leaf)
            defer_leaf(leaf, name)
        except Unsupported as error:
            found.setdefault(str(error), []).append(name)
    if not found:
        raise first
    raise Unsupported("; ".join([f"{verb}: {listing(names)}: {text}" for text, names in found.items()])) from first


def _kind(leaf: Any) -> str:
    return f"{type(leaf).__module__}.{type(leaf).__qualname__}"


def _loaded(table: dict[str, Any], kind: str) -> Any:
    """Give the function that a table has for a class; it is loaded when such a leaf is met, and not before."""
    found = table.get(kind)
    if isinstance(found, str):
        module, name = found.split(":")
        found = table[kind] = getattr(import_module(module), name)
    return found


def _handler(leaf: Any) -> Callable[[Any], Lazy]:
    kind = _kind(leaf)
    found: Callable[[Any], Lazy] | None = _loaded(HANDLERS, kind)
    if found is None:
        raise _opaque(kind)
    return found


def _opaque(kind: str) -> Unsupported:
    return Unsupported(
        f"A tensor of class {kind} can be renamed and chosen, but not computed on or rearranged: fdsd does not "
        "know how its elements are laid out. Convert it to a plain tensor first."
    )


def opaque_specs(state: Mapping[str, Any]) -> dict[str, OpaqueSpec]:
    """Give the specs of the tensors of a state that operations refuse, whose classes have no handler."""
    odd = {
        name: leaf
        for name, leaf in state.items()
        if isinstance(leaf, torch.Tensor) and not is_exact(leaf) and _kind(leaf) not in HANDLERS
    }
    return {name: OpaqueSpec(tuple(leaf.shape), leaf.dtype, cls=_kind(leaf)) for name, leaf in odd.items()}


def apply(op: Op, *leaves: Any) -> Any:
    """Apply an operation.

    Args:
        op: The operation.
        *leaves: Tensors, lazy tensors or specs; if any is a spec, the result is a spec.

    Returns:
        A tensor, a lazy tensor or a spec; a tuple of them, if the operation gives several.

    Raises:
        SpecMismatch: The shapes or dtypes do not fit.
        Unsupported: A leaf is no tensor, or of a class that fdsd cannot rearrange.

    >>> from fdsd.algebra.ops import Slice
    >>> apply(Slice(0, 1, 1), torch.arange(3)), apply(Slice(0, 1, 1), TensorSpec((3,), torch.int64))
    (tensor([1]), TensorSpec((1,), torch.int64))
    """
    found = [spec_of(leaf) for leaf in leaves]
    if odd := [type(leaf).__name__ for leaf, spec in zip(leaves, found, strict=True) if spec is None]:
        raise Unsupported(f"{op} works on tensors, not on {', '.join(odd)}. Leave such entries out by name.")
    for leaf in leaves:
        if isinstance(leaf, OpaqueSpec):
            raise _opaque(leaf.cls)
    given = [spec for spec in found if spec is not None]
    if leaves and all(map(is_exact, leaves)):
        devices = {str(leaf.device) for leaf in leaves}
        if len(devices) > 1:
            raise SpecMismatch(f"{op} got tensors on several devices: {listing(devices)}. Move them to one first.")
        if not isinstance(op, Call):  # a function's result is checked when it is there
            op.infer(*given)
        with torch.no_grad():
            return op.eager(*[leaf.detach() for leaf in leaves])
    if op.pointwise:
        for leaf in leaves:
            mapper = _loaded(MAPPERS, _kind(leaf)) if isinstance(leaf, VirtualTensor) else None
            if mapper is not None and (mapped := mapper(op, leaves)) is not NotImplemented:
                return mapped
    made = op.infer(*given)
    if any(isinstance(leaf, TensorSpec) for leaf in leaves):
        return _abstract(op, given, made)
    outputs = made if isinstance(made, tuple) else (made,)
    node = Lazy(op, [defer_leaf(leaf) for leaf in leaves], outputs)
    if len(outputs) == 1:
        return node
    return tuple([Lazy(Item(i), [node], [spec]) for i, spec in enumerate(outputs)])


def _abstract(op: Op, given: Sequence[TensorSpec], made: TensorSpec | tuple[TensorSpec, ...]) -> Any:
    """Carry over what is known of ties: a view lies where its input lies, anything else in memory of its own."""
    if isinstance(made, tuple):
        return tuple([TensorSpec(s.shape, s.dtype, tie=object()) for s in made])
    place = place_of(given[0]) if given and op.is_view else None
    tie: Hashable = None if place is None else op.view(place, given[0])
    if tie is None and given and all(spec.tie is not None for spec in given):
        tie = object()
    return TensorSpec(made.shape, made.dtype, tie=tie)


def constant(spec: TensorSpec, value: Any, *, like: Any = None) -> Any:
    """Give a tensor of one value: real beside a real tensor (on its device), a spec beside a spec, else lazy.

    >>> constant(TensorSpec((2,), torch.int8), 7, like=torch.ones(1))
    tensor([7, 7], dtype=torch.int8)
    """
    if isinstance(like, TensorSpec):
        return TensorSpec(spec.shape, spec.dtype, tie=object())
    op = Constant(spec, value)
    return op.eager().to(like.device) if is_exact(like) else Lazy(op, (), [spec])


class Applier:
    """Applies operations within one step, equal ones on tied leaves once, so that what was tied stays tied."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Any] = {}
        self._alive: list[Any] = []
        self._settled: dict[Hashable, Call] = {}

    def _settle(self, op: Call, leaves: Sequence[Any]) -> Call:
        """Find the specs of a function's results once for each spec of its inputs, unless it runs right now."""
        if op.specs is not None or all(map(is_exact, leaves)):
            return op
        specs = tuple([spec_of(leaf) for leaf in leaves])
        if (op, specs) not in self._settled:
            self._settled[op, specs] = op.settled(specs)
        return self._settled[op, specs]

    def constant(self, spec: TensorSpec, value: Any, *, like: Any) -> Any:
        """Give a tensor of one value beside ``like``; the same one each time, so that ties are kept."""
        place = str(like.device) if is_exact(like) else type(like).__name__
        key: Hashable = ("constant", spec, value, place)
        if key not in self._made:
            self._made[key] = constant(spec, value, like=like)
        return self._made[key]

    def once(self, what: Hashable, leaf: Any, make: Callable[[], Any]) -> Any:
        """Make something of a leaf, the same thing for all leaves that are tied to it."""
        tied = tie_key(leaf)
        if tied is None:
            return make()
        key = (what, tied)
        if key not in self._made:
            self._made[key] = make()
            self._alive.append(leaf)
        return self._made[key]

    def __call__(self, op: Op, *leaves: Any) -> Any:
        """Apply an operation; see ``apply``."""
        if isinstance(op, Call):
            op = self._settle(op, leaves)
        keys = tuple([tie_key(leaf) for leaf in leaves])
        if None in keys or not keys:
            return apply(op, *leaves)
        key = (type(op), op, keys, tuple([is_exact(leaf) for leaf in leaves]))
        if key not in self._made:
            self._made[key] = apply(op, *leaves)
            self._alive.extend(leaves)  # keys hold ids, which must not be used again
        return self._made[key]
