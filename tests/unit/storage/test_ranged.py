"""Reading regions of a row-major tensor equals slicing the tensor in memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fdsd.data.errors import SpecMismatch, Unsupported
from fdsd.data.region import Region, Span
from fdsd.data.spec import TensorSpec
from fdsd.data.strides import row_major
from fdsd.storage import ranged
from fdsd.storage.ranged import contiguous_runs, memory_of, read_region

SAME = [
    "bool",
    "uint8",
    "int16",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e8m0fnu",
    "complex64",
    "complex128",
    "float4_e2m1fn_x2",
    "uint4",
    "bits8",
]
CASTS = [
    ("int16", "float32"),
    ("float32", "bfloat16"),
    ("uint8", "int64"),
    ("uint16", "float32"),
    ("float8_e4m3fn", "float32"),
    ("float32", "float8_e5m2"),
    ("complex64", "complex128"),
    ("bool", "float32"),
    ("float64", "bool"),
]
DTYPES = [(a, a) for a in SAME if hasattr(torch, a)] + [(a, b) for a, b in CASTS if hasattr(torch, a)]
CELLS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def stored(shape: tuple[int, ...], source: str, target: str) -> torch.Tensor:
    """A tensor of different elements: any bits where they are moved, values where they are cast."""
    dtype = getattr(torch, source)
    count = torch.arange(TensorSpec(shape, dtype).numel).reshape(shape)
    if source != target:
        return (count % 2 if source == "bool" else count).to(dtype)
    cell = CELLS[dtype.itemsize]
    return (count * 3 + 1).to(cell).view(dtype)


@st.composite
def spans(draw: st.DrawFn, size: int) -> Span:
    if not size:
        pairs = draw(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=2))
        return Span(0, (*pairs, (0, 1)))
    pairs: list[tuple[int, int]] = []
    room = size - 1
    for _ in range(draw(st.integers(0, 3))):
        step = draw(st.integers(0, 3) if room else st.just(0))
        length = draw(st.integers(0, 1 + (room // step if step else 2)))
        pairs.append((length, step))
        room -= max(0, length - 1) * step
    return Span(draw(st.integers(0, room)), tuple(draw(st.permutations(pairs))))


@st.composite
def regions(draw: st.DrawFn, max_size: int = 9) -> tuple[tuple[int, ...], Region]:
    shape = tuple(draw(st.lists(st.integers(0, max_size), max_size=4)))
    return shape, Region(tuple(draw(spans(size)) for size in shape))


@st.composite
def places(draw: st.DrawFn, shape: tuple[int, ...]) -> Any:
    """How memory of a shape lies in a buffer: the order of dims, the gaps, and where it begins."""
    order = draw(st.permutations(range(len(shape))))
    gaps = draw(st.lists(st.integers(0, 2), min_size=len(shape), max_size=len(shape)))
    strides = [0] * len(shape)
    step = draw(st.integers(1, 2))
    for dim in reversed(order):
        strides[dim] = step
        step = max(1, step * (max(1, shape[dim]) + gaps[dim]))
    return tuple(strides), draw(st.integers(0, 3)), step + 8


def view(buffer: torch.Tensor, shape: tuple[int, ...], place: Any) -> torch.Tensor:
    strides, offset, _ = place
    return buffer.as_strided(shape, strides, offset)


class Reads:
    """A file in memory that remembers what was read."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.sizes: list[int] = []

    def __call__(self, offset: int, memory: memoryview) -> None:
        assert offset >= 0 and offset + len(memory) <= len(self.data), "read beyond the file"
        assert not memory.readonly
        self.sizes.append(len(memory))
        memory[:] = self.data[offset : offset + len(memory)]


def file_of(tensor: torch.Tensor, base: int) -> Reads:
    cells = tensor.view(CELLS[tensor.itemsize]).contiguous()
    return Reads(b"\xee" * base + bytes(memory_of(cells)) + b"\xdd" * 4)


@given(st.data(), regions(), st.sampled_from(DTYPES), st.integers(0, 9))
@settings(max_examples=800)
def test_reading_a_region_equals_slicing(
    data: st.DataObject, case: tuple[tuple[int, ...], Region], dtypes: tuple[str, str], base: int
) -> None:
    shape, region = case
    tensor = stored(shape, *dtypes)
    spec = TensorSpec(shape, tensor.dtype)
    place = data.draw(places(region.shape))
    target = getattr(torch, dtypes[1])
    buffers = [torch.full((place[2],), 0x55, dtype=torch.uint8).repeat(target.itemsize).view(target) for _ in "ab"]
    limits = {
        "SCRATCH": data.draw(st.sampled_from([1, 16, 100, 2 << 20])),
        "GAP": data.draw(st.sampled_from([-1, 0, 8, 8 << 10])),
        "RUN": data.draw(st.sampled_from([1, 12, 64 << 10])),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in limits.items():
            patch.setattr(ranged, name, value)
        read_region(file_of(tensor, base), spec, base, region, view(buffers[0], region.shape, place))
    strides, offset = region.strides(row_major(shape))
    carrier = CELLS[tensor.itemsize] if dtypes[0] == dtypes[1] else tensor.dtype
    expected = view(buffers[1] if carrier == tensor.dtype else buffers[1].view(carrier), region.shape, place)
    if region.numel:
        expected.copy_(tensor.view(carrier).contiguous().as_strided(region.shape, strides, offset))
    cell = CELLS[target.itemsize]
    assert bytes(memory_of(buffers[0].view(cell))) == bytes(memory_of(buffers[1].view(cell)))


@given(regions())
@settings(max_examples=300)
def test_runs_are_the_region_in_order_and_as_long_as_can_be(case: tuple[tuple[int, ...], Region]) -> None:
    shape, region = case
    strides = row_major(shape)
    indices = [span.indices() for span in region.spans]
    expected = [sum(i * s for i, s in zip(point, strides, strict=True)) for point in itertools.product(*indices)]
    runs = list(contiguous_runs(TensorSpec(shape, torch.int8), region))
    assert [begin + i for begin, _, length in runs for i in range(length)] == expected
    assert [at + i for _, at, length in runs for i in range(length)] == list(range(len(expected)))
    assert all(a[0] + a[2] != b[0] for a, b in itertools.pairwise(runs))


def test_runs_come_one_by_one() -> None:
    spec = TensorSpec((10**6, 10**6), torch.int8)
    runs = contiguous_runs(spec, Region((Span(0, ((10**3, 10**3),)), Span(1, ((10**3, 2),)))))
    assert isinstance(runs, Iterator)
    assert next(runs) == (1, 0, 1)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.float32, torch.int64, torch.complex128])
@pytest.mark.parametrize("shape", [(80, 70), (3, 70, 80), (4100, 16), (16, 4100), (2, 2, 65, 64)])
def test_a_transposed_read_is_turned(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = torch.arange(TensorSpec(shape, dtype).numel).to(dtype).reshape(shape)
    turned = torch.empty((*shape[:-2], shape[-1], shape[-2]), dtype=dtype)
    read_region(file_of(tensor, 3), TensorSpec(shape, dtype), 3, Region.whole(shape), turned.transpose(-1, -2))
    assert bytes(memory_of(turned)) == bytes(memory_of(tensor.transpose(-1, -2).contiguous()))


def test_a_turned_read_casts_too() -> None:
    tensor = torch.arange(80 * 70, dtype=torch.int32).reshape(80, 70)
    out = torch.empty(70, 80, dtype=torch.float64)
    read_region(file_of(tensor, 0), TensorSpec((80, 70), torch.int32), 0, Region.whole((80, 70)), out.t())
    assert torch.equal(out, tensor.t().double())


BIG = TensorSpec((1024, 4096), torch.float32)


@pytest.mark.parametrize(
    "region, count",
    [
        (Region.whole(BIG.shape), 1),
        (Region.box((100, 0), (50, 4096)), 1),
        (Region.box((7, 5), (1, 9)), 1),
        (Region.box((0, 8), (1024, 2048)), 8),  # 8 KB runs with gaps of 8 KB: covered, a scratch of 2 MB at a time
        (Region.box((0, 0), (1024, 8)), 1024),  # 32 bytes in 16 KB: one by one
        (Region((Span(0, ((8, 128), (64, 1), (2, 64))), Span(0, ((4096, 1),)))), 8),  # heads, halves to pairs
    ],
    ids=["whole", "rows", "part of a row", "half of each row", "a few columns", "rotary"],
)
def test_how_many_reads_a_region_takes(region: Region, count: int) -> None:
    reads = Reads(bytes(BIG.nbytes))
    read_region(reads, BIG, 0, region, torch.empty(region.shape))
    assert len(reads.sizes) == count


@pytest.mark.parametrize("out", [torch.empty(4096, 1024).t(), torch.empty(1024, 4096, dtype=torch.float64)])
def test_no_read_but_a_straight_one_is_longer_than_the_scratch(out: torch.Tensor) -> None:
    reads = Reads(bytes(BIG.nbytes))
    read_region(reads, BIG, 0, Region.whole(BIG.shape), out)
    assert max(reads.sizes) <= ranged.SCRATCH <= 8 << 20
    assert sum(reads.sizes) == BIG.nbytes


def test_a_conjugate_view_of_memory_gets_the_values() -> None:
    tensor = torch.tensor([1 + 2j, 3 + 4j])
    memory = torch.zeros(2, dtype=torch.complex64)
    read_region(file_of(tensor, 0), TensorSpec((2,), torch.complex64), 0, Region.whole((2,)), memory.conj())
    assert memory.tolist() == [1 - 2j, 3 - 4j]


def test_a_parameter_can_be_read_into() -> None:
    out = torch.nn.Parameter(torch.zeros(3))
    read_region(file_of(torch.tensor([1.0, 2, 3]), 0), TensorSpec((3,), torch.float32), 0, Region.whole((3,)), out)
    assert out.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    "dtypes", [("uint4", "float32"), ("float32", "bits8"), ("float4_e2m1fn_x2", "uint8"), ("complex64", "float32")]
)
def test_casts_that_torch_lacks_are_refused_by_name(dtypes: tuple[str, str]) -> None:
    source, target = (getattr(torch, name, None) for name in dtypes)
    if source is None or target is None:
        pytest.skip("this torch lacks the dtype")
    with pytest.raises(Unsupported, match=dtypes[0]):
        read_region(Reads(b""), TensorSpec((0,), source), 0, Region.whole((0,)), torch.empty(0, dtype=target))


def test_what_does_not_fit_is_refused() -> None:
    spec = TensorSpec((3, 4), torch.int8)
    with pytest.raises(SpecMismatch, match="does not lie within"):
        read_region(Reads(bytes(12)), spec, 0, Region.box((2, 0), (2, 4)), torch.empty(2, 4))
    with pytest.raises(SpecMismatch, match=r"\(1, 4\) into memory of shape \(4,\)"):
        read_region(Reads(bytes(12)), spec, 0, Region.box((2, 0), (1, 4)), torch.empty(4))
    backwards = Region((Span(2, ((2, -1),)), Span(0, ((4, 1),))))
    with pytest.raises(SpecMismatch, match="step below 0"):
        read_region(Reads(bytes(12)), spec, 0, backwards, torch.empty(2, 4))
