"""One WebSocket to the gateway, over trio-websocket.

Two things of it need a guard. A send that is cancelled leaves half a frame, and what
is sent then is read as the rest of it: so it is remembered, and such a socket is cut
without another byte. And when the connection ends during the handshake, nothing wakes
whoever waits for it.
"""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, NoReturn, Protocol
from urllib.parse import urlsplit

import msgspec
import trio
from trio_websocket import ConnectionClosed, ConnectionRejected, WebSocketConnection, wrap_client_stream

from ..wire import SUBPROTOCOL
from ._errors import CLOSED, LOST, UNREACHABLE, SocketLost, SocketRejected, TokensError

DEFAULT_PATH: Final = "/v1/tokens"
HANDSHAKE_LIMIT: Final = 15.0  # seconds for connecting, TLS and the upgrade
CLOSE_LIMIT: Final = 2.0  # seconds for the other side to confirm a close
MAX_MESSAGE: Final = 8 * 1024 * 1024  # characters; an event of the gateway has at most 4 MiB
_READ: Final = 64 * 1024
_GONE: Final = 1006
_DIGITS: Final = 15  # of a number that is still one of seconds, or milliseconds
_PORTS: Final = {"ws": 80, "http": 80, "wss": 443, "https": 443}


class Socket(Protocol):
    """An open socket."""

    @property
    def heard(self) -> float:
        """When bytes came last, Trio clock seconds."""

    async def send(self, message: bytes) -> None:
        """Send one text message. Only one task may call it; cancelled in the middle, the socket is done.

        Raises:
            SocketLost: it is closed.
        """

    async def receive(self) -> str:
        """Answer the next message.

        Raises:
            SocketLost: it is closed, and says how.
        """

    async def ping(self) -> None:
        """Wait until the other side has answered a ping.

        Raises:
            SocketLost: it is closed.
        """

    async def close(self, code: int) -> None:
        """Close properly, within `CLOSE_LIMIT`; one that is not sound is left as it is."""

    @property
    def sound(self) -> bool:
        """Whether more can be sent: it is open, and no frame is left half sent."""


Serve = Callable[[Socket], Awaitable[None]]


class Dial(Protocol):
    """Opens sockets."""

    async def __call__(self, serve: Serve) -> TokensError:
        """Open a socket, and close it when ``serve`` has ended. Answer how it ended, or why there is none."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the gateway is, and what it is shown.

    Attributes:
        host: without brackets.
        tls: None: none is spoken.
    """

    host: str
    port: int
    path: str
    tls: ssl.SSLContext | None
    headers: tuple[tuple[bytes, bytes], ...] = ()

    @property
    def authority(self) -> str:
        """Host and port, as the Host header has them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        standard = 80 if self.tls is None else 443
        return host if self.port == standard else f"{host}:{self.port}"


def read_place(url: str, key: str | None, tls: ssl.SSLContext | None) -> Place:
    """Read a URL with ``ws``, ``wss``, ``http`` or ``https``; without a path, the gateway's own is taken.

    Raises:
        ValueError: it is none of these.
    """
    parts = urlsplit(url)
    if parts.scheme not in _PORTS or not parts.hostname:
        raise ValueError("a URL of the gateway looks like ws://host:8080 or wss://host")
    if parts.query or parts.fragment or parts.username is not None:
        raise ValueError("a URL of the gateway has no user, query or fragment")
    secured = parts.scheme in ("wss", "https")
    if not secured and tls is not None:
        raise ValueError("a TLS context needs a URL with wss or https")
    headers = () if key is None else ((b"Authorization", b"Bearer " + key.encode("ascii")),)
    return Place(
        parts.hostname,
        parts.port or _PORTS[parts.scheme],
        parts.path if parts.path not in ("", "/") else DEFAULT_PATH,
        (tls or ssl.create_default_context()) if secured else None,
        headers,
    )


class WebSocketDial:
    """See Dial."""

    def __init__(self, place: Place) -> None:
        self._place = place

    async def __call__(self, serve: Serve) -> TokensError:
        """See Dial."""
        limit = trio.current_time() + HANDSHAKE_LIMIT
        stream: _WatchedStream | None = None
        with trio.move_on_at(limit):
            try:
                stream = _WatchedStream(await self._connect())
            except (OSError, trio.BrokenResourceError) as exc:
                return SocketLost(UNREACHABLE, f"the gateway can not be reached: {exc.__cause__ or exc}")
        if stream is None:
            return SocketLost(UNREACHABLE, "the gateway can not be reached: connecting takes too long")
        try:
            return await self._serve(stream, serve, limit)
        finally:
            await trio.aclose_forcefully(stream)

    async def _connect(self) -> trio.abc.Stream:
        place = self._place
        if place.tls is None:
            return await trio.open_tcp_stream(place.host, place.port)
        stream = await trio.open_ssl_over_tcp_stream(
            place.host, place.port, ssl_context=place.tls, https_compatible=True
        )
        try:
            await stream.do_handshake()
        except BaseException:
            await trio.aclose_forcefully(stream)
            raise
        return stream

    async def _serve(self, stream: _WatchedStream, serve: Serve, limit: float) -> TokensError:
        hold = _Hold(stream, self._place)
        async with trio.open_nursery() as nursery:
            socket = await nursery.start(hold.run, limit)
            if socket is not None:
                await serve(socket)
                nursery.cancel_scope.cancel()
        return hold.ending()


class _Hold:
    """Runs trio-websocket's own task, and keeps what it raises from everybody else."""

    def __init__(self, stream: _WatchedStream, place: Place) -> None:
        self._stream = stream
        self._place = place
        self._socket: _OpenSocket | None = None
        self._rejected: ConnectionRejected | None = None
        self._fault: Exception | None = None

    async def run(
        self, limit: float, *, task_status: trio.TaskStatus[_OpenSocket | None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Shake hands before ``limit``, report the socket, or None, and read until the socket is over."""
        try:
            async with trio.open_nursery() as nursery:
                self._stream.when_over = nursery.cancel_scope.cancel
                nursery.cancel_scope.deadline = limit
                connection = await wrap_client_stream(
                    nursery,
                    self._stream,  # type: ignore[arg-type]
                    self._place.authority,
                    self._place.path,
                    subprotocols=[SUBPROTOCOL],
                    extra_headers=list(self._place.headers),
                    max_message_size=MAX_MESSAGE,
                    receive_buffer_size=_READ,
                )
                self._stream.when_over = None
                nursery.cancel_scope.deadline = float("inf")
                self._socket = _OpenSocket(connection, self._stream)
                task_status.started(self._socket)
        except* ConnectionRejected as group:
            self._rejected = next(exc for exc in group.exceptions if isinstance(exc, ConnectionRejected))
        except* Exception as group:  # whatever a strange answer does to its parsers
            self._fault = group.exceptions[0]
        if self._socket is None:
            task_status.started(None)

    def ending(self) -> TokensError:
        """Answer how the socket ended, or why there was none."""
        if self._rejected is not None:
            return _rejection(self._rejected)
        if self._socket is not None:
            return self._socket.ending()
        why = self._fault or "it answered nothing"
        return SocketLost(UNREACHABLE, f"the gateway did not open the socket: {why}")


class _OpenSocket:
    """See Socket."""

    def __init__(self, connection: WebSocketConnection, stream: _WatchedStream) -> None:
        self._connection = connection
        self._stream = stream

    @property
    def heard(self) -> float:
        """See Socket."""
        return self._stream.heard

    @property
    def sound(self) -> bool:
        """See Socket."""
        return self._connection.closed is None and not self._stream.torn

    async def send(self, message: bytes) -> None:
        """See Socket."""
        try:
            await self._connection.send_message(message.decode())
        except ConnectionClosed:
            self._raise()

    async def receive(self) -> str:
        """See Socket."""
        try:
            message = await self._connection.get_message()
        except ConnectionClosed:
            self._raise()
        return message if isinstance(message, str) else message.decode(errors="replace")

    async def ping(self) -> None:
        """See Socket."""
        try:
            await self._connection.ping()
        except ConnectionClosed:
            self._raise()

    async def close(self, code: int) -> None:
        """See Socket."""
        if self.sound:
            with trio.move_on_after(CLOSE_LIMIT):
                await self._connection.aclose(code)

    def ending(self) -> SocketLost:
        """Answer how it ended."""
        how = self._connection.closed
        if how is None or how.code == _GONE:
            return SocketLost(LOST, "the connection to the gateway was lost", _GONE)
        return SocketLost(CLOSED, f"the socket was closed: {how.code} {how.reason or ''}".rstrip(), how.code)

    def _raise(self) -> NoReturn:
        raise self.ending() from None


class _WatchedStream(trio.abc.Stream):
    """The connection, with an eye on what trio-websocket does not tell.

    Attributes:
        torn: a send is under way, or was cancelled.
        heard: when bytes came last.
        when_over: called once nothing more comes.
    """

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream = stream
        self.torn = False
        self.heard = trio.current_time()
        self.when_over: Callable[[], Any] | None = None

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        self.torn = True
        await self._stream.send_all(data)
        self.torn = False

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        data: bytes | bytearray = b""
        try:
            data = await self._stream.receive_some(max_bytes)
        finally:
            if not data and self.when_over is not None:
                self.when_over()
        self.heard = trio.current_time()
        return data

    async def aclose(self) -> None:
        await self._stream.aclose()


def _rejection(rejected: ConnectionRejected) -> SocketRejected:
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in rejected.headers}
    error: dict[str, Any] = {}
    try:
        body = msgspec.json.decode(rejected.body or b"")
        if isinstance(body, dict) and isinstance(body.get("error"), dict):
            error = body["error"]
    except msgspec.MsgspecError:
        pass  # a proxy's page
    status = rejected.status_code
    return SocketRejected(
        status,
        str(error.get("code", f"http_{status}")),
        str(error.get("message", f"the gateway refused the socket with {status}")),
        retry_after=_seconds(headers),
        request_id=headers.get("x-request-id"),
    )


def _seconds(headers: dict[str, str]) -> float | None:
    """Read when to come back; dates are not understood."""
    for name, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        value = headers.get(name, "")
        if value.isascii() and value.isdigit() and len(value) <= _DIGITS:
            return int(value) * unit
    return None
