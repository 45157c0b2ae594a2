"""Do the tokens in records equal what the engines made and what the clients have?

Question    When 10,000 clients of both doors end in every way, does each record say how many
            tokens its engine made, and as many delivered and acknowledged as its client has?
Load        10,000 requests, 24 clients at a time, for 2 to 40 tokens (`bench.endings`). Over
            SSE they read to the end, leave by FIN or reset within 150 ms, cancel by DELETE, set a
            deadline of up to 60 ms, or never read; over WebSockets with a credit of 4 they read
            and acknowledge to the end, cancel, cut, stop acknowledging, stop reading, or cut and
            resume. What is slower than delivery.stall_timeout (1 s here) stalls.
Engines     three simulated ones that register (`bench.simulated_worker`), of 8 slots; each keeps
            its own log: the tokens of each attempt.
Measures    the rows of the database (SQLite) when all have come to rest, the engines' logs, what
            each client has counted by the words that it read, and `trio_gateway_tokens_total`.
Baseline    engines and clients.
Expect      for each exchange: generated = the log's, to the token; delivered <= generated;
            acknowledged <= delivered. In sum: generated >= queued + delivered.

            Between a record's *delivered* and the client's own count, by how it ended:

            completed               equal, and equal to generated
            stalled                 equal: what the client's kernel acknowledged is what the
                                    client finds there after the cut
            told by an error event  delivered <= read: the last acknowledgements of a kernel may
            or a last message       be on their way (up to 40 ms) when the record is written. So too
                                    if a cancellation came when the rest, with the end of the
                                    answer, was waiting for the socket, which then took it.
                                    What the message itself says is <= read over SSE, where it
                                    is written before the event leaves, and equal over WebSockets
            left by FIN             read <= delivered: a FIN carries the acknowledgement of all
                                    that came; the rest the client's kernel had, unread
            left by reset           both <= generated: a reset may overtake acknowledgements

            *Acknowledged* is at most what the client has acknowledged. It is equal where nothing
            can have been on its way: stalled for want of credit; and completed, if some was
            acknowledged when the last message was written, on the first socket and without a
            deadline (else the gateway does not wait for the last ones).
Run         make bench SCENARIO=counts      (about 2 min on 2 cores)
Output      bench/results/<date>-counts-<commit>.json, with machine facts.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa
import trio

from .. import endings, peers
from ..command import Options, main, progress
from ..endings import CUT, FIN, ODD, REFUSED, TOLD, WHOLE, Clients, Told
from ..fleet import Fleet, fleet
from ..report import Check, Report
from ..simulated_worker import command, read_account, read_attempts

REQUESTS: Final = 10_000
CLIENTS: Final = 24
PATIENCE: Final = 30.0  # seconds for rest
SEED: Final = 41
ROWS: Final = """
SELECT exchange_id, client_request_id, outcome, phase, attempts, tokens_generated AS generated,
  tokens_delivered AS delivered, tokens_acknowledged AS acknowledged FROM exchanges"""
CONFIG: Final = """
[database]
url = "sqlite:///{folder}/records.db"
journal = "{folder}/journal"
[delivery]
stall_timeout = 1
buffer_bytes = "16 KiB"
resume_window = {window}
"""
KINDS: Final = ("generated", "queued", "delivered", "acknowledged")


@dataclass(frozen=True)
class Pair:
    """One exchange: its record, and what its client has."""

    row: dict[str, Any]
    told: Told

    def wrong(self) -> Iterator[str]:
        """Name each relation that does not hold."""
        row, told = self.row, self.told
        generated, delivered = row["generated"], row["delivered"]
        relations: dict[str, bool] = {"read <= generated": told.tokens <= generated}
        if told.end == WHOLE and row["outcome"] == "completed":
            relations["completed: read = delivered"] = told.tokens == delivered
            relations["completed: delivered = generated"] = delivered == generated
        elif told.end == CUT and row["outcome"] == "client_stalled":
            relations["stalled: read = delivered"] = told.tokens == delivered
        elif told.end in (TOLD, REFUSED, WHOLE):
            relations["told: delivered <= read"] = delivered <= told.tokens
            yield from self._wrong_in_words()
        elif told.end == FIN:
            relations["left by FIN: read <= delivered"] = told.tokens <= delivered
        if told.acknowledged is not None:
            acknowledged = row["acknowledged"] or 0
            relations["acknowledged <= said"] = acknowledged <= told.acknowledged
            said = told.delivery.get("acknowledged") if isinstance(told.delivery, dict) else None
            waited_for = row["outcome"] == "completed" and told.end == WHOLE and not told.hurried and said
            if waited_for or (told.end == TOLD and row["outcome"] == "client_stalled"):
                relations["acknowledged = said"] = acknowledged == told.acknowledged
        yield from (name for name, holds in relations.items() if not holds)

    def _wrong_in_words(self) -> Iterator[str]:
        """Judge what the last message or the error event said."""
        said, read = self.told.delivery, self.told.tokens
        if isinstance(said, int) and said > read:
            yield "said in the error event <= read"
        if isinstance(said, dict):
            if said["delivered"] != read:
                yield "said in the last message = read"
            if not (said["acknowledged"] or 0) <= said["delivered"] <= said["generated"]:
                yield "acknowledged <= delivered <= generated in the last message"


def run(options: Options) -> Report:
    """Let clients end, and compare the accounts; see the module's docstring."""
    with tempfile.TemporaryDirectory(prefix="bench-counts-") as name:
        folder = Path(name)
        extra = CONFIG.format(folder=folder, window=endings.RESUME_WINDOW)
        worker = command(folder, prefill=20_000, decode=600)
        with fleet(worker, extra=extra) as running:
            told = trio.run(_play_all, running.gateway.port, options.some(REQUESTS))
            rested = _rests(running, folder)
            statistics = running.gateway.statistics()
            logs = {
                attempt: tokens
                for each in running.workers
                for attempt, tokens in read_attempts(folder, each.id).items()
            }
        with sa.create_engine(f"sqlite:///{folder}/records.db", poolclass=sa.NullPool).connect() as database:
            rows = [dict(row) for row in database.execute(sa.text(ROWS)).mappings()]
    return _report(told, rows, logs, statistics, rested)


async def _play_all(port: int, requests: int) -> list[Told]:
    clients, all_told = Clients(port, SEED), list[Told]()
    left = requests

    async def play_on() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            all_told.append(await clients.play())
            if len(all_told) % 1000 == 0:
                progress(f"{len(all_told)} of {requests} have ended")

    async with trio.open_nursery() as nursery:
        for _ in range(CLIENTS):
            nursery.start_soon(play_on)
    return all_told


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


def _report(
    told: Sequence[Told],
    rows: Sequence[dict[str, Any]],
    logs: dict[str, int],
    statistics: dict[str, Any],
    rested: bool,
) -> Report:
    report = Report("counts", ("ending", "clients", "tokens read", "delivered", "generated"))
    made = Counter[str]()
    for attempt, tokens in logs.items():
        made[attempt.rpartition("-")[0]] += tokens
    pairs = list(_paired(told, rows))
    wrong = Counter(name for pair in pairs for name in pair.wrong())
    broken = Counter(_broken(rows, made))
    odd = [each for each in told if each.end == ODD]
    totals = Counter[str]()
    for (_, _, kind), tokens in peers.counts_of(statistics, "tokens").items():
        totals[kind] += tokens
    _describe(report, pairs)
    report.notes += [
        f"metrics: {dict(totals)}; engines: {sum(logs.values())}",
        f"outcomes: {dict(Counter(row['outcome'] for row in rows))}",
        *(f"odd: {each}" for each in odd[:10]),
        *(f"{count} x {name}: {_first(pairs, name)}" for name, count in wrong.items()),
    ]
    counters = {"wrong": wrong, "broken": broken, "totals": totals}
    report.raw |= {name: dict(counter) for name, counter in counters.items()}
    report.raw["odd"] = [vars(each) for each in odd]
    sums = {kind: sum(row[kind] or 0 for row in rows) for kind in KINDS if kind != "queued"}
    report.checks += [
        Check.exactly("accepted without a record", statistics["accepted"] - len(rows), 0, ""),
        Check.exactly("made for no record", len(made.keys() - {row["exchange_id"] for row in rows}), 0, ""),
        *(Check.exactly(f"not so: {name}", broken[name], 0, "records") for name in RELATIONS),
        Check.exactly("generated beside the logs", sums["generated"] - sum(logs.values()), 0, "tokens"),
        Check.at_most(
            "queued + delivered", totals["queued"] + totals["delivered"], sums["generated"], "of generated"
        ),
        Check.exactly("delivered in metrics beside records", totals["delivered"] - sums["delivered"], 0, ""),
        Check.exactly(
            "acknowledged in metrics beside records", totals["acknowledged"] - sums["acknowledged"], 0, ""
        ),
        Check.exactly("relations to clients that do not hold", wrong.total(), 0, ""),
        Check.exactly("clients that ended oddly", len(odd), 0, ""),
        Check.at_least("compared with their client", len(pairs), 0.95 * len(told), ""),
        Check.exactly("at rest in time", int(rested), 1, ""),
    ]
    return report


RELATIONS: Final = (
    "settled",
    "generated = the engine's log",
    "delivered <= generated",
    "acknowledged <= delivered",
)


def _broken(rows: Sequence[dict[str, Any]], made: Counter[str]) -> Iterator[str]:
    """Name each relation that does not hold in a record."""
    for row in rows:
        generated, delivered, acknowledged = row["generated"], row["delivered"], row["acknowledged"]
        holds = (
            row["outcome"] is not None,
            generated == made[row["exchange_id"]],
            (delivered or 0) <= (generated or 0),
            (acknowledged or 0) <= (delivered or 0),
        )
        yield from (name for name, held in zip(RELATIONS, holds, strict=True) if not held)


def _paired(told: Sequence[Told], rows: Sequence[dict[str, Any]]) -> Iterator[Pair]:
    """Bring records and clients together, by either's name; who left before it had one stays alone."""
    by_name = {row["client_request_id"]: row for row in rows}
    by_id = {row["exchange_id"]: row for row in rows}
    for each in told:
        row = by_id.get(each.request_id) or by_name.get(each.name)
        if row is not None and each.end != ODD:
            yield Pair(row, each)


def _first(pairs: Sequence[Pair], name: str) -> Pair:
    return next(pair for pair in pairs if name in pair.wrong())


def _describe(report: Report, pairs: Sequence[Pair]) -> None:
    groups: dict[str, list[Pair]] = {}
    for pair in pairs:
        groups.setdefault(f"{pair.told.way}: {pair.told.end}, {pair.row['outcome']}", []).append(pair)
    for name, group in sorted(groups.items()):
        sums = (
            sum(pair.told.tokens for pair in group),
            sum(pair.row["delivered"] or 0 for pair in group),
            sum(pair.row["generated"] or 0 for pair in group),
        )
        report.rows.append((name, str(len(group)), *map(str, sums)))


if __name__ == "__main__":
    sys.exit(main("counts"))
