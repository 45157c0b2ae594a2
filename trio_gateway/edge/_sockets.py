"""From an HTTP request to a WebSocket, and all sockets of the process together."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol
from urllib.parse import urlsplit

import trio

from ..errors import Problem, Refused
from ..exchange import Parts
from ..flow import BufferPool
from ..tenancy import Caller, Keyring
from ..wire import (
    BEARER,
    SUBPROTOCOL,
    RequestHead,
    accept_of,
    offered_protocols,
    upgrade_fault,
    wants_upgrade,
)
from ._authenticate import Authenticator, presented_key
from ._generate import asked_in
from ._head import answer_head
from ._http_server import Incoming, write_within
from ._responses_session import ResponsesSession
from ._socket_streams import SocketStreams
from ._tokens import REVOKED, KeptStreams, TokenSession, TokenSettings
from ._websocket import CLOSE_WAIT, SocketLimits, WebSocket

NO_AUTH: Final = 4408
FIRST_MESSAGE: Final = 16 * 1024  # bytes at most of a message that brings a key: its sender is a stranger
GOING_AWAY: Final = 1001
KEPT_STREAM: Final = 16 * 1024  # bytes that an ended stream takes beside its deltas (measured: 15 KiB)
_WILDCARD: Final = "*"
_OUR_VERSION: Final = (("sec-websocket-version", "13"),)

Headers = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class SocketSettings:
    """What all sockets share.

    Attributes:
        auth_timeout: seconds for the first message of a client that showed no key before.
        answer_limit: seconds without an acknowledgement until a reader counts as vanished.
        origins: pages of these origins may open sockets, beside our own; ``*``: of all.
    """

    limits: SocketLimits
    tokens: TokenSettings
    auth_timeout: float
    answer_limit: float
    origins: frozenset[str] = frozenset()


class Session(Protocol):
    """The protocol that is spoken on one socket."""

    caller: Caller | None

    @property
    def running(self) -> int:
        """How many streams are under way."""

    def serve(self, socket: WebSocket) -> None:
        """Name the socket whose messages will be heard."""

    def hear(self, text: str) -> None:
        """Take one message; never waits."""

    def going_away(self, seconds: float) -> bytes | None:
        """Answer the message that says how long running streams still have; None: there is no such."""

    def end(self) -> None:
        """The socket is over."""


class Sockets:
    """Upgrades connections, looks after their keys, and ends them at shutdown.

    Args:
        wall: seconds since the epoch.

    Attributes:
        kept: streams that can be resumed.
    """

    def __init__(
        self,
        settings: SocketSettings,
        authenticator: Authenticator,
        keyring: Keyring,
        streams: SocketStreams,
        pool: BufferPool,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._settings = settings
        self._authenticator = authenticator
        self._keyring = keyring
        self._streams = streams
        self._pool = pool
        self._wall = wall
        self._open: dict[WebSocket, Session] = {}
        self._closed = trio.lowlevel.ParkingLot()
        self.kept: Final = KeptStreams(settings.tokens.window, pool, KEPT_STREAM)

    def use(self, parts: Parts, settings: SocketSettings) -> None:
        """Have other bounds for new sockets, and other parts for new streams on all of them."""
        self._settings = settings
        self._streams.use(parts)
        self.kept.window = settings.tokens.window

    def __len__(self) -> int:
        return len(self._open)

    @property
    def streams(self) -> int:
        """Streams under way on all sockets."""
        return sum(session.running for session in self._open.values())

    async def tokens(self, incoming: Incoming, identity: Headers, accepted: Callable[[], None]) -> None:
        """Speak ``trio-gateway.tokens.v1`` until the socket is over.

        Args:
            identity: headers of the answer to the handshake.
            accepted: called when the handshake is done.

        Raises:
            Refused: the handshake is refused; nothing was written.
        """
        head, connection = incoming.head, incoming.connection
        caller = self._caller(incoming)
        protocols = offered_protocols(head)
        session = TokenSession(
            self._settings.tokens,
            self._streams,
            self.kept,
            self._pool,
            caller,
            lambda key: self._authenticator.judge(key, head, connection),
            asked_in(head),
        )
        await self._serve(
            incoming, session, identity, accepted, SUBPROTOCOL if SUBPROTOCOL in protocols else None
        )

    async def responses(self, incoming: Incoming, identity: Headers, accepted: Callable[[], None]) -> None:
        """Speak OpenAI's Responses until the socket is over, as `tokens` does; its key is in the head."""
        head = incoming.head
        self._judge(head)
        session = ResponsesSession(
            self._settings.tokens.max_streams,
            self._streams,
            self._authenticator.authenticate(head, incoming.connection),
            asked_in(head),
        )
        await self._serve(incoming, session, identity, accepted, None)

    def _caller(self, incoming: Incoming) -> Caller | None:
        """Answer whose key came with the handshake; None: a message has to bring it."""
        head = incoming.head
        keys = {name.removeprefix(BEARER) for name in offered_protocols(head) if name.startswith(BEARER)}
        shown = presented_key(head)
        if shown is not None:
            keys.add(shown.decode("latin-1"))
        if len(keys) > 1:
            raise Refused(Problem.of("bad_framing", "the handshake shows two keys that differ"))
        if not keys and not self._keyring.open:
            return None
        key = next(iter(keys)).encode("latin-1") if keys else None
        return self._authenticator.judge(key, head, incoming.connection)

    async def _serve(
        self,
        incoming: Incoming,
        session: Session,
        identity: Headers,
        accepted: Callable[[], None],
        protocol: str | None,
    ) -> None:
        head, connection = incoming.head, incoming.connection
        self._judge(head)
        lines = [*identity, ("upgrade", "websocket"), ("connection", "Upgrade")]
        lines.append(("sec-websocket-accept", accept_of(head)))
        if protocol is not None:
            lines.append(("sec-websocket-protocol", protocol))
        accepted()
        await write_within(connection, answer_head(101, lines))
        connection.silent_limit(self._settings.answer_limit)
        socket = WebSocket(connection, self._settings.limits, session.hear, self._streams.room)
        if session.caller is None:
            socket.hear_at_most(FIRST_MESSAGE)
        session.serve(socket)
        self._open[socket] = session
        try:
            async with trio.open_nursery() as nursery:
                if session.caller is None:
                    nursery.start_soon(self._await_key, socket, session)
                await socket.run()
                nursery.cancel_scope.cancel()
        finally:
            del self._open[socket]
            session.end()
            self._closed.unpark_all()

    def _judge(self, head: RequestHead) -> None:
        """Judge the handshake itself."""
        if not wants_upgrade(head):
            problem = Problem.of("upgrade_required", "this path speaks WebSocket", headers=_OUR_VERSION)
            raise Refused(problem)
        fault = upgrade_fault(head)
        if fault is not None:
            code = "upgrade_required" if "version" in fault else "bad_framing"
            raise Refused(Problem.of(code, fault, headers=_OUR_VERSION))
        if not self._may_come_from(head):
            raise Refused(Problem.of("origin_not_allowed", "pages of this origin may not open sockets here"))

    def _may_come_from(self, head: RequestHead) -> bool:
        """Whether a browser's page may open a socket: ours, or one that CORS allows."""
        origin = (head.header(b"origin") or b"").decode("latin-1").lower()
        if not origin or self._settings.origins & {_WILDCARD, origin}:
            return True
        try:
            place = urlsplit(origin).netloc
        except ValueError:
            return False
        return place == (head.header(b"host") or b"").decode("latin-1").lower()

    async def _await_key(self, socket: WebSocket, session: Session) -> None:
        await trio.sleep(self._settings.auth_timeout)
        if session.caller is None:
            socket.close(NO_AUTH, "no key came in time")

    def sweep(self) -> None:
        """End sockets whose key is no longer good, and forget old streams; about once a second."""
        now = self._wall()
        for socket, session in tuple(self._open.items()):
            if session.caller is not None and not self._keyring.is_good(session.caller, now):
                socket.close(REVOKED, "the key is revoked or over")
        self.kept.sweep()

    # -- shutdown

    def go_away(self, seconds: float) -> None:
        """Tell all sockets how long their streams still have; those without any end now."""
        for socket, session in tuple(self._open.items()):
            if session.running:
                message = session.going_away(seconds)
                if message is not None:
                    socket.say(message)
            else:
                socket.close(GOING_AWAY, "the gateway is shutting down")

    async def close_all(self) -> None:
        """End all sockets, within the time that a close may take."""
        for socket in tuple(self._open):
            socket.close(GOING_AWAY, "the gateway is shutting down")
        with trio.move_on_after(CLOSE_WAIT):
            while self._open:
                await self._closed.park()
