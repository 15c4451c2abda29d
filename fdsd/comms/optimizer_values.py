"""Single values on their way into a live optimizer: cast as the optimizer wants them, copied in place where they fit.

Two steps: all values are made first, in memory of their own; then ``Arrivals.land`` copies what goes in place, so
that nothing has changed if a value cannot be made. Names, groups and optimizers are unknown here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from attrs import define, field, frozen

from fdsd.algebra.dtypes import check_cast, copy_elements
from fdsd.comms.dtensors import lie_alike
from fdsd.comms.modules import is_dtensor
from fdsd.comms.optimizer_probe import fresh_copy
from fdsd.data.columns import Item, Path, is_plain
from fdsd.data.memory import is_same_view, storage_id
from fdsd.data.values import is_dict, is_sequence

__all__ = ["Arrivals", "Policy", "fits", "local_part"]


def _nothing(path: Path) -> object:
    return None


@frozen
class Policy:
    """How values of one parameter are cast.

    Args:
        param: The parameter.
        moves_step: Whether ``step`` lies beside the parameter, in float32: for fused and capturable optimizers.
        dtype: ``"target"``: as ``Optimizer.load_state_dict`` casts, but for ``first``; ``"source"``: not at all.
        first: Tells what a first step of the optimizer would put at a path; its dtype goes before that of the
            parameter, as it would in training.
    """

    param: torch.Tensor
    moves_step: bool
    dtype: Literal["target", "source"] = "target"
    first: Callable[[Path], object] = _nothing

    def cast(self, path: Path, value: torch.Tensor) -> torch.Tensor:
        """Bring a tensor to the device and dtype that it is to have; the same tensor if it has them.

        Raises:
            Unsupported: torch has no such cast.
        """
        dtype = self.dtype_of(path, value.dtype)
        check_cast(value.dtype, dtype)
        return value.to(dtype=dtype, device=value.device if self.stays(path) else self.param.device)

    def stays(self, path: Path) -> bool:
        """Whether a tensor keeps its dtype and its device: a count of steps on the CPU."""
        return path[-1:] == ("step",) and not self.moves_step

    def dtype_of(self, path: Path, dtype: torch.dtype) -> torch.dtype:
        """Tell the dtype that a tensor will have."""
        if path[-1:] == ("step",):
            return torch.float32 if self.moves_step else dtype
        if self.dtype == "source" or not self.param.is_floating_point() or dtype == self.param.dtype:
            return dtype
        own = self.first(path)
        return own.dtype if isinstance(own, torch.Tensor) else self.param.dtype


def fits(new: torch.Tensor, live: object, dtype: Literal["target", "source"]) -> bool:
    """Tell whether a tensor can be copied into a live one, which keeps its dtype and device."""
    if not isinstance(live, torch.Tensor) or live.is_meta or new.shape != live.shape or new.layout != live.layout:
        return False
    if dtype == "source" and new.dtype != live.dtype:
        return False
    if type(new) is torch.Tensor and type(live) is torch.Tensor:
        return live.layout is torch.strided
    if is_dtensor(new) or is_dtensor(live):
        return type(new) is type(live) and lie_alike(new, live)
    return type(live) in (torch.Tensor, torch.nn.Parameter) and live.layout is torch.strided


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Give the memory of this rank: of a DTensor its local tensor."""
    if type(tensor) is not torch.Tensor and is_dtensor(tensor):
        from fdsd.comms.dtensors import local_of_dtensor

        return local_of_dtensor(tensor)
    return tensor


def _beside(live: object, count: int) -> list[Any]:
    """Give the items of a live sequence of as many, or nothing for each."""
    return list(live) if is_sequence(live) and len(live) == count else [None] * count


def _again(cls: Any, items: list[Any]) -> Any:
    """Make a sequence of a class; named tuples take their items one by one."""
    return cls(*items) if hasattr(cls, "_fields") else cls(items)


@define
class Arrivals:
    """Values for one or several optimizers, made but not yet in place.

    Args:
        adopt: Tells whether a value may be taken over as it is; if not, what is kept is a copy.
        dtype: ``"target"``: as torch casts; ``"source"``: not at all.
    """

    adopt: Callable[[object], bool]
    dtype: Literal["target", "source"]
    _copies: list[tuple[torch.Tensor, torch.Tensor]] = field(factory=list, init=False)
    _taken: dict[int, torch.Tensor] = field(factory=dict, init=False)  # tensors that stand somewhere now
    _goals: dict[int, torch.Tensor] = field(factory=dict, init=False)  # live tensors, with what each becomes

    def row(self, policy: Policy, new: Mapping[Any, Any], live: object, path: Path = ()) -> dict[Any, Any]:
        """Make the state of one parameter, or what of it stands at a path, key by key, beside the one that it has."""
        there: Mapping[Any, Any] = live if is_dict(live) else {}
        made: dict[Any, Any] = {}
        for key, value in new.items():
            if is_plain(value):
                made[key] = self.row(policy, value, there.get(key), (*path, key))
            else:
                made[key] = self.value(policy, (*path, key), value, there.get(key))
        return made

    def value(self, policy: Policy, path: Path, new: Any, live: object = None) -> Any:
        """Make one value: the live tensor, if it is to be filled, or another one."""
        if isinstance(new, torch.Tensor):
            if new is live:
                self._goals[id(new)] = new
                return new
            new = new.detach() if new.requires_grad else new
            if fits(new, live, self.dtype) and isinstance(live, torch.Tensor) and self._is_free(live, new):
                check_cast(new.dtype, live.dtype)
                self._copies.append((live, new))
                return live
            return self._own(policy.cast(path, new), new)
        if is_sequence(new):
            pairs = zip(new, _beside(live, len(new)), strict=True)
            items = [self.value(policy, (*path, Item(i)), item, at) for i, (item, at) in enumerate(pairs)]
            return _again(type(new), items)
        return new if self.adopt(new) else fresh_copy(new)

    def option(self, new: Any, live: object) -> Any:
        """Make the value of a group's option: a live tensor is filled and stays the same object; a tuple stays one."""
        if isinstance(live, torch.Tensor):
            given = torch.as_tensor(new) if isinstance(new, int | float) else new
            if isinstance(given, torch.Tensor) and given.numel() == live.numel() and not is_dtensor(live):
                self._copies.append((live, given.detach().reshape(live.shape)))
                return live
        if type(live) in (list, tuple) and is_sequence(new):
            items = [self.option(item, at) for item, at in zip(new, _beside(live, len(new)), strict=True)]
            return tuple(items) if type(live) is tuple else items
        return fresh_copy(new)

    def fill(self, live: torch.Tensor, new: torch.Tensor) -> None:
        """Have memory filled when all is made."""
        self._copies.append((live, new))

    def protect(self, live: object) -> None:
        """Let no tensor of a live state be taken over for another place."""
        if isinstance(live, torch.Tensor):
            self._taken[id(live)] = live
        elif is_dict(live):
            for value in live.values():
                self.protect(value)
        elif is_sequence(live):
            for value in live:
                self.protect(value)

    def _is_free(self, live: torch.Tensor, new: torch.Tensor) -> bool:
        """A live tensor that several parameters share is filled once, or again with the same."""
        return self._goals.setdefault(id(live), new) is new

    def _own(self, made: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """No tensor stands in two places, since optimizers count in place."""
        if made is given and (id(made) in self._taken or not self.adopt(made)):
            made = made.detach().clone()
        self._taken[id(made)] = made
        return made

    def land(self) -> None:
        """Copy what goes in place. Values that share memory with what is written are copied aside first."""
        pairs = [(local_part(live), local_part(new)) for live, new in self._copies]
        pairs = [(live, new) for live, new in pairs if not is_same_view(live, new)]
        written = {storage_id(live) for live, _ in pairs}
        safe = [(live, new.clone() if storage_id(new) in written else new) for live, new in pairs]
        for live, new in safe:
            copy_elements(new, live)
