"""``StateDictOptions``, and the checks of it. Models, optimizers and process groups are unknown here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fdsd.compat._errors import OptionError

__all__ = ["StateDictOptions", "attempted", "checked", "reading_model", "reading_optimizers", "told"]

_WRITING = ("full_state_dict", "broadcast_from_rank0", "strict", "ignore_frozen_params")
_READING_MODEL = ("full_state_dict", "cpu_offload", "ignore_frozen_params")
_READING_OPTIMIZERS = ("full_state_dict", "cpu_offload", "broadcast_from_rank0", "flatten_optimizer_state_dict")


@dataclass
class StateDictOptions:
    """How state dicts are read and written.

    Args:
        full_state_dict: Whole tensors instead of the shards of each rank.
        cpu_offload: Tensors on the CPU. With ``full_state_dict``, only rank 0 gets them, and the others get ``{}``.
        ignore_frozen_params: Leave out parameters that do not require gradients, and their tied names; writing with
            the same option wants none of them.
        keep_submodule_prefixes: With ``submodules``, whether names keep the prefix of the submodule.
        strict: Whether missing and unexpected names are errors.
        broadcast_from_rank0: Write what rank 0 was given to all ranks; the others give ``{}``. Needs
            ``full_state_dict``.
        flatten_optimizer_state_dict: Optimizer state as ``state.<fqn>.<slot>`` and ``param_groups.<fqn>.<option>``.
        dsd_fqn_modifiers: The name of a method by which a module says which children do not show in names.

    >>> StateDictOptions(full_state_dict=True).strict
    True
    """

    full_state_dict: bool = False
    cpu_offload: bool = False
    ignore_frozen_params: bool = False
    keep_submodule_prefixes: bool = True
    strict: bool = True
    broadcast_from_rank0: bool = False
    flatten_optimizer_state_dict: bool = False
    dsd_fqn_modifiers: str = "_fqn_modifiers"


def checked(options: Any) -> StateDictOptions:
    """Give the options, or the defaults for none.

    Args:
        options: Ours, torch's own (of any version: fields that it lacks have their defaults), or ``None``.

    Raises:
        OptionError: ``broadcast_from_rank0`` without ``full_state_dict``, or no options at all.

    >>> checked(StateDictOptions(broadcast_from_rank0=True))
    Traceback (most recent call last):
        ...
    fdsd.compat._errors.OptionError: full_state_dict must be True when broadcast_from_rank0 is True.
    """
    given = StateDictOptions() if options is None else _ours(options)
    if given.broadcast_from_rank0 and not given.full_state_dict:
        raise OptionError("full_state_dict must be True when broadcast_from_rank0 is True.")
    return given


def _ours(options: Any) -> StateDictOptions:
    if isinstance(options, StateDictOptions):
        return options
    if not hasattr(options, "full_state_dict"):
        raise OptionError(f"options are StateDictOptions, not {type(options).__name__}.")
    defaults = vars(StateDictOptions())
    return StateDictOptions(**{name: getattr(options, name, default) for name, default in defaults.items()})


def reading_model(options: StateDictOptions) -> str:
    """Say what ranks ask each other for when they read a model, with the options that they have to give alike.

    >>> reading_model(StateDictOptions(full_state_dict=True))
    "a model's state dict, with StateDictOptions(full_state_dict=True)"
    """
    return f"a model's state dict, with {told(options, _READING_MODEL)}"


def reading_optimizers(options: StateDictOptions) -> str:
    """Say what ranks ask each other for when they read optimizers, with the options that they have to give alike.

    >>> reading_optimizers(StateDictOptions())
    "optimizers' state dict, with StateDictOptions()"
    """
    return f"optimizers' state dict, with {told(options, _READING_OPTIMIZERS)}"


def told(options: StateDictOptions, shared: Sequence[str] = _WRITING) -> str:
    """Show the options that all ranks have to give alike: when they load, if nothing else is said.

    >>> told(StateDictOptions(full_state_dict=True))
    'StateDictOptions(full_state_dict=True)'
    """
    if isinstance(options, _Refused):
        return f"options that do not hold: {options.why.rstrip('.')}"
    defaults = vars(StateDictOptions())
    given = [f"{name}={getattr(options, name)}" for name in shared if getattr(options, name) != defaults[name]]
    return f"StateDictOptions({', '.join(given)})"


@dataclass
class _Refused(StateDictOptions):
    """Stands for options that do not hold, while the other ranks hear of them: those that gather would wait."""

    why: str = ""


def attempted(options: Any) -> tuple[StateDictOptions, OptionError | None]:
    """Give the options, and what is wrong with them, for functions whose errors all ranks have to hear of.

    >>> attempted(None)[1] is None
    True
    """
    try:
        return checked(options), None
    except OptionError as error:
        meets_all = bool(getattr(options, "broadcast_from_rank0", False))
        return _Refused(full_state_dict=True, broadcast_from_rank0=meets_all, why=str(error)), error
