"""Official SDKs, unmodified, before a real engine: llama.cpp with a small model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any, Final

import anthropic
import openai
import pytest
import trio
from pydantic import BaseModel, Field

from tests.e2e.sdks import (
    MESSAGES,
    PROMPT,
    WAYS,
    Door,
    Heard,
    Way,
    anthropic_client,
    in_thread,
    langchain_chat,
    openai_client,
)
from tests.e2e.serving import Serving, serving
from trio_gateway.testing import LocalEngine, missing_parts

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(missing_parts() is not None, reason=str(missing_parts())),
]

SLOTS: Final = 2
TOO_LONG: Final = "word " * 1000
PARAMETERS: Final = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
}
TOOL: Final[Any] = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}


class Answer(BaseModel):
    yes: bool
    number: int = Field(ge=0, le=9)


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    with LocalEngine(slots=SLOTS, context=512, embeddings=True) as engine:
        yield engine


def before(engine: LocalEngine) -> AbstractAsyncContextManager[Serving]:
    """A gateway that calls the engine's model ``tiny``."""
    return serving(
        engine.url,
        worker={"kind": "llamacpp", "slots": SLOTS, "cancel_grace": 0.1},
        models=[{"id": "tiny", "upstream": engine.model}],
    )


async def at_door(gateway: Serving, use: Callable[[Door], Any]) -> Any:
    """Use an SDK in a thread."""
    return await in_thread(lambda: use(Door(gateway.gateway.addresses[0], model="tiny", tokens=4)))


def asking(way: Way, heard: Heard) -> Callable[[Door], None]:
    return lambda door: way.ask(door, heard)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
async def test_every_way_to_ask_gets_the_model_s_answer(way: Way, engine: LocalEngine) -> None:
    heard = Heard()
    async with before(engine) as gateway:
        await at_door(gateway, asking(way, heard))
        record = await gateway.settled()
    assert heard.finished
    assert heard.text if way.unfinished else len(heard.items) > 100
    assert (record.outcome, record.model) == ("completed", "tiny")


async def test_streams_and_whole_answers_say_the_same_by_every_sdk(engine: LocalEngine) -> None:
    """The same question in the same operation at temperature 0."""
    texts: dict[str, str] = {}
    async with before(engine) as gateway:
        for way in WAYS:
            if any(part in way.name for part in ("embeddings", "completions", "async", " a")):
                continue
            heard = Heard()
            await at_door(gateway, asking(way, heard))
            texts[way.name] = heard.text
    assert len(texts) == 9
    assert len(set(texts.values())) == 1, texts


async def test_a_question_with_tools_is_answered_through_every_sdk(engine: LocalEngine) -> None:
    """So small a model calls none; `test_sdk_openai` and its neighbours see calls."""

    def by_openai(door: Door) -> int:
        with openai_client(door) as client:
            answer = client.chat.completions.create(
                model="tiny", messages=MESSAGES, tools=[TOOL], max_tokens=4, temperature=0, stream=False
            )
        assert answer.choices[0].finish_reason in ("length", "stop", "tool_calls")
        assert answer.usage is not None
        return answer.usage.prompt_tokens

    def by_anthropic(door: Door) -> int:
        tool: Any = {"name": "weather", "input_schema": PARAMETERS}
        with (
            anthropic_client(door) as client,
            client.messages.stream(
                model="tiny", messages=MESSAGES, tools=[tool], max_tokens=4, extra_body={"temperature": 0}
            ) as stream,
        ):
            answer = stream.get_final_message()
        assert answer.stop_reason in ("max_tokens", "end_turn", "tool_use")
        return answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)

    def by_langchain(door: Door) -> int:
        with langchain_chat(door) as model:
            answer: Any = model.bind_tools([TOOL]).invoke(PROMPT)
        return int(answer.usage_metadata["input_tokens"])

    async with before(engine) as gateway:
        lengths = [await at_door(gateway, use) for use in (by_openai, by_anthropic, by_langchain)]
    assert len(set(lengths)) == 1
    assert lengths[0] > 0


async def test_an_answer_keeps_to_the_form_that_an_sdk_asked_for(engine: LocalEngine) -> None:
    def by_openai(door: Door) -> object:
        with openai_client(door) as client:
            answer = client.chat.completions.parse(
                model="tiny", messages=MESSAGES, response_format=Answer, max_tokens=40, temperature=0
            )
        return answer.choices[0].message.parsed

    def by_langchain(door: Door) -> object:
        with langchain_chat(replace(door, tokens=40)) as model:
            return model.with_structured_output(Answer).invoke(PROMPT)

    async with before(engine) as gateway:
        for use in (by_openai, by_langchain):
            assert isinstance(await at_door(gateway, use), Answer)


async def test_log_probabilities_come_with_the_tokens(engine: LocalEngine) -> None:
    def use(door: Door) -> Any:
        with openai_client(door) as client:
            return client.chat.completions.create(
                model="tiny", messages=MESSAGES, max_tokens=3, logprobs=True, top_logprobs=2
            )

    async with before(engine) as gateway:
        tokens = (await at_door(gateway, use)).choices[0].logprobs.content
    assert tokens
    assert all(len(token.top_logprobs) == 2 and token.logprob <= 0 for token in tokens)


async def test_its_refusals_are_typed_exceptions_with_its_own_words(engine: LocalEngine) -> None:
    messages: Any = [{"role": "user", "content": TOO_LONG}]

    def by_openai(door: Door) -> None:
        with openai_client(door) as client:
            client.chat.completions.create(model="tiny", messages=messages, stream=True)

    def by_responses(door: Door) -> None:
        with openai_client(door) as client:
            client.responses.create(model="tiny", input=TOO_LONG)

    def by_anthropic(door: Door) -> None:
        with anthropic_client(door) as client:
            client.messages.create(model="tiny", messages=messages, max_tokens=4, stream=True)

    def by_langchain(door: Door) -> None:
        with langchain_chat(door) as model:
            model.invoke(TOO_LONG)

    async with before(engine) as gateway:
        for use in (by_openai, by_responses, by_anthropic, by_langchain):
            with pytest.raises((openai.BadRequestError, anthropic.BadRequestError)) as caught:
                await at_door(gateway, use)
            error = caught.value
            assert isinstance(error, openai.BadRequestError | anthropic.BadRequestError)
            assert "context size" in error.message
            assert "context_length_exceeded" in json.dumps(error.body)
        assert {record.outcome for record in gateway.records} == {"refused"}


ENDLESS: Final = {"ignore_eos": True}


def openai_leaves(door: Door) -> None:
    with (
        openai_client(door) as client,
        client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=400, stream=True, extra_body=ENDLESS
        ) as stream,
    ):
        next(iter(stream))


def anthropic_leaves(door: Door) -> None:
    with (
        anthropic_client(door) as client,
        client.messages.stream(model="tiny", messages=MESSAGES, max_tokens=400, extra_body=ENDLESS) as stream,
    ):
        next(iter(stream.text_stream))


def langchain_leaves(door: Door) -> None:
    with langchain_chat(replace(door, tokens=400), extra_body=ENDLESS) as model:
        next(iter(model.stream(PROMPT)))


@pytest.mark.parametrize("leave", [openai_leaves, anthropic_leaves, langchain_leaves])
async def test_its_slot_turns_idle_when_an_sdk_leaves_a_stream(
    leave: Callable[[Door], None], engine: LocalEngine
) -> None:
    async with before(engine) as gateway:
        await at_door(gateway, leave)
        assert (await gateway.settled()).outcome == "client_gone"
        with trio.fail_after(30):
            while await trio.to_thread.run_sync(engine.busy_slots):  # noqa: ASYNC110  # it sets no event
                await trio.sleep(1.2)  # it looks for clients that left only when it was left alone
