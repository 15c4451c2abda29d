"""DTensors that are made of local tensors on real ranks, local tensors of odd kinds, ties, and what is remembered."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

from fdsd.algebra.apply import defer
from fdsd.comms.dtensors import (
    DTensorSource,
    layout_of_dtensor,
    lazy_dtensor,
    local_of_dtensor,
    make_dtensor,
    make_like,
)
from fdsd.data.errors import SpecMismatch, Unsupported
from fdsd.data.region import Region
from fdsd.data.spec import TensorSpec
from fdsd.data.ties import ties
from tests.helpers.ranks import run_ranks
from tests.helpers.sharded_models import fsdp2, mesh_of, wrapped
from tests.helpers.tensors import same_bytes


def test_made_dtensors() -> None:
    """Uneven and empty shards have the right global shape; memory is shared; placements are torch's own."""
    from torch.distributed.tensor import Replicate as TorchReplicate
    from torch.distributed.tensor import Shard as TorchShard

    def fn(rank: int) -> list[Any]:
        mesh = mesh_of((3,), ("dp",))
        whole = torch.arange(8.0).reshape(4, 2)
        local = whole[2 * rank : 2 * rank + 2].clone()
        x = make_dtensor(local, mesh, [TorchShard(0)], TensorSpec((4, 2), torch.float32))
        assert local_of_dtensor(x).data_ptr() == local.data_ptr() and not x.requires_grad
        assert x.stride() == (2, 1) and x.placements == (TorchShard(0),) and x.device_mesh is mesh
        y = make_like(x, local.to(torch.bfloat16))
        assert y.dtype is torch.bfloat16 and x.dtype is torch.float32
        z = make_like(x, torch.zeros_like(local))
        param = nn.Parameter(z)
        assert type(param) is type(x) and layout_of_dtensor(param) == layout_of_dtensor(x)
        one = make_dtensor(torch.ones(3), mesh, [TorchReplicate()], TensorSpec((3,), torch.float32))
        return [x.full_tensor(), y.full_tensor(), z.full_tensor(), (x + 1).full_tensor(), one.full_tensor()]

    whole = torch.arange(8.0).reshape(4, 2)
    for found in run_ranks(fn, 3):
        expected = [whole, whole.bfloat16(), whole * 0, whole + 1, torch.ones(3)]
        assert all(same_bytes(a, b) for a, b in zip(found, expected, strict=True))


def test_made_dtensors_of_another_device() -> None:
    """A local tensor stays where it is: with ``from_local`` it would go to the device of the mesh."""
    from torch.distributed.tensor import Shard as TorchShard

    def fn(rank: int) -> None:
        mesh = mesh_of((2,), ("dp",))
        spec = TensorSpec((3,), torch.float32)
        meta = make_dtensor(torch.empty(2 - rank, device="meta"), mesh, [TorchShard(0)], spec)
        assert local_of_dtensor(meta).is_meta and meta.shape == (3,)
        source = DTensorSource.of(meta)
        with pytest.raises(SpecMismatch, match=r"meta device.*to_empty"):
            source.read(source.fqn, Region.box((0,), (1,)), torch.empty(1))

    run_ranks(fn, 2)


def test_what_cannot_be_made() -> None:
    from torch.distributed.tensor import Shard as TorchShard

    def fn(rank: int) -> None:
        mesh = mesh_of((2,), ("dp",))
        spec = TensorSpec((4,), torch.float32)
        x = make_dtensor(torch.ones(2), mesh, [TorchShard(0)], spec)
        with pytest.raises(SpecMismatch, match=r"make_like: the local tensor has shape \(3,\).*\(2,\)"):
            make_like(x, torch.ones(3))
        with pytest.raises(SpecMismatch, match=r"make_dtensor: the local tensor is of torch.float64"):
            make_dtensor(torch.ones(2).double(), mesh, [TorchShard(0)], spec)

    run_ranks(fn, 2)


def test_a_local_tensor_that_a_collective_still_fills() -> None:
    from torch.distributed.tensor import Shard as TorchShard

    def fn(rank: int) -> torch.Tensor:
        mesh = mesh_of((2,), ("dp",))
        x = make_dtensor(torch.arange(2.0) + 2 * rank, mesh, [TorchShard(0)], TensorSpec((4,), torch.float32))
        whole = x.redistribute(placements=[TorchShard(0)]).redistribute(mesh, [torch_replicate()], async_op=True)
        return local_of_dtensor(whole).clone()

    def torch_replicate() -> Any:
        from torch.distributed.tensor import Replicate as TorchReplicate

        return TorchReplicate()

    for found in run_ranks(fn, 2):
        assert type(found) is torch.Tensor and found.tolist() == [0, 1, 2, 3]


def test_subclasses_in_local_tensors_are_refused_by_name() -> None:
    from torch.distributed.tensor import Replicate as TorchReplicate

    class Odd(torch.Tensor):
        pass

    def fn(rank: int) -> None:
        mesh = mesh_of((1,), ("dp",))
        x = make_dtensor(torch.ones(2), mesh, [TorchReplicate()], TensorSpec((2,), torch.float32))
        x._local_tensor = torch.ones(2).as_subclass(Odd)
        with pytest.raises(Unsupported, match=r"local tensor of a DTensor is of class .*Odd"):
            lazy_dtensor(x)

    run_ranks(fn, 1)


def test_ties_of_what_a_state_dict_gives() -> None:
    """Each name of a tied weight has a wrapper of its own, and they are one tensor."""

    def fn(rank: int) -> list[Any]:
        model = nn.Sequential(*[nn.Linear(4, 6, bias=False) for _ in range(3)])
        model[2].weight = model[0].weight
        fsdp2(model)
        state = model.state_dict()
        assert state["0.weight"] is not state["2.weight"]
        copy = make_like(state["0.weight"], state["0.weight"]._local_tensor.clone())
        lazy = defer(state)
        return [ties(state), ties({**state, "copy": copy}), lazy["0.weight"] is lazy["2.weight"]]

    for found in run_ranks(fn, 3):
        assert found == [[("0.weight", "2.weight")], [("0.weight", "2.weight")], True]


def test_known_layouts_cost_microseconds() -> None:
    """A bound that a slow machine keeps; a layout that is read anew takes longer than this."""

    def fn(rank: int) -> float:
        model, _ = wrapped(fsdp2)
        param = model.up.weight
        layout_of_dtensor(param)
        times: list[float] = []
        for _ in range(20):
            start = time.perf_counter()
            for _ in range(100):
                layout_of_dtensor(param)
            times.append((time.perf_counter() - start) / 100)
        return min(times)

    assert min(run_ranks(fn, 2)) < 50e-6
