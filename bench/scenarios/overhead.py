"""What does a token, and a request, cost the gateway in CPU, beside nginx?

Question    How many microseconds of CPU does each proxy spend on a paced token, on
            an unpaced token, and on a buffered request?
Load        paced: 200 streams, one 252-byte event each 20 ms, spread over the 20 ms,
            so that as a rule a wake-up finds one token; a window of 8 s after every
            stream had its first token. unpaced: 64 streams of 4,000 tokens, as fast
            as the sockets take them, each event written by itself as engines do (in
            writes of 64 KiB nginx costs a quarter of that, and no engine does it);
            the whole run, requests included. buffered: 64 kept connections, answers
            of 1 KB after 10 to 30 ms; begins after 640 requests. Without that delay
            a proxy finds its requests in heaps, and nginx costs half.
Engines     bench/native/engine.c, one for both proxies. No GPU: the proxy is measured.
Measures    user + system CPU of the proxy's process tree (its CPU clocks, which are
            what /proc/PID/stat sums up, in ns), divided by the tokens or answers that
            the client read in the same window. Every answer is checked to its end.
            Beside it the share of a core that proxy, engine and client used.
Baseline    nginx, one worker, proxy_buffering off, kept connections; both proxies
            stay up, runs are interleaved A B B A against drift.
Expect      at most 6, 15 and 40 times nginx (medians of 5 runs). A proxy that used
            over 97 % of a core for paced tokens fell behind and read several at once,
            which flatters it: such a run does not count, take fewer --streams.
Run         make bench SCENARIO=overhead     (about 3 min on 2 cores)
Output      bench/results/<date>-overhead-<commit>.json, with machine facts.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any, Final

from .. import native, peers
from ..command import Options, main, progress
from ..processes import BenchError
from ..report import Check, Report, spread

LIMITS: Final = {"paced": 6.0, "unpaced": 15.0, "buffered": 40.0}  # times nginx
PACE_US: Final = 20_000
SATURATED: Final = 0.97


@dataclass(frozen=True)
class Cost:
    """One run of one load before one proxy.

    Attributes:
        unit_us: CPU of the proxy per token or request, in us.
        proxy, engine, client: share of one core that each used.
        units: tokens or requests in the window.
    """

    unit_us: float
    proxy: float
    engine: float
    client: float
    units: int


def run(options: Options) -> Report:
    """Measure both proxies; see the module's docstring."""
    costs: dict[tuple[str, str], list[Cost]] = {}
    loads: dict[str, Callable[[peers.Server, peers.Engine, Options], Cost]] = {
        "paced": paced,
        "unpaced": unpaced,
        "buffered": buffered,
    }
    with ExitStack() as stack:
        engine = stack.enter_context(peers.engine())
        proxies: list[peers.Server] = [stack.enter_context(peers.nginx(engine.port))]
        if not options.peers_only:
            proxies.append(stack.enter_context(peers.gateway(engine.port, kind=options.kind)))
        for turn in range(options.runs):
            for proxy in proxies if turn % 2 == 0 else reversed(proxies):
                for name, load in loads.items():
                    cost = load(proxy, engine, options)
                    costs.setdefault((name, proxy.name), []).append(cost)
                    progress(f"run {turn + 1} {proxy.name} {name}: {cost.unit_us:.2f} us")
    return _report(costs, options)


def _cost(answer: dict[str, Any], units: int, asked: int) -> Cost:
    if answer["good"] != asked or answer["leftover_bytes"]:
        raise BenchError(f"of {asked} answers {answer['good']} were whole: {answer['broken']}")
    engine_ns, *proxy_ns = answer["cpu_ns"]
    window = answer["window_ns"]
    spent = sum(proxy_ns)
    return Cost(
        unit_us=spent / units / 1000,
        proxy=spent / window,
        engine=engine_ns / window,
        client=answer["own_cpu_ns"] / window,
        units=units,
    )


def paced(proxy: peers.Server, engine: peers.Engine, options: Options) -> Cost:
    ramp_us, warm_ms, window_ms = 5000, 500, options.some(8000)
    opening_us = options.streams * ramp_us * 2
    tokens = (opening_us + (warm_ms + window_ms) * 1000) // PACE_US + 50
    answer = native.load(
        "stream",
        proxy.port,
        [*engine.pids, *proxy.pids],
        streams=options.streams,
        tokens=tokens,
        pace_us=PACE_US,
        ramp_us=ramp_us,
        warm_ms=warm_ms,
        window_ms=window_ms,
        measured=0,
    )
    if answer["window_ns"] <= 0:
        raise BenchError(f"{proxy.name} opened {options.streams} streams too slowly for the window")
    return _cost(answer, answer["tokens"], options.streams)


def unpaced(proxy: peers.Server, engine: peers.Engine, options: Options) -> Cost:
    streams, tokens = 64, options.some(4000)
    answer = native.load(
        "stream", proxy.port, [*engine.pids, *proxy.pids], streams=streams, tokens=tokens, batch=1, measured=0
    )
    return _cost(answer, answer["tokens"], streams)


def buffered(proxy: peers.Server, engine: peers.Engine, options: Options) -> Cost:
    requests = options.some(8_000 if proxy.name == "nginx" else 4_000)  # windows of similar length
    answer = native.load(
        "buffered",
        proxy.port,
        [*engine.pids, *proxy.pids],
        streams=64,
        requests=requests,
        warm=640,
        delay_us=20_000,
        vary=1,
    )
    return _cost(answer, requests, requests + 640)


def _report(costs: dict[tuple[str, str], list[Cost]], options: Options) -> Report:
    report = Report("overhead", ("CPU of the proxy, us", "nginx", "gateway", "times nginx", "limit"))
    labels = {"paced": "paced token", "unpaced": "unpaced token", "buffered": "buffered request"}
    for name, limit in LIMITS.items():
        base = [cost.unit_us for cost in costs[name, "nginx"]]
        ours = [cost.unit_us for cost in costs.get((name, "gateway"), [])]
        ratio = statistics.median(ours) / statistics.median(base) if ours else 0.0
        report.rows.append(
            (labels[name], spread(base, 2), spread(ours), f"{ratio:.1f}" if ours else "-", f"{limit:.0f}")
        )
        if ours:
            report.checks.append(Check.at_most(f"{labels[name]}, times nginx", ratio, limit, "x"))
    for (name, proxy), runs in costs.items():
        shares = ", ".join(
            f"{part} {statistics.median(getattr(cost, part) for cost in runs):.0%}"
            for part in ("proxy", "engine", "client")
        )
        report.notes.append(f"{name} before {proxy}, of one core: {shares}")
    if paced_runs := costs.get(("paced", "gateway")):
        share = statistics.median(cost.proxy for cost in paced_runs)
        report.checks.append(Check.at_most("share of a core at paced tokens", share, SATURATED, "cores"))
    report.raw = {f"{proxy} {name}": [asdict(cost) for cost in runs] for (name, proxy), runs in costs.items()}
    report.raw["streams"] = options.streams
    return report


if __name__ == "__main__":
    sys.exit(main("overhead"))
