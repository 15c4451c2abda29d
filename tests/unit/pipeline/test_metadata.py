"""The versions that nn.Module keeps in ``_metadata`` follow the names, so that load_state_dict does what it should."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fdsd import (
    Pipeline,
    StateDict,
    add_prefix,
    cast,
    defer,
    drop,
    drop_prefix,
    identity,
    materialize,
    rename_fqns,
    select,
    specs,
    transpose,
)


class Versioned(torch.nn.Module):
    """A module that looks at the version it is loaded from."""

    _version = 7

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
        self.seen: Any = None

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
        self.seen = local_metadata.get("version")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2), Versioned())


def versions(state: StateDict[Any]) -> dict[str, int]:
    return {path: entry["version"] for path, entry in (state.metadata or {}).items()}


WHOLE = {"": 1, "0": 1, "1": 2, "2": 7}


@pytest.mark.parametrize(
    ("p", "expected"),
    [
        (identity, WHOLE),
        (rename_fqns({"1.{x}": "norm.{x}"}), {"": 1, "0": 1, "norm": 2, "2": 7}),
        (add_prefix("m."), {"m.0": 1, "m.1": 2, "m.2": 7}),
        (add_prefix("m.") >> drop_prefix("m."), WHOLE),
        (drop("1.{_}"), {"": 1, "0": 1, "2": 7}),
        (select("2.weight"), {"": 1, "2": 7}),
        (rename_fqns({"{i}.{x}": "{i+1}.{x}"}), {"": 1, "1": 1, "2": 2, "3": 7}),
    ],
    ids=str,
)
def test_versions_follow(p: Pipeline, expected: dict[str, int]) -> None:
    state = model().state_dict()
    for form in (state, defer(state), specs(state)):
        found = versions(p(form))
        assert {path: found.get(path) for path in expected} == expected
        assert not set(found) - set(expected) - {"", "m"}


@pytest.mark.parametrize(
    "p",
    [
        rename_fqns({"{i}.weight": "{i}.kernel"}),
        cast(torch.float64),
        cast(torch.float64, "{_...}"),
        transpose("2.weight"),
    ],
    ids=str,
)
def test_versions_stay_where_modules_stay(p: Pipeline) -> None:
    assert versions(p(model().state_dict())) == WHOLE


def test_a_root_module_moves_under_a_prefix_and_back() -> None:
    state = Versioned().state_dict()
    moved = add_prefix("v.")(state)
    assert versions(moved)["v"] == 7
    assert versions(drop_prefix("v.")(moved))[""] == 7


def test_states_without_metadata_have_none() -> None:
    assert rename_fqns({"a": "b"})({"a": torch.ones(1)}).metadata is None
    assert type(rename_fqns({"a": "b"})({"a": torch.ones(1)}).to_dict()) is dict


@pytest.mark.parametrize("form", [lambda x: x, lambda x: materialize(defer(x))])
def test_load_state_dict_sees_the_versions(form: Any) -> None:
    source, target = model(), model()
    p = rename_fqns({"{i}.{rest...}": "m.{i}.{rest...}"})
    wrapped = torch.nn.ModuleDict({"m": target})
    state = p(form(source.state_dict())).to_dict()
    assert wrapped.load_state_dict(state, strict=True).missing_keys == []
    assert target[2].seen == 7  # type: ignore[index]
    assert torch.equal(target[0].weight, source[0].weight)  # type: ignore[index]


def test_an_old_batch_norm_without_its_counter_loads() -> None:
    """Version 1 had no ``num_batches_tracked``; torch adds it for such states only."""
    source = torch.nn.BatchNorm1d(2).state_dict(prefix="bn.")
    source._metadata["bn"] = {"version": 1}  # type: ignore[attr-defined]
    del source["bn.num_batches_tracked"]
    p = rename_fqns({"bn.{x}": "norm.{x}"})
    target = torch.nn.ModuleDict({"norm": torch.nn.BatchNorm1d(2)})
    target.load_state_dict(p(source).to_dict(), strict=True)
    new = torch.nn.BatchNorm1d(2).state_dict(prefix="bn.")
    del new["bn.num_batches_tracked"]
    with pytest.raises(RuntimeError, match="num_batches_tracked"):
        target.load_state_dict(p(new).to_dict(), strict=True)


def test_the_input_keeps_its_own() -> None:
    state = model().state_dict()
    before = dict(state._metadata)  # type: ignore[attr-defined]
    made = add_prefix("m.")(state)
    assert dict(state._metadata) == before  # type: ignore[attr-defined]
    with pytest.raises(TypeError):
        made.metadata["x"] = 1  # type: ignore[index]
