"""What goes beside the weights: copied as a whole, edited where asked, never instead of the weights."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import fdsd
from fdsd.data.errors import BadFile, DestinationExists, DiskError, FdsdError, MissingFile, Unsupported

from .conftest import MIXED, assert_file_holds, tree, unprivileged

CONFIG = {"model_type": "bert", "hidden_size": 8, "nested": {"a": [1, 2]}}


@pytest.fixture
def beside(tmp_path: Path) -> Path:
    """A folder as a hub has it: weights of several kinds, hidden files, a folder below, links."""
    folder = tmp_path / "source"
    (folder / "1_Pooling").mkdir(parents=True)
    (folder / ".git").mkdir()
    files = {
        "config.json": json.dumps(CONFIG),
        "tokenizer.json": '{"t": 1}',
        "vocab.txt": "a\nb\n",
        "LICENSE": "free",
        "1_Pooling/config.json": '{"mode": "mean"}',
        ".gitattributes": "x",
        ".git/HEAD": "ref",
        "model-00001-of-00001.safetensors": "weights",
        "model.safetensors.index.json": "{}",
        "pytorch_model.bin": "weights",
        "pytorch_model.bin.index.json": "{}",
        "old.pt": "w",
        "old.pth": "w",
        "old.ckpt": "w",
        "flax_model.msgpack": "w",
        "tf_model.h5": "w",
        "model.onnx": "w",
        "model.gguf": "w",
        "1_Pooling/model.safetensors": "w",
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    (tmp_path / "blob").write_text("of a link")
    (folder / "linked.json").symlink_to(tmp_path / "blob")
    (folder / "broken.json").symlink_to(tmp_path / "nowhere")
    return folder


KEPT = ["config.json", "tokenizer.json", "vocab.txt", "LICENSE", "1_Pooling/config.json", "linked.json"]


def files_of(folder: Path) -> set[str]:
    return {name for name, data in tree(folder).items() if data is not None}


def test_a_folder_is_copied_without_its_weights(tmp_path: Path, beside: Path) -> None:
    fdsd.save(MIXED, tmp_path / "out", assets=beside)
    assert files_of(tmp_path / "out") == {*KEPT, "model.safetensors"}
    for name in KEPT:
        assert (tmp_path / "out" / name).read_bytes() == (beside / name).read_bytes()
        assert not (tmp_path / "out" / name).is_symlink()
    assert_file_holds(tmp_path / "out", MIXED)


def test_single_files_and_several_places(tmp_path: Path, beside: Path) -> None:
    (tmp_path / "extra.txt").write_text("extra")
    fdsd.save(MIXED, tmp_path / "a", assets=str(beside / "vocab.txt"))
    assert files_of(tmp_path / "a") == {"vocab.txt", "model.safetensors"}
    fdsd.save(MIXED, tmp_path / "b", assets=[beside / "1_Pooling", tmp_path / "extra.txt"], max_shard_size=100)
    assert {"config.json", "extra.txt"} <= files_of(tmp_path / "b")
    assert json.loads((tmp_path / "b" / "config.json").read_text()) == {"mode": "mean"}


def test_config_is_edited_on_the_way(tmp_path: Path, beside: Path) -> None:
    fdsd.save(MIXED, tmp_path / "out", assets=beside, config={"hidden_size": 16, "torch_dtype": "float32"})
    edited = json.loads((tmp_path / "out" / "config.json").read_text())
    assert edited == {**CONFIG, "hidden_size": 16, "torch_dtype": "float32"}
    assert list(edited) == [*CONFIG, "torch_dtype"]
    assert json.loads((beside / "config.json").read_text()) == CONFIG


def test_config_without_assets(tmp_path: Path) -> None:
    fdsd.save(MIXED, tmp_path, config={"a": 1})
    assert json.loads((tmp_path / "config.json").read_text()) == {"a": 1}
    before = tree(tmp_path)
    with pytest.raises(DestinationExists, match=r"config\.json"):
        fdsd.save(MIXED, tmp_path, config={"b": 2})
    assert tree(tmp_path) == before
    fdsd.save(MIXED, tmp_path, config={"b": 2}, overwrite=True)
    assert json.loads((tmp_path / "config.json").read_text()) == {"a": 1, "b": 2}


def test_assets_are_replaced_only_when_told(tmp_path: Path, beside: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "vocab.txt").write_text("mine")
    with pytest.raises(DestinationExists, match=r"vocab\.txt.*overwrite=True"):
        fdsd.save(MIXED, out, assets=beside)
    assert tree(out) == {"vocab.txt": b"mine"}
    fdsd.save(MIXED, out, assets=beside, overwrite=True)
    assert (out / "vocab.txt").read_text() == "a\nb\n"


def test_in_place_with_its_own_assets(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    fdsd.save(MIXED, tmp_path)
    fdsd.save(fdsd.add_prefix("m.")(fdsd.open(tmp_path)), tmp_path, assets=tmp_path, overwrite=True)
    assert files_of(tmp_path) == {"config.json", "model.safetensors"}
    assert json.loads((tmp_path / "config.json").read_text()) == CONFIG
    fdsd.save(fdsd.open(tmp_path), tmp_path, assets=tmp_path, config={"x": 1}, overwrite=True)
    assert json.loads((tmp_path / "config.json").read_text()) == {**CONFIG, "x": 1}
    assert_file_holds(tmp_path, fdsd.add_prefix("m.")(MIXED))


def test_links_in_the_destination_are_replaced_not_followed(tmp_path: Path, beside: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "mine.txt").write_text("mine")
    (tmp_path / "out" / "vocab.txt").symlink_to(tmp_path / "mine.txt")
    fdsd.save(MIXED, tmp_path / "out", assets=beside, overwrite=True)
    assert (tmp_path / "mine.txt").read_text() == "mine"
    assert (tmp_path / "out" / "vocab.txt").read_text() == "a\nb\n"


@pytest.mark.parametrize("name", ["x.safetensors", "x.pt"])
def test_a_single_file_takes_none(tmp_path: Path, beside: Path, name: str) -> None:
    for options in ({"assets": beside}, {"config": {"a": 1}}):
        with pytest.raises(Unsupported, match="name a folder as path"):
            fdsd.save(MIXED, tmp_path / "out" / name, **options)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "text, config, error, match",
    [
        ("{", {"a": 1}, BadFile, "no JSON"),
        ("[1]", {"a": 1}, BadFile, "list, not an object"),
        ("{}", {"a": {1, 2}}, Unsupported, "set"),
    ],
)
def test_a_config_that_cannot_be_edited(
    tmp_path: Path, text: str, config: Any, error: type[FdsdError], match: str
) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(error, match=match):
        fdsd.save(MIXED, tmp_path / "new" / "out", assets=tmp_path / "config.json", config=config)
    assert tree(tmp_path).keys() == {"config.json"}


def test_assets_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(MissingFile, match="nowhere"):
        fdsd.save(MIXED, tmp_path / "out", assets=[tmp_path / "nowhere"])
    assert tree(tmp_path) == {}


def test_nothing_is_left_when_the_weights_fail(tmp_path: Path, beside: Path) -> None:
    out = tmp_path / "deep" / "out"
    before = tree(tmp_path)
    with pytest.raises(Unsupported):
        fdsd.save({"epoch": 3}, out, assets=beside, config={"a": 1})
    assert tree(tmp_path) == before
    out.mkdir(parents=True)
    (out / "config.json").write_text("{}")
    before = tree(tmp_path)
    with pytest.raises(Unsupported):
        fdsd.save({"epoch": 3}, out, assets=beside, config={"a": 1}, overwrite=True)
    assert tree(tmp_path) == before


def test_nothing_is_left_when_an_asset_fails(tmp_path: Path, beside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = __import__("shutil").copyfile

    def fails(source: Path, target: Path) -> None:
        copy(source, target)
        if source.name == "vocab.txt":
            raise OSError(28, os.strerror(28))

    monkeypatch.setattr("fdsd.engine.assets.shutil.copyfile", fails)
    with pytest.raises(DiskError, match=r"vocab\.txt.*No space left"):
        fdsd.save(MIXED, tmp_path / "out", assets=beside)
    assert not (tmp_path / "out").exists()


# -- what was once wrong --------------------------------------------------------------------------------------------


def test_assets_never_replace_the_new_weights(tmp_path: Path) -> None:
    fdsd.save({"old": torch.ones(1)}, tmp_path / "old")
    try:
        fdsd.save(MIXED, tmp_path / "new", assets=[tmp_path / "old" / "model.safetensors"])
    except FdsdError:
        assert not (tmp_path / "new").exists()
    else:
        assert_file_holds(tmp_path / "new", MIXED)


def test_two_assets_of_one_name(tmp_path: Path, beside: Path) -> None:
    with pytest.raises(FdsdError, match=r"config\.json"):
        fdsd.save(MIXED, tmp_path / "out", assets=[beside / "config.json", beside / "1_Pooling" / "config.json"])


def test_a_destination_inside_its_assets(tmp_path: Path, beside: Path) -> None:
    for overwrite in (False, True):
        fdsd.save(MIXED, beside / "out", assets=beside, overwrite=overwrite)
    assert files_of(beside / "out") == {*KEPT, "model.safetensors"}


def test_a_folder_in_the_way_of_an_asset(tmp_path: Path, beside: Path) -> None:
    out = tmp_path / "out"
    (out / "vocab.txt").mkdir(parents=True)
    with pytest.raises(FdsdError, match=r"vocab\.txt"):
        fdsd.save(MIXED, out, assets=beside, overwrite=True)
    assert tree(out) == {"vocab.txt": None}


def test_a_torch_file_without_suffix_takes_no_assets(tmp_path: Path, beside: Path) -> None:
    with pytest.raises(Unsupported, match="assets"):
        fdsd.save(MIXED, tmp_path / "out", format="torch", assets=beside)


def test_assets_that_may_not_be_read(open_folder: Path) -> None:
    (open_folder / "locked").mkdir()
    (open_folder / "locked" / "a.json").write_text("{}")
    (open_folder / "locked").chmod(0o700 if os.geteuid() == 0 else 0o000)
    (open_folder / "out").mkdir()
    (open_folder / "out").chmod(0o777)
    with unprivileged(), pytest.raises(FdsdError, match=r"a\.json"):
        fdsd.save(MIXED, open_folder / "out" / "new", assets=open_folder / "locked" / "a.json")


# -- all or nothing --------------------------------------------------------------------------------------------------


class Failing:
    """Makes a call fail the ``count``-th time."""

    def __init__(self, call: Any, error: BaseException, count: int) -> None:
        self.call, self.error, self.left = call, error, count

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise self.error
        return self.call(*args, **options)


@pytest.mark.parametrize("call", ["rename", "replace"])
@pytest.mark.parametrize("count", range(1, 9))
@pytest.mark.parametrize("error", [OSError(5, os.strerror(5)), KeyboardInterrupt()], ids=["fault", "interrupt"])
def test_weights_and_assets_come_together_or_not_at_all(
    tmp_path: Path, beside: Path, monkeypatch: pytest.MonkeyPatch, call: str, count: int, error: BaseException
) -> None:
    out = tmp_path / "out"
    fdsd.save({"old": torch.ones(1)}, out, config={"a": 1})
    (out / "vocab.txt").write_text("mine")
    before = tree(out)
    failing = Failing(getattr(os, call), error, count)
    monkeypatch.setattr(os, call, failing)
    raised: BaseException | None = None
    try:
        fdsd.save(MIXED, out, assets=beside, config={"b": 2}, overwrite=True)
    except (DiskError, KeyboardInterrupt) as caught:
        raised = caught
    monkeypatch.undo()
    assert (raised is None) == (failing.left > 0)
    if raised is not None:
        assert tree(out) == before
    else:
        assert files_of(out) == {*KEPT, "model.safetensors"}
        assert json.loads((out / "config.json").read_text()) == {**CONFIG, "b": 2}


def test_weights_that_fail_after_the_assets_were_placed(
    tmp_path: Path, beside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    fdsd.save({"old": torch.ones(1)}, out, config={"a": 1})
    before = tree(out)

    def fail(self: object) -> None:
        assert (out / "vocab.txt").exists()
        raise DiskError("no")

    monkeypatch.setattr("fdsd.storage.placing.Placement.run", fail)
    with pytest.raises(DiskError, match="no"):
        fdsd.save(MIXED, out, assets=beside, overwrite=True)
    assert tree(out) == before


def test_what_replaces_an_asset_keeps_its_permissions_and_waits_for_the_disk(
    tmp_path: Path, beside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "vocab.txt").write_text("mine")
    (out / "vocab.txt").chmod(0o604)
    synced: list[str] = []
    sync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), sync(fd))[1])
    fdsd.save(MIXED, out, assets=beside, overwrite=True)
    assert (out / "vocab.txt").stat().st_mode & 0o777 == 0o604
    assert len([path for path in synced if path.startswith(f"{out}/.fdsd-")]) == 1  # of all files, the one


@pytest.mark.parametrize(
    "text, match",
    [
        ('{"a": 1, "a": 2}', "stand twice in one object: 'a'"),
        ('{"a": NaN}', "NaN is no JSON"),
        ('{"a": Infinity}', "Infinity is no JSON"),
    ],
)
def test_a_config_that_is_not_strict_is_not_edited(tmp_path: Path, text: str, match: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(BadFile, match=match):
        fdsd.save(MIXED, tmp_path / "out", assets=tmp_path / "config.json", config={"b": 1})
    assert tree(tmp_path).keys() == {"config.json"}
    fdsd.save(MIXED, tmp_path / "out", assets=tmp_path / "config.json")  # as it is, it may be copied
    assert (tmp_path / "out" / "config.json").read_text() == text


@pytest.mark.parametrize("config", [{"a": float("nan")}, {"a": [float("inf")]}, {1: 2, "1": 3}, "a", [("a", 1)]])
def test_a_config_that_is_no_json_is_not_written(tmp_path: Path, config: Any) -> None:
    with pytest.raises(Unsupported, match="config"):
        fdsd.save(MIXED, tmp_path / "out", config=config)
    assert tree(tmp_path) == {}


def test_an_asset_given_twice_is_one(tmp_path: Path, beside: Path) -> None:
    fdsd.save(MIXED, tmp_path / "out", assets=[beside, beside / "vocab.txt"])
    assert files_of(tmp_path / "out") == {*KEPT, "model.safetensors"}


def test_no_asset_is_lost_in_a_folder_that_may_not_be_read(open_folder: Path) -> None:
    (open_folder / "in" / "locked").mkdir(parents=True)
    (open_folder / "in" / "locked").chmod(0o700 if os.geteuid() == 0 else 0o000)
    (open_folder / "out").mkdir()
    (open_folder / "out").chmod(0o777)
    with unprivileged(), pytest.raises(DiskError, match=r"locked.*could not be read"):
        fdsd.save(MIXED, open_folder / "out" / "new", assets=open_folder / "in")
    assert not (open_folder / "out" / "new").exists()
