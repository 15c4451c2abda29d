"""ModelSpec and its JSON: exact both ways, and clear about what it refuses."""

from __future__ import annotations

import json
import math
import pickle
from enum import IntEnum
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fdsd.data.errors import BadFile, FdsdError, NameConflict, SpecMismatch, Unsupported
from fdsd.data.groups import ParamGroup
from fdsd.data.model import ModelSpec, TensorEntry
from fdsd.data.plain_json import decode, encode, parse
from fdsd.data.spec import TensorSpec
from fdsd.data.statedict import StateDict
from fdsd.data.ties import ties
from fdsd.data.values import same_value

F32 = TensorSpec((4, 2), torch.float32)
BF16 = TensorSpec((4, 2), torch.bfloat16)


def tied_model() -> ModelSpec:
    return ModelSpec(
        {
            "layers.10.w": TensorEntry(BF16, trainable=False),
            "layers.2.w": TensorEntry(F32, layout={"axes": ("dp", "tp"), "dims": [0, None]}),
            "head": TensorEntry(BF16, tied_to="layers.10.w"),
            "rope": TensorEntry(TensorSpec((), torch.float8_e4m3fn), "buffer", persistent=False),
            "mean": TensorEntry(TensorSpec((0, 3), torch.int64), "buffer", trainable=False),
        },
        (
            (ParamGroup(("layers.10.w",), {"lr": 0.1, "betas": (0.9, 0.99)}), ParamGroup((), {"lr": math.inf})),
            (ParamGroup(("layers.2.w",), {"pair": [0.9, (1, None)], "foreach": None, "x": True}, named=True),),
        ),
    )


# ------------------------------------------------------------------------------------------ the value


def test_specs_are_the_persistent_entries_in_order_with_their_ties() -> None:
    specs = tied_model().specs()
    assert list(specs) == ["layers.10.w", "layers.2.w", "head", "mean"]
    assert specs["head"] == BF16
    assert ties(specs) == [("layers.10.w", "head")]
    assert specs["layers.2.w"].tie is None


def test_ties_of_the_given_specs_do_not_count() -> None:
    entry = TensorEntry(TensorSpec((1,), torch.int8, tie="x"))
    assert ties(ModelSpec({"a": entry, "b": entry}).specs()) == []


def test_frozen_names_take_their_other_names_along() -> None:
    assert tied_model().frozen == ("layers.10.w", "head")
    spec = ModelSpec(
        {"head": TensorEntry(F32, tied_to="w", trainable=False), "w": TensorEntry(F32), "v": TensorEntry(F32)}
    )
    assert spec.frozen == ("head", "w")
    assert ModelSpec({}).frozen == ()


def test_entries_are_a_state_dict_apart_from_the_given_mapping() -> None:
    given = {"w": TensorEntry(F32)}
    spec = ModelSpec(given)
    given["v"] = TensorEntry(F32)
    assert isinstance(spec.entries, StateDict)
    assert list(spec.entries) == ["w"]
    with pytest.raises(AttributeError):
        spec.entries = StateDict()
    assert ModelSpec({"w": TensorEntry(F32)}, [[ParamGroup(("w",))]]).optimizers == ((ParamGroup(("w",)),),)


def test_equality_and_pickle() -> None:
    assert tied_model() == tied_model()
    assert tied_model() != ModelSpec(tied_model().entries)
    assert ModelSpec({"w": TensorEntry(F32)}) != ModelSpec({"w": TensorEntry(F32, trainable=False)})
    assert pickle.loads(pickle.dumps(tied_model())) == tied_model()
    with pytest.raises(TypeError, match="unhashable"):
        hash(tied_model())


def test_all_wrong_ties_are_named() -> None:
    entries = {
        "a": TensorEntry(F32, tied_to="b"),
        "b": TensorEntry(F32, tied_to="a"),
        "c": TensorEntry(F32, tied_to="c"),
        "d": TensorEntry(F32, tied_to="nowhere"),
        "e": TensorEntry(BF16, tied_to="f"),
        "f": TensorEntry(F32),
        "g": TensorEntry(F32, tied_to="a"),
        "h": TensorEntry(F32, tied_to="f"),
    }
    with pytest.raises(SpecMismatch) as caught:
        ModelSpec(entries)
    text = str(caught.value)
    for part in (
        "6 wrong ties",
        "'a' is tied to 'b', which is tied to 'a'",
        "'c' is tied to itself",
        "'d' is tied to 'nowhere', which is no entry",
        "'e' is bfloat16[4, 2] and tied to 'f', which is float32[4, 2]",
        "'g' is tied to 'a', which is tied to 'b'",
    ):
        assert part in text
    assert "'h'" not in text


class Flag(IntEnum):
    ON = 1


class Pair(NamedTuple):
    x: int


LOOP: list[Any] = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    "make, error, text",
    [
        (lambda: TensorEntry((4, 2)), SpecMismatch, "not tuple"),
        (lambda: TensorEntry(F32, "module"), SpecMismatch, "'module'"),
        (lambda: TensorEntry(F32, layout=torch.tensor(1)), Unsupported, "layout is a torch.Tensor"),
        (lambda: TensorEntry(F32, layout={"a": [object()]}), Unsupported, "layout['a'][0] is a builtins.object"),
        (lambda: TensorEntry(F32, layout=LOOP), Unsupported, "contains itself"),
        (lambda: ModelSpec({"w": F32}), Unsupported, "'w'. describe(model) makes"),
        (lambda: ModelSpec(torch.nn.Linear(1, 1)), Unsupported, "not Linear. describe(model) makes"),  # type: ignore[arg-type]
        (lambda: ModelSpec({}, [[{"lr": 1}]]), Unsupported, "optimizers[0]"),
        (lambda: ModelSpec({}, (((ParamGroup(("a",)), ParamGroup(("a",)))),)), NameConflict, "'a'"),
    ],
)
def test_refused_specs(make: Any, error: type[FdsdError], text: str) -> None:
    with pytest.raises(error) as caught:
        make()
    assert text in str(caught.value)


# ------------------------------------------------------------------------------------------ JSON


def test_json_keeps_everything_and_its_order() -> None:
    text = tied_model().to_json()
    again = ModelSpec.from_json(text)
    assert again == tied_model()
    assert list(again.entries) == list(tied_model().entries)
    assert again.to_json() == text
    assert again.optimizers[1][0].named
    assert type(again.entries["layers.2.w"].layout["axes"]) is tuple
    assert json.loads(text)["version"] == 1
    assert ModelSpec.from_json(ModelSpec({}).to_json()) == ModelSpec({})
    assert ModelSpec.from_json(text.encode()) == again


DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_has_a_name(dtype: torch.dtype) -> None:
    spec = ModelSpec({"w": TensorEntry(TensorSpec((3,), dtype))})
    assert ModelSpec.from_json(spec.to_json()).entries["w"].spec.dtype is dtype


def keys() -> st.SearchStrategy[Any]:
    return st.one_of(st.text(max_size=3), st.sampled_from(["$", "$tuple", "$float"]))


def plain() -> st.SearchStrategy[Any]:
    base = st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(st.characters(), max_size=4),
        st.sampled_from([2**63, -(10**1300), math.inf, -math.inf, math.nan, -0.0, 5e-324, "\ud800", "NaN"]),
    )
    odd_keys = st.one_of(st.integers(), st.none(), st.booleans(), st.tuples(st.integers(), keys()), keys())
    return st.recursive(
        base,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(keys(), inner, max_size=3),
            st.dictionaries(odd_keys, inner, max_size=3),
        ),
        max_leaves=6,
    )


@given(st.dictionaries(st.text(max_size=4), plain(), max_size=4), plain())
def test_options_and_layouts_come_back_exactly(options: dict[str, Any], layout: Any) -> None:
    options = {key: value for key, value in options.items() if key not in ("params", "param_names")}
    spec = ModelSpec({"w": TensorEntry(F32, layout=layout)}, ((ParamGroup(("w",), options),),))
    text = spec.to_json()
    again = ModelSpec.from_json(text)
    assert again.optimizers == spec.optimizers
    assert same_value(again.entries["w"].layout, layout)
    assert again.to_json() == text
    assert list(again.optimizers[0][0].options) == list(options)


def test_integers_of_any_length() -> None:
    spec = ModelSpec({}, ((ParamGroup((), {"n": 10**5000, "m": -(10**5000)}),),))
    assert ModelSpec.from_json(spec.to_json()) == spec


@given(st.floats())
def test_floats_keep_their_sign_and_bits(value: float) -> None:
    again = decode(parse(json.dumps(encode(value, "x", [])), "x"), "x")
    assert type(again) is float
    assert again == value or (math.isnan(again) and math.isnan(value))
    assert math.isnan(value) or math.copysign(1, again) == math.copysign(1, value)


SCALARS = [
    torch.tensor(0.1),
    torch.tensor(0.1, dtype=torch.float64),
    torch.tensor(0.1, dtype=torch.bfloat16),
    torch.tensor(0.1).to(torch.float8_e4m3fn),
    torch.tensor(-7, dtype=torch.int8),
    torch.tensor(2**40 + 1),
    torch.tensor(True),
    torch.tensor(1.5 - 2.5j),
    torch.tensor(1.5 - 2.5j).conj(),
    torch.tensor(math.nan),
    torch.tensor(-math.inf),
    torch.tensor(0.3, requires_grad=True),
    torch.arange(9.0)[4],
]


@pytest.mark.parametrize("value", SCALARS, ids=repr)
def test_scalar_tensors_among_options_keep_value_and_dtype(value: torch.Tensor) -> None:
    spec = ModelSpec({}, ((ParamGroup((), {"lr": value, "betas": (value, 0.9)}),),))
    text = spec.to_json()
    again = ModelSpec.from_json(text)
    back = again.optimizers[0][0].options["lr"]
    assert (back.dtype, back.shape) == (value.dtype, torch.Size())
    wanted = value.detach().resolve_conj().reshape(1)
    assert back.reshape(1).view(torch.uint8).tolist() == wanted.view(torch.uint8).tolist()
    assert isinstance(again.optimizers[0][0].options["betas"], tuple)
    assert again.to_json() == text


@pytest.mark.parametrize(
    "value, text",
    [
        (object(), "builtins.object"),
        (torch.ones(3), "float32[3]"),
        (torch.ones(1), "shape [1]"),
        (torch.empty((), device="meta"), "meta"),
        (torch.nn.Parameter(torch.tensor(1.0)), "Parameter"),
        (torch.float32, "dtype"),
        (Flag.ON, "Flag"),
        (Pair(1), "Pair"),
        ({1}, "set"),
        (b"x", "bytes"),
        ({(torch.tensor(1),): 1}, "the key"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_other_options_are_refused_by_name_and_type(value: Any, text: str) -> None:
    group = ParamGroup(("w",), {"lr": 0.1, "odd": value, "more": [object()]})
    with pytest.raises(Unsupported) as caught:
        ModelSpec({}, ((), (ParamGroup(()), group))).to_json()
    assert "2 options" in str(caught.value)
    assert "optimizers[1][1]['odd']" in str(caught.value)
    assert "optimizers[1][1]['more'][0]" in str(caught.value)
    assert text in str(caught.value)


def test_an_option_that_contains_itself_is_refused() -> None:
    with pytest.raises(Unsupported, match="contains itself"):
        ModelSpec({}, ((ParamGroup((), {"loop": LOOP}),),)).to_json()


def document(**changes: Any) -> str:
    data: dict[str, Any] = {
        "version": 1,
        "entries": {"w": {"shape": [2], "dtype": "float32"}},
        "optimizers": [[{"fqns": ["w"], "options": {"lr": 0.5}}]],
    }
    return json.dumps({**data, **changes})


def entry(**changes: Any) -> str:
    return document(entries={"w": {"shape": [2], "dtype": "float32", **changes}})


def group(**changes: Any) -> str:
    return document(optimizers=[[{"fqns": ["w"], **changes}]])


def test_a_short_document_is_read() -> None:
    assert ModelSpec.from_json('{"version": 1}') == ModelSpec({})
    assert ModelSpec.from_json(document()) == ModelSpec(
        {"w": TensorEntry(TensorSpec((2,), torch.float32))}, ((ParamGroup(("w",), {"lr": 0.5}),),)
    )


@pytest.mark.parametrize(
    "text, wanted",
    [
        ("", "no JSON"),
        ("{", "no JSON"),
        ('{"version": 1} x', "no JSON"),
        (b"\xff\xfe\xfa", "no JSON"),
        (None, "no JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("[]", "no version"),
        ("{}", "no version"),
        ('{"version": 2}', "version 2; this fdsd reads version 1"),
        ('{"version": true}', "version True"),
        ('{"version": "1"}', "version '1'"),
        ('{"version": 1, "version": 1}', "twice in one object: 'version'"),
        ('{"version": 1, "entries": {"w": {"shape": []}, "w": {}, "v": {}, "v": {}}}', "'v', 'w'"),
        ('{"version": 1, "x": NaN}', "NaN"),
        ('{"version": 1, "x": -Infinity}', "-Infinity"),
        (document(entries=[]), "'entries'"),
        (document(optimizers={}), "'optimizers'"),
        (document(optimizers=[1]), "'optimizers'"),
        (document(more=1, other=2), "unknown fields 'more', 'other'"),
        (document(entries={"w": 3}), "entry 'w'"),
        (document(entries={"w": {"shape": [1]}}), "entry 'w'"),
        (entry(dtype="float33"), "'float33' is no dtype"),
        (entry(dtype="nn"), "'nn' is no dtype"),
        (entry(dtype=3), "3 is no dtype"),
        (entry(shape="2"), "the shape '2'"),
        (entry(shape=[2.0]), "the shape [2.0]"),
        (entry(shape=[True]), "the shape [True]"),
        (entry(shape=[-1]), "0 or more"),
        (entry(kind="module"), "'module'"),
        (entry(persistent=1), "persistent"),
        (entry(trainable=None), "trainable"),
        (entry(tied_to=3), "tied_to"),
        (entry(colour="red"), "'colour'"),
        (entry(layout={"$tensor": {"dtype": "float32", "bytes": "00000000"}}), "layout"),
        (entry(layout={"$new": 1}), "'$new'"),
        (entry(layout={"$tuple": [1], "x": 2}), "'$tuple'"),
        (entry(layout={"$tuple": 3}), "'$tuple'"),
        (entry(layout={"$float": "1.5"}), "'$float'"),
        (entry(layout={"$int": "zz"}), "'$int'"),
        (entry(layout={"$dict": [[1]]}), "'$dict'"),
        (entry(layout={"$dict": [[1, 2], [1, 3]]}), "twice"),
        (entry(layout={"$dict": [[[1], 2]]}), "'$dict'"),
        (group(options=[]), "optimizers[0][0]"),
        (group(named=1), "optimizers[0][0]"),
        (group(fqns="w"), "optimizers[0][0]"),
        (group(fqns=[1]), "optimizers[0][0]"),
        (group(fqns=["w", "w"]), "'w'"),
        (group(colour=1), "'colour'"),
        (group(options={"params": 1}), "'params'"),
        (group(options={"lr": {"$tensor": {"dtype": "float33", "bytes": "00"}}}), "'float33'"),
        (group(options={"lr": {"$tensor": {"dtype": "float32", "bytes": "0000"}}}), "'$tensor'"),
        (group(options={"lr": {"$tensor": {"dtype": "float32", "bytes": "xx"}}}), "'$tensor'"),
        (group(options={"lr": {"$tensor": {"dtype": "float32"}}}), "'$tensor'"),
    ],
)
def test_bad_json_is_refused_with_its_reason(text: Any, wanted: str) -> None:
    with pytest.raises(BadFile) as caught:
        ModelSpec.from_json(text)
    assert wanted in str(caught.value)


def test_all_problems_of_a_document_are_named_at_once() -> None:
    entries = {f"w{i}": {"shape": [2], "dtype": f"float{i}"} for i in range(3)}
    with pytest.raises(BadFile) as caught:
        ModelSpec.from_json(document(entries=entries, optimizers=[[{"fqns": 3}]], more=1))
    for part in ("5 problems", "'w0'", "'w1'", "'w2'", "optimizers[0][0]", "'more'"):
        assert part in str(caught.value)


def test_wrong_ties_in_a_document_are_refused() -> None:
    with pytest.raises(SpecMismatch, match="'w' is tied to 'x'"):
        ModelSpec.from_json(entry(tied_to="x"))


def test_entry_repr() -> None:
    assert repr(TensorEntry(F32)) == "TensorEntry(TensorSpec((4, 2), torch.float32))"
    assert repr(TensorEntry(F32, "buffer", tied_to="x", layout=[1])) == (
        "TensorEntry(TensorSpec((4, 2), torch.float32), 'buffer', tied_to='x', layout=[1])"
    )
