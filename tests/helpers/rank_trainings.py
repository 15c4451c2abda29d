"""Training runs over ranks: a model laid out in any way, its optimizers, and a drawn but fixed sample of cases."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Iterable, Iterator, Sequence
from random import Random
from typing import Any

import torch
from attrs import frozen
from torch import nn
from torch.optim import Optimizer

from fdsd.compat.state_dict import StateDictOptions
from tests.helpers import parallelism
from tests.helpers.optimizers import by_name
from tests.helpers.parallelism import FORWARD, WAYS, Mlp

__all__ = [
    "OPTIONS",
    "Case",
    "Run",
    "Team",
    "advance",
    "cache_meshes",
    "can_change_what_trains",
    "cases",
    "parameters_of",
]

Run = tuple[Any, list[Optimizer]]

OPTIONS = [
    StateDictOptions(
        full_state_dict=full,
        broadcast_from_rank0=broadcast,
        cpu_offload=cpu,
        flatten_optimizer_state_dict=flat,
        strict=strict,
        ignore_frozen_params=ignore,
    )
    for full, broadcast in ((False, False), (True, False), (True, True))
    for cpu, flat, strict, ignore in itertools.product([False, True], repeat=4)
]
"""Every legal combination."""

_WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_OPTIMIZERS = (
    "Adam",
    "Adam(amsgrad)",
    "AdamW(fused)",
    "SGD",
    "SGD(momentum)",
    "SGD(nesterov)",
    "SGD(dampening)",
    "Adagrad",
    "RMSprop",
    "RMSprop(centered)",
    "Adafactor",
    "NAdam",
    "Adadelta",
    "Nested",
)


class Team(Mlp):
    """Besides layers of uneven sizes: a norm with buffers, a count, an extra state; a tied weight and a late layer."""

    age: torch.Tensor

    def __init__(self, *, tied: bool = False, late: bool = False) -> None:
        super().__init__()
        self.tied, self.late, self.note = tied, late, 0
        self.batch = nn.BatchNorm1d(5)
        self.register_buffer("age", torch.zeros((), dtype=torch.int64))
        if tied:
            self.tail = nn.Linear(5, 3, bias=False)
            self.tail.weight = self.head.weight
        if late:
            self.side = nn.Linear(5, 5, bias=False)

    def get_extra_state(self) -> Any:
        return {"note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        x = self.batch(x) * self.scale.sum()
        if self.late and int(self.age) >= 3:
            x = x + self.side(x).tanh()
        self.age += 1
        made: torch.Tensor = self.head(x)
        if self.tied:
            made = made + self.tail(x)
        return made.sin()


def can_change_what_trains(way: str) -> bool:
    """Whether parameters may be frozen, or be unused for a time, once the model is laid out."""
    return "fsdp1" not in way and way != "ddp" and "compile" not in way


def can_train(way: str, optimizer: str) -> bool:
    """Whether torch itself can: some operations know no DTensors, or not them beside plain tensors."""
    if optimizer == "AdamW(fused)" and way == "fsdp2 and tp" and not FORWARD:
        return False  # torch 2.6 takes no steps over two meshes at once
    if optimizer in ("Adafactor", "Rprop"):
        return way in ("plain", "ddp", "fsdp1", "fsdp1, flat")
    return way != "tp" or optimizer not in ("Adam(amsgrad)", "AdamW(fused)")


@frozen
class Case:
    """A run, and how it is saved and restored.

    Attributes:
        way: How the model is laid out.
        optimizer: The class of the optimizers.
        split: ``"one"`` group, ``"groups"``, ``"two"`` optimizers, or one over a ``"part"`` of the model.
        options: Of the drop-in.
        route: How the state goes from one run into another.
        tied: Whether a weight has two names.
        late: Whether a layer is first used after the save.
        freeze: ``"always"``, ``"at save"``, ``"before"`` it only, or ``""``: never.
        steps: How many steps are taken before the save.
        used: Whether the other run has been trained too.
    """

    way: str
    optimizer: str
    split: str
    options: StateDictOptions
    route: str
    tied: bool = False
    late: bool = False
    freeze: str = ""
    steps: int = 2
    used: bool = False

    def make(self, *, seed: int = 0, lr: float = 1.0) -> Run:
        """Make the model, laid out, and the optimizers, which have not stepped."""
        torch.manual_seed(seed)
        model: Any = Team(tied=self.tied, late=self.late)
        model.note = seed
        self.set_frozen(model, self.freeze in ("always", "before"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # FSDP1 is deprecated, and says so
            model = WAYS[self.way](model)
        params = list(parameters_of(model).values())
        at = len(params) // 2 + 1
        parts = {"one": [[params]], "groups": [[params[:at], params[at:]]], "two": [[params[:at]], [params[at:]]]}
        optimizers: list[Optimizer] = []
        for groups in parts.get(self.split, [[params[:at]]]):
            made = by_name(self.optimizer).make([{"params": group} for group in groups])
            for i, group in enumerate(made.param_groups):
                group["lr"] = 0.02 * lr / (i + 1)
            optimizers.append(made)
        return model, optimizers

    def begun(self, *, seed: int = 0, lr: float = 1.0) -> Run:
        """Make them, and train up to the point of the save."""
        model, optimizers = self.make(seed=seed, lr=lr)
        advance(self, model, optimizers, range(self.steps))
        self.reach_save(model)
        return model, optimizers

    def reach_save(self, model: nn.Module) -> None:
        """Freeze what is frozen when the run is saved."""
        if self.freeze in ("at save", "before"):
            self.set_frozen(model, self.freeze == "at save")

    def goes_on(self, run: Run) -> list[float]:
        """Train on: two steps with what is frozen at the save, then two without, unless it always is."""
        losses = advance(self, *run, range(100, 102))
        if self.freeze == "at save":
            self.set_frozen(run[0], False)
        return losses + advance(self, *run, range(200, 202))

    def set_frozen(self, model: nn.Module, is_frozen: bool) -> None:
        if self.freeze:
            params = parameters_of(model)
            for name in ("layers.1.down.bias", "head.weight"):
                params[name].requires_grad_(not is_frozen)


def parameters_of(model: nn.Module) -> dict[str, Any]:
    """Give the parameters by the names of the unwrapped model."""
    return _unwrapped(model.named_parameters())


def _unwrapped(named: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    return {".".join(s for s in name.split(".") if s not in _WRAPPERS): tensor for name, tensor in named}


def advance(case: Case, model: Any, optimizers: Iterable[Optimizer], numbers: Iterable[int]) -> list[float]:
    """Take steps, whose numbers say what data all ranks see; give the losses."""
    optimizers, losses = list(optimizers), []
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        x, wanted = torch.randn(6, 5, generator=generator), torch.rand(6, 3, generator=generator) - 0.5
        for p in model.parameters():
            p.grad = None
        loss = (_forward(case, model, x) - wanted).square().mean()
        loss.backward()
        losses.append(loss.item())
        for optimizer in optimizers:
            optimizer.step()
    for p in model.parameters():
        p.grad = None
    return losses


def _forward(case: Case, model: Any, x: torch.Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the compiler
        if FORWARD or ("fsdp2" not in case.way and case.way != "hsdp"):
            return model(x)
    # gradients go through full_tensor, as a user would do it
    whole = {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in parameters_of(model).items()}
    plain = Team(tied=case.tied, late=case.late)
    return torch.func.functional_call(plain, {**whole, **_unwrapped(model.named_buffers())}, (x,))


def cache_meshes() -> None:
    """Let all models of this rank lie on the same mesh: each would make process groups of its own."""
    parallelism.mesh_of = functools.cache(parallelism.mesh_of)


# -- the sample ------------------------------------------------------------------------------------------------------


def _shuffled(items: Sequence[Any], random: Random) -> Iterator[Any]:
    """Go through items in random orders for ever, so that all come equally often."""
    while True:
        yield from random.sample(items, len(items))


@functools.cache
def cases(number: int) -> dict[tuple[str, int], list[Case]]:
    """Draw a number of cases for each way and count of ranks; the same ones every time."""
    random = Random(7)
    options, optimizers = _shuffled(OPTIONS, random), _shuffled(_OPTIMIZERS, random)
    routes = _shuffled([*["together", "apart"] * 4, "live", "snapshot", "file", "files"], random)
    splits = _shuffled(["one", "groups", "two", "part"], random)
    made: dict[tuple[str, int], list[Case]] = {}
    for way, n in _WAYS:
        changes = can_change_what_trains(way)
        freezes = ["", "always", "at save", "before"] if changes else [""] if way == "fsdp1, flat" else ["", "always"]
        made[way, n] = []
        for _ in range(number):
            route = next(routes)
            case = Case(
                way,
                next(optimizer for optimizer in optimizers if can_train(way, optimizer)),
                next(splits),
                next(options) if route in ("together", "apart") else StateDictOptions(),
                route,
                tied=random.random() < 0.4,
                late=changes and random.random() < 0.3,
                freeze=random.choice(freezes),
                steps=random.choice([0, 2, 2, 2]),
                used=random.random() < 0.4,
            )
            made[way, n].append(case)
    return made


_WAYS = (
    ("plain", 2),
    ("ddp", 2),
    ("ddp", 3),
    ("fsdp2", 2),
    ("fsdp2", 3),
    ("fsdp2", 4),
    ("hsdp", 4),
    ("tp", 2),
    ("tp", 4),
    ("fsdp2 and tp", 4),
    ("fsdp1", 2),
    ("fsdp1", 3),
    ("fsdp1, flat", 2),
    ("fsdp1, flat", 4),
    ("compile of fsdp2 of checkpoint", 2),
)
