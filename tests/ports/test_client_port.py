"""The promises of `ClientPort`, kept by the HTTP client on real sockets and by the recording client."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, Literal, Protocol

import pytest
import trio
import trio.testing

from tests.accepted import socket_of
from trio_gateway.contract import AnswerHead, ClientPort
from trio_gateway.edge import Connection, Hangup, HangupWatch, HttpClient
from trio_gateway.errors import ClientGone, Problem
from trio_gateway.testing import RawClient, RecordingClient, until
from trio_gateway.wire import parse_request_head

LIMIT: Final = 10.0  # seconds; a wait that takes longer has failed
REQUEST: Final = parse_request_head(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n\r\n", 100)
STREAM: Final = AnswerHead(200)
ONE: Final = b'data: {"one":1}\n\n'
TWO: Final = b'data: {"two":2}\n\n'
COMMENT: Final = b": keep-alive\n\n"
BIG: Final = b"data: " + b"x" * 200_000 + b"\n\n"
NO_ROOM: Final = Problem.of("queue_full", "there is no room", retry_after=3.0)


class Peer(Protocol):
    """The client on the other side of a port; it reads only when it is told to."""

    port: ClientPort

    async def read(self, marker: bytes) -> bytes:
        """Read until these bytes have come, and answer all of the body that came."""

    async def read_end(self) -> Literal["whole", "cut"]:
        """Read until the answer ends, and say how."""

    def status(self) -> int:
        """Status of the answer."""

    def half_close(self) -> None:
        """Send a FIN and go on reading."""

    def leave(self) -> None:
        """Reset the connection."""


class RecordingPeer:
    """A `RecordingClient`, whose two sides are one."""

    def __init__(self) -> None:
        self.client = RecordingClient(room=100_000)  # what a kernel would hold
        self.port: ClientPort = self.client

    async def read(self, marker: bytes) -> bytes:
        self.client.read(1_000_000)
        await until(lambda: marker in self.client.received)
        return bytes(self.client.received)

    async def read_end(self) -> Literal["whole", "cut"]:
        self.client.read(1_000_000)
        await until(lambda: self.client.finished or self.client.was_cut)
        return "whole" if self.client.finished else "cut"

    def status(self) -> int:
        if self.client.problem is not None:
            return self.client.problem.status
        assert self.client.head is not None
        return self.client.head.status

    def half_close(self) -> None:
        self.client.half_close()

    def leave(self) -> None:
        self.client.leave()


class HttpPeer:
    """An `HttpClient`, and a raw client on the other side of a real connection."""

    def __init__(self, port: HttpClient, raw: RawClient) -> None:
        self.http = port
        self.port: ClientPort = port
        self._raw = raw

    async def read(self, marker: bytes) -> bytes:
        await self._raw.read_until(marker)
        return self._raw.answers[0].body

    async def read_end(self) -> Literal["whole", "cut"]:
        answer = await self._raw.read_to_end()
        return "whole" if answer.ended == "complete" else "cut"

    def status(self) -> int:
        return self._raw.answers[0].status

    def half_close(self) -> None:
        self._raw.half_close()

    def leave(self) -> None:
        self._raw.leave_reset()


@asynccontextmanager
async def over_tcp(nursery: trio.Nursery) -> AsyncIterator[HttpPeer]:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    listener.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 * 1024)
    async with listener:
        with await RawClient.connect(listener.socket.getsockname(), receive_buffer=16 * 1024) as raw:
            ours = socket_of(await listener.accept())
            watch = HangupWatch()
            nursery.start_soon(watch.run)  # noqa: ASYNC113 - what happens before its first step is not lost
            with Hangup(watch, ours.fileno()) as hangup:
                connection = Connection(ours, hangup, 64 * 1024)
                yield HttpPeer(HttpClient(connection, REQUEST, (), 30.0, 0.05), raw)
                connection.close()
            nursery.cancel_scope.cancel()
            watch.close()


@pytest.fixture(params=["recording", "http"])
async def peer(request: pytest.FixtureRequest) -> AsyncIterator[Peer]:
    """A fresh port with its other side."""
    with trio.fail_after(LIMIT):
        if request.param == "recording":
            yield RecordingPeer()
            return
        async with trio.open_nursery() as nursery, over_tcp(nursery) as http:
            yield http


def watching(port: ClientPort, nursery: trio.Nursery) -> trio.Event:
    """Wait in the background until the client has left, and set the answer then."""
    gone = trio.Event()

    async def watch() -> None:
        await port.wait_gone()
        gone.set()

    nursery.start_soon(watch)
    return gone


def fill(port: ClientPort) -> bytes:
    """Push until the socket takes no more; answer all that was pushed."""
    pushed = b""
    while not port.pending:
        port.push(BIG)
        pushed += BIG
    return pushed


# Answers --------------------------------------------------------------------------------------------------


async def test_a_fresh_port_has_nothing_begun_nor_pending(peer: Peer) -> None:
    port = peer.port
    assert (port.begun, port.pending, port.ended, port.finished) == (False, 0, False, False)
    assert port.delivered() == (0, 0)
    await port.flush()


async def test_a_head_alone_begins_and_what_is_pushed_after_the_last_piece_is_the_whole_answer(
    peer: Peer,
) -> None:
    port = peer.port
    port.begin(STREAM)
    assert (port.begun, port.ended, port.finished) == (True, False, False)
    port.push(ONE)
    port.push(TWO)
    assert (port.ended, port.finished) == (False, False)
    port.push(COMMENT, last=True)
    await port.flush()
    assert (port.pending, port.ended, port.finished) == (0, True, True)
    assert await peer.read(COMMENT) == ONE + TWO + COMMENT
    assert await peer.read_end() == "whole"
    assert peer.status() == 200


async def test_a_sized_answer_arrives_whole(peer: Peer) -> None:
    port = peer.port
    body = b'{"answer":42}'
    port.begin(AnswerHead(200, (("x-gateway-queue-ms", "0"),), len(body)))
    port.push(body, last=True)
    await port.flush()
    assert await peer.read(b"42}") == body
    assert await peer.read_end() == "whole"


async def test_a_sized_answer_may_come_in_pieces(peer: Peer) -> None:
    port = peer.port
    port.begin(AnswerHead(200, (), 6))
    port.push(b"abc")
    await port.flush()
    port.push(b"def", last=True)
    await port.flush()
    assert await peer.read(b"def") == b"abcdef"


async def test_a_problem_is_a_whole_answer_of_its_own(peer: Peer) -> None:
    port = peer.port
    port.respond(NO_ROOM, {"request_id": "r1"})
    await port.flush()
    assert (port.begun, port.ended, port.finished) == (True, True, True)
    body = await peer.read(b"r1")
    assert b'"queue_full"' in body
    assert peer.status() == 429
    assert await peer.read_end() == "whole"


async def test_an_error_event_is_one_whole_event_that_says_why(peer: Peer) -> None:
    event = peer.port.error_event(NO_ROOM, {"request_id": "r1"}, 7)
    assert event.startswith(b"data: {")
    assert event.endswith(b"\n\n")
    assert event.count(b"\n\n") == 1
    assert b'"queue_full"' in event
    assert b'"request_id":"r1"' in event
    assert not peer.port.begun  # it was only expressed


# A reader that is slow ------------------------------------------------------------------------------------


async def test_what_the_socket_does_not_take_is_pending_until_the_client_reads(
    peer: Peer, nursery: trio.Nursery
) -> None:
    port = peer.port
    port.begin(STREAM)
    pushed = fill(port)
    flushed = trio.Event()

    async def flush() -> None:
        await port.flush()
        flushed.set()
        port.push(ONE, last=True)

    nursery.start_soon(flush)
    await trio.testing.wait_all_tasks_blocked()
    assert not flushed.is_set()
    assert await peer.read(ONE) == pushed + ONE
    assert flushed.is_set()


async def test_a_flush_that_is_cancelled_loses_and_repeats_nothing(peer: Peer, nursery: trio.Nursery) -> None:
    port = peer.port
    port.begin(STREAM)
    pushed = fill(port)
    for _ in range(3):
        before = port.pending
        with trio.move_on_after(0.001) as scope:
            await port.flush()
        assert scope.cancelled_caught
        assert 0 < port.pending <= before

    async def finish() -> None:
        await port.flush()
        port.push(TWO, last=True)
        await port.flush()

    nursery.start_soon(finish)
    assert await peer.read(TWO) == pushed + TWO
    assert await peer.read_end() == "whole"


async def test_the_figure_of_what_is_taken_grows_with_it_and_stands_still_without(
    peer: Peer, nursery: trio.Nursery
) -> None:
    port = peer.port
    port.begin(STREAM)
    start = port.taken()
    port.push(ONE)
    assert port.taken() > start
    fill(port)
    with trio.move_on_after(0.05):  # until the kernels have sent each other what they can
        await port.flush()
    stuck = port.taken()
    with trio.move_on_after(0.05):
        await port.flush()
    assert port.taken() == stuck
    nursery.start_soon(port.flush)
    await peer.read(b"\n\n")
    await until(lambda: port.taken() > stuck)


async def test_delivered_counts_whole_events_that_arrived_and_no_comments(peer: Peer) -> None:
    port = peer.port
    port.begin(STREAM)
    for piece in (ONE, COMMENT, TWO[:5]):
        port.push(piece)
    await peer.read(TWO[:5])
    assert port.delivered()[0] == 1
    port.push(TWO[5:], last=True)
    await peer.read_end()
    events, size = port.delivered()
    assert events == 2
    assert size >= len(ONE + COMMENT + TWO)


async def test_an_event_that_stands_for_more_counts_as_all_of_them_once_it_has_arrived(peer: Peer) -> None:
    port = peer.port
    port.begin(STREAM)
    port.push(ONE + TWO[:5], joined=[(len(ONE), 4)])
    await peer.read(ONE)
    assert port.delivered()[0] == 5
    port.push(TWO[5:] + COMMENT + ONE, joined=[(len(TWO) - 5, 2)])
    await peer.read(TWO[5:] + COMMENT + ONE)
    assert port.delivered()[0] == 5 + 3 + 1


async def test_what_waits_is_not_delivered(peer: Peer) -> None:
    port = peer.port
    port.begin(STREAM)
    port.push(ONE)
    await peer.read(ONE)
    pushed = fill(port)
    assert port.delivered()[0] < 1 + pushed.count(b"\n\n")
    assert port.delivered()[1] < len(ONE + pushed)


async def test_of_a_sized_answer_bytes_are_delivered_and_no_events(peer: Peer) -> None:
    port = peer.port
    port.begin(AnswerHead(200, (), 20))
    port.push(b"a\n\nb\n\nc\n\nd\n\ne\n\nabcde", last=True)
    await peer.read_end()
    events, size = port.delivered()
    assert events == 0
    assert size >= 20


# Ends -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stuck", [False, True])
async def test_a_cut_answer_does_not_look_finished_and_takes_nothing_more(stuck: bool, peer: Peer) -> None:
    port = peer.port
    port.begin(STREAM)
    port.push(ONE)
    if stuck:
        fill(port)
    port.cut()
    port.cut()
    assert not port.finished
    if stuck:
        with pytest.raises(ClientGone):
            await port.flush()
    else:
        with pytest.raises(ClientGone):
            port.push(TWO)
    assert await peer.read_end() == "cut"


async def test_a_cut_before_anything_leaves_the_client_with_nothing(peer: Peer) -> None:
    peer.port.cut()
    assert (peer.port.begun, peer.port.finished) == (False, False)


async def test_a_client_that_leaves_is_noticed_by_whoever_waits_for_that(
    peer: Peer, nursery: trio.Nursery
) -> None:
    port = peer.port
    port.begin(STREAM)
    gone = watching(port, nursery)
    await trio.testing.wait_all_tasks_blocked()
    assert not gone.is_set()
    peer.leave()
    await gone.wait()
    with pytest.raises(ClientGone):
        port.push(ONE)


async def test_a_client_that_leaves_ends_a_flush(peer: Peer, nursery: trio.Nursery) -> None:
    port = peer.port
    port.begin(STREAM)
    fill(port)
    told = trio.Event()

    async def flush() -> None:
        try:
            await port.flush()
        except ClientGone:
            told.set()

    nursery.start_soon(flush)
    await trio.testing.wait_all_tasks_blocked()
    peer.leave()
    await told.wait()
    assert not port.finished


async def test_a_half_closed_client_is_asked_and_not_gone_and_gets_its_whole_answer(
    peer: Peer, nursery: trio.Nursery
) -> None:
    port = peer.port
    gone = watching(port, nursery)
    port.begin(STREAM)
    port.push(ONE)
    peer.half_close()
    body = await peer.read(COMMENT)  # a question, between two events
    assert body.startswith(ONE)
    assert not gone.is_set()
    await port.flush()
    port.push(TWO, last=True)
    await port.flush()
    assert await peer.read_end() == "whole"
    body = await peer.read(TWO)
    assert body.replace(COMMENT, b"") == ONE + TWO
    assert not gone.is_set()


async def test_a_half_closed_client_that_then_leaves_is_gone(peer: Peer, nursery: trio.Nursery) -> None:
    port = peer.port
    port.begin(STREAM)
    port.push(ONE)
    gone = watching(port, nursery)
    peer.half_close()
    await peer.read(COMMENT)
    assert not gone.is_set()
    peer.leave()
    await gone.wait()


async def test_watching_can_be_cancelled_and_begun_again(peer: Peer) -> None:
    with trio.move_on_after(0.001) as scope:
        await peer.port.wait_gone()
    assert scope.cancelled_caught
    peer.leave()
    await peer.port.wait_gone()


async def test_a_question_that_is_on_its_way_when_the_answer_begins_is_neither_lost_nor_torn(
    nursery: trio.Nursery,
) -> None:
    """An earlier answer on the connection still fills the socket, and its client half-closes."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    watch = HangupWatch()
    nursery.start_soon(watch.run)
    with trio.fail_after(LIMIT), ours, theirs, Hangup(watch, ours.fileno()) as hangup:
        connection = Connection(ours, hangup, 64 * 1024)
        port = HttpClient(connection, REQUEST, (), 30.0, 0.05)
        while connection.write(b"x" * 64 * 1024) == 64 * 1024:
            pass
        gone = watching(port, nursery)
        theirs.shutdown(socket.SHUT_WR)
        await until(lambda: port.pending > 0)
        port.respond(NO_ROOM, None)
        nursery.start_soon(port.flush)
        received = b""
        while not received.endswith(b"}}"):
            await trio.lowlevel.wait_readable(theirs)
            received += theirs.recv(1_000_000)
        assert received.lstrip(b"x").startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 429 ")
        assert not gone.is_set()
    nursery.cancel_scope.cancel()
    watch.close()


# What the fake checks -------------------------------------------------------------------------------------


async def test_the_recording_client_fails_whoever_breaks_the_rules_of_the_port() -> None:
    client = RecordingClient(room=5)
    with pytest.raises(AssertionError, match="begins with its head"):
        client.push(ONE)
    client.begin(STREAM)
    with pytest.raises(AssertionError, match="begun once"):
        client.begin(STREAM)
    with pytest.raises(AssertionError, match="stands alone"):
        client.respond(NO_ROOM, None)
    client.push(ONE, last=True)
    with pytest.raises(AssertionError, match="nothing follows"):
        client.push(TWO)
    waiting = RecordingClient(room=5)
    waiting.begin(STREAM)
    waiting.push(ONE)
    with pytest.raises(AssertionError, match="at most one piece"):
        waiting.push(TWO)


@pytest.mark.parametrize("leave", ["leave", "half_close"])
async def test_leaving_is_told_once_also_of_a_client_that_had_left(peer: Peer, leave: str) -> None:
    told = trio.Event()
    times = []

    def note() -> None:
        times.append(trio.current_time())
        told.set()

    peer.port.on_leaving(lambda: times.append(-1))
    peer.port.on_leaving(note)  # in the place of the other
    assert times == []
    getattr(peer, leave)()
    await told.wait()
    if leave == "half_close":
        peer.leave()
    with trio.fail_after(LIMIT):
        await peer.port.wait_gone()
    assert len(times) == 1
    peer.port.on_leaving(note)
    assert len(times) == 2
    assert min(times) >= 0


async def test_nobody_is_told_of_leaving_who_does_not_want_it_any_more(peer: Peer) -> None:
    peer.port.on_leaving(lambda: pytest.fail("told"))
    peer.port.on_leaving(None)
    peer.leave()
    await peer.port.wait_gone()
