"""A door between the gateway and an engine that keeps what goes through: for engines that record nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import trio

from trio_gateway.testing import BodyReader, body_framing, parse_head

RECEIVE_BYTES: Final = 64 * 1024


@dataclass(frozen=True, slots=True)
class Passed:
    """One request that reached the engine."""

    target: str
    headers: dict[str, str]
    body: bytes


class Recorder:
    """Passes bytes both ways, unchanged, and reads the requests among them.

    Attributes:
        requests: what reached the engine, oldest first.
        url: base URL, as a worker's configuration wants it.
    """

    def __init__(self, engine_url: str) -> None:
        host, _, port = engine_url.rpartition("/")[2].rpartition(":")
        self._engine = (host, int(port))
        self.requests: list[Passed] = []
        self.url = ""

    async def serve(self, task_status: trio.TaskStatus[Recorder] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen and pass on until cancelled."""
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        async with listener:
            self.url = f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
            async with trio.open_nursery() as nursery:
                task_status.started(self)
                await trio.serve_listeners(self._pass_on, [listener], handler_nursery=nursery)

    async def _pass_on(self, gateway: trio.SocketStream) -> None:
        async with (
            gateway,
            await trio.open_tcp_stream(*self._engine) as engine,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(self._forward, gateway, engine, _RequestReader(self.requests), nursery)
            nursery.start_soon(self._forward, engine, gateway, None, nursery)

    async def _forward(
        self,
        source: trio.SocketStream,
        sink: trio.SocketStream,
        reader: _RequestReader | None,
        nursery: trio.Nursery,
    ) -> None:
        try:
            while data := await source.receive_some(RECEIVE_BYTES):
                if reader is not None:
                    reader.feed(data)
                await sink.send_all(data)
        except trio.BrokenResourceError:
            pass
        nursery.cancel_scope.cancel()  # neither side ever half-closes: an end is the end of both


class _RequestReader:
    """Cuts the bytes of one connection into requests."""

    def __init__(self, requests: list[Passed]) -> None:
        self._requests = requests
        self._buffer = bytearray()
        self._head = parse_head(b"NONE /")
        self._body: BodyReader | None = None

    def feed(self, data: bytes) -> None:
        self._buffer += data
        while self._step():
            pass

    def _step(self) -> bool:
        if self._body is None:
            raw, end, rest = self._buffer.partition(b"\r\n\r\n")
            if not end:
                return False
            self._head, self._buffer = parse_head(bytes(raw)), rest
            self._body = BodyReader(*body_framing(self._head, unmarked="none"))
        self._body.feed(self._buffer)
        if not self._body.complete:
            return False
        self._requests.append(Passed(self._head.start[1], dict(self._head.fields), bytes(self._body.data)))
        self._body = None
        return bool(self._buffer)


@asynccontextmanager
async def open_recorder(engine_url: str) -> AsyncIterator[Recorder]:
    """Run a recorder before an engine for the length of the block."""
    async with trio.open_nursery() as nursery:
        recorder: Recorder = await nursery.start(Recorder(engine_url).serve)
        yield recorder
        nursery.cancel_scope.cancel()
