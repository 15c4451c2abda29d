"""``fdsd ls``: folded names, specs, bytes, ties, totals; the same text every time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

import fdsd
from fdsd.cli.ls import _rows, _totals

LISTING = """\
embeddings.position_ids                                int64[6]                48
embeddings.word_embeddings.weight                      float32[10, 4]         160
embeddings.position_embeddings.weight                  float32[6, 4]           96
embeddings.LayerNorm.weight                            float32[4]              16
encoder.layer.{0..1}.attention.self.query.weight       2 x float32[4, 4]      128
encoder.layer.{0..1}.attention.self.key.weight         2 x float32[4, 4]      128
encoder.layer.{0..1}.attention.self.value.weight       2 x float32[4, 4]      128
encoder.layer.{0..1}.attention.self.query.bias         2 x float32[4]          32
encoder.layer.{0..1}.attention.self.key.bias           2 x float32[4]          32
encoder.layer.{0..1}.attention.self.value.bias         2 x float32[4]          32
encoder.layer.{0..1}.attention.output.dense.weight     2 x float32[4, 4]      128
encoder.layer.{0..1}.attention.output.LayerNorm.weight 2 x float32[4]          32
encoder.layer.{0..1}.intermediate.dense.weight         2 x float32[8, 4]      256
encoder.layer.{0..1}.output.dense.weight               2 x float32[4, 8]      256
encoder.layer.{0..1}.output.LayerNorm.weight           2 x float32[4]          32
26 tensors, 1,504 bytes (1.5 kB)
  float32: 25 tensors, 1,456 bytes
  int64: 1 tensor, 48 bytes
"""


def squeezed(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


def test_listing(run: Callable[..., Any], model: Path) -> None:
    ran = run("ls", model)
    assert (ran.code, ran.err) == (0, "")
    assert squeezed(ran.out) == squeezed(LISTING)
    assert run("ls", model) == ran


def test_columns_are_aligned(run: Callable[..., Any], model: Path) -> None:
    rows = [line for line in run("ls", model).out.splitlines() if "[" in line]
    assert len({line.index("float32[") for line in rows if "  float32[" in line}) == 1
    assert len({len(line) for line in rows}) == 1  # the bytes end where those above end


def test_layers_of_unequal_shapes_do_not_share_a_line(run: Callable[..., Any], tmp_path: Path) -> None:
    state = {f"h.{i}.w": torch.zeros(3 if i == 2 else 2, dtype=torch.int8) for i in range(5)}
    fdsd.save(state, tmp_path / "a.safetensors")
    assert squeezed(run("ls", tmp_path / "a.safetensors").out) == [
        "h.{0,1,3,4}.w 4 x int8[2] 8",
        "h.2.w int8[3] 3",
        "5 tensors, 11 bytes",
    ]


def test_ties_are_marked_and_count_once(run: Callable[..., Any], tmp_path: Path) -> None:
    embed, experts = torch.arange(6.0), [torch.arange(2.0) + i for i in range(3)]
    state = {"embed": embed, **{f"a.{i}.w": w for i, w in enumerate(experts)}}
    state |= {"head": embed, **{f"b.{i}.w": w for i, w in enumerate(experts)}}
    fdsd.save(state, tmp_path / "a.safetensors")
    out = squeezed(run("ls", tmp_path / "a.safetensors").out)
    assert sorted(out) == sorted(
        [
            "embed float32[6] 24",
            "a.{0..2}.w 3 x float32[2] 24",
            "head float32[6] tied to embed",
            "b.{0..2}.w 3 x float32[2] tied to a.{0..2}.w",
            "4 tensors, 48 bytes, 4 tied names",
        ]
    )


def test_a_torch_file_with_objects_and_keys(run: Callable[..., Any], tmp_path: Path) -> None:
    inner = {"w": torch.ones(2, 3, dtype=torch.bfloat16), "epoch": 3, "name": "x"}
    torch.save({"model": inner, "step": 7}, tmp_path / "a.pt")
    assert squeezed(run("ls", tmp_path / "a.pt", "--key", "model").out) == [
        "w bfloat16[2, 3] 12",
        "epoch int",
        "name str",
        "1 tensor, 12 bytes, 2 objects that are no tensor",
    ]
    assert "'model'" in run("ls", tmp_path / "a.pt").refused()
    assert "has no meaning" in run("ls", write(tmp_path / "b.safetensors"), "--key", "model").refused()


def write(path: Path) -> Path:
    save_file({"w": torch.ones(1)}, path)
    return path


def test_a_model_spec(run: Callable[..., Any], tmp_path: Path) -> None:
    entry = fdsd.TensorEntry(fdsd.TensorSpec((2, 2), torch.int16))
    (tmp_path / "spec.json").write_text(fdsd.ModelSpec({"w": entry}).to_json())
    assert squeezed(run("ls", tmp_path / "spec.json").out) == ["w int16[2, 2] 8", "1 tensor, 8 bytes"]
    (tmp_path / "spec.json").write_text("{")
    assert str(tmp_path / "spec.json") in run("ls", tmp_path / "spec.json").refused()
    assert "no.json" in run("ls", tmp_path / "no.json").refused()


def test_an_empty_checkpoint(run: Callable[..., Any], tmp_path: Path) -> None:
    fdsd.save({}, tmp_path / "a.safetensors")
    assert run("ls", tmp_path / "a.safetensors").out == "0 tensors, 0 bytes\n"


def test_names_cannot_steer_a_terminal(run: Callable[..., Any], tmp_path: Path) -> None:
    save_file({"a\x1b[2Jb\nc\u202ed": torch.ones(1), "ok": torch.ones(1)}, tmp_path / "a.safetensors")
    out = run("ls", tmp_path / "a.safetensors").out
    assert "a\\x1b[2Jb\\nc\\u202ed" in out
    assert len(out.splitlines()) == 3


@pytest.mark.parametrize("content", [b"", b"\0" * 8, b"PK\x03\x04", b"{}", b"\xff" * 100])
def test_files_that_are_no_checkpoints(run: Callable[..., Any], tmp_path: Path, content: bytes) -> None:
    (tmp_path / "odd").write_bytes(content)
    assert "odd" in run("ls", tmp_path / "odd").refused()


names = st.from_regex(r"[a-c](\.[a-c0-2]){0,2}", fullmatch=True)
shapes = st.sampled_from([(), (0,), (2,), (2, 3)])
dtypes = st.sampled_from([torch.int8, torch.float32, torch.float8_e4m3fn])


@given(st.dictionaries(names, st.builds(fdsd.TensorSpec, shapes, dtypes), max_size=12))
def test_the_lines_cover_every_name_and_the_totals_are_the_sums(specs: dict[str, fdsd.TensorSpec]) -> None:
    rows = list(_rows(specs))
    counts = [int(what.split(" x ")[0]) if " x " in what else 1 for (_, what, _, _), _ in rows]
    assert sum(counts) == len(specs)
    nbytes = sum(int(row[2].replace(",", "")) for row, _ in rows)
    assert nbytes == sum(spec.nbytes for spec in specs.values())
    assert next(_totals(specs)).split(" (")[0].endswith(f", {nbytes:,} bytes")
