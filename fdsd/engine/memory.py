"""`Memory`: what this rank holds and gets while tensors are delivered: views of sources, results, what is done to both.

How messages travel is unknown here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import define, field

from fdsd.algebra.dtypes import copy_elements
from fdsd.algebra.ops.leaves import Origin
from fdsd.algebra.plan import View
from fdsd.data.errors import SpecMismatch
from fdsd.engine.overwriting import Kept
from fdsd.engine.request import Request
from fdsd.engine.steps import run_steps
from fdsd.engine.views import Views
from fdsd.layout.cutting import Spot

__all__ = ["Delivered", "Memory"]


@define(eq=False)
class Delivered:
    """One tensor to be delivered, on this rank.

    Attributes:
        name: Its FQN.
        views: Where its parts lie here.
        request: What this rank asks for; ``None`` if it does not know the tensor.
        origins: The source tensors, as far as this rank knows them.
        is_settled: Whether the result is the source's memory already.
    """

    name: str
    views: Views
    request: Request | None = None
    origins: Sequence[Origin] = ()
    is_settled: bool = False


@define(eq=False)
class Memory:
    """The memory of this rank.

    Attributes:
        tensors: All tensors, in order.
        kept: The sources that were copied before anything is written.
        device: Where fresh results are made.
    """

    tensors: Sequence[Delivered]
    kept: Kept
    device: torch.device
    _results: dict[int, torch.Tensor] = field(factory=dict, init=False)
    _staging: dict[int, dict[int, torch.Tensor]] = field(factory=dict, init=False)
    _sources: dict[tuple[int, int], torch.Tensor | None] = field(factory=dict, init=False)

    def source(self, i: int, overlap: int, part: int) -> torch.Tensor | None:
        """View a part of an overlap (-1: all of it) of a source; ``None`` if it is not in memory and has to be read."""
        views = self.tensors[i].views
        key = i, views.wiring.origins[overlap]
        memory = self._sources[key] if key in self._sources else self._fetch(*key)
        return None if memory is None else views.source(overlap, part, memory)

    def _fetch(self, i: int, origin: int) -> torch.Tensor | None:
        tensor = self.tensors[i]
        memory = self.kept.memory(tensor.origins[origin])
        if memory is not None:
            tensor.views.check(origin, memory)
            if memory.is_conj() or memory.is_neg():
                memory = memory.resolve_conj().resolve_neg()
        self._sources[i, origin] = memory
        return memory

    def read(self, i: int, overlap: int, part: int, out: torch.Tensor) -> None:
        """Read a part of an overlap of a source tensor into memory of its shape."""
        view = self.source(i, overlap, part)
        if view is not None:
            copy_elements(view, out)
            return
        tensor = self.tensors[i]
        origin = tensor.origins[tensor.views.wiring.origins[overlap]]
        origin.source.read(origin.fqn, tensor.views.part(overlap, part)[0], out)

    def target(self, i: int, overlap: int, part: int) -> torch.Tensor:
        """View where a part of an overlap goes; its memory is made if it is not there yet."""
        views = self.tensors[i].views
        buffer = views.part(overlap, part)[1].buffer
        return views.target(overlap, part, self._result(i) if views.is_result(buffer) else self._staged(i, buffer))

    def _result(self, i: int) -> torch.Tensor:
        found = self._results.get(i)
        if found is None:
            tensor = self.tensors[i]
            recipe, request = tensor.views.recipe, tensor.request
            assert recipe is not None
            if request is not None and request.out is not None:
                found = request.out.detach()
                if tuple(found.shape) != recipe.want.shape:
                    raise SpecMismatch(f"its memory has the shape {tuple(found.shape)}, not {recipe.want.shape}.")
            else:
                found = torch.empty(recipe.want.shape, dtype=recipe.want.dtype, device=self.device)
            self._results[i] = found
        return found

    def _staged(self, i: int, buffer: int) -> torch.Tensor:
        buffers = self._staging.setdefault(i, {})
        if buffer not in buffers:
            recipe = self.tensors[i].views.recipe
            assert recipe is not None
            dtype, numel = recipe.staging[buffer]
            buffers[buffer] = torch.empty(numel, dtype=dtype, device=self._result(i).device)
        return buffers[buffer]

    def _at(self, i: int, spot: Spot) -> torch.Tensor:
        views = self.tensors[i].views
        return views.spot(spot, self._result(i) if views.is_result(spot.buffer) else self._staged(i, spot.buffer))

    def finish(self, i: int) -> torch.Tensor | None:
        """Do what is to be done once all that others send of a tensor is there, and give this rank's result.

        Args:
            i: The tensor.

        Returns:
            The result; ``None`` if this rank wants nothing.
        """
        tensor = self.tensors[i]
        recipe = tensor.views.recipe
        if recipe is None:
            return None
        result = self._result(i)
        if not tensor.is_settled:
            for overlap in tensor.views.keeps:
                self.read(i, overlap, -1, self.target(i, overlap, -1))
        for source, out in recipe.again:
            copy_elements(self._at(i, source), self._at(i, out))
        if recipe.steps:
            self._run(i)
        del self._results[i]
        request = tensor.request
        return result if request is None or request.out is None else request.out

    def forget(self) -> None:
        """Let go of what a round needed; what has failed may have left something."""
        for some in (self._results, self._staging, self._sources):
            some.clear()

    def _run(self, i: int) -> None:
        tensor, result = self.tensors[i], self._result(i)
        views, recipe = tensor.views, tensor.views.recipe
        assert recipe is not None

        def at(view: View) -> torch.Tensor | None:
            if not views.is_result(view.buffer):
                return None
            return views.spot(Spot(view.buffer, view.dtype, view.offset, view.shape, view.strides), result)

        run_steps(recipe.steps, self._staging.pop(i, {}), at, result.device)
