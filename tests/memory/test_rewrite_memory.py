"""The memory of a rewrite is bounded by the budget, whatever the size of the checkpoint: base + 64 MB + budget."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

import fdsd

from .rewriting import PIPELINES, Watched, make_checkpoint, rewrite

MB = 1_000_000
SIZES = (256 * MB, 1000 * MB)
BUDGETS = {"32MB": 32 * MB, "256MB": 256 * MB}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="RssAnon is read from /proc")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Generator[Path, None, None]:
    made = tmp_path_factory.mktemp("memory")
    if shutil.disk_usage(made).free < 4000 * MB:
        pytest.skip("the checkpoints need 4 GB of disk")
    try:
        for size in SIZES:
            make_checkpoint(made / f"{size}.safetensors", size)
        yield made
    finally:
        shutil.rmtree(made)


def run(folder: Path, size: int, pipeline: str, budget: str) -> Watched:
    target = folder / "out.safetensors"
    try:
        found = rewrite(folder / f"{size}.safetensors", target, pipeline, budget=budget)
        assert_right(folder / f"{size}.safetensors", target, pipeline)
    finally:
        target.unlink(missing_ok=True)
    return found


def assert_right(source: Path, target: Path, pipeline: str) -> None:
    """What was written is what the pipeline says: all specs, and the values of some tensors."""
    made, expected = fdsd.open(target), PIPELINES[pipeline]()(fdsd.open(source))
    assert fdsd.specs(made) == fdsd.specs(expected)
    chosen = fdsd.select("layers.{i:0..1}.{_...}")
    assert fdsd.diff(chosen(made), chosen(expected)).same


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_rewrite_stays_within_its_budget_at_any_size(folder: Path, budget: str) -> None:
    extra = [run(folder, size, "rename, fuse, cast", budget).extra for size in SIZES]
    assert max(extra) <= 64 * MB + BUDGETS[budget], extra
    assert abs(extra[1] - extra[0]) <= 16 * MB, extra


def test_so_does_one_that_moves_and_computes(folder: Path) -> None:
    found = run(folder, SIZES[0], "move and compute", "32MB")
    assert found.extra <= 64 * MB + BUDGETS["32MB"], found


def test_what_needs_its_whole_input_is_seen(folder: Path) -> None:
    """The watch is not blind: a function of a whole tensor takes its input and its result, and no more."""
    whole = 2 * fdsd.specs(fdsd.open(folder / f"{SIZES[0]}.safetensors"))["model.embed.weight"].nbytes
    found = run(folder, SIZES[0], "whole", "256MB")
    assert 0.9 * whole <= found.extra <= 64 * MB + whole, found
