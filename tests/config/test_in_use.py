"""Settings of models, pages and receipts, seen from both ends of a running gateway."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from tests.e2e.serving import serving
from trio_gateway.testing import (
    chat_request,
    error_answer,
    good_answer,
    json_request,
    open_engine,
)

MODEL: dict[str, Any] = {"id": "m1", "aliases": ["short", "org/long:7b"]}


@pytest.mark.parametrize("name", ["m1", "short", "org/long:7b"])
@pytest.mark.parametrize("upstream", ["m1", "engines-own", "short"])
async def test_an_engine_hears_its_own_name_whatever_the_caller_wrote(name: str, upstream: str) -> None:
    models = [{**MODEL, "upstream": upstream}]
    async with (
        open_engine(good_answer, models=[upstream]) as engine,
        serving(engine, models=models) as gateway,
    ):
        answer = await gateway.ask(chat_request(model=name, stream=False))
        assert answer.status == 200
        assert answer.json()["model"] == "m1"
        assert engine.requests[0].json()["model"] == upstream
        assert (await gateway.settled()).model == "m1"


async def test_defaults_fill_in_what_a_caller_leaves_out_and_nothing_else() -> None:
    models = [{**MODEL, "defaults": {"temperature": 0.7, "top_p": 1.0, "stop": ["x"], "kept": {"a": [1]}}}]
    async with open_engine(good_answer) as engine, serving(engine, models=models) as gateway:
        await gateway.ask(chat_request(temperature=0, top_p=None))
        body = engine.requests[0].json()
        assert {key: body[key] for key in ("temperature", "top_p", "stop", "kept")} == {
            "temperature": 0,
            "top_p": 1.0,
            "stop": ["x"],
            "kept": {"a": [1]},
        }
        await gateway.ask(json_request("/v1/embeddings", {"model": "m1", "input": "x"}))
        assert engine.requests[1].json() == {"model": "m1", "input": "x"}


BOUND = [{**MODEL, "max_output_tokens": 9}]


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        ("openai", "max_completion_tokens"),
        ("vllm", "max_tokens"),
        ("sglang", "max_tokens"),
        ("tgi", "max_tokens"),
    ],
)
async def test_a_caller_who_asks_for_no_length_gets_the_models_bound(kind: str, field: str) -> None:
    async with (
        open_engine(good_answer) as engine,
        serving(engine, worker={"kind": kind}, models=BOUND) as gateway,
    ):
        await gateway.ask(chat_request())
        await gateway.ask(chat_request(max_tokens=9))
        await gateway.ask(chat_request(max_completion_tokens=3))
        asked, exact, less = (request.json() for request in engine.requests)
        assert asked[field] == 9
        assert (exact["max_tokens"], "max_completion_tokens" in exact) == (9, False)
        assert (less["max_completion_tokens"], "max_tokens" in less) == (3, False)


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_a_caller_who_asks_for_more_than_the_models_bound_is_refused(field: str) -> None:
    async with open_engine(good_answer) as engine, serving(engine, models=BOUND) as gateway:
        body = {"model": "short", "messages": [{}], field: 10}
        answer = await gateway.ask(json_request("/v1/chat/completions", body))
        assert (answer.status, answer.error()["code"]) == (400, "invalid_value")
        assert "at most 9 " in str(answer.error()["message"])
        assert not engine.requests


@pytest.mark.parametrize(
    ("path", "body", "bound"),
    [
        ("/v1/chat/completions", {"messages": [{}], "max_output_tokens": 5}, "max_completion_tokens"),
        ("/v1/completions", {"prompt": "x", "max_completion_tokens": 5}, "max_tokens"),
        ("/v1/responses", {"input": "x", "max_tokens": 5}, "max_output_tokens"),
        ("/v1/messages", {"messages": [{}], "max_output_tokens": 5}, "max_tokens"),
    ],
)
async def test_a_field_that_the_operation_does_not_know_is_no_bound(
    path: str, body: dict[str, object], bound: str
) -> None:
    async with open_engine(error_answer(400, "no")) as engine, serving(engine, models=BOUND) as gateway:
        await gateway.ask(json_request(path, {"model": "m1", **body}))
        assert engine.requests[0].json()[bound] == 9


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("configured", [True, False])
async def test_a_receipt_comes_if_it_was_configured_or_asked_for(configured: bool, asked: bool) -> None:
    headers = (("x-gateway-receipt", "1"),) if asked else ()
    async with open_engine(good_answer) as engine, serving(engine, stream={"receipt": configured}) as gateway:
        answer = await gateway.ask(chat_request(headers=headers))
        assert answer.events is not None
        data = [event.data for event in answer.events.events]
        assert data.pop() == "[DONE]"
        digest = hashlib.sha256("".join(f"{one}\n" for one in data).encode()).hexdigest()
        wanted = configured or asked
        assert answer.events.comments == ([f" receipt sha256={digest} events={len(data)}"] if wanted else [])
        assert (await gateway.settled()).receipt == (digest if wanted else None)


@pytest.mark.parametrize(
    ("configured", "origin", "admitted"),
    [
        (["https://App.example:443"], "https://app.example", True),
        (["https://app.example"], "https://app.example:8443", False),
        (["https://app.example"], "http://app.example", False),
        (["http://[0:0::1]:3000"], "http://[::1]:3000", True),
        (["*"], "null", True),
        ([], "https://app.example", False),
    ],
)
async def test_a_page_may_call_from_the_origins_that_were_configured(
    configured: list[str], origin: str, admitted: bool
) -> None:
    server = {"bind": ["127.0.0.1:0"], "cors_origins": configured}
    async with open_engine(good_answer) as engine, serving(engine, server=server) as gateway:
        answer = await gateway.ask(chat_request(headers=(("origin", origin),)))
        assert answer.status == 200
        assert answer.header("access-control-allow-origin") == (origin if admitted else None)


@pytest.mark.parametrize(
    ("kind", "path"),
    [("tgi", "/v1/chat/completions"), ("ollama", "/api/chat"), ("openai", "/v1/chat/completions")],
)
async def test_the_kind_of_a_worker_decides_how_it_is_asked(kind: str, path: str) -> None:
    async with (
        open_engine(error_answer(400, "no")) as engine,
        serving(engine, worker={"kind": kind}) as gateway,
    ):
        await gateway.ask(chat_request())
        assert [request.target for request in engine.requests] == [path]
