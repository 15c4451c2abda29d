"""Facts about the graph below some roots that a run needs: sharing, what to keep and until when, nesting.

Built once for a run, without recursion, so that long chains cannot overflow the stack.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fdsd.algebra.lazy import Computing, Lazy
from fdsd.algebra.ops.call import Item
from fdsd.algebra.ops.index import IndexSelect
from fdsd.algebra.ops.moves import Cast

__all__ = ["Graph", "producer", "walk"]


class Graph:
    """The expressions below ``roots``, with equal operations on identical inputs made the identical node.

    Attributes:
        roots: The roots, interned, in the given order.
        kept: Ids of nodes whose results are kept once computed: those that need their whole input, and computing
            nodes used more than once.
        last_root: For each kept node, the position of the last root that depends on it.
        depth: For each node, how many operations that may take scratch lie on the longest way down, itself included.
    """

    __slots__ = ("depth", "kept", "last_root", "roots")

    def __init__(self, roots: Sequence[Lazy]) -> None:
        self.roots = _intern(roots)
        nodes = list(walk(self.roots))
        self.depth: dict[int, int] = {}
        for node in nodes:
            below = max([self.depth[id(x)] for x in node.inputs], default=0)
            self.depth[id(node)] = below + isinstance(node.op, Computing | Cast | IndexSelect)
        self.kept = _kept(nodes, self.roots)
        self.last_root: dict[int, int] = self._last_roots() if self.kept else {}

    def _last_roots(self) -> dict[int, int]:
        found: dict[int, int] = {}
        seen: set[int] = set()
        for position in reversed(range(len(self.roots))):
            for node in walk([self.roots[position]], seen):
                if id(node) in self.kept:
                    found[id(node)] = position
        return found


def _kept(nodes: Sequence[Lazy], roots: Sequence[Lazy]) -> dict[int, Lazy]:
    """Find the nodes whose results are kept: an operation behind something that is used twice is used twice too."""
    uses = dict.fromkeys(map(id, nodes), 0)
    for root in roots:
        uses[id(root)] += 1
    kept: dict[int, Lazy] = {}
    for node in reversed(nodes):  # users first
        needs_whole = isinstance(node.op, Computing) and (node.op.whole or len(node.outputs) > 1)
        if needs_whole or (isinstance(node.op, Computing) and uses[id(node)] > 1):
            kept[id(node)] = node
        times = 1 if id(node) in kept else min(uses[id(node)], 2)
        for x in node.inputs:
            uses[id(x)] += times
    return kept


def walk(roots: Sequence[Lazy], seen: set[int] | None = None) -> Iterator[Lazy]:
    """Visit each node below ``roots`` once, inputs first."""
    seen = set() if seen is None else seen
    stack = [(root, False) for root in reversed(roots)]
    while stack:
        node, ready = stack.pop()
        if ready:
            yield node
        elif id(node) not in seen:
            seen.add(id(node))
            stack.append((node, True))
            stack.extend([(x, False) for x in reversed(node.inputs) if id(x) not in seen])


def _intern(roots: Sequence[Lazy]) -> list[Lazy]:
    """Make equal operations on identical inputs the identical node."""
    table: dict[object, Lazy] = {}
    canonical: dict[int, Lazy] = {}
    for node in walk(roots):
        inputs = [canonical[id(x)] for x in node.inputs]
        key = (type(node.op), node.op, tuple(map(id, inputs)))
        found = table.get(key)
        if found is None:
            same = all(a is b for a, b in zip(inputs, node.inputs, strict=True))
            found = table[key] = node if same else Lazy(node.op, inputs, node.outputs)
        canonical[id(node)] = found
    return [canonical[id(root)] for root in roots]


def producer(node: Lazy) -> tuple[Lazy, int]:
    """Give the node that computes a kept result, and which of its results is meant."""
    return (node.inputs[0], node.op.index) if isinstance(node.op, Item) else (node, 0)
