"""Modules in one process: wrappers, meta models and old files, beside what torch itself does where it is right.

What is tried on every kind of parallelism is tried there on one process too: ``test_ranks_models``.

| row of PITFALLS.md | where |
| --- | --- |
| wrapper segments go wherever they stand; clean names load | ``TestWrappers`` |
| a rename that strips wrappers from files | ``test_names`` (``strip_wrappers``) |
| shapes, dtypes, extra state, frozen ones, ties | ``test_ranks_models`` in one process, ``test_state_dict_model`` |
| non-persistent buffers on meta | ``TestMeta`` |
| saving ties to safetensors, a view of a large tensor | ``test_ties``, ``unit/engine/test_saving`` |
"""

from __future__ import annotations

import copy
import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint import state_dict as peer

import fdsd
from fdsd.compat.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from tests.helpers.audit_values import same
from tests.helpers.audited import KINDS, Kind, build, kinds_of, plain

FULL = StateDictOptions(full_state_dict=True)
WRAPS: dict[str, Any] = {
    "compile": lambda module: torch.compile(module, backend="eager"),
    "AC": checkpoint_wrapper,
    "DataParallel": nn.DataParallel,
}


def wrapped(outer: tuple[str, ...], inner: tuple[str, ...], salt: int) -> Any:
    """Wrap each unit and a leaf within it, and then the whole."""
    model: Any = plain(salt)
    for i in range(2):
        for name in inner:
            model.units[i] = WRAPS[name](model.units[i])
    for name in inner:
        model.noted = WRAPS[name](model.noted)
    for name in outer:
        model = WRAPS[name](model)
    return model


NESTS = [
    (outer, inner)
    for outer in [(), *itertools.product(WRAPS), *itertools.permutations(WRAPS, 2)]
    for inner in [*itertools.product(WRAPS), *itertools.permutations(WRAPS, 2)]
]


TENSORS = [name for name, value in plain().state_dict().items() if isinstance(value, torch.Tensor)]


class TestWrappers:
    @pytest.mark.parametrize("outer, inner", NESTS, ids=str)
    def test_clean_names_are_given_and_taken(self, outer: tuple[str, ...], inner: tuple[str, ...]) -> None:
        """Seen: activation checkpointing over torch.compile gives ``0._orig_mod.weight``, which does not load clean."""
        model = wrapped(outer, inner, 2)
        expected = dict(plain(1).state_dict())
        set_model_state_dict(model, expected)
        same(dict(get_model_state_dict(model)), expected)
        same(dict(get_model_state_dict(model, options=FULL)), expected)
        same(dict(fdsd.capture(model).model), expected)
        assert [name for name, entry in fdsd.describe(model).entries.items() if entry.persistent] == TENSORS
        fdsd.restore(dict(plain(3).state_dict()), model)
        same(dict(get_model_state_dict(model)), dict(plain(3).state_dict()))

    @pytest.mark.parametrize("outer, inner", NESTS, ids=str)
    def test_names_in_verdicts_are_clean(self, outer: tuple[str, ...], inner: tuple[str, ...]) -> None:
        """Torch's lax loads give names as wrapped."""
        model = wrapped(outer, inner, 2)
        state = {**plain(1).state_dict(), "stray": torch.ones(1)}
        del state["units.1.up.bias"], state["noted.gain"]
        result = set_model_state_dict(model, state, options=StateDictOptions(strict=False))
        assert sorted(result.missing_keys) == ["noted.gain", "units.1.up.bias"]
        assert result.unexpected_keys == ["stray"]
        with pytest.raises(RuntimeError, match=r'"units.1.up.bias".*"noted.gain"|"noted.gain".*"units.1.up.bias"'):
            set_model_state_dict(model, state)

    @pytest.mark.parametrize("kind", [kind for kind in kinds_of(1) if kind.name != "DataParallel"], ids=repr)
    def test_torch_agrees_where_it_is_right(self, kind: Kind) -> None:
        """Its names have the segments of compilers that lie below checkpoints, and those stand at the end."""
        model = build(kind, 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs = peer.get_model_state_dict(model)
        names = [name.replace("_orig_mod.", "") for name in theirs]
        mine = get_model_state_dict(model)
        assert list(mine) == (
            names if "AC(" not in kind.name and "(AC" not in kind.name else list(plain().state_dict())
        )
        same(dict(sorted(mine.items())), dict(sorted(zip(names, theirs.values(), strict=True))))

    def test_a_users_module_of_a_wrappers_name_stays(self) -> None:
        model: Any = nn.Sequential()
        model.module, model._orig_mod = nn.Linear(2, 1), nn.Linear(1, 1)
        names = list(model.state_dict())
        assert list(get_model_state_dict(WRAPS["compile"](nn.DataParallel(model)))) == names


class Rotary(nn.Module):
    """Buffers as models have them: made from numbers, and in no state dict."""

    inv_freq: torch.Tensor

    def __init__(self, dims: int) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / (10 ** (torch.arange(dims) / dims)), persistent=False)
        self.proj = nn.Linear(dims, dims)


class TestMeta:
    def model(self) -> Any:
        with torch.device("meta"):
            return nn.ModuleDict({"a": Rotary(3), "b": nn.ModuleDict({"c": Rotary(4)}), "d": nn.Linear(2, 2)}).half()

    def state(self) -> dict[str, torch.Tensor]:
        torch.manual_seed(1)
        made = nn.ModuleDict({"a": Rotary(3), "b": nn.ModuleDict({"c": Rotary(4)}), "d": nn.Linear(2, 2)})
        return dict(made.state_dict())

    def test_all_are_named(self, tmp_path: Path) -> None:
        """Seen: they stay on meta after a load that reports success. All are named, and nothing else is."""
        model = self.model()
        with pytest.warns(UserWarning, match=r"still on the meta device: 'a\.inv_freq', 'b\.c\.inv_freq'\.") as caught:
            set_model_state_dict(model, self.state())
        assert len(caught) == 1
        assert model.d.weight.dtype is torch.half
        fdsd.save(self.state(), tmp_path / "x.safetensors")
        model = self.model()
        report = fdsd.restore(fdsd.open(tmp_path / "x.safetensors"), model, dtype="target")
        assert report.left_on_meta == ("a.inv_freq", "b.c.inv_freq")
        assert "left on meta: 'a.inv_freq', 'b.c.inv_freq'" in str(report)
        assert model.d.weight.dtype is torch.half

    def test_an_initialiser_makes_them(self) -> None:
        model = self.model()
        asked: list[str] = []

        def init(fqn: str, spec: fdsd.TensorSpec) -> torch.Tensor:
            asked.append(fqn)
            return 1.0 / (10 ** (torch.arange(spec.shape[0]) / spec.shape[0]))

        report = fdsd.restore(self.state(), model, dtype="target", init=init)
        assert asked == ["a.inv_freq", "b.c.inv_freq"] == list(report.initialised) and not report.left_on_meta
        assert torch.equal(model.a.inv_freq, Rotary(3).inv_freq.half())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            set_model_state_dict(model, self.state())

    def test_only_meta_ones_are(self) -> None:
        model = self.model().to_empty(device="cpu")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            set_model_state_dict(model, self.state())
        assert fdsd.restore(self.state(), model, dtype="target").left_on_meta == ()

    @pytest.mark.parametrize("count", [2, 3])
    def test_more_than_two_tied_names(self, count: int) -> None:
        """Seen: tied weights come back as separate parameters. Whichever names a file has, they are tied again."""
        for names in itertools.combinations([f"l{i}.weight" for i in range(count)], count - 1):
            with torch.device("meta"):
                model = nn.ModuleDict({f"l{i}": nn.Linear(2, 2, bias=False) for i in range(count)})
                for layer in model.values():
                    layer.weight = model["l0"].weight
            value = torch.arange(4.0).reshape(2, 2)
            report = fdsd.restore(dict.fromkeys(names, value), model)
            assert report.missing == () and len({id(layer.weight) for layer in model.values()}) == 1
            assert torch.equal(model["l0"].weight, value) and not model["l0"].weight.is_meta


def test_batch_norms_of_old_files_and_nothing_else_are_excused() -> None:
    """As torch: a file without versions has no ``num_batches_tracked``; the drop-in takes it, and keeps the count."""
    model = plain(2)
    old = {name: value for name, value in plain(1).state_dict().items() if name != "norm.num_batches_tracked"}
    oracle = plain(2)
    assert str(set_model_state_dict(model, old)) == str(oracle.load_state_dict(old))
    same(dict(model.state_dict()), dict(oracle.state_dict()))


def test_a_module_that_is_given_its_own_state_is_unchanged() -> None:
    for kind in kinds_of(1):
        model = build(kind, 1)
        before = copy.deepcopy(dict(get_model_state_dict(model)))
        pointers = [t.data_ptr() for t in (*model.parameters(), *model.buffers())]
        set_model_state_dict(model, get_model_state_dict(model))
        fdsd.restore(fdsd.capture(model).model, model)
        assert [t.data_ptr() for t in (*model.parameters(), *model.buffers())] == pointers
        same(dict(get_model_state_dict(model)), before)
    assert len(KINDS) > 15
