"""A parameter group as a value: which parameters share hyper-parameters, and their values.

Nothing here knows of optimizer state, or of the dict in which torch keeps groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from attrs import field, frozen

from fdsd.data.errors import NameConflict, SpecMismatch, Unsupported, listing
from fdsd.data.values import read_only, same_mapping

__all__ = ["ParamGroup", "twice"]


def twice(names: Iterable[Any]) -> list[Any]:
    """List the values that stand more than once, each one time.

    >>> twice(["a", "b", "a", "a"])
    ['a']
    """
    values = list(names)
    if len(set(values)) == len(values):
        return []
    return [value for value, count in Counter(values).items() if count > 1]


def _to_fqns(fqns: Iterable[str]) -> tuple[str, ...]:
    given: Any = fqns
    if isinstance(given, str):
        raise SpecMismatch(f"ParamGroup: fqns is a sequence of names, not the string {fqns!r}; write ({fqns!r},).")
    names = tuple(given)
    if odd := [name for name in names if not isinstance(name, str)]:
        raise SpecMismatch(f"ParamGroup: names are strings; these are not: {listing(odd)}.")
    if len(set(names)) != len(names):
        raise NameConflict(f"ParamGroup: names given twice: {listing(twice(names))}. Each name may stand once.")
    return names


@frozen(eq=False, repr=False)
class ParamGroup:
    """The parameters that share hyper-parameters, in the optimizer's order, and the hyper-parameters.

    Args:
        fqns: The names of the parameters; empty for an empty group.
        options: The hyper-parameters (``lr``, ``betas``, ...); read-only afterwards.
        named: Whether torch's dict repeats the names as ``param_names``, as it does for an optimizer that was
            made from named parameters.

    Raises:
        NameConflict: A name is given twice.
        SpecMismatch: A name is not a string.
        Unsupported: An option has the name of a field of torch's dict that holds the names.

    Equality: the same names in the same order, the same options; tensors by identity, NaN like NaN.

    >>> group = ParamGroup(("a.weight", "a.bias"), {"lr": 0.1, "betas": (0.9, 0.99)})
    >>> group
    ParamGroup(('a.weight', 'a.bias'), {'lr': 0.1, 'betas': (0.9, 0.99)})
    >>> group == ParamGroup(("a.weight", "a.bias"), {"lr": 0.2, "betas": (0.9, 0.99)})
    False
    """

    fqns: tuple[str, ...] = field(converter=_to_fqns)
    options: Mapping[str, Any] = field(factory=dict[str, Any], converter=read_only)
    named: bool = field(default=False, kw_only=True)

    def __attrs_post_init__(self) -> None:
        given = self.options.get("param_names")
        if type(given) is list and given == list(self.fqns):  # other names stay an option, so nothing is lost
            rest = {key: value for key, value in self.options.items() if key != "param_names"}
            object.__setattr__(self, "options", read_only(rest))
            object.__setattr__(self, "named", True)
        for key in ("params", *(["param_names"] if self.named else [])):
            if key in self.options:
                raise Unsupported(f"ParamGroup: {key!r} is no option: the names of the parameters go to fqns.")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ParamGroup):
            return NotImplemented
        mine, theirs = (self.fqns, self.named), (other.fqns, other.named)
        return mine == theirs and same_mapping(self.options, other.options)

    __hash__ = None  # type: ignore[assignment]  # options are compared, and tensors have no value hash

    def __repr__(self) -> str:
        shown = [repr(name) for name in self.fqns[:6]]
        if len(self.fqns) > len(shown):
            shown.append(f"... {len(self.fqns) - len(shown)} more")
        names = ", ".join(shown) + ("," if len(shown) == 1 else "")
        return f"ParamGroup(({names}), {dict(self.options)!r}{', named=True' if self.named else ''})"

    def __reduce__(self) -> Any:
        return _rebuild, (self.fqns, dict(self.options), self.named)


def _rebuild(fqns: tuple[str, ...], options: dict[str, Any], named: bool) -> ParamGroup:
    return ParamGroup(fqns, options, named=named)
