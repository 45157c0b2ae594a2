"""From settings to what each part wants to know: used at the start, and whenever settings change."""

from __future__ import annotations

import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from ..admission import TIERS, AdmissionLimits, TenantShare
from ..config import (
    DEFAULT_SLOTS,
    SERVICE_ACCOUNT,
    KeySettings,
    Settings,
    TenantMerger,
    TenantSettings,
    WorkerSettings,
)
from ..contract import TlsPort, Worker
from ..edge import GenerateSettings, KeepTerms, ServerLimits, SocketLimits, SocketSettings, TokenSettings
from ..exchange import AttemptLimits, DeliveryLimits, ExchangeLimits
from ..fleet import DIALECTS, FleetSettings, KubernetesAccess, Route
from ..flow import Certificates
from ..tenancy import Caller, Keyring, RateLimits, Stored, Tenant
from ..units import WHOLE, Part
from ..upstream import UpstreamLimits
from ._part import settings_of, tenant_of

ANSWER_SLACK: Final = 10.0  # seconds beyond the stall rules until the kernel gives a peer up
NOTHING_STORED: Final = Stored(0, (), ())


# Workers and models -----------------------------------------------------------------------------------------


def make_worker(worker: WorkerSettings, certificates: Certificates) -> Worker:
    """Describe a worker of the file.

    Raises:
        OSError: the certificate that it is to be shown can not be read any more.
        ValueError: likewise.
    """
    endpoint = worker.endpoint
    return Worker(
        id=worker.id,
        url=worker.url,
        dialect=DIALECTS[worker.kind],
        host=endpoint.host or "localhost",
        port=endpoint.port or 0,
        authority=endpoint.authority,
        prefix=endpoint.prefix,
        slots=worker.slots or DEFAULT_SLOTS,
        cancel_grace=worker.cancel_grace,
        socket_path=endpoint.socket_path,
        tls=_tls_of(worker, certificates),
        api_key=worker.api_key.get_secret_value() if worker.api_key is not None else None,
        weight=worker.weight,
        labels=frozenset(worker.labels),
        slots_unknown=worker.slots is None,
    )


def _tls_of(worker: WorkerSettings, certificates: Certificates) -> ssl.SSLContext | TlsPort | None:
    if worker.endpoint.scheme != "https":
        return None
    if worker.certificate is not None:
        return certificates.get("client", worker.certificate, worker.key, worker.ca)
    return ssl.create_default_context(cadata=worker.ca_pem)


def kubernetes_access(settings: Settings) -> KubernetesAccess:
    """Say how to reach the API of Kubernetes. The token is for https alone."""
    known = settings.kubernetes
    return KubernetesAccess(
        api=known.api,
        token_file=known.token_file if known.api.startswith("https:") else None,
        ca_file=known.ca,
        namespace=known.namespace,
        namespace_file=f"{SERVICE_ACCOUNT}/namespace",
        slots_key=known.slots_key,
    )


def routes_of(settings: Settings) -> list[Route]:
    """Describe the models."""
    return [
        Route(
            model.id,
            model.upstream,
            model.workers,
            model.aliases,
            model.default_fields,
            model.max_output_tokens,
            model.fallbacks,
            model.full_timeout,
        )
        for model in settings.models
    ]


def fleet_settings(settings: Settings, part: Part = WHOLE, *, lent: bool = False) -> FleetSettings:
    """Say how workers are judged.

    Args:
        part: of each worker's slots that this process has.
        lent: it has none, but is lent them.
    """
    breaker, probes, fleet = settings.breaker, settings.probes, settings.fleet
    return FleetSettings(
        first_pause=settings.retry.backoff,
        consecutive_faults=breaker.consecutive_faults,
        fault_ratio=breaker.fault_ratio,
        window=breaker.window,
        cooldown=breaker.cooldown,
        probe_interval=probes.interval,
        probe_failures=probes.failures,
        probe_successes=probes.successes,
        probed=probes.interval > 0,
        affinity=fleet.affinity,
        share=fleet.share,
        part=part,
        lent=lent,
        stale_after=max(fleet.ttl, probes.interval * probes.failures),
    )


# Tenants and keys -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Callers:
    """All who may call, from the file and the database, as the parts want to know them.

    Attributes:
        settings: from which they were made.
    """

    keyring: Keyring
    shares: Mapping[str, TenantShare]
    tenant_limits: Mapping[str, RateLimits]
    key_limits: Mapping[str, RateLimits]
    settings: Settings


def make_callers(
    settings: Settings, merger: TenantMerger, stored: Stored | None, part: Part = WHOLE
) -> tuple[Callers, tuple[str, ...]]:
    """Put together what the file and the database have; and say what is ignored.

    Args:
        stored: None: there is a database, and nothing was read of it yet.
        part: of the limits of each that this process has.
    """
    known = stored or NOTHING_STORED
    merged = merger.merge(
        (tenant.entry for tenant in known.tenants), ((key.tenant, key.entry) for key in known.keys)
    )
    tenants = merged.tenants
    # Where there was ever a tenant, an empty table locks all out: removing the last must not let all in.
    keyring = make_keyring(tenants, settings, read=stored is not None, used=known.revision > 0)
    mine = [tenant_of(tenant, part, settings) for tenant in tenants]
    given = mine or settings.database.url is not None
    shared = mine if given else settings_of(settings, part).serving_tenants()
    callers = Callers(
        keyring,
        {tenant.id: share_of(tenant) for tenant in shared},
        limits_of(mine),
        limits_of(keys_of(mine)),
        settings,
    )
    return callers, merged.ignored


def make_keyring(
    tenants: Iterable[TenantSettings], settings: Settings, *, read: bool, used: bool = False
) -> Keyring:
    """Make a ring of all keys.

    Args:
        read: whether these are all tenants that there are.
        used: there were tenants at some time.
    """
    owners = [(_make_tenant(tenant), tenant.keys) for tenant in tenants]
    return Keyring(
        [(key.digest, _make_caller(tenant, key)) for tenant, keys in owners for key in keys],
        [tenant for tenant, _ in owners],
        closed=used or not read or not settings.serves_anonymous(),
        complete=read,
    )


def keys_of(tenants: Iterable[TenantSettings]) -> list[KeySettings]:
    """Answer the keys of tenants."""
    return [key for tenant in tenants for key in tenant.keys]


def _make_caller(tenant: Tenant, key: KeySettings) -> Caller:
    expires = None if key.expires is None else key.expires.timestamp()
    return Caller(tenant.narrowed(frozenset(key.models), key.tiers), key.id, expires)


def _make_tenant(tenant: TenantSettings) -> Tenant:
    return Tenant(
        id=tenant.id,
        weight=tenant.weight,
        tiers=tuple(tenant.tiers),
        models=frozenset(tenant.models),
        default_timeout=tenant.default_timeout,
        max_timeout=tenant.max_timeout,
        engine_fields=tenant.engine_fields,
    )


def limits_of(owners: Iterable[TenantSettings | KeySettings]) -> dict[str, RateLimits]:
    """Answer the limits a minute of those that have any."""
    limits = ((owner.id, owner.requests_per_minute, owner.tokens_per_minute) for owner in owners)
    return {
        id_: RateLimits(requests, tokens)
        for id_, requests, tokens in limits
        if requests is not None or tokens is not None
    }


def share_of(tenant: TenantSettings) -> TenantShare:
    """Say what a tenant may have."""
    return TenantShare(tenant.max_concurrency, tenant.max_queued, tenant.weight)


# Limits -----------------------------------------------------------------------------------------------------


def admission_limits(settings: Settings) -> AdmissionLimits:
    """Bounds of all queues together."""
    admission = settings.admission
    return AdmissionLimits(
        admission.max_queued,
        admission.max_queued_bytes,
        admission.max_wait,
        admission.promote_after,
        {tier: getattr(admission.tiers, tier).max_share for tier in TIERS},
    )


def upstream_limits(settings: Settings) -> UpstreamLimits:
    """Bounds of a connection to an engine."""
    return UpstreamLimits(settings.deadlines.connect, settings.delivery.upstream_receive_buffer)


def attempt_limits(settings: Settings) -> AttemptLimits:
    """Bounds of one attempt."""
    return AttemptLimits(
        first_token=settings.deadlines.first_token,
        between_events=settings.deadlines.between_events,
        event_bytes=settings.limits.event_bytes,
        answer_bytes=settings.limits.answer_bytes,
    )


def exchange_limits(settings: Settings) -> ExchangeLimits:
    """Bounds of one exchange."""
    return ExchangeLimits(
        max_attempts=settings.retry.max_attempts,
        buffer_bytes=settings.delivery.buffer_bytes,
        delivery=DeliveryLimits(
            stall_timeout=settings.delivery.stall_timeout,
            max_lag=settings.delivery.max_lag,
            heartbeat_after=settings.stream.heartbeat_after,
        ),
        heartbeat_while_queued=settings.stream.heartbeat_while_queued,
        error_style=settings.stream.error_style,
        expose_worker=settings.server.expose_worker,
        merge_deltas=settings.delivery.merge_deltas,
        recorded=settings.telemetry.flights > 0,
    )


def answer_limit(settings: Settings) -> float:
    """Seconds without an acknowledgement until a reader counts as vanished."""
    return max(settings.delivery.stall_timeout, settings.delivery.max_lag) + ANSWER_SLACK


def generate_settings(settings: Settings) -> GenerateSettings:
    """Bounds of what a caller may ask for."""
    return GenerateSettings(
        settings.deadlines.default,
        settings.deadlines.maximum,
        settings.limits.json_values,
        answer_limit(settings),
        settings.limits.gone_probe_interval,
        KeepTerms(settings.delivery.buffer_bytes // 2, settings.delivery.resume_window),
        settings.stream.receipt,
    )


def socket_settings(settings: Settings) -> SocketSettings:
    """What all sockets share."""
    sockets = settings.websocket
    limits = SocketLimits(
        sockets.max_message_bytes,
        sockets.ping_interval,
        sockets.ping_timeout,
        settings.delivery.stall_timeout,
        settings.limits.body_timeout,
    )
    tokens = TokenSettings(
        sockets.max_streams,
        settings.limits.event_bytes,
        settings.delivery.buffer_bytes // 2,
        settings.delivery.resume_window,
    )
    origins = frozenset(settings.server.cors_origins)
    return SocketSettings(limits, tokens, sockets.auth_timeout, answer_limit(settings), origins)


def server_limits(settings: Settings) -> ServerLimits:
    """Bounds of a client's connection."""
    limits = settings.limits
    return ServerLimits(
        limits.connections,
        limits.head_bytes,
        limits.head_count,
        limits.head_timeout,
        limits.body_bytes,
        limits.body_timeout,
        limits.keep_alive,
        limits.unplaced_bytes,
    )
