"""Law 10: no input mapping, tensor, module or optimizer changes; no optimizer is stepped; no hook fires."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fdsd import (
    OptimState,
    StateDict,
    TrainState,
    average,
    combine,
    defer,
    diff,
    lerp,
    materialize,
    partition,
    rename_fqns,
    specs,
)
from fdsd.data.spec import is_exact
from fdsd.testing import assert_same, pipelines, states
from fdsd.testing.same import same_tensors


def photograph(state: Any) -> list[tuple[str, int, Any, Any, bool]]:
    return [
        (name, id(leaf), leaf.detach().clone(), (leaf._version, leaf.stride(), leaf.data_ptr()), leaf.requires_grad)
        if is_exact(leaf)
        else (name, id(leaf), leaf, None, False)
        for name, leaf in state.items()
    ]


def unchanged(before: Any, state: Any) -> bool:
    after = photograph(state)
    same = [a[:2] + a[3:] for a in before] == [b[:2] + b[3:] for b in after]
    return same and all(
        same_tensors(a[2], b[2]) if isinstance(a[2], torch.Tensor) else a[2] is b[2]
        for a, b in zip(before, after, strict=True)
    )


@given(states(), st.data())
def test_no_pipeline_changes_its_input(state: StateDict[Any], data: st.DataObject) -> None:
    p = data.draw(pipelines(state, max_steps=6))
    plain = dict(state)
    before = photograph(plain)
    p(plain)
    assert unchanged(before, plain)
    materialize(p(defer(plain)))
    p(specs(plain)), p.check(plain), p.bind(plain), p.explain(plain), p.coverage(plain), p.plan(plain)
    assert unchanged(before, plain)


@given(states(), st.data())
def test_lazy_results_read_what_is_there_when_they_are_read(state: StateDict[Any], data: st.DataObject) -> None:
    """And materializing twice gives the same."""
    p = data.draw(pipelines(state))
    lazy = p(defer(state))
    first = materialize(lazy)
    assert_same(materialize(lazy), first, order=True, tied=False)


@given(states(), st.floats(-1, 2))
def test_functions_of_states_change_nothing(state: StateDict[Any], weight: float) -> None:
    before = photograph(state)
    average([state, state], [weight, 1.0]), lerp(state, state, weight), diff(state, state)
    partition(state, "{_...}?"), combine(state)
    assert unchanged(before, state)


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.SGD, torch.optim.LBFGS, torch.optim.Adagrad])
@pytest.mark.parametrize("trained", [False, True])
def test_an_optimizer_and_its_module_stay_as_they_are(make: Any, trained: bool) -> None:
    net = network()
    optimizer = make(net.parameters(), lr=0.1)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        made = net(torch.arange(12.0).reshape(4, 3)).square().sum()
        made.backward()
        return made

    if trained:
        optimizer.step(loss)
    fired: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: fired.append("pre"))
    optimizer.register_step_post_hook(lambda *_: fired.append("post"))
    net.register_forward_hook(lambda *_: fired.append("forward"))
    before = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
    kept = photograph(net.state_dict(keep_vars=True))
    mode = net.training
    state = TrainState(
        net.state_dict(), OptimState.from_torch(optimizer.state_dict(), [n for n, _ in net.named_parameters()])
    )
    p = rename_fqns({"{i}.weight": "l.{i}.kernel"})
    made = p(state)
    (~p)(made), p.check(state), p.explain(state), p(TrainState(defer(state.model), state.optim))
    assert made.optim is not None
    made.optim.to_torch(ids=True), made.optim.to_torch()
    assert fired == []
    assert net.training == mode
    assert unchanged(kept, net.state_dict(keep_vars=True))
    assert_same(net.state_dict(), before[0], order=True)
    names = [n for n, _ in net.named_parameters()]
    now = OptimState.from_torch(optimizer.state_dict(), names)
    assert_same(now, OptimState.from_torch(before[1], names), order=True)


def test_results_that_alias_the_input_are_still_views_of_it() -> None:
    """No copy is made where a view serves; so the result, like the input, is read-only by agreement."""
    from fdsd import split, transpose

    w = torch.arange(6.0).reshape(2, 3)
    made = (split("w", ["a", "b"], dim=0, sizes=[1, 1]) >> transpose("a"))({"w": w})
    assert made["a"].untyped_storage().data_ptr() == w.untyped_storage().data_ptr()
    assert made["b"]._base is not None or made["b"].data_ptr() == w.data_ptr() + 12
