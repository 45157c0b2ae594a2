"""Do gateways and workers that are real processes load a fleet as evenly as the simulation says?

Question    `routing` simulates gateways that see a fleet a second late. Does the same story,
            told to real gateways before real agents, come to the same figures?
Load        Two stories of `bench.simulation`, with Poisson arrivals and log-normal answers,
            each request at the gateway that the story names. *load*: 4 gateways, 6 workers
            with 8 slots, 80 % of them in use, answers of 5 s. *prefixes*: 2 gateways, 6
            workers with 16 slots, 70 % of them in use, answers of 4 s; each request begins
            with one of 100 texts of 320 tokens, whose popularity is Zipf's (0.6), and a
            worker's cache holds 24. It is played twice: with `fleet.affinity` "none" and "prefix".
Engines     six simulated ones that register with all gateways (`bench.simulated_worker`). A
            slot makes 8 tokens a second, so that the machine is no limit.
Measures    slots in use at each worker, as its agent counts them, four times a second without
            the first quarter: the busiest by the mean. Rejections by agents, and what became
            of the exchanges that met them. Cached tokens by prompt tokens, as engines count.
Baseline    the same stories in simulated time, a dozen times with other dice.
Expect      the peak and the rate of hits as simulated, within the tolerances below; every
            rejected exchange served; with prefixes, twice the hits of "none", and a peak
            below 1.3.
Run         make bench SCENARIO=routing_live     (about 4 min on 2 cores)
Output      bench/results/<date>-routing_live-<commit>.json, with machine facts.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import trio

from trio_gateway.fleet.cores import Candidate
from trio_gateway.testing import MessageError, RawClient, chat_request

from .. import peers
from ..command import Options, main, progress
from ..fleet import MODEL, Fleet, fleets
from ..report import Check, Report
from ..simulated_worker import command, read_account
from ..simulation import SAMPLED, Arrival, Gateway, Policy, Result, Setting, Simulation, ours, story

PEAK_TOLERANCE: Final = 0.07  # of the simulated peak-to-mean
LOAD_TOLERANCE: Final = 0.05  # of the simulated mean load
HITS_TOLERANCE: Final = 0.15  # of the simulated hit rate: whole prefixes go there, blocks here
HIT_GAIN: Final = 2.0  # times the hit rate without affinity
MOST_PEAK: Final = 1.3  # times the mean

NO_ROOM: Final = "overloaded"  # what an agent's rejection for want of room is counted as

DICE: Final = 12  # courses of a story in simulated time
SEED: Final = 4  # a story whose load is the intended one
DECODE: Final = 8.0  # tokens a second of each slot
BEFORE_FIRST: Final = 1.0  # tokens: what the step under way, and the prompt's own, take of a slot's time
BRIEF: Final = 8.0  # seconds
AFTERWARDS: Final = 5.0  # seconds until those who still listen leave
BLOCK: Final = 16  # tokens
PREFIX_BLOCKS: Final = 20
ANSWER_BLOCKS: Final = 3  # of one running request, beside its prefix


@dataclasses.dataclass(frozen=True)
class Play:
    """One run of real processes.

    Attributes:
        affinity: of the gateways, as in ``fleet.affinity``.
        policy: the same thing in simulated time.
    """

    name: str
    setting: Setting
    affinity: str
    policy: Policy

    def shortened(self) -> Play:
        """Answer the beginning of the story, which proves nothing."""
        return dataclasses.replace(self, setting=dataclasses.replace(self.setting, seconds=BRIEF))

    @property
    def blocks(self) -> int:
        """Blocks of one worker's KV memory: the prefixes that it shall hold, and what answers need."""
        setting = self.setting
        if not setting.prefixes:
            return 4096
        return setting.cached * PREFIX_BLOCKS + round(setting.load * setting.slots) * ANSWER_BLOCKS


def without_keys(
    candidates: Sequence[Candidate], rng: random.Random, _: Sequence[bytes], gateway: Gateway
) -> Candidate | None:
    return ours(candidates, rng, (), gateway)


LOAD: Final = Setting(gateways=4, agents=True, workers=6, slots=8, seconds=60.0)
PREFIXES: Final = Setting(
    gateways=2,
    agents=True,
    workers=6,
    slots=16,
    load=0.7,
    mean_service=4.0,
    seconds=50.0,
    prefixes=100,
    skew=0.6,
    cached=24,
    questions=True,
    salted=True,
)
ALONE: Final = Play("load", LOAD, "prefix", ours)
UNLED: Final = Play("prefixes, none", PREFIXES, "none", without_keys)
LED: Final = Play("prefixes, prefix", PREFIXES, "prefix", ours)


@dataclasses.dataclass(frozen=True)
class Live:
    """What came of a story that real processes played.

    Attributes:
        peak, mean: slots in use at the busiest worker and at all of them on average, averaged over looks.
        looks: how many there were.
        whole: answers that came to their end; ``left``, those that did not in the time given, and were well.
        odd: all others, by what they were.
        rejected: attempts that went back to a queue, by reason.
        hits: cached tokens by prompt tokens.
        apart: seconds between the ages of one worker's news at two gateways, on average.
    """

    peak: float
    mean: float
    looks: int
    whole: int
    left: int
    odd: dict[str, int]
    rejected: dict[str, int]
    hits: float
    apart: float

    @property
    def peak_to_mean(self) -> float:
        """Load of the busiest worker by the mean load."""
        return self.peak / self.mean


def run(options: Options) -> Report:
    """Play each story by processes and in simulated time; see the module's docstring."""
    report = Report(
        "routing_live", ("story", "peak/mean", "load", "served", "rejected", "failed", "again", "hits")
    )
    lives = {}
    for full in (ALONE, UNLED, LED):
        play = full.shortened() if options.brief else full
        progress(f"{play.name}: {play.setting.seconds:.0f} s")
        lives[play.name] = live = _live(play)
        simulated = [Simulation(play.setting, play.policy, SEED, dice).run() for dice in range(DICE)]
        report.rows += [_row(play, live), _simulated_row(play, simulated)]
        report.raw[play.name] = {
            "setting": dataclasses.asdict(play.setting),
            "live": dataclasses.asdict(live),
            "simulated": [dataclasses.asdict(each) | {"samples": None} for each in simulated],
        }
        report.checks += _checks(play, live, simulated)
        report.notes.append(
            f"{play.name}: {live.looks} looks; {live.left} answers not awaited; went back to a queue: "
            f"{live.rejected or 'none'}; news of a worker reached two gateways {live.apart:.2f} s apart"
        )
    gain = lives[LED.name].hits / max(lives[UNLED.name].hits, 1e-9)
    peak = lives[LED.name].peak_to_mean
    report.checks += [
        Check.at_least("hit rate with affinity, by the one without", gain, HIT_GAIN, "x"),
        Check("peak with affinity", peak, MOST_PEAK, "x mean", peak < MOST_PEAK, "below"),
    ]
    return report


def _checks(play: Play, live: Live, simulated: Sequence[Result]) -> Iterator[Check]:
    def agrees(what: str, value: float, expected: float, tolerance: float) -> Check:
        return Check.at_most(f"{play.name}: {what}", abs(value / expected - 1), tolerance, "off")

    peak = statistics.fmean(each.peak_to_mean for each in simulated)
    mean = statistics.fmean(each.mean for each in simulated)
    yield agrees("peak, from the simulated", live.peak_to_mean, peak, PEAK_TOLERANCE)
    yield agrees("mean load, from the simulated", live.mean, mean, LOAD_TOLERANCE)
    yield Check.at_most(f"{play.name}: peak", live.peak_to_mean, MOST_PEAK, "x mean")
    yield Check.exactly(f"{play.name}: exchanges that failed", sum(live.odd.values()), 0, "")
    others = sum(count for reason, count in live.rejected.items() if reason != NO_ROOM)
    yield Check.exactly(f"{play.name}: attempts that failed by something else than room", others, 0, "")
    if play.setting.prefixes:
        hits = statistics.fmean(each.hits for each in simulated)
        yield agrees("hits, from the simulated", live.hits, hits, HITS_TOLERANCE)


def _row(play: Play, live: Live) -> list[str]:
    return [
        play.name,
        f"{live.peak_to_mean:.3f}",
        f"{100 * live.mean / play.setting.slots:.1f} %",
        str(live.whole),
        str(live.rejected.get(NO_ROOM, 0)),
        str(sum(live.odd.values())),
        "-",
        f"{100 * live.hits:.1f} %" if play.setting.prefixes else "-",
    ]


def _simulated_row(play: Play, simulated: Sequence[Result]) -> list[str]:
    def mean(name: str) -> float:
        return statistics.fmean(getattr(each, name) for each in simulated)

    peaks = [each.peak_to_mean for each in simulated]
    return [
        "  simulated",
        f"{mean('peak_to_mean'):.3f} ({min(peaks):.3f}-{max(peaks):.3f})",
        f"{100 * mean('mean') / play.setting.slots:.1f} %",
        f"{mean('served'):.0f}",
        f"{mean('rejected'):.1f}",
        f"{mean('failed'):.1f}",
        f"{mean('again'):.1f}",
        f"{100 * mean('hits'):.1f} %" if play.setting.prefixes else "-",
    ]


# -- real processes


def _live(play: Play) -> Live:
    with tempfile.TemporaryDirectory(prefix="bench-accounts-") as folder:
        accounts, setting = Path(folder), play.setting
        worker = command(
            accounts, prefill=50_000, decode=DECODE, crowding=0.0, blocks=play.blocks, context=4096
        )
        with fleets(
            worker,
            gateways=setting.gateways,
            workers=setting.workers,
            slots=setting.slots,
            extra=f'[fleet]\naffinity = "{play.affinity}"',
        ) as running:
            return trio.run(Stage(play, running, accounts).play)


class Stage:
    """Where a story is played: asks at its moments, and looks at the workers meanwhile."""

    def __init__(self, play: Play, running: Sequence[Fleet], accounts: Path) -> None:
        self._play = play
        self._running = running
        self._accounts = accounts
        self._began = 0.0
        self._texts = [_text(number) for number in range(play.setting.prefixes)]
        self._ends: Counter[str] = Counter()
        self._asked = 0
        self._peaks: list[int] = []
        self._means: list[float] = []
        self._apart: list[float] = []

    async def play(self) -> Live:
        """Play it to its end, and answer what came of it."""
        seconds = self._play.setting.seconds
        self._began = trio.current_time() + 0.5  # once every client is there
        with trio.move_on_at(self._began + seconds + AFTERWARDS):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._look)
                for number, arrival in enumerate(story(self._play.setting, SEED)):
                    self._asked += 1
                    nursery.start_soon(self._ask, number, arrival)
        told = await trio.to_thread.run_sync(self._statistics)
        accounts = await trio.to_thread.run_sync(self._read)
        retries: Counter[str] = Counter()
        for each in told:
            retries.update({key[0]: count for key, count in peers.counts_of(each, "retries").items()})
        cached, prompt = (sum(each[name] for each in accounts) for name in ("cached_tokens", "prompt_tokens"))
        whole = self._ends.pop("whole", 0)
        return Live(
            peak=statistics.fmean(self._peaks),
            mean=statistics.fmean(self._means),
            looks=len(self._peaks),
            whole=whole,
            left=self._asked - whole - sum(self._ends.values()),
            odd=dict(self._ends),
            rejected=dict(retries),
            hits=cached / prompt,
            apart=statistics.fmean(self._apart),
        )

    def _read(self) -> list[dict[str, Any]]:
        return [read_account(self._accounts, worker.id) for worker in self._running[0].workers]

    def _statistics(self) -> list[dict[str, Any]]:
        return [each.gateway.statistics() for each in self._running]

    async def _look(self) -> None:
        """Note how loaded the workers are, and once how far apart their news come."""
        seconds = self._play.setting.seconds
        await trio.sleep_until(self._began + seconds / 4)
        self._apart = _apart(await trio.to_thread.run_sync(self._statistics))
        while trio.current_time() < self._began + seconds:
            held = [each["held"] for each in await trio.to_thread.run_sync(self._read)]
            self._peaks.append(max(held))
            self._means.append(statistics.fmean(held))
            await trio.sleep(SAMPLED)

    async def _ask(self, number: int, arrival: Arrival) -> None:
        """Be one client, from its arrival on."""
        await trio.sleep_until(self._began + arrival.at)
        self._ends[await self._answer(number, arrival)] += 1

    async def _answer(self, number: int, arrival: Arrival) -> str:
        prefix = "" if arrival.prefix is None else self._texts[arrival.prefix]
        tokens = max(1, round(arrival.service * DECODE - BEFORE_FIRST))
        request = chat_request(f"{prefix} {number}", model=MODEL, simulate={"tokens": tokens})
        gateway = self._running[arrival.gateway].gateway
        try:
            with await RawClient.connect(("127.0.0.1", gateway.port)) as client:
                await client.send(request)
                answer = await client.read_to_end()
        except (OSError, MessageError) as error:
            return type(error).__name__
        if answer.status != 200:
            return str(answer.error().get("code"))
        reading = answer.chat()
        if reading.errors:
            return str(reading.errors[0].get("code"))
        return "whole" if reading.done == 1 and len(reading.text.split(" ")) == tokens else "not whole"


def _apart(told: Sequence[dict[str, Any]]) -> list[float]:
    """How far the ages of a worker's news at the first gateway are from those at the others."""
    ages = [{each["id"]: each["snapshot_age"] for each in one["workers"]} for one in told]
    return [abs(ages[0][name] - other[name]) for other in ages[1:] for name in other]


def _text(number: int) -> str:
    """A text that others share: words of six letters, each of which is a token."""
    dice = random.Random(f"prefix {number}")
    words = ("".join(dice.choices("abcdefghijklmnopqrstuvwxyz", k=6)) for _ in range(PREFIX_BLOCKS * BLOCK))
    return " ".join(words)


if __name__ == "__main__":
    sys.exit(main("routing_live"))
