"""What does a token cost over a WebSocket, beside one over SSE?

Question    How much more CPU does the gateway spend on a token that it delivers over `/v1/tokens` than on
            one that it delivers as an event?
Load        paced: 200 streams, one 252-byte event each 20 ms, spread over the 20 ms; a window of 5 s after
            every stream had its first token. unpaced: 64 streams of 4,000 tokens as fast as the sockets
            take them. Over SSE one connection for each, over WebSockets one socket for each.
Engines     bench/native/engine.c.
Gateway     in both setups, see bench/setups.py.
Measures    user + system CPU of the gateway's process tree, divided by the tokens that the client read in
            the window. Every answer is checked to its end. Runs are interleaved.
Baseline    the same gateway over SSE in the same run.
Expect      nothing yet: a message is made anew for every token, where an event passes as it came.
Run         make bench SCENARIO=websocket     (about 8 min on 2 cores)
Output      bench/results/<date>-websocket-<commit>.json, with machine facts.
"""

from __future__ import annotations

import statistics
import sys
from contextlib import ExitStack
from typing import Final

from .. import native, peers, setups
from ..command import Options, main, progress
from ..processes import BenchError
from ..report import Report, with_quartiles

STREAMS: Final = {"paced": 200, "unpaced": 64}
PACE_US: Final = 20_000
DOORS: Final = {"SSE": 0, "WebSocket": 1}

Costs = dict[tuple[str, str], dict[str, list[float]]]  # us a token, by load and setup, by door


def run(options: Options) -> Report:
    """Measure both doors; see the module's docstring."""
    costs: Costs = {}
    with ExitStack() as stack:
        engine = stack.enter_context(peers.engine())
        gateways = [stack.enter_context(setups.start(name, engine.port)) for name in setups.SETUPS]
        for turn in range(options.runs):
            for gateway in gateways if turn % 2 == 0 else reversed(gateways):
                for load in options.chosen(STREAMS):
                    for door in DOORS if turn % 2 == 0 else reversed(DOORS):
                        cost = measure(gateway, load, door, options)
                        told = costs.setdefault((load, gateway.name), {}).setdefault(door, [])
                        told.append(cost)
                        progress(f"run {turn + 1}: {gateway.name}, {load}, {door}: {cost:.1f} us")
    return _report(costs)


def measure(gateway: peers.Gateway, load: str, door: str, options: Options) -> float:
    """Answer the CPU of a token, in us."""
    streams = STREAMS[load]
    if load == "paced":
        ramp_us, warm_ms, window_ms = 5_000, 500, options.some(5_000)
        lasts_us = streams * ramp_us * 2 + (warm_ms + window_ms) * 1000 + 1_000_000
        how = {"tokens": lasts_us // PACE_US, "pace_us": PACE_US, "ramp_us": ramp_us}
        how |= {"warm_ms": warm_ms, "window_ms": window_ms}
    else:
        how = {"tokens": options.some(4_000), "batch": 1}
    answer = native.load(
        "stream",
        gateway.port,
        gateway.pids,
        streams=streams,
        ws=DOORS[door],
        measured=0,
        **how,
        **gateway.load,
    )
    if answer["good"] != streams:
        raise BenchError(f"of {streams} answers {answer['good']} were whole: {answer['broken']}")
    if answer["window_ns"] <= 0:
        raise BenchError(f"{streams} streams were opened too slowly for the window")
    spent: int = sum(answer["cpu_ns"])
    tokens: int = answer["tokens"]
    return spent / tokens / 1000


def _report(costs: Costs) -> Report:
    report = Report("websocket", ("CPU a token, us", *DOORS, "times SSE"))
    for (load, setup), told in costs.items():
        ratio = statistics.median(told["WebSocket"]) / statistics.median(told["SSE"])
        cells = (with_quartiles(told[door]) for door in DOORS)
        report.rows.append((f"{load}, {setup}", *cells, f"{ratio:.2f}"))
    report.raw = {f"{load}, {setup}": told for (load, setup), told in costs.items()}
    return report


if __name__ == "__main__":
    sys.exit(main("websocket"))
