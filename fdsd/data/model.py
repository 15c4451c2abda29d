"""What a model expects, as pure data: each tensor and its role, each optimizer's groups; JSON both ways.

No module, optimizer or file is touched here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from attrs import field, frozen

from fdsd.data.errors import BadFile, NameConflict, SpecMismatch, Unsupported, listing, plural
from fdsd.data.groups import ParamGroup, twice
from fdsd.data.plain_json import decode, dtype_of, encode, parse
from fdsd.data.spec import TensorSpec, dtype_name
from fdsd.data.statedict import StateDict
from fdsd.data.values import is_dict, is_mapping, is_sequence, several

__all__ = ["ModelSpec", "TensorEntry"]

_VERSION = 1

Kind = Literal["parameter", "buffer"]


@frozen
class TensorEntry:
    """One tensor of a model.

    Args:
        spec: Its shape and dtype.
        kind: ``"parameter"`` or ``"buffer"``.
        persistent: Whether it is part of the state dict; a non-persistent buffer is not.
        trainable: Whether a parameter requires gradients; says nothing of a buffer.
        tied_to: The FQN under which the same tensor stands in the model first, if this is another name of it.
        layout: How it is laid out over ranks, as plain data (what JSON can hold, tuples too), or ``None``.

    Raises:
        SpecMismatch: ``spec`` is no ``TensorSpec``, or ``kind`` none of the two.
        Unsupported: ``layout`` is no plain data.

    >>> import torch
    >>> TensorEntry(TensorSpec((2,), torch.float32), "buffer", persistent=False)
    TensorEntry(TensorSpec((2,), torch.float32), 'buffer', persistent=False)
    """

    spec: TensorSpec = field()
    kind: Kind = "parameter"
    persistent: bool = True
    trainable: bool = True
    tied_to: str | None = None
    layout: Any = None

    def __attrs_post_init__(self) -> None:
        spec: Any = self.spec
        if not isinstance(spec, TensorSpec):
            raise SpecMismatch(f"TensorEntry: spec is a TensorSpec, not {type(spec).__name__}.")
        if self.kind not in ("parameter", "buffer"):
            raise SpecMismatch(f"TensorEntry: kind is 'parameter' or 'buffer', not {self.kind!r}.")
        problems: list[str] = []
        _encode_safely(self.layout, "layout", problems, tensors=False)
        if problems:
            raise Unsupported(f"TensorEntry: layout has to be plain data: {several(problems)}.")

    def __repr__(self) -> str:
        kind = [] if self.kind == "parameter" else [repr(self.kind)]
        rest = [f"{name}={getattr(self, name)!r}" for name in _DEFAULTS if getattr(self, name) != _DEFAULTS[name]]
        return f"TensorEntry({', '.join([repr(self.spec), *kind, *rest])})"


_DEFAULTS: dict[str, Any] = {"persistent": True, "trainable": True, "tied_to": None, "layout": None}


def _to_entries(entries: Mapping[str, TensorEntry]) -> StateDict[TensorEntry]:
    given: Any = entries
    remedy = "describe(model) makes the ModelSpec of a model."
    if not is_mapping(given):
        kind: str = type(given).__name__
        raise Unsupported(f"ModelSpec: entries are a mapping of names to TensorEntry, not {kind}. {remedy}")
    made = StateDict(dict(entries))
    if odd := [name for name, entry in made.items() if not isinstance(entry, TensorEntry)]:
        raise Unsupported(f"ModelSpec: entries are TensorEntry; these are not: {listing(odd)}. {remedy}")
    return made


def _to_optimizers(optimizers: Iterable[Iterable[ParamGroup]]) -> tuple[tuple[ParamGroup, ...], ...]:
    made: tuple[tuple[Any, ...], ...] = tuple([tuple(groups) for groups in optimizers])
    for i, groups in enumerate(made):
        if odd := {type(group).__name__ for group in groups if not isinstance(group, ParamGroup)}:
            raise Unsupported(f"ModelSpec: optimizers[{i}] is a tuple of ParamGroup, not of {listing(odd)}.")
        if double := twice(name for group in groups for name in group.fqns):
            raise NameConflict(f"ModelSpec: optimizers[{i}] has names in two groups: {listing(double)}.")
    return made


@frozen
class ModelSpec:
    """What a model expects, as pure data.

    Args:
        entries: For each FQN, in the model's order, the tensor and its role; any mapping.
        optimizers: The parameter groups of each optimizer.

    Raises:
        SpecMismatch: ``tied_to`` names no entry, one with another spec, or one that is tied itself.
        NameConflict: A name is in two groups of one optimizer.
        Unsupported: An entry is no ``TensorEntry``, or a group no ``ParamGroup``.

    Law: ``from_json(m.to_json()) == m``, but for tensors among the options, which compare by identity and
    come back with the same value and dtype; and ``from_json(t).to_json() == t`` for every ``t`` so written.

    >>> import torch
    >>> spec = TensorSpec((4, 2), torch.bfloat16)
    >>> embed, head = TensorEntry(spec, trainable=False), TensorEntry(spec, tied_to="embed")
    >>> model = ModelSpec({"embed": embed, "head": head})
    >>> model.frozen
    ('embed', 'head')
    >>> ModelSpec.from_json(model.to_json()) == model
    True
    """

    entries: StateDict[TensorEntry] = field(converter=_to_entries)
    optimizers: tuple[tuple[ParamGroup, ...], ...] = field(default=(), converter=_to_optimizers)

    def __attrs_post_init__(self) -> None:
        problems = [text for name in self.entries if (text := self._tie_problem(name))]
        if problems:
            raise SpecMismatch(f"ModelSpec: {plural(len(problems), 'wrong tie')}: {several(problems)}.")

    def _tie_problem(self, name: str) -> str | None:
        entry = self.entries[name]
        if entry.tied_to is None:
            return None
        owner = self.entries.get(entry.tied_to)
        if owner is None:
            return f"{name!r} is tied to {entry.tied_to!r}, which is no entry"
        if owner.tied_to is not None:
            first = "itself" if entry.tied_to == name else f"{entry.tied_to!r}, which is tied to {owner.tied_to!r}"
            return f"{name!r} is tied to {first}; tie all names to one that is not tied"
        if owner.spec != entry.spec:
            return f"{name!r} is {entry.spec} and tied to {entry.tied_to!r}, which is {owner.spec}"
        return None

    def specs(self) -> StateDict[TensorSpec]:
        """Give the spec of each persistent entry, tied names included; their specs have equal ``tie``.

        >>> import torch
        >>> ModelSpec({"w": TensorEntry(TensorSpec((2,), torch.int8))}).specs()["w"]
        TensorSpec((2,), torch.int8)
        """
        tokens = {owner: object() for entry in self.entries.values() if (owner := entry.tied_to) is not None}
        return StateDict.trusted(
            {
                name: TensorSpec(
                    entry.spec.shape,
                    entry.spec.dtype,
                    tie=tokens.get(entry.tied_to or name),
                )
                for name, entry in self.entries.items()
                if entry.persistent
            },
            kind="abstract",
        )

    @property
    def frozen(self) -> tuple[str, ...]:
        """The parameters that do not train, by all names of their tensors, in order."""
        frozen_owners = {
            entry.tied_to or name
            for name, entry in self.entries.items()
            if entry.kind == "parameter" and not entry.trainable
        }
        return tuple([name for name, entry in self.entries.items() if (entry.tied_to or name) in frozen_owners])

    def to_json(self) -> str:
        """Write the spec as JSON, one line an entry.

        Raises:
            Unsupported: An option of a group is neither plain data nor a 0-dim tensor; all are named.
        """
        problems: list[str] = []
        lines = [f"{json.dumps(name)}: {json.dumps(_entry_data(entry))}" for name, entry in self.entries.items()]
        optimizers = [
            [_group_data(group, f"optimizers[{i}][{j}]", problems) for j, group in enumerate(groups)]
            for i, groups in enumerate(self.optimizers)
        ]
        if problems:
            raise Unsupported(f"to_json: no JSON for {plural(len(problems), 'option')}: {several(problems)}.")
        entries = "{" + ",".join(f"\n  {line}" for line in lines) + ("\n }" if lines else "}")
        rows = "[" + ",".join(f"\n  {json.dumps(groups)}" for groups in optimizers) + ("\n ]" if optimizers else "]")
        return f'{{"version": {_VERSION},\n "entries": {entries},\n "optimizers": {rows}}}\n'

    @classmethod
    def from_json(cls, text: str | bytes) -> ModelSpec:
        """Read what ``to_json`` wrote.

        Raises:
            BadFile: No JSON, a key twice, an unknown version, field or dtype; all wrong entries are named.
        """
        data = parse(text, "ModelSpec.from_json")
        found = data.get("version") if is_dict(data) else None
        if not is_dict(data) or type(found) is not int or found != _VERSION:
            raise BadFile(
                f"ModelSpec.from_json: {'no version' if found is None else f'version {found!r}'}; "
                f"this fdsd reads version {_VERSION}."
            )
        problems: list[str] = []
        fields: dict[str, Any] = {"entries": {}, "optimizers": [], **data}
        _check_fields(fields, {"version", "entries", "optimizers"}, "the spec", problems)
        entries = _read_entries(fields["entries"], problems)
        optimizers = _read_optimizers(fields["optimizers"], problems)
        if problems:
            raise BadFile(f"ModelSpec.from_json: {plural(len(problems), 'problem')}: {several(problems)}")
        return cls(entries, optimizers)


def _encode_safely(value: object, where: str, problems: list[str], *, tensors: bool = True) -> Any:
    try:
        return encode(value, where, problems, tensors=tensors)
    except RecursionError:
        problems.append(f"{where} is nested too deeply, or contains itself")
        return None


def _entry_data(entry: TensorEntry) -> dict[str, Any]:
    made: dict[str, Any] = {
        "shape": list(entry.spec.shape),
        "dtype": dtype_name(entry.spec.dtype),
        "kind": entry.kind,
    }
    for name, default in _DEFAULTS.items():
        value = getattr(entry, name)
        if value is not default:
            made[name] = encode(value, name, []) if name == "layout" else value
    return made


def _group_data(group: ParamGroup, where: str, problems: list[str]) -> dict[str, Any]:
    options = _encode_safely(dict(group.options), where, problems)
    return {"fqns": list(group.fqns), "options": options, **({"named": True} if group.named else {})}


def _check_fields(data: Mapping[str, Any], known: set[str], where: str, problems: list[str]) -> None:
    if odd := [name for name in data if name not in known]:
        problems.append(f"{where} has unknown fields {listing(odd)}.")


def _read_entries(data: Any, problems: list[str]) -> dict[str, TensorEntry]:
    if not is_dict(data):
        problems.append("'entries' is no object.")
        return {}
    made: dict[str, TensorEntry] = {}
    for name, row in data.items():
        try:
            made[name] = _read_entry(row, f"entry {name!r}", problems)
        except (BadFile, SpecMismatch, Unsupported) as error:
            problems.append(f"entry {name!r}: {error}" if name not in str(error) else str(error))
    return made


def _read_entry(row: Any, where: str, problems: list[str]) -> TensorEntry:
    if not is_dict(row) or "shape" not in row or "dtype" not in row:
        raise BadFile(f"{where} is no object with 'shape' and 'dtype'.")
    fields: dict[str, Any] = row
    _check_fields(fields, {"shape", "dtype", "kind", *_DEFAULTS}, where, problems)
    shape = fields["shape"]
    if not is_sequence(shape) or not all(type(size) is int for size in shape):
        raise BadFile(f"{where}: the shape {shape!r} is no list of whole numbers.")
    spec = TensorSpec(shape, dtype_of(fields["dtype"], where))
    rest = {name: fields.get(name, default) for name, default in _DEFAULTS.items()}
    for name in ("persistent", "trainable"):
        if not isinstance(rest[name], bool):
            raise BadFile(f"{where}: {name} is true or false, not {rest[name]!r}.")
    if not isinstance(rest["tied_to"], str | None):
        raise BadFile(f"{where}: tied_to is a name or null, not {rest['tied_to']!r}.")
    rest["layout"] = decode(rest["layout"], where)
    return TensorEntry(spec, fields.get("kind", "parameter"), **rest)


def _read_optimizers(data: Any, problems: list[str]) -> list[list[ParamGroup]]:
    if not is_sequence(data) or not all(map(is_sequence, data)):
        problems.append("'optimizers' is no list of lists of groups.")
        return []
    made: list[list[ParamGroup]] = []
    for i, groups in enumerate(data):
        made.append([])
        for j, group in enumerate(groups):
            where = f"optimizers[{i}][{j}]"
            try:
                made[-1].append(_read_group(group, where, problems))
            except (BadFile, SpecMismatch, NameConflict, Unsupported) as error:
                problems.append(str(error) if where in str(error) else f"{where}: {error}")
    return made


def _read_group(data: Any, where: str, problems: list[str]) -> ParamGroup:
    if not is_dict(data) or not is_sequence(data.get("fqns")):
        raise BadFile(f"{where} is no object with a list 'fqns'.")
    fields: dict[str, Any] = data
    _check_fields(fields, {"fqns", "options", "named"}, where, problems)
    options = decode(fields.get("options", {}), where)
    if not is_dict(options) or not isinstance(fields.get("named", False), bool):
        raise BadFile(f"{where}: 'options' is an object, and 'named' true or false.")
    return ParamGroup(fields["fqns"], options, named=fields.get("named", False))
