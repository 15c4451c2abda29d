"""Counts of used elements: against brute force on random graphs, and on rewrites whose counts are known."""

from __future__ import annotations

import itertools
import math
import pickle
from collections import Counter
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any, ClassVar

import pytest
import torch
from attrs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from fdsd.algebra.apply import Applier
from fdsd.algebra.lazy import Lazy, Pull, Structural
from fdsd.algebra.ops import Origin
from fdsd.data.errors import FdsdError, UnknownName, Unsupported
from fdsd.data.model import ModelSpec, TensorEntry
from fdsd.data.optim import OptimState
from fdsd.data.region import Region, Span
from fdsd.data.spec import TensorSpec
from fdsd.data.statedict import StateDict, specs
from fdsd.data.train import TrainState
from fdsd.pipeline import grids as counting
from fdsd.pipeline.coverage import Coverage, Uses, coverage, lazily
from fdsd.pipeline.grids import grids, spread
from fdsd.pipeline.pipeline import identity, pipe
from fdsd.pipeline.rewrite import Assign, Rewrite, Scope
from fdsd.pipeline.step import Step
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
    permute_rope,
    rename_fqns,
    split,
    stack,
    tie,
    transpose,
)
from tests.helpers.chains import grow
from tests.helpers.provenance import Places, Regrow
from tests.helpers.tensors import numbers


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def numbered(**shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    return {name: numbers(shape, torch.float32, k) for k, (name, shape) in enumerate(shapes.items())}


# -- grids ---------------------------------------------------------------------------------------------------


@st.composite
def spans(draw: st.DrawFn, size: int) -> Span:
    """Any span within a dim, with indices that repeat, too."""
    if not size:
        return Span(0, ((0, 1),))
    start, pairs = draw(st.integers(0, size - 1)), []
    room = size - 1 - start
    for _ in range(draw(st.integers(0, 3))):
        step = draw(st.integers(0, max(1, room)))
        length = draw(st.integers(1, min(5, room // step + 1 if step else 3)))
        pairs.append((length, step))
        room -= (length - 1) * step
    return Span(start, tuple(draw(st.permutations(pairs))))


@st.composite
def tensors_with_regions(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Region]]:
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 5, 12, 24]), max_size=3)))
    few = [[draw(spans(size)) for _ in range(3)] for size in shape]
    regions = [
        Region(
            tuple(
                [
                    draw(st.sampled_from(some)) if draw(st.booleans()) else Span(0, ((size, 1),))
                    for some, size in zip(few, shape, strict=True)
                ]
            )
        )
        for _ in range(draw(st.integers(0, 6)))
    ]
    return shape, regions


def by_places(shape: tuple[int, ...], regions: list[Region]) -> Counter[int]:
    """Count with a mask."""
    mask = torch.zeros(shape, dtype=torch.int64)
    for region in regions:
        for place in itertools.product(*[span.indices() for span in region.spans]):
            mask[place] += 1
    return Counter(mask.reshape(-1).tolist())


def by_grids(shape: tuple[int, ...], regions: list[Region]) -> Counter[int]:
    parts: Counter[Any] = Counter()
    for region in regions:
        for grid, times in grids(region):
            parts[grid] += times
    return +spread(parts, shape)


@given(tensors_with_regions())
@settings(max_examples=300)
def test_overlapping_grids_count_as_a_mask_does(case: tuple[tuple[int, ...], list[Region]]) -> None:
    assert by_grids(*case) == by_places(*case)


@given(tensors_with_regions(), st.integers(1, 7))
@settings(max_examples=200)
def test_overlapping_grids_count_as_a_mask_does_through_small_windows(case: Any, window: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counting, "_WINDOW", window)
        patch.setattr(counting, "_fold_all", lambda spans: None)
        assert by_grids(*case) == by_places(*case)


@pytest.mark.parametrize(
    ("span", "expected"),
    [
        (Span(3, ((4, 1), (1, 9))), [(Span(3, ((4, 1),)), 1)]),
        (Span(0, ((3, 1), (4, 3))), [(Span(0, ((12, 1),)), 1)]),
        (Span(2, ((3, 0), (2, 5))), [(Span(2, ((2, 5),)), 3)]),
        (Span(0, ((2, 1), (2, 1))), [(Span(0, ((2, 1),)), 1), (Span(1, ((2, 1),)), 1)]),
        (Span(7), [(Span(7), 1)]),
    ],
)
def test_spans_are_written_without_repeats(span: Span, expected: list[tuple[Span, int]]) -> None:
    assert list(grids(Region((span,)))) == [((one,), times) for one, times in expected]


def test_interleaved_parts_of_a_huge_dim_need_no_look_at_each_index() -> None:
    size, period = 10**12, 10**4
    rows = size // period
    parts: dict[tuple[Span, ...], int] = {
        (Span(0, ((rows, period), (6000, 1))),): 1,
        (Span(5000, ((rows, period), (5000, 1))),): 1,
        (Span(0, ((size, 1),)),): 1,
    }
    assert +spread(parts, (size,)) == {2: size - 1000 * rows, 3: 1000 * rows}


# -- against brute force -------------------------------------------------------------------------------------


def uses_of(source: StateDict[Any], found: Counter[int], names: list[tuple[str, tuple[int, ...]]]) -> dict[str, Uses]:
    times: dict[str, list[int]] = {name: [] for name in source}
    for number, (name, _) in enumerate(names):
        times[name].append(found[number])
    return {name: Uses(every.count(1), sum([n > 1 for n in every]), every.count(0)) for name, every in times.items()}


def grown(seed: int) -> tuple[Regrow, dict[str, torch.Tensor]]:
    chain = grow(("coverage", seed), length=9)
    rng = Random(seed)
    roots = {f"y{k}": rng.choice(chain.pool).lazy for k in range(rng.randint(1, 4))}
    roots["last"] = chain.pool[-1].lazy
    origins = {id(x.lazy): f"x{k}" for k, x in enumerate(chain.pool) if isinstance(x.lazy.op, Origin)}
    tensors = {f"x{k}": x.eager for k, x in enumerate(chain.pool) if isinstance(x.lazy.op, Origin)}
    return Regrow(roots, origins), tensors


@given(st.integers(0, 10**9))
@settings(max_examples=400)
def test_counts_equal_those_of_brute_force(seed: int) -> None:
    step, tensors = grown(seed)
    given_state, result = lazily([step], tensors)
    places = Places(given_state)
    found: Counter[int] = Counter()
    for root in {id(leaf): leaf for leaf in result.values()}.values():
        found += places.uses(root)
    made = coverage([step], tensors)
    assert dict(made.counts) == uses_of(given_state, found, places.names)
    assert made.is_exact_cover == (
        all(n == 1 for n in [found[k] for k in range(len(places.names))]) and not made.dropped
    )


@given(st.integers(0, 10**9), st.integers(0, 10**9))
@settings(max_examples=50)
def test_two_steps_count_as_their_composition(seed: int, other: int) -> None:
    step, tensors = grown(seed)
    names = list(step.roots)
    Random(other).shuffle(names)
    renames = add_prefix("z.") >> rename_fqns({f"z.{name}": f"w.{k}" for k, name in enumerate(names)})
    assert coverage([step, *renames.steps], tensors) == coverage([step], tensors)


# -- known counts --------------------------------------------------------------------------------------------


def test_bijections_are_exact_covers() -> None:
    source = numbered(q=(8, 4), k=(4, 4), v=(4, 4), norm=(4,), scale=())
    p = pipe(
        add_prefix("m."),
        permute_rope("m.q", heads=2, to="halves"),
        concat(["m.q", "m.k", "m.v"], "m.qkv", dim=0, groups=4),
        transpose("m.qkv"),
        cast(torch.bfloat16),
        split("m.qkv", ["m.a", "m.b"], dim=1, sizes=[6, 10]),
    )
    made = p.coverage(source)
    assert made.is_exact_cover
    assert made.total == Uses(32 + 16 + 16 + 4 + 1, 0, 0)
    assert made.unused == made.reused == {}


def test_every_class_is_counted_and_dropped_names_stand_apart() -> None:
    source = numbered(a=(4, 3), b=(2, 3), c=(5,), d=(2, 2))
    p = pipe(index_select("a", [0, 0, 3]), drop("c"), index_select("b", [1], dim=1))
    made = p.coverage(source)
    assert dict(made.counts) == {
        "a": Uses(once=3, more=3, never=6),
        "b": Uses(once=2, more=0, never=4),
        "c": Uses(once=0, more=0, never=5),
        "d": Uses(once=4, more=0, never=0),
    }
    assert made.dropped == ("c",)
    assert made.unused == {"a": 6, "b": 4, "c": 5}
    assert made.reused == {"a": 3}
    assert made.total == Uses(9, 3, 15)
    assert not made.is_exact_cover
    assert str(made) == (
        "4 tensors of 27 elements: 9 used once, 3 more than once, 15 never\n"
        "used once:\n"
        "  a: 3 of 12\n"
        "  b: 2 of 6\n"
        "  d: all 4\n"
        "used more than once:\n"
        "  a: 3 of 12\n"
        "never used:\n"
        "  a: 6 of 12\n"
        "  b: 4 of 6\n"
        "dropped:\n"
        "  c"
    )


def test_more_runs_than_are_read_one_by_one_count_only_what_is_chosen() -> None:
    """A run reads such an index from a covering scratch, far more than it uses."""
    chosen = Random(3).sample(range(1000), 200)
    made = index_select("w", [*chosen, chosen[0]]).coverage({"w": torch.zeros(1000, 2)})
    assert made.counts["w"] == Uses(once=398, more=2, never=1600)


def test_padding_uses_nothing_of_the_source() -> None:
    made = pad("w", 8).coverage(numbered(w=(5, 2)))
    assert made.is_exact_cover


def test_ties_count_once_under_the_first_name() -> None:
    source = numbered(embed=(4, 2), norm=(2,))
    source["head"] = source["embed"]
    made = pipe(cast(torch.float64)).coverage(source)
    assert dict(made.counts) == {"embed": Uses(8, 0, 0), "norm": Uses(2, 0, 0)}
    assert dict(made.aliases) == {"embed": ("head",)}
    assert made.is_exact_cover
    assert str(made).endswith("tied, counted once:\n  embed, head")
    assert drop("head").coverage(source).is_exact_cover
    assert drop("embed", "head").coverage(source).dropped == ("embed",)
    assert cast(torch.float64, "head").coverage(source).counts["embed"] == Uses(0, 8, 0)


def test_a_comparison_uses_all_that_it_compares() -> None:
    assert tie({"head": "embed"}).coverage(numbered(embed=(3,), head=(3,))).is_exact_cover


def test_specs_that_are_tied_count_as_tensors_that_are() -> None:
    source = numbered(embed=(4, 2))
    source["head"] = source["embed"]
    assert identity.coverage(specs(source)) == identity.coverage(source)
    spec = TensorSpec((4, 2), torch.float32)
    model = ModelSpec({"embed": TensorEntry(spec), "head": TensorEntry(spec, tied_to="embed")})
    assert identity.coverage(model) == identity.coverage(source)


def test_names_are_those_of_the_source_even_if_its_leaves_are_expressions() -> None:
    """As those of an opened checkpoint, over files with other names."""
    under = {"file.w": torch.zeros(4, 2), "file.b": torch.zeros(3)}
    source = pipe(add_prefix("now."), index_select("now.file.w", [0]))(lazily((), under)[0])
    made = index_select("now.file.b", [1, 2]).coverage(source)
    assert dict(made.counts) == {"now.file.w": Uses(2, 0, 0), "now.file.b": Uses(2, 0, 1)}


def test_a_function_uses_all_of_its_input_once_a_result() -> None:
    source = numbered(w=(6,))
    doubled_up = map_tensors(doubled, spec=lambda spec: spec)
    assert (doubled_up >> index_select("w", [0])).coverage(source).is_exact_cover
    assert (doubled_up >> index_select("w", [0, 0, 1])).coverage(source).is_exact_cover
    both = doubled_up >> split("w", ["a", "b"], dim=0, sizes=[2, 4])
    assert both.coverage(source).counts["w"] == Uses(0, 6, 0)
    one = both >> concat(["a", "b"], "w", dim=0)
    assert one.coverage(source).is_exact_cover
    assert (index_select("w", [2, 2]) >> doubled_up).coverage(source).counts["w"] == Uses(0, 1, 5)


def test_equal_functions_of_one_tensor_are_one_as_they_are_in_a_run() -> None:
    source = numbered(a=(6,))
    source["b"] = source["a"]
    rule = {"spec": lambda spec: spec}
    p = map_tensors(doubled, "a", **rule) >> map_tensors(doubled, "b", **rule) >> concat(["a", "b"], "ab", dim=0)
    assert p.coverage(source).is_exact_cover


@frozen
class Repeat(Structural):
    """Put a tensor beside itself along a new first dim, by a step of 0."""

    times: int

    def infer(self, *inputs: TensorSpec) -> TensorSpec:
        return inputs[0].with_shape((self.times, *inputs[0].shape))

    def pull(self, inputs: Sequence[Lazy], region: Region, out: torch.Tensor) -> Iterator[Pull]:
        first, second, *rest = region.spans
        again = tuple([(length, 0) for length, _ in first.pairs])
        yield inputs[0], Region((Span(second.start, again + second.pairs), *rest)), out


@frozen
class Repeated(Step):
    verb: ClassVar[str] = "repeated"

    def rewrite(self, scope: Scope) -> Rewrite:
        return Rewrite.of([Assign(name, (name,), self._build) for name in scope.names])

    def _build(self, apply: Applier, leaves: Sequence[Any]) -> Any:
        return apply(Repeat(3), leaves[0])


def test_regions_that_stand_still_count_each_time() -> None:
    source = numbered(w=(4, 2))
    assert coverage([Repeated()], source).counts["w"] == Uses(0, 8, 0)
    cut = [*index_select("w", [1]).steps, Repeated()]
    assert coverage(cut, source).counts["w"] == Uses(0, 2, 6)
    assert coverage([Repeated(), *index_select("w", [1]).steps], source).is_exact_cover


def test_a_tensor_without_elements_is_dropped_only_if_no_result_mentions_it() -> None:
    source = numbered(a=(0, 3), b=(0,), c=(2, 3))
    made = pipe(drop("b"), concat(["a", "c"], "ac", dim=0)).coverage(source)
    assert made.dropped == ("b",)
    assert made.counts["a"] == Uses(0, 0, 0)
    assert not made.is_exact_cover
    assert drop("c").coverage(source).dropped == ("c",)


def test_objects_are_not_counted_and_inserted_tensors_use_nothing() -> None:
    source: dict[str, Any] = {**numbered(w=(2,)), "_extra_state": "tag"}
    made = insert("s", TensorSpec((2,), torch.float32), init=1.0).coverage(source)
    assert list(made.counts) == ["w"]
    assert made.is_exact_cover
    assert identity.coverage({}) == Coverage(StateDict[Uses]())
    assert str(identity.coverage({})) == "0 tensors of 0 elements: 0 used once, 0 more than once, 0 never"


def test_a_train_state_is_its_model() -> None:
    source = numbered(w=(2, 2))
    state = TrainState(source, OptimState({"exp_avg": numbered(w=(2, 2))}))
    assert transpose("w").coverage(state) == transpose("w").coverage(source)


def test_what_is_no_state_dict_is_refused_by_name() -> None:
    with pytest.raises(Unsupported, match=r"one column: state\.slots\[slot\]"):
        identity.coverage(OptimState())
    with pytest.raises(Unsupported, match=r"Linear is no state\. .* its state_dict\(\)"):
        identity.coverage(torch.nn.Linear(1, 1))
    with pytest.raises(FdsdError):
        flatten_optim().coverage({"w": torch.zeros(1)})  # type: ignore[arg-type]


def test_an_error_names_its_step() -> None:
    with pytest.raises(UnknownName) as caught:
        pipe(add_prefix("a."), drop("b")).coverage(numbered(b=(2,)))
    assert getattr(caught.value, "__notes__", []) == ["step 2 of 2, drop('b')"]


def test_long_tables_are_folded_and_cut() -> None:
    source = {f"layers.{i}.{name}": torch.zeros(k + 1) for i in range(3) for k, name in enumerate("abcdefghijklm")}
    lines = str(identity.coverage(source)).splitlines()
    assert lines[2] == "  layers.{0..2}.a: all 1 each"
    assert lines[-1] == "  and 3 more like these"
    assert len(lines) == 13


def test_a_coverage_is_a_value() -> None:
    made = index_select("w", [0]).coverage(numbered(w=(2,)))
    assert pickle.loads(pickle.dumps(made)) == made
    assert repr(made) == str(made)
    with pytest.raises(AttributeError):
        made.dropped = ()  # type: ignore[misc]


def test_nothing_is_read_and_inputs_are_left_alone() -> None:
    w = torch.nn.Parameter(torch.empty(3, 2, device="meta"))
    version = w._version
    assert transpose("w").coverage({"w": w}).is_exact_cover
    assert w._version == version


def test_28_000_names_of_a_hundred_trillion_elements() -> None:
    """Only work that grows with the names ends within the suite's time limit."""
    spec = TensorSpec((65536, 65536), torch.bfloat16)
    source = {f"l.{i}.e.{e}.w": spec for i in range(100) for e in range(80)}
    source |= {f"l.{i}.n.{e}": spec for i in range(100) for e in range(200)}
    p = stack("l.{i}.e.{e}.w", "l.{i}.e.w") >> transpose("{_...}.e.w") >> add_prefix("m.")
    made = p.coverage(source)
    assert made.is_exact_cover
    assert made.total.once == 28_000 * math.prod(spec.shape)
