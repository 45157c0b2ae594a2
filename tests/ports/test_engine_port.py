"""The promises of `EnginePort` and `EngineAnswer`, kept by the HTTP engine on sockets and by the fake."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final, Protocol

import pytest
import trio
import trio.testing

from trio_gateway.contract import EngineAnswer, EnginePort, LeasePort
from trio_gateway.errors import UpstreamFailed, UpstreamFault
from trio_gateway.flow import ReadLoop
from trio_gateway.testing import (
    Chunk,
    CloseFin,
    CloseReset,
    EndChunks,
    FakeEngine,
    FakePoller,
    Head,
    Hold,
    Raw,
    Script,
    ScriptedEngine,
    Wait,
    WaitFor,
    WorkerSet,
    chat_answer,
    chat_stream,
    error_answer,
    make_request,
    make_worker,
    open_engine,
    refusing_port,
    unreachable,
    until,
)
from trio_gateway.upstream import ConnectionPool, HttpEngine, UpstreamLimits

LIMIT: Final = 10.0  # seconds; a wait that takes longer has failed


class Side(Protocol):
    """One engine port, and what its engine saw."""

    port: EnginePort
    workers: WorkerSet

    async def none_open(self) -> None:
        """Wait until the engine works on nothing any more."""

    def kept(self) -> int:
        """Connections that would be used again."""


class FakeSide:
    def __init__(self, engine: FakeEngine) -> None:
        self.port: EnginePort = engine
        self.workers = WorkerSet(make_worker())
        self._engine = engine
        self.read_together = engine.read_together

    async def none_open(self) -> None:
        await until(lambda: self._engine.reading == 0)

    def kept(self) -> int:
        return self._engine.kept


class HttpSide:
    def __init__(self, engine: ScriptedEngine | None, port: int, loop: ReadLoop | None = None) -> None:
        self._engine = engine
        self._pool = ConnectionPool(3.0, trio.current_time)
        limits = UpstreamLimits(2.0, 16 * 1024)
        self.port: EnginePort = HttpEngine(self._pool, limits, "test", b"salt", loop=loop)
        self.workers = WorkerSet(make_worker(host="127.0.0.1", port=port, authority=f"127.0.0.1:{port}"))

    async def none_open(self) -> None:
        if self._engine is not None:
            await self._engine.wait_open(0)

    def kept(self) -> int:
        return self._pool.idle

    def close(self) -> None:
        self._pool.close()


Reader = Callable[[EngineAnswer], Awaitable[bytes]]
Sided = Callable[[Script], AbstractAsyncContextManager[Side]]
Lost = Callable[[], AbstractAsyncContextManager[Side]]


@pytest.fixture(params=["fake", "fake together", "http", "http together"])
def sided(request: pytest.FixtureRequest) -> Sided:
    """Opens a side whose engine plays a script, for the length of a block."""
    sides: dict[str, Sided] = {
        "fake": _fake,
        "fake together": _fake_together,
        "http": _http,
        "http together": _http_together,
    }
    return sides[request.param]


@pytest.fixture(params=["received", "poured"])
def read_all(request: pytest.FixtureRequest) -> Reader:
    """Reads all of an answer, in one of both ways."""
    return received if request.param == "received" else poured


async def received(answer: EngineAnswer) -> bytes:
    body = b""
    while data := await answer.receive():
        body += data
    return body


async def poured(answer: EngineAnswer) -> bytes:
    pieces: list[bytes] = []
    times: list[float] = []

    def take(data: bytes, now: float) -> bool:
        pieces.append(data)
        times.append(now)
        return True

    began = trio.current_time()
    assert await answer.pour(take) is False
    assert [began, *times] == sorted([*times, began])
    assert trio.current_time() >= max(times, default=0)
    return b"".join(pieces)


@pytest.fixture(params=["fake", "http"])
def lost(request: pytest.FixtureRequest) -> Lost:
    """Opens a side whose engine can not be reached."""
    return _fake_lost if request.param == "fake" else _http_lost


@asynccontextmanager
async def _fake(script: Script) -> AsyncIterator[Side]:
    with trio.fail_after(LIMIT):  # noqa: ASYNC100 - the block of the caller waits
        yield FakeSide(FakeEngine(script))


@asynccontextmanager
async def _http(script: Script) -> AsyncIterator[Side]:
    with trio.fail_after(LIMIT):
        async with open_engine(script) as engine:
            side = HttpSide(engine, engine.port)
            yield side
            side.close()


@asynccontextmanager
async def _fake_together(script: Script) -> AsyncIterator[Side]:
    poller = FakePoller()
    loop = ReadLoop(poller)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(loop.run)  # noqa: ASYNC113 - what it does not read yet is read alone
        async with _fake(script) as side:
            assert isinstance(side, FakeSide)
            side.read_together(loop, poller)
            yield side
        assert not poller.watched
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def _http_together(script: Script) -> AsyncIterator[Side]:
    loop = ReadLoop()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(loop.run)  # noqa: ASYNC113 - what it does not read yet is read alone
        with trio.fail_after(LIMIT):
            async with open_engine(script) as engine:
                side = HttpSide(engine, engine.port, loop)
                yield side
                side.close()
        assert not loop
        nursery.cancel_scope.cancel()
    loop.close()


@asynccontextmanager
async def _fake_lost() -> AsyncIterator[Side]:
    yield FakeSide(FakeEngine(unreachable()))
    await trio.lowlevel.checkpoint()


@asynccontextmanager
async def _http_lost() -> AsyncIterator[Side]:
    with trio.fail_after(LIMIT), refusing_port() as port:  # noqa: ASYNC100 - the block of the caller waits
        yield HttpSide(None, port)
    await trio.lowlevel.checkpoint()


async def attempt(
    side: Side, use: Callable[[EngineAnswer], Awaitable[None]] | None = None, *, stream: bool = True
) -> None:
    """Make one attempt under a lease of its own, use its answer, and leave everything."""
    request = make_request(stream=stream)
    ticket = side.workers.admission.enter(request)
    async with trio.open_nursery() as nursery:
        with await ticket.wait() as lease:
            answer = await side.port.open(request, lease, request.attempt_id(1), nursery)
            with answer:
                if use is not None:
                    await use(answer)
        nursery.cancel_scope.cancel()


def draining(side: Side) -> int:
    """Leases whose engine may still be working."""
    return side.workers.admission.statistics().draining


# Whole answers --------------------------------------------------------------------------------------------


async def test_an_answer_is_read_to_its_proper_end_and_then_says_so(sided: Sided, read_all: Reader) -> None:
    async with sided(chat_stream("hello")) as side:

        async def use(answer: EngineAnswer) -> None:
            assert answer.status == 200
            assert (answer.header(b"content-type") or b"").startswith(b"text/event-stream")
            assert answer.header(b"x-nothing") is None
            assert not answer.ended
            body = await read_all(answer)
            assert b"hello" in body
            assert body.endswith(b"data: [DONE]\n\n")
            assert answer.ended
            assert await answer.receive() == b""

        await attempt(side, use)
        assert draining(side) == 0  # the engine was seen to be done
        assert side.kept() == 1
        await side.none_open()


async def test_a_sized_answer_too(sided: Sided, read_all: Reader) -> None:
    async with sided(chat_answer("hello")) as side:

        async def use(answer: EngineAnswer) -> None:
            assert answer.header(b"content-type") == b"application/json"
            assert b"hello" in await read_all(answer)

        await attempt(side, use, stream=False)
        assert (draining(side), side.kept()) == (0, 1)


@pytest.mark.parametrize("status", [400, 429, 500, 503])
async def test_an_error_status_is_an_answer_like_any_other(
    status: int, sided: Sided, read_all: Reader
) -> None:
    async with sided(error_answer(status, "why", headers=(("retry-after", "7"),))) as side:

        async def use(answer: EngineAnswer) -> None:
            assert answer.status == status
            assert answer.header(b"retry-after") == b"7"
            assert b"why" in await read_all(answer)

        await attempt(side, use)
        assert (draining(side), side.kept()) == (0, 1)


async def test_a_body_until_the_connection_closes_has_a_proper_end_and_is_not_reused(
    sided: Sided, read_all: Reader
) -> None:
    head = Head(200, (("content-type", "text/event-stream"),))
    script = (head, Chunk(b"data: x\n\n"), CloseFin())
    async with sided(_unframed(script) if sided in (_http, _http_together) else script) as side:

        async def use(answer: EngineAnswer) -> None:
            assert await read_all(answer) == b"data: x\n\n"
            assert answer.ended

        await attempt(side, use)
        assert (draining(side), side.kept()) == (0, 0)


def _unframed(script: Script) -> Script:
    """On a socket, chunks of a body without chunked coding are bytes as they are."""
    return tuple(Raw(step.data) if isinstance(step, Chunk) else step for step in script)


async def test_several_attempts_each_get_the_whole_answer(sided: Sided, read_all: Reader) -> None:
    async with sided(chat_stream("hello")) as side:
        for _ in range(3):

            async def use(answer: EngineAnswer) -> None:
                assert b"hello" in await read_all(answer)

            await attempt(side, use)
        assert side.workers.left_over() == []


async def test_an_answer_is_there_when_its_head_is_though_the_body_is_not(
    sided: Sided, read_all: Reader
) -> None:
    go = trio.Event()
    async with sided((Head(), WaitFor(go), *chat_stream("late")[1:])) as side:

        async def use(answer: EngineAnswer) -> None:
            assert answer.status == 200
            go.set()
            assert b"late" in await read_all(answer)

        await attempt(side, use)


# Pouring --------------------------------------------------------------------------------------------------


async def test_pouring_stops_when_no_more_is_wanted_and_can_go_on_either_way(sided: Sided) -> None:
    script: Script = (Head(), *(Chunk(b"%d" % number) for number in range(6)), EndChunks())
    async with sided(script) as side:

        async def use(answer: EngineAnswer) -> None:
            got: list[bytes] = []

            def one(data: bytes, now: float) -> bool:
                got.append(data)
                return False

            assert await answer.pour(one) is True
            assert len(got) == 1
            got.append(await answer.receive())
            assert await answer.pour(one) is True
            got.append(await poured(answer))
            assert b"".join(got) == b"012345"
            assert answer.ended
            assert await poured(answer) == b""

        await attempt(side, use)
        assert (draining(side), side.kept()) == (0, 1)


async def test_what_a_taker_raises_is_raised_where_it_is_poured(sided: Sided) -> None:
    async with sided((*chat_stream("hello", end=False), Hold())) as side:

        async def use(answer: EngineAnswer) -> None:
            def fail(data: bytes, now: float) -> bool:
                raise ValueError("mine")

            with pytest.raises(ValueError, match="mine"):
                await answer.pour(fail)

        await attempt(side, use)
        assert (draining(side), side.kept()) == (1, 0)
        await side.none_open()


# Leaving --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("read", [0, 1])
async def test_leaving_early_closes_and_leaves_the_lease_draining(read: int, sided: Sided) -> None:
    async with sided((*chat_stream("hello", end=False, done=False), Hold())) as side:

        async def use(answer: EngineAnswer) -> None:
            for _ in range(read):
                assert await answer.receive()

        await attempt(side, use)
        assert (draining(side), side.kept()) == (1, 0)
        await side.none_open()


@pytest.mark.parametrize("script", [(Hold(),), (Head(), Hold())], ids=["no head", "no body"])
async def test_a_cancelled_attempt_closes_and_leaves_the_lease_draining(
    script: Script, sided: Sided, read_all: Reader
) -> None:
    async def read_to_nowhere(answer: EngineAnswer) -> None:
        await read_all(answer)

    async with sided(script) as side:
        with trio.move_on_after(0.05) as scope:
            await attempt(side, read_to_nowhere)
        assert scope.cancelled_caught
        assert (draining(side), side.kept()) == (1, 0)
        await side.none_open()


async def test_an_attempt_that_is_cancelled_before_it_connects_leaves_nothing(
    sided: Sided,
) -> None:
    async with sided((Hold(),)) as side:
        with trio.CancelScope() as scope:
            scope.cancel()
            await attempt(side)
        assert scope.cancelled_caught
        assert side.workers.left_over() == []
        await side.none_open()


# Failures -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [CloseFin(), CloseReset()], ids=["fin", "reset"])
async def test_a_body_that_is_cut_fails_and_is_never_a_proper_end(
    end: CloseFin | CloseReset, sided: Sided, read_all: Reader
) -> None:
    async with sided((*chat_stream("hello", end=False, done=False), Wait(0.01), end)) as side:

        async def use(answer: EngineAnswer) -> None:
            with pytest.raises(UpstreamFailed) as failed:
                await read_all(answer)
            assert failed.value.fault is UpstreamFault.BROKEN
            assert not answer.ended

        await attempt(side, use)
        assert (draining(side), side.kept()) == (1, 0)


async def test_a_connection_that_closes_before_a_head_is_broken(sided: Sided) -> None:
    async with sided((CloseFin(),)) as side:
        with pytest.RaisesGroup(UpstreamFailed) as failed:
            await attempt(side)
        assert isinstance(failed.value.exceptions[0], UpstreamFailed)
        assert failed.value.exceptions[0].fault is UpstreamFault.BROKEN
        assert (draining(side), side.kept()) == (1, 0)
        await side.none_open()


async def test_where_nothing_was_sent_no_lease_drains(lost: Lost) -> None:
    async with lost() as side:
        with pytest.RaisesGroup(UpstreamFailed) as failed:
            await attempt(side)
        assert isinstance(failed.value.exceptions[0], UpstreamFailed)
        assert failed.value.exceptions[0].fault is UpstreamFault.UNREACHABLE
        assert side.workers.left_over() == []


async def test_the_engine_may_be_working_as_soon_as_something_was_sent(
    sided: Sided,
) -> None:
    async with sided((Hold(),)) as side:
        request = make_request()
        lease: LeasePort = await side.workers.admission.enter(request).wait()
        async with trio.open_nursery() as nursery:
            with lease, trio.move_on_after(0.05):
                await side.port.open(request, lease, request.attempt_id(1), nursery)
            nursery.cancel_scope.cancel()
        assert draining(side) == 1
