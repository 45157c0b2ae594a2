"""The client: one socket at a time, one task that sends, and streams that outlive a socket."""

from __future__ import annotations

import contextlib
import itertools
import random
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import msgspec
import trio

from ._errors import BROKEN, CLOSED, LOST, SocketLost, SocketRejected, TokensError
from ._messages import GoingAway, UnreadableMessage, read_gateway_message
from ._reconnect import Pauses, may_ask_again, may_come_back
from ._socket import Dial, Socket, WebSocketDial, read_place
from ._state import OutOfOrder, Question, StreamState
from ._stream import TokenStream

PING_INTERVAL: Final = 20.0  # seconds of silence before a ping
PING_LIMIT: Final = 20.0  # seconds for its answer, or for any other byte
LAST_WORDS: Final = 3.0  # seconds for what is left to be said when the block ends, and for closing
FAREWELL_LIMIT: Final = 1.0  # seconds for that if the client is cancelled
_NORMAL: Final = 1000
_PROTOCOL_ERROR: Final = 1002
_GONE: Final = 1006


class Tokens:
    """A client of the token protocol; made by `open_tokens`.

    Args:
        max_streams: streams at a time; further ones wait for a place.
        resume_within: seconds after a loss in which another socket is tried.
        rng: jitter between attempts.
    """

    def __init__(self, dial: Dial, *, max_streams: int, resume_within: float, rng: random.Random) -> None:
        self._dial = dial
        self._pauses = Pauses(resume_within, rng)
        self._room = trio.Semaphore(max_streams)
        self._names = itertools.count(1)
        self._streams: dict[str, TokenStream] = {}
        self._placed: set[str] = set()  # those that have a place in the room
        self._ready: dict[TokenStream, None] = {}  # those that may have something to send, in order
        self._work = trio.lowlevel.ParkingLot()
        self._tried = trio.Event()  # whether there is a first socket is known
        self._connected = False
        self._closing = False
        self._goes_away_at: float | None = None
        self._verdict: SocketLost | None = None  # why we end this socket
        self._ended: TokensError | None = None  # why nothing can be sent any more

    @property
    def going_away(self) -> float | None:
        """Until when the gateway lets streams of this socket run, Trio clock seconds; None: it stays."""
        return self._goes_away_at

    def generate(
        self,
        body: Mapping[str, Any] | bytes,
        *,
        operation: str = "chat.completions",
        credit: int = 64,
        resumable: bool = False,
        timeout_ms: int | None = None,
        priority: str | None = None,
        session: str | None = None,
    ) -> TokenStream:
        """Make a stream; enter its block to send it.

        Args:
            body: of the operation's HTTP request; bytes are sent as they are.
            credit: deltas that may wait here, not consumed; then the gateway waits, and with it the engine.
            resumable: whether it survives the loss of the socket. The gateway keeps what is not acknowledged.
            timeout_ms: milliseconds that the gateway may spend on it.
            priority: a tier that the tenant may use.
            session: requests of one session go to one worker, if they can.

        Raises:
            ValueError: the credit is not positive.
        """
        if credit < 1:
            raise ValueError("a stream without credit can not deliver anything")
        data = bytes(body) if isinstance(body, bytes) else msgspec.json.encode(body)
        question = Question(data, operation, credit, resumable, timeout_ms, priority, session)
        return TokenStream(StreamState(f"s{next(self._names)}", question), self)

    # -- streams: see Carrier

    async def begin(self, stream: TokenStream) -> None:
        """See Carrier."""
        await self._room.acquire()
        name = stream.state.stream_id
        self._streams[name] = stream
        self._placed.add(name)
        if self._ended is not None:
            stream.state.give_up(self._ended)
        self.wake(stream)

    def wake(self, stream: TokenStream) -> None:
        """See Carrier."""
        self._ready[stream] = None
        self._tidy(stream)
        self._work.unpark_all()

    def _tidy(self, stream: TokenStream) -> None:
        """Give back the place of a stream that is over, and forget it once its consumer has gone."""
        state = stream.state
        if not state.over:
            return
        if state.stream_id in self._placed:
            self._placed.remove(state.stream_id)
            self._room.release()
        if state.left:
            self._streams.pop(state.stream_id, None)

    def _tell_all(self, tell: Callable[[StreamState, TokensError], None], error: TokensError) -> None:
        for stream in tuple(self._streams.values()):
            tell(stream.state, error)
            self._tidy(stream)
            stream.moved.unpark_all()

    # -- the socket that there is

    async def _serve(self, socket: Socket) -> None:
        self._connected = True
        self._goes_away_at = None
        self._tried.set()
        self._ready = dict.fromkeys(self._streams.values())
        writing = trio.CancelScope()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._read, socket, writing)
            nursery.start_soon(self._look_after, socket, writing)
            with writing:
                await self._write(socket, writing)
            if self._verdict is not _SILENT:
                await socket.close(_NORMAL if self._verdict is None else _PROTOCOL_ERROR)
            nursery.cancel_scope.cancel()

    async def _write(self, socket: Socket, writing: trio.CancelScope) -> None:
        """Send what streams have to say, until the socket is not needed any more."""
        try:
            while not await self._send_ready(socket):
                await self._work.park()
        except trio.Cancelled:
            if not writing.cancel_called:  # it is the client itself that is cancelled
                with trio.move_on_after(FAREWELL_LIMIT, shield=True):
                    await self._say_farewell(socket)
            raise

    async def _send_ready(self, socket: Socket) -> bool:
        """Send what there is, and answer whether that was the last."""
        while self._ready:
            stream = next(iter(self._ready))
            del self._ready[stream]
            message = stream.state.next_message(trio.current_time())
            if message is None:
                continue
            self._ready[stream] = None  # behind the others, if there is more
            try:
                await socket.send(message)
            except SocketLost:
                return True
        if self._closing:
            return True
        return self._goes_away_at is not None and not self._placed

    async def _say_farewell(self, socket: Socket) -> None:
        """Cancel what would go on at the gateway without a socket."""
        for stream in tuple(self._streams.values()):
            stream.state.leave()
            while socket.sound and (message := stream.state.next_message(trio.current_time())):
                with contextlib.suppress(SocketLost):
                    await socket.send(message)

    async def _read(self, socket: Socket, writing: trio.CancelScope) -> None:
        try:
            while True:
                self._hear(await socket.receive())
        except SocketLost:
            pass
        except (UnreadableMessage, OutOfOrder) as exc:
            why = f"the gateway broke a rule of the protocol: {exc}"
            self._verdict = SocketLost(BROKEN, why, _PROTOCOL_ERROR)
        writing.cancel()

    def _hear(self, text: str) -> None:
        message = read_gateway_message(text)
        if message is None:
            return
        if isinstance(message, GoingAway):
            self._goes_away_at = trio.current_time() + message.deadline_ms / 1000
            self._work.unpark_all()
            return
        stream = self._streams.get(message.stream_id or "")
        if stream is None:
            return  # of a stream that was forgotten, or of the socket, whose close says the same
        before = stream.state.received
        stream.state.hear(message)
        if stream.state.over or stream.state.received > before:
            self._pauses.reset()
        if stream.state.over:
            self.wake(stream)
        stream.moved.unpark_all()

    async def _look_after(self, socket: Socket, writing: trio.CancelScope) -> None:
        """End a socket whose other side does not answer."""
        while True:
            await trio.sleep_until(socket.heard + PING_INTERVAL)
            asked = trio.current_time()
            if asked < socket.heard + PING_INTERVAL:
                continue
            with trio.move_on_after(PING_LIMIT), contextlib.suppress(SocketLost):
                await socket.ping()
            if socket.heard < asked:
                self._verdict = _SILENT
                writing.cancel()
                return

    # -- its life

    @property
    def connected(self) -> bool:
        """Whether there is a socket now."""
        return self._connected

    def close(self) -> None:
        """Send what is to be sent, and end."""
        self._closing = True
        self._work.unpark_all()

    async def first_socket(self) -> TokensError | None:
        """Wait for the first socket; answer why there is none, or None."""
        await self._tried.wait()
        return self._ended

    async def run(self) -> None:
        """Keep a socket while one is needed; the first is tried once.

        Raises nothing that can be expected: streams get to know it.
        """
        error: TokensError = _CLOSED
        while not self._is_closing():
            self._verdict = None
            error = await self._dial(self._serve)
            error = self._why_ended() or error
            if self._connected:
                self._connected = False
                self._tell_all(StreamState.lose, error)
            if not (self._tried.is_set() and _may_come_back(error)):
                break
            await self._pause(error)
        self._ended = why = _CLOSED if self._is_closing() else error
        self._tell_all(StreamState.give_up, why)
        self._tried.set()

    def _is_closing(self) -> bool:
        return self._closing

    def _why_ended(self) -> SocketLost | None:
        return self._verdict

    async def _pause(self, error: TokensError) -> None:
        """Wait until a socket is needed, and then as long as is good."""
        if not self._is_wanted():
            await self._until_wanted()
            self._pauses.reset()
        pause = self._pauses.next(trio.current_time(), error.retry_after)
        if pause is None:
            self._tell_all(StreamState.give_up, error)
            self._pauses.reset()
            await self._until_wanted()
            return
        with trio.move_on_after(pause):
            while not self._closing:
                await self._work.park()

    async def _until_wanted(self) -> None:
        while not (self._closing or self._is_wanted()):
            await self._work.park()

    def _is_wanted(self) -> bool:
        return any(stream.state.wants_socket for stream in self._streams.values())


_CLOSED: Final = SocketLost(CLOSED, "the client is closed")
_SILENT: Final = SocketLost(LOST, "the gateway does not answer any more", _GONE)


def _may_come_back(error: TokensError) -> bool:
    if isinstance(error, SocketRejected):
        return may_ask_again(error.status)
    return may_come_back(error.close_code if isinstance(error, SocketLost) else None)


# Opening ----------------------------------------------------------------------------------------------------


@asynccontextmanager
async def open_tokens(
    url: str,
    *,
    key: str | None = None,
    tls: ssl.SSLContext | None = None,
    max_streams: int = 32,
    resume_within: float = 30.0,
) -> AsyncIterator[Tokens]:
    """Open a socket to the gateway for the length of the block.

    When it is lost, another one is opened as soon as a stream needs it. Streams still under way when the
    block ends are cancelled.

    Args:
        url: as ``wss://llm.example.com`` or ``http://127.0.0.1:8080``; without a path, the gateway's own.
        key: an API key.
        tls: trust and certificates for ``wss``; None: what the system trusts.
        max_streams: streams at a time; the gateway's ``websocket.max_streams`` bounds them too.
        resume_within: seconds after a loss in which another socket is tried; the gateway keeps streams for
            its ``delivery.resume_window``.

    Raises:
        SocketRejected, SocketLost: there is no socket.
        ValueError: the URL is none of a gateway.
    """
    dial = WebSocketDial(read_place(url, key, tls))
    tokens = Tokens(dial, max_streams=max_streams, resume_within=resume_within, rng=random.Random())
    async with running(tokens):
        yield tokens


@asynccontextmanager
async def running(tokens: Tokens) -> AsyncIterator[None]:
    """Run a client for the length of the block, whose errors leave it as they are."""
    failed: Exception | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(tokens.run)  # noqa: ASYNC113 - the next line waits for it
        failed = await tokens.first_socket()
        if failed is None:
            try:
                yield
            except Exception as exc:
                failed = exc
            tokens.close()
            nursery.cancel_scope.deadline = trio.current_time() + (LAST_WORDS if tokens.connected else 0)
    if failed is not None:
        raise failed
