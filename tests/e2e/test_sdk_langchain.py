"""LangChain's OpenAI classes, which read more strictly than the SDK below them, understand our answers."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, Final, TypeVar

import openai
import pytest
from langchain_core.exceptions import ModelRateLimitError
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

from tests.e2e.sdks import PROMPT, STREAMED_TOOL_CALL, Door, in_thread, langchain_chat, langchain_embeddings
from tests.e2e.serving import Serving, serving
from tests.e2e.voices import TEXT, refuse, speak
from trio_gateway.testing import (
    Json,
    chat_answer,
    chat_stream,
    embedding_answer,
    open_engine,
)

T = TypeVar("T")
TOOL: Final[Any] = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


async def with_model(gateway: Serving, use: Callable[[ChatOpenAI], T], **more: Any) -> T:
    """Use a chat model in a thread."""

    def run() -> T:
        with langchain_chat(Door(gateway.gateway.addresses[0]), **more) as model:
            return use(model)

    return await in_thread(run)


async def test_a_stream_adds_up_to_one_message_with_its_usage() -> None:
    def use(model: ChatOpenAI) -> Any:
        return functools.reduce(operator.add, model.stream(PROMPT))

    async with open_engine(chat_stream("Hel", "lo", usage=(3, 2))) as engine, serving(engine) as gateway:
        message = await with_model(gateway, use, stream_usage=True)
        assert message.text == "Hello"
        assert message.response_metadata["finish_reason"] == "stop"
        assert message.usage_metadata["output_tokens"] == 2


@pytest.mark.parametrize("streamed", [True, False], ids=["stream", "buffered"])
async def test_tool_calls_are_understood(streamed: bool) -> None:
    def use(model: ChatOpenAI) -> Any:
        bound = model.bind_tools([TOOL])
        return functools.reduce(operator.add, bound.stream(PROMPT)) if streamed else bound.invoke(PROMPT)

    function = {"name": "weather", "arguments": '{"city":"Rome"}'}
    call = {"id": "call_1", "type": "function", "function": function}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
    whole = Json({"id": "c", "object": "chat.completion", "created": 1, "model": "m1", "choices": [choice]})
    async with (
        open_engine(STREAMED_TOOL_CALL if streamed else (whole,)) as engine,
        serving(engine) as gateway,
    ):
        (made,) = (await with_model(gateway, use)).tool_calls
        assert (made["name"], made["args"], made["id"]) == ("weather", {"city": "Rome"}, "call_1")


class Person(BaseModel):
    name: str
    age: int


async def test_an_answer_is_read_into_the_form_that_was_asked_for() -> None:
    async with open_engine(chat_answer('{"name":"Zoë","age":7}')) as engine, serving(engine) as gateway:
        found = await with_model(gateway, lambda model: model.with_structured_output(Person).invoke(PROMPT))
        assert found == Person(name="Zoë", age=7)


async def test_a_batch_is_as_many_requests() -> None:
    async with open_engine(speak) as engine, serving(engine) as gateway:
        answers = await with_model(gateway, lambda model: model.batch([PROMPT] * 5))
        assert [answer.text for answer in answers] == [TEXT] * 5
        assert engine.statistics().requests == 5


async def test_documents_become_vectors() -> None:
    def use() -> list[list[float]]:
        with langchain_embeddings(Door(gateway.gateway.addresses[0])) as model:
            return model.embed_documents(["a", "b"])

    async with open_engine(embedding_answer([0.5], [1.5])) as engine, serving(engine) as gateway:
        assert await in_thread(use) == [[0.5], [1.5]]
        assert engine.requests[0].json()["input"] == ["a", "b"]


async def test_its_own_classes_of_errors_are_raised_for_ours() -> None:
    limits = {"max_attempts": 1}
    async with open_engine(refuse(429)) as engine, serving(engine, retry=limits) as gateway:
        with pytest.raises(ModelRateLimitError) as caught:
            await with_model(gateway, lambda model: model.invoke(PROMPT))
        assert isinstance(caught.value, openai.RateLimitError)
        assert caught.value.code == "engine_overloaded"
