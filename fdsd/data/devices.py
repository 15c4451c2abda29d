"""Devices as users give them, checked before anything is made there."""

from __future__ import annotations

from typing import Any

import torch

from fdsd.data.errors import Unsupported

__all__ = ["parse_device"]


def parse_device(verb: str, device: Any) -> torch.device | None:
    """Read a device, and make sure that tensors can be there; ``None`` stays.

    Args:
        verb: What was called, for errors.
        device: A device, its name, or its number.

    Raises:
        Unsupported: It is no device, or there is none of its kind here.

    >>> parse_device("materialize", "cpu")
    device(type='cpu')
    """
    if device is None:
        return None
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except Exception as error:  # torch raises an AssertionError for an accelerator that it was built without
        why = str(error).partition("\n")[0]
        raise Unsupported(
            f"{verb}: no tensor can be on device={device!r} here ({why}). Give a device of this machine, such as 'cpu'."
        ) from error
    return found
