"""``fdsd convert``: what it writes, what it refuses, and that a failure leaves the destination as it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fdsd
from fdsd.cli.main import main


def same(a: Any, b: Any) -> bool:
    """Whether two states have the same names with the same bytes."""
    return fdsd.diff(a, b).same


def test_as_it_is(run: Callable[..., Any], model: Path, tmp_path: Path) -> None:
    ran = run("convert", model, tmp_path / "b.safetensors")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == f"{tmp_path / 'b.safetensors'}: 26 tensors, 1.5 kB\n"
    assert same(fdsd.open(model), fdsd.open(tmp_path / "b.safetensors"))


def test_with_a_pipeline_and_a_dtype(run: Callable[..., Any], model: Path, rules: Path, tmp_path: Path) -> None:
    target = tmp_path / "b.safetensors"
    assert run("convert", model, target, "--pipeline", f"{rules}:fused", "--dtype", "bfloat16").code == 0
    made, source = fdsd.open(target), fdsd.materialize(fdsd.open(model))
    parts = [source[f"encoder.layer.1.attention.self.{x}.weight"] for x in ("query", "key", "value")]
    assert torch.equal(fdsd.materialize(made)["h.1.qkv.weight"], torch.cat(parts).to(torch.bfloat16))
    dtypes = {name: spec.dtype for name, spec in fdsd.specs(made).items()}
    assert dtypes.pop("embeddings.position_ids") is torch.int64
    assert set(dtypes.values()) == {torch.bfloat16}


def test_to_a_folder_of_shards_with_assets(run: Callable[..., Any], model: Path, tmp_path: Path) -> None:
    given = tmp_path / "given"
    (given / "sub").mkdir(parents=True)
    (given / "config.json").write_text("{}")
    (given / "sub" / "vocab.txt").write_text("a b")
    (given / "model.safetensors").write_bytes(b"weights are left out")
    (tmp_path / "NOTICE").write_text("n")
    options = ("--max-shard-size", "500", "--assets", given, "--assets", tmp_path / "NOTICE")
    assert run("convert", model, tmp_path / "out", *options).code == 0
    found = {path.name for path in (tmp_path / "out").iterdir()}
    shards = {name for name in found if name.endswith(".safetensors")}
    assert len(shards) >= 3
    assert found - shards == {"config.json", "sub", "NOTICE", "model.safetensors.index.json"}
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == shards
    assert same(fdsd.open(model), fdsd.open(tmp_path / "out"))


def test_between_torch_files_and_safetensors(run: Callable[..., Any], tmp_path: Path) -> None:
    w = torch.arange(6.0).reshape(2, 3)
    torch.save({"model": {"w": w, "tied": w}, "epoch": 3}, tmp_path / "a.pt")
    assert run("convert", tmp_path / "a.pt", tmp_path / "b.safetensors", "--key", "model").code == 0
    state = fdsd.open(tmp_path / "b.safetensors")
    assert state["w"] is state["tied"]
    assert run("convert", tmp_path / "b.safetensors", tmp_path / "c.pt").code == 0
    back = torch.load(tmp_path / "c.pt", weights_only=True)
    assert torch.equal(back["tied"], w) and back["w"].data_ptr() == back["tied"].data_ptr()


def test_quiet_prints_nothing(run: Callable[..., Any], model: Path, tmp_path: Path) -> None:
    ran = run("convert", model, tmp_path / "b.safetensors", "--quiet")
    assert (ran.code, ran.out, ran.err) == (0, "", "")
    assert same(fdsd.open(model), fdsd.open(tmp_path / "b.safetensors"))


def test_an_existing_destination(run: Callable[..., Any], model: Path, tmp_path: Path) -> None:
    target = tmp_path / "b.safetensors"
    fdsd.save({"old": torch.ones(1)}, target)
    before = target.read_bytes()
    assert "--overwrite" in run("convert", model, target).refused()
    assert target.read_bytes() == before
    assert run("convert", model, target, "--overwrite").code == 0
    assert same(fdsd.open(model), fdsd.open(target))
    assert run("convert", target, target, "--overwrite").code == 0  # onto itself
    assert same(fdsd.open(model), fdsd.open(target))


@pytest.mark.parametrize(
    "options, said",
    [
        (("--max-shard-size", "5GB"), "--max-shard-size divides the files of a folder, and"),
        (("--assets", "nowhere"), "name a folder as path"),
        (("--pipeline", "nowhere.py:p"), "nowhere.py could not be read"),
        (("--key", "model"), "has no meaning"),
    ],
)
def test_options_that_do_not_fit(
    run: Callable[..., Any], model: Path, tmp_path: Path, options: tuple[str, str], said: str
) -> None:
    assert said in run("convert", model, tmp_path / "b.safetensors", *options).refused()
    assert not (tmp_path / "b.safetensors").exists()


@pytest.mark.parametrize("name", ["b.gguf", "b.h5", "b.safetensors.index.json"])
def test_formats_that_are_not_written(run: Callable[..., Any], model: Path, tmp_path: Path, name: str) -> None:
    assert "a format that is not written here" in run("convert", model, tmp_path / name).refused()
    assert not (tmp_path / name).exists()


def test_a_folder_may_have_a_dot(run: Callable[..., Any], model: Path, tmp_path: Path) -> None:
    assert run("convert", model, tmp_path / "model-3.1").code == 0
    assert same(fdsd.open(model), fdsd.open(tmp_path / "model-3.1"))


FAILING = """\
import torch, fdsd

def spoil(x):
    raise ZeroDivisionError("on purpose")

def stop(x):
    raise KeyboardInterrupt

spec = fdsd.TensorSpec((10, 4), torch.float32)
late = fdsd.map_tensors(spoil, "embeddings.word_embeddings.weight", spec=spec)
wrong = fdsd.pipe(fdsd.drop("nothing?"), fdsd.rename_fqns({"encoder.layr.{i}.{r...}": "h.{i}.{r...}"}))
stopped = fdsd.map_tensors(stop, "embeddings.word_embeddings.weight", spec=spec)
big = fdsd.map_tensors(lambda x: x + 1, "embeddings.word_embeddings.weight", spec=spec)
"""


@pytest.mark.parametrize(
    "name, options, said",
    [
        ("late", (), ["ZeroDivisionError: on purpose", "rules.py, line 4"]),
        ("wrong", (), ["encoder.layer.{i}.{r...}", "step 2 of 2, rename_fqns("]),
        ("big", ("--budget", "100"), ["the budget is 100 bytes", "Give a budget of at least"]),
    ],
)
def test_a_failure_leaves_the_destination_as_it_was(
    run: Callable[..., Any],
    model: Path,
    tmp_path: Path,
    name: str,
    options: tuple[str, ...],
    said: list[str],
) -> None:
    (tmp_path / "rules.py").write_text(FAILING)
    target = tmp_path / "out" / "b.safetensors"
    target.parent.mkdir()
    fdsd.save({"old": torch.ones(1)}, target)
    before = target.read_bytes()
    argv = ("convert", model, target, "--overwrite", "--pipeline", f"{tmp_path / 'rules.py'}:{name}", *options)
    paragraph = run(*argv).refused()
    assert all(text in paragraph for text in said), paragraph
    assert [path.name for path in target.parent.iterdir()] == ["b.safetensors"]
    assert target.read_bytes() == before


def test_an_interrupt_leaves_the_destination_as_it_was(run: Callable[..., Any], model: Path, tmp_path: Path) -> None:
    (tmp_path / "rules.py").write_text(FAILING)
    target = tmp_path / "out" / "b.safetensors"
    argv = ("convert", model, target, "--overwrite", "--pipeline", f"{tmp_path / 'rules.py'}:stopped")
    for before in (None, b"old"):
        if before is not None:
            target.parent.mkdir()
            target.write_bytes(before)
        ran = run(*argv)
        assert (ran.code, ran.out, ran.err) == (130, "", "fdsd convert: interrupted.\n")
        left = list(target.parent.iterdir()) if target.parent.exists() else []
        assert left == ([] if before is None else [target])
    assert target.read_bytes() == b"old"


def test_a_result_that_no_file_can_hold(run: Callable[..., Any], tmp_path: Path) -> None:
    fdsd.save({"state.w.exp_avg": torch.ones(2), "param_groups.w.lr": torch.ones(())}, tmp_path / "a.safetensors")
    (tmp_path / "rules.py").write_text("import fdsd\np = fdsd.unflatten_optim()\n")
    argv = ("convert", tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert "not OptimState" in run(*argv, "--pipeline", f"{tmp_path / 'rules.py'}:p").refused()


class TestFormats:
    """``--format`` and ``--to-format`` where the name of a file does not tell."""

    def test_both_ways(self, tmp_path: Path) -> None:
        torch.save({"w": torch.tensor([1.0, 2.0])}, tmp_path / "checkpoint")
        source, target, back = (str(tmp_path / name) for name in ("checkpoint", "made", "back.gguf"))
        assert main(["convert", source, target, "--format", "torch", "--to-format", "torch", "--quiet"]) == 0
        assert torch.load(target)["w"].tolist() == [1.0, 2.0]
        assert main(["convert", target, back, "--to-format", "torch", "--quiet"]) == 0
        assert main(["ls", target, "--format", "torch"]) == 0
        assert main(["diff", source, target, "--format-a", "torch", "--format-b", "torch"]) == 0

    def test_errors_speak_of_the_options(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "x.foo").write_text("hello, this is no checkpoint")
        path = str(tmp_path / "x.foo")
        assert main(["ls", path]) == 2
        assert "Give --format if you know it" in capsys.readouterr().err
        assert main(["diff", path, path]) == 2
        assert "Give --format-a or --format-b if you know it" in capsys.readouterr().err
        assert main(["ls", path, "--format", "bogus"]) == 2
        assert "--format 'bogus' is not known" in capsys.readouterr().err
        assert main(["convert", path, str(tmp_path / "o.gguf")]) == 2
        assert "--to-format says which is meant" in capsys.readouterr().err
