"""What all tests share: hypothesis profiles, one thread a worker, and a fresh interpreter. No test data."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# The same examples in every run, so that a change is judged by itself, and as many as leave the suite near ten
# minutes on two cores; HYPOTHESIS_PROFILE=explore looks for new ones.
settings.register_profile(
    "ci",
    deadline=None,
    derandomize=True,
    max_examples=50,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("explore", settings.get_profile("ci"), derandomize=False, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# Parallel workers share the cores. Set before the first import of torch; child processes inherit it.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"

# A suite that was started in the background inherits an ignored interrupt, and its child processes would too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

FreshPython = Callable[..., str]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Doctests live in ``fdsd/``: no script, snippet or golden file under ``tests/`` is imported for one."""
    if collection_path.suffix != ".py":
        return None
    is_test = any(collection_path.match(pattern) for pattern in config.getini("python_files"))
    return None if is_test else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of memory and speed run by themselves."""
    for item in items:
        if Path(__file__).parent / "memory" in item.path.parents:
            item.add_marker("alone")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A run narrowed by ``-m`` may select nothing (tox runs the suite in two parts)."""
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and session.config.option.markexpr:
        session.exitstatus = pytest.ExitCode.OK


@pytest.fixture
def fresh_python() -> FreshPython:
    """Run code in a fresh interpreter where warnings are errors; give what it printed."""

    def run(code: str, *args: str, timeout: float = 120) -> str:
        command = [sys.executable, "-W", "error", "-c", code, *args]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run
