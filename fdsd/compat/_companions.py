"""Two nested state dicts of one structure: whether they are alike, and copying the tensors of one into the other."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from fdsd.comms.kinds import misfit, parts_of, spec_of_kind
from fdsd.compat._nested import Path, mapped, named, pairs_of
from fdsd.data.errors import FdsdError, SpecMismatch
from fdsd.engine.copying import copy_pairs, prepared

__all__ = ["CompanionMismatch", "are_alike", "companions", "copied"]

_T = TypeVar("_T")


class CompanionMismatch(FdsdError):
    """Two state dicts are built in different ways."""


def companions(tree: Any, companion: Any) -> dict[Path, tuple[Any, Any]]:
    """Put two state dicts side by side.

    Returns:
        For each path of the first one its leaf and that of the second one; for a tensor that is a tensor.

    Raises:
        CompanionMismatch: The structures differ; all differences are named.

    >>> companions({"lr": 0.1}, {"lr": 0.2})
    {('lr',): (0.1, 0.2)}
    """
    pairs = pairs_of(tree, companion)
    problems = [
        *pairs.problems,
        *[
            f"{named(path)!r} is a tensor against a {type(b).__name__}"
            for path, (a, b) in pairs.leaves.items()
            if isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor)
        ],
    ]
    if problems:
        rest = f"; and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise CompanionMismatch(f"The state dicts are built in different ways: {'; '.join(problems[:10])}{rest}.")
    return pairs.leaves


def copied(tree: _T, companion: Any, non_blocking: bool) -> _T:
    """Copy the tensors of a state dict into those of another one; all is checked first.

    Returns:
        The first one, with the tensors of the second one.

    Raises:
        CompanionMismatch: The structures differ.
        SpecMismatch: Shapes or layouts differ.

    >>> copied({"w": torch.ones(2)}, {"w": torch.zeros(2)}, False)
    {'w': tensor([1., 1.])}
    """
    pairs = companions(tree, companion)
    tensors = {path: pair for path, pair in pairs.items() if isinstance(pair[0], torch.Tensor)}
    wrong = {named(path): why for path, pair in tensors.items() if (why := misfit(*pair)) is not None}
    if wrong:
        told = "; ".join([f"{name!r}: {wrong[name]}" for name in sorted(wrong)[:10]])
        rest = f"; and {len(wrong) - 10} more" if len(wrong) > 10 else ""
        raise SpecMismatch(f"Tensors that cannot be copied, and none has been: {told}{rest}.")
    parts = [pair for a, b in tensors.values() for pair in zip(parts_of(a), parts_of(b), strict=True)]
    moves = prepared(parts)
    across = [(a, b) for a, b in moves if non_blocking and a.device != b.device]
    with torch.no_grad():
        for source, target in across:
            target.copy_(source, non_blocking=True)
        copy_pairs([pair for pair in moves if not non_blocking or pair[0].device == pair[1].device])
    made: _T = mapped(tree, lambda path, leaf: pairs[path][1] if path in tensors else leaf)
    return made


def are_alike(tree: Any, companion: Any) -> bool:
    """Tell whether two state dicts have the same structure, and tensors of the same shapes, dtypes and layouts.

    >>> are_alike({"w": torch.ones(2), "lr": 1}, {"w": torch.zeros(2), "lr": 2})
    True
    """
    pairs = pairs_of(tree, companion)
    return not pairs.problems and all(_is_like(a, b) for a, b in pairs.leaves.values())


def _is_like(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) == isinstance(b, torch.Tensor)
    return misfit(a, b) is None and spec_of_kind(a) == spec_of_kind(b)
