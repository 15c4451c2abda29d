"""Comparing a text with a file that is kept beside the tests."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

__all__ = ["assert_golden"]

UPDATE = "FDSD_UPDATE_GOLDEN"


def assert_golden(text: str, path: str | os.PathLike[str]) -> None:
    """Assert that a text is the one that a file holds, such as what ``explain`` says of your pipeline.

    Args:
        text: What came out. One newline at its end is no matter.
        path: The file. With ``FDSD_UPDATE_GOLDEN=1`` in the environment it is written instead of compared.

    Raises:
        AssertionError: The texts differ, with a diff; or there is no file yet.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "explain.txt"
    >>> _ = path.write_text("a -> b\\n", encoding="utf-8")
    >>> assert_golden("a -> b", path)
    """
    file = Path(path)
    actual = text.removesuffix("\n") + "\n"
    if os.environ.get(UPDATE, "") not in ("", "0"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(actual, encoding="utf-8", newline="\n")
        return
    if not file.is_file():
        raise AssertionError(f"There is no golden file {str(file)!r} yet. Run once with {UPDATE}=1 to write it.")
    expected = file.read_text(encoding="utf-8")
    if actual != expected:
        raise AssertionError(
            f"The text is not the one in {str(file)!r}:\n{_difference(expected, actual, file.name)}\n"
            f"If the new text is right, run once with {UPDATE}=1 and review the change of the file."
        )


def _difference(expected: str, actual: str, name: str) -> str:
    lines = difflib.unified_diff(
        expected.splitlines(), actual.splitlines(), f"{name} (kept)", f"{name} (now)", lineterm=""
    )
    return "\n".join(lines) or "  the texts differ in their line ends only"
