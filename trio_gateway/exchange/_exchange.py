"""One exchange: a nursery that owns the lease, the upstream stream and the client writer.

Whatever ends it - the client, the deadline, a stall, the engine, an operator,
shutdown - ends it through the one scope: children report a cause, the first one
wins, and `_endings` says what the client still gets. Expected failures are
values; an exception out of here is a bug, and is settled as one.

The pump writes through to the client's socket while that takes everything. A
writer task comes to life when it does not, and takes over from a byte channel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import trio

from ..contract import (
    AdmissionPort,
    AnswerHead,
    ClientPort,
    Ending,
    EngineAnswer,
    EnginePort,
    FleetPort,
    InternalRequest,
    LeasePort,
    Outcome,
    TicketPort,
    Worker,
)
from ..errors import ClientGone, EngineProtocolError, Problem, Refused, UpstreamFailed, UpstreamFault
from ..flow import BufferPool, ByteChannel, RequestScope
from ..ledger import Books, Record, Tally
from ..wire._answers import EngineError, Usage, judge_answer, read_error, rename_model
from ..wire._json import needs_thread
from ..wire._relay import StreamRelay, StreamShape
from ..wire._sse import DONE, HEARTBEAT
from . import _retry
from ._clock import ExchangeClock
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
from ._retry import Failure, RetryBudget, Way

PIECE: Final = 16 * 1024  # bytes per write: small enough to know how far a stuck one came
TAIL_WAIT: Final = 0.05  # seconds for the engine to end its message after [DONE]
ERROR_BODY: Final = 64 * 1024  # bytes read of an engine's error


@dataclass(frozen=True, slots=True)
class ExchangeLimits:
    """Bounds of one exchange; seconds and bytes.

    Attributes:
        heartbeat_after: 0: never.
        error_style: ``event``, or ``finish_reason`` for a last chunk in front of the error.
    """

    first_token: float
    between_events: float
    max_attempts: int
    buffer_bytes: int
    stall_timeout: float
    max_lag: float
    heartbeat_after: float
    heartbeat_while_queued: bool
    error_style: str
    event_bytes: int
    answer_bytes: int
    expose_worker: bool


@dataclass(frozen=True, slots=True)
class Parts:
    """What an exchange is put together from; all of it belongs to the gateway.

    Attributes:
        settled: takes the record, once per accepted exchange.
        bug: takes an exception that should not have happened.
        wall: the wall clock, seconds since the epoch.
    """

    admission: AdmissionPort
    fleet: FleetPort
    engine: EnginePort
    books: Books
    pool: BufferPool
    budget: RetryBudget
    limits: ExchangeLimits
    boot_id: str
    settled: Callable[[Record], None]
    bug: Callable[[str, BaseException], None]
    wall: Callable[[], float]


class Exchange:
    """One client request with its one answer, from admission to settlement.

    Args:
        placed: called once when the request got its first worker.
    """

    def __init__(
        self, request: InternalRequest, client: ClientPort, parts: Parts, placed: Callable[[], None]
    ) -> None:
        self.request: Final = request
        self.tally: Final = Tally()
        self.channel: Final = ByteChannel(parts.limits.buffer_bytes, parts.pool)
        self._client = client
        self._parts = parts
        self._limits = parts.limits
        self._placed = placed
        self._scope = RequestScope(request.deadline, TOO_LATE)
        self._clock = ExchangeClock(self._look)
        self._ticket: TicketPort | None = None
        self._waiting = False
        self._retried = False
        self._writing = False
        self._flushed = trio.Event()
        self._nursery: trio.Nursery | None = None
        # What the clock looks at: moments of the Trio clock.
        self._attempt_scope: trio.CancelScope | None = None
        self._expired: Failure | None = None
        self._attempt_due = math.inf  # for the first committing event
        self._progress_due_from = math.inf  # last progress of a committed stream
        self._last_byte = math.inf  # for heartbeats, from the first opened upstream
        self._taken = -1
        self._taken_at = 0.0

    # -- from outside

    @property
    def buffered(self) -> int:
        """Bytes of answer that the client's socket has not accepted yet."""
        return self.channel.used

    @property
    def ending(self) -> Ending | None:
        """Why it is over; None while it goes on."""
        return self._scope.ending

    @property
    def accepted(self) -> bool:
        """Whether it was placed or got a position."""
        return self._ticket is not None

    def end(self, ending: Ending) -> None:
        """End it for a reason of the gateway's own: operator, owner, shutdown."""
        self._scope.end(ending)

    async def run(self) -> Ending:
        """Carry the request from admission to its last byte.

        However it ends, the engine's stream is closed, the lease given back or
        draining, and the record settled before this returns. Never raises but
        `trio.Cancelled`, and then it is settled too.
        """
        try:
            try:
                await self._live()
            except Exception as exc:  # a fault of one exchange is nobody else's
                self._parts.bug(self.request.exchange_id, exc)
                self._scope.note(BUG)
            ending = self._scope.ending or BUG
            await self._say_farewell(ending)
            return ending
        finally:
            self._settle(self._scope.ending or SHUT_DOWN)

    async def _live(self) -> None:
        with self._scope:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                nursery.start_soon(self._watch_client)
                nursery.start_soon(self._clock.run)
                try:
                    await self._serve()
                except Refused as refused:
                    await self._fail(refused.problem)
                except ClientGone:
                    self._scope.end(GONE)
                nursery.cancel_scope.cancel()

    async def _watch_client(self) -> None:
        await self._client.wait_gone()
        self._scope.end(GONE)

    # -- attempts

    async def _serve(self) -> None:
        self._ticket = ticket = self._parts.admission.enter(self.request)
        self._parts.books.accept(waiting=ticket.waiting)
        self._parts.budget.deposit()
        self._waiting = ticket.waiting
        if self._waiting and self._limits.heartbeat_while_queued and self.request.stream:
            self._last_byte = trio.current_time()
        while True:
            lease = await ticket.wait()
            self._note_placed(lease.worker)
            failure = await self._attempt(lease)
            if failure is None:
                break
            self._judge(failure, lease.worker)
        await self._drain_channel()
        self._scope.note(COMPLETED)

    def _note_placed(self, worker: Worker) -> None:
        if self._waiting:
            self._waiting = False
            self._parts.books.placed()
        if self.tally.placed is None:
            self.tally.placed = trio.current_time()
            self._placed()
        self.tally.worker = worker.id
        self.tally.attempts += 1

    def _judge(self, failure: Failure, worker: Worker) -> None:
        """Send the exchange back to its queue, or raise Refused with the last word."""
        parts = self._parts
        problem = failure.problem
        may = failure.way is not Way.NOWHERE and self.tally.attempts < self._limits.max_attempts
        if may and failure.way is Way.ONCE:
            may = not self._retried and parts.budget.spend(trio.current_time())
            self._retried = self._retried or may
        without = None if failure.way is Way.ANYWHERE else worker
        assert self._ticket is not None
        if not self.tally.committed and may and self._ticket.back(without=without, last=problem):
            parts.books.retries[failure.reason] += 1
            parts.books.sent_back()
            self._waiting = True
            return
        if problem.status in (502, 504) and self._retried:
            problem = problem.but(final=True)
        raise Refused(parts.admission.with_retry_after(problem, self.request.model))

    async def _attempt(self, lease: LeasePort) -> Failure | None:
        """Make one attempt; None: the whole answer is in the channel or beyond."""
        worker, model, began = lease.worker, self.request.model, trio.current_time()
        fleet = self._parts.fleet
        self._expired = None
        fleet.attempted(worker)
        try:
            with lease, trio.CancelScope() as scope:
                self._attempt_scope = scope
                failure = await self._try_worker(lease)
            if scope.cancelled_caught:
                failure = self._expired
        finally:
            self._attempt_scope = None
            self._attempt_due = self._progress_due_from = math.inf
            fleet.attempt_over(worker, model)
        if failure is not None:
            if failure.fault:
                fleet.fault(worker, model)
            if failure.rejected:
                fleet.rejected(worker, model, failure.problem.status, failure.retry_after, began)
        return failure

    async def _try_worker(self, lease: LeasePort) -> Failure | None:
        assert self._nursery is not None
        now = trio.current_time()
        self._attempt_due = now + self._limits.first_token
        if self._last_byte == math.inf:
            self._last_byte = now
        self._clock.poke()
        attempt_id = self.request.attempt_id(self.tally.attempts)
        try:
            answer = await self._parts.engine.open(self.request, lease, attempt_id, self._nursery)
            if self.tally.opened is None:
                self.tally.opened = trio.current_time()
            with answer:
                return await self._read_answer(answer, lease.worker)
        except UpstreamFailed as failed:
            return _retry.of_transport(failed)

    async def _read_answer(self, answer: EngineAnswer, worker: Worker) -> Failure | None:
        if answer.status != 200:
            return await self._read_error(answer, worker)
        wanted = b"text/event-stream" if self.request.stream else b"application/json"
        kind = (answer.header(b"content-type") or b"").partition(b";")[0].strip().lower()
        if kind != wanted:
            return _retry.WRONG_TYPE
        if self.request.stream:
            return await self._pump(answer, worker)
        return await self._collect(answer, worker)

    async def _read_error(self, answer: EngineAnswer, worker: Worker) -> Failure:
        body = bytearray()
        while len(body) < ERROR_BODY and (data := await answer.receive()):
            body += data
        error = read_error(bytes(body[:ERROR_BODY]), answer.status, _retry.secrets_of(worker))
        retry_after = _retry.read_retry_after(answer.header(b"retry-after"), self._parts.wall())
        return _retry.of_error(error, retry_after)

    # -- a buffered answer

    async def _collect(self, answer: EngineAnswer, worker: Worker) -> Failure | None:
        """Read the whole answer, judge it, and hand it over."""
        pool, held = self._parts.pool, 0
        pieces: list[bytes] = []
        try:
            while data := await answer.receive():
                if held + len(data) > self._limits.answer_bytes:
                    raise UpstreamFailed(UpstreamFault.TOO_LARGE, f"over {self._limits.answer_bytes} bytes")
                await pool.reserve(len(data), held)
                held += len(data)
                pieces.append(data)
                self._attempt_due = trio.current_time() + self._limits.between_events
            body = b"".join(pieces)
            pieces.clear()
            judged = await self._judge_answer(body)
            if isinstance(judged, EngineError):
                return _retry.of_error(judged)
            body, self.tally.usage = judged
        except EngineProtocolError:
            return _retry.CUT
        finally:
            pool.give(held)
        self._parts.fleet.output(worker, self.request.model)
        self._commit()
        self._client.begin(AnswerHead(200, self._headers(), len(body)))
        self._hand_over_last(body)
        return None

    async def _judge_answer(self, body: bytes) -> EngineError | tuple[bytes, Usage | None]:
        request = self.request

        def judge() -> EngineError | tuple[bytes, Usage | None]:
            usage = judge_answer(body, request.operation, request.choices)
            if isinstance(usage, EngineError):
                return usage
            if request.upstream_model == request.model:
                return body, usage
            return rename_model(body, request.upstream_model, request.model), usage

        return await trio.to_thread.run_sync(judge, abandon_on_cancel=True) if needs_thread(body) else judge()

    # -- a stream

    async def _pump(self, answer: EngineAnswer, worker: Worker) -> Failure | None:
        """Move events from the engine towards the client until the answer is whole or has failed."""
        request = self.request
        relay = StreamRelay(
            StreamShape(
                request.choices,
                request.wants_usage,
                request.wants_running_usage,
                request.upstream_model,
                request.model,
                self._limits.event_bytes,
            )
        )
        try:
            failure = await self._relay(relay, answer, worker)
        finally:
            self._count(relay)
        if failure is None:
            self._hand_over_last(DONE)
            await self._read_tail(answer)
        return failure

    async def _relay(self, relay: StreamRelay, answer: EngineAnswer, worker: Worker) -> Failure | None:
        seen = 0
        while not relay.over:
            data = await answer.receive()
            if not data:
                relay.end()
                break
            block = relay.feed(data)
            if relay.progress != seen:
                seen = relay.progress
                if relay.committed:
                    self._progress_due_from = trio.current_time()
            if block:
                if not self.tally.committed:
                    self._commit_stream(worker)
                await self._hand_over(block)
        if relay.aborted:
            return _retry.ABORTED
        if relay.fault is not None:
            return _retry.of_error(relay.fault)
        return None if relay.all_finished else _retry.CUT

    def _commit_stream(self, worker: Worker) -> None:
        self._attempt_due = math.inf
        self._parts.fleet.output(worker, self.request.model)
        self._begin_stream()
        self._commit()
        self._clock.poke()

    def _commit(self) -> None:
        self.tally.committed = True
        self.tally.first_content = trio.current_time()
        self.tally.status = 200
        if self.tally.headers is None:
            self.tally.headers = self.tally.first_content

    def _count(self, relay: StreamRelay) -> None:
        tally = self.tally
        tally.usage = relay.usage or tally.usage
        tally.dropped += relay.dropped
        tally.events += relay.events
        tally.content_events += relay.content_events
        if relay.committed and self._progress_due_from != math.inf:
            tally.last_content = self._progress_due_from

    async def _read_tail(self, answer: EngineAnswer) -> None:
        """After ``[DONE]``: a message that ends at once leaves its connection fit for reuse."""
        if answer.ended:
            return
        with trio.move_on_after(TAIL_WAIT):
            try:
                await answer.receive()
            except UpstreamFailed:
                return

    # -- towards the client

    def _headers(self) -> tuple[tuple[str, str], ...]:
        waited = (self.tally.placed or self.request.arrived) - self.request.arrived
        headers = [("x-gateway-queue-ms", str(round(waited * 1000)))] if self.tally.placed is not None else []
        if self._limits.expose_worker and self.tally.worker is not None:
            headers.append(("x-gateway-worker", self.tally.worker))
        return tuple(headers)

    def _begin_stream(self) -> None:
        if not self._client.begun:
            self._client.begin(AnswerHead(200, self._headers()))
            self.tally.headers = trio.current_time()
            self.tally.status = 200

    async def _hand_over(self, block: bytes) -> None:
        """Write through while the client's socket takes everything; else through the channel."""
        self._last_byte = self._progress_due_from
        if not self._writing and len(block) <= PIECE:
            self._write_through(block)
            return
        self._start_writing()
        self._progress_due_from = math.inf  # a slow client is not the engine's fault
        await self.channel.put(block)
        self._progress_due_from = trio.current_time()

    def _write_through(self, block: bytes) -> None:
        self._client.push(block)
        if self._client.pending:
            self._start_writing()

    def _hand_over_last(self, block: bytes) -> None:
        """Hand over the last block of the message."""
        if not self._writing and len(block) <= PIECE and not self._client.pending:
            self._client.push(block, last=True)
        else:
            self.channel.put_nowait(block)
        self.channel.close()

    def _start_writing(self) -> None:
        if not self._writing:
            assert self._nursery is not None
            self._writing = True
            self._taken_at = trio.current_time()
            self._nursery.start_soon(self._write)
            self._clock.poke()

    async def _write(self) -> None:
        """The writer task: from the channel to the client, whatever it takes."""
        try:
            await self._deliver()
        except ClientGone:
            self._scope.end(GONE)

    async def _deliver(self) -> None:
        while True:
            await self._client.flush()
            piece = self.channel.take(PIECE)
            if piece:
                self._client.push(piece, last=self.channel.closed and not self.channel.used)
            elif self.channel.closed:
                break
            else:
                await self.channel.wait()
        self._flushed.set()

    async def _drain_channel(self) -> None:
        """Wait until the client's socket accepted the whole answer."""
        if self._writing:
            await self._flushed.wait()
        elif self._client.pending or self.channel.used:
            self._writing = True
            self._taken_at = trio.current_time()
            self._clock.poke()
            await self._deliver()

    async def _fail(self, problem: Problem) -> None:
        """End with a failure: after all whole events that arrived, if an answer was begun."""
        ending = ending_of(problem)
        if self.tally.committed:
            ending = Ending(Outcome.UPSTREAM_FAILED, problem)
        self._scope.note(ending)
        if self._client.begun:
            try:
                self._hand_over_last(self._error_event(ending))
                await self._drain_channel()
            except ClientGone:
                self._scope.end(GONE)

    def _error_event(self, ending: Ending) -> bytes:
        assert ending.problem is not None
        event = self._client.error_event(ending.problem, self._explain(ending))
        if self._limits.error_style == "finish_reason":
            return self._last_chunk() + event
        return event

    def _last_chunk(self) -> bytes:
        """A chunk for clients that only look at finish reasons."""
        if self.request.operation.name == "completions":
            choice = b'{"index":0,"text":"","finish_reason":"error"}'
        else:
            choice = b'{"index":0,"delta":{},"finish_reason":"error"}'
        return b'data: {"choices":[' + choice + b"]}\n\n"

    def _explain(self, ending: Ending) -> dict[str, object]:
        """What a caller is told about an accepted exchange, beside the problem."""
        self._note_delivery()
        return {
            "request_id": self.request.exchange_id,
            "outcome": ending.outcome.value,
            "phase": self.tally.phase().value,
            "tokens_delivered": self.tally.tokens_delivered(False) or 0,
            "retryable": ending.problem is not None and not ending.problem.final and not self.tally.committed,
        }

    def _note_delivery(self) -> None:
        self.tally.events_delivered, self.tally.bytes_delivered = self._client.delivered()

    # -- the end

    async def _say_farewell(self, ending: Ending) -> None:
        """Do what `FAREWELLS` says, within its limit, under the one shield that an exchange has."""
        farewell = FAREWELLS[ending.outcome]
        said = self._client.finished
        if farewell is not Farewell.CUT and not said:
            with trio.move_on_after(FAREWELL_LIMIT, shield=True):
                said = await self._tell(ending)
        self._note_delivery()
        if not said:
            self._client.cut()

    async def _tell(self, ending: Ending) -> bool:
        """Tell the client why; answers whether all of it was accepted."""
        try:
            if not self._client.begun:
                if ending.problem is None:
                    return False
                self.tally.status = ending.problem.status
                self._client.respond(ending.problem, self._explain(ending) if self.accepted else None)
            elif not self._client.ended:
                if not self.request.stream or ending.problem is None:
                    return False  # half of an answer that can not be completed
                self.channel.keep_begun_event()
                self.channel.put_nowait(self._error_event(ending))
                self.channel.close()
                await self._deliver()
            await self._client.flush()
        except ClientGone:
            return False
        return self._client.finished

    def _settle(self, ending: Ending) -> None:
        """Settle the books, once; synchronous, so that nothing can come between."""
        if not self._client.finished:
            self._client.cut()
        self.channel.clear()
        self.channel.close()
        parts = self._parts
        if self._ticket is None:
            parts.books.turn_away(ending.problem.code if ending.problem else ending.outcome.value)
            return
        self._ticket.leave()
        now = trio.current_time()
        record = self.tally.record(self.request, ending, parts.boot_id, now, parts.wall())
        parts.books.settle(record, waiting=self._waiting)
        parts.settled(record)

    # -- the clock

    def _look(self, now: float) -> float:
        """Do what is due, and answer when to look again."""
        due = self._look_at_attempt(now)
        due = min(due, self._look_at_writer(now))
        return min(due, self._look_at_silence(now))

    def _look_at_attempt(self, now: float) -> float:
        progress_due = self._progress_due_from + self._limits.between_events
        due = min(self._attempt_due, progress_due)
        if due > now:
            return due
        if self._attempt_scope is not None:
            self._expired = _retry.FIRST_TOKEN if self._attempt_due <= now else _retry.NO_PROGRESS
            self._attempt_scope.cancel(reason=self._expired.reason)
        self._attempt_due = self._progress_due_from = math.inf
        return math.inf

    def _look_at_writer(self, now: float) -> float:
        """The stall clock: only while bytes wait."""
        if not self._writing or not (self._client.pending or self.channel.used):
            self._taken_at = now
            # A writer that has nothing to do now may be stuck soon.
            return now + self._limits.stall_timeout / 4 if self._writing else math.inf
        taken = self._client.taken()
        if taken != self._taken:
            self._taken, self._taken_at = taken, now
        oldest = self.channel.oldest_since
        due = self._taken_at + self._limits.stall_timeout
        if oldest is not None:
            due = min(due, oldest + self._limits.max_lag)
        if due <= now:
            self._scope.end(STALLED)
            return math.inf
        return min(due, now + min(self._limits.stall_timeout / 4, 1.0))

    def _look_at_silence(self, now: float) -> float:
        """Heartbeats: headers and a comment after silence, in every phase."""
        after = self._limits.heartbeat_after
        if not after or not self.request.stream or self._last_byte == math.inf or self.channel.closed:
            return math.inf
        if self._last_byte + after > now:
            return self._last_byte + after
        self._last_byte = now
        if not self._writing and not self._client.pending:
            try:
                self._begin_stream()
                self._write_through(HEARTBEAT)
            except ClientGone:
                self._scope.end(GONE)
        return now + after
