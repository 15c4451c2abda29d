"""What the commands print: plain text, the same every time; colours on a terminal, and nowhere else.

Whatever comes from files or arguments is made printable here, so that no name in a checkpoint can steer a
terminal. Nothing here knows what is printed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any, TextIO

__all__ = ["Console", "complain", "printable", "stop_writing"]

_MARK = re.compile(r"\s*(?:([-+!~])|\d+\.) ")
_STYLES = {"+": "green", "-": "red", "!": "bold red", "~": "yellow", None: "bold"}
"""How a line looks on a terminal, by the mark that it begins with; without one it is a numbered heading."""


def printable(text: str, *, keep: str = "") -> str:
    r"""Escape what is no printable character, but for those in ``keep``.

    >>> printable("a\x1b[31mb\n")
    'a\\x1b[31mb\\n'
    """
    if text.isprintable():
        return text
    return "".join([c if c.isprintable() or c in keep else _escaped(c) for c in text])


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def _encodable(text: str, stream: TextIO) -> str:
    """Escape what the encoding of a stream lacks."""
    encoding = stream.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


class Console:
    """Standard output.

    >>> Console().table([("a", "1"), ("bc", "23")], right=(1,))
    a    1
    bc  23
    """

    def __init__(self) -> None:
        self._stream: TextIO | None = sys.stdout  # none where the caller closed it
        self._rich: Any = None
        if self._stream is not None and self._stream.isatty():
            from rich.console import Console as Rich  # a tenth of a second, which only a terminal pays

            self._rich = Rich(file=self._stream, highlight=False, markup=False, emoji=False, soft_wrap=True)

    def line(self, text: str = "", style: str | None = None) -> None:
        """Print a line, or several."""
        if self._stream is None:
            return
        safe = _encodable(printable(text, keep="\n"), self._stream)
        if self._rich is not None:
            self._rich.print(safe, style=style)
        else:
            print(safe, file=self._stream)

    def marked(self, text: str) -> None:
        """Print lines, each styled by the mark that it begins with: ``+``, ``-``, ``!``, ``~`` or a number."""
        for line in text.splitlines():
            mark = _MARK.match(line)
            self.line(line, _STYLES[mark[1]] if mark else None)

    def table(
        self,
        rows: Sequence[Sequence[str]],
        *,
        right: Sequence[int] = (),
        indent: str = "",
        styles: Sequence[str | None] = (),
    ) -> None:
        """Print rows in columns.

        Args:
            rows: The cells.
            right: The columns that are aligned to the right.
            indent: What stands before each row.
            styles: How rows look on a terminal, as far as given.
        """
        safe = [[printable(cell) for cell in row] for row in rows]
        widths = [max(map(len, column)) for column in zip(*safe, strict=True)]
        for at, row in enumerate(safe):
            cells = [
                cell.rjust(width) if column in right else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            self.line(f"{indent}{'  '.join(cells).rstrip()}", styles[at] if at < len(styles) else None)


def complain(text: str) -> None:
    """Print one paragraph on standard error, if there is any."""
    stream: TextIO | None = sys.stderr
    if stream is not None:
        try:
            print(_encodable(printable(text), stream), file=stream, flush=True)
        except OSError:  # nobody reads it
            stop_writing(stream)


def stop_writing(stream: TextIO | None) -> None:
    """Let what is still to be written go nowhere: the reader is gone, and the end of Python would complain."""
    import os

    try:
        assert stream is not None
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
    except (OSError, ValueError, AssertionError):  # a stream without a descriptor
        return
