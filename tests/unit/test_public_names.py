"""The public names with their signatures, against a golden file: a change of the contract is seen in review.

``FDSD_UPDATE_GOLDEN=1`` writes the file anew.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import fdsd
import fdsd.errors
import fdsd.testing
from fdsd.testing import assert_golden

GOLDEN = Path(__file__).parents[1] / "golden" / "public_names.txt"


class Text(str):
    """An annotation that is shown as it was written."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def signature(value: Any) -> str:
    if isinstance(value, type) and issubclass(value, enum.Enum):
        return ""  # how a member is looked up differs between versions of Python
    found = inspect.signature(value)
    parameters = [one.replace(annotation=shown(one.annotation)) for one in found.parameters.values()]
    return str(found.replace(parameters=parameters, return_annotation=shown(found.return_annotation)))


def shown(annotation: Any) -> Any:
    return Text(annotation) if isinstance(annotation, str) else annotation


def members(cls: type[Any]) -> Iterator[str]:
    """The public methods and properties that a class defines, its bases in fdsd included."""
    seen: set[str] = set()
    for base in cls.__mro__:
        if not base.__module__.startswith("fdsd"):
            continue
        for name, value in vars(base).items():
            public = not name.startswith("_") and name not in seen
            seen.add(name)
            if not public:
                continue
            if isinstance(value, classmethod | staticmethod):
                yield f"    .{name}{signature(getattr(cls, name))}"
            elif inspect.isfunction(value):
                yield f"    .{name}{signature(value)}"
            else:
                yield f"    .{name}"


def lines(module: ModuleType, names: list[str]) -> Iterator[str]:
    for name in sorted(names):
        value = getattr(module, name)
        if inspect.isclass(value) and issubclass(value, BaseException):
            bases = ", ".join(base.__name__ for base in value.__bases__)
            yield f"{module.__name__}.{name}({bases})"
        elif inspect.isclass(value):
            yield f"{module.__name__}.{name}{signature(value)}"
            yield from sorted(members(value))
        elif callable(value) and not isinstance(value, fdsd.Pipeline):
            yield f"{module.__name__}.{name}{signature(value)}"
        else:
            yield f"{module.__name__}.{name}"


def test_names_and_signatures() -> None:
    text = [
        *lines(fdsd, [*fdsd.__all__, "open"]),
        *lines(fdsd.errors, fdsd.errors.__all__),
        *lines(fdsd.testing, fdsd.testing.__all__),
    ]
    assert_golden("\n".join(text), GOLDEN)


def test_all_is_what_is_there() -> None:
    for module in (fdsd, fdsd.errors, fdsd.testing):
        assert len(set(module.__all__)) == len(module.__all__)
        assert all(hasattr(module, name) for name in module.__all__)


def test_open_would_shadow_the_builtin() -> None:
    assert "open" not in fdsd.__all__ and callable(fdsd.open)
    names: dict[str, Any] = {}
    exec("from fdsd import *", names)
    assert names.get("open", open) is open


def test_every_public_name_is_documented() -> None:
    for module in (fdsd, fdsd.errors, fdsd.testing):
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isclass(value) or inspect.isfunction(value):
                assert inspect.getdoc(value), f"{module.__name__}.{name}"


def test_public_functions_have_an_example() -> None:
    for module in (fdsd, fdsd.testing):
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isfunction(value):
                assert ">>>" in (inspect.getdoc(value) or ""), f"{module.__name__}.{name}"


def test_errors_are_of_the_family_and_of_a_builtin() -> None:
    for name in fdsd.errors.__all__:
        error = getattr(fdsd.errors, name)
        assert issubclass(error, fdsd.errors.FdsdError)
        if error is not fdsd.errors.FdsdError:
            builtin = (ValueError, KeyError, TypeError, RuntimeError, OSError)
            assert issubclass(error, builtin)
        assert str(error("one 'text'")) == "one 'text'"
