"""The memory of ranks that save or stream a sharded model is bounded by the budget, not by the size of the model."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fdsd
from fdsd import Sharded
from fdsd.layout import Layout, Mesh, Shard
from tests.helpers.ranks import run_ranks

from .rewriting import anonymous_memory

MB = 1 << 20
NUM_RANKS = 3
SHAPES = {"embed": (25000, 1000), **{f"layers.{i}.w": (1500, 1000) for i in range(50)}, "norm": (1000,)}  # 400 MB
LAYOUTS = {name: Layout(Mesh({"x": NUM_RANKS}), [Shard(0)]) for name in SHAPES}
BUDGET = 32 * MB
BUCKETS = 2 * 16 * MB

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="RssAnon is read from /proc")


class Watch:
    """Watches the anonymous memory of this process from a thread of its own."""

    def __enter__(self) -> Watch:
        self.base = self.peak = anonymous_memory(os.getpid())
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._is_over.wait(0.002):
            self.peak = max(self.peak, anonymous_memory(os.getpid()))

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()

    @property
    def extra(self) -> int:
        return self.peak - self.base


def shards(rank: int) -> dict[str, Sharded]:
    """This rank's shards of a model of 400 MB; element values tell tensors and places apart."""
    made: dict[str, Sharded] = {}
    for i, (name, shape) in enumerate(SHAPES.items()):
        layout = LAYOUTS[name]
        start = layout.blocks(shape, rank)[0].starts[0]
        local = torch.arange(start, start + layout.local_shape(shape, rank)[0], dtype=torch.float32) + i / 64
        spec = fdsd.TensorSpec(shape, torch.float32)
        made[name] = Sharded(
            spec, layout, shards={rank: local.reshape(-1, *[1] * (len(shape) - 1)).expand(-1, *shape[1:]).clone()}
        )
    return made


def measured(rank: int, work: Callable[[dict[str, Any]], None]) -> int:
    state: Any = fdsd.gather()(shards(rank))
    work(fdsd.select("norm")(state))  # everything is imported, and the connections are made
    dist.barrier()
    with Watch() as watch:
        work(state)
    return watch.extra


def saves(rank: int, path: str) -> int:
    def work(state: dict[str, Any]) -> None:
        fdsd.save(state, path, group=dist.group.WORLD, budget=BUDGET, overwrite=True)

    return measured(rank, work)


def streams(rank: int) -> int:
    def work(state: dict[str, Any]) -> None:
        small = fdsd.drop("embed?")(state)
        for i, (name, value) in enumerate(fdsd.stream(small, group=dist.group.WORLD, budget=BUDGET)):
            assert value.shape == SHAPES[name] and i >= 0

    return measured(rank, work)


def test_the_writer_needs_its_budget_and_the_others_two_buckets(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    writer, *others = run_ranks(saves, NUM_RANKS, str(path), timeout=200)
    found = fdsd.open(path)
    for i, (name, shape) in enumerate(SHAPES.items()):
        assert found[name].shape == shape
        if name != "embed":
            value = fdsd.materialize(fdsd.select(name)(found))[name]
            rows = torch.arange(shape[0], dtype=torch.float32) + i / 64
            assert torch.equal(value, rows.reshape(-1, *[1] * (len(shape) - 1)).expand(shape))
    path.unlink()
    assert writer <= BUDGET + 64 * MB, writer / MB
    assert max(others) <= BUCKETS, [other / MB for other in others]


def test_a_stream_needs_its_budget_and_its_buckets() -> None:
    assert max(run_ranks(streams, NUM_RANKS, timeout=200)) <= BUDGET + BUCKETS
