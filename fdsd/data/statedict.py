"""The state dict as a value: an immutable, ordered mapping from FQN to leaf.

Registered with optree in the namespace ``"fdsd"``, in insertion order. Nothing here knows what a leaf is,
beyond what equality needs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, TypeVar, cast, overload

import optree
import torch

from fdsd.data.errors import NameConflict, SpecMismatch, UnknownName, Unsupported, listing
from fdsd.data.naming import nearest
from fdsd.data.place import Place
from fdsd.data.spec import TensorSpec, spec_of
from fdsd.data.ties import place_of

__all__ = ["Kind", "StateDict", "as_mapping", "require_mapping", "same_leaf", "specs"]

Kind = Literal["exact", "lazy", "abstract"]
V = TypeVar("V")
V_co = TypeVar("V_co", covariant=True)
W = TypeVar("W")


class StateDict(Mapping[str, V_co], Generic[V_co]):
    """An immutable, ordered mapping from FQN to leaf.

    Args:
        items: A mapping, or (FQN, leaf) pairs. A name twice raises.
        metadata: The versions that ``nn.Module`` keeps in ``_metadata``; taken from ``items`` where it has them.

    Raises:
        NameConflict: A name is given twice.
        SpecMismatch: A name is not a string.

    Equality: the same names with the same leaves, whatever the order; leaves by identity, by spec, or by
    ``==`` for objects that are no tensors. Order is data all the same: iteration follows insertion.

    >>> state = StateDict({"b.weight": torch.ones(2), "a.bias": torch.zeros(1)})
    >>> list(state)
    ['b.weight', 'a.bias']
    >>> state.replace({"a.bias": None})["a.bias"] is None
    True
    """

    __slots__ = ("_history", "_items", "_kind", "_versions")

    _items: dict[str, V_co]
    _versions: Mapping[str, Any] | None
    _history: tuple[Any, ...]
    _kind: Kind

    def __init__(
        self,
        items: Mapping[str, V_co] | Iterable[tuple[str, V_co]] = (),
        *,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        given: Any = items
        if isinstance(given, Mapping):
            kept: dict[Any, V_co] = dict(given)  # pyright: ignore[reportUnknownArgumentType]
            metadata = getattr(items, "_metadata", None) if metadata is None else metadata
        else:
            pairs = _pairs(given)
            kept = dict(pairs)
            if len(kept) != len(pairs):
                _refuse_duplicates([name for name, _ in pairs])
        if odd := [name for name in kept if not isinstance(name, str)]:
            raise SpecMismatch(f"StateDict: names are strings; these are not: {listing(odd)}.")
        self._set(kept, metadata, getattr(items, "_history", ()), getattr(items, "_kind", "exact"))

    def _set(
        self, items: dict[str, V_co], metadata: Mapping[str, Any] | None, history: tuple[Any, ...], kind: Kind
    ) -> None:
        object.__setattr__(self, "_items", items)
        object.__setattr__(self, "_versions", None if metadata is None else MappingProxyType(_copied(metadata)))
        object.__setattr__(self, "_history", history)
        object.__setattr__(self, "_kind", kind)

    @classmethod
    def trusted(
        cls,
        items: dict[str, W],
        metadata: Mapping[str, Any] | None = None,
        history: tuple[Any, ...] = (),
        kind: Kind = "exact",
    ) -> StateDict[W]:
        """Wrap a fresh dict that the caller gives away, without checks or a copy (for fdsd's own use)."""
        made: StateDict[W] = object.__new__(StateDict)  # pyright: ignore[reportUnknownVariableType]
        made._set(items, metadata, history, kind)
        return made

    @property
    def kind(self) -> Kind:
        """How a state without tensors counts: as one whose tensors are here, lazy, or known by their specs."""
        return self._kind

    @property
    def history(self) -> tuple[Any, ...]:
        """The steps that made this state of another, in order; ``save`` records them. No part of equality."""
        return self._history

    @property
    def metadata(self) -> Mapping[str, Any] | None:
        """The module versions that ``nn.Module.state_dict`` keeps in ``_metadata``, if any."""
        return self._versions

    @property
    def _metadata(self) -> OrderedDict[str, Any] | None:
        """What torch looks for; a fresh copy, since torch writes into it when it loads."""
        return None if self._versions is None else OrderedDict(_copied(self._versions))

    def to_dict(self) -> dict[str, V_co]:
        """Give a fresh dict, which carries ``_metadata`` for ``load_state_dict`` where there is any.

        >>> StateDict({"a": 1}).to_dict()
        {'a': 1}
        """
        metadata = self._metadata
        if metadata is None:
            return dict(self._items)
        made: OrderedDict[str, V_co] = OrderedDict(self._items)
        made._metadata = metadata  # type: ignore[attr-defined]  # torch's own convention
        return made

    def replace(self, mapping: Mapping[str, W]) -> StateDict[V_co | W]:
        """Give the same names in the same order with some leaves replaced.

        Raises:
            UnknownName: ``mapping`` has a name that this state dict lacks.
        """
        unknown = [name for name in mapping if name not in self._items]
        if unknown:
            raise UnknownName(
                f"replace: {listing(unknown)} not in this state dict of {len(self)} names"
                f"{self._hint(unknown[0])}. Use insert() or combine() to add names."
            )
        return StateDict.trusted({**self._items, **mapping}, self._versions, self._history, self._kind)

    def _hint(self, name: object) -> str:
        close = nearest(name, list(self._items)) if isinstance(name, str) else []
        return f"; the nearest name is {close[0]!r}" if close else ""

    def __getitem__(self, name: str) -> V_co:
        try:
            return self._items[name]
        except KeyError:
            raise UnknownName(f"{name!r} is not in this state dict of {len(self)} names{self._hint(name)}.") from None

    @overload
    def get(self, key: str, /) -> V_co | None: ...
    @overload
    def get(self, key: str, /, default: V_co | W) -> V_co | W: ...
    def get(self, key: str, /, default: Any = None) -> Any:
        """Give the leaf of a name, or ``default``."""
        return self._items.get(key, default)

    def __contains__(self, name: object) -> bool:
        return name in self._items

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def keys(self) -> Any:
        """The FQNs, in order."""
        return self._items.keys()

    def values(self) -> Any:
        """The leaves, in order."""
        return self._items.values()

    def items(self) -> Any:
        """The (FQN, leaf) pairs, in order."""
        return self._items.items()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mapping):
            return NotImplemented
        theirs: Mapping[Any, Any] = other  # pyright: ignore[reportUnknownVariableType]
        return len(self) == len(theirs) and all(
            name in theirs and same_leaf(leaf, theirs[name]) for name, leaf in self._items.items()
        )

    __hash__ = None  # type: ignore[assignment]  # leaves are compared, and tensors have no value hash

    def __reduce__(self) -> Any:
        return _rebuild, (self._items, self._metadata, self._history, self._kind)

    def __repr__(self) -> str:
        shown = [f"  {name!r}: {_leaf_text(leaf)}," for name, leaf in list(self._items.items())[:20]]
        if len(self) > len(shown):
            shown.append(f"  ... and {len(self) - len(shown)} more,")
        return "StateDict({" + ("\n" + "\n".join(shown) + "\n" if shown else "") + "})"

    if not TYPE_CHECKING:  # the type checkers must see no way to write

        def __setattr__(self, name: str, value: object) -> NoReturn:
            raise TypeError("A StateDict is immutable; .replace() gives a changed one.")

        def __setitem__(self, name: str, value: object) -> NoReturn:
            raise TypeError(f"A StateDict is immutable; .replace({{{name!r}: ...}}) gives a changed one.")

        def __delitem__(self, name: str) -> NoReturn:
            raise TypeError(f"A StateDict is immutable; drop({name!r}) gives a smaller one.")


def _rebuild(
    items: dict[str, Any], metadata: Mapping[str, Any] | None, history: tuple[Any, ...], kind: Kind
) -> StateDict[Any]:
    return StateDict.trusted(items, metadata, history, kind)


def _copied(metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {path: dict(versions) for path, versions in metadata.items()}


def _pairs(items: Any) -> list[tuple[Any, Any]]:
    """Read (name, leaf) pairs, or say what was given instead."""
    try:
        return [(name, leaf) for name, leaf in items]
    except (TypeError, ValueError):
        raise Unsupported(
            f"StateDict: it is made of a mapping of names to leaves, or of such pairs, not of {type(items).__name__}. "
            "For a module, give its state_dict()."
        ) from None


def _refuse_duplicates(names: list[str]) -> NoReturn:
    seen: set[str] = set()
    twice = {name for name in names if name in seen or seen.add(name)}  # type: ignore[func-returns-value]
    raise NameConflict(f"StateDict: names given twice: {listing(twice)}. Each name may stand once.")


def _leaf_text(leaf: object) -> str:
    spec = None if isinstance(leaf, torch.Tensor) and leaf.layout is not torch.strided else spec_of(leaf)
    if spec is None:
        text = repr(leaf)
        return text if len(text) <= 60 else text[:57] + "..."
    if isinstance(leaf, TensorSpec):
        return repr(leaf)
    return f"<{type(leaf).__name__} {spec}>"


def as_mapping(value: object) -> Mapping[str, Any] | None:
    """Give a value that is a mapping as one of names to leaves; ``None`` for anything else."""
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else None


def require_mapping(value: object, what: str) -> Mapping[str, Any]:
    """Give a value that has to be a state dict, or say what was given instead."""
    found = as_mapping(value)
    if found is None:
        raise Unsupported(
            f"{what}: it takes a mapping of names to tensors, not {type(value).__name__}. For a module, give "
            "fdsd.capture(module).model; for a file, fdsd.open(path)."
        )
    return found


def same_leaf(a: object, b: object) -> bool:
    """Tell whether two leaves are the same: by identity, by spec, or by ``==`` for objects without elements.

    >>> same_leaf(TensorSpec((2,), torch.int8), TensorSpec((2,), torch.int8))
    True
    >>> same_leaf(torch.ones(2), torch.ones(2))
    False
    """
    if a is b:
        return True
    if type(a) is not type(b) or isinstance(a, torch.Tensor):
        return False
    try:
        return bool(a == b)
    except Exception:  # an object whose == has no plain truth value is no evidence of sameness
        return False


def specs(state: Mapping[str, Any]) -> StateDict[Any]:
    """Give the same names with a ``TensorSpec`` for each tensor; other objects stay as they are.

    Args:
        state: Any mapping from FQN to leaf.

    Returns:
        A ``StateDict`` whose tensors are specs, in the same order. Names that were tied stay
        recognisable as tied (``TensorSpec.tie``, which takes no part in equality).

    Law: ``f(specs(x)) == specs(f(x))`` for every transform, value checks aside.

    >>> specs({"a": torch.ones(2, 3)})
    StateDict({
      'a': TensorSpec((2, 3), torch.float32),
    })
    """
    state = require_mapping(state, "specs")
    made: dict[str, Any] = {}
    places = _shared_places(state)
    for name, leaf in state.items():
        spec = spec_of(leaf)
        place = places.get(name)
        if spec is not None and spec.tie != place:
            spec = TensorSpec(spec.shape, spec.dtype, tie=place)
        made[name] = leaf if spec is None else spec
    return StateDict.trusted(made, getattr(state, "_metadata", None), kind="abstract")


def _shared_places(state: Mapping[str, Any]) -> dict[str, Place]:
    """Give the places of leaves that share memory with another one: they are tied, or may come to be."""
    by_root: dict[Hashable, dict[str, Place]] = {}
    for name, leaf in state.items():
        if (place := place_of(leaf)) is not None:
            by_root.setdefault(place.root, {})[name] = place
    shared = [(object(), places) for places in by_root.values() if len(places) > 1]  # ids may come to be used again
    return {name: place._replace(root=token) for token, places in shared for name, place in places.items()}


class _Frame:
    """What optree keeps of a flattened state dict: its names and metadata, comparable and hashable."""

    __slots__ = ("metadata", "names")

    def __init__(self, names: tuple[str, ...], metadata: Mapping[str, Any] | None) -> None:
        self.names = names
        self.metadata = metadata

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Frame) and (self.names, self.metadata) == (other.names, other.metadata)

    def __hash__(self) -> int:
        return hash(self.names)

    def __repr__(self) -> str:
        return repr(list(self.names))


def _flatten(state: StateDict[Any]) -> tuple[tuple[Any, ...], _Frame, tuple[str, ...]]:
    names = tuple(state)
    return tuple(state.values()), _Frame(names, state.metadata), names


def _unflatten(frame: _Frame, leaves: Iterable[Any]) -> StateDict[Any]:
    return StateDict.trusted(dict(zip(frame.names, leaves, strict=True)), frame.metadata)


optree.register_pytree_node(StateDict, _flatten, _unflatten, namespace="fdsd")  # type: ignore[arg-type]
