"""Sources that need no file: tensors in memory, and specs without any data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fdsd.algebra.dtypes import copy_elements
from fdsd.algebra.spans import view_of
from fdsd.data.errors import SpecMismatch, Unsupported
from fdsd.data.place import Place
from fdsd.data.protocols import Piece
from fdsd.data.region import Region
from fdsd.data.spec import TensorSpec, spec_of
from fdsd.data.statedict import StateDict
from fdsd.data.ties import place_of

__all__ = ["MemorySource", "SpecSource"]


class SpecSource:
    """Tensors of which only the specs are known; reading raises.

    Args:
        specs: The spec of each tensor.
    """

    def __init__(self, specs: Mapping[str, TensorSpec]) -> None:
        self._specs = StateDict(specs)

    def specs(self) -> StateDict[TensorSpec]:
        return self._specs

    def pieces(self, fqn: str) -> Sequence[Piece]:
        return [Piece(Region.whole(self._specs[fqn].shape))]

    def place(self, fqn: str) -> Place | None:
        return place_of(self._specs[fqn])

    def read(self, fqn: str, region: Region, out: torch.Tensor) -> None:
        raise Unsupported(f"{fqn!r} is known by its spec only; there is no data to read. Open the checkpoint itself.")


class MemorySource:
    """Exact tensors in memory, read when asked, never written.

    Args:
        tensors: The tensors by FQN.

    >>> out = torch.empty(2)
    >>> MemorySource({"a": torch.tensor([1.0, 2.0, 3.0])}).read("a", Region.box((1,), (2,)), out); out
    tensor([2., 3.])
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = {fqn: tensor.detach() for fqn, tensor in tensors.items()}

    def specs(self) -> StateDict[TensorSpec]:
        made: dict[str, TensorSpec] = {}
        for fqn, tensor in self._tensors.items():
            spec = spec_of(tensor)
            assert spec is not None
            made[fqn] = spec
        return StateDict(made)

    def pieces(self, fqn: str) -> Sequence[Piece]:
        return [Piece(Region.whole(tuple(self._tensors[fqn].shape)))]

    def local(self, fqn: str) -> torch.Tensor:
        """Give the tensor itself, which is not to be written."""
        return self._tensors[fqn]

    def place(self, fqn: str) -> Place | None:
        return place_of(self._tensors[fqn])

    def read(self, fqn: str, region: Region, out: torch.Tensor) -> None:
        tensor = self._tensors[fqn]
        if tensor.is_meta:
            raise SpecMismatch(
                f"{fqn!r} is on the meta device and has no data. Materialize the module first (to_empty, then load)."
            )
        region.check_inside(tuple(tensor.shape), f"reading {fqn!r}")
        with torch.no_grad():
            copy_elements(view_of(tensor, region), out)
