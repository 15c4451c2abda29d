"""assert_golden: compare, show, regenerate."""

from __future__ import annotations

from pathlib import Path

import pytest

from fdsd.testing import assert_golden


@pytest.fixture(autouse=True)
def _no_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FDSD_UPDATE_GOLDEN", raising=False)


def test_the_same_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n", encoding="utf-8")
    assert_golden("one\ntwo", tmp_path / "a.txt")
    assert_golden("one\ntwo\n", str(tmp_path / "a.txt"))


@pytest.mark.parametrize("text", ["one\nthree", "one", "", "one\ntwo\n\n"])
def test_another_text_is_shown_as_a_diff(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n", encoding="utf-8")
    with pytest.raises(AssertionError) as caught:
        assert_golden(text, tmp_path / "a.txt")
    assert "FDSD_UPDATE_GOLDEN=1" in str(caught.value) and "a.txt" in str(caught.value)
    assert ("-two" in str(caught.value)) == ("two" not in text)


def test_no_file_yet(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"no golden file.*FDSD_UPDATE_GOLDEN=1"):
        assert_golden("x", tmp_path / "a.txt")
    assert not (tmp_path / "a.txt").exists()


def test_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / "a.txt"
    monkeypatch.setenv("FDSD_UPDATE_GOLDEN", "1")
    assert_golden("é\nx", path)
    assert path.read_bytes() == "é\nx\n".encode()
    monkeypatch.setenv("FDSD_UPDATE_GOLDEN", "0")
    assert_golden("é\nx", path)
    with pytest.raises(AssertionError):
        assert_golden("y", path)
