"""From what ranks state of a tensor to its plan; equal statements are planned once, in one run and from run to run."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import Factory, define, field

from fdsd.data.errors import FdsdError, RankDisagreement, SpecMismatch, listing, plural
from fdsd.data.spec import TensorSpec
from fdsd.engine.agreement import Agreed, Key, Stated
from fdsd.engine.recent import CacheInfo, Recent
from fdsd.layout.expression import Expression
from fdsd.layout.layout import Layout
from fdsd.layout.pieces import Box, Pieces
from fdsd.layout.structure import Limits
from fdsd.layout.transfer import pieces_inside
from fdsd.layout.wants import Want, wants_of
from fdsd.layout.wiring import Wiring, plan_wiring

__all__ = ["WIRINGS", "CacheInfo", "Wirings"]


@define
class Wirings:
    """Plans by what they are plans of; of the least recently used ones, some are forgotten.

    Args:
        most: How many are remembered.
    """

    most: int = 1024
    _recent: Recent[tuple[Stated, tuple[int, ...], Limits], Wiring] = field(
        default=Factory(lambda self: Recent(self.most), takes_self=True), init=False
    )

    def info(self) -> CacheInfo:
        """Tell how often plans were found and made.

        >>> Wirings().info()
        CacheInfo(hits=0, misses=0, size=0)
        """
        return self._recent.info()

    def clear(self) -> None:
        """Forget all plans."""
        self._recent.clear()

    def get(self, stated: Stated, ranks: tuple[int, ...], limits: Limits) -> Wiring:
        """Give the plan of what is stated.

        Args:
            stated: The keys of one tensor, with the ranks that state them.
            ranks: All ranks of the group.
            limits: The sizes of messages.

        Raises:
            RankDisagreement: A rank does not know a tensor that others say it holds.
            SpecMismatch: Layouts that do not fit the tensor, or elements that no rank holds.
        """
        return self._recent.get((stated, ranks, limits), lambda: _plan(stated, ranks, limits))

    def all_of(self, agreed: Agreed, ranks: tuple[int, ...], limits: Limits) -> list[Wiring]:
        """Give the plans of all that was agreed on, or raise one error for all that cannot be planned."""
        made: list[Wiring] = []
        problems: list[tuple[int, FdsdError]] = []
        for place, stated in enumerate(agreed.stated):
            try:
                made.append(self.get(stated, ranks, limits))
            except FdsdError as error:
                problems.append((place, error))
        if problems:
            raise _worded(problems, agreed)
        return made


WIRINGS = Wirings()


def _worded(problems: Sequence[tuple[int, FdsdError]], agreed: Agreed) -> FdsdError:
    told: list[str] = []
    for place, error in problems[:10]:
        names = [name for name, kind in zip(agreed.names, agreed.kinds, strict=True) if kind == place]
        expression = _expression(agreed.stated[place])
        told.append(f"{listing(names, limit=3)}{'' if expression is None else f' ({expression.spec})'}: {error}")
    rest = f" And {plural(len(problems) - 10, 'more problem')}." if len(problems) > 10 else ""
    kind = type(problems[0][1])
    return kind(" ".join(told) + rest)


def _expression(stated: Stated) -> Expression | None:
    return next((key.expression for key, _ in stated if key.expression is not None), None)


def _plan(stated: Stated, ranks: tuple[int, ...], limits: Limits) -> Wiring:
    expression = _expression(stated)
    if expression is None:
        raise RankDisagreement("no rank of the group has it.")
    stating = {rank for _, some in stated for rank in some}
    placements = [_held(i, spec.shape, stated, frozenset(ranks), stating) for i, spec in enumerate(expression.origins)]
    wants = [want for key, some in _wanting(stated, ranks, stating) for want in _wants(key, some, expression.spec)]
    try:
        return plan_wiring(expression, placements, wants, limits=limits)
    except SpecMismatch as error:
        told = _layouts(stated)
        if len(told) < 2:
            raise
        shown = "; ".join([f"{_ranks(some)}: {placement}" for placement, some in list(told.items())[:10]])
        raise RankDisagreement(f"{error} The ranks state different layouts of it ({shown}).") from error


def _layouts(stated: Stated) -> dict[str, list[int]]:
    """Say how the source tensors lie by what each rank states, where it says so by a layout."""
    found: dict[str, list[int]] = {}
    for key, some in stated:
        if layouts := [repr(placement) for placement in key.placements if isinstance(placement, Layout)]:
            found.setdefault(", ".join(dict.fromkeys(layouts)), []).extend(some)
    return found


def _held(i: int, shape: tuple[int, ...], stated: Stated, ranks: frozenset[int], stating: set[int]) -> Pieces:
    """Give the pieces of a source tensor: each rank is asked what it holds itself."""
    knowing = [(key.placements[i], some) for key, some in stated if key.expression is not None]
    rows: list[tuple[Box, Sequence[int]]] = []
    absent: set[int] = set()
    for placement, some in knowing:
        if placement is None:
            rows.append((((0,) * len(shape), shape), some))
            continue
        here = frozenset(some)
        for box, holders in _pieces(placement, shape):
            rows.append((box, [rank for rank in holders if rank in here]))
            absent.update([rank for rank in holders if rank in ranks and rank not in stating])
    if absent:
        raise RankDisagreement(
            f"{_ranks(sorted(absent))} should hold parts of it by the layout that other ranks state, and "
            f"{'does' if len(absent) == 1 else 'do'} not know it. Give all ranks the same tensors."
        )
    return Pieces.of(len(shape), [row for row in rows if row[1]])


def _pieces(placement: Layout | Pieces, shape: tuple[int, ...]) -> Pieces:
    pieces = placement.holders(shape) if isinstance(placement, Layout) else placement
    if pieces.ndim != len(shape):
        raise SpecMismatch(f"its source lies as pieces of {plural(pieces.ndim, 'dim')}, and has the shape {shape}.")
    if isinstance(placement, Pieces) and (odd := [box for box, _ in pieces if not pieces_inside(box, shape)]):
        raise SpecMismatch(f"its source lies as boxes outside its shape {shape}: {listing(odd)}.")
    return pieces


def _wanting(stated: Stated, ranks: tuple[int, ...], stating: set[int]) -> list[tuple[Key, tuple[int, ...]]]:
    """Say for each rank which key tells what it wants: its own, else the first by which it wants anything."""
    found = list(stated)
    others = [rank for rank in ranks if rank not in stating]
    for key, _ in stated:
        some = tuple([rank for rank in others if _includes(key, rank)])
        others = [rank for rank in others if rank not in some]
        if some:
            found.append((key, some))
    return found


def _includes(key: Key, rank: int) -> bool:
    if isinstance(key.target, Layout):
        return rank in key.target.mesh
    return key.everyone if key.target is None else any(rank in ranks for ranks in key.target.ranks)


def _wants(key: Key, ranks: tuple[int, ...], spec: TensorSpec) -> tuple[Want, ...]:
    return wants_of(spec.shape, spec.dtype if key.dtype is None else key.dtype, [(key.target, ranks)])


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {listing(ranks)}"
