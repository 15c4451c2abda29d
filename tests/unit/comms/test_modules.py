"""Reading modules in one process: names, order, values, ties and buffers are those of ``state_dict()``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper

from fdsd.comms.modules import LiveTensor, layout_of, leaf_of, memory_of, read_modules
from fdsd.errors import NameConflict, Unsupported
from tests.helpers.models import MODELS, Counter, Net, filled, make


def compiled(module: nn.Module) -> Any:
    """Compile a module; compiled twice, it would be a function."""
    return module if isinstance(module, OptimizedModule) else torch.compile(module, backend="eager")


WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "compile": compiled,
    "checkpoint": checkpoint_wrapper,
    "offload": offload_wrapper,
    "parallel": nn.DataParallel,
}


def assert_reads_as(model: Any, plain: nn.Module) -> None:
    """Names, order and values are those of the unwrapped model."""
    modules = read_modules(model)
    expected = plain.state_dict()
    assert list(modules.names) == list(expected)
    for name, value in expected.items():
        if name in modules.extra:
            assert modules.extra[name].value == value
        else:
            assert torch.equal(leaf_of(modules.tensors[name]), value)
    assert modules.metadata == dict(expected._metadata)  # type: ignore[attr-defined]
    rest = [name for name in modules.tensors if name not in expected]
    assert all(not modules.tensors[name].persistent for name in rest)
    inside = {name for name, _ in plain.named_buffers(remove_duplicate=False)}
    assert {*rest} == inside - {*expected}


# -- any tree --------------------------------------------------------------------------------------------------------


class Leaf(nn.Module):
    """Some parameters and buffers, ``None`` among them."""

    def __init__(self, sizes: list[int], kinds: list[str]) -> None:
        super().__init__()
        for i, (size, kind) in enumerate(zip(sizes, kinds, strict=True)):
            tensor = torch.empty(size)
            if kind == "parameter":
                self.register_parameter(f"p{i}", nn.Parameter(tensor))
            elif kind == "none":
                self.register_parameter(f"p{i}", None)
                self.register_buffer(f"b{i}", None)
            else:
                self.register_buffer(f"b{i}", tensor, persistent=kind == "buffer")


@st.composite
def leaves(draw: st.DrawFn) -> nn.Module:
    if draw(st.integers(0, 5)) == 0:
        return Counter(draw(st.integers()))
    kinds = draw(st.lists(st.sampled_from(["parameter", "buffer", "passing", "none"]), max_size=3))
    return Leaf([draw(st.integers(0, 3)) for _ in kinds], kinds)


NAMES = st.sampled_from(["a", "b", "module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"])


@st.composite
def trees(draw: st.DrawFn) -> nn.Module:
    """A module tree in which modules stand at two places and parameters are tied; segments look like wrappers'."""
    made: list[nn.Module] = [draw(leaves())]
    for _ in range(draw(st.integers(0, 6))):
        parent = nn.Module()
        for name in draw(st.lists(NAMES, max_size=3, unique=True)):
            parent.add_module(name, draw(st.sampled_from([*made, draw(leaves())])))
        made.append(parent)
    root = nn.Module()
    for name in draw(st.lists(NAMES, max_size=3, unique=True)):
        root.add_module(name, draw(st.sampled_from(made)))
    holders = [module for module in root.modules() if any(p is not None for p in module._parameters.values())]
    if len(holders) > 1 and draw(st.booleans()):
        holders[-1].register_parameter("tied", next(iter(holders[0].parameters(recurse=False))))
    return filled(root)


def wrap(draw: Callable[[Any], Any], module: nn.Module, depth: int = 0) -> Any:
    """Wrap any modules of a tree, some of them several times."""
    for name, child in list(module._modules.items()):
        if child is not None and depth < 4:
            module._modules[name] = wrap(draw, child, depth + 1)
    for name in draw(st.lists(st.sampled_from(["compile", "checkpoint", "parallel"]), max_size=2)):
        if name == "compile" and hasattr(module, "get_compiler_config"):
            continue  # torch refuses what shows the attributes of a compiled module below
        module = WRAPPERS[name](module)
    return module


@given(trees())
def test_any_model_reads_as_its_state_dict(model: nn.Module) -> None:
    assert_reads_as(model, model)


@settings(max_examples=50)
@given(trees(), st.data())
def test_wrappers_are_dropped_wherever_they_stand(model: nn.Module, data: st.DataObject) -> None:
    assert_reads_as(wrap(data.draw, copy.deepcopy(model)), model)


@given(trees())
def test_reading_changes_nothing(model: nn.Module) -> None:
    before = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    versions = {name: value._version for name, value in before.items()}
    copies = {name: value.clone() for name, value in before.items()}
    read_modules(model)
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in copies.items())
    assert all(after[name]._version == version for name, version in versions.items())


@given(trees())
def test_tied_names_are_told(model: nn.Module) -> None:
    modules = read_modules(model)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names = [other for other, one in model.named_parameters(remove_duplicate=False) if one is parameter]
        order = [name for name in modules.tensors if name in names]
        assert modules.names_of(parameter) == tuple(order)
        assert modules.fqn_of(parameter) == order[0]
        assert modules.tensors[name].tied_to == (None if name == order[0] else order[0])
        assert modules.aliases_of(order[0]) == tuple(order[1:])


# -- wrappers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outer", WRAPPERS)
@pytest.mark.parametrize("inner", WRAPPERS)
@pytest.mark.parametrize("name", MODELS)
def test_each_wrapper_in_each_other(outer: str, inner: str, name: str) -> None:
    wrapped = WRAPPERS[outer](WRAPPERS[inner](make(name)))
    assert_reads_as(wrapped, make(name))


def test_a_wrapped_child_of_a_wrapped_model() -> None:
    model = Net()
    model.blocks[0] = compiled(checkpoint_wrapper(model.blocks[0]))
    model.blocks[1].up = checkpoint_wrapper(compiled(model.blocks[1].up))
    assert_reads_as(compiled(filled(model)), make("net"))


def test_a_user_may_call_a_submodule_as_wrappers_do() -> None:
    model = nn.ModuleDict({"module": nn.ModuleDict({"_orig_mod": nn.Linear(1, 1), "module": nn.Linear(1, 1)})})
    assert read_modules(model).names == (
        "module._orig_mod.weight",
        "module._orig_mod.bias",
        "module.module.weight",
        "module.module.bias",
    )


def test_subclasses_of_wrappers_are_wrappers() -> None:
    class Mine(nn.DataParallel[nn.Module]):
        def __init__(self, module: nn.Module) -> None:
            super().__init__(module)
            self.own = nn.Linear(1, 1, bias=False)

    assert read_modules(Mine(nn.Linear(1, 1, bias=False))).names == ("weight", "own.weight")


# -- what one tensor is ----------------------------------------------------------------------------------------------


def test_roles() -> None:
    model = make("net")
    tensors = read_modules(model).tensors
    assert (tensors["embed.weight"].kind, tensors["embed.weight"].trainable) == ("parameter", True)
    assert (tensors["adapter.weight"].kind, tensors["adapter.weight"].trainable) == ("parameter", False)
    assert (tensors["scale"].kind, tensors["scale"].persistent) == ("buffer", True)
    assert (tensors["cache"].kind, tensors["cache"].persistent) == ("buffer", False)
    assert tensors["head.weight"].tied_to == "embed.weight"
    assert tensors["blocks.1.module.weight"].owner is model.get_submodule("blocks.1.module")
    assert tensors["blocks.1.module.weight"].name == "weight"
    assert tensors["batch.num_batches_tracked"].spec.dtype == torch.int64


def test_live_tensors_compare_by_identity() -> None:
    one, other = (read_modules(nn.Linear(2, 2)).tensors["weight"] for _ in range(2))
    assert one == one and one != other and len({one, other}) == 2 and isinstance(one, LiveTensor)
    assert repr(one) == "LiveTensor('weight', 'parameter', torch.float32, tied_to=None)"


def test_leaves_and_memory_are_live() -> None:
    model = nn.Linear(2, 1)
    live = read_modules(model).tensors["bias"]
    leaf = leaf_of(live)
    assert not leaf.requires_grad and layout_of(live) is None
    memory_of(live).fill_(7)
    assert leaf.item() == model.bias.item() == 7


def test_ties_of_different_parameter_objects() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = nn.Parameter(model[0].weight.detach())  # the same memory
    model[2].weight = model[1].weight
    modules = read_modules(model)
    assert [live.tied_to for live in modules.tensors.values()] == [None, "0.weight", "0.weight"]
    assert modules.fqn_of(model[1].weight) == "0.weight"
    assert modules.names_of(model[2].weight) == ("0.weight", "1.weight", "2.weight")


def test_views_of_one_storage_are_no_ties() -> None:
    model = nn.ParameterDict({"whole": nn.Parameter(torch.ones(4, 2))})
    model["first"] = nn.Parameter(model["whole"].detach()[:2])
    model["turned"] = nn.Parameter(model["whole"].detach().t())
    model["again"] = nn.Parameter(model["whole"].detach()[:2])
    ties = {name: live.tied_to for name, live in read_modules(model).tensors.items()}
    assert ties == {"whole": None, "first": None, "turned": None, "again": "first"}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_empty_and_meta_tensors_are_tied_only_if_they_are(device: str) -> None:
    model = nn.Module()
    model.a = nn.Parameter(torch.empty(0 if device == "cpu" else 3, device=device))
    model.b = nn.Parameter(torch.empty_like(model.a))
    model.c = model.a
    model.d = nn.Parameter(model.b.detach())
    assert [live.tied_to for live in read_modules(model).tensors.values()] == [None, None, "a", "b"]


def test_meta_models_are_read() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    modules = read_modules(model)
    assert list(modules.names) == list(model.state_dict())
    assert modules.tensors["0.weight"].spec.shape == (3, 2) and leaf_of(modules.tensors["0.weight"]).is_meta


def test_a_lazy_module_has_no_specs_yet() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    modules = read_modules(model)
    assert list(modules.names) == list(model.state_dict())
    with pytest.raises(Unsupported, match=r"'0.weight': An uninitialized parameter .* run the module once"):
        assert modules.tensors["0.weight"].spec
    model(torch.ones(1, 2))
    assert read_modules(model).tensors["0.weight"].spec.shape == (3, 2)


def test_of_other_modules_nothing_is_known() -> None:
    modules = read_modules(nn.Linear(1, 1))
    stranger = nn.Parameter(torch.ones(1))
    assert modules.fqn_of(stranger) is None and modules.names_of(stranger) == () and modules.flat_of(stranger) is None


# -- parts -----------------------------------------------------------------------------------------------------------


def stage(*numbers: int) -> nn.ModuleDict:
    return nn.ModuleDict({str(i): nn.Linear(2, 2) for i in numbers})


def test_parts_are_one_model() -> None:
    parts = [stage(0, 2), stage(1)]
    modules = read_modules(parts)
    assert modules.names == ("0.weight", "0.bias", "2.weight", "2.bias", "1.weight", "1.bias")
    assert modules.fqn_of(parts[1]["1"].weight) == "1.weight"
    assert modules.parts == tuple(parts) and modules.metadata["1"] == {"version": 1}
    assert read_modules(iter(parts)).names == modules.names


def test_the_same_module_in_two_parts() -> None:
    shared = nn.Linear(2, 2)
    parts = [nn.ModuleDict({"a": shared}), nn.ModuleDict({"a": shared, "b": shared})]
    modules = read_modules(parts)
    assert modules.names == ("a.weight", "a.bias", "b.weight", "b.bias")
    assert modules.tensors["b.bias"].tied_to == "a.bias"


def test_different_tensors_of_one_name_in_two_parts() -> None:
    with pytest.raises(NameConflict, match=r"named '1.weight': '1.weight \(part 0\)', '1._orig_mod.weight \(part 1\)'"):
        read_modules([stage(0, 1), nn.ModuleDict({"1": compiled(nn.Linear(2, 2))})])


def test_extra_states_of_one_name_in_two_parts() -> None:
    one, other = nn.ModuleDict({"c": Counter(1)}), nn.ModuleDict({"c": Counter(2)})
    other["c"].gain = one["c"].gain
    with pytest.raises(NameConflict, match=r"'c\."):
        read_modules([one, other])
    assert read_modules([one, one]).names == ("c.gain", "c._extra_state")


def test_passing_buffers_of_one_name_in_two_parts() -> None:
    parts = [stage(0), stage(1)]
    for part in parts:
        part.register_buffer("angles", torch.ones(2), persistent=False)
    modules = read_modules(parts)
    assert modules.tensors["angles"].tensor is parts[0].angles
    assert [live.tensor for live in modules.others] == [parts[1].angles]


# -- what is refused -------------------------------------------------------------------------------------------------


def test_two_tensors_of_one_name() -> None:
    class Mine(nn.DataParallel[nn.Module]):
        def __init__(self, module: nn.Module) -> None:
            super().__init__(module)
            self.weight = nn.Parameter(torch.ones(1))

    with pytest.raises(NameConflict, match=r"named 'weight': 'weight', 'module.weight'\. A name stands for one tensor"):
        read_modules(Mine(nn.Linear(1, 1)))


def test_a_module_that_contains_itself() -> None:
    model = nn.Sequential(nn.ModuleDict({"a": nn.Linear(1, 1)}))
    model[0]["loop"] = model
    with pytest.raises(Unsupported, match=r"Sequential at '0.loop' contains itself"):
        read_modules(model)


@pytest.mark.parametrize("wrong", ["model", {"a": nn.Linear(1, 1)}, None, 3, [nn.Linear(1, 1), torch.ones(1)]])
def test_what_is_no_model(wrong: Any) -> None:
    with pytest.raises(Unsupported, match=r"A model is a torch.nn.Module, or several of them; not of type"):
        read_modules(wrong)
