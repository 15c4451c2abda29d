"""The drop-in over real ranks: every kind of parallelism, each way to read and write, against the unwrapped model.

The reference is always a plain model of one process that holds the same numbers.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from fdsd.comms.dtensors import make_like
from fdsd.compat.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from tests.helpers.parallelism import FORWARD, INNER
from tests.helpers.ranks import run_ranks
from tests.helpers.sharded_models import dtensor

FULL = StateDictOptions(full_state_dict=True)
FULL_CPU = StateDictOptions(full_state_dict=True, cpu_offload=True)
SHARDED_CPU = StateDictOptions(cpu_offload=True)
BROADCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
LAX = StateDictOptions(strict=False)
FROZEN = StateDictOptions(ignore_frozen_params=True)


class Block(nn.Module):
    """Uneven sizes; a frozen bias."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, INNER)
        self.down = nn.Linear(INNER, 5)
        self.down.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).tanh())


class Net(nn.Module):
    """Uneven layers, buffers of both kinds, a frozen part, an extra state."""

    note: Any

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(3, 5)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.out = nn.Linear(5, 2, bias=False)
        self.register_buffer("table", torch.zeros(2, 3))
        self.register_buffer("cache", torch.zeros(3), persistent=False)
        self.note = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        made: torch.Tensor = self.out(x)
        return made

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state


def net(salt: int = 0) -> Net:
    made = Net()
    count = 1 + 1000 * salt
    with torch.no_grad():
        for value in [*made.parameters(), *made.buffers()]:
            value.copy_((torch.arange(value.numel()) + count).reshape(value.shape) / 4096)
            count += value.numel()
    made.note = {"salt": salt}
    return made


# -- kinds of parallelism --------------------------------------------------------------------------------------------


@cache
def line() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))


@cache
def grid() -> Any:
    """Make a mesh once for each rank: every one has process groups, with threads of their own."""
    size = dist.get_world_size()
    return init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))


def ddp(model: Any) -> Any:
    return nn.parallel.DistributedDataParallel(model)


def fsdp2(model: Any, mesh: Any = None) -> Any:
    from torch.distributed.fsdp import fully_shard

    mesh = line() if mesh is None else mesh
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def hsdp(model: Any) -> Any:
    return fsdp2(model, grid())


def tp(model: Any, mesh: Any = None) -> Any:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan: Any = {"blocks.*.up": ColwiseParallel(use_local_output=False), "blocks.*.down": RowwiseParallel()}
    made: Any = parallelize_module(model, line() if mesh is None else mesh, plan)
    for block in made.blocks:
        block.down.bias.requires_grad_(False)  # torch 2.6 makes parameters anew, and all of them train then
    return made


def two_d(model: Any) -> Any:
    mesh = grid()
    return fsdp2(tp(model, mesh["tp"]), mesh["dp"])


def fsdp1(**options: Any) -> Callable[[Any], Any]:
    def wrap(model: Any) -> Any:
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        made = {name: value() if callable(value) else value for name, value in options.items()}
        policy = ModuleWrapPolicy({Block})
        return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"), **made)

    return wrap


def compiled_fsdp2(model: Any) -> Any:
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(torch.compile(block, backend="eager"))
    return torch.compile(fsdp2(model), backend="eager")


def meta_fsdp2(model: Any) -> Any:
    """Give a model of the same values, that was meta-initialised and then got memory."""
    with torch.device("meta"):
        made = Net()
    made = fsdp2(made).to_empty(device="cpu")
    set_model_state_dict(made, model.state_dict(), options=FULL)
    made.cache.zero_()
    return made


KINDS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda model: model,
    "DDP": ddp,
    "FSDP2": fsdp2,
    "TP": tp,
    "FSDP2+TP": two_d,
    "HSDP": hsdp,
    "FSDP1": fsdp1(use_orig_params=True),
    "FSDP1 flat": fsdp1(use_orig_params=False),
    "FSDP1 mesh": fsdp1(use_orig_params=True, device_mesh=line),
    "compiled, checkpointed FSDP2": compiled_fsdp2,
    "meta FSDP2": meta_fsdp2,
}
SIZES = {"FSDP2": 3, "FSDP2+TP": 4, "HSDP": 4, "FSDP1": 3, "meta FSDP2": 3}
"""The number of ranks of each kind: odd ones where shards are uneven, 2 where nothing is said."""


def wrapped(kind: str, model: Net) -> Any:
    if kind.startswith("FSDP1"):  # it wants one requires_grad in a flat parameter
        model.requires_grad_(True)
    with warnings.catch_warnings():  # older versions of torch warn of tensor parallelism on the CPU
        warnings.filterwarnings("ignore", message="DTensor random operators")
        return KINDS[kind](model)


def size_of(kind: str) -> int:
    return SIZES.get(kind, 2)


every_kind = pytest.mark.parametrize("kind", KINDS)


def in_turn(optimizers: Iterable[str]) -> Any:
    """Give each kind the next of the optimizers; every one of them meets several kinds."""
    return pytest.mark.parametrize("kind, optim", list(zip(KINDS, itertools.cycle(optimizers), strict=False)))


def two_in_turn(optimizers: Iterable[str]) -> Any:
    """Give each kind two optimizers that stand side by side, and the next kind the next two."""
    those = list(optimizers)
    pairs = [(kind, those[(i + more) % len(those)]) for i, kind in enumerate(KINDS) for more in (0, 1)]
    return pytest.mark.parametrize("kind, optim", pairs)


def whole(value: Any) -> Any:
    from torch.distributed._shard.sharded_tensor import ShardedTensor
    from torch.distributed.tensor import DTensor

    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, ShardedTensor):
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, [(s.metadata.shard_offsets, s.tensor) for s in value.local_shards()])
        metadata = value.metadata()  # asking the tensor itself warns
        made = torch.full(tuple(metadata.size), float("nan"), dtype=metadata.tensor_properties.dtype)
        for offsets, part in [pair for pairs in parts for pair in pairs]:
            made[tuple(slice(at, at + n) for at, n in zip(offsets, part.shape, strict=True))] = part
        return made
    return value


def assert_state(state: Any, reference: Any, *, order: bool = True) -> None:
    assert (list(state) == list(reference)) if order else (state.keys() == reference.keys())
    for name, value in reference.items():
        mine = whole(state[name])
        if isinstance(value, torch.Tensor):
            assert mine.dtype == value.dtype and torch.equal(mine, value), name
        else:
            assert mine == value, name


def batch(steps: int) -> list[torch.Tensor]:
    return [torch.arange(6.0).reshape(2, 3) / 16 + step / 8 for step in range(steps)]


def computes(model: Any) -> bool:
    return FORWARD or not any("FSDP" in type(m).__name__ and "Fully" not in type(m).__name__ for m in model.modules())


def forward(model: Any, x: torch.Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the compiler
        return model(x)


def given_gradient(param: Any, x: torch.Tensor) -> torch.Tensor:
    """Give a gradient that lies as its parameter does, as FSDP2 makes it; sums of DTensors of torch 2.6 do not."""
    made = getattr(param, "_local_tensor", param).detach() * 0.5 + x.sum()
    return make_like(param, made) if hasattr(param, "placements") else made


def train(model: Any, optimizer: Any, steps: int = 2, *, runs: bool | None = None) -> list[float]:
    """Train, and give the losses. A model that this torch cannot run, or one like it, is given gradients."""
    losses: list[float] = []
    for x in batch(steps):
        optimizer.zero_grad()
        if computes(model) if runs is None else runs:
            loss = forward(model, x).square().sum()
            loss.backward()
        else:
            for param in model.parameters():
                param.grad = given_gradient(param, x) if param.requires_grad else None
            loss = sum(whole(param.detach()).square().sum() for param in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    optimizer.zero_grad()
    return losses


# -- models ----------------------------------------------------------------------------------------------------------


class TestModels:
    @every_kind
    def test_reading(self, kind: str) -> None:
        def check(rank: int) -> None:
            reference = net(1).state_dict()
            model = wrapped(kind, net(1))
            assert_state(get_model_state_dict(model), reference)
            assert_state(get_model_state_dict(model, options=SHARDED_CPU), reference)
            assert_state(get_model_state_dict(model, options=FULL), reference)
            assert all(type(v) in (torch.Tensor, dict) for v in get_model_state_dict(model, options=FULL).values())
            state = get_model_state_dict(model, options=FULL_CPU)
            if rank == 0:
                assert_state(state, reference)
                assert all(type(v) is torch.Tensor and v.is_cpu for v in state.values() if not isinstance(v, dict))
            else:
                assert state == {}
            if not kind.startswith("FSDP1"):
                kept = [name for name in reference if "down.bias" not in name]
                assert list(get_model_state_dict(model, options=FROZEN)) == kept

        run_ranks(check, size_of(kind), timeout=240)

    @every_kind
    def test_what_torch_gives(self, kind: str) -> None:
        """The same names, and the same kinds of tensors with the same shards."""

        def check(rank: int) -> None:
            from torch.distributed.checkpoint import state_dict as peer

            model = wrapped(kind, net(1))
            mine = get_model_state_dict(model)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                theirs = {name.replace("_orig_mod.", ""): v for name, v in peer.get_model_state_dict(model).items()}
            assert list(mine) == list(theirs)
            for name, value in theirs.items():
                ours: Any = mine[name]
                assert type(ours) is type(value), name
                if hasattr(value, "placements"):
                    assert (ours.placements, ours.device_mesh) == (value.placements, value.device_mesh)
                    assert torch.equal(ours.to_local(), value.to_local())
                if hasattr(value, "local_shards"):
                    for a, b in zip(ours.local_shards(), value.local_shards(), strict=True):
                        assert a.metadata == b.metadata and torch.equal(a.tensor, b.tensor)
                    assert ours.metadata() == value.metadata()

        run_ranks(check, 2 if kind == "FSDP1" else size_of(kind), timeout=240)  # torch fails on ranks without rows

    @every_kind
    def test_writing(self, kind: str) -> None:
        def check(rank: int) -> None:
            reference = net(1).state_dict()
            for way in ("full", "broadcast", "sharded"):
                model, source = wrapped(kind, net(2)), wrapped(kind, net(1))
                given: Any = copy.deepcopy(dict(reference))
                if way == "sharded":
                    given = get_model_state_dict(source)
                elif way == "broadcast" and rank:
                    given = {}
                items = list(given.items())
                options = {"full": FULL, "broadcast": BROADCAST, "sharded": None}[way]
                result = set_model_state_dict(model, given, options=options)
                assert (result.missing_keys, result.unexpected_keys) == ([], [])
                assert [(name, id(value)) for name, value in given.items()] == [(n, id(v)) for n, v in items]
                assert_state(get_model_state_dict(model, options=FULL), reference)
                assert_state(get_model_state_dict(model), reference)
                if computes(model):  # with what was loaded
                    told, expected = forward(model, batch(1)[0]), net(1)(batch(1)[0])
                    torch.testing.assert_close(whole(told), expected)

        run_ranks(check, size_of(kind), timeout=240)

    @every_kind
    def test_values_are_live_and_detached(self, kind: str) -> None:
        def check(rank: int) -> None:
            if kind.startswith("FSDP1"):
                return
            model = wrapped(kind, net(1))
            state: Any = get_model_state_dict(model)
            for name, param in model.named_parameters():
                clean = name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "").replace("module.", "")
                value = state[clean]
                assert not value.requires_grad
                a, b = (getattr(t, "_local_tensor", t) for t in (value, param))
                assert a.data_ptr() == b.data_ptr()

        run_ranks(check, size_of(kind), timeout=240)


# -- verdicts --------------------------------------------------------------------------------------------------------


FAULTS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "missing": (lambda s: {k: v for k, v in s.items() if k != "inp.bias"}, r'Missing key.*"inp\.bias"'),
    "unexpected": (lambda s: {**s, "stray": torch.ones(1)}, r'Unexpected key.*"stray"'),
    "shape": (lambda s: {**s, "blocks.0.up.weight": torch.ones(7, 1)}, r"size mismatch for blocks\.0\.up\.weight"),
    "no tensor": (lambda s: {**s, "out.weight": "text"}, r'"out\.weight", expected torch\.Tensor'),
    "no mapping": (lambda s: [1, 2], r"(Expected state_dict to be dict-like|could not take part)"),
    "extra state": (lambda s: {k: v for k, v in s.items() if k != "_extra_state"}, r'Missing key.*"_extra_state"'),
}


class TestVerdicts:
    @pytest.mark.parametrize("kind", ["plain", "FSDP2", "FSDP2+TP", "FSDP1", "DDP"])
    def test_what_rank_0_gives_is_judged_by_all_alike(self, kind: str) -> None:
        """Seen: one rank raises, and the others hang or report success."""

        def check(rank: int) -> None:
            model = wrapped(kind, net(2))
            before = copy.deepcopy(get_model_state_dict(model, options=FULL))
            for spoil, message in FAULTS.values():
                given = {} if rank else spoil(dict(net(1).state_dict()))
                with pytest.raises((RuntimeError, TypeError), match=message):
                    set_model_state_dict(model, given, options=BROADCAST)
                assert_state(get_model_state_dict(model, options=FULL), before)

        run_ranks(check, size_of(kind), timeout=240)

    @pytest.mark.parametrize("kind", ["FSDP2", "FSDP2+TP", "FSDP1", "TP"])
    def test_a_fault_of_one_rank_is_an_error_on_all(self, kind: str) -> None:
        """Seen: half applied before it raises, on one rank only; missing names never reported."""

        def check(rank: int) -> None:
            model = wrapped(kind, net(2))
            before = copy.deepcopy(get_model_state_dict(model, options=FULL))
            for bad in (0, 1):
                for spoil, message in FAULTS.values():
                    given = dict(net(1).state_dict())
                    with pytest.raises((RuntimeError, TypeError), match=message):
                        set_model_state_dict(model, spoil(given) if rank == bad else given, options=FULL)
                    assert_state(get_model_state_dict(model, options=FULL), before)

        run_ranks(check, size_of(kind), timeout=240)

    @pytest.mark.parametrize("kind", ["plain", "DDP", "FSDP2", "TP", "FSDP1 flat"])
    def test_lax_loads_say_the_same_on_all_ranks(self, kind: str) -> None:
        def check(rank: int) -> Any:
            model = wrapped(kind, net(2))
            given = {**net(1).state_dict(), "stray": torch.ones(1)}
            del given["inp.bias"]
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
            result = set_model_state_dict(model, {} if rank else given, options=options)
            reference = {**net(1).state_dict(), "inp.bias": net(2).state_dict()["inp.bias"]}
            assert_state(get_model_state_dict(model, options=FULL), reference, order=False)
            return result.missing_keys, result.unexpected_keys

        assert run_ranks(check, 2) == [(["inp.bias"], ["stray"])] * 2

    def test_other_orders_on_other_ranks(self) -> None:
        """Seen: ranks hold the same dict in different key orders, and weights are mixed silently."""

        def check(rank: int) -> None:
            model = wrapped("FSDP2", net(2))
            items = list(net(1).state_dict().items())
            set_model_state_dict(model, dict(items if rank else reversed(items)), options=FULL)
            assert_state(get_model_state_dict(model, options=FULL), net(1).state_dict())
            sharded = list(get_model_state_dict(wrapped("FSDP2", net(3))).items())
            set_model_state_dict(model, dict(sharded if rank else reversed(sharded)))
            assert_state(get_model_state_dict(model, options=FULL), net(3).state_dict())

        run_ranks(check, 2)

    def test_a_plain_shard_is_no_strided_one(self) -> None:
        """Versions of torch hold the two for equal, though a rank has other rows of each."""

        def check(rank: int) -> None:
            model, optimizer = trained("FSDP2+TP", "Adam")
            name = "blocks.0.up.weight"
            weights, state = get_state_dict(model, optimizer)
            live: Any = weights[name]
            value = net(3).state_dict()[name]
            plain = dtensor(value, live.device_mesh, [Shard(0), Shard(0)])
            rows: Any = state["state"]
            given: Any = {**state, "state": {**rows, name: {**rows[name], "exp_avg": plain}}}
            set_state_dict(
                model, optimizer, model_state_dict={**weights, name: plain}, optim_state_dict=copy.deepcopy(given)
            )
            found: Any = get_state_dict(model, optimizer, options=FULL)
            assert torch.equal(found[0][name], value) and torch.equal(found[1]["state"][name]["exp_avg"], value)

        run_ranks(check, 4)

    def test_whole_tensors_for_sharded_parameters_need_the_option(self) -> None:
        def check(rank: int) -> None:
            model = wrapped("FSDP2", net(2))
            with pytest.raises(RuntimeError, match="full_state_dict=True"):
                set_model_state_dict(model, dict(net(1).state_dict()))
            assert_state(get_model_state_dict(model, options=FULL), net(2).state_dict())

        run_ranks(check, 2)

    def test_empty_dicts_without_broadcast_are_no_success(self) -> None:
        def check(rank: int) -> None:
            model = wrapped("FSDP2", net(2))
            given = {} if rank else dict(net(1).state_dict())
            for options in (FULL, FULL_CPU):
                with pytest.raises(RuntimeError):
                    set_model_state_dict(model, given, options=options)
                assert_state(get_model_state_dict(model, options=FULL), net(2).state_dict())

        run_ranks(check, 2)


# -- meta models -----------------------------------------------------------------------------------------------------


class TestMetaModels:
    @pytest.mark.parametrize("kind", ["plain", "FSDP2", "FSDP2+TP", "HSDP", "TP"])
    def test_loading_makes_memory(self, kind: str) -> None:
        def check(rank: int) -> None:
            for way in ("full", "broadcast", "sharded"):
                load(rank, way)

        def load(rank: int, way: str) -> None:
            with torch.device("meta"):
                model = Net().to(torch.bfloat16)
            model = wrapped(kind, model)
            reference = dict(net(1).state_dict())
            if way == "sharded":
                given: Any = get_model_state_dict(wrapped(kind, net(1)))
            else:
                given = {} if way == "broadcast" and rank else reference
            options = {"full": FULL, "broadcast": BROADCAST}.get(way)
            with pytest.warns(UserWarning, match="still on the meta device: 'cache'"):
                set_model_state_dict(model, given, options=options)
            expected = {k: v.bfloat16() if isinstance(v, torch.Tensor) else v for k, v in reference.items()}
            assert_state(get_model_state_dict(model, options=FULL), expected)
            assert not model.blocks[0].down.bias.requires_grad and model.blocks[0].up.bias.requires_grad
            model.cache = torch.zeros(3)
            if not computes(model):
                return
            optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
            model.bfloat16()
            model(batch(1)[0].bfloat16()).sum().backward()
            optimizer.step()

        run_ranks(check, size_of(kind), timeout=240)

    def test_ties_of_a_sharded_model_are_tied_again(self) -> None:
        def check(rank: int) -> None:
            from torch.distributed.fsdp import fully_shard

            def tied() -> Any:
                made: Any = nn.Sequential()
                made.embed, made.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
                made.head.weight = made.embed.weight
                return made

            source = tied()
            dist.broadcast(source.embed.weight.detach(), 0)
            with torch.device("meta"):
                model = tied()
            model = fully_shard(model, mesh=line())
            given = {} if rank else dict(source.state_dict())
            set_model_state_dict(model, given, options=BROADCAST)
            assert model.head.weight is model.embed.weight
            state: Any = get_model_state_dict(model, options=FULL)
            assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()
            assert torch.equal(state["head.weight"], source.embed.weight)

        run_ranks(check, 2)


# -- optimizers ------------------------------------------------------------------------------------------------------


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "Adam": lambda params: torch.optim.Adam(params, lr=0.01, betas=(0.8, 0.9)),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.01),
    "SGD momentum": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, dampening=0.1),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01),
}


def assert_close(a: Any, b: Any) -> None:
    if isinstance(b, dict):
        assert a.keys() == b.keys()
        for key in b:
            if key == "params":  # FSDP1's flat parameters have an order of their own
                assert sorted(a[key]) == sorted(b[key])
            else:
                assert_close(a[key], b[key])
    elif isinstance(b, list | tuple):
        assert type(a) is type(b) and len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_close(x, y)
    elif isinstance(b, torch.Tensor):
        torch.testing.assert_close(whole(a), b)
    else:
        assert a == b


def trained(kind: str, optim: str) -> tuple[Any, Any]:
    model = wrapped(kind, net(1))
    optimizer = OPTIMIZERS[optim](model.parameters())
    train(model, optimizer)
    return model, optimizer


class TestOptimizers:
    @in_turn(["Adam", "SGD momentum"])
    def test_reading(self, kind: str, optim: str) -> None:
        def check(rank: int) -> None:
            model, optimizer = trained(kind, optim)
            plain = net(1)
            if kind.startswith("FSDP1"):
                plain.requires_grad_(True)
            reference_optimizer = OPTIMIZERS[optim](plain.parameters())
            train(plain, reference_optimizer, runs=computes(model))
            for flat in (False, True):
                options = StateDictOptions(flatten_optimizer_state_dict=flat)
                reference = get_optimizer_state_dict(plain, reference_optimizer, options=options)
                full = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=flat)
                cpu = StateDictOptions(full_state_dict=True, cpu_offload=True, flatten_optimizer_state_dict=flat)
                assert_close(get_optimizer_state_dict(model, optimizer, options=options), reference)
                assert_close(get_optimizer_state_dict(model, optimizer, options=full), reference)
                on_zero = get_optimizer_state_dict(model, optimizer, options=cpu)
                assert_close(on_zero, {} if rank else reference)

        run_ranks(check, size_of(kind), timeout=240)

    @in_turn(OPTIMIZERS)  # all with all: the audit of known faults
    def test_reading_a_fresh_one_changes_nothing(self, kind: str, optim: str) -> None:
        def check(rank: int) -> None:
            models = [wrapped(kind, net(1)) for _ in range(2)]
            optimizers = [OPTIMIZERS[optim](model.parameters()) for model in models]
            for options in (None, FULL, FULL_CPU, StateDictOptions(flatten_optimizer_state_dict=True)):
                get_optimizer_state_dict(models[0], optimizers[0], options=options)
            assert optim == "Adagrad" or not any(optimizers[0].state.values())
            assert train(models[0], optimizers[0]) == train(models[1], optimizers[1])

        run_ranks(check, size_of(kind), timeout=240)

    @two_in_turn(OPTIMIZERS)
    def test_training_goes_on_as_if_nothing_had_happened(self, kind: str, optim: str) -> None:
        ways = [("sharded", False), ("sharded", True), ("full", True), ("broadcast", False)]
        start = (list(KINDS).index(kind) + list(OPTIMIZERS).index(optim)) % 2  # each kind meets each way, in turn

        def check(rank: int) -> None:
            told = train(*trained(kind, optim), steps=3)
            for way, flat in ways[start::2]:
                put = {"sharded": StateDictOptions(), "full": FULL, "broadcast": BROADCAST}[way]
                get = StateDictOptions(full_state_dict=way != "sharded", flatten_optimizer_state_dict=flat)
                model, optimizer = trained(kind, optim)
                weights, state = get_state_dict(model, optimizer, options=get)
                other = wrapped(kind, net(5))
                new = OPTIMIZERS[optim](other.parameters())
                if way == "broadcast" and rank:
                    weights, state = {}, {}
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # ShardedTensors warn when they are copied
                    copies = copy.deepcopy((weights, state))
                set_state_dict(other, new, model_state_dict=copies[0], optim_state_dict=copies[1], options=put)
                set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state, options=put)
                assert train(model, optimizer, 3) == told
                assert train(other, new, 3) == told
                assert isinstance(new.param_groups[0].get("betas", ()), tuple)

        run_ranks(check, size_of(kind), timeout=240)

    @pytest.mark.parametrize("kind", ["FSDP2", "FSDP1", "FSDP1 flat", "TP"])
    def test_from_one_process_to_ranks_and_back(self, kind: str) -> None:
        plain = net(1)
        if kind.startswith("FSDP1"):
            plain.requires_grad_(True)
        optimizer = OPTIMIZERS["Adam"](plain.parameters())
        train(plain, optimizer)
        weights, state = get_state_dict(plain, optimizer)

        def check(rank: int) -> Any:
            model = wrapped(kind, net(3))
            adam = OPTIMIZERS["Adam"](model.parameters())
            given = ({}, {}) if rank else (weights, state)
            set_state_dict(model, adam, model_state_dict=given[0], optim_state_dict=given[1], options=BROADCAST)
            return get_state_dict(model, adam, options=FULL_CPU)

        made = run_ranks(check, 3)
        assert made[1:] == [({}, {})] * 2
        assert_close(made[0][0], dict(weights))
        assert_close(made[0][1], state)

    @pytest.mark.parametrize("kind", ["plain", "FSDP2", "FSDP1"])
    def test_options_that_only_the_file_has_reach_every_rank(self, kind: str) -> None:
        """Seen: ``initial_lr`` reaches rank 0 only."""

        def check(rank: int) -> Any:
            model, optimizer = trained(kind, "Adam")
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5)
            state = get_optimizer_state_dict(model, optimizer, options=FULL_CPU)
            new = OPTIMIZERS["Adam"](model.parameters())
            set_optimizer_state_dict(model, new, state, options=BROADCAST)
            return new.param_groups[0]["initial_lr"], new.param_groups[0]["lr"], new.param_groups[0]["betas"]

        assert run_ranks(check, 2) == [(0.01, 0.005, (0.8, 0.9))] * 2

    @pytest.mark.parametrize("way", ["full", "broadcast"])
    @pytest.mark.parametrize("kind", ["plain", "FSDP2", "FSDP1"])
    def test_a_missing_state_is_the_same_error_on_all(self, kind: str, way: str) -> None:
        def check(rank: int) -> None:
            model, optimizer = trained(kind, "Adam")
            state: Any = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=FULL))
            if rank == 0 or kind == "FSDP1":  # of which rank 0 holds nothing there
                del state["state"]["out.weight"]
            new = OPTIMIZERS["Adam"](model.parameters())
            given = {} if rank and way == "broadcast" else state
            options = FULL if way == "full" else BROADCAST
            if kind == "plain" and way == "full" and rank:
                return  # nothing joins the ranks
            with pytest.raises(
                RuntimeError, match=r"Missing optimizer state for parameter 'out\.weight' in checkpoint"
            ):
                set_optimizer_state_dict(model, new, given, options=options)
            assert not any(new.state.values())

        run_ranks(check, 2)

    def test_stale_weights(self) -> None:
        """Seen: with broadcast and ``{}`` elsewhere, the others skip the model and report success."""

        def check(rank: int) -> None:
            model, optimizer = trained("FSDP2", "Adam")
            weights, state = get_state_dict(model, optimizer, options=FULL)
            other = wrapped("FSDP2", net(4))
            new = OPTIMIZERS["Adam"](other.parameters())
            given: Any = ({}, {}) if rank else (weights, state)
            set_state_dict(other, new, model_state_dict=given[0], optim_state_dict=given[1], options=BROADCAST)
            assert_state(get_model_state_dict(other, options=FULL), weights)
            assert_close(get_optimizer_state_dict(other, new, options=FULL), state)

        run_ranks(check, 3)

    def test_several_optimizers_and_parts(self) -> None:
        def check(rank: int) -> None:
            model = wrapped("FSDP2", net(1))
            parts = [model.inp, model.blocks, model.out]
            optimizers = [torch.optim.Adam(part.parameters(), lr=0.1 * (i + 1)) for i, part in enumerate(parts)]
            train(model, optimizers[0], 1)
            for param in model.parameters():
                param.grad = torch.ones_like(param) if param.requires_grad else None
            for optimizer in optimizers:
                optimizer.step()
            state = copy.deepcopy(get_optimizer_state_dict(model, optimizers, options=FULL))
            assert [group["lr"] for group in state["param_groups"]] == pytest.approx([0.1, 0.2, 0.3])
            new = torch.optim.Adam(model.out.parameters(), lr=9.0)
            set_optimizer_state_dict(model, new, {} if rank else state, options=BROADCAST)
            assert new.param_groups[0]["lr"] == pytest.approx(0.3)
            assert_close(
                get_optimizer_state_dict(model, new, options=FULL)["state"],
                {"out.weight": state["state"]["out.weight"]},
            )

        run_ranks(check, 2)
