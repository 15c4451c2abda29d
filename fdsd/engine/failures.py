"""An error of one rank as the same error of all: how it travels, and how it is worded."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

import fdsd.data.errors as errors
from fdsd.data.errors import FdsdError
from fdsd.engine.asking import told_ranks

__all__ = ["Failure", "RankFailed", "SystemFailed", "failure_of", "raise_if_failed", "text_of"]


class RankFailed(FdsdError, RuntimeError):
    """A rank could not do its part of what ranks do together: its own function, or a source, raised."""


class SystemFailed(RankFailed, OSError):
    """It raised an error of the operating system, which need not be the disk's: a function's own timeout, say."""


_KINDS: dict[str, type[FdsdError]] = {
    **{name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, FdsdError)},
    "RankFailed": RankFailed,
    "SystemFailed": SystemFailed,
}


@frozen
class Failure:
    """What went wrong on a rank, in a form that travels.

    Attributes:
        kind: The name of the class of errors that all ranks raise.
        text: What is said.
    """

    kind: str
    text: str


def failure_of(error: BaseException, about: str = "") -> Failure:
    """Word an error.

    Args:
        error: What was raised.
        about: What it is about, for what no error of ours says.

    >>> failure_of(ValueError("no"), "'w'")
    Failure(kind='RankFailed', text="'w': ValueError: no")
    """
    lead = f"{about}: " if about else ""
    notes = "".join([f" ({text_of(note)})" for note in getattr(error, "__notes__", ())])
    if isinstance(error, FdsdError):
        kinds = [kind.__name__ for kind in type(error).__mro__ if _KINDS.get(kind.__name__) is kind]
        return Failure(kinds[0], f"{lead}{text_of(error)}{notes}")
    kind = "SystemFailed" if isinstance(error, OSError) else "RankFailed"
    return Failure(kind, f"{lead}{type(error).__name__}: {text_of(error)}{notes}")


def text_of(error: object) -> str:
    """Give what an error says, whatever its class does when it is asked: the other ranks wait for a word.

    >>> text_of(ValueError("no"))
    'no'
    """
    try:
        return str(error)
    except Exception as found:
        return f"<its text cannot be had: {type(found).__name__}>"


def raise_if_failed(failures: Sequence[Failure | None], ranks: Sequence[int], mine: BaseException | None) -> None:
    """Raise the same error on all ranks, if any of them failed.

    Args:
        failures: What went wrong on each rank.
        ranks: The ranks.
        mine: What was raised on this one, which becomes the cause.

    Raises:
        FdsdError: Of the class that the first failure names.
        BaseException: On the rank that was interrupted, or told to end, just that.

    >>> raise_if_failed([None, Failure("SpecMismatch", "no")], [0, 1], None)
    Traceback (most recent call last):
        ...
    fdsd.data.errors.SpecMismatch: rank 1: no
    """
    told: dict[Failure, list[int]] = {}
    for rank, failure in zip(ranks, failures, strict=True):
        if failure is not None:
            told.setdefault(failure, []).append(rank)
    if not told:
        return
    first = next(iter(told))
    if told[first] == list(ranks):  # all agree on what is wrong
        text = first.text
    else:
        shown = [f"{told_ranks(some)}: {failure.text}" for failure, some in list(told.items())[:10]]
        text = "; ".join(shown) + (f"; and {len(told) - 10} more" if len(told) > 10 else "")
    if mine is not None and not isinstance(mine, Exception):
        raise mine
    raise _KINDS[first.kind](text) from mine
