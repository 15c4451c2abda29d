"""Functions between the state of all ranks and what each holds: ``local_shards`` and ``from_shards``."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, overload

import torch
from attrs import evolve

from fdsd.algebra.dtypes import as_bytes
from fdsd.data.errors import FdsdError, SpecMismatch, UnknownName, Unsupported, listing
from fdsd.data.optim import OptimState
from fdsd.data.problem import Problem, describe
from fdsd.data.spec import TensorSpec, is_exact, spec_of
from fdsd.data.statedict import StateDict, require_mapping, same_leaf
from fdsd.data.ties import tie_key
from fdsd.data.train import TrainState
from fdsd.data.values import is_mapping, is_sequence
from fdsd.layout.layout import Layout
from fdsd.layout.mesh import At, whole
from fdsd.layout.placement import Shard
from fdsd.layout.sharded import Sharded, check_fit
from fdsd.layout.tables import Placing, Table

__all__ = ["from_shards", "local_shards"]

S = TypeVar("S", OptimState, TrainState)


@overload
def local_shards(state: S, coordinate: At) -> S: ...
@overload
def local_shards(state: Mapping[str, Any], coordinate: At) -> StateDict[Any]: ...
def local_shards(state: Any, coordinate: At) -> Any:
    """Give what one rank holds: of each ``Sharded`` its shard, and of all else the leaf itself.

    Args:
        state: A mapping of names to leaves, an ``OptimState`` or a ``TrainState``.
        coordinate: A rank; or a coordinate of the mesh, in order or by the names of its axes.

    Returns:
        The same kind of state. Names whose mesh lacks the rank are left out. Tied names share a shard.

    Raises:
        SpecMismatch: There is no such place in a mesh, or it is of different ranks in different meshes.
        FdsdError: A shard is not here.

    Law: ``from_shards({r: local_shards(s, r) for r in ranks}, layouts)`` is laid out as ``s`` and equals it.

    >>> from fdsd.layout import Layout, Mesh, Shard
    >>> from fdsd.transforms.shard import shard_with
    >>> state = shard_with(Layout(Mesh({"dp": 2}), [Shard(0)]))({"w": torch.tensor([1, 2, 3])})
    >>> local_shards(state, 1)["w"], local_shards(state, {"dp": 0})["w"]
    (tensor([3]), tensor([1, 2]))
    >>> list(local_shards(state, 7))
    []
    """
    rank = _rank_of(state, coordinate)
    if isinstance(state, TrainState):
        model = _local(state.model, rank)
        optim = None if state.optim is None else _local_optim(state.optim, rank, set(state.model) - set(model))
        return evolve(state, model=model, optim=optim)
    if isinstance(state, OptimState):
        return _local_optim(state, rank, set())
    return _local(require_mapping(state, "local_shards"), rank)


def _leaves(state: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(state, TrainState):
        yield from state.model.items()
        yield from () if state.optim is None else _leaves(state.optim)
    elif isinstance(state, OptimState):
        for column in state.slots.values():
            yield from column.items()
    else:
        yield from require_mapping(state, "local_shards").items()


def _rank_of(state: Any, coordinate: At) -> int:
    """Give the rank that is meant: by number, or by a coordinate that says the same one in all meshes."""
    if (rank := whole(coordinate)) is not None:
        if rank < 0:
            raise SpecMismatch(f"local_shards: a rank is a number from 0 on, not {rank}.")
        return rank
    if not is_sequence(coordinate) and not is_mapping(coordinate):
        raise SpecMismatch(
            f"local_shards: a place is a rank, a coordinate like (0, 1), or one like {{'dp': 0}}, not {coordinate!r}."
        )
    place: Any = coordinate
    meshes = {leaf.layout.mesh: name for name, leaf in _leaves(state) if isinstance(leaf, Sharded)}
    ranks = {mesh.rank_of(place): name for mesh, name in meshes.items()}
    if len(ranks) > 1:
        told = ", ".join([f"rank {rank} of the mesh of {name!r}" for rank, name in sorted(ranks.items())[:10]])
        raise SpecMismatch(f"local_shards: {coordinate!r} is {told}. Give the rank.")
    return next(iter(ranks), 0)


def _local(state: Mapping[str, Any], rank: int) -> StateDict[Any]:
    made: dict[str, Any] = {}
    known: dict[int, Any] = {}
    for name, leaf in state.items():
        if not isinstance(leaf, Sharded):
            made[name] = leaf
        elif rank in leaf.layout.mesh:
            if id(leaf) not in known:
                known[id(leaf)] = _shard(name, leaf, rank)
            made[name] = known[id(leaf)]
    return StateDict.trusted(made, getattr(state, "_metadata", None), getattr(state, "_history", ()))


def _shard(name: str, leaf: Sharded, rank: int) -> Any:
    try:
        return leaf.shard(rank)
    except FdsdError as error:
        error.args = (f"local_shards: {name!r}: {error}",)
        raise


def _local_optim(optim: OptimState, rank: int, gone: set[str]) -> OptimState:
    slots = {slot: _local(column, rank) for slot, column in optim.slots.items()}
    left_out = gone | {fqn for slot, column in optim.slots.items() for fqn in column if fqn not in slots[slot]}
    slots = {slot: StateDict({f: x for f, x in column.items() if f not in left_out}) for slot, column in slots.items()}
    groups = [evolve(group, fqns=tuple([f for f in group.fqns if f not in left_out])) for group in optim.groups]
    return optim.replace(slots=slots, groups=groups)


# -- from what each rank holds ---------------------------------------------------------------------------------------


def from_shards(
    states: Mapping[int, Mapping[str, Any]] | Sequence[Mapping[str, Any]], layouts: Placing
) -> StateDict[Any]:
    """Put what each rank holds together to one state of ``Sharded`` leaves. Nothing is copied.

    Placement decides, never a value or a shape: what ``layouts`` does not mention has to be the same on every rank.

    Args:
        states: The state of each rank by its number, or in the order of ranks.
        layouts: How the tensors lie; see ``shard_with``. Shapes of whole tensors follow from those of the shards.

    Returns:
        The names of all ranks, in the order of the first rank's, those that it lacks behind. Tied names stay tied if
        they are on all ranks.

    Raises:
        UnknownName: A rank lacks a name that its layout gives it, or has one that the layout does not; or a rule wins
            no name.
        SpecMismatch: Shards have different dtypes or other shapes than their layout makes, of whatever whole; or a
            name without layout is not the same on all ranks.
        Unsupported: A state is no mapping, or ``layouts`` says nothing.

    Law: ``gather()(from_shards(...))`` equals the whole state, for shards that were cut by the layouts.

    >>> from fdsd.layout import Layout, Mesh, Shard
    >>> layout = Layout(Mesh({"dp": 2}), [Shard(0)])
    >>> state = from_shards([{"w": torch.tensor([1, 2])}, {"w": torch.tensor([3])}], layout)
    >>> state["w"], state["w"].whole()
    (Sharded(int64[3], {'dp': Shard(0)} over 2 ranks), tensor([1, 2, 3]))
    """
    given = _read_states(states)
    names = list(dict.fromkeys([name for state in given.values() for name in state]))
    held = {name: {rank: state[name] for rank, state in given.items() if name in state} for name in names}
    tensors = [name for name in names if any(spec_of(leaf) is not None for leaf in held[name].values())]
    ties = {name: _tie(held[name]) for name in tensors}
    placed, problems = Table.of("from_shards", layouts).resolve(tensors, ties)
    made: dict[str, Any] = {}
    known: dict[Hashable, Any] = {}
    for name in names:
        key = None if ties.get(name) is None else (ties[name], placed.get(name))
        if key is not None and key in known:
            made[name] = known[key]
            continue
        try:
            made[name] = _joined(held[name], placed[name]) if name in placed else _common(held[name], len(given))
        except FdsdError as error:
            kind = "missing" if isinstance(error, UnknownName) else "spec"
            problems.append(Problem(kind, f"{name!r}: {error}", (name,)))
            continue
        if key is not None:
            known[key] = made[name]
    if problems:
        raise problems[0].error(f"from_shards: {describe(problems)}")
    first = next(iter(given.values()), None)
    return StateDict.trusted(made, getattr(first, "_metadata", None), getattr(first, "_history", ()))


def _read_states(states: Any) -> dict[int, Mapping[str, Any]]:
    given: dict[Any, Any]
    if is_mapping(states):
        given = dict(states)
    elif is_sequence(states):
        given = dict(enumerate(states))
    else:
        raise Unsupported(
            f"from_shards: states are given by rank, {{0: state, 1: state}}, or in a list, not as "
            f"{type(states).__name__}."
        )
    if odd := [rank for rank in given if (number := whole(rank)) is None or number < 0]:
        raise SpecMismatch(f"from_shards: states are given by rank, whole numbers from 0 on; not by {listing(odd)}.")
    if odd := [rank for rank, state in given.items() if not is_mapping(state)]:
        raise Unsupported(
            f"from_shards: what ranks {listing(odd)} hold is no mapping of names to leaves. Give an optimizer's "
            "state column by column."
        )
    return given


def _tie(shards: Mapping[int, Any]) -> Hashable:
    """Give what is equal for names that are tied on every rank."""
    keys = tuple([(rank, tie_key(leaf)) for rank, leaf in sorted(shards.items())])
    return None if any(key is None for _, key in keys) else keys


def _joined(shards: Mapping[int, Any], layout: Layout) -> Any:
    """Make one sharded tensor, or say what is wrong with the shards."""
    specs: dict[int, TensorSpec] = {rank: spec for rank, x in shards.items() if (spec := spec_of(x)) is not None}
    if odd := [rank for rank in shards if rank not in specs]:
        raise SpecMismatch(f"what ranks {listing(odd)} hold is no tensor.")
    if missing := [rank for rank in layout.mesh.ranks if rank not in shards]:
        raise UnknownName(f"ranks {listing(missing)} have no shard; the layout is {layout}.")
    if strays := [rank for rank in shards if rank not in layout.mesh]:
        raise UnknownName(f"ranks {listing(strays)} have a shard and are not in the mesh; the layout is {layout}.")
    if len(dtypes := {spec.dtype for spec in specs.values()}) > 1:
        raise SpecMismatch(f"the dtypes of the shards differ: {listing(map(str, dtypes))}.")
    spec = TensorSpec(_whole_shape(layout, specs), dtypes.pop())
    check_fit(layout, spec.shape)
    wrong = [
        f"rank {rank} has {specs[rank].shape} and should have {local}"
        for rank in layout.mesh.ranks
        if specs[rank].shape != (local := layout.local_shape(spec.shape, rank))
    ]
    if wrong:
        more = f"; and {len(wrong) - 10} more" if len(wrong) > 10 else ""
        raise SpecMismatch(f"shards that {layout} does not make of {spec.shape}: {'; '.join(wrong[:10])}{more}.")
    if all(isinstance(shard, TensorSpec) for shard in shards.values()):
        return TensorSpec(spec.shape, spec.dtype, tie=_tie(shards))
    return Sharded(spec, layout, shards=shards)


def _whole_shape(layout: Layout, specs: Mapping[int, TensorSpec]) -> tuple[int, ...]:
    """Add up the sizes of the shards along the axes that cut each dim; whether all fit is seen afterwards."""
    mesh = layout.mesh
    ndims = {spec.ndim for spec in specs.values()}
    if len(ndims) > 1:
        raise SpecMismatch(f"shards of {listing(ndims)} dims.")
    (ndim,) = ndims
    dims = {axis: p.dim for axis, p in enumerate(layout.placements) if isinstance(p, Shard)}
    shape: list[int] = []
    for dim in range(ndim):
        axes = {axis for axis, cut in dims.items() if cut in (dim, dim - ndim)}
        ranks = [
            rank
            for coordinate, rank in zip(mesh.coordinates(), mesh.ranks, strict=True)
            if not any(index for axis, index in enumerate(coordinate) if axis not in axes)
        ]
        shape.append(sum([specs[rank].shape[dim] for rank in ranks]))
    return tuple(shape)


def _common(leaves: Mapping[int, Any], num: int) -> Any:
    """Give a leaf that has no layout: it has to be the same on all ranks."""
    if len(leaves) < num:
        raise UnknownName(f"no layout says where it lies, and only the ranks {listing(leaves)} have it.")
    (_, first), *others = leaves.items()
    odd = [rank for rank, leaf in others if not _is_same(first, leaf)]
    if odd:
        raise SpecMismatch(
            f"no layout says how it lies, and it is not the same on all ranks: that of {listing(odd)} is another. "
            "Give it a layout: Replicate() on every axis, if it is one tensor."
        )
    return first


def _is_same(a: Any, b: Any) -> bool:
    if is_exact(a) and is_exact(b):
        if spec_of(a) != spec_of(b) or a.is_meta or b.is_meta:
            return tie_key(a) == tie_key(b)
        return tie_key(a) == tie_key(b) or torch.equal(as_bytes(a.detach()), as_bytes(b.detach().to(a.device)))
    return same_leaf(a, b)
