"""The errors of the drop-ins: the builtin classes and the words that users of torch match on. Nothing else."""

from __future__ import annotations

from fdsd.data.errors import FdsdError

__all__ = ["LoadError", "NoMapping", "OptionError", "ValueTypeError"]


class OptionError(FdsdError, ValueError):
    """Options, or devices, that do not go together."""


class LoadError(FdsdError, RuntimeError):
    """A state dict does not fit the model or the optimizer."""


class ValueTypeError(FdsdError, ValueError):
    """A value of a type that gathered and offloaded state dicts do not hold."""


class NoData(FdsdError, NotImplementedError):
    """Tensors on the meta device were to be copied; of the class that torch raises then."""


class NoMapping(FdsdError, TypeError):
    """Something else than a state dict, a module or an optimizer was given."""
