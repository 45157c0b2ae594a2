"""How soon does the engine learn that a client has left?

Question    From the moment at which a client closes its connection, how long until
            the engine sees its own connection closed, and is any leaving missed?
Load        One client at a time, otherwise idle. Phases: *before* the first token (the
            request is at the engine, which has sent its head), *streaming* (20 ms a
            token, after the first to third token and up to 20 ms more), *buffered*
            (while the answer is made). 200 tries in each by FIN (a plain close, all
            bytes read) and 200 by reset, at random moments. *Queued*, the gateway
            alone: its one slot is held, the next client waits in the queue and leaves.
Engines     bench/native/engine.c. It records when it read the end of the connection;
            the client records when it called close. Both by CLOCK_MONOTONIC, which is
            one clock for the host.
Measures    ms from close to close: median, 99th percentile, greatest; how many the
            engine never saw. Queued: ms until /admin/v1/statistics shows no waiter;
            an upper bound, since asking takes time.
Baseline    nginx before the same engine; blocks of 52 tries alternate.
Expect      the gateway: none lost; each phase's median at most 10 times nginx's, 99 %
            within 50 ms, none above 250 ms; a position in the queue free within
            250 ms; every slot back at the end.
Run         make bench SCENARIO=aborts     (about 2 min on 2 cores)
Output      bench/results/<date>-aborts-<commit>.json, with machine facts.
"""

from __future__ import annotations

import random
import socket
import statistics
import struct
import sys
import time
from collections import Counter
from contextlib import ExitStack
from typing import Any, Final

from .. import native, peers
from ..command import Options, main, progress
from ..processes import BenchError
from ..report import Check, Report, quantile

PHASES: Final = ("before", "streaming", "buffered")
COLUMNS: Final = ("left; ms until the engine saw it", "tries", "lost", "median", "p99", "greatest", "x nginx")
WAYS: Final = ("fin", "rst")
TRIES: Final = 200
BLOCKS: Final = 4
SPARE: Final = 2  # tries more in each block, for clients that left too early to be judged
MEDIAN_LIMIT: Final = 10.0  # times nginx
P99_MS: Final = 50.0
WORST_MS: Final = 250.0
SEEN_AS: Final = {"before": "waiting", "streaming": "streaming", "buffered": "buffered"}

Key = tuple[str, str, str]  # proxy, phase, way


class Leavings:
    """Tries of one proxy, phase and way: how long each took, and what went wrong.

    Attributes:
        ms: from the client's close to the engine's, of each try that counts.
        lost: the request reached the engine, whose answer nobody stopped.
        early: the client left before the request had reached the engine, as may
            happen on a busy machine; nothing is to be stopped then.
        spoiled: tries that met another phase than they should, by what they met.
    """

    def __init__(self) -> None:
        self.ms: list[float] = []
        self.lost = 0
        self.early = 0
        self.spoiled: Counter[str] = Counter()

    def add(self, tries: list[list[Any]], stats: dict[str, Any], phase: str) -> None:
        """Match what the client did with what the engine saw, once it is idle again."""
        seen = {record[0]: record for record in stats["aborts"]}
        unmatched = 0
        for number, left_ns, _tokens, _way, result in tries:
            record = seen.get(number)
            if result != "left":
                self.spoiled[result] += 1
            elif record is None:
                unmatched += 1
            elif record[2] != SEEN_AS[phase]:
                self.spoiled[f"left while {record[2]}"] += 1
            else:
                self.ms.append((record[1] - left_ns) / 1e6)
        early = max(0, len(tries) - stats["seen"])
        self.early += min(early, unmatched)
        self.lost += max(0, unmatched - early)

    @property
    def judged(self) -> int:
        return len(self.ms) + self.lost


def run(options: Options) -> Report:
    """Let clients leave before both proxies; see the module's docstring."""
    tries = options.some(TRIES)
    found: dict[Key, Leavings] = {}
    report = Report("aborts", COLUMNS)
    with ExitStack() as stack:
        engine = stack.enter_context(peers.engine())
        proxies: list[peers.Server] = [stack.enter_context(peers.nginx(engine.port))]
        gateway = None
        if not options.peers_only:
            gateway = stack.enter_context(peers.gateway(engine.port, kind=options.kind))
            proxies.append(gateway)
        for block in range(BLOCKS):
            for phase in PHASES:
                for way in WAYS:
                    for proxy in proxies:
                        leavings = found.setdefault((proxy.name, phase, way), Leavings())
                        seed = 1 + block * 10 + PHASES.index(phase) * 2 + WAYS.index(way)
                        _leave(proxy, engine, phase, way, -(-tries // BLOCKS) + SPARE, seed, leavings)
            progress(f"block {block + 1} of {BLOCKS} done")
        if gateway is not None:
            _check_slots(report, gateway, "slots not back")
    _judge(report, found, tries)
    if not options.peers_only:
        with peers.engine() as engine, peers.gateway(engine.port, kind=options.kind, slots=1) as gateway:
            _queued(report, gateway, engine, tries)
    return report


def _leave(
    proxy: peers.Server, engine: peers.Engine, phase: str, way: str, tries: int, seed: int, into: Leavings
) -> None:
    engine.reset()
    streaming = phase == "streaming"
    answer = native.load(
        "leave",
        proxy.port,
        phase=phase,
        how=way,
        tries=tries,
        tokens=100_000,
        pace_us=20_000,
        delay_us=0 if streaming else 30_000_000,
        min_us=0 if streaming else 10_000,
        max_us=20_000 if streaming else 30_000,
        max_tokens=3,
        pause_us=2000,
        seed=seed,
    )
    engine.wait_idle(2)
    into.add(answer["tries"], engine.stats(aborts=True), phase)


def _judge(report: Report, found: dict[Key, Leavings], tries: int) -> None:
    for (proxy, phase, way), leavings in found.items():
        label = f"{phase} by {way}"
        report.raw[f"{proxy} {label}"] = {
            "ms": leavings.ms,
            "lost": leavings.lost,
            "spoiled": leavings.spoiled,
        }
        if leavings.spoiled or leavings.early:
            others = dict(leavings.spoiled) | {"left before the engine was asked": leavings.early}
            report.notes.append(f"{proxy} {label}: not judged: {others}")
        if not leavings.ms:
            raise BenchError(f"{proxy} {label}: nothing to judge: {vars(leavings)}")
        middle, p99, worst = statistics.median(leavings.ms), quantile(leavings.ms, 0.99), max(leavings.ms)
        base = statistics.median(found["nginx", phase, way].ms)
        figures = (f"{middle:.2f}", f"{p99:.2f}", f"{worst:.2f}", f"{middle / base:.1f}")
        report.rows.append((f"{proxy} {label}", str(leavings.judged), str(leavings.lost), *figures))
        if proxy == "gateway":
            report.checks += [
                Check.exactly(f"{label}: lost", leavings.lost, 0, "clients"),
                Check.at_least(f"{label}: judged", leavings.judged, tries, "tries"),
                Check.at_most(f"{label}: median", middle / base, MEDIAN_LIMIT, "x nginx"),
                Check.at_most(f"{label}: 99th percentile", p99, P99_MS, "ms"),
                Check.at_most(f"{label}: greatest", worst, WORST_MS, "ms"),
            ]


def _check_slots(report: Report, gateway: peers.Gateway, what: str) -> None:
    gateway.wait_idle()
    statistics = gateway.statistics()
    held = statistics["leases"]["held"] + statistics["leases"]["draining"]
    report.checks.append(Check.exactly(what, held, 0, "slots"))


# The queue --------------------------------------------------------------------------------------------------


def _request(port: int) -> bytes:
    body = (
        b'{"model":"%b","messages":[{"role":"user","content":"Tell me about the sea."}],'
        b'"stream":true,"bench_tokens":100000,"bench_pace_us":100000}' % peers.MODEL.encode()
    )
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:%d\r\ncontent-type: application/json\r\n"
    return head % port + b"content-length: %d\r\n\r\n" % len(body) + body


def _ask(port: int) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port), 5)
    client.sendall(_request(port))
    return client


def _waiting(gateway: peers.Gateway) -> int:
    waiting: int = gateway.statistics()["queue"]["depth"]
    return waiting


def _leave_queue(gateway: peers.Gateway, way: str, pause_s: float) -> float | None:
    """Wait in the queue, leave, and answer the ms until the position was free; None: it never was."""
    client = _ask(gateway.port)
    if not peers.eventually(lambda: _waiting(gateway) == 1, 5, 0.001):
        raise BenchError("a request beside a held slot did not come to wait in the queue")
    time.sleep(pause_s)
    if way == "rst":
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    left = time.monotonic()
    client.close()
    if not peers.eventually(lambda: _waiting(gateway) == 0, 5, 0.001):
        return None
    return (time.monotonic() - left) * 1e3


def _queued(report: Report, gateway: peers.Gateway, engine: peers.Engine, tries: int) -> None:
    dice = random.Random(1)
    holder = _ask(gateway.port)
    try:
        if not peers.eventually(lambda: engine.stats()["active"] == 1, 5):
            raise BenchError("the client that holds the slot was not served")
        for way in WAYS:
            times = [_leave_queue(gateway, way, dice.uniform(0.002, 0.02)) for _ in range(tries)]
            _judge_queue(report, way, times)
            progress(f"queued by {way} done")
    finally:
        holder.close()
    _check_slots(report, gateway, "slots not back after the queue")


def _judge_queue(report: Report, way: str, times: list[float | None]) -> None:
    ms = [each for each in times if each is not None]
    lost = len(times) - len(ms)
    report.raw[f"gateway queued by {way}"] = {"ms": ms, "lost": lost}
    worst = max(ms, default=float("inf"))
    middle = statistics.median(ms) if ms else float("inf")
    p99 = quantile(ms, 0.99) if ms else float("inf")
    report.rows.append(
        (
            f"gateway queued by {way}",
            str(len(times)),
            str(lost),
            f"{middle:.2f}",
            f"{p99:.2f}",
            f"{worst:.2f}",
            "-",
        )
    )
    report.checks += [
        Check.exactly(f"queued by {way}: lost", lost, 0, "clients"),
        Check.at_most(f"queued by {way}: greatest", worst, WORST_MS, "ms"),
    ]


if __name__ == "__main__":
    sys.exit(main("aborts"))
