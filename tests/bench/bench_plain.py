"""Reading and writing plain models and optimizers in one process, beside torch: seconds, and microseconds a name.

``python tests/bench/bench_plain.py [read] [write] [optim] [--names 20000 100000] [--repeats 5] [--json PATH]`` prints a
table and JSON; ``tox -e bench`` collects it. Nothing here is a gate. Both run in turn in one process, and medians of
CPU time are compared, after one run that does not count; what takes over two seconds is run once. torch's setter of
optimizers is quadratic, so that it is only asked for up to 20,000 names. By default that is all, in about a minute.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # so that it runs as a script

import torch.distributed.checkpoint.state_dict as theirs  # noqa: E402

import fdsd.compat.state_dict as ours  # noqa: E402

Row = dict[str, Any]
Runs = dict[str, Callable[[], object]]
QUADRATIC = 20_000
SLOW = 2.0


def model_of(names: int) -> nn.Module:
    """A model of so many small tensors, in blocks of ten layers."""
    blocks = [nn.Sequential(*[nn.Linear(2, 2) for _ in range(10)]) for _ in range(names // 20)]
    return nn.Sequential(*blocks)


def read(names: int) -> Runs:
    model = model_of(names)
    runs: Runs = {"theirs": model.state_dict, "ours": lambda: ours.get_model_state_dict(model)}
    if names <= QUADRATIC:
        runs["their getter"] = lambda: theirs.get_model_state_dict(model)
    return runs


def write(names: int) -> Runs:
    model = model_of(names)
    state = model_of(names).state_dict()
    runs: Runs = {
        "theirs": lambda: model.load_state_dict(state, strict=True),
        "ours": lambda: ours.set_model_state_dict(model, state),
    }
    return runs


def optim(names: int) -> Runs:
    model = model_of(names)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    state = copy.deepcopy(ours.get_optimizer_state_dict(model, optimizer))
    runs: Runs = {"ours": lambda: ours.set_optimizer_state_dict(model, optimizer, state)}
    if names <= QUADRATIC:
        runs["theirs"] = lambda: theirs.set_optimizer_state_dict(model, optimizer, state)
    return runs


WORK: dict[str, Callable[[int], Runs]] = {"read": read, "write": write, "optim": optim}


def measured(runs: Runs, repeats: int) -> dict[str, float]:
    """Time runs in turn, after one of each; for each the median of CPU seconds. Slow ones are run once."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats + 1):
        for name, run in runs.items():
            if seconds[name] and seconds[name][0] > SLOW:
                continue
            gc.collect()
            start = time.process_time()
            run()
            seconds[name].append(time.process_time() - start)
    return {name: statistics.median(times[1:] or times) for name, times in seconds.items()}


def rows(works: list[str], sizes: list[int], repeats: int) -> list[Row]:
    made: list[Row] = []
    for work in works:
        for names in sizes:
            found = measured(WORK[work](names), repeats)
            theirs_s, ours_s = found.get("theirs"), found["ours"]
            made.append(
                {
                    "work": work,
                    "names": names,
                    "theirs us": "" if theirs_s is None else theirs_s / names * 1e6,
                    "ours us": ours_s / names * 1e6,
                    "of theirs": "" if theirs_s is None else ours_s / theirs_s,
                    "their getter us": found["their getter"] / names * 1e6 if "their getter" in found else "",
                }
            )
            print(json.dumps(made[-1]), flush=True)
    return made


def table(found: list[Row]) -> str:
    cells = [list(found[0]), *[[f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()] for row in found]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return "\n".join(["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells])


@pytest.mark.parametrize("work", ["read", "write"])
def test_plain(work: str) -> None:
    print("\n" + table(rows([work], [20_000], 3)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", nargs="*", help="read, write, optim; all if left out")
    parser.add_argument("--names", nargs="*", type=int, default=[20_000])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = rows(given.work or list(WORK), given.names, given.repeats)
    print(table(found))
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
