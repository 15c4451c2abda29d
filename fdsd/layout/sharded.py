"""`Sharded`: a tensor with the layout in which it lies, or is wanted, over a mesh; any rank's shard of it is at hand.

Views of a whole tensor, or the shards of some ranks. No process group is known: another rank's shard that is not here
raises. What pointwise operations and all others make of such leaves is decided here too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import torch

from fdsd.algebra.apply import apply, defer_leaf
from fdsd.algebra.lazy import Lazy, Op
from fdsd.algebra.ops.leaves import Origin
from fdsd.algebra.virtual import Standin
from fdsd.data.errors import FdsdError, SpecMismatch, Unsupported, listing, plural
from fdsd.data.spec import TensorSpec, VirtualTensor, is_exact, spec_of
from fdsd.data.statedict import StateDict
from fdsd.layout.joining import cut_shard, join_shards, not_here
from fdsd.layout.layout import Layout
from fdsd.layout.mesh import At
from fdsd.layout.shard_source import ShardSource

__all__ = ["Sharded", "check_fit", "lazy_sharded", "map_sharded", "place", "whole_leaves", "whole_of"]


class Sharded(Standin):
    """A tensor over the ranks of a mesh: its spec, its layout, and what of it is here.

    Compares by identity. In a pipeline, operations that compute each element from the elements at the same place
    (``cast``, ``add_scalar``, ``average``, ``lerp``, ``untie``) keep it sharded, in the same layout; any other gives a
    ``Lazy`` over its pieces, whose layout is nobody's until ``shard_with`` or ``reshard`` says the wanted one.

    Args:
        spec: Shape and dtype of the whole tensor.
        layout: How it lies, or is wanted.
        whole: The whole tensor, a lazy one, or a spec.
        shards: The local tensors of ranks, in the place of ``whole``: of all in one process, or of some.

    Raises:
        SpecMismatch: The layout does not fit the shape; ``whole`` or a shard has another shape or dtype than it should;
            a rank is not in the mesh.
        Unsupported: There is neither ``whole`` nor ``shards``, or both; or a part is no tensor.

    Law: ``x.whole()`` equals ``Sharded(x.spec, x.layout, shards={r: x.shard(r) for r in ranks}).whole()``.

    >>> from fdsd.layout.mesh import Mesh
    >>> from fdsd.layout.placement import Shard
    >>> layout = Layout(Mesh({"dp": 2}), [Shard(0)])
    >>> x = Sharded(TensorSpec((3,), torch.int64), layout, whole=torch.tensor([1, 2, 3]))
    >>> x
    Sharded(int64[3], {'dp': Shard(0)} over 2 ranks)
    >>> x.shard(0), x.shard({"dp": 1})
    (tensor([1, 2]), tensor([3]))
    """

    __slots__ = ("__weakref__", "_layout", "_shards", "_spec", "_whole")

    _kind = "sharded"
    _until = "as one tensor here"
    _remedy = "Use gather() in a pipeline, or local_shards(state, rank)"

    _spec: TensorSpec
    _layout: Layout
    _whole: Any
    _shards: Mapping[int, Any]

    def __init__(
        self, spec: TensorSpec, layout: Layout, *, whole: Any = None, shards: Mapping[int, Any] | None = None
    ) -> None:
        if (whole is None) == (shards is None):
            raise Unsupported("Sharded: give the whole tensor or the shards of ranks ({} if none is here), not both.")
        if not isinstance(layout, Layout):
            raise SpecMismatch(f"Sharded: the layout is a Layout, not {type(layout).__name__}.")
        check_fit(layout, spec.shape)
        if whole is not None:
            _check_parts({"the whole": whole}, {"the whole": spec})
        elif shards is not None:
            if odd := [rank for rank in shards if rank not in layout.mesh]:
                raise SpecMismatch(
                    f"Sharded: there are shards of ranks {listing(odd)}, which are not in {layout.mesh}."
                )
            wants = {rank: spec.with_shape(layout.local_shape(spec.shape, rank)) for rank in shards}
            _check_parts({f"rank {r}": x for r, x in shards.items()}, {f"rank {r}": x for r, x in wants.items()})
        self._fill(spec, layout, whole, shards or {})

    def _fill(self, spec: TensorSpec, layout: Layout, whole: Any, shards: Mapping[int, Any]) -> None:
        self._spec = spec
        self._layout = layout
        self._whole = whole
        self._shards = MappingProxyType(dict(shards))

    @classmethod
    def trusted(cls, spec: TensorSpec, layout: Layout, whole: Any, shards: Mapping[int, Any]) -> Sharded:
        """Make one of parts that fit, without checks (for fdsd's own use)."""
        made = cls.__new__(cls)
        made._fill(spec, layout, whole, shards)
        return made

    @property
    def spec(self) -> TensorSpec:
        """Shape and dtype of the whole tensor."""
        return self._spec

    @property
    def layout(self) -> Layout:
        """How it lies, or is wanted."""
        return self._layout

    @property
    def kept(self) -> Any:
        """The whole tensor that it was made of, if any: a tensor, a lazy one, a spec, or ``None``."""
        return self._whole

    @property
    def shards(self) -> Mapping[int, Any]:
        """The shards that it was made of, by rank, read-only; none if it was made of a whole tensor."""
        return self._shards

    @property
    def is_of_one_rank(self) -> bool:
        """Whether it is made of the shard of one rank at most, as on a rank among others."""
        return self._whole is None and len(self._shards) <= 1

    @property
    def parts(self) -> tuple[Any, ...]:
        """What it is made of: the whole tensor, or the shards."""
        return tuple(self._shards.values()) if self._whole is None else (self._whole,)

    def with_parts(self, parts: Sequence[Any]) -> Sharded:
        """Give the same tensor made of other leaves, one for each of ``parts`` and of its spec.

        >>> from fdsd.layout.mesh import Mesh
        >>> x = Sharded(TensorSpec((1,), torch.int64), Layout(Mesh({}), []), whole=torch.tensor([7]))
        >>> x.with_parts([torch.tensor([8])]).shard(0)
        tensor([8])
        """
        if self._whole is not None:
            return Sharded(self._spec, self._layout, whole=parts[0])
        return Sharded(self._spec, self._layout, shards=dict(zip(self._shards, parts, strict=True)))

    def shard(self, at: At) -> Any:
        """Give the local tensor of a place: a view or a slice of the whole, or the shard itself.

        Args:
            at: A rank of the mesh, a coordinate, or a coordinate by the names of its axes.

        Returns:
            A leaf of the kind that it is made of; that of an empty shard has a 0 in its shape.

        Raises:
            SpecMismatch: The place is not in the mesh.
            FdsdError: The shard is not here.

        >>> from fdsd.layout.mesh import Mesh
        >>> from fdsd.layout.placement import Shard
        >>> layout = Layout(Mesh({"dp": 2}), [Shard(0)])
        >>> Sharded(TensorSpec((3,), torch.int64), layout, shards={1: torch.tensor([3])}).shard(0)
        Traceback (most recent call last):
            ...
        fdsd.data.errors.FdsdError: Sharded(int64[3], {'dp': Shard(0)} over 2 ranks): the shard of rank 0 is not here. \
Work on the state with group=, or give the shards of all ranks.
        """
        mesh = self._layout.mesh
        coordinate = mesh.coordinate_at(at)
        if coordinate is None:
            raise SpecMismatch(f"{self}: rank {at} is not in {mesh}, and has no shard.")
        rank = mesh.rank_of(coordinate)
        if self._whole is not None:
            return cut_shard(self._whole, self._spec, self._layout, rank)
        if rank not in self._shards:
            raise FdsdError(
                f"{self}: {not_here([rank])}. Work on the state with group=, or give the shards of all ranks."
            )
        return self._shards[rank]

    def whole(self) -> Any:
        """Give the whole tensor: the one that it was made of, or one put together from the shards.

        Returns:
            A tensor if the parts are tensors, else a lazy one or a spec.

        Raises:
            FdsdError: Some of its elements are held by ranks whose shards are not here.

        >>> from fdsd.layout.mesh import Mesh
        >>> from fdsd.layout.placement import Shard
        >>> layout = Layout(Mesh({"dp": 2}), [Shard(0)])
        >>> shards = {0: torch.tensor([1, 2]), 1: torch.tensor([3])}
        >>> Sharded(TensorSpec((3,), torch.int64), layout, shards=shards).whole()
        tensor([1, 2, 3])
        """
        if self._whole is not None:
            return self._whole
        return join_shards(self._shards, self._spec, self._layout)

    def __repr__(self) -> str:
        layout = self._layout
        placements = dict(zip(layout.mesh.names, layout.placements, strict=True))
        plain = Layout(layout.mesh, layout.placements).order == layout.order
        order = "" if plain else f", order={layout.order}"
        return f"Sharded({self._spec}, {placements}{order} over {plural(layout.mesh.size, 'rank')})"

    def _told(self) -> str:
        return f"sharded ({object.__getattribute__(self, '_spec')})"

    def __reduce__(self) -> tuple[Callable[..., Sharded], tuple[Any, ...]]:
        return Sharded.trusted, (self._spec, self._layout, self._whole, dict(self._shards))


def _check_parts(parts: Mapping[str, Any], wants: Mapping[str, TensorSpec]) -> None:
    found = {name: spec_of(part) for name, part in parts.items()}
    if odd := [f"{name} is of class {type(parts[name]).__name__}" for name, spec in found.items() if spec is None]:
        raise Unsupported(f"Sharded: its parts are tensors, lazy tensors or specs: {'; '.join(odd[:10])}.")
    if any(isinstance(part, Sharded) for part in parts.values()):
        raise Unsupported("Sharded: a part is itself sharded. Use place(), or reshard() in a pipeline.")
    wrong = [f"{name} is {spec} and should be {wants[name]}" for name, spec in found.items() if spec != wants[name]]
    if wrong:
        more = f"; and {len(wrong) - 10} more" if len(wrong) > 10 else ""
        raise SpecMismatch(f"Sharded: parts of another shape or dtype: {'; '.join(wrong[:10])}{more}.")


@lru_cache(1 << 14)
def check_fit(layout: Layout, shape: tuple[int, ...]) -> None:
    """Raise unless a layout fits a shape, on every rank.

    >>> from fdsd.layout.mesh import Mesh
    >>> from fdsd.layout.placement import Shard
    >>> check_fit(Layout(Mesh({"dp": 2}), [Shard(1)]), (4, 4))
    """
    layout.holders(shape)


# -- what operations make of it --------------------------------------------------------------------------------------


def place(leaf: Any, layout: Layout) -> Any:
    """Lay a leaf out: the tensor as it is, wanted in a layout.

    Args:
        leaf: A tensor of any kind; a spec stays one, once the layout is found to fit it; a sharded one keeps its parts.
        layout: The layout that is wanted.

    Raises:
        SpecMismatch: The layout does not fit.
        Unsupported: The leaf is a tensor of a class that fdsd cannot rearrange.

    >>> from fdsd.layout.mesh import Mesh
    >>> from fdsd.layout.placement import Shard
    >>> place(torch.tensor([1, 2, 3]), Layout(Mesh({"dp": 2}), [Shard(0)])).shard(1)
    tensor([3])
    """
    spec = spec_of(leaf)
    if spec is None or isinstance(leaf, TensorSpec):
        if spec is not None:
            check_fit(layout, spec.shape)
        return leaf
    if isinstance(leaf, Sharded) and leaf.layout == layout:
        return leaf
    check_fit(layout, spec.shape)
    return Sharded.trusted(TensorSpec(spec.shape, spec.dtype), layout, whole_of(leaf), {})


def whole_of(leaf: Any) -> Any:
    """Give a leaf as one tensor: a sharded one, and a tensor that lies over ranks, as what it is made of.

    What is here in whole is itself; the shards of a virtual mesh are put together; what lies over ranks, of which one
    is here, is lazy, and can be read with ``group=``.

    >>> whole_of(torch.tensor([1]))
    tensor([1])
    """
    if isinstance(leaf, Sharded):
        if leaf.kept is not None:
            return leaf.kept
        return lazy_sharded(leaf) if leaf.is_of_one_rank else leaf.whole()
    if isinstance(leaf, torch.Tensor | VirtualTensor) and not is_exact(leaf):
        return defer_leaf(leaf)
    return leaf


def whole_leaves(state: Mapping[str, Any]) -> StateDict[Any]:
    """Give a state with each sharded leaf as one tensor; others stay as they are.

    >>> from fdsd.layout.mesh import Mesh
    >>> x = place(torch.tensor([1]), Layout(Mesh({"dp": 2}), {}))
    >>> whole_leaves({"w": x})["w"]
    tensor([1])
    """
    known: dict[int, Any] = {}
    for leaf in state.values():
        if isinstance(leaf, Sharded) and id(leaf) not in known:
            known[id(leaf)] = whole_of(leaf)
    made = {name: known.get(id(leaf), leaf) for name, leaf in state.items()}
    return StateDict.trusted(made, getattr(state, "_metadata", None), getattr(state, "_history", ()))


def lazy_sharded(leaf: Sharded) -> Lazy:
    """Make a lazy tensor of a sharded one: an expression over what it is made of.

    >>> from fdsd.layout.mesh import Mesh
    >>> from fdsd.layout.placement import Shard
    >>> layout = Layout(Mesh({"dp": 2}), [Shard(0)])
    >>> shards = {0: torch.tensor([1, 2]), 1: torch.tensor([3])}
    >>> lazy_sharded(Sharded(TensorSpec((3,), torch.int64), layout, shards=shards))
    Lazy(Concat, int64[3])
    """
    if leaf.is_of_one_rank and all(map(is_exact, leaf.parts)):
        source = ShardSource(leaf.spec, leaf.layout, leaf.shards)
        return Lazy(Origin(source, source.fqn, leaf.spec), (), [leaf.spec])
    if leaf.kept is not None:
        made = defer_leaf(leaf.kept)
    else:
        made = join_shards({rank: defer_leaf(shard) for rank, shard in leaf.shards.items()}, leaf.spec, leaf.layout)
    assert isinstance(made, Lazy)
    return made


def map_sharded(op: Op, leaves: Sequence[Any]) -> Any:
    """Apply a pointwise operation shard by shard, if all leaves lie alike.

    Whole tensors among the leaves are laid out like the others.

    Returns:
        A sharded tensor, or ``NotImplemented`` if layouts differ.

    >>> from fdsd.algebra.ops import Cast
    >>> from fdsd.layout.mesh import Mesh
    >>> from fdsd.layout.placement import Shard
    >>> x = place(torch.tensor([1, 2, 3]), Layout(Mesh({"dp": 2}), [Shard(0)]))
    >>> map_sharded(Cast(torch.int8), [x]).shard(1)
    tensor([3], dtype=torch.int8)
    """
    layouts = {leaf.layout for leaf in leaves if isinstance(leaf, Sharded)}
    given = [spec for leaf in leaves if (spec := spec_of(leaf)) is not None]
    if len(layouts) != 1 or any(isinstance(leaf, TensorSpec) for leaf in leaves):
        return NotImplemented
    made = op.infer(*given)
    if isinstance(made, tuple):
        return NotImplemented
    (layout,) = layouts
    laid: list[Sharded] = [place(leaf, layout) for leaf in leaves]
    if all(x.kept is not None for x in laid):
        return Sharded(made, layout, whole=apply(op, *[x.kept for x in laid]))
    held = [set(x.shards) for x in laid if x.kept is None]
    ranks = [rank for rank in layout.mesh.ranks if all(rank in some for some in held)]
    return Sharded(made, layout, shards={rank: apply(op, *[x.shard(rank) for x in laid]) for rank in ranks})
