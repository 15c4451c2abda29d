"""``fdsd explain``: what a pipeline does to a checkpoint, step by step, without reading a tensor."""

from __future__ import annotations

import argparse

from fdsd.cli.command import Command, add_format, add_key, add_pipeline, open_state
from fdsd.cli.console import Console
from fdsd.cli.loading import load_pipeline

__all__ = ["COMMAND"]


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_pipeline(parser)
    parser.add_argument("source", metavar="SRC", help="a checkpoint, or the JSON of a ModelSpec")
    add_key(parser, of="SRC")
    add_format(parser, of="SRC")


def _run(options: argparse.Namespace) -> int:
    pipeline = load_pipeline(options.pipeline)
    explanation = pipeline.explain(open_state(options.source, options.key, options.format))
    Console().marked(str(explanation))
    return 1 if explanation.problems else 0


COMMAND = Command(
    name="explain",
    summary="show what a pipeline does to a checkpoint",
    details="Show step by step which names become which, with shapes and dtypes. Only headers are read. The exit code "
    "is 1 if\na step does not fit.",
    examples=("fdsd explain rules.py:to_mine llama/",),
    arguments=_arguments,
    run=_run,
)
