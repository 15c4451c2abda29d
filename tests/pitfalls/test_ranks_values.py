"""Values of models over ranks: shapes, dtypes, meta models, extra state, and ``restore``, on every kind of parallelism.

The table of rows is that of ``test_ranks_models``.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import fdsd
from fdsd.compat.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from fdsd.errors import FdsdError, SpecMismatch, UnknownName
from tests.helpers.audit_loads import WAYS, full, given, options_of, reference, spoiled, verdict_of
from tests.helpers.audit_values import case, local_values, same
from tests.helpers.audited import FROZEN, SIZES, Kind, build, plain
from tests.helpers.auditing import Audit, Check, group, num_ranks
from tests.helpers.parallelism import INNER

AUDIT = Audit()


# -- shapes and dtypes -----------------------------------------------------------------------------------------------

WRONG: dict[str, list[tuple[int, ...]]] = {
    "units.0.up.weight": [(INNER, 1), (1, 5), (5,), (1,), (), (9, 5), (INNER, 5, 1), (5, INNER), (0, 5)],
    "embed.weight": [(6, 1), (5, 6), (7, 5)],
    "table": [(2, 1), (3,), (3, 2)],
    "norm.num_batches_tracked": [(2,), (1, 1)],
    "noted.gain": [(1,), (), (4,)],
}


@AUDIT.check()
def exactly_the_shape(rank: int, kind: Kind) -> Any:
    """Seen: (5, 1) fills (5, 4); (6, 4) is half applied before it raises, on one rank only."""
    model = build(kind, 2)
    told: list[Any] = []
    for name, shapes in exactly_the_shape.share(WRONG.items(), kind, 3):
        for shape, way in zip(shapes, itertools.cycle(("full", "broadcast")), strict=False):
            with case(name, shape, way):
                content = {**reference(), name: torch.ones(shape, dtype=reference()[name].dtype)}
                found = verdict_of(model, given(way, rank, content, None), options_of(way, strict=False))
                assert found[0] == "error" and f"size mismatch for {name}" in found[1]
                told.append(found)
        with case(name, "restore"):
            state = {**reference(), name: torch.ones(shapes[0], dtype=reference()[name].dtype)}
            before = local_values(model)
            with pytest.raises(SpecMismatch, match=name) as caught:
                fdsd.restore(state, model, group=group())
            same(local_values(model), before)
            told.append(str(caught.value))
    return told


@AUDIT.check()
def sharded_values_of_other_shapes(rank: int, kind: Kind) -> Any:
    model, other = build(kind, 2), build(kind, 1)
    state: Any = get_model_state_dict(other)
    swapped = {**state, "units.0.up.weight": state["units.0.down.weight"]}
    found = verdict_of(model, swapped, StateDictOptions())
    assert "size mismatch for units.0.up.weight" in found[1]
    captured = fdsd.capture(other).model
    with pytest.raises(SpecMismatch, match=r"units\.0\.up\.weight"):
        fdsd.restore({**captured, "units.0.up.weight": captured["units.0.down.weight"]}, model, group=group())
    same(full(model), reference(2))
    return found


@AUDIT.check()
def one_element_goes_into_no_dims(rank: int, kind: Kind) -> None:
    """As torch: files of old have scalars of one dim."""
    content = {**reference(), "norm.num_batches_tracked": torch.tensor([77])}
    for way in one_element_goes_into_no_dims.share(("full", "broadcast"), kind, 2):
        model = build(kind, 2)
        set_model_state_dict(model, given(way, rank, content, None), options=options_of(way))
        same(full(model), {**reference(), "norm.num_batches_tracked": torch.tensor(77)})


DTYPES = {
    torch.float32: (torch.float64, torch.bfloat16, torch.int32),
    torch.bfloat16: (torch.float32, torch.float16, torch.float64),
}
"""For each dtype of the model those of the state."""


def cast(state: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {name: value.to(dtype) if isinstance(value, torch.Tensor) else value for name, value in state.items()}


@AUDIT.check()
def casts_as_torch_does(rank: int, kind: Kind) -> None:
    """The values are those of ``nn.Module.load_state_dict``; and the model keeps its dtypes."""
    for target, sources in casts_as_torch_does.share(DTYPES.items(), kind, 2):
        model = build(kind, 2, dtype=target)
        for source, way in zip(sources, ("full", "broadcast", "full"), strict=True):
            with case(source, target, way):
                content = cast({**reference(), "table": torch.tensor([[1.7, -2.5, 3], [4, 5, 6]])}, source)
                oracle = plain(2, dtype=target)
                oracle.load_state_dict(content)
                set_model_state_dict(model, given(way, rank, content, None), options=options_of(way))
                same(full(model), dict(oracle.state_dict()))


@AUDIT.check()
def sharded_values_are_cast_too(rank: int, kind: Kind) -> None:
    model, source = build(kind, 2, dtype=torch.bfloat16), build(kind, 1)
    oracle = plain(2, dtype=torch.bfloat16)
    oracle.load_state_dict(reference())
    set_model_state_dict(model, get_model_state_dict(source))
    same(full(model), dict(oracle.state_dict()))


@AUDIT.check()
def restore_and_dtypes(rank: int, kind: Kind) -> Any:
    told: list[str] = []
    states = (lambda: reference(dtype=torch.float64), lambda: fdsd.capture(build(kind, 1)).model)
    for state_of in restore_and_dtypes.share(states, kind, 2):
        model = build(kind, 2, dtype=torch.bfloat16)
        state: Any = state_of()
        before = local_values(model)
        with pytest.raises(SpecMismatch, match="dtype=") as caught:
            fdsd.restore(state, model, group=group())
        same(local_values(model), before)
        told.append(str(caught.value))
        fdsd.restore(state, model, group=group(), dtype="target")
        oracle = plain(2, dtype=torch.bfloat16)
        oracle.load_state_dict(reference())
        same(full(model), dict(oracle.state_dict()))
    return told


# -- meta models -----------------------------------------------------------------------------------------------------


def at(model: Any, path: str) -> Any:
    """Give a tensor of a model by its clean name, whatever wraps the modules."""
    found = model
    for name in path.split("."):
        while name not in (*found._parameters, *found._buffers, *found._modules):
            (found,) = found._modules.values()  # a wrapper
        found = getattr(found, name)
    return found


@AUDIT.check(meta=True)
def on_meta(rank: int, kind: Kind) -> None:
    """Seen: tied weights come back as separate parameters; bfloat16 becomes float32; buffers stay on meta unsaid."""
    expected = {
        name: value.bfloat16() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in reference().items()
    }
    for way in on_meta.share(WAYS, kind, 3):
        with case(way):
            model = build(kind, device="meta", dtype=torch.bfloat16)
            trains = [p.requires_grad for p in model.parameters()]
            with pytest.warns(UserWarning, match="still on the meta device: 'cache'"):
                set_model_state_dict(model, given(way, rank, reference(), build(kind, 1)), options=options_of(way))
            same(full(model), expected)
            assert at(model, "head.weight") is at(model, "embed.weight")
            assert at(model, FROZEN[1]) is at(model, FROZEN[0])
            assert [p.requires_grad for p in model.parameters()] == trains
            assert not [t for t in model.parameters() if getattr(t, "_local_tensor", t).is_meta]


@AUDIT.check(meta=True)
def restore_on_meta(rank: int, kind: Kind) -> None:
    for state_of in restore_on_meta.share((reference, lambda: fdsd.capture(build(kind, 1)).model), kind, 2):
        model = build(kind, device="meta")
        report = fdsd.restore(state_of(), model, group=group())
        assert report.left_on_meta == ("cache",) and at(model, "cache").is_meta
        same(full(model), reference())
        assert at(model, "head.weight") is at(model, "embed.weight")
        assert at(model, FROZEN[1]) is at(model, FROZEN[0])
        model = build(kind, device="meta")
        report = fdsd.restore(
            fdsd.drop("units.1.{_...}", "table")(state_of()),
            model,
            group=group(),
            allow_missing=["units.1.{_...}", "table"],
            init=lambda fqn, spec: torch.arange(spec.numel, dtype=spec.dtype).reshape(spec.shape),
        )
        assert report.left_on_meta == () and "cache" in report.initialised
        made = {
            name: torch.arange(value.numel()).reshape(value.shape).to(value.dtype)
            for name, value in reference().items()
            if name.startswith("units.1.") or name == "table"
        }
        same(full(model), {**reference(), **made})
        assert at(model, "cache").tolist() == [0, 1, 2, 3]


@AUDIT.check(meta=True)
def what_is_missing_stays_on_meta_and_is_named(rank: int, kind: Kind) -> Any:
    model = build(kind, device="meta")
    content = spoiled(reference(), "missing", 0)
    for way in ("full", "broadcast"):
        with pytest.raises(RuntimeError, match=r'Missing key.*"units\.1\.down\.weight"'):
            set_model_state_dict(model, given(way, rank, content, None), options=options_of(way))
        assert all(getattr(t, "_local_tensor", t).is_meta for t in model.parameters())
    with pytest.raises(UnknownName, match=r"units\.1\.down\.weight") as caught:
        fdsd.restore(content, model, group=group())
    assert all(getattr(t, "_local_tensor", t).is_meta for t in model.parameters())
    options = options_of("broadcast", strict=False)
    with pytest.warns(UserWarning, match=r"still on the meta device.*'units\.1\.down\.weight'"):
        set_model_state_dict(model, given("broadcast", rank, content, None), options=options)
    return str(caught.value)


# -- restoring -------------------------------------------------------------------------------------------------------


@AUDIT.check()
def names_of_restore(rank: int, kind: Kind) -> Any:
    model, source = build(kind, 2), build(kind, 1)
    told: list[Any] = []
    states = (reference, lambda: dict(fdsd.capture(source).model))
    for bad, state_of in names_of_restore.share(itertools.product(range(num_ranks()), states), kind, 3):
        state = state_of()
        if rank == bad:
            state = {**spoiled(state, "missing", bad), "stray": torch.ones(1)}
        items = [(name, id(value)) for name, value in state.items()]
        before = local_values(model)
        with case(bad), pytest.raises(FdsdError) as caught:
            fdsd.restore(state, model, group=group())
        same(local_values(model), before)
        assert [(name, id(value)) for name, value in state.items()] == items
        told.append((type(caught.value).__name__, str(caught.value)))
    return told


@AUDIT.check()
def the_same_filter(rank: int, kind: Kind) -> None:
    model, source = build(kind, 2), build(kind, 1)
    keep = fdsd.filter_frozen(fdsd.describe(source))
    state = fdsd.materialize(keep(fdsd.capture(source).model), group=group())
    report = fdsd.restore(state, model, group=group(), filter=keep)
    assert report.missing == report.unexpected == ()
    same(full(model), {**reference(), **{name: reference(2)[name] for name in FROZEN}})
    with pytest.raises(UnknownName, match=r"frozen\.first\.weight"):
        fdsd.restore(state, model, group=group())


@AUDIT.check()
def one_tied_name(rank: int, kind: Kind) -> None:
    """Seen: such a file is "missing a key"."""
    for lost in one_tied_name.share(("embed.weight", "head.weight"), kind, 2):
        model = build(kind, 2)
        state = {name: value for name, value in reference().items() if name not in (lost, FROZEN[0])}
        report = fdsd.restore(state, model, group=group())
        assert report.missing == report.unexpected == report.untied == ()
        same(full(model), reference())


@AUDIT.check()
def values_of_extra_state(rank: int, kind: Kind) -> None:
    """Seen: a missing one hands the module a private object; ``None`` is "missing"."""
    model, source = build(kind, 2), build(kind, 1)
    values: Any = (None, {"a": [1, (2,)]}, torch.arange(3))
    for value, way in values_of_extra_state.share(itertools.product(values, WAYS), kind, 4):
        with case(value, way):
            state = given(way, rank, reference(), source)
            if state:
                state["noted._extra_state"] = value
            set_model_state_dict(model, state, options=options_of(way))
            same(get_model_state_dict(model)["noted._extra_state"], value)
    fdsd.restore({**reference(), "noted._extra_state": None}, model, group=group())
    assert get_model_state_dict(model)["noted._extra_state"] is None


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("check", AUDIT.checks, ids=repr)
def test_on_ranks(check: Check, n: int) -> None:
    AUDIT.verify(check, n)
