"""Requests and records for the tests of this folder."""

from __future__ import annotations

from typing import Any

from trio_gateway.contract import CHAT, Ending, InternalRequest, Outcome
from trio_gateway.ledger import Record, Tally
from trio_gateway.ledger._lines import frame
from trio_gateway.ledger._rows import accepted_line


def make_request(**changes: Any) -> InternalRequest:
    """A request of tenant acme for model m that arrived at 100 seconds of the clock."""
    values: dict[str, Any] = {
        "exchange_id": "0123456789abcdef" * 2,
        "client_request_id": "mine",
        "tenant": "acme",
        "key_id": "k1",
        "operation": CHAT,
        "model": "m",
        "upstream_model": "org/m",
        "members": {},
        "size": 10,
        "stream": True,
        "choices": 1,
        "n": 1,
        "wants_usage": False,
        "wants_running_usage": False,
        "arrived": 100.0,
        "deadline": 700.0,
        "tier": "batch",
    }
    return InternalRequest(**values | changes)


def make_journal(exchanges: int, gateway_id: str) -> bytes:
    """A segment of a journal that an earlier process left, in which so many exchanges are open."""
    requests = (make_request(exchange_id=f"x{number}") for number in range(exchanges))
    return b"".join(frame(accepted_line(each, gateway_id, "before", 1000.0)) for each in requests)


def make_record(ending: Ending | None = None, tally: Tally | None = None, **changes: Any) -> Record:
    """Write the record of a request at 130 seconds of the clock, 1000 seconds of the wall clock."""
    return (tally or Tally()).record(
        make_request(**changes), ending or Ending(Outcome.COMPLETED), "boot", 130.0, 1000.0
    )
