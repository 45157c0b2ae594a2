"""Does one tenant's flood slow another, and do floods share by their weights?

Question    When three tenants ask for three times what there is, each of them, does each get
            its weight's share, and do small tenants beside them still hardly wait? What
            do batch floods leave to interactive callers, and interactive floods to batch?
Load        At one gateway with 10 slots, which serves about 15 requests a second; arrivals are
            Poisson's, where nothing else is said. *floods*: three tenants of weights 1, 2 and
            4, each with three times capacity and with answers of other lengths, and six small ones;
            each of these asks once in 1.3 to 3.8 s, and so at no moment for more than its share.
            *batch flood*: two batch tenants with three times capacity each, and three
            interactive ones with a seventh of capacity each. *interactive flood*: two interactive
            tenants with three times capacity each, and two batch tenants. Who is refused asks
            no sooner for it. Floods wait far longer than `admission.promote_after`, which is 4 s.
Engine      a simulated one, an agent before it; 24 tokens a second in each slot.
Measures    the gateway's records: tokens (a generated one as two) by tenant in windows of 20 s, by
            the end of the answer; seconds from arrival to placement; seconds between
            one slot that came free and the next.
Baseline    the same gateway with first come, first served in the place of its order
            (`bench.first_come`), which must fail the same limits.
Expect      Jain's index of service per weight at least 0.98 in each window; small and interactive
            tenants wait at the 99th percentile at most 3 times the 99th percentile of the
            intervals between two releases, and nobody of them is refused; batch holds at most 80 %
            of the slots; the oldest batch waiter of each tenant rises twice, and is placed
            then, while interactive keeps nine tenths of the service.
Run         make bench SCENARIO=fairness         (about 5 min on 2 cores)
Output      bench/results/<date>-fairness-<commit>.json, with machine facts, and
            fairness-<order>.svg.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio

from .. import peers
from ..command import Options, main, progress
from ..fleet import Fleet, fleet, worker_command
from ..plot import Chart, Line
from ..processes import BenchError
from ..report import RESULTS, Check, Report, quantile
from ..tenants import Asked, Row, Span, Tenant, ask_for, jain, read_rows

SLOTS: Final = 10
DECODE: Final = 24.0  # tokens a second
PROMOTE_AFTER: Final = 4.0
CAPACITY: Final = 17.0  # requests a second of 12 tokens, by measurement
FLOOD: Final = 3.3  # times capacity: 3, and a reserve for the slots that come free late
SETTLING: Final = 6.0  # seconds until queues are full and lengths are learnt
WINDOW: Final = 20.0
PATIENCE: Final = 30.0
SEED: Final = 31
MAX_SHARE: Final = 0.8

LEAST_INDEX: Final = 0.98
MOST_INTERVALS: Final = 3.0
INTERACTIVE_SHARE: Final = 0.9
TAIL: Final = 0.99


def flood(name: str, tokens: tuple[int, int], tier: str = "standard", **members: object) -> Tenant:
    """Answer a tenant that asks for more than three times what all slots can do."""
    mean = sum(tokens) / 2
    rate = FLOOD * CAPACITY * 12 / mean
    return Tenant(name, rate, tier, tokens=tokens, **members)  # type: ignore[arg-type]


FLOODS: Final = (
    flood("one", (12, 28), weight=1.0),
    flood("two", (4, 20), weight=2.0, words=(10, 150), limit=200),
    flood("four", (8, 16), weight=4.0),
)
SMALL: Final = tuple(Tenant(f"small-{number}", 0.4, even=True) for number in range(1, 7))
BULK: Final = (flood("bulk-1", (8, 24), "batch"), flood("bulk-2", (8, 16), "batch"))
CALLERS: Final = tuple(Tenant(f"caller-{number}", CAPACITY / 7, "interactive") for number in range(1, 4))
RUSH: Final = (flood("rush-1", (8, 16), "interactive"), flood("rush-2", (8, 16), "interactive"))
NIGHTLY: Final = tuple(Tenant(f"nightly-{number}", 1.0, "batch", begins=3.0) for number in (1, 2))
EVERYBODY: Final = (*FLOODS, *SMALL, *BULK, *CALLERS, *RUSH, *NIGHTLY)

FAIR: Final = "fair"
FIRST_COME: Final = "first come"
PROGRAMS: Final[Mapping[str, Sequence[str]]] = {
    FAIR: (),
    FIRST_COME: (sys.executable, "-m", "bench.first_come"),
}


@dataclass(frozen=True)
class Story:
    """Who asks at a time, and for how many windows."""

    name: str
    tenants: Sequence[Tenant]
    windows: int


STORIES: Final = (
    Story("floods", (*FLOODS, *SMALL), 3),
    Story("batch flood", (*BULK, *CALLERS), 2),
    Story("interactive flood", (*RUSH, *NIGHTLY), 2),
)


@dataclass(frozen=True)
class Played:
    """A story that is over: what clients saw, and when its windows began."""

    story: Story
    asked: Asked
    begin: float
    window: float
    rows: Sequence[Row]

    @property
    def whole(self) -> Span:
        """All of its windows together."""
        return Span(self.rows, self.begin, self.begin + self.story.windows * self.window)

    def parts(self, seconds: float) -> list[Span]:
        """Answer its time in pieces."""
        count = round(self.story.windows * self.window / seconds)
        return [
            Span(self.rows, self.begin + number * seconds, self.begin + (number + 1) * seconds)
            for number in range(count)
        ]

    def refused(self, tenants: Sequence[Tenant]) -> int:
        """How many requests of tenants got no whole answer, but for those that were under way at the end."""
        names = {tenant.name for tenant in tenants}
        return sum(n for (name, code), n in self.asked.got.items() if name in names and code != "whole")


def run(options: Options) -> Report:
    """Play the stories in both orders; see the module's docstring."""
    report = Report("fairness", ("order", "story", "served", "Jain's index", "waits p99", "releases p99"))
    window = WINDOW / 10 if options.brief else WINDOW
    for order in (FAIR, FIRST_COME):
        played = {each.story.name: each for each in _play(order, window)}
        floods, batch = played["floods"], played["batch flood"]
        report.checks += _in_order(order, [*_flood_checks(floods), *_caller_checks(batch)])
        report.rows += [_row(order, each) for each in played.values()]
        report.raw[order] = {name: _figures(each) for name, each in played.items()}
        report.notes.append(f"plotted in {_draw(order, floods).name}")
        if order == FAIR:
            report.checks += [
                *_load_checks(floods),
                *_load_checks(batch),
                *_load_checks(played["interactive flood"]),
                *_batch_checks(batch),
                *_promotion_checks(played["interactive flood"]),
            ]
    return report


# Playing ----------------------------------------------------------------------------------------------------


def _play(order: str, window: float) -> list[Played]:
    stories = STORIES if order == FAIR else STORIES[:2]  # without an order nobody rises
    with tempfile.TemporaryDirectory(prefix="bench-fairness-") as folder:
        told = []
        with _running(order, Path(folder)) as running:
            for story in stories:
                progress(f"{order}: {story.name}, {story.windows} windows of {window:.0f} s")
                told.append((story, *_play_one(running, story, window)))
            if not peers.eventually(lambda: _is_written(running), PATIENCE, 0.1):
                raise BenchError("the records were not written in time")
        rows = read_rows(Path(folder, "records.db"))
    return [Played(story, asked, begin, window, rows) for story, asked, begin in told]


@contextmanager
def _running(order: str, folder: Path) -> Iterator[Fleet]:
    share = MAX_SHARE if order == FAIR else 1.0
    tables = [
        f'[database]\nurl = "sqlite:///{folder}/records.db"\njournal = "{folder}/journal"',
        f"[admission]\npromote_after = {PROMOTE_AFTER}\ntiers = {{batch = {{max_share = {share}}}}}",
        *(tenant.toml for tenant in EVERYBODY),
    ]
    command = worker_command(f"decode={DECODE}", "prefill=4000", "crowding=0")
    with fleet(
        command, workers=1, slots=SLOTS, extra="\n".join(tables), gateway_program=PROGRAMS[order]
    ) as running:
        yield running


def _play_one(running: Fleet, story: Story, window: float) -> tuple[Asked, float]:
    begin = time.time() + SETTLING
    seconds = SETTLING + story.windows * window + 0.5
    asked = trio.run(ask_for, running.gateway.port, story.tenants, seconds, SEED)
    if not running.gateway.wait_idle(PATIENCE):
        raise BenchError(f"the gateway did not come to rest after {story.name}")
    return asked, begin


def _is_written(running: Fleet) -> bool:
    return not running.gateway.statistics()["ledger"]["behind_bytes"]


# Judging ----------------------------------------------------------------------------------------------------


def _in_order(order: str, checks: Sequence[Check]) -> Iterator[Check]:
    """Answer the checks; with another order than ours each of them must fail."""
    for check in checks:
        if order == FAIR:
            yield check
        else:
            sense = f"must not be {check.sense}"
            yield Check(f"{order}, {check.what}", check.value, check.limit, check.unit, not check.kept, sense)


def _per_weight(span: Span) -> list[float]:
    served = span.served()
    return [served[tenant.name] / tenant.weight for tenant in FLOODS]


def _least_index(floods: Played) -> float:
    return min(jain(_per_weight(span)) for span in floods.parts(floods.window))


def _tails(played: Played, tenants: Sequence[Tenant]) -> tuple[float, float]:
    """Answer the 99th percentiles of waits and of intervals between releases."""
    span = played.whole
    waits = span.waits(tenant.name for tenant in tenants)
    return quantile(waits, TAIL), quantile(span.gaps(), TAIL)


def _flood_checks(floods: Played) -> Iterator[Check]:
    yield Check.at_least("floods: Jain's index, in the worst window", _least_index(floods), LEAST_INDEX, "")
    yield _wait_check("floods: small tenants' waits at p99", floods, SMALL)


def _caller_checks(batch: Played) -> Iterator[Check]:
    yield _wait_check("batch flood: interactive tenants' waits at p99", batch, CALLERS)


def _wait_check(what: str, played: Played, tenants: Sequence[Tenant]) -> Check:
    waits, gaps = _tails(played, tenants)
    return Check.at_most(what, waits / gaps, MOST_INTERVALS, "x p99 of releases")


def _load_checks(played: Played) -> Iterator[Check]:
    """What must be so, that the others say anything."""
    span = played.whole
    for tenant in played.story.tenants:
        if tenant.rate > CAPACITY:
            sent = sum(span.begin <= at < span.end for at in played.asked.sent[tenant.name])
            asked = sent * span.mean_stay(tenant.name) / (span.end - span.begin) / SLOTS
            yield Check.at_least(f"{played.story.name}: offered by {tenant.name}", asked, 3.0, "x capacity")
    calm = [tenant for tenant in played.story.tenants if tenant.rate <= CAPACITY and tenant not in NIGHTLY]
    if calm:
        yield Check.exactly(f"{played.story.name}: refused, of others", played.refused(calm), 0, "requests")
    odd = sum(count for (_, code), count in played.asked.got.items() if code == "odd")
    yield Check.exactly(f"{played.story.name}: answered in a way that is none", odd, 0, "clients")


def _batch_checks(batch: Played) -> Iterator[Check]:
    held = batch.whole.most_at_once(tenant.name for tenant in BULK)
    yield Check.exactly("batch flood: slots that batch had at most", held, int(MAX_SHARE * SLOTS), "slots")


def _promotion_checks(played: Played) -> Iterator[Check]:
    """What one that waits below a flood must see: its time in two tiers, and then its turn."""
    span = played.whole
    _, gap = _tails(played, RUSH)
    rise, turn = 2 * PROMOTE_AFTER, MOST_INTERVALS * gap
    for tenant in NIGHTLY:
        rows = [row for row in played.rows if row.tenant == tenant.name]
        placed = sorted(row.placed for row in rows if row.placed is not None)
        oldest = rows[0].waited if rows else 0.0
        what = f"interactive flood: the oldest of {tenant.name}"
        yield Check.at_least(f"{what} waits at least", oldest, rise, "s")
        yield Check.at_most(f"{what} waits at most", oldest, rise + turn, "s")
        in_turn = [row.placed for row in rows if row.placed is not None] == placed
        yield Check.exactly(f"interactive flood: {tenant.name} by age", int(in_turn), 1, "")
        expected = int((span.end - span.begin - rise) / (PROMOTE_AFTER + turn))
        yield Check.at_least(f"interactive flood: placed of {tenant.name}", len(placed), expected, "requests")
    served = span.served()
    share = sum(served[tenant.name] for tenant in RUSH) / max(served.total(), 1)
    yield Check.at_least("interactive flood: service of interactive", share, INTERACTIVE_SHARE, "of all")


# Telling ----------------------------------------------------------------------------------------------------


def _watched(played: Played) -> Sequence[Tenant]:
    return {"floods": SMALL, "batch flood": CALLERS}.get(played.story.name, NIGHTLY)


def _row(order: str, played: Played) -> list[str]:
    span = played.whole
    waits, gaps = _tails(played, _watched(played))
    index = f"{_least_index(played):.4f}" if played.story.name == "floods" else "-"
    served = sum(row.placed is not None and span.begin <= row.freed < span.end for row in played.rows)
    rate = f"{served / (span.end - span.begin):.1f}/s"
    return [order, played.story.name, rate, index, f"{waits * 1e3:.0f} ms", f"{gaps * 1e3:.0f} ms"]


def _figures(played: Played) -> dict[str, object]:
    windows = [span.served() for span in played.parts(played.window)]
    return {
        "served": [dict(served) for served in windows],
        "sent": {name: len(times) for name, times in played.asked.sent.items()},
        "got": {f"{name}: {code}": count for (name, code), count in sorted(played.asked.got.items())},
        "waits": sorted(played.whole.waits(tenant.name for tenant in _watched(played))),
        "releases": sorted(played.whole.gaps()),
    }


def _draw(order: str, floods: Played) -> Path:
    """Leave a picture of what each flood got for its weight, by what all of them got for theirs."""
    step = floods.window / 4
    weights = sum(tenant.weight for tenant in FLOODS)
    points: list[list[tuple[float, float]]] = [[] for _ in FLOODS]
    for number, span in enumerate(floods.parts(step), 1):
        each = _per_weight(span)
        all_of_them = sum(share * tenant.weight for share, tenant in zip(each, FLOODS, strict=True))
        for line, share in zip(points, each, strict=True):
            line.append((number * step, share * weights / max(all_of_them, 1)))
    lines = [Line(f"weight {tenant.weight:g}", line) for tenant, line in zip(FLOODS, points, strict=True)]
    title = f"Service for its weight, of three floods: {order}"
    chart = Chart(title, "seconds", "by the mean of all", lines, 1.0, linear=True)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"fairness-{order.replace(' ', '-')}.svg"
    path.write_text(chart.svg())
    return path


if __name__ == "__main__":
    sys.exit(main("fairness"))
