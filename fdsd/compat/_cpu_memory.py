"""Memory on the CPU for copies of tensors: plain, page-locked for fast copies from an accelerator, or shared.

Nothing is copied here but by ``to_cpu``; sharded tensors keep their class and their layout.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from attrs import field, frozen

from fdsd.comms.kinds import parts_of, with_parts
from fdsd.data.errors import FdsdError

__all__ = ["Allocator", "PinningError", "check_pinning", "to_cpu"]

_CPU = torch.device("cpu")


class PinningError(FdsdError, RuntimeError):
    """Memory cannot be page-locked."""


def to_cpu(tensor: Any) -> Any:
    """Give a tensor on the CPU: itself if it is there already, else a copy; a sharded one keeps its layout.

    >>> w = torch.ones(2)
    >>> to_cpu(w) is w
    True
    """
    parts = parts_of(tensor)
    if all(part.device == _CPU for part in parts):
        return tensor
    return with_parts(tensor, [part.detach().to(_CPU) for part in parts])


def check_pinning() -> None:
    """Raise if there is no accelerator for which memory could be page-locked.

    Raises:
        PinningError: There is none.
    """
    if not torch.accelerator.is_available():
        raise PinningError(
            "pin_memory=True: there is no accelerator, so memory cannot be page-locked for it. Use pin_memory=False."
        )


@frozen
class Allocator:
    """Makes new memory on the CPU for tensors.

    Attributes:
        pin: Page-locked, for fast copies from an accelerator.
        share: In shared memory, for other processes.

    >>> Allocator(share=True)(torch.tensor(7.0)).is_shared()
    True
    """

    pin: bool = False
    share: bool = False
    _device: torch.device = field(default=_CPU, init=False)

    def __call__(self, tensor: Any) -> Any:
        """Give a tensor of the same shape and dtype in new memory: zeros where there are no dims, else anything."""
        parts = parts_of(tensor)
        return with_parts(tensor, [self._new(part) for part in parts]) if parts else tensor

    def _new(self, part: torch.Tensor) -> torch.Tensor:
        if not part.numel() or self.share or not self.pin:  # memory without bytes cannot be locked
            made = torch.empty(part.shape, dtype=part.dtype, device=self._device)
        else:
            made = torch.empty(part.shape, dtype=part.dtype, device=self._device, pin_memory=True)
        if not part.ndim:
            made.zero_()
        if self.share:
            made.share_memory_()  # type: ignore[no-untyped-call]
            if self.pin and part.numel():
                _lock(made)
        return made


def _lock(tensor: torch.Tensor) -> None:
    """Register shared memory with CUDA, until the tensor is gone: locked memory of the allocator cannot be shared."""
    address = tensor.data_ptr()
    cuda: Any = torch.cuda
    runtime = cuda.cudart()
    if error := int(runtime.cudaHostRegister(address, tensor.untyped_storage().nbytes(), 1)):
        raise PinningError(f"pin_memory=True with share_memory=True: CUDA refused to lock the memory (error {error}).")
    weakref.finalize(tensor, runtime.cudaHostUnregister, address)
