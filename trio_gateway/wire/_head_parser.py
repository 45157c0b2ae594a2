"""The grammar of heads: h11, or httptools where the extra ``speed`` is installed. Sans-IO.

Both stand behind one small port and see only heads that were checked before
(characters, line ends, size), so that they can not disagree on what counts.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any, Final, Protocol

import h11

from ..errors import BadFraming

httptools: Any = None
with contextlib.suppress(ImportError):  # unless the extra "speed" is installed
    httptools = importlib.import_module("httptools")

Header = tuple[bytes, bytes]


class HeadParser(Protocol):
    """The small port behind which h11 and httptools are interchangeable."""

    def fields(self, lines: bytes) -> list[Header]:
        """Parse the header lines of a message, final blank line included; names in lower case.

        Raises:
            BadFraming: the grammar is violated.
        """


# The first line was judged before; this one makes neither parser say more about it.
_ANY_REQUEST: Final = b"GET / HTTP/1.0\r\n"


class H11Parser:
    """Heads by h11."""

    def fields(self, lines: bytes) -> list[Header]:
        """See `HeadParser`."""
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=len(lines) + 64)
        connection.receive_data(_ANY_REQUEST + lines)
        try:
            event = connection.next_event()
        except h11.RemoteProtocolError:
            raise BadFraming("a header line is malformed") from None
        if not isinstance(event, h11.Request):
            raise BadFraming("the head is malformed")
        return list(event.headers)


class _Gathering:
    """What httptools calls back while it parses one head."""

    def __init__(self) -> None:
        self.headers: list[Header] = []
        self.whole = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value.strip(b" \t")))

    def on_headers_complete(self) -> None:
        self.whole = True


class HttptoolsParser:
    """Heads by httptools (llhttp, in its strict mode)."""

    def fields(self, lines: bytes) -> list[Header]:
        """See `HeadParser`."""
        found = _Gathering()
        try:
            httptools.HttpRequestParser(found).feed_data(_ANY_REQUEST + lines)
        except httptools.HttpParserUpgrade:
            pass  # the head is whole; what an upgrade means is not asked here
        except httptools.HttpParserError:
            raise BadFraming("a header line is malformed") from None
        if not found.whole:
            raise BadFraming("the head is malformed")
        return found.headers


H11: Final[HeadParser] = H11Parser()
PARSER: Final[HeadParser] = H11 if httptools is None else HttptoolsParser()
