"""Every operation beside chat, and what an owner can do with a request of its own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import pytest
import trio

from tests.e2e.serving import Serving, error_code, serving, tenant
from trio_gateway.testing import (
    Answer,
    Head,
    Json,
    Raw,
    Script,
    WaitFor,
    chat_answer,
    chat_request,
    chat_stream,
    embedding_answer,
    http_request,
    json_request,
    open_engine,
)
from trio_gateway.testing import EndChunks as End


def named(name: str, **fields: object) -> Raw:
    """One event with a name, as a chunk."""
    data = json.dumps({"type": name, **fields}, separators=(",", ":"))
    block = f"event: {name}\ndata: {data}\n\n".encode()
    return Raw(b"%x\r\n%b\r\n" % (len(block), block))


def response(status: str, **fields: object) -> dict[str, object]:
    return {"id": "resp_1", "object": "response", "status": status, "model": "engine-name", **fields}


USAGE = {"input_tokens": 3, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 1}}
RESPONSE_STREAM: Script = (
    Head(),
    named("response.created", sequence_number=0, response=response("in_progress")),
    named("response.output_text.delta", sequence_number=1, delta="Hel"),
    named("response.output_text.delta", sequence_number=2, delta="lo"),
    named("response.completed", sequence_number=3, response=response("completed", usage=USAGE)),
    End(),
)
MESSAGE_STREAM: Script = (
    Head(),
    named("message_start", message={"id": "msg_1", "model": "engine-name", "usage": {"input_tokens": 3}}),
    named("content_block_start", index=0, content_block={"type": "text", "text": ""}),
    named("ping"),
    named("content_block_delta", index=0, delta={"type": "text_delta", "text": "Hello"}),
    named("content_block_stop", index=0),
    named("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 2}),
    named("message_stop"),
    End(),
)
MODELS = [{"id": "m1", "upstream": "engine-name"}]
RESPONSES = ("/v1/responses", {"model": "m1", "input": "hi"}, RESPONSE_STREAM)
MESSAGES = (
    "/v1/messages",
    {"model": "m1", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]},
    MESSAGE_STREAM,
)
NAMED = pytest.mark.parametrize(
    ("path", "body", "script"), [RESPONSES, MESSAGES], ids=["responses", "messages"]
)


def names(answer: Answer) -> list[str | None]:
    assert answer.events is not None
    assert answer.events.problems == []
    return [event.name for event in answer.events.events]


def last(answer: Answer) -> dict[str, object]:
    assert answer.events is not None
    value = json.loads(answer.events.events[-1].data)
    assert isinstance(value, dict)
    return value


# Streams of named events ------------------------------------------------------------------------------------


@NAMED
async def test_named_events_pass_in_order_and_the_terminal_one_ends_the_answer(
    path: str, body: Mapping[str, object], script: Script
) -> None:
    async with open_engine(script) as engine, serving(engine, models=MODELS) as gateway:
        answer = await gateway.ask(json_request(path, {**body, "stream": True}))
        assert answer.ended == "complete"
        assert names(answer) == [json.loads(step.data.split(b"data: ")[1].split(b"\n")[0])["type"]
                                 for step in script if isinstance(step, Raw)]  # fmt: skip
        assert b"engine-name" not in answer.body
        assert b"[DONE]" not in answer.body
        record = await gateway.settled()
        assert (record.outcome, record.tokens_prompt, record.tokens_generated) == ("completed", 3, 2)
        assert json.loads((await engine.request()).body)["model"] == "engine-name"


@NAMED
async def test_an_answer_without_its_terminal_event_is_cut(
    path: str, body: Mapping[str, object], script: Script
) -> None:
    cut = (*script[:-2], End())
    async with open_engine(cut) as engine, serving(engine, models=MODELS) as gateway:
        answer = await gateway.ask(json_request(path, {**body, "stream": True}))
        assert answer.ended == "complete"
        assert names(answer)[-1] == "error"
        assert (await gateway.settled()).outcome == "upstream_failed"


async def test_an_error_in_a_stream_of_responses_goes_on_with_the_numbers() -> None:
    cut = (*RESPONSE_STREAM[:4], End())
    async with open_engine(cut) as engine, serving(engine, models=MODELS) as gateway:
        answer = await gateway.ask(
            json_request("/v1/responses", {"model": "m1", "input": "hi", "stream": True})
        )
        error = last(answer)
        assert (error["type"], error["code"], error["sequence_number"]) == ("error", "engine_failed", 3)


async def test_an_error_in_a_stream_of_messages_has_anthropics_shape() -> None:
    cut = (*MESSAGE_STREAM[:5], End())
    async with open_engine(cut) as engine, serving(engine, models=MODELS) as gateway:
        answer = await gateway.ask(json_request("/v1/messages", {**MESSAGES[1], "stream": True}))
        error = last(answer)
        assert error["type"] == "error"
        assert isinstance(error["error"], dict)
        assert error["error"]["type"] == "api_error"


@NAMED
async def test_what_fails_before_any_output_is_tried_elsewhere(
    path: str, body: Mapping[str, object], script: Script
) -> None:
    quiet = (*script[:2], End())
    async with (
        open_engine(quiet) as bad,
        open_engine(script) as good,
        serving(bad, good, models=MODELS) as gateway,
    ):
        answer = await gateway.ask(json_request(path, {**body, "stream": True}))
        assert names(answer).count(names(answer)[0]) == 1
        assert (await gateway.settled()).attempts == 2


# Buffered answers -------------------------------------------------------------------------------------------

BUFFERED = [
    ("/v1/responses", {"input": "hi"}, response("completed", usage=USAGE)),
    ("/v1/messages", MESSAGES[1], {"type": "message", "stop_reason": "end_turn", "model": "engine-name"}),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "hi"}]}, {"input_tokens": 3}),
    ("/v1/rerank", {"query": "a", "documents": ["b"]}, {"results": [{"index": 0, "relevance_score": 1e0}]}),
    ("/v1/score", {"text_1": "a", "text_2": "b"}, {"data": [{"score": 0.5}]}),
    ("/tokenize", {"prompt": "hi"}, {"tokens": [1, 2]}),
    ("/detokenize", {"tokens": [1, 2]}, {"prompt": "hi"}),
]


@pytest.mark.parametrize(("path", "body", "reply"), BUFFERED, ids=[path for path, *_ in BUFFERED])
async def test_a_buffered_answer_comes_back_with_the_public_name(
    path: str, body: dict[str, object], reply: dict[str, object]
) -> None:
    async with open_engine((Json(reply),)) as engine, serving(engine, models=MODELS) as gateway:
        answer = await gateway.ask(json_request(path, {**body, "model": "m1"}))
        expected = {**reply, "model": "m1"} if "model" in reply else reply
        assert (answer.status, json.loads(answer.body)) == (200, expected)
        request = await engine.request()
        assert request.target == path
        assert json.loads(request.body) == {**body, "model": "engine-name"}


@pytest.mark.parametrize(
    ("path", "body", "reply"),
    [
        ("/v1/responses", {"input": "hi"}, response("failed", error={"message": "broke"})),
        ("/v1/messages", MESSAGES[1], {"type": "message", "stop_reason": None}),
        ("/v1/messages", MESSAGES[1], {"type": "error", "error": {"type": "api_error", "message": "broke"}}),
    ],
)
async def test_a_200_that_is_no_whole_answer_is_a_failure(
    path: str, body: dict[str, object], reply: dict[str, object]
) -> None:
    async with open_engine((Json(reply),)) as engine, serving(engine) as gateway:
        answer = await gateway.ask(json_request(path, {**body, "model": "m1"}))
        assert answer.status == 502
        assert (await gateway.settled()).outcome == "upstream_failed"


# Forms ------------------------------------------------------------------------------------------------------


def form(**fields: bytes) -> tuple[tuple[tuple[str, str], ...], bytes]:
    """Write a form with a file, and its headers."""
    parts = [
        b'--xyz\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n' % (name.encode(), value)
        for name, value in fields.items()
    ]
    file = b'--xyz\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\nRIFF\x00\r\n\r\n'
    return (("content-type", "multipart/form-data; boundary=xyz"),), b"".join([*parts, file, b"--xyz--\r\n"])


@pytest.mark.parametrize(
    ("kind", "said"),
    [("application/json", b'{"text":"hi"}'), ("text/plain; charset=utf-8", b"1\n00:00 hi\n")],
)
async def test_a_form_reaches_the_engine_byte_by_byte_but_for_the_model(kind: str, said: bytes) -> None:
    headers, body = form(model=b"m1", language=b"en")
    length = str(len(said))
    script = (Head(200, (("content-type", kind), ("content-length", length))), Raw(said))
    async with open_engine(script) as engine, serving(engine, models=MODELS) as gateway:
        answer = await gateway.ask(
            http_request("POST", "/v1/audio/transcriptions", headers=headers, body=body)
        )
        assert (answer.status, answer.body) == (200, said)
        request = await engine.request()
        assert request.body == body.replace(b"\r\n\r\nm1\r\n", b"\r\n\r\nengine-name\r\n")


async def test_a_form_must_name_one_model_that_exists_and_hold_a_file() -> None:
    async with open_engine() as engine, serving(engine) as gateway:
        for fields, code in (({}, "missing_field"), ({"model": b"nope"}, "model_not_found")):
            headers, body = form(**fields)
            request = http_request("POST", "/v1/audio/transcriptions", headers=headers, body=body)
            assert error_code(await gateway.ask(request)) == code
        headers, body = form(model=b"m1")
        body = body.replace(b'name="file"', b'name="files"')
        answer = await gateway.ask(
            http_request("POST", "/v1/audio/transcriptions", headers=headers, body=body)
        )
        assert (error_code(answer), answer.error()["param"]) == ("missing_field", "file")
        assert engine.statistics().requests == 0


# Names, defaults, bounds ------------------------------------------------------------------------------------


async def test_an_alias_is_another_name_of_the_same_model() -> None:
    models = [{"id": "m1", "upstream": "engine-name", "aliases": ["small", "a/b"]}]
    async with (
        open_engine(chat_answer(model="engine-name")) as engine,
        serving(engine, models=models) as gateway,
    ):
        answer = await gateway.ask(chat_request(model="a/b", stream=False))
        assert json.loads(answer.body)["model"] == "m1"
        assert json.loads((await engine.request()).body)["model"] == "engine-name"
        assert (await gateway.settled()).model == "m1"
        listed = json.loads((await gateway.get("/v1/models")).body)["data"]
        assert [model["id"] for model in listed] == ["m1"]
        assert json.loads((await gateway.get("/v1/models/a%2Fb")).body)["id"] == "m1"


async def test_defaults_fill_in_what_a_caller_leaves_out() -> None:
    models = [{"id": "m1", "defaults": {"temperature": 0.25, "top_p": 0.5}, "max_output_tokens": 7}]
    async with open_engine(chat_answer()) as engine, serving(engine, models=models) as gateway:
        await gateway.ask(chat_request(stream=False, temperature=None, top_p=1))
        got = json.loads((await engine.request()).body)
        assert (got["temperature"], got["top_p"], got["max_completion_tokens"]) == (0.25, 1, 7)


async def test_more_output_than_the_model_may_give_is_refused() -> None:
    models = [{"id": "m1", "max_output_tokens": 7}]
    async with open_engine() as engine, serving(engine, models=models) as gateway:
        answer = await gateway.ask(chat_request(stream=False, max_tokens=8))
        assert (answer.status, error_code(answer)) == (400, "invalid_value")
        assert engine.statistics().requests == 0


async def test_embeddings_get_no_defaults_of_chats() -> None:
    models = [{"id": "m1", "defaults": {"temperature": 0.25}, "max_output_tokens": 7}]
    async with open_engine(embedding_answer([1.0])) as engine, serving(engine, models=models) as gateway:
        await gateway.ask(json_request("/v1/embeddings", {"model": "m1", "input": "hi"}))
        assert json.loads((await engine.request()).body) == {"model": "m1", "input": "hi"}


# Receipts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [True, False])
async def test_a_receipt_covers_every_event_and_stands_before_the_last_word(asked: bool) -> None:
    sections: dict[str, Any] = {} if asked else {"stream": {"receipt": True}}
    headers = (("x-gateway-receipt", "1"),) if asked else ()
    async with open_engine(chat_stream("one", "two")) as engine, serving(engine, **sections) as gateway:
        answer = await gateway.ask(chat_request(headers=headers))
        assert answer.events is not None
        data = [event.data.encode() for event in answer.events.events if event.data != "[DONE]"]
        digest = hashlib.sha256(b"".join(piece + b"\n" for piece in data)).hexdigest()
        comment = f": receipt sha256={digest} events={len(data)}\n\ndata: [DONE]\n\n".encode()
        assert answer.body.endswith(comment)
        assert (await gateway.settled()).receipt == digest


# A request of one's own -------------------------------------------------------------------------------------

KEYS = [tenant("acme", "acme-key"), tenant("rival", "rival-key")]


async def standing(gateway: Serving, exchange_id: str, key: str, method: str = "GET") -> Answer:
    headers = (("authorization", f"Bearer {key}"),)
    return await gateway.fetch(method, f"/v1/requests/{exchange_id}", headers=headers)


async def test_an_owner_sees_and_cancels_its_request_and_nobody_else_does() -> None:
    never = trio.Event()
    script = (*chat_stream("one")[:3], WaitFor(never), End())
    async with open_engine(script) as engine, serving(engine, tenants=KEYS) as gateway:
        async with trio.open_nursery() as nursery:
            with await gateway.connect() as client:
                await client.send(chat_request(key="acme-key"))
                await client.read_events(1)
                exchange_id = client.answers[0].header("x-request-id") or ""
                assert json.loads((await standing(gateway, exchange_id, "acme-key")).body) == {
                    "id": exchange_id,
                    "state": "running",
                    "position": None,
                    "eta_ms": None,
                    "outcome": None,
                }
                for key, code, status in (
                    ("rival-key", "request_not_found", 404),
                    ("x", "invalid_api_key", 401),
                ):
                    for method in ("GET", "DELETE"):
                        answer = await standing(gateway, exchange_id, key, method)
                        assert (answer.status, error_code(answer)) == (status, code)
                cancelled = json.loads((await standing(gateway, exchange_id, "acme-key", "DELETE")).body)
                assert (cancelled["state"], cancelled["outcome"]) == ("ended", "client_cancelled")
                answer = await client.read_to_end()
                assert error_code_of_last_event(answer) == "request_cancelled"
            nursery.cancel_scope.cancel()
        record = await gateway.settled()
        assert (record.outcome, record.phase) == ("client_cancelled", "after_content")
        after = json.loads((await standing(gateway, exchange_id, "acme-key")).body)
        assert (after["state"], after["outcome"]) == ("ended", "client_cancelled")
        never.set()


def error_code_of_last_event(answer: Answer) -> object:
    error = last(answer)["error"]
    assert isinstance(error, dict)
    return error["code"]


async def test_who_waits_is_told_its_place_and_cancelled_with_a_409() -> None:
    never = trio.Event()
    script = (*chat_stream("one")[:3], WaitFor(never), End())
    async with open_engine(script) as engine, serving(engine, worker={"slots": 1}) as gateway:
        with await gateway.connect() as holder, await gateway.connect() as waiter:
            await holder.send(chat_request())
            await holder.read_events(1)
            await waiter.send(chat_request())
            await gateway.queued(1)
            exchange_id = next(
                e.request.exchange_id for e in gateway.gateway.live if e.standing()[0] == "waiting"
            )
            found = json.loads((await gateway.get(f"/v1/requests/{exchange_id}")).body)
            assert (found["state"], found["position"]) == ("waiting", 1)
            assert found["eta_ms"] >= 1
            assert (await gateway.fetch("DELETE", f"/v1/requests/{exchange_id}")).status == 200
            answer = await waiter.read_to_end()
            assert (answer.status, error_code(answer)) == (409, "request_cancelled")
            holder.leave_reset()
        never.set()


async def test_a_request_that_nobody_made_is_not_found() -> None:
    async with open_engine() as engine, serving(engine) as gateway:
        answer = await gateway.get("/v1/requests/0123456789abcdef0123456789abcdef")
        assert (answer.status, error_code(answer)) == (404, "request_not_found")


# Pages of other origins -------------------------------------------------------------------------------------

ORIGIN = "https://app.example"
CORS: dict[str, Any] = {"server": {"bind": ["127.0.0.1:0"], "cors_origins": [ORIGIN]}, "tenants": KEYS}


async def test_a_preflight_needs_no_key_and_mirrors_the_headers() -> None:
    async with open_engine() as engine, serving(engine, **CORS) as gateway:
        asked = (
            ("origin", ORIGIN),
            ("access-control-request-method", "POST"),
            ("access-control-request-headers", "authorization, x-stainless-os"),
        )
        answer = await gateway.fetch("OPTIONS", "/v1/chat/completions", headers=asked)
        assert answer.status == 204
        assert answer.header("access-control-allow-origin") == ORIGIN
        assert answer.header("access-control-allow-headers") == "authorization, x-stainless-os"
        assert "POST" in (answer.header("access-control-allow-methods") or "")


@pytest.mark.parametrize(("origin", "allowed"), [(ORIGIN, ORIGIN), ("https://other.example", None)])
async def test_every_answer_says_which_page_may_read_it(origin: str, allowed: str | None) -> None:
    async with open_engine(chat_stream("one")) as engine, serving(engine, **CORS) as gateway:
        for key, status in (("acme-key", 200), ("wrong", 401)):
            answer = await gateway.ask(chat_request(key=key, headers=(("origin", origin),)))
            assert answer.status == status
            assert answer.header("access-control-allow-origin") == allowed
            assert answer.header("vary") == "Origin"
