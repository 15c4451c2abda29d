"""Hypothesis strategies of states, layouts and pipelines; hypothesis is imported when they are called, not before."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, overload

from fdsd.data.errors import FdsdError
from fdsd.data.statedict import StateDict
from fdsd.data.values import is_mapping
from fdsd.layout.layout import Layout
from fdsd.layout.mesh import Mesh
from fdsd.pipeline.pipeline import Pipeline

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

__all__ = ["MissingExtra", "layouts", "pipelines", "states"]


class MissingExtra(FdsdError, ImportError):
    """A package that only an extra of fdsd installs is not there."""


def _require_hypothesis(verb: str) -> None:
    try:
        import hypothesis  # noqa: F401  # pyright: ignore[reportUnusedImport]  # only to see whether it is there
    except ImportError as error:
        raise MissingExtra(
            f"fdsd.testing.{verb}() needs hypothesis, which is not installed: pip install 'fdsd[testing]'."
        ) from error


def states(spec: Mapping[str, Any] | None = None, *, unique: bool = True) -> SearchStrategy[StateDict[Any]]:
    """A strategy of state dicts, in which tensors lie in memory in every way that they can.

    Args:
        spec: What they have: ``TensorSpec`` by FQN, or a state to imitate (its objects that are no tensors stay,
            and so do its ties). Without it, names, shapes and dtypes are random too: layers with indices,
            0-dim tensors, zero-size dims, expanded and tied tensors, objects, empty state dicts, all dtypes.
        unique: Whether the elements are finite and all different, in all tensors together, as far as their
            dtypes have so many values, so that no permutation can hide. Otherwise they are few bit patterns,
            NaN and infinity among them. (Expanded tensors, which repeat values, are random ones only.)

    Raises:
        MissingExtra: hypothesis is not installed.

    >>> import torch
    >>> from hypothesis import given
    >>> from fdsd.data.spec import TensorSpec
    >>> @given(states({"w": TensorSpec((2, 3), torch.bfloat16)}))
    ... def test(state):
    ...     assert len(set(state["w"].flatten().tolist())) == 6
    >>> test()
    """
    _require_hypothesis("states")
    from fdsd.testing._states import random_states, states_of

    return random_states(unique) if spec is None else states_of(spec, unique)


@overload
def layouts(fits: Mapping[str, Any], *, mesh: Mesh | None = None) -> SearchStrategy[StateDict[Layout]]: ...
@overload
def layouts(fits: Iterable[int] | None = None, *, mesh: Mesh | None = None) -> SearchStrategy[Layout]: ...
def layouts(
    fits: Mapping[str, Any] | Iterable[int] | None = None, *, mesh: Mesh | None = None
) -> SearchStrategy[Layout] | SearchStrategy[StateDict[Layout]]:
    """A strategy of layouts: meshes of up to three axes with any ranks, uneven and empty shards, orders, fused parts.

    Args:
        fits: The shape that they fit; for a state or its specs, a layout for each tensor, and one for tied names.
            Without it, they fit every tensor of three or more dims.
        mesh: The mesh; by default a random one for each layout.

    Raises:
        MissingExtra: hypothesis is not installed.

    >>> from hypothesis import given
    >>> @given(layouts((5, 3)))
    ... def test(layout):
    ...     numels = [region.numel for rank in layout.mesh.ranks for region in layout.regions((5, 3), rank)]
    ...     assert sum(numels) >= 15
    >>> test()
    """
    _require_hypothesis("layouts")
    from fdsd.testing._layouts import any_layouts, layouts_for, tables_for

    if is_mapping(fits):
        return tables_for(fits, mesh)
    shape: Any = fits
    return any_layouts(mesh) if shape is None else layouts_for(tuple(shape), mesh)


def pipelines(
    source: Mapping[str, Any] | None = None,
    *,
    exact: bool = False,
    structural: bool = False,
    max_steps: int = 4,
) -> SearchStrategy[Pipeline]:
    """A strategy of pipelines of random verbs.

    Args:
        source: The state, or its specs, that they fit. Without it they fit every state: renames and choices that
            may match nothing.
        exact: Whether they are exact once they are bound to the source; otherwise some have no inverse.
        structural: Whether they move elements only and compute no values, so that they lift to an optimizer's state.
        max_steps: How many verbs there are at most.

    Raises:
        MissingExtra: hypothesis is not installed.

    >>> import torch
    >>> from hypothesis import given
    >>> state = StateDict({"w": torch.tensor([1.0, 2.0])})
    >>> @given(pipelines(state, exact=True))
    ... def test(p):
    ...     assert (~p.bind(state))(p(state)).keys() == state.keys()
    >>> test()
    """
    _require_hypothesis("pipelines")
    from fdsd.testing._pipelines import pipelines_for, pipelines_for_all

    return pipelines_for_all(max_steps) if source is None else pipelines_for(source, exact, structural, max_steps)
