"""`Memory`: what this rank holds and gets while tensors are delivered: views of sources, results, what is done to both.

How messages travel is unknown here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from attrs import Factory, define, field

from fdsd.algebra.dtypes import copy_elements
from fdsd.algebra.ops.leaves import Origin
from fdsd.algebra.plan import View
from fdsd.data.errors import SpecMismatch
from fdsd.data.memory import address_of
from fdsd.engine.overwriting import Kept, memory_of
from fdsd.engine.request import Request
from fdsd.engine.staging import ACCELERATOR, Layer, Staging
from fdsd.engine.steps import run_steps
from fdsd.engine.views import Part, Views
from fdsd.layout.cutting import Spot
from fdsd.layout.wiring import Recipe

__all__ = ["Delivered", "Memory"]


class Delivered:
    """One tensor to be delivered, on this rank.

    Attributes:
        name: Its FQN.
        views: Where its parts lie here.
        request: What this rank asks for; ``None`` if it does not know the tensor.
        origins: The source tensors, as far as this rank knows them.
        is_settled: Whether the result is the source's memory already.
    """

    __slots__ = ("is_settled", "name", "origins", "request", "views")

    def __init__(self, name: str, views: Views, request: Request | None, origins: Sequence[Origin]) -> None:
        self.name = name
        self.views = views
        self.request = request
        self.origins = origins
        self.is_settled = False


@define(eq=False, slots=False)
class Memory:
    """The memory of this rank.

    Attributes:
        tensors: All tensors, in order.
        kept: The sources that were copied before anything is written.
        device: Where fresh results are made.
        layer: The accelerators.
    """

    tensors: Sequence[Delivered]
    kept: Kept
    device: torch.device
    layer: Layer = ACCELERATOR
    _results: dict[int, torch.Tensor] = field(factory=dict[int, torch.Tensor], init=False)
    _staging: dict[int, dict[int, torch.Tensor]] = field(factory=dict[int, dict[int, torch.Tensor]], init=False)
    _through: Staging = field(default=Factory(lambda self: Staging(self.layer), takes_self=True), init=False)
    _short: tuple[list[torch.Tensor], list[torch.Tensor]] = field(factory=lambda: ([], []), init=False)
    _sources: dict[tuple[int, int], torch.Tensor | None] = field(
        factory=dict[tuple[int, int], "torch.Tensor | None"], init=False
    )
    _starts: dict[tuple[int, int], int | None] = field(factory=dict[tuple[int, int], "int | None"], init=False)

    @cached_property
    def has_far(self) -> bool:
        """Whether any tensor is in the memory of an accelerator."""
        if not self.layer.is_there():
            return False
        known = [memory_of(origin) for tensor in self.tensors for origin in tensor.origins]
        known += [tensor.request.out for tensor in self.tensors if tensor.request is not None]
        known.append(torch.empty(0, device=self.device))
        return any(tensor is not None and self.layer.is_far(tensor) for tensor in known)

    def source(self, i: int, part: Part) -> torch.Tensor | None:
        """View a part in the memory of its source; ``None`` if it is not in memory and has to be read."""
        key = i, part.origin
        memory = self._sources[key] if key in self._sources else self._fetch(*key)
        return None if memory is None else part.source(memory)

    def start(self, i: int, origin: int) -> int | None:
        """Give the address of a source tensor in ordinary memory, where its bytes lie in one row; else ``None``."""
        key = i, origin
        if key not in self._starts:
            memory = self._sources[key] if key in self._sources else self._fetch(*key)
            self._starts[key] = None if memory is None else address_of(memory)
        return self._starts[key]

    def _fetch(self, i: int, origin: int) -> torch.Tensor | None:
        tensor = self.tensors[i]
        memory = self.kept.memory(tensor.origins[origin])
        if memory is not None:
            tensor.views.check(origin, memory)
            if memory.is_conj() or memory.is_neg():
                memory = memory.resolve_conj().resolve_neg()
        self._sources[i, origin] = memory
        return memory

    def read(self, i: int, part: Part, out: torch.Tensor) -> None:
        """Read a part of a source tensor into memory of its shape."""
        view = self.source(i, part)
        if view is None:
            origin = self.tensors[i].origins[part.origin]
            origin.source.read(origin.fqn, part.region, out)
        elif part.is_plain:
            out.copy_(view)
        else:
            copy_elements(view, out)

    def target(self, i: int, part: Part) -> torch.Tensor:
        """View where a part goes; its memory is made if it is not there yet."""
        memory = self._results.get(i)
        if memory is None:
            memory = self._make(i)
        buffer = part.spot.buffer
        return part.target(memory if buffer < self.tensors[i].views.num_blocks else self._staged(i, buffer))

    def _make(self, i: int) -> torch.Tensor:
        """Give the memory of a result that is not there yet."""
        tensor = self.tensors[i]
        recipe, request = tensor.views.recipe, tensor.request
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
            recipe = self.tensors[i].views.recipe
            assert recipe is not None
            dtype, numel = recipe.staging[buffer]
            buffers[buffer] = torch.empty(numel, dtype=dtype, device=self._result(i).device)
        return buffers[buffer]

    def _at(self, i: int, spot: Spot) -> torch.Tensor:
        views = self.tensors[i].views
        return views.spot(spot, self._result(i) if spot.buffer < views.num_blocks else self._staged(i, spot.buffer))

    def finish(self, i: int) -> torch.Tensor | None:
        """Do what is to be done once all that others send of a tensor is there, and give this rank's result.

        Args:
            i: The tensor.

        Returns:
            The result; ``None`` if this rank wants nothing.
        """
        tensor = self.tensors[i]
        views = tensor.views
        if views.recipe is None:
            return None
        result = self._results.get(i)
        if result is None:
            result = self._make(i)
        if not views.is_received:
            self._complete(i, views.recipe)
        del self._results[i]
        request = tensor.request
        return result if request is None or request.out is None else request.out

    def _complete(self, i: int, recipe: Recipe) -> None:
        """Copy what this rank keeps, and compute what is made of what it got."""
        tensor = self.tensors[i]
        if not tensor.is_settled:
            may_wait = not (recipe.again or recipe.steps)
            for part in tensor.views.keeps:
                if not (may_wait and part.is_plain and self._defer(i, part)):
                    self.read(i, part, self.target(i, part))
        for source, out in recipe.again:
            copy_elements(self._at(i, source), self._at(i, out))
        if recipe.steps:
            self._run(i)

    def _defer(self, i: int, part: Part) -> bool:
        """Have a part copied beside others, until the round ends; tell whether it had better be."""
        if not part.is_short and not self.has_far:
            return False
        view = self.source(i, part)
        if view is None:
            return False
        out = self.target(i, part)
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
        for some in (self._results, self._staging, self._sources, self._starts, *self._short):
            some.clear()
        self._through.forget()

    def _run(self, i: int) -> None:
        tensor, result = self.tensors[i], self._result(i)
        views, recipe = tensor.views, tensor.views.recipe
        assert recipe is not None

        def at(view: View) -> torch.Tensor | None:
            if view.buffer >= views.num_blocks:
                return None
            return views.spot(Spot(view.buffer, view.dtype, view.offset, view.shape, view.strides), result)

        run_steps(recipe.steps, self._staging.pop(i, {}), at, result.device)
