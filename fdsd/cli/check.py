"""``fdsd check``: all that is wrong with a pipeline on a checkpoint, at once, without reading a tensor."""

from __future__ import annotations

import argparse

from fdsd.cli.command import Command, add_format, add_key, add_pipeline, open_state
from fdsd.cli.console import Console
from fdsd.cli.loading import load_pipeline

__all__ = ["COMMAND"]


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_pipeline(parser)
    parser.add_argument("source", metavar="SRC", help="a checkpoint, or the JSON of a ModelSpec")
    help_expect = "what should come out: the JSON of a ModelSpec, or a checkpoint with these names and shapes"
    parser.add_argument("--expect", metavar="SPEC", help=help_expect)
    add_key(parser, of="SRC")
    add_format(parser, of="SRC")


def _run(options: argparse.Namespace) -> int:
    pipeline = load_pipeline(options.pipeline)
    source = open_state(options.source, options.key, options.format)
    expect = None if options.expect is None else open_state(options.expect)
    report = pipeline.check(source, expect)
    console = Console()
    for line in str(report).splitlines():
        console.line(line, "green" if report.ok else "bold red" if not line.startswith(" ") else None)
    return 0 if report.ok else 1


COMMAND = Command(
    name="check",
    summary="find all that is wrong with a pipeline on a checkpoint",
    details="Find all problems of a pipeline on a checkpoint at once. Only headers are read. The exit code is 1 if "
    "there are any.",
    examples=(
        "fdsd check rules.py:to_mine llama/",
        "fdsd check my.package:to_mine llama/ --expect mine.safetensors",
    ),
    arguments=_arguments,
    run=_run,
)
