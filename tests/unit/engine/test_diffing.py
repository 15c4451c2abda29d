"""Diffs: every kind of difference is found and named, whatever the dtype, in memory that does not grow."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fdsd
from fdsd.data.errors import BadFile, FdsdError, SpecMismatch
from fdsd.engine import diffing
from fdsd.engine.diffing import ValueDiff
from tests.helpers.tensors import NUMERIC, any_layout, carried, numbers, patterns, plain, same_bytes, slots

from .conftest import MIXED

NAN, INF = math.nan, math.inf


def changed(tensor: torch.Tensor, index: int) -> torch.Tensor:
    """A copy with other bits in one element."""
    made = carried(plain(tensor)).clone(memory_format=torch.contiguous_format)
    flat = made.view(-1)
    if tensor.dtype is torch.bool:
        flat[index] = 1 - flat[index]
    elif made.dtype.is_complex:
        flat[index] = flat[index] + 1
    else:
        flat[index] = flat[index] ^ 1
    return slots(made, tensor.dtype)


@given(
    st.sampled_from(NUMERIC),
    st.lists(st.integers(0, 5), max_size=4).map(tuple),
    st.integers(1, 40),
    st.randoms(use_true_random=False),
)
@settings(max_examples=150)
def test_the_elements_whose_bits_differ_are_counted(
    dtype: torch.dtype, shape: tuple[int, ...], chunk: int, rng: random.Random
) -> None:
    a = numbers(shape, dtype)
    places = rng.sample(range(a.numel()), rng.randint(0, min(3, a.numel())))
    b = a
    for place in places:
        b = changed(b, place)
    x, y = any_layout(rng, a), any_layout(rng, b)
    a, b = plain(x), plain(y)
    count = int((carried(a) != carried(b)).sum()) if a.dtype != torch.complex128 else int((a != b).sum())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(diffing, "_CHUNK", chunk)
        other = {"w": y, "same": a}
        found = fdsd.diff({"w": x, "same": x}, fdsd.defer(other) if rng.random() < 0.5 else other)
    assert found.same == (count == 0) == same_bytes(a, b)
    assert {name: value.unequal for name, value in found.values.items()} == ({"w": count} if count else {})


def test_nothing_differs(tmp_path: Path) -> None:
    fdsd.save(MIXED, tmp_path / "x.safetensors")
    fdsd.save(MIXED, tmp_path / "x.pt")
    for a in (MIXED, fdsd.open(tmp_path / "x.safetensors"), fdsd.open(tmp_path / "x.pt"), fdsd.StateDict(MIXED)):
        found = fdsd.diff(a, MIXED)
        assert found.same and str(found) == "no differences in 7 entries"
    assert fdsd.diff({}, {}).same


def test_order_is_no_difference() -> None:
    assert fdsd.diff(MIXED, dict(reversed(MIXED.items()))).same


def test_all_kinds_at_once() -> None:
    w = torch.tensor([1.0, 2.0, 4.0])
    a = {"w": w, "only": w, "shape": w, "dtype": w, "kind": w, "epoch": 3, "same": {"x": 1}}
    b = {
        "same": {"x": 1},
        "w": torch.tensor([1.0, 2.5, 3.0]),
        "shape": w[:2],
        "dtype": w.double(),
        "kind": "text",
        "epoch": 4,
        "new": w,
    }
    found = fdsd.diff(a, b)
    assert (found.only_a, found.only_b, found.objects) == (("only",), ("new",), ("epoch",))
    assert found.specs == {
        "shape": ("float32[3]", "float32[2]"),
        "dtype": ("float32[3]", "float64[3]"),
        "kind": ("float32[3]", "str"),
    }
    assert found.values == {"w": ValueDiff(2, 3, 1.0, pytest.approx(1 / 3))}
    assert found.compared == 8
    assert str(found).splitlines() == [
        "- only: only in a",
        "+ new: only in b",
        "! shape: float32[3] became float32[2]",
        "! dtype: float32[3] became float64[3]",
        "! kind: float32[3] became str",
        "~ w: 2 of 3 elements differ, max abs 1, max rel 0.333",
        "~ epoch: the objects differ",
    ]
    assert repr(found) == str(found)


def test_it_has_no_truth_value() -> None:
    with pytest.raises(TypeError, match=r"ask diff\(a, b\)\.same"):
        bool(fdsd.diff({}, {}))
    with pytest.raises(TypeError):
        assert not fdsd.diff({}, {"a": 1})


def test_names_are_folded() -> None:
    a = {f"layers.{i}.{x}": torch.ones(2) for i in range(40) for x in "qk"}
    found = fdsd.diff(a, {"embed": torch.ones(1)})
    assert str(found).splitlines()[-1] == "+ embed: only in b"
    assert len(str(found).splitlines()) <= 3
    assert "layers.{0..39}" in str(found)
    found = fdsd.diff(a, {name: leaf.double() for name, leaf in a.items()})
    assert len(str(found).splitlines()) <= 2
    assert "float32[2] became float64[2]" in str(found)


# -- values ----------------------------------------------------------------------------------------------------------


def values(a: Any, b: Any, **tolerances: float) -> ValueDiff | None:
    return fdsd.diff({"w": a}, {"w": b}, **tolerances).values.get("w")


def test_nan_and_zero_are_told_by_their_bits() -> None:
    nan, other = torch.tensor([NAN]), torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert values(nan, nan.clone()) is None
    assert values(nan, other) == ValueDiff(1, 1, 0.0, 0.0)
    assert values(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])) == ValueDiff(1, 2, 0.0, 0.0)
    assert str(values(nan, torch.tensor([1.0]))) == "1 of 1 element differ, max abs nan, max rel nan"
    with_nan = values(torch.tensor([1.0, NAN, 5.0]), torch.tensor([2.0, 3.0, 5.0]))
    assert with_nan is not None and with_nan.unequal == 2 and math.isnan(with_nan.max_abs)


@pytest.mark.parametrize("tolerances", [{"rtol": 1e-9}, {"atol": 1e-9}])
def test_nans_are_equal_within_tolerances(tolerances: dict[str, float]) -> None:
    other = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert values(torch.tensor([NAN]), other, **tolerances) is None


def test_nan_and_zero_within_tolerances() -> None:
    assert values(torch.tensor([0.0]), torch.tensor([-0.0]), rtol=1e-9) is None
    assert values(torch.tensor([NAN]), torch.tensor([1.0]), rtol=1, atol=1e9) is not None
    assert values(torch.tensor([1.0]), torch.tensor([NAN]), rtol=1, atol=1e9) is not None


def test_nan_in_one_chunk_is_not_lost_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diffing, "_CHUNK", 1)
    for order in ([NAN, 1.0], [1.0, NAN]):
        found = values(torch.tensor(order), torch.tensor([3.0, 3.0]))
        assert found is not None and found.unequal == 2 and math.isnan(found.max_abs)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64]
)
def test_tolerances_are_those_of_torch(dtype: torch.dtype) -> None:
    a = torch.tensor([1.0, 2.0, 4.0, 0.0, 8.0]).to(dtype)
    b = torch.tensor([1.0, 2.5, 3.0, 0.5, 8.0]).to(dtype)
    for rtol, atol in ((0.0, 0.5), (0.2, 0.0), (0.0, 0.4), (0.1, 0.3), (1.0, 0.0), (0.0, 1.0), (0.34, 0.0)):
        found = values(a, b, rtol=rtol, atol=atol)
        wide = torch.complex128 if dtype.is_complex else torch.float64
        close = torch.isclose(a.to(wide), b.to(wide), rtol=rtol, atol=atol)
        assert (0 if found is None else found.unequal) == int((~close).sum())
        if found is not None:
            error = (a.to(wide) - b.to(wide)).abs()[~close]
            assert found.max_abs == float(error.max())


@pytest.mark.parametrize("a, b", [(INF, -INF), (1.0, INF), (INF, 1.0), (-INF, 5.0)])
def test_infinities_are_close_to_themselves_only(a: float, b: float) -> None:
    assert values(torch.tensor([a]), torch.tensor([a]), rtol=0.1) is None
    assert values(torch.tensor([a]), torch.tensor([b])) is not None
    assert values(torch.tensor([a]), torch.tensor([b]), rtol=0.1) is not None


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64, torch.uint16, torch.uint32, torch.uint64])
def test_integers(dtype: torch.dtype) -> None:
    a, b = torch.tensor([1, 5, 100]).to(dtype), torch.tensor([1, 7, 96]).to(dtype)
    assert values(a, b) == ValueDiff(2, 3, 4.0, pytest.approx(2 / 7))
    assert values(a, b, atol=2) == ValueDiff(1, 3, 4.0, pytest.approx(4 / 96))
    assert values(a, b, atol=4) is None


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64])
def test_large_integers_are_exact(dtype: torch.dtype) -> None:
    a, b = torch.tensor([2**60]).to(dtype), torch.tensor([2**60 + 100]).to(dtype)
    assert values(a, b, atol=99) == ValueDiff(1, 1, 100.0, pytest.approx(0, abs=1e-12))
    assert values(a, b, atol=100) is None


def test_bool_and_complex() -> None:
    assert values(torch.tensor([True, False]), torch.tensor([True, True])) == ValueDiff(1, 2, 1.0, 1.0)
    found = values(torch.tensor([1 + 1j, 2]), torch.tensor([1 + 1j, 2 + 3j]))
    assert found == ValueDiff(1, 2, 3.0, pytest.approx(3 / 13**0.5))
    assert values(torch.tensor([1 + 1j]), torch.tensor([1 + 1j]).conj().resolve_conj()) is not None


def test_dtypes_without_numbers() -> None:
    if (dtype := getattr(torch, "float4_e2m1fn_x2", None)) is None:
        pytest.skip("this torch has no packed dtype")
    a, b = (torch.tensor(bits, dtype=torch.uint8).view(dtype) for bits in ([1, 2, 3], [1, 9, 3]))
    found = values(a, b, atol=100)
    assert found is not None and found.unequal == 1 and math.isnan(found.max_abs)
    assert values(a, a.view(torch.uint8).clone().view(dtype)) is None


def test_a_division_by_zero_is_infinite() -> None:
    assert values(torch.tensor([1.0]), torch.tensor([0.0])) == ValueDiff(1, 1, 1.0, INF)


@pytest.mark.parametrize("tolerances", [{"rtol": -1.0}, {"atol": -0.5}])
def test_tolerances_below_zero(tolerances: dict[str, float]) -> None:
    with pytest.raises(SpecMismatch, match="tolerances are 0 or more"):
        fdsd.diff({}, {}, **tolerances)


def test_large_tensors_are_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diffing, "_CHUNK", 100)
    a = patterns((7, 11, 13), torch.int32)
    b = changed(changed(a, 0), a.numel() - 1)
    sizes: list[int] = []
    empty = torch.empty

    def watched(*args: Any, **options: Any) -> torch.Tensor:
        made = empty(*args, **options)
        sizes.append(made.numel())
        return made

    monkeypatch.setattr(torch, "empty", watched)
    lazy = fdsd.defer({"w": a.permute(2, 0, 1)}), fdsd.defer({"w": b.permute(2, 0, 1)})
    found = fdsd.diff(*lazy).values["w"]
    assert (found.unequal, found.numel) == (2, 1001)
    assert sizes and max(sizes) <= 100


# -- states ----------------------------------------------------------------------------------------------------------


def test_specs_are_compared_without_data() -> None:
    specs = fdsd.specs(MIXED)
    assert fdsd.diff(specs, MIXED).same and fdsd.diff(MIXED, specs).same and fdsd.diff(specs, specs).same
    other = {**specs, "step": fdsd.TensorSpec((2,), torch.int64)}
    assert fdsd.diff(MIXED, other).specs == {"step": ("int64[]", "int64[2]")}


def trained(lr: float = 0.1) -> fdsd.TrainState:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optim = fdsd.OptimState.from_torch(optimizer.state_dict(), ["weight", "bias"])
    return fdsd.TrainState(fdsd.StateDict(model.state_dict()), optim, {"epoch": 3, "rng": torch.arange(4)})


def test_train_states_and_optimizers() -> None:
    a = trained()
    assert fdsd.diff(a, trained()).same and fdsd.diff(a.optim, trained().optim).same
    b = trained(lr=0.2)
    found = fdsd.diff(a, b)
    assert set(found.values) == {"weight", "bias"} and found.objects == ("optim.param_groups",)
    assert fdsd.diff(a.optim, b.optim).objects == ("param_groups",)
    changed_state = fdsd.TrainState(a.model, None, {"epoch": 4, "rng": torch.arange(4) + 1})
    found = fdsd.diff(a, changed_state)
    assert found.objects == ("extra.epoch",) and set(found.values) == {"extra.rng"}
    assert {"optim.exp_avg.weight", "optim.step.bias", "optim.param_groups"} <= set(found.only_a)


def test_objects_that_hold_tensors() -> None:
    a, b = ({"sampler": {"rng": torch.arange(4), "step": 3}} for _ in range(2))
    assert fdsd.diff(a, b).same
    assert fdsd.diff(trained(), fdsd.TrainState(trained().model, trained().optim, trained().extra)).same
    b["sampler"]["rng"] = torch.arange(4) + 1
    assert not fdsd.diff(a, b).same


@pytest.mark.parametrize("state", ["model.safetensors", Path("x"), 3, None, [torch.ones(1)]])
def test_what_is_no_state(state: Any) -> None:
    for pair in ((state, {}), ({}, state)):
        with pytest.raises(SpecMismatch, match=r"fdsd\.open\(path\)"):
            fdsd.diff(*pair)


def test_a_file_that_changed(tmp_path: Path) -> None:
    fdsd.save(MIXED, tmp_path / "x.safetensors")
    found = fdsd.open(tmp_path / "x.safetensors")
    fdsd.save({"w": torch.ones(1)}, tmp_path / "x.safetensors", overwrite=True)
    with pytest.raises(BadFile, match="was changed after it was opened"):
        fdsd.diff(found, MIXED)


def test_sparse_tensors_are_refused() -> None:
    with pytest.raises(FdsdError, match="to_dense"):
        fdsd.diff({"w": torch.eye(2).to_sparse()}, {"w": torch.eye(2)})
