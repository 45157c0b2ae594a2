"""Exchanges in this process, over bytes that were recorded: no socket, no engine, only the gateway's work.

``python -m bench.replay REQUESTS TOKENS`` plays under callgrind: it calls `mark` between
parts, where callgrind dumps what it has counted.
"""

from __future__ import annotations

import gc
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import trio

from trio_gateway.contract import AnswerHead, InternalRequest, LeasePort
from trio_gateway.errors import Problem
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
from trio_gateway.flow import BufferPool
from trio_gateway.ledger import Books, Names, Record
from trio_gateway.telemetry import Exporter, ExporterSettings, Log
from trio_gateway.testing import WorkerSet, make_request, make_worker
from trio_gateway.units import KiB, MiB

# As an engine sends it: 252 bytes, as in `overhead`.
EVENT: Final = (
    b'data: {"id":"chatcmpl-0190aabbccddeeff0123456789abcdef-01","object":"chat.completion.chunk",'
    b'"created":1700000000,"model":"m1","choices":[{"index":0,"delta":{"content":" token"},'
    b'"logprobs":null,"finish_reason":null}],"system_fingerprint":"fp_0123456789abcdef"}\n\n'
)
LAST: Final = (
    b'data: {"id":"chatcmpl-0190aabbccddeeff0123456789abcdef-01","object":"chat.completion.chunk",'
    b'"created":1700000000,"model":"m1","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
    b"data: [DONE]\n\n"
)
SHORT: Final = 2  # tokens of an exchange that is all request
ORDER: Final = ("off", "on", "on", "off")


class Tape:
    """An answer as it was recorded, one read after the other. See EngineAnswer."""

    status = 200

    def __init__(self, reads: Sequence[bytes], lease: LeasePort) -> None:
        self._reads = iter(reads)
        self._lease = lease
        self.ended = False

    def header(self, name: bytes) -> bytes | None:
        return b"text/event-stream" if name == b"content-type" else None

    async def receive(self) -> bytes:
        await trio.lowlevel.checkpoint()  # every token of a paced stream is a wake-up
        data = next(self._reads, b"")
        if not data:
            self.ended = True
            self._lease.engine_done()
        return data

    async def pour(self, take: Callable[[bytes, float], bool], take_lines: object = None) -> bool:
        while data := await self.receive():
            if not take(data, trio.current_time()):
                return True
        return False

    def __enter__(self) -> Tape:
        return self

    def __exit__(self, *exc: object) -> None:
        return None


class Player:
    """Plays a tape for every attempt. See EnginePort."""

    def __init__(self) -> None:
        self.reads: Sequence[bytes] = ()

    async def open(
        self, request: InternalRequest, lease: LeasePort, attempt_id: str, nursery: trio.Nursery
    ) -> Tape:
        lease.engine_started(attempt_id)
        return Tape(self.reads, lease)


class Sink:
    """A client that takes everything at once. See ClientPort."""

    pending = 0

    def __init__(self) -> None:
        self.begun = self.ended = False
        self._bytes = self._events = 0

    @property
    def finished(self) -> bool:
        return self.ended

    def taken(self) -> int:
        return self._bytes

    def delivered(self) -> tuple[int, int]:
        return self._events, self._bytes

    def begin(self, head: AnswerHead) -> None:
        self.begun = True

    def push(
        self, piece: bytes, *, last: bool = False, joined: Sequence[tuple[int, int]] = (), events: int = 0
    ) -> None:
        self._bytes += len(piece)
        self._events += 1
        self.ended = last

    async def flush(self) -> None:
        await trio.lowlevel.checkpoint()

    def withdraw(self) -> None:
        """Nothing waits here."""

    def respond(self, problem: Problem, extra: dict[str, object] | None) -> None:
        raise AssertionError(problem)

    def error_event(self, problem: Problem, extra: dict[str, object], sequence: int) -> bytes:
        raise AssertionError(problem)

    def cut(self) -> None:
        raise AssertionError("the answer was whole")

    def on_leaving(self, told: Callable[[], None] | None) -> None:
        pass

    async def wait_gone(self) -> None:
        await trio.sleep_forever()


class Uncounted(Books):
    """Keeps the equations, and counts nothing for metrics."""

    __slots__ = ()

    def _measure(self, record: Record) -> None:
        return None


class Gateway(NamedTuple):
    """What exchanges are put together from, with the metrics on or off."""

    parts: Parts
    player: Player
    workers: WorkerSet


def _forget(record: Record) -> None:
    """Nobody keeps it."""


def _raise(where: str, bug: BaseException) -> None:
    raise bug


def make_gateway(*, metrics: bool, traces: bool = False) -> Gateway:
    """Put a gateway together, as an exchange sees it; without metrics nothing is recorded either."""
    books = Books() if metrics else Uncounted()
    times, player = books.times, Player()
    workers = WorkerSet(make_worker("w1", slots=64))
    if metrics:
        workers.admission.note_held = times.held.see
    exporter = _make_exporter(books.models) if traces else None
    parts = Parts(
        admission=workers.admission,
        attempts=AttemptParts(
            engine=player,
            fleet=workers.fleet,
            pool=BufferPool(256 * MiB),
            limits=AttemptLimits(300, 120, 4 * MiB, 64 * MiB),
            wall=time.time,
            gapped=times.gaps.see_all if metrics else None,
        ),
        books=books,
        budget=RetryBudget(0.2),
        limits=ExchangeLimits(
            3, 256 * KiB, DeliveryLimits(30, 120, 10), False, "event", False, recorded=metrics
        ),
        clocks=ExchangeClocks(),
        boot_id="boot",
        settled=_forget,
        bug=_raise,
        traced=None if exporter is None else exporter.ended,
    )
    return Gateway(parts, player, workers)


def _make_exporter(models: Names) -> Exporter:
    """Make one whose thread does not run: what it does is not the loop's."""
    settings = ExporterSettings("http://127.0.0.1:9", (), 1.0, 15, {}, "0")
    return Exporter(settings, lambda worker: None, models, Log(None))


async def play(gateway: Gateway, exchanges: int, tokens: int) -> None:
    """Carry out so many exchanges of so many tokens, one after the other."""
    gateway.player.reads = (EVENT,) * tokens + (LAST,)
    live = LiveExchanges()
    for _ in range(exchanges):
        gateway.parts.books.arrive()
        exchange = Exchange(make_request(), Sink(), gateway.parts, lambda: None)
        with live.holding(exchange):
            ending = await exchange.run()
        if ending.outcome != "completed":
            raise AssertionError(ending)


async def play_in(gateway: Gateway, exchanges: int, tokens: int) -> None:
    """Do that beside the tasks that a gateway has anyway."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(gateway.workers.run)
        nursery.start_soon(gateway.parts.clocks.run)
        await play(gateway, exchanges, tokens)
        nursery.cancel_scope.cancel()


def mark() -> None:
    """Call a function of the C library that nothing else here calls."""
    os.getpgid(0)


def parts_of(requests: int, tokens: int) -> list[tuple[str, str, int, int]]:
    """What is played between marks: unit, on or off, exchanges, and tokens of each."""
    names = (*ORDER, "traces")
    return [
        *(("request", name, requests, SHORT) for name in names),
        *(("token", name, 1, tokens + SHORT) for name in names),
        *(("one", name, 1, SHORT) for name in names),
    ]


def gateways() -> dict[str, Gateway]:
    return {
        "off": make_gateway(metrics=False),
        "on": make_gateway(metrics=True),
        "traces": make_gateway(metrics=True, traces=True),
    }


async def play_marked(requests: int, tokens: int) -> None:
    """Play everything once to warm up, then with marks around each part."""
    known = gateways()
    for gateway in known.values():
        await play_in(gateway, 3, 20)
    gc.collect()
    gc.freeze()
    gc.disable()  # when it comes is chance; what it costs is not the metrics'
    for _, name, exchanges, length in parts_of(requests, tokens):
        mark()
        await play_in(known[name], exchanges, length)
    mark()


async def least_us(
    runs: int, requests: int, tokens: int, say: Callable[[str], None]
) -> dict[tuple[str, str], float]:
    """Answer the least CPU of the runs, by unit and name, in us for each unit."""
    known = gateways()
    found: dict[tuple[str, str], float] = {}
    for run in range(runs):
        say(f"run {run + 1} of {runs}")
        for unit, name, exchanges, length in parts_of(requests, tokens):
            began = time.process_time()
            await play_in(known[name], exchanges, length)
            spent = time.process_time() - began
            found[unit, name] = min(found.get((unit, name), math.inf), spent * 1e6)
    return found


if __name__ == "__main__":
    trio.run(play_marked, int(sys.argv[1]), int(sys.argv[2]))
