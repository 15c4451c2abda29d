"""Reading placements: one layout, rules in order, tables by name, a model's spec; and all that is wrong with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fdsd import ModelSpec, StateDict, Template, TensorEntry, TensorSpec
from fdsd.data.errors import BadPattern, FdsdError, SpecMismatch, Unsupported
from fdsd.layout import Layout, Mesh, Replicate, Shard
from fdsd.layout.tables import Table, layouts_of

MESH = Mesh({"tp": 2})
ROWS, COLUMNS, ALL = (Layout(MESH, [placement]) for placement in (Shard(0), Shard(1), Replicate()))
NAMES = ["layers.0.q.weight", "layers.0.o.weight", "layers.1.q.weight", "norm.weight", "norm.bias"]


def resolved(placing: Any, names: list[str] = NAMES) -> dict[str, Layout]:
    found, problems = Table.of("shard_with", placing).resolve(names)
    assert problems == []
    return found


def test_one_layout_is_for_all() -> None:
    assert resolved(ROWS) == dict.fromkeys(NAMES, ROWS)
    assert resolved(ROWS, []) == {}


def test_the_first_rule_that_matches_wins() -> None:
    table = {"layers.0.q.weight": ALL, "{_...}.q.weight": ROWS, Template("layers.{i}.o.weight"): COLUMNS, "zz?": ALL}
    assert resolved(table) == {
        "layers.0.q.weight": ALL,
        "layers.0.o.weight": COLUMNS,
        "layers.1.q.weight": ROWS,
    }
    assert resolved({"{_...}": ROWS, "norm.bias?": ALL}) == dict.fromkeys(NAMES, ROWS)
    assert resolved({"norm.{_}": ROWS, "norm.bias?": ALL})["norm.bias"] == ROWS
    assert resolved({"norm.bias": ALL, "norm.{_}": ROWS})["norm.bias"] == ALL


def test_a_state_dict_is_by_name() -> None:
    names = ["a{b}", "a.b?", "c"]
    assert resolved(StateDict({"a{b}": ROWS, "a.b?": ALL}), names) == {"a{b}": ROWS, "a.b?": ALL}
    _, problems = Table.of("shard_with", StateDict({"c": ROWS, "d": ROWS})).resolve(names)
    assert [problem.kind for problem in problems] == ["unmatched rule"]


def test_a_model_spec_names_what_may_be_absent() -> None:
    spec = TensorSpec((4, 4), torch.float32)
    entries = {
        "embed": TensorEntry(spec, layout=ROWS.to_data()),
        "head": TensorEntry(spec, tied_to="embed"),
        "norm": TensorEntry(spec),
        "gone": TensorEntry(spec, layout=ALL.to_data()),
    }
    model = ModelSpec(entries)
    assert layouts_of(model) == {"embed": ROWS, "head": ROWS, "gone": ALL}
    assert layouts_of(ModelSpec.from_json(model.to_json())) == layouts_of(model)
    assert resolved(model, ["embed", "head", "norm"]) == {"embed": ROWS, "head": ROWS}


def test_rules_that_win_nothing_are_told_with_what_would_match() -> None:
    table = {"{_...}.weight": ROWS, "norm.weight": ALL, "layers.{i}.q.bias": ALL, "norm.bais": ALL, "zz.{_}?": ALL}
    found, problems = Table.of("shard_with", table).resolve(NAMES)
    assert set(found) == {name for name in NAMES if name.endswith("weight")}
    assert [problem.kind for problem in problems] == ["shadowed rule", "unmatched rule", "unmatched rule"]
    texts = [problem.message for problem in problems]
    assert "'norm.weight'" in texts[0] and "Put it first." in texts[0]
    assert "'layers.{i}.q.weight' would match" in texts[1]
    assert "the nearest name is 'norm.bias'" in texts[2]


def test_tied_names_have_one_layout() -> None:
    ties = {"a": 1, "b": 1, "c": None, "d": 2}
    found, problems = Table.of("shard_with", {"b": ROWS, "c": ALL}).resolve(list(ties), ties)
    assert found == {"a": ROWS, "b": ROWS, "c": ALL} and not problems
    _, problems = Table.of("shard_with", {"a": COLUMNS, "b": ROWS}).resolve(list(ties), ties)
    assert [(problem.kind, problem.names) for problem in problems] == [("spec", ("a", "b"))]


@pytest.mark.parametrize("placing", [ROWS, {"a.{_}?": ROWS, "{_...}": ALL}, StateDict({"x{": ROWS})])
def test_source_text(placing: Any) -> None:
    table = Table.of("shard_with", placing)
    names = {"Layout": Layout, "Mesh": Mesh, "Shard": Shard, "Replicate": Replicate}
    assert Table.of("shard_with", eval(table.call_text(), names)) == table
    assert list(table.layouts) == list(dict.fromkeys([ROWS] if placing is ROWS else placing.values()))


@pytest.mark.parametrize(
    "placing, error, text",
    [
        (3, Unsupported, "not as int. Write Layout"),
        ([ROWS], Unsupported, "not as list"),
        ({}, Unsupported, "there are no layouts"),
        ({"a": ROWS, "c": Shard(0), "b": None}, Unsupported, "given no Layout: 'b', 'c'"),
        ({3: ROWS}, BadPattern, "a str each, not 3"),
        ({"a.{": ROWS}, BadPattern, "^shard_with: "),
        (
            ModelSpec({"w": TensorEntry(TensorSpec((1,), torch.int8))}),
            Unsupported,
            "ModelSpec of 1 name has no layouts. Describe a sharded model",
        ),
        (
            ModelSpec({n: TensorEntry(TensorSpec((1,), torch.int8), layout={"no": 1}) for n in "vw"}),
            SpecMismatch,
            "'v': .*'w': ",
        ),
    ],
)
def test_what_is_no_placement(placing: Any, error: type[FdsdError], text: str) -> None:
    with pytest.raises(error, match=text):
        Table.of("shard_with", placing)
