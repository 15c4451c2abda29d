"""Saving: where things go, what is refused before anything is written, budgets, and what the metadata say."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

import fdsd
from fdsd.data.errors import DestinationExists, DiskError, FdsdError, OverBudget, SpecMismatch, Unsupported
from fdsd.testing import assert_same
from tests.helpers.tensors import patterns

from .conftest import MIXED, assert_file_holds, tree, unprivileged


def metadata_of(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return dict(file.metadata())


# -- where -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["x.safetensors", "folder", "a/b/c/x.safetensors", "a/b.c/folder", "x.pt", "a/x.pth"])
def test_missing_folders_are_made(tmp_path: Path, path: str) -> None:
    fdsd.save(MIXED, str(tmp_path / path))
    assert_file_holds(tmp_path / path, MIXED)
    assert (tmp_path / path).is_dir() == ("folder" in path)
    files = [name for name, data in tree(tmp_path).items() if data is not None]
    assert files == [path + "/model.safetensors" if "folder" in path else path]


def test_format_says_more_than_the_name(tmp_path: Path) -> None:
    fdsd.save(MIXED, tmp_path / "weights", format="torch")
    assert (tmp_path / "weights").is_file()
    assert torch.load(tmp_path / "weights", weights_only=True).keys() == MIXED.keys()
    with pytest.raises(Unsupported, match=r"format='gguf' is not known\. There are: 'safetensors'"):
        fdsd.save(MIXED, tmp_path / "x.gguf", format="gguf")


@pytest.mark.parametrize("path", ["x.safetensors", "folder", "x.pt"])
def test_overwrite_must_be_said(tmp_path: Path, path: str) -> None:
    fdsd.save(MIXED, tmp_path / path)
    before = tree(tmp_path)
    with pytest.raises(DestinationExists, match="overwrite=True"):
        fdsd.save({"w": torch.ones(1)}, tmp_path / path)
    assert tree(tmp_path) == before
    fdsd.save({"w": torch.ones(1)}, tmp_path / path, overwrite=True)
    assert_file_holds(tmp_path / path, {"w": torch.ones(1)})
    assert tree(tmp_path).keys() == before.keys()


def test_a_folder_may_hold_other_things(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("hello")
    fdsd.save(MIXED, tmp_path)
    assert tree(tmp_path).keys() == {"README.md", "model.safetensors"}


def test_fewer_shards_replace_more(tmp_path: Path) -> None:
    fdsd.save(MIXED, tmp_path, max_shard_size=50)
    assert len(tree(tmp_path)) > 3
    fdsd.save(fdsd.open(tmp_path), tmp_path, overwrite=True)
    assert tree(tmp_path).keys() == {"model.safetensors"}
    fdsd.save(fdsd.open(tmp_path), tmp_path, overwrite=True, max_shard_size=50)
    assert "model.safetensors" not in tree(tmp_path)
    assert_file_holds(tmp_path, MIXED)


@pytest.mark.parametrize("shards", [20, 100, "5GB"])
def test_in_place(tmp_path: Path, shards: int | str) -> None:
    fdsd.save(MIXED, tmp_path, max_shard_size=shards)
    p = fdsd.pipe(
        fdsd.rename_fqns({"{x...}": "model.{x...}"}),
        fdsd.concat(["model.layers.10.w", "model.layers.10.w2"], "model.qk", dim=0),
        fdsd.cast(torch.float64, "model.z.weight"),
    )
    twice = {**MIXED, "layers.10.w2": patterns((4, 6), torch.float32, 40)}
    fdsd.save(twice, tmp_path, overwrite=True, max_shard_size=shards)
    fdsd.save(p(fdsd.open(tmp_path)), tmp_path, overwrite=True, max_shard_size=shards)
    assert_file_holds(tmp_path, p(twice))
    assert not any(name.startswith(".") for name in os.listdir(tmp_path))


def test_a_folder_where_a_file_should_be_and_the_reverse(tmp_path: Path) -> None:
    for name in ("x.safetensors", "x.pt"):
        (tmp_path / name).mkdir()
        with pytest.raises(DestinationExists, match=rf"{re.escape(name)}.*name a file"):
            fdsd.save(MIXED, tmp_path / name, overwrite=True)
    (tmp_path / "folder").write_text("a file")
    with pytest.raises(DestinationExists, match="is a file, not a folder"):
        fdsd.save(MIXED, tmp_path / "folder", overwrite=True)
    for name in ("folder/x.safetensors", "folder/x.pt", "folder/sub"):
        with pytest.raises(DiskError, match="folder"):
            fdsd.save(MIXED, tmp_path / name, overwrite=True)
    assert tree(tmp_path) == {"x.safetensors": None, "x.pt": None, "folder": b"a file"}


@pytest.mark.parametrize("path", ["x.safetensors", "x.pt", "folder", "new/x.safetensors", "new/folder"])
def test_without_permission(open_folder: Path, path: str) -> None:
    with unprivileged(), pytest.raises(DiskError, match="Permission denied") as caught:
        fdsd.save(MIXED, open_folder / path)
    assert str(open_folder) in str(caught.value)
    assert isinstance(caught.value, OSError) and caught.value.errno is not None
    assert tree(open_folder) == {}


def test_a_name_that_is_too_long(tmp_path: Path) -> None:
    for name in ("x" * 300 + ".safetensors", "x" * 300 + ".pt", "x" * 300):
        with pytest.raises(FdsdError, match="name too long"):
            fdsd.save(MIXED, tmp_path / name)
    assert tree(tmp_path) == {}


# -- max_shard_size --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1000, "1000", "1000B", "1KB", "1 kb", "0.001MB", "0.000001 GB"])
def test_sizes(tmp_path: Path, size: int | str) -> None:
    fdsd.save({f"w{i}": patterns((100,), torch.float32, i) for i in range(5)}, tmp_path, max_shard_size=size)
    assert sorted(os.listdir(tmp_path)) == [
        *[f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)],
        "model.safetensors.index.json",
    ]


@pytest.mark.parametrize("size", [0, -5, 1.5, "", "GB", "5 XB", "-1GB", "0", True, "5,000", "1e9"])
def test_sizes_that_are_none(tmp_path: Path, size: Any) -> None:
    with pytest.raises(SpecMismatch, match="max_shard_size"):
        fdsd.save(MIXED, tmp_path / "folder", max_shard_size=size)
    assert tree(tmp_path) == {}


@pytest.mark.parametrize("budget", [-1, "x", "1 XB", None, 2.5, True])
def test_budgets_that_are_none(tmp_path: Path, budget: Any) -> None:
    for name in ("x.safetensors", "folder", "x.pt"):
        with pytest.raises(SpecMismatch):
            fdsd.save(MIXED, tmp_path / name, budget=budget)
    assert tree(tmp_path) == {}


# -- what a file cannot hold -----------------------------------------------------------------------------------------


class Odd(torch.Tensor):
    """A subclass that fdsd does not know."""


@pytest.mark.parametrize(
    "entries, error, text",
    [
        ({"epoch": 3, "note": "x"}, Unsupported, "tensors only; these are none: 'epoch', 'note'"),
        ({"e": {"w": torch.ones(1)}}, Unsupported, "'e'"),
        ({"s": fdsd.TensorSpec((2,), torch.int8)}, SpecMismatch, "'s' have no data"),
        ({"m": torch.empty(2, device="meta")}, SpecMismatch, "'m' have no data"),
        ({"c": torch.ones(2, dtype=torch.complex128)}, Unsupported, r"c \(complex128\)"),
        ({"__metadata__": torch.ones(2)}, SpecMismatch, "__metadata__"),
        ({"x\ud800": torch.ones(2)}, SpecMismatch, "names"),
        ({"o": torch.ones(2).as_subclass(Odd)}, Unsupported, "Odd"),
        ({"sp": torch.eye(2).to_sparse()}, Unsupported, "to_dense"),
    ],
)
def test_what_safetensors_cannot_hold(tmp_path: Path, entries: Any, error: type[FdsdError], text: str) -> None:
    for path in (tmp_path / "x.safetensors", tmp_path / "folder"):
        with pytest.raises(error, match=text):
            fdsd.save({**MIXED, **entries}, path)
    assert tree(tmp_path) == {}


def test_many_offenders_are_counted(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"'n00'.*'n09' and 20 more"):
        fdsd.save({f"n{i:02}": i for i in range(30)}, tmp_path / "x.safetensors")


@pytest.mark.parametrize("state", ["x", None, [("w", torch.ones(1))], fdsd.TrainState(fdsd.StateDict())])
def test_what_is_no_state(tmp_path: Path, state: Any) -> None:
    for name in ("x.safetensors", "x.pt", "folder"):
        with pytest.raises(Unsupported, match=r"mapping of names to tensors.*The order is save\(state, path\)"):
            fdsd.save(state, tmp_path / name)
    assert tree(tmp_path) == {}


def test_what_the_error_says_of_an_optimizer_works(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    state = fdsd.capture(model, torch.optim.Adam(model.parameters()))
    with pytest.raises(Unsupported, match=r"save state.model, and flatten_optim\(\)\(state.optim\) as .pt"):
        fdsd.save(state, tmp_path / "x.safetensors")  # type: ignore[arg-type]
    assert state.optim is not None
    fdsd.save(fdsd.flatten_optim()(state.optim), tmp_path / "x.pt")
    assert_same(fdsd.unflatten_optim()(fdsd.open(tmp_path / "x.pt")), state.optim)


def test_names_are_text(tmp_path: Path) -> None:
    names: Any = {1: torch.ones(1)}
    with pytest.raises(SpecMismatch, match="1"):
        fdsd.save(names, tmp_path / "x.safetensors")


@pytest.mark.parametrize("leaf", [torch.ones(2).as_subclass(Odd), torch.eye(2).to_sparse()], ids=["class", "layout"])
def test_odd_tensors_are_named(tmp_path: Path, leaf: torch.Tensor) -> None:
    with pytest.raises(Unsupported) as caught:
        fdsd.save({**MIXED, "odd.one": leaf}, tmp_path / "x.safetensors")
    assert "odd.one" in "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])


def test_a_torch_file_under_the_name_of_the_other_format_opens(tmp_path: Path) -> None:
    fdsd.save(MIXED, tmp_path / "x.safetensors", format="torch")
    assert_file_holds(tmp_path / "x.safetensors", MIXED)


# -- budget ----------------------------------------------------------------------------------------------------------


def doubled(t: torch.Tensor) -> torch.Tensor:
    return t * 2


BIG = {"a": patterns((64, 1024), torch.int32), "b": patterns((1024,), torch.int32, 1)}
"""``a`` has 256 KiB; a function of it needs twice that at once."""


@pytest.fixture
def big(tmp_path: Path) -> fdsd.StateDict[Any]:
    fdsd.save(BIG, tmp_path / "big.safetensors")
    return fdsd.open(tmp_path / "big.safetensors")


def named_budget(error: OverBudget) -> int:
    found = re.search(r"Give a budget of at least (\d+)", str(error))
    assert found
    return int(found[1])


@pytest.mark.parametrize("name", ["x.safetensors", "x.pt", "folder"])
def test_over_the_budget_raises_before_anything_is_written(
    tmp_path: Path, big: fdsd.StateDict[Any], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("data was read")

    before = tree(tmp_path)
    monkeypatch.setattr("fdsd.storage.safetensors_source.SafetensorsSource.read", refuse)
    with pytest.raises(OverBudget, match=r"doubled.*bytes.*the budget is 500,000 bytes") as caught:
        fdsd.save(fdsd.map_tensors(doubled, "a")(big), tmp_path / name, budget="500KB")
    chunk = 0 if name == "x.pt" else named_budget(caught.value) // 4  # what is filled before it is written
    assert named_budget(caught.value) - chunk == 524_288
    assert tree(tmp_path) == before


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors"])
def test_the_named_budget_suffices(tmp_path: Path, big: fdsd.StateDict[Any], name: str) -> None:
    made = fdsd.map_tensors(doubled, "a")(big)
    with pytest.raises(OverBudget) as caught:
        fdsd.save(made, tmp_path / name, budget=1000)
    fdsd.save(made, tmp_path / name, budget=named_budget(caught.value))
    assert_file_holds(tmp_path / name, {**BIG, "a": BIG["a"] * 2})


PIPELINES: list[Callable[[], fdsd.Pipeline]] = [
    lambda: fdsd.identity,
    lambda: fdsd.cast(torch.float64, "{_}"),
    lambda: fdsd.transpose("a") >> fdsd.cast(torch.int16, "a"),
    lambda: fdsd.add_scalar("{_}", 3) >> fdsd.transpose("a"),
    lambda: fdsd.reshape("a", (-1, 1024)) >> fdsd.index_select("a", [*range(63, -1, -1)]) >> fdsd.pad("a", 70),
    lambda: fdsd.reshape("a", (-1,)) >> fdsd.concat(["b", "a"], "c", dim=0, groups=4),
    lambda: fdsd.split("a", ["a", "c"], dim=1, sizes=[1, 1023]) >> fdsd.map_tensors(doubled, "b"),
]


@given(st.sampled_from(PIPELINES), st.integers(8192, 1 << 20), st.sampled_from([1, 3000, 1 << 16, 1 << 24]))
@settings(max_examples=60)
def test_results_are_the_same_for_any_budget(
    tmp_path_factory: pytest.TempPathFactory, make: Callable[[], fdsd.Pipeline], budget: int, chunk: int
) -> None:
    folder, p = tmp_path_factory.mktemp("budget"), make()
    fdsd.save(BIG, folder / "big.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fdsd.engine.streaming._CHUNK", chunk)
        fdsd.save(p(fdsd.open(folder / "big.safetensors")), folder / "x.safetensors", budget=budget + (1 << 17))
    assert_file_holds(folder / "x.safetensors", p(BIG))


def test_a_budget_of_nothing_still_moves_and_casts(tmp_path: Path, big: fdsd.StateDict[Any]) -> None:
    p = fdsd.transpose("a") >> fdsd.cast(torch.float64, "a")
    fdsd.save(p(big), tmp_path / "x.safetensors", budget=0)
    assert_file_holds(tmp_path / "x.safetensors", p(BIG))


# -- metadata --------------------------------------------------------------------------------------------------------


def test_format_is_pt(tmp_path: Path) -> None:
    fdsd.save(MIXED, tmp_path / "folder", max_shard_size=50)
    for path in (tmp_path / "folder").glob("*.safetensors"):
        assert metadata_of(path) == {"format": "pt"}


def test_the_pipeline_is_recorded_and_can_be_pasted(tmp_path: Path) -> None:
    fdsd.save(MIXED, tmp_path / "a.safetensors")
    p = fdsd.pipe(
        fdsd.rename_fqns({"layers.{i}.w": "h.{i}.w", "{x}.bias": "{x}.b"}),
        fdsd.cast(torch.float16, "z.weight"),
        fdsd.concat(["h.{i}.w"], "h.{i}.qkv", dim=0),
        fdsd.drop("none"),
    )
    fdsd.save(p(fdsd.open(tmp_path / "a.safetensors")), tmp_path / "b", max_shard_size=50)
    for path in (tmp_path / "b").glob("*.safetensors"):
        found = metadata_of(path)
        assert found["format"] == "pt"
        assert eval(found["fdsd.pipeline"], {**vars(fdsd), "fdsd": fdsd, "torch": torch}) == p
        size = (tmp_path / "a.safetensors").stat().st_size
        assert json.loads(found["fdsd.sources"]) == [{"name": "a.safetensors", "size": size}]
    assert list(fdsd.open(tmp_path / "b")) == list(p(MIXED))


def test_steps_in_several_calls_are_one_pipeline(tmp_path: Path) -> None:
    first, second = fdsd.add_prefix("m."), fdsd.drop("m.none")
    state = fdsd.materialize(second(first(fdsd.defer(MIXED))))
    fdsd.save(state, tmp_path / "x.safetensors")
    found = metadata_of(tmp_path / "x.safetensors")
    assert eval(found["fdsd.pipeline"], vars(fdsd)) == first >> second
    assert "fdsd.sources" not in found  # it came from memory


def test_all_files_of_a_source_are_recorded(tmp_path: Path) -> None:
    fdsd.save(MIXED, tmp_path / "a", max_shard_size=60)
    torch.save({"extra": torch.ones(2)}, tmp_path / "e.pt")
    state = fdsd.combine(fdsd.open(tmp_path / "a"), fdsd.open(tmp_path / "e.pt"))
    fdsd.save(state, tmp_path / "b.safetensors")
    found = json.loads(metadata_of(tmp_path / "b.safetensors")["fdsd.sources"])
    paths = [*(tmp_path / "a").glob("*.safetensors"), tmp_path / "e.pt"]
    assert sorted((e["name"], e["size"]) for e in found) == sorted((p.name, p.stat().st_size) for p in paths)


def test_what_is_recorded_of_the_last_save_is_not_mixed_into_the_next(tmp_path: Path) -> None:
    fdsd.save(fdsd.add_prefix("m.")(fdsd.defer(MIXED)), tmp_path / "a.safetensors")
    fdsd.save(fdsd.open(tmp_path / "a.safetensors"), tmp_path / "b.safetensors")
    assert metadata_of(tmp_path / "b.safetensors").keys() == {"format", "fdsd.sources"}


def test_a_long_pipeline_is_recorded_in_part(tmp_path: Path) -> None:
    names = {f"w{i:05}": torch.tensor([i]) for i in range(3000)}
    p = fdsd.rename_fqns({name: f"renamed.to.a.longer.name.{name}" for name in names})
    fdsd.save(p(fdsd.defer(names)), tmp_path / "x.safetensors")
    found, whole = metadata_of(tmp_path / "x.safetensors")["fdsd.pipeline"], repr(p)
    kept, _, note = found.partition(" ... (")
    assert len(whole) > 100_000 and len(kept) == 64_000 and whole.startswith(kept)
    assert re.fullmatch(r"the last [\d.]+ kB of [\d.]+ kB are left out\)", note)


# -- what a power failure may take -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["x.safetensors", "folder", "x.pt"])
def test_only_what_replaces_something_waits_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    calls: list[int] = []
    sync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append(fd), sync(fd))[1])
    fdsd.save(MIXED, tmp_path / name)
    assert not calls
    fdsd.save(MIXED, tmp_path / name, overwrite=True)
    assert calls
    assert_file_holds(tmp_path / name, MIXED)


# -- paths and formats -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["x.SAFETENSORS", "x.Pt", "X.BIN"])
def test_case_does_not_matter(tmp_path: Path, name: str) -> None:
    fdsd.save(MIXED, tmp_path / name)
    assert (tmp_path / name).is_file()
    assert_file_holds(tmp_path / name, MIXED)


@pytest.mark.parametrize("path", [None, 3, b"x.safetensors", ["x"]])
def test_what_is_no_path(path: Any) -> None:
    with pytest.raises(Unsupported, match="A path is text"):
        fdsd.save(MIXED, path)
    with pytest.raises(Unsupported, match="A path is text"):
        fdsd.open(path)


def test_all_odd_tensors_are_named_at_once(tmp_path: Path) -> None:
    odd = {"o1": torch.ones(2).as_subclass(Odd), "s": torch.eye(2).to_sparse(), "o2": torch.ones(3).as_subclass(Odd)}
    with pytest.raises(Unsupported, match=r"'o1', 'o2': .*Odd.*; save: 's': .*to_dense"):
        fdsd.save({**MIXED, **odd}, tmp_path / "x.safetensors")


@given(st.integers(0, 1 << 20), st.integers(1, 5))
@settings(max_examples=40)
def test_any_budget_named_suffices(tmp_path_factory: pytest.TempPathFactory, budget: int, rows: int) -> None:
    """The check before and the run agree, whatever the budget: never an error in the middle of a save."""
    folder = tmp_path_factory.mktemp("named")
    state = {"a": torch.arange(rows * 20_000).reshape(rows, -1), "b": torch.arange(3)}
    made = (fdsd.map_tensors(doubled, "{_}") >> fdsd.cast(torch.float32, "a"))(fdsd.defer(state))
    try:
        fdsd.save(made, folder / "x.safetensors", budget=budget)
    except OverBudget as error:
        assert not (folder / "x.safetensors").exists()
        named = named_budget(error)
        assert named > budget
        fdsd.save(made, folder / "x.safetensors", budget=named)
    assert_file_holds(folder / "x.safetensors", {"a": (state["a"] * 2).float(), "b": state["b"] * 2})
