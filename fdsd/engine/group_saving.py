"""Saving a state that lies over the ranks of a group: one rank writes, the others send it what it needs, in parts.

No rank but the writer needs memory for more than its messages, and the writer none for more than its budget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch

from fdsd.algebra.apply import apply
from fdsd.algebra.graph import walk
from fdsd.algebra.lazy import Computing, Lazy
from fdsd.algebra.ops import Slice
from fdsd.data.errors import RanksLost, SpecMismatch, UnknownName, listing
from fdsd.data.protocols import World
from fdsd.data.region import Region
from fdsd.data.spec import TensorSpec
from fdsd.engine.agreement import least
from fdsd.engine.asking import Step
from fdsd.engine.delivery import Delivery, plan_delivery
from fdsd.engine.flows import Flow
from fdsd.engine.gathering import one_rank
from fdsd.engine.outlines import shared_ties
from fdsd.engine.progress import Progress
from fdsd.engine.request import Request
from fdsd.engine.unions import agree_on, everyone, together, union_of
from fdsd.layout.sharded import Sharded
from fdsd.storage.safetensors_sink import SafetensorsSink

__all__ = ["Begin", "save_over", "writer_of"]

Begin = Callable[[Mapping[str, TensorSpec], Mapping[str, str]], SafetensorsSink]
"""Begins to write tensors of these specs, with these aliases of owners."""

_LEAST = 1 << 16
_Part = tuple[str, Region]


def writer_of(state: Mapping[str, Any], world: World) -> int:
    """Choose who writes: the rank that ``gather(to=rank)`` names, or the first of the group.

    Raises:
        SpecMismatch: Several ranks are named, or one outside of the group.
        RankDisagreement: The ranks name different ones.

    >>> import torch
    >>> from fdsd.comms.alone import Alone
    >>> writer_of({"w": torch.ones(1)}, Alone(2))
    2
    """
    named = {
        leaf.layout.mesh.ranks[0] for leaf in state.values() if isinstance(leaf, Sharded) and leaf.layout.mesh.size == 1
    }
    found = {rank for some in everyone(world, sorted(named), "save: who writes") for rank in some}
    if len(found) > 1 or not found <= set(world.ranks):
        raise SpecMismatch(
            f"save: the state is gathered to the ranks {listing(found)}; one rank of the group {list(world.ranks)} "
            "writes. Gather all of it to that one."
        )
    return found.pop() if found else world.ranks[0]


def save_over(
    world: World,
    writer: int,
    nodes: Mapping[str, Lazy],
    begin: Begin,
    *,
    budget: int,
    finish: Callable[[], None],
) -> None:
    """Send the parts of tensors to the writer, which writes them; collective.

    Args:
        world: The ranks.
        writer: The rank that writes.
        nodes: This rank's tensors.
        begin: Begins to write, on the writer.
        budget: Bytes that may be under way; the smallest of all ranks counts.
        finish: Puts other files in their place, on the writer, before the tensors' files are.

    Raises:
        RankDisagreement: The ranks know different things of one name; on all.
        FdsdError: One of them failed; the same on all.
    """
    aliases = shared_ties(world, nodes, "save")
    mine = {name: (node.shape, node.dtype) for name, node in nodes.items()}
    specs = {
        name: TensorSpec(*spec) for name, spec in union_of(world, mine, "the tensors to save", show=_shown).items()
    }
    stored = {name: spec for name, spec in specs.items() if name not in aliases}
    owned = {aliases.get(name, name): node for name, node in nodes.items()}
    common = least(everyone(world, budget, "save: the budget"))
    assert common is not None
    parts = dict(_parts(stored, _opaque(world, owned), max(_LEAST, common // 4)))
    target = one_rank(writer, "save")
    requests = {
        label: Request(_cut(owned[name], region), target) for label, (name, region) in parts.items() if name in owned
    }
    delivery = plan_delivery(requests, world, budget=common, asked="save")
    sink = together(world, "save", lambda: begin(specs, aliases) if world.rank == writer else None)
    error: BaseException | None = None
    step = Step.of(world)
    try:
        with sink or nullcontext():
            _write(world, delivery, parts, sink, stored)
            if sink is not None:
                finish()
    except BaseException as found:
        if isinstance(found, RanksLost) or step.is_past:
            raise  # there is nobody to agree with
        error = found
    agree_on(world, error, "save")


def _shown(spec: tuple[tuple[int, ...], torch.dtype]) -> TensorSpec:
    return TensorSpec(*spec)


def _opaque(world: World, nodes: Mapping[str, Lazy]) -> set[str]:
    """Find the tensors that are made by operations which need their whole input: parts of them would cost as much."""
    mine = [
        name
        for name, node in nodes.items()
        if any(isinstance(below.op, Computing) and below.op.whole for below in walk([node]))
    ]
    return {name for names in everyone(world, mine, "save: what is computed whole") for name in names}


def _parts(stored: Mapping[str, TensorSpec], opaque: set[str], limit: int) -> Iterator[tuple[str, _Part]]:
    """Cut tensors into parts that fit the budget, by labels that are no names of others."""
    taken = set(stored)
    for name, spec in stored.items():
        whole = Region.whole(spec.shape)
        if spec.nbytes <= limit or name in opaque:
            yield name, (name, whole)
            continue
        for i, (region, _) in enumerate(whole.chunks(max(1, limit // spec.dtype.itemsize))):
            label = f"{name} (part {i})"
            while label in taken:
                label += "'"
            taken.add(label)
            yield label, (name, region)


def _cut(node: Lazy, region: Region) -> Lazy:
    for dim, (span, size) in enumerate(zip(region.spans, node.shape, strict=True)):
        (length, _), *_rest = span.pairs
        if length != size:
            node = apply(Slice(dim, span.start, length), node)
    return node


def _write(
    world: World,
    delivery: Delivery,
    parts: Mapping[str, _Part],
    sink: SafetensorsSink | None,
    stored: Mapping[str, TensorSpec],
) -> None:
    """Write what arrives; leaving early ends the delivery on all ranks."""
    with Flow(delivery.run, world, "save") as items:
        if sink is None:
            for label, _ in items:
                raise UnknownName(f"save: {label!r} came to a rank that does not write.")
            return
        with Progress(f"saving {sink.path.name}", sum([spec.nbytes for spec in stored.values()])) as progress:
            for label, value in items:
                name, region = parts[label]
                sink.write(name, region, value)
                progress.advance(value.nbytes)
