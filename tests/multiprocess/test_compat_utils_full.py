"""From whole tensors to the entries of each rank; and sharded tensors on the CPU: made, copied, compared."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from fdsd.comms.world import GroupWorld
from fdsd.compat._state_dict_utils import (
    CompanionMismatch,
    _broadcast_state_dict,
    _broadcast_tensors,
    _check_state_dict_similarity,
    _copy_state_dict,
    _create_cpu_state_dict,
    _distribute_state_dict,
    _distribute_tensors,
    _gather_state_dict,
    _offload_state_dict_to_cpu,
    _TensorInfo,
)
from fdsd.errors import SpecMismatch
from tests.helpers.dtensors import StridedShard
from tests.helpers.ranks import run_ranks
from tests.helpers.spreading import counted, sharded, spread
from tests.helpers.tensors import patterns, same_bytes

CPU = torch.device("cpu")
F32 = torch.float32
LAYOUTS: list[tuple[int, tuple[int, ...], list[Any]]] = [
    (2, (2,), [Shard(0)]),
    (3, (3,), [Shard(1)]),
    (4, (2, 2), [Shard(0), Shard(1)]),
    (4, (2, 2), [StridedShard(0, 2), Shard(0)]),
    (4, (2, 2), [Replicate(), Shard(0)]),
]


def zeros(whole: torch.Tensor, mesh: DeviceMesh, placements: list[Any], device: str = "cpu", dtype: Any = None) -> Any:
    """Make a DTensor of the layout, of zeros or on the meta device."""
    made = spread(torch.zeros(whole.shape, dtype=dtype or whole.dtype), mesh, placements)
    if device == "cpu":
        return made
    local = made.to_local().to(device)
    return DTensor.from_local(local, mesh, placements, shape=made.shape, stride=made.stride(), run_check=False)


def holds(entry: Any, whole: torch.Tensor) -> bool:
    """Tell whether a DTensor is the whole tensor, each rank looking at its own part."""
    mine = spread(whole.to(entry.dtype), entry.device_mesh, list(entry.placements))
    return same_bytes(entry.to_local().detach(), mine.to_local())


# -- rank 0 has them for all -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n, sizes, placements", LAYOUTS)
def test_rank_0_gives_to_all(n: int, sizes: tuple[int, ...], placements: list[Any]) -> None:
    def run(rank: int) -> None:
        mesh = init_device_mesh("cpu", sizes)
        wholes = {name: patterns((7, 5), F32, seed) for seed, name in enumerate(["w", "half", "meta", "plain", "new"])}
        full: dict[str, Any] = {**wholes, "step": torch.tensor(7.0), "lr": 0.1, "betas": (0.9, 0.99), "other": "x"}
        before = copy.deepcopy(full)
        local: dict[str, Any] = {
            "w": zeros(wholes["w"], mesh, placements),
            "half": zeros(wholes["half"], mesh, placements, dtype=torch.bfloat16),
            "meta": zeros(wholes["meta"], mesh, placements, "meta", torch.float16),
            "plain": torch.zeros(7, 5, dtype=torch.float64),
            "step": torch.tensor(0.0),
            "lr": 1,
            "betas": None,
            "none": None,
            "mine": rank,
        }
        local = dict(list(local.items())[rank:] + list(local.items())[:rank])  # any order of keys
        names, w, plain = list(local), local["w"], local["plain"]
        _broadcast_state_dict(full if rank == 0 else {}, local, CPU)
        assert list(local) == names
        assert local["w"] is w and holds(w, wholes["w"])
        assert local["half"].dtype is torch.bfloat16 and holds(local["half"], wholes["half"])
        assert local["meta"].dtype is torch.float16 and holds(local["meta"], wholes["meta"])
        assert local["meta"].placements == w.placements and local["meta"].shape == w.shape
        assert local["plain"] is not plain and not plain.any()
        assert same_bytes(local["plain"], wholes["plain"].double())
        assert local["step"].item() == 7 and local["lr"] == 0.1 and local["betas"] == (0.9, 0.99)
        assert local["none"] is None and local["mine"] == rank
        assert full.keys() == before.keys() and all(same_bytes(full[k], before[k]) for k in wholes)
        assert local["plain"].data_ptr() != full["plain"].data_ptr()

    run_ranks(run, n)


def test_each_rank_gets_its_own_part_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(rank: int) -> Counter[Any]:
        mesh = init_device_mesh("cpu", (4,))
        full = {str(i): patterns((8, 4), F32, i) for i in range(10)}
        full["tied"] = full["0"]
        local: dict[str, Any] = {name: zeros(whole, mesh, [Shard(0)]) for name, whole in full.items()}
        local["tied"] = local["0"].detach()
        del local["9"]
        seen = counted(monkeypatch)
        _broadcast_state_dict(full if rank == 0 else {}, local, CPU)
        assert all(holds(local[name], full[name]) for name in local)
        assert local["tied"].to_local().data_ptr() == local["0"].to_local().data_ptr()
        return seen

    part = 9 * 2 * 4 * 4
    assert run_ranks(run, 4) == [{("send", i): part for i in (1, 2, 3)}, *[{("receive", 0): part}] * 3]


def test_strict_removes_what_rank_0_lacks() -> None:
    def run(rank: int) -> None:
        for strict in (False, True):
            local: dict[str, Any] = {"w": torch.zeros(2), "stray": torch.ones(1), "lr": 1, "old": 2}
            _broadcast_state_dict(
                {"w": torch.arange(2.0), "lr": 3} if rank == 0 else {"stray": 1}, local, CPU, strict=strict
            )
            assert local["w"].tolist() == [0, 1] and local["lr"] == 3
            assert set(local) == ({"w", "lr"} if strict else {"w", "lr", "stray", "old"})

    run_ranks(run, 2)


def test_names_that_only_some_ranks_want() -> None:
    """As the stages of a pipeline do."""

    def run(rank: int) -> None:
        wholes = {name: patterns((3, 2), F32, seed) for seed, name in enumerate("abc")}
        meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])]
        mine = "a" if rank < 2 else "b"
        local = {mine: zeros(wholes[mine], meshes[rank // 2], [Shard(0)])}
        _broadcast_state_dict(wholes if rank == 0 else {}, local, CPU)
        assert list(local) == [mine] and holds(local[mine], wholes[mine])

    run_ranks(run, 4)


def test_one_name_over_different_meshes() -> None:
    def run(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        whole = patterns((5, 2), F32)
        local = {"norm": zeros(whole, mesh["dp"], [Shard(0)])}
        _broadcast_state_dict({"norm": whole} if rank == 0 else {}, local, CPU, cpu_offload=True)
        assert holds(local["norm"], whole)

    run_ranks(run, 4)


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_shape_that_differs_on_one_rank_raises_on_all(culprit: int) -> None:
    def run(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (2,))
        whole = patterns((4, 2), F32)
        bad = torch.zeros(4, 1) if rank == culprit else torch.zeros(4, 2)
        local: dict[str, Any] = {"a": zeros(whole, mesh, [Shard(0)]), "b": bad, "lr": 0}
        with pytest.raises(SpecMismatch, match=r"'b': .*\(4, 2\), and the local entry \(4, 1\)"):
            _broadcast_state_dict({"a": whole, "b": whole, "lr": 1} if rank == 0 else {}, local, CPU)
        assert not local["a"].to_local().any() and local["lr"] == 0 and local["b"] is bad

    run_ranks(run, 2)


class Unpicklable:
    def __reduce__(self) -> Any:
        raise TypeError("not me")


@pytest.mark.parametrize("bad, told", [(Unpicklable(), "not me"), ("sharded", "lie over ranks: 'bad'")])
def test_what_rank_0_cannot_give_raises_on_all(bad: Any, told: str) -> None:
    def run(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        value = zeros(torch.ones(4), mesh, [Shard(0)]) if bad == "sharded" else bad
        local: dict[str, Any] = {"w": torch.zeros(2)}
        with pytest.raises(RuntimeError, match=told):
            _broadcast_state_dict({"w": torch.ones(2), "bad": value} if rank == 0 else {}, local, CPU)
        assert not local["w"].any()

    run_ranks(run, 2)


def test_no_state_dict_on_one_rank() -> None:
    def run(rank: int) -> None:
        _broadcast_state_dict({"w": torch.ones(2)} if rank == 0 else {}, [] if rank == 1 else {}, CPU)  # type: ignore[arg-type]

    for result in run_ranks(run, 2, expect_errors=True, timeout=30):
        assert "a list is no state dict" in str(result)


def test_over_a_group() -> None:
    def run(rank: int) -> None:
        group, others = dist.new_group([0, 2]), dist.new_group([1, 2])
        local = {"w": torch.zeros(2)}
        if rank != 1:
            _broadcast_state_dict({"w": torch.arange(2.0)} if rank == 0 else {}, local, CPU, group)
            assert local["w"].tolist() == [0, 1]
        if rank != 0:
            with pytest.raises(RuntimeError, match=r"rank 0 gives the state dict .* not one of the ranks 1, 2"):
                _broadcast_state_dict({}, local, CPU, others)

    run_ranks(run, 3)


def test_sharded_tensors_are_filled() -> None:
    def run(rank: int) -> None:
        whole, rows = patterns((8, 2), F32), [(0, 5), (5, 8), (8, 8)]
        local = {"w": sharded(torch.zeros(8, 2), rows)}
        kept = local["w"]
        _broadcast_state_dict({"w": whole} if rank == 0 else {}, local, CPU)
        assert local["w"] is kept
        assert all(same_bytes(shard.tensor, whole[slice(*rows[rank])]) for shard in kept.local_shards())
        assert len(kept.local_shards()) == (rank < 2)

    run_ranks(run, 3)


def test_some_tensors_of_rank_0() -> None:
    def run(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        wholes = {name: patterns((3, 2), F32, seed) for seed, name in enumerate("abc")}
        known = wholes if rank == 0 else {k: _TensorInfo(v.size(), v.dtype) for k, v in wholes.items()}
        local: dict[str, Any] = {"a": zeros(wholes["a"], mesh, [Shard(0)]), "b": torch.zeros(3, 2)}
        _broadcast_tensors(known, local, ["a", "c", "b"], CPU)
        assert holds(local["a"], wholes["a"]) and same_bytes(local["b"], wholes["b"]) and set(local) == {"a", "b"}

    run_ranks(run, 2)


# -- every rank has them ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n, sizes, placements", LAYOUTS)
def test_every_rank_cuts_its_own_parts(
    n: int, sizes: tuple[int, ...], placements: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(rank: int) -> None:
        mesh = init_device_mesh("cpu", sizes)
        for verb in ("send", "receive", "agree"):
            monkeypatch.setattr(GroupWorld, verb, lambda *_: pytest.fail("something travels"))
        whole = patterns((7, 5), F32)
        local: dict[str, Any] = {
            "w": zeros(whole, mesh, placements, dtype=torch.bfloat16),
            "meta": zeros(whole, mesh, placements, "meta"),
            "plain": torch.zeros(7, 5),
            "none": None,
        }
        w = local["w"]
        full = {
            "w": whole,
            "meta": whole,
            "plain": whole,
            "none": whole,
            "absent": whole,
            "step": torch.tensor(3),
            "lr": 1,
        }
        _distribute_state_dict(full, local, CPU)
        assert local["w"].dtype is torch.bfloat16 and holds(local["w"], whole) and not w.to_local().any()
        assert holds(local["meta"], whole) and same_bytes(local["plain"], whole)
        assert local["plain"].data_ptr() != whole.data_ptr()
        assert local["none"] is None and local["step"].item() == 3 and local["lr"] == 1 and "absent" not in local

        pairs: dict[str, Any] = {
            "w": (w, whole),
            "list": [zeros(whole, mesh, placements), whole],
            "meta": (zeros(whole, mesh, placements, "meta", torch.float16), whole),
            "plain": whole,
            "none": None,
        }
        _distribute_tensors(pairs, [*pairs, "absent"], CPU)
        assert pairs["w"] is w and holds(w, whole) and holds(pairs["list"], whole)
        assert pairs["meta"].dtype is torch.float16 and holds(pairs["meta"], whole)
        assert pairs["plain"] is whole and pairs["none"] is None and "absent" not in pairs

    run_ranks(run, n)


def test_shapes_are_checked_before_anything_is_cut() -> None:
    def run(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        one, two = zeros(torch.ones(4, 2), mesh, [Shard(0)]), zeros(torch.ones(4, 2), mesh, [Shard(0)])
        pairs: dict[str, Any] = {"a": (one, torch.ones(4, 2)), "b": (two, torch.ones(4, 1))}
        with pytest.raises(SpecMismatch, match="'b'"):
            _distribute_tensors(pairs, ["a", "b"], CPU)
        assert not one.to_local().any() and isinstance(pairs["a"], tuple)
        local = {"a": one, "b": torch.ones(3)}
        with pytest.raises(RuntimeError, match="'b'"):
            _distribute_state_dict({"a": torch.ones(4, 2), "b": torch.ones(4)}, local, CPU)
        assert local["a"] is one and not one.to_local().any()

    run_ranks(run, 2)


# -- sharded tensors on the CPU --------------------------------------------------------------------------------------


def test_new_memory_for_sharded_tensors() -> None:
    def run(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        wholes = {"w": patterns((5, 2), F32, 1), "s": patterns((), F32), "t": patterns((4, 3), F32, 3)}
        state = {
            "w": spread(wholes["w"], mesh, [Shard(0)]),
            "s": spread(wholes["s"], mesh, [Replicate()]),
            "n": [sharded(wholes["t"], [(0, 4), (4, 4)])],
        }
        state["tied"] = state["w"].detach()
        for share in (False, True):
            made = _create_cpu_state_dict(state, share_memory=share)
            assert made["tied"] is made["w"] and made["w"].to_local().data_ptr() != state["w"].to_local().data_ptr()
            assert made["w"].placements == state["w"].placements and made["w"].shape == (5, 2)
            assert made["w"].to_local().is_shared() == share
            assert made["s"].to_local().data_ptr() != state["s"].to_local().data_ptr()  # torch hands on its own
            assert _check_state_dict_similarity(state, made)
            copied = _copy_state_dict(state, made)
            assert copied["w"] is made["w"] and copied["n"][0] is made["n"][0]
            assert holds(made["w"], wholes["w"]) and holds(made["s"], wholes["s"])
            assert [same_bytes(x.tensor, wholes["t"]) for x in made["n"][0].local_shards()] == [True] * (rank == 0)
            whole = _gather_state_dict(made)
            assert same_bytes(whole["w"], wholes["w"]) and same_bytes(whole["n"][0], wholes["t"])
        off = _offload_state_dict_to_cpu(state)
        assert off["w"] is state["w"] and off["n"][0] is state["n"][0]

    run_ranks(run, 2)


def test_other_layouts_are_not_alike() -> None:
    """torch copies the local tensors where their shapes happen to be equal."""

    def run(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        whole = patterns((4, 4), F32)
        rows, columns = [spread(whole, mesh, [Shard(dim)]) for dim in (0, 1)]
        both = spread(whole, mesh, [Replicate()])
        for other in (columns, both, whole.clone()):
            assert not _check_state_dict_similarity({"w": rows}, {"w": other})
            with pytest.raises((SpecMismatch, CompanionMismatch), match="'w'"):
                _copy_state_dict({"w": rows}, {"w": other})
        assert holds(rows, whole) and holds(columns, whole)

    run_ranks(run, 2)


def test_a_model_of_fsdp2() -> None:
    """From live parameters to rank 0 and back into a model without memory."""

    def run(rank: int) -> None:
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 7))
        expected = {name: value.clone() for name, value in plain.state_dict().items()}
        model, other = copy.deepcopy(plain), nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 7))
        mesh = init_device_mesh("cpu", (4,))
        for each in (model, other):
            fully_shard(each[0], mesh=mesh)
            fully_shard(each, mesh=mesh)
        full = _gather_state_dict(model.state_dict(), cpu_offload=True, ranks_only=(0,))
        assert full == {} or all(same_bytes(full[name], value) for name, value in expected.items())
        local = other.state_dict()
        _broadcast_state_dict(full, local, CPU, strict=True)
        other.load_state_dict(local)
        again = _gather_state_dict(other.state_dict())
        assert list(again) == list(expected) and all(same_bytes(again[k], v) for k, v in expected.items())

    run_ranks(run, 4)
