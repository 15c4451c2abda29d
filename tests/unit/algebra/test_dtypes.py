"""Moving elements of every dtype. (What casts keep is in ``tests/laws/test_cast_law.py``.)"""

from __future__ import annotations

import pytest
import torch

from fdsd.algebra.apply import apply, defer, defer_leaf
from fdsd.algebra.dtypes import copy_elements, movable
from fdsd.algebra.ops import Select
from fdsd.data.errors import Unsupported
from tests.helpers.tensors import LAYOUTS, MOVABLE, has_layout, lay_out, name_of, patterns, plain, same_bytes


@pytest.mark.parametrize("dtype", MOVABLE, ids=name_of)
def test_copies_are_exact(dtype: torch.dtype) -> None:
    for kind in LAYOUTS:
        if not has_layout(kind, (3, 4), dtype):
            continue
        x = lay_out(patterns((3, 4), dtype), kind)
        for out in (
            torch.empty(3, 4, dtype=dtype),
            torch.empty(4, 3, dtype=dtype).t(),
            torch.empty(3, 9, dtype=dtype)[:, 1::2],
        ):
            copy_elements(x, out)
            assert same_bytes(out, x), (kind, out.stride())
            assert same_bytes(out, plain(x))


@pytest.mark.parametrize("dtype", MOVABLE, ids=name_of)
def test_movable_keeps_size_and_bytes(dtype: torch.dtype) -> None:
    x = patterns((3, 4), dtype)
    assert movable(x).dtype.itemsize == dtype.itemsize
    assert movable(x).data_ptr() == x.data_ptr()
    assert same_bytes(movable(x).view(dtype), x)


@pytest.mark.filterwarnings("ignore:.*support is experimental:UserWarning")
def test_every_dtype_of_torch_is_moved_or_refused_by_name() -> None:
    known = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    quantized = {d for d in known if name_of(d).startswith(("qint", "quint"))}
    for dtype in known - quantized:
        x = patterns((2, 3), dtype)
        out = torch.empty(3, 2, dtype=dtype).t()
        copy_elements(x, out)
        assert same_bytes(out, x), dtype


@pytest.mark.filterwarnings("ignore:.*quantize.*")
def test_a_quantized_tensor_is_refused_by_name() -> None:
    """Its scale and zero point are no elements."""
    x = torch.quantize_per_tensor(torch.arange(4.0), 0.5, 1, torch.quint8)
    for run in (lambda: apply(Select(0, 0), x), lambda: defer_leaf(x), lambda: defer({"w": x})):
        with pytest.raises(Unsupported, match="quantized"):
            run()
