"""Strategies that speak the grammars of this folder: pieces, event streams, JSON texts, heads, chunks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

# Pieces -----------------------------------------------------------------------------------------------------


def cut(data: bytes, places: Sequence[int]) -> list[bytes]:
    """Cut ``data`` at the given offsets, in whatever order they are."""
    ends = [0, *sorted(min(place, len(data)) for place in places), len(data)]
    return [data[a:b] for a, b in pairwise(ends)]


def bytewise(data: bytes) -> list[bytes]:
    """Cut ``data`` into single bytes."""
    return [data[at : at + 1] for at in range(len(data))]


@st.composite
def pieces_of(draw: st.DrawFn, data: bytes) -> list[bytes]:
    """Cut ``data`` anywhere: into single bytes, in a few places, or behind line ends."""
    if draw(st.booleans()):
        return bytewise(data)
    anywhere = st.integers(0, len(data))
    behind = [at + 1 for at, byte in enumerate(data) if byte in b"\r\n"]
    place = st.one_of(anywhere, st.sampled_from(behind)) if behind else anywhere
    return cut(data, draw(st.lists(place, max_size=10)))


# Event streams ----------------------------------------------------------------------------------------------

LINE_ENDS = (b"\n", b"\r", b"\r\n")
BOM = b"\xef\xbb\xbf"

_values = st.one_of(
    st.sampled_from(
        [b"", b" ", b"  x", b"[DONE]", b"[DONE] ", b"{}", b'{"a":1}', b"error", b":", b"data: x"]
    ),
    st.text("ab :\u00e9{}", max_size=6).map(str.encode),
)
_names = st.sampled_from(
    [b"data", b"data", b"data", b"event", b"id", b"retry", b"", b"datas", b"Data", b" data"]
)


@st.composite
def sse_lines(draw: st.DrawFn) -> bytes:
    """One line of an event stream, without its end; often a blank one."""
    kind = draw(st.integers(0, 9))
    if kind < 4:
        return b""
    if kind == 4:
        return draw(_names)  # no colon: the value is empty
    return draw(_names) + draw(st.sampled_from([b":", b": "])) + draw(_values)


@st.composite
def sse_streams(draw: st.DrawFn) -> bytes:
    """A whole event stream in every spelling that the standard allows, perhaps not ended."""
    lines = draw(st.lists(st.tuples(sse_lines(), st.sampled_from(LINE_ENDS)), max_size=16))
    text = b"".join(line + end for line, end in lines)
    return (
        draw(st.sampled_from([b"", b"", BOM, BOM + BOM])) + text + draw(st.sampled_from([b"", b"data: half"]))
    )


# JSON -------------------------------------------------------------------------------------------------------

JSON_KEYS = st.one_of(
    st.sampled_from(["a", "model", "error", "usage", "choices", "finish_reason", "x y", 'q"', "{", "\u00e9"]),
    st.text(max_size=4),
)
JSON_TEXTS = st.one_of(
    st.sampled_from(
        ['"error"', '"usage":{}', "}{", "],[", "\\", "\n\n", "data: x", "\u2028", "\U0001f600", "NaN"]
    ),
    st.text(max_size=8),
)
_NUMBERS = st.sampled_from(
    ["0", "-0", "1", "1e0", "1E+2", "0.10", "-1.5e-3", "123456789012345678901234567890", "1e99"]
)


def _spaced(draw: st.DrawFn) -> str:
    return draw(st.sampled_from(["", "", "", " ", "\n", "\t "]))


def _json_string(draw: st.DrawFn, text: str) -> str:
    return json.dumps(text, ensure_ascii=draw(st.booleans()))


@st.composite
def json_texts(draw: st.DrawFn, depth: int = 3) -> str:
    """The text of any JSON value: spaced as people space, in every spelling of numbers and strings."""
    kind = draw(st.integers(0, 6 if depth else 4))
    if kind == 0:
        return draw(st.sampled_from(["null", "true", "false"]))
    if kind in (1, 2):
        return draw(_NUMBERS)
    if kind in (3, 4):
        return _json_string(draw, draw(JSON_TEXTS))
    if kind == 5:
        items = draw(st.lists(json_texts(depth - 1), max_size=3))
        return "[" + _spaced(draw) + ("," + _spaced(draw)).join(items) + "]"
    return draw(json_objects(depth - 1))


@st.composite
def json_objects(draw: st.DrawFn, depth: int = 2, keys: st.SearchStrategy[str] = JSON_KEYS) -> str:
    """The text of a JSON object whose keys differ."""
    members = draw(st.dictionaries(keys, json_texts(depth), max_size=4))
    parts = [
        _json_string(draw, key) + _spaced(draw) + ":" + _spaced(draw) + text + _spaced(draw)
        for key, text in members.items()
    ]
    return "{" + _spaced(draw) + ",".join(parts) + "}"


JSON_VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | JSON_TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(JSON_KEYS, inner, max_size=3),
    max_leaves=8,
)


# HTTP heads -------------------------------------------------------------------------------------------------

TOKEN_CHARACTERS = "!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_tokens = st.text(TOKEN_CHARACTERS, min_size=1, max_size=8).map(str.encode)
_field_values = st.lists(
    st.sampled_from([bytes([byte]) for byte in [*range(0x21, 0x7F), *range(0x80, 0x100), 0x09, 0x20]]),
    max_size=12,
).map(b"".join)
_ODD_FIELDS = st.sampled_from(
    [
        b"Content-Length: 5",
        b"content-length:7",
        b"Content-Length: 5, 5",
        b"Content-Length : 5",
        b"Content-Length: +5",
        b"Transfer-Encoding: chunked",
        b"TRANSFER-ENCODING:\tChunked ",
        b"Transfer-Encoding: gzip, chunked",
        b"Transfer-Encoding: chunked;q=1",
        b"Host: x",
        b"Host: y",
        b"Connection: close",
        b"Connection: keep-alive, Upgrade",
        b"Upgrade: websocket",
        b"Expect: 100-continue",
        b"Authorization: Bearer a",
        b"Content-Type: application/json",
        b" folded: x",
        b"\tfolded",
        b": no name",
        b"no colon",
        b"na me: x",
        b"name\xff: x",
        b"name: a\x00b",
        b"name: a\rb",
        b"name: a\nb",
        b"name: \x7f",
        b"",
    ]
)
REQUEST_LINES = st.sampled_from(
    [
        b"POST /v1/chat/completions HTTP/1.1",
        b"GET /a?b=c HTTP/1.0",
        b"get * HTTP/1.1",
        b"GET  / HTTP/1.1",
        b"GET / HTTP/1.1 ",
        b"GET / HTTP/2.0",
        b"GET /\xc3\xa4 HTTP/1.1",
        b"CONNECT a:1 HTTP/1.1",
    ]
)
STATUS_LINES = st.sampled_from(
    [
        b"HTTP/1.1 200 OK",
        b"HTTP/1.0 200 OK",
        b"HTTP/1.1 204",
        b"HTTP/1.1 304 ",
        b"HTTP/1.1 100 Continue",
        b"HTTP/1.1 503 \xff",
        b"HTTP/2.0 200 OK",
        b"HTTP/1.1 99 OK",
        b"HTTP/1.1  200 OK",
        b"ICY 200 OK",
    ]
)


@st.composite
def ordinary_fields(draw: st.DrawFn) -> bytes:
    """A header line that the grammar of RFC 9110 allows, without its end."""
    blank = st.sampled_from([b"", b" ", b"\t", b"  "])
    return draw(_tokens) + b":" + draw(blank) + draw(_field_values) + draw(blank)


@st.composite
def heads(draw: st.DrawFn, first_lines: st.SearchStrategy[bytes]) -> bytes:
    """A message head, mostly well-formed, final blank line included."""
    fields = draw(st.lists(st.one_of(ordinary_fields(), _ODD_FIELDS), max_size=6))
    return b"\r\n".join([draw(first_lines), *fields, b"", b""])


# Chunked bodies ---------------------------------------------------------------------------------------------


@st.composite
def chunked_bodies(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """A well-formed chunked body in any spelling, and the bytes that it carries."""
    chunks = draw(st.lists(st.binary(min_size=1, max_size=20), max_size=5))
    extension = st.sampled_from([b"", b";x", b' ;name="a;b"', b"\t", b";"])
    framed = b"".join(
        draw(st.sampled_from([b"", b"0", b"000"]))
        + draw(st.sampled_from([b"%x", b"%X"])) % len(chunk)
        + draw(extension)
        + b"\r\n"
        + chunk
        + b"\r\n"
        for chunk in chunks
    )
    trailer = draw(st.sampled_from([b"", b"A: b\r\n", b"A: b\r\nC:\r\n"]))
    last = draw(st.sampled_from([b"0", b"00"])) + draw(extension) + b"\r\n"
    return framed + last + trailer + b"\r\n", b"".join(chunks)


ODD_CHUNKS = st.lists(
    st.sampled_from(
        [
            b"0",
            b"1",
            b"5",
            b"a",
            b"\r\n",
            b"\r",
            b"\n",
            b";",
            b" ",
            b"x",
            b"-",
            b"\x00",
            b"A: b",
            b"0\r\n\r\n",
            b"5\r\nhello\r\n",
        ]
    ),
    max_size=14,
).map(b"".join)


# Chat streams of engines ------------------------------------------------------------------------------------

UPSTREAM_MODEL, PUBLIC_MODEL = "org/m\u00e9", "m"
FINISHES = ("stop", "length", "tool_calls", "content_filter", "stop_sequence")
_CONTENTS = st.one_of(
    st.sampled_from(
        ["a", "", '"error"', '"usage":{"a":1}', '"finish_reason":"stop"', "\n\ndata: [DONE]\n\n", "}", "\r"]
    ),
    st.text(max_size=5),
)
_USAGES: st.SearchStrategy[Any] = st.sampled_from(
    [
        None,
        {},
        {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4},
        {"completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}},
        {"completion_tokens": 2, "odd": "{"},
        {"completion_tokens": 3, "deep": {"er": {"x": 1}}},
        {"completion_tokens": "many"},
    ]
)
_TAILS: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [
        {},
        {},
        {},
        {"object": "chat.completion.chunk"},
        {"timings": {"usage": {"a": "}"}}},
        {"error": None},
        {"error": 0},
    ]
)


@st.composite
def _choices(draw: st.DrawFn, count: int) -> dict[str, Any]:
    """One choice of a chunk: role, output of some kind, a finish, or nothing."""
    index = draw(st.integers(0, count - 1))
    text = draw(_CONTENTS)
    delta: Any = draw(
        st.sampled_from(
            [
                {"role": "assistant", "content": ""},
                {"role": "assistant"},
                {},
                {"content": text},
                {"content": text},
                {"content": text},
                {"content": None, "reasoning_content": text},
                {"tool_calls": [{"index": 0, "function": {"arguments": text}}]},
                {"refusal": text},
                None,
            ]
        )
    )
    reason = draw(st.sampled_from([None] * 20 + ["", 0, [], *FINISHES, *FINISHES, "abort", "error"]))
    choice = {"index": index, "delta": delta, "finish_reason": reason}
    choice |= draw(
        st.sampled_from([{}, {}, {}, {"logprobs": None}, {"logprobs": {"content": [1]}}, {"token_ids": [7]}])
    )
    if draw(st.integers(0, 5)) == 0:
        choice = {"text": text, **choice}
        del choice["delta"]
    return choice


@st.composite
def chunks(draw: st.DrawFn, count: int) -> dict[str, Any]:
    """One chunk of a chat or completions stream, with its fields in some order."""
    model = draw(st.sampled_from([UPSTREAM_MODEL, UPSTREAM_MODEL, "another"]))
    chunk: dict[str, Any] = {"id": "cmpl-1", "created": 1, "model": model}
    number = draw(st.sampled_from([0, 1, 1, 1, 1, 2]))
    chunk["choices"] = [draw(_choices(count)) for _ in range(number)]
    chunk |= draw(_TAILS)
    if draw(st.integers(0, 3)) == 0:
        chunk["usage"] = draw(_USAGES)
    if draw(st.integers(0, 15)) == 0:
        chunk["prompt_progress"] = {"total": 9}
    order = draw(st.sampled_from(["as engines do", "as engines do", "any"]))
    return chunk if order == "as engines do" else dict(draw(st.permutations(list(chunk.items()))))


@st.composite
def _spellings(draw: st.DrawFn, value: Any) -> bytes:
    """JSON as one of the engines spells it."""
    separators, ascii_only, indent = draw(
        st.sampled_from(
            [
                ((",", ":"), False, None),
                ((",", ":"), False, None),
                ((", ", ": "), True, None),
                ((",", ":"), True, 1),
            ]
        )
    )
    return json.dumps(value, separators=separators, ensure_ascii=ascii_only, indent=indent).encode()


_ERRORS: st.SearchStrategy[Any] = st.sampled_from(
    [
        {"error": {"message": "m", "code": 503}},
        {"error": "text"},
        {"object": "error", "message": "m", "code": 400},
        {
            "error": {"message": "m"},
            "choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": "stop"}],
        },
        {"error": [1]},
    ]
)
_NOISE = st.sampled_from([b"hello", b"", b"[]", b"[DONE]x", b"null", b"7"])
_ODD_LINES = st.sampled_from([b": keep-alive", b"id: 7", b"retry: 10", b"event: ping", b"unknown: x", b":"])
DONES = (b"data: [DONE]", b"data:[DONE]", b"data: [DONE] ", b"data:  [DONE]", b"event: done\ndata: [DONE]")


@st.composite
def _ordinary_blocks(draw: st.DrawFn, count: int) -> bytes:
    """What nearly all blocks of nearly all engines look like."""
    choice = {"index": draw(st.integers(0, count - 1)), "delta": {"content": draw(_CONTENTS)}}
    chunk = {"id": "x", "model": UPSTREAM_MODEL, "choices": [{**choice, "finish_reason": None}]}
    return b"data: " + json.dumps(chunk, separators=(",", ":"), ensure_ascii=False).encode()


@st.composite
def _odd_blocks(draw: st.DrawFn, count: int) -> bytes:
    """One block of an engine's stream in any spelling, with LF inside, without its blank line."""
    kind = draw(st.integers(0, 29))
    if kind < 2:
        return draw(_ODD_LINES)
    if kind < 4:
        return b"data: " + draw(_NOISE)
    if kind == 4:
        return draw(st.sampled_from(DONES))
    if kind == 5:
        data = draw(st.sampled_from([b"{}", b"[DONE]", b"text", b'{"message":"m","code":429}']))
        return b"event: error\ndata: " + data
    data = draw(_spellings(draw(_ERRORS if kind == 6 else chunks(count))))
    name = draw(st.sampled_from([b""] * 7 + [b"event: message\n", b": note\n", b"id: 1\n"]))
    colon = draw(st.sampled_from([b"data: "] * 5 + [b"data:", b"data:  "]))
    trail = draw(st.sampled_from([b""] * 5 + [b" "]))
    return name + b"\n".join(colon + line for line in (data + trail).split(b"\n"))


@st.composite
def engine_streams(draw: st.DrawFn, count: int) -> bytes:
    """What an engine may send for ``count`` choices, in any spelling, with anything in between."""
    block = st.one_of(_ordinary_blocks(count), _odd_blocks(count))
    blocks = draw(st.lists(block, max_size=14))
    last = draw(st.sampled_from([b"", b"", b"", b"data: [DONE]\n\n", b"data: [DONE]", b"data: {"]))
    text = b"".join(block + b"\n\n" for block in blocks) + last
    return text.replace(b"\n", draw(st.sampled_from([b"\n"] * 6 + [b"\r\n", b"\r"])))
