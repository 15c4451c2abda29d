"""Gathering, distributing and setting the state of sharded models beside torch, on real gloo ranks.

``python tests/bench/bench_transfers.py [gather] [load] [full] [optim] [--ranks 2 4] [--repeats 5] [--json PATH]``
prints a table and JSON; ``tox -e bench`` collects it. Nothing here is a gate. Both run interleaved in the same
processes, each between two barriers; seconds are medians of the slowest rank, and ``cpu`` those of the busiest one,
which tell more where others use the machine. ``received`` counts the bytes that the busiest rank received, over those
it needed; ``extra`` is the most anonymous memory of any rank in a first run, over what it had before and the result,
in MB.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # so that it runs as a script

import torch.distributed.checkpoint.state_dict as theirs  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

import fdsd.compat.state_dict as ours  # noqa: E402
from fdsd.comms.world import GroupWorld  # noqa: E402
from tests.helpers.ranks import run_ranks  # noqa: E402

MB = 1_000_000
Row = dict[str, Any]


def small() -> nn.Module:
    """2,000 tensors of some KB."""
    blocks = [nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 64)) for _ in range(500)]
    return nn.Sequential(*blocks)


def big() -> nn.Module:
    """16 tensors of 16 MB."""
    return nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(16)])


MODELS: dict[str, Callable[[], nn.Module]] = {"small": small, "big": big}


def rss_anon() -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.split("RssAnon:")[1].split()[0]) * 1024


@contextmanager
def peak() -> Iterator[list[int]]:
    """Sample the anonymous memory; the list holds the most over the start at the end."""
    start, most, stop = rss_anon(), [0], threading.Event()

    def watch() -> None:
        while not stop.wait(0.002):
            most[0] = max(most[0], rss_anon() - start)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield most
    finally:
        stop.set()
        thread.join()


class Counted:
    """Counts the bytes that this rank receives through fdsd."""

    def __init__(self) -> None:
        self.received = 0
        self._receive = GroupWorld.receive

    def __enter__(self) -> Counted:
        receive = self._receive

        def counting(world: Any, tensor: torch.Tensor, source: int) -> Any:
            self.received += tensor.numel() * tensor.element_size()
            return receive(world, tensor, source)

        GroupWorld.receive = counting  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        GroupWorld.receive = self._receive  # type: ignore[method-assign]


def measured(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, tuple[float, float]]:
    """Time runs in turn; for each the median seconds, and the median CPU seconds of this rank."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    busy: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            gc.collect()
            dist.barrier()
            start, cpu = time.perf_counter(), time.process_time()
            kept = run()
            busy[name].append(time.process_time() - cpu)
            dist.barrier()
            seconds[name].append(time.perf_counter() - start)
            del kept
    return {name: (statistics.median(seconds[name]), statistics.median(busy[name])) for name in runs}


def nbytes(result: object) -> int:
    """The bytes of all plain tensors in nested dicts and lists."""
    if isinstance(result, torch.Tensor):
        return 0 if hasattr(result, "_local_tensor") else result.numel() * result.element_size()
    values = result.values() if isinstance(result, dict) else result if isinstance(result, list | tuple) else ()
    return sum([nbytes(value) for value in values])


def peak_on_rank(rank: int, work: str, kind: str, name: str) -> float:
    """The most anonymous memory of one rank in its first run, over what it had before and the result, in MB.

    Each run has a process of its own, since memory that one has given back hides what the next one takes.
    """
    warm = nn.Linear(8, 8)
    fully_shard(warm)
    WORK[work](warm)[name]()  # imports and connections
    model = MODELS[kind]()
    fully_shard(model)
    run = WORK[work](model)[name]
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    dist.barrier()
    with peak() as most:
        kept = run()
    return (most[0] - (nbytes(kept) if work in ("gather", "optim") else 0)) / MB


def bare(model: nn.Module) -> Callable[[], object]:
    """The floor of a gather: each rank sends its shards, rank 0 receives into slices of the results."""

    def run() -> object:
        rank, world = dist.get_rank(), dist.get_world_size()
        made, works = [], []
        for param in model.parameters():
            local = param._local_tensor.detach()
            if rank:
                works.append(dist.isend(local.contiguous(), 0))
                continue
            whole = torch.empty(param.shape, dtype=param.dtype)
            rows = -(-param.shape[0] // world)
            whole[: local.shape[0]].copy_(local)
            for other in range(1, world):
                part = whole[rows * other : rows * (other + 1)]
                if part.numel():
                    works.append(dist.irecv(part, other))
            made.append(whole)
        for work in works:
            work.wait()
        return made

    return run


def bare_cut(model: nn.Module, whole: dict[str, Any]) -> Callable[[], object]:
    """The floor of cutting whole tensors: each rank copies its rows, which it has found before."""
    pairs = []
    for name, param in model.named_parameters():
        local = param._local_tensor.detach()
        rows = -(-param.shape[0] // dist.get_world_size())
        first = rows * dist.get_rank()
        pairs.append((local, whole[name][first : first + local.shape[0]]))

    def run() -> None:
        for local, part in pairs:
            local.copy_(part)

    return run


def gather(model: nn.Module) -> dict[str, Callable[[], object]]:
    def run(module: Any) -> Callable[[], object]:
        options = module.StateDictOptions(full_state_dict=True, cpu_offload=True)
        return lambda: module.get_model_state_dict(model, options=options)

    return {"theirs": run(theirs), "ours": run(ours), "bare": bare(model)}


def load(model: nn.Module) -> dict[str, Callable[[], object]]:
    options = theirs.StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole = theirs.get_model_state_dict(model, options=options)

    def run(module: Any) -> Callable[[], object]:
        how = module.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        return lambda: module.set_model_state_dict(model, dict(whole), options=how)

    return {"theirs": run(theirs), "ours": run(ours)}


def full(model: nn.Module) -> dict[str, Callable[[], object]]:
    whole = theirs.get_model_state_dict(model, options=theirs.StateDictOptions(full_state_dict=True))

    def run(module: Any) -> Callable[[], object]:
        how = module.StateDictOptions(full_state_dict=True)
        return lambda: module.set_model_state_dict(model, dict(whole), options=how)

    return {"theirs": run(theirs), "ours": run(ours), "bare": bare_cut(model, whole)}


def optim(model: nn.Module) -> dict[str, Callable[[], object]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()

    def run(module: Any) -> Callable[[], object]:
        options = module.StateDictOptions(full_state_dict=True, cpu_offload=True)
        return lambda: module.get_optimizer_state_dict(model, optimizer, options=options)

    return {"theirs": run(theirs), "ours": run(ours)}


WORK: dict[str, Callable[[nn.Module], dict[str, Callable[[], object]]]] = {
    "gather": gather,
    "load": load,
    "full": full,
    "optim": optim,
}


def on_rank(rank: int, work: str, kind: str, repeats: int) -> tuple[dict[str, tuple[float, float]], int, int]:
    """Measure one kind of work on one rank: times, the bytes received, and those that were needed."""
    torch.manual_seed(0)
    model = MODELS[kind]()
    fully_shard(model)
    runs = WORK[work](model)
    with Counted() as counted:
        kept = runs["ours"]()
    del kept
    tensors = list(model.parameters())
    whole = sum([p.numel() * p.element_size() for p in tensors])
    mine = sum([p._local_tensor.numel() * p.element_size() for p in tensors])
    needed = {"gather": 0 if rank else whole - mine, "load": mine if rank else 0, "full": 0}.get(work, 0)
    if work == "optim":
        needed = 0 if rank else 2 * (whole - mine)
    return measured(runs, repeats), counted.received, needed


def rows(works: list[str], ranks: list[int], repeats: int) -> list[Row]:
    made: list[Row] = []
    for work in works:
        for kind in ("small",) if work == "optim" else MODELS:
            for n in ranks:
                made.append(row(work, kind, n, repeats))
                print(json.dumps(made[-1]), flush=True)
    return made


def row(work: str, kind: str, n: int, repeats: int) -> Row:
    """Measure one kind of work, of the slowest rank each."""
    found = run_ranks(on_rank, n, work, kind, repeats, timeout=1800)
    times = {name: max(times[name][0] for times, _, _ in found) for name in found[0][0]}
    busy = {name: max(times[name][1] for times, _, _ in found) for name in found[0][0]}
    extra = {
        name: max(run_ranks(peak_on_rank, n, work, kind, name, timeout=600))
        for name in (("theirs", "ours") if kind == "big" else ())
    }
    busiest = max(found, key=lambda item: item[1])
    return {
        "work": work,
        "tensors": kind,
        "ranks": n,
        "theirs": times["theirs"],
        "ours": times["ours"],
        "ratio": times["theirs"] / times["ours"],
        "of bare": times["ours"] / times["bare"] if "bare" in times else "",
        "cpu theirs": busy["theirs"],
        "cpu ours": busy["ours"],
        "cpu ratio": busy["theirs"] / busy["ours"],
        "received": busiest[1] / busiest[2] if busiest[2] else busiest[1],
        "extra theirs": extra.get("theirs", ""),
        "extra ours": extra.get("ours", ""),
    }


def table(found: list[Row]) -> str:
    cells = [list(found[0]), *[[f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()] for row in found]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return "\n".join(["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells])


@pytest.mark.parametrize("work", list(WORK))
def test_transfers(work: str) -> None:
    print(table(rows([work], [2], 3)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", nargs="*", default=[], choices=[*WORK, []])
    parser.add_argument("--ranks", nargs="*", type=int, default=[2, 4])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = rows(given.work or list(WORK), given.ranks, given.repeats)
    print(table(found))
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
