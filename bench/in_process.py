"""What the gateway computes for a token, in times a plain relay, in one process.

Gateways in both setups, a plain relay on Trio and an engine stand here, on loopback sockets. The engine's
part is played: in each round it writes one recorded event to each of 8 streams, everybody runs until nobody
can, and the clients' sockets are emptied. CPU of the process, less that of the same rounds over sockets with
nothing in between, is what the subject spent. Subjects take turns; of each the least counts, which is what is
left when the machine was not busy elsewhere.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Final

import trio
import trio.testing

from trio_gateway.config import parse_settings
from trio_gateway.gateway import Gateway
from trio_gateway.telemetry import Log

from . import peers, setups
from .processes import free_port

STREAMS: Final = 8
ROUNDS: Final = 150  # of a turn: 1,200 tokens
TURNS: Final = 12
WARM: Final = 30  # rounds before anything counts
READ: Final = 65_536
PATIENCE: Final = 10.0  # seconds for anything to begin

HEAD: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
NAMES: Final = {
    False: peers.MODEL,
    True: setups.UPSTREAM,
}  # of the model, at an engine that sends usage or not


def event(model: str, choices: str, usage: str = "") -> bytes:
    """Answer an event as vLLM writes it, with its chunk framing."""
    data = (
        f'data: {{"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk",'
        f'"created":1790000000,"model":"{model}","choices":[{choices}]{usage}}}\n\n'
    ).encode()
    return b"%x\r\n%b\r\n" % (len(data), data)


def role_event(model: str) -> bytes:
    return event(model, '{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}')


def token_event(model: str, usage: bool) -> bytes:
    choice = '{"index":0,"delta":{"content":" token"},"logprobs":null,"finish_reason":null}'
    counts = ',"usage":{"prompt_tokens":9,"total_tokens":109,"completion_tokens":100}' if usage else ""
    return event(model, choice, counts)


# The engine -------------------------------------------------------------------------------------------------


class Engine:
    """Accepts, answers probes, and leaves every stream that is asked for to the player.

    Attributes:
        port: where it listens.
        streams: descriptors of the connections that wait for events.
    """

    def __init__(self) -> None:
        self.port = 0
        self.streams: list[int] = []

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        self.port = listeners[0].socket.getsockname()[1]
        task_status.started()
        await trio.serve_listeners(self._serve, listeners)

    async def _serve(self, stream: trio.SocketStream) -> None:
        received = b""
        try:
            while data := await stream.receive_some(READ):
                received += data
                if b"\r\n\r\n" not in received:
                    continue
                if received.startswith(b"GET"):
                    received = b""
                    await stream.send_all(_answer_to_probe())
                elif received.endswith((b"}", b"\r\n0\r\n\r\n")):
                    await self._begin(stream, usage=b"continuous_usage_stats" in received)
                    await trio.sleep_forever()
        except trio.BrokenResourceError:
            return

    async def _begin(self, stream: trio.SocketStream, *, usage: bool) -> None:
        await stream.send_all(HEAD + role_event(NAMES[usage]) + token_event(NAMES[usage], usage))
        self.streams.append(stream.socket.fileno())


def _answer_to_probe() -> bytes:
    body = json.dumps(
        {"object": "list", "data": [{"id": name, "object": "model"} for name in NAMES.values()]}
    )
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
        len(body),
        body.encode(),
    )


# Who is measured --------------------------------------------------------------------------------------------


@dataclass
class Subject:
    """Something between engine and clients, with its open streams.

    Attributes:
        ends: the engine's descriptor and the client's socket of each stream.
        token: what the engine writes.
        least: CPU of the cheapest turn, in ns a token.
    """

    name: str
    ends: list[tuple[int, socket.socket]]
    token: bytes
    least: float = float("inf")

    async def play(self, rounds: int) -> float:
        """Play so many rounds; answer the CPU of a token, in ns."""
        began = time.process_time_ns()
        for _ in range(rounds):
            for descriptor, _ in self.ends:
                os.write(descriptor, self.token)
            await trio.testing.wait_all_tasks_blocked()
            for _, client in self.ends:
                if not await self._received(client):
                    raise RuntimeError(f"{self.name} ended a stream")
        return (time.process_time_ns() - began) / rounds / len(self.ends)

    @staticmethod
    async def _received(client: socket.socket) -> bytes:
        """Take what came. The kernel of a busy machine may hand it over a little after everybody has run."""
        while True:
            try:
                return client.recv(READ)
            except BlockingIOError:
                with trio.fail_after(PATIENCE):
                    await trio.lowlevel.wait_readable(client)


async def relay(engine_port: int, client: trio.SocketStream) -> None:
    """Carry bytes both ways as Trio's documentation does, and look at none."""
    async with client, await trio.open_tcp_stream("127.0.0.1", engine_port) as engine:

        async def carry(source: trio.SocketStream, sink: trio.SocketStream) -> None:
            while data := await source.receive_some(READ):
                await sink.send_all(data)
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(carry, client, engine)
            nursery.start_soon(carry, engine, client)


@asynccontextmanager
async def relaying(engine_port: int) -> AsyncIterator[int]:
    """Run a relay while the block runs; answers its port."""
    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        await nursery.start(trio.serve_listeners, lambda client: relay(engine_port, client), listeners)
        yield listeners[0].socket.getsockname()[1]
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def gateway(engine_port: int, name: str) -> AsyncIterator[tuple[int, str]]:
    """Run a gateway in one of the setups while the block runs; answers its port, and a key or nothing."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="bench-guard-") as folder:
        text, keys = setups.configuration(name, engine_port, port, free_port(), folder)
        running = Gateway(parse_settings(text), Log(None))
        async with trio.open_nursery() as nursery:
            await nursery.start(running.run)
            with trio.fail_after(PATIENCE):
                while running.not_ready() is not None:  # noqa: ASYNC110
                    await trio.sleep(0.01)  # nobody is told when it becomes ready
            yield port, keys[0] if keys else ""
            nursery.cancel_scope.cancel()


async def open_streams(
    engine: Engine, port: int, stack: AsyncExitStack, key: str = ""
) -> list[tuple[int, socket.socket]]:
    """Ask for streams, one after the other, until each has its first token."""
    body = json.dumps({"model": peers.MODEL, "messages": [{"role": "user", "content": "x"}], "stream": True})
    request = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        f"authorization: Bearer {key or 'none'}\r\ncontent-length: {len(body)}\r\n\r\n{body}"
    ).encode()
    ends = []
    for _ in range(STREAMS):
        known = len(engine.streams)
        client = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        client.setblocking(False)
        client.sendall(request)
        received = b""
        with trio.fail_after(PATIENCE):
            while b'" token"' not in received:
                await trio.lowlevel.wait_readable(client)
                received += client.recv(READ)
                if not received.startswith(b"HTTP/1.1 200"):
                    raise RuntimeError(received.decode())
        ends.append((engine.streams[known], client))
    return ends


def direct(stack: AsyncExitStack) -> list[tuple[int, socket.socket]]:
    """Make streams with nothing in between."""
    ends = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        for _ in range(STREAMS):
            client = stack.enter_context(socket.create_connection(server.getsockname()))
            client.setblocking(False)
            ends.append((stack.enter_context(server.accept()[0]).fileno(), client))
    return ends


async def measure(turns: int = TURNS, rounds: int = ROUNDS) -> dict[str, float]:
    """Answer what a token costs, in times the plain relay, by setup; `relay` itself in us."""
    engine = Engine()
    async with trio.open_nursery() as nursery, AsyncExitStack() as stack:
        await nursery.start(engine.run)
        plain = token_event(NAMES[False], usage=False)
        subjects = [Subject("nothing", direct(stack), plain)]
        port = await stack.enter_async_context(relaying(engine.port))
        subjects.append(Subject("relay", await open_streams(engine, port, stack), plain))
        for name in setups.SETUPS:
            usage = name == "full"
            port, key = await stack.enter_async_context(gateway(engine.port, name))
            ends = await open_streams(engine, port, stack, key)
            subjects.append(Subject(name, ends, token_event(NAMES[usage], usage)))
        for subject in subjects:
            await subject.play(WARM)
        for turn in range(turns):
            for subject in subjects if turn % 2 else reversed(subjects):
                subject.least = min(subject.least, await subject.play(rounds))
        nursery.cancel_scope.cancel()
    costs = {subject.name: subject.least - subjects[0].least for subject in subjects}
    found = {name: costs[name] / costs["relay"] for name in setups.SETUPS}
    return {**found, "relay": costs["relay"] / 1000}
