"""Laws 3, 5, 6, 7 and 8 on sharded states in one process, and what ``locality`` counts against what ranks hold.

Meshes of up to 3 axes with any ranks, uneven, empty and replicated shards, 0-dim tensors, orders, fused parts, ties.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fdsd import (
    OptimState,
    ParamGroup,
    Pipeline,
    Sharded,
    StateDict,
    TrainState,
    add_prefix,
    add_scalar,
    average,
    cast,
    defer,
    from_shards,
    gather,
    lerp,
    local_shards,
    materialize,
    rename_fqns,
    reshard,
    shard_with,
    specs,
    untie,
)
from fdsd.data.region import Region
from fdsd.data.spec import TensorSpec, spec_of
from fdsd.data.template import escape
from fdsd.layout import Layout, Mesh, Replicate
from fdsd.layout.local import local_of
from fdsd.pipeline.coverage import trail
from fdsd.pipeline.planning import lazily
from fdsd.testing import assert_laws, assert_same, layouts, pipelines, states
from tests.helpers.layouts import by_hand
from tests.helpers.tensors import patterns, same_bytes

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def is_float(name: str, spec: TensorSpec) -> bool:
    return spec.dtype in FLOATS


@st.composite
def cases(draw: st.DrawFn) -> tuple[StateDict[Any], StateDict[Layout]]:
    """A state with a tensor at least, and a layout for each of its tensors."""
    state = draw(states())
    assume(any(spec_of(leaf) is not None for leaf in state.values()))
    return state, draw(layouts(state))


def ranks_of(table: Mapping[str, Layout]) -> list[int]:
    return sorted({rank for layout in table.values() for rank in layout.mesh.ranks})


def split_up(state: Mapping[str, Any], table: Mapping[str, Layout]) -> dict[int, StateDict[Any]]:
    """What each rank holds, in memory of its own; objects stand on every rank."""
    made: dict[int, StateDict[Any]] = {}
    for rank in ranks_of(table):
        known: dict[int, Any] = {}
        local: dict[str, Any] = {}
        for name, leaf in local_shards(state, rank).items():
            is_tensor = isinstance(leaf, torch.Tensor)
            local[name] = known.setdefault(id(leaf), leaf.clone()) if is_tensor else leaf
        made[rank] = StateDict(local)
    return made


@given(cases())
def test_gather_undoes_shard_with(case: tuple[StateDict[Any], StateDict[Layout]]) -> None:
    """Law 6: what is gathered is the very leaves that were sharded."""
    state, table = case
    made = shard_with(table)(state)
    assert all(isinstance(made[name], Sharded) and made[name].layout == table[name] for name in table)
    assert gather()(made) == state == (~shard_with(table))(made)


@given(cases())
@settings(max_examples=60)
def test_gather_undoes_sharding_into_real_pieces(case: tuple[StateDict[Any], StateDict[Layout]]) -> None:
    """Law 6: and so it does when every rank's shard is memory of its own, byte for byte, ties kept."""
    state, table = case
    pieces = split_up(shard_with(table)(state), table)
    objects = {name for name in state if name not in table}
    again = from_shards(pieces, table)
    assert all(again[name].layout == table[name] and not again[name].kept for name in table)
    assert_same(gather()(again), state, tied=False)
    tied = [(a, b) for a in table for b in table if state[a] is state[b]]
    assert all(again[a] is again[b] for a, b in tied)
    assert all(again[name] is state[name] for name in objects)


@given(cases())
@settings(max_examples=60)
def test_every_coordinate_has_what_is_cut_by_hand(case: tuple[StateDict[Any], StateDict[Layout]]) -> None:
    """By rank, by coordinate and by names of axes: views of what there is, lazy ones and specs alike."""
    state, table = case
    made, lazy = shard_with(table)(state), shard_with(table)(defer(state))
    for name, layout in table.items():
        spec = spec_of(state[name])
        assert spec is not None
        hollow = Sharded(TensorSpec(spec.shape, spec.dtype), layout, whole=spec)
        for coordinate, rank in zip(layout.mesh.coordinates(), layout.mesh.ranks, strict=True):
            want = local_of(state[name], layout, rank)
            named = dict(zip(layout.mesh.names, coordinate, strict=True))
            for at in (rank, coordinate, named):
                assert same_bytes(made[name].shard(at), want)
            assert hollow.shard(coordinate) == spec_of(want)
            got = materialize({"x": lazy[name].shard(coordinate)})["x"]
            assert same_bytes(got, want)
        assert all(name in local_shards(made, rank) for rank in layout.mesh.ranks)
        assert all(name not in local_shards(made, rank) for rank in range(40) if rank not in layout.mesh)


@given(st.data())
def test_shards_are_what_torch_cuts(data: st.DataObject) -> None:
    """Against ``torch.chunk`` and ``torch.cat``, axis after axis."""
    shape = tuple(data.draw(st.lists(st.integers(0, 9), max_size=3)))
    layout = data.draw(layouts(shape))
    tensor = patterns(shape, torch.int32)
    made = shard_with(layout)({"t": tensor})
    for coordinate in layout.mesh.coordinates():
        assert torch.equal(made["t"].shard(coordinate), by_hand(tensor, layout, coordinate))


@given(cases())
@settings(max_examples=60)
def test_lazily_and_on_specs(case: tuple[StateDict[Any], StateDict[Layout]]) -> None:
    """Laws 2, 3 and 5, purity, and shard_with as a value."""
    state, table = case
    assert_laws(shard_with(table), state)
    assert specs(shard_with(table)(state)) == specs(state) == shard_with(table)(specs(state))
    sharded = shard_with(table)(state)
    assert_same(specs(sharded), specs(state), order=True)


@given(st.data())
@settings(max_examples=60)
def test_pipelines_on_sharded_states(data: st.DataObject) -> None:
    """Laws 2 and 3: any pipeline gives of sharded tensors what it gives of whole ones, from real pieces too."""
    state, table = data.draw(cases())
    p = data.draw(pipelines(state, max_steps=3))
    want = p(state)
    sharded = shard_with(table)(state)
    real = from_shards(split_up(sharded, table), table)
    for given_ in (sharded, real):
        got = p(given_)
        assert specs(got) == specs(want) == p(specs(given_))
        assert_same(materialize(gather()(got)), want, order=given_ is sharded, tied=False, nans_equal=True)


RENAMES: list[Pipeline] = [
    add_prefix("model."),
    rename_fqns({"{rest...}": "m.{rest...}.x"}),
    rename_fqns({"layers.{i}.{rest...}?": "blocks.{i+3}.{rest...}", "embed.weight?": "table"}),
    rename_fqns(lambda name: name[::-1], inverse=lambda name: name[::-1]),
]


def assert_laid_alike(a: Mapping[str, Any], b: Mapping[str, Any]) -> None:
    """The same names in the same order, with the same layouts of the very same tensors."""
    assert list(a) == list(b)
    for name, leaf in a.items():
        other = b[name]
        if isinstance(leaf, Sharded):
            assert isinstance(other, Sharded)
            assert leaf.layout == other.layout
            assert leaf.kept is other.kept
        else:
            assert leaf is other


@given(cases(), st.sampled_from(RENAMES))
def test_sharding_commutes_with_renaming(case: tuple[StateDict[Any], StateDict[Layout]], rename: Pipeline) -> None:
    """Law 7: the table is renamed as the tensors are, by the same pipeline."""
    state, table = case
    moved: StateDict[Layout] = rename(table)
    assert {moved[name] for name in moved} == set(table.values())
    assert_laid_alike((rename >> shard_with(moved))(state), (shard_with(table) >> rename)(state))


@given(cases(), st.sampled_from([torch.bfloat16, torch.float64]), st.floats(-2, 2))
def test_sharding_commutes_with_pointwise_maps(
    case: tuple[StateDict[Any], StateDict[Layout]], dtype: torch.dtype, value: float
) -> None:
    """Law 7: pointwise maps keep tensors sharded, in the same layout, from wholes and from real pieces."""
    state, table = case
    real = from_shards(split_up(shard_with(table)(state), table), table)
    for change in (cast(dtype, is_float), add_scalar(is_float, value), untie("{_...}")):
        want = (change >> shard_with(table))(state)
        assert_same((shard_with(table) >> change)(state), want, order=True, tied=False, nans_equal=True)
        assert_same(change(real), want, tied=False, nans_equal=True)


@given(cases(), st.floats(-2, 2))
@settings(max_examples=60)
def test_sharding_commutes_with_averages(case: tuple[StateDict[Any], StateDict[Layout]], weight: float) -> None:
    state, table = case
    state = StateDict({name: x for name, x in state.items() if isinstance(x, torch.Tensor) and x.dtype in FLOATS})
    assume(len(state))
    table = StateDict({name: table[name] for name in state})
    other = cast(torch.float64)(state)
    other = StateDict({name: (x / 3).to(state[name].dtype) for name, x in other.items()})
    real = from_shards(split_up(shard_with(table)(other), table), table)
    for a, b in ((shard_with(table)(state), real), (state, real), (shard_with(table)(state), other)):
        want = shard_with(table)(lerp(state, other, weight))
        assert_same(lerp(a, b, weight), want, tied=False, nans_equal=True)
        want = shard_with(table)(average([state, other], [weight, 0.5]))
        assert_same(average([a, b], [weight, 0.5]), want, tied=False, nans_equal=True)


@given(st.data())
@settings(max_examples=60)
def test_reshards_compose(data: st.DataObject) -> None:
    """Law 8, from wholes and from real pieces; and back again where the layouts before are given."""
    state, a = data.draw(cases())
    b, c = data.draw(layouts(state)), data.draw(layouts(state))
    sharded = shard_with(a)(state)
    for given_ in (sharded, from_shards(split_up(sharded, a), a)):
        there, directly = (reshard(b) >> reshard(c))(given_), reshard(c)(given_)
        assert all(there[name].layout == c[name] for name in c)
        assert_same(materialize(there), materialize(directly), order=True)
        assert_same(materialize(gather()(there)), state, tied=False)
        back = ~reshard(b, from_placement=a)
        assert_same(materialize(back(reshard(b, from_placement=a)(given_))), given_, order=True)
    assert_same(materialize(reshard(b)(defer(state))), shard_with(b)(state), order=True)


@given(st.data(), st.integers(0, 30))
def test_gathering_on_one_rank(data: st.DataObject, rank: int) -> None:
    state, table = data.draw(cases())
    made = gather(rank)(shard_with(table)(state))
    assert all(made[name].layout == Layout(Mesh({"rank": 1}, [rank]), [Replicate()]) for name in table)
    assert local_shards(made, rank) == state
    others = local_shards(made, rank + 1)
    assert list(others) == [name for name in state if name not in table]
    assert gather()(made) == state


@given(st.data())
@settings(max_examples=50)
def test_training_states(data: st.DataObject) -> None:
    """Slots are sharded as their parameters, whichever of the two ways they are run; scalars and groups stay."""
    state, table = data.draw(cases())
    model = StateDict({name: leaf for name, leaf in state.items() if isinstance(leaf, torch.Tensor) and leaf.ndim})
    assume(len(model))
    names = [group[0] for group in groups_of(model)]
    moments = StateDict({name: patterns(tuple(model[name].shape), torch.float32) for name in names})
    steps = StateDict({name: torch.tensor(float(k)) for k, name in enumerate(names)})
    optim = OptimState({"exp_avg": moments, "step": steps}, (ParamGroup(tuple(names), {"lr": 0.1}),))
    p = shard_with({escape(name): table[name] for name in model})
    made = p(TrainState(model, optim, {"epoch": 3}))
    assert made.optim is not None
    for name in names:
        assert made.optim.slots["exp_avg"][name].layout == made.model[name].layout == table[name]
        assert made.optim.slots["exp_avg"][name].kept is moments[name]
        assert made.optim.slots["step"][name] is steps[name]
    assert made.optim.groups == optim.groups
    assert gather()(made) == TrainState(model, optim, {"epoch": 3})
    for rank in ranks_of(table):
        local = local_shards(made, rank)
        here = [name for name in names if rank in table[name].mesh]
        assert local.optim is not None
        assert list(local.optim.fqns) == [name for name in names if name in here]
        columns = {slot: local.optim.slots.get(slot, StateDict[Any]()) for slot in ("exp_avg", "step")}
        assert all(same_bytes(columns["exp_avg"][n], local_of(moments[n], table[n], rank)) for n in here)
        assert list(columns["exp_avg"]) == here == list(columns["step"])
    alone = shard_with({escape(name): table[name] for name in names})(optim)
    assert_same(alone, made.optim)


def groups_of(model: StateDict[Any]) -> list[tuple[str, ...]]:
    groups: dict[int, list[str]] = {}
    for name, leaf in model.items():
        groups.setdefault(id(leaf), []).append(name)
    return [tuple(names) for names in groups.values()]


# -- locality ----------------------------------------------------------------------------------------------------------


def elements(region: Region, shape: tuple[int, ...]) -> set[int]:
    """List the places of the elements of a region in their tensor."""
    where = torch.arange(torch.Size(shape).numel()).reshape(shape)
    for dim, span in enumerate(region.spans):
        where = where.index_select(dim, torch.tensor(span.indices(), dtype=torch.int64))
    return set(where.flatten().tolist())


def needed(
    p: Pipeline, state: StateDict[Any], table: Mapping[str, Layout], want: Mapping[str, Layout]
) -> dict[int, int]:
    """Count, element by element, the bytes that each rank needs and does not hold."""
    first, *_, last = lazily(p.steps, state) if p.steps else [*lazily((), state)] * 2
    names = {id(leaf.op): name for name, leaf in reversed(first.items()) if spec_of(leaf) is not None}
    total: dict[int, int] = {}
    done: set[int] = set()
    for name, layout in want.items():
        node = last[name]
        if id(node) in done:
            continue
        done.add(id(node))
        for rank in layout.mesh.ranks:
            reads: dict[str, set[int]] = {}
            for region in layout.regions(node.shape, rank):
                for end in trail(node, region):
                    if (source := names.get(id(end.op))) is not None:
                        reads.setdefault(source, set()).update(elements(end.region, tuple(first[source].shape)))
            for source, places in reads.items():
                shape = tuple(first[source].shape)
                held = {x for r in table[source].regions(shape, rank) for x in elements(r, shape)}
                if missing := places - held:
                    total[rank] = total.get(rank, 0) + len(missing) * first[source].dtype.itemsize
    return total


@given(st.data())
@settings(max_examples=60)
def test_locality_counts_what_ranks_lack(data: st.DataObject) -> None:
    """Exactly the bytes of the elements that a rank reads and does not hold, for any pipeline and any layouts."""
    state, table = data.draw(cases())
    p = data.draw(pipelines(state, structural=True, max_steps=3))
    result = specs(p(state))
    want: StateDict[Layout] = data.draw(layouts(result))
    assume(len(want))
    found = p.locality(table, state, target=want)
    assert found.received == dict(sorted(needed(p, state, table, want).items()))
    assert found.ok == (not found.received)
    again = p.locality(shard_with(table)(state), target=want)
    assert again == found
    assert ("nothing travels" in str(found)) == found.ok


@given(st.data())
def test_what_is_local_runs_on_what_ranks_hold(data: st.DataObject) -> None:
    """Where nothing travels, no rank asks for more than its own shard: absent shards are not missed."""
    state, table = data.draw(cases())
    renamed = data.draw(st.sampled_from([add_prefix("m."), cast(torch.float64, is_float)]))
    found = renamed.locality(table, state)
    assert found.ok, found
    for rank in ranks_of(table):
        shards = from_one_rank(shard_with(table)(state), table, rank)
        made = renamed(shards)
        assert all(isinstance(leaf, Sharded) for leaf in made.values())
        here = StateDict({name: leaf.shard(rank) for name, leaf in made.items() if rank in leaf.layout.mesh})
        want = local_shards(shard_with(renamed(table) if "prefix" in repr(renamed) else table)(renamed(state)), rank)
        assert_same(here, {name: want[name] for name in here}, tied=False, nans_equal=True)


def from_one_rank(state: Mapping[str, Any], table: Mapping[str, Layout], rank: int) -> StateDict[Any]:
    """What one rank knows: each tensor by its layout, and its own shard alone."""
    return StateDict(
        {
            name: Sharded(
                state[name].spec, layout, shards={rank: state[name].shard(rank)} if rank in layout.mesh else {}
            )
            for name, layout in table.items()
        }
    )
