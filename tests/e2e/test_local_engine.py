"""A real engine behind the gateway: llama.cpp with a small model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
import trio

from tests.e2e.serving import Serving, serving
from trio_gateway.testing import Answer, LocalEngine, chat_request, json_request, missing_parts

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(missing_parts() is not None, reason=str(missing_parts())),
]
PATIENCE = 30.0  # seconds for a small model on a busy machine
SLOTS = 2
ENDLESS: dict[str, Any] = {"max_tokens": 2000, "ignore_eos": True, "temperature": 0}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
        },
    },
}


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    with LocalEngine(slots=SLOTS, context=1024) as engine:
        yield engine


def before(engine: LocalEngine, **sections: Any) -> AbstractAsyncContextManager[Serving]:
    """A gateway that calls the engine's model ``tiny``."""
    return serving(
        engine.url,
        worker={"kind": "llamacpp", "slots": SLOTS, "cancel_grace": 0.1},
        models=[{"id": "tiny", "upstream": engine.model}],
        **sections,
    )


async def ask(gateway: Serving, text: str = "Say hello.", **fields: Any) -> Answer:
    fields = {"max_tokens": 16, "temperature": 0, **fields}
    with trio.fail_after(PATIENCE), await gateway.connect() as client:
        await client.send(chat_request(text, model="tiny", **fields))
        return await client.read_to_end()


async def test_it_streams(engine: LocalEngine) -> None:
    async with before(engine) as gateway:
        answer = await ask(gateway, stream_options={"include_usage": True})
        reading = answer.chat()
        assert (answer.status, answer.ended, reading.done) == (200, "complete", 1)
        assert reading.text
        assert set(reading.finishes) == {0}
        assert reading.models == {"tiny"}
        assert reading.usage is not None
        record = await gateway.settled()
        assert (record.outcome, record.worker) == ("completed", "w1")
        assert record.tokens_generated == reading.usage["completion_tokens"]
        assert record.tokens_prompt == reading.usage["prompt_tokens"]


async def test_it_answers_as_a_whole_with_the_same_text(engine: LocalEngine) -> None:
    async with before(engine) as gateway:
        whole = (await ask(gateway, stream=False)).json()
        streamed = (await ask(gateway)).chat()
        assert whole["model"] == "tiny"
        assert isinstance(whole["choices"], list)
        assert whole["choices"][0]["message"]["content"] == streamed.text


async def idle(engine: LocalEngine) -> None:
    """Ask the engine until none of its slots generates; it tells nobody by itself.

    It looks for clients of buffered answers that left only when it had no answer of any
    kind to give for a second, those to this question included: so it is asked seldom.
    """
    with trio.fail_after(PATIENCE):
        while await trio.to_thread.run_sync(engine.busy_slots):  # noqa: ASYNC110  # it sets no event
            await trio.sleep(1.2)


@pytest.mark.parametrize("how", ["fin", "reset"])
async def test_its_slot_turns_idle_when_the_client_leaves_within_a_stream(
    engine: LocalEngine, how: str
) -> None:
    async with before(engine) as gateway:
        with trio.fail_after(PATIENCE), await gateway.connect() as client:
            await client.send(chat_request("Count.", model="tiny", **ENDLESS))
            await client.read_events(3)
            assert await trio.to_thread.run_sync(engine.busy_slots) == 1
            if how == "fin":
                client.leave_fin()
            else:
                client.leave_reset()
            record = await gateway.settled()
            assert (record.outcome, record.phase) == ("client_gone", "after_content")
            await idle(engine)


async def test_its_slot_turns_idle_when_the_client_of_a_buffered_answer_leaves(engine: LocalEngine) -> None:
    async with before(engine) as gateway:
        with trio.fail_after(PATIENCE), await gateway.connect() as client:
            await client.send(chat_request("Count.", model="tiny", stream=False, **ENDLESS))
            while not await trio.to_thread.run_sync(engine.busy_slots):
                pass
            client.leave_reset()
            assert (await gateway.settled()).outcome == "client_gone"
            await idle(engine)


async def test_its_slot_turns_idle_at_a_deadline(engine: LocalEngine) -> None:
    async with before(engine) as gateway:
        headers = (("x-gateway-timeout-ms", "700"),)
        with trio.fail_after(PATIENCE), await gateway.connect() as client:
            await client.send(chat_request("Count.", model="tiny", headers=headers, **ENDLESS))
            answer = await client.read_to_end()
        if answer.status == 200:
            assert [error["code"] for error in answer.chat().errors] == ["deadline_exceeded"]
        else:
            assert answer.status == 504  # the machine was too busy for a first token
        await idle(engine)


async def test_more_requests_than_slots_wait_for_their_turn(engine: LocalEngine) -> None:
    answers: list[Answer] = []
    async with before(engine) as gateway:

        async def one(number: int) -> None:
            answers.append(await ask(gateway, f"Say {number}."))

        async with trio.open_nursery() as nursery:
            for number in range(2 * SLOTS + 1):
                nursery.start_soon(one, number)
        assert [answer.chat().done for answer in answers] == [1] * (2 * SLOTS + 1)
        assert all(answer.chat().text for answer in answers)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "buffered"])
async def test_several_choices_take_several_slots(engine: LocalEngine, stream: bool) -> None:
    async with before(engine) as gateway:
        answer = await ask(gateway, n=2, stream=stream, temperature=1)
        if stream:
            reading = answer.chat()
            assert (set(reading.finishes), reading.done) == ({0, 1}, 1)
            assert all(reading.texts[index] for index in (0, 1))
        else:
            choices = answer.json()["choices"]
            assert isinstance(choices, list)
            assert sorted(choice["index"] for choice in choices) == [0, 1]
        refused = await ask(gateway, n=SLOTS + 1)
        assert (refused.status, refused.error()["param"]) == (400, "n")


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "buffered"])
async def test_tools_reach_it_and_it_judges_them(engine: LocalEngine, stream: bool) -> None:
    # The template of this model knows no tools, so it calls none; its errors show that they were read.
    async with before(engine) as gateway:
        answer = await ask(gateway, "Weather in Rome?", tools=[TOOL], tool_choice="auto", stream=stream)
        assert answer.status == 200
        assert not stream or (answer.chat().done, answer.chat().errors) == (1, [])
        for beside in ({"tool_choice": "sometimes"}, {"grammar": 'root ::= "a"'}):
            refused = await ask(gateway, stream=stream, tools=[TOOL], **beside)
            assert refused.status == 400
            assert "tool" in str(refused.error()["message"])


async def test_log_probabilities_come_with_the_tokens(engine: LocalEngine) -> None:
    async with before(engine) as gateway:
        answer = await ask(gateway, logprobs=True, top_logprobs=2, max_tokens=4)
        assert answer.events is not None
        chunks = [chunk for event in answer.events.events if (chunk := event.json()) is not None]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]  # type: ignore[attr-defined]
        tokens = [
            entry for choice in choices if choice.get("logprobs") for entry in choice["logprobs"]["content"]
        ]
        assert tokens
        assert all(entry["logprob"] <= 0 and len(entry["top_logprobs"]) == 2 for entry in tokens)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "buffered"])
async def test_an_answer_keeps_to_a_schema(engine: LocalEngine, stream: bool) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    async with before(engine) as gateway:
        answer = await ask(gateway, "Invent a person.", response_format=form, max_tokens=100, stream=stream)
        if stream:
            text = answer.chat().text
        else:
            choices = answer.json()["choices"]
            assert isinstance(choices, list)
            text = choices[0]["message"]["content"]
        person = json.loads(text)
        assert isinstance(person["name"], str)
        assert isinstance(person["age"], int)


async def test_completions_go_the_same_way(engine: LocalEngine) -> None:
    body = {"model": "tiny", "prompt": "Once upon", "max_tokens": 8, "stream": True, "temperature": 0}
    async with before(engine) as gateway:
        with trio.fail_after(PATIENCE), await gateway.connect() as client:
            await client.send(json_request("/v1/completions", body))
            reading = (await client.read_to_end()).chat()
        assert (reading.done, bool(reading.text)) == (1, True)


async def test_what_it_refuses_is_told_in_our_form(engine: LocalEngine) -> None:
    async with before(engine) as gateway:
        too_long = await ask(gateway, "word " * 3000)
        assert too_long.status == 400
        assert too_long.error()["code"] == "context_length_exceeded"
        assert too_long.header("x-should-retry") == "false"
        nonsense = await ask(
            gateway, response_format={"type": "json_schema", "json_schema": {"schema": {"type": "no"}}}
        )
        assert nonsense.status == 400
        assert nonsense.error()["message"]
        record = await gateway.settled()
        assert (record.outcome, record.phase) == ("refused", "before_headers")
        assert gateway.gateway.fleet.books["w1"].faults == 0
