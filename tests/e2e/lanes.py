"""Clients of ``/v1/responses`` over WebSocket, by a library that is not the gateway's own."""

from __future__ import annotations

import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import trio
from trio_websocket import ConnectionClosed, WebSocketConnection, open_websocket

from tests.e2e.serving import LIMIT, Serving

TERMINAL: Final = ("response.completed", "response.incomplete", "error")
Message = dict[str, Any]


class Lanes:
    """One socket. Messages are those that came so far, oldest first."""

    def __init__(self, socket: WebSocketConnection) -> None:
        self.socket: Final = socket
        self.messages: list[Message] = []

    async def send(self, text: str) -> None:
        """Send any text."""
        with trio.fail_after(LIMIT):
            await self.socket.send_message(text)

    async def create(self, lane: str | None = None, **fields: Any) -> None:
        """Ask for a response."""
        named = {} if lane is None else {"stream_id": lane}
        await self.send(
            json.dumps({"type": "response.create", "model": "m1", "input": "hi", **named, **fields})
        )

    async def receive(self) -> Message:
        """Wait for the next message."""
        with trio.fail_after(LIMIT):
            message: Message = json.loads(await self.socket.get_message())
        self.messages.append(message)
        return message

    async def until(self, holds: Callable[[Message], bool]) -> Message:
        """Read until a message is such; answers it."""
        while not holds(message := await self.receive()):
            pass
        return message

    async def until_terminal(self, count: int = 1) -> list[Message]:
        """Read until so many responses have ended; answers their last messages."""
        return [await self.until(lambda message: message["type"] in TERMINAL) for _ in range(count)]

    async def close_code(self) -> int:
        """Read until the gateway closes; answers the code, 1006 for none."""
        over = False
        while not over:
            over = True
            with contextlib.suppress(ConnectionClosed):
                await self.receive()
                over = False
        reason = self.socket.closed
        return 1006 if reason is None else int(reason.code)

    def of(self, lane: str) -> list[Message]:
        """Messages of one lane."""
        return [message for message in self.messages if message.get("stream_id") == lane]


def text_of(messages: Sequence[Message]) -> str:
    """The text that messages bring, piece by piece."""
    return "".join(message.get("delta", "") for message in messages)


def types_of(messages: Sequence[Message]) -> list[str]:
    """Types of messages."""
    return [message["type"] for message in messages]


@asynccontextmanager
async def lanes(
    gateway: Serving,
    *,
    key: str = "key-a",
    trust: ssl.SSLContext | None = None,
    headers: Sequence[tuple[bytes, bytes]] = (),
    unread: int = 10_000,
) -> AsyncIterator[Lanes]:
    """Connect for the length of the block.

    Args:
        unread: messages that are taken from the socket though nobody waits for them.
    """
    address = gateway.address
    assert isinstance(address, tuple)
    sent = [(b"authorization", f"Bearer {key}".encode()), *headers]
    async with open_websocket(
        *address,
        "/v1/responses",
        use_ssl=trust or False,
        extra_headers=sent,
        disconnect_timeout=2,
        message_queue_size=unread,
    ) as socket:
        try:
            yield Lanes(socket)
        finally:
            with trio.move_on_after(LIMIT, shield=True):
                await socket.aclose()
            await trio.aclose_forcefully(
                socket._stream
            )  # which it leaves open if it was closed by the other side
