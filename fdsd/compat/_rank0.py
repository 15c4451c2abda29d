"""A state dict that only rank 0 has: its tensors as a source that lies there, and what the other ranks know of it."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fdsd.algebra.dtypes import copy_elements
from fdsd.algebra.lazy import Lazy
from fdsd.algebra.ops.leaves import Origin
from fdsd.algebra.spans import view_of
from fdsd.comms.wrappers import is_extra
from fdsd.compat._nested import Path, mapped, named
from fdsd.compat._verdict import in_words, raise_faults
from fdsd.data.errors import FdsdError, listing
from fdsd.data.protocols import Piece, World
from fdsd.data.region import Region
from fdsd.data.spec import TensorSpec, is_exact, known_spec, spec_of
from fdsd.data.statedict import StateDict
from fdsd.data.values import is_mapping
from fdsd.engine.asking import ask
from fdsd.layout.layout import Layout
from fdsd.layout.mesh import Mesh
from fdsd.layout.placement import Replicate

__all__ = ["RankZero", "announced", "announcement", "outline_of_model", "outline_of_tree"]

_THERE = Layout(Mesh({"rank": 1}, [0]), [Replicate()])


class RankZero:
    """Tensors that lie on rank 0.

    Args:
        tensors: On rank 0 the tensors, on others their specs.

    >>> RankZero({"a": torch.ones(2)}).find("a")
    Lazy(Origin, float32[2])
    """

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._tensors = {name: _detached(leaf) for name, leaf in tensors.items()}
        self._nodes: dict[str, Lazy] = {}

    def find(self, fqn: str) -> Lazy | None:
        """Give a tensor as an expression; ``None`` if there is none of this name."""
        found = self._nodes.get(fqn)
        if found is None and (spec := spec_of(self._tensors.get(fqn))) is not None:
            found = self._nodes[fqn] = Lazy(Origin(self, fqn, spec), (), [spec])
        return found

    def specs(self) -> StateDict[TensorSpec]:
        """Give the spec of each tensor."""
        return StateDict({name: TensorSpec(tuple(leaf.shape), leaf.dtype) for name, leaf in self._tensors.items()})

    def pieces(self, fqn: str) -> Sequence[Piece]:
        """Give the whole tensor as one piece of rank 0."""
        return [Piece(Region.whole(tuple(self._tensors[fqn].shape)), 0)]

    def placement(self, fqn: str) -> Layout:
        """Say that rank 0 has all of it."""
        return _THERE

    def local(self, fqn: str) -> torch.Tensor | None:
        """Give the tensor on rank 0, and nothing elsewhere."""
        leaf = self._tensors[fqn]
        return leaf if isinstance(leaf, torch.Tensor) else None

    def read(self, fqn: str, region: Region, out: torch.Tensor) -> None:
        """Copy a region, on rank 0.

        Raises:
            FdsdError: This is another rank.
        """
        local = self.local(fqn)
        if local is None:
            raise FdsdError(f"{fqn!r} is held by rank 0; give group=.")
        copy_elements(view_of(local, region), out)


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) and leaf.requires_grad else leaf


Outliner = Callable[[Any], tuple[Any, list[str]]]
"""Gives what other ranks are told of a state dict, with specs for tensors, and the names of tensors that are not
whole."""


def announced(state: Any, world: World, outliner: Outliner, fault: BaseException | None, what: str) -> Any:
    """Give, on rank 0 its own state dict, on others what it tells of it. Collective.

    See ``announcement`` for the rest.
    """
    pickled = announcement(state, world, outliner, fault, what)
    return state if world.rank == 0 else pickle.loads(pickled)  # by another rank of this very program


def announcement(state: Any, world: World, outliner: Outliner, fault: BaseException | None, what: str) -> bytes:
    """Tell all ranks what rank 0 has; give that, pickled. Collective.

    Args:
        state: The state dict of this rank; only that of rank 0 counts.
        world: All ranks; rank 0 is one of them.
        outliner: What to tell.
        fault: What went wrong on this rank before.
        what: What is told, with what has to be equal on all ranks: the options.

    Raises:
        BaseException: The fault of this rank, which is that of all others.
        LoadError: Some ranks have a fault, or rank 0 has tensors that lie over ranks.
        RankDisagreement: The ranks ask for different things, or have other options.
    """
    said: Any = None if fault is None else in_words(fault)
    if said is None and world.rank == 0:
        said = _statement(state, outliner)
    told: list[Any] = ask(world, what, said, fault)
    faults = [one if isinstance(one, str) else None for one in told]
    raise_faults(dict(zip(world.ranks, faults, strict=True)), fault)
    pickled: bytes = told[world.ranks.index(0)]
    return pickled


def _statement(state: Any, outliner: Outliner) -> bytes | str:
    try:
        outline, sharded = outliner(state)
        pickled = pickle.dumps(outline)
    except Exception as error:  # whatever an object of the user's raises
        return f"an entry that is no tensor cannot be sent to other ranks: {error}"
    if not sharded:
        return pickled
    return (
        f"rank 0 gives whole tensors, and these lie over ranks: {listing(sharded)}. Gather them first, or let each "
        "rank load what it has"
    )


def outline_of_model(state: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """Give the outline of a model's state dict: specs of its tensors; extra states as they are, tensors too."""
    made = OrderedDict([(name, _outlined(name, value) if is_exact(value) else value) for name, value in state.items()])
    if (metadata := getattr(state, "_metadata", None)) is not None:
        made._metadata = metadata  # type: ignore[attr-defined]  # torch's own convention
    return made, [name for name, value in made.items() if isinstance(value, torch.Tensor) and not is_exact(value)]


def _outlined(name: Any, tensor: torch.Tensor) -> Any:
    if is_extra(name):
        return tensor.detach().cpu().clone()  # a module may know nothing of it before it gets it, not even its shape
    return _spec(tensor)


def outline_of_tree(state: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """Give the outline of a nested state dict of optimizers: specs of the slots; tensors elsewhere as they are."""
    sharded: list[str] = []

    def outlined(path: Path, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if not is_exact(leaf):
            sharded.append(named(path))
        return _spec(leaf) if _is_slot(state, path) else leaf.detach().cpu().clone()

    return mapped(state, outlined), sharded


def _is_slot(state: Any, path: Path) -> bool:
    """Tell what is delivered by itself: not options of groups, such as learning rates, nor what stands in lists."""
    if path[0] != "state" and not str(path[0]).startswith("state."):
        return False
    if any(isinstance(key, int) for key in path[2:]):
        for key in path:
            if not is_mapping(state):
                return False
            state = state[key]
    return True


def _spec(tensor: torch.Tensor) -> TensorSpec:
    return known_spec(tensor.shape, tensor.dtype)  # what is shared is told once
