"""What travels between ranks: each byte once, to who needs it; and how much memory a load takes beside the state.

| row of PITFALLS.md | checks |
| --- | --- |
| a full dict for rank 0 is gathered on every rank | ``reading_sends_each_byte_once`` |
| broadcasting sends every rank the whole tensor | ``writing_sends_each_byte_once`` |
| an optimizer load peaks at twice the state | ``test_a_load_takes_little_memory_beside_the_state`` |
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fdsd
from fdsd.comms.modules import memory_of, read_modules
from fdsd.compat.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from fdsd.layout import program
from tests.helpers.audited import SIZES, Kind, build, plain, train
from tests.helpers.auditing import Audit, Check
from tests.helpers.ranks import run_ranks
from tests.helpers.spreading import counted

AUDIT = Audit()
FULL = StateDictOptions(full_state_dict=True)
FULL_CPU = StateDictOptions(full_state_dict=True, cpu_offload=True)
BROADCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def moved(run: Callable[[], Any]) -> tuple[int, int]:
    """Give the bytes that this rank sends and receives meanwhile; all tensors have elements of eight bytes.

    Items of a message are aligned for any dtype. Here they need not be, so that what is counted has no padding.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "ALIGN", 8)
        seen = counted(patch)
        run()
    sent, received = (sum(n for (verb, _), n in seen.items() if verb == way) for way in ("send", "receive"))
    return sent, received


def sizes(model: Any) -> tuple[int, int, int]:
    """Give the bytes of a model: of what this rank has, of the whole, and of what of the whole lies over ranks."""
    here = whole = spread = 0
    modules = read_modules(model)
    for name in modules.names:
        live = modules.tensors.get(name)
        if live is None or live.tied_to is not None:
            continue
        local, size = memory_of(live).nbytes, live.spec.numel * live.spec.dtype.itemsize
        here, whole = here + local, whole + size
        spread += size - local
    return here, whole, spread


def totals(sent: int, received: int) -> tuple[list[int], list[int]]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (sent, received))
    return [s for s, _ in found], [r for _, r in found]


@AUDIT.check(joined=True)
def reading_sends_each_byte_once(rank: int, kind: Kind) -> None:
    """Seen: a full state dict for rank 0 is all-gathered to every rank."""
    model = build(kind, 1, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    train(model, optimizer)
    _, _, lacking = sizes(model)
    for slots, read in (
        (0, lambda options: get_model_state_dict(model, options=options)),
        (1, lambda options: get_optimizer_state_dict(model, optimizer, options=options)),
    ):
        expected = lacking if not slots else lacking_of_moments(model)
        _, needed = totals(0, expected)
        sent, received = totals(*moved(lambda read=read: read(FULL)))
        assert received == needed and sum(sent) == sum(needed)
        sent, received = totals(*moved(lambda read=read: read(FULL_CPU)))
        assert received == [needed[0], *[0] * (len(needed) - 1)] and sum(sent) == needed[0]
    _, needed = totals(0, lacking)
    sent, received = totals(*moved(lambda: fdsd.materialize(fdsd.capture(model).model, group=dist.group.WORLD)))
    assert received == needed and sum(sent) == sum(needed)


def lacking_of_moments(model: Any) -> int:
    """Give the bytes of the momentum that lie on other ranks: that of parameters which train."""
    tensors = read_modules(model).tensors.values()
    trained = [live for live in tensors if live.kind == "parameter" and live.trainable and live.tied_to is None]
    return sum(live.spec.numel * 8 - memory_of(live).nbytes for live in trained)


@AUDIT.check()
def writing_sends_each_byte_once(rank: int, kind: Kind) -> None:
    """Seen: broadcasting sends every rank the whole tensor; and a load of full dicts scatters what is there already."""
    if not dist.is_initialized():
        return
    model = build(kind, 2, dtype=torch.float64)
    content: Any = dict(plain(1, dtype=torch.float64).state_dict())
    here, _, _ = sizes(model)
    needed = totals(0, here)[1]
    sent, received = totals(
        *moved(lambda: set_model_state_dict(model, content if rank == 0 else {}, options=BROADCAST))
    )
    assert received == [0, *needed[1:]] and sum(sent) == sum(needed[1:])
    assert totals(*moved(lambda: set_model_state_dict(model, content, options=FULL))) == (
        [0] * len(sent),
        [0] * len(sent),
    )
    nothing = totals(*moved(lambda: fdsd.restore(content, model, group=dist.group.WORLD)))
    assert nothing == ([0] * len(sent), [0] * len(sent))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    train(model, optimizer)
    state: Any = get_optimizer_state_dict(model, optimizer, options=FULL)
    tensors = read_modules(model).tensors.values()
    trained = [live for live in tensors if live.kind == "parameter" and live.trainable and live.tied_to is None]
    needed = totals(0, sum(memory_of(live).nbytes for live in trained))[1]
    given: Any = state if rank == 0 else {}
    sent, received = totals(*moved(lambda: set_optimizer_state_dict(model, optimizer, given, options=BROADCAST)))
    assert received == [0, *needed[1:]] and sum(sent) == sum(needed[1:])


@pytest.mark.parametrize("n", SIZES[1:])
@pytest.mark.parametrize("check", AUDIT.checks, ids=repr)
def test_on_ranks(check: Check, n: int) -> None:
    AUDIT.verify(check, n)


# -- memory ----------------------------------------------------------------------------------------------------------


def resident(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) << 10
    raise AssertionError(key)


def peak_of(run: Callable[[], Any]) -> int:
    """Give the most memory that this process had meanwhile beside what it had before."""
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    run()
    return resident("VmHWM") - before


@pytest.mark.alone
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of a process is read from /proc")
@pytest.mark.parametrize("way", ["sharded", "full", "broadcast", "engine"])
def test_a_load_takes_little_memory_beside_the_state(way: str) -> None:
    def run(rank: int) -> tuple[int, int]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        model: Any = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(12)])
        model = fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        optimizer = torch.optim.Adam(model.parameters())
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        model.zero_grad()
        options = StateDictOptions(full_state_dict=way != "sharded", broadcast_from_rank0=way == "broadcast")
        reading = StateDictOptions(full_state_dict=way != "sharded")
        state: Any = get_optimizer_state_dict(model, optimizer, options=reading)
        captured = fdsd.capture(model, optimizer)
        if way == "sharded":  # not the live tensors themselves
            state = {**state, "state": {k: {s: v.clone() for s, v in row.items()} for k, row in state["state"].items()}}
        if way == "engine":
            captured = fdsd.materialize(captured, group=dist.group.WORLD)
        given: Any = {} if way == "broadcast" and rank else state

        def load() -> None:
            if way == "engine":
                fdsd.restore(captured, model, optimizer, group=dist.group.WORLD)
            else:
                set_optimizer_state_dict(model, optimizer, given, options=options)

        load()  # allocators, caches and imports
        local = sum(v._local_tensor.nbytes for row in optimizer.state.values() for v in row.values() if v.ndim)
        return peak_of(load), local

    for peak, local in run_ranks(run, 2):
        assert peak < local // 2, f"{peak >> 20} MB beside {local >> 20} MB of state"
