"""What users of torch's own functions report, over real ranks: what one rank finds, all ranks hear."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from fdsd.compat.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from tests.helpers.one_layer import FULL, refused
from tests.helpers.parallelism import FORWARD
from tests.helpers.ranks import run_ranks


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))


def fsdp2() -> Any:
    return fully_shard(layers())


def fsdp1() -> Any:
    return FullyShardedDataParallel(layers(), use_orig_params=True, device_id=torch.device("cpu"))


def stepped(model: Any, optimizer: Any, closure: Callable[[], Any] | None = None) -> Any:
    for param in model.parameters():
        value = torch.ones(param.shape)
        is_spread = isinstance(param, DTensor)
        param.grad = distribute_tensor(value, param.device_mesh, param.placements) if is_spread else value
    optimizer.step(closure)
    return optimizer


def on_meta(value: Any) -> Any:
    if not isinstance(value, DTensor):
        return value.to("meta")
    local = value.to_local().to("meta")
    return DTensor.from_local(
        local, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
    )


class TestReadingOptimizers:
    """One rank cannot read its optimizer: the others, which gather, would wait for it until their group gives up."""

    @pytest.mark.parametrize(
        ("make", "options"),
        [(fsdp2, FULL), (fsdp2, {**FULL, "cpu_offload": True}), (fsdp1, FULL), (fsdp1, {})],
        ids=["FSDP2", "FSDP2, for rank 0", "FSDP1", "FSDP1, sharded"],
    )
    @pytest.mark.parametrize("fault", ["a parameter of no model", "no optimizer"])
    def test_a_fault_on_one_rank_is_told_to_all(
        self, make: Callable[[], Any], options: dict[str, Any], fault: str
    ) -> None:
        def ranks(rank: int) -> str:
            model = make()
            optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
            if rank == 1 and fault == "no optimizer":
                optimizer = 5
            elif rank == 1:
                optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
            return refused(lambda: get_optimizer_state_dict(model, optimizer, options=StateDictOptions(**options)))

        told = run_ranks(ranks, 2, timeout=20)
        assert told[0] == told[1]
        assert told[0].startswith("LoadError: Rank 1: " + ("NoMapping" if fault == "no optimizer" else "UnknownName"))

    def test_state_that_only_one_rank_can_tell_to_be_odd(self) -> None:
        def ranks(rank: int) -> str:
            model = fsdp1()
            optimizer = stepped(model, torch.optim.LBFGS(model.parameters()), lambda: torch.tensor(1.0))
            return refused(lambda: get_optimizer_state_dict(model, optimizer))

        told = run_ranks(ranks, 2, timeout=20)
        assert told[0] == told[1] and "Unsupported: 'd' of '0.weight'" in told[0]


class TestTensorsWithoutData:
    """verl and accelerate give dicts of meta tensors on all ranks but one."""

    @pytest.mark.parametrize("is_meta", [True, False], ids=["a meta model", "a model with memory"])
    def test_whole_ones_on_one_rank_are_refused_on_all(self, is_meta: bool) -> None:
        def ranks(rank: int) -> tuple[str, list[bool]]:
            whole = layers().state_dict()
            with torch.device("meta" if is_meta else "cpu"):
                model = fsdp2()
            given = {name: value.to("meta") for name, value in whole.items()} if rank else whole
            told = refused(lambda: set_model_state_dict(model, given, options=StateDictOptions(**FULL)))
            return told, [param.is_meta for param in model.parameters()]

        told = run_ranks(ranks, 2, timeout=20)
        assert told[0] == told[1] and told[0][1] == [is_meta] * 4
        assert "LoadError: Error(s) in loading state_dict for FSDPSequential" in told[0][0]
        assert 'While copying the parameter named "0.weight": the value is on the meta device' in told[0][0]

    def test_where_rank_0_gives_those_of_the_others_do_not_count(self) -> None:
        def ranks(rank: int) -> bool:
            whole = layers().state_dict()
            with torch.device("meta"):
                model = fsdp2()
            given = {name: value.to("meta") for name, value in whole.items()} if rank else whole
            set_model_state_dict(model, given, options=StateDictOptions(**FULL, broadcast_from_rank0=True))
            return all(torch.equal(value.full_tensor(), whole[name]) for name, value in model.state_dict().items())

        assert run_ranks(ranks, 2, timeout=20) == [True, True]

    def test_a_shard_without_data_on_one_rank_leaves_all_models_as_they_are(self) -> None:
        def ranks(rank: int) -> tuple[str, bool]:
            model, source = fsdp2(), fsdp2()
            with torch.no_grad():
                for param in model.parameters():
                    param.fill_(7)
            given = dict(get_model_state_dict(source))
            if rank:
                given["1.weight"] = on_meta(given["1.weight"])
            told = refused(lambda: set_model_state_dict(model, given))
            return told, all(bool((param.to_local() == 7).all()) for param in model.parameters())

        told = run_ranks(ranks, 2, timeout=20)
        assert told[0] == told[1] and told[0][1]
        assert 'named "1.weight": the value is on the meta device, and has no data.' in told[0][0]

    def test_a_meta_model_takes_its_own_state(self) -> None:
        """The law of the getter holds before a model has memory."""

        def ranks(rank: int) -> tuple[str, bool]:
            with torch.device("meta"):
                model = fsdp2()
            told = set_model_state_dict(model, get_model_state_dict(model))
            return str(told), all(param.is_meta for param in model.parameters())

        assert run_ranks(ranks, 2, timeout=20) == [("<All keys matched successfully>", True)] * 2


def lbfgs_goes_on(rank: int) -> None:
    def begun(model: Any) -> tuple[Any, Any, Callable[[], Any]]:
        lbfgs = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

        def loss() -> Any:
            lbfgs.zero_grad()
            made = model(torch.ones(2, 4)).square().sum()
            made.backward()
            return made.detach()

        return model, lbfgs, loss

    model, lbfgs, loss = begun(fsdp2())
    lbfgs.step(loss)
    other, fresh, again = begun(fsdp2())
    set_model_state_dict(other, copy.deepcopy(get_model_state_dict(model)))
    set_optimizer_state_dict(other, fresh, copy.deepcopy(get_optimizer_state_dict(model, lbfgs)))
    assert [float(fresh.step(again)) for _ in range(2)] == [float(lbfgs.step(loss)) for _ in range(2)]


@pytest.mark.skipif(not FORWARD, reason="FSDP2 of torch 2.6 does not run on the CPU")
def test_what_lies_over_ranks_and_is_like_no_parameter_comes_back_so() -> None:
    run_ranks(lbfgs_goes_on, 2)
