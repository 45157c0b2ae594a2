"""Tenants and keys in a database, SQLite and PostgreSQL: what is stored, and that every change is seen."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
import sqlalchemy as sa

from tests.ledger.databases import rows_at
from trio_gateway.database import RowsRefused, StoreFailed
from trio_gateway.ledger import read_usage
from trio_gateway.tenancy import RosterRefused, Stored, StoredKey, StoredTenant
from trio_gateway.tenancy._roster import Roster
from trio_gateway.tenancy._stored import KEY_MEMBERS, TENANT_MEMBERS

NOW = 1_793_491_200.0
LATER = NOW + 60
HASH = "sha256:" + 64 * "a"
OTHER = "sha256:" + 64 * "b"
ALL_OF_TENANT = {
    "weight": 2.5,
    "tiers": ("batch", "standard"),
    "models": ("org/m1", "ümlaut"),
    "max_concurrency": 8,
    "max_queued": 0,
    "requests_per_minute": 10**9,
    "tokens_per_minute": 10**12,
    "default_timeout": 1.5,
    "max_timeout": 600.0,
    "engine_fields": True,
}
ALL_OF_KEY = {
    "expires": datetime(2027, 1, 31, 12, 0, 0, 250_000, UTC),
    "models": ("org/m1",),
    "tiers": ("batch",),
    "requests_per_minute": 60,
    "tokens_per_minute": 1000,
}


@pytest.fixture
def roster(url: str) -> Iterator[Roster]:
    roster = Roster(url)
    yield roster
    roster.close()


def as_file(members: dict[str, object]) -> dict[str, object]:
    """Lists are read as lists, as from a file."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in members.items()}


def change(url: str, statement: str) -> None:
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    with engine.begin() as connection:
        connection.execute(sa.text(statement))


def test_nothing_is_there_at_first_and_nothing_was(roster: Roster) -> None:
    assert roster.read() == roster.newer(None) == Stored(0, (), ())


def test_what_is_stored_is_read_as_it_was(roster: Roster) -> None:
    assert set(ALL_OF_TENANT) == set(TENANT_MEMBERS)
    assert set(ALL_OF_KEY) == set(KEY_MEMBERS)
    roster.add_tenant("acme", ALL_OF_TENANT, NOW)
    roster.add_tenant("plain", {"engine_fields": False}, NOW)
    roster.add_key("k1", "acme", HASH, ALL_OF_KEY, NOW)
    roster.add_key("k2", "plain", OTHER, {}, NOW)
    stored = roster.read()
    assert stored.tenants == (
        StoredTenant("acme", as_file(ALL_OF_TENANT), NOW),
        StoredTenant("plain", {"engine_fields": False}, NOW),
    )
    assert stored.keys == (
        StoredKey("k1", "acme", HASH, as_file(ALL_OF_KEY), NOW),
        StoredKey("k2", "plain", OTHER, {}, NOW),
    )
    assert stored.keys[0].entry == {"id": "k1", "hash": HASH, **as_file(ALL_OF_KEY)}
    assert type(stored.tenants[0].members["engine_fields"]) is bool


def test_every_change_is_another_revision_and_what_failed_is_none(roster: Roster, url: str) -> None:
    seen = [roster.read().revision]

    def changed() -> bool:
        newer = roster.newer(seen[-1])
        if newer is not None:
            assert newer.revision not in seen
            seen.append(newer.revision)
        return newer is not None

    assert not changed()
    roster.add_tenant("acme", {}, NOW)
    assert changed()
    roster.set_tenant("acme", {"weight": 2.0})
    assert changed()
    roster.add_key("k1", "acme", HASH, {}, NOW)
    assert changed()
    for refused in (
        lambda: roster.add_tenant("acme", {}, NOW),
        lambda: roster.add_key("k1", "acme", OTHER, {}, NOW),
        lambda: roster.add_key("k2", "nobody", OTHER, {}, NOW),
        lambda: roster.set_tenant("nobody", {"weight": 1.0}),
        lambda: roster.remove_tenant("nobody", NOW),
        lambda: roster.revoke_key("k2", NOW),
    ):
        with pytest.raises(RosterRefused):
            refused()
        assert not changed()
    with pytest.raises(RowsRefused):
        roster.add_key("k2", "acme", HASH, {}, NOW)  # the same key under another name
    assert not changed()
    assert roster.revoke_key("k1", NOW)
    assert changed()
    roster.remove_tenant("acme", NOW)
    assert changed()
    assert rows_at(url, "SELECT revision FROM tenants_revision") == [{"revision": seen[-1]}]


def test_a_tenant_keeps_what_is_not_changed_and_has_the_default_of_what_is_unset(roster: Roster) -> None:
    roster.add_tenant("acme", ALL_OF_TENANT, NOW)
    roster.add_tenant("other", {"weight": 3.0}, NOW)
    roster.set_tenant("acme", {"weight": 4.0, "models": ("m2",), "max_queued": None})
    acme, other = roster.read().tenants
    expected = {**as_file(ALL_OF_TENANT), "weight": 4.0, "models": ["m2"]}
    del expected["max_queued"]
    assert (acme.members, acme.created_at, other.members) == (expected, NOW, {"weight": 3.0})


def test_a_revoked_key_is_left_out_for_gateways_and_its_name_stays_taken(roster: Roster) -> None:
    roster.add_tenant("acme", {}, NOW)
    roster.add_key("k1", "acme", HASH, {}, NOW)
    roster.add_key("k2", "acme", OTHER, {}, NOW)
    assert roster.revoke_key("k1", LATER)
    assert not roster.revoke_key("k1", LATER + 1)
    newer = roster.newer(None)
    assert newer is not None
    assert [key.id for key in newer.keys] == ["k2"]
    assert [(key.id, key.revoked_at) for key in roster.read().keys] == [("k1", LATER), ("k2", None)]
    with pytest.raises(RosterRefused, match="is or was a key k1"):
        roster.add_key("k1", "acme", "sha256:" + 64 * "c", {}, LATER)


def test_a_removed_tenant_takes_its_keys_along_and_no_others(roster: Roster) -> None:
    for tenant in ("acme", "other"):
        roster.add_tenant(tenant, {}, NOW)
    roster.add_key("k1", "acme", HASH, {}, NOW)
    roster.add_key("k2", "other", OTHER, {}, NOW)
    roster.add_key("k3", "acme", "sha256:" + 64 * "c", {}, NOW)
    roster.revoke_key("k3", NOW)
    assert roster.remove_tenant("acme", LATER) == 1
    roster.add_tenant("acme", {}, LATER)  # another one of that name gets none of them back
    newer = roster.newer(None)
    assert newer is not None
    assert [key.id for key in newer.keys] == ["k2"]
    assert [key.revoked_at for key in roster.read().keys] == [LATER, None, NOW]


def test_a_key_may_belong_to_a_tenant_that_stands_elsewhere(roster: Roster) -> None:
    roster.add_key("k1", "filed", HASH, {}, NOW, ["filed"])
    assert [(key.id, key.tenant) for key in roster.read().keys] == [("k1", "filed")]


@pytest.mark.parametrize(
    ("column", "value", "read"),
    [
        ("tiers", "'batch'", "batch"),
        ("tiers", "'{\"a\": 1}'", {"a": 1}),
        ("expires", "1e300", 1e300),
        ("expires", "-1e18", -1e18),
    ],
)
def test_nonsense_that_somebody_wrote_is_read_as_it_is(
    roster: Roster, url: str, column: str, value: str, read: object
) -> None:
    roster.add_key("k1", "filed", HASH, {}, NOW, ["filed"])
    change(url, f"UPDATE api_keys SET {column} = {value}")
    assert roster.read().keys[0].members == {column: read}


def test_records_and_tenants_share_a_database_and_each_has_its_own_version(url: str) -> None:
    together = threading.Barrier(4)
    failures: list[BaseException] = []

    def start(number: int) -> None:
        roster = Roster(url)
        together.wait(20)
        try:
            if number % 2:
                assert read_usage(url, ["tenant"]) == []
            roster.add_tenant(f"t{number}", {}, NOW)
        except (RowsRefused, StoreFailed) as error:
            failures.append(error)
        finally:
            roster.close()

    threads = [threading.Thread(target=start, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert rows_at(url) == []
    assert rows_at(url, "SELECT part FROM schema_version ORDER BY part") == [
        {"part": "exchanges"},
        {"part": "tenants"},
    ]
    assert rows_at(url, "SELECT revision FROM tenants_revision") == [{"revision": 4}]


def test_whoever_looks_waits_for_no_writer(url: str, roster: Roster) -> None:
    roster.add_tenant("acme", {}, NOW)
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    with engine.connect() as writer:
        if engine.dialect.name == "sqlite":
            writer.exec_driver_sql("BEGIN IMMEDIATE")
        writer.execute(sa.text("UPDATE tenants_revision SET revision = 99"))
        found = roster.newer(None)
        writer.rollback()
    assert found is not None
    assert found.revision == 1
