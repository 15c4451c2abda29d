"""State of optimizers over ranks that is no tensor of one parameter, or has names that are no plain ones."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fdsd.compat.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from tests.helpers.one_layer import BROADCAST, FULL, built, refused, stepped
from tests.helpers.parallelism import FORWARD
from tests.helpers.ranks import run_ranks

FLAT: dict[str, Any] = {"flatten_optimizer_state_dict": True}
OFFLOADED: dict[str, Any] = {**BROADCAST, "cpu_offload": True}


# -- LBFGS: one state for all parameters ---------------------------------------------------------------------------


steps_lbfgs = pytest.mark.skipif(not FORWARD, reason="the DTensors of torch 2.6 have no dot product, so LBFGS fails")


def for_lbfgs(kind: str) -> Any:
    """Make a model whose shards are even: torch flattens no others, which LBFGS asks of it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 12), nn.Linear(12, 12))
    if kind == "plain":
        return model
    how: dict[str, Any] = {}
    if kind == "hsdp":
        how["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model[0], **how)
    return fully_shard(model, **how)


def lbfgs(model: Any) -> Any:
    return torch.optim.LBFGS(model.parameters(), lr=0.3, max_iter=2, history_size=3)


def descend(model: Any, optimizer: Any, steps: int) -> list[torch.Tensor]:
    """Step by gradients of a bowl with another steepness for each parameter, so that what was seen before counts."""
    params = list(model.parameters())

    def closure() -> torch.Tensor:
        for i, param in enumerate(params):
            param.grad = param.detach() * (i + 1) + 0.1
        return torch.tensor(float(len(params)))

    for _ in range(steps):
        optimizer.step(closure)
    return [getattr(param, "_local_tensor", param).detach().clone() for param in params]


def parameters_like(model: Any, other: Any) -> None:
    with torch.no_grad():
        for param, source in zip(model.parameters(), other.parameters(), strict=True):
            param.copy_(source)


def lbfgs_is_restored(rank: int, kind: str, way: dict[str, Any], used: int) -> None:
    options = StateDictOptions(**way)
    model, another = for_lbfgs(kind), for_lbfgs(kind)
    optimizer, other = lbfgs(model), lbfgs(another)
    descend(model, optimizer, 2)
    descend(another, other, used)
    state: Any = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    if options.full_state_dict:
        assert not any(isinstance(value, DTensor) for value in tensors_in(state))
        assert len(list(tensors_in(state))) > 5 or (options.cpu_offload and rank)
    parameters_like(another, model)
    given = {} if rank and options.broadcast_from_rank0 else state
    set_optimizer_state_dict(another, other, given, options=options)
    [ours], [theirs] = optimizer.state.values(), other.state.values()
    assert type(theirs["d"]) is type(ours["d"]) and theirs["n_iter"] == ours["n_iter"]
    assert getattr(theirs["d"], "placements", ()) == getattr(ours["d"], "placements", ())
    for a, b in zip(descend(model, optimizer, 2), descend(another, other, 2), strict=True):
        assert torch.equal(a, b)


def tensors_in(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict | list | tuple):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors_in(item)


@steps_lbfgs
@pytest.mark.parametrize("used", [0, 1, 3], ids=["fresh", "with less history", "with more history"])
@pytest.mark.parametrize("flat", [{}, FLAT], ids=["nested", "flat"])
@pytest.mark.parametrize("way", [{}, FULL, BROADCAST, OFFLOADED], ids=["shards", "full", "broadcast", "offloaded"])
def test_lbfgs_goes_on_as_it_was(way: dict[str, Any], flat: dict[str, Any], used: int) -> None:
    """Seen: whole state stayed plain tensors, which the next step did not take beside DTensors."""
    run_ranks(lbfgs_is_restored, 2, "fsdp2", {**way, **flat}, used, group_timeout=20)


@steps_lbfgs
@pytest.mark.parametrize(("kind", "n"), [("fsdp2", 3), ("hsdp", 4), ("plain", 2)])
def test_lbfgs_over_other_ranks_goes_on_as_it_was(kind: str, n: int) -> None:
    run_ranks(lbfgs_is_restored, n, kind, BROADCAST, 0, group_timeout=20)


def whole_without_the_option(rank: int) -> str:
    model = for_lbfgs("fsdp2")
    optimizer = lbfgs(model)
    descend(model, optimizer, 1)
    state = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(**FULL))
    return refused(lambda: set_optimizer_state_dict(model, lbfgs(model), state))


@steps_lbfgs
def test_whole_state_of_lbfgs_is_refused_where_shards_are_meant() -> None:
    """Seen: taken, and the next step failed."""
    first, second = run_ranks(whole_without_the_option, 2, group_timeout=20)
    assert first == second and "'0.weight'" in first and "StateDictOptions(full_state_dict=True)" in first


# -- options with dots in their names ------------------------------------------------------------------------------


def options_with_dots(rank: int, kind: str, way: dict[str, Any]) -> None:
    options = StateDictOptions(**way, **FLAT)
    model, another = built(kind), built(kind)
    optimizer, other = stepped(model), stepped(another, lr=0.5)
    optimizer.param_groups[0].update({"my.lr": 0.25, "a.b.c": [1, 2], "seen": 3})
    other.param_groups[0]["my.lr"] = 0.5
    state: Any = get_optimizer_state_dict(model, optimizer, options=options)
    if not (rank and options.broadcast_from_rank0 and kind == "fsdp1"):
        assert state["param_groups.weight.my.lr"] == 0.25 and state["param_groups.bias.a.b.c"] == [1, 2]
    set_optimizer_state_dict(another, other, {} if rank and options.broadcast_from_rank0 else state, options=options)
    assert str(other.state_dict()) == str(optimizer.state_dict())


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1", "plain"])
@pytest.mark.parametrize("way", [{}, FULL, BROADCAST], ids=["shards", "full", "broadcast"])
def test_options_with_dots_go_through_the_flat_form(way: dict[str, Any], kind: str) -> None:
    """Seen: refused, though torch's own flat form has them."""
    run_ranks(options_with_dots, 2, kind, way, group_timeout=20)
