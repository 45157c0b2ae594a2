"""The gateway's messages, as its client reads them. Sans-IO."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Seq = Annotated[int, msgspec.Meta(ge=1, le=2**53)]


class Delivery(msgspec.Struct, frozen=True):
    """Tokens of one stream; ``acknowledged`` is None where nothing was."""

    generated: int
    delivered: int
    acknowledged: int | None = None


class Queued(msgspec.Struct, tag_field="type", tag="queued", frozen=True):
    """It waits for a worker."""

    stream_id: str
    request_id: str
    position: int | None = None
    eta_ms: int | None = None


class Accepted(msgspec.Struct, tag_field="type", tag="accepted", frozen=True):
    """It has a worker, or was resumed."""

    stream_id: str
    request_id: str
    model: str = ""


class Delta(msgspec.Struct, tag_field="type", tag="delta", frozen=True):
    """One piece of an answer.

    Attributes:
        seq: its number, from 1 without gaps.
        chunk: the event's data as the operation has it.
        tokens, bytes: of the answer so far, this piece included.
    """

    stream_id: str
    seq: _Seq
    chunk: dict[str, Any]
    tokens: _Count = 0
    bytes: _Count = 0

    @property
    def text(self) -> str:
        """The text in it: what the first choice says, of chats and completions; else empty."""
        choices = self.chunk.get("choices")
        first = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(first, dict):
            return ""
        said = first.get("delta")
        text = said.get("content") if isinstance(said, dict) else first.get("text")
        return text if isinstance(text, str) else ""


class Done(msgspec.Struct, tag_field="type", tag="done", frozen=True):
    """The answer is whole."""

    stream_id: str
    request_id: str
    finish_reasons: list[str | None] = []
    usage: dict[str, Any] | None = None
    delivery: Delivery | None = None
    receipt: Any = None


class Failed(msgspec.Struct, tag_field="type", tag="error", frozen=True):
    """The stream is over; without a ``stream_id`` it concerns the socket."""

    error: dict[str, Any]
    stream_id: str | None = None
    request_id: str | None = None
    retry_after_ms: _Count | None = None
    delivery: Delivery | None = None


class Cancelled(msgspec.Struct, tag_field="type", tag="cancelled", frozen=True):
    """The stream is over, since somebody wanted that."""

    stream_id: str
    request_id: str | None = None
    delivery: Delivery | None = None


class GoingAway(msgspec.Struct, tag_field="type", tag="going_away", frozen=True):
    """The gateway shuts down; streams under way still have this long."""

    deadline_ms: _Count


StreamMessage = Queued | Accepted | Delta | Done | Failed | Cancelled
GatewayMessage = StreamMessage | GoingAway
_reader: Final = msgspec.json.Decoder(GatewayMessage)
_any: Final = msgspec.json.Decoder()
_KNOWN: Final = frozenset({"queued", "accepted", "delta", "done", "error", "cancelled", "going_away"})


class UnreadableMessage(Exception):
    """A message that is no JSON, or none of the protocol; its text says why."""


def read_gateway_message(text: str | bytes) -> GatewayMessage | None:
    """Read one message; unknown members are ignored. None: it has a type that is not known here.

    Raises:
        UnreadableMessage: the socket can not go on.
    """
    try:
        return _reader.decode(text)
    except (msgspec.MsgspecError, RecursionError) as exc:
        if _is_foreign(text):
            return None
        raise UnreadableMessage(str(exc)) from None


def _is_foreign(text: str | bytes) -> bool:
    """Whether it is an object with a type of a later version."""
    try:
        message = _any.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        return False
    kind = message.get("type") if isinstance(message, dict) else None
    return isinstance(kind, str) and kind not in _KNOWN
