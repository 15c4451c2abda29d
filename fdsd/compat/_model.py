"""Reading a model as a state dict: all names, those of submodules, or those that train. Nothing is sent here."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from typing import Any, cast

from attrs import frozen
from torch import nn
from torch.nn.parameter import is_lazy

from fdsd.comms.live import Modules
from fdsd.comms.modules import is_dtensor, leaf_of, read_modules
from fdsd.compat._errors import LoadError, NoMapping
from fdsd.compat._flats import has_flats, shown
from fdsd.compat._fqns import prefix_of
from fdsd.compat._options import StateDictOptions, reading_model
from fdsd.compat._plain import plain_values
from fdsd.data.errors import NameConflict, UnknownName, listing

__all__ = [
    "Read",
    "expected_names",
    "live_values",
    "names_below",
    "read_model",
    "refuse_empty",
    "submodule_prefixes",
    "warn_of_submodules",
]


def read_model(model: Any, options: StateDictOptions) -> Modules:
    """Read the tables of a live model.

    Raises:
        NoMapping: It is no module.
    """
    if not isinstance(model, nn.Module):
        raise NoMapping(f"The model is a torch.nn.Module, not {type(model).__name__}.")
    return read_modules(model, fqn_modifiers=options.dsd_fqn_modifiers)


def _with_versions(values: Mapping[str, Any], metadata: Mapping[str, Any]) -> OrderedDict[str, Any]:
    made = OrderedDict(values)
    made._metadata = OrderedDict(metadata)  # type: ignore[attr-defined]  # torch's own convention
    return made


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


@frozen(eq=False)
class Read:
    """What a getter has read on this rank, before any other rank is asked for anything.

    Attributes:
        values: Live values by name; what lies in flat parameters of FSDP1 is lazy.
        modules: The tables of the model, if it took more than a walk to read it.
        names: For each name that is wanted the one in the model; ``None`` for all, as they are.
    """

    values: OrderedDict[str, Any]
    modules: Modules | None
    names: Mapping[str, str] | None

    @classmethod
    def of(cls, model: Any, submodules: Any, options: StateDictOptions) -> Read:
        """Read a model, or the part of it at and below some submodules.

        Raises:
            LoadError: There is nothing in it.
            UnknownName: A submodule is no part of the model.

        >>> list(Read.of(nn.Linear(1, 1), None, StateDictOptions()).values)
        ['weight', 'bias']
        """
        values = modules = names = None
        if isinstance(model, nn.Module) and not options.ignore_frozen_params:
            values = plain_values(model, whole=options.full_state_dict)
        if values is None:
            modules = read_model(model, options)
            values = live_values(modules, expected_names(modules, options), options)
        if submodules:
            names = names_below(values, submodule_prefixes(model, submodules, options), options)
        refuse_empty(values, options, excused=names is not None)
        return cls(values, modules, names)

    def shown(self, options: StateDictOptions) -> dict[str, Any]:
        """Give the values as torch shows them. Collective, if tensors lie in flat parameters of FSDP1."""
        values: dict[str, Any] = self.values
        if self.names is not None:
            values = {fqn: values[fqn] for fqn in self.names.values()}
        if self.modules is not None and has_flats(self.modules):
            how, for_0 = reading_model(options), options.cpu_offload
            found = shown({None: values}, self.modules, options, how, rank_0_only=for_0)
            values = _with_versions(found[None], self.modules.metadata)
        if self.names is not None:
            return {name: values[fqn] for name, fqn in self.names.items()}
        return values


def live_values(modules: Modules, names: Collection[str], options: StateDictOptions) -> OrderedDict[str, Any]:
    """Give the state dict of the live values, with the versions of modules, as ``nn.Module.state_dict`` does.

    What lies in flat parameters of FSDP1 is lazy.

    >>> live_values(read_modules(nn.Linear(1, 1)), ["bias"], StateDictOptions())["bias"].requires_grad
    False
    """
    tensors, extra = modules.tensors, modules.extra
    values: dict[str, Any] = {}
    for name in names:
        live = tensors.get(name)
        if live is None:
            values[name] = extra[name].value
        elif live.flat is not None:  # what is made of a tied one is made once
            values[name] = values[live.tied_to] if live.tied_to in values else leaf_of(live)
        elif live.dtype is not None:
            values[name] = leaf_of(live)
        elif options.full_state_dict and is_dtensor(live.tensor):
            values[name] = live.tensor  # it is gathered anyway, and to detach one takes long
        else:  # one of a lazy module that has not run has nothing to detach
            values[name] = live.tensor if is_lazy(live.tensor) else live.tensor.detach()
    return _with_versions(values, modules.metadata)


def warn_of_submodules(submodules: Any) -> None:
    """Warn of an argument that is going to go."""
    if submodules:
        warnings.warn(
            "Getting submodules only model/optim state_dict is deprecated and will be removed in 2.5. This feature "
            "can be achieved by manually filtering out the state_dict returned from get_state_dict.",
            FutureWarning,
            stacklevel=4,  # from here through a getter and torch's no_grad
        )


def submodule_prefixes(model: nn.Module, submodules: Any, options: StateDictOptions) -> list[str]:
    """Give the prefixes of the names of submodules.

    Raises:
        UnknownName: One is no part of the model.
    """
    wanted = set(submodules)
    named: Iterable[tuple[str, nn.Module]] = cast("Any", model).named_modules()
    paths = {module: path for path, module in named if module in wanted}
    if strays := [type(module).__name__ for module in wanted if module not in paths]:
        raise UnknownName(f"submodules: {listing(strays)} are no part of this {type(model).__name__}.")
    return [prefix_of(model, path, options.dsd_fqn_modifiers) for path in paths.values()]


def names_below(names: Iterable[str], prefixes: list[str], options: StateDictOptions) -> dict[str, str]:
    """Choose the names with one of the prefixes, and say for each, as the options want it, which one it is.

    Raises:
        NameConflict: Two names are the same without their prefixes.

    >>> names_below(["a.w", "b.w"], ["a."], StateDictOptions(keep_submodule_prefixes=False))
    {'w': 'a.w'}
    """
    chosen = {name: prefix for name in names for prefix in prefixes if name.startswith(prefix)}
    if options.keep_submodule_prefixes:
        return {name: name for name in chosen}
    made: dict[str, str] = {}
    for name, prefix in chosen.items():
        first = made.setdefault(name[len(prefix) :], name)
        if first != name:
            raise NameConflict(
                f"keep_submodule_prefixes=False: {listing([first, name])} are the same without their prefixes. Read "
                "the submodules one by one."
            )
    return made


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
