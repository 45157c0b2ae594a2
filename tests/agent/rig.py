"""An agent in this process, on real sockets, and the gateways that it talks to."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import trio

from trio_gateway.agent import Agent, AgentEngine, AgentSettings, HowEnded
from trio_gateway.agent._connection import Connection, Gone
from trio_gateway.testing import Answer, RawClient

SECRET: Final = "s" * 32
HELLO: Final = [{"role": "user", "content": "What does the engine say to that?"}]


class Running:
    """An agent that runs.

    Attributes:
        said: level, name and fields of the events that it logged.
        ended: how its run ended, once it has.
    """

    def __init__(self, agent: Agent, said: list[tuple[str, str, dict[str, Any]]]) -> None:
        self.agent = agent
        self.said = said
        self.ended: HowEnded | None = None
        self.over = trio.Event()

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.agent.address.removeprefix("http://").rpartition(":")
        return host, int(port)

    def events(self, name: str) -> list[dict[str, Any]]:
        return [fields for _, event, fields in self.said if event == name]

    async def connect(self, receive_buffer: int | None = None) -> RawClient:
        return await RawClient.connect(self.address, receive_buffer=receive_buffer)

    async def ask(self, client: RawClient, *, secret: str = SECRET, **changes: Any) -> None:
        """Send an attempt."""
        await self.send(client, "POST", "/internal/v1/generate", envelope(**changes), secret=secret)

    async def send(
        self, client: RawClient, method: str, path: str, body: object = None, *, secret: str = SECRET
    ) -> None:
        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = (("authorization", f"Bearer {secret}"), ("content-type", "application/json"))
        await client.request(method, path, headers=headers, body=data)

    async def answer(self, method: str, path: str, body: object = None, *, secret: str = SECRET) -> Answer:
        """Make one call on a connection of its own."""
        with await self.connect() as client:
            await self.send(client, method, path, body, secret=secret)
            return await client.read_to_end()

    async def generate(self, **changes: Any) -> Answer:
        """Have one attempt served, and read all of it."""
        return await self.answer("POST", "/internal/v1/generate", envelope(**changes))


@asynccontextmanager
async def running(engine: AgentEngine, **settings: Any) -> AsyncIterator[Running]:
    """An agent for the length of the block; afterwards it holds no slot and has met no bug."""
    said: list[tuple[str, str, dict[str, Any]]] = []

    def say(level: str, event: str, **fields: Any) -> None:
        said.append((level, event, fields))

    settings.setdefault("secret", SECRET)
    agent = Agent(AgentSettings(**{"worker_id": "gpu-0", **settings}), engine, say)
    run = Running(agent, said)
    async with trio.open_nursery() as nursery:

        async def live(*, task_status: trio.TaskStatus[None]) -> None:  # noqa: ASYNC114, ASYNC128 - the agent tells
            run.ended = await agent.run(task_status=task_status)
            run.over.set()

        await nursery.start(live)
        yield run
        if not run.over.is_set():
            await agent.slots.wait_none()
        assert len(agent.slots) == 0
        assert run.events("bug") == []
        nursery.cancel_scope.cancel()


def envelope(
    request_id: str = "a" * 32,
    attempt: int = 1,
    *,
    deadline_ms: int = 60_000,
    stream: bool = True,
    **body: Any,
) -> dict[str, Any]:
    operation = body.pop("operation", "chat.completions")
    model = body.pop("model", "m")
    return {
        "protocol": 1,
        "request_id": request_id,
        "attempt": attempt,
        "operation": operation,
        "model": model,
        "deadline_ms": deadline_ms,
        "priority": "standard",
        "stream": stream,
        "body": {"model": model, "messages": HELLO, "stream": stream, **body},
    }


def records(answer: Answer | bytes) -> list[dict[str, Any]]:
    """The records of an answer, as far as they came."""
    body = answer if isinstance(answer, bytes) else answer.body
    return [json.loads(line) for line in body.splitlines() if line]


def said(answer: Answer | bytes) -> str:
    return "".join(record["text"] for record in records(answer) if record["t"] == "delta")


Told = Callable[[str, str, dict[str, Any]], int]


class Gateway:
    """Answers registrations and heartbeats, and remembers them.

    Attributes:
        calls: method, path and body of each call, in order.
        status: what calls of a method are answered with; 200 where nothing is said.
        reason: what it says with any status but 200; nothing if empty.
        interval: between heartbeats, as registrations are told.
    """

    def __init__(self, secret: str = SECRET, *, token: str = "join-me", interval: float = 2.0) -> None:
        self.secret = secret
        self.token = token
        self.interval = interval
        self.calls: list[tuple[str, str, dict[str, Any]]] = []
        self.status: dict[str, int] = {}
        self.reason = ""
        self.address = ""

    def named(self, method: str) -> list[dict[str, Any]]:
        return [body for called, _, body in self.calls if called == method]

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        self.address = f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, self._serve, [listener])
            task_status.started()

    async def _serve(self, stream: trio.SocketStream) -> None:
        connection = Connection(stream)
        try:
            while (head := await connection.read_head()) is not None:
                body = await connection.read_body(head, 1_000_000)
                shown = (head.header(b"authorization") or b"").decode()
                wanted = self.token if head.method == "POST" else self.secret
                self.calls.append((head.method, head.target, json.loads(body) if body else {}))
                status = self.status.get(head.method, 200) if shown == f"Bearer {wanted}" else 401
                told = {"secret": self.secret, "heartbeat_interval": self.interval, "ttl": self.interval * 3}
                refused = {"error": {"message": self.reason}} if self.reason else {}
                await connection.respond(status, json.dumps(told if status == 200 else refused).encode())
        except Gone:
            pass
        finally:
            connection.close()


@asynccontextmanager
async def gateways(*those: Gateway) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        for gateway in those:
            await nursery.start(gateway.serve)
        yield
        nursery.cancel_scope.cancel()
