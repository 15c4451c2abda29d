"""Optimizers of FSDP1's flat parameters, read, templated and written.

The oracle is the same model trained in one process: all ranks get the same gradients.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fdsd import OptimState, ParamGroup
from fdsd.algebra.lazy import Lazy
from fdsd.comms.modules import read_modules
from fdsd.comms.optimizer_targets import slot_targets
from fdsd.comms.optimizer_templates import template_of
from fdsd.comms.optimizer_writing import check_write, write_optimizers
from fdsd.comms.optimizers import read_optimizers
from fdsd.data.errors import SpecMismatch, Unsupported
from fdsd.data.spec import spec_of
from tests.helpers.optimizers import by_name, told, told_all, told_optimizer
from tests.helpers.optimizers_ranks import SHAPES, Small, delivered, grads, reference, two_groups
from tests.helpers.ranks import run_ranks


def flattened(orig: bool, strategy: str = "FULL_SHARD", **options: Any) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return FullyShardedDataParallel(
            Small(),
            device_id=torch.device("cpu"),
            use_orig_params=orig,
            sharding_strategy=ShardingStrategy[strategy],
            **options,
        )


def flat_optimizer(case: str, model: Any, orig: bool) -> torch.optim.Optimizer:
    if not orig:
        return by_name(case).make(list(model.parameters()))
    return two_groups(case, dict(model.named_parameters()))


def step_flat(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model(grads(step)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def one_group(case: str, steps: int) -> OptimState:
    model = Small()
    optimizer = by_name(case).make([dict(model.named_parameters())[name] for name in SHAPES])
    for step in range(steps):
        for name, p in model.named_parameters():
            p.grad = grads(step)[name]
        optimizer.step()
    return read_optimizers(read_modules(model), optimizer)


def gathered(leaf: Any, world: int) -> torch.Tensor:
    """The whole of a lazy tensor: each element from the rank that holds it."""
    if not isinstance(leaf, Lazy):
        assert isinstance(leaf, torch.Tensor)
        return leaf
    node: Any = leaf
    while node.inputs:
        node = node.inputs[0]
    source, fqn = node.op.source, node.op.fqn
    placement = source.placement(fqn)
    holders = placement if not hasattr(placement, "holders") else placement.holders(node.spec.shape)
    mine = source.local(fqn)
    every: list[Any] = [None] * world
    dist.all_gather_object(every, None if mine is None else mine.clone())
    flat = torch.full(node.spec.shape, float("nan"), dtype=node.spec.dtype)
    for ((start,), (size,)), ranks in holders:
        flat[start : start + size] = every[ranks[0]][:size]
    return replayed(leaf, flat)


def replayed(leaf: Any, origin: torch.Tensor) -> torch.Tensor:
    if not leaf.inputs:
        return origin
    made: torch.Tensor = leaf.op.eager(replayed(leaf.inputs[0], origin))
    return made


SETUPS = [
    (2, "FULL_SHARD", True),
    (2, "FULL_SHARD", False),
    (4, "SHARD_GRAD_OP", True),
    (4, "SHARD_GRAD_OP", False),
    (2, "NO_SHARD", True),
    (2, "NO_SHARD", False),
    (4, "HYBRID_SHARD", True),
    (4, "HYBRID_SHARD", False),
]


@pytest.mark.parametrize("case", ["Adam", "SGD(momentum)", "NAdam", "SGD"])
@pytest.mark.parametrize("world, strategy, orig", SETUPS)
def test_flat_states_are_read_written_and_templated(case: str, world: int, strategy: str, orig: bool) -> None:
    make: Callable[[str, int], OptimState] = (lambda c, n: reference(c, n)[0]) if orig else one_group
    state, later, first = make(case, 2), make(case, 3), make(case, 1)

    def run(rank: int) -> None:
        options: dict[str, Any] = {}
        if strategy == "HYBRID_SHARD":
            options["device_mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = flattened(orig, strategy, **options)
        optimizer = flat_optimizer(case, model, orig)
        step_flat(model, optimizer, range(2))
        modules = read_modules(model)
        before = told_all(model, [optimizer])
        read = read_optimizers(modules, optimizer)
        assert told_all(model, [optimizer]) == before
        check_same(read, state, world)

        template = template_of(modules, optimizer)
        assert told_all(model, [optimizer]) == before
        for slot, column in template.slots.items():
            assert list(column) == list(read.slots[slot])
            assert all(spec_of(column[fqn]) == spec_of(read.slots[slot][fqn]) for fqn in column)

        for steps in (0, 1):  # fresh, and into what is there
            other = flattened(orig, strategy, **options)
            fresh = flat_optimizer(case, other, orig)
            step_flat(other, fresh, range(steps))
            copy_flat(model, other)
            fresh_modules = read_modules(other)
            assert check_write(state, fresh_modules, fresh, require="listed") == []
            done = delivered(state, fresh_modules, fresh, rank)
            write_optimizers(done, fresh_modules, fresh, require="listed", adopt=True, dtype="source")
            assert told_optimizer(fresh) == told_optimizer(optimizer)
            step_flat(other, fresh, range(2, 3))
            check_same(read_optimizers(read_modules(other), fresh), later, world)

        untouched = flattened(orig, strategy, **options)
        started = flat_optimizer(case, untouched, orig)
        modules = read_modules(untouched)
        whole = make_template(case, orig)
        done = delivered(whole, modules, started, rank)
        write_optimizers(done, modules, started, require="listed", adopt=True, dtype="source")
        step_flat(untouched, started, range(1))
        check_same(read_optimizers(modules, started), first, world)

    run_ranks(run, world, timeout=120)


def make_template(case: str, orig: bool) -> OptimState:
    model = Small()
    params = dict(model.named_parameters())
    made = two_groups(case, params) if orig else by_name(case).make([params[name] for name in SHAPES])
    return template_of(read_modules(model), made)


def copy_flat(model: Any, other: Any) -> None:
    """Give a model the shards of another one."""
    from fdsd.comms.modules import memory_of

    sources, targets = read_modules(model).tensors, read_modules(other).tensors
    with torch.no_grad():
        for fqn, live in targets.items():
            memory_of(live).copy_(memory_of(sources[fqn]))


def check_same(read: OptimState, expected: OptimState, world: int) -> None:
    """Compare with the state of one process; a rank has no state for what it does not hold."""
    assert {fqn for group in read.groups for fqn in group.fqns} == set(expected.fqns)
    options = [dict(group.options) for group in expected.groups]
    assert [dict(group.options) for group in read.groups] == options
    assert set(read.slots) <= set(expected.slots)
    for slot, column in expected.slots.items():
        for fqn, value in column.items():
            mine: Any = read.slots[slot][fqn] if slot in read.slots and fqn in read.slots[slot] else None
            kinds: list[Any] = [None] * world
            dist.all_gather_object(kinds, type(mine).__name__)
            assert set(kinds) != {"NoneType"}
            if value.ndim == 0:
                assert mine is None or told(mine) == told(value)
            elif mine is not None and "NoneType" not in kinds:
                assert told(gathered(mine, world)) == told(value)
            elif mine is not None:
                node = mine
                while node.inputs:
                    node = node.inputs[0]
                begin = next(box[0][0] for box, ranks in node.op.source.placement("flat") if dist.get_rank() in ranks)
                local = node.op.source.local("flat")
                assert told(local) == told(value.reshape(-1)[begin : begin + local.numel()])
                assert told(mine.spec.shape) == told(tuple(value.shape))


def test_parameters_of_one_flat_parameter_share_what_is_no_tensor() -> None:
    state = one_group("Adam", 2)

    def run(rank: int) -> None:
        model = flattened(False)
        adam = torch.optim.Adam(model.parameters())
        modules = read_modules(model)
        done = delivered(state, modules, adam, rank)
        steps = {**done.slots["step"], "c": torch.tensor(9.0)}
        wrong = done.replace(slots={**done.slots, "step": steps})
        with pytest.raises(
            SpecMismatch, match=r"'step' is tensor\(2.\) for 'c' and|'step' is .* one parameter to FSDP"
        ):
            write_optimizers(wrong, modules, adam, require="listed")
        assert len(adam.state) == 0
        whole = done.replace(slots={**done.slots, "exp_avg": state.slots["exp_avg"]})
        with pytest.raises(
            SpecMismatch, match=r"'exp_avg' of 'a.weight' has the shape \(5, 3\) and should be this rank's"
        ):
            write_optimizers(whole, modules, adam, require="listed")

    run_ranks(run, 2)


def test_options_of_one_flat_parameter_may_not_differ() -> None:
    def run(rank: int) -> None:
        model = flattened(False)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        groups = [ParamGroup(("a.weight", "a.bias"), {"lr": 0.2}), ParamGroup(("b.weight", "c"), {"lr": 0.3})]
        with pytest.raises(SpecMismatch, match=r"'lr' is 0.3 for 'b.weight' and 0.2 for 'a.weight'"):
            write_optimizers(OptimState({}, groups), read_modules(model), sgd)
        assert sgd.param_groups[0]["lr"] == 0.1

    run_ranks(run, 2)


def test_state_that_is_not_like_the_shard_is_refused() -> None:
    def run(rank: int) -> None:
        for orig in (False, True):
            model = flattened(orig)
            sgd = torch.optim.SGD(model.parameters(), lr=0.1)
            param = next(p for p in model.parameters() if p.numel())
            sgd.state[param]["block"] = torch.ones(2, 2)
            with pytest.raises(Unsupported, match=r"'block' of '.*' has the shape \(2, 2\)"):
                read_optimizers(read_modules(model), sgd)

    run_ranks(run, 2)


def test_fresh_flat_slots_are_delivered_into_one_tensor() -> None:
    state = one_group("Adam", 2)

    def run(rank: int) -> None:
        model = flattened(False)
        adam = torch.optim.Adam(model.parameters())
        modules = read_modules(model)
        targets = slot_targets(modules, adam, state)
        done = delivered(state, modules, adam, rank)
        write_optimizers(done, modules, adam, require="listed", adopt=True, dtype="source")
        [row] = adam.state.values()
        bases = {id(done.slots["exp_avg"][fqn]._base) for fqn in SHAPES if done.slots["exp_avg"].get(fqn) is not None}
        assert id(row["exp_avg"]) in bases
        assert {target.is_flat for (slot, _), target in targets.items() if slot == "exp_avg"} == {True}
        assert {target.is_flat for (slot, _), target in targets.items() if slot == "step"} == {False}

    run_ranks(run, 2)
