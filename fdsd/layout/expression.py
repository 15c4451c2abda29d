"""`Expression`: the structure of a lazy tensor, with its graph numbered by first visit and its sources left out.

Equal expressions are planned once; ``concat(x, x)`` is not ``concat(x, y)``. Names and placements are unknown here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from attrs import field, frozen

from fdsd.algebra.graph import walk
from fdsd.algebra.lazy import Lazy, Op, Structural
from fdsd.algebra.memory import SpecSource
from fdsd.algebra.ops.leaves import Constant, Origin
from fdsd.data.spec import TensorSpec

__all__ = ["Expression", "expression_of"]


@frozen
class Step:
    """An operation, the numbers of its inputs, and what comes out; no operation for a source tensor."""

    kind: type | None
    op: Op | None
    inputs: tuple[int, ...]
    outputs: tuple[TensorSpec, ...]


@frozen(cache_hash=True)
class Expression:
    """The graph below a lazy tensor, as a value.

    Attributes:
        steps: Inputs before what uses them; the last one is the tensor itself. Source tensors are numbered in the
            order in which they come up.

    >>> import torch
    >>> from fdsd.algebra.apply import apply, defer_leaf
    >>> from fdsd.algebra.ops import Concat
    >>> x, y, z = (defer_leaf(torch.ones(2)) for _ in range(3))
    >>> a, b, c = (expression_of(apply(Concat(0), *some))[0] for some in ([x, x], [x, y], [y, z]))
    >>> a == b, b == c
    (False, True)
    """

    steps: tuple[Step, ...] = field(repr=lambda steps: f"<{len(steps)} steps>")

    @classmethod
    def of(cls, spec: TensorSpec) -> Expression:
        """Give the expression that is a source tensor itself.

        >>> import torch
        >>> Expression.of(TensorSpec((2,), torch.int8)).origins
        (TensorSpec((2,), torch.int8),)
        """
        return _bare(spec)

    @property
    def spec(self) -> TensorSpec:
        """The spec of the tensor."""
        return self.steps[-1].outputs[0]

    @property
    def origins(self) -> tuple[TensorSpec, ...]:
        """The specs of the source tensors, by number."""
        return tuple([step.outputs[0] for step in self.steps if step.op is None])

    @property
    def is_structural(self) -> bool:
        """Whether no step computes values."""
        return all(step.op is None or isinstance(step.op, Structural | Constant) for step in self.steps)

    def build(self) -> Lazy:
        """Give a lazy tensor of this structure, whose sources have no data; their FQNs are their numbers."""
        made: list[Lazy] = []
        num = 0
        for step in self.steps:
            if step.op is None:
                made.append(Lazy(Origin(_NOWHERE, str(num), step.outputs[0]), (), step.outputs))
                num += 1
            else:
                made.append(Lazy(step.op, [made[i] for i in step.inputs], step.outputs))
        return made[-1]


_NOWHERE = SpecSource({})


@lru_cache(1 << 12)
def _bare(spec: TensorSpec) -> Expression:
    return Expression((Step(None, None, (), (TensorSpec(spec.shape, spec.dtype),)),))


def expression_of(node: Lazy) -> tuple[Expression, Sequence[Origin]]:
    """Read the structure of a lazy tensor.

    Args:
        node: The tensor.

    Returns:
        The structure, and the source tensors by number.

    Law: equal operations on identical inputs count once, as they do in a run.
    """
    if isinstance(node.op, Origin):
        return _bare(node.op.spec), [node.op]
    numbers: dict[object, int] = {}
    number_of: dict[int, int] = {}
    origins: list[Origin] = []
    steps: list[Step] = []
    for each in walk([node]):
        op, inputs = each.op, tuple([number_of[id(x)] for x in each.inputs])
        key = (id(op.source), op.fqn) if isinstance(op, Origin) else (type(op), op, inputs)
        found = numbers.get(key)
        if found is None:
            found = numbers[key] = len(steps)
            outputs = tuple([TensorSpec(spec.shape, spec.dtype) for spec in each.outputs])
            if isinstance(op, Origin):
                origins.append(op)
                steps.append(Step(None, None, (), outputs))
            else:
                steps.append(Step(type(op), op, inputs, outputs))
        number_of[id(each)] = found
    return Expression(tuple(steps)), origins
