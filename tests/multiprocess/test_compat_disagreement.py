"""The drop-in over real ranks that are called in different ways: one clear error on all, and nothing written."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fdsd.compat._verdict import Findings, agreed
from fdsd.compat.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from fdsd.errors import FdsdError
from tests.helpers.one_layer import BROADCAST, FULL, built, refused, stepped
from tests.helpers.ranks import run_ranks

WHOLE = StateDictOptions(**FULL)


# -- setters: what is wrong on one rank ----------------------------------------------------------------------------


def stray(model: Any) -> Any:
    return torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)


BAD_OPTIMIZERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "stray": (stray, "not in the model"),
    "none": (lambda model: [], "Optimizers are not passed in"),
    "odd": (lambda model: 3, "these are not: 'int'"),
}


def set_with_bad_optimizers(rank: int, name: str, bad: int, way: dict[str, Any], kind: str) -> list[str]:
    model, options = built(kind), StateDictOptions(**way)
    optimizer = stepped(model)
    state: Any = get_optimizer_state_dict(model, optimizer, options=WHOLE)
    weights = {fqn: value + 1 for fqn, value in get_model_state_dict(model, options=WHOLE).items()}  # type: ignore[operator]
    before = get_state_dict(model, optimizer, options=WHOLE)
    state["param_groups"][0]["lr"] = 7.0
    given = BAD_OPTIMIZERS[name][0](model) if rank == bad else optimizer
    texts = [
        refused(lambda: set_optimizer_state_dict(model, given, state, options=options)),
        refused(
            lambda: set_state_dict(model, given, model_state_dict=weights, optim_state_dict=state, options=options)
        ),
    ]
    assert str(get_state_dict(model, optimizer, options=WHOLE)) == str(before)
    return texts


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1"])
@pytest.mark.parametrize("way", [FULL, BROADCAST], ids=["full", "broadcast"])
@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("name", list(BAD_OPTIMIZERS))
def test_bad_optimizers_on_one_rank(name: str, bad: int, way: dict[str, Any], kind: str) -> None:
    """Seen: that rank raised before the others had met, and they waited for it."""
    first, second = run_ranks(set_with_bad_optimizers, 2, name, bad, way, kind, group_timeout=10)
    assert first == second
    assert f"Rank {bad}: " in first[0] and BAD_OPTIMIZERS[name][1] in first[0]
    if name == "none":  # as far as it knows, it loads a model alone
        assert first[1].startswith("RankDisagreement: ") and "the optimizers" in first[1] and "the model" in first[1]
    else:
        assert f"Rank {bad}: " in first[1]


def set_with_bad_options(rank: int, bad: Any, way: dict[str, Any], kind: str) -> list[str]:
    model = built(kind)
    optimizer = stepped(model)
    state: Any = get_optimizer_state_dict(model, optimizer, options=WHOLE)
    weights: Any = get_model_state_dict(model, options=WHOLE)
    before = get_state_dict(model, optimizer, options=WHOLE)
    state["param_groups"][0]["lr"] = 7.0
    options: Any = StateDictOptions(**way)
    if rank == 1:
        options = StateDictOptions(**bad) if isinstance(bad, dict) else bad
    both: dict[str, Any] = {"model_state_dict": weights, "optim_state_dict": state}
    texts = [
        refused(lambda: set_model_state_dict(model, weights, options=options)),
        refused(lambda: set_optimizer_state_dict(model, optimizer, state, options=options)),
        refused(lambda: set_state_dict(model, optimizer, **both, options=options)),
        refused(lambda: set_state_dict(model, [], **both, options=options)),
    ]
    assert str(get_state_dict(model, optimizer, options=WHOLE)) == str(before)
    return texts


@pytest.mark.parametrize(
    ("bad", "way", "kind"),
    [
        ({"broadcast_from_rank0": True}, FULL, "fsdp2"),
        ({"broadcast_from_rank0": True}, BROADCAST, "fsdp2"),
        ({"broadcast_from_rank0": True}, BROADCAST, "plain"),
        (3, FULL, "fsdp1"),
    ],
)
def test_bad_options_on_one_rank(bad: Any, way: dict[str, Any], kind: str) -> None:
    """Seen: that rank raised before the others had met; of a plain model that rank 0 gives to all, they waited."""
    first, second = run_ranks(set_with_bad_options, 2, bad, way, kind, group_timeout=10)
    why = "options are StateDictOptions, not int" if bad == 3 else "full_state_dict must be True"
    assert first == second
    assert all(text.startswith("RankDisagreement: ") and why in text for text in first)


def set_with_bad_options_on_all(rank: int) -> list[str]:
    model = built("fsdp2")
    optimizer = stepped(model)
    options = StateDictOptions(broadcast_from_rank0=True)
    both: dict[str, Any] = {"model_state_dict": {}, "optim_state_dict": {}}
    actions: list[Callable[[], Any]] = [
        lambda: set_model_state_dict(model, {}, options=options),
        lambda: set_optimizer_state_dict(model, optimizer, {}, options=options),
        lambda: set_state_dict(model, optimizer, **both, options=options),
    ]
    for action in actions:
        with pytest.raises(ValueError, match="full_state_dict must be True when broadcast_from_rank0 is True"):
            action()
    return [refused(action) for action in actions]


def test_bad_options_on_all_ranks_are_torchs_error() -> None:
    assert (
        run_ranks(set_with_bad_options_on_all, 2)
        == [["OptionError: full_state_dict must be True when broadcast_from_rank0 is True."] * 3] * 2
    )


def set_what_only_rank_0_has(rank: int) -> None:
    for kind in ("plain", "fsdp2", "fsdp1"):
        model, options = built(kind), StateDictOptions(**BROADCAST)
        given: Any = {"weight": torch.full((4, 4), 3.0), "bias": torch.full((4,), 3.0)}
        set_state_dict(model, [], model_state_dict={} if rank else given, optim_state_dict={}, options=options)
        assert all(bool((v == 3).all()) for v in get_model_state_dict(model, options=WHOLE).values())  # type: ignore[union-attr]
        given["weight"] = -given["weight"]
        nothing: Any = None
        told = set_model_state_dict(model, nothing if rank else given, options=options)
        found: Any = get_model_state_dict(model, options=WHOLE)
        assert not told.missing_keys and bool((found["weight"] == -3).all())


def test_only_the_state_dict_of_rank_0_counts() -> None:
    """Seen: a rank that gives {} for a model alone, or None, refused."""
    run_ranks(set_what_only_rank_0_has, 2, group_timeout=10)


def agree_in_two_meetings(rank: int) -> str:
    for ranks in ([0, 1], [0, 2]):
        dist.new_group(ranks)
    meetings = {0: [(0, 1), (0, 2)], 1: [(0, 1)], 2: [(0, 2)]}[rank]
    return refused(lambda: agreed(Findings(), None, meetings, "an egg" if rank == 1 else "a cake"))


def test_ranks_of_other_meetings_hear_of_a_disagreement() -> None:
    first, second, third = run_ranks(agree_in_two_meetings, 3, group_timeout=10)
    assert second.startswith("RankDisagreement: ") and "an egg" in second
    assert first == third and "Rank 0: RankDisagreement: " in first and "an egg" in first


# -- getters -------------------------------------------------------------------------------------------------------


def read_with_options(rank: int, kind: str, ways: list[dict[str, Any]]) -> list[str]:
    model = built(kind)
    optimizer = stepped(model)
    options = StateDictOptions(**ways[rank])
    told: list[str] = []
    reads: list[Callable[[], Any]] = [
        lambda: get_model_state_dict(model, options=options),
        lambda: get_optimizer_state_dict(model, optimizer, options=options),
        lambda: get_state_dict(model, optimizer, options=options),
    ]
    for read in reads:
        try:
            read()
            told.append("")
        except FdsdError as error:
            told.append(f"{type(error).__name__}: {error}")
    return told


OFFLOADED = {**FULL, "cpu_offload": True}
FLAT: dict[str, Any] = {"flatten_optimizer_state_dict": True}
FROZEN = {**FULL, "ignore_frozen_params": True}


@pytest.mark.parametrize(
    ("kind", "ways", "of_model", "of_optim"),
    [
        ("fsdp2", [FULL, OFFLOADED], True, True),
        ("fsdp2", [FULL, {**FULL, **FLAT}], False, True),
        ("fsdp2", [FULL, FROZEN], True, False),
        ("fsdp2", [{}, FLAT], False, False),  # nothing is sent
        ("fsdp1", [FULL, {}], True, True),
        ("fsdp1", [FULL, OFFLOADED], True, True),
        ("fsdp1", [{}, FLAT], False, True),
        ("fsdp1", [FULL, BROADCAST], False, True),
        ("plain", [FULL, {**OFFLOADED, **FLAT}], False, False),
    ],
)
def test_options_that_differ_where_ranks_read(
    kind: str, ways: list[dict[str, Any]], of_model: bool, of_optim: bool
) -> None:
    """Seen: each got what it had asked for, of optimizers an error about parts that a rank should hold, or waited."""
    first, second = run_ranks(read_with_options, 2, kind, ways, group_timeout=10)
    assert first == second
    for text, differs in zip(first, (of_model, of_optim, of_model or of_optim), strict=True):
        assert text.startswith("RankDisagreement: ") == differs
        assert not differs or text.count("StateDictOptions(") == 2


def read_for_rank_0(rank: int, kind: str) -> Any:
    model = built(kind)
    optimizer = stepped(model)
    told = []
    for more in ({}, FLAT, {"cpu_offload": True}):
        options = StateDictOptions(**BROADCAST, **more)
        read: Any = get_optimizer_state_dict(model, optimizer, options=options)
        whole: Any = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(**FULL, **more))
        told.append(str(read) == str(whole) if rank == 0 else read)
        weights = get_model_state_dict(model, options=StateDictOptions(**BROADCAST))
        assert [tuple(value.shape) for value in weights.values()] == [(4, 4), (4,)]  # type: ignore[union-attr]
        other = stepped(model, lr=0.2)
        set_optimizer_state_dict(model, other, read, options=options)
        assert str(other.state_dict()) == str(optimizer.state_dict())
    return told


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp1 flat"])
def test_rank_0_alone_gets_optimizers_of_fsdp1_that_it_gives_to_all(kind: str) -> None:
    first, second = run_ranks(read_for_rank_0, 2, kind)
    assert first == [True] * 3
    assert second == [{"state": {}, "param_groups": []}, {}, {}]


def read_without_a_word(rank: int) -> None:
    """Sharded state is read without a message, whatever the options."""
    model = built("fsdp2")
    optimizer = stepped(model)
    if rank == 0:  # the other rank is not there
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            get_state_dict(model, optimizer, options=StateDictOptions(cpu_offload=True, **FLAT))


def test_sharded_state_is_read_by_each_rank_alone() -> None:
    run_ranks(read_without_a_word, 2, group_timeout=5)
