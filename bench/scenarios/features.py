"""What do keys, rates, fair queues and records cost a buffered request?

Question    How much more CPU does the gateway spend on a buffered request when all that it
            knows of tenants is on, than when all of it is off?
Load        64 kept connections, answers of 1 KB after 10 to 30 ms, as in `overhead`.
Gateways    off: one anonymous tenant, no database. on: four tenants of weights 1 to 4, each
            with two hashed keys, bounds of concurrency and of requests and tokens a minute for
            tenant and key (too high to be reached), a SQLite database behind its journal.
            Both twice: with a slot for everybody, and with 24 slots, where most requests wait
            in the queues. All four stay up; turns are short, interleaved and turned round
            against drift.
Engines     bench/native/engine.c, one for all.
Measures    user + system CPU of the gateway's process, all threads, from before the first
            request until the database has the last record, divided by the requests.
Baseline    the gateway with all off, in the same turn.
Expect      at most 1.3 times that (the median of what the turns say), waiting or not.
Run         make bench SCENARIO=features     (about 5 min on 2 cores)
Output      bench/results/<date>-features-<commit>.json, with machine facts.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Final

from .. import native, peers
from ..command import Options, main, progress
from ..processes import BenchError, cpu_ns
from ..report import Check, Report, spread
from ..setups import DATABASE, tenants_with_keys

LIMIT: Final = 1.3  # times the gateway with all off
CONNECTIONS: Final = 64
ROOM: Final = 1024  # slots
LITTLE_ROOM: Final = 24  # slots: fewer than requests that the engine would answer at a time
REQUESTS: Final = 3_000
TURNS_A_RUN: Final = 3
REPLAYED_S: Final = 1.5  # seconds in which the last records get into the database


@dataclass(frozen=True)
class Subject:
    """A gateway, and the keys that open it; ``pair``: which of the others it is compared with."""

    name: str
    pair: str
    gateway: peers.Gateway
    keys: list[str]


@dataclass(frozen=True)
class Cost:
    """One turn of one gateway.

    Attributes:
        unit_us: CPU of the gateway per request, in us.
        share: of one core that it used while the load ran.
    """

    unit_us: float
    share: float


def run(options: Options) -> Report:
    """Measure the gateways; see the module's docstring."""
    costs: dict[tuple[str, str], list[Cost]] = {}
    with ExitStack() as stack:
        engine = stack.enter_context(peers.engine())
        subjects = [
            stack.enter_context(make(pair, engine.port, slots))
            for pair, slots in (("at once", ROOM), ("waiting", LITTLE_ROOM))
            for make in (_off, _on)
        ]
        for turn in range(options.runs * TURNS_A_RUN):
            for subject in subjects if turn % 2 == 0 else reversed(subjects):
                cost = measure(subject, options)
                costs.setdefault((subject.pair, subject.name), []).append(cost)
                progress(f"turn {turn + 1} {subject.name}, {subject.pair}: {cost.unit_us:.1f} us")
    return _report(costs)


@contextmanager
def _off(pair: str, engine_port: int, slots: int) -> Iterator[Subject]:
    with peers.gateway(engine_port, slots=slots) as gateway:
        yield Subject("off", pair, gateway, [])


@contextmanager
def _on(pair: str, engine_port: int, slots: int) -> Iterator[Subject]:
    tenants, keys = tenants_with_keys(ROOM)
    with tempfile.TemporaryDirectory(prefix="bench-features-") as folder:
        extra = tenants + DATABASE.format(folder=folder)
        with peers.gateway(engine_port, slots=slots, extra=extra) as gateway:
            yield Subject("on", pair, gateway, keys)


def measure(subject: Subject, options: Options) -> Cost:
    """Load one gateway, and wait until what it does afterwards is done."""
    gateway, requests = subject.gateway, options.some(REQUESTS)
    before = cpu_ns(gateway.pids)
    answer = native.load(
        "buffered",
        gateway.port,
        gateway.pids,
        streams=CONNECTIONS,
        requests=requests,
        delay_us=20_000,
        vary=1,
        keys=",".join(subject.keys),
    )
    time.sleep(REPLAYED_S)
    spent = cpu_ns(gateway.pids) - before
    if answer["good"] != requests:
        raise BenchError(f"of {requests} answers {answer['good']} were whole: {answer['broken']}")
    ledger = gateway.statistics()["ledger"]
    if subject.keys and (ledger["behind_bytes"] or ledger["trouble"]):
        raise BenchError(f"the records are not in the database after {REPLAYED_S} s: {ledger}")
    return Cost(spent / requests / 1000, sum(answer["cpu_ns"]) / answer["window_ns"])


def _report(costs: dict[tuple[str, str], list[Cost]]) -> Report:
    report = Report("features", ("CPU a request, us", "all off", "all on", "times off", "limit"))
    for pair in dict.fromkeys(pair for pair, _ in costs):
        off, on = ([cost.unit_us for cost in costs[pair, name]] for name in ("off", "on"))
        ratios = [dear / cheap for dear, cheap in zip(on, off, strict=True)]
        report.rows.append((pair, spread(off), spread(on), spread(ratios, 2), f"{LIMIT}"))
        ratio = statistics.median(ratios)
        report.checks.append(Check.at_most(f"CPU a request, {pair}", ratio, LIMIT, "times off"))
    for (pair, name), turns in costs.items():
        share = statistics.median(turn.share for turn in turns)
        report.notes.append(f"{name}, {pair}: {share:.0%} of one core")
    report.raw = {
        f"{name}, {pair}": [asdict(turn) for turn in turns] for (pair, name), turns in costs.items()
    }
    return report


if __name__ == "__main__":
    sys.exit(main("features"))
