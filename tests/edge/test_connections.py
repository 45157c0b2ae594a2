"""Client connections: one request after another, bodies, and every bound with its own answer."""

from __future__ import annotations

import json
import socket
import tracemalloc
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, ExitStack, suppress
from typing import Any, Final

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.e2e.serving import Serving, error_code, serving, tenant
from trio_gateway.edge._connection import Connection
from trio_gateway.edge._http_server import CHUNKED_STEP, Incoming, ServerLimits, UnplacedBytes
from trio_gateway.edge._watch import Hangup, HangupWatch
from trio_gateway.errors import ClientGone
from trio_gateway.testing import (
    Hold,
    RawClient,
    WaitFor,
    chat_answer,
    chat_request,
    chat_stream,
    http_request,
    open_engine,
)
from trio_gateway.wire import parse_request_head

KIB = 1024
CHAT = "/v1/chat/completions"
BODY = json.dumps({"model": "m1", "messages": [{"role": "user", "content": "hi"}]}).encode()


def serving_nothing(**sections: Any) -> AbstractAsyncContextManager[Serving]:
    """A gateway without a worker."""
    return serving(models=[], **sections)


def chunked(body: bytes, size: int = 7, *, extension: bytes = b"", trailer: bytes = b"") -> bytes:
    """Frame a body as chunks of this size."""
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    framed = b"".join(b"%x%b\r\n%b\r\n" % (len(piece), extension, piece) for piece in pieces)
    return framed + b"0\r\n" + trailer + b"\r\n"


def head(*fields: str, method: str = "POST", path: str = CHAT) -> bytes:
    """Write a request head with these further fields."""
    return "\r\n".join([f"{method} {path} HTTP/1.1", "host: gateway", *fields, "", ""]).encode()


# One request after another ----------------------------------------------------------------------------------


async def test_a_connection_serves_any_number_of_requests() -> None:
    async with open_engine() as engine, serving(engine) as gateway:
        with trio.fail_after(10), await gateway.connect() as client:
            for stream in (True, False, True, True, False):
                await client.send(chat_request(stream=stream))
                answer = await client.read_to_end()
                assert (answer.status, answer.header("connection")) == (200, None)
            await client.request("GET", "/livez")
            assert (await client.read_to_end()).status == 200
            assert gateway.gateway.server.open == 1


async def test_refused_requests_leave_the_connection_usable() -> None:
    async with open_engine() as engine, serving(engine) as gateway:
        with trio.fail_after(10), await gateway.connect() as client:
            for body, status in ((b"{", 400), (b"{}", 400), (BODY.replace(b"m1", b"m9"), 404), (BODY, 200)):
                await client.send(http_request("POST", CHAT, body=body))
                assert (await client.read_to_end()).status == status
            await client.request("GET", "/nowhere")
            assert (await client.read_to_end()).status == 404


async def test_an_error_of_an_engine_leaves_the_connection_usable() -> None:
    async with open_engine((Hold(),)) as engine, serving(engine) as gateway:
        with trio.fail_after(10), await gateway.connect() as client:
            for _ in range(2):
                await client.send(chat_request(headers=(("x-gateway-timeout-ms", "50"),)))
                assert (await client.read_to_end()).status == 504


@pytest.mark.parametrize("stream", [True, False])
async def test_connection_close_is_honoured(stream: bool) -> None:
    async with open_engine() as engine, serving(engine) as gateway:
        with trio.fail_after(10), await gateway.connect() as client:
            await client.send(chat_request(stream=stream, headers=(("connection", "Close"),)))
            answer = await client.read_to_end()
            assert (answer.status, answer.header("connection")) == (200, "close")
            assert await client.read_closed() == "fin"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_of_http_1_0_gets_no_chunks(stream: bool) -> None:
    async with open_engine() as engine, serving(engine) as gateway:
        with trio.fail_after(10), await gateway.connect() as client:
            await client.send(chat_request(stream=stream).replace(b" HTTP/1.1\r\n", b" HTTP/1.0\r\n"))
            answer = await client.read_to_end()
            assert (answer.ended, answer.header("transfer-encoding")) == ("complete", None)
            assert answer.chat().done == 1 if stream else answer.json()["object"] == "chat.completion"
            assert await client.read_closed() == "fin"


async def test_a_client_of_http_1_0_may_keep_its_connection_where_the_length_is_known() -> None:
    async with open_engine() as engine, serving(engine) as gateway:
        with trio.fail_after(10), await gateway.connect() as client:
            request = chat_request(stream=False, headers=(("connection", "keep-alive"),))
            for _ in range(2):
                await client.send(request.replace(b" HTTP/1.1\r\n", b" HTTP/1.0\r\n"))
                answer = await client.read_to_end()
                assert (answer.status, answer.header("connection")) == (200, "keep-alive")


async def test_a_stream_to_a_client_of_http_1_0_that_fails_is_cut_by_a_reset() -> None:
    script = (*chat_stream("one", finish=None, done=False, end=False), Hold())
    async with open_engine(script) as engine, serving(engine) as gateway:
        with trio.fail_after(10), await gateway.connect() as client:
            request = chat_request(headers=(("x-gateway-timeout-ms", "200"),))
            await client.send(request.replace(b" HTTP/1.1\r\n", b" HTTP/1.0\r\n"))
            answer = await client.read_to_end()
        assert answer.chat().done == 0
        assert [error["code"] for error in answer.chat().errors] == ["deadline_exceeded"]


async def test_pipelined_requests_are_answered_in_order() -> None:
    go = trio.Event()
    scripts = [(WaitFor(go), *chat_stream("a")), chat_answer("b"), chat_stream("c")]
    async with open_engine(*scripts) as engine, serving(engine) as gateway:
        with trio.fail_after(10), await gateway.connect() as client:
            await client.send(
                chat_request("1")
                + chat_request("2", stream=False)
                + head(method="GET", path="/livez")
                + chat_request("3")
            )
            await engine.wait_open(1)
            go.set()
            assert (await client.read_to_end()).chat().text == "a"
            assert b'"b"' in (await client.read_to_end()).body
            assert (await client.read_to_end()).json() == {"status": "ok"}
            assert (await client.read_to_end()).chat().text == "c"
        assert engine.statistics().most_open == 1


@pytest.mark.parametrize("size", [1, 3, 50])
async def test_requests_may_arrive_in_any_pieces(size: int) -> None:
    framed = head("transfer-encoding: chunked") + chunked(BODY)
    requests = http_request("POST", CHAT, body=BODY) + framed + http_request("POST", CHAT, body=BODY)
    async with open_engine() as engine, serving(engine) as gateway:
        with trio.fail_after(10), await gateway.connect() as client:
            for at in range(0, len(requests), size):
                await client.send(requests[at : at + size])
                await trio.lowlevel.checkpoint()
            assert [(await client.read_to_end()).status for _ in range(3)] == [200] * 3
        assert [request.body for request in engine.requests] == [engine.requests[0].body] * 3


async def test_blank_lines_in_front_of_a_request_are_skipped() -> None:
    async with open_engine() as engine, serving(engine) as gateway:
        with trio.fail_after(10), await gateway.connect() as client:
            for _ in range(2):
                await client.send(b"\r\n\r\n" + chat_request())
                assert (await client.read_to_end()).status == 200


# Bodies -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "framed",
    [
        chunked(BODY, 1),
        chunked(BODY, 10_000),
        chunked(BODY, extension=b" ;a=b;c"),
        chunked(BODY, trailer=b"x-checksum: 1\r\n"),
        chunked(BODY).replace(b"7\r\n", b"0007\r\n"),
    ],
    ids=["tiny chunks", "one chunk", "extensions", "a trailer", "leading zeros"],
)
async def test_chunked_bodies_reach_the_engine_with_a_length(framed: bytes) -> None:
    async with open_engine() as engine, serving(engine) as gateway:
        with trio.fail_after(10), await gateway.connect() as client:
            for _ in range(2):
                await client.send(head("transfer-encoding: chunked") + framed)
                assert (await client.read_to_end()).status == 200
        assert engine.requests[0].json()["messages"] == [{"role": "user", "content": "hi"}]
        assert engine.requests[0].header("transfer-encoding") is None
        assert engine.statistics().violations == ()


@pytest.mark.parametrize(
    "framed",
    [
        b"zz\r\n",
        b"-1\r\n",
        b"0x5\r\n",
        b" 5\r\n",
        b"5\n",
        b"2\r\nabc\r\n",
        b"2\r\nab\n",
        b"fffffffffffffffff\r\n",
        b"5;" + b"a" * 2000,
        b"0\r\n" + b"a: b\r\n" * 2000 + b"\r\n",
    ],
)
async def test_malformed_chunks_are_a_400_and_the_end_of_the_connection(framed: bytes) -> None:
    async with open_engine() as engine, serving(engine) as gateway:
        with trio.fail_after(10), await gateway.connect() as client:
            await client.send(head("transfer-encoding: chunked") + framed)
            await expect_last(client, 400, "bad_framing")
        assert engine.statistics().connections == 0


async def test_what_follows_a_malformed_chunk_is_never_taken_for_a_request() -> None:
    async with open_engine() as engine, serving(engine) as gateway:
        smuggled = b"0\r\n\r\n" + http_request("POST", CHAT, body=BODY)
        with trio.fail_after(10), await gateway.connect() as client:
            await client.send(head("transfer-encoding: chunked") + b"zz\r\n" + smuggled)
            await expect_last(client, 400, "bad_framing")
        with trio.fail_after(10), await gateway.connect() as client:
            await client.send(head("transfer-encoding: chunked") + b"zz\r\n")
            await client.read_head()
            await client.send(smuggled)
            await expect_last(client, 400, "bad_framing")
        assert engine.statistics().connections == 0


async def test_a_continue_is_sent_once_key_and_size_were_judged() -> None:
    async with open_engine() as engine, serving(engine) as gateway:
        with trio.fail_after(10), await gateway.connect() as client:
            for fields, body in (
                ((f"content-length: {len(BODY)}",), BODY),
                (("transfer-encoding: chunked",), chunked(BODY)),
            ):
                client.received.clear()
                await client.send(head("expect: 100-continue", *fields))
                await client.read_until(b"100 Continue")
                await client.send(body)
                assert (await client.read_to_end()).status == 200
            assert client.interims == [100, 100]


async def test_no_continue_is_sent_for_a_body_that_will_not_be_read() -> None:
    tenants = [tenant("acme", "key-a")]
    large = f"content-length: {2000 * KIB}"
    async with (
        open_engine() as engine,
        serving(engine, tenants=tenants, limits={"body_bytes": 1000 * KIB}) as gateway,
    ):
        for fields, status in (
            (("content-length: 10",), 401),
            (("authorization: Bearer key-a", large), 413),
            (("authorization: Bearer key-a", "content-encoding: gzip", "content-length: 10"), 415),
        ):
            with trio.fail_after(10), await gateway.connect() as client:
                await client.send(head("expect: 100-continue", *fields))
                answer = await client.read_to_end()
                assert (answer.status, client.interims) == (status, [])
                assert answer.header("connection") == "close"  # nobody knows whether the body comes now
                assert await client.read_closed() == "fin"


async def test_a_client_that_does_not_wait_for_the_continue_is_served() -> None:
    async with open_engine() as engine, serving(engine) as gateway:
        with trio.fail_after(10), await gateway.connect() as client:
            for _ in range(2):
                await client.send(head("expect: 100-continue", f"content-length: {len(BODY)}") + BODY)
                assert (await client.read_to_end()).status == 200


async def test_a_body_of_a_megabyte_passes() -> None:
    async with open_engine() as engine, serving(engine) as gateway:
        answer = await gateway.ask(chat_request("x" * 1_000_000))
        assert answer.chat().text == "ok"
        assert len(engine.requests[0].body) > 1_000_000


# Bounds -----------------------------------------------------------------------------------------------------


async def expect_last(client: RawClient, status: int, code: str) -> None:
    """Read an answer that ends the connection."""
    with trio.fail_after(10):
        answer = await client.read_to_end()
        assert (answer.status, error_code(answer)) == (status, code)
        assert answer.header("connection") == "close"
        assert await client.read_closed() == "fin"


async def test_a_silent_connection_is_closed_without_a_word() -> None:
    async with serving_nothing(limits={"head_timeout": 0.1}) as gateway:
        with trio.fail_after(10), await gateway.connect() as client:
            assert await client.read_closed() == "fin"
            assert client.received == b""
        assert gateway.turned_away() == {}


async def test_a_head_that_does_not_end_in_time_is_a_408() -> None:
    async with serving_nothing(limits={"head_timeout": 0.1}) as gateway:
        for begun in (b"G", head("x: y")[:-2]):
            with await gateway.connect() as client:
                await client.send(begun)
                await expect_last(client, 408, "request_timeout")
        assert gateway.turned_away() == {"request_timeout": 2}


async def test_an_idle_connection_is_closed_without_a_word() -> None:
    async with serving_nothing(limits={"keep_alive": 0.1}) as gateway:
        with trio.fail_after(10), await gateway.connect() as client:
            await client.request("GET", "/livez")
            answer = await client.read_to_end()
            assert answer.status == 200
            size = len(client.received)
            assert await client.read_closed() == "fin"
            assert len(client.received) == size


async def test_a_body_that_does_not_end_in_time_is_a_408() -> None:
    async with serving_nothing(limits={"body_timeout": 0.1}) as gateway:
        for begun in (head("content-length: 10") + b"{", head("transfer-encoding: chunked") + b"5\r\n{"):
            with trio.fail_after(10), await gateway.connect() as client:
                await client.send(begun)
                await expect_last(client, 408, "request_timeout")


async def test_a_head_has_a_bound_in_bytes() -> None:
    async with serving_nothing(limits={"head_bytes": 1000}) as gateway:
        fitting = head("x: " + "y" * (1000 - len(head("x: "))), method="GET", path="/livez")
        # the path is shorter than the usual one, so pad to the very bound
        fitting = fitting.replace(b"\r\n\r\n", b"z" * (1000 - len(fitting)) + b"\r\n\r\n")
        assert len(fitting) == 1000
        with trio.fail_after(10), await gateway.connect() as client:
            await client.send(fitting)
            assert (await client.read_to_end()).status == 200
        for large in (fitting.replace(b"\r\n\r\n", b"z\r\n\r\n"), b"GET /" + b"a" * 5000):
            with await gateway.connect() as client:
                await client.send(large)
                await expect_last(client, 431, "headers_too_large")


async def test_a_head_has_a_bound_in_lines() -> None:
    async with serving_nothing(limits={"head_count": 10}) as gateway:
        with trio.fail_after(10), await gateway.connect() as client:
            await client.send(head(*["x: y"] * 9, method="GET", path="/livez"))
            assert (await client.read_to_end()).status == 200
            await client.send(head(*["x: y"] * 10, method="GET", path="/livez"))
            await expect_last(client, 431, "headers_too_large")


async def test_a_body_has_a_bound() -> None:
    async with open_engine() as engine, serving(engine, limits={"body_bytes": len(BODY)}) as gateway:
        with trio.fail_after(10), await gateway.connect() as client:
            await client.send(http_request("POST", CHAT, body=BODY))
            assert (await client.read_to_end()).status == 200
            await client.send(http_request("POST", CHAT, body=BODY + b" "))
            answer = await client.read_to_end()
            assert (answer.status, error_code(answer)) == (413, "request_too_large")
            await client.send(head("transfer-encoding: chunked") + chunked(BODY))
            assert (await client.read_to_end()).status == 200
            await client.send(head("transfer-encoding: chunked") + chunked(BODY + b" " * 100))
            assert (await client.read_to_end()).status == 413
        assert engine.statistics().requests == 2


async def test_bodies_that_have_no_worker_yet_are_bounded_in_total(nursery: trio.Nursery) -> None:
    go = trio.Event()
    async with (
        open_engine((WaitFor(go), *chat_stream("ok"))) as engine,
        serving(
            engine, worker={"slots": 1}, limits={"unplaced_bytes": 10_000, "body_bytes": 10_000}
        ) as gateway,
    ):
        nursery.start_soon(gateway.ask, chat_request("x" * 5000))
        await engine.wait_open(1)
        nursery.start_soon(gateway.ask, chat_request("x" * 5000))
        await gateway.queued(1)
        for fields in (("content-length: 6000",), ("expect: 100-continue", "content-length: 6000")):
            with trio.fail_after(10), await gateway.connect() as client:
                await client.send(head(*fields))
                answer = await client.read_to_end()
                assert (answer.status, error_code(answer)) == (429, "queue_full")
                assert int(answer.header("retry-after") or "") >= 1
                assert client.interims == []
        with trio.fail_after(10), await gateway.connect() as client:
            await client.send(head("transfer-encoding: chunked") + chunked(b"x" * 6000, 1000))
            assert (await client.read_to_end()).status == 429
        go.set()
        await gateway.settled(2)
        assert gateway.gateway.server.room.used == 0


SMALL_ROOM: Final[dict[str, Any]] = {"unplaced_bytes": 400 * KIB, "body_bytes": 400 * KIB}


async def test_a_body_that_is_only_declared_takes_no_room() -> None:
    async with open_engine(chat_stream("ok")) as engine, serving(engine, limits=SMALL_ROOM) as gateway:
        with ExitStack() as stack:
            for _ in range(8):
                idle = stack.enter_context(await gateway.connect())
                await idle.send(head(f"content-length: {300 * KIB}") + b"{")
            await gateway.until(lambda: gateway.gateway.server.room.used == 8)
            with trio.fail_after(10):
                assert (await gateway.ask(chat_request("x" * 300 * KIB))).status == 200
        await gateway.settled(1)
        await gateway.until(lambda: gateway.gateway.server.room.used == 0)
        books = gateway.gateway.books
        assert (books.arrived, books.accepted, books.reading) == (9, 1, 0)
        assert books.turned_away.total() == 8


@pytest.mark.parametrize("size", [60 * KIB, 360 * KIB])
@pytest.mark.parametrize("form", ["sized", "chunked"])
async def test_a_body_that_finds_no_room_in_its_middle_is_refused_and_gives_back_what_it_had(
    size: int, form: str, nursery: trio.Nursery
) -> None:
    go = trio.Event()
    async with (
        open_engine((WaitFor(go), *chat_stream("ok"))) as engine,
        serving(engine, worker={"slots": 1}, limits=SMALL_ROOM) as gateway,
    ):
        room = gateway.gateway.server.room
        nursery.start_soon(gateway.ask, chat_request())
        await engine.wait_open(1)
        with trio.fail_after(10), await gateway.connect() as client:
            framing = f"content-length: {size}" if form == "sized" else "transfer-encoding: chunked"
            body = b"x" * size if form == "sized" else chunked(b"x" * size, 4096)
            await client.send(head(framing) + body[:1000])
            await gateway.until(lambda: room.used > 900)
            nursery.start_soon(gateway.ask, chat_request("x" * 350 * KIB))
            await gateway.queued(1)
            before = room.used
            assert 350 * KIB < before < 352 * KIB
            await client.send(body[1000:])
            answer = await client.read_to_end()
            assert (answer.status, error_code(answer)) == (429, "queue_full")
            await gateway.until(lambda: room.used < before - 900)
            if size < 64 * KIB:  # the rest of it was dropped
                await client.send(http_request("GET", "/livez"))
                assert (await client.read_to_end()).status == 200
            else:
                assert answer.header("connection") == ("close" if form == "sized" else None)
                assert await client.read_closed() == "fin"
        go.set()
        await gateway.settled(2)
        assert room.used == 0
        assert gateway.gateway.books.turned_away == {"queue_full": 1}


async def read_body_that_came_at_once(framed: bytes, beside: Callable[[], Awaitable[None]]) -> bytes:
    """Read a chunked body that arrived together with its head, while something else runs too."""
    limits = ServerLimits(1, len(framed), 10, 10, len(framed), 10, 10, len(framed))
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    watch = HangupWatch()
    with theirs, ours, Hangup(watch, ours.fileno()) as hangup:
        connection = Connection(ours, hangup, limits.head_bytes)
        connection.heads.feed(framed)
        request = parse_request_head(head("transfer-encoding: chunked"), limits.head_count)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(beside)
            body = await Incoming(request, connection, limits, UnplacedBytes(len(framed))).read_body()
            nursery.cancel_scope.cancel()
    watch.close()
    return body


@pytest.mark.parametrize("wait", [Connection.receive, Connection.wait_writable])
async def test_who_waits_for_a_connection_that_is_closed_here_is_told_before_its_number_comes_again(
    wait: Callable[[Connection], Awaitable[object]], nursery: trio.Nursery
) -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    number = ours.fileno()
    watch = HangupWatch()
    told = trio.Event()
    with theirs, Hangup(watch, number) as hangup:
        connection = Connection(ours, hangup, 1000)
        while connection.write(b"x" * 64 * KIB):
            pass

        async def waiting() -> None:
            with pytest.raises(ClientGone):
                await wait(connection)
            told.set()

        nursery.start_soon(waiting)
        await wait_all_tasks_blocked()
        connection.close()
        with trio.fail_after(10):
            await told.wait()
            new, other = socket.socketpair()
            with new, other:
                assert number in (new.fileno(), other.fileno())
                await trio.lowlevel.wait_writable(number)
    watch.close()


async def test_others_have_their_turn_while_a_body_in_tiny_chunks_is_read() -> None:
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await trio.lowlevel.checkpoint()

    framed = chunked(b"x" * 10 * KIB, 1)
    assert await read_body_that_came_at_once(framed, others) == b"x" * 10 * KIB
    assert turns >= len(framed) // CHUNKED_STEP - 2  # who is first, and who sees the last step, is chance


async def test_a_body_in_tiny_chunks_costs_no_more_memory_than_another() -> None:
    framed = chunked(b"xy" * 50 * KIB, 2)
    tracemalloc.start()
    try:
        await read_body_that_came_at_once(framed, trio.sleep_forever)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3 * len(framed)


async def test_connections_beyond_their_number_wait_until_one_ends() -> None:
    async with serving_nothing(limits={"connections": 2}) as gateway:
        with await gateway.connect() as first, await gateway.connect() as second:
            for client in (first, second):
                await client.request("GET", "/livez")
                with trio.fail_after(10):
                    await client.read_to_end()
            with await gateway.connect() as third:
                await third.request("GET", "/livez")
                with trio.move_on_after(0.1):
                    await third.read_until(b"HTTP")
                assert third.received == b""
                assert gateway.gateway.server.open == 2
                first.leave_fin()
                with trio.fail_after(10):
                    assert (await third.read_to_end()).status == 200


# Refusals while the client still sends ----------------------------------------------------------------------


async def test_a_little_of_an_unread_body_is_dropped_and_the_connection_kept() -> None:
    tenants = [tenant("acme", "key-a")]
    async with open_engine() as engine, serving(engine, tenants=tenants) as gateway:
        with trio.fail_after(10), await gateway.connect() as client:
            for request in (chat_request("x" * 60 * KIB), head("transfer-encoding: chunked") + chunked(BODY)):
                await client.send(request)
                assert (await client.read_to_end()).status == 401
            await client.send(chat_request(key="key-a"))
            assert (await client.read_to_end()).status == 200


async def test_after_a_large_unread_body_the_connection_ends_but_the_answer_is_read() -> None:
    tenants = [tenant("acme", "key-a")]
    async with open_engine() as engine, serving(engine, tenants=tenants) as gateway:
        with trio.fail_after(10), await gateway.connect() as client:
            await client.send(chat_request("x" * 600 * KIB))
            answer = await client.read_to_end()
            assert answer.status == 401
            assert await client.read_closed() == "fin"


async def test_a_client_that_goes_on_sending_for_ever_is_not_listened_to_for_ever() -> None:
    async with serving_nothing(limits={"body_bytes": 1000, "unplaced_bytes": 1000}) as gateway:
        with trio.fail_after(10), await gateway.connect() as client:
            await client.send(head("content-length: 100000000"))
            with suppress(OSError):
                while True:
                    await client.send(b"x" * 100_000)
        await gateway.until(lambda: gateway.gateway.server.open == 0)
