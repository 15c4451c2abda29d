"""Reading any region of a row-major tensor that lies somewhere in a file, and its contiguous runs.

Long runs of the right dtype are read straight into place. All else goes through a small contiguous scratch:
covering ranges where the elements lie close together, run by run where they do not. Nothing here opens files.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence

import torch

from fdsd.algebra.dtypes import check_cast, copy_elements
from fdsd.data.errors import SpecMismatch
from fdsd.data.region import Region
from fdsd.data.spec import TensorSpec
from fdsd.data.strides import Dim, joined, offsets, row_major

__all__ = ["ReadBytes", "contiguous_runs", "memory_of", "read_region"]

ReadBytes = Callable[[int, memoryview], None]
"""Fills memory with the bytes from an offset on, exactly, or raises ``BadFile``."""

SCRATCH = 2 << 20
"""The most bytes that one read takes beside ``out``; small enough to stay in a cache."""
GAP = 8 << 10
"""Bytes between two runs that cost no more to read than another system call."""
RUN = 64 << 10
"""Runs of so many bytes are read straight into place, whatever lies between them."""
TURN = 4096
"""Elements of a matrix from which on a transposed copy is turned first."""

_CELLS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Give the bytes of a contiguous CPU tensor as writable memory; the tensor must outlive it.

    >>> tensor = torch.tensor([1, 258], dtype=torch.int16)
    >>> memory_of(tensor).tolist()
    [1, 0, 2, 1]
    """
    assert tensor.device.type == "cpu" and tensor.is_contiguous()
    return _memory_at(tensor, tensor.numel() * tensor.itemsize)


def _memory_at(tensor: torch.Tensor, nbytes: int) -> memoryview:
    if not nbytes:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * nbytes).from_address(tensor.data_ptr())).cast("B")


def read_region(read_bytes: ReadBytes, spec: TensorSpec, base: int, region: Region, out: torch.Tensor) -> None:
    """Read a region of a row-major tensor into ``out``.

    Args:
        read_bytes: Reads bytes of the file, exactly.
        spec: The whole tensor.
        base: The offset of its first byte.
        region: The elements; steps are 0 or more.
        out: Memory with one dim for each pair of the region, of any strides, dtype and device; elements are
            cast as ``copy_`` casts.

    Raises:
        SpecMismatch: The region does not lie within the tensor, or ``out`` has another shape.
        Unsupported: A cast that torch cannot do.

    Law: equals ``out.copy_(tensor.as_strided(...))`` for the tensor in memory.

    >>> data = bytes(range(12))
    >>> def read(offset, memory): memory[:] = data[offset : offset + len(memory)]
    >>> out = torch.empty(2, dtype=torch.int64)
    >>> read_region(read, TensorSpec((3, 4), torch.uint8), 0, Region.box((1, 2), (1, 2)), out[None]); out
    tensor([6, 7])
    """
    region.check_inside(spec.shape, f"reading from a tensor of shape {spec.shape}")
    if any(step < 0 for span in region.spans for _, step in span.pairs):
        raise SpecMismatch(f"reading from a tensor of shape {spec.shape}: the region {region} has a step below 0.")
    if tuple(out.shape) != region.shape:
        raise SpecMismatch(
            f"reading a region of shape {region.shape} into memory of shape {tuple(out.shape)}: they must be equal."
        )
    check_cast(spec.dtype, out.dtype)
    if not region.numel:
        return
    steps, start = region.strides(row_major(spec.shape))
    with torch.no_grad():
        walk = _Walk(read_bytes, spec, base, out.detach())
        walk.run(joined(map(Dim, region.shape, steps, out.stride())) or [Dim(1, 1, 1)], start)


def _reach(dims: Sequence[Dim]) -> int:
    """How many consecutive elements of the file cover these dims."""
    return 1 + sum([(dim.length - 1) * dim.source for dim in dims])


class _Walk:
    """One read: where bytes come from, and where elements go."""

    def __init__(self, read_bytes: ReadBytes, spec: TensorSpec, base: int, out: torch.Tensor) -> None:
        self.read_bytes = read_bytes
        self.item = spec.dtype.itemsize
        self.base = base
        cell = _CELLS[self.item]
        self.scratch = torch.empty(0, dtype=cell)
        # Equal dtypes move as bits: copy_ would change the bytes of a bool that is neither 0 nor 1.
        is_raw = out.dtype == spec.dtype and not (out.is_conj() or out.is_neg())
        self.is_plain = is_raw and out.device.type == "cpu"
        self.dtype = cell if is_raw else spec.dtype
        self.out = out.view(cell) if is_raw else out

    def run(self, dims: list[Dim], start: int) -> None:
        """Read all elements of merged dims, the first of which is element ``start`` of the tensor."""
        inner = self._inner(dims)
        last = dims[-1]
        straight = self.is_plain and last.source == last.target == 1
        if straight and (inner >= len(dims) - 1 or last.length * self.item >= RUN):
            self._read_straight(dims, start)
            return
        for part, source, target in _cut(dims, inner, max(1, SCRATCH // self.item)):
            self._read_through_scratch(part, inner - (len(dims) - len(part)), start + source, target)

    def _inner(self, dims: list[Dim]) -> int:
        """Give the first dim from which on one covering read is cheaper than many reads."""
        first, reach = len(dims), 1
        while first and (dims[first - 1].source - reach) * self.item <= GAP:
            first -= 1
            reach += (dims[first].length - 1) * dims[first].source
        return first

    def _read_straight(self, dims: list[Dim], start: int) -> None:
        *outer, last = dims
        span = 1 + sum([(dim.length - 1) * dim.target for dim in dims])
        memory = _memory_at(self.out, span * self.item)
        nbytes = last.length * self.item
        for source, target in offsets(outer):
            at = target * self.item
            self.read_bytes(self.base + (start + source) * self.item, memory[at : at + nbytes])

    def _read_through_scratch(self, dims: list[Dim], inner: int, start: int, target: int) -> None:
        """Read dims that fit the scratch, those before ``inner`` one by one, and copy the elements out."""
        inner = max(0, inner)
        reach = _reach(dims[inner:])
        outer = dims[:inner]
        packed = [reach * step for step in row_major([dim.length for dim in outer])]
        count = reach
        for dim in outer:
            count *= dim.length
        if self.scratch.numel() < count:
            self.scratch = torch.empty(count, dtype=_CELLS[self.item])
        memory = memory_of(self.scratch)
        grid = [Dim(dim.length, dim.source, step) for dim, step in zip(outer, packed, strict=True)]
        for source, there in offsets(grid):
            at = there * self.item
            self.read_bytes(self.base + (start + source) * self.item, memory[at : at + reach * self.item])
        shape = [dim.length for dim in dims]
        found = self.scratch.as_strided(shape, packed + [dim.source for dim in dims[inner:]])
        place = self.out.storage_offset() + target
        _copy_cells(found, self.out.as_strided(shape, [dim.target for dim in dims], place), self.dtype)


def _copy_cells(found: torch.Tensor, out: torch.Tensor, dtype: torch.dtype) -> None:
    """Copy raw cells that are elements of ``dtype`` into ``out``; a transposed copy is turned first.

    torch has a fast kernel for turning a whole matrix, and none for writing columns: in two steps it takes
    half the time, or less.
    """
    if found.ndim >= 2 and out.stride(-2) < out.stride(-1):
        rows, columns = found.shape[-2:]
        if rows * columns >= TURN and min(rows, columns) >= 16 and found.stride()[-2:] == (columns, 1):
            for part, place in _matrices(found, out):
                turned = torch.empty((columns, rows), dtype=part.dtype)
                turned.copy_(part.t())
                copy_elements(turned.view(dtype), place.t())
            return
    copy_elements(found.view(dtype), out)


def _matrices(a: torch.Tensor, b: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pair the matrices of the last two dims of two tensors of one shape."""
    if a.ndim == 2:
        yield a, b
        return
    for one, other in zip(a, b, strict=True):
        yield from _matrices(one, other)


def _cut(dims: list[Dim], inner: int, limit: int) -> Iterator[tuple[list[Dim], int, int]]:
    """Cut dims into parts whose scratch has at most ``limit`` elements.

    Yields:
        The remaining dims of each part (outer ones that are cut to one element are gone), and the offsets of
        its first element in the file and in memory.
    """
    rooms = _rooms(dims, inner)
    cut = next((k for k in range(len(dims)) if rooms[k + 1] <= limit), len(dims) - 1)
    before, dim, rest = dims[:cut], dims[cut], dims[cut + 1 :]
    if cut < inner:
        length = limit // rooms[cut + 1]
    else:
        length = (limit - rooms[cut + 1]) // dim.source + 1 if dim.source else dim.length
    length = max(1, min(length, dim.length))
    for source, target in offsets(before):
        for i in range(0, dim.length, length):
            part = [dim._replace(length=min(length, dim.length - i)), *rest]
            yield part, source + i * dim.source, target + i * dim.target


def _rooms(dims: list[Dim], inner: int) -> list[int]:
    """Give, for every dim, how many elements the scratch of this dim and those behind it has."""
    rooms = [1]
    for k in range(len(dims) - 1, -1, -1):
        dim, room = dims[k], rooms[0]
        rooms.insert(0, room * dim.length if k < inner else room + (dim.length - 1) * dim.source)
    return rooms


def contiguous_runs(spec: TensorSpec, region: Region) -> Iterator[tuple[int, int, int]]:
    """List the runs of consecutive elements of a region, as long as they can be, one by one.

    Args:
        spec: The tensor.
        region: Elements of it.

    Yields:
        The run's first element in the row-major tensor, its first element in the row-major order of the
        region, and its length.

    >>> list(contiguous_runs(TensorSpec((3, 4), torch.int8), Region.box((0, 1), (2, 3))))
    [(1, 0, 3), (5, 3, 3)]
    """
    region.check_inside(spec.shape, f"runs of a tensor of shape {spec.shape}")
    if not region.numel:
        return
    steps, start = region.strides(row_major(spec.shape))
    dims = [(length, step) for length, step in zip(region.shape, steps, strict=True) if length != 1]
    run = 1
    while dims and dims[-1][1] == run:
        run *= dims.pop()[0]
    begin, length, done = start, 0, 0
    for source, _ in offsets([Dim(size, step, 0) for size, step in dims]):
        at = start + source
        if at != begin + length:
            yield begin, done, length
            begin, done, length = at, done + length, 0
        length += run
    yield begin, done, length
