"""Optimizers over ranks: meshes of one rank, models that differ by rank, and a fresh SGD that is only read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard

from fdsd.compat.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from fdsd.errors import FdsdError
from tests.helpers.parallelism import FORWARD
from tests.helpers.ranks import run_ranks

BROADCAST: dict[str, Any] = {"full_state_dict": True, "broadcast_from_rank0": True}


def built(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    if kind == "fsdp2":
        fully_shard(model)
    if kind in ("fsdp1", "fsdp1 flat"):
        return FullyShardedDataParallel(model, use_orig_params=kind == "fsdp1", device_id=torch.device("cpu"))
    return model


def trained(model: nn.Module, optimizer: Any) -> list[list[float]]:
    for _ in range(2):
        optimizer.zero_grad()
        if FORWARD or not isinstance(model, FSDPModule):
            model(torch.ones(1, 3)).sum().backward()
        else:  # all that these tests need are gradients
            for param in model.parameters():
                param.grad = torch.ones_like(param)
        optimizer.step()
    return [getattr(p, "_local_tensor", p).detach().flatten().tolist() for p in model.parameters()]


def own_state_on_one_rank(rank: int) -> None:
    for broadcast in (False, True):
        model = built("fsdp2")
        adam = torch.optim.AdamW(model.parameters())
        trained(model, adam)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        state: Any = get_optimizer_state_dict(model, adam, options=options)
        set_optimizer_state_dict(model, fresh := torch.optim.AdamW(model.parameters()), state, options=options)
        for param in model.parameters():
            a: Any = adam.state[param]["exp_avg"]
            b: Any = fresh.state[param]["exp_avg"]
            assert type(a) is type(b) and torch.equal(a.to_local(), b.to_local())


def test_a_mesh_of_one_rank_takes_whole_tensors() -> None:
    """Seen: "is a whole tensor, and the parameter is a DTensor", for what the getter had given."""
    run_ranks(own_state_on_one_rank, 1)


def by_stage(rank: int) -> None:
    for flat in (False, True):
        model = nn.ModuleDict({f"s{rank}": nn.Linear(2, 2, bias=False)})
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        option = {key: value for key, value in sgd.param_groups[0].items() if key != "params"}
        rows = {f"s{i}.weight": {"momentum_buffer": torch.full((2, 2), i + 1.0)} for i in (0, 1)}
        full: dict[str, Any] = {"state": rows, "param_groups": [{**option, "params": list(rows)}]}
        if flat:
            full = {f"state.{fqn}.{key}": value for fqn, row in rows.items() for key, value in row.items()}
            full.update({f"param_groups.{fqn}.{key}": value for fqn in rows for key, value in option.items()})
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, flatten_optimizer_state_dict=flat)
        set_optimizer_state_dict(model, sgd, full if rank == 0 else {}, options=options)
        [row] = sgd.state.values()
        assert torch.equal(row["momentum_buffer"], torch.full((2, 2), rank + 1.0)), flat


def test_rank_0_gives_to_models_that_differ_by_rank() -> None:
    """Seen: RankDisagreement."""
    run_ranks(by_stage, 2)


def only_read(rank: int) -> None:
    for kind in ("plain", "fsdp2", "fsdp1", "fsdp1 flat"):
        hows: tuple[dict[str, Any], ...] = ({}, {"full_state_dict": True}, BROADCAST)
        for how in hows:
            pairs: list[tuple[Any, Any]] = []
            for _ in range(2):
                model = built(kind)
                pairs.append((model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)))
            options = StateDictOptions(**how)
            state: Any = get_optimizer_state_dict(*pairs[0], options=options)
            given = {} if rank and len(how) == 2 else state
            set_optimizer_state_dict(*pairs[0], given, options=options)
            assert trained(*pairs[0]) == trained(*pairs[1]), (kind, how)


def test_reading_a_fresh_sgd_with_dampening_changes_no_training() -> None:
    """Seen: gathered, and with FSDP1, its momentum became zeros, to which the first gradient counts by half."""
    run_ranks(only_read, 2)


def wrong_on_one_rank(rank: int) -> tuple[str, bool]:
    model = built("fsdp2")
    adam = torch.optim.AdamW(model.parameters(), lr=0.1)
    trained(model, adam)
    state: Any = get_optimizer_state_dict(model, adam)
    if rank == 1:
        state["state"]["weight"]["step"] = None
    state["param_groups"][0]["lr"] = 5.0
    with pytest.raises(FdsdError) as caught:
        set_optimizer_state_dict(model, adam, state)
    return str(caught.value), adam.param_groups[0]["lr"] == 0.1


class Picky(torch.optim.SGD):
    """Fails on one rank, after it has changed something."""

    refuses = False

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if self.refuses:
            raise ValueError("not me")


def raised_on_one_rank(rank: int) -> tuple[str, bool]:
    model = built("fsdp2")
    sgd: Any = Picky(model.parameters(), lr=0.1, momentum=0.9)
    trained(model, sgd)
    state: Any = get_optimizer_state_dict(model, sgd)
    state["param_groups"][0]["lr"] = 5.0
    sgd.refuses = rank == 1
    with pytest.raises(FdsdError) as caught:
        set_optimizer_state_dict(model, sgd, state)
    return str(caught.value), sgd.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize(("case", "told"), [(wrong_on_one_rank, "'step' is no number"), (raised_on_one_rank, "not me")])
def test_what_one_rank_cannot_take_is_written_on_none(case: Any, told: str) -> None:
    """Seen: one rank reported success, and the other one a bare TypeError, half-written."""
    for text, unchanged in run_ranks(case, 2):
        assert told in text and unchanged
