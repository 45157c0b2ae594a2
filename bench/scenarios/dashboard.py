"""What does it cost the gateway that an operator looks at a thousand requests?

Question    How much CPU does one snapshot of the live feed cost, and the open dashboard a second?
Load        1,000 streams: 600 hold the slots and have had their first token, 400 wait. Nothing else
            happens, so that what is spent is spent on who looks.
Lookers     nobody; feed: one that reads the live feed, a snapshot a second; page: one that asks as the
            page at / does: the feed, 50 requests every 2 s, tenants and queues every 4 s, the
            self-audit every 15 s, each on connections that are kept.
Measures    user + system CPU of the gateway's process, all threads, over windows of 12 s, interleaved
            and turned round against drift; what nobody costs is taken off.
Baseline    nobody, in the same turn.
Expect      at most 10 ms a snapshot (the median of what the turns say).
Run         make bench SCENARIO=dashboard     (about 3 min on 2 cores)
Output      bench/results/<date>-dashboard-<commit>.json, with machine facts.
"""

from __future__ import annotations

import http.client
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Final

from .. import native, peers
from ..command import Options, main, progress
from ..processes import BenchError, cpu_ns
from ..report import Check, Report, spread

LIMIT_MS: Final = 10.0
SLOTS: Final = 600
STREAMS: Final = 1000
WINDOW_S: Final = 12.0
SETTLE_S: Final = 1.0  # seconds after a looker has come or gone
SILENCE_US: Final = 600_000_000  # between the tokens of a stream
QUIET: Final = """
[stream]
heartbeat_after = 0
"""
# What the page asks for, and after how many seconds again.
ASKED: Final = (("/requests?limit=50&offset=0", 2), ("/tenants", 4), ("/queues", 4), ("/self-audit", 15))


@dataclass(frozen=True)
class Turn:
    """What one window said.

    Attributes:
        spent_ms: CPU of the gateway a second.
        snapshots: that were read.
        page_bytes: of the largest answer to a question.
    """

    spent_ms: float
    snapshots: int
    page_bytes: int


class Looker:
    """Reads what the page would, in threads of this process."""

    def __init__(self, admin_port: int, asked: tuple[tuple[str, int], ...]) -> None:
        self.snapshots = 0
        self.page_bytes = 0
        self._port = admin_port
        self._asked = asked
        self._over = threading.Event()

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Look for the length of the block."""
        threads = [threading.Thread(target=each) for each in (self._follow, self._ask)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            for thread in threads:
                thread.join()

    def _follow(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
        connection.request("GET", "/admin/v1/feed")
        with connection.getresponse() as answer:
            while not self._over.is_set():
                self.snapshots += answer.readline() == b"event: snapshot\n"
        connection.close()

    def _ask(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
        second = 0
        while not self._over.wait(1.0):
            second += 1
            for path, every in self._asked:
                if second % every == 0:
                    connection.request("GET", f"/admin/v1{path}")
                    self.page_bytes = max(self.page_bytes, len(connection.getresponse().read()))
        connection.close()


LOOKERS: Final[dict[str, Callable[[int], Looker] | None]] = {
    "nobody": None,
    "feed": lambda port: Looker(port, ()),
    "page": lambda port: Looker(port, ASKED),
}


def run(options: Options) -> Report:
    """Measure each looker; see the module's docstring."""
    turns: dict[str, list[Turn]] = {name: [] for name in LOOKERS}
    streams, slots = options.some(STREAMS), options.some(SLOTS)
    with peers.engine() as engine, peers.gateway(engine.port, slots=slots, extra=QUIET) as gateway:
        for turn in range(options.runs):
            # Anew in each turn, which is over before a waiter has waited too long.
            with native.holding(gateway.port, streams=streams, tokens=100, pace_us=SILENCE_US, ramp_us=1000):
                _expect_active(gateway, slots, streams - slots)
                for name in list(LOOKERS) if turn % 2 == 0 else list(LOOKERS)[::-1]:
                    seen = measure(gateway, name)
                    turns[name].append(seen)
                    progress(f"turn {turn + 1} {name}: {seen.spent_ms:.2f} ms a second")
                _expect_active(gateway, slots, streams - slots)
            if not gateway.wait_idle():
                raise BenchError("the streams of the turn before have not ended")
    return _report(turns)


def _expect_active(gateway: peers.Gateway, running: int, waiting: int) -> None:
    def active() -> tuple[int, int]:
        told = gateway.statistics()
        return told["running"], told["waiting"]

    if not peers.eventually(lambda: active() == (running, waiting), 30, 0.5):
        raise BenchError(f"{running} should run and {waiting} wait, but {active()} do")


def measure(gateway: peers.Gateway, name: str) -> Turn:
    """Let somebody look for a while."""
    make = LOOKERS[name]
    if make is None:
        time.sleep(SETTLE_S)
        return Turn(_spent_ms(gateway), 0, 0)
    looker = make(gateway.admin_port)
    with looker.looking():
        time.sleep(SETTLE_S)
        before = looker.snapshots
        spent = _spent_ms(gateway)
        snapshots = looker.snapshots - before
    if abs(snapshots - WINDOW_S) > 1:
        raise BenchError(f"{snapshots} snapshots came within {WINDOW_S:g} s")
    return Turn(spent, snapshots, looker.page_bytes)


def _spent_ms(gateway: peers.Gateway) -> float:
    before, began = cpu_ns(gateway.pids), time.monotonic()
    time.sleep(WINDOW_S)
    return (cpu_ns(gateway.pids) - before) / 1e6 / (time.monotonic() - began)


def _report(turns: dict[str, list[Turn]]) -> Report:
    report = Report("dashboard", ("CPU of the gateway", "ms a second", "more than nobody"))
    idle = [turn.spent_ms for turn in turns["nobody"]]
    for name, seen in turns.items():
        more = [turn.spent_ms - base for turn, base in zip(seen, idle, strict=True)]
        report.rows.append((name, spread([turn.spent_ms for turn in seen], 2), spread(more, 2)))
        if name == "feed":
            cost = statistics.median(more)  # one snapshot a second
            report.checks.append(Check.at_most("CPU a snapshot", cost, LIMIT_MS, "ms"))
    largest = max(turn.page_bytes for turn in turns["page"])
    report.notes.append(f"the largest answer that the page asks for has {largest:,} bytes")
    report.raw = {name: [asdict(turn) for turn in seen] for name, seen in turns.items()}
    return report


if __name__ == "__main__":
    sys.exit(main("dashboard"))
