"""What do clients that never read cost, and does anyone else notice them?

Question    When 200 clients ask for a 10 MB streamed answer and never read a byte,
            how much memory does each cost the gateway, and how much longer are the
            gaps between tokens that other clients see?
Load        200 clients that send a request for 40,000 events of 252 bytes as fast as
            the socket takes them, and never call recv; four readers at 20 ms a token,
            400 tokens each, once beside them and once without, 5 runs interleaved
            A B B A. Readers begin when no byte has moved for 0.5 s: filling every
            buffer is a burst of work, what counts here is what remains.
Engines     bench/native/engine.c.
Measures    memory: PSS of the gateway's process tree and kernel memory of its own TCP
            sockets (both sides: what clients do not take, and what the engine sent
            ahead), settled and after the readers, the greater; less the same before
            the first run, over 200. From skmem of `ss` these are counted: r, t, f, w,
            o, bl (received, handed down, reserved, written and not acknowledged,
            options, backlog); rb and tb are limits. Bytes that wait in the clients'
            and in the engine's own sockets are theirs.
            gap: 99th percentile over all readers' gaps, per run; median of the runs.
            All 200 must still be connected at the end of each run, and unfinished at
            the engine: delivery.stall_timeout and max_lag are set beyond the run.
Baseline    the same gateway without them.
Expect      memory per client below delivery.buffer_bytes (256 KiB) + 128 KiB in every
            run; gap at the 99th percentile less than 20 % above the baseline.
Run         make bench SCENARIO=stalled_clients     (about 2 min on 2 cores)
Output      bench/results/<date>-stalled_clients-<commit>.json, with machine facts.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from .. import native, peers
from ..command import Options, main, progress
from ..processes import BenchError, cpu_ns, pss_bytes, socket_memory
from ..report import Check, Report, spread

KIB: Final = 1024
CLIENTS: Final = 200
EVENTS: Final = 40_000
BUFFER_BYTES: Final = 256 * KIB
CONSTANT: Final = 128 * KIB
PACE_US: Final = 20_000
READERS: Final = 4
GAP_LIMIT: Final = 1.20
PATIENT: Final = f"""
[delivery]
buffer_bytes = {BUFFER_BYTES}
stall_timeout = 300
max_lag = 300
"""


@dataclass
class Memory:
    """What a proxy holds at one moment, in bytes; ``fields`` are those of `socket_memory`."""

    pss: int
    fields: dict[str, int]

    @property
    def total(self) -> int:
        return self.pss + self.fields["total"]

    @classmethod
    def of(cls, proxy: peers.Server) -> Memory:
        pids = proxy.pids
        return cls(pss_bytes(pids), socket_memory(pids))


@dataclass
class Found:
    alone_ms: list[float] = field(default_factory=list)
    beside_ms: list[float] = field(default_factory=list)
    per_client: list[float] = field(default_factory=list)
    pss: list[float] = field(default_factory=list)
    kernel: list[float] = field(default_factory=list)
    filling_s: list[float] = field(default_factory=list)
    idle_cores: list[float] = field(default_factory=list)
    raw: list[Any] = field(default_factory=list)


def run(options: Options) -> Report:
    """Measure the gateway (or nginx, with ``--peers-only``); see the module's docstring."""
    found = Found()
    with ExitStack() as stack:
        engine = stack.enter_context(peers.engine())
        proxy: peers.Server
        if options.peers_only:
            proxy = stack.enter_context(peers.nginx(engine.port))
        else:
            proxy = stack.enter_context(peers.gateway(engine.port, kind=options.kind, extra=PATIENT))
        _read(proxy, 50)  # what is imported or allocated once is no client's cost
        before = Memory.of(proxy)
        for turn in range(options.runs):
            steps = (_alone, _beside) if turn % 2 == 0 else (_beside, _alone)
            for step in steps:
                step(proxy, engine, before, found, options)
            progress(f"run {turn + 1}: {found.per_client[-1] / KIB:.0f} KiB a client")
    return _report(proxy.name, found)


def _read(proxy: peers.Server, tokens: int) -> float:
    """Let the readers read; answer the 99th percentile of their gaps in ms."""
    answer = native.load("stream", proxy.port, streams=READERS, tokens=tokens, pace_us=PACE_US)
    if answer["good"] != READERS:
        raise BenchError(f"a reader's answer was not whole: {answer['broken']}")
    p99: int = answer["gap_ns"]["p99"]
    return p99 / 1e6


def _alone(proxy: peers.Server, engine: peers.Engine, before: Memory, found: Found, options: Options) -> None:
    found.alone_ms.append(_read(proxy, options.some(400)))


def _beside(
    proxy: peers.Server, engine: peers.Engine, before: Memory, found: Found, options: Options
) -> None:
    began = time.monotonic()
    with _stalled(proxy, engine):
        found.filling_s.append(time.monotonic() - began)
        settled = Memory.of(proxy)
        spent = cpu_ns(proxy.pids)
        began = time.monotonic()
        found.beside_ms.append(_read(proxy, options.some(400)))
        found.idle_cores.append((cpu_ns(proxy.pids) - spent) / 1e9 / (time.monotonic() - began))
        # What the gateway itself counts; the rest of its memory is overhead.
        buffered = proxy.statistics()["buffered_bytes"] if isinstance(proxy, peers.Gateway) else None
        most = max(settled, Memory.of(proxy), key=lambda memory: memory.total)
    found.per_client.append((most.total - before.total) / CLIENTS)
    found.pss.append((most.pss - before.pss) / CLIENTS)
    found.kernel.append((most.fields["total"] - before.fields["total"]) / CLIENTS)
    found.raw.append(
        {"pss": most.pss, "pss_before": before.pss, "sockets": most.fields, "buffered_bytes": buffered}
    )


@contextmanager
def _stalled(proxy: peers.Server, engine: peers.Engine) -> Iterator[None]:
    """Keep 200 clients that never read, from when every buffer is full."""
    engine.reset()
    with native.holding(proxy.port, streams=CLIENTS, tokens=EVENTS, ramp_us=2000) as holder:
        _wait_settled(engine)
        yield
        _expect_all(engine.stats()["active"], "were still answered by the engine")
        _expect_all(native.release(holder)["good"], "were still connected")
    if not engine.wait_idle(10):
        raise BenchError("the engine still answers clients that left")
    if isinstance(proxy, peers.Gateway) and not proxy.wait_idle():
        raise BenchError(f"the gateway did not come to rest: {proxy.statistics()}")


def _expect_all(count: int, what: str) -> None:
    if count != CLIENTS:
        raise BenchError(f"only {count} of {CLIENTS} stalled clients {what}: the run proves nothing")


def _wait_settled(engine: peers.Engine) -> None:
    """Wait until every request has arrived and no event was written for half a second."""
    written, since = -1, time.monotonic()

    def settled() -> bool:
        nonlocal written, since
        stats = engine.stats()
        if stats["tokens"] != written:
            written, since = stats["tokens"], time.monotonic()
        return stats["active"] >= CLIENTS and time.monotonic() - since > 0.5

    if not peers.eventually(settled, 90, 0.1):
        raise BenchError("after 90 s stalled clients were still being fed, or had not reached the engine")


def _report(name: str, found: Found) -> Report:
    report = Report("stalled_clients", (name, "median (least-greatest)"))
    alone, beside = statistics.median(found.alone_ms), statistics.median(found.beside_ms)
    report.rows += [
        ("memory per stalled client, KiB", spread(value / KIB for value in found.per_client)),
        ("  of it PSS", spread(value / KIB for value in found.pss)),
        ("  of it kernel, own sockets", spread(value / KIB for value in found.kernel)),
        ("others' gap p99 without them, ms", spread(found.alone_ms, 2)),
        ("others' gap p99 beside them, ms", spread(found.beside_ms, 2)),
        ("filling every buffer, s", spread(found.filling_s)),
        ("CPU beside them, cores", spread(found.idle_cores, 3)),
    ]
    limit = (BUFFER_BYTES + CONSTANT) / KIB
    report.checks += [
        Check.at_most("memory per stalled client, greatest", max(found.per_client) / KIB, limit, "KiB"),
        Check.at_most("gap p99 beside them", beside / alone, GAP_LIMIT, "x without"),
    ]
    report.raw = vars(found).copy()
    return report


if __name__ == "__main__":
    sys.exit(main("stalled_clients"))
