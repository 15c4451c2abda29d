"""`Wish`: what one rank wants of the leaves of a state, and the requests that all ranks make of all wishes together.

A rank that has a tensor which only others want has to state it too. Live modules are unknown here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from attrs import frozen

from fdsd.algebra.apply import apply
from fdsd.algebra.lazy import Lazy
from fdsd.algebra.ops import MergeDims, Permute
from fdsd.data.errors import NameConflict, listing
from fdsd.data.protocols import World
from fdsd.engine.request import Request
from fdsd.engine.unions import everyone
from fdsd.layout.pieces import Pieces
from fdsd.layout.wants import Target

__all__ = ["Flattening", "Wish", "label_of", "requests_of"]

Flattening = tuple[int, ...] | None
"""How FSDP1 flattens a tensor: its dims in this order, none for their own; ``None``: it stays as it is."""


@frozen(eq=False)
class Wish:
    """A tensor that this rank wants.

    Args:
        source: The name of the leaf.
        target: Where it is wanted; of a flattened tensor by pieces.
        flattening: Whether it is wanted flattened, and how.
        out: This rank's memory, if there is any.
        dtype: The dtype of the result, if there is none.
    """

    source: str
    target: Target = None
    flattening: Flattening = None
    out: torch.Tensor | None = None
    dtype: torch.dtype | None = None


def label_of(source: str, flattening: Flattening = None) -> str:
    """Name what is wanted: the leaf, and its form if that is another one.

    >>> label_of("w"), label_of("w", ()), label_of("w", (1, 0))
    ('w', 'w (flattened)', 'w (flattened as (1, 0))')
    """
    if flattening is None:
        return source
    return f"{source} (flattened as {flattening})" if flattening else f"{source} (flattened)"


def requests_of(
    wishes: Mapping[str, Wish], node: Callable[[str], Lazy | None], world: World, verb: str
) -> dict[str, Request]:
    """Turn the wishes of all ranks into this rank's requests; collective.

    Args:
        wishes: What this rank wants, by label.
        node: Gives a leaf that this rank has as an expression; ``None`` for one that it does not have.
        world: The ranks.
        verb: How errors call the asker.

    >>> from fdsd.algebra.apply import defer_leaf
    >>> from fdsd.comms.alone import Alone
    >>> made = requests_of({"w": Wish("w")}, lambda name: defer_leaf(torch.ones(2)), Alone(), "restore")
    >>> made["w"].node
    Lazy(Origin, float32[2])
    """
    mine = {label: (wish.source, wish.flattening) for label, wish in wishes.items()}
    wanted: dict[str, tuple[str, Flattening]] = {}
    for some in everyone(world, mine, f"{verb}: what is wanted"):
        if clashes := [label for label, form in some.items() if wanted.get(label, form) != form]:
            raise NameConflict(f"{verb}: two different things would be called {listing(clashes)}. Rename one of them.")
        wanted.update(some)
    made: dict[str, Request] = {}
    for label, (source, flattening) in wanted.items():
        found = node(source)
        if found is not None and flattening is not None:
            found = _flattened(found, flattening)
        wish = wishes.get(label)
        if wish is not None:
            made[label] = Request(found, wish.target, False, wish.out, wish.dtype)
        elif found is not None:
            made[label] = Request(found, Pieces.of(found.ndim, []), False)
    return made


def _flattened(node: Lazy, order: tuple[int, ...]) -> Lazy:
    ndim = node.ndim
    permuted = apply(Permute(order), node) if order else node
    made: Lazy = apply(MergeDims(0, ndim), permuted)
    return made
