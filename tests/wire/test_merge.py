"""Joining deltas: what may become one event, what may not, and that no reader can tell by what it reads."""

from __future__ import annotations

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from tests.wire.deltas import read, streams
from trio_gateway.flow import BufferPool, ByteChannel
from trio_gateway.units import KiB
from trio_gateway.wire import DeltaJoiner
from trio_gateway.wire._merge import MOST_CUTS, MOST_JOINED, MOST_SPLIT


def event(text: str) -> bytes:
    return b"data: " + text.encode() + b"\n\n"


def chunk(choice: str, beside: str = '"id":"x"') -> bytes:
    return event(f'{{{beside},"choices":[{{"index":0,{choice},"finish_reason":null}}]}}')


def says(text: str) -> bytes:
    """A delta as most engines write it; ``text`` is the inside of a JSON string."""
    return chunk(f'"delta":{{"content":"{text}"}}')


def tool(function: str, beside: str = '"index":0') -> bytes:
    return chunk(f'"delta":{{"tool_calls":[{{{beside},"function":{{{function}}}}}]}}')


def joined(*events: bytes, most: int = MOST_JOINED) -> list[tuple[bytes, int]]:
    """What waits after these came one by one and nobody took any, with how many were joined to each."""
    joiner = DeltaJoiner(most)
    waits = [(events[0], 0)]
    for each in events[1:]:
        last, _ = waits.pop()
        waits += [(data, more) for data, more, _ in joiner.join(last, each)]
    return waits


# What becomes one -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "two", "both"),
    [
        (says("a"), says("b"), says("ab")),
        (says(""), says("b"), says("b")),
        (says("a"), says(""), says("a")),
        (says('\\"'), says('x\\"'), says('\\"x\\"')),
        (says("\\\\"), says("n"), says("\\\\n")),  # a backslash and an n, no line end
        (says("n"), says("\\\\"), says("n\\\\")),
        (says("\u00e9"), says("\U0001f600"), says("\u00e9\U0001f600")),
        (says("}]"), says("data: {}"), says("}]data: {}")),
        *(
            (
                chunk(f'"delta":{{"{name}":"a","other":null}}'),
                chunk(f'"delta":{{"{name}":"b","other":null}}'),
                chunk(f'"delta":{{"{name}":"ab","other":null}}'),
            )
            for name in ("content", "reasoning", "reasoning_content", "refusal")
        ),
        (
            chunk('"delta":{"role":"assistant","content":"a"}'),
            chunk('"delta":{"role":"assistant","content":"b"}'),
            chunk('"delta":{"role":"assistant","content":"ab"}'),
        ),
        (
            chunk('"delta":{"content":"a","reasoning":"x"}'),
            chunk('"delta":{"content":"b","reasoning":"y"}'),
            chunk('"delta":{"content":"ab","reasoning":"xy"}'),
        ),
        (tool('"arguments":"{\\"a"'), tool('"arguments":"\\":1}"'), tool('"arguments":"{\\"a\\":1}"')),
        (
            tool('"name":null,"arguments":"1"', '"index":1,"id":null,"type":"function"'),
            tool('"name":null,"arguments":"2"', '"index":1,"id":null,"type":"function"'),
            tool('"name":null,"arguments":"12"', '"index":1,"id":null,"type":"function"'),
        ),
        (chunk('"text":"a"'), chunk('"text":"b"'), chunk('"text":"ab"')),
        (
            chunk('"text":"a","logprobs":{"tokens":["a"],"token_logprobs":[-0.1],"text_offset":[3]}'),
            chunk('"text":"b","logprobs":{"tokens":["b"],"token_logprobs":[null],"text_offset":[4]}'),
            chunk(
                '"text":"ab","logprobs":{"tokens":["a","b"],"token_logprobs":[-0.1,null],"text_offset":[3,4]}'
            ),
        ),
        (
            chunk('"delta":{"content":"a"},"logprobs":{"content":[{"b":[1]}],"refusal":null}'),
            chunk('"delta":{"content":"b"},"logprobs":{"content":[{"b":[2]},3],"refusal":null}'),
            chunk('"delta":{"content":"ab"},"logprobs":{"content":[{"b":[1]},{"b":[2]},3],"refusal":null}'),
        ),
        (
            chunk('"delta":{"refusal":"a"},"logprobs":{"content":[],"refusal":[ ]}'),
            chunk('"delta":{"refusal":"b"},"logprobs":{"content":[],"refusal":[ 1 , 2 ]}'),
            chunk('"delta":{"refusal":"ab"},"logprobs":{"content":[],"refusal":[1 , 2]}'),
        ),
        (
            chunk('"delta":{"content":"a","tool_calls":null},"logprobs":null'),
            chunk('"delta":{"content":"b","tool_calls":null},"logprobs":null'),
            chunk('"delta":{"content":"ab","tool_calls":null},"logprobs":null'),
        ),
        (
            chunk('"delta":{"content":"a"},"token_ids":[1e0]'),
            chunk('"delta":{"content":"b"},"token_ids":[123456789012345678901234567890,2]'),
            chunk('"delta":{"content":"ab"},"token_ids":[1e0,123456789012345678901234567890,2]'),
        ),
        (chunk('"token_ids":[]'), chunk('"token_ids":[7]'), chunk('"token_ids":[7]')),
        # All beside it stays as it was written.
        (
            chunk('"delta":{"content":"a"},"x":1e0', '"created":12345678901234567890,"usage":null'),
            chunk('"delta":{"content":"b"},"x":1e0', '"created":12345678901234567890,"usage":null'),
            chunk('"delta":{"content":"ab"},"x":1e0', '"created":12345678901234567890,"usage":null'),
        ),
        # However it is spaced.
        (
            event('{ "choices" : [ { "delta" : {"content": "a"} } ] , "x\\u0079" : {} }'),
            event('{"choices": [{"delta": {"content": "b"} } ],"xy" : {}}'),
            event('{"choices":[{"delta":{"content":"ab"}}],"xy":{}}'),
        ),
    ],
)
def test_neighbours_that_differ_only_in_what_can_grow_are_joined(one: bytes, two: bytes, both: bytes) -> None:
    assert joined(one, two) == [(both, 1)]
    assert joined(one, two, two)[0][1] == 2


def test_bytes_that_are_no_text_are_kept_as_they_are() -> None:
    """Half of a character in each of two events, as engines send that take no care."""
    half, rest = (says("%").replace(b"%", part) for part in (b"\xf0\x9f", b"\x98\x80"))
    assert joined(half, rest) == [(says("\U0001f600"), 1)]
    assert joined(says("a"), says("\\ud83d"), says("\\ude00")) == [(says("a\\ud83d\\ude00"), 2)]


# What stays apart -----------------------------------------------------------------------------------------

LOGPROBS = '"logprobs":{"content":[1],%s}'


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (says("a"), chunk('"delta":{"content":"b"}', '"id":"y"')),
        (says("a"), chunk('"delta":{"content":"b"}', '"id":"x","more":1')),
        (says("a"), chunk('"delta":{"content":"b"}').replace(b'"index":0', b'"index":1')),
        (says("a"), chunk('"delta":{"content":null}')),
        (says("a"), chunk('"delta":{"content":["b"]}')),
        (says("a"), chunk('"delta":{"reasoning":"b"}')),
        (says("a"), chunk('"delta":{"role":"assistant","content":"b"}')),
        (says("a"), says("b").replace(b'"finish_reason":null', b'"finish_reason":"stop"')),
        (says("a"), chunk('"delta":{"content":"b"},"logprobs":{"content":[1]}')),
        (tool('"arguments":"a"'), tool('"arguments":"b"', '"index":1')),
        (says("a"), b": keep-alive\n\n"),
        (says("a"), b"data: [DONE]\n\n"),
        (says("a"), b"event: x\n" + says("b")),
        (says("a"), says("b").replace(b',"choices"', b',\ndata: "choices"')),
        (says("a"), event("{" * 2000)),
        (says("a"), event('{"choices":[{"delta":{"content":"b"}}],"\xff":1}'.replace("\xff", "\\ud800"))),
        (says("a"), b'data: {"a":"b"'),
    ],
)
def test_what_says_something_else_is_passed_as_it_is_in_its_place(one: bytes, two: bytes) -> None:
    assert joined(one, two) == [(one, 0), (two, 0)]
    assert joined(one, two, one) == [(one, 0), (two, 0), (one, 0)]


@pytest.mark.parametrize(
    "twice",
    [
        chunk('"delta":{"content":"a"}', '"usage":{"completion_tokens":1}'),
        chunk('"delta":{"content":"a"}', '"error":{"message":"x"}'),
        says("a").replace(b'"finish_reason":null', b'"finish_reason":"stop"'),
        chunk('"delta":{"content":"a"},"routed":[1]'),
        chunk('"delta":{"content":"a"}', '"timings":{"n":1}'),
        chunk('"delta":{"content":"a","sound":"b"}'),
        chunk('"delta":{"content":"a"},"logprobs":{"content":[1],"more":[2]}'),
        chunk('"delta":{"content":"a"},"logprobs":[1]'),
        chunk('"delta":"a"'),
        tool('"name":"f","arguments":"a"'),
        tool('"arguments":"a"', '"index":0,"id":"c"'),
        chunk('"delta":{"tool_calls":[{"function":{"arguments":"a"}},{"function":{"arguments":"b"}}]}'),
        chunk('"delta":{}'),
        chunk('"delta":{"role":"assistant"}'),
        event('{"choices":[{"text":"a"},{"text":"b"}]}'),
        event('{"choices":[]}'),
        event('{"choices":{"text":"a"}}'),
        event('{"text":"a"}'),
    ],
)
def test_what_two_readers_might_read_differently_is_never_said_once_instead_of_twice(twice: bytes) -> None:
    assert joined(twice, twice) == [(twice, 0), (twice, 0)]


def test_a_text_that_ends_where_it_seems_not_to_is_looked_at_closely() -> None:
    """The bytes around it are the same, and yet the second has another member."""
    one = chunk('"delta":{"content":"a","x":""}')
    two = chunk('"delta":{"content":"b","y":"c","x":""}')
    assert joined(one, two) == [(one, 0), (two, 0)]


# How much -------------------------------------------------------------------------------------------------


def test_no_event_grows_beyond_the_bound() -> None:
    bound = len(says("x" * 100))
    assert joined(says("x" * 60), says("x" * 40), most=bound) == [(says("x" * 100), 1)]
    assert joined(says("x" * 60), says("x" * 41), most=bound) == [(says("x" * 60), 0), (says("x" * 41), 0)]
    waits = joined(*[says("x" * 30)] * 10, most=bound)
    assert [more for _, more in waits] == [2, 2, 2, 0]
    # A comma counts.
    lists = joined(*[chunk('"token_ids":[1]')] * 3, most=len(chunk('"token_ids":[1,1]')) + 1)
    assert [more for _, more in lists] == [1, 0]


def test_an_event_over_the_bound_is_not_even_looked_at() -> None:
    big = says("x" * MOST_JOINED)
    assert joined(says("a"), big, says("b")) == [(says("a"), 0), (big, 0), (says("b"), 0)]


def test_a_block_that_would_take_long_is_left_as_it_is() -> None:
    block = says("x") * (MOST_SPLIT // len(says("x")) + 1)
    assert DeltaJoiner().join(says("a"), block) == [(says("a"), 0, True), (block, 0, False)]
    assert DeltaJoiner().join(block, says("a")) == [(block, 0, True), (says("a"), 0, False)]
    assert joined(says("a"), says("b"), block, says("c")) == [(says("ab"), 1), (block, 0), (says("c"), 0)]


def test_only_so_many_events_of_a_block_are_taken_apart() -> None:
    pair = chunk('"token_ids":[1]')
    (event_, more, _), *others = DeltaJoiner().join(pair, pair * MOST_CUTS + pair)
    assert (more, len(others)) == (MOST_CUTS, 1)
    assert event_.count(b"1") == MOST_CUTS + 1


def test_blocks_of_many_events_are_joined_and_what_is_old_in_them_is_told() -> None:
    a, b, stop = says("a"), says("b"), says("c").replace(b"null", b'"stop"')
    assert DeltaJoiner().join(a + a, b + b) == [(says("aabb"), 3, True)]
    assert DeltaJoiner().join(a + stop, b + b) == [(a, 0, True), (stop, 0, True), (says("bb"), 1, False)]
    joiner = DeltaJoiner()
    (first,) = joiner.join(a, b)
    assert joiner.join(first.data, b + stop + b) == [(says("abb"), 2, True), (stop, 0, False), (b, 0, False)]


# For any split, merge, delay and coalescing -----------------------------------------------------------------


@given(events=streams(), most=st.sampled_from([150, 300, MOST_JOINED]), data=st.data())
def test_content_arguments_and_logprobs_are_the_engines_at_every_event(
    events: list[bytes], most: int, data: st.DataObject
) -> None:
    """However the stream comes in and is taken out; and so is the count of the events that were delivered."""
    pool = BufferPool(64 * KiB)
    channel = ByteChannel(64 * KiB, pool, DeltaJoiner(most))
    wire = b""
    weights: dict[int, int] = {}

    def take(size: int) -> bool:
        nonlocal wire
        piece, ends = channel.take_dated(size)
        weights.update({len(wire) + end: more for end, _, more in ends if more})
        wire += piece
        return bool(piece)

    async def story() -> None:
        left = list(events)
        while left:
            count = data.draw(st.integers(1, 6))
            block, left = left[:count], left[count:]
            await channel.put(b"".join(block))
            assert channel.used == pool.used
            while data.draw(st.integers(0, 3)) == 0 and take(data.draw(st.integers(1, 400))):
                pass
        while take(100_000):
            pass

    trio.run(story)
    assert (channel.used, pool.used) == (0, 0)

    delivered = [block + b"\n\n" for block in wire.split(b"\n\n")[:-1]]
    at = stands_for = 0
    for number, each in enumerate(delivered, 1):
        at += len(each)
        stands_for += 1 + weights.pop(at, 0)
        assert read(delivered[:number]) == read(events[:stands_for])
    assert stands_for == len(events)
    assert not weights
    assert all(len(each) <= most or each in events for each in delivered)
