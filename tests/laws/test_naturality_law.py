"""Law 7 without meshes: renaming commutes with pointwise maps, and pointwise maps with cutting into chunks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from fdsd import (
    Pipeline,
    StateDict,
    add_prefix,
    add_scalar,
    average,
    cast,
    concat,
    lerp,
    map_tensors,
    rename_fqns,
    split,
    stack,
)
from fdsd.data.spec import TensorSpec
from fdsd.data.template import escape
from fdsd.testing import assert_same, pipelines, states

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2)


def is_float(name: str, spec: TensorSpec) -> bool:
    return spec.dtype in FLOATS


def doubled(x: torch.Tensor) -> torch.Tensor:
    return (x.to(torch.float64) * 2).to(x.dtype)


MAPS: list[Pipeline] = [
    cast(torch.float32, is_float),
    cast(torch.bfloat16, is_float),
    add_scalar(is_float, 0.375),
    map_tensors(doubled, is_float),
]
RENAMES: list[Pipeline] = [
    add_prefix("model."),
    rename_fqns({"{rest...}": "m.{rest...}.x"}),
    rename_fqns({"layers.{i}.{rest...}?": "blocks.{i+3}.{rest...}", "embed.weight?": "table"}),
    rename_fqns(lambda name: name[::-1], inverse=lambda name: name[::-1]),
]


@given(states(), st.sampled_from(RENAMES), st.sampled_from(MAPS))
def test_renaming_commutes_with_pointwise_maps(state: StateDict[Any], rename: Pipeline, change: Pipeline) -> None:
    assume(len(state))
    assert_same((rename >> change)(state), (change >> rename)(state), order=True)


@given(states(), st.sampled_from(RENAMES), st.floats(-2, 2), st.floats(-2, 2))
def test_renaming_commutes_with_averages(state: StateDict[Any], rename: Pipeline, w: float, v: float) -> None:
    assume(len(state))
    other = map_tensors(doubled, is_float)(state)
    assert_same(
        rename(average([state, other], [w, v])),
        average([rename(state), rename(other)], [w, v]),
        order=True,
        nans_equal=True,
    )
    assert_same(rename(lerp(state, other, w)), lerp(rename(state), rename(other), w), order=True, nans_equal=True)


def chunked(name: str, spec: TensorSpec, dim: int, cuts: list[int]) -> tuple[Pipeline, list[str]]:
    bounds = [0, *sorted(cut % (spec.shape[dim] + 1) for cut in cuts), spec.shape[dim]]
    sizes = [b - a for a, b in itertools.pairwise(bounds)]
    targets = [f"chunk.{k}" for k in range(len(sizes))]
    return split(escape(name), targets, dim=dim, sizes=sizes), targets


@given(states(), st.data(), st.sampled_from(MAPS), st.lists(st.integers(0, 10), max_size=3))
def test_pointwise_maps_commute_with_cutting(
    state: StateDict[Any], data: st.DataObject, change: Pipeline, cuts: list[int]
) -> None:
    names = [n for n, x in state.items() if isinstance(x, torch.Tensor) and x.ndim and x.dtype in FLOATS]
    assume(names)
    name = data.draw(st.sampled_from(names))
    leaf = state[name]
    spec = TensorSpec(tuple(leaf.shape), leaf.dtype)
    dim = data.draw(st.integers(0, spec.ndim - 1))
    cut, _ = chunked(name, spec, dim, cuts)
    assert_same((cut >> change)(state), (change >> cut)(state), order=True, tied=False)
    there = (cut >> change >> ~cut)(state)
    assert_same(there[name], change(state)[name])


@given(states(), st.data())
def test_pointwise_maps_commute_with_moves(state: StateDict[Any], data: st.DataObject) -> None:
    p = data.draw(pipelines(state, exact=True, structural=True).filter(lambda p: "pad(" not in repr(p)))
    for change in (add_scalar(is_float, 0.375), map_tensors(doubled, is_float)):
        assert_same((p >> change)(state), (change >> p)(state), order=True, tied=False)


Join = Callable[[list[str]], Pipeline]


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=5), st.sampled_from(MAPS))
def test_pointwise_maps_commute_with_joining(values: list[float], change: Pipeline) -> None:
    state = StateDict({f"e.{k}.w": torch.tensor([value]) for k, value in enumerate(values)})
    for p in (stack("e.{x}.w", "e.w"), concat([f"e.{k}.w" for k in range(len(values))], "e.w", dim=0)):
        assert_same((p >> change)(state), (change >> p)(state))
