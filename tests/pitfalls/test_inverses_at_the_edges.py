"""Inverses of bound pipelines where names could be taken for others, and ties through verbs that add elements."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fdsd import Pipeline, TensorSpec, concat, defer, materialize, pad, specs, split, stack, tie, unstack
from fdsd.data.ties import ties
from fdsd.errors import NotInvertible

X = torch.arange(4.0)


@pytest.mark.parametrize(
    ("p", "state"),
    [
        (unstack("zz?", "b.{j}"), {"b.0": X, "b.1": X + 4}),
        (stack("zz.{i}", "b?"), {"b": torch.stack([X, X + 4])}),
        (concat(["z0", "z1"], "b?", dim=0, sizes=[1, 3]), {"b": X}),
        (split("zz?", ["z0", "z1"], dim=0, sizes=[1, 3]), {"z0": X[:1], "z1": X[1:]}),
        (tie({"d": "a"}), {"d": X, "a": X.clone()}),
        (tie({"d": "a"}), {"d": X, "a": X}),
    ],
    ids=str,
)
def test_what_did_not_come_from_a_step_is_not_undone_by_its_inverse(p: Pipeline, state: dict[str, Any]) -> None:
    p(state)
    with pytest.raises(NotInvertible):
        ~p.bind(state)


@pytest.mark.parametrize("p", [pad(["embed", "head"], 6), pad(["embed", "head"], 4, dim=1)], ids=str)
def test_padding_all_names_of_a_tensor_keeps_it_one_tensor(p: Pipeline) -> None:
    w = torch.arange(8.0).reshape(4, 2)
    state = {"embed": w, "head": w, "other": w + 1}
    for made in (p(state), materialize(p(defer(state)))):
        assert made["embed"] is made["head"]
    assert ties(p(specs(state))) == [("embed", "head")]
    assert p(specs(state))["embed"] == TensorSpec(p(state)["embed"].shape, torch.float32)
