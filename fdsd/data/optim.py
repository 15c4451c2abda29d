"""The state of an optimizer as a value: columns by slot, and the parameter groups.

Torch's own dict is read and written in ``osd``; nothing here touches an optimizer, a module or a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from attrs import field, frozen

from fdsd.data.columns import Slot, is_empty, to_columns
from fdsd.data.errors import NameConflict, SpecMismatch, UnknownName, listing, plural
from fdsd.data.groups import ParamGroup, twice
from fdsd.data.naming import nearest
from fdsd.data.osd import Names, read_osd, write_osd
from fdsd.data.statedict import StateDict
from fdsd.data.values import has_tensor, part_at, read_only, register, same_mapping

__all__ = ["OptimState", "ParamGroup", "Slot"]


def _to_slots(slots: Mapping[Slot, Mapping[str, Any]]) -> Mapping[Slot, StateDict[Any]]:
    return MappingProxyType(to_columns(slots))


def _to_groups(groups: Iterable[ParamGroup]) -> tuple[ParamGroup, ...]:
    made: tuple[Any, ...] = tuple(groups)
    if odd := [type(group).__name__ for group in made if not isinstance(group, ParamGroup)]:
        raise SpecMismatch(f"OptimState: groups are ParamGroup, not {listing(set(odd))}.")
    return made


@frozen(eq=False, repr=False)
class OptimState:
    """The state of an optimizer by columns: for each slot a state dict over the parameters that have it.

    Args:
        slots: A state dict (or any mapping) for each slot. A slot is a string (``"exp_avg"``); state that is
            nested in dicts has a tuple path (``("kron", 0)``), as has a key that is no string (``(0,)``). The
            empty path ``()`` holds entries that have no slots: ``{}`` for a parameter whose state is empty,
            as opposed to a parameter without state.
        groups: The parameter groups, in the optimizer's order.
        extra: Other entries of torch's dict.

    Raises:
        NameConflict: A parameter is in two groups, or has two values in one place.
        Unsupported: A slot is neither a string nor a tuple.
        SpecMismatch: A group is no ``ParamGroup``.

    Equality: the same columns, whatever their order, and the same groups in the same order; tensors by
    identity.

    In optree's namespace ``"fdsd"`` the values of the slots are leaves, as are options and extra entries that
    hold tensors; the others belong to the structure.

    Law: ``OptimState.from_torch(osd, fqns).to_torch(ids=True) == osd``, and likewise by names.

    >>> state = OptimState({"step": {"w": 3}}, (ParamGroup(("w", "b"), {"lr": 0.1}),))
    >>> state.fqns, state.slots_of("w"), state.slots_of("b")
    (('w', 'b'), {'step': 3}, {})
    >>> state.to_torch(ids=True)
    {'state': {0: {'step': 3}}, 'param_groups': [{'lr': 0.1, 'params': [0, 1]}]}
    """

    slots: Mapping[Slot, StateDict[Any]] = field(factory=dict[Slot, Any], converter=_to_slots)
    groups: tuple[ParamGroup, ...] = field(default=(), converter=_to_groups)
    extra: Mapping[str, Any] = field(factory=dict[str, Any], converter=read_only, kw_only=True)

    def __attrs_post_init__(self) -> None:
        if double := twice(self.fqns):
            raise NameConflict(f"OptimState: {listing(double)} in two parameter groups. Each name may stand once.")
        if clash := [key for key in ("state", "param_groups") if key in self.extra]:
            raise NameConflict(f"OptimState: {listing(clash)} in extra: that is the place of slots and groups.")

    @classmethod
    def from_torch(cls, osd: Mapping[str, Any], fqns: Names | None = None) -> OptimState:
        """Read the dict that ``optimizer.state_dict()`` or ``get_optimizer_state_dict`` gives.

        Args:
            osd: Torch's dict, by ids or by FQN. Its leaves are shared, not copied; the dict is not changed.
            fqns: For a dict by ids: the names in the order of the ids, or ``{id: name}``. An optimizer made
                from named parameters has them as ``param_names`` already.

        Raises:
            UnknownName: ``state`` or ``param_groups`` is missing, ids have no names, an id is in no group.
            SpecMismatch: The number of names is wrong.
            NameConflict: A name or an id stands twice, or ``fqns`` contradicts the dict's ``param_names``.
            Unsupported: Ids and names are mixed.

        >>> osd = {"state": {0: {"step": 3}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
        >>> OptimState.from_torch(osd, ["w"]).slots["step"]["w"]
        3
        """
        slots, groups, extra = read_osd(osd, fqns)
        return cls(slots, groups, extra=extra)

    def to_torch(self, *, ids: bool = False) -> dict[str, Any]:
        """Write torch's dict: fresh dicts and lists, shared leaves.

        Args:
            ids: By ids ``0..n-1`` in group order, as ``optimizer.state_dict()`` counts; otherwise by FQN.
                ``optimizer.load_state_dict`` takes both.

        >>> OptimState({}, (ParamGroup(("w",), {"lr": 0.1}),)).to_torch()
        {'state': {}, 'param_groups': [{'lr': 0.1, 'params': ['w']}]}
        """
        return write_osd(self.slots, self.groups, self.extra, ids=ids)

    @property
    def fqns(self) -> tuple[str, ...]:
        """The names of the parameters of all groups, in order."""
        return tuple([name for group in self.groups for name in group.fqns])

    def slots_of(self, fqn: str) -> dict[Slot, Any]:
        """Give the slots that one parameter has; none for a parameter without state.

        Raises:
            UnknownName: No group and no slot has the name.
        """
        found = {slot: column[fqn] for slot, column in self.slots.items() if fqn in column}
        if not found and fqn not in (names := self.fqns):
            close = nearest(fqn, list(names))
            raise UnknownName(
                f"{fqn!r} is not in this optimizer state of {plural(len(names), 'parameter')}"
                + (f"; the nearest name is {close[0]!r}." if close else ".")
            )
        return {slot: value for slot, value in found.items() if slot != () or not is_empty(value)}

    def replace(
        self,
        *,
        slots: Mapping[Slot, Mapping[str, Any]] | None = None,
        groups: Iterable[ParamGroup] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> OptimState:
        """Give the same state with other slots, groups or extra entries.

        >>> OptimState({"step": {"w": 3}}).replace(slots={}).slots
        mappingproxy({})
        """
        return OptimState(
            self.slots if slots is None else slots,
            self.groups if groups is None else groups,
            extra=self.extra if extra is None else extra,
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, OptimState):
            return NotImplemented
        same = self.groups == other.groups and dict(self.slots) == dict(other.slots)
        return same and same_mapping(self.extra, other.extra)

    __hash__ = None  # type: ignore[assignment]  # leaves are compared, and tensors have no value hash

    def __repr__(self) -> str:
        slots = [f"{slot!r}: {plural(len(column), 'name')}" for slot, column in list(self.slots.items())[:12]]
        if len(self.slots) > len(slots):
            slots.append(f"... and {len(self.slots) - len(slots)} more")
        groups = [f"\n  {group!r}," for group in self.groups[:4]]
        if len(self.groups) > len(groups):
            groups.append(f"\n  ... and {len(self.groups) - len(groups)} more,")
        extra = f", extra={dict(self.extra)!r}" if self.extra else ""
        return f"OptimState({{{', '.join(slots)}}}, (" + "".join(groups) + ("\n)" if groups else ")") + extra + ")"

    def __reduce__(self) -> Any:
        return _rebuild, (dict(self.slots), self.groups, dict(self.extra))


def _rebuild(slots: dict[Slot, Any], groups: tuple[ParamGroup, ...], extra: dict[str, Any]) -> OptimState:
    """Make a state from parts in their one form, without checks: optree may put any objects in."""
    made = OptimState.__new__(OptimState)
    object.__setattr__(made, "slots", MappingProxyType(slots))
    object.__setattr__(made, "groups", groups)
    object.__setattr__(made, "extra", MappingProxyType(extra))
    return made


class _Frame:
    """What optree keeps of a flattened state: slots, groups and extra entries without their tensors."""

    __slots__ = ("extra", "groups", "places", "slots")

    def __init__(self, slots: tuple[Slot, ...], groups: tuple[ParamGroup, ...], extra: dict[str, Any]) -> None:
        self.slots = slots
        self.places: list[tuple[Any, ...]] = [("slots", slot) for slot in slots]
        self.groups = tuple([self._group(i, group) for i, group in enumerate(groups)])
        self.extra = self._without(extra, ("extra",))

    def _group(self, i: int, group: ParamGroup) -> ParamGroup:
        return ParamGroup(group.fqns, self._without(group.options, ("groups", i)), named=group.named)

    def _without(self, values: Mapping[str, Any], place: tuple[Any, ...]) -> dict[str, Any]:
        held = [key for key, value in values.items() if has_tensor(value)]
        self.places += [(*place, key) for key in held]
        return {**values, **dict.fromkeys(held, ...)}  # the ellipsis keeps the place in the order

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Frame):
            return False
        mine, theirs = (self.slots, self.places, self.groups), (other.slots, other.places, other.groups)
        return mine == theirs and same_mapping(self.extra, other.extra)

    def __hash__(self) -> int:
        return hash(self.slots)

    def __repr__(self) -> str:
        return f"slots={list(self.slots)}, groups={list(self.groups)}"


def _flatten(state: OptimState) -> tuple[tuple[Any, ...], _Frame, tuple[Any, ...]]:
    frame = _Frame(tuple(state.slots), state.groups, dict(state.extra))
    children = [part_at(state, place) for place in frame.places]
    return tuple(children), frame, tuple(frame.places)


def _unflatten(frame: _Frame, children: Iterable[Any]) -> OptimState:
    slots: dict[Slot, Any] = {}
    extra = dict(frame.extra)
    options = [dict(group.options) for group in frame.groups]
    for place, child in zip(frame.places, children, strict=True):
        if place[0] == "slots":
            slots[place[1]] = child
        elif place[0] == "extra":
            extra[place[1]] = child
        else:
            options[place[1]][place[2]] = child
    groups = [ParamGroup(g.fqns, own, named=g.named) for g, own in zip(frame.groups, options, strict=True)]
    return _rebuild(slots, tuple(groups), extra)


register(OptimState, _flatten, _unflatten)
