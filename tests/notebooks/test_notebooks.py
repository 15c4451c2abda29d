"""Every notebook of ``notebooks/`` runs from top to bottom in a fresh interpreter, warnings as errors.

Outputs are not compared. Each cell runs as a notebook runs it: its statements, then its last expression
shown. No kernel is needed, so a cell is plain Python: magics and shell escapes are syntax errors.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))

RUN_CELLS = """
import ast, json, sys

cells = json.load(sys.stdin)
namespace = {"__name__": "__main__"}
for number, source in cells:
    where = f"<cell {number}>"
    try:
        body = ast.parse(source, where).body
        last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
        exec(compile(ast.Module(body, []), where, "exec"), namespace)
        if last is not None:
            shown = eval(compile(ast.Expression(last.value), where, "eval"), namespace)
            if shown is not None:
                print(repr(shown))
    except BaseException:
        print(f"cell {number} of the notebook:", source, sep="\\n", file=sys.stderr)
        raise
"""


def code_cells(path: Path) -> list[tuple[int, str]]:
    """Give the code cells of a notebook with their places in it."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    cells = enumerate(notebook["cells"])
    return [(number, "".join(cell["source"])) for number, cell in cells if cell["cell_type"] == "code"]


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path, tmp_path: Path) -> None:
    cells = code_cells(path)
    assert cells
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", RUN_CELLS],
        input=json.dumps(cells),
        cwd=tmp_path,  # what a notebook writes by a relative path stays out of the checkout
        env=os.environ | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
