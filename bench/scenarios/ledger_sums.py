"""Do the records add up to what the engines counted, however many clients leave?

Question    When a third of all clients leave at a random moment, is there exactly one
            record of each request, and are the tokens in the records as many as the
            engines say they have made?
Load        50,000 requests by 24 clients at a time, nine of ten as streams, for answers of 2 to
            24 tokens; a third of the clients leave within 60 ms, half of these by FIN.
Engines     three simulated ones that register (`bench.simulated_worker`), of 8 slots, that
            let go as soon as they are told; each keeps its own account.
Measures    the rows of the database (SQLite), when gateway and engines have come to rest;
            the engines' accounts.
Baseline    the engines' accounts.
Expect      one row for each request that was accepted, none of them open; no
            fewer attempts in the rows than arrived at the engines (some clients leave before
            that); the sum of generated tokens is the engines' own, to the token; no exchange
            has more delivered than generated tokens.
Run         make bench SCENARIO=ledger_sums      (about 4 min on 2 cores)
Output      bench/results/<date>-ledger_sums-<commit>.json, with machine facts.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa
import trio

from trio_gateway.testing import MessageError, RawClient, chat_request

from .. import peers
from ..command import Options, main, progress
from ..fleet import MODEL, Fleet, fleet
from ..report import Check, Report
from ..simulated_worker import command, read_account

REQUESTS: Final = 50_000
CLIENTS: Final = 24
LEAVE: Final = 1 / 3
LEAVE_WITHIN: Final = 0.06  # seconds
STREAMS: Final = 0.9
TOKENS: Final = (2, 24)
PATIENCE: Final = 30.0  # seconds for rest
SEED: Final = 23
SUMS: Final = """
SELECT count(*) AS records, count(DISTINCT exchange_id) AS exchanges, count(outcome) AS settled,
  sum(attempts) AS attempts, sum(tokens_generated) AS generated, sum(tokens_prompt) AS prompt,
  sum(CASE WHEN usage_source = 'estimated' THEN 1 ELSE 0 END) AS estimated,
  sum(CASE WHEN tokens_delivered > tokens_generated THEN 1 ELSE 0 END) AS more_delivered,
  sum(CASE WHEN outcome = 'client_gone' THEN 1 ELSE 0 END) AS gone,
  sum(CASE WHEN released_at IS NOT NULL THEN 1 ELSE 0 END) AS released,
  sum(CASE WHEN attempts > 1 THEN 1 ELSE 0 END) AS retried,
  sum(CASE WHEN usage_source = 'estimated' AND released_at IS NULL THEN 1 ELSE 0 END) AS untold
FROM exchanges"""


def run(options: Options) -> Report:
    """Ask and leave, and compare the accounts; see the module's docstring."""
    report = Report("ledger_sums", ("account", "requests", "generated tokens"))
    with tempfile.TemporaryDirectory(prefix="bench-sums-") as folder:
        url = f"sqlite:///{folder}/records.db"
        extra = f'[database]\nurl = "{url}"\njournal = "{folder}/journal"'
        worker = command(Path(folder), prefill=20_000, decode=400)
        with fleet(worker, extra=extra) as running:
            results = trio.run(_ask_all, running.gateway.port, options.some(REQUESTS))
            rested = _rests(running, Path(folder))
            statistics = running.gateway.statistics()
            engines = [read_account(Path(folder), each.id) for each in running.workers]
        with sa.create_engine(url, poolclass=sa.NullPool).connect() as connection:
            sums = dict(connection.execute(sa.text(SUMS)).mappings().one())
    made = Counter[str]()
    for each in engines:
        made.update({name: each[name] for name in ("arrived", "generated_tokens", "prompt_tokens")})
    report.rows += [
        ("records", str(sums["records"]), str(sums["generated"])),
        ("engines", str(made["arrived"]), str(made["generated_tokens"])),
    ]
    report.notes += [f"clients: {dict(results)}", f"records: {sums}", f"engines: {dict(made)}"]
    report.raw |= {"clients": dict(results), "records": sums, "engines": engines}
    report.checks += [
        Check.exactly(
            "accepted requests without a record", statistics["accepted"] - sums["exchanges"], 0, ""
        ),
        Check.exactly("records beyond one each", sums["records"] - sums["exchanges"], 0, ""),
        Check.exactly("still open", sums["records"] - sums["settled"], 0, "records"),
        Check.at_least("attempts", sums["attempts"], made["arrived"], "that arrived"),
        Check.exactly("tokens beside those made", sums["generated"] - made["generated_tokens"], 0, "tokens"),
        Check.exactly("more delivered than generated", sums["more_delivered"], 0, "records"),
        Check.exactly("at rest in time", int(rested), 1, ""),
        Check.at_least("left, or nothing was shown", results["left"], options.some(REQUESTS) / 4, "clients"),
        Check.exactly("answered in a way that is none", results["odd"], 0, "clients"),
    ]
    return report


def _rests(running: Fleet, accounts: Path) -> bool:
    """Answer whether gateway, engines and journal came to rest in time."""

    def at_rest() -> bool:
        told = [read_account(accounts, each.id) for each in running.workers]
        return not any(each["open"] or each["held"] for each in told)

    def replayed() -> bool:
        return not running.gateway.statistics()["ledger"]["behind_bytes"]

    return (
        running.gateway.wait_idle(PATIENCE)
        and peers.eventually(at_rest, PATIENCE, 0.1)
        and peers.eventually(replayed, PATIENCE, 0.1)
    )


async def _ask_all(port: int, requests: int) -> Counter[str]:
    """Let clients ask; answers how many ended how."""
    dice, results = random.Random(SEED), Counter[str]()
    left = requests

    async def ask_on() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            results[await _ask(port, dice)] += 1
            if left % 5000 == 0:
                progress(f"{left} of {requests} to come")

    async with trio.open_nursery() as nursery:
        for _ in range(CLIENTS):
            nursery.start_soon(ask_on)
    return results


async def _ask(port: int, dice: random.Random) -> str:
    stays = dice.uniform(0, LEAVE_WITHIN) if dice.random() < LEAVE else PATIENCE
    simulate: dict[str, Any] = {"tokens": dice.randint(*TOKENS)}
    stream, by_reset = dice.random() < STREAMS, dice.random() < 0.5
    try:
        with await RawClient.connect(("127.0.0.1", port)) as client:
            await client.send(
                chat_request(f"request {dice.random()}", model=MODEL, stream=stream, simulate=simulate)
            )
            with trio.move_on_after(stays):
                answer = await client.read_to_end()
                return "whole" if answer.status == 200 and answer.ended == "complete" else "odd"
            if by_reset:
                client.leave_reset()
            else:
                client.leave_fin()
            return "left"
    except (OSError, MessageError):
        return "odd"


if __name__ == "__main__":
    sys.exit(main("ledger_sums"))
