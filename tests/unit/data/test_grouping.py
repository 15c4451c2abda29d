"""Groups for concat, stack, split and unstack: whole or told, in order, and undone by their inverses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fdsd.data.errors import BadPattern, IncompleteGroup, NameConflict, UnknownName
from fdsd.data.grouping import (
    Group,
    Spread,
    check_groups_round_trip,
    check_indexed,
    check_many,
    group_indexed,
    group_many,
    group_split,
    group_unindexed,
)
from fdsd.data.problem import Problem, describe
from fdsd.data.rules import RuleTable
from fdsd.data.template import Template


def T(text: str) -> Template:
    return Template(text)


def messages(problems: Sequence[Problem], kind: str) -> list[str]:
    assert {problem.kind for problem in problems} <= {kind}, problems
    return [problem.message for problem in problems]


def position_of(names: Sequence[str], members: Sequence[str]) -> int:
    return min(names.index(member) for member in members)


# -------------------------------------------------------------------------------------- many to one, by list

QKV = [T("l.{i}.q"), T("l.{i}.k"), T("l.{i}.v")]
present = st.dictionaries(st.integers(0, 12), st.sets(st.sampled_from("qkv")), max_size=6)
others = st.lists(st.sampled_from(["norm", "l.0.o", "l.1.qkv", "x.q", "l.a.b.q", "l.q"]), unique=True, max_size=4)


@given(present, others, st.randoms(use_true_random=False))
def test_groups_are_whole_or_told(parts: dict[int, set[str]], rest: list[str], random: Any) -> None:
    names = [f"l.{i}.{x}" for i, have in parts.items() for x in have] + rest
    random.shuffle(names)
    found = group_many(QKV, T("l.{i}.qkv?"), names)
    whole = {i for i, have in parts.items() if len(have) == 3}
    torn = {i for i, have in parts.items() if 0 < len(have) < 3}
    assert {group.target for group in found.groups} == {f"l.{i}.qkv" for i in whole | torn}
    for group in found.groups:
        i = int(group.target.split(".")[1])
        assert group.members == tuple(f"l.{i}.{x}" for x in "qkv" if x in parts[i])
        assert group.absent == tuple(f"l.{i}.{x}" for x in "qkv" if x not in parts[i])
        assert group.is_complete == (i in whole)
        assert group.position == position_of(names, group.members)
    assert [group.position for group in found.groups] == sorted(group.position for group in found.groups)
    told = {problem.names for problem in found.problems if problem.kind == "partial group"}
    assert told == {(*group.absent, *group.members) for group in found.groups if not group.is_complete}
    collides = "l.1.qkv" in names and 1 in whole | torn
    assert [p.names for p in found.problems if p.kind == "collision"] == ([("l.1.qkv",)] if collides else [])


@given(present, others)
def test_split_undoes_concat(parts: dict[int, set[str]], rest: list[str]) -> None:
    names = [f"l.{i}.{x}" for i in parts for x in "qkv"] + [name for name in rest if name != "l.1.qkv"]
    forward = group_many(QKV, T("l.{i}.qkv?"), names)
    after = forward.rewrite(names)
    back = group_split(T("l.{i}.qkv?"), QKV, after)
    assert forward.problems == back.problems == []
    assert check_groups_round_trip(forward, back) == []
    assert back.rewrite(after) == names
    assert [group.position for group in back.groups] == [after.index(group.source) for group in back.groups]


def test_members_keep_the_order_of_the_list_and_the_result_stands_first() -> None:
    names = ["emb", "0.v", "norm", "1.k", "0.q", "1.v", "0.k", "1.q"]
    found = group_many([T("{i}.q"), T("{i}.k"), T("{i}.v")], T("{i}.qkv"), names)
    assert found.problems == []
    assert found.groups == [
        Group("0.qkv", ("0.q", "0.k", "0.v"), 1),
        Group("1.qkv", ("1.q", "1.k", "1.v"), 3),
    ]
    assert found.rewrite(names) == ["emb", "0.qkv", "norm", "1.qkv"]


def test_a_rule_without_holes_is_one_group() -> None:
    assert group_many([T("q"), T("k")], T("qk"), ["k", "q"]).groups == [Group("qk", ("q", "k"), 0)]


def test_all_partial_groups_are_told() -> None:
    found = group_many(QKV, T("l.{i}.qkv"), ["l.0.q", "l.0.k", "l.1.q", "l.1.k", "l.1.v", "l.2.v", "l.0.vv"])
    assert messages(found.problems, "partial group") == [
        (
            "'l.0.qkv' lacks 'l.0.v'; 'l.0.q', 'l.0.k' are there. Each group must be whole; the nearest name to "
            "'l.0.v' is 'l.0.vv'."
        ),
        "'l.2.qkv' lacks 'l.2.q', 'l.2.k'; 'l.2.v' is there. Each group must be whole.",
    ]
    assert [group.is_complete for group in found.groups] == [False, True, False]
    assert all(problem.error is IncompleteGroup for problem in found.problems)


def test_an_optional_target_excuses_absence_but_no_partial_group() -> None:
    assert group_many(QKV, T("l.{i}.qkv?"), ["norm"]).problems == []
    assert len(group_many(QKV, T("l.{i}.qkv?"), ["l.0.q"]).problems) > 0
    problem = group_many(QKV, T("l.{i}.qkv"), ["m.l.0.q", "m.l.0.k", "m.l.0.v"]).problems[0]
    assert problem.error is UnknownName
    assert problem.message == (
        "'l.{i}.q', 'l.{i}.k', 'l.{i}.v' match none of 3 names; 'm.l.{i}.q' would match 1 name, such as "
        "'m.l.0.q'. Correct it, or write 'l.{i}.qkv?' if it may match nothing."
    )


def test_a_source_that_matches_nothing_is_told_first() -> None:
    found = group_many([T("{i}.q"), T("{i}.kk")], T("{i}.qk"), ["0.q", "0.k", "1.q", "1.k"])
    assert [problem.kind for problem in found.problems] == [
        "unmatched rule",
        "partial group",
        "partial group",
    ]
    assert found.problems[0].message == (
        "'{i}.kk' matches none of 4 names; '{i}.k' would match 2 names, such as '0.k'. Correct it."
    )


def test_a_name_won_by_two_patterns_is_told() -> None:
    found = group_many([T("{a}.{b}"), T("{b}.{a}")], T("t.{a}.{b}"), ["x.y", "y.x"])
    told = [problem for problem in found.problems if problem.kind == "two patterns"]
    assert [problem.names for problem in told] == [("x.y",), ("y.x",)]
    assert told[0].message == "'x.y' matches 2 patterns: '{a}.{b}', '{b}.{a}'. Make them exclude each other."
    assert told[0].error is NameConflict


def test_collisions_with_what_stays_and_among_groups() -> None:
    found = group_many([T("{i}.q"), T("{i}.k")], T("{i}.qk"), ["0.q", "0.k", "0.qk", "1.q", "1.k"])
    assert messages(found.problems, "collision") == [
        "'0.q', '0.k' would become '0.qk', which is there already. Drop or rename it first."
    ]
    found = group_many([T("{a}.{b}.q"), T("{a}.{b}.k")], T("{a}_{b}"), ["x.y_z.q", "x.y_z.k", "x_y.z.q", "x_y.z.k"])
    assert messages(found.problems, "collision") == [
        "2 groups map to 'x_y_z': 'x.y_z.q', 'x.y_z.k'; 'x_y.z.q', 'x_y.z.k'. Make the patterns differ."
    ]


def test_a_target_may_take_the_name_of_a_member() -> None:
    found = group_many([T("{i}.w"), T("{i}.v")], T("{i}.w"), ["0.w", "0.v"])
    assert found.problems == []
    assert found.rewrite(["0.w", "0.v"]) == ["0.w"]


def test_ranges_hold_for_the_whole_rule() -> None:
    names = ["0.q", "0.k", "7.q", "a.k"]
    found = group_many([T("{i}.q"), T("{i}.k")], T("{i:0..3}.qk"), names)
    assert found.problems == []
    assert found.rewrite(names) == ["0.qk", "7.q", "a.k"]
    found = group_many([T("{i}.q"), T("{i}.k")], T("s.{i-2}"), ["2.q", "2.k", "1.q"])
    assert [group.target for group in found.groups] == ["s.0"]


@pytest.mark.parametrize(
    "sources, target, message",
    [
        ([], "t", "no patterns go with it"),
        (["{i}.q", "k"], "{i}.qk", "'k' lacks {i}; all patterns share their holes"),
        (["{i}.{x}"], "{i}", "{x} of '{i}.{x}' is not in '{i}', so a group could hold several of its names"),
        (["{i}.q", "{i}.q"], "{i}.t", "'{i}.q' stands more than once"),
        (["{i}.q?", "{i}.k"], "{i}.t", "'{i}.q?': the '?' stands on the single pattern; write '{i}.t?'"),
        (["{r...}.q"], "{r}.t", "written both with and without '...'"),
        (["{i:0..3}.q", "{i}.k"], "{i:5..6}.t", "hole i: no value fits"),
    ],
)
def test_patterns_that_cannot_be_grouped(sources: list[str], target: str, message: str) -> None:
    every: list[Callable[[], Any]] = [
        lambda: check_many([T(s) for s in sources], T(target)),
        lambda: group_many([T(s) for s in sources], T(target), []),
        lambda: group_split(T(target), [T(s) for s in sources], []),
    ]
    for call in every:
        with pytest.raises(BadPattern) as caught:
            call()
        assert message in str(caught.value)


def test_unnamed_holes_cannot_be_grouped() -> None:
    with pytest.raises(BadPattern, match="for select and drop only"):
        check_many([Template.selector("{_}.q")], T("t"))
    with pytest.raises(BadPattern, match="for select and drop only"):
        check_indexed(Template.selector("{_}.{e}"), T("t"))


# ------------------------------------------------------------------------------------- many to one, by index

EXPERTS, STACKED = T("l.{i}.e.{e}.{w}"), T("l.{i}.{w}?")
index_sets = st.one_of(
    st.integers(1, 5).map(lambda n: set(range(n))), st.sets(st.integers(0, 9), min_size=1, max_size=6)
)
tables = st.dictionaries(st.tuples(st.integers(0, 2), st.sampled_from(["w1", "w2"])), index_sets, max_size=5)


def expert_names(table: dict[tuple[int, str], set[int]]) -> list[str]:
    return [f"l.{i}.e.{e}.{w}" for (i, w), have in table.items() for e in have]


@given(tables, st.one_of(st.none(), st.integers(1, 6)), st.randoms(use_true_random=False))
@example({(0, "w1"): {0, 1}, (1, "w1"): {0}}, None, None)
def test_index_sets_are_whole_or_told(table: dict[tuple[int, str], set[int]], num: int | None, random: Any) -> None:
    names = expert_names(table)
    if random is not None:
        random.shuffle(names)
    found = group_indexed(EXPERTS, STACKED, names, num=num)
    sizes = {len(have) for have in table.values()} if num is None else {num}
    is_fine = not table or (len(sizes) == 1 and all(have == set(range(*sizes)) for have in table.values()))
    assert (found.problems == []) == is_fine
    assert {problem.kind for problem in found.problems} <= {"ragged indices"}
    members = [member for group in found.groups for member in group.members]
    assert len(set(members)) == len(members)
    for group in found.groups:
        _, i, w = group.target.split(".")
        indices = [int(member.split(".")[3]) for member in group.members]
        assert indices == sorted(indices)
        assert set(indices) <= table[int(i), w]
        assert group.position == position_of(names, group.members)
        if group.is_complete:
            assert indices == list(range(len(indices)))
            assert num in (None, len(indices))
    if is_fine:
        assert len(found.groups) == len(table)
        assert all(group.is_complete for group in found.groups)
    told = {name for problem in found.problems for name in problem.names}
    assert set(names) - set(members) <= told  # what is left over is named


@given(tables, st.integers(1, 4))
def test_unstack_undoes_stack(table: dict[tuple[int, str], set[int]], num: int) -> None:
    names = ["norm", *expert_names({key: set(range(num)) for key in table})]
    forward = group_indexed(EXPERTS, STACKED, names)
    after = forward.rewrite(names)
    for count in (num, lambda name: num):
        back = group_unindexed(STACKED, EXPERTS, after, count)
        assert forward.problems == back.problems == []
        assert check_groups_round_trip(forward, back) == []
        assert back.rewrite(after) == names


@pytest.mark.parametrize(
    "indices, num, message",
    [
        ([0, 1, 2, 7], None, "'e.w': index e must be 0..3; it lacks 3, and 7 is a stray."),
        ([0, 2, 3], None, "'e.w': index e must be 0..3; it lacks 1."),
        ([1, 2, 3], None, "'e.w': index e must be 0..3; it lacks 0."),
        ([0, 1, 2], 4, "'e.w': index e must be 0..3; it lacks 3."),
        ([0, 1, 2, 3], 3, "'e.w': index e must be 0..2; 3 is a stray."),
        ([0, 1, 8, 9], 2, "'e.w': index e must be 0..1; 8, 9 are strays."),
        ([5], None, "'e.w': index e must be 0; it lacks 0, and 5 is a stray."),
        ([0], 20, "'e.w': index e must be 0..19; it lacks 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 9 more."),
    ],
)
def test_holes_and_strays_are_named(indices: list[int], num: int | None, message: str) -> None:
    found = group_indexed(T("e.{e}.w"), T("e.w"), [f"e.{i}.w" for i in indices], num=num)
    assert messages(found.problems, "ragged indices") == [message]
    assert found.problems[0].error is IncompleteGroup


def test_a_lost_member_and_a_stray_do_not_cancel() -> None:
    names = [f"experts.{e}.{w}" for e in range(4) for w in ("w1", "w2") if (e, w) != (1, "w1")] + ["experts.9.w1"]
    found = group_indexed(T("experts.{e}.{w}"), T("experts.{w}"), names)
    assert messages(found.problems, "ragged indices") == [
        "'experts.w1': index e must be 0..3; it lacks 1, and 9 is a stray."
    ]
    assert found.problems[0].names == ("experts.1.w1", "experts.9.w1")
    assert [(group.target, group.is_complete, group.absent) for group in found.groups] == [
        ("experts.w1", False, ("experts.1.w1",)),
        ("experts.w2", True, ()),
    ]


def test_groups_of_different_sizes_are_told() -> None:
    names = [f"l.{i}.e.{e}.w" for i, n in enumerate([4, 4, 3, 5]) for e in range(n)]
    found = group_indexed(T("l.{i}.e.{e}.w"), T("l.{i}.w"), names)
    assert messages(found.problems, "ragged indices") == [
        "'l.2.w': index e must be 0..3; it lacks 3.",
        "'l.3.w': index e must be 0..3; 4 is a stray.",
    ]


def test_the_index_orders_the_members() -> None:
    names = [f"e.{i}.w" for i in (10, 2, 0, 1, 3, 4, 5, 6, 7, 8, 9)]
    found = group_indexed(T("e.{e}.w"), T("e.w"), names)
    assert found.groups == [Group("e.w", tuple(f"e.{i}.w" for i in range(11)), 0)]


def test_an_index_is_an_integer() -> None:
    names = ["fc1.weight0", "fc1.weight1", "fc1.weight_scale"]
    found = group_indexed(T("fc1.weight{x}"), T("fc1.weights"), names)
    assert found.problems == []
    assert found.rewrite(names) == ["fc1.weights", "fc1.weight_scale"]
    found = group_indexed(T("e.{x}.w"), T("e.w"), ["e.0.w", "e.1.w", "e.02.w"])
    assert messages(found.problems, "ragged indices") == [
        "'e.02.w': index x is '02'; write indices without leading zeros."
    ]


def test_an_index_may_be_a_sum() -> None:
    found = group_indexed(T("e.{x+1}.w"), T("e.w"), ["e.2.w", "e.1.w"])
    assert found.groups == [Group("e.w", ("e.1.w", "e.2.w"), 0)]
    assert group_unindexed(T("e.w"), T("e.{x+1}.w"), ["e.w"], 2).groups == [Spread("e.w", ("e.1.w", "e.2.w"), 0)]


def test_stack_that_matches_nothing() -> None:
    found = group_indexed(T("e.{x}.w"), T("e.w"), ["m.e.0.w"])
    assert messages(found.problems, "unmatched rule") == [
        (
            "'e.{x}.w' matches none of 1 name; 'm.e.{x}.w' would match 1 name, such as 'm.e.0.w'. Correct it, or "
            "write 'e.w?' if it may match nothing."
        )
    ]
    assert group_indexed(T("e.{x}.w"), T("e.w?"), ["m.e.0.w"]).problems == []


def test_a_huge_number_is_no_burden() -> None:
    found = group_indexed(T("e.{x}.w"), T("e.w"), ["e.0.w", "e." + "9" * 90 + ".w"])
    assert len(found.problems) == 1
    found = group_indexed(T("e.{x}.w"), T("e.w"), ["e.0.w"], num=1200)
    assert "and 1189 more" in found.problems[0].message
    assert not found.groups[0].is_complete


@pytest.mark.parametrize(
    "many, one, index, message",
    [
        ("e.{x}.w", "e.{x}.w", None, "one hole more, the index, must be in 'e.{x}.w', but there is none"),
        ("e.{x}.{y}", "e", None, "but there are 2: {x}, {y}"),
        ("e.w", "e.{x}", None, "'e.w' lacks {x}, which the single pattern has"),
        ("e.{x}.{y}", "e.{y}", "y", "the index is {x}, as the single pattern lacks it, not index='y'"),
        ("e.{x...}", "e", None, "the index {x...} stands for whole segments"),
        ("e.{x}?", "e", None, "'e.{x}?': the '?' stands on the single pattern; write 'e?'"),
        ("e.{x|a|b}", "e", None, "hole x: no value fits"),
    ],
)
def test_patterns_without_one_index(many: str, one: str, index: str | None, message: str) -> None:
    every: list[Callable[[], Any]] = [
        lambda: check_indexed(T(many), T(one), index),
        lambda: group_indexed(T(many), T(one), [], index=index),
        lambda: group_unindexed(T(one), T(many), [], 2, index=index),
    ]
    for call in every:
        with pytest.raises(BadPattern) as caught:
            call()
        assert message in str(caught.value)


def test_a_stack_has_members() -> None:
    with pytest.raises(BadPattern, match="num=0, but a stack has 1 member or more"):
        group_indexed(T("e.{x}"), T("e"), [], num=0)


# ----------------------------------------------------------------------------------------------- one to many


def test_unstack_tells_all_problems_and_keeps_the_rest() -> None:
    sizes = {"l.0.w": 2, "l.1.w": 0, "l.2.w": 5, "l.3.w": 3}
    found = group_unindexed(T("l.{i}.w"), T("l.{i}.{e:0..3}.w"), list(sizes), sizes.__getitem__)
    assert found.groups == [
        Spread("l.0.w", ("l.0.0.w", "l.0.1.w"), 0),
        Spread("l.3.w", ("l.3.0.w", "l.3.1.w", "l.3.2.w"), 3),
    ]
    told = messages(found.problems, "ragged indices")
    assert told[0] == "'l.1.w': num=0, but a stack has 1 member or more."
    assert told[1].startswith("'l.2.w': pattern 'l.{i}.{e:0..3}.w': e = '4' does not fit: 4 is outside 0..3")


def test_split_collides_and_matches_nothing() -> None:
    found = group_split(T("{i}.qk"), [T("{i}.q"), T("{i}.k")], ["0.qk", "0.q", "1.qk"])
    assert messages(found.problems, "collision") == [
        "'0.qk' would become '0.q', which is there already. Drop or rename it first."
    ]
    assert [group.source for group in found.groups] == ["0.qk", "1.qk"]
    found = group_split(T("{i}.qk"), [T("{i}.q"), T("{i}.k")], ["0.qkv"])
    assert messages(found.problems, "unmatched rule") == [
        (
            "'{i}.qk' matches none of 1 name; '{i}.qkv' would match 1 name, such as '0.qkv'. Correct it, or write "
            "'{i}.qk?' if it may match nothing."
        )
    ]
    assert group_split(T("{i}.qk?"), [T("{i}.q"), T("{i}.k")], ["0.qkv"]).problems == []


def test_round_trips_tell_what_differs() -> None:
    sources, target = [T("{a}_{b}.q"), T("{a}_{b}.k")], T("{b}_{a}.qk")
    forward = group_many(sources, target, ["x_y_z.q", "x_y_z.k"])
    back = group_split(target, sources, forward.rewrite(["x_y_z.q", "x_y_z.k"]))
    told = messages(check_groups_round_trip(forward, back), "round trip")
    assert told[0].startswith("'x_y_z.q', 'x_y_z.k' to 'y_z_x.qk' is not undone by the inverse.")
    names = ["0.q", "0.k", "1.qk"]
    forward = group_many([T("{i}.q"), T("{i}.k")], T("{i}.qk"), names)
    back = group_split(T("{i}.qk"), [T("{i}.q"), T("{i}.k")], forward.rewrite(names))
    assert messages(check_groups_round_trip(forward, back), "round trip") == [
        (
            "the inverse would make '1.q', '1.k' of '1.qk', which did not come from there. "
            "Make the patterns tell such names apart."
        )
    ]


def test_many_problems_are_counted() -> None:
    problems = group_many(QKV, T("l.{i}.qkv"), [f"l.{i}.{x}" for i in range(13) for x in "qk"] + ["l.99.v"]).problems
    assert len(problems) == 14
    assert describe(problems).endswith(" And 4 more.")


def test_a_hundred_thousand_names() -> None:
    names = [f"l.{i}.e.{e}.{x}" for i in range(60) for e in range(256) for x in ("q", "k", "o", "n", "m", "w")]
    found = group_many([T("l.{i}.e.{e}.q"), T("l.{i}.e.{e}.k")], T("l.{i}.e.{e}.qk"), names)
    assert found.problems == []
    assert len(found.groups) == 60 * 256
    stacked = group_indexed(T("l.{i}.e.{e}.{x|q|k|w}"), T("l.{i}.{x}"), names)
    assert stacked.problems == []
    assert [group.target for group in stacked.groups][:3] == ["l.0.q", "l.0.k", "l.0.w"]


def test_thousands_of_names_written_out_take_no_walk_each() -> None:
    """The work grows with the names and the patterns, not with their product: counted, not timed."""

    class Counting(str):
        __slots__ = ()
        compared = 0

        def __eq__(self, other: object) -> bool:
            Counting.compared += 1
            return str.__eq__(self, other)  # type: ignore[arg-type]

        __hash__ = str.__hash__

    names = [Counting(f"part{i}") for i in range(300)]
    found = group_many([Template(str(name)) for name in names], Template("all"), names)
    assert found.problems == [] and len(found.groups[0].members) == 300
    assert Counting.compared < 20 * 300
    Counting.compared = 0
    RuleTable.make([(Template(f"prat{i}"), Template(f"x{i}")) for i in range(300)]).apply(names)
    assert Counting.compared < 60 * 300
