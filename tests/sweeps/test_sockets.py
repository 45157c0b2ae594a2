"""WebSockets are ended at every moment of what they carry; each time all is closed, counted and given back.

As in the sweep of connections the clock is the real one, and moments are steps of tasks. The exchanges of
a socket run in the gateway's own nursery: those that can be resumed outlive it for a moment.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import pytest
import trio

from tests.accepted import socket_of
from tests.e2e.sockets import CLOSE, LAST, TEXT, Message, SocketClosed, TokenSocket, close_payload, handshake
from tests.exchange.rig import Rig
from tests.sweeps.conftest import Report
from trio_gateway.edge import HangupWatch
from trio_gateway.exchange import OWNER
from trio_gateway.testing import (
    CloseReset,
    FakeAttempt,
    FakeEngine,
    FakeScript,
    WorkerSet,
    chat_stream,
    make_worker,
    until,
)
from trio_gateway.units import KiB

from .doors import Doors
from .sweep import SHUTDOWN

LIMIT: Final = 10.0  # seconds; whatever takes longer has failed
GRACE: Final = 0.001  # seconds a draining lease is kept
WORDS: Final = ("one", "two", "three")
BIG: Final = ("x" * 6_000,) * 6
Broken = (OSError, trio.ClosedResourceError, trio.BrokenResourceError, SocketClosed)


class Served:
    """A server in this process, and all connections that a client has made to it.

    Attributes:
        over: its story was told, and every connection was served.
    """

    def __init__(self, rig: Rig, doors: Doors, listener: trio.SocketListener) -> None:
        self.rig = rig
        self.doors = doors
        self.clients: list[TokenSocket] = []
        self.scopes: list[trio.CancelScope] = []
        self.serving = 0
        self.over = False
        self._listener = listener

    async def connect(self) -> TokenSocket:
        """Connect once more, with a small window."""
        sock = trio.socket.socket()
        sock.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_RCVBUF, 8 * KiB)
        try:
            await sock.connect(self._listener.socket.getsockname())
        except BaseException:
            sock.close()
            raise
        stream = trio.SocketStream(sock)
        client = TokenSocket(stream, stream)
        self.clients.append(client)
        await client.shake_hands(handshake(key=""))
        return client

    async def accept(self, nursery: trio.Nursery) -> None:
        """Serve all connections as the accept loop does."""
        while True:
            sock = socket_of(await self._listener.accept())
            self.serving += 1
            nursery.start_soon(self._serve, sock)

    async def _serve(self, sock: socket.socket) -> None:
        try:
            with trio.CancelScope() as scope:
                self.scopes.append(scope)
                await self.doors.server.serve(sock)
        finally:
            sock.close()
            self.serving -= 1


# Stories --------------------------------------------------------------------------------------------------


async def two_streams(served: Served) -> None:
    client = await served.connect()
    await client.generate("a", credit=2)
    await client.generate("b")
    over = 0
    while over < 2:
        message = await client.read()
        over += message["type"] not in ("accepted", "delta")
        if message["type"] == "delta" and message["stream_id"] == "a":
            await client.ack(message["seq"], "a")
    await client.say_goodbye()


async def one_is_cancelled(served: Served) -> None:
    client = await served.connect()
    await client.generate("a", credit=1)
    await client.generate("b")
    await read_deltas(client, 1)
    await client.send("cancel", stream_id="a")
    await client.read_last("a")
    await client.say_goodbye()


async def read_deltas(client: TokenSocket, count: int) -> Message:
    """Read so many deltas of the stream a, and answer the last; or give up, if it ends before."""
    while True:
        message = await client.read()
        if message.get("stream_id") == "a":
            if message.get("seq") == count:
                return message
            if message["type"] in LAST:
                raise SocketClosed


async def one_comes_back(served: Served) -> None:
    client = await served.connect()
    await client.generate("a", resumable=True)
    await read_deltas(client, 2)
    await client.ack(1, "a")
    request_id = next(m["request_id"] for m in client.messages if m["type"] == "accepted")
    client.reset()
    client = await served.connect()
    await client.send("resume", stream_id="a", request_id=request_id, after_seq=2)
    message = await client.read_last("a")
    if message["type"] == "done":
        await client.ack(4, "a")
    await client.say_goodbye()


async def refused_and_malformed(served: Served) -> None:
    client = await served.connect()
    await client.generate("a", model="nobody knows")
    await client.read_last("a")
    await client.generate("b")
    await client.send_frame(TEXT, b"{")
    await client.read_closed()


async def closed_in_the_middle(served: Served) -> None:
    client = await served.connect()
    await client.generate("a")
    await read_deltas(client, 2)
    await client.send_frame(CLOSE, close_payload(1001))
    await client.read_closed()


def small(attempt: FakeAttempt) -> FakeScript:
    return chat_stream(*WORDS)


def large(attempt: FakeAttempt) -> FakeScript:
    return chat_stream(*BIG)


def broken(attempt: FakeAttempt) -> FakeScript:
    return (*chat_stream(*WORDS, finish=None, done=False, end=False), CloseReset())


@dataclass(frozen=True, slots=True)
class Story:
    """What a client does when nobody ends it, before an engine that answers so."""

    name: str
    tell: Callable[[Served], Awaitable[None]]
    engine: Callable[[FakeAttempt], FakeScript] = small
    words: tuple[str, ...] = WORDS


STORIES: Final = (
    Story("websocket: two streams", two_streams),
    Story("websocket: two large streams", two_streams, large, BIG),
    Story("websocket: failure after commit", two_streams, broken),
    Story("websocket: one stream is cancelled", one_is_cancelled),
    Story("websocket: one stream comes back", one_comes_back),
    Story("websocket: refused, then malformed", refused_and_malformed),
    Story("websocket: closed in the middle", closed_in_the_middle),
)

Way = Callable[[Served], None]
WAYS: Final[dict[str, Way]] = {
    "cancelled from outside": lambda served: _cancel(served.scopes),
    "ended by shutdown": lambda served: served.rig.live.end_all(SHUTDOWN),
    "ended by the owner": lambda served: served.rig.live.end_all(OWNER),
    "all sockets go away": lambda served: served.doors.sockets.go_away(1.0),
    "the client resets": lambda served: _if_open(served, TokenSocket.reset),
    "the client closes": lambda served: _if_open(served, lambda client: client.raw.socket.close()),
}


def _cancel(scopes: list[trio.CancelScope]) -> None:
    for scope in scopes:
        scope.cancel()


def _if_open(served: Served, leave: Callable[[TokenSocket], None]) -> None:
    for client in served.clients:
        with contextlib.suppress(OSError):  # its story may be over already
            leave(client)


# Replaying ------------------------------------------------------------------------------------------------


class _Counter(trio.abc.Instrument):
    """Counts steps while a socket is served, audits each, and acts after one of them.

    The client's own task is not counted.
    """

    def __init__(self, served: Served, way: Way, moment: int | None) -> None:
        self._served = served
        self._way = way
        self._moment = moment
        self._client = trio.lowlevel.current_task()
        self.moments = 0
        self.wrong: list[str] = []

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        """See trio.abc.Instrument."""
        if not self.wrong:
            self.wrong = self._served.rig.equations()
        if self._served.over or task is self._client or not self._served.clients:
            return
        self.moments += 1
        if self.moments == self._moment:
            try:
                self._way(self._served)
            except Exception as exc:  # Trio would log it and go on without this instrument
                self.wrong.append(f"{exc!r} came out of ending it")


async def _replay(story: Story, way: Way, moment: int | None) -> tuple[int, list[str]]:
    async with trio.open_nursery() as nursery:
        workers = WorkerSet(make_worker(cancel_grace=GRACE))
        rig = Rig(FakeEngine(story.engine), nursery, workers=workers, buffer_bytes=16 * KiB)
        watch = HangupWatch()
        nursery.start_soon(workers.run)
        nursery.start_soon(watch.run)
        doors = Doors(rig, watch, nursery)
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        with trio.fail_after(LIMIT):
            async with listener:
                before = len(os.listdir("/proc/self/fd"))
                served = Served(rig, doors, listener)
                counter = _Counter(served, way, moment)
                trio.lowlevel.add_instrument(counter)
                async with trio.open_nursery() as accepting:
                    accepting.start_soon(served.accept, accepting)
                    with contextlib.suppress(*Broken):  # it left, or was left
                        await story.tell(served)
                    for client in served.clients:
                        client.raw.socket.close()
                    await until(lambda: served.serving == 0)
                    accepting.cancel_scope.cancel()
                served.over = True
                await rig.wind_down()
                await doors.forget()
                trio.lowlevel.remove_instrument(counter)
                wrong = counter.wrong + doors.left_over()
                if len(watch):
                    wrong.append(f"{len(watch)} connections are watched")
                if len(os.listdir("/proc/self/fd")) != before:
                    wrong.append("a descriptor is left")
                wrong += _untrue(story, served)
        watch.close()
        nursery.cancel_scope.cancel()
    if moment is None and not rig.records:
        wrong.append("nothing was settled")
    return counter.moments, wrong


def _untrue(story: Story, served: Served) -> list[str]:
    """Name what a client was told that is not so."""
    records = {record.exchange_id: record for record in served.rig.records}
    wrong = []
    text = "".join(story.words)
    for client in served.clients:
        for name in ("a", "b"):
            said = client.text(name)
            if said not in text:
                wrong.append(f"text that nobody said: {said[:80]!r}")
            for last in (m for m in client.messages if m["type"] == "done" and m["stream_id"] == name):
                record = records[last["request_id"]]
                # What is whole already, but for its way to a client that comes back, may be ended meanwhile.
                if record.outcome not in ("completed", "gateway_shutdown", "client_cancelled"):
                    wrong.append(f"a stream that is done ended as {record.outcome}")
                if last["delivery"]["delivered"] != len(story.words):
                    wrong.append(f"done, and {last['delivery']}")
                if not text.endswith(said):
                    wrong.append("done, and not all was said")
    return wrong + [
        f"{record.tokens_acknowledged} acknowledged of {record.tokens_delivered} delivered"
        for record in records.values()
        if (record.tokens_acknowledged or 0) > (record.tokens_delivered or 0)
    ]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.name)
def test_whenever_a_socket_is_ended_nothing_stays_held(story: Story, way: str, report: Report) -> None:
    moments, wrong = trio.run(_replay, story, WAYS[way], None)
    unclean = {0: wrong} if wrong else {}
    for moment in range(1, moments + 1):
        _, wrong = trio.run(_replay, story, WAYS[way], moment)
        if wrong:
            unclean[moment] = wrong
    report(story.name, way, moments, len(unclean))
    assert moments > 10
    assert unclean == {}
