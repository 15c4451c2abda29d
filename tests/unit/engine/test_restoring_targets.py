"""What cannot be written, or was asked for in different ways: refused on all ranks, with nothing written on any."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fdsd
from fdsd.errors import FdsdError, RankDisagreement, SpecMismatch, UnknownName
from tests.helpers.worlds import MemoryWorld, run_world


class Net(nn.Module):
    """Two parameters, and a buffer between them, whose memory may be an expanded one."""

    z: torch.Tensor

    def __init__(self, *, is_expanded: bool = False, trains: bool = True) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(2), requires_grad=trains)
        self.register_buffer("z", torch.zeros(1).expand(3) if is_expanded else torch.zeros(3))
        self.b = nn.Parameter(torch.zeros(2), requires_grad=trains)


def ones() -> dict[str, torch.Tensor]:
    return {"a": torch.ones(2), "z": torch.ones(3), "b": torch.ones(2)}


def refused(model: Net, state: Any = None, **options: Any) -> str:
    """Give the error of a load that must not change anything."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(FdsdError) as raised:
        fdsd.restore(ones() if state is None else state, model, **options)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not getattr(raised.value, "__notes__", None)
    return f"{type(raised.value).__name__}: {raised.value}"


class TestWhatTakesNoValues:
    @pytest.mark.parametrize("staged", [False, True])
    def test_memory_that_overlaps_itself(self, staged: bool) -> None:
        told = refused(Net(is_expanded=True), staged=staged)
        assert told.startswith("SpecMismatch: restore: 'z' has several elements in one place")

    @pytest.mark.parametrize("staged", [False, True])
    def test_all_ranks_hear_of_it(self, staged: bool) -> None:
        def fn(world: MemoryWorld) -> str:
            return refused(Net(is_expanded=world.rank == 1), staged=staged, group=world)

        first, second = run_world(fn, 2)
        assert first == second and "rank 1" in first and "'z' has several elements in one place" in first

    def test_its_own_values_need_not_be_written(self) -> None:
        model = Net(is_expanded=True)
        report = fdsd.restore(fdsd.capture(model).model, model)
        assert report.loaded == ("a", "b", "z") and torch.equal(model.z, torch.zeros(3))

    @pytest.mark.parametrize("staged", [False, True])
    @pytest.mark.parametrize("meta", [False, True])
    def test_integers_in_parameters_that_train(self, staged: bool, meta: bool) -> None:
        model = Net().to("meta") if meta else Net()
        state = {**ones(), "b": torch.ones(2, dtype=torch.int64)}
        with pytest.raises(SpecMismatch, match="'b' is int64 in the state, and requires gradients"):
            fdsd.restore(state, model, dtype="source", staged=staged)
        assert model.a.is_meta if meta else torch.equal(model.a, torch.zeros(2))
        still = Net(trains=False)
        fdsd.restore(state, still, dtype="source", staged=staged)
        assert still.b.dtype is torch.int64 and still.b.tolist() == [1, 1]


class TestWhatRanksAskFor:
    @pytest.mark.parametrize(
        ("name", "values"), [("staged", [False, True]), ("dtype", ["same", "target"])], ids=["staged", "dtype"]
    )
    def test_what_differs_is_one_error(self, name: str, values: list[Any]) -> None:
        def fn(world: MemoryWorld) -> str:
            return refused(Net(), group=world, **{name: values[world.rank]})

        first, second = run_world(fn, 2)
        assert first == second and first.startswith(f"{RankDisagreement.__name__}: ")
        assert f"{name} is {values[0]!r} on rank 0, {values[1]!r} on rank 1" in first


class TestNotes:
    def test_tied_names_that_differ_have_written_nothing(self) -> None:
        model: Any = Net()
        model.b = model.a
        assert "tied in the model" in refused(model, {**ones(), "b": torch.zeros(2)})

    def test_what_fails_half_way_says_so(self) -> None:
        def fail(tensor: torch.Tensor) -> torch.Tensor:
            raise SpecMismatch("no")

        state = fdsd.map_tensors(fail, spec=lambda spec: spec)(fdsd.defer(ones()))
        with pytest.raises(FdsdError) as raised:
            fdsd.restore(state, Net())
        assert any("may hold a part" in note for note in raised.value.__notes__)


class TestWords:
    def test_init_on_meta(self) -> None:
        with pytest.raises(SpecMismatch, match=r"init gave a tensor on the meta device for 'a', float32\[2\]"):
            fdsd.restore(
                {}, Net().to("meta"), allow_missing="{_}", init=lambda fqn, spec: torch.ones(spec.shape, device="meta")
            )

    def test_init_of_another_kind_of_numbers(self) -> None:
        model = Net().to("meta")
        options: dict[str, Any] = {"allow_missing": "{_}", "init": lambda fqn, spec: torch.ones(spec.shape, dtype=int)}
        with pytest.raises(SpecMismatch, match=r"init gave int64\[2\] for 'a', which is float32\[2\]"):
            fdsd.restore({}, model, **options)
        assert model.a.is_meta
        fdsd.restore({}, model, dtype="target", **options)
        assert model.a.dtype is torch.float32 and model.a.tolist() == [1.0, 1.0]

    def test_specs_are_not_missing_too(self) -> None:
        with pytest.raises(SpecMismatch) as raised:
            fdsd.restore(fdsd.specs(ones()), Net())
        assert "have no data" in str(raised.value) and "missing" not in str(raised.value)

    @pytest.mark.parametrize(
        ("prefix", "remedy"),
        [
            ("module.", r"strip_wrappers\(\)"),
            ("module._orig_mod.", r"strip_wrappers\(\)"),
            ("net.", "drop_prefix.'net.'"),
        ],
    )
    def test_a_prefix_has_its_remedy(self, prefix: str, remedy: str) -> None:
        state = {prefix + name: value for name, value in ones().items()}
        with pytest.raises(UnknownName, match=remedy):
            fdsd.restore(state, Net())

    def test_other_names_are_dropped(self) -> None:
        with pytest.raises(UnknownName, match=r"'net.a', 'q'.* drop\(\) them"):
            fdsd.restore({**ones(), "net.a": torch.ones(2), "q": torch.ones(1)}, Net())
