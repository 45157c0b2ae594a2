"""Does anybody notice that every worker is restarted, one after the other?

Question    When each worker gets SIGTERM in turn, ends, and is started again, does any
            request fail?
Load        12 clients, fewer than the slots of two workers, ask without a pause: answers
            of 4 to 60 tokens, the longest of about a second, four of five as streams.
            Each of three workers gets SIGTERM, drains, ends, is started again and has
            registered before the next one's turn. 4 rounds.
Engines     three ``trio-gateway worker --engine simulated`` of 8 slots, that register.
Measures    every answer, compared with the one to the same question before the run; the
            status with which each worker ended; the equations of conservation, 10 times
            a second.
Baseline    the same answers, given while nobody was restarted.
Expect      every answer whole, every worker ended with status 0, every equation held, and
            at the end every lease is back.
Run         make bench SCENARIO=rolling_restart     (about 2 min on 2 cores)
Output      bench/results/<date>-rolling_restart-<commit>.json, with machine facts.
"""

from __future__ import annotations

import random
import sys
from typing import Final

import trio

from ..askers import WHOLE
from ..command import Options, main, progress
from ..fleet import END_PATIENCE_S, Fleet, fleet, worker_command
from ..report import Check, Report
from ..watching import COLUMNS, under_load

ROUNDS: Final = 4
CLIENTS: Final = 12
SLOTS: Final = 8
SPEED: Final = ("decode=60", "prefill=2000")
BETWEEN: Final = (0.0, 0.5)  # seconds from one worker's return to the next one's turn
SEED: Final = 12


def run(options: Options) -> Report:
    """Restart workers under load; see the module's docstring."""
    report = Report("rolling_restart", COLUMNS)
    statuses: list[int] = []
    with fleet(worker_command(*SPEED), slots=SLOTS) as running:

        async def restart() -> None:
            await _restart(running, options.some(ROUNDS), statuses)

        seen = trio.run(under_load, running, CLIENTS, SEED, restart)
    seen.describe(report)
    report.raw["statuses"] = statuses
    report.checks += [
        Check.at_least("workers restarted", len(statuses), len(running.workers), ""),
        Check.exactly("workers that ended with another status than 0", sum(map(bool, statuses)), 0, ""),
        Check.exactly("failed requests", len(seen.told) - seen.count(WHOLE), 0, ""),
        *seen.watch.checks(seen.statistics),
    ]
    return report


async def _restart(running: Fleet, rounds: int, statuses: list[int]) -> None:
    dice = random.Random(SEED)
    for number in range(1, rounds + 1):
        for worker in running.workers:
            await trio.sleep(dice.uniform(*BETWEEN))
            before = (await trio.to_thread.run_sync(running.urls)).get(worker.id)
            worker.child.ask_to_end()
            statuses.append(await trio.to_thread.run_sync(worker.child.wait, END_PATIENCE_S))
            worker.start()
            await trio.to_thread.run_sync(running.wait_registered, worker, before)
        progress(f"round {number} of {rounds} done")


if __name__ == "__main__":
    sys.exit(main("rolling_restart"))
