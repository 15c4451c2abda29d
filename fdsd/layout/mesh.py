"""`Mesh`: named axes of ranks, and which rank stands at which coordinate.

Ranks are plain integers. Placements, tensors and process groups are unknown here.
"""

from __future__ import annotations

import itertools
import json
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from attrs import field, frozen

from fdsd.data.errors import BadFile, SpecMismatch, listing, plural
from fdsd.data.plain_json import parse
from fdsd.data.values import is_dict, is_mapping, is_sequence

__all__ = ["At", "Coordinate", "Mesh"]

Coordinate = tuple[int, ...]
At = int | Sequence[int] | Mapping[str, int]
"""A place in a mesh: a rank, a coordinate, or a coordinate by the names of its axes."""


def whole(value: object) -> int | None:
    """Give a value as an integer, if it is a whole number and no truth value.

    >>> whole(3), whole(True), whole(3.0)
    (3, None, None)
    """
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]  # asked here
    except TypeError:
        return None


def _to_axes(axes: Mapping[str, int] | Iterable[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    pairs: list[tuple[Any, Any]] = []
    given: Any = axes.items() if is_mapping(axes) else axes
    if not _is_listed(given):
        raise SpecMismatch(f"Mesh: the axes are a mapping of names to sizes, like {{'dp': 2}}, not {axes!r}.")
    every: Iterable[Any] = given
    for pair in every:
        if not is_sequence(pair) or len(pair) != 2:
            raise SpecMismatch(f"Mesh: an axis is a name and a size, like ('dp', 2), not {pair!r}.")
        pairs.append((pair[0], pair[1]))
    if odd := [name for name, _ in pairs if not isinstance(name, str) or not name]:
        raise SpecMismatch(f"Mesh: axes have names that are not empty; these are none: {listing(odd)}.")
    if odd := [pair for pair in pairs if (whole(pair[1]) or 0) < 1]:
        raise SpecMismatch(f"Mesh: the size of an axis is a whole number of at least 1; these are not: {listing(odd)}.")
    names = [name for name, _ in pairs]
    if double := {name for name in names if names.count(name) > 1}:
        raise SpecMismatch(f"Mesh: axes that are named twice: {listing(double)}.")
    return tuple([(name, operator.index(size)) for name, size in pairs])


def _is_listed(given: object) -> bool:
    return isinstance(given, Iterable) and not isinstance(given, str)


def _flat(ranks: Iterable[Any]) -> Iterator[Any]:
    for rank in ranks:
        if is_sequence(rank):
            yield from _flat(rank)
        else:
            yield rank


def _to_ranks(ranks: Iterable[Any] | None) -> tuple[int, ...]:
    """Flatten the ranks, which may be nested like the axes; none at all for the default."""
    if ranks is None:
        return ()
    if not _is_listed(ranks):
        raise SpecMismatch(f"Mesh: the ranks are a list of whole numbers, one for each coordinate, not {ranks!r}.")
    given = list(_flat(ranks))
    if odd := [rank for rank in given if (number := whole(rank)) is None or number < 0]:
        raise SpecMismatch(f"Mesh: ranks are whole numbers from 0 on; these are not: {listing(odd)}.")
    made = tuple([operator.index(rank) for rank in given])
    if len(set(made)) != len(made):
        double = {rank for rank in made if made.count(rank) > 1}
        raise SpecMismatch(f"Mesh: ranks that stand at two coordinates: {listing(double)}.")
    return made


@frozen(repr=False, cache_hash=True)
class Mesh:
    """Named axes and the rank at each coordinate.

    Args:
        axes: The size of each axis by its name, outermost first; a mapping or pairs. None at all is one rank.
        ranks: The rank at each coordinate in row-major order, flat or nested like the axes; any different whole
            numbers. ``0, 1, 2, ...`` if left out.

    Raises:
        SpecMismatch: An axis without a name or size, twice the same name or rank, or another number of ranks
            than coordinates.

    Law: ``mesh.coordinate_of(mesh.rank_of(c)) == c`` for every coordinate, and ``Mesh.from_json(m.to_json()) == m``.

    >>> mesh = Mesh({"dp": 2, "tp": 3}, ranks=[5, 4, 3, 2, 1, 0])
    >>> mesh.rank_of((1, 0)), mesh.coordinate_of(5), mesh.coordinate_of(6)
    (2, (0, 0), None)
    >>> mesh
    Mesh({'dp': 2, 'tp': 3}, ranks=(5, 4, 3, 2, 1, 0))
    """

    axes: tuple[tuple[str, int], ...] = field(converter=_to_axes)
    ranks: tuple[int, ...] = field(default=None, converter=_to_ranks)
    _positions: dict[int, int] = field(init=False, eq=False)

    def __attrs_post_init__(self) -> None:
        if not self.ranks:
            object.__setattr__(self, "ranks", tuple(range(self.size)))
        if len(self.ranks) != self.size:
            raise SpecMismatch(
                f"Mesh: the axes {dict(self.axes)} have {plural(self.size, 'coordinate')}, and there are "
                f"{plural(len(self.ranks), 'rank')}. Give one rank a coordinate."
            )
        object.__setattr__(self, "_positions", {rank: position for position, rank in enumerate(self.ranks)})

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the axes."""
        return tuple([name for name, _ in self.axes])

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of the axes."""
        return tuple([size for _, size in self.axes])

    @property
    def num_axes(self) -> int:
        """The number of axes."""
        return len(self.axes)

    @property
    def size(self) -> int:
        """The number of ranks.

        >>> Mesh({"dp": 2, "tp": 3}).size
        6
        """
        return math.prod([size for _, size in self.axes])

    def __contains__(self, rank: object) -> bool:
        return rank in self._positions

    def coordinates(self) -> Iterator[Coordinate]:
        """Go through all coordinates in row-major order, which is the order of ``ranks``.

        >>> list(Mesh({"dp": 2, "tp": 2}).coordinates())
        [(0, 0), (0, 1), (1, 0), (1, 1)]
        """
        return itertools.product(*[range(size) for size in self.sizes])

    def rank_of(self, coordinate: Sequence[int] | Mapping[str, int]) -> int:
        """Give the rank at a coordinate.

        Args:
            coordinate: One index for each axis, in order or by name.

        Raises:
            SpecMismatch: It has other axes, or lies outside the mesh.

        >>> Mesh({"dp": 2, "tp": 3}).rank_of({"tp": 2, "dp": 1})
        5
        """
        position = 0
        for index, (_, size) in zip(self._checked(coordinate), self.axes, strict=True):
            position = position * size + index
        return self.ranks[position]

    def coordinate_of(self, rank: int) -> Coordinate | None:
        """Give the coordinate of a rank; ``None`` if the rank is not in the mesh.

        >>> Mesh({"dp": 2, "tp": 3}).coordinate_of(4)
        (1, 1)
        """
        position = self._positions.get(rank)
        if position is None:
            return None
        made: list[int] = []
        for _, size in reversed(self.axes):
            position, index = divmod(position, size)
            made.append(index)
        return tuple(reversed(made))

    def coordinate_at(self, at: At) -> Coordinate | None:
        """Give the coordinate of a place: of a rank, or a coordinate itself.

        >>> Mesh({"dp": 2}).coordinate_at({"dp": 1}), Mesh({"dp": 2}).coordinate_at(7)
        ((1,), None)
        """
        if isinstance(at, int):
            return self.coordinate_of(at)
        return self._checked(at)

    def _checked(self, coordinate: Sequence[int] | Mapping[str, int]) -> Coordinate:
        given: Any = coordinate
        if is_mapping(given):
            if set(given) != set(self.names):
                raise SpecMismatch(f"{self}: a coordinate names the axes {listing(self.names)}, and not {given!r}.")
            given = [given[name] for name in self.names]
        elif not is_sequence(given) or len(given) != self.num_axes:
            raise SpecMismatch(
                f"{self}: {given!r} is no coordinate. Give one index for each axis, in order or by name, or a rank."
            )
        made: list[int] = []
        for index, (name, size) in zip(given, self.axes, strict=True):
            number = whole(index)
            if number is None or not 0 <= number < size:
                raise SpecMismatch(f"{self}: index {index!r} is not in the axis {name!r} of size {size}.")
            made.append(number)
        return tuple(made)

    def __repr__(self) -> str:
        given = "" if self.ranks == tuple(range(self.size)) else f", ranks={self.ranks}"
        return f"Mesh({dict(self.axes)}{given})"

    def to_data(self) -> dict[str, Any]:
        """Give the mesh as data that JSON can hold.

        >>> Mesh({"dp": 2}).to_data()
        {'axes': [['dp', 2]]}
        """
        made: dict[str, Any] = {"axes": [[name, size] for name, size in self.axes]}
        if self.ranks != tuple(range(self.size)):
            made["ranks"] = list(self.ranks)
        return made

    @classmethod
    def from_data(cls, data: Any) -> Mesh:
        """Read what ``to_data`` gave.

        Raises:
            BadFile: It is no such data.

        >>> Mesh.from_data({"axes": [["dp", 2]], "ranks": [3, 1]})
        Mesh({'dp': 2}, ranks=(3, 1))
        """
        if not is_dict(data) or not {"axes"} <= data.keys() <= {"axes", "ranks"} or not is_sequence(data["axes"]):
            raise BadFile(f"Mesh.from_data: {data!r} is no object with 'axes' and perhaps 'ranks'.")
        ranks = data.get("ranks")
        if ranks is not None and not is_sequence(ranks):
            raise BadFile(f"Mesh.from_data: 'ranks' is a list, not {ranks!r}.")
        try:
            return cls([(name, size) for name, size in data["axes"]], ranks)
        except (SpecMismatch, TypeError, ValueError) as error:
            raise BadFile(f"Mesh.from_data: {error}") from error

    def to_json(self) -> str:
        """Write the mesh as JSON.

        >>> Mesh({"dp": 2}).to_json()
        '{"axes": [["dp", 2]]}'
        """
        return json.dumps(self.to_data())

    @classmethod
    def from_json(cls, text: str | bytes) -> Mesh:
        """Read what ``to_json`` wrote.

        Raises:
            BadFile: It is no JSON, or no mesh.
        """
        return cls.from_data(parse(text, "Mesh.from_json"))
