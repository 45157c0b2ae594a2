"""Connections on real sockets are ended at every moment; each time all is closed, counted and given back.

Here the clock is the real one: moments are counted in steps of tasks, and no story waits for time to pass.
What the exchange sweep looks at is looked at again; beside it the connection, its descriptor, its place in
the watch for clients that leave, and the bytes of bodies that no worker has.
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
import trio.testing

from tests.accepted import socket_of
from tests.exchange.rig import Rig
from tests.sweeps.conftest import Report
from trio_gateway.edge import HangupWatch
from trio_gateway.testing import (
    CloseReset,
    FakeAttempt,
    FakeEngine,
    FakeScript,
    RawClient,
    WorkerSet,
    chat_answer,
    chat_request,
    chat_stream,
    http_request,
    make_worker,
    until,
)
from trio_gateway.units import KiB

from .doors import Doors
from .sweep import SHUTDOWN

LIMIT: Final = 10.0  # seconds; whatever takes longer has failed
GRACE: Final = 0.001  # seconds a draining lease is kept
BIG: Final = "x" * 60_000


class Served:
    """One connection of a server in this process, with the client on its other side."""

    def __init__(self, rig: Rig, doors: Doors, client: RawClient) -> None:
        self.rig = rig
        self.doors = doors
        self.client = client
        self.scope = trio.CancelScope()
        self.over = False

    async def serve(self, sock: socket.socket) -> None:
        """Serve the connection as the accept loop does."""
        try:
            with self.scope:
                await self.doors.server.serve(sock)
        finally:
            sock.close()
            self.over = True


# Stories --------------------------------------------------------------------------------------------------


async def one_stream(client: RawClient) -> None:
    await client.send(chat_request())
    await client.read_to_end()


async def one_answer(client: RawClient) -> None:
    await trio.testing.wait_all_tasks_blocked()  # its connection waits; that of others finds a request
    await client.send(chat_request(stream=False))
    await client.read_to_end()


async def pipelined(client: RawClient) -> None:
    await client.send(chat_request() + chat_request(stream=False) + http_request("GET", "/livez"))
    for _ in range(3):
        await client.read_to_end()


async def body_in_pieces(client: RawClient) -> None:
    request = chat_request("y" * 3000)
    for start in range(0, len(request), 1100):
        await client.send(request[start : start + 1100])
        await trio.lowlevel.checkpoint()
    await client.read_to_end()


async def half_closed(client: RawClient) -> None:
    await client.send(chat_request())
    client.half_close()
    await client.read_to_end()


async def refused_with_an_unread_body(client: RawClient) -> None:
    refused = chat_request("z" * 5000, model="nobody knows")
    await client.send(refused + chat_request())
    await client.read_to_end()
    await client.read_to_end()


def small(attempt: FakeAttempt) -> FakeScript:
    return chat_stream("one", "two") if attempt.request.stream else chat_answer("one")


def large(attempt: FakeAttempt) -> FakeScript:
    return chat_stream(BIG, BIG, BIG) if attempt.request.stream else chat_answer(BIG * 3)


def broken(attempt: FakeAttempt) -> FakeScript:
    return (*chat_stream("one", finish=None, done=False, end=False), CloseReset())


@dataclass(frozen=True, slots=True)
class Story:
    """What a client does when nobody ends it, before an engine that answers so."""

    name: str
    tell: Callable[[RawClient], Awaitable[None]]
    engine: Callable[[FakeAttempt], FakeScript] = small


STORIES: Final = (
    Story("socket: streamed answer", one_stream),
    Story("socket: buffered answer", one_answer),
    Story("socket: three requests in a row", pipelined),
    Story("socket: a body in pieces", body_in_pieces),
    Story("socket: half-closed client", half_closed),
    Story("socket: a large stream", one_stream, large),
    Story("socket: a large answer", one_answer, large),
    Story("socket: failure after commit", one_stream, broken),
    Story("socket: refused, then served", refused_with_an_unread_body),
)

Way = Callable[[Served], None]
WAYS: Final[dict[str, Way]] = {
    "cancelled from outside": lambda served: served.scope.cancel(),
    "ended by shutdown": lambda served: served.rig.live.end_all(SHUTDOWN),
    "the client resets": lambda served: _if_open(served.client.leave_reset),
    "the client closes": lambda served: _if_open(served.client.leave_fin),
    "the client half-closes": lambda served: _if_open(served.client.half_close),
}


def _if_open(close: Callable[[], None]) -> None:
    with contextlib.suppress(OSError):  # its story may be over already
        close()


# Replaying ------------------------------------------------------------------------------------------------


class _Counter(trio.abc.Instrument):
    """Counts steps while a connection is served, audits each, and acts after one of them.

    The client's own task is not counted: nothing of the server is suspended by it, and its socket can not be
    closed by itself while it waits.
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
        if self._served.over or task is self._client:
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
                with await RawClient.connect(listener.socket.getsockname(), receive_buffer=8 * KiB) as client:
                    served = Served(rig, doors, client)
                    ours = socket_of(await listener.accept())
                    counter = _Counter(served, way, moment)
                    trio.lowlevel.add_instrument(counter)
                    nursery.start_soon(served.serve, ours)
                    with contextlib.suppress(OSError, trio.ClosedResourceError):  # it left, or was left
                        await story.tell(client)
                await until(lambda: served.over)
                await rig.wind_down()
                trio.lowlevel.remove_instrument(counter)
                wrong = counter.wrong + doors.left_over()
                if len(watch):
                    wrong.append(f"{len(watch)} connections are watched")
                if len(os.listdir("/proc/self/fd")) != before:
                    wrong.append("a descriptor is left")
                wrong += [f"a torn answer: {a!r}" for a in client.answers if _is_torn(client, a.was_cut)]
        watch.close()
        nursery.cancel_scope.cancel()
    if moment is None and [record.outcome for record in rig.records] == []:
        wrong.append("nothing was settled")
    return counter.moments, wrong


def _is_torn(client: RawClient, cut: bool) -> bool:
    """Whether an answer that ended properly is not whole; the reader raises at broken framing itself."""
    last = client.answers[-1]
    if cut or last.ended != "complete" or last.events is None:
        return False
    reading = last.chat()
    return reading.done + len(reading.errors) != 1


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.name)
def test_whenever_a_connection_is_ended_nothing_stays_held(story: Story, way: str, report: Report) -> None:
    moments, wrong = trio.run(_replay, story, WAYS[way], None)
    unclean = {0: wrong} if wrong else {}
    for moment in range(1, moments + 1):
        _, wrong = trio.run(_replay, story, WAYS[way], moment)
        if wrong:
            unclean[moment] = wrong
    report(story.name, way, moments, len(unclean))
    # The shortest, one buffered answer, has five: what is there already is taken without a checkpoint.
    assert moments > 4
    assert unclean == {}
