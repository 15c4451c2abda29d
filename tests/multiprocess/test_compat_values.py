"""The drop-in over real ranks with unusual values: classes of users, and state that belongs to no parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from fdsd.compat._state_dict_utils import _broadcast_state_dict, _distribute_state_dict
from fdsd.compat.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from tests.helpers.one_layer import BROADCAST, FULL, built, refused, stepped
from tests.helpers.ranks import run_ranks

FLAT: dict[str, Any] = {"flatten_optimizer_state_dict": True}
WHOLE = StateDictOptions(**FULL)


# -- what belongs to no parameter ----------------------------------------------------------------------------------


def give_state_of_no_parameter(rank: int, kind: str, flat: bool) -> None:
    more = FLAT if flat else {}
    model = built(kind)
    optimizer, other = stepped(model), stepped(model, lr=0.2)
    row = {"count": 3, "sum": torch.tensor(4.0), **({} if flat else {"deep": {"max": torch.ones(2)}})}
    optimizer.state["mean"], optimizer.state["more"] = torch.arange(3.0), row
    state: Any = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(**FULL, **more))
    for strict in (True, False):
        other.state.pop("mean", None)
        options = StateDictOptions(**BROADCAST, strict=strict)
        set_optimizer_state_dict(model, other, {} if rank else state, options=options)
        assert torch.equal(other.state["mean"], torch.arange(3.0)) and other.param_groups[0]["lr"] == 0.1
        assert str(other.state["more"]) == str(row)


@pytest.mark.parametrize("kind", ["plain", "fsdp2", "fsdp1"])
@pytest.mark.parametrize("flat", [False, True])
def test_state_of_no_parameter_comes_to_all_ranks(kind: str, flat: bool) -> None:
    """Seen: the other ranks' optimizers got a TensorSpec."""
    run_ranks(give_state_of_no_parameter, 2, kind, flat, group_timeout=10)


def give_state_of_nobody(rank: int) -> str:
    model = built("fsdp2")
    params = list(model.parameters())
    several = [torch.optim.SGD([param], lr=0.1, momentum=0.9) for param in params]
    state: Any = get_optimizer_state_dict(model, stepped(model), options=WHOLE)
    state["state"]["nobody"] = {"momentum_buffer": torch.ones(3)}
    state["param_groups"][0]["lr"] = 7.0
    strict, lax = (StateDictOptions(**BROADCAST, strict=strict) for strict in (True, False))
    text = refused(lambda: set_optimizer_state_dict(model, several, {} if rank else state, options=strict))
    assert [one.param_groups[0]["lr"] for one in several] == [0.1, 0.1] and not any(one.state for one in several)
    set_optimizer_state_dict(model, several, {} if rank else state, options=lax)
    assert [one.param_groups[0]["lr"] for one in several] == [7.0, 7.0]
    assert [list(one.state) == [param] for one, param in zip(several, params, strict=True)] == [True, True]
    return text


def test_state_that_several_optimizers_might_have() -> None:
    """Seen: an error also where what is not known is to be left out."""
    first, second = run_ranks(give_state_of_nobody, 2, group_timeout=10)
    assert first == second and "'nobody' belongs to no parameter" in first


# -- classes of tensors --------------------------------------------------------------------------------------------


class Mine(nn.Parameter):
    """A class that only marks parameters."""


class Named(torch.Tensor):
    """A class that sees every function."""

    @classmethod
    def __torch_function__(cls, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(fn, types, args, kwargs or {})


class Boxed(torch.Tensor):
    """A class around a tensor, without memory of its own."""

    content: torch.Tensor
    copies = True

    @staticmethod
    def __new__(cls, content: torch.Tensor) -> Any:
        make: Any = torch.Tensor._make_wrapper_subclass
        return make(cls, content.shape, dtype=content.dtype, device=content.device)

    def __init__(self, content: torch.Tensor) -> None:
        self.content = content

    @classmethod
    def __torch_dispatch__(cls, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if fn is torch.ops.aten.copy_.default and not isinstance(args[0], Boxed) and cls.copies:
            return args[0].copy_(args[1].content)
        if fn is torch.ops.aten.detach.default:
            return cls(args[0].content)
        raise NotImplementedError(f"{fn} is not for boxes")


class Closed(Boxed):
    """One that gives nothing away."""

    copies = False


MADE: dict[str, Callable[[torch.Tensor], Any]] = {
    "parameter": Mine,
    "function": lambda tensor: tensor.as_subclass(Named),
    "dispatch": Boxed,
}


def load_classes(rank: int, made: str, kind: str) -> None:
    for way in (FULL, BROADCAST):
        with torch.device("meta" if kind == "meta" else "cpu"):
            model = built("fsdp2" if kind == "meta" else kind)
        weights = {"weight": torch.arange(16.0).reshape(4, 4), "bias": torch.arange(4.0)}
        given = {name: MADE[made](value.clone()) for name, value in weights.items()}
        options = StateDictOptions(**way)
        told = set_model_state_dict(model, {} if rank and way is BROADCAST else given, options=options)
        assert not told.missing_keys and not told.unexpected_keys
        found: Any = get_model_state_dict(model, options=WHOLE)
        assert all(type(found[name]) is torch.Tensor and torch.equal(found[name], weights[name]) for name in weights)
        if made == "parameter" and kind != "meta":
            optimizer = stepped(model)
            state: Any = get_optimizer_state_dict(model, optimizer, options=WHOLE)
            row = state["state"]["weight"]
            row["momentum_buffer"] = MADE[made](weights["weight"].clone())
            set_optimizer_state_dict(model, optimizer, {} if rank and way is BROADCAST else state, options=options)
            read: Any = get_optimizer_state_dict(model, optimizer, options=WHOLE)["state"]
            assert torch.equal(read["weight"]["momentum_buffer"], weights["weight"])


@pytest.mark.parametrize("kind", ["plain", "fsdp2", "meta", "fsdp1"])
@pytest.mark.parametrize("made", list(MADE))
def test_values_of_classes_of_users_are_cut_and_sent(made: str, kind: str) -> None:
    """Seen: refused where the model is sharded, and said to lie over ranks when rank 0 gives it."""
    run_ranks(load_classes, 2, made, kind)


def load_what_cannot_be_copied(rank: int, way: dict[str, Any]) -> str:
    model = built("fsdp2")
    before = str(get_model_state_dict(model, options=WHOLE))
    given: Any = {"weight": torch.ones(4, 4), "bias": (Closed if rank == 0 else torch.clone)(torch.ones(4))}
    text = refused(lambda: set_model_state_dict(model, given, options=StateDictOptions(**way)))
    assert str(get_model_state_dict(model, options=WHOLE)) == before
    return text


@pytest.mark.parametrize("way", [FULL, BROADCAST], ids=["full", "broadcast"])
def test_a_class_that_does_not_copy_itself_on_one_rank(way: dict[str, Any]) -> None:
    first, second = run_ranks(load_what_cannot_be_copied, 2, way, group_timeout=10)
    assert first == second and "Rank 0: " in first and "'bias': a Closed does not copy itself" in first


def fill_local_entries(rank: int, made: str) -> None:
    full = {name: MADE[made](value) for name, value in (("w", torch.arange(4.0)), ("b", torch.arange(3.0)))}
    mesh = init_device_mesh("cpu", (2,))
    fills: list[Callable[[Any], Any]] = [
        lambda local: _broadcast_state_dict({} if rank else full, local, torch.device("cpu")),
        lambda local: _distribute_state_dict(full, local, torch.device("cpu")),
    ]
    for fill in fills:
        local: Any = {"w": DTensor.from_local(torch.zeros(2), mesh, [Shard(0)]), "b": torch.zeros(3)}
        fill(local)
        assert local["w"].to_local().tolist() == [2.0 * rank, 2.0 * rank + 1]
        assert type(local["b"]) is torch.Tensor and local["b"].tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("made", list(MADE))
def test_local_entries_are_filled_from_classes_of_users(made: str) -> None:
    run_ranks(fill_local_entries, 2, made)
