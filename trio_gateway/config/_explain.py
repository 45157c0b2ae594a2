"""The configuration as the gateway understood it, for ``trio-gateway check-config``."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from fractions import Fraction
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path as FilePath
from typing import Any, Final

from trio_gateway.config._addresses import Bind
from trio_gateway.config._certificates import certificate_complaint
from trio_gateway.config._cluster import StoreUrl
from trio_gateway.config._database import DatabaseUrl
from trio_gateway.config._document import TABLE_LISTS, Document
from trio_gateway.config._fields import Section, as_text
from trio_gateway.config._load import NO_ENVIRONMENT, load
from trio_gateway.config._problems import Path, quoted, quoted_key
from trio_gateway.config._sections import AdminTokenSettings, MutualTlsSettings, TiersSettings, TlsSettings
from trio_gateway.config._settings import Settings
from trio_gateway.config._tables import DEFAULT_SLOTS, KeySettings
from trio_gateway.units import format_size

_COMMENT_COLUMN: Final = 48


def explain(
    path: str | os.PathLike[str],
    environ: Mapping[str, str] = NO_ENVIRONMENT,
    overrides: Sequence[str] = (),
) -> str:
    """Tell what a configuration means: every effective value, as TOML, with the place that it comes from.

    Contents of key files are not told, nor are the hashes of keys.

    Args:
        path: the TOML file.
        environ: as `load_settings` takes it.
        overrides: as `load_settings` takes them.

    Raises:
        ConfigurationError: with every problem that was found; ``str()`` of it is made for printing.
    """
    loaded = load(path, environ, overrides)
    lines = [f"# {os.fspath(path)}: no problems. {_totals(loaded.settings)}"]
    lines += [f"# Note: {note}" for note in _notes(loaded.settings)]
    lines += _describe(loaded.settings, loaded.document)
    return "\n".join(lines)


def _totals(settings: Settings) -> str:
    slots = sum(worker.slots or DEFAULT_SLOTS for worker in settings.workers)
    share = settings.fleet.share
    part = "" if share == 1 else f" ({as_text(share)} of each worker's for this process)"
    return (
        f"{_count(len(settings.workers), 'worker')} with {_count(slots, 'slot')}{part}, "
        f"{_count(len(settings.models), 'model')}, {_count(len(settings.tenants), 'tenant')}."
    )


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _notes(settings: Settings) -> Iterator[str]:
    """Say what is allowed and may still surprise."""
    tls = settings.server.tls
    if tls is not None and (complaint := certificate_complaint(tls.certificate, tls.key)) is not None:
        yield f"clients will refuse the certificate of server.tls: {complaint}."
    for where, complaint in _mutual_complaints(settings):
        yield f"workers will refuse the certificate of {where}: {complaint}."
    registering = bool(settings.internal.bind)
    if not settings.workers:
        yield f"no worker is configured; /readyz answers 503{' until one registers' if registering else ''}."
    if untold := sum(worker.slots is None for worker in settings.workers):
        name = "names" if untold == 1 else "name"
        yield f"{_count(untold, 'worker')} {name} no slots; {DEFAULT_SLOTS} count until the engine tells."
    for worker in settings.workers:
        if worker.dns:
            yield f"worker {worker.id} is as many workers as {worker.endpoint.host} has addresses."
        if worker.pods is not None:
            yield f"worker {worker.id} is as many workers as ready pods have the labels {worker.pods}."
    if registering and all(network.is_loopback for network in settings.internal.allowed_networks):
        yield "internal.allowed_networks has only loopback addresses; no other machine's worker can register."
    if not settings.models:
        yield "no model is configured; every name that a worker reports is served."
    stored = settings.database.url is not None
    if not settings.tenants and not stored:
        yield "no tenant is configured; every caller is served, and keys are ignored."
    elif not settings.tenants and settings.serves_anonymous():
        yield "no tenant is configured; every caller is served until there is one in the database."
    yield from _notes_on_names(settings)
    for tenant in settings.tenants:
        if not tenant.keys and not stored:
            yield f"tenant {tenant.id} has no key; nobody can use it."
        for key in tenant.keys:
            if key.expires is not None and key.expires <= datetime.now(UTC):
                yield f"key {key.id} of tenant {tenant.id} has expired."


def _mutual_complaints(settings: Settings) -> Iterator[tuple[str, str]]:
    """Say which of the certificates that are shown to workers will not be accepted, and why."""
    shown = [(f"worker {each.id}", each.certificate, each.key) for each in settings.workers]
    if settings.internal.tls is not None:
        shown.append(("internal.tls", settings.internal.tls.certificate, settings.internal.tls.key))
    for where, certificate, key in shown:
        if certificate is not None and key is not None:
            complaint = certificate_complaint(certificate, key, as_client=True)
            if complaint is not None:
                yield where, complaint


def _notes_on_names(settings: Settings) -> Iterator[str]:
    """Say which workers are named by nothing, and which names are no worker's yet."""
    served = {worker.id for model in settings.models for worker in settings.workers_of(model)}
    for worker in settings.workers:
        if settings.models and worker.id not in served:
            yield f"worker {worker.id} serves no model."
    known = {name for worker in settings.workers for name in (worker.id, *worker.labels)}
    for model in settings.models:
        for name in model.workers or ():
            if name not in known:
                yield f"model {model.id} names {name}, which no worker of this file is; one may register."


def _describe(settings: Settings, document: Document) -> Iterator[str]:
    for name in Settings.model_fields:
        value = getattr(settings, name)
        if name in TABLE_LISTS:
            for index, entry in enumerate(value):
                yield from ["", f"[[{name}]]", *_pairs(entry, (name, index), document)]
        else:
            yield from ["", f"[{name}]", *_pairs(value, (name,), document)]


def _pairs(section: Section, path: Path, document: Document) -> Iterator[str]:
    for key, field in type(section).model_fields.items():
        value = getattr(section, key)
        if field.json_schema_extra and value is not None:
            origin = document.written((*path, key))
            pair = f"{key} = {_toml(value, field.json_schema_extra)}"
            yield f"{pair:<{_COMMENT_COLUMN}} # {_place(origin.file, origin.line) if origin else 'default'}"


def _place(file: str, line: int | None) -> str:
    # The file's folder is known from the first line; a column of long paths would hide the values.
    return file if line is None else f"{FilePath(file).name}:{line}"


def _toml(value: Any, extra: Any) -> str:
    """Write one value as TOML; sizes with their unit, hashes not at all."""
    match value:
        case bool():
            return "true" if value else "false"
        case int() if extra["unit"] == "bytes":
            return quoted(format_size(value))
        case int() | float():
            return f"{value:.15g}"
        case tuple():
            return f"[{', '.join(_toml(item, extra) for item in value)}]"
        case dict():
            return _toml_of_json(value)
        case KeySettings():
            return _toml_of_key(value)
        case AdminTokenSettings():
            return f'{{id = {quoted(value.id)}, hash = "(hidden)", role = {quoted(value.role)}}}'
        case datetime():
            return value.isoformat().replace("+00:00", "Z")
        case TiersSettings():
            shares = ((tier, getattr(value, tier).max_share) for tier in TiersSettings.model_fields)
            return "{" + ", ".join(f"{tier} = {{max_share = {share:g}}}" for tier, share in shares) + "}"
        case MutualTlsSettings():
            names = (f"{name} = {quoted(getattr(value, name))}" for name in ("certificate", "key", "ca"))
            return "{" + ", ".join(names) + "}"
        case TlsSettings():
            return f"{{certificate = {quoted(value.certificate)}, key = {quoted(value.key)}}}"
        case Bind() | DatabaseUrl() | StoreUrl() | Fraction() | IPv4Network() | IPv6Network() | str():
            return quoted(as_text(value))
    raise AssertionError(type(value))


def _toml_of_key(key: KeySettings) -> str:
    """Write what a key may do, as far as it was said."""
    pairs = [f"id = {quoted(key.id)}", 'hash = "(hidden)"']
    pairs += [
        f"{name} = {_toml(getattr(key, name), field.json_schema_extra)}"
        for name, field in KeySettings.model_fields.items()
        if name in key.model_fields_set - {"id", "hash"}
    ]
    return "{" + ", ".join(pairs) + "}"


def _toml_of_json(value: Any) -> str:
    """Write what stands in a model's `defaults`, so that it would be the same JSON again: 1.0 is not 1."""
    match value:
        case dict():
            pairs = (f"{quoted_key(key)} = {_toml_of_json(inner)}" for key, inner in value.items())
            return "{" + ", ".join(pairs) + "}"
        case list():
            return f"[{', '.join(map(_toml_of_json, value))}]"
        case str():
            return quoted(value)
    return str(value).lower()
