"""Explanations: the folded lines say exactly what is renamed, and the text is the one that is meant."""

from __future__ import annotations

import itertools
import pickle
import re
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
from attrs import field, frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from fdsd.data.groups import ParamGroup
from fdsd.data.model import ModelSpec, TensorEntry
from fdsd.data.optim import OptimState
from fdsd.data.spec import TensorSpec
from fdsd.data.statedict import specs
from fdsd.data.train import TrainState
from fdsd.pipeline.check import check
from fdsd.pipeline.explain import Explanation, Size, explain
from fdsd.pipeline.lines import Line
from fdsd.pipeline.pipeline import identity, pipe
from fdsd.pipeline.rewrite import Assign, Rewrite, Scope
from fdsd.pipeline.step import Grade, Step
from fdsd.transforms import (
    add_prefix,
    cast,
    concat,
    drop,
    flatten_optim,
    index_select,
    insert,
    map_tensors,
    pad,
    rename_fqns,
    select,
    split,
    stack,
    tie,
    transpose,
    unstack,
)


@frozen
class Rename(Step):
    """Any renaming at all."""

    table: Mapping[str, str] = field(eq=id)
    verb: ClassVar[str] = "rename"

    @property
    def grade(self) -> Grade:
        return Grade.NONE

    def rewrite(self, scope: Scope) -> Rewrite:
        return Rewrite.of([Assign(self.table.get(name, name), (name,)) for name in scope.names])

    def call_text(self) -> str:
        return "rename(...)"


def wide(rows: int, columns: int = 3, dtype: torch.dtype = torch.float32) -> TensorSpec:
    return TensorSpec((rows, columns), dtype)


def lines(text: str) -> str:
    """Take the indentation of a literal off."""
    return "\n".join([line.removeprefix("        ") for line in text.strip("\n").splitlines()]).rstrip()


# -- what lines say --------------------------------------------------------------------------------------------


def written_out(text: str) -> list[str]:
    """Write a folded name out, the first index slowest."""
    pieces = re.split(r"\{([0-9.,]+)\}", text)
    choices: list[list[str]] = []
    for k, piece in enumerate(pieces):
        if k % 2 == 0:
            choices.append([piece])
            continue
        values: list[str] = []
        for run in piece.split(","):
            low, _, high = run.partition("..")
            values += [str(i) for i in range(int(low), int(high or low) + 1)]
        choices.append(values)
    return ["".join(chosen) for chosen in itertools.product(*choices)]


def sizes(text: str) -> list[int]:
    return [len(written_out("{" + run + "}")) for run in re.findall(r"\{([0-9.,]+)\}", text)]


@st.composite
def renamings(draw: st.DrawFn) -> dict[str, str]:
    """One-to-one renamings: shifted, scaled, exchanged and mixed indices."""
    form = draw(st.sampled_from(["a.{i}.b.{j}.w", "a.{i}.{j}", "x.{i}.y"]))
    target = draw(st.sampled_from(["c.{i}.d.{j}.w", "c.{j}.d.{i}.w", "c.{i}.{j}.{i}", "c.{j}", "c.{i}.0.d.{j}"]))
    if "{j}" not in form:
        target = target.replace("{j}", "{i}")
    elif "{i}" not in target:
        target += ".{i}"
    shift, scale = draw(st.integers(0, 3)), draw(st.integers(1, 2))
    places = list(itertools.product(range(draw(st.integers(1, 4))), range(draw(st.integers(1, 3)))))
    table = {form.format(i=i, j=j): target.format(i=scale * i + shift, j=j) for i, j in places}
    if draw(st.booleans()):  # some targets trade places
        names = draw(st.lists(st.sampled_from(list(table)), max_size=3, unique=True))
        traded = draw(st.permutations([table[name] for name in names]))
        table |= dict(zip(names, traded, strict=True))
    left = draw(st.sets(st.sampled_from(list(table)), max_size=2))
    return {name: new for name, new in table.items() if name not in left}


@given(renamings(), st.integers(0, 3))
@settings(max_examples=400)
def test_lines_say_exactly_what_is_renamed(table: dict[str, str], split_at: int) -> None:
    state = {name: wide(1 + (k < split_at)) for k, name in enumerate(table)}
    (step,) = explain([Rename(table)], state).steps
    assert step.unchanged == 0
    told: list[str] = []
    for line in step.lines:
        targets = written_out(line.target)
        sources = [name for text in line.sources for name in written_out(text)]
        assert line.kind == "rename" and line.count == len(targets)
        assert sorted(sources) == sorted([name for name, new in table.items() if new in targets])
        told += targets
        if len(line.sources) == 1 and sizes(line.sources[0]) == sizes(line.target):  # read from left to right
            assert all(table[name] == new for name, new in zip(sources, targets, strict=True))
        assert {str(state[name]) for name in sources} == {line.before} == {line.after}
    assert sorted(told) == sorted(table.values())


@given(renamings())
def test_no_line_is_longer_than_the_page(table: dict[str, str]) -> None:
    long = {f"{name}.{'part_' * 8}": f"{new}.{'other_' * 9}" for name, new in table.items()}
    text = str(explain([Rename(long)], dict.fromkeys(long, wide(1))))
    assert all(len(line) <= 110 for line in text.splitlines())


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({"a.0": "b.8", "a.1": "b.9"}, ["a.{0..1} -> b.{8..9}"]),
        ({"a.0": "b.0", "a.1": "b.2", "a.2": "b.4"}, ["a.{0..2} -> b.{0,2,4}"]),
        ({"a.0": "b.1", "a.1": "b.0"}, ["a.1 -> b.0", "a.0 -> b.1"]),
        (
            {"a.0.b.0": "c.0.d.0", "a.0.b.1": "c.1.d.0", "a.1.b.0": "c.0.d.1", "a.1.b.1": "c.1.d.1"},
            ["a.{0..1}.b.0 -> c.0.d.{0..1}", "a.{0..1}.b.1 -> c.1.d.{0..1}"],
        ),
        ({"w.#": "v.#", "w.3": "v.3"}, ["w.# -> v.#", "w.3 -> v.3"]),
        ({"a.01": "b.01", "a.02": "b.02"}, ["a.01 -> b.01", "a.02 -> b.02"]),
        ({"{a}?": "b"}, ["{{a}}?? -> b"]),
    ],
)
def test_indices_fold_only_where_they_go_along(table: dict[str, str], expected: list[str]) -> None:
    (step,) = explain([Rename(table)], dict.fromkeys(table, wide(1))).steps
    assert sorted(str(line).partition(":")[0] for line in step.lines) == sorted(expected)


# -- texts -----------------------------------------------------------------------------------------------------


def layered() -> dict[str, Any]:
    source: dict[str, Any] = {"embed.weight": torch.zeros(10, 4), "embed.ids": torch.zeros(1, 8, dtype=torch.int64)}
    for i in range(3):
        for name in ("query", "key", "value"):
            source[f"model.layers.{i}.{name}.weight"] = torch.zeros(4, 4)
        source |= {f"model.layers.{i}.experts.{e}.w": torch.zeros(2, 4) for e in range(2)}
    source["head.weight"] = source["embed.weight"]
    source["_extra_state"] = "tag"
    return source


def test_a_whole_explanation() -> None:
    p = pipe(
        rename_fqns({"model.{rest...}": "{rest...}"}),
        concat([f"layers.{{i}}.{n}.weight" for n in ("query", "key", "value")], "layers.{i}.qkv", dim=0),
        stack("layers.{i}.experts.{e}.w", "layers.{i}.experts"),
        cast(torch.bfloat16, "{_...}.weight"),
        pad("embed.weight", 12),
        drop("embed.ids"),
        insert("scale", TensorSpec((2,), torch.float32), init=1.0),
        split("layers.{i}.qkv", ["layers.{i}.a", "layers.{i}.b"], dim=0, sizes=[4, 8]),
        unstack("layers.{i}.experts", "e.{i}.{e}"),
    )
    expected = """
        1. rename_fqns({'model.{rest...}': '{rest...}'})
           15 renamed, 4 unchanged
           model.layers.{0..2}.query.weight -> layers.{0..2}.query.weight: float32[4, 4]
           model.layers.{0..2}.key.weight -> layers.{0..2}.key.weight: float32[4, 4]
           model.layers.{0..2}.value.weight -> layers.{0..2}.value.weight: float32[4, 4]
           model.layers.{0..2}.experts.{0..1}.w -> layers.{0..2}.experts.{0..1}.w: float32[2, 4]
        2. concat(['layers.{i}.query.weight', 'layers.{i}.key.weight', 'layers.{i}.value.weight'], 'layers.{i}.qkv',
           dim=0)
           3 made, 10 unchanged
           layers.{0..2}.query.weight, layers.{0..2}.key.weight, layers.{0..2}.value.weight -> layers.{0..2}.qkv:
               3 x float32[4, 4] -> float32[12, 4]
        3. stack('layers.{i}.experts.{e}.w', 'layers.{i}.experts')
           3 made, 7 unchanged
           layers.{0..2}.experts.{0..1}.w -> layers.{0..2}.experts: 2 x float32[2, 4] -> float32[2, 2, 4]
        4. cast(torch.bfloat16, '{_...}.weight')
           2 made, 8 unchanged
           embed.weight: float32[10, 4] -> bfloat16[10, 4]
           head.weight: float32[10, 4] -> bfloat16[10, 4]
        5. pad('embed.weight', 12)
           1 made, 9 unchanged
           embed.weight: bfloat16[10, 4] -> bfloat16[12, 4]
           unties 'embed.weight' from 'head.weight'
        6. drop('embed.ids')
           1 dropped, 9 unchanged
           - embed.ids: int64[1, 8]
        7. insert('scale', TensorSpec((2,), torch.float32), init=1.0)
           1 inserted, 9 unchanged
           + scale: float32[2]
        8. split('layers.{i}.qkv', ['layers.{i}.a', 'layers.{i}.b'], dim=0, sizes=(4, 8))
           6 made, 7 unchanged
           layers.{0..2}.qkv -> layers.{0..2}.a: float32[12, 4] -> float32[4, 4]
           layers.{0..2}.qkv -> layers.{0..2}.b: float32[12, 4] -> float32[8, 4]
        9. unstack('layers.{i}.experts', 'e.{i}.{e}')
           6 made, 10 unchanged
           layers.{0..2}.experts -> e.{0..2}.{0..1}: float32[2, 2, 4] -> float32[2, 4]
        in:  19 names, 992 bytes
        out: 16 names, 952 bytes
    """
    source = layered()
    made = p.explain(source)
    assert str(made) == repr(made) == lines(expected)
    assert p.explain(specs(source)) == made
    assert made.problems == ()


def test_the_content_is_there_as_data() -> None:
    source = {f"{i}.{n}": wide(2) for i in range(2) for n in "qk"}
    made = concat(["{i}.q", "{i}.k"], "{i}.qk", dim=0).explain({**source, "norm": wide(1)})
    (step,) = made.steps
    assert step.lines == (Line("make", ("{0..1}.q", "{0..1}.k"), "{0..1}.qk", 2, "2 x float32[2, 3]", "float32[4, 3]"),)
    assert (step.number, step.call, step.unchanged) == (1, "concat(['{i}.q', '{i}.k'], '{i}.qk', dim=0)", 1)
    assert (made.before, made.after) == (Size(5, 108), Size(3, 108))
    assert pickle.loads(pickle.dumps(made)) == made
    with pytest.raises(AttributeError):
        made.steps = ()  # type: ignore[misc]


def test_sources_of_several_specs_and_many_names() -> None:
    source = {f"part{chr(97 + k)}": wide(k // 2 + 1) for k in range(10)}
    made = concat(list(source), "all", dim=0).explain(source)
    (line,) = made.steps[0].lines
    assert str(line) == (
        "parta, partb, partc, partd, parte, partf and 4 more -> all: 2 x float32[1, 3] + 2 x float32[2, 3] + "
        "2 x float32[3, 3] + 2 x float32[4, 3] + 1 more -> float32[30, 3]"
    )


def test_sources_out_of_order_are_not_folded() -> None:
    source = {f"e.{i}": wide(1) for i in range(3)}
    made = concat(["e.2", "e.0", "e.1"], "e", dim=0).explain(source)
    assert made.steps[0].lines[0].sources == ("e.2", "e.{0..1}")


def test_ties_are_told_and_count_once() -> None:
    w = torch.zeros(2, 2)
    (step,) = tie({"head": "embed"}).explain({"embed": w}).steps
    assert [str(line) for line in step.lines] == ["embed -> head (tied): float32[2, 2]"]
    assert step.unchanged == 1
    assert add_prefix("m.").explain({"embed": w, "head": w}).after == Size(2, 16)
    made = tie({"head.{i}": "embed.{i}"}).explain({f"{n}.{i}": wide(2) for n in ("embed", "head") for i in range(2)})
    (step,) = made.steps
    assert [str(line) for line in step.lines] == [
        "embed.{0..1} = head.{0..1}: float32[2, 3]",
        "embed.{0..1} -> head.{0..1} (tied): float32[2, 3]",
    ]
    assert (made.before, made.after) == (Size(4, 96), Size(4, 48))
    assert str(made).splitlines()[1] == "   2 tied, 2 checked"


def test_objects_pass_and_are_named_by_their_class() -> None:
    made = add_prefix("m.").explain({"_extra_state": b"x", "w": wide(1)})
    assert [str(line) for line in made.steps[0].lines] == [
        "_extra_state -> m._extra_state: bytes",
        "w -> m.w: float32[1, 3]",
    ]


def test_of_nothing() -> None:
    assert str(identity.explain({})) == "identity\nin:  0 names, 0 bytes\nout: 0 names, 0 bytes"
    assert (
        str(add_prefix("a.").explain({}))
        == "1. add_prefix('a.')\n   no names\nin:  0 names, 0 bytes\nout: 0 names, 0 bytes"
    )


def test_long_calls_and_many_lines_are_cut() -> None:
    source = {f"{chr(97 + k % 26)}{'x' * (k // 26)}": wide(1) for k in range(70)}
    text = str(rename_fqns({name: f"new_{name}" for name in source}).explain(source)).splitlines()
    assert text[4:6] == ["   ...", "   70 renamed"]
    assert text[-3] == "   and 20 names more"
    assert len(text) == 6 + 50 + 3


# -- problems --------------------------------------------------------------------------------------------------


def test_problems_are_told_and_the_steps_after_them_are_explained() -> None:
    source = {f"{i}.{n}": wide(2, 3 + (n == "k")) for i in range(2) for n in "qk"} | {"norm": wide(1)}
    p = pipe(
        concat(["{i}.q", "{i}.k"], "{i}.qk", dim=0),
        rename_fqns({"nrm": "x"}),
        transpose("{_}.qk"),
        add_prefix("m."),
    )
    expected = """
        1. concat(['{i}.q', '{i}.k'], '{i}.qk', dim=0)
           2 made, 1 unchanged
           {0..1}.q, {0..1}.k -> {0..1}.qk: float32[2, 3] + float32[2, 4] -> unknown
           ! making '0.qk' from '0.q' float32[2, 3], '0.k' float32[2, 4]: shapes may differ in dim 0 only, these
           ! differ elsewhere: (2, 3), (2, 4).
           ! making '1.qk' from '1.q' float32[2, 3], '1.k' float32[2, 4]: shapes may differ in dim 0 only, these
           ! differ elsewhere: (2, 3), (2, 4).
    """
    made = p.explain(source)
    text = str(made)
    assert text.startswith(lines(expected))
    assert "\n   ! rule 'nrm' -> 'x' matches none of 3 names" in text
    assert "\n   {0..1}.qk -> m.{0..1}.qk\n   norm -> m.norm: float32[1, 3]\n" in text
    assert text.endswith("out: 3 names, 2 of them unknown, 12 bytes")
    assert made.problems == check(p.steps, source, None).problems
    assert len(made.problems) == 3


def test_many_problems_are_counted() -> None:
    source = {f"{i}.w": wide(i + 2) for i in range(15)}
    made = index_select("{_}.w", [20]).explain(source)
    assert len(made.problems) == 15
    told = [line for line in str(made).splitlines() if line.startswith("   !")]
    assert told[-1] == "   ! and 5 problems more"


@frozen
class Broken(Step):
    """A step that raises where it should report."""

    verb: ClassVar[str] = "broken"

    def rewrite(self, scope: Scope) -> Rewrite:
        scope.names[0]
        from fdsd.data.errors import Unsupported

        raise Unsupported("It does not go.")

    def call_text(self) -> str:
        return "broken()"


def test_a_step_that_raises_is_a_problem_too() -> None:
    made = explain([Broken(), *add_prefix("m.").steps], {"w": wide(1)})
    assert [problem.message for problem in made.problems] == ["It does not go."]
    assert made.after == Size(1, 12)


# -- optimizers ------------------------------------------------------------------------------------------------


def optim_of(model: Mapping[str, Any]) -> OptimState:
    names = [name for name in model if "weight" in name]
    slots = {slot: {name: torch.zeros(model[name].shape) for name in names} for slot in ("exp_avg", "exp_avg_sq")}
    step = {name: torch.tensor(3.0) for name in names}
    groups = (ParamGroup(names[:4], {"lr": 0.1}), ParamGroup(names[4:], {"lr": 0.2}))
    return OptimState({**slots, "step": step}, groups)


def test_a_train_state_is_its_model_and_a_line_on_the_optimizer() -> None:
    model = {f"{i}.{n}.weight": torch.zeros(2, 3) for i in range(2) for n in "qk"} | {"o.weight": torch.zeros(3)}
    p = concat(["{i}.q.weight", "{i}.k.weight"], "{i}.qk.weight", dim=0)
    made = p.explain(TrainState(model, optim_of(model)))
    assert str(made) == lines("""
        1. concat(['{i}.q.weight', '{i}.k.weight'], '{i}.qk.weight', dim=0)
           2 made, 1 unchanged
           {0..1}.q.weight, {0..1}.k.weight -> {0..1}.qk.weight: 2 x float32[2, 3] -> float32[4, 3]
        in:  5 names, 108 bytes
        out: 3 names, 108 bytes
        optimizer: 3 slots (exp_avg, exp_avg_sq, step), 2 groups of 5 parameters -> 3 slots (exp_avg, exp_avg_sq,
            step), 2 groups of 3 parameters
    """)
    assert p.explain(TrainState(model)).optimizer is None


def test_what_cannot_be_lifted_is_a_problem() -> None:
    model = {"a.weight": torch.zeros(2, 3)}
    made = (cast(torch.bfloat16) >> add_prefix("m.")).explain(TrainState(model, optim_of(model)))
    assert "cannot be lifted to the optimizer's state of 'a.weight'" in made.problems[0].message
    assert made.optimizer == "3 slots (exp_avg, exp_avg_sq, step), 2 groups of 1 parameter"


def test_an_optimizer_alone() -> None:
    optim = optim_of({f"{n}.weight": torch.zeros(2, 3) for n in "abcde"})
    made = rename_fqns({"{x}.weight": "{x}.w"}).explain(optim)
    assert str(made).splitlines()[2] == "   a.weight -> a.w: float32[2, 3]"
    assert (made.before, made.after) == (Size(5, 260), Size(5, 260))
    assert made.optimizer == "3 slots (exp_avg, exp_avg_sq, step), 2 groups of 5 parameters"
    assert select("nothing").explain(optim).problems
    assert OptimState() == OptimState() and str(identity.explain(OptimState())).endswith("0 groups of 0 parameters")


def test_a_conversion_says_what_it_gives() -> None:
    made = flatten_optim().explain(optim_of({f"{n}.weight": torch.zeros(2) for n in "abcde"}))
    assert str(made).startswith("1. flatten_optim()\n   gives ")
    assert not made.problems


def test_a_model_spec_is_its_specs() -> None:
    model = ModelSpec({"w": TensorEntry(wide(2)), "v": TensorEntry(wide(2), tied_to="w")})
    made = transpose("w").explain(model)
    assert str(made.steps[0].lines[0]) == "w: float32[2, 3] -> float32[3, 2]"
    assert made.before == Size(2, 24)


# -- purity and cost -------------------------------------------------------------------------------------------


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_nothing_is_read_or_changed() -> None:
    w = torch.empty(2, 3, device="meta")
    source = {"w": w}
    made = map_tensors(doubled, spec=lambda spec: spec).explain(source)
    assert isinstance(made, Explanation)
    assert source == {"w": w} and w._version == 0


def test_100_000_names_are_eight_lines() -> None:
    """Only work that grows with the names ends within the suite's time limit."""
    spec = wide(2048, 1024, torch.bfloat16)
    source = {f"model.l.{i}.e.{e}.{w}.weight": spec for i in range(50) for e in range(500) for w in "abcd"}
    made = rename_fqns({"model.l.{i}.{rest...}": "blocks.{i}.{rest...}"}).explain(source)
    assert str(made).count("\n") == 7
    assert made.steps[0].lines[0].count == 25_000
