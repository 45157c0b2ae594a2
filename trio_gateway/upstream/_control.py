"""Small questions to workers beside the requests: is it well, what does it have, what did it let go of.

By the same connections as requests, and not by a client library: so a worker's
socket, certificate, addresses and credential are what they are for requests, and a
probe that is answered says that requests would arrive.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Final

import trio

from ..contract import Worker
from ..errors import UpstreamFailed, UpstreamFault, spoken_tls
from ..wire import write_request_head
from ._connection import Answer, Connection
from ._dial import dial

MOST_BYTES: Final = 8 * 1024 * 1024  # of an answer; gauges of a busy engine have half of one
RECEIVE_BUFFER: Final = 64 * 1024
CONNECT: Final = 5.0  # seconds at most


async def ask(worker: Worker, path: str, *, method: str = "GET") -> tuple[int, bytes]:
    """Make one small request on a connection of its own; answers status and body.

    Without a limit of time: that is the caller's scope.

    Raises:
        UpstreamFailed: there was no whole answer.
    """
    connection = await _connect(worker, path, method)
    try:
        answer = await _answer(connection)
        body = bytearray()
        while data := await answer.receive():
            body += data
            if len(body) > MOST_BYTES:
                raise UpstreamFailed(UpstreamFault.TOO_LARGE, f"over {MOST_BYTES} bytes")
    finally:
        connection.abort()
    return answer.status, bytes(body)


async def order(worker: Worker, path: str) -> int:
    """Tell a worker something that has no body, by POST; answers the status.

    Raises:
        UpstreamFailed: as `ask`.
    """
    status, _ = await ask(worker, path, method="POST")
    return status


async def follow(worker: Worker, path: str, take: Callable[[bytes], bool]) -> None:
    """Read an answer that goes on, until its end or until ``take`` answers False.

    Raises:
        UpstreamFailed: it could not be had, or broke.
    """
    connection = await _connect(worker, path, "GET")
    try:
        answer = await _answer(connection)
        if answer.status != 200:
            raise UpstreamFailed(UpstreamFault.MALFORMED, f"status {answer.status}")
        while (data := await answer.receive()) and take(data):
            pass
    finally:
        connection.abort()


async def get(worker: Worker, path: str) -> Answer:
    """Make one request; answers as soon as the head is there. The caller reads, and leaves it with ``with``.

    Raises:
        UpstreamFailed: as `ask`.
    """
    connection = await _connect(worker, path, "GET")
    try:
        return await _answer(connection)
    except BaseException:
        connection.abort()
        raise


async def _connect(worker: Worker, path: str, method: str) -> Connection:
    """Connect and send the request; the caller owns the connection."""
    headers = [(b"Host", worker.authority.encode("ascii")), (b"Accept", b"*/*"), (b"Connection", b"close")]
    if method == "POST":
        headers.append((b"Content-Length", b"0"))
    if worker.api_key is not None:
        headers.append((b"Authorization", b"Bearer " + worker.api_key.encode("latin-1")))
    target = (worker.prefix + path).encode("ascii")
    connection = Connection(await dial(worker, CONNECT, RECEIVE_BUFFER))
    try:
        await connection.stream.send_all(write_request_head(method.encode("ascii"), target, headers))
    except trio.BrokenResourceError as exc:
        connection.abort()
        raise UpstreamFailed(
            UpstreamFault.BROKEN, f"the connection broke: {spoken_tls(exc.__cause__)}"
        ) from None
    except BaseException:
        connection.abort()
        raise
    return connection


async def _answer(connection: Connection) -> Answer:
    head, rest = await connection.receive_head()
    return Answer(connection, head, rest, lambda: None, Connection.abort)


async def resolve(host: str) -> list[str]:
    """Answer the addresses of a name, or the address itself; none if it can not be resolved."""
    try:
        found = await trio.socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # the latter for what can not be a name, such as "a..b"
        return []
    return list(dict.fromkeys(str(address[0]) for *_, address in found))
