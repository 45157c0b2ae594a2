"""Exchanges in one process on a fake clock, and an account of everything that they may hold.

`rigged` puts an exchange's parts together as the gateway does, over the shipped fakes. While it is open
the equations of conservation are checked after every step of every task; when it closes nothing may run,
wait, drain or be held.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import trio

from trio_gateway.contract import Ending, InternalRequest
from trio_gateway.exchange import (
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
from trio_gateway.flow import BufferPool, ReadLoop
from trio_gateway.ledger import Books, Record, conservation_errors
from trio_gateway.tenancy import RateBook, RateLimits
from trio_gateway.testing import (
    FakeEngine,
    FakePoller,
    FakeScripting,
    RecordingClient,
    WorkerSet,
    make_request,
    make_worker,
    until,
)
from trio_gateway.units import KiB, MiB

WALL: Final = 1_700_000_000.0  # what the wall clock shows when the fake one shows 0
GRACE: Final = 0.5  # seconds a draining lease is kept
READ_TOGETHER = True
"""Whether one task reads all streams, as a gateway's does, or each is read by its exchange's own."""

EXPECTED: Final = (100, 50)  # tokens of a prompt and its answer, as rates are told before they know

DEFAULTS: Final[dict[str, Any]] = {
    "max_attempts": 3,
    "buffer_bytes": 256 * KiB,
    "total_buffer_bytes": 256 * MiB,
    "stall_timeout": 30.0,
    "max_lag": 120.0,
    "heartbeat_after": 10.0,
    "heartbeat_while_queued": False,
    "error_style": "event",
    "expose_worker": False,
    "merge_deltas": False,
    "first_token": 300.0,
    "between_events": 120.0,
    "event_bytes": 4 * MiB,
    "answer_bytes": 64 * MiB,
}


class Running:
    """One exchange, from its start to its end and afterwards."""

    def __init__(self, exchange: Exchange, client: RecordingClient) -> None:
        self.exchange = exchange
        self.client = client
        self.began = trio.current_time()
        self.scope = trio.CancelScope()  # cancelling it is cancelling from outside
        self.over = trio.Event()
        self.ending: Ending | None = None
        self.ended_after = 0.0
        self.placed = 0  # how often it said that it was
        self.unplaced = exchange.request.size

    def note_placed(self) -> None:
        """Give the body's bytes back, which count as unplaced until then."""
        self.placed += 1
        self.unplaced = 0


class Rig:
    """Everything around exchanges.

    Args:
        engine: plays all workers' engines.
        workers: who can be placed at; two, of four slots each, if not given.
        budget: pays for retries.
        limits: over `DEFAULTS`.

    Attributes:
        records, bugs: as they were reported.
        rates: of tenant t1; they do not refill, so that what was used can be seen.
        broken: equations that did not hold after some step.
        kept: bytes that clients' ports keep beside what exchanges hold.
    """

    def __init__(
        self,
        engine: FakeEngine,
        nursery: trio.Nursery,
        *,
        workers: WorkerSet | None = None,
        budget: RetryBudget | None = None,
        **limits: Any,
    ) -> None:
        unknown = limits.keys() - DEFAULTS.keys()
        assert not unknown, unknown
        limit = {**DEFAULTS, **limits}
        self.engine = engine
        if READ_TOGETHER:
            poller = FakePoller()
            loop = ReadLoop(poller)
            engine.read_together(loop, poller)
            nursery.start_soon(loop.run)
        self.workers = workers or WorkerSet(make_worker("w1"), make_worker("w2"))
        self.books = Books()
        self.live = LiveExchanges()
        self.pool = BufferPool(limit["total_buffer_bytes"])
        self.records: list[Record] = []
        self.rates = RateBook({"t1": RateLimits(10**6, 10**7)}, estimate=lambda request: EXPECTED)
        self.bugs: list[tuple[str, BaseException]] = []
        self.all: list[Running] = []
        self.broken: list[str] = []
        self.kept: Callable[[], int] = lambda: 0
        self._nursery = nursery
        self.parts = Parts(
            admission=self.workers.admission,
            attempts=AttemptParts(
                engine=engine,
                fleet=self.workers.fleet,
                pool=self.pool,
                limits=AttemptLimits(
                    limit["first_token"], limit["between_events"], limit["event_bytes"], limit["answer_bytes"]
                ),
                wall=lambda: WALL + trio.current_time(),
            ),
            books=self.books,
            budget=budget or RetryBudget(0.2),
            limits=ExchangeLimits(
                max_attempts=limit["max_attempts"],
                buffer_bytes=limit["buffer_bytes"],
                delivery=DeliveryLimits(limit["stall_timeout"], limit["max_lag"], limit["heartbeat_after"]),
                heartbeat_while_queued=limit["heartbeat_while_queued"],
                error_style=limit["error_style"],
                expose_worker=limit["expose_worker"],
                merge_deltas=limit["merge_deltas"],
            ),
            clocks=ExchangeClocks(),
            boot_id="boot",
            settled=self.records.append,
            bug=lambda where, exc: self.bugs.append((where, exc)),
            rates=self.rates,
        )
        nursery.start_soon(self.parts.clocks.run)

    # -- running

    def prepare(
        self, request: InternalRequest | None = None, client: RecordingClient | None = None
    ) -> Running:
        """Make an exchange without running it."""
        client = client or RecordingClient()
        running: Running
        exchange = Exchange(request or make_request(), client, self.parts, lambda: running.note_placed())
        running = Running(exchange, client)
        self.books.arrive()
        self.all.append(running)
        return running

    async def carry_out(self, running: Running) -> None:
        """Run an exchange as the door does."""
        try:
            with running.scope, self.live.holding(running.exchange):
                running.ending = await running.exchange.run()
        finally:
            running.unplaced = 0
            running.ended_after = trio.current_time() - running.began
            running.over.set()

    def start(self, request: InternalRequest | None = None, client: RecordingClient | None = None) -> Running:
        """Run an exchange in the background."""
        running = self.prepare(request, client)
        self._nursery.start_soon(self.carry_out, running)
        return running

    async def run(
        self, request: InternalRequest | None = None, client: RecordingClient | None = None
    ) -> Running:
        """Run an exchange to its end."""
        running = self.prepare(request, client)
        await self.carry_out(running)
        return running

    async def trickle(self, client: RecordingClient, bytes_per_second: float) -> None:
        """Let a client read at a pace for as long as the rig is open."""
        self._nursery.start_soon(client.trickle, bytes_per_second)
        await trio.lowlevel.checkpoint()

    # -- the account

    @property
    def record(self) -> Record:
        """The one record."""
        (record,) = self.records
        return record

    def equations(self) -> list[str]:
        """Name what does not hold right now."""
        counts = self.workers.admission.statistics()
        wrong = conservation_errors(
            self.books,
            granted=counts.granted,
            held=counts.held,
            draining=counts.draining,
            returned=counts.returned,
            buffered=self.pool.used,
            sum_of_exchanges=self.live.buffered + self.kept(),
        )
        if self.engine.reading > counts.held:
            wrong.append(f"{self.engine.reading} answers are read under {counts.held} leases")
        return wrong + self.workers.unbalanced()

    def left_over(self) -> list[str]:
        """Name what is still held; nothing, once nothing runs and nothing drains."""
        books = self.books
        figures = {
            "exchanges": len(self.live),
            "reading": books.reading,
            "waiting": books.waiting,
            "running": books.running,
            "buffered": self.pool.used,
            "waiting for the pool": self.pool.waiting,
            "answers being read": self.engine.reading,
            "unplaced": sum(running.unplaced for running in self.all),
            "exchanges without an end": sum(not running.over.is_set() for running in self.all),
            "records missing": books.accepted - len(self.records),
            "arrivals missing": books.arrived - sum(books.turned_away.values()) - len(self.records),
        }
        left = [f"{name}: {value}" for name, value in figures.items() if value]
        return left + self.workers.left_over() + self._wrongly_charged()

    def _wrongly_charged(self) -> list[str]:
        """Name the rates of which something else was used than the records say."""
        cost = {"requests": 0, "tokens": 0}
        for record in self.records:
            if record.tenant == "t1" and record.outcome != "refused":
                cost["requests"] += 1
                if record.worker is not None:
                    prompt = record.tokens_prompt
                    if prompt is None or record.prompt_source == "estimated":
                        prompt = EXPECTED[0]
                    cost["tokens"] += prompt + (record.tokens_generated or 0)
        used = {
            standing.kind: standing.limit - standing.remaining
            for standing in self.rates.standings("t1", None)
        }
        return [f"{kind} used: {used[kind]}, not {cost[kind]}" for kind in used if used[kind] != cost[kind]]

    async def wind_down(self) -> None:
        """Wait until nothing runs and nothing drains, which must come by itself."""
        await self.live.wait_none()
        await until(lambda: self.workers.admission.statistics().draining == 0)


class _Auditor(trio.abc.Instrument):
    """Checks the equations after every step of every task."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if not self._rig.broken:
            self._rig.broken = self._rig.equations()


@asynccontextmanager
async def rigged(*scripts: FakeScripting, bugs: int = 0, **options: Any) -> AsyncIterator[Rig]:
    """Open a `Rig` before engines that play these scripts; `bugs` are expected to be reported."""
    async with trio.open_nursery() as nursery:
        rig = Rig(FakeEngine(*scripts), nursery, **options)
        auditor = _Auditor(rig)
        trio.lowlevel.add_instrument(auditor)
        try:
            nursery.start_soon(rig.workers.run)  # noqa: ASYNC113 - it keeps time from its first step on
            yield rig
            await rig.wind_down()
        finally:
            trio.lowlevel.remove_instrument(auditor)
        nursery.cancel_scope.cancel()
    assert rig.broken == []
    assert rig.left_over() == []
    assert len(rig.bugs) == bugs, rig.bugs


# Small words ------------------------------------------------------------------------------------------------


def text_of(client: RecordingClient) -> str:
    """The text that a chat stream's whole events say."""
    chunks = [json.loads(event) for event in client.events if event.startswith(b"{")]
    choices = [choice for chunk in chunks for choice in chunk.get("choices", ())]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def error_of(client: RecordingClient) -> dict[str, Any]:
    """The error that ends a stream."""
    error = json.loads(client.events[-1]).get("error")
    assert isinstance(error, dict), client.events[-1]
    return error


def is_whole(client: RecordingClient) -> bool:
    """Whether a stream ended as good ones do."""
    return client.finished and client.events[-1:] == [b"[DONE]"]
