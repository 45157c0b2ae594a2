"""The scripted Ollama: what it takes and refuses, and the habits that set it apart from other engines."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio

from trio_gateway.testing import (
    Answer,
    RawClient,
    ScriptedEngine,
    ScriptedOllama,
    encode_record,
    json_request,
    open_engine,
)

TEXT_CALL = {"function": {"name": "f", "arguments": "{}"}}  # as OpenAI's API writes them
CHAT = {"model": "m1", "messages": [{"role": "user", "content": "hi"}]}


async def ask(engine: ScriptedEngine, body: dict[str, Any], path: str = "/api/chat") -> Answer:
    with trio.fail_after(10), await RawClient.connect(("127.0.0.1", engine.port)) as client:
        await client.send(json_request(path, body))
        return await client.read_to_end()


def records(answer: Answer) -> list[dict[str, Any]]:
    assert answer.header("content-type") == "application/x-ndjson"
    assert answer.body.endswith(b"\n")
    return [json.loads(line) for line in answer.body.splitlines()]


async def test_it_streams_unless_it_is_told_not_to() -> None:
    async with open_engine(ScriptedOllama(("a", "b"), usage=(3, 0))) as engine:
        *tokens, end = records(await ask(engine, CHAT))
        assert [token["message"]["content"] for token in tokens] == ["a", "b"]
        assert [token["done"] for token in tokens] == [False, False]
        assert (end["done"], end["done_reason"], end["prompt_eval_count"]) == (True, "stop", 3)
        assert "eval_count" not in end  # a count of 0 is left out
        whole: dict[str, Any] = (await ask(engine, {**CHAT, "stream": False})).json()
        assert (whole["message"]["content"], whole["done"]) == ("ab", True)


async def test_thinking_comes_first_and_tool_calls_whole() -> None:
    call = {"function": {"name": "f", "arguments": {"x": 1}}}
    async with open_engine(ScriptedOllama(("a",), thinking=("t",), calls=(call,))) as engine:
        thought, text, called, end = (one["message"] for one in records(await ask(engine, CHAT)))
        assert (thought["thinking"], text["content"], called["tool_calls"]) == ("t", "a", [call])
        assert end == {"role": "assistant", "content": ""}


async def test_a_failure_is_a_record_after_output_and_a_status_before_it() -> None:
    async with open_engine(ScriptedOllama(("a",), failure="boom")) as engine:
        *_, last = records(await ask(engine, CHAT))
        assert last == {"error": "boom"}
        whole = await ask(engine, {**CHAT, "stream": False})
        assert (whole.status, whole.json()) == (500, {"error": "boom"})
    async with open_engine(ScriptedOllama((), failure="boom")) as engine:
        at_once = await ask(engine, CHAT)
        assert (at_once.status, at_once.json()) == (500, {"error": "boom"})


async def test_its_openai_layer_hides_a_failure_in_the_middle() -> None:
    async with open_engine(ScriptedOllama(("a",), failure="boom")) as engine:
        answer = await ask(engine, {**CHAT, "stream": True}, "/v1/chat/completions")
        reading = answer.chat()
        assert (reading.text, reading.finishes, reading.done, reading.errors) == ("a", {}, 0, [])
        assert b"boom" not in answer.body


async def test_without_messages_it_only_loads_or_unloads() -> None:
    async with open_engine(ScriptedOllama()) as engine:
        for more, reason in (({}, "load"), ({"keep_alive": 0}, "unload")):
            answer = await ask(engine, {"model": "m1", **more})
            assert answer.json()["done_reason"] == reason


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"model": "other"}, 404),
        ({"messages": [{"role": "user", "content": []}]}, 400),
        ({"messages": [{"role": "user", "content": "x", "images": ["https://x/"]}]}, 400),
        ({"messages": [{"role": "assistant", "tool_calls": [TEXT_CALL]}]}, 400),
        ({"messages": ["x"]}, 400),
        ({"think": "a lot"}, 400),
        ({"stream": "yes"}, 400),
        ({"options": {"temperature": "hot"}}, 500),
        ({"options": {"stop": "x"}}, 500),
    ],
)  # fmt: skip
async def test_what_its_server_could_not_read_it_refuses(fields: dict[str, Any], status: int) -> None:
    async with open_engine(ScriptedOllama()) as engine:
        answer = await ask(engine, {**CHAT, **fields})
        assert answer.status == status
        assert isinstance(answer.json()["error"], str)


def test_its_records_escape_what_go_escapes() -> None:
    line = encode_record({"x": "<a>&\u2028\u00e9"})
    assert line == b'{"x":"\\u003ca\\u003e\\u0026\\u2028\xc3\xa9"}\n'
