"""The real OpenAI SDK understands our answers, our errors, and an answer that was cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import openai
import pytest
import trio

from tests.e2e.serving import LIMIT, Serving, serving, tenant
from trio_gateway.contract import Ending, Outcome
from trio_gateway.testing import (
    CloseFin,
    Hold,
    Script,
    WaitFor,
    chat_answer,
    chat_stream,
    completion_stream,
    embedding_answer,
    error_answer,
    error_event,
    good_answer,
    open_engine,
    refusing_port,
)

MESSAGES: Any = [{"role": "user", "content": "hi"}]
TENANTS = [tenant("acme", "key-a", models=["m1"])]
BEGUN = chat_stream("one", "two", finish=None, done=False, end=False)

T = TypeVar("T")


async def with_sdk(
    gateway: Serving, use: Callable[[openai.OpenAI], T], *, key: str = "key-a", retries: int = 0
) -> T:
    """Use the SDK's synchronous client in a thread."""
    url = f"{gateway.gateway.addresses[0]}/v1"

    def run() -> T:
        http = openai.DefaultHttpxClient(trust_env=False, timeout=LIMIT)
        with openai.OpenAI(base_url=url, api_key=key, max_retries=retries, http_client=http) as client:
            return use(client)

    with trio.fail_after(LIMIT):
        return await trio.to_thread.run_sync(run, abandon_on_cancel=True)


def chat(**more: Any) -> Callable[[openai.OpenAI], Any]:
    return lambda client: client.chat.completions.create(**{"model": "m1", "messages": MESSAGES, **more})


def stream(seen: list[Any], **more: Any) -> Callable[[openai.OpenAI], None]:
    """Stream an answer, and put each chunk where a failure leaves it."""

    def use(client: openai.OpenAI) -> None:
        with client.chat.completions.create(model="m1", messages=MESSAGES, stream=True, **more) as chunks:
            for chunk in chunks:
                seen.append(chunk)  # noqa: PERF402  # what came before a failure is looked at

    return use


def text_of(chunks: list[Any]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


async def test_a_stream_arrives_token_by_token_with_its_usage() -> None:
    async with open_engine(chat_stream("Hel", "lo", usage=(3, 2))) as engine, serving(engine) as gateway:
        chunks: list[Any] = []
        await with_sdk(gateway, stream(chunks, stream_options={"include_usage": True}))
        assert text_of(chunks) == "Hello"
        assert chunks[-2].choices[0].finish_reason == "stop"
        assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], 2)


async def test_heartbeats_do_not_disturb_it() -> None:
    go = trio.Event()
    script = (WaitFor(go), *chat_stream("Hel", "lo"))
    async with open_engine(script) as engine, serving(engine, stream={"heartbeat_after": 0.02}) as gateway:
        chunks: list[Any] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(with_sdk, gateway, stream(chunks))
            await gateway.until(lambda: any(exchange.tally.headers for exchange in gateway.gateway.live))
            go.set()
        assert text_of(chunks) == "Hello"


async def test_buffered_answers_completions_and_embeddings_are_understood() -> None:
    scripts = [chat_answer("whole", choices=2), completion_stream("a", "b"), embedding_answer([0.5, 1.5])]
    async with open_engine(*scripts) as engine, serving(engine) as gateway:
        answer = await with_sdk(gateway, chat(n=2))
        assert [choice.message.content for choice in answer.choices] == ["whole", "whole"]
        pieces = await with_sdk(
            gateway, lambda c: list(c.completions.create(model="m1", prompt="x", stream=True))
        )
        assert "".join(piece.choices[0].text for piece in pieces) == "ab"
        vectors = await with_sdk(
            gateway, lambda c: c.embeddings.create(model="m1", input="x", encoding_format="float")
        )
        assert vectors.data[0].embedding == [0.5, 1.5]


async def test_models_are_listed_and_found() -> None:
    models = [{"id": "org/small", "upstream": "s"}, {"id": "m1"}]
    async with open_engine() as engine, serving(engine, models=models) as gateway:
        listed = await with_sdk(gateway, lambda c: [model.id for model in c.models.list()])
        assert listed == ["org/small", "m1"]
        assert (await with_sdk(gateway, lambda c: c.models.retrieve("org/small"))).id == "org/small"


ERRORS: dict[str, tuple[Script, int, type[openai.APIStatusError]]] = {
    "bad request": (
        error_answer(400, "no such option", type_="BadRequestError"),
        400,
        openai.BadRequestError,
    ),
    "unprocessable": (error_answer(422), 422, openai.UnprocessableEntityError),
    "not found": (error_answer(404), 404, openai.NotFoundError),
    "conflict": (error_answer(409), 409, openai.ConflictError),
    "too many": (error_answer(429), 429, openai.RateLimitError),
    "overloaded": (error_answer(503), 503, openai.InternalServerError),
    "failed": (error_answer(500), 502, openai.InternalServerError),
    "cut": ((CloseFin(),), 502, openai.InternalServerError),
    "too slow": ((Hold(),), 504, openai.InternalServerError),
}


@pytest.mark.parametrize("streamed", [True, False], ids=["stream", "buffered"])
@pytest.mark.parametrize(("script", "status", "kind"), ERRORS.values(), ids=ERRORS.keys())
async def test_our_errors_are_its_typed_exceptions(
    script: Script, status: int, kind: type[openai.APIStatusError], streamed: bool
) -> None:
    limits: Any = {"retry": {"max_attempts": 1}, "deadlines": {"first_token": 0.2}}
    async with open_engine(script) as engine, serving(engine, **limits) as gateway:
        with pytest.raises(kind) as caught:
            await with_sdk(gateway, stream([]) if streamed else chat())
        error = caught.value
        assert error.status_code == status
        assert error.message
        assert error.code
        record = await gateway.settled()
        assert error.request_id == record.exchange_id
        assert isinstance(error.body, dict)
        assert error.body["gateway"]["request_id"] == record.exchange_id


async def test_refusals_of_our_own_are_its_typed_exceptions() -> None:
    async with (
        open_engine() as engine,
        serving(engine, tenants=TENANTS, models=[{"id": "m1"}, {"id": "m2"}]) as gateway,
    ):
        for key, body, kind, code in (
            ("wrong", {}, openai.AuthenticationError, "invalid_api_key"),
            ("key-a", {"model": "m2"}, openai.PermissionDeniedError, "model_not_allowed"),
            ("key-a", {"model": "m3"}, openai.NotFoundError, "model_not_found"),
            ("key-a", {"n": -1}, openai.BadRequestError, "invalid_value"),
        ):
            with pytest.raises(kind) as caught:
                await with_sdk(gateway, chat(**body), key=key)
            assert isinstance(caught.value, openai.APIStatusError)
            assert caught.value.code == code
            assert caught.value.request_id


@pytest.mark.parametrize(
    ("fault", "code"),
    [(CloseFin(), "engine_failed"), (error_event("broke"), "engine_failed"), (Hold(), "engine_failed")],
    ids=["cut", "an error event", "silence"],
)
async def test_a_stream_that_fails_in_its_middle_raises_after_what_had_come(fault: Any, code: str) -> None:
    async with (
        open_engine((*BEGUN, fault)) as engine,
        serving(engine, deadlines={"between_events": 0.2}) as gateway,
    ):
        chunks: list[Any] = []
        with pytest.raises(openai.APIError) as caught:
            await with_sdk(gateway, stream(chunks))
        assert text_of(chunks) == "onetwo"
        assert caught.value.code == code
        assert (await gateway.settled()).outcome == "upstream_failed"


async def test_an_answer_whose_connection_is_cut_raises_and_never_looks_whole() -> None:
    async with open_engine((*BEGUN, Hold())) as engine, serving(engine) as gateway:
        chunks: list[Any] = []

        async def cut() -> None:
            await gateway.until(lambda: len(gateway.gateway.live) == 1)
            exchange = next(iter(gateway.gateway.live))
            await gateway.until(lambda: exchange.tally.committed)
            exchange.end(Ending(Outcome.CLIENT_STALLED))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(cut)
            with pytest.raises(openai.APIConnectionError):
                await with_sdk(gateway, stream(chunks))
        assert all(chunk.choices[0].finish_reason is None for chunk in chunks)


async def test_it_comes_back_when_we_say_when(nursery: trio.Nursery) -> None:
    async with (
        open_engine(error_answer(429, headers=(("retry-after", "1"),)), good_answer) as engine,
        serving(engine, retry={"max_attempts": 1}) as gateway,
    ):
        answer = await with_sdk(gateway, chat(), retries=1)
        assert answer.choices[0].message.content == "ok"
        await gateway.settled(2)
        assert [record.outcome for record in gateway.records] == ["refused", "completed"]


async def test_it_does_not_come_back_when_we_say_that_it_makes_no_sense() -> None:
    async with (
        open_engine(error_answer(500)) as first,
        open_engine(error_answer(500)) as second,
        serving(first, second) as gateway,
    ):
        with pytest.raises(openai.InternalServerError):
            await with_sdk(gateway, chat(), retries=3)
        assert (first.statistics().requests, second.statistics().requests) == (1, 1)


async def test_a_gateway_that_is_not_there_is_a_connection_error() -> None:
    with refusing_port() as port:

        def ask() -> None:
            http = openai.DefaultHttpxClient(trust_env=False)
            url = f"http://127.0.0.1:{port}/v1"
            with openai.OpenAI(base_url=url, api_key="x", max_retries=0, http_client=http) as client:
                chat()(client)

        with trio.fail_after(LIMIT), pytest.raises(openai.APIConnectionError):
            await trio.to_thread.run_sync(ask, abandon_on_cancel=True)
