"""Pictures of layouts: every piece with its owners, as text and as SVG, whatever the shape."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fdsd.data.errors import SpecMismatch, Unsupported
from fdsd.layout import Layout, Mesh, Replicate, Shard, picture
from fdsd.testing import layouts

MESH = Mesh({"dp": 2, "tp": 2})


def drawn(svg: str) -> tuple[list[str], list[str]]:
    """Give the owners that the rectangles name, and all texts."""
    root = ET.fromstring(svg)
    spaced = "{http://www.w3.org/2000/svg}"
    owners = [title.text or "" for title in root.iter(f"{spaced}title")]
    return owners, [text.text or "" for text in root.iter(f"{spaced}text")]


@pytest.mark.parametrize(
    "layout, shape, text",
    [
        (
            Layout(MESH, [Shard(0), Shard(1)]),
            (5, 2),
            """
          column 0  column 1
rows 0-2  rank 0    rank 1
rows 3-4  rank 2    rank 3""",
        ),
        (
            Layout(MESH, [Shard(0), Shard(0)], order=["tp", "dp"]),
            (5,),
            """
rows 0-1  rank 0
row 2     rank 2
row 3     rank 1
row 4     rank 3""",
        ),
        (
            Layout(Mesh({"dp": 4}), [Shard(1)]),
            (3, 5),
            """
          columns 0-1  columns 2-3  column 4
rows 0-2  rank 0       rank 1       rank 2
nothing: rank 3""",
        ),
        (Layout(MESH, [Replicate(), Replicate()]), (), "\nranks 0, 1, 2, 3"),
        (Layout(MESH, {}), (0, 3), "\nnothing: ranks 0, 1, 2, 3"),
        (
            Layout(Mesh({"tp": 2}), [Shard(-1, parts=2)]),
            (2, 7, 4),
            """
          column 0  column 1  column 2  column 3
rows 0-1  rank 0    rank 1    rank 0    rank 1""",
        ),
    ],
    ids=str,
)
def test_as_text(layout: Layout, shape: tuple[int, ...], text: str) -> None:
    made = picture(layout, shape)
    assert str(made) == repr(made) == f"{shape} as {layout}{text}"


@given(st.data())
def test_as_svg(data: st.DataObject) -> None:
    """It is XML, with a rectangle for each piece that names its owners."""
    shape = tuple(data.draw(st.lists(st.integers(0, 6), max_size=2)))
    layout = data.draw(layouts(shape))
    owners, texts = drawn(picture(layout, shape)._repr_svg_())
    assert sorted(owners) == sorted(
        f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        for _, ranks in layout.holders(shape)
    )
    assert texts[0] == f"{shape} as {layout}"


def test_dims_may_be_chosen() -> None:
    layout = Layout(Mesh({"tp": 2}), [Shard(2)])
    assert picture(layout, (2, 3, 4)).dims == (0, 2)
    assert picture(layout, (2, 3, 4), dims=[-1, 1]).dims == (2, 1)
    assert picture(layout, (2, 3, 4), dims=[2]).dims == (2, None)
    for dims in ([3], [0, 0], [0, -3], [], [0, 1, 2]):
        with pytest.raises(SpecMismatch, match="are not one or two dims"):
            picture(layout, (2, 3, 4), dims=dims)
    with pytest.raises(Unsupported, match="2 would not be seen"):
        picture(layout, (2, 3, 4), dims=[0, 1])
    with pytest.raises(Unsupported, match="3 dims are cut, and 2 would not be seen"):
        picture(Layout(Mesh({"a": 2, "b": 2, "c": 2}), [Shard(0), Shard(1), Shard(2)]), (2, 2, 2))
    with pytest.raises(SpecMismatch, match="shards dim 2"):
        picture(layout, (2, 3))
