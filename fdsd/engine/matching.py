"""Which tensor of a state goes into which tensor of a model: names and specs compared, all differences found at once.

Pure: neither modules nor processes are known here, and no data is read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal

from attrs import frozen

from fdsd.algebra.dtypes import check_cast
from fdsd.data.errors import SpecMismatch, Unsupported, listing
from fdsd.data.naming import nearest
from fdsd.data.problem import Problem
from fdsd.data.spec import TensorSpec, dtype_name, spec_of
from fdsd.data.statedict import StateDict, same_leaf
from fdsd.data.ties import ties
from fdsd.data.values import is_mapping
from fdsd.pipeline.pipeline import Pipeline
from fdsd.pipeline.rewrite import Scope
from fdsd.transforms.names import WRAPPERS
from fdsd.transforms.which import Choice

__all__ = ["DtypeRule", "Match", "excused", "expected", "match_state"]

DtypeRule = Literal["same", "target", "source"]


@frozen
class Match:
    """What goes where.

    Attributes:
        loads: For each tensor of the model, by the first of its names that are expected, the name in the state that
            it comes from.
        loaded: All names of the model that get a value, tied ones too.
        missing: Names that the model expects and the state lacks, tied names of loaded ones aside.
        unexpected: Names of the state that no model expects.
        untied: Names that are tied in the model and hold tensors of their own in the state, each with the one that is
            loaded in its place: whether the values are equal is not known yet.
        problems: What has to stop a load.
    """

    loads: Mapping[str, str]
    loaded: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    untied: tuple[tuple[str, str], ...] = ()
    problems: tuple[Problem, ...] = ()


def expected(specs: StateDict[Any], keep: Pipeline, verb: str = "restore") -> StateDict[Any]:
    """Let a filter choose from what a model expects.

    Args:
        specs: The specs of the model, and other entries as they are.
        keep: A pipeline that only leaves names out, such as ``filter_frozen(...)``.
        verb: How an error calls the asker.

    Raises:
        SpecMismatch: The filter renames, makes or changes tensors.

    >>> import torch
    >>> from fdsd.transforms.choose import drop
    >>> two = StateDict({"a": TensorSpec((1,), torch.int8), "b": TensorSpec((2,), torch.int8)})
    >>> list(expected(two, drop("a")))
    ['b']
    """
    if not isinstance(keep, Pipeline):
        raise Unsupported(f"{verb}: filter is a pipeline that chooses names, such as drop(...), not {keep!r}.")
    if not keep.steps:
        return specs
    made = keep(specs)
    if not isinstance(made, StateDict):
        raise Unsupported(f"{verb}: the filter gives a {type(made).__name__}. Give one that chooses names.")
    chosen: StateDict[Any] = made
    if odd := [name for name, leaf in chosen.items() if name not in specs or not same_leaf(leaf, specs[name])]:
        raise SpecMismatch(
            f"{verb}: the filter may only leave names out, and it makes or changes {listing(odd)}. "
            "Apply the other steps to the state instead."
        )
    return chosen


def match_state(
    state: Mapping[str, Any],
    wanted: Mapping[str, Any],
    *,
    dtype: DtypeRule = "same",
    allow_missing: Choice,
    allow_unexpected: Choice,
    owners: Mapping[str, str] | None = None,
    elsewhere: Collection[str] = (),
    hollow: Collection[str] = (),
) -> Match:
    """Compare a state with what a model expects.

    Args:
        state: Leaves by FQN.
        wanted: The specs that the model expects, in its order, with equal ``tie`` for tied names; other entries, such
            as extra state, as they are.
        dtype: ``"same"``: other dtypes are a problem.
        allow_missing: Names that the state may lack.
        allow_unexpected: Names that it may have beyond.
        owners: The tied names of the state, each with the first name of the same tensor; as its leaves say by default.
        elsewhere: Names that the models of other ranks expect.
        hollow: Names that the state has without data, which is a problem of its own.

    >>> import torch
    >>> w, every = TensorSpec((2,), torch.int8), Choice.of("{_...}")
    >>> match_state({"a": torch.ones(2)}, {"a": w, "b": w}, allow_missing=every, allow_unexpected=every).missing
    ('b',)
    """
    if owners is None:
        owners = {alias: group[0] for group in ties(state) for alias in group[1:]}
    tensors = {name: spec for name, spec in wanted.items() if isinstance(spec, TensorSpec)}
    groups = {name: group for group in ties(tensors) for name in group}
    problems: list[Problem] = []
    loads: dict[str, str] = {}
    missing: list[str] = []
    untied: list[tuple[str, str]] = []
    for name, spec in wanted.items():
        group = groups.get(name, (name,))
        if name != group[0]:
            continue
        found = [other for other in group if other in state]
        if not found:
            missing += group
            continue
        loads[name] = found[0]
        first = owners.get(found[0], found[0])
        untied += [(other, found[0]) for other in found[1:] if owners.get(other, other) != first]
        for other in found:
            problems += _differences(other, state[other], spec, dtype)
    unexpected = [name for name in state if name not in wanted and name not in elsewhere]
    lacking = [name for name in missing if name not in hollow]
    problems += _absent(lacking, unexpected, wanted, allow_missing, is_empty=not state)
    problems += _surplus(unexpected, state, missing, allow_unexpected)
    loaded = [name for name in wanted if groups.get(name, (name,))[0] in loads]
    return Match(loads, tuple(loaded), tuple(missing), tuple(unexpected), tuple(untied), tuple(problems))


def _differences(name: str, leaf: Any, want: Any, dtype: DtypeRule) -> Iterable[Problem]:
    if not isinstance(want, TensorSpec):
        return
    try:
        spec = spec_of(leaf)
        if spec is not None and dtype == "target":
            check_cast(spec.dtype, want.dtype)
    except Unsupported as error:
        yield Problem("unsupported", f"{name!r}: {error}", (name,))
        return
    if spec is None:
        text = f"{name!r} is a {type(leaf).__name__} in the state, and a tensor, {want}, in the model."
        yield Problem("spec", text, (name,))
    elif spec.shape != want.shape:
        text = f"{name!r} has the shape {list(spec.shape)} in the state, and {list(want.shape)} in the model."
        yield Problem("spec", text, (name,))
    elif dtype == "same" and spec.dtype != want.dtype:
        yield Problem(
            "spec",
            f"{name!r} is {dtype_name(spec.dtype)} in the state, and {dtype_name(want.dtype)} in the model. Give "
            'dtype="target" to cast, or dtype="source" to keep the state\'s.',
            (name,),
        )


def excused(names: Collection[str], scope: Mapping[str, Any], allowed: Choice) -> set[str]:
    """Choose the names that are allowed; patterns that match none of them are no fault.

    >>> sorted(excused(["a", "b"], {"a": 1, "b": 2}, Choice.of("a", "z")))
    ['a']
    """
    if not names or not (allowed.patterns or allowed.predicates):
        return set()
    return set(allowed.pick(Scope({name: scope[name] for name in names}))[0])


def _absent(
    missing: list[str], unexpected: list[str], wanted: Mapping[str, Any], allowed: Choice, *, is_empty: bool
) -> Iterable[Problem]:
    fine = excused(missing, wanted, allowed)
    if left := [name for name in missing if name not in fine]:
        hint = _hint(left[0], unexpected)
        what = "the state, which is empty" if is_empty else "the state"
        others = " If another rank has them, give group= on all." if is_empty else ""
        remedy = f"Give allow_missing=... for what may be missing{_unmet(allowed, fine)}.{others}"
        text = f"missing in {what}: {listing(left)}{hint}. {remedy}"
        yield Problem("missing", text, tuple(left))


def _surplus(unexpected: list[str], state: Mapping[str, Any], missing: list[str], allowed: Choice) -> Iterable[Problem]:
    fine = excused(unexpected, state, allowed)
    if left := [name for name in unexpected if name not in fine]:
        hint = _hint(left[0], missing)
        found = _inner_remedy(left, state, missing) or _prefix_remedy(left, missing)
        remedy = found or f"drop() them, or give allow_unexpected=...{_unmet(allowed, fine)}."
        text = f"not expected by the model: {listing(left)}{hint}. {remedy}"
        yield Problem("unexpected", text, tuple(left))


def _inner_remedy(unexpected: list[str], state: Mapping[str, Any], missing: list[str]) -> str | None:
    """Say which entry is a state dict of its own that has what is missing, as in what trainers save."""
    lacking = set(missing)
    inner = [name for name in unexpected if is_mapping(state[name]) and not lacking.isdisjoint(state[name])]
    return f"{inner[0]!r} is a dict that has such names: give state[{inner[0]!r}]." if inner else None


def _unmet(allowed: Choice, fine: Collection[str]) -> str:
    """Say that patterns were given and win nothing, as ``*`` does, which is no wildcard here."""
    return "" if fine or not allowed.patterns else "; what is given matches none of them ('{_...}' matches every name)"


def _hint(name: str, others: list[str]) -> str:
    close = nearest(name, others) if others else None
    return f" (the nearest name to {name!r} is {close[0]!r})" if close else ""


def _prefix_remedy(unexpected: list[Any], missing: list[str]) -> str | None:
    """Say how names that have segments or a prefix too many are made those that are missing, if that is all."""
    lacking, names = set(missing), [str(name) for name in unexpected]
    if lacking and all(_unwrapped(name) in lacking for name in names):
        return "They have the segments of wrappers, which strip_wrappers() takes out."
    found = next((name for name in missing if names[0].endswith("." + name)), "")
    prefix = names[0].removesuffix(found)
    if found and all(name.startswith(prefix) and name.removeprefix(prefix) in lacking for name in names):
        return f"They have a prefix, which drop_prefix({prefix!r}) takes off."
    return None


def _unwrapped(name: str) -> str:
    *path, last = name.split(".")
    return ".".join([*[segment for segment in path if segment not in WRAPPERS], last])
