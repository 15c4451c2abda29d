"""A rewrite: what one step does to the tensors of one state, as data.

A step looks at names and specs (a ``Scope``) and says, for each name of the result, which names it is made of and
how. The same rewrite runs on tensors, on lazy tensors, on specs, and on every column of an optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

from attrs import frozen

from fdsd.algebra.apply import Applier
from fdsd.data.errors import listing
from fdsd.data.problem import Problem
from fdsd.data.spec import TensorSpec, VirtualTensor, is_exact, spec_of
from fdsd.data.statedict import Kind
from fdsd.data.ties import tie_key

__all__ = ["UNKNOWN", "Assign", "Build", "Rewrite", "Scope", "keep"]

Build = Callable[[Applier, Sequence[Any]], Any]
"""Makes a leaf of leaves with operations only."""


class _Unknown:
    """Stands for a tensor whose making failed, so that a check can go on to the next step."""

    def __repr__(self) -> str:
        return "<unknown>"


UNKNOWN = _Unknown()


class Scope:
    """The names that a step sees, with their specs, read only when asked for.

    Args:
        state: Leaves by FQN.
    """

    __slots__ = ("_state", "names")

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state = state
        self.names: list[str] = list(state)

    @property
    def kind(self) -> Kind:
        """How a step runs here: on tensors that are here, lazily, or on specs alone.

        The leaves tell it; a state without tensors remembers what it came from.
        """
        is_lazy = False
        for leaf in self._state.values():
            if isinstance(leaf, TensorSpec) or leaf is UNKNOWN:
                return "abstract"
            if is_exact(leaf):
                return "exact"
            is_lazy = is_lazy or isinstance(leaf, VirtualTensor)
        return "lazy" if is_lazy else getattr(self._state, "_kind", "exact")

    def __contains__(self, name: object) -> bool:
        return name in self._state

    def spec(self, name: str) -> TensorSpec | None:
        """Give the spec of a tensor; ``None`` for an object that is no tensor."""
        return spec_of(self._state[name])

    def leaf(self, name: str) -> Any:
        """Give the leaf itself, to see of which kind it is; its values are not for a step to read."""
        return self._state[name]

    def is_known(self, name: str) -> bool:
        """Whether the making of this tensor has not failed earlier in a check."""
        return self._state[name] is not UNKNOWN

    def tie(self, name: str) -> Hashable:
        """Give what is equal for names that hold the same tensor; ``None`` for what cannot be tied."""
        return tie_key(self._state[name])

    def aliases(self, names: Iterable[str]) -> list[str]:
        """List all names tied to one of these, themselves included, in order."""
        wanted = set(names)
        keys = {key for name in wanted if (key := self.tie(name)) is not None}
        return [name for name in self.names if name in wanted or self.tie(name) in keys]


@frozen
class Assign:
    """One name of the result.

    Attributes:
        target: The name.
        sources: The names that it is made of.
        build: How to make it; ``None`` passes the one source on as it is.
        alias: Whether it is a further name of a tensor that keeps its own name, not a tensor of its own.
        beside: Names whose leaves ``build`` gets after those of the sources, for a check of values only.
    """

    target: str
    sources: tuple[str, ...]
    build: Build | None = None
    alias: bool = False
    beside: tuple[str, ...] = ()


def keep(name: str) -> Assign:
    """Pass a leaf on under its own name."""
    return Assign(name, (name,))


@frozen
class Rewrite:
    """All names of the result in order, and what is wrong.

    >>> Rewrite.of([keep("a"), keep("a")]).problems[0].kind
    'collision'
    """

    assigns: tuple[Assign, ...]
    problems: tuple[Problem, ...] = ()

    @classmethod
    def of(cls, assigns: Iterable[Assign], problems: Iterable[Problem] = ()) -> Rewrite:
        """Collect assignments; two for one name are a problem, if none was reported for that name yet."""
        found: dict[str, Assign] = {}
        clashes: dict[str, list[str]] = {}
        for assign in assigns:
            first = found.setdefault(assign.target, assign)
            if first is not assign:
                clashes.setdefault(assign.target, [*first.sources]).extend(assign.sources)
        reported = list(problems)
        if "" in found:
            text = f"{listing(found[''].sources)} would have an empty name. Give it one."
            reported.append(Problem("bad target", text, found[""].sources))
        told = {name for problem in reported for name in problem.names}
        for target, sources in clashes.items():
            if not told & {target, *sources}:
                text = (
                    f"{len(sources)} tensors would be named {target!r}: {listing(sources)}. Drop or rename one first."
                )
                reported.append(Problem("collision", text, tuple(sources)))
        return cls(tuple(found.values()), tuple(reported))
