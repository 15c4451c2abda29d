"""Whether a state dict fits a model: every difference, in torch's words, before anything is written.

What is found on several ranks is put together here too; how ranks tell each other is unknown.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from attrs import frozen
from torch import nn

from fdsd.algebra.dtypes import check_cast
from fdsd.algebra.lazy import Lazy
from fdsd.comms.hooks import Machine
from fdsd.comms.installing import is_meta
from fdsd.comms.live import LiveTensor, Modules
from fdsd.comms.modules import is_dtensor
from fdsd.data.errors import FdsdError
from fdsd.data.spec import TensorSpec, is_exact
from fdsd.engine.matching import Match

__all__ = ["Fit", "fit_model", "told"]

_TENSORS = (torch.Tensor, Lazy, TensorSpec)


@frozen(eq=False)
class Fit:
    """What of a state dict goes where in a model, and what does not fit.

    Attributes:
        match: What goes where; modules that load by code of their own get all names that are theirs.
        beyond: Names that the model does not have, and the modules below which they stand.
        scalars: Names of tensors of one element and one dim, for such of no dim: files of old have them so.
        errors: Differences other than names.
    """

    match: Match
    beyond: dict[str, Machine]
    scalars: list[str]
    errors: list[str]


def fit_model(modules: Modules, names: Collection[str], state: Mapping[str, Any], *, whole: bool) -> Fit:
    """Compare a state dict with a model, as ``load_state_dict`` does: tied names are wanted too, and the last counts.

    Args:
        modules: The model.
        names: The names that are expected; what a hook hides may be given too.
        state: Values by name; specs stand for values that another rank has.
        whole: Whether tensors that lie over ranks take whole ones.
    """
    tensors, through = modules.tensors, modules.through
    loads: dict[str, str] = {}
    missing: list[str] = []
    errors: list[str] = []
    scalars: list[str] = []
    known = set(names)
    hidden = [name for name in state if name not in known and _is_hidden(tensors.get(name))]
    for name in [*names, *hidden]:
        if name in through:
            continue
        live = tensors.get(name)
        if name not in state:
            if not _is_made_by_itself(name, live, state):
                missing.append(name)
        elif live is not None and (problem := _misfit(name, live, state[name], whole, scalars)) is not None:
            errors.append(problem)
        else:
            loads[name if live is None else live.tied_to or name] = name
    loads.update({name: name for name in through if name in known and name in state})
    known.update(hidden)
    unexpected = [name for name in state if name not in known]
    beyond = _beyond(unexpected, modules)
    loads.update({name: name for name in beyond})
    rest = tuple([name for name in unexpected if name not in beyond])
    return Fit(Match(loads, missing=tuple(missing), unexpected=rest), beyond, scalars, errors)


def _is_hidden(live: LiveTensor | None) -> bool:
    """Tell whether code of a module's own leaves a tensor out of what it shows: it is loaded all the same, if given."""
    if live is None or live.persistent:
        return False
    owner: Any = live.owner
    return live.kind == "parameter" or live.name not in owner._non_persistent_buffers_set


def _beyond(names: Sequence[str], modules: Modules) -> dict[str, Machine]:
    """Choose the names that stand below modules with code of their own, which may know names of older formats."""
    machines = modules.machines()
    below = {name: [one for one in machines if name.startswith(one.prefix)] for name in names if machines}
    return {name: some[-1] for name, some in below.items() if some and name not in modules.tensors}


def _misfit(name: str, live: LiveTensor, value: Any, whole: bool, scalars: list[str]) -> str | None:
    target = live.tensor
    if not isinstance(value, _TENSORS):
        return (
            f'While copying the parameter named "{name}", expected torch.Tensor or Tensor-like object from checkpoint '
            f"but received {type(value)}"
        )
    shape: tuple[int, ...] = live.spec.shape if live.flat is not None else target.shape
    tensor: Any = value
    given = tensor.shape
    if given != shape and (tuple(given), tuple(shape)) == ((1,), ()):
        scalars.append(name)
    elif given != shape:
        return (
            f"size mismatch for {name}: copying a param with shape {torch.Size(given)} from checkpoint, the shape in "
            f"current model is {torch.Size(shape)}."
        )
    is_hollow = isinstance(value, torch.Tensor) and _is_hollow(value)
    if is_hollow and (whole or not is_meta(live)):  # else a meta model is given its own tensors
        return f'While copying the parameter named "{name}": the value is on the meta device, and has no data.'
    if not whole and is_exact(tensor) and (is_dtensor(target) if live.flat is None else live.flat.flat.is_sharded):
        return (
            f'While copying the parameter named "{name}": the value is a whole tensor, and the model has it '
            "sharded. Whole tensors are loaded with StateDictOptions(full_state_dict=True)."
        )
    return _miscast(name, live, tensor.dtype)


def _is_hollow(value: torch.Tensor) -> bool:
    local: Any = getattr(value, "_local_tensor", value)
    return isinstance(local, torch.Tensor) and local.is_meta


def _miscast(name: str, live: LiveTensor, source: torch.dtype) -> str | None:
    target = live.dtype or (live.spec.dtype if live.flat is not None else live.tensor.dtype)
    if source == target:
        return None
    try:
        check_cast(source, target)
    except FdsdError as error:
        return f'While copying the parameter named "{name}": {error}'
    return None


def _is_made_by_itself(name: str, live: LiveTensor | None, state: Mapping[str, Any]) -> bool:
    """Tell whether torch's own module does without a name: batch norms of old files have no count."""
    if live is None or live.name != "num_batches_tracked" or not isinstance(live.owner, nn.modules.batchnorm._NormBase):  # pyright: ignore[reportPrivateUsage]  # where torch has the rule
        return False
    versions: Mapping[str, Any] = getattr(state, "_metadata", None) or {}
    version = versions.get(name.rpartition(".")[0], {}).get("version")
    return version is None or version < 2


def told(missing: Sequence[str], unexpected: Sequence[str], errors: Sequence[str], model: str) -> str:
    """Word an error as ``nn.Module.load_state_dict`` does.

    >>> told(["a"], [], ["b is odd"], "Net")
    'Error(s) in loading state_dict for Net:\\n\\tMissing key(s) in state_dict: "a". \\n\\tb is odd'
    """
    lines = list(errors)
    for what, names in (("Unexpected", unexpected), ("Missing", missing)):
        if names:
            listed = ", ".join([f'"{name}"' for name in names])
            lines.insert(0, f"{what} key(s) in state_dict: {listed}. ")
    return f"Error(s) in loading state_dict for {model}:\n\t" + "\n\t".join(lines)
