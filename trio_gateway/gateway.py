"""The composition root: builds the parts from the settings, and opens the root nursery.

One process is one `Gateway`. Its nursery owns the listeners, the connections and
the few tasks that keep time; each exchange lives in its connection's task.
"""

from __future__ import annotations

import gc
import math
import os
import random
import resource
import secrets
import signal
import ssl
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import trio

from . import __version__
from .admin import make_app, make_internal_app, serve_admin
from .admission import TIERS, Admission, AdmissionLimits, TenantShare
from .config import (
    DEFAULT_SLOTS,
    KeySettings,
    Settings,
    TenantMerger,
    TenantSettings,
    WorkerSettings,
    certificate_complaint,
)
from .contract import InternalRequest, Worker
from .edge import (
    AcceptLoop,
    Authenticator,
    Door,
    DoorSettings,
    GenerateSettings,
    Generator,
    HangupWatch,
    HttpServer,
    KeepTerms,
    ServerLimits,
    SocketLimits,
    Sockets,
    SocketSettings,
    SocketStreams,
    TokenSettings,
    UnplacedBytes,
    open_listeners,
    server_context,
)
from .errors import Problem
from .exchange import (
    SHUT_DOWN,
    AttemptLimits,
    AttemptParts,
    DeliveryLimits,
    ExchangeLimits,
    LiveExchanges,
    Parts,
    RetryBudget,
)
from .fleet import (
    DIALECTS,
    DrainKeeper,
    Fleet,
    FleetSettings,
    FleetWatch,
    NamedWorkers,
    Registrations,
    RegistrationSettings,
    Route,
    WatchSettings,
    Ways,
    WorkerBook,
)
from .flow import BufferPool
from .ledger import Books, Ledger, LedgerSettings, Record, conservation_errors
from .telemetry import (
    METRICS_TYPE,
    Exporter,
    ExporterSettings,
    Log,
    LoopWatch,
    render_metrics,
    return_free_memory,
)
from .tenancy import Caller, Follower, Keyring, RateBook, RateLimits, Stored, Tenant, open_roster
from .units import MiB
from .upstream import ConnectionPool, HttpEngine, UpstreamLimits, ask, follow, order, resolve

IDLE_EXPIRY: Final = 3.0  # seconds; engines close idle connections after 5
ANSWER_SLACK: Final = 10.0  # seconds beyond the stall rules until the kernel gives a peer up
SWITCH_INTERVAL: Final = 0.0005  # seconds until a thread that reads a large body lets the loop run
MUCH_MEMORY: Final = 16 * MiB  # held for slow clients at a time; worth returning afterwards
FINAL_SECONDS: Final = 0.5  # of the hard limit are left for closing what is open
MOST_AGENTS: Final = 1024  # connections of agents at a time
SPARE_DESCRIPTORS: Final = 64  # for listeners, files and operators


class Gateway:
    """All parts of one process.

    Args:
        settings: checked as a whole.
        log: takes records and messages.
    """

    def __init__(self, settings: Settings, log: Log) -> None:
        self.settings: Final = settings
        self.boot_id: Final = secrets.token_hex(8)
        self._log = log
        self._started = trio.current_time()
        self._stopping: str | None = None
        self._refusal: Problem | None = None
        self.books: Final = Books()
        self.ledger: Final = _make_ledger(settings, self.boot_id, log)
        self.loop_watch: Final = LoopWatch(settings.telemetry.stall_limit, log)
        self.exporter: Final = self._make_exporter()
        self.live: Final = LiveExchanges()
        self.watch: Final = HangupWatch()
        self.drain: Final = DrainKeeper(self._note_idle, self._note_let_go)
        self.idle_times: Final = Counter[str]()
        self.buffers: Final = BufferPool(settings.delivery.total_buffer_bytes)
        self.connections: Final = ConnectionPool(IDLE_EXPIRY, trio.current_time)
        self.fleet: Final = _make_fleet(settings)
        self.fleet_watch: Final = FleetWatch(
            self.fleet,
            self.drain,
            Ways(ask, order, follow),
            WatchSettings(settings.probes.interval, settings.probes.timeout),
            self._note_worker,
        )
        self.registrations: Final = Registrations(
            self.fleet,
            self.drain,
            RegistrationSettings(
                settings.fleet.heartbeat_interval, settings.fleet.ttl, settings.internal.allowed_networks
            ),
            trio.current_time,
            resolve,
            self._begin_watching,
            self._note_worker,
        )
        self.named_workers: Final = NamedWorkers(
            self.fleet,
            [_make_worker(worker) for worker in settings.workers if worker.dns],
            settings.fleet.dns_interval,
            resolve,
            self.fleet_watch.begin,
            self._note_worker,
        )
        database = settings.database.url
        self.keyring: Final = _make_keyring(settings.tenants, settings, read=database is None)
        self.admission: Final = Admission(
            self.fleet,
            AdmissionLimits(
                settings.admission.max_queued,
                settings.admission.max_queued_bytes,
                settings.admission.max_wait,
                settings.admission.promote_after,
                {tier: getattr(settings.admission.tiers, tier).max_share for tier in TIERS},
            ),
            {tenant.id: _share(tenant) for tenant in settings.serving_tenants()},
            self.drain.keep,
            random.random,
            self.books.times.held.see,
        )
        self.room: Final = UnplacedBytes(settings.limits.unplaced_bytes, self.admission.next_return)
        self.rates: Final = _make_rates(settings, self.admission)
        merger = TenantMerger(settings.tenants)
        self.follower: Final = (
            None
            if database is None
            else Follower(
                lambda: open_roster(database.value),
                lambda stored: _make_callers(settings, merger, stored),
                self._take_callers,
                log,
            )
        )
        tls = settings.server.tls
        self.tls: Final = None if tls is None else server_context(tls.certificate, tls.key)
        self._nursery: trio.Nursery | None = None
        parts = self._make_parts()
        self.generator: Final = self._make_generator(parts)
        authenticator = Authenticator(self.keyring, settings.server.trusted_proxies)
        self.sockets: Final = self._make_sockets(parts, self.generator, authenticator)
        self.server: Final = self._make_server(self.generator, authenticator)
        self.addresses: list[str] = []
        self.admin_addresses: list[str] = []
        self.internal_addresses: list[str] = []

    # -- running

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until shut down. Started once the listeners accept connections.

        Raises:
            OSError: an address can not be had.
        """
        listeners: list[trio.SocketListener] = []
        try:
            if self.ledger is not None:
                self.ledger.open()
            if self.exporter is not None:
                self.exporter.open()
            listeners += await open_listeners(tuple(map(str, self.settings.server.bind)))
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                watches = (self.watch.run, self.fleet_watch.run, self.named_workers.run, self.loop_watch.run)
                for task in (*watches, self.drain.run, self.admission.run, self._sweep):
                    nursery.start_soon(task)
                if self.follower is not None:
                    await nursery.start(self.follower.run)
                app = make_app(self.statistics, render_metrics, METRICS_TYPE)
                binds = tuple(map(str, self.settings.admin.bind))
                self.admin_addresses = await nursery.start(serve_admin, app, binds, self.report_bug)
                await self._open_to_workers(nursery)
                accept = AcceptLoop(self._permits(), self.server.serve, self._complain)
                for listener in listeners:
                    nursery.start_soon(accept.run, listener, nursery)
                    self.addresses.append(_address_of(listener, "http" if self.tls is None else "https"))
                self._log.write(
                    "info",
                    "listening",
                    public=self.addresses,
                    admin=self.admin_addresses,
                    internal=self.internal_addresses,
                )
                self._look_at_certificate()
                sys.setswitchinterval(SWITCH_INTERVAL)
                gc.collect()
                gc.freeze()  # what start-up made stays; collecting need not look at it again
                task_status.started()
                await self._stopped(nursery)
        finally:
            for listener in listeners:
                listener.socket.close()
            self.connections.close()
            self.watch.close()
            if self.ledger is not None:
                self.ledger.close()
            if self.exporter is not None:
                self.exporter.close()

    async def _open_to_workers(self, nursery: trio.Nursery) -> None:
        """Listen for workers that register, if the settings say so."""
        internal = self.settings.internal
        if internal.bind and internal.join_token is not None:
            app = make_internal_app(self.registrations, internal.join_token.get_secret_value())
            binds = tuple(map(str, internal.bind))
            self.internal_addresses = await nursery.start(
                serve_admin, app, binds, self.report_bug, MOST_AGENTS
            )

    async def _stopped(self, nursery: trio.Nursery) -> None:
        """Wait for a signal, then shut down as the settings say; a second signal skips the waiting."""
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            await anext(signals)
            _exit_for_sure_after(self.settings.shutdown.hard_limit)
            with trio.move_on_after(self.settings.shutdown.hard_limit - FINAL_SECONDS):
                async with trio.open_nursery() as both:
                    hurry = trio.Event()

                    async def second_signal() -> None:
                        await anext(signals)
                        hurry.set()

                    both.start_soon(second_signal)
                    await self.shut_down(hurry)
                    both.cancel_scope.cancel()
        nursery.cancel_scope.cancel()

    async def shut_down(self, hurry: trio.Event) -> None:
        """Refuse what is new, let what runs finish, end what is left.

        Args:
            hurry: set to skip the delay and the grace.
        """
        limits = self.settings.shutdown
        self._stopping = "shutting down"
        self._log.write("info", "shutting_down", running=len(self.live))
        await _wait_at_most(limits.readiness_delay, hurry)
        self._refusal = Problem.of("gateway_draining", "the gateway is shutting down", retry_after=1.0)
        self.admission.close(self._refusal)
        self.server.close_idle()
        self.sockets.go_away(limits.grace)
        async with trio.open_nursery() as nursery:

            async def until_none() -> None:
                await self.live.wait_none()
                nursery.cancel_scope.cancel()

            nursery.start_soon(until_none)
            await _wait_at_most(limits.grace, hurry)
            nursery.cancel_scope.cancel()
        self.live.end_all(SHUT_DOWN)
        await self.live.wait_none()
        await self.sockets.close_all()
        self._log.write("info", "stopped")

    async def _sweep(self) -> None:
        """About once a second: what is old is closed or forgotten, and streams tell of their progress."""
        while True:
            await trio.sleep(1)
            self.connections.sweep()
            self.sockets.sweep()
            self.generator.kept.sweep()
            self.live.tell_progress(self.fleet.progressed)
            for book in (expired := self.fleet.expire()):
                self._note_worker(book.worker.id, "expired: it sent no heartbeat")
            self.registrations.forget(expired)
            if self.buffers.has_calmed(MUCH_MEMORY):
                await trio.to_thread.run_sync(return_free_memory, abandon_on_cancel=True)

    # -- what the process tells

    def not_ready(self) -> str | None:
        """Say why the gateway is not ready; None: it is."""
        if self._stopping is not None:
            return self._stopping
        if not (self.keyring.complete or self.keyring.tenants):
            return "the tenants have not been read yet"
        if not self.fleet.books:
            return "there is no worker"
        return None if self.fleet.ready() else "no worker is ready"

    def statistics(self) -> dict[str, Any]:
        """Answer the figures of this moment, the equations of conservation included."""
        books, admission, now = self.books, self.admission.statistics(), trio.current_time()
        errors = conservation_errors(
            books,
            granted=admission.granted,
            held=admission.held,
            draining=admission.draining,
            returned=admission.returned,
            buffered=self.buffers.used,
            sum_of_exchanges=self.live.buffered + self.kept_bytes,
        )
        return {
            "version": __version__,
            "boot_id": self.boot_id,
            "uptime": round(trio.current_time() - self._started, 3),
            "connections": self.server.open,
            "failed_handshakes": self.server.failed_handshakes,
            "idle_upstream_connections": self.connections.idle,
            "unplaced_bytes": self.room.used,
            "sockets": {
                "open": len(self.sockets),
                "streams": self.sockets.streams,
                "resumable": self.kept_answers,
            },
            "arrived": books.arrived,
            "reading": books.reading,
            "turned_away": dict(books.turned_away),
            "accepted": books.accepted,
            "waiting": books.waiting,
            "running": books.running,
            "outcomes": dict(books.outcomes),
            "leases": {
                "granted": admission.granted,
                "held": admission.held,
                "draining": admission.draining,
                "returned": admission.returned,
                "double_releases": admission.double_releases,
                "scope": "process",
            },
            "queue": {
                "depth": admission.queued,
                "bytes": admission.queued_bytes,
                "tiers": admission.queued_by_tier,
                "tenants": admission.queued_by_tenant,
            },
            "buffered_bytes": self.buffers.used,
            "buffered_per_exchange": dict(zip(("max", "p99"), self.live.most_buffered(), strict=True)),
            "held_up": self.live.held_up,
            "delivery_lag": {
                "batches": books.lags.count,
                "seconds": round(books.lags.total, 6),
                "buckets": dict(books.lags.buckets()),
            },
            "conservation": {"ok": not errors, "errors": errors},
            "workers": [_worker_figures(book, now) for book in self.fleet.books.values()],
            "idle_after_cancel": dict(self.idle_times),
            "times": books.times.figures(),
            "loop": self.loop_watch.figures(),
            "counts": _counts(books),
            "ledger": None if self.ledger is None else self.ledger.statistics(),
            "tenants": None if self.follower is None else self.follower.statistics(),
            "spans": None if self.exporter is None else self.exporter.figures(),
            "log_lines_dropped": self._log.dropped,
            "recent": list(books.recent),
        }

    def _take_callers(self, callers: Callers) -> None:
        """Have others call from now on. What was accepted goes on."""
        self.keyring.become(callers.keyring)
        self.rates.relimit(callers.tenant_limits, callers.key_limits)
        self.admission.reshare(callers.shares)

    @property
    def kept_answers(self) -> int:
        """Answers that can be resumed."""
        return len(self.sockets.kept) + len(self.generator.kept)

    @property
    def kept_bytes(self) -> int:
        """Bytes that are kept for those who may resume."""
        return self.sockets.kept.bytes + self.generator.kept.bytes

    def _begin_watching(self, book: WorkerBook) -> None:
        self.fleet_watch.begin(book)
        self._note_worker(book.worker.id, "registered")

    def _note_worker(self, worker: str, detail: str) -> None:
        self._log.write("info", "worker", worker=worker, detail=detail)

    def _note_idle(self, worker: Worker, seconds: float, confirmed: bool) -> None:
        self.idle_times["confirmed" if confirmed else "assumed"] += 1
        self.idle_times["milliseconds"] += round(seconds * 1000)
        self.books.times.idle.see(seconds)

    def _note_let_go(self, attempt_id: str, generated: int | None) -> None:
        if self.ledger is not None:
            self.ledger.release(attempt_id, time.time(), generated)

    def report_bug(self, where: str, exc: BaseException) -> None:
        """Log an exception that should not have happened."""
        self._log.exception("bug", exc, where=where)

    def _accepted(self, request: InternalRequest) -> None:
        if self.ledger is not None:
            self.ledger.accept(request, time.time() - (trio.current_time() - request.arrived))

    def _settled(self, record: Record) -> None:
        if self.ledger is not None:
            self.ledger.settle(record)
        self._log.write("info", "exchange", **record.as_dict())

    def _look_at_certificate(self) -> None:
        """Warn of a certificate that will not be accepted; it is served all the same."""
        tls = self.settings.server.tls
        complaint = None if tls is None else certificate_complaint(tls.certificate, tls.key)
        if complaint is not None:
            self._log.write("warning", "certificate_refused", reason=complaint)

    def _troubled(self, exchange_id: str, worker: str, detail: str) -> None:
        self._log.write("warning", "attempt_failed", exchange_id=exchange_id, worker=worker, detail=detail)

    def _complain(self, exc: OSError) -> None:
        self._log.write("error", "accept_failed", error=str(exc))

    # -- composition

    def _make_parts(self) -> Parts:
        settings = self.settings
        return Parts(
            admission=self.admission,
            attempts=AttemptParts(
                engine=HttpEngine(
                    self.connections,
                    UpstreamLimits(settings.deadlines.connect, settings.delivery.upstream_receive_buffer),
                    self._via,
                    secrets.token_bytes(32),
                    *(() if self.exporter is None else (self.exporter.headers,)),
                ),
                fleet=self.fleet,
                pool=self.buffers,
                limits=_attempt_limits(settings),
                wall=time.time,
                troubled=self._troubled,
                gapped=self.books.times.gaps.see,
            ),
            books=self.books,
            budget=RetryBudget(settings.retry.budget_ratio),
            limits=_exchange_limits(settings),
            boot_id=self.boot_id,
            accepted=self._accepted,
            settled=self._settled,
            bug=self.report_bug,
            rates=self.rates,
            tokens_of=self.admission.tokens_of,
            traced=None if self.exporter is None else self.exporter.ended,
        )

    def _make_exporter(self) -> Exporter | None:
        telemetry = self.settings.telemetry
        if telemetry.otlp_endpoint is None:
            return None
        return Exporter(
            ExporterSettings(
                telemetry.otlp_endpoint,
                [(name, value.get_secret_value()) for name, value in telemetry.otlp_headers],
                telemetry.sample_ratio,
                telemetry.export_interval,
                {
                    "service.name": telemetry.service_name,
                    "service.version": __version__,
                    "service.instance.id": self.boot_id,
                },
                __version__,
            ),
            self._address_of,
            self.books.models,
            self._log,
        )

    def _address_of(self, worker: str) -> tuple[str, int] | None:
        """Host and port of a worker; called by threads."""
        book = self.fleet.books.get(worker)
        return None if book is None else (book.worker.host, book.worker.port)

    def _make_generator(self, parts: Parts) -> Generator:
        settings = self.settings
        return Generator(
            self.fleet,
            parts,
            GenerateSettings(
                settings.deadlines.default,
                settings.deadlines.maximum,
                settings.limits.json_values,
                self._answer_limit,
                settings.limits.gone_probe_interval,
                KeepTerms(settings.delivery.buffer_bytes // 2, settings.delivery.resume_window),
                settings.stream.receipt,
            ),
            self.live,
            self.buffers,
            self._spawn,
        )

    @property
    def _answer_limit(self) -> float:
        """Seconds without an acknowledgement until a reader counts as vanished."""
        delivery = self.settings.delivery
        return max(delivery.stall_timeout, delivery.max_lag) + ANSWER_SLACK

    def _make_sockets(self, parts: Parts, generator: Generator, authenticator: Authenticator) -> Sockets:
        settings, sockets = self.settings, self.settings.websocket
        limits = SocketLimits(
            sockets.max_message_bytes,
            sockets.ping_interval,
            sockets.ping_timeout,
            settings.delivery.stall_timeout,
        )
        tokens = TokenSettings(
            sockets.max_streams,
            settings.limits.event_bytes,
            settings.delivery.buffer_bytes // 2,
            settings.delivery.resume_window,
        )
        streams = SocketStreams(
            generator, parts, self.live, self.books, self.room, lambda: self._refusal, self._spawn
        )
        return Sockets(
            SocketSettings(
                limits,
                tokens,
                sockets.auth_timeout,
                self._answer_limit,
                frozenset(settings.server.cors_origins),
            ),
            authenticator,
            self.keyring,
            streams,
            self.buffers,
        )

    def _spawn(self, task: Callable[[], Awaitable[None]]) -> None:
        """Run something in the gateway's own nursery; a fault of it is nobody else's."""

        async def contained() -> None:
            try:
                await task()
            except Exception as exc:
                self.report_bug("stream", exc)

        assert self._nursery is not None
        self._nursery.start_soon(contained)

    def _make_server(self, generator: Generator, authenticator: Authenticator) -> HttpServer:
        settings, limits = self.settings, self.settings.limits
        door = Door(
            DoorSettings(self._via, int(time.time()), frozenset(settings.server.cors_origins)),
            authenticator,
            generator,
            self.books,
            lambda: {name: route.model for name, route in self.fleet.routes.items()},
            self.live,
            self.not_ready,
            lambda: self._refusal,
            self.rates,
            self.sockets,
        )
        return HttpServer(
            door,
            self.watch,
            ServerLimits(
                limits.connections,
                limits.head_bytes,
                limits.head_count,
                limits.head_timeout,
                limits.body_bytes,
                limits.body_timeout,
                limits.keep_alive,
                limits.unplaced_bytes,
            ),
            self.report_bug,
            lambda: self._refusal is not None,
            self.tls,
            self.room,
        )

    @property
    def _via(self) -> str:
        return f"trio-gateway-{self.boot_id}"

    def _permits(self) -> trio.Semaphore:
        """One permit a connection, never more than descriptors allow: each may need one upstream too."""
        allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        fitting = max((allowed - SPARE_DESCRIPTORS) // 2, 1)
        wanted = self.settings.limits.connections
        if fitting < wanted:
            self._log.write(
                "warning", "fewer_connections", wanted=wanted, possible=fitting, descriptors=allowed
            )
        return trio.Semaphore(min(wanted, fitting))


async def _wait_at_most(seconds: float, hurry: trio.Event) -> None:
    with trio.move_on_after(seconds):
        await hurry.wait()


def _exit_for_sure_after(seconds: float) -> None:
    """End the process even if a thread, a file or a library never lets go."""
    last_resort = threading.Timer(seconds, os._exit, (0,))
    last_resort.daemon = True
    last_resort.start()


def _address_of(listener: trio.SocketListener, scheme: str) -> str:
    name = listener.socket.getsockname()
    if isinstance(name, tuple):
        host = f"[{name[0]}]" if ":" in name[0] else name[0]
        return f"{scheme}://{host}:{name[1]}"
    return f"unix:{name}"


def _make_ledger(settings: Settings, boot_id: str, log: Log) -> Ledger | None:
    database = settings.database
    if database.url is None:
        return None
    return Ledger(
        LedgerSettings(
            database.url.value,
            Path(database.journal),
            database.journal_bytes,
            database.sync_interval,
            database.retention_days,
            database.gateway_id,
        ),
        boot_id,
        log,
    )


def _make_fleet(settings: Settings) -> Fleet:
    breaker, probes, fleet = settings.breaker, settings.probes, settings.fleet
    return Fleet(
        [_make_worker(worker) for worker in settings.workers if not worker.dns],
        [
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
        ],
        trio.current_time,
        FleetSettings(
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
            stale_after=max(fleet.ttl, probes.interval * probes.failures),
        ),
    )


def _make_worker(worker: WorkerSettings) -> Worker:
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
        tls=ssl.create_default_context(cadata=worker.ca_pem) if endpoint.scheme == "https" else None,
        api_key=worker.api_key.get_secret_value() if worker.api_key is not None else None,
        weight=worker.weight,
        labels=frozenset(worker.labels),
        slots_unknown=worker.slots is None,
    )


@dataclass(frozen=True, slots=True)
class Callers:
    """All who may call, from the file and the database, as the parts want to know them."""

    keyring: Keyring
    shares: Mapping[str, TenantShare]
    tenant_limits: Mapping[str, RateLimits]
    key_limits: Mapping[str, RateLimits]


def _make_callers(
    settings: Settings, merger: TenantMerger, stored: Stored
) -> tuple[Callers, tuple[str, ...]]:
    """Put together what the file and the database have; and say what is ignored."""
    merged = merger.merge(
        (tenant.entry for tenant in stored.tenants), ((key.tenant, key.entry) for key in stored.keys)
    )
    tenants = merged.tenants
    # Where there was ever a tenant, an empty table locks all out: removing the last must not let all in.
    callers = Callers(
        _make_keyring(tenants, settings, read=True, used=stored.revision > 0),
        {tenant.id: _share(tenant) for tenant in tenants},
        _limits_of(tenants),
        _limits_of(_keys_of(tenants)),
    )
    return callers, merged.ignored


def _make_keyring(
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


def _keys_of(tenants: Iterable[TenantSettings]) -> list[KeySettings]:
    return [key for tenant in tenants for key in tenant.keys]


def _make_caller(tenant: Tenant, key: KeySettings) -> Caller:
    expires = None if key.expires is None else key.expires.timestamp()
    return Caller(tenant.narrowed(frozenset(key.models), key.tiers), key.id, expires)


def _make_rates(settings: Settings, admission: Admission) -> RateBook:
    tenants, of_keys = _limits_of(settings.tenants), _limits_of(_keys_of(settings.tenants))
    return RateBook(
        tenants, of_keys, clock=trio.current_time, dice=random.random, estimate=admission.probable_tokens
    )


def _limits_of(owners: Iterable[TenantSettings | KeySettings]) -> dict[str, RateLimits]:
    limits = ((owner.id, owner.requests_per_minute, owner.tokens_per_minute) for owner in owners)
    return {
        id_: RateLimits(requests, tokens)
        for id_, requests, tokens in limits
        if requests is not None or tokens is not None
    }


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


def _share(tenant: TenantSettings) -> TenantShare:
    return TenantShare(tenant.max_concurrency, tenant.max_queued, tenant.weight)


def _attempt_limits(settings: Settings) -> AttemptLimits:
    return AttemptLimits(
        first_token=settings.deadlines.first_token,
        between_events=settings.deadlines.between_events,
        event_bytes=settings.limits.event_bytes,
        answer_bytes=settings.limits.answer_bytes,
    )


def _exchange_limits(settings: Settings) -> ExchangeLimits:
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
    )


def _worker_figures(book: WorkerBook, now: float) -> dict[str, Any]:
    """What operators see of one worker."""
    snapshot = book.snapshot
    return {
        "id": book.worker.id,
        "url": book.worker.url,
        "kind": book.worker.dialect.kind,
        "slots": book.slots,
        "held": book.held,
        "draining": book.draining,
        "attempts": book.attempts,
        "faults": book.faults,
        "ready": book.ready(now),
        "state": snapshot.state,
        "alive": book.probe.alive(now),
        "suspect": snapshot.suspect or book.progress.still(now),
        "registered": book.expires_at is not None,
        "incarnation": snapshot.incarnation,
        "snapshot_age": round(snapshot.age(now), 3) if math.isfinite(snapshot.age(now)) else None,
        "running": snapshot.running,
        "queued": snapshot.queued,
        "paused": snapshot.paused,
        "models": None if book.models is None else list(book.models),
        "breakers": {model: breaker.state(now).value for model, breaker in book.breakers.items()},
    }


def _counts(books: Books) -> dict[str, list[tuple[tuple[str, ...], int]]]:
    """Counters with their labels, for metrics."""
    single = ("turned_away", "retries")
    found: dict[str, list[tuple[tuple[str, ...], int]]] = {
        name: [((key,), value) for key, value in getattr(books, name).items()] for name in single
    }
    several = ("requests", "failures", "cancellations", "tokens")
    return {**found, **{name: list(getattr(books, name).items()) for name in several}}
