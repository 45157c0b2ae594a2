"""From the journal into the database: nothing twice, nothing skipped, nothing in the way for ever."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.ledger.databases import rows_at
from tests.ledger.making import make_record, make_request
from trio_gateway.database import StoreFailed
from trio_gateway.ledger._journal import Journal
from trio_gateway.ledger._replay import FORGET_EVERY, PIECE, Replay
from trio_gateway.ledger._rows import Row, StorePort, accepted_line, record_json, settled_line
from trio_gateway.ledger._store import Store
from trio_gateway.units import KiB, MiB

NOW = 1_793_491_200.0


class Told:
    """A log that keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def write(self, level: str, event: str, **fields: Any) -> None:
        self.events.append((event, fields))


def accept(journal: Journal, exchange_id: str, boot: str = "b1") -> None:
    line = accepted_line(make_request(exchange_id=exchange_id), journal.gateway_id, boot, NOW)
    assert journal.append(line)


def settle(journal: Journal, exchange_id: str, **changes: Any) -> None:
    record = dataclasses.replace(make_record(exchange_id=exchange_id), arrived_at=NOW, **changes)
    assert journal.append(settled_line(record_json(record), journal.gateway_id))


@contextmanager
def process(
    folder: Path, boot: str = "b1", limit: int = MiB, retention: int = 0
) -> Iterator[tuple[Journal, Replay, Told]]:
    """What a process of a gateway has of its ledger; leaving the block is its death."""
    journal = Journal(folder / "journal", limit, "g1")
    journal.open()
    told = Told()
    try:
        yield journal, Replay(journal, boot, retention, told), told
    finally:
        journal.close()


def finish(replay: Replay, store: StorePort, now: float = NOW) -> None:
    while replay.round(store, now):
        pass


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(f"sqlite:///{tmp_path / 'records.db'}")
    yield store
    store.close()


def outcomes(folder: Path) -> dict[str, str | None]:
    rows = rows_at(f"sqlite:///{folder / 'records.db'}")
    assert len({row["exchange_id"] for row in rows}) == len(rows)
    return {row["exchange_id"]: row["outcome"] for row in rows}


def test_what_was_accepted_and_settled_gets_into_the_database(tmp_path: Path, store: Store) -> None:
    with process(tmp_path) as (journal, replay, told):
        accept(journal, "x1")
        accept(journal, "x2")
        finish(replay, store)
        assert outcomes(tmp_path) == {"x1": None, "x2": None}
        settle(journal, "x1")
        finish(replay, store)
        assert outcomes(tmp_path) == {"x1": "completed", "x2": None}
        assert (replay.replayed, replay.ahead, replay.crashed) == (3, journal.size, 0)
        assert not told.events


def test_segments_are_deleted_when_all_of_them_is_in_the_database(tmp_path: Path, store: Store) -> None:
    with process(tmp_path, limit=64 * KiB) as (journal, replay, _):
        for number in range(40):
            accept(journal, f"x{number}")
            settle(journal, f"x{number}")
        assert len(journal.segments) > 3
        finish(replay, store)
        assert len(journal.segments) == 1
        assert journal.size == replay.ahead <= 9 * KiB
        assert len(outcomes(tmp_path)) == 40


def test_a_long_segment_is_read_in_pieces(tmp_path: Path, store: Store) -> None:
    with process(tmp_path, limit=8 * MiB) as (journal, replay, _):
        number = 0
        while journal.size < PIECE + 50 * KiB:
            settle(journal, f"x{number}")
            number += 1
        assert len(journal.segments) == 1
        assert replay.round(store, NOW)
        assert 0 < replay.replayed < number
        finish(replay, store)
        assert replay.replayed == number == len(outcomes(tmp_path))


def test_the_next_process_replays_what_is_left_and_closes_what_was_open(tmp_path: Path, store: Store) -> None:
    with process(tmp_path) as (journal, replay, _):
        accept(journal, "known")
        accept(journal, "open")
        finish(replay, store)
        settle(journal, "known")
        accept(journal, "unknown")
    with process(tmp_path, "b2") as (journal, replay, told):
        accept(journal, "own", "b2")
        finish(replay, store)
        assert outcomes(tmp_path) == {
            "known": "completed",
            "open": "gateway_crashed",
            "unknown": "gateway_crashed",
            "own": None,
        }
        assert replay.crashed == 2
        assert told.events == [("exchanges_crashed", {"count": 2})]
        finish(replay, store)
        assert len(told.events) == 1


def test_nothing_is_closed_before_all_that_was_written_is_there(tmp_path: Path, store: Store) -> None:
    with process(tmp_path, limit=64 * KiB) as (journal, replay, _):
        accept(journal, "x1")
        finish(replay, store)
        while len(journal.segments) < 3:
            accept(journal, "x2")
        settle(journal, "x1")
    with process(tmp_path, "b2") as (_, replay, __):
        replay.round(store, NOW)
        assert replay.crashed is None
        assert outcomes(tmp_path)["x1"] is None
        finish(replay, store)
        assert outcomes(tmp_path) == {"x1": "completed", "x2": "gateway_crashed"}


class Failing:
    """A database that dies before or after it has committed, at the calls that are told."""

    def __init__(self, store: Store, when: Sequence[str]) -> None:
        self._store = store
        self._when = iter(when)

    def write(self, accepted: Sequence[Row], settled: Sequence[Row], released: Sequence[Row]) -> None:
        how = next(self._when, "well")
        if how == "before":
            raise StoreFailed(how)
        self._store.write(accepted, settled, released)
        if how == "after":
            raise StoreFailed(how)

    def close_crashed(self, gateway_ids: Sequence[str], boot_id: str, now: float) -> int:
        return self._store.close_crashed(gateway_ids, boot_id, now)

    def forget(self, before: float, most: int) -> int:
        return self._store.forget(before, most)

    def close(self) -> None:
        self._store.close()


STEPS = st.lists(
    st.tuples(st.sampled_from(["accept", "settle", "replay", "die"]), st.integers(0, 5)), max_size=25
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(steps=STEPS, failures=st.lists(st.sampled_from(["before", "after", "well"]), max_size=12))
def test_whatever_dies_whenever_every_exchange_has_one_record(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]], failures: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("story")
    real = Store(f"sqlite:///{folder / 'records.db'}")
    store = Failing(real, failures)
    expected: dict[str, str] = {}
    waiting = iter(steps)
    for boot in range(len(steps) + 1):
        running: list[str] = []
        with process(folder, f"b{boot}") as (journal, replay, _):
            died = False
            for what, number in waiting:
                if what == "accept":
                    running.append(f"x{boot}-{len(expected)}")
                    expected[running[-1]] = "gateway_crashed"
                    accept(journal, running[-1], f"b{boot}")
                elif what == "settle" and running:
                    done = running.pop(number % len(running))
                    expected[done] = "completed"
                    settle(journal, done, boot_id=f"b{boot}")
                elif what == "replay":
                    with suppress(StoreFailed):
                        replay.round(store, NOW)
                elif what == "die":
                    died = True
                    break
            if not died:
                break
    with process(folder, "last") as (_, replay, __):
        while True:
            try:
                finish(replay, store)
            except StoreFailed:
                continue
            break
        assert outcomes(folder) == expected
    real.close()


def test_a_line_that_was_cut_costs_nothing_but_itself(tmp_path: Path, store: Store) -> None:
    with process(tmp_path) as (journal, replay, _):
        accept(journal, "x1")
        accept(journal, "x2")
        settle(journal, "x2")
        path = journal.segments[0].path
    path.write_bytes(path.read_bytes()[:-100])
    with process(tmp_path, "b2") as (_, replay, told):
        finish(replay, store)
        assert outcomes(tmp_path) == {"x1": "gateway_crashed", "x2": "gateway_crashed"}
        assert replay.damaged == 1
        assert told.events[0] == ("journal_damaged", {"segment": path.name, "places": 1})


@pytest.mark.parametrize("size", [PIECE - 1, PIECE, PIECE + 1, 2 * PIECE + 7])
def test_garbage_of_any_size_is_passed(tmp_path: Path, store: Store, size: int) -> None:
    with process(tmp_path) as (journal, _, __):
        accept(journal, "x1")
        path = journal.segments[0].path
    path.write_bytes(b"?" * size + b"\n" + path.read_bytes())
    with process(tmp_path, "b2", limit=16 * MiB) as (journal, replay, __):
        finish(replay, store)
        assert outcomes(tmp_path) == {"x1": "gateway_crashed"}
        assert replay.damaged >= 1
        assert len(journal.segments) == 1


def test_a_segment_that_somebody_deleted_is_missed_and_passed(tmp_path: Path, store: Store) -> None:
    with process(tmp_path, limit=64 * KiB) as (journal, replay, told):
        while len(journal.segments) < 2:
            accept(journal, "x1")
        accept(journal, "x2")
        journal.segments[0].path.unlink()
        finish(replay, store)
        assert "x2" in outcomes(tmp_path)
        assert [event for event, _ in told.events] == ["journal_damaged"]


def test_when_somebody_deletes_the_segment_that_is_written_to_another_one_begins(
    tmp_path: Path, store: Store
) -> None:
    with process(tmp_path) as (journal, replay, told):
        settle(journal, "lost")
        journal.segments[0].path.unlink()
        finish(replay, store)
        finish(replay, store)
        settle(journal, "x1")
        finish(replay, store)
        settle(journal, "x2")
        finish(replay, store)
        assert outcomes(tmp_path) == {"x1": "completed", "x2": "completed"}
        assert [event for event, _ in told.events] == ["journal_damaged"]
        assert replay.damaged == 1


def test_without_its_folder_nothing_is_taken_into_the_journal_until_it_is_back(
    tmp_path: Path, store: Store
) -> None:
    with process(tmp_path) as (journal, replay, _):
        shutil.rmtree(tmp_path / "journal")
        finish(replay, store)
        assert not journal.append(b"{}")
        assert journal.failure is not None
        (tmp_path / "journal").mkdir()
        settle(journal, "x1")
        assert journal.failure is None
        finish(replay, store)
        assert outcomes(tmp_path) == {"x1": "completed"}


@pytest.mark.parametrize(
    "line",
    [
        b"no json",
        b"[]",
        b'{"t":"settled"}',
        b'{"t":"settled","exchange_id":"bad"}',
        b'{"t":"settled","exchange_id":"bad","arrived_at":1e300}',
    ],
)
def test_a_line_that_no_database_takes_is_kept_aside_and_holds_nothing_up(
    tmp_path: Path, store: Store, line: bytes
) -> None:
    with process(tmp_path) as (journal, replay, told):
        settle(journal, "x1")
        assert journal.append(line)
        settle(journal, "x2")
        finish(replay, store)
        assert outcomes(tmp_path) == {"x1": "completed", "x2": "completed"}
        assert (replay.rejected, replay.replayed) == (1, 2)
        assert [event for event, _ in told.events] == ["record_rejected"]
    assert (tmp_path / "journal" / "rejected.jsonl").read_bytes() == line + b"\n"


def test_lines_and_fields_of_other_versions_do_no_harm(tmp_path: Path, store: Store) -> None:
    with process(tmp_path) as (journal, replay, _):
        accept(journal, "x1")
        assert journal.append(b'{"t":"paused","exchange_id":"x1"}')
        assert journal.append(
            b'{"t":"settled","exchange_id":"x1","gateway_id":"g1","boot_id":"b","tenant":"a","operation":"o",'
            b'"model":"m","stream":true,"tier":"t","arrived_at":1,"outcome":"completed","mood":"good"}'
        )
        finish(replay, store)
        assert outcomes(tmp_path) == {"x1": "completed"}
        assert not replay.rejected


def test_records_are_forgotten_after_their_time_and_not_all_the_time(tmp_path: Path, store: Store) -> None:
    with process(tmp_path, retention=2) as (journal, replay, _):
        settle(journal, "x1")
        finish(replay, store, NOW + 2 * 86_400)
        assert outcomes(tmp_path) == {"x1": "completed"}
        finish(replay, store, NOW + 2 * 86_400 + FORGET_EVERY - 1)
        assert outcomes(tmp_path) == {"x1": "completed"}
        finish(replay, store, NOW + 2 * 86_400 + FORGET_EVERY)
        assert outcomes(tmp_path) == {}
