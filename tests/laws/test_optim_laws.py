"""Law 9 for the data itself: torch's dict and the flat form round-trip, and reading changes nothing."""

from __future__ import annotations

import itertools
import pickle
from typing import Any

import optree
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from fdsd.data.columns import is_empty
from fdsd.data.errors import NameConflict
from fdsd.data.flat_optim import flatten, unflatten
from fdsd.data.optim import OptimState, ParamGroup
from fdsd.data.values import has_tensor

NAMES = ["a", "a.b", "a.b.c", "layers.10.w", "layers.2.w", "0", "", "état.w", "state.a", "param_groups.a.lr"]
KEYS = ["step", "exp_avg", "b.c", "b", "c", "kron", 0, 1, ("shape", 2), "0", None]
COUNTER = itertools.count(1)


class Custom:
    """An object that torch would hand through."""


def tensors() -> st.SearchStrategy[torch.Tensor]:
    shapes = st.sampled_from([(), (3,), (2, 2), (0,), (2, 0, 3)])
    dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
    return st.builds(lambda shape, dtype: torch.full(shape, next(COUNTER)).to(dtype), shapes, dtypes)


def leaves() -> st.SearchStrategy[Any]:
    plain = [st.none(), st.integers(), st.floats(), st.text(max_size=3), st.builds(Custom), st.just(())]
    return st.one_of(tensors(), *plain, st.lists(st.one_of(tensors(), st.none()), max_size=2))


def entries() -> st.SearchStrategy[Any]:
    """State of one parameter: a dict, nested at will, empty at will; or what an optimizer's author put there."""
    nested = st.recursive(
        leaves(), lambda inner: st.dictionaries(st.sampled_from(KEYS), inner, max_size=3), max_leaves=4
    )
    return st.one_of(st.dictionaries(st.sampled_from(KEYS), nested, max_size=4), leaves())


def options() -> st.SearchStrategy[dict[str, Any]]:
    values = st.one_of(
        st.floats(), st.booleans(), st.none(), st.tuples(st.floats(), st.floats()), st.just([0.9, 0.95]), tensors()
    )
    return st.dictionaries(st.sampled_from(["lr", "betas", "initial_lr", "eps", "foreach"]), values, max_size=4)


@st.composite
def osds(draw: st.DrawFn) -> tuple[dict[str, Any], list[str]]:
    """Torch's dict by ids, and the names: empty groups, no groups, partial state, state under other names."""
    names = draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=6))
    cuts = sorted(draw(st.lists(st.integers(0, len(names)), max_size=3)))
    bounds = list(itertools.pairwise([0, *cuts, len(names)])) if names or draw(st.booleans()) else []
    is_named = draw(st.booleans())
    groups = [
        {**draw(options()), **({"param_names": names[a:b]} if is_named else {}), "params": list(range(a, b))}
        for a, b in bounds
    ]
    ids = draw(st.lists(st.integers(0, len(names) - 1), unique=True)) if names else []
    state: dict[Any, Any] = {i: draw(entries()) for i in ids}
    state |= draw(st.dictionaries(st.sampled_from(["global", "kfac.A"]), entries(), max_size=2))
    extra = draw(st.dictionaries(st.sampled_from(["version", "rng"]), leaves(), max_size=2))
    return {"state": state, "param_groups": groups, **extra}, names


def same_tree(a: Any, b: Any) -> bool:
    """Whether two dicts of torch are the same: containers of the same type item by item, leaves by identity."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_tree(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same_tree, a, b))
    return isinstance(a, int | str) and a == b


def frame(tree: Any) -> Any:
    """A copy of all containers with the leaves' identities, to see a change."""
    if isinstance(tree, dict):
        return [(key, frame(value)) for key, value in tree.items()]
    return [frame(item) for item in tree] if isinstance(tree, list | tuple) else id(tree)


def by_name(osd: dict[str, Any], names: list[str]) -> dict[str, Any]:
    groups = [{**group, "params": [names[i] for i in group["params"]]} for group in osd["param_groups"]]
    state = {names[key] if isinstance(key, int) else key: value for key, value in osd["state"].items()}
    return {**osd, "state": state, "param_groups": groups}


@given(osds())
def test_dict_by_ids_round_trips(case: tuple[dict[str, Any], list[str]]) -> None:
    osd, names = case
    before = frame(osd)
    state = OptimState.from_torch(osd, names)
    assert same_tree(state.to_torch(ids=True), osd)
    assert same_tree(state.to_torch(), by_name(osd, names))
    assert frame(osd) == before
    assert state.fqns == tuple(names)


@given(osds())
def test_dict_by_names_round_trips(case: tuple[dict[str, Any], list[str]]) -> None:
    osd, names = case
    state = OptimState.from_torch(by_name(osd, names))
    assert state == OptimState.from_torch(osd, dict(enumerate(names)))
    assert same_tree(state.to_torch(), by_name(osd, names))
    assert same_tree(state.to_torch(ids=True), osd)


@given(osds())
def test_param_names_serve_as_names(case: tuple[dict[str, Any], list[str]]) -> None:
    osd, names = case
    assume(all("param_names" in group for group in osd["param_groups"]))
    state = OptimState.from_torch(osd)
    assert state == OptimState.from_torch(osd, names)
    assert same_tree(state.to_torch(ids=True), osd)


@given(osds())
def test_state_is_the_same_after_torch_s_dict(case: tuple[dict[str, Any], list[str]]) -> None:
    state = OptimState.from_torch(*case)
    again = OptimState.from_torch(state.to_torch())
    assert again == state
    assert list(again.fqns) == list(state.fqns)
    for name in state.fqns:
        assert same_tree(again.slots_of(name), state.slots_of(name))


@given(osds())
def test_results_share_no_container(case: tuple[dict[str, Any], list[str]]) -> None:
    state = OptimState.from_torch(*case)
    first, second = state.to_torch(), state.to_torch()
    before = frame(second)
    for group in first["param_groups"]:
        group["params"].append("x")
        group.clear()
    for entry in first["state"].values():
        if type(entry) is dict:
            entry["x"] = 1
    first["state"].clear()
    assert frame(second) == before
    assert same_tree(state.to_torch(), second)


@given(osds())
def test_tree_map_of_the_identity_is_the_identity(case: tuple[dict[str, Any], list[str]]) -> None:
    state = OptimState.from_torch(*case)
    again = optree.tree_map(lambda leaf: leaf, state, namespace="fdsd")
    assert isinstance(again, OptimState)
    leaves = optree.tree_leaves(state, namespace="fdsd")
    assert all(a is b for a, b in zip(leaves, optree.tree_leaves(again, namespace="fdsd"), strict=True))
    assert again == state
    accessors = optree.tree_accessors(state, namespace="fdsd")
    assert all(accessor(state) is leaf for accessor, leaf in zip(accessors, leaves, strict=True))


@given(osds())
def test_pickle_keeps_structure_and_values(case: tuple[dict[str, Any], list[str]]) -> None:
    state = OptimState.from_torch(*case)
    again = pickle.loads(pickle.dumps(state))
    mine, theirs = (optree.tree_leaves(s, namespace="fdsd") for s in (state, again))
    for a, b in zip(mine, theirs, strict=True):
        assert type(a) is type(b)
        if isinstance(a, torch.Tensor):
            assert (a.dtype, a.shape, a.tolist()) == (b.dtype, b.shape, b.tolist())
    assert [g.fqns for g in again.groups] == [g.fqns for g in state.groups]
    assert list(again.slots) == list(state.slots)


def flat_of(state: OptimState) -> Any:
    try:
        return flatten(state)
    except NameConflict:
        assume(False)


@given(osds(), st.booleans())
def test_unflatten_like_inverts_flatten(case: tuple[dict[str, Any], list[str]], strict: bool) -> None:
    state = OptimState.from_torch(*case)
    flat = flat_of(state)
    back = unflatten(flat, like=state, strict=strict)
    assert back == state
    assert same_tree(back.to_torch(), state.to_torch())


@given(osds(), st.randoms())
def test_the_order_of_the_flat_form_is_no_matter(case: tuple[dict[str, Any], list[str]], random: Any) -> None:
    state = OptimState.from_torch(*case)
    items = list(flat_of(state).items())
    random.shuffle(items)
    assert unflatten(dict(items), like=state) == state


@given(osds())
def test_unflatten_alone_gives_the_same_flat_form_back(case: tuple[dict[str, Any], list[str]]) -> None:
    state = OptimState.from_torch(*case)
    flat = flat_of(state)
    try:
        alone = unflatten(flat)
    except NameConflict:
        assume(False)
    again = flatten(alone)
    assert again.to_dict().keys() == flat.keys()
    assert all(same_tree(value, flat[key]) for key, value in again.items())
    assert sorted(alone.fqns) == sorted(name for g in state.groups if g.options or g.named for name in g.fqns)
    assert unflatten(again) == alone


@given(
    st.lists(st.sampled_from(["a", "b.c", "layers.10.w", "layers.2.w"]), unique=True, min_size=1),
    st.data(),
)
def test_plain_states_need_no_like(names: list[str], data: st.DataObject) -> None:
    values = leaves().filter(lambda value: not isinstance(value, list | tuple) or not has_tensor(value))  # split
    slots = st.dictionaries(st.sampled_from(["step", "exp_avg", "momentum_buffer"]), values, min_size=1)
    rows = data.draw(st.fixed_dictionaries({}, optional=dict.fromkeys(names, slots)))
    cut = data.draw(st.integers(1, len(names)))
    groups = [{"lr": 0.1, "params": names[:cut]}, {"lr": 0.2, "params": names[cut:]}][: 1 + (cut < len(names))]
    state = OptimState.from_torch({"state": rows, "param_groups": groups})
    assert unflatten(flatten(state)) == state


@given(st.lists(st.sampled_from([0.1, 0.2, 0.3]), min_size=1, max_size=8))
def test_canonical_groups_are_the_parameters_with_equal_options(rates: list[float]) -> None:
    names = [f"layers.{i}.w" for i in range(len(rates))]
    groups = [ParamGroup((name,), {"lr": rate}) for name, rate in zip(names, rates, strict=True)]
    alone = unflatten(flatten(OptimState({}, groups)))
    order = list(dict.fromkeys(rates))
    members = [tuple(n for n, r in zip(names, rates, strict=True) if r == rate) for rate in order]
    assert list(alone.groups) == [ParamGroup(own, {"lr": rate}) for own, rate in zip(members, order, strict=True)]


@given(osds())
def test_columns_are_in_their_one_form(case: tuple[dict[str, Any], list[str]]) -> None:
    state = OptimState.from_torch(*case)
    for slot, column in state.slots.items():
        assert len(column) > 0
        assert not (isinstance(slot, tuple) and len(slot) == 1 and isinstance(slot[0], str))
        assert all(type(value) is not dict or is_empty(value) for value in column.values())
    assert OptimState(state.slots, state.groups, extra=state.extra) == state
