"""For each verb, when it fits a state and how to draw its arguments."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from attrs import field, frozen
from hypothesis import strategies as st

from fdsd.algebra.dtypes import is_widening
from fdsd.data.spec import TensorSpec, spec_of
from fdsd.data.statedict import StateDict
from fdsd.data.template import escape
from fdsd.pipeline.pipeline import Pipeline
from fdsd.transforms import (
    add_prefix,
    add_scalar,
    cast,
    concat,
    crop,
    drop,
    filter_frozen,
    index_select,
    insert,
    map_tensors,
    pad,
    permute,
    permute_rope,
    rename_fqns,
    reshape,
    select,
    split,
    stack,
    tie,
    transpose,
    unstack,
    untie,
)

__all__ = ["EXACT", "OTHERS", "Scene", "Verb"]

T = TypeVar("T")
Fits = Callable[[TensorSpec], bool]
_ROUNDS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@frozen
class Scene:
    """What the arguments of one verb are drawn from."""

    draw: st.DrawFn
    state: StateDict[Any]
    number: int

    def one(self, values: Any) -> Any:
        """Draw one of some values."""
        return self.draw(st.sampled_from(list(values)))

    def tensor(self, fits: Fits) -> tuple[str, TensorSpec]:
        """Draw a tensor that fits."""
        name: str = self.one(_tensors(self.state, fits))
        spec = spec_of(self.state[name])
        assert spec is not None
        return name, spec

    def dim(self, spec: TensorSpec, fits: Callable[[int], bool] = lambda size: True) -> int:
        """Draw a dim whose size fits, counted from the front or the end."""
        dim: int = self.one([d for d in range(spec.ndim) if fits(spec.shape[d])])
        return dim - spec.ndim if self.draw(st.booleans()) else dim

    def flag(self) -> bool:
        """Draw a truth value."""
        return self.draw(st.booleans())

    def fresh(self, word: str) -> str:
        """Give a name that no state has yet."""
        name = f"{word}{self.number}"
        while any(other == name or other.startswith(f"{name}.") for other in self.state):
            name += "_"
        return name


@frozen
class Verb:
    """One kind of step."""

    make: Callable[[Scene], Pipeline]
    fits_tensor: Fits | None = None
    fits_state: Callable[[StateDict[Any]], bool] = field(default=lambda state: True)
    computes: bool = field(default=False, kw_only=True)

    def fits(self, state: StateDict[Any]) -> bool:
        """Tell whether it can be made for a state."""
        has_tensor = self.fits_tensor is None or bool(_tensors(state, self.fits_tensor))
        return has_tensor and self.fits_state(state)


def _tensors(state: Mapping[str, Any], fits: Fits) -> list[str]:
    return [name for name, leaf in state.items() if (spec := spec_of(leaf)) is not None and fits(spec)]


def _any(spec: TensorSpec) -> bool:
    return True


def _has_dims(spec: TensorSpec) -> bool:
    return spec.ndim > 0


def _is_matrix(spec: TensorSpec) -> bool:
    return spec.ndim > 1


def _is_nonempty_in_some_dim(spec: TensorSpec) -> bool:
    return any(spec.shape)


# -- names ---------------------------------------------------------------------------------------------------------


def _rename(scene: Scene) -> Pipeline:
    names = list(scene.state)
    chosen = scene.draw(st.lists(st.sampled_from(names), unique=True, min_size=1, max_size=3))
    word = scene.fresh("renamed")
    return rename_fqns({escape(name): f"{word}.{k}" for k, name in enumerate(chosen)})


def _rename_all(scene: Scene) -> Pipeline:
    word = scene.fresh("all")
    return scene.one([rename_fqns({"{rest...}": f"{word}.{{rest...}}"}), add_prefix(f"{word}.")])  # type: ignore[no-any-return]


def _tie(scene: Scene) -> Pipeline:
    name, _ = scene.tensor(_any)
    return tie({scene.fresh("alias"): escape(name)})


# -- moves ---------------------------------------------------------------------------------------------------------


def _transpose(scene: Scene) -> Pipeline:
    name, spec = scene.tensor(_is_matrix)
    return transpose(escape(name), scene.dim(spec), scene.dim(spec))


def _permute(scene: Scene) -> Pipeline:
    name, spec = scene.tensor(_any)
    return permute(escape(name), scene.draw(st.permutations(range(spec.ndim))))


def _factors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]


def _reshape(scene: Scene) -> Pipeline:
    name, spec = scene.tensor(_any)
    if not spec.numel:
        shape: tuple[int, ...] = scene.one([spec.shape[::-1], (0,), (3, 0)])
    else:
        first = scene.one(_factors(spec.numel))
        second = scene.one(_factors(spec.numel // first))
        shape = (first, second, spec.numel // first // second)
        if scene.flag():
            shape = tuple([size for size in shape if size != 1])
        elif scene.flag():
            shape = (first, -1)
    return reshape(escape(name), shape, from_shape=spec.shape if scene.flag() else None)


def _reorder(scene: Scene) -> Pipeline:
    name, spec = scene.tensor(_has_dims)
    dim = scene.dim(spec)
    return index_select(escape(name), scene.draw(st.permutations(range(spec.shape[dim]))), dim=dim)


def _pad(scene: Scene) -> Pipeline:
    name, spec = scene.tensor(_has_dims)
    dim = scene.dim(spec)
    size = spec.shape[dim]
    return pad(escape(name), size + scene.one([1, 0, 3]), dim=dim, from_size=size if scene.flag() else None)


def _has_heads(spec: TensorSpec) -> bool:
    return spec.ndim > 0 and spec.shape[0] > 0 and spec.shape[0] % 2 == 0


def _rope(scene: Scene) -> Pipeline:
    name, spec = scene.tensor(_has_heads)
    heads = scene.one(_factors(spec.shape[0] // 2))
    return permute_rope(escape(name), heads=heads, to=scene.one(["halves", "pairs"]))


def _split(scene: Scene) -> Pipeline:
    name, spec = scene.tensor(_has_dims)
    dim = scene.dim(spec)
    size = spec.shape[dim]
    groups: int = scene.one(_factors(size) or [1])
    cut = scene.draw(st.integers(0, size // groups)) * groups
    word = scene.fresh("part")
    targets = [f"{word}.a", f"{word}.b"]
    return split(escape(name), targets, dim=dim, sizes=[cut, size - cut], groups=groups)


def _pairs(state: Mapping[str, Any]) -> list[tuple[str, str, int]]:
    """Give pairs of tensors that can be joined, with the dim."""
    found: list[tuple[str, str, int]] = []
    names = _tensors(state, _has_dims)
    for a in names:
        for b in names:
            x, y = spec_of(state[a]), spec_of(state[b])
            if a != b and x is not None and y is not None and (x.dtype, x.ndim) == (y.dtype, y.ndim):
                unequal = [d for d in range(x.ndim) if x.shape[d] != y.shape[d]]
                found += [(a, b, d) for d in range(x.ndim) if not set(unequal) - {d}]
    return found


def _concat(scene: Scene) -> Pipeline:
    a, b, dim = scene.one(_pairs(scene.state))
    sizes = [scene.state[name].shape[dim] for name in (a, b)]
    groups = scene.one(_factors(math.gcd(*sizes)) or [1])
    given = sizes if scene.flag() else None
    return concat([escape(a), escape(b)], scene.fresh("joined"), dim=dim, sizes=given, groups=groups)


def _indexed(state: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Give patterns with one hole, the index, whose tensors can be stacked, with the number of dims."""
    found: dict[str, dict[int, TensorSpec | None]] = {}
    for name, leaf in state.items():
        for match in re.finditer(r"(?:(?<=\.)|^)(0|[1-9][0-9]*)(?=\.|$)", name):
            pattern = f"{escape(name[: match.start()])}{{x}}{escape(name[match.end() :])}"
            found.setdefault(pattern, {})[int(match[0])] = spec_of(leaf)
    return [
        (pattern, spec.ndim)
        for pattern, members in found.items()
        if set(members) == set(range(len(members)))
        and len(set(members.values())) == 1
        and (spec := members[0]) is not None
    ]


def _stack(scene: Scene) -> Pipeline:
    pattern, ndim = scene.one(_indexed(scene.state))
    dim = scene.one(range(-ndim - 1, ndim + 1))
    return stack(pattern, scene.fresh("stack"), index=scene.one([None, "x"]), dim=dim)


def _unstack(scene: Scene) -> Pipeline:
    name, spec = scene.tensor(_is_nonempty_in_some_dim)
    dim = scene.dim(spec, lambda size: size > 0)
    num = spec.shape[dim] if scene.flag() else None
    return unstack(escape(name), f"{scene.fresh('each')}.{{x}}.w", dim=dim, num=num)


# -- values --------------------------------------------------------------------------------------------------------


def _widens(spec: TensorSpec) -> bool:
    return any(is_widening(spec.dtype, dtype) and dtype != spec.dtype for dtype in _ROUNDS)


def _widen(scene: Scene) -> Pipeline:
    name, spec = scene.tensor(_widens)
    wider = [dtype for dtype in _ROUNDS if is_widening(spec.dtype, dtype) and dtype != spec.dtype]
    return cast(scene.one(wider), escape(name), from_dtype=spec.dtype if scene.flag() else None)


def _is_real(spec: TensorSpec) -> bool:
    return not spec.dtype.is_complex


def _cast(scene: Scene) -> Pipeline:
    name, _ = scene.tensor(_is_real)
    return cast(scene.one(_ROUNDS), escape(name))


def _adds(spec: TensorSpec) -> bool:
    return spec.dtype in (*_ROUNDS, torch.int8, torch.int32, torch.int64, torch.complex64)


def _add(scene: Scene) -> Pipeline:
    name, spec = scene.tensor(_adds)
    value = 1.5 if spec.dtype.is_floating_point or spec.dtype.is_complex else 3
    return add_scalar(escape(name), value)


def twice_flattened(tensor: torch.Tensor) -> torch.Tensor:
    """Give all elements, then all of them again: a user's function that changes the shape."""
    return torch.stack([tensor, tensor]).flatten()


def _moves_plainly(spec: TensorSpec) -> bool:
    return spec.dtype in (*_ROUNDS, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool)


def _map(scene: Scene) -> Pipeline:
    name, spec = scene.tensor(_moves_plainly)
    made = TensorSpec((2 * spec.numel,), spec.dtype)
    return map_tensors(twice_flattened, escape(name), spec=made if scene.flag() else None)


def _untie(scene: Scene) -> Pipeline:
    return untie(escape(scene.one(scene.state)))


def _crop(scene: Scene) -> Pipeline:
    name, spec = scene.tensor(_has_dims)
    dim = scene.dim(spec)
    size = spec.shape[dim]
    to = scene.draw(st.integers(0, size))
    return crop(escape(name), to, dim=dim, from_size=size if scene.flag() else None)


def _choose(scene: Scene) -> Pipeline:
    names = scene.draw(st.lists(st.sampled_from(list(scene.state)), unique=True, min_size=1, max_size=3))
    patterns = list(map(escape, names))
    return scene.one([drop(*patterns), select(*patterns), filter_frozen(patterns)])  # type: ignore[no-any-return]


def _insert(scene: Scene) -> Pipeline:
    shape = scene.draw(st.lists(st.sampled_from([2, 0, 3]), max_size=2))
    spec = TensorSpec(shape, scene.one([torch.float32, torch.bool, torch.int16]))
    return insert(scene.fresh("new"), spec, init=1)


def _has_names(state: StateDict[Any]) -> bool:
    return len(state) > 0


EXACT = (
    Verb(_rename, fits_state=_has_names),
    Verb(_rename_all, fits_state=_has_names),
    Verb(_tie, _any),
    Verb(_transpose, _is_matrix),
    Verb(_permute, _any),
    Verb(_reshape, _any),
    Verb(_reorder, _has_dims),
    Verb(_pad, _has_dims),
    Verb(_rope, _has_heads),
    Verb(_split, _has_dims),
    Verb(_concat, fits_state=lambda state: bool(_pairs(state))),
    Verb(_stack, fits_state=lambda state: bool(_indexed(state))),
    Verb(_unstack, _is_nonempty_in_some_dim),
    Verb(_widen, _widens, computes=True),
)
"""Verbs that are exact once they are bound."""

OTHERS = (
    Verb(_cast, _is_real, computes=True),
    Verb(_add, _adds, computes=True),
    Verb(_map, _moves_plainly, computes=True),
    Verb(_untie, fits_state=_has_names, computes=True),
    Verb(_crop, _has_dims),
    Verb(_choose, fits_state=_has_names),
    Verb(_insert, _any),
)
"""Verbs that are one-sided, or have no inverse."""
