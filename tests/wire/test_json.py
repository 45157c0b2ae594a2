"""Strict JSON: what is doubtful is refused without being quoted, and what passes, passes byte for byte."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.wire.grammar import JSON_VALUES, json_objects
from trio_gateway.errors import Problem, Refused
from trio_gateway.wire._json import (
    join_members,
    may_hold_infinity,
    needs_thread,
    object_pieces,
    raw_members,
    read_object,
    with_finite_numbers,
)
from trio_gateway.wire._scan import MAX_DEPTH, MAX_FIELDS, WINDOW, JsonObject, scan_object

PLENTY = 1000
SECRET = "sk-secret"


# As the length of a body decides: parsed at once, or scanned in steps; small steps meet every cut.
WINDOWS = (16, 61, WINDOW)


def refusal(body: bytes, max_values: int = PLENTY) -> Problem:
    """What a reader says to a body that none of them lets in."""
    with pytest.raises(Refused) as refused:
        read_object(body, max_values)
    for window in WINDOWS:
        with pytest.raises(Refused) as scanned:
            scan_object(body, max_values, window)
        expect_clear(scanned.value.problem)
        counted = "more than " in refused.value.problem.message
        if counted and window == WINDOW:
            assert scanned.value.problem.message == refused.value.problem.message
    expect_clear(refused.value.problem)
    return refused.value.problem


def expect_clear(problem: Problem) -> None:
    assert (problem.status, problem.code, problem.final) == (400, "invalid_json", True)
    assert "secret" not in problem.message
    assert "NaN" not in problem.message
    assert problem.message.isascii()
    assert problem.message.isprintable()


def stand_in(value: Any) -> Any:
    """What stands for a long value in a scanned object."""

    def empty(item: Any) -> Any:
        return item if item is None else True if isinstance(item, bool) else type(item)()

    return [empty(item) for item in value] if isinstance(value, list) else empty(value)


def expect_too_long(problem: Problem, window: int) -> None:
    assert re.match("a field's name is too long|a number is too long|too many blanks", problem.message)
    assert window < WINDOW


def expect_scan_of(text: str, window: int) -> None:
    value = json.loads(text)
    try:
        found = scan_object(text.encode(), PLENTY, window)
    except Refused as refused:
        expect_too_long(refused.problem, window)
        return
    assert list(found.members) == list(value)
    assert {name: json.loads(bytes(raw)) for name, raw in found.members.items()} == value
    assert found.long == {name for name, raw in found.members.items() if len(raw) > window}
    for name, item in found.value.items():
        wanted = stand_in(value[name]) if name in found.long else value[name]
        assert repr(item) == repr(wanted)


@given(json_objects())
@example('{"a":"' + "x" * 70 + '\\ud83d\\ude00\\"é😀","b":[' + "1 , " * 30 + 'true],"c":null}')
@example('{"a":1e0,"b":12345678065E+2,"c":1234567890.5,"d":-123456789e-1,"e":123456789012}')
@example('{"\\u00e9\\n":[' + "-12,0.5," * 30 + '"x",{},[],null,{"a":[]}]' + " " * 40 + "}")
@example(
    "{" + " " * 40 + '"a"' + " " * 40 + ":" + " " * 40 + "{" + " " * 40 + "}" + " " * 40 + "}" + " " * 40
)
def test_an_object_reads_as_python_reads_it(text: str) -> None:
    assert read_object(text.encode(), PLENTY).value == json.loads(text)
    for window in WINDOWS:
        expect_scan_of(text, window)


@given(st.dictionaries(st.text(max_size=3), JSON_VALUES, max_size=3))
def test_what_python_writes_reads_back(value: dict[str, Any]) -> None:
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False, indent=1)):
        assert read_object(text.encode(), PLENTY).value == value
        expect_scan_of(text, WINDOW)


DOUBTFUL = {
    "nothing": b"",
    "blanks": b" \n",
    "half": b'{"a": "sk-secret',
    "a list": b'["sk-secret"]',
    "a string": b'"sk-secret"',
    "a number": b"1",
    "null": b"null",
    "a byte order mark": b'\xef\xbb\xbf{"a": 1}',
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "a key twice": b'{"sk-secret": 1, "sk-secret": 1}',
    "a key twice, spelt differently": b'{"sk-secret": 1, "sk-\\u0073ecret": 2}',
    "a key twice, deep down": b'{"a": [{"b": {"sk-secret": 1, "sk-secret": 2}}]}',
    "NaN": b'{"sk-secret": NaN}',
    "Infinity": b'{"sk-secret": Infinity}',
    "-Infinity": b'{"sk-secret": -Infinity}',
    "an overflow": b'{"sk-secret": 1e999}',
    "a negative overflow": b'{"sk-secret": [{"x": -1E+309}]}',
    "an overflow with zeros": b'{"sk-secret": 1e0000000000400}',
    "an overflow of a fraction": b'{"sk-secret": ' + b"9" * 400 + b".5}",
    "an overflow of a long number": b'{"sk-secret": ' + b"9" * 250 + b"e99}",
    "a number longer than anybody counts": b'{"sk-secret": ' + b"9" * 5000 + b"}",
    "an invalid byte in a string": b'{"a": "sk-secret\xff"}',
    "an invalid byte in a key": b'{"sk-secret\xff": 1}',
    "an overlong encoding": b'{"sk-secret": "\xc0\xaf"}',
    "an encoded surrogate": b'{"sk-secret": "\xed\xa0\x80"}',
    "a lone high surrogate": b'{"sk-secret": "\\ud800"}',
    "a lone low surrogate": b'{"sk-secret": "\\udc00"}',
    "surrogates in the wrong order": b'{"sk-secret": "\\ude00\\ud83d"}',
    "a lone surrogate in a key": b'{"\\ud83dsk-secret": 1}',
    "bytes behind the end": b'{"a": 1} sk-secret',
    "a second object": b'{"a": 1}{"sk-secret": 1}',
    "a NUL behind the end": b'{"a": 1}\x00',
    "a comment": b'{"a": 1 /* sk-secret */}',
    "a comma too many": b'{"sk-secret": 1,}',
    "a comma too many in a list": b'{"sk-secret": [1,]}',
    "a bare word": b"{sk-secret: 1}",
    "single quotes": b"{'sk-secret': 1}",
    "a control character in a string": b'{"sk-secret": "\x01"}',
    "a line end in a string": b'{"sk-secret": "\n"}',
    "an unknown escape": b'{"sk-secret": "\\x41"}',
    "a zero in front": b'{"sk-secret": 01}',
    "a plus in front": b'{"sk-secret": +1}',
    "a point without digits": b'{"sk-secret": 1.}',
    "a form feed as a blank": b'{\x0c"sk-secret": 1}',
}


@pytest.mark.parametrize("body", DOUBTFUL.values(), ids=DOUBTFUL)
def test_what_is_doubtful_is_refused_and_not_quoted(body: bytes) -> None:
    refusal(body)  # which looks at the words


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"a": 1,\n "a": 2}', "a key stands twice in one object at line 2 column 5"),
        (b'{"a": nope}', "not valid JSON at line 1 column 7"),
        (b"[1]", "the body is not a JSON object"),
        (b'{"a": 1e400}', "a number is too large"),
        # A key that looks like the end of a message does not become a place.
        (
            b'{"at line 7 column 7": 1, "at line 7 column 7": 1}',
            "a key stands twice in one object at line 1 column 48",
        ),
    ],
)
def test_the_place_of_a_mistake_is_named(body: bytes, words: str) -> None:
    message = refusal(body).message
    assert re.sub(r"\d+$", "", message) == re.sub(r"\d+$", "", words)


@given(json_objects(), st.data())
def test_a_whole_body_that_lost_or_gained_a_byte_is_read_or_refused(text: str, data: st.DataObject) -> None:
    body = text.encode()
    at = data.draw(st.integers(0, len(body)))
    for changed in (
        body[:at] + body[at + 1 :],
        body[:at] + data.draw(st.binary(min_size=1, max_size=1)) + body[at:],
    ):
        try:
            found = read_object(changed, PLENTY)
        except Refused:
            refusal(changed)
            continue
        assert {name: json.loads(bytes(raw)) for name, raw in found.members.items()} == found.value
        assert scan_object(changed, PLENTY) == found


def nested(depth: int, opens: bytes, closes: bytes) -> bytes:
    """An object of the given depth, itself included."""
    return b'{"a":' + opens * (depth - 1) + b"1" + closes * (depth - 1) + b"}"


@pytest.mark.parametrize(("opens", "closes"), [(b"[", b"]"), (b'{"b":', b"}"), (b" [ \n", b" ]\t")])
def test_a_hundred_levels_are_read_and_one_more_is_not(opens: bytes, closes: bytes) -> None:
    read_object(nested(MAX_DEPTH, opens, closes), PLENTY)
    scan_object(nested(MAX_DEPTH, opens, closes), PLENTY)
    assert refusal(nested(MAX_DEPTH + 1, opens, closes)).message == "nested over 100 levels"
    assert refusal(nested(5000, opens, closes), 10_000).message == "nested over 100 levels"


def test_brackets_beside_each_other_or_in_strings_are_no_levels() -> None:
    body = b'{"a": [' + b"[]," * 200 + b'{}], "b": "' + b'[{\\"' * 200 + b'"}'
    for found in (read_object(body, PLENTY), scan_object(body, PLENTY)):
        assert len(found.value["a"]) == 201  # type: ignore[arg-type]


def values_in(value: Any) -> int:
    """How many values an object or list holds, at any depth."""
    if isinstance(value, dict):
        return len(value) + sum(map(values_in, value.values()))
    return len(value) + sum(map(values_in, value)) if isinstance(value, list) else 0


@given(json_objects())
@example('{"a": [ ], "b": { }, "c": [[], {}], "d": "[,{"}')
@example('{"a": "\\",", "b": [1, 2, [3]]}')
def test_exactly_as_many_values_as_the_bound_are_read(text: str) -> None:
    count = values_in(json.loads(text))
    read_object(text.encode(), count)
    scan_object(text.encode(), count)
    if count:
        assert refusal(text.encode(), count - 1).message == f"more than {count - 1} values"


def test_an_over_full_body_is_refused_before_the_rest_is_looked_at() -> None:
    body = b'{"a": [' + b'"",' * 20_000 + b"oops"
    assert refusal(body).message == f"more than {PLENTY} values"


@pytest.mark.parametrize("read", [read_object, scan_object])
def test_an_object_has_a_bound_of_fields(read: Callable[[bytes, int], JsonObject]) -> None:
    fields = b",".join(b'"%d":[]' % at for at in range(MAX_FIELDS))
    assert len(read(b"{" + fields + b"}", 10_000).members) == MAX_FIELDS
    assert refusal(b"{" + fields + b',"x":1}', 10_000).message == f"more than {MAX_FIELDS} fields"


# Long bodies ------------------------------------------------------------------------------------------------


def test_a_long_body_is_read_in_steps_and_a_short_one_at_once() -> None:
    text = b"x" * 400_000
    found = read_object(b'{"model": "m", "messages": [{"content": "' + text + b'"}, 1], "n": 1}', PLENTY)
    assert found.value == {"model": "m", "messages": [{}, 0], "n": 1}
    assert found.long == {"messages"}
    assert found.members["messages"] == b'[{"content": "' + text + b'"}, 1]'
    assert not read_object(b'{"prompt": "' + text[:200_000] + b'"}', PLENTY).long


LONG = b"x" * 300_000


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"' + LONG + b'": 1}', "a field's name is too long at line 1 column 2"),
        (b'{"a": 1' + b"0" * 5000 + b', "b": "' + LONG + b'"}', "a number is too long at line 1 column 7"),
        (b'{"a": 0.1' + b"0" * 300_000 + b"}", "a number is too long at line 1 column 7"),
        (b'{\n "a"' + b" " * 300_000 + b": 1}", "too many blanks at line 2 column 300005"),
        (b'{"a": "' + LONG + b'\n"}', "not valid JSON at line 1 column 300008"),
        (b'{"a": "' + LONG + b'"' + b" " * 100_000 + b"oops", "not valid JSON at line 1 column 400009"),
        (b'{"a": "' + LONG, "not valid JSON at line 1 column 300008"),
        (b'{"a": "' + LONG + b'\xff"}', "the body is not UTF-8"),
        (b'{"a": "' + LONG + b"\xc3", "the body is not UTF-8"),
        (b'{"a": "' + LONG + b'", "\\u0061": 1}', "a key stands twice in one object at line 1 column 300011"),
        (b"[" + LONG, "the body is not a JSON object"),
    ],
    ids=itertools.count(),
)
def test_what_is_wrong_with_a_long_body_is_named_with_its_place(body: bytes, words: str) -> None:
    with pytest.raises(Refused) as refused:
        read_object(body, PLENTY)
    assert refused.value.problem.message == words


def test_names_are_told_apart_however_many_there_are() -> None:
    names = [b'"%d":0' % at for at in range(50_000)]
    body = b'{"a":{' + b",".join(names) + b'}, "b":{' + b",".join(names[:1]) + b"}}"
    assert read_object(body, 100_000).long == {"a"}
    for twice in (b'"0":0', b'"49999":0', b'"\\u0030":0'):
        with pytest.raises(Refused) as refused:
            read_object(body.replace(b'}, "b"', b"," + twice + b'}, "b"'), 100_000)
        assert refused.value.problem.message.startswith("a key stands twice in one object")


def test_a_string_without_an_end_is_looked_at_once() -> None:
    # From each of these quotes a reader could look for the end of the string, and find none: 10^12 steps.
    assert "JSON" in refusal(b'{"a": [' + b"{}," * MAX_DEPTH + b'"' + b'\\"' * 1_000_000).message


def test_numbers_of_any_length_and_value_are_looked_at_once() -> None:
    body = b'{"a": [' + b",".join([b"1" * 308] * 5000) + b"]}"
    assert len(read_object(body, 10_000).value["a"]) == 5000  # type: ignore[arg-type]


# What engines print that is no JSON -------------------------------------------------------------------------


@given(json_objects())
@example('{"Infinity": "NaN, -Infinity \\" Infinity"}')
def test_whatever_is_json_stays_as_it_is(text: str) -> None:
    assert with_finite_numbers(text.encode()) == text.encode()


@given(st.dictionaries(st.text(max_size=2), st.floats() | st.sampled_from(["NaN", '"Infinity"']), max_size=5))
def test_no_infinity_is_left_of_what_python_prints(value: dict[str, Any]) -> None:
    text = json.dumps(value).encode()
    finite = read_object(with_finite_numbers(text), PLENTY).value
    for key, number in value.items():
        expected = {math.inf: 9999.0, -math.inf: -9999.0}.get(number, number)
        assert finite[key] == (None if expected != expected else expected)
    assert may_hold_infinity(text) or finite == value


@pytest.mark.parametrize(
    ("printed", "written"),
    [
        (b'{"logprob": -Infinity}', b'{"logprob": -9999.0}'),
        (b'[Infinity,NaN,"NaN",-Infinity]', b'[9999.0,null,"NaN",-9999.0]'),
        (b'{"a": "Infinity', b'{"a": "Infinity'),
        (b"[-1Infinity,1NaN,NaN1,--Infinity,NaNNaN]", b"[-1Infinity,1NaN,NaN1,--Infinity,NaNNaN]"),
    ],
)
def test_an_infinity_is_written_as_a_number(printed: bytes, written: bytes) -> None:
    assert may_hold_infinity(printed)
    assert with_finite_numbers(printed) == written


# Whatever stands between quotes, and whatever stands together, is one piece.
_PIECE = re.compile(rb'"(?:[^"\\]|\\.)*"?|[0-9A-Za-z_.+-]+|.', re.DOTALL)
_PIECES = [
    b'"',
    b"\\",
    b"-",
    b"+",
    b".",
    b"N",
    b"aN",
    b"I",
    b"nfinity",
    b"NaN",
    b"Infinity",
    b"1",
    b",",
    b" ",
    b"\xff",
]


@settings(max_examples=500)
@given(
    text=st.lists(st.sampled_from(_PIECES), max_size=12).map(b"".join),
    before=st.sampled_from([b"", b"[", b"1," * 4096]),
)
def test_only_words_that_stand_alone_are_rewritten(text: bytes, before: bytes) -> None:
    words = {b"-Infinity": b"-9999.0", b"Infinity": b"9999.0", b"NaN": b"null"}
    expected = b"".join(words.get(piece, piece) for piece in _PIECE.findall(before + text))
    assert with_finite_numbers(before + text) == expected


def test_an_event_whose_string_has_no_end_is_looked_at_once() -> None:
    broken = b'{"a": NaN, "b": "' + b'\\"' * 1_000_000
    assert with_finite_numbers(broken) == broken.replace(b"NaN", b"null")


# Splicing ---------------------------------------------------------------------------------------------------


@given(json_objects())
def test_fields_are_cut_out_as_the_bytes_they_were(text: str) -> None:
    members = raw_members(text.encode())
    value = json.loads(text)
    assert list(members) == list(value)
    assert all(raw.decode() in text for raw in members.values())
    assert {key: json.loads(raw) for key, raw in members.items()} == value


@given(json_objects())
def test_joined_fields_are_the_same_object_with_the_same_spelling(text: str) -> None:
    members = raw_members(text.encode())
    joined = join_members(members)
    for some in (set(), set(list(members)[::2]), set(members)):
        viewed = {name: memoryview(raw) if name in some else raw for name, raw in members.items()}
        pieces = object_pieces(viewed)
        assert b"".join(pieces) == joined
        assert [piece for piece in pieces if isinstance(piece, memoryview)] == [
            members[name] for name in members if name in some
        ]
    assert raw_members(joined) == members
    assert json.loads(joined) == json.loads(text)


@pytest.mark.parametrize(
    "spelling", ["1e0", "1E+00", "-0", "0.10", "12345678901234567890123", "1.0", '"\\u0041"', "[ 1 ]"]
)
def test_a_value_keeps_its_spelling(spelling: str) -> None:
    members = raw_members(b'{"a": ' + spelling.encode() + b' , "b":1}')
    assert members["a"] == spelling.encode()
    assert join_members(members) == b'{"a":' + spelling.encode() + b',"b":1}'


@pytest.mark.parametrize("body", [b"", b"[]", b"1", b"null", b'{"a"}', b'{"a": 1} x', b'{"\xff": 1}'])
def test_what_is_no_object_has_no_fields(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"JSON|Expected|Input data|Invalid"):
        raw_members(body)


def test_an_object_without_fields_stays_one() -> None:
    assert join_members(raw_members(b" { } ")) == b"{}"


def test_only_large_bodies_need_a_thread() -> None:
    assert not needs_thread(b" " * 256 * 1024)
    assert needs_thread(b" " * (256 * 1024 + 1))
