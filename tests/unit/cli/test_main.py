"""The command line as a whole: exit codes, one paragraph for an error, never a traceback, quiet when nobody reads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fdsd
from fdsd.cli.main import main
from fdsd.data.errors import NameConflict, SpecMismatch, add_note

COMMANDS = ("ls", "diff", "explain", "check", "convert", "demo")
PYTHON = [sys.executable, "-W", "error", "-m", "fdsd"]

words = st.one_of(
    st.sampled_from(
        [*COMMANDS, "--key", "--rtol", "--atol", "--expect", "--dtype", "--pipeline", "--budget", "--model"]
    ),
    st.sampled_from(["a", "a.py:b", "a:b", ":", "x.py", "--", "-", "-1", "nan", "1e-3", "bfloat16", "5GB"]),
    st.text(st.characters(exclude_characters="/", exclude_categories=[]), max_size=12),
)


@pytest.fixture(scope="module")
def empty_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("empty")


@settings(max_examples=300)
@given(argv=st.lists(words, max_size=6))
def test_any_arguments_give_an_exit_code_and_no_traceback(empty_folder: Path, argv: list[str]) -> None:
    """Nothing that these could name exists, so all of it is bad usage, or help."""
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(empty_folder)
        patch.setattr("fdsd.cli.main.complain", lines.append)
        patch.setattr("fdsd.cli.demo._MODULE", "no_such_package")
        patch.setattr(sys, "stdout", None)
        code = main(argv)
    helps = any(word.startswith(("-h", "--help", "--version")) for word in argv)
    assert code == 2 or (code == 0 and helps)
    assert len(lines) == (1 if code else 0)
    assert "\n" not in "".join(lines)
    assert list(empty_folder.iterdir()) == []


@pytest.mark.parametrize(
    "argv, said",
    [
        ((), "fdsd: name a command: ls, diff, explain, check, convert, demo. See 'fdsd --help'."),
        (("lss",), "invalid choice: 'lss'"),
        (("ls",), "fdsd ls: the following arguments are required: PATH. See 'fdsd ls --help'."),
        (("ls", "a", "b"), "unrecognized arguments: b"),
        (("ls", "a", "--ke", "k"), "unrecognized arguments: --ke k"),
        (("ls", ""), "fdsd ls: . has no"),
        (("ls", "no\nsuch\x1b[31m"), "fdsd ls: no such\\x1b[31m is not there."),
        (("diff", "a", "b", "--rtol", "nan"), "'nan' is no tolerance"),
        (("diff", "a", "b", "--atol", "-1"), "'-1' is no tolerance"),
        (("convert", "a", "b", "--dtype", "bf16"), "'bf16' is no dtype of torch; the nearest is 'bfloat16'"),
        (("convert", "a", "b", "--dtype", "int8"), "int8 is no floating dtype"),
        (("convert", "a", "b", "--dtype", "nn"), "'nn' is no dtype of torch"),
        (("convert", "a", "b", "--budget", "much"), "'much' is no size"),
        (("convert", "a", "b", "--max-shard-size=-5GB"), "'-5GB' is no size"),
        (("convert", "a", "b"), "fdsd convert: a is not there."),
    ],
)
def test_bad_usage_is_one_paragraph(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert said in run(*argv).refused()


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(run: Callable[..., Any], command: str) -> None:
    ran = run(command, "--help")
    assert (ran.code, ran.err) == (0, "")
    assert f"examples:\n  fdsd {command}" in ran.out


def test_help_lists_all_commands_and_exit_codes(run: Callable[..., Any]) -> None:
    out = run("--help").out
    assert all(f"\n    {command} " in out for command in COMMANDS)
    assert "0 fine, 1 a difference or a failed check, 2 bad usage or an error" in out


def test_version(run: Callable[..., Any]) -> None:
    assert run("--version").out.startswith("fdsd")


def test_every_example_parses() -> None:
    from fdsd.cli.main import _COMMANDS, _parser

    examples = [example for command in _COMMANDS for example in command.examples]
    assert len(examples) >= len(COMMANDS)
    for example in examples:
        program, *argv = example.split()
        assert program == "fdsd"
        assert _parser().parse_args(argv).name == argv[0]


# -- errors ------------------------------------------------------------------------------------------------


def failing(error: BaseException) -> Callable[..., None]:
    def fail(*_args: object, **_kwargs: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    "error, code, said",
    [
        (KeyboardInterrupt(), 130, "fdsd ls: interrupted.\n"),
        (MemoryError(), 2, "fdsd ls: there is not enough memory.\n"),
        (PermissionError(13, "Permission denied", "a.pt"), 2, "fdsd ls: a.pt: Permission denied.\n"),
        (OSError(28, "No space left on device"), 2, "fdsd ls: the output could not be written: No space"),
        (BrokenPipeError(32, "Broken pipe"), 141, ""),
        (SpecMismatch("line one\n  line two"), 2, "fdsd ls: line one line two\n"),
        (ValueError("odd"), 2, "fdsd ls: ValueError: odd (raised in "),
        (AssertionError(), 2, "fdsd ls: AssertionError (raised in "),
        (RecursionError("deep"), 2, "fdsd ls: RecursionError: deep (raised in "),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_what_becomes_of_an_error(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, said: str
) -> None:
    monkeypatch.setattr("fdsd.cli.ls.open_state", failing(error))
    monkeypatch.setattr("fdsd.cli.main.stop_writing", lambda _stream: None)
    ran = run("ls", "x")
    assert (ran.code, ran.out) == (code, "")
    assert ran.err.startswith(said) and ran.err.count("\n") == bool(said)


def test_notes_of_an_error_are_told(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    error = NameConflict("two names.")
    add_note(error, "step 1 of 2, drop('a')")
    add_note(error, "while saving 'w'")
    monkeypatch.setattr("fdsd.cli.ls.open_state", failing(error))
    assert run("ls", "x").refused() == "fdsd ls: two names. (step 1 of 2, drop('a'); while saving 'w')"


def test_a_traceback_is_there_for_those_who_ask(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fdsd.cli.ls.open_state", failing(ValueError("odd")))
    monkeypatch.setenv("FDSD_TRACEBACK", "1")
    err = run("ls", "x").err
    assert err.startswith("Traceback (most recent call last):\n") and "fdsd ls: ValueError: odd" in err


def test_errors_speak_of_options_not_of_arguments(run: Callable[..., Any], model: Path, tmp_path: Path) -> None:
    assert "give --overwrite to replace it" in run("convert", model, model).refused()
    torch.save({"model": {"w": torch.ones(2)}, "ema": {"w": torch.zeros(2)}}, tmp_path / "both.pt")
    assert "give --key one of: 'model', 'ema'" in run("ls", tmp_path / "both.pt").refused()
    said = run("diff", tmp_path / "both.pt", model).refused()
    assert "give --key-a or --key-b one of: 'model', 'ema'" in said


# -- as a process ------------------------------------------------------------------------------------------


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    """A checkpoint whose listing is longer than any pipe's buffer."""
    path = tmp_path / "wide.safetensors"
    fdsd.save({f"{chr(97 + i % 26)}{i}x.w": torch.tensor([i]) for i in range(6000)}, path)
    return path


@pytest.mark.skipif(os.name != "posix", reason="pipes and descriptors of POSIX")
def test_a_reader_that_goes_away_is_no_error(wide: Path) -> None:
    with subprocess.Popen([*PYTHON, "ls", str(wide)], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline().startswith(b"a0x.w")
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_disk_behind_standard_output_is_told_once(wide: Path) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run([*PYTHON, "ls", str(wide)], stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 2
    assert done.stderr == b"fdsd ls: the output could not be written: No space left on device.\n"


@pytest.mark.skipif(os.name != "posix", reason="pipes and descriptors of POSIX")
def test_closed_standard_streams_are_no_error(model: Path) -> None:
    shell = f"exec '{sys.executable}' -W error -m fdsd diff '{model}' '{model}' >&- 2>&-"
    assert subprocess.run(["sh", "-c", shell], check=False).returncode == 0


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_an_interrupt_is_one_line(tmp_path: Path, model: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\nprint('ready', flush=True)\ntime.sleep(60)\n")
    command = [*PYTHON, "check", str(tmp_path / "slow.py:p"), str(model)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == b"fdsd check: interrupted.\n"
    assert process.returncode == 130


SLOW = """
import os, time, torch, fdsd
def wait(x):
    print("ready", flush=True)
    time.sleep(60)
    return x
p = fdsd.map_tensors(wait, spec=lambda spec: spec)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_scheduler_that_stops_it_finds_nothing_half_written(tmp_path: Path, model: Path, number: int) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    out = tmp_path / "out"
    command = [*PYTHON, "convert", str(model), str(out), "--pipeline", str(tmp_path / "slow.py:p")]
    ours = signal.signal(number, signal.SIG_DFL)  # what is ignored here, as under nohup, would be there too
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    finally:
        signal.signal(number, ours)
    with process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(number)
        assert process.stderr.read() == b"fdsd convert: told to stop.\n"
    assert process.returncode == 128 + number
    assert not out.exists()


def test_output_survives_an_encoding_that_lacks_it(tmp_path: Path) -> None:
    fdsd.save({"gewicht.ä": torch.ones(1)}, tmp_path / "a.safetensors")
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    command = [*PYTHON, "ls", str(tmp_path / "a.safetensors")]
    done = subprocess.run(command, env=environment, capture_output=True, check=True)
    assert done.stdout.startswith(rb"gewicht.\xe4")


def test_the_command_line_loads_little(fresh_python: Callable[[str], str]) -> None:
    code = "import sys, fdsd.cli.main\nprint(*sys.modules, sep='\\n')"
    loaded = set(fresh_python(code).split())
    assert "fdsd.cli.demo" in loaded
    assert not loaded & {"rich", "rich.console", "hypothesis", "transformers", "torch.distributed.tensor"}
