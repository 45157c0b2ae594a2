"""Answers that a loop reads: the same bytes and the same ends as read by their own task."""

from __future__ import annotations

import contextlib
import itertools
import socket
import zlib
from collections.abc import Callable
from typing import Final

import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import wait_all_tasks_blocked

from trio_gateway.errors import UpstreamFailed, UpstreamFault
from trio_gateway.flow import ReadLoop
from trio_gateway.testing import until
from trio_gateway.upstream._connection import Answer, Connection
from trio_gateway.wire import CHUNKED, UNTIL_CLOSE, Header, ResponseHead

Seen = tuple[bytes, bool, UpstreamFault | None, bool, int]
LIMIT: Final = 10.0  # seconds; a wait that takes longer has failed


def head(body: int, *headers: Header) -> ResponseHead:
    return ResponseHead(200, headers, body, keep_alive=True)


def chunked(pieces: list[bytes]) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces if piece) + b"0\r\n\r\n"


class Far:
    """A connection, and its other end."""

    def __init__(self, loop: ReadLoop | None) -> None:
        near, self.socket = socket.socketpair()
        near.setblocking(False)
        self.connection = Connection(trio.SocketStream(trio.socket.from_stdlib_socket(near)), loop)
        self.done = self.given = 0

    def answer(self, answer_head: ResponseHead, first: bytes = b"") -> Answer:
        return Answer(self.connection, answer_head, first, self._note_done, self._take_back)

    def _note_done(self) -> None:
        self.done += 1

    def _take_back(self, connection: Connection) -> None:
        self.given += 1
        connection.abort()


async def seen(
    loop: ReadLoop | None,
    answer_head: ResponseHead,
    writes: list[bytes],
    first: bytes,
    stop_every: int,
    as_lines: bool = False,
) -> Seen:
    """Play an engine that writes so, and answer all that a reader could tell."""
    far = Far(loop)
    got: list[bytes] = []
    fault: UpstreamFault | None = None

    def take(data: bytes, now: float) -> bool:
        got.append(data)
        return len(got) % stop_every != 0

    def take_lines(lines: list[bytes], now: float) -> bool:
        assert lines
        return take(b"\n\n".join([*lines, b""]), now)

    async def write() -> None:
        for data in writes:
            with contextlib.suppress(OSError):
                far.socket.send(data)
            await trio.lowlevel.checkpoint()
            await trio.lowlevel.checkpoint()
        far.socket.close()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(write)
        with trio.fail_after(LIMIT), (answer := far.answer(answer_head, first)):
            try:
                while await answer.pour(take, take_lines if as_lines else None):
                    pass
            except UpstreamFailed as failed:
                fault = failed.fault
            ended = answer.ended
    assert not loop
    return b"".join(got), ended, fault, bool(far.given), far.done


def both_ways(*told: object) -> tuple[Seen, Seen]:
    async def run(together: bool) -> Seen:
        if not together:
            return await seen(None, *told)  # type: ignore[arg-type]
        loop = ReadLoop()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(loop.run)
            await wait_all_tasks_blocked()
            result = await seen(loop, *told)  # type: ignore[arg-type]
            nursery.cancel_scope.cancel()
        loop.close()
        return result

    return trio.run(run, True), trio.run(run, False)


@given(
    pieces=st.lists(st.binary(max_size=40), max_size=6),
    framing=st.sampled_from(["chunked", "sized", "until close", "deflate", "malformed"]),
    cuts=st.lists(st.integers(0, 250), max_size=8),
    at_once=st.integers(0, 20),
    lost=st.sampled_from([0, 0, 0, 1, 7]),
    more=st.sampled_from([b"", b"", b"HTTP/1.1 200 OK\r\n"]),
    stop_every=st.integers(1, 4),
)
def test_any_framing_split_anywhere_gives_the_same_poured_by_a_loop_as_read_alone(
    pieces: list[bytes],
    framing: str,
    cuts: list[int],
    at_once: int,
    lost: int,
    more: bytes,
    stop_every: int,
) -> None:
    body = b"".join(pieces)
    answer_head, wire = {
        "chunked": (head(CHUNKED), chunked(pieces)),
        "sized": (head(len(body)), body),
        "until close": (head(UNTIL_CLOSE), body),
        "deflate": (head(CHUNKED, (b"content-encoding", b"deflate")), chunked([zlib.compress(body)])),
        "malformed": (head(CHUNKED), chunked(pieces)[:-5] + b"zz\r\n"),
    }[framing]
    if framing != "until close":
        wire += more
    wire = wire[: len(wire) - lost]
    first, rest = wire[:at_once], wire[at_once:]
    ends = sorted({min(cut, len(rest)) for cut in cuts} | {0, len(rest)})
    writes = [rest[start:end] for start, end in itertools.pairwise(ends)]
    together, alone = both_ways(answer_head, writes, first, stop_every)
    assert together == alone
    if not lost and not more and framing != "malformed":
        assert together[:3] == (body, True, None)


@given(
    pieces=st.lists(
        st.sampled_from([b"a\n\n", b"data: {}\n\n", b"x" * 300 + b"\n\n", b"a\nb\n\n", b"a\n", b"\r\n"]),
        max_size=12,
    ),
    cuts=st.lists(st.integers(0, 1000), max_size=8),
    at_once=st.integers(0, 20),
    lost=st.sampled_from([0, 0, 0, 1, 7, 20]),
    malformed=st.booleans(),
    stop_every=st.integers(1, 4),
)
def test_what_is_poured_as_lines_is_what_is_poured_as_bytes(
    pieces: list[bytes], cuts: list[int], at_once: int, lost: int, malformed: bool, stop_every: int
) -> None:
    wire = chunked(pieces)
    wire = wire[:-5] + b"zz\r\n" if malformed else wire
    wire = wire[: len(wire) - lost]
    first, rest = wire[:at_once], wire[at_once:]
    ends = sorted({min(cut, len(rest)) for cut in cuts} | {0, len(rest)})
    writes = [rest[start:end] for start, end in itertools.pairwise(ends)]
    together, alone = both_ways(head(CHUNKED), writes, first, stop_every, True)
    assert together[1:] == alone[1:]
    # Lines come whole, so of one that was cut nothing may have come.
    assert alone[0].startswith(together[0])
    assert b"\n" not in alone[0][len(together[0]) : -1]


@given(st.lists(st.binary(min_size=1, max_size=1500), max_size=6), st.booleans(), st.integers(0, 2))
def test_chunks_that_come_one_by_one_are_taken_one_by_one(
    pieces: list[bytes], upper: bool, half: int
) -> None:
    chunks = [b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces]
    if upper:
        chunks = [chunk[: chunk.index(b"\r")].upper() + chunk[chunk.index(b"\r") :] for chunk in chunks]
    if half and chunks:  # one that comes in two
        chunks[:1] = [chunks[0][:half], chunks[0][half:]]
    together, alone = both_ways(head(CHUNKED), [*chunks, b"0\r\n\r\n"], b"", 3)
    assert together == alone == (b"".join(pieces), True, None, True, 1)


async def test_a_connection_that_is_closed_while_a_loop_reads_it_is_detached_first() -> None:
    loop = ReadLoop()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(loop.run)
        await wait_all_tasks_blocked()
        far = Far(loop)
        failed: list[UpstreamFailed | trio.ClosedResourceError] = []

        async def read() -> None:
            with far.answer(head(CHUNKED)) as answer:
                try:
                    await answer.pour(lambda data, now: True)
                except (UpstreamFailed, trio.ClosedResourceError) as exc:
                    failed.append(exc)

        nursery.start_soon(read)
        await wait_all_tasks_blocked()
        assert len(loop) == 1
        far.connection.abort()
        assert not loop  # at once, before its number can come again
        far.connection.abort()
        await wait_all_tasks_blocked()
        assert len(failed) == 1
        far.socket.close()
        nursery.cancel_scope.cancel()
    loop.close()


async def test_a_loop_that_ends_leaves_its_streams_to_be_read_by_their_own_tasks() -> None:
    loop = ReadLoop()
    got: list[bytes] = []
    async with trio.open_nursery() as nursery:
        scope = trio.CancelScope()

        async def run() -> None:
            with scope:
                await loop.run()

        nursery.start_soon(run)
        await wait_all_tasks_blocked()
        far = Far(loop)

        async def read(take: Callable[[bytes, float], bool]) -> None:
            with far.answer(head(UNTIL_CLOSE)) as answer:
                assert await answer.pour(take) is False

        nursery.start_soon(read, lambda data, now: not got.append(data))  # type: ignore[func-returns-value]
        await wait_all_tasks_blocked()
        far.socket.send(b"one")
        await until(lambda: bool(got))
        scope.cancel()
        await wait_all_tasks_blocked()
        far.socket.send(b"two")
        far.socket.close()
        nursery.cancel_scope.deadline = trio.current_time() + LIMIT
    assert b"".join(got) == b"onetwo"
    loop.close()
