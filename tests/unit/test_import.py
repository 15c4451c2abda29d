"""What ``import fdsd`` must not load; what it costs is measured by ``tests/bench``."""

from __future__ import annotations

from collections.abc import Callable

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


def test_import_loads_nothing_heavy(fresh_python: Callable[[str], str]) -> None:
    loaded = fresh_python(LOADED).split()
    assert "fdsd" in loaded
    assert [name for name in loaded if name.startswith(HEAVY)] == []
