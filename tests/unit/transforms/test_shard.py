"""``shard_with``, ``reshard`` and ``gather``: by examples, with their errors, inverses and texts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fdsd
from fdsd import (
    Grade,
    Lazy,
    ModelSpec,
    OptimState,
    ParamGroup,
    Sharded,
    StateDict,
    TensorEntry,
    TensorSpec,
    TrainState,
    add_prefix,
    concat,
    defer,
    from_shards,
    gather,
    local_shards,
    materialize,
    reshard,
    shard_with,
    specs,
    transpose,
)
from fdsd.data.errors import FdsdError, NotInvertible, SpecMismatch, UnknownName, Unsupported
from fdsd.layout import Layout, Mesh, Replicate, Shard
from fdsd.testing import assert_laws, assert_round_trip, assert_same

ROWS, COLUMNS = (Layout(Mesh({"tp": 2}), [Shard(dim)]) for dim in (0, 1))
THREE = Layout(Mesh({"dp": 3}), [Shard(0)])
W, B = torch.arange(12).reshape(4, 3), torch.arange(100, 105)
STATE = StateDict({"w": W, "b": B, "tied": W, "_extra_state": {"n": 1}})


def test_shard_with_one_layout() -> None:
    made = shard_with(ROWS)(STATE)
    assert [made[name].layout for name in "wb"] == [ROWS, ROWS]
    assert made["tied"] is made["w"]
    assert made["_extra_state"] is STATE["_extra_state"]
    assert made["w"].shard(1).tolist() == [[6, 7, 8], [9, 10, 11]]


def test_shard_with_a_table_lets_others_pass() -> None:
    made = shard_with({"tie{_}": COLUMNS})(STATE)
    assert made["b"] is B
    assert made["w"] is made["tied"] and made["w"].layout == COLUMNS


def test_shard_with_a_model_spec() -> None:
    entry = TensorEntry(TensorSpec((4, 3), torch.int64), layout=ROWS.to_data())
    p = shard_with(ModelSpec({"w": entry, "tied": TensorEntry(entry.spec, tied_to="w"), "gone": entry}))
    made = p(STATE)
    assert made["w"].layout == ROWS and made["w"] is made["tied"] and made["b"] is B
    assert_laws(p, STATE)


def test_texts_and_grades() -> None:
    p = shard_with({"w": ROWS, "b?": THREE})
    assert repr(p) == f"shard_with({{'w': {ROWS}, 'b?': {THREE}}})"
    assert repr(~p) == "gather()" and ~p == gather() and ~~p == p
    assert (p.grade, (~p).grade, gather().grade) == (Grade.EXACT, Grade.EXACT, Grade.NONE)
    assert repr(gather(3)) == "gather(3)"
    back = reshard(ROWS, from_placement=COLUMNS)
    assert repr(back) == f"reshard({ROWS}, from_placement={COLUMNS})"
    assert ~back == reshard(COLUMNS, from_placement=ROWS) and back.grade is Grade.EXACT
    assert reshard(ROWS).grade is Grade.NONE
    text = str(p.explain({"w": W, "b": B}))
    assert "shard_with(" in text and "w: int64[4, 3]" in text
    assert p.check({"w": W}).ok and not p.check({"b": B}).ok
    assert p.bind(STATE) == p


def test_the_inverse_gathers_what_was_sharded_alone() -> None:
    other = shard_with({"b": ROWS})(STATE)
    p = shard_with({"w": ROWS})
    there = p(other)
    assert isinstance(there["w"], Sharded)
    back = (~p)(there)
    assert back == other and back["b"] is other["b"]
    assert_round_trip(shard_with({"{_...}": ROWS}), STATE)


def test_laws_of_the_others() -> None:
    sharded = shard_with({"w": ROWS})(STATE)
    assert_laws(reshard({"w": COLUMNS}, from_placement={"w": ROWS}), sharded)
    assert_laws(gather(), STATE)
    assert_laws(gather(1), STATE)
    assert_laws(transpose("w") >> shard_with({"w": ROWS}) >> add_prefix("m."), {"w": W})


@pytest.mark.parametrize(
    "run, error, text",
    [
        (lambda: shard_with(ROWS)(shard_with({"w": ROWS})(STATE)), Unsupported, "already: 'tied', 'w'. Use reshard"),
        (lambda: shard_with(COLUMNS)(STATE), SpecMismatch, "making 'b' from 'b' int64.5.: .*shards dim 1"),
        (lambda: shard_with({"z": ROWS, "b": COLUMNS})(STATE), UnknownName, "no name matches 'z' among 3"),
        (lambda: shard_with({"w": ROWS, "tied": COLUMNS})(STATE), SpecMismatch, "'tied', 'w' are one tensor"),
        (lambda: shard_with({"_extra_state": ROWS})(STATE), UnknownName, "no name matches '_extra_state'"),
        (lambda: ~gather(), NotInvertible, "Use shard_with"),
        (lambda: ~gather(2), NotInvertible, "Use shard_with"),
        (lambda: ~reshard(ROWS), NotInvertible, "Give from_placement="),
        (lambda: reshard({"w": ROWS}, from_placement={"w": THREE})(STATE), SpecMismatch, "'w' is wholly here"),
        (
            lambda: reshard({"w": ROWS}, from_placement={"w": THREE})(shard_with({"w": ROWS})(STATE)),
            SpecMismatch,
            r"'w' is Sharded\(.*not laid out as from_placement says: .*'dp': 3",
        ),
        (
            lambda: reshard({"w": ROWS}, from_placement={"b": THREE})(defer(STATE)),
            NotInvertible,
            "only one side lays out: 'b', 'tied', 'w'",
        ),
        (lambda: gather("some"), SpecMismatch, "'all' or the number of a rank, not 'some'"),  # type: ignore[arg-type]
        (lambda: gather({"w": torch.ones(1)}), SpecMismatch, r"not a state. Write gather\(\)\(state\)"),  # type: ignore[arg-type]
        (lambda: gather(-1), SpecMismatch, "from 0 on, not -1"),
        (lambda: gather(True), SpecMismatch, "whole number, not True"),
        (lambda: shard_with(3), Unsupported, "shard_with: layouts are given as"),  # type: ignore[arg-type]
        (lambda: reshard({}), Unsupported, "reshard: there are no layouts"),
    ],
)
def test_errors(run: Callable[[], Any], error: type[FdsdError], text: str) -> None:
    with pytest.raises(error, match=text):
        run()


def test_all_that_does_not_fit_is_told_at_once() -> None:
    with pytest.raises(SpecMismatch) as caught:
        shard_with(COLUMNS)({"a": B, "c": torch.tensor(1), "w": W})
    assert all(f"making {name!r}" in str(caught.value) for name in "ac")
    report = shard_with(COLUMNS).check({"a": B, "c": torch.tensor(1)})
    assert len(report.findings) == 2


def test_reshard_from_4_to_6_ranks() -> None:
    four, six = (Layout(Mesh({"dp": n}), [Shard(0)]) for n in (4, 6))
    tensor = torch.arange(7)
    real = from_shards([{"t": shard_with(four)({"t": tensor})["t"].shard(r).clone()} for r in range(4)], four)
    made = reshard(six)(real)
    assert made["t"].layout == six
    assert [local_shards(materialize(made), r)["t"].tolist() for r in range(6)] == [[0, 1], [2, 3], [4, 5], [6], [], []]
    assert reshard(four)(real)["t"] is real["t"]


def test_gather_on_one_rank() -> None:
    made = gather(5)(shard_with({"w": ROWS})(STATE))
    assert made["w"].layout == made["b"].layout == Layout(Mesh({"rank": 1}, [5]), [Replicate()])
    assert made["tied"] is made["w"] and made["w"].shard(5) is W
    assert list(local_shards(made, 0)) == ["_extra_state"]


def test_gather_of_real_pieces_gives_tensors_and_of_one_rank_an_expression() -> None:
    parts = {rank: shard_with(ROWS)({"w": W})["w"].shard(rank) for rank in (0, 1)}
    spec = TensorSpec((4, 3), torch.int64)
    assert torch.equal(gather()({"w": Sharded(spec, ROWS, shards=parts)})["w"], W)
    one = gather()({"w": Sharded(spec, ROWS, shards={1: parts[1]})})["w"]
    assert isinstance(one, Lazy) and one.spec == spec
    three = {"w": Sharded(spec, THREE, shards={0: W[:2], 2: W[:0]})}
    with pytest.raises(FdsdError, match=r"making 'w'.*the shard of rank 1 is not here"):
        gather()(three)


def test_optimizer_state() -> None:
    other = torch.arange(4.0)
    optim = OptimState(
        {"exp_avg": {"w": W.float(), "b": B.float()}, "step": {"w": torch.tensor(3.0), "b": 4}},
        (ParamGroup(("w", "b"), {"lr": 0.5}),),
    )
    state = TrainState(StateDict({"w": W, "b": B}), optim, {"epoch": 1})
    p = shard_with({"w": COLUMNS, "b": ROWS})
    made = p(state)
    assert made.optim is not None
    assert {n: x.layout for n, x in made.optim.slots["exp_avg"].items()} == {"w": COLUMNS, "b": ROWS}
    assert made.optim.slots["step"] == optim.slots["step"]
    assert (~p)(made) == state
    assert_laws(p, state)
    alone = p(optim)
    assert_same(alone, made.optim)
    on_one = gather(1)(made)
    assert on_one.optim is not None
    assert on_one.optim.slots["step"]["w"].layout == Layout(Mesh({"rank": 1}, [1]), [Replicate()])
    assert on_one.optim.slots["step"]["b"] == 4
    factored = state.optim.replace(slots={"row": {"w": other}}) if state.optim else None
    with pytest.raises(Unsupported, match=r"slot 'row' of 'w' is float32.4., not of the parameter's shape"):
        p(TrainState(state.model, factored))
    assert gather()(TrainState(state.model, factored)) == TrainState(state.model, factored)
    resharded = reshard({"w": ROWS, "b": ROWS})(made)
    assert resharded.optim is not None and resharded.optim.slots["exp_avg"]["w"].layout == ROWS
    local = local_shards(made, 1)
    assert local.optim is not None
    assert local.optim.slots["exp_avg"]["w"].tolist() == W[:, 2:].float().tolist()


def test_coverage_plan_and_why_see_through_layouts() -> None:
    p = concat(["q", "k"], "qk", dim=0) >> shard_with({"qk": ROWS})
    state = {"q": W, "k": W + 100, "v": W + 200}
    assert p.coverage(state).is_exact_cover
    assert len(p.plan(state).reads) == 3
    assert p.why(state, "qk", (5, 1)).sources[0].index == (1, 1)  # type: ignore[union-attr]
    assert (p >> gather(1)).coverage(state).is_exact_cover


def test_saving_sharded_states(tmp_path: Path) -> None:
    plain = {name: STATE[name] for name in ("w", "b", "tied")}
    sharded = shard_with({"w": ROWS, "b": THREE})(plain)
    real = from_shards(
        [local_shards(shard_with({"{_...}": THREE})(plain), rank) for rank in range(3)], {"{_...}": THREE}
    )
    for number, state in enumerate((sharded, real)):
        for suffix in ("safetensors", "pt"):
            path = tmp_path / f"{number}.{suffix}"
            fdsd.save(state, path)
            got = materialize(fdsd.open(path))
            assert_same(got, plain)
    assert fdsd.diff(sharded, plain).same and fdsd.diff(plain, real).same
    assert specs(sharded) == specs(plain)
