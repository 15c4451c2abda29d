"""Layouts: spellings, orders, fused parts, and what is refused; local tensors in one process."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from fdsd.data.errors import BadFile, SpecMismatch, Unsupported
from fdsd.data.model import TensorEntry
from fdsd.data.region import Region
from fdsd.data.spec import TensorSpec
from fdsd.layout import Block, Layout, Mesh, Replicate, Shard
from fdsd.layout.local import assemble, local_of, view_in
from fdsd.layout.placement import Strided

MESH = Mesh({"dp": 2, "tp": 2})


@pytest.mark.parametrize(
    "placements, order",
    [
        ([Shard(0), Replicate()], None),
        ((Shard(0), Replicate()), ["dp"]),
        ({"dp": Shard(0)}, None),
        ({"tp": Replicate(), "dp": Shard(0, parts=1)}, ("dp",)),
        ([Strided(0, 1), Replicate()], None),
    ],
)
def test_spellings(placements: Any, order: Any) -> None:
    layout = Layout(MESH, placements, order=order)
    assert layout == Layout(MESH, [Shard(0), Replicate()])
    assert repr(layout) == "Layout(Mesh({'dp': 2, 'tp': 2}), (Shard(0), Replicate()))"
    assert pickle.loads(pickle.dumps(layout)) == layout


def test_an_order_counts_only_within_a_dim() -> None:
    left = Layout(MESH, [Shard(0), Shard(1)], order=["dp", "tp"])
    assert left == Layout(MESH, [Shard(0), Shard(1)], order=["tp", "dp"])
    assert Layout(MESH, [Shard(0), Shard(0)], order=["tp", "dp"]) != Layout(MESH, [Shard(0), Shard(0)])


def test_negative_dims_may_be_the_same() -> None:
    first = Layout(MESH, [Shard(0), Shard(-2)], order=["tp", "dp"])
    assert [first.blocks((4, 3), rank)[0].starts for rank in range(4)] == [(0, 0), (2, 0), (1, 0), (3, 0)]
    assert [first.local_shape((4, 3, 2), rank) for rank in range(4)] == [(2, 2, 2), (2, 1, 2), (2, 2, 2), (2, 1, 2)]


def test_gate_over_up_on_every_rank() -> None:
    """Tensor parallelism cuts each part; FSDP after it cuts what a rank has, as it lies."""
    tensor = torch.arange(12)
    fused = Layout(MESH, {"tp": Shard(0, parts=[8, 4]), "dp": Shard(0)}, order=["tp", "dp"])
    assert [local_of(tensor, fused, rank).tolist() for rank in range(4)] == [
        [0, 1, 2],
        [4, 5, 6],
        [3, 8, 9],
        [7, 10, 11],
    ]
    assert fused.blocks((12,), 2) == (Block((3,), (1,), (0,)), Block((8,), (2,), (1,)))


def test_runs_that_continue_are_one_block() -> None:
    assert Layout(Mesh({"tp": 1}), [Shard(0, parts=4)]).blocks((8,), 0) == (Block((0,), (8,), (0,)),)


@pytest.mark.parametrize("shape", [(), (3, 0), (0,)])
def test_nothing_to_cut(shape: tuple[int, ...]) -> None:
    layout = Layout(MESH, [Replicate(), Replicate()])
    assert layout.local_shape(shape, 3) == shape
    assert len(layout.blocks(shape, 3)) == (0 not in shape)
    assert len(layout.holders(shape)) == (0 not in shape)


def test_a_rank_that_is_not_there() -> None:
    layout = Layout(Mesh({"dp": 2}, [4, 5]), [Shard(0)])
    assert layout.regions((3,), 0) == ()
    with pytest.raises(SpecMismatch, match="rank 0 is not in the mesh"):
        layout.local_shape((3,), 0)


@pytest.mark.parametrize(
    "placements, order, error, told",
    [
        ([Shard(0)], None, SpecMismatch, "one placement for each axis"),
        (Shard(0), None, SpecMismatch, "one placement for each axis"),
        ({"pp": Shard(0)}, None, SpecMismatch, "no axes 'pp'"),
        ([Shard(0), 3], None, Unsupported, "placement of 'tp' is 3, of type int"),
        ([Shard(0), Shard(0)], ["dp"], SpecMismatch, "does not name the axes that shard.*'dp', 'tp'"),
        ([Shard(0), Replicate()], ["dp", "tp"], SpecMismatch, "does not name the axes"),
        ([Shard(0), Shard(0)], "dp", SpecMismatch, "does not name the axes"),
        ([Strided(0, 2), Shard(0)], ["dp", "tp"], SpecMismatch, "Leave order out"),
    ],
)
def test_what_is_no_layout(placements: Any, order: Any, error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        Layout(MESH, placements, order=order)


def test_what_is_no_mesh() -> None:
    with pytest.raises(SpecMismatch, match="the mesh is a Mesh"):
        Layout({"dp": 2}, [Shard(0)])  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [1.5, "0", True, None])
def test_dims_are_whole_numbers(value: Any) -> None:
    with pytest.raises(SpecMismatch, match="a dim is a whole number"):
        Shard(value)


@pytest.mark.parametrize("parts", [0, -1, [], [3, -1], [1.5], "ab", True])
def test_what_are_no_parts(parts: Any) -> None:
    with pytest.raises(SpecMismatch, match="how many there are, at least 1, or their sizes"):
        Shard(0, parts=parts)


@pytest.mark.parametrize("shape, dim, told", [((), 0, "no dims"), ((4,), 1, "1 dim"), ((4, 4), -3, "2 dims")])
def test_dims_that_a_tensor_lacks(shape: tuple[int, ...], dim: int, told: str) -> None:
    layout = Layout(MESH, {"tp": Shard(dim)})
    for ask in (layout.holders, lambda s: layout.blocks(s, 0), lambda s: layout.local_shape(s, (0, 1))):
        with pytest.raises(SpecMismatch, match=rf"the axis 'tp' shards dim {dim} .* has {told}\. Replicate"):
            ask(shape)


def test_parts_that_do_not_add_up() -> None:
    layout = Layout(MESH, {"tp": Shard(0, parts=[4, 3])})
    with pytest.raises(SpecMismatch, match=r"dim 0 of a tensor of shape \(8,\): parts=\(4, 3\) have 7 .* 8 to cut"):
        layout.local_shape((8,), 0)


@pytest.mark.parametrize(
    "text",
    ["3", '{"mesh": {"axes": []}}', '{"mesh": {"axes": []}, "placements": 1}',
     '{"mesh": {"axes": [["dp", 2]]}, "placements": []}', '{"mesh": {"axes": [["dp", 2]]}, "placements": ["shard"]}',
     '{"mesh": {"axes": [["dp", 2]]}, "placements": [{"shard": "0"}]}',
     '{"mesh": {"axes": [["dp", 2]]}, "placements": [{"shard": 0}], "order": ["tp"]}'],
)  # fmt: skip
def test_what_is_no_text_of_a_layout(text: str) -> None:
    with pytest.raises(BadFile):
        Layout.from_json(text)


def test_a_tensor_entry_holds_a_layout() -> None:
    layout = Layout(MESH, {"tp": Shard(0, parts=[4, 3])})
    entry = TensorEntry(TensorSpec((7,), torch.int8), layout=layout.to_data())
    assert Layout.from_data(entry.layout) == layout


def test_local_tensors_are_views() -> None:
    tensor = torch.arange(8).reshape(4, 2)
    local = local_of(tensor, Layout(MESH, [Shard(0), Shard(1)]), (1, 0))
    local += 100
    assert tensor.tolist() == [[0, 1], [2, 3], [104, 5], [106, 7]]


def test_assembling_says_what_is_wrong() -> None:
    layout = Layout(Mesh({"dp": 3}), [Shard(0)])
    with pytest.raises(SpecMismatch, match="no local tensor of the ranks 0, 2"):
        assemble({1: torch.zeros(1)}, layout, (3,))
    with pytest.raises(SpecMismatch, match=r"rank 1 has \(2,\) and should have \(1,\)"):
        assemble({0: torch.zeros(1), 1: torch.zeros(2), 2: torch.zeros(1)}, layout, (3,))


def test_a_box_in_no_block() -> None:
    with pytest.raises(SpecMismatch, match=r"No block .* the box at \(1,\) of \(3,\)"):
        view_in(torch.zeros(3), [Block((0,), (3,), (0,))], Region.box((1,), (3,)))
