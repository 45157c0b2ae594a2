"""What a body asks of the simulated engine."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.agent.engines.asks import chat
from trio_gateway.agent.engines._simulated_faults import Fault
from trio_gateway.agent.engines._simulated_request import COMPLETION_LIMIT, Ask, AskError, read_ask

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CLOCK = {"type": "function", "function": {"name": "clock"}}


def completion(prompt: Any = "Once", **members: Any) -> Ask:
    return read_ask({"model": "m", "prompt": prompt, **members}, chat=False)


def words(one: Ask, choice: int = 0, *, engine: int = 0, context: int = 1000) -> str:
    speech = one.speech(choice, engine, context)
    said = [speech.next()]
    while said[-1].finish is None:
        said.append(speech.next())
    return "".join(piece.text for piece in said)


def test_a_chat_is_read_with_all_that_matters() -> None:
    one = chat(
        "hello",
        stream=True,
        n=2,
        max_tokens=5,
        max_completion_tokens=7,
        min_tokens=3,
        stop="end",
        seed=4,
        simulate={"reasoning": 2, "faults": [{"kind": "hang"}]},
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )
    assert (one.model, one.chat, one.stream, one.n, one.choices) == ("m", True, True, 2, 2)
    assert (one.limit, one.shortest, one.stop, one.seed) == (7, 3, ("end",), 4)
    assert (one.usage, one.running_usage, one.reasoning, one.faults) == (True, True, 2, (Fault("hang"),))


def test_what_is_absent_or_null_has_a_usual_value() -> None:
    absent, null = (
        chat(),
        chat(n=None, max_tokens=None, stop=None, seed=None, stream_options=None, tools=None),
    )
    for one in (absent, null):
        assert (one.stream, one.n, one.limit, one.length, one.stop, one.seed) == (False, 1, None, None, (), 0)
        assert (one.usage, one.running_usage, one.tool, one.faults, one.salt) == (False, False, None, (), 0)
    assert completion().limit == COMPLETION_LIMIT
    assert completion(max_tokens=3).limit == 3


def test_running_usage_needs_usage() -> None:
    assert not chat(stream_options={"continuous_usage_stats": True}).running_usage


@pytest.mark.parametrize(
    ("prompt", "count", "first"),
    [
        ("Once", 1, None),
        (["a", "b"], 2, None),
        ([1, 2, 3], 1, [1, 2, 3]),
        ([[1, 2], [3]], 2, [1, 2]),
        ("", 1, [0]),
    ],
)
def test_a_completion_has_one_prompt_or_many(prompt: Any, count: int, first: list[int] | None) -> None:
    one = completion(prompt, n=2)
    assert len(one.prompts) == count
    assert one.choices == 2 * count
    assert first is None or one.prompts[0] == first


def test_each_part_of_a_message_counts() -> None:
    def tokens(content: Any, **more: Any) -> int:
        return len(chat(messages=[{"role": "user", "content": content, **more}]).prompts[0])

    assert tokens("hello there") == 3
    assert tokens([{"type": "text", "text": "hello there"}]) == 3
    assert tokens(None) == 1
    assert tokens([{"type": "image_url", "image_url": {"url": "x"}}, "there"]) > 100
    assert tokens(None, tool_calls=[{"id": "1"}]) > 1
    assert len(chat(tools=[WEATHER]).prompts[0]) > len(chat().prompts[0])


@given(st.text(max_size=30), st.text(max_size=30))
def test_a_conversation_begins_like_its_beginning(first: str, second: str) -> None:
    history = [{"role": "user", "content": first}]
    longer = [*history, {"role": "assistant", "content": second}]
    short, long = (chat(messages=messages).prompts[0] for messages in (history, longer))
    assert long[: len(short)] == short


def test_equal_requests_get_equal_answers_and_others_do_not() -> None:
    said = words(chat("hello", max_tokens=20))
    assert words(chat("hello", max_tokens=20)) == said
    assert words(chat("hello", max_tokens=10)) == said[: len(words(chat("hello", max_tokens=10)))]
    others = [chat("hallo"), chat("hello", seed=1), completion("hello", max_tokens=20)]
    assert all(words(other)[:20] != said[:20] for other in others)
    assert words(chat("hello"), engine=1)[:20] != said[:20]
    two = chat("hello", n=2)
    assert words(two, 0)[:20] == said[:20] != words(two, 1)[:20]


@given(st.text(max_size=30))
def test_an_answer_has_a_length_of_its_own_in_bounds(text: str) -> None:
    assert 16 <= len(words(chat(text)).split(" ")) < 128


def test_the_length_of_an_answer_can_be_asked_for() -> None:
    assert len(words(chat(simulate="tokens=3")).split(" ")) == 3
    assert len(words(chat(min_tokens=200)).split(" ")) == 200
    assert len(words(chat(ignore_eos=True, max_tokens=300)).split(" ")) == 300
    assert len(words(chat(ignore_eos=True), context=50).split(" ")) == 50 - len(chat().prompts[0])


def test_faults_can_come_in_metadata() -> None:
    assert chat(metadata={"simulate": "hang"}).faults == (Fault("hang"),)
    assert chat(metadata={"simulate": "hang"}, simulate="slow").faults == (Fault("slow"),)
    assert chat(metadata="anything").faults == ()


def test_a_salt_is_a_number_of_its_own() -> None:
    assert chat(cache_salt="a").salt not in (0, chat(cache_salt="b").salt)


@pytest.mark.parametrize(
    ("asked", "name", "forced"),
    [
        ({"tool_choice": "required"}, "weather", False),
        ({"tool_choice": {"type": "function", "function": {"name": "clock"}}}, "clock", True),
        (
            {"tool_choice": "auto", "messages": [{"role": "user", "content": "what says the clock?"}]},
            "clock",
            False,
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "the weather"}]}]},
            "weather",
            False,
        ),
    ],
)
def test_a_tool_is_called_where_it_is_asked_for(asked: dict[str, Any], name: str, forced: bool) -> None:
    tool = chat(tools=[WEATHER, CLOCK], **asked).tool
    assert tool is not None
    assert (tool.name, tool.forced) == (name, forced)
    finish = chat(tools=[WEATHER, CLOCK], **asked).speech(0, 0, 1000)
    last = finish.next()
    while last.finish is None:
        last = finish.next()
    assert last.finish == ("stop" if forced else "tool_calls")


@pytest.mark.parametrize(
    "asked",
    [
        {"tools": [WEATHER], "tool_choice": "none", "messages": [{"role": "user", "content": "weather"}]},
        {"tools": [WEATHER]},
        {"tools": [], "tool_choice": "required"},
        {"tools": [WEATHER], "messages": [{"role": "tool", "content": "the weather is fine"}]},
    ],
)
def test_no_tool_is_called_otherwise(asked: dict[str, Any]) -> None:
    assert chat(**asked).tool is None


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"model": 3}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": ["hi"]}, "messages"),
        ({"messages": [{"content": "hi"}]}, "messages"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": True}, "n"),
        ({"max_tokens": "7"}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"stop": [1]}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"simulate": "explode"}, "simulate"),
        ({"tools": ["x"]}, "tools"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"function": "x"}}, "tool_choice"),
    ],
)
def test_what_a_chat_can_not_ask_is_named(members: dict[str, Any], param: str) -> None:
    with pytest.raises(AskError) as error:
        chat(**members)
    assert (error.value.param, error.value.status) == (param, 400)


@pytest.mark.parametrize("prompt", [None, [], 5, [1, "a"], [[]], [["a"]], [None], [True]])
def test_what_is_no_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(AskError) as error:
        completion(prompt)
    assert error.value.param == "prompt"
