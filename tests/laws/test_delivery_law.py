"""Law 11: what is delivered over ranks is what one process would compute, byte for byte, within any window."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fdsd.engine.delivery import plan_delivery
from fdsd.engine.messages import Window
from fdsd.layout.structure import Limits
from tests.helpers.deliveries import Wanted, deliveries, limits, windows
from tests.helpers.tensors import same_bytes
from tests.helpers.worlds import MemoryWorld, run_world

slow = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@given(deliveries(), windows, limits, st.sampled_from([None, None, 1, 200, 5000]))
@settings(slow, max_examples=300)
def test_ranks_get_what_one_process_computes(case: Wanted, window: Window, limit: Limits, budget: int | None) -> None:
    """Random graphs over random layouts, into fresh memory and into memory of any strides, in any number of rounds."""

    if len(case.ranks) == 1:  # for one process a budget is a bound on scratch, and may be too small
        budget = None

    def rank_of(world: MemoryWorld) -> tuple[list[str], dict[str, torch.Tensor], object, int, int]:
        requests = case.requests(world.rank)
        delivery = plan_delivery(requests, world, budget=budget, limits=limit, window=window)
        got = list(delivery.run())
        for name, value in got:
            out = requests[name].out
            assert out is None or value is out
        return [name for name, _ in got], dict(got), delivery.traffic(), world.received, world.sent

    ran = run_world(rank_of, case.ranks)
    for rank, (names, got, traffic, received, sent) in zip(case.ranks, ran, strict=True):
        want = case.expected(rank)
        assert names == [name for name in case.results if name in want]
        for name, value in got.items():
            assert same_bytes(value, want[name]), f"rank {rank}, {name}\n{case.story}"
        assert traffic == ran[0][2]
        padding = 16 * 10000
        assert traffic.received.get(rank, 0) <= received <= traffic.received.get(rank, 0) + padding
        assert traffic.sent.get(rank, 0) <= sent
