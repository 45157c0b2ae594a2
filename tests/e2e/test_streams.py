"""What of an engine's stream reaches the client, when, and in which bytes."""

from __future__ import annotations

import json

import pytest
import trio

from tests.e2e.serving import serving
from trio_gateway.testing import (
    Answer,
    Chunk,
    Event,
    Head,
    Raw,
    Script,
    WaitFor,
    chat_answer,
    chat_request,
    chat_stream,
    completion_stream,
    embedding_answer,
    error_answer,
    good_answer,
    json_request,
    open_engine,
    until,
)

HEAD, ROLE, ONE, FINISH, LAST, END = chat_stream("one")
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def data_of(answer: Answer) -> list[str]:
    """The data of every event of a stream."""
    assert answer.events is not None
    assert answer.events.problems == []
    return [event.data for event in answer.events.events]


def text_event(text: str, **more: object) -> str:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    return json.dumps({"id": "x", "choices": [choice], **more})


# Reading engines --------------------------------------------------------------------------------------------


async def test_event_data_passes_byte_by_byte_whatever_its_form() -> None:
    odd = [
        '{"choices": [ {"index":0, "delta":{"content":"\\u00e9\\ud83d\\ude00"}} ] , "x":1e0}',
        '{"y":123456789012345678901,"choices":[{"index":0,"delta":{"content":"two"}}]}',
        '{"choices":[{"index":0,"delta":{"content":"é😀\u2028"}}],"deep":[[[{}]]],"same":1,"same":2}',
        text_event("plain"),
    ]
    end = '{"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}'
    script = (HEAD, *map(Event, (*odd, end)), LAST, END)
    async with open_engine(script) as engine, serving(engine) as gateway:
        answer = await gateway.ask(chat_request())
        assert data_of(answer) == [*odd, end, "[DONE]"]


FORMS: dict[str, bytes] = {
    "CRLF": b"data: A\r\n\r\ndata: F\r\n\r\ndata: [DONE]\r\n\r\n",
    "CR": b"data: A\r\rdata: F\r\rdata: [DONE]\r\r",
    "a byte order mark": b"\xef\xbb\xbfdata: A\n\ndata: F\n\ndata: [DONE]\n\n",
    "no blank after the colon": b"data:A\n\ndata:F\n\ndata:[DONE]\n\n",
    "comments": b": hi\n\n:\ndata: A\n: x\n\ndata: F\n\n: bye\n\ndata: [DONE]\n\n",
    "other fields": b"id: 1\nretry: 5\nx: y\ndata: A\n\nid: 2\n\ndata: F\n\ndata: [DONE]\n\n",
    "blank lines": b"\n\n\ndata: A\n\n\n\ndata: F\n\n\ndata: [DONE]\n\n",
    "events that are no objects": b"data: hello\n\ndata: A\n\ndata: 3\n\ndata: F\n\ndata: [DONE]\n\n",
    "an event without data": b"event: ping\n\ndata: A\n\ndata\n\ndata: F\n\ndata: [DONE]\n\n",
    "blanks behind the end": b"data: A\n\ndata: F\n\ndata: [DONE] \n\n",
    "no blank line at the end": b"data: A\n\ndata: F\n\ndata: [DONE]",
    "no end at all": b"data: A\n\ndata: F\n\n",
    "bytes behind the end": b"data: A\n\ndata: F\n\ndata: [DONE]\n\ndata: A\n\ndata: [DONE]\n\n",
}


@pytest.mark.parametrize("size", [1, 7, 100_000], ids=["byte by byte", "in pieces", "at once"])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
async def test_streams_are_read_by_the_standard_and_written_in_one_form(form: bytes, size: int) -> None:
    said = text_event("one")
    finish = '{"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}'
    raw = form.replace(b"A", said.encode(), 1).replace(b"A", said.encode()).replace(b"F", finish.encode(), 1)
    chunks = tuple(Chunk(raw[at : at + size]) for at in range(0, len(raw), size))
    async with open_engine((HEAD, *chunks, END)) as engine, serving(engine) as gateway:
        answer = await gateway.ask(chat_request())
        assert answer.ended == "complete"
        assert answer.body == f"data: {said}\n\ndata: {finish}\n\ndata: [DONE]\n\n".encode()


async def test_data_of_several_lines_stays_in_several_lines() -> None:
    said = '{"choices":\n[{"index":0,"delta":{"content":"one"},\n"finish_reason":"stop"}]}'
    event = "".join(f"data: {line}\n" for line in said.split("\n")) + "\n"
    async with open_engine((HEAD, Chunk(event.encode()), LAST, END)) as engine, serving(engine) as gateway:
        assert data_of(await gateway.ask(chat_request())) == [said, "[DONE]"]


async def test_what_engines_send_besides_events_is_dropped_and_counted() -> None:
    noise = (Event("hello"), Chunk(b"event: ping\n\n"), Event("null"))
    script = (HEAD, *noise, ROLE, ONE, *noise, FINISH, LAST, END)
    async with open_engine(script) as engine, serving(engine) as gateway:
        assert (await gateway.ask(chat_request())).chat().not_json == []
        assert (await gateway.settled()).events_dropped == 6


@pytest.mark.parametrize("more", [(ONE, LAST), (END,), ()], ids=["events", "the end", "nothing"])
async def test_the_answer_ends_at_done_whatever_follows(more: Script) -> None:
    script = (HEAD, ROLE, ONE, FINISH, LAST, *more)
    async with open_engine(script, good_answer) as engine, serving(engine) as gateway:
        reading = (await gateway.ask(chat_request())).chat()
        assert (reading.text, reading.done, reading.after_done) == ("one", 1, 0)
        request = await engine.request()
        with trio.fail_after(5):
            await request.over.wait()
        await gateway.settled()
        assert (await gateway.ask(chat_request())).chat().text == "ok"
        ended = more == (END,)
        assert (request.closed_by is None) == ended
        assert [request.connection for request in engine.requests] == [1, 1 if ended else 2]


async def test_all_choices_have_to_finish() -> None:
    script = chat_stream("a", choices=3)
    async with open_engine(script) as engine, serving(engine) as gateway:
        reading = (await gateway.ask(chat_request(n=3))).chat()
        assert (reading.texts, reading.done) == ({0: "a", 1: "a", 2: "a"}, 1)
        reading = (await gateway.ask(chat_request(n=4))).chat()
        assert (len(reading.errors), reading.done) == (1, 0)


async def test_several_prompts_with_several_choices_each_have_all_to_finish() -> None:
    def script(finishes: int) -> Script:
        finish = tuple(
            Event({"choices": [{"index": i, "text": "x", "finish_reason": "stop"}]}) for i in range(finishes)
        )
        return (HEAD, *finish, LAST, END)

    request = json_request("/v1/completions", {"model": "m1", "stream": True, "prompt": ["a", "b"], "n": 2})
    async with open_engine(script(4), script(3)) as engine, serving(engine) as gateway:
        assert (await gateway.ask(request)).chat().done == 1
        assert (await gateway.ask(request)).chat().done == 0


# Names and usage --------------------------------------------------------------------------------------------


async def test_the_model_has_its_public_name_everywhere_and_nothing_else_changes() -> None:
    models = [{"id": "acme/small", "upstream": "org/Small-7B"}]
    odd = (
        '{"id":"x", "choices":[{"index":0,"delta":{"content":"org/Small-7B"}}] ,'
        '"model" : "org/Small-7B","y":1e0}'
    )
    script = (HEAD, *chat_stream("one", model="org/Small-7B")[1:3], Event(odd), FINISH, LAST, END)
    async with open_engine(script) as engine, serving(engine, models=models) as gateway:
        answer = await gateway.ask(chat_request(model="acme/small"))
        assert engine.requests[0].json()["model"] == "org/Small-7B"
        reading = answer.chat()
        assert reading.models == {"acme/small", "m1"}  # m1: what the engine calls another model stays
        assert reading.text == "oneorg/Small-7B"
        assert json.loads(data_of(answer)[2])["y"] == 1
        assert '"y":1e0' in data_of(answer)[2]


async def test_a_buffered_answer_keeps_its_bytes_but_for_the_model() -> None:
    body = (
        b'{ "id":"c","choices":[{"index":0,"message":{"content":"\\u00e9"},"finish_reason":"stop"}],'
        b'"model":"up" ,"z":1e0}'
    )
    head = Head(
        200, (("content-type", "application/json; charset=utf-8"), ("content-length", str(len(body))))
    )
    models = [{"id": "down", "upstream": "up"}, {"id": "up"}]
    async with open_engine((head, Raw(body))) as engine, serving(engine, models=models) as gateway:
        assert (await gateway.ask(chat_request(model="up", stream=False))).body == body
        renamed = await gateway.ask(chat_request(model="down", stream=False))
        assert json.loads(renamed.body) == {**json.loads(body), "model": "down"}
        assert b'"z":1e0' in renamed.body
        assert b'"\\u00e9"' in renamed.body


@pytest.mark.parametrize("kind", ["openai", "vllm"])
async def test_usage_is_always_asked_for_and_taken_out_where_the_caller_did_not(kind: str) -> None:
    running = '{"id":"x","choices":[{"index":0,"delta":{"content":"two"}}],"usage":' + json.dumps(USAGE) + "}"
    script = (HEAD, ROLE, ONE, Event(running), FINISH, Event({"choices": [], "usage": USAGE}), LAST, END)
    async with open_engine(script) as engine, serving(engine, worker={"kind": kind}) as gateway:
        answer = await gateway.ask(chat_request(stream_options={"x": 1e0}))
        asked = {"x": 1.0, "include_usage": True}
        if kind == "vllm":
            asked["continuous_usage_stats"] = True
        assert engine.requests[0].json()["stream_options"] == asked
        reading = answer.chat()
        assert (reading.text, reading.usage, reading.done) == ("onetwo", None, 1)
        assert b"usage" not in answer.body
        assert len(data_of(answer)) == 5
        record = await gateway.settled()
        assert (record.tokens_prompt, record.tokens_generated, record.usage_source) == (3, 2, "engine")


async def test_usage_that_was_asked_for_stays_at_the_end_only() -> None:
    running = {"choices": [{"index": 0, "delta": {"content": "two"}}], "usage": USAGE}
    script = (HEAD, ROLE, ONE, Event(running), FINISH, Event({"choices": [], "usage": USAGE}), LAST, END)
    async with open_engine(script) as engine, serving(engine, worker={"kind": "vllm"}) as gateway:
        answer = await gateway.ask(chat_request(stream_options={"include_usage": True}))
        events = [json.loads(data) for data in data_of(answer)[:-1]]
        assert [event.get("usage") for event in events] == [None, None, None, None, USAGE]
        options = {"include_usage": True, "continuous_usage_stats": True}
        answer = await gateway.ask(chat_request(stream_options=options))
        events = [json.loads(data) for data in data_of(answer)[:-1]]
        assert [event.get("usage") for event in events] == [None, None, USAGE, None, USAGE]


@pytest.mark.parametrize("kind", ["llamacpp", "tgi", "openai"])
async def test_usage_that_was_asked_for_stays_where_an_engine_puts_it(kind: str) -> None:
    """llama.cpp has no event for the usage of completions: it stands beside the finish reason."""
    last = {"choices": [{"index": 0, "text": "", "finish_reason": "length"}], "usage": USAGE}
    script = (HEAD, Event({"choices": [{"index": 0, "text": "a"}]}), Event(last), LAST, END)
    body = {"model": "m1", "prompt": "x", "stream": True}
    async with open_engine(script) as engine, serving(engine, worker={"kind": kind}) as gateway:
        options = {"stream_options": {"include_usage": True}}
        answer = await gateway.ask(json_request("/v1/completions", {**body, **options}))
        assert [json.loads(data).get("usage") for data in data_of(answer)[:-1]] == [None, USAGE]
        assert b"usage" not in (await gateway.ask(json_request("/v1/completions", body))).body


async def test_a_buffered_answer_keeps_its_usage() -> None:
    async with open_engine(chat_answer(usage=(7, 5))) as engine, serving(engine) as gateway:
        answer = await gateway.ask(chat_request(stream=False))
        assert answer.json()["usage"] == {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}
        assert "stream_options" not in engine.requests[0].json()
        record = await gateway.settled()
        assert (record.tokens_prompt, record.tokens_generated, record.tokens_delivered) == (7, 5, 5)


# When things are sent ---------------------------------------------------------------------------------------


async def test_headers_are_held_back_until_there_is_content() -> None:
    go = trio.Event()
    async with (
        open_engine((HEAD, ROLE, WaitFor(go), *chat_stream("one")[2:])) as engine,
        serving(engine) as gateway,
    ):
        with trio.fail_after(10), await gateway.connect() as client:
            await client.send(chat_request())
            request = await engine.request()
            await until(lambda: request.bytes_sent > 100)
            with trio.move_on_after(0.05):
                await client.read_until(b"HTTP/1.1")
            assert client.received == b""
            go.set()
            answer = await client.read_to_end()
        assert (answer.chat().roles, answer.chat().text) == ({0: 1}, "one")
        assert answer.header("content-type") == "text/event-stream; charset=utf-8"
        assert answer.header("cache-control") == "no-cache"
        assert answer.header("x-accel-buffering") == "no"


async def test_silence_is_broken_by_comments_in_every_phase_and_by_nothing_else() -> None:
    first, second = trio.Event(), trio.Event()
    script = (WaitFor(first), HEAD, ROLE, ONE, WaitFor(second), FINISH, LAST, END)
    async with open_engine(script) as engine, serving(engine, stream={"heartbeat_after": 0.03}) as gateway:
        with trio.fail_after(10), await gateway.connect() as client:
            await client.send(chat_request())
            await client.read_until(b"e\r\n: keep-alive\n\n\r\n" * 2)
            first.set()
            await client.read_until(b"one")
            await client.read_until(b'one"},"finish_reason":null}]}\n\n\r\ne\r\n: keep-alive\n\n\r\n')
            second.set()
            answer = await client.read_to_end()
        assert answer.events is not None
        assert set(answer.events.comments) == {" keep-alive"}
        assert answer.events.fields == {"data"}
        assert (answer.chat().text, answer.chat().done) == ("one", 1)


async def test_a_heartbeat_goes_out_while_an_exchange_is_back_in_its_queue() -> None:
    async with (
        open_engine(error_answer(503, headers=(("retry-after", "1"),)), good_answer) as engine,
        serving(engine, stream={"heartbeat_after": 0.05}) as gateway,
    ):
        with trio.fail_after(10), await gateway.connect() as client:
            await client.send(chat_request())
            await client.read_until(b": keep-alive")
            assert gateway.depth == 1
            answer = await client.read_to_end()
        assert (answer.status, answer.chat().text) == (200, "ok")


@pytest.mark.parametrize("wanted", [True, False])
async def test_in_the_queue_heartbeats_are_sent_only_if_wanted(wanted: bool, nursery: trio.Nursery) -> None:
    go = trio.Event()
    stream = {"heartbeat_after": 0.03, "heartbeat_while_queued": wanted}
    async with (
        open_engine((WaitFor(go), *chat_stream("ok"))) as engine,
        serving(engine, worker={"slots": 1}, stream=stream) as gateway,
    ):
        nursery.start_soon(gateway.ask, chat_request(stream=False))
        await engine.wait_open(1)
        with trio.fail_after(10), await gateway.connect() as client:
            await client.send(chat_request())
            await gateway.queued(1)
            with trio.move_on_after(5 if wanted else 0.1):
                await client.read_until(b": keep-alive")
            assert bool(client.received) == wanted
            assert gateway.depth == 1
            go.set()
            assert (await client.read_to_end()).chat().text == "ok"
        await gateway.settled(2)


async def test_a_buffered_answer_has_no_heartbeats() -> None:
    go = trio.Event()
    async with (
        open_engine((WaitFor(go), *chat_answer("ok"))) as engine,
        serving(engine, stream={"heartbeat_after": 0.02}) as gateway,
    ):
        with trio.fail_after(10), await gateway.connect() as client:
            await client.send(chat_request(stream=False))
            await engine.wait_open(1)
            with trio.move_on_after(0.1):
                await client.read_until(b"HTTP")
            assert client.received == b""
            go.set()
            assert (await client.read_to_end()).status == 200


# Towards the engine -----------------------------------------------------------------------------------------


async def test_unknown_fields_reach_the_engine_as_they_came() -> None:
    fields = (
        b'"messages": [{"role":"user","content":"\\u00e9\xc3\xa9"}]',
        b'"temperature":1e0',
        b'"seed" : 123456789012345678901234567890',
        b'"top_p":0.10',
        b'"unknown":{"a" : [1.50, -0, true , null, {"b":"\\/"}]}',
        b'"logit_bias":null',
        b'"n":null',
    )
    body = b'{ "model":"m1",' + b" , ".join(fields) + b"}"
    async with open_engine(chat_answer()) as engine, serving(engine) as gateway:
        answer = await gateway.fetch("POST", "/v1/chat/completions", body=body)
        assert answer.status == 200
        got = engine.requests[0].body
        for field in fields:
            name, _, value = field.partition(b":")
            assert name.strip() + b":" + value.strip() in got


async def test_a_trace_context_that_is_none_is_not_passed_on() -> None:
    headers = (
        ("traceparent", "00-00000000000000000000000000000000-00f067aa0ba902b7-01"),
        ("tracestate", "a=1"),
    )
    async with open_engine() as engine, serving(engine) as gateway:
        await gateway.ask(chat_request(headers=headers))
        assert not {"traceparent", "tracestate"} & dict(engine.requests[0].headers).keys()


async def test_the_head_towards_the_engine_is_our_own() -> None:
    headers = (
        ("cookie", "a=b"),
        ("user-agent", "curl"),
        ("x-forwarded-for", "1.2.3.4"),
        ("accept-encoding", "gzip"),
        ("authorization", "Bearer of-the-caller"),
        ("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),
        ("tracestate", "a=1"),
    )
    async with open_engine() as engine, serving(engine) as gateway:
        for stream in (True, False):
            await gateway.ask(chat_request(stream=stream, headers=headers))
        for request, accept in zip(engine.requests, ("text/event-stream", "application/json"), strict=True):
            assert dict(request.headers) == {
                "host": f"127.0.0.1:{engine.port}",
                "content-type": "application/json",
                "content-length": str(len(request.body)),
                "accept": accept,
                "accept-encoding": "identity",
                "via": f"1.1 trio-gateway-{gateway.gateway.boot_id}",
                "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
                "tracestate": "a=1",
            }


async def test_completions_and_embeddings_go_the_same_way() -> None:
    async with (
        open_engine(completion_stream("a", "b", usage=(1, 2)), embedding_answer([1.5, 2.5])) as engine,
        serving(engine) as gateway,
    ):
        request = json_request("/v1/completions", {"model": "m1", "prompt": [1, 2, 3], "stream": True})
        assert (await gateway.ask(request)).chat().text == "ab"
        request = json_request("/v1/embeddings", {"model": "m1", "input": ["a", "b"]})
        answer = await gateway.ask(request)
        assert answer.json()["data"] == [{"object": "embedding", "index": 0, "embedding": [1.5, 2.5]}]
        assert [request.target for request in engine.requests] == ["/v1/completions", "/v1/embeddings"]
        await gateway.settled(2)
        assert [record.operation for record in gateway.records] == ["completions", "embeddings"]


async def test_an_embedding_can_not_be_streamed() -> None:
    async with open_engine() as engine, serving(engine) as gateway:
        request = json_request("/v1/embeddings", {"model": "m1", "input": "a", "stream": True})
        answer = await gateway.ask(request)
        assert (answer.status, answer.error()["param"]) == (400, "stream")
        assert engine.statistics().requests == 0


# Identity ---------------------------------------------------------------------------------------------------


async def test_every_exchange_has_a_name_of_ours_and_echoes_the_callers() -> None:
    async with open_engine() as engine, serving(engine) as gateway:
        first = await gateway.ask(chat_request(headers=(("x-client-request-id", "mine.1"),)))
        second = await gateway.ask(chat_request(headers=(("x-request-id", "theirs"),), stream=False))
        third = await gateway.ask(chat_request(headers=(("x-request-id", "not echoed: blanks"),)))
        names = [answer.header("x-request-id") or "" for answer in (first, second, third)]
        assert all(len(name) == 32 and int(name, 16) >= 0 for name in names)
        assert len(set(names)) == 3
        echoes = [answer.header("x-client-request-id") for answer in (first, second, third)]
        assert echoes == ["mine.1", "theirs", None]
        await gateway.settled(3)
        assert [record.exchange_id for record in gateway.records] == names
        assert [record.client_request_id for record in gateway.records] == echoes


@pytest.mark.parametrize("shown", [True, False])
async def test_the_worker_is_named_only_where_that_is_wanted(shown: bool) -> None:
    server = {"bind": ["127.0.0.1:0"], "expose_worker": shown}
    async with open_engine() as engine, serving(engine, server=server) as gateway:
        for stream in (True, False):
            answer = await gateway.ask(chat_request(stream=stream))
            assert answer.header("x-gateway-worker") == ("w1" if shown else None)
            assert int(answer.header("x-gateway-queue-ms") or "") >= 0
