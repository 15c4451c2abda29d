"""Making tensors that lie over ranks whole: by name, in any order of keys, on ranks that want them, each byte once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from fdsd.compat._state_dict_utils import _all_gather_sharded_tensor, _gather_state_dict, _iterate_state_dict
from fdsd.errors import RankDisagreement
from tests.helpers.dtensors import StridedShard
from tests.helpers.ranks import run_ranks
from tests.helpers.spreading import counted, sharded, spread
from tests.helpers.tensors import patterns, same_bytes

F32 = torch.float32


CASES: list[tuple[int, tuple[int, ...], tuple[int, ...], list[Any], torch.dtype]] = [
    (2, (2,), (5, 3), [Shard(0)], F32),
    (2, (2,), (3, 5), [Shard(1)], torch.bfloat16),
    (2, (2,), (1, 2), [Shard(0)], torch.int64),  # an empty shard
    (2, (2,), (0, 3), [Shard(0)], F32),
    (2, (2,), (4,), [Replicate()], torch.float8_e4m3fn),
    (2, (2,), (), [Replicate()], F32),
    (3, (3,), (7, 2), [Shard(0)], torch.uint16),
    (3, (3,), (2, 2), [Shard(0)], torch.bool),
    (4, (2, 2), (5, 7), [Shard(0), Shard(1)], F32),
    (4, (2, 2), (7, 3), [Shard(0), Shard(0)], F32),
    (4, (2, 2), (7, 3), [StridedShard(0, 2), Shard(0)], F32),  # uneven FSDP over TP: torch refuses
    (4, (2, 2), (6, 3), [Replicate(), Shard(0)], F32),
    (4, (2, 2), (3, 6), [Shard(1), Replicate()], torch.complex64),
    (4, (1, 4), (9,), [Shard(0), Shard(0)], F32),
]


@pytest.mark.parametrize("n, sizes, shape, placements, dtype", CASES)
def test_the_whole_is_there_again(
    n: int, sizes: tuple[int, ...], shape: tuple[int, ...], placements: list[Any], dtype: torch.dtype
) -> None:
    def run(rank: int) -> None:
        whole = patterns(shape, dtype)
        mesh = init_device_mesh("cpu", sizes)
        tensor = spread(whole, mesh, placements)
        kept = tensor.to_local().clone()
        state = {"w": tensor, "n": ["x", (tensor.detach(),)]}
        for wanted in [(), (0,), (n - 1, 0), tuple(range(n))]:
            for offload in (False, True):
                made = _gather_state_dict(state, ranks_only=wanted, cpu_offload=offload)
                if wanted and rank not in wanted:
                    assert made == {}
                    continue
                assert type(made["w"]) is torch.Tensor and not made["w"].requires_grad
                assert same_bytes(made["w"], whole)
                assert made["n"][0] == "x" and same_bytes(made["n"][1][0], whole)
                assert made["w"].data_ptr() == made["n"][1][0].data_ptr()  # tied tensors stay tied
        assert same_bytes(tensor.to_local(), kept)

    run_ranks(run, n)


def test_names_are_matched_whatever_their_order() -> None:
    """torch mixes the weights silently: it goes by the order of keys."""

    def run(rank: int) -> None:
        mesh = init_device_mesh("cpu", (3,))
        wholes = {name: patterns((7, 2), F32, seed) for seed, name in enumerate("abcde")}
        names = list(wholes)[rank:] + list(wholes)[:rank]
        state = {"m": {name: spread(wholes[name], mesh, [Shard(0)]) for name in names}, "step": rank}
        made = _gather_state_dict(state)
        assert list(made["m"]) == names and made["step"] == rank
        assert all(same_bytes(made["m"][name], wholes[name]) for name in names)

    run_ranks(run, 3)


def test_each_byte_goes_once_to_who_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(rank: int) -> tuple[int, int]:
        mesh = init_device_mesh("cpu", (2, 2))
        wholes = [patterns((8, 4), F32, seed) for seed in range(20)]
        state = {
            str(i): spread(whole, mesh, [Replicate(), Shard(0)] if i % 2 else [Shard(0), Shard(0)])
            for i, whole in enumerate(wholes)
        }
        state["tied"] = state["0"].detach()
        seen = counted(monkeypatch)
        made = _gather_state_dict(state, ranks_only=(1,))
        assert made == {} or all(same_bytes(made[str(i)], whole) for i, whole in enumerate(wholes))
        sent, got = (sum(n for (verb, _), n in seen.items() if verb == way) for way in ("send", "receive"))
        return sent, got

    results = run_ranks(run, 4)
    needed = 10 * 8 * 4 * 4 * 3 // 4 + 10 * 8 * 4 * 4 // 2  # of those in 4 shards 3 are elsewhere, of those in 2 one
    assert [got for _, got in results] == [0, needed, 0, 0]
    assert sum(sent for sent, _ in results) == needed and results[1][0] == 0


def test_a_mesh_meets_by_itself() -> None:
    """Only the ranks of its mesh have to take part in gathering a tensor, as with torch."""

    def run(rank: int) -> None:
        stages = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])]
        whole = patterns((5, 2), F32, rank // 2)
        tensor = spread(whole, stages[rank // 2], [Shard(0)])
        made = _gather_state_dict({f"stage{rank // 2}.w": tensor})
        assert list(made) == [f"stage{rank // 2}.w"] and same_bytes(made[f"stage{rank // 2}.w"], whole)
        if rank < 2:
            assert same_bytes(_gather_state_dict({"w": tensor})["w"], whole)

    run_ranks(run, 4)


def test_a_mesh_of_two_axes_over_some_of_the_ranks() -> None:
    """No process group has exactly its ranks; the second call takes the one that the first has made."""

    def run(rank: int) -> int:
        mesh = DeviceMesh("cpu", [[0, 1], [2, 3]])
        whole = patterns((5, 3), F32)
        if rank == 4:
            return 0
        groups = []
        for _ in range(3):
            made = _gather_state_dict({"w": spread(whole, mesh, [Shard(0), Shard(1)])})
            assert same_bytes(made["w"], whole)
            groups.append(len(dist.distributed_c10d._world.pg_map))
        assert groups[1:] == [groups[0]] * 2
        return 1

    assert run_ranks(run, 5) == [1, 1, 1, 1, 0]


def test_meshes_that_cross() -> None:
    """The same names over different meshes: each rank meets some others twice, in one order everywhere."""

    def run(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        wholes = {name: patterns((6, 4), F32, seed) for seed, name in enumerate(["norm", "row", "both"])}
        meshes = {
            "norm": (mesh["dp"], [Shard(0)]),
            "row": (mesh["tp"], [Shard(1)]),
            "both": (mesh, [Shard(0), Shard(1)]),
        }
        names = list(wholes) if rank % 2 else list(reversed(wholes))
        made = _gather_state_dict({name: spread(wholes[name], *meshes[name]) for name in names}, ranks_only=(0, 3))
        assert rank in (1, 2) or all(same_bytes(made[name], wholes[name]) for name in names)

    run_ranks(run, 4)


def test_a_bad_leaf_on_one_rank_raises_on_all() -> None:
    def run(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        one, other = (
            spread(patterns((4,), F32), mesh["dp"], [Shard(0)]),
            spread(patterns((4,), F32), mesh["tp"], [Shard(0)]),
        )
        _gather_state_dict({"one": one, "other": other, "extra": {rank} if rank == 1 else 1})

    results = run_ranks(run, 4, expect_errors=True, timeout=30)
    assert isinstance(results[1], ValueError)
    for rank in (0, 3):  # those that meet it
        assert "Unexpected value type <class 'set'> at 'extra'" in str(results[rank])


def test_different_tensors_under_one_name() -> None:
    def run(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        _gather_state_dict({"w": spread(patterns((4 + rank,), F32), mesh, [Shard(0)])})

    for result in run_ranks(run, 2, expect_errors=True, timeout=30):
        assert isinstance(result, RankDisagreement)
        assert "'w'" in str(result) and "rank 0" in str(result)


def test_a_name_that_one_rank_lacks() -> None:
    def run(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        state = {name: spread(patterns((4,), F32), mesh, [Shard(0)]) for name in ("v", "w")[rank:]}
        _gather_state_dict(state)

    for result in run_ranks(run, 2, expect_errors=True, timeout=30):
        assert isinstance(result, (RuntimeError, ValueError))
        assert "'v'" in str(result)


def test_sums_that_are_not_added_up_yet() -> None:
    def run(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        part = patterns((4, 2), torch.int64) + rank
        tensor = DTensor.from_local(part, mesh, [Partial(), Shard(0)])
        made = _gather_state_dict({"w": tensor})["w"]
        assert torch.equal(made, tensor.full_tensor())

    run_ranks(run, 4)


def test_what_every_rank_has_is_given_by_reference() -> None:
    def run(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        tensor = torch.nn.Parameter(spread(torch.arange(4.0), mesh, [Replicate()]))
        plain = torch.ones(2)
        made = _gather_state_dict({"w": tensor, "p": plain}, cpu_offload=True)
        assert made["w"].data_ptr() == tensor.to_local().data_ptr() and not made["w"].requires_grad
        assert made["p"] is plain

    run_ranks(run, 2)


def test_a_rank_outside_the_mesh_has_nothing() -> None:
    def run(rank: int) -> None:
        mesh = DeviceMesh("cpu", [0, 1])
        tensor = DTensor.from_local(patterns((2 if rank < 2 else 0, 3), F32, rank), mesh, [Shard(0)])
        made = _gather_state_dict({"w": tensor})
        assert tuple(made["w"].shape) == ((4, 3) if rank < 2 else (0,))  # as torch gives it

    run_ranks(run, 3)


def test_ranks_are_those_of_the_group() -> None:
    def run(rank: int) -> None:
        group = dist.new_group([1, 2])
        if rank == 0:
            return
        mesh = DeviceMesh.from_group(group, "cpu")
        made = _gather_state_dict({"w": spread(patterns((3,), F32), mesh, [Shard(0)])}, pg=group, ranks_only=(1,))
        assert (made == {}) == (rank == 1)
        keep = lambda tensor, *_: tensor  # noqa: E731
        assert _iterate_state_dict({"a": 1}, keep, keep, keep, pg=group, ranks_only=(0,)) == (
            {"a": 1} if rank == 1 else {}
        )

    run_ranks(run, 3)


# -- ShardedTensor ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [[(0, 3), (3, 6), (6, 8)], [(0, 1), (1, 8), (8, 8)], [(4, 8), (0, 4), (0, 0)]])
def test_sharded_tensors(rows: list[tuple[int, int]]) -> None:
    """Uneven rows, rows in any order, and ranks without a shard: torch knows equal chunks only."""

    def run(rank: int) -> None:
        whole = patterns((8, 2), F32)
        tensor = sharded(whole, rows)
        for wanted in [(), (0,), (2,)]:
            made = _gather_state_dict({"a": {"w": tensor}, "n": 1}, ranks_only=wanted, cpu_offload=True)
            assert made == {} if wanted and rank not in wanted else same_bytes(made["a"]["w"], whole)
        assert same_bytes(_all_gather_sharded_tensor(tensor), whole)
        assert same_bytes(_all_gather_sharded_tensor(tensor, dist.group.WORLD, torch.device("cpu")), whole)

    run_ranks(run, 3)


def test_sharded_tensors_over_a_group() -> None:
    def run(rank: int) -> None:
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        whole = patterns((5,), F32, rank // 2)
        rows = [(0, 3), (3, 5)] * 2
        made = _gather_state_dict({"w": sharded(whole, rows, pairs[rank // 2])}, pg=pairs[rank // 2], ranks_only=(0,))
        assert made == {} if rank % 2 else same_bytes(made["w"], whole)

    run_ranks(run, 4)
