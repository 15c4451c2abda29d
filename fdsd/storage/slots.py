"""Where tensors go in the files of a sink, and copies of whole tensors that are neighbours there and where they are.

Nothing here makes files.
"""

from __future__ import annotations

from collections.abc import Iterator

from attrs import define, frozen

from fdsd.data.errors import add_note
from fdsd.data.spec import TensorSpec
from fdsd.storage.drafts import Draft
from fdsd.storage.files import Extent, OpenFiles

__all__ = ["Run", "Slot"]

_PART = 64 << 20
"""The most bytes of whole tensors that are copied between two reports of progress."""


@frozen
class Slot:
    """Where a tensor goes: the file, the offset of its first byte, and how many there are."""

    draft: Draft
    offset: int
    nbytes: int
    spec: TensorSpec


@define
class Run:
    """Whole tensors that lie one behind the other, both in a file that is read and in one that is written."""

    first: str
    last: str
    extent: Extent
    slot: Slot
    nbytes: int

    def take(self, fqn: str, extent: Extent, slot: Slot) -> bool:
        """Take a tensor in, if it comes just behind on both sides."""
        mine = self.extent
        if (
            extent.offset != mine.offset + self.nbytes
            or slot.offset != self.slot.offset + self.nbytes
            or slot.draft is not self.slot.draft
            or extent.path != mine.path
            or (extent.stamp is not mine.stamp and extent.stamp != mine.stamp)
        ):
            return False
        self.last = fqn
        self.nbytes += extent.nbytes
        return True

    def copy(self, sources: OpenFiles) -> Iterator[int]:
        """Copy all of it, and say how many bytes were copied, now and then."""
        mine, slot = self.extent, self.slot
        try:
            for done in range(0, self.nbytes, _PART):
                count = min(_PART, self.nbytes - done)
                part = Extent(mine.path, mine.offset + done, count, mine.stamp)
                slot.draft.copy(part, slot.offset + done, sources)
                yield count
        except Exception as error:
            add_note(error, f"while saving {self.first!r}{'' if self.first == self.last else f' to {self.last!r}'}")
            raise
