"""The agent as a whole: builds the parts, starts them in order, and ends them in order.

States: *starting* until the engine is ready, *ready*, *draining* from the first
signal on (what runs may finish), *stopping* when the rest is ended.
"""

from __future__ import annotations

import enum
import signal
import socket
import time
from collections.abc import Callable
from typing import Any, Final

import trio

from ..flow import READ_AGAIN, Certificates, shake_hands
from ..units import KiB
from ..wire import EngineKind, Registration, WorkerReport, WorkerState
from ._engine import AgentEngine
from ._generation import Generations
from ._register import LOOK_EVERY, Registrar, Superseded
from ._releases import Releases
from ._server import AgentServer, Credentials
from ._settings import AgentSettings
from ._slots import Slots

BACKLOG: Final = 1024
SEND_BUFFER: Final = 64 * KiB  # bytes in the kernel beside the cap of each request
LAST_CALLS: Final = 2.0  # seconds to sign off at all gateways
SLOW_START: Final = 5.0  # seconds after which an engine that is not ready yet is worth a line of the log
LINGER: Final = 0.25  # seconds in which late requests are still turned away, after signing off
SCHEMES: Final = ("http", "https")
STATIC: Final = "static"  # name of gateways that know this worker from their file


class HowEnded(enum.Enum):
    """How an agent ended."""

    DRAINED = enum.auto()
    SUPERSEDED = enum.auto()


Say = Callable[..., None]


class Agent:
    """A worker's agent.

    Args:
        say: takes an event's level, its name and further fields, for the log.

    Raises:
        OSError: a certificate can not be read, or is not that of its key.
        ValueError: its key is encrypted.

    Attributes:
        address: base URL at which it listens, once it has started.
    """

    def __init__(self, settings: AgentSettings, engine: AgentEngine, say: Say) -> None:
        self._settings = settings
        self._engine = engine
        self._say = say
        # Microseconds: grows with each start, and is whole in every reader of JSON.
        self._incarnation = time.time_ns() // 1000
        self._seq = 0
        self._ending: WorkerState | None = None
        self._hurry = trio.Event()
        self._drain = trio.Event()
        self._superseded = False
        self.address = ""
        self.slots: Final = Slots()
        self.releases: Final = Releases()
        self._certificates = Certificates()
        files = settings.certificate, settings.key, settings.ca
        self._inner_tls = None if settings.certificate is None else self._certificates.get("server", *files)
        self._outer_tls = self._certificates.get("client", *files) if any(files) else None
        self._credentials = Credentials()
        if settings.secret is not None:
            self._credentials.learn(STATIC, settings.secret)

    # -- what it tells

    @property
    def state(self) -> WorkerState:
        """Where it is in its life."""
        if self._ending is not None:
            return self._ending
        return "ready" if self._engine.status().ready else "starting"

    @property
    def slots_in_all(self) -> int:
        """Places in the engine."""
        return self._settings.slots or self._engine.status().slots or 1

    def not_ready(self) -> str | None:
        """Say why no work is taken; None: it is."""
        return None if self.state == "ready" else self.state

    def registration(self) -> Registration:
        """See `_register.Worker`."""
        return Registration(
            worker_id=self._settings.worker_id,
            incarnation=self._incarnation,
            url=self._settings.url or self.address,
            models=list(self._engine.status().models),
            slots=self.slots_in_all,
            engine=EngineKind(self._engine.kind, self._engine.version[:128]),
            labels=list(self._settings.labels),
        )

    def report(self) -> WorkerReport:
        """See `_register.Worker`."""
        return self._report(requests=True)

    def _report(self, *, requests: bool = False) -> WorkerReport:
        status = self._engine.status()
        self._seq += 1
        fields: dict[str, Any] = {"requests": self.slots.running()} if requests else {}
        return WorkerReport(
            incarnation=self._incarnation,
            seq=self._seq,
            state=self.state,
            models=list(status.models),
            slots=self.slots_in_all,
            # Both count what was cancelled and not let go; others may use the engine, too.
            running=max(len(self.slots), status.running),
            queued=status.queued,
            kv_usage_ratio=status.kv_usage_ratio,
            tokens_per_second=status.tokens_per_second,
            **fields,
        )

    def news(self) -> object:
        """See `_register.Worker`."""
        return self.state, self._engine.status().models, self.slots_in_all

    # -- its life

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> HowEnded:
        """Serve until drained. Started once it listens; the engine may still be loading then.

        Raises:
            OSError: the address can not be had.
        """
        listeners = await _listen(self._settings.bind)
        registrars = [self._registrar(gateway) for gateway in self._settings.gateways]
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(self._engine.run)
                generations = Generations(
                    self._engine, self._settings, self.slots, self.releases, self._report, nursery
                )
                server = AgentServer(
                    self._credentials,
                    generations,
                    self.slots,
                    self.releases,
                    self._settings.body_bytes,
                    self.not_ready,
                    self._report_bug,
                )
                for listener in listeners:
                    nursery.start_soon(self._accept, listener, server, nursery)
                self.address = _address_of(listeners[0], secured=self._inner_tls is not None)
                nursery.start_soon(self._certificates.run, self._tell_of_certificates)
                self._say("info", "listening", address=self.address, worker=self._settings.worker_id)
                nursery.start_soon(self._tell_of_engine)
                task_status.started()
                async with trio.open_nursery() as registering:
                    for registrar in registrars:
                        registering.start_soon(self._keep_registered, registrar)
                    await self._drain.wait()
                    await self._finish(generations)
                    registering.cancel_scope.cancel(reason="the agent ends")
                await self._sign_off(registrars)
                for listener in listeners:
                    listener.socket.close()
                await trio.sleep(LINGER)
                nursery.cancel_scope.cancel(reason="the agent ends")
        finally:
            for listener in listeners:
                listener.socket.close()
            with trio.move_on_after(LAST_CALLS, shield=True):
                for registrar in registrars:
                    await registrar.close()
        self._say("info", "stopped", worker=self._settings.worker_id)
        return HowEnded.SUPERSEDED if self._superseded else HowEnded.DRAINED

    def drain(self) -> None:
        """Take no more work, and end when what runs has finished; a second call hurries."""
        if self._drain.is_set():
            self._hurry.set()
        else:
            self._ending = "draining"
            self._say("info", "draining", worker=self._settings.worker_id, running=len(self.slots))
            self._drain.set()

    async def run_until_signalled(self) -> HowEnded:
        """As `run`, drained by SIGTERM or SIGINT; a second one hurries. SIGHUP: read certificates again."""
        reading = (signal.SIGHUP,) if self._outer_tls is not None else ()
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, *reading) as signals:
            async with trio.open_nursery() as nursery:

                async def drain_on_signals() -> None:
                    async for number in signals:
                        if number in reading:
                            await self._certificates.refresh(self._tell_of_certificates, anyway=True)
                        else:
                            self.drain()

                nursery.start_soon(drain_on_signals)
                ended = await self.run()
                nursery.cancel_scope.cancel(reason="the agent has ended")
        return ended

    async def _finish(self, generations: Generations) -> None:
        """Let what runs finish within the grace, then end it."""
        async with trio.open_nursery() as nursery:

            async def until_hurried() -> None:
                await self._hurry.wait()
                nursery.cancel_scope.cancel(reason="hurried")

            nursery.start_soon(until_hurried)
            with trio.move_on_after(self._settings.grace):
                await self.slots.wait_none()
                await generations.wait_none()
            nursery.cancel_scope.cancel(reason="nothing runs")
        self._ending = "stopping"
        self.slots.cancel_all()
        with trio.move_on_after(LAST_CALLS):
            await self.slots.wait_none()  # so that gateways hear of it

    async def _sign_off(self, registrars: list[Registrar]) -> None:
        if self._superseded:
            return  # the younger one has the name now
        with trio.move_on_after(LAST_CALLS):
            async with trio.open_nursery() as nursery:
                for registrar in registrars:
                    nursery.start_soon(registrar.sign_off)

    async def _keep_registered(self, registrar: Registrar) -> None:
        try:
            await registrar.run()
        except Superseded as exc:
            worker = self._settings.worker_id
            self._say("error", "superseded", gateway=registrar.gateway, worker=worker, detail=str(exc))
            self._superseded = True
            if not self._drain.is_set():
                self.drain()

    def _registrar(self, gateway: str) -> Registrar:
        return Registrar(
            gateway,
            self._settings.join_token or "",
            self,
            self._credentials.learn,
            self._tell_of_gateway,
            tls=self._outer_tls,
        )

    def _tell_of_gateway(self, gateway: str, event: str, detail: str) -> None:
        level = "info" if event == "registered" else "warning"
        self._say(level, event, gateway=gateway, detail=detail)

    def _tell_of_certificates(self, files: str, done: str) -> None:
        if done == READ_AGAIN:
            self._say("info", "certificates_read", files=files)
        else:
            self._say("error", "certificates_kept", files=files, reason=done)

    async def _tell_of_engine(self) -> None:
        """Log when the engine begins and ceases to take work, and once that it has not begun yet."""
        ready: bool | None = None
        slow_at = trio.current_time() + SLOW_START
        while True:
            status = self._engine.status()
            told = status.ready or ready is not None or trio.current_time() >= slow_at
            if told and status.ready is not ready:
                ready = status.ready
                event = "engine_ready" if ready else "engine_not_ready"
                self._say(
                    "info" if ready else "warning", event, engine=self._engine.kind, models=status.models
                )
            await trio.sleep(LOOK_EVERY)

    def _report_bug(self, exc: BaseException) -> None:
        self._say("error", "bug", error=type(exc).__name__, detail=repr(exc)[:500])

    async def _accept(
        self, listener: trio.SocketListener, server: AgentServer, nursery: trio.Nursery
    ) -> None:
        while True:
            try:
                stream = await listener.accept()
            except trio.ClosedResourceError:
                return
            except OSError:
                await trio.sleep(0.1)  # no descriptor left, or that one has left already
                continue
            nursery.start_soon(self._serve, stream, server)

    async def _serve(self, stream: trio.SocketStream, server: AgentServer) -> None:
        """Serve a connection, with TLS if this agent has a certificate."""
        if self._inner_tls is None:
            await server.serve(stream)
            return
        secured = trio.SSLStream(stream, self._inner_tls.context, server_side=True, https_compatible=True)
        try:
            why = await shake_hands(secured)
            if why is None:
                await server.serve(secured)
            else:
                self._say("warning", "handshake_refused", reason=why)
        finally:
            stream.socket.close()


async def _listen(bind: str) -> list[trio.SocketListener]:
    host, _, port = bind.rpartition(":")
    try:
        listeners = await trio.open_tcp_listeners(int(port), host=host.strip("[]") or None, backlog=BACKLOG)
    except OSError as exc:
        raise OSError(exc.errno, exc.strerror, bind) from exc  # the system's own words name no address
    for listener in listeners:
        sock = listener.socket
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        for option, value in ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
    return listeners


def _address_of(listener: trio.SocketListener, *, secured: bool) -> str:
    scheme = SCHEMES[secured]
    host, port = listener.socket.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
