"""How evenly do several gateways load a fleet that each of them sees a second late?

Question: what does choosing by `trio_gateway.fleet.choose` do to peak load, to
rejections and to prefix caches, with 1 to 32 gateways that do not know each other?
Load: simulated (`bench.simulation`), at 80 % of all slots: 16 workers with 8 or 32
slots, answers of 10 s on average, each worker read once a second by each gateway.
Workers are agents, which reject what is over their slots, or bare engines, which queue
it. Every policy plays the same seeded stories.
Measure: requests at the busiest worker by the mean of all, four times a second;
rejections, and what became of the exchanges that met them; hits in prefix caches.
Baseline: random, round-robin, and least-loaded in its strongest form: with credit for
what the gateway itself placed.
Expected: least-loaded is best while one gateway sees everything, and herds as soon as
there are others; random is never good, and never gets worse.

No clock, no process and no socket takes part: the same seed gives the same figures.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import Final

from ..command import Options, main, progress
from ..plot import Chart, Line
from ..report import RESULTS, Check, Report
from ..simulation import POLICIES, Result, Setting, simulate

GATEWAYS: Final = (1, 2, 3, 4, 8, 16, 32)
MANY: Final = 4  # gateways from which on ours must beat least-loaded
SLACK: Final = 1.05  # times least-loaded's peak, with fewer gateways
MOST_PEAK: Final = 1.3  # times the mean
HIT_GAIN: Final = 2.0  # times random choice's hit rate

SECONDS: Final = 160.0
BASE: Final = Setting(gateways=1, agents=True, mean_service=10.0, seconds=SECONDS)
SHARED: Final = dataclasses.replace(BASE, prefixes=1000, skew=0.9, cached=30)
CACHES: Final = ("random", "ours")


@dataclasses.dataclass(frozen=True)
class Fleet:
    """A fleet of the table, and whether the limits are promised for it."""

    name: str
    setting: Setting


PLAIN: Final = (
    Fleet("agents, 8 slots", dataclasses.replace(BASE, slots=8)),
    Fleet("agents, 32 slots", dataclasses.replace(BASE, slots=32)),
    Fleet("engines, 8 slots", dataclasses.replace(BASE, slots=8, agents=False)),
    Fleet("engines, 32 slots", dataclasses.replace(BASE, slots=32, agents=False)),
)
PREFIXED: Final = (
    Fleet("agents, 8 slots, prefixes", dataclasses.replace(SHARED, slots=8)),
    Fleet("agents, 32 slots, prefixes", dataclasses.replace(SHARED, slots=32)),
    Fleet("engines, 32 slots, prefixes", dataclasses.replace(SHARED, slots=32, agents=False)),
)
# Shown, not promised: what is hardest. Read docs/explanation/routing.md for why.
HARD: Final = (
    Fleet("agents, 8 slots, told at once", dataclasses.replace(BASE, slots=8, told="at once")),
    Fleet("engines, 8 slots, told at once", dataclasses.replace(BASE, slots=8, told="at once", agents=False)),
    Fleet("engines, 8 slots, prefixes", dataclasses.replace(SHARED, slots=8, agents=False)),
    Fleet("agents, 8 slots, answers of 5 s", dataclasses.replace(BASE, slots=8, mean_service=5.0)),
    Fleet("agents, 32 slots, bursts of 8", dataclasses.replace(BASE, slots=32, burst=8.0)),
)


def run(options: Options) -> Report:
    report = Report(
        "routing", ["fleet", "gateways", "policy", "peak/mean", "rejected", "failed", "waited", "hits"]
    )
    seeds = range(1 if options.brief else options.runs)
    gateways = (1, 4) if options.brief else GATEWAYS
    for fleet in PLAIN:
        peaks = _measure(report, fleet, gateways, tuple(POLICIES), seeds)
        report.checks += _balance_checks(fleet.name, peaks)
        _draw(report, fleet.name, peaks)
    for fleet in PREFIXED:
        report.checks += _cache_checks(
            fleet.name, _measure(report, fleet, gateways[:1] + gateways[3:], CACHES, seeds)
        )
    for fleet in () if options.brief else HARD:
        policies = CACHES if fleet.setting.prefixes else ("least-loaded", "ours")
        _measure(report, fleet, (2, 4, 32), policies, seeds)
    report.notes.append(_where_absorbed(report))
    report.notes.append(f"the last {len(HARD)} fleets are shown and not checked; docs/explanation/routing.md")
    return report


def _where_absorbed(report: Report) -> str:
    ours = [figures for name, figures in report.raw.items() if name.endswith("/ours")]
    elsewhere, again = (sum(figures[name] for figures in ours) for name in ("absorbed", "again"))
    return (
        f"ours, all fleets: of {elsewhere + again} rejected and served exchanges, {again} waited and were "
        "served by the worker that had rejected them, which had room by then; all others elsewhere"
    )


@dataclasses.dataclass(frozen=True)
class Figures:
    """Means over the seeds."""

    peak_to_mean: float
    hits: float
    served: int
    rejected: int
    absorbed: int
    again: int
    failed: int
    wrongly: int
    waited: int

    @classmethod
    def of(cls, results: Sequence[Result]) -> Figures:
        return cls(
            statistics.fmean(result.peak_to_mean for result in results),
            statistics.fmean(result.hits for result in results),
            *(
                sum(getattr(result, name) for result in results)
                for name in ("served", "rejected", "absorbed", "again", "failed", "wrongly", "waited")
            ),
        )


Measured = dict[tuple[int, str], Figures]


def _measure(
    report: Report, fleet: Fleet, gateways: Sequence[int], policies: Sequence[str], seeds: Sequence[int]
) -> Measured:
    measured: Measured = {}
    for count in gateways:
        progress(f"{fleet.name}, {count} gateways")
        for policy in policies:
            setting = dataclasses.replace(fleet.setting, gateways=count)
            figures = Figures.of([simulate(setting, policy, seed) for seed in seeds])
            measured[count, policy] = figures
            report.rows.append(_row(fleet, count, policy, figures))
            report.raw[f"{fleet.name}/{count}/{policy}"] = dataclasses.asdict(figures)
    return measured


def _row(fleet: Fleet, count: int, policy: str, figures: Figures) -> list[str]:
    def share(number: int) -> str:
        return f"{100 * number / max(figures.served, 1):.2f} %"

    hits = f"{100 * figures.hits:.1f} %" if fleet.setting.prefixes else "-"
    return [
        fleet.name,
        str(count),
        policy,
        f"{figures.peak_to_mean:.3f}",
        share(figures.rejected) if fleet.setting.agents else "-",
        str(figures.failed),
        share(figures.waited),
        hits,
    ]


def _balance_checks(name: str, measured: Measured) -> Iterator[Check]:
    for (count, policy), figures in measured.items():
        if policy != "ours":
            continue
        limit = measured[count, "least-loaded"].peak_to_mean * (1 if count >= MANY else SLACK)
        what = f"{name}, {count} gateways: "
        if count >= MANY:
            below = figures.peak_to_mean < limit
            yield Check(
                what + "peak, below least-loaded's", figures.peak_to_mean, limit, "x mean", below, "below"
            )
        else:
            yield Check.at_most(what + "peak, by least-loaded's", figures.peak_to_mean, limit, "x mean")
        yield Check.at_most(what + "peak", figures.peak_to_mean, MOST_PEAK, "x mean")
        yield from _absorbed(what, figures)


def _absorbed(what: str, figures: Figures) -> Iterator[Check]:
    yield Check.exactly(what + "failed while a worker had a free slot", figures.wrongly, 0, "exchanges")


def _cache_checks(name: str, measured: Measured) -> Iterator[Check]:
    for (count, policy), figures in measured.items():
        if policy != "ours":
            continue
        what = f"{name}, {count} gateways: "
        gain = figures.hits / measured[count, "random"].hits
        yield Check.at_least(what + "hit rate, by random choice's", gain, HIT_GAIN, "x")
        below = figures.peak_to_mean < MOST_PEAK
        yield Check(what + "peak", figures.peak_to_mean, MOST_PEAK, "x mean", below, "below")
        yield from _absorbed(what, figures)


def _draw(report: Report, name: str, measured: Measured) -> None:
    """Leave a picture beside the figures."""
    counts = sorted({count for count, _ in measured})
    lines = [
        Line(policy, [(count, measured[count, policy].peak_to_mean) for count in counts])
        for policy in POLICIES
    ]
    chart = Chart(f"Peak-to-mean load at 80 %: {name}", "gateways", "busiest worker / mean", lines, MOST_PEAK)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"routing-{name.replace(', ', '-').replace(' ', '-')}.svg"
    path.write_text(chart.svg())
    report.notes.append(f"plotted in {path.name}")


if __name__ == "__main__":
    sys.exit(main("routing"))
