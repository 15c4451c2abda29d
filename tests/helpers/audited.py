"""A model with everything that a state dict can meet, laid over ranks in every way, for the audit of known faults.

Its loss has given gradients, so what training gives is known in one process and on ranks. No test lives here.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tests.helpers.audit_values import clean
from tests.helpers.models import Counter
from tests.helpers.parallelism import INNER
from tests.helpers.sharded_models import dtensor, mesh_of

__all__ = [
    "FROZEN",
    "KINDS",
    "SIZES",
    "UNITS",
    "Audited",
    "Kind",
    "build",
    "kinds_of",
    "plain",
    "train",
]

FROZEN = ("frozen.first.weight", "frozen.again.weight")
"""The frozen parameter and its tied name."""
UNITS = ("units.0", "units.1")


def _given(self: Any, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Sum parameters times given weights, through the modules that have them: the weights are the gradients."""
    parts: dict[str, dict[str, torch.Tensor]] = {}
    terms: list[torch.Tensor] = []
    for name, weight in weights.items():
        head, _, tail = name.partition(".")
        if tail:
            parts.setdefault(head, {})[tail] = weight
        else:
            terms.append((getattr(self, name) * weight).sum())
    terms += [getattr(self, child)(some) for child, some in parts.items()]
    return torch.stack(terms).sum()


class Leaf(nn.Linear):
    forward = _given  # type: ignore[assignment]


class Norm(nn.BatchNorm1d):
    """Has a 0-dim buffer of integers."""

    forward = _given  # type: ignore[assignment]


class Noted(Counter):
    """Has an extra state."""

    forward = _given


class Unit(nn.Module):
    """Uneven sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.up = Leaf(5, INNER)
        self.down = Leaf(INNER, 5)

    forward = _given


class Units(nn.ModuleList):
    forward = _given  # type: ignore[assignment]


class Frozen(nn.Module):
    """A frozen parameter with a tied name."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Leaf(4, 3, bias=False).requires_grad_(False)
        self.again = Leaf(4, 3, bias=False)
        self.again.weight = self.first.weight

    forward = _given


class Audited(nn.Module):
    """Tied names, buffers of both kinds and of 0 dims, an extra state, a frozen part, uneven sizes, nesting."""

    table: torch.Tensor
    cache: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = Leaf(5, 6, bias=False)
        self.register_buffer("table", torch.zeros(2, 3))
        self.register_buffer("cache", torch.zeros(4), persistent=False)
        self.units = Units([Unit(), Unit()])
        self.norm = Norm(3)
        self.noted = Noted()
        self.frozen = Frozen()
        self.head = Leaf(5, 6, bias=False)
        self.head.weight = self.embed.weight

    forward = _given


def plain(salt: int = 0, *, dtype: torch.dtype = torch.float32, value: float | None = None) -> Audited:
    """Make the model, unwrapped.

    Args:
        salt: Which values; all of a model are different.
        dtype: Of all that is floating point.
        value: One value for all elements instead.
    """
    model = Audited().to(dtype)
    seen: set[int] = set()
    count = 1 + 1000 * salt
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if id(tensor) not in seen:
                seen.add(id(tensor))
                number = tensor.numel()
                given = torch.arange(count, count + number) if value is None else torch.full((number,), value)
                tensor.copy_(given.reshape(tensor.shape))
                count += number
    model.noted.note = {"salt": salt}
    return model


# -- ways to lay it over ranks ---------------------------------------------------------------------------------------


@cache
def _line(name: str = "dp") -> Any:
    return mesh_of((dist.get_world_size(),), (name,))


@cache
def _grid(*names: str) -> Any:
    """Make a mesh once: each has process groups, with threads of their own."""
    return mesh_of((2, dist.get_world_size() // 2), names)


def _ddp(model: Any) -> Any:
    return nn.parallel.DistributedDataParallel(model)


def _fsdp2(model: Any, mesh: Any = None) -> Any:
    from torch.distributed.fsdp import fully_shard

    mesh = _line() if mesh is None else mesh
    for part in (*model.units, model.frozen):
        fully_shard(part, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _tp(model: Any, mesh: Any = None) -> Any:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for unit in model.units:
        parallelize_module(
            unit, _line("tp") if mesh is None else mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()}
        )
    return model


def _two_dims(model: Any) -> Any:
    mesh = _grid("dp", "tp")
    return _fsdp2(_tp(model, mesh["tp"]), mesh["dp"])


def _fsdp1(**options: Any) -> Callable[[Any], Any]:
    def wrap(model: Any) -> Any:
        from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        made = {name: value() if callable(value) else value for name, value in options.items()}
        if "device_mesh" in made and made["device_mesh"].ndim == 2:
            made["sharding_strategy"] = ShardingStrategy.HYBRID_SHARD
        policy = ModuleWrapPolicy({Unit, Frozen})
        return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"), **made)

    return wrap


def _compiled(module: Any) -> Any:
    return torch.compile(module, backend="eager")


def _each_unit(*wraps: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def wrap(model: Any) -> Any:
        for i in range(len(model.units)):
            for one in wraps:
                model.units[i] = one(model.units[i])
        return model

    return wrap


def _chain(*wraps: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def wrap(model: Any) -> Any:
        for one in wraps:
            model = one(model)
        return model

    return wrap


@frozen
class Kind:
    """A way to lay the model over ranks.

    Attributes:
        wrap: Does it.
        sizes: The numbers of ranks that it is tried with.
        joined: Whether ranks hold parts of one model, so that a load is always one of all ranks.
        meta: Whether a model on the meta device can be laid out so.
    """

    name: str
    wrap: Callable[[Any], Any]
    sizes: tuple[int, ...] = (1,)
    joined: bool = True
    meta: bool = True

    def __repr__(self) -> str:
        return self.name

    @property
    def is_fsdp1(self) -> bool:
        return "FSDP1" in self.name


_AC = checkpoint_wrapper

KINDS: tuple[Kind, ...] = (
    Kind("plain module", lambda model: model),
    Kind("compile", _compiled),
    Kind("AC(compile)", _chain(_each_unit(_compiled, _AC), _compiled)),
    Kind("compile(AC)", _chain(_each_unit(_AC, _compiled), _AC)),
    Kind("DataParallel", nn.DataParallel),
    Kind("plain", lambda model: model, (2,), joined=False),
    Kind("DDP", _ddp, (3,), joined=False, meta=False),
    Kind("compile(DDP(AC(compile)))", _chain(_each_unit(_compiled, _AC), _ddp, _compiled), (2,), False, False),
    Kind("FSDP2", _fsdp2, (2, 3, 4)),
    Kind("compile(FSDP2(compile(AC)))", _chain(_each_unit(_AC, _compiled), _fsdp2, _compiled), (3,)),
    Kind("TP", _tp, (2, 3)),
    Kind("AC(compile(TP))", _chain(_tp, _each_unit(_compiled, _AC)), (2,)),
    Kind("FSDP2+TP", _two_dims, (4,)),
    Kind("compile(FSDP2+TP)", _chain(_two_dims, _compiled), (4,)),
    Kind("HSDP", _chain(lambda model: _fsdp2(model, _grid("replicas", "dp"))), (4,)),
    Kind("FSDP1", _fsdp1(use_orig_params=True), (3,), meta=False),
    Kind("FSDP1, flat", _fsdp1(use_orig_params=False), (2,), meta=False),
    Kind("FSDP1 on a mesh", _fsdp1(use_orig_params=True, device_mesh=_line), (2,), meta=False),
    Kind("FSDP1, hybrid", _fsdp1(use_orig_params=True, device_mesh=lambda: _grid("r", "s")), (4,), meta=False),
    Kind("compile(FSDP1(AC))", _chain(_each_unit(_AC), _fsdp1(use_orig_params=True), _compiled), (2,), meta=False),
)
SIZES = (1, 2, 3, 4)
"""The numbers of ranks; 1 for one process without a group."""


def kinds_of(n: int, *, joined: bool = False, meta: bool = False) -> list[Kind]:
    """Give the kinds for a number of ranks."""
    return [k for k in KINDS if n in k.sizes and (k.joined or not joined) and (k.meta or not meta)]


def build(kind: Kind, salt: int = 0, *, device: str = "cpu", **options: Any) -> Any:
    """Make a model of a kind, the same one on all ranks.

    Args:
        kind: How it is laid out.
        salt: Which values.
        device: ``"meta"`` for a model without memory.
        **options: As ``plain`` takes them.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own deprecations, and what torch 2.6 says of random numbers
        if device == "meta":
            with torch.device("meta"):
                made = Audited().to(options.get("dtype", torch.float32))
            return kind.wrap(made)
        return kind.wrap(plain(salt, **options))


# -- training it -----------------------------------------------------------------------------------------------------


_SHAPES = {name: tuple(p.shape) for name, p in Audited().named_parameters() if p.requires_grad}


def _gradients(step: int, skip: str | None) -> dict[str, torch.Tensor]:
    made: dict[str, torch.Tensor] = {}
    for i, (name, shape) in enumerate(_SHAPES.items()):
        numbers = torch.arange(torch.Size(shape).numel()).reshape(shape)
        if skip is None or not name.startswith(skip):
            made[name] = ((numbers * (7 + i) + 3 * step) % 32 - 15) / 16
    return made


def train(model: Any, optimizers: Any, steps: int = 1, *, start: int = 0, skip: str | None = None) -> None:
    """Take steps with gradients that depend on the step and the name only.

    Args:
        model: The model, of any kind.
        optimizers: One or several.
        steps: How many.
        start: The number of the first.
        skip: Parameters whose names begin so get none.
    """
    several = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
    for step in range(start, start + steps):
        given = _gradients(step, skip)
        if any(type(m).__name__ == "FullyShardedDataParallel" for m in model.modules()):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the compiler
                getattr(model, "_orig_mod", model)(given).backward()
        else:
            _put(model, given)
        for optimizer in several:
            optimizer.step()
        model.zero_grad(set_to_none=True)


def _put(model: nn.Module, given: Mapping[str, torch.Tensor]) -> None:
    for name, param in model.named_parameters():
        gradient = given.get(clean(name))
        if gradient is not None and param.requires_grad:
            one: Any = param
            if hasattr(one, "placements"):
                gradient = dtensor(gradient, one.device_mesh, list(one.placements))
            param.grad = gradient.to(param.dtype)
