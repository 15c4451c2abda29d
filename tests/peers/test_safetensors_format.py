"""The reference library as the oracle: the same bytes both ways, and no file opened that it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from hypothesis import given, settings
from hypothesis import strategies as st

from fdsd.data.errors import FdsdError, Unsupported
from fdsd.data.region import Region
from fdsd.data.spec import TensorSpec
from fdsd.storage.safetensors_header import DTYPES, read_header
from fdsd.storage.safetensors_sink import SafetensorsSink
from fdsd.storage.safetensors_source import SafetensorsSource
from fdsd.storage.shards import plan_shards, shard_names
from tests.golden.hostile.cases import FINE, HEADERS, LATER, LENGTHS, STRICTER, absent, build, lacks, tensor


def bits(value: torch.Tensor) -> bytes:
    return bytes(value.contiguous().reshape(-1).view(torch.uint8).tolist()) if value.numel() else b""


def random_tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Any bits at all (NaNs among them); a bool is 0 or 1."""
    numel = TensorSpec(shape, dtype).numel
    generator = torch.Generator().manual_seed(numel + dtype.itemsize)
    raw = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    if dtype is torch.bool:
        return (raw > 99).reshape(shape)
    return raw.view(dtype).reshape(shape)


@pytest.fixture(params=sorted(DTYPES))
def code(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def reference_opens(path: Path) -> bool:
    """Whether the reference library opens a file and gives all of its tensors."""
    try:
        with safetensors.safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  # no mapping
                file.get_tensor(name)
    except (safetensors.SafetensorError, TypeError):
        return False
    except AttributeError as error:
        if not any(LATER[code] in str(error) for code in absent()):  # which it asks torch for all the same
            raise
        return False
    return True


def fdsd_opens(path: Path) -> bool:
    try:
        source = SafetensorsSource(path)
        for name, spec in source.specs().items():
            source.read(name, Region.whole(spec.shape), torch.empty(spec.shape, dtype=spec.dtype))
    except FdsdError:
        return False
    return True


def test_what_fdsd_writes_the_library_reads(tmp_path: Path, code: str) -> None:
    dtype = DTYPES[code]
    tensors = {"z": random_tensor(dtype, 3, 4), "a": random_tensor(dtype, 5), "none": random_tensor(dtype, 0, 2)}
    path = tmp_path / "x.safetensors"
    specs = {name: TensorSpec(value.shape, dtype) for name, value in tensors.items()}
    with SafetensorsSink.create(path, specs, metadata={"note": "n"}) as sink:
        for name, value in tensors.items():
            sink.write(name, 0, value)
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "note": "n"}
        assert file.get_slice("z").get_dtype() == code
    loaded = safetensors.torch.load_file(path)
    assert set(loaded) == set(tensors)
    for name, value in tensors.items():
        assert (loaded[name].dtype, loaded[name].shape) == (dtype, value.shape)
        assert bits(loaded[name]) == bits(value)


def test_what_the_library_writes_fdsd_reads(tmp_path: Path, code: str) -> None:
    dtype = DTYPES[code]
    tensors = {"z": random_tensor(dtype, 3, 4), "a": random_tensor(dtype, 5), "none": random_tensor(dtype, 0, 2)}
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file(tensors, path, {"note": "n"})
    source = SafetensorsSource(path)
    assert source.metadata == {"note": "n"}
    for name, value in tensors.items():
        out = torch.empty(value.shape, dtype=dtype)
        source.read(name, Region.whole(value.shape), out)
        assert bits(out) == bits(value)


def test_every_dtype_of_the_library_is_known() -> None:
    try:
        safetensors.deserialize(build(f'{{"a":{tensor("?")}}}', 8))
    except safetensors.SafetensorError as error:
        named = str(error).partition("expected one of ")[2].replace("`", "").partition(" at line")[0].split(", ")
    assert len(named) > 15
    foreign = {"F6_E2M3", "F6_E3M2"}
    assert set(named) - foreign - absent() == set(DTYPES)


def test_dtypes_that_the_library_cannot_write_fdsd_refuses(tmp_path: Path) -> None:
    for dtype in {value for value in vars(torch).values() if isinstance(value, torch.dtype)} - set(DTYPES.values()):
        with pytest.raises(Unsupported, match="a "):
            SafetensorsSink.create(tmp_path / "x", {"a": TensorSpec((2,), dtype)})


@pytest.mark.parametrize("case", [*HEADERS, *LENGTHS])
def test_what_the_library_refuses_fdsd_refuses(tmp_path: Path, case: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(build(*HEADERS[case]) if case in HEADERS else LENGTHS[case])
    assert not fdsd_opens(path)
    stricter = case in STRICTER
    try:
        safetensors.safe_open(path, "pt").__enter__()
    except safetensors.SafetensorError:
        assert not stricter, "the library refuses this too now"
    else:
        assert stricter, "why does fdsd refuse this?"


@pytest.mark.parametrize("case", FINE)
def test_what_is_odd_but_fine_both_open(tmp_path: Path, case: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(build(*FINE[case]))
    assert reference_opens(path) == fdsd_opens(path) == (not lacks(case))


WHOLE = build(
    '{"__metadata__":{"format":"pt"},"w.a":' + tensor() + ',"w.b":' + tensor("U8", "[3,2]", "[8,14]") + "}", 14
)


@given(
    st.lists(
        st.tuples(
            st.integers(0, len(WHOLE) - 15),
            st.sampled_from(b'{}[]",:0123489-.eE\\ \x00\x01\xffabdFU_') | st.integers(0, 255),
        ),
        min_size=1,
        max_size=3,
    )
)
@settings(max_examples=1000)
def test_of_changed_files_fdsd_opens_none_that_the_library_refuses(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]]
) -> None:
    raw = bytearray(WHOLE)
    for at, value in changes:
        raw[at] = value
    path = tmp_path_factory.getbasetemp() / "changed.safetensors"
    path.write_bytes(raw)
    if fdsd_opens(path):
        assert reference_opens(path)
        header, _ = read_header(str(path))
        loaded = safetensors.torch.load_file(path)
        assert {name: (spec.shape, spec.dtype) for name, spec in header.specs.items()} == {
            name: (tuple(value.shape), value.dtype) for name, value in loaded.items()
        }


@given(st.lists(st.integers(0, 40), max_size=12), st.integers(1, 60))
def test_shards_are_cut_as_hugging_face_cuts_them(sizes: list[int], limit: int) -> None:
    tensors = {f"t{i}": torch.zeros(size, dtype=torch.uint8) for i, size in enumerate(sizes)}
    split = split_torch_state_dict_into_shards(tensors, max_shard_size=limit)
    specs = {name: TensorSpec(value.shape, value.dtype) for name, value in tensors.items()}
    shards = plan_shards(specs, limit)
    if not sizes:
        assert shards == [[]]
        return
    assert dict(zip(shard_names(len(shards)), shards, strict=True)) == {
        name: list(there) for name, there in split.filename_to_tensors.items()
    }


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 3)
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


def test_a_tied_model_saved_by_fdsd_is_loaded_by_the_library(tmp_path: Path) -> None:
    model, other = Tied(), Tied()
    specs = {name: TensorSpec(value.shape, value.dtype) for name, value in model.state_dict().items()}
    with SafetensorsSink.create(tmp_path / "x", specs, aliases={"head.weight": "embed.weight"}) as sink:
        sink.write("embed.weight", 0, model.embed.weight)
    safetensors.torch.load_model(other, tmp_path / "x")
    assert torch.equal(other.head.weight, model.embed.weight)


def test_a_sharded_folder_is_loaded_by_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers: Any = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, vocab_size=30
    )
    torch.manual_seed(0)
    state = transformers.BertModel(config).state_dict()
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    specs = {name: TensorSpec(value.shape, value.dtype) for name, value in state.items()}
    with SafetensorsSink.create_folder(tmp_path, specs, max_shard_size="3KB") as sink:
        for name, value in state.items():
            sink.write(name, 0, value)
    assert len(list(tmp_path.glob("model-*"))) > 2
    loaded = transformers.BertModel.from_pretrained(tmp_path).state_dict()
    assert {name: bits(value) for name, value in loaded.items()} == {name: bits(value) for name, value in state.items()}
