"""What the parts of a configuration say about each other.

Every check looks at what passed alone and skips what did not, so that one mistake is told once. Names are
taken from the document, not from what passed: a worker with a wrong port is still a worker that models name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from trio_gateway.config._addresses import Bind, has_path
from trio_gateway.config._document import TABLE_LISTS
from trio_gateway.config._problems import Path, nearest, quoted
from trio_gateway.config._sections import AdminTokenSettings
from trio_gateway.config._tables import ModelSettings, TenantSettings, WorkerSettings
from trio_gateway.config._validate import Draft, Report
from trio_gateway.units import format_size

# (section, key), (section, key) that it must not exceed, and what would happen.
_AT_MOST: Final = (
    (("deadlines", "default"), ("deadlines", "maximum"), "the default could never be reached"),
    (("limits", "body_bytes"), ("limits", "unplaced_bytes"), "the largest body would never find room"),
    (
        ("limits", "answer_bytes"),
        ("delivery", "total_buffer_bytes"),
        "the largest buffered answer would never find room",
    ),
    (
        ("delivery", "buffer_bytes"),
        ("delivery", "total_buffer_bytes"),
        "one client's share would be more than the whole",
    ),
)


def check(draft: Draft, report: Report) -> None:
    """Report everything that does not fit together."""
    _check_orders(draft, report)
    _check_shutdown(draft, report)
    _check_ids(report)
    _check_key_hashes(draft, report)
    _check_names(draft, report)
    _check_tenants_models(draft, report)
    _check_key_scopes(draft, report)
    _check_fallbacks(draft, report)
    _check_workers(draft, report)
    _check_timeouts(draft, report)
    _check_heartbeats(draft, report)
    _check_cluster(draft, report)
    _check_processes(draft, report)
    _check_registration(draft, report)
    _check_tls(draft, report)
    _check_public_binds(draft, report)
    _check_admin_binds(draft, report)
    _check_admin_tokens(draft, report)
    _check_bind_conflicts(draft, report)


# Limits -------------------------------------------------------------------------------------------------


def _check_orders(draft: Draft, report: Report) -> None:
    for smaller, larger, consequence in _AT_MOST:
        low, high = draft.value(*smaller), draft.value(*larger)
        if low is not None and high is not None and low > high:
            # The one that was written is the one to change; with both written, the smaller.
            path, word, other = smaller, "at most", larger
            if report.document.written(smaller) is None:
                path, word, other = larger, "at least", smaller
            limit = _shown(draft.value(*other))
            report.add(path, f"must be {word} {'.'.join(other)} ({limit}): {consequence}")


def _check_shutdown(draft: Draft, report: Report) -> None:
    keys = ("hard_limit", "grace", "readiness_delay")
    hard_limit, grace, delay = (draft.value("shutdown", key) for key in keys)
    if None not in (hard_limit, grace, delay) and hard_limit < delay + grace:
        written = (key for key in keys if report.document.written(("shutdown", key)))
        message = (
            f"readiness_delay + grace ({delay + grace:g}) must be at most hard_limit ({hard_limit:g}): "
            "running requests would lose their grace"
        )
        report.add(("shutdown", next(written)), message)


def _check_timeouts(draft: Draft, report: Report) -> None:
    maximum = draft.value("deadlines", "maximum")
    for index, tenant in _tenants(draft):
        given, bound = tenant.default_timeout, tenant.max_timeout
        if given is not None and bound is not None and given > bound:
            report.add(("tenants", index, "default_timeout"), f"must be at most max_timeout ({bound:g})")
        for key, value in (("default_timeout", given), ("max_timeout", bound)):
            if None not in (value, maximum) and value > maximum:
                report.add(("tenants", index, key), f"must be at most deadlines.maximum ({maximum:g})")


def _check_heartbeats(draft: Draft, report: Report) -> None:
    interval, ttl = draft.value("fleet", "heartbeat_interval"), draft.value("fleet", "ttl")
    if None not in (interval, ttl) and ttl <= 2 * interval:
        keys = ("ttl", "heartbeat_interval")
        written = (key for key in keys if report.document.written(("fleet", key)))
        message = (
            f"ttl ({ttl:g}) must be more than two heartbeat_interval ({interval:g}): "
            "one lost heartbeat would lose the worker"
        )
        report.add(("fleet", next(written)), message)


def _check_processes(draft: Draft, report: Report) -> None:
    """What can not be said of several processes."""
    processes = draft.value("server", "processes")
    if processes in (None, 1):
        return
    clustered = report.document.written(("cluster", "url"))
    if clustered and draft.value("server", "capacity") == "split":
        message = 'must be "shared" with cluster.url: its store grants slots to every process'
        report.add(("server", "capacity"), message)
    if processes == "auto":
        return
    if draft.value("server", "capacity") == "split":
        for index, worker in _workers(draft):
            if worker.slots is not None and worker.slots < processes:
                message = (
                    f"must be at least server.processes ({processes}), or some of them could not use the "
                    'worker: leave server.capacity at "shared"'
                )
                report.add(("workers", index, "slots"), message)
    for index, tenant in () if clustered else _tenants(draft):
        owners: list[tuple[Path, Any]] = [(("tenants", index), tenant)]
        owners += [(("tenants", index, "keys", at), key) for at, key in enumerate(tenant.keys)]
        for path, owner in owners:
            for name in ("requests_per_minute", "tokens_per_minute"):
                if (rate := getattr(owner, name)) is not None and rate < processes:
                    message = f"must be at least server.processes ({processes}): each has its part of it"
                    report.add((*path, name), message)


def _check_cluster(draft: Draft, report: Report) -> None:
    lease, patience = draft.value("cluster", "lease"), draft.value("cluster", "patience")
    if lease is not None and patience is not None and patience >= lease:
        report.add(("cluster", "patience"), f"must be less than cluster.lease ({_shown(lease)})")
    if not report.document.written(("cluster", "url")):
        return
    why = "must be at least 1 with cluster.url: a request waits for the store's answer in the queue"
    if draft.value("admission", "max_queued") == 0:
        report.add(("admission", "max_queued"), why)
    for index, tenant in _tenants(draft):
        if tenant.max_queued == 0:
            report.add(("tenants", index, "max_queued"), why)


# Names --------------------------------------------------------------------------------------------------


def _check_ids(report: Report) -> None:
    for name in TABLE_LISTS:
        names: list[tuple[Path, str]] = [((name, index, "id"), id_) for index, id_ in _ids(report, name)]
        if name == "models":
            names += [(("models", index, "aliases", at), alias) for index, at, alias in _aliases(report)]
        _check_unique(report, names)
    _check_unique(report, list(_key_ids(report)))


def _check_unique(report: Report, ids: list[tuple[Path, str]]) -> None:
    first: dict[str, Path] = {}
    for path, id_ in ids:
        if id_ in first:
            report.add(path, f"{quoted(id_)} is taken: {report.document.origin_of(first[id_])} has it")
        first.setdefault(id_, path)


def _key_ids(report: Report) -> Iterator[tuple[Path, str]]:
    """Ids of all keys of all tenants: they are one namespace, since a key is found by its own id."""
    for tenant_index, tenant in enumerate(_list(report.document.tree, "tenants")):
        for index, key in enumerate(_list(tenant, "keys")):
            if isinstance(id_ := key.get("id") if isinstance(key, dict) else None, str):
                yield ("tenants", tenant_index, "keys", index, "id"), id_


def _check_key_hashes(draft: Draft, report: Report) -> None:
    first: dict[str, Path] = {}
    for tenant_index, tenant in _tenants(draft):
        for index, key in enumerate(tenant.keys):
            path: Path = ("tenants", tenant_index, "keys", index, "hash")
            if key.hash in first:
                report.add(path, f"is the key of {report.document.origin_of(first[key.hash])} again")
            first.setdefault(key.hash, path)


def _check_names(draft: Draft, report: Report) -> None:
    """Models name workers and their labels; those that may still register can be called anything."""
    ids = [id_ for _, id_ in _ids(report, "workers")]
    labels = _labels(report)
    for index, worker in _workers(draft):
        for position, label in enumerate(worker.labels):
            if label in ids:
                message = f"{quoted(label)} is a worker's id too, so [[models]] could mean either"
                report.add(("workers", index, "labels", position), message)
    if draft.value("internal", "bind") != ():
        return
    for index, model in _models(draft):
        for position, name in enumerate(model.workers or ()):
            if name not in (*ids, *labels):
                message = f"no worker has the id or label {quoted(name)}" + _hint(name, [*ids, *labels])
                report.add(("models", index, "workers", position), message)


def _check_tenants_models(draft: Draft, report: Report) -> None:
    """Without any [[models]] a tenant may name whatever workers will report."""
    if not report.document.tree.get("models"):
        return
    names = _ModelNames(report)
    for index, tenant in _tenants(draft):
        paths: list[tuple[Path, tuple[str, ...]]] = [(("tenants", index, "models"), tenant.models)]
        if "*" in tenant.models:  # else a key's names are compared with the tenant's
            paths += [
                (("tenants", index, "keys", at, "models"), key.models) for at, key in enumerate(tenant.keys)
            ]
        for path, models in paths:
            for position, name in enumerate(models):
                if name != "*" and (message := names.why_none(name)):
                    report.add((*path, position), message)


def _check_key_scopes(draft: Draft, report: Report) -> None:
    """A key can do no more than its tenant, and nobody shall believe that it could."""
    for tenant_index, tenant in _tenants(draft):
        for index, key in enumerate(tenant.keys):
            path: Path = ("tenants", tenant_index, "keys", index)
            for position, model in enumerate(key.models):
                if "*" not in (model, *tenant.models) and model not in tenant.models:
                    message = f"its tenant may not use {quoted(model)}"
                    report.add((*path, "models", position), message + _hint(model, list(tenant.models)))
            for position, tier in enumerate(key.tiers if "tiers" in key.model_fields_set else ()):
                if tier not in tenant.tiers:
                    report.add((*path, "tiers", position), f"its tenant may not ask for {quoted(tier)}")


class _ModelNames:
    """Models are named by id alone: an alias is another word for a model, and no model of its own."""

    def __init__(self, report: Report) -> None:
        ids = dict(_ids(report, "models"))
        self._ids = set(ids.values())
        self._owners = {alias: ids[index] for index, _, alias in _aliases(report) if index in ids}

    def why_none(self, name: str) -> str | None:
        """Say why a name means no model; None: it means one."""
        if name in self._ids:
            return None
        if name in self._owners:
            return f"{quoted(name)} is an alias: name the model, {quoted(self._owners[name])}"
        return f"no [[models]] has the id {quoted(name)}" + _hint(name, [*self._ids, *self._owners])


def _check_fallbacks(draft: Draft, report: Report) -> None:
    """Whoever falls back must arrive: at models that exist, and not where it came from."""
    names = _ModelNames(report)
    steps: dict[str, list[str]] = {}
    for index, model in _models(draft):
        for position, name in enumerate(model.fallbacks):
            path: Path = ("models", index, "fallbacks", position)
            if message := names.why_none(name):
                report.add(path, message)
            elif circle := _way(steps, name, model.id):
                report.add(path, f"leads back to where it came from: {' -> '.join([model.id, *circle])}")
            else:
                steps.setdefault(model.id, []).append(name)


def _way(steps: dict[str, list[str]], start: str, end: str) -> list[str] | None:
    """Answer the shortest way, both ends included, along steps without circles; None: there is none."""
    came_from = {start: start}
    for here in (reached := [start]):
        if here == end:
            way = [here]
            while way[0] != start:
                way.insert(0, came_from[way[0]])
            return way
        for name in steps.get(here, ()):
            if name not in came_from:
                came_from[name] = here
                reached.append(name)
    return None


# Addresses ----------------------------------------------------------------------------------------------


def _check_workers(draft: Draft, report: Report) -> None:
    """What a worker's keys say about its url."""
    for index, worker in _workers(draft):
        if worker.ca is not None and worker.endpoint.scheme != "https":
            report.add(("workers", index, "ca"), "has no use: the url is not https")
        _check_client_certificate(("workers", index), worker, report)
        if worker.dns and not worker.endpoint.named:
            report.add(("workers", index, "dns"), "has no use: the url has no name that could be resolved")
        if worker.pods is not None:
            _check_pods(("workers", index), worker, report)
        if worker.kind == "agent":
            _check_agent(("workers", index), worker, report)


def _check_client_certificate(path: Path, worker: WorkerSettings, report: Report) -> None:
    given = [name for name in ("certificate", "key") if getattr(worker, name) is not None]
    if given and worker.endpoint.scheme != "https":
        report.add((*path, given[0]), "has no use: the url is not https")
    elif len(given) == 1:
        other = "key" if given[0] == "certificate" else "certificate"
        report.add((*path, given[0]), f"needs {other} beside it")


def _check_pods(path: Path, worker: WorkerSettings, report: Report) -> None:
    if worker.dns:
        report.add((*path, "pods"), "can not stand beside dns: workers are found by the one or the other")
    if worker.endpoint.host is None:
        report.add((*path, "pods"), "has no use: the url is a socket of this machine, and pods are elsewhere")


def _check_agent(path: Path, worker: WorkerSettings, report: Report) -> None:
    if has_path(worker.url):
        report.add((*path, "url"), "must end after the host or port: an agent has no path")
    if worker.api_key_file is None:
        message = "must be given for an agent: the file with the secret by which it knows its gateways"
        report.add((*path, "api_key_file"), message)


def _check_registration(draft: Draft, report: Report) -> None:
    bind, file = draft.value("internal", "bind"), draft.value("internal", "join_token_file")
    if ("internal", "join_token_file") in draft.broken or bind is None:
        return
    if bind and file is None:
        message = (
            "needs join_token_file beside it: without a join token anybody could get requests of clients"
        )
        report.add(("internal", "bind"), message)
    if file is not None and not bind:
        report.add(
            ("internal", "join_token_file"), "has no use: without internal.bind no worker can register"
        )


def _check_tls(draft: Draft, report: Report) -> None:
    binds = draft.value("server", "bind")
    inner = draft.value("internal", "bind")
    if draft.value("internal", "tls") is not None and inner is not None:
        if not inner:
            report.add(("internal", "tls"), "has no use: without internal.bind no worker can register")
        elif all(bind.port is None for bind in inner):
            report.add(
                ("internal", "tls"), "has no use: internal.bind has only unix sockets, which never speak TLS"
            )
    if draft.value("server", "tls") is not None and binds and all(bind.port is None for bind in binds):
        report.add(("server", "tls"), "has no use: server.bind has only unix sockets, which never speak TLS")


def _check_public_binds(draft: Draft, report: Report) -> None:
    if draft.value("server", "allow_anonymous") or report.document.tree.get("tenants"):
        return
    if report.document.written(("database", "url")):  # its tenants, and nobody without a key
        return
    for index, bind in enumerate(draft.value("server", "bind") or ()):
        if not bind.local:
            message = (
                f"other machines can reach {bind}, and without [[tenants]] everybody is served: "
                "add a tenant with a key, name a database that has tenants, or set "
                "server.allow_anonymous = true"
            )
            report.add(("server", "bind", index), message)


def _check_admin_binds(draft: Draft, report: Report) -> None:
    written = report.document.tree.get("admin")
    if isinstance(written, dict) and written.get("tokens"):
        return
    for index, bind in enumerate(draft.value("admin", "bind") or ()):
        if not bind.local:
            message = (
                f"other machines can reach {bind}, and nothing guards it: "
                "add admin.tokens, or use a loopback address or a unix socket"
            )
            report.add(("admin", "bind", index), message)


def _check_admin_tokens(draft: Draft, report: Report) -> None:
    tokens: tuple[AdminTokenSettings, ...] = draft.value("admin", "tokens") or ()
    _check_unique(report, [(("admin", "tokens", at, "id"), token.id) for at, token in enumerate(tokens)])
    first: dict[str, Path] = {}
    for at, token in enumerate(tokens):
        path: Path = ("admin", "tokens", at, "hash")
        if token.hash in first:
            report.add(path, f"is the token of {report.document.origin_of(first[token.hash])} again")
        first.setdefault(token.hash, path)


def _check_bind_conflicts(draft: Draft, report: Report) -> None:
    seen: list[Bind] = []
    for name in ("server", "admin", "internal"):
        for index, bind in enumerate(draft.value(name, "bind") or ()):
            if clash := next((other for other in seen if _clash(bind, other)), None):
                report.add((name, "bind", index), f"cannot listen on {bind} and {clash} at once")
            seen.append(bind)


def _clash(one: Bind, other: Bind) -> bool:
    if one == other:
        return one.port != 0
    if one.port != other.port or one.port in (0, None):
        return False
    return any(
        wide == everywhere and (":" in str(narrow)) == (":" in everywhere)
        for wide, narrow in ((one.host, other.host), (other.host, one.host))
        for everywhere in ("0.0.0.0", "::")  # noqa: S104 - recognised, not bound
    )


# What the document and the draft hold ----------------------------------------------------------------------


def _shown(value: float) -> str:
    return format_size(value) if isinstance(value, int) else f"{value:g}"


def _workers(draft: Draft) -> Iterator[tuple[int, WorkerSettings]]:
    for index, entry in draft.entries["workers"].items():
        if isinstance(entry, WorkerSettings):
            yield index, entry


def _models(draft: Draft) -> Iterator[tuple[int, ModelSettings]]:
    for index, entry in draft.entries["models"].items():
        if isinstance(entry, ModelSettings):
            yield index, entry


def _tenants(draft: Draft) -> Iterator[tuple[int, TenantSettings]]:
    for index, entry in draft.entries["tenants"].items():
        if isinstance(entry, TenantSettings):
            yield index, entry


def _ids(report: Report, name: str) -> list[tuple[int, str]]:
    entries = enumerate(_list(report.document.tree, name))
    pairs = ((index, entry.get("id") if isinstance(entry, dict) else None) for index, entry in entries)
    return [(index, id_) for index, id_ in pairs if isinstance(id_, str)]


def _labels(report: Report) -> list[str]:
    workers = _list(report.document.tree, "workers")
    return [label for worker in workers for label in _list(worker, "labels") if isinstance(label, str)]


def _aliases(report: Report) -> Iterator[tuple[int, int, str]]:
    """Further names of models: whose, at which position, and the name; once where one model repeats it."""
    for index, model in enumerate(_list(report.document.tree, "models")):
        aliases = _list(model, "aliases")
        for position, alias in enumerate(aliases):
            if isinstance(alias, str) and alias not in aliases[:position]:
                yield index, position, alias


def _list(node: Any, key: str) -> list[Any]:
    inner = node.get(key) if isinstance(node, dict) else None
    return inner if isinstance(inner, list) else []


def _hint(name: str, known: list[str]) -> str:
    close = nearest(name, known)
    return f"; did you mean {quoted(close)}?" if close else ""
