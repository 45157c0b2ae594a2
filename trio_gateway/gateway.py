"""The composition root: builds the parts from the settings, and opens the root nursery.

One process is one `Gateway`. Its nursery owns the listeners, the connections and
the few tasks that keep time; each exchange lives in its connection's task.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import secrets
import shutil
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import trio

from . import __version__
from .admin import (
    DASHBOARD_PAGES,
    Access,
    AdminToken,
    Metrics,
    make_admin_app,
    make_internal_app,
    serve_admin,
)
from .admission import Admission
from .cluster import Member, Replica, ReplicaSettings, Standing, StoreAddress, Vouching, connect
from .cluster import prepare as prepare_cluster
from .config import Settings, Source, TenantMerger, certificate_complaint
from .contract import InternalRequest, Worker
from .edge import (
    AcceptLoop,
    Authenticator,
    Door,
    DoorSettings,
    Generator,
    HangupWatch,
    HttpServer,
    Sockets,
    SocketStreams,
    UnplacedBytes,
    open_listeners,
)
from .errors import Problem
from .exchange import (
    SHUT_DOWN,
    AttemptParts,
    ExchangeClocks,
    LiveExchanges,
    Parts,
    RetryBudget,
)
from .fleet import (
    DrainKeeper,
    Fleet,
    FleetWatch,
    NamedWorkers,
    PodWorkers,
    Registrations,
    RegistrationSettings,
    WatchSettings,
    Ways,
    WorkerBook,
    make_secret,
)
from .flow import READ_AGAIN, BufferPool, Certificates, ReadLoop
from .ledger import Books, Ledger, LedgerSettings, Record, record_json
from .lending import Borrower, Owners, Place
from .operations import (
    Callers,
    House,
    Operations,
    Prepared,
    SharedSecrets,
    Sharing,
    Trail,
    admission_limits,
    attempt_limits,
    exchange_limits,
    fleet_settings,
    generate_settings,
    keys_of,
    kubernetes_access,
    limits_of,
    make_callers,
    make_keyring,
    make_worker,
    open_audit_table,
    reload_at_signals,
    routes_of,
    server_limits,
    settings_of,
    share_of,
    socket_settings,
    take_callers,
    upstream_limits,
)
from .telemetry import (
    METRICS_TYPE,
    CycleCollector,
    Exporter,
    ExporterSettings,
    Log,
    LoopWatch,
    render_metrics,
    return_free_memory,
)
from .tenancy import Follower, RateBook, open_roster
from .units import WHOLE, MiB, Part
from .upstream import ConnectionPool, HttpEngine, ask, follow, get, order, resolve
from .wire import Registration

ENDS: Final = (signal.SIGTERM, signal.SIGINT)
IDLE_EXPIRY: Final = 3.0  # seconds; engines close idle connections after 5
SWITCH_INTERVAL: Final = 0.0005  # seconds until a thread that reads a large body lets the loop run
MUCH_MEMORY: Final = 16 * MiB  # held at a time, of answers or of requests; worth returning afterwards
FINAL_SECONDS: Final = 0.5  # of the hard limit are left for closing what is open
TRAIL_LIMIT: Final = 1.0  # seconds for what operators did to get into the database
MOST_AGENTS: Final = 1024  # connections of agents at a time
SPARE_DESCRIPTORS: Final = 64  # for listeners, files and operators


class Gateway:
    """All parts of one process.

    Args:
        settings: checked as a whole.
        log: takes records and messages.
        source: where the settings come from; None: they can not be changed while it runs.
        read_together: one task reads all streams of engines; else each is read by its exchange's own.
        place: among several processes that serve the same clients; None: it is the only one.
    """

    def __init__(
        self,
        settings: Settings,
        log: Log,
        source: Source | None = None,
        *,
        read_together: bool = True,
        place: Place | None = None,
    ) -> None:
        self.boot_id: Final = secrets.token_hex(8)
        self._log = log
        self._place = place
        self._read = "" if source is None else source.digest
        self._part = WHOLE if place is None else place.part
        self._control = None if place is None else place.open_control()
        self.borrower: Final = None if self._control is None else Borrower(self._control)
        self._crowd = None if place is None else place.open_crowd()
        self._abandoned = trio.Event()  # the supervisor is gone
        self._accepting = trio.CancelScope()
        self._owners: Owners | None = None
        self._accept_loop: AcceptLoop | None = None
        whole, settings = settings, settings_of(settings, self._part)
        now = trio.lowlevel.current_clock().current_time  # `trio.current_time` finds it anew at each call
        self._started = now()
        self._refusal: Problem | None = None
        self.books: Final = Books()
        self.ledger: Final = _make_ledger(settings, self.boot_id, log, self._part.number)
        self._left_behind = _make_ledgers_left_behind(settings, self.boot_id, log, self._part)
        self.loop_watch: Final = LoopWatch(settings.telemetry.stall_limit, log)
        self.exporter: Final = self._make_exporter(settings)
        self.live: Final = LiveExchanges(settings.telemetry.flights)
        self.watch: Final = HangupWatch()
        self.clocks: Final = ExchangeClocks()
        self.cycles: Final = CycleCollector()
        self.read_loop: Final = ReadLoop(others=self._part.of - 1) if read_together else None
        self.drain: Final = DrainKeeper(self._note_idle, self._note_let_go)
        self.idle_times: Final = Counter[str]()
        self.buffers: Final = BufferPool(settings.delivery.total_buffer_bytes)
        self.connections: Final = ConnectionPool(IDLE_EXPIRY, now)
        self.certificates: Final = Certificates()
        self.fleet: Final = _make_fleet(settings, self.certificates, place)
        self.fleet_watch: Final = FleetWatch(
            self.fleet,
            self.drain,
            Ways(ask, order, follow),
            WatchSettings(settings.probes.interval, settings.probes.timeout),
            self._note_worker,
        )
        inner = settings.internal.tls
        self.inner_tls: Final = (
            None if inner is None else self.certificates.get("server", inner.certificate, inner.key, inner.ca)
        )
        self._shared_secrets = _make_shared_secrets(settings)
        self.registrations: Final = Registrations(
            self.fleet,
            self.drain,
            RegistrationSettings(
                settings.fleet.heartbeat_interval,
                settings.fleet.ttl,
                settings.internal.allowed_networks,
                None
                if inner is None
                else self.certificates.get("client", inner.certificate, inner.key, inner.ca),
            ),
            trio.current_time,
            resolve,
            self._begin_watching,
            self._note_worker,
            _secrets_of(place, self._shared_secrets),
        )
        self.named_workers: Final = NamedWorkers(
            self.fleet,
            [make_worker(worker, self.certificates) for worker in settings.workers if worker.dns],
            settings.fleet.dns_interval,
            resolve,
            self.fleet_watch.begin,
            self._note_worker,
        )
        self.pod_workers: Final = PodWorkers(
            self.fleet,
            [
                (make_worker(worker, self.certificates), worker.pods)
                for worker in settings.workers
                if worker.pods is not None
            ],
            kubernetes_access(settings),
            get,
            self.fleet_watch.begin,
            self._note_worker,
        )
        database = settings.database.url
        self.keyring: Final = make_keyring(settings.tenants, settings, read=database is None)
        self.admission: Final = Admission(
            self.fleet,
            admission_limits(settings),
            {tenant.id: share_of(tenant) for tenant in settings.serving_tenants()},
            self._keep_draining,
            random.random,
            self.books.times.held.see,
            self.borrower if place is not None and place.shares else None,
        )
        self.room: Final = UnplacedBytes(settings.limits.unplaced_bytes, self.admission.next_return)
        self.rates: Final = RateBook(
            limits_of(settings.tenants),
            limits_of(keys_of(settings.tenants)),
            clock=now,
            dice=random.random,
            estimate=self.admission.probable_tokens,
        )
        self.replica: Final = self._make_replica(settings)
        self._basis = whole, TenantMerger(whole.tenants)
        self.follower: Final = (
            None
            if database is None
            else Follower(
                lambda: open_roster(database.value),
                lambda stored: make_callers(*self._basis, stored, self._part),
                self._take_callers,
                log,
            )
        )
        tls = settings.server.tls
        self.public_tls: Final = (
            None if tls is None else self.certificates.get("server", tls.certificate, tls.key, None)
        )
        self.tls: Final = None if self.public_tls is None else self.public_tls.context
        self._nursery: trio.Nursery | None = None
        self.engine: Final = HttpEngine(
            self.connections,
            upstream_limits(settings),
            self._via,
            secrets.token_bytes(32),
            None if self.exporter is None else self.exporter.headers,
            self.read_loop,
        )
        parts = self._make_parts(settings)
        self.generator: Final = Generator(
            self.fleet, parts, generate_settings(settings), self.live, self.buffers, self._spawn
        )
        authenticator = Authenticator(self.keyring, settings.server.trusted_proxies)
        self.sockets: Final = self._make_sockets(settings, parts, self.generator, authenticator)
        self.server: Final = self._make_server(settings, self.generator, authenticator)
        self.house: Final = self._make_house(settings, parts)
        self._operations: Final = Operations(
            self.house, whole, source, self._make_trail(settings), self._take_settings
        )
        self.addresses: list[str] = []
        self.admin_addresses: list[str] = []
        self.internal_addresses: list[str] = []

    # -- running

    async def run(
        self,
        *,
        last: bool = False,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serve until shut down. Started once the listeners accept connections.

        Args:
            last: the process ends afterwards; further signals are ignored, so that it does with status 0.

        Raises:
            OSError: an address can not be had.
        """
        listeners: list[trio.SocketListener] = []
        try:
            for ledger in self._ledgers:
                ledger.open()
            if self.exporter is not None:
                self.exporter.open()
            if self._place is None:
                listeners += await open_listeners(tuple(map(str, self.settings.server.bind)))
            else:
                listeners += self._place.open_listeners()
            with (
                _ignoring_afterwards(*ENDS, signal.SIGHUP, last=last),
                trio.open_signal_receiver(*ENDS) as ends,
                trio.open_signal_receiver(signal.SIGHUP) as reloads,
            ):
                async with trio.open_nursery() as nursery:
                    await self._start(nursery, listeners, reloads)
                    task_status.started()
                    await self._stopped(nursery, ends)
        finally:
            for listener in listeners:
                listener.socket.close()
            self.cycles.stop()
            self.connections.close()
            self.watch.close()
            if self.read_loop is not None:
                self.read_loop.close()
            for ledger in self._ledgers:
                ledger.close()
            if self.exporter is not None:
                self.exporter.close()
            if self._control is not None:
                self._control.close()
            if self._crowd is not None:
                self._crowd.close()
            if self._place is not None and self._abandoned.is_set():
                shutil.rmtree(self._place.folder, ignore_errors=True)  # nobody else is there to do it

    async def _start(
        self, nursery: trio.Nursery, listeners: list[trio.SocketListener], reloads: AsyncIterator[int]
    ) -> None:
        """Start every task of the gateway, and accept connections."""
        self._nursery = nursery
        watches = (self.watch.run, self.fleet_watch.run, self.named_workers.run, self.pod_workers.run)
        for task in (
            *watches,
            self.clocks.run,
            self.drain.run,
            self.admission.run,
            self._sweep,
        ):
            nursery.start_soon(task)
        if self.read_loop is not None:
            nursery.start_soon(self.read_loop.run)
        if self.follower is not None:
            await nursery.start(self.follower.run)
        if self.replica is not None:
            nursery.start_soon(self.registrations.meet)
            nursery.start_soon(self.replica.run)
            await self.replica.tried.wait()
        nursery.start_soon(self._operations.trail.run)
        nursery.start_soon(self._operations.auditor.run)
        nursery.start_soon(reload_at_signals, reloads, self._operations, self._log)
        if self.borrower is not None:
            nursery.start_soon(self._borrow, self.borrower)
        nursery.start_soon(self.certificates.run, self._note_certificate)
        metrics = Metrics(render_metrics, METRICS_TYPE)
        access, pages = self.house.access, DASHBOARD_PAGES
        app = make_admin_app(self._operations, access, metrics, self.report_bug, pages)
        binds = tuple(map(str, self.settings.admin.bind))
        if self._place is not None:
            binds = (f"unix:{self._place.admin_path}",)
        self.admin_addresses = await nursery.start(serve_admin, app, binds, self.report_bug)
        await self._open_to_workers(nursery)
        self._accept_loop = AcceptLoop(self._permits(), self.server.serve, self._complain, self._crowd)
        if self._owners is not None:
            await nursery.start(self._owners.run)
        if self.borrower is not None:
            await self.borrower.be_ready(boot_id=self.boot_id, configuration=self._read)
        if self._crowd is not None:
            self._crowd.enter()
        nursery.start_soon(self._accept, listeners, nursery)
        for listener in listeners:
            self.addresses.append(_address_of(listener, "http" if self.tls is None else "https"))
        public, admin, internal = self.addresses, self.admin_addresses, self.internal_addresses
        if self._place is None:
            self._log.write("info", "listening", public=public, admin=admin, internal=internal)
        else:
            self._log.write("info", "process_listening", public=public, admin=admin, internal=internal)
        self._look_at_certificate()
        sys.setswitchinterval(SWITCH_INTERVAL)
        self.cycles.start()
        nursery.start_soon(self.loop_watch.run)  # what stood still while it started, nobody waited for
        if self.borrower is not None:
            self.borrower.tell_serving()

    async def _accept(self, listeners: list[trio.SocketListener], nursery: trio.Nursery) -> None:
        """Accept connections, until this process retires."""
        accept = self._accept_loop
        assert accept is not None
        with self._accepting:
            async with trio.open_nursery() as accepting:
                for listener in listeners:
                    accepting.start_soon(accept.run, listener, nursery)

    def admit(self) -> bool:
        """See Adopter."""
        return self._accept_loop is not None and self._accept_loop.admit()

    def dismiss(self) -> None:
        """See Adopter."""
        assert self._accept_loop is not None
        self._accept_loop.dismiss()

    def adopt(self, sock: socket.socket, begun: bytes) -> None:
        """See Adopter."""
        assert self._accept_loop is not None
        assert self._nursery is not None
        self._accept_loop.adopt(sock, partial(self.server.serve, begun=begun), self._nursery)

    async def _open_to_workers(self, nursery: trio.Nursery) -> None:
        """Listen for workers that register, if the settings say so."""
        internal = self.settings.internal
        if internal.bind and internal.join_token is not None:
            app = make_internal_app(self.registrations, internal.join_token.get_secret_value())
            binds, tls = tuple(map(str, internal.bind)), self.inner_tls
            if self._place is not None:  # the supervisor has verified who speaks, and passes it on
                binds, tls = (f"unix:{self._place.internal_path}",), None
            self.internal_addresses = await nursery.start(
                serve_admin, app, binds, self.report_bug, MOST_AGENTS, tls, self._note_handshake
            )

    async def _stopped(self, nursery: trio.Nursery, signals: AsyncIterator[int]) -> None:
        """Wait for a signal, then shut down as the settings say; a second signal skips the waiting."""
        hurry = trio.Event()
        if await self._told_to_retire(signals) and await self._retire(signals):
            hurry.set()
        _exit_for_sure_after(self.settings.shutdown.hard_limit)
        with trio.move_on_after(self.settings.shutdown.hard_limit - FINAL_SECONDS):
            async with trio.open_nursery() as both:

                async def second_signal() -> None:
                    await self._told_to_end(signals)
                    hurry.set()

                both.start_soon(second_signal)
                await self.shut_down(hurry)
                if self.borrower is not None:
                    await self.borrower.tell_last(self.statistics())
                both.cancel_scope.cancel()
        nursery.cancel_scope.cancel()

    async def _told_to_retire(self, signals: AsyncIterator[int]) -> bool:
        """Wait until told to retire, or to end; answers whether it is to retire."""
        retire = True
        async with trio.open_nursery() as nursery:

            async def until_retired(borrower: Borrower) -> None:
                await borrower.retired.wait()
                nursery.cancel_scope.cancel()

            if self.borrower is not None:
                nursery.start_soon(until_retired, self.borrower)
            await self._told_to_end(signals)
            retire = False
            nursery.cancel_scope.cancel()
        return retire

    async def _retire(self, signals: AsyncIterator[int]) -> bool:
        """Serve what was accepted, while other processes accept what comes; False: told to end before.

        Who waits keeps its place. Connections that nobody uses are closed, after a delay in which whoever
        is about to use one is still served, and told to come on another one.
        """
        limits = self.settings.shutdown
        self._log.write("info", "retiring", running=len(self.live))
        self._accepting.cancel()
        if self._crowd is not None and self._place is not None:
            self._crowd.leave(self._place.number)
        self.server.retire()
        self.sockets.go_away(limits.readiness_delay + limits.grace)
        done = False
        async with trio.open_nursery() as nursery:

            async def until_told() -> None:
                await self._told_to_end(signals)
                nursery.cancel_scope.cancel()

            nursery.start_soon(until_told)
            with trio.move_on_after(limits.readiness_delay):
                await self.server.wait_none()
            self.server.close_idle()
            with trio.move_on_after(limits.grace):
                while len(self.live) or self.server.open:
                    await self.live.wait_none()
                    await self.server.wait_none()
            done = True
            nursery.cancel_scope.cancel()
        return done

    async def _told_to_end(self, signals: AsyncIterator[int]) -> None:
        """Wait for a signal, or the end of the supervisor, which is as good as any number of them."""
        async with trio.open_nursery() as nursery:

            async def until_abandoned() -> None:
                await self._abandoned.wait()
                nursery.cancel_scope.cancel()

            nursery.start_soon(until_abandoned)
            await anext(signals)
            nursery.cancel_scope.cancel()

    async def _borrow(self, borrower: Borrower) -> None:
        """Use what is lent until the supervisor is gone: nobody else counts what this process uses."""
        await borrower.run(self.admission)
        self._log.write("error", "supervisor_gone")
        self._abandoned.set()

    async def shut_down(self, hurry: trio.Event) -> None:
        """Refuse what is new, let what runs finish, end what is left.

        Args:
            hurry: set to skip the delay and the grace.
        """
        limits = self.settings.shutdown
        self.house.stopping = "shutting down"
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
        if self.replica is not None:
            await self.replica.leave()
        await self._operations.trail.finish(TRAIL_LIMIT)
        self._log.write("info", "stopped")

    async def _sweep(self) -> None:
        """About once a second: what is old is closed or forgotten, and streams tell of their progress."""
        while True:
            await trio.sleep(1)
            self.connections.sweep()
            self.sockets.sweep()
            self.generator.kept.sweep()
            await self.live.tell_progress(self.fleet.progressed)
            if self.replica is not None and self.replica.member.standing is Standing.ALONE:
                self.registrations.go_on_believing()
            for book in (expired := self.fleet.expire()):
                self._note_worker(book.worker.id, "expired: it sent no heartbeat")
            self.registrations.forget(expired)
            self.cycles.sweep(len(self.live))
            calmed = [held.has_calmed(MUCH_MEMORY) for held in (self.buffers, self.room)]
            if any(calmed):
                await trio.to_thread.run_sync(return_free_memory, abandon_on_cancel=True)

    # -- what the process tells

    @property
    def operations(self) -> Operations:
        """What operators see and do."""
        return self._operations

    @property
    def settings(self) -> Settings:
        """In force now."""
        return self._operations.configured.settings

    def not_ready(self) -> str | None:
        """Say why the gateway is not ready; None: it is."""
        return self.house.not_ready()

    def statistics(self) -> dict[str, Any]:
        """Answer the figures of this moment, the equations of conservation included."""
        return self._operations.statistics()

    def _take_callers(self, callers: Callers) -> None:
        """Have others call from now on, unless the file has other tenants by now than they were made with."""
        if callers.settings.tenants == self.settings.tenants:
            take_callers(self.house, callers)
        elif self.follower is not None:
            self.follower.look_again()

    def _take_settings(self, prepared: Prepared) -> None:
        self._basis = prepared.settings, prepared.merger
        if self.follower is not None and prepared.callers is not None:
            self.follower.look_again()

    @property
    def _ledgers(self) -> list[Ledger]:
        return [*(() if self.ledger is None else (self.ledger,)), *self._left_behind]

    def _make_trail(self, settings: Settings) -> Trail:
        """Make the trail of operators; that of several processes is the supervisor's."""
        database = settings.database.url
        if self._place is not None:
            return Trail(self.boot_id, Log(None))
        table = None if database is None else lambda: open_audit_table(database.value)
        return Trail(self.boot_id, self._log, table)

    @property
    def kept_answers(self) -> int:
        """Answers that can be resumed."""
        return self.house.kept_answers

    @property
    def kept_bytes(self) -> int:
        """Bytes that are kept for those who may resume."""
        return self.house.kept_bytes

    def _begin_watching(self, book: WorkerBook) -> None:
        self.fleet_watch.begin(book)
        self._note_worker(book.worker.id, "registered")

    def _note_worker(self, worker: str, detail: str) -> None:
        self._log.write("info", "worker", worker=worker, detail=detail)

    def _note_certificate(self, files: str, done: str) -> None:
        if done == READ_AGAIN:
            self._log.write("info", "certificates_read", files=files)
            if self.public_tls is not None:
                self.server.tls = self.public_tls.context
        else:
            self._log.write("error", "certificates_kept", files=files, reason=done)

    def _note_handshake(self, why: str) -> None:
        self._log.write("warning", "handshake_refused", reason=why)

    def _note_idle(self, worker: Worker, seconds: float, confirmed: bool) -> None:
        self.idle_times["confirmed" if confirmed else "assumed"] += 1
        self.idle_times["milliseconds"] += round(seconds * 1000)
        self.books.times.idle.see(seconds)

    def _keep_draining(self, worker: Worker, attempt_id: str, give_back: Callable[[], None]) -> None:
        def released() -> None:
            flight = self.live.flight(attempt_id.rpartition("-")[0])
            if flight is not None:
                flight.note("released", worker=worker.id, attempt=int(attempt_id.rpartition("-")[2]))
            give_back()

        self.drain.keep(worker, attempt_id, released)

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
        written = record_json(record)
        if self.ledger is not None:
            self.ledger.settle(record, written)
        self._log.write_object("info", "exchange", written)

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

    def _make_parts(self, settings: Settings) -> Parts:
        return Parts(
            admission=self.admission,
            attempts=AttemptParts(
                engine=self.engine,
                fleet=self.fleet,
                pool=self.buffers,
                limits=attempt_limits(settings),
                wall=time.time,
                troubled=self._troubled,
                gapped=self.books.times.gaps.see_all,
            ),
            books=self.books,
            budget=RetryBudget(settings.retry.budget_ratio),
            limits=exchange_limits(settings),
            clocks=self.clocks,
            boot_id=self.boot_id,
            accepted=self._accepted,
            settled=self._settled,
            bug=self.report_bug,
            rates=self.rates,
            tokens_of=self.admission.tokens_of,
            traced=None if self.exporter is None else self.exporter.ended,
        )

    def _make_replica(self, settings: Settings) -> Replica | None:
        """Make what shares with other replicas, if the settings say where."""
        cluster = settings.cluster
        if cluster.url is None:
            return None
        prepare_cluster()
        url = cluster.url
        address = StoreAddress(
            url.host,
            url.port,
            url.database,
            prefix=cluster.prefix,
            patience=cluster.patience,
            user=url.user,
            password=url.password,
            tls=url.tls,
            ca=cluster.ca,
        )
        member = Member(self.boot_id, cluster.lease)
        sharing = Sharing(
            self.admission,
            self.fleet,
            self.rates,
            member,
            split=cluster.on_loss == "split",
            registrations=self.registrations,
            secrets=self._shared_secrets,
        )
        return Replica(
            ReplicaSettings(cluster.lease, min(cluster.lease / 4, 1.0)),
            member,
            lambda: connect(address),
            sharing,
            self._note_store,
        )

    def _note_store(self, found: bool, detail: str) -> None:
        if found:
            self._log.write("info", "store_found", detail=detail)
        else:
            self._log.write("warning", "store_lost", reason=detail)

    def _make_exporter(self, settings: Settings) -> Exporter | None:
        telemetry = settings.telemetry
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

    def _make_sockets(
        self, settings: Settings, parts: Parts, generator: Generator, authenticator: Authenticator
    ) -> Sockets:
        streams = SocketStreams(
            generator, parts, self.live, self.books, self.room, lambda: self._refusal, self._spawn
        )
        return Sockets(socket_settings(settings), authenticator, self.keyring, streams, self.buffers)

    def _spawn(self, task: Callable[[], Awaitable[None]]) -> None:
        """Run something in the gateway's own nursery; a fault of it is nobody else's."""

        async def contained() -> None:
            try:
                await task()
            except Exception as exc:
                self.report_bug("stream", exc)

        assert self._nursery is not None
        self._nursery.start_soon(contained)

    def _make_server(
        self, settings: Settings, generator: Generator, authenticator: Authenticator
    ) -> HttpServer:
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
        if self._place is not None:
            self._owners = Owners(self._place, door.look, door.keeps, self)
            door.elsewhere, door.hand_over = self._owners.ask, self._owners.hand_over
        return HttpServer(
            door,
            self.watch,
            server_limits(settings),
            self.report_bug,
            lambda: self._refusal is not None,
            self.tls,
            self.room,
        )

    def _make_access(self, settings: Settings) -> Access:
        """Say who may come in: operators, or the supervisor in their place."""
        if self._place is not None:
            return Access([AdminToken("supervisor", self._place.digest, "operator")], fixed=True)
        tokens = [AdminToken(token.id, token.digest, token.role) for token in settings.admin.tokens]
        names = [bind.host for bind in settings.admin.bind if bind.host]
        local = all(bind.local for bind in settings.admin.bind)
        return Access(tokens, [*settings.admin.hosts, *names], local=local)

    def _make_house(self, settings: Settings, parts: Parts) -> House:
        return House(
            boot_id=self.boot_id,
            started=self._started,
            log=self._log,
            books=self.books,
            ledger=self.ledger,
            live=self.live,
            admission=self.admission,
            fleet=self.fleet,
            drain=self.drain,
            fleet_watch=self.fleet_watch,
            registrations=self.registrations,
            keyring=self.keyring,
            rates=self.rates,
            follower=self.follower,
            buffers=self.buffers,
            connections=self.connections,
            engine=self.engine,
            room=self.room,
            generator=self.generator,
            sockets=self.sockets,
            server=self.server,
            access=self._make_access(settings),
            parts=parts,
            idle_times=self.idle_times,
            loop_watch=self.loop_watch,
            watch=self.watch,
            certificates=self.certificates,
            exporter=self.exporter,
            part=self._part,
            borrower=self.borrower,
            capacity=None if self._place is None else self._place.capacity,
            replica=self.replica,
        )

    @property
    def _via(self) -> str:
        return f"trio-gateway-{self.boot_id}"

    def _permits(self) -> trio.Semaphore:
        """One permit a connection, never more than descriptors allow: each may need one upstream too."""
        allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        fitting = max((allowed - SPARE_DESCRIPTORS) // 2, 1)
        wanted = settings_of(self.settings, self._part).limits.connections
        if fitting < wanted:
            self._log.write(
                "warning", "fewer_connections", wanted=wanted, possible=fitting, descriptors=allowed
            )
        return trio.Semaphore(min(wanted, fitting))


async def _wait_at_most(seconds: float, hurry: trio.Event) -> None:
    with trio.move_on_after(seconds):
        await hurry.wait()


@contextlib.contextmanager
def _ignoring_afterwards(*signals: signal.Signals, last: bool) -> Iterator[None]:
    """Ignore what comes when nobody hears signals any more: by default each of them kills.

    Trio sends those again that were not heard. The handlers of before come back, but for the last time.
    """
    before = {each: signal.signal(each, signal.SIG_IGN) for each in signals}
    try:
        yield
    finally:
        if not last:
            for each, handler in before.items():
                signal.signal(each, handler)


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


def _make_ledger(settings: Settings, boot_id: str, log: Log, number: int) -> Ledger | None:
    """Make the ledger of a process, which has a journal and a name of its own."""
    database = settings.database
    if database.url is None:
        return None
    journal, name = Path(database.journal), database.gateway_id
    return Ledger(
        LedgerSettings(
            database.url.value,
            journal / f"process-{number}" if number else journal,
            database.journal_bytes,
            database.sync_interval,
            database.retention_days,
            f"{name}-{number}" if name and number else name,
        ),
        boot_id,
        log,
    )


def _make_ledgers_left_behind(settings: Settings, boot_id: str, log: Log, part: Part) -> list[Ledger]:
    """Make the ledgers of processes that there were once: what their journals still have, gets replayed."""
    if part.number or settings.database.url is None:
        return []
    found = sorted(Path(settings.database.journal).glob("process-*"))
    numbers = [int(path.name.removeprefix("process-")) for path in found if path.name[8:].isdigit()]
    ledgers = [_make_ledger(settings, boot_id, log, number) for number in numbers if number >= part.of]
    return [ledger for ledger in ledgers if ledger is not None]


def _make_shared_secrets(settings: Settings) -> SharedSecrets | None:
    """Make what replicas make workers' secrets with, where they share workers that register."""
    cluster, token = settings.cluster, settings.internal.join_token
    if cluster.url is None or token is None:
        return None
    return SharedSecrets(Vouching(token.get_secret_value(), cluster.prefix))


def _secrets_of(place: Place | None, shared: SharedSecrets | None) -> Callable[[Registration], str]:
    """Answer what makes the secret of a worker, which may register with several processes or replicas."""
    if shared is not None:
        return shared.make
    if place is not None:
        return lambda asked: place.secret_for("worker", asked.worker_id, asked.incarnation, asked.url)
    return make_secret


def _make_fleet(settings: Settings, certificates: Certificates, place: Place | None) -> Fleet:
    lent = place is not None and place.shares
    split = place is not None and place.capacity == "split"
    return Fleet(
        [make_worker(worker, certificates) for worker in settings.workers if not worker.many],
        routes_of(settings),
        trio.current_time,
        fleet_settings(settings, place.part if place is not None and split else WHOLE, lent=lent),
    )
