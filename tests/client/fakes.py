"""A gateway without a socket, so that the client's clock can be a fake one."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import trio

from trio_gateway.client import SocketLost, TokensError
from trio_gateway.client._socket import Serve, Socket
from trio_gateway.client._tokens import Tokens, running
from trio_gateway.testing import until

PATIENCE: Final = 10_000.0  # seconds of the fake clock
GONE: Final = SocketLost("socket_lost", "gone", 1006)


class FakeSocket:
    """See Socket. The test plays the gateway at its other end.

    Attributes:
        sent: messages of the client, as JSON without nulls.
        closed: with which code the client closed it.
        answers_pings: whether it does.
        takes: unset, every send waits.
    """

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.closed: int | None = None
        self.answers_pings = True
        self.takes = trio.Event()
        self.takes.set()
        self.heard = self._opened = trio.current_time()
        self.lost: TokensError | None = None
        self.torn = False
        self._said, self._hears = trio.open_memory_channel[str](1000)

    # -- the gateway's end

    def say(self, kind: str, stream_id: str | None = None, **members: object) -> None:
        """Send a message to the client."""
        message = {"type": kind, **({} if stream_id is None else {"stream_id": stream_id}), **members}
        self.say_text(json.dumps(message))

    def say_text(self, text: str) -> None:
        """Send any text."""
        self.heard = trio.current_time()
        self._said.send_nowait(text)

    def accept(self, stream_id: str, request_id: str | None = None) -> None:
        """Accept a stream, under a name made of its own if none is given."""
        self.say("accepted", stream_id, request_id=request_id or f"r-{stream_id}", model="m1")

    def deltas(self, stream_id: str, first: int, last: int) -> None:
        """Send deltas."""
        for seq in range(first, last + 1):
            chunk = {"choices": [{"delta": {"content": f"t{seq} "}}]}
            self.say("delta", stream_id, seq=seq, chunk=chunk, tokens=seq, bytes=seq * 10)

    def done(self, stream_id: str) -> None:
        """End a stream well."""
        delivery = {"generated": 3, "delivered": 3, "acknowledged": 1}
        self.say(
            "done",
            stream_id,
            request_id="r",
            finish_reasons=["stop"],
            usage={"total_tokens": 5},
            delivery=delivery,
        )

    def lose(self, error: TokensError = GONE) -> None:
        """Lose the connection."""
        self.lost = error
        self._said.close()

    async def wait_sent(self, kind: str, number: int = 1) -> dict[str, Any]:
        """Wait for the ``number``-th message of a kind."""
        await until(lambda: len(self.of(kind)) >= number)
        return self.of(kind)[number - 1]

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The messages of one kind."""
        return [message for message in self.sent if message["type"] == kind]

    # -- the client's end

    @property
    def sound(self) -> bool:
        """See Socket."""
        return self.lost is None and not self.torn

    async def send(self, message: bytes) -> None:
        """See Socket."""
        self.torn = True
        await trio.lowlevel.checkpoint()
        await self.takes.wait()
        self.torn = False
        self._expect_open()
        assert self.closed is None
        self.sent.append({k: v for k, v in json.loads(message).items() if v is not None})

    async def receive(self) -> str:
        """See Socket."""
        try:
            return await self._hears.receive()
        except trio.EndOfChannel:
            self._expect_open()
            raise

    async def ping(self) -> None:
        """See Socket."""
        await trio.lowlevel.checkpoint()
        assert trio.current_time() - self._opened < PATIENCE, "waited for what does not come"
        if not self.answers_pings:
            await trio.sleep_forever()
        self.heard = trio.current_time()

    async def close(self, code: int) -> None:
        """See Socket."""
        await trio.lowlevel.checkpoint()
        if self.sound:
            self.closed = code

    def _expect_open(self) -> None:
        if self.lost is not None:
            assert isinstance(self.lost, SocketLost)
            raise self.lost


class FakeGateway:
    """See Dial.

    Attributes:
        sockets: that were opened; the last is ``socket``.
        refusals: what the next attempts get instead of a socket.
        attempts: when they were made, Trio clock seconds.
    """

    def __init__(self, *refusals: TokensError) -> None:
        self.sockets: list[FakeSocket] = []
        self.refusals = list(refusals)
        self.attempts: list[float] = []

    @property
    def socket(self) -> FakeSocket:
        """The newest socket."""
        return self.sockets[-1]

    async def __call__(self, serve: Serve) -> TokensError:
        """See Dial."""
        await trio.lowlevel.checkpoint()
        self.attempts.append(trio.current_time())
        if self.refusals:
            return self.refusals.pop(0)
        fake = FakeSocket()
        socket: Socket = fake
        self.sockets.append(fake)
        await serve(socket)
        closed = SocketLost("socket_closed", "closed", fake.closed)
        return fake.lost or closed

    async def wait_socket(self, number: int) -> FakeSocket:
        """Wait for the ``number``-th socket."""
        await until(lambda: len(self.sockets) >= number)
        return self.sockets[number - 1]


class Dice:
    """Jitter that is none."""

    def uniform(self, low: float, high: float) -> float:
        """Answer the larger."""
        return high


@asynccontextmanager
async def client_of(gateway: FakeGateway, **options: Any) -> AsyncIterator[Tokens]:
    """Run a client of a fake gateway for the length of the block."""
    tokens = Tokens(gateway, **{"max_streams": 32, "resume_within": 30.0, "rng": Dice(), **options})
    async with running(tokens):
        yield tokens
