"""One connection of a scripted engine: reading requests, playing scripts, seeing the gateway leave."""

from __future__ import annotations

import errno
import json
import select
import socket
import struct
from typing import Final, Literal, TypeAlias

import trio

from ._messages import BodyReader, MessageError, MessageHead, body_framing, json_object, take_head
from ._steps import (
    Chunk,
    CloseFin,
    CloseReset,
    EndChunks,
    Event,
    Head,
    Hold,
    Json,
    Raw,
    ReadOnly,
    Repeat,
    Script,
    Step,
    Wait,
    WaitFor,
)

RECEIVE_BYTES: Final = 64 * 1024

Closing: TypeAlias = Literal["fin", "reset"]
Transport: TypeAlias = "trio.SocketStream | trio.SSLStream[trio.SocketStream]"


class PeerLeft(Exception):
    """The gateway closed the connection."""

    def __init__(self, how: Closing) -> None:
        super().__init__(how)
        self.how = how


class EngineRequest:
    """One inference request as the engine saw it.

    Attributes:
        number: 1 for the first request of the engine, counting POSTs only.
        method, target: of the request line.
        headers: names in lower case, in order, repeated ones kept.
        body: the body, whole unless the script began with `ReadOnly`.
        arrived: Trio's time when the head and as much of the body as is read were there.
        connection: the number of the connection it came on, 1 for the engine's first.
        closed: set when the gateway closed the connection under this request.
        closed_by: how it did; None until then.
        stalled: set when the engine's socket first took no more bytes.
        over: set when the script was played or the gateway closed, whichever came first.
        bytes_sent: bytes of the answer that the kernel accepted.
    """

    def __init__(self, number: int, connection: int, head: MessageHead, body: bytes) -> None:
        self.number = number
        self.connection = connection
        self.method, self.target, self.version = head.start
        self.headers = head.fields
        self.body = body
        self.arrived = trio.current_time()
        self.closed = trio.Event()
        self.closed_by: Closing | None = None
        self.stalled = trio.Event()
        self.over = trio.Event()
        self.bytes_sent = 0
        self._head = head

    def __repr__(self) -> str:
        state = self.closed_by or ("over" if self.over.is_set() else "open")
        return f"<EngineRequest {self.number} {self.method} {self.target} {state}>"

    def header(self, name: str) -> str | None:
        """A field's value, repeated ones joined by a comma; None where it is absent."""
        return self._head.get(name)

    def json(self) -> dict[str, object]:
        """The body, which must be a JSON object.

        Raises:
            MessageError: it is not.
        """
        return json_object(self.body)

    def note_closed(self, how: Closing) -> None:
        """Record that the gateway left; only the first time counts."""
        if self.closed_by is None:
            self.closed_by = how
            self.closed.set()


class EngineConnection:
    """Owns one accepted stream; requests on it follow each other.

    Every wait ends with `PeerLeft` when the gateway closes meanwhile.
    """

    def __init__(self, stream: Transport, number: int) -> None:
        self.number = number
        self._stream = stream
        self._buffer = bytearray()
        self._open_message = False
        self.closing = False

    @property
    def _transport(self) -> trio.SocketStream:
        stream = self._stream
        return stream.transport_stream if isinstance(stream, trio.SSLStream) else stream

    async def handshake(self) -> None:
        """Make the TLS handshake, if this connection has one.

        Raises:
            trio.BrokenResourceError: the other side refused or left.
        """
        if isinstance(self._stream, trio.SSLStream):
            await self._stream.do_handshake()
        else:
            await trio.lowlevel.checkpoint()

    def close(self, *, reset: bool = False) -> None:
        """Close at once; a second call does nothing."""
        self.closing = True
        sock = self._transport.socket
        if reset and sock.fileno() >= 0:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()

    # -- reading

    async def next_head(self) -> MessageHead:
        """Read up to the end of the next request's head.

        Raises:
            PeerLeft, MessageError
        """
        while (head := take_head(self._buffer)) is None:
            await self._receive()
        return head

    async def read_body(self, head: MessageHead, limit: int | None) -> bytes:
        """Read the body, or only its first `limit` bytes.

        Raises:
            PeerLeft, MessageError
        """
        reader = BodyReader(*body_framing(head, unmarked="none"))
        while True:
            reader.feed(self._buffer)
            if reader.complete or (limit is not None and len(reader.data) >= limit):
                break
            await self._receive()
        return bytes(reader.data[:limit])

    async def _receive(self) -> None:
        try:
            data = await self._stream.receive_some(RECEIVE_BYTES)
        except trio.BrokenResourceError as exc:
            raise PeerLeft(_how_broken(exc)) from exc
        if not data:
            raise PeerLeft("fin")
        self._buffer += data

    # -- writing

    async def send_plainly(self, data: bytes) -> None:
        """Send bytes that belong to no script.

        Raises:
            PeerLeft
        """
        try:
            await self._stream.send_all(data)
        except trio.BrokenResourceError as exc:
            raise PeerLeft(_how_broken(exc)) from exc

    # -- playing

    async def play(self, script: Script, request: EngineRequest) -> None:
        """Play a script as the answer to `request`, watching for the gateway's close.

        Returns when the script is over or the gateway closed; `request` tells which.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch, request, nursery.cancel_scope)
            try:
                for step in script:
                    await self._step(step, request)
                if self._open_message and not self.closing:
                    await self._step(Hold(), request)
            except PeerLeft as left:
                request.note_closed(left.how)
            except trio.ClosedResourceError:
                pass  # closed from our side while a step was under way
            nursery.cancel_scope.cancel()
        if request.closed_by is not None:
            self.close()

    async def _watch(self, request: EngineRequest, scope: trio.CancelScope) -> None:
        try:
            while True:  # what comes early belongs to the next request
                await self._receive()
        except PeerLeft as left:
            request.note_closed(left.how)
        except trio.ClosedResourceError:
            pass  # closed from our side, by the script or by the engine's owner
        scope.cancel()

    async def _step(self, step: Step, request: EngineRequest) -> None:
        match step:
            case Head() | Json():
                await self._answer(step, request)
            case Chunk(data):
                await self._send(encode_chunk(data), request)
            case Event():
                await self._send(encode_chunk(encode_event(step)), request)
            case Raw(data):
                await self._send(data, request)
            case EndChunks():
                self._open_message = False
                await self._send(b"0\r\n\r\n", request)
            case Wait(seconds):
                await trio.sleep(seconds)
            case WaitFor(event):
                await event.wait()
            case Repeat():
                await self._repeat(step, request)
            case CloseFin() | CloseReset():
                self.close(reset=isinstance(step, CloseReset))
            case Hold():
                await trio.sleep_forever()
            case ReadOnly():
                raise ValueError("ReadOnly can only be the first step of a script that is no function")

    async def _answer(self, step: Head | Json, request: EngineRequest) -> None:
        if isinstance(step, Head):
            self._open_message = ("transfer-encoding", "chunked") in step.headers
            await self._send(encode_head(step), request)
            return
        await self._send(encode_json(step), request)
        if ("connection", "close") in step.headers:
            self.close()

    async def _repeat(self, step: Repeat, request: EngineRequest) -> None:
        round_ = 0
        while step.times is None or round_ < step.times:
            for inner in step.steps:
                await self._step(inner, request)
            if step.every:
                await trio.sleep(step.every)
            round_ += 1

    async def _send(self, data: bytes, request: EngineRequest) -> None:
        sock = self._transport.socket
        view = memoryview(data)
        try:
            if isinstance(self._stream, trio.SSLStream):
                await self._stream.send_all(data)
                request.bytes_sent += len(data)
                return
            while view:
                if self.closing:
                    raise trio.ClosedResourceError
                if not _writable(sock.fileno()):
                    request.stalled.set()
                sent = await sock.send(view)
                request.bytes_sent += sent
                view = view[sent:]
        except (OSError, trio.BrokenResourceError) as exc:
            if self.closing:
                raise trio.ClosedResourceError from exc
            raise PeerLeft(_how_broken(exc)) from exc


def encode_head(head: Head) -> bytes:
    """Write a response head."""
    lines = [f"HTTP/1.1 {head.status} Scripted", *(f"{k}: {v}" for k, v in head.headers)]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def encode_json(answer: Json) -> bytes:
    """Write a whole sized JSON answer."""
    body = json.dumps(answer.body, ensure_ascii=False, separators=(",", ":")).encode()
    given = {name.lower() for name, _ in answer.headers}
    kind = () if "content-type" in given else (("content-type", "application/json"),)
    length = ("content-length", str(len(body)))
    return encode_head(Head(answer.status, (*kind, length, *answer.headers))) + body


def encode_event(event: Event) -> bytes:
    """Write a server-sent event with LF line ends."""
    data = event.data
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    name = "" if event.name is None else f"event: {event.name}\n"
    return f"{name}data: {text}\n\n".encode()


def encode_chunk(data: bytes) -> bytes:
    """Write one chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def _writable(fileno: int) -> bool:
    poll = select.poll()
    poll.register(fileno, select.POLLOUT)
    return bool(poll.poll(0))


def _how_broken(exc: BaseException) -> Closing:
    """Tell a reset from a FIN by the error that a socket call ended with.

    EPIPE is what a write meets after a FIN that was answered with more bytes, so
    the gateway's own first sign was the FIN.
    """
    cause: BaseException | None = exc
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno is not None:
            return "fin" if cause.errno == errno.EPIPE else "reset"
        cause = cause.__cause__
    return "fin"


__all__ = [
    "Closing",
    "EngineConnection",
    "EngineRequest",
    "MessageError",
    "PeerLeft",
    "encode_chunk",
    "encode_event",
    "encode_head",
    "encode_json",
]
