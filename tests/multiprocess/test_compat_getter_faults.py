"""Getters of the drop-in where something is wrong on one rank: all that gather hear of it, and nobody waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard

from fdsd.compat.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from fdsd.errors import RanksLost
from tests.helpers.one_layer import BROADCAST, FULL, refused, stepped
from tests.helpers.parallelism import FORWARD
from tests.helpers.ranks import run_ranks

OFFLOADED: dict[str, Any] = {**FULL, "cpu_offload": True}
WHOLE = StateDictOptions(**FULL)
HINT = "Ranks that read only their own shards (full_state_dict=False) ask nobody"


class Counting(nn.Module):
    """Has an extra state, which raises while it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.refuses = False

    def get_extra_state(self) -> int:
        if self.refuses:
            raise ArithmeticError("no count today.")
        return 3

    def set_extra_state(self, state: int) -> None:
        assert state == 3


def built(kind: str) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Counting(), nn.Linear(4, 4))
    if kind == "fsdp2":
        fully_shard(model[0])
        return fully_shard(model)
    if kind.startswith("fsdp1"):
        uses_originals = kind == "fsdp1"
        return FullyShardedDataParallel(model, use_orig_params=uses_originals, device_id=torch.device("cpu"))
    return model


def optimizer_of(model: Any, kind: str) -> Any:
    return stepped(model) if kind.startswith("fsdp1") else torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def unshard(model: nn.Module) -> None:
    """Leave FSDP2 as a forward pass may: no parameter says how it lies."""
    for module in model.modules() if FORWARD else ():
        if isinstance(module, FSDPModule):
            module.unshard()


def counting(model: nn.Module) -> Counting:
    return next(module for module in model.modules() if isinstance(module, Counting))


def told(action: Callable[[], Any]) -> str:
    with pytest.raises((RuntimeError, ValueError, KeyError, ArithmeticError)) as raised:
        action()
    return f"{type(raised.value).__name__}: {raised.value}"


def read_with_a_fault(rank: int, kind: str, way: dict[str, Any], fault: str, bad: tuple[int, ...]) -> list[str]:
    model, options = built(kind), StateDictOptions(**way)
    optimizer = optimizer_of(model, kind)
    before = str(get_state_dict(model, optimizer, options=options))
    how: dict[str, Any] = {"options": options}
    if rank in bad:
        counting(model).refuses = fault == "extra"
        how |= {"submodules": {nn.Linear(1, 1)}} if fault == "submodules" else {}
        how |= {"options": StateDictOptions(broadcast_from_rank0=True)} if fault == "options" else {}
    elif fault == "submodules":
        how["submodules"] = {model}
    texts: list[str] = []
    reads: list[Callable[[], Any]] = [
        lambda: get_model_state_dict(model, **how),
        lambda: get_optimizer_state_dict(model, optimizer, **how),
        lambda: get_state_dict(model, optimizer, **how),
    ]
    for read in reads:
        unshard(model)
        if fault != "submodules":
            texts.append(told(read))
            continue
        with pytest.warns(FutureWarning, match="submodules"):
            texts.append(told(read))
    counting(model).refuses = False
    assert str(get_state_dict(model, optimizer, options=options)) == before
    return texts


FAULTS = {
    "extra": "LoadError: Rank {}: ArithmeticError: no count today. No rank has got a state dict.",
    "submodules": "LoadError: Rank {}: UnknownName: submodules: 'Linear' are no part of this ",
}


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        ("fsdp2", FULL),
        ("fsdp2", OFFLOADED),
        ("fsdp1", {}),
        ("fsdp1", OFFLOADED),
        ("fsdp1 flat", FULL),
    ],
)
@pytest.mark.parametrize("fault", list(FAULTS))
@pytest.mark.parametrize(("n", "bad"), [(2, 0), (3, 1)])
def test_a_fault_on_one_rank_is_heard_by_all(n: int, bad: int, fault: str, kind: str, way: dict[str, Any]) -> None:
    """Seen: that rank raised alone, and the others waited for it until their group gave up."""
    results = run_ranks(read_with_a_fault, n, kind, way, fault, (bad,), group_timeout=15)
    assert all(result == results[0] for result in results)
    for text in results[0]:
        assert text.startswith(FAULTS[fault].format(bad))
        assert text.endswith("No rank has got a state dict.")


@pytest.mark.parametrize(("kind", "way"), [("fsdp2", FULL), ("fsdp1", {})])
def test_options_that_do_not_hold_on_one_rank_are_heard_by_all(kind: str, way: dict[str, Any]) -> None:
    """Seen: that rank raised alone, and the others waited for it until their group gave up."""
    first, second = run_ranks(read_with_a_fault, 2, kind, way, "options", (1,), group_timeout=15)
    assert first == second
    for text in first:
        assert text.startswith("RankDisagreement: ")
        assert "rank 1: " in text and "options that do not hold: full_state_dict must be True when" in text


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1"])
@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("options", "OptionError: full_state_dict must be True when broadcast_from_rank0 is True."),
        ("extra", "ArithmeticError: no count today."),
    ],
)
def test_the_same_fault_on_all_ranks_is_raised_as_it_is(fault: str, text: str, kind: str) -> None:
    assert run_ranks(read_with_a_fault, 2, kind, FULL, fault, (0, 1), group_timeout=15) == [[text] * 3] * 2


@pytest.mark.parametrize("way", [{}, FULL])
def test_a_fault_where_nobody_gathers_is_that_of_one_rank(way: dict[str, Any]) -> None:
    """Shards of FSDP2 are read without a message, and so is a model that is whole on each rank."""

    def ranks(rank: int) -> list[str]:
        model = built("plain" if way else "fsdp2")
        options = StateDictOptions(**way)
        counting(model).refuses = rank == 1
        if rank == 1:
            return [told(lambda: get_model_state_dict(model, options=options))]
        return list(get_model_state_dict(model, options=options))

    first, second = run_ranks(ranks, 2, group_timeout=15)
    assert first == ["0.weight", "0.bias", "1._extra_state", "2.weight", "2.bias"]
    assert second == ["ArithmeticError: no count today."]


def test_a_hook_that_raises_on_one_rank_is_heard_by_all() -> None:
    """Who has to hear of it is found without running it again."""

    def ranks(rank: int) -> tuple[str, int]:
        model = built("fsdp2")
        calls: list[str] = []

        def hook(module: nn.Module, prefix: str, keep_vars: bool) -> None:
            calls.append(prefix)
            if rank == 1:
                raise ArithmeticError("no hook today.")

        refusing: Any = counting(model)  # the method has no types
        refusing.register_state_dict_pre_hook(hook)
        return told(lambda: get_model_state_dict(model, options=WHOLE)), len(calls)

    text = "LoadError: Rank 1: ArithmeticError: no hook today. No rank has got a state dict."
    assert run_ranks(ranks, 2, group_timeout=15) == [(text, 1)] * 2


def beside_a_module_without_memory(rank: int) -> str:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(2, 2, device="meta"))
    fully_shard(model[0])
    return refused(lambda: get_state_dict(model, stepped(model), options=StateDictOptions(**OFFLOADED)))


def test_a_module_without_memory_is_told_to_all() -> None:
    """Rank 0 alone puts tensors on the CPU; the others would go on to gather optimizers."""
    first, *others = run_ranks(beside_a_module_without_memory, 3, group_timeout=15)
    text = "'1.bias', '1.weight' are on the meta device, without data to put on the CPU."
    assert first.startswith(f"NoData: {text}")
    assert all(f"rank 0: {text}" in other for other in others)


def over_several_meshes(rank: int) -> list[str]:
    wide, narrow = DeviceMesh("cpu", [0, 1, 2]), DeviceMesh("cpu", [0, 1])
    model: Any = nn.Module()
    model.count = Counting()
    value = torch.arange(6.0)
    model.dense = nn.Parameter(DTensor.from_local(value.chunk(3)[rank], wide, [Shard(0)], run_check=False))
    if rank < 2:
        model.expert = nn.Parameter(DTensor.from_local(value.chunk(2)[rank], narrow, [Shard(0)], run_check=False))
    texts: list[str] = []
    for bad in range(3):
        model.count.refuses = rank == bad
        texts.append(told(lambda: get_model_state_dict(model, options=WHOLE)))
    model.count.refuses = False
    assert all(
        torch.equal(found, value)  # type: ignore[arg-type]
        for name, found in get_model_state_dict(model, options=WHOLE).items()
        if name != "count._extra_state"
    )
    return texts


def test_ranks_that_meet_in_several_meshes_hear_of_it_in_each() -> None:
    results = run_ranks(over_several_meshes, 3, group_timeout=15)
    assert results[0] == results[1] == results[2]
    for bad, text in enumerate(results[0]):
        assert text == f"LoadError: Rank {bad}: ArithmeticError: no count today. No rank has got a state dict."


def a_bad_optimizer(rank: int, kind: str) -> tuple[str, bool]:
    model = built(kind)
    optimizer = optimizer_of(model, kind)
    text = refused(lambda: get_state_dict(model, 5 if rank == 1 else optimizer, options=WHOLE))  # type: ignore[arg-type]
    weights, _ = get_state_dict(model, optimizer, options=WHOLE)
    return text, len(weights) == 5


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1"])
def test_what_is_no_optimizer_on_one_rank_stops_both_state_dicts(kind: str) -> None:
    """Seen: that rank did not even read the model, for which the others waited."""
    first, second = run_ranks(a_bad_optimizer, 2, kind, group_timeout=15)
    assert first == second and first[1]
    assert first[0].startswith("LoadError: Rank 1: NoMapping: Optimizers are torch.optim.Optimizer")


def set_where_an_extra_state_cannot_be_read(rank: int, way: dict[str, Any]) -> list[str]:
    model = built("fsdp2")
    optimizer = optimizer_of(model, "fsdp2")
    weights, state = get_state_dict(model, optimizer, options=WHOLE)
    changed: Any = {name: value if isinstance(value, int) else value + 1 for name, value in weights.items()}  # type: ignore[operator]
    state["param_groups"][0]["lr"] = 7.0  # type: ignore[index, call-overload]
    counting(model).refuses = rank == 1
    options = StateDictOptions(**way)
    texts = [
        told(lambda: set_model_state_dict(model, changed, options=options)),
        told(lambda: set_optimizer_state_dict(model, optimizer, state, options=options)),
        told(
            lambda: set_state_dict(model, optimizer, model_state_dict=changed, optim_state_dict=state, options=options)
        ),
    ]
    counting(model).refuses = False
    assert str(get_model_state_dict(model, options=WHOLE)) == str(weights)
    assert optimizer.param_groups[0]["lr"] == 0.1
    return texts


@pytest.mark.parametrize("way", [FULL, BROADCAST], ids=["full", "broadcast"])
def test_setters_hear_of_an_extra_state_that_cannot_be_read_on_one_rank(way: dict[str, Any]) -> None:
    """Seen: that rank raised alone, and the others waited for it until their group gave up."""
    first, second = run_ranks(set_where_an_extra_state_cannot_be_read, 2, way, group_timeout=15)
    assert first == second
    assert first == ["LoadError: Rank 1: ArithmeticError: no count today. Nothing has been written on any rank."] * 3


# -- whole on one rank, shards on another --------------------------------------------------------------------------


def whole_on_rank_0_only(rank: int, of_optimizer: bool) -> tuple[str, str]:
    model = built("fsdp2")
    optimizer = optimizer_of(model, "fsdp2")
    options = WHOLE if rank == 0 else StateDictOptions()

    def read() -> Any:
        if of_optimizer:
            return get_optimizer_state_dict(model, optimizer, options=options)
        return get_model_state_dict(model, options=options)

    if rank == 0:
        return refused(read), ""
    read()  # which asks nobody
    return refused(lambda: set_model_state_dict(model, get_model_state_dict(model))), ""


@pytest.mark.parametrize(("of_optimizer", "what"), [(False, "a model's"), (True, "optimizers'")])
def test_whole_on_one_rank_and_shards_on_another_end_at_the_next_call(of_optimizer: bool, what: str) -> None:
    first, second = run_ranks(whole_on_rank_0_only, 2, of_optimizer, group_timeout=15)
    assert first == second
    assert first[0].startswith("RankDisagreement: ")
    assert f"rank 0: {what} state dict, with StateDictOptions(full_state_dict=True)" in first[0]
    assert "rank 1: whether it fits the model, with StateDictOptions()" in first[0]


def whole_on_rank_0_and_nothing_more(rank: int) -> list[str]:
    try:
        get_model_state_dict(built("fsdp2"), options=WHOLE if rank == 0 else StateDictOptions())
    except RanksLost as error:
        return [str(error), *getattr(error, "__notes__", [])]
    return []


def test_who_waits_in_vain_for_ranks_that_read_shards_is_told_of_options() -> None:
    first, second = run_ranks(whole_on_rank_0_and_nothing_more, 2, group_timeout=3)
    assert second == []
    assert "rank 1" in first[0]
    assert "StateDictOptions(full_state_dict=True)" in first[1] and HINT in first[1]


def test_the_default_group_is_still_torchs() -> None:
    """What getters agree on leaves nothing behind that other collectives would take for their own."""

    def ranks(rank: int) -> list[int]:
        model = built("fsdp2")
        counting(model).refuses = rank == 1
        told(lambda: get_model_state_dict(model, options=WHOLE))
        found = [torch.zeros((), dtype=torch.int64) for _ in range(2)]
        c10d: Any = dist  # the types of all_gather are not all declared
        c10d.all_gather(found, torch.tensor(rank))
        return [int(one) for one in found]

    assert run_ranks(ranks, 2, group_timeout=15) == [[0, 1]] * 2
