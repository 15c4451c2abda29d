"""Pipelines by ``module:name`` and ``file.py:name``: what is found, and how errors name the user's line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fdsd
from fdsd.cli.loading import BadReference, load_pipeline

GOOD = """\
from fdsd import Pipeline, add_prefix, identity, unflatten_optim

value = add_prefix("a.")
back = unflatten_optim()
number = 3

def function():
    return add_prefix("b.")

def picky(needed):
    return value

def forgetful():
    value

class Family:
    member = add_prefix("c.")

    @staticmethod
    def make():
        return add_prefix("d.")
"""


@pytest.fixture(autouse=True)
def imports_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget what a test imports, and where from."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    known = set(sys.modules)
    yield
    for name in set(sys.modules) - known:
        del sys.modules[name]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a file ``my_rules.py`` and a package ``my_package`` with the same in it."""
    (tmp_path / "my_rules.py").write_text(GOOD)
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "__init__.py").write_text("")
    (tmp_path / "my_package" / "inner.py").write_text(GOOD)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("place", ["my_rules.py", "./my_rules.py", "my_rules", "my_package.inner", "{}/my_rules.py"])
@pytest.mark.parametrize(
    "name, prefix", [("value", "a."), ("function", "b."), ("Family.member", "c."), ("Family.make", "d.")]
)
def test_what_is_found(folder: Path, place: str, name: str, prefix: str) -> None:
    assert load_pipeline(f"{place.format(folder)}:{name}") == fdsd.add_prefix(prefix)


def test_conversions_are_pipelines_too(folder: Path) -> None:
    assert load_pipeline("my_rules.py:back") == fdsd.unflatten_optim()


@pytest.mark.parametrize(
    "reference, said",
    [
        ("", "'' names no pipeline. A pipeline is named by module:name or file.py:name."),
        (":", "':' names no pipeline."),
        ("my_rules", "'my_rules' names no pipeline."),
        ("my_rules.py:", "'my_rules.py:' names no pipeline."),
        (":value", "':value' names no pipeline."),
        ("my_rules.py", "Write one of: 'my_rules.py:value', 'my_rules.py:back'."),
        ("my_rules.py:vlaue", "my_rules.py has no 'vlaue'; the nearest is 'value'."),
        ("my_rules.py:zzzzzzz", "there are: 'my_rules.py:value', 'my_rules.py:back'."),
        ("my_rules.py:value.zzzzzzz", "my_rules.py has no 'value.zzzzzzz'"),
        ("my_rules.py:number", "my_rules.py:number is an object of class int, no pipeline. Name a pipeline, or"),
        ("my_rules.py:forgetful", "my_rules.py:forgetful gave None, no pipeline."),
        ("my_rules.py:Family", "gave an object of class Family, no pipeline."),
        ("my_rules.py:picky", "picky() missing 1 required positional argument: 'needed'"),
        ("no_file.py:p", "no_file.py could not be read: No such file or directory."),
        ("my_package/:p", "'my_package/' is no Python file."),
        ("my_package.py/x:p", "is no Python file"),
        (".:p", "could not be loaded"),
        ("..x:p", "could not be loaded"),
        ("my\0rules.py:p", "could not be read"),
        ("no_module:p", "there is no module 'no_module'. If you mean a file, write no_module.py:name."),
        ("no_module.inner:p", "there is no module 'no_module'. Is it installed."),
        ("my_package.outer:p", "there is no module 'my_package.outer'."),
        ("fdsd:open", "open() missing 1 required positional argument"),
        ("json:dumps", "dumps() missing 1 required positional argument"),
    ],
)
def test_what_is_not_found(folder: Path, reference: str, said: str) -> None:
    with pytest.raises(BadReference) as caught:
        load_pipeline(reference)
    assert said in str(caught.value)


BROKEN = {
    "def (:": ("SyntaxError: ", 3),
    "p = undefined": ("NameError: name 'undefined' is not defined", 3),
    "import no_such_module": ("ModuleNotFoundError: No module named 'no_such_module'", 3),
    "raise SystemExit(0)": ("SystemExit: 0", 3),
    "raise SystemExit": ("SystemExit", 3),
    "p = fdsd.rename_fqns({'{': 'a'})": ("'{'", 3),
    "import json; json.loads('{')": ("JSONDecodeError", 3),
    "import other": ("ZeroDivisionError: division by zero", 1),
    "def f():\n    1 / 0\nf()": ("ZeroDivisionError: division by zero", 4),
    "assert False, 'first\\nsecond'": ("AssertionError: first", 3),
}


@pytest.mark.parametrize("code", BROKEN)
def test_code_that_fails_is_named_by_file_and_line(folder: Path, code: str) -> None:
    said, line = BROKEN[code]
    (folder / "other.py").write_text("1 / 0\n")
    (folder / "broken.py").write_text(f"import fdsd\n\n{code}\n")
    for reference in ("broken.py:p", "broken:p"):
        with pytest.raises(BadReference) as caught:
            load_pipeline(reference)
        text = str(caught.value)
        file = "other.py" if code == "import other" else "broken.py"
        assert said in text
        assert text.endswith(f"(at {folder / file}, line {line}).")


def test_a_function_that_fails_is_named_by_its_line(folder: Path) -> None:
    (folder / "broken.py").write_text("import fdsd\n\ndef p():\n    return fdsd.drop_prefix(1) >> 2\n")
    for reference in ("broken.py:p", "broken:p"):
        with pytest.raises(BadReference, match=r"broken\.py, line 4\)\.$"):
            load_pipeline(reference)


def test_an_interrupt_goes_through(folder: Path) -> None:
    (folder / "broken.py").write_text("raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        load_pipeline("broken.py:p")


def test_a_file_finds_its_neighbours_and_shadows_nothing(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "helper.py").write_text("prefix = 'h.'\n")
    (folder / "sub" / "json.py").write_text("1 / 0\n")
    text = "import json, helper\nfrom fdsd import add_prefix\np = add_prefix(helper.prefix)\n"
    (folder / "sub" / "torch.py").write_text(text)
    assert load_pipeline("sub/torch.py:p") == fdsd.add_prefix("h.")
    assert sys.modules["torch"].__file__ != str(folder / "sub" / "torch.py")
    assert not (folder / "sub" / "__pycache__" / "torch.cpython-311.pyc").exists()


def test_a_changed_file_is_read_again(folder: Path) -> None:
    for prefix in ("x.", "y.", "z."):
        (folder / "rules.py").write_text(f"from fdsd import add_prefix\np = add_prefix({prefix!r})\n")
        assert load_pipeline("rules.py:p") == fdsd.add_prefix(prefix)


def test_encodings_and_line_ends_of_python(folder: Path) -> None:
    text = "# -*- coding: latin-1 -*-\r\nfrom fdsd import add_prefix\r\np = add_prefix('\xe4')\r\n"
    (folder / "rules.py").write_bytes(text.encode("latin-1"))
    assert load_pipeline("rules.py:p") == fdsd.add_prefix("ä")
    (folder / "rules.py").write_bytes(b"p = 1\0")
    with pytest.raises(BadReference, match="could not be loaded"):
        load_pipeline("rules.py:p")
