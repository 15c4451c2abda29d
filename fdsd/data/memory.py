"""Where the elements of a live tensor lie: in which storage, at strides, and whether two are one view of it.

Which names share memory is the business of ``ties``.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fdsd.data.spec import is_exact

__all__ = ["addresses_of", "is_expanded", "is_grid", "is_same_view", "storage_id"]


def storage_id(tensor: torch.Tensor) -> int:
    """Give what tells one storage from another while both live.

    The Python object of a storage may differ from call to call; its C++ object does not.
    """
    found: int = tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]  # torch has no public name
    return found


def is_grid(tensor: torch.Tensor) -> bool:
    """Tell whether the elements of a tensor lie in one storage, at strides.

    >>> is_grid(torch.eye(2)), is_grid(torch.eye(2).to_sparse())
    (True, False)
    """
    return is_exact(tensor) and tensor.layout is torch.strided and not tensor.is_nested


def is_expanded(tensor: torch.Tensor) -> bool:
    """Tell whether several elements of a strided tensor lie in one place, so that none of them can be written.

    >>> is_expanded(torch.ones(1, 2).expand(3, 2)), is_expanded(torch.ones(1, 2).expand(1, 2))
    (True, False)
    """
    if tensor.is_contiguous():
        return False
    return any(not stride and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def addresses_of(tensors: Iterable[torch.Tensor]) -> list[int | None]:
    """Give where the first elements of tensors lie whose elements lie one after the other in ordinary memory.

    Args:
        tensors: Of any class and dtype. There are thousands at once.

    Returns:
        For each its address; ``None`` if its elements lie otherwise, on a device, or have been freed. What is read
        there is the tensor's only as long as the tensor lives.

    >>> addresses_of([torch.ones(2, 2).t()])
    [None]
    """
    return [
        one.data_ptr()
        if is_grid(one)
        and one.is_cpu
        and one.is_contiguous()
        and not (one.is_conj() or one.is_neg())
        and one.data_ptr()
        # storages may have been freed, or a part of them; torch checks each view that it makes, and no address
        and one.untyped_storage().nbytes() >= (one.storage_offset() + one.numel()) * one.itemsize
        else None
        for one in tensors
    ]


def is_same_view(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Tell whether two tensors are one view of one memory, so that nothing has to be copied between them.

    >>> w = torch.ones(2)
    >>> is_same_view(w, w.detach()), is_same_view(w, w.clone()), is_same_view(w, w[:1])
    (True, False, False)
    """
    return (
        a.data_ptr() == b.data_ptr()
        and a.dtype == b.dtype
        and a.shape == b.shape
        and a.stride() == b.stride()
        and storage_id(a) == storage_id(b)
        and a.is_conj() == b.is_conj()
        and a.is_neg() == b.is_neg()
    )
