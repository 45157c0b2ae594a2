"""One socket of ``trio-gateway.tokens.v1``: its messages, and the streams that are theirs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ..contract import OPERATIONS
from ..errors import Problem, Refused
from ..flow import BufferPool, Dropped, NotSent
from ..tenancy import Caller
from ..wire import (
    Ack,
    Auth,
    CancelStream,
    GenerateStream,
    MalformedMessage,
    Resume,
    read_client_message,
    write_token_message,
)
from ._generate import Asked
from ._kept import KeptAnswers
from ._problems import error_object
from ._socket_streams import SocketStreams, StreamRun
from ._token_stream import StreamTerms, TokenStream
from ._websocket import WebSocket

_OPERATIONS: Final = {operation.name: operation for operation in OPERATIONS if operation.streams}
MALFORMED: Final = 4400
BAD_KEY: Final = 4401
REVOKED: Final = 4403
TOO_MANY: Final = 4429


@dataclass(frozen=True, slots=True)
class TokenSettings:
    """Bounds of all sockets of this kind.

    Attributes:
        max_streams: generations at a time on one socket.
        max_event: bytes of one event.
        kept: bytes of deltas that a resumable stream keeps until they are acknowledged.
        window: seconds that it can be resumed in after its socket was lost, or after its end.
    """

    max_streams: int
    max_event: int
    kept: int
    window: float


@dataclass(frozen=True, slots=True)
class KeptStream:
    """A stream that can be resumed. See KeptAnswer."""

    stream: TokenStream
    run: StreamRun

    @property
    def kept(self) -> int:
        """See KeptAnswer."""
        return self.stream.kept

    @property
    def over(self) -> bool:
        """See KeptAnswer."""
        return self.stream.over

    @property
    def accepted(self) -> bool:
        """See KeptAnswer."""
        return self.stream.accepted

    def forget(self) -> None:
        """See KeptAnswer."""
        self.stream.forget()


KeptStreams = KeptAnswers[KeptStream]


class TokenSession:
    """The client's side of one socket.

    Args:
        caller: who calls; None: the first message says it.
        authenticate: answers whose key it is.

    Attributes:
        caller: once it is known.
    """

    def __init__(
        self,
        settings: TokenSettings,
        streams: SocketStreams,
        kept: KeptStreams,
        pool: BufferPool,
        caller: Caller | None,
        authenticate: Callable[[bytes], Caller],
        asked: Asked,
    ) -> None:
        self.caller = caller
        self._settings = settings
        self._streams = streams
        self._kept = kept
        self._pool = pool
        self._authenticate = authenticate
        self._asked = asked
        self._open: dict[str, tuple[TokenStream, StreamRun]] = {}
        self._socket: WebSocket | None = None

    def serve(self, socket: WebSocket) -> None:
        """Name the socket whose messages will be heard."""
        self._socket = socket

    @property
    def running(self) -> int:
        """How many streams are under way."""
        return sum(map(self._is_busy, self._open))

    @property
    def _full(self) -> bool:
        """Whether no further stream may begin."""
        return sum(map(self._is_in_use, self._open)) >= self._settings.max_streams

    def hear(self, text: str) -> None:
        """Take one message."""
        socket = self._socket
        assert socket is not None
        try:
            message = read_client_message(text)
        except MalformedMessage as exc:
            socket.close(MALFORMED, f"no message of this protocol: {exc}")
            return
        if isinstance(message, Auth):
            self._hear_auth(socket, message)
        elif self.caller is None:
            socket.close(BAD_KEY, "the first message has to be auth")
        elif isinstance(message, GenerateStream):
            self._generate(socket, self.caller, message)
        elif isinstance(message, Ack):
            self._hear_ack(socket, message)
        elif isinstance(message, CancelStream):
            self._cancel(message)
        else:
            self._resume(socket, self.caller, message)

    def going_away(self, seconds: float) -> bytes:
        """Answer the message that says how long running streams still have."""
        return write_token_message("going_away", deadline_ms=round(seconds * 1000))

    def end(self) -> None:
        """The socket is over; its streams know that already."""
        self._open.clear()
        self._socket = None

    def _hear_auth(self, socket: WebSocket, message: Auth) -> None:
        if self.caller is not None:
            socket.close(MALFORMED, "this socket has its key already")
            return
        try:
            self.caller = self._authenticate(message.key.encode())
        except Refused as refused:
            socket.close(BAD_KEY, refused.problem.message)
        else:
            socket.hear_at_most(None)

    def _generate(self, socket: WebSocket, caller: Caller, message: GenerateStream) -> None:
        self._forget_old()
        name = message.stream_id
        if self._is_in_use(name):
            _refuse(socket, name, "invalid_value", "a stream of this name is under way", "stream_id")
            return
        operation = _OPERATIONS.get(message.operation)
        if operation is None:
            known = ", ".join(_OPERATIONS)
            _refuse(socket, name, "invalid_value", f"the operation is none of {known}", "operation")
            return
        if self._full:
            socket.close(TOO_MANY, f"more than {self._settings.max_streams} streams on one socket")
            return
        settings = self._settings
        kept = settings.kept if message.resumable else 0
        terms = StreamTerms(message.credit, settings.max_event, kept, settings.window)
        stream = TokenStream(name, terms, operation, socket, self._pool)
        asked = Asked(
            timeout_ms=None if message.timeout_ms is None else b"%d" % message.timeout_ms,
            priority=message.priority,
            session=message.session,
            receipt=self._asked.receipt,
            trace=self._asked.trace,
        )
        run = self._streams.start(stream, asked, bytes(message.body), operation, caller, kept)
        self._open[name] = stream, run
        if kept:
            self._kept.add(run.exchange_id, KeptStream(stream, run), caller)

    def _hear_ack(self, socket: WebSocket, message: Ack) -> None:
        found = self._own(message.stream_id)
        if found is None:
            return
        stream = found[0]
        try:
            stream.acknowledge(message.seq, message.credit)
        except NotSent:
            if not stream.over:
                socket.close(MALFORMED, "an acknowledgement of what was not sent")

    def _cancel(self, message: CancelStream) -> None:
        found = self._own(message.stream_id)
        if found is not None:
            found[1].end()

    def _own(self, name: str) -> tuple[TokenStream, StreamRun] | None:
        """Answer a stream that is still here: another socket may have gone on with it."""
        found, socket = self._open.get(name), self._socket
        return found if found is not None and socket is not None and found[0].is_on(socket) else None

    def _is_busy(self, name: str) -> bool:
        found = self._own(name)
        return found is not None and not found[0].over

    def _is_in_use(self, name: str) -> bool:
        """Whether a name has a stream. Whoever was sent the end of one may take its name for the next."""
        return self._is_busy(name) and not self._open[name][0].finished

    def _resume(self, socket: WebSocket, caller: Caller, message: Resume) -> None:
        self._forget_old()
        name = message.stream_id
        if self._is_in_use(name):
            _refuse(socket, name, "invalid_value", "a stream of this name is under way", "stream_id")
            return
        found = self._kept.find(message.request_id, caller)
        if found is None:
            _refuse(socket, name, "request_not_found", "there is no such stream, or no longer", "request_id")
            return
        if self._full:
            socket.close(TOO_MANY, f"more than {self._settings.max_streams} streams on one socket")
            return
        stream, run = found.stream, found.run
        try:
            stream.resume(name, socket, message.after_seq, message.credit)
        except NotSent:
            _refuse(socket, name, "invalid_value", "that delta was not sent yet", "after_seq")
        except Dropped:
            _refuse(socket, name, "request_not_found", "what follows is not kept any more", "after_seq")
        else:
            self._open = {other: found for other, found in self._open.items() if found[0] is not stream}
            self._open[name] = stream, run

    def _forget_old(self) -> None:
        """Forget streams that went elsewhere or are over, but for those that may still be acknowledged."""
        for name, (stream, _) in tuple(self._open.items()):
            if self._own(name) is None or (stream.over and not stream.kept):
                del self._open[name]


def _refuse(socket: WebSocket, stream_id: str, code: str, message: str, param: str) -> None:
    """Answer a message that could begin no stream."""
    problem = Problem.of(code, message, param=param)
    socket.say(write_token_message("error", stream_id, error=error_object(problem, None), delivery=_NOTHING))


_NOTHING: Final = {"generated": 0, "delivered": 0, "acknowledged": None}
