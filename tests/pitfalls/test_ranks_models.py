"""Models over ranks: each known fault, on every kind of parallelism, for each way to give a state dict.

| row of PITFALLS.md | checks |
| --- | --- |
| wrapper segments stand anywhere | all, by the kinds; names alone: ``unit/comms/test_modules``, ``test_modules`` |
| missing and unexpected keys | ``missing_and_unexpected_names``, ``on_one_rank_only``, ``no_state_dict`` |
| ``strict`` with full dicts; lax loads | ``missing_and_unexpected_names`` |
| the caller's dict is changed | all that ask ``verdict_of``, refused loads too; ``names_of_restore`` |
| broadcasting shapes; half applied | ``exactly_the_shape``, ``sharded_values_of_other_shapes``, ``on_one_rank_only`` |
| float32 into others; the target's dtype stays | ``casts_as_torch_does``, ``restore_and_dtypes``, ``on_meta`` |
| tied weights: meta, gathered, one in a file | ``on_meta``, ``every_option``, ``the_engine``, ``one_tied_name`` |
| frozen ones: aliases, the same filter | ``every_option``, ``missing_and_unexpected_names``, ``the_same_filter`` |
| non-persistent buffers on meta | ``on_meta``, ``restore_on_meta`` |
| extra state: missing, ``None`` | ``missing_and_unexpected_names``, ``values_of_extra_state`` |
| replicated and 0-dim buffers, equal shards | ``equal_values_are_no_copies`` |
| other key orders on other ranks | ``other_orders`` |
| broadcast with ``{}`` elsewhere | the way "broadcast"; with an optimizer: ``test_ranks_optimizers`` |
| uneven FSDP x TP | the kind "FSDP2+TP", which has 7 rows over 2 x 2, in all |
| each byte once; memory | ``test_ranks_traffic`` |
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import fdsd
from fdsd.compat.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from fdsd.errors import FdsdError, SpecMismatch, UnknownName
from tests.helpers.audited import (
    FROZEN,
    SIZES,
    Audited,
    Kind,
    build,
    case,
    kinds_of,
    local_values,
    plain,
    same,
)
from tests.helpers.auditing import Audit, Check, group, num_ranks

FULL = StateDictOptions(full_state_dict=True)
AUDIT = Audit()
WAYS = ("sharded", "full", "broadcast")


def options_of(way: str, **more: Any) -> StateDictOptions:
    return StateDictOptions(full_state_dict=way != "sharded", broadcast_from_rank0=way == "broadcast", **more)


def reference(salt: int = 1, **options: Any) -> dict[str, Any]:
    return dict(plain(salt, **options).state_dict())


def full(model: Any) -> dict[str, Any]:
    return dict(get_model_state_dict(model, options=FULL))


def given(way: str, rank: int, content: dict[str, Any], source: Any) -> dict[str, Any]:
    """Give the state dict of this rank: the content's names, of the values of the source."""
    if way == "broadcast":
        return dict(content) if rank == 0 else {}
    values = get_model_state_dict(source) if way == "sharded" else {}
    return {name: values.get(name, value) for name, value in content.items()}


# -- reading ---------------------------------------------------------------------------------------------------------


@AUDIT.check()
def every_option(rank: int, kind: Kind) -> None:
    """Seen: a frozen weight's alias stays; gathering copies a tied tensor for each of its names."""
    model = build(kind, 1)
    before = local_values(model)
    for whole, cpu, frozen in itertools.product([False, True], repeat=3):
        options = StateDictOptions(full_state_dict=whole, cpu_offload=cpu, ignore_frozen_params=frozen)
        with case(options):
            state = get_model_state_dict(model, options=options)
            expected = reference()
            if frozen:
                assert [expected.pop(name) for name in FROZEN]
            if whole and cpu and rank:
                assert state == {}
                continue
            same(state, expected)
            tied(state["head.weight"], state["embed.weight"])
            if not frozen:
                tied(state[FROZEN[0]], state[FROZEN[1]])
            if whole:
                assert all(type(v) in (torch.Tensor, dict) for v in state.values())
    same(local_values(model), before)


@AUDIT.check()
def the_engine(rank: int, kind: Kind) -> None:
    model = build(kind, 1)
    captured = fdsd.capture(model).model
    for state in (captured, fdsd.snapshot(captured)):
        made = fdsd.materialize(state, group=group())
        same(made, reference())
        tied(made["head.weight"], made["embed.weight"])
        tied(made[FROZEN[0]], made[FROZEN[1]])
    spec = fdsd.describe(model)
    kept = fdsd.materialize(fdsd.filter_frozen(spec)(captured), group=group())
    assert list(kept) == [name for name in reference() if name not in FROZEN]


@AUDIT.check()
def equal_values_are_no_copies(rank: int, kind: Kind) -> None:
    """Seen: equal shards are "deduplicated" by value; buffers that every rank holds are concatenated; 0 dims crash."""
    expected = reference(value=3)
    model = build(kind, value=3)
    same(full(model), {**expected, "noted._extra_state": {"salt": 0}})
    made = fdsd.materialize(fdsd.capture(model).model, group=group())
    same(made, {**expected, "noted._extra_state": {"salt": 0}})
    assert made["norm.num_batches_tracked"].shape == ()


def tied(a: Any, b: Any) -> None:
    if hasattr(a, "local_shards"):
        pairs = zip(a.local_shards(), b.local_shards(), strict=True)
        assert all(x.tensor.data_ptr() == y.tensor.data_ptr() for x, y in pairs)
        return
    a, b = (getattr(t, "_local_tensor", t) for t in (a, b))
    assert a.data_ptr() == b.data_ptr()


# -- verdicts --------------------------------------------------------------------------------------------------------

LOST = (
    ["units.1.down.weight"],
    ["table", "norm.num_batches_tracked"],
    ["noted._extra_state"],
    ["head.weight", "units.0.up.bias", "noted.gain"],
)
ADDED = ("stray", "units.0.up.weights")


def spoiled(content: dict[str, Any], fault: str, at: int) -> dict[str, Any]:
    made = dict(content)
    if fault in ("missing", "both"):
        for name in LOST[at % len(LOST)]:
            del made[name]
    if fault in ("unexpected", "both"):
        made[ADDED[at % 2]] = torch.ones(2)
    return made


def verdict_of(model: Any, state: Any, options: StateDictOptions) -> Any:
    """What all ranks have to be told alike; a refused load must have changed nothing, and no load its argument."""
    before = local_values(model)
    items = [(name, id(value)) for name, value in state.items()]
    try:
        result = set_model_state_dict(model, state, options=options)
    except RuntimeError as error:
        same(local_values(model), before)
        return "error", str(error)
    finally:
        assert [(name, id(value)) for name, value in state.items()] == items
    return result.missing_keys, result.unexpected_keys


LOADS = (
    *itertools.product([True, False], [False], ["missing", "unexpected", "both"]),
    (True, False, "none"),
    (True, True, "none"),
    (True, True, "both"),
    (False, True, "both"),
)
"""Strict or lax; without frozen parameters or with them; and the fault."""


@AUDIT.check()
def missing_and_unexpected_names(rank: int, kind: Kind) -> Any:
    """Seen: never reported with full dicts; one rank raises while the others hang or report success.

    What is missing, and what is not expected, is what ``nn.Module.load_state_dict`` of the plain model says.
    """
    model, source = build(kind, 2), build(kind, 1)
    told: list[Any] = []
    for at, (way, (strict, frozen, fault)) in enumerate(itertools.product(WAYS, LOADS)):
        with case(way, "strict" if strict else "lax", "ignore frozen" if frozen else "all", fault):
            content = spoiled(reference(), fault, at)
            oracle = plain(2)
            missing, unexpected = oracle.load_state_dict(content, strict=False)
            if frozen:
                content = {name: value for name, value in content.items() if name not in FROZEN}
                oracle = plain(2)
                oracle.load_state_dict(content, strict=False)
            options = options_of(way, strict=strict, ignore_frozen_params=frozen)
            found = verdict_of(model, given(way, rank, content, source), options)
            told.append(found)
            if strict and fault != "none":
                assert found[0] == "error"
                assert all(f'"{name}"' in found[1] for name in [*missing, *unexpected])
            else:
                assert (sorted(found[0]), found[1]) == (sorted(missing), unexpected)
                same(full(model), dict(oracle.state_dict()))
                set_model_state_dict(model, reference(2), options=FULL)
    return told


@AUDIT.check(joined=True)
def on_one_rank_only(rank: int, kind: Kind) -> Any:
    """A fault of one rank is one of all, wherever they hold parts of one model."""
    model, source = build(kind, 2), build(kind, 1)
    told: list[Any] = []
    faults = ("missing", "unexpected", "shape", "both", "kind")
    for at, (bad, way, fault) in enumerate(itertools.product(range(num_ranks()), ("sharded", "full"), faults)):
        with case(f"rank {bad}", way, fault):
            content = reference()
            if rank == bad:
                content = spoiled(content, fault, at)
            state: Any = given(way, rank, content, source)
            if rank == bad and fault == "shape":
                state["units.0.up.weight"] = torch.ones(7, 1)
            if rank == bad and fault == "kind":
                state["table"] = "text"
            found = verdict_of(model, state, options_of(way))
            assert found[0] == "error"
            told.append(found)
    same(full(model), reference(2))
    return told


@AUDIT.check(joined=True)
def no_state_dict(rank: int, kind: Kind) -> None:
    model = build(kind, 2)
    for bad, wrong in itertools.product(range(num_ranks()), [None, [1], {"x": 1, 3: torch.ones(1)}]):
        state: Any = wrong if rank == bad else reference()
        with case(bad, wrong), pytest.raises((RuntimeError, TypeError)):
            set_model_state_dict(model, state, options=FULL)
        if bad == 0:
            with case(wrong, "broadcast"), pytest.raises((RuntimeError, TypeError)):
                set_model_state_dict(model, wrong if rank == 0 else {}, options=options_of("broadcast"))  # type: ignore[arg-type]
    same(full(model), reference(2))


@AUDIT.check()
def other_orders(rank: int, kind: Kind) -> None:
    """Seen: weights are mixed silently."""
    model, source = build(kind, 2), build(kind, 1)
    for way in WAYS:
        set_model_state_dict(model, reference(2), options=FULL)
        items = list(given(way, rank, reference(), source).items())
        turned = items[rank % 3 :] + items[: rank % 3]
        set_model_state_dict(model, dict(turned[::-1] if rank % 2 else turned), options=options_of(way))
        same(full(model), reference())
    state = fdsd.capture(source).model
    turned = list(state.items())[:: -1 if rank % 2 else 1]
    fdsd.restore(dict(turned), build(kind, 2), group=group())
    same(dict(sorted(fdsd.materialize(dict(turned), group=group()).items())), dict(sorted(reference().items())))


# -- shapes and dtypes -----------------------------------------------------------------------------------------------

WRONG: dict[str, list[tuple[int, ...]]] = {
    "units.0.up.weight": [(7, 1), (1, 5), (5,), (1,), (), (8, 5), (7, 5, 1), (5, 7), (0, 5)],
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
    for name, shapes in WRONG.items():
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
    for way in ("full", "broadcast"):
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
    for target, sources in DTYPES.items():
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
    for state_of in (lambda: reference(dtype=torch.float64), lambda: fdsd.capture(build(kind, 1)).model):
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
    for way in WAYS:
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
    for state_of in (reference, lambda: fdsd.capture(build(kind, 1)).model):
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
    for state_of, bad in itertools.product((reference, lambda: dict(fdsd.capture(source).model)), range(num_ranks())):
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
    for lost in ("embed.weight", "head.weight"):
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
    for value, way in itertools.product(values, WAYS):
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


def test_the_model_has_what_the_rows_need() -> None:
    kinds = {kind.name for n in SIZES for kind in kinds_of(n)}
    assert len(kinds) >= 12
    names = dict(Audited().named_parameters(remove_duplicate=False))
    assert names["head.weight"] is names["embed.weight"] and names[FROZEN[0]] is names[FROZEN[1]]
    assert {len(names), len(reference())} == {15, 20}
