"""HTTP/1.1 heads and body framing (RFC 9112), both directions. Sans-IO.

Heads are cut out and checked here, then parsed by h11 (or httptools): what two parsers could
read differently is refused before any parser's opinion. Bodies are unframed
here, because a token costs one chunk and that is the hot path.
"""

from __future__ import annotations

import re
from collections.abc import Set
from dataclasses import dataclass
from typing import Final

from ..errors import BadFraming, EngineProtocolError
from ._head_parser import PARSER, Header, HeadParser

MAX_CHUNK_LINE: Final = 1024  # a size of 16 digits and some extension
MAX_TRAILER_BYTES: Final = 8 * 1024

_REQUEST_LINE = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+) ([\x21-\x7e]+) HTTP/([0-9]\.[0-9])\r\n")
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: [^\r\n]*)?\r\n")
_FRAMING_FIELD = re.compile(
    rb"\n(content-length|transfer-encoding|host|authorization|content-type)[ \t]*+:([^\r\n]*+)",
    re.IGNORECASE,
)
_CONTROLS: Final = bytes({*range(0x20), 0x7F} - {0x09, 0x0A, 0x0D})
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\x00-\x08\x0a-\x1f\x7f]*)?")
_TRAILER_FIELD = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[^\x00-\x08\x0a-\x1f\x7f]*")
_DIGITS = re.compile(rb"[0-9]{1,18}")
# Lines in front of small chunks, as most engines write them: to look one up costs a tenth of reading it.
_SMALL_SIZES: Final = {b"%x\r\n" % size: size for size in range(1, 1024)}
_SMALL_LINE: Final = max(map(len, _SMALL_SIZES))
# The same without their LF, by the line's length where a chunk is one line and a blank one.
_LINE_SIZES: Final = {form % size: size - 2 for size in range(2, 1024) for form in (b"%x\r", b"%X\r")}
_ODD_READS: Final = 8  # in a row, after which a body's chunks are not looked at for lines any more
_ONCE_IN_RESPONSES: Final = frozenset({b"content-length", b"transfer-encoding", b"host"})
_ONCE_IN_REQUESTS: Final = _ONCE_IN_RESPONSES | {b"authorization", b"content-type"}
_OF_CONNECTION: Final = frozenset({b"host", b"connection", b"expect"})
CHUNKED: Final = -1
UNTIL_CLOSE: Final = -2


@dataclass(slots=True)  # frozen, its fields would be set by calls
class RequestHead:
    """A client's request head. ``body`` is a length in bytes, or `CHUNKED`."""

    method: str
    target: str
    version: bytes
    headers: tuple[Header, ...]
    body: int
    keep_alive: bool
    expects_continue: bool

    @property
    def path(self) -> str:
        """The target without its query, not normalised."""
        return self.target.partition("?")[0]

    def encode(self) -> bytes:
        """Write it again, as another process is to read it."""
        lines = [f"{self.method} {self.target} HTTP/".encode("latin-1") + self.version]
        lines += [name + b": " + value for name, value in self.headers]
        return b"\r\n".join((*lines, b"", b""))

    def header(self, name: bytes) -> bytes | None:
        """Value of the first header ``name`` (lower case)."""
        for key, value in self.headers:
            if key == name:
                return value
        return None

    def all(self, name: bytes) -> list[bytes]:
        """Values of all headers ``name`` (lower case)."""
        return [value for key, value in self.headers if key == name]

    def firsts(self, names: frozenset[bytes]) -> dict[bytes, bytes]:
        """Values of the first header of each of these names, if there are any, in one look at all."""
        return {key: value for key, value in reversed(self.headers) if key in names}


@dataclass(slots=True)  # frozen, its fields would be set by calls
class ResponseHead:
    """An engine's response head. ``body`` is a length, `CHUNKED` or `UNTIL_CLOSE`."""

    status: int
    headers: tuple[Header, ...]
    body: int
    keep_alive: bool

    def header(self, name: bytes) -> bytes | None:
        """Value of the first header ``name`` (lower case)."""
        for key, value in self.headers:
            if key == name:
                return value
        return None


class HeadBuffer:
    """Gathers bytes until a head is whole.

    Args:
        max_bytes: of one head, the final blank line included.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max = max_bytes
        self._data = bytearray()
        self._searched = 0

    def __len__(self) -> int:
        return len(self._data)

    def feed(self, data: bytes) -> None:
        """Take in bytes."""
        self._data += data

    def take(self, size: int) -> bytes:
        """Give out so many bytes, which are there, as the body behind a head."""
        data = bytes(self._data[:size])
        del self._data[:size]
        return data

    def take_rest(self) -> bytes:
        """Give out all bytes that are left, as what follows a head."""
        rest = bytes(self._data)
        self._data.clear()
        self._searched = 0
        return rest

    def peek(self) -> bytes:
        """Answer what is left, without giving it out."""
        return bytes(self._data)

    def skip_blank_lines(self) -> None:
        """Drop empty lines in front of a request line (RFC 9112 2.2)."""
        while self._data.startswith(b"\r\n"):
            del self._data[:2]
            self._searched = 0

    def next_head(self) -> bytes | None:
        """Answer a whole head, blank line included, or None when more bytes are needed.

        Raises:
            BadFraming: it is too large (``headers_too_large``), or has a bare
                CR or LF or a control character, which is said as soon as it is seen.
        """
        if not self._searched and (head := self._whole_head()) is not None:
            return head
        end = self._data.find(b"\r\n\r\n", max(self._searched - 3, 0))
        seen = self._data if end < 0 else self._data[: end + 4]
        if len(seen) > self._max:
            raise BadFraming(f"the head is over {self._max} bytes", "headers_too_large")
        part = bytes(seen[max(self._searched - 1, 0) :])
        # A CR that ends what has been read may be half of a CRLF.
        _check_characters(part[:-1] if end < 0 and part.endswith(b"\r") else part, self._searched > 0)
        self._searched = len(self._data)
        if end < 0:
            return None
        del self._data[: end + 4]
        self._searched = 0
        return bytes(seen)

    def _whole_head(self) -> bytes | None:
        """Answer a head that came whole, as nearly all do; None: it did not, or is too large."""
        size = self._data.find(b"\r\n\r\n") + 4
        if not 4 <= size <= self._max:
            return None
        head = bytes(self._data[:size])
        _check_characters(head, False)
        del self._data[:size]
        return head


def _check_characters(part: bytes, continued: bool) -> None:
    """Look for bare line ends and control characters; by counting, which takes a tenth of a search.

    Args:
        continued: a line feed in front belongs to a CR that was looked at before.
    """
    pairs = part.count(b"\r\n")
    feeds = part.count(b"\n") - (continued and part.startswith(b"\n"))
    if part.count(b"\r") != pairs or feeds != pairs:
        raise BadFraming("a bare CR or LF in the head")
    if len(part.translate(None, _CONTROLS)) != len(part):
        raise BadFraming("a control character in the head")


def parse_request_head(head: bytes, max_headers: int, parser: HeadParser = PARSER) -> RequestHead:
    """Judge a client's head by section 3 of RFC 9112 and our own stricter rules.

    Raises:
        BadFraming: ``bad_framing``, or ``headers_too_large`` for too many headers.
    """
    if head.count(b"\r\n") - 2 > max_headers:
        raise BadFraming(f"more than {max_headers} headers", "headers_too_large")
    line = _REQUEST_LINE.match(head)
    if line is None:
        raise BadFraming("the request line is malformed")
    method, target, version = line.groups()
    if version not in (b"1.1", b"1.0"):
        raise BadFraming("the HTTP version is not known here")
    fields = head[line.end() :]
    body = _read_framing(fields, _ONCE_IN_REQUESTS)
    if body == CHUNKED and version == b"1.0":
        raise BadFraming("a transfer coding in HTTP/1.0")
    headers = parser.fields(fields)
    found = {name: value for name, value in headers if name in _OF_CONNECTION}
    if version == b"1.1" and b"host" not in found:
        raise BadFraming("the Host header is missing")
    tokens: Set[bytes] = _connection_tokens(headers) if b"connection" in found else frozenset()
    return RequestHead(
        method.decode("ascii"),
        target.decode("ascii"),
        version,
        tuple(headers),
        body or 0,
        b"close" not in tokens and (version == b"1.1" or b"keep-alive" in tokens),
        version == b"1.1"
        and b"expect" in found
        and any(n == b"expect" and v.lower() == b"100-continue" for n, v in headers),
    )


def _read_framing(fields: bytes, once: frozenset[bytes]) -> int | None:
    """Judge header lines before a parser may forgive them: h11 takes equal lengths for one, and unfolds.

    Answers the length of the body, `CHUNKED`, or None where nothing is said.

    Raises:
        BadFraming: a folded line, a repeated header, or a body whose end is not clear.
    """
    if fields.startswith((b" ", b"\t")) or b"\r\n " in fields or b"\r\n\t" in fields:
        raise BadFraming("a folded header")
    seen: dict[bytes, bytes] = {}
    for written, value in _FRAMING_FIELD.findall(b"\n" + fields):
        name = written.lower()
        if name in seen and name in once:
            raise BadFraming(f"the {name.decode('ascii')} header is repeated")
        seen[name] = value.strip(b" \t")
    length, coding = seen.get(b"content-length"), seen.get(b"transfer-encoding")
    if length is not None and not _DIGITS.fullmatch(length):
        raise BadFraming("the Content-Length is no number")
    if coding is None:
        return None if length is None else int(length)
    if length is not None:
        raise BadFraming("both Content-Length and Transfer-Encoding")
    if coding.lower() != b"chunked":
        raise BadFraming("the transfer coding is not chunked alone")
    return CHUNKED


def _connection_tokens(headers: list[Header]) -> Set[bytes]:
    return {t.strip().lower() for n, v in headers if n == b"connection" for t in v.split(b",")}


def parse_response_head(head: bytes, max_headers: int, parser: HeadParser = PARSER) -> ResponseHead:
    """Judge an engine's head.

    Raises:
        EngineProtocolError: it is malformed or its framing is ambiguous.
    """
    if head.count(b"\r\n") - 2 > max_headers:
        raise EngineProtocolError(f"more than {max_headers} response headers")
    line = _STATUS_LINE.match(head)
    if line is None:
        raise EngineProtocolError("the status line is malformed")
    fields = head[line.end() :]
    try:
        body = _read_framing(fields, _ONCE_IN_RESPONSES)
        headers = parser.fields(fields)
    except BadFraming as exc:
        raise EngineProtocolError(f"the response head is malformed: {exc}") from None
    status = int(line[2])
    keep_alive = line[1] == b"1" and b"close" not in _connection_tokens(headers)
    if status < 200 or status in (204, 304):
        body = 0
    elif body is None:
        body, keep_alive = UNTIL_CLOSE, False
    return ResponseHead(status, tuple(headers), body, keep_alive)


class BodyReader:
    """Takes the framing off one message body.

    Args:
        body: length in bytes, `CHUNKED` or `UNTIL_CLOSE`.

    Attributes:
        ended: the body was read to its proper end; ``rest`` has what followed it.
        whole: pieces in front of the malformed place, once `feed` has raised.
    """

    def __init__(self, body: int) -> None:
        self.ended = body == 0
        self.rest = b""
        self.whole: list[bytes] = []
        self._chunked = body == CHUNKED
        self._until_close = body == UNTIL_CLOSE
        self._left = max(body, 0)
        self._line = b""
        self._in_trailer = False
        self._trailer_bytes = 0
        self._after_data = False
        self._kept = b""  # the beginning of a chunk, as it came
        self._odd = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Take in bytes and answer the pieces of body in them.

        Raises:
            EngineProtocolError: the chunk framing is malformed.
        """
        if self.ended:
            self.rest += data
            return []
        if self._kept:
            data, self._kept = self._kept + data, b""
        if self._chunked:
            pieces: list[bytes] = []
            try:
                self._feed_chunked(data, pieces)
            except EngineProtocolError:
                self.whole = pieces
                raise
            return pieces
        if self._until_close:
            return [data]
        piece, more = data[: self._left], data[self._left :]
        self._left -= len(piece)
        if not self._left:
            self.ended, self.rest = True, more
        return [piece]

    def take_alone(self, data: bytes) -> bytes | None:
        """Take in bytes if they are one small chunk, whole and alone, and answer what is in it; else None.

        The cheapest way for a token that comes by itself; whatever else there is, `feed` takes.
        """
        if not self._at_chunk or self._kept:
            return None
        start = data.find(b"\n", 0, _SMALL_LINE) + 1
        size = _SMALL_SIZES.get(data[:start])
        if size is None or start + size + 2 != len(data) or not data.endswith(b"\r\n"):
            return None
        return data[start:-2]

    def take_lines(self, data: bytes) -> list[bytes] | None:
        """Take in bytes if they are small chunks, each of one line and a blank one, and answer these lines.

        The cheapest way for many tokens: a few calls for all of them. A chunk that is not whole is kept, as
        long as no line in it is. Anything else is `feed`'s: then None, and nothing has happened.
        """
        if not self._at_chunk or self._odd == _ODD_READS:
            return None
        lines = (self._kept + data if self._kept else data).split(b"\n")
        end = len(lines) - 1 & -4  # of whole chunks: size, line, blank, CR
        events, rest = lines[1:end:4], lines[end:]
        count = len(events)
        if (
            lines[2:end:4].count(b"") != count
            or lines[3:end:4].count(b"\r") != count
            or list(map(_LINE_SIZES.get, lines[:end:4])) != list(map(len, events))
        ):
            self._odd += 1
            return None
        if _begins_with_line(rest):
            self._kept = b"\n".join(rest)
        elif _lacks_line_end(rest):
            events.append(rest[1])
            self._kept, self._line, self._after_data = b"", rest[3], True
        else:
            self._odd += 1
            return None
        self._odd = 0
        return events

    def chunk_end(self, data: bytes) -> int:
        """Where in the next bytes the chunk ends that is under way; 0: not there, or there is none."""
        if not self._left and not self._after_data:
            return 0
        end = self._left + 2 - len(self._line)
        return end if self._line + data[self._left : end] == b"\r\n" else 0

    @property
    def _at_chunk(self) -> bool:
        """Whether all that came but what is kept are whole chunks."""
        return self._chunked and not (self._left or self._line or self._after_data or self._in_trailer)

    def close(self) -> bool:
        """Take the end of the connection; answers whether that is a proper end of the body."""
        if self._until_close:
            self.ended = True
        return self.ended

    def _feed_chunked(self, data: bytes, pieces: list[bytes]) -> None:
        at, size = 0, len(data)
        while at < size and not self.ended:
            if self._left:
                piece = data[at : at + self._left] if at or self._left < size else data
                pieces.append(piece)
                at += len(piece)
                self._left -= len(piece)
                self._after_data = not self._left
                continue
            if not (self._line or self._after_data or self._in_trailer):
                at = _take_small_chunks(data, at, pieces)
            end = data.find(b"\n", at)
            if end < 0:
                self._keep_line(data[at:])
                return
            self._step(self._line + data[at : end + 1] if self._line else data[at : end + 1])
            self._line = b""
            at = end + 1
        if self.ended:
            self.rest = data[at:]

    def _keep_line(self, part: bytes) -> None:
        self._line += part
        if len(self._line) > MAX_CHUNK_LINE:
            raise EngineProtocolError("a chunk line is too long")

    def _step(self, line: bytes) -> None:
        """Take one line of framing, its line end included."""
        if len(line) > MAX_CHUNK_LINE:
            raise EngineProtocolError("a chunk line is too long")
        if not line.endswith(b"\r\n"):
            raise EngineProtocolError("a bare LF in the chunk framing")
        if self._after_data:
            if line != b"\r\n":
                raise EngineProtocolError("a chunk is longer than its size")
            self._after_data = False
        elif self._in_trailer:
            self._trailer_bytes += len(line)
            if self._trailer_bytes > MAX_TRAILER_BYTES:
                raise EngineProtocolError("the trailer is too long")
            self.ended = line == b"\r\n"
            if not self.ended and not _TRAILER_FIELD.fullmatch(line, 0, len(line) - 2):
                raise EngineProtocolError("a trailer is no header field")
        else:
            size = _CHUNK_SIZE.fullmatch(line, 0, len(line) - 2)
            if size is None:
                raise EngineProtocolError("a chunk size is malformed")
            self._left = int(size[1], 16)
            self._in_trailer = not self._left


def _begins_with_line(lines: list[bytes]) -> bool:
    """Whether these are nothing, or the beginning of a small chunk: at most a line of it, and its LF."""
    if len(lines) == 1:
        return len(lines[0]) < _SMALL_LINE
    size, line = _LINE_SIZES.get(lines[0]), lines[1]
    if size is None or len(line) > size or b"\r" in line:
        return False
    return len(lines) == 2 or (len(lines) == 3 and line != b"" == lines[2])


def _lacks_line_end(lines: list[bytes]) -> bool:
    """Whether these are a small chunk of a line and a blank one, but for the line end behind it."""
    if len(lines) != 4:
        return False
    size, line, blank, end = lines
    return _LINE_SIZES.get(size) == len(line) and blank == b"" and end in (b"", b"\r")


def _take_small_chunks(data: bytes, at: int, pieces: list[bytes]) -> int:
    """Take whole chunks that begin there, as far as they are small; answers where something else begins."""
    while True:
        start = data.find(b"\n", at, at + _SMALL_LINE) + 1
        size = _SMALL_SIZES.get(data[at:start])
        if size is None:
            return at
        end = start + size
        if data[end : end + 2] != b"\r\n":
            return at
        pieces.append(data[start:end])
        at = end + 2


def write_chunk(data: bytes) -> bytes:
    """Frame one chunk; ``data`` is not empty."""
    return b"%x\r\n%b\r\n" % (len(data), data)


LAST_CHUNK: Final = b"0\r\n\r\n"
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"

_REASONS: Final = {
    200: "OK", 204: "No Content", 400: "Bad Request", 401: "Unauthorized", 403: "Forbidden", 404: "Not Found",
    405: "Method Not Allowed", 408: "Request Timeout", 409: "Conflict", 413: "Content Too Large",
    415: "Unsupported Media Type", 422: "Unprocessable Content", 426: "Upgrade Required",
    429: "Too Many Requests", 431: "Request Header Fields Too Large", 500: "Internal Server Error",
    502: "Bad Gateway", 503: "Service Unavailable", 504: "Gateway Timeout", 508: "Loop Detected",
}  # fmt: skip


def write_response_head(status: int, headers: list[tuple[str, str]]) -> bytes:
    """Write a response head; names and values are ours, so latin-1 without line ends."""
    lines = [f"HTTP/1.1 {status} {_REASONS.get(status, '')}"]
    lines += [f"{name}: {value}" for name, value in headers]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def write_request_head(method: bytes, target: bytes, headers: list[Header]) -> bytes:
    """Write a request head; the caller guarantees values without line ends."""
    lines = [method + b" " + target + b" HTTP/1.1"]
    lines += [name + b": " + value for name, value in headers]
    return b"\r\n".join([*lines, b"", b""])
