"""FSDP1 over tensor parallelism, as torch's own 2-D parallelism of FSDP1: read, shown, loaded and trained."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fdsd
from fdsd.compat.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from fdsd.errors import FdsdError
from tests.helpers.ranks import run_ranks

BOTH = pytest.mark.parametrize("use_orig_params", [True, False])
FULL = StateDictOptions(full_state_dict=True)


class Net(nn.Module):
    """Cut by columns, by rows, and not at all; with sizes that FSDP has to pad."""

    def __init__(self, middle: int) -> None:
        super().__init__()
        self.columns = nn.Linear(5, middle)
        self.rows = nn.Linear(middle, 3)
        self.plain = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.plain(self.rows(self.columns(x).relu()))
        return result


def whole(seed: int = 0, middle: int = 6) -> Net:
    torch.manual_seed(seed)
    return Net(middle)


def made(
    use_orig_params: bool, seed: int = 0, *, units: bool = False, middle: int = 6, hybrid: bool = False
) -> tuple[Any, Any]:
    sizes, names = ((1, 2, 2), ("replicate", "dp", "tp")) if hybrid else ((2, 2), ("dp", "tp"))
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    net: Any = whole(seed, middle)
    columns = ColwiseParallel(use_local_output=False)  # which alone tells how big parts of two sizes are
    parallelize_module(net, mesh["tp"], {"columns": columns, "rows": RowwiseParallel()})
    for parameter in net.parameters():  # torch 2.6 leaves gaps between rows, which FSDP would take for elements
        if isinstance(parameter, DTensor):
            parameter._local_tensor = parameter._local_tensor.contiguous()
    how: dict[str, Any] = {
        "device_mesh": mesh["replicate", "dp"] if hybrid else mesh["dp"],
        "use_orig_params": use_orig_params,
        "device_id": torch.device("cpu"),
        "sharding_strategy": ShardingStrategy.HYBRID_SHARD if hybrid else ShardingStrategy.FULL_SHARD,
    }
    if units:
        net.columns = FullyShardedDataParallel(net.columns, **how)
        net.plain = FullyShardedDataParallel(net.plain, **how)
    model = FullyShardedDataParallel(net, **how)
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def step(model: Any, optimizer: Any, rank: int, seed: int) -> float:
    torch.manual_seed(100 * seed + rank // 2)
    loss = model(torch.randn(3, 5)).pow(2).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


def on_ranks(fn: Callable[..., Any], *args: Any) -> list[Any]:
    def work(rank: int) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, of FSDP1 and its DTensors
            return fn(rank, *args)

    return run_ranks(work, 4, timeout=100)


def same(value: Any, expected: torch.Tensor) -> bool:
    return torch.equal(value, expected)


def shown(state: Any) -> dict[str, Any]:
    return {
        name: (str(value.placements), value.device_mesh.mesh_dim_names, value.stride(), value.to_local().tolist())
        for name, value in state.items()
    }


@BOTH
@pytest.mark.parametrize("units", [False, True])
def test_a_model_is_read_as_torch_reads_it(use_orig_params: bool, units: bool) -> None:
    def read(rank: int) -> None:
        from torch.distributed.checkpoint import state_dict as peer

        model, _ = made(use_orig_params, units=units)
        assert shown(get_model_state_dict(model)) == shown(peer.get_model_state_dict(model))
        full, expected = get_model_state_dict(model, options=FULL), whole().state_dict()
        assert list(full) == list(expected)
        for name, value in full.items():
            assert not isinstance(value, DTensor) and same(value, expected[name]), name
        gathered: Any = fdsd.materialize(fdsd.capture(model).model, group=torch.distributed.group.WORLD)
        for name, value in expected.items():
            assert torch.equal(gathered[name], value), name
        spec = fdsd.describe(model)
        assert {name: entry.spec.shape for name, entry in spec.entries.items()} == {
            name: tuple(value.shape) for name, value in expected.items()
        }

    on_ranks(read)


@pytest.mark.parametrize(
    "use_orig_params, how",
    [(True, "sharded"), (False, "full"), (True, "rank0"), (False, "rank0"), (False, "restore"), (True, "snapshot")],
)
def test_a_model_is_loaded(use_orig_params: bool, how: str) -> None:
    def load(rank: int) -> None:
        source, _ = made(use_orig_params, units=True)
        target, optimizer = made(use_orig_params, seed=1)
        step(target, optimizer, rank, 0)
        if how == "sharded":
            set_model_state_dict(target, get_model_state_dict(source))
        elif how == "full":
            set_model_state_dict(target, whole().state_dict(), options=FULL)
        elif how == "rank0":
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            set_model_state_dict(target, whole().state_dict() if rank == 0 else {}, options=options)
        else:
            taken = fdsd.capture(source)
            taken = taken if how == "restore" else fdsd.snapshot(taken)
            fdsd.restore(taken, target, group=torch.distributed.group.WORLD)
        for name, value in get_model_state_dict(target, options=FULL).items():
            assert same(value, whole().state_dict()[name]), name
        x = torch.arange(10.0).reshape(2, 5)
        assert torch.allclose(target(x), whole()(x), atol=1e-5)

    on_ranks(load)


@BOTH
@pytest.mark.parametrize("how", ["sharded", "flat", "full", "full flat", "rank0", "restore", "snapshot", "hybrid"])
def test_training_goes_on_bit_by_bit(use_orig_params: bool, how: str) -> None:
    def train(rank: int) -> None:
        first, optimizer = made(use_orig_params, units=how == "full", hybrid=how == "hybrid")
        for i in range(2):
            step(first, optimizer, rank, i)
        second, fresh = made(use_orig_params, seed=1, units=how == "full", hybrid=how == "hybrid")
        if how == "rank0":
            step(second, fresh, rank, 7)
        options = StateDictOptions(
            full_state_dict=how in ("full", "full flat", "rank0"),
            flatten_optimizer_state_dict=how.endswith("flat"),
            broadcast_from_rank0=how == "rank0",
        )
        if how in ("restore", "snapshot"):
            taken = fdsd.capture(first, optimizer)
            taken = taken if how == "restore" else fdsd.snapshot(taken)
            fdsd.restore(taken, second, fresh, group=torch.distributed.group.WORLD)
        else:
            set_model_state_dict(second, get_model_state_dict(first, options=options), options=options)
            state = get_optimizer_state_dict(first, optimizer, options=options)
            set_optimizer_state_dict(second, fresh, state, options=options)
        for i in range(2, 5):
            assert step(first, optimizer, rank, i) == step(second, fresh, rank, i)

    on_ranks(train)


@BOTH
def test_torch_loads_what_is_shown_and_files_are_loaded(use_orig_params: bool, tmp_path: Path) -> None:
    def load(rank: int) -> None:
        from torch.distributed.checkpoint import state_dict as peer

        source, _ = made(use_orig_params)
        world = torch.distributed.group.WORLD
        first, second, third = [made(use_orig_params, seed=1)[0] for _ in range(3)]
        peer.set_model_state_dict(first, get_model_state_dict(source))
        theirs: Any = peer.get_model_state_dict(source)
        set_model_state_dict(second, theirs)
        fdsd.save(fdsd.capture(source).model, tmp_path / "m.safetensors", group=world)
        fdsd.restore(fdsd.open(tmp_path / "m.safetensors"), third, group=world)
        for model in (first, second, third):
            for name, value in get_model_state_dict(model, options=FULL).items():
                assert same(value, whole().state_dict()[name]), name

    on_ranks(load)


def test_what_cannot_be_told_is_refused() -> None:
    def refused(rank: int, sizes: tuple[int, int], mesh_of_its_own: bool) -> str:
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
        other = init_device_mesh("cpu", sizes, mesh_dim_names=("a", "b"))["b"] if mesh_of_its_own else mesh["tp"]
        net = parallelize_module(whole(), other, {"columns": ColwiseParallel()})
        model = FullyShardedDataParallel(net, device_mesh=mesh["dp"], device_id=torch.device("cpu"))
        with pytest.raises(FdsdError) as error:
            fdsd.describe(model)
        return str(error.value)

    (alien,) = {*on_ranks(refused, (2, 2), True)}
    assert "'columns.bias', 'columns.weight'" in alien and "slices by name of one DeviceMesh" in alien
    (alone,) = {*on_ranks(refused, (1, 4), False)}
    assert "'columns.bias', 'columns.weight'" in alone and "Leave FSDP out" in alone


@BOTH
def test_the_state_of_optimizers_is_shown_as_torch_shows_it(use_orig_params: bool) -> None:
    def read(rank: int) -> None:
        from torch.distributed.checkpoint import state_dict as peer

        model, optimizer = made(use_orig_params)
        step(model, optimizer, rank, 0)
        twin = made(True)  # of flat parameters torch cannot tell, since rank 0 is not in all groups
        step(*twin, rank, 0)
        ours: Any = get_optimizer_state_dict(model, optimizer)
        theirs: Any = peer.get_optimizer_state_dict(*twin)
        assert ours["param_groups"] == theirs["param_groups"]
        assert ours["state"].keys() == theirs["state"].keys()
        for fqn, row in theirs["state"].items():
            mine = ours["state"][fqn]
            assert mine.keys() == row.keys()
            assert torch.equal(mine.pop("step"), row.pop("step"))
            assert shown(mine) == shown(row), fqn
        full: Any = get_optimizer_state_dict(model, optimizer, options=FULL)["state"]
        for fqn, value in whole().named_parameters():
            assert full[fqn]["exp_avg"].shape == value.shape, fqn

    on_ranks(read)


@pytest.mark.parametrize(
    "use_orig_params, how",
    [(False, "sharded"), (True, "full"), (False, "full"), (True, "rank0"), (True, "restore")],
)
def test_parts_of_tensor_parallelism_may_differ_in_size(use_orig_params: bool, how: str) -> None:
    """torch takes all parts for as big as the own one, and shows and loads something else."""

    def train(rank: int) -> None:
        first, optimizer = made(use_orig_params, middle=7)
        full, expected = get_model_state_dict(first, options=FULL), whole(middle=7).state_dict()
        for name, value in full.items():
            assert same(value, expected[name]), name
        step(first, optimizer, rank, 0)
        second, fresh = made(use_orig_params, seed=1, middle=7)
        if how == "restore":
            fdsd.restore(fdsd.capture(first, optimizer), second, fresh, group=torch.distributed.group.WORLD)
        else:
            options = StateDictOptions(full_state_dict=how != "sharded", broadcast_from_rank0=how == "rank0")
            set_model_state_dict(second, get_model_state_dict(first, options=options), options=options)
            state = get_optimizer_state_dict(first, optimizer, options=options)
            set_optimizer_state_dict(second, fresh, state, options=options)
        for i in range(1, 3):
            assert step(first, optimizer, rank, i) == step(second, fresh, rank, i)

    on_ranks(train)
