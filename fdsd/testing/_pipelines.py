"""How random pipelines are drawn: verb after verb, each to fit what the ones before have left."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from fdsd.data.statedict import StateDict, specs
from fdsd.pipeline.pipeline import Pipeline, identity
from fdsd.testing._verbs import EXACT, OTHERS, Scene
from fdsd.transforms import add_prefix, drop, rename_fqns

__all__ = ["pipelines_for", "pipelines_for_all"]


@st.composite
def pipelines_for(
    draw: st.DrawFn, source: Mapping[str, Any], exact: bool = False, structural: bool = False, max_steps: int = 4
) -> Pipeline:
    """Give pipelines that fit a source."""
    state: StateDict[Any] = specs(source)
    made = identity
    known = EXACT if exact else (*EXACT, *OTHERS)
    verbs = [verb for verb in known if not (structural and verb.computes)]
    for number in range(draw(st.integers(0, max_steps))):
        fitting = [verb for verb in verbs if verb.fits(state)]
        if not fitting:
            break
        step = draw(st.sampled_from(fitting)).make(Scene(draw, state, number))
        if not exact and draw(st.booleans()):
            step = step.bind(state)
        made, state = made >> step, step(state)
        if any(part.verb == "tie" for part in step.steps):
            break  # a verb that moves one name of the tied tensor would untie it, and a tie that is gone is not undone
    return made


@st.composite
def pipelines_for_all(draw: st.DrawFn, max_steps: int) -> Pipeline:
    """Give pipelines that fit every state."""
    steps = st.sampled_from(
        [
            rename_fqns({"layers.{i}.{rest...}?": "blocks.{i+1}.{rest...}"}),
            rename_fqns({"{x}.weight?": "{x}.kernel", "embed.weight?": "table"}),
            add_prefix("model."),
            drop("{_...}.rotary.inv_freq?", "step?"),
        ]
    )
    made = identity
    for number in range(draw(st.integers(0, max_steps))):
        made >>= draw(st.one_of(steps, st.just(add_prefix(f"p{number}."))))
    return made
