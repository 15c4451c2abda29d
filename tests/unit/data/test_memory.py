"""Where the elements of tensors lie: addresses are given of ordinary memory alone."""

from __future__ import annotations

from ctypes import string_at

import pytest
import torch

from fdsd.data.memory import addresses_of


def address_of(tensor: torch.Tensor) -> int | None:
    (found,) = addresses_of([tensor])
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64])
def test_the_bytes_at_an_address_are_those_of_the_tensor(dtype: torch.dtype) -> None:
    tensor = torch.arange(12).to(dtype).view(4, 3)[1:3]
    at = address_of(tensor)
    assert at is not None
    found = string_at(at, tensor.numel() * tensor.itemsize)
    assert found == bytes(tensor.contiguous().view(torch.uint8).flatten().tolist())


def test_parameters_have_an_address() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    assert address_of(parameter) == parameter.data_ptr()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(2, 3).t(),
        torch.ones(3).expand(2, 3),
        torch.ones(4)[::2],
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.ones(2, dtype=torch.complex64).conj().imag,  # which is marked as negative
        torch.ones(2, device="meta"),
        torch.eye(2).to_sparse(),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    ],
    ids=["transposed", "expanded", "stepped", "conjugate", "negative", "meta", "sparse", "nested"],
)
def test_what_lies_otherwise_has_none(tensor: torch.Tensor) -> None:
    assert address_of(tensor) is None


def test_memory_that_was_freed_has_none() -> None:
    """FSDP frees whole parameters so, and what was a view of them still has sizes."""
    whole = torch.ones(4)
    part = whole[2:]
    whole.untyped_storage().resize_(0)
    assert address_of(whole) is None
    assert address_of(part) is None
