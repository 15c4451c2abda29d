"""The row order of rotary embeddings: ``permute_rope``."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from attrs import frozen

from fdsd.algebra.apply import Applier
from fdsd.algebra.ops import MergeDims, Permute, SplitDim
from fdsd.data.errors import SpecMismatch
from fdsd.data.spec import TensorSpec
from fdsd.pipeline.pipeline import Pipeline
from fdsd.pipeline.step import Grade, Step
from fdsd.transforms.each import Each
from fdsd.transforms.regroup import as_int, call, shown
from fdsd.transforms.which import Which, choice

__all__ = ["permute_rope"]

Order = Literal["halves", "pairs"]


@frozen
class PermuteRope(Each):
    """See ``permute_rope``."""

    heads: int = 1
    to: Order = "halves"
    verb: ClassVar[str] = "permute_rope"

    def __attrs_post_init__(self) -> None:
        if self.to not in ("halves", "pairs"):
            raise SpecMismatch(f"permute_rope: to={shown(self.to)}, but the orders are 'halves' and 'pairs'.")
        if self.heads < 1:
            raise SpecMismatch(f"permute_rope: heads={self.heads}, but there is 1 head or more.")

    @property
    def own_grade(self) -> Grade:
        return Grade.EXACT

    def make(self, apply: Applier, leaf: Any, spec: TensorSpec) -> Any:
        if not spec.ndim or spec.shape[0] % (2 * self.heads):
            raise SpecMismatch(
                f"shape {spec.shape} does not have {self.heads} heads of an even number of rows each in dim 0. "
                "Give the number of heads of this tensor: keys may have fewer than queries."
            )
        half = spec.shape[0] // self.heads // 2
        sizes = (self.heads, half, 2) if self.to == "halves" else (self.heads, 2, half)
        rows = apply(SplitDim(0, sizes), leaf)
        swapped = apply(Permute((0, 2, 1, *range(3, spec.ndim + 2))), rows)
        return apply(MergeDims(0, 3), swapped)

    def inverse(self) -> Step:
        return PermuteRope(self.which, self.heads, "pairs" if self.to == "halves" else "halves")

    def call_text(self) -> str:
        return call(self.verb, [self.which.one_text()], heads=self.heads, to=self.to)


def permute_rope(which: Which, *, heads: int, to: Order) -> Pipeline:
    """Reorder the rows of each head between the two conventions of rotary embeddings.

    Args:
        which: The names of projections, weights ``(heads * d, in)`` or biases ``(heads * d,)``; see ``select``.
        heads: The number of heads *of these tensors*: with grouped queries, keys have fewer.
        to: ``"halves"``: the rotated pairs are ``d / 2`` rows apart, as in transformers. ``"pairs"``: they are
            neighbours, as in Meta's checkpoints.

    Raises:
        BadPattern: Names are no names.
        UnknownName: When run: a pattern matches nothing.
        SpecMismatch: ``heads`` or ``to`` is none; when run: the rows do not divide into heads of an even number of
            rows.

    The rule: transformers, ``convert_llama_weights_to_hf.py``, ``permute``.

    Law: exact; ``~`` names the other order.

    >>> import torch
    >>> permute_rope("q", heads=1, to="halves")({"q": torch.tensor([0, 1, 2, 3])})["q"]
    tensor([0, 2, 1, 3])
    """
    return Pipeline((PermuteRope(choice("permute_rope", which), as_int("permute_rope", "heads", heads), to),))
