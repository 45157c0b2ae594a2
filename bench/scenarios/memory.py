"""What does somebody cost in memory who is idle, waits, is served, or does not read?

Question    How much memory does the gateway spend on a kept connection without a request, on a request
            that waits for a slot, on a stream under way, and on a stream whose client does not read?
Load        idle: 1,000 connections that had one answer. waiting: 1,000 requests before the one slot of a
            worker, which is taken. active: 1,000 streams at one token a second. stalled: 200 streams of
            40,000 events as fast as the socket takes them, of which no byte is read.
Engines     bench/native/engine.c.
Gateway     in the full setup (bench/setups.py), a fresh one for each figure, since Python returns little
            of what it once had; `delivery.stall_timeout` and `max_lag` beyond the run.
Measures    PSS of the gateway's process tree, once it has come to rest, less the same after 50 requests of
            that kind that ended, over their number; and beside it the kernel's memory of the gateway's own
            sockets (skmem of `ss`, see `stalled_clients`), which its clients' and engines' speed decides.
            Requests are about 300 bytes long.
Baseline    none.
Expect      a waiting request under 20 KiB, an active stream under 40 KiB, a stalled one at most
            delivery.buffer_bytes (256 KiB) + 64 KiB. An idle connection has no limit here.
Run         make bench SCENARIO=memory     (about 4 min on 2 cores)
Output      bench/results/<date>-memory-<commit>.json, with machine facts.
"""

from __future__ import annotations

import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Final

from .. import native, peers, setups
from ..command import Options, main, progress
from ..processes import BenchError, need_descriptors, pss_bytes, socket_memory
from ..report import Check, Report, with_quartiles

KIB: Final = 1024
SOME: Final = 1_000
STALLED: Final = 200
EVENTS: Final = 40_000
WARM: Final = 50
SECOND_US: Final = 1_000_000
REST_S: Final = 1.5  # until nothing more is allocated for what has begun
BUFFER_BYTES: Final = 256 * KIB
LIMITS: Final = {"waiting": 20 * KIB, "active": 40 * KIB, "stalled": BUFFER_BYTES + 64 * KIB}
PATIENT: Final = f"""
[delivery]
buffer_bytes = {BUFFER_BYTES}
stall_timeout = 300
max_lag = 300
"""


@dataclass(frozen=True)
class Held:
    """Bytes for each of those that were there: of the process, and of the kernel for its sockets."""

    process: float
    kernel: float


Crowd = Callable[[peers.Gateway, peers.Engine, int], AbstractContextManager[None]]


def run(options: Options) -> Report:
    """Measure all kinds; see the module's docstring."""
    need_descriptors(4 * SOME)
    found: dict[str, list[Held]] = {}
    with peers.engine() as engine:
        for turn in range(options.runs):
            for name in options.chosen(CROWDS):
                found.setdefault(name, []).append(_measure(name, engine, options))
                progress(f"run {turn + 1}: {name} {found[name][-1].process / KIB:.1f} KiB")
    return _report(found)


def _measure(name: str, engine: peers.Engine, options: Options) -> Held:
    number = options.some(STALLED if name == "stalled" else SOME)
    slots = 1 if name == "waiting" else 4 * SOME
    with setups.start("full", engine.port, slots=slots, extra=PATIENT) as gateway:
        native.load("stream", gateway.port, (), streams=WARM, tokens=10, **gateway.load)
        time.sleep(REST_S)
        pids = gateway.pids
        process, kernel = pss_bytes(pids), socket_memory(pids)["total"]
        engine.reset()
        with CROWDS[name](gateway, engine, number):
            time.sleep(REST_S)
            held = Held(
                (pss_bytes(pids) - process) / number, (socket_memory(pids)["total"] - kernel) / number
            )
    if not engine.wait_idle(20):
        raise BenchError(f"{name}: the engine still answers somebody")
    return held


# Who is there -----------------------------------------------------------------------------------------------


@contextmanager
def idle(gateway: peers.Gateway, engine: peers.Engine, number: int) -> Iterator[None]:
    """Keep connections that had one answer."""
    request = b"GET /livez HTTP/1.1\r\nhost: bench\r\n\r\n"
    with ExitStack() as stack:
        for _ in range(number):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", gateway.port), timeout=10))
            client.sendall(request)
            if not client.recv(4096).startswith(b"HTTP/1.1 200"):
                raise BenchError("a connection got no answer")
        yield


@contextmanager
def waiting(gateway: peers.Gateway, engine: peers.Engine, number: int) -> Iterator[None]:
    """Have requests wait behind one that takes its time."""
    with native.holding(
        gateway.port, streams=number + 1, delay_us=600 * SECOND_US, ramp_us=500, **gateway.load
    ):
        _expect(lambda: gateway.statistics()["waiting"] == number, f"{number} did not come to wait")
        yield


@contextmanager
def active(gateway: peers.Gateway, engine: peers.Engine, number: int) -> Iterator[None]:
    """Have streams under way that are read."""
    options = {"streams": number, "tokens": 600, "pace_us": SECOND_US, "ramp_us": 1_000, **gateway.load}
    with native.loading("stream", gateway.port, (), measured=0, **options):
        _expect(
            lambda: engine.stats()["tokens"] > 3 * number and gateway.statistics()["running"] == number,
            f"{number} streams did not get going",
        )
        yield


@contextmanager
def stalled(gateway: peers.Gateway, engine: peers.Engine, number: int) -> Iterator[None]:
    """Have streams that nobody reads, from when every buffer is full."""
    with native.holding(gateway.port, streams=number, tokens=EVENTS, ramp_us=2_000, **gateway.load):
        written, since = -1, time.monotonic()

        def settled() -> bool:
            nonlocal written, since
            stats = engine.stats()
            if stats["tokens"] != written:
                written, since = stats["tokens"], time.monotonic()
            return stats["active"] >= number and time.monotonic() - since > 0.5

        _expect(settled, "stalled streams were still being fed")
        yield


def _expect(holds: Callable[[], bool], otherwise: str) -> None:
    if not peers.eventually(holds, 60, 0.2):
        raise BenchError(otherwise)


CROWDS: Final[dict[str, Crowd]] = {"idle": idle, "waiting": waiting, "active": active, "stalled": stalled}
WORDS: Final = {
    "idle": "idle connection",
    "waiting": "waiting request",
    "active": "active stream",
    "stalled": "stalled stream",
}


# Report -----------------------------------------------------------------------------------------------------


def _report(found: dict[str, list[Held]]) -> Report:
    report = Report("memory", ("one of them, KiB", "gateway", "kernel, own sockets", "limit"))
    for name, told in found.items():
        process = [held.process / KIB for held in told]
        limit = LIMITS.get(name)
        report.rows.append(
            (
                WORDS[name],
                with_quartiles(process),
                with_quartiles([held.kernel / KIB for held in told]),
                "-" if limit is None else f"{limit // KIB}",
            )
        )
        if limit is not None:
            median = statistics.median(process)
            report.checks.append(Check.at_most(f"memory of one {WORDS[name]}", median, limit / KIB, "KiB"))
    report.raw = {name: [asdict(held) for held in told] for name, told in found.items()}
    return report


if __name__ == "__main__":
    sys.exit(main("memory"))
