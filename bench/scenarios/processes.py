"""What do two processes cost and bring, beside one?

Question    How much more CPU do a token and a request take in two processes, with slots that are
            shared and with slots that are split, and how much more do two move?
Load        paced: 200 streams for each process, one event each 20 ms, a window of 6 s: each process
            has the same load as the one. same load: 200 streams in all, however many processes, so
            that a wake-up of each could find fewer tokens. buffered: 64 kept connections for each
            process, answers of 1 KB after 10 to 30 ms, slots for all of them. waiting: 64 in all and
            16 slots, so that requests wait and slots go from process to process. rush: 64 connections,
            answers without delay: as many as can be served.
Engines     bench/native/engine.c, two, with half of the slots each. Each of two processors has an engine
            and a client with half of the load, which run nowhere else, so that both are alike for a
            gateway's process. With one engine and one client, a process beside the engine pays 1.2 times
            what one beside the client does, since each write has to wake the other processor; one
            process moves to where it is cheap, and of two one can not.
Measures    user + system CPU of all of the gateway's processes, the supervisor included, for each token
            or answer that the clients read in the window; answers a second in the rush, where all share
            the machine's processors with engines and clients. Slots as operators see them, and whether
            the accounts are right afterwards. (That an engine with as many slots never has to refuse is
            a test, tests/e2e/test_processes.py.)
Baseline    one process, in the same run; runs are interleaved, every second one turned round. Beside it
            nginx with one and with two processes under the paced loads: what a token costs more where all
            processors are busy is the machine's, whoever forwards it.
Expect      a token in two processes: at most 1.1 times one, with the same load for each and with the
            same load in all. A request: at most 1.1 times with
            "split", 1.4 times with "shared". Slots as in one. The rush is reported only.
Run         make bench SCENARIO=processes     (15 min on 2 cores)
Output      bench/results/<date>-processes-<commit>.json, with machine facts.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Final

from .. import native, peers
from ..command import Options, main, progress
from ..processes import BenchError, cpu_ns
from ..report import Check, Report, with_quartiles

STREAMS: Final = 200
CONNECTIONS: Final = 64
FEW_SLOTS: Final = 16
PLACES: Final = 2  # processors that have an engine and a client each
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
def _gateway(name: str, engines: Sequence[peers.Engine], slots: int) -> Iterator[peers.Gateway]:
    """Run a setup before engines with so many slots together; wait until all of its processes serve."""
    settings = SETUPS[name]
    first, *others = engines
    each = slots // len(engines)
    more = "".join(
        peers.WORKER.format(id=f"other-{number}", engine_port=other.port, kind="openai", slots=each)
        for number, other in enumerate(others)
    )
    with ExitStack() as stack:
        with _variables(settings):
            started = stack.enter_context(peers.gateway(first.port, slots=each, extra=more))
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
    places = _places()
    with ExitStack() as stack:
        engines = [stack.enter_context(peers.engine(processor=place)) for place in places]
        ports = [engine.port for engine in engines]
        wide = {name: stack.enter_context(_gateway(name, engines, 1024)) for name in SETUPS}
        narrow = {name: stack.enter_context(_gateway(name, engines, FEW_SLOTS)) for name in SETUPS}
        relays = {count: stack.enter_context(peers.nginx(*ports, workers=count)) for count in (1, 2)}
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


def _places() -> list[int]:
    """Answer the processors that are given an engine and a client each.

    Raises:
        BenchError: there are fewer.
    """
    found = sorted(os.sched_getaffinity(0))[:PLACES]
    if len(found) < PLACES:
        raise BenchError(f"needs {PLACES} processors, and may use {len(found)}")
    return found


def _load(mode: str, server: peers.Server, streams: int, **options: object) -> list[native.Answer]:
    """Let a client on each of the processors have its part of the streams; answer what each measured.

    Raises:
        BenchError: a client failed.
    """
    with ExitStack() as stack:
        clients = [
            stack.enter_context(
                native.loading(
                    mode, server.port, server.pids, processor=place, streams=streams // PLACES, **options
                )
            )
            for place in _places()
        ]
        return [native.result_of(client) for client in clients]


def _paced(server: peers.Server, options: Options, streams: int) -> float:
    ramp_us, warm_ms, window_ms = 5000 * PLACES, 500, options.some(6000)
    tokens = (streams // PLACES * ramp_us * 2 + (warm_ms + window_ms) * 1000) // PACE_US + 50
    answers = _load(
        "stream",
        server,
        streams,
        tokens=tokens,
        pace_us=PACE_US,
        ramp_us=ramp_us,
        warm_ms=warm_ms,
        window_ms=window_ms,
        measured=0,
    )
    _all_good(server, answers, streams)
    # Each of them read the CPU clocks around its own window, which is as long and began as soon.
    cpu = sum(sum(answer["cpu_ns"]) for answer in answers) / PLACES
    return float(cpu / sum(answer["tokens"] for answer in answers) / 1000)


def _buffered(gateway: peers.Gateway, options: Options, connections: int) -> float:
    requests, warm = options.some(4000) // PLACES, options.some(400) // PLACES
    before = cpu_ns(gateway.pids)
    answers = _load("buffered", gateway, connections, requests=requests, warm=warm, delay_us=20_000, vary=1)
    asked = (requests + warm) * PLACES
    _all_good(gateway, answers, asked)
    return (cpu_ns(gateway.pids) - before) / asked / 1000


def _rush(gateway: peers.Gateway, options: Options) -> float:
    requests, warm = options.some(4000) // PLACES, options.some(400) // PLACES
    answers = _load("buffered", gateway, CONNECTIONS, requests=requests, warm=warm, delay_us=0)
    return float(sum(requests / answer["window_ns"] * 1e9 for answer in answers))


def _all_good(server: peers.Server, answers: Sequence[native.Answer], asked: int) -> None:
    good = sum(answer["good"] for answer in answers)
    if good != asked or any(answer["leftover_bytes"] for answer in answers):
        broken = [answer["broken"] for answer in answers]
        raise BenchError(f"{server.name}: of {asked} answers {good} were whole: {broken}")


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
