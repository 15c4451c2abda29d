"""What a step does with leaves of every kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fdsd import (
    Lazy,
    Pipeline,
    StateDict,
    TensorSpec,
    add_prefix,
    add_scalar,
    cast,
    defer,
    drop,
    materialize,
    rename_fqns,
    select,
    specs,
    split,
    transpose,
)
from fdsd.errors import SpecMismatch, Unsupported
from fdsd.testing import assert_same

W = torch.arange(6.0).reshape(2, 3)


class Marked(torch.Tensor):
    """A subclass of tensors that fdsd does not know."""


def marked() -> torch.Tensor:
    return W.clone().as_subclass(Marked)


class TestSubclasses:
    @pytest.mark.parametrize("p", [rename_fqns({"s": "t"}), add_prefix("m."), select("s"), drop("w?")], ids=str)
    def test_may_be_renamed_and_chosen(self, p: Pipeline) -> None:
        leaf = marked()
        assert next(iter(p({"s": leaf}).values())) is leaf

    @pytest.mark.parametrize("p", [transpose("s"), cast(torch.float64), add_scalar("s", 1.0)], ids=str)
    def test_are_not_rearranged_or_computed_on(self, p: Pipeline) -> None:
        with pytest.raises(Unsupported, match=r"'s'.*Marked.*plain tensor"):
            p({"s": marked()})
        with pytest.raises(Unsupported, match="Marked"):
            defer({"s": marked()})

    def test_beside_others_all_are_told(self) -> None:
        with pytest.raises(Unsupported) as caught:
            transpose("{_}")({"s": marked(), "w": W, "r": marked()})
        assert "'s'" in str(caught.value) and "'r'" in str(caught.value) and "'w'" not in str(caught.value)


class TestParameters:
    def test_stay_parameters_when_they_are_renamed(self) -> None:
        leaf = torch.nn.Parameter(W)
        assert rename_fqns({"w": "v"})({"w": leaf})["v"] is leaf

    def test_become_plain_detached_tensors_when_they_are_rearranged(self) -> None:
        leaf = torch.nn.Parameter(W)
        for x in (leaf, leaf * 2, W.clone().requires_grad_()):
            made = transpose("w")({"w": x})["w"]
            assert type(made) is torch.Tensor and not made.requires_grad and made.grad_fn is None
        assert not torch.is_grad_enabled() or leaf.requires_grad
        assert leaf.grad is None


@pytest.mark.parametrize("bit", ["conj", "neg"])
def test_lazy_bits_of_torch_are_values(bit: str) -> None:
    z = torch.tensor([[1 + 2j, 3 - 4j]])
    x = z.conj() if bit == "conj" else z.conj().imag
    for p in (transpose("x"), split("x", ["a", "x"], dim=1, sizes=[1, 1]), add_scalar("x", 1.0)):
        made = p({"x": x})["x"]
        assert_same(made, p({"x": x.clone().resolve_conj().resolve_neg()})["x"])
        assert_same(materialize(p(defer({"x": x})))["x"], made)


class TestSparse:
    def test_may_be_renamed(self) -> None:
        sparse = torch.eye(2).to_sparse()
        assert rename_fqns({"s": "t"})({"s": sparse})["t"] is sparse

    def test_are_refused_in_words_otherwise(self) -> None:
        state = {"s": torch.eye(2).to_sparse()}
        for run in (lambda: transpose("s")(state), lambda: specs(state), lambda: defer(state)):
            with pytest.raises(Unsupported, match="to_dense"):
                run()


def test_meta_tensors_are_rearranged_without_data() -> None:
    made = (transpose("w") >> cast(torch.bfloat16))({"w": W.to("meta")})["w"]
    assert made.is_meta and made.shape == (3, 2) and made.dtype == torch.bfloat16


def test_specs_lazy_tensors_and_tensors_may_stand_side_by_side() -> None:
    state = {"t": W, "l": defer({"l": W})["l"], "s": TensorSpec((2, 3), torch.float32)}
    made = transpose("{_}")(state)
    assert (
        type(made["t"]) is torch.Tensor
        and isinstance(made["l"], Lazy)
        and made["s"] == TensorSpec((3, 2), torch.float32)
    )
    assert isinstance(drop("x?")(state), StateDict)


def test_specs_have_no_data() -> None:
    with pytest.raises(SpecMismatch, match="'w'"):
        materialize(specs({"w": W}))


def test_views_serve_where_they_can() -> None:
    made: Any = split("w", ["a", "b"], dim=0, sizes=[1, 1])({"w": W})
    assert made["b"].data_ptr() == W.data_ptr() + 12


def test_a_large_state_is_linear() -> None:
    state = {f"layers.{i}.w": W for i in range(20_000)}
    made = (rename_fqns({"layers.{i}.w": "l.{i}"}) >> drop("l.7"))(state)
    assert len(made) == 19_999
