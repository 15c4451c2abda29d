"""Reading whole expressions into fresh memory."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from fdsd.algebra.fill import Session
from fdsd.algebra.lazy import Lazy
from fdsd.algebra.plan import check_budget
from fdsd.data.errors import add_note
from fdsd.data.region import Region
from fdsd.data.ties import tie_key

__all__ = ["evaluate"]


def evaluate(
    roots: Sequence[Lazy], *, budget: int | None = None, names: Sequence[str] | None = None
) -> list[torch.Tensor]:
    """Fill the whole of each expression into fresh memory; one tensor for those that are tied.

    Args:
        roots: The expressions.
        budget: Bytes for scratch and kept results, results themselves left out.
        names: What the expressions are called, for errors.

    >>> from fdsd.algebra.apply import defer_leaf
    >>> evaluate([defer_leaf(torch.ones(2))])
    [tensor([1., 1.])]
    """
    keys = [tie_key(root) for root in roots]
    called = dict(zip(reversed(keys), reversed(names or ()), strict=False))  # the first name counts
    distinct = dict(zip(keys, roots, strict=True))
    check_budget(list(distinct.values()), budget)
    session = Session(list(distinct.values()), budget=budget)
    made: dict[Hashable, torch.Tensor] = {}
    with torch.no_grad():
        for position, (key, root) in enumerate(zip(distinct, session.roots, strict=True)):
            out = made[key] = torch.empty(root.shape, dtype=root.dtype)
            try:
                session.fill(root, Region.whole(root.shape), out)
            except Exception as error:
                if names is not None:
                    add_note(error, f"while reading {called[key]!r}, {root.spec}")
                raise
            session.finish(position)
    return [made[key] for key in keys]
