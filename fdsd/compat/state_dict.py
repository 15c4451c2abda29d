"""The drop-in for ``torch.distributed.checkpoint.state_dict``: changing the import is all that its users do.

Each function is a short pipeline over the parts beside it: read what is live, choose, gather; or compare, agree, write.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys  # pyright: ignore[reportPrivateUsage]  # what torch returns

from fdsd.comms.optimizer_templates import start
from fdsd.comms.worlds import default_world, has_group
from fdsd.compat._errors import LoadError, NoMapping
from fdsd.compat._fqns import FLAT_PARAM, WRAPPER_SEGMENTS, get_fqns
from fdsd.compat._hearing import heard, tables_of
from fdsd.compat._model import Read, warn_of_submodules
from fdsd.compat._model_loading import ModelLoading
from fdsd.compat._optim import OptimRead, as_osd, listed, own_methods
from fdsd.compat._optim_loading import OptimLoading
from fdsd.compat._options import StateDictOptions, attempted, reading_model, reading_optimizers
from fdsd.compat._state_dict_utils import _offload_state_dict_to_cpu
from fdsd.compat._types import (
    FQNS_T,
    DictValueType,
    ListDictValueType,
    OptimizerStateType,
    PrimitiveType,
    ValueType,
)
from fdsd.compat._whole_trees import whole_tree
from fdsd.data.errors import FdsdError

__all__ = [
    "FQNS_T",
    "DictValueType",
    "ListDictValueType",
    "OptimizerStateType",
    "PrimitiveType",
    "StateDictOptions",
    "ValueType",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]

_FLAT_PARAM = FLAT_PARAM
_PG = "param_groups"
_PARAMS = "params"
_STATE = "state"


def _get_fqns(  # pyright: ignore[reportUnusedFunction]  # imported by users
    model: nn.Module,
    name: str,
    dsd_fqn_modifiers: str = "_fqn_modifiers",
    skip_ddp_prefix: bool = True,
    skip_compiler_prefix: bool = True,
) -> FQNS_T:
    """Give the name that a tensor has in the unwrapped model; several names for a flat parameter of FSDP1.

    Args:
        model: The root module.
        name: A name in it.
        dsd_fqn_modifiers: The method by which a module says which child a shown name stands for.
        skip_ddp_prefix: Whether DDP's ``module`` goes.
        skip_compiler_prefix: Whether the compiler's ``_orig_mod`` goes.

    Raises:
        UnknownName: The model has no such name.

    >>> _get_fqns(nn.DataParallel(nn.Sequential(nn.Linear(1, 1))), "module.0.weight")
    {'0.weight'}
    """
    kept = {"module": skip_ddp_prefix, "_orig_mod": skip_compiler_prefix}
    return get_fqns(
        model, name, dsd_fqn_modifiers, WRAPPER_SEGMENTS - {segment for segment in kept if not kept[segment]}
    )


def _brought(state: dict[str, Any], options: StateDictOptions, asked: str, *, rank_0_only: bool) -> dict[str, Any]:
    """Give a state dict as it is; or whole, or on the CPU, or both."""
    if options.full_state_dict:
        only = (0,) if rank_0_only and has_group() else ()
        return whole_tree(state, cpu_offload=options.cpu_offload, ranks_only=only, asked=asked)
    return _offload_state_dict_to_cpu(state) if options.cpu_offload else state


@torch.no_grad()
def get_model_state_dict(
    model: nn.Module,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> dict[str, ValueType]:
    """Give the state dict of a model, by the names that it has without wrappers.

    Values are the live tensors, detached: DTensors where the model has them. With ``full_state_dict`` they are whole,
    on every rank; with ``cpu_offload`` besides, rank 0 has them on the CPU, and the other ranks get ``{}``.

    Args:
        model: The model, wrapped and sharded in any way.
        submodules: Deprecated: only the names at and below these.
        options: How; the defaults if left out.

    Raises:
        OptionError: The options do not go together.
        LoadError: The state dict is empty; or other ranks that gather cannot read theirs.
        RankDisagreement: Ranks that gather have other options.

    Law: ``set_model_state_dict(model, get_model_state_dict(model))`` changes nothing.

    >>> list(get_model_state_dict(nn.Linear(2, 1)))
    ['weight', 'bias']
    """
    warn_of_submodules(submodules)
    given, fault = attempted(options)
    asked = reading_model(given)
    read = heard(model, lambda: Read.of(model, submodules, given), asked, given, fault, submodules=submodules)
    return _brought(read.shown(given), given, asked, rank_0_only=given.cpu_offload)


@torch.no_grad()
def set_model_state_dict(
    model: nn.Module,
    model_state_dict: dict[str, ValueType],
    *,
    options: StateDictOptions | None = None,
) -> _IncompatibleKeys:
    """Write a state dict into a model, and leave the dict as it is.

    All ranks check first, and all raise the same error if anything does not fit on one; then nothing was written. Each
    rank gets its own part, in the dtype that it has. Tensors on the meta device get memory.

    Args:
        model: The model, wrapped and sharded in any way.
        model_state_dict: Values by name: DTensors for sharded tensors; whole tensors with ``full_state_dict``, on every
            rank, or with ``broadcast_from_rank0`` on rank 0.
        options: How; the defaults if left out.

    Returns:
        The names that were missing, and those that were not expected.

    Raises:
        LoadError: Names are missing or unexpected, and ``strict``; or shapes differ.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> set_model_state_dict(model, {"weight": torch.tensor([[1.0, 2.0]])})
    <All keys matched successfully>
    >>> model.weight.tolist()
    [[1.0, 2.0]]
    """
    given, fault = attempted(options)
    modules, odd = tables_of(model, given)
    return ModelLoading.prepared(model, modules, model_state_dict, given, fault=fault or odd).write()


@torch.no_grad()
def get_optimizer_state_dict(
    model: nn.Module,
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> OptimizerStateType:
    """Give the state dict of optimizers, by the names that their parameters have in the model.

    No optimizer is stepped, and nothing of one changes. One that has no state yet gives what it would start from, to be
    loaded into; LBFGS, which cannot tell, gives none.

    With ``full_state_dict`` and ``cpu_offload`` the other ranks than 0 get ``{}``; with FSDP1 and
    ``broadcast_from_rank0`` they get a dict without state and groups.

    Args:
        model: The model, wrapped and sharded in any way.
        optimizers: One or several, over all of the model or a part of it.
        submodules: Deprecated, and of no effect on optimizers.
        options: How; the defaults if left out.

    Raises:
        OptionError: The options do not go together.
        LoadError: There are no optimizers; or other ranks that gather cannot read theirs.
        RankDisagreement: Ranks that gather have other options.
        UnknownName: An optimizer has parameters that the model has not.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> get_optimizer_state_dict(model, torch.optim.SGD(model.parameters(), lr=0.1))["param_groups"][0]["params"]
    ['weight']
    """
    warn_of_submodules(submodules)
    several, fault = _given(optimizers, needed=True)
    return _of_optimizers(model, several, submodules, options, fault)


def _of_optimizers(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    submodules: Any,
    options: Any,
    fault: FdsdError | None,
) -> OptimizerStateType:
    """Give the state dict of optimizers; ``fault`` is what is wrong with them on this rank."""
    given, wrong = attempted(options)
    asked = reading_optimizers(given)
    with own_methods(optimizers):

        def reading() -> OptimRead:
            return OptimRead.of(model, optimizers, submodules, given)

        read = heard(model, reading, asked, given, wrong or fault, optimizers=optimizers)
        state: dict[str, Any] = as_osd(read.shown(given), given)
    made = _brought(state, given, asked, rank_0_only=read.is_for_rank_0(given))
    if made or given.cpu_offload or given.flatten_optimizer_state_dict:
        return made
    return {_STATE: {}, _PG: []}  # of FSDP1, which rank 0 is going to give to all


@torch.no_grad()
def set_optimizer_state_dict(
    model: nn.Module,
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
    optim_state_dict: OptimizerStateType,
    *,
    options: StateDictOptions | None = None,
) -> None:
    """Write a state dict into optimizers, and leave the dict as it is.

    All ranks check first, and all raise the same error if anything does not fit on one; then nothing was written.
    Groups are matched by the names of their parameters. State that is there is filled in place.

    Args:
        model: The model, wrapped and sharded in any way.
        optimizers: One or several; each takes the parameters that it has.
        optim_state_dict: Nested by name, nested by id as ``optimizer.state_dict()`` gives it, or flat.
        options: How; the defaults if left out.

    Raises:
        LoadError: Parameters have no state there, and ``strict``; or something does not fit.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> old, new = [torch.optim.SGD(model.parameters(), lr=lr) for lr in (0.1, 0.2)]
    >>> set_optimizer_state_dict(model, new, get_optimizer_state_dict(model, old))
    >>> new.param_groups[0]["lr"]
    0.1
    """
    given, fault = attempted(options)
    modules, wrong = tables_of(model, given)
    several, odd = _given(optimizers, needed=True)
    OptimLoading.prepared(modules, several, optim_state_dict, given, fault=fault or wrong or odd).write()


@torch.no_grad()
def _init_optim_state(optim: torch.optim.Optimizer) -> None:  # pyright: ignore[reportUnusedFunction]  # imported by users
    """Give a fresh optimizer the state that its first step would make, without a step; one that has state keeps it.

    Moments are zeros and counters 0. Parameters, gradients and options are not touched, and no hook is called.

    Args:
        optim: The optimizer.

    Raises:
        Unsupported: The class cannot tell its state without a closure, as LBFGS; nothing has been written.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> adam = torch.optim.Adam(model.parameters())
    >>> _init_optim_state(adam)
    >>> adam.state[model.weight]["exp_avg"], adam.state[model.weight]["step"]
    (tensor([[0., 0.]]), tensor(0.))
    """
    start(optim)


def _given(optimizers: Any, *, needed: bool) -> tuple[tuple[torch.optim.Optimizer, ...], FdsdError | None]:
    """Give the optimizers, and what is wrong with them, of which the other ranks of a load have to hear."""
    try:
        several = listed(optimizers)
    except NoMapping as error:
        return (), error
    lacking = LoadError("Optimizers are not passed in but optim_only is set to True.")
    return several, lacking if needed and not several else None


@torch.no_grad()
def get_state_dict(
    model: nn.Module,
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> tuple[dict[str, ValueType], OptimizerStateType]:
    """Give the state dicts of a model and of its optimizers.

    Args:
        model: The model, wrapped and sharded in any way.
        optimizers: One or several; none give ``{}``.
        submodules: Deprecated: only the names of the model at and below these.
        options: How; the defaults if left out.

    Raises:
        FdsdError: As the two functions that read one of them.

    >>> model = nn.Linear(2, 1)
    >>> [list(state) for state in get_state_dict(model, torch.optim.SGD(model.parameters(), lr=0.1))]
    [['weight', 'bias'], ['state', 'param_groups']]
    """
    several, fault = _given(optimizers, needed=False)
    weights = get_model_state_dict(model, submodules=submodules, options=options)
    if not several and fault is None:
        return weights, {}
    return weights, _of_optimizers(model, several, None, options, fault)


@torch.no_grad()
def set_state_dict(
    model: nn.Module,
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
    *,
    model_state_dict: dict[str, ValueType],
    optim_state_dict: OptimizerStateType,
    options: StateDictOptions | None = None,
) -> _IncompatibleKeys:
    """Write state dicts into a model and its optimizers; both are checked before either is written.

    Args:
        model: The model, wrapped and sharded in any way.
        optimizers: One or several; none leave optimizers out.
        model_state_dict: As ``set_model_state_dict`` takes it. ``{}`` leaves the model as it is: on all ranks, or with
            ``broadcast_from_rank0`` on rank 0, where alone it counts.
        optim_state_dict: As ``set_optimizer_state_dict`` takes it.
        options: How; the defaults if left out.

    Returns:
        The names of the model that were missing, and those that were not expected.

    Raises:
        LoadError: Something does not fit.
    """
    given, fault = attempted(options)
    modules, unread = tables_of(model, given)
    world = default_world() if given.broadcast_from_rank0 else None
    is_giver = world is None or not world.rank
    several, odd = _given(optimizers, needed=is_giver and not model_state_dict)
    optim, wrong = None, fault or unread or odd
    if several or isinstance(odd, NoMapping):  # of what is none nobody knows whether others have some: they do
        optim = OptimLoading.prepared(modules, several, optim_state_dict, given, fault=wrong)
    weights = ModelLoading.prepared(model, modules, model_state_dict, given, may_be_empty=True, fault=wrong)
    if optim is not None:
        optim.write()
    return weights.write()


def _patch_model_state_dict(  # pyright: ignore[reportUnusedFunction]  # imported by users
    model: nn.Module,
    *,
    options: StateDictOptions | None = None,
) -> None:
    """Let ``model.state_dict`` and ``model.load_state_dict`` call the getter and the setter.

    Args:
        model: The model.
        options: What they are called with.
    """

    def state_dict() -> dict[str, ValueType]:
        return get_model_state_dict(model, options=options)

    def load_state_dict(state_dict: dict[str, ValueType]) -> None:
        set_model_state_dict(model, state_dict, options=options)

    vars(model).update(state_dict=state_dict, load_state_dict=load_state_dict)


def _patch_optimizer_state_dict(  # pyright: ignore[reportUnusedFunction]  # imported by users
    model: nn.Module,
    *,
    optimizers: tuple[torch.optim.Optimizer, ...],
    options: StateDictOptions | None = None,
) -> None:
    """Let ``state_dict`` and ``load_state_dict`` of each optimizer call the getter and the setter for all of them.

    Args:
        model: The model.
        optimizers: The optimizers.
        options: What they are called with.
    """

    def state_dict() -> OptimizerStateType:
        return get_optimizer_state_dict(model, optimizers, options=options)

    def load_state_dict(state_dict: OptimizerStateType) -> None:
        set_optimizer_state_dict(model, optimizers, state_dict, options=options)

    for optimizer in listed(optimizers):
        vars(optimizer).update(state_dict=state_dict, load_state_dict=load_state_dict)
