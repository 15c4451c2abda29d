"""Deliveries over real gloo ranks equal what one process computes; and who is gone is named."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fdsd.comms.world import world_of
from fdsd.data.errors import FdsdError, RanksLost
from fdsd.data.spec import TensorSpec
from fdsd.engine.delivery import plan_delivery
from fdsd.engine.messages import Window
from fdsd.engine.request import Request
from fdsd.layout import Layout, Mesh, Shard
from fdsd.layout.structure import Limits
from tests.helpers.deliveries import Wanted, deliveries, limits, windows
from tests.helpers.placed import ShardedTensors, shard
from tests.helpers.ranks import RankDied, run_ranks
from tests.helpers.tensors import same_bytes


def check_case(rank: int, case: Wanted, window: Window, limit: Limits, budget: int | None) -> None:
    requests = case.requests(rank)
    delivery = plan_delivery(requests, world_of(dist.group.WORLD), budget=budget, limits=limit, window=window)
    got, want = dict(delivery.run()), case.expected(rank)
    assert list(got) == [name for name in case.results if name in want]
    for name, value in got.items():
        assert same_bytes(value, want[name]), f"rank {rank}, {name}\n{case.story}"


@pytest.mark.parametrize("num", [1, 2, 3, 4])
@given(st.data())
@settings(deadline=None, max_examples=7, suppress_health_check=list(HealthCheck))
def test_ranks_get_what_one_process_computes(num: int, data: st.DataObject) -> None:
    """Law 11 on real ranks: random pipelines over random layouts, windows from 1 up."""
    cases = data.draw(st.lists(deliveries(group=range(num)), min_size=4, max_size=8))
    settings_ = [(data.draw(windows), data.draw(limits), data.draw(st.sampled_from([None, 1, 500]))) for _ in cases]

    def ranks(rank: int) -> None:
        for case, (window, limit, budget) in zip(cases, settings_, strict=True):
            check_case(rank, case, window, limit, budget if num > 1 else None)

    run_ranks(ranks, num, timeout=120)


@pytest.mark.parametrize("window", [Window(1, 1), Window()])
def test_big_messages_cross_each_other(window: Window) -> None:
    """Every rank sends to all others at once, more than any buffer of the transport holds."""
    spec = TensorSpec((1536, 1024), torch.float32)
    tensors = {f"t{i}": torch.arange(i, i + spec.numel, dtype=torch.int32).view(spec.dtype).reshape(1536, 1024)
               for i in range(4)}  # fmt: skip
    rows, columns = (Layout(Mesh({"dp": 3}), [Shard(dim)]) for dim in (0, 1))

    def ranks(rank: int) -> None:
        source = shard(tensors, dict.fromkeys(tensors, rows), rank)
        requests = {name: Request(source.lazy(name), columns) for name in tensors}
        world = world_of(dist.group.WORLD)
        for name, value in plan_delivery(requests, world, limits=Limits(1 << 10, 1 << 19), window=window).run():
            block = columns.blocks(spec.shape, rank)[0]
            assert same_bytes(value, tensors[name][:, block.starts[1] : block.starts[1] + block.sizes[1]])

    run_ranks(ranks, 3, timeout=120)


def test_a_function_that_raises_on_one_rank_is_the_error_of_all() -> None:
    tensors = {f"t{i}": torch.arange(600.0) + i for i in range(8)}
    rows = Layout(Mesh({"dp": 2}), [Shard(0)])

    class Refusing(ShardedTensors):
        def local(self, fqn: str) -> torch.Tensor | None:
            if self._rank == 1 and fqn == "t3":
                raise ValueError("bad sector")
            return super().local(fqn)

    def ranks(rank: int) -> str:
        good = shard(tensors, dict.fromkeys(tensors, rows), rank)
        source = Refusing(good.specs(), dict.fromkeys(tensors, rows), {n: good.local(n) for n in tensors}, rank)
        with pytest.raises(FdsdError) as caught:
            dict(plan_delivery({n: Request(source.lazy(n)) for n in tensors}, world_of(dist.group.WORLD)).run())
        return str(caught.value)

    assert run_ranks(ranks, 2) == ["rank 1: 't3': ValueError: bad sector"] * 2


def test_a_rank_that_dies_is_named() -> None:
    """While the others wait for its messages."""
    tensors = {f"t{i}": torch.arange(300000.0) + i for i in range(8)}
    rows = Layout(Mesh({"dp": 3}), [Shard(0)])

    class Dying(ShardedTensors):
        def local(self, fqn: str) -> torch.Tensor | None:
            if self._rank == 2 and fqn == "t3":
                os._exit(1)
            return super().local(fqn)

    def ranks(rank: int) -> None:
        good = shard(tensors, dict.fromkeys(tensors, rows), rank)
        source = Dying(good.specs(), dict.fromkeys(tensors, rows), {n: good.local(n) for n in tensors}, rank)
        dict(plan_delivery({n: Request(source.lazy(n)) for n in tensors}, world_of(dist.group.WORLD)).run())

    first, second, died = run_ranks(ranks, 3, timeout=60, group_timeout=8, expect_errors=True)
    assert isinstance(died, RankDied)
    for error in (first, second):
        assert isinstance(error, RanksLost), repr(error)
        assert "2" in str(error)


@pytest.mark.parametrize("num", [1, 2])
def test_autograd_knows_what_arrived(num: int) -> None:
    """One tensor travels straight into its memory, two are packed: what was saved for backward is an error in both."""
    zero, cut = Layout(Mesh({"one": 1}, [0]), [Shard(0)]), Layout(Mesh({"dp": 2}), [Shard(0)])
    tensors = {f"t{i}": torch.ones(4, 6) for i in range(num)}

    def ranks(rank: int) -> None:
        source = shard(tensors, dict.fromkeys(tensors, zero), rank)
        outs = {name: torch.nn.Parameter(torch.ones(2, 6)) for name in tensors}
        losses = [(out * out).sum() for out in outs.values()]
        requests = {name: Request(source.lazy(name), cut, out=out) for name, out in outs.items()}
        list(plan_delivery(requests, world_of(dist.group.WORLD)).run())
        for loss in losses:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()  # type: ignore[no-untyped-call]

    run_ranks(ranks, 2)
