"""Worlds of process groups: who is in them, agreements of any size, messages of any dtype, misuse."""

from __future__ import annotations

import gc
import os
import pickle
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from fdsd.comms.world import GroupWorld, world_of
from fdsd.data.errors import FdsdError, SpecMismatch, Unsupported
from fdsd.data.protocols import World
from tests.helpers.ranks import run_ranks, store_of_rank
from tests.helpers.tensors import MOVABLE, name_of, patterns, same_bytes

CPU = torch.device("cpu")


def ours() -> GroupWorld:
    world = world_of(dist.group.WORLD)
    assert isinstance(world, GroupWorld)
    return world


# -- groups ----------------------------------------------------------------------------------------------------------


def test_groups_and_meshes_and_worlds() -> None:
    def fn(rank: int) -> list[Any]:
        from torch.distributed.device_mesh import init_device_mesh

        backwards = dist.new_group([2, 0], sort_ranks=False) if "sort_ranks" in new_group_options() else None
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
        groups: list[Any] = [dist.group.WORLD, mesh["tp"], mesh["pp"], mesh.get_group("tp")]
        worlds = [world_of(group) for group in groups]
        if rank in (0, 2) and backwards is not None:
            worlds.append(world_of(backwards))
        assert all(isinstance(world, World) for world in worlds)
        assert all(world_of(world) is world for world in worlds)
        assert all(world.agree(rank) == list(world.ranks) for world in worlds)
        return [(world.rank, world.ranks, world.device, repr(world)) for world in worlds]

    def new_group_options() -> Any:
        import inspect

        return inspect.signature(dist.new_group).parameters

    for rank, found in enumerate(run_ranks(fn, 4)):
        tp = (rank // 2 * 2, rank // 2 * 2 + 1)
        pp = (rank % 2, rank % 2 + 2)
        expected = [(0, 1, 2, 3), tp, pp, tp]
        assert [(me, ranks, device) for me, ranks, device, _ in found[:4]] == [(rank, r, CPU) for r in expected]
        assert found[0][3] == f"<GroupWorld: rank {rank} of [0, 1, 2, 3], cpu>"
        assert all(set(ranks) == {0, 2} for _, ranks, _, _ in found[4:])


def test_misuse() -> None:
    def fn(rank: int) -> None:
        from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

        named = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "tp"))
        unnamed = DeviceMesh("cpu", [[0, 1]])
        alone = dist.new_group([0])
        mesh_of_one = DeviceMesh("cpu", [0])
        gone = dist.new_group([0, 1])
        dist.destroy_process_group(gone)
        refused: list[tuple[Any, str]] = [
            (
                None,
                r"group=None: give a process group \(torch\.distributed\.group\.WORLD for all ranks\), a Dev",
            ),
            ("WORLD", r"group=<str>: give a process group"),
            (7, r"group=<int>: give a process group"),
            (named, r"the mesh has 2 axes \('pp', 'tp'\), and a group has one\. Give one of them, like mesh\['pp'\]"),
            (unnamed, r"the mesh has 2 axes \(without names\).*like mesh\.get_group\(0\)"),
            (gone, r"group=<ProcessGroup.*>: this process group was destroyed"),
        ]
        if rank == 1:
            refused += [
                (alone, r"rank 1 is not a member of this group\. Call it on the members only"),
                (mesh_of_one, r"rank 1 is not a member of this group"),
            ]
        for group, message in refused:
            with pytest.raises(Unsupported, match=message):
                world_of(group)
        with pytest.raises(Unsupported, match=r"device='xpu:1': the process group has backends for the devices"):
            world_of(dist.group.WORLD, device="xpu:1")
        assert world_of(dist.group.WORLD, device="cpu").device == CPU

    run_ranks(fn, 2)


def test_without_torch_distributed() -> None:
    for group in (None, "WORLD", dist.group.WORLD):
        with pytest.raises(Unsupported, match=r"torch\.distributed is not initialized in this process.*torchrun"):
            world_of(group)


def test_backends_for_several_devices_travel_over_the_cpu() -> None:
    def fn(rank: int) -> list[int]:
        backend = "cpu:gloo,cuda:gloo"
        dist.init_process_group(backend, store=store_of_rank(), rank=rank, world_size=2)
        world = ours()
        assert world.device == CPU
        return world.agree(rank)

    assert run_ranks(fn, 2, init=False) == [[0, 1]] * 2


# -- agreement -------------------------------------------------------------------------------------------------------

SIZES = [0, 1, 480, 500, 504, 505, 600, 5000, 1 << 20]


def test_statements_of_all_sizes() -> None:
    """Around the bytes that fit into one round; equal sizes, and one rank that has much more to say than the others."""

    def statement(rank: int, size: int) -> bytes:
        return bytes([rank]) * size

    def fn(rank: int) -> None:
        world = ours()
        for size in SIZES:
            for other in (size, 0, 1):
                said = [size if r == 1 else other for r in world.ranks]
                assert world.agree(statement(rank, said[rank])) == [statement(r, n) for r, n in enumerate(said)]

    run_ranks(fn, 3)


STATEMENTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=40) | st.binary(max_size=300),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=9), inner, max_size=5),
    max_leaves=30,
)


def test_statements_of_all_kinds() -> None:
    """Ranks are forks, so hypothesis gives the same examples to all of them."""

    def fn(rank: int) -> int:
        world = ours()
        count = 0

        @given(st.lists(STATEMENTS, min_size=3, max_size=3))
        @settings(max_examples=60, database=None)
        def law(statements: list[Any]) -> None:
            nonlocal count
            count += 1
            found = world.agree(statements[rank])
            assert found == statements
            assert [type(value) for value in found] == [type(value) for value in statements]

        law()
        return count

    counts = run_ranks(fn, 3)
    assert len(set(counts)) == 1 and counts[0] >= 50


def test_a_statement_that_cannot_be_pickled_is_refused_on_all_ranks() -> None:
    def fn(rank: int) -> list[int]:
        world = ours()
        with pytest.raises(Unsupported, match=r"statements that cannot be pickled, of ranks 1; of rank 1: .*pickle"):
            world.agree(threading.Lock() if rank == 1 else "fine")
        return world.agree(rank)

    assert run_ranks(fn, 3) == [[0, 1, 2]] * 3


class Refuses:
    """Can be pickled, and not be read again."""

    def __reduce__(self) -> Any:
        return (int, ("no number",))


def test_a_statement_that_cannot_be_read_is_refused() -> None:
    def fn(rank: int) -> list[int]:
        world = ours()
        with pytest.raises(Unsupported, match=r"agree: the statement of rank 1 cannot be read on rank \d: ValueError"):
            world.agree(Refuses() if rank == 1 else "fine")
        return world.agree(rank)

    assert run_ranks(fn, 2) == [[0, 1]] * 2


def test_equal_statements_are_read_once() -> None:
    def fn(rank: int) -> None:
        found = ours().agree(["the same"])
        assert found == [["the same"]] * 3 and found[0] is found[1] is found[2]
        mine = ["the same"]
        assert ours().agree(mine)[rank] is not mine, "what others said and what this rank said are alike"

    run_ranks(fn, 3)


# -- messages --------------------------------------------------------------------------------------------------------


def test_agreements_outlive_the_thread_that_made_them_but_not_their_group() -> None:
    def fn(rank: int) -> list[int]:
        from fdsd.comms.world import _WORKS

        group = dist.new_group([0, 1])
        world = world_of(group)
        counts = [len(_WORKS)]
        for number in range(20):
            world.agree(number)
        counts += [len(_WORKS), len(_WORKS[group])]
        del world
        dist.destroy_process_group(group)
        del group
        gc.collect()
        return [*counts, len(_WORKS)]

    assert run_ranks(fn, 2) == [[0, 1, 8, 0]] * 2


def test_messages_of_every_dtype() -> None:
    dtypes = [dtype for dtype in MOVABLE if dtype is not torch.bool]

    def value(i: int) -> torch.Tensor:
        return patterns((3, 5), dtypes[i], i)

    def fn(rank: int) -> None:
        world = ours()
        if rank == 0:
            pending = [world.send(value(i), 1) for i in range(len(dtypes))]
            for message in pending:
                message.wait()
        else:
            found = [torch.empty((3, 5), dtype=dtype) for dtype in dtypes]
            pending = [world.receive(out, 0) for out in found]
            for message in pending:
                message.wait()
                message.wait()  # again: nothing happens
            for i, out in enumerate(found):
                assert same_bytes(out, value(i)), name_of(dtypes[i])

    run_ranks(fn, 2)


def test_messages_of_every_shape() -> None:
    """No dims, one element with odd strides, views with an offset, parameters; what is empty does not travel."""

    def fn(rank: int) -> None:
        world = ours()
        base = torch.arange(40.0) + 1
        sent = [
            torch.tensor(7.5),
            base.as_strided((1, 1), (3, 9), 4),
            base[5:17].view(3, 4),
            torch.nn.Parameter(base.clone()),
            torch.empty(0, 3),
            base[::40],
        ]
        into = [torch.zeros_like(value) for value in sent]
        into[2] = torch.zeros(40)[7:19].view(3, 4)
        into[3] = torch.nn.Parameter(torch.zeros(40))
        into[5] = torch.zeros(1, 5)[:, 2]
        if rank == 0:
            for value in sent:
                world.send(value, 1).wait()
        else:
            for out in into:
                world.receive(out, 0).wait()
            assert all(same_bytes(a, b) for a, b in zip(sent, into, strict=True))
            assert into[3].requires_grad and into[3].grad_fn is None

    run_ranks(fn, 2)


def test_messages_keep_their_order_in_both_directions() -> None:
    """All pairs at once, posted in one total order; a window of any size is free of deadlock."""

    def fn(rank: int, window: int) -> None:
        world = ours()
        n = len(world.ranks)
        total = [(a, b, k) for k in range(4) for a in range(n) for b in range(n) if a != b]
        pending: list[Any] = []
        found: dict[tuple[int, int, int], torch.Tensor] = {}
        for a, b, k in total:
            if rank == a:
                pending.append(world.send(torch.full((9,), 100 * k + 10 * a + b), b))
            elif rank == b:
                found[a, b, k] = torch.zeros(9, dtype=torch.int64)
                pending.append(world.receive(found[a, b, k], a))
            while len(pending) >= window:
                pending.pop(0).wait()
        for message in pending:
            message.wait()
        assert all((out == 100 * k + 10 * a + b).all() for (a, b, k), out in found.items())

    for window in (1, 2, 100):
        run_ranks(fn, 4, window)


def test_messages_that_cannot_be_sent() -> None:
    def fn(rank: int) -> None:
        world = ours()
        for begin in (world.send, world.receive):
            with pytest.raises(SpecMismatch, match=r"(send to|receive from) rank 5: the other ranks of this group are"):
                begin(torch.ones(2), 5)
            with pytest.raises(SpecMismatch, match=rf"rank {rank}: the other ranks"):
                begin(torch.ones(2), rank)
            with pytest.raises(SpecMismatch, match=r"contiguous memory on cpu.*shape \(3, 2\) and strides \(1, 3\)"):
                begin(torch.ones(2, 3).t(), 1 - rank)
            with pytest.raises(SpecMismatch, match=r"contiguous memory on cpu.*on meta"):
                begin(torch.ones(2, device="meta"), 1 - rank)
        world.agree("still well")

    run_ranks(fn, 2)


def test_other_messages_of_the_group_are_left_alone() -> None:
    """A program that has messages of its own under way in the same group gets them, and we get ours."""

    def fn(rank: int) -> None:
        world = ours()
        theirs, mine = torch.zeros(4), torch.zeros(4)
        if rank == 0:
            work = dist.isend(torch.full((4,), 1.0), 1)
            world.send(torch.full((4,), 2.0), 1).wait()
        else:
            world.receive(mine, 0).wait()
            work = dist.irecv(theirs, 0)
        assert work is not None
        work.wait()
        if rank == 1:
            assert (theirs == 1).all() and (mine == 2).all()

    run_ranks(fn, 2)


def test_errors_can_be_pickled() -> None:
    def fn(rank: int) -> None:
        if rank == 1:
            os._exit(0)
        world = ours()
        world.receive(torch.zeros(3), 1).wait()

    from fdsd.comms import failures

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(failures, "WAIT", 0.5)
        error, _ = run_ranks(fn, 2, expect_errors=True, group_timeout=10)
    assert isinstance(error, FdsdError)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
