"""Tenants and keys of a database, judged as those of the file are, and put beside them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from trio_gateway.config._fields import Section
from trio_gateway.config._problems import Path, dotted
from trio_gateway.config._tables import KeySettings, TenantSettings
from trio_gateway.config._validate import message_of

Entry = Mapping[str, Any]

S = TypeVar("S", bound=Section)


@dataclass(frozen=True, slots=True)
class Merged:
    """All tenants, with all their keys.

    Attributes:
        ignored: which entries of the database do not count, and why; a sentence each.
    """

    tenants: tuple[TenantSettings, ...]
    ignored: tuple[str, ...]


class TenantMerger:
    """Puts tenants and keys of a database beside those of the file, which count where both have one.

    What was judged before is not judged again: of many thousand keys, few change at a time.
    """

    def __init__(self, of_file: Iterable[TenantSettings]) -> None:
        self._of_file = {tenant.id: tenant for tenant in of_file}
        self._taken = {
            name for tenant in self._of_file.values() for key in tenant.keys for name in (key.id, key.hash)
        }
        self._tenants: _Judge[TenantSettings] = _Judge(TenantSettings, "tenant", ("tenants", 0))
        self._keys: _Judge[KeySettings] = _Judge(KeySettings, "key", ("tenants", 0, "keys", 0))

    def merge(self, tenants: Iterable[Entry], keys: Iterable[tuple[str, Entry]]) -> Merged:
        """Answer all of them together.

        Args:
            tenants: as the file would write them, without keys. Nothing is expected of their values.
            keys: likewise, each after the id of its tenant, which may be one of the file.
        """
        ignored: list[str] = []
        merged = dict(self._of_file)
        for entry in tenants:
            if entry["id"] in self._of_file:
                ignored.append(f"tenant {entry['id']}: the configuration file has one of that name")
            elif (tenant := self._tenants.judge({**entry, "keys": ()}, ignored)) is not None:
                merged[tenant.id] = tenant
        added: dict[str, list[KeySettings]] = {}
        for owner, entry in keys:
            key = None
            if owner not in merged:
                reason = f"there is no tenant {owner}"
            elif entry["id"] in self._taken or entry["hash"] in self._taken:
                reason = "the configuration file has it, or another one of that name"
            elif (key := self._keys.judge(entry, ignored)) is None:
                continue
            elif set(key.tiers).isdisjoint(merged[owner].tiers):
                key, reason = None, "its tenant may ask for none of its tiers"
            if key is None:
                ignored.append(f"key {entry['id']}: {reason}")
            else:
                added.setdefault(owner, []).append(key)
        for owner, more in added.items():
            merged[owner] = merged[owner].model_copy(update={"keys": (*merged[owner].keys, *more)})
        self._tenants.forget()
        self._keys.forget()
        return Merged(tuple(merged.values()), tuple(ignored))


class _Judge(Generic[S]):
    """Judges entries as the file's are, each only once for as long as it is the same."""

    def __init__(self, kind: type[S], name: str, place: Path) -> None:
        self._kind = kind
        self._name = name
        self._place = place
        self._before: dict[str, tuple[Entry, S]] = {}
        self._now: dict[str, tuple[Entry, S]] = {}

    def judge(self, entry: Entry, ignored: list[str]) -> S | None:
        """Answer the settings that an entry means; None, with a reason, if the file could not have it."""
        known = self._before.get(entry["id"])
        if known is None or known[0] != entry:
            try:
                known = entry, self._kind.model_validate(entry)
            except ValidationError as error:
                first = error.errors(include_url=False)[0]
                wrong = message_of((*self._place, *first["loc"]), first)
                ignored.append(f"{self._name} {entry['id']}: {dotted(first['loc'])}: {wrong}")
                return None
        self._now[entry["id"]] = known
        return known[1]

    def forget(self) -> None:
        """Forget what was not judged since the last time."""
        self._before, self._now = self._now, {}
