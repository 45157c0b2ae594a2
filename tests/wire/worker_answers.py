"""Answers of agents, as lines, and the streams that hypothesis makes of them."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st


def line(t: str, **fields: Any) -> bytes:
    """One record as a peer might write it, without its line end."""
    return json.dumps({"t": t, **fields}, separators=(",", ":"), ensure_ascii=False).encode()


def lines(*records: bytes) -> bytes:
    return b"".join(one + b"\n" for one in records)


def says(text: str, i: int = 0, **fields: Any) -> bytes:
    return line("delta", i=i, text=text, n=1, **fields)


def finish(i: int = 0, reason: str = "stop", **fields: Any) -> bytes:
    return line("finish", i=i, reason=reason, **fields)


ACCEPTED = line("accepted", slot=0)
A, B, STOP, END = says("a"), says("b"), finish(), line("end")
USAGE = line("usage", prompt_tokens=3, completion_tokens=2)
PING = line("ping", generated=7, paused=False)

TEXTS = st.one_of(
    st.sampled_from(
        ["a", "", "\n", "\r\n\r\ndata: [DONE]\n\n", '{"error":1}', "\u2028", "\U0001f600", "\x00"]
    ),
    st.text(max_size=5),
)
_raw = st.sampled_from(
    [
        None,
        {"delta": {"refusal": "no", "content": "mine"}},
        {
            "choice": {"token_ids": [1, 2], "finish_reason": "stop"},
            "chunk": {"system_fingerprint": "f", "id": 1},
        },
        {"chunk": {"prompt_progress": {"total": 3}, "error": {"message": "m"}}},
        {"delta": {"refusal": ""}},
    ]
)
_logprobs = st.sampled_from([None, {"content": [{"token": "a", "logprob": -0.5}], "refusal": None}])


def _with(record: dict[str, Any]) -> bytes:
    return line(record.pop("t"), **{key: value for key, value in record.items() if value is not None})


def _written(record: dict[str, Any]) -> bytes:
    return line(record.pop("t"), **record)


_choice = st.sampled_from([0, 0, 0, 1])
_deltas = st.fixed_dictionaries(
    {"t": st.just("delta"), "i": _choice, "text": TEXTS, "n": st.integers(0, 4)},
    optional={"reasoning": TEXTS, "raw": _raw, "logprobs": _logprobs},
).map(_with)
_calls = st.fixed_dictionaries(
    {"t": st.just("tool_call"), "i": _choice, "arguments": TEXTS},
    optional={"index": st.integers(0, 3), "id": st.just("call_1"), "name": TEXTS, "raw": _raw},
).map(_with)
_finishes = st.builds(
    finish, _choice, st.sampled_from(["stop", "stop", "length", "tool_calls", "abort", "error"])
)
_usages = st.fixed_dictionaries(
    {"t": st.just("usage")},
    optional={
        "prompt_tokens": st.sampled_from([0, 3, None]),
        "completion_tokens": st.integers(0, 5),
        "cached_tokens": st.integers(0, 3),
        "details": st.just({"total_tokens": 1, "completion_tokens_details": {"reasoning_tokens": 1}}),
    },
).map(_written)
_pings = st.builds(lambda n: line("ping", generated=n, paused=False), st.integers(0, 9))


def _status(status: int | None) -> dict[str, Any]:
    return {} if status is None else {"status": status}


_errors = st.builds(
    lambda code, retry, status: line(
        "error", code=code, message="at sk-secret", retry=retry, **_status(status)
    ),
    st.sampled_from(
        ["capacity", "draining", "out_of_memory", "engine_failed", "too_long", "model_load_failed"]
    ),
    st.sampled_from(["elsewhere", "never"]),
    st.sampled_from([None, 400, 429, 500]),
)
_odd = st.sampled_from(
    [
        b"", b" ", b"{}", b"[]", b"null", b"{", b'{"t":1}', b'{"t":"news","i":"x"}', b'{"t":"delta"}',
        b'{"t":"delta","i":-1,"text":"a"}', b'{"t":"delta","i":0,"text":"\xff"}',
        b'{"t":"delta","i":0,"text":1}',
        b'{"t":"delta","i":0,"text":"\\ud800"}', b'{"t":"delta","i":9,"text":"a"}', b"\xff",
        b'{"t":"delta","i":0,"text":"","logprobs":{"content":\r[NaN,-Infinity]}}',
        b'{"t":"delta","i":0,"text":"x","raw":{"choice":{"token_ids":"\xff"}}}',
        b'{"t":"result","status":200,"body":{}}', b'{"t":"event","data":"{}"}', ACCEPTED, END,
    ]
)  # fmt: skip
RECORDS = st.one_of(st.builds(says, TEXTS), _deltas, _deltas, _calls, _finishes, _usages, _pings)
STREAMS = st.builds(
    lambda first, records, end, last: b"".join(one + end for one in [*first, *records]) + last,
    st.sampled_from([[ACCEPTED], [ACCEPTED], [ACCEPTED], []]),
    st.lists(st.one_of(RECORDS, RECORDS, RECORDS, _errors, _odd), max_size=9),
    st.sampled_from([b"\n", b"\n", b"\r\n", b"\n\n"]),
    st.sampled_from([b"", END + b"\n", lines(STOP, END), lines(STOP) + END, STOP[:-3], b"\r"]),
)


def event(data: dict[str, Any], name: str | None = None) -> bytes:
    return line("event", data=json.dumps(data), **({} if name is None else {"event": name}))
