"""The HTTP/1.1 server: connections, heads, bodies, and one request after the other.

Pipelined requests are answered in order because the next head is only looked at
when the last answer is out. A fault of one connection ends that connection.
"""

from __future__ import annotations

import io
import secrets
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Protocol

import trio

from ..errors import BadFraming, ClientGone, Problem, Refused, WireError
from ..wire import CHUNKED, CONTINUE, BodyReader, RequestHead, parse_request_head
from ._authenticate import presented_key
from ._connection import SILENT_LIMIT, Connection
from ._head import answer_head
from ._problems import JSON, problem_body, problem_headers
from ._tls import SpokeInClear, TlsConnection
from ._watch import Hangup, HangupWatch

CHUNKED_STEP: Final = 8 * 1024  # bytes of a chunked body at a time: in chunks of one they take 5 ms
REST_KEPT: Final = 64 * 1024  # of an unread body are read and dropped to keep a connection
LINGER_BYTES: Final = 1024 * 1024
LINGER_SECONDS: Final = 2.0
REFUSAL_LIMIT: Final = 2.0  # seconds to get rid of a short answer


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Bounds of a connection: bytes, counts, seconds."""

    connections: int
    head_bytes: int
    head_count: int
    head_timeout: float
    body_bytes: int
    body_timeout: float
    keep_alive: float
    unplaced_bytes: int


class UnplacedBytes:
    """Bodies of requests that no worker has yet, in bytes that have come.

    What is only declared takes nothing: whoever sends none of it would keep others out.

    Args:
        returns: answers the seconds after which one who is refused shall come again.
    """

    def __init__(self, limit: int, returns: Callable[[], float] = lambda: 1.0) -> None:
        self._limit = limit
        self._returns = returns
        self._peak = 0
        self.used = 0

    def resize(self, limit: int) -> None:
        """Have another limit from now on. What is held stays, and counts."""
        self._limit = limit

    def check(self, size: int) -> None:
        """Judge whether ``size`` bytes more would find room by now.

        Raises:
            Refused: ``queue_full``.
        """
        if self.used + size > self._limit:
            what = "too many bytes of requests wait for a worker"
            raise Refused(Problem.of("queue_full", what, retry_after=self._returns()))

    def take(self, size: int) -> None:
        """Hold ``size`` bytes more.

        Raises:
            Refused: ``queue_full``; nothing was taken.
        """
        self.check(size)
        self.used += size
        self._peak = max(self._peak, self.used)

    def give(self, size: int) -> None:
        """Give ``size`` bytes back."""
        self.used -= size

    def has_calmed(self, worth: int) -> bool:
        """Whether at least ``worth`` bytes were held since this was last true, and nearly all came free."""
        calmed = self._peak >= worth and self.used <= self._peak // 8
        if calmed:
            self._peak = self.used
        return calmed


class Incoming:
    """One request while it is being answered: its head, and its body if the handler wants it.

    Attributes:
        held: bytes of the body that count as unplaced; given back by `placed`.
    """

    def __init__(
        self, head: RequestHead, connection: Connection, limits: ServerLimits, room: UnplacedBytes
    ) -> None:
        self.head: Final = head
        self.connection: Final = connection
        self.arrived: Final = trio.current_time()
        self.held = 0
        self._limits = limits
        self._room = room
        self._body = BodyReader(head.body)
        self._untouched = True
        self._lost = False  # where the next request would begin is not known, or will not be in time

    @property
    def expects_continue(self) -> bool:
        """Whether the client waits for a word before it sends the body."""
        return self.head.expects_continue and self._untouched and not self._body.ended

    @property
    def rest_is_short(self) -> bool:
        """Whether what is left of the body is little enough to be dropped, as far as it can be known."""
        if self._lost or self.expects_continue:
            return False
        return self._body.ended or self.head.body <= REST_KEPT

    def check_size(self) -> None:
        """Judge the declared size.

        Raises:
            Refused: ``request_too_large``.
        """
        if self.head.body > self._limits.body_bytes:
            raise Refused(self._too_large())

    async def read_body(self) -> bytes:
        """Read the whole body within its bounds.

        Raises:
            Refused: too large, too slow, the client ended in its middle, or no room: for what
                is declared, or later because others were faster.
            ClientGone: it left.
        """
        self.check_size()
        self._room.check(max(self.head.body, 0))
        if self.expects_continue:
            await self.connection.write_all(CONTINUE)
        if 0 <= self.head.body <= len(self.connection.heads) and self._untouched:
            return self._take_whole()
        # A list of pieces could cost fifty times their bytes, which nobody counts, and a bytearray is copied.
        body = io.BytesIO()
        with trio.move_on_after(self._limits.body_timeout) as limit:
            await self._gather(body)
        if limit.cancelled_caught:
            self._lost = True
            raise Refused(Problem.of("request_timeout", "the body did not arrive in time"))
        self._hand_back_rest()
        return body.getvalue()

    def _take_whole(self) -> bytes:
        """Answer a body that came with its head, as nearly all do: nothing has to be awaited, nor limited."""
        size = self.head.body
        self._hold(size)
        self._untouched = False
        self._body.ended = True
        return self.connection.heads.take(size)

    async def _gather(self, body: io.BytesIO) -> None:
        while not self._body.ended:
            piece = await self._more()
            if body.tell() + len(piece) > self._limits.body_bytes:
                raise Refused(self._too_large())
            self._hold(len(piece))
            body.write(piece)

    async def drop_rest(self) -> bool:
        """Read and drop a little of what was not wanted; answers whether the connection can go on.

        What came behind the body is given back to the connection, also if the body was given up at its end.
        """
        if self.expects_continue:
            return False  # nobody knows whether the client sends it now
        if not self._body.ended:
            with trio.move_on_after(LINGER_SECONDS):
                await self._drop(REST_KEPT)
        self._hand_back_rest()
        return self._body.ended

    async def _drop(self, left: int) -> None:
        while not self._body.ended and left > 0:
            left -= len(await self._more())

    def placed(self) -> None:
        """The body is no longer unplaced. Idempotent."""
        held, self.held = self.held, 0
        self._room.give(held)

    async def _more(self) -> bytes:
        """Answer some more of the body, without its framing; perhaps nothing yet."""
        data = self.connection.heads.take_rest() if self._untouched else b""
        self._untouched = False
        if not data:
            data = await self.connection.receive()
            if not data:
                self._lost = True
                raise Refused(Problem.of("bad_framing", "the body ended before it was whole"))
        try:
            return await self._unframe(data)
        except WireError as exc:
            self._lost = True
            raise Refused(Problem.of("bad_framing", str(exc))) from None

    async def _unframe(self, data: bytes) -> bytes:
        if self.head.body != CHUNKED or len(data) <= CHUNKED_STEP:
            return b"".join(self._body.feed(data))
        found = bytearray()
        for at in range(0, len(data), CHUNKED_STEP):
            # Behind the body's end stands the next request: giving up here would lose a part of it.
            if at and not self._body.ended:
                await trio.lowlevel.checkpoint()
            found += b"".join(self._body.feed(data[at : at + CHUNKED_STEP]))
        return bytes(found)

    def _hand_back_rest(self) -> None:
        if self._body.ended and self._body.rest:
            self.connection.heads.feed(self._body.rest)
            self._body.rest = b""

    def _hold(self, size: int) -> None:
        self._room.take(size)
        self.held += size

    def _too_large(self) -> Problem:
        return Problem.of("request_too_large", f"the body is over {self._limits.body_bytes} bytes")


class Handler(Protocol):
    """Answers one request completely."""

    async def answer(self, incoming: Incoming) -> bool:
        """Answer; True: the message ended properly and the connection may go on.

        Raises:
            Refused: tell the client this, nothing was written.
            ClientGone: nobody is there.
        """

    def malformed(self, code: str) -> None:
        """Count a request whose head could not be read."""


class HttpServer:
    """Serves connections until they end.

    Args:
        bug: takes an exception that should not have happened.
        draining: whether no further request is wanted on a connection.
        tls: spoken on TCP connections; None: nowhere. Unix sockets are always in clear text.
        room: for bodies of requests that no worker has yet; by default one of its own.

    Attributes:
        tls: as given; another one counts for who connects from then on.
        failed_handshakes: TLS connections that ended before a session was agreed on.
    """

    def __init__(
        self,
        handler: Handler,
        watch: HangupWatch,
        limits: ServerLimits,
        bug: Callable[[str, BaseException], None],
        draining: Callable[[], bool],
        tls: ssl.SSLContext | None = None,
        room: UnplacedBytes | None = None,
    ) -> None:
        self._handler = handler
        self._watch = watch
        self._limits = limits
        self._bug = bug
        self._draining = draining
        self.tls = tls
        self.room: Final = UnplacedBytes(limits.unplaced_bytes) if room is None else room
        self.open = 0
        self.failed_handshakes = 0
        self._idle: set[trio.CancelScope] = set()
        self._none_open = trio.lowlevel.ParkingLot()
        self._retired = False

    async def serve(self, sock: socket.socket, begun: bytes = b"") -> None:
        """Serve one connection; never raises but Cancelled.

        Args:
            sock: non-blocking; closed afterwards.
            begun: what was read of it before.
        """
        self.open += 1
        try:
            with Hangup(self._watch, sock.fileno()) as hangup:
                connection = self._connection(sock, hangup)
                connection.heads.feed(begun)
                try:
                    if not isinstance(connection, TlsConnection) or await self._secured(connection):
                        await self._requests(connection)
                finally:
                    connection.close()
        except ClientGone:
            pass
        except Exception as exc:  # a fault of one connection is nobody else's
            self._bug("connection", exc)
        finally:
            self.open -= 1
            if not self.open:
                self._none_open.unpark_all()

    def limit(self, limits: ServerLimits) -> None:
        """Have other bounds: of heads on new connections, of all else from the next request on."""
        self._limits = limits
        self.room.resize(limits.unplaced_bytes)

    def retire(self) -> None:
        """Have no connection for longer than it is needed: others accept who comes, and are told to.

        Whatever comes on those that are open is served all the same.
        """
        self._retired = True

    async def wait_none(self) -> None:
        """Wait until no connection is open."""
        await trio.lowlevel.checkpoint_if_cancelled()
        while self.open:
            await self._none_open.park()

    def close_idle(self) -> None:
        """End the connections that wait for a request; those that answer go on."""
        for scope in tuple(self._idle):
            scope.cancel(reason="shutdown")

    def _connection(self, sock: socket.socket, hangup: Hangup) -> Connection:
        if self.tls is None or sock.family == socket.AF_UNIX:
            return Connection(sock, hangup, self._limits.head_bytes)
        return TlsConnection(sock, hangup, self._limits.head_bytes, self.tls)

    async def _secured(self, connection: TlsConnection) -> bool:
        """Agree on a session within the time that a head has; False: the connection ends here."""
        clear_text = False
        try:
            with trio.move_on_after(self._limits.head_timeout):
                await connection.shake_hands()
                return True
        except SpokeInClear:
            clear_text = True
        except ClientGone:
            pass
        self.failed_handshakes += 1
        if clear_text:
            await self._refuse_clear_text(connection.in_clear())
        return False

    async def _refuse_clear_text(self, connection: Connection) -> None:
        self._handler.malformed("bad_framing")
        problem = Problem.of("bad_framing", "this port speaks TLS: use https")
        await self._refuse(connection, problem, close=True)
        await self._close_gently(connection)

    async def _requests(self, connection: Connection) -> None:
        first = True
        while True:
            head = await self._next_head(connection, first)
            if head is None or not await self._answer(connection, head):
                break
            first = False
        await self._close_gently(connection)

    async def _next_head(self, connection: Connection, first: bool) -> RequestHead | None:
        """Read a head; None: the connection ends, and whoever was owed an answer has it."""
        try:
            raw = await self._wait_for_head(connection, first)
            if raw is None:
                return None
            head = parse_request_head(raw, self._limits.head_count)
            if head.header(b"x-api-key") is not None:
                presented_key(head)  # two that differ are a matter of framing, judged before all else
            return head
        except BadFraming as exc:
            self._handler.malformed(exc.code)
            await self._refuse(connection, Problem.of(exc.code, str(exc)), close=True)
        return None

    async def _wait_for_head(self, connection: Connection, first: bool) -> bytes | None:
        heads = connection.heads
        if not len(heads) and (data := connection.receive_now()) is not None:
            if not data:
                return None
            heads.feed(data)
        heads.skip_blank_lines()
        if len(heads) and (raw := heads.next_head()) is not None:
            return raw  # who keeps us busy need not be waited for
        silence = self._limits.head_timeout if first else self._limits.keep_alive
        if self._retired or self._draining():
            silence = min(silence, LINGER_SECONDS)
        give_up = trio.current_time() + silence
        while await self._begun(connection, give_up):
            if (raw := heads.next_head()) is not None:
                return raw
            # A first head has what is left since the connection came, later ones since their first byte.
            whole = give_up if first else trio.current_time() + self._limits.head_timeout
            with trio.move_on_at(whole) as limit:
                while (raw := heads.next_head()) is None and len(heads):
                    data = await connection.receive()
                    if not data:
                        return None
                    heads.feed(data)
                    heads.skip_blank_lines()
                if raw is not None:
                    return raw
            if limit.cancelled_caught:
                self._handler.malformed("request_timeout")
                problem = Problem.of("request_timeout", "the head of the request did not arrive in time")
                await self._refuse(connection, problem, close=True)
                return None
        return None

    async def _begun(self, connection: Connection, deadline: float) -> bool:
        """Wait until a request has begun; blank lines in front of it are none of it. False: none will."""
        heads = connection.heads
        heads.skip_blank_lines()
        if len(heads):
            return True
        with trio.move_on_at(deadline) as scope:
            self._idle.add(scope)
            try:
                while not len(heads):
                    data = await connection.receive()
                    if not data:
                        return False
                    heads.feed(data)
                    heads.skip_blank_lines()
            finally:
                self._idle.discard(scope)
        return len(heads) > 0

    async def _answer(self, connection: Connection, head: RequestHead) -> bool:
        """Answer one request; False: the connection ends here."""
        connection.silent_limit(SILENT_LIMIT)
        if self._retired:
            head = replace(head, keep_alive=False)
        incoming = Incoming(head, connection, self._limits, self.room)
        try:
            alive = await self._handler.answer(incoming)
        except Refused as refused:
            await self._refuse(
                connection,
                refused.problem,
                close=not head.keep_alive or not incoming.rest_is_short,
                headless=head.method == "HEAD",
                anthropic=head.path.startswith("/v1/messages"),
            )
            alive = True
        finally:
            incoming.placed()
        if not alive or not head.keep_alive or connection.closed or not incoming.rest_is_short:
            return False
        return await self._dropped(incoming)

    async def _dropped(self, incoming: Incoming) -> bool:
        try:
            return await incoming.drop_rest()
        except Refused:
            return False

    async def _refuse(
        self,
        connection: Connection,
        problem: Problem,
        *,
        close: bool,
        headless: bool = False,
        anthropic: bool = False,
    ) -> None:
        body = problem_body(problem, None, anthropic)
        headers = [*problem_headers(problem), ("content-type", JSON)]
        if all(name != "x-request-id" for name, _ in problem.headers):
            headers.append(("x-request-id", secrets.token_hex(16)))  # of a head that nobody could read
        headers.append(("content-length", str(len(body))))
        if close or self._draining():
            headers.append(("connection", "close"))
        head = answer_head(problem.status, headers)
        await write_within(connection, head if headless else head + body)

    async def _close_gently(self, connection: Connection) -> None:
        """Close so that a client which is still sending can read its answer first."""
        if connection.closed or connection.hangup.gone:
            return
        left = LINGER_BYTES
        with trio.move_on_after(LINGER_SECONDS):
            await connection.finish_sending()
            while left > 0 and (count := await connection.discard()):
                left -= count


async def write_within(connection: Connection, data: bytes, seconds: float = REFUSAL_LIMIT) -> None:
    """Write a short answer, or give the connection up.

    Raises:
        ClientGone: it could not be written.
    """
    rest = data[connection.write(data) :]
    if not (rest or connection.waiting):
        await trio.lowlevel.checkpoint()  # who asks for little, again and again, leaves the others their turn
        return
    with trio.move_on_after(seconds):
        await connection.write_all(rest)
        return
    connection.close(reset=True)
    raise ClientGone
