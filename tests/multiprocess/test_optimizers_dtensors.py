"""Optimizers of FSDP2's DTensors, read, templated and written.

The oracle is the same model trained in one process: all ranks get the same gradients.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fdsd import OptimState, ParamGroup
from fdsd.comms.modules import read_modules
from fdsd.comms.optimizer_targets import slot_targets
from fdsd.comms.optimizer_templates import template_of
from fdsd.comms.optimizer_writing import check_write, write_optimizers
from fdsd.comms.optimizers import read_optimizers
from fdsd.data.errors import SpecMismatch
from fdsd.data.spec import spec_of
from tests.helpers.optimizers import told, told_all, told_optimizer
from tests.helpers.optimizers_ranks import Small, delivered, grads, reference, two_groups
from tests.helpers.ranks import run_ranks

ELEMENTWISE = ("Adam", "SGD(momentum)", "NAdam", "Adagrad", "RMSprop(centered)", "Nested", "SGD")


def sharded(world: int, *, mesh_dims: tuple[int, ...] | None = None) -> Any:
    """The small model under ``fully_shard``, uneven shards and empty ones included."""
    from torch.distributed.fsdp import fully_shard

    model = Small()
    shape = mesh_dims or (world,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "shard")[-len(shape) :])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fully_shard(model, mesh=mesh)
    return model


def distributed(tensor: torch.Tensor, mesh: Any, placements: Any) -> Any:
    from torch.distributed.tensor import distribute_tensor

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # older versions warn of random numbers on the CPU
        return distribute_tensor(tensor, mesh, placements)


def step_dtensors(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        for name, p in model.named_parameters():
            p.grad = distributed(grads(step)[name], p.device_mesh, p.placements)
        optimizer.step()
    for p in model.parameters():
        p.grad = None


def is_whole(value: Any, expected: Any) -> bool:
    """Whether a live value is the same as that of one process."""
    if hasattr(value, "full_tensor"):
        value = value.full_tensor()
    return bool(told(value) == told(expected))


@pytest.mark.parametrize("case", ELEMENTWISE)
@pytest.mark.parametrize("world, dims", [(2, None), (4, (2, 2))])
def test_dtensor_states_are_read_written_and_templated(case: str, world: int, dims: Any) -> None:
    state, params = reference(case, 2)
    later_state, later_params = reference(case, 3)
    first_state, first_params = reference(case, 1)

    def run(rank: int) -> None:
        model = sharded(world, mesh_dims=dims)
        optimizer = two_groups(case, dict(model.named_parameters()))
        step_dtensors(model, optimizer, range(2))
        modules = read_modules(model)
        before = told_all(model, [optimizer])
        read = read_optimizers(modules, optimizer)
        assert told_all(model, [optimizer]) == before
        assert [g.fqns for g in read.groups] == [g.fqns for g in state.groups]
        assert {slot: list(column) for slot, column in read.slots.items()} == {
            slot: list(column) for slot, column in state.slots.items()
        }
        for slot, column in read.slots.items():
            for fqn, value in column.items():
                assert spec_of(value) == spec_of(state.slots[slot][fqn])
                assert is_whole(value, state.slots[slot][fqn])

        write_optimizers(read, modules, optimizer, require="listed")
        assert told_all(model, [optimizer]) == before

        template = template_of(modules, optimizer)
        assert told_all(model, [optimizer]) == before
        assert ("last" in template.slots) is (case == "Nested")  # a list that grows from step to step
        for slot, column in template.slots.items():
            for fqn, value in column.items() if slot != "last" else ():
                live = read.slots[slot][fqn]
                if isinstance(live, torch.Tensor):
                    assert spec_of(value) == spec_of(live)
                    assert getattr(value, "placements", None) == getattr(live, "placements", None)

        fresh_model = sharded(world, mesh_dims=dims)
        with torch.no_grad():
            for name, p in fresh_model.named_parameters():
                p.to_local().copy_(dict(model.named_parameters())[name].to_local())
        fresh = two_groups(case, dict(fresh_model.named_parameters()))
        fresh_modules = read_modules(fresh_model)
        done = delivered(state, fresh_modules, fresh, rank)
        write_optimizers(done, fresh_modules, fresh, require="listed", adopt=True, dtype="source")
        assert told_optimizer(fresh) == told_optimizer(optimizer)
        step_dtensors(fresh_model, fresh, range(2, 3))
        for name, p in fresh_model.named_parameters():
            assert is_whole(p.detach(), later_params[name])

        untouched = sharded(world, mesh_dims=dims)
        started = two_groups(case, dict(untouched.named_parameters()))
        write_optimizers(
            template_of(read_modules(untouched), started), read_modules(untouched), started, dtype="source"
        )
        step_dtensors(untouched, started, range(1))
        for name, p in untouched.named_parameters():
            assert is_whole(p.detach(), first_params[name])

    run_ranks(run, world)
    assert params.keys() == later_params.keys() and first_state.fqns == later_state.fqns


def test_targets_are_the_local_tensors_of_dtensors() -> None:
    state, _ = reference("Adam", 2)

    def run(rank: int) -> None:
        model = sharded(2)
        adam = two_groups("Adam", dict(model.named_parameters()))
        step_dtensors(model, adam, range(1))
        modules = read_modules(model)
        live = {fqn: adam.state[p] for fqn, p in model.named_parameters()}
        targets = slot_targets(modules, adam, state)
        for (slot, fqn), target in targets.items():
            value = live[fqn][slot]
            assert target.memory is (value.to_local() if slot != "step" else value) or (
                target.memory.data_ptr() == value.to_local().data_ptr()
            )
            assert target.finished(target.memory) is value
            assert (target.placement is None) == (slot == "step")
        objects = {(slot, fqn): id(live[fqn][slot]) for slot, fqn in targets}
        write_optimizers(delivered(state, modules, adam, rank), modules, adam, adopt=True, dtype="source")
        assert {
            (slot, fqn): id(adam.state[p][slot]) for fqn, p in model.named_parameters() for slot in adam.state[p]
        } == (objects)
        for fqn, p in model.named_parameters():
            assert is_whole(adam.state[p]["exp_avg"], state.slots["exp_avg"][fqn])

    run_ranks(run, 2)


def test_whole_tensors_and_other_placements_are_refused_for_dtensors() -> None:
    state, _ = reference("Adam", 2)

    def run(rank: int) -> None:
        from torch.distributed.tensor import Replicate

        for steps in (0, 1):
            model = sharded(2)
            adam = two_groups("Adam", dict(model.named_parameters()))
            step_dtensors(model, adam, range(steps))
            modules = read_modules(model)
            assert check_write(state, modules, adam) == []  # whole values may be delivered
            before = told_optimizer(adam)
            with pytest.raises(SpecMismatch, match="'exp_avg' is a whole tensor, and the parameter is a DTensor"):
                write_optimizers(state, modules, adam)
            other = distributed(torch.ones(5, 3), model.a.weight.device_mesh, [Replicate()])
            good = delivered(state, modules, adam, rank) if not steps else read_optimizers(modules, adam)
            column = {**good.slots["exp_avg"], "a.weight": other}
            with pytest.raises(SpecMismatch, match=r"'exp_avg' lies as \(Replicate\(\),\), not \(Shard\(dim=0\),\)"):
                write_optimizers(good.replace(slots={**good.slots, "exp_avg": column}), modules, adam)
            assert told_optimizer(adam) == before
        plain = torch.optim.Adam([nn.Parameter(torch.ones(5, 3))])
        holder = nn.ParameterList(plain.param_groups[0]["params"])
        wrong = OptimState({"exp_avg": {"0": other}}, [ParamGroup(("0",))])
        with pytest.raises(SpecMismatch, match="'exp_avg' is a DTensor, and the parameter is not"):
            write_optimizers(wrong, read_modules(holder), plain)

    run_ranks(run, 2)


class Rows(torch.optim.Optimizer):
    """Keeps a value for each row of a matrix."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if p.ndim == 2 and p.shape[0] > 1:
                state = self.state[p]
                if not state:
                    state["rows"] = p.grad.sum(1) * 0
                state["rows"].add_(p.grad.sum(1))


def test_slots_of_other_shapes_lie_as_a_first_step_would_lay_them() -> None:
    model = Small()
    rows = Rows(model.parameters())
    for name, p in model.named_parameters():
        p.grad = grads(0)[name]
    rows.step()
    state = read_optimizers(read_modules(model), rows)

    def run(rank: int) -> None:
        model = sharded(2)
        optimizer, fresh = Rows(model.parameters()), Rows(model.parameters())
        step_dtensors(model, optimizer, range(1))
        modules = read_modules(model)
        for live in (optimizer, fresh):
            targets = slot_targets(modules, live, state)
            assert targets["rows", "a.weight"].placement is not None
            done = delivered(state, modules, live, rank)
            write_optimizers(done, modules, live, require="listed", adopt=True, dtype="source")
        assert told_optimizer(fresh) == told_optimizer(optimizer)
        assert is_whole(fresh.state[model.a.weight]["rows"], state.slots["rows"]["a.weight"])
        assert fresh.state[model.a.weight]["rows"].placements == optimizer.state[model.a.weight]["rows"].placements

    run_ranks(run, 2)
