"""``fdsd diff``: what differs between two checkpoints, by name, shape, dtype and value."""

from __future__ import annotations

import argparse

from fdsd.cli.command import Command, add_format, add_key, tolerance
from fdsd.cli.console import Console

__all__ = ["COMMAND"]


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A", help="a checkpoint")
    parser.add_argument("b", metavar="B", help="another")
    help_rtol = "the relative error that is allowed (default: 0)"
    parser.add_argument("--rtol", type=tolerance, default=0.0, metavar="R", help=help_rtol)
    help_atol = "the absolute error that is allowed (default: 0); with neither, bytes are compared"
    parser.add_argument("--atol", type=tolerance, default=0.0, metavar="A", help=help_atol)
    add_key(parser, "--key-a", "A")
    add_key(parser, "--key-b", "B")
    add_format(parser, "--format-a", "A")
    add_format(parser, "--format-b", "B")


def _run(options: argparse.Namespace) -> int:
    import fdsd

    a = fdsd.open(options.a, key=options.key_a, format=options.format_a)
    b = fdsd.open(options.b, key=options.key_b, format=options.format_b)
    found = fdsd.diff(a, b, rtol=options.rtol, atol=options.atol)
    Console().marked(str(found))
    return 0 if found.same else 1


COMMAND = Command(
    name="diff",
    summary="compare two checkpoints",
    details="Compare two checkpoints by name, shape, dtype and value; values are read piece by piece. The exit code "
    "is 1 if\nanything differs.",
    examples=("fdsd diff old.safetensors new/", "fdsd diff a.safetensors b.pt --key-b model --atol 1e-6"),
    arguments=_arguments,
    run=_run,
    words={f"{name}={end}": f"--{name}-a or --{name}-b " for name in ("key", "format") for end in (" ", "")},
)
