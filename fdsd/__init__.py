"""fdsd: state dicts as values, rewritten by pipelines of pure functions."""

from fdsd import errors as errors
from fdsd.algebra.apply import defer
from fdsd.algebra.lazy import Lazy
from fdsd.data.model import ModelSpec, TensorEntry
from fdsd.data.optim import OptimState, ParamGroup
from fdsd.data.spec import TensorSpec
from fdsd.data.statedict import StateDict, specs
from fdsd.data.template import Template
from fdsd.data.train import TrainState
from fdsd.engine.diffing import Diff, diff
from fdsd.engine.materializing import materialize
from fdsd.engine.opening import open as open
from fdsd.engine.saving import save
from fdsd.pipeline.pipeline import Conversion, Pipeline, State, identity, pipe
from fdsd.pipeline.step import Grade
from fdsd.transforms import (
    add_prefix,
    add_scalar,
    average,
    cast,
    combine,
    concat,
    crop,
    drop,
    drop_prefix,
    filter_frozen,
    flatten_optim,
    index_select,
    insert,
    lerp,
    map_tensors,
    pad,
    partition,
    permute,
    permute_rope,
    rename_fqns,
    reshape,
    select,
    split,
    stack,
    strip_wrappers,
    tie,
    transpose,
    unflatten_optim,
    unstack,
    untie,
)

__all__ = [
    "Conversion",
    "Diff",
    "Grade",
    "Lazy",
    "ModelSpec",
    "OptimState",
    "ParamGroup",
    "Pipeline",
    "State",
    "StateDict",
    "Template",
    "TensorEntry",
    "TensorSpec",
    "TrainState",
    "add_prefix",
    "add_scalar",
    "average",
    "cast",
    "combine",
    "concat",
    "crop",
    "defer",
    "diff",
    "drop",
    "drop_prefix",
    "filter_frozen",
    "flatten_optim",
    "identity",
    "index_select",
    "insert",
    "lerp",
    "map_tensors",
    "materialize",
    "pad",
    "partition",
    "permute",
    "permute_rope",
    "pipe",
    "rename_fqns",
    "reshape",
    "save",
    "select",
    "specs",
    "split",
    "stack",
    "strip_wrappers",
    "tie",
    "transpose",
    "unflatten_optim",
    "unstack",
    "untie",
]
