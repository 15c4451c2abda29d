"""What ``import fdsd`` must not load, and that names which are imported late are all there.

What an import costs is measured by ``tests/bench``.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

import fdsd

# torch's slow parts, and what only an extra or a subcommand needs
HEAVY = (
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "hypothesis",
    "rich",
    "transformers",
)

LOADED = """
import sys
import torch
before = set(sys.modules)
import fdsd
print(*sorted(set(sys.modules) - before), sep="\\n")
print("then")
from fdsd import *
print(*sorted(set(sys.modules) - before), sep="\\n")
"""

USES = """
import gc
import fdsd
assert fdsd.errors.FdsdError
assert "transpose" not in vars(fdsd)
assert fdsd.transpose is fdsd.transpose is vars(fdsd)["transpose"]
from fdsd.transforms import transpose
assert fdsd.transpose is transpose
assert {*fdsd.__all__, "open", "errors", "__version__", "__file__"} <= {*dir(fdsd)}
assert fdsd.__version__[0].isdigit() or fdsd.__version__ == "unknown"
assert gc.isenabled()
"""

FROM = "from fdsd import errors, open, pipe; print(errors.FdsdError.__name__, open.__name__, len(pipe().steps))"


def typed_imports() -> dict[str, str]:
    """The names that type checkers see, each with its module."""
    tree = ast.parse(Path(fdsd.__file__).read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If) and isinstance(node.test, ast.Name)]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def test_import_loads_nothing_heavy(fresh_python: Callable[[str], str]) -> None:
    first, second = fresh_python(LOADED).split("then")
    assert [name for name in first.split() if name.startswith("fdsd")] == ["fdsd"]
    assert "fdsd.engine.saving" in second.split()
    assert [name for name in second.split() if name.startswith(HEAVY)] == []


def test_names_are_there_when_they_are_used(fresh_python: Callable[[str], str]) -> None:
    fresh_python(USES)
    assert fresh_python(FROM).split() == ["FdsdError", "open", "0"]


def test_the_three_lists_of_names_agree() -> None:
    typed = typed_imports()
    modules = {name for name, home in typed.items() if home == "fdsd"}
    homes = {name: home for name, home in typed.items() if name not in modules}
    assert homes == vars(fdsd)["_HOME"]
    assert modules == vars(fdsd)["_MODULES"]
    assert {*fdsd.__all__} == {*homes} - {"open"}
    assert all(getattr(fdsd, name) is getattr(import_module(home), name) for name, home in typed.items())


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="module 'fdsd' has no attribute 'transpos'"):
        getattr(fdsd, "transpos")  # noqa: B009
    with pytest.raises(ImportError, match="cannot import name 'transpos' from 'fdsd'"):
        exec("from fdsd import transpos")
