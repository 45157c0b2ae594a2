"""The worker protocol as gateways speak it: an attempt on its way to an agent, and its reports. Sans-IO."""

from __future__ import annotations

import base64
from typing import Final

import msgspec

from ..contract import Dialect, InternalRequest, RawJson, WorkerStatus
from ._requests import internal_body
from ._worker_messages import PROTOCOL, WorkerReport

GENERATE: Final = "/internal/v1/generate"
EVENTS: Final = "/internal/v1/events"


def generate_pieces(
    request: InternalRequest, dialect: Dialect, attempt_id: str, salt: str, remaining: float
) -> list[RawJson]:
    """Write the body of ``POST /internal/v1/generate`` in pieces; the caller's long fields are not copied.

    Args:
        remaining: seconds until the deadline.

    Raises:
        Refused: it can not be asked for.
    """
    exchange_id, _, number = attempt_id.rpartition("-")
    envelope = {
        "protocol": PROTOCOL,
        "request_id": exchange_id,
        "attempt": int(number),
        "operation": request.operation.name,
        "model": request.upstream_model,
        "deadline_ms": max(int(remaining * 1000), 0),
        "priority": request.tier,
        "stream": request.stream,
    }
    body = internal_body(request, dialect, attempt_id, salt)
    if request.form is not None:
        envelope["content_type"] = request.form.content_type.decode("latin-1")
        body = [b'"', base64.b64encode(b"".join(body)), b'"']
    return [msgspec.json.encode(envelope)[:-1] + b',"body":', *body, b"}"]


def cancel_path(attempt_id: str) -> str:
    """Answer the path that cancels an attempt."""
    exchange_id, _, number = attempt_id.rpartition("-")
    return f"/internal/v1/requests/{exchange_id}/{int(number)}/cancel"


def attempt_name(exchange_id: str, number: int) -> str:
    """Answer the attempt id that an agent tells apart in two fields."""
    return f"{exchange_id}-{number:02d}"


def status_of(report: WorkerReport) -> WorkerStatus:
    """Say an agent's report in our own words."""
    requests = report.requests
    return WorkerStatus(
        report.incarnation,
        report.seq,
        report.state,
        tuple(report.models),
        report.slots,
        report.running,
        report.queued,
        report.kv_usage_ratio,
        report.tokens_per_second,
        None
        if requests is msgspec.UNSET
        else frozenset(attempt_name(each.id, each.attempt) for each in requests),
        0 if requests is msgspec.UNSET else sum(each.paused for each in requests),
    )
