"""The real OpenAI SDK understands our answers, whole and streamed, with all that they can hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import openai
import pytest
import trio
from pydantic import BaseModel

from tests.e2e.sdks import MESSAGES, STREAMED_TOOL_CALL, Door, in_thread, openai_client
from tests.e2e.serving import LIMIT, Serving, serving
from tests.e2e.voices import TEXT, speak, voice_of
from trio_gateway.testing import (
    CloseFin,
    EngineRequest,
    Hold,
    Json,
    Script,
    WaitFor,
    chat_answer,
    chat_stream,
    open_engine,
    refusing_port,
)

T = TypeVar("T")
TOOL: Final[Any] = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


async def with_sdk(gateway: Serving, use: Callable[[openai.OpenAI], T], **door: Any) -> T:
    """Use the SDK's synchronous client in a thread."""

    def run() -> T:
        with openai_client(Door(gateway.gateway.addresses[0], **door)) as client:
            return use(client)

    return await in_thread(run)


def chat(**more: Any) -> Callable[[openai.OpenAI], Any]:
    return lambda client: client.chat.completions.create(**{"model": "m1", "messages": MESSAGES, **more})


def streamed(**more: Any) -> Callable[[openai.OpenAI], list[Any]]:
    return lambda client: list(chat(stream=True, **more)(client))


def text_of(chunks: list[Any]) -> str:
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


async def test_a_stream_arrives_token_by_token_with_its_usage() -> None:
    async with open_engine(chat_stream("Hel", "lo", usage=(3, 2))) as engine, serving(engine) as gateway:
        chunks = await with_sdk(gateway, streamed(stream_options={"include_usage": True}))
        assert text_of(chunks) == "Hello"
        assert chunks[-2].choices[0].finish_reason == "stop"
        assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], 2)


async def test_heartbeats_do_not_disturb_it() -> None:
    go = trio.Event()

    def script(request: EngineRequest) -> Script:
        return (WaitFor(go), *voice_of(request).good)

    def respond(client: openai.OpenAI) -> list[Any]:
        return list(client.responses.create(model="m1", input="hi", stream=True))

    async with (
        open_engine(script) as engine,
        serving(engine, stream={"heartbeat_after": 0.02}) as gateway,
        trio.open_nursery() as nursery,
    ):

        async def read_both() -> None:
            assert text_of(await with_sdk(gateway, streamed())) == TEXT
            events = await with_sdk(gateway, respond)
            assert [event.type for event in events].count("response.completed") == 1

        nursery.start_soon(read_both)
        await gateway.until(lambda: any(exchange.tally.headers for exchange in gateway.gateway.live))
        go.set()


async def test_a_buffered_answer_has_all_its_choices() -> None:
    async with open_engine(chat_answer("whole", choices=2)) as engine, serving(engine) as gateway:
        answer = await with_sdk(gateway, chat(n=2))
        assert [choice.message.content for choice in answer.choices] == ["whole", "whole"]
        assert answer.usage.total_tokens == 4


async def test_every_answer_tells_its_request_id() -> None:
    async with open_engine(speak) as engine, serving(engine) as gateway:
        answer = await with_sdk(gateway, chat())
        assert answer._request_id == (await gateway.settled()).exchange_id
        raw = await with_sdk(gateway, lambda client: client.responses.create(model="m1", input="hi"))
        assert raw._request_id == (await gateway.settled(2)).exchange_id


async def test_models_are_listed_and_found() -> None:
    models = [{"id": "org/small", "upstream": "s"}, {"id": "m1"}]
    async with open_engine() as engine, serving(engine, models=models) as gateway:
        listed = await with_sdk(gateway, lambda c: [model.id for model in c.models.list()])
        assert listed == ["org/small", "m1"]
        assert (await with_sdk(gateway, lambda c: c.models.retrieve("org/small"))).id == "org/small"


# Tools, forms and reasoning ---------------------------------------------------------------------------------


async def test_a_tool_call_is_put_together_from_its_pieces() -> None:
    def use(client: openai.OpenAI) -> Any:
        with client.chat.completions.stream(model="m1", messages=MESSAGES, tools=[TOOL]) as stream:
            return stream.get_final_completion()

    async with open_engine(STREAMED_TOOL_CALL) as engine, serving(engine) as gateway:
        answer = await with_sdk(gateway, use)
        (call,) = answer.choices[0].message.tool_calls
        assert (call.id, call.function.name, call.function.arguments) == (
            "call_1",
            "weather",
            '{"city":"Rome"}',
        )
        assert answer.choices[0].finish_reason == "tool_calls"
        assert engine.requests[0].json()["tools"] == [TOOL]


class Person(BaseModel):
    name: str
    age: int


async def test_an_answer_is_parsed_into_the_form_that_was_asked_for() -> None:
    async with open_engine(chat_answer('{"name":"Zoë","age":7}')) as engine, serving(engine) as gateway:
        answer = await with_sdk(
            gateway,
            lambda client: client.chat.completions.parse(
                model="m1", messages=MESSAGES, response_format=Person
            ),
        )
        assert answer.choices[0].message.parsed == Person(name="Zoë", age=7)
        form = engine.requests[0].json()["response_format"]
        assert isinstance(form, dict)
        assert form["json_schema"]["schema"]["required"] == ["name", "age"]


async def test_log_probabilities_and_reasoning_come_through() -> None:
    token = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}
    message = {"role": "assistant", "content": "a", "reasoning_content": "hm", "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": {"content": [token]}, "finish_reason": "stop"}
    body = {"id": "c", "object": "chat.completion", "created": 1, "model": "m1", "choices": [choice]}
    async with open_engine((Json(body),)) as engine, serving(engine) as gateway:
        answer = await with_sdk(gateway, chat(logprobs=True))
        assert answer.choices[0].logprobs.content[0].logprob == -0.5
        assert answer.choices[0].message.reasoning_content == "hm"


# Responses --------------------------------------------------------------------------------------------------


async def test_a_streamed_response_is_put_together_from_its_events() -> None:
    def use(client: openai.OpenAI) -> Any:
        with client.responses.stream(model="m1", input="hi") as stream:
            return stream.get_final_response()

    async with open_engine(speak) as engine, serving(engine) as gateway:
        response = await with_sdk(gateway, use)
        assert (response.output_text, response.status) == (TEXT, "completed")
        assert response.usage.output_tokens == 2


async def test_a_broken_response_has_no_final_form() -> None:
    def use(client: openai.OpenAI) -> Any:
        with client.responses.stream(model="m1", input="hi") as stream:
            return stream.get_final_response()

    def script(request: EngineRequest) -> Script:
        return (*voice_of(request).begun, CloseFin())

    async with open_engine(script) as engine, serving(engine) as gateway:
        with pytest.raises(openai.APIError, match="cut") as caught:
            await with_sdk(gateway, use)
        assert caught.value.code == "engine_failed"


# Elsewhere than in a thread ---------------------------------------------------------------------------------


# It stops reading at [DONE] and leaves its own generators to the garbage collector, which Trio remarks upon.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <async_generator")
async def test_its_asynchronous_client_runs_on_trio_itself() -> None:
    async with open_engine(speak) as engine, serving(engine) as gateway:
        http = openai.DefaultAsyncHttpxClient(trust_env=False)
        url = f"{gateway.gateway.addresses[0]}/v1"
        with trio.fail_after(LIMIT):
            async with openai.AsyncOpenAI(base_url=url, api_key="x", http_client=http) as client:
                text = ""
                async for chunk in await client.chat.completions.create(
                    model="m1", messages=MESSAGES, stream=True
                ):
                    text += chunk.choices[0].delta.content or ""
        assert text == TEXT


async def test_leaving_the_block_of_a_stream_frees_the_engine() -> None:
    def use(client: openai.OpenAI) -> str:
        with chat(stream=True)(client) as chunks:
            return str(next(chunk.choices[0].delta.content for chunk in chunks if text_of([chunk])))

    def script(request: EngineRequest) -> Script:
        return (*voice_of(request).begun, Hold())

    async with open_engine(script) as engine, serving(engine) as gateway:
        assert await with_sdk(gateway, use) == "one"
        assert (await gateway.settled()).outcome == "client_gone"
        with trio.fail_after(LIMIT):
            await engine.wait_idle()


async def test_a_gateway_that_is_not_there_is_a_connection_error() -> None:
    with refusing_port() as port:

        def ask() -> None:
            with openai_client(Door(f"http://127.0.0.1:{port}")) as client:
                chat()(client)

        with pytest.raises(openai.APIConnectionError):
            await in_thread(ask)
