"""Do slow and stalled clients cost what is promised, and does anyone else notice them?

Question    When 300 clients read at 8 KB/s and 700 do not read at all, do the slow ones get
            every byte, are the others ended in time and their slots free again, does the
            memory stay within its bound, and do fast clients beside them keep their pace?
Load        Within 20 s, 700 clients ask for 20 MB and do not read: half over SSE, a quarter over
            WebSockets, a quarter over WebSockets whose credit of 16 they use up and never
            renew. Within the same time 300 ask for 300 KB and read 8 KB/s: half over SSE, a
            quarter over WebSockets, a quarter with a credit of 16 that they renew. Beside them,
            from the first of them until all that stall have ended, 100 fast ones at 20 ms a
            token, half over WebSockets; the same 100 alone, for 20 s; 5 runs interleaved
            A B B A.
Engines     bench/native/engine.c, which sends to slow clients as fast as it can, events of 1,000
            bytes in batches of 4.
Measures    bytes: each event is compared with what the engine writes.
            stall: from when the client's kernel got its last byte (TCP_INFO), or the client its
            last delta, until the engine's connection was closed.
            slots: from when the last of them was cut until the gateway holds no more leases than
            the engine has requests.
            gap: 99th percentile over all gaps of the fast ones, per run; median of the runs.
            memory: the greatest of readings every 3 s: PSS of the gateway and kernel memory
            of its own sockets, less the same before the first run.
Baseline    the fast ones without slow ones.
Expect      300 answers equal to the byte; 700 ended as client_stalled at most 1 s after
            delivery.stall_timeout, their slots free 1 s later (cancel_grace is 0.5 s of that);
            gap less than 20 % above the baseline; memory within delivery.total_buffer_bytes
            and 128 KiB for each of 1,100 clients.
Run         make bench SCENARIO=slow_consumers     (about 8 min on 2 cores)
Output      bench/results/<date>-slow_consumers-<commit>.json, with machine facts.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Self

from .. import native, peers
from ..command import Options, main, progress
from ..processes import BenchError, cpu_ns, pss_bytes, run_delay_ns, socket_memory
from ..report import Check, Report, quantile, spread

KIB: Final = 1024
MIB: Final = 1024 * KIB
SLOW: Final = 300
STALLED: Final = 700
FAST: Final = 100
RATE: Final = 8 * KIB
RAMP_S: Final = 20.0
EVENT: Final = 1000  # bytes
SLOW_EVENTS: Final = 300
STALLED_EVENTS: Final = 20_000
CREDIT: Final = 16
PACE_US: Final = 20_000
FAST_TOKENS: Final = 2600  # 52 s: all that stall have ended by then
FAST_TOKENS_ALONE: Final = 1000
STALL_TIMEOUT: Final = 30.0  # the default
TOTAL_BUFFER: Final = 64 * MIB
EACH: Final = 128 * KIB
GAP_LIMIT: Final = 1.20
SLACK_S: Final = 1.0
READ_EVERY_S: Final = 3.0  # a reading costs 0.1 s of a core
SLOTS_WITHIN_S: Final = 1.0
CONFIG: Final = f"""
[delivery]
stall_timeout = {STALL_TIMEOUT}
total_buffer_bytes = {TOTAL_BUFFER}
"""


@dataclass
class Found:
    """What the runs have shown; durations in seconds, gaps in ms, memory in bytes."""

    alone_ms: list[float] = field(default_factory=list)
    beside_ms: list[float] = field(default_factory=list)
    whole: list[int] = field(default_factory=list)
    stalls: list[dict[str, list[float]]] = field(default_factory=list)
    odd: list[str] = field(default_factory=list)
    cores: dict[str, list[float]] = field(default_factory=lambda: {"alone": [], "beside": []})
    delay: dict[str, list[float]] = field(default_factory=lambda: {"alone": [], "beside": []})
    slots_free: list[float] = field(default_factory=list)
    slow_s: list[float] = field(default_factory=list)
    memory: list[dict[str, int]] = field(default_factory=list)

    def stall_times(self) -> list[float]:
        """Of all clients and runs."""
        return [each for run in self.stalls for times in run.values() for each in times]


class MemoryWatch:
    """Reads the memory of a gateway every few seconds, in a thread, while the block runs.

    Attributes:
        most: the reading with the greatest total, in bytes: ``pss``, ``kernel``, ``buffered``, ``sockets``.
    """

    def __init__(self, gateway: peers.Gateway) -> None:
        self._gateway = gateway
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.most = {"total": 0}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(READ_EVERY_S):
            now = memory_of(self._gateway)
            if now["total"] > self.most["total"]:
                self.most = now


def memory_of(gateway: peers.Gateway) -> dict[str, int]:
    """Read once what a gateway holds, in bytes, and its own count of what waits for clients."""
    pids = gateway.pids
    pss, kernel = pss_bytes(pids), socket_memory(pids)
    return {
        "total": pss + kernel["total"],
        "pss": pss,
        "kernel": kernel["total"],
        "sockets": kernel["sockets"],
        "buffered": gateway.statistics()["buffered_bytes"],
    }


def run(options: Options) -> Report:
    """Let clients read slowly, stall and read fast; see the module's docstring."""
    found = Found()
    with ExitStack() as stack:
        engine = stack.enter_context(peers.engine())
        gateway = stack.enter_context(
            peers.gateway(engine.port, kind=options.kind, slots=2 * (SLOW + STALLED + FAST), extra=CONFIG)
        )
        _read_fast(gateway, 50)  # what is imported or allocated once is no client's cost
        before = memory_of(gateway)
        for turn in range(options.runs):
            steps = (_alone, _beside) if turn % 2 == 0 else (_beside, _alone)
            for step in steps:
                step(gateway, engine, found, options)
            gaps = f"{found.alone_ms[-1]:.1f} ms alone, {found.beside_ms[-1]:.1f} ms beside"
            progress(f"run {turn + 1}: gap p99 {gaps}")
    return _report(found, before, options)


def _read_fast(gateway: peers.Gateway, tokens: int) -> float:
    """Let the fast ones read; answer the 99th percentile of their gaps in ms."""
    answer = native.load("stream", gateway.port, streams=FAST, tokens=tokens, pace_us=PACE_US, exact=1, ws=2)
    if answer["good"] != FAST:
        raise BenchError(f"a fast client's answer was not whole: {answer['broken']}")
    p99: int = answer["gap_ns"]["p99"]
    return p99 / 1e6


def _read_measured(gateway: peers.Gateway, tokens: int, found: Found, when: str) -> float:
    """Let the fast ones read, and note what share of a core the gateway used, and waited for, meanwhile."""
    began, spent, waited = time.monotonic(), cpu_ns(gateway.pids), run_delay_ns(gateway.pids)
    gap = _read_fast(gateway, tokens)
    took = (time.monotonic() - began) * 1e9
    found.cores[when].append((cpu_ns(gateway.pids) - spent) / took)
    found.delay[when].append((run_delay_ns(gateway.pids) - waited) / took)
    return gap


def _alone(gateway: peers.Gateway, engine: peers.Engine, found: Found, options: Options) -> None:
    with MemoryWatch(gateway):  # disturbs here as it does there
        found.alone_ms.append(_read_measured(gateway, FAST_TOKENS_ALONE, found, "alone"))


def _beside(gateway: peers.Gateway, engine: peers.Engine, found: Found, options: Options) -> None:
    slow, stalled = options.some(SLOW), options.some(STALLED)
    shape: dict[str, Any] = {"bytes": EVENT, "batch": 4, "exact": 1, "ws": 2, "credit": CREDIT}
    engine.reset()
    began = time.monotonic()
    with MemoryWatch(gateway) as watch, ExitStack() as stack:
        stallers = stack.enter_context(
            native.loading(
                "stall",
                gateway.port,
                streams=stalled,
                tokens=STALLED_EVENTS,
                id_base=SLOW,
                ramp_us=RAMP_S * 1e6 / stalled,
                **shape,
            )
        )
        readers = stack.enter_context(
            native.loading(
                "stream",
                gateway.port,
                streams=slow,
                tokens=SLOW_EVENTS,
                rate=RATE,
                ramp_us=RAMP_S * 1e6 / slow,
                **shape,
            )
        )
        found.beside_ms.append(_read_measured(gateway, FAST_TOKENS, found, "beside"))
        ends = native.result_of(stallers)["ends"]
        found.slots_free.append(_wait_slots(gateway, engine))
        answers = native.result_of(readers)
        found.slow_s.append(time.monotonic() - began)
    found.whole.append(answers["good"])
    found.odd += [f"slow reader: {what}" for what in answers["broken"]]
    found.memory.append(watch.most)
    _note_ends(engine, ends, found)
    if not gateway.wait_idle():
        raise BenchError(f"the gateway did not come to rest: {gateway.statistics()}")


def _wait_slots(gateway: peers.Gateway, engine: peers.Engine) -> float:
    """Answer the seconds until there are no more leases than requests at the engine."""
    began = time.monotonic()

    def free() -> bool:
        leases = gateway.statistics()["leases"]
        active: int = engine.stats()["active"]
        return int(leases["held"] + leases["draining"]) <= active

    if not peers.eventually(free, 10, 0.1):
        raise BenchError("slots of stalled clients are still held after 10 s")
    return time.monotonic() - began


def _note_ends(engine: peers.Engine, ends: list[list[Any]], found: Found) -> None:
    """Note how long each stalled client was waited for, as the engine saw it."""
    closed = {number: at for number, at, _, _ in engine.stats(aborts=True)["aborts"]}
    times: dict[str, list[float]] = {}
    for number, last_ns, _, kind, result in ends:
        if number not in closed:
            found.odd.append(f"stalled over {kind}: the engine was not left ({result})")
            continue
        times.setdefault(kind, []).append((closed[number] - last_ns) / 1e9)
        if result != ("client_stalled" if kind == "credit" else "cut"):
            found.odd.append(f"stalled over {kind}: {result}")
    found.stalls.append(times)


def _report(found: Found, before: dict[str, int], options: Options) -> Report:
    report = Report("slow_consumers", ("gateway", "median (least-greatest)"))
    clients = options.some(SLOW) + options.some(STALLED) + FAST
    alone, beside = statistics.median(found.alone_ms), statistics.median(found.beside_ms)
    times = found.stall_times()
    grown = [each["total"] - before["total"] for each in found.memory]
    report.rows += [
        ("fast clients' gap p99 without slow ones, ms", spread(found.alone_ms, 2)),
        ("fast clients' gap p99 beside them, ms", spread(found.beside_ms, 2)),
        ("stalled, until the engine was left, s", spread(times, 2)),
        *(
            (f"  {kind}", spread((each for run in found.stalls for each in run.get(kind, ())), 2))
            for kind in ("sse", "ws", "credit")
        ),
        ("until their slots were free, s", spread(found.slots_free, 2)),
        ("slow readers, until the last had all, s", spread(found.slow_s)),
        ("memory, MiB", spread(each / MIB for each in grown)),
        ("  of it PSS", spread((each["pss"] - before["pss"]) / MIB for each in found.memory)),
        (
            "  of it kernel, own sockets",
            spread((each["kernel"] - before["kernel"]) / MIB for each in found.memory),
        ),
        ("  waiting for clients, by its own count", spread(each["buffered"] / MIB for each in found.memory)),
    ]
    report.checks += [
        Check.exactly(
            "slow readers that got every byte", sum(found.whole), options.some(SLOW) * options.runs, ""
        ),
        Check.exactly(
            "stalled clients that were ended", len(times), options.some(STALLED) * options.runs, ""
        ),
        Check.exactly("ended in another way", len(found.odd), 0, "clients"),
        Check.at_most("stalled, greatest", max(times, default=0.0), STALL_TIMEOUT + SLACK_S, "s"),
        Check.at_least("stalled, least", min(times, default=0.0), STALL_TIMEOUT - 0.05, "s"),
        Check.at_most("slots free after the last of them", max(found.slots_free), SLOTS_WITHIN_S, "s"),
        Check.at_most("gap p99 beside them", beside / alone, GAP_LIMIT, "x without"),
        Check.at_most("memory, greatest", max(grown) / MIB, (TOTAL_BUFFER + clients * EACH) / MIB, "MiB"),
    ]
    report.notes += sorted(set(found.odd))[:20]
    for when in ("alone", "beside"):
        used, waited = spread(found.cores[when], 2), spread(found.delay[when], 2)
        report.notes.append(f"{when}: the gateway used {used} cores, and waited for one {waited} of the time")
    report.notes.append(f"stalled, 99th percentile: {quantile(times, 0.99):.2f} s")
    report.raw = vars(found) | {"before": before}
    return report


if __name__ == "__main__":
    sys.exit(main("slow_consumers"))
