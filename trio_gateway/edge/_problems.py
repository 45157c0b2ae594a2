"""How a `Problem` looks to an HTTP client."""

from __future__ import annotations

import math
from typing import Any, Final

import msgspec

from ..contract import Operation, Style
from ..errors import Problem

_ANTHROPIC_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
JSON: Final = "application/json"

_FIXED: Final[dict[int, tuple[tuple[str, str], ...]]] = {
    401: (("www-authenticate", "Bearer"),),
    426: (("upgrade", "websocket"),),
}


def problem_body(problem: Problem, extra: dict[str, object] | None, anthropic: bool = False) -> bytes:
    """Write the error in OpenAI's or Anthropic's shape; ``extra`` becomes ``error.gateway``."""
    if not anthropic:
        return msgspec.json.encode({"error": error_object(problem, extra)})
    error: dict[str, Any] = {
        "type": _anthropic_type(problem),
        "message": problem.message,
        "code": problem.code,
    }
    if extra is not None:
        error["gateway"] = extra
    return msgspec.json.encode({"type": "error", "error": error})


def error_object(problem: Problem, extra: dict[str, object] | None) -> dict[str, Any]:
    """Answer the error as OpenAI's API has it; ``extra`` becomes its member ``gateway``."""
    error: dict[str, Any] = {
        "message": problem.message,
        "type": problem.type,
        "param": problem.param,
        "code": problem.code,
    }
    return error if extra is None else {**error, "gateway": extra}


def problem_event(
    problem: Problem, extra: dict[str, object], operation: Operation, sequence: int
) -> tuple[bytes | None, bytes]:
    """Write the error as an event of the operation's stream: its name, and its data."""
    if operation.style is Style.MESSAGES:
        return b"error", problem_body(problem, extra, anthropic=True)
    if operation.style is Style.RESPONSES:
        # The reference has the members at the top; OpenAI itself sends them below `error` as well,
        # and for its SDK only that is a failure: else it hands the event out, and the stream just ends.
        event = {
            "type": "error",
            "code": problem.code,
            "message": problem.message,
            "param": problem.param,
            "sequence_number": sequence,
            "gateway": extra,
            "error": error_object(problem, extra),
        }
        return b"error", msgspec.json.encode(event)
    return None, problem_body(problem, extra)


def _anthropic_type(problem: Problem) -> str:
    if problem.status in _ANTHROPIC_TYPES:
        return _ANTHROPIC_TYPES[problem.status]
    return "invalid_request_error" if problem.status < 500 else "api_error"


def problem_headers(problem: Problem) -> list[tuple[str, str]]:
    """Headers that go with a problem."""
    headers = list(_FIXED.get(problem.status, ()))
    retry_after = problem.retry_after
    if retry_after is None and problem.status in (429, 503) and not problem.final:
        retry_after = 1.0  # these always say when to come back
    if retry_after is not None:
        headers.append(("retry-after", str(max(math.ceil(retry_after), 1))))
        headers.append(("retry-after-ms", str(max(round(retry_after * 1000), 1))))
    elif problem.final:
        headers.append(("x-should-retry", "false"))
    headers += problem.headers
    return headers
