"""Lifting a rewrite of a model to its optimizer: the same rewrite, column by column, and the groups follow.

Names were resolved once, over the model's names. A slot's value is parameter-like, scalar or other, judged against
the parameter's shape: parameter-like values take part in structural rewrites, scalars pass on or must agree where
parameters join, others are refused by name.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any

from attrs import evolve, frozen

from fdsd.algebra.apply import Applier, apply
from fdsd.algebra.ops import Distinct, Same
from fdsd.data.errors import FdsdError, listing
from fdsd.data.optim import OptimState, ParamGroup, Slot
from fdsd.data.problem import Problem
from fdsd.data.spec import TensorSpec, is_exact, spec_of
from fdsd.data.statedict import StateDict, same_leaf
from fdsd.pipeline.build import build_leaf
from fdsd.pipeline.rewrite import UNKNOWN, Assign, Rewrite, Scope
from fdsd.pipeline.step import Step

__all__ = ["lift_alone", "lift_beside", "scope_of"]


def lift_beside(
    step: Step, rewrite: Rewrite, model: Mapping[str, Any], optim: OptimState, problems: list[Problem]
) -> OptimState:
    """Lift a rewrite of a model to the optimizer beside it."""
    unknown = [fqn for fqn in _listed(optim) if fqn not in model]
    if unknown:
        text = f"the optimizer has {listing(unknown)}, which the model has not. Give both the same names first."
        problems.append(Problem("unmatched rule", text, tuple(unknown)))
        return optim
    return _Lift(step, rewrite, Scope(model), optim, problems).run()


def lift_alone(step: Step, optim: OptimState, problems: list[Problem]) -> OptimState:
    """Run a step on optimizer state without its model, over the names in its groups.

    A parameter's shape is taken from its state; where its slots disagree, only names can be rewritten.
    """
    scope = scope_of(optim)
    rewrite = step.rewrite(scope)
    problems.extend(rewrite.problems)
    return _Lift(step, rewrite, scope, optim, problems).run()


def scope_of(optim: OptimState) -> Scope:
    """Give what a step sees of an optimizer's state without its model."""
    return Scope({fqn: _shape_by_slots(optim, fqn) for fqn in _listed(optim)})


def _listed(optim: OptimState) -> list[str]:
    """All names that an optimizer knows, those of its groups first."""
    names = dict.fromkeys(optim.fqns)
    for column in optim.slots.values():
        names.update(dict.fromkeys(column))
    return list(names)


def _shape_by_slots(optim: OptimState, fqn: str) -> Any:
    found = [spec for column in optim.slots.values() if fqn in column and (spec := spec_of(column[fqn]))]
    shapes = {spec.shape for spec in found if spec.ndim}
    return next(TensorSpec(s.shape, s.dtype) for s in found if s.ndim) if len(shapes) == 1 else UNKNOWN


@frozen
class _Lift:
    """One rewrite on its way through one optimizer."""

    step: Step
    rewrite: Rewrite
    scope: Scope
    optim: OptimState
    problems: list[Problem]

    def run(self) -> OptimState:
        assigns = self._resolved()
        if self._refuses(assigns) or self._would_lose():
            return self.optim
        slots = {slot: self._column(slot, column, assigns) for slot, column in self.optim.slots.items()}
        return self.optim.replace(slots=slots, groups=self._groups(assigns))

    def _resolved(self) -> list[Assign]:
        """The assignments that matter here, with sources by the names under which the optimizer lists them.

        Torch lists a tied parameter under one of its names. If that one goes and another stays, the state follows.
        """
        assigns = [a for a in self.rewrite.assigns if not a.alias and a.sources]
        used = {name for a in assigns for name in a.sources}
        listed = dict.fromkeys(_listed(self.optim))
        gone = [name for name in listed if name not in used]
        stand_in: dict[str, str] = {}
        if gone:
            staying: dict[Hashable, list[str]] = {}
            for name in self.scope.names:
                if name in used and name not in listed and (key := self.scope.tie(name)) is not None:
                    staying.setdefault(key, []).append(name)
            for name in gone:
                if aliases := staying.get(self.scope.tie(name)):
                    stand_in[aliases.pop(0)] = name
        if not stand_in:
            return assigns
        return [evolve(a, sources=tuple([stand_in.get(s, s) for s in a.sources])) for a in assigns]

    def _refuses(self, assigns: Iterable[Assign]) -> bool:
        if self.step.computes is None:
            return False
        listed = set(_listed(self.optim))
        listed.update(self.scope.aliases([name for name in listed if name in self.scope]))
        touched = sorted({s for a in assigns if a.build is not None for s in a.sources if s in listed})
        if touched:
            text = (
                f"it cannot be lifted to the optimizer's state of {listing(touched)}, because {self.step.computes}. "
                "Apply it to the model alone: TrainState(p(state.model), extra=state.extra)."
            )
            self.problems.append(Problem("unsupported", text, tuple(touched)))
        return bool(touched)

    def _would_lose(self) -> bool:
        """Whether a name that becomes an alias has state of its own, which would be lost."""
        listed = set(_listed(self.optim))
        lost = [
            a.target
            for a in self.rewrite.assigns
            if a.alias and a.target in listed and self.scope.tie(a.target) != self.scope.tie(a.sources[0])
        ]
        if lost:
            text = (
                f"{listing(lost)} would become further names of other tensors, but the optimizer has state or options "
                "of their own for them. Drop those from the optimizer first."
            )
            self.problems.append(Problem("unsupported", text, tuple(lost)))
        return bool(lost)

    # -- columns -----------------------------------------------------------------------------------------

    def _column(self, slot: Slot, column: StateDict[Any], assigns: Iterable[Assign]) -> dict[str, Any]:
        scalar_at_0_dim = self._zero_dim_is_scalar(slot, column)
        applier, made, given = Applier(), dict[str, Any](), set[str]()
        for assign in assigns:
            present = [name for name in assign.sources if name in column]
            if not present:
                continue
            if len(present) < len(assign.sources):
                absent = [name for name in assign.sources if name not in column]
                self._problem(
                    "partial group",
                    f"slot {slot!r} of {assign.target!r}: {listing(present)} have it, {listing(absent)} have not. "
                    "Parts that are joined must all have been trained, or none.",
                    assign.sources,
                )
                continue
            values = [column[name] for name in assign.sources]
            if assign.build is None:
                made[assign.target] = values[0]
            elif self.step.leafwise:
                made[assign.target] = self._built(slot, applier, assign, values)
            elif all(self._is_scalar(n, v, scalar_at_0_dim) for n, v in zip(assign.sources, values, strict=True)):
                made[assign.target] = self._scalar(slot, assign, values, given)
            elif self._like_parameters(slot, assign, values):
                made[assign.target] = self._built(slot, applier, assign, values)
        return made

    def _built(self, slot: Slot, applier: Applier, assign: Assign, values: list[Any]) -> Any:
        found: list[Problem] = []
        made = build_leaf(applier, assign, values, found)
        for problem in found:
            self._problem(problem.kind, f"slot {slot!r}: {problem.message}", problem.names)
        return made

    def _zero_dim_is_scalar(self, slot: Slot, column: StateDict[Any]) -> bool:
        """Whether 0-dim state of a 0-dim parameter counts the steps, rather than being like the parameter.

        The other parameters of the column tell; without any, a slot named ``step`` is a scalar.
        """
        for name, value in column.items():
            spec, param = spec_of(value), self._param(name)
            if spec is not None and param is not None and param.ndim:
                return spec.ndim == 0
        return slot == "step" or (isinstance(slot, tuple) and bool(slot) and slot[-1] == "step")

    def _param(self, name: str) -> TensorSpec | None:
        return self.scope.spec(name) if self.scope.is_known(name) else None

    def _is_scalar(self, name: str, value: Any, scalar_at_0_dim: bool) -> bool:
        spec, param = spec_of(value), self._param(name)
        return spec is None or (spec.ndim == 0 and (param is None or param.ndim > 0 or scalar_at_0_dim))

    def _like_parameters(self, slot: Slot, assign: Assign, values: list[Any]) -> bool:
        for name, value in zip(assign.sources, values, strict=True):
            spec, param = spec_of(value), self._param(name)
            if param is None:
                self._problem(
                    "unsupported",
                    f"slot {slot!r} of {name!r}: the parameter's shape is not known from the optimizer's state "
                    "alone. Rewrite a TrainState, which has the model too.",
                    (name,),
                )
                return False
            if spec is None or spec.shape != param.shape:
                self._problem(
                    "unsupported",
                    f"slot {slot!r} of {name!r} is {spec or type(value).__name__}, not of the parameter's shape "
                    f"{param.shape}, and cannot follow it into {assign.target!r}. Drop this slot, or only rename.",
                    (name,),
                )
                return False
        return True

    def _scalar(self, slot: Slot, assign: Assign, values: list[Any], given: set[str]) -> Any:
        """Pass a scalar on, once it agrees among the parameters that join; each target has its own."""
        first = values[0]
        if len(values) > 1 and not self._agree(slot, assign, values):
            return UNKNOWN
        if spec_of(first) is None:
            return first
        if len(values) > 1 and not _is_plain(first):
            first = apply(Same(assign.sources, f"slot {slot!r}"), *values)
        if assign.sources[0] in given:
            return apply(Distinct(assign.target), first)
        given.update(assign.sources)
        return first

    def _agree(self, slot: Slot, assign: Assign, values: list[Any]) -> bool:
        for name, value in zip(assign.sources[1:], values[1:], strict=True):
            if not _equal_scalars(values[0], value):
                self._problem(
                    "spec",
                    f"slot {slot!r} is {_scalar_text(values[0])} for {assign.sources[0]!r} but {_scalar_text(value)} "
                    f"for {name!r}; joined into {assign.target!r} they must agree. Drop this slot, or train alike.",
                    assign.sources,
                )
                return False
        return True

    # -- groups ------------------------------------------------------------------------------------------

    def _groups(self, assigns: Iterable[Assign]) -> tuple[ParamGroup, ...]:
        home = {fqn: (g, i) for g, group in enumerate(self.optim.groups) for i, fqn in enumerate(group.fqns)}
        members: list[list[tuple[int, str]]] = [[] for _ in self.optim.groups]
        for assign in assigns:
            homes = [home.get(name) for name in assign.sources]
            found = {place[0] for place in homes if place is not None}
            if not found:
                continue
            if len(found) > 1 or None in homes:
                where = ", ".join(
                    f"{n!r} in {'no group' if p is None else f'group {p[0]}'}"
                    for n, p in list(zip(assign.sources, homes, strict=True))[:10]
                )
                self._problem(
                    "unsupported",
                    f"the parts of {assign.target!r} are in different parameter groups: {where}. "
                    "Move them into one group first.",
                    assign.sources,
                )
                continue
            members[found.pop()].append((min(place[1] for place in homes if place is not None), assign.target))
        return tuple(
            evolve(group, fqns=tuple([target for _, target in sorted(named, key=lambda pair: pair[0])]))
            for group, named in zip(self.optim.groups, members, strict=True)
        )

    def _problem(self, kind: str, text: str, names: Iterable[str]) -> None:
        self.problems.append(Problem(kind, text, tuple(names)))


def _is_plain(value: Any) -> bool:
    return is_exact(value) or isinstance(value, TensorSpec)


def _equal_scalars(a: Any, b: Any) -> bool:
    """Whether two scalars agree, as far as their values are here."""
    specs = spec_of(a), spec_of(b)
    if specs == (None, None):
        return same_leaf(a, b)
    if specs[0] != specs[1]:
        return False
    if not (_is_plain(a) and _is_plain(b)) or isinstance(a, TensorSpec) or isinstance(b, TensorSpec):
        return True
    try:
        apply(Same(("a", "b"), "scalar"), a, b)
    except FdsdError:
        return False
    return True


def _scalar_text(value: Any) -> str:
    spec = spec_of(value)
    return repr(value) if spec is None else str(value.item()) if hasattr(value, "item") else str(spec)
