"""Tied names in a safetensors file, which stores each tensor once: the aliases live in the metadata.

Ours is one entry, JSON from alias to owner, beside one that keeps each alias's place in the order. What
``safetensors.torch.save_model`` writes is read too: a plain entry from the dropped name to the kept one.
Nothing here touches data.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from attrs import field, frozen

from fdsd.data.errors import BadFile, NameConflict, SpecMismatch, UnknownName, listing
from fdsd.data.spec import TensorSpec
from fdsd.data.strict_json import parse_object

__all__ = ["ALIASES", "Ties", "read_ties", "split_ties", "write_ties"]

ALIASES = "fdsd.aliases"
"""The metadata entry: JSON from alias to owner."""
PLACES = "fdsd.alias_places"
"""The metadata entry: JSON from alias to its place among all names of the checkpoint."""


@frozen
class Ties:
    """Aliases, each with the name that owns the data, and their places in the order of all names."""

    owners: Mapping[str, str] = field(factory=dict[str, str])
    places: Mapping[str, int] = field(factory=dict[str, int])
    declared: bool = True  # false for plain metadata entries, which may mean something else

    def weave(self, names: Iterable[str]) -> list[str]:
        """Put the aliases in their places among the names that are stored; without a place, at the end.

        >>> Ties({"head": "embed"}, {"head": 1}).weave(["embed", "norm"])
        ['embed', 'head', 'norm']
        """
        stored = iter(names)
        made: list[str] = []
        placed = sorted([(place, alias) for alias, place in self.places.items() if alias in self.owners])
        for place, alias in placed:
            while len(made) < place and (name := next(stored, None)) is not None:
                made.append(name)
            made.append(alias)
        made += stored
        return made + [alias for alias in self.owners if alias not in self.places]


def read_ties(metadata: Mapping[str, str], names: Mapping[str, object], path: str) -> tuple[Ties, dict[str, str]]:
    """Read the aliases off the metadata of a file.

    Args:
        metadata: The metadata of the file.
        names: The tensors that the file stores.
        path: The file, for messages.

    Returns:
        The ties, and the metadata without the entries that told of them.

    Raises:
        BadFile: Our entry is malformed, or names a tensor that is not there.

    >>> read_ties({"head": "embed", "format": "pt"}, {"embed": 0}, "x")[1]
    {'format': 'pt'}
    """
    if ALIASES not in metadata:
        plain = {
            alias: owner
            for alias, owner in metadata.items()
            if owner in names and alias not in names and alias != "format" and not alias.startswith("fdsd.")
        }
        return Ties(plain, declared=False), {key: value for key, value in metadata.items() if key not in plain}
    owners = parse_object(metadata[ALIASES].encode(), f"The entry {ALIASES!r} of {path}")
    bad = [
        f"{alias} -> {owner}"
        for alias, owner in owners.items()
        if alias in names or not isinstance(owner, str) or owner not in names
    ]
    if bad:
        raise BadFile(f"The entry {ALIASES!r} of {path} does not fit its tensors: {listing(bad)}.")
    places = parse_object(metadata.get(PLACES, "{}").encode(), f"The entry {PLACES!r} of {path}")
    good = {alias: place for alias, place in places.items() if type(place) is int and place >= 0}
    return Ties(owners, good), {key: value for key, value in metadata.items() if key not in (ALIASES, PLACES)}


def write_ties(ties: Ties, stored: Iterable[str]) -> dict[str, str]:
    """Word the metadata entries for those aliases whose owners are stored in one file.

    >>> write_ties(Ties({"head": "embed"}), ["embed"])
    {'fdsd.aliases': '{"head": "embed"}'}
    """
    here = set(stored)
    owners = {alias: owner for alias, owner in ties.owners.items() if owner in here}
    if not owners:
        return {}
    made = {ALIASES: json.dumps(owners, ensure_ascii=False)}
    places = {alias: ties.places[alias] for alias in owners if alias in ties.places}
    if places:
        made[PLACES] = json.dumps(places, ensure_ascii=False)
    return made


def split_ties(specs: Mapping[str, TensorSpec], aliases: Mapping[str, str]) -> tuple[dict[str, TensorSpec], Ties]:
    """Take the aliases out of the specs of a checkpoint.

    Args:
        specs: All names, the aliases among them or not.
        aliases: Alias to owner.

    Returns:
        The specs that are stored, and the ties with their places.

    Raises:
        UnknownName: An owner is not among the specs.
        NameConflict: An owner is itself an alias.
        SpecMismatch: An alias has another spec than its owner.

    >>> import torch
    >>> a = TensorSpec((2,), torch.int8)
    >>> split_ties({"embed": a, "head": a}, {"head": "embed"})[1].places
    {'head': 1}
    """
    unknown = [f"{alias} -> {owner}" for alias, owner in aliases.items() if owner not in specs]
    if unknown:
        raise UnknownName(f"aliases of names that are not saved: {listing(unknown)}. Save the owner too.")
    chained = [f"{alias} -> {owner}" for alias, owner in aliases.items() if owner in aliases]
    if chained:
        raise NameConflict(f"aliases of aliases: {listing(chained)}. Name the owner of the data.")
    unequal = [alias for alias, owner in aliases.items() if alias in specs and specs[alias] != specs[owner]]
    if unequal:
        raise SpecMismatch(f"aliases whose shape or dtype is not that of their owner: {listing(unequal)}.")
    places = {name: place for place, name in enumerate(specs) if name in aliases}
    return {name: spec for name, spec in specs.items() if name not in aliases}, Ties(dict(aliases), places)


def join_ties(parts: Sequence[tuple[str, Ties]], names: Mapping[str, object]) -> Ties:
    """Join the ties of several files.

    Raises:
        BadFile: An alias stands in two files, or is a tensor of another file.
    """
    owners: dict[str, str] = {}
    places: dict[str, int] = {}
    clashes: list[str] = []
    for path, ties in parts:
        clear = {alias: owner for alias, owner in ties.owners.items() if alias not in owners and alias not in names}
        if ties.declared:
            clashes += [f"{alias} in {path}" for alias in ties.owners if alias not in clear]
        owners.update(clear)
        places.update(ties.places)
    if clashes:
        raise BadFile(f"aliases that other files of the checkpoint hold too: {listing(clashes)}.")
    return Ties(owners, places)
