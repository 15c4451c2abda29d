"""The operations: one small frozen class each."""

from fdsd.algebra.ops.call import Call, Item
from fdsd.algebra.ops.index import IndexSelect
from fdsd.algebra.ops.joins import Concat, Stack
from fdsd.algebra.ops.leaves import Constant, Origin
from fdsd.algebra.ops.moves import Cast, Distinct, Permute, Select, Slice
from fdsd.algebra.ops.pointwise import AddScalar, Average, Lerp, Same
from fdsd.algebra.ops.reshape import MergeDims, SplitDim

__all__ = [
    "AddScalar",
    "Average",
    "Call",
    "Cast",
    "Concat",
    "Constant",
    "Distinct",
    "IndexSelect",
    "Item",
    "Lerp",
    "MergeDims",
    "Origin",
    "Permute",
    "Same",
    "Select",
    "Slice",
    "SplitDim",
    "Stack",
]
