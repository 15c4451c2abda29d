"""Saving states: streamed within a budget, written aside, renamed into place when all of it stands."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from attrs import frozen

from fdsd.algebra.apply import defer, refuse_kinds
from fdsd.algebra.lazy import Lazy
from fdsd.comms.alone import world_for
from fdsd.data.errors import SpecMismatch, Unsupported, listing
from fdsd.data.protocols import World
from fdsd.data.sizes import parse_size
from fdsd.data.spec import TensorSpec, spec_of
from fdsd.data.statedict import StateDict
from fdsd.data.ties import ties
from fdsd.data.values import is_sequence
from fdsd.engine.assets import Assets
from fdsd.engine.gathering import gather_leaves, one_rank
from fdsd.engine.group_saving import save_over, writer_of
from fdsd.engine.materializing import materialize
from fdsd.engine.progress import Progress
from fdsd.engine.provenance import provenance
from fdsd.engine.streaming import Stream
from fdsd.engine.unions import agree_alike, everyone, together
from fdsd.layout.sharded import whole_leaves
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
    group: Any = None,
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
        budget: Bytes for scratch, kept results and messages, whatever the size of the state. With a group the smallest
            of all ranks counts.
        group: The process group that works together, where the state lies over ranks: all call ``save``, and one of
            them writes: that of ``gather(to=rank)``, else the first. All give the same path, format, size of files,
            assets, config and ``overwrite``.

    Raises:
        RankDisagreement: The ranks ask for different things, or know different things of one name; on all ranks.
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
    world = world_for(group)

    def asked() -> _How:
        given: Any = state
        if not isinstance(given, Mapping):
            raise Unsupported(
                f"save: it writes a mapping of names to tensors, not {type(given).__name__}. The order is "
                "save(state, path). Of a TrainState save state.model, and flatten_optim()(state.optim) as .pt; of a "
                "module, capture(module).model."
            )
        target = local_path(path)
        kind, is_file = of_target(target, format)
        most, limit = parse_size(max_shard_size, "max_shard_size", least=1), parse_size(budget, "budget")
        return _How(target, kind, is_file, most, assets, config, overwrite, limit)

    how = together(world, "save", asked)
    if group is not None:
        agree_alike(world, "save", how.told())
        _save_over(state, how, world)
        return
    with how.gather_assets() as extras:
        if how.kind == "torch":
            _refuse_hollow(state)
            save_torch(how.path, materialize(whole_leaves(state), budget=how.budget).to_dict(), overwrite=overwrite)
        else:
            _save_safetensors(state, how, extras)


@frozen
class _How:
    """What ``save`` was told about the destination."""

    path: Path
    kind: str
    is_file: bool
    max_shard_size: int
    assets: Any
    config: Any
    overwrite: bool
    budget: int

    def told(self) -> dict[str, object]:
        """Say what has to be the same on all ranks: the writer alone would go by its own."""
        assets: Any = self.assets if is_sequence(self.assets) or self.assets is None else [self.assets]
        return {
            "path": str(self.path),
            "format": self.kind,
            "max_shard_size": self.max_shard_size,
            "assets": None if assets is None else [str(path) for path in assets],
            "config": _told_config(self.config),
            "overwrite": self.overwrite,
        }

    def gather_assets(self) -> Assets:
        """Put aside what goes beside the weights."""
        folder = None if self.is_file else self.path
        return Assets.gather(self.assets, self.config, folder, overwrite=self.overwrite)

    def begin(self, specs: Mapping[str, TensorSpec], **given: Any) -> SafetensorsSink:
        """Begin to write safetensors files."""
        given["overwrite"] = self.overwrite
        if self.is_file:
            return SafetensorsSink.create(self.path, specs, **given)
        return SafetensorsSink.create_folder(self.path, specs, max_shard_size=self.max_shard_size, **given)


def _told_config(config: Any) -> str | None:
    if config is None:
        return None
    try:
        return json.dumps(config, sort_keys=True, default=dict)
    except (TypeError, ValueError):
        return f"a {type(config).__name__} that is no JSON"  # which the writer refuses


# -- safetensors -----------------------------------------------------------------------------------------


def _save_safetensors(state: Mapping[str, Any], how: _How, extras: Assets) -> None:
    specs, lazy = _storable(state)
    owners = _owners(lazy)
    stored = {name: lazy[name] for name in specs if name not in owners}
    stream = Stream(stored, how.budget)
    made = provenance(state, stream.others, stream.extents)
    sink = how.begin(specs, metadata=made, aliases=owners, origins=stream.origins)
    with sink, Progress(f"saving {how.path.name}", sum([specs[name].nbytes for name in stored])) as progress:
        stream.write(sink, progress)
        extras.place()


def _owners(lazy: Mapping[str, Lazy]) -> dict[str, str]:
    return {alias: group[0] for group in ties(lazy) for alias in group[1:]}


def _save_over(state: Mapping[str, Any], how: _How, world: World) -> None:
    """Save what lies over ranks: collective, one rank writes."""
    writer = writer_of(state, world)
    is_writer = world.rank == writer
    extras = together(world, "save", lambda: how.gather_assets() if is_writer else None)
    with extras or nullcontext():
        if how.kind == "torch":
            whole = _gathered(state, how, writer, world)
            together(world, "save", lambda: save_torch(how.path, whole, overwrite=how.overwrite) if is_writer else None)
            return
        nodes = together(world, "save", lambda: _storable(state)[1])

        def begin(specs: Mapping[str, TensorSpec], aliases: Mapping[str, str]) -> SafetensorsSink:
            return how.begin(specs, metadata=provenance(state, nodes.values(), []), aliases=aliases)

        place = (lambda: None) if extras is None else extras.place
        save_over(world, writer, nodes, begin, budget=how.budget, finish=place)


def _gathered(state: Mapping[str, Any], how: _How, writer: int, world: World) -> dict[str, Any]:
    """Bring everything to the writer, with the versions of the modules of all ranks."""
    leaves = together(world, "save", lambda: whole_leaves(state))
    made = gather_leaves(leaves, world, target=one_rank(writer, "save"), budget=how.budget, verb="save")
    metadata: dict[str, Any] = {}
    for some in everyone(world, dict(getattr(state, "_metadata", None) or {}), "save: the versions of modules"):
        metadata = {**some, **metadata}
    return StateDict.trusted(made, metadata or None).to_dict()


def _storable(state: Mapping[str, Any]) -> tuple[dict[str, TensorSpec], Mapping[str, Lazy]]:
    """Give the specs and the lazy tensors, or name everything that is no tensor or has no data."""
    if odd := [name for name in state if not isinstance(name, str)]:
        raise SpecMismatch(f"save: tensors are stored by names that are text; these are none: {listing(odd)}.")
    try:
        specs = {name: spec for name, leaf in state.items() if (spec := spec_of(leaf)) is not None}
        lazy = defer(state)
    except Unsupported as error:
        refuse_kinds(state, "save", error)
    if odd := [name for name in state if name not in specs]:
        raise Unsupported(
            f"save: safetensors files hold tensors only; these are none: {listing(odd)}. drop() them, or save as .pt."
        )
    _refuse_hollow(state)
    return specs, lazy


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
