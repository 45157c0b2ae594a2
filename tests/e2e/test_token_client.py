"""The shipped client before a real gateway: losses, slow consumers, many streams, refusals."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Final

import pytest
import trio

from tests.e2e.cutting import Network, network_to
from tests.e2e.process import process_serving
from tests.e2e.serving import LIMIT, Serving, serving, tenant
from tests.e2e.tls import issue
from trio_gateway.client import (
    SocketLost,
    SocketRejected,
    StreamCancelled,
    StreamFailed,
    Tokens,
    TokenStream,
    open_tokens,
)
from trio_gateway.testing import Hold, Repeat, Script, chat_chunk, chat_stream, open_engine, until

BODY: Final = {"model": "m1", "messages": [{"role": "user", "content": "x"}]}
KEY: Final = "tg_acme_0123456789abcdef0123456789abcdef"
ACME: Final = tenant("acme", KEY)
WINDOW: Final = {"resume_window": 1.0}  # seconds that the gateway keeps streams here
WORDS: Final = [f"w{number} " for number in range(20)]
TEXT: Final = "".join(WORDS)
DELTAS: Final = len(WORDS) + 2  # and the role, and the finish reason


def address_of(gateway: Serving) -> tuple[str, int]:
    address = gateway.address
    assert isinstance(address, tuple)
    return address


def url_of(gateway: Serving, scheme: str = "ws") -> str:
    return "{}://{}:{}".format(scheme, *address_of(gateway))


def endless(*texts: str) -> Script:
    """An answer that begins so and goes on for ever."""
    begun = chat_stream(*texts, finish=None, done=False, end=False)
    return (*begun, Repeat((chat_chunk({"content": "more "}),), every=0.002))


async def numbers(stream: TokenStream) -> list[int]:
    return [delta.seq async for delta in stream]


# Losses -----------------------------------------------------------------------------------------------------


def after_delta(seq: int) -> Any:
    """Cut the first connection right behind this delta; 0: behind the gateway's first word."""
    marker = b'"type":"accepted"' if seq == 0 else b'"seq":%d,' % seq

    def plan(number: int, came: bytes) -> int | None:
        found = came.find(marker) if number == 1 else -1
        end = -1 if found < 0 else came.find(b"}", found)
        return None if end < 0 else _end_of_frame(came, end)

    return plan


def _end_of_frame(came: bytes, place: int) -> int | None:
    """Answer where the frame around ``place`` ends; None: that is not known yet."""
    start = came.index(b"\r\n\r\n") + 4
    while start <= place:
        size, header = came[start + 1], 2
        if size == 126:
            size, header = int.from_bytes(came[start + 2 : start + 4]), 4
        start += header + size
    return start if start <= len(came) else None


async def test_cut_behind_every_delta_the_answer_comes_whole_and_each_delta_once() -> None:
    async with (
        open_engine(chat_stream(*WORDS)) as engine,
        serving(engine, delivery=WINDOW) as gateway,
        network_to(address_of(gateway)) as network,
    ):
        for seq in range(DELTAS):
            network.plan = after_delta(seq)
            network.connections = 0
            with trio.fail_after(LIMIT):
                async with (
                    open_tokens(network.url) as tokens,
                    tokens.generate(BODY, credit=8, resumable=True) as stream,
                ):
                    deltas = [delta async for delta in stream]
            assert network.connections == 2
            assert [delta.seq for delta in deltas] == list(range(1, DELTAS + 1))
            assert "".join(delta.text for delta in deltas) == TEXT
            assert stream.finish_reasons == ["stop"]
            record = await gateway.settled(seq + 1)
            assert (record.outcome, record.tokens_acknowledged) == ("completed", len(WORDS))
        assert engine.statistics().requests == DELTAS


@pytest.mark.parametrize("step", [701, 937, 1409])
async def test_cut_in_the_middle_of_frames_again_and_again_the_answer_comes_whole(step: int) -> None:
    def plan(number: int, came: bytes) -> int | None:
        return 500 + step if len(came) >= 500 + step else None

    async with (
        open_engine(chat_stream(*WORDS)) as engine,
        serving(engine, delivery=WINDOW) as gateway,
        network_to(address_of(gateway)) as network,
    ):
        network.plan = plan
        with trio.fail_after(LIMIT):
            async with (
                open_tokens(network.url) as tokens,
                tokens.generate(BODY, credit=4, resumable=True) as stream,
            ):
                assert await stream.text() == TEXT
        assert network.connections > 3


async def test_a_stream_that_is_not_resumable_is_lost_with_its_socket_and_the_next_one_is_served() -> None:
    async with (
        open_engine(endless("one "), chat_stream(*WORDS)) as engine,
        serving(engine) as gateway,
        network_to(address_of(gateway)) as network,
    ):
        with trio.fail_after(LIMIT):
            async with open_tokens(network.url) as tokens:
                async with tokens.generate(BODY) as stream:
                    await anext(stream)
                    network.cut()
                    with pytest.raises(SocketLost) as raised:
                        await stream.text()
                assert raised.value.request_id == stream.request_id
                assert (await gateway.settled()).outcome == "client_gone"
                async with tokens.generate(BODY) as stream:
                    assert await stream.text() == TEXT


async def test_a_gateway_that_was_started_again_does_not_know_the_stream_and_serves_the_next(
    tmp_path: Path,
) -> None:
    async with open_engine(endless("one "), chat_stream(*WORDS)) as engine:
        with trio.fail_after(60):
            async with process_serving(engine, folder=tmp_path) as first:
                assert isinstance(first.address, tuple)
                async with (
                    network_to(first.address) as network,
                    open_tokens(network.url) as tokens,
                    tokens.generate(BODY, resumable=True) as stream,
                ):
                    await anext(stream)
                    first.process.kill()
                    await first.exit_code()
                    async with process_serving(engine, folder=tmp_path) as second:
                        assert isinstance(second.address, tuple)
                        network.target = second.address
                        with pytest.raises(StreamFailed) as raised:
                            await stream.text()
                        assert raised.value.code == "request_not_found"
                        assert raised.value.request_id == stream.request_id
                        async with tokens.generate(BODY) as other:
                            assert await other.text() == TEXT


async def test_a_gateway_that_shuts_down_is_known_to_go_away_takes_no_other_stream_and_ends_the_last(
    tmp_path: Path,
) -> None:
    limits = {"readiness_delay": 0, "grace": 1}
    async with open_engine((*chat_stream(*WORDS)[:4], Hold())) as engine:
        with trio.fail_after(30):
            async with process_serving(engine, folder=tmp_path, shutdown=limits) as gateway:
                assert isinstance(gateway.address, tuple)
                url = "http://{}:{}".format(*gateway.address)
                async with open_tokens(url) as tokens, tokens.generate(BODY, resumable=True) as stream:
                    await anext(stream)
                    gateway.process.terminate()
                    await gateway.logged("shutting_down")
                    await until(lambda: tokens.going_away is not None)
                    with pytest.raises(StreamFailed) as refused:
                        async with tokens.generate(BODY):
                            raise AssertionError
                    assert refused.value.code == "gateway_draining"
                    assert refused.value.retry_after is not None
                    with pytest.raises(StreamFailed) as ended:
                        await stream.text()
                    assert ended.value.code == "gateway_draining"
                assert await gateway.exit_code() == 0


# Consumers --------------------------------------------------------------------------------------------------


async def test_a_consumer_that_stands_still_holds_up_its_own_engine_and_nobody_else() -> None:
    async with (
        open_engine(endless(), chat_stream(*WORDS), send_buffer=4096) as engine,
        serving(engine, delivery={"buffer_bytes": "16 KiB"}) as gateway,
    ):
        with trio.fail_after(LIMIT):
            async with open_tokens(url_of(gateway)) as tokens, tokens.generate(BODY, credit=5) as slow:
                await anext(slow)
                for _ in range(5):
                    async with tokens.generate(BODY, credit=3) as fast:
                        assert await fast.text() == TEXT
                assert slow.state.waiting <= 5
                assert [(await anext(slow)).seq for _ in range(20)] == list(range(2, 22))
        assert (await gateway.settled(6)).outcome == "client_cancelled"


async def test_what_is_acknowledged_is_what_was_consumed() -> None:
    async with open_engine(endless()) as engine, serving(engine) as gateway:
        for number, count in enumerate((0, 1, 2, 7, 30), 1):
            with trio.fail_after(LIMIT):
                async with open_tokens(url_of(gateway)) as tokens, tokens.generate(BODY, credit=6) as stream:
                    last = None
                    for _ in range(count):
                        last = await anext(stream)
            record = await gateway.settled(number)
            # The last one is in the hands of its consumer, who never came for another.
            consumed = 0 if last is None else max(last.tokens - 1, 0)
            assert (record.outcome, record.tokens_acknowledged or 0) == ("client_cancelled", consumed)


async def test_leaving_a_stream_ends_it_at_the_gateway_and_its_socket_serves_on() -> None:
    async with (
        open_engine(endless("one "), chat_stream(*WORDS)) as engine,
        serving(engine, delivery=WINDOW) as gateway,
    ):
        with trio.fail_after(LIMIT):
            async with open_tokens(url_of(gateway)) as tokens:
                with trio.move_on_after(0.2):
                    async with tokens.generate(BODY, resumable=True) as stream:
                        await stream.text()
                assert (await gateway.settled()).outcome == "client_cancelled"
                async with tokens.generate(BODY) as stream:
                    assert await stream.text() == TEXT


async def test_a_cancelled_client_leaves_nothing_that_goes_on() -> None:
    async with open_engine(endless("one ")) as engine, serving(engine, delivery=WINDOW) as gateway:
        with trio.fail_after(LIMIT):
            with trio.CancelScope() as scope:
                async with (
                    open_tokens(url_of(gateway)) as tokens,
                    tokens.generate(BODY, resumable=True) as stream,
                ):
                    await anext(stream)
                    scope.cancel()
                    await stream.text()
            assert (await gateway.settled()).outcome == "client_cancelled"


async def test_a_stream_that_its_owner_cancels_over_http_is_no_whole_answer() -> None:
    async with open_engine(endless("one ")) as engine, serving(engine) as gateway:
        with trio.fail_after(LIMIT):
            async with open_tokens(url_of(gateway)) as tokens, tokens.generate(BODY) as stream:
                await anext(stream)
                answer = await gateway.fetch("DELETE", f"/v1/requests/{stream.request_id}")
                assert answer.status in (200, 202, 204)
                with pytest.raises(StreamCancelled):
                    await stream.text()


# Many -------------------------------------------------------------------------------------------------------


async def test_32_streams_at_a_time_one_after_the_other_on_one_socket() -> None:
    got: Counter[str] = Counter()

    async def consume(tokens: Tokens, number: int) -> None:
        async with tokens.generate(BODY, credit=1 + number % 7, resumable=number % 2 == 0) as stream:
            got[await stream.text()] += 1

    async with (
        open_engine(chat_stream(*WORDS)) as engine,
        serving(engine, worker={"slots": 16}, delivery=WINDOW) as gateway,
        network_to(address_of(gateway)) as network,
    ):
        with trio.fail_after(3 * LIMIT):
            async with open_tokens(network.url) as tokens, trio.open_nursery() as nursery:
                for number in range(96):
                    nursery.start_soon(consume, tokens, number)
        assert got == {TEXT: 96}
        assert network.connections == 1
        assert {record.outcome for record in gateway.records} == {"completed"}


async def test_32_streams_survive_the_loss_of_their_socket_and_one_of_them_stands_still() -> None:
    got: Counter[str] = Counter()
    begun: list[str] = []

    async def consume(tokens: Tokens, network: Network) -> None:
        async with tokens.generate(BODY, credit=4, resumable=True) as stream:
            begun.append((await anext(stream)).text)
            if len(begun) == 31:
                network.cut()
            got[begun[0] + await stream.text()] += 1

    async with (
        open_engine(endless(), *[chat_stream(*WORDS)] * 31) as engine,
        serving(engine, worker={"slots": 40}, delivery=WINDOW) as gateway,
        network_to(address_of(gateway)) as network,
    ):
        with trio.fail_after(3 * LIMIT):
            async with (
                open_tokens(network.url) as tokens,
                tokens.generate(BODY, credit=2, resumable=True) as still,
            ):
                await anext(still)
                async with trio.open_nursery() as nursery:
                    for _ in range(31):
                        nursery.start_soon(consume, tokens, network)
                assert [(await anext(still)).seq for _ in range(5)] == [2, 3, 4, 5, 6]
        assert got == {TEXT: 31}
        assert network.connections == 2


# Keys, TLS, and refusals ------------------------------------------------------------------------------------


async def test_a_wrong_key_is_told_at_once() -> None:
    async with open_engine() as engine, serving(engine, tenants=[ACME]) as gateway:
        for key in ("tg_acme_wrong", None):
            with trio.fail_after(LIMIT):
                # Without any key the gateway waits for a message that brings one.
                with pytest.raises((SocketRejected, SocketLost)) as raised:
                    async with open_tokens(url_of(gateway), key=key) as tokens, tokens.generate(BODY):
                        raise AssertionError
            if key is None:
                assert isinstance(raised.value, SocketLost)
                assert raised.value.close_code == 4401
            else:
                assert isinstance(raised.value, SocketRejected)
                assert (raised.value.status, raised.value.code) == (401, "invalid_api_key")
                assert raised.value.request_id


async def test_a_key_opens_the_socket_and_a_refused_request_leaves_it_open() -> None:
    async with open_engine(chat_stream(*WORDS)) as engine, serving(engine, tenants=[ACME]) as gateway:
        with trio.fail_after(LIMIT):
            async with open_tokens(url_of(gateway), key=KEY) as tokens:
                with pytest.raises(StreamFailed) as raised:
                    async with tokens.generate({**BODY, "model": "nobody"}):
                        raise AssertionError
                assert (raised.value.code, raised.value.param) == ("model_not_found", "model")
                async with tokens.generate(BODY) as stream:
                    assert await stream.text() == TEXT
                    assert stream.usage is None or stream.usage["completion_tokens"] == len(WORDS)


async def test_a_full_queue_says_when_to_come_back() -> None:
    async with (
        open_engine(endless("one ")) as engine,
        serving(engine, worker={"slots": 1}, admission={"max_queued": 1}) as gateway,
    ):
        with trio.fail_after(LIMIT):
            async with open_tokens(url_of(gateway)) as tokens, tokens.generate(BODY) as running:
                await anext(running)
                async with tokens.generate(BODY) as waiting:
                    assert waiting.position == 1
                    with pytest.raises(StreamFailed) as raised:
                        async with tokens.generate(BODY):
                            raise AssertionError
        assert raised.value.code == "queue_full"
        assert raised.value.retry_after is not None
        assert raised.value.retry_after > 0


async def test_over_tls_an_answer_comes_whole_and_a_stranger_is_not_trusted(tmp_path: Path) -> None:
    issued = issue(tmp_path)
    async with (
        open_engine(chat_stream(*WORDS)) as engine,
        serving(engine, server=issued.server, delivery=WINDOW) as gateway,
        network_to(address_of(gateway)) as network,
    ):
        network.plan = lambda number, came: 6000 if number == 1 and len(came) > 6000 else None
        url = network.url.replace("http:", "wss:")
        with trio.fail_after(LIMIT):
            with pytest.raises(SocketLost, match="certificate") as raised:
                async with open_tokens(url):
                    raise AssertionError
            assert raised.value.code == "unreachable"
            network.connections = 0
            async with (
                open_tokens(url, tls=issued.trust()) as tokens,
                tokens.generate(BODY, credit=4, resumable=True) as stream,
            ):
                assert await stream.text() == TEXT
        assert network.connections == 2


async def serve_bytes(answer: bytes, stream: trio.SocketStream) -> None:
    async with stream:
        await stream.receive_some(4096)
        if answer:
            await stream.send_all(answer)


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (b"", "unreachable"),
        (b"SSH-2.0-nobody\r\n", "unreachable"),
        (
            b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n",
            "unreachable",
        ),
        (b"HTTP/1.1 101 Sw\r\nsec-websocket-protocol: \xff\xff\r\n\r\n", "unreachable"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi", "http_200"),
        (b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 4\r\n\r\noops", "http_502"),
        (b"HTTP/1.1 429 Slow\r\nretry-after: 7\r\ncontent-length: 0\r\n\r\n", "http_429"),
        (b"HTTP/1.1 503 No\r\nretry-after: 1" + b"0" * 400 + b"\r\ncontent-length: 0\r\n\r\n", "http_503"),
    ],
)
async def test_what_is_no_gateway_is_said_to_be_none(answer: bytes, code: str) -> None:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, lambda stream: serve_bytes(answer, stream), [listener])
        with trio.fail_after(LIMIT), pytest.raises((SocketLost, SocketRejected)) as raised:
            async with open_tokens("ws://{}:{}".format(*listener.socket.getsockname())):
                raise AssertionError
        nursery.cancel_scope.cancel()
    assert raised.value.code == code
    assert raised.value.retry_after == (7 if b"retry-after: 7" in answer else None)
