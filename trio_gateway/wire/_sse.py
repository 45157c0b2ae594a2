"""Server-sent events, reading side, by WHATWG HTML 9.2.5 and 9.2.6. Sans-IO.

Feed bytes, get whole events. Splits at any byte give the same events. Cost is
linear: bytes are searched once, and a big event is gathered in one bytearray.
"""

from __future__ import annotations

from typing import NamedTuple

_BOM = b"\xef\xbb\xbf"


class Event(NamedTuple):
    """One event: its name (None when there was no ``event`` field) and its data."""

    name: bytes | None
    data: bytes


class EventReader:
    """Takes an engine's event stream apart.

    Comments, ``id``, ``retry`` and unknown fields are dropped; a block without
    data is no event, and is counted in ``dropped``.

    Attributes:
        too_large: an event over ``max_event_bytes`` came. Nothing is read after
            it; the events in front of it were answered.
    """

    def __init__(self, max_event_bytes: int) -> None:
        self._max = max_event_bytes
        self._rest = bytearray()
        self._at_start = True
        self._after_cr = False
        self.dropped = 0
        self.too_large = False

    @property
    def at_boundary(self) -> bool:
        """Whether all bytes fed so far belong to whole blocks, and the start of the stream is past."""
        return not self._rest and not self._at_start and not self._after_cr

    @property
    def half_read(self) -> bool:
        """Whether some bytes wait for the rest of their block."""
        return bool(self._rest)

    def feed(self, data: bytes) -> list[Event]:
        """Take in bytes and answer the events that they complete."""
        if self.too_large:
            return []
        if b"\r" in data or self._after_cr:
            data = self._unify_line_ends(data)
        searched = max(len(self._rest) - 1, 0)
        self._rest += data
        if self._at_start and not self._skip_bom():
            return []
        end = self._rest.rfind(b"\n\n", searched)
        if end < 0:
            self._check_rest()
            return []
        whole = bytes(self._rest[: end + 2])
        del self._rest[: end + 2]
        events = self._events(whole)
        self._check_rest()
        return events

    def complete(self, data: bytes) -> bytes | None:
        """Answer the block that is under way with what completes it, and forget it; None: it does not.

        For whoever reads whole blocks by other means. What stands behind the last of them is to be fed.
        """
        rest = self._rest
        if self._at_start or self._after_cr:
            return None
        if b"\n\n" not in data and not (data.startswith(b"\n") and rest.endswith(b"\n")):
            return None
        whole = bytes(rest) + data
        rest.clear()
        return whole

    def end(self) -> Event | None:
        """Answer what stood between the last blank line and the end of the stream.

        The standard discards it; whether it may count is the caller's to judge.
        """
        block = bytes(self._rest)
        self._rest.clear()
        return _parse_block(block)

    def _unify_line_ends(self, data: bytes) -> bytes:
        if data:
            if self._after_cr and data.startswith(b"\n"):
                data = data[1:]  # second half of a CRLF that was split over two reads
            self._after_cr = data.endswith(b"\r")
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")

    def _skip_bom(self) -> bool:
        """Drop one leading byte order mark; False while it can not be told yet."""
        if len(self._rest) < len(_BOM) and _BOM.startswith(self._rest):
            return False
        if self._rest.startswith(_BOM):
            del self._rest[: len(_BOM)]
        self._at_start = False
        return True

    def _check_rest(self) -> None:
        """Judge an event that is not whole yet; one line end at either side may belong to a blank line."""
        size = len(self._rest) - self._rest.startswith(b"\n") - self._rest.endswith(b"\n")
        if size > self._max:
            self._stop()

    def _stop(self) -> None:
        self.too_large = True
        self._rest.clear()

    def _events(self, whole: bytes) -> list[Event]:
        events = []
        for block in whole.split(b"\n\n"):
            if len(block) - block.startswith(b"\n") > self._max:
                self._stop()
                break
            event = _parse_block(block)
            if event is not None:
                events.append(event)
            elif block.strip(b"\n"):
                self.dropped += 1
        return events


def _parse_block(block: bytes) -> Event | None:
    if block.startswith(b"data: ") and b"\n" not in block:
        return Event(None, block[6:])
    name: bytes | None = None
    data: list[bytes] = []
    for line in block.split(b"\n"):
        field, _, value = line.partition(b":")
        if value.startswith(b" "):
            value = value[1:]
        if field == b"data":
            data.append(value)
        elif field == b"event":
            name = value or None
    if not data:
        return None
    return Event(name, b"\n".join(data))


def write_event(data: bytes, name: bytes | None = None) -> bytes:
    """Write one event so that any reader gets exactly ``data`` and ``name`` back."""
    head = b"event: " + name + b"\n" if name else b""
    if b"\n" in data:
        return head + b"".join(b"data: " + line + b"\n" for line in data.split(b"\n")) + b"\n"
    return head + b"data: " + data + b"\n\n"


def receipt_comment(digest: str, events: int) -> bytes:
    """Write the comment that lets both sides check completeness and billing."""
    return f": receipt sha256={digest} events={events}\n\n".encode()


HEARTBEAT = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
