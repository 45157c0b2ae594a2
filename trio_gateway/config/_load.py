"""From a file, variables and arguments to `Settings`, or to everything that is wrong with them."""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from types import MappingProxyType
from typing import Any, Final

from pydantic import SecretStr

from trio_gateway.config._certificates import what_is_wrong
from trio_gateway.config._checks import check
from trio_gateway.config._cluster import ClusterSettings
from trio_gateway.config._document import TABLE_LISTS, Document, Override, parse_document, read_overrides
from trio_gateway.config._kubernetes import KubernetesSettings
from trio_gateway.config._problems import ConfigurationError, Path, Problem, dotted
from trio_gateway.config._sections import (
    DatabaseSettings,
    InternalSettings,
    ServerSettings,
    TelemetrySettings,
)
from trio_gateway.config._settings import Settings
from trio_gateway.config._tables import WorkerSettings
from trio_gateway.config._validate import Draft, Report, validate
from trio_gateway.units import KiB, MiB

NO_ENVIRONMENT: Final[Mapping[str, str]] = MappingProxyType({})

# A configuration of ten thousand workers has about 2 MiB; a key longer than this fits into no request head.
MAX_FILE: Final = 16 * MiB
MAX_KEY: Final = 8 * KiB
_HEADER_LINE: Final = re.compile(
    rb"([A-Za-z0-9!#$%&'*+.^_`|~-]+):[ \t]*([\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?)"
)
# Whoever has the join token can get requests of clients; less than this can be guessed.
MIN_JOIN_TOKEN: Final = 16


@dataclass(frozen=True, slots=True)
class Loaded:
    """Settings, and the document that says where each of them was written."""

    settings: Settings
    document: Document


def load_settings(
    path: str | os.PathLike[str],
    environ: Mapping[str, str] = NO_ENVIRONMENT,
    overrides: Sequence[str] = (),
) -> Settings:
    """Read the configuration file, and the files with keys and certificates that it names.

    Args:
        path: the TOML file. Relative paths in it count from its folder, those of sockets from the working
            directory.
        environ: variables ``TRIO_GATEWAY__SECTION__KEY`` are laid over the file, others ignored.
        overrides: ``section.key=value`` each, laid over both.

    Raises:
        ConfigurationError: with every problem that was found.
    """
    return load(path, environ, overrides).settings


def parse_settings(
    text: str,
    environ: Mapping[str, str] = NO_ENVIRONMENT,
    overrides: Sequence[str] = (),
    *,
    name: str = "gateway.toml",
    folder: str | os.PathLike[str] = ".",
) -> Settings:
    """Do as `load_settings` does with a text instead of a file.

    Args:
        text: TOML.
        environ: as there.
        overrides: as there.
        name: what messages call the text.
        folder: where relative paths count from.

    Raises:
        ConfigurationError: with every problem that was found.
    """
    return assemble(parse_document(text, name), environ, overrides, FilePath(folder)).settings


def names_database(
    path: str | os.PathLike[str], environ: Mapping[str, str], overrides: Sequence[str] = ()
) -> bool:
    """Whether a configuration names a database, whatever else is wrong with it.

    Args:
        path: the TOML file.
        environ: as `load_settings` takes it.
        overrides: as `load_settings` takes them.

    Raises:
        ConfigurationError: the file can not be read at all.
    """
    name = os.fspath(path)
    document = parse_document(read_text(name), name)
    _lay_over(document, read_overrides(environ, overrides))
    return document.written(("database", "url")) is not None


def load(path: str | os.PathLike[str], environ: Mapping[str, str], overrides: Sequence[str]) -> Loaded:
    """Do as `load_settings` does, and keep the origins."""
    name = os.fspath(path)
    return assemble(parse_document(read_text(name), name), environ, overrides, FilePath(name).parent)


def assemble(
    document: Document,
    environ: Mapping[str, str],
    overrides: Sequence[str],
    folder: FilePath,
    live: Iterable[Override] = (),
) -> Loaded:
    """Lay everything over a document, and judge what comes of it.

    Args:
        document: changed by what is laid over it.
        live: laid over all else.

    Raises:
        ConfigurationError: with every problem that was found.
    """
    problems = list(_lay_over(document, [*read_overrides(environ, overrides), *live]))
    report = Report(document, problems)
    draft = validate(document, report)
    check(draft, report)
    workers = tuple(_with_files(draft, report, folder))
    server, internal = draft.sections.get("server"), draft.sections.get("internal")
    database, telemetry = draft.sections.get("database"), draft.sections.get("telemetry")
    if isinstance(server, ServerSettings):
        server = _with_certificate(server, report, folder)
    if isinstance(internal, InternalSettings):
        internal = _with_mutual_tls(_with_join_token(internal, report, folder), report, folder)
    if isinstance(database, DatabaseSettings):
        database = _with_places(database, folder)
    if isinstance(telemetry, TelemetrySettings):
        telemetry = _with_otlp_headers(telemetry, report, folder)
    kubernetes = draft.sections.get("kubernetes")
    if isinstance(kubernetes, KubernetesSettings):
        kubernetes = _with_account(kubernetes, folder)
    cluster = draft.sections.get("cluster")
    if isinstance(cluster, ClusterSettings) and cluster.ca is not None:
        cluster = cluster.model_copy(update={"ca": str(folder.absolute() / cluster.ca)})
    if report.problems:
        raise ConfigurationError(
            sorted(report.problems, key=lambda problem: _reading_order(problem, document))
        )
    lists = {name: tuple(draft.entries[name].values()) for name in TABLE_LISTS}
    files: dict[str, Any] = {
        "server": server,
        "internal": internal,
        "database": database,
        "telemetry": telemetry,
        "kubernetes": kubernetes,
        "cluster": cluster,
        "workers": workers,
    }
    parts: dict[str, Any] = {**draft.sections, **lists, **files}
    return Loaded(Settings(**parts), document)


def _reading_order(problem: Problem, document: Document) -> tuple[bool, int]:
    return problem.file != document.name, problem.line or 0


def _lay_over(document: Document, overrides: Iterable[Override | Problem]) -> list[Problem]:
    problems = []
    for item in overrides:
        if isinstance(item, Override):
            try:
                document.lay_over(item)
            except ValueError as error:
                problems.append(Problem(item.origin.file, None, dotted(item.key), str(error)))
        else:
            problems.append(item)
    return problems


# Files --------------------------------------------------------------------------------------------------


def read_text(name: str) -> str:
    """Read a configuration file.

    Raises:
        ConfigurationError: it can not be read, or is no text.
    """
    try:
        data = _read_bytes(FilePath(name), MAX_FILE)
        text = data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigurationError([Problem(name, line, "", "not valid UTF-8")]) from None
    except ValueError as error:
        raise ConfigurationError([Problem(name, None, "", str(error))]) from None
    if text.startswith("\ufeff"):
        message = "begins with a byte order mark, which TOML does not know: save it as UTF-8 without one"
        raise ConfigurationError([Problem(name, 1, "", message)])
    return text


def _read_bytes(path: FilePath, most: int) -> bytes:
    """Read a file of at most `most` bytes.

    Raises:
        ValueError: it cannot be read, or is larger.
    """
    try:
        with path.open("rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None
    if len(data) > most:
        raise ValueError(f"has more than {most} bytes")
    return data


def _with_files(draft: Draft, report: Report, folder: FilePath) -> Iterator[WorkerSettings]:
    """Complete the workers with what stands in the files that they name."""
    for index, worker in draft.entries["workers"].items():
        assert isinstance(worker, WorkerSettings)
        path: Path = ("workers", index)
        read: dict[str, object] = {}
        for key, field, name, reader in (
            ("api_key_file", "api_key", worker.api_key_file, _read_key),
            ("ca", "ca_pem", worker.ca, _read_ca),
        ):
            if name is not None:
                try:
                    read[field] = reader(folder / name)
                except ValueError as error:
                    # The name is not repeated: some people write the key itself where its file belongs.
                    report.add((*path, key), f"{error}{_hint_at(folder, name)}")
        if worker.certificate is not None and worker.key is not None:
            read |= _judge_pair(path, worker.certificate, worker.key, report, folder)
            if worker.ca is not None:  # it is read again together with these
                read["ca"] = str(folder.absolute() / worker.ca)
        yield worker.model_copy(update=read)


def _with_join_token(internal: InternalSettings, report: Report, folder: FilePath) -> InternalSettings:
    """Complete the internal listener with the word that its file holds."""
    name = internal.join_token_file
    if name is None:
        return internal
    try:
        token = _read_key(folder / name, least=MIN_JOIN_TOKEN)
    except ValueError as error:
        report.add(("internal", "join_token_file"), f"{error}{_hint_at(folder, name)}")
        return internal
    return internal.model_copy(update={"join_token": token})


def _with_mutual_tls(internal: InternalSettings, report: Report, folder: FilePath) -> InternalSettings:
    """Check the files by which gateway and agents know each other; their paths count from everywhere then."""
    tls = internal.tls
    if tls is None:
        return internal
    path: Path = ("internal", "tls")
    paths = _judge_pair(path, tls.certificate, tls.key, report, folder)
    try:
        _read_ca(folder / tls.ca)
    except ValueError as error:
        report.add((*path, "ca"), f"{error}{_hint_at(folder, tls.ca)}")
    paths["ca"] = str(folder.absolute() / tls.ca)
    return internal.model_copy(update={"tls": tls.model_copy(update=paths)})


def _judge_pair(path: Path, certificate: str, key: str, report: Report, folder: FilePath) -> dict[str, str]:
    """Report what is wrong with a certificate and its key; answers their absolute paths."""
    names = {"certificate": certificate, "key": key}
    paths = {field: folder.absolute() / name for field, name in names.items()}
    for field, message in what_is_wrong(paths["certificate"], paths["key"]).items():
        report.add((*path, field), f"{message}{_hint_at(folder, names[field])}")
    return {field: str(each) for field, each in paths.items()}


def _with_otlp_headers(telemetry: TelemetrySettings, report: Report, folder: FilePath) -> TelemetrySettings:
    """Complete the way to a collector with the headers that their file holds."""
    name = telemetry.otlp_headers_file
    if name is None:
        return telemetry
    try:
        headers = _read_headers(folder / name)
    except ValueError as error:
        report.add(("telemetry", "otlp_headers_file"), f"{error}{_hint_at(folder, name)}")
        return telemetry
    return telemetry.model_copy(update={"otlp_headers": headers})


def _with_certificate(server: ServerSettings, report: Report, folder: FilePath) -> ServerSettings:
    """Check the files of the listener's certificate, and let their paths count from everywhere."""
    if server.tls is None:
        return server
    paths = _judge_pair(("server", "tls"), server.tls.certificate, server.tls.key, report, folder)
    return server.model_copy(update={"tls": server.tls.model_copy(update=paths)})


def _with_places(database: DatabaseSettings, folder: FilePath) -> DatabaseSettings:
    """Let the paths of records count from everywhere."""
    if database.url is None:
        return database
    places = {
        "url": database.url.within(folder.absolute()),
        "journal": str(folder.absolute() / database.journal),
    }
    return database.model_copy(update=places)


def _with_account(kubernetes: KubernetesSettings, folder: FilePath) -> KubernetesSettings:
    """Let the paths of the service account count from everywhere; they are read when they are needed."""
    places = {key: str(folder.absolute() / getattr(kubernetes, key)) for key in ("token_file", "ca")}
    return kubernetes.model_copy(update=places)


def _hint_at(folder: FilePath, name: str) -> str:
    return "" if FilePath(name).is_absolute() else f" (relative paths count from {folder})"


def _read_key(path: FilePath, least: int = 1) -> SecretStr:
    """Read a credential of `least` characters or more. No message may repeat what was read."""
    key = _read_bytes(path, MAX_KEY).strip()
    if not key:
        raise ValueError("is empty")
    if len(key) < least:
        raise ValueError(f"holds fewer than {least} characters, which can be guessed")
    if any(not 0x21 <= byte <= 0x7E for byte in key):
        raise ValueError("holds a blank or another byte that no key has; it must hold the key alone")
    return SecretStr(key.decode("ascii"))


def _read_headers(path: FilePath) -> tuple[tuple[str, SecretStr], ...]:
    """Read lines of ``name: value``. No message may repeat what was read."""
    headers = []
    for number, line in enumerate(_read_bytes(path, MAX_KEY).splitlines(), 1):
        if not line.strip():
            continue
        found = _HEADER_LINE.fullmatch(line.strip())
        if found is None:
            raise ValueError(f'holds no header such as "name: value" in line {number}')
        headers.append((found[1].decode("ascii"), SecretStr(found[2].decode("ascii"))))
    return tuple(headers)


def _read_ca(path: FilePath) -> str:
    text = _read_bytes(path, MAX_FILE).decode("ascii", "replace")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=text)
    except (ValueError, ssl.SSLError):
        raise ValueError("holds no PEM certificate") from None
    return text
