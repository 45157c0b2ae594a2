"""The words that rooms share: outcomes, phases, operations, the names of a request and its attempts."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from trio_gateway.contract import CHAT, COMPLETIONS, EMBEDDINGS, OPERATIONS, InternalRequest, Outcome, Phase


def test_outcomes_and_phases_are_the_documented_ones() -> None:
    assert set(Outcome) == {
        "completed",
        "refused",
        "client_gone",
        "client_cancelled",
        "client_stalled",
        "deadline_exceeded",
        "upstream_failed",
        "operator_cancelled",
        "gateway_shutdown",
    }
    assert list(Phase) == ["queued", "before_headers", "before_content", "after_content"]


def request_with(exchange_id: str) -> InternalRequest:
    values: dict[str, Any] = {
        "exchange_id": exchange_id,
        "client_request_id": None,
        "tenant": "acme",
        "key_id": None,
        "operation": CHAT,
        "model": "m",
        "upstream_model": "m",
        "members": {},
        "size": 0,
        "stream": True,
        "choices": 1,
        "n": 1,
        "wants_usage": False,
        "wants_running_usage": False,
        "arrived": 0.0,
        "deadline": 1.0,
    }
    return InternalRequest(**values)


def test_the_names_of_attempts_are_of_one_length_and_none_begins_another() -> None:
    names = [request_with(digit * 32).attempt_id(number) for digit in "0a" for number in range(1, 100)]
    assert len({len(name) for name in names}) == 1
    assert not any(a.startswith(b) or b.startswith(a) for a, b in combinations(names, 2))
    assert request_with("ab" * 16).attempt_id(7) == "ab" * 16 + "-07"


def test_a_request_without_wishes_is_of_the_standard_tier() -> None:
    assert (request_with("0" * 32).tier, request_with("0" * 32).trace) == ("standard", ())


def test_two_requests_are_never_equal() -> None:
    assert request_with("0" * 32) != request_with("0" * 32)


@pytest.mark.parametrize(
    ("operation", "path", "streams", "choices", "field"),
    [
        (CHAT, "/v1/chat/completions", True, True, "messages"),
        (COMPLETIONS, "/v1/completions", True, True, "prompt"),
        (EMBEDDINGS, "/v1/embeddings", False, False, "input"),
    ],
)
def test_an_operation_is_known_by_its_path(
    operation: Any, path: str, streams: bool, choices: bool, field: str
) -> None:
    assert (operation.path, operation.streams, operation.choices, operation.input) == (
        path,
        streams,
        choices,
        field,
    )


def test_no_two_operations_share_a_name_or_a_path() -> None:
    assert len({operation.name for operation in OPERATIONS}) == len(OPERATIONS)
    assert len({operation.path for operation in OPERATIONS}) == len(OPERATIONS)


def test_only_messages_are_anthropic_s() -> None:
    assert {o.path for o in OPERATIONS if o.anthropic} == {"/v1/messages", "/v1/messages/count_tokens"}
