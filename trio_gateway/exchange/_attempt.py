"""One attempt at one worker: open the stream, move what it gives, judge how it ends.

Owns the lease and the upstream answer, as two ``with`` lines. Expected failures
come back as a `Failure`; whether there is another attempt is the exchange's to say.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import trio

from ..contract import (
    AnswerHead,
    EngineAnswer,
    EnginePort,
    FleetPort,
    InternalRequest,
    LeasePort,
    Rejection,
    Worker,
)
from ..errors import EngineProtocolError, Refused, UpstreamFailed, UpstreamFault
from ..flow import BufferPool, Gathering
from ..ledger import Tally
from ..wire import (
    READER_STALLED,
    AgentAnswer,
    AgentRelay,
    EngineError,
    NamedRelay,
    OllamaRelay,
    StreamRelay,
    StreamShape,
    Usage,
    judge_answer,
    may_hold_infinity,
    needs_thread,
    ollama_answer,
    read_error,
    rejection_of,
    rename_model,
    status_of,
    with_finite_numbers,
)
from . import _retry
from ._delivery import Delivery
from ._flight import Counts, Track
from ._retry import Failure

_GAPS: Final = 32  # that are told at once: for each token a call would be dear
TAIL_WAIT: Final = 0.05  # seconds for the engine to end its message after [DONE]
ERROR_BODY: Final = 64 * 1024  # bytes read of an engine's error
ERROR_WAIT: Final = 3.0  # seconds for an engine to say its error, whose status is known

Headers = tuple[tuple[str, str], ...]
Relay = StreamRelay | NamedRelay | OllamaRelay | AgentRelay


def _say_nothing(exchange_id: str, worker: str, detail: str) -> None:
    """Nobody listens."""


def _note_nothing(at: float, what: str, **detail: object) -> None:
    """Nobody keeps it."""


@dataclass(frozen=True, slots=True)
class AttemptLimits:
    """Bounds of one attempt.

    Attributes:
        first_token: seconds from the sent request to the first committing event.
        between_events: seconds between two events with data.
        event_bytes, answer_bytes: of one event, of a whole buffered answer.
    """

    first_token: float
    between_events: float
    event_bytes: int
    answer_bytes: int


@dataclass(frozen=True, slots=True)
class AttemptParts:
    """What attempts are put together from.

    Attributes:
        wall: the wall clock, for Retry-After dates.
        troubled: told exchange id, worker id and what went wrong between us and an engine;
            for operators only, it may name addresses.
        gapped: told the seconds between two reads of a stream that brought output, while the client keeps up;
            several at once, within a second or so.
    """

    engine: EnginePort
    fleet: FleetPort
    pool: BufferPool
    limits: AttemptLimits
    wall: Callable[[], float]
    troubled: Callable[[str, str, str], None] = _say_nothing
    gapped: Callable[[Sequence[float]], None] | None = None


class Attempt:
    """One try of an exchange.

    Args:
        headers: makes the answer's headers, once a worker is known.
        poke: told from when on something may be due, if that may be earlier than the clock thinks.
        note: told what happens, and when, for operators.
        reads: takes a row for each read of the engine's answer.
    """

    def __init__(
        self,
        request: InternalRequest,
        parts: AttemptParts,
        tally: Tally,
        delivery: Delivery,
        headers: Callable[[], Headers],
        poke: Callable[[float], None],
        note: Callable[..., None] = _note_nothing,
        reads: Track | None = None,
    ) -> None:
        self._request = request
        self._parts = parts
        self._limits = parts.limits
        self._tally = tally
        self._delivery = delivery
        self._headers = headers
        self._poke = poke
        self._note = note
        self._reads = reads
        self._add_row = None if reads is None else reads.adder()
        self._gaps: list[float] | None = None if parts.gapped is None else []
        self._scope: trio.CancelScope | None = None
        self._expired: Failure | None = None
        self._stream: Relay | None = None
        self._output_due = math.inf  # for the first committing event
        self._progress_at = math.inf  # of a committed stream, or within a buffered answer
        self._paused = False  # no room for more of a buffered answer
        self._gathering = Gathering(parts.pool)
        self._worker: Worker | None = None
        self._told = 0  # events that the fleet was told of
        self._opened: float | None = None
        self._said_last = False  # an agent: its engine has let go, whatever becomes of the message

    def take_progress(self) -> tuple[Worker, float, int | None] | None:
        """How far a committed stream has come: its worker, when it last progressed, events since last asked.

        None in their place: it is not read, since its reader is slow.
        """
        self._tell_gaps()
        relay, worker = self._stream, self._worker
        if self._scope is None or relay is None or worker is None or not relay.committed:
            return None
        if self._delivery.blocked:
            return worker, self._progress_at, None
        events, self._told = relay.events - self._told, relay.events
        return worker, self._progress_at, events

    def doing(self) -> str | None:
        """Say what it waits for; None: it is over."""
        if self._scope is None:
            return None
        if self._opened is None:
            return "waits for the engine to answer"
        if self._paused:
            return "waits for room to gather the answer"
        return "reads the engine's answer" if self._tally.committed else "waits for the first token"

    def generated(self) -> tuple[Usage | None, int]:
        """Answer the usage that the engine told last, and tokens of its output as far as was seen."""
        relay = self._stream
        if relay is None:
            return self._tally.usage, 0
        usage = relay.usage
        known = None if usage is None else usage.generated
        return usage, max(known or 0, relay.content_events)

    @property
    def held(self) -> int:
        """Bytes of a buffered answer that were read and not yet handed over."""
        return self._gathering.held

    async def run(self, lease: LeasePort, nursery: trio.Nursery) -> Failure | None:
        """Make the attempt; None: the whole answer was handed over.

        The lease is returned or draining afterwards, the connection closed or
        back in the pool, however this ends.

        Args:
            nursery: may go on sending the body while the answer is read.
        """
        worker, began = lease.worker, trio.current_time()
        self._worker = worker
        self._parts.fleet.attempted(worker)
        failure: Failure | None = None
        with lease:
            try:
                with trio.CancelScope() as scope:
                    self._scope = scope
                    failure = await self._try_worker(lease, nursery, began)
                if scope.cancelled_caught:
                    failure = self._expired
                if failure is not None:
                    # Before the slot is free: whoever gets it next must know.
                    self._report(failure, worker, began)
            finally:
                self._scope = None
                self._tally.asked |= lease.engine_asked and (failure is None or failure.executed)
        return failure

    def _report(self, failure: Failure, worker: Worker, began: float) -> None:
        fleet, request = self._parts.fleet, self._request
        if failure.fault:
            fleet.fault(worker, request)
        if failure.rejected or failure.signal:
            status = failure.problem.status
            fleet.rejected(worker, request, Rejection(failure.signal, status, failure.retry_after, began))

    async def _try_worker(self, lease: LeasePort, nursery: trio.Nursery, now: float) -> Failure | None:
        self._output_due = now + self._limits.first_token
        self._poke(self._output_due)
        self._delivery.expect_output(now)
        try:
            answer = await self._parts.engine.open(self._request, lease, self._id, nursery)
            self._opened = trio.current_time()
            if self._tally.opened is None:
                self._tally.opened = self._opened
            self._note(self._opened, "opened", status=answer.status)
            with answer:
                failure = await self._read(answer, lease.worker)
                if self._said_last:
                    lease.engine_done()
                return failure
        except UpstreamFailed as failed:
            self._parts.troubled(self._request.exchange_id, lease.worker.id, str(failed))
            return _retry.of_transport(failed)
        except Refused as refused:
            return _retry.not_possible(refused.problem)

    @property
    def _id(self) -> str:
        return self._request.attempt_id(self._tally.attempts)

    async def _read(self, answer: EngineAnswer, worker: Worker) -> Failure | None:
        if answer.status != 200:
            return await self._read_error(answer, worker)
        kind = (answer.header(b"content-type") or b"").partition(b";")[0].strip().lower()
        if worker.dialect.agent:
            if kind != b"application/x-ndjson":
                return _retry.WRONG_TYPE
            return await (self._pump if self._request.stream else self._collect_records)(answer, worker)
        if self._request.stream:
            native = worker.dialect.native(self._request.operation)
            wanted = b"application/x-ndjson" if native else b"text/event-stream"
            return await self._pump(answer, worker) if kind == wanted else _retry.WRONG_TYPE
        if kind == b"application/json":
            return await self._collect(answer, worker)
        text_type = kind.decode("latin-1")
        if self._takes_text(text_type):
            return await self._collect(answer, worker, text_type)
        return _retry.WRONG_TYPE

    def _takes_text(self, kind: str) -> bool:
        """Whether an answer of this media type, which nobody can judge, is one that was asked for."""
        multipart = self._request.operation.multipart
        return multipart and kind.startswith("text/") and kind != "text/event-stream"

    async def _read_error(self, answer: EngineAnswer, worker: Worker) -> Failure:
        """Judge an error by its status and as much of its body as comes in time."""
        body = bytearray()
        with contextlib.suppress(UpstreamFailed), trio.move_on_after(ERROR_WAIT):  # the status says enough
            while len(body) < ERROR_BODY and (data := await answer.receive()):
                body += data
        retry_after = _retry.read_retry_after(answer.header(b"retry-after"), self._parts.wall())
        if worker.dialect.agent and (found := rejection_of(bytes(body))) is not None:
            rejection, error = found
            if rejection.worker is not None:
                self._parts.fleet.reported(worker, status_of(rejection.worker))
            return _retry.of_rejection(rejection.rejected, error, retry_after)
        error = read_error(bytes(body[:ERROR_BODY]), answer.status, _retry.secrets_of(worker))
        return _retry.of_error(error, retry_after)

    # -- a buffered answer

    async def _collect(
        self, answer: EngineAnswer, worker: Worker, text_type: str | None = None
    ) -> Failure | None:
        """Read the whole answer, judge it, and hand it over.

        Args:
            text_type: the media type of an answer that is no JSON, such as subtitles.
        """
        try:
            body = await self._read_whole(answer)
            judged = (body, None) if text_type else await self._judge(body, worker)
        except EngineProtocolError:
            return _retry.CUT
        if isinstance(judged, EngineError):
            return _retry.of_error(judged)
        self._hand_over_whole(*judged, worker, text_type)
        return None

    def _hand_over_whole(
        self, body: bytes, usage: Usage | None, worker: Worker, text_type: str | None
    ) -> None:
        self._tally.usage = usage
        self._tally.answer_bytes = len(body)
        now = trio.current_time()
        self._note(now, "first_content", bytes=len(body))
        self._parts.fleet.output(worker, self._request)
        self._tally.commit(now)
        self._delivery.begin_sized(
            AnswerHead(200, self._headers(), len(body), text_type or "application/json")
        )
        self._delivery.hand_over_last(body)

    async def _collect_records(self, answer: EngineAnswer, worker: Worker) -> Failure | None:
        """Read an agent's records, judge the answer in them, and hand it over."""
        records = AgentAnswer(self._request.choices, self._limits.answer_bytes, _retry.secrets_of(worker))
        with self._gathering as room:
            while not records.over and (data := await answer.receive()):
                seen = records.progress
                records.feed(data)
                if records.progress != seen:
                    self._note_read(data, trio.current_time())
                self._paused = True
                await room.take(len(data))
                self._paused = False
            records.end()
            self._said_last = records.said_last
            if records.aborted:
                return _retry.ABORTED
            if records.fault is not None:
                return _retry.of_error(records.fault)
            if not records.done or records.result is None:
                return _retry.CUT
            await self._read_tail(answer)
            if records.result.status != 200:
                secrets = _retry.secrets_of(worker)
                return _retry.of_error(read_error(records.body, records.result.status, secrets))
            text_type = records.result.content_type or None
            if text_type is not None and not self._takes_text(text_type):
                return _retry.WRONG_TYPE
            try:
                body = records.body
                judged = (body, None) if text_type else await self._judge(body, worker)
            except (ValueError, EngineProtocolError):
                return _retry.CUT
        if isinstance(judged, EngineError):
            return _retry.of_error(judged)
        self._hand_over_whole(*judged, worker, text_type)
        return None

    async def _read_whole(self, answer: EngineAnswer) -> bytes:
        """Read a body within its own bound and that of all answers together."""
        pieces: list[bytes] = []
        with self._gathering as room:
            while data := await answer.receive():
                if room.held + len(data) > self._limits.answer_bytes:
                    raise UpstreamFailed(UpstreamFault.TOO_LARGE, f"over {self._limits.answer_bytes} bytes")
                self._note_read(data, trio.current_time())
                self._paused = True
                await room.take(len(data))
                self._paused = False
                pieces.append(data)
            return b"".join(pieces)

    def _note_read(self, data: bytes, now: float) -> None:
        if self._reads is not None:
            self._reads.since = self._reads.since or now
            self._reads.add(now, len(data), 0)
        self._note_output(now)

    def _note_output(self, now: float) -> None:
        """Some of a buffered answer came: from now on only silence within it is limited."""
        self._progress_at = now
        if self._output_due != math.inf:
            self._output_due = math.inf
            self._poke(now + self._limits.between_events)

    async def _judge(self, body: bytes, worker: Worker) -> EngineError | tuple[bytes, Usage | None]:
        request, secrets = self._request, _retry.secrets_of(worker)

        def judge() -> EngineError | tuple[bytes, Usage | None]:
            if worker.dialect.native(request.operation):
                return ollama_answer(body, *self._naming(), request.model, secrets)
            finite = with_finite_numbers(body) if may_hold_infinity(body) else body
            usage = judge_answer(finite, request.operation, request.choices, secrets)
            if isinstance(usage, EngineError):
                return usage
            # Some engines answer lists to rerank and score, which name no model.
            if request.upstream_model == request.model or finite.lstrip().startswith(b"["):
                return finite, usage
            return rename_model(finite, request.upstream_model, request.model), usage

        return await trio.to_thread.run_sync(judge, abandon_on_cancel=True) if needs_thread(body) else judge()

    def _naming(self) -> tuple[str, int]:
        """Id and time of an answer whose engine gives none."""
        return f"chatcmpl-{self._id}", int(self._parts.wall())

    # -- a stream

    async def _pump(self, answer: EngineAnswer, worker: Worker) -> Failure | None:
        """Move events from the engine towards the client until the answer is whole or has failed."""
        self._stream = relay = self._make_relay(worker)
        try:
            failure = await self._relay(relay, answer, worker)
            self._said_last = isinstance(relay, AgentRelay) and relay.said_last
        finally:
            self._tally.count(relay, self._progress_at)
            self._tell_gaps()
            self._note_counts(relay)
        if failure is None:
            if not self._tally.committed:
                self._commit(worker, trio.current_time())
            self._note(trio.current_time(), "last_content", events=relay.events)
            self._delivery.hand_over_last(relay.closing)
            await self._read_tail(answer)
        return failure

    def _note_counts(self, relay: Relay) -> None:
        if self._reads is not None:
            usage = relay.usage
            told = (None, None) if usage is None else (usage.prompt, usage.generated)
            self._reads.counts = Counts(relay.events, relay.content_events, relay.silent_at_end, told)

    def _make_relay(self, worker: Worker) -> Relay:
        request, dialect = self._request, worker.dialect
        # Where we ask for none in every event, what there is in one is the engine's own place for it.
        own_place = request.wants_usage and not (dialect.running_usage or dialect.agent)
        shape = StreamShape(
            request.choices,
            request.wants_usage,
            request.wants_running_usage or own_place,
            request.upstream_model,
            request.model,
            self._limits.event_bytes,
            _retry.secrets_of(worker),
            request.receipt,
        )
        if worker.dialect.agent:
            return AgentRelay(shape, request.operation, *self._naming())
        if worker.dialect.native(request.operation):
            return OllamaRelay(shape, *self._naming())
        if request.operation.choices:
            return StreamRelay(shape)
        return NamedRelay(shape, request.operation.style, self._naming()[0])

    @property
    def sequence(self) -> int:
        """Number of an error event that would follow what the engine sent."""
        return 0 if self._stream is None else self._stream.sequence

    async def _relay(self, relay: Relay, answer: EngineAnswer, worker: Worker) -> Failure | None:
        while not relay.over and await self._move(relay, answer, worker):
            await self._delivery.room()
            take_lines = self._take_lines if isinstance(relay, StreamRelay) else None
            while self._flows(relay) and await answer.pour(self._take, take_lines):
                await self._delivery.catch_up()
                await self._delivery.room()
        if relay.aborted:
            return _retry.ABORTED
        if relay.fault is not None:
            if relay.fault.code == READER_STALLED and self._delivery.slow:
                self._delivery.stall()
                await trio.lowlevel.checkpoint_if_cancelled()
            return _retry.of_error(relay.fault)
        return None if relay.all_finished else _retry.CUT

    async def _move(self, relay: Relay, answer: EngineAnswer, worker: Worker) -> bool:
        """Move one read's worth of events; False at the end of the message.

        A step of its own, so that nothing of it stays in memory while the next waits.
        """
        data = await answer.receive()
        seen = relay.progress
        block = relay.feed(data) if data else relay.end()
        before = self._progress_at
        now = trio.current_time() if relay.progress != seen else before
        if relay.committed:
            self._progress_at = now
        if block:
            if not self._tally.committed:
                self._commit(worker, now)
            self._note_block(relay, block, before, now)
            await self._delivery.hand_over(block, now)
        return bool(data)

    def _flows(self, relay: Relay) -> bool:
        """Whether what is read can be handed over without a step of this task, unless it is unusual."""
        return relay.committed and not relay.over and self._delivery.flows

    def _note_block(self, relay: Relay, block: bytes, before: float, now: float) -> None:
        if (add_row := self._add_row) is not None:
            add_row((now, len(block), relay.events))
        if (gaps := self._gaps) is not None and now > before and not self._delivery.slow:
            gaps.append(now - before)
            if len(gaps) == _GAPS:
                self._tell_gaps()

    def _tell_gaps(self) -> None:
        if self._gaps and self._parts.gapped is not None:
            self._parts.gapped(self._gaps)
            self._gaps.clear()

    def _take(self, data: bytes, now: float) -> bool:
        """Move one read's worth of events of a committed stream as far as that needs no waiting.

        False: there is something that the exchange's own task has to see to.
        """
        relay = self._stream
        assert relay is not None
        seen, known = relay.progress, relay.events
        block = relay.feed(data)
        events = relay.events - known if isinstance(relay, StreamRelay) else 0
        return self._pass_on(relay, block, events, seen, now)

    def _take_lines(self, lines: list[bytes], now: float) -> bool:
        """Do as `_take` with whole events of one line each."""
        relay = self._stream
        assert isinstance(relay, StreamRelay)
        seen, known = relay.progress, relay.events
        block = relay.feed_lines(lines)
        return self._pass_on(relay, block, relay.events - known, seen, now)

    def _pass_on(self, relay: Relay, block: bytes, events: int, seen: int, now: float) -> bool:
        """Pass on so many events (0: not known) of a relay that had seen so many before."""
        before = self._progress_at
        if relay.progress != seen:
            self._progress_at = now
        else:
            now = before
        if block:
            if (add_row := self._add_row) is not None:
                add_row((now, len(block), relay.events))
            delivery = self._delivery
            if (gaps := self._gaps) is not None and now > before and not delivery.slow:
                gaps.append(now - before)
                if len(gaps) == _GAPS:
                    self._tell_gaps()
            if not delivery.pass_through(block, now, events):
                return False
        return not relay.over

    def _commit(self, worker: Worker, now: float) -> None:
        self._output_due = math.inf
        self._parts.fleet.output(worker, self._request)
        self._note(now, "first_content")
        if self._reads is not None:
            self._reads.since = now
        self._tally.commit(now)  # first, so that the head is not noted as later than its content
        self._delivery.begin()
        self._poke(now + self._limits.between_events)

    async def _read_tail(self, answer: EngineAnswer) -> None:
        """After ``[DONE]``: a message that ends at once leaves its connection fit for reuse."""
        if answer.ended:
            return
        with trio.move_on_after(TAIL_WAIT):
            try:
                await answer.receive()
            except UpstreamFailed:
                return

    # -- the clock

    def look(self, now: float) -> float:
        """Do what is due, and answer when to look again."""
        if self._scope is None:
            return math.inf
        if self._delivery.blocked or self._paused:
            # A slow client is not the engine's fault, nor is it that we have no room.
            self._progress_at = now
        due = min(self._output_due, self._progress_at + self._limits.between_events)
        if due > now:
            return due
        self._expired = _retry.FIRST_TOKEN if self._output_due <= now else _retry.NO_PROGRESS
        self._scope.cancel(reason=self._expired.reason)
        return math.inf
