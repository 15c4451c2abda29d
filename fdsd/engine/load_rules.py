"""`Rules`: how strictly a state has to fit a model; what the model expects, and what stops a load beside that."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from attrs import field, frozen

from fdsd.comms.installing import is_meta
from fdsd.comms.live import LiveTensor, Modules
from fdsd.data.errors import SpecMismatch, add_note, listing
from fdsd.data.memory import is_expanded, is_grid, is_same_view
from fdsd.data.problem import Problem
from fdsd.data.spec import TensorSpec, dtype_name, is_exact, spec_of
from fdsd.data.statedict import StateDict
from fdsd.engine.matching import DtypeRule, Match
from fdsd.engine.outlines import Outline
from fdsd.pipeline.pipeline import Pipeline, identity
from fdsd.transforms.which import Choice

__all__ = ["Init", "Rules", "left_on_meta", "made_by_init", "problems_of", "specs_of", "unwritable"]

Init = Callable[[str, TensorSpec], torch.Tensor]


@frozen
class Rules:
    """How strictly a state has to fit.

    Attributes:
        keep: Leaves names out of what the model expects.
        allow_missing: Names that the state may lack.
        allow_unexpected: Names that it may have beyond.
        init: Makes what is missing and has no memory yet.
        dtype: What happens where dtypes differ.
        device: Where tensors go that have no memory yet, and lie on no mesh; by default where their values are.
        staged: Whether nothing is written before everything is there.
        as_given: Whether code of modules' own gets what the state has, as it is there, and tells what it lacks, as
            under ``load_state_dict``; else it gets all that it holds, laid out as the live tensors.
    """

    keep: Pipeline = identity
    allow_missing: Choice = field(factory=Choice)
    allow_unexpected: Choice = field(factory=Choice)
    init: Init | None = None
    dtype: DtypeRule = "same"
    device: torch.device | None = None
    staged: bool = False
    as_given: bool = False


def specs_of(modules: Modules) -> StateDict[Any]:
    """Give the specs of what a model's state dict holds, tied ones with equal ``tie``; extra state as it is.

    >>> from fdsd.comms.modules import read_modules
    >>> specs_of(read_modules(torch.nn.Linear(2, 1)))["bias"]
    TensorSpec((1,), torch.float32)
    """
    tokens: dict[str, object] = {}
    made: dict[str, Any] = {}
    for name in modules.names:
        live = modules.tensors.get(name)
        if live is None:
            made[name] = modules.extra[name].value
            continue
        made[name] = spec = live.spec
        if live.tied_to is not None or modules.aliases_of(name):
            token = tokens.setdefault(live.tied_to or name, object())
            made[name] = TensorSpec(spec.shape, spec.dtype, tie=token)
    return StateDict.trusted(made, modules.metadata, kind="abstract")


def problems_of(
    state: Outline, modules: Modules, wanted: Mapping[str, Any], match: Match, rules: Rules, on_meta: Iterable[str]
) -> list[Problem]:
    """Find all that stops a load.

    Args:
        state: What the ranks hold.
        modules: The live model.
        wanted: The specs of what it expects.
        match: What goes where.
        rules: How strictly it has to fit.
        on_meta: What has no memory and gets nothing from the state.
    """
    left = _left(on_meta, modules, wanted) if rules.init is None else []
    fixed = _fixed(state, modules, match) if rules.dtype == "source" else []
    return [*_hollow(state, wanted), *match.problems, *left, *fixed, *unwritable(state, modules, match, rules)]


def _hollow(state: Outline, wanted: Mapping[str, Any]) -> list[Problem]:
    """Find what has no data to load."""
    names = [name for name in state.hollow if name in wanted]
    if not names:
        return []
    return [
        Problem(
            "spec",
            f"{listing(names)} have no data in the state (specs, or on the meta device). Open the checkpoint itself, "
            "or give the module memory first.",
            tuple(names),
        )
    ]


def left_on_meta(modules: Modules, match: Match) -> tuple[str, ...]:
    """Name what has no memory and gets nothing from the state."""
    loaded = set(match.loaded)
    on_meta = [name for name, live in modules.tensors.items() if live.tied_to is None and is_meta(live)]
    return tuple([name for name in on_meta if loaded.isdisjoint((name, *modules.aliases_of(name)))])


def _left(on_meta: Iterable[str], modules: Modules, wanted: Mapping[str, Any]) -> list[Problem]:
    """Find what has no memory and will not get any, unless a filter leaves it out."""
    needed = [
        name
        for name in on_meta
        if modules.tensors[name].persistent and any(one in wanted for one in (name, *modules.aliases_of(name)))
    ]
    if needed:
        text = (
            f"{listing(needed)} are on the meta device, and the state has nothing for them. Give "
            "init=lambda fqn, spec: tensor."
        )
        return [Problem("missing", text, tuple(needed))]
    return []


def _fixed(state: Outline, modules: Modules, match: Match) -> list[Problem]:
    """Find tensors that cannot take the dtype of the state: what FSDP and DTensors hold has been planned for one."""
    names: list[str] = []
    for name, source in match.loads.items():
        live, spec = modules.tensors.get(name), spec_of(state.leaves[source])
        if live is None or spec is None or spec.dtype == live.spec.dtype or name in modules.through:
            continue
        if live.flat is not None or (hasattr(live.tensor, "_local_tensor") and not is_meta(live)):
            names.append(name)
    if not names:
        return []
    text = (
        f"{listing(names)} have another dtype in the state, and lie over ranks in memory that keeps its dtype. Convert "
        'the model before it is sharded, or give dtype="target".'
    )
    return [Problem("spec", text, tuple(names))]


def unwritable(state: Outline, modules: Modules, match: Match, rules: Rules) -> list[Problem]:
    """Find live tensors that take no values: torch would say so when others have been written already.

    Args:
        state: What the ranks hold.
        modules: The live model.
        match: What goes where.
        rules: Which dtypes tensors take.
    """
    leaves, problems, is_source = state.leaves, list[Problem](), rules.dtype == "source"
    for name, source in match.loads.items():
        live = modules.tensors.get(name)
        if live is None or live.flat is not None or name in modules.through:
            continue
        local = getattr(live.tensor, "_local_tensor", live.tensor)
        is_plain = is_exact(local) and local.layout is torch.strided and local.is_contiguous()
        if is_plain and not is_source and not local.is_inference():  # as nearly all are
            continue
        text = _refusal(local, leaves[source]) if is_grid(local) else None
        spec = spec_of(leaves[source]) if is_source and live.trainable else None
        if spec is not None and not (spec.dtype.is_floating_point or spec.dtype.is_complex):
            text = f"is {dtype_name(spec.dtype)} in the state, and requires gradients, which integers do not have"
        if text is not None:
            problems.append(Problem("spec", f"{name!r} {text}.", (name,)))
    return problems


def _refusal(local: torch.Tensor, leaf: Any) -> str | None:
    """Say why nothing can be written into a tensor; its own values need not be."""
    if local.is_inference() and not torch.is_inference_mode_enabled():
        why = "was made under torch.inference_mode(), and cannot be written outside of it. clone() it"
    elif is_expanded(local):
        why = "has several elements in one place of its memory (expand()), so they cannot differ. clone() it"
    else:
        return None
    given = getattr(leaf, "_local_tensor", leaf)
    return None if is_exact(given) and is_grid(given) and is_same_view(given.detach(), local) else f"{why} in the model"


def made_by_init(name: str, init: Init, live: LiveTensor, rules: Rules) -> torch.Tensor | None:
    """Give what ``init`` makes, if it fits; ``None`` if it makes nothing.

    Args:
        name: The name in the model.
        init: Makes it.
        live: The live tensor.
        rules: Whether it is cast to the dtype of the live tensor.

    Raises:
        SpecMismatch: It is no tensor, has no data, another shape, or a dtype of another kind.
    """
    spec = live.spec
    try:
        made: Any = init(name, spec)
    except Exception as error:
        add_note(error, f"while init made {name!r}, {spec}")
        raise
    if made is None:
        return None
    given = spec_of(made) if isinstance(made, torch.Tensor) else type(made).__name__
    if not is_exact(made) or tuple(made.shape) != spec.shape:
        raise SpecMismatch(f"init gave {given} for {name!r}, which is {spec}. Give a tensor of this shape.")
    if made.is_meta:
        raise SpecMismatch(f"init gave a tensor on the meta device for {name!r}, {spec}: it has no data.")
    is_alike = made.dtype == spec.dtype or (made.dtype.is_floating_point and spec.dtype.is_floating_point)
    if rules.dtype == "same" and not is_alike:  # floats are cast: what init makes is of no dtype that anyone chose
        raise SpecMismatch(f'init gave {given} for {name!r}, which is {spec}. Give this dtype, or dtype="target".')
    found: torch.Tensor = made.detach()
    return found
