"""An Ollama behind the gateway: clients speak OpenAI's API, it is asked by its own, and nothing hides."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
import trio

from tests.e2e.serving import error_code, serving, tenant
from trio_gateway.testing import (
    NDJSON_HEADERS,
    SSE_HEADERS,
    Answer,
    Chunk,
    CloseFin,
    CloseReset,
    EndChunks,
    Head,
    Hold,
    Json,
    Raw,
    Script,
    ScriptedOllama,
    WaitFor,
    chat_request,
    encode_record,
    json_request,
    ollama_error,
    ollama_record,
    ollama_stream,
    open_engine,
)

OLLAMA = {"kind": "ollama"}
HEAD = Head(headers=NDJSON_HEADERS)
ONE, TWO = ollama_record("one"), ollama_record("two")
END = ollama_record(done="stop", usage=(3, 2))
CALL = {"function": {"name": "weather", "arguments": {"city": "Z\u00fcrich", "days": 2}}}
QUESTION = [{"role": "user", "content": "hi"}]


def deltas_of(answer: Answer) -> list[dict[str, Any]]:
    assert answer.events is not None
    assert (answer.events.problems, answer.events.fields) == ([], {"data"})
    chunks = [event.json() for event in answer.events.events if not event.is_done]
    return [choice["delta"] for chunk in chunks if chunk for choice in chunk.get("choices", [])]  # type: ignore[attr-defined]


# What is asked and what is told -----------------------------------------------------------------------------


async def test_a_streamed_chat_is_asked_for_and_told_in_the_words_of_either_side() -> None:
    engine_of = ScriptedOllama(("one", " <two>"), usage=(3, 2), models=("llama3.2",))
    models = [{"id": "m1", "upstream": "llama3.2"}]
    async with open_engine(engine_of) as engine, serving(engine, worker=OLLAMA, models=models) as gateway:
        asked = chat_request(temperature=0.5, max_tokens=7, stream_options={"include_usage": True})
        answer = await gateway.ask(asked)
        reading = answer.chat()
        assert (reading.text, reading.finishes, reading.done) == ("one <two>", {0: "stop"}, 1)
        assert (reading.roles, reading.models, reading.errors) == ({0: 1}, {"m1"}, [])
        assert reading.usage == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
        got = await engine.request()
        assert got.target == "/api/chat"
        assert got.header("accept") == "application/x-ndjson"
        assert got.json() == {
            "model": "llama3.2",
            "messages": QUESTION,
            "stream": True,
            "options": {"temperature": 0.5, "num_predict": 7},
        }
        record = await gateway.settled()
        assert (record.outcome, record.tokens_prompt, record.tokens_generated) == ("completed", 3, 2)
        assert (record.usage_source, record.tokens_delivered) == ("engine", 2)


async def test_a_buffered_chat_is_asked_for_and_told_in_the_words_of_either_side() -> None:
    engine_of = ScriptedOllama(("one", "two"), thinking=("hm",), usage=(3, 2))
    async with open_engine(engine_of) as engine, serving(engine, worker=OLLAMA) as gateway:
        answer = await gateway.ask(chat_request(stream=False))
        assert answer.status == 200
        value: dict[str, Any] = answer.json()
        assert (value["object"], value["model"]) == ("chat.completion", "m1")
        assert value["choices"] == [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "onetwo", "reasoning": "hm"},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ]
        assert value["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
        got = await engine.request()
        assert (got.target, got.header("accept")) == ("/api/chat", "application/json")
        assert got.json()["stream"] is False
        record = await gateway.settled()
        assert (record.tokens_prompt, record.tokens_generated) == (3, 2)
        assert value["id"] == f"chatcmpl-{record.exchange_id}-01"
        assert abs(value["created"] - record.settled_at) < 10


async def test_all_chunks_of_an_answer_have_one_id_and_one_time() -> None:
    async with (
        open_engine(ScriptedOllama(("a", "b"))) as engine,
        serving(engine, worker=OLLAMA) as gateway,
    ):
        answer = await gateway.ask(chat_request())
        assert answer.events is not None
        chunks = [event.json() for event in answer.events.events if not event.is_done]
        assert len({(chunk["id"], chunk["created"]) for chunk in chunks if chunk}) == 1
        record = await gateway.settled()
        assert chunks[0] is not None
        assert chunks[0]["id"] == f"chatcmpl-{record.exchange_id}-01"


async def test_tools_go_there_and_their_calls_come_back_and_the_next_turn_is_understood() -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    calling = ScriptedOllama((), calls=(CALL, CALL))
    async with (
        open_engine(calling, ScriptedOllama(("sun",))) as engine,
        serving(engine, worker=OLLAMA) as gateway,
    ):
        first = await gateway.ask(chat_request(tools=tools))
        calls = [call for delta in deltas_of(first) for call in delta.get("tool_calls", [])]
        assert [call["index"] for call in calls] == [0, 1]
        assert len({call["id"] for call in calls}) == 2
        assert first.chat().finishes == {0: "tool_calls"}
        for call in calls:
            assert json.loads(call["function"]["arguments"]) == {"city": "Z\u00fcrich", "days": 2}
        said = [{"role": "assistant", "content": None, "tool_calls": calls}]
        told = [{"role": "tool", "tool_call_id": call["id"], "content": "sunny"} for call in calls]
        body = {"model": "m1", "messages": [*QUESTION, *said, *told], "tools": tools}
        second = await gateway.ask(json_request("/v1/chat/completions", body))
        assert second.json()["choices"][0]["message"]["content"] == "sun"  # type: ignore[index]
        got: dict[str, Any] = (await engine.request(2)).json()
        assert [call["function"] for call in got["messages"][1]["tool_calls"]] == [CALL["function"]] * 2
        assert [message["tool_name"] for message in got["messages"][2:]] == ["weather"] * 2


async def test_an_image_of_a_megabyte_arrives_whole() -> None:
    picture = bytes(range(256)) * 4096
    url = "data:image/png;base64," + base64.b64encode(picture).decode()
    parts = [{"type": "text", "text": "what?"}, {"type": "image_url", "image_url": {"url": url}}]
    body = {"model": "m1", "messages": [{"role": "user", "content": parts}]}
    async with open_engine(ScriptedOllama()) as engine, serving(engine, worker=OLLAMA) as gateway:
        answer = await gateway.ask(json_request("/v1/chat/completions", body))
        assert answer.status == 200
        got: dict[str, Any] = (await engine.request()).json()
        (message,) = got["messages"]
        assert message["content"] == "what?"
        assert [base64.b64decode(image) for image in message["images"]] == [picture]


async def test_what_the_model_brings_along_is_said_in_its_words_too() -> None:
    models = [{"id": "m1", "defaults": {"temperature": 0.25, "stop": "x"}, "max_output_tokens": 9}]
    async with (
        open_engine(ScriptedOllama()) as engine,
        serving(engine, worker=OLLAMA, models=models) as gateway,
    ):
        await gateway.ask(chat_request(temperature=1))
        got = (await engine.request()).json()
        assert got["options"] == {"temperature": 1, "stop": ["x"], "num_predict": 9}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
async def test_other_operations_go_by_its_openai_layer(path: str) -> None:
    body = {"model": "m1", "prompt": "hi", "input": "hi"}
    async with open_engine(ScriptedOllama()) as engine, serving(engine, worker=OLLAMA) as gateway:
        answer = await gateway.ask(json_request(path, body))
        assert answer.status == 200
        assert (await engine.request()).target == path


async def test_a_receipt_covers_the_events_that_the_client_got() -> None:
    async with open_engine(ScriptedOllama(("a", "b"))) as engine, serving(engine, worker=OLLAMA) as gateway:
        answer = await gateway.ask(chat_request(headers=(("x-gateway-receipt", "1"),)))
        record = await gateway.settled()
        assert record.receipt is not None
        assert f": receipt sha256={record.receipt} events=3\n\ndata: [DONE]\n\n".encode() in answer.body


async def test_the_connection_is_used_again_after_a_whole_answer() -> None:
    async with open_engine(ScriptedOllama()) as engine, serving(engine, worker=OLLAMA) as gateway:
        for _ in range(3):
            assert (await gateway.ask(chat_request())).chat().done == 1
            await gateway.returned()
        assert engine.statistics().connections == 1


async def test_records_are_passed_on_as_they_come() -> None:
    go_on = trio.Event()
    script: Script = (HEAD, Chunk(encode_record(ONE)), WaitFor(go_on), Chunk(encode_record(END)), EndChunks())
    async with open_engine(script) as engine, serving(engine, worker=OLLAMA) as gateway:
        with trio.fail_after(10), await gateway.connect() as client:
            await client.send(chat_request())
            await client.read_until(b"one")
            assert client.answers[0].chat().finishes == {}
            go_on.set()
            answer = await client.read_to_end()
            assert answer.chat().done == 1


async def test_a_client_that_leaves_takes_its_request_to_ollama_along() -> None:
    script: Script = (HEAD, Chunk(encode_record(ONE)))
    async with open_engine(script) as engine, serving(engine, worker=OLLAMA) as gateway:
        with trio.fail_after(10), await gateway.connect() as client:
            await client.send(chat_request())
            await client.read_until(b"one")
            client.leave_reset()
            await (await engine.request()).closed.wait()
        record = await gateway.settled()
        assert (record.outcome, record.phase) == ("client_gone", "after_content")


# What is not asked of it ------------------------------------------------------------------------------------


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "two choices": ({"n": 2}, "n"),
    "an image that would have to be fetched": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/"}}]}]},
        "messages.0.content.0.image_url",
    ),
    "an option that is no number": ({"temperature": "hot"}, "temperature"),
    "a format of another kind": ({"response_format": {"type": "regex"}}, "response_format.type"),
}  # fmt: skip


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "buffered"])
@pytest.mark.parametrize(("fields", "param"), REFUSED.values(), ids=REFUSED.keys())
async def test_what_ollama_can_not_do_is_refused_and_counts_against_nobody(
    fields: dict[str, Any], param: str, stream: bool
) -> None:
    body = {"model": "m1", "messages": QUESTION, "stream": stream, **fields}
    async with open_engine(ScriptedOllama()) as engine, serving(engine, worker=OLLAMA) as gateway:
        answer = await gateway.ask(json_request("/v1/chat/completions", body))
        assert (answer.status, error_code(answer), answer.error()["param"]) == (400, "invalid_value", param)
        assert answer.header("x-should-retry") == "false"
        record = await gateway.settled()
        assert (record.outcome, record.code) == ("refused", "invalid_value")
        assert engine.statistics().requests == 0
        assert gateway.gateway.fleet.books["w1"].faults == 0
        assert (await gateway.ask(chat_request())).chat().done == 1


async def test_a_worker_of_another_kind_does_what_ollama_can_not() -> None:
    async with open_engine(ScriptedOllama()) as ollama, open_engine() as other:
        workers = [
            {"id": "w1", "url": ollama.url, "kind": "ollama", "slots": 4},
            {"id": "w2", "url": other.url, "kind": "openai", "slots": 4},
        ]
        async with serving(workers=workers, retry={"budget_ratio": 0}) as gateway:
            answer = await gateway.ask(chat_request(stream=False, response_format={"type": "regex"}))
            assert answer.status == 200
            record = await gateway.settled()
            assert (record.outcome, record.worker, record.attempts) == ("completed", "w2", 2)
            assert ollama.statistics().requests == 0


STEERING: dict[str, object] = {"keep_alive": 0, "options": {"num_ctx": 1_000_000}}


@pytest.mark.parametrize("field", STEERING)
async def test_fields_that_steer_ollama_itself_are_for_tenants_who_may(field: str) -> None:
    tenants = [tenant("a", "key-a"), tenant("b", "key-b", engine_fields=True)]
    async with (
        open_engine(ScriptedOllama()) as engine,
        serving(engine, worker=OLLAMA, tenants=tenants) as gateway,
    ):
        fields = {field: STEERING[field]}
        refused = await gateway.ask(chat_request(key="key-a", **fields))  # type: ignore[arg-type]
        assert (refused.status, error_code(refused)) == (400, "field_not_allowed")
        assert refused.error()["param"] == field
        assert (await gateway.ask(chat_request(key="key-b", **fields))).chat().done == 1  # type: ignore[arg-type]
        assert (await engine.request()).json()[field] == STEERING[field]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_caller_can_not_make_ollama_answer_without_a_choice(path: str) -> None:
    body = {"model": "m1", "messages": QUESTION, "prompt": "hi", "_debug_render_only": True}
    async with open_engine(ScriptedOllama()) as engine, serving(engine, worker=OLLAMA) as gateway:
        answer = await gateway.ask(json_request(path, body))
        assert (answer.status, error_code(answer)) == (400, "field_not_allowed")
        assert engine.statistics().requests == 0


# How it fails -----------------------------------------------------------------------------------------------


async def test_an_error_in_the_middle_of_a_stream_is_told_as_one() -> None:
    engine_of = ScriptedOllama(("par", "tial"), failure="an error was encountered while running the model")
    async with open_engine(engine_of) as engine, serving(engine, worker=OLLAMA) as gateway:
        answer = await gateway.ask(chat_request())
        reading = answer.chat()
        assert (reading.text, reading.finishes, reading.done) == ("partial", {}, 0)
        (error,) = reading.errors
        assert error["code"] == "engine_failed"
        record = await gateway.settled()
        assert (record.outcome, record.phase) == ("upstream_failed", "after_content")
        assert gateway.gateway.fleet.books["w1"].faults == 1


async def test_what_its_openai_layer_hides_its_own_api_tells() -> None:
    """Out of memory in the middle: by the one a cut answer and a fault, by the other what it is."""
    engine_of = ScriptedOllama(("par",), failure="CUDA error: out of memory")
    for kind, code, faults in (("openai", "engine_failed", 1), ("ollama", "engine_out_of_memory", 0)):
        async with open_engine(engine_of) as engine, serving(engine, worker={"kind": kind}) as gateway:
            (error,) = (await gateway.ask(chat_request())).chat().errors
            assert error["code"] == code
            assert gateway.gateway.fleet.books["w1"].faults == faults


BEFORE_CONTENT: dict[str, tuple[Script, int, str, int]] = {
    "fails by status": ((Json(ollama_error("llama runner has terminated"), 500),), 502, "engine_failed", 1),
    "is busy": ((Json(ollama_error("server busy, please try again"), 503),), 503, "engine_overloaded", 0),
    "lacks the model": ((Json(ollama_error("model 'm1' not found"), 404),), 404, "model_not_found", 0),
    "refuses": ((Json(ollama_error('"m1" does not support tools'), 400),), 400, "invalid_value", 0),
    "fails at once": (ollama_stream(ollama_error("boom")), 502, "engine_failed", 1),
    "fails after silence": (ollama_stream(ollama_record(), ollama_error("boom")), 502, "engine_failed", 1),
    "loads only": ((Json(ollama_record(done="load")),), 502, "engine_protocol_error", 1),
    "loads only, as a stream": (ollama_stream(ollama_record(done="load")), 503, "engine_overloaded", 0),
    "unloads": (ollama_stream(ollama_record(), ollama_record(done="unload")), 503, "engine_overloaded", 0),
    "ends with nothing": (ollama_stream(), 502, "engine_failed", 1),
    "ends without its end": (ollama_stream(ollama_record()), 502, "engine_failed", 1),
    "ends within a record": ((HEAD, Chunk(b'{"message":'), EndChunks()), 502, "engine_failed", 1),
    "is cut": ((HEAD, CloseFin()), 502, "engine_failed", 1),
    "is reset": ((HEAD, CloseReset()), 502, "engine_failed", 1),
    "sends no JSON": ((HEAD, Chunk(b"hello\n"), Hold()), 502, "engine_protocol_error", 1),
    "sends an endless record": ((HEAD, Chunk(b'{"' + b"x" * 5000), Hold()), 502, "engine_protocol_error", 1),
    "speaks its openai layer": ((Head(headers=SSE_HEADERS), Hold()), 502, "engine_protocol_error", 1),
}  # fmt: skip


@pytest.mark.parametrize(
    ("script", "status", "code", "faults"), BEFORE_CONTENT.values(), ids=BEFORE_CONTENT.keys()
)
async def test_a_failure_before_content_is_an_http_error(
    script: Script, status: int, code: str, faults: int
) -> None:
    async with (
        open_engine(script) as engine,
        serving(engine, worker=OLLAMA, retry={"max_attempts": 1}, limits={"event_bytes": 4096}) as gateway,
    ):
        answer = await gateway.ask(chat_request())
        assert (answer.status, error_code(answer)) == (status, code)
        assert gateway.gateway.fleet.books["w1"].faults == faults


async def test_a_refusal_comes_with_ollamas_words() -> None:
    async with open_engine(ScriptedOllama()) as engine, serving(engine, worker=OLLAMA) as gateway:
        answer = await gateway.ask(chat_request(think="a lot"))
        assert (answer.status, answer.error()["type"]) == (400, "invalid_request_error")
        assert "ChatRequest.think" in str(answer.error()["message"])


AFTER_CONTENT: dict[str, tuple[Script, str]] = {
    "ends without its end": ((EndChunks(),), "engine_failed"),
    "ends within a record": ((Chunk(b'{"message":{"con'), EndChunks()), "engine_failed"),
    "is cut": ((CloseFin(),), "engine_failed"),
    "breaks its framing": ((Raw(b"xyz\r\n"), Hold()), "engine_protocol_error"),
    "says an error": ((Chunk(encode_record(ollama_error("boom"))), EndChunks()), "engine_failed"),
    "says an error without a line end": ((Chunk(b'{"error":"boom"}'), EndChunks()), "engine_failed"),
    "sends no JSON": ((Chunk(b"{]\n"), EndChunks()), "engine_protocol_error"),
    "unloads": ((Chunk(encode_record(ollama_record(done="unload"))), EndChunks()), "engine_overloaded"),
}


@pytest.mark.parametrize(("script", "code"), AFTER_CONTENT.values(), ids=AFTER_CONTENT.keys())
async def test_after_content_all_whole_records_arrive_and_then_the_error(script: Script, code: str) -> None:
    begun = (HEAD, Chunk(encode_record(ONE) + encode_record(TWO)))
    async with open_engine((*begun, *script)) as engine, serving(engine, worker=OLLAMA) as gateway:
        reading = (await gateway.ask(chat_request())).chat()
        assert (reading.text, reading.finishes, reading.done) == ("onetwo", {}, 0)
        assert [error["code"] for error in reading.errors] == [code]
        record = await gateway.settled()
        assert (record.outcome, record.attempts) == ("upstream_failed", 1)


async def test_a_record_that_no_line_end_follows_arrives_before_the_cut_is_told() -> None:
    script: Script = (HEAD, Chunk(encode_record(ONE) + encode_record(TWO).rstrip()), EndChunks())
    async with open_engine(script) as engine, serving(engine, worker=OLLAMA) as gateway:
        reading = (await gateway.ask(chat_request())).chat()
        assert (reading.text, reading.done) == ("onetwo", 0)
        assert [error["code"] for error in reading.errors] == ["engine_failed"]


async def test_an_answer_whose_only_record_has_no_line_end_is_whole() -> None:
    script: Script = (HEAD, Chunk(encode_record(ollama_record("all", done="stop")).rstrip()), EndChunks())
    async with open_engine(script) as engine, serving(engine, worker=OLLAMA) as gateway:
        reading = (await gateway.ask(chat_request())).chat()
        assert (reading.text, reading.finishes, reading.done, reading.errors) == ("all", {0: "stop"}, 1, [])
        assert (await gateway.settled()).outcome == "completed"


BUFFERED: dict[str, tuple[object, int, str]] = {
    "an error": (ollama_error("boom"), 502, "engine_failed"),
    "no end": (ollama_record("x"), 502, "engine_failed"),
    "another thing": ([1], 502, "engine_failed"),
    "a load": (ollama_record(done="load"), 503, "engine_overloaded"),
}


@pytest.mark.parametrize(("body", "status", "code"), BUFFERED.values(), ids=BUFFERED.keys())
async def test_a_buffered_answer_that_is_none_is_an_http_error(body: object, status: int, code: str) -> None:
    async with (
        open_engine((Json(body),)) as engine,
        serving(engine, worker=OLLAMA, retry={"max_attempts": 1}) as gateway,
    ):
        answer = await gateway.ask(chat_request(stream=False))
        assert (answer.status, error_code(answer)) == (status, code)


async def test_a_failure_before_content_is_tried_elsewhere_and_leaves_no_trace() -> None:
    failing = ollama_stream(ollama_record(), ollama_error("boom"))
    async with (
        open_engine(failing) as first,
        open_engine(ScriptedOllama()) as second,
        serving(first, second, worker=OLLAMA) as gateway,
    ):
        reading = (await gateway.ask(chat_request())).chat()
        assert (reading.text, reading.done, reading.roles, reading.errors) == ("ok", 1, {0: 1}, [])
        record = await gateway.settled()
        assert (record.outcome, record.attempts, record.worker) == ("completed", 2, "w2")
