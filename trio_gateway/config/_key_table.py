"""New keys and tenants, judged by the rules of the file, for ``trio-gateway keys`` and ``tenants``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import get_args

from trio_gateway.config._load import parse_settings
from trio_gateway.config._problems import quoted
from trio_gateway.config._sections import DeadlinesSettings
from trio_gateway.config._tables import TenantSettings, Tier

Value = str | float | bool | datetime | Sequence[str]


def key_table(tenant: str, members: Mapping[str, Value], owner: TenantSettings | None = None) -> str:
    """Write one entry of a tenant's `keys`, on one line.

    Args:
        tenant: its id, which is only judged.
        members: `id`, `hash`, and what else a key may have; of lists that are empty nothing is written.
        owner: the tenant, if it is known what it may use: the key can be given no more.

    Raises:
        ConfigurationError: the file would be refused with it.
    """
    table = "{" + ", ".join(_pairs({name: value for name, value in members.items() if value != ()})) + "}"
    tiers, models = (get_args(Tier), ("*",)) if owner is None else (owner.tiers, owner.models)
    lines = _pairs({"id": tenant, "tiers": tiers, "models": models})
    parse_settings("\n".join(["[[tenants]]", *lines, f"keys = [{table}]"]), name="the new key")
    return table


def judge_tenant(tenant: str, members: Mapping[str, Value], deadlines: DeadlinesSettings) -> TenantSettings:
    """Read a tenant without keys as if it stood in a file.

    Args:
        tenant: its id.
        members: what else it shall have.
        deadlines: of that file.

    Raises:
        ConfigurationError: the file would be refused with it.
    """
    limits = {"default": deadlines.default, "maximum": deadlines.maximum}
    lines = ["[deadlines]", *_pairs(limits), "[[tenants]]", *_pairs({"id": tenant, **members}), "keys = []"]
    return parse_settings("\n".join(lines), name="the tenant").tenants[0]


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


def _pairs(members: Mapping[str, Value]) -> list[str]:
    return [f"{name} = {_toml(value)}" for name, value in members.items()]


def _toml(value: Value) -> str:
    match value:
        case str():
            return quoted(value)
        case bool():
            return str(value).lower()
        case int() | float():
            return str(value)
        case datetime():
            return value.isoformat().replace("+00:00", "Z")
    return f"[{', '.join(map(quoted, value))}]"
