"""What verbs are given: every slip is refused in words, by the verb that was called; numbers of any library count."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import fdsd
from fdsd import (
    ModelSpec,
    OptimState,
    Pipeline,
    StateDict,
    TensorEntry,
    TensorSpec,
    TrainState,
    add_prefix,
    add_scalar,
    average,
    cast,
    combine,
    concat,
    crop,
    defer,
    drop,
    drop_prefix,
    filter_frozen,
    index_select,
    insert,
    lerp,
    map_tensors,
    materialize,
    pad,
    partition,
    permute,
    permute_rope,
    rename_fqns,
    reshape,
    select,
    specs,
    split,
    stack,
    tie,
    transpose,
    unstack,
    untie,
)
from fdsd.algebra.apply import apply
from fdsd.algebra.ops import AddScalar, Average, Lerp
from fdsd.errors import BadPattern, FdsdError, NameConflict, NotInvertible, SpecMismatch, UnknownName, Unsupported
from fdsd.pipeline.step import Grade
from fdsd.testing import assert_laws, assert_same
from tests.helpers.refusing import assert_refused

W = torch.arange(6.0).reshape(2, 3)
STATE = StateDict({"layers.0.w": W, "layers.1.w": W + 6, "norm": torch.tensor([12.0, 13.0])})
F32 = TensorSpec((2,), torch.float32)
MODULE = torch.nn.Linear(2, 3)

NUMBERS: list[Callable[[Any], Any]] = [
    lambda n: transpose("w", n),
    lambda n: transpose("w", 0, n),
    lambda n: permute("w", [n, n]),
    lambda n: reshape("w", [n, 2]),
    lambda n: reshape("w", [2], from_shape=[n]),
    lambda n: index_select("w", [n]),
    lambda n: index_select("w", [0], dim=n),
    lambda n: pad("w", n),
    lambda n: pad("w", 3, dim=n),
    lambda n: crop("w", 3, from_size=n),
    lambda n: permute_rope("w", heads=n, to="pairs"),
    lambda n: concat(["a", "b"], "ab", dim=n),
    lambda n: concat(["a", "b"], "ab", dim=0, groups=n),
    lambda n: concat(["a", "b"], "ab", dim=0, sizes=[n, 1]),
    lambda n: split("ab", ["a", "b"], dim=n, sizes=[1, 1]),
    lambda n: split("ab", ["a", "b"], dim=0, sizes=[1, n]),
    lambda n: stack("{x}.w", "w", dim=n),
    lambda n: stack("{x}.w", "w", num=n),
    lambda n: unstack("w", "{x}.w", num=n),
]


OPTIONAL = (NUMBERS[9], NUMBERS[17], NUMBERS[18])
"""Those that may be left out, as None."""


@pytest.mark.parametrize("number", ["1", 1.0, True, None, 1j, torch.tensor(1.0), torch.tensor(True), torch.tensor([1])])
@pytest.mark.parametrize("make", NUMBERS)
def test_what_is_no_whole_number_is_refused(make: Callable[[Any], Any], number: Any) -> None:
    if number is None and make in OPTIONAL:
        assert isinstance(make(number), Pipeline)
        return
    with pytest.raises(SpecMismatch, match="whole number") as caught:
        make(number)
    assert str(caught.value).split(":")[0] in fdsd.__all__


@pytest.mark.parametrize("number", [np.int64(1), np.uint8(1), torch.tensor(1), torch.tensor(1, dtype=torch.uint8)])
@pytest.mark.parametrize("make", [make for at, make in enumerate(NUMBERS) if at != 2])
def test_whole_numbers_of_any_library_are_plain_ones(make: Callable[[Any], Any], number: Any) -> None:
    assert make(number) == make(1)
    assert repr(make(number)) == repr(make(1))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: permute("w", 3), "permute: dims"),  # type: ignore[arg-type]
        (lambda: permute("w", "10"), "permute: dims"),  # type: ignore[arg-type]
        (lambda: permute("w", {0, 1}), "permute: dims"),  # type: ignore[arg-type]
        (lambda: reshape("w", 6), "reshape: shape"),  # type: ignore[arg-type]
        (lambda: reshape("w", (6,), from_shape=6), "reshape: from_shape"),  # type: ignore[arg-type]
        (lambda: index_select("w", 3), "index_select: index"),  # type: ignore[arg-type]
        (lambda: index_select("w", {0: 1}), "index_select: index"),  # type: ignore[arg-type]
        (lambda: index_select("w", np.array([True, False])), "index_select: each of index"),  # type: ignore[arg-type]
        (lambda: index_select("w", np.array([[0, 1]])), "index_select: each of index"),  # type: ignore[arg-type]
        (lambda: index_select("w", torch.tensor([True, False])), "nonzero()"),
        (lambda: index_select("w", torch.tensor([[0]])), "in one dim"),
        (lambda: split("w", ["a"], dim=0, sizes=1), "split: sizes"),  # type: ignore[arg-type]
        (lambda: stack("{x}.w", "w", num=0), "stack: num=0"),
        (lambda: permute_rope("w", heads=2, to=["pairs"]), "permute_rope: to="),  # type: ignore[arg-type]
        (lambda: cast("float32"), "cast: 'float32'"),  # type: ignore[arg-type]
        (lambda: cast(torch.float32, from_dtype="float32"), "cast: from_dtype="),  # type: ignore[arg-type]
        (lambda: map_tensors(torch.neg, spec=3), "map_tensors: spec"),  # type: ignore[arg-type]
        (lambda: map_tensors(3), "map_tensors: 3"),  # type: ignore[arg-type]
        (lambda: add_scalar("w", "1"), "add_scalar: '1'"),  # type: ignore[arg-type]
        (lambda: add_scalar("w", 10**400), "beyond every dtype"),
        (lambda: insert("w", (2,), init=0), "insert: spec"),  # type: ignore[arg-type]
        (lambda: lerp({}, {}, "x"), "lerp: weight"),  # type: ignore[arg-type]
        (lambda: lerp({}, {}, True), "lerp: weight"),
        (lambda: average([{}], ["x"]), "average: each of weights"),  # type: ignore[list-item]
    ],
)
def test_slips_are_told_by_the_verb(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(SpecMismatch) as caught:
        make()
    assert text in str(caught.value) and len(str(caught.value)) < 300


def test_long_slips_are_cut() -> None:
    with pytest.raises(SpecMismatch) as caught:
        pad("w", list(range(10**5)))  # type: ignore[arg-type]
    assert len(str(caught.value)) < 120


# -- names ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (select, "select: no names"),
        (drop, "drop: no names"),
        (untie, "untie: no names"),
        (lambda: tie({}), "tie: no names"),
        (lambda: partition({}), "partition: no names"),
        (lambda: select(3), "select: names"),  # type: ignore[arg-type]
        (lambda: select([3]), "select: each"),  # type: ignore[list-item]
        (lambda: select(b"w"), "select: names"),  # type: ignore[arg-type]
        (lambda: transpose(None), "transpose: names"),  # type: ignore[arg-type]
        (lambda: cast(torch.float32, torch.ones(2)), "cast: names"),
        (lambda: drop(MODULE), "drop: names"),
        (lambda: filter_frozen(MODULE), "requires_grad"),  # type: ignore[arg-type]
        (lambda: filter_frozen(3), "filter_frozen: names"),  # type: ignore[arg-type]
        (lambda: add_prefix(3), "add_prefix: a prefix"),  # type: ignore[arg-type]
        (lambda: drop_prefix(None), "drop_prefix: a prefix"),  # type: ignore[arg-type]
        (lambda: concat(3, "ab", dim=0), "concat: sources"),  # type: ignore[arg-type]
        (lambda: concat(["a", 3], "ab", dim=0), "concat: each of sources"),  # type: ignore[list-item]
        (lambda: concat({"a", "b"}, "ab", dim=0), "concat: sources"),  # type: ignore[arg-type]
        (lambda: concat(["a"], None, dim=0), "concat: target"),  # type: ignore[arg-type]
        (lambda: split(3, ["a"], dim=0, sizes=[1]), "split: source"),  # type: ignore[arg-type]
        (lambda: stack(["{x}.w"], "w"), "stack: source"),  # type: ignore[arg-type]
        (lambda: unstack("w", 3), "unstack: target"),  # type: ignore[arg-type]
        (lambda: stack("{x}.w", "w", index=0), "stack: index"),  # type: ignore[arg-type]
        (lambda: tie([("a", "b")]), "tie: it takes a mapping"),  # type: ignore[arg-type]
        (lambda: tie({"a": 3}), "tie: an owner"),  # type: ignore[dict-item]
        (lambda: insert("", F32, init=0), "insert: name"),
        (lambda: insert(3, F32, init=0), "insert: name"),  # type: ignore[arg-type]
        (lambda: rename_fqns({"a.{i}": "b"}), "rename_fqns: "),
    ],
)
def test_what_is_no_name_is_refused_by_the_verb(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(BadPattern) as caught:
        make()
    assert text in str(caught.value)


def test_what_is_no_rule_is_refused_by_the_verb() -> None:
    for rules in (3, "ab", [3], {"a": 3}):
        with pytest.raises(FdsdError, match=r"^rename_fqns: "):
            rename_fqns(rules)  # type: ignore[arg-type]


def test_an_empty_choice_is_a_choice_and_none_is_not() -> None:
    assert list(select([])(STATE)) == [] and list(drop([])(STATE)) == list(STATE)
    assert cast(torch.float64, [])(STATE)["norm"] is STATE["norm"]
    assert cast(torch.float64)(STATE)["norm"].dtype is torch.float64
    for p in (select([]), drop([]), untie([]), transpose([]), cast(torch.float64, []), filter_frozen([])):
        assert eval(repr(p), {**vars(fdsd), "torch": torch}) == p


def test_sets_are_read_in_one_order() -> None:
    names = {f"n{i}" for i in range(20)}
    assert select(names) == select(frozenset(names)) == select(sorted(names))


def test_a_pattern_that_chooses_nothing_shows_the_one_that_would() -> None:
    verbs: list[Callable[[Any], Pipeline]] = [select, drop, untie, transpose, lambda which: cast(torch.float64, which)]
    for verb in verbs:
        p = verb("layer.{i}.w")
        assert_refused(p, STATE, UnknownName, "'layers.{i}.w' would match 2 names, such as 'layers.0.w'", "'?'")
        nearest = verb("nrom")
        assert_refused(nearest, STATE, UnknownName, "the nearest name is 'norm'")
    assert_refused(select("layer.{_}.w"), STATE, UnknownName, "'layers.{_}.w' would match 2 names")


def test_a_failing_function_says_for_which_tensor_it_was_asked() -> None:
    def broken(name: str, spec: TensorSpec) -> bool:
        raise ZeroDivisionError("mine")

    def broken_spec(spec: TensorSpec) -> TensorSpec:
        raise ZeroDivisionError("mine")

    makes: list[Callable[[], Any]] = [
        lambda: select(broken)(STATE),
        lambda: map_tensors(torch.neg, "norm", spec=broken_spec)(STATE),
    ]
    for make in makes:
        with pytest.raises(ZeroDivisionError) as caught:
            make()
        notes = "\n".join(getattr(caught.value, "__notes__", ()))
        assert "broken" in notes and "float32[2" in notes
        assert "'layers.0.w'" in notes or "'norm'" in notes


def test_the_verb_stands_once() -> None:
    states = [{"a": torch.ones(2)}, {"a": torch.ones(3)}]
    for make in (
        lambda: transpose("norm")(STATE),
        lambda: transpose("norm").bind(STATE),
        lambda: permute("norm", (0, 1))(STATE),
        lambda: index_select("norm", [7])(STATE),
        lambda: index_select("norm", [1, 0], dim=3).bind(STATE),
        lambda: pad("norm", 9, dim=4).bind(STATE),
        lambda: concat(["norm", "layers.0.w"], "x", dim=0)(STATE),
        lambda: concat(["norm", "layers.0.w"], "x", dim=3).bind(STATE),
        lambda: stack("layers.{x}.w", "x", dim=5)(STATE),
        lambda: stack("{x}", "x")({"0": W, "1": W[0]}),
        lambda: add_scalar("a", 1.5)({"a": torch.tensor([1])}),
        lambda: map_tensors(lambda x: 3, "norm")(STATE),  # type: ignore[arg-type, return-value]
        lambda: tie({"norm": "layers.0.w"})(STATE),
        lambda: average(states),
        lambda: lerp(states[0], states[1], 0.5),
    ):
        with pytest.raises(FdsdError) as caught:
            make()
        verb, rest = str(caught.value).split(": ", 1)
        assert verb in fdsd.__all__ and f"{verb}: " not in rest, str(caught.value)


# -- numbers that are equal and not the same -------------------------------------------------------------------------


def test_signs_of_zero_make_different_pipelines() -> None:
    pairs = [
        (add_scalar("norm", 0.0), add_scalar("norm", -0.0)),
        (insert("z", F32, init=0.0), insert("z", F32, init=-0.0)),
        (insert("z", F32, init=1), insert("z", F32, init=True)),
    ]
    for a, b in pairs:
        assert a != b and len({a, b}) == 2
        assert a == pickle.loads(pickle.dumps(a)) and hash(a) == hash(pickle.loads(pickle.dumps(a)))
    assert add_scalar("norm", float("nan")) == add_scalar("norm", float("nan"))
    assert Average((0.0, 1.0)) != Average((-0.0, 1.0)) and Lerp(0.0) != Lerp(-0.0) and AddScalar(1) != AddScalar(1.0)


def test_signs_of_zero_are_added_as_they_are() -> None:
    state = {"a": torch.tensor([-0.0]), "b": torch.tensor([-0.0])}
    p = add_scalar("a", 0.0) >> add_scalar("b", -0.0)
    made = materialize(p(defer(state)))
    assert str(made["a"].tolist() + made["b"].tolist()) == "[0.0, -0.0]"


# -- insert ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("init", [None, [], "x", "", torch.ones(2), torch.tensor(1.0), {}, np.ones(2)])
def test_insert_takes_numbers_and_functions(init: Any) -> None:
    with pytest.raises(SpecMismatch, match=r"^insert: init is one number, or a function of the spec"):
        insert("new", F32, init=init)


@pytest.mark.parametrize(
    ("dtype", "init"),
    [
        (torch.int64, 1.5),
        (torch.int64, float("nan")),
        (torch.int8, 128),
        (torch.uint8, -1),
        (torch.uint64, 2**64),
        (torch.bool, 2),
        (torch.float32, 1j),
        (torch.float32, 10**400),
        (torch.int32, 1j),
        (torch.uint4, 1),  # type: ignore[attr-defined]
    ],
)
def test_insert_refuses_numbers_that_the_dtype_does_not_have(dtype: torch.dtype, init: Any) -> None:
    with pytest.raises(Unsupported, match=r"^insert: init: .*" + str(dtype).removeprefix("torch.")):
        insert("new", TensorSpec((2,), dtype), init=init)


@pytest.mark.parametrize(
    ("dtype", "init", "value"),
    [
        (torch.uint64, 2**64 - 1, 2**64 - 1),
        (torch.int64, -(2**63), -(2**63)),
        (torch.int16, 7.0, 7),
        (torch.bool, 1.0, True),
        (torch.float32, np.float32(0.5), 0.5),
        (torch.float32, np.int64(3), 3.0),
        (torch.bfloat16, 2.7, 2.703125),
        (torch.complex64, 1 + 2j, 1 + 2j),
    ],
)
def test_insert_of_numbers(dtype: torch.dtype, init: Any, value: Any) -> None:
    p = insert("new", TensorSpec((2,), dtype), init=init)
    assert p(STATE)["new"].tolist() == [value, value]
    assert_laws(p, STATE)


def three(spec: TensorSpec) -> torch.Tensor:
    return torch.ones(3)


def test_insert_words_its_own_functions_mistakes() -> None:
    p = insert("new", F32, init=three)
    makes: list[Callable[[], Any]] = [lambda: p(STATE), lambda: materialize(p(defer(STATE)))]
    for make in makes:
        with pytest.raises(SpecMismatch, match=r"init=three of 'new' gave float32\[3\], but spec is float32\[2\]") as e:
            make()
        assert "map_tensors" not in str(e.value)


def test_inserted_random_tensors_are_not_taken_for_one() -> None:
    def noise(spec: TensorSpec) -> torch.Tensor:
        return torch.rand(spec.shape)

    spec = TensorSpec((64,), torch.float32)
    p = insert("a", spec, init=noise) >> insert("b", spec, init=noise)
    for state in (STATE, defer(STATE)):
        made = materialize(p(state))
        assert not torch.equal(made["a"], made["b"])


@pytest.mark.parametrize("init", [3.0, lambda spec: torch.full(spec.shape, 2.0)], ids=["number", "function"])
def test_insert_into_a_state_without_tensors(init: Any) -> None:
    p = insert("new", F32, init=init)
    for state in ({}, {"extra": "text"}, drop("{_...}")(STATE)):
        assert_laws(p, state)
        assert p(specs(state))["new"] == F32
        assert isinstance(p(defer(state))["new"], fdsd.Lazy)
        assert isinstance(p(state)["new"], torch.Tensor)


# -- states ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("odd", [OptimState(), TrainState({}), MODULE, 3, None, "w", [("a", 1)]])
def test_functions_of_states_refuse_what_is_no_mapping(odd: Any) -> None:
    makes: dict[str, Callable[[], Any]] = {
        "combine": lambda: combine({}, odd),
        "average": lambda: average([{}, odd]),
        "lerp": lambda: lerp({}, odd, 0.5),
        "partition": lambda: partition(odd, "a"),
    }
    for verb, make in makes.items():
        with pytest.raises(Unsupported, match=f"^{verb}: "):
            make()


def test_names_of_states_are_strings() -> None:
    odd: Any = {1: torch.ones(2)}
    makes: list[Callable[[], Any]] = [lambda: combine(odd), lambda: average([odd]), lambda: lerp(odd, odd, 0.5)]
    for make in makes:
        with pytest.raises(SpecMismatch, match=r"names are strings"):
            make()


def test_states_may_come_one_after_the_other() -> None:
    def states() -> Iterator[dict[str, torch.Tensor]]:
        for value in (1.0, 2.0, 6.0):
            yield {"w": torch.tensor([value])}

    assert average(states())["w"].tolist() == [3.0]
    assert average(states(), iter([1, 0, 0.5]))["w"].tolist() == [4.0]
    for states_ in (None, 3, "ab", {"w": W}):
        with pytest.raises(Unsupported, match=r"^average: states are given in a list"):
            average(states_)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 6, 7, 10, 49])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_the_mean_of_equal_states_is_that_state(count: int, dtype: torch.dtype) -> None:
    values = [0.1, 1 / 3, -7.7, 3e38, float("inf"), -float("inf"), 0.0, 1e-40]
    state = {"w": torch.tensor(values, dtype=torch.float64).to(dtype)}
    for form in (state, defer(state)):
        assert_same(materialize(average([form] * count)), StateDict(state))
        assert_same(materialize(lerp(form, form, 1 / 3)), StateDict(state))


def test_the_mean_is_divided_once() -> None:
    x = [torch.tensor([value]) for value in (1.0, 2.0, 2.5)]
    assert torch.equal(apply(Average(), *x), torch.tensor([5.5]) / 3)


def test_histories_that_agree_are_kept() -> None:
    """What made all of them is true of the result; what made some is not."""
    p, q = rename_fqns({"norm": "n"}), drop("layers.{_...}")
    a, b = p(STATE), (p >> q)(STATE)
    assert average([a, a]).history == lerp(a, a, 0.5).history == a.history == p.steps
    assert combine(b, {"x": 1}).history == (*p.steps, *q.steps)
    chosen, others = partition(a, "n")
    assert combine(chosen, others).history == p.steps
    assert combine(q(STATE), {"x": 1}, rename_fqns({"x": "y"})({"x": 2})).history == ()
    assert combine().history == combine({"a": 1}).history == ()


def test_kinds_are_kept() -> None:
    """A join of lazy states without tensors is lazy, and of specs abstract."""
    nothing = {"extra": 1}
    joins: list[Callable[[Any], StateDict[Any]]] = [combine, lambda s: average([s, s])]
    for join in joins:
        assert insert("n", F32, init=1.0)(join(specs(nothing)))["n"] == F32
        assert isinstance(insert("n", F32, init=1.0)(join(defer(nothing)))["n"], fdsd.Lazy)


# -- grades and bounds -----------------------------------------------------------------------------------------------


def test_a_cast_to_complex_has_no_inverse() -> None:
    p = cast(torch.complex64, "w", from_dtype=torch.float32)
    assert p.grade is Grade.NONE and cast(torch.complex128, "w", from_dtype=torch.complex64).grade is Grade.EXACT
    with pytest.raises(NotInvertible, match=r"imaginary part.*torch\.real"):
        _ = ~p
    assert_laws(cast(torch.complex64, "w"), {"w": torch.tensor([1.0, 2.0])})


@pytest.mark.parametrize(
    ("dtype", "value"), [(torch.int8, 300), (torch.uint8, 2**70), (torch.int64, 2**70), (torch.int64, -(2**63) - 1)]
)
def test_numbers_beyond_an_integer_dtype_are_not_added(dtype: torch.dtype, value: int) -> None:
    state = {"w": torch.tensor([1, 2]).to(dtype)}
    assert_refused(add_scalar("w", value), state, Unsupported, str(value), "whole numbers from", "cast()")


def test_large_numbers_are_added_to_floats() -> None:
    assert add_scalar("w", 2**70)({"w": torch.tensor([1.0])})["w"].tolist() == [2.0**70]
    assert add_scalar("w", 2**63 - 1)({"w": torch.tensor([0])})["w"].tolist() == [2**63 - 1]


def test_the_inverse_of_a_tie_takes_equal_tensors() -> None:
    p = tie({"head": "embed"})
    back = ~p
    forms: list[Callable[[Any], Any]] = [lambda x: x, defer]
    for form in forms:
        made = materialize(back(form({"embed": W, "head": W.clone()})))
        assert list(made) == ["embed"] and torch.equal(made["embed"], W)
        with pytest.raises(SpecMismatch, match=r"'embed' and 'head' hold unequal values"):
            materialize(back(form({"embed": W, "head": W + 1})))
    with pytest.raises(NameConflict):
        combine({"head": W}, {"head": W})


def test_unstacked_tensors_of_different_sizes_bind_to_a_step_each() -> None:
    state = {"0.w": torch.arange(2), "1.w": torch.arange(5, 8), "2.w": torch.arange(8, 10)}
    p = unstack("{l}.w", "{l}.{e+1}.w")
    bound = p.bind(state)
    assert repr(bound.steps[1].call_text()) == repr("unstack('1.w', '1.{e+1}.w', num=3)")
    assert_same(bound(state), p(state), order=True)
    assert_same((~bound)(p(state)), StateDict(state))


def test_models_say_which_names_are_frozen() -> None:
    entries = {"norm": TensorEntry(F32, trainable=False), "gone": TensorEntry(F32, trainable=False)}
    assert list(filter_frozen(ModelSpec(entries))(STATE)) == ["layers.0.w", "layers.1.w"]
    frozen = [name for name, parameter in MODULE.named_parameters() if not parameter.requires_grad]
    assert list(filter_frozen(frozen)(STATE)) == list(STATE)
