"""Small questions to workers, and answers that go on: by TCP, TLS and unix sockets, whatever comes back."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.e2e.serving import open_descriptors
from trio_gateway.contract import Worker
from trio_gateway.errors import UpstreamFailed, UpstreamFault
from trio_gateway.testing import (
    Chunk,
    CloseFin,
    CloseReset,
    EndChunks,
    Head,
    Hold,
    Json,
    Raw,
    Repeat,
    Script,
    ScriptedEngine,
    Step,
    make_certificate,
    make_worker,
    open_engine,
    refusing_port,
    silent_port,
    until,
)
from trio_gateway.upstream import ask, follow, order, resolve
from trio_gateway.upstream._control import MOST_BYTES

PLAIN = (("transfer-encoding", "chunked"),)
WAYS = pytest.mark.parametrize("way", ["tcp", "tls", "unix"])


@pytest.fixture(autouse=True)
async def nothing_is_left() -> AsyncIterator[None]:
    """Every connection is closed, however the question ended."""
    before = open_descriptors()
    yield
    with trio.fail_after(10):
        await until(lambda: open_descriptors() == before)


def worker_at(engine: ScriptedEngine, **others: Any) -> Worker:
    where = {"host": "127.0.0.1", "port": engine.port, "authority": f"127.0.0.1:{engine.port}"}
    return make_worker("w1", **{**where, "url": engine.url, **others})


@asynccontextmanager
async def reached(way: str, folder: Path, **pages: Script) -> AsyncIterator[tuple[ScriptedEngine, Worker]]:
    """An engine with pages, and the worker that leads to it."""
    scripts = {f"/{name}": script for name, script in pages.items()}
    if way == "unix":
        async with open_engine(pages=scripts, socket_path=folder / "s") as engine:
            yield engine, make_worker("w1", socket_path=str(folder / "s"), authority="localhost")
    elif way == "tls":
        certificate = make_certificate(folder)
        trust = ssl.create_default_context(cafile=str(certificate.authority))
        async with open_engine(pages=scripts, tls=certificate.server) as engine:
            yield engine, worker_at(engine, tls=trust)
    else:
        async with open_engine(pages=scripts) as engine:
            yield engine, worker_at(engine)


# One question -------------------------------------------------------------------------------------------


@WAYS
async def test_a_question_is_answered_with_status_and_body(way: str, tmp_path: Path) -> None:
    bad = Json({"busy": True}, 503)
    with trio.fail_after(10):
        async with reached(way, tmp_path, health=(Json({}),), bad=(bad,)) as (engine, worker):
            assert await ask(worker, "/health") == (200, b"{}")
            assert await ask(worker, "/bad") == (503, b'{"busy":true}')
            await engine.wait_disconnected()  # each on a connection of its own
        assert [request.connection for request in engine.page_requests] == [1, 2]


async def test_a_question_carries_what_a_request_would(tmp_path: Path) -> None:
    with trio.fail_after(10):
        async with open_engine(pages={"/": (Json({}),)}) as engine:
            worker = worker_at(engine, prefix="/engine", api_key="secret-of-the-worker")
            await ask(worker, "/health")
            await order(worker, "/cancel")
        asked, ordered = engine.page_requests
        assert (asked.method, asked.target) == ("GET", "/engine/health")
        assert dict(asked.headers) == {
            "host": f"127.0.0.1:{engine.port}",
            "accept": "*/*",
            "connection": "close",
            "authorization": "Bearer secret-of-the-worker",
        }
        assert (ordered.method, ordered.target) == ("POST", "/engine/cancel")
        assert (ordered.header("content-length"), ordered.body) == ("0", b"")


async def test_an_order_is_answered_with_its_status() -> None:
    async with open_engine(pages={"/a": (Json({}, 202),), "/b": (Json({}, 404),)}) as engine:
        with trio.fail_after(10):
            assert [await order(worker_at(engine), path) for path in ("/a", "/b")] == [202, 404]


FAILING: dict[str, tuple[Script, UpstreamFault]] = {
    "closes by FIN": ((CloseFin(),), UpstreamFault.BROKEN),
    "closes by reset": ((CloseReset(),), UpstreamFault.BROKEN),
    "closes within its head": ((Raw(b"HTTP/1.1 200 OK\r\nx"), CloseFin()), UpstreamFault.BROKEN),
    "says no HTTP": ((Raw(b"SSH-2.0\r\n\r\n"), CloseFin()), UpstreamFault.MALFORMED),
    "upgrades": ((Raw(b"HTTP/1.1 101 Switching Protocols\r\n\r\n"), Hold()), UpstreamFault.MALFORMED),
    "has an endless head": (
        (Raw(b"HTTP/1.1 200 OK\r\nx: " + b"a" * 70_000), Hold()),
        UpstreamFault.MALFORMED,
    ),
    "uses an unknown coding": (
        (Head(200, (*PLAIN, ("content-encoding", "br"))), Hold()),
        UpstreamFault.MALFORMED,
    ),
    "is cut within its length": (
        (Raw(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nshort"), CloseFin()),
        UpstreamFault.BROKEN,
    ),
    "is cut within chunks": ((Head(200, PLAIN), Chunk(b"a"), CloseReset()), UpstreamFault.BROKEN),
    "has a bad chunk": ((Head(200, PLAIN), Raw(b"zz\r\n"), Hold()), UpstreamFault.MALFORMED),
    "is endless": ((Head(200, PLAIN), Repeat((Chunk(b"x" * 65536),))), UpstreamFault.TOO_LARGE),
    "is far too long": (
        (Raw(b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999\r\n\r\n"), Repeat((Raw(b"x" * 65536),))),
        UpstreamFault.TOO_LARGE,
    ),
}


@pytest.mark.parametrize(("script", "fault"), FAILING.values(), ids=FAILING.keys())
async def test_a_question_without_a_whole_answer_has_failed(script: Script, fault: UpstreamFault) -> None:
    async with open_engine(pages={"/health": script}) as engine:
        with trio.fail_after(10), pytest.raises(UpstreamFailed) as failed:
            await ask(worker_at(engine), "/health")
        assert failed.value.fault is fault


GOOD: dict[str, tuple[Step, ...]] = {
    "close-delimited": (Raw(b"HTTP/1.0 200 OK\r\n\r\nhello"), CloseFin()),
    "chunked": (Head(200, PLAIN), Chunk(b"hel"), Chunk(b"lo"), EndChunks()),
    "behind an interim head": (
        Raw(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"),
    ),
}


@pytest.mark.parametrize("script", GOOD.values(), ids=GOOD.keys())
async def test_every_framing_is_read(script: Script) -> None:
    async with open_engine(pages={"/health": script}) as engine:
        with trio.fail_after(10):
            assert await ask(worker_at(engine), "/health") == (200, b"hello")


async def test_the_longest_answer_is_read() -> None:
    piece = b"x" * (1024 * 1024)
    script: Script = (Head(200, PLAIN), *([Chunk(piece)] * (MOST_BYTES // len(piece))), EndChunks())
    async with open_engine(pages={"/health": script}) as engine:
        with trio.fail_after(20):
            _, body = await ask(worker_at(engine), "/health")
        assert len(body) == MOST_BYTES


@pytest.mark.parametrize("script", [(Hold(),), (Head(200, PLAIN), Chunk(b"a"))])
async def test_whoever_asks_says_how_long(script: Script) -> None:
    """A silent worker is waited for until the caller's scope ends it; its connection is closed then."""
    async with open_engine(pages={"/health": script}) as engine:
        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask, worker_at(engine), "/health")
                request = await engine.page_request("/health")
                nursery.cancel_scope.cancel()
            await request.closed.wait()


@pytest.mark.parametrize("port_of", [refusing_port, silent_port])
async def test_a_worker_that_can_not_be_reached_is_told_as_that(
    port_of: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trio_gateway.upstream._control.CONNECT", 0.1)
    with port_of() as port:
        worker = make_worker("w1", host="127.0.0.1", port=port, authority=f"127.0.0.1:{port}")
        with trio.fail_after(10), pytest.raises(UpstreamFailed) as failed:
            await ask(worker, "/health")
        assert failed.value.fault is UpstreamFault.UNREACHABLE


async def test_a_worker_whose_certificate_is_not_believed_is_unreachable(tmp_path: Path) -> None:
    certificate = make_certificate(tmp_path)
    async with open_engine(tls=certificate.server, pages={"/health": (Json({}),)}) as engine:
        worker = worker_at(engine, tls=ssl.create_default_context())
        with trio.fail_after(10), pytest.raises(UpstreamFailed) as failed:
            await ask(worker, "/health")
        assert failed.value.fault is UpstreamFault.UNREACHABLE
        assert engine.page_requests == []


async def test_a_socket_that_is_not_there_is_unreachable(tmp_path: Path) -> None:
    worker = make_worker("w1", socket_path=str(tmp_path / "s"))
    for call in (ask(worker, "/"), follow(worker, "/", lambda data: True)):
        with trio.fail_after(10), pytest.raises(UpstreamFailed) as failed:
            await call
        assert failed.value.fault is UpstreamFault.UNREACHABLE


# An answer that goes on ---------------------------------------------------------------------------------


class Taken:
    """What a follower was given."""

    def __init__(self, until_bytes: int | None = None) -> None:
        self.data = b""
        self._until = until_bytes

    def __call__(self, data: bytes) -> bool:
        self.data += data
        return self._until is None or len(self.data) < self._until


@WAYS
async def test_an_answer_is_followed_as_it_comes_until_it_ends(way: str, tmp_path: Path) -> None:
    script = (Head(200, PLAIN), Chunk(b"one\n"), Chunk(b"two\n"), EndChunks())
    taken = Taken()
    with trio.fail_after(10):
        async with reached(way, tmp_path, events=script) as (engine, worker):
            await follow(worker, "/events", taken)
            await engine.wait_disconnected()
    assert taken.data == b"one\ntwo\n"


async def test_each_piece_is_taken_when_it_comes() -> None:
    taken = Taken()
    async with open_engine(pages={"/events": (Head(200, PLAIN), Chunk(b"one\n"))}) as engine:
        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(follow, worker_at(engine), "/events", taken)
                await until(lambda: taken.data == b"one\n")
                nursery.cancel_scope.cancel()
            await engine.wait_disconnected()


async def test_whoever_takes_may_end_it() -> None:
    taken = Taken(until_bytes=10)
    async with open_engine(pages={"/events": (Head(200, PLAIN), Repeat((Chunk(b"x"),)))}) as engine:
        with trio.fail_after(10):
            await follow(worker_at(engine), "/events", taken)
            await engine.wait_disconnected()
    assert len(taken.data) >= 10


@pytest.mark.parametrize("status", [204, 302, 401, 404, 500, 503])
async def test_only_a_200_is_followed(status: int) -> None:
    taken = Taken()
    async with open_engine(pages={"/events": (Json({}, status),)}) as engine:
        with trio.fail_after(10), pytest.raises(UpstreamFailed):
            await follow(worker_at(engine), "/events", taken)
    assert taken.data == b""


@pytest.mark.parametrize("last", [CloseFin(), CloseReset(), Raw(b"zz\r\n")])
async def test_an_answer_that_breaks_has_failed_after_what_was_taken(last: Step) -> None:
    taken = Taken()
    async with open_engine(pages={"/events": (Head(200, PLAIN), Chunk(b"one\n"), last)}) as engine:
        with trio.fail_after(10), pytest.raises(UpstreamFailed):
            await follow(worker_at(engine), "/events", taken)
    assert taken.data == b"one\n"


# Names --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "found"),
    [
        ("127.0.0.1", ["127.0.0.1"]),
        ("::1", ["::1"]),
        ("a..b", []),
        ("x" * 64, []),
    ],
)
async def test_a_name_is_resolved_to_its_addresses_or_to_none(host: str, found: list[str]) -> None:
    assert await resolve(host) == found


async def test_a_name_with_several_addresses_has_each_once() -> None:
    found = await resolve("localhost")
    assert found
    assert len(found) == len(set(found))
