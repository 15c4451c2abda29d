"""Every code block of the README runs, in order, in one folder, and prints what the README says it prints.

* ``python``: runs, in one namespace. With ``file=NAME`` it is written to that file instead. Tests that it defines
  are called.
* ``text``: what the block before it printed.
* ``console``: each line that begins with ``$`` runs; the lines below it are what it printed. Those of ``train.py`` are
  left out where torch cannot run FSDP2 on the CPU, which they do.
* ``sh``: the commands that set up a machine; they are compared, since a test cannot run them.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen

from fdsd.cli.main import main
from tests.helpers.parallelism import FORWARD

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(\w*)(?: file=(\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@frozen
class Block:
    """A code block: its language, the file that it is, its first line in the README, and its text."""

    language: str
    file: str | None
    line: int
    text: str


def blocks() -> list[Block]:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    found = [
        Block(match[1], match[2], readme[: match.start()].count("\n") + 2, match[3]) for match in FENCE.finditer(readme)
    ]
    assert readme.count("```") == 2 * len(found), "a fence that is not closed, or is indented"
    return found


def ran(block: Block, namespace: dict[str, Any]) -> str:
    """Run a Python block, and the tests that it defines; give what it printed."""
    printed = io.StringIO()
    code = compile("\n" * (block.line - 1) + block.text, "README.md", "exec")
    with contextlib.redirect_stdout(printed):
        exec(code, namespace)
        for name in [name for name in namespace if name.startswith("test_")]:
            namespace.pop(name)()
    return printed.getvalue()


def commands(block: Block) -> Iterator[tuple[list[str], str]]:
    """Give the commands of a console block with what they print."""
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        yield shlex.split(command), output


def on_ranks(argv: list[str]) -> str:
    """Run a file on several processes, as ``torchrun`` does; give what they printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--master-port", str(free_port()), *argv]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines(keepends=True)
    told = "Expected number of connected peer ranks"  # of which some versions of torch tell, and cut each other's lines
    return "".join(line for line in lines if not line.startswith("[Gloo] ") and told not in line)


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        port: int = made.getsockname()[1]
        return port


def test_every_block_runs_and_prints_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "readme"}
    printed = ""
    for block in blocks():
        if block.file is not None:
            (tmp_path / block.file).write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            assert not printed, f"README.md, line {block.line}: what the block before printed is not told"
            printed = ran(block, namespace)
        elif block.language == "text":
            assert printed == block.text, f"README.md, line {block.line}"
            printed = ""
        elif block.language == "console":
            for (program, *argv), output in commands(block):
                if program == "torchrun":
                    if "train.py" in argv and not FORWARD:
                        continue
                    assert on_ranks(argv) == output, f"README.md, line {block.line}: {argv}"
                    continue
                assert program == "fdsd"
                code = main(argv)
                assert capsys.readouterr() == (output, ""), f"README.md, line {block.line}: {argv}"
                assert code == (argv[0] == "diff")
        else:
            assert block.language == "sh", f"README.md, line {block.line}: a block of an unknown kind"
    assert not printed


def test_the_commands_that_set_up_a_machine() -> None:
    assert [block.text for block in blocks() if block.language == "sh"] == [
        "pip install tox && tox -e demo\n",
        "pip install tox && tox\n",
        "pip install .\n",
    ]


def test_the_first_example_has_thirty_lines_at_most() -> None:
    first = next(block for block in blocks() if block.language == "python")
    assert len(first.text.splitlines()) <= 30


def test_the_readme_names_every_verb() -> None:
    import fdsd
    from fdsd import transforms

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    missing = [name for name in transforms.__all__ if f"`{name}" not in readme]
    assert missing == []
    named = set(re.findall(r"`([a-z_]+)\(", readme)) - {"assert_golden", "p"}
    assert [name for name in sorted(named) if not hasattr(fdsd, name)] == []


def test_links_of_the_readme_lead_to_files() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:)([^)]+)\)", readme)
    assert links and all((ROOT / link).is_file() for link in links)
