"""The spans of one exchange, from what is known of it when it is settled. Pure.

Names and attributes are those of OpenTelemetry's conventions for generative AI; what
those have no name for begins with ``trio_gateway.``. Nothing of prompts or answers.

Ids need no dice and no memory: the trace of an exchange whose caller brought none has
the exchange's id, and spans are numbered from its last 64 bits, which are random. So
an attempt's span can be named to the engine before there is a span.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from ..contract import InternalRequest, Outcome, Style
from ..ledger import Record

Value = str | int | float | bool
Headers = tuple[tuple[bytes, bytes], ...]
Step = tuple[float, str, dict[str, Any]]
"""When by the Trio clock, what, and figures: as `Flight` keeps them."""

_SPANS: Final = 1 << 64
_SHORT: Final = 32  # bytes of a number in a caller's body
# Endings that are the caller's own wish, and no error.
_WISHED: Final = frozenset({Outcome.COMPLETED, Outcome.CLIENT_GONE, Outcome.CLIENT_CANCELLED})
_NUMBERS: Final = {
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
}


class TraceContext(NamedTuple):
    """Which trace an exchange belongs to.

    Attributes:
        trace_id: 32 hexadecimal digits.
        parent_id: 16 of them: the caller's span; None: the trace begins here.
        state: what the caller's ``tracestate`` said.
    """

    trace_id: str
    parent_id: str | None
    sampled: bool
    state: bytes | None


@dataclass(slots=True)
class Span:
    """One span; times are seconds of the wall clock.

    Attributes:
        client: it asks somebody else; else it serves.
        error: what went wrong; None: nothing.
        events: moments within it, by name.
    """

    context: TraceContext
    span_id: str
    parent_id: str | None
    name: str
    client: bool
    began: float
    ended: float
    attributes: dict[str, Value] = field(default_factory=dict)
    error: str | None = None
    events: list[tuple[float, str]] = field(default_factory=list)


class Ended(NamedTuple):
    """What is kept of an exchange until it is exported: no part of its body."""

    context: TraceContext
    record: Record
    arrived: float
    steps: tuple[Step, ...]
    operation: str
    upstream_model: str
    choices: int
    max_tokens: int | None
    numbers: dict[str, bytes]


def context_of(request: InternalRequest, ratio: float) -> TraceContext:
    """Say which trace a request belongs to.

    Args:
        ratio: share of those without a caller's trace that are sampled.
    """
    if request.trace:
        _, trace, span, flags = request.trace[0][1].split(b"-")
        state = request.trace[1][1] if len(request.trace) > 1 else None
        return TraceContext(trace.decode(), span.decode(), bool(int(flags, 16) & 1), state)
    trace_id = request.exchange_id
    return TraceContext(trace_id, None, int(trace_id[16:], 16) < ratio * _SPANS, None)


def attempt_headers(request: InternalRequest, attempt_id: str, ratio: float) -> Headers:
    """Write the headers by which an engine continues the trace below an attempt."""
    context = context_of(request, ratio)
    span = span_id(request.exchange_id, int(attempt_id.rpartition("-")[2]))
    parent = f"00-{context.trace_id}-{span}-{int(context.sampled):02x}".encode()
    headers: Headers = ((b"traceparent", parent),)
    return headers if context.state is None else (*headers, (b"tracestate", context.state))


def span_id(exchange_id: str, number: int) -> str:
    """Name the span of an exchange (0), or of its attempt of that number; never 0, which is no id."""
    return f"{(int(exchange_id[16:], 16) + number) % _SPANS or _SPANS - 1:016x}"


def note_end(request: InternalRequest, record: Record, steps: Iterable[Step], context: TraceContext) -> Ended:
    """Take what the spans need."""
    members = request.members
    numbers = {
        name: bytes(members[name]) for name in _NUMBERS if len(members.get(name, b"")) in range(1, _SHORT)
    }
    return Ended(
        context,
        record,
        request.arrived,
        tuple(steps),
        operation_name(request),
        request.upstream_model,
        request.n,
        request.tokens,
        numbers,
    )


def operation_name(request: InternalRequest) -> str:
    """Answer the conventions' name for an operation, or our own where they have none."""
    operation = request.operation
    if operation.style is Style.PLAIN:
        return operation.name
    return "text_completion" if operation.name == "completions" else "chat"


def error_type(record: Record) -> str | None:
    """Say in a word of a bounded set why there is no whole answer."""
    return None if record.outcome == Outcome.COMPLETED else record.outcome


def spans_of(ended: Ended, address_of: Callable[[str], tuple[str, int] | None]) -> Iterator[Span]:
    """Make the span of an exchange, and one below it for each attempt.

    Args:
        address_of: knows host and port of a worker, if it is still there.
    """
    record, context = ended.record, ended.context
    shift = record.arrived_at - ended.arrived
    own = span_id(record.exchange_id, 0)
    name = f"{ended.operation} {record.model}"
    span = Span(context, own, context.parent_id, name, False, record.arrived_at, record.settled_at)
    span.attributes = {**_asked(ended), "gen_ai.request.model": record.model, **_answered(record)}
    span.error = None if record.outcome in _WISHED else record.code or record.outcome
    span.events = [
        (at + shift, what)
        for at, what, _ in ended.steps
        if what in ("queued", "sent_back", "first_content", "full", "room")
    ]
    yield span
    attempt: Span | None = None
    for at, what, detail in ended.steps:
        now = at + shift
        if what == "placed":
            attempt = _attempt(ended, own, now, detail, address_of)
        elif attempt is not None and what in ("attempt_failed", "ended"):
            attempt.ended = min(now, record.settled_at)  # which was rounded
            _judge(attempt, what, detail, record)
            yield attempt
            attempt = None
        elif attempt is not None and what in ("opened", "first_content"):
            attempt.events.append((now, what))
            if what == "opened" and "status" in detail:
                attempt.attributes["http.response.status_code"] = detail["status"]


def _attempt(
    ended: Ended,
    parent: str,
    began: float,
    detail: dict[str, Any],
    address_of: Callable[[str], tuple[str, int] | None],
) -> Span:
    number, worker = detail["attempt"], detail["worker"]
    name = f"{ended.operation} {ended.upstream_model}"
    span = Span(ended.context, span_id(ended.record.exchange_id, number), parent, name, True, began, began)
    span.attributes = {
        **_asked(ended),
        "gen_ai.request.model": ended.upstream_model,
        "trio_gateway.worker": worker,
        "trio_gateway.attempt": number,
    }
    if (address := address_of(worker)) is not None:
        span.attributes |= {"server.address": address[0], "server.port": address[1]}
    return span


def _judge(span: Span, what: str, detail: dict[str, Any], record: Record) -> None:
    """Say how an attempt ended: by itself, or with its exchange."""
    if what == "attempt_failed":
        span.error = span.attributes["error.type"] = str(detail["reason"])
    elif record.outcome != Outcome.COMPLETED:
        span.attributes["error.type"] = record.outcome
        span.error = None if record.outcome in _WISHED else record.code or record.outcome


def _asked(ended: Ended) -> dict[str, Value]:
    """What the caller asked for."""
    found: dict[str, Value] = {
        "gen_ai.operation.name": ended.operation,
        "gen_ai.request.stream": ended.record.stream,
    }
    if ended.choices > 1:
        found["gen_ai.request.choice.count"] = ended.choices
    if ended.max_tokens is not None:
        found["gen_ai.request.max_tokens"] = ended.max_tokens
    for name, text in ended.numbers.items():
        try:
            found[_NUMBERS[name]] = float(text)
        except ValueError:  # null, or something that the engine refused
            continue
    return found


def _answered(record: Record) -> dict[str, Value]:
    """How it went, as far as it did."""
    known: dict[str, Value | None] = {
        "gen_ai.response.model": record.model if record.first_content_at is not None else None,
        "gen_ai.response.time_to_first_chunk": _between(record.arrived_at, record.first_content_at)
        if record.stream
        else None,
        "gen_ai.usage.input_tokens": record.tokens_prompt,
        "gen_ai.usage.output_tokens": record.tokens_generated,
        "gen_ai.usage.cache_read.input_tokens": record.tokens_cached,
        "http.response.status_code": record.status,
        "error.type": error_type(record),
        "trio_gateway.exchange_id": record.exchange_id,
        "trio_gateway.client_request_id": record.client_request_id,
        "trio_gateway.tenant": record.tenant,
        "trio_gateway.key_id": record.key_id,
        "trio_gateway.tier": record.tier,
        "trio_gateway.outcome": record.outcome,
        "trio_gateway.phase": record.phase,
        "trio_gateway.code": record.code,
        "trio_gateway.attempts": record.attempts,
        "trio_gateway.queue_seconds": _between(record.arrived_at, record.placed_at),
        "trio_gateway.tokens_delivered": record.tokens_delivered,
    }
    return {name: value for name, value in known.items() if value is not None}


def _between(began: float, ended: float | None) -> float | None:
    return None if ended is None else round(max(ended - began, 0.0), 6)
