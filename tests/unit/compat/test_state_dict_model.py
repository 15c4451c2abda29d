"""Reading and writing models in one process, with no process group: what torch gives, and what is right where it
errs."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.modules.module import _IncompatibleKeys

from fdsd.compat.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from fdsd.errors import FdsdError

FULL = StateDictOptions(full_state_dict=True)
CPU = StateDictOptions(cpu_offload=True)
FULL_CPU = StateDictOptions(full_state_dict=True, cpu_offload=True)
LAX = StateDictOptions(strict=False)
FROZEN = StateDictOptions(ignore_frozen_params=True)


class Extra(nn.Linear):
    """Has extra state, and tells what it was given."""

    state: Any = None

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


class Net(nn.Module):
    """A bit of everything; all values differ."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.extra = Extra(2, 3)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("table", torch.arange(6).reshape(2, 3))
        self.register_buffer("cache", torch.zeros(3), persistent=False)
        self.register_buffer("nothing", None)
        self.register_parameter("none", None)


def net(salt: int = 0) -> Net:
    made = Net()
    count = 1 + 1000 * salt
    with torch.no_grad():
        for value in [*made.parameters(), *made.buffers()]:
            value.copy_((torch.arange(value.numel()) + count).reshape(value.shape))
            count += value.numel()
    made.extra.state = {"salt": salt}
    return made


def copied(module: nn.Module) -> dict[str, Any]:
    return {name: copy.deepcopy(value) for name, value in module.state_dict().items()}


def assert_equal(mine: Any, theirs: Any) -> None:
    assert list(mine) == list(theirs)
    for name, value in theirs.items():
        if isinstance(value, torch.Tensor):
            assert mine[name].dtype == value.dtype
            assert torch.equal(mine[name], value), name
        else:
            assert mine[name] == value, name


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


WRAPPED: dict[str, Any] = {
    "plain": lambda m: m,
    "compiled": compiled,
    "checkpointed": checkpoint_wrapper,
    "checkpointed over compiled": lambda m: checkpoint_wrapper(compiled(m)),
    "compiled over checkpointed": lambda m: compiled(checkpoint_wrapper(m)),
    "data parallel": nn.DataParallel,
}


@pytest.fixture(params=WRAPPED, ids=list(WRAPPED))
def wrap(request: pytest.FixtureRequest) -> Any:
    return WRAPPED[request.param]


class TestReading:
    @pytest.mark.parametrize("options", [None, StateDictOptions(), FULL, CPU, FULL_CPU, LAX])
    def test_names_order_and_values_are_the_models(self, wrap: Any, options: Any) -> None:
        made = net()
        assert_equal(get_model_state_dict(wrap(made), options=options), made.state_dict())

    def test_wrapped_parts(self) -> None:
        made = net()
        expected = copied(made)
        made.blocks[0] = checkpoint_wrapper(compiled(made.blocks[0]))
        made.norm = compiled(made.norm)
        made.extra = compiled(checkpoint_wrapper(made.extra))
        assert_equal(get_model_state_dict(made), expected)

    @pytest.mark.parametrize("options", [None, FULL, CPU, FULL_CPU])
    def test_values_alias_live_storage_and_are_detached(self, options: Any) -> None:
        made = net()
        for name, value in get_model_state_dict(made, options=options).items():
            if isinstance(value, torch.Tensor):
                assert not value.requires_grad
                assert type(value) is torch.Tensor
                assert value.data_ptr() == made.state_dict()[name].data_ptr()

    def test_the_result_carries_the_versions_of_modules(self) -> None:
        state: Any = get_model_state_dict(net())
        assert type(state) is OrderedDict
        assert state._metadata == net().state_dict()._metadata  # type: ignore[attr-defined]

    def test_the_versions_have_clean_names(self) -> None:
        state: Any = get_model_state_dict(compiled(checkpoint_wrapper(net())))
        assert state._metadata["norm"] == {"version": 2}

    @pytest.mark.parametrize("options", [FULL, CPU, FULL_CPU])
    def test_gathered_or_offloaded_results_are_plain_dicts(self, options: Any) -> None:
        assert type(get_model_state_dict(net(), options=options)) is dict

    def test_the_result_is_the_callers(self) -> None:
        made = net()
        get_model_state_dict(made).clear()
        assert_equal(get_model_state_dict(made), made.state_dict())

    def test_tied_names_hold_one_tensor(self, wrap: Any) -> None:
        for options in (None, FULL, FULL_CPU):
            state: Any = get_model_state_dict(wrap(net()), options=options)
            assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()

    def test_extra_state_is_passed_on(self) -> None:
        made = net(salt=3)
        assert get_model_state_dict(made)["extra._extra_state"] == {"salt": 3}
        made.extra.state = None
        assert get_model_state_dict(made, options=FULL_CPU)["extra._extra_state"] is None

    def test_no_hidden_buffers(self) -> None:
        assert not {"cache", "nothing", "none"} & set(get_model_state_dict(net()))

    def test_meta_models_can_be_read(self) -> None:
        with torch.device("meta"):
            made = nn.Linear(2, 3)
        state: Any = get_model_state_dict(made)
        assert state["weight"].is_meta

    def test_nothing_changes(self) -> None:
        made = net()
        before, grads = copied(made), [p.requires_grad for p in made.parameters()]
        for options in (None, FULL, CPU, FULL_CPU, FROZEN):
            get_model_state_dict(made, options=options)
        assert_equal(made.state_dict(), before)
        assert [p.requires_grad for p in made.parameters()] == grads
        assert made.training


class TestChoosing:
    def test_frozen_parameters_and_their_aliases_go(self) -> None:
        """Seen: the tied alias of a frozen weight stays."""
        made = net()
        made.embed.weight.requires_grad_(False)
        made.blocks[1].requires_grad_(False)
        gone = {"embed.weight", "head.weight", "blocks.1.weight", "blocks.1.bias"}
        assert list(get_model_state_dict(made, options=FROZEN)) == [n for n in made.state_dict() if n not in gone]

    def test_buffers_stay_when_all_parameters_are_frozen(self) -> None:
        made = nn.BatchNorm1d(2).requires_grad_(False)
        assert list(get_model_state_dict(made, options=FROZEN)) == [
            "running_mean",
            "running_var",
            "num_batches_tracked",
        ]

    def test_what_was_saved_without_frozen_parameters_loads_likewise(self) -> None:
        """Seen: saving without frozen parameters and loading with the same option raises."""
        source, target = net(1), net(2)
        for made in (source, target):
            made.embed.weight.requires_grad_(False)
        kept = target.embed.weight.clone()
        state = get_model_state_dict(source, options=FROZEN)
        result = set_model_state_dict(target, state, options=FROZEN)
        assert result == _IncompatibleKeys([], [])
        assert torch.equal(target.embed.weight, kept)
        assert torch.equal(target.blocks[0].weight, source.blocks[0].weight)

    def test_a_frozen_name_is_unexpected_when_frozen_ones_are_ignored(self) -> None:
        target = net()
        target.scale.requires_grad_(False)
        with pytest.raises(RuntimeError, match=r'Unexpected key.*"scale"'):
            set_model_state_dict(target, net(1).state_dict(), options=FROZEN)

    def test_submodules(self) -> None:
        made = net()
        with pytest.warns(FutureWarning, match="Getting submodules only model/optim state_dict is deprecated"):
            state = get_model_state_dict(made, submodules={made.blocks[1], made.norm})
        assert list(state) == [n for n in made.state_dict() if n.startswith(("blocks.1.", "norm."))]

    def test_submodules_without_their_prefixes(self, wrap: Any) -> None:
        made = net()
        options = StateDictOptions(keep_submodule_prefixes=False)
        with pytest.warns(FutureWarning, match="submodules"):
            state = get_model_state_dict(wrap(made), submodules={made.blocks[1]}, options=options)
        assert_equal(state, made.blocks[1].state_dict())

    def test_prefixes_do_not_match_half_a_name(self) -> None:
        made = nn.ModuleDict({"a": nn.Linear(1, 1), "ab": nn.Linear(1, 1)})
        with pytest.warns(FutureWarning, match="submodules"):
            assert list(get_model_state_dict(made, submodules={made["a"]})) == ["a.weight", "a.bias"]

    def test_submodules_and_frozen_parameters(self) -> None:
        """Seen: KeyError if a frozen parameter was already left out."""
        made = net()
        made.scale.requires_grad_(False)
        made.blocks[1].weight.requires_grad_(False)
        with pytest.warns(FutureWarning, match="submodules"):
            state = get_model_state_dict(made, submodules={made.blocks[1]}, options=FROZEN)
        assert list(state) == ["blocks.1.bias"]

    def test_an_empty_result_is_refused(self) -> None:
        with pytest.raises(RuntimeError, match=r"model state_dict is required.*but model state_dict is empty"):
            get_model_state_dict(nn.ReLU())

    @pytest.mark.parametrize("options", [FROZEN, FULL_CPU, LAX])
    def test_an_empty_result_is_fine_when_it_was_asked_for(self, options: Any) -> None:
        assert get_model_state_dict(nn.ReLU(), options=options) == {}


class TestWriting:
    @pytest.mark.parametrize("options", [None, FULL, FULL_CPU, CPU])
    def test_round_trip(self, wrap: Any, options: Any) -> None:
        source, target = net(1), net(2)
        result = set_model_state_dict(wrap(target), get_model_state_dict(source), options=options)
        assert isinstance(result, _IncompatibleKeys)
        assert result == _IncompatibleKeys([], [])
        assert_equal(target.state_dict(), source.state_dict())
        assert target.head.weight is target.embed.weight

    def test_memory_is_kept(self) -> None:
        target = net(2)
        places = {name: value.data_ptr() for name, value in target.named_parameters()}
        set_model_state_dict(target, net(1).state_dict())
        assert {name: value.data_ptr() for name, value in target.named_parameters()} == places

    @pytest.mark.parametrize("options", [None, FULL, LAX])
    def test_the_callers_dict_is_not_changed(self, options: Any) -> None:
        """Seen: keys popped and put back under wrapped names, values replaced, missing ones filled in."""
        given = copied(net(1))
        if options is LAX:
            del given["scale"]
        names, values = list(given), list(given.values())
        set_model_state_dict(compiled(net(2)), given, options=options)
        assert list(given) == names
        assert all(a is b for a, b in zip(given.values(), values, strict=True))
        assert_equal(given, {name: value for name, value in net(1).state_dict().items() if name in given})

    def test_read_only_mappings_will_do(self) -> None:
        from fdsd import StateDict

        source, target = net(1), net(2)
        set_model_state_dict(target, StateDict(source.state_dict()))  # type: ignore[arg-type]
        assert_equal(target.state_dict(), source.state_dict())

    def test_any_order(self) -> None:
        source, target = net(1), net(2)
        set_model_state_dict(target, dict(reversed(source.state_dict().items())))
        assert_equal(target.state_dict(), source.state_dict())

    def test_writing_what_was_read_changes_nothing(self) -> None:
        target = net(2)
        before = copied(target)
        set_model_state_dict(target, get_model_state_dict(target))
        assert_equal(target.state_dict(), before)

    def test_tensors_of_the_model_itself_are_copied_first(self) -> None:
        """Swapped layers, and a weight that becomes its own transpose."""
        made = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        state = copied(made)
        swapped = {
            "0.weight": made[1].weight.detach(),
            "0.bias": made[1].bias.detach(),
            "1.weight": made[0].weight.detach(),
            "1.bias": made[0].bias.detach(),
        }
        set_model_state_dict(made, swapped)
        assert torch.equal(made[0].weight, state["1.weight"]) and torch.equal(made[1].weight, state["0.weight"])
        set_model_state_dict(made, {**made.state_dict(), "0.weight": made[0].weight.detach().t()})
        assert torch.equal(made[0].weight, state["1.weight"].t())

    def test_values_of_other_dtypes_are_cast(self) -> None:
        target = nn.Linear(2, 3).to(torch.bfloat16)
        set_model_state_dict(target, {"weight": torch.full((3, 2), 1.00390625), "bias": torch.arange(3)})
        assert target.weight.dtype == torch.bfloat16
        assert torch.equal(target.weight, torch.full((3, 2), 1.00390625).to(torch.bfloat16))
        assert torch.equal(target.bias, torch.arange(3).to(torch.bfloat16))

    def test_parameters_as_values(self) -> None:
        source, target = nn.Linear(2, 3), nn.Linear(2, 3)
        set_model_state_dict(target, dict(source.named_parameters()))
        assert torch.equal(target.weight, source.weight)
        assert target.weight.requires_grad and target.weight.grad_fn is None

    def test_gradients_and_flags_stay(self) -> None:
        target = nn.Linear(2, 3)
        target.bias.requires_grad_(False)
        target(torch.ones(1, 2)).sum().backward()
        grad = target.weight.grad
        set_model_state_dict(target, nn.Linear(2, 3).state_dict())
        assert target.weight.grad is grad and target.weight.requires_grad and not target.bias.requires_grad

    def test_by_submodule(self) -> None:
        source, target = net(1), net(2)
        with pytest.warns(FutureWarning, match="Passing model_state_dict as a "):
            result = set_model_state_dict(
                target,
                {target.blocks[1]: source.blocks[1].state_dict(), target.norm: source.norm.state_dict()},  # type: ignore[dict-item]
                options=LAX,
            )
        assert torch.equal(target.blocks[1].weight, source.blocks[1].weight)
        assert torch.equal(target.norm.running_mean, source.norm.running_mean)
        assert not torch.equal(target.blocks[0].weight, source.blocks[0].weight)
        assert "blocks.0.weight" in result.missing_keys

    def test_by_a_submodule_that_is_none(self) -> None:
        with pytest.warns(FutureWarning), pytest.raises(RuntimeError, match="1 module that is no part of this Net"):
            set_model_state_dict(net(), {nn.Linear(1, 1): {}}, options=LAX)  # type: ignore[dict-item]


def without(state: dict[str, Any], *names: str, **more: Any) -> dict[str, Any]:
    return {**{name: value for name, value in state.items() if name not in names}, **more}


BAD: dict[str, tuple[Any, str]] = {
    "missing": (lambda s: without(s, "scale", "table"), r'Missing key\(s\) in state_dict: "scale", "table"\. '),
    "unexpected": (
        lambda s: without(s, scolds=torch.ones(1), also=3),
        r"""Unexpected key\(s\) in state_dict: "scolds", "also"\. """,
    ),
    "misspelt": (
        lambda s: without(s, "scale", scales=torch.ones(())),
        r'(?s)Missing key\(s\).*"scale".*Unexpected key\(s\).*"scales"',
    ),
    "too few rows": (
        lambda s: {**s, "blocks.1.weight": torch.ones(3, 4)},
        (
            r"size mismatch for blocks\.1\.weight: copying a param with shape torch\.Size\(\[3, 4\]\) from checkpoint, "
            r"the shape in current model is torch\.Size\(\[4, 4\]\)\."
        ),
    ),
    "would broadcast": (lambda s: {**s, "blocks.1.weight": torch.ones(4, 1)}, "size mismatch for blocks.1.weight"),
    "a scalar for a vector": (lambda s: {**s, "blocks.0.bias": torch.ones(())}, "size mismatch for blocks.0.bias"),
    "no tensor": (lambda s: {**s, "scale": 2.0}, r'"scale", expected torch.Tensor.* received <class \'float\'>'),
    "a meta tensor": (lambda s: {**s, "scale": torch.ones((), device="meta")}, '"scale".*meta'),
    "flat": (lambda s: without(s, **{"a._flat_param": torch.ones(1)}), "a._flat_param contains _flat_param"),
    "extra state": (lambda s: without(s, "extra._extra_state"), r'Missing key\(s\).*"extra\._extra_state"'),
    "extra state of none": (
        lambda s: without(s, **{"embed._extra_state": 1}),
        r'Unexpected key\(s\).*"embed\._extra_state"',
    ),
}


class TestRefusals:
    @pytest.mark.parametrize("options", [None, FULL, FULL_CPU])
    @pytest.mark.parametrize("kind", BAD)
    def test_all_is_checked_before_anything_is_written(self, wrap: Any, options: Any, kind: str) -> None:
        spoil, message = BAD[kind]
        target, given = net(2), spoil(copied(net(1)))
        before, given_before = copied(target), dict(given)
        with pytest.raises(RuntimeError, match=message) as caught:
            set_model_state_dict(wrap(target), given, options=options)
        assert isinstance(caught.value, FdsdError)
        assert_equal(target.state_dict(), before)
        assert all(given[name] is value for name, value in given_before.items())

    @pytest.mark.parametrize("kind", ["too few rows", "would broadcast", "no tensor", "a meta tensor", "flat"])
    def test_what_does_not_fit_is_no_matter_of_strictness(self, kind: str) -> None:
        spoil, message = BAD[kind]
        target = net(2)
        before = copied(target)
        with pytest.raises(RuntimeError, match=message):
            set_model_state_dict(target, spoil(copied(net(1))), options=LAX)
        assert_equal(target.state_dict(), before)

    def test_all_problems_are_in_one_error(self) -> None:
        given = without(copied(net(1)), "scale", "table", more=torch.ones(1))
        given["blocks.0.bias"] = torch.ones(9)
        with pytest.raises(RuntimeError) as caught:
            set_model_state_dict(net(2), given)
        text = str(caught.value)
        assert text.startswith("Error(s) in loading state_dict for Net:\n\t")
        assert all(name in text for name in ("scale", "table", "more", "blocks.0.bias"))

    def test_a_lax_load_says_what_it_left_out(self, wrap: Any) -> None:
        given = without(copied(net(1)), "blocks.0.weight", more=torch.ones(1))
        target = net(2)
        kept = target.blocks[0].weight.clone()
        result = set_model_state_dict(wrap(target), given, options=LAX)
        assert result == _IncompatibleKeys(["blocks.0.weight"], ["more"])
        assert torch.equal(target.blocks[0].weight, kept)
        assert torch.equal(target.blocks[0].bias, given["blocks.0.bias"])

    def test_nothing_at_all(self) -> None:
        with pytest.raises(RuntimeError, match=r"model state_dict is required.*but model state_dict is empty"):
            set_model_state_dict(net(), {})

    def test_nothing_at_all_to_a_lax_load(self) -> None:
        target = net(2)
        before = copied(target)
        result = set_model_state_dict(target, {}, options=LAX)
        assert result.missing_keys == list(before) and result.unexpected_keys == []
        assert_equal(target.state_dict(), before)

    @pytest.mark.parametrize("given", [None, 3, [("weight", torch.ones(3, 2))]])
    def test_no_mapping(self, given: Any) -> None:
        with pytest.raises(TypeError, match="dict"):
            set_model_state_dict(nn.Linear(2, 3), given)

    def test_no_module(self) -> None:
        with pytest.raises(TypeError, match="Module"):
            get_model_state_dict({"weight": torch.ones(2)})  # type: ignore[arg-type]

    def test_a_missing_tied_name_is_missing_for_a_strict_load(self) -> None:
        """As torch has it: each name counts. A lax load ties the alias to the owner."""
        source, target = net(1), net(2)
        given = without(copied(source), "head.weight")
        with pytest.raises(RuntimeError, match=r"head.weight"):
            set_model_state_dict(target, given)
        assert set_model_state_dict(target, given, options=LAX).missing_keys == ["head.weight"]
        assert torch.equal(target.head.weight, source.embed.weight)
        assert target.head.weight is target.embed.weight


class TestExtraState:
    @pytest.mark.parametrize("value", [None, 7, "text", {"a": [1]}])
    def test_round_trip(self, wrap: Any, value: Any) -> None:
        """Seen: a missing entry hands the module a private placeholder; None counts as missing."""
        source, target = net(1), net(2)
        source.extra.state = value
        set_model_state_dict(wrap(target), get_model_state_dict(wrap(source)), options=FULL)
        assert target.extra.state == value

    def test_left_out_of_a_lax_load_it_stays(self) -> None:
        source, target = net(1), net(2)
        result = set_model_state_dict(target, without(copied(source), "extra._extra_state"), options=LAX)
        assert result.missing_keys == ["extra._extra_state"]
        assert target.extra.state == {"salt": 2}

    def test_tensors_are_passed_on_untouched(self) -> None:
        source, target = net(1), net(2)
        source.extra.state = torch.arange(3)
        set_model_state_dict(target, get_model_state_dict(source, options=FULL_CPU), options=FULL_CPU)
        assert torch.equal(target.extra.state, torch.arange(3))


def meta(dtype: torch.dtype = torch.float32) -> Net:
    with torch.device("meta"):
        return Net().to(dtype)


class TestMetaModels:
    @pytest.mark.parametrize("options", [None, FULL])
    def test_values_are_assigned(self, options: Any) -> None:
        source, target = net(1), meta()
        target.blocks[0].weight.requires_grad_(False)
        with pytest.warns(UserWarning, match="on the meta device.*'cache'"):
            set_model_state_dict(target, source.state_dict(), options=options)
        assert_equal(target.state_dict(), source.state_dict())
        assert isinstance(target.blocks[0].weight, nn.Parameter) and isinstance(target.norm.running_mean, torch.Tensor)
        assert not target.blocks[0].weight.requires_grad and target.blocks[1].weight.requires_grad
        assert target.blocks[0].weight.data_ptr() != source.blocks[0].weight.data_ptr()

    def test_ties_are_tied_again(self) -> None:
        """Seen: tied weights come back as separate parameters."""
        target = meta()
        assert target.head.weight is target.embed.weight
        with pytest.warns(UserWarning, match="cache"):
            set_model_state_dict(target, copied(net(1)), options=FULL)
        assert target.head.weight is target.embed.weight
        assert torch.equal(target.head.weight, net(1).embed.weight)

    def test_the_target_keeps_its_dtype(self) -> None:
        """Seen: a meta-initialised bf16 model becomes float32."""
        target = meta(dtype=torch.bfloat16)
        with pytest.warns(UserWarning, match="cache"):
            set_model_state_dict(target, net(1).state_dict())
        assert {p.dtype for p in target.parameters()} == {torch.bfloat16}
        assert torch.equal(target.blocks[1].weight, net(1).blocks[1].weight.to(torch.bfloat16))

    def test_parameters_that_are_there_are_not_replaced(self) -> None:
        """Seen: one meta value, and every parameter is replaced."""
        target = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
        there = target[0].weight
        state = {name: torch.full(value.shape, 3.0) for name, value in target.state_dict().items()}
        set_model_state_dict(target, state, options=FULL)
        assert target[0].weight is there
        assert not target[1].weight.is_meta

    def test_a_lax_load_leaves_the_rest_on_meta_and_says_so(self) -> None:
        target = nn.Linear(2, 2, device="meta")
        with pytest.warns(UserWarning, match="on the meta device.*'bias'"):
            result = set_model_state_dict(target, {"weight": torch.ones(2, 2)}, options=LAX)
        assert result.missing_keys == ["bias"]
        assert target.bias.is_meta and not target.weight.is_meta

    def test_a_refused_load_leaves_all_on_meta(self) -> None:
        target = meta()
        with pytest.raises(RuntimeError, match="size mismatch"):
            set_model_state_dict(target, {**net(1).state_dict(), "scale": torch.ones(2)})
        assert all(value.is_meta for value in [*target.parameters(), *target.buffers()])


class Renaming(nn.Module):
    """Shows ``embedding.weight`` as ``weight``, by hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, 2)
        self.other = nn.Linear(2, 2)
        self._register_state_dict_hook(Renaming._shown)
        self._register_load_state_dict_pre_hook(self._hidden)

    @staticmethod
    def _shown(module: nn.Module, state: Any, prefix: str, local: Any) -> None:
        state[prefix + "weight"] = state.pop(prefix + "embedding.weight")

    def _hidden(self, state: Any, prefix: str, *rest: Any) -> None:
        if prefix + "weight" in state:
            state[prefix + "embedding.weight"] = state.pop(prefix + "weight")


class Versioned(nn.Module):
    """Writes and reads its own format: one tensor more, and the weight doubled."""

    _version = 3

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(4.0))
        self.loads: list[Any] = []

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "double"] = self.weight.detach() * 2

    def _load_from_state_dict(
        self, state: Any, prefix: str, local: Any, strict: bool, missing: Any, unexpected: Any, errors: Any
    ) -> None:
        self.loads.append((prefix, local.get("version"), strict))
        double = state.pop(prefix + "double", None)
        if double is None:
            missing.append(prefix + "double")
        super()._load_from_state_dict(state, prefix, local, strict, missing, unexpected, errors)


class TestHooks:
    @pytest.mark.parametrize("options", [None, FULL, FULL_CPU])
    def test_hooks_may_rename(self, wrap: Any, options: Any) -> None:
        """Seen: a nested name that a hook changed gives a bare AttributeError."""
        source, target = (nn.Sequential(nn.Linear(2, 2), nn.ModuleDict({"r": Renaming()})) for _ in range(2))
        state = get_model_state_dict(wrap(source), options=options)
        assert_equal(state, source.state_dict())
        assert "1.r.weight" in state and "1.r.embedding.weight" not in state
        assert set_model_state_dict(wrap(target), state, options=options) == _IncompatibleKeys([], [])
        assert_equal(target.state_dict(), source.state_dict())

    @pytest.mark.parametrize("options", [None, FULL])
    def test_modules_with_a_format_of_their_own(self, wrap: Any, options: Any) -> None:
        source, target = (nn.Sequential(nn.Linear(2, 2), Versioned()) for _ in range(2))
        with torch.no_grad():
            source[1].weight += 5
        state = get_model_state_dict(wrap(source), options=options)
        assert_equal(state, source.state_dict())
        set_model_state_dict(wrap(target), state, options=options)
        assert_equal(target.state_dict(), source.state_dict())
        assert [load[1:] for load in target[1].loads] == [(None if options else 3, True)]

    def test_what_such_a_module_misses_is_missing(self) -> None:
        target = nn.Sequential(nn.Linear(2, 2), Versioned())
        before = copied(target)
        given = {name: value + 1 for name, value in before.items() if name != "1.double"}
        with pytest.raises(RuntimeError, match=r'Missing.*"1.double"'):
            set_model_state_dict(target, given)
        assert torch.equal(target[0].weight, before["0.weight"])

    def test_batch_norm_reads_its_old_format(self) -> None:
        source, target = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
        target.num_batches_tracked += 4
        given = without(dict(source.state_dict()), "num_batches_tracked")
        assert set_model_state_dict(target, given) == _IncompatibleKeys([], [])

    def test_hooks_after_loading_may_excuse_names(self) -> None:
        target = nn.Linear(2, 3)
        seen: list[Any] = []

        def excuse(module: nn.Module, keys: Any) -> None:
            seen.append((list(keys.missing_keys), list(keys.unexpected_keys)))
            keys.missing_keys.clear()

        target.register_load_state_dict_post_hook(excuse)
        assert set_model_state_dict(target, {"weight": torch.ones(3, 2)}) == _IncompatibleKeys([], [])
        assert seen == [(["bias"], [])]
        assert torch.equal(target.weight, torch.ones(3, 2))

    def test_hooks_after_loading_see_what_was_loaded(self) -> None:
        target = nn.Sequential(nn.Linear(2, 2))
        seen: list[Any] = []
        target[0].register_load_state_dict_post_hook(lambda m, keys: seen.append(m.weight.clone()))
        set_model_state_dict(target, {"0.weight": torch.full((2, 2), 7.0), "0.bias": torch.ones(2)})
        assert len(seen) == 1 and torch.equal(seen[0], torch.full((2, 2), 7.0))

    def test_hooks_before_saving_run(self) -> None:
        seen: list[str] = []
        made = nn.Sequential(compiled(nn.Linear(2, 2)))
        made[0]._orig_mod.register_state_dict_pre_hook(lambda m, prefix, keep: seen.append(prefix))
        get_model_state_dict(made)
        assert seen == ["0."]

    def test_public_hooks_must_not_return(self) -> None:
        made = nn.Linear(1, 1)
        made.register_state_dict_post_hook(lambda *args: {})
        with pytest.raises(FdsdError, match="state dict post-hook must return None"):
            get_model_state_dict(made)

    def test_modules_may_override_state_dict(self) -> None:
        class Slim(nn.Linear):
            def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
                destination = {} if destination is None else destination
                destination[prefix + "slim"] = self.weight.detach()
                return destination

        made = nn.Sequential(nn.Linear(1, 1), Slim(2, 2))
        assert list(get_model_state_dict(made)) == ["0.weight", "0.bias", "1.slim"]
        assert list(get_model_state_dict(made[1])) == ["slim"]

    def test_modifiers(self) -> None:
        class Shown(Renaming):
            def _fqn_modifiers(self) -> dict[str, str]:
                return {"weight": "embedding"}

        source, target = Renaming(), Shown().to("meta")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            set_model_state_dict(target, get_model_state_dict(source))
        assert torch.equal(target.embedding.weight, source.embedding.weight)
        with pytest.raises(RuntimeError, match="Missing key"):
            set_model_state_dict(nn.ModuleDict({"embedding": nn.Embedding(3, 2)}), get_model_state_dict(source))

    def test_methods_that_load_by_themselves(self) -> None:
        class Own(nn.Linear):
            called = 0

            def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
                self.called += 1
                return super().load_state_dict(*args, **kwargs)

        target = Own(2, 3)
        set_model_state_dict(target, nn.Linear(2, 3).state_dict())
        assert target.called == 1

    def test_extra_state_that_is_refused_changes_nothing(self) -> None:
        class Refusing(Extra):
            def set_extra_state(self, state: Any) -> None:
                if state == {"salt": 9}:
                    raise ValueError("no nines")
                super().set_extra_state(state)

        class Two(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.second = Extra(2, 2), Refusing(2, 2)

        target, source = Two(), Two()
        target.first.state, target.second.state = "old", {"salt": 1}
        source.first.state, source.second.state = "new", {"salt": 9}
        before = [(one.state, one.weight.tolist()) for one in (target.first, target.second)]
        with pytest.raises(ValueError, match="no nines"):
            set_model_state_dict(target, source.state_dict())
        assert [(one.state, one.weight.tolist()) for one in (target.first, target.second)] == before

    def test_only_what_is_given_reaches_code_that_completes_the_rest(self) -> None:
        class Completing(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.w, self.scale = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))

            def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
                state_dict.setdefault(prefix + "scale", torch.full((2,), 3.0))
                super()._load_from_state_dict(state_dict, prefix, *args)

        target = nn.Sequential(Completing())
        assert set_model_state_dict(target, {"0.w": torch.ones(2)}).missing_keys == []
        assert [p.tolist() for p in target.parameters()] == [[1, 1], [3, 3]]
