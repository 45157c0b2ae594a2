"""Does a token, or a request, become dearer with more streams, more workers, or more who wait?

Question    How does the gateway's CPU per token and per buffered request grow from 64 to 4,000
            concurrent streams, from 1 to 256 workers, and from 10 to 10,000 requests that wait?
Load        streams: 64, 256, 1,000 and 4,000 streams, slower the more there are, so that all have
            8,000 tokens/s in sum; a window of 4 s after each had its first token. requests: as many
            kept connections, with answers of 1 KB after so long that 800 are answered each second.
            workers: 1, 16 and 256, all of them the one engine, with 256 streams and connections.
            waiters: 10, 100, 1,000 and 10,000 requests that wait for 64 slots, each of which answers
            after 160 ms; every answered client asks again.
Engines     bench/native/engine.c.
Gateway     in the full setup (bench/setups.py), a fresh one for each number of workers and waiters;
            one for all numbers of streams.
Measures    user + system CPU of the gateway's process tree in the window, divided by the tokens or
            requests of the window; what probes and the clock cost by the second is in it. Runs of all
            numbers are interleaved.
Baseline    the smallest number of the same run.
Expect      less than 1.5 times it for tokens and requests, from 64 to 4,000 streams and from 1 to
            256 workers; every answer whole. Waiters have no limit here; what they cost is told.
Before      8,500 descriptors for a process, and 21,000 for 10,000 that wait (a connection is counted with
            one to an engine); with fewer, as many wait as can.
Run         make bench SCENARIO=scale     (about 30 min on 2 cores)
Output      bench/results/<date>-scale-<commit>.json, with machine facts.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

from .. import native, peers, setups
from ..command import Options, main, progress
from ..processes import BenchError, need_descriptors
from ..report import Check, Report, with_quartiles

STREAMS: Final = (64, 256, 1_000, 4_000)
WORKERS: Final = (1, 16, 256)
WAITERS: Final = (10, 100, 1_000, 10_000)
EXPECTED: Final = {"streams": STREAMS, "workers": WORKERS}  # what may not grow much
TOKENS_A_SECOND: Final = 8_000
REQUESTS_A_SECOND: Final = 800
WAITED_FOR_A_SECOND: Final = 400
BESIDE: Final = 256  # streams, or connections, where the workers are counted
SLOTS: Final = 64  # that are waited for
MAX_WAIT: Final = 300  # seconds: who waits with 4,000 others for 40 answers a second shall not be refused
LIMIT: Final = 1.5  # times the smallest number
DESCRIPTORS: Final = 8_500  # of the gateway, for 4,000 streams
ALL_DESCRIPTORS: Final = 21_000  # for 10,000 that wait
SPARE: Final = 128
ROOM: Final = 16_384

Costs = dict[tuple[str, str], dict[int, list[float]]]  # by what grows and what is paid for; by number


def run(options: Options) -> Report:
    """Measure all numbers; see the module's docstring."""
    need_descriptors(DESCRIPTORS, ALL_DESCRIPTORS)
    parts: dict[str, Callable[[peers.Engine, Options, Costs], None]] = {
        "streams": _streams,
        "workers": _workers,
        "waiters": _waiters,
    }
    costs: Costs = {}
    failed: list[str] = []
    with peers.engine() as engine:
        for turn in range(options.runs):
            for name in options.chosen(parts):
                progress(f"run {turn + 1}: {name}")
                try:
                    parts[name](engine, options, costs)
                except BenchError as error:
                    failed.append(f"run {turn + 1}, {name}: {error}")
                    progress(failed[-1])
    return _report(costs, failed)


def _streams(engine: peers.Engine, options: Options, costs: Costs) -> None:
    with setups.start("full", engine.port, slots=ROOM, connections=ROOM) as gateway:
        for number in STREAMS:
            _note(costs, "streams", "token", number, tokens(gateway, engine, number, options))
            _note(costs, "streams", "request", number, requests(gateway, engine, number, options))


def _workers(engine: peers.Engine, options: Options, costs: Costs) -> None:
    for number in WORKERS:
        with setups.start("full", engine.port, workers=number) as gateway:
            _note(costs, "workers", "token", number, tokens(gateway, engine, BESIDE, options))
            _note(costs, "workers", "request", number, requests(gateway, engine, BESIDE, options))


def _waiters(engine: peers.Engine, options: Options, costs: Costs) -> None:
    most = (need_descriptors(DESCRIPTORS) - SPARE) // 2 - SLOTS
    for number in (min(number, most) for number in WAITERS):
        with setups.start(
            "full", engine.port, slots=SLOTS, queue=ROOM, connections=ROOM, max_wait=MAX_WAIT
        ) as gateway:
            cost = requests(gateway, engine, SLOTS + number, options, slots=SLOTS)
            _note(costs, "waiters", "request", number, cost)


def _note(costs: Costs, grows: str, unit: str, number: int, cost: float) -> None:
    costs.setdefault((grows, unit), {}).setdefault(number, []).append(cost)
    progress(f"   {number:,} {grows}: {cost:.1f} us a {unit}")


def tokens(gateway: peers.Gateway, engine: peers.Engine, streams: int, options: Options) -> float:
    """Answer the CPU of a token, in us, with so many streams."""
    pace_us = streams * 1_000_000 // TOKENS_A_SECOND
    ramp_us, warm_ms, window_ms = 2_000, 500, options.some(4_000)
    lasts_us = streams * ramp_us * 2 + (warm_ms + window_ms) * 1000 + 1_000_000
    answer = native.load(
        "stream",
        gateway.port,
        [*engine.pids, *gateway.pids],
        streams=streams,
        tokens=lasts_us // pace_us + 4,
        pace_us=pace_us,
        ramp_us=ramp_us,
        warm_ms=warm_ms,
        window_ms=window_ms,
        measured=0,
        **gateway.load,
    )
    _whole(answer, streams)
    if answer["window_ns"] <= 0:
        raise BenchError(f"{streams:,} streams were opened too slowly for the window")
    return _cost(answer, answer["tokens"])


def requests(
    gateway: peers.Gateway, engine: peers.Engine, connections: int, options: Options, *, slots: int = 0
) -> float:
    """Answer the CPU of a buffered request, in us, with so many connections, and perhaps few slots."""
    count = options.some(4_000)
    warm = connections + options.some(1_000)
    rate = WAITED_FOR_A_SECOND if slots else REQUESTS_A_SECOND
    answer = native.load(
        "buffered",
        gateway.port,
        [*engine.pids, *gateway.pids],
        streams=connections,
        warm=warm,
        requests=count,
        tail=connections,
        delay_us=(slots or connections) * 1_000_000 // rate,
        vary=1,
        ramp_us=3_000 if slots else 1_000,
        **gateway.load,
    )
    _whole(answer, warm + count)
    if not gateway.wait_idle(30):
        raise BenchError("the gateway did not come to rest")
    return _cost(answer, count)


def _whole(answer: Mapping[str, Any], asked: int) -> None:
    """Expect every answer to be whole; a few more may have come in the window's last moment."""
    if answer["good"] < asked or answer["broken"]:
        raise BenchError(f"of {asked} answers {answer['good']} were whole: {answer['broken']}")


def _cost(answer: Mapping[str, Any], units: int) -> float:
    spent: int = sum(answer["cpu_ns"][1:])
    return spent / units / 1000


def _report(costs: Costs, failed: list[str]) -> Report:
    report = Report("scale", ("CPU of the gateway", "number", "us", "times the smallest"))
    for (grows, unit), found in costs.items():
        middle = {number: statistics.median(told) for number, told in found.items()}
        least = middle[min(middle)]
        for number, told in found.items():
            cells = (f"{number:,}", with_quartiles(told), f"{middle[number] / least:.2f}")
            report.rows.append((f"a {unit}, by {grows}", *cells))
        if grows in EXPECTED:
            first, *_, last = EXPECTED[grows]
            ratio = max(middle.values()) / least if {first, last} <= set(middle) else math.inf
            what = f"a {unit}, from {first:,} to {last:,} {grows}"
            report.checks.append(Check.at_most(what, ratio, LIMIT, "x"))
    report.checks.append(Check.exactly("parts that could not be measured", len(failed), 0, ""))
    report.notes += failed
    report.raw = {f"{unit} by {grows}": found for (grows, unit), found in costs.items()}
    return report


if __name__ == "__main__":
    sys.exit(main("scale"))
