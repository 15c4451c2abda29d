"""`LiveTensor` and `Modules`: what was read of live modules, as tables by canonical name.

How the tables are made is ``modules``' business; nothing here walks a module, or changes one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from attrs import field, frozen
from torch import nn

from fdsd.comms.hooks import Machine
from fdsd.data.errors import Unsupported
from fdsd.data.spec import TensorSpec, spec_of

if TYPE_CHECKING:
    from fdsd.comms.fsdp1 import Flat, FlatView

__all__ = ["ExtraState", "LiveTensor", "Modules", "Role"]

Role = Literal["parameter", "buffer"]


class _Fields(NamedTuple):
    fqn: str
    kind: Role
    persistent: bool
    trainable: bool
    tensor: torch.Tensor
    owner: nn.Module
    name: str
    tied_to: str | None = None
    flat: FlatView | None = None
    dtype: torch.dtype | None = None
    is_memory: bool = True


class LiveTensor(_Fields):
    """One tensor of a model, under one of its names. Compares by identity.

    A named tuple rather than a frozen class, since that costs a third and models have 100,000 of them.

    Args:
        fqn: The canonical name: that in the unwrapped model.
        kind: ``"parameter"`` or ``"buffer"``.
        persistent: Whether it is part of the state dict.
        trainable: Whether a parameter requires gradients.
        tensor: The live object, as an optimizer has it; of FSDP1 the view of the local shard, or the flat parameter.
        owner: The module that has it.
        name: Its name in ``owner``.
        tied_to: The first name of the same tensor, if this is another one.
        flat: Where it lies in a flat parameter of FSDP1.
        dtype: The dtype in which the state dict has it, where that is not the tensor's own.
        is_memory: Whether writing into ``tensor`` changes the model. If not, code of the module's own has made the
            value for the state dict, and ``Modules.through`` says which.
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return f"LiveTensor({self.fqn!r}, {self.kind!r}, {self.tensor.dtype}, tied_to={self.tied_to!r})"

    @property
    def spec(self) -> TensorSpec:
        """The shape and dtype of the whole tensor, as the state dict has it.

        Raises:
            Unsupported: A lazy module has not made it yet, or it is no grid of elements.
        """
        if self.flat is not None:
            return self.flat.spec
        try:
            spec = spec_of(self.tensor)
        except Unsupported as error:
            raise Unsupported(f"{self.fqn!r}: {error}") from None
        assert spec is not None
        return spec if self.dtype is None else spec.with_dtype(self.dtype)


class ExtraState(NamedTuple):
    """What a state dict holds beside tensors of the model, and the module that it belongs to."""

    value: Any
    owner: nn.Module


@frozen(eq=False)
class Modules:
    """All tensors of a model, or of its parts, by canonical name.

    Args:
        parts: The modules that were read.
        tensors: Each tensor by name, in the order of the state dict; non-persistent ones and tied names too.
        extra: The extra states by name, and what else hooks put into the state dict.
        names: The names of the state dict, in its order: persistent tensors and extra states.
        metadata: The module versions, by canonical prefix.
        through: For names that have to be loaded by code of a module's own: that module.
        others: Non-persistent buffers whose name another part has too.
    """

    parts: tuple[nn.Module, ...]
    tensors: dict[str, LiveTensor]
    extra: dict[str, ExtraState]
    names: tuple[str, ...]
    metadata: dict[str, Any]
    through: dict[str, Machine]
    others: tuple[LiveTensor, ...]
    _fqns: dict[int, str] = field(repr=False)
    _aliases: dict[str, list[str]] = field(repr=False)
    _flats: dict[int, Flat] = field(repr=False)

    def fqn_of(self, parameter: torch.Tensor) -> str | None:
        """Give the first name of a live tensor; ``None`` for one that is not of this model, and a flat parameter."""
        return self._fqns.get(id(parameter))

    def names_of(self, parameter: torch.Tensor) -> tuple[str, ...]:
        """Give all names of a live tensor, the first one first."""
        first = self._fqns.get(id(parameter))
        return () if first is None else (first, *self._aliases.get(first, ()))

    def aliases_of(self, fqn: str) -> tuple[str, ...]:
        """Give the other names of the tensor whose first name this is."""
        return tuple(self._aliases.get(fqn, ()))

    def flat_of(self, parameter: torch.Tensor) -> Flat | None:
        """Give what lies in a flat parameter of FSDP1; ``None`` for any other tensor."""
        return self._flats.get(id(parameter))

    def machines(self) -> tuple[Machine, ...]:
        """Give the modules by whose own code some names have to be loaded, each once."""
        return tuple({id(machine): machine for machine in self.through.values()}.values())
