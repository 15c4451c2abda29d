"""What of a world needs no other rank: where messages travel, and waiting for work on an accelerator."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fdsd.comms import failures, world
from fdsd.comms.world import GroupWorld, world_of
from fdsd.data.errors import RanksLost, Unsupported
from tests.helpers.dtensors import fake_ranks


class Backends:
    """A group with backends, as far as the choice of a device asks for it."""

    def __init__(self, config: str, bound: torch.device | None = None) -> None:
        self.config = config
        self.bound_device_id = bound


@pytest.fixture
def accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda group: group.config)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.xpu, "current_device", lambda: 1)


@pytest.mark.usefixtures("accelerators")
@pytest.mark.parametrize(
    "config, bound, asked, device",
    [
        ("cpu:gloo,cuda:gloo", None, None, "cpu"),
        ("cuda:nccl", None, None, "cuda:3"),
        ("cuda:nccl", "cuda:5", None, "cuda:5"),
        ("cpu:gloo,cuda:nccl", None, None, "cpu"),
        ("cuda:nccl,cpu:gloo", "cuda:5", None, "cpu"),
        ("cpu:gloo,cuda:nccl", None, "cuda", "cuda:3"),
        ("cpu:gloo,cuda:nccl", "cuda:5", "cuda", "cuda:5"),
        ("cpu:gloo,cuda:nccl", "cuda:5", "cuda:1", "cuda:1"),
        ("cpu:gloo,cuda:nccl", None, "cpu", "cpu"),
        ("xpu:xccl", None, None, "xpu:1"),
        ("cpu:mpi,cuda:mpi", None, None, "cpu"),
    ],
)
def test_where_messages_travel(config: str, bound: str | None, asked: str | None, device: str) -> None:
    group: Any = Backends(config, None if bound is None else torch.device(bound))
    assert world._device_of(group, asked) == torch.device(device)


@pytest.mark.usefixtures("accelerators")
def test_no_backend_for_the_device() -> None:
    group: Any = Backends("cuda:nccl")
    with pytest.raises(Unsupported, match=r"device='cpu': the process group has backends for the devices 'cuda', and"):
        world._device_of(group, "cpu")


class Slow:
    """Work that completes after some looks at it, or never."""

    def __init__(self, looks: float, error: Exception | None = None) -> None:
        self.looks = looks
        self.error = error
        self.waited = False

    def is_completed(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def wait(self) -> None:
        if self.error is not None:
            raise self.error
        self.waited = True


@pytest.fixture
def on_accelerator(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A world of two ranks whose messages lie on an accelerator, with a store and a timeout of 2 seconds."""
    store = dist.HashStore()
    monkeypatch.setattr(world, "default_store", lambda: store)
    monkeypatch.setattr(world, "_timeout_of", lambda group, device: 2.0)
    monkeypatch.setattr(world, "_GLANCE", 0.1)
    monkeypatch.setattr(failures, "WAIT", 0.3)

    class Group:
        group_name = "g"

    failures.count_failures(store, "g", add=1)  # of earlier times
    group: Any = Group()
    return GroupWorld(group, 0, (0, 1), torch.device("cuda", 0)), store


def test_work_is_waited_for_here(on_accelerator: Any) -> None:
    """The ``wait`` of such work only queues."""
    found, _ = on_accelerator
    work: Any = Slow(50)
    found.finish(work, "it", time.monotonic())
    assert work.waited and work.looks < 0


def test_work_that_never_completes(on_accelerator: Any) -> None:
    """Given up before the watchdog ends the process, counted from the time when it was posted."""
    found, _ = on_accelerator
    start = time.monotonic()
    with pytest.raises(RanksLost, match=r"it failed on rank 0 \(Timed out after 1\.[5-9] s\): rank 1 gave no sign"):
        found.finish(Slow(float("inf")), "it", start - 0.5)
    assert 1.0 < time.monotonic() - start < 4


def test_work_that_fails(on_accelerator: Any) -> None:
    found, _ = on_accelerator
    with pytest.raises(RanksLost, match=r"it failed on rank 0 \(remote process exited\): rank 1 gave no sign"):
        found.finish(Slow(0, RuntimeError("remote process exited")), "it", time.monotonic())


def test_failures_of_others_are_noticed_while_waiting(on_accelerator: Any) -> None:
    found, store = on_accelerator
    failures.count_failures(store, "g", add=1)
    start = time.monotonic()
    with pytest.raises(RanksLost, match=r"it failed on rank 0 \(Another rank has met a failure\)"):
        found.finish(Slow(float("inf")), "it", start)
    assert time.monotonic() - start < 1.4


def test_the_timeout_of_a_group() -> None:
    with fake_ranks(0, 2):
        assert isinstance(world_of(dist.group.WORLD), GroupWorld)
        group: Any = dist.group.WORLD
        assert world._timeout_of(group, torch.device("cpu")) > 0


def test_worlds_that_are_no_groups_are_given_back() -> None:
    from fdsd.comms.alone import Alone

    alone = Alone(3)
    assert world_of(alone) is alone
