"""Copies from an accelerator, with one that does nothing until it is waited for: who reads too early reads rubbish."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from attrs import define, field
from hypothesis import given
from hypothesis import strategies as st

from fdsd.engine.delivery import plan_delivery
from fdsd.engine.messages import Window
from fdsd.engine.request import Request
from fdsd.engine.staging import Accelerator, Staging
from fdsd.layout import Layout, Mesh, Shard
from fdsd.layout.structure import Limits
from tests.helpers.placed import shard
from tests.helpers.tensors import same_bytes
from tests.helpers.worlds import MemoryWorld, run_world


@define(eq=False)
class Slow:
    """An accelerator whose memory is some storages of this process, and that works only when it has to."""

    storages: list[torch.UntypedStorage] = field(factory=list)
    queue: list[Callable[[], object]] = field(factory=list)
    begun: int = 0
    at_once: int = 0

    def far(self, tensor: torch.Tensor) -> torch.Tensor:
        self.storages.append(tensor.untyped_storage())
        return tensor

    def is_there(self) -> bool:
        return True

    def is_far(self, tensor: torch.Tensor) -> bool:
        return any(tensor.untyped_storage().data_ptr() == one.data_ptr() for one in self.storages if one.nbytes())

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.full((nbytes,), 0xAB, dtype=torch.uint8)

    def copy(self, outs: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        for out, source in zip(outs, sources, strict=True):
            self.begun += 1
            self.queue.append(partial(out.copy_, source))

    def mark(self, device: torch.device) -> SlowMark:
        return SlowMark(self, list(self.queue))


@define(eq=False)
class SlowMark:
    layer: Slow
    before: list[Callable[[], object]]

    def synchronize(self) -> None:
        self.layer.at_once = max(self.layer.at_once, len(self.layer.queue))
        for copy in self.before:
            if copy in self.layer.queue:
                self.layer.queue.remove(copy)
                copy()


shapes = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), max_size=8)


@given(shapes, st.integers(1, 80), st.booleans())
def test_outs_have_the_elements_of_their_sources(some: list[tuple[int, ...]], nbytes: int, is_cast: bool) -> None:
    layer = Slow()
    staging = Staging(layer, nbytes)
    for _ in range(2):  # what is used again is used again rightly
        sources = [
            layer.far(torch.arange(1, torch.Size(shape).numel() + 1).reshape(shape).to(torch.float32) + 100 * i)
            for i, shape in enumerate(some)
        ]
        outs = [torch.zeros(shape, dtype=torch.float64 if is_cast else torch.float32) for shape in some]
        for source, out in zip(sources, outs, strict=True):
            staging.copy(source.mT if source.ndim > 1 else source, out.mT if out.ndim > 1 else out)
        staging.finish()
        assert all(same_bytes(out, source.to(out.dtype)) for source, out in zip(sources, outs, strict=True))
        assert not layer.queue


def test_small_copies_are_under_way_together() -> None:
    layer = Slow()
    staging = Staging(layer, 1 << 10)
    outs = [torch.zeros(4) for _ in range(20)]
    for i, out in enumerate(outs):
        staging.copy(layer.far(torch.full((4,), float(i + 1))), out)
    staging.finish()
    assert [float(out[0]) for out in outs] == [float(i + 1) for i in range(20)]
    assert layer.at_once == 20


def test_what_is_forgotten_is_waited_for_and_not_written() -> None:
    layer = Slow()
    staging, out = Staging(layer, 64), torch.zeros(2)
    staging.copy(layer.far(torch.ones(2)), out)
    staging.forget()
    assert not layer.queue and not out.any()


@pytest.mark.parametrize("is_out_far", [False, True])
@pytest.mark.parametrize("limits", [Limits(), Limits(small=64, bucket=64), Limits(small=0, bucket=16)])
def test_deliveries_wait_for_accelerators(limits: Limits, is_out_far: bool) -> None:
    tensors = {f"t{i}": torch.arange(7 * 3, dtype=torch.float32).reshape(7, 3) + 100 * i for i in range(12)}
    layout, columns = Layout(Mesh({"dp": 3}), [Shard(0)]), Layout(Mesh({"dp": 3}), [Shard(1)])

    def deliver(world: MemoryWorld) -> int:
        layer = Slow()
        source = shard(tensors, dict.fromkeys(tensors, layout), world.rank)
        for name in tensors:
            local = source.local(name)
            assert local is not None
            layer.far(local)
        outs = {name: torch.zeros(7, 1) for name in tensors}
        if is_out_far:
            outs = {name: layer.far(out) for name, out in outs.items()}
        requests = {name: Request(source.lazy(name), columns, out=outs[name]) for name in tensors}
        delivery = plan_delivery(requests, world, limits=limits, window=Window(2, 3), layer=layer)
        for name, local in delivery.run():
            assert local is outs[name]
        assert not layer.queue
        for name, whole in tensors.items():
            assert same_bytes(outs[name], whole[:, world.rank : world.rank + 1].contiguous()), name
        return layer.begun

    assert all(begun >= 12 for begun in run_world(deliver, 3))


def test_the_cpu_is_near() -> None:
    assert not Accelerator().is_far(torch.ones(1)) and not Accelerator().is_far(torch.ones(1, device="meta"))
    assert len(Accelerator().empty(5)) == 5
