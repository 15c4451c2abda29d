"""`world_of`: a process group as the ``World`` that deliveries run in, with errors that name who is missing.

Messages and agreements only; what is sent to whom is planned elsewhere.
"""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from attrs import define, field, frozen

from fdsd.algebra.dtypes import movable
from fdsd.comms.failures import ask_around, close_connections, count_failures, default_store, ranks_lost
from fdsd.data.errors import RanksLost, SpecMismatch, Unsupported, listing
from fdsd.data.protocols import Pending, World

__all__ = ["GroupWorld", "world_of"]

_TAG = 0x5D5D  # keeps our messages apart from those of others in the group, where the backend knows tags
_HEAD = 8  # bytes that hold the size of a statement
_INLINE = 504  # statements of up to so many bytes are agreed upon in one round
_DEFAULT_TIMEOUT = 600.0  # torch's, on accelerators
_KEPT = 8  # agreements of a group that are kept a little longer
_GLANCE = 1.0  # so often a rank that waits on an accelerator looks whether others have met a failure

_WORKS: WeakKeyDictionary[dist.ProcessGroup, deque[dist.Work]] = WeakKeyDictionary()
"""The last short agreements of each group that lives, on the CPU; each long one is followed by such.

A thread of gloo's holds what it has done for a little longer than we wait for it. Was it the last to hold it, it would
have to wait for the interpreter to free our tensors, and a thread that does so while the interpreter ends takes the
whole process down with it: what it runs through on its way out is not made for that.
"""


def world_of(group: object, *, device: torch.device | str | None = None) -> World:
    """Give the world of a process group.

    Args:
        group: A process group that this rank is a member of, a ``DeviceMesh`` of one axis, or a ``World``, which is
            given back as it is.
        device: Where messages lie while they travel; it has to be a device of one of the group's backends. If left
            out it is the CPU wherever the group has a backend for it (so for ``"cpu:gloo,cuda:nccl"`` too: pass
            ``"cuda"`` where links between accelerators are faster), else the current device of the group's kind.

    Raises:
        Unsupported: ``group`` is none of these, ``torch.distributed`` is not initialized, this rank is no member,
            or the group has no backend for the device.

    >>> world_of(None)
    Traceback (most recent call last):
        ...
    fdsd.data.errors.Unsupported: group=None: torch.distributed is not initialized in this process. Call \
torch.distributed.init_process_group() first, and run the script with torchrun.
    """
    if isinstance(group, World) and not isinstance(group, dist.ProcessGroup):
        return group
    if not dist.is_available() or not dist.is_initialized():
        raise Unsupported(
            f"group={_told(group)}: torch.distributed is not initialized in this process. Call "
            "torch.distributed.init_process_group() first, and run the script with torchrun."
        )
    members = _group_of(group)
    try:
        ranks = dist.get_process_group_ranks(members)
    except KeyError as error:
        raise Unsupported(f"group={_told(group)}: this process group was destroyed, or has no ranks here.") from error
    rank = dist.get_rank()
    if rank not in ranks:
        raise _not_a_member(group)
    return GroupWorld(members, rank, tuple(ranks), _device_of(members, device))


def _told(group: object) -> str:
    return "None" if group is None else f"<{type(group).__name__}>"


def _not_a_member(group: object) -> Unsupported:
    return Unsupported(
        f"group={_told(group)}: rank {dist.get_rank()} is not a member of this group. Call it on the members only, "
        "or give a group that this rank belongs to."
    )


def _group_of(group: object) -> dist.ProcessGroup:
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(group, dist.ProcessGroup):
        return group
    if group == dist.GroupMember.NON_GROUP_MEMBER:  # what new_group() gives to the others
        raise _not_a_member(group)
    if not isinstance(group, DeviceMesh):
        raise Unsupported(
            f"group={_told(group)}: give a process group (torch.distributed.group.WORLD for all ranks), a DeviceMesh "
            "of one axis, or a World."
        )
    if group.ndim != 1:
        names = group.mesh_dim_names
        axes = listing(names, sort=False) if names else "without names"
        one = f"mesh[{names[0]!r}]" if names else "mesh.get_group(0)"
        raise Unsupported(
            f"group=<DeviceMesh>: the mesh has {group.ndim} axes ({axes}), and a group has one. Give one of them, like "
            f"{one}, or the process group of all its ranks."
        )
    if group.get_coordinate() is None:
        raise _not_a_member(group)
    return group.get_group()


def _device_of(group: dist.ProcessGroup, asked: torch.device | str | None) -> torch.device:
    """Choose where the memory of messages lies, among the devices that the group has a backend for."""
    config = dict(part.split(":", 1) for part in dist.get_backend_config(group).split(","))
    if asked is not None:
        device = torch.device(asked)
        if device.type not in config:
            raise Unsupported(
                f"device={str(device)!r}: the process group has backends for the devices {listing(config)}, and not "
                "for this one."
            )
    else:
        device = torch.device("cpu" if "cpu" in config else next(iter(config)))
    index: Any = device.index  # None without one, whatever the stubs say
    if device.type == "cpu" or index is not None:
        return device
    bound: torch.device | None = getattr(group, "bound_device_id", None)
    if bound is not None and bound.type == device.type:
        return bound
    return torch.device(device.type, getattr(torch, device.type).current_device())


@frozen
class _Unpicklable:
    """Stands for a statement that its rank could not pickle; the others must not wait for it."""

    reason: str


@define(eq=False)
class _Message:
    """A message that is under way."""

    world: GroupWorld
    work: dist.Work | None
    tensor: torch.Tensor | None  # its memory lives as long as the message
    verb: str
    peer: int
    posted: float

    def wait(self) -> None:
        work, self.work = self.work, None
        if work is not None:
            self.world.finish(work, self, self.posted)
        self.tensor = None

    def __str__(self) -> str:
        nbytes = 0 if self.tensor is None else self.tensor.numel()
        return f"{self.verb} rank {self.peer} ({nbytes} bytes)"


@define(eq=False, repr=False)
class GroupWorld:
    """The world of a process group; ``world_of`` makes it.

    Attributes:
        group: The process group.
        rank: The number of this process in the default process group.
        ranks: The numbers of all members, in the order of the group.
        device: Where the memory of messages lies.
    """

    group: dist.ProcessGroup
    rank: int
    ranks: tuple[int, ...]
    device: torch.device
    _lost: RanksLost | None = field(default=None, init=False)
    _failures: int = field(default=0, init=False)  # that the group had met before; see _poll

    def __attrs_post_init__(self) -> None:
        if self.device.type != "cpu" and (store := default_store()) is not None:
            self._failures = count_failures(store, self.group.group_name)

    def __repr__(self) -> str:
        return f"<GroupWorld: rank {self.rank} of {list(self.ranks)}, {self.device}>"

    # -- messages ----------------------------------------------------------------------------------------------------
    #
    # Each message is posted by itself, with no batch_isend_irecv. On NCCL messages between two ranks wait for each
    # other, first when the two make their connection and then in the order of their streams. That is free of deadlock
    # since messages have one total order, and every rank posts its part in that order: of the messages that are not
    # done, the first is the next one on both of its sides.

    def send(self, tensor: torch.Tensor, to: int) -> Pending:
        """Begin to send contiguous memory on ``device`` to a rank."""
        message = self._message(tensor, "send to", to)
        if message.tensor is not None:
            try:
                message.work = dist.isend(message.tensor, to, self.group, _TAG)
            except RuntimeError as error:
                raise self._failure(message, error) from error
        return message

    def receive(self, tensor: torch.Tensor, source: int) -> Pending:
        """Begin to receive from a rank into contiguous memory on ``device``."""
        message = self._message(tensor, "receive from", source)
        if message.tensor is not None:
            try:
                message.work = dist.irecv(message.tensor, source, self.group, _TAG)
            except RuntimeError as error:
                raise self._failure(message, error) from error
        return message

    def _message(self, tensor: torch.Tensor, verb: str, peer: int) -> _Message:
        """Make a message of bytes, since backends know few dtypes; an empty one does not travel at all."""
        if peer not in self.ranks or peer == self.rank:
            others = [rank for rank in self.ranks if rank != self.rank]
            raise SpecMismatch(f"{verb} rank {peer}: the other ranks of this group are {listing(others) or 'none'}.")
        if not tensor.is_contiguous() or tensor.device != self.device:
            raise SpecMismatch(
                f"{verb} rank {peer}: messages are contiguous memory on {self.device}, and this tensor is not; it has "
                f"shape {tuple(tensor.shape)} and strides {tensor.stride()}, on {tensor.device}."
            )
        if self._lost is not None:
            raise self._lost
        if not tensor.numel():
            return _Message(self, None, None, verb, peer, 0.0)
        # as_strided: a tensor of one element is contiguous whatever its strides are, and a view of bytes minds them
        memory = movable(tensor.detach()).as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        return _Message(self, None, memory, verb, peer, time.monotonic())

    # -- agreement ---------------------------------------------------------------------------------------------------

    def agree(self, statement: Any) -> list[Any]:
        """Give each process's statement, in the order of ``ranks``, on every process.

        Args:
            statement: What can be pickled. Small statements take one round.

        Returns:
            Copies, the own one too. Equal statements may be one object: they are values, not to be changed.

        Raises:
            Unsupported: Some rank's statement cannot be pickled, or not be read here; the former on all ranks.
            RanksLost: Some ranks are gone.
        """
        if self._lost is not None:
            raise self._lost
        try:
            payload = pickle.dumps(statement, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            payload = pickle.dumps(_Unpicklable(f"{type(error).__name__}: {error}"[:200]))
        heads = self._gather(len(payload).to_bytes(_HEAD, "little") + payload[:_INLINE], _HEAD + _INLINE)
        sizes = [int.from_bytes(head[:_HEAD], "little") for head in heads]
        payloads = [head[_HEAD : _HEAD + size] for head, size in zip(heads, sizes, strict=True)]
        if max(sizes) > _INLINE:
            payloads = self._gather_long(payload, payloads, sizes)
        return self._read(payloads)

    def _read(self, payloads: list[bytes]) -> list[Any]:
        read: dict[bytes, Any] = {}  # most statements are the same on all ranks
        for rank, payload in zip(self.ranks, payloads, strict=True):
            if payload not in read:
                try:
                    read[payload] = pickle.loads(payload)
                except Exception as error:
                    raise Unsupported(
                        f"agree: the statement of rank {rank} cannot be read on rank {self.rank}: {error!r}."
                    ) from error
        made = [read[payload] for payload in payloads]
        refused = {rank: s.reason for rank, s in zip(self.ranks, made, strict=True) if isinstance(s, _Unpicklable)}
        if refused:
            rank, reason = next(iter(refused.items()))
            raise Unsupported(
                f"agree: statements that cannot be pickled, of ranks {listing(refused)}; of rank {rank}: {reason}."
            )
        return made

    def _gather(self, data: bytes, size: int) -> list[bytes]:
        """Give the bytes of all ranks, which have at most ``size`` of them."""
        mine = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8).to(self.device)
        if self.device.type == "cpu" and size == _HEAD + _INLINE and len(self.ranks) > 2:
            return self._gather_short(mine, size)
        found = [torch.empty(size, dtype=torch.uint8, device=self.device) for _ in self.ranks]
        c10d: Any = dist  # the types of all_gather are not all declared
        self._collect(size, c10d.all_gather, found, mine)
        return [_bytes(tensor) for tensor in found]

    def _gather_short(self, mine: torch.Tensor, size: int) -> list[bytes]:
        """One rank hears all others, and tells all: a ring, as gloo's own, wakes the ranks one after the other."""
        root = self.ranks[0]
        every = torch.empty((len(self.ranks), size), dtype=torch.uint8)
        self._collect(size, dist.gather, mine, [*every] if self.rank == root else None, root)
        self._collect(size, dist.broadcast, every, root)
        data = _bytes(every.view(-1))
        return [data[at : at + size] for at in range(0, len(data), size)]

    def _gather_long(self, payload: bytes, short: list[bytes], sizes: list[int]) -> list[bytes]:
        longest = max(sizes)
        if len(sizes) * longest <= 2 * sum(sizes):
            return [data[:size] for data, size in zip(self._gather(payload, longest), sizes, strict=True)]
        made = list(short)  # few ranks have much to say: padding would multiply it
        for i, size in enumerate(sizes):
            if size > _INLINE:
                data = bytearray(payload if self.ranks[i] == self.rank else size)
                tensor = torch.frombuffer(data, dtype=torch.uint8).to(self.device)
                self._collect(size, dist.broadcast, tensor, self.ranks[i])
                made[i] = _bytes(tensor)
        return made

    def _collect(self, size: int, collective: Callable[..., Any], *args: Any) -> None:
        posted = time.monotonic()
        try:
            work: dist.Work = collective(*args, group=self.group, async_op=True)
        except RuntimeError as error:
            raise self._failure("agreement", error) from error
        if self.device.type == "cpu" and size <= _HEAD + _INLINE:  # the memory of long ones counts for more
            _WORKS.setdefault(self.group, deque(maxlen=_KEPT)).append(work)
        self.finish(work, "agreement", posted)

    # -- failures ----------------------------------------------------------------------------------------------------

    def finish(self, work: dist.Work, what: object, posted: float) -> None:
        """Wait for what was begun at a time; ``what`` says what it is."""
        if self._lost is not None:
            raise self._lost
        try:
            if self.device.type != "cpu":
                self._poll(work, posted)
            work.wait()
        except RuntimeError as error:
            raise self._failure(what, error) from error

    def _poll(self, work: dist.Work, posted: float) -> None:
        """Wait for work on an accelerator: its own ``wait`` only queues, and the watchdog ends the whole process.

        So this is given up a little before the group's timeout, and as soon as another rank says that it has failed.
        """
        limit = _timeout_of(self.group, self.device)
        until = posted + limit - min(15.0, limit / 4)
        glance = time.monotonic() + 2 * _GLANCE
        pause = 0.0
        while not work.is_completed():
            now = time.monotonic()
            if now > until:
                raise RuntimeError(f"Timed out after {now - posted:.1f} s")
            if now > glance:
                glance = now + _GLANCE
                store = default_store()
                if store is not None and count_failures(store, self.group.group_name) != self._failures:
                    raise RuntimeError("Another rank has met a failure")
            time.sleep(pause)
            pause = min(0.002, pause + 0.00002)

    def _failure(self, what: object, error: BaseException) -> RanksLost:
        """Find out who is missing; from then on every operation of this world raises the same."""
        if self.device.type == "cpu":
            close_connections(self.group)
        found = ask_around(default_store(), self.group.group_name, self.rank, self.ranks)
        self._lost = ranks_lost(str(what), self.rank, self.ranks, found, error)
        return self._lost


def _bytes(tensor: torch.Tensor) -> bytes:
    """Give the bytes of a tensor of bytes, without numpy."""
    data = bytearray(tensor.numel())
    torch.frombuffer(data, dtype=torch.uint8).copy_(tensor)
    return bytes(data)


def _timeout_of(group: dist.ProcessGroup, device: torch.device) -> float:
    """Give the timeout of a group in seconds; torch has no public name for it."""
    backend: Any = group
    try:
        seconds: float = backend._get_backend(device).options._timeout.total_seconds()
    except (AttributeError, RuntimeError):
        return _DEFAULT_TIMEOUT
    return seconds
