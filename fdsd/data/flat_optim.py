"""The flat form of optimizer state, both ways: ``state.<fqn>.<slot>`` and ``param_groups.<fqn>.<option>``.

The form of torch's ``flatten_optimizer_state_dict``, as pure functions; the transforms that use them are
elsewhere. What it cannot carry, and what ``unflatten`` gives without ``like`` (with it, all is restored):

* Groups: parameters with equal options form one group, in order of first appearance; an empty group is lost.
* A parameter whose state is ``{}`` has none, and an empty dict within a state is lost.
* Keys of nested state are strings, cut at the dots: slot ``("kron", 0)`` comes back as ``("kron", "0")``, and items
  of a list of tensors likewise; torch's own flat form keeps such lists whole, and is read too.
* State under a name that no group lists: the slot is the part behind the last dot.
* Other entries of torch's dict (``OptimState.extra``) are lost.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from fdsd.data.columns import Item, Path, Slot, as_path, as_slot, is_empty, join_sequences, walk
from fdsd.data.errors import NameConflict, SpecMismatch, UnknownName, Unsupported, listing, plural
from fdsd.data.groups import ParamGroup, twice
from fdsd.data.optim import OptimState
from fdsd.data.statedict import StateDict
from fdsd.data.values import is_dict, is_sequence, same_mapping, same_option, several

__all__ = ["flatten", "unflatten"]

_STATE = "state."
_GROUPS = "param_groups."

Options = dict[str, dict[Any, Any]]
Rows = dict[str, dict[Path, Any]]


def flatten(state: OptimState, *, whole_sequences: bool = False) -> StateDict[Any]:
    """Give the flat form: ``state.<fqn>.<slot>``, then ``param_groups.<fqn>.<option>`` for every option.

    Args:
        state: The state of an optimizer. Keys of nested state are joined by dots.
        whole_sequences: Whether a list or tuple of tensors is one value, as in torch's own flat form.

    Returns:
        The flat form, parameter by parameter in group order. Leaves are shared.

    Raises:
        NameConflict: Two values would have one flat name (``("kron", 0)`` beside ``("kron", "0")``).
        Unsupported: The name of an option has a dot, so that no reader could tell it from the parameter's.

    Law: ``unflatten(flatten(s), like=s) == s``.

    >>> flatten(OptimState({"step": {"w": 3}}, (ParamGroup(("w",), {"lr": 0.1}),))).to_dict()
    {'state.w.step': 3, 'param_groups.w.lr': 0.1}
    """
    slots = join_sequences(state.slots) if whole_sequences else state.slots
    pairs = [(item.key, item.value) for item in _state_items(state, slots)]
    pairs += _option_pairs(state)
    made = dict(pairs)
    if len(made) < len(pairs):
        _refuse_twice([key for key, _ in pairs])
    return StateDict.trusted(made)


class _Item(NamedTuple):
    """One value of a parameter's state: its flat key, the parameter, and the path in its state."""

    key: str
    fqn: str
    path: Path
    value: Any


def _refuse_twice(keys: Iterable[str]) -> None:
    if double := twice(keys):
        raise NameConflict(
            f"flatten_optim: {plural(len(double), 'flat name')} for two values each: {listing(double)}. "
            "Rename the parameters or the slots first."
        )


def _text(path: Path) -> str:
    return ".".join(map(str, path))


def _state_items(state: OptimState, slots: Mapping[Slot, Mapping[str, Any]]) -> Iterator[_Item]:
    rows: dict[str, list[tuple[str, Path, Any]]] = {name: [] for name in state.fqns}
    for slot, column in slots.items():
        path = as_path(slot)
        text = f".{_text(path)}" if path else ""
        for name, value in column.items():
            if not is_empty(value):
                rows.setdefault(name, []).append((text, path, value))
    for name, row in rows.items():
        for text, path, value in row:
            yield _Item(f"{_STATE}{name}{text}", name, path, value)


def _options_of(group: ParamGroup) -> list[tuple[Any, str, Any]]:
    """List the options of a group, with their names as texts."""
    options: list[tuple[Any, str, Any]] = [(option, str(option), value) for option, value in group.options.items()]
    if odd := [text for _, text, _ in options if "." in text]:
        raise Unsupported(
            f"flatten_optim: options with a dot in their name cannot be told from names of parameters: "
            f"{listing(odd)}. Rename them in the groups first."
        )
    if group.named:
        options.append(("param_names", "param_names", list(group.fqns)))  # whole for each name, as torch does
    return options


def _option_pairs(state: OptimState) -> list[tuple[str, Any]]:
    made: list[tuple[str, Any]] = []
    for group in state.groups:
        options = [(f".{text}", value) for _, text, value in _options_of(group)]
        for name in group.fqns:
            start = _GROUPS + name
            made += [(start + text, value) for text, value in options]
    return made


def unflatten(flat: Mapping[str, Any], like: OptimState | None = None, *, strict: bool = True) -> OptimState:
    """Read the flat form.

    Args:
        flat: ``state.<fqn>.<slot>`` and ``param_groups.<fqn>.<option>``, in any order.
        like: A state whose groups, slots and empty parts the result takes over; its values are not used.
            Options that only the flat form has are added to the group.
        strict: With ``like``: whether every value of ``like`` must be in the flat form, and every name of the
            flat form in ``like``. Otherwise missing options keep the value of ``like``, missing state stays
            uninitialised, and names that ``like`` does not know are left out.

    Returns:
        The state; without ``like`` in the canonical form that this module's description gives.

    Raises:
        NameConflict: A key can be read in two ways, and ``like`` does not tell which: ``state.a.b.c`` is slot
            ``b.c`` of ``a`` or slot ``c`` of ``a.b``.
        SpecMismatch: Parameters of one group of ``like`` have different values of an option.
        UnknownName: A key is of neither form; or something is missing or unknown, and ``strict``.

    Law: ``unflatten(flatten(s), like=s) == s``.

    >>> unflatten({"state.w.step": 3, "param_groups.w.lr": 0.1})
    OptimState({'step': 1 name}, (
      ParamGroup(('w',), {'lr': 0.1}),
    ))
    """
    _check_keys(flat)
    known = _Known(like)
    options = _read_options(flat, known)
    rows = _read_state(flat, known, options)
    if like is None:
        return OptimState(_to_slots(rows), _canonical_groups(options))
    if strict:
        _check_complete(flat, known, {*options, *rows})
    groups = _groups_like(like, options, strict=strict)
    _restore_empty(rows, like)
    kept = {name: row for name, row in rows.items() if name in known.names}
    return OptimState(_to_slots(kept), groups, extra=like.extra)


def _check_keys(flat: Mapping[str, Any]) -> None:
    given: Iterable[Any] = flat
    names = [key for key in given if not (isinstance(key, str) and key.startswith(_STATE))]
    start = len(_GROUPS)
    if odd := [key for key in names if not (isinstance(key, str) and key.startswith(_GROUPS) and "." in key[start:])]:
        raise UnknownName(
            f"unflatten_optim: {plural(len(odd), 'key')} not of the form 'state.<fqn>.<slot>' or "
            f"'param_groups.<fqn>.<option>': {listing(odd)}."
        )


class _Known:
    """What ``like`` tells about keys: its own, its names, the slots and options that texts stand for."""

    def __init__(self, like: OptimState | None) -> None:
        self._like = OptimState() if like is None else like
        items = list(_state_items(self._like, self._like.slots))
        self.state = {item.key: item for item in items}
        if len(self.state) < len(items):
            _refuse_twice(item.key for item in items)
        groups = [_options_of(group) for group in self._like.groups]
        for options in groups:
            _refuse_twice(text for _, text, _ in options)
        self.options = {text: option for options in groups for option, text, _ in options}
        self._whole = join_sequences(self._like.slots)
        self.sequences = {
            _text(as_path(slot)): type(value)
            for slot, column in self._whole.items()
            for value in column.values()
            if is_sequence(value)
        }
        self.names: set[str] = set(self._like.fqns).union(*self._like.slots.values())
        self.slots: dict[str, set[Path]] = {}
        for slot in self._like.slots:
            self.slots.setdefault(_text(as_path(slot)), set()).add(as_path(slot))

    def required(self) -> Iterator[str]:
        """Give the keys that the flat form of ``like`` has."""
        yield from [item.key for item in _state_items(self._like, self._whole)]
        for group in self._like.groups:
            texts = [f".{text}" for option, text, _ in _options_of(group) if option != "param_names"]
            for name in group.fqns:
                yield from [_GROUPS + name + text for text in texts]

    def path(self, text: str) -> Path:
        """Give the path that the text of a slot stands for."""
        paths = self.slots.get(text, ())
        if len(paths) == 1:
            return next(iter(paths))
        head, _, index = text.rpartition(".")
        if index.isdigit() and head in self.sequences:  # lists need not be as long as those of like
            return (*self.path(head), Item(int(index), self.sequences[head] is tuple))
        return tuple(text.split("."))


def _read_options(flat: Mapping[str, Any], known: _Known) -> Options:
    options: Options = {}
    for key, value in flat.items():
        if key.startswith(_GROUPS):
            name, _, text = key[len(_GROUPS) :].rpartition(".")
            options.setdefault(name, {})[known.options.get(text, text)] = value
    return options


def _read_state(flat: Mapping[str, Any], known: _Known, options: Options) -> Rows:
    names = known.names | options.keys()
    rows: Rows = {}
    ambiguous: list[str] = []
    for key, value in flat.items():
        if not key.startswith(_STATE):
            continue
        if (own := known.state.get(key)) is not None:
            rows.setdefault(own.fqn, {})[own.path] = value
            continue
        readings = _readings(key[len(_STATE) :], names, known)
        if len(readings) > 1:
            ambiguous.append(f"{key!r} is " + " or ".join(f"slot {slot!r} of {name!r}" for name, slot in readings))
            continue
        name, text = readings[0]
        row = rows.setdefault(name, {})
        path = () if text is None else known.path(text)
        row.update(walk(value, path) if is_sequence(value) else [(path, value)])
    if ambiguous:
        raise NameConflict(
            f"unflatten_optim: {plural(len(ambiguous), 'key')} that can be read in two ways: "
            f"{several(ambiguous)}. Give like=, a state that has these slots."
        )
    return rows


def _readings(rest: str, names: set[str], known: _Known) -> list[tuple[str, str | None]]:
    """List the names and slots that ``<fqn>.<slot>`` may stand for."""
    found: list[tuple[str, str | None]] = [(rest, None)] if rest in names else []
    at = rest.find(".")
    while at >= 0:
        if rest[:at] in names:
            found.append((rest[:at], rest[at + 1 :]))
        at = rest.find(".", at + 1)
    if not found:
        name, dot, text = rest.rpartition(".")
        return [(name, text)] if dot else [(rest, None)]
    told = [reading for reading in found if reading[1] in known.slots]
    return told if len(told) == 1 else found


def _to_slots(rows: Rows) -> dict[Slot, dict[str, Any]]:
    columns: dict[Slot, dict[str, Any]] = {}
    for name, row in rows.items():
        for path, value in row.items():
            columns.setdefault(as_slot(path), {})[name] = value
    return columns


def _canonical_groups(options: Options) -> list[ParamGroup]:
    """Make one group of the parameters with equal options, in order of first appearance."""
    buckets: dict[Hashable, list[tuple[dict[Any, Any], list[str]]]] = {}
    groups: list[tuple[dict[Any, Any], list[str]]] = []
    for name, own in options.items():
        bucket = buckets.setdefault(_sketch(own), [])
        members = next((names for other, names in bucket if same_mapping(own, other)), None)
        if members is None:
            groups.append((own, [name]))
            bucket.append(groups[-1])
        else:
            members.append(name)
    return [ParamGroup(tuple(names), own) for own, names in groups]


def _sketch(value: Any, depth: int = 3) -> Hashable:
    """Give something hashable that equal values share, so that grouping many parameters stays linear."""
    if isinstance(value, str | int | None) or (isinstance(value, float) and value == value):
        return type(value), value
    if is_dict(value) and depth:
        return frozenset([(key, _sketch(item, depth - 1)) for key, item in value.items()])
    if is_sequence(value) and depth:
        return type(value), len(value), tuple([_sketch(item, depth - 1) for item in value[:4]])
    return type(value).__qualname__


def _check_complete(flat: Mapping[str, Any], known: _Known, names: set[str]) -> None:
    missing = [key for key in known.required() if key not in flat]
    if missing:  # a list may be there item by item
        heads = {key[:cut] for key in flat for cut in _dots(key)}
        missing = [key for key in missing if key not in heads]
    strays = sorted(names - known.names)
    if missing or strays:
        raise UnknownName(
            "unflatten_optim: the flat form does not fit like="
            + (f"; it lacks {plural(len(missing), 'key')}: {listing(missing)}" if missing else "")
            + (f"; like= does not know {plural(len(strays), 'name')}: {listing(strays)}" if strays else "")
            + ". strict=False keeps the options of like=, leaves missing state out, and drops unknown names."
        )


def _dots(text: str) -> list[int]:
    return [i for i, letter in enumerate(text) if letter == "."]


def _groups_like(like: OptimState, options: Options, *, strict: bool) -> list[ParamGroup]:
    problems: list[str] = []
    missing: list[str] = []
    groups: list[ParamGroup] = []
    for group in like.groups:
        rows = {name: options.get(name, {}) for name in group.fqns}
        extra = dict.fromkeys([key for row in rows.values() for key in row if key not in group.options])
        if group.named:
            extra.pop("param_names", None)
        merged: dict[Any, Any] = dict(group.options)
        for key in (*group.options, *extra):
            given = [(name, row[key]) for name, row in rows.items() if key in row]
            if not given:
                continue
            first, merged[key] = given[0]
            problems += [
                f"{key!r} is {merged[key]!r} for {first!r} and {value!r} for {name!r}"
                for name, value in given[1:]
                if value is not merged[key] and not same_option(merged[key], value)
            ]
            if key in extra and key != "param_names":
                missing += [f"{_GROUPS}{name}.{key}" for name, row in rows.items() if key not in row]
        groups.append(ParamGroup(group.fqns, merged, named=group.named))
    if problems:
        raise SpecMismatch(
            f"unflatten_optim: parameters of one group of like= differ: {several(problems)}. "
            "Give a like= with these parameters in groups of their own."
        )
    if missing and strict:
        raise UnknownName(f"unflatten_optim: options that others of the group have are missing: {listing(missing)}.")
    return groups


def _restore_empty(rows: Rows, like: OptimState) -> None:
    """Put back the empty dicts of ``like`` where the flat form says nothing else."""
    full = {name for column in like.slots.values() for name, value in column.items() if not is_empty(value)}
    for slot, column in like.slots.items():
        path = as_path(slot)
        for name, value in column.items():
            row = rows.get(name, {})
            if not is_empty(value) or (name in full and not row):
                continue
            if not any(path == other[: len(path)] or other == path[: len(other)] for other in row):
                rows.setdefault(name, {})[path] = {}
