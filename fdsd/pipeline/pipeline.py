"""Pipelines: steps in order, as a value that runs, composes, inverts, compares and prints.

A ``Pipeline`` gives the same kind of state that it takes; a ``Conversion`` turns one kind into another. What a pipeline
can tell about itself (check, explain, why, coverage, locality, plan) is worked out in the modules beside this one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from attrs import field, frozen

from fdsd.data.errors import FdsdError, Unsupported
from fdsd.data.optim import OptimState
from fdsd.data.statedict import StateDict, require_mapping
from fdsd.data.train import TrainState
from fdsd.pipeline.lift import scope_of
from fdsd.pipeline.rewrite import Scope
from fdsd.pipeline.run import note_step, run_step
from fdsd.pipeline.step import Grade, Step

if TYPE_CHECKING:
    from fdsd.algebra.plan import Plan
    from fdsd.data.model import ModelSpec
    from fdsd.layout.layout import Layout
    from fdsd.pipeline.check import Report
    from fdsd.pipeline.coverage import Coverage
    from fdsd.pipeline.explain import Explanation
    from fdsd.pipeline.locality import Locality
    from fdsd.pipeline.why import Why

__all__ = ["Conversion", "Pipeline", "State", "identity", "pipe"]

State = StateDict[Any] | OptimState | TrainState
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")


def _to_steps(steps: Iterable[Step]) -> tuple[Step, ...]:
    made = tuple(steps)
    for step in made:
        if not isinstance(step, Step):
            raise Unsupported(f"A pipeline is made of steps, not of {type(step).__name__}. Compose pipelines with >>.")
    return made


@frozen(repr=False)
class _Steps:
    """What every sequence of steps can do."""

    steps: tuple[Step, ...] = field(default=(), converter=_to_steps)

    @property
    def grade(self) -> Grade:
        """How far it can be undone: exact, one-sided or none."""
        return Grade.worst([step.grade for step in self.steps])

    def _run(self, state: Any) -> Any:
        made: Any = state  # pyright: ignore[reportUnknownVariableType]
        if not isinstance(state, OptimState | TrainState | StateDict):
            made = StateDict(require_mapping(state, "a pipeline"))
        for number, step in enumerate(self.steps, start=1):
            try:
                made = run_step(step, made)
            except FdsdError as error:
                note_step(error, number, len(self.steps), step)
                raise
        return made

    def _inverted(self) -> tuple[Step, ...]:
        steps: list[Step] = []
        for number, step in reversed(list(enumerate(self.steps, start=1))):
            try:
                steps.extend(step.invert())
            except FdsdError as error:
                note_step(error, number, len(self.steps), step)
                raise
        return tuple(steps)

    def _bound(self, source: Any) -> tuple[Step, ...]:
        from fdsd.pipeline.check import abstract

        state = abstract(source)
        bound: list[Step] = []
        for number, step in enumerate(self.steps, start=1):
            try:
                here = [step] if step.converts else step.bind(_scope(state))
                for one in here:
                    state = run_step(one, state)
            except FdsdError as error:
                note_step(error, number, len(self.steps), step)
                raise
            bound.extend(here)
        return tuple(bound)

    def check(self, source: Any, expect: Mapping[str, Any] | ModelSpec | None = None) -> Report:
        """Find all problems at once, on specs alone: nothing is read.

        Args:
            source: The state to rewrite, or its specs.
            expect: What should come out: names with tensors or specs, or a ``ModelSpec``.

        Returns:
            A report: ``.ok``, ``.problems``, ``.raise_for_problems()``.
        """
        from fdsd.pipeline.check import check

        return check(self.steps, source, expect)

    def explain(self, source: Any) -> Explanation:
        """Show step by step which names become which, with shapes and dtypes; nothing is read."""
        from fdsd.pipeline.explain import explain

        return explain(self.steps, source)

    def why(self, source: Any, fqn: str, index: int | Iterable[int] = ()) -> Why:
        """Name the source elements that one element of the result is made of.

        Args:
            source: The state to rewrite, or its specs.
            fqn: A name of the result.
            index: The place of an element, one integer for each dim.
        """
        from fdsd.pipeline.why import why

        return why(self.steps, source, fqn, index)

    def coverage(self, source: Any) -> Coverage:
        """Tell which elements of the source are used once, more than once, or never."""
        from fdsd.pipeline.coverage import coverage

        return coverage(self.steps, source)

    def locality(
        self,
        layouts: Layout | Mapping[str, Any] | ModelSpec | TrainState,
        source: Any = None,
        *,
        target: Layout | Mapping[str, Layout] | ModelSpec | None = None,
    ) -> Locality:
        """Prove that ranks need nothing of each other, or name the steps and the bytes that would travel.

        Args:
            layouts: How the source's tensors lie: a ``Layout``, a table or a ``ModelSpec``, as in ``shard_with``; or a
                state of sharded leaves, which is the source too. What it does not mention lies as the source's leaves
                say, and plain tensors and specs are whole on every rank.
            source: The state to rewrite, or its specs; not needed where ``layouts`` has shapes.
            target: How the results are wanted. By default as ``shard_with``, ``reshard`` and ``gather`` in the pipeline
                say, else as the sources lie, dims following the operations.

        Returns:
            A report: ``.ok``, ``.moves``, ``.received``.
        """
        from fdsd.pipeline.locality import locality

        return locality(self.steps, layouts, source, target)

    def plan(self, source: Any, budget: int | str | None = None) -> Plan:
        """Say what reading the whole result will do: reads, copies, calls, and the peak of scratch memory.

        Args:
            source: The state to rewrite, or its specs.
            budget: Bytes for scratch, as a number or like ``"256MB"``.

        Raises:
            OverBudget: An operation needs its whole input and cannot fit, with the budget that it needs.
        """
        from fdsd.pipeline.planning import plan

        return plan(self.steps, source, budget)

    def __repr__(self) -> str:
        if not self.steps:
            return "identity"
        texts = [step.call_text() for step in self.steps]
        return texts[0] if len(texts) == 1 else "pipe(\n" + "".join([f"    {text},\n" for text in texts]) + ")"


def _scope(state: Any) -> Scope:
    if isinstance(state, OptimState):
        return scope_of(state)
    return Scope(state.model if isinstance(state, TrainState) else state)


class Pipeline(_Steps):
    """A function from a state to a state of the same kind: a state dict, an optimizer's state, or both.

    ``p(state)`` runs it, ``p >> q`` composes, ``~p`` inverts, ``==`` compares, ``repr`` can be pasted back.

    Laws: ``(f >> g) >> h == f >> (g >> h)``; ``identity >> f == f == f >> identity``;
    ``~(f >> g) == ~g >> ~f``.

    >>> identity({"a": 1})
    StateDict({
      'a': 1,
    })
    """

    __slots__ = ()

    @overload
    def __call__(self, state: OptimState) -> OptimState: ...
    @overload
    def __call__(self, state: TrainState) -> TrainState: ...
    @overload
    def __call__(self, state: Mapping[str, Any]) -> StateDict[Any]: ...
    def __call__(self, state: Any) -> Any:
        """Run the pipeline on a state; its inputs are never changed.

        Raises:
            FdsdError: What is wrong, with a note that names the step.
        """
        return self._run(state)

    @overload
    def __rshift__(self, other: Pipeline) -> Pipeline: ...
    @overload
    def __rshift__(self, other: Conversion[A, B]) -> Conversion[A, B]: ...
    def __rshift__(self, other: Any) -> Any:
        """Compose: first this pipeline, then the other."""
        if not isinstance(other, _Steps):
            return NotImplemented
        return _joined((*self.steps, *other.steps))

    def __invert__(self) -> Pipeline:
        """Give the pipeline that undoes this one.

        Raises:
            NotInvertible: Naming the step, and the argument that would help.
        """
        return Pipeline(self._inverted())

    def bind(self, source: Any) -> Pipeline:
        """Write the sizes, shapes and dtypes seen in a source into the steps, so that ``~`` needs no arguments.

        Args:
            source: The state that will be rewritten, or its specs.
        """
        return Pipeline(self._bound(source))


class Conversion(_Steps, Generic[A, B]):
    """A function from one kind of state to another, such as an optimizer's state to its flat form."""

    __slots__ = ()

    def __call__(self, state: A) -> B:
        """Run it on a state; its inputs are never changed."""
        made: B = self._run(state)
        return made

    @overload
    def __rshift__(self, other: Pipeline) -> Conversion[A, B]: ...
    @overload
    def __rshift__(self, other: Conversion[B, C]) -> Conversion[A, C]: ...
    def __rshift__(self, other: Any) -> Any:
        """Compose: first this, then the other."""
        if not isinstance(other, _Steps):
            return NotImplemented
        return _joined((*self.steps, *other.steps))

    def __invert__(self) -> Conversion[B, A]:
        """Give the conversion back."""
        return Conversion(self._inverted())

    def bind(self, source: A) -> Conversion[A, B]:
        """Write what its inverse needs, as seen in a source, into the steps."""
        return Conversion(self._bound(source))


def _joined(steps: tuple[Step, ...]) -> Any:
    if any(step.converts for step in steps):
        made: Conversion[Any, Any] = Conversion(steps)
        return made
    return Pipeline(steps)


identity = Pipeline()


def pipe(*pipelines: Pipeline) -> Pipeline:
    """Compose pipelines in order; of none, the identity.

    Law: ``pipe(f, g, h) == f >> g >> h``.

    >>> pipe() == identity
    True
    """
    for p in pipelines:
        if not isinstance(p, _Steps):
            raise Unsupported(f"pipe: {type(p).__name__} is no pipeline. Give what the verbs return.")
    made: Pipeline = _joined(tuple([step for p in pipelines for step in p.steps]))
    return made
