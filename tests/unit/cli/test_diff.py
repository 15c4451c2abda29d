"""``fdsd diff``: exit codes, texts, tolerances, keys."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fdsd


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    a = {"w": torch.tensor([1.0, 2.0]), "gone": torch.ones(1), "s": torch.ones(2), "h.0": torch.ones(1)}
    b = {"w": torch.tensor([1.0, 2.5]), "new": torch.ones(1), "s": torch.ones(3), "h.0": torch.ones(1)}
    fdsd.save(a, tmp_path / "a.safetensors")
    fdsd.save(b, tmp_path / "b.safetensors")
    return tmp_path / "a.safetensors", tmp_path / "b.safetensors"


def test_differences(run: Callable[..., Any], pair: tuple[Path, Path]) -> None:
    ran = run("diff", *pair)
    assert (ran.code, ran.err) == (1, "")
    assert ran.out.splitlines() == [
        "- gone: only in a",
        "+ new: only in b",
        "! s: float32[2] became float32[3]",
        "~ w: 1 of 2 elements differ, max abs 0.5, max rel 0.2",
    ]


def test_no_differences(run: Callable[..., Any], pair: tuple[Path, Path], tmp_path: Path) -> None:
    a, _ = pair
    fdsd.save(fdsd.open(a), tmp_path / "folder", max_shard_size=8)
    for other in (a, tmp_path / "folder"):
        ran = run("diff", a, other)
        assert (ran.code, ran.out, ran.err) == (0, "no differences in 4 entries\n", "")


@pytest.mark.parametrize(
    "options, code",
    [
        ((), 1),
        (("--atol", "0.5"), 0),
        (("--atol", "0.49"), 1),
        (("--rtol", "0.2"), 0),
        (("--rtol", "0.19"), 1),
        (("--rtol=0.1", "--atol=0.25"), 0),
        (("--atol", "inf"), 0),
    ],
)
def test_tolerances(run: Callable[..., Any], tmp_path: Path, options: tuple[str, ...], code: int) -> None:
    fdsd.save({"w": torch.tensor([1.0, 2.0])}, tmp_path / "a.safetensors")
    fdsd.save({"w": torch.tensor([1.0, 2.5])}, tmp_path / "b.safetensors")
    assert run("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors", *options).code == code


def test_keys(run: Callable[..., Any], tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(2)}, "ema": {"w": torch.zeros(2)}}, tmp_path / "a.pt")
    path = tmp_path / "a.pt"
    assert run("diff", path, path, "--key-a", "model", "--key-b", "model").code == 0
    ran = run("diff", path, path, "--key-a", "model", "--key-b", "ema")
    assert (ran.code, ran.out) == (1, "~ w: 2 of 2 elements differ, max abs 1, max rel inf\n")
    assert "has no dict at --key-a or --key-b 'x'" in run("diff", path, path, "--key-a", "x").refused()


def test_what_cannot_be_opened(run: Callable[..., Any], pair: tuple[Path, Path], tmp_path: Path) -> None:
    assert "nowhere is not there." in run("diff", pair[0], tmp_path / "nowhere").refused()
    (tmp_path / "cut.safetensors").write_bytes(pair[0].read_bytes()[:-1])
    assert "cut.safetensors" in run("diff", pair[0], tmp_path / "cut.safetensors").refused()
