"""What ``import fdsd`` costs, and what it must not load."""

from __future__ import annotations

from collections.abc import Callable

import pytest

# torch's slow parts, and what only an extra or a subcommand needs
HEAVY = (
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "hypothesis",
    "transformers",
)

LOADED = """
import sys
import torch
before = set(sys.modules)
import fdsd
print(*sorted(set(sys.modules) - before), sep="\\n")
"""

SECONDS = """
import time
import torch
start = time.perf_counter()
import fdsd
print(time.perf_counter() - start)
"""


def test_import_loads_nothing_heavy(fresh_python: Callable[[str], str]) -> None:
    loaded = fresh_python(LOADED).split()
    assert "fdsd" in loaded
    assert [name for name in loaded if name.startswith(HEAVY)] == []


@pytest.mark.alone
def test_import_takes_less_than_100_ms_after_torch(fresh_python: Callable[[str], str]) -> None:
    fresh_python(SECONDS)  # the first import writes the bytecode
    assert min(float(fresh_python(SECONDS)) for _ in range(3)) < 0.1
