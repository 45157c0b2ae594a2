"""What do clients see of workers that are killed, again and again?

Question    When a worker's process is killed while others have free slots, does any
            client get an error before its answer began? And does any answer that had
            begun there end as if it were whole?
Load        12 clients, fewer than the slots of two workers, ask without a pause: answers
            of 4 to 60 tokens, four of five as streams. One of three workers is killed
            (SIGKILL) at a random moment, another one each time, and started again with
            the same id; the next one dies after it has registered, and after whatever the last
            one's death sent elsewhere must be over. 30 kills.
Engines     three ``trio-gateway worker --engine simulated`` of 8 slots, that register.
Measures    every answer, compared with the one to the same question before the run; the
            equations of conservation, from /admin/v1/statistics, 10 times a second.
Baseline    the same answers, given while nobody was killed.
Expect      no error before the first content. Two kinds are counted apart, since the rules
            allow them, and none is expected: for want of retry budget, and of a request
            whose second worker was killed as well, since one retry is all it has. Answers
            that had begun at a worker when it was killed end with one error event and
            without ``[DONE]``, and what they had is the beginning of the whole answer; no
            other answer is cut; everything else is whole; the equations hold in every
            reading, and at the end every lease is back.
Run         make bench SCENARIO=failover     (about 3 min on 2 cores)
Output      bench/results/<date>-failover-<commit>.json, with machine facts.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import Final

import trio

from ..askers import CUT, REFUSED, WRONG, Told
from ..command import Options, main, progress
from ..fleet import Fleet, fleet, worker_command
from ..report import Check, Report
from ..watching import COLUMNS, Seen, under_load

KILLS: Final = 30
CLIENTS: Final = 12
SLOTS: Final = 8
SPEED: Final = ("decode=60", "prefill=2000")
# Seconds since the last one was back: more than the longest answer takes (60 tokens at 60 a second), since an
# exchange has one retry, and that is not what is measured here.
BEFORE_KILL: Final = (1.2, 2.4)
BEFORE_START: Final = (0.0, 1.0)  # seconds since it was killed
SEED: Final = 11

Deaths = list[tuple[str, float]]  # who, and when by Trio's clock


def run(options: Options) -> Report:
    """Kill workers under load; see the module's docstring."""
    report = Report("failover", COLUMNS)
    deaths: Deaths = []
    with fleet(worker_command(*SPEED), slots=SLOTS) as running:

        async def kill() -> None:
            await _kill(running, options.some(KILLS), deaths)

        seen = trio.run(under_load, running, CLIENTS, SEED, kill)
    seen.describe(report)
    report.notes.append(f"{len(deaths)} workers killed")
    report.checks += _checks(seen, deaths)
    return report


async def _kill(running: Fleet, kills: int, deaths: Deaths) -> None:
    dice, last = random.Random(SEED), None
    for number in range(1, kills + 1):
        await trio.sleep(dice.uniform(*BEFORE_KILL))
        victim = last = dice.choice([worker for worker in running.workers if worker is not last])
        before = (await trio.to_thread.run_sync(running.urls)).get(victim.id)
        deaths.append((victim.id, trio.current_time()))
        victim.kill()
        await trio.sleep(dice.uniform(*BEFORE_START))
        victim.start()
        await trio.to_thread.run_sync(running.wait_registered, victim, before)
        progress(f"{number} of {kills}: {victim.id} was killed, and is back")


def _checks(seen: Seen, deaths: Deaths) -> list[Check]:
    refused = [each for each in seen.told if each.kind == REFUSED]
    # Where the budget says no nothing was retried, and the caller is told that it may ask again.
    unpaid = sum(each.code == "engine_failed" and each.retryable for each in refused)
    twice = sum(
        each.code == "engine_failed" and not each.retryable and _deaths_met(each, deaths) > 1
        for each in refused
    )
    return [
        Check.exactly("errors before content", len(refused) - unpaid - twice, 0, "answers"),
        Check.exactly("refused for want of retry budget", unpaid, 0, "answers"),
        Check.exactly("refused after a second kill", twice, 0, "answers"),
        Check.exactly("neither whole nor properly cut", seen.count(WRONG), 0, "answers"),
        Check.exactly("cut, though their worker lived", _unexplained(seen.told, deaths), 0, "answers"),
        Check.at_least("cut by a kill, or nothing was shown", seen.count(CUT), 1, "answers"),
        *seen.watch.checks(seen.statistics),
    ]


def _deaths_met(told: Told, deaths: Deaths) -> int:
    """How many workers were killed between a request and its end."""
    return sum(told.began <= when <= told.ended for _, when in deaths)


def _unexplained(told: Sequence[Told], deaths: Deaths) -> int:
    """How many were cut while nobody killed their worker."""
    return sum(
        each.kind == CUT
        and not any(who == each.worker and each.began <= when <= each.ended for who, when in deaths)
        for each in told
    )


if __name__ == "__main__":
    sys.exit(main("failover"))
