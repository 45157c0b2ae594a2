"""The part of Kubernetes' API that tells of pods, on a real socket: lists, watches, and their troubles."""

from __future__ import annotations

import contextlib
import itertools
import json
import ssl
from collections import deque
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import trio

from ..units import KiB
from ..wire import (
    LAST_CHUNK,
    HeadBuffer,
    RequestHead,
    parse_request_head,
    write_chunk,
    write_response_head,
)
from ._until import until

Stream = trio.SocketStream | trio.SSLStream[trio.SocketStream]

_JSON: Final = ("content-type", "application/json")


def make_pod(
    name: str,
    address: str = "127.0.0.1",
    *,
    uid: str | None = None,
    ready: bool = True,
    phase: str = "Running",
    terminating: bool = False,
    labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Make a pod as the API shows it, without a version; ``app=vllm`` is its label if none is given."""
    meta: dict[str, Any] = {
        "name": name,
        "uid": uid or f"uid-{name}",
        "labels": dict(labels or {"app": "vllm"}),
        "annotations": dict(annotations or {}),
    }
    if terminating:
        meta["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    condition = {"type": "Ready", "status": "True" if ready else "False"}
    return {
        "metadata": meta,
        "status": {"phase": phase, "podIP": address, "conditions": [{"type": "Initialized"}, condition]},
    }


class KubernetesServer:
    """Keeps pods with their versions, and tells those who watch what changes.

    Args:
        tls: speak TLS with this context.

    Attributes:
        token: what callers must show; None: anything.
        asked: path and query of each request, in order.
        answers: status, headers and body for the next requests, instead of what is asked.
        page: most pods on a page of a list, whatever is asked; None: as asked.
        watching: watches that are open.
    """

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self.port = 0
        self.token: str | None = None
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.answers: deque[tuple[int, list[tuple[str, str]], bytes]] = deque()
        self.page: int | None = None
        self.watching = 0
        self._versions = itertools.count(100)
        self._version = next(self._versions)
        self._oldest = 0
        self._pods: dict[str, dict[str, Any]] = {}
        # version, the pod before, and after; None: there is none.
        self._log: list[tuple[int, dict[str, Any] | None, dict[str, Any] | None]] = []
        self._changed = trio.Event()
        self._raw: list[bytes] = []  # lines for all who watch now
        self._connections: set[trio.CancelScope] = set()

    @property
    def url(self) -> str:
        """Base URL."""
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}"

    # -- what happens to pods

    def put(self, pod: dict[str, Any]) -> None:
        """Create a pod, or change the one of its name."""
        name = pod["metadata"]["name"]
        before = self._pods.get(name)
        self._version = next(self._versions)
        after = {**pod, "metadata": {**pod["metadata"], "resourceVersion": str(self._version)}}
        self._pods[name] = after
        self._happened(before, after)

    def delete(self, name: str) -> None:
        """Delete a pod at once."""
        self._version = next(self._versions)
        self._happened(self._pods.pop(name), None)

    def _happened(self, before: dict[str, Any] | None, after: dict[str, Any] | None) -> None:
        self._log.append((self._version, before, after))
        self._wake()

    def compact(self) -> None:
        """Forget what happened: versions before this moment are too old."""
        self._version = next(self._versions)
        self._oldest = self._version
        self._log.clear()

    # -- what happens to watches

    def say(self, line: bytes) -> None:
        """Write a line to all who watch, whatever it is."""
        self._raw.append(line + b"\n")
        self._wake()

    def bookmark(self) -> None:
        """Tell all who watch how far they are."""
        meta = {"metadata": {"resourceVersion": str(self._version)}}
        self.say(json.dumps({"type": "BOOKMARK", "object": meta}).encode())

    def cut(self) -> None:
        """Close every connection in the middle of whatever it is."""
        for connection in self._connections:
            connection.cancel(reason="cut")

    async def wait_watched(self, count: int = 1) -> None:
        """Wait until so many watches are open."""
        await until(lambda: self.watching == count)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    # -- the server

    async def serve(self, transport: trio.SocketStream) -> None:
        """Serve one connection."""
        stream: Stream = transport
        if self._tls is not None:
            stream = trio.SSLStream(transport, self._tls, server_side=True, https_compatible=True)
        connection = trio.CancelScope()
        self._connections.add(connection)
        try:
            with connection:
                heads = HeadBuffer(64 * KiB)
                while (head := heads.next_head()) is None:
                    data = await stream.receive_some(4096)
                    if not data:
                        break
                    heads.feed(bytes(data))
                if head is not None:
                    await self._answer(stream, parse_request_head(head, 100))
        except* trio.BrokenResourceError:
            pass  # who asked has left
        finally:
            self._connections.discard(connection)
            await trio.aclose_forcefully(transport)

    async def _answer(self, stream: Stream, head: RequestHead) -> None:
        parts = urlsplit(head.target)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        self.asked.append((parts.path, query))
        shown = (head.header(b"authorization") or b"").decode()
        if self.answers:
            status, headers, body = self.answers.popleft()
            await _respond(stream, status, body, headers)
        elif self.token is not None and shown != f"Bearer {self.token}":
            await _respond(stream, 401, _status(401))
        elif query.get("watch"):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_until_gone, stream, nursery.cancel_scope)
                await self._watch(stream, query)
                nursery.cancel_scope.cancel(reason="the watch is over")
        else:
            await self._list(stream, query)

    async def _list(self, stream: Stream, query: Mapping[str, str]) -> None:
        start, _, version = query.get("continue", "").partition("@")
        if version and int(version) < self._oldest:
            await _respond(stream, 410, _status(410))
            return
        selector = query.get("labelSelector", "")
        found = [pod for pod in self._pods.values() if _matches(pod, selector)]
        first, most = int(start or 0), self.page or int(query.get("limit") or len(found))
        meta = {"resourceVersion": version or str(self._version)}
        if first + most < len(found):
            meta["continue"] = f"{first + most}@{meta['resourceVersion']}"
        page: dict[str, Any] = {"kind": "PodList", "metadata": meta, "items": found[first : first + most]}
        await _respond(stream, 200, json.dumps(page).encode())

    async def _watch(self, stream: Stream, query: Mapping[str, str]) -> None:
        seen, selector = int(query["resourceVersion"]), query.get("labelSelector", "")
        raw = len(self._raw)
        head = write_response_head(200, [_JSON, ("transfer-encoding", "chunked")])
        await stream.send_all(head)
        if seen < self._oldest:
            error = {"type": "ERROR", "object": json.loads(_status(410))}
            await stream.send_all(write_chunk(json.dumps(error).encode() + b"\n") + LAST_CHUNK)
            return
        self.watching += 1
        try:
            with trio.move_on_after(float(query["timeoutSeconds"])):
                while True:
                    lines = b"".join(self._raw[raw:])
                    raw = len(self._raw)
                    for version, before, after in self._log:
                        if version > seen:
                            lines += _event(before, after, selector, version)
                            seen = version
                    changed = self._changed
                    # In two pieces, as lines come that are longer than a packet.
                    for piece in filter(None, (lines[: len(lines) // 2], lines[len(lines) // 2 :])):
                        await stream.send_all(write_chunk(piece))
                    await changed.wait()
            await stream.send_all(LAST_CHUNK)
        finally:
            self.watching -= 1


@contextlib.asynccontextmanager
async def open_kubernetes(tls: ssl.SSLContext | None = None) -> AsyncIterator[KubernetesServer]:
    """Serve on a free port of 127.0.0.1 for the length of the block."""
    server = KubernetesServer(tls)
    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        server.port = listeners[0].socket.getsockname()[1]
        await nursery.start(trio.serve_listeners, server.serve, listeners)
        try:
            yield server
        finally:
            nursery.cancel_scope.cancel(reason="the test is over")


async def _until_gone(stream: Stream, scope: trio.CancelScope) -> None:
    """Cancel when the other side has left."""
    with contextlib.suppress(trio.BrokenResourceError):
        await stream.receive_some(1)
    scope.cancel(reason="who watched has left")


async def _respond(
    stream: Stream, status: int, body: bytes, headers: list[tuple[str, str]] | None = None
) -> None:
    told = [_JSON, ("content-length", str(len(body))), ("connection", "close"), *(headers or [])]
    await stream.send_all(write_response_head(status, told) + body)


def _event(before: dict[str, Any] | None, after: dict[str, Any] | None, selector: str, version: int) -> bytes:
    """Answer the line that who follows a selector gets: a pod that loses the label is deleted for it."""
    was = before is not None and _matches(before, selector)
    if after is not None and _matches(after, selector):
        kind, shown = ("MODIFIED" if was else "ADDED"), after
    elif was and before is not None:
        kind = "DELETED"
        shown = {**before, "metadata": {**before["metadata"], "resourceVersion": str(version)}}
    else:
        return b""
    return json.dumps({"type": kind, "object": shown}).encode() + b"\n"


def _matches(pod: Mapping[str, Any], selector: str) -> bool:
    """Whether a pod has the labels; only ``key=value`` is known here."""
    pairs = (part.partition("=") for part in filter(None, selector.split(",")))
    return all(pod["metadata"]["labels"].get(key) == value for key, _, value in pairs)


def _status(code: int) -> bytes:
    return json.dumps({"kind": "Status", "status": "Failure", "code": code}).encode()
