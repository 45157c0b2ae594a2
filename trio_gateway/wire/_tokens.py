"""The messages of ``trio-gateway.tokens.v1``, and what a stream's events say to their writer. Sans-IO."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec

from ..contract import Operation, Style
from ._relay import choices_of, has_output

SUBPROTOCOL: Final = "trio-gateway.tokens.v1"
BEARER: Final = "bearer."  # in front of a key among the offered subprotocols

StreamId = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
Session = Annotated[str, msgspec.Meta(max_length=1024)]  # it is remembered for as long as the stream takes
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Credit = Annotated[int, msgspec.Meta(ge=1, le=2**31)]


class Auth(msgspec.Struct, tag_field="type", tag="auth", frozen=True):
    """The key of a client that could send it nowhere else; its first message."""

    key: str


class GenerateStream(msgspec.Struct, tag_field="type", tag="generate", frozen=True):
    """Begin a stream. ``body`` is that of the operation's HTTP request, kept as it came."""

    stream_id: StreamId
    body: msgspec.Raw
    operation: str = "chat.completions"
    timeout_ms: Annotated[int, msgspec.Meta(ge=1)] | None = None
    priority: str | None = None
    credit: _Credit | None = None
    resumable: bool = False
    session: Session | None = None


class Ack(msgspec.Struct, tag_field="type", tag="ack", frozen=True):
    """The client has consumed all deltas up to ``seq``, and lets ``credit`` more come."""

    stream_id: StreamId
    seq: _Count
    credit: _Credit | None = None


class CancelStream(msgspec.Struct, tag_field="type", tag="cancel", frozen=True):
    """The client wants no more of a stream."""

    stream_id: StreamId


class Resume(msgspec.Struct, tag_field="type", tag="resume", frozen=True):
    """Go on with a stream of a lost socket behind the delta ``after_seq``."""

    stream_id: StreamId
    request_id: str
    after_seq: _Count
    credit: _Credit | None = None


ClientMessage = Auth | GenerateStream | Ack | CancelStream | Resume
_reader: Final = msgspec.json.Decoder(ClientMessage)
_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder().decode


class MalformedMessage(Exception):
    """A message that is no JSON, or none of the protocol; its text says why, without content."""


def read_client_message(text: str) -> ClientMessage:
    """Read one message of a client; unknown members are ignored.

    Raises:
        MalformedMessage: the socket can not go on.
    """
    try:
        return _reader.decode(text)
    except (msgspec.MsgspecError, RecursionError) as exc:
        raise MalformedMessage(str(exc)) from None


def write_token_message(kind: str, stream_id: str | None = None, **members: object) -> bytes:
    """Write a message of ours, of a stream or of the socket itself."""
    message: dict[str, object] = {"type": kind}
    if stream_id is not None:
        message["stream_id"] = stream_id
    return _encode({**message, **members})


class DeltaWriter:
    """Writes the deltas of one stream around the engine's own bytes."""

    def __init__(self, stream_id: str) -> None:
        self._head = b'{"type":"delta","stream_id":' + _encode(stream_id) + b',"seq":'

    def write(self, seq: int, chunk: bytes, tokens: int, size: int) -> bytes:
        """Write one delta.

        Args:
            chunk: the event's data, a JSON object.
            tokens, size: of the stream so far, this one included: tokens, and bytes of chunks.
        """
        return b'%b%d,"chunk":%b,"tokens":%d,"bytes":%d}' % (self._head, seq, chunk, tokens, size)


def as_text(data: bytes) -> bytes:
    """Answer an event's data as UTF-8, which messages have to be; what is none of it is replaced."""
    if data.isascii():
        return data
    return data.decode(errors="replace").encode()


class StreamEnds:
    """Counts the tokens in a stream's events, and notes how its choices finish.

    Attributes:
        tokens: events with output so far; what the engine counted is better, where it says so.
    """

    def __init__(self, operation: Operation) -> None:
        self._style = operation.style
        self._reasons: dict[int, str] = {}
        self.tokens = 0

    def take(self, data: bytes, count: int = 1) -> None:
        """Take an event that stands for ``count`` of the engine's."""
        try:
            event = _decode(data)
        except (msgspec.MsgspecError, RecursionError):
            return
        if isinstance(event, dict) and _READERS[self._style](event, self._reasons):
            self.tokens += count

    @property
    def finish_reasons(self) -> list[str | None]:
        """How each choice finished, by its index."""
        last = max(self._reasons, default=-1)
        return [self._reasons.get(index) for index in range(last + 1)]


def _read_choices(event: dict[str, Any], reasons: dict[int, str]) -> bool:
    output = False
    for choice in choices_of(event):
        reason, index = choice.get("finish_reason"), choice.get("index")
        if isinstance(reason, str) and reason:
            reasons[index if type(index) is int and 0 <= index < _MOST_CHOICES else 0] = reason
        output = output or has_output(choice)
    return output


def _read_response(event: dict[str, Any], reasons: dict[int, str]) -> bool:
    kind = event.get("type")
    if kind in ("response.completed", "response.incomplete"):
        response = event.get("response")
        status = response.get("status") if isinstance(response, dict) else None
        reasons[0] = status if isinstance(status, str) else kind.removeprefix("response.")
    return isinstance(kind, str) and kind.endswith(".delta")


def _read_message(event: dict[str, Any], reasons: dict[int, str]) -> bool:
    delta = event.get("delta")
    if event.get("type") == "message_delta" and isinstance(delta, dict):
        reason = delta.get("stop_reason")
        if isinstance(reason, str):
            reasons[0] = reason
    return event.get("type") == "content_block_delta"


_MOST_CHOICES: Final = 1 << 17
_READERS: Final = {
    Style.CHOICES: _read_choices,
    Style.RESPONSES: _read_response,
    Style.MESSAGES: _read_message,
}
