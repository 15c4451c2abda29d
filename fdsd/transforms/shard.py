"""Verbs that say how tensors lie over ranks: ``shard_with``, ``reshard``, and ``gather``, which makes them whole."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

from attrs import field, frozen

from fdsd.algebra.apply import Applier
from fdsd.data.errors import SpecMismatch, listing
from fdsd.data.optim import OptimState
from fdsd.data.problem import Problem
from fdsd.data.spec import TensorSpec, is_exact, spec_of
from fdsd.data.train import TrainState
from fdsd.data.values import is_mapping
from fdsd.layout.layout import Layout
from fdsd.layout.mesh import Mesh
from fdsd.layout.placement import Replicate
from fdsd.layout.sharded import Sharded, place, whole_of
from fdsd.layout.tables import Placing, Table
from fdsd.pipeline.pipeline import Pipeline
from fdsd.pipeline.rewrite import Assign, Rewrite, Scope, keep
from fdsd.pipeline.step import Grade, Step
from fdsd.transforms.regroup import as_int, call, shown

__all__ = ["gather", "reshard", "shard_with"]


def _tensors(scope: Scope) -> list[str]:
    """The names of tensors, and those of which it is not known."""
    return [name for name in scope.names if not scope.is_known(name) or scope.spec(name) is not None]


def _resolved(table: Table, scope: Scope) -> tuple[dict[str, Layout], list[Problem]]:
    names = _tensors(scope)
    ties: dict[str, Hashable] = {name: scope.tie(name) for name in names}
    return table.resolve(names, ties)


def _laid(layout: Layout, apply: Applier, leaves: Sequence[Any]) -> Any:
    """Build a leaf laid out; tied ones share it."""
    (leaf,) = leaves
    return apply.once(("place", layout), leaf, partial(place, leaf, layout))


def _placed(scope: Scope, found: dict[str, Layout], problems: Sequence[Problem]) -> Rewrite:
    assigns = [
        Assign(name, (name,), partial(_laid, found[name])) if name in found else keep(name) for name in scope.names
    ]
    return Rewrite.of(assigns, problems)


@frozen
class ShardWith(Step):
    """See ``shard_with``."""

    table: Table
    verb: ClassVar[str] = "shard_with"

    @property
    def grade(self) -> Grade:
        return Grade.EXACT

    def rewrite(self, scope: Scope) -> Rewrite:
        found, problems = _resolved(self.table, scope)
        if laid := [name for name in found if isinstance(scope.leaf(name), Sharded)]:
            text = f"tensors that are laid out over ranks already: {listing(laid)}. Use reshard()."
            problems.append(Problem("unsupported", text, tuple(laid)))
        return _placed(scope, found, problems)

    def invert(self) -> tuple[Step, ...]:
        return (Gather("all", self.table),)

    def call_text(self) -> str:
        return call(self.verb, [self.table.call_text()])


@frozen
class Reshard(Step):
    """See ``reshard``."""

    table: Table
    before: Table | None = None
    verb: ClassVar[str] = "reshard"

    @property
    def grade(self) -> Grade:
        return Grade.NONE if self.before is None else Grade.EXACT

    def rewrite(self, scope: Scope) -> Rewrite:
        found, problems = _resolved(self.table, scope)
        if self.before is not None:
            were, more = _resolved(self.before, scope)
            problems += [*more, *self._differences(scope, found, were)]
        return _placed(scope, found, problems)

    def _differences(self, scope: Scope, found: dict[str, Layout], were: dict[str, Layout]) -> list[Problem]:
        """What would not come back: names that only one side lays out, and leaves that lie otherwise."""
        problems: list[Problem] = []
        if odd := [name for name in (*found, *were) if (name in found) != (name in were)]:
            text = f"names that only one side lays out: {listing(odd)}. Give both sides the same."
            problems.append(Problem("round trip", text, tuple(odd)))
        for name in were:
            leaf = scope.leaf(name)
            if is_exact(leaf):
                text = f"{name!r} is wholly here, and not laid out as from_placement says. Use shard_with()."
            elif isinstance(leaf, Sharded) and leaf.layout != were[name]:
                text = f"{name!r} is {leaf}, not laid out as from_placement says: {were[name]}."
            else:
                continue
            problems.append(Problem("spec", text, (name,)))
        return problems

    def invert(self) -> tuple[Step, ...]:
        if self.before is None:
            self.refuse_inverse("how the tensors lay before is not known. Give from_placement=.")
        return (Reshard(self.before, self.table),)

    def call_text(self) -> str:
        before = "" if self.before is None else f", from_placement={self.before.call_text()}"
        return f"{self.verb}({self.table.call_text()}{before})"


@frozen
class Gather(Step):
    """See ``gather``.

    As the inverse of ``shard_with`` it knows the layouts that it undoes, and gathers those names alone. That is no
    part of what it is: it equals ``gather()``.
    """

    to: Literal["all"] | int = "all"
    undoes: Table | None = field(default=None, eq=False)
    verb: ClassVar[str] = "gather"
    leafwise: ClassVar[bool] = True
    gathers: ClassVar[bool] = True

    @property
    def grade(self) -> Grade:
        return Grade.NONE if self.undoes is None else Grade.EXACT

    def rewrite(self, scope: Scope) -> Rewrite:
        names, problems = _tensors(scope), list[Problem]()
        if self.undoes is not None:
            found, problems = _resolved(self.undoes, scope)
            names = list(found)
        chosen = set(names)
        assigns = [Assign(name, (name,), self._build) if name in chosen else keep(name) for name in scope.names]
        return Rewrite.of(assigns, problems)

    def _build(self, apply: Applier, leaves: Sequence[Any]) -> Any:
        (leaf,) = leaves
        return apply.once(("gather", self.to), leaf, partial(self._gathered, leaf))

    def _gathered(self, leaf: Any) -> Any:
        spec = spec_of(leaf)
        if spec is None or isinstance(leaf, TensorSpec):
            return leaf
        whole = whole_of(leaf)
        if self.to == "all":
            return whole
        return place(whole, Layout(Mesh({"rank": 1}, [self.to]), [Replicate()]))

    def invert(self) -> tuple[Step, ...]:
        if self.undoes is None:
            self.refuse_inverse("how the tensors lay before is not known. Use shard_with(placement) to lay them out.")
        return (ShardWith(self.undoes),)

    def call_text(self) -> str:
        return call(self.verb, [] if self.to == "all" else [repr(self.to)])


def shard_with(placement: Placing) -> Pipeline:
    """Lay tensors out over a mesh: each becomes a ``Sharded`` that has the shard of every rank.

    Nothing is copied: shards are views of the tensor, or expressions. With ``group=``, ``materialize`` gives each rank
    its own shard.

    Args:
        placement: One ``Layout`` for all tensors; or a mapping from pattern (as in ``select``) to ``Layout``, the first
            that matches wins, and names that none matches pass unchanged; or a ``StateDict`` of layouts by name; or a
            ``ModelSpec``, for the layouts of its entries. Tied names have one layout. Objects that are no tensors pass.
            An optimizer's parameter-like slots are laid out as their parameters; its scalars stay.

    Raises:
        Unsupported: ``placement`` is none; when run: a tensor is laid out already, which is for ``reshard``.
        BadPattern: A key is no pattern.
        UnknownName: When run: a rule wins no name, unless it ends in ``?``.
        SpecMismatch: When run: a layout does not fit its tensor, or tied names have different ones.

    Law: exact: ``~`` gathers the same names; ``gather()(shard_with(l)(x))`` equals ``x``. Sharding commutes with
    renaming, ``rename >> shard_with(rename(table))`` being ``shard_with(table) >> rename``, and with pointwise verbs.

    >>> import torch
    >>> from fdsd.layout import Layout, Mesh, Shard
    >>> state = shard_with(Layout(Mesh({"dp": 2}), [Shard(0)]))({"w": torch.tensor([1, 2, 3])})
    >>> state["w"].shard(0), state["w"].shard(1)
    (tensor([1, 2]), tensor([3]))
    """
    return Pipeline((ShardWith(Table.of("shard_with", placement)),))


def reshard(placement: Placing, *, from_placement: Placing | None = None) -> Pipeline:
    """Lay tensors out in another way than they lie: over another mesh, along other dims, in another order.

    Nothing travels yet, and nothing is copied: the result knows what it is made of. ``materialize`` and ``save`` with
    ``group=`` send each piece to the ranks that need it, at most once; ``.locality()`` tells beforehand what that is.
    A tensor that is not laid out becomes what ``shard_with`` makes of it.

    Args:
        placement: See ``shard_with``.
        from_placement: The layouts before, checked, and needed for the inverse.

    Raises:
        Unsupported, BadPattern, UnknownName, SpecMismatch: As for ``shard_with``; and when run: tensors lie otherwise
            than ``from_placement`` says.

    Law: ``reshard(b) >> reshard(c)`` gives what ``reshard(c)`` gives; exact with ``from_placement``.

    >>> import torch
    >>> from fdsd.layout import Layout, Mesh, Shard
    >>> two, three = (Layout(Mesh({"dp": n}), [Shard(0)]) for n in (2, 3))
    >>> state = (shard_with(two) >> reshard(three))({"w": torch.tensor([1, 2, 3])})
    >>> [state["w"].shard(rank).tolist() for rank in range(3)]
    [[1], [2], [3]]
    """
    before = None if from_placement is None else Table.of("reshard", from_placement)
    return Pipeline((Reshard(Table.of("reshard", placement), before),))


def gather(to: Literal["all"] | int = "all") -> Pipeline:
    """Make sharded tensors whole: on all ranks, or on one.

    Args:
        to: ``"all"``: each becomes the whole tensor that it was made of, or one put together from its shards; where
            only the shard of this rank is here, a ``Lazy`` that ``materialize(group=)`` reads. A rank: each becomes a
            ``Sharded`` that lies wholly on this rank, and the others hold nothing of it.

    Raises:
        SpecMismatch: ``to`` is neither.
        FdsdError: When run: the shards of some ranks are here, but not all.

    Law: ``gather()(shard_with(l)(x))`` equals ``x``. Not invertible, but as the inverse of ``shard_with``.

    >>> import torch
    >>> from fdsd.layout import Layout, Mesh, Shard
    >>> p = shard_with(Layout(Mesh({"dp": 2}), [Shard(0)])) >> gather()
    >>> p({"w": torch.tensor([1, 2, 3])})["w"]
    tensor([1, 2, 3])
    >>> gather(1)({"w": torch.tensor([1, 2, 3])})["w"]
    Sharded(int64[3], {'rank': Replicate()} over 1 rank)
    """
    if isinstance(to, str):
        if to != "all":
            raise SpecMismatch(f"gather: to is 'all' or the number of a rank, not {shown(to)}.")
        return Pipeline((Gather(),))
    if is_mapping(to) or isinstance(to, OptimState | TrainState):
        raise SpecMismatch("gather: to is 'all' or the number of a rank, not a state. Write gather()(state).")
    rank = as_int("gather", "to", to)
    if rank < 0:
        raise SpecMismatch(f"gather: to is 'all' or the number of a rank, from 0 on, not {rank}.")
    return Pipeline((Gather(rank),))
