"""What does a gateway do that is asked for ten times what its engines can do?

Question    Do the queues keep their bounds and the memory its size, are the engines as busy as
            without the flood, and what does a refusal cost? And do clients that obey
            `Retry-After` come back to a place, without coming back together?
Load        one engine of 32 slots, answers of 1 KB after 250 to 750 ms, so about 63 a second; a
            queue of 128. calm: 64 connections in a closed loop, 1,000 answers; their rate is the
            capacity, their CPU that of a buffered request. burst: 10 times the capacity in one
            second, then nobody but those who were refused, once each by the whole seconds of
            `Retry-After`, by `retry-after-ms`, and half by either. flood: 10 times the capacity in
            an open loop, for 60 s; who is refused does not come again. Then a burst once more, on
            a gateway that has just begun and can not have measured anything.
Engines     bench/native/engine.c.
Measures    ten times a second, the queue's depth and bytes as the gateway tells, and its resident
            memory. Goodput: whole answers a second, from the third second of the flood to its
            last. A refusal's CPU: that of the gateway in the flood, less that of its buffered
            requests by the price of the calm, over the refusals; what the watching costs is
            measured on the idle gateway before and taken off both. Memory: how much more it is
            in the last ten seconds (median) than from second 10 to 20. Returns: how often each
            client came, and the most that came again in any one second.
Baseline    the calm of the same run.
Expect      queue at most 128 and its bytes below admission.max_queued_bytes; memory at most 2 MiB
            more; goodput at least 95 % of the capacity; a refusal at most a quarter of a buffered
            request. Every client served within 2 attempts, and at most 1.5 times the capacity of
            returns in any one second.
Run         make bench SCENARIO=overload     (about 3 min on 2 cores; needs no nginx)
Output      bench/results/<date>-overload-<commit>.json, with machine facts, and
            overload-returns.svg: the returns in the second around each moment.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from .. import native, peers
from ..command import Options, main, progress
from ..plot import Chart, Line
from ..processes import BenchError, cpu_ns, rss_bytes, run_delay_ns
from ..report import RESULTS, Check, Report

MIB: Final = 1024 * 1024
SLOTS: Final = 32
QUEUE: Final = 128
QUEUE_BYTES: Final = 128 * MIB  # the default bound
ANSWER_US: Final = 500_000  # on average
CALM_CONNECTIONS: Final = 64  # twice the slots: none is ever idle
CALM_REQUESTS: Final = 1_000
OVER: Final = 10  # times capacity
FLOOD_S: Final = 60
RAMP_S: Final = 2  # of the flood, in which the queue fills
SETTLED_S: Final = 10  # of the flood, after which memory has to stay
WATCH_S: Final = 0.1
PATIENCE_S: Final = 30.0  # a machine that is busy with others is no reason to stop looking
CHEAP: Final = 0.25  # of a buffered request
FLAT: Final = 2 * MIB
GOODPUT: Final = 0.95
ATTEMPTS: Final = 2
PEAK: Final = 1.5  # times capacity

ARRIVALS: Final[dict[str, Any]] = {"delay_us": ANSWER_US, "vary": 1, "connections": 1024}
BURSTS: Final = {"whole seconds": 1, "milliseconds": 2, "both": 3}  # as the load client calls them
COLD: Final = "both, just begun"


@dataclass
class Watch:
    """What a gateway said of itself while it was watched.

    Attributes:
        samples: moment (`time.monotonic`), depth and bytes of the queue, resident bytes.
        broken: equations that did not hold.
    """

    samples: list[tuple[float, int, int, int]] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    def most(self, column: int) -> int:
        return int(max(sample[column] for sample in self.samples))

    def memory(self, began: float, ended: float) -> float:
        """Answer the median of the resident bytes between two moments."""
        return statistics.median(rss for at, _, _, rss in self.samples if began <= at <= ended)


@contextmanager
def watched(gateway: peers.Gateway) -> Iterator[Watch]:
    """Look at a gateway ten times a second while the block runs."""
    watch, over, pids = Watch(), threading.Event(), gateway.pids

    def look() -> None:
        due = time.monotonic()
        while not over.is_set():
            told = gateway.statistics(PATIENCE_S)
            queue = told["queue"]
            watch.samples.append((time.monotonic(), queue["depth"], queue["bytes"], rss_bytes(pids)))
            watch.broken.extend(told["conservation"]["errors"])
            due += WATCH_S
            over.wait(max(due - time.monotonic(), 0))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield watch
    finally:
        over.set()
        thread.join()


@dataclass(frozen=True)
class Calm:
    """The gateway at its capacity: answers a second, CPU ns of each, and of a second of watching.

    Attributes:
        robbed: share of the time in which it had no core although it could have run.
    """

    capacity: float
    request_ns: float
    watching_ns: float
    robbed: float


@dataclass(frozen=True)
class Burst:
    """What became of the clients of one burst.

    Attributes:
        attempts: clients by how often they came.
        returns: when they came again, in seconds after the first arrival.
        last: second in which the last one had its answer.
    """

    attempts: dict[int, int]
    returns: Sequence[float]
    last: float
    refused: int

    def most(self) -> int:
        return max(self.attempts)

    def peak(self) -> int:
        """Answer the most returns in any one second."""
        most, first = 0, 0
        for number, at in enumerate(self.returns):
            while self.returns[first] <= at - 1:
                first += 1
            most = max(most, number - first + 1)
        return most

    def around(self, capacity: float) -> list[tuple[float, float]]:
        """Answer, ten times a second, the returns of the second around it, in times capacity."""
        last = (self.returns[-1] if self.returns else 0.0) + 1
        return [
            (tenth / 10, sum(abs(at - tenth / 10) <= 0.5 for at in self.returns) / capacity)
            for tenth in range(round(last * 10))
        ]


def run(options: Options) -> Report:
    """Measure the gateway; see the module's docstring."""
    bursts: dict[str, Burst] = {}
    with peers.engine() as engine:
        with peers.gateway(engine.port, kind=options.kind, slots=SLOTS, queue=QUEUE) as gateway:
            calm = _calm(gateway, options)
            progress(f"capacity {calm.capacity:.1f}/s, {calm.request_ns / 1000:.0f} us a buffered request")
            for name, obey in BURSTS.items():
                bursts[name] = _burst(gateway, calm, obey)
                progress(f"burst, {name}: {bursts[name].attempts}, peak {bursts[name].peak()}")
            report = _flood(gateway, calm, options)
        with peers.gateway(engine.port, kind=options.kind, slots=SLOTS, queue=QUEUE) as gateway:
            bursts[COLD] = _burst(gateway, calm, BURSTS["both"])
            progress(f"burst, {COLD}: {bursts[COLD].attempts}, peak {bursts[COLD].peak()}")
    _judge_bursts(report, bursts, calm.capacity)
    _draw(report, bursts, calm.capacity)
    return report


def _calm(gateway: peers.Gateway, options: Options) -> Calm:
    requests, warm = options.some(CALM_REQUESTS), 2 * CALM_CONNECTIONS
    robbed, began = run_delay_ns(gateway.pids), time.monotonic_ns()
    answer = native.load(
        "buffered",
        gateway.port,
        gateway.pids,
        streams=CALM_CONNECTIONS,
        requests=requests,
        warm=warm,
        delay_us=ANSWER_US,
        vary=1,
    )
    if answer["good"] != requests + warm:
        raise BenchError(f"of {requests + warm} calm answers {answer['good']} were whole: {answer['broken']}")
    robbed = run_delay_ns(gateway.pids) - robbed
    before, idle_since = cpu_ns(gateway.pids), time.monotonic_ns()
    with watched(gateway):
        time.sleep(3)
    watching = (cpu_ns(gateway.pids) - before) / (time.monotonic_ns() - idle_since) * 1e9
    capacity = requests / answer["window_ns"] * 1e9
    return Calm(capacity, sum(answer["cpu_ns"]) / requests, watching, robbed / (idle_since - began))


def _burst(gateway: peers.Gateway, calm: Calm, obey: int) -> Burst:
    told = native.arrivals(
        gateway.port,
        requests=round(OVER * calm.capacity),
        rate_milli_s=OVER * calm.capacity * 1000,
        obey=obey,
        **ARRIVALS,
    )
    if told["broken"] or told["starved"] or told["gave_up"]:
        raise BenchError(
            f"burst: {told['broken']} broken, {told['starved']} late, {told['gave_up']} not served; "
            f"{told['reasons']}"
        )
    _wait_idle(gateway)
    attempts = {times: count for times, count in enumerate(told["attempts"]) if count}
    returns = [ms / 1000 for ms in told["returns_ms"]]
    return Burst(attempts, returns, told["wall_ns"] / 1e9, told["refused"])


def _flood(gateway: peers.Gateway, calm: Calm, options: Options) -> Report:
    seconds = options.some(FLOOD_S)
    robbed = run_delay_ns(gateway.pids)
    with watched(gateway) as watch:
        began = time.monotonic()
        told = native.arrivals(
            gateway.port,
            gateway.pids,
            requests=round(OVER * calm.capacity * seconds),
            rate_milli_s=OVER * calm.capacity * 1000,
            **ARRIVALS,
        )
    robbed = run_delay_ns(gateway.pids) - robbed
    if told["broken"] or told["starved"]:
        raise BenchError(
            f"flood: {told['broken']} broken, {told['starved']} times all connections were in use; "
            f"{told['reasons']}; the gateway had no core for {robbed / told['wall_ns']:.0%} of the time"
        )
    _wait_idle(gateway)
    goodput = statistics.mean(told["served_by_second"][min(RAMP_S, seconds - 1) : seconds])
    wall = told["wall_ns"] / 1e9
    watching = calm.watching_ns * wall
    refusal_ns = (sum(told["cpu_ns"]) - watching - told["served"] * calm.request_ns) / told["refused"]
    settled = min(SETTLED_S, seconds / 3)
    early = watch.memory(began + settled, began + 2 * settled)
    late = watch.memory(began + seconds - settled, began + seconds)
    report = Report("overload", ("flood", "measured"))
    report.rows += [
        ("capacity, answers a second", f"{calm.capacity:.1f}"),
        ("goodput in the flood", f"{goodput:.1f}"),
        ("asked for", f"{OVER * calm.capacity:.0f} a second for {seconds} s"),
        ("refused", str(told["refused"])),
        ("most that waited", str(watch.most(1))),
        ("most bytes that waited", str(watch.most(2))),
        ("resident memory, MiB, early and late", f"{early / MIB:.1f} {late / MIB:.1f}"),
        ("CPU of a buffered request, us", f"{calm.request_ns / 1000:.0f}"),
        ("CPU of a refusal, us", f"{refusal_ns / 1000:.0f}"),
        ("longest time of a refusal, ms", f"{told['longest_refusal_ns'] / 1e6:.0f}"),
    ]
    report.checks += [
        Check.at_most("most that waited", watch.most(1), QUEUE, "requests"),
        Check.at_most("most bytes that waited", watch.most(2), QUEUE_BYTES, "bytes"),
        Check.exactly("equations that did not hold", len(watch.broken), 0, ""),
        Check.at_most("memory, late less early", (late - early) / MIB, FLAT / MIB, "MiB"),
        Check.at_least("goodput, by capacity", goodput / calm.capacity, GOODPUT, "x"),
        Check.at_most("a refusal, by a buffered request", refusal_ns / calm.request_ns, CHEAP, "x"),
    ]
    report.notes.append(
        f"in the flood, of one core: gateway {sum(told['cpu_ns']) / told['wall_ns']:.0%}, of it the watching "
        f"{calm.watching_ns / 1e9:.0%}; client {told['own_cpu_ns'] / told['wall_ns']:.0%}"
    )
    report.notes.append(
        f"without a core because the machine was busy, the gateway was {robbed / told['wall_ns']:.1%} of the "
        f"flood, {calm.robbed:.1%} of the calm; if these differ much, what the flood shows is the machine's"
    )
    report.raw = {"calm": vars(calm), "flood": told, "samples": watch.samples}
    return report


def _wait_idle(gateway: peers.Gateway) -> None:
    if not gateway.wait_idle():
        raise BenchError("the gateway still held something 15 s after its last answer")


def _judge_bursts(report: Report, bursts: dict[str, Burst], capacity: float) -> None:
    for name, burst in bursts.items():
        times = ", ".join(f"{count} came {often} times" for often, count in burst.attempts.items())
        report.rows.append(
            (f"burst, {name}", f"{times}; peak {burst.peak()} in 1 s; all served after {burst.last:.1f} s")
        )
        report.checks += [
            Check.at_most(f"burst, {name}: attempts", burst.most(), ATTEMPTS, ""),
            Check.at_most(f"burst, {name}: returns in 1 s", burst.peak() / capacity, PEAK, "x capacity"),
        ]
        report.raw[f"burst, {name}"] = vars(burst)


def _draw(report: Report, bursts: dict[str, Burst], capacity: float) -> None:
    lines = [Line(name, burst.around(capacity)) for name, burst in bursts.items()]
    title = f"Returns after a burst of {OVER} times capacity in 1 s"
    chart = Chart(
        title, "seconds after the burst began", "returns in 1 s / capacity", lines, PEAK, linear=True
    )
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / "overload-returns.svg"
    path.write_text(chart.svg())
    report.notes.append(f"plotted in {path.name}")


if __name__ == "__main__":
    sys.exit(main("overload"))
