"""Reading whole expressions into fresh memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fdsd.algebra.fill import Session
from fdsd.algebra.lazy import Lazy
from fdsd.algebra.plan import check_budget
from fdsd.data.errors import add_note
from fdsd.data.region import Region

__all__ = ["evaluate"]


def evaluate(
    roots: Sequence[Lazy], *, budget: int | None = None, names: Sequence[str] | None = None
) -> list[torch.Tensor]:
    """Fill the whole of each expression into fresh memory; one tensor for each distinct node.

    Args:
        roots: The expressions.
        budget: Bytes for scratch and kept results, results themselves left out.
        names: What the expressions are called, for errors.

    >>> from fdsd.algebra.apply import defer_leaf
    >>> evaluate([defer_leaf(torch.ones(2))])
    [tensor([1., 1.])]
    """
    called = dict(zip(map(id, reversed(roots)), reversed(names or ()), strict=False))  # the first name counts
    distinct = list({id(root): root for root in roots}.values())
    check_budget(distinct, budget)
    session = Session(distinct, budget=budget)
    made: dict[int, torch.Tensor] = {}
    with torch.no_grad():
        for position, (given, root) in enumerate(zip(distinct, session.roots, strict=True)):
            out = made[id(given)] = torch.empty(root.shape, dtype=root.dtype)
            try:
                session.fill(root, Region.whole(root.shape), out)
            except Exception as error:
                if names is not None:
                    add_note(error, f"while reading {called[id(given)]!r}, {root.spec}")
                raise
            session.finish(position)
    return [made[id(given)] for given in roots]
