"""Event streams by the words of the standard, for the tests to compare with."""

from __future__ import annotations

import re

from tests.wire.grammar import BOM
from trio_gateway.wire._sse import Event


def events_by_the_standard(stream: bytes) -> list[Event]:
    """Read a whole stream as section 9.2.6 says it, without any thought of speed."""
    lines = re.split(rb"\r\n|\r|\n", stream.removeprefix(BOM))
    events, name, data = [], b"", b""
    for line in lines[:-1]:  # what stands behind the last line end is no line
        if not line:
            if data:
                events.append(Event(name or None, data.removesuffix(b"\n")))
            name, data = b"", b""
            continue
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            data += value + b"\n"
        elif field == b"event":
            name = value
    return events
