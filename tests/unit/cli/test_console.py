"""What is printed: safe for a terminal, colours on a terminal only."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from fdsd.cli.console import Console, complain, printable
from fdsd.engine.progress import Progress, quiet


@given(st.text(st.characters(exclude_categories=[])))
def test_printable_is_printable_and_keeps_what_was(text: str) -> None:
    made = printable(text)
    assert made.isprintable()
    assert printable(made) == made
    assert text != made or text.isprintable()


@given(st.text(st.characters(exclude_categories=[])), st.sampled_from(["ascii", "utf-8", "latin-1", "cp1252"]))
def test_every_text_can_be_written(text: str, encoding: str) -> None:
    streams = {name: io.TextIOWrapper(io.BytesIO(), encoding, newline="") for name in ("stdout", "stderr")}
    with pytest.MonkeyPatch.context() as patch:
        for name, stream in streams.items():
            patch.setattr(sys, name, stream)
        Console().line(text)
        complain(text)
    for stream in streams.values():
        stream.seek(0)
        written = stream.read()
        assert written.endswith("\n")
        assert all(c == "\n" or c.isprintable() for c in written)


def test_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    Console().table([("a", "1", "x"), ("bcd", "1,234", ""), ("\n", "0", "z")], right=(1,), indent=" ")
    assert capsys.readouterr().out == " a        1  x\n bcd  1,234\n \\n       0  z\n"


def on_a_terminal(command: list[str], environment: dict[str, str]) -> tuple[int, bytes]:
    """Run a command on a terminal of its own; give its exit code and what it showed."""
    ours, theirs = os.openpty()
    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    with subprocess.Popen(command, env=environment, **streams) as process:
        os.close(theirs)
        shown = b""
        try:
            while block := os.read(ours, 4096):
                shown += block
        except OSError:  # the end, on Linux
            pass
        os.close(ours)
    return process.returncode, shown


@pytest.mark.skipif(os.name != "posix", reason="pseudo-terminals of POSIX")
def test_colours_on_a_terminal_only(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1), "x\x1b[35m[red]:smile:": torch.ones(1)}, tmp_path / "a.safetensors")
    save_file({"a": torch.zeros(1)}, tmp_path / "b.safetensors")
    paths = [str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors")]
    command = [sys.executable, "-W", "error", "-m", "fdsd", "diff", *paths]
    environment = {**os.environ, "TERM": "xterm-256color"}
    environment.pop("NO_COLOR", None)
    code, shown = on_a_terminal(command, environment)
    assert code == 1
    assert b"\x1b[31m- x\\x1b[35m[red]:smile:: only in a\x1b[0m" in shown
    code, plain = on_a_terminal(command, {**environment, "NO_COLOR": "1"})
    assert code == 1
    assert b"\x1b[3" not in plain and b"- x\\x1b[35m[red]:smile:: only in a" in plain


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("is_quiet", [False, True])
def test_quiet_shows_no_progress(monkeypatch: pytest.MonkeyPatch, is_quiet: bool) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr("fdsd.engine.progress._PATIENCE", 0)
    with quiet(is_quiet):
        with quiet(False), Progress("saving", 10) as progress:
            progress.advance(10)
        assert bool(stream.getvalue()) is not is_quiet
    with Progress("later", 10) as progress:
        progress.advance(10)
    assert "later" in stream.getvalue()


def test_progress_without_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    with Progress("saving", 10) as progress:
        progress.advance(10)
