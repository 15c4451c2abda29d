"""``fdsd explain`` and ``fdsd check``: texts and exit codes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import fdsd
from fdsd.testing import assert_golden

GOLDEN = Path(__file__).parents[2] / "golden"


def test_explain(run: Callable[..., Any], model: Path, rules: Path) -> None:
    ran = run("explain", f"{rules}:fused", model)
    assert (ran.code, ran.err) == (0, "")
    assert_golden(ran.out, GOLDEN / "cli_explain.txt")
    assert run("explain", f"{rules}:fused", model) == ran


def test_explain_tells_what_does_not_fit(run: Callable[..., Any], model: Path, rules: Path) -> None:
    ran = run("explain", f"{rules}:wrong", model)
    assert (ran.code, ran.err) == (1, "")
    assert "! " in ran.out and "encoder.layer.{i}.{rest...}" in ran.out


def test_check(run: Callable[..., Any], model: Path, rules: Path) -> None:
    ran = run("check", f"{rules}:fused", model)
    assert (ran.code, ran.out, ran.err) == (0, "no problems\n", "")


def test_check_suggests(run: Callable[..., Any], model: Path, rules: Path) -> None:
    ran = run("check", f"{rules}:wrong", model)
    assert (ran.code, ran.err) == (1, "")
    assert ran.out.startswith("1 problem:\n  step 1, rename_fqns(")
    assert "'encoder.layer.{i}.{rest...}' would match 22 names" in ran.out


def test_check_against_a_checkpoint(run: Callable[..., Any], model: Path, rules: Path, tmp_path: Path) -> None:
    expected = dict(fdsd.materialize(fdsd.open(model)))
    fdsd.save({"extra": torch.ones(1), **expected}, tmp_path / "b.safetensors")
    (tmp_path / "same.py").write_text("from fdsd import identity\n")
    same = f"{tmp_path / 'same.py'}:identity"
    assert run("check", same, model, "--expect", model).out == "no problems\n"
    ran = run("check", same, model, "--expect", tmp_path / "b.safetensors")
    assert ran.code == 1
    assert "1 name missing: 'extra'" in ran.out


def test_check_against_a_model_spec(run: Callable[..., Any], model: Path, tmp_path: Path) -> None:
    entries = {name: fdsd.TensorEntry(spec) for name, spec in fdsd.specs(fdsd.open(model)).items()}
    wide = fdsd.TensorEntry(fdsd.TensorSpec((5,), torch.float16))
    (tmp_path / "spec.json").write_text(fdsd.ModelSpec(entries).to_json())
    (tmp_path / "other.json").write_text(fdsd.ModelSpec({**entries, "embeddings.LayerNorm.weight": wide}).to_json())
    (tmp_path / "same.py").write_text("from fdsd import identity\n")
    same = f"{tmp_path / 'same.py'}:identity"
    assert run("check", same, model, "--expect", tmp_path / "spec.json").code == 0
    assert run("check", same, tmp_path / "spec.json", "--expect", model).code == 0  # and as the source
    ran = run("check", same, model, "--expect", tmp_path / "other.json")
    assert ran.code == 1
    assert "'embeddings.LayerNorm.weight' has shape (4,), expected (5,)" in ran.out


def test_what_cannot_be_checked(run: Callable[..., Any], model: Path, rules: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text('{"version": 99}')
    said = run("check", f"{rules}:fused", model, "--expect", tmp_path / "bad.json").refused()
    assert "bad.json: ModelSpec.from_json: version 99" in said
    assert "rules.py has no 'fsed'; the nearest is 'fused'" in run("check", f"{rules}:fsed", model).refused()
    assert "nowhere is not there" in run("explain", f"{rules}:fused", tmp_path / "nowhere").refused()


def test_nothing_is_read_but_headers(run: Callable[..., Any], model: Path, rules: Path) -> None:
    """A file whose data is a hole of the file system explains at once."""
    import json

    header = json.dumps({"encoder.layer.0.w": {"dtype": "F32", "shape": [1 << 34], "data_offsets": [0, 1 << 36]}})
    text = header.encode() + b" " * (-len(header) % 8)
    with open(model, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + (1 << 36))
    assert run("check", f"{rules}:names", model).out == "no problems\n"
    assert "out: 1 name, 68,719,476,736 bytes" in run("explain", f"{rules}:names", model).out
