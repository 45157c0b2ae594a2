"""Engines that speak the OpenAI-compatible HTTP API: how an attempt is sent to them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Final

import trio

from ..contract import InternalRequest, LeasePort, RawJson, Worker
from ..errors import UpstreamFailed, UpstreamFault
from ..flow import ReadLoop
from ..wire import GENERATE, Header, generate_pieces, internal_body, write_request_head
from ._connection import Answer, Connection
from ._dial import dial
from ._pool import ConnectionPool

_KEPT: Final = 1024  # beginnings of heads, and salts
LONG: Final = 64 * 1024  # bytes of a body


@dataclass(frozen=True, slots=True)
class UpstreamLimits:
    """Seconds to connect (name, TCP and TLS), and bytes of the kernel's receive buffer."""

    connect: float
    receive_buffer: int


class HttpEngine:
    """Opens attempts over HTTP/1.1. See EnginePort.

    Args:
        via: our name in the ``Via`` header, by which a loop is found.
        salt: secret from which each tenant's cache salt is made.
        trace: writes the headers by which an engine continues the trace of an attempt; the caller's own
            are passed on if nobody else has a span in between.
        loop: reads streams for their tasks; None: each task reads its own.
    """

    def __init__(
        self,
        pool: ConnectionPool,
        limits: UpstreamLimits,
        via: str,
        salt: bytes,
        trace: Callable[[InternalRequest, str], tuple[Header, ...]] | None = None,
        loop: ReadLoop | None = None,
    ) -> None:
        self._pool = pool
        self._limits = limits
        self._via: Final = via.encode("ascii")
        self._salt = salt
        self._trace = trace or _passed_on
        self._loop = loop

    def limited(self, limits: UpstreamLimits) -> HttpEngine:
        """Answer the same with other bounds: of the same pool, and by the same secret."""
        return HttpEngine(self._pool, limits, self._via.decode(), self._salt, self._trace, self._loop)

    async def open(
        self, request: InternalRequest, lease: LeasePort, attempt_id: str, nursery: trio.Nursery
    ) -> Answer:
        """See EnginePort."""
        worker = lease.worker
        salt = self._salt_of(request.tenant)
        write = partial(internal_body, request, worker.dialect, attempt_id, salt)
        if worker.dialect.agent:
            remaining = request.deadline - trio.current_time()
            write = partial(generate_pieces, request, worker.dialect, attempt_id, salt, remaining)
        # A long text that must be translated would hold the loop.
        translated = worker.dialect.native(request.operation) or (
            worker.dialect.agent and request.form is not None
        )
        long = translated and request.size > LONG
        body = await trio.to_thread.run_sync(write, abandon_on_cancel=True) if long else write()
        head = self._head(request, worker, attempt_id, sum(map(len, body)))
        connection = self._pool.take(worker)
        if connection is not None:
            try:
                return await self._exchange(connection, lease, attempt_id, head, body, nursery)
            except _DiedIdle:
                pass  # it had been closed while nobody looked: nothing was executed
        stream = await dial(worker, self._limits.connect, self._limits.receive_buffer)
        connection = Connection(stream, self._loop)
        return await self._exchange(connection, lease, attempt_id, head, body, nursery)

    async def _exchange(
        self,
        connection: Connection,
        lease: LeasePort,
        attempt_id: str,
        head: bytes,
        body: list[RawJson],
        nursery: trio.Nursery,
    ) -> Answer:
        try:
            lease.engine_started(attempt_id)
            connection.send(head, body, nursery)
            answer, rest = await connection.receive_head()
            worker = lease.worker
            return Answer(connection, answer, rest, lease.engine_done, lambda c: self._pool.give(worker, c))
        except UpstreamFailed as failure:
            connection.abort()
            if connection.reused and connection.silent and failure.fault is UpstreamFault.BROKEN:
                lease.engine_done()
                raise _DiedIdle from None
            raise
        except BaseException:
            connection.abort()
            raise

    def _head(self, request: InternalRequest, worker: Worker, attempt_id: str, length: int) -> bytes:
        native, agent = worker.dialect.native(request.operation), worker.dialect.agent
        accept = b"text/event-stream" if request.stream else b"application/json"
        kind = b"application/json"
        if agent or (native and request.stream):
            accept = b"application/x-ndjson"
        elif request.form is not None:
            accept, kind = b"*/*", request.form.content_type
        path = GENERATE if agent else "/api/chat" if native else request.operation.path
        begin = _begin_of_head(worker.prefix + path, worker.authority, accept, self._via, worker.api_key)
        headers: list[Header] = [(b"Content-Type", kind), (b"Content-Length", b"%d" % length)]
        if worker.dialect.request_id_header is not None:
            headers.append((worker.dialect.request_id_header, attempt_id.encode("ascii")))
        headers += self._trace(request, attempt_id)
        return begin + b"".join([b"%b: %b\r\n" % header for header in headers]) + b"\r\n"

    def _salt_of(self, tenant: str) -> str:
        return _salt_for(self._salt, tenant)


@lru_cache(maxsize=_KEPT)
def _salt_for(secret: bytes, tenant: str) -> str:
    return hashlib.blake2b(tenant.encode(), key=secret, digest_size=16).hexdigest()


@lru_cache(maxsize=_KEPT)
def _begin_of_head(target: str, authority: str, accept: bytes, via: bytes, api_key: str | None) -> bytes:
    """Write what the heads of most requests to a worker have in common."""
    headers: list[Header] = [
        (b"Host", authority.encode("ascii")),
        (b"Accept", accept),
        (b"Accept-Encoding", b"identity"),
        (b"Via", b"1.1 " + via),
    ]
    if api_key is not None:
        headers.append((b"Authorization", b"Bearer " + api_key.encode("latin-1")))
    return write_request_head(b"POST", target.encode("ascii"), headers)[:-2]


def _passed_on(request: InternalRequest, attempt_id: str) -> tuple[Header, ...]:
    return request.trace


class _DiedIdle(Exception):
    """A reused connection died before any byte of an answer."""
