"""The engine where ranks have different names: pipeline stages, experts on another mesh, givers and takers."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fdsd
from fdsd import Sharded
from fdsd.errors import FdsdError, UnknownName
from fdsd.layout import Layout, Mesh, Shard
from tests.helpers.models import Net, filled, make
from tests.helpers.parallelism import Mlp, build, mesh_of, step
from tests.helpers.ranks import run_ranks
from tests.multiprocess.test_engine import same, same_columns, world

# -- pipeline stages ---------------------------------------------------------------------------------------------------


class Stage(nn.Module):
    """A part of the model that runs, with the names that it has in the whole."""

    def __init__(self, i: int, layer: nn.Module) -> None:
        super().__init__()
        self.add_module(str(i), layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.children():
            x = layer(x)
        return x


def whole_model(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return nn.ModuleDict({str(i): Mlp() for i in range(4)})


def stage(rank: int, seed: int = 0, *, device: str = "cpu") -> tuple[list[Any], list[torch.optim.Optimizer]]:
    """Two stages of two parts each, interleaved; each sharded over two ranks."""
    from torch.distributed.fsdp import fully_shard

    mesh = mesh_of(2, 2, names=("pp", "dp"))
    with torch.device(device):
        model = whole_model(seed)
    parts = [Stage(i, model[str(i)]) for i in (rank // 2, rank // 2 + 2)]
    for part in parts:
        fully_shard(part, mesh=mesh["dp"])
    if device == "meta":
        return parts, []
    optimizers = [torch.optim.Adam(part.parameters(), lr=0.1 * (i + 1)) for i, part in enumerate(parts)]
    for part, optimizer in zip(parts, optimizers, strict=True):
        step(part, optimizer, 1)
    return parts, optimizers


def stages(rank: int, folder: str) -> None:
    parts, optimizers = stage(rank)
    live = fdsd.capture(parts, optimizers)
    plain = whole_model()
    adam = torch.optim.Adam([{"params": plain[str(i)].parameters(), "lr": 0.1 * (i // 2 + 1)} for i in range(4)])
    step(plain, adam, 1)
    expected = fdsd.capture(plain, adam)
    saved = fdsd.materialize(live, group=world())
    assert set(saved.model) == set(expected.model) and saved.optim is not None and expected.optim is not None
    same({name: saved.model[name] for name in expected.model}, expected.model)
    for slot, column in expected.optim.slots.items():
        same({name: saved.optim.slots[slot][name] for name in column}, column)
    assert [one.options["lr"] for one in saved.optim.groups] == [0.1, 0.2]
    assert {frozenset(n.split(".")[0] for n in one.fqns) for one in saved.optim.groups} == {
        frozenset("01"),
        frozenset("23"),
    }
    path = Path(folder) / "stages.safetensors"
    fdsd.save(fdsd.add_prefix("model.")(live.model), path, group=world(), budget="1KB")
    file = fdsd.TrainState(fdsd.drop_prefix("model.")(fdsd.open(path)), saved.optim)
    for staged in (False, True):
        others, theirs = stage(rank, seed=5)
        # all names are expected by some rank of the group, so none is unexpected
        report = fdsd.restore(file, others, theirs, group=world(), staged=staged)
        assert report.unexpected == report.missing == () and set(report.loaded) == set(live.model)
        same_columns(fdsd.materialize(fdsd.capture(others, theirs), group=world()), saved)
    with pytest.raises(UnknownName, match="not expected by the model"):
        fdsd.restore(file, others, theirs)
    mine = fdsd.select([f"{i}.{{_...}}" for i in (rank // 2, rank // 2 + 2)])
    fdsd.restore(mine(file), others, theirs)
    keep = fdsd.drop("1.head.{_}")  # which half of the ranks have
    report = fdsd.restore(keep(file), others, theirs, filter=keep, group=world())
    assert len(report.loaded) == len(live.model) - (2 if rank // 2 == 1 else 0)
    empty, _ = stage(rank, device="meta")
    fdsd.restore(saved.model if rank == 3 else {}, empty, group=world())
    same(fdsd.materialize(fdsd.capture(empty).model, group=world()), saved.model)


def test_pipeline_stages(tmp_path: Path) -> None:
    run_ranks(stages, 4, str(tmp_path))


# -- expert parallel ---------------------------------------------------------------------------------------------------


class Moe(nn.Module):
    """Dense weights, and experts in one stacked tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(5, 6)
        self.experts = nn.Parameter(torch.randn(5, 4, 3))  # uneven over two ranks
        self.gate = nn.Parameter(torch.randn(7))


def experts(rank: int, seed: int = 0) -> tuple[Any, dict[str, torch.Tensor]]:
    """Dense weights over all four ranks; experts over each pair, so each half lies on two ranks."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard as TorchShard
    from torch.distributed.tensor import distribute_tensor

    torch.manual_seed(seed)
    model = Moe()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    pairs, every = mesh_of(2, 2, names=("rep", "ep"))["ep"], mesh_of(4, names=("dp",))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.6 warns of random numbers on the CPU
        model.experts = nn.Parameter(distribute_tensor(model.experts.detach(), pairs, [TorchShard(0)]))
        model.gate = nn.Parameter(distribute_tensor(model.gate.detach(), every, [TorchShard(0)]))
    fully_shard(model.dense, mesh=every)
    return model, expected


def expert_parallel(rank: int, folder: str) -> None:
    model, expected = experts(rank)
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer, 1)
    expected = dict(fdsd.materialize(fdsd.capture(model).model, group=world()))
    live = fdsd.capture(model, optimizer)
    saved = fdsd.materialize(live, group=world())
    assert [tuple(value.shape) for value in saved.model.values()] == [
        tuple(v.shape) for v in Moe().state_dict().values()
    ]
    path = Path(folder) / "moe.safetensors"
    each = fdsd.unstack("experts", "experts.{i}.w", num=5)
    fdsd.save(each(live.model), path, group=world(), budget="1KB")
    other, _ = experts(rank, seed=4)
    adam = torch.optim.Adam(other.parameters())
    fdsd.restore(fdsd.TrainState((~each)(fdsd.open(path)), saved.optim), other, adam)
    same_columns(fdsd.materialize(fdsd.capture(other, adam), group=world()), saved)
    plain = Moe()
    fdsd.restore(live.model, plain, group=world())
    same(plain.state_dict(), expected)
    back, _ = experts(rank, seed=9)
    fdsd.restore(fdsd.capture(plain).model if rank == 2 else {}, back, group=world())
    same(fdsd.materialize(fdsd.capture(back).model, group=world()), expected)


def named_by_rank(rank: int, folder: str) -> None:
    """Experts of names of their own: each rank has some, and nobody else."""
    whole = {f"experts.{i}.w": torch.randn(3, 4, generator=torch.Generator().manual_seed(i)) for i in range(6)}
    mine = nn.ParameterDict(
        {f"experts.{i}.w".replace(".", "_"): nn.Parameter(whole[f"experts.{i}.w"]) for i in range(6) if i % 4 == rank}
    )
    spelled = fdsd.rename_fqns({"experts_{i}_w": "experts.{i}.w"})
    state = spelled(fdsd.capture(mine).model)
    stacked = fdsd.stack("experts.{i}.w", "experts", num=6)
    found = fdsd.materialize(state, group=world())
    same({name: found[name] for name in whole}, whole)
    assert torch.equal(stacked(found)["experts"], torch.stack(list(whole.values())))
    fdsd.save(state, Path(folder) / "named.safetensors", group=world())
    target = nn.ParameterDict({name: torch.zeros(3, 4) for name in mine})
    fdsd.restore((~spelled)(fdsd.open(Path(folder) / "named.safetensors")), target, group=world())
    same(target, {name: value.detach() for name, value in mine.items()})


def givers_and_takers(rank: int, folder: str) -> None:
    """Trainers give straight to others, which have a model that lies otherwise; neither has the other's."""
    trainers = dist.new_group([0, 1])
    takers = dist.new_group([2, 3])
    if rank < 2:
        model = build_on(trainers, [0, 1])
        fdsd.restore(fdsd.capture(model).model, [], group=world())
        return
    assert takers is not None
    other = build_on(takers, [2, 3], seed=8)
    report = fdsd.restore({}, other, group=world())
    expected = build("plain")[1]
    assert set(report.loaded) == set(expected)
    same(fdsd.materialize(fdsd.capture(other).model, group=takers), expected)


def build_on(group: Any, ranks: list[int], seed: int = 0) -> Any:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed)
    model = Mlp()
    mesh = DeviceMesh.from_group(group, "cpu", mesh=torch.tensor(ranks), mesh_dim_names=("dp",))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def parts_of_many_kinds(rank: int, folder: str) -> None:
    expert_parallel(rank, folder)
    named_by_rank(rank, folder)
    givers_and_takers(rank, folder)


def test_experts_and_givers(tmp_path: Path) -> None:
    run_ranks(parts_of_many_kinds, 4, str(tmp_path))


# -- names, order, ties, objects ---------------------------------------------------------------------------------------


def other_order(rank: int) -> None:
    whole = {f"w{i}": torch.full((2, 3), float(i)) + torch.arange(6).view(2, 3) * 10 for i in range(5)}
    layout = Layout(Mesh({"x": 3}), [Shard(0)])
    names = list(whole) if rank != 1 else list(reversed(whole))
    laid = fdsd.shard_with(layout)(whole)
    mine = {name: Sharded(laid[name].spec, layout, shards={rank: laid[name].shard(rank)}) for name in names}
    same(fdsd.materialize(fdsd.gather()(mine), group=world()), whole)
    model = nn.ParameterDict({name: torch.zeros(2, 3) for name in names})
    fdsd.restore(mine, model, group=world())
    assert all(torch.equal(model[name], whole[name]) for name in whole)


def objects(rank: int) -> None:
    """Each rank keeps its own; what only others have comes from them."""
    mine: dict[str, Any] = {"w": torch.ones(2), "rng": f"of {rank}", **({"note": {1, 2}} if rank == 1 else {})}
    found = fdsd.materialize(mine, group=world())
    assert found["rng"] == f"of {rank}" and found["note"] == {1, 2} and list(found) == ["w", "rng", "note"]
    model: Any = make("scalar")
    state = filled(Net(scalar=True), 900).state_dict()
    state["counter._extra_state"] = {"from": rank}
    fdsd.restore(state, model, group=world())
    assert model.counter.note == {"from": rank}
    fdsd.restore(state if rank == 2 else {}, model, group=world())
    assert model.counter.note == {"from": 2}
    state["counter._extra_state"] = torch.arange(4) + rank * 0
    fdsd.restore(state if rank == 2 else {}, model, group=world())
    assert torch.equal(model.counter.note, torch.arange(4))
    with pytest.raises(FdsdError, match="x"):
        fdsd.materialize({"x": torch.ones(1) if rank else "none"}, group=world())


def ties(rank: int) -> None:
    w = torch.arange(6.0).view(2, 3)
    layout = Layout(Mesh({"x": 3}), [Shard(0)])
    one = fdsd.shard_with(layout)({"w": w})["w"]
    shared = Sharded(one.spec, layout, shards={rank: one.shard(rank)})
    found = fdsd.materialize({"a": w, "b": w, "c": w.clone()}, group=world())
    assert found["a"] is found["b"] is not found["c"]
    found = fdsd.materialize(fdsd.gather()({"a": shared, "b": shared}), group=world())
    assert found["a"] is found["b"]
    model: Any = make()
    head = fdsd.capture(model).model
    again = fdsd.materialize(fdsd.defer(head), group=world())
    assert again["embed.weight"] is again["head.weight"]
    state = {**model.state_dict(), "embed.weight": torch.zeros(6, 5), "head.weight": torch.zeros(6, 5)}
    report = fdsd.restore(state if rank == 0 else {}, model, group=world())
    assert report.untied == ("head.weight",)
    state["head.weight"] = torch.ones(6, 5)
    with pytest.raises(FdsdError, match=r"'head.weight' and 'embed.weight'"):
        fdsd.restore(state if rank == 0 else {}, model, group=world())
    assert torch.equal(model.embed.weight, torch.zeros(6, 5))


def disagreements(rank: int) -> list[str]:
    told: list[str] = []
    w = torch.ones(2)
    for call in (
        lambda: fdsd.materialize({"w": torch.ones(2 + rank)}, group=world()),
        lambda: fdsd.materialize({"w": w} if rank else fdsd.TrainState({"w": w}), group=world()),
        lambda: fdsd.materialize({"w": w} if rank else 3, group=world()),
        lambda: fdsd.materialize(group_state(0.1 * (rank + 1), "ab"), group=world()),
        lambda: fdsd.materialize(group_state(0.1, *(["ab"] if rank else ["a", "b"])), group=world()),
        lambda: fdsd.materialize(fdsd.gather(to=7)({"w": w}), group=world()),
        lambda: dict(fdsd.stream({"w": w}, to=7, group=world())),
        lambda: dict(fdsd.stream({"w": w}, to="some" if rank else "all", group=world())),
        lambda: dict(fdsd.stream(3 if rank else {}, group=world())),
        lambda: fdsd.materialize(fdsd.specs({"w": w}) if rank else {"w": w}, group=world()),
        lambda: fdsd.restore({"w": w} if rank else {"w": torch.ones(3)}, nn.ParameterDict({"w": w}), group=world()),
        lambda: fdsd.restore({"w": w} if rank else 3, nn.ParameterDict({"w": w}), group=world()),
    ):
        with pytest.raises(FdsdError) as caught:
            call()
        told.append(f"{type(caught.value).__name__}: {caught.value}")
    return told


def group_state(lr: float, *groups: str) -> fdsd.OptimState:
    made = [fdsd.ParamGroup(tuple(names), {"lr": lr}) for names in groups]
    return fdsd.OptimState({"step": dict.fromkeys("".join(groups), torch.tensor(1.0))}, made)


def several(rank: int) -> list[str]:
    other_order(rank)
    objects(rank)
    ties(rank)
    train_states(rank)
    return disagreements(rank)


def train_states(rank: int) -> None:
    """Some ranks have no optimizer, and numbers instead of tensors travel too."""
    mine = fdsd.OptimState({"step": {"a": 3}, "exp": {"a": torch.ones(2)}}, [fdsd.ParamGroup(["a"], {"lr": 0.5})])
    state = fdsd.TrainState({"a": torch.ones(2)}, mine if rank else None, {"epoch": rank})
    found = fdsd.materialize(state, group=world())
    assert found.optim is not None and found.optim.slots["step"]["a"] == 3 and found.extra["epoch"] == rank
    assert torch.equal(found.optim.slots["exp"]["a"], torch.ones(2)) and found.optim.groups == mine.groups


def test_names_that_differ_by_rank() -> None:
    found = run_ranks(several, 3)
    assert found[0] == found[1] == found[2]
    for text, told in zip(
        found[0],
        [
            "'w'",
            "mapping",
            "mapping",
            "'lr': 0.2",
            "rank 1",
            "[7|7",
            "7",
            "'some'",
            "mapping",
            "no data",
            "'w'",
            "mapping",
        ],
        strict=False,
    ):
        assert any(part in text for part in told.split("|")), (told, text)
