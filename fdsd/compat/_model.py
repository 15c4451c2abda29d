"""Reading a model as a state dict: all names, those of submodules, or those that train. Nothing is sent here."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from typing import Any, cast

from torch import nn
from torch.nn.parameter import is_lazy

from fdsd.comms.live import Modules
from fdsd.comms.modules import is_dtensor, leaf_of, read_modules
from fdsd.compat._errors import LoadError, NoMapping
from fdsd.compat._flats import shown
from fdsd.compat._fqns import prefix_of
from fdsd.compat._options import StateDictOptions, reading_model
from fdsd.compat._plain import plain_values
from fdsd.data.errors import NameConflict, UnknownName, listing

__all__ = [
    "expected_names",
    "live_state",
    "live_values",
    "of_submodules",
    "read_model",
    "refuse_empty",
    "submodule_prefixes",
]


def read_model(model: Any, options: StateDictOptions) -> Modules:
    """Read the tables of a live model.

    Raises:
        NoMapping: It is no module.
    """
    if not isinstance(model, nn.Module):
        raise NoMapping(f"The model is a torch.nn.Module, not {type(model).__name__}.")
    return read_modules(model, fqn_modifiers=options.dsd_fqn_modifiers)


def expected_names(modules: Modules, options: StateDictOptions) -> Collection[str]:
    """Give the names that a state dict of the model has, in order: without frozen parameters, if they are ignored.

    >>> linear = nn.Linear(1, 1)
    >>> _ = linear.bias.requires_grad_(False)
    >>> list(expected_names(read_modules(linear), StateDictOptions(ignore_frozen_params=True)))
    ['weight']
    """
    if not options.ignore_frozen_params:
        return modules.names
    tensors = modules.tensors
    frozen = {live.tied_to or name for name, live in tensors.items() if live.kind == "parameter" and not live.trainable}
    return [
        name for name in modules.names if (tensors[name].tied_to or name if name in tensors else name) not in frozen
    ]


def live_state(model: Any, options: StateDictOptions) -> OrderedDict[str, Any]:
    """Give the state dict of the live values. Collective, if FSDP1 has flat parameters.

    >>> list(live_state(nn.Linear(1, 1), StateDictOptions()))
    ['weight', 'bias']
    """
    if isinstance(model, nn.Module) and not options.ignore_frozen_params:
        found = plain_values(model, whole=options.full_state_dict)
        if found is not None:
            return found
    modules = read_model(model, options)
    return live_values(modules, expected_names(modules, options), options)


def live_values(modules: Modules, names: Collection[str], options: StateDictOptions) -> OrderedDict[str, Any]:
    """Give the state dict of the live values, with the versions of modules, as ``nn.Module.state_dict`` does.

    Collective, if FSDP1 has flat parameters.

    >>> live_values(read_modules(nn.Linear(1, 1)), ["bias"], StateDictOptions())["bias"].requires_grad
    False
    """
    tensors, extra = modules.tensors, modules.extra
    values: dict[str, Any] = {}
    has_flats = False
    for name in names:
        live = tensors.get(name)
        if live is None:
            values[name] = extra[name].value
        elif live.flat is not None:
            has_flats = True  # what is made of a tied one is made once
            values[name] = values[live.tied_to] if live.tied_to in values else leaf_of(live)
        elif live.dtype is not None:
            values[name] = leaf_of(live)
        elif options.full_state_dict and is_dtensor(live.tensor):
            values[name] = live.tensor  # it is gathered anyway, and to detach one takes long
        else:  # one of a lazy module that has not run has nothing to detach
            values[name] = live.tensor if is_lazy(live.tensor) else live.tensor.detach()
    if has_flats:
        how = reading_model(options)
        values = dict(shown({None: values}, modules, options, how, rank_0_only=options.cpu_offload)[None])
    made = OrderedDict(values)
    made._metadata = OrderedDict(modules.metadata)  # type: ignore[attr-defined]  # torch's own convention
    return made


def submodule_prefixes(model: nn.Module, submodules: Any, options: StateDictOptions) -> list[str] | None:
    """Give the prefixes of the names of submodules; ``None`` if there are none.

    Raises:
        UnknownName: One is no part of the model.
    """
    if not submodules:
        return None
    warnings.warn(
        "Getting submodules only model/optim state_dict is deprecated and will be removed in 2.5. This feature can be "
        "achieved by manually filtering out the state_dict returned from get_state_dict.",
        FutureWarning,
        stacklevel=3,
    )
    wanted = set(submodules)
    named: Iterable[tuple[str, nn.Module]] = cast("Any", model).named_modules()
    paths = {module: path for path, module in named if module in wanted}
    if strays := [type(module).__name__ for module in wanted if module not in paths]:
        raise UnknownName(f"submodules: {listing(strays)} are no part of this {type(model).__name__}.")
    return [prefix_of(model, path, options.dsd_fqn_modifiers) for path in paths.values()]


def of_submodules(state: Mapping[str, Any], prefixes: list[str], options: StateDictOptions) -> dict[str, Any]:
    """Choose the names with one of the prefixes; without them, if the options say so.

    Raises:
        NameConflict: Two names are the same without their prefixes.

    >>> of_submodules({"a.w": 1, "b.w": 2}, ["a."], StateDictOptions(keep_submodule_prefixes=False))
    {'w': 1}
    """
    chosen = {name: prefix for name in state for prefix in prefixes if name.startswith(prefix)}
    if options.keep_submodule_prefixes:
        return {name: state[name] for name in chosen}
    made: dict[str, str] = {}
    for name, prefix in chosen.items():
        first = made.setdefault(name[len(prefix) :], name)
        if first != name:
            raise NameConflict(
                f"keep_submodule_prefixes=False: {listing([first, name])} are the same without their prefixes. "
                "Read the "
                "submodules one by one."
            )
    return {short: state[name] for short, name in made.items()}


def refuse_empty(state: Mapping[str, Any], options: StateDictOptions, *, excused: bool = False) -> None:
    """Raise for an empty state dict, unless the options allow one.

    Raises:
        LoadError: It is empty.

    >>> refuse_empty({}, StateDictOptions(strict=False))
    """
    excused = (
        excused
        or not options.strict
        or options.ignore_frozen_params
        or options.broadcast_from_rank0
        or (options.cpu_offload and options.full_state_dict)
    )
    if not state and not excused:
        raise LoadError(
            "The option indicates that model state_dict is required to save or load, but model state_dict is empty."
        )
