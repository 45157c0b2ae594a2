"""The messages of OpenAI's Responses over WebSocket: ``response.create``, and what answers it. Sans-IO.

A client names a *lane* by ``stream_id``, or none: that is a lane, too. An event goes
out with the bytes that it has over HTTP, and behind its first brace the lane's name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from ..errors import Problem, Refused

CREATE: Final = "response.create"
ENVELOPE: Final = ("type", "stream_id")  # fields of the message that are no fields of the request
_LANE: Final = re.compile(r"[A-Za-z0-9_.-]{1,256}", re.ASCII)
_encode: Final = msgspec.json.Encoder().encode


class _Envelope(msgspec.Struct):
    """What is read of a message here; all the rest is read as the body of a request is."""

    type: Any = None
    stream_id: Any = None
    background: Any = None
    generate: Any = None


_reader: Final = msgspec.json.Decoder(_Envelope)


@dataclass(frozen=True, slots=True)
class LaneRequest:
    """A ``response.create``.

    Attributes:
        lane: None: the one without a name.
        problem: why it can not be carried out; None: nothing is known against it.
    """

    lane: str | None
    problem: Problem | None = None


class NoRequest(Refused):
    """A message that asks for no response.

    Attributes:
        lane: that it names.
    """

    def __init__(self, problem: Problem, lane: str | None = None) -> None:
        super().__init__(problem)
        self.lane = lane


def read_lane_request(message: bytes) -> LaneRequest:
    """Read whose turn a message is, and what over HTTP could be asked for and here can not.

    Raises:
        NoRequest: it asks for nothing that there is here.
    """
    try:
        envelope = _reader.decode(message)
    except (msgspec.MsgspecError, RecursionError):
        raise NoRequest(Problem.of("invalid_json", "the message is not a JSON object")) from None
    name = envelope.stream_id
    lane = name if isinstance(name, str) and _LANE.fullmatch(name) else None
    if envelope.type != CREATE:
        raise NoRequest(
            Problem.of("invalid_value", f"the type of a message is {CREATE}, nothing else", param="type"),
            lane,
        )
    if name is not None and lane is None:
        text = "stream_id has 1 to 256 letters, digits, and of '_', '.' and '-'"
        raise NoRequest(Problem.of("invalid_value", text, param="stream_id"))
    return LaneRequest(lane, _problem_of(envelope))


def _problem_of(envelope: _Envelope) -> Problem | None:
    if envelope.background is not None and envelope.background is not False:
        text = "background is not possible over a WebSocket"
        return Problem.of("invalid_value", text, param="background")
    if envelope.generate is not None and envelope.generate is not True:
        text = (
            "generate can not be false: the gateway keeps no responses, and engines make none without output"
        )
        return Problem.of("invalid_value", text, param="generate")
    return None


class LaneWriter:
    """Writes the events of one lane.

    Args:
        lane: None: its events are written as they are.
    """

    def __init__(self, lane: str | None) -> None:
        self._lane = lane
        self._head = b"" if lane is None else b'{"stream_id":' + _encode(lane)

    def event(self, data: bytes) -> bytes:
        """Write an event, which is a JSON object."""
        if not self._head:
            return data
        rest = data[1:].lstrip()
        return self._head + rest if rest.startswith(b"}") else self._head + b"," + rest

    def error(
        self,
        status: int,
        error: dict[str, Any],
        headers: list[tuple[str, str]],
        sequence: int | None = None,
    ) -> bytes:
        """Write what ends a response that has failed, or that never began.

        Args:
            sequence: its number in an answer that had begun.
        """
        message: dict[str, Any] = {"type": "error", "status": status}
        if self._lane is not None:
            message["stream_id"] = self._lane
        if sequence is not None:
            message["sequence_number"] = sequence
        return _encode({**message, "error": {**error, "headers": dict(headers)}})
