"""Remembering what was made: the least recently used goes, heavy things go, and threads may share it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from fdsd.engine.recent import CacheInfo, Recent


def test_the_least_recently_used_is_forgotten() -> None:
    recent = Recent[int, object](most=3)
    made = {key: recent.get(key, object) for key in (1, 2, 3)}
    assert recent.get(1, object) is made[1]
    recent.get(4, object)
    assert [recent.get(key, object) is made[key] for key in (1, 3)] == [True, True]
    assert recent.get(2, object) is not made[2]
    assert recent.info() == CacheInfo(hits=3, misses=5, size=3)


def test_all_together_weigh_no_more_than_the_heaviest() -> None:
    recent = Recent[str, str](most=100, weight=len, heaviest=6)
    recent.get("a", lambda: "xxx")
    recent.get("b", lambda: "yyy")
    recent.get("c", lambda: "z")
    assert recent.info().size == 2
    assert recent.get("b", lambda: "other") == "yyy"
    assert recent.get("d", lambda: "w" * 7) == "w" * 7  # too heavy to be remembered, and all others go for it
    assert recent.info().size == 0
    assert recent.get("e", lambda: "v" * 6) == "v" * 6
    assert recent.info().size == 1


def test_what_cannot_be_made_is_not_remembered() -> None:
    recent = Recent[str, int](most=2)
    for _ in range(2):
        try:
            recent.get("a", lambda: 1 // 0)
        except ZeroDivisionError:
            continue
        raise AssertionError
    assert recent.info() == CacheInfo(hits=0, misses=2, size=0)


def test_one_may_be_made_of_others() -> None:
    recent = Recent[int, int](most=8)

    def fibonacci(n: int) -> int:
        return n if n < 2 else recent.get(n, lambda: fibonacci(n - 1) + fibonacci(n - 2))

    assert fibonacci(30) == 832040


def test_threads_share_it() -> None:
    recent = Recent[int, int](most=5, weight=lambda value: value % 3, heaviest=4)

    def work(seed: int) -> bool:
        keys = [(seed * 7 + i * 13) % 11 for i in range(3000)]
        return all(recent.get(key, lambda key=key: key * 2) == key * 2 for key in keys)  # type: ignore[misc]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))
    assert recent.info().size <= 5
    recent.clear()
    assert recent.info().size == 0
    recent.get(1, lambda: 3)
    assert recent.info().size == 1
