"""The database of records: SQLite or PostgreSQL, through SQLAlchemy Core. Blocks: not for the loop.

Several gateways may write to one database. All writing is by exchange id and can be
repeated: an acceptance never changes a row that is there, a settlement only one that is
open or was taken for crashed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from ..contract import Outcome
from ..database.sql import Database, Steps
from ._rows import COLUMNS, GATEWAY_CRASHED, IDENTITY, KINDS, RELEASE, Row, UsageRow

_STEPS: Final[Steps] = (
    (
        """CREATE TABLE exchanges (
            exchange_id VARCHAR(64) NOT NULL PRIMARY KEY,
            client_request_id TEXT,
            gateway_id TEXT NOT NULL,
            boot_id TEXT NOT NULL,
            tenant TEXT NOT NULL,
            key_id TEXT,
            operation TEXT NOT NULL,
            model TEXT NOT NULL,
            stream BOOLEAN NOT NULL,
            tier TEXT NOT NULL,
            arrived_at DOUBLE PRECISION NOT NULL,
            day CHAR(10) NOT NULL,
            worker TEXT,
            attempts INTEGER,
            placed_at DOUBLE PRECISION,
            upstream_opened_at DOUBLE PRECISION,
            headers_at DOUBLE PRECISION,
            first_content_at DOUBLE PRECISION,
            last_content_at DOUBLE PRECISION,
            settled_at DOUBLE PRECISION,
            outcome TEXT,
            phase TEXT,
            code TEXT,
            status INTEGER,
            tokens_prompt BIGINT,
            tokens_cached BIGINT,
            tokens_generated BIGINT,
            tokens_delivered BIGINT,
            tokens_acknowledged BIGINT,
            usage_source TEXT,
            events_delivered BIGINT,
            bytes_delivered BIGINT,
            events_dropped BIGINT,
            receipt TEXT,
            released_at DOUBLE PRECISION
        )""",
        "CREATE INDEX exchanges_arrived ON exchanges (arrived_at)",
        "CREATE INDEX exchanges_open ON exchanges (gateway_id) WHERE outcome IS NULL",
    ),
    ("ALTER TABLE exchanges ADD COLUMN prompt_source TEXT",),
)
VERSION: Final = len(_STEPS)

_EXCHANGES: Final = sa.table("exchanges", *map(sa.column, (*COLUMNS, "released_at")))
_PART: Final = "exchanges"
_SQLITE_VALUES: Final = 990  # in one statement; versions before 3.32 take 999


class _Prepared:
    """A statement for many rows, compiled once: SQLAlchemy's own way costs as much as the database's work.

    SQLite gets many rows in one statement. Its driver lets other threads run during each, and
    beside a busy loop it takes this thread half a millisecond, and both a switch, to get its turn back.
    """

    def __init__(self, statement: sa.Insert, dialect: sa.Dialect, columns: Sequence[str]) -> None:
        compiled = statement.compile(dialect=dialect)
        self._text = str(compiled)
        self._columns = columns
        order = getattr(compiled, "positiontup", None)
        assert order is None or tuple(order) == tuple(columns)
        self._named = order is None
        self._together = 0 if self._named else _SQLITE_VALUES // len(columns)
        row = f"({', '.join('?' * len(columns))})"
        self._many = self._text.replace(row, ", ".join([row] * self._together))

    def write(self, connection: sa.Connection, rows: Sequence[Row]) -> None:
        """Write rows, of which each has a value for every column."""
        values: Any = rows
        if self._named:
            values = [dict(zip(self._columns, row, strict=True)) for row in rows]
        elif whole := len(rows) - len(rows) % self._together:
            for at in range(0, whole, self._together):
                together = itertools.chain.from_iterable(rows[at : at + self._together])
                connection.exec_driver_sql(self._many, tuple(together))
            values = rows[whole:]
        if values:
            connection.exec_driver_sql(self._text, values)


class Store:
    """The records in a database; see `Database`.

    Args:
        url: ``sqlite:///...`` or ``postgresql+psycopg://...``.

    Raises:
        ModuleNotFoundError: the driver is not installed.
    """

    def __init__(self, url: str) -> None:
        self._database = Database(url, _PART, _STEPS)
        make = sqlite.insert if self._database.name == "sqlite" else postgresql.insert
        accept, settle = _statements(make)
        self._accept = _Prepared(accept, self._database.dialect, IDENTITY)
        self._settle = _Prepared(settle, self._database.dialect, COLUMNS)

    def close(self) -> None:
        """Let go of the connection; the next call makes a new one. Idempotent, never raises."""
        self._database.close()

    # -- writing

    def write(self, accepted: Sequence[Row], settled: Sequence[Row], released: Sequence[Row]) -> None:
        """See `StorePort`."""
        with self._database.writing() as connection:
            if accepted:
                self._accept.write(connection, accepted)
            if settled:
                self._settle.write(connection, settled)
            if released:
                names = [f"the_{column}" for column in RELEASE]
                connection.execute(_release(), [dict(zip(names, row, strict=True)) for row in released])

    def close_crashed(self, gateway_ids: Sequence[str], boot_id: str, now: float) -> int:
        """See `StorePort`."""
        table = _EXCHANGES.c
        statement = (
            sa.update(_EXCHANGES)
            .where(table.outcome.is_(None), table.gateway_id.in_(gateway_ids), table.boot_id != boot_id)
            .values(outcome=GATEWAY_CRASHED, settled_at=now, prompt_source="none", usage_source="none")
        )
        with self._database.writing() as connection:
            return connection.execute(statement).rowcount

    def forget(self, before: float, most: int) -> int:
        """See `StorePort`."""
        table = _EXCHANGES.c
        old = (
            sa.select(table.exchange_id)
            .where(table.arrived_at < before, table.outcome.is_not(None))
            .limit(most)
        )
        with self._database.writing() as connection:
            return connection.execute(sa.delete(_EXCHANGES).where(table.exchange_id.in_(old))).rowcount

    # -- reading

    def usage(self, by: Sequence[str], since: float | None, until: float | None) -> list[UsageRow]:
        """Sum up what exchanges used, sorted by group.

        Args:
            by: some of `DIMENSIONS`.
            since: seconds since the epoch; only exchanges that arrived then or later.
            until: only those that arrived before.

        Raises:
            StoreFailed: the database is away.
        """
        table = _EXCHANGES.c
        group = [table[name] for name in by]
        sums = [sa.func.coalesce(sa.func.sum(table[f"tokens_{kind}"]), 0) for kind in KINDS]
        statement = sa.select(
            *group,
            sa.func.count(table.outcome),
            _count_if(table.outcome == Outcome.COMPLETED.value),
            _count_if(table.outcome.is_(None)),
            _count_if((table.usage_source == "estimated") | (table.prompt_source == "estimated")),
            *sums,
        )
        if since is not None:
            statement = statement.where(table.arrived_at >= since)
        if until is not None:
            statement = statement.where(table.arrived_at < until)
        if group:
            statement = statement.group_by(*group)
        with self._database.reading() as connection:
            rows = [tuple(row) for row in connection.execute(statement)]
        found = [_usage_of(row, len(group)) for row in rows]
        return sorted(found, key=lambda usage: tuple(name or "" for name in usage.group))


def _usage_of(row: tuple[Any, ...], groups: int) -> UsageRow:
    requests, completed, open_, estimated, *tokens = map(int, row[groups:])
    group = tuple(row[:groups])
    return UsageRow(group, requests, completed, open_, estimated, dict(zip(KINDS, tokens, strict=True)))


def _count_if(condition: sa.ColumnElement[bool]) -> sa.ColumnElement[int]:
    return sa.func.coalesce(sa.func.sum(sa.case((condition, 1), else_=0)), 0)


def _statements(make: Callable[..., Any]) -> tuple[Any, Any]:
    """The two ways to write a row, for the dialect whose `insert` is given."""
    accept = make(_EXCHANGES).values({name: sa.bindparam(name) for name in IDENTITY})
    settle = make(_EXCHANGES).values({name: sa.bindparam(name) for name in COLUMNS})
    table = _EXCHANGES.c
    return (
        accept.on_conflict_do_nothing(index_elements=["exchange_id"]),
        settle.on_conflict_do_update(
            index_elements=["exchange_id"],
            set_={name: settle.excluded[name] for name in COLUMNS if name not in IDENTITY},
            where=table.outcome.is_(None) | (table.outcome == sa.literal_column(f"'{GATEWAY_CRASHED}'")),
        ),
    )


def _release() -> sa.Update:
    """Note what an engine said at last. Its word goes before our estimate, and never takes back its own."""
    table = _EXCHANGES.c
    generated = sa.bindparam("the_generated", type_=sa.BigInteger)
    known = generated.is_(None) | ((table.usage_source == "engine") & (table.tokens_generated >= generated))
    return (
        sa.update(_EXCHANGES)
        .where(
            table.exchange_id == sa.bindparam("the_exchange_id"),
            table.attempts == sa.bindparam("the_attempt"),
        )
        .values(
            released_at=sa.func.coalesce(table.released_at, sa.bindparam("the_released_at", type_=sa.Double)),
            tokens_generated=sa.case((known, table.tokens_generated), else_=generated),
            usage_source=sa.case((generated.is_(None), table.usage_source), else_="engine"),
        )
    )
