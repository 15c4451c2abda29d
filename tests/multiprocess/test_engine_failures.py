"""What goes wrong over ranks: the same error on all, nothing written where it could be known, and dead ranks named."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fdsd
from fdsd.algebra.lazy import Lazy
from fdsd.algebra.ops.leaves import Origin
from fdsd.errors import FdsdError, RanksLost
from tests.helpers.models import make
from tests.helpers.parallelism import build, step
from tests.helpers.ranks import RankDied, run_ranks
from tests.helpers.tensors import same_bytes
from tests.multiprocess.test_engine import same, world


def snapshot_of(model: Any, optimizer: Any = ()) -> Any:
    return fdsd.snapshot(fdsd.capture(model, optimizer))


def unchanged(model: Any, optimizer: Any, before: Any) -> bool:
    """Whether this rank's part of a model and an optimizer is as it was."""
    now = fdsd.capture(model, optimizer)
    pairs = [(now.model, before.model), *[(now.optim.slots[s], c) for s, c in before.optim.slots.items()]]
    local = [(getattr(a[n], "_local_tensor", a[n]), getattr(b[n], "_local_tensor", b[n])) for a, b in pairs for n in b]
    groups = [[dict(g.options) for g in s.optim.groups] for s in (now, before)]
    return (
        now.optim.slots.keys() == before.optim.slots.keys()
        and groups[0] == groups[1]
        and all(same_bytes(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in local)
    )


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises(FdsdError) as caught:
        call()
    return f"{type(caught.value).__name__}: {caught.value}"


# -- what can be checked -----------------------------------------------------------------------------------------------


def bad_inputs(rank: int) -> list[str]:
    model, _ = build("fsdp2")
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer, 1)
    before = snapshot_of(model, optimizer)
    saved = fdsd.materialize(fdsd.capture(model, optimizer), group=world())
    assert saved.optim is not None
    model2 = {name: value + 1 for name, value in saved.model.items()}
    moments = {slot: {n: v + 1 for n, v in column.items()} for slot, column in saved.optim.slots.items()}
    strange = {**moments, "exp_avg": {**moments["exp_avg"], "head.weight": torch.ones(7)}}
    optim = fdsd.OptimState(moments, saved.optim.groups)

    def init(fqn: str, spec: fdsd.TensorSpec) -> torch.Tensor:
        raise ArithmeticError(f"not {fqn}")

    cases: list[tuple[Any, dict[str, Any]]] = [
        ({name: value for name, value in model2.items() if name != "head.bias"}, {}),
        ({**model2, **({"stray": torch.ones(1)} if rank else {})}, {}),
        ({**model2, "head.weight": torch.ones(5, 3)}, {}),
        ({**model2, "head.weight": model2["head.weight"].double() if rank else model2["head.weight"]}, {}),
        ({**model2, "head.weight": model2["head.weight"].double()}, {}),
        ({**model2, "head.weight": model2["head.weight"].double()}, {"dtype": "source"}),
        ({**model2, "scale": torch.ones(1) if rank == 1 else model2["scale"]}, {}),
        (model2, {"filter": fdsd.select("nothing") if rank == 2 else fdsd.select("{_...}")}),
        (model2, {"dtype": "float" if rank == 1 else "same"}),
    ]
    told: list[str] = []
    for weights, how in cases:
        given = fdsd.TrainState(weights, optim)
        told.append(refused(partial(fdsd.restore, given, model, optimizer, group=world(), **how)))
    bad = fdsd.TrainState(model2, fdsd.OptimState(strange, saved.optim.groups))
    told.append(refused(lambda: fdsd.restore(bad if rank == 1 else {}, model, optimizer, group=world())))
    told.append(
        refused(lambda: fdsd.restore(fdsd.TrainState(model2), model, optimizer if rank == 1 else (), group=world()))
    )
    empty, _ = build("fsdp2", device="meta")
    part = {name: value for name, value in model2.items() if name != "head.bias"}
    told.append(refused(lambda: fdsd.restore(part, empty, init=init, allow_missing="head.bias", group=world())))
    assert unchanged(model, optimizer, before) and all(p.is_meta for p in empty.parameters())
    return told


def test_what_does_not_fit_is_the_same_error_on_all_ranks_and_changes_nothing() -> None:
    found = run_ranks(bad_inputs, 3)
    assert found[0] == found[1] == found[2]
    parts = [
        "UnknownName: restore: missing in the state: 'head.bias'",
        "'stray'",
        "[5, 3]",
        "'head.weight' is float32[3, 5] on rank 0 and float64[3, 5] on rank 1",
        'dtype="target"',
        "memory that keeps its dtype",
        "'scale' is float32[2] on rank 0 and float32[1] on rank 1",
        "rank 2",
        "rank 1: restore: dtype is",
        "'exp_avg'",
        "rank 1: restore: optimizers were given",
        "ArithmeticError: not head.bias",
    ]
    for text, part in zip(found[0], parts, strict=True):
        assert part in text, (part, text)
        assert "restore: restore" not in text


# -- what raises half way ----------------------------------------------------------------------------------------------


def failing(state: Any, name: str, fail: Callable[[], None]) -> Any:
    """The same tensors, of which one is made by a function that fails on this rank."""

    def double(x: torch.Tensor) -> torch.Tensor:
        fail()
        return x * 2

    spec = fdsd.specs(state)[name]
    made = fdsd.map_tensors(double, name, spec=fdsd.TensorSpec(spec.shape, spec.dtype))
    return made(fdsd.defer({key: value if key == name else value + 1 for key, value in state.items()}))


def raises(rank: int, folder: str) -> list[list[str]]:
    told: list[list[str]] = []
    model, _ = build("fsdp2")
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer, 1)
    expected = dict(fdsd.materialize(fdsd.capture(model).model, group=world()))
    before = snapshot_of(model, optimizer)
    optim = fdsd.materialize(fdsd.capture(model, optimizer), group=world()).optim
    for guilty in range(3):

        def fail(guilty: int = guilty) -> None:
            if rank == guilty:
                raise ArithmeticError("not today")

        state = failing(expected, "layers.1.up.weight", fail)
        one = fdsd.gather(to=guilty)(state)
        path = Path(folder) / f"{guilty}.safetensors"
        train = fdsd.TrainState(state, optim)
        calls: list[Callable[[], Any]] = [
            partial(fdsd.restore, train, model, optimizer, group=world(), staged=True),
            partial(fdsd.materialize, state, group=world()),
            partial(lambda given: dict(fdsd.stream(given, group=world(), budget=1)), state),
            partial(fdsd.save, one, path, group=world()),
            partial(fdsd.save, one, path.with_suffix(".pt"), group=world()),
        ]
        told.append([refused(call).split(" (")[0] for call in calls])
        assert unchanged(model, optimizer, before)
        other, _ = build("fsdp2")
        told[-1].append(refused(partial(fdsd.restore, state, other, group=world())).split(" (")[0])
    return told


def test_a_function_that_raises_on_one_rank(tmp_path: Path) -> None:
    found = run_ranks(raises, 3, str(tmp_path))
    assert found[0] == found[1] == found[2]
    for guilty, texts in enumerate(found[0]):
        for text in texts:
            assert f"rank {guilty}: " in text and "not today" in text and "layers.1.up.weight" in text, text
    assert list(tmp_path.iterdir()) == []


class Fragile(nn.Module):
    """Refuses an extra state on one rank, after it has taken the tensors."""

    def __init__(self, inner: nn.Module, fails: bool) -> None:
        super().__init__()
        self.inner = inner
        self.fails = fails
        self.note = "old"

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state
        if self.fails and state == "new":
            raise ArithmeticError("not today")


class Doubling(nn.Linear):
    """Loads by code of its own."""

    fails = False

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        if self.fails:
            raise ArithmeticError("not today")


class Stubborn(torch.optim.SGD):
    """Loads by code of its own, and fails half way on one rank."""

    fails = False

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        if self.fails:
            raise ArithmeticError("not today")


def code_raises(rank: int) -> list[str]:
    told: list[str] = []
    for kind in ("extra", "module", "optimizer"):
        inner, _ = build("fsdp2")
        own = Doubling(2, 2)
        model = Fragile(nn.ModuleDict({"inner": inner, "own": own}), kind == "extra" and rank == 1)
        own.fails = kind == "module" and rank == 1
        plain = list(inner.parameters())
        optimizers = [
            torch.optim.SGD(plain[1:], lr=0.5, momentum=0.5),
            Stubborn([plain[0], *own.parameters()], lr=0.25, momentum=0.5),
        ]
        for optimizer in optimizers:
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.grad = parameter.detach() * 0.5
            optimizer.step()
        before = snapshot_of(model, optimizers)
        saved = fdsd.materialize(fdsd.capture(model, optimizers), group=world())
        assert saved.optim is not None
        changed = {n: v + 1 if isinstance(v, torch.Tensor) else "new" for n, v in saved.model.items()}
        slots = {slot: {n: v + 1 for n, v in column.items()} for slot, column in saved.optim.slots.items()}
        groups = [fdsd.ParamGroup(g.fqns, {**g.options, "lr": 8.0}) for g in saved.optim.groups]
        state = fdsd.TrainState(changed, fdsd.OptimState(slots, groups))
        optimizers[1].fails = kind == "optimizer" and rank == 1  # type: ignore[attr-defined]
        told.append(refused(partial(fdsd.restore, state, model, optimizers, group=world(), staged=True)))
        assert model.note == "old" and unchanged(model, optimizers, before), kind
        told.append(refused(partial(fdsd.restore, state, model, optimizers, group=world())))
    return told


def test_code_of_a_module_or_an_optimizer_that_raises_on_one_rank() -> None:
    found = run_ranks(code_raises, 2)
    assert found[0] == found[1]
    assert all("not today" in text and "rank 1" in text for text in found[0]), found[0]


# -- streams -----------------------------------------------------------------------------------------------------------


def streams(rank: int) -> None:
    model, expected = build("fsdp2")
    state = fdsd.capture(model).model

    def begun(budget: int = 1) -> Any:
        return fdsd.stream(state, group=world(), budget=budget)

    for closer in range(3):
        for point in range(len(expected) + 1):
            seen = 0
            items = begun()
            if rank == closer and point == 0:
                items.close()  # before its first step
            for _ in items:
                seen += 1
                if rank == closer and seen == point:
                    items.close()
            items.close()
            assert rank != closer or seen == point
            assert seen <= point + 1 if point < len(expected) else seen == len(expected)
    for _ in begun():  # letting go of it is enough
        if rank == 2:
            break
    with suppress(ArithmeticError), begun() as items:
        for _ in items:
            if rank == 1:
                raise ArithmeticError("the consumer's own")
    kept: dict[str, torch.Tensor] = {}
    for name, value in begun():  # what was given is the caller's to keep, and to write to
        kept[name] = value.clone()
        value.zero_()
    same(kept, expected)
    same(fdsd.materialize(state, group=world()), expected)
    plain = {"w": torch.ones(2), "alias": None}
    plain["alias"] = plain["w"]
    got = dict(fdsd.stream(plain, group=world()))
    assert got["w"] is got["alias"] is not plain["w"]
    assert dict(fdsd.stream({}, group=world())) == {}


def often(rank: int) -> tuple[int, int]:
    from fdsd.engine.wirings import WIRINGS

    model, expected = build("fsdp2")
    state = fdsd.capture(model).model
    dict(fdsd.stream(state, group=world()))
    before = WIRINGS.info().misses
    for _ in range(100):
        for name, value in fdsd.stream(fdsd.capture(model).model, group=world()):
            assert torch.equal(value, expected[name])
    return before, WIRINGS.info().misses


def all_streams(rank: int) -> tuple[int, int]:
    streams(rank)
    return often(rank)


def test_streams() -> None:
    """Closed at any point on any rank they end on all; a hundred of them are planned once."""
    assert all(before == after > 0 for before, after in run_ranks(all_streams, 3, timeout=120))


# -- ranks that differ in what they ask for ----------------------------------------------------------------------------


def out_of_step(rank: int, folder: str) -> list[str]:
    """Budgets may differ; calls may not, and afterwards the ranks work together as ever."""
    whole = {f"w{i}": torch.arange(20_000.0) + i for i in range(6)}
    mine = {name: x for i, (name, x) in enumerate(whole.items()) if i // 3 == rank}
    budget = ["1KB", "100MB"][rank]
    same(fdsd.materialize(mine, group=world(), budget=budget if rank == 0 else None), whole)
    same(dict(fdsd.stream(mine, group=world(), budget=budget)), whole)
    path = Path(folder) / "m.safetensors"
    fdsd.save(mine, path, group=world(), budget=budget)
    if rank == 0:
        same(fdsd.materialize(fdsd.open(path)), whole)

    def side_by_side() -> None:
        two = [fdsd.stream(mine, to=0, group=world(), budget="100KB") for _ in range(2)]
        for _ in zip(*two, strict=True):
            pass

    told = [
        refused(side_by_side),
        refused(lambda: dict(fdsd.stream(mine, group=world())) if rank else fdsd.materialize(mine, group=world())),
        refused(lambda: fdsd.save(mine, path.with_suffix([".safetensors", ".pt"][rank]), group=world())),
    ]
    same(fdsd.materialize(mine, group=world()), whole)
    return told


def test_ranks_that_differ_in_what_they_ask_for(tmp_path: Path) -> None:
    first, second = run_ranks(out_of_step, 2, str(tmp_path))
    assert first == second
    parts = ["rank 1: stream(to=0), number", "rank 0: materialize; rank 1: stream", "format is 'safetensors' on rank 0"]
    for text, part in zip(first, parts, strict=True):
        assert text.startswith("RankDisagreement") and part in text, text


# -- dead ranks --------------------------------------------------------------------------------------------------------


class Dying:
    """A source whose process ends when it is read."""

    def specs(self) -> fdsd.StateDict[fdsd.TensorSpec]:
        return fdsd.StateDict({"only": fdsd.TensorSpec((2,), torch.float32)})

    def pieces(self, fqn: str) -> list[Any]:
        return []

    def read(self, fqn: str, region: Any, out: torch.Tensor) -> None:
        os._exit(3)


def dies(rank: int, what: str, folder: str) -> tuple[str, bool]:
    model, _ = build("fsdp2")
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer, 1)
    expected = dict(fdsd.materialize(fdsd.capture(model).model, group=world()))
    before = snapshot_of(model, optimizer)
    state = failing(expected, "layers.1.up.weight", lambda: os._exit(3) if rank == 1 else None)
    spec = Dying().specs()["only"]
    only = {"only": Lazy(Origin(Dying(), "only", spec), (), [spec])}
    calls: dict[str, Callable[[], Any]] = {
        "restore": lambda: fdsd.restore(state, model, group=world(), staged=True),
        "save": lambda: fdsd.save(
            fdsd.combine(expected, only if rank == 1 else {}), Path(folder) / "model.safetensors", group=world()
        ),
        "stream": lambda: dict(fdsd.stream(state, group=world(), budget=1)),
    }
    with pytest.raises(RanksLost) as caught:
        calls[what]()
    return str(caught.value), unchanged(model, optimizer, before)


@pytest.mark.parametrize("what", ["restore", "save", "stream"])
def test_a_dead_rank_is_named_and_leaves_nothing_half_done(what: str, tmp_path: Path) -> None:
    found = run_ranks(dies, 3, what, str(tmp_path), expect_errors=True, group_timeout=20, store="file")
    assert isinstance(found[1], RankDied)
    for rank in (0, 2):
        assert not isinstance(found[rank], BaseException), found[rank]
        assert "rank 1" in found[rank][0] or "1" in found[rank][0]
        assert found[rank][1]
    assert list(tmp_path.iterdir()) == []


def test_the_error_is_the_user_s_own_in_one_process() -> None:
    def no(x: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("not today")

    model = make()
    state = fdsd.map_tensors(no, "scale", spec=lambda spec: spec)(fdsd.defer(fdsd.capture(model).model))
    with pytest.raises(ArithmeticError, match="not today"):
        fdsd.restore(state, model)
