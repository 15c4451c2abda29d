"""What models hold, compared: whole values, names without wrappers, the memory of a rank. No test lives here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.helpers.models import Counter

__all__ = ["case", "clean", "local_values", "same", "tied", "whole"]

_WRAPPERS = re.compile(r"(^|(?<=\.))(module|_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")


def clean(name: str) -> str:
    """Drop the segments of wrappers; the model has no submodules of their names."""
    return _WRAPPERS.sub("", name)


def whole(value: Any) -> Any:
    """Give the whole tensor of a sharded one, by torch's own means. Collective."""
    if hasattr(value, "full_tensor"):
        return value.full_tensor()
    if hasattr(value, "local_shards"):
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, [(s.metadata.shard_offsets, s.tensor) for s in value.local_shards()])
        metadata = value.metadata()  # asking the tensor itself warns
        made = torch.full(tuple(metadata.size), -1, dtype=metadata.tensor_properties.dtype)
        for offsets, part in [pair for pairs in parts for pair in pairs]:
            made[tuple(slice(at, at + n) for at, n in zip(offsets, part.shape, strict=True))] = part
        return made
    return value


def same(found: Any, expected: Any) -> None:
    """Compare state dicts or values: names in order, dtypes, shapes and bits; what lies over ranks is gathered."""
    if isinstance(expected, torch.Tensor):
        mine, expected = whole(found), whole(expected)
        assert isinstance(mine, torch.Tensor), type(mine)
        assert (mine.dtype, mine.shape) == (expected.dtype, expected.shape)
        assert torch.equal(mine, expected), f"{mine} is not {expected}"
    elif isinstance(expected, Mapping):
        assert list(found) == list(expected)
        for name, value in expected.items():
            with case(str(name)):
                same(found[name], value)
    elif isinstance(expected, list | tuple):
        assert type(found) is type(expected) and len(found) == len(expected)
        for mine, theirs in zip(found, expected, strict=True):
            same(mine, theirs)
    else:
        assert type(found) is type(expected) and found == expected


def tied(a: Any, b: Any) -> None:
    """See that two values are one tensor."""
    if hasattr(a, "local_shards"):
        pairs = zip(a.local_shards(), b.local_shards(), strict=True)
        assert all(x.tensor.data_ptr() == y.tensor.data_ptr() for x, y in pairs)
        return
    a, b = (getattr(t, "_local_tensor", t) for t in (a, b))
    assert a.data_ptr() == b.data_ptr()


def local_values(model: nn.Module) -> list[Any]:
    """Copy what this rank holds of a model, with its extra state: equal lists mean that nothing has been written."""
    tensors: Iterable[Any] = [*model.parameters(), *model.buffers()]
    made: list[Any] = [getattr(t, "_local_tensor", t).detach().clone() for t in tensors]
    return [*made, *[dict(m.note) if m.note else m.note for m in model.modules() if isinstance(m, Counter)]]


@contextmanager
def case(*names: Any) -> Iterator[None]:
    """Name the case in which something fails."""
    try:
        yield
    except (Exception, pytest.fail.Exception) as error:
        raise AssertionError(f"{', '.join(map(str, names))}: {type(error).__name__}: {error}") from error
