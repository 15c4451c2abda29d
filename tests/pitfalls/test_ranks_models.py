"""Models over ranks: each known fault, on every kind of parallelism, for each way to give a state dict.

| row of PITFALLS.md | checks |
| --- | --- |
| wrapper segments stand anywhere | all, by the kinds; names alone: ``unit/comms/test_modules``, ``test_modules`` |
| missing and unexpected keys | ``missing_and_unexpected_names``, ``on_one_rank_only``, ``no_state_dict`` |
| ``strict`` with full dicts; lax loads | ``missing_and_unexpected_names`` |
| the caller's dict is changed | all that ask ``verdict_of``, refused loads too; ``names_of_restore`` |
| broadcasting shapes; half applied | ``exactly_the_shape``, ``sharded_values_of_other_shapes``, ``on_one_rank_only`` |
| float32 into others; the target's dtype stays | ``casts_as_torch_does``, ``restore_and_dtypes``, ``on_meta`` |
| tied weights: meta, gathered, one in a file | ``on_meta``, ``every_option``, ``the_engine``, ``one_tied_name`` |
| frozen ones: aliases, the same filter | ``every_option``, ``missing_and_unexpected_names``, ``the_same_filter`` |
| non-persistent buffers on meta | ``on_meta``, ``restore_on_meta`` |
| extra state: missing, ``None`` | ``missing_and_unexpected_names``, ``values_of_extra_state`` |
| replicated and 0-dim buffers, equal shards | ``equal_values_are_no_copies`` |
| other key orders on other ranks | ``other_orders`` |
| broadcast with ``{}`` elsewhere | the way "broadcast"; with an optimizer: ``test_ranks_optimizers`` |
| uneven FSDP x TP | the kind "FSDP2+TP", which has 7 rows over 2 x 2, in all; torch 2.6 cannot |
| each byte once; memory | ``test_ranks_traffic`` |
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import fdsd
from fdsd.compat.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from tests.helpers.audit_loads import FULL, WAYS, full, given, options_of, reference, spoiled, verdict_of
from tests.helpers.audit_values import case, local_values, same, tied
from tests.helpers.audited import FROZEN, SIZES, Audited, Kind, build, kinds_of, plain
from tests.helpers.auditing import Audit, Check, group, num_ranks
from tests.helpers.parallelism import INNER

AUDIT = Audit()


# -- reading ---------------------------------------------------------------------------------------------------------


@AUDIT.check()
def every_option(rank: int, kind: Kind) -> None:
    """Seen: a frozen weight's alias stays; gathering copies a tied tensor for each of its names."""
    model = build(kind, 1)
    before = local_values(model)
    for whole, cpu, frozen in every_option.share(itertools.product([False, True], repeat=3), kind, 3):
        options = StateDictOptions(full_state_dict=whole, cpu_offload=cpu, ignore_frozen_params=frozen)
        with case(options):
            state = get_model_state_dict(model, options=options)
            expected = reference()
            if frozen:
                assert [expected.pop(name) for name in FROZEN]
            if whole and cpu and rank:
                assert state == {}
                continue
            same(state, expected)
            tied(state["head.weight"], state["embed.weight"])
            if not frozen:
                tied(state[FROZEN[0]], state[FROZEN[1]])
            if whole:
                assert all(type(v) in (torch.Tensor, dict) for v in state.values())
    same(local_values(model), before)


@AUDIT.check()
def the_engine(rank: int, kind: Kind) -> None:
    model = build(kind, 1)
    captured = fdsd.capture(model).model
    for state in (captured, fdsd.snapshot(captured)):
        made = fdsd.materialize(state, group=group())
        same(made, reference())
        tied(made["head.weight"], made["embed.weight"])
        tied(made[FROZEN[0]], made[FROZEN[1]])
    spec = fdsd.describe(model)
    kept = fdsd.materialize(fdsd.filter_frozen(spec)(captured), group=group())
    assert list(kept) == [name for name in reference() if name not in FROZEN]


@AUDIT.check()
def equal_values_are_no_copies(rank: int, kind: Kind) -> None:
    """Seen: equal shards are "deduplicated" by value; buffers that every rank holds are concatenated; 0 dims crash."""
    expected = reference(value=3)
    model = build(kind, value=3)
    same(full(model), {**expected, "noted._extra_state": {"salt": 0}})
    made = fdsd.materialize(fdsd.capture(model).model, group=group())
    same(made, {**expected, "noted._extra_state": {"salt": 0}})
    assert made["norm.num_batches_tracked"].shape == ()


# -- verdicts --------------------------------------------------------------------------------------------------------

LOADS = (
    *itertools.product([True, False], [False], ["missing", "unexpected", "both"]),
    (True, False, "none"),
    (True, True, "none"),
    (True, True, "both"),
    (False, True, "both"),
)
"""Strict or lax; without frozen parameters or with them; and the fault."""


@AUDIT.check()
def missing_and_unexpected_names(rank: int, kind: Kind) -> Any:
    """Seen: never reported with full dicts; one rank raises while the others hang or report success.

    What is missing, and what is not expected, is what ``nn.Module.load_state_dict`` of the plain model says.
    """
    model, source = build(kind, 2), build(kind, 1)
    told: list[Any] = []
    cases = enumerate(itertools.product(WAYS, LOADS))
    for at, (way, (strict, frozen, fault)) in missing_and_unexpected_names.share(cases, kind, 3):
        with case(way, "strict" if strict else "lax", "ignore frozen" if frozen else "all", fault):
            content = spoiled(reference(), fault, at)
            oracle = plain(2)
            missing, unexpected = oracle.load_state_dict(content, strict=False)
            if frozen:
                content = {name: value for name, value in content.items() if name not in FROZEN}
                oracle = plain(2)
                oracle.load_state_dict(content, strict=False)
            options = options_of(way, strict=strict, ignore_frozen_params=frozen)
            found = verdict_of(model, given(way, rank, content, source), options)
            told.append(found)
            if strict and fault != "none":
                assert found[0] == "error"
                assert all(f'"{name}"' in found[1] for name in [*missing, *unexpected])
            else:
                assert (sorted(found[0]), found[1]) == (sorted(missing), unexpected)
                same(full(model), dict(oracle.state_dict()))
                set_model_state_dict(model, reference(2), options=FULL)
    return told


@AUDIT.check(joined=True)
def on_one_rank_only(rank: int, kind: Kind) -> Any:
    """A fault of one rank is one of all, wherever they hold parts of one model."""
    model, source = build(kind, 2), build(kind, 1)
    told: list[Any] = []
    faults = ("missing", "unexpected", "shape", "both", "kind")
    cases = enumerate(itertools.product(range(num_ranks()), ("sharded", "full"), faults))
    for at, (bad, way, fault) in on_one_rank_only.share(cases, kind, 3):
        with case(f"rank {bad}", way, fault):
            content = reference()
            if rank == bad:
                content = spoiled(content, fault, at)
            state: Any = given(way, rank, content, source)
            if rank == bad and fault == "shape":
                state["units.0.up.weight"] = torch.ones(INNER, 1)
            if rank == bad and fault == "kind":
                state["table"] = "text"
            found = verdict_of(model, state, options_of(way))
            assert found[0] == "error"
            told.append(found)
    same(full(model), reference(2))
    return told


@AUDIT.check(joined=True)
def no_state_dict(rank: int, kind: Kind) -> None:
    model = build(kind, 2)
    for bad, wrong in itertools.product(range(num_ranks()), [None, [1], {"x": 1, 3: torch.ones(1)}]):
        state: Any = wrong if rank == bad else reference()
        with case(bad, wrong), pytest.raises((RuntimeError, TypeError)):
            set_model_state_dict(model, state, options=FULL)
        if bad == 0:
            with case(wrong, "broadcast"), pytest.raises((RuntimeError, TypeError)):
                set_model_state_dict(model, wrong if rank == 0 else {}, options=options_of("broadcast"))  # type: ignore[arg-type]
    same(full(model), reference(2))


@AUDIT.check()
def other_orders(rank: int, kind: Kind) -> None:
    """Seen: weights are mixed silently."""
    model, source = build(kind, 2), build(kind, 1)
    for way in other_orders.share(WAYS, kind, 3):
        set_model_state_dict(model, reference(2), options=FULL)
        items = list(given(way, rank, reference(), source).items())
        turned = items[rank % 3 :] + items[: rank % 3]
        set_model_state_dict(model, dict(turned[::-1] if rank % 2 else turned), options=options_of(way))
        same(full(model), reference())
    state = fdsd.capture(source).model
    turned = list(state.items())[:: -1 if rank % 2 else 1]
    fdsd.restore(dict(turned), build(kind, 2), group=group())
    same(dict(sorted(fdsd.materialize(dict(turned), group=group()).items())), dict(sorted(reference().items())))


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("check", AUDIT.checks, ids=repr)
def test_on_ranks(check: Check, n: int) -> None:
    AUDIT.verify(check, n)


def test_all_kinds_together_have_all_cases() -> None:
    for n, check in itertools.product(SIZES, [*AUDIT.checks, Check(lambda rank, kind: None, False, True, 1)]):
        kinds = kinds_of(n, joined=check.joined, meta=check.meta)
        dealt = [case for kind in kinds for case in check.share(range(8), kind, 3, n=n)]
        assert set(dealt) == set(range(8))
        assert n == 1 or len(dealt) < 8 * len(kinds) // 2


def test_the_model_has_what_the_rows_need() -> None:
    kinds = {kind.name for n in SIZES for kind in kinds_of(n)}
    assert len(kinds) >= 12
    names = dict(Audited().named_parameters(remove_duplicate=False))
    assert names["head.weight"] is names["embed.weight"] and names[FROZEN[0]] is names[FROZEN[1]]
    assert {len(names), len(reference())} == {15, 20}
