"""Memory on the CPU: making it, moving there, copying into it; and whether two state dicts are alike. One process."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fdsd.comms.kinds import Once
from fdsd.compat import _cpu_memory as memory
from fdsd.compat._state_dict_utils import (
    CompanionMismatch,
    _check_state_dict_similarity,
    _copy_state_dict,
    _create_cpu_state_dict,
    _gather_state_dict,
    _iterate_state_dict,
    _offload_state_dict_to_cpu,
)
from fdsd.errors import FdsdError, SpecMismatch
from tests.helpers.tensors import patterns, same_bytes

NO_DATA = r"'a/w', 'b' are on the meta device, without data to put on the CPU. Give them memory first \(to_empty\(\)\)"

SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint16, torch.float8_e4m3fn])
TENSORS = st.builds(patterns, SHAPES, DTYPES)
LEAVES = st.one_of(TENSORS, st.integers(), st.none(), st.text(max_size=2))
STATES = st.dictionaries(
    st.text("ab.", min_size=1, max_size=3),
    st.recursive(
        LEAVES,
        lambda inner: st.one_of(
            st.dictionaries(st.one_of(st.text("xy", max_size=2), st.integers(0, 2)), inner, max_size=3),
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
        ),
        max_leaves=8,
    ),
    max_size=4,
)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    items = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    return [tensor for item in items for tensor in tensors_in(item)]


def structure(tree: Any) -> Any:
    return _iterate_state_dict(tree, *[lambda x, *_: f"{x.dtype}{tuple(x.shape)}"] * 3)


def all_same(a: Any, b: Any) -> bool:
    pairs = list(zip(tensors_in(a), tensors_in(b), strict=True))
    return repr(structure(a)) == repr(structure(b)) and all(same_bytes(x, y) for x, y in pairs)


# -- laws ------------------------------------------------------------------------------------------------------------


@given(STATES, st.booleans())
def test_copying_into_new_memory_gives_the_same(state: dict[str, Any], share: bool) -> None:
    before = copy.deepcopy(state)
    target = _create_cpu_state_dict(state, share_memory=share)
    assert _check_state_dict_similarity(state, target) and _check_state_dict_similarity(target, state)
    copied = _copy_state_dict(state, target)
    assert all_same(copied, state) and all_same(target, state) and all_same(state, before)
    for mine, new, given_ in zip(tensors_in(target), tensors_in(copied), tensors_in(state), strict=True):
        assert new is mine
        assert mine.is_shared() == share
        assert not mine.numel() or mine.data_ptr() != given_.data_ptr()


@given(STATES)
def test_what_is_on_the_cpu_stays_as_it_is(state: dict[str, Any]) -> None:
    for give in (_offload_state_dict_to_cpu, _gather_state_dict):
        made = give(state)
        assert all(a is b for a, b in zip(tensors_in(made), tensors_in(state), strict=True))
        assert repr(structure(made)) == repr(structure(state))
        assert made is not state
        assert give(state, ranks_only=(0, 3)).keys() == state.keys()
        assert give(state, ranks_only=(1,)) == {}


# -- new memory ------------------------------------------------------------------------------------------------------


def test_new_memory_is_new_for_every_tensor() -> None:
    state = {"step": torch.tensor(7.0), "w": torch.nn.Parameter(torch.ones(2, 3).t()), "e": torch.ones(0, 3), "lr": 0.1}
    made = _create_cpu_state_dict(state)
    assert made["step"].item() == 0 and made["step"].dtype is torch.float32
    assert type(made["w"]) is torch.Tensor and made["w"].shape == (3, 2) and made["w"].is_contiguous()
    assert not made["w"].requires_grad
    assert made["e"].shape == (0, 3)
    assert made["lr"] == 0.1
    made["step"].fill_(3)
    assert state["step"].item() == 7


def test_shared_memory_is_shared_for_all_tensors() -> None:
    """torch forgets those without dims."""
    made = _create_cpu_state_dict({"step": torch.tensor(7), "w": torch.ones(2), "e": torch.ones(0)}, share_memory=True)
    assert all(tensor.is_shared() for tensor in made.values())


def test_tied_tensors_get_one_memory() -> None:
    w = torch.ones(2, 2)
    made = _create_cpu_state_dict({"embed": w, "head": w, "view": w[:1], "norm": torch.ones(2, 2)})
    assert made["embed"] is made["head"]
    assert len({tensor.data_ptr() for tensor in made.values()}) == 3


def test_memory_of_meta_tensors() -> None:
    made = _create_cpu_state_dict({"w": torch.ones(2, 3, device="meta")}, share_memory=True)
    assert made["w"].device.type == "cpu" and made["w"].shape == (2, 3) and made["w"].is_shared()


def test_no_tensors_are_handed_on_or_copied() -> None:
    stream, unknown = io.BytesIO(b"x"), {1}
    made = _create_cpu_state_dict({"s": stream, "u": unknown, "b": (0.9, 0.99)})
    assert made["s"] is stream and made["u"] == {1} and made["u"] is not unknown and made["b"] == (0.9, 0.99)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator to pin for")
@pytest.mark.parametrize("share", [True, False])
def test_pinning_needs_an_accelerator(share: bool) -> None:
    with pytest.raises(RuntimeError, match=r"no accelerator.*pin_memory=False") as caught:
        _create_cpu_state_dict({}, pin_memory=True, share_memory=share)
    assert isinstance(caught.value, FdsdError)


class FakeRuntime:
    """Stands for CUDA's: says what is registered."""

    def __init__(self, error: int = 0) -> None:
        self.locked: dict[int, int] = {}
        self.error = error

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        assert flags == 1
        self.locked[address] = nbytes
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


def test_pinned_and_shared_memory_is_registered_as_long_as_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    state = {"w": torch.ones(3), "step": torch.tensor(1.0), "e": torch.ones(0)}
    made = _create_cpu_state_dict(state, pin_memory=True, share_memory=True)
    assert runtime.locked == {made["w"].data_ptr(): 12, made["step"].data_ptr(): 4}
    assert all(tensor.is_shared() for tensor in made.values())
    del made["w"]
    assert runtime.locked == {made["step"].data_ptr(): 4}


def test_memory_that_cannot_be_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: FakeRuntime(error=2))
    with pytest.raises(memory.PinningError, match="error 2"):
        _create_cpu_state_dict({"w": torch.ones(3)}, pin_memory=True, share_memory=True)


def test_only_memory_with_bytes_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    real = torch.empty

    def empty(shape: Any, *, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        asked.append((tuple(shape), pin_memory))
        return real(shape, **kwargs)

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch, "empty", empty)
    _create_cpu_state_dict({"w": torch.ones(3), "step": torch.tensor(1.0), "e": torch.ones(0)}, pin_memory=True)
    assert asked == [((3,), True), ((), True), ((0,), False)]


# -- copying ---------------------------------------------------------------------------------------------------------


def test_what_is_given_back() -> None:
    w = torch.zeros(2, dtype=torch.bfloat16)
    target = {"w": w, "lr": 0.5, "betas": [0.1, 0.2], "g": [None]}
    source = {"w": torch.nn.Parameter(torch.tensor([1.0, 2.0])), "lr": 0.1, "betas": (0.9, 0.99), "g": [3]}
    made = _copy_state_dict(source, target)
    assert made["w"] is w and w.tolist() == [1, 2] and not w.requires_grad
    assert made == {"w": w, "lr": 0.1, "betas": (0.9, 0.99), "g": [3]}
    assert target == {"w": w, "lr": 0.5, "betas": [0.1, 0.2], "g": [None]}


@pytest.mark.parametrize("bad", [torch.ones(5, 1), torch.ones(6, 4), torch.ones(4), torch.ones(5, 4, 1)])
def test_shapes_are_checked_before_anything_is_written(bad: torch.Tensor) -> None:
    """torch broadcasts the first one, and has half written when it raises at the others."""
    target = {"a": torch.zeros(2), "w": torch.zeros(5, 4), "z": torch.zeros(3)}
    source = {"a": torch.ones(2), "w": bad, "z": torch.ones(4)}
    with pytest.raises(RuntimeError, match=r"'w': it has the shape .* against \(5, 4\); 'z'") as caught:
        _copy_state_dict(source, target)
    assert isinstance(caught.value, SpecMismatch)
    assert all(not tensor.any() for tensor in target.values())


@pytest.mark.parametrize(
    "source, target",
    [
        ({"a": torch.ones(1)}, {"b": torch.ones(1)}),
        ({"a": torch.ones(1)}, {"a": torch.ones(1), "b": 1}),
        ({"a": [torch.ones(1)]}, {"a": []}),
        ({"a": {"b": torch.ones(1)}}, {"a": torch.ones(1)}),
        ({"a": {"b": torch.ones(1)}}, {"a": 3}),
        ({"a": torch.ones(1)}, {"a": None}),
        ({"a": torch.ones(1)}, {"a": 1}),
        ({"a": torch.ones(1)}, None),
    ],
)
def test_other_structures_are_refused(source: Any, target: Any) -> None:
    with pytest.raises(CompanionMismatch, match="built in different ways"):
        _copy_state_dict(source, target)
    assert _check_state_dict_similarity(source, target) is False


def test_swapped_tensors_are_swapped() -> None:
    a, b = torch.tensor([1, 2]), torch.tensor([3, 4])
    _copy_state_dict({"x": a, "y": b}, {"x": b, "y": a})
    assert (a.tolist(), b.tolist()) == ([3, 4], [1, 2])


def test_types_are_checked_if_asked() -> None:
    target = {"u": None, "w": torch.zeros(1)}
    with pytest.raises(ValueError, match="Unexpected value type <class 'set'> at 'u'"):
        _copy_state_dict({"u": {1}, "w": torch.ones(1)}, target)
    assert target["w"].item() == 0
    unknown = {1}
    made = _copy_state_dict({"u": unknown, "w": torch.ones(1)}, target, type_check=False)
    assert made["u"] == {1} and made["u"] is not unknown and target["w"].item() == 1


@pytest.mark.parametrize("give", [_offload_state_dict_to_cpu, _gather_state_dict])
def test_types_are_checked_when_moving(give: Any) -> None:
    with pytest.raises(ValueError, match="Unexpected value type <class 'set'> at 'a/\\[0\\]'"):
        give({"a": [{1}]})
    unknown = {1}
    made = give({"a": unknown}, type_check=False)
    assert made == {"a": {1}} and made["a"] is not unknown


# -- alike or not ----------------------------------------------------------------------------------------------------


def test_comparing_reads_structure_only() -> None:
    """torch copies the first one into the second one."""
    a, b = {"w": torch.ones(2), "n": [1, {"s": "x"}]}, {"w": torch.zeros(2), "n": (2, {"s": 3})}
    assert _check_state_dict_similarity(a, b) is True
    assert b["w"].tolist() == [0, 0]
    b["w"] = torch.zeros(2, dtype=torch.float16)
    assert _check_state_dict_similarity(a, b) is False
    b["w"] = torch.zeros(2, 1)
    assert _check_state_dict_similarity(a, b) is False
    b["w"] = 1.0  # type: ignore[assignment]
    assert _check_state_dict_similarity(a, b) is False and _check_state_dict_similarity(b, a) is False


# -- ties and functions of the caller --------------------------------------------------------------------------------


def test_tied_tensors_are_moved_once() -> None:
    moved: list[int] = []

    def move(x: torch.Tensor) -> torch.Tensor:
        moved.append(x.numel())
        return x.clone()

    once = Once(move)
    w = torch.ones(4)
    results = [once(w), once(torch.nn.Parameter(w)), once(w[:2]), once(w.view(2, 2)), once(torch.ones(4))]
    assert results[0] is results[1]
    assert moved == [4, 2, 4, 4]


def test_functions_get_what_torch_gives_them() -> None:
    seen: list[Any] = []

    def record(tensor: Any, *rest: Any) -> Any:
        seen.append((tensor, *rest))
        return tensor + 1

    device, target = torch.device("cpu"), {"w": torch.zeros(2), "n": [torch.zeros(1)], "k": 5}
    source = {"w": torch.ones(2), "n": (torch.ones(1),), "k": 3}

    def refuse(*args: Any) -> Any:
        pytest.fail("there is no such tensor")

    made = _iterate_state_dict(source, refuse, refuse, record, device=device, companion_obj=target)
    assert made == {"w": target["w"], "n": (target["n"][0],), "k": 3}  # type: ignore[index]
    assert made["w"] is target["w"] and target["w"].tolist() == [2, 2]  # type: ignore[attr-defined]
    assert seen == [(source["w"], None, device, target["w"]), (source["n"][0], None, device, target["n"][0])]  # type: ignore[index]
    with pytest.raises(CompanionMismatch):
        _iterate_state_dict(source, refuse, refuse, record, companion_obj={"w": 1})
    assert len(seen) == 2
    assert _iterate_state_dict(source, refuse, refuse, record, ranks_only=(1,)) == {}
    assert _iterate_state_dict(torch.ones(1), refuse, refuse, record, ranks_only=(1,)) is None
    assert _iterate_state_dict(torch.ones(1), refuse, refuse, record, cpu_offload=True).item() == 2


def test_nothing_is_kept_alive() -> None:
    """Tensors are gone with the last reference to them, without a run of the garbage collector."""
    state, gone = {"a": {"w": torch.ones(2)}}, []
    gc.collect()
    gc.disable()
    try:
        for give in (_create_cpu_state_dict, lambda s: _copy_state_dict(s, s), _offload_state_dict_to_cpu):
            made = give(state)
            weakref.finalize(made["a"]["w"], gone.append, give)
            del made
        state.clear()
        assert len(gone) == 3
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "move",
    [
        _offload_state_dict_to_cpu,
        lambda state: _gather_state_dict(state, cpu_offload=True),
        lambda state: _iterate_state_dict(state, *[lambda x, *_: x] * 3, cpu_offload=True),
    ],
    ids=["offload", "gather", "iterate"],
)
def test_tensors_without_data_are_all_named(move: Callable[[Any], Any]) -> None:
    """The error is of the class of torch's own."""
    w = torch.ones(2, device="meta")
    with pytest.raises(NotImplementedError, match=NO_DATA) as caught:
        move({"a": {"w": w, "x": torch.ones(1)}, "b": w[:1], "lr": 0.1})
    assert isinstance(caught.value, FdsdError)


def test_tensors_without_data_are_left_where_they_are() -> None:
    w = torch.ones(2, device="meta")
    assert _gather_state_dict({"w": w})["w"] is w
