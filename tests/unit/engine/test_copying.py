"""Copies within a process: the parts of whole tensors that a rank has, and what would be overwritten too early."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from fdsd.engine.copying import Cuts, copy_pairs, prepared
from fdsd.layout.local import local_of
from tests.helpers.layouts import indices, layouts, shapes
from tests.helpers.tensors import same_bytes


@given(st.data())
def test_cuts_are_what_a_layout_says(data: st.DataObject) -> None:
    """Of any layout, uneven, empty and fused ones too, and of whole tensors that are views of others."""
    shape = data.draw(shapes())
    layout = data.draw(layouts(shape))
    whole = indices(shape)
    if data.draw(st.booleans()):
        whole = torch.stack([whole, -whole], -1)[..., 1]
    for rank in layout.mesh.ranks:
        wanted = local_of(whole, layout, rank)
        local = torch.full(wanted.shape, 7, dtype=whole.dtype)
        cuts = Cuts(rank)
        for _ in range(2):
            copy_pairs(prepared(list(cuts.pairs(whole, layout, local))))
        assert same_bytes(local, wanted.contiguous())


def test_a_source_that_is_written_elsewhere_is_kept_first() -> None:
    memory = torch.arange(6.0)
    pairs = [(memory[3:], memory[:3]), (torch.full((3,), 9.0), memory[3:])]
    copy_pairs(prepared(pairs))
    assert memory.tolist() == [3, 4, 5, 9, 9, 9]


def test_a_tensor_that_is_there_already_is_left_alone() -> None:
    w = torch.nn.Parameter(torch.ones(2))
    assert prepared([(w, w), (w.detach(), w)]) == []
    (pair,) = prepared([(w[:1], torch.zeros(1))])
    assert not pair[0].requires_grad


def test_elements_are_cast() -> None:
    out = torch.zeros(2, dtype=torch.float8_e4m3fn), torch.zeros(2)
    copy_pairs([(torch.tensor([1.0, 2.0]), out[0]), (torch.tensor([1.0, 2.0]), out[1])])
    assert [x.float().tolist() for x in out] == [[1, 2], [1, 2]]
