"""What do a token, and a request, cost in CPU and in time, beside nginx and other routers?

Question    How many microseconds of CPU does each proxy spend on a paced token, on an
            unpaced token, and on a buffered request, and by how much does it hold up the
            first token and the next ones?
Load        paced: 400 streams, one 252-byte event each 20 ms, spread over the 20 ms,
            so that as a rule a wake-up finds one token; a window of 8 s after every
            stream had its first token. unpaced: 64 streams of 4,000 tokens, as fast
            as the sockets take them, each event written by itself as engines do (in
            writes of 64 KiB nginx costs a quarter of that, and no engine does it);
            the whole run, requests included. buffered: 64 kept connections, answers
            of 1 KB after 10 to 30 ms. Without that delay a proxy finds its requests in
            heaps, and nginx costs half.
            latency: 64 streams at 50 tokens/s each, and 400 of them (20,000 tokens/s);
            beside them 200 short streams, one each 20 ms, whose first token the engine
            sends at once.
Engines     bench/native/engine.c, one for all proxies. No GPU: the proxy is measured.
Gateway     in two setups, see bench/setups.py: pass-through and full. In the full one the
            engine sends usage in every event; peers are not asked for more than the client
            asks them, and so get shorter events.
Measures    user + system CPU of the proxy's process tree (its CPU clocks, which are
            what /proc/PID/stat sums up, in ns), divided by the tokens or answers that
            the client read in the same window; of buffered requests until the records are in
            the database. Every answer is checked to its end. Latencies are what the client
            sees: 99th percentile of the time from the written request to the first token, and
            of the time between two tokens, which the engine sends 20 ms apart.
            Beside it the share of a core that proxy, engine and client used.
Baseline    nginx, one worker, proxy_buffering off, kept connections; smg and vllm-router (the
            better of the two is the yardstick); LiteLLM and Portkey, which get a small load
            (5 streams at 25 tokens/s; 4 streams of 200; 600 requests) in three runs. All stay
            up; runs are interleaved, every second one turned round. A load whose quartiles are over
            10 % of the median apart for a proxy is repeated once for all of them, and then counts.
Expect      paced: pass-through at most 1.1 and full at most 1.25 times the better router,
            pass-through at most 1.8 times nginx. unpaced: full at most 0.6 times. buffered: full
            at most 1.3 times smg, and a fiftieth of LiteLLM. Latencies: at most 1.1 times the
            better router's and 1 ms. A proxy to which less than 98 % of the paced tokens came in
            their window, or that used over 97 % of a core for them, fell behind and read several
            at once, which flatters it: such a run does not count, take fewer --streams.
Run         make bench SCENARIO=overhead     (30 to 50 min on 2 cores)
Output      bench/results/<date>-overhead-<commit>.json, with machine facts.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from .. import native, peers, routers, setups
from ..command import Options, main, progress
from ..processes import BenchError, cpu_ns
from ..report import Check, Report, quartiles, with_quartiles

PACE_US: Final = 20_000
SATURATED: Final = 0.97  # of a core
IN_TIME: Final = 0.98  # of the tokens
UNSTEADY: Final = 0.10  # of the median, between the quartiles
QUARTILES: Final = 4  # runs, from which on quartiles are not just the extremes
SLOW_RUNS: Final = 3
REPLAYED_S: Final = 1.5  # seconds in which the last records get into the database
FEW, MANY = 64, 400  # streams of the two latencies
PROBES: Final = 200
PROBE_US: Final = 20_100  # from one to the next: not a multiple of the pace

UNITS: Final = {
    "paced token": "us",
    "unpaced token": "us",
    "buffered request": "us",
    "first token, 64 streams": "ms",
    "gap, 64 streams": "ms",
    "first token, 20,000 tokens/s": "ms",
    "gap, 20,000 tokens/s": "ms",
}
FULL, PASS = "full", "pass-through"


@dataclass(frozen=True)
class Measured:
    """One run of one load before one proxy.

    Attributes:
        values: by the names of `UNITS`.
        proxy, engine, client: share of one core that each used.
        count: tokens, requests, or first tokens that it comes from.
        in_time: share of the tokens of paced streams that came within their window.
    """

    values: Mapping[str, float]
    proxy: float
    engine: float
    client: float
    count: int
    in_time: float = 1.0


Load = Callable[[peers.Server, peers.Engine, Options], Measured]
Runs = dict[tuple[str, str], list[Measured]]  # by load and proxy
Failed = dict[tuple[str, str], str]  # why, by load and proxy


def run(options: Options) -> Report:
    """Measure all proxies; see the module's docstring."""
    runs: Runs = {}
    failed: Failed = {}
    repeated = []
    chosen = options.chosen(LOADS)
    with ExitStack() as stack:
        engine = stack.enter_context(peers.engine())
        proxies, missing = routers.start(options.peers, engine.port, stack)
        for name, why in missing.items():
            progress(f"without {name}: {why}")
        if not options.peers_only:
            proxies += [stack.enter_context(setups.start(name, engine.port)) for name in setups.SETUPS]
        for turn in range(options.runs):
            for proxy, name in _turn(turn, proxies, chosen):
                _once(proxy, name, engine, options, runs, failed, f"run {turn + 1}")
        for name in chosen:
            if options.runs >= QUARTILES and _unsteady(runs, name):
                repeated.append(name)
                first = {key: runs.pop(key) for key in list(runs) if key[0] == name}
                for turn in range(options.runs):
                    for proxy, _ in _turn(turn, proxies, [name]):
                        _once(proxy, name, engine, options, runs, failed, f"again, run {turn + 1}")
                runs.update({(f"{load}, first", proxy): told for (load, proxy), told in first.items()})
    return _report(runs, options, missing, failed, repeated)


def _turn(turn: int, proxies: list[peers.Server], loads: list[str]) -> Iterator[tuple[peers.Server, str]]:
    """Say which proxy gets which load in this turn, one after the other."""
    for proxy in proxies if turn % 2 == 0 else reversed(proxies):
        if proxy.name not in routers.SLOW:
            yield from ((proxy, load) for load in loads)
        elif turn < SLOW_RUNS:
            yield from ((proxy, load) for load in loads if load in SLOW_LOADS)


def _once(
    proxy: peers.Server,
    name: str,
    engine: peers.Engine,
    options: Options,
    runs: Runs,
    failed: Failed,
    when: str,
) -> None:
    """Measure; a load that a proxy can not bear is noted, and not given to it again."""
    if (name, proxy.name) in failed:
        return
    loads = SLOW_LOADS if proxy.name in routers.SLOW else LOADS
    try:
        measured = loads[name](proxy, engine, options)
    except BenchError as error:
        failed[name, proxy.name] = str(error)
        progress(f"{when} {proxy.name}: {error}")
        if not engine.wait_idle(120):
            raise
        return
    runs.setdefault((name, proxy.name), []).append(measured)
    told = ", ".join(f"{what} {value:.2f} {UNITS[what]}" for what, value in measured.values.items())
    progress(f"{when} {proxy.name}: {told}")


def _unsteady(runs: Runs, name: str) -> bool:
    """Say whether some proxy's runs of a load are too far apart to be believed."""
    for (load, proxy), told in runs.items():
        if load == name and proxy not in routers.SLOW:
            for what in told[0].values:
                low, middle, high = quartiles([measured.values[what] for measured in told])
                if high - low > UNSTEADY * middle:
                    return True
    return False


# Loads ------------------------------------------------------------------------------------------------------


def _measured(answer: dict[str, Any], asked: int, what: str, spent: int, units: int) -> Measured:
    """Make the outcome of a load whose CPU counts.

    Args:
        answer: of the load client, with the engine's process before those of the proxy.
        asked: answers that had to be whole.
        what: the name of the figure.
        spent: CPU of the proxy in ns.
        units: what it was spent on.
    """
    _all_good(answer, asked)
    engine_ns, *proxy_ns = answer["cpu_ns"]
    window = answer["window_ns"]
    return Measured(
        {what: spent / units / 1000},
        proxy=sum(proxy_ns) / window,
        engine=engine_ns / window,
        client=answer["own_cpu_ns"] / window,
        count=units,
    )


def _all_good(answer: dict[str, Any], asked: int) -> None:
    if answer["good"] != asked or answer["leftover_bytes"]:
        raise BenchError(f"of {asked} answers {answer['good']} were whole: {answer['broken']}")


def paced(
    proxy: peers.Server, engine: peers.Engine, options: Options, *, streams: int = 0, pace_us: int = PACE_US
) -> Measured:
    streams = streams or options.streams
    ramp_us, warm_ms, window_ms = 5000, 500, options.some(8000)
    opening_us = streams * ramp_us * 2
    tokens = (opening_us + (warm_ms + window_ms) * 1000) // pace_us + 50
    answer = native.load(
        "stream",
        proxy.port,
        [*engine.pids, *proxy.pids],
        streams=streams,
        tokens=tokens,
        pace_us=pace_us,
        ramp_us=ramp_us,
        warm_ms=warm_ms,
        window_ms=window_ms,
        measured=0,
        **proxy.load,
    )
    if answer["window_ns"] <= 0:
        raise BenchError(f"{proxy.name} opened {streams} streams too slowly for the window")
    measured = _measured(answer, streams, "paced token", sum(answer["cpu_ns"][1:]), answer["tokens"])
    made = streams * answer["window_ns"] / 1000 / pace_us
    return replace(measured, in_time=answer["tokens"] / made)


def unpaced(
    proxy: peers.Server, engine: peers.Engine, options: Options, *, streams: int = 64, tokens: int = 4000
) -> Measured:
    answer = native.load(
        "stream",
        proxy.port,
        [*engine.pids, *proxy.pids],
        streams=streams,
        tokens=options.some(tokens),
        batch=1,
        measured=0,
        **proxy.load,
    )
    return _measured(answer, streams, "unpaced token", sum(answer["cpu_ns"][1:]), answer["tokens"])


def buffered(
    proxy: peers.Server, engine: peers.Engine, options: Options, *, streams: int = 64, requests: int = 4000
) -> Measured:
    requests = options.some(requests * 2 if proxy.name == "nginx" else requests)  # windows of similar length
    warm = options.some(10 * streams)
    before = cpu_ns(proxy.pids)
    answer = native.load(
        "buffered",
        proxy.port,
        [*engine.pids, *proxy.pids],
        streams=streams,
        requests=requests,
        warm=warm,
        delay_us=20_000,
        vary=1,
        **proxy.load,
    )
    if proxy.name == FULL:
        time.sleep(REPLAYED_S)
    spent = cpu_ns(proxy.pids) - before
    if isinstance(proxy, peers.Gateway) and proxy.name == FULL:
        ledger = proxy.statistics()["ledger"]
        if ledger["behind_bytes"] or ledger["trouble"]:
            raise BenchError(f"the records are not in the database after {REPLAYED_S} s: {ledger}")
    return _measured(answer, requests + warm, "buffered request", spent, requests + warm)


def latency(proxy: peers.Server, engine: peers.Engine, options: Options, *, streams: int) -> Measured:
    """Let short streams come beside long ones, about so many at a time in all."""
    probes = options.some(PROBES)
    name = f"{streams} streams" if streams == FEW else f"{streams * 1_000_000 // PACE_US:,} tokens/s"
    beside = streams - 10
    # With this from one to the next, their tokens stand evenly apart within the 20 ms.
    ramp_us = PACE_US // 4 + PACE_US // streams
    lasts_us = beside * ramp_us * 2 + probes * PROBE_US + 500_000
    engine.reset()
    with native.loading(
        "stream",
        proxy.port,
        [*engine.pids, *proxy.pids],
        streams=beside,
        tokens=lasts_us // PACE_US,
        pace_us=PACE_US,
        spread=0,
        ramp_us=ramp_us,
        **proxy.load,
    ) as others:
        if not peers.eventually(lambda: engine.stats()["active"] >= beside, beside * ramp_us / 2e5 + 2):
            raise BenchError(f"{proxy.name} opened {beside} streams too slowly")
        probed = native.load(
            "stream",
            proxy.port,
            (),
            streams=probes,
            tokens=10,
            pace_us=PACE_US,
            spread=0,
            ramp_us=PROBE_US,
            measured=0,
            **proxy.load,
        )
        answer = native.result_of(others)
    _all_good(probed, probes)
    _all_good(answer, beside)
    window = answer["window_ns"]
    return Measured(
        {
            f"first token, {name}": probed["first_token_ns"]["p99"] / 1e6,
            f"gap, {name}": answer["gap_ns"]["p99"] / 1e6,
        },
        proxy=sum(answer["cpu_ns"][1:]) / window,
        engine=answer["cpu_ns"][0] / window,
        client=answer["own_cpu_ns"] / window,
        count=probes,
    )


LOADS: Final[dict[str, Load]] = {
    "paced": paced,
    "unpaced": unpaced,
    "buffered": buffered,
    "few": lambda *given: latency(*given, streams=FEW),
    "many": lambda *given: latency(*given, streams=MANY),
}
SLOW_LOADS: Final[dict[str, Load]] = {
    "paced": lambda *given: paced(*given, streams=5, pace_us=40_000),
    "unpaced": lambda *given: unpaced(*given, streams=4, tokens=200),
    "buffered": lambda *given: buffered(*given, requests=600),
}


# Report -----------------------------------------------------------------------------------------------------


def _report(
    runs: Runs, options: Options, missing: Mapping[str, str], failed: Failed, repeated: list[str]
) -> Report:
    counted = {key: told for key, told in runs.items() if not key[0].endswith(", first")}
    found: dict[str, dict[str, list[float]]] = {}
    for (_, proxy), told in counted.items():
        for what in told[0].values:
            found.setdefault(proxy, {})[what] = [measured.values[what] for measured in told]
    report = Report("overhead", ("", *(f"{what}, {unit}" for what, unit in UNITS.items())))
    for proxy, figures in found.items():
        cells = (with_quartiles(figures.get(what, [])) for what in UNITS)
        report.rows.append((proxy, *cells))
    report.rows += [(name, *("not measured" for _ in UNITS)) for name in missing]
    middle = {
        proxy: {what: statistics.median(told) for what, told in figures.items()}
        for proxy, figures in found.items()
    }
    if not options.peers_only:
        report.checks += _checks(middle, counted)
    report.checks.append(
        Check.exactly(
            "peers that could be measured", len(options.peers) - len(missing), len(options.peers), ""
        )
    )
    report.notes += [f"{name} could not be measured: {why}" for name, why in missing.items()]
    report.notes += [f"{proxy} could not bear {name}: {why}" for (name, proxy), why in failed.items()]
    report.notes += [f"{name} was repeated: the quartiles were over 10 % apart" for name in repeated]
    for (name, proxy), told in counted.items():
        shares = {part: statistics.median(getattr(each, part) for each in told) for part in _PARTS}
        words = ", ".join(f"{part} {share:.0%}" for part, share in shares.items())
        flattered = ": it fell behind, which flatters it" * _behind(told)
        report.notes.append(f"{name} before {proxy}, of one core: {words}{flattered}")
    report.raw = {f"{proxy} {name}": [asdict(each) for each in told] for (name, proxy), told in runs.items()}
    report.raw |= {"streams": options.streams, "figures": found, "missing": dict(missing)}
    return report


_PARTS: Final = ("proxy", "engine", "client")


def _behind(told: list[Measured]) -> bool:
    """Say whether a proxy did not keep up with paced tokens: it read several at once, or had no core left."""
    in_time = statistics.median(each.in_time for each in told)
    return in_time < IN_TIME or (in_time != 1 and statistics.median(each.proxy for each in told) > SATURATED)


def _checks(middle: dict[str, dict[str, float]], runs: Runs) -> list[Check]:
    """Compare the gateway with those peers that there are."""
    checks = []

    def against(who: str, what: str, limit: float, whom: tuple[str, ...], words: str) -> None:
        theirs = [middle[name][what] for name in whom if what in middle.get(name, {})]
        if theirs:
            ratio = middle[who].get(what, math.inf) / min(theirs)
            checks.append(Check.at_most(f"{what}, {who}, times {words}", ratio, limit, "x"))

    best = "the better router"
    against(PASS, "paced token", 1.1, routers.RUST, best)
    against(FULL, "paced token", 1.25, routers.RUST, best)
    against(PASS, "paced token", 1.8, ("nginx",), "nginx")
    against(FULL, "unpaced token", 0.6, routers.RUST, best)
    against(FULL, "buffered request", 1.3, ("smg",), "smg")
    against(FULL, "buffered request", 1 / 50, ("litellm",), "LiteLLM")
    for what, unit in UNITS.items():
        theirs = [middle[name][what] for name in routers.RUST if what in middle.get(name, {})]
        if unit == "ms" and theirs:
            limit = 1.1 * min(theirs) + 1
            checks += [
                Check.at_most(f"{what}, {who}, 99th percentile", middle[who].get(what, math.inf), limit, unit)
                for who in (PASS, FULL)
            ]
    for (load, proxy), told in runs.items():
        if load == "paced" and proxy in (PASS, FULL, *routers.RUST):
            in_time = statistics.median(each.in_time for each in told)
            checks.append(Check.at_least(f"paced tokens in time, {proxy}", in_time, IN_TIME, ""))
    return checks


if __name__ == "__main__":
    sys.exit(main("overhead"))
