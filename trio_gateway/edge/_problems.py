"""How a `Problem` looks to an HTTP client."""

from __future__ import annotations

import math
from typing import Any, Final

import msgspec

from ..errors import Problem

JSON: Final = "application/json"

_FIXED: Final[dict[int, tuple[tuple[str, str], ...]]] = {
    401: (("www-authenticate", "Bearer"),),
    426: (("upgrade", "websocket"),),
}


def problem_body(problem: Problem, extra: dict[str, object] | None) -> bytes:
    """Write the error in OpenAI's shape; ``extra`` becomes ``error.gateway``."""
    error: dict[str, Any] = {
        "message": problem.message,
        "type": problem.type,
        "param": problem.param,
        "code": problem.code,
    }
    if extra is not None:
        error["gateway"] = extra
    return msgspec.json.encode({"error": error})


def problem_headers(problem: Problem) -> list[tuple[str, str]]:
    """Headers that go with a problem."""
    headers = list(_FIXED.get(problem.status, ()))
    if problem.retry_after is not None:
        headers.append(("retry-after", str(max(math.ceil(problem.retry_after), 1))))
        headers.append(("retry-after-ms", str(max(round(problem.retry_after * 1000), 1))))
    elif problem.final:
        headers.append(("x-should-retry", "false"))
    headers += problem.headers
    return headers
