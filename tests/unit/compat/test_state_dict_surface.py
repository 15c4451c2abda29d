"""The surface of the drop-in: names, signatures and options are torch's; names of parameters; no process group."""

from __future__ import annotations

import dataclasses
import gc
import inspect
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint.state_dict as peer
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from fdsd.compat import state_dict as ours
from fdsd.compat.state_dict import (
    StateDictOptions,
    _get_fqns,
    _patch_model_state_dict,
    _patch_optimizer_state_dict,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from fdsd.errors import FdsdError

FUNCTIONS = [
    "get_model_state_dict",
    "set_model_state_dict",
    "get_optimizer_state_dict",
    "set_optimizer_state_dict",
    "get_state_dict",
    "set_state_dict",
    "_patch_model_state_dict",
    "_patch_optimizer_state_dict",
]


class TestSurface:
    def test_every_public_name_of_torch_is_here(self) -> None:
        assert set(peer.__all__) <= set(ours.__all__)
        assert all(hasattr(ours, name) for name in ours.__all__)

    def test_constants_that_torchs_own_helpers_import(self) -> None:
        assert (ours._PG, ours._STATE, ours._PARAMS, ours._FLAT_PARAM) == (
            peer._PG,
            peer._STATE,
            peer._PARAMS,
            peer._FLAT_PARAM,
        )

    @pytest.mark.parametrize("name", FUNCTIONS)
    def test_signatures_are_torchs(self, name: str) -> None:
        mine, theirs = (inspect.signature(getattr(module, name)).parameters for module in (ours, peer))
        assert [(p.name, p.kind, p.default) for p in mine.values()] == [
            (p.name, p.kind, p.default) for p in theirs.values()
        ]

    def test_signature_of_get_fqns_is_torchs(self) -> None:
        mine = [(p.name, p.default) for p in inspect.signature(_get_fqns).parameters.values()]
        theirs = [(p.name, p.default) for p in inspect.signature(peer._get_fqns).parameters.values()]
        assert [item for item in mine if item[0] != "dsd_fqn_modifiers"] == [
            item for item in theirs if item[0] != "dsd_fqn_modifiers"
        ]
        assert mine[2] == ("dsd_fqn_modifiers", "_fqn_modifiers")

    def test_fields_of_the_options_are_torchs_in_order(self) -> None:
        mine = [(f.name, f.default) for f in dataclasses.fields(StateDictOptions)]
        theirs = [(f.name, f.default) for f in dataclasses.fields(peer.StateDictOptions)]
        assert mine[: len(theirs)] == theirs
        assert mine[-1] == ("dsd_fqn_modifiers", "_fqn_modifiers")

    def test_options_are_a_dataclass_by_position_too(self) -> None:
        assert StateDictOptions(True, True) == StateDictOptions(full_state_dict=True, cpu_offload=True)
        assert dataclasses.replace(StateDictOptions(), strict=False).strict is False

    def test_options_of_torch_are_taken(self) -> None:
        net = nn.Linear(2, 3)
        theirs = peer.StateDictOptions(full_state_dict=True, cpu_offload=True)
        assert list(get_model_state_dict(net, options=theirs)) == ["weight", "bias"]


BROKEN = StateDictOptions(broadcast_from_rank0=True)


class TestOptions:
    @pytest.mark.parametrize(
        "call",
        [
            lambda net, opt: get_model_state_dict(net, options=BROKEN),
            lambda net, opt: get_optimizer_state_dict(net, opt, options=BROKEN),
            lambda net, opt: get_state_dict(net, opt, options=BROKEN),
            lambda net, opt: set_model_state_dict(net, net.state_dict(), options=BROKEN),
            lambda net, opt: set_optimizer_state_dict(net, opt, opt.state_dict(), options=BROKEN),
            lambda net, opt: set_state_dict(
                net, opt, model_state_dict=net.state_dict(), optim_state_dict=opt.state_dict(), options=BROKEN
            ),
        ],
    )
    def test_broadcast_needs_full(self, call: Any) -> None:
        net = nn.Linear(2, 3)
        opt = torch.optim.Adam(net.parameters())
        with pytest.raises(ValueError, match="full_state_dict must be True when broadcast_from_rank0 is True"):
            call(net, opt)
        assert not opt.state

    def test_something_else_as_options(self) -> None:
        with pytest.raises(FdsdError, match="options are StateDictOptions, not dict"):
            get_model_state_dict(nn.Linear(1, 1), options={"full_state_dict": True})  # type: ignore[arg-type]

    @pytest.mark.parametrize("enabled", [True, False])
    def test_the_garbage_collector_is_left_alone(self, enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        net = nn.Linear(2, 3)
        opt = torch.optim.Adam(net.parameters())
        calls: list[str] = []
        monkeypatch.setattr(gc, "disable", lambda: calls.append("disable"))
        monkeypatch.setattr(gc, "enable", lambda: calls.append("enable"))
        model, optim = get_state_dict(net, opt)
        set_state_dict(net, opt, model_state_dict=model, optim_state_dict=optim)
        assert calls == []


class Extra(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"a": 1}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


class Modified(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Embedding(2, 3)

    def _fqn_modifiers(self) -> dict[str, str]:
        return {"weight": "inner"}

    def other(self) -> dict[str, str]:
        return {"shown": "inner"}


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


class TestGetFqns:
    def test_a_plain_name(self) -> None:
        assert _get_fqns(nn.Sequential(nn.Linear(1, 1)), "0.weight") == {"0.weight"}

    def test_a_name_without_a_dot_stays(self) -> None:
        assert _get_fqns(nn.Linear(1, 1), "weight") == {"weight"}

    @pytest.mark.parametrize(
        "make",
        [
            lambda: compiled(nn.Sequential(nn.Linear(1, 1))),
            lambda: nn.Sequential(compiled(nn.Linear(1, 1))),
            lambda: nn.Sequential(checkpoint_wrapper(nn.Linear(1, 1))),
            lambda: nn.Sequential(checkpoint_wrapper(compiled(nn.Linear(1, 1)))),
            lambda: nn.Sequential(compiled(checkpoint_wrapper(nn.Linear(1, 1)))),
            lambda: compiled(nn.Sequential(checkpoint_wrapper(compiled(nn.Linear(1, 1))))),
        ],
    )
    def test_wrapper_segments_go_wherever_they_stand(self, make: Any) -> None:
        """Seen: activation checkpointing over torch.compile gives ``0._orig_mod.weight``."""
        model = make()
        for name, _ in model.named_parameters():
            assert _get_fqns(model, name) in ({"0.weight"}, {"0.bias"})

    def test_the_compilers_prefix_can_stay(self) -> None:
        model = compiled(nn.Sequential(nn.Linear(1, 1)))
        assert _get_fqns(model, "_orig_mod.0.weight", skip_compiler_prefix=False) == {"_orig_mod.0.weight"}

    def test_an_attribute_of_the_user_with_a_wrappers_name_stays(self) -> None:
        class Holder(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.module = nn.Linear(1, 1)
                self._orig_mod = nn.Linear(1, 1)

        holder = Holder()
        assert _get_fqns(holder, "module.weight") == {"module.weight"}
        assert _get_fqns(holder, "_orig_mod.weight") == {"_orig_mod.weight"}
        assert set(get_model_state_dict(holder)) == set(holder.state_dict())

    def test_extra_state(self) -> None:
        assert _get_fqns(nn.Sequential(Extra(1, 1)), "0._extra_state") == {"0._extra_state"}
        with pytest.raises(RuntimeError, match="Expect `_extra_state` to be the last obj name"):
            _get_fqns(nn.Sequential(Extra(1, 1)), "0._extra_state.more")

    def test_modifiers(self) -> None:
        model = nn.Sequential(Modified())
        assert _get_fqns(model, "0.weight.weight") == {"0.weight.weight"}
        assert _get_fqns(model, "0.shown.weight", "other") == {"0.shown.weight"}

    def test_a_name_that_is_not_there(self) -> None:
        with pytest.raises(FdsdError, match=r"'0\.wait\.weight' is no name in this Sequential"):
            _get_fqns(nn.Sequential(nn.Linear(1, 1)), "0.wait.weight")


class TestPatches:
    def test_model(self) -> None:
        net = compiled(nn.Sequential(nn.Linear(2, 2)))
        before = {name: value.clone() for name, value in get_model_state_dict(net).items()}
        _patch_model_state_dict(net)
        state = {name: value + 1 for name, value in net.state_dict().items()}
        assert list(state) == ["0.weight", "0.bias"]
        net.load_state_dict(state)
        for name, value in get_model_state_dict(net).items():
            torch.testing.assert_close(value, before[name] + 1)

    def test_optimizers(self) -> None:
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        opts = tuple([torch.optim.Adam(layer.parameters(), lr=0.1) for layer in net])
        net(torch.ones(1, 2)).sum().backward()
        for opt in opts:
            opt.step()
        _patch_optimizer_state_dict(net, optimizers=opts)
        state: Any = opts[1].state_dict()
        assert list(state["state"]) == ["0.weight", "0.bias", "1.weight", "1.bias"]
        for group in state["param_groups"]:
            group["lr"] = 0.5
        opts[0].load_state_dict(state)
        assert [opt.param_groups[0]["lr"] for opt in opts] == [0.5, 0.5]

    def test_patching_leaves_no_global_behind(self) -> None:
        net = nn.Linear(1, 1)
        before = len(ours._patched_state_dict) if hasattr(ours, "_patched_state_dict") else 0
        _patch_model_state_dict(net)
        after = len(ours._patched_state_dict) if hasattr(ours, "_patched_state_dict") else 0
        assert before == after
