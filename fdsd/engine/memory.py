"""`Memory`: what this rank holds and gets while tensors are delivered: views of sources, results, what is done to both.

How messages travel is unknown here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import compress
from operator import add
from typing import NamedTuple

import torch
from attrs import Factory, define, field
from torch.autograd.graph import increment_version

from fdsd.algebra.dtypes import copy_elements
from fdsd.algebra.ops.leaves import Origin
from fdsd.algebra.plan import View
from fdsd.data.errors import SpecMismatch
from fdsd.data.memory import addresses_of
from fdsd.engine.overwriting import Kept, memory_of
from fdsd.engine.request import Request
from fdsd.engine.rows import Rows, move_rows
from fdsd.engine.staging import ACCELERATOR, Layer, Staging
from fdsd.engine.steps import run_steps
from fdsd.engine.views import Part, Views
from fdsd.layout.cutting import Spot
from fdsd.layout.wiring import Recipe

__all__ = ["Delivered", "Memory"]


class Delivered(NamedTuple):
    """What is to be delivered, on this rank; columns.

    Attributes:
        names: The FQNs of the tensors.
        views: Where the parts of each lie here.
        requests: What this rank asks for; ``None`` for tensors that it does not know.
        origins: The source tensors of each, as far as this rank knows them.
    """

    names: list[str]
    views: list[Views]
    requests: list[Request | None]
    origins: list[Sequence[Origin]]


@define(eq=False, slots=False)
class Memory:
    """The memory of this rank.

    Attributes:
        tensors: All tensors, in order.
        rows: Which of their parts are moved byte for byte.
        kept: The sources that were copied before anything is written.
        device: Where fresh results are made.
        layer: The accelerators.
    """

    tensors: Delivered
    rows: Rows
    kept: Kept
    device: torch.device
    layer: Layer = ACCELERATOR
    _results: dict[int, torch.Tensor] = field(factory=dict[int, torch.Tensor], init=False)
    _staging: dict[int, dict[int, torch.Tensor]] = field(factory=dict[int, dict[int, torch.Tensor]], init=False)
    _through: Staging = field(default=Factory(lambda self: Staging(self.layer), takes_self=True), init=False)
    _short: tuple[list[torch.Tensor], list[torch.Tensor]] = field(factory=lambda: ([], []), init=False)
    _sources: dict[int, torch.Tensor | None] = field(factory=dict[int, "torch.Tensor | None"], init=False)
    _starts: dict[int, int] = field(factory=dict[int, int], init=False)  # of sources, as far as asked for
    _ends: dict[int, int] = field(factory=dict[int, int], init=False)  # of results
    _written: list[torch.Tensor] = field(factory=list[torch.Tensor], init=False)  # other than by torch

    @cached_property
    def has_far(self) -> bool:
        """Whether any tensor is in the memory of an accelerator."""
        if not self.layer.is_there():
            return False
        known = [memory_of(origin) for origins in self.tensors.origins for origin in origins]
        known += [request.out for request in self.tensors.requests if request is not None]
        known.append(torch.empty(0, device=self.device))
        return any(tensor is not None and self.layer.is_far(tensor) for tensor in known)

    @cached_property
    def settled(self) -> set[int]:
        """The tensors whose results are their sources' memory already."""
        names = self.kept.settled
        return {i for i, name in enumerate(self.tensors.names) if name in names} if names else set()

    def source(self, i: int, part: Part) -> torch.Tensor | None:
        """View a part in the memory of its source; ``None`` if it is not in memory and has to be read."""
        memory = self._fetch(i * self.rows.width + part.origin)
        return None if memory is None else part.source(memory)

    def _fetch(self, slot: int) -> torch.Tensor | None:
        """Give the memory of a source tensor by its number."""
        if slot in self._sources:
            return self._sources[slot]
        i, origin = divmod(slot, self.rows.width)
        memory = self.kept.memory(self.tensors.origins[i][origin])
        if memory is not None:
            self.tensors.views[i].check(origin, memory)
            if memory.is_conj() or memory.is_neg():
                memory = memory.resolve_conj().resolve_neg()
        self._sources[slot] = memory
        return memory

    def starts_of(self, slots: Sequence[int]) -> list[int]:
        """Give where source tensors begin that lie in one row in ordinary memory; 0 for others."""
        return _known(slots, self._starts, self._source_at)

    def ends_of(self, tensors: Sequence[int]) -> list[int]:
        """Give where results begin that lie in one row in ordinary memory; 0 for others."""
        return _known(tensors, self._ends, self._result_at)

    def _source_at(self, slot: int) -> torch.Tensor | None:
        try:
            return self._fetch(slot)
        except Exception:  # it is raised where the part is copied by itself, and told with the tensor's name
            return None

    def _result_at(self, i: int) -> torch.Tensor | None:
        request, views = self.tensors.requests[i], self.tensors.views[i]
        if request is None or request.out is None or views.recipe is None:
            try:
                return self._result(i)
            except Exception:  # as above
                return None
        out, want = request.out, views.recipe.want
        # param.data may have been replaced since it was stated; torch has to refuse it, cast it, or allow it
        if out.shape != want.shape or out.dtype != want.dtype or out.is_inference():
            return None
        self._written.append(out)
        return out

    def note_write(self, i: int) -> None:
        """Note that a message goes straight to a result: of what a backend writes, autograd knows nothing."""
        request = self.tensors.requests[i]
        out = None if request is None else request.out
        if out is not None and not out.is_inference():
            self._written.append(out)

    def read(self, i: int, part: Part, out: torch.Tensor) -> None:
        """Read a part of a source tensor into memory of its shape."""
        view = self.source(i, part)
        if view is None:
            origin = self.tensors.origins[i][part.origin]
            origin.source.read(origin.fqn, part.region, out)
        elif part.is_plain:
            out.copy_(view)
        else:
            copy_elements(view, out)

    def target(self, i: int, part: Part) -> torch.Tensor:
        """View where a part goes; its memory is made if it is not there yet."""
        memory, buffer = self._result(i), part.spot.buffer
        return part.target(memory if buffer < self.tensors.views[i].num_blocks else self._staged(i, buffer))

    def _make(self, i: int) -> torch.Tensor:
        """Give the memory of a result that is not there yet."""
        recipe, request = self.tensors.views[i].recipe, self.tensors.requests[i]
        assert recipe is not None
        want = recipe.want
        if request is None or request.out is None:
            made = torch.empty(want.shape, dtype=want.dtype, device=self.device)
        else:
            made = request.out.detach() if request.out.requires_grad else request.out
            if made.shape != want.shape:
                raise SpecMismatch(f"its memory has the shape {tuple(made.shape)}, not {want.shape}.")
        self._results[i] = made
        return made

    def _result(self, i: int) -> torch.Tensor:
        found = self._results.get(i)
        return self._make(i) if found is None else found

    def _staged(self, i: int, buffer: int) -> torch.Tensor:
        buffers = self._staging.setdefault(i, {})
        if buffer not in buffers:
            recipe = self.tensors.views[i].recipe
            assert recipe is not None
            dtype, numel = recipe.staging[buffer]
            buffers[buffer] = torch.empty(numel, dtype=dtype, device=self._result(i).device)
        return buffers[buffer]

    def _at(self, i: int, spot: Spot) -> torch.Tensor:
        views = self.tensors.views[i]
        return views.spot(spot, self._result(i) if spot.buffer < views.num_blocks else self._staged(i, spot.buffer))

    def finish(self, i: int) -> None:
        """Copy what this rank keeps of a tensor, and compute what is made of what it got, which all has to be there."""
        recipe = self.tensors.views[i].recipe
        if recipe is None:
            return
        if i not in self.settled:
            self._copy_kept(i, recipe)
        for source, out in recipe.again:
            copy_elements(self._at(i, source), self._at(i, out))
        if recipe.steps:
            self._run(i)

    def _copy_kept(self, i: int, recipe: Recipe) -> None:
        may_wait = not (recipe.again or recipe.steps)
        for part in self.tensors.views[i].keeps:
            if not (may_wait and part.is_plain and self._defer(i, part)):
                self.read(i, part, self.target(i, part))

    def keep(self, start: int, stop: int) -> list[int]:
        """Copy what this rank keeps of some tensors and lies in rows, byte for byte.

        Returns:
            The tensors that had better be finished one by one, since their memory is no row.
        """
        keeps = self.rows.kept(start, stop)
        if self.has_far:
            return list(dict.fromkeys(keeps.tensors))
        if self.settled:
            keeps = keeps.where([i not in self.settled for i in keeps.tensors])
        starts, ends = self.starts_of(keeps.slots), self.ends_of(keeps.tensors)
        odd = {i for i, a, b in zip(keeps.tensors, starts, ends, strict=True) if not (a and b)}
        if odd:
            are_rows = [i not in odd for i in keeps.tensors]
            keeps, starts, ends = keeps.where(are_rows), *[list(compress(c, are_rows)) for c in (starts, ends)]
        move_rows(map(add, ends, keeps.outs), map(add, starts, keeps.firsts), keeps.sizes)
        return sorted(odd)

    def take(self, start: int, stop: int) -> list[torch.Tensor | None]:
        """Give this rank's results of some tensors, which are complete; ``None`` of those that it does not want."""
        tensors = self.tensors
        made: list[torch.Tensor | None] = []
        for i, request in enumerate(tensors.requests[start:stop], start):
            if tensors.views[i].recipe is None:
                made.append(None)
            else:
                made.append(self._result(i) if request is None or request.out is None else request.out)
        return made

    def _defer(self, i: int, part: Part) -> bool:
        """Have a part copied beside others, until the round ends; tell whether it had better be."""
        if not part.is_short and not self.has_far:
            return False
        view = self.source(i, part)
        if view is None:
            return False
        out = self.target(i, part)
        if out.is_neg() or out.is_conj():  # which many at once cannot be written
            return False
        if self.has_far and self.layer.is_far(view) and not self.layer.is_far(out):
            self._through.copy(view, out)
        else:
            self._short[0].append(out)
            self._short[1].append(view)
        return True

    def settle(self) -> None:
        """Do what was left for the end of the round; only then all results are complete."""
        outs, views = self._short
        if outs:
            torch._foreach_copy_(outs, views)  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]
        self._through.finish()

    def forget(self) -> None:
        """Let go of what a round needed; what has failed may have left something."""
        if self._written:
            increment_version(self._written)  # autograd has to know, as of copies by torch
        for some in (
            self._results,
            self._staging,
            self._sources,
            self._starts,
            self._ends,
            self._written,
            *self._short,
        ):
            some.clear()
        self._through.forget()

    def _run(self, i: int) -> None:
        views, result = self.tensors.views[i], self._result(i)
        recipe = views.recipe
        assert recipe is not None

        def at(view: View) -> torch.Tensor | None:
            if view.buffer >= views.num_blocks:
                return None
            return views.spot(Spot(view.buffer, view.dtype, view.offset, view.shape, view.strides), result)

        run_steps(recipe.steps, self._staging.pop(i, {}), at, result.device)


def _known(numbers: Sequence[int], known: dict[int, int], find: Callable[[int], torch.Tensor | None]) -> list[int]:
    """Give addresses of tensors by number, 0 for those that are no rows; new ones are looked at, and remembered."""
    new = [i for i in dict.fromkeys(numbers) if i not in known]
    if new:
        found = [(i, tensor) for i in new if (tensor := find(i)) is not None]
        known.update(dict.fromkeys(new, 0))
        known.update({i: at or 0 for (i, _), at in zip(found, addresses_of([one for _, one in found]), strict=True)})
    return list(map(known.__getitem__, numbers))
