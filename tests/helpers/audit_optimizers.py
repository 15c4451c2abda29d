"""Optimizers for the audit: how they are made, in which ways their state is given, and that training goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fdsd.compat.state_dict import StateDictOptions
from tests.helpers.audit_values import same
from tests.helpers.audited import train

__all__ = [
    "FORMS",
    "FULL",
    "OPTIMIZERS",
    "WAYS",
    "adam",
    "given",
    "goes_on",
    "reading",
    "sorted_groups",
    "split",
    "unit",
    "writing",
]

WAYS = ("sharded", "full", "broadcast")
FORMS = (("sharded", False), ("full", True), ("broadcast", False), ("broadcast", True))
"""The way, and whether in the flat form."""
FULL = StateDictOptions(full_state_dict=True)


def adam(params: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, **{"lr": 0.5, "betas": (0.8, 0.9), **options})


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": adam,
    "AdamW, tensor lr": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.5), amsgrad=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.5),
    "SGD, dampening": lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.9, dampening=0.5),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.5),
}


def reading(way: str, flat: bool = False) -> StateDictOptions:
    return StateDictOptions(full_state_dict=way != "sharded", flatten_optimizer_state_dict=flat)


def writing(way: str, flat: bool = False, strict: bool = True) -> StateDictOptions:
    return StateDictOptions(
        full_state_dict=way != "sharded",
        broadcast_from_rank0=way == "broadcast",
        flatten_optimizer_state_dict=flat,
        strict=strict,
    )


def given(state: Any, way: str, rank: int) -> Any:
    return {} if way == "broadcast" and rank else state


def unit(model: Any, number: int) -> Any:
    """Find a unit, whatever it is wrapped in."""
    return next(m for name, m in model.named_modules() if name.endswith(f"units.{number}"))


def split(model: Any) -> tuple[list[Any], list[Any]]:
    """Give the parameters of the first unit, and the others."""
    first = list(unit(model, 0).parameters())
    known = {id(p) for p in first}
    return first, [p for p in model.parameters() if id(p) not in known]


def sorted_groups(osd: Any) -> Any:
    """FSDP1's flat parameters have an order of their own, and slots that which they were given in."""
    groups = [dict(sorted({**one, "params": sorted(one["params"])}.items())) for one in osd["param_groups"]]
    return {
        "state": {name: dict(sorted(osd["state"][name].items())) for name in sorted(osd["state"])},
        "groups": groups,
    }


def goes_on(*pairs: tuple[Any, Any]) -> None:
    for model, optimizer in pairs:
        train(model, optimizer, 2, start=1)
    first, second = [[getattr(p, "_local_tensor", p).detach() for p in model.parameters()] for model, _ in pairs]
    same(second, first)
