"""What would happen with two hundred replicas and five thousand workers?

Question    How many replicas choose the same worker before any of them can know, and what do the
            workers reject for it? What do tenants get who are connected to some replicas only, with
            a store that all replicas ask, and without one? How often is the store asked? Do those
            who were refused by many replicas come back in turn? And what does one choice among so
            many workers cost?
Load        simulated, seeds fixed: fleets up to 200 replicas and 5,000 workers of 8 slots at 80 %,
            answers of 10 s, each worker read once a second by each replica (`bench.late_views`);
            floods of 12 tenants of weights 1, 2 and 4 (`bench.shared_order`); replicas that take
            turns at a store (`bench.store_turns`); a burst of ten times capacity in one second.
            All of them decide with the package's own cores.
Measures    crowds: replicas that chose one worker within one snapshot's age, wherever any did;
            attempts that workers rejected; Jain's index of tokens for their weight over tenants
            and all replicas; turns a second; returns in the busiest second by the capacity of one.
Baseline    least-loaded in its strongest form, and random choice; slots divided by number.
Expect      ours: no exchange fails while a worker has a free slot, and crowds and rejections below
            least-loaded's. With a store Jain's index is at least 0.97 wherever tenants connect.
Run         make bench SCENARIO=scale_on_paper      (about 2 min; needs one core, nothing else)
Output      bench/results/<date>-scale_on_paper-<commit>.json, scale-on-paper-crowds.svg and
            scale-on-paper-fairness.svg. docs/explanation/scale-on-paper.md says what it means.

No clock, process or socket takes part but in two parts, which are measured and not checked: what
a turn costs a real redis-server, if there is one, and what one choice costs.
"""

from __future__ import annotations

import dataclasses
import math
import random
import sys
import time
from typing import Final

import trio

from trio_gateway.admission.cores import DrainRate, Returns
from trio_gateway.fleet import Fleet, Route
from trio_gateway.fleet.cores import Snapshot, Source
from trio_gateway.testing import make_request, make_worker

from .. import store_costs
from ..command import Options, main, progress
from ..late_views import Crowds, crowds
from ..plot import Chart, Line
from ..report import RESULTS, Check, Report
from ..shared_order import Flood, Shares, flooded
from ..simulation import Setting
from ..store_costs import Crowded
from ..store_turns import LOOK, Asking, turns
from ..tenants import jain

SEED: Final = 7
BASE: Final = Setting(gateways=1, agents=True, slots=8, mean_service=10.0)
# Replicas, workers, simulated seconds: as many as show it.
FLEETS: Final = ((2, 50, 40.0), (8, 200, 20.0), (50, 500, 8.0), (200, 1000, 3.0), (200, 5000, 1.2))
AGES: Final = (0.25, 0.5, 1.0, 2.0, 5.0)
LARGEST_RANDOM: Final = 500  # workers up to which random choice is played too: it says the same beyond
REPLICAS: Final = (1, 3, 10, 50, 200)
HOMES: Final = (1, 3)
LEAST_JAIN: Final = 0.97
CROWDED: Final = (
    *(Crowded(replicas=3, workers=8), Crowded(3, 200), Crowded(10, 50)),
    *(Crowded(replicas=20, workers=8), Crowded(20, 200), Crowded(50, 50)),
)
OVER: Final = 10  # times capacity, in the burst
BURST_AT: Final = 50.0  # seconds after which the burst comes
ANSWER: Final = 10.0  # seconds; each as long as any other, there
MOST_RETURNS: Final = 1.5  # times capacity
MOST_REJECTED: Final = 0.06  # of attempts, in any fleet with readings of a second


def run(options: Options) -> Report:
    report = Report("scale_on_paper", ["part", "situation", "result"])
    for part in (_stampedes, _ages, _fairness, _dividing, _store, _turns_cost, _returns, _choosing):
        progress(part.__name__.strip("_"))
        part(report, options)
    return report


# -- crowds


def _setting(replicas: int, workers: int, seconds: float, **others: float | str) -> Setting:
    setting = dataclasses.replace(BASE, gateways=replicas, workers=workers, seconds=seconds)
    return dataclasses.replace(setting, **others)  # type: ignore[arg-type]


def _told(found: Crowds) -> str:
    rejected = 100 * found.rejected / max(found.attempts, 1)
    return (
        f"crowds of {found.mean:.2f}, {found.quantile(0.99)} at the 99th percentile, "
        f"{found.largest} at most; {rejected:.1f} % rejected, {found.failed} failed of {found.attempts}"
    )


def _stampedes(report: Report, options: Options) -> None:
    lines: dict[str, list[tuple[float, float]]] = {
        "random": [],
        "least-loaded": [],
        "ours, of all": [],
        "ours": [],
    }
    for replicas, workers, seconds in FLEETS[:2] if options.brief else FLEETS:
        found: dict[str, Crowds] = {}
        for policy in lines:
            if policy == "random" and workers > LARGEST_RANDOM:
                continue
            found[policy] = crowds(_setting(replicas, workers, seconds), policy, SEED)
            where = f"{replicas} replicas, {workers} workers, {policy}"
            report.rows.append(["crowds", where, _told(found[policy])])
            report.raw[f"crowds/{where}"] = dataclasses.asdict(found[policy]) | {"sizes": None}
            lines[policy].append((replicas * workers, found[policy].mean))
        _check_crowds(report, f"{replicas} replicas, {workers} workers", found)
    chart = Chart(
        "Replicas that choose one worker within a second, at 80 %",
        "replicas times workers",
        "crowd",
        [Line(name, points) for name, points in lines.items()],
        1.0,
    )
    _draw(report, "crowds", chart)


def _check_crowds(report: Report, where: str, found: dict[str, Crowds]) -> None:
    ours, least = found["ours"], found["least-loaded"]
    what = f"{where}: "
    report.checks += [
        Check.exactly(what + "failed while a worker had a free slot", ours.wrongly, 0, "exchanges"),
        Check.at_most(what + "mean crowd, by least-loaded's", ours.mean, least.mean * 1.05, "replicas"),
        Check.at_most(what + "rejected", ours.rejected / ours.attempts, MOST_REJECTED, "of attempts"),
    ]


def _ages(report: Report, options: Options) -> None:
    for age in AGES[2:3] if options.brief else AGES:
        for told in ("apart", "at once"):
            setting = _setting(50, 200, max(4 * age, 6.0), period=age, told=told)
            found = crowds(setting, "ours", SEED)
            where = f"50 replicas, 200 workers, read every {age:g} s, {told}"
            report.rows.append(["ages", where, _told(found)])
            report.raw[f"ages/{where}"] = dataclasses.asdict(found) | {"sizes": None}


# -- tenants


def _fairness(report: Report, options: Options) -> None:
    counts = REPLICAS[:2] if options.brief else REPLICAS
    lines: dict[str, list[tuple[float, float]]] = {}
    for homes in (*HOMES, 0):
        for store in (False, True):
            name = ("store" if store else "divided") + (f", {homes} each" if homes else ", everywhere")
            for replicas in counts:
                shares = flooded(_flood(replicas, homes, store=store, brief=options.brief), SEED)
                index = jain(list(shares.service.values()))
                where = f"{replicas} replicas, {name}"
                report.rows.append(["fairness", where, _got(shares, index)])
                report.raw[f"fairness/{where}"] = {"jain": index, "busy": shares.busy, "worst": shares.worst}
                lines.setdefault(name, []).append((replicas, index))
                if store:
                    report.checks.append(Check.at_least(f"{where}: Jain's index", index, LEAST_JAIN, ""))
    shown = (
        "divided, 1 each",
        "divided, 3 each",
        "divided, everywhere",
        "store, 1 each",
        "store, everywhere",
    )
    chart = Chart(
        "Jain's index of tokens for their weight, 12 tenants that flood",
        "replicas",
        "index",
        [Line(name, lines[name]) for name in shown],
        LEAST_JAIN,
    )
    _draw(report, "fairness", chart)


def _flood(replicas: int, homes: int, *, store: bool, brief: bool) -> Flood:
    slots = max(400, 2 * replicas)
    connected = min(homes or replicas, replicas)
    return Flood(replicas, slots=slots, homes=connected, store=store, seconds=30.0 if brief else 80.0)


def _got(shares: Shares, index: float) -> str:
    worst = f"who has least has {shares.worst:.2f} of the mean"
    return f"Jain's index {index:.3f}; {worst}; slots in use {100 * shares.busy:.0f} %"


def _dividing(report: Report, options: Options) -> None:
    """What it costs to divide slots by number, though everybody is connected everywhere."""
    for slots, replicas in ((800, 4), (800, 50), (800, 200), (40_000, 200)):
        one, part = _waits(slots, 0.8), _waits(slots // replicas, 0.8)
        result = f"{100 * part:.1f} % wait at 80 %, of all slots together {100 * one:.1f} %"
        report.rows.append(["dividing", f"{slots} slots by {replicas}: {slots // replicas} each", result])
        report.raw[f"dividing/{slots}/{replicas}"] = {"divided": part, "together": one}


def _waits(slots: int, load: float) -> float:
    """Erlang's C: the share that finds all slots in use, at a Poisson process of requests."""
    blocked = 1.0
    for count in range(1, slots + 1):
        blocked = load * slots * blocked / (count + load * slots * blocked)
    return blocked / (1 - load * (1 - blocked))


# -- the store


def _store(report: Report, options: Options) -> None:
    for replicas, rate in ((3, 50.0), (20, 20.0), (50, 16.0), (200, 16.0)):
        for waits in (False, True):
            found = turns(Asking(rate, waits=waits, seconds=10.0 if options.brief else 60.0), SEED)
            how = "somebody waits always" if waits else "nobody waits"
            where = f"{replicas} replicas of {rate:g} requests a second, {how}"
            result = (
                f"{replicas * found.per_second:,.0f} turns a second, "
                f"{found.per_second / rate:.1f} a request; a grant after {1000 * found.delay:.1f} ms"
            )
            report.rows.append(["store", where, result])
            report.raw[f"store/{where}"] = dataclasses.asdict(found)


def _turns_cost(report: Report, options: Options) -> None:
    """Measure at a real store what a turn costs it while everybody waits."""
    if store_costs.server() is None:
        report.notes.append("no redis-server is installed: what a turn costs was not measured")
        return
    with store_costs.store() as store:
        for crowded in CROWDED[:2] if options.brief else CROWDED:
            spent = store.turn_while_crowded(crowded)
            asked = crowded.replicas / (LOOK + 0.001)
            counts = f"{crowded.replicas} replicas, {crowded.workers} workers"
            where = f"{counts}, {crowded.tenants} tenants wait at each"
            result = f"a turn costs the store {1000 * spent:.2f} ms; {asked * spent:.2f} cores for all turns"
            report.rows.append(["turns", where, result])
            report.raw[f"turns/{where}"] = spent


# -- who comes back


def _returns(report: Report, options: Options) -> None:
    """Let a burst be refused by many replicas, each of which promises places for itself."""
    pace = 200.0  # requests a second that all slots together can serve
    for replicas in (1, 10, 50, 200):
        busiest = _busiest_second(replicas, pace)
        report.rows.append(
            [
                "returns",
                f"{replicas} replicas, a burst of {OVER * pace:,.0f}",
                f"{busiest:.2f} of capacity at most",
            ]
        )
        report.raw[f"returns/{replicas}"] = busiest
        report.checks.append(
            Check.at_most(f"{replicas} replicas: returns in one second", busiest, MOST_RETURNS, "x capacity")
        )


def _busiest_second(replicas: int, pace: float) -> float:
    """The most that come back in one second, by the capacity of one."""
    dice = random.Random(SEED)
    queues = [Returns() for _ in range(replicas)]
    rates = [_learnt(pace / replicas) for _ in range(replicas)]
    seconds: dict[int, int] = {}
    for number in range(int(OVER * pace)):
        now = BURST_AT + number / (OVER * pace)
        at = dice.randrange(replicas)
        wait = queues[at].book(0, rates[at].pace(now), now, dice.random())
        back = int(now + wait)
        seconds[back] = seconds.get(back, 0) + 1
    return max(seconds.values()) / pace


def _learnt(pace: float) -> DrainRate:
    """A replica's measure of how fast its slots come free, after `BURST_AT` seconds at that pace."""
    rate = DrainRate()
    slots = max(round(ANSWER * pace), 1)
    for turn in range(int(BURST_AT / ANSWER)):
        for slot in range(slots):
            now = ANSWER * (turn + slot / slots)
            if turn:
                rate.returned(now, ANSWER)
            rate.granted(now)
    return rate


# -- what one choice costs


def _choosing(report: Report, options: Options) -> None:
    """Measure a placement's choice in the running gateway's own registry, by CPU time."""
    for workers in (16, 100, 500, 1000) if options.brief else (16, 100, 500, 1000, 5000):
        for session in (None, "session"):
            spent = trio.run(_cost_of_choosing, workers, session)
            how = "by its key" if session else "without a key"
            report.rows.append(
                ["choosing", f"one of {workers} workers, {how}", f"{1000 * spent:.2f} ms of CPU"]
            )
            report.raw[f"choosing/{workers}/{how}"] = spent


async def _cost_of_choosing(workers: int, session: str | None) -> float:  # noqa: ASYNC124  (asks Trio for the time)
    fleet = Fleet(
        [make_worker(f"w{n:04d}", slots=8) for n in range(workers)], [Route("m1", "m1")], trio.current_time
    )
    now = trio.current_time()
    for number, book in enumerate(fleet.books.values()):
        book.snapshot = Snapshot(
            seq=1, source=Source.HEARTBEAT, running=6, taken_at=now - number / workers, slots=8
        )
    request = make_request(session=session)
    fleet.choose(request, frozenset())
    rounds = max(3, math.ceil(2000 / workers))
    begun = time.process_time()
    for _ in range(rounds):
        fleet.choose(request, frozenset())
    return (time.process_time() - begun) / rounds


def _draw(report: Report, name: str, chart: Chart) -> None:
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"scale-on-paper-{name}.svg"
    path.write_text(chart.svg())
    report.notes.append(f"plotted in {path.name}")


if __name__ == "__main__":
    sys.exit(main("scale_on_paper"))
