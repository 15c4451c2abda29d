"""``fdsd ls``: the tensors of a checkpoint, those that differ in their indices only on one line."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from fdsd.cli.command import Command, add_format, add_key, open_state
from fdsd.cli.console import Console

if TYPE_CHECKING:
    from fdsd.data.naming import Fold

__all__ = ["COMMAND"]


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="a safetensors file, index or folder, or a torch file")
    add_key(parser)
    add_format(parser)


def _run(options: argparse.Namespace) -> int:
    from fdsd.pipeline.check import abstract

    state = abstract(open_state(options.path, options.key, options.format))
    console = Console()
    rows = list(_rows(state))
    console.table([cells for cells, _ in rows], right=(2,), styles=["dim" if tied else None for _, tied in rows])
    for line in _totals(state):
        console.line(line, "bold")
    return 0


def _owners(state: Mapping[str, Any]) -> dict[str, str]:
    """Give the first name of the tensor of each further name."""
    from fdsd.data.ties import ties

    return {alias: group[0] for group in ties(state) for alias in group[1:]}


def _rows(state: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str, str, str], bool]]:
    """Give for each line its cells, and whether it is about further names of tensors."""
    from fdsd.data.naming import fold
    from fdsd.data.spec import spec_of

    owners = _owners(state)

    def kind(name: str) -> tuple[str, str | None]:
        spec = spec_of(state[name])
        owner = owners.get(name)
        text = type(state[name]).__name__ if spec is None else str(spec)
        return text, None if owner is None else re.sub(r"\d+", "#", owner)

    for found in fold(state, kind):
        first, count = found.names[0], len(found.names)
        spec, is_tied = spec_of(state[first]), first in owners
        what = f"{count} x {kind(first)[0]}" if count > 1 else kind(first)[0]
        nbytes = "" if spec is None or is_tied else f"{spec.nbytes * count:,}"
        note = f"tied to {_owner_text(found, owners)}" if is_tied else ""
        yield (found.text, what, nbytes, note), is_tied


def _owner_text(found: Fold, owners: Mapping[str, str]) -> str:
    from fdsd.data.naming import fold

    texts = [owner.text for owner in fold([owners[name] for name in found.names])]
    return texts[0] if len(texts) == 1 else f"{texts[0]} and others"


def _totals(state: Mapping[str, Any]) -> Iterator[str]:
    """Word the sums: all tensors, then each dtype if there are several."""
    from fdsd.data.errors import plural
    from fdsd.data.sizes import format_size
    from fdsd.data.spec import dtype_name, spec_of

    owners = _owners(state)
    sums: dict[str, tuple[int, int]] = {}
    for name, leaf in state.items():
        if (spec := spec_of(leaf)) is not None and name not in owners:
            count, nbytes = sums.get(dtype_name(spec.dtype), (0, 0))
            sums[dtype_name(spec.dtype)] = count + 1, nbytes + spec.nbytes
    total = sum([nbytes for _, nbytes in sums.values()])
    count = sum([count for count, _ in sums.values()])
    others = len([name for name, leaf in state.items() if spec_of(leaf) is None])
    more = f", {plural(len(owners), 'tied name')}" if owners else ""
    more += f", {plural(others, 'object')} that {'is' if others == 1 else 'are'} no tensor" if others else ""
    size = f"{total:,} bytes" + (f" ({format_size(total)})" if total >= 1000 else "")
    yield f"{plural(count, 'tensor')}, {size}{more}"
    if len(sums) > 1:
        for dtype, (count, nbytes) in sorted(sums.items()):
            yield f"  {dtype}: {plural(count, 'tensor')}, {nbytes:,} bytes"


COMMAND = Command(
    name="ls",
    summary="list the tensors of a checkpoint",
    details="List the tensors of a checkpoint: names, shapes, dtypes and bytes. Only headers are read. Names that "
    "differ in\ntheir indices only share a line; a tied tensor counts once.",
    examples=("fdsd ls model.safetensors", "fdsd ls checkpoint.pt --key model"),
    arguments=_arguments,
    run=_run,
)
