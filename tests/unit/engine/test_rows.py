"""Parts that are moved byte for byte, and parts that are not: results, what autograd knows, and what is named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fdsd.algebra.apply import apply, defer_leaf
from fdsd.algebra.lazy import Lazy
from fdsd.algebra.ops import Concat, Permute
from fdsd.data.errors import SpecMismatch
from fdsd.data.spec import TensorSpec
from fdsd.engine import memory, messages
from fdsd.engine.delivery import plan_delivery
from fdsd.engine.failures import RankFailed
from fdsd.engine.request import Request
from fdsd.engine.rounds import rounds_of
from fdsd.engine.rows import Rows
from fdsd.engine.views import Views
from fdsd.layout import Layout, Mesh, Replicate, Shard
from fdsd.layout.expression import Expression
from fdsd.layout.structure import LIMITS
from fdsd.layout.wants import wants_of
from fdsd.layout.wiring import Wiring, plan_wiring
from tests.helpers.placed import shard
from tests.helpers.tensors import same_bytes
from tests.helpers.worlds import MemoryWorld, run_world

RANKS = 2
WHOLE = torch.arange(24.0).reshape(4, 6)
ZERO = Layout(Mesh({"rank": 1}, [0]), [Replicate()])


def cut(dim: int) -> Layout:
    return Layout(Mesh({"dp": RANKS}), [Shard(dim)])


def wiring_of(target: Layout, dtype: torch.dtype = torch.float32) -> Wiring:
    spec = TensorSpec((4, 6), torch.float32)
    wants = wants_of(spec.shape, dtype, [(target, tuple(range(RANKS)))])
    return plan_wiring(Expression.of(spec), [ZERO.holders(spec.shape)], wants)


def rows_on(rank: int, wiring: Wiring) -> Rows:
    return rounds_of(rank, [wiring], [0, 0], None, LIMITS).rows([Views(wiring, rank, [ZERO])] * 2)


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all that is moved byte for byte."""
    sizes: list[int] = []

    def counting(where: object) -> Callable[..., None]:
        move = messages.move_rows

        def move_rows(outs: object, sources: object, nbytes: list[int]) -> None:
            sizes.extend(nbytes)
            move(outs, sources, nbytes)  # type: ignore[arg-type]

        return move_rows

    for module in (memory, messages):
        monkeypatch.setattr(module, "move_rows", counting(module))
    return sizes


# -- which parts lie in rows -----------------------------------------------------------------------------------------


def test_rows_of_whole_lines() -> None:
    """Rank 0 holds both tensors: it sends the last two lines of each, and keeps the first two."""
    rows = rows_on(0, wiring_of(cut(0)))
    assert rows.items(0, 2) == ([0, 1], [48, 48], [48, 48])
    assert rows.keeps == ([0, 1], [0, 1], [0, 0], [0, 0], [48, 48])
    assert rows.busy == []
    assert rows.kept(1, 2).tensors == [1]


def test_rows_that_arrive() -> None:
    rows = rows_on(1, wiring_of(cut(0)))
    assert rows.items(0, 2) == ([0, 1], [0, 0], [48, 48])
    assert rows.keeps.tensors == [] and rows.busy == []


def test_columns_are_rows_where_they_arrive_and_not_where_they_are_held() -> None:
    """Columns of a matrix are spread over it; on the rank that gets them they are its whole local tensor."""
    sent, received = rows_on(0, wiring_of(cut(1))), rows_on(1, wiring_of(cut(1)))
    assert sent.items(0, 2).firsts == [-1, -1]
    assert sent.keeps.tensors == [] and sent.to_finish(0, 2) == [0, 1] and sent.to_finish(1, 2) == [1]
    assert received.items(0, 2).firsts == [0, 0]


def test_a_cast_is_no_row_on_the_side_where_it_is_made() -> None:
    """The narrower dtype travels: a float64 result is cast where it arrives, a bfloat16 one where it is sent."""
    wide, narrow = wiring_of(cut(0), torch.float64), wiring_of(cut(0), torch.bfloat16)
    assert [rows_on(rank, wide).items(0, 2).firsts[0] for rank in (0, 1)] == [48, -1]
    assert [rows_on(rank, narrow).items(0, 2).firsts[0] for rank in (0, 1)] == [-1, 0]


# -- what comes of it ------------------------------------------------------------------------------------------------


Outs = Callable[[int], torch.Tensor | None]


def delivered(
    out: Outs, target: Layout | None, node: Callable[[Lazy], Lazy] = lambda lazy: lazy
) -> list[tuple[torch.Tensor | None, torch.Tensor]]:
    """Bring two tensors of rank 0, through an expression, to ranks; give the memory and the result of the first.

    What travels alone travels straight, with no buffer.
    """

    def rank_of(world: MemoryWorld) -> tuple[torch.Tensor | None, torch.Tensor]:
        held = shard({"v": WHOLE, "w": WHOLE}, {"v": ZERO, "w": ZERO}, world.rank)
        outs = {name: out(world.rank) for name in ("v", "w")}
        requests = {name: Request(node(held.lazy(name)), target, out=outs[name]) for name in ("v", "w")}
        found = dict(plan_delivery(requests, world).run())
        assert torch.equal(found["v"], found["w"])
        return outs["v"], found["v"]

    return run_world(rank_of, RANKS)


OUTS: dict[str, Outs] = {
    "fresh": lambda rank: None,
    "plain": lambda rank: torch.zeros(2, 6),
    "parameter": lambda rank: torch.nn.Parameter(torch.zeros(2, 6)),
    "offset": lambda rank: torch.zeros(5, 6)[2:4],
    "transposed": lambda rank: torch.zeros(6, 2).t(),
    "strided": lambda rank: torch.zeros(2, 12)[:, ::2],
    "conjugate": lambda rank: torch.zeros(2, 6, dtype=torch.complex64).conj().imag,
    "wider": lambda rank: torch.zeros(2, 6, dtype=torch.float64),
    "narrower": lambda rank: torch.zeros(2, 6, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("kind", OUTS)
def test_every_kind_of_memory_gets_the_same(kind: str, moved: list[int]) -> None:
    for rank, (out, got) in enumerate(delivered(OUTS[kind], cut(0))):
        assert torch.equal(got.double(), WHOLE[2 * rank : 2 * rank + 2].double())
        assert out is None or out is got
    assert len(moved) == {"fresh": 6, "plain": 6, "parameter": 6, "offset": 6}.get(kind, 2)  # sent, received, kept


def test_autograd_knows_what_was_written(moved: list[int]) -> None:
    """As of a copy by torch: what was saved for backward and is written then is an error, not a wrong gradient."""
    outs = [torch.nn.Parameter(torch.ones(2, 6)) for _ in range(RANKS)]
    losses = [(out * out).sum() for out in outs]
    given = [iter((out, torch.zeros(2, 6))) for out in outs]
    delivered(lambda rank: next(given[rank]), cut(0))
    assert moved and all(out._version == 1 for out in outs)
    for loss in losses:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()  # type: ignore[no-untyped-call]


def test_inference_tensors_are_written_by_torch_alone() -> None:
    """It refuses outside of inference mode, and so do we."""
    with torch.inference_mode():
        outs = [torch.zeros(2, 6) for _ in range(RANKS)]

    def rank_of(world: MemoryWorld) -> None:
        held = shard({"v": WHOLE, "w": WHOLE}, {"v": ZERO, "w": ZERO}, world.rank)
        requests = {"v": Request(held.lazy("v"), cut(0)), "w": Request(held.lazy("w"), cut(0), out=outs[world.rank])}
        list(plan_delivery(requests, world).run())

    assert all("inference" in str(error) for error in run_world(rank_of, RANKS, expect_errors=True))


def test_several_sources_of_one_tensor(moved: list[int]) -> None:
    """Each source has its own memory: lines of both, in turn."""

    def rank_of(world: MemoryWorld) -> torch.Tensor:
        held = shard({"a": WHOLE, "b": -WHOLE}, {"a": ZERO, "b": ZERO}, world.rank)
        node = apply(Concat(0), held.lazy("a"), held.lazy("b"))
        return dict(plan_delivery({"w": Request(node, None), "a": Request(held.lazy("a"), None)}, world).run())["w"]

    for found in run_world(rank_of, RANKS):
        assert same_bytes(found, torch.cat([WHOLE, -WHOLE]))
    assert sorted(moved) == [96] * 9  # three are kept, sent and received each


def test_transposed_on_the_way(moved: list[int]) -> None:
    found = delivered(lambda rank: None, None, lambda lazy: apply(Permute((1, 0)), lazy))
    assert all(same_bytes(got, WHOLE.t().contiguous()) for _, got in found)
    assert len(moved) == 2  # each is a row where it is sent, and nowhere else


def test_tensors_that_are_not_what_they_are_said_to_be_are_named() -> None:
    """A local tensor of another shape: the same error on all ranks, with the name of the tensor."""

    def rank_of(world: MemoryWorld) -> None:
        held = shard({"v": WHOLE, "w": WHOLE}, {"v": ZERO, "w": ZERO}, world.rank)
        requests = {name: Request(held.lazy(name), cut(0)) for name in ("v", "w")}
        delivery = plan_delivery(requests, world)
        if world.rank == 0:
            held._locals["w"] = torch.zeros(3)
        list(delivery.run())

    for error in run_world(rank_of, RANKS, expect_errors=True):
        assert isinstance(error, SpecMismatch) and "'w'" in str(error) and "(3,)" in str(error)


def test_a_deferred_tensor_is_kept_by_torch_where_it_is_transposed() -> None:
    x = torch.arange(6.0).reshape(2, 3).t()

    def rank_of(world: MemoryWorld) -> torch.Tensor:
        return dict(plan_delivery({"x": Request(defer_leaf(x))}, world).run())["x"]

    assert all(same_bytes(found, x.contiguous()) for found in run_world(rank_of, RANKS))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_memory_whose_dtype_was_changed_since_is_written_by_torch(dtype: torch.dtype) -> None:
    """As of ``model.half()`` between two rounds: values are cast, and nothing beside the tensor is written."""

    def rank_of(world: MemoryWorld) -> torch.Tensor:
        held = shard({"v": WHOLE, "w": WHOLE}, {"v": ZERO, "w": ZERO}, world.rank)
        outs = {name: torch.nn.Parameter(torch.zeros(2, 6)) for name in ("v", "w")}
        delivery = plan_delivery({name: Request(held.lazy(name), cut(0), out=outs[name]) for name in outs}, world)
        memory = torch.full((2, 4, 6), -7.0, dtype=dtype)
        for i, out in enumerate(outs.values()):
            out.data = memory[i, :2]
        list(delivery.run())
        return memory

    for rank, found in enumerate(run_world(rank_of, RANKS)):
        want = torch.full((2, 4, 6), -7.0, dtype=dtype)
        want[:, :2] = WHOLE[2 * rank : 2 * rank + 2]
        assert same_bytes(found, want)


def test_a_source_that_is_interrupted_is_told_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no ``Exception`` too: the others must not wait for a message that never comes."""

    def rank_of(world: MemoryWorld) -> None:
        held = shard({"v": WHOLE, "w": WHOLE}, {"v": ZERO, "w": ZERO}, world.rank)
        delivery = plan_delivery({name: Request(held.lazy(name), cut(0)) for name in ("v", "w")}, world)
        if world.rank == 0:

            def local(fqn: str) -> torch.Tensor | None:
                raise KeyboardInterrupt(fqn)

            monkeypatch.setattr(held, "local", local)
        list(delivery.run())

    first, second = run_world(rank_of, RANKS, expect_errors=True)
    assert isinstance(first, KeyboardInterrupt)
    assert isinstance(second, RankFailed) and "rank 0" in str(second) and "KeyboardInterrupt" in str(second)


@pytest.mark.parametrize("left", [0, 48])
def test_a_source_whose_storage_was_freed_is_not_read(left: int) -> None:
    """Even if a part of it is left: the second half, which travels, lies behind its end."""

    def rank_of(world: MemoryWorld) -> None:
        held = shard({"v": WHOLE, "w": WHOLE}, {"v": ZERO, "w": ZERO}, world.rank)
        delivery = plan_delivery({name: Request(held.lazy(name), cut(0)) for name in ("v", "w")}, world)
        if world.rank == 0:
            held._locals["w"] = freed = WHOLE.clone()
            freed.untyped_storage().resize_(left)
        list(delivery.run())

    for error in run_world(rank_of, RANKS, expect_errors=True):
        assert "'w'" in str(error) and "out of bounds" in str(error)


def test_memory_whose_shape_was_changed_since_is_refused() -> None:
    """As many elements, in another shape: the same bytes would be other values."""

    def rank_of(world: MemoryWorld) -> None:
        held = shard({"v": WHOLE, "w": WHOLE}, {"v": ZERO, "w": ZERO}, world.rank)
        outs = {name: torch.nn.Parameter(torch.zeros(2, 6)) for name in ("v", "w")}
        delivery = plan_delivery({name: Request(held.lazy(name), cut(0), out=outs[name]) for name in outs}, world)
        if world.rank == 1:
            outs["w"].data = torch.zeros(6, 2)
        list(delivery.run())

    for error in run_world(rank_of, RANKS, expect_errors=True):
        assert isinstance(error, SpecMismatch) and "'w'" in str(error) and "(6, 2)" in str(error)
