"""Headers: what is written is read, what breaks a rule is refused, with every offender."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fdsd.data.errors import BadFile, FdsdError, SpecMismatch, Unsupported
from fdsd.data.spec import TensorSpec
from fdsd.storage import safetensors_header
from fdsd.storage.safetensors_header import DTYPES, best_phase, build_header, parse_header, read_header
from tests.golden.hostile.cases import FINE, HEADERS, LENGTHS, build, lacks, tensor

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=6).filter(lambda n: n != "__metadata__")
shapes = st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple)
specs = st.builds(TensorSpec, shapes, st.sampled_from(sorted(DTYPES.values(), key=str)))


@given(st.dictionaries(names, specs, max_size=6), st.dictionaries(names, names, max_size=3))
def test_what_is_written_is_read(tensors: dict[str, TensorSpec], metadata: dict[str, str]) -> None:
    head, offsets = build_header(tensors, metadata, "x")
    size = len(head) + sum(spec.nbytes for spec in tensors.values())
    header = parse_header(head[8:], size, "x")
    assert len(head) % 8 == 0
    assert dict(header.specs) == tensors and list(header.specs) == list(tensors)
    assert header.offsets == offsets
    assert header.metadata == metadata


@given(st.dictionaries(names, specs, max_size=6))
def test_every_tensor_is_aligned_and_in_order_among_its_size(tensors: dict[str, TensorSpec]) -> None:
    _, offsets = build_header(tensors, {}, "x")
    assert all(offsets[name] % spec.dtype.itemsize == 0 for name, spec in tensors.items())
    for size in (1, 2, 4, 8):
        there = [offsets[name] for name, spec in tensors.items() if spec.dtype.itemsize == size]
        assert there == sorted(there)


@given(st.dictionaries(names, specs, max_size=6), st.data())
def test_the_data_begin_where_most_copied_bytes_keep_their_place_in_a_page(
    tensors: dict[str, TensorSpec], data: st.DataObject
) -> None:
    origins = {name: data.draw(st.integers(0, 2**40)) for name in tensors if data.draw(st.booleans())}
    head, offsets = build_header(tensors, {}, "x", origins=origins)
    plain, _ = build_header(tensors, {}, "x")
    assert head[8:].rstrip() == plain[8:].rstrip()
    assert len(head) % 8 == 0 and len(head) < len(plain) + 4096 + 8

    def kept(shift: int) -> int:
        return sum(tensors[name].nbytes for name, at in origins.items() if (offsets[name] + shift - at) % 4096 == 0)

    assert kept(0) == max(kept(shift) for shift in range(0, 4096, 8))


def test_most_bytes_win() -> None:
    assert best_phase({"a": (0, 8), "b": (8, 24), "c": (24, 40)}, {"a": 16, "b": 4096 + 32, "c": 8192 + 48}) == 24
    assert best_phase({"a": (0, 8)}, {"a": 4097}) == 0
    assert best_phase({}, {"a": 64}) == 0


@pytest.mark.parametrize("case", HEADERS)
def test_headers_that_break_a_rule(tmp_path: Path, case: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(build(*HEADERS[case]))
    with pytest.raises((BadFile, Unsupported), match=r"x\.safetensors"):
        read_header(str(path))


@pytest.mark.parametrize("case", LENGTHS)
def test_lengths_that_are_none(tmp_path: Path, case: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(LENGTHS[case])
    with pytest.raises(BadFile, match=r"x\.safetensors"):
        read_header(str(path))


@pytest.mark.parametrize("case", FINE)
def test_headers_that_are_odd_but_fine(tmp_path: Path, case: str) -> None:
    path = tmp_path / "x.safetensors"
    text, data = FINE[case]
    path.write_bytes(build(text, data))
    if lacks(case):
        with pytest.raises(Unsupported, match=r"dtypes that torch .* does not have: 'a \(F4\)'"):
            read_header(str(path))
        return
    header, stamp = read_header(str(path))
    assert stamp.size == path.stat().st_size
    assert list(header.specs) == [name for name in json.loads(text) if name != "__metadata__"]


WHOLE = build(
    '{"__metadata__":{"format":"pt"},"w.a":' + tensor() + ',"w.b":' + tensor("BF16", "[3,1]", "[8,14]") + "}", 14
)


@pytest.mark.parametrize("length", range(len(WHOLE)))
def test_every_beginning_of_a_file_is_refused(tmp_path: Path, length: int) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(WHOLE[:length])
    with pytest.raises(BadFile, match=r"x\.safetensors"):
        read_header(str(path))


@given(st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), min_size=1, max_size=4))
@settings(max_examples=800)
def test_changed_bytes_give_a_valid_header_or_an_error_of_ours(changes: list[tuple[int, int]]) -> None:
    raw = bytearray(WHOLE)
    for at, value in changes:
        raw[at] = value
    length = int.from_bytes(raw[:8], "little")
    if length > len(raw) - 8:
        return
    try:
        header = parse_header(bytes(raw[8 : 8 + length]), len(raw), "x")
    except FdsdError:
        return
    spans = sorted((header.offsets[name], spec.nbytes) for name, spec in header.specs.items())
    assert sum(size for _, size in spans) == len(raw) - 8 - length
    assert all(8 + length <= begin and begin + size <= len(raw) for begin, size in spans)


def test_all_offenders_are_named() -> None:
    text = "{" + ",".join(f'"t{i}":{tensor("F99")}' for i in range(3)) + f',"u":{tensor(shape="[-1]")}}}'
    with pytest.raises(BadFile, match=r"'t0' has the unknown dtype 'F99'; 't1' .*; 't2' .*; 'u' has \[-1\]"):
        parse_header(text.encode(), 8 + len(text) + 8, "x")


def test_at_most_ten_offenders_are_shown() -> None:
    text = "{" + ",".join(f'"t{i:02}":{tensor("F99")}' for i in range(13)) + "}"
    with pytest.raises(BadFile, match=r"'t09' [^;]*; and 3 more"):
        parse_header(text.encode(), 8 + len(text) + 8, "x")


def test_a_truncated_file_names_the_tensors_that_are_cut() -> None:
    text = f'{{"a":{tensor()},"b":{tensor(offsets="[8,16]")},"c":{tensor(offsets="[16,24]")}}}'
    with pytest.raises(BadFile, match="'b' at 8 to 16 lies beyond the file, which has 12 bytes of data; 'c'"):
        parse_header(text.encode(), 8 + len(text) + 12, "x")


def test_dtypes_that_the_format_lacks_are_refused_all_at_once() -> None:
    odd = {"a": torch.complex128, "b": torch.float32, "c": torch.uint4, "d": torch.complex32}
    with pytest.raises(Unsupported, match=r"'a \(complex128\)', 'c \(uint4\)', 'd \(complex32\)'"):
        build_header({name: TensorSpec((2,), dtype) for name, dtype in odd.items()}, {}, "x")


def test_names_and_metadata_that_are_no_text_are_refused() -> None:
    spec = TensorSpec((), torch.int8)
    with pytest.raises(SpecMismatch, match="__metadata__"):
        build_header({"__metadata__": spec, "\ud800": spec}, {}, "x")
    with pytest.raises(Unsupported, match="metadata maps strings to strings; these do not: 'a', 'b'"):
        build_header({}, {"a": 1, "b": "\ud800"}, "x")  # type: ignore[dict-item]


def test_packed_elements_need_a_dim() -> None:
    dtype = getattr(torch, "float4_e2m1fn_x2", None)
    if dtype is None:
        pytest.skip("this torch lacks the dtype")
    with pytest.raises(Unsupported, match="need a dim: 'a'"):
        build_header({"a": TensorSpec((), dtype)}, {}, "x")


def test_a_header_that_readers_would_refuse_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_header, "MAX_HEADER", 100)
    with pytest.raises(Unsupported, match="smaller max_shard_size"):
        build_header({"a" * 100: TensorSpec((), torch.int8)}, {}, "x")


def test_other_machines_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.byteorder", "big")
    with pytest.raises(Unsupported, match="little-endian"):
        parse_header(b"{}", 10, "x")
    with pytest.raises(Unsupported, match="little-endian"):
        build_header({}, {}, "x")


@pytest.mark.parametrize("make", [Path.mkdir, lambda path: __import__("os").mkfifo(path)], ids=["folder", "pipe"])
def test_what_is_no_file_is_refused_without_waiting(tmp_path: Path, make: object) -> None:
    make(tmp_path / "x")  # type: ignore[operator]
    with pytest.raises(BadFile, match="no regular file"):
        read_header(str(tmp_path / "x"))
