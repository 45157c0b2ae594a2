"""The tenants and keys in a database. Blocks: not for the loop.

Each change draws a new revision in the same transaction, by which gateways see that
there is something to read. Keys are stored as hashes, and stay when they are revoked:
no other key gets the name of one that is in records.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from datetime import UTC, datetime
from typing import Any, Final

import sqlalchemy as sa

from ..database.sql import Database, Steps
from ._stored import KEY_MEMBERS, TENANT_MEMBERS, Members, RosterRefused, Stored, StoredKey, StoredTenant

SILENCE_LIMIT: Final = 3_000  # milliseconds; a revoked key stays good for as long as nothing is heard

_STEPS: Final[Steps] = (
    (
        """CREATE TABLE tenants (
            id VARCHAR(64) NOT NULL PRIMARY KEY,
            weight DOUBLE PRECISION,
            tiers TEXT,
            models TEXT,
            max_concurrency BIGINT,
            max_queued BIGINT,
            requests_per_minute BIGINT,
            tokens_per_minute BIGINT,
            default_timeout DOUBLE PRECISION,
            max_timeout DOUBLE PRECISION,
            engine_fields BOOLEAN,
            created_at DOUBLE PRECISION NOT NULL
        )""",
        """CREATE TABLE api_keys (
            id VARCHAR(64) NOT NULL PRIMARY KEY,
            tenant VARCHAR(64) NOT NULL,
            hash VARCHAR(80) NOT NULL UNIQUE,
            expires DOUBLE PRECISION,
            models TEXT,
            tiers TEXT,
            requests_per_minute BIGINT,
            tokens_per_minute BIGINT,
            created_at DOUBLE PRECISION NOT NULL,
            revoked_at DOUBLE PRECISION
        )""",
        "CREATE INDEX api_keys_tenant ON api_keys (tenant)",
        "CREATE TABLE tenants_revision (revision BIGINT NOT NULL)",
        "INSERT INTO tenants_revision VALUES (0)",
    ),
)
_TENANTS: Final = sa.table("tenants", *map(sa.column, ("id", *TENANT_MEMBERS, "created_at")))
_KEYS: Final = sa.table(
    "api_keys", *map(sa.column, ("id", "tenant", "hash", *KEY_MEMBERS, "created_at", "revoked_at"))
)
_REVISION: Final = sa.table("tenants_revision", sa.column("revision", sa.BigInteger))
_LISTS: Final = ("tiers", "models")


class Roster:
    """One connection to them; see `Database`. Methods raise `StoreFailed` where the database does not work.

    Args:
        url: ``sqlite:///...`` or ``postgresql+psycopg://...``.

    Raises:
        ModuleNotFoundError: the driver is not installed.
    """

    def __init__(self, url: str) -> None:
        self._database = Database(url, "tenants", _STEPS, SILENCE_LIMIT)

    def close(self) -> None:
        """Let go of the connection; the next call makes a new one. Idempotent, never raises."""
        self._database.close()

    # -- reading

    def newer(self, revision: int | None) -> Stored | None:
        """See `RosterPort`."""
        with self._database.reading() as connection:
            # Read first: what is committed after it is seen, too early, and then read again.
            found = _revision(connection)
            return None if found == revision else _read(connection, found, revoked=False)

    def read(self) -> Stored:
        """Answer all that is stored, revoked keys too, by id."""
        with self._database.reading() as connection:
            return _read(connection, _revision(connection), revoked=True)

    # -- changing

    def add_tenant(self, tenant: str, members: Members, now: float) -> None:
        """Store a new tenant.

        Args:
            members: some of `TENANT_MEMBERS`.
            now: seconds since the epoch.

        Raises:
            RosterRefused: there is one of that name.
        """
        with self._database.writing() as connection:
            if _exists(connection, _TENANTS, tenant):
                raise RosterRefused(f"there is a tenant {tenant} already")
            connection.execute(
                sa.insert(_TENANTS), {"id": tenant, **_columns(TENANT_MEMBERS, members), "created_at": now}
            )
            _changed(connection)

    def set_tenant(self, tenant: str, members: Members) -> None:
        """Give a tenant other members, and the default to those whose value is None; the others stay.

        Raises:
            RosterRefused: there is no tenant of that name.
        """
        changes = _columns(tuple(members), members)
        with self._database.writing() as connection:
            if not _exists(connection, _TENANTS, tenant):
                raise RosterRefused(f"there is no tenant {tenant} in the database")
            connection.execute(sa.update(_TENANTS).where(_TENANTS.c.id == tenant).values(changes))
            _changed(connection)

    def remove_tenant(self, tenant: str, now: float) -> int:
        """Forget a tenant, and revoke its keys; answers how many.

        Raises:
            RosterRefused: there is no tenant of that name.
        """
        with self._database.writing() as connection:
            if not _exists(connection, _TENANTS, tenant):
                raise RosterRefused(f"there is no tenant {tenant} in the database")
            connection.execute(sa.delete(_TENANTS).where(_TENANTS.c.id == tenant))
            _changed(connection)
            return _revoke(connection, _KEYS.c.tenant == tenant, now)

    def add_key(
        self, key: str, tenant: str, hash_: str, members: Members, now: float, elsewhere: Collection[str] = ()
    ) -> None:
        """Store a new key.

        Args:
            hash_: as the configuration writes it.
            members: some of `KEY_MEMBERS`.
            now: seconds since the epoch.
            elsewhere: tenants that need not be stored here.

        Raises:
            RosterRefused: there is no such tenant, or there is or was a key of that name.
        """
        row = {"id": key, "tenant": tenant, "hash": hash_, **_columns(KEY_MEMBERS, members)}
        with self._database.writing() as connection:
            if tenant not in elsewhere and not _exists(connection, _TENANTS, tenant):
                raise RosterRefused(f"there is no tenant {tenant}")
            if _exists(connection, _KEYS, key):
                raise RosterRefused(f"there is or was a key {key} already, which records name")
            connection.execute(sa.insert(_KEYS), {**row, "created_at": now, "revoked_at": None})
            _changed(connection)

    def replace_key(
        self, key: str, tenant: str, successor: str, hash_: str, now: float, until: float
    ) -> None:
        """Store a new key like another one of a tenant, and let that end at a moment.

        Args:
            successor: name of the new one; ``hash_`` as the configuration writes it.
            now: seconds since the epoch.
            until: likewise; the old key is revoked at once if that is not later.

        Raises:
            RosterRefused: there is no such key, or it is revoked or over already, or the new name is taken.
        """
        with self._database.writing() as connection:
            row = connection.execute(sa.select(_KEYS).where(_KEYS.c.id == key)).mappings().first()
            if row is None or row["tenant"] != tenant:
                raise RosterRefused(f"there is no key {key} of {tenant} in the database")
            if row["revoked_at"] is not None or (row["expires"] is not None and row["expires"] <= now):
                raise RosterRefused(f"the key {key} opens nothing any more")
            if _exists(connection, _KEYS, successor):
                raise RosterRefused(f"there is or was a key {successor} already, which records name")
            new = {**row, "id": successor, "hash": hash_, "created_at": now}
            connection.execute(sa.insert(_KEYS), new)
            if until > now:
                end = until if row["expires"] is None else min(until, row["expires"])
                connection.execute(sa.update(_KEYS).where(_KEYS.c.id == key).values(expires=end))
            else:
                _revoke(connection, _KEYS.c.id == key, now)
            _changed(connection)

    def revoke_key(self, key: str, now: float) -> bool:
        """Let a key open nothing any more; answers False if it was revoked before.

        Raises:
            RosterRefused: there is no key of that name.
        """
        with self._database.writing() as connection:
            if not _exists(connection, _KEYS, key):
                raise RosterRefused(f"there is no key {key} in the database")
            _changed(connection)
            return _revoke(connection, _KEYS.c.id == key, now) == 1


# Rows -------------------------------------------------------------------------------------------------------


def _revision(connection: sa.Connection) -> int:
    return int(connection.execute(sa.select(_REVISION.c.revision)).scalar_one())


def _changed(connection: sa.Connection) -> None:
    connection.execute(sa.update(_REVISION).values(revision=_REVISION.c.revision + 1))


def _exists(connection: sa.Connection, table: sa.TableClause, id_: str) -> bool:
    return connection.execute(sa.select(table.c.id).where(table.c.id == id_)).first() is not None


def _revoke(connection: sa.Connection, which: sa.ColumnElement[bool], now: float) -> int:
    good = sa.and_(which, _KEYS.c.revoked_at.is_(None))
    return connection.execute(sa.update(_KEYS).where(good).values(revoked_at=now)).rowcount


def _read(connection: sa.Connection, revision: int, *, revoked: bool) -> Stored:
    keys = sa.select(_KEYS).order_by(_KEYS.c.id)
    if not revoked:
        keys = keys.where(_KEYS.c.revoked_at.is_(None))
    tenants = connection.execute(sa.select(_TENANTS).order_by(_TENANTS.c.id)).mappings()
    return Stored(
        revision,
        tuple(StoredTenant(row["id"], _members(TENANT_MEMBERS, row), row["created_at"]) for row in tenants),
        tuple(
            StoredKey(
                row["id"],
                row["tenant"],
                row["hash"],
                _members(KEY_MEMBERS, row),
                row["created_at"],
                row["revoked_at"],
            )
            for row in connection.execute(keys).mappings()
        ),
    )


def _columns(names: tuple[str, ...], members: Members) -> dict[str, Any]:
    return {name: _written(members.get(name)) for name in names}


def _written(value: Any) -> Any:
    match value:
        case tuple():
            return json.dumps(value)
        case datetime():
            return value.timestamp()
    return value


def _members(names: tuple[str, ...], row: Any) -> Members:
    return {name: _as_read(name, row[name]) for name in names if row[name] is not None}


def _as_read(name: str, value: Any) -> Any:
    """Answer a column's value as the configuration has it; or as it is, if somebody wrote nonsense."""
    try:
        if name in _LISTS:
            return json.loads(value)
        if name == "expires":
            return datetime.fromtimestamp(value, UTC)
    except (ValueError, TypeError, OverflowError, OSError):
        return value
    # SQLite has no truth of its own.
    return bool(value) if name == "engine_fields" and value in (0, 1) else value
