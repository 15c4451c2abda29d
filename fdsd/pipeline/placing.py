"""Reading what ``locality`` is asked: the source as expressions that are laid out, and how results are wanted.

What follows from it is worked out in ``locality``.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from fdsd.algebra.apply import defer
from fdsd.data.errors import SpecMismatch, Unsupported, listing
from fdsd.data.model import ModelSpec
from fdsd.data.problem import Problem, describe
from fdsd.data.spec import spec_of
from fdsd.data.statedict import StateDict, as_mapping
from fdsd.data.ties import tie_key
from fdsd.data.train import TrainState
from fdsd.layout.derived import fits, lies_of
from fdsd.layout.layout import Layout
from fdsd.layout.sharded import place
from fdsd.layout.tables import Table
from fdsd.pipeline.check import abstract

__all__ = ["laid_out", "wanted"]


def laid_out(layouts: Any, source: Any) -> tuple[StateDict[Any], dict[int, Layout]]:
    """Read a source and its layouts.

    Args:
        layouts: One layout, a table, a model's spec, or a state that is laid out.
        source: A state or specs; ``None`` if ``layouts`` has shapes.

    Returns:
        The source as expressions, laid out; and by the ids of the operations in which they begin how those lie.

    Raises:
        Unsupported: There are no shapes, or no state.
        SpecMismatch: A layout does not fit, or it is not known how a leaf lies.
        UnknownName: A rule wins no name.

    >>> import torch
    >>> from fdsd.layout.mesh import Mesh
    >>> state, lies = laid_out(Layout(Mesh({"dp": 2}), {}), {"w": torch.ones(2)})
    >>> state["w"]
    Sharded(float32[2], {'dp': Replicate()} over 2 ranks)
    """
    placing: Any = layouts.model if isinstance(layouts, TrainState) else layouts
    leaves: Mapping[str, Any] = as_mapping(placing) or {}
    is_state = any(spec_of(leaf) is not None for leaf in leaves.values())
    if source is None and not is_state and not isinstance(layouts, ModelSpec):
        raise Unsupported("locality: these layouts have no shapes. Give the source, or its specs, as second argument.")
    given: Any = layouts if source is None else source
    state: Any = given.model if isinstance(given, TrainState) else given
    own = as_mapping(state)
    if own is None and not isinstance(state, ModelSpec):
        raise Unsupported(f"locality: it asks about state dicts and ModelSpecs, not {type(given).__name__}.")
    hollow: StateDict[Any] = abstract(state)
    placed: dict[str, Layout] = {}
    if not is_state:
        names = [name for name, leaf in hollow.items() if spec_of(leaf) is not None]
        placed = _resolved(Table.of("locality", placing), names, {name: tie_key(hollow[name]) for name in names})
    for some in (leaves if is_state else {}, own or {}):
        placed |= _own_layouts({name: leaf for name, leaf in some.items() if name in hollow and name not in placed})
    lazy = defer(hollow)
    made: dict[str, Any] = {}
    laid: dict[int, Any] = {}
    problems: list[Problem] = []
    for name, leaf in lazy.items():
        if name in placed and id(leaf) not in laid:
            try:
                laid[id(leaf)] = place(leaf, placed[name])
            except SpecMismatch as error:
                problems.append(Problem("spec", f"{name!r}: {error}", (name,)))
        made[name] = laid.get(id(leaf), leaf)
    _raise(problems)
    return StateDict.trusted(made, kind="lazy"), {id(lazy[name].op): layout for name, layout in placed.items()}


def _own_layouts(state: Mapping[str, Any]) -> dict[str, Layout]:
    """Give the layouts that leaves have by themselves."""
    found = {name: lies_of(leaf) for name, leaf in state.items()}
    if odd := [name for name, lies in found.items() if lies is None]:
        raise SpecMismatch(
            f"locality: {listing(odd)} are made of parts that lie over ranks. Say how they lie in the first argument."
        )
    return {name: lies for name, lies in found.items() if isinstance(lies, Layout)}


def _resolved(table: Table, names: Sequence[str], ties: Mapping[str, Hashable]) -> dict[str, Layout]:
    found, problems = table.resolve(names, ties)
    _raise(problems)
    return found


def _raise(problems: Sequence[Problem]) -> None:
    if problems:
        raise problems[0].error(f"locality: {describe(problems)}")


def wanted(target: Any, state: StateDict[Any]) -> dict[str, Layout]:
    """Read how results are wanted: the layouts of those that the target mentions.

    Raises:
        SpecMismatch: A layout does not fit.
        UnknownName: A rule wins no name.

    >>> wanted(None, StateDict())
    {}
    """
    if target is None:
        return {}
    names = [name for name, leaf in state.items() if spec_of(leaf) is not None]
    found = _resolved(Table.of("locality", target), names, {name: tie_key(state[name]) for name in names})
    odd = [
        f"{name!r} of shape {state[name].shape}"
        for name, layout in found.items()
        if not fits(layout, state[name].shape)
    ]
    if odd:
        raise SpecMismatch(f"locality: target layouts that do not fit: {', '.join(odd[:10])}.")
    return found
