"""Finding a pipeline by ``module:name`` or ``file.py:name``, with errors that name the user's file and line.

This runs the user's code, as ``python file.py`` would. Nothing here runs a pipeline.
"""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn, TypeGuard

from fdsd.cli.places import place
from fdsd.data.errors import FdsdError, listing
from fdsd.data.naming import nearest

if TYPE_CHECKING:
    from fdsd.pipeline.pipeline import Conversion, Pipeline

__all__ = ["BadReference", "load_pipeline"]

_FORM = "A pipeline is named by module:name or file.py:name"


class BadReference(FdsdError, ValueError):
    """What names a pipeline on the command line leads to none."""


def load_pipeline(reference: str) -> Pipeline | Conversion[Any, Any]:
    """Load a pipeline.

    Args:
        reference: ``module:name`` or ``file.py:name``. The name is that of a pipeline, or of a function without
            arguments that gives one; it may have dots.

    Raises:
        BadReference: There is no such file, module or name; the code fails, with its file and line; or what is
            found is no pipeline.

    >>> load_pipeline("fdsd:identity")
    identity
    """
    where, colon, name = reference.rpartition(":")
    if not colon and reference.endswith(".py"):
        where, name = reference, ""
    if not where or (colon and not name):
        raise BadReference(f"{reference!r} names no pipeline. {_FORM}.")
    is_file = where.endswith(".py") or os.sep in where
    module = _load_file(where) if is_file else _load_module(where)
    if not name:
        raise BadReference(f"{reference!r} names no pipeline. Write one of: {_offers(where, module)}.")
    return _called(reference, _find(where, module, name), module)


def _load_file(path: str) -> ModuleType:
    """Run a file as a module of its own; no bytecode is kept, and none that is out of date is used."""
    if not path.endswith(".py"):
        raise BadReference(f"{path!r} is no Python file. {_FORM}.")
    try:
        with open(path, "rb") as file:
            text = file.read()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise BadReference(f"{path} could not be read: {why}. {_FORM}.") from error
    name = os.path.basename(path).removesuffix(".py")
    # a name that no import can meet, so that the file shadows nothing
    module = ModuleType(f"<{name}>")
    module.__file__ = os.path.abspath(path)
    sys.modules[module.__name__] = module
    _search(os.path.dirname(module.__file__))
    try:
        exec(compile(text, module.__file__, "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        _refuse(path, error, module.__file__)
    return module


def _load_module(name: str) -> ModuleType:
    _search(os.getcwd())
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{name}.".startswith(f"{missing}."):
            hint = f"If you mean a file, write {name}.py:name" if "." not in name else "Is it installed"
            raise BadReference(f"there is no module {missing!r}. {hint}.") from error
        _refuse(f"module {name}", error, None)


def _search(folder: str) -> None:
    """Let modules be found in a folder as well, after all others, so that none is shadowed."""
    if folder not in sys.path:
        sys.path.append(folder)


def _find(where: str, module: ModuleType, name: str) -> Any:
    found: Any = module
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            close = nearest(name, [known for known in vars(module) if not known.startswith("__")])
            hint = f"the nearest is {close[0]!r}" if close else f"there are: {_offers(where, module)}"
            raise BadReference(f"{where} has no {name!r}; {hint}.") from None
    return found


def _offers(where: str, module: ModuleType) -> str:
    from fdsd.pipeline.pipeline import identity

    made = [name for name, value in vars(module).items() if _is_pipeline(value) and value is not identity]
    return listing([f"{where}:{name}" for name in made], sort=False) if made else "none, it makes no pipeline"


def _is_pipeline(value: object) -> TypeGuard[Pipeline | Conversion[Any, Any]]:
    from fdsd.pipeline.pipeline import Conversion, Pipeline

    return isinstance(value, Pipeline | Conversion)


def _called(reference: str, found: Any, module: ModuleType) -> Pipeline | Conversion[Any, Any]:
    """Give the pipeline, or what the function gives."""
    made, gave = found, "is"
    if callable(found) and not _is_pipeline(found):
        try:
            made, gave = found(), "gave"
        except (Exception, SystemExit) as error:
            _refuse(reference, error, getattr(module, "__file__", None))
    if not _is_pipeline(made):
        remedy = "Name a pipeline, or a function without arguments that gives one"
        raise BadReference(f"{reference} {gave} {_kind(made)}, no pipeline. {remedy}.")
    return made


def _kind(value: object) -> str:
    return "None" if value is None else f"an object of class {type(value).__name__}"


def _refuse(what: str, error: BaseException, file: str | None) -> NoReturn:
    """Say what the user's code raised, and at which line of it."""
    if isinstance(error, SyntaxError) and error.filename:
        said, where = f"{type(error).__name__}: {error.msg}", f"{error.filename}, line {error.lineno}"
    else:
        text = str(error)
        said = text if isinstance(error, FdsdError) and text else f"{type(error).__name__}: {text}".rstrip(": ")
        where = place(error, file)
    raise BadReference(f"{what} could not be loaded: {said.rstrip('.')} (at {where}).") from error
