"""Run mypy and basedpyright, both strict, over the snippets beside this file, and hold them to their marks.

A line that ends in ``# E: code / rule`` must be rejected by mypy with that code and by pyright with that
rule (what follows from it on the same line, an unknown type say, is no matter); every other line must pass.
Run by ``tox -e types``: neither checker needs to live beside torch.

    python tests/typing/check.py PYTHON    # PYTHON: an interpreter whose environment has torch
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MARK = re.compile(r"#\s*E:\s*(?P<mypy>[\w-]+)\s*/\s*(?P<pyright>\w+)\s*$")

Finding = tuple[str, int, str]  # file name, line, code


def expected(checker: str, snippets: list[Path]) -> set[Finding]:
    """Read the marks of the snippets."""
    marks: set[Finding] = set()
    for path in snippets:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if mark := MARK.search(line):
                marks.add((path.name, number, mark[checker]))
            elif "# E:" in line:
                raise SystemExit(
                    f"{path.name}:{number}: a mark reads '# E: mypy-code / pyrightRule', not: {line.strip()}"
                )
    return marks


def run(command: list[str]) -> str:
    """Run a checker on the sources of this checkout; only a crash is an error here."""
    env = os.environ | {"MYPYPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(f"{' '.join(command)}\nexited with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def mypy(python: str, snippets: list[Path]) -> set[Finding]:
    """Give mypy's errors."""
    options = ["--strict", "--output", "json", "--python-executable", python]
    lines = run([sys.executable, "-m", "mypy", *options, *map(str, snippets)]).splitlines()
    found: list[dict[str, Any]] = [json.loads(line) for line in lines if line.startswith("{")]
    return {(Path(f["file"]).name, f["line"], str(f["code"])) for f in found if f["severity"] == "error"}


def pyright(python: str, snippets: list[Path]) -> set[Finding]:
    """Give pyright's errors, by the strictness that pyproject.toml sets."""
    options = ["--outputjson", "--pythonpath", python]
    report = json.loads(run([sys.executable, "-m", "basedpyright", *options, *map(str, snippets)]))
    if report["summary"]["filesAnalyzed"] != len(snippets):
        raise SystemExit(f"pyright looked at {report['summary']['filesAnalyzed']} files of {len(snippets)}")
    found = [f for f in report["generalDiagnostics"] if f["severity"] == "error"]
    return {(Path(f["file"]).name, f["range"]["start"]["line"] + 1, f.get("rule", "syntax")) for f in found}


def main(python: str) -> int:
    """Compare marks and findings of both checkers; say each difference; give the exit code."""
    snippets = sorted(path for path in HERE.glob("*.py") if path != Path(__file__).resolve())
    problems: list[str] = []
    count = 0
    for name, check in (("mypy", mypy), ("pyright", pyright)):
        wanted, found = expected(name, snippets), check(python, snippets)
        marked = {finding[:2] for finding in wanted}
        count += len(wanted & found)
        problems += [f"{f}:{n}: {name} does not say {code}" for f, n, code in sorted(wanted - found)]
        stray = sorted(finding for finding in found if finding[:2] not in marked)
        problems += [f"{f}:{n}: {name} rejects this line: {code}" for f, n, code in stray]
    if not count:
        problems.append("no line was rejected: the check itself is broken")
    print(*problems, sep="\n", end="\n" if problems else "")
    print(f"{len(snippets)} snippets, {count} rejections as marked, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1] if len(sys.argv) > 1 else sys.executable))
