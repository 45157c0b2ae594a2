"""Whole client connections: each request gets the one answer that a slow reader expects, and nobody else's.

Every input is sent to one server by several connections at once, each in other
pieces, beside a well-behaved client. The clock is Trio's fake one, which jumps
when nothing else can happen, so that time limits cost no time.
"""

from __future__ import annotations

import hashlib
import json
import socket
from typing import Final, cast

import trio
import trio.testing

from trio_gateway.edge import HangupWatch, HttpServer, ServerLimits
from trio_gateway.edge._http_server import REST_KEPT, Incoming, write_within
from trio_gateway.errors import Problem, Refused
from trio_gateway.testing import Answer, AnswerReader
from trio_gateway.wire import write_response_head

from ..smuggling import CASES
from ..target import Target, cuts, seed, split
from .reference import Ending, Expected, Limits, expected_answers

LIMITS: Final = Limits(
    head_bytes=700, head_count=9, body_bytes=300, kept_rest=REST_KEPT, chunk_line=1024, trailer=8 * 1024
)
SERVER_LIMITS: Final = ServerLimits(
    connections=16,
    head_bytes=LIMITS.head_bytes,
    head_count=LIMITS.head_count,
    head_timeout=10.0,
    body_bytes=LIMITS.body_bytes,
    body_timeout=30.0,
    keep_alive=75.0,
    unplaced_bytes=16 * LIMITS.body_bytes,
)
BYTEWISE: Final = 48  # longer inputs are not sent byte by byte: each byte is a round of the loop
WELL_BEHAVED: Final = (
    b"POST /read/mine HTTP/1.1\r\nHost: g\r\nContent-Length: 5\r\n\r\nmine!"
    b"POST /read/last HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nlast\r\n0\r\n\r\n"
)
LEAVES: Final = 2  # option: the client does not wait for answers


def check(data: bytes) -> None:
    """See `Target`. Option: the client ends by a FIN, by silence, or leaves."""
    raw, (option,) = split(data, 1)
    ending: Ending = "silence" if option == 1 else "fin"
    clock = trio.testing.MockClock(autojump_threshold=0)
    trio.run(_connect_all, raw, ending, option == LEAVES, clock=clock)


async def _connect_all(raw: bytes, ending: Ending, leaves: bool) -> None:
    bugs: list[BaseException] = []
    watch = HangupWatch()
    server = HttpServer(_Echo(), watch, SERVER_LIMITS, lambda _, exc: bugs.append(exc), lambda: False)
    bytewise, *others = cuts(raw)
    ways = [[raw], others[len(raw) % len(others)], *([bytewise] if len(raw) <= BYTEWISE else [])]
    try:
        async with trio.open_nursery() as running:
            running.start_soon(watch.run)
            async with trio.open_nursery() as clients:
                for pieces in ways:
                    clients.start_soon(_talk, server, pieces, ending, leaves)
                clients.start_soon(_talk, server, [WELL_BEHAVED], "fin", False)
            running.cancel_scope.cancel()
    finally:
        watch.close()
    assert not bugs, bugs
    assert (server.open, server.room.used, len(watch)) == (0, 0, 0)


async def _talk(server: HttpServer, pieces: list[bytes], ending: Ending, leaves: bool) -> None:
    """Be one client and one connection of the server; compare what comes back with what should."""
    expected = expected_answers(b"".join(pieces), ending, LIMITS)
    near, theirs = socket.socketpair()
    ours = trio.socket.from_stdlib_socket(near)
    theirs.setblocking(False)
    with ours, theirs:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.serve, theirs)
            await _send(ours, pieces)
            if leaves:
                ours.close()
                return  # noqa: ASYNC121 - the server sees the close, so the nursery ends by itself
            if ending == "fin":
                ours.shutdown(socket.SHUT_WR)
            reader = AnswerReader()
            reader.methods.extend(answer.method or "POST" for answer in expected)
            while data := await ours.recv(1 << 16):
                reader.feed(data)
            reader.end_of_stream("fin")
    _compare(reader, expected)


async def _send(sock: trio.socket.SocketType, pieces: list[bytes]) -> None:
    for piece in filter(None, pieces):
        if len(pieces) > 1:
            await trio.testing.wait_all_tasks_blocked()
        assert await sock.send(piece) == len(piece)  # inputs are far smaller than the socket's buffer


def _compare(reader: AnswerReader, expected: list[Expected]) -> None:
    assert len(reader.answers) == len(expected), (reader.answers, expected)
    assert reader.interims == [100 for answer in expected if answer.interim]
    for got, wanted in zip(reader.answers, expected, strict=True):
        assert got.ended == "complete"
        assert got.status in wanted.statuses, (got, got.body, wanted)
        if wanted.told is not None and wanted.method != "HEAD":
            assert got.body == _told(*wanted.told)
        if got.status >= 400 and wanted.method != "HEAD":
            _expect_clear(got)
    if reader.answers:
        # Only the last one may say that it is the last; and if it does not, nothing came behind it.
        assert all(answer.header("connection") != "close" for answer in reader.answers[:-1])


def _expect_clear(answer: Answer) -> None:
    error = answer.error()
    assert isinstance(error["code"], str)
    assert cast("str", error["message"]).isprintable()


def _told(method: str, target: str, body: bytes) -> bytes:
    return json.dumps([method, target, len(body), hashlib.sha256(body).hexdigest()]).encode()


class _Echo:
    """Tells what it read, does not read at all, or refuses, as the target says. See Handler."""

    async def answer(self, incoming: Incoming) -> bool:
        """See Handler."""
        head = incoming.head
        if head.target.startswith("/read"):
            body = _told(head.method, head.target, await incoming.read_body())
        elif head.target.startswith("/drop"):
            body = b"{}"
        else:
            raise Refused(Problem.of("unknown_route", "there is nothing at this path"))
        headers = [("content-type", "application/json"), ("content-length", str(len(body)))]
        if not head.keep_alive:
            headers.append(("connection", "close"))
        raw = write_response_head(200, headers)
        await write_within(incoming.connection, raw if head.method == "HEAD" else raw + body)
        return True

    def malformed(self, code: str) -> None:
        """See Handler."""
        assert code in ("bad_framing", "headers_too_large", "request_timeout")


def _here(raw: bytes) -> bytes:
    """Ask the handler of this target what the table asks the gateway."""
    return raw.replace(b"/v1/chat/completions", b"/read").replace(b"/v1/models/hidden", b"/drop")


_REQUESTS: Final = (
    WELL_BEHAVED,
    b"GET /drop HTTP/1.1\r\nHost: g\r\n\r\n"
    b"HEAD /drop HTTP/1.1\r\nHost: g\r\n\r\nHEAD /x HTTP/1.1\r\nHost: g\r\n\r\n",
    b"POST /read HTTP/1.1\r\nHost: g\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\nhi",
    b"POST /drop HTTP/1.1\r\nHost: g\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\nhi",
    b"POST /x HTTP/1.1\r\nHost: g\r\nContent-Length: 5\r\n\r\nhelloGET /read HTTP/1.1\r\nHost: g\r\n\r\n",
    b"POST /read HTTP/1.1\r\nHost: g\r\nContent-Length: 500\r\n\r\n" + b"x" * 500
    + b"GET /drop HTTP/1.0\r\n\r\n",
    b"POST /read HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: chunked\r\n\r\n190\r\n" + b"x" * 400
    + b"\r\n0\r\n\r\nGET /drop HTTP/1.1\r\nHost: g\r\n\r\n",
    b"POST /read HTTP/1.1\r\nHost: g\r\nContent-Length: 5\r\n\r\nhel",
    b"POST /read HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhel",
    b"GET /read HTTP/1.1\r\nHo",
    b"GET /read HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"
    b"GET /read HTTP/1.0\r\n\r\nGET /read HTTP/1.0\r\n\r\n",
    b"GET /read HTTP/1.1\r\nHost: g\r\n" + b"X: y\r\n" * 9 + b"\r\n",
    b"GET /read HTTP/1.1\r\nHost: g\r\nX: " + b"y" * 700 + b"\r\n\r\n",
    b"\r\n\r\n",
    b"",
)  # fmt: skip

TARGET: Final = Target(
    check,
    (
        *(seed(raw, option) for raw in _REQUESTS for option in (0, 1)),
        seed(WELL_BEHAVED, LEAVES),
        *(seed(_here(case.raw), 0) for case in CASES if len(case.raw) < 1500),
    ),
    (
        b"\r\n", b"\r\n\r\n", b"0\r\n\r\n", b"GET /drop HTTP/1.1\r\nHost: g\r\n\r\n", b"Content-Length: ",
        b"Transfer-Encoding: chunked\r\n", b"POST /read HTTP/1.1\r\nHost: g\r\n", b"Expect: 100-continue\r\n",
        b"Connection: close\r\n", b"Connection: keep-alive\r\n", b" HTTP/1.0\r\n", b"HEAD ", b"/drop",
        b"/read",
        b"X-Api-Key: a\r\n", b"Authorization: Bearer a\r\n", b"5\r\nhello\r\n", b"\n", b"\r", b"\x00",
    ),
)  # fmt: skip
