"""What goes wrong with names elsewhere, and what is right: the whole of each kind, not the one example."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from fdsd import StateDict, add_prefix, concat, defer, drop_prefix, rename_fqns, specs, stack, strip_wrappers, unstack
from fdsd.errors import FdsdError, IncompleteGroup, NameConflict, UnknownName
from fdsd.testing import assert_round_trip, assert_same


def named(*names: str) -> StateDict[Any]:
    return StateDict({name: torch.tensor([float(k)]) for k, name in enumerate(names)})


def experts(*pairs: tuple[int, str]) -> StateDict[Any]:
    return StateDict({f"e.{x}.{w}": torch.tensor([10.0 * x + int(w[1])]) for x, w in pairs})


class TestTwoNamesForOneTarget:
    """Seen: the second is dropped silently. Right: an error that names both."""

    @pytest.mark.parametrize(
        ("p", "names"),
        [
            (rename_fqns({"a": "c", "b": "c"}), ["a", "b"]),
            (rename_fqns({"a": "b"}), ["a", "b"]),
            (rename_fqns({"{x}.w": "w.{x}", "{x}.v?": "w.{x}"}), ["a.w", "a.v"]),
            (rename_fqns(lambda name: "c"), ["a", "b"]),
            (strip_wrappers(), ["module.a.w", "a.w"]),
            (strip_wrappers(), ["_orig_mod.a.w", "module.a.w"]),
            (concat(["a", "b"], "c", dim=0), ["a", "b", "c"]),
            (stack("a.{x}", "c"), ["a.0", "a.1", "c"]),
        ],
        ids=str,
    )
    @pytest.mark.parametrize("form", [dict, specs, defer])
    def test_both_are_named(self, p: Any, names: list[str], form: Any) -> None:
        for order in itertools.permutations(names):
            with pytest.raises(NameConflict) as caught:
                p(form(named(*order)))
            assert sum(repr(name) in str(caught.value) for name in names) >= min(2, len(names) - 1)


class TestRaggedIndices:
    """Seen: a missing and a stray expert load "complete", weights shifted. Right: errors that name the indices."""

    @pytest.mark.parametrize(
        ("pairs", "texts"),
        [
            ([(0, "w1"), (2, "w1"), (0, "w2"), (1, "w2"), (2, "w2")], ["lacks 1"]),
            ([(0, "w1"), (9, "w1"), (0, "w2"), (1, "w2")], ["'e.w1'"]),
            ([(1, "w1"), (2, "w1")], ["0"]),
            ([(0, "w1"), (1, "w1"), (2, "w1"), (0, "w2"), (1, "w2")], ["'e.w2'", "lacks 2"]),
            ([(0, "w1"), (1, "w1"), (9, "w1"), (0, "w2"), (1, "w2"), (2, "w2")], ["9"]),
        ],
    )
    def test_holes_strays_and_ragged_sets(self, pairs: list[tuple[int, str]], texts: list[str]) -> None:
        for order in (pairs, pairs[::-1]):
            with pytest.raises(IncompleteGroup) as caught:
                stack("e.{x}.{w}", "e.{w}")(experts(*order))
            assert all(text in str(caught.value) for text in texts)

    @pytest.mark.parametrize("lost", range(4))
    def test_every_single_loss_is_found(self, lost: int) -> None:
        pairs = [(x, w) for x in range(4) for w in ("w1", "w2", "w3") if (x, w) != (lost, "w1")]
        with pytest.raises(IncompleteGroup, match=f"lacks {lost}|w1"):
            stack("e.{x}.{w}", "e.{w}")(experts(*pairs))

    def test_a_loss_that_all_groups_share_is_found_with_num(self) -> None:
        pairs = [(x, w) for x in range(3) for w in ("w1", "w2")]
        assert stack("e.{x}.{w}", "e.{w}")(experts(*pairs))["e.w1"].shape == (3, 1)
        with pytest.raises(IncompleteGroup, match="lacks 3"):
            stack("e.{x}.{w}", "e.{w}", num=4)(experts(*pairs))


class TestTheIndexIsTheIndex:
    """Seen: the position in the sorted list becomes the index."""

    @pytest.mark.parametrize("order", list(itertools.permutations([0, 1, 2])))
    def test_whatever_the_order(self, order: tuple[int, ...]) -> None:
        made = stack("e.{x}.{w}", "e.{w}")(experts(*[(x, "w1") for x in order]))
        assert made["e.w1"].flatten().tolist() == [1.0, 11.0, 21.0]

    def test_beyond_ten(self) -> None:
        pairs = sorted([(x, "w1") for x in range(12)], key=lambda pair: str(pair[0]))
        made = stack("e.{x}.{w}", "e.{w}")(experts(*pairs))
        assert made["e.w1"].flatten().tolist() == [10.0 * x + 1 for x in range(12)]
        assert list(unstack("e.w1", "f.{x}")(made)) == [f"f.{x}" for x in range(12)]

    def test_an_expert_renamed_away_is_missed(self) -> None:
        moved = rename_fqns({"e.3.{w}": "e.7.{w}"})(experts(*[(x, "w1") for x in range(4)]))
        with pytest.raises(IncompleteGroup, match=r"lacks 3|7"):
            stack("e.{x}.{w}", "e.{w}")(moved)


class TestRules:
    """Seen: a rule that matches nothing goes unnoticed; undoing adds the prefix twice."""

    @pytest.mark.parametrize(
        "rules",
        [
            {"layer.{i}.w": "l.{i}"},
            {"layers.{i}.q": "l.{i}"},
            {"{x}": "m.{x}", "a": "b"},
            {"layers.{i:0..1}.w": "a.{i}"},
        ],
        ids=str,
    )
    def test_unmatched_and_shadowed_rules_are_errors_unless_they_are_optional(self, rules: dict[str, str]) -> None:
        state = named("layers.7.w", "a")
        with pytest.raises(UnknownName) as caught:
            rename_fqns(rules)(state)
        assert all(repr(source) in str(caught.value) for source in list(rules)[-1:])
        assert isinstance(rename_fqns({f"{source}?": target for source, target in rules.items()})(state), StateDict)

    @pytest.mark.parametrize("p", [add_prefix("m."), rename_fqns({"{r...}": "m.{r...}"}), drop_prefix("a.")], ids=str)
    def test_a_rename_and_its_inverse_cancel(self, p: Any) -> None:
        state = named("a.b", "a.m.c", "a.a.d")
        assert_round_trip(p, state)
        assert list((~p)(p(p(state)) if "drop" not in repr(p) else p(state))) == list(
            p(state) if "drop" not in repr(p) else state
        )
        if "drop" not in repr(p):
            with pytest.raises(FdsdError):
                (~p)(state)


class TestWrappers:
    """Seen: checkpointing over torch.compile gives ``0._orig_mod.weight``, and the clean name does not load."""

    WRAPPERS = ("_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")

    def test_wherever_they_stand_in_any_nesting(self) -> None:
        for count in range(4):
            for wrappers in itertools.product(self.WRAPPERS, repeat=count):
                for at in range(3):
                    path = ["layers", "0", "weight"]
                    name = ".".join([*path[:at], *wrappers, *path[at:]])
                    assert list(strip_wrappers()({name: 1})) == ["layers.0.weight"]

    def test_a_clean_name_loads_after(self) -> None:
        clean = torch.nn.Sequential(torch.nn.Linear(2, 2))
        dirty = StateDict({f"module.0._orig_mod.{k}": v for k, v in clean[0].state_dict().items()})
        assert clean.load_state_dict(strip_wrappers()(dirty).to_dict(), strict=True)


class TestOrder:
    """Seen: names sorted as text put layers.10 before layers.2. Right: insertion order is kept."""

    def test_by_every_verb(self) -> None:
        state = StateDict({f"layers.{i}.{x}": torch.ones(2) for i in range(12) for x in "ba"})
        order = [f"l.{i}" for i in range(12)]
        joined = concat(["layers.{i}.a", "layers.{i}.b"], "l.{i}", dim=0)
        assert list(joined(state)) == list(joined(specs(state))) == list(joined(defer(state))) == order
        assert list(rename_fqns({"layers.{i}.{x}": "{x}.{i}"})(state)) == [f"{x}.{i}" for i in range(12) for x in "ba"]
        assert list(StateDict(dict(state))) == list(state)

    def test_equality_does_not_look_at_it(self) -> None:
        a, b = torch.ones(1), torch.ones(2)
        assert StateDict({"a": a, "b": b}) == {"b": b, "a": a}
        assert_same({"a": a, "b": b}, {"b": b, "a": a})
