"""Messages between gateway and agent: written and read back, strict in what they hold."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_gateway.wire._worker_messages import (
    EngineKind,
    Generate,
    Registered,
    Registration,
    Rejection,
    Release,
    ReleasedRequest,
    RunningRequest,
    WorkerReport,
    read_message,
    write_message,
)
from trio_gateway.wire._worker_stream import read_record

MESSAGES: list[msgspec.Struct] = [
    Registration("gpu-0", 5, "http://10.0.0.1:8000", ["m/a"], 8, EngineKind("vllm", "0.9"), ["big"]),
    Registered("s" * 32, 2.0, 6.0),
    WorkerReport(
        5, 1, "ready", ["m"], 8, 1, 0, 0.5, 40.0, [RunningRequest("a", 1, 3), RunningRequest("b", 1, 0, True)]
    ),
    WorkerReport(5, 1, "draining", [], 8, 0, 0),
    Generate("a" * 32, 1, "chat.completions", "m", 1000, "standard", True, msgspec.Raw(b"{}")),
    Rejection("capacity", WorkerReport(5, 2, "ready", ["m"], 8, 8, 0)),
    Release(ReleasedRequest("a", 1, 3, True)),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_is_read_as_it_was_written(message: msgspec.Struct) -> None:
    assert read_message(write_message(message), type(message)) == message


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_fields_that_are_not_known_are_ignored(message: msgspec.Struct) -> None:
    value = {**json.loads(write_message(message)), "later": {"x": [1]}}
    assert read_message(json.dumps(value).encode(), type(message)) == message


def test_the_bytes_of_a_body_stay_as_they_are() -> None:
    body = b'{"a":1e0, "b" : 12345678901234567890,"c":"\\u00e9\xc3\xa9"}'
    message = Generate("a", 1, "chat.completions", "m", 1000, "standard", True, msgspec.Raw(body))
    written = write_message(message)
    assert body in written
    assert bytes(read_message(written, Generate).body) == body


def but(message: msgspec.Struct, **changes: Any) -> bytes:
    return json.dumps({**json.loads(write_message(message)), **changes}).encode()


REGISTRATION, REGISTERED, REPORT, _, GENERATE, REJECTION, RELEASE = MESSAGES


@pytest.mark.parametrize(
    ("kind", "data", "field"),
    [
        (Registration, but(REGISTRATION, protocol=2), "protocol"),
        (Registration, but(REGISTRATION, worker_id="a/b"), "worker_id"),
        (Registration, but(REGISTRATION, worker_id=""), "worker_id"),
        (Registration, but(REGISTRATION, incarnation=-1), "incarnation"),
        (Registration, but(REGISTRATION, incarnation=1.5), "incarnation"),
        (Registration, but(REGISTRATION, url="ftp://x"), "url"),
        (Registration, but(REGISTRATION, url="http://user@host:1"), "url"),
        (Registration, but(REGISTRATION, url="http://host:1/path"), "url"),
        (Registration, but(REGISTRATION, models=["m"] * 2000), "models"),
        (Registration, but(REGISTRATION, models=[""]), "models"),
        (Registration, but(REGISTRATION, slots=-1), "slots"),
        (Registration, but(REGISTRATION, engine={"kind": "x y"}), "engine.kind"),
        (Registered, but(REGISTERED, secret="short"), "secret"),
        (Registered, but(REGISTERED, secret="with a blank in it, too"), "secret"),
        (Registered, but(REGISTERED, ttl=0), "ttl"),
        (WorkerReport, but(REPORT, state="asleep"), "state"),
        (WorkerReport, but(REPORT, kv_usage_ratio=1.1), "kv_usage_ratio"),
        (WorkerReport, but(REPORT, tokens_per_second=-1), "tokens_per_second"),
        (WorkerReport, but(REPORT, requests=[{"id": "a", "attempt": 0, "generated": 1}]), "requests"),
        (Generate, but(GENERATE, attempt=100), "attempt"),
        (Generate, but(GENERATE, request_id="a\n"), "request_id"),
        (Generate, but(GENERATE, deadline_ms=-1), "deadline_ms"),
        (Generate, but(GENERATE, stream=1), "stream"),
        (Rejection, but(REJECTION, rejected="no room"), "rejected"),
        (
            Release,
            but(RELEASE, released={"id": "a", "attempt": 1, "generated": 2**60, "kv_released": True}),
            "gen",
        ),
    ],
)
def test_what_a_field_can_not_hold_is_refused_by_its_name(
    kind: type[msgspec.Struct], data: bytes, field: str
) -> None:
    with pytest.raises(ValueError, match=field):
        read_message(data, kind)


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b'{"x":"\xff"}', b'{"a":' * 3000, b"null"])
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"JSON|value|Expected|missing"):
        read_message(data, WorkerReport)


def test_a_message_about_a_wrong_value_does_not_hold_it() -> None:
    with pytest.raises(ValueError, match="state") as caught:
        read_message(but(REPORT, state="sk-secret"), WorkerReport)
    assert "sk-secret" not in str(caught.value)


@given(st.binary(max_size=40))
def test_any_bytes_are_a_message_or_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"JSON|value|Expected|missing"):
        read_message(data, WorkerReport)


@pytest.mark.parametrize(
    "line",
    [
        b'{"t":"delta","i":0,"text":"a","n":1048577}',
        b'{"t":"tool_call","i":0,"index":0,"arguments":"","n":1048577}',
        b'{"t":"usage","completion_tokens":2147483649}',
        b'{"t":"ping","generated":2147483649}',
    ],
)
def test_token_counts_that_no_request_has_are_none(line: bytes) -> None:
    """They would spoil whatever adds them up: rates, fair shares, records."""
    with pytest.raises(ValueError, match="can not be read"):
        read_record(line)
