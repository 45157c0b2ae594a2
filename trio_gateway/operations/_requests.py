"""Requests as operators see them: those under way, and the last that ended."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import trio

from ..admin import RequestFilter, Row, refusal
from ..exchange import Exchange, Flight
from ..flow import in_steps
from ..ledger import Record
from ._house import House

PLACES = 6  # of seconds after the point
LOOKED_AT = 1000  # requests in one step on the loop, some 0.5 ms
WRITTEN = 40  # rows in one step; one of a request that waits takes 20 us, for its place in the line


async def requests(house: House, asked: RequestFilter) -> Row:
    """Answer the rows of requests; the last that ended stand behind those that are under way."""
    oldest = asked.order == "oldest"
    recent = house.books.recent if oldest else reversed(house.books.recent)
    ended = [record for record in recent if _fits_record(record, asked)]
    arrived = tuple(house.live)
    under_way = arrived if oldest else reversed(arrived)
    live = await in_steps((each if _fits(each, asked) else None for each in under_way), LOOKED_AT)
    found: list[Exchange | Record] = [*live, *ended]
    page = found[asked.offset :][: asked.limit]
    return {
        "requests": await in_steps((row_now(each, house) for each in page), WRITTEN),
        "total": len(found),
        "offset": asked.offset,
    }


def row_now(found: Exchange | Record, house: House) -> Row | None:
    """Answer a row as it stands now; None: it ended meanwhile, and left no record."""
    if isinstance(found, Record):
        return ended_row(found, house)
    request_id = found.request.exchange_id
    if house.live.find(request_id) is found:
        return row(found, trio.current_time())
    record = find_record(house, request_id)
    return None if record is None else ended_row(record, house)


def timeline(house: House, request_id: str) -> Row:
    """Answer one request with all its steps.

    Raises:
        Refused: ``not_found``.
    """
    exchange = house.live.find(request_id)
    if exchange is not None:
        arrived, shown = exchange.request.arrived, row(exchange, trio.current_time())
        return {"request": shown, "timeline": list(_steps(exchange.flight, arrived))}
    record = find_record(house, request_id)
    flight = house.live.flight(request_id)
    if record is None or flight is None:
        raise refusal("not_found", "there is no such request, or it ended long ago")
    arrived = next(iter(flight)).at
    return {"request": ended_row(record, house), "timeline": list(_steps(flight, arrived))}


def find_record(house: House, request_id: str) -> Record | None:
    """Answer the record of one of the last requests that ended."""
    return next((each for each in house.books.recent if each.exchange_id == request_id), None)


def _steps(flight: Flight, arrived: float) -> Iterator[Row]:
    for step in flight:
        detail = {name: value for name, value in step.detail.items() if value is not None}
        yield {"at": round(step.at - arrived, PLACES), "what": step.what, "detail": detail}


def _fits(exchange: Exchange, asked: RequestFilter) -> bool:
    request, worker = exchange.request, exchange.tally.worker
    texts = (request.exchange_id, request.client_request_id, request.tenant, request.key_id, request.model)
    return (
        (asked.state is None or exchange.standing_word() == asked.state)
        and (asked.tenant is None or request.tenant == asked.tenant)
        and (asked.model is None or request.model == asked.model)
        and (asked.worker is None or worker == asked.worker)
        and _says((*texts, worker), asked.search)
    )


def _fits_record(record: Record, asked: RequestFilter) -> bool:
    texts = (
        record.exchange_id,
        record.client_request_id,
        record.tenant,
        record.key_id,
        record.model,
        record.worker,
    )
    return (
        asked.state in (None, "ended")
        and (asked.tenant is None or record.tenant == asked.tenant)
        and (asked.model is None or record.model == asked.model)
        and (asked.worker is None or record.worker == asked.worker)
        and _says(texts, asked.search)
    )


def _says(texts: tuple[str | None, ...], search: str | None) -> bool:
    return search is None or any(search in text for text in texts if text is not None)


def row(exchange: Exchange, now: float) -> Row:
    """Answer the row of a request that is under way."""
    request, tally = exchange.request, exchange.tally
    state, position, eta, outcome = exchange.standing()
    task, ending = exchange.task, exchange.ending
    return {
        "id": request.exchange_id,
        "client_request_id": request.client_request_id,
        "tenant": request.tenant,
        "key_id": request.key_id,
        "operation": request.operation.name,
        "model": request.model,
        "tier": request.tier,
        "stream": request.stream,
        "state": state,
        "phase": tally.phase().value,
        "outcome": outcome,
        "code": None if ending is None or ending.problem is None else ending.problem.code,
        "holder": None if task is None else {"task": task.name, "doing": exchange.doing()},
        "position": position,
        "eta": _rounded(eta),
        "why": exchange.why,
        "age": round(now - request.arrived, PLACES),
        "deadline_in": round(request.deadline - now, PLACES),
        "worker": tally.worker,
        "attempt": tally.attempts,
        "lag": _rounded(exchange.lag(now)),
        "stalled_for": _rounded(exchange.stalled_for(now)),
        "buffered_bytes": exchange.buffered,
        "tokens": exchange.tokens(),
        "door": exchange.door,
        "resumable": exchange.resumable,
    }


def ended_row(record: Record, house: House) -> Row:
    """Answer the row of a request that ended, in the shape of the others."""
    flight = house.live.flight(record.exchange_id)
    return {
        "id": record.exchange_id,
        "client_request_id": record.client_request_id,
        "tenant": record.tenant,
        "key_id": record.key_id,
        "operation": record.operation,
        "model": record.model,
        "tier": record.tier,
        "stream": record.stream,
        "state": "ended",
        "phase": record.phase,
        "outcome": record.outcome,
        "code": record.code,
        "holder": None,
        "position": None,
        "eta": None,
        "why": None,
        "age": round(house.parts.attempts.wall() - record.arrived_at, PLACES),
        "deadline_in": None,
        "worker": record.worker,
        "attempt": record.attempts,
        "lag": None,
        "stalled_for": None,
        "buffered_bytes": 0,
        "tokens": _tokens(record),
        "door": "http" if flight is None else next(iter(flight)).detail["door"],
        "resumable": False,
    }


def ending(record: Record, wall: float) -> Row:
    """Answer how a request ended.

    Args:
        wall: seconds since the epoch.
    """
    return {
        "id": record.exchange_id,
        "outcome": record.outcome,
        "phase": record.phase,
        "code": record.code,
        "tenant": record.tenant,
        "model": record.model,
        "worker": record.worker,
        "ended_ago": round(max(wall - record.settled_at, 0.0), PLACES),
        "duration": round(max(record.settled_at - record.arrived_at, 0.0), PLACES),
        "tokens": _tokens(record),
    }


def _tokens(record: Record) -> dict[str, int | None]:
    return {
        "prompt": record.tokens_prompt,
        "generated": record.tokens_generated,
        "delivered": record.tokens_delivered,
        "acknowledged": record.tokens_acknowledged,
    }


def _rounded(seconds: float | None) -> Any:
    return None if seconds is None else round(seconds, PLACES)
