"""DTensors on real ranks: layouts, sources and lazies of what FSDP2, tensor parallelism and their nestings make."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fdsd
from fdsd.algebra.apply import defer, defer_leaf
from fdsd.comms.dtensors import (
    DTensorSource,
    layout_of_dtensor,
    lazy_dtensor,
    local_of_dtensor,
    make_dtensor,
    make_like,
)
from fdsd.data.errors import FdsdError, SpecMismatch, Unsupported
from fdsd.data.region import Region, Span
from fdsd.data.spec import TensorSpec
from fdsd.data.ties import ties
from fdsd.layout.layout import Layout
from fdsd.layout.local import assemble, local_of
from fdsd.layout.mesh import Mesh
from fdsd.layout.placed import PlacedSource
from fdsd.layout.placement import Replicate, Shard
from tests.helpers.ranks import run_ranks
from tests.helpers.tensors import same_bytes

Shape = tuple[int, ...]


class Net(nn.Module):
    """Sizes that nothing divides, unless told otherwise; all values are different."""

    def __init__(self, width: int = 5, hidden: int = 13) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, 7, bias=False)
        self.scale = nn.Parameter(torch.ones(3))
        start = 0
        with torch.no_grad():
            for value in self.parameters():
                value.copy_(torch.arange(start, start + value.numel()).reshape(value.shape))
                start += value.numel()


def wrapped(wrap: Callable[[nn.Module], None]) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Give a wrapped model, and what its parameters were; of even sizes where this torch can do no other."""
    for sizes in ((5, 13), (4, 12)):
        model = Net(*sizes)
        whole = {name: value.detach().clone() for name, value in model.named_parameters()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own deprecations
            try:
                wrap(model)
            except NotImplementedError:
                continue
        return model, whole
    raise AssertionError(wrap)


def mesh_of(sizes: Shape, names: tuple[str, ...] | None) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def parallel(model: nn.Module, mesh: Any) -> None:
    """Shard the linears by columns and rows; without a source rank where torch can, since all ranks hold the same."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def fsdp2(model: nn.Module) -> None:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=mesh_of((dist.get_world_size(),), ("dp",)))


def tp(model: nn.Module) -> None:
    parallel(model, mesh_of((dist.get_world_size(),), ("tp",)))


def two_axes(names: tuple[str, ...]) -> Any:
    return mesh_of((2, dist.get_world_size() // 2), names)


def fsdp2_over_tp(model: nn.Module) -> None:
    from torch.distributed.fsdp import fully_shard

    mesh = two_axes(("dp", "tp"))
    parallel(model, mesh["tp"])
    fully_shard(model, mesh=mesh["dp"])


def hsdp(model: nn.Module) -> None:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=two_axes(("replicas", "dp")))


def on_dim_1(model: nn.Module) -> None:
    """FSDP2 along the last dim, where it can: a dim that the ranks divide."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard as TorchShard

    def choose(value: nn.Parameter) -> Any:
        return TorchShard(1) if value.ndim == 2 and value.shape[1] % dist.get_world_size() == 0 else None

    fully_shard(model, mesh=mesh_of((dist.get_world_size(),), ("dp",)), shard_placement_fn=choose)


def grid_points(size: int) -> list[Span]:
    """Spans of a dim of every kind: all of it, runs, steps, one index, none."""
    found = [Span(0, ((size, 1),)), Span(0, ((0, 1),))]
    found += [Span(a, ((b - a, 1),)) for a, b in itertools.combinations(range(0, size + 1, max(2, size // 4)), 2)]
    found += [Span(at) for at in range(0, size, 4)]
    if size > 4:
        found += [Span(1, ((2, 2),)), Span(0, ((2, 3), (2, 1)))]
    return found


def expected_of(whole: torch.Tensor, region: Region) -> torch.Tensor:
    strides, offset = region.strides(whole.stride())
    return whole.as_strided(region.shape, strides, offset)


def indices(region: Region) -> set[tuple[int, ...]]:
    return set(itertools.product(*[span.indices() for span in region.spans]))


def check_reads(source: PlacedSource, whole: torch.Tensor, rank: int) -> tuple[int, int]:
    """Read regions of all kinds: right if this rank holds all of the elements, refused if not. Count both."""
    fqn = next(iter(source.specs()))
    placement = source.placement(fqn)
    assert isinstance(placement, Layout)
    held = {i for region in placement.regions(whole.shape, rank) for i in indices(region)}
    good = bad = 0
    for spans in itertools.product(*[grid_points(size) for size in whole.shape]):
        region = Region(spans)
        out = torch.full(region.shape, -1.0)
        if indices(region) <= held:
            source.read(fqn, region, out)
            assert torch.equal(out, expected_of(whole, region))
            good += 1
        else:
            with pytest.raises(FdsdError, match=r"is held by ranks? .*; give group=\."):
                source.read(fqn, region, out)
            bad += 1
    return good, bad


def examine(rank: int, wrap: Callable[[nn.Module], None]) -> dict[str, Any]:
    """Wrap a model; check each parameter's source, and give what it says for all ranks to be compared."""
    model, values = wrapped(wrap)
    told: dict[str, Any] = {}
    for name, param in model.named_parameters():
        whole = values[name]
        if type(param) is nn.Parameter:
            continue
        layout = layout_of_dtensor(param)
        local = local_of_dtensor(param)
        assert layout_of_dtensor(param.detach()) is layout, "known by its mesh, placements and shape"
        assert local.data_ptr() == param.to_local().data_ptr() and not local.requires_grad  # type: ignore[attr-defined]
        assert same_bytes(local, local_of(whole, layout, rank)), (name, layout)
        source = DTensorSource.of(param)
        assert isinstance(source, PlacedSource)
        assert source.placement(source.fqn) is layout
        assert source.specs() == {source.fqn: TensorSpec(whole.shape, whole.dtype)}
        mine = source.local(source.fqn)
        assert mine is not None and same_bytes(mine, local)
        reads = check_reads(source, whole, rank)
        lazy = defer_leaf(param)
        assert lazy.spec == TensorSpec(whole.shape, whole.dtype)
        boxes = [(piece.region, piece.owner) for piece in source.pieces(source.fqn)]
        assert {i for region, _ in boxes for i in indices(region)} == indices(Region.whole(whole.shape))
        told[name] = layout, local.clone(), reads, whole
    return told


@pytest.mark.parametrize(
    "wrap, n",
    [
        (fsdp2, 2),
        (fsdp2, 3),
        (fsdp2, 4),
        (on_dim_1, 1),
        (tp, 2),
        (tp, 3),
        (fsdp2_over_tp, 4),
        (hsdp, 4),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_parameters(wrap: Callable[[nn.Module], None], n: int) -> None:
    found = run_ranks(examine, n, wrap, timeout=120)
    assert set(found[0]) >= {"up.weight", "up.bias", "down.weight"}
    refused = 0
    for name in found[0]:
        layouts = [told[name][0] for told in found]
        is_partial = wrap is fsdp2_over_tp and name == "scale"  # tensor parallelism knows nothing of it
        assert len(set(layouts)) == (2 if is_partial else 1)
        for layout in set(layouts):
            shards = {i: found[i][name][1] for i in layout.mesh.ranks}
            assert all(layouts[i] == layout for i in shards)
            whole = found[0][name][3]
            assert same_bytes(assemble(shards, layout, whole.shape), whole)
        assert all(told[name][2][0] for told in found), "every rank can read something, if only nothing"
        refused += sum(told[name][2][1] for told in found)
    assert (refused > 0) == (n > 1)


def test_the_layouts_of_parameters() -> None:
    def layouts(rank: int) -> list[Layout]:
        models = [wrapped(wrap)[0] for wrap in (fsdp2, tp, fsdp2_over_tp, hsdp)]
        return [layout_of_dtensor(model.up.weight) for model in models]

    for found in run_ranks(layouts, 4, timeout=120):
        assert found == [
            Layout(Mesh({"dp": 4}), [Shard(0)]),
            Layout(Mesh({"tp": 4}), [Shard(0)]),
            Layout(Mesh({"dp": 2, "tp": 2}), [Shard(0), Shard(0)], order=["tp", "dp"]),
            Layout(Mesh({"replicas": 2, "dp": 2}), [Replicate(), Shard(0)]),
        ]


def dtensor(whole: torch.Tensor, mesh: Any, placements: list[Any]) -> Any:
    """Cut a DTensor out of a whole tensor by our own layouts, which need no rank to send anything."""
    spec = TensorSpec(whole.shape, whole.dtype)
    names = mesh.mesh_dim_names or [f"dim{i}" for i in range(mesh.ndim)]
    layout = Layout(Mesh(list(zip(names, mesh.mesh.shape, strict=True)), mesh.mesh.flatten().tolist()), placements)
    return make_dtensor(local_of(whole, layout, dist.get_rank()).clone(), mesh, placements, spec)


def test_meshes_of_any_ranks_and_parts_of_meshes() -> None:
    """Axes without names; ranks in any order; a part of a mesh has the ranks of this rank's part."""
    from torch.distributed.tensor import Replicate as TorchReplicate
    from torch.distributed.tensor import Shard as TorchShard

    def fn(rank: int) -> list[Layout]:
        from torch.distributed.device_mesh import DeviceMesh

        unnamed = DeviceMesh("cpu", [[3, 1], [0, 2]])
        part = mesh_of((2, 2), ("pp", "tp"))["tp"]
        whole = torch.arange(35.0).reshape(7, 5)
        first = dtensor(whole, unnamed, [TorchShard(1), TorchShard(-2)])
        second = dtensor(whole, part, [TorchReplicate()])
        third = dtensor(whole, part, [TorchShard(0)])
        return [layout_of_dtensor(x) for x in (first, second, third)]

    for rank, found in enumerate(run_ranks(fn, 4)):
        part = Mesh({"tp": 2}, [rank // 2 * 2, rank // 2 * 2 + 1])
        assert found == [
            Layout(Mesh({"dim0": 2, "dim1": 2}, [3, 1, 0, 2]), [Shard(1), Shard(0)]),
            Layout(part, [Replicate()]),
            Layout(part, [Shard(0)]),
        ]


def test_a_rank_outside_the_mesh_holds_nothing() -> None:
    from torch.distributed.tensor import Shard as TorchShard

    def fn(rank: int) -> None:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import DTensor

        mesh = DeviceMesh("cpu", [2, 0])
        whole = torch.arange(6.0)
        if rank == 1:
            x: Any = DTensor.from_local(torch.empty(0), mesh, [TorchShard(0)], shape=whole.shape, stride=(1,))
        else:
            x = dtensor(whole, mesh, [TorchShard(0)])
        source = DTensorSource.of(x)
        assert source.placement(source.fqn) == Layout(Mesh({"dim0": 2}, [2, 0]), [Shard(0)])
        local = source.local(source.fqn)
        assert (local is None) == (rank == 1)
        out = torch.zeros(2)
        if rank == 1:
            with pytest.raises(FdsdError, match=r"held by ranks 0, 2; give group="):
                source.read(source.fqn, Region.box((2,), (2,)), out)
            with pytest.raises(FdsdError, match=r"held by rank 0; give group="):
                source.read(source.fqn, Region.box((4,), (2,)), out)
        if rank == 0:
            source.read(source.fqn, Region.box((4,), (2,)), out)
            assert out.tolist() == [4, 5]

    run_ranks(fn, 3)


def test_materialize_without_a_group() -> None:
    """What is replicated here can be read here; what is not raises, and names group=."""
    from torch.distributed.tensor import Replicate as TorchReplicate
    from torch.distributed.tensor import Shard as TorchShard

    def fn(rank: int) -> None:
        mesh = mesh_of((2,), ("dp",))
        whole = torch.arange(6.0).reshape(3, 2)
        here = fdsd.transpose("w", 0, 1)({"w": dtensor(whole, mesh, [TorchReplicate()])})
        assert torch.equal(fdsd.materialize(here)["w"], whole.t())
        there = fdsd.transpose("w", 0, 1)({"w": dtensor(whole, mesh, [TorchShard(0)])})
        with pytest.raises(FdsdError, match=r"group="):
            fdsd.materialize(there)

    run_ranks(fn, 2)


def test_local_tensors_of_several_blocks() -> None:
    """A factor that no axis explains: two runs on each rank, and regions that go over both."""
    from torch.distributed.tensor.placement_types import _StridedShard

    def fn(rank: int) -> tuple[int, int]:
        mesh = mesh_of((2,), ("tp",))
        whole = torch.arange(24.0).reshape(8, 3)
        x = dtensor(whole, mesh, [_StridedShard(0, split_factor=2)])
        assert layout_of_dtensor(x) == Layout(Mesh({"tp": 2}), [Shard(0, parts=2)])
        assert len(layout_of_dtensor(x).blocks((8, 3), rank)) == 2
        return check_reads(DTensorSource.of(x), whole, rank)

    for good, bad in run_ranks(fn, 2):
        assert good > 20 and bad > 20


def test_partial_and_false_shapes_are_refused() -> None:
    from torch.distributed.tensor import DTensor, Partial
    from torch.distributed.tensor import Shard as TorchShard

    def fn(rank: int) -> None:
        mesh = mesh_of((2,), ("dp",))
        partial = DTensor.from_local(torch.ones(3), mesh, [Partial()])
        for make in (layout_of_dtensor, lazy_dtensor, DTensorSource.of):
            with pytest.raises(Unsupported, match=r"the placement of 'dp' is Partial.*Redistribute"):
                make(partial)
        false = DTensor.from_local(torch.ones(3 - rank), mesh, [TorchShard(0)], shape=torch.Size([6]), stride=(1,))
        if rank == 1:
            for make in (layout_of_dtensor, lazy_dtensor, DTensorSource.of):
                with pytest.raises(SpecMismatch, match=r"holds a local tensor of shape \(2,\) on rank 1.*say \(3,\)"):
                    make(false)
            with pytest.raises(SpecMismatch, match=r"shape \(2,\)"):
                make_dtensor(torch.ones(2), mesh, [TorchShard(0)], TensorSpec((6,), torch.float32))
        else:
            layout_of_dtensor(false)

    run_ranks(fn, 2)


def test_made_dtensors() -> None:
    """Uneven and empty shards have the right global shape; memory is shared; placements are torch's own."""
    from torch.distributed.tensor import Replicate as TorchReplicate
    from torch.distributed.tensor import Shard as TorchShard

    def fn(rank: int) -> list[Any]:
        mesh = mesh_of((3,), ("dp",))
        whole = torch.arange(8.0).reshape(4, 2)
        local = whole[2 * rank : 2 * rank + 2].clone()
        x = make_dtensor(local, mesh, [TorchShard(0)], TensorSpec((4, 2), torch.float32))
        assert local_of_dtensor(x).data_ptr() == local.data_ptr() and not x.requires_grad
        assert x.stride() == (2, 1) and x.placements == (TorchShard(0),) and x.device_mesh is mesh
        y = make_like(x, local.to(torch.bfloat16))
        assert y.dtype is torch.bfloat16 and x.dtype is torch.float32
        z = make_dtensor(torch.zeros_like(local), like=x)
        param = nn.Parameter(z)
        assert type(param) is type(x) and layout_of_dtensor(param) == layout_of_dtensor(x)
        one = make_dtensor(torch.ones(3), mesh, [TorchReplicate()], TensorSpec((3,), torch.float32))
        return [x.full_tensor(), y.full_tensor(), z.full_tensor(), (x + 1).full_tensor(), one.full_tensor()]

    whole = torch.arange(8.0).reshape(4, 2)
    for found in run_ranks(fn, 3):
        expected = [whole, whole.bfloat16(), whole * 0, whole + 1, torch.ones(3)]
        assert all(same_bytes(a, b) for a, b in zip(found, expected, strict=True))


def test_made_dtensors_of_another_device() -> None:
    """A local tensor stays where it is: with ``from_local`` it would go to the device of the mesh."""
    from torch.distributed.tensor import Shard as TorchShard

    def fn(rank: int) -> None:
        mesh = mesh_of((2,), ("dp",))
        spec = TensorSpec((3,), torch.float32)
        meta = make_dtensor(torch.empty(2 - rank, device="meta"), mesh, [TorchShard(0)], spec)
        assert local_of_dtensor(meta).is_meta and meta.shape == (3,)
        source = DTensorSource.of(meta)
        with pytest.raises(SpecMismatch, match=r"meta device.*to_empty"):
            source.read(source.fqn, Region.box((0,), (1,)), torch.empty(1))

    run_ranks(fn, 2)


def test_what_cannot_be_made() -> None:
    from torch.distributed.tensor import Shard as TorchShard

    def fn(rank: int) -> None:
        mesh = mesh_of((2,), ("dp",))
        spec = TensorSpec((4,), torch.float32)
        x = make_dtensor(torch.ones(2), mesh, [TorchShard(0)], spec)
        with pytest.raises(SpecMismatch, match=r"make_like: the local tensor has shape \(3,\).*\(2,\)"):
            make_like(x, torch.ones(3))
        with pytest.raises(SpecMismatch, match=r"make_dtensor: the local tensor is of torch.float64"):
            make_dtensor(torch.ones(2).double(), mesh, [TorchShard(0)], spec)
        with pytest.raises(Unsupported, match=r"give mesh, placements and spec, or a DTensor with like="):
            make_dtensor(torch.ones(2), mesh, [TorchShard(0)])

    run_ranks(fn, 2)


def test_a_local_tensor_that_a_collective_still_fills() -> None:
    from torch.distributed.tensor import Shard as TorchShard

    def fn(rank: int) -> torch.Tensor:
        mesh = mesh_of((2,), ("dp",))
        x = make_dtensor(torch.arange(2.0) + 2 * rank, mesh, [TorchShard(0)], TensorSpec((4,), torch.float32))
        whole = x.redistribute(placements=[TorchShard(0)]).redistribute(mesh, [torch_replicate()], async_op=True)
        return local_of_dtensor(whole).clone()

    def torch_replicate() -> Any:
        from torch.distributed.tensor import Replicate as TorchReplicate

        return TorchReplicate()

    for found in run_ranks(fn, 2):
        assert type(found) is torch.Tensor and found.tolist() == [0, 1, 2, 3]


def test_subclasses_in_local_tensors_are_refused_by_name() -> None:
    from torch.distributed.tensor import Replicate as TorchReplicate

    class Odd(torch.Tensor):
        pass

    def fn(rank: int) -> None:
        mesh = mesh_of((1,), ("dp",))
        x = make_dtensor(torch.ones(2), mesh, [TorchReplicate()], TensorSpec((2,), torch.float32))
        x._local_tensor = torch.ones(2).as_subclass(Odd)
        with pytest.raises(Unsupported, match=r"local tensor of a DTensor is of class .*Odd"):
            lazy_dtensor(x)

    run_ranks(fn, 1)


def test_ties_of_what_a_state_dict_gives() -> None:
    """Each name of a tied weight has a wrapper of its own, and they are one tensor."""

    def fn(rank: int) -> list[Any]:
        model = nn.Sequential(*[nn.Linear(4, 6, bias=False) for _ in range(3)])
        model[2].weight = model[0].weight
        fsdp2(model)
        state = model.state_dict()
        assert state["0.weight"] is not state["2.weight"]
        copy = make_like(state["0.weight"], state["0.weight"]._local_tensor.clone())
        lazy = defer(state)
        return [ties(state), ties({**state, "copy": copy}), lazy["0.weight"] is lazy["2.weight"]]

    for found in run_ranks(fn, 3):
        assert found == [[("0.weight", "2.weight")], [("0.weight", "2.weight")], True]


def test_known_layouts_cost_microseconds() -> None:
    """A bound that a slow machine keeps; a layout that is read anew takes longer than this."""

    def fn(rank: int) -> float:
        model, _ = wrapped(fsdp2)
        param = model.up.weight
        layout_of_dtensor(param)
        times: list[float] = []
        for _ in range(20):
            start = time.perf_counter()
            for _ in range(100):
                layout_of_dtensor(param)
            times.append((time.perf_counter() - start) / 100)
        return min(times)

    assert min(run_ranks(fn, 2)) < 50e-6
