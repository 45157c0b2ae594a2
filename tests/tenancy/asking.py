"""Requests for tests that have no loop and no clock."""

from __future__ import annotations

from typing import Any

from trio_gateway.contract import CHAT, InternalRequest


def asking(**others: Any) -> InternalRequest:
    """Make a request; `others` are attributes of `InternalRequest`."""
    attributes: dict[str, Any] = {
        "exchange_id": "0" * 32,
        "client_request_id": None,
        "tenant": "acme",
        "key_id": "k1",
        "operation": CHAT,
        "model": "m1",
        "upstream_model": "m1",
        "members": {},
        "size": 40,
        "stream": True,
        "choices": 1,
        "n": 1,
        "wants_usage": False,
        "wants_running_usage": False,
        "arrived": 0.0,
        "deadline": 600.0,
        **others,
    }
    return InternalRequest(**attributes)
