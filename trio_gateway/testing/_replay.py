"""Plays a recorded exchange once more: a real exchange between a scripted engine and a scripted client.

Given are the moments of placement, what the engine did and what the client took, and whoever ended it from
outside. What follows from that - retries, heartbeats, stalls, deadlines, what the client is told, every
count - is the exchange's own doing, on the clock of the caller: a fake one plays an hour in an instant.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Self, final

import trio
import trio.testing

from ..contract import (
    CHAT,
    COMPLETIONS,
    AdmissionPort,
    InternalRequest,
    LeasePort,
    Rejection,
    Worker,
    WorkerStatus,
)
from ..errors import CODES, Problem, Refused
from ..exchange import (
    OPERATOR,
    OWNER,
    SHUT_DOWN,
    AttemptLimits,
    AttemptParts,
    DeliveryLimits,
    Exchange,
    ExchangeClocks,
    ExchangeLimits,
    LiveExchanges,
    Parts,
    RetryBudget,
)
from ..flow import BufferPool
from ..ledger import Books, Record
from ..units import MiB
from ..wire import HEARTBEAT
from ._fake_client import RecordingClient
from ._fake_engine import FakeAttempt, FakeEngine, FakeScript
from ._played import MODEL, play
from ._recorded import JUST, Recorded
from ._worker_set import make_worker

COMPARED: Final = ("outcome", "phase", "code", "status", "attempts", "events_delivered")
COUNTED: Final = ("tokens_generated", "tokens_delivered")
_FROM_OUTSIDE: Final = {each.outcome.value: each for each in (OPERATOR, OWNER, SHUT_DOWN)}
_BY_THE_CLIENT: Final = frozenset({"client_gone", "client_stalled"})
_POOL: Final = 256 * MiB


@dataclass(frozen=True, slots=True)
class Replayed:
    """How a replay ended.

    Attributes:
        differences: by name, what was recorded and what came of it now, where the two are not the same.
        ended: seconds after it arrived, as recorded and now.
    """

    record: Record
    differences: dict[str, tuple[Any, Any]]
    ended: tuple[float, float]

    @property
    def same(self) -> bool:
        """Whether it ended as it did."""
        return not self.differences


def replay_at_once(recorded: Recorded) -> Replayed:
    """Play it on a fake clock."""
    return trio.run(replay, recorded, clock=trio.testing.MockClock(autojump_threshold=0))


async def replay(recorded: Recorded) -> Replayed:
    """Play it on the clock of the caller."""
    began = trio.current_time()
    client = RecordingClient()
    records: list[Record] = []
    request = _request(recorded, began)
    parts = _parts(recorded, began, records)
    parts.books.arrive()
    exchange = Exchange(request, client, parts, lambda: None, kept=recorded.terms["kept"])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(parts.clocks.run)
        nursery.start_soon(_be_client, recorded, client, began)
        nursery.start_soon(_end_from_outside, recorded, exchange, began)
        with LiveExchanges().holding(exchange):
            await exchange.run()
        nursery.cancel_scope.cancel()
    (record,) = records
    return Replayed(
        record, dict(_differences(recorded, record)), (recorded.ended, trio.current_time() - began)
    )


def _differences(recorded: Recorded, record: Record) -> Iterator[tuple[str, tuple[Any, Any]]]:
    names = list(COMPARED)
    if recorded.ending["usage_source"] == "engine" or recorded.terms["stream"]:
        names += COUNTED  # else they were estimated, from bytes of another text
    for name in names:
        before, now = recorded.ending[name], getattr(record, name)
        if before != now:
            yield name, (before, now)


# The parts around the exchange ------------------------------------------------------------------------------


def _request(recorded: Recorded, began: float) -> InternalRequest:
    terms = recorded.terms
    operation = COMPLETIONS if terms["operation"] == COMPLETIONS.name and not terms["stream"] else CHAT
    return InternalRequest(
        exchange_id=(recorded.id or "0" * 32)[:32],
        client_request_id=None,
        tenant="recorded",
        key_id=None,
        operation=operation,
        model=MODEL,
        upstream_model=MODEL,
        members={"model": json.dumps(MODEL).encode()},
        size=1,
        stream=terms["stream"],
        choices=1,
        n=1,
        wants_usage=False,
        wants_running_usage=False,
        arrived=began,
        deadline=began + terms["deadline"],
        full_timeout=terms["full_timeout"],
    )


def _parts(recorded: Recorded, began: float, records: list[Record]) -> Parts:
    limits = recorded.limits

    def script(attempt: FakeAttempt) -> FakeScript:
        return play(recorded, recorded.tries[attempt.number - 1], began)

    return Parts(
        admission=_PlayedAdmission(recorded, began),
        attempts=AttemptParts(
            engine=FakeEngine(script),
            fleet=_Indifferent(),
            pool=BufferPool(_POOL),
            limits=AttemptLimits(
                limits["first_token"], limits["between_events"], limits["event_bytes"], limits["answer_bytes"]
            ),
            wall=trio.current_time,
        ),
        books=Books(),
        budget=RetryBudget(1.0),
        limits=ExchangeLimits(
            max_attempts=limits["max_attempts"],
            buffer_bytes=limits["buffer_bytes"],
            delivery=DeliveryLimits(limits["stall_timeout"], limits["max_lag"], limits["heartbeat_after"]),
            heartbeat_while_queued=limits["heartbeat_while_queued"],
            error_style="event",
            expose_worker=False,
            merge_deltas=limits["merge_deltas"],
        ),
        clocks=ExchangeClocks(),
        boot_id="replay",
        settled=records.append,
        bug=_raise,
    )


def _raise(where: str, exc: BaseException) -> None:
    raise exc


class _Indifferent:
    """A fleet that learns nothing. See FleetPort."""

    def attempted(self, worker: Worker) -> None:
        """See FleetPort."""

    def output(self, worker: Worker, request: InternalRequest) -> None:
        """See FleetPort."""

    def rejected(self, worker: Worker, request: InternalRequest, rejection: Rejection) -> None:
        """See FleetPort."""

    def reported(self, worker: Worker, status: WorkerStatus) -> None:
        """See FleetPort."""

    def fault(self, worker: Worker, request: InternalRequest) -> None:
        """See FleetPort."""


@final
class _PlayedAdmission(AdmissionPort):
    """Places when it was placed, and where."""

    def __init__(self, recorded: Recorded, began: float) -> None:
        self._recorded = recorded
        self._began = began

    def enter(self, request: InternalRequest) -> _PlayedTicket:
        """See AdmissionPort."""
        return _PlayedTicket(self._recorded, self._began)

    def with_retry_after(self, problem: Problem, model: str) -> Problem:
        """See AdmissionPort."""
        return problem


class _PlayedTicket:
    """See TicketPort."""

    def __init__(self, recorded: Recorded, began: float) -> None:
        self._recorded = recorded
        self._began = began
        self._next = 0
        self._went_back = 0

    @property
    def waiting(self) -> bool:
        """See TicketPort."""
        return True

    place: int | None = 1
    eta: float | None = None
    why: str | None = "no_slot"

    async def wait(self) -> LeasePort:
        """See TicketPort."""
        tries = self._recorded.tries
        if self._next < len(tries):
            attempt = tries[self._next]
            self._next += 1
            await trio.sleep_until(self._began + attempt.placed)
            return _PlayedLease(make_worker(attempt.worker))
        if self._recorded.ending["outcome"] in (*_FROM_OUTSIDE, *_BY_THE_CLIENT):
            await trio.sleep_forever()  # whoever ended it while it waited does so again
        await trio.sleep_until(self._began + self._recorded.ended)
        raise Refused(_problem(self._recorded))

    def back(self, *, without: Worker | None, last: Problem) -> bool:
        """See TicketPort."""
        self._went_back += 1
        return self._went_back <= self._recorded.sent_back

    def served(self, prompt: int | None, generated: int | None) -> None:
        """See TicketPort."""

    def leave(self) -> None:
        """See TicketPort."""


def _problem(recorded: Recorded) -> Problem:
    """With what it was refused while it waited."""
    code, status = recorded.ending["code"], recorded.ending["status"]
    if code in CODES:
        problem = Problem.of(code, "as recorded")
        return problem if status is None or status == 200 else problem.but(status=status)
    return Problem(code, "as recorded", status or 400, "invalid_request_error")


@final
class _PlayedLease:
    """See LeasePort."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._asked = False

    @property
    def worker(self) -> Worker:
        """See LeasePort."""
        return self._worker

    @property
    def engine_asked(self) -> bool:
        """See LeasePort."""
        return self._asked

    def engine_started(self, attempt_id: str) -> None:
        """See LeasePort."""
        self._asked = True

    def engine_done(self) -> None:
        """See LeasePort."""

    def __enter__(self) -> Self:
        """See LeasePort."""
        return self

    def __exit__(self, *exc: object) -> None:
        """See LeasePort."""


# Who acts ---------------------------------------------------------------------------------------------------


async def _be_client(recorded: Recorded, client: RecordingClient, began: float) -> None:
    """Take what was taken, when it was; then leave, or not."""
    outcome = recorded.ending["outcome"]
    if recorded.slow_since < math.inf:
        await trio.sleep_until(began + recorded.slow_block_at - JUST)
        client.stop_reading()
        ours = client.comments * len(HEARTBEAT)
        client.read(max(recorded.taken_before + ours - len(client.received), 0))
        for take in recorded.takes:
            await trio.sleep_until(began + take.at)
            client.read(take.size)
        if outcome == "completed" or recorded.ending["events_delivered"] > recorded.events:
            client.read(math.inf)  # it took all there was, the error that ended it too
        else:
            last = max(recorded.slow_since, recorded.takes[-1].at if recorded.takes else 0.0)
            await trio.sleep_until(began + last + JUST)  # so that the last piece is there
            _acknowledge(recorded, client)
    if outcome == "client_gone":
        await trio.sleep_until(began + recorded.ended + JUST)
        _acknowledge(recorded, client)
        client.leave()


def _acknowledge(recorded: Recorded, client: RecordingClient) -> None:
    """Let the client's kernel confirm as many events as it did, of those it took; no more come."""
    client.stop_reading()
    counted = recorded.ending["events_delivered"]
    end, found = 0, 0
    while found < counted and (next_end := client.received.find(b"\n\n", end)) >= 0:
        found += not client.received.startswith(b":", end)
        end = next_end + 2
    client.unacknowledged = len(client.received) - end


async def _end_from_outside(recorded: Recorded, exchange: Exchange, began: float) -> None:
    ending = _FROM_OUTSIDE.get(recorded.ending["outcome"])
    if ending is not None:
        await trio.sleep_until(began + recorded.ended + JUST)  # behind what was read at that moment
        exchange.end(ending)
