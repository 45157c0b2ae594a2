"""Hypercorn for operators, guarded: no request of theirs can end the process or hold up its end.

Stock Hypercorn's Trio worker lets any exception of one connection leave through
its server nursery, writes under a shield without a limit, keeps a connection
that its peer closed for as long as an idle one, and one whose peer closed it with
further requests sent for ever. All are cured by the subclass here (the first two
are measured and described in docs/decisions). Whoever keeps
many connections open locks nobody out: the one that was idle for longest gives way.
What a peer does wrong is kept from raising anything, so that whatever is raised is a bug.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import h11
import trio
from hypercorn.config import Config, Sockets
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol import ProtocolWrapper
from hypercorn.protocol.h11 import H2ProtocolAssumedError, H11Protocol
from hypercorn.trio import run as hypercorn_run
from hypercorn.trio import serve, tcp_server
from hypercorn.trio.tcp_server import TCPServer
from starlette.applications import Starlette

from ..contract import TlsPort
from ..flow import shake_hands

STUCK: Final = 5.0  # seconds that one write to an operator may take
MOST_OPERATORS: Final = (
    32  # connections at a time; the gateway keeps twice as many descriptors free of clients
)


class NoWebSocket(Exception):
    """The request offers a WebSocket, and has been refused."""


class NoUpgrade(H11Protocol):
    """HTTP/1.1 and nothing else.

    An offer of HTTP/2 is not taken up (RFC 9110 7.8: a server may ignore it). Nothing here speaks WebSocket,
    so one that is offered is refused before Hypercorn has read what belongs to it: what it can not read, or
    comes before its answer, it takes for a fault of its own.
    """

    async def _check_protocol(self, event: h11.Request) -> None:
        # As Hypercorn reads them, which drops more blanks than those of HTTP.
        offered = {
            value.decode("latin-1").strip().lower() for name, value in event.headers if name == b"upgrade"
        }
        if "websocket" in offered:
            await self._send_error_response(403)
            raise NoWebSocket
        if "h2c" not in offered:
            await super()._check_protocol(event)


class Http1Only(ProtocolWrapper):
    """The protocol of one connection. HTTP/2, whose memory nothing bounds, ends it."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.protocol = NoUpgrade(
            self.app,
            self.config,
            self.context,
            self.task_group,
            self.state,
            self.ssl,
            self.client,
            self.server,
            self.send,
        )

    async def handle(self, event: Event) -> None:
        """Take what came from the connection."""
        try:
            await self.protocol.handle(event)
        except (H2ProtocolAssumedError, NoWebSocket):
            await self.send(Closed())


class GuardedConfig(Config):
    """Hypercorn's settings of one listener, with what its guard needs.

    Attributes:
        bug: takes an exception that should not have happened.
        refused: told why there is no TLS with somebody.
        most: connections at a time.
        tls: what connections speak TLS with; None: none.
        open: the connections that are served now; of the idle ones, those that are for longest come first.
    """

    bug: Callable[[str, BaseException], None] = staticmethod(lambda where, exc: None)
    refused: Callable[[str], None] = staticmethod(lambda why: None)
    most: int = MOST_OPERATORS
    tls: TlsPort | None = None

    def __init__(self) -> None:
        super().__init__()
        self.open: dict[GuardedServer, None] = {}

    @property
    def ssl_enabled(self) -> bool:
        """See Config."""
        return self.tls is not None

    def create_ssl_context(self) -> ssl.SSLContext | None:
        """See Config. It is what connections begin with; each takes the one of its moment."""
        return None if self.tls is None else self.tls.context

    def create_sockets(self) -> Sockets:
        """Bind the addresses.

        Raises:
            OSError: one can not be had; its ``filename`` says which.
        """
        try:
            return super().create_sockets()
        except OSError as exc:
            # The system's own words name no address.
            raise OSError(exc.errno, exc.strerror, ", ".join(self.bind)) from exc


class GuardedServer(TCPServer):
    """One connection, whose faults stay its own."""

    config: GuardedConfig
    idle = True  # no request of it is being answered
    _ended = False  # the peer sends nothing more

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._scope = trio.CancelScope()  # of all its tasks

    async def run(self) -> None:
        """Serve the connection; never raises but Cancelled.

        One beyond the most takes the place of the one that was idle for longest; if none is, it is closed.
        """
        if len(self.config.open) >= self.config.most:
            idle = next((other for other in self.config.open if other.idle), self)
            self.config.open.pop(idle, None)
            await trio.aclose_forcefully(idle.stream)
            if idle is self:
                return
        self.config.open[self] = None
        try:
            if await self._secured():
                await self._run_guarded()
        finally:
            self.config.open.pop(self, None)

    async def _secured(self) -> bool:
        """Whether there is a session, where there should be one; closes a connection that has none."""
        stream: object = self.stream
        if self.config.tls is None or not isinstance(stream, trio.SSLStream):
            return True
        stream.context = self.config.tls.context  # the listener has that of its start
        why = await shake_hands(stream)
        if why is None:
            return True
        self.config.refused(why)
        await trio.aclose_forcefully(stream)
        return False

    async def _run_guarded(self) -> None:
        try:
            with self._scope:
                await super().run()
        except* trio.Cancelled:
            raise
        except* Exception as group:
            self.config.bug("admin connection", group)
            await trio.aclose_forcefully(self.stream)

    async def _close(self) -> None:
        """Close without Hypercorn's own end of sending before it.

        A close tells the peer the same, and a task that begins to write meanwhile finds the stream closed.
        While the end is sent, it would find it busy, which is no fault of anybody.
        """
        await self.stream.aclose()

    def _note(self, idle: bool) -> None:
        self.idle = idle
        if idle and self in self.config.open:  # goes to the end of those that are
            self.config.open[self] = self.config.open.pop(self)

    async def _read_data(self) -> None:
        await super()._read_data()
        self._ended = True
        await self.idle_task.stop()  # no request will come that it would be worth waiting for

    async def protocol_send(self, event: Event) -> None:
        """Write within a limit; a peer that does not read is closed."""
        if isinstance(event, Updated):
            self._note(event.idle)
            if self._ended:
                return
        if not isinstance(event, RawData):
            await super().protocol_send(event)
            return
        if not event.data:
            return
        async with self.send_lock:
            # No shield: who does not read holds up the end of the process for no moment.
            with trio.move_on_after(STUCK):
                try:
                    await self.stream.send_all(event.data)
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    pass
                else:
                    return
            await trio.aclose_forcefully(self.stream)
        await self.protocol.handle(Closed())
        # Who sent the next request before it took this answer left a reader that waits for that to be out.
        self._scope.cancel()


async def serve_admin(
    app: Starlette,
    binds: tuple[str, ...],
    bug: Callable[[str, BaseException], None],
    most: int = MOST_OPERATORS,
    tls: TlsPort | None = None,
    refused: Callable[[str], None] = lambda why: None,
    *,
    task_status: trio.TaskStatus[list[str]],
) -> None:
    """Serve operators until cancelled.

    Args:
        binds: ``host:port`` or ``unix:path``.
        most: connections at a time.
        tls: what TCP addresses speak TLS with; None: none.
        refused: told why there is no session with somebody.

    Answers, once started, the addresses that were really bound.
    """
    config = GuardedConfig()
    config.bug = bug
    config.most = most
    config.tls = tls
    config.refused = refused
    config.bind = list(binds)
    config.accesslog = None
    config.errorlog = logging.getLogger("hypercorn.error")
    config.errorlog.disabled = True
    config.graceful_timeout = 1.0
    config.keep_alive_timeout = 75.0
    # Hypercorn names each of these classes in one module alone.
    vars(hypercorn_run)["TCPServer"] = GuardedServer
    vars(tcp_server)["ProtocolWrapper"] = Http1Only
    application: Any = app
    async with trio.open_nursery() as nursery:
        started = await nursery.start(
            partial(serve, application, config, shutdown_trigger=trio.sleep_forever, mode="asgi")
        )
        task_status.started([str(url).replace("http://unix:", "unix:", 1) for url in started])
