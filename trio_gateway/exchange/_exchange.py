"""One exchange: a nursery that owns the lease, the upstream stream and the client writer.

Whatever ends it - the client, the deadline, a stall, the engine, an operator,
shutdown - ends it through the one scope: children report a cause, the first one
wins, and `_endings` says what the client still gets. Expected failures are
values; an exception out of here is a bug, and is settled as one.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Final

import trio

from ..contract import (
    AdmissionPort,
    AnswerHead,
    ChargePort,
    ClientPort,
    Ending,
    InternalRequest,
    Outcome,
    RatesPort,
    TicketPort,
    Worker,
)
from ..errors import ClientGone, Problem, Refused
from ..flow import ByteChannel, RequestScope
from ..ledger import Books, Record, Tally, TokensOf, four_bytes_each
from ..tenancy import RateBook
from ..wire import DeltaJoiner, failed_chunk
from ._attempt import Attempt, AttemptParts
from ._clock import ExchangeClock, ExchangeClocks
from ._delivery import Delivery, DeliveryLimits
from ._endings import (
    BUG,
    COMPLETED,
    FAREWELL_LIMIT,
    FAREWELLS,
    GONE,
    SHUT_DOWN,
    STALLED,
    TOO_LATE,
    Farewell,
    ending_of,
)
from ._flight import Flight, Terms
from ._retry import Failure, RetryBudget, Way

_REFUSED: Final = Outcome.REFUSED.value
# Tasks that an exchange starts inherit it: so those that outlive it can be found.
_CURRENT: Final[ContextVar[str | None]] = ContextVar("exchange", default=None)


def exchange_of(task: trio.lowlevel.Task) -> str | None:
    """Name the exchange in which a task was started, or which it runs; None: it is of none."""
    return task.context.get(_CURRENT)


@dataclass(frozen=True, slots=True)
class ExchangeLimits:
    """Bounds of one exchange, beside those of its attempts.

    Attributes:
        buffer_bytes: answer bytes that may wait for the client.
        merge_deltas: events that wait for a slow client are joined.
        recorded: when bytes move, and how many, is kept; see `Flight`.
        heartbeat_while_queued: heartbeats also during the first wait.
        error_style: ``event``, or ``finish_reason`` for a last chunk in front of the error.
        expose_worker: tell the client which worker answered.
    """

    max_attempts: int
    buffer_bytes: int
    delivery: DeliveryLimits
    heartbeat_while_queued: bool
    error_style: str
    expose_worker: bool
    merge_deltas: bool = False
    recorded: bool = True


@dataclass(frozen=True, slots=True)
class Parts:
    """What an exchange is put together from; all of it belongs to the gateway.

    Attributes:
        settled: takes the record, once per accepted exchange.
        bug: takes an exception that should not have happened.
        rates: of tenants and keys; by default nobody has any.
        tokens_of: estimates tokens, where no engine counts them.
        accepted: told of each exchange that gets a place, before anything follows from it; by raising
            Refused it has the place given back.
        traced: takes what happened to each that was accepted, once it is settled.
    """

    admission: AdmissionPort
    attempts: AttemptParts
    books: Books
    budget: RetryBudget
    limits: ExchangeLimits
    clocks: ExchangeClocks
    boot_id: str
    settled: Callable[[Record], None]
    bug: Callable[[str, BaseException], None]
    rates: RatesPort = field(default_factory=RateBook)
    tokens_of: TokensOf = four_bytes_each
    accepted: Callable[[InternalRequest], None] = lambda request: None
    traced: Callable[[InternalRequest, Record, Flight], None] | None = None


@dataclass(slots=True)  # frozen, its fields would be set by calls
class Admitted:
    """What an accepted request has, and its exchange gives back."""

    ticket: TicketPort
    charge: ChargePort


def admit(request: InternalRequest, parts: Parts) -> Admitted:
    """Charge the rates, take a place and have it noted, or nothing of it.

    Raises:
        Refused: nothing was taken. Whoever counts arrivals turns the request away.
    """
    charge = parts.rates.charge(request)
    try:
        ticket = parts.admission.enter(request)
        try:
            parts.accepted(request)
        except BaseException:
            ticket.leave()
            raise
    except BaseException:
        charge.refund()
        raise
    parts.books.accept(waiting=ticket.waiting)
    return Admitted(ticket, charge)


class _ReportingBugs:
    """Reports exceptions that should not have happened: a fault of one exchange is nobody else's."""

    __slots__ = ("_note_bug",)

    def __init__(self, note_bug: Callable[[BaseException], None]) -> None:
        self._note_bug = note_bug

    def __enter__(self) -> None:
        """Nothing happens on the way in."""

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if isinstance(exc, Exception):
            self._note_bug(exc)
            return True
        if isinstance(exc, BaseExceptionGroup):  # a bug and a cancellation from outside
            bugs, others = exc.split(Exception)
            if bugs is not None:
                self._note_bug(bugs)
            if others is not None:
                raise others from None
        return False


class Exchange:
    """One client request with its one answer, from admission to settlement.

    Args:
        placed: called once when the request got its first worker.
        queued: told position and seconds, once, if it has to wait for that.
        kept: bytes that the client port may keep of what it was given: as many fewer wait here.
        last_words: waits for what the client still says of an answer that it has.
        admitted: what `admit` answered for it: a refusal is cheaper before there is an exchange.
            None: it is admitted when it runs. It has to run in any case.
        door: by which it came, in a word for operators.

    Attributes:
        flight: what happened to it, and when.
        task: that runs it; None before and afterwards.
    """

    def __init__(
        self,
        request: InternalRequest,
        client: ClientPort,
        parts: Parts,
        placed: Callable[[], None],
        *,
        queued: Callable[[int, float | None], None] | None = None,
        kept: int = 0,
        last_words: Callable[[], Awaitable[None]] | None = None,
        admitted: Admitted | None = None,
        door: str = "http",
    ) -> None:
        self.request: Final = request
        self.door: Final = door
        self.resumable: Final = kept > 0
        self.tally: Final = Tally()
        self.flight: Final = Flight()
        self.flight.note_at(request.arrived, "arrived", size=request.size, door=door)
        if parts.limits.recorded:
            self.flight.terms = _terms(request, parts, kept)
        self.task: trio.lowlevel.Task | None = None
        # A receipt is over each event as the engine sent it.
        merging = parts.limits.merge_deltas and request.operation.choices and not request.receipt
        joiner = DeltaJoiner() if merging and request.stream else None
        cap = max(parts.limits.buffer_bytes - kept, 1)
        self.channel: Final = ByteChannel(cap, parts.attempts.pool, joiner)
        self._client = client
        self._parts = parts
        self._placed = placed
        self._queued = queued
        self._last_words = last_words
        self._scope = RequestScope(request.deadline, TOO_LATE)
        self._clock = ExchangeClock(parts.clocks, self._look, self._fail_at_bug)
        self._delivery = Delivery(
            client,
            self.channel,
            parts.limits.delivery,
            head=self._stream_head if request.stream else None,
            poke=self._clock.poke,
            gone=lambda: self.end(GONE),
            stalled=lambda: self.end(STALLED),
            full_timeout=math.inf if request.full_timeout is None else request.full_timeout,
            lagged=parts.books.lags.see,
            note=self.flight.note,
            record=self.flight.begin_takes,
        )
        self._attempt: Attempt | None = None
        self._ticket: TicketPort | None = None
        self._charge: ChargePort | None = None
        self._waiting = False
        self._retried = False
        if admitted is not None:
            self._own(admitted)

    # -- from outside

    @property
    def buffered(self) -> int:
        """Bytes of answer that wait in the channel, or until a buffered one is whole."""
        return self.channel.used + (self._attempt.held if self._attempt is not None else 0)

    @property
    def held_up(self) -> bool:
        """Whether its engine is not read now, because the client is slow."""
        return self._attempt is not None and self._delivery.blocked

    @property
    def ending(self) -> Ending | None:
        """Why it is over; None while it goes on."""
        return self._scope.ending

    @property
    def accepted(self) -> bool:
        """Whether it was placed or got a position."""
        return self._ticket is not None

    def standing(self) -> tuple[str, int | None, float | None, str | None]:
        """Tell state, position, seconds until placement, and outcome."""
        if self.ending is not None:
            return "ended", None, None, self.ending.outcome.value
        if self._waiting and self._ticket is not None:
            return "waiting", self._ticket.place, self._ticket.eta, None
        return "running", None, None, None

    def standing_word(self) -> str:
        """Tell the state alone."""
        return "ended" if self.ending is not None else "waiting" if self._waiting else "running"

    def take_progress(self) -> tuple[Worker, float, int | None] | None:
        """How far its stream has come since this was last asked; see `Attempt.take_progress`."""
        return None if self._attempt is None else self._attempt.take_progress()

    @property
    def why(self) -> str | None:
        """Why it waits, in one of the words of `TicketPort.why`; None: it does not."""
        return self._ticket.why if self._waiting and self._ticket is not None else None

    def doing(self) -> str:
        """Say what it waits for."""
        if self.ending is not None:
            return "tells the client how it ended"
        if self._ticket is None:
            return "is about to be admitted"
        if self._waiting:
            return "waits for a worker"
        if self._delivery.blocked:
            return "waits for the client, and reads no further"
        if self._attempt is not None and (doing := self._attempt.doing()) is not None:
            return doing
        return "waits for the client to take the rest"

    def lag(self, now: float) -> float:
        """For how many seconds the oldest byte waits that the client has not taken."""
        return self._delivery.lag(now)

    def stalled_for(self, now: float) -> float:
        """For how many seconds the client has taken nothing while bytes waited for it."""
        return self._delivery.stalled_for(now)

    @property
    def generated(self) -> int:
        """Tokens that an engine made for it, as far as was seen."""
        return 0 if self._attempt is None else self._attempt.generated()[1]

    @property
    def worker(self) -> str | None:
        """Where it runs; None: it waits, or is over."""
        return None if self._waiting or self.ending is not None else self.tally.worker

    def tokens(self) -> dict[str, int | None]:
        """Tokens by kind as far as is known by now; None where nobody knows or tells."""
        usage, generated = (None, 0) if self._attempt is None else self._attempt.generated()
        delivered, _ = self._client.delivered()
        return {
            "prompt": None if usage is None else usage.prompt,
            "generated": generated,
            "delivered": min(generated, delivered),
            "acknowledged": self.tally.acknowledged,
        }

    def end(self, ending: Ending) -> None:
        """End it, unless it ended before. Never waits.

        Whose answer is whole by now, and only the engine's end is awaited, has completed.
        """
        self._scope.end(COMPLETED if self._client.finished else ending)

    async def run(self) -> Ending:
        """Carry the request from admission to its last byte.

        However it ends, the engine's stream is closed, the lease given back or
        draining, and the record settled before this returns. Never raises but
        `trio.Cancelled`, and then it is settled too.
        """
        self.task = trio.lowlevel.current_task()
        token = _CURRENT.set(self.request.exchange_id)
        try:
            with _ReportingBugs(self._note_bug):
                await self._live()
            ending = self._scope.ending or BUG
            if not self._client.finished:
                with _ReportingBugs(self._note_bug):
                    await self._say_farewell(ending)
            return ending
        finally:
            _CURRENT.reset(token)
            self._settle(self._scope.ending or SHUT_DOWN)
            self._fall_apart()

    def _fail_at_bug(self, exc: Exception) -> None:
        self._note_bug(exc)
        self.end(BUG)

    def _note_bug(self, exc: BaseException) -> None:
        self._parts.bug(self.request.exchange_id, exc)
        self._scope.note(BUG)

    async def _live(self) -> None:
        async with self._scope as nursery:
            self._delivery.start(nursery)
            context = copy_context()
            try:
                self._clock.start(context)
                self._client.on_leaving(partial(context.run, nursery.start_soon, self._watch_client))
                await self._serve(nursery)
            except Refused as refused:
                await self._fail(refused.problem)
            except ClientGone:
                self.end(GONE)
            finally:
                # Both may start a task, which a closed nursery takes no more.
                self._clock.stop()
                self._client.on_leaving(None)
            if nursery.child_tasks:
                nursery.cancel_scope.cancel()

    async def _watch_client(self) -> None:
        await self._client.wait_gone()
        if not self._client.finished:  # else it has what it came for, and only the engine's end is awaited
            self.end(GONE)

    # -- attempts

    async def _serve(self, nursery: trio.Nursery) -> None:
        parts = self._parts
        ticket = self._ticket or self._own(admit(self.request, parts))
        parts.budget.deposit()
        if self._queued is not None and (place := ticket.place) is not None:
            self._queued(place, ticket.eta)
        if self._waiting and parts.limits.heartbeat_while_queued:
            self._delivery.expect_output(trio.current_time())
        while True:
            lease = await ticket.wait()
            self._note_placed(lease.worker)
            self._attempt = Attempt(
                self.request,
                parts.attempts,
                self.tally,
                self._delivery,
                self._headers,
                self._clock.poke,
                self.flight.note_at,
                self.flight.begin_reads(),
            )
            failure = await self._attempt.run(lease, nursery)
            if failure is None:
                break
            self._judge(failure, lease.worker, ticket)
        await self._delivery.finish()
        self._scope.note(COMPLETED)
        if self._last_words is not None:
            await self._last_words()

    def _own(self, admitted: Admitted) -> TicketPort:
        self._ticket = ticket = admitted.ticket
        self._charge = admitted.charge
        self._waiting = ticket.waiting
        self.flight.note("accepted", position=ticket.place)
        return ticket

    def _note_placed(self, worker: Worker) -> None:
        now = trio.current_time()
        self._scope.at_deadline = TOO_LATE
        if self._waiting:
            self._waiting = False
            self._parts.books.placed()
        if self.tally.placed is None:
            self.tally.placed = now
            self._placed()
        self.tally.worker = worker.id
        self.tally.attempts += 1
        self.flight.note_at(now, "placed", worker=worker.id, attempt=self.tally.attempts)

    def _judge(self, failure: Failure, worker: Worker, ticket: TicketPort) -> None:
        """Send the exchange back to its queue, or raise Refused with the last word."""
        parts = self._parts
        problem = failure.problem
        self.flight.note(
            "attempt_failed",
            worker=worker.id,
            reason=failure.reason,
            status=problem.status,
            code=problem.code,
        )
        without = None if failure.way is Way.ANYWHERE else worker
        if self._may_retry(failure):
            self.request.last_try = self.tally.attempts == parts.limits.max_attempts - 1
            if ticket.back(without=without, last=problem):
                self._retried = self._retried or failure.way is Way.ONCE
                parts.books.retries[failure.reason] += 1
                parts.books.sent_back()
                self._waiting = True
                self.flight.note("sent_back", position=ticket.place)
                # Whoever can not be tried again in time is told what the last worker said.
                self._scope.at_deadline = ending_of(self._last_word(problem))
                return
            if failure.way is Way.ONCE:
                parts.budget.give_back()
        raise Refused(self._last_word(problem))

    def _last_word(self, problem: Problem) -> Problem:
        if problem.status in (502, 504) and self._retried:
            return problem.but(final=True)
        return self._parts.admission.with_retry_after(problem, self.request.model)

    def _may_retry(self, failure: Failure) -> bool:
        if self.tally.committed or failure.way is Way.NOWHERE:
            return False
        if self.tally.attempts >= self._parts.limits.max_attempts:
            return False
        if failure.way is Way.ONCE:
            return not self._retried and self._parts.budget.spend(trio.current_time())
        return True

    # -- what the client is told

    def _headers(self) -> tuple[tuple[str, str], ...]:
        placed = self.tally.placed
        headers = []
        if placed is not None:
            headers.append(("x-gateway-queue-ms", str(round((placed - self.request.arrived) * 1000))))
        if self._parts.limits.expose_worker and self.tally.worker is not None:
            headers.append(("x-gateway-worker", self.tally.worker))
        return tuple(headers)

    def _stream_head(self) -> AnswerHead:
        if self.tally.headers is None:
            self.flight.note("headers")
        self.tally.begin(trio.current_time(), 200)
        return AnswerHead(200, self._headers())

    async def _fail(self, problem: Problem) -> None:
        """End with a failure: after all whole events that arrived, if an answer was begun."""
        ending = ending_of(problem)
        if not self.accepted:
            ending = Ending(Outcome.REFUSED, problem)
        elif self.tally.committed:
            ending = Ending(Outcome.UPSTREAM_FAILED, problem)
        self._scope.note(ending)
        if self._client.begun:
            try:
                self._delivery.hand_over_last(self._error_event(ending, problem))
                await self._delivery.finish()
            except ClientGone:
                self.end(GONE)

    def _error_event(self, ending: Ending, problem: Problem) -> bytes:
        event = self._client.error_event(
            problem, self._explain(ending), 0 if self._attempt is None else self._attempt.sequence
        )
        self.tally.own_events = 1
        if self._parts.limits.error_style == "finish_reason" and self.request.operation.choices:
            self.tally.own_events = 2
            return failed_chunk(self.request.operation) + event
        return event

    def _explain(self, ending: Ending) -> dict[str, object]:
        """What a caller is told about an accepted exchange, beside the problem."""
        self._note_delivery()
        return {
            "request_id": self.request.exchange_id,
            "outcome": ending.outcome.value,
            "phase": self.tally.phase().value,
            "tokens_delivered": self.tally.tokens_delivered(),
            "retryable": ending.problem is not None and not ending.problem.final and not self.tally.committed,
        }

    def _note_delivery(self) -> None:
        self.tally.events_delivered, self.tally.bytes_delivered = self._client.delivered()

    # -- the end

    async def _say_farewell(self, ending: Ending) -> None:
        """Do what `FAREWELLS` says, within its limit, under the one shield that an exchange has."""
        if FAREWELLS[ending.outcome] is not Farewell.CUT:
            with trio.move_on_after(FAREWELL_LIMIT, shield=True):
                await self._tell(ending)

    async def _tell(self, ending: Ending) -> None:
        """Tell the client why, as far as it can still be told."""
        problem = ending.problem
        try:
            if not self._client.begun:
                if problem is None:
                    return
                self.tally.status = problem.status
                named = problem.but(headers=(*self._headers(), *problem.headers))
                self._client.respond(named, self._explain(ending) if self.accepted else None)
            elif not self._client.ended:
                if not self.request.stream or problem is None:
                    return  # half of an answer that can not be completed
                self._client.withdraw()
                self.channel.keep_begun_event()
                self.channel.put_nowait(self._error_event(ending, problem))
                self.channel.close()
                await self._delivery.deliver()
            await self._client.flush()
        except ClientGone:
            return

    def _settle(self, ending: Ending) -> None:
        """Settle the books, once; synchronous, so that nothing can come between."""
        try:
            self._note_delivery()
            self._delivery.note_rest()
        except Exception as exc:  # whatever it is, the books are settled
            self._note_bug(exc)
        if not self._client.finished:
            self._client.cut()
        self.channel.clear()
        self.channel.close()
        parts = self._parts
        now = trio.current_time()
        self.flight.note_at(
            now,
            "ended",
            outcome=ending.outcome.value,
            code=None if ending.problem is None else ending.problem.code,
        )
        parts.books.lags.see_often(0.0, self._delivery.through)
        if self._ticket is None:
            parts.books.turn_away(ending.problem.code if ending.problem else ending.outcome.value)
            return
        self._ticket.leave()
        record = self.tally.record(
            self.request, ending, parts.boot_id, now, parts.attempts.wall(), parts.tokens_of
        )
        self.flight.record = record
        self._settle_charge(record)
        # What was not counted teaches nothing.
        self._ticket.served(_counted_prompt(record), record.tokens_generated or None)
        parts.books.settle(record, waiting=self._waiting)
        parts.settled(record)
        self.flight.note_at(
            now,
            "settled",
            generated=record.tokens_generated,
            delivered=record.tokens_delivered,
            bytes=record.bytes_delivered,
        )
        if parts.traced is not None:
            parts.traced(self.request, record, self.flight)

    def _settle_charge(self, record: Record) -> None:
        """Correct what was reserved by what was used; a refused request costs nothing."""
        charge = self._charge
        if charge is None:
            return
        if record.outcome == _REFUSED:
            charge.refund()
        else:
            charge.settle(_counted_prompt(record), record.tokens_generated or 0)

    def _fall_apart(self) -> None:
        """Let go of the parts that know this exchange: in a circle the body would outlive its answer.

        The collector of circles comes by the number of objects, not by their bytes.
        """
        self._attempt = self.task = None
        del self._clock, self._delivery

    def _look(self, now: float) -> float:
        """The clock: do what is due, and answer when to look again."""
        if self._scope.over:
            return math.inf  # or a heartbeat could be written that makes a status an event
        due = self._delivery.look(now)
        if self._delivery.slow:
            self.flight.pack()
        return due if self._attempt is None else min(due, self._attempt.look(now))


def _terms(request: InternalRequest, parts: Parts, kept: int) -> Terms:
    return Terms(
        request.operation.name,
        request.stream,
        request.choices,
        request.wants_usage,
        request.receipt,
        request.deadline - request.arrived,
        request.full_timeout,
        kept,
        (parts.limits, parts.attempts.limits),
    )


def _counted_prompt(record: Record) -> int | None:
    """Tokens of the prompt, if an engine counted them, or 0 if none was asked; None: they are a guess."""
    return None if record.prompt_source == "estimated" else record.tokens_prompt
