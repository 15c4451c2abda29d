"""What goes wrong with tied tensors elsewhere, and what is right: aliases are data; one tensor, all names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fdsd
from fdsd import StateDict, cast, defer, filter_frozen, materialize, rename_fqns, save, specs, tie, transpose
from fdsd.data.ties import ties
from fdsd.errors import SpecMismatch
from fdsd.testing import assert_same


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(5, 3)
        self.norm = torch.nn.LayerNorm(3)
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


NAMES = ["embed.weight", "norm.weight", "norm.bias", "head.weight"]


class TestAllNamesOneTensor:
    """Seen: tied weights come back as separate parameters; gathering makes two copies; a file refuses the dict."""

    @pytest.mark.parametrize("form", [lambda x: x, defer])
    @pytest.mark.parametrize(
        "p",
        [cast(torch.bfloat16), rename_fqns({"{x...}": "m.{x...}"}), transpose(["embed.weight", "head.weight"])],
        ids=str,
    )
    def test_through_pipelines(self, form: Any, p: Any) -> None:
        made = materialize(p(form(Tied().state_dict())))
        (group,) = ties(made)
        assert [name.removeprefix("m.") for name in group] == ["embed.weight", "head.weight"]

    def test_they_are_computed_once(self) -> None:
        calls: list[int] = []

        def count(x: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            return x + 1

        w = torch.ones(2)
        for form in ({"a": w, "b": w}, defer({"a": w, "b": w})):
            materialize(fdsd.map_tensors(count, spec=lambda spec: spec)(form))
        assert len(calls) == 2

    @pytest.mark.parametrize("max_shard_size", ["5GB", 30])
    def test_safetensors_round_trip(self, tmp_path: Path, max_shard_size: Any) -> None:
        model = Tied()
        path = tmp_path / ("model.safetensors" if max_shard_size == "5GB" else "folder")
        save(model.state_dict(), path, max_shard_size=max_shard_size)
        opened = fdsd.open(path)
        assert sorted(opened) == sorted(NAMES)
        assert ties(opened) == [("embed.weight", "head.weight")] or ties(opened) == [("head.weight", "embed.weight")]
        whole = materialize(opened)
        assert_same(whole, model.state_dict())
        size = sum(f.stat().st_size for f in ([path] if path.is_file() else path.glob("*.safetensors")))
        assert size < 5 * 3 * 4 * 2 + 2000
        fresh = Tied()
        fresh.load_state_dict(whole.to_dict(), strict=True)
        assert fresh.head.weight is fresh.embed.weight

    def test_a_cast_on_the_way_to_a_file_keeps_them(self, tmp_path: Path) -> None:
        save(cast(torch.bfloat16)(defer(Tied().state_dict())), tmp_path / "m.safetensors")
        assert [len(group) for group in ties(fdsd.open(tmp_path / "m.safetensors"))] == [2]


class TestAFileWithOneOfTheNames:
    """Seen: it is "missing a key". Right: ``tie`` gives the alias; two unequal values are an error."""

    def test_the_alias_is_given_back(self) -> None:
        model = Tied()
        state = StateDict({name: leaf for name, leaf in model.state_dict().items() if name != "head.weight"})
        made = tie({"head.weight": "embed.weight"})(state)
        assert made["head.weight"] is made["embed.weight"]
        assert Tied().load_state_dict(made.to_dict(), strict=True)
        assert tie({"head.weight": "embed.weight"}).check(state, expect=model.state_dict()).ok

    @pytest.mark.parametrize("form", [dict, defer])
    def test_two_unequal_values(self, form: Any) -> None:
        w = torch.arange(4.0)
        with pytest.raises(SpecMismatch, match=r"embed.*head.*unequal|head.*embed.*unequal"):
            materialize(tie({"head": "embed"})(form({"embed": w, "head": w + 1})))

    @pytest.mark.parametrize("form", [dict, defer])
    def test_two_equal_values_become_one(self, form: Any) -> None:
        w = torch.arange(4.0)
        made = materialize(tie({"head": "embed"})(form({"embed": w, "head": w.clone()})))
        assert made["head"] is made["embed"]


class TestFrozenAliases:
    """Seen: a frozen weight's tied alias stays when frozen parameters are ignored. Right: the alias goes too."""

    @pytest.mark.parametrize("form", [dict, defer, specs])
    @pytest.mark.parametrize("frozen", [["embed.weight"], ["head.weight"], ["embed.weight", "head.weight"]])
    def test_by_whichever_name(self, form: Any, frozen: list[str]) -> None:
        assert list(filter_frozen(frozen)(form(Tied().state_dict()))) == ["norm.weight", "norm.bias"]

    def test_after_other_steps(self) -> None:
        p = rename_fqns({"{m}.weight": "{m}.w"}) >> cast(torch.float64) >> filter_frozen(["head.w"])
        for form in (dict, defer, specs):
            assert list(p(form(Tied().state_dict()))) == ["norm.w", "norm.bias"]  # type: ignore[operator]

    def test_the_same_filter_both_ways(self) -> None:
        """Seen: saving without frozen parameters and loading with the same option raises."""
        keep = filter_frozen(["embed.weight"])
        saved = keep(Tied().state_dict())
        assert keep.check(Tied().state_dict(), expect=saved).ok


class TestWhatIsNoTie:
    """A bare data pointer is never enough."""

    def test_empty_meta_and_overlapping_tensors(self) -> None:
        w = torch.arange(6.0)
        z = torch.tensor([1 + 2j])
        state = {
            "empty1": torch.empty(0),
            "empty2": torch.empty(0),
            "meta1": torch.ones(2, device="meta"),
            "meta2": torch.ones(2, device="meta"),
            "whole": w,
            "part": w[:3],
            "shaped": w.view(2, 3),
            "turned": w.view(2, 3).t().t().view(2, 3)[:, :2],
            "bytes": w.view(torch.int32),
            "z": z,
            "conj": z.conj(),
            "imag": z.imag,
            "neg": z.conj().imag,
        }
        assert ties(state) == []

    def test_a_copy_with_equal_values(self) -> None:
        w = torch.ones(3)
        assert ties({"a": w, "b": w.clone()}) == []
        assert ties({"a": w, "b": torch.nn.Parameter(w), "c": w.detach(), "d": w.view(3)}) == [("a", "b", "c", "d")]
