"""After thousands of clients left at random moments, is anything still held?

Question    Does any way out of any phase leave a slot, a place in the queue, a
            descriptor or a running answer behind?
Load        2,100 clients in each phase, 8 to 16 at a time, half by FIN and half by
            reset: *queued* (every slot is held by others), *before* the first token,
            *streaming* (5 ms a token, within the first six tokens), *buffered*. The
            moment is random from the instant the request was written, so that some
            leave while the gateway still reads or places them. Seeds are fixed.
Engines     bench/native/engine.c.
Measures    when it is over: statistics of the gateway, its open descriptors, the
            engine's answers in progress. What each phase's clients had reached, as
            the engine saw it.
Baseline    the same figures before the first client came, at rest.
Expect      conservation holds; nothing waits, runs, is held or drains; as many leases
            returned as granted; as many descriptors as before; nothing active at the
            engine; and of the queued, none reached the engine.
Run         make bench SCENARIO=leaves     (about 1 min on 2 cores)
Output      bench/results/<date>-leaves-<commit>.json, with machine facts.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from typing import Any, Final

from .. import native, peers
from ..command import Options, main, progress
from ..processes import BenchError, descriptors, pss_bytes
from ..report import Check, Report

TRIES: Final = 2100
SLOTS_HELD: Final = 4
PLACED_PHASES: Final = ("before", "streaming", "buffered")
REST_PATIENCE_S: Final = 20.0  # idle upstream connections and drains end on their own


def run(options: Options) -> Report:
    """Let clients leave, then look for what stayed; see the module's docstring."""
    report = Report("leaves", ("phase", "left", "otherwise", "as the engine saw them"))
    tries = options.some(TRIES)
    with peers.engine() as engine:
        if options.peers_only:
            with peers.nginx(engine.port) as proxy:
                for phase in PLACED_PHASES:
                    _leave(report, proxy, engine, phase, tries)
            return report
        with peers.gateway(engine.port, kind=options.kind) as gateway:
            resting = _Rest(gateway)
            for phase in PLACED_PHASES:
                _leave(report, gateway, engine, phase, tries)
            resting.judge(report, engine, "placed")
        with peers.gateway(engine.port, kind=options.kind, slots=SLOTS_HELD) as gateway:
            resting = _Rest(gateway)
            _leave_queue(report, gateway, engine, tries)
            resting.judge(report, engine, "queued")
    return report


class _Rest:
    """What a gateway holds at rest, to be compared with what it holds afterwards."""

    def __init__(self, gateway: peers.Gateway) -> None:
        self._gateway = gateway
        answer = native.load("buffered", gateway.port, streams=2, requests=20)
        if answer["good"] != 20:
            raise BenchError(f"the gateway does not answer: {answer['broken']}")
        time.sleep(4)  # idle upstream connections expire after 3 s
        self._descriptors = descriptors(gateway.pids)
        self._pss = pss_bytes(gateway.pids)

    def judge(self, report: Report, engine: peers.Engine, label: str) -> None:
        gateway = self._gateway
        engine.wait_idle(REST_PATIENCE_S)
        gateway.wait_idle(REST_PATIENCE_S)
        peers.eventually(lambda: descriptors(gateway.pids) <= self._descriptors, REST_PATIENCE_S, 0.1)
        open_now = descriptors(gateway.pids)
        statistics = gateway.statistics()
        leases, queue = statistics["leases"], statistics["queue"]
        zeros = {
            "waiting": statistics["waiting"],
            "running": statistics["running"],
            "queue depth": queue["depth"],
            "queue bytes": queue["bytes"],
            "leases held": leases["held"],
            "leases draining": leases["draining"],
            "leases granted but not returned": leases["granted"] - leases["returned"],
            "active at the engine": engine.stats()["active"],
        }
        report.checks += [Check.exactly(f"{label}: {what}", value, 0, "") for what, value in zeros.items()]
        report.checks += [
            Check.exactly(f"{label}: conservation holds", int(statistics["conservation"]["ok"]), 1, ""),
            Check.exactly(f"{label}: open descriptors", open_now, self._descriptors, ""),
        ]
        grown = (pss_bytes(gateway.pids) - self._pss) / 1024
        report.notes.append(f"{label}: PSS grew by {grown:.0f} KiB")
        report.raw[f"{label} statistics"] = statistics


def _leave(report: Report, proxy: peers.Server, engine: peers.Engine, phase: str, tries: int) -> None:
    streaming = phase == "streaming"
    engine.reset()
    answer = native.load(
        "leave",
        proxy.port,
        phase=phase,
        how="mix",
        tries=tries,
        streams=8,
        tokens=100_000,
        pace_us=5000,
        delay_us=0 if streaming else 30_000_000,
        min_us=0,
        max_us=5000 if streaming else 60_000,
        max_tokens=5,
        seed=7,
    )
    engine.wait_idle(REST_PATIENCE_S)
    _record(report, phase, answer, engine.stats(aborts=True))


def _record(report: Report, phase: str, answer: dict[str, Any], stats: dict[str, Any]) -> None:
    results = Counter(result for *_, result in answer["tries"])
    left = results.pop("left", 0)
    seen = Counter(record[2] for record in stats["aborts"])
    seen["not at all"] = left - sum(seen.values())
    report.rows.append((phase, str(left), str(dict(results) or "-"), _words(seen)))
    report.raw[phase] = {
        "left": left,
        "otherwise": dict(results),
        "seen": dict(seen),
        "engine_seen": stats["seen"],
    }
    report.checks.append(Check.exactly(f"{phase}: ended otherwise", sum(results.values()), 0, "clients"))
    progress(f"{phase}: {left} left")


def _words(counts: Counter[str]) -> str:
    return ", ".join(f"{what} {count}" for what, count in counts.items() if count)


def _leave_queue(report: Report, gateway: peers.Gateway, engine: peers.Engine, tries: int) -> None:
    engine.reset()
    with native.holding(gateway.port, streams=SLOTS_HELD, tokens=100_000, pace_us=200_000) as holder:
        if not peers.eventually(lambda: engine.stats()["active"] == SLOTS_HELD, 10):
            raise BenchError("the clients that hold the slots were not served")
        answer = native.load(
            "leave",
            gateway.port,
            phase="queued",
            how="mix",
            tries=tries,
            streams=16,
            min_us=0,
            max_us=60_000,
            seed=8,
        )
        stats = engine.stats(aborts=True)
        if native.release(holder)["good"] != SLOTS_HELD:
            raise BenchError("a client that held a slot was cut")
    _record(report, "queued", answer, stats)
    report.checks.append(
        Check.exactly("queued: reached the engine", stats["seen"] - SLOTS_HELD, 0, "clients")
    )


if __name__ == "__main__":
    sys.exit(main("leaves"))
