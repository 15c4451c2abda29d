"""The base of all steps: a frozen value that says what it does to names and specs, and how to undo it.

The verbs that users compose are steps; they live in ``transforms``. Nothing here knows any of them.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, ClassVar, NoReturn

from fdsd.data.errors import NotInvertible
from fdsd.pipeline.rewrite import Rewrite, Scope

__all__ = ["Grade", "Step"]


class Grade(str, Enum):
    """How far a step can be undone.

    ``EXACT``: there is an inverse both ways. ``ONE_SIDED``: undoing and doing again gives the same.
    ``NONE``: there is no inverse, or one more argument is needed for it.
    """

    EXACT = "exact"
    ONE_SIDED = "one-sided"
    NONE = "none"

    def __str__(self) -> str:
        return self.value

    @staticmethod
    def worst(grades: list[Grade]) -> Grade:
        """The grade of steps one after the other."""
        order = [Grade.EXACT, Grade.ONE_SIDED, Grade.NONE]
        return max(grades, key=order.index, default=Grade.EXACT)


class Step:
    """One step of a pipeline. Subclasses are attrs-frozen.

    Attributes:
        verb: The public name of the function that makes it.
        computes: Why it cannot be lifted to an optimizer's moments; ``None`` for a structural step.
        checks_first: Whether its shapes can be checked on specs before it runs on tensors.
        leafwise: Whether it treats every leaf by itself, whatever its shape: an optimizer's scalars, and slots of
            other shapes than their parameters, are treated too.
        gathers: Whether it makes tensors that lie over ranks whole on all of them.
    """

    __slots__ = ()

    verb: ClassVar[str]
    computes: ClassVar[str | None] = None
    checks_first: ClassVar[bool] = True
    leafwise: ClassVar[bool] = False
    gathers: ClassVar[bool] = False

    @property
    def grade(self) -> Grade:
        """How far this step can be undone, as it stands."""
        raise NotImplementedError

    def rewrite(self, scope: Scope) -> Rewrite:
        """Say what this step does to the names in ``scope``, and all that is wrong with it there."""
        raise NotImplementedError

    def apply(self, state: Any) -> Any:
        """Run a step that turns one kind of state into another (``converts``)."""
        raise NotImplementedError

    @property
    def converts(self) -> bool:
        """Whether this step turns one kind of state into another, instead of rewriting names and tensors."""
        return False

    def invert(self) -> tuple[Step, ...]:
        """Give the steps that undo this one.

        Raises:
            NotInvertible: Naming the argument that would help, if one would.
        """
        raise NotImplementedError

    def bind(self, scope: Scope) -> tuple[Step, ...]:
        """Write into the step the sizes, shapes and dtypes that its inverse needs, as seen in ``scope``."""
        return (self,)

    def call_text(self) -> str:
        """Give the source text of the call that makes this step."""
        raise NotImplementedError

    def refuse_inverse(self, remedy: str) -> NoReturn:
        """Raise for a step that has no inverse."""
        raise NotInvertible(f"~{self.call_text()}: {remedy}")
