"""SQLite or PostgreSQL, through SQLAlchemy Core. Blocks: not for the loop.

Several gateways may use one database. Each part of it (the records, the tenants) has
tables of its own, whose form it brings up to date itself.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, SQLAlchemyError

from ._failures import RowsRefused, StoreFailed

SQLITE_PATIENCE: Final = 10.0  # seconds for another gateway's transaction
CONNECT_LIMIT: Final = 5  # seconds
STATEMENT_LIMIT: Final = 30_000  # milliseconds
SILENCE_LIMIT: Final = 10_000  # milliseconds without a word from a server's kernel
KEEPALIVE_IDLE: Final = 15  # seconds of waiting for an answer until the server's kernel is asked for a word
KEEPALIVE_INTERVAL: Final = 5  # seconds between two such questions

# What a database refuses because of the row, not of its own state: trying again is no use.
_REFUSALS: Final = (DataError, IntegrityError, OverflowError, UnicodeError)
_FAILURES: Final = (SQLAlchemyError, OSError)

_VERSIONS: Final = (
    "CREATE TABLE IF NOT EXISTS schema_version (part VARCHAR(64) PRIMARY KEY, version INTEGER NOT NULL)"
)
_MIGRATING: Final = 0x7472696F  # an advisory lock's number, the same for all gateways

# SQLite: the lock of writers comes first, since a transaction that began by reading could not wait for it.
_TO_WRITE: Final = "BEGIN IMMEDIATE"
_TO_READ: Final = "BEGIN"

Steps = tuple[tuple[str, ...], ...]
"""Migrations: none is ever changed, a new one goes to the end. The types are known to both databases."""


class Database:
    """One connection, opened when it is first needed and again after a failure; for one thread at a time.

    Args:
        url: ``sqlite:///...`` or ``postgresql+psycopg://...``.
        part: whose tables these are, in the table of versions.
        steps: that make its tables; as many as there are is the version.
        silence: milliseconds until a server of which nothing is heard is given up.

    Raises:
        ModuleNotFoundError: the driver is not installed.
    """

    def __init__(self, url: str, part: str, steps: Steps, silence: int = SILENCE_LIMIT) -> None:
        parsed = sa.make_url(url)
        self._part = part
        self._steps = steps
        self._begin = ""
        self.name: Final = parsed.get_backend_name()
        if self.name == "sqlite":
            self._engine = sa.create_engine(
                parsed, poolclass=sa.NullPool, connect_args={"timeout": SQLITE_PATIENCE}
            )
            sa.event.listen(self._engine, "connect", _prepare_sqlite)
            sa.event.listen(self._engine, "begin", self._begin_sqlite)
        else:
            options = {
                "connect_timeout": CONNECT_LIMIT,
                "tcp_user_timeout": silence,  # also until a probe below is given up
                "keepalives_idle": KEEPALIVE_IDLE,
                "keepalives_interval": KEEPALIVE_INTERVAL,
                "options": f"-c statement_timeout={STATEMENT_LIMIT} -c lock_timeout={STATEMENT_LIMIT}",
                "application_name": "trio-gateway",
            }
            wanted = {key: value for key, value in options.items() if key not in parsed.query}
            self._engine = sa.create_engine(parsed, poolclass=sa.NullPool, connect_args=wanted)
        self.dialect: Final[sa.Dialect] = self._engine.dialect
        self._connection: sa.Connection | None = None

    def _connected(self) -> sa.Connection:
        if self._connection is None:
            connection = self._engine.connect()
            try:
                self._migrate(connection)
            except BaseException:
                connection.close()
                raise
            self._connection = connection
        return self._connection

    def close(self) -> None:
        """Let go of the connection; the next use makes a new one. Idempotent, never raises."""
        connection, self._connection = self._connection, None
        if connection is not None:
            try:
                connection.close()
            except _FAILURES:
                connection.invalidate()

    def _begin_sqlite(self, connection: sa.Connection) -> None:
        connection.exec_driver_sql(self._begin)

    def _migrate(self, connection: sa.Connection) -> None:
        """Bring the tables into the form of this version; several gateways may do so at once.

        Raises:
            StoreFailed: they have a newer form.
        """
        self._begin = _TO_WRITE
        newest = len(self._steps)
        with connection.begin():
            if self.name != "sqlite":  # which locks the whole file
                connection.execute(sa.text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _MIGRATING})
            connection.execute(sa.text(_VERSIONS))
            known = {"part": self._part}
            asked = sa.text("SELECT version FROM schema_version WHERE part = :part")
            version = connection.execute(asked, known).scalar_one_or_none()
            if version is None:
                connection.execute(sa.text("INSERT INTO schema_version VALUES (:part, 0)"), known)
            if (version or 0) > newest:
                raise StoreFailed(f"the database has schema {version}, and this version knows {newest}")
            for step in self._steps[version or 0 :]:
                for statement in step:
                    connection.execute(sa.text(statement))
            if version != newest:
                change = sa.text("UPDATE schema_version SET version = :version WHERE part = :part")
                connection.execute(change, {**known, "version": newest})

    def writing(self) -> contextlib.AbstractContextManager[sa.Connection]:
        """One transaction; what leaving the block may raise left nothing written.

        Raises:
            RowsRefused: for what a row is.
            StoreFailed: the database is away, or does not work now.
        """
        return self._transaction(_TO_WRITE)

    def reading(self) -> contextlib.AbstractContextManager[sa.Connection]:
        """One transaction that writes nothing, and so waits for no other; raises `StoreFailed`."""
        return self._transaction(_TO_READ)

    @contextlib.contextmanager
    def _transaction(self, begin: str) -> Iterator[sa.Connection]:
        try:
            connection = self._connected()
            self._begin = begin
            with connection.begin():
                yield connection
        except _REFUSALS as error:
            raise RowsRefused(_explain(error)) from error
        except _FAILURES as error:
            self.close()
            raise StoreFailed(_explain(error)) from error


def _explain(error: BaseException) -> str:
    """Say in one line what a database said. Drivers name hosts and users in it, and no passwords."""
    cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    lines = str(cause).strip().splitlines() or [""]
    return f"{type(cause).__name__}: {lines[0][:200]}"


def _prepare_sqlite(connection: Any, _: object) -> None:
    connection.isolation_level = None  # the driver's own idea of transactions leaves some statements out
    # A segment of the journal is deleted once it is committed here: FULL, or loss of power loses both.
    connection.execute("PRAGMA synchronous = FULL").close()
    with contextlib.suppress(sqlite3.OperationalError):  # locked: another gateway is doing the same
        connection.execute("PRAGMA journal_mode = WAL").close()
