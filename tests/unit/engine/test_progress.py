"""The progress bar: on a terminal, after a while; nowhere else, and never in the way."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stderr
from pathlib import Path

import pytest
import torch

import fdsd
from fdsd.engine import progress
from fdsd.engine.progress import Progress, quiet

from .conftest import MIXED


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress, "_PATIENCE", 0)


def test_a_terminal_shows_what_is_saved(tmp_path: Path) -> None:
    with redirect_stderr(Terminal()) as terminal:
        fdsd.save(MIXED, tmp_path / "x.safetensors")
    total = sum(leaf.numel() * leaf.itemsize for leaf in MIXED.values())
    assert "saving x.safetensors" in terminal.getvalue()
    assert f"{total}/{total} bytes" in terminal.getvalue()
    assert "\x1b[?25h" in terminal.getvalue()  # the cursor is back


def test_a_quick_save_shows_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_PATIENCE", 1000)
    with redirect_stderr(Terminal()) as terminal:
        fdsd.save(MIXED, tmp_path / "x.safetensors")
    assert terminal.getvalue() == ""


def test_quiet() -> None:
    with redirect_stderr(Terminal()) as terminal:
        with quiet(), quiet(False), Progress("saving", 10) as bar:
            bar.advance(10)
        assert terminal.getvalue() == ""
        with Progress("saving", 10) as bar:
            bar.advance(10)
        assert "saving" in terminal.getvalue()


def test_no_terminal_shows_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with redirect_stderr(io.StringIO()) as stream:
        fdsd.save(MIXED, tmp_path / "x.safetensors")
    assert stream.getvalue() == ""
    monkeypatch.setattr(sys, "stderr", None)
    fdsd.save(MIXED, tmp_path / "x.safetensors", overwrite=True)


def test_a_stream_that_was_closed(tmp_path: Path) -> None:
    stream = io.StringIO()
    stream.close()
    with redirect_stderr(stream):
        fdsd.save(MIXED, tmp_path / "x.safetensors")


def test_the_bar_stops_when_the_save_fails(tmp_path: Path) -> None:
    def fails(t: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no")

    state = {"a": torch.ones(2), **fdsd.map_tensors(fails, "b", spec=lambda s: s)(fdsd.defer({"b": torch.ones(2)}))}
    with redirect_stderr(Terminal()) as terminal, pytest.raises(RuntimeError, match="no"):
        fdsd.save(state, tmp_path / "x.safetensors")
    assert "saving" in terminal.getvalue() and "\x1b[?25h" in terminal.getvalue()
