"""A real HTTP/1.1 server whose answers are scripted, for tests and benches.

It plays the part of an engine behind the gateway: it says exactly the bytes of a
script, breaks exactly where the script says, and records what the gateway sent
and when and how it closed. Nothing in it is timed by sleeping: tests wait for
`ScriptedEngine.request`, `EngineRequest.closed`, `ScriptedEngine.wait_idle` and
the like.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import trio

from ._answers import chat_answer, chat_stream, completion_answer, completion_stream, embedding_answer
from ._conditions import Condition
from ._engine_connection import EngineConnection, EngineRequest, PeerLeft, encode_json
from ._messages import MessageError, MessageHead
from ._steps import Json, ReadOnly, Script

Scripting: TypeAlias = "Script | Callable[[EngineRequest], Script]"


def good_answer(request: EngineRequest) -> Script:
    """What a plain good engine answers: ``ok`` in the operation's own form.

    The requested model is echoed, a stream is a stream, usage comes where
    ``stream_options.include_usage`` asks for it.
    """
    body = request.json()
    model = str(body.get("model", "m1"))
    if request.target.endswith("/embeddings"):
        return embedding_answer([0.25, -0.5], model=model)
    chat = request.target.endswith("/chat/completions")
    if not body.get("stream"):
        return chat_answer(model=model) if chat else completion_answer(model=model)
    options = body.get("stream_options")
    asked = isinstance(options, dict) and bool(options.get("include_usage"))
    usage = (3, 1) if asked else None
    stream = chat_stream if chat else completion_stream
    return stream("ok", usage=usage, model=model)


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """A snapshot of a scripted engine.

    Attributes:
        requests: inference requests that arrived since the start.
        open_requests: those whose script still plays and whose connection stands.
        most_open: the largest `open_requests` ever seen.
        connections: connections accepted since the start.
        open_connections: those that neither side has closed.
        failed_handshakes: TLS handshakes that the gateway refused or left.
        violations: what the gateway sent that is no HTTP/1.1.
    """

    requests: int
    open_requests: int
    most_open: int
    connections: int
    open_connections: int
    failed_handshakes: int
    violations: tuple[str, ...]


class ScriptedEngine:
    """An engine that answers request after request by script.

    Args:
        scripts: the script of the first request, of the second, and so on; the
            last one serves all further requests. A function is called with the
            request and answers its script. Without any, `good_answer` serves.
        models: what ``GET /v1/models`` lists.
        pages: scripts of requests to these targets, whatever their method; one that ends
            with ``/`` stands for all below it. They are no inference requests.
        socket_path: listen on this unix socket instead of a port of 127.0.0.1.
        tls: speak TLS with this context.
        send_buffer: bytes of the kernel's send buffer, so that back pressure
            shows early; None leaves the system's.

    Attributes:
        pages: may be changed at any time.
        page_requests: what was asked for at them.

    Use `open_engine`, or ``await nursery.start(engine.serve)``.
    """

    def __init__(
        self,
        *scripts: Scripting,
        models: Sequence[str] = ("m1",),
        pages: Mapping[str, Scripting] | None = None,
        socket_path: Path | None = None,
        tls: ssl.SSLContext | None = None,
        send_buffer: int | None = None,
    ) -> None:
        self._scripts: tuple[Scripting, ...] = scripts or (good_answer,)
        self._played = 0
        self._heads = 0
        self._by_number: dict[int, EngineRequest] = {}
        self._models = tuple(models)
        self.pages: dict[str, Scripting] = dict(pages or {})
        self.page_requests: list[EngineRequest] = []
        self._socket_path = socket_path
        self._tls = tls
        self._send_buffer = send_buffer
        self._changed = Condition()
        self._connections: dict[int, EngineConnection] = {}
        self._accepted = 0
        self._open = 0
        self._most_open = 0
        self._failed_handshakes = 0
        self._violations: list[str] = []
        self.port = 0

    @property
    def requests(self) -> list[EngineRequest]:
        """The inference requests so far, in the order in which they were whole."""
        return list(self._by_number.values())

    @property
    def url(self) -> str:
        """The base URL as a worker's configuration wants it."""
        if self._socket_path is not None:
            return f"http+unix://{self._socket_path}"
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}"

    def statistics(self) -> EngineStatistics:
        """Answer the counters as they are now."""
        return EngineStatistics(
            requests=len(self._by_number),
            open_requests=self._open,
            most_open=self._most_open,
            connections=self._accepted,
            open_connections=len(self._connections),
            failed_handshakes=self._failed_handshakes,
            violations=tuple(self._violations),
        )

    def rescript(self, *scripts: Scripting) -> None:
        """Give new scripts to the requests that come from now on."""
        self._scripts = scripts or (good_answer,)
        self._played = 0

    def close_connections(self, *, reset: bool = False) -> None:
        """Close every connection, as an engine that dies does."""
        for connection in list(self._connections.values()):
            connection.close(reset=reset)

    # -- waiting

    async def request(self, number: int = 1) -> EngineRequest:
        """Wait until the `number`-th inference request has arrived, and answer it."""
        await self._changed.wait_for(lambda: number in self._by_number)
        return self._by_number[number]

    async def page_request(self, target: str, number: int = 1) -> EngineRequest:
        """Wait until a target was asked for the `number`-th time, and answer that request."""
        await self._changed.wait_for(lambda: len(self._asked_for(target)) >= number)
        return self._asked_for(target)[number - 1]

    def _asked_for(self, target: str) -> list[EngineRequest]:
        return [request for request in self.page_requests if request.target == target]

    async def wait_idle(self) -> None:
        """Wait until no request is open."""
        await self._changed.wait_for(lambda: self._open == 0)

    async def wait_open(self, count: int) -> None:
        """Wait until at least `count` requests are open at once."""
        await self._changed.wait_for(lambda: self._open >= count)

    async def wait_disconnected(self) -> None:
        """Wait until no connection is open."""
        await self._changed.wait_for(lambda: not self._connections)

    # -- serving

    async def serve(self, task_status: trio.TaskStatus[ScriptedEngine] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen and serve until cancelled; started with the engine itself."""
        listener = await self._listen()
        async with listener:
            self.port = 0 if self._socket_path else listener.socket.getsockname()[1]
            async with trio.open_nursery() as nursery:
                task_status.started(self)
                while True:
                    nursery.start_soon(self._serve_connection, await listener.accept())

    async def _listen(self) -> trio.SocketListener:
        if self._socket_path is None:
            (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        else:
            sock = trio.socket.socket(trio.socket.AF_UNIX)
            await sock.bind(str(self._socket_path))
            sock.listen()
            listener = trio.SocketListener(sock)
        if self._send_buffer is not None:  # accepted sockets inherit it
            listener.socket.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_SNDBUF, self._send_buffer)
        return listener

    async def _serve_connection(self, stream: trio.SocketStream) -> None:
        self._accepted += 1
        number = self._accepted
        transport: trio.SocketStream | trio.SSLStream[trio.SocketStream] = stream
        if self._tls is not None:
            transport = trio.SSLStream(stream, self._tls, server_side=True, https_compatible=True)
        connection = EngineConnection(transport, number)
        self._connections[number] = connection
        try:
            await connection.handshake()
            while not connection.closing:
                await self._serve_request(connection)
        except trio.BrokenResourceError:
            self._failed_handshakes += 1
        except (PeerLeft, trio.ClosedResourceError):
            pass  # between two requests either side may close
        except MessageError as exc:
            self._violations.append(str(exc))
        finally:
            connection.close()
            del self._connections[number]
            self._changed.notify()

    async def _serve_request(self, connection: EngineConnection) -> None:
        head = await connection.next_head()
        if (page := self._page_of(head.start[1])) is not None:
            await self._serve_page(connection, head, page)
            return
        if head.start[0] != "POST":
            await connection.read_body(head, None)
            await connection.send_plainly(encode_json(self._answer_get(head.start[1])))
            return
        await self._serve_inference(connection, head)

    def _page_of(self, target: str) -> Scripting | None:
        above = [name for name in self.pages if name.endswith("/") and target.startswith(name)]
        return self.pages.get(target) or self.pages.get(max(above, key=len, default=""))

    async def _serve_page(self, connection: EngineConnection, head: MessageHead, page: Scripting) -> None:
        request = EngineRequest(0, connection.number, head, await connection.read_body(head, None))
        self.page_requests.append(request)
        self._changed.notify()
        await connection.play(page(request) if callable(page) else page, request)

    async def _serve_inference(self, connection: EngineConnection, head: MessageHead) -> None:
        self._heads += 1
        number, scripting = self._heads, self._next_scripting()
        fixed: Script = () if callable(scripting) else scripting
        limit = fixed[0].size if fixed and isinstance(fixed[0], ReadOnly) else None
        body = await connection.read_body(head, limit)
        request = EngineRequest(number, connection.number, head, body)
        self._by_number[number] = request
        self._open += 1
        self._most_open = max(self._most_open, self._open)
        self._changed.notify()
        try:
            script = scripting(request) if callable(scripting) else fixed
            await connection.play(script if limit is None else script[1:], request)
        finally:
            self._open -= 1
            request.over.set()
            self._changed.notify()
        if limit is not None:
            connection.close()  # where the next request would begin is not known

    def _next_scripting(self) -> Scripting:
        scripting = self._scripts[min(self._played, len(self._scripts) - 1)]
        self._played += 1
        return scripting

    def _answer_get(self, target: str) -> Json:
        if target == "/health":
            return Json({"status": "ok"})
        if target.endswith("/models"):
            listed = [{"id": name, "object": "model", "owned_by": "test"} for name in self._models]
            return Json({"object": "list", "data": listed})
        return Json({"error": {"message": "no such path", "type": "not_found_error"}}, 404)


@asynccontextmanager
async def open_engine(
    *scripts: Scripting,
    models: Sequence[str] = ("m1",),
    pages: Mapping[str, Scripting] | None = None,
    socket_path: Path | None = None,
    tls: ssl.SSLContext | None = None,
    send_buffer: int | None = None,
) -> AsyncIterator[ScriptedEngine]:
    """Run a `ScriptedEngine` for the length of the block; arguments are its own."""
    engine = ScriptedEngine(
        *scripts, models=models, pages=pages, socket_path=socket_path, tls=tls, send_buffer=send_buffer
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(engine.serve)
        yield engine
        nursery.cancel_scope.cancel()
