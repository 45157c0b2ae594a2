"""Clients of both doors that end in every way, and count what they have read.

Each story is one client with one request: it asks, ends in its own way at a random
moment, and tells what it has. A token of the simulated engine is a word, so a client counts
tokens by its text alone. Moments, lengths and ways come from one seed.
"""

from __future__ import annotations

import contextlib
import json
import random
import select
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import trio
from trio_websocket import ConnectionClosed, HandshakeError, WebSocketConnection, wrap_client_stream

from trio_gateway.testing import Answer, Headers, MessageError, RawClient, chat_request

from .fleet import MODEL

TOKENS: Final = (2, 40)  # of an answer
LONG: Final = 800  # tokens of an answer that nobody reads: more than kernels and buffers hold
SMALL_BUFFER: Final = 4096  # bytes of receive buffer of who does not read
WITHIN: Final = 0.15  # seconds after which somebody leaves, at most
CREDIT: Final = 4
RESUME_WINDOW: Final = 10.0
PATIENCE: Final = 30.0  # seconds for an answer
SAYING: Final = 2.0  # seconds for a message to leave
_RESET: Final = struct.pack("ii", 1, 0)

# How a client got to know that it is over.
WHOLE: Final = "whole"
TOLD: Final = "told"  # by an error event, or by the last message
CUT: Final = "cut"  # and it has read all that its kernel had
FIN: Final = "fin"  # it left itself
RESET: Final = "reset"
REFUSED: Final = "refused"
ODD: Final = "odd"


@dataclass
class Told:
    """What one client has.

    Attributes:
        way: the story.
        name: that the client gave its request over HTTP; ``request_id`` the gateway's.
        end: how it got to know that it is over, see above.
        tokens: that it has read.
        acknowledged: tokens in deltas that it has acknowledged; None over HTTP.
        hurried: it was resumed, or had a deadline: nobody waits for its last acknowledgements then.
        delivery: of the last message, or the error event's ``tokens_delivered``.
        detail: why it is odd.
    """

    way: str
    name: str = ""
    request_id: str = ""
    end: str = ODD
    tokens: int = 0
    acknowledged: int | None = None
    delivery: dict[str, Any] | int | None = None
    hurried: bool = False
    detail: str = ""


def words(text: str) -> int:
    """Tokens of the simulated engine in a text."""
    return len(text.split(" ")) if text else 0


class Clients:
    """Plays one story after the other.

    Args:
        port: of the gateway.
        seed: of everything that is random.
    """

    def __init__(self, port: int, seed: int) -> None:
        self._port = port
        self._dice = random.Random(seed)
        self._number = 0
        self._weights: dict[Callable[[Told], Awaitable[None]], int] = {
            self._reads_to_the_end: 20,
            self._asks_for_a_whole_answer: 6,
            self._leaves_by_fin: 12,
            self._leaves_by_reset: 12,
            self._deletes: 10,
            self._sets_a_deadline: 6,
            self._stops_reading: 2,
            self._talks_to_the_end: 12,
            self._cancels: 8,
            self._cuts_by_fin: 5,
            self._cuts_by_reset: 5,
            self._sets_a_deadline_there: 4,
            self._gives_no_credit: 2,
            self._stops_reading_there: 1,
            self._comes_back: 5,
        }

    async def play(self) -> Told:
        """Play a story; answers what its client has, whatever happens."""
        (story,) = self._dice.choices(list(self._weights), list(self._weights.values()))
        self._number += 1
        told = Told(story.__name__.strip("_").replace("_", " "), name=f"client-{self._number}")
        try:
            with trio.fail_after(PATIENCE):
                await story(told)
        except (OSError, MessageError, HandshakeError, ConnectionClosed, trio.TooSlowError) as error:
            told.detail = repr(error)
        except BaseExceptionGroup as errors:
            told.detail = repr(errors.exceptions)
        return told

    def _body(self, tokens: int = 0) -> dict[str, Any]:
        return {"text": f"request {self._dice.random()}", "tokens": tokens or self._dice.randint(*TOKENS)}

    def _moment(self) -> float:
        return self._dice.uniform(0, WITHIN)

    # -- over HTTP

    @asynccontextmanager
    async def _asks(
        self, told: Told, tokens: int = 0, *, stream: bool = True, small: bool = False, timeout_ms: int = 0
    ) -> AsyncIterator[RawClient]:
        headers: Headers = (("x-client-request-id", told.name),)
        if timeout_ms:
            headers = (*headers, ("x-gateway-timeout-ms", str(timeout_ms)))
        body = self._body(tokens)
        asked = chat_request(
            body["text"], model=MODEL, stream=stream, headers=headers, simulate={"tokens": body["tokens"]}
        )
        with await RawClient.connect(
            ("127.0.0.1", self._port), receive_buffer=SMALL_BUFFER if small else None
        ) as client:
            await client.send(asked)
            yield client

    async def _reads_to_the_end(self, told: Told) -> None:
        async with self._asks(told) as client:
            await _read(client, told)

    async def _asks_for_a_whole_answer(self, told: Told) -> None:
        async with self._asks(told, stream=False) as client:
            await _read(client, told)

    async def _leaves_by_fin(self, told: Told) -> None:
        await self._leaves(told, FIN)

    async def _leaves_by_reset(self, told: Told) -> None:
        await self._leaves(told, RESET)

    async def _leaves(self, told: Told, how: str) -> None:
        async with self._asks(told) as client:
            with trio.move_on_after(self._moment()):
                await _read(client, told)
                return
            if how == FIN:
                client.half_close()  # a FIN in any case: closing with unread bytes alone would be a reset
                client.leave_fin()
            else:
                client.leave_reset()
            if client.answers:
                _count(client.answers[-1], told)
            told.end = how

    async def _deletes(self, told: Told) -> None:
        async with self._asks(told) as client:
            answer = await client.read_head()
            request_id = answer.header("x-request-id") or ""
            await _drained(client, self._moment())
            with await RawClient.connect(("127.0.0.1", self._port)) as other:
                await other.request("DELETE", f"/v1/requests/{request_id}")
                await other.read_to_end()
            await _read(client, told)

    async def _sets_a_deadline(self, told: Told) -> None:
        async with self._asks(told, timeout_ms=self._dice.randint(1, 60)) as client:
            await _read(client, told)

    async def _stops_reading(self, told: Told) -> None:
        async with self._asks(told, LONG, small=True) as client:
            if self._dice.random() < 0.5:
                await _drained(client, self._moment())
            await client.stall()
            await _read(client, told)

    # -- over WebSockets

    @asynccontextmanager
    async def _talks(
        self, told: Told, tokens: int = 0, *, small: bool = False, **members: Any
    ) -> AsyncIterator[_Talk]:
        body = self._body(tokens)
        chat = {
            "model": MODEL,
            "messages": [{"role": "user", "content": body["text"]}],
            "simulate": {"tokens": body["tokens"]},
        }
        members = {"type": "generate", "operation": "chat.completions", "body": chat, **members}
        async with _connect(self._port, small=small) as socket:
            talk = _Talk(socket, told)
            await talk.say(**members)
            yield talk

    async def _talks_to_the_end(self, told: Told) -> None:
        async with self._talks(told, credit=CREDIT) as talk:
            await talk.hear_all()

    async def _cancels(self, told: Told) -> None:
        async with self._talks(told) as talk:
            with trio.move_on_after(self._moment()):
                await talk.hear_all()
                return
            await talk.say(type="cancel")
            await talk.hear_all(most_acks=0)

    async def _cuts_by_fin(self, told: Told) -> None:
        await self._cuts(told, FIN)

    async def _cuts_by_reset(self, told: Told) -> None:
        await self._cuts(told, RESET)

    async def _cuts(self, told: Told, how: str) -> None:
        async with self._talks(told, credit=CREDIT) as talk:
            with trio.move_on_after(self._moment()):
                await talk.hear_all()
                return
            talk.cut(reset=how == RESET)
            told.end = how

    async def _sets_a_deadline_there(self, told: Told) -> None:
        told.hurried = True
        async with self._talks(told, timeout_ms=self._dice.randint(1, 60)) as talk:
            await talk.hear_all()

    async def _gives_no_credit(self, told: Told) -> None:
        async with self._talks(told, credit=CREDIT) as talk:
            await talk.hear_all(most_acks=self._dice.randint(0, 3))

    async def _stops_reading_there(self, told: Told) -> None:
        async with self._talks(told, LONG, small=True) as talk:
            await talk.hear_cut()

    async def _comes_back(self, told: Told) -> None:
        resumed: dict[str, Any] | None = None
        async with self._talks(told, credit=CREDIT, resumable=True) as talk:
            with trio.move_on_after(self._moment()):
                await talk.hear_all()
                return
            if not told.request_id:
                await talk.hear()
            talk.cut(reset=self._dice.random() < 0.5)
            resumed = {"request_id": told.request_id, "after_seq": talk.seq, "credit": CREDIT}
        told.hurried = True
        async with _connect(self._port) as socket:
            again = _Talk(socket, told, talk)
            await again.say(type="resume", **resumed)
            await again.hear_all()


class _Talk:
    """One stream on a socket of its own."""

    def __init__(self, socket: _Socket, told: Told, before: _Talk | None = None) -> None:
        self._socket = socket
        self._told = told
        self._acks = 0
        self._over = False
        self.text: str = "" if before is None else before.text
        self.seq: int = 0 if before is None else before.seq
        if before is None:
            told.acknowledged = 0

    async def say(self, **members: Any) -> None:
        await self._socket.ws.send_message(json.dumps({"stream_id": "s", **members}))

    def cut(self, *, reset: bool) -> None:
        self._socket.cut(reset=reset)

    async def hear_all(self, most_acks: int = 1 << 30) -> None:
        """Take messages to the last one, and acknowledge deltas as they come, every second one late."""
        while not self._over:
            more = await self.hear()
            if more and self._acks < most_acks and (self.seq % 2 == 0 or self.seq % CREDIT == 1):
                await self.acknowledge()
        if self._told.end == WHOLE and most_acks:
            await self.acknowledge()
            with trio.move_on_after(SAYING, shield=True):
                await trio.sleep(0.1)  # the gateway is waiting for this one; a cut could overtake it

    async def acknowledge(self) -> None:
        with trio.move_on_after(
            SAYING, shield=True
        ):  # half a frame, or an ack that was not sent, proves nothing
            self._acks += 1
            self._told.acknowledged = self._told.tokens
            await self.say(type="ack", seq=self.seq)

    async def hear(self) -> bool:
        """Take one message; answers whether it was a delta."""
        message: dict[str, Any] = json.loads(await self._socket.ws.get_message())
        told = self._told
        told.request_id = message.get("request_id", told.request_id)
        match message["type"]:
            case "delta":
                if message["seq"] != self.seq + 1:
                    raise MessageError(f"delta {message['seq']} behind {self.seq}")
                self.seq += 1
                for choice in message["chunk"]["choices"]:
                    self.text += choice["delta"].get("content") or ""
                told.tokens = words(self.text)
                return True
            case "done":
                self._end(WHOLE, message)
            case "cancelled":
                self._end(TOLD, message)
            case "error":
                placed = message.get("delivery") is not None
                self._end(TOLD if placed else REFUSED, message)
                told.detail = message["error"]["code"]
        return False

    def _end(self, how: str, message: dict[str, Any]) -> None:
        self._over = True
        self._told.end, self._told.delivery = how, message.get("delivery")

    async def hear_cut(self) -> None:
        """Read nothing until the gateway has cut the socket, then what is there."""
        await self._socket.wait_cut()
        with contextlib.suppress(ConnectionClosed):
            while True:
                await self.hear()
        self._told.end = CUT


class _Socket:
    def __init__(self, ws: WebSocketConnection, stream: trio.SocketStream) -> None:
        self.ws = ws
        self._stream = stream

    def cut(self, *, reset: bool) -> None:
        with contextlib.suppress(OSError):
            if reset:
                self._stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            else:
                self._stream.socket.shutdown(socket.SHUT_WR)
        self._stream.socket.close()

    async def wait_cut(self) -> None:
        """Wait until the other side has closed or reset it."""
        with select.epoll() as poller:
            poller.register(self._stream.socket.fileno(), 0)  # what remains is its end
            await trio.lowlevel.wait_readable(poller.fileno())


@asynccontextmanager
async def _connect(port: int, *, small: bool = False) -> AsyncIterator[_Socket]:
    sock = trio.socket.socket()
    if small:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
    await sock.connect(("127.0.0.1", port))
    async with trio.open_nursery() as nursery:
        stream = trio.SocketStream(sock)
        ws = await wrap_client_stream(nursery, stream, "gateway", "/v1/tokens")
        try:
            yield _Socket(ws, stream)
        finally:
            nursery.cancel_scope.cancel()
            sock.close()


async def _drained(client: RawClient, seconds: float) -> None:
    """Read for a while."""
    with trio.move_on_after(seconds):
        await client.read_until(b"never")


async def _read(client: RawClient, told: Told) -> None:
    """Read an answer to its end, and note how it ended."""
    answer = await client.read_to_end()
    _count(answer, told)
    told.request_id = answer.header("x-request-id") or ""
    if answer.ended != "complete":
        told.end = CUT
    elif answer.status != 200:
        told.end = REFUSED
        told.detail = str(answer.error().get("code"))
    elif answer.events is None or not answer.chat().errors:
        told.end = WHOLE
    else:
        error: Any = answer.chat().errors[0]
        told.end, told.detail = TOLD, str(error.get("code"))
        told.delivery = error["gateway"]["tokens_delivered"]


def _count(answer: Answer, told: Told) -> None:
    if answer.status != 200:
        return
    if answer.events is not None:
        told.tokens = words(answer.chat().text)
    elif answer.ended == "complete":
        whole: Any = json.loads(answer.body)
        told.tokens = words(whole["choices"][0]["message"]["content"])
