"""Reading modules over ranks: DDP, FSDP2, tensor parallelism and their nestings, against the unwrapped model.

The shards of all ranks are put together by their layouts, and compared with torch's own ``full_tensor`` too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from fdsd.comms.modules import is_dtensor, layout_of, leaf_of, memory_of, read_modules
from fdsd.errors import NameConflict
from fdsd.layout.layout import Layout
from fdsd.layout.local import assemble
from tests.helpers.models import Block, Net, make
from tests.helpers.ranks import run_ranks


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def blocks_of(model: Any) -> nn.ModuleList:
    found: nn.ModuleList = model.blocks
    return found


def each_block(model: Any, *wraps: Callable[[Any], Any]) -> Any:
    blocks = blocks_of(model)
    for i in range(len(blocks)):
        for wrap in wraps:
            blocks[i] = wrap(blocks[i])
    return model


# -- ways to wrap ----------------------------------------------------------------------------------------------------


def ddp(model: nn.Module) -> Any:
    return DistributedDataParallel(model)


def shard(model: Any, **options: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    for block in blocks_of(model):
        fully_shard(block, **options)
    return fully_shard(model, **options)


def fsdp2(model: Any) -> Any:
    return shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",)))


def hsdp(model: Any) -> Any:
    return shard(model, mesh=init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("r", "s")))


def split(model: Any, mesh: Any) -> Any:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.6 warns of random numbers on the CPU
        for block in blocks_of(model):
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "module": RowwiseParallel()})
    return model


def tp(model: Any) -> Any:
    return split(model, init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",)))


def two_dims(model: Any) -> Any:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    return shard(split(model, mesh["tp"]), mesh=mesh["dp"])


def unsharded(model: Any) -> Any:
    """What a forward pass leaves behind without resharding."""
    model = fsdp2(model)
    for module in model.modules():
        if hasattr(module, "unshard"):
            module.unshard()
    return model


WAYS: dict[str, Callable[[Any], Any]] = {
    "ddp": ddp,
    "ddp of compile": lambda model: ddp(compiled(model)),
    "compile of ddp": lambda model: compiled(ddp(model)),
    "ddp of checkpoint of compile": lambda model: ddp(each_block(model, compiled, checkpoint_wrapper)),
    "checkpoint of ddp": lambda model: checkpoint_wrapper(ddp(each_block(model, checkpoint_wrapper))),
    "fsdp2": fsdp2,
    "compile of fsdp2": lambda model: compiled(fsdp2(model)),
    "fsdp2 of compile of checkpoint": lambda model: fsdp2(each_block(model, checkpoint_wrapper, compiled)),
    "fsdp2 of checkpoint of compile": lambda model: fsdp2(each_block(model, compiled, checkpoint_wrapper)),
    "fsdp2, unsharded": unsharded,
    "tp": tp,
    "compile of checkpoint of tp": lambda model: compiled(each_block(tp(model), checkpoint_wrapper)),
    "fsdp2 and tp": two_dims,
    "fsdp2 and tp, compiled blocks": lambda model: compiled(each_block(two_dims(model), compiled)),
    "hsdp": hsdp,
}
if torch.__version__ < (2, 7):  # its FSDP2 has no streams on the CPU, and cannot gather there
    del WAYS["fsdp2, unsharded"]
NUM_RANKS = {"hsdp": 4, "fsdp2 and tp": 4, "fsdp2 and tp, compiled blocks": 4, "fsdp2": 3, "fsdp2, unsharded": 3}


def read(rank: int, way: str, name: str) -> dict[str, Any]:
    """What one rank has of each tensor, and what torch says that the whole is."""
    model = WAYS[way](make(name))
    modules = read_modules(model)
    tensors = {fqn: modules.tensors[fqn] for fqn in modules.names if fqn in modules.tensors}
    leaves = {fqn: leaf_of(live) for fqn, live in tensors.items()}
    whole = {fqn: leaf.full_tensor() if is_dtensor(leaf) else leaf for fqn, leaf in leaves.items()}
    ties = {fqn: live.tied_to for fqn, live in tensors.items() if live.tied_to}
    return {
        "names": modules.names,
        "metadata": modules.metadata,
        "extra": {fqn: extra.value for fqn, extra in modules.extra.items()},
        "passing": [fqn for fqn, live in modules.tensors.items() if not live.persistent],
        "ties": ties,
        "whole": {fqn: tensor.clone() for fqn, tensor in whole.items()},
        "local": {fqn: memory_of(live).clone() for fqn, live in tensors.items()},
        "layouts": {fqn: layout_of(live) for fqn, live in tensors.items()},
        "known": [modules.fqn_of(parameter) for parameter in model.parameters()],
    }


def assert_whole(results: list[dict[str, Any]], plain: nn.Module) -> None:
    """Put the parts of all ranks together, and compare with the unwrapped model."""
    expected = plain.state_dict()
    for found in results:
        assert list(found["names"]) == list(expected)
        assert found["metadata"] == dict(expected._metadata)  # type: ignore[attr-defined]
        assert [*found["layouts"]] == [*results[0]["layouts"]]
    for name, value in expected.items():
        if name in results[0]["extra"]:
            assert results[0]["extra"][name] == value
            continue
        locals_ = {rank: found["local"][name] for rank, found in enumerate(results)}
        made: list[torch.Tensor] = []
        for rank, found in enumerate(results):  # a part of the ranks may be a mesh of its own
            layout = found["layouts"][name]
            made.append(assemble(locals_, layout, value.shape) if isinstance(layout, Layout) else locals_[rank])
        assert all(torch.equal(one, value) for one in [*made, *[found["whole"][name] for found in results]]), name


@pytest.mark.parametrize("way", WAYS)
def test_what_ranks_hold_is_the_unwrapped_model(way: str) -> None:
    name = "scalar" if way.startswith("ddp") else "net"
    if way.startswith("fsdp2 and tp") and torch.__version__ < (2, 7):
        name = "wide"  # uneven shards in two dims came later
    results = run_ranks(read, NUM_RANKS.get(way, 2), way, name)
    assert_whole(results, make(name))
    for found in results:
        assert found["passing"] == ["cache"]
        assert found["ties"] == {"head.weight": "embed.weight"}
        assert found["known"] == [name for name, _ in make("net").named_parameters()]
    wrapped = any(isinstance(layout, Layout) for layout in results[0]["layouts"].values())
    assert wrapped == ("fsdp2" in way or "tp" in way or "hsdp" in way)


class Stage(nn.Module):
    def __init__(self, numbers: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(i): Block() for i in numbers})
        self.register_buffer("angles", torch.ones(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def stages(rank: int) -> Any:
    """Two parts of one model on each rank, sharded over both ranks, as pipeline stages are."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    parts = [compiled(fully_shard(Stage(numbers), mesh=mesh)) for numbers in ((0, 3), (1, 2))]
    modules = read_modules(parts)
    return list(modules.names), len(modules.others)


def test_parts_of_a_model() -> None:
    names, others = run_ranks(stages, 2)[0]
    expected = nn.ModuleDict({"layers": nn.ModuleDict({str(i): Block() for i in (0, 3, 1, 2)})})
    assert names == list(expected.state_dict()) and others == 1


def conflict(rank: int) -> str:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    parts = [fully_shard(Stage((0,)), mesh=mesh) for _ in range(2)]
    with pytest.raises(NameConflict) as caught:
        read_modules(parts)
    return str(caught.value)


def test_parts_with_one_name() -> None:
    for text in run_ranks(conflict, 2):
        assert text.startswith("Two tensors of the model would be named 'layers.0.up.weight': ")
        assert "'layers.0.up.weight (part 0)', 'layers.0.up.weight (part 1)'" in text


def trained(rank: int) -> tuple[bool, bool]:
    """The memory that is read is the memory that trains, before and after a step."""
    model: Any = DistributedDataParallel(compiled(make("net")))
    before = {name: memory_of(live) for name, live in read_modules(model).tensors.items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.arange(4)).sum().backward()
    optimizer.step()
    after = read_modules(model).tensors
    same = all(memory_of(live).data_ptr() == before[name].data_ptr() for name, live in after.items())
    moved = not torch.equal(before["blocks.0.up.weight"], make("net").state_dict()["blocks.0.up.weight"])
    return same, moved


def test_memory_is_live() -> None:
    assert run_ranks(trained, 2) == [(True, True)] * 2


def test_the_model_of_these_tests_is_not_empty() -> None:
    assert len(Net().state_dict()) > 20
