"""How random states are drawn; hypothesis is imported here."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from hypothesis import strategies as st

from fdsd.data.spec import TensorSpec, spec_of
from fdsd.data.statedict import StateDict, specs
from fdsd.data.ties import tie_key
from fdsd.testing._values import DTYPES, LAYOUTS, Values, has_layout, lay_out

__all__ = ["Extra", "random_states", "states_of"]

_PARTS = ("attn.q.weight", "attn.k.weight", "mlp.up.bias", "norm.weight", "w{1}?")
_SINGLES = ("embed.weight", "head.weight", "step", "scale", "rotary.inv_freq", "a", "état.ß", "a.b_c")
_OBJECTS = ("extra_state", None, 3, (1, 2))


class Extra:
    """An object of a class of one's own, such as a module may keep in ``_extra_state``."""


def states_of(spec: Mapping[str, Any], unique: bool) -> st.SearchStrategy[StateDict[Any]]:
    """Give states with the names, specs, ties and objects of one."""
    wanted = specs(spec)

    @st.composite
    def draw_state(draw: st.DrawFn) -> StateDict[Any]:
        return _state(draw, wanted, unique=unique, expand=False)

    return draw_state()


@st.composite
def random_states(draw: st.DrawFn, unique: bool) -> StateDict[Any]:
    """Give states of any kind."""
    wanted: dict[str, Any] = {}
    parts = draw(st.lists(st.sampled_from(_PARTS), unique=True, max_size=3))
    rows = [_random_spec(draw) for _ in parts]
    for i in range(draw(st.integers(0, 3))):
        wanted.update({f"layers.{i}.{part}": spec for part, spec in zip(parts, rows, strict=True)})
    for name in draw(st.lists(st.sampled_from(_SINGLES), unique=True, max_size=4)):
        wanted[name] = _random_spec(draw)
    for name in draw(st.lists(st.sampled_from(list(wanted)), unique=True, max_size=2)) if wanted else []:
        tied = TensorSpec(wanted[name].shape, wanted[name].dtype, tie=name)
        wanted |= {name: tied, f"tied.{name}": tied}
    if draw(st.booleans()):
        wanted["_extra_state"] = draw(st.one_of(st.sampled_from(_OBJECTS), st.builds(Extra)))
    order = draw(st.permutations(list(wanted)))
    return _state(draw, {name: wanted[name] for name in order}, unique=unique, expand=True)


def _random_spec(draw: st.DrawFn) -> TensorSpec:
    sizes = st.sampled_from((2, 1, 3, 4, 6, 0))
    shape = draw(st.lists(sizes, min_size=0, max_size=3))
    return TensorSpec(shape, draw(st.sampled_from(DTYPES)))


def _state(draw: st.DrawFn, wanted: Mapping[str, Any], *, unique: bool, expand: bool) -> StateDict[Any]:
    values = Values(draw(st.integers(0, 1 << 16)), unique=unique)
    made: dict[str, Any] = {}
    tied: dict[Hashable, torch.Tensor] = {}
    for name, leaf in wanted.items():
        spec, key = spec_of(leaf), tie_key(leaf)
        if spec is None:
            made[name] = leaf
        elif key is not None and key in tied:
            made[name] = tied[key]
        else:
            kinds = [kind for kind in LAYOUTS if has_layout(kind, spec) and (expand or kind != "expanded")]
            made[name] = lay_out(values.tensor(spec), draw(st.sampled_from(kinds)))
            if key is not None:
                tied[key] = made[name]
    return StateDict(made, metadata=getattr(wanted, "_metadata", None))
