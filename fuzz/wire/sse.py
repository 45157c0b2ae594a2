"""Event streams: any cut of any bytes gives the events of the standard, within the bound."""

from __future__ import annotations

from typing import Final

from tests.wire.standard import events_by_the_standard
from trio_gateway.wire._sse import Event, EventReader, write_event

from ..target import Target, cuts, seed, split

ROOMY: Final = 1 << 20


def check(data: bytes) -> None:
    """See `Target`. Option: the bound of one event, less 8."""
    stream, (option,) = split(data, 1)
    limit = option + 8  # a short event fits
    expected = events_by_the_standard(stream)
    whole = _read([stream], ROOMY)
    assert whole[0] == expected
    bounded = _read([stream], limit)
    assert bounded[0] == expected[: len(bounded[0])]
    assert bounded[-1] or bounded == whole  # nothing is missing unless that was said
    for pieces in cuts(stream):
        assert _read(pieces, ROOMY) == whole
        assert _read(pieces, limit) == bounded
    for event in expected:
        assert events_by_the_standard(write_event(event.data, event.name)) == [event]


def _read(pieces: list[bytes], limit: int) -> tuple[list[Event], int, Event | None, bool]:
    """All that a reader says: events, dropped blocks, what stood behind them, too large."""
    reader = EventReader(limit)
    events = []
    for piece in pieces:
        events += reader.feed(piece)
        assert len(reader._rest) <= limit + 2
    assert all(len(event.data) <= limit for event in events)
    dropped = reader.dropped
    if not reader.at_boundary or reader.too_large:
        return events, dropped, reader.end(), reader.too_large
    # There whole events may be passed on unread, so the next one has to stand alone.
    assert reader.feed(b"data: {}\n\n") == [Event(None, b"{}")]
    return events, dropped, None, False


_STREAMS: Final = (
    b"data: a\n\ndata: b\r\n\r\ndata:c\r\rdata\n\n",
    b"\xef\xbb\xbfevent: error\nid: 7\nretry: 10\n: comment\ndata: x\ndata: y\n\n",
    b"\xef\xbb\xbf\xef\xbb\xbfdata: x\n\ndata: [DONE]\n\ndata: half",
    b"event: a\n\nevent:\ndata:  two blanks \n\n: keep-alive\n\nunknown: x\n\n",
    b"\n\n\r\r\n\ndata\ndata\n\n\xef\xbb",
    b'data: {"choices":[{"delta":{"content":"\xc3\xa9"}}]}\n\n',
    b"data: " + b"x" * 100 + b"\n\ndata: y\n\n",
)

TARGET: Final = Target(
    check,
    tuple(seed(stream, limit) for stream in _STREAMS for limit in (255, 20)),
    (
        b"data: ",
        b"data",
        b"event: ",
        b"id: ",
        b"retry: ",
        b"\r\n",
        b"\n\n",
        b"\r",
        b"\xef\xbb\xbf",
        b"[DONE]",
        b": ",
    ),
)
