"""The command ``fdsd``: its parser, and what becomes of errors. What a command does lives in its own module.

Exit codes: 0 fine; 1 a difference, or a check that failed; 2 bad usage or an error, which is one paragraph on
standard error; 130 interrupted; 141 nobody reads the output any more.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn, TextIO

from fdsd.cli import check, convert, demo, diff, explain, ls
from fdsd.cli.command import Command
from fdsd.cli.console import complain, stop_writing
from fdsd.cli.places import place
from fdsd.data.errors import FdsdError

__all__ = ["main"]

_COMMANDS: tuple[Command, ...] = tuple(
    [module.COMMAND for module in (ls, diff, explain, check, convert, demo)]
)
_TRACEBACK = "FDSD_TRACEBACK"

_EPILOG = f"""\
examples:
  fdsd ls model.safetensors
  fdsd convert llama/ out/ --pipeline rules.py:to_mine --dtype bfloat16
  fdsd diff llama/ out/

PIPELINE is module:name or file.py:name; the name is a pipeline, or a function without arguments that gives one.
Exit codes: 0 fine, 1 a difference or a failed check, 2 bad usage or an error.
{_TRACEBACK}=1 in the environment shows where an error arose."""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one paragraph."""

    def error(self, message: str) -> NoReturn:
        complain(f"{self.prog}: {' '.join(message.split()).rstrip('.')}. See '{self.prog} --help'.")
        raise SystemExit(2)


class _Version(argparse.Action):
    """``--version``, looked up when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> NoReturn:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"fdsd {version('fdsd')}")
        except PackageNotFoundError:
            print("fdsd, not installed")
        raise SystemExit(0)


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = _Parser(
        prog="fdsd",
        description="Rewrite checkpoints with pipelines of pure functions, and look at them.",
        epilog=_EPILOG,
        formatter_class=raw,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for command in _COMMANDS:
        one = commands.add_parser(
            command.name,
            help=command.summary,
            description=command.details,
            epilog="\n  ".join(["examples:", *command.examples]),
            formatter_class=raw,
            allow_abbrev=False,
        )
        command.arguments(one)
        one.set_defaults(run=command.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, and give the exit code.

    Args:
        argv: The arguments after the program's name; those of this process by default.

    >>> main(["diff", "no-such-file", "no-such-file"])
    2
    """
    prog, parser = "fdsd", _parser()
    try:
        try:
            options = parser.parse_args(argv)
            if options.command is None:
                parser.error(f"name a command: {', '.join([command.name for command in _COMMANDS])}")
            prog = f"fdsd {options.command}"
            code: int = options.run(options)
        except SystemExit as stop:  # help, the version, or bad usage, which has been told
            code = stop.code if isinstance(stop.code, int) else 0
        _flush()
    except BrokenPipeError:
        stop_writing(sys.stdout)
        return 141
    except KeyboardInterrupt:
        complain(f"{prog}: interrupted.")
        return _ended(130)
    except Exception as error:
        if os.environ.get(_TRACEBACK):
            traceback.print_exc()
        complain(f"{prog}: {_paragraph(error)}")
        return _ended(2)
    return code


def _flush() -> None:
    """Write out what was printed, while an error still can be told."""
    stream: TextIO | None = sys.stdout  # none where the caller closed it
    if stream is not None:
        stream.flush()


def _ended(code: int) -> int:
    """Write out what was printed before an error, as far as that goes."""
    try:
        _flush()
    except OSError:
        stop_writing(sys.stdout)
    return code


def _paragraph(error: Exception) -> str:
    """Word an error with its notes as one paragraph."""
    if isinstance(error, FdsdError):
        text = str(error)
    elif isinstance(error, MemoryError):
        text = "there is not enough memory. A smaller --budget, or casting in a pipeline, may help."
    elif isinstance(error, OSError) and error.strerror:
        where = "" if error.filename is None else f"{os.fspath(error.filename)!s}: "
        text = f"{where}{error.strerror}."
    else:
        said = str(error)
        hint = f"raised in {place(error)}; {_TRACEBACK}=1 shows more"
        text = f"{type(error).__name__}{': ' if said else ''}{said} ({hint})."
    notes: Sequence[str] = getattr(error, "__notes__", ())
    whole = f"{text} ({'; '.join(notes)})" if notes else text
    return " ".join([line.strip() for line in whole.splitlines()])

