"""Who has to call a getter or setter of the drop-in: the ranks between which something travels, and no others.

Models whose tensors lie over different ranks, and calls on some of the ranks only.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fdsd.compat._errors import LoadError
from fdsd.compat.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_model_state_dict
from tests.helpers.ranks import run_ranks

WHOLE = StateDictOptions(full_state_dict=True)
CHAIN = ((0, 1), (1, 2), (2, 3))


class Refusing(nn.Module):
    def get_extra_state(self) -> int:
        raise ArithmeticError("no count today.")

    def set_extra_state(self, state: int) -> None:
        raise AssertionError


def sharded(whole: torch.Tensor, ranks: list[int], placement: Any = None) -> nn.Parameter:
    mesh = DeviceMesh("cpu", ranks)
    made: Any = distribute_tensor(whole, mesh, [placement or Shard(0)])
    return nn.Parameter(made)


def over(ranks: tuple[int, ...], groups: dict[tuple[int, ...], Any], value: float = 0.0) -> Any:
    mesh = DeviceMesh.from_group(groups[ranks], "cpu")
    return DTensor.from_local(torch.full((2,), value), mesh, [Shard(0)], run_check=False)


def groups_of(*all_ranks: tuple[int, ...]) -> dict[tuple[int, ...], Any]:
    return {ranks: dist.new_group(list(ranks)) for ranks in all_ranks}


def chain(rank: int, value: float) -> dict[str, Any]:
    groups = groups_of(*CHAIN)
    return {f"p{i}": over(ranks, groups, value) for i, ranks in enumerate(CHAIN) if rank in ranks}


def flats_beside_dtensors(rank: int) -> list[str]:
    """Ranks 0 and 1 have a flat parameter, which they exchange; the DTensor of all three stays where it is."""
    group = dist.new_group([0, 1])
    model: Any = nn.Module()
    model.embed = sharded(torch.arange(6.0), [0, 1, 2])
    if rank < 2:
        model.block = FullyShardedDataParallel(nn.Linear(4, 4), group, device_id=torch.device("cpu"))
    return list(get_model_state_dict(model))


def whole_flats(rank: int) -> list[str]:
    how: dict[str, Any] = {"device_id": torch.device("cpu"), "sharding_strategy": ShardingStrategy.NO_SHARD}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch would rather have DDP
        model = FullyShardedDataParallel(nn.Linear(4, 4), **how)
    return list(get_model_state_dict(model, options=WHOLE)) if rank == 0 else ["weight", "bias"]


def replicas(rank: int) -> list[str]:
    model: Any = nn.Module()
    model.w = sharded(torch.ones(2), [0, 1, 2], Replicate())
    return list(get_model_state_dict(model, options=WHOLE)) if rank == 0 else ["w"]


def a_part_of_some_ranks(rank: int) -> list[str]:
    groups = groups_of((0, 1))
    model: Any = nn.Module()
    model.w = sharded(torch.ones(3), [0, 1, 2])
    model.sub = nn.Module()
    if rank == 2:
        return ["sub.x"]
    model.sub.x = nn.Parameter(over((0, 1), groups))
    with pytest.warns(FutureWarning):
        return list(get_model_state_dict(model, submodules={model.sub}, options=WHOLE))


def optimizers_of_some_ranks(rank: int) -> list[str]:
    groups = groups_of((0, 1))
    model: Any = nn.Module()
    model.w = sharded(torch.ones(3), [0, 1, 2])
    optimizers: list[Any] = []
    if rank < 2:
        model.x = nn.Parameter(over((0, 1), groups))
        optimizers = [torch.optim.SGD([model.x], lr=0.1, momentum=0.9)]
    weights, state = get_state_dict(model, optimizers, options=WHOLE)
    return [*weights, *state.get("state", {})]


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (flats_beside_dtensors, [["embed", "block.weight", "block.bias"]] * 2 + [["embed"]]),
        (whole_flats, [["weight", "bias"]] * 3),
        (replicas, [["w"]] * 3),
        (a_part_of_some_ranks, [["sub.x"]] * 3),
        (optimizers_of_some_ranks, [["w", "x", "x"]] * 2 + [["w"]]),
    ],
)
def test_others_do_not_have_to_come(call: Any, expected: list[list[str]]) -> None:
    assert run_ranks(call, 3, timeout=60) == expected


def test_a_tensor_that_lies_elsewhere() -> None:
    def fn(rank: int) -> list[Any]:
        model: Any = nn.Module()
        model.w, model.b = sharded(torch.zeros(4), [0, 1]), nn.Parameter(torch.zeros(1))
        state = {"w": sharded(torch.arange(4.0), [0, 1]), "b": torch.ones(1)}
        set_model_state_dict(model, state)
        whole = get_model_state_dict(model, options=WHOLE)
        return [model.w.to_local().tolist(), model.b.tolist(), whole["w"].tolist()]

    whole = [0.0, 1.0, 2.0, 3.0]
    assert run_ranks(fn, 3, timeout=60) == [[whole[:2], [1.0], whole], [whole[2:], [1.0], whole], [[], [1.0], []]]


@pytest.mark.parametrize("where", [0, 3])
def test_what_is_wrong_at_the_end_of_a_chain_of_meshes_is_heard_at_the_other(where: int) -> None:
    def fn(rank: int) -> list[Any]:
        model: Any = nn.Module()
        for name, tensor in chain(rank, 0.0).items():
            model.register_parameter(name, nn.Parameter(tensor))
        state = chain(rank, 3.0)
        if rank == where:
            state["odd"] = torch.ones(1)
        with pytest.raises(LoadError, match="odd"):
            set_model_state_dict(model, state)
        if rank == where:
            model.refusing = Refusing()
        with pytest.raises(LoadError, match=rf"Rank {where}: ArithmeticError: no count today"):
            get_model_state_dict(model, options=WHOLE)
        return [p.to_local().tolist() for p in model.parameters()]

    found = run_ranks(fn, 4, timeout=60)
    assert found == [[[0.0, 0.0]], [[0.0, 0.0]] * 2, [[0.0, 0.0]] * 2, [[0.0, 0.0]]]


def test_a_model_that_cannot_be_read_where_its_state_lies_over_more_ranks() -> None:
    def fn(rank: int) -> list[float]:
        groups = groups_of((0, 1), (2, 3))
        model: Any = nn.Module()
        model.w = nn.Parameter(over((0, 1) if rank < 2 else (2, 3), groups))
        if rank == 1:
            model.refusing = Refusing()
        state = {"w": sharded(torch.arange(4.0), [0, 1, 2, 3])}
        with pytest.raises(LoadError, match=r"Rank 1: ArithmeticError"):
            set_model_state_dict(model, state, options=StateDictOptions(strict=False))
        return list(model.w.to_local().tolist())

    assert run_ranks(fn, 4, timeout=60) == [[0.0, 0.0]] * 4
