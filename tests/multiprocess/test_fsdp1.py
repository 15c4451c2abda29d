"""FSDP1's flat parameters over ranks: names, values, intervals and memory, in each of its states.

Oracles are the unwrapped model and FSDP's own full state dict.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh

from fdsd.algebra.evaluate import evaluate
from fdsd.algebra.lazy import Lazy
from fdsd.comms.fsdp1 import FlatView
from fdsd.comms.modules import LiveTensor, Modules, layout_of, leaf_of, memory_of, read_modules
from fdsd.errors import FdsdError, SpecMismatch, Unsupported
from fdsd.layout.pieces import Pieces
from tests.helpers.models import Block, Net, filled, make
from tests.helpers.ranks import run_ranks

CPU = torch.device("cpu")


def fsdp(model: Any, strategy: str = "FULL_SHARD", orig: bool = True, nested: bool = True, **options: Any) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy({Block, nn.BatchNorm1d}) if nested else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1 is deprecated, and NO_SHARD too
        return FullyShardedDataParallel(
            model,
            device_id=CPU,
            use_orig_params=orig,
            sharding_strategy=ShardingStrategy[strategy],
            auto_wrap_policy=policy,
            **options,
        )


def trainable(model: Any) -> Any:
    """Without original parameters, FSDP wants all of one flat parameter to train, or none."""
    return model.requires_grad_(True)


def full(model: Any) -> dict[str, torch.Tensor]:
    """What FSDP itself gathers."""
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            gathered = model.state_dict()
    return {name: value for name, value in gathered.items() if isinstance(value, torch.Tensor)}


def gathered(local: torch.Tensor) -> torch.Tensor:
    """All shards of a flat tensor, one after the other."""
    made = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(made, local.contiguous())
    return torch.cat(made)


def whole(live: LiveTensor) -> torch.Tensor:
    """The whole of a parameter: what its expression takes out of the flat parameter of all ranks."""
    leaf = leaf_of(live)
    if live.flat is None or not isinstance(leaf, Lazy):
        assert isinstance(leaf, torch.Tensor)
        return leaf.clone()
    assert leaf.spec == live.spec
    made: torch.Tensor = live.flat.of(gathered(live.flat.flat.local()))
    return made.clone()


def parts(modules: Modules) -> dict[str, Any]:
    """What this rank holds, by its interval of the flattened parameter."""
    made: dict[str, Any] = {}
    for name, live in modules.tensors.items():
        if live.flat is not None:
            made[name] = live.flat.interval(live.flat.flat.coordinate), memory_of(live).clone(), layout_of(live)
    return made


def read(rank: int, make_model: Callable[[], Any]) -> dict[str, Any]:
    model = make_model()
    modules = read_modules(model)
    found = {name: live for name, live in modules.tensors.items() if live.persistent}
    return {
        "names": modules.names,
        "metadata": modules.metadata,
        "ties": {name: live.tied_to for name, live in found.items() if live.tied_to},
        "frozen": [name for name, live in found.items() if live.kind == "parameter" and not live.trainable],
        "whole": {name: whole(live) for name, live in found.items()},
        "orders": {name: live.flat.order for name, live in found.items() if live.flat is not None},
        "parts": parts(modules),
        "known": [(modules.names_of(p), modules.flat_of(p) is not None) for p in model.parameters()],
    }


def assert_reads_as(results: list[dict[str, Any]], plain: nn.Module, *, num_shards: int) -> None:
    expected = plain.state_dict()
    for found in results:
        assert list(found["names"]) == list(expected)
        assert found["metadata"] == dict(expected._metadata)  # type: ignore[attr-defined]
        for name, value in expected.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(found["whole"][name], value), name
    for name, order in results[0]["orders"].items():
        value = expected[name] if order is None else expected[name].permute(order)
        flat = value.reshape(-1)
        for rank, found in enumerate(results):
            (begin, end), memory, placement = found["parts"][name]
            assert torch.equal(memory.reshape(-1), flat[begin:end]), name
            assert placement == results[0]["parts"][name][2]
            box = ((begin,), (end - begin,))
            assert not end - begin or rank in dict(placement)[box]
        assert sum(size for (_, (size,)), _ in placement) == flat.numel()
        assert len(placement) <= num_shards


STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
NUM_SHARDS = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 3, "NO_SHARD": 1}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("orig", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["net", "transposed", "mlp"])
def test_what_ranks_hold_is_the_unwrapped_model(name: str, strategy: str, orig: bool, nested: bool) -> None:
    def model() -> Any:
        made = make(name) if orig else trainable(make(name))
        return fsdp(made, strategy, orig, nested)

    results = run_ranks(read, 3, model)
    assert_reads_as(results, make(name), num_shards=NUM_SHARDS[strategy])
    if name == "net":
        assert results[0]["ties"] == {"head.weight": "embed.weight"}
        assert results[0]["frozen"] == (["adapter.weight"] if orig else [])
    names = [names for names, _ in results[0]["known"]]
    assert all(names) == orig  # a flat parameter is none of the model's own
    if orig:
        assert [names[0] for names in names] == [n for n, _ in make(name).named_parameters()]
    else:
        assert all(is_flat for _, is_flat in results[0]["known"])


def test_a_tie_between_two_units() -> None:
    """The original parameter of one unit stands in another: it is what it is, and tied."""

    def model() -> Any:
        net: Any = make("net")
        net.head = fsdp(net.head, nested=False)
        return fsdp(net, nested=False)

    results = run_ranks(read, 2, model)
    assert_reads_as(results, make("net"), num_shards=2)
    assert results[0]["ties"] == {"head.weight": "embed.weight"}


@pytest.mark.parametrize("how", ["mesh", "groups"])
@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
def test_replicas_of_shards(strategy: str, how: str) -> None:
    def model() -> Any:
        if how == "mesh":
            return fsdp(make("net"), strategy, device_mesh=init_device_mesh("cpu", (2, 2)))
        rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        rank = dist.get_rank()
        return fsdp(make("net"), strategy, process_group=(rows[rank // 2], columns[rank % 2]))

    def held(rank: int) -> list[tuple[Any, Any, torch.Tensor]]:
        modules = read_modules(model())
        flats = {name: live for name, live in modules.tensors.items() if live.flat is not None}
        assert all(live.flat.flat.layout.mesh.sizes == (2, 2) for live in flats.values() if live.flat)
        return [(name, layout_of(live), memory_of(live).clone()) for name, live in flats.items()]

    results = run_ranks(held, 4)
    expected = make("net").state_dict()
    assert len(results[0]) > 10
    for columns in zip(*results, strict=True):
        name, placement, _ = columns[0]
        assert all(column[:2] == (name, placement) for column in columns)
        made = torch.full((expected[name].numel(),), torch.nan)
        for ((start,), (size,)), ranks in placement:
            assert ranks in ((0, 2), (1, 3))
            for rank in ranks:
                assert torch.equal(columns[rank][2], expected[name].reshape(-1)[start : start + size])
            made[start : start + size] = columns[ranks[0]][2]
        assert torch.equal(made, expected[name].reshape(-1))


def test_ignored_modules_stay_whole() -> None:
    def model() -> Any:
        net: Any = make("net")
        return fsdp(net, ignored_modules=[net.blocks[1], net.adapter])

    results = run_ranks(read, 2, model)
    assert_reads_as(results, make("net"), num_shards=2)
    assert not [name for name in results[0]["parts"] if name.startswith(("blocks.1", "adapter"))]
    assert [name for name in results[0]["parts"] if name.startswith("blocks.0")]


@pytest.mark.parametrize("orig", [False, True])
def test_wrappers_within_and_around(orig: bool) -> None:
    def model() -> Any:
        net: Any = trainable(make("net"))
        for i in range(2):
            net.blocks[i] = fsdp(checkpoint_wrapper(net.blocks[i]), orig=orig, nested=False)
        net.batch = torch.compile(checkpoint_wrapper(net.batch), backend="eager")
        return torch.compile(fsdp(net, orig=orig, nested=False), backend="eager")

    assert_reads_as(run_ranks(read, 2, model), make("net"), num_shards=2)


# -- states ----------------------------------------------------------------------------------------------------------


def after(model: Any, state: str) -> Any:
    """Bring a model into a state in which its parameters may be gathered, or of low precision."""
    inputs = torch.arange(4)
    if state == "evaluated":
        with torch.no_grad():
            model.eval()(inputs)
    if state in ("forward", "backward"):
        loss = model(inputs).sum()
        if state == "backward":
            loss.backward()
    return model


def low(**dtypes: torch.dtype) -> Any:
    from torch.distributed.fsdp import MixedPrecision

    return MixedPrecision(**dtypes)


@pytest.mark.parametrize("state", ["fresh", "evaluated", "forward", "backward"])
@pytest.mark.parametrize("orig", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("precision", ["full", "mixed"])
def test_shards_are_read_and_written_in_any_state(strategy: str, orig: bool, state: str, precision: str) -> None:
    """What is read is what FSDP itself gathers afterwards; and what is written, too."""

    def body(rank: int) -> None:
        plain = trainable(filled(Net(), 300))
        options = {} if precision == "full" else {"mixed_precision": low(param_dtype=torch.bfloat16)}
        model = after(fsdp(trainable(make("net")), strategy, orig, **options), state)
        modules = read_modules(model)
        found = {name: whole(live) for name, live in modules.tensors.items() if live.persistent}
        expected = full(model)
        assert [*found] == [*expected]
        for name, value in expected.items():
            assert found[name].dtype == value.dtype and torch.equal(found[name], value), name

        model = after(fsdp(trainable(make("net")), strategy, orig, **options), state)
        values = plain.state_dict()
        with torch.no_grad():
            for name, live in read_modules(model).tensors.items():
                if live.persistent and live.flat is not None:
                    begin, end = live.flat.interval(live.flat.flat.coordinate)
                    memory_of(live).copy_(live.flat.flattening.flatten(values[name])[begin:end])
                elif live.persistent:
                    memory_of(live).copy_(values[name])
        for name, value in full(model).items():
            assert torch.equal(value, values[name]), name
        after(model, "evaluated")
        for name, value in full(model).items():
            assert torch.equal(value, values[name]), name

    run_ranks(body, 2)


def test_what_was_written_is_what_runs() -> None:
    """A gathered copy that a forward pass has left would hide what is written to the shards."""

    def body(rank: int) -> None:
        model = after(fsdp(trainable(make("net")), "SHARD_GRAD_OP"), "forward")
        with torch.no_grad():
            for live in read_modules(model).tensors.values():
                if live.flat is not None:
                    memory_of(live).fill_(0)
            model.eval()
            assert not model(torch.arange(4)).any()

    run_ranks(body, 2)


def test_buffers_of_low_precision_have_the_dtype_of_the_state_dict() -> None:
    def body(rank: int) -> None:
        net: Any = make("net")
        net.blocks[0] = checkpoint_wrapper(net.blocks[0])
        net.blocks[0]._checkpoint_wrapped_module.register_buffer("third", torch.full((2,), 1 / 3))
        options = low(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
        model = after(fsdp(net, mixed_precision=options, nested=False), "evaluated")
        tensors = read_modules(model).tensors
        buffers = {name: live for name, live in tensors.items() if live.kind == "buffer" and live.persistent}
        assert buffers["blocks.0.third"].tensor.dtype == torch.bfloat16
        expected = {name: leaf_of(live).clone() for name, live in buffers.items()}
        for name, value in full(model).items():
            if name in buffers:
                assert buffers[name].spec.dtype == value.dtype == expected[name].dtype, name
                assert torch.equal(value, expected[name]), name

    run_ranks(body, 2)


def test_summoned_parameters_are_not_read() -> None:
    def body(rank: int) -> str:
        from torch.distributed.fsdp import FullyShardedDataParallel

        model = fsdp(make("net"))
        with FullyShardedDataParallel.summon_full_params(model), pytest.raises(FdsdError) as caught:
            leaf_of(read_modules(model).tensors["embed.weight"])
        return str(caught.value)

    texts = run_ranks(body, 2)
    assert all("summon_full_params" in text and "Leave that block first" in text for text in texts)


# -- expressions and what optimizers have ----------------------------------------------------------------------------


def test_a_rank_reads_its_own_part_and_names_the_others() -> None:
    def body(rank: int) -> list[str]:
        modules = read_modules(fsdp(make("mlp"), nested=False))
        expected = make("mlp").state_dict()
        texts: list[str] = []
        for name, value in expected.items():
            leaf = leaf_of(modules.tensors[name])
            view = modules.tensors[name].flat
            assert isinstance(leaf, Lazy) and isinstance(view, FlatView)
            begin, end = view.interval(rank)
            if end - begin == value.numel():
                assert torch.equal(evaluate([leaf])[0], value)
            else:
                with pytest.raises(FdsdError, match="is held by ranks") as caught:
                    evaluate([leaf])
                texts.append(str(caught.value))
        return texts

    first, second = run_ranks(body, 2)
    assert first and second
    assert all("held by ranks 1; give group=" in text for text in first)
    assert all("held by ranks 0; give group=" in text for text in second)


@pytest.mark.parametrize("orig", [False, True])
def test_slots_lie_as_their_parameters_do(orig: bool) -> None:
    def body(rank: int) -> None:
        model = after(fsdp(trainable(make("transposed")), orig=orig, nested=False), "fresh")
        modules = read_modules(model)
        for name, live in modules.tensors.items():
            assert live.flat is not None
            begin, end = live.flat.interval(rank)
            if orig:
                slot = memory_of(live) * 2
                leaf = live.flat.of_piece(slot)
                with pytest.raises(SpecMismatch, match=f"holds {end - begin} elements"):
                    live.flat.of_piece(torch.ones(end - begin + 1))
            else:
                flat = modules.flat_of(live.tensor)
                assert flat is live.flat.flat and flat.parameter is live.tensor
                leaf = live.flat.of(flat.over(flat.local() * 2))
                with pytest.raises(SpecMismatch, match=r"the shape \(.*,\), not \(3,\)"):
                    flat.over(torch.ones(3))
            assert leaf.spec == live.spec
            if end - begin == live.spec.numel:
                assert torch.equal(evaluate([leaf])[0], make("transposed").state_dict()[name] * 2)

    run_ranks(body, 2)


def test_parameters_that_are_whole_here_are_no_expressions() -> None:
    def body(rank: int) -> None:
        modules = read_modules(fsdp(make("transposed"), "NO_SHARD", nested=False))
        for name, value in make("transposed").state_dict().items():
            live = modules.tensors[name]
            leaf = leaf_of(live)
            assert type(leaf) is torch.Tensor and torch.equal(leaf, value)
            assert live.flat is not None and torch.equal(live.flat.of_piece(leaf), value)
            assert layout_of(live) == Pieces.whole((value.numel(),), [0, 1])

    run_ranks(body, 2)


# -- code of a module's own ------------------------------------------------------------------------------------------


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.lin(x)
        return made


def test_hooks_may_rename_flat_parameters() -> None:
    def body(rank: int, orig: bool) -> None:
        net = filled(Hooked())

        def show(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
            state[prefix + "w"] = state.pop(prefix + "lin.weight")

        net.register_state_dict_post_hook(show)
        modules = read_modules(fsdp(net, orig=orig, nested=False))
        assert modules.names == ("lin.bias", "w") and modules.tensors["w"].flat is not None
        assert torch.equal(whole(modules.tensors["w"]), filled(Hooked()).state_dict()["lin.weight"])

    for orig in (False, True):
        run_ranks(body, 2, orig)


def test_hooks_may_not_compute_with_flat_parameters() -> None:
    def body(rank: int) -> str:
        net = Hooked()

        def show(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
            state[prefix + "double"] = state[prefix + "lin.weight"] * 2

        net.register_state_dict_post_hook(show)
        with pytest.raises(Unsupported) as caught:
            read_modules(fsdp(net, nested=False))
        return str(caught.value)

    assert all("computes 'double' from a parameter that FSDP has flattened" in text for text in run_ranks(body, 2))


def test_a_state_dict_method_around_flat_parameters_is_refused() -> None:
    class Own(Hooked):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return super().state_dict(*args, **kwargs)

    def body(rank: int) -> str:
        net = Own()
        net.lin = fsdp(net.lin, nested=False)
        with pytest.raises(Unsupported) as caught:
            read_modules(net)
        return str(caught.value)

    assert all("Own at 'the top'" in text and "fully_shard()" in text for text in run_ranks(body, 2))
