"""Saving states: streamed within a budget, written aside, renamed into place when all of it stands."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import frozen

from fdsd.algebra.apply import defer
from fdsd.algebra.fill import Session
from fdsd.algebra.lazy import Lazy, Structural
from fdsd.algebra.ops import Origin
from fdsd.algebra.plan import check_budget, plan_of
from fdsd.data.errors import SpecMismatch, Unsupported, add_note, listing
from fdsd.data.region import Region
from fdsd.data.sizes import parse_size
from fdsd.data.spec import TensorSpec, spec_of
from fdsd.data.ties import ties
from fdsd.engine.assets import Assets
from fdsd.engine.materializing import materialize
from fdsd.engine.progress import Progress
from fdsd.engine.runs import copy_runs
from fdsd.pipeline.pipeline import Pipeline
from fdsd.storage.formats import FORMATS
from fdsd.storage.safetensors_sink import SafetensorsSink
from fdsd.storage.torch_save import save_torch

__all__ = ["save"]

_FOREIGN = (".gguf", ".h5", ".json", ".msgpack", ".npz", ".onnx")
"""Suffixes that nobody means as the name of a folder."""

_CHUNK = 16 << 20
"""The most bytes of a tensor that are filled before they are written."""


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
    target = Path(path)
    kind = _format_of(target, format)
    is_file = target.suffix in FORMATS[kind].suffixes
    with Assets.gather(assets, config, target if not is_file else None, overwrite=overwrite) as extras:
        if kind == "torch":
            _save_torch(state, target, overwrite, parse_size(budget))
        else:
            _save_safetensors(state, target, is_file, max_shard_size, overwrite, parse_size(budget))
        extras.place()


def _format_of(path: Path, format: str | None) -> str:
    if format is not None:
        if format not in FORMATS:
            raise Unsupported(f"save: format={format!r} is not known; there are {listing(FORMATS)}.")
        return format
    if path.suffix in _FOREIGN:
        raise Unsupported(
            f"save: {path} ends in {path.suffix!r}, a format that is not written here. Name x.safetensors, x.pt or a "
            "folder; format= says which is meant by another name."
        )
    return next((name for name, known in FORMATS.items() if path.suffix in known.suffixes), "safetensors")


def _save_torch(state: Mapping[str, Any], path: Path, overwrite: bool, budget: int) -> None:
    value = materialize(state, budget=budget)
    save_torch(path, value.to_dict(), overwrite=overwrite, durable=False)


# -- safetensors -----------------------------------------------------------------------------------------


def _save_safetensors(
    state: Mapping[str, Any], path: Path, is_file: bool, max_shard_size: int | str, overwrite: bool, budget: int
) -> None:
    specs = _storable(state)
    lazy = defer(state)
    owners = {alias: group[0] for group in ties(lazy) for alias in group[1:]}
    jobs = [_Job(name, specs[name], lazy[name]) for name in specs if name not in owners]
    check_budget([job.node for job in jobs], budget)
    metadata = _provenance(state, lazy.values())
    if is_file:
        sink = SafetensorsSink.create(
            path, specs, metadata=metadata, aliases=owners, overwrite=overwrite, durable=False
        )
    else:
        sink = SafetensorsSink.create_folder(
            path,
            specs,
            max_shard_size=max_shard_size,
            metadata=metadata,
            aliases=owners,
            overwrite=overwrite,
            durable=False,
        )
    with sink, Progress(f"saving {path.name}", sum(job.spec.nbytes for job in jobs)) as progress:
        _Stream(sink, jobs, budget, progress).run()


def _storable(state: Mapping[str, Any]) -> dict[str, TensorSpec]:
    """Give the specs, or name everything that is no tensor or has no data."""
    specs = {name: spec for name, leaf in state.items() if (spec := spec_of(leaf)) is not None}
    if odd := [name for name in state if name not in specs]:
        raise Unsupported(
            f"save: safetensors files hold tensors only; these are none: {listing(odd)}. drop() them, or save as .pt."
        )
    hollow = [name for name, leaf in state.items() if isinstance(leaf, TensorSpec)]
    hollow += [name for name, leaf in state.items() if isinstance(leaf, torch.Tensor) and leaf.is_meta]
    if hollow:
        raise SpecMismatch(
            f"save: {listing(hollow)} have no data (specs, or on the meta device). Read or init them first."
        )
    return specs


@frozen
class _Job:
    """One tensor to write."""

    name: str
    spec: TensorSpec
    node: Lazy


class _Stream:
    """Writes tensors one after the other: by kernel copies where they are runs of a file, else in chunks."""

    def __init__(self, sink: SafetensorsSink, jobs: Sequence[_Job], budget: int, progress: Progress) -> None:
        self._sink = sink
        self._jobs = jobs
        self._progress = progress
        self._session = Session([job.node for job in jobs], budget=budget)
        self._chunk = max(1 << 16, min(_CHUNK, budget // 4))
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def run(self) -> None:
        with torch.no_grad():
            for position, (job, node) in enumerate(zip(self._jobs, self._session.roots, strict=True)):
                try:
                    self._write(job, node)
                except Exception as error:
                    add_note(error, f"while saving {job.name!r}, {job.spec}")
                    raise
                self._session.finish(position)

    def _write(self, job: _Job, node: Lazy) -> None:
        runs = copy_runs(plan_of([node])) if job.spec.numel and _is_structural(node) else None
        if runs is not None:
            for run in runs:
                self._sink.copy(job.name, run.offset, run.extent)
                self._progress.advance(run.extent.nbytes)
            return
        size = job.spec.dtype.itemsize
        for region, where in Region.whole(job.spec.shape).chunks(self._chunk // size):
            memory = self._memory(region, job.spec)
            self._session.fill(node, region, memory)
            self._sink.write(job.name, _offset(where, job.spec) * size, memory)
            self._progress.advance(region.numel * size)

    def _memory(self, region: Region, spec: TensorSpec) -> torch.Tensor:
        """Give memory for a chunk, the same every time: fresh memory costs several times as much."""
        nbytes = region.numel * spec.dtype.itemsize
        if self._buffer.numel() < nbytes:
            self._session.hold(-self._buffer.numel())
            self._buffer = torch.empty(max(nbytes, self._chunk), dtype=torch.uint8)
            self._session.hold(self._buffer.numel())
        return self._buffer[:nbytes].view(spec.dtype).view(region.shape)


def _is_structural(node: Lazy) -> bool:
    """Whether a plan is worth making: an origin, or something on top of operations that move elements."""
    return isinstance(node.op, Origin | Structural)


def _offset(where: Iterable[slice], spec: TensorSpec) -> int:
    offset = 0
    for part, size in zip(where, spec.shape, strict=True):
        offset = offset * size + part.start
    return offset


def _provenance(state: Mapping[str, Any], leaves: Iterable[Any]) -> dict[str, str]:
    """Say which pipeline made the state, and of which files."""
    made: dict[str, str] = {}
    history = getattr(state, "history", ())
    if history:
        made["fdsd.pipeline"] = repr(Pipeline(history))
    files = _files(leaves)
    if files:
        made["fdsd.sources"] = json.dumps(files)
    return made


def _files(leaves: Iterable[Any]) -> list[dict[str, Any]]:
    seen: set[int] = set()
    found: dict[str, int] = {}
    stack = [leaf for leaf in leaves if isinstance(leaf, Lazy)]
    while stack:
        node = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        stack.extend(node.inputs)
        if isinstance(node.op, Origin):
            for piece in node.op.source.pieces(node.op.fqn):
                if isinstance(piece.owner, str) and piece.owner not in found:
                    found[piece.owner] = os.stat(piece.owner).st_size
    return [{"name": os.path.basename(name), "size": size} for name, size in sorted(found.items())]
