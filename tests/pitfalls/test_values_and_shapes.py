"""What goes wrong with values and shapes elsewhere, and what is right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fdsd import (
    average,
    cast,
    concat,
    crop,
    defer,
    lerp,
    materialize,
    pad,
    permute_rope,
    reshape,
    specs,
    split,
    tie,
    transpose,
)
from fdsd.errors import FdsdError, SpecMismatch


class TestHeadCounts:
    """Seen: the query head count on a GQA key is silently wrong. Right: per-tensor head counts."""

    def test_keys_have_their_own(self) -> None:
        H, G, d = 8, 2, 4
        q, k = torch.arange(H * d), torch.arange(G * d)
        p = permute_rope("q", heads=H, to="halves") >> permute_rope("k", heads=G, to="halves")
        made = p({"q": q, "k": k})
        assert made["k"].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
        assert made["q"].view(H, d).tolist() == [[4 * h, 4 * h + 2, 4 * h + 1, 4 * h + 3] for h in range(H)]

    @pytest.mark.parametrize(("rows", "heads"), [(8, 8), (8, 3), (12, 4), (6, 6), (2, 4)])
    def test_rows_that_do_not_divide_into_even_heads_are_refused(self, rows: int, heads: int) -> None:
        if rows % (2 * heads) == 0:
            pytest.skip("it divides")
        for form in (dict, specs, defer):
            with pytest.raises(SpecMismatch, match=rf"'k'.*\({rows},.*{heads} heads"):
                permute_rope("k", heads=heads, to="halves")(form({"k": torch.zeros(rows, 2)}))  # type: ignore[operator]


class TestExactSizes:
    """Seen: 10 rows into q, k, v gives 4, 4, 2; 4 rows lose v. Right: exact sizes or an error."""

    @given(st.integers(0, 12), st.lists(st.integers(0, 5), min_size=2, max_size=4))
    def test_sizes_add_up_or_nothing_is_split(self, rows: int, sizes: list[int]) -> None:
        names = [f"p{k}" for k in range(len(sizes))]
        state = {"x": torch.arange(rows)}
        p = split("x", names, dim=0, sizes=sizes)
        if sum(sizes) == rows:
            assert torch.cat([p(state)[name] for name in names]).tolist() == list(range(rows))
            assert [len(p(state)[name]) for name in names] == sizes
        else:
            with pytest.raises(SpecMismatch, match=rf"size {rows}\b.*{sum(sizes)}"):
                p(state)

    @pytest.mark.parametrize("rows", [10, 4, 2])
    def test_three_equal_parts(self, rows: int) -> None:
        size = -(-rows // 3)
        with pytest.raises(SpecMismatch):
            split("x", ["q", "k", "v"], dim=0, sizes=[size] * 3)({"x": torch.arange(rows)})

    @given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 6))
    def test_blocks_divide_exactly_or_nothing_is_joined(self, a: int, b: int, groups: int) -> None:
        state = {"a": torch.arange(a), "b": torch.arange(b)}
        p = concat(["a", "b"], "x", dim=0, groups=groups)
        if a % groups or b % groups:
            with pytest.raises(SpecMismatch, match=f"groups={groups}"):
                p(state)
        else:
            assert len(p(state)["x"]) == a + b


class TestOrientation:
    """Seen: "transpose if the shape does not fit" on a square or cube. Right: declared, never guessed."""

    @pytest.mark.parametrize("shape", [(3, 3), (2, 3), (1, 1), (2, 2, 2)])
    def test_transpose_transposes(self, shape: tuple[int, ...]) -> None:
        w = torch.arange(torch.Size(shape).numel()).reshape(shape)
        for form in (dict, defer):
            made = materialize(transpose("w")(form({"w": w})))["w"]  # type: ignore[operator]
            assert torch.equal(made, w.transpose(-2, -1))

    def test_nothing_else_ever_does(self) -> None:
        w = torch.arange(6).reshape(2, 3)
        for expect in ((3, 2), (6,)):
            report = crop("w", 2).check({"w": w}, expect={"w": torch.zeros(expect, dtype=torch.int64)})
            assert "(2, 3)" in str(report) and not report.ok


class TestNoBroadcasting:
    """Seen: a (5, 1) tensor fills a (5, 4) weight. Right: exact shapes, checked before anything is made."""

    @pytest.mark.parametrize("other", [(5, 1), (1, 4), (4,), (1,), (), (6, 4), (5, 4, 1)])
    def test_states_are_merged_and_tied_with_equal_shapes_only(self, other: tuple[int, ...]) -> None:
        a, b = {"w": torch.zeros(5, 4)}, {"w": torch.zeros(other)}
        for run in (
            lambda: average([a, b]),
            lambda: lerp(a, b, 0.5),
            lambda: tie({"v": "w"})({"w": a["w"], "v": b["w"]}),
        ):
            with pytest.raises(SpecMismatch, match="w"):
                run()
        if len(other) == 2 and other[1] != 4:
            with pytest.raises(SpecMismatch):
                concat(["w", "v"], "x", dim=0)({"w": a["w"], "v": b["w"]})

    def test_the_expected_shape_is_the_shape(self) -> None:
        for p in (reshape("w", (5, 1)), pad("w", 5)):
            assert not p.check({"w": torch.zeros(5)}, expect={"w": torch.zeros(5, 4)}).ok

    def test_nothing_is_half_applied(self) -> None:
        state: dict[str, Any] = {"a": torch.arange(4.0), "b": torch.arange(6.0).reshape(2, 3)}
        before = {name: leaf.clone() for name, leaf in state.items()}
        with pytest.raises(FdsdError):
            (cast(torch.float64) >> transpose("{_}"))(state)
        assert all(torch.equal(state[name], before[name]) and state[name].dtype == before[name].dtype for name in state)


class TestDtypes:
    """Seen: float32 into bfloat16 or int64 without a word. Right: a cast is a step, and one dtype is one dtype."""

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.float64, torch.bool])
    def test_no_verb_casts_by_itself(self, dtype: torch.dtype) -> None:
        a, b = torch.ones(2), torch.ones(2).to(dtype)
        for run in (
            lambda: concat(["a", "b"], "x", dim=0)({"a": a, "b": b}),
            lambda: average([{"a": a}, {"a": b}]),
            lambda: tie({"a": "b"})({"a": a, "b": b}),
        ):
            with pytest.raises(SpecMismatch, match=str(dtype).removeprefix("torch.")):
                run()
        report = transpose("a", 0, 0).check({"a": a}, expect={"a": b})
        assert "expected " + str(dtype).removeprefix("torch.") in str(report) and "cast()" in str(report)

    def test_moves_keep_the_dtype(self) -> None:
        for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.uint16, torch.bool):
            x = {"w": torch.tensor([[1, 0], [0, 1], [1, 1], [0, 0]]).to(dtype)}
            for p in (transpose("w"), pad("w", 6), permute_rope("w", heads=1, to="pairs"), reshape("w", (8,))):
                assert p(x)["w"].dtype == dtype
