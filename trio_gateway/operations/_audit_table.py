"""What operators did, in a database. Blocks: not for the loop.

Several gateways may write to one database: an entry is known by the process that wrote it
and its number there, so that writing can be repeated.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from ..database.sql import Database, Steps

_STEPS: Final[Steps] = (
    (
        """CREATE TABLE audit (
            boot_id VARCHAR(64) NOT NULL,
            number BIGINT NOT NULL,
            at DOUBLE PRECISION NOT NULL,
            actor TEXT NOT NULL,
            role TEXT NOT NULL,
            action TEXT NOT NULL,
            target TEXT,
            before_json TEXT NOT NULL,
            after_json TEXT NOT NULL,
            outcome TEXT NOT NULL,
            request_id TEXT NOT NULL,
            PRIMARY KEY (boot_id, number)
        )""",
        "CREATE INDEX audit_at ON audit (at)",
    ),
)
_COLUMNS: Final = (
    "boot_id",
    "number",
    "at",
    "actor",
    "role",
    "action",
    "target",
    "before_json",
    "after_json",
    "outcome",
    "request_id",
)
_AUDIT: Final = sa.table("audit", *map(sa.column, _COLUMNS))


class AuditTable:
    """One connection to it; see `Database`. Methods raise `StoreFailed` where the database does not work.

    Args:
        url: ``sqlite:///...`` or ``postgresql+psycopg://...``.

    Raises:
        ModuleNotFoundError: the driver is not installed.
    """

    def __init__(self, url: str) -> None:
        self._database = Database(url, "audit", _STEPS)
        self._insert: Any = sqlite.insert if self._database.name == "sqlite" else postgresql.insert

    def close(self) -> None:
        """Let go of the connection; the next call makes a new one. Idempotent, never raises."""
        self._database.close()

    def write(self, boot_id: str, entries: Sequence[tuple[int, dict[str, Any]]]) -> None:
        """Write entries with their numbers; those that are there already stay as they are."""
        rows = [_written(boot_id, number, entry) for number, entry in entries]
        statement = self._insert(_AUDIT).on_conflict_do_nothing(index_elements=["boot_id", "number"])
        with self._database.writing() as connection:
            connection.execute(statement, rows)

    def read(self, limit: int) -> list[dict[str, Any]]:
        """Answer the latest entries of all gateways, newest first."""
        order = (_AUDIT.c.at.desc(), _AUDIT.c.number.desc())
        with self._database.reading() as connection:
            rows = connection.execute(sa.select(_AUDIT).order_by(*order).limit(limit)).mappings()
            return [_as_read(row) for row in rows]


def _written(boot_id: str, number: int, entry: dict[str, Any]) -> dict[str, Any]:
    row = {name: entry[name] for name in ("actor", "role", "action", "target", "outcome", "request_id")}
    return {
        **row,
        "boot_id": boot_id,
        "number": number,
        "at": datetime.fromisoformat(entry["at"]).timestamp(),
        "before_json": json.dumps(entry["before"]),
        "after_json": json.dumps(entry["after"]),
    }


def _as_read(row: Any) -> dict[str, Any]:
    return {
        "at": datetime.fromtimestamp(row["at"], UTC).isoformat(timespec="milliseconds"),
        "actor": row["actor"],
        "role": row["role"],
        "action": row["action"],
        "target": row["target"],
        "before": json.loads(row["before_json"]),
        "after": json.loads(row["after_json"]),
        "outcome": row["outcome"],
        "request_id": row["request_id"],
    }
