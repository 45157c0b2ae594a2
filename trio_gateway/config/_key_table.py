"""A new key as the file wants to have it, for ``trio-gateway keys create``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import get_args

from trio_gateway.config._load import parse_settings
from trio_gateway.config._problems import quoted
from trio_gateway.config._tables import Tier

Value = str | int | datetime | Sequence[str]


def key_table(tenant: str, members: Mapping[str, Value]) -> str:
    """Write one entry of a tenant's `keys`, on one line.

    Args:
        tenant: its id, which is only judged.
        members: `id`, `hash`, and what else a key may have; of lists that are empty nothing is written.

    Raises:
        ConfigurationError: the file would be refused with it.
    """
    pairs = [f"{name} = {_toml(value)}" for name, value in members.items() if value != ()]
    table = "{" + ", ".join(pairs) + "}"
    tiers = _toml(get_args(Tier))
    parse_settings(
        f"[[tenants]]\nid = {quoted(tenant)}\ntiers = {tiers}\nkeys = [{table}]\n", name="the new key"
    )
    return table


def parse_expiry(text: str, now: datetime) -> datetime:
    """Read ``90d``, ``2027-01-31`` or ``2027-01-31T12:00:00Z``; without a zone it is UTC, and midnight.

    Args:
        now: with its zone.

    Raises:
        ValueError: none of these, or not in the future.
    """
    if days := re.fullmatch(r"([0-9]{1,5})d", text):
        moment = now.replace(microsecond=0) + timedelta(days=int(days[1]))
    else:
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            raise ValueError('must be days such as "90d", or a date such as 2027-01-31') from None
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
    if moment <= now:
        raise ValueError("must be in the future")
    return moment


def _toml(value: Value) -> str:
    match value:
        case str():
            return quoted(value)
        case int():
            return str(value)
        case datetime():
            return value.isoformat().replace("+00:00", "Z")
    return f"[{', '.join(map(quoted, value))}]"
