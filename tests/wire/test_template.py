"""Forms that are learnt from one event: whatever comes, it passes as if each event had been looked at."""

from __future__ import annotations

import itertools
import json
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_gateway.wire import StreamRelay, StreamShape
from trio_gateway.wire._template import Rendered, Template, lines_of

UPSTREAM: Final = "org/model-instruct"
PUBLIC: Final = 'my "model"'
NAMES: Final = json.dumps(UPSTREAM).encode(), json.dumps(PUBLIC).encode()
USAGE: Final = {"prompt_tokens": 5, "total_tokens": 9, "completion_tokens": 4, "details": {"cached": None}}


def event(text: str = "word", *, usage: object = None, first: str = "id", **choice: object) -> bytes:
    """Write an event as vLLM does, in the compact form."""
    chosen = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": None, **choice}
    value: dict[str, object] = {first: "cmpl-1", "object": "chat.completion.chunk", "created": 17}
    value |= {"model": UPSTREAM, "choices": [chosen]}
    if usage is not None:
        value["usage"] = None if usage == "null" else usage
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def framed(*events: bytes) -> bytes:
    return b"".join(b"data: " + each + b"\n\n" for each in events)


def learnt(from_event: bytes) -> Template:
    found = Template.of(from_event, *NAMES)
    assert found is not None
    return found


def render(form: Template, data: bytes, *, keep_usage: bool = False) -> Rendered | None:
    """Edit whole events; one alone both ways, which must be the same."""
    lines = lines_of(data)
    alone = form.render_alone(data, keep_usage=keep_usage)
    if not lines:
        assert alone is None
        return None
    together = form.render(lines, keep_usage=keep_usage)
    assert alone == (together if len(lines) == 1 else None)
    assert all(map(form.fits, lines)) == (together is not None)
    return together


# What is learnt -------------------------------------------------------------------------------------------


def test_events_of_a_form_are_renamed_and_lose_their_usage() -> None:
    form = learnt(event("a", usage=USAGE))
    rendered = render(form, framed(event("b", usage=USAGE), event("c"), event("d", usage=USAGE)))
    assert rendered is not None
    values = [json.loads(line[6:]) for line in rendered[0].split(b"\n\n")[:-1]]
    assert [value["choices"][0]["delta"]["content"] for value in values] == ["b", "c", "d"]
    assert [value["model"] for value in values] == [PUBLIC] * 3
    assert not any("usage" in value for value in values)
    assert rendered[1] == 3
    assert json.loads(rendered[2] or b"") == {"usage": USAGE}


def test_usage_that_was_asked_for_stays_and_what_needs_no_edit_is_the_same_object() -> None:
    name = NAMES[0]
    form = Template.of(event("a", usage=USAGE), name, name)
    assert form is not None
    events = [event("b", usage=USAGE), event("c")]
    data = framed(*events)
    rendered = form.render([b"data: " + each for each in events], keep_usage=True, data=data)
    assert rendered is not None
    assert rendered[0] is data
    assert json.loads(rendered[2] or b"") == {"usage": USAGE}
    rendered = form.render_alone(framed(events[1]), keep_usage=False)
    assert rendered == (framed(events[1]), 1, None)


def test_a_text_may_be_written_with_escapes() -> None:
    texts = ["a\n", '"', "\\", "\\\\n", "\u20ac", "\U0001f600", "/"]
    events = [event(text) for text in texts]
    events += [
        each.replace("€".encode(), rb"\u20AC").replace("😀".encode(), rb"\ud83D\ude00") for each in events
    ]
    rendered = render(learnt(event("a")), framed(*events))
    assert rendered is not None
    values = [json.loads(line[6:]) for line in rendered[0].split(b"\n\n")[:-1]]
    assert [value["choices"][0]["delta"]["content"] for value in values] == texts * 2


@pytest.mark.parametrize(
    "other",
    [
        framed(event("")),
        framed(event("x").replace(b"x", rb"\u0065")),
        framed(event("x").replace(b"x", rb"\ud83d")),
        framed(event("x").replace(b"x", rb"\ude00")),
        framed(event("x").replace(b"x", rb"\x65")),
        framed(event("x").replace(b"x", b"x\\")),
        framed(event("x").replace(b"x", b"x\\") + event("y")),
        framed(event("x", usage=USAGE).replace(b"5", b"05")),
        framed(event("x", usage=USAGE).replace(b"5", b"")),
        framed(event("x", usage=USAGE).replace(b"5", b"-5")),
        framed(event("x", usage=USAGE).replace(b"5", b"5" * 19)),
        framed(event("x", finish_reason="stop")),
        framed(event("x", index=1)),
        framed(event("x", first="other")),
        framed(event("x", usage={})),
        framed(event("x", usage={"a": "text"})),
        framed(event("x", usage={"a": 1.5})),
        framed(event("x", usage=USAGE)[:-1] + b',"more":1}'),
        framed(event("x", usage=USAGE) + b"}"),
        framed(event("x"))[:-1],
        framed(event("x")) + b": comment\n\n",
        b": comment\n\n" + framed(event("x")),
        framed(b"[DONE]"),
        framed(event("a\x01b").replace(b"\\u0001", b"\x01")),
        b"",
    ],
)
def test_what_has_another_form_is_not_rendered(other: bytes) -> None:
    form = learnt(event("a", usage=USAGE))
    assert render(form, other) is None
    assert render(form, framed(event("good")) + other) is None or not other
    assert render(form, other + framed(event("good"))) is None or not other


@pytest.mark.parametrize(
    "formless",
    [
        event(""),
        b'{"choices":[],"usage":{"prompt_tokens":1}}',
        b'{"id":"x","choices":[{"index":0,"delta":{"tool_calls":[{"index":0}]},"finish_reason":null}]}',
        b'{"choices":[{"index":0,"delta":{"content":"x"}}],"model":"org/model-instruct"}',
        b'{"choices":[{"model":"org/model-instruct","delta":{"content":"x"}}]}',
        b'{"choices":[{"model":"org/model-instruct","delta":{"content":"x"}}],"model":"org/model-instruct"}',
        b'{"model":"org/model-instruct","choices":[{"model":"org/model-instruct","delta":{"content":"x"}}]}',
        b'{"model":"org/model-instruct","model":"org/model-instruct","choices":[{"delta":{"content":"x"}}]}',
        event("a") + b" ",
        event("a", usage=USAGE) + b"\t",
        event("a", usage={"a": "text"}),
        event("a", usage=USAGE)[:-1] + b',"more":1}',
    ],
)
def test_what_has_no_form_teaches_none(formless: bytes) -> None:
    assert Template.of(formless, *NAMES) is None


@pytest.mark.parametrize("blanks", [b"", b" ", b"        "])
def test_blanks_in_front_of_values_are_of_the_form(blanks: bytes) -> None:
    spaced = event("a", usage=USAGE).replace(b":", b":" + blanks)
    rendered = render(learnt(spaced), framed(spaced))
    assert rendered is not None
    assert json.loads(rendered[0][6:])["model"] == PUBLIC
    assert b"usage" not in rendered[0]


def test_a_model_of_another_name_keeps_it() -> None:
    other = event("a").replace(NAMES[0], b'"someone-elses"')
    rendered = render(learnt(other), framed(other))
    assert rendered is not None
    assert rendered[0] == framed(other)


# Beside looking at each -----------------------------------------------------------------------------------


COMPARED: Final = (
    *("events", "content_events", "silent_at_end", "progress", "committed", "done", "aborted", "fault"),
    *("usage", "receipt", "closing", "all_finished", "over", "dropped"),
)


class Looking(StreamRelay):
    """Looks at each event by itself."""

    def _pass_whole(self, data: bytes) -> bytes:
        return self._feed_events(data)


TEXTS: Final = st.sampled_from(
    [
        "a",
        "word",
        " ",
        "",
        "\n",
        '"',
        "é€",
        "\\",
        "\x7f",
        "data: {",
        "\u2028",
        "error",
        UPSTREAM,
        '"},"usage":{',
    ]
)
EVENTS: Final = st.one_of(
    st.builds(event, TEXTS),
    st.builds(event, TEXTS),
    st.builds(event, TEXTS, usage=st.sampled_from([USAGE, {}, "null", {"completion_tokens": 3}, {"x": "y"}])),
    st.builds(event, TEXTS, usage=st.just(USAGE)),
    st.builds(event, TEXTS, index=st.integers(0, 1), delta=st.just({"reasoning": "hm"})),
    st.builds(
        event, TEXTS, delta=st.sampled_from([{}, {"role": "assistant"}, {"role": None, "content": "x"}])
    ),
    st.builds(event, TEXTS, finish_reason=st.sampled_from(["stop", "abort", "length"])),
    st.builds(event, TEXTS, delta=st.just({"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]})),
    st.builds(event, TEXTS, logprobs=st.just({"content": [{"token": "a", "logprob": -0.5}]})),
    st.sampled_from(
        [event("x").replace(b'"x"', text) for text in (rb'"\u0065"', rb'"\ud83d"', rb'"\ud83d\ude00"')]
    ),
    st.sampled_from([event("x") + b"\r", event("x").replace(b",", b"\r,", 1), event("x") + b" "]),
    st.sampled_from(
        [b'{"error":{"message":"no"}}', b"[DONE]", b"{", b'{"choices":[],"usage":{"completion_tokens":7}}']
    ),
)
FORMS: Final = st.lists(st.one_of(EVENTS, EVENTS, EVENTS, st.just(event("again", usage=USAGE))), max_size=12)


@given(
    events=FORMS,
    cuts=st.lists(st.integers(0, 2500), max_size=6),
    change=st.none() | st.tuples(st.integers(0, 2500), st.sampled_from(list(b'\n\r"{}:,x\\\x00 '))),
    renamed=st.booleans(),
    running=st.booleans(),
    receipt=st.booleans(),
    choices=st.integers(1, 2),
    largest=st.sampled_from([10_000, 10_000, 400]),
    as_lines=st.booleans(),
)
def test_a_stream_passes_as_if_each_event_had_been_looked_at(
    events: list[bytes],
    cuts: list[int],
    change: tuple[int, int] | None,
    renamed: bool,
    running: bool,
    receipt: bool,
    choices: int,
    largest: int,
    as_lines: bool,
) -> None:
    shape = StreamShape(
        choices, True, running, UPSTREAM, PUBLIC if renamed else UPSTREAM, largest, (), receipt
    )
    data = bytearray(framed(event("first"), *events))
    if change is not None and change[0] < len(data):
        data[change[0]] = change[1]
    ends = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    fast, looking = StreamRelay(shape), Looking(shape)
    got = [bytearray(), bytearray()]
    for start, end in itertools.pairwise(ends):
        piece = bytes(data[start:end])
        lines = lines_of(piece) if as_lines else None
        got[0] += fast.feed(piece) if not lines else fast.feed_lines(lines)
        got[1] += looking.feed(piece)
    for relay in (fast, looking):
        relay.end()
    assert got[0] == got[1]
    for name in COMPARED:
        if name == "dropped" and looking.over:
            continue  # what stands behind the end may be read with it, or not
        assert getattr(fast, name) == getattr(looking, name), name


def test_most_of_a_usual_stream_is_not_looked_at() -> None:
    looked: list[bytes] = []

    class Counting(StreamRelay):
        def _take_object(self, data: bytes, out: list[bytes]) -> bool:
            looked.append(data)
            return super()._take_object(data, out)

    said = [framed(event(f"{number}", usage=USAGE)) for number in range(100)]
    for pieces in (said, [b"".join(said)]):
        looked.clear()
        relay = Counting(StreamShape(1, False, False, UPSTREAM, PUBLIC, 100_000))
        blocks = b"".join(map(relay.feed, pieces)).split(b"\n\n")[:-1]
        assert [json.loads(block[6:])["model"] for block in blocks] == [PUBLIC] * 100
        assert len(looked) == 2  # that commits, and that has the form
        assert (relay.events, relay.content_events, relay.progress) == (100, 100, 100)
        assert relay.usage is not None
        assert relay.usage.generated == 4


def test_a_stream_without_a_form_is_searched_for_one_a_few_times_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lessons: list[bytes] = []

    def learn(event: bytes, upstream: bytes, public: bytes) -> None:
        lessons.append(event)

    monkeypatch.setattr(Template, "of", learn)
    relay = StreamRelay(StreamShape(1, False, False, UPSTREAM, PUBLIC, 10_000))
    for number in range(100):
        relay.feed(framed(event(f"{number}")))
    assert len(lessons) == 8


def test_blanks_behind_an_event_let_no_brace_too_many_pass() -> None:
    first, good, bad = event("a"), event("b"), event("c") + b"}"
    relay = StreamRelay(StreamShape(1, False, False, UPSTREAM, UPSTREAM, 10_000))
    passed = [relay.feed(framed(each)) for each in (first, good + b" ", bad)]
    assert passed == [framed(first), framed(good + b" "), b""]
    assert relay.fault is not None


def test_lines_before_there_is_a_form_or_in_the_middle_of_an_event_are_fed_as_bytes() -> None:
    shape = StreamShape(1, False, False, UPSTREAM, UPSTREAM, 10_000)
    relay = StreamRelay(shape)
    events = [event(text) for text in "abcd"]
    lines = [b"data: " + each for each in events]
    assert relay.feed_lines(lines[:1]) + relay.feed_lines(lines[1:3]) == framed(*events[:3])
    assert relay.feed(lines[3]) == b""
    assert relay.feed_lines([b"", lines[0]]) == framed(events[3], events[0])
    assert relay.events == 5
    relay.feed(framed(b"[DONE]"))
    assert relay.feed_lines(lines) == b""


def test_events_without_a_form_pass_together_once_nobody_looks_for_one() -> None:
    relay = StreamRelay(StreamShape(1, False, False, UPSTREAM, UPSTREAM, 10_000))
    odd = framed(*[event("x", logprobs={"content": []})] * 3)
    assert all(relay.feed(odd) == odd for _ in range(12))
