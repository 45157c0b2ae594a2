"""The database of records, SQLite and PostgreSQL: what may be repeated, and what several gateways may do."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from tests.docs.pages import column
from tests.ledger.databases import rows_at
from tests.ledger.making import make_record, make_request
from trio_gateway.contract import Ending, Outcome
from trio_gateway.database import RowsRefused, StoreFailed
from trio_gateway.database.sql import Database
from trio_gateway.errors import Problem
from trio_gateway.ledger import Record, UsageRow
from trio_gateway.ledger._rows import (
    COLUMNS,
    Line,
    accepted_line,
    read_line,
    record_json,
    release_line,
    rows_of,
    settled_line,
)
from trio_gateway.ledger._store import _STEPS, VERSION, Store

NOVEMBER = 1_793_491_200.0  # 2026-11-01T00:00:00Z
DAY = 86_400.0


def accepted(exchange_id: str = "x1", boot: str = "b1", gateway: str = "g1") -> Line:
    return read_line(accepted_line(make_request(exchange_id=exchange_id), gateway, boot, NOVEMBER))


def settled(exchange_id: str = "x1", **changes: Any) -> Line:
    record = make_record(exchange_id=exchange_id)
    return read_line(
        settled_line(record_json(dataclasses.replace(record, **{"arrived_at": NOVEMBER, **changes})), "g1")
    )


def write(store: Store, *lines: Line) -> None:
    store.write(*rows_of(lines))


def test_a_record_is_kept_as_it_is(url: str) -> None:
    record = make_record(Ending(Outcome.REFUSED, Problem.of("queue_timeout", "late")))
    write(store := Store(url), read_line(settled_line(record_json(record), "g1")))
    store.close()
    (row,) = rows_at(url)
    assert set(row) == {*COLUMNS, "released_at"}
    assert {name: row[name] for name in record.as_dict()} == record.as_dict()
    assert (row["gateway_id"], row["day"]) == ("g1", "1970-01-01")


def test_every_field_of_a_record_has_a_column() -> None:
    assert {field.name for field in dataclasses.fields(Record)} < set(COLUMNS)
    assert len(set(COLUMNS)) == len(COLUMNS)


def test_every_column_is_a_field_of_records_or_described_beside_them(url: str) -> None:
    write(store := Store(url), settled())
    store.close()
    page = "reference/records.md"
    assert set(rows_at(url)[0]) == {
        *column(page, "Fields", "Field"),
        *column(page, "In the database", "Column"),
    }


@pytest.mark.parametrize("number", [1, 29, 30, 31, 82, 83, 165, 200])  # statements take 30, or 82, at a time
def test_however_many_rows_come_at_once_all_are_written(url: str, number: int) -> None:
    names = [f"x{index}" for index in range(number)]
    store = Store(url)
    for _ in range(2):  # again: it changes nothing
        write(store, *map(accepted, names))
        assert [row["outcome"] for row in rows_at(url)] == [None] * number
    for tokens in (7, 9):
        write(store, *(settled(name, tokens_generated=tokens) for name in names))
    store.close()
    rows = {row["exchange_id"]: row for row in rows_at(url)}
    assert set(rows) == set(names)
    assert {(row["tenant"], row["outcome"], row["tokens_generated"]) for row in rows.values()} == {
        ("acme", "completed", 7)
    }


def test_an_accepted_exchange_is_open_until_it_is_settled(url: str) -> None:
    store = Store(url)
    write(store, accepted())
    (row,) = rows_at(url)
    assert (row["outcome"], row["tenant"], row["day"]) == (None, "acme", "2026-11-01")
    write(store, settled(tokens_generated=7))
    (row,) = rows_at(url)
    assert (row["outcome"], row["tokens_generated"]) == ("completed", 7)
    store.close()


def test_writing_twice_and_in_any_order_changes_nothing(url: str) -> None:
    store = Store(url)
    write(store, accepted(), settled(tokens_generated=7))
    before = rows_at(url)
    write(store, accepted())
    write(store, settled(tokens_generated=8, outcome="client_gone"))
    write(store, settled(tokens_generated=8), accepted())
    assert rows_at(url) == before
    store.close()


def test_what_earlier_processes_of_a_gateway_left_open_is_closed_and_nothing_else(url: str) -> None:
    store = Store(url)
    write(
        store,
        accepted("old", boot="b1"),
        accepted("renamed", boot="b0", gateway="g0"),
        accepted("own", boot="b2"),
        accepted("others", gateway="g2"),
        settled("done"),
    )
    assert store.close_crashed(["g0", "g1"], "b2", NOVEMBER + 60) == 2
    rows = {row["exchange_id"]: row for row in rows_at(url)}
    assert {name for name, row in rows.items() if row["outcome"] == "gateway_crashed"} == {"old", "renamed"}
    assert {name for name, row in rows.items() if row["outcome"] is None} == {"own", "others"}
    assert rows["old"]["settled_at"] == NOVEMBER + 60
    assert (rows["old"]["usage_source"], rows["old"]["phase"]) == ("none", None)
    assert store.close_crashed(["g0", "g1"], "b2", NOVEMBER + 61) == 0
    store.close()


def test_a_settlement_overrides_an_assumed_crash(url: str) -> None:
    store = Store(url)
    write(store, accepted())
    store.close_crashed(["g1"], "b2", NOVEMBER)
    write(store, settled())
    assert [row["outcome"] for row in rows_at(url)] == ["completed"]
    store.close()


def released(exchange_id: str = "x1", attempt: int = 1, generated: int | None = 9, after: float = 5) -> Line:
    return read_line(release_line(f"{exchange_id}-{attempt:02d}", NOVEMBER + after, generated))


@pytest.mark.parametrize(
    ("source", "recorded", "said", "kept"),
    [
        ("estimated", 7, 9, (9, "engine")),
        ("estimated", 12, 9, (9, "engine")),
        ("none", None, 9, (9, "engine")),
        ("none", None, 0, (0, "engine")),
        ("engine", 7, 9, (9, "engine")),
        ("engine", 12, 9, (12, "engine")),
        ("estimated", 7, None, (7, "estimated")),
        ("none", None, None, (None, "none")),
    ],
)
def test_what_an_engine_says_when_it_lets_go_completes_the_record(
    url: str, source: str, recorded: int | None, said: int | None, kept: tuple[int | None, str]
) -> None:
    store = Store(url)
    line = settled(attempts=1, usage_source=source, tokens_generated=recorded)
    write(store, line, released(generated=said))
    (row,) = rows_at(url)
    assert row["released_at"] == NOVEMBER + 5
    assert (row["tokens_generated"], row["usage_source"]) == kept
    write(store, released(generated=said, after=6))
    write(store, released(generated=None), line)
    assert rows_at(url) == [row]
    write(store, released(generated=99))
    assert rows_at(url) == [row | {"tokens_generated": 99, "usage_source": "engine"}]
    store.close()


def test_an_attempt_that_was_not_the_last_says_nothing_of_the_record(url: str) -> None:
    store = Store(url)
    write(store, accepted("open"), settled(attempts=2, tokens_generated=7), released(), released("open"))
    rows = {row["exchange_id"]: row for row in rows_at(url)}
    assert (rows["x1"]["tokens_generated"], rows["x1"]["released_at"]) == (7, None)
    assert rows["open"]["released_at"] is None
    write(store, released(attempt=2), released("nobody"))
    assert {row["exchange_id"]: row["released_at"] for row in rows_at(url)} == {
        "open": None,
        "x1": NOVEMBER + 5,
    }
    store.close()


def test_old_records_are_forgotten_some_at_a_time_and_open_ones_never(url: str) -> None:
    store = Store(url)
    write(store, accepted("open"), *(settled(f"x{number}") for number in range(5)))
    write(store, settled("new", arrived_at=NOVEMBER + DAY))
    assert [store.forget(NOVEMBER + 1, 3) for _ in range(3)] == [3, 2, 0]
    assert {row["exchange_id"] for row in rows_at(url)} == {"open", "new"}
    store.close()


def test_usage_is_summed_up_by_any_dimensions_and_within_any_time(url: str) -> None:
    store = Store(url)
    counts: dict[str, Any] = {
        "tokens_prompt": 10,
        "tokens_cached": 2,
        "tokens_generated": 5,
        "tokens_delivered": 4,
    }
    write(
        store,
        settled("a", **counts),
        settled("b", **counts, outcome="client_gone", prompt_source="estimated"),
        settled("c", **counts, tenant="beta", arrived_at=NOVEMBER + DAY, tokens_acknowledged=1),
        settled("d", key_id=None, arrived_at=NOVEMBER - 0.001),
        accepted("e"),
    )
    both = {"prompt": 20, "cached": 4, "generated": 10, "delivered": 8, "acknowledged": 0}
    one = {"prompt": 10, "cached": 2, "generated": 5, "delivered": 4, "acknowledged": 1}
    none = dict.fromkeys(both, 0)
    assert store.usage(["tenant"], NOVEMBER, None) == [
        UsageRow(("acme",), 2, 1, 1, 1, both),
        UsageRow(("beta",), 1, 1, 0, 0, one),
    ]
    assert store.usage(["day", "tenant"], None, NOVEMBER) == [
        UsageRow(("2026-10-31", "acme"), 1, 1, 0, 0, none)
    ]
    assert [(row.group, row.requests) for row in store.usage(["key_id"], None, None)] == [
        ((None,), 1),
        (("k1",), 3),
    ]
    assert store.usage([], NOVEMBER, NOVEMBER + DAY) == [UsageRow((), 2, 1, 1, 1, both)]
    assert store.usage(["model"], NOVEMBER + 2 * DAY, None) == []
    store.close()


@pytest.mark.parametrize(
    "change", [{"tokens_prompt": 2**70}, {"tenant": None}], ids=["out of range", "missing"]
)
def test_a_row_that_can_not_be_written_is_told_from_a_database_that_does_not_work(
    url: str, change: dict[str, Any]
) -> None:
    store = Store(url)
    with pytest.raises(RowsRefused):
        write(store, settled("good"), settled("bad", **change))
    assert rows_at(url) == []
    write(store, settled("good"))
    assert len(rows_at(url)) == 1
    store.close()


def test_a_name_that_is_no_text_is_written_as_far_as_it_is(url: str) -> None:
    store = Store(url)
    record = dataclasses.replace(make_record(), worker="w\ud800")
    write(store, read_line(settled_line(record_json(record), "g1")))
    assert [row["worker"] for row in rows_at(url)] == ["w?"]
    store.close()


def test_gateways_that_start_at_once_make_one_set_of_tables(url: str) -> None:
    failures: list[BaseException] = []
    together = threading.Barrier(4)

    def start(number: int) -> None:
        store = Store(url)
        together.wait(20)
        try:
            write(store, accepted(f"x{number}"), settled("shared"))
        except StoreFailed as error:
            failures.append(error)
        finally:
            store.close()

    threads = [threading.Thread(target=start, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(rows_at(url)) == 5
    assert rows_at(url, "SELECT * FROM schema_version") == [{"part": "exchanges", "version": VERSION}]


def test_a_database_of_an_older_version_gets_what_it_lacks(url: str) -> None:
    older = Database(url, "exchanges", _STEPS[:1])
    with older.writing() as connection:
        connection.execute(
            sa.text(
                "INSERT INTO exchanges (exchange_id, gateway_id, boot_id, tenant, operation, model, stream,"
                " tier, arrived_at, day)"
                " VALUES ('old', 'g1', 'b0', 'a', 'o', 'm', :stream, 't', 1.0, '1970-01-01')"
            ),
            {"stream": True},
        )
    older.close()
    store = Store(url)
    write(store, settled())
    assert store.close_crashed(["g1"], "b1", NOVEMBER) == 1
    store.close()
    rows = {row["exchange_id"]: row for row in rows_at(url)}
    assert (rows["old"]["outcome"], rows["old"]["prompt_source"]) == ("gateway_crashed", "none")
    assert rows["x1"]["outcome"] == "completed"


def test_a_database_of_a_newer_version_is_left_alone(url: str) -> None:
    store = Store(url)
    write(store, settled())
    store.close()
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    with engine.begin() as connection:
        connection.execute(sa.text(f"UPDATE schema_version SET version = {VERSION + 1}"))
    with pytest.raises(StoreFailed, match=f"schema {VERSION + 1}"):
        write(store, settled("x2"))
    assert len(rows_at(url)) == 1


def test_a_database_that_is_away_is_found_again(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path / 'later' / 'records.db'}")
    with pytest.raises(StoreFailed, match="unable to open"):
        write(store, settled())
    (tmp_path / "later").mkdir()
    write(store, settled())
    store.close()
    store.close()


def test_sqlite_commits_to_the_disk_before_the_journal_lets_go(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path / 'records.db'}")
    write(store, settled())
    assert store._database._connection is not None
    asked = store._database._connection.connection.cursor()
    assert asked.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert asked.execute("PRAGMA synchronous").fetchone() == (2,)
    asked.close()
    store.close()
