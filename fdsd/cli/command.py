"""`Command`: one subcommand as a value, and the arguments that several of them share.

Nothing here does a command's work.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from attrs import frozen

if TYPE_CHECKING:
    import torch

__all__ = [
    "KEY",
    "WORDS",
    "Command",
    "add_format",
    "add_key",
    "add_pipeline",
    "dtype_argument",
    "open_state",
    "size_argument",
    "tolerance",
]

KEY = {"key= ": "--key ", "key=": "--key "}
"""What ``--key`` is called in errors."""
WORDS = {**KEY, "format= ": "--format ", "format=": "--format "}
"""What ``--key`` and ``--format`` are called in errors."""


@frozen
class Command:
    """A subcommand: how it is called, what its help says, and what it does.

    Attributes:
        name: The word on the command line.
        summary: One line for the list of commands.
        details: More for its own help.
        examples: Calls, one a line.
        arguments: Declares its arguments.
        run: Does it, and gives the exit code.
        words: What it calls arguments of Python's that errors speak of.
    """

    name: str
    summary: str
    details: str
    examples: tuple[str, ...]
    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    words: Mapping[str, str] = WORDS


def add_pipeline(parser: argparse.ArgumentParser) -> None:
    """Declare PIPELINE."""
    text = "module:name or file.py:name, a pipeline or a function without arguments that gives one"
    parser.add_argument("pipeline", metavar="PIPELINE", help=text)


def add_key(parser: argparse.ArgumentParser, name: str = "--key", of: str = "the file") -> None:
    """Declare which state dict of a torch file is meant."""
    text = f"which state dict is meant, where {of} holds several: model, or state.model"
    parser.add_argument(name, metavar="KEY", help=text)


def add_format(parser: argparse.ArgumentParser, name: str = "--format", of: str = "the checkpoint") -> None:
    """Declare in which format a checkpoint is, where neither its content nor its name tells it."""
    parser.add_argument(
        name, metavar="FORMAT", help=f"the format of {of}, safetensors or torch; told by itself, mostly"
    )


def size_argument(text: str) -> int:
    """Read a byte count, for argparse.

    >>> size_argument("64MB")
    64000000
    """
    from fdsd.data.errors import SpecMismatch
    from fdsd.data.sizes import parse_size

    try:
        return parse_size(text)
    except SpecMismatch as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def tolerance(text: str) -> float:
    """Read a tolerance, for argparse.

    >>> tolerance("1e-3")
    0.001
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no tolerance: write 0, or a number above it, like 1e-5")
    return value


def dtype_argument(text: str) -> torch.dtype:
    """Read the name of a floating or complex dtype, for argparse.

    >>> dtype_argument("bfloat16")
    torch.bfloat16
    """
    import torch

    from fdsd.data.naming import nearest
    from fdsd.data.spec import dtype_name

    name = text.removeprefix("torch.")
    found = getattr(torch, name, None) if name.isidentifier() else None
    every = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    floating = sorted([dtype_name(d) for d in every if d.is_floating_point or d.is_complex])
    if not isinstance(found, torch.dtype):
        close = nearest(name, floating)
        hint = f"the nearest is {close[0]!r}" if close else f"there are {', '.join(floating)}"
        raise argparse.ArgumentTypeError(f"{text!r} is no dtype of torch; {hint}")
    if dtype_name(found) not in floating:
        raise argparse.ArgumentTypeError(
            f"{dtype_name(found)} is no floating dtype, and all floating tensors would be cast to it; "
            "say which tensors you mean with cast() in a pipeline"
        )
    return found


def open_state(path: str, key: str | None = None, format: str | None = None) -> Any:
    """Open a checkpoint; or what a model expects, from the JSON of a ``ModelSpec``."""
    import fdsd
    from fdsd.data.errors import BadFile
    from fdsd.storage.files import refuse
    from fdsd.storage.hf_folder import INDEX_SUFFIX

    if not path.endswith(".json") or path.endswith(INDEX_SUFFIX):
        return fdsd.open(path, key=key, format=format)
    try:
        with open(path, "rb") as file:
            text = file.read()
    except OSError as error:
        refuse(error, path, "it could not be read")
    try:
        return fdsd.ModelSpec.from_json(text)
    except BadFile as error:
        raise BadFile(f"{path}: {error}") from error
