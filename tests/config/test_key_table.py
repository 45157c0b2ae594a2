"""Lines of new keys, as the file reads them."""

from __future__ import annotations

import tomllib
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.config.reading import HASH
from trio_gateway.config import ConfigurationError, key_table, parse_expiry, parse_settings

NOW = datetime(2026, 3, 1, 12, 0, 0, 999, tzinfo=UTC)


def read(line: str) -> dict[str, object]:
    found: dict[str, object] = tomllib.loads(f"key = {line}")["key"]
    return found


def test_a_line_has_what_was_said_and_nothing_else() -> None:
    members: dict[str, str | int | datetime] = {
        "id": "k1",
        "hash": HASH,
        "expires": NOW.replace(microsecond=0),
        "tokens_per_minute": 7,
    }
    line = key_table("acme", {**members, "models": ("a", 'b"c'), "tiers": ()})
    assert "\n" not in line
    assert read(line) == {**members, "models": ["a", 'b"c']}
    assert read(key_table("acme", {"id": "k1", "hash": HASH})) == {"id": "k1", "hash": HASH}


@given(st.text(max_size=20), st.lists(st.text(max_size=8), max_size=3, unique=True))
def test_a_line_is_refused_if_the_file_would_be(id_: str, models: list[str]) -> None:
    try:
        line = key_table("acme", {"id": id_, "hash": HASH, "models": tuple(models)})
    except ConfigurationError:
        return
    (key,) = parse_settings(f'[[tenants]]\nid = "acme"\nkeys = [{line}]').tenants[0].keys
    assert (key.id, key.models) == (id_, tuple(models) or ("*",))


@pytest.mark.parametrize(
    ("tenant", "members"),
    [
        ("a b", {}),
        ("acme", {"id": "k 1"}),
        ("acme", {"tiers": ("fast",)}),
        ("acme", {"tokens_per_minute": 0}),
    ],
)
def test_what_the_file_does_not_know_is_no_key(tenant: str, members: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError):
        key_table(tenant, {"id": "k1", "hash": HASH, **members})


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("90d", datetime(2026, 5, 30, 12, tzinfo=UTC)),
        ("2027-01-31", datetime(2027, 1, 31, tzinfo=UTC)),
        ("2027-01-31T12:30:00Z", datetime(2027, 1, 31, 12, 30, tzinfo=UTC)),
        ("2027-01-31T12:30:00+02:00", datetime(2027, 1, 31, 10, 30, tzinfo=UTC)),
        ("2026-03-01T13:00:00+00:30", datetime(2026, 3, 1, 13, tzinfo=timezone(timedelta(minutes=30)))),
    ],
)
def test_an_end_is_days_from_now_or_a_date(text: str, moment: datetime) -> None:
    assert parse_expiry(text, NOW) == moment


@pytest.mark.parametrize(
    "text", ["", "soon", "90", "90 d", "-1d", "0d", "2026-02-30", "2026-03-01", "1999-01-01T00:00Z"]
)
def test_no_key_ends_before_it_begins_or_at_no_time(text: str) -> None:
    with pytest.raises(ValueError, match=r"must be (in the future|days)"):
        parse_expiry(text, NOW)
