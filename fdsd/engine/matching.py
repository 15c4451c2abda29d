"""Which tensor of a state goes into which tensor of a model: names and specs compared, all differences found at once.

Pure: neither modules nor processes are known here, and no data is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from attrs import frozen

from fdsd.data.errors import SpecMismatch, Unsupported, listing
from fdsd.data.naming import nearest
from fdsd.data.problem import Problem
from fdsd.data.spec import TensorSpec, dtype_name, spec_of
from fdsd.data.statedict import StateDict
from fdsd.data.ties import tie_key, ties
from fdsd.pipeline.pipeline import Pipeline
from fdsd.pipeline.rewrite import Scope
from fdsd.transforms.which import Choice

__all__ = ["DtypeRule", "Match", "expected", "match_state"]

DtypeRule = Literal["same", "target", "source"]


@frozen
class Match:
    """What goes where.

    Attributes:
        loads: For each name of the model whose memory is written, the name in the state that it comes from; of tied
            names the first.
        missing: Names that the model expects and the state lacks, tied names of loaded ones aside.
        unexpected: Names of the state that the model does not expect.
        untied: Names that are tied in the model, and not in the state: they take the value of the first.
        problems: What has to stop a load.
    """

    loads: Mapping[str, str]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    untied: tuple[str, ...] = ()
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
    made = keep(specs)
    if not isinstance(made, StateDict):
        raise Unsupported(f"{verb}: the filter gives a {type(made).__name__}. Give one that chooses names.")
    chosen: StateDict[Any] = made
    if odd := [name for name, leaf in chosen.items() if name not in specs or leaf != specs[name]]:
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
) -> Match:
    """Compare a state with what a model expects.

    Args:
        state: Leaves by FQN.
        wanted: The specs that the model expects, in its order, with equal ``tie`` for tied names; other entries, such
            as extra state, as they are.
        dtype: ``"same"``: other dtypes are a problem.
        allow_missing: Names that the state may lack.
        allow_unexpected: Names that it may have beyond.

    >>> import torch
    >>> w, every = TensorSpec((2,), torch.int8), Choice.of("{_...}")
    >>> match_state({"a": torch.ones(2)}, {"a": w, "b": w}, allow_missing=every, allow_unexpected=every).missing
    ('b',)
    """
    problems: list[Problem] = []
    groups = {name: group for group in ties(wanted) for name in group}
    loads: dict[str, str] = {}
    missing: list[str] = []
    untied: list[str] = []
    for name, spec in wanted.items():
        group = groups.get(name, (name,))
        if name != group[0]:
            continue
        found = [other for other in group if other in state]
        if not found:
            missing += group
            continue
        loads[name] = found[0]
        first = tie_key(state[found[0]])
        untied += [other for other in found[1:] if tie_key(state[other]) != first]
        for other in found:
            problems += _differences(other, state[other], spec, dtype)
    unexpected = [name for name in state if name not in wanted]
    problems += _absent(missing, unexpected, wanted, allow_missing)
    problems += _surplus(unexpected, state, missing, allow_unexpected)
    return Match(loads, tuple(missing), tuple(unexpected), tuple(untied), tuple(problems))


def _differences(name: str, leaf: Any, want: Any, dtype: DtypeRule) -> Iterable[Problem]:
    spec = spec_of(leaf)
    if not isinstance(want, TensorSpec):
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


def _excused(names: list[str], scope: Mapping[str, Any], allowed: Choice) -> set[str]:
    if not names or not (allowed.patterns or allowed.predicates):
        return set()
    return set(allowed.pick(Scope({name: scope[name] for name in names}))[0])


def _absent(
    missing: list[str], unexpected: list[str], wanted: Mapping[str, Any], allowed: Choice
) -> Iterable[Problem]:
    excused = _excused(missing, wanted, allowed)
    if left := [name for name in missing if name not in excused]:
        hint = _hint(left[0], unexpected)
        text = f"missing in the state: {listing(left)}{hint}. Give allow_missing=... for what may be missing."
        yield Problem("missing", text, tuple(left))


def _surplus(
    unexpected: list[str], state: Mapping[str, Any], missing: list[str], allowed: Choice
) -> Iterable[Problem]:
    excused = _excused(unexpected, state, allowed)
    if left := [name for name in unexpected if name not in excused]:
        hint = _hint(left[0], missing)
        text = f"not expected by the model: {listing(left)}{hint}. drop() them, or give allow_unexpected=... ."
        yield Problem("unexpected", text, tuple(left))


def _hint(name: str, others: list[str]) -> str:
    close = nearest(name, others) if others else None
    return f" (the nearest name to {name!r} is {close[0]!r})" if close else ""
