"""Optimizers of all kinds for tests: torch's own, with their options, and classes as users write them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from attrs import frozen
from hypothesis import strategies as st
from torch import nn
from torch.optim import Optimizer

from fdsd import OptimState, ParamGroup
from fdsd.algebra.dtypes import as_bytes
from fdsd.comms.modules import read_modules
from fdsd.comms.optimizer_probe import fresh_copy

__all__ = [
    "CASES",
    "Case",
    "Nested",
    "OwnFormat",
    "Setup",
    "by_name",
    "copied",
    "descend",
    "setups",
    "small_model",
    "told",
    "told_all",
    "told_optimizer",
    "train",
    "trained_linear",
]

Params = Iterable[Any]


class Nested(Optimizer):
    """A user's optimizer: nested dicts with keys that are no strings, a list, a plain count, ``None``, a float64."""

    def __init__(self, params: Params, lr: float = 0.1, betas: tuple[float, float] = (0.8, 0.9)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})
        self.calls = 0
        self.seen: list[Any] = [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        for group in self.param_groups:
            decay, rate = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["kron"] = {0: torch.zeros_like(p), "right": {"scale": torch.ones((), dtype=torch.float64)}}
                    state["last"] = []
                    state["note"] = None
                state["count"] = state.get("count", 0) + 1
                state["kron"][0].mul_(decay).add_(p.grad)
                state["kron"]["right"]["scale"].mul_(rate)
                state["last"] = [*state["last"], p.grad.detach().clone()][-2:]
                if len(state["last"]) == 2:
                    state["note"] = "warm"
                p.sub_(group["lr"] * state["kron"][0] * float(state["kron"]["right"]["scale"]) / state["count"])


class OwnFormat(torch.optim.SGD):
    """An optimizer that adds to its state dict, and reads it back."""

    def __init__(self, params: Params, **options: Any) -> None:
        super().__init__(params, **options)
        self.loaded: list[dict[str, Any]] = []
        self.rounds = 0

    def step(self, closure: Any = None) -> Any:
        self.rounds += 1
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "rounds": self.rounds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded.append(state_dict)
        self.rounds = state_dict["rounds"]
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "rounds"})


@frozen
class Case:
    """An optimizer with options.

    Attributes:
        make: Makes it for parameters.
        is_exact: Whether a fresh one has a state of tensors that trains as no state does.
        needs_closure: Whether ``step`` needs one; then there is no template.
        only_matrices: Whether it takes parameters of two dims only.
        sparse: Whether it takes sparse gradients only.
        complex: Whether it takes complex parameters.
    """

    name: str
    make: Callable[[Params], Optimizer]
    is_exact: bool = True
    needs_closure: bool = False
    only_matrices: bool = False
    sparse: bool = False
    complex: bool = True

    def __repr__(self) -> str:
        return self.name


def _case(name: str, cls: Callable[..., Optimizer], options: dict[str, Any], **facts: Any) -> Case:
    return Case(name, lambda params: cls(params, **options), **facts)


_SGD = {"lr": 0.1, "momentum": 0.9}

CASES: tuple[Case, ...] = (
    _case("Adam", torch.optim.Adam, {"lr": 0.1}),
    _case("Adam(amsgrad)", torch.optim.Adam, {"lr": 0.1, "amsgrad": True, "weight_decay": 0.1, "foreach": True}),
    _case("AdamW(fused)", torch.optim.AdamW, {"lr": 0.1, "fused": True}, complex=False),
    _case("SGD", torch.optim.SGD, {"lr": 0.1}),
    _case("SGD(momentum)", torch.optim.SGD, {**_SGD, "weight_decay": 0.1}),
    _case("SGD(nesterov)", torch.optim.SGD, {**_SGD, "nesterov": True}),
    _case("SGD(dampening)", torch.optim.SGD, {**_SGD, "dampening": 0.5}, is_exact=False),
    _case("Adagrad", torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.25}),
    _case("RMSprop", torch.optim.RMSprop, {"lr": 0.1}),
    _case("RMSprop(centered)", torch.optim.RMSprop, {"lr": 0.1, "centered": True, "momentum": 0.5}),
    _case("Adadelta", torch.optim.Adadelta, {"lr": 0.1}),
    _case("Adamax", torch.optim.Adamax, {"lr": 0.1}),
    _case("NAdam", torch.optim.NAdam, {"lr": 0.1}),
    _case("RAdam", torch.optim.RAdam, {"lr": 0.1}),
    _case("ASGD", torch.optim.ASGD, {"lr": 0.1, "t0": 1.0}),
    _case("Rprop", torch.optim.Rprop, {"lr": 0.1}),
    _case("Adafactor", torch.optim.Adafactor, {"lr": 0.1}, complex=False),
    _case("SparseAdam", torch.optim.SparseAdam, {"lr": 0.1}, sparse=True),
    _case("LBFGS", torch.optim.LBFGS, {"lr": 0.1, "max_iter": 3}, needs_closure=True),
    _case("Nested", Nested, {"lr": 0.1}),
    _case("OwnFormat", OwnFormat, _SGD),
    *(
        [_case("Muon", torch.optim.Muon, {"lr": 0.1}, only_matrices=True, complex=False)]
        if hasattr(torch.optim, "Muon")
        else []
    ),
)


def by_name(name: str) -> Case:
    """Find a case."""
    return next(case for case in CASES if case.name == name)


def small_model(*, only_matrices: bool = False, seed: int = 0) -> nn.Module:
    """A small model with parameters of 0 to 4 dims (or matrices only), all values different."""
    shapes = [(3, 4), (4, 2)] if only_matrices else [(3, 4), (), (5,), (1,), (2, 3, 2), (2, 1, 3, 3)]
    model = nn.Module()
    generator = torch.Generator().manual_seed(seed)
    for i, shape in enumerate(shapes):
        part = nn.Module()
        part.weight = nn.Parameter(torch.randn(shape, generator=generator))
        model.add_module(f"part{i}", part)
    return model


def train(
    model: nn.Module,
    optimizers: Iterable[Optimizer],
    steps: int = 2,
    *,
    seed: int = 1,
    skip: Collection[str] = (),
) -> None:
    """Take steps with random gradients, which depend on the seed and the parameters only; ``skip`` gets none."""
    generator = torch.Generator().manual_seed(seed)
    optimizers = list(optimizers)
    for _ in range(steps):
        grads = {n: torch.randn(p.shape, generator=generator).to(p.dtype) for n, p in model.named_parameters()}

        def closure(grads: dict[str, torch.Tensor] = grads) -> torch.Tensor:
            loss = torch.zeros(())
            for name, p in model.named_parameters():
                if p.requires_grad and name not in skip:
                    p.grad = grads[name] + 0.5 * p.detach()
                    loss = loss + (p.detach().float() * grads[name].float()).sum()
            return loss

        closure()
        for optimizer in optimizers:
            if isinstance(optimizer, torch.optim.SparseAdam):
                for p in (p for group in optimizer.param_groups for p in group["params"]):
                    p.grad = None if p.grad is None else p.grad.to_sparse()
            optimizer.step(closure) if isinstance(optimizer, torch.optim.LBFGS) else optimizer.step()
        for p in model.parameters():
            p.grad = None


# -- random setups ---------------------------------------------------------------------------------------------------


@frozen
class Setup:
    """A recipe for a model with optimizers; ``make`` gives the same one every time.

    Attributes:
        case: The class of the optimizers.
        shapes: The shapes of the parameters.
        dtype: Their dtype.
        groups: For each optimizer its groups, by numbers of parameters; a group may be empty.
        untouched: Parameters that never get a gradient.
        frozen: Parameters that are frozen after they have been trained.
        tied: Whether the first parameter has a second name.
    """

    case: Case
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    groups: tuple[tuple[tuple[int, ...], ...], ...]
    untouched: frozenset[int]
    frozen: frozenset[int]
    tied: bool

    def make(self, *, seed: int = 0) -> tuple[nn.Module, list[Optimizer]]:
        """Make the model and the optimizers, which have not stepped."""
        generator = torch.Generator().manual_seed(seed)
        model = nn.Module()
        params = [nn.Parameter(torch.randn(s, generator=generator).to(self.dtype)) for s in self.shapes]
        for i, param in enumerate(params):
            part = nn.Module()
            part.weight = param
            model.add_module(f"part{i}", part)
        if self.tied:
            model.again = params[0]
        optimizers: list[Optimizer] = []
        for groups in self.groups:
            rows = [{"params": [params[i] for i in group], "lr": 0.1 / (g + 1)} for g, group in enumerate(groups)]
            optimizers.append(self.case.make(rows))
        return model, optimizers

    def trained(self, steps: int, *, seed: int = 0) -> tuple[nn.Module, list[Optimizer]]:
        """Make them, and train for some steps; then freeze what is to be frozen."""
        model, optimizers = self.make(seed=seed)
        self.train(model, optimizers, steps)
        for i in self.frozen:
            model.get_parameter(f"part{i}.weight").requires_grad_(False)
        return model, optimizers

    def train(self, model: nn.Module, optimizers: Iterable[Optimizer], steps: int, *, seed: int = 1) -> None:
        """Take steps; the untouched parameters get no gradients, nor do frozen ones."""
        train(model, optimizers, steps, seed=seed, skip={f"part{i}.weight" for i in self.untouched})


@st.composite
def setups(draw: st.DrawFn, cases: tuple[Case, ...] = CASES) -> Setup:
    """Setups of all kinds: shapes, dtypes, groups, several optimizers, untouched, frozen and tied parameters."""
    case = draw(st.sampled_from(cases))
    matrices = case.only_matrices or case.sparse
    lowest = 1 if matrices or case.name in ("Adafactor", "LBFGS") else 0
    dims = st.just(2) if matrices else st.integers(0, 3)
    shape = dims.flatmap(lambda n: st.tuples(*[st.integers(lowest, 4)] * n))
    shapes = tuple(draw(st.lists(shape, min_size=1, max_size=5)))
    plain = case.needs_closure or case.sparse or "fused" in case.name
    dtype = torch.float32 if plain else draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
    numbers = draw(st.permutations(range(len(shapes))))
    if case.needs_closure:
        groups: list[list[tuple[int, ...]]] = [[tuple(numbers)]]
    else:
        groups = [[(), ()], [()]] if draw(st.booleans()) else [[(), ()]]
        for number in numbers:
            own = groups[draw(st.integers(0, len(groups) - 1))]
            at = draw(st.integers(0, len(own) - 1))
            own[at] = (*own[at], number)
        groups = [own for own in groups if any(own)]
    some = st.frozensets(st.sampled_from(range(len(shapes))))
    untouched = frozenset() if case.needs_closure else draw(some)
    frozen_ = frozenset() if case.needs_closure else draw(some)
    return Setup(case, shapes, dtype, tuple(map(tuple, groups)), untouched, frozen_, draw(st.booleans()))


# -- comparing -------------------------------------------------------------------------------------------------------


def _placed(tensor: Any) -> str:
    """Word the placements of a tensor, alike where torch holds them for equal.

    Its optimizers call what lies in strided shards plain shards then, now and then; the bytes say how it lies.
    """
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    text = str(getattr(tensor, "placements", ""))
    if _StridedShard(0, split_factor=2) == Shard(0):
        text = re.sub(r"_StridedShard\(dim=(\d+), sf=\d+\)", r"Shard(dim=\1)", text)
    return text


def told(value: Any) -> Any:
    """Describe a value by bytes, dtypes and classes, so that ``==`` compares it."""
    if isinstance(value, torch.Tensor):
        kind = type(value).__name__
        placed = [_placed(value), str(getattr(value, "device_mesh", ""))]
        local = value.to_local() if hasattr(value, "to_local") else value
        return kind, *placed, str(value.dtype), tuple(value.shape), as_bytes(local.detach()).tolist()
    if isinstance(value, dict):
        return [(told(key) if isinstance(key, torch.Tensor) else key, told(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value).__name__, [told(item) for item in value]
    return type(value).__name__, repr(value)


def told_optimizer(optimizer: Optimizer) -> Any:
    """Describe the state and the groups of an optimizer, by position."""
    numbers = {p: i for i, p in enumerate([p for group in optimizer.param_groups for p in group["params"]])}
    state = {numbers.get(key, key): dict(row) for key, row in optimizer.state.items()}
    rows = {key: {slot: state[key][slot] for slot in sorted(state[key], key=str)} for key in sorted(state, key=str)}
    groups = [{key: group[key] for key in sorted(group) if key != "params"} for group in optimizer.param_groups]
    return told(rows), told(groups)


def told_all(model: nn.Module, optimizers: Iterable[Optimizer]) -> Any:
    """Describe a model and its optimizers: values, gradients, what trains."""
    params = [(name, told(p), told(p.grad), p.requires_grad) for name, p in model.named_parameters()]
    return params, [told_optimizer(optimizer) for optimizer in optimizers]


# -- states ----------------------------------------------------------------------------------------------------------


def copied(state: OptimState) -> OptimState:
    """The same state in memory of its own."""
    slots = {slot: {fqn: fresh_copy(v) for fqn, v in column.items()} for slot, column in state.slots.items()}
    groups = [ParamGroup(g.fqns, fresh_copy(dict(g.options)), named=g.named) for g in state.groups]
    return OptimState(slots, groups, extra=fresh_copy(dict(state.extra)))


def descend(net: nn.Module, optimizer: Any, steps: int = 1) -> list[float]:
    """Take steps on a network of two inputs, and give the losses on the way."""
    losses: list[float] = []

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        made = net(torch.arange(8.0).reshape(4, 2) / 8).square().sum()
        made.backward()
        losses.append(made.item())
        return made

    for _ in range(steps):
        optimizer.step(loss)
    return losses


def trained_linear(cls: Callable[..., Optimizer] = torch.optim.Adam, **options: Any) -> Any:
    """A Linear(3, 2), its optimizer after two steps, and what ``read_modules`` gives."""
    torch.manual_seed(3)
    model = nn.Linear(3, 2)
    optimizer = cls(model.parameters(), **{"lr": 0.1, **options})
    train(model, [optimizer], 2)
    return model, optimizer, read_modules(model)
