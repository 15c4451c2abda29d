"""What ranks say to each other, with who asks for what: ranks that are out of step are told so, all of them.

Every agreement of the engine goes through here. Ranks that go on after one that asks for something else would take
its answers for their own, and messages of different sizes end a process inside of gloo.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import frozen

from fdsd.data.errors import RankDisagreement, listing
from fdsd.data.protocols import World
from fdsd.data.values import is_sequence

__all__ = ["Step", "Watch", "ask", "leave", "number_for", "settle_number", "told_ranks"]

_Ranks = tuple[int, tuple[int, ...]]
_BREAKS: dict[_Ranks, int] = {}
_NUMBERS: dict[_Ranks, int] = {}
_LEFT: dict[_Ranks, list[Callable[[], None]]] = {}


def ask(world: World, what: str, said: Any, cause: BaseException | None = None) -> list[Any]:
    """Give what each rank says; all have to ask for the same. Collective.

    Args:
        world: The ranks.
        what: What is asked for: the function of the user, and what has to be equal on all ranks.
        said: What this rank says.
        cause: What went wrong here before, if anything did.

    Raises:
        RankDisagreement: The ranks ask for different things; on all of them.

    >>> from fdsd.comms.alone import Alone
    >>> ask(Alone(), "counting", 3)
    [3]
    """
    key = world.rank, tuple(world.ranks)
    while left := _LEFT.get(key):
        left.pop()()
    told = world.agree((what, said))
    asked: dict[str, list[int]] = {}
    for rank, one in zip(world.ranks, told, strict=True):
        asked.setdefault(_asked(one), []).append(rank)
    if list(asked) == [what]:
        return [one[1] for one in told]
    _BREAKS[key] = _BREAKS.get(key, 0) + 1
    shown = "; ".join([f"{told_ranks(some)}: {name}" for name, some in list(asked.items())[:10]])
    rest = f"; and {len(asked) - 10} more" if len(asked) > 10 else ""
    raise RankDisagreement(
        f"The ranks of a group ask for different things at the same time ({shown}{rest}). All have to make the same "
        "calls in the same order; of two streams that are gone through side by side, each in full before the other."
    ) from cause


def _asked(told: Any) -> str:
    """Say what a rank asks for, if it is one that speaks as we do."""
    return told[0] if is_sequence(told) and len(told) == 2 and isinstance(told[0], str) else "something else"


@frozen
class Step:
    """A point in what the ranks of a group do together.

    Once they were out of step, nothing that was begun before goes on: no two of them are at the same point of it.
    """

    key: _Ranks
    breaks: int

    @classmethod
    def of(cls, world: World) -> Step:
        """Give the present one of the ranks of a group."""
        key = world.rank, tuple(world.ranks)
        return cls(key, _BREAKS.get(key, 0))

    @property
    def is_past(self) -> bool:
        """Whether the ranks were out of step since.

        >>> from fdsd.comms.alone import Alone
        >>> Step.of(Alone()).is_past
        False
        """
        return _BREAKS.get(self.key, 0) != self.breaks

    def check(self, what: str) -> None:
        """Raise if it is past."""
        if self.is_past:
            raise RankDisagreement(f"{what}: it ended when the ranks asked for different things. Begin it again.")


def number_for(world: World) -> int:
    """Propose a number for what is begun together; the largest that any rank proposes counts.

    >>> from fdsd.comms.alone import Alone
    >>> number_for(Alone(77))
    1
    """
    return _NUMBERS.get((world.rank, tuple(world.ranks)), 0) + 1


def settle_number(world: World, number: int) -> None:
    """Note the number that was agreed on: it is given once."""
    _NUMBERS[world.rank, tuple(world.ranks)] = number


# -- what is left half way ---------------------------------------------------------------------------------------------


class Watch:
    """Knows, while it is open, whether the garbage collector runs on this thread, which it may at any line of any code.

    >>> watch = Watch()
    >>> with watch:
    ...     watch.sees_collector
    False
    """

    def __init__(self) -> None:
        self._running: set[int] = set()

    def open(self) -> Watch:
        """Begin to look out."""
        gc.callbacks.append(self._note)
        return self

    def __enter__(self) -> Watch:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the collector alone again; once is enough."""
        if self._note in gc.callbacks:
            gc.callbacks.remove(self._note)

    def _note(self, phase: str, info: Mapping[str, int]) -> None:
        (self._running.add if phase == "start" else self._running.discard)(threading.get_ident())

    @property
    def sees_collector(self) -> bool:
        """Whether the collector runs on this thread."""
        return threading.get_ident() in self._running


def leave(world: World, watch: Watch, action: Callable[[], None]) -> None:
    """Do what tells the others that something is left: at once, or before the next that this rank says to them.

    The garbage collector runs at other points on each rank, and nothing collective may begin there.

    >>> from fdsd.comms.alone import Alone
    >>> leave(Alone(), Watch(), lambda: None)
    """
    if watch.sees_collector:
        _LEFT.setdefault((world.rank, tuple(world.ranks)), []).append(action)
    else:
        action()


def told_ranks(ranks: Sequence[int]) -> str:
    """Name ranks in a sentence.

    >>> told_ranks([1]), told_ranks([0, 2])
    ('rank 1', 'ranks 0, 2')
    """
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {listing(ranks)}"
