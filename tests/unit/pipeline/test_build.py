"""Making the leaves of a rewrite: equal things once, faults collected with their names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fdsd.algebra.apply import Applier
from fdsd.algebra.ops import Permute
from fdsd.data.errors import SpecMismatch
from fdsd.data.problem import Problem
from fdsd.pipeline.build import build_leaves
from fdsd.pipeline.rewrite import UNKNOWN, Assign, Rewrite, keep

W = torch.arange(6.0).reshape(2, 3)


def turn(apply: Applier, leaves: Sequence[Any]) -> Any:
    return apply(Permute((1, 0)), *leaves)


def fail(apply: Applier, leaves: Sequence[Any]) -> Any:
    raise SpecMismatch("no.")


def test_leaves_without_build_pass_by_identity() -> None:
    problems: list[Problem] = []
    made = build_leaves(Rewrite((keep("o"), Assign("b", ("a",)))), {"a": W, "o": None}, problems)
    assert made["o"] is None and made["b"] is W and list(made) == ["o", "b"] and not problems


def test_equal_operations_on_tied_leaves_are_made_once() -> None:
    rewrite = Rewrite((Assign("x", ("a",), turn), Assign("y", ("b",), turn), Assign("z", ("c",), turn)))
    made = build_leaves(rewrite, {"a": W, "b": W, "c": W.clone()}, [])
    assert made["x"] is made["y"] is not made["z"]


def test_faults_become_problems_with_all_names_and_specs() -> None:
    problems: list[Problem] = []
    rewrite = Rewrite((Assign("x", ("a", "o"), fail), Assign("y", ("a",), turn), Assign("z", ("u",), turn)))
    made = build_leaves(rewrite, {"a": W, "o": "text", "u": UNKNOWN}, problems)
    assert made["x"] is UNKNOWN is made["z"] and made["y"].shape == (3, 2)
    assert [problem.message for problem in problems] == ["making 'x' from 'a' float32[2, 3], 'o' str: no."]
    assert problems[0].kind == "spec" and problems[0].names == ("x", "a", "o")


def test_many_sources_are_counted() -> None:
    problems: list[Problem] = []
    leaves = {f"{i}": W for i in range(14)}
    build_leaves(Rewrite((Assign("x", tuple(leaves), fail),)), leaves, problems)
    assert "and 4 more: no." in problems[0].message


def test_two_assignments_of_one_name_are_a_collision() -> None:
    rewrite = Rewrite.of([keep("a"), Assign("a", ("b",)), Assign("a", ("c",)), keep("d")])
    assert [problem.kind for problem in rewrite.problems] == ["collision"]
    assert rewrite.problems[0].names == ("a", "b", "c")
    assert [assign.target for assign in rewrite.assigns] == ["a", "d"]
