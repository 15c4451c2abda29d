"""Sources without files."""

from __future__ import annotations

import pytest
import torch

from fdsd.algebra.memory import MemorySource, SpecSource
from fdsd.data.errors import SpecMismatch, Unsupported
from fdsd.data.protocols import Source
from fdsd.data.region import Region
from tests.helpers.checks import spec
from tests.helpers.tensors import as_bytes

W = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))


def test_specs_and_pieces() -> None:
    source = MemorySource({"b": W, "a": torch.tensor(1, dtype=torch.int8)})
    assert isinstance(source, Source) and isinstance(SpecSource({}), Source)
    assert list(source.specs().items()) == [("b", spec(2, 3)), ("a", spec(dtype=torch.int8))]
    (piece,) = source.pieces("b")
    assert piece.region == Region.whole((2, 3)) and piece.owner is None
    (only,) = SpecSource({"x": spec(5)}).pieces("x")
    assert only.region == Region.whole((5,))


def test_reading_casts_and_leaves_the_tensor_alone() -> None:
    source = MemorySource({"w": W})
    before, version = as_bytes(W), W._version
    out = torch.zeros(2, dtype=torch.float64, requires_grad=False)
    source.read("w", Region.box((0, 1), (1, 2)).replace(0, *Region.box((1,), (1,)).spans), out.view(1, 2))
    assert out.tolist() == [4, 5]
    assert torch.equal(as_bytes(W), before) and W._version == version


def test_a_live_parameter_is_read_when_it_is_read() -> None:
    live = torch.nn.Parameter(torch.zeros(2))
    source = MemorySource({"w": live})
    with torch.no_grad():
        live += 5
    out = torch.empty(2)
    source.read("w", Region.whole((2,)), out)
    assert out.tolist() == [5, 5]


def test_refusals() -> None:
    source = MemorySource({"w": W, "m": torch.empty(2, device="meta")})
    with pytest.raises(SpecMismatch, match=r"reading 'w'.*\(2, 3\)"):
        source.read("w", Region.box((1, 0), (2, 3)), torch.empty(2, 3))
    with pytest.raises(SpecMismatch, match="'m' is on the meta device"):
        source.read("m", Region.whole((2,)), torch.empty(2))
    with pytest.raises(Unsupported, match="'x' is known by its spec only"):
        SpecSource({"x": spec(2)}).read("x", Region.whole((2,)), torch.empty(2))
