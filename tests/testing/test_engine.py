"""The scripted engine says what it is told, breaks where it is told, and sees how its peer leaves."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from trio_gateway.testing import (
    Chunk,
    CloseFin,
    CloseReset,
    EndChunks,
    EngineRequest,
    Event,
    Head,
    Hold,
    Json,
    Raw,
    RawClient,
    ReadOnly,
    Repeat,
    Script,
    ScriptedEngine,
    Wait,
    WaitFor,
    chat_answer,
    chat_request,
    chat_stream,
    completion_answer,
    completion_stream,
    embedding_answer,
    error_answer,
    error_event,
    http_request,
    json_request,
    make_certificate,
    open_engine,
    refusing_port,
    silent_port,
    until,
)
from trio_gateway.testing._engine_connection import encode_event, encode_json

SMALL_BUFFER = 4096


@asynccontextmanager
async def talking_to(engine: ScriptedEngine, receive_buffer: int | None = None) -> AsyncIterator[RawClient]:
    address = ("127.0.0.1", engine.port)
    with await RawClient.connect(address, receive_buffer=receive_buffer) as client:
        yield client


# What it says


async def test_a_stream_is_what_its_script_says() -> None:
    async with open_engine(chat_stream("Hel", "lo", usage=(3, 2))) as engine, talking_to(engine) as client:
        await client.send(chat_request())
        answer = await client.read_to_end()
    reading = answer.chat()
    assert (answer.status, answer.ended, answer.chunks) == (200, "complete", 6)
    assert (reading.text, reading.finishes, reading.roles, reading.done) == ("Hello", {0: "stop"}, {0: 1}, 1)
    assert reading.usage == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


async def test_a_buffered_answer_is_sized() -> None:
    async with open_engine(chat_answer("Hello", choices=2)) as engine, talking_to(engine) as client:
        await client.send(chat_request(stream=False))
        answer = await client.read_to_end()
    choices = answer.json()["choices"]
    assert isinstance(choices, list)
    assert [choice["message"]["content"] for choice in choices] == ["Hello", "Hello"]
    assert answer.header("content-length") == str(len(answer.body))


async def test_each_request_has_its_script_and_the_last_one_serves_the_rest() -> None:
    async with open_engine(error_answer(500), chat_answer("late")) as engine, talking_to(engine) as client:
        statuses = []
        for _ in range(3):
            await client.send(chat_request(stream=False))
            statuses.append((await client.read_to_end()).status)
    assert statuses == [500, 200, 200]


async def test_new_scripts_serve_the_requests_from_then_on() -> None:
    async with open_engine(error_answer(503)) as engine, talking_to(engine) as client:
        await client.send(chat_request(stream=False))
        refused = await client.read_to_end()
        engine.rescript()
        await client.send(chat_request(stream=False))
        served = await client.read_to_end()
    assert (refused.status, served.status) == (503, 200)


async def test_a_function_may_write_the_script() -> None:
    def echo(request: EngineRequest) -> Script:
        return chat_answer(str(request.json()["model"]))

    async with open_engine(echo) as engine, talking_to(engine) as client:
        await client.send(chat_request(stream=False, model="mine"))
        answer = await client.read_to_end()
    assert b'"content":"mine"' in answer.body


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stream", [True, False])
async def test_without_a_script_it_is_a_good_engine(path: str, stream: bool) -> None:
    body = {"model": "m7", "stream": stream, "stream_options": {"include_usage": True}}
    async with open_engine() as engine, talking_to(engine) as client:
        await client.send(json_request(path, body))
        answer = await client.read_to_end()
    if stream:
        reading = answer.chat()
        assert (reading.text, reading.models, reading.done) == ("ok", {"m7"}, 1)
        assert reading.usage is not None
    else:
        assert answer.json()["model"] == "m7"
        assert b'"ok"' in answer.body


async def test_a_good_engine_embeds() -> None:
    async with open_engine() as engine, talking_to(engine) as client:
        await client.send(json_request("/v1/embeddings", {"model": "m1", "input": "x"}))
        answer = await client.read_to_end()
    assert answer.body == encode_json(embedding_answer([0.25, -0.5])[0]).split(b"\r\n\r\n")[1]  # type: ignore[arg-type]


async def test_health_and_models_are_answered_and_are_no_requests() -> None:
    async with open_engine(error_answer(500), models=("a", "b")) as engine, talking_to(engine) as client:
        answers = []
        for target in ("/health", "/v1/models", "/nowhere"):
            await client.request("GET", target)
            answers.append(await client.read_to_end())
        statistics = engine.statistics()
    assert [answer.status for answer in answers] == [200, 200, 404]
    assert b'"id":"b"' in answers[1].body
    assert statistics.requests == 0


async def test_raw_bytes_go_out_untouched() -> None:
    raw = b"HTTP/1.0 200 Fine\r\n\r\nno framing at all"
    async with open_engine((Raw(raw), CloseFin())) as engine, talking_to(engine) as client:
        await client.send(chat_request())
        answer = await client.read_to_end()
    assert bytes(client.received) == raw
    assert (answer.ended, answer.body) == ("complete", b"no framing at all")


async def test_steps_wait_for_the_test() -> None:
    gate = trio.Event()
    script = (*chat_stream("a", finish=None, done=False, end=False), WaitFor(gate), *chat_stream("b")[2:])
    async with open_engine(script) as engine, talking_to(engine) as client:
        await client.send(chat_request())
        await client.read_events(2)
        assert client.answers[0].ended is None
        gate.set()
        answer = await client.read_to_end()
    assert answer.chat().text == "ab"


async def test_a_step_repeats_as_often_as_it_says() -> None:
    script = (Head(), Repeat((Chunk(b": x\n\n"), Wait(0)), times=3), Event("[DONE]"), EndChunks())
    async with open_engine(script) as engine, talking_to(engine) as client:
        await client.send(chat_request())
        answer = await client.read_to_end()
    assert answer.body == b": x\n\n" * 3 + b"data: [DONE]\n\n"


async def test_it_speaks_on_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    async with open_engine(socket_path=path) as engine:
        assert engine.url == f"http+unix://{path}"
        with await RawClient.connect(path) as client:
            await client.send(chat_request(stream=False))
            answer = await client.read_to_end()
    assert answer.status == 200


async def test_it_speaks_tls_with_a_certificate_that_clients_can_trust(tmp_path: Path) -> None:
    certificate = make_certificate(tmp_path)
    context = ssl.create_default_context(cafile=str(certificate.authority))
    async with open_engine(tls=certificate.server) as engine:
        tcp = await trio.open_tcp_stream("127.0.0.1", engine.port)
        async with trio.SSLStream(tcp, context, server_hostname="127.0.0.1", https_compatible=True) as stream:
            await stream.send_all(chat_request(stream=False))
            head = await stream.receive_some()
    assert engine.url.startswith("https://127.0.0.1:")
    assert head.startswith(b"HTTP/1.1 200")


async def test_a_refused_certificate_is_counted(tmp_path: Path) -> None:
    certificate = make_certificate(tmp_path)
    async with open_engine(tls=certificate.server) as engine:
        tcp = await trio.open_tcp_stream("127.0.0.1", engine.port)
        stream = trio.SSLStream(tcp, ssl.create_default_context(), server_hostname="127.0.0.1")
        with pytest.raises(trio.BrokenResourceError):
            await stream.do_handshake()
        await trio.aclose_forcefully(stream)
        await engine.wait_disconnected()
        assert engine.statistics().failed_handshakes == 1


# How it breaks


@pytest.mark.parametrize(("step", "how"), [(CloseFin(), "fin"), (CloseReset(), "reset")])
async def test_a_cut_stream_is_seen_as_cut(step: CloseFin | CloseReset, how: str) -> None:
    gate = trio.Event()  # a reset would overtake the events
    script = (*chat_stream("a", finish=None, done=False, end=False), WaitFor(gate), step)
    async with open_engine(script) as engine, talking_to(engine) as client:
        await client.send(chat_request())
        await client.read_events(2)
        gate.set()
        answer = await client.read_to_end()
        await engine.wait_idle()
        request = await engine.request()
    assert (answer.ended, answer.was_cut, answer.chat().text) == (how, True, "a")
    assert request.closed_by is None


async def test_a_message_that_was_not_ended_is_held_open() -> None:
    async with open_engine(chat_stream("a", end=False)) as engine, talking_to(engine) as client:
        await client.send(chat_request())
        await client.read_events(4)
        request = await engine.request()
        assert not request.over.is_set()
        client.leave_fin()
        await request.closed.wait()
        await engine.wait_idle()
    assert request.over.is_set()


async def test_an_answer_may_come_before_the_body_was_read() -> None:
    script = (ReadOnly(10), *error_answer(413))
    async with open_engine(script) as engine, talking_to(engine) as client:
        await client.send(http_request("POST", "/v1/x", body=b"x" * 100))
        answer = await client.read_to_end()
        request = await engine.request()
    assert answer.status == 413
    assert request.body == b"x" * 10


async def test_a_connection_of_an_engine_that_says_so_is_closed_after_the_answer() -> None:
    script = error_answer(400, headers=(("connection", "close"),))
    async with open_engine(script) as engine, talking_to(engine) as client:
        await client.send(chat_request())
        answer = await client.read_to_end()
        closed = await client.read_closed()
    assert (answer.status, closed) == (400, "fin")


async def test_an_engine_that_dies_cuts_every_connection() -> None:
    async with open_engine((Head(), Hold())) as engine, talking_to(engine) as one, talking_to(engine) as two:
        for client in (one, two):
            await client.send(chat_request())
            await client.read_head()
        engine.close_connections(reset=True)
        assert [await client.read_closed() for client in (one, two)] == ["reset", "reset"]
        await engine.wait_disconnected()
    assert [request.closed_by for request in engine.requests] == [None, None]


async def test_a_refusing_port_refuses() -> None:
    with refusing_port() as port, pytest.raises(ConnectionRefusedError):
        await RawClient.connect(("127.0.0.1", port))


async def test_connecting_to_a_silent_port_takes_for_ever() -> None:
    with silent_port() as port:
        with trio.move_on_after(0.3) as scope:
            await RawClient.connect(("127.0.0.1", port))
        assert scope.cancelled_caught


# What it sees


async def test_a_request_is_recorded_whole() -> None:
    async with open_engine() as engine, talking_to(engine) as client:
        headers = (("x-one", "1"), ("x-one", "2"))
        await client.send(chat_request("hello", stream=False, key="k", headers=headers))
        await client.read_to_end()
        request = await engine.request()
    assert (request.number, request.method, request.target) == (1, "POST", "/v1/chat/completions")
    assert request.header("X-One") == "1, 2"
    assert request.header("authorization") == "Bearer k"
    assert request.json()["messages"] == [{"role": "user", "content": "hello"}]
    assert request.arrived <= trio.current_time()
    assert request.over.is_set()
    assert request.bytes_sent == len(client.received)


async def test_a_chunked_request_is_read_too() -> None:
    raw = b"POST /v1/x HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
    async with open_engine(chat_answer()) as engine, talking_to(engine) as client:
        await client.send(raw)
        await client.read_to_end()
    assert engine.requests[0].body == b"{}"


@pytest.mark.parametrize("how", ["fin", "reset"])
async def test_how_the_peer_closed_is_recorded(how: str) -> None:
    async with open_engine((Head(), Event("x"), Hold())) as engine, talking_to(engine) as client:
        await client.send(chat_request())
        await client.read_events(1)
        (client.leave_fin if how == "fin" else client.leave_reset)()
        request = await engine.request()
        await request.closed.wait()
    assert request.closed_by == how


@pytest.mark.parametrize("how", ["fin", "reset"])
async def test_a_peer_that_leaves_during_endless_output_is_seen(how: str) -> None:
    endless = (Head(), Repeat((Event("x" * 1000),)))
    async with open_engine(endless) as engine, talking_to(engine) as client:
        await client.send(chat_request())
        await client.read_events(3)
        (client.leave_fin if how == "fin" else client.leave_reset)()
        request = await engine.request()
        await request.closed.wait()
        await engine.wait_idle()
    assert engine.statistics().open_requests == 0


async def test_back_pressure_shows_as_a_stalled_request() -> None:
    endless = (Head(), Repeat((Event("x" * 1000),)))
    async with (
        open_engine(endless, send_buffer=SMALL_BUFFER) as engine,
        talking_to(engine, SMALL_BUFFER) as client,
    ):
        await client.send(chat_request())
        request = await engine.request()
        await request.stalled.wait()
    assert 0 < request.bytes_sent < 1_000_000


async def test_open_requests_are_counted_and_can_be_waited_for() -> None:
    gate = trio.Event()
    async with (
        open_engine((Head(), WaitFor(gate), EndChunks())) as engine,
        talking_to(engine) as one,
        talking_to(engine) as two,
    ):
        for client in (one, two):
            await client.send(chat_request())
        await engine.wait_open(2)
        assert engine.statistics().open_requests == 2
        gate.set()
        await engine.wait_idle()
        statistics = engine.statistics()
    assert (statistics.open_requests, statistics.most_open, statistics.requests) == (0, 2, 2)
    assert (statistics.connections, statistics.open_connections) == (2, 2)


async def test_a_request_that_comes_early_is_kept_for_its_turn() -> None:
    gate = trio.Event()
    held = (Head(), WaitFor(gate), *chat_stream("one")[1:])
    async with open_engine(held, chat_answer("two")) as engine, talking_to(engine) as client:
        await client.send(chat_request() + chat_request(stream=False))
        await client.read_head()
        assert engine.statistics().requests == 1
        gate.set()
        first, second = await client.read_to_end(), await client.read_to_end()
    assert first.chat().text == "one"
    assert b"two" in second.body
    assert [request.connection for request in engine.requests] == [1, 1]


async def test_what_is_no_http_is_a_violation() -> None:
    async with open_engine() as engine, talking_to(engine) as client:
        await client.send(b"POST / HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 1\r\n\r\n")
        await client.read_closed()
        await engine.wait_disconnected()
    assert engine.statistics().violations


# The answers it is given


def test_an_empty_chunk_cannot_be_scripted() -> None:
    with pytest.raises(ValueError, match="EndChunks"):
        Chunk(b"")


def test_an_event_may_have_a_name() -> None:
    assert encode_event(Event({"a": 1}, "error")) == b'event: error\ndata: {"a":1}\n\n'


def test_a_json_answer_keeps_its_own_content_type() -> None:
    raw = encode_json(Json({}, headers=(("content-type", "text/plain"),)))
    assert raw.count(b"content-type") == 1
    assert raw.endswith(b"content-length: 2\r\ncontent-type: text/plain\r\n\r\n{}")


def test_an_in_band_error_has_the_engines_shape() -> None:
    data = error_event("broke", code=503).data
    assert data == {"error": {"message": "broke", "type": "server_error", "param": None, "code": 503}}


def test_completions_have_text_instead_of_messages() -> None:
    raw = encode_json(completion_answer("hi")[0])  # type: ignore[arg-type]  # one Json
    assert b'"text":"hi"' in raw
    assert b"message" not in raw
    events = [step for step in completion_stream("a", usage=(1, 1)) if isinstance(step, Event)]
    assert b'"text":"a"' in encode_event(events[0])
    assert b'"finish_reason":"stop"' in encode_event(events[1])
    assert b'"choices":[],"usage"' in encode_event(events[2])
    assert events[3].data == "[DONE]"


async def test_closing_all_connections_in_the_middle_of_a_script_ends_it_without_a_fault() -> None:
    script = (Head(), Repeat((Event("again"),)))
    async with open_engine(script) as engine:
        for number in range(1, 11):  # which task comes first is Trio's to throw dice for
            with await RawClient.connect(("127.0.0.1", engine.port)) as client:
                await client.send(chat_request())
                request = await engine.request(number)
                with trio.fail_after(5):
                    await until(lambda sent=request: sent.bytes_sent > 500)  # type: ignore[misc]
                    engine.close_connections()
                    await engine.wait_disconnected()
                assert request.over.is_set()
                assert request.closed_by is None
