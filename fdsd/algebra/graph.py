"""Facts about the graph below some roots that a run needs: sharing, what to keep and until when, nesting.

Built once for a run, without recursion, so that long chains cannot overflow the stack.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fdsd.algebra.lazy import Computing, Lazy
from fdsd.algebra.ops.call import Item
from fdsd.algebra.ops.index import IndexSelect
from fdsd.algebra.ops.moves import Cast

__all__ = ["Graph"]


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
        self.depth: dict[int, int] = {}
        edges: dict[int, int] = {}
        self.kept: dict[int, Lazy] = {}
        for root in {id(root): root for root in self.roots}.values():
            edges[id(root)] = edges.get(id(root), 0) + 1
        for node in _postorder(self.roots):
            below = max([self.depth[id(x)] for x in node.inputs], default=0)
            self.depth[id(node)] = below + isinstance(node.op, Computing | Cast | IndexSelect)
            for x in node.inputs:
                edges[id(x)] = edges.get(id(x), 0) + 1
            if isinstance(node.op, Computing) and (node.op.whole or len(node.outputs) > 1):
                self.kept[id(node)] = node
        for node in _postorder(self.roots):
            if isinstance(node.op, Computing) and edges[id(node)] > 1:
                self.kept[id(node)] = node
        self.last_root: dict[int, int] = self._last_roots() if self.kept else {}

    def _last_roots(self) -> dict[int, int]:
        found: dict[int, int] = {}
        seen: set[int] = set()
        for position in reversed(range(len(self.roots))):
            for node in _postorder([self.roots[position]], seen):
                if id(node) in self.kept:
                    found[id(node)] = position
        return found

    @property
    def has_whole(self) -> bool:
        """Whether any operation needs its whole input, so that a budget may turn out too small."""
        return any(isinstance(node.op, Computing) and node.op.whole for node in self.kept.values())


def _postorder(roots: Sequence[Lazy], seen: set[int] | None = None) -> Iterator[Lazy]:
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
    for node in _postorder(roots):
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
