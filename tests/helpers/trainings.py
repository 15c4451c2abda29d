"""Random training runs in one process: a model, its optimizers, what is frozen and when, and how a run is saved.

Every loss of a run depends on parameters, buffers, an extra state, the state of the optimizers and their options, so
that whatever is lost shows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from attrs import frozen
from hypothesis import strategies as st
from torch import nn
from torch.optim import Optimizer

from tests.helpers.optimizers import CASES, Case, by_name, told, told_optimizer

__all__ = ["Learner", "Part", "Training", "advance", "keeps_state", "lacks_state", "outcome", "trainings"]

_ROWS = 6


class Learner(nn.Module):
    """Embeddings, blocks, a norm, a 0-dim parameter, buffers of both kinds, an extra state, a layer that comes late.

    Args:
        width: Of all layers.
        depth: The number of blocks.
        norm: ``"batch"``, ``"layer"`` or ``"none"``.
        tied: Whether the head has the weight of the embeddings.
        dropout: Whether random numbers are drawn.
        late: From which forward pass on the layer ``side`` is used.
    """

    age: torch.Tensor
    shift: torch.Tensor

    def __init__(self, width: int, depth: int, norm: str, *, tied: bool, dropout: bool, late: int) -> None:
        super().__init__()
        self.late, self.seen = late, 0
        self.embed = nn.Embedding(_ROWS, width)
        self.blocks = nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])
        norms = {"batch": nn.BatchNorm1d, "layer": nn.LayerNorm, "none": lambda width: nn.Identity()}
        self.norm = norms[norm](width)
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.side = nn.Linear(width, width, bias=False)
        self.dropout = nn.Dropout(0.25 if dropout else 0.0)
        self.head = nn.Linear(width, _ROWS, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("age", torch.zeros((), dtype=torch.int64))
        self.register_buffer("shift", torch.linspace(-0.5, 0.5, width), persistent=False)

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) * self.gain.cos() + self.shift
        for block in self.blocks:
            x = x + block(x).tanh()
        x = self.dropout(self.norm(x)) * (1 + 0.01 * (self.seen % 5))
        if int(self.age) >= self.late:
            x = x + self.side(x).tanh()
        self.age += 1
        self.seen += 1
        made: torch.Tensor = self.head(x).sin()  # bounded, whatever the weights are
        return made


@frozen
class Part:
    """An optimizer: its class, its groups as names of parameters, and whether it first steps after the save."""

    case: Case
    groups: tuple[tuple[str, ...], ...]
    idle: bool = False


@frozen
class Training:
    """A recipe for a run; ``make`` gives the same one every time.

    Attributes:
        seed: Of the values.
        model: The arguments of ``Learner``.
        dtype: Of the parameters.
        parts: The optimizers; parameters of none are not trained.
        frozen: Parameters that are frozen in the time that ``freeze`` names.
        freeze: ``"always"``, or ``"at save"`` (trained before, and again some steps after it), or ``"before"`` it only.
        steps: How many steps are taken before the save.
        scheduled: Whether a schedule has changed the learning rates and added an option of its own.
    """

    seed: int
    model: dict[str, Any]
    dtype: torch.dtype
    parts: tuple[Part, ...]
    frozen: frozenset[str]
    freeze: str
    steps: int
    scheduled: bool

    def make(self, *, seed: int | None = None, lr: float = 0.02) -> tuple[Learner, list[Optimizer]]:
        """Make the model and the optimizers, which have not stepped."""
        torch.manual_seed(self.seed if seed is None else seed)
        model = Learner(**self.model).to(self.dtype)
        optimizers: list[Optimizer] = []
        for part in self.parts:
            rows = [
                {"params": [model.get_parameter(name) for name in group], "lr": lr / (i + 1)}
                for i, group in enumerate(part.groups)
            ]
            optimizers.append(part.case.make(rows))
        self._freeze(model, self.freeze in ("always", "before"))
        return model, optimizers

    def _freeze(self, model: nn.Module, is_frozen: bool) -> None:
        for name in self.frozen:
            model.get_parameter(name).requires_grad_(not is_frozen)

    def begun(self, *, seed: int | None = None, lr: float = 0.02) -> tuple[Learner, list[Optimizer]]:
        """Make them, and train up to the point of the save."""
        model, optimizers = self.make(seed=seed, lr=lr)
        busy = [optimizer for optimizer, part in zip(optimizers, self.parts, strict=True) if not part.idle]
        advance(model, busy, range(self.steps))
        self.reach_save(model)
        if self.scheduled:
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["initial_lr"], group["lr"] = group["lr"], group["lr"] * 0.75
        return model, optimizers

    def reach_save(self, model: nn.Module) -> None:
        """Freeze what is frozen when the run is saved."""
        self._freeze(model, self.freeze in ("always", "at save"))

    def goes_on(self, model: Learner, optimizers: Sequence[Optimizer]) -> list[float]:
        """Train on: two steps with what is frozen at the save, then three without, so that all is used in the end."""
        first = advance(model, optimizers, range(100, 102))
        if self.freeze != "always":
            self._freeze(model, False)
        return first + advance(model, optimizers, range(200, 203))


def advance(model: nn.Module, optimizers: Iterable[Optimizer], numbers: Iterable[int]) -> list[float]:
    """Take steps, whose numbers say which tokens and random numbers they see; give the losses."""
    optimizers, losses = list(optimizers), []
    for number in numbers:
        torch.manual_seed(number)
        tokens = torch.randint(_ROWS, (8,))
        wanted = torch.rand(8, _ROWS) - 0.5

        def closure(tokens: torch.Tensor = tokens, wanted: torch.Tensor = wanted) -> torch.Tensor:
            for p in model.parameters():
                p.grad = None
            loss = (model(tokens) - wanted.to(model.gain.dtype)).square().mean()
            if loss.requires_grad:  # else all that is used is frozen
                loss.backward()
            return loss

        losses.append(closure().item())
        for optimizer in optimizers:
            optimizer.step(closure) if isinstance(optimizer, torch.optim.LBFGS) else optimizer.step()
    for p in model.parameters():
        p.grad = None
    return losses


def outcome(model: nn.Module, optimizers: Iterable[Optimizer], *, empty_groups: bool = True) -> Any:
    """Describe all that a run has come to, so that ``==`` compares it; the flat form knows nothing of empty groups."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values = [(name, told(tensor), tensor.requires_grad) for name, tensor in tensors.items()]
    states = []
    for optimizer in optimizers:
        rows, (_, groups) = told_optimizer(optimizer)
        kept = [empty_groups or bool(group["params"]) for group in optimizer.param_groups]
        states.append((rows, list(itertools.compress(groups, kept))))
    return values, getattr(model, "seen", None), states


def keeps_state(optimizer: Optimizer) -> bool:
    """Whether each parameter that an optimizer steps has state of its own."""
    if isinstance(optimizer, torch.optim.SGD):
        return any(group["momentum"] for group in optimizer.param_groups)
    return not isinstance(optimizer, torch.optim.LBFGS)


def lacks_state(optimizers: Iterable[Optimizer]) -> bool:
    """Whether a strict load refuses the state: something trains, and has none, where others of its optimizer have.

    A parameter of which FSDP1 has put nothing on this rank has no state here.
    """
    return any(
        p.requires_grad and p.numel() and not optimizer.state.get(p)
        for optimizer in optimizers
        if optimizer.state and keeps_state(optimizer)
        for group in optimizer.param_groups
        for p in group["params"]
    )


# -- random runs -----------------------------------------------------------------------------------------------------

_USUAL = tuple(case for case in CASES if not (case.sparse or case.only_matrices or case.needs_closure))


@st.composite
def trainings(draw: st.DrawFn, *, own_format: bool = True) -> Training:
    """Runs of all kinds: models, optimizers with groups, several of them, frozen and late parameters, no step at all.

    Args:
        own_format: Whether an optimizer may want entries beside ``state`` and ``param_groups``, which the drop-in,
            like torch, leaves out.
    """
    flags = {name: draw(st.booleans()) for name in ("tied", "dropout")}
    norm = draw(st.sampled_from(["batch", "layer", "none"]))
    late = draw(st.sampled_from([0, 0, 1, 2, 4]))
    model = {"width": draw(st.integers(2, 5)), "depth": draw(st.integers(0, 2)), "norm": norm, "late": late, **flags}
    names = [name for name, _ in Learner(**model).named_parameters()]
    matrices = [name for name, p in Learner(**model).named_parameters() if p.ndim == 2]
    parts, dtype = draw(_parts(names, matrices, [case for case in _USUAL if own_format or case.name != "OwnFormat"]))
    some = draw(st.frozensets(st.sampled_from(names), max_size=3)) if draw(st.booleans()) else frozenset()
    freeze = draw(st.sampled_from(["always", "at save", "before"]))
    steps = draw(st.sampled_from([0, 1, 2, 3]))
    return Training(draw(st.integers(0, 99)), model, dtype, parts, some, freeze, steps, draw(st.booleans()))


@st.composite
def _parts(
    draw: st.DrawFn, names: list[str], matrices: list[str], usual: list[Case]
) -> tuple[tuple[Part, ...], torch.dtype]:
    kind = draw(st.sampled_from(["one", "one", "part", "two", "LBFGS", "Muon"]))
    if kind == "LBFGS":
        return (Part(by_name("LBFGS"), (tuple(names),)),), torch.float32
    cases = [draw(st.sampled_from(usual)) for _ in range(2)]
    if cases[0] == cases[1] and cases[0].name == "OwnFormat":
        cases[1] = by_name("Adam")  # the entries of several would clash
    owned: list[list[str]] = [list(draw(st.permutations(names))), []]
    if kind == "Muon" and hasattr(torch.optim, "Muon"):
        cases[1], owned = by_name("Muon"), [[name for name in names if name not in matrices], matrices]
    elif kind in ("part", "two"):
        at = draw(st.integers(1, len(names) - 1))
        owned = [owned[0][:at], owned[0][at:] if kind == "two" else []]
    parts = [
        Part(case, draw(_groups(own)), draw(st.sampled_from([False, False, True])))
        for case, own in zip(cases, owned, strict=True)
        if own
    ]
    plain = any("fused" in part.case.name or part.case.only_matrices for part in parts)
    dtype = torch.float32 if plain else draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
    return tuple(parts), dtype


@st.composite
def _groups(draw: st.DrawFn, names: list[str]) -> tuple[tuple[str, ...], ...]:
    """One group, or two of which one may be empty."""
    at = draw(st.integers(0, len(names)))
    return draw(st.sampled_from([(tuple(names),), (tuple(names[:at]), tuple(names[at:]))]))
