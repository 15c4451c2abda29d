"""Saving states: streamed within a budget, written aside, renamed into place when all of it stands."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from fdsd.algebra.apply import defer, defer_leaf
from fdsd.algebra.lazy import Lazy
from fdsd.data.collecting import collector_paused
from fdsd.data.errors import SpecMismatch, Unsupported, listing
from fdsd.data.sizes import parse_size
from fdsd.data.spec import TensorSpec, spec_of
from fdsd.data.ties import ties
from fdsd.engine.assets import Assets
from fdsd.engine.materializing import materialize
from fdsd.engine.progress import Progress
from fdsd.engine.provenance import provenance
from fdsd.engine.streaming import Stream
from fdsd.storage.files import local_path
from fdsd.storage.formats import of_target
from fdsd.storage.safetensors_sink import SafetensorsSink
from fdsd.storage.torch_save import save_torch

__all__ = ["save"]


def save(
    state: Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    format: str | None = None,
    max_shard_size: int | str = "5GB",
    assets: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    config: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    budget: int | str = "256MB",
) -> None:
    """Write a state to files, reading lazy tensors piece by piece on the way.

    Args:
        state: Names to leaves: tensors and lazy tensors; for the torch format any other objects as well.
        path: ``x.safetensors``: one file. ``x.pt``, ``x.pth``, ``x.bin``: a torch file. Anything else: a folder with
            ``model.safetensors``, or several files and their index.
        format: ``"safetensors"`` or ``"torch"``; told by the path by default.
        max_shard_size: The most bytes of tensors in one file of a folder.
        assets: A folder, or files, to copy beside the weights: configuration, tokenizer; weights are left out.
        config: Entries to set in the folder's ``config.json``, which comes from the assets or is there already.
        overwrite: Whether an existing checkpoint may be replaced.
        budget: Bytes for scratch and kept results, whatever the size of the state.

    Raises:
        DestinationExists: Something is there, and ``overwrite`` is false.
        Unsupported: Entries that the format cannot hold; all are named.
        OverBudget: Before anything is written: an operation needs more than the budget at once.
        FdsdError: A tensor could not be read or computed; the message names it. What stood at ``path`` stands.

    Contiguous runs of a file are copied by the kernel. A safetensors file records the pipeline and its sources in its
    metadata, and which names are tied; a torch file is made in memory first.

    >>> import tempfile
    >>> path = tempfile.mkdtemp() + "/model.safetensors"
    >>> save({"w": torch.ones(2)}, path)
    >>> from fdsd.engine.opening import open
    >>> open(path)
    StateDict({
      'w': <Lazy float32[2]>,
    })
    """
    if not isinstance(state, Mapping):
        raise Unsupported(f"save: it writes a mapping of names to tensors, not {type(state).__name__}.")
    target = local_path(path)
    kind, is_file = of_target(target, format)
    limit = parse_size(budget, "budget")
    most = parse_size(max_shard_size, "max_shard_size", least=1)
    with Assets.gather(assets, config, target if not is_file else None, overwrite=overwrite) as extras:
        if kind == "torch":
            _save_torch(state, target, overwrite, limit)
        else:
            _save_safetensors(
                state, target, extras, is_file=is_file, max_shard_size=most, overwrite=overwrite, budget=limit
            )


def _save_torch(state: Mapping[str, Any], path: Path, overwrite: bool, budget: int) -> None:
    _refuse_hollow(state)
    value = materialize(state, budget=budget)
    save_torch(path, value.to_dict(), overwrite=overwrite)


# -- safetensors -----------------------------------------------------------------------------------------


def _save_safetensors(
    state: Mapping[str, Any],
    path: Path,
    extras: Assets,
    *,
    is_file: bool,
    max_shard_size: int | str,
    overwrite: bool,
    budget: int,
) -> None:
    specs, lazy = _storable(state)
    owners = {alias: group[0] for group in ties(lazy) for alias in group[1:]}
    stored = {name: lazy[name] for name in specs if name not in owners}
    stream = Stream(stored, budget)
    made = provenance(state, stream.others, stream.extents)
    given: dict[str, Any] = {"metadata": made, "aliases": owners, "origins": stream.origins, "overwrite": overwrite}
    with collector_paused():
        if is_file:
            sink = SafetensorsSink.create(path, specs, **given)
        else:
            sink = SafetensorsSink.create_folder(path, specs, max_shard_size=max_shard_size, **given)
    with sink, Progress(f"saving {path.name}", sum([specs[name].nbytes for name in stored])) as progress:
        stream.write(sink, progress)
        extras.place()


def _storable(state: Mapping[str, Any]) -> tuple[dict[str, TensorSpec], Mapping[str, Lazy]]:
    """Give the specs and the lazy tensors, or name everything that is no tensor or has no data."""
    if odd := [name for name in state if not isinstance(name, str)]:
        raise SpecMismatch(f"save: tensors are stored by names that are text; these are none: {listing(odd)}.")
    try:
        specs = {name: spec for name, leaf in state.items() if (spec := spec_of(leaf)) is not None}
        lazy = defer(state)
    except Unsupported as error:
        _refuse_kinds(state, error)
    if odd := [name for name in state if name not in specs]:
        raise Unsupported(
            f"save: safetensors files hold tensors only; these are none: {listing(odd)}. drop() them, or save as .pt."
        )
    _refuse_hollow(state)
    return specs, lazy


def _refuse_kinds(state: Mapping[str, Any], first: Unsupported) -> NoReturn:
    """Name all tensors of kinds that cannot be read."""
    found: dict[str, list[str]] = {}
    for name, leaf in state.items():
        try:
            spec_of(leaf)
            defer_leaf(leaf, name)
        except Unsupported as error:
            found.setdefault(str(error), []).append(name)
    if not found:
        raise first
    raise Unsupported("; ".join([f"save: {listing(names)}: {text}" for text, names in found.items()])) from first


def _refuse_hollow(state: Mapping[str, Any]) -> None:
    hollow = [
        name
        for name, leaf in state.items()
        if isinstance(leaf, TensorSpec) or (isinstance(leaf, torch.Tensor) and leaf.is_meta)
    ]
    if hollow:
        raise SpecMismatch(
            f"save: {listing(hollow)} have no data (specs, or on the meta device). Read or init them first."
        )
