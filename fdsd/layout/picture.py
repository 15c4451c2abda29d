"""A picture of a layout: who owns which part of a tensor, as a drawing for notebooks and as text for terminals.

SVG is written by hand, so that nothing has to be installed. Nothing is decided here.
"""

from __future__ import annotations

import html
import itertools
from collections.abc import Iterable, Sequence

from attrs import frozen

from fdsd.data.errors import SpecMismatch, Unsupported, listing, plural
from fdsd.layout.layout import Layout
from fdsd.layout.placement import Shard

__all__ = ["Picture", "picture"]

_WIDTH, _HEIGHT, _LEFT, _TOP = 420.0, 260.0, 74.0, 44.0
_LEAST = 26.0
"""How many pixels the smallest piece has at least, in each direction."""


@frozen
class _Piece:
    rows: tuple[int, int]  # start and size
    columns: tuple[int, int]
    ranks: tuple[int, ...]


@frozen(repr=False)
class Picture:
    """Who owns what of one tensor. A notebook draws it; ``print`` shows it as text.

    Attributes:
        title: What is drawn.
        pieces: The parts with the ranks that hold them.
        dims: The dims that are drawn as rows and as columns; ``None`` for one that the tensor lacks.
        ranks: All ranks of the mesh.
    """

    title: str
    pieces: tuple[_Piece, ...]
    dims: tuple[int | None, int | None]
    ranks: tuple[int, ...]

    def _edges(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        return sorted({piece.rows for piece in self.pieces}), sorted({piece.columns for piece in self.pieces})

    def __str__(self) -> str:
        rows, columns = self._edges()
        cells = {(piece.rows, piece.columns): _owners(piece.ranks) for piece in self.pieces}
        table = [["" if self.dims[1] is None else _range_text("column", one) for one in columns]]
        table += [[cells[row, column] for column in columns] for row in rows]
        if self.dims[0] is not None:
            table = [
                [text, *line] for text, line in zip(["", *[_range_text("row", r) for r in rows]], table, strict=True)
            ]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join([cell.ljust(n) for cell, n in zip(line, widths, strict=True)]).rstrip() for line in table]
        return "\n".join([self.title, *[line for line in lines if line], *self._idle()])

    __repr__ = __str__

    def _idle(self) -> list[str]:
        """Say which ranks hold nothing."""
        busy = {rank for piece in self.pieces for rank in piece.ranks}
        idle = [rank for rank in self.ranks if rank not in busy]
        return [f"nothing: {'rank' if len(idle) == 1 else 'ranks'} {listing(idle, limit=16)}"] if idle else []

    def _repr_svg_(self) -> str:
        """Draw it; notebooks call this."""
        rows, columns = self._edges()
        down, across = _scale(rows, _HEIGHT), _scale(columns, _WIDTH)
        order = {rank: k for k, rank in enumerate(dict.fromkeys([p.ranks[0] for p in self.pieces]))}
        body = [_text(_LEFT, 18, self.title, anchor="start")]
        for piece in self.pieces:
            x, width = across[piece.columns]
            y, height = down[piece.rows]
            hue = round(360 * order[piece.ranks[0]] / max(1, len(order)))
            body.append(
                f'<rect x="{_LEFT + x:g}" y="{_TOP + y:g}" width="{width:g}" height="{height:g}" '
                f'fill="hsl({hue}, 60%, 80%)" stroke="#333"><title>{_owners(piece.ranks)}</title></rect>'
            )
            body.append(_text(_LEFT + x + width / 2, _TOP + y + height / 2 + 4, _short(piece.ranks, width)))
        if self.dims[0] is not None:
            body += [_text(_LEFT - 6, _TOP + y + h / 2 + 4, _span(row), anchor="end") for row, (y, h) in down.items()]
        if self.dims[1] is not None:
            body += [_text(_LEFT + x + w / 2, _TOP - 6, _span(column)) for column, (x, w) in across.items()]
        bottom = _TOP + sum([height for _, height in down.values()]) + 22
        body += [_text(_LEFT, bottom, line, anchor="start") for line in self._idle()]
        width = _LEFT + max(sum([width for _, width in across.values()]), 7.0 * len(self.title)) + 12
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{bottom + 8:g}" '
            f'font-family="sans-serif" font-size="12" style="background: #fff">{"".join(body)}</svg>'
        )


def _text(x: float, y: float, text: str, *, anchor: str = "middle") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="#333">{html.escape(text)}</text>'


def _scale(parts: Sequence[tuple[int, int]], pixels: float) -> dict[tuple[int, int], tuple[float, float]]:
    """Give each part its place and length: as many pixels as it has indices, but no fewer than can be read."""
    total = sum([size for _, size in parts])
    lengths = [max(_LEAST, pixels * size / max(1, total)) for _, size in parts]
    ends = itertools.accumulate(lengths)
    return {part: (end - length, length) for part, end, length in zip(parts, ends, lengths, strict=True)}


def _span(part: tuple[int, int]) -> str:
    start, size = part
    return str(start) if size == 1 else f"{start}-{start + size - 1}"


def _range_text(noun: str, part: tuple[int, int]) -> str:
    return f"{noun if part[1] == 1 else noun + 's'} {_span(part)}"


def _owners(ranks: Iterable[int]) -> str:
    some = sorted(ranks)
    return f"rank {some[0]}" if len(some) == 1 else f"ranks {', '.join(map(str, some))}"


def _short(ranks: Sequence[int], width: float) -> str:
    """Name the ranks in as many pixels as there are."""
    room = int(width / 7)
    for text in (_owners(ranks), ", ".join(map(str, sorted(ranks))), f"{len(ranks)} ranks"):
        if len(text) <= room:
            return text
    return str(len(ranks)) if len(ranks) > 1 else str(ranks[0])


def picture(layout: Layout, shape: Iterable[int], *, dims: Sequence[int] | None = None) -> Picture:
    """Draw who owns which part of a tensor.

    Args:
        layout: How it lies.
        shape: Its shape.
        dims: One or two dims that are drawn, rows and columns; by default those that are cut, then the first ones.

    Raises:
        SpecMismatch: The layout does not fit the shape, or there are no such dims.
        Unsupported: A dim that is not drawn is cut too.

    >>> from fdsd.layout.mesh import Mesh
    >>> picture(Layout(Mesh({"dp": 2, "tp": 2}), [Shard(0), Shard(1)]), (5, 4))
    (5, 4) as Layout(Mesh({'dp': 2, 'tp': 2}), (Shard(0), Shard(1)))
              columns 0-1  columns 2-3
    rows 0-2  rank 0       rank 1
    rows 3-4  rank 2       rank 3
    """
    shape = tuple(shape)
    holders = list(layout.holders(shape))
    cut = sorted({p.dim % len(shape) for p in layout.placements if isinstance(p, Shard)})
    drawn = (
        _drawn(shape, cut) if dims is None else [dim % len(shape) for dim in dims if -len(shape) <= dim < len(shape)]
    )
    if dims is not None and (len(drawn) != len(dims) or len(set(drawn)) != len(dims) or not 1 <= len(dims) <= 2):
        raise SpecMismatch(f"picture: dims={tuple(dims)} are not one or two dims of the shape {shape}.")
    if hidden := [dim for dim in cut if dim not in drawn]:
        raise Unsupported(
            f"picture: {plural(len(cut), 'dim')} are cut, and {listing(hidden)} would not be seen. Draw the parts."
        )
    row, column = [*drawn, None, None][:2]
    pieces = [_Piece(_along(box, row), _along(box, column), ranks) for box, ranks in holders]
    return Picture(f"{shape} as {layout}", tuple(pieces), (row, column), layout.mesh.ranks)


def _drawn(shape: tuple[int, ...], cut: Sequence[int]) -> list[int]:
    chosen = list(cut[:2])
    chosen += [dim for dim in range(len(shape)) if dim not in chosen][: 2 - len(chosen)]
    return sorted(chosen)


def _along(box: tuple[tuple[int, ...], tuple[int, ...]], dim: int | None) -> tuple[int, int]:
    return (0, 1) if dim is None else (box[0][dim], box[1][dim])
