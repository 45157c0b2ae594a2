"""The commands ``keys`` and ``tenants``: who may call, as the file has it and as the database does."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..config import (
    ConfigurationError,
    KeySettings,
    Merged,
    Settings,
    TenantMerger,
    TenantSettings,
    judge_tenant,
    key_table,
    names_database,
    parse_expiry,
)
from ..database import RowsRefused, StoreFailed
from ..tenancy import RosterRefused, Stored, StoredKey, new_key, open_roster
from ._common import (
    CANNOT_START,
    DEFAULT_FILE,
    USAGE_ERROR,
    ConfigFile,
    ConfigOption,
    Overrides,
    choose,
    complain,
    load,
)

if TYPE_CHECKING:
    from ..tenancy import Roster

keys = typer.Typer(help="API keys of tenants.", no_args_is_help=True)
tenants = typer.Typer(help="Tenants in the database.", no_args_is_help=True)

OF_TENANT = "the tenant's"  # what a key has of its own only where an option says so
DEFAULT = "the default"
IN_FILE = "stands in the configuration file: change that, and reload"
KEY_COLUMNS = (
    "id",
    "tenant",
    "state",
    "expires",
    "models",
    "tiers",
    "requests_per_minute",
    "tokens_per_minute",
    "source",
)
TENANT_COLUMNS = (
    "id",
    "keys",
    "weight",
    "tiers",
    "models",
    "max_concurrency",
    "max_queued",
    "requests_per_minute",
    "tokens_per_minute",
    "source",
)
FILE = "file"
DATABASE = "database"

NamedConfig = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        metavar="FILE",
        help="The configuration file, which names the database.",
        show_default=str(DEFAULT_FILE),
    ),
]
TenantId = Annotated[str, typer.Argument(metavar="ID", help="The tenant's id.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]


def _optional(meaning: str, *names: str) -> Any:
    return typer.Option(*names, help=meaning, show_default=DEFAULT)


Weight = Annotated[float | None, _optional("Its share of busy workers, compared with other tenants.")]
Tiers = Annotated[list[str] | None, _optional("Priorities that it may ask for, with commas between.")]
Models = Annotated[list[str] | None, _optional("Models that it may use, with commas between.")]
MaxConcurrency = Annotated[int | None, _optional("Requests at workers at a time.")]
MaxQueued = Annotated[int | None, _optional("Requests waiting.")]
RequestRate = Annotated[int | None, _optional("Requests a minute.", "--requests-per-minute")]
TokenRate = Annotated[int | None, _optional("Tokens a minute.", "--tokens-per-minute")]
DefaultTimeout = Annotated[str | None, _optional("Deadline of requests that name none, such as 10m.")]
MaxTimeout = Annotated[str | None, _optional("Longest deadline that its requests can ask for.")]
EngineFields = Annotated[
    bool | None,
    _optional("Whether it may send fields that steer the engine.", "--engine-fields/--no-engine-fields"),
]


# Keys -------------------------------------------------------------------------------------------------------


@keys.command("create")
def create_key(
    tenant: Annotated[str, typer.Option(help="Id of the tenant that it shall belong to.")],
    file: ConfigFile = None,
    config: ConfigOption = None,
    overrides: Overrides = None,
    id: Annotated[str | None, typer.Option(help="Its name in records.", show_default="made up")] = None,
    expires: Annotated[
        str | None, typer.Option(help="Days such as 90d, or a date.", show_default="never")
    ] = None,
    models: Annotated[
        list[str] | None,
        typer.Option(help="Models that it may use, with commas between.", show_default=OF_TENANT),
    ] = None,
    tiers: Annotated[
        list[str] | None,
        typer.Option(help="Priorities that it may ask for, likewise.", show_default=OF_TENANT),
    ] = None,
    requests_per_minute: Annotated[
        int | None, typer.Option(help="Requests a minute.", show_default=OF_TENANT)
    ] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(help="Tokens a minute.", show_default=OF_TENANT)
    ] = None,
) -> None:
    """Make a key and print it, this once. It is stored in the database that the configuration names.

    Without one, the line with its hash for the configuration is printed below it.
    """
    settings = _settings_with_database(file, config, overrides)
    id_, key, hash_ = new_key(id)
    try:
        moment = parse_expiry(expires, datetime.now(UTC)) if expires is not None else None
    except ValueError as error:
        complain(f"--expires {error}")
    members = _given(
        expires=moment,
        models=_split(models),
        tiers=_split(tiers),
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
    )
    if settings is not None:
        _store_key(settings, StoredKey(id_, tenant, hash_, members, time.time()))
        typer.echo(key)
        typer.echo(f"Key {id_} of tenant {tenant} is stored. Nobody can show it again.", err=True)
        return
    with _judging():
        line = key_table(tenant, {"id": id_, "hash": hash_, **members})
    typer.echo(key)
    typer.echo(line)
    typer.echo(f"Give the key away, and put the line into the keys of tenant {tenant}.", err=True)


def _store_key(settings: Settings, key: StoredKey) -> None:
    with _roster(settings) as roster:
        stored = roster.read()
        owner = next((one for one in _merged(settings, stored).tenants if one.id == key.tenant), None)
        with _judging():
            key_table(key.tenant, key.entry, owner)
        _refuse_ignored(settings, stored, replace(stored, keys=(*stored.keys, key)))
        of_file = [tenant.id for tenant in settings.tenants]
        roster.add_key(key.id, key.tenant, key.hash, key.members, key.created_at, of_file)
    _note_models(settings, key.members)


@keys.command("list")
def list_keys(
    file: ConfigFile = None,
    config: ConfigOption = None,
    overrides: Overrides = None,
    tenant: Annotated[str | None, typer.Option(help="Only those of this tenant.", show_default="all")] = None,
    revoked: Annotated[bool, typer.Option("--revoked", help="Those too that were revoked.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the keys of the configuration and of its database."""
    settings = load(choose(file, config), overrides)
    stored = _read(settings)
    of_file = [
        _key_row(key.id, owner.id, FILE, {name: getattr(key, name) for name in key.model_fields_set})
        for owner in settings.tenants
        for key in owner.keys
    ]
    rows = [
        *of_file,
        *(
            _key_row(key.id, key.tenant, DATABASE, key.members, key.created_at, key.revoked_at)
            for key in stored.keys
        ),
    ]
    wanted = [row for row in rows if tenant in (None, row["tenant"])]
    _print_rows([row for row in wanted if revoked or row["state"] != "revoked"], KEY_COLUMNS, as_json)
    _tell_ignored(settings, stored)


def _key_row(
    id_: str,
    tenant: str,
    source: str,
    members: Mapping[str, Any],
    created: float | None = None,
    revoked: float | None = None,
) -> dict[str, Any]:
    expires = members.get("expires")
    over = isinstance(expires, datetime) and expires <= datetime.now(UTC)
    state = "revoked" if revoked is not None else "expired" if over else "good"
    rest = {name: members.get(name) for name in KeySettings.model_fields if name not in ("id", "hash")}
    times = {"created": _moment(created), "revoked": _moment(revoked)}
    return {"id": id_, "tenant": tenant, "state": state, **rest, **times, "source": source}


@keys.command("revoke")
def revoke_keys(
    ids: Annotated[list[str], typer.Argument(metavar="IDS", help="Ids of keys.", show_default=False)],
    config: NamedConfig = None,
    overrides: Overrides = None,
) -> None:
    """Let keys of the database open nothing any more."""
    settings = _settings(config, overrides)
    of_file = {key.id: tenant.id for tenant in settings.tenants for key in tenant.keys}
    with _roster(settings) as roster:
        known = {key.id for key in roster.read().keys}
        for id_ in ids:
            if id_ not in known and id_ in of_file:
                complain(f"key {id_} {IN_FILE}, in tenant {of_file[id_]}")
            if id_ not in known:
                complain(f"there is no key {id_} in the database")
        for id_ in ids:
            first = roster.revoke_key(id_, time.time())
            typer.echo(f"Key {id_} is revoked." if first else f"Key {id_} was revoked before.", err=True)
            if id_ in of_file:
                typer.echo(f"note: the configuration file has a key {id_} too, which is good", err=True)


# Tenants ----------------------------------------------------------------------------------------------------


@tenants.command("create")
def create_tenant(
    id: TenantId,
    config: NamedConfig = None,
    overrides: Overrides = None,
    weight: Weight = None,
    tiers: Tiers = None,
    models: Models = None,
    max_concurrency: MaxConcurrency = None,
    max_queued: MaxQueued = None,
    requests_per_minute: RequestRate = None,
    tokens_per_minute: TokenRate = None,
    default_timeout: DefaultTimeout = None,
    max_timeout: MaxTimeout = None,
    engine_fields: EngineFields = None,
) -> None:
    """Store a tenant in the database."""
    settings = _settings(config, overrides)
    given = _given(
        weight=weight,
        tiers=_split(tiers),
        models=_split(models),
        max_concurrency=max_concurrency,
        max_queued=max_queued,
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        default_timeout=_duration(default_timeout),
        max_timeout=_duration(max_timeout),
        engine_fields=engine_fields,
    )
    with _judging():
        judged = judge_tenant(id, given, settings.deadlines)
    if any(tenant.id == id for tenant in settings.tenants):
        complain(f"the configuration file has a tenant {id}")
    with _roster(settings) as roster:
        first = roster.read().revision == 0
        roster.add_tenant(id, {name: getattr(judged, name) for name in given}, time.time())
    typer.echo(f"Tenant {id} is stored. It needs a key: trio-gateway keys create --tenant {id}", err=True)
    if first and not settings.tenants:
        typer.echo("note: gateways with this database serve nobody without a key from now on", err=True)
    _note_models(settings, given)


@tenants.command("set")
def set_tenant(
    id: TenantId,
    config: NamedConfig = None,
    overrides: Overrides = None,
    weight: Weight = None,
    tiers: Tiers = None,
    models: Models = None,
    max_concurrency: MaxConcurrency = None,
    max_queued: MaxQueued = None,
    requests_per_minute: RequestRate = None,
    tokens_per_minute: TokenRate = None,
    default_timeout: DefaultTimeout = None,
    max_timeout: MaxTimeout = None,
    engine_fields: EngineFields = None,
    unset: Annotated[
        list[str] | None,
        typer.Option(help="An option that shall have its default again, such as max-queued; repeatable."),
    ] = None,
) -> None:
    """Change a tenant of the database. What no option names stays as it is."""
    settings = _settings(config, overrides)
    given = _given(
        weight=weight,
        tiers=_split(tiers),
        models=_split(models),
        max_concurrency=max_concurrency,
        max_queued=max_queued,
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        default_timeout=_duration(default_timeout),
        max_timeout=_duration(max_timeout),
        engine_fields=engine_fields,
    )
    dropped = _names_to_unset(unset, given)
    if not given and not dropped:
        complain("there is nothing to change: name an option")
    with _roster(settings) as roster:
        stored = roster.read()
        before = next((tenant for tenant in stored.tenants if tenant.id == id), None)
        if before is None:
            of_file = any(tenant.id == id for tenant in settings.tenants)
            complain(f"tenant {id} {IN_FILE}" if of_file else f"there is no tenant {id} in the database")
        kept = {name: value for name, value in before.members.items() if name not in dropped}
        with _judging():
            judged = judge_tenant(id, {**kept, **given}, settings.deadlines)
        changes = {name: getattr(judged, name) for name in given}
        after = replace(before, members={**kept, **changes})
        others = tuple(tenant for tenant in stored.tenants if tenant.id != id)
        _refuse_ignored(settings, stored, replace(stored, tenants=(*others, after)))
        roster.set_tenant(id, changes | dict.fromkeys(dropped))
    typer.echo(f"Tenant {id} is changed.", err=True)
    _note_models(settings, changes)


def _names_to_unset(options: list[str] | None, given: Mapping[str, Any]) -> list[str]:
    names = [name.removeprefix("--").replace("-", "_") for name in _split(options)]
    for name in names:
        if name in ("id", "keys") or name not in TenantSettings.model_fields:
            complain(f"--unset {name}: a tenant has no such option")
        if name in given:
            complain(f"--unset {name}: it is set by another option")
    return names


@tenants.command("list")
def list_tenants(
    file: ConfigFile = None,
    config: ConfigOption = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """List the tenants of the configuration and of its database."""
    settings = load(choose(file, config), overrides)
    stored = _read(settings)
    of_file = {tenant.id for tenant in settings.tenants}
    rows = [
        {
            **{name: getattr(tenant, name) for name in TenantSettings.model_fields},
            "keys": len(tenant.keys),
            "source": FILE if tenant.id in of_file else DATABASE,
        }
        for tenant in _merged(settings, stored).tenants
    ]
    _print_rows(rows, TENANT_COLUMNS, as_json)
    _tell_ignored(settings, stored)


@tenants.command("remove")
def remove_tenant(id: TenantId, config: NamedConfig = None, overrides: Overrides = None) -> None:
    """Forget a tenant of the database, and revoke its keys. What it has running or waiting goes on."""
    settings = _settings(config, overrides)
    with _roster(settings) as roster:
        if any(tenant.id == id for tenant in settings.tenants):
            complain(f"tenant {id} {IN_FILE}")
        revoked = roster.remove_tenant(id, time.time())
    typer.echo(f"Tenant {id} is removed, and {revoked} of its keys revoked.", err=True)


# The configuration and its database -------------------------------------------------------------------------


def _settings(config: Path | None, overrides: list[str] | None) -> Settings:
    settings = load(choose(None, config), overrides)
    if settings.database.url is None:
        complain("the configuration names no database.url: its tenants and keys stand in the file")
    return settings


def _settings_with_database(
    file: Path | None, config: Path | None, overrides: list[str] | None
) -> Settings | None:
    """Read the configuration; None: it names no database, and what else is wrong with it does not matter."""
    chosen = choose(file, config)
    if file is None and config is None and not chosen.exists():
        return None
    with _judging():
        return load(chosen, overrides) if names_database(chosen, os.environ, overrides or ()) else None


@contextmanager
def _roster(settings: Settings) -> Iterator[Roster]:
    """Use the database, and end with what it says against that."""
    assert settings.database.url is not None
    try:
        roster = open_roster(settings.database.url.value)
        try:
            yield roster
        finally:
            roster.close()
    except (RosterRefused, RowsRefused) as refused:
        complain(refused)
    except (OSError, StoreFailed) as error:
        complain(error, CANNOT_START)


@contextmanager
def _judging() -> Iterator[None]:
    """End with all that the configuration's rules have against something."""
    try:
        yield
    except ConfigurationError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(USAGE_ERROR) from None


def _read(settings: Settings) -> Stored:
    if settings.database.url is None:
        return Stored(0, (), ())
    with _roster(settings) as roster:
        return roster.read()


def _merged(settings: Settings, stored: Stored) -> Merged:
    return TenantMerger(settings.tenants).merge(
        (tenant.entry for tenant in stored.tenants),
        ((key.tenant, key.entry) for key in stored.keys if key.revoked_at is None),
    )


def _refuse_ignored(settings: Settings, before: Stored, after: Stored) -> None:
    """End if a change would have gateways with this file ignore something that they do not ignore now."""
    known = _merged(settings, before).ignored
    for reason in _merged(settings, after).ignored:
        if reason not in known:
            complain(reason)


def _tell_ignored(settings: Settings, stored: Stored) -> None:
    for reason in _merged(settings, stored).ignored:
        typer.echo(f"note: {reason}; it does not count", err=True)


def _note_models(settings: Settings, members: Mapping[str, Any]) -> None:
    """Other gateways may have models that this configuration does not name, so it is no mistake for sure."""
    known = {model.id for model in settings.models}
    for model in members.get("models", ()):
        if known and model != "*" and model not in known:
            typer.echo(f"note: the configuration file has no model {model}", err=True)


# Options and output -----------------------------------------------------------------------------------------


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value not in (None, ())}


def _split(options: list[str] | None) -> tuple[str, ...]:
    """Answer the words of options that were given several times, or with commas between."""
    return tuple(word for option in options or () for word in option.split(","))


def _duration(text: str | None) -> float | str | None:
    """Let a plain number be seconds; of what else it is, the configuration's rules judge."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return text


def _moment(seconds: float | None) -> str | None:
    return None if seconds is None else _shown(datetime.fromtimestamp(seconds, UTC).replace(microsecond=0))


def _shown(value: Any) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:g}"
        case datetime():
            return value.isoformat().replace("+00:00", "Z")
        case list() | tuple():
            return ",".join(map(str, value))
    return str(value)


def _print_rows(rows: list[dict[str, Any]], columns: Iterable[str], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(rows, indent=2, default=_shown))
        return
    cells = [tuple(columns), *(tuple(_shown(row[name]) for name in columns) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        padded = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        typer.echo("  ".join(padded).rstrip())
