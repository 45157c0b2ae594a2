"""The vocabulary in which an engine's answer is scripted.

A script is a sequence of steps, played from first to last when a request has
arrived. Steps say *what* leaves the engine, *when*, and *how it breaks*; they
know nothing of sockets. Everything here is frozen, so a script can be shared by
tests and played any number of times.

A script whose chunked message was begun and not ended holds it open, silently,
until the gateway closes: an engine never finishes by accident.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import trio

Headers: TypeAlias = tuple[tuple[str, str], ...]

SSE_HEADERS: Final[Headers] = (
    ("content-type", "text/event-stream"),
    ("transfer-encoding", "chunked"),
)


@dataclass(frozen=True, slots=True)
class Head:
    """A status line and exactly these headers; nothing is added."""

    status: int = 200
    headers: Headers = SSE_HEADERS


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk of a chunked body, sent as one write; never empty, which would end the body."""

    data: bytes

    def __post_init__(self) -> None:
        if not self.data:
            raise ValueError("an empty chunk ends the body: say EndChunks()")


@dataclass(frozen=True, slots=True)
class Event:
    """One server-sent event with LF line ends, as one chunk.

    Attributes:
        data: text as it is, or an object that is written as compact JSON.
        name: the ``event`` field, which chat and completions do not have.
    """

    data: str | Mapping[str, object]
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Raw:
    """Bytes put on the socket as they are, without any framing."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Json:
    """A whole sized answer: head, ``content-length``, body.

    With a ``connection: close`` among `headers` the engine closes afterwards.
    """

    body: object
    status: int = 200
    headers: Headers = ()


@dataclass(frozen=True, slots=True)
class Wait:
    """Silence for this many seconds of the Trio clock."""

    seconds: float


@dataclass(frozen=True, slots=True)
class WaitFor:
    """Silence until a test sets this event."""

    event: trio.Event


@dataclass(frozen=True, slots=True)
class Repeat:
    """The same steps again and again.

    Attributes:
        steps: what is repeated; no step in it may close the connection.
        times: how often; None is for ever, until the gateway closes.
        every: seconds of silence after each round.
    """

    steps: tuple[Step, ...]
    times: int | None = None
    every: float = 0.0


@dataclass(frozen=True, slots=True)
class EndChunks:
    """The last chunk: the message ends properly and the connection stays."""


@dataclass(frozen=True, slots=True)
class CloseFin:
    """Close the connection with a FIN.

    If parts of the request are unread (see `ReadOnly`) the kernel makes a reset
    of it, as it does for real engines.
    """


@dataclass(frozen=True, slots=True)
class CloseReset:
    """Close the connection with a reset."""


@dataclass(frozen=True, slots=True)
class Hold:
    """Keep the connection open and silent until the gateway closes it."""


@dataclass(frozen=True, slots=True)
class ReadOnly:
    """Leave the request body unread beyond its first `size` bytes.

    Only as the first step of a script, since the body is read before the rest.
    """

    size: int


Step: TypeAlias = (
    Head
    | Chunk
    | Event
    | Raw
    | Json
    | Wait
    | WaitFor
    | Repeat
    | EndChunks
    | CloseFin
    | CloseReset
    | Hold
    | ReadOnly
)
Script: TypeAlias = Sequence[Step]
