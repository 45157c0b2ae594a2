"""The simulated engine over HTTP: real sockets, the real clock, each kind in its own manner."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar

import openai
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked
from typer.testing import CliRunner

from tests.e2e.process import COMMAND
from tests.e2e.sdks import Door, in_thread, openai_client
from tests.e2e.serving import LIMIT, error_code, has_ipv6, serving
from trio_gateway.agent.engines import (
    Limits,
    SimulatedEngine,
    SimulatedServer,
    SimulatedSettings,
    Speed,
    serve_simulated,
)
from trio_gateway.agent.engines._simulated_connection import MAX_BODY
from trio_gateway.agent.engines._simulated_http import KEEP_ALIVE
from trio_gateway.cli import app
from trio_gateway.testing import Address, Answer, RawClient, chat_request, http_request, json_request, until

T = TypeVar("T")
KINDS: Final = ("vllm", "sglang", "llamacpp", "tgi", "openai")
FAST: Final = Speed().times(20)
LONG: Final = 4000  # tokens that nobody waits for


class Running:
    """A served engine, with short words for what tests ask."""

    def __init__(self, engine: SimulatedEngine, server: SimulatedServer, address: tuple[str, int]) -> None:
        self.engine = engine
        self.server = server
        self.address: Address = address
        self.url = "http://{}:{}".format(*address)

    @asynccontextmanager
    async def connect(self, **options: Any) -> AsyncIterator[RawClient]:
        with await RawClient.connect(self.address, **options) as client:
            yield client

    async def ask(self, request: bytes) -> Answer:
        async with self.connect() as client:
            with trio.fail_after(LIMIT):
                await client.send(request)
                return await client.read_to_end()

    async def get(self, path: str) -> Answer:
        return await self.ask(http_request("GET", path))

    async def chat(self, **members: Any) -> Answer:
        return await self.ask(chat(**members))

    async def post(self, path: str, body: object) -> Answer:
        return await self.ask(http_request("POST", path, body=json.dumps(body).encode()))

    async def idle(self) -> None:
        with trio.fail_after(LIMIT):
            await until(lambda: not self.engine.core.generations)


@asynccontextmanager
async def running(kind: str = "vllm", *, metrics: bool = False, **settings: Any) -> AsyncIterator[Running]:
    """Serve an engine for the length of the block; nothing may be left in it then."""
    engine = SimulatedEngine(("m",), **{"speed": FAST, **settings})
    server = SimulatedServer(engine, kind, metrics=metrics)
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    listener.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    async with trio.open_nursery() as nursery:
        await nursery.start(engine.run)
        nursery.start_soon(server.serve, [listener])  # noqa: ASYNC113 - it listens already
        served = Running(engine, server, listener.socket.getsockname()[:2])
        yield served
        await served.idle()
        core = engine.core
        assert (core.running, core.waiting, core.memory.held) == (0, 0, 0)
        with trio.fail_after(LIMIT):
            await until(lambda: server.connections == 0)
        nursery.cancel_scope.cancel()


def chat(*, stream: bool = True, **members: Any) -> bytes:
    return chat_request(model="m", stream=stream, **members)


async def with_sdk(served: Running, use: Callable[[openai.OpenAI], T]) -> T:
    """Use the SDK's synchronous client in a thread."""

    def run() -> T:
        with openai_client(Door(served.url)) as client:
            return use(client)

    return await in_thread(run)


# The SDK ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
async def test_the_sdk_understands_streams_and_whole_answers_of_every_kind(kind: str) -> None:
    def use(client: openai.OpenAI) -> tuple[list[Any], Any, Any, list[str]]:
        create: Any = partial(
            client.chat.completions.create,
            model="m",
            messages=[{"role": "user", "content": "Hi."}],
            max_tokens=7,
        )
        chunks = list(create(stream=True, n=2, stream_options={"include_usage": True}))
        completion = client.completions.create(model="m", prompt="Once", max_tokens=5)
        return chunks, create(n=2), completion, [model.id for model in client.models.list()]

    async with running(kind) as served:
        chunks, whole, completion, models = await with_sdk(served, use)
    for at in (0, 1):
        mine = [c for chunk in chunks for c in chunk.choices if c.index == at]
        assert "".join(c.delta.content or "" for c in mine) == whole.choices[at].message.content
        assert [c.finish_reason for c in mine if c.finish_reason] == ["length"]
        assert mine[0].delta.role == "assistant"
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 14
    assert completion.usage.completion_tokens == 5
    assert completion.choices[0].text
    assert models == ["m"]


@pytest.mark.parametrize("kind", KINDS)
async def test_the_sdk_understands_tool_calls(kind: str) -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
    tool: Any = {"type": "function", "function": {"name": "weather", "parameters": parameters}}

    def use(client: openai.OpenAI) -> Any:
        create: Any = client.chat.completions.create
        asked = {"model": "m", "messages": [{"role": "user", "content": "Hi."}], "tools": [tool]}
        chunks = list(create(**asked, tool_choice="required", stream=True))
        return chunks, create(**asked, tool_choice="required"), create(**asked)

    async with running(kind) as served:
        chunks, called, spoken = await with_sdk(served, use)
    (call,) = called.choices[0].message.tool_calls
    pieces = [c.delta.tool_calls[0] for chunk in chunks for c in chunk.choices if c.delta.tool_calls]
    assert pieces[0].function.name == call.function.name == "weather"
    assert "".join(piece.function.arguments or "" for piece in pieces) == call.function.arguments
    assert set(json.loads(call.function.arguments)) == {"city", "days"}
    assert called.choices[0].finish_reason == "tool_calls"
    assert (spoken.choices[0].finish_reason, spoken.choices[0].message.tool_calls) == ("stop", None)


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("vllm", openai.InternalServerError),
        ("sglang", openai.InternalServerError),
        ("llamacpp", openai.InternalServerError),
        ("tgi", openai.RateLimitError),
        ("openai", openai.RateLimitError),
    ],
)
async def test_the_sdk_raises_what_the_kind_says_when_it_is_full(kind: str, error: type[Exception]) -> None:
    def use(client: openai.OpenAI) -> None:
        once = client.with_options(max_retries=0)
        asked: Any = {"model": "m", "messages": [{"role": "user", "content": "Hi."}]}
        once.chat.completions.create(**asked, metadata={"simulate": "refuse"})

    async with running(kind) as served:
        with pytest.raises(error):
            await with_sdk(served, use)


# Through the gateway ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
async def test_the_gateway_reads_every_kind_and_its_errors(kind: str) -> None:
    async with (
        running(kind) as served,
        serving(
            served.url, worker={"kind": kind}, models=[{"id": "m"}], retry={"max_attempts": 1}
        ) as gateway,
    ):
        good = await gateway.ask(chat(n=2, max_tokens=5))
        assert good.status == 200
        assert good.chat().done == 1
        assert good.chat().finishes == {0: "length", 1: "length"}
        for after in ("headers", "content"):
            memory = await gateway.ask(chat(simulate=f"out_of_memory after={after}"))
            assert (memory.status, error_code(memory)) == (503, "engine_out_of_memory")
        cut = await gateway.ask(chat(simulate="die after=3"))
        assert cut.status == 200
        assert cut.chat().done == 0
        assert len(cut.chat().errors) == 1
        broken = await gateway.ask(chat(simulate="malformed after=2; hang after=4", max_tokens=20))
        assert broken.chat().done == 0
        full = await gateway.ask(chat(simulate="refuse"))
        busy = 429 if kind in ("tgi", "openai") else 503
        assert (full.status, error_code(full)) == (busy, "engine_overloaded")


# Manners ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "early"),
    [("vllm", True), ("sglang", False), ("llamacpp", False), ("tgi", True), ("openai", True)],
)
async def test_some_kinds_send_the_head_before_there_is_anything_to_say(kind: str, early: bool) -> None:
    async with running(kind) as served, served.connect() as client:
        await client.send(chat(simulate="hang after=content"))
        with trio.fail_after(LIMIT):
            await until(lambda: served.engine.core.running == 1)
        with trio.move_on_after(LIMIT if early else 0.2) as wait:
            await client.read_head()
        assert wait.cancelled_caught is not early


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("stream", "after"), [(True, "headers"), (False, "headers"), (False, "3")])
async def test_who_dies_before_the_head_has_sent_no_byte(kind: str, stream: bool, after: str) -> None:
    async with running(kind) as served, served.connect() as client:
        await client.send(chat(stream=stream, simulate=f"die after={after}"))
        with trio.fail_after(LIMIT):
            await client.read_closed()
        assert client.answers == []


@pytest.mark.parametrize("kind", KINDS)
async def test_who_dies_before_its_content_has_sent_a_head_alone(kind: str) -> None:
    async with running(kind) as served:
        answer = await served.chat(simulate="die after=content")
        assert (answer.status, answer.body, answer.was_cut) == (200, b"", True)


async def test_who_dies_in_the_middle_has_sent_so_many_tokens() -> None:
    async with running() as served:
        answer = await served.chat(simulate="die after=3")
        assert answer.was_cut
        assert answer.body.count(b'"content":') == 4  # the first says only whose words follow


@pytest.mark.parametrize("kind", KINDS)
async def test_without_memory_each_kind_says_so_before_and_in_a_stream(kind: str) -> None:
    async with running(kind) as served:
        before = await served.chat(simulate="out_of_memory")
        whole = await served.chat(stream=False, simulate="out_of_memory after=2")
        within = await served.chat(simulate="out_of_memory after=2")
    assert before.status == whole.status == (424 if kind == "tgi" else 500)
    assert (within.status, within.was_cut, len(within.chat().errors)) == (200, False, 1)
    assert within.chat().done == (0 if kind == "llamacpp" else 1)
    for answer in (before, whole, within):
        assert b"memory" in answer.body or b"KV cache is full" in answer.body


async def test_a_malformed_event_is_no_json_and_the_stream_goes_on() -> None:
    async with running() as served:
        answer = await served.chat(simulate="malformed after=2", max_tokens=4)
        assert len(answer.chat().not_json) == 1
        assert answer.chat().done == 1
        whole = await served.chat(stream=False, simulate="malformed after=2")
        assert whole.status == 200
        with pytest.raises(ValueError, match=r".*"):
            json.loads(whole.body)


@pytest.mark.parametrize(
    ("kind", "stream", "status"),
    [
        ("vllm", True, 503),
        ("vllm", False, 503),
        ("sglang", True, 200),
        ("sglang", False, 503),
        ("llamacpp", True, 503),
        ("tgi", True, 200),
        ("tgi", False, 429),
        ("openai", True, 429),
    ],
)
async def test_a_full_engine_says_so_in_its_own_way(kind: str, stream: bool, status: int) -> None:
    async with running(kind, limits=Limits(slots=1, max_queued=0)) as served, served.connect() as client:
        await client.send(chat(max_tokens=LONG, ignore_eos=True))
        await client.read_head()
        answer = await served.chat(stream=stream)
        client.leave_fin()
    assert answer.status == status
    assert (len(answer.chat().errors) if stream and status == 200 else 0) == (status == 200)


async def test_a_vllm_without_a_bound_lets_requests_wait() -> None:
    async with running(limits=Limits(slots=1)) as served:
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(served.chat)
        assert served.engine.core.high_water == 1


@pytest.mark.parametrize(
    ("kind", "headers", "members", "answer_id"),
    [
        ("vllm", (("x-request-id", "abc"),), {}, "chatcmpl-abc"),
        ("vllm", (), {"request_id": "def"}, "chatcmpl-def"),
        ("vllm", (), {}, "chatcmpl-000000000000000000000001"),
        ("sglang", (("x-request-id", "abc"),), {"rid": "ghi"}, "ghi"),
        ("llamacpp", (("x-request-id", "abc"),), {"rid": "ghi"}, "chatcmpl-000000000000000000000001"),
    ],
)
async def test_an_answer_is_named_as_its_kind_does(
    kind: str, headers: tuple[tuple[str, str], ...], members: dict[str, Any], answer_id: str
) -> None:
    async with running(kind) as served:
        body = {"model": "m", "messages": [{"role": "user", "content": "Hi."}], **members}
        answer = await served.ask(json_request("/v1/chat/completions", body, headers=headers))
    assert answer.json()["id"] == answer_id


async def test_a_completion_of_a_vllm_is_named_otherwise() -> None:
    async with running() as served:
        answer = await served.post("/v1/completions", {"model": "m", "prompt": "Once", "request_id": "abc"})
    assert answer.json()["id"] == "cmpl-abc"


async def test_a_sglang_refuses_an_id_that_is_in_use() -> None:
    async with running("sglang") as served, served.connect() as client:
        await client.send(chat(rid="abc", max_tokens=LONG, ignore_eos=True))
        await client.read_head()
        answer = await served.chat(rid="abc")
        client.leave_fin()
        await served.idle()
        assert (await served.chat(rid="abc", max_tokens=1)).chat().done == 1
    assert answer.status == 400
    assert b"Duplicate request ID" in answer.body


async def test_a_sglang_tells_the_finishes_behind_all_text() -> None:
    async with running("sglang") as served:
        answer = await served.chat(n=2, max_tokens=3)
    finishes = [
        b'"finish_reason":"length"' in part for part in answer.body.split(b"\n\n") if b"choices" in part
    ]
    assert finishes == [False] * 8 + [True] * 2


async def test_others_tell_a_finish_as_soon_as_it_is_known() -> None:
    async with running("llamacpp") as served:
        answer = await served.chat(n=2)
    parts = [part for part in answer.body.split(b"\n\n") if b"choices" in part]
    finishes = [at for at, part in enumerate(parts) if b'"finish_reason":"stop"' in part]
    assert len(finishes) == 2
    assert finishes[0] < len(parts) - 2


@pytest.mark.parametrize("kind", KINDS)
async def test_a_completion_streams_text_that_the_whole_answer_has_too(kind: str) -> None:
    asked = {"model": "m", "prompt": ["Once", "Twice"], "max_tokens": 9, "stop": ["never said"]}
    usage = {"include_usage": True, "continuous_usage_stats": True}
    async with running(kind) as served:
        streamed = (await served.post("/v1/completions", {**asked, "stream": True})).chat()
        body = {**asked, "stream": True, "stream_options": usage}
        counted = (await served.post("/v1/completions", body)).chat()
        whole = (await served.post("/v1/completions", asked)).json()["choices"]
    assert isinstance(whole, list)
    assert [choice["text"] for choice in whole] == [streamed.texts[0], streamed.texts[1]]
    assert counted.texts == streamed.texts
    assert streamed.finishes == {0: "length", 1: "length"}
    assert streamed.roles == {}


@pytest.mark.parametrize(("kind", "field"), [("vllm", "reasoning"), ("sglang", "reasoning_content")])
async def test_thinking_stands_in_the_field_of_the_kind(kind: str, field: str) -> None:
    async with running(kind) as served:
        streamed = await served.chat(simulate="tokens=6 reasoning=2")
        whole = (await served.chat(stream=False, simulate="tokens=6 reasoning=2")).json()["choices"]
    assert streamed.body.count(f'"{field}":'.encode()) == 2
    assert isinstance(whole, list)
    assert len(whole[0]["message"][field].split(" ")) == 2


async def test_a_vllm_counts_in_every_event_when_it_is_asked_to() -> None:
    usage = {"include_usage": True, "continuous_usage_stats": True}
    async with running() as served:
        counted = await served.chat(max_tokens=3, stream_options=usage)
    async with running("llamacpp") as served:
        uncounted = await served.chat(max_tokens=3, stream_options=usage)
    assert counted.body.count(b'"usage"') == 4
    assert uncounted.body.count(b'"usage"') == 1


@pytest.mark.parametrize("kind", KINDS)
async def test_what_the_caller_did_wrong_is_said_in_the_shape_of_the_kind(kind: str) -> None:
    async with running(kind, limits=Limits(context=100)) as served:
        answers = [
            await served.chat(max_tokens=0),
            await served.chat(messages=[{"role": "user", "content": "word " * 200}]),
            await served.chat(simulate="no_such_fault"),
            await served.ask(http_request("POST", "/v1/completions", body=b"{")),
            await served.ask(http_request("POST", "/v1/completions", body=b"[]")),
        ]
    assert {answer.status for answer in answers} == {422 if kind == "tgi" else 400}
    body = answers[1].json()
    flat = kind in ("sglang", "tgi")
    told = body if flat else body["error"]
    assert isinstance(told, dict)
    assert "maximum context length is 100" in str(told["error" if kind == "tgi" else "message"])


@pytest.mark.parametrize(
    ("kind", "status"), [("vllm", 404), ("openai", 404), ("llamacpp", 200), ("tgi", 200)]
)
async def test_only_some_kinds_look_at_the_name_of_the_model(kind: str, status: int) -> None:
    async with running(kind) as served:
        answer = await served.ask(chat_request(model="another", stream=False))
    assert answer.status == status
    assert (b"another" in answer.body) == (status == 404)


# Leaving ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["fin", "reset"])
async def test_a_caller_that_leaves_frees_its_slot(how: str) -> None:
    async with running() as served, served.connect() as client:
        await client.send(chat(max_tokens=LONG, ignore_eos=True))
        await client.read_events(3)
        client.leave_fin() if how == "fin" else client.leave_reset()
        await served.idle()
        assert served.engine.core.outcomes == {"cancelled": 1}


async def test_a_llama_cpp_looks_once_a_second_whether_its_caller_is_there() -> None:
    async with running("llamacpp") as served, served.connect() as client:
        await client.send(chat(simulate="hang", max_tokens=LONG))
        with trio.fail_after(LIMIT):
            await until(lambda: served.engine.core.running == 1)
        (generation,) = served.engine.core.generations
        client.leave_fin()
        await served.idle()
    assert generation.ended is not None
    assert generation.ended - generation.arrived >= 1.0


async def test_a_write_that_fails_is_seen_without_a_look() -> None:
    async with running("llamacpp") as served, served.connect() as client:
        served.server._manner = replace(served.server._manner, looks_every=(1000.0, 1000.0))
        await client.send(chat(max_tokens=LONG, ignore_eos=True))
        await client.read_events(3)
        (generation,) = served.engine.core.generations
        client.leave_reset()
        await served.idle()
    assert generation.ended is not None
    assert generation.outcome == "cancelled"


async def test_a_caller_that_reads_nothing_does_not_slow_the_engine() -> None:
    async with running(speed=Speed().times(1000)) as served, served.connect(receive_buffer=2048) as client:
        await client.send(chat(max_tokens=LONG, ignore_eos=True))
        with trio.fail_after(LIMIT):
            await until(lambda: served.engine.core.outcomes["finished"] == 1)  # all is generated
            answer = await client.read_to_end()
    assert answer.chat().done == 1
    assert answer.body.count(b'"content":') == LONG + 1


async def test_who_dies_with_bytes_unsent_takes_them_with_him() -> None:
    async with running(speed=Speed().times(1000)) as served, served.connect(receive_buffer=2048) as client:
        await client.send(chat(simulate="die after=2000", ignore_eos=True))
        with trio.fail_after(LIMIT):
            await until(lambda: served.engine.core.outcomes["failed"] == 1)
            answer = await client.read_to_end()
        assert answer.was_cut
        assert answer.body.count(b'"content":') < 2000


async def test_answers_follow_each_other_on_one_connection() -> None:
    async with running() as served, served.connect() as client:
        with trio.fail_after(LIMIT):
            for stream in (True, False, True):
                await client.send(chat(stream=stream, max_tokens=2))
                answer = await client.read_to_end()
                assert (answer.status, answer.was_cut) == (200, False)
            await client.send(chat(max_tokens=0))
            assert (await client.read_to_end()).status == 400
            await client.send(chat(max_tokens=2) + chat(max_tokens=3))
            await client.read_to_end()
            await client.read_to_end()
        assert len(client.answers) == 6
        assert served.server.connections == 1


async def test_a_caller_that_says_nothing_is_not_waited_for(autojump_clock: MockClock) -> None:
    async with running() as served, served.connect() as client:
        assert await client.read_closed() == "fin"
        assert trio.current_time() == KEEP_ALIVE


async def test_a_caller_may_ask_before_it_sends_its_body() -> None:
    async with running() as served, served.connect() as client:
        head, _, body = chat(stream=False, max_tokens=2).partition(b"\r\n\r\n")
        with trio.fail_after(LIMIT):
            await client.send(head + b"\r\nExpect: 100-continue\r\n\r\n")
            await client.send(body)
            assert (await client.read_to_end()).status == 200
        assert client.interims == [100]


async def test_a_request_may_come_in_any_pieces() -> None:
    async with running() as served, served.connect() as client:
        request = chat(stream=False, max_tokens=2)
        with trio.fail_after(LIMIT):
            for at in range(0, len(request), 40):
                await client.send(request[at : at + 40])
                await wait_all_tasks_blocked()
            assert (await client.read_to_end()).status == 200


async def test_a_body_without_end_is_not_read() -> None:
    async with running() as served, served.connect() as client:
        await client.send(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        piece = b"100000\r\n" + bytes(0x100000) + b"\r\n"
        sent = 0
        with trio.fail_after(LIMIT), contextlib.suppress(OSError):
            while sent < 2 * MAX_BODY:
                await client.send(piece)
                sent += len(piece)
        assert MAX_BODY <= sent < 2 * MAX_BODY


async def test_what_is_no_request_is_not_answered() -> None:
    async with running() as served:
        for wrong in (b"nonsense\r\n\r\n", b"GET /health HTTP/1.1\r\nHost: x\r\n folded: y\r\n\r\n"):
            async with served.connect() as client:
                await client.send(wrong)
                with trio.fail_after(LIMIT):
                    await client.read_closed()
                assert client.answers == []


# Other routes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["vllm", "sglang", "llamacpp", "tgi"])
async def test_health_says_200_and_costs_a_sglang_a_token(kind: str) -> None:
    async with running(kind) as served:
        assert (await served.get("/health")).status == 200
        await served.idle()
        assert served.engine.core.generated_tokens == (kind == "sglang")


async def test_a_sglang_that_loads_is_not_healthy() -> None:
    async with running("sglang", speed=Speed(load=60)) as served:
        assert (await served.get("/health")).status == 503
        assert (await served.get("/ready")).status == 503
    async with running("sglang") as served:
        assert (await served.get("/ready")).status == 200


async def test_a_llama_cpp_that_loads_says_so_on_every_route() -> None:
    async with running("llamacpp", speed=Speed(load=60)) as served:
        for path in ("/health", "/v1/models", "/no-such-route"):
            assert (await served.get(path)).status == 503
        answer = await served.chat()
        assert (answer.status, b"Loading model" in answer.body) == (503, True)
        assert (await served.get("/simulate/log")).json()["ready"] is False


@pytest.mark.parametrize(
    ("kind", "metrics", "status", "names"),
    [
        (
            "vllm",
            False,
            200,
            ["vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"],
        ),
        ("sglang", True, 200, ["sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:token_usage"]),
        ("sglang", False, 404, []),
        ("llamacpp", True, 200, ["llamacpp:requests_processing", "llamacpp:requests_deferred"]),
        ("llamacpp", False, 501, []),
        ("tgi", False, 200, ["tgi_batch_current_size", "tgi_queue_size"]),
        ("openai", True, 404, []),
    ],
)
async def test_metrics_have_the_names_of_their_kind(
    kind: str, metrics: bool, status: int, names: list[str]
) -> None:
    async with running(kind, metrics=metrics, limits=Limits(slots=1)) as served:
        async with served.connect() as first, served.connect() as second:
            for client in (first, second):
                await client.send(chat(max_tokens=LONG, ignore_eos=True, simulate="hang after=1"))
            with trio.fail_after(LIMIT):
                await until(lambda: (served.engine.core.running, served.engine.core.waiting) == (1, 1))
            page = await served.get("/metrics")
            first.leave_fin()
            second.leave_fin()
        assert page.status == status
        values = dict(line.rsplit(" ", 1) for line in page.body.decode().splitlines() if " " in line)
        for name in names[:2]:
            assert [float(v) for key, v in values.items() if key.partition("{")[0] == name] == [1.0]
        assert all(name in page.body.decode() for name in names)


async def test_metrics_count_how_choices_ended() -> None:
    async with running() as served:
        await served.chat(n=2, max_tokens=2)
        page = (await served.get("/metrics")).body.decode()
    assert 'vllm:request_success_total{engine="0",model_name="m",finished_reason="length"} 2' in page


async def test_a_label_of_a_metric_can_hold_any_name() -> None:
    async with running() as served:
        served.engine.models = ('a"b\\c',)  # type: ignore[misc]
        assert r'model_name="a\"b\\c"' in (await served.get("/metrics")).body.decode()


async def test_a_llama_cpp_shows_its_slots() -> None:
    async with running("llamacpp", limits=Limits(slots=2)) as served:
        assert (await served.get("/slots?fail_on_no_slot=1")).status == 200
        assert (await served.get("/props")).json()["total_slots"] == 2
        async with served.connect() as client:
            await client.send(chat(n=2, max_tokens=LONG, ignore_eos=True))
            await client.read_events(1)
            slots = json.loads((await served.get("/slots")).body)
            assert [slot["is_processing"] for slot in slots] == [True, True]
            assert (await served.get("/slots?fail_on_no_slot=1")).status == 503
            client.leave_reset()


@pytest.mark.parametrize(("kind", "path"), [("vllm", "/version"), ("tgi", "/info"), ("sglang", "/v1/loads")])
async def test_each_kind_tells_of_itself(kind: str, path: str) -> None:
    async with running(kind) as served:
        assert (await served.get(path)).json()
        assert (await served.get("/no-such-route")).status == 404


async def test_a_plan_is_exchanged_and_kept_to() -> None:
    async with running() as served:
        plan = [
            {"fault": {"kind": "refuse"}, "times": 1},
            {"fault": {"kind": "die", "after": 1}, "request": 2},
        ]
        assert (await served.post("/simulate/faults", {"faults": plan})).json() == {"faults": 2}
        assert (await served.chat()).status == 503
        assert (await served.chat()).was_cut
        assert (await served.chat(max_tokens=2)).chat().done == 1
        assert (await served.post("/simulate/faults", {"faults": [{"fault": {"kind": "no"}}]})).status == 400


async def test_the_log_is_the_engines_account() -> None:
    async with running(limits=Limits(slots=3, block_tokens=2)) as served:
        for _ in range(4):
            await served.chat(max_tokens=2)
        log = (await served.get("/simulate/log")).json()
        short = (await served.get("/simulate/log?entries=1")).json()
        none = (await served.get("/simulate/log?entries=0")).json()
    assert {
        name: log[name] for name in ("arrived", "finished", "released", "generated_tokens", "running")
    } == {
        "arrived": 4,
        "finished": 4,
        "released": 4,
        "generated_tokens": 8,
        "running": 0,
    }
    assert (log["high_water"], log["slots"]) == (1, 3)
    for logged, kept in ((log, 4), (short, 1), (none, 0)):
        assert isinstance(logged["requests"], list)
        assert len(logged["requests"]) == kept


# As a process ----------------------------------------------------------------------------------------------


@asynccontextmanager
async def process(*arguments: str) -> AsyncIterator[tuple[trio.Process, str]]:
    """Run the command until the end of the block; answers the process and its URL."""
    started = await trio.lowlevel.open_process(
        [*COMMAND, "simulate", "--model", "m", *arguments], stdout=subprocess.PIPE
    )
    assert started.stdout is not None
    try:
        line = b""
        with trio.fail_after(30):
            while not line.endswith(b"\n"):
                line += await started.stdout.receive_some(4096)
        yield started, json.loads(line)["url"]
    finally:
        started.kill()
        await started.stdout.aclose()
        with trio.move_on_after(5, shield=True):
            await started.wait()


@asynccontextmanager
async def connect(url: str) -> AsyncIterator[RawClient]:
    host, _, port = url.rpartition("/")[2].rpartition(":")
    with await RawClient.connect((host, int(port))) as client:
        yield client


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"kind": "toaster"}, "no kind toaster"),
        ({"bind": "127.0.0.1"}, "host:port"),
        ({"speed": 0.0}, "positive"),
        ({"decode": 0.0}, "positive"),
        ({"slots": 0}, "at least one slot"),
        ({"context": 100_000}, "context"),
    ],
)
def test_a_setting_without_a_meaning_is_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        SimulatedSettings(**wrong).engine()


@pytest.mark.parametrize(("kind", "queued"), [("vllm", None), ("tgi", 0), ("llamacpp", None)])
def test_a_kind_has_its_usual_queue(kind: str, queued: int | None) -> None:
    async def limits(settings: SimulatedSettings) -> Limits:
        engine = settings.engine()
        async with trio.open_nursery() as nursery:
            await nursery.start(engine.run)
            nursery.cancel_scope.cancel()
        return engine.core.limits

    usual = trio.run(limits, SimulatedSettings(kind=kind))
    assert (usual.max_queued, usual.together) == (queued, kind == "llamacpp")
    assert trio.run(limits, SimulatedSettings(kind=kind, max_queued=3)).max_queued == 3


@pytest.mark.parametrize(("arguments", "status"), [(["--kind", "x"], 2), (["--bind", "192.0.2.1:9"], 1)])
def test_a_process_that_can_not_start_says_why(arguments: list[str], status: int) -> None:
    result = CliRunner().invoke(app, ["simulate", *arguments])
    assert result.exit_code == status
    assert result.stderr.startswith("trio-gateway: ")
    assert arguments[1] in result.stderr


@pytest.mark.parametrize(
    ("kind", "bind", "url"),
    [("vllm", "127.0.0.1:0", "http://127.0.0.1:"), ("llamacpp", "[::1]:0", "http://[::1]:")],
)
async def test_a_signal_ends_the_serving_of_an_engine(kind: str, bind: str, url: str) -> None:
    if bind.startswith("[") and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    told: list[str] = []
    settings = SimulatedSettings(kind=kind, bind=bind, load=0.05)
    with trio.fail_after(LIMIT):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve_simulated, settings, settings.engine(), told.append)
            await until(lambda: bool(told))
            os.kill(os.getpid(), signal.SIGTERM)
    (line,) = map(json.loads, told)
    assert (line["event"], line["kind"]) == ("listening", kind)
    assert line["url"].startswith(url)


async def test_a_killed_process_cuts_its_streams() -> None:
    async with process("--kind", "vllm", "--decode", "200") as (killed, url), connect(url) as client:
        await client.send(chat(max_tokens=LONG, ignore_eos=True))
        with trio.fail_after(LIMIT):
            await client.read_events(3)
            killed.send_signal(signal.SIGKILL)
            answer = await client.read_to_end()
            assert answer.was_cut
            assert await killed.wait() == -signal.SIGKILL


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_the_process_at_once_and_well(how: signal.Signals) -> None:
    async with process("--speed", "4", "--seed", "3") as (ended, url), connect(url) as client:
        await client.send(chat(max_tokens=LONG, ignore_eos=True))
        with trio.fail_after(LIMIT):
            await client.read_events(1)
            ended.send_signal(how)
            assert await ended.wait() == 0
            assert (await client.read_to_end()).was_cut


async def test_a_process_says_what_an_engine_of_its_seed_says_anywhere() -> None:
    request = chat(max_tokens=20, ignore_eos=True)
    async with process("--seed", "5", "--speed", "20") as (_, url), connect(url) as client:
        await client.send(request)
        with trio.fail_after(LIMIT):
            said = (await client.read_to_end()).chat().text
    for seed, equal in ((5, True), (6, False)):
        async with running(seed=seed) as served:
            assert ((await served.ask(request)).chat().text == said) is equal
