"""Whether a state dict fits a model: every difference, in torch's words, before anything is written.

What is found on several ranks is put together here too; how ranks tell each other is unknown.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from attrs import define, field
from torch import nn

from fdsd.algebra.dtypes import check_cast
from fdsd.comms.hooks import Machine
from fdsd.comms.live import LiveTensor, Modules
from fdsd.comms.modules import is_dtensor
from fdsd.compat._kinds import is_sharded_tensor
from fdsd.data.errors import FdsdError
from fdsd.data.spec import TensorSpec, VirtualTensor, is_exact

__all__ = ["Fit", "fit_model", "told"]


@define(eq=False)
class Fit:
    """What of a state dict goes where in a model, and what does not fit.

    Attributes:
        loads: For each live tensor, by its first name, the name in the state dict that it takes.
        extra: The names of extra states.
        machines: For modules that load by code of their own: the names that they get.
        missing: Names that the model has and the state dict lacks.
        unexpected: Names that the state dict has beyond.
        errors: Other differences.
    """

    loads: dict[str, str] = field(factory=dict)
    extra: list[str] = field(factory=list)
    machines: dict[Machine, list[str]] = field(factory=dict)
    missing: list[str] = field(factory=list)
    unexpected: list[str] = field(factory=list)
    errors: list[str] = field(factory=list)


def fit_model(modules: Modules, names: Collection[str], state: Mapping[str, Any], *, whole: bool) -> Fit:
    """Compare a state dict with a model.

    Args:
        modules: The model.
        names: The names that are expected.
        state: Values by name; specs stand for values that another rank has.
        whole: Whether tensors that lie over ranks take whole ones.
    """
    fit = Fit()
    tensors, through = modules.tensors, modules.through
    fit.machines = {machine: [] for machine in modules.machines()}
    for name in names:
        if name in through:
            continue
        if name not in state:
            fit.missing.append(name)
            continue
        live = tensors.get(name)
        if live is None:
            fit.extra.append(name)
        elif (problem := _misfit(name, live, state[name], whole)) is not None:
            fit.errors.append(problem)
        else:
            fit.loads[live.tied_to or name] = name
    known = set(names)
    for name in state:
        if name in known:
            if name in through:
                fit.machines[through[name]].append(name)
            continue
        below = [machine for machine in fit.machines if name.startswith(machine.prefix)]
        if below and name not in tensors:
            fit.machines[below[-1]].append(name)  # its code may know names of older formats
        else:
            fit.unexpected.append(name)
    fit.missing = [name for name in fit.missing if not _made_by_itself(name, modules, state)]
    return fit


def _misfit(name: str, live: LiveTensor, value: Any, whole: bool) -> str | None:
    target = live.tensor
    if not isinstance(value, torch.Tensor | VirtualTensor | TensorSpec):
        return (
            f'While copying the parameter named "{name}", expected torch.Tensor or Tensor-like object from checkpoint '
            f"but received {type(value)}"
        )
    shape = live.spec.shape if live.flat is not None else tuple(target.shape)
    given, dtype = _shape_and_dtype(value)
    if given != shape and not (shape == () and given == (1,)):  # torch's files of old have scalars of one dim
        return (
            f"size mismatch for {name}: copying a param with shape {torch.Size(given)} from checkpoint, the shape in "
            f"current model is {torch.Size(shape)}."
        )
    if is_exact(value) and isinstance(value, torch.Tensor) and value.is_meta and not target.is_meta:
        return f'While copying the parameter named "{name}": the value is on the meta device, and has no data.'
    if is_exact(value) and not whole and (live.flat is not None or is_dtensor(target)):
        return (
            f'While copying the parameter named "{name}": the value is a whole tensor, and the model has it sharded. '
            "Whole tensors are loaded with StateDictOptions(full_state_dict=True)."
        )
    return _miscast(name, live, value, dtype)


def _shape_and_dtype(value: Any) -> tuple[tuple[int, ...], torch.dtype]:
    if is_sharded_tensor(value):  # which warns when it is asked like a tensor
        metadata = value.metadata()
        return tuple(metadata.size), metadata.tensor_properties.dtype
    return tuple(value.shape), value.dtype


def _miscast(name: str, live: LiveTensor, value: Any, source: torch.dtype) -> str | None:
    target = live.dtype or (live.spec.dtype if live.flat is not None else live.tensor.dtype)
    if source == target:
        return None
    try:
        check_cast(source, target)
    except FdsdError as error:
        return f'While copying the parameter named "{name}": {error}'
    return None


def _made_by_itself(name: str, modules: Modules, state: Mapping[str, Any]) -> bool:
    """Tell whether torch's own module does without a name: batch norms of old files have no count."""
    live = modules.tensors.get(name)
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
