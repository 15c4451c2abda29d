"""The helper that runs ranks: results and failures come back, nothing hangs, nothing stays behind."""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fdsd.data.errors import RankDisagreement
from tests.helpers.ranks import RankDied, RankError, RankFailure, RankHung, run_ranks, store_of_rank


def summed(rank: int, factor: int) -> tuple[torch.Tensor, int, int]:
    value = torch.full((2,), (rank + 1) * factor)
    dist.all_reduce(value)
    return value, torch.get_num_threads(), os.getpid()


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize("store", ["tcp", "file"])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_results_in_the_order_of_ranks(n: int, store: str) -> None:
    results = run_ranks(summed, n, 10, store=store)
    for value, threads, _ in results:
        assert value.tolist() == [10 * n * (n + 1) // 2] * 2
        assert threads == 1
    assert len({pid for _, _, pid in results}) == n
    assert all(is_gone(pid) for _, _, pid in results)
    assert not dist.is_initialized()


def test_local_functions_see_what_the_test_sees() -> None:
    kept = torch.arange(5)

    def local(rank: int) -> tuple[int, str, str]:
        return int(kept[rank + 1]), os.environ["RANK"], os.environ["WORLD_SIZE"]

    assert run_ranks(local, 2) == [(1, "0", "2"), (2, "1", "2")]


def test_ranks_start_fast() -> None:
    """Nothing is imported again; a start costs a tenth of a second, and an import of torch alone two."""
    run_ranks(summed, 2, 1)
    times: list[float] = []
    for _ in range(3):
        start = time.perf_counter()
        run_ranks(summed, 2, 1)
        times.append(time.perf_counter() - start)
    assert min(times) < 2, times


def test_after_threads_and_gradients_here() -> None:
    """A test process that has used every thread of torch, and a thread of its own that waits for ever."""
    threads = torch.get_num_threads()
    done = threading.Event()
    waiter = threading.Thread(target=done.wait)
    waiter.start()
    try:
        torch.set_num_threads(2)
        big = torch.randn(600, 600, requires_grad=True)
        (big @ big).exp().sum().backward()

        def trained(rank: int) -> float:
            model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
            model(torch.randn(512, 64)).sum().backward()
            grad = model[0].weight.grad
            assert grad is not None
            dist.all_reduce(grad)
            return float(grad.sum())

        first, second = run_ranks(trained, 2, timeout=30)
    finally:
        torch.set_num_threads(threads)
        done.set()
        waiter.join()
    assert first == second


def test_a_group_of_its_own() -> None:
    def alone(rank: int) -> list[int]:
        assert not dist.is_initialized()
        dist.init_process_group("gloo", store=store_of_rank(), rank=1 - rank, world_size=2)
        found = [None, None]
        dist.all_gather_object(found, rank)
        return found  # type: ignore[return-value]

    assert run_ranks(alone, 2, init=False) == [[1, 0], [1, 0]]


def test_warnings_are_errors_in_ranks_too() -> None:
    def careless(rank: int) -> None:
        warnings.warn("hear me", UserWarning, stacklevel=1)

    with pytest.raises(RankFailure, match="UserWarning: hear me"):
        run_ranks(careless, 1)


def test_garbage_that_torch_warns_of_is_no_error() -> None:
    """Seen of FSDP1 on torch 2.9: any function of torch raises, for models that are long gone."""

    class Owner:
        own: Any
        tensor: Any

    def collect(rank: int) -> int:
        gc.disable()
        for _ in range(3):
            owner, kept = Owner(), torch.nn.Parameter(torch.zeros(4))
            view: Any = kept.view(2, 2)  # which owns its base
            owner.own, owner.tensor = owner, kept
            kept.view_of_mine = view  # type: ignore[attr-defined]
        del owner, kept, view
        values = torch.zeros(64, 1)
        gc.set_threshold(1, 1, 1)
        gc.enable()
        return len(values.unbind())  # C++ from the start: the objects that it makes start the collector inside it

    assert run_ranks(collect, 1) == [64]


def test_a_failure_tells_each_rank_and_the_first_cause_first() -> None:
    def fails(rank: int) -> None:
        if rank == 1:
            raise RankDisagreement("rank 1 has another opinion")
        dist.barrier()

    start = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        run_ranks(fails, 3)
    assert time.monotonic() - start < 10
    text = str(caught.value)
    assert text.startswith("3 of 3 ranks failed.\n\nrank 1: Traceback")
    assert "RankDisagreement: rank 1 has another opinion" in text
    assert "in fails" in text
    assert "rank 0: Traceback" in text and "rank 2: Traceback" in text


def test_assertions_of_ranks_explain_themselves() -> None:
    def wrong(rank: int) -> None:
        assert [rank, 17] == [rank, 18]

    with pytest.raises(RankFailure, match="At index 1 diff: 17 != 18"):
        run_ranks(wrong, 1)


def test_hanging_ranks_are_killed_and_show_their_stacks(tmp_path: Path) -> None:
    def hangs(rank: int) -> None:
        (tmp_path / str(rank)).write_text(str(os.getpid()))
        if rank == 1:
            waits_for_ever()
        dist.barrier()

    def waits_for_ever() -> None:
        time.sleep(1000)

    start = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        run_ranks(hangs, 2, timeout=2)
    assert 2 <= time.monotonic() - start < 10
    text = str(caught.value)
    assert "rank 1 hung and was killed after 2 s" in text
    assert re.search(r"line \d+ in waits_for_ever\n", text)
    assert re.search(r"line \d+ in barrier\n", text)
    assert all(is_gone(int((tmp_path / str(rank)).read_text())) for rank in (0, 1))


def test_ranks_that_hang_after_a_failure_are_not_waited_for_long() -> None:
    def fails(rank: int) -> None:
        dist.barrier()  # a rank that is still joining would see the store of rank 0 go
        if rank == 0:
            raise ValueError("alone")
        time.sleep(1000)

    start = time.monotonic()
    with pytest.raises(RankFailure, match=r"(?s)rank 0: .*ValueError: alone.*rank 1 hung and was killed 5\.0 s after"):
        run_ranks(fails, 2, timeout=100)
    assert time.monotonic() - start < 20


def test_each_rank_has_its_result_or_its_error() -> None:
    def mixed(rank: int) -> int:
        if rank == 1:
            raise RankDisagreement("no")
        if rank == 2:
            os._exit(7)
        if rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 4:
            time.sleep(1000)
        return rank

    fine, refused, ended, killed, hung = run_ranks(mixed, 5, expect_errors=True, timeout=3)
    assert fine == 0
    assert type(refused) is RankDisagreement and str(refused) == "no"
    assert type(ended) is RankDied and ended.code == 7
    assert type(killed) is RankDied and killed.code == -signal.SIGKILL
    assert type(hung) is RankHung and "in mixed" in str(hung)


def test_a_rank_that_ends_is_a_failure() -> None:
    with pytest.raises(RankFailure, match="rank 0: ended with exit code 7 and without a result"):
        run_ranks(lambda rank: os._exit(7), 1)


def test_ranks_that_are_done_stay_until_all_are() -> None:
    """Rank 0 is the server of the store: while others are busy, it is there."""

    def slow(rank: int) -> bytes | None:
        if rank == 0:
            raise ValueError("done")
        time.sleep(0.5)
        store = store_of_rank()
        store.set("key", b"value")
        return store.get("key")

    failed, value = run_ranks(slow, 2, expect_errors=True)
    assert type(failed) is ValueError
    assert value == b"value"


def test_errors_that_cannot_be_pickled() -> None:
    class Local(Exception):
        pass

    def fails(rank: int) -> None:
        raise Local("odd")

    (error,) = run_ranks(fails, 1, expect_errors=True)
    assert type(error) is RankError and str(error) == "Local: odd"


def test_results_that_cannot_be_pickled_are_a_failure() -> None:
    with pytest.raises(RankFailure, match=r"[Pp]ickle"):
        run_ranks(lambda rank: lambda: None, 1)


def test_big_results() -> None:
    (result,) = run_ranks(lambda rank: torch.arange(3_000_000), 1)
    assert torch.equal(result, torch.arange(3_000_000))
