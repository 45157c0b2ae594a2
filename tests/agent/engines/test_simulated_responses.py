"""OpenAI's Responses by the simulated engine: what is asked is a chat, what is answered the API's events."""

from __future__ import annotations

import json
import typing
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import responses as api
from pydantic import BaseModel

from trio_gateway.agent.engines._simulated_request import AskError, read_ask
from trio_gateway.agent.engines._simulated_responses import ResponseWriter, read_response_ask
from trio_gateway.agent.engines._simulated_text import Piece

TOOLS: Any = [
    {"type": "function", "name": "weather", "parameters": {"type": "object"}},
    {"type": "web_search"},
]


class Counted:
    """Stands for a generation: what its usage is made of."""

    prompt_tokens = 7
    cached_tokens = 3


GENERATION: Any = Counted()
EVENTS: Final[dict[str, type[BaseModel]]] = {
    typing.get_args(event.model_fields["type"].annotation)[0]: event
    for event in typing.get_args(typing.get_args(api.ResponseStreamEvent)[0])
}
WORDS = st.sampled_from(["one ", "two ", "", "\u00e9\n"])


@st.composite
def answers(draw: st.DrawFn) -> list[Piece]:
    """Pieces as the engine makes them: thinking, then text or a call, the last with a finish."""
    pieces = [Piece(word, "reasoning") for word in draw(st.lists(WORDS, max_size=3))]
    if draw(st.booleans()):
        pieces += [
            Piece("weather", "tool"),
            *(Piece(word, "tool") for word in draw(st.lists(WORDS, max_size=3))),
        ]
    else:
        pieces += [Piece(word, "text") for word in draw(st.lists(WORDS, min_size=1, max_size=4))]
    last = pieces.pop()
    return [*pieces, last._replace(finish=draw(st.sampled_from(["stop", "length", "tool_calls"])))]


def writer() -> ResponseWriter:
    return ResponseWriter(None, read_response_ask({"model": "m", "input": "hi"}), "resp_1", 5)


@given(pieces=answers())
def test_events_are_of_the_api_in_order_and_add_up_to_the_response(pieces: list[Piece]) -> None:
    streaming, whole = writer(), writer()
    events: list[tuple[str, dict[str, Any]]] = []
    for piece in pieces:
        assert streaming.unfinished == 1
        events += [(name, json.loads(data)) for name, data in streaming.events(GENERATION, piece)]
        whole.add(0, piece)
    assert streaming.unfinished == whole.unfinished == 0
    for number, (name, event) in enumerate(events):
        assert (event["type"], event["sequence_number"]) == (name, number)
        EVENTS[name].model_validate(event)
    last = events[-1][1]["response"]
    assert last == whole.answer(GENERATION)
    api.Response.model_validate(last)
    status = "incomplete" if pieces[-1].finish == "length" else "completed"
    assert events[-1][0] == f"response.{status}"
    deltas = "".join(event["delta"] for _, event in events if "delta" in event)
    assert deltas == "".join(text_of(item) for item in last["output"])
    done = [event["item"] for name, event in events if name == "response.output_item.done"]
    assert done == last["output"]
    assert last["usage"]["output_tokens"] == len(pieces)
    assert last["usage"]["output_tokens_details"]["reasoning_tokens"] == sum(
        p.kind == "reasoning" for p in pieces
    )


def text_of(item: dict[str, Any]) -> str:
    return str(item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])


def test_a_response_says_what_the_same_chat_is_answered() -> None:
    items: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "weather in Rome?"}]},
        {"type": "message", "role": "assistant", "content": "wait"},
        {"type": "function_call_output", "call_id": "c", "output": "sun"},
    ]
    response = read_response_ask(
        {"model": "m", "instructions": "be kind", "input": items, "tools": TOOLS, "max_output_tokens": 9,
         "seed": 4, "stream": True, "metadata": {"simulate": "reasoning=2"}}
    )  # fmt: skip
    chat = read_ask(
        {
            "model": "m", "stream": True, "max_tokens": 9, "seed": 4, "metadata": {"simulate": "reasoning=2"},
            "messages": [{"role": "system", "content": "be kind"}, items[0], items[1],
                         {"role": "tool", "content": "sun"}],
            "tools": [{"type": "function", "function": TOOLS[0]}],
        },
        chat=True,
    )  # fmt: skip
    assert (response.response, chat.response) == (True, False)
    for name in ("prompts", "limit", "seed", "tool", "stream", "reasoning", "model", "choices"):
        assert getattr(response, name) == getattr(chat, name), name


@pytest.mark.parametrize(
    ("choice", "called"),
    [("none", None), ("required", "weather"), ({"type": "function", "name": "weather"}, "weather")],
)
def test_a_tool_is_called_as_it_is_chosen(choice: object, called: str | None) -> None:
    ask = read_response_ask({"model": "m", "input": "hi", "tools": TOOLS, "tool_choice": choice})
    assert (None if ask.tool is None else ask.tool.name) == called


@pytest.mark.parametrize(
    ("body", "param", "status"),
    [
        ({}, "input", 400),
        ({"input": []}, "input", 400),
        ({"input": [1]}, "input", 400),
        ({"input": [{"type": "message", "content": "no role"}]}, "messages", 400),
        ({"input": "hi", "previous_response_id": "r1"}, "previous_response_id", 404),
        ({"input": "hi", "max_output_tokens": 0}, "max_tokens", 400),
    ],
)
def test_what_can_not_be_answered_is_told(body: dict[str, Any], param: str, status: int) -> None:
    with pytest.raises(AskError) as caught:
        read_response_ask({"model": "m", **body})
    assert (caught.value.param, caught.value.status) == (param, status)
