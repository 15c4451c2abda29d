"""What was written and what is missing, against a set of bytes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fdsd.storage.ledger import Ledger

spans = st.tuples(st.integers(0, 12), st.integers(0, 12)).map(sorted)


@given(st.lists(spans, max_size=12), st.integers(0, 12))
def test_bytes_are_missing_until_all_were_written(written: list[list[int]], nbytes: int) -> None:
    ledger = Ledger()
    done: set[int] = set()
    for begin, end in written:
        ledger.add("a", begin, min(end, nbytes))
        done.update(range(begin, min(end, nbytes)))
        assert ledger.lacks("a", nbytes) == (done < set(range(nbytes)))
    assert ledger.lacks("b", nbytes) == (nbytes > 0)
    ledger.whole.add("b")
    assert not ledger.lacks("b", nbytes)
