"""The supervisor: binds the sockets, starts the processes, keeps them running, and ends them.

Each process is started anew by the same command, with the public sockets as open descriptors; nothing is
forked while a loop runs. None of them has anything of another: when one dies, what it served ends, and
nothing else. It serves no client itself.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import shutil
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import trio

from ..admin import DASHBOARD_PAGES, Access, Actor, AdminToken, Metrics, Row, make_admin_app, serve_admin
from ..config import Settings, Source
from ..edge import open_listeners
from ..errors import Refused
from ..flow import READ_AGAIN, Certificates
from ..lending import Broker, Crowd, Place
from ..operations import Trail, open_audit_table, reload_at_signals
from ..telemetry import METRICS_TYPE, Log, render_metrics
from . import _merge
from ._child import Child, NoAnswer
from ._internal import WorkerDoor, make_internal_app
from ._operations import ManyOperations

ENDS: Final = (signal.SIGTERM, signal.SIGINT)
FIRST_PAUSE: Final = 0.25  # seconds until a process that died is started again, if it lived long
LONGEST_PAUSE: Final = 30.0  # seconds; doubled for each that did not
LIVED: Final = 30.0  # seconds after which a process has lived long
BEYOND: Final = 2.0  # seconds that processes may take beyond their own hard limit
LOOK_EVERY: Final = 5.0  # seconds; what was counted since is lost with a process that is killed
FEWEST_CALLS: Final = 5  # without an answer for as long as a process may hang
CALL_EVERY: Final = 0.25  # seconds, or sooner; so soon nothing more is lent to one that hangs
START_LIMIT: Final = 120.0  # seconds for a process to serve; many that start at once share the processors
TRAIL_LIMIT: Final = 1.0  # seconds for what operators did to get into the database
MOST_AGENTS: Final = 1024  # connections of agents at a time


class ProcessEnded(Exception):
    """A process ended before it had ever served: the gateway can not start."""


class Supervisor:
    """See the module's docstring.

    Args:
        source: where the settings come from.
        command: that starts a process.
        log: takes messages.

    Attributes:
        children: the processes, in the order of their numbers.
        ended: figures of those that are gone.
        copy: file with the configuration's text that is in force.
    """

    def __init__(self, source: Source, command: Sequence[str], log: Log) -> None:
        self.boot_id = secrets.token_hex(8)
        self.started = trio.current_time()
        self.source = source
        self.settings: Settings = source.settings
        self.log = self._log = log
        self.stopping = False
        self.ended: list[Row] = []
        self.broker = Broker()
        self._certificates = Certificates()
        fleet, token = self.settings.fleet, self.settings.internal.join_token
        self._workers = WorkerDoor(
            lambda: self.children,
            fleet.ttl,
            fleet.heartbeat_interval,
            "" if token is None else token.get_secret_value(),  # then there is no listener
            log,
        )
        self._command = tuple(command)
        self._latest: dict[int, Row] = {}
        self._numbers = 0
        self._nursery: trio.Nursery | None = None
        self._replacing = False
        self._running = 0
        self._all_ended = trio.Event()
        self._listeners: list[trio.SocketListener] = []
        self._folder = Path(tempfile.mkdtemp(prefix="trio-gateway-"))  # nobody else can enter it
        self.copy = self._folder / "gateway.toml"
        admin = self.settings.admin
        self.access = Access(
            [AdminToken(token.id, token.digest, token.role) for token in admin.tokens],
            [*admin.hosts, *(bind.host for bind in admin.bind if bind.host)],
            local=all(bind.local for bind in admin.bind),
        )
        database = self.settings.database.url
        table = None if database is None else lambda: open_audit_table(database.value)
        self.operations = ManyOperations(self, Trail(self.boot_id, log, table))
        self._crowd_descriptor = Crowd.make(self.settings.processes)
        self._crowd = Crowd(self._crowd_descriptor, self.settings.processes)
        self._secret = secrets.token_urlsafe(32)
        self.children: Sequence[Child] = ()

    @property
    def capacity(self) -> Literal["shared", "split", "cluster"]:
        """How processes count slots together; see `Place`."""
        return self.settings.server.capacity if self.settings.cluster.url is None else "cluster"

    async def run(self) -> None:
        """Serve until shut down.

        Raises:
            OSError: an address can not be had.
            ProcessEnded: a process can not start.
        """
        try:
            self.copy.write_text(self.source.text, encoding="utf-8")
            self._listeners = await open_listeners(tuple(map(str, self.settings.server.bind)))
            self.children = [Child(self._place(number)) for number in range(self.settings.processes)]
            with (
                _ignoring_afterwards(*ENDS, signal.SIGHUP, signal.SIGUSR2),
                trio.open_signal_receiver(*ENDS) as ends,
                trio.open_signal_receiver(signal.SIGHUP) as reloads,
                trio.open_signal_receiver(signal.SIGUSR2) as replacements,
            ):
                async with trio.open_nursery() as nursery:
                    if await self._start(nursery, ends):
                        nursery.start_soon(reload_at_signals, reloads, self.operations, self.log)
                        nursery.start_soon(self._replace_at_signals, replacements)
                        await anext(ends)
                    await self._stop(ends)
                    nursery.cancel_scope.cancel()
        finally:
            for listener in self._listeners:
                listener.socket.close()
            self._crowd.close()
            os.close(self._crowd_descriptor)
            shutil.rmtree(self._folder, ignore_errors=True)

    # -- starting

    def _place(self, number: int) -> Place:
        return Place(
            number=number,
            of=self.settings.processes,
            capacity=self.capacity,
            listeners=tuple(listener.socket.fileno() for listener in self._listeners),
            control=-1,
            crowd=self._crowd_descriptor,
            folder=str(self._folder),
            secret=self._secret,
        )

    async def _start(self, nursery: trio.Nursery, ends: AsyncIterator[int]) -> bool:
        """Start all processes, and the doors to them; False: told to end meanwhile."""
        self._nursery = nursery
        nursery.start_soon(self.broker.run)
        nursery.start_soon(self._certificates.run, self._note_certificate)
        nursery.start_soon(self.operations.trail.run)
        for child in self.children:
            nursery.start_soon(self._keep, child)
        async with trio.open_nursery() as starting:

            async def until_told() -> None:
                await anext(ends)
                starting.cancel_scope.cancel()

            async def until_all_serve() -> None:
                for child in self.children:
                    await child.served.wait()
                starting.cancel_scope.cancel()

            starting.start_soon(until_told)
            starting.start_soon(until_all_serve)
        if not all(child.ready for child in self.children):
            return False
        metrics = Metrics(render_metrics, METRICS_TYPE)
        app = make_admin_app(self.operations, self.access, metrics, self._report_bug, DASHBOARD_PAGES)
        binds = tuple(map(str, self.settings.admin.bind))
        admin = await nursery.start(serve_admin, app, binds, self._report_bug)
        internal = await self._open_to_workers(nursery)
        nursery.start_soon(self._look)
        self.log.write(
            "info",
            "listening",
            public=[_address_of(each, self.settings) for each in self._listeners],
            admin=admin,
            internal=internal,
        )
        return True

    async def _open_to_workers(self, nursery: trio.Nursery) -> list[str]:
        internal = self.settings.internal
        if not internal.bind:
            return []
        app = make_internal_app(self._workers)
        binds = tuple(map(str, internal.bind))
        shown = internal.tls
        tls = (
            None
            if shown is None
            else self._certificates.get("server", shown.certificate, shown.key, shown.ca)
        )
        found: list[str] = await nursery.start(
            serve_admin, app, binds, self._report_bug, MOST_AGENTS, tls, self._note_handshake
        )
        return found

    def _note_certificate(self, files: str, done: str) -> None:
        if done == READ_AGAIN:
            self.log.write("info", "certificates_read", files=files)
        else:
            self.log.write("error", "certificates_kept", files=files, reason=done)

    def _note_handshake(self, why: str) -> None:
        self.log.write("warning", "handshake_refused", reason=why)

    # -- one process

    async def _keep(self, child: Child) -> None:
        """Run a process, and another one when it has died, for ever.

        Raises:
            ProcessEnded: the first one never served.
        """
        pause = FIRST_PAUSE
        try:
            while self._goes_on():
                status = await self._run_or_fail(child)
                lived = trio.current_time() - child.started_at
                child.boot_id = None
                if not self._goes_on():
                    return
                if not child.served.is_set():
                    raise ProcessEnded(f"process {child.number} ended with status {status} at its start")
                if child.retiring:
                    child.retiring = False
                    self.log.write("info", "process_retired", process=child.number, status=status)
                    continue
                pause = FIRST_PAUSE if lived >= LIVED else pause
                self._note_end(child, status, pause)
                await trio.sleep(pause)
                pause = min(pause * 2, LONGEST_PAUSE)
                child.restarts += 1
                child.tell()
        finally:
            with trio.move_on_after(1, shield=True):
                await child.close()

    def _note_end(self, child: Child, status: int | OSError, pause: float) -> None:
        number = child.number
        if isinstance(status, OSError):
            reason = str(status)
            self.log.write("error", "process_not_started", process=number, reason=reason, again_in=pause)
        else:
            self.log.write("error", "process_ended", process=number, status=status, again_in=pause)

    def _goes_on(self) -> bool:
        return not self.stopping

    async def _run_or_fail(self, child: Child) -> int | OSError:
        """Run a process; answers its status, or why it could not be started, as one before it could.

        There may be no descriptor, memory or process left for it. That goes by, and the others serve.
        """
        try:
            return await self._run_once(child)
        except OSError as error:
            if not child.served.is_set():
                raise
            child.started_at = trio.current_time()
            return error

    async def _run_once(self, child: Child) -> int:
        """Run a process from its start to its end; answers its status. Raises OSError: it can not start."""
        ours, theirs = socket.socketpair()
        self._numbers += 1
        child.borrower = number = self._numbers
        child.tell()
        child.started_at = trio.current_time()
        try:
            with theirs:
                place = _with_control(child.place, theirs.fileno())
                process = await trio.lowlevel.open_process(
                    self._command,
                    env={**os.environ, **place.variables()},
                    pass_fds=(*place.listeners, theirs.fileno(), place.crowd),
                    start_new_session=True,  # a terminal's Ctrl-C is for the supervisor alone
                )
        except BaseException:
            ours.close()
            raise
        child.process = process
        self._running += 1
        if self.stopping:
            process.send_signal(signal.SIGTERM)  # it was not there yet when all were told
        self.log.write("info", "process_started", process=child.number, pid=process.pid)
        try:
            async with trio.open_nursery() as nursery:
                ours.setblocking(False)

                def ready(known: dict[str, Any]) -> None:
                    if known:
                        nursery.start_soon(self._welcome, child, number, known)
                    else:
                        child.ready = True
                        child.served.set()
                        child.tell()

                nursery.start_soon(self._serve_broker, child, number, ours, ready)
                nursery.start_soon(self._watch, child, number, process)
                status = await process.wait()
                child.leave()
                nursery.cancel_scope.cancel()
        finally:
            child.leave()
            child.process = None
            self._crowd.leave(child.number)
            process.kill()  # without effect if it has ended
            with trio.move_on_after(BEYOND, shield=True):
                await process.wait()
            self._running -= 1
            if not self._running:
                self._all_ended.set()
        self._bury(child)
        return status

    async def _serve_broker(self, child: Child, number: int, ours: socket.socket, ready: Any) -> None:
        """Lend to a process; one that says what can not be is ended, for its books are wrong."""
        process, patience = child.process, BEYOND
        try:
            await self.broker.serve(number, ours, ready, lambda last: self._take_last(child, last))
        except Exception as error:
            self._report_bug("broker", error)
            patience = 0.0
        if process is not None and not self.stopping:
            with trio.move_on_after(patience):
                await process.wait()  # it ends by itself, and tells why
            process.kill()

    def _take_last(self, child: Child, counted: Row) -> None:
        self._latest[child.number] = counted
        self._bury(child)
        child.leave()  # there is nothing more to count either

    async def _watch(self, child: Child, number: int, process: trio.Process) -> None:
        """Kill a process whose loop does not answer any more, or that does not begin to serve.

        Only calls count, so nobody is thought to hang while the whole machine stood still.
        """
        begun, limit = trio.current_time(), self.settings.server.hang_limit
        calls = max(FEWEST_CALLS, math.ceil(limit / CALL_EVERY))
        while True:
            await trio.sleep(limit / calls)
            silent = self.broker.call(number)
            late = child.boot_id is None and trio.current_time() - begun > START_LIMIT
            if self.stopping:
                continue  # how long that takes has a limit of its own
            if silent >= calls or (late and not child.retiring):
                self.log.write("error", "process_hangs", process=child.number, pid=process.pid)
                process.kill()
                return

    async def _welcome(self, child: Child, number: int, known: dict[str, Any]) -> None:
        """Have a process that is there now know what the others know, and let it serve."""
        await self._workers.welcome(child)  # before orders, which may name them
        await self.operations.welcome(child, known["configuration"])
        child.boot_id = known["boot_id"]
        self.broker.let_go(number)

    def _bury(self, child: Child) -> None:
        """Keep what a process that is gone had counted, as far as it told."""
        row = self._latest.pop(child.number, None)
        if row is not None:
            self.ended = [_merge.lasting_together([*self.ended, _merge.lasting(row)])]

    async def _look(self) -> None:
        """See now and then what each process has counted, for ever."""
        while True:
            for child in self.children:
                if child.ready:
                    with contextlib.suppress(NoAnswer, Refused):
                        found = await child.read("/statistics")
                        if child.ready:
                            self._latest[child.number] = found
            await trio.sleep(LOOK_EVERY)

    # -- changing and stopping

    def replace(self) -> bool:
        """Have one process after the other replaced by a new one; False: that is under way."""
        if self._replacing or self._nursery is None:
            return False
        self._replacing = True
        self._nursery.start_soon(self._replace_all)
        return True

    async def _replace_at_signals(self, signals: AsyncIterator[int]) -> None:
        actor = Actor("SIGUSR2", "operator", "signal")
        async for _ in signals:
            with contextlib.suppress(Refused):
                await self.operations.act(actor, "processes.replace", None, {})

    async def _replace_all(self) -> None:
        self.log.write("info", "replacing", processes=len(self.children))
        try:
            for child in self.children:
                if not await self._replace(child):
                    self.log.write("error", "replacing_stopped", process=child.number)
                    return
            self.log.write("info", "replaced", processes=len(self.children))
        finally:
            self._replacing = False

    async def _replace(self, child: Child) -> bool:
        """Replace a process that serves; False: there is no new one that serves.

        The old one is told to retire: until it ends it has its number, and what belongs to that. The others
        accept what comes meanwhile.
        """
        old, restarts = child.borrower, child.restarts
        with trio.move_on_after(START_LIMIT):
            await child.until(lambda: child.ready)
        process = child.process
        if not child.ready or process is None:
            return False
        if child.restarts != restarts:
            return True  # it died, and is a new one already
        child.retiring = True
        self.broker.retire(old)
        with trio.move_on_after(self.settings.shutdown.hard_limit + BEYOND) as patience:
            await child.until(lambda: child.borrower != old)
        if patience.cancelled_caught:
            process.kill()

        def serves() -> bool:
            return child.borrower != old and child.ready and child.restarts == restarts

        with trio.move_on_after(START_LIMIT):
            await child.until(lambda: serves() or child.restarts != restarts)
        return serves()

    async def _stop(self, ends: AsyncIterator[int]) -> None:
        """Have all processes shut down as one does; those that do not are killed."""
        self.stopping = True
        self.log.write("info", "shutting_down", running=self._running)
        self._all_ended = trio.Event()
        self._signal_all()
        if self._running:
            with trio.move_on_after(self.settings.shutdown.hard_limit + BEYOND):
                async with trio.open_nursery() as nursery:

                    async def further_signals() -> None:
                        async for _ in ends:
                            self._signal_all()

                    nursery.start_soon(further_signals)
                    await self._all_ended.wait()
                    nursery.cancel_scope.cancel()
        await self.operations.trail.finish(TRAIL_LIMIT)
        self.log.write("info", "stopped")

    def _signal_all(self) -> None:
        for child in self.children:
            if child.process is not None:
                child.process.send_signal(signal.SIGTERM)

    def _report_bug(self, where: str, exc: BaseException) -> None:
        self._log.exception("bug", exc, where=where)


def _with_control(place: Place, control: int) -> Place:
    return msgspec.structs.replace(place, control=control)


def _address_of(listener: trio.SocketListener, settings: Settings) -> str:
    name = listener.socket.getsockname()
    if isinstance(name, tuple):
        host = f"[{name[0]}]" if ":" in name[0] else name[0]
        return f"{'http' if settings.server.tls is None else 'https'}://{host}:{name[1]}"
    return f"unix:{name}"


@contextlib.contextmanager
def _ignoring_afterwards(*signals: signal.Signals) -> Iterator[None]:
    """Ignore what comes when nobody hears signals any more: the process is about to end with status 0."""
    for each in signals:
        signal.signal(each, signal.SIG_IGN)
    yield
