"""A rewrite shown without being run: step by step, which names become which, with shapes and dtypes.

What a step does is asked of the step, and what is wrong of ``check``; nothing is decided here.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from attrs import frozen

from fdsd.data.errors import FdsdError, plural
from fdsd.data.optim import OptimState
from fdsd.data.problem import Problem
from fdsd.data.spec import TensorSpec, spec_of
from fdsd.data.ties import tie_key
from fdsd.data.train import TrainState
from fdsd.pipeline.check import abstract, trace
from fdsd.pipeline.lines import Line, dropped_lines, made_lines
from fdsd.pipeline.rewrite import UNKNOWN, Assign, Scope
from fdsd.pipeline.step import Step
from fdsd.pipeline.untying import Untied, untied

__all__ = ["Explained", "Explanation", "Line", "Size", "explain"]

_WIDTH = 110
_MOST = 50
"""How many lines of changes, and a fifth of it how many problems, are written out for one step."""


class Size(NamedTuple):
    """How many names a state has, how many of them are unknown since their making fails, and its bytes.

    Tied tensors count once among the bytes. Of an optimizer's state alone, the names are its parameters.
    """

    names: int
    nbytes: int
    unknown: int = 0

    def __str__(self) -> str:
        unknown = f", {self.unknown:,} of them unknown" if self.unknown else ""
        return f"{self.names:,} {'name' if self.names == 1 else 'names'}{unknown}, {self.nbytes:,} bytes"


@frozen
class Explained:
    """One step: its number from 1, the call that makes it, what it changes, and what is wrong with it here.

    Attributes:
        unchanged: How many names are passed on as they are.
        gives: The class of state that comes out, if it is another one than went in.
        unties: Names of one tensor that become several tensors here.
    """

    number: int
    call: str
    lines: tuple[Line, ...]
    unchanged: int
    problems: tuple[Problem, ...] = ()
    gives: str | None = None
    unties: tuple[Untied, ...] = ()

    def text(self) -> Iterator[str]:
        """Word the step."""
        head = _wrap(f"{self.number}. {self.call}", "", "   ")
        yield from head[:4]
        if len(head) > 4:
            yield "   ..."
        yield f"   {self._counts()}"
        for line in self.lines[:_MOST]:
            yield from _wrap(str(line), "   ", "       ")
        if rest := sum([line.count for line in self.lines[_MOST:]]):
            yield f"   and {plural(rest, 'name')} more"
        for pair in self.unties[: _MOST // 5]:
            yield from _wrap(str(pair), "   ", "       ")
        if (rest := len(self.unties) - _MOST // 5) > 0:
            yield f"   unties names of {plural(rest, 'tensor')} more"
        for problem in self.problems[: _MOST // 5]:
            yield from _wrap(problem.message, "   ! ", "   ! ")
        if (rest := len(self.problems) - _MOST // 5) > 0:
            yield f"   ! and {plural(rest, 'problem')} more"

    def _counts(self) -> str:
        words = {
            "rename": "renamed",
            "make": "made",
            "alias": "tied",
            "check": "checked",
            "insert": "inserted",
            "drop": "dropped",
        }
        counts = {word: sum([line.count for line in self.lines if line.kind == kind]) for kind, word in words.items()}
        counts["unchanged"] = self.unchanged
        texts = [f"{count:,} {word}" for word, count in counts.items() if count]
        return f"gives {self.gives}" if self.gives else ", ".join(texts) or "no names"


@frozen(repr=False)
class Explanation:
    """What a pipeline does to a source, step by step; ``print`` shows it.

    Attributes:
        steps: The steps in order.
        before: The size of the source.
        after: The size of the result.
        optimizer: What there is of an optimizer before and after, in words.
    """

    steps: tuple[Explained, ...]
    before: Size
    after: Size
    optimizer: str | None = None

    @property
    def problems(self) -> tuple[Problem, ...]:
        """All that is wrong, in order."""
        return tuple([problem for step in self.steps for problem in step.problems])

    def __str__(self) -> str:
        lines = [line for step in self.steps for line in step.text()] or ["identity"]
        lines += [f"in:  {self.before}", f"out: {self.after}"]
        lines += _wrap(f"optimizer: {self.optimizer}", "", "    ") if self.optimizer else []
        return "\n".join(lines)

    __repr__ = __str__


def _wrap(text: str, first: str, rest: str) -> list[str]:
    """Break a text into lines, never within a shape, a name or before what an arrow points to."""
    glued = re.sub(r"\[[^\[\]]{0,60}\]", lambda found: found[0].replace(" ", "\N{NO-BREAK SPACE}"), text)
    glued = glued.replace("-> ", "->\N{NO-BREAK SPACE}").replace(" x ", "\N{NO-BREAK SPACE}x\N{NO-BREAK SPACE}")
    lines = textwrap.wrap(
        glued,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


def explain(steps: Iterable[Step], source: Any) -> Explanation:
    """Show what steps do to a source, without reading anything.

    A step that does not fit is explained as far as it goes, with its problems, and the next ones after it.

    Args:
        steps: The steps of a pipeline.
        source: A state of any kind, its specs, or a ``ModelSpec``.

    Returns:
        The explanation; ``str`` gives plain text, the same for the same names and specs.

    >>> import torch
    >>> from fdsd.transforms import concat
    >>> source = {f"{i}.{part}": torch.ones(2, 4) for i in range(3) for part in "qk"}
    >>> concat(["{i}.q", "{i}.k"], "{i}.qk", dim=0).explain(source)
    1. concat(['{i}.q', '{i}.k'], '{i}.qk', dim=0)
       3 made
       {0..2}.q, {0..2}.k -> {0..2}.qk: 2 x float32[2, 4] -> float32[4, 4]
    in:  6 names, 192 bytes
    out: 3 names, 192 bytes
    """
    first = state = abstract(source)
    explained: list[Explained] = []
    for number, step in enumerate(steps, start=1):
        given, problems = state, list[Problem]()
        assigns = _assigns(step, given)
        try:
            state = trace(step, given, problems)
        except FdsdError as error:
            problems.append(Problem.of(error))
        explained.append(_explained(number, step, assigns, given, state, problems))
    return Explanation(tuple(explained), _size(first), _size(state), _optimizer(first, state))


def _assigns(step: Step, state: Any) -> Sequence[Assign] | None:
    """Ask a step what it does to the names of a state; ``None`` if that fails, and ``trace`` tells why."""
    try:
        return () if step.converts else step.rewrite(Scope(_leaves(state))).assigns
    except FdsdError:
        return None


def _explained(
    number: int, step: Step, found: Sequence[Assign] | None, given: Any, state: Any, problems: Sequence[Problem]
) -> Explained:
    call = step.call_text()
    if step.converts:
        return Explained(number, call, (), 0, tuple(problems), gives=type(state).__name__)
    before, after, assigns = _leaves(given), _leaves(state), found or ()
    changes = [assign for assign in assigns if assign.build is not None or assign.sources != (assign.target,)]
    used = {name for assign in assigns for name in (*assign.sources, *assign.beside)}
    dropped = {name: leaf for name, leaf in before.items() if name not in used} if found is not None else {}
    lines = (*made_lines(changes, before, after), *dropped_lines(dropped))
    unties = untied(assigns, before, after)
    return Explained(number, call, lines, len(assigns) - len(changes), tuple(problems), unties=tuple(unties))


# -- states ------------------------------------------------------------------------------------------------


def _leaves(state: Any) -> Mapping[str, Any]:
    """Give the names that a step sees, with specs; of an optimizer alone, its parameters as its slots show them."""
    if isinstance(state, TrainState):
        return state.model
    if not isinstance(state, OptimState):
        names: Mapping[str, Any] = state
        return names
    found: dict[str, set[TensorSpec]] = {fqn: set() for fqn in state.fqns}
    for column in state.slots.values():
        for fqn, value in column.items():
            if (spec := spec_of(value)) is not None and spec.ndim:
                found.setdefault(fqn, set()).add(spec)
    return {fqn: next(iter(every)) if len(every) == 1 else UNKNOWN for fqn, every in found.items()}


def _size(state: Any) -> Size:
    columns = state.slots.values() if isinstance(state, OptimState) else [_leaves(state)]
    seen: set[Hashable] = set()
    nbytes = 0
    for column in columns:
        for leaf in column.values():
            if isinstance(leaf, TensorSpec) and ((key := tie_key(leaf)) is None or key not in seen):
                seen.add(key)
                nbytes += leaf.nbytes
    leaves = _leaves(state)
    unknown = 0 if isinstance(state, OptimState) else sum([leaf is UNKNOWN for leaf in leaves.values()])
    return Size(len(leaves), nbytes, unknown)


def _optimizer(first: Any, last: Any) -> str | None:
    texts = [_optimizer_text(state) for state in (first, last)]
    return " -> ".join(dict.fromkeys([text for text in texts if text])) or None


def _optimizer_text(state: Any) -> str | None:
    optim = state.optim if isinstance(state, TrainState) else state
    if not isinstance(optim, OptimState):
        return None
    slots = ", ".join([slot if isinstance(slot, str) else ".".join(map(str, slot)) for slot in optim.slots])
    count = f"{plural(len(optim.slots), 'slot')}{f' ({slots})' if slots else ''}"
    return f"{count}, {plural(len(optim.groups), 'group')} of {plural(len(optim.fqns), 'parameter')}"
