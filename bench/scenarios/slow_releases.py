"""Does an engine ever run more than its slots, however late it lets go of what was aborted?

Question    When clients abort at random, and engines release late or do not heed a
            cancel at all, do gateway and agents still know what runs?
Load        20,000 clients that leave, 18 at a time, which is more than there are slots once
            those are counted that engines have not let go of. Half by FIN, half by reset;
            a third within 0.1 s of the request, so that they are queued, on their way or
            being prefilled; most of the others inside their stream, some while an answer
            is made that they want whole. Half of the requests keep their slot for up to
            0.3 s after a cancel, and a fifth are generated to their end whoever left.
            Then every slot is asked at once.
Engines     three simulated ones that register (`bench.simulated_worker`). Each could run
            64 requests; its agent has 8 slots to give, and the engine's own account says
            how many ever ran at a time.
Measures    that account, the agents' slots, and the gateway's statistics.
Baseline    none: these are counts.
Expect      no engine ever ran more than 8 requests, though each ran 8; when the last client
            has left, engine, agent and gateway agree on zero within 20 s; every lease is
            back, none of them before its engine had let go; every slot can be used.
Run         make bench SCENARIO=slow_releases     (about 6 min on 2 cores)
Output      bench/results/<date>-slow_releases-<commit>.json, with machine facts.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, Final

import trio

from trio_gateway.testing import MessageError, RawClient, chat_request

from .. import peers
from ..command import Options, main, progress
from ..fleet import MODEL, Fleet, fleet
from ..report import Check, Report
from ..simulated_worker import command, read_account
from ..watching import Watch

ABORTS: Final = 20_000
CLIENTS: Final = 18
SLOTS: Final = 8
PREFILL: Final = 150.0  # tokens of prompts a second: a prompt takes 80 ms
DECODE: Final = 60.0  # tokens a second
TOKENS: Final = (12, 24)
LATE: Final = 0.5  # share of requests that release late
LATE_SECONDS: Final = (0.02, 0.3)
LOST: Final = 0.2  # share whose cancel is lost
BUFFERED: Final = 0.1
ANY_MOMENT: Final = 0.3  # share of clients that leave without a look at what they got
EARLY_SECONDS: Final = 0.1
LATER_SECONDS: Final = 0.3
PATIENCE: Final = 20.0  # seconds for a head, and for rest afterwards
SEED: Final = 13


def run(options: Options) -> Report:
    """Abort, and compare the accounts; see the module's docstring."""
    report = Report("slow_releases", ("at the end", "ran at most", "arrived", "running", "held", "outcomes"))
    with tempfile.TemporaryDirectory(prefix="bench-accounts-") as folder:
        accounts = Path(folder)
        with fleet(command(accounts, prefill=PREFILL, decode=DECODE), slots=SLOTS) as running:
            trio.run(_run, report, running, accounts, options.some(ABORTS))
    return report


async def _run(report: Report, running: Fleet, accounts: Path, aborts: int) -> None:
    leavers, watch = Leavers(running.gateway.port, aborts), Watch(running.gateway)
    began = trio.current_time()
    async with trio.open_nursery() as watching:
        watching.start_soon(watch.run)
        async with trio.open_nursery() as leaving:
            for _ in range(CLIENTS):
                leaving.start_soon(leavers.leave_on)
        report.notes.append(f"{aborts} aborts in {trio.current_time() - began:.0f} s")
        rested = await trio.to_thread.run_sync(_rests, running, accounts)
        watching.cancel_scope.cancel(reason="everybody has left")
    statistics = await trio.to_thread.run_sync(running.gateway.statistics)
    engines = await trio.to_thread.run_sync(_read, running, accounts)
    whole = await _use_every_slot(running)
    for name, told in engines.items():
        report.rows.append(_row(name, told))
        report.checks += _engine_checks(name, told)
    report.checks += [
        Check.exactly("clients that left", leavers.left, aborts, ""),
        Check.exactly("answered in a way that is none", leavers.results["odd"], 0, "clients"),
        Check.exactly("at rest in time", int(rested), 1, ""),
        *watch.checks(statistics),
        Check.exactly(
            "leases taken back without the worker's word",
            statistics["idle_after_cancel"].get("assumed", 0),
            0,
            "",
        ),
        Check.exactly("whole answers when every slot is asked", whole, running.slots, "answers"),
    ]
    report.notes += [f"{what}: {_words(counts)}" for what, counts in _told(leavers, statistics).items()]
    report.raw |= {
        "engines": engines,
        "statistics": {**statistics, "recent": []},
        "left": dict(leavers.results),
    }


def _row(name: str, told: dict[str, Any]) -> list[str]:
    numbers = [str(told[key]) for key in ("high_water", "arrived", "running", "held")]
    return [name, *numbers, _words(told["outcomes"])]


def _engine_checks(name: str, told: dict[str, Any]) -> list[Check]:
    zeros = ("running", "waiting", "open", "held")
    return [
        Check.at_most(f"{name}: ran at a time", told["high_water"], SLOTS, "requests"),
        Check.at_least(f"{name}: ran at a time, or nothing was shown", told["high_water"], SLOTS, "requests"),
        Check.exactly(f"{name}: arrived and not released", told["arrived"] - told["released"], 0, ""),
        Check.exactly(f"{name}: {', '.join(zeros)} at the end", sum(told[key] for key in zeros), 0, ""),
    ]


def _told(leavers: Leavers, statistics: dict[str, Any]) -> dict[str, Counter[str]]:
    cancelled = Counter({" ".join(key): n for key, n in peers.counts_of(statistics, "cancellations").items()})
    retries = Counter({key[0]: count for key, count in peers.counts_of(statistics, "retries").items()})
    idle = Counter(statistics["idle_after_cancel"])
    return {"clients": leavers.results, "cancelled": cancelled, "retries": retries, "idle after": idle}


def _words(counts: dict[str, int]) -> str:
    return ", ".join(f"{what} {count}" for what, count in counts.items() if count) or "none"


def _read(running: Fleet, accounts: Path) -> dict[str, dict[str, Any]]:
    return {worker.id: read_account(accounts, worker.id) for worker in running.workers}


def _rests(running: Fleet, accounts: Path) -> bool:
    """Answer whether gateway and engines came to rest in time."""

    def at_rest() -> bool:
        return not any(told["open"] or told["held"] for told in _read(running, accounts).values())

    return running.gateway.wait_idle(PATIENCE) and peers.eventually(at_rest, PATIENCE, 0.05)


async def _use_every_slot(running: Fleet) -> int:
    """Ask as often at once as there are slots; answer how many answers were whole."""
    whole = 0

    async def ask() -> None:
        nonlocal whole
        with trio.move_on_after(PATIENCE):
            with await RawClient.connect(("127.0.0.1", running.gateway.port)) as client:
                await client.send(chat_request("and now", model=MODEL, simulate={"tokens": 20}))
                answer = await client.read_to_end()
                whole += answer.status == 200 and answer.chat().done == 1

    async with trio.open_nursery() as nursery:
        for _ in range(running.slots):
            nursery.start_soon(ask)
    return whole


class Leavers:
    """Clients that ask and leave, until enough have left.

    Attributes:
        left: how many have.
        results: clients by what they had reached.
    """

    def __init__(self, port: int, aborts: int) -> None:
        self._port = port
        self._aborts = aborts
        self._begun = 0
        self._dice = random.Random(SEED)
        self.left = 0
        self.results: Counter[str] = Counter()

    async def leave_on(self) -> None:
        """Be one client after the other."""
        while self._begun < self._aborts:
            self._begun += 1
            reached = await self._leave()
            self.results[reached] += 1
            if reached in ("whole", "odd"):
                self._begun -= 1  # it stayed to the end; another one leaves in its place
            else:
                self.left += 1
            if self.left and self.left % 1000 == 0 and reached not in ("whole", "odd"):
                progress(f"{self.left} of {self._aborts} have left")

    async def _leave(self) -> str:
        """Ask, leave, and answer what had been reached."""
        dice = self._dice
        stream = dice.random() >= BUFFERED
        early = dice.random() < ANY_MOMENT
        by_reset = dice.random() < 0.5
        stays = dice.uniform(0, EARLY_SECONDS if early else LATER_SECONDS)
        try:
            with await RawClient.connect(("127.0.0.1", self._port)) as client:
                await client.send(self._request(stream))
                if stream and not early:
                    with trio.move_on_after(PATIENCE):
                        await client.read_head()
                with trio.move_on_after(stays):
                    answer = await client.read_to_end()
                    return "whole" if answer.status == 200 and answer.ended == "complete" else "odd"
                reached = "in its stream" if client.answers else "before its head"
                if by_reset:
                    client.leave_reset()
                else:
                    client.leave_fin()
                return reached
        except (OSError, MessageError):
            return "odd"

    def _request(self, stream: bool) -> bytes:
        dice, faults = self._dice, []
        if dice.random() < LATE:
            faults.append({"kind": "late_release", "seconds": round(dice.uniform(*LATE_SECONDS), 3)})
        if dice.random() < LOST:
            faults.append({"kind": "lost_cancel"})
        simulate = {"tokens": dice.randint(*TOKENS), "faults": faults}
        text = f"request {dice.random()}"
        return chat_request(text, model=MODEL, stream=stream, simulate=simulate)


if __name__ == "__main__":
    sys.exit(main("slow_releases"))
