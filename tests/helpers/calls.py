"""One call of every public function of the engine and the drop-in, and calls of them that go wrong.

Each call gets a ``Scene``: a trained source, a target of other values, and what was read from the source. A ``Call``
says what it may change.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from attrs import define, frozen
from torch import nn
from torch.optim import Optimizer

import fdsd
from fdsd.compat import _state_dict_utils as utils
from fdsd.compat import state_dict as compat
from tests.helpers.models import make

__all__ = ["CALLS", "FAULTS", "Call", "Scene", "Watch", "scene"]

CPU = torch.device("cpu")
FULL = compat.StateDictOptions(full_state_dict=True)
FLAT = compat.StateDictOptions(flatten_optimizer_state_dict=True)
FROZEN = compat.StateDictOptions(ignore_frozen_params=True)


class Watch(nn.Module):
    """A user's module, whose code has to find the collector as the user left it."""

    collects = True

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.25, 0.5]))
        self.note = 1
        self.register_state_dict_pre_hook(lambda *_: self.look())
        self.register_load_state_dict_pre_hook(lambda *_: self.look())
        self.register_load_state_dict_post_hook(lambda *_: self.look())

    def look(self) -> None:
        assert gc.isenabled() == Watch.collects

    def get_extra_state(self) -> Any:
        self.look()
        return {"note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.look()
        self.note = state["note"]


class Adam(torch.optim.Adam):
    """A user's optimizer: nobody but the user may step it."""

    def step(self, closure: Any = None) -> Any:
        assert Adam.may_step, "stepped"
        return super().step(closure)

    may_step = False


class OwnSGD(torch.optim.SGD):
    """Loads in its own way, as an optimizer with hooks does."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert gc.isenabled() == Watch.collects
        super().load_state_dict(state_dict)


@define
class Scene:
    """What a call works on."""

    model: Any
    optimizers: list[Optimizer]
    target: Any
    others: list[Optimizer]
    weights: dict[str, Any]
    osd: dict[str, Any]
    state: fdsd.TrainState
    folder: Path

    @property
    def tree(self) -> dict[str, Any]:
        return {"model": self.weights, "optim": self.osd}

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.weights, self.osd, self.optimizers, self.others, vars(FULL), vars(FLAT), vars(FROZEN)


def _run(salt: int, steps: int) -> tuple[Any, list[Optimizer]]:
    torch.manual_seed(salt)
    model: Any = make("net")
    model.watch = Watch()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.rand(p.shape) + salt)
    inner = list(model.blocks.parameters())
    rest = [p for p in model.parameters() if all(p is not q for q in inner)]
    optimizers: list[Optimizer] = [Adam(rest, lr=0.01 * (1 + salt)), OwnSGD(inner, lr=0.01 * (1 + salt), momentum=0.9)]
    Adam.may_step = True
    try:
        for step in range(steps):
            (model(torch.arange(6) + 0 * step).sin().square().mean() + model.watch.weight.sum()).backward()
            for optimizer in optimizers:
                optimizer.step()
            if step + 1 < steps:
                for p in model.parameters():
                    p.grad = None  # the last ones stay: they are not to be touched either
    finally:
        Adam.may_step = False
    return model, optimizers


def scene(folder: Path, *, steps: int = 2) -> Scene:
    """Set up a scene."""
    model, optimizers = _run(0, steps)
    target, others = _run(1, steps)
    weights, osd = compat.get_state_dict(model, optimizers)
    return Scene(model, optimizers, target, others, weights, {**osd}, fdsd.capture(model, optimizers), folder)


@frozen
class Call:
    """A call of a function.

    Attributes:
        run: The call.
        writes: ``"target"`` or ``"nothing"``; of calls that go wrong, what may have been written.
    """

    run: Callable[[Scene], Any]
    writes: str = "nothing"


def _saved(s: Scene) -> Path:
    if not (s.folder / "model.pt").exists():
        fdsd.save(s.state.model, s.folder / "model.pt")
    return s.folder / "model.pt"


def _local(s: Scene) -> dict[str, Any]:
    return {name: value.detach().clone() for name, value in s.weights.items() if isinstance(value, torch.Tensor)}


def _tensors(s: Scene) -> dict[str, Any]:
    return {name: value for name, value in s.weights.items() if isinstance(value, torch.Tensor)}


def _patched(s: Scene) -> Any:
    compat._patch_model_state_dict(s.target, options=FULL)
    s.target.load_state_dict(s.weights)
    found = s.target.state_dict()
    del s.target.state_dict, s.target.load_state_dict
    return found


def _patched_optimizers(s: Scene) -> Any:
    compat._patch_optimizer_state_dict(s.target, optimizers=tuple(s.others))
    s.others[0].load_state_dict(s.osd)
    found = s.others[1].state_dict()
    for optimizer in s.others:
        del vars(optimizer)["state_dict"], vars(optimizer)["load_state_dict"]
    return found


def _set_both(s: Scene, options: Any = None) -> Any:
    return compat.set_state_dict(
        s.target, s.others, model_state_dict=s.weights, optim_state_dict=s.osd, options=options
    )


def _as_it_is(value: Any, *_: Any) -> Any:
    return value


def _set_element(s: Scene) -> None:
    root: dict[str, Any] = {}
    utils._set_element(root, ("a", 0), s.weights)


CALLS: dict[str, Call] = {
    "capture": Call(lambda s: (fdsd.capture(s.model, s.optimizers), fdsd.capture(s.model))),
    "describe": Call(lambda s: fdsd.describe(s.model, s.optimizers)),
    "diff": Call(lambda s: (fdsd.diff(s.state, s.state), fdsd.diff(s.weights, s.target.state_dict(), rtol=1.0))),
    "materialize": Call(lambda s: (fdsd.materialize(s.state), fdsd.materialize(fdsd.defer(s.state.model)))),
    "open": Call(lambda s: fdsd.open(_saved(s))),
    "restore": Call(lambda s: fdsd.restore(s.state, s.target, s.others, staged=True), "target"),
    "save": Call(_saved),
    "snapshot": Call(lambda s: fdsd.snapshot(s.state)),
    "stream": Call(lambda s: (dict(fdsd.stream(s.state.model)), next(iter(fdsd.stream(s.state.model))))),
    "StateDictOptions": Call(lambda s: compat.StateDictOptions()),
    "get_model_state_dict": Call(
        lambda s: [compat.get_model_state_dict(s.model, options=options) for options in (None, FULL, FLAT, FROZEN)]
    ),
    "get_optimizer_state_dict": Call(
        lambda s: [
            compat.get_optimizer_state_dict(s.model, s.optimizers, options=o) for o in (None, FULL, FLAT, FROZEN)
        ]
    ),
    "get_state_dict": Call(lambda s: [compat.get_state_dict(s.model, s.optimizers, options=o) for o in (None, FULL)]),
    "set_model_state_dict": Call(lambda s: compat.set_model_state_dict(s.target, s.weights), "target"),
    "set_optimizer_state_dict": Call(lambda s: compat.set_optimizer_state_dict(s.target, s.others, s.osd), "target"),
    "set_state_dict": Call(lambda s: (_set_both(s), _set_both(s, FULL)), "target"),
    "_get_fqns": Call(lambda s: compat._get_fqns(s.model, "blocks.0.up.weight")),
    "_patch_model_state_dict": Call(_patched, "target"),
    "_patch_optimizer_state_dict": Call(_patched_optimizers, "target"),
    "_gather_state_dict": Call(lambda s: utils._gather_state_dict(s.tree, cpu_offload=True, type_check=False)),
    "_offload_state_dict_to_cpu": Call(lambda s: utils._offload_state_dict_to_cpu(s.tree, type_check=False)),
    "_create_cpu_state_dict": Call(lambda s: utils._create_cpu_state_dict(s.tree, share_memory=True)),
    "_copy_state_dict": Call(lambda s: utils._copy_state_dict(s.weights, utils._create_cpu_state_dict(s.weights))),
    "_check_state_dict_similarity": Call(lambda s: utils._check_state_dict_similarity(s.weights, _local(s))),
    "_broadcast_state_dict": Call(lambda s: utils._broadcast_state_dict(s.weights, _local(s), CPU, strict=True)),
    "_distribute_state_dict": Call(lambda s: utils._distribute_state_dict(s.weights, _local(s), CPU)),
    "_distribute_tensors": Call(lambda s: utils._distribute_tensors({**s.weights}, list(s.weights), CPU)),
    "_broadcast_tensors": Call(lambda s: utils._broadcast_tensors(_tensors(s), _local(s), list(_tensors(s)), CPU)),
    "_flatten_state_dict": Call(lambda s: utils._flatten_state_dict(s.tree)),
    "_unflatten_state_dict": Call(lambda s: utils._unflatten_state_dict(*utils._flatten_state_dict(s.tree))),
    "_traverse_state_dict": Call(lambda s: utils._traverse_state_dict(s.tree, lambda path, value: None)),
    "_set_element": Call(_set_element),
    "_iterate_state_dict": Call(
        lambda s: utils._iterate_state_dict(_tensors(s), _as_it_is, _as_it_is, _as_it_is, cpu_offload=True)
    ),
    "_identity_func": Call(lambda s: utils._identity_func(s.weights["scale"], None, None, None)),
}
"""Every function by its name."""


# -- calls that go wrong ---------------------------------------------------------------------------------------------


class _Broken(nn.Module):
    def get_extra_state(self) -> Any:
        raise ArithmeticError("not today")

    def set_extra_state(self, state: Any) -> None:
        raise ArithmeticError("not today")


def _raises(tensor: torch.Tensor) -> torch.Tensor:
    raise ArithmeticError("not today")


_STRAY = torch.optim.Adam([nn.Parameter(torch.ones(1))])
_ITSELF = nn.Sequential(nn.ReLU())
_ITSELF.again = _ITSELF
with torch.device("meta"):
    _META = nn.Linear(2, 2)


def _bad_value(s: Scene) -> fdsd.StateDict[Any]:
    """The state with one tensor whose reading raises, late."""
    name, spec = "watch.weight", fdsd.TensorSpec((2,), torch.float32)
    last = fdsd.map_tensors(_raises, name, spec=spec)(fdsd.defer(fdsd.select(name)(s.state.model)))
    return fdsd.combine(fdsd.drop(name)(s.state.model), last)


def _without(s: Scene, name: str) -> dict[str, Any]:
    return {key: value for key, value in s.weights.items() if key != name}


def _without_state(s: Scene) -> dict[str, Any]:
    return {**s.osd, "state": {name: row for name, row in s.osd["state"].items() if "norm" not in name}}


def _other_shape(s: Scene) -> dict[str, Any]:
    state = {name: {slot: torch.ones(9) for slot in row} for name, row in s.osd["state"].items()}
    return {**s.osd, "state": state}


def _refusing(s: Scene) -> None:
    """An optimizer whose own code refuses what it is given."""

    def hook(*_: Any) -> None:
        raise ArithmeticError("not today")

    handle = s.others[1].register_load_state_dict_pre_hook(hook)
    try:
        compat.set_optimizer_state_dict(s.target, s.others, s.osd)
    finally:
        handle.remove()


def _broken_file(s: Scene) -> Any:
    (s.folder / "broken.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{broken}")
    return fdsd.open(s.folder / "broken.safetensors")


def _closed(s: Scene) -> None:
    items: Any = fdsd.stream(_bad_value(s), budget=1)
    next(items)
    items.close()
    dict(fdsd.stream(_bad_value(s), budget=1))


def _model(state: Callable[[Scene], Any], options: Any = None) -> Call:
    return Call(lambda s: compat.set_model_state_dict(s.target, state(s), options=options))


def _optim(state: Callable[[Scene], Any], options: Any = None) -> Call:
    return Call(lambda s: compat.set_optimizer_state_dict(s.target, s.others, state(s), options=options))


def _restored(state: Callable[[Scene], Any], writes: str = "nothing", **how: Any) -> Call:
    return Call(lambda s: fdsd.restore(state(s), s.target, **how), writes)


NO_OPTIONS = compat.StateDictOptions(broadcast_from_rank0=True)

FAULTS: dict[str, Call] = {
    "capture: a stray optimizer": Call(lambda s: fdsd.capture(s.model, [*s.optimizers, _STRAY])),
    "capture: an extra state raises": Call(lambda s: fdsd.capture(nn.Sequential(s.model, _Broken()))),
    "capture: a module in itself": Call(lambda s: fdsd.capture(_ITSELF)),
    "describe: a stray optimizer": Call(lambda s: fdsd.describe(s.model, _STRAY)),
    "describe: what has no shape": Call(lambda s: fdsd.describe(nn.LazyLinear(2))),
    "diff: no state": Call(lambda s: fdsd.diff(s.state, 3)),
    "materialize: a function raises": Call(lambda s: fdsd.materialize(_bad_value(s))),
    "materialize: specs": Call(lambda s: fdsd.materialize(fdsd.specs(_tensors(s)))),
    "open: no file": Call(lambda s: fdsd.open(s.folder / "nothing")),
    "open: a broken file": Call(_broken_file),
    "save: a function raises": Call(lambda s: fdsd.save(_bad_value(s), s.folder / "bad.pt")),
    "save: what the format cannot hold": Call(lambda s: fdsd.save(s.state.model, s.folder / "bad.safetensors")),
    "save: something is there": Call(lambda s: [fdsd.save(s.state.model, s.folder / "there.pt") for _ in range(2)]),
    "snapshot: meta": Call(lambda s: fdsd.snapshot(fdsd.capture(_META))),
    "stream: closed, and a function raises": Call(_closed),
    "restore: missing": _restored(lambda s: _without(s, "temperature")),
    "restore: unexpected": _restored(lambda s: {**s.weights, "stray": torch.ones(1)}),
    "restore: a shape": _restored(lambda s: {**s.weights, "scale": torch.ones(1)}),
    "restore: a dtype": _restored(lambda s: {**s.weights, "scale": torch.ones(2).double()}),
    "restore: no dtype": _restored(lambda s: s.weights, dtype="double"),
    "restore: a filter that renames": _restored(lambda s: s.weights, filter=fdsd.add_prefix("x.")),
    "restore: a function raises": _restored(_bad_value, "target"),
    "restore: a function raises, staged": _restored(_bad_value, staged=True),
    "restore: an optimizer's shape": Call(
        lambda s: fdsd.restore(fdsd.OptimState.from_torch(_other_shape(s)), s.target, s.others)
    ),
    "get: no options": Call(lambda s: compat.get_state_dict(s.model, s.optimizers, options=NO_OPTIONS)),
    "get: an extra state raises": Call(lambda s: compat.get_model_state_dict(nn.Sequential(s.model, _Broken()))),
    "get: no optimizers": Call(lambda s: compat.get_optimizer_state_dict(s.model, [])),
    "get: a stray optimizer": Call(lambda s: compat.get_optimizer_state_dict(s.model, [*s.optimizers, _STRAY])),
    "get: nothing": Call(lambda s: compat.get_model_state_dict(nn.ReLU())),
    "set: missing": _model(lambda s: _without(s, "embed.weight")),
    "set: missing, whole": _model(lambda s: _without(s, "embed.weight"), FULL),
    "set: unexpected": _model(lambda s: {**s.weights, "stray": torch.ones(1)}),
    "set: a shape": _model(lambda s: {**s.weights, "scale": torch.ones(1)}),
    "set: no tensor": _model(lambda s: {**s.weights, "scale": "text"}),
    "set: no mapping": _model(lambda s: [1, 2]),
    "set: empty": _model(lambda s: {}),
    "set: no options": _model(lambda s: s.weights, NO_OPTIONS),
    "set: no state": _optim(_without_state),
    "set: another shape": _optim(_other_shape),
    "set: no optimizer state": _optim(lambda s: {}),
    "set: no mapping for an optimizer": _optim(lambda s: 3),
    "set: an optimizer's own code raises": Call(_refusing, "target"),
    "set: both, and the model refuses": Call(
        lambda s: compat.set_state_dict(
            s.target, s.others, model_state_dict=_without(s, "embed.weight"), optim_state_dict=s.osd
        )
    ),
    "_get_fqns: no such name": Call(lambda s: compat._get_fqns(s.model, "nothing.here")),
    "_gather_state_dict: no such type": Call(lambda s: utils._gather_state_dict({**s.weights, "odd": object()})),
    "_copy_state_dict: other names": Call(lambda s: utils._copy_state_dict(s.weights, {})),
    "_copy_state_dict: other shapes": Call(
        lambda s: utils._copy_state_dict(
            {"a": torch.ones(2), "scale": s.weights["scale"]}, {"a": torch.ones(3), "scale": 0}
        )
    ),
    "_broadcast_state_dict: other shapes": Call(
        lambda s: utils._broadcast_state_dict({**s.weights, "scale": torch.ones(1)}, _local(s), CPU)
    ),
    "_distribute_state_dict: other shapes": Call(
        lambda s: utils._distribute_state_dict({**s.weights, "scale": torch.ones(1)}, _local(s), CPU)
    ),
    "_iterate_state_dict: a function raises": Call(
        lambda s: utils._iterate_state_dict(_tensors(s), _as_it_is, _as_it_is, lambda value, *_: _raises(value))
    ),
    "_flatten_state_dict: names that clash": Call(lambda s: utils._flatten_state_dict({"a.b": 1, "a": {"b": 2}})),
    "_traverse_state_dict: a function raises": Call(
        lambda s: utils._traverse_state_dict(s.tree, lambda path, value: _raises(value))
    ),
}
