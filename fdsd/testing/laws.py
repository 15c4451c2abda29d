"""The laws of pipelines, asserted for one pipeline on one state."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, cast

import attrs
import torch

from fdsd.algebra.apply import defer
from fdsd.data.errors import FdsdError, NotInvertible
from fdsd.data.optim import OptimState
from fdsd.data.spec import is_exact
from fdsd.data.train import TrainState
from fdsd.data.values import is_sequence
from fdsd.engine.materializing import materialize
from fdsd.pipeline.check import abstract
from fdsd.pipeline.pipeline import Conversion, Pipeline, identity
from fdsd.pipeline.step import Grade
from fdsd.testing.same import assert_same, same_tensors, tied_names
from fdsd.transforms.choose import Drop, FilterFrozen

__all__ = ["assert_laws", "assert_round_trip"]

AnyPipeline = Pipeline | Conversion[Any, Any]


def assert_round_trip(pipeline: AnyPipeline, state: Any) -> None:
    """Assert that a pipeline can be undone on a state, byte for byte.

    The pipeline is bound to the state first, so that sizes, shapes and dtypes need not be given. If it is exact then,
    ``(~p)(p(state))`` must be the state, and ``p((~p)(y))`` must be ``y`` for ``y = p(state)``; if it is one-sided,
    the latter, where names that it drops may be absent. The order of names is no matter: parts that stood apart come
    back together.

    Args:
        pipeline: The pipeline.
        state: A state that it fits.

    Raises:
        AssertionError: Something comes back as something else.
        NotInvertible: The pipeline has no inverse; it names the step.

    >>> import torch
    >>> from fdsd.transforms import concat
    >>> state = {"q": torch.tensor([1, 2]), "k": torch.tensor([3])}
    >>> assert_round_trip(concat(["q", "k"], "qk", dim=0), state)
    """
    bound: Any = pipeline.bind(state)
    back = ~bound
    there = bound(state)
    _hold("p.bind(state)(state) must be p(state)", there, pipeline(state), order=True)
    returned = back(there)
    if bound.grade is Grade.EXACT:
        _hold("(~p)(p(state)) must be the state", returned, state)
    _hold("p((~p)(y)) must be y, for y = p(state)", _lenient(bound)(returned), there)


def _lenient(pipeline: Any) -> Any:
    """Let names that a pipeline drops be absent, as they are when dropping was undone: ``~drop`` brings none back."""
    steps = [
        attrs.evolve(
            step, which=attrs.evolve(step.which, patterns=tuple([p.as_optional() for p in step.which.patterns]))
        )
        if isinstance(step, Drop | FilterFrozen)
        else step
        for step in pipeline.steps
    ]
    return type(pipeline)(steps)


def assert_laws(pipeline: AnyPipeline, state: Any) -> None:
    """Assert all laws that a pipeline must keep on a state.

    * Lazy: on deferred tensors it gives what it gives on tensors.
    * Abstract: on specs it gives the specs of what it gives on tensors; ``check`` finds nothing wrong.
    * Purity: nothing of the state changes.
    * Inverse: what its grade promises, once it is bound; see ``assert_round_trip``.
    * It composes with the identity, equals what its ``repr`` evaluates to, and pickles. (Where it holds lambdas or
      inner functions, it can do neither of the last two.)

    Args:
        pipeline: The pipeline.
        state: A state that it fits: a mapping, an ``OptimState`` or a ``TrainState``.

    Raises:
        AssertionError: A law is broken; the message says which, and shows the difference.

    >>> import torch
    >>> from fdsd.transforms import transpose
    >>> assert_laws(transpose("w"), {"w": torch.tensor([[1.0, 2.0, 3.0]])})
    """
    before = _snapshot(state)
    expected = _run(pipeline, state)
    _assert_lazy(pipeline, state, expected)
    _assert_abstract(pipeline, state, expected)
    _assert_inverse(pipeline, state)
    _assert_value(pipeline)
    _assert_unchanged(before, state)


def _run(pipeline: AnyPipeline, state: Any) -> Any:
    return cast("Any", pipeline)(state)


def _hold(law: str, actual: Any, expected: Any, **how: Any) -> None:
    try:
        assert_same(actual, expected, **{"tied": False, "nans_equal": True, **how})
    except AssertionError as error:
        raise AssertionError(f"{law}.\n{error}") from None


def _deferred(state: Any) -> Any:
    if isinstance(state, TrainState):
        optim = None if state.optim is None else _deferred(state.optim)
        return TrainState(defer(state.model), optim, state.extra)
    if isinstance(state, OptimState):
        return state.replace(slots={slot: defer(column) for slot, column in state.slots.items()})
    return defer(state)


def _assert_lazy(pipeline: AnyPipeline, state: Any, expected: Any) -> None:
    law = "materialize(p(defer(state))) must be p(state)"
    made = materialize(_run(pipeline, _deferred(state)))
    _hold(law, made, expected, order=True)
    if _is_plain(expected):
        _hold_ties(law, made, expected)


def _hold_ties(law: str, actual: Any, expected: Any) -> None:
    found, wanted = tied_names(actual), tied_names(expected)
    if found != wanted:
        odd, which = (found - wanted, "former") if found - wanted else (wanted - found, "latter")
        raise AssertionError(f"{law}, but only the {which} ties {', '.join(sorted(min(odd, key=sorted)))}.")


def _is_plain(state: Any) -> bool:
    return not isinstance(state, OptimState | TrainState)


def _assert_abstract(pipeline: AnyPipeline, state: Any, expected: Any) -> None:
    hollow = abstract(state)
    law = "p(specs(state)) must be specs(p(state))"
    made = _run(pipeline, hollow)
    _hold(law, made, abstract(expected), order=True)
    if _is_plain(expected):
        _hold_ties(law, made, expected)
    report = pipeline.check(state)
    if not report.ok:
        raise AssertionError(f"p.check(state) must find nothing wrong, as p(state) runs:\n{report}")


def _assert_inverse(pipeline: AnyPipeline, state: Any) -> None:
    try:
        bound: Any = pipeline.bind(state)
    except NotInvertible:  # exact in general, but on this state something would not come back
        return
    _assert_value(bound)
    if bound.bind(state) != bound:
        raise AssertionError(f"p.bind(state) must be bound already:\n{bound}\nbecomes\n{bound.bind(state)}")
    if bound.grade is not Grade.NONE:
        if bound.grade is Grade.EXACT or len(bound.steps) == 1 or _runs(~bound, bound(state)):
            assert_round_trip(pipeline, state)
        return
    try:
        back = ~bound
    except NotInvertible:
        return
    raise AssertionError(f"The grade is none, so ~p must raise NotInvertible; it gave\n{back}")


def _runs(back: AnyPipeline, state: Any) -> bool:
    """Tell whether an inverse runs: what one step left out, the inverse of a step before may need, and refuse."""
    try:
        back(state)
    except FdsdError:
        return False
    return True


# -- pipelines as values -------------------------------------------------------------------------------------------


def _assert_value(pipeline: AnyPipeline) -> None:
    if not (identity >> pipeline == pipeline == pipeline >> identity):
        raise AssertionError(f"identity >> p == p == p >> identity must hold for\n{pipeline}")
    functions = dict(_functions(pipeline))
    if any("<" in name for name in functions):  # lambdas and inner functions have no name to be found by
        return
    _equal("pickle.loads(pickle.dumps(p))", pickle.loads(pickle.dumps(pipeline)), pipeline)
    if not any(isinstance(part, OptimState) for part in _parts(pipeline)):  # it holds tensors, which have no text
        _equal("eval(repr(p))", _evaluated(repr(pipeline), functions), pipeline)


def _equal(text: str, made: object, pipeline: AnyPipeline) -> None:
    if made != pipeline:
        raise AssertionError(f"{text} must be p, but\n{made!r}\nis not\n{pipeline!r}")
    try:
        hashes = hash(made), hash(pipeline)
    except TypeError:  # a value in it has no hash
        return
    if hashes[0] != hashes[1]:
        raise AssertionError(f"{text} equals p, so it must have its hash:\n{pipeline!r}")


def _evaluated(text: str, functions: Mapping[str, Any]) -> Any:
    import re

    import fdsd
    import fdsd.layout

    names = {name: getattr(home, name) for home in (fdsd.layout, fdsd) for name in home.__all__}
    try:
        return eval(text, {**functions, **names, "torch": torch, "re": re})
    except Exception as error:
        raise AssertionError(f"repr(p) must be code that gives p, but {text}\nraises {error!r}") from error


def _functions(pipeline: AnyPipeline) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Give the functions in a pipeline, under the names that ``repr`` shows."""
    for part in _parts(pipeline):
        if callable(part) and not isinstance(part, type | Pipeline | Conversion):
            yield getattr(part, "__qualname__", "<unnamed>"), part


def _parts(value: Any) -> Iterator[Any]:
    for attribute in getattr(value, "__attrs_attrs__", ()):
        yield from _parts(getattr(value, attribute.name))
    if is_sequence(value):
        for item in value:
            yield from _parts(item)
    yield value


# -- purity --------------------------------------------------------------------------------------------------------


def _leaves(state: Any) -> list[tuple[Hashable, Any]]:
    if isinstance(state, TrainState):
        inner = [] if state.optim is None else _leaves(state.optim)
        return [*_leaves(state.model), *inner, *state.extra.items()]
    if isinstance(state, OptimState):
        columns = [((slot, fqn), leaf) for slot, column in state.slots.items() for fqn, leaf in column.items()]
        return [*columns, *[(g.fqns, tuple(g.options.items())) for g in state.groups], *state.extra.items()]
    return list(state.items())


def _snapshot(state: Any) -> list[tuple[Hashable, Any, torch.Tensor | None]]:
    return [(name, leaf, _copy(leaf)) for name, leaf in _leaves(state)]


def _copy(leaf: Any) -> torch.Tensor | None:
    return leaf.detach().clone() if is_exact(leaf) and leaf.layout is torch.strided else None


def _assert_unchanged(before: list[tuple[Hashable, Any, torch.Tensor | None]], state: Any) -> None:
    after = _leaves(state)
    if [name for name, _ in after] != [name for name, _, _ in before]:
        raise AssertionError("The pipeline changed the names of its input.")
    for (name, leaf, copy), (_, now) in zip(before, after, strict=True):
        is_other = leaf is not now and not is_sequence(now)
        if is_other or (copy is not None and not same_tensors(copy, leaf)):
            raise AssertionError(f"The pipeline changed {name!r} of its input.")
