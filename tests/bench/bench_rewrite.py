"""Rewriting checkpoints beside `cp` and beside the usual way; memory at 2 and 8 GB; imports; 100,000 leaves.

``python tests/bench/bench_rewrite.py [copy] [memory] [import] [leaves] [--big] [--json PATH]`` prints tables and JSON;
``tox -e bench`` collects it. Nothing here is a gate. Runs that are compared are interleaved in one process, each
into a fresh file, and ratios are those of medians. The source is in the page cache, as it is for `cp`. Every timed
copy comes right behind an untimed one of the same kind: a virtual machine pays the host about a second for each GB
of page cache that it did not use a moment ago, and without that the run that writes most would pay for all.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # so that it runs as a script

import fdsd  # noqa: E402
from tests.memory.rewriting import PIPELINES, make_checkpoint, rewrite  # noqa: E402

MB = 1_000_000
Row = dict[str, Any]


def table(title: str, rows: list[Row]) -> str:
    """Lay rows out as text."""
    columns = list(rows[0]) if rows else []
    cells = [columns, *[[f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    return "\n".join([f"\n{title}", *lines])


Runs = Mapping[str, Callable[[], object]]


def timed(runs: Runs, repeats: int, cleanup: Callable[[], object] = gc.collect, *, warm: bool = False) -> list[Row]:
    """Time each function ``repeats`` times, in turn; seconds and seconds of CPU, children included.

    Args:
        runs: What to time.
        repeats: How often.
        cleanup: What to do before each run.
        warm: Whether each run is done twice in a row, and the second one timed.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    cpu: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            if warm:
                cleanup()
                run()
            cleanup()
            before, start = os.times(), time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
            cpu[name].append(sum(os.times()[:4]) - sum(before[:4]))
    cleanup()
    median = statistics.median
    return [
        {"run": name, "seconds": median(seconds[name]), "least": min(seconds[name]), "cpu": median(cpu[name])}
        for name in runs
    ]


# -- beside cp -------------------------------------------------------------------------------------------------------


def by_hand(source: Path, target: Path) -> None:
    """The usual way to rename, fuse and cast: load everything, change the dict, save it."""
    state = load_file(source)
    made: dict[str, torch.Tensor] = {}
    for name, leaf in state.items():
        new = name.removeprefix("model.")
        if ".attn." not in new:
            is_cast = new == "embed.weight" or new.endswith("norm.weight")
            made[new] = leaf.float() if is_cast else leaf
        elif new.endswith(".q.weight"):
            parts = [state[name.replace(".q.", f".{x}.")] for x in "qkv"]
            made[new.replace(".q.", ".qkv.")] = torch.cat(parts)
    save_file(made, target, {"format": "pt"})


def bench_copy(folder: Path, sizes: list[int], repeats: int) -> list[Row]:
    """Copies and rewrites of files of real data."""
    rows: list[Row] = []
    for size in sizes:
        source, target = folder / f"{size}.safetensors", folder / "out.safetensors"
        make_checkpoint(source, size, is_sparse=False)

        def save(kind: str, source: Path = source, target: Path = target) -> Callable[[], None]:
            return lambda: fdsd.save(PIPELINES[kind]()(fdsd.open(source)), target)

        def clean(target: Path = target) -> None:
            target.unlink(missing_ok=True)

        def cp(source: Path = source, target: Path = target) -> None:
            subprocess.run(["cp", str(source), str(target)], check=True)

        runs: dict[str, Callable[[], object]] = {
            "cp": cp,
            "shutil.copyfile": lambda source=source, target=target: shutil.copyfile(source, target),
            "fdsd rename": save("rename"),
            "fdsd rename, fuse, cast": save("rename, fuse, cast"),
            "fdsd cast all": save("cast all"),
            "safetensors rename, fuse, cast": lambda source=source, target=target: by_hand(source, target),
        }
        sizes_out: dict[str, int] = {}
        for name, run in runs.items():  # once before the timing, for the page cache and for the sizes
            clean()
            run()
            sizes_out[name] = target.stat().st_size
        found = timed(runs, repeats, clean, warm=True)
        base = {row["run"]: row["seconds"] for row in found}
        for row in found:
            name = row.pop("run")
            rows.append(
                {
                    "run": name,
                    "MB in": source.stat().st_size / MB,
                    "MB out": sizes_out[name] / MB,
                    **row,
                    "x cp": row["seconds"] / base["cp"],
                    "x cp of MB out": row["seconds"] / base["cp"] * sizes_out["cp"] / sizes_out[name],
                    "x copyfile": row["seconds"] / base["shutil.copyfile"],
                }
            )
        source.unlink()
    return rows


# -- memory ----------------------------------------------------------------------------------------------------------


def bench_memory(folder: Path, sizes: list[int]) -> list[Row]:
    """Peak anonymous memory of rewrites in fresh processes, beyond what the imports take."""
    rows: list[Row] = []
    for size in sizes:
        free, needed = shutil.disk_usage(folder).free, int(2.2 * size) + 2000 * MB
        if free < needed:
            rows.append({"size": f"{size / MB:.0f} MB", "run": f"skipped: needs {needed // MB} MB of disk"})
            continue
        source, target = folder / "source.safetensors", folder / "out.safetensors"
        make_checkpoint(source, size)
        for kind in ("rename", "rename, fuse, cast"):
            for budget in ("32MB", "256MB"):
                found = rewrite(source, target, kind, budget=budget)
                target.unlink()
                rows.append(
                    {
                        "size": f"{size / MB:.0f} MB",
                        "run": kind,
                        "budget": budget,
                        "base MB": found.base / MB,
                        "peak beyond MB": found.extra / MB,
                        "seconds": found.seconds,
                        "cpu": found.cpu,
                    }
                )
        source.unlink()
    return rows


# -- imports ---------------------------------------------------------------------------------------------------------

IMPORT = """
import time, torch
start, cpu = time.perf_counter(), time.process_time()
import fdsd
print(time.perf_counter() - start, time.process_time() - cpu)
"""


def bench_import(repeats: int) -> list[Row]:
    """Seconds that ``import fdsd`` takes after ``import torch``, with bytecode that is there."""

    def once() -> list[float]:
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True, env=env)
        return [float(value) for value in done.stdout.split()]

    once()
    found = [once() for _ in range(repeats)]
    seconds, cpu = ([pair[i] * 1000 for pair in found] for i in (0, 1))
    row = {"ms": statistics.median(seconds), "least": min(seconds), "cpu ms": statistics.median(cpu)}
    return [{"run": "import fdsd after torch", **row}]


# -- leaves ----------------------------------------------------------------------------------------------------------


def bench_leaves(count: int, repeats: int) -> list[Row]:
    """Microseconds a leaf of what is done to whole state dicts."""
    plain = {f"layers.{i // 8}.mlp.experts.{i % 8}.weight": torch.empty(1) for i in range(count)}
    state = fdsd.StateDict(plain)
    lazy = fdsd.defer(state)
    runs: dict[str, Callable[[], object]] = {
        "dict comprehension": lambda: {name: leaf.detach for name, leaf in plain.items()},
        "StateDict(dict)": lambda: fdsd.StateDict(plain),
        "StateDict(pairs)": lambda: fdsd.StateDict(plain.items()),
        "optree.tree_map": lambda: optree.tree_map(lambda leaf: leaf.detach, state, namespace="fdsd"),  # type: ignore[arg-type]
        "to_dict": state.to_dict,
        "specs": lambda: fdsd.specs(state),
        "defer": lambda: fdsd.defer(state),
        "add_prefix": lambda: fdsd.add_prefix("m.")(state),
        "rename_fqns, lazy": lambda: fdsd.rename_fqns({"layers.{r...}": "blocks.{r...}"})(lazy),
        "transpose, lazy": lambda: fdsd.permute("{_...}", (0,))(lazy),
        "diff of specs": lambda: fdsd.diff(fdsd.specs(state), fdsd.specs(lazy)),
    }
    found = timed(runs, repeats)
    base = found[0]["seconds"]
    return [
        {
            "run": row["run"],
            "us a leaf": row["seconds"] / count * 1e6,
            "cpu us a leaf": row["cpu"] / count * 1e6,
            "x dict": row["seconds"] / base,
        }
        for row in found
    ]


# -- as a test, and as a script --------------------------------------------------------------------------------------

Show = Callable[[str, list[Row]], None]


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Show:
    def printed(title: str, rows: list[Row]) -> None:
        with capsys.disabled():
            print(table(title, rows))

    return printed


def test_copy(show: Show, tmp_path: Path) -> None:
    show("Beside cp", bench_copy(tmp_path, [256 * MB, 1000 * MB], 5))


def test_memory(show: Show, tmp_path: Path) -> None:
    show("Anonymous memory", bench_memory(tmp_path, [2000 * MB, 8000 * MB]))


def test_import(show: Show) -> None:
    show("Import", bench_import(9))


def test_leaves(show: Show) -> None:
    show("State dicts of 100,000 leaves", bench_leaves(100_000, 7))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=["copy", "memory", "import", "leaves", []], default=[])
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 1000], help="MB of the files that are copied")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--leaves", type=int, default=100_000)
    parser.add_argument("--big", action="store_true", help="memory at 2 and 8 GB instead of 256 MB and 1 GB")
    parser.add_argument("--folder", type=Path, default=None, help="where the files are made")
    parser.add_argument("--json", type=Path, default=None, help="where the rows go, too")
    options = parser.parse_args()
    parts = options.parts or ["copy", "memory", "import", "leaves"]
    torch.set_num_threads(1)
    made: dict[str, list[Row]] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        if "copy" in parts:
            made["copy"] = bench_copy(folder, [size * MB for size in options.sizes], options.repeats)
        if "memory" in parts:
            made["memory"] = bench_memory(folder, [s * MB for s in ((2000, 8000) if options.big else (256, 1000))])
        if "import" in parts:
            made["import"] = bench_import(max(options.repeats, 9))
        if "leaves" in parts:
            made["leaves"] = bench_leaves(options.leaves, options.repeats)
    for title, rows in made.items():
        print(table(title, rows))
    text = json.dumps({"bench": "rewrite", "torch": torch.__version__, **made})
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
