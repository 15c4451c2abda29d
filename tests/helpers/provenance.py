"""Provenance by brute force: the operations run on tensors of element numbers instead of values.

It shares nothing with what it checks but the expressions and each operation's own ``eager``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from attrs import field, frozen

from fdsd.algebra.apply import Applier
from fdsd.algebra.lazy import Computing, Lazy
from fdsd.algebra.ops import Call, Cast, Constant, Item, Origin
from fdsd.pipeline.rewrite import Assign, Rewrite, Scope
from fdsd.pipeline.step import Grade, Step

__all__ = ["Places", "Regrow"]


@frozen
class Regrow(Step):
    """Makes expressions again over the leaves of a state.

    Attributes:
        roots: What to make, by name.
        origins: The name that each origin has in the state, by the id of its node.
    """

    roots: Mapping[str, Lazy] = field(eq=id)
    origins: Mapping[int, str] = field(eq=id)
    verb: ClassVar[str] = "regrow"

    @property
    def grade(self) -> Grade:
        return Grade.NONE

    def rewrite(self, scope: Scope) -> Rewrite:
        names = tuple(self.origins.values())
        return Rewrite.of([Assign(name, names, self._build(root)) for name, root in self.roots.items()])

    def _build(self, root: Lazy) -> Any:
        def make(apply: Applier, leaves: Sequence[Any]) -> Any:
            known: dict[int, Any] = dict(zip(self.origins, leaves, strict=True))

            def again(node: Lazy) -> Any:
                if id(node) not in known:
                    inputs = [again(x) for x in node.inputs]
                    if isinstance(node.op, Item):
                        known[id(node)] = inputs[0][node.op.index]
                    elif isinstance(node.op, Constant):
                        known[id(node)] = Lazy(node.op)
                    else:
                        known[id(node)] = apply(node.op, *inputs)
                return known[id(node)]

            return again(root)

        return make

    def call_text(self) -> str:
        return "regrow(...)"


class Places:
    """Element numbers of all origins of a state, and what expressions over them are made of.

    Each place of a tensor has a list of numbers: of elements from 0 on; -1 for none; -2, -3 ... for the calls.

    Args:
        state: Lazy tensors by name, all of them origins.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.names: list[tuple[str, tuple[int, ...]]] = []
        self._layers: dict[int, list[torch.Tensor]] = {}
        self._numbers: dict[Any, int] = {}
        self._calls: dict[int, list[torch.Tensor]] = {}
        for name, node in state.items():
            if isinstance(node, Lazy) and id(node) not in self._layers:
                first, count = len(self.names), math.prod(node.shape)
                self._layers[id(node)] = [torch.arange(first, first + count).reshape(node.shape)]
                self.names += [(name, index) for index in _every_index(node.shape)]

    def uses(self, root: Lazy) -> Counter[int]:
        """Count the elements that a tensor uses: by places; of a call, once."""
        found: Counter[int] = Counter()
        seen: set[int] = set()
        stack = list(self.layers(root))
        while stack:
            numbers = Counter(stack.pop().reshape(-1).tolist())
            for number, times in numbers.items():
                if number >= 0:
                    found[number] += times
                elif number < -1 and number not in seen:
                    seen.add(number)
                    stack.extend(self._calls[number])
        return found

    def at(self, root: Lazy, index: tuple[int, ...]) -> Counter[int]:
        """Count the elements that one place of a tensor is made of."""
        picked = Lazy(root.op, root.inputs, root.outputs)
        self._layers[id(picked)] = [layer[index].reshape(()) for layer in self.layers(root)]
        found = self.uses(picked)
        del self._layers[id(picked)]
        return found

    def layers(self, node: Lazy) -> list[torch.Tensor]:
        """Give the numbers at each place of a tensor, as one tensor for each number of a place."""
        if id(node) not in self._layers:
            self._layers[id(node)] = self._made(node)
        return self._layers[id(node)]

    def _made(self, node: Lazy) -> list[torch.Tensor]:
        op = node.op
        if isinstance(op, Constant | Origin):
            return [torch.full(node.shape, -1)]
        if isinstance(op, Item):
            return [torch.full(node.shape, self._call(node.inputs[0]))]
        if isinstance(op, Call):
            return [torch.full(node.shape, self._call(node))]
        every = [self.layers(x) for x in node.inputs]
        if isinstance(op, Cast):
            return every[0]
        if isinstance(op, Computing):  # those there are compute place by place
            return [layer for layers in every for layer in layers]
        depth = max(map(len, every))
        none = [torch.full(x.shape, -1) for x in node.inputs]
        padded = [layers + [blank] * (depth - len(layers)) for layers, blank in zip(every, none, strict=True)]
        return [op.eager(*[layers[k] for layers in padded]) for k in range(depth)]

    def _call(self, node: Lazy) -> int:
        """Give the number of a call; equal calls of the same tensors are one."""
        number = -2 - self._number(node)
        if number not in self._calls:
            self._calls[number] = [layer for x in node.inputs for layer in self.layers(x)]
        return number

    def _number(self, node: Lazy) -> int:
        key = (type(node.op), node.op, tuple([self._number(x) for x in node.inputs]))
        return self._numbers.setdefault(key, len(self._numbers))


def _every_index(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    indices: list[tuple[int, ...]] = [()]
    for size in shape:
        indices = [(*index, i) for index in indices for i in range(size)]
    return indices
