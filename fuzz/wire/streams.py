"""What every relay promises, whatever an engine sends: for the targets of the three relays."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol

from tests.wire.standard import events_by_the_standard
from trio_gateway.wire import EngineError, StreamRelay, StreamShape, Usage, write_event
from trio_gateway.wire._sse import Event
from trio_gateway.wire._template import lines_of

from ..target import cuts
from .answers import PUBLIC, SECRETS, UPSTREAM, expect_harmless

INFINITIES: Final = {"NaN": None, "Infinity": 9999.0, "-Infinity": -9999.0}


class Relay(Protocol):
    """The surface that all relays share."""

    done: bool
    fault: EngineError | None
    aborted: bool
    progress: int

    @property
    def committed(self) -> bool: ...
    @property
    def events(self) -> int: ...
    @property
    def content_events(self) -> int: ...
    @property
    def all_finished(self) -> bool: ...
    @property
    def over(self) -> bool: ...
    @property
    def usage(self) -> Usage | None: ...
    @property
    def closing(self) -> bytes: ...
    @property
    def receipt(self) -> str | None: ...
    def feed(self, data: bytes) -> bytes: ...
    def end(self) -> bytes | None: ...


def shape_of(option: int, bound: int) -> StreamShape:
    """Read a shape from two options: bits for what was asked, and the bound of an event."""
    return StreamShape(
        choices=1 + (option & 1),
        wants_usage=bool(option & 2),
        wants_running_usage=bool(option & 2 and option & 4),
        upstream_model=UPSTREAM,
        public_model=PUBLIC if option & 8 else UPSTREAM,
        max_event_bytes=(bound + 1) * 16,
        secrets=SECRETS,
        receipt=bool(option & 16),
    )


def relay_all(make: Callable[[], Relay], stream: bytes, shape: StreamShape) -> tuple[list[Event], Relay]:
    """Relay a stream in every cut, see that all are the same and well-formed, and answer the events."""
    sent, relay = _relayed(make(), [stream], shape)
    for pieces in (*cuts(stream), _whole_events(stream)):
        again, other = _relayed(make(), pieces, shape)
        assert again == sent, (again, sent)
        assert _told(other) == _told(relay), (_told(other), _told(relay))
    if isinstance(relay, StreamRelay):
        again, other = _relayed(make(), _whole_events(stream), shape, as_lines=True)
        assert (again, _told(other)) == (sent, _told(relay))
    events = events_by_the_standard(sent)
    assert b"".join(write_event(event.data, event.name) for event in events) == sent
    _expect_state(relay, events)
    return events, relay


def _relayed(
    relay: Relay, pieces: list[bytes], shape: StreamShape, *, as_lines: bool = False
) -> tuple[bytes, Relay]:
    sent = b""
    for piece in pieces:
        over = relay.over
        lines = lines_of(piece) if as_lines else None
        out = relay.feed_lines(lines) if lines and isinstance(relay, StreamRelay) else relay.feed(piece)
        assert not (over and out)
        sent += out
        held = getattr(relay, "_held", [])
        assert not relay.committed or not held
        assert sum(map(len, held[:-1])) <= shape.max_event_bytes
    sent += relay.end() or b""
    assert not (relay.over and relay.feed(b'data: {"choices":[{"delta":{"content":"late"}}]}\n\n'))
    return sent, relay


def _whole_events(stream: bytes) -> list[bytes]:
    """Whole events in each piece, which relays may pass on without a look at each."""
    return [part + b"\n\n" for part in stream.split(b"\n\n")[:-1]] + [stream.split(b"\n\n")[-1]]


def _told(relay: Relay) -> tuple[object, ...]:
    return (
        relay.committed, relay.done, relay.fault, relay.aborted, relay.events, relay.content_events,
        relay.progress, relay.all_finished, relay.over, relay.usage, relay.closing, relay.receipt,
    )  # fmt: skip


def _expect_state(relay: Relay, events: list[Event]) -> None:
    assert relay.over is (relay.done or relay.aborted or relay.fault is not None)
    assert not (relay.all_finished and relay.fault)
    if relay.fault is not None:
        expect_harmless(relay.fault)
    closing = [event for event in events_by_the_standard(relay.closing) if event.data != b"[DONE]"]
    assert relay.events == len(events) + (len(closing) if relay.done else 0)
    assert relay.committed is (relay.events > 0)
    assert relay.content_events <= relay.events
    if relay.receipt is not None and relay.committed:
        handed_out = b"".join(event.data + b"\n" for event in [*events, *closing])
        assert relay.receipt == hashlib.sha256(handed_out).hexdigest()


def read_strictly(data: bytes) -> dict[str, Any] | None:
    """The object that an event holds; None if it is none, or names a member twice."""
    try:
        data.decode()
        value = read_leniently(data)
        json.dumps(value, ensure_ascii=False).encode()  # no lone surrogates
    except (ValueError, RecursionError):
        return None
    return value


def read_leniently(data: bytes) -> dict[str, Any] | None:
    """The same, with any bytes in its strings: relays do not look into what they need not read."""
    return _read(data, _once)


def read_as_most(data: bytes) -> dict[str, Any] | None:
    """As `read_leniently`, and of a member that is named twice the last one counts, as for most readers."""
    return _read(data, dict)


def _read(data: bytes, pairs: Callable[[list[tuple[str, Any]]], dict[str, Any]]) -> dict[str, Any] | None:
    try:
        text = data.decode("utf-8", "surrogateescape")
        value = json.loads(text, parse_constant=INFINITIES.__getitem__, object_pairs_hook=pairs)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a name twice")
    return dict(pairs)


def origins(
    stream: bytes, events: list[Event], same: Callable[[Event, Event], bool]
) -> Iterator[tuple[Event, Event]]:
    """Find for each event of an answer the engine's event that it was, in order; each must have one."""
    candidates = iter(events_by_the_standard(stream))
    for sent in events:
        came = next((came for came in candidates if same(came, sent)), None)
        assert came is not None, sent
        yield came, sent


def plainly_edited(data: bytes, shape: StreamShape) -> bytes:
    """What is no JSON passes once output was seen, and may be edited where it looks like any other event."""
    if shape.public_model != UPSTREAM:
        data = data.replace(b'"%b"' % UPSTREAM.encode(), b'"%b"' % shape.public_model.encode())
    for word, number in ((b"-Infinity", b"-9999.0"), (b"Infinity", b"9999.0"), (b"NaN", b"null")):
        data = data.replace(word, number)
    return data.strip()
