"""`Exchange`: one rank's messages, posted in the one total order within a window.

Small parts are packed in buffers that are used again and again; big ones go straight between the memory of tensors.
What is sent, and what is done with it, is ``memory``'s business.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import compress
from operator import add
from typing import NamedTuple

import torch
from attrs import define, field, frozen

from fdsd.algebra.dtypes import copy_elements, movable
from fdsd.data.errors import SpecMismatch
from fdsd.data.protocols import Pending, World
from fdsd.engine.memory import Memory
from fdsd.engine.rows import Items, move_rows
from fdsd.engine.staging import Layer, Mark
from fdsd.layout.program import Program, to_list

__all__ = ["WINDOW", "Buffers", "Exchange", "Window"]


@frozen
class Window:
    """How much of a rank is under way at once.

    Attributes:
        buffers: How many messages that are packed in a buffer of their own, at least 1.
        messages: How many in all, at least 1.
    """

    buffers: int = 2
    messages: int = 16

    def __attrs_post_init__(self) -> None:
        if self.buffers < 1 or self.messages < 1:
            raise SpecMismatch(f"Window: at least 1 buffer and 1 message, not {self.buffers} and {self.messages}.")


WINDOW = Window()


@define
class Buffers:
    """Buffers that are used again: fresh memory costs several times as much.

    Args:
        most: How many there are at most.
        device: Where they lie.
        layer: Makes those that accelerators reach directly; ``None`` for ordinary ones.
    """

    most: int
    device: torch.device
    layer: Layer | None = None
    _free: list[torch.Tensor] = field(factory=list[torch.Tensor], init=False)
    _num: int = field(default=0, init=False)
    _marks: dict[int, Sequence[Mark]] = field(factory=dict[int, "Sequence[Mark]"], init=False)

    def take(self, nbytes: int) -> torch.Tensor | None:
        """Give a buffer of at least so many bytes; ``None`` if all are in use."""
        if self._free:
            self._free.sort(key=len)
            fitting = [i for i, buffer in enumerate(self._free) if len(buffer) >= nbytes]
            found = self._free.pop(fitting[0] if fitting else -1)
            self._wait_for(found)
            return found if fitting else self._fresh(nbytes)
        if self._num < self.most:
            self._num += 1
            return self._fresh(nbytes)
        return None

    def _fresh(self, nbytes: int) -> torch.Tensor:
        if self.layer is not None:
            return self.layer.empty(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def give(self, buffer: torch.Tensor, marks: Sequence[Mark] = ()) -> None:
        """Take a buffer back; it is used again when the marks are reached."""
        self._free.append(buffer)
        if marks:
            self._marks[buffer.data_ptr()] = marks

    def _wait_for(self, buffer: torch.Tensor) -> None:
        for mark in self._marks.pop(buffer.data_ptr(), ()):
            mark.synchronize()

    def wait(self) -> None:
        """Wait until no buffer is read any more."""
        for buffer in self._free:
            self._wait_for(buffer)


class _Columns(NamedTuple):
    """The messages of a round, and their items, as in ``Program``."""

    peers: list[int]
    sends: list[int]
    nbytes: list[int]
    bounds: list[int]
    instances: list[int]
    overlaps: list[int]
    parts: list[int]
    offsets: list[int]

    @classmethod
    def of(cls, program: Program) -> _Columns:
        messages = program.peers, program.sends, program.nbytes, program.bounds
        items = program.instances, program.overlaps, program.parts, program.offsets
        return cls(*[to_list(column) for column in (*messages, *items)])

    def items(self, message: int) -> tuple[int, int]:
        """Say where the items of a message begin and end."""
        return self.bounds[message], self.bounds[message + 1]


@frozen(eq=False)
class _Posted:
    """A message that is under way."""

    number: int
    pending: Pending
    buffer: torch.Tensor | None


@define(eq=False)
class Exchange:
    """Runs down the program of this rank. All of them have to, whatever goes wrong on one of them.

    Attributes:
        world: The ranks.
        memory: What this rank holds and gets.
        buffers: For what is packed.
        window: How much is under way at once.
        error: The first error of this rank, and the tensor it is about. From then on zeros are sent.
    """

    world: World
    memory: Memory
    buffers: Buffers
    window: Window
    error: tuple[BaseException, str] | None = None
    _posted: deque[_Posted] = field(factory=deque[_Posted], init=False)
    _next: int = field(default=0, init=False)
    _columns: _Columns = field(factory=lambda: _Columns([], [], [], [0], [], [], [], []), init=False)
    _rows: Items = field(default=Items([], [], []), init=False)

    def begin(self, program: Program, rows: Items) -> None:
        """Take up the messages of a round.

        Args:
            program: The messages.
            rows: Which of their items lie in rows of bytes here.
        """
        self._columns = _Columns.of(program)
        self._rows = rows
        self._next = 0

    def advance(self, message: int) -> None:
        """Go on until a message is complete, and all before it."""
        while (self._posted[0].number if self._posted else self._next) <= message:
            while self._post():
                pass
            self._complete()

    def keep_up(self, tensor: int) -> None:
        """Post what may be under way while a tensor is copied; wait for messages of earlier ones only if it has to.

        So a rank that sends does not copy all that it keeps before it begins to send.
        """
        while self._post():
            pass
        columns = self._columns
        while self._next < len(columns.peers) and columns.instances[columns.bounds[self._posted[0].number]] < tensor:
            self._complete()
            while self._post():
                pass

    def finish(self) -> None:
        """Complete all messages."""
        self.advance(len(self._columns.peers) - 1)
        self.buffers.wait()

    def fail(self, error: BaseException, tensor: int) -> None:
        """Note that something went wrong with a tensor; the first time counts."""
        if self.error is None:
            self.error = error, self.memory.tensors.names[tensor]

    def _post(self) -> bool:
        """Post the next message, if there is one and it may be under way."""
        peers, sends, nbytes, *_ = self._columns
        number = self._next
        if number == len(peers) or len(self._posted) >= self.window.messages:
            return False
        straight = self._straight(number)
        buffer: torch.Tensor | None = None
        if straight is None:
            buffer = self.buffers.take(nbytes[number])
            if buffer is None:
                return False
            if sends[number]:
                self._pack(number, buffer)
        memory = buffer[: nbytes[number]] if straight is None and buffer is not None else straight
        assert memory is not None
        move = self.world.send if sends[number] else self.world.receive
        self._posted.append(_Posted(number, move(memory, peers[number]), buffer))
        self._next += 1
        return True

    def _complete(self) -> None:
        """Wait for the oldest message."""
        posted = self._posted[0]
        posted.pending.wait()
        self._posted.popleft()
        if posted.buffer is not None:
            is_sent = self._columns.sends[posted.number]
            self.buffers.give(posted.buffer, () if is_sent else self._unpack(posted.number, posted.buffer))

    def _straight(self, number: int) -> torch.Tensor | None:
        """Give the bytes of a message of one part as they lie in the memory of its tensor, if they can travel so."""
        memory, columns = self.memory, self._columns
        at, end = columns.items(number)
        if self.error is not None or end - at != 1:
            return None
        i = columns.instances[at]
        part = memory.tensors.views[i].part(columns.overlaps[at], columns.parts[at])
        try:
            view = memory.source(i, part) if columns.sends[number] else memory.target(i, part)
        except BaseException as error:  # told to all at the end
            self.fail(error, i)
            return None
        if view is None or view.dtype != part.wire or view.device != self.world.device or not view.is_contiguous():
            return None
        if self.buffers.layer is not None and self.buffers.layer.is_far(view):
            return None
        if not columns.sends[number]:
            memory.note_write(i)
        flat = movable(view)  # a view whose sizes are 1 counts as contiguous whatever its strides are
        return flat.as_strided((flat.numel(),), (1,), flat.storage_offset()).view(torch.uint8)

    def _pack(self, number: int, buffer: torch.Tensor) -> None:
        """Pack the parts of a message; zeros, if something has gone wrong."""
        if self.error is None:
            for mark in self._each(self._move_rows(number, buffer, is_send=True), buffer, is_send=True):
                mark.synchronize()
        if self.error is not None:
            buffer[: self._columns.nbytes[number]].zero_()

    def _unpack(self, number: int, buffer: torch.Tensor) -> Sequence[Mark]:
        if self.error is not None:
            return ()
        return self._each(self._move_rows(number, buffer, is_send=False), buffer, is_send=False)

    def _move_rows(self, number: int, buffer: torch.Tensor, *, is_send: bool) -> Sequence[int]:
        """Copy the parts of a message that lie in rows in ordinary memory, byte for byte; give the others."""
        memory, (first, last) = self.memory, self._columns.items(number)
        if not buffer.is_cpu or memory.has_far:
            return range(first, last)
        slots, firsts, sizes = [column[first:last] for column in self._rows]
        try:
            starts = memory.starts_of(slots) if is_send else memory.ends_of(slots)
        except BaseException as error:  # told to all at the end, as in _each
            self.fail(error, self._columns.instances[first])
            return ()
        offsets, rest = self._columns.offsets[first:last], list[int]()
        if -1 in firsts or 0 in starts:
            are_rows = [at >= 0 and start > 0 for at, start in zip(firsts, starts, strict=True)]
            rest = [at for at, is_row in enumerate(are_rows, first) if not is_row]
            firsts, sizes, starts, offsets = [list(compress(c, are_rows)) for c in (firsts, sizes, starts, offsets)]
        packed, own = map(buffer.data_ptr().__add__, offsets), map(add, starts, firsts)
        outs, sources = (packed, own) if is_send else (own, packed)
        move_rows(outs, sources, sizes)
        return rest

    def _each(self, items: Sequence[int], buffer: torch.Tensor, *, is_send: bool) -> Sequence[Mark]:
        """Copy parts of a message between its buffer and their memory, many of them at once.

        Returns:
            What has to be waited for, if accelerators take part.
        """
        *_, instances, overlaps, parts, offsets = self._columns
        sources: list[torch.Tensor] = []
        outs: list[torch.Tensor] = []
        typed: dict[torch.dtype, tuple[torch.Tensor, int]] = {}
        memory, views, i = self.memory, self.memory.tensors.views, 0
        find = memory.source if is_send else memory.target
        wire, whole, itemsize = None, buffer, 1
        try:
            for at in items:
                i = instances[at]
                part = views[i].part(overlaps[at], parts[at])
                view = find(i, part)
                if part.wire is not wire:
                    wire = part.wire
                    whole, itemsize = typed.get(wire) or typed.setdefault(wire, _typed(buffer, wire))
                packed = whole.as_strided(part.shape, part.strides, offsets[at] // itemsize)
                if view is None:
                    memory.read(i, part, packed)
                elif not part.is_plain or view.is_neg() or view.is_conj():  # which many at once cannot be written
                    copy_elements(*((view, packed) if is_send else (packed, view)))
                else:
                    sources.append(view if is_send else packed)
                    outs.append(packed if is_send else view)
            if sources and self.buffers.layer is not None:
                return _begin(self.buffers.layer, outs, sources)
            if sources:
                torch._foreach_copy_(outs, sources)  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]
        except BaseException as error:  # told to all at the end
            self.fail(error, i)
        return ()


def _begin(layer: Layer, outs: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Sequence[Mark]:
    """Begin copies between a buffer that accelerators reach directly and any memory."""
    layer.copy(outs, sources)
    devices = {tensor.device for some in (outs, sources) for tensor in some if layer.is_far(tensor)}
    return [layer.mark(device) for device in devices]


def _typed(buffer: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
    itemsize = dtype.itemsize
    return buffer[: len(buffer) // itemsize * itemsize].view(dtype), itemsize
