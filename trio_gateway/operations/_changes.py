"""What differs between two configurations, when it counts, and what of it is in force at once. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from pydantic import SecretStr

from ..config import ModelSettings, Section, Settings, TenantSettings, WorkerSettings, quoted_key

NOW: Final = "now"
NEW_REQUESTS: Final = "new_requests"
RESTART: Final = "restart"
HIDDEN: Final = "***"

Entry = WorkerSettings | ModelSettings | TenantSettings
TABLES: Final = ("workers", "models", "tenants")
# Fields that hold what stood in a file, by the setting that names it.
_CONTENTS: Final = {"api_key": "api_key_file", "ca_pem": "ca", "join_token": "join_token_file"}
_READ_ANEW: Final = frozenset({"api_key", "ca_pem"})
_SECRET: Final = frozenset({"api_key", "ca_pem", "join_token", "hash"})
# Of a worker, what makes it another one.
_IDENTITY: Final = ("url", "kind")

LIMITED: Final = (
    "limits",
    "admission",
    "deadlines",
    "retry",
    "breaker",
    "probes",
    "fleet",
    "delivery",
    "stream",
    "websocket",
    "shutdown",
)
"""Sections whose settings are all limits."""

TENANT_LIMITS: Final = (
    "weight",
    "max_concurrency",
    "max_queued",
    "requests_per_minute",
    "tokens_per_minute",
    "default_timeout",
    "max_timeout",
)
WORKER_LIMITS: Final = ("slots", "weight", "cancel_grace")


@dataclass(frozen=True, slots=True)
class Change:
    """One setting that differs.

    Attributes:
        name: dotted; an entry of a table as a whole has the name of the entry.
        before, after: JSON values; None: it was not, or is not any more.
        applies: `NOW`, `NEW_REQUESTS` or `RESTART`.
    """

    name: str
    before: Any
    after: Any
    applies: str


def changes(old: Settings, new: Settings) -> list[Change]:
    """Name everything that differs, in the order of the settings."""
    found: list[Change] = []
    for section in Settings.model_fields:
        before, after = getattr(old, section), getattr(new, section)
        if section in TABLES:
            found += _of_table(section, before, after)
        else:
            found += _of_section(section, before, after)
    if _opens_admin(old, new):
        found = [_later(each) if each.name == "admin.tokens" else each for each in found]
    return list({each.name: each for each in found}.values())


def _later(change: Change) -> Change:
    return Change(change.name, change.before, change.after, RESTART)


def _of_section(name: str, before: Section, after: Section) -> Iterator[Change]:
    for key, field in type(after).model_fields.items():
        old, new = getattr(before, key), getattr(after, key)
        path = f"{name}.{quoted_key(_CONTENTS.get(key, key))}"
        if isinstance(old, Section) and isinstance(new, Section) and type(old) is type(new):
            yield from _of_section(path, old, new)
        elif old != new:
            when = NOW if key in _READ_ANEW else applies(field)
            yield Change(path, json_value(old, key), json_value(new, key), when)


def _of_table(name: str, before: Iterable[Entry], after: Iterable[Entry]) -> Iterator[Change]:
    old, new = {each.id: each for each in before}, {each.id: each for each in after}
    whole = NEW_REQUESTS if name == "models" else NOW
    for id_ in [*old, *(each for each in new if each not in old)]:
        path = f"{name}.{quoted_key(id_)}"
        here, there = old.get(id_), new.get(id_)
        fixed = _is_fixed(here) or _is_fixed(there)
        if here is None or there is None:
            when = RESTART if fixed else whole
            yield Change(path, json_value(here), json_value(there), when)
        else:
            for change in _of_section(path, here, there):
                yield _later(change) if fixed else change


def _is_fixed(entry: Entry | None) -> bool:
    """Whether an entry counts from the start of the process only: a name or selector of many."""
    return isinstance(entry, WorkerSettings) and entry.many


def _opens_admin(old: Settings, new: Settings) -> bool:
    """Whether other tokens would guard an address for which they were not meant."""
    return old.admin.bind != new.admin.bind


def applies(field: Any) -> str:
    """Answer when a change of a setting counts."""
    extra = field.json_schema_extra
    return RESTART if extra is None else str(extra["applies"]).replace(" ", "_")


def in_force(old: Settings, new: Settings) -> Settings:
    """Answer what is in force after ``new`` was read: what needs a restart is as it was."""
    kept: dict[str, Any] = {"models": new.models, "tenants": new.tenants}
    for name in Settings.model_fields:
        if name not in TABLES:
            kept[name] = _section_in_force(getattr(old, name), getattr(new, name))
    if _opens_admin(old, new):
        kept["admin"] = kept["admin"].model_copy(update={"tokens": old.admin.tokens})
    known, wanted = {each.id: each for each in old.workers}, {each.id for each in new.workers}
    workers = []
    for worker in new.workers:
        before = known.get(worker.id)
        if not (_is_fixed(before) or _is_fixed(worker)):
            workers.append(worker)
        elif before is not None:
            workers.append(before)
    kept["workers"] = (
        *workers,
        *(each for each in old.workers if _is_fixed(each) and each.id not in wanted),
    )
    return new.model_copy(update=kept)


def _section_in_force(old: Section, new: Section) -> Section:
    kept: dict[str, Any] = {}
    for key, field in type(new).model_fields.items():
        before, after = getattr(old, key), getattr(new, key)
        if isinstance(before, Section) and isinstance(after, Section) and type(before) is type(after):
            kept[key] = _section_in_force(before, after)
        elif applies(field) == RESTART:
            kept[key] = before
    return new.model_copy(update=kept)


def is_another(old: WorkerSettings, new: WorkerSettings) -> bool:
    """Whether two entries of one id mean different workers, not one that is described anew."""
    return any(getattr(old, name) != getattr(new, name) for name in _IDENTITY)


def with_secrets_of(old: Settings, new: Settings) -> Settings:
    """Answer new settings with what stood in the old ones' files: a change of a limit reads no key anew."""
    known = {each.id: each for each in old.workers}
    workers = tuple(
        each.model_copy(update={name: getattr(known[each.id], name) for name in ("api_key", "ca_pem")})
        if each.id in known
        else each
        for each in new.workers
    )
    internal = new.internal.model_copy(update={"join_token": old.internal.join_token})
    return new.model_copy(update={"workers": workers, "internal": internal})


# Reading ----------------------------------------------------------------------------------------------------


def limit_names(settings: Settings) -> dict[str, tuple[Any, str]]:
    """Answer every limit by its dotted name: its value as JSON, and when a change of it counts."""
    found: dict[str, tuple[Any, str]] = {}
    for name in LIMITED:
        found.update(_limits_of(name, getattr(settings, name)))
    found.update(_limits_of("log", settings.log, ("level",)))
    tables: tuple[tuple[str, tuple[Entry, ...], tuple[str, ...]], ...] = (
        ("workers", settings.workers, WORKER_LIMITS),
        ("tenants", settings.tenants, TENANT_LIMITS),
    )
    for table, entries, keys in tables:
        for entry in entries:
            for name, (value, when) in _limits_of(f"{table}.{quoted_key(entry.id)}", entry, keys):
                found[name] = value, RESTART if _is_fixed(entry) else when
    return found


def _limits_of(
    name: str, section: Section, keys: tuple[str, ...] = ()
) -> Iterator[tuple[str, tuple[Any, str]]]:
    for key, field in type(section).model_fields.items():
        value = getattr(section, key)
        if keys and key not in keys:
            continue
        if isinstance(value, Section):
            yield from _limits_of(f"{name}.{key}", value)
        else:
            yield f"{name}.{key}", (json_value(value, key), applies(field))


def as_json(settings: Settings) -> dict[str, Any]:
    """Answer all settings, nested as in the file, with secrets hidden."""
    value: dict[str, Any] = json_value(settings)
    return value


def json_value(value: Any, name: str = "") -> Any:
    """Answer a value of the settings as JSON; nothing that opens a door is in it."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if name in _SECRET or isinstance(value, SecretStr):
        return HIDDEN
    if isinstance(value, Section):
        keys = (key for key in type(value).model_fields if key not in _CONTENTS)
        return {key: json_value(getattr(value, key), key) for key in keys}
    if isinstance(value, Mapping):
        return {str(key): json_value(each) for key, each in value.items()}
    if isinstance(value, tuple | list | frozenset):
        return [json_value(each) for each in value]
    return value.isoformat() if isinstance(value, datetime) else str(value)
