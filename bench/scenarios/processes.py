"""What do two processes cost and bring, beside one?

Question    How much more CPU do a token and a request take in two processes, with slots that are
            shared and with slots that are split, and how much more do two move?
Load        paced: 200 streams for each process, one event each 20 ms, a window of 6 s: each process
            has the same load as the one. same load: 200 streams in all, however many processes, so
            that a wake-up of each could find fewer tokens. buffered: 64 kept connections for each
            process, answers of 1 KB after 10 to 30 ms, slots for all of them. waiting: 64 in all and
            16 slots, so that requests wait and slots go from process to process. rush: 64 connections,
            answers without delay: as many as can be served.
Engines     bench/native/engine.c, one for all; engine and client run beside the gateways, alike for each.
Measures    user + system CPU of all of the gateway's processes, the supervisor included, for each token
            or answer that the client read in the window; answers a second in the rush, where all share
            the machine's processors with engine and client. Slots as operators see them, and whether
            the accounts are right afterwards. (That an engine with as many slots never has to refuse is
            a test, tests/e2e/test_processes.py.)
Baseline    one process, in the same run; runs are interleaved, every second one turned round. Beside it
            nginx with one and with two processes under the paced loads: what a token costs more where all
            processors are busy is the machine's, whoever forwards it.
Expect      a token in two processes: at most 1.1 times one, with the same load for each and with the
            same load in all. A request: at most 1.1 times with
            "split", 1.4 times with "shared". Slots as in one. The rush is reported only.
Run         make bench SCENARIO=processes     (7 min on 2 cores)
Output      bench/results/<date>-processes-<commit>.json, with machine facts.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Final

from .. import native, peers
from ..command import Options, main, progress
from ..processes import BenchError, cpu_ns
from ..report import Check, Report, with_quartiles

STREAMS: Final = 200
CONNECTIONS: Final = 64
FEW_SLOTS: Final = 16
PACE_US: Final = 20_000
PREFIX: Final = "TRIO_GATEWAY__SERVER__"
SETUPS: Final[dict[str, dict[str, str]]] = {
    "one": {},
    "two, split": {"PROCESSES": "2", "CAPACITY": "split"},
    "two, shared": {"PROCESSES": "2", "CAPACITY": "shared"},
}
PACED, SAME_LOAD = "paced token", "token at the same load"  # for each process, and in all
UNITS: Final = {
    PACED: "us",
    SAME_LOAD: "us",
    "buffered request": "us",
    "request that waits": "us",
    "rush": "answers/s",
}
LIMITS: Final = {
    ("two, split", PACED): 1.1,
    ("two, shared", PACED): 1.1,
    ("two, split", SAME_LOAD): 1.1,
    ("two, shared", SAME_LOAD): 1.1,
    ("two, split", "buffered request"): 1.1,
    ("two, shared", "buffered request"): 1.4,
}


@contextmanager
def _variables(settings: dict[str, str]) -> Iterator[None]:
    """Let programs that are started meanwhile have settings of the server."""
    added = {PREFIX + name: value for name, value in settings.items()}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


@contextmanager
def _gateway(name: str, engine: peers.Engine, slots: int) -> Iterator[peers.Gateway]:
    """Run a setup, and wait until all of its processes serve."""
    settings = SETUPS[name]
    with ExitStack() as stack:
        with _variables(settings):
            started = stack.enter_context(peers.gateway(engine.port, slots=slots))
        gateway = replace(started, name=name)
        wanted = _processes(name)

        def all_serve() -> bool:
            try:
                found = gateway.statistics().get("processes", [{"ready": True}])
            except OSError:
                return False
            return [each["ready"] for each in found] == [True] * wanted

        if not peers.eventually(all_serve, 20):
            raise BenchError(f"{name} did not start all of its processes")
        yield gateway


def run(options: Options) -> Report:
    """Measure; see the module's docstring."""
    found: dict[str, dict[str, list[float]]] = {name: {} for name in SETUPS}
    slots: dict[str, list[int]] = {name: [] for name in SETUPS}
    plain: dict[int, dict[str, list[float]]] = {1: {}, 2: {}}
    with ExitStack() as stack:
        engine = stack.enter_context(peers.engine())
        wide = {name: stack.enter_context(_gateway(name, engine, 1024)) for name in SETUPS}
        narrow = {name: stack.enter_context(_gateway(name, engine, FEW_SLOTS)) for name in SETUPS}
        relays = {
            1: stack.enter_context(peers.nginx(engine.port)),
            2: stack.enter_context(peers.nginx(engine.port, 2)),
        }
        for turn in range(options.runs):
            for count, relay in relays.items():
                for what, streams in ((PACED, STREAMS * count), (SAME_LOAD, STREAMS)):
                    plain[count].setdefault(what, []).append(_paced(relay, options, streams))
            for name in SETUPS if turn % 2 == 0 else reversed(SETUPS):
                figures = {
                    PACED: _paced(wide[name], options, STREAMS * _processes(name)),
                    SAME_LOAD: _paced(wide[name], options, STREAMS),
                    "buffered request": _buffered(wide[name], options, CONNECTIONS * _processes(name)),
                    "request that waits": _buffered(narrow[name], options, CONNECTIONS),
                    "rush": _rush(wide[name], options),
                }
                for what, value in figures.items():
                    found[name].setdefault(what, []).append(value)
                slots[name].append(_slots(narrow[name]))
                told = ", ".join(f"{what} {value:.1f} {UNITS[what]}" for what, value in figures.items())
                progress(f"run {turn + 1} {name}: {told}")
        audits = {name: _audit(gateway) for name, gateway in (*wide.items(), *narrow.items())}
    return _report(found, slots, audits, plain)


def _processes(name: str) -> int:
    return int(SETUPS[name].get("PROCESSES", "1"))


def _paced(gateway: peers.Server, options: Options, streams: int) -> float:
    ramp_us, warm_ms, window_ms = 5000, 500, options.some(6000)
    tokens = (streams * ramp_us * 2 + (warm_ms + window_ms) * 1000) // PACE_US + 50
    answer = native.load(
        "stream",
        gateway.port,
        gateway.pids,
        streams=streams,
        tokens=tokens,
        pace_us=PACE_US,
        ramp_us=ramp_us,
        warm_ms=warm_ms,
        window_ms=window_ms,
        measured=0,
    )
    _all_good(gateway, answer, streams)
    return float(sum(answer["cpu_ns"]) / answer["tokens"] / 1000)


def _buffered(gateway: peers.Gateway, options: Options, connections: int) -> float:
    requests, warm = options.some(4000), options.some(400)
    before = cpu_ns(gateway.pids)
    answer = native.load(
        "buffered",
        gateway.port,
        gateway.pids,
        streams=connections,
        requests=requests,
        warm=warm,
        delay_us=20_000,
        vary=1,
    )
    _all_good(gateway, answer, requests + warm)
    return (cpu_ns(gateway.pids) - before) / (requests + warm) / 1000


def _rush(gateway: peers.Gateway, options: Options) -> float:
    requests = options.some(4000)
    answer = native.load(
        "buffered",
        gateway.port,
        gateway.pids,
        streams=CONNECTIONS,
        requests=requests,
        warm=options.some(400),
        delay_us=0,
    )
    return float(requests / answer["window_ns"] * 1e9)


def _all_good(gateway: peers.Server, answer: dict[str, Any], asked: int) -> None:
    if answer["good"] != asked or answer["leftover_bytes"]:
        raise BenchError(
            f"{gateway.name}: of {asked} answers {answer['good']} were whole: {answer['broken']}"
        )


def _slots(gateway: peers.Gateway) -> int:
    """Slots of all workers, as operators see them."""
    return sum(int(worker["slots"]) for worker in gateway.statistics()["workers"])


def _audit(gateway: peers.Gateway) -> list[str]:
    """What is wrong with the accounts when nothing runs any more."""
    statistics = gateway.statistics()
    wrong = list(statistics["conservation"]["errors"])
    lending = statistics.get("lending") or {}
    wrong += [f"{thing} is lent" for thing, of in lending.items() if thing[:5] == "slots" and of["lent"]]
    if statistics["leases"]["granted"] != statistics["leases"]["returned"]:
        wrong.append("not all leases came back")
    return wrong


def _report(
    found: dict[str, dict[str, list[float]]],
    slots: dict[str, list[int]],
    audits: dict[str, list[str]],
    plain: dict[int, dict[str, list[float]]],
) -> Report:
    report = Report("processes", ("", *(f"{what}, {unit}" for what, unit in UNITS.items())))
    for name, figures in found.items():
        report.rows.append((name, *(with_quartiles(figures[what]) for what in UNITS)))
    middle = {
        name: {what: statistics.median(values) for what, values in figures.items()}
        for name, figures in found.items()
    }
    for name in tuple(SETUPS)[1:]:
        ratios = (middle[name][what] / middle["one"][what] for what in UNITS)
        report.rows.append((f"{name}, times one", *(f"{ratio:.2f} x" for ratio in ratios)))
    for (name, what), limit in LIMITS.items():
        ratio = middle[name][what] / middle["one"][what]
        report.checks.append(Check.at_most(f"{what}, {name}, times one process", ratio, limit, "x"))
    for name in SETUPS:
        report.checks.append(Check.exactly(f"slots, {name}", max(slots[name]), FEW_SLOTS, ""))
        report.checks.append(Check.exactly(f"wrong accounts, {name}", len(audits[name]), 0, ""))
    report.notes += [f"{name}: {wrong}" for name, told in audits.items() for wrong in told]
    for what in (PACED, SAME_LOAD):
        one, two = (statistics.median(plain[count][what]) for count in (1, 2))
        report.notes.append(
            f"nginx, {what}: {one:.1f} us in one process, {two:.1f} us in two, {two / one:.2f} x"
        )
    report.raw = {"figures": found, "slots": slots, "nginx": plain}
    return report


if __name__ == "__main__":
    sys.exit(main("processes"))
