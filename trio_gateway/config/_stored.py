"""Tenants and keys of a database, judged as those of the file are, and put beside them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ValidationError

from trio_gateway.config._fields import Section
from trio_gateway.config._tables import KeySettings, TenantSettings

S = TypeVar("S", bound=Section)


@dataclass(frozen=True, slots=True)
class Merged:
    """All tenants, with all their keys.

    Attributes:
        ignored: which entries of the database do not count, and why; a sentence each.
    """

    tenants: tuple[TenantSettings, ...]
    ignored: tuple[str, ...]


def merge_tenants(
    of_file: Iterable[TenantSettings],
    tenants: Iterable[Mapping[str, Any]],
    keys: Iterable[tuple[str, Mapping[str, Any]]],
) -> Merged:
    """Put what a database has beside what the file has. What stands in the file counts.

    Args:
        tenants: as the file would write them, without keys. Nothing is expected of their values.
        keys: likewise, each after the id of its tenant, which may be one of the file.
    """
    ignored: list[str] = []
    merged = {tenant.id: tenant for tenant in of_file}
    ids = set(merged)
    taken = {name for tenant in merged.values() for key in tenant.keys for name in (key.id, key.hash)}
    for entry in tenants:
        name = f"tenant {entry['id']}"
        if entry["id"] in ids:
            ignored.append(f"{name}: the configuration file has one of that name")
        elif (tenant := _judged(TenantSettings, {**entry, "keys": ()}, name, ignored)) is not None:
            merged[tenant.id] = tenant
    added: dict[str, list[KeySettings]] = {}
    for owner, entry in keys:
        name = f"key {entry['id']}"
        if owner not in merged:
            ignored.append(f"{name}: there is no tenant {owner}")
        elif entry["id"] in taken or entry["hash"] in taken:
            ignored.append(f"{name}: the configuration file has it, or another one of that name")
        elif (key := _judged(KeySettings, entry, name, ignored)) is not None:
            if set(key.tiers).isdisjoint(merged[owner].tiers):
                ignored.append(f"{name}: its tenant may ask for none of its tiers")
            else:
                added.setdefault(owner, []).append(key)
    for owner, more in added.items():
        merged[owner] = merged[owner].model_copy(update={"keys": (*merged[owner].keys, *more)})
    return Merged(tuple(merged.values()), tuple(ignored))


def _judged(kind: type[S], entry: Mapping[str, Any], name: str, ignored: list[str]) -> S | None:
    try:
        return kind.model_validate(entry)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        ignored.append(f"{name}: {where}: {first['msg']}")
        return None
