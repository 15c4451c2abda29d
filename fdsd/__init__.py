"""fdsd: state dicts as values, rewritten by pipelines of pure functions.

The public names, each imported from its home when it is first used: ``import fdsd`` itself loads nothing else. A name
stands in three places here: the imports that type checkers read, ``__all__``, and ``_HOMES``; a test compares them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fdsd import errors as errors
    from fdsd.algebra.apply import defer
    from fdsd.algebra.lazy import Lazy
    from fdsd.data.model import ModelSpec, TensorEntry
    from fdsd.data.optim import OptimState, ParamGroup
    from fdsd.data.spec import TensorSpec
    from fdsd.data.statedict import StateDict, specs
    from fdsd.data.template import Template
    from fdsd.data.train import TrainState
    from fdsd.engine.capturing import capture
    from fdsd.engine.describing import describe
    from fdsd.engine.diffing import Diff, diff
    from fdsd.engine.materializing import materialize
    from fdsd.engine.opening import open as open
    from fdsd.engine.restoring import LoadReport, restore
    from fdsd.engine.saving import save
    from fdsd.engine.snapshots import snapshot
    from fdsd.engine.streams import stream
    from fdsd.layout.sharded import Sharded
    from fdsd.pipeline.locality import Locality
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
        from_shards,
        gather,
        index_select,
        insert,
        lerp,
        local_shards,
        map_tensors,
        pad,
        partition,
        permute,
        permute_rope,
        rename_fqns,
        reshape,
        reshard,
        select,
        shard_with,
        split,
        stack,
        strip_wrappers,
        tie,
        transpose,
        unflatten_optim,
        unstack,
        untie,
    )

    __version__: str

__all__ = [
    "Conversion",
    "Diff",
    "Grade",
    "Lazy",
    "LoadReport",
    "Locality",
    "ModelSpec",
    "OptimState",
    "ParamGroup",
    "Pipeline",
    "Sharded",
    "State",
    "StateDict",
    "Template",
    "TensorEntry",
    "TensorSpec",
    "TrainState",
    "add_prefix",
    "add_scalar",
    "average",
    "capture",
    "cast",
    "combine",
    "concat",
    "crop",
    "defer",
    "describe",
    "diff",
    "drop",
    "drop_prefix",
    "filter_frozen",
    "flatten_optim",
    "from_shards",
    "gather",
    "identity",
    "index_select",
    "insert",
    "lerp",
    "local_shards",
    "map_tensors",
    "materialize",
    "pad",
    "partition",
    "permute",
    "permute_rope",
    "pipe",
    "rename_fqns",
    "reshape",
    "reshard",
    "restore",
    "save",
    "select",
    "shard_with",
    "snapshot",
    "specs",
    "split",
    "stack",
    "stream",
    "strip_wrappers",
    "tie",
    "transpose",
    "unflatten_optim",
    "unstack",
    "untie",
]

_HOMES = {
    "fdsd.algebra.apply": "defer",
    "fdsd.algebra.lazy": "Lazy",
    "fdsd.data.model": "ModelSpec TensorEntry",
    "fdsd.data.optim": "OptimState ParamGroup",
    "fdsd.data.spec": "TensorSpec",
    "fdsd.data.statedict": "StateDict specs",
    "fdsd.data.template": "Template",
    "fdsd.data.train": "TrainState",
    "fdsd.engine.capturing": "capture",
    "fdsd.engine.describing": "describe",
    "fdsd.engine.diffing": "Diff diff",
    "fdsd.engine.materializing": "materialize",
    "fdsd.engine.opening": "open",
    "fdsd.engine.restoring": "LoadReport restore",
    "fdsd.engine.saving": "save",
    "fdsd.engine.snapshots": "snapshot",
    "fdsd.engine.streams": "stream",
    "fdsd.layout.sharded": "Sharded",
    "fdsd.pipeline.locality": "Locality",
    "fdsd.pipeline.pipeline": "Conversion Pipeline State identity pipe",
    "fdsd.pipeline.step": "Grade",
    "fdsd.transforms": (
        "add_prefix add_scalar average cast combine concat crop drop drop_prefix filter_frozen flatten_optim "
        "from_shards gather index_select insert lerp local_shards map_tensors pad partition permute permute_rope "
        "rename_fqns reshape reshard select shard_with split stack strip_wrappers tie transpose unflatten_optim "
        "unstack untie"
    ),
}
"""Module to the public names that live in it."""

_MODULES = frozenset(["errors"])
"""Modules that are public as they are."""

_HOME = {name: home for home, names in _HOMES.items() for name in names.split()}


if not TYPE_CHECKING:  # to a checker, a module with __getattr__ would have every name

    def __getattr__(name: str) -> object:
        """Import a public name when it is first used."""
        if name in _MODULES:
            return import_module(f"fdsd.{name}")
        if name == "__version__":
            value: object = _version()
        elif name in _HOME:
            value = getattr(import_module(_HOME[name]), name)
        else:
            raise AttributeError(f"module 'fdsd' has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_MODULES, "__version__"})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("fdsd")
    except PackageNotFoundError:  # run from a folder of sources that was not installed
        return "unknown"
