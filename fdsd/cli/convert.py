"""``fdsd convert``: a checkpoint rewritten and streamed to a new one."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fdsd.cli.command import WORDS, Command, add_format, add_key, dtype_argument, size_argument
from fdsd.cli.console import Console
from fdsd.cli.loading import load_pipeline

__all__ = ["COMMAND"]


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", help="a safetensors file, index or folder, or a torch file")
    help_target = "x.safetensors: one file; x.pt, x.pth, x.bin: a torch file; anything else: a folder"
    parser.add_argument("target", metavar="DST", help=help_target)
    help_pipeline = "module:name or file.py:name; without one, names and tensors stay as they are"
    parser.add_argument("--pipeline", metavar="PIPELINE", help=help_pipeline)
    help_dtype = "cast all floating tensors at the end, as to bfloat16"
    parser.add_argument("--dtype", type=dtype_argument, metavar="DTYPE", help=help_dtype)
    help_shard = "the most bytes in one file of a folder (default: 5GB)"
    parser.add_argument("--max-shard-size", type=size_argument, metavar="SIZE", help=help_shard)
    help_assets = "a folder, or a file, to copy beside the weights: configuration, tokenizer; may be repeated"
    parser.add_argument("--assets", action="append", metavar="DIR", help=help_assets)
    parser.add_argument("--overwrite", action="store_true", help="replace what stands at DST")
    help_budget = "the most bytes of scratch memory (default: 256MB)"
    parser.add_argument("--budget", type=size_argument, default="256MB", metavar="SIZE", help=help_budget)
    parser.add_argument("--quiet", action="store_true", help="show no progress and print nothing but errors")
    add_key(parser, of="SRC")
    add_format(parser, of="SRC")
    add_format(parser, "--to-format", of="DST")


def _run(options: argparse.Namespace) -> int:
    import fdsd
    from fdsd.engine.progress import quiet

    rewrites = list(_rewrites(options))
    _check_target(options)
    state: Any = fdsd.open(options.source, key=options.key, format=options.format)
    for rewrite in rewrites:
        state = rewrite(state)
    shards: dict[str, Any] = {} if options.max_shard_size is None else {"max_shard_size": options.max_shard_size}
    with quiet(options.quiet):
        fdsd.save(
            state,
            options.target,
            format=options.to_format,
            assets=options.assets,
            overwrite=options.overwrite,
            budget=options.budget,
            **shards,
        )
    if not options.quiet:
        Console().line(f"{options.target}: {_summary(state)}")
    return 0


def _rewrites(options: argparse.Namespace) -> Iterator[Callable[[Any], Any]]:
    import fdsd

    if options.pipeline is not None:
        yield load_pipeline(options.pipeline)
    if options.dtype is not None:
        yield fdsd.cast(options.dtype)


def _check_target(options: argparse.Namespace) -> None:
    """Refuse what would have no effect, or not the one that was meant, before anything is read."""
    from fdsd.data.errors import Unsupported
    from fdsd.storage.formats import of_target

    _, is_file = of_target(options.target, options.to_format)
    if options.max_shard_size is not None and is_file:
        raise Unsupported(
            f"--max-shard-size divides the files of a folder, and {options.target} is one file. Name a folder as DST, "
            "or leave the option out."
        )


def _summary(state: Mapping[str, Any]) -> str:
    from fdsd.data.errors import plural
    from fdsd.data.sizes import format_size
    from fdsd.data.spec import spec_of
    from fdsd.data.ties import ties

    tied = {name for group in ties(state) for name in group[1:]}
    found = [spec for name, leaf in state.items() if name not in tied and (spec := spec_of(leaf)) is not None]
    return f"{plural(len(found), 'tensor')}, {format_size(sum([spec.nbytes for spec in found]))}"


COMMAND = Command(
    name="convert",
    summary="rewrite a checkpoint, streamed to a new one",
    details="Rewrite a checkpoint, streamed within a memory budget. DST appears when all of it stands; until then, and "
    "after an\nerror, what stood there is unchanged.",
    examples=(
        "fdsd convert pytorch_model.bin model.safetensors",
        "fdsd convert llama/ mine/ --pipeline rules.py:to_mine --dtype bfloat16 --assets llama/",
    ),
    arguments=_arguments,
    run=_run,
    words={"overwrite=True": "--overwrite", "format= says": "--to-format says", **WORDS},
)
