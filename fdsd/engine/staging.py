"""`Staging`: copies from an accelerator to ordinary memory, through page-locked buffers and beside Python.

Which memory is an accelerator's, and how one waits for it, is asked of a ``Layer``, so that tests can do without one.
Nothing here knows of messages, or of what is copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from attrs import define, field

__all__ = ["ACCELERATOR", "Accelerator", "Layer", "Mark", "Staging"]

_ALIGN = 16
_BUFFER = 1 << 22
"""The bytes of each of the two buffers."""


class Mark(Protocol):
    """A point that a device has yet to reach."""

    def synchronize(self) -> None:
        """Wait until it is reached."""
        ...


class Layer(Protocol):
    """What there is to know of accelerators."""

    def is_there(self) -> bool:
        """Tell whether there is any."""
        ...

    def is_far(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor is in the memory of one."""
        ...

    def empty(self, nbytes: int) -> torch.Tensor:
        """Give bytes that accelerators reach directly."""
        ...

    def copy(self, outs: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Begin copies of which one side is far; they are done when a mark that is set afterwards is reached."""
        ...

    def mark(self, device: torch.device) -> Mark:
        """Set a mark behind what a device has to do."""
        ...


class Accelerator:
    """The accelerators of this machine, by torch's own means.

    No machine with an accelerator has run this class; what is asked of it was tested with a layer that delays copies
    until they are waited for.

    >>> Accelerator().is_far(torch.ones(1))
    False
    """

    def is_there(self) -> bool:
        found: Any = getattr(torch, "accelerator", torch.cuda)
        return bool(found.is_available())

    def is_far(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type not in ("cpu", "meta")

    def empty(self, nbytes: int) -> torch.Tensor:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError:  # some kinds cannot lock pages; then copies take longer
            return torch.empty(nbytes, dtype=torch.uint8)

    def copy(self, outs: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        for out, source in zip(outs, sources, strict=True):
            out.copy_(source, non_blocking=True)

    def mark(self, device: torch.device) -> Mark:
        found: Any = getattr(torch, "accelerator", torch.cuda)
        mark: Mark = found.current_stream(device).record_event()
        return mark


ACCELERATOR = Accelerator()


@define(eq=False)
class _Slot:
    """A buffer, and what is on its way to it."""

    buffer: torch.Tensor
    used: int = 0
    views: list[torch.Tensor] = field(factory=list[torch.Tensor])
    outs: list[torch.Tensor] = field(factory=list[torch.Tensor])
    devices: set[torch.device] = field(factory=set[torch.device])
    marks: list[Mark] = field(factory=list[Mark])


@define(eq=False)
class Staging:
    """Copies from accelerators to ordinary memory: while one buffer is emptied, the other one is filled.

    Args:
        layer: The accelerators.
        nbytes: The size of each of the two buffers.

    Law: after ``finish`` each ``out`` has the elements of its source, whatever the order of copies.

    >>> staging, out = Staging(), torch.empty(2)
    >>> staging.copy(torch.ones(2, device="cuda"), out); staging.finish(); out  # doctest: +SKIP
    tensor([1., 1.])
    """

    layer: Layer = ACCELERATOR
    nbytes: int = _BUFFER
    _slots: list[_Slot] = field(factory=list[_Slot], init=False)

    def copy(self, source: torch.Tensor, out: torch.Tensor) -> None:
        """Begin a copy; big tensors are cut.

        Args:
            source: In the memory of an accelerator.
            out: In ordinary memory, of the same shape and any dtype; complete after ``finish``.
        """
        for part, where in _cut(source, out, self.nbytes):
            size = part.numel() * part.element_size()
            slot = self._with_room(size)
            begin = slot.used
            slot.used += -(-size // _ALIGN) * _ALIGN
            view = slot.buffer[begin : begin + size].view(part.dtype).view(part.shape)
            self.layer.copy([view], [part])
            slot.views.append(view)
            slot.outs.append(where)
            slot.devices.add(part.device)

    def _with_room(self, size: int) -> _Slot:
        """Give the slot to be filled; the other one is emptied if it has to be."""
        if self._slots and self._slots[-1].used + size <= len(self._slots[-1].buffer):
            return self._slots[-1]
        if self._slots:
            self._slots[-1].marks = [self.layer.mark(device) for device in self._slots[-1].devices]
        if len(self._slots) < 2:
            self._slots.append(_Slot(self.layer.empty(max(self.nbytes, size))))
        else:
            self._slots.reverse()
            self._empty(self._slots[-1])
            if len(self._slots[-1].buffer) < size:
                self._slots[-1].buffer = self.layer.empty(size)
        return self._slots[-1]

    def _empty(self, slot: _Slot) -> None:
        marks = slot.marks or [self.layer.mark(device) for device in slot.devices]
        for mark in marks:
            mark.synchronize()
        for view, out in zip(slot.views, slot.outs, strict=True):
            out.copy_(view)
        slot.used = 0
        for some in (slot.views, slot.outs, slot.devices, slot.marks):
            some.clear()

    def finish(self) -> None:
        """Wait for all copies."""
        for slot in self._slots:
            self._empty(slot)

    def forget(self) -> None:
        """Let go of what was begun and is not wanted any more; it is waited for, since it still writes."""
        for slot in self._slots:
            slot.outs.clear()
            slot.views.clear()
            self._empty(slot)


def _cut(source: torch.Tensor, out: torch.Tensor, most: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Cut two tensors of one shape into parts of at most so many bytes, or of one element."""
    size = source.numel() * source.element_size()
    if not size:
        return
    if size <= most or source.numel() == 1:
        yield source, out
        return
    dim = max(range(source.ndim), key=lambda i: source.shape[i])
    length = source.shape[dim]
    step = max(1, length * most // size)
    for start in range(0, length, step):
        num = min(step, length - start)
        yield from _cut(source.narrow(dim, start, num), out.narrow(dim, start, num), most)
