"""One HTTP/1.1 connection to an engine, and the one answer that is read on it at a time."""

from __future__ import annotations

import os
import select
import zlib
from collections.abc import Callable, Sequence
from typing import Final, Protocol, Self, final

import trio

from ..contract import RawJson
from ..errors import BadFraming, EngineProtocolError, UpstreamFailed, UpstreamFault, spoken_tls
from ..flow import ReadLoop
from ..wire import UNTIL_CLOSE, BodyReader, HeadBuffer, ResponseHead, parse_response_head
from ._dial import Stream, try_send

READ_SIZE: Final = 16 * 1024  # bytes a step: what a busy stream may take of the loop at a time
MAX_HEAD_BYTES: Final = 64 * 1024
MAX_HEADERS: Final = 100
_INFLATED_PIECE: Final = 64 * 1024
_SENT_PIECE: Final = 64 * 1024  # TLS would encrypt more of it in one step
_GZIP_BITS: Final = 31  # what zlib calls it
_ZLIB_BITS: Final = 15
_BARE_BITS: Final = -15
_CODINGS: Final = frozenset({b"gzip", b"x-gzip", b"deflate"})


class Decoder(Protocol):
    """Takes a content coding off, in bounded pieces."""

    def decompress(self, data: bytes, max_length: int = ...) -> bytes:
        """Answer at most ``max_length`` bytes."""

    @property
    def unconsumed_tail(self) -> bytes:
        """What has to be fed again."""

    @property
    def unused_data(self) -> bytes:
        """What followed the end of the coded data."""

    @property
    def eof(self) -> bool:
        """Whether the coded data is whole."""


@final
class Connection:
    """A connected stream with its place in the life of requests.

    Args:
        loop: reads streams of events; None: each is read by its own task.

    Attributes:
        reused: at least one exchange went well on it before.
        silent: no byte of the current answer has come yet.
        idle_since: when it was last given back.
    """

    def __init__(self, stream: Stream, loop: ReadLoop | None = None) -> None:
        self.stream = stream
        # In clear text bytes are read from the socket itself: what Trio puts around that costs more than it.
        self._socket = None if isinstance(stream, trio.SSLStream) else stream.socket
        self._probe: select.poll | None = None
        self._loop = None if isinstance(stream, trio.SSLStream) else loop
        self.reused = False
        self.silent = True
        self.idle_since = 0.0
        self._sent_whole = True

    @property
    def _transport(self) -> trio.SocketStream:
        return self.stream.transport_stream if isinstance(self.stream, trio.SSLStream) else self.stream

    @property
    def spent(self) -> bool:
        """Whether it is of no use while idle: closed by the peer, or bytes wait that nobody asked for."""
        if self._probe is None:
            self._probe = select.poll()
            self._probe.register(self._transport.socket.fileno(), select.POLLIN)
        return bool(self._probe.poll(0))

    @property
    def sent_whole(self) -> bool:
        """Whether all of the last request was written."""
        return self._sent_whole

    def send(self, head: bytes, body: Sequence[RawJson], nursery: trio.Nursery) -> None:
        """Write a request; what the socket does not take at once is sent by a task of ``nursery``.

        A failed write is not reported: what the engine answered by then matters more.

        Args:
            body: its pieces, in order.
        """
        pieces: list[RawJson] = [head, *body]
        if sum(map(len, body)) <= READ_SIZE:
            whole = b"".join(pieces)
            sent = self._write(whole)
            self._sent_whole = sent == len(whole)
            if not self._sent_whole:
                nursery.start_soon(self._send_rest, [memoryview(whole)[sent:]])
            return
        first = pieces[0]
        rest = [memoryview(first)[self._write(first) :], *pieces[1:]]
        self._sent_whole = not any(map(len, rest))
        if not self._sent_whole:
            nursery.start_soon(self._send_rest, rest)

    def _write(self, data: RawJson) -> int:
        try:
            return try_send(self.stream, data)
        except trio.BrokenResourceError:
            return len(data)

    async def _send_rest(self, pieces: Sequence[RawJson]) -> None:
        try:
            for piece in pieces:
                view = memoryview(piece)
                for at in range(0, len(view), _SENT_PIECE):
                    await self.stream.send_all(view[at : at + _SENT_PIECE])
            self._sent_whole = True
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the reader sees why

    async def receive_head(self) -> tuple[ResponseHead, bytes]:
        """Read up to the final response head; answers it and what was read behind it.

        Raises:
            UpstreamFailed: BROKEN before a whole head, or MALFORMED.
        """
        self.silent = True
        buffer = HeadBuffer(MAX_HEAD_BYTES)
        while True:
            data = await self._receive(soon=False)
            if not data:
                raise UpstreamFailed(UpstreamFault.BROKEN, "closed before a whole response head")
            self.silent = False
            buffer.feed(data)
            try:
                while (head := buffer.next_head()) is not None:
                    answer = parse_response_head(head, MAX_HEADERS)
                    if answer.status >= 200:
                        return answer, buffer.take_rest()
                    if answer.status == 101:
                        raise EngineProtocolError("an upgrade that nobody asked for")
            except (EngineProtocolError, BadFraming) as exc:
                raise UpstreamFailed(UpstreamFault.MALFORMED, str(exc)) from None

    async def _receive(self, *, soon: bool = True) -> bytes:
        """Read some bytes.

        Args:
            soon: they may be here already; else to look before waiting would be in vain.
        """
        if self._socket is None:
            try:
                return bytes(await self.stream.receive_some(READ_SIZE))
            except trio.BrokenResourceError as exc:
                raise _broken(exc.__cause__) from None
        if soon:
            await trio.lowlevel.checkpoint_if_cancelled()
            if (data := self._read(self._socket.fileno())) is not None:
                await trio.lowlevel.cancel_shielded_checkpoint()
                return data
        while True:
            await trio.lowlevel.wait_readable(self._socket.fileno())
            if (data := self._read(self._socket.fileno())) is not None:
                return data

    def _read(self, fd: int) -> bytes | None:
        """Read what is here; None: nothing is."""
        try:
            return os.read(fd, READ_SIZE)
        except BlockingIOError:
            return None
        except OSError as exc:
            raise _broken(exc) from None

    async def receive_body(self) -> bytes:
        """Answer the next raw bytes; ``b""`` at the end of the connection.

        Raises:
            UpstreamFailed: BROKEN.
        """
        return await self._receive()

    async def pour_body(self, take: Callable[[bytes, float], bool]) -> bool:
        """Hand raw bytes to ``take`` while it answers True; ``b""`` at the end of the connection.

        Answers False at once where nobody but the caller can read them.

        Raises:
            UpstreamFailed: BROKEN.
        """
        if self._loop is None or isinstance(self.stream, trio.SSLStream):
            await trio.lowlevel.checkpoint()
            return False
        fd = self.stream.socket.fileno()

        def step(now: float) -> bool:
            try:
                data = os.read(fd, READ_SIZE)
            except BlockingIOError:
                return True
            except OSError as exc:
                raise _broken(exc) from None
            return take(data, now)

        return await self._loop.read(fd, step)

    def abort(self) -> None:
        """Close at once, without a word. Idempotent, never waits."""
        sock = self._transport.socket
        if self._loop is not None:
            self._loop.forget(sock.fileno())
        sock.close()


def _broken(cause: BaseException | None) -> UpstreamFailed:
    return UpstreamFailed(UpstreamFault.BROKEN, f"the connection broke: {spoken_tls(cause)}")


@final
class Answer:
    """One answer on a connection. Leaving the ``with`` block hands the connection back or closes it.

    Args:
        engine_done: called once when the message was read to its proper end.
        give_back: takes a connection that may be used again.
    """

    def __init__(
        self,
        connection: Connection,
        head: ResponseHead,
        rest: bytes,
        engine_done: Callable[[], None],
        give_back: Callable[[Connection], None],
    ) -> None:
        self.status: Final = head.status
        self._connection = connection
        self._head = head
        self._body = BodyReader(head.body)
        self._first = rest
        self._engine_done = engine_done
        self._give_back = give_back
        self._coding = _coding(head)
        self._decoder: Decoder | None = None  # of what was coded as one; its first byte tells which
        self._coded = b""
        self._full = False  # the last piece was as long as one may be, and the decoder may have more
        self._broken: UpstreamFailed | None = None
        if self._body.ended:
            self._body.rest, self._first = rest, b""
            engine_done()

    def header(self, name: bytes) -> bytes | None:
        """See EngineAnswer."""
        return self._head.header(name)

    @property
    def ended(self) -> bool:
        """See EngineAnswer."""
        return self._body.ended and not self._coded and not self._full

    async def receive(self) -> bytes:
        """See EngineAnswer."""
        while True:
            if self._coded or self._full:
                piece = self._inflate()
                if piece:
                    await trio.lowlevel.checkpoint()
                    return piece
                continue
            if self._body.ended:
                self._check_coding_ended()
                return b""
            if self._broken is not None:
                raise self._broken
            data, self._first = self._first, b""
            if not data:
                data = await self._connection.receive_body()
                if not data:
                    self._closed_by_engine()
                    continue
            piece = self._unframe(data)
            if piece and self._coding is None:
                return piece
            if piece:
                self._coded = piece

    async def pour(
        self,
        take: Callable[[bytes, float], bool],
        take_lines: Callable[[list[bytes], float], bool] | None = None,
    ) -> bool:
        """See EngineAnswer."""
        wanted, body = True, self._body
        alone = body.take_alone

        def unframe(data: bytes, now: float) -> bool:
            nonlocal wanted
            if not data:
                self._closed_by_engine()
                return False
            piece = alone(data)
            if piece is not None:
                wanted = take(piece, now)
                return wanted
            if take_lines is not None:
                end = body.chunk_end(data)
                if 0 < end < len(data):
                    # What completes a chunk comes by itself, so that those behind it are lines again.
                    piece, data = self._unframe(data[:end]), data[end:]
                    if piece and not take(piece, now):
                        wanted, self._first = False, data
                        return False
                lines = body.take_lines(data)
                if lines is not None:
                    wanted = not lines or take_lines(lines, now)
                    return wanted
            piece = self._unframe(data)
            if piece:
                wanted = take(piece, now)
            return wanted and self._broken is None and not body.ended

        while wanted:
            if self._is_plain() and await self._connection.pour_body(unframe):
                continue
            piece = await self.receive()
            if not piece:
                return False
            wanted = take(piece, trio.current_time())
        return True

    def _is_plain(self) -> bool:
        """Whether what comes next is read from the socket, and needs no more than its framing taken off."""
        return self._coding is None and not self._first and not self._body.ended and self._broken is None

    def _unframe(self, data: bytes) -> bytes:
        try:
            pieces = self._body.feed(data)
        except EngineProtocolError as exc:
            # What stood in front of the malformed place is still the engine's word.
            self._broken = UpstreamFailed(UpstreamFault.MALFORMED, str(exc))
            pieces = self._body.whole
        if self._body.ended:
            self._engine_done()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _closed_by_engine(self) -> None:
        if not self._body.close():
            raise UpstreamFailed(UpstreamFault.BROKEN, "closed before the end of its message")
        self._engine_done()

    def _inflate(self) -> bytes:
        """Take the coding off, at most 64 KiB at a time, so that a small body can not blow up."""
        data, self._coded = self._coded, b""
        if self._decoder is None or self._decoder.eof:  # at its end, a decoder would only gather what follows
            self._decoder = self._next_decoder(data[0])
        try:
            piece = self._decoder.decompress(data, _INFLATED_PIECE)
        except zlib.error as exc:
            raise UpstreamFailed(UpstreamFault.MALFORMED, f"the content coding is broken: {exc}") from None
        self._coded = self._decoder.unconsumed_tail or self._decoder.unused_data
        self._full = len(piece) == _INFLATED_PIECE and not self._decoder.eof
        return piece

    def _next_decoder(self, first: int) -> Decoder:
        """Make what takes the coding off, by the first byte of what is coded.

        Gzip may follow on gzip: they are one text (RFC 1952, 2.2). Some servers send deflated data
        bare, without what zlib puts around it (RFC 9110, 8.4.1.2): its method, 8, comes first there.
        """
        if self._coding != b"deflate":
            return zlib.decompressobj(_GZIP_BITS)
        if self._decoder is not None:
            raise UpstreamFailed(UpstreamFault.MALFORMED, "bytes follow the end of the content coding")
        return zlib.decompressobj(_ZLIB_BITS if first & 0x8F == 8 else _BARE_BITS)

    def _check_coding_ended(self) -> None:
        if self._coding is not None and (self._decoder is None or not self._decoder.eof):
            raise UpstreamFailed(UpstreamFault.MALFORMED, "the content coding was cut")

    def __enter__(self) -> Self:
        """See EngineAnswer."""
        return self

    def __exit__(self, *exc: object) -> None:
        """See EngineAnswer."""
        clean = (
            self.ended
            and not self._body.rest
            and self._head.keep_alive
            and self._head.body != UNTIL_CLOSE
            and self._connection.sent_whole
        )
        if clean:
            self._give_back(self._connection)
        else:
            self._connection.abort()


def _coding(head: ResponseHead) -> bytes | None:
    """Answer the content coding that has to be taken off; None: the answer has none.

    Raises:
        UpstreamFailed: MALFORMED, the coding is none that we read.
    """
    coding = (head.header(b"content-encoding") or b"identity").strip().lower()
    if coding == b"identity":
        return None
    if coding not in _CODINGS:
        raise UpstreamFailed(UpstreamFault.MALFORMED, f"content coding {coding!r} was not asked for")
    return coding
