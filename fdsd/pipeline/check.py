"""Finding all that is wrong with a pipeline on a source, at once, before anything is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from attrs import frozen

from fdsd.algebra.apply import opaque_specs
from fdsd.data.errors import FdsdError, Unsupported, listing, plural
from fdsd.data.model import ModelSpec
from fdsd.data.naming import nearest
from fdsd.data.optim import OptimState
from fdsd.data.problem import Problem
from fdsd.data.spec import dtype_name, spec_of
from fdsd.data.statedict import StateDict, require_mapping, specs
from fdsd.data.train import TrainState
from fdsd.pipeline.build import build_leaves
from fdsd.pipeline.lift import lift_beside
from fdsd.pipeline.rewrite import UNKNOWN, Scope
from fdsd.pipeline.run import run_step, short
from fdsd.pipeline.step import Step
from fdsd.pipeline.untying import Watch

__all__ = ["Finding", "Report", "abstract", "check", "trace"]


@frozen
class Finding:
    """One problem and where it arose: the number of the step from 1, or 0 for the comparison at the end."""

    step: int
    where: str
    problem: Problem

    def __str__(self) -> str:
        return f"{self.where}: {self.problem.message}"


@frozen(repr=False)
class Report:
    """All problems of a pipeline on a source. It has no truth value: ask ``.ok``.

    Attributes:
        findings: What is wrong.
        warnings: What runs, and may not be meant: names that were tied and are so no more.

    >>> Report(()).ok
    True
    """

    findings: tuple[Finding, ...]
    warnings: tuple[Finding, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.findings

    @property
    def problems(self) -> tuple[Problem, ...]:
        """The problems alone, in order."""
        return tuple([finding.problem for finding in self.findings])

    def raise_for_problems(self) -> None:
        """Raise one error with all problems, if there are any.

        Raises:
            FdsdError: Of the class that the first problem asks for.
        """
        if self.findings:
            raise self.problems[0].error(str(self))

    def __bool__(self) -> NoReturn:
        raise TypeError("A Report has no truth value; ask report.ok.")

    def __str__(self) -> str:
        kinds = (self.findings, "problem"), (self.warnings, "warning")
        texts = [[f"{plural(len(found), word)}:", *[f"  {one}" for one in found]] for found, word in kinds if found]
        return "\n".join([*(["no problems"] if self.ok else []), *[line for text in texts for line in text]])

    __repr__ = __str__


def abstract(source: Any) -> Any:
    """Give a state of specs in the place of any state; what is lazy is not read."""
    if isinstance(source, ModelSpec):
        return source.specs()
    if not isinstance(source, TrainState | OptimState):
        return _hollow(require_mapping(source, "a pipeline"))
    if isinstance(source, TrainState):
        return TrainState(_hollow(source.model), None if source.optim is None else abstract(source.optim), source.extra)
    return source.replace(slots={slot: _hollow(column) for slot, column in source.slots.items()})


def _hollow(state: Mapping[str, Any]) -> StateDict[Any]:
    """Give specs that are refused where the tensors would be."""
    made = specs(state)
    odd = opaque_specs(state)
    return made.replace(odd) if odd else made


def check(steps: Iterable[Step], source: Any, expect: Mapping[str, Any] | ModelSpec | None) -> Report:
    """Run the steps on specs, collecting every problem; see ``Pipeline.check``."""
    findings: list[Finding] = []
    watch = Watch()
    state = abstract(source)
    for number, step in enumerate(steps, start=1):
        problems: list[Problem] = []
        given, state = state, trace(step, state, problems)
        where = f"step {number}, {short(step.call_text(), 60)}"
        findings.extend([Finding(number, where, problem) for problem in problems])
        if not problems and not step.converts and not isinstance(given, OptimState):
            watch.step((number, where), step, _model_of(given), _model_of(state))
    if expect is not None:
        problems = list(_compare(_model_of(state), _model_of(abstract(expect)), blurred=bool(findings)))
        findings.extend([Finding(0, "expected", problem) for problem in problems])
    return Report(tuple(findings), tuple([Finding(*where, problem) for where, problem in watch.warnings()]))


def _model_of(state: Any) -> Mapping[str, Any]:
    """Give the names and specs that are compared."""
    if isinstance(state, TrainState):
        return state.model
    if isinstance(state, OptimState):
        raise Unsupported("check: an OptimState cannot be compared; give expect= names with tensors or specs.")
    return require_mapping(state, "check")


def trace(step: Step, state: Any, problems: list[Problem]) -> Any:
    """Run one step on specs as far as it goes; what fails is a problem, and unknown from there on."""
    if step.converts or isinstance(state, OptimState):
        try:
            return run_step(step, state)
        except FdsdError as error:
            problems.append(Problem.of(error))
            return state
    if isinstance(state, TrainState):
        rewrite = step.rewrite(Scope(state.model))
        optim = state.optim
        if optim is not None:
            optim = lift_beside(step, rewrite, state.model, optim, problems)
        return TrainState(trace(step, state.model, problems), optim, state.extra)
    rewrite = step.rewrite(Scope(state))
    problems.extend(rewrite.problems)
    return StateDict.trusted(build_leaves(rewrite, state, problems), kind="abstract")


def _compare(found: Mapping[str, Any], expected: Mapping[str, Any], *, blurred: bool) -> Iterable[Problem]:
    missing = [name for name in expected if name not in found]
    extra = [name for name in found if name not in expected]
    if missing:
        yield Problem(
            "missing", f"{plural(len(missing), 'name')} missing: {_with_hints(missing, extra)}.", tuple(missing)
        )
    if extra:
        yield Problem(
            "unexpected", f"{plural(len(extra), 'name')} unexpected: {_with_hints(extra, missing)}.", tuple(extra)
        )
    for name, want in expected.items():
        have = found.get(name)
        if name not in found or (blurred and have is UNKNOWN):
            continue
        a, b = spec_of(have), spec_of(want)
        if (a is None) != (b is None):
            yield Problem(
                "spec", f"{name!r} is {a or type(have).__name__}, expected {b or type(want).__name__}.", (name,)
            )
        elif a is not None and b is not None and a.shape != b.shape:
            yield Problem("spec", f"{name!r} has shape {a.shape}, expected {b.shape}.", (name,))
        elif a is not None and b is not None and a.dtype != b.dtype:
            text = f"{name!r} has dtype {dtype_name(a.dtype)}, expected {dtype_name(b.dtype)}. Use cast()."
            yield Problem("spec", text, (name,))


def _with_hints(names: list[str], others: list[str]) -> str:
    """List names; where few are listed, with the nearest name on the other side."""
    hints = {name: near[0] for name in sorted(names)[:10] if (near := nearest(name, others))}
    text = listing(names)
    for name, hint in hints.items():
        text = text.replace(repr(name), f"{name!r} (there is {hint!r})", 1)
    return text
