"""`Wish`: what one rank wants of the leaves of a state, and the requests that all ranks make of all wishes together.

A rank that has a tensor which only others want has to state it too. Live modules are unknown here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import torch
from attrs import define

from fdsd.algebra.lazy import Lazy
from fdsd.algebra.ops.leaves import Origin
from fdsd.data.errors import NameConflict, listing
from fdsd.data.protocols import World
from fdsd.engine.overwriting import placement_of
from fdsd.engine.request import Request
from fdsd.engine.unions import everyone
from fdsd.layout.cutting import Cutter, Spot
from fdsd.layout.flattening import Flattening
from fdsd.layout.pieces import Pieces
from fdsd.layout.wants import Target, blocks_of

__all__ = ["Wish", "digest_of", "label_of", "out_of_reach", "request_of", "requests_of"]


@define(eq=False)  # not frozen: there are thousands, and that takes four times as long
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
    flattening: Flattening | None = None
    out: torch.Tensor | None = None
    dtype: torch.dtype | None = None


def label_of(source: str, flattening: Flattening | None = None) -> str:
    """Name what is wanted: the leaf, and its form if that is another one.

    >>> label_of("w"), label_of("w", Flattening()), label_of("w", Flattening((1, 0)))
    ('w', 'w (flattened)', 'w (flattened as (1, 0))')
    """
    return source if flattening is None else f"{source} ({flattening})"


def digest_of(wishes: Mapping[str, Wish]) -> bytes:
    """Give what is equal for ranks that wish for the same leaves in the same forms.

    >>> digest_of({"w": Wish("w")}) == digest_of({"w": Wish("w", dtype=torch.int8)})
    True
    """
    flattened = [label for label, wish in wishes.items() if wish.flattening is not None]
    return hashlib.sha256(repr((list(wishes), flattened)).encode()).digest()


def requests_of(
    wishes: Mapping[str, Wish],
    node: Callable[[str], Lazy | None],
    world: World,
    verb: str,
    *,
    are_alike: bool = False,
) -> dict[str, Request]:
    """Turn the wishes of all ranks into this rank's requests; collective, unless they are known to be alike.

    Args:
        wishes: What this rank wants, by label.
        node: Gives a leaf that this rank has as an expression; ``None`` for one that it does not have.
        world: The ranks.
        verb: How errors call the asker.
        are_alike: Whether all ranks are known to wish for the same: their digests are equal.

    >>> from fdsd.algebra.apply import defer_leaf
    >>> from fdsd.comms.alone import Alone
    >>> made = requests_of({"w": Wish("w")}, lambda name: defer_leaf(torch.ones(2)), Alone(), "restore")
    >>> made["w"].node
    Lazy(Origin, float32[2])
    """
    if are_alike:
        return {label: request_of(wish, node(wish.source)) for label, wish in wishes.items()}
    mine = {label: (wish.source, wish.flattening) for label, wish in wishes.items()}
    wanted = dict(mine)
    for some in everyone(world, mine, f"{verb}: what is wanted"):
        if some is mine:
            continue
        if clashes := [label for label, form in some.items() if wanted.get(label, form) != form]:
            raise NameConflict(f"{verb}: two different things would be called {listing(clashes)}. Rename one of them.")
        wanted.update(some)
    made: dict[str, Request] = {}
    for label, (source, flattening) in wanted.items():
        found, wish = node(source), wishes.get(label)
        if wish is not None:
            made[label] = request_of(wish, found)
        elif found is not None:
            held = found if flattening is None else flattening.flatten(found)
            made[label] = Request(held, Pieces.of(held.ndim, []), False)
    return made


def request_of(wish: Wish, node: Lazy | None) -> Request:
    """Turn a wish into a request.

    Args:
        wish: What is wanted.
        node: Its source as an expression; ``None`` if this rank does not have it.
    """
    if node is not None and wish.flattening is not None:
        node = wish.flattening.flatten(node)
    return Request(node, wish.target, False, wish.out, wish.dtype)


def out_of_reach(requests: Mapping[str, Request], rank: int) -> list[str]:
    """Name what one process alone wants and does not have: parts that other ranks hold.

    Args:
        requests: What is wanted; of expressions over ranks nothing is known before they are read.
        rank: The rank of this process.

    >>> out_of_reach({}, 0)
    []
    """
    found: list[str] = []
    for name, request in requests.items():
        op = None if request.node is None else request.node.op
        placement = placement_of(op) if isinstance(op, Origin) else None
        if placement is None or placement == request.target or not isinstance(op, Origin):
            continue
        shape = op.spec.shape
        own = blocks_of(placement, shape, rank)
        pieces = Pieces.of(len(shape), [((block.starts, block.sizes), (rank,)) for block in own])
        spot = Spot(0, op.spec.dtype, 0, shape, (1,) * len(shape))
        wanted = [block.region for block in blocks_of(request.target, shape, rank)]
        if any(i is None for region in wanted for i, *_ in Cutter(pieces).cut(region, spot)):
            found.append(name)
    return found
