"""The ledger with its threads: what goes wrong with disk or database is told once, and loses nothing."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.ledger.databases import rows_at
from tests.ledger.making import make_record, make_request
from trio_gateway.errors import Refused
from trio_gateway.ledger import Ledger, LedgerSettings
from trio_gateway.ledger._ledger import MOST_CUT
from trio_gateway.units import KiB

LIMIT = 20.0  # seconds


class Told:
    """A log that keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def write(self, level: str, event: str, **fields: Any) -> None:
        self.events.append(event)


@contextmanager
def running(folder: Path, limit: int = 64 * KiB, where: str = "") -> Iterator[tuple[Ledger, Told]]:
    url = f"sqlite:///{folder / where / 'records.db'}"
    told = Told()
    ledger = Ledger(LedgerSettings(url, folder / "journal", limit, 0.05, 0, None), "b1", told)
    ledger.open()
    try:
        yield ledger, told
    finally:
        ledger.close()
        ledger.close()


def eventually(holds: Callable[[], object]) -> None:
    limit = time.monotonic() + LIMIT
    while not holds():
        assert time.monotonic() < limit, holds
        time.sleep(0.01)  # for a thread, which no event tells of


def use(ledger: Ledger, exchange_id: str) -> None:
    ledger.accept(make_request(exchange_id=exchange_id), 1000.0)
    ledger.settle(dataclasses.replace(make_record(exchange_id=exchange_id), attempts=1))


def test_a_journal_that_grows_and_is_full_raises_an_alarm_each(tmp_path: Path) -> None:
    with running(tmp_path, where="later") as (ledger, told):
        eventually(lambda: told.events == ["database_away"])
        number = 0
        while ledger.statistics()["journal_bytes"] < 33 * KiB:
            use(ledger, f"x{number}")
            number += 1
        eventually(lambda: "journal_growing" in told.events)
        while ledger.statistics()["journal_bytes"] < 64 * KiB:
            use(ledger, f"x{number}")
            number += 1
        with pytest.raises(Refused) as refused:
            use(ledger, "refused")
        assert refused.value.problem.code == "records_unavailable"
        assert 5.0 <= (refused.value.problem.retry_after or 0) <= 7.5
        eventually(lambda: "journal_full" in told.events)
        (tmp_path / "later").mkdir()
        eventually(lambda: ledger.statistics()["behind_bytes"] == 0)
        use(ledger, "after")
        number += 1
    assert told.events == ["database_away", "journal_growing", "journal_full", "database_back"]
    rows = rows_at(f"sqlite:///{tmp_path / 'later' / 'records.db'}")
    assert [row["outcome"] for row in rows] == ["completed"] * number


def test_what_the_journal_does_not_take_goes_to_the_database(tmp_path: Path) -> None:
    with running(tmp_path, limit=32 * KiB) as (ledger, told):
        segment = tmp_path / "journal" / "0000000001.journal"
        while segment.stat().st_size < 4 * KiB:
            ledger.accept(make_request(exchange_id="open"), 1000.0)
        # It is full, and no other can be begun, whatever its number.
        blocked = [segment.with_name(f"{number:010}.journal") for number in range(2, 8)]
        for path in blocked:
            path.mkdir()
        ledger.settle(make_record(exchange_id="open"))
        assert ledger.statistics()["unwritten"] <= 1
        with pytest.raises(Refused):
            ledger.accept(make_request(exchange_id="refused"), 1000.0)
        ledger.release("open-00", 1001.0, 7)  # may be lost: nobody is billed by it
        eventually(lambda: ledger.statistics()["unwritten"] == 0 and "journal_unwritable" in told.events)
        for path in blocked:
            path.rmdir()
        use(ledger, "after")
        eventually(lambda: ledger.statistics()["behind_bytes"] == 0)
    rows = {row["exchange_id"]: row["outcome"] for row in rows_at(f"sqlite:///{tmp_path / 'records.db'}")}
    assert rows == {"open": "completed", "after": "completed"}
    assert told.events.count("journal_unwritable") == 1


def test_a_disk_that_does_not_confirm_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path) as (ledger, told):

        def fail(_: int) -> None:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr("os.fdatasync", fail)
        for number in range(3):
            use(ledger, f"x{number}")
            time.sleep(0.1)  # a sync each
        eventually(lambda: told.events)
        assert told.events == ["journal_not_synced"]


def test_a_driver_that_is_not_installed_is_told_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    settings = LedgerSettings("postgresql+psycopg://h/d", tmp_path / "journal", 64 * KiB, 1.0, 0, None)
    with pytest.raises(OSError, match=r"trio-gateway\[postgres\]"):
        Ledger(settings, "b1", Told()).open()
    assert not (tmp_path / "journal").exists()


def test_a_word_that_comes_before_the_settlement_completes_it_all_the_same(tmp_path: Path) -> None:
    with running(tmp_path) as (ledger, _):
        ledger.accept(make_request(exchange_id="x1"), 1000.0)
        ledger.release("x1-01", 1001.0, 5)  # of an attempt that was not the last
        ledger.release("x1-02", 1002.0, 7)
        eventually(lambda: ledger.statistics()["behind_bytes"] == 0)
        ledger.settle(dataclasses.replace(make_record(exchange_id="x1"), attempts=2, outcome="client_gone"))
    (row,) = rows_at(f"sqlite:///{tmp_path / 'records.db'}")
    assert (row["tokens_generated"], row["usage_source"], row["released_at"]) == (7, "engine", 1002.0)


def test_a_word_on_what_was_completed_or_is_not_known_is_not_kept(tmp_path: Path) -> None:
    with running(tmp_path) as (ledger, _):
        ledger.accept(make_request(exchange_id="x1"), 1000.0)
        ledger.release("x1-01", 1001.0, 7)
        ledger.settle(dataclasses.replace(make_record(exchange_id="x1"), attempts=1))
        size = ledger.statistics()["journal_bytes"]
        ledger.release("x1-01", 1001.0, 7)
        ledger.release("nobody-01", 1001.0, 7)
        assert ledger.statistics()["journal_bytes"] == size
    (row,) = rows_at(f"sqlite:///{tmp_path / 'records.db'}")
    assert (row["released_at"], row["usage_source"]) == (None, "none")


def test_words_on_the_latest_exchanges_are_waited_for(tmp_path: Path) -> None:
    with running(tmp_path, limit=64 * 1024 * KiB) as (ledger, _):
        for number in range(MOST_CUT + 1):
            ledger.accept(make_request(exchange_id=f"x{number}"), 1000.0)
            record = make_record(exchange_id=f"x{number}")
            ledger.settle(dataclasses.replace(record, attempts=1, outcome="client_gone"))
        size = ledger.statistics()["journal_bytes"]
        ledger.release("x0-01", 1001.0, 7)
        assert ledger.statistics()["journal_bytes"] == size
        ledger.release("x1-01", 1001.0, 7)
        assert ledger.statistics()["journal_bytes"] > size
