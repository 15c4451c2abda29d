"""Optimizers under FSDP2 over tensor parallelism: each value of their state is read, gathered and set where it lies.

The oracle is the same model trained in one process with the same gradients. Some versions of torch label state of such
parameters otherwise than it lies.
"""

from __future__ import annotations

import warnings
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fdsd
from fdsd.comms.dtensors import layout_of_dtensor, make_like
from fdsd.compat import state_dict as compat
from fdsd.compat.state_dict import StateDictOptions
from tests.helpers.ranks import run_ranks

Way = Literal["engine", "full", "sharded"]
WAYS: tuple[Way, ...] = ("engine", "full", "sharded")


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))


def sharded() -> nn.Module:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = plain()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    return model


def local_of(param: Any) -> torch.Tensor:
    local: torch.Tensor = param.detach().to_local()
    return local


def cut(whole: torch.Tensor, param: Any) -> Any:
    """Cut a whole tensor as a parameter lies."""
    [block] = layout_of_dtensor(param).blocks(tuple(param.shape), dist.get_rank())
    sizes = local_of(param).shape
    at = tuple([slice(start, start + size) for start, size in zip(block.starts, sizes, strict=True)])
    return make_like(param, whole[at].clone())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        for param in model.parameters():
            grad = torch.randn(param.shape)
            param.grad = cut(grad, param) if hasattr(param, "placements") else grad
        optimizer.step()
        optimizer.zero_grad()


def told(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """What this rank holds, as plain tensors."""
    rows: list[Any] = []
    for param in model.parameters():
        held = {"param": param.detach(), **optimizer.state[param]}
        rows.append({key: getattr(value, "to_local", value.clone)().clone() for key, value in held.items()})
    return rows


def assert_told(ours: list[Any], theirs: list[Any]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        assert all(torch.equal(mine[key], other[key]) for key in mine)


def state_of(way: Way, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, dict[str, dict[str, Any]]]:
    """Give what is set again, and all of it as whole tensors by name and slot."""
    group: Any = dist.group.WORLD
    if way == "engine":
        state = fdsd.capture(model, optimizer)
        optim = fdsd.materialize(state, group=group).optim
        assert optim is not None
        names = list(optim.slots["step"])
        return fdsd.snapshot(state), {n: {str(s): column[n] for s, column in optim.slots.items()} for n in names}
    options = StateDictOptions(full_state_dict=way == "full")
    got = compat.get_optimizer_state_dict(model, optimizer, options=options)
    rows: Any = got["state"]
    return got, {name: dict(fdsd.materialize(row, group=group)) for name, row in rows.items()}


def put(way: Way, state: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if way == "engine":
        fdsd.restore(state.optim, model, optimizer)
    else:
        options = StateDictOptions(full_state_dict=way == "full")
        compat.set_optimizer_state_dict(model, optimizer, state, options=options)


@pytest.mark.parametrize("kind", ["Adamax", "Adam", "Adadelta"])
def test_state_is_read_set_and_trained_on(kind: str) -> None:
    def made(model: nn.Module) -> torch.optim.Optimizer:
        found: torch.optim.Optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01, foreach=False)
        return found

    def run(rank: int) -> None:
        warnings.simplefilter("ignore")  # versions warn of DTensors on the CPU
        oracle = plain()
        its = made(oracle)
        train(oracle, its, range(2))
        model = sharded()
        optimizer = made(model)
        train(model, optimizer, range(2))
        before = told(model, optimizer)

        states: dict[Way, Any] = {}
        for way in WAYS:
            states[way], whole = state_of(way, model, optimizer)
            for (name, _), param in zip(model.named_parameters(), oracle.parameters(), strict=True):
                assert whole[name].keys() == its.state[param].keys()
                assert all(torch.equal(whole[name][slot], value) for slot, value in its.state[param].items())
        assert_told(told(model, optimizer), before)
        train(oracle, its, range(2, 4))

        for way in WAYS:
            for steps in (range(0), range(7, 9)):  # into a fresh one, and into one that has been trained otherwise
                other = sharded()
                new = made(other)
                train(other, new, steps)
                with torch.no_grad():
                    for mine, row in zip(other.parameters(), before, strict=True):
                        local_of(mine).copy_(row["param"])
                put(way, states[way], other, new)
                assert_told(told(other, new), before)
                train(other, new, range(2, 4))
                for mine, param in zip(other.parameters(), oracle.parameters(), strict=True):
                    assert torch.equal(local_of(mine), cut(param.detach(), mine).to_local())

    run_ranks(run, 4)
