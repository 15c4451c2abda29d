"""A small BERT on disk, and the command line run in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from attrs import frozen

import fdsd
from fdsd.cli.main import main


@frozen
class Ran:
    """What a run of the command line gave."""

    code: int
    out: str
    err: str

    def refused(self) -> str:
        """Assert that it was refused with one paragraph and nothing else; give the paragraph."""
        assert (self.code, self.out) == (2, "")
        assert self.err.startswith("fdsd")
        assert self.err.count("\n") == 1 and self.err.endswith("\n")
        assert "Traceback" not in self.err
        return self.err[:-1]


Run = Callable[..., Ran]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*argv: object) -> Ran:
        capsys.readouterr()
        code = main([str(word) for word in argv])
        return Ran(code, *capsys.readouterr())

    return run


def bert(layers: int = 2, dim: int = 4, words: int = 10) -> dict[str, torch.Tensor]:
    """Make a BERT whose elements are all different."""
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (words, dim),
        "embeddings.position_embeddings.weight": (6, dim),
        "embeddings.LayerNorm.weight": (dim,),
    }
    for i in range(layers):
        block = f"encoder.layer.{i}"
        shapes |= {f"{block}.attention.self.{x}.weight": (dim, dim) for x in ("query", "key", "value")}
        shapes |= {f"{block}.attention.self.{x}.bias": (dim,) for x in ("query", "key", "value")}
        shapes |= {
            f"{block}.attention.output.dense.weight": (dim, dim),
            f"{block}.attention.output.LayerNorm.weight": (dim,),
            f"{block}.intermediate.dense.weight": (2 * dim, dim),
            f"{block}.output.dense.weight": (dim, 2 * dim),
            f"{block}.output.LayerNorm.weight": (dim,),
        }
    made: dict[str, torch.Tensor] = {"embeddings.position_ids": torch.arange(6)}
    start = 0.0
    for name, shape in shapes.items():
        count = torch.Size(shape).numel()
        made[name] = torch.arange(start, start + count).reshape(shape)
        start += count
    return made


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A BERT as one safetensors file."""
    path = tmp_path / "model.safetensors"
    fdsd.save(bert(), path)
    return path


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    """A file with pipelines."""
    path = tmp_path / "rules.py"
    path.write_text(
        """\
import torch
from fdsd import cast, concat, pipe, rename_fqns

names = rename_fqns({"encoder.layer.{i}.{rest...}": "h.{i}.{rest...}"})
PARTS = ["h.{i}.attention.self." + x + ".{w}" for x in ("query", "key", "value")]


def fused():
    return pipe(names, concat(PARTS, "h.{i}.qkv.{w}", dim=0))


wrong = rename_fqns({"encoder.layers.{i}.{rest...}": "h.{i}.{rest...}"})
""",
        encoding="utf-8",
    )
    return path
