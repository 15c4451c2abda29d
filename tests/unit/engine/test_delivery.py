"""Deliveries over ranks as threads: agreement, ties, overwriting, rounds, closing early, failures."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from fdsd.algebra.apply import apply, defer_leaf
from fdsd.algebra.lazy import Lazy
from fdsd.algebra.memory import MemorySource
from fdsd.algebra.ops import Call, Concat, Origin, Permute, Slice, Stack
from fdsd.data.errors import FdsdError, RankDisagreement, SpecMismatch, Unsupported
from fdsd.data.protocols import Piece
from fdsd.data.region import Region
from fdsd.data.spec import TensorSpec
from fdsd.data.statedict import StateDict
from fdsd.engine.delivery import Delivery, plan_delivery
from fdsd.engine.failures import RankFailed
from fdsd.engine.messages import Buffers, Window
from fdsd.engine.request import Request
from fdsd.engine.rounds import PROGRAMS
from fdsd.engine.wirings import WIRINGS
from fdsd.layout import Layout, Mesh, Pieces, Replicate, Shard
from fdsd.layout.structure import Limits
from tests.helpers.functions import backwards
from tests.helpers.placed import ShardedTensors, shard
from tests.helpers.tensors import same_bytes
from tests.helpers.worlds import MemoryWorld, run_world

F32 = torch.float32


def rows(num: int, *, first: int = 0) -> Layout:
    return Layout(Mesh({"dp": num}, range(first, first + num)), [Shard(0)])


def only(rank: int) -> Layout:
    return Layout(Mesh({}, [rank]), [])


def different(num: int, *shape: int) -> dict[str, torch.Tensor]:
    count = torch.Size(shape).numel()
    return {f"t{i}": torch.arange(i * count, (i + 1) * count, dtype=F32).reshape(shape) for i in range(num)}


def sources(tensors: Mapping[str, torch.Tensor], layout: Layout | Pieces, rank: int) -> dict[str, Lazy]:
    source = shard(tensors, dict.fromkeys(tensors, layout), rank)
    return {name: source.lazy(name) for name in tensors}


def got(delivery: Delivery) -> dict[str, torch.Tensor]:
    return dict(delivery.run())


def same(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    return list(a) == list(b) and all(same_bytes(a[name], b[name]) for name in b)


def errors_of(fn: Callable[[MemoryWorld], Any], ranks: int) -> list[BaseException]:
    return run_world(fn, ranks, expect_errors=True)


class FileLike:
    """A source that is no memory: it has to be read, and counts what is."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._memory = MemorySource(tensors)
        self.elements = 0

    def specs(self) -> StateDict[TensorSpec]:
        return self._memory.specs()

    def pieces(self, fqn: str) -> Sequence[Piece]:
        return self._memory.pieces(fqn)

    def read(self, fqn: str, region: Region, out: torch.Tensor) -> None:
        self.elements += region.numel
        self._memory.read(fqn, region, out)

    def lazy(self, fqn: str) -> Lazy:
        spec = self.specs()[fqn]
        return Lazy(Origin(self, fqn, spec), (), [spec])


# -- agreement -----------------------------------------------------------------------------------------------------


def test_equal_statements_send_no_metadata() -> None:
    """Two agreements: a digest before, and how it went behind; nothing of the names travels."""
    tensors = different(50, 4, 3)

    def rank_of(world: MemoryWorld) -> int:
        lazy = sources(tensors, rows(2), world.rank)
        assert same(got(plan_delivery({n: Request(x, None) for n, x in lazy.items()}, world)), tensors)
        assert world.agreements == 2
        return max(len(pickle.dumps(one)) for one in world.statements)

    assert max(run_world(rank_of, 2)) < 100


def test_names_that_differ_by_rank_form_a_union() -> None:
    """Pipeline stages: each rank holds its own layers, and all want all; rank 0's names come first."""
    tensors = different(4, 3)
    stages = {0: ["t1", "t0"], 1: ["t2", "t3"]}

    def rank_of(world: MemoryWorld) -> dict[str, torch.Tensor]:
        mine = {n: tensors[n] for n in stages[world.rank]}
        lazy = sources(mine, only(world.rank), world.rank)
        delivery = plan_delivery({n: Request(x, None) for n, x in lazy.items()}, world)
        assert delivery.names == ("t1", "t0", "t2", "t3")
        assert delivery.traffic().received == {0: 24, 1: 24}
        return got(delivery)

    for found in run_world(rank_of, 2):
        assert same(found, {n: tensors[n] for n in ("t1", "t0", "t2", "t3")})


def test_only_those_that_request_a_name_get_it() -> None:
    tensors = different(2, 3)

    def rank_of(world: MemoryWorld) -> list[str]:
        lazy = sources({"t0": tensors["t0"]}, only(0), world.rank)
        requests = {"t0": Request(lazy["t0"], None, everyone=False)} if world.rank < 2 else {}
        return list(got(plan_delivery(requests, world)))

    assert run_world(rank_of, 3) == [["t0"], ["t0"], []]


def test_the_same_names_in_other_orders_are_matched_by_name() -> None:
    tensors = different(5, 4, 2)

    def rank_of(world: MemoryWorld) -> dict[str, torch.Tensor]:
        lazy = sources(tensors, rows(2), world.rank)
        order = list(lazy) if world.rank == 0 else list(lazy)[::-1]
        return got(plan_delivery({n: Request(lazy[n], None) for n in order}, world))

    for found in run_world(rank_of, 2):
        assert same(found, tensors)


def test_one_rank_has_the_data_and_all_want_shards() -> None:
    """Broadcasting: the other ranks know where they want a tensor, and not what it is."""
    tensors = different(6, 5, 3)

    def rank_of(world: MemoryWorld) -> tuple[dict[str, torch.Tensor], int]:
        outs = {n: torch.zeros(rows(2).local_shape((5, 3), world.rank)) for n in tensors}
        requests = {
            n: Request(defer_leaf(x) if world.rank == 0 else None, rows(2), out=outs[n]) for n, x in tensors.items()
        }
        found = got(plan_delivery(requests, world))
        assert all(found[n] is outs[n] for n in tensors)
        return found, world.received

    (first, none), (second, some) = run_world(rank_of, 2)
    assert none == 0 and some <= 6 * 32
    for i, found in enumerate((first, second)):
        assert same(found, {n: x[3 * i : 3 * i + 3] for n, x in tensors.items()})


def test_tensors_that_ranks_hold_whole_do_not_travel() -> None:
    tensors = different(3, 4)

    def rank_of(world: MemoryWorld) -> int:
        found = got(plan_delivery({n: Request(defer_leaf(x), rows(2)) for n, x in tensors.items()}, world))
        assert same(found, {n: x[2 * world.rank : 2 * world.rank + 2] for n, x in tensors.items()})
        return world.received

    assert run_world(rank_of, 2) == [0, 0]


def test_sources_that_are_no_memory_are_read_by_each_rank_itself() -> None:
    """As files are: each rank reads what it needs, and no more."""
    tensors = different(3, 6, 2)

    def rank_of(world: MemoryWorld) -> tuple[int, int]:
        source = FileLike(tensors)
        found = got(plan_delivery({n: Request(source.lazy(n), rows(3)) for n in tensors}, world))
        assert same(found, {n: x[2 * world.rank : 2 * world.rank + 2] for n, x in tensors.items()})
        return world.received, source.elements

    assert run_world(rank_of, 3) == [(0, 12)] * 3


def test_a_file_that_one_rank_has_is_sent_to_the_others() -> None:
    tensors = different(3, 6, 2)

    def rank_of(world: MemoryWorld) -> dict[str, torch.Tensor]:
        source = FileLike(tensors)
        return got(plan_delivery({n: Request(source.lazy(n)) for n in tensors} if world.rank == 1 else {}, world))

    for found in run_world(rank_of, 3):
        assert same(found, tensors)


def test_copies_on_several_meshes_are_one_tensor() -> None:
    """One copy for each submesh: their holders are merged, and nobody gets what it has."""
    tensors = different(2, 6, 2)

    def rank_of(world: MemoryWorld) -> int:
        layout = rows(2) if world.rank < 2 else rows(3, first=2)
        lazy = sources(tensors, layout, world.rank)
        found = got(plan_delivery({n: Request(x) for n, x in lazy.items()}, world))
        assert same(found, tensors)
        return world.received

    received = run_world(rank_of, 5)
    assert all(count >= 2 * 24 for count in received[:2]) and all(count >= 2 * 32 for count in received[2:])


def test_unequal_specs_are_the_same_error_on_all_ranks() -> None:
    def rank_of(world: MemoryWorld) -> None:
        tensors = {"a": torch.zeros(3), "b": torch.zeros(2 + (world.rank == 2)), "c": torch.zeros(1)}
        plan_delivery({n: Request(defer_leaf(x)) for n, x in tensors.items()}, world)

    errors = errors_of(rank_of, 3)
    assert {type(error) for error in errors} == {RankDisagreement}
    assert {str(error) for error in errors} == {
        "The ranks state different things of 'b' (ranks 0, 1: float32[2]; rank 2: float32[3])."
    }


def test_other_operations_on_a_rank_are_refused() -> None:
    def rank_of(world: MemoryWorld) -> None:
        x = defer_leaf(torch.arange(4.0).reshape(2, 2))
        plan_delivery({"w": Request(apply(Permute((1, 0)), x) if world.rank else x)}, world)

    told = {str(error) for error in errors_of(rank_of, 2)}
    assert len(told) == 1
    assert "made of other operations" in told.pop()


def test_a_rank_that_does_not_know_what_it_holds() -> None:
    """Absent outside of its mesh is no conflict; within it is one."""
    tensors = different(2, 4)

    def rank_of(world: MemoryWorld) -> None:
        lazy = sources(tensors, rows(2), world.rank)
        names = ["t0", "t1"] if world.rank != 1 else ["t0"]
        plan_delivery({n: Request(lazy[n], only(0)) for n in names}, world)

    errors = errors_of(rank_of, 3)
    assert {type(error) for error in errors} == {RankDisagreement}
    assert len({str(error) for error in errors}) == 1
    assert "'t1'" in str(errors[0]) and "rank 1 should hold" in str(errors[0])


def test_what_nobody_has() -> None:
    def rank_of(world: MemoryWorld) -> None:
        plan_delivery({"w": Request(None, rows(2))}, world)

    errors = errors_of(rank_of, 2)
    assert {type(error) for error in errors} == {RankDisagreement}
    assert str(errors[0]) == "'w': no rank of the group has it."


def test_layouts_over_ranks_outside_of_the_group() -> None:
    """What ranks of the group do not hold cannot come."""
    tensors = different(1, 6)

    def rank_of(world: MemoryWorld) -> None:
        lazy = sources(tensors, rows(3), world.rank)
        plan_delivery({n: Request(x) for n, x in lazy.items()}, world)

    errors = errors_of(rank_of, 2)
    assert {type(error) for error in errors} == {SpecMismatch}
    assert "'t0' (float32[6]): no rank of the group holds" in str(errors[0])


def test_layouts_that_differ_by_rank_are_told_where_elements_are_missing() -> None:
    tensors = different(1, 4, 6)
    layouts = [rows(2), Layout(Mesh({"dp": 2}), [Shard(1)])]

    def rank_of(world: MemoryWorld) -> None:
        lazy = sources(tensors, layouts[world.rank], world.rank)
        plan_delivery({n: Request(x) for n, x in lazy.items()}, world)

    errors = errors_of(rank_of, 2)
    assert {type(error) for error in errors} == {RankDisagreement}
    (text,) = {str(error) for error in errors}
    assert text.startswith("'t0' (float32[4, 6]): no rank of the group holds 6 elements of it")
    assert f"different layouts of it (rank 0: {layouts[0]}; rank 1: {layouts[1]})" in text


def test_an_error_before_is_the_error_of_all() -> None:
    def rank_of(world: MemoryWorld) -> None:
        error = SpecMismatch("a bad argument") if world.rank == 1 else None
        plan_delivery({} if error else {"w": Request(defer_leaf(torch.ones(2)))}, world, error=error)

    errors = errors_of(rank_of, 3)
    assert [(type(error), str(error)) for error in errors] == [(SpecMismatch, "rank 1: a bad argument")] * 3
    assert isinstance(errors[1].__cause__, SpecMismatch)


def test_an_error_of_all_is_told_as_in_one_process() -> None:
    def rank_of(world: MemoryWorld) -> None:
        plan_delivery({"w": Request(defer_leaf(torch.ones(2)), dtype=torch.float32, target=rows(2, first=0))}, world,
                      error=Unsupported("no such thing"))  # fmt: skip

    assert [str(error) for error in errors_of(rank_of, 2)] == ["no such thing"] * 2


def test_memory_of_another_shape_is_told_before_anything_is_written() -> None:
    outs = [torch.zeros(2), torch.zeros(3)]

    def rank_of(world: MemoryWorld) -> None:
        plan_delivery({"w": Request(defer_leaf(torch.ones(4)), rows(2), out=outs[world.rank])}, world)

    errors = errors_of(rank_of, 2)
    assert {type(error) for error in errors} == {SpecMismatch}
    assert "rank 1: the memory to write to has the shape (3,)" in str(errors[0]) and "'w'" in str(errors[0])
    assert not outs[0].any()


def test_functions_that_cannot_be_pickled() -> None:
    """They matter only if the very expression has to travel: other names that differ, or their order, do not."""
    lasts = [torch.ones(1), torch.arange(1.0, 5.0)]

    def rank_of(world: MemoryWorld, uneven: str) -> dict[str, torch.Tensor]:
        x = sources({"x": torch.arange(4.0)}, only(0) if uneven == "lacks" else rows(2), world.rank)["x"]
        requests = {"w": Request(apply(Call(lambda a: a + 1, (TensorSpec((4,), F32),)), x))}
        if world.rank and uneven == "has more":
            requests = {"v": Request(defer_leaf(torch.ones(1))), **requests}
        if world.rank and uneven == "lacks":
            requests = {}
        if uneven == "order":
            requests["v"] = Request(defer_leaf(torch.ones(1)))
            requests = {n: requests[n] for n in (["w", "v"] if world.rank else ["v", "w"])}
        return got(plan_delivery(requests, world))

    for found in run_world(lambda world: rank_of(world, "no"), 2):
        assert same(found, {"w": torch.arange(1.0, 5.0)})
    for found in run_world(lambda world: rank_of(world, "has more"), 2):
        assert same(found, dict(zip(["w", "v"], lasts[::-1], strict=True)))
    for found in run_world(lambda world: rank_of(world, "order"), 2):
        assert same(found, dict(zip(["v", "w"], lasts, strict=True)))
    errors = errors_of(lambda world: rank_of(world, "lacks"), 2)
    assert {type(error) for error in errors} == {Unsupported}
    assert len({str(error) for error in errors}) == 1
    assert "'w'" in str(errors[0]) and "cannot be pickled" in str(errors[0])


def test_ranks_that_do_not_know_a_computed_tensor_get_it() -> None:
    """The expression itself travels to them, and their share of the sources."""
    tensor = torch.arange(6.0).reshape(2, 3)

    def rank_of(world: MemoryWorld) -> dict[str, torch.Tensor]:
        if world.rank == 2:
            return got(plan_delivery({}, world))
        x = sources({"x": tensor}, rows(2), world.rank)["x"]
        return got(plan_delivery({"w": Request(apply(Call(backwards, (TensorSpec((2, 3), F32),)), x))}, world))

    for found in run_world(rank_of, 3):
        assert same(found, {"w": backwards(tensor)})


# -- what travels ----------------------------------------------------------------------------------------------------


def test_tied_names_are_delivered_once() -> None:
    tensors = different(1, 8)

    def rank_of(world: MemoryWorld) -> int:
        x = sources(tensors, rows(2), world.rank)["t0"]
        found = got(plan_delivery({"embed": Request(x), "other": Request(x, only(0)), "head": Request(x)}, world))
        assert found["head"] is found["embed"]
        assert ("other" in found) == (world.rank == 0)
        return world.received

    assert run_world(rank_of, 2) == [32, 16]


def test_tied_names_across_rounds() -> None:
    tensors = different(6, 8)

    def rank_of(world: MemoryWorld) -> None:
        lazy = sources(tensors, rows(2), world.rank)
        requests = {n: Request(x) for n, x in lazy.items()}
        requests["head"] = requests["t0"]
        found = got(plan_delivery(requests, world, budget=1))
        assert list(found) == [*tensors, "head"]
        assert found["head"] is found["t0"]
        assert same(found, {**tensors, "head": tensors["t0"]})

    run_world(rank_of, 2)


def test_ties_that_only_one_rank_sees_are_no_ties() -> None:
    """Each rank gets what it asked for, and all plan the same."""
    tensors = different(1, 8)

    def rank_of(world: MemoryWorld) -> bool:
        first, second = (sources(tensors, rows(2), world.rank)["t0"] for _ in range(2))
        found = got(plan_delivery({"a": Request(first), "b": Request(first if world.rank else second)}, world))
        assert same(found, {"a": tensors["t0"], "b": tensors["t0"]})
        return found["a"] is found["b"]

    assert run_world(rank_of, 2) == [False, False]


def test_a_region_that_is_used_twice_travels_once() -> None:
    tensor = torch.arange(8.0).reshape(4, 2)

    def rank_of(world: MemoryWorld) -> int:
        x = sources({"x": tensor}, rows(2), world.rank)["x"]
        delivery = plan_delivery({"w": Request(apply(Concat(0), x, x, x), only(0))}, world)
        assert delivery.traffic() == ({0: 16}, {1: 16})
        found = got(delivery)
        assert not world.rank or not found
        assert world.rank or same(found, {"w": torch.cat([tensor] * 3)})
        return world.received

    assert run_world(rank_of, 2) == [16, 0]


def test_only_what_is_wanted_travels_through_a_pipeline() -> None:
    """Each rank pulls its shard of experts that are stacked and transposed from the ranks that hold them."""
    tensors = different(4, 6, 4)

    def rank_of(world: MemoryWorld) -> int:
        lazy = [sources({n: x}, only(i % 2), world.rank)[n] for i, (n, x) in enumerate(tensors.items())]
        node = apply(Permute((0, 2, 1)), apply(Stack(0), *lazy))
        target = Layout(Mesh({"ep": 2}), [Shard(0)])
        found = got(plan_delivery({"w": Request(node, target)}, world))
        whole = torch.stack(list(tensors.values())).permute(0, 2, 1)
        assert same(found, {"w": whole[2 * world.rank : 2 * world.rank + 2]})
        return world.received

    assert run_world(rank_of, 2) == [96, 96]


def test_the_narrower_dtype_travels() -> None:
    tensors = different(1, 8)

    def rank_of(world: MemoryWorld) -> int:
        x = sources(tensors, only(0), world.rank)["t0"]
        found = got(plan_delivery({"w": Request(x, only(1), dtype=torch.bfloat16)}, world))
        assert world.rank == 0 or same(found, {"w": tensors["t0"].bfloat16()})
        return world.received

    assert run_world(rank_of, 2) == [0, 16]


def test_big_tensors_go_straight_into_place() -> None:
    """No buffer is made for what is contiguous on both sides."""
    tensors = different(3, 64, 64)

    real: list[int] = []

    def counted(world: MemoryWorld) -> None:
        lazy = sources(tensors, rows(2), world.rank)
        delivery = plan_delivery({n: Request(x) for n, x in lazy.items()}, world, limits=Limits(64, 4096))
        take = Buffers.take
        if world.rank == 0:
            Buffers.take = lambda self, n: real.append(n) or take(self, n)  # type: ignore[method-assign]
        try:
            assert same(got(delivery), tensors)
        finally:
            if world.rank == 0:
                Buffers.take = take  # type: ignore[method-assign]

    run_world(counted, 2)
    assert real == []


# -- overwriting -----------------------------------------------------------------------------------------------------


def test_swapped_layers_are_written_in_place() -> None:
    """What is overwritten before it is read is copied first, on every rank."""
    tensors = different(4, 6, 2)
    names = list(tensors)

    def rank_of(world: MemoryWorld, window: Window, budget: int | None) -> None:
        source = shard(tensors, dict.fromkeys(tensors, rows(2)), world.rank)
        outs = {n: source.local(n) for n in names}
        turned = {n: Request(source.lazy(names[(i + 1) % 4]), rows(2), out=outs[n]) for i, n in enumerate(names)}
        found = got(plan_delivery(turned, world, budget=budget, window=window))
        part = slice(3 * world.rank, 3 * world.rank + 3)
        assert same(found, {n: tensors[names[(i + 1) % 4]][part] for i, n in enumerate(names)})
        assert all(found[n] is outs[n] for n in names)

    for window in (Window(1, 1), Window()):
        for budget in (None, 1):
            run_world(lambda world, w=window, b=budget: rank_of(world, w, b), 2)


def test_a_transposed_tensor_is_written_in_place() -> None:
    """Its parts come from all ranks, into the memory that they come from."""
    tensor = torch.arange(16.0).reshape(4, 4)

    def rank_of(world: MemoryWorld) -> None:
        source = shard({"x": tensor}, {"x": rows(2)}, world.rank)
        out = source.local("x")
        got(plan_delivery({"x": Request(apply(Permute((1, 0)), source.lazy("x")), rows(2), out=out)}, world))
        assert out is not None and same_bytes(out, tensor.t()[2 * world.rank : 2 * world.rank + 2])

    run_world(rank_of, 2)


def test_what_lies_where_it_is_wanted_is_left_alone() -> None:
    """Nothing is copied, and nothing is written."""
    tensors = different(3, 4)

    def rank_of(world: MemoryWorld) -> None:
        source = shard(tensors, dict.fromkeys(tensors, rows(2)), world.rank)
        outs = {n: source.local(n) for n in tensors}
        before = {n: x._version for n, x in outs.items() if x is not None}
        found = got(plan_delivery({n: Request(source.lazy(n), rows(2), out=outs[n]) for n in tensors}, world))
        assert all(found[n] is outs[n] and x._version == before[n] for n, x in outs.items() if x is not None)

    run_world(rank_of, 2)


def test_swapped_layers_in_one_process() -> None:
    x, y = torch.arange(3.0), torch.arange(3.0, 6.0)
    a, b = (shard({"w": w}, {"w": only(0)}, 0) for w in (x, y))
    outs = a.local("w"), b.local("w")
    plan = plan_delivery({"x": Request(b.lazy("w"), out=outs[0]), "y": Request(a.lazy("w"), out=outs[1])}, None)
    assert same(got(plan), {"x": torch.arange(3.0, 6.0), "y": torch.arange(3.0)})


# -- rounds ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1, 100, 1000, None])
def test_any_budget(budget: int | None) -> None:
    tensors = different(12, 5, 4)

    def rank_of(world: MemoryWorld) -> int:
        lazy = sources(tensors, rows(2), world.rank)
        assert same(got(plan_delivery({n: Request(x) for n, x in lazy.items()}, world, budget=budget)), tensors)
        return world.agreements

    rounds = {1: 12, 100: 12, 1000: 2, None: 1}[budget]
    assert run_world(rank_of, 2) == [2 * rounds] * 2


def test_a_round_holds_no_more_than_the_budget() -> None:
    """What has been given and let go of is not kept."""
    import weakref

    tensors = different(20, 8, 8)

    def rank_of(world: MemoryWorld) -> int:
        lazy = sources(tensors, rows(2), world.rank)
        alive: list[weakref.ref[torch.Tensor]] = []
        most = 0
        for _, value in plan_delivery({n: Request(x) for n, x in lazy.items()}, world, budget=4 * 256).run():
            alive = [ref for ref in alive if ref() is not None] + [weakref.ref(value)]
            most = max(most, len(alive))
            del value
        return most

    assert max(run_world(rank_of, 2)) <= 2


def test_closing_early_on_one_rank_ends_it_on_all() -> None:
    """The others finish the round that they are in."""
    tensors = different(10, 4)

    def rank_of(world: MemoryWorld) -> list[str]:
        lazy = sources(tensors, rows(3), world.rank)
        seen: list[str] = []
        run = plan_delivery({n: Request(x) for n, x in lazy.items()}, world, budget=64).run()
        for name, _ in run:
            seen.append(name)
            if world.rank == 1 and name == "t4":
                run.close()
                break
        return seen

    first, closed, last = run_world(rank_of, 3)
    assert closed == ["t0", "t1", "t2", "t3", "t4"]
    assert first == last == ["t0", "t1", "t2", "t3", "t4", "t5"][: len(first)] and len(first) < 10


def test_closing_in_the_last_round_needs_no_word() -> None:
    tensors = different(4, 4)

    def rank_of(world: MemoryWorld) -> int:
        lazy = sources(tensors, rows(2), world.rank)
        run = plan_delivery({n: Request(x) for n, x in lazy.items()}, world).run()
        if world.rank == 0:
            next(run)
            run.close()
            return 1
        return len(dict(run))

    assert run_world(rank_of, 2) == [1, 4]


def test_a_hundred_deliveries_plan_once() -> None:
    tensors = different(6, 4, 2)
    WIRINGS.clear()
    PROGRAMS.clear()

    def rank_of(world: MemoryWorld) -> None:
        for _ in range(100):
            lazy = sources(tensors, rows(2), world.rank)
            node = {n: apply(Permute((1, 0)), x) for n, x in lazy.items()}
            for _ in plan_delivery({n: Request(x) for n, x in node.items()}, world, budget=100).run():
                pass

    before = WIRINGS.info()
    run_world(rank_of, 2)
    after = WIRINGS.info()
    assert after.size == 1
    assert after.misses - before.misses <= 2  # two threads may both find that there is none
    assert after.hits + after.misses - before.hits - before.misses == 200


def test_plans_are_forgotten_at_last() -> None:
    from fdsd.engine.agreement import Key
    from fdsd.engine.wirings import Wirings
    from fdsd.layout.expression import Expression

    wirings = Wirings(most=3)
    for size in (1, 2, 3, 1, 4):
        key = Key(Expression.of(TensorSpec((size,), F32)), (None,), None, True, F32)
        wirings.get(((key, (0, 1)),), (0, 1), Limits())
    assert (wirings.info().hits, wirings.info().misses, wirings.info().size) == (1, 4, 3)


# -- failures --------------------------------------------------------------------------------------------------------


class Refusing(ShardedTensors):
    """A source whose second rank raises when the tensor ``t2`` is asked for."""

    failure: Exception = ValueError("bad sector")

    def local(self, fqn: str) -> torch.Tensor | None:
        if fqn == "t2" and self._rank == 1:
            raise self.failure
        return super().local(fqn)


@pytest.mark.parametrize("limit", [Limits(), Limits(0, 64)])
@pytest.mark.parametrize("budget", [None, 1, 300])
def test_a_rank_whose_read_raises(limit: Limits, budget: int | None) -> None:
    """It goes on with its messages, and all raise the same error; nothing that is wrong has been given."""
    tensors = different(6, 4, 4)

    def rank_of(world: MemoryWorld) -> None:
        good = shard(tensors, dict.fromkeys(tensors, rows(3)), world.rank)
        bad = Refusing(good.specs(), dict.fromkeys(tensors, rows(3)), {n: good.local(n) for n in tensors}, world.rank)
        requests = {n: Request(bad.lazy(n)) for n in tensors}
        for name, value in plan_delivery(requests, world, budget=budget, limits=limit).run():
            assert same_bytes(value, tensors[name])

    errors = errors_of(rank_of, 3)
    assert {(type(error), str(error)) for error in errors} == {(RankFailed, "rank 1: 't2': ValueError: bad sector")}
    assert isinstance(errors[1].__cause__, ValueError) and errors[0].__cause__ is None


@pytest.mark.parametrize("failure, kind", [(SpecMismatch("odd"), SpecMismatch), (OSError("gone"), FdsdError)])
def test_the_class_of_an_error_is_kept(failure: Exception, kind: type[FdsdError]) -> None:
    tensors = different(3, 4)

    def rank_of(world: MemoryWorld) -> None:
        good = shard(tensors, dict.fromkeys(tensors, rows(2)), world.rank)
        bad = Refusing(good.specs(), dict.fromkeys(tensors, rows(2)), {n: good.local(n) for n in tensors}, world.rank)
        bad.failure = failure
        got(plan_delivery({n: Request(bad.lazy(n)) for n in tensors}, world))

    errors = errors_of(rank_of, 2)
    assert all(isinstance(error, kind) and isinstance(error, type(failure)) for error in errors)
    assert str(errors[0]) == str(errors[1])


def test_a_function_that_raises_on_one_rank() -> None:
    tensor = torch.arange(4.0)

    def rank_of(world: MemoryWorld) -> None:
        def fails(x: torch.Tensor) -> torch.Tensor:
            if world.rank == 1:
                raise RuntimeError("not today")
            return x

        x = sources({"x": tensor}, rows(2), world.rank)["x"]
        requests = {"w": Request(apply(Call(fails, (TensorSpec((4,), F32),)), x)), "x": Request(x)}
        got(plan_delivery(requests, world))

    errors = errors_of(rank_of, 2)
    assert {(type(error), str(error)) for error in errors} == {(RankFailed, "rank 1: 'w': RuntimeError: not today")}


def test_a_local_tensor_that_is_not_what_its_layout_says() -> None:
    """Told before any memory outside of it is read."""

    def rank_of(world: MemoryWorld) -> None:
        spec = {"x": TensorSpec((4,), F32)}
        source = ShardedTensors(spec, {"x": rows(2)}, {"x": torch.zeros(1 + world.rank)}, world.rank)
        got(plan_delivery({"x": Request(source.lazy("x"))}, world))

    errors = errors_of(rank_of, 2)
    assert {type(error) for error in errors} == {SpecMismatch}
    assert "rank 0: 'x': the local tensor of its source has torch.float32 and the shape (1,)" in str(errors[1])


def test_no_gradient_is_recorded_and_no_mode_is_left() -> None:
    """A consumer keeps its own gradient mode while it goes through a delivery."""
    w = torch.nn.Parameter(torch.arange(4.0))

    def rank_of(world: MemoryWorld) -> None:
        for _, value in plan_delivery({"w": Request(defer_leaf(w))}, world).run():
            assert torch.is_grad_enabled()
            assert not value.requires_grad

    run_world(rank_of, 2)
    for _, value in plan_delivery({"w": Request(defer_leaf(w))}, None).run():
        assert torch.is_grad_enabled() and not value.requires_grad


# -- one process -----------------------------------------------------------------------------------------------------


def test_one_process_takes_its_shard() -> None:
    x = torch.arange(12.0).reshape(6, 2)
    fused = Layout(Mesh({"tp": 2}), [Shard(0, parts=2)])
    node = apply(Slice(0, 0, 4), defer_leaf(x))
    plan = plan_delivery({"a": Request(node, fused), "b": Request(node, only(0)), "c": Request(node)}, None, rank=1)
    found = got(plan)
    assert list(found) == ["a", "c"]
    assert same(found, {"a": x[[1, 3]], "c": x[:4]})


def test_one_process_without_its_parts() -> None:
    source = shard({"x": torch.arange(4.0)}, {"x": rows(2)}, 0)
    with pytest.raises(FdsdError, match="give group="):
        got(plan_delivery({"x": Request(source.lazy("x"))}, None))


def test_one_process_that_knows_nothing() -> None:
    with pytest.raises(FdsdError, match="Nothing is known of 'x'"):
        plan_delivery({"x": Request(None)}, None)


def test_replicated_tensors_are_here() -> None:
    whole = Layout(Mesh({"dp": 2}), [Replicate()])
    source = shard({"x": torch.arange(4.0)}, {"x": whole}, 1)
    assert same(got(plan_delivery({"x": Request(source.lazy("x"))}, None, rank=1)), {"x": torch.arange(4.0)})


def scaled(x: torch.Tensor, by: float) -> torch.Tensor:
    return x * by


def test_functions_that_have_travelled_are_the_same_functions() -> None:
    """A ``partial`` does not equal its pickled copy."""

    def rank_of(world: MemoryWorld) -> dict[str, torch.Tensor]:
        x = sources({"x": torch.arange(4.0)}, rows(2), world.rank)["x"]
        node = apply(Call(partial(scaled, by=3.0), (TensorSpec((4,), F32),)), x)
        own = {f"own{world.rank}": Request(defer_leaf(torch.ones(1)))}
        return got(plan_delivery({"w": Request(node), **own}, world))

    for found in run_world(rank_of, 2):
        assert same(found, {"w": torch.arange(4.0) * 3, "own0": torch.ones(1), "own1": torch.ones(1)})


@pytest.mark.parametrize("num", [0, 1, 2])
def test_plain_tensors_that_are_swapped_in_place(num: int) -> None:
    """In one process, and over ranks."""

    def swap(world: MemoryWorld | None) -> None:
        tensors = different(3, 4)
        names = list(tensors)
        lazy = {n: defer_leaf(x) for n, x in tensors.items()}
        want = {n: tensors[names[(i + 1) % 3]].clone() for i, n in enumerate(names)}
        turned = {n: Request(lazy[names[(i + 1) % 3]], out=tensors[n]) for i, n in enumerate(names)}
        assert same(got(plan_delivery(turned, world)), want)
        assert same(tensors, want)

    if num:
        run_world(swap, num)
    else:
        swap(None)
