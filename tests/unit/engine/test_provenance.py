"""What files say of how they were made."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fdsd.engine.provenance import capped


@given(st.text(st.characters(exclude_categories=[]), max_size=60), st.integers(0, 80))
def test_texts_are_whole_or_begin_as_they_do(text: str, most: int) -> None:
    found = capped(text, most)
    size = len(text.encode("utf-8", "backslashreplace"))
    if size <= most:
        assert found == text
    else:
        kept, _, note = found.rpartition(" ... (the last ")
        assert len(kept.encode()) <= most and note.endswith(f"of {size} B are left out)")
        assert text.encode("utf-8", "backslashreplace").decode().startswith(kept)
