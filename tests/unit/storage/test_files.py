"""Files by position: stamps, descriptors, exact reads, kernel copies and what stands in for them."""

from __future__ import annotations

import errno
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest

from fdsd.data.errors import BadFile, DiskError, FdsdError, MissingFile, SpecMismatch, Unsupported
from fdsd.storage import files
from fdsd.storage.files import (
    Extent,
    FileStamp,
    OpenFiles,
    copy_exactly,
    local_path,
    read_exactly,
)
from tests.helpers.descriptors import descriptors_below


@pytest.fixture
def numbers(tmp_path: Path) -> Path:
    path = tmp_path / "numbers"
    path.write_bytes(bytes(range(200)))
    return path


def test_a_stamp_tells_a_changed_file(numbers: Path) -> None:
    stamp = FileStamp.of(numbers)
    stamp.check(numbers)
    os.utime(numbers, ns=(1, 1))
    with pytest.raises(BadFile, match="was changed after it was opened"):
        stamp.check(numbers)


def test_a_stamp_follows_links(numbers: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(numbers)
    assert FileStamp.of(link) == FileStamp.of(numbers)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["folder", "pipe"])
def test_only_regular_files_have_a_stamp(tmp_path: Path, make: Any) -> None:
    make(tmp_path / "odd")
    with pytest.raises(BadFile, match="no regular file"):
        FileStamp.of(tmp_path / "odd")


def test_a_missing_file_is_a_file_not_found_error(tmp_path: Path) -> None:
    with pytest.raises(MissingFile, match="gone") as caught:
        FileStamp.of(tmp_path / "gone")
    assert isinstance(caught.value, FdsdError) and isinstance(caught.value, FileNotFoundError)
    assert caught.value.errno == errno.ENOENT


def test_a_zero_byte_in_a_path_is_no_path() -> None:
    with pytest.raises(BadFile, match="is no path"):
        local_path("a\0b")


def test_few_descriptors_stay_open(tmp_path: Path) -> None:
    for i in range(40):
        (tmp_path / str(i)).write_bytes(bytes([i]))
    before = descriptors_below(tmp_path)
    pool = OpenFiles(4)
    for i in [*range(40), *range(40)]:
        path = str(tmp_path / str(i))
        with pool.borrow(path, FileStamp.of(path)) as fd:
            assert os.pread(fd, 1, 0) == bytes([i])
        assert descriptors_below(tmp_path) <= before + 4
    pool.close()
    assert descriptors_below(tmp_path) == before


def test_descriptors_close_with_the_pool(numbers: Path) -> None:
    before = descriptors_below(numbers.parent)
    pool = OpenFiles()
    with pool.borrow(str(numbers)):
        pass
    assert descriptors_below(numbers.parent) == before + 1
    del pool
    assert descriptors_below(numbers.parent) == before


def test_a_borrowed_descriptor_outlives_the_limit_and_a_replacement(numbers: Path, tmp_path: Path) -> None:
    pool = OpenFiles(0)
    path = str(numbers)
    before = descriptors_below(tmp_path)
    with pool.borrow(path, FileStamp.of(path)) as first:
        (tmp_path / "new").write_bytes(b"new bytes")
        os.replace(tmp_path / "new", path)
        with pool.borrow(path, FileStamp.of(path)) as second:
            assert os.pread(first, 3, 0) == bytes([0, 1, 2])
            assert os.pread(second, 3, 0) == b"new"
        assert os.pread(first, 3, 0) == bytes([0, 1, 2])
    assert descriptors_below(tmp_path) == before


def test_a_pool_pickles_without_its_descriptors(numbers: Path) -> None:
    pool = OpenFiles(3)
    with pool.borrow(str(numbers)):
        other = pickle.loads(pickle.dumps(pool))
    with other.borrow(str(numbers)) as fd:
        assert os.pread(fd, 1, 7) == bytes([7])


def test_threads_share_a_pool(tmp_path: Path) -> None:
    for i in range(8):
        (tmp_path / str(i)).write_bytes(bytes([i]) * 100)
    stamps = {str(tmp_path / str(i)): FileStamp.of(tmp_path / str(i)) for i in range(8)}
    pool = OpenFiles(2)
    faults: list[Any] = []

    def work(seed: int) -> None:
        try:
            for k in range(300):
                i = (k * 7 + seed) % 8
                path = str(tmp_path / str(i))
                with pool.borrow(path, stamps[path]) as fd:
                    if os.pread(fd, 100, 0) != bytes([i]) * 100:
                        faults.append((seed, k))
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []


def test_a_file_that_cannot_be_opened_is_a_disk_error(numbers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    stamp = FileStamp.of(numbers)
    monkeypatch.setattr(os, "open", refuse)
    with (
        pytest.raises(DiskError, match="numbers: it could not be opened: Permission denied") as caught,
        OpenFiles().borrow(str(numbers), stamp),
    ):
        pass
    assert caught.value.errno == errno.EACCES


def test_a_read_beyond_the_end_says_where_it_ends(numbers: Path) -> None:
    with (
        OpenFiles().borrow(str(numbers)) as fd,
        pytest.raises(BadFile, match="bytes 190 to 210 were asked, and it ends at 200"),
    ):
        read_exactly(fd, memoryview(bytearray(20)), 190, str(numbers))


def test_an_extent_gives_its_parts_and_no_more() -> None:
    extent = Extent("x", 10, 8, FileStamp(18, 0, 0, 0))
    assert extent.part(2, 8) == Extent("x", 12, 6, extent.stamp)
    with pytest.raises(SpecMismatch, match="bytes 2 to 9"):
        extent.part(2, 9)


def copied(source: Path, target: Path, begin: int, at: int, length: int) -> bytes:
    fd, out = os.open(source, os.O_RDONLY), os.open(target, os.O_RDWR | os.O_CREAT)
    try:
        copy_exactly(fd, begin, out, at, length, paths=(str(source), str(target)))
    finally:
        os.close(fd)
        os.close(out)
    return target.read_bytes()


@pytest.mark.parametrize("step", [1, 7, 1 << 20])
@pytest.mark.parametrize("at", [2, 3])
def test_a_copy_takes_as_many_calls_as_it_needs(
    numbers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, at: int
) -> None:
    monkeypatch.setattr(files, "_STEP", step)
    monkeypatch.setattr(files, "_BUFFER", step)
    assert copied(numbers, tmp_path / "out", 3, at, 150) == bytes(at) + bytes(range(3, 153))


@pytest.mark.parametrize(
    "code", [errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM], ids=errno.errorcode.get
)
@pytest.mark.parametrize("good", [0, 2])
def test_where_the_kernel_cannot_copy_bytes_are_read_and_written(
    numbers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, good: int
) -> None:
    calls: list[int] = []
    kernel = os.copy_file_range

    def copy(source: int, target: int, count: int, begin: int, at: int) -> int:
        calls.append(count)
        if len(calls) > good:
            raise OSError(code, os.strerror(code))
        return kernel(source, target, min(count, 10), begin, at)

    monkeypatch.setattr(os, "copy_file_range", copy)
    monkeypatch.setattr(files, "_BUFFER", 32)
    assert copied(numbers, tmp_path / "out", 3, 3, 150) == bytes(3) + bytes(range(3, 153))
    assert len(calls) == good + 1


def test_a_system_without_kernel_copies(numbers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "copy_file_range")
    assert copied(numbers, tmp_path / "out", 3, 3, 150) == bytes(3) + bytes(range(3, 153))


@pytest.mark.parametrize("at", [0, 150])
def test_a_copy_beyond_the_end_of_its_source_is_an_error(numbers: Path, tmp_path: Path, at: int) -> None:
    with pytest.raises(BadFile, match="numbers is truncated"):
        copied(numbers, tmp_path / "out", 150, at, 51)


def test_other_errors_of_a_kernel_copy_are_raised(
    numbers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copy(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "copy_file_range", copy)
    with pytest.raises(DiskError, match="Input/output error"):
        copied(numbers, tmp_path / "out", 0, 0, 10)


def test_bytes_that_move_within_their_page_are_not_left_to_the_kernel(
    numbers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "copy_file_range", None)  # a call would fail
    assert copied(numbers, tmp_path / "out", 3, 4, 150) == bytes(4) + bytes(range(3, 153))


def test_short_writes_are_continued(numbers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, memory, at: write(fd, memory[:3], at))
    out = os.open(tmp_path / "out", os.O_RDWR | os.O_CREAT)
    files.write_exactly(out, memoryview(bytes(range(10))), 0, "out")
    os.close(out)
    assert (tmp_path / "out").read_bytes() == bytes(range(10))


@pytest.mark.parametrize("path", [None, 3, b"x", 1.5, ["x"]])
def test_what_is_no_path_is_refused(path: Any) -> None:
    with pytest.raises(Unsupported, match=rf"A path is text or a pathlib\.Path, not {type(path).__name__}"):
        local_path(path)
