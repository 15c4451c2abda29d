"""The command ``fdsd``: its parser, and what becomes of errors. What a command does lives in its own module.

Exit codes: 0 fine; 1 a difference, or a check that failed; 2 bad usage or an error, which is one paragraph on
standard error; 130 interrupted; 141 nobody reads the output any more.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import NoReturn, TextIO

from fdsd.cli import check, convert, demo, diff, explain, ls
from fdsd.cli.command import Command
from fdsd.cli.console import complain, stop_writing
from fdsd.cli.places import place
from fdsd.cli.stopping import Stopped, stoppable
from fdsd.data.errors import FdsdError

__all__ = ["main"]

_COMMANDS: tuple[Command, ...] = tuple([module.COMMAND for module in (ls, diff, explain, check, convert, demo)])
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
    commands = parser.add_subparsers(dest="name", metavar="COMMAND", title="commands")
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
        one.set_defaults(chosen=command)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, and give the exit code.

    Args:
        argv: The arguments after the program's name; those of this process by default.

    >>> main(["diff", "no-such-file", "no-such-file"])
    2
    """
    prog, words, parser = "fdsd", dict[str, str](), _parser()
    try:
        try:
            options = parser.parse_args(argv)
            if options.name is None:
                parser.error(f"name a command: {', '.join([command.name for command in _COMMANDS])}")
            command: Command = options.chosen
            prog, words = f"fdsd {command.name}", dict(command.words)
            with stoppable():
                code = command.run(options)
        except SystemExit as stop:  # help, the version, or bad usage, which has been told
            code = stop.code if isinstance(stop.code, int) else 0
        _flush()
    except BrokenPipeError:
        stop_writing(sys.stdout)
        return 141
    except KeyboardInterrupt as stop:
        complain(f"{prog}: {'told to stop' if isinstance(stop, Stopped) else 'interrupted'}.")
        return _ended(128 + stop.number if isinstance(stop, Stopped) else 130)
    except Exception as error:
        if os.environ.get(_TRACEBACK):
            traceback.print_exc()
        complain(f"{prog}: {_paragraph(error, words)}")
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


def _paragraph(error: Exception, words: Mapping[str, str]) -> str:
    """Word an error with its notes as one paragraph, in the words of the command line."""
    if isinstance(error, FdsdError):
        text = str(error)
        for python, option in words.items():
            text = text.replace(python, option)
    elif isinstance(error, MemoryError):
        text = "there is not enough memory."
    elif isinstance(error, OSError) and error.strerror:
        text = f"{error.filename or 'the output could not be written'}: {error.strerror}."
    else:
        hint = f"raised in {place(error)}; {_TRACEBACK}=1 shows more"
        text = f"{': '.join(filter(None, [type(error).__name__, str(error)]))} ({hint})."
    notes: Sequence[str] = getattr(error, "__notes__", ())
    whole = f"{text} ({'; '.join(notes)})" if notes else text
    return " ".join([line.strip() for line in whole.splitlines()])
