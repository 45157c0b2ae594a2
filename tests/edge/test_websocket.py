"""One WebSocket: whose turn it is, when a client counts as gone, and what is said around a close."""

from __future__ import annotations

import math
import socket
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio

from tests.accepted import socket_of
from tests.e2e.sockets import CLOSE, PING, PONG, TEXT, Closed, Frame, TokenSocket, close_payload, frame
from trio_gateway.edge import Connection, Hangup, HangupWatch, SocketLimits
from trio_gateway.edge._http_server import UnplacedBytes
from trio_gateway.edge._websocket import OVERLOADED, SAID_AT_MOST, TOO_SLOW, UNCOUNTED, Pulse, WebSocket
from trio_gateway.testing import until
from trio_gateway.wire import text_frame

LIMIT = 10.0
CALM = SocketLimits(1 << 20, 1000.0, 1000.0, 1000.0)
SMALL = 4096  # bytes of the kernel's buffers, so that they fill soon


class Source:
    """A sender with messages that a test gives it."""

    def __init__(self, name: str, count: int = 0, size: int = 100) -> None:
        self.frames = deque(
            text_frame(b'{"type":"%s"}' % name.encode().ljust(size, b"-")) for _ in range(count)
        )
        self.name = name
        self.taken = 0
        self.ends: list[int] = []
        self.losses = 0

    def next_frame(self) -> bytes | None:
        if not self.frames:
            return None
        self.taken += 1
        return self.frames.popleft()

    def sent(self, end: int) -> None:
        self.ends.append(end)

    def lost(self) -> None:
        self.losses += 1


@asynccontextmanager
async def joined(
    limits: SocketLimits = CALM,
    hear: Callable[[str], None] = lambda text: None,
    room: UnplacedBytes | None = None,
) -> AsyncIterator[tuple[WebSocket, TokenSocket, trio.Event]]:
    """A running WebSocket, a client on the other end of its connection, and the event that it is over."""
    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        async with listener:
            theirs = trio.socket.socket()
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL)
            await theirs.connect(listener.socket.getsockname())
            ours = socket_of(await listener.accept())
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL)
        watch = HangupWatch()
        nursery.start_soon(watch.run)  # noqa: ASYNC113 - whoever waits for it waits until it runs
        over = trio.Event()
        raw = trio.SocketStream(theirs)
        client = TokenSocket(raw, raw)
        with Hangup(watch, ours.fileno()) as hangup:
            connection = Connection(ours, hangup, 1000)
            web = WebSocket(connection, limits, hear, UnplacedBytes(1 << 20) if room is None else room)

            async def run() -> None:
                await web.run()
                over.set()

            nursery.start_soon(run)  # noqa: ASYNC113 - what is sent before waits
            yield web, client, over
            theirs.close()
            with trio.fail_after(LIMIT):
                await over.wait()
            connection.close()
        watch.close()
        nursery.cancel_scope.cancel()


# Turns ------------------------------------------------------------------------------------------------------


async def test_senders_take_turns_however_much_each_of_them_has() -> None:
    async with joined() as (web, client, _):
        greedy, modest = Source("greedy", 2000), Source("modest", 50)
        web.attach(greedy)
        assert greedy.taken < 2000  # the socket is full
        web.attach(modest)
        seen: Counter[str] = Counter()
        before = 0
        while seen["modest"] < 50:
            kind = (await client.read())["type"].rstrip("-")
            seen[kind] += 1
            if kind == "modest" and not before:
                before = seen["greedy"]
        assert seen["greedy"] - before <= 51


async def test_each_frame_is_told_of_once_it_is_in_the_socket_and_where_it_ends() -> None:
    async with joined() as (web, client, _):
        source = Source("x", 3)
        size = len(source.frames[0])
        web.attach(source)
        assert source.ends == [size, 2 * size, 3 * size]
        web.say(b'{"type":"said"}')
        source.frames.append(text_frame(b'{"type":"more"}'))
        web.wake(source)
        said = len(text_frame(b'{"type":"said"}'))
        assert source.ends[-1] == 3 * size + said + len(text_frame(b'{"type":"more"}'))
        assert [(await client.read())["type"].rstrip("-") for _ in range(5)] == [
            "x",
            "x",
            "x",
            "said",
            "more",
        ]


async def test_what_is_said_of_no_stream_overtakes_what_waits() -> None:
    async with joined() as (web, client, _):
        source = Source("x", 1000)
        web.attach(source)
        taken = source.taken
        assert taken < 1000
        web.say(b'{"type":"said"}')
        for _ in range(taken):
            assert (await client.read())["type"].startswith("x")
        assert (await client.read())["type"] == "said"


async def test_who_is_detached_in_the_middle_is_told_nothing_and_its_frame_still_leaves_whole() -> None:
    async with joined() as (web, client, _):
        leaving, staying = Source("leaving", 1000), Source("staying", 1000)
        web.attach(leaving)
        web.attach(staying)
        ends = len(leaving.ends)
        web.detach(leaving)
        web.detach(leaving)
        web.wake(leaving)
        taken = leaving.taken
        while len(staying.ends) < 500:
            await client.read()
        assert (leaving.taken, len(leaving.ends)) == (taken, ends)


async def test_who_joins_a_socket_that_is_lost_is_told_so_at_once() -> None:
    async with joined() as (web, client, over):
        early, late = Source("early"), Source("late")
        web.attach(early)
        client.reset()
        await over.wait()
        web.attach(late)
        assert (early.losses, late.losses) == (1, 1)
        web.wake(early)
        web.say(b"{}")
        web.close(1000)
        assert web.acknowledged() == 0


# Closing ----------------------------------------------------------------------------------------------------


async def test_behind_a_close_nothing_is_sent_whoever_wakes() -> None:
    async with joined() as (web, client, over):
        source = Source("x", 1)
        web.attach(source)
        web.close(4400, "enough")
        source.frames.append(text_frame(b'{"type":"late"}'))
        web.wake(source)
        web.say(b'{"type":"late"}')
        web.close(1000)
        assert not web.open
        assert await client.read_closed() == Closed(4400, "enough")
        assert [message["type"].rstrip("-") for message in client.messages] == ["x"]
        await over.wait()
        assert source.losses == 1


async def test_who_has_more_is_told_of_a_close_at_once() -> None:
    async with joined() as (web, _, over):
        source = Source("x", 1000)
        web.attach(source)
        ends = len(source.ends)
        web.close(4403)
        late = Source("late")
        web.attach(late)
        assert (source.losses, late.losses) == (1, 1)
        await over.wait()
        assert (source.losses, len(source.ends)) == (1, ends)


async def test_a_client_that_does_not_confirm_a_close_is_cut() -> None:
    async with joined() as (web, client, over):
        web.close(1001)
        assert (await client.read_frame()).opcode == CLOSE
        await over.wait()
        assert client.close is None


async def test_messages_behind_our_close_are_not_heard() -> None:
    heard: list[str] = []
    async with joined(hear=heard.append) as (web, client, over):
        await client.send_text("before")
        await until(lambda: heard == ["before"])
        web.close(1001)
        await client.send_bytes(frame(TEXT, b"after") + frame(PING, b"p") + frame(CLOSE, close_payload(1001)))
        await over.wait()
        assert heard == ["before"]


async def test_a_client_that_takes_nothing_and_is_cut_costs_no_kernel_memory_afterwards() -> None:
    limits = SocketLimits(1 << 20, 1000.0, 1000.0, 0.1)
    async with joined(limits) as (web, client, over):
        web.attach(Source("x", 1000))
        await over.wait()
        # A reset: what was not sent is thrown away.
        while True:
            try:
                assert await client.raw.receive_some(1 << 16)
            except trio.BrokenResourceError:
                break


# Reading ----------------------------------------------------------------------------------------------------


async def test_nothing_more_is_read_while_too_much_of_our_own_waits() -> None:
    heard = 0

    def answer(text: str) -> None:
        nonlocal heard
        heard += 1
        web.say(b'{"type":"%s"}' % (b"y" * 1000))

    async with joined(hear=answer) as (web, client, _), trio.open_nursery() as nursery:
        count = 1000
        nursery.start_soon(client.send_bytes, frame(TEXT, b"x" * 30) * count)
        await until(lambda: heard * 1000 > SAID_AT_MOST)
        for _ in range(100):
            await trio.lowlevel.checkpoint()
        assert heard < 300
        for _ in range(count):
            assert (await client.read())["type"].startswith("y")
        assert heard == count


async def test_many_pings_are_answered_and_of_those_that_wait_the_newest_only() -> None:
    async with joined() as (web, client, _):
        await client.send_bytes(b"".join(frame(PING, b"%d" % number) for number in range(5)))
        assert [await client.read_frame() for _ in range(5)] == [Frame(PONG, b"%d" % n) for n in range(5)]
        web.attach(Source("x", 1000))
        await client.send_bytes(b"".join(frame(PING, b"%d" % number) for number in range(500)))
        pongs: list[bytes] = []
        while pongs[-1:] != [b"499"]:
            found = await client.read_frame()
            if found.opcode == PONG:
                pongs.append(found.payload)
        assert len(pongs) < 500
        assert pongs == sorted(pongs, key=int)


# The pulse --------------------------------------------------------------------------------------------------

PULSE = SocketLimits(1, 20.0, 10.0, 30.0)


def pinged(at: float = 20.0, end: int = 100) -> Pulse:
    """A pulse whose first ping has been sent and ends at ``end``."""
    pulse = Pulse(PULSE, 0.0)
    assert pulse.is_due(at)
    pulse.ping(at)
    pulse.end = end
    return pulse


def test_pings_are_due_at_their_interval_and_while_none_is_awaited() -> None:
    pulse = Pulse(PULSE, 0.0)
    assert (pulse.is_due(19.9), pulse.next_look(5.0), pulse.give_up) == (False, 20.0, math.inf)
    frame_ = pulse.ping(20.0)
    assert not pulse.is_due(1000.0)
    pulse.take_pong(b"other")
    assert not pulse.is_due(1000.0)
    pulse.take_pong(frame_[2:])
    assert (pulse.is_due(39.9), pulse.is_due(40.0)) == (False, True)
    assert pulse.ping(40.0) != frame_


def test_a_client_whose_kernel_has_the_ping_and_that_says_nothing_is_given_up() -> None:
    pulse = pinged()
    pulse.look(21.0, 100, blocked=False, heard=3.0)
    assert (pulse.give_up, pulse.next_look(21.0), pulse.next_look(29.5)) == (30.0, 22.0, 30.0)


def test_its_time_begins_when_its_kernel_has_the_ping() -> None:
    pulse = pinged()
    pulse.look(25.0, 99, blocked=True, heard=3.0)
    pulse.look(26.0, 100, blocked=False, heard=3.0)
    assert pulse.give_up == 35.0


def test_whatever_it_says_is_a_sign_of_life() -> None:
    pulse = pinged()
    pulse.look(25.0, 100, blocked=False, heard=24.0)
    assert pulse.give_up == 35.0


def test_only_who_reads_makes_room_in_a_full_buffer() -> None:
    pulse = pinged()
    pulse.look(25.0, 1000, blocked=True, heard=3.0)
    assert pulse.give_up == 30.0  # it may have become full just now
    pulse.look(27.0, 1000, blocked=True, heard=3.0)
    assert pulse.give_up == 30.0
    pulse.look(28.0, 1500, blocked=True, heard=3.0)
    assert pulse.give_up == 38.0
    pulse.look(29.0, 2000, blocked=False, heard=3.0)
    assert pulse.give_up == 38.0  # what flows freely may lie there unread


# Messages that are not whole --------------------------------------------------------------------------------


async def test_what_has_come_of_a_large_message_counts_until_it_is_whole() -> None:
    heard: list[str] = []
    room = UnplacedBytes(1 << 20)
    async with joined(hear=heard.append, room=room) as (_, client, __):
        with trio.fail_after(LIMIT):
            await client.send_frame(TEXT, b"x" * (UNCOUNTED + 5000), fin=False)
            await until(lambda: room.used == 5000)
            await client.send_frame(0, b"y" * 7000, fin=False)
            await until(lambda: room.used == 12_000)
            await client.send_frame(0, b"z")
            await until(lambda: room.used == 0)
            assert heard == ["x" * (UNCOUNTED + 5000) + "y" * 7000 + "z"]
            await client.send_frame(TEXT, b"x" * (UNCOUNTED + 300), fin=False)
            await until(lambda: room.used == 300)
    assert room.used == 0  # it never became whole


async def test_a_large_message_that_finds_no_room_ends_its_socket_and_says_so() -> None:
    heard: list[str] = []
    room = UnplacedBytes(10_000)
    room.take(4000)
    async with joined(hear=heard.append, room=room) as (_, client, over):
        with trio.fail_after(LIMIT):
            await client.send_frame(TEXT, b"x" * UNCOUNTED)  # the like need no room
            await until(lambda: len(heard) == 1)
            await client.send_frame(TEXT, b"x" * (UNCOUNTED + 6000), fin=False)
            await until(lambda: room.used == 10_000)
            await client.send_frame(0, b"x", fin=False)
            assert (await client.read_closed()).code == OVERLOADED
            client.reset()
            await over.wait()
    assert room.used == 4000


async def test_a_large_message_that_does_not_become_whole_in_time_ends_its_socket() -> None:
    room = UnplacedBytes(1 << 20)
    limits = SocketLimits(1 << 20, 1000.0, 1000.0, 1000.0, message_timeout=0.2)
    async with joined(limits, room=room) as (_, client, over):
        with trio.fail_after(LIMIT):
            for _ in range(3):  # each is whole in time
                await client.send_frame(TEXT, b"x" * (UNCOUNTED + 100), fin=False)
                await until(lambda: room.used == 100)
                await client.send_frame(0, b"")
                await until(lambda: room.used == 0)
            await client.send_frame(TEXT, b"x" * (UNCOUNTED + 100), fin=False)
            assert (await client.read_closed()).code == TOO_SLOW
            await over.wait()
    assert room.used == 0
