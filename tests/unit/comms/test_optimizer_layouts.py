"""State of FSDP2's shards over tensor parallelism, which older versions of torch label as plain shards."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fdsd import OptimState
from fdsd.comms.dtensors import make_like
from fdsd.comms.modules import read_modules
from fdsd.comms.optimizer_layouts import as_laid, columns_as_laid
from fdsd.comms.optimizers import read_optimizers
from tests.helpers.dtensors import Shard, StridedShard, fake_ranks
from tests.helpers.ranks import run_ranks


def with_linear(check: Callable[[nn.Linear], None]) -> None:
    """Check a column-parallel layer under ``fully_shard``, where strided shards count as equal to plain ones.

    In a process of its own: torch keeps, by equality, what it once found of placements, and other tests would get it.
    """

    def rank(_: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

        def equal(ours: Any, theirs: Any) -> bool:
            return isinstance(theirs, Shard) and bool(ours.dim == theirs.dim)

        strided: Any = type(StridedShard(0, 2))
        strided.__eq__ = equal
        with fake_ranks(1, 4), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            made = nn.Linear(3, 8)
            parallelize_module(made, mesh["tp"], ColwiseParallel())
            fully_shard(made, mesh=mesh["dp"])
            check(made)

    run_ranks(rank, 1, init=False)


def mislabelled(param: Any) -> Any:
    """What such a torch gives for ``out=``: the local tensor of a strided shard, and plain placements."""
    from torch.distributed.tensor import DTensor

    local = torch.ones_like(param.detach().to_local())
    return DTensor.from_local(
        local, param.device_mesh, (Shard(0), Shard(0)), run_check=False, shape=param.shape, stride=param.stride()
    )


def kinds(tensor: Any) -> list[type]:
    return [type(placement) for placement in tensor.placements]


def test_state_lies_as_its_parameter_and_shares_memory() -> None:
    def check(linear: nn.Linear) -> None:
        param: Any = linear.weight
        odd = mislabelled(param)
        assert kinds(odd) != kinds(param)
        made = as_laid({"a": [odd], "b": (odd, 3), "step": 1}, param)
        for tensor in (made["a"][0], made["b"][0]):
            assert kinds(tensor) == kinds(param)
            assert tensor.to_local().data_ptr() == odd.to_local().data_ptr()
        assert made["b"][1] == 3 and made["step"] == 1

    with_linear(check)


def test_what_says_the_truth_stays_the_same_object() -> None:
    def check(linear: nn.Linear) -> None:
        param: Any = linear.weight
        true = make_like(param, torch.zeros_like(param.detach().to_local()))
        for row in ({"a": true, "b": [true], "c": (torch.ones(3),)}, None, 3, {}):
            assert as_laid(row, param) is row
        other: Any = linear.bias
        of_another_shape = mislabelled(other)
        assert as_laid(of_another_shape, param) is of_another_shape

    with_linear(check)


def test_states_by_columns() -> None:
    def check(linear: nn.Linear) -> None:
        params: dict[str, Any] = dict(linear.named_parameters())
        odd = mislabelled(params["weight"])
        state = OptimState({"exp_inf": {"weight": odd, "stray": odd}})
        made = columns_as_laid(state, params).slots["exp_inf"]
        assert kinds(made["weight"]) == kinds(params["weight"])
        assert made["stray"] is odd

    with_linear(check)


@pytest.mark.parametrize("hooked", [False, True])
def test_reading_an_optimizer(hooked: bool) -> None:
    def check(linear: nn.Linear) -> None:
        adamax = torch.optim.Adamax(linear.parameters())
        odd = mislabelled(linear.weight)
        adamax.state[linear.weight] = {"exp_inf": odd, "step": torch.tensor(1.0)}
        if hooked:
            adamax.register_state_dict_post_hook(lambda *_: None)
        read: Any = read_optimizers(read_modules(linear), adamax).slots["exp_inf"]["weight"]
        assert kinds(read) == kinds(linear.weight)
        assert read.to_local().data_ptr() == odd.to_local().data_ptr()
        assert adamax.state[linear.weight]["exp_inf"] is odd

    with_linear(check)
