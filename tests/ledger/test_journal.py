"""The journal's files: segments, the lock, names, and disks that say no."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from trio_gateway.ledger._journal import Journal
from trio_gateway.ledger._lines import scan
from trio_gateway.units import KiB, MiB

LINE = b'{"n":"' + b"x" * 200 + b'"}'


@contextmanager
def opened(folder: Path, limit: int = MiB, gateway_id: str | None = None) -> Iterator[Journal]:
    journal = Journal(folder, limit, gateway_id)
    journal.open()
    try:
        yield journal
    finally:
        journal.close()


def lines_in(folder: Path) -> list[bytes]:
    files = sorted(folder.glob("*.journal"))
    return [payload for file in files for payload in scan(file.read_bytes(), final=True).payloads]


def test_a_line_is_in_the_file_as_soon_as_it_is_written(tmp_path: Path) -> None:
    with opened(tmp_path / "new" / "journal") as journal:
        assert journal.append(b'"a"')
        assert lines_in(tmp_path / "new" / "journal") == [b'"a"']
        assert journal.size == os.path.getsize(journal.segments[0].path)
    assert (tmp_path / "new" / "journal").stat().st_mode & 0o077 == 0


def test_each_process_begins_a_segment_of_its_own_and_finds_the_older_ones(tmp_path: Path) -> None:
    for number in range(3):
        with opened(tmp_path) as journal:
            assert [segment.whole for segment in journal.segments] == [True] * number + [False]
            assert journal.append(str(number).encode())
    assert lines_in(tmp_path) == [b"0", b"1", b"2"]


def test_a_folder_belongs_to_one_process_at_a_time(tmp_path: Path) -> None:
    with opened(tmp_path), pytest.raises(OSError, match="in use by another process"), opened(tmp_path):
        pass
    with opened(tmp_path):
        pass


def test_a_journal_that_can_not_be_opened_holds_nothing(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    (tmp_path / "gateway_id").mkdir()
    with pytest.raises(OSError, match="directory"):
        Journal(tmp_path, MiB).open()
    assert len(os.listdir("/proc/self/fd")) == before


def test_segments_are_rotated_and_dropped_from_the_oldest_on(tmp_path: Path) -> None:
    with opened(tmp_path, 32 * KiB) as journal:
        while len(journal.segments) < 4:
            assert journal.append(LINE)
        oldest = journal.segments[0]
        assert oldest.whole
        assert oldest.size >= 4 * KiB
        size = journal.size
        journal.sync()
        journal.drop_first()
        assert journal.size == size - oldest.size
        assert not oldest.path.exists()
        assert len(list(tmp_path.glob("*.journal"))) == 3
        journal.sync()


def test_there_is_room_until_the_bound_and_again_when_segments_are_dropped(tmp_path: Path) -> None:
    with opened(tmp_path, 16 * KiB) as journal:
        while journal.has_room:
            assert journal.append(LINE)
        assert 16 * KiB <= journal.size < 16 * KiB + 2 * len(LINE)
        assert journal.append(LINE)  # what must be written is written
        journal.drop_first()
        assert journal.has_room
    with opened(tmp_path, 8 * KiB) as journal:
        assert not journal.has_room  # what an earlier process left counts


def test_a_gateway_keeps_the_name_that_was_drawn_or_given(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        drawn = journal.gateway_id
    with opened(tmp_path) as journal:
        assert journal.ids == [drawn]
    with opened(tmp_path, gateway_id="gw-1") as journal:
        assert journal.ids == [drawn, "gw-1"]
    with opened(tmp_path) as journal:
        assert journal.gateway_id == "gw-1"
    with opened(tmp_path, gateway_id=drawn) as journal:
        assert journal.ids == ["gw-1", drawn]


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Have the kernel cut writes, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_write_that_fails_half_way_costs_no_other_line(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        assert journal.append(LINE)
        with files_of_at_most(journal.size + 50):
            assert not journal.append(LINE)
            assert journal.failure is not None
            assert not journal.append(LINE)
        assert journal.append(b'"after"')
        assert journal.failure is None
        assert journal.size == os.path.getsize(journal.segments[0].path)
    assert lines_in(tmp_path) == [LINE, b'"after"']


def test_a_line_that_lacks_only_its_end_is_written(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        assert journal.append(LINE)
        with files_of_at_most(2 * journal.size - 1):
            assert journal.append(LINE)
        assert journal.append(b'"after"')
    assert lines_in(tmp_path) == [LINE, LINE, b'"after"']


def test_a_segment_that_can_not_be_begun_is_tried_again(tmp_path: Path) -> None:
    with opened(tmp_path, 32 * KiB) as journal:
        while journal.size < 4 * KiB:
            assert journal.append(LINE)
        following = tmp_path / "0000000002.journal"
        following.mkdir()
        assert not journal.append(b'"lost"')
        following.rmdir()
        assert journal.append(b'"kept"')
        assert len(journal.segments) == 2
        assert journal.segments[0].whole
    assert lines_in(tmp_path)[-1] == b'"kept"'


def test_what_the_database_refuses_is_kept_aside(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        journal.keep_aside(b'"a"')
        journal.keep_aside(b'"b"')
    assert (tmp_path / "rejected.jsonl").read_bytes() == b'"a"\n"b"\n'
