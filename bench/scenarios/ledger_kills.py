"""Does every accepted request have exactly one record, however often gateways are killed?

Question    When gateways are killed (SIGKILL) under load, again and again, is there
            exactly one record afterwards of each request that a client or the engine
            has seen of? Also on PostgreSQL that two gateways share, and that is away
            for 30 s in the middle?
Load        12 clients for each gateway ask without a pause, for streams that take
            nothing, 20 or 200 ms. Each gateway is killed at a random moment and started
            again at once: one on SQLite 50 times; then two on one PostgreSQL 25 times
            each, while that is stopped for 30 s.
Engine      a scripted one in the bench's own process, which knows every request it got.
Measures    the rows of the database, after the last gateways have started and ended
            as they should; what each client got, by the id in its head.
Baseline    none: the expectation is exact.
Expect      each id that a client or the engine has heard has one row, and no row is
            open; whoever got a whole answer has the outcome ``completed``, or
            ``gateway_crashed`` if the kill came between its last byte and its record;
            nothing crashed but what ran at a kill; nobody is refused, also while there is no
            database; without PostgreSQL's programs its
            half is left out, and a note says so.
Run         make bench SCENARIO=ledger_kills     (about 3 min on 2 cores)
Output      bench/results/<date>-ledger_kills-<commit>.json, with machine facts.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa
import trio

from trio_gateway.tenancy import new_key
from trio_gateway.testing import (
    MessageError,
    RawClient,
    Script,
    ScriptedEngine,
    Wait,
    chat_request,
    chat_stream,
    open_engine,
)

from .. import peers
from ..command import Options, main, progress
from ..postgres import PostgresServer, postgres_server, programs
from ..processes import Child, free_port
from ..report import Check, Report

KILLS: Final = 50
CLIENTS: Final = 12  # of each gateway
BEFORE_KILL: Final = (0.1, 1.0)  # seconds since it served
AWAY_S: Final = 30.0  # that PostgreSQL is stopped
SEED: Final = 17
ANSWER: Final = tuple(chat_stream("a", "b", "c", usage=(3, 3)))
SCRIPTS: Final[Sequence[Script]] = [(*ANSWER[:3], Wait(seconds), *ANSWER[3:]) for seconds in (0.0, 0.02, 0.2)]

CONFIG: Final = """
[server]
bind = ["127.0.0.1:{port}"]
[admin]
bind = ["127.0.0.1:{admin_port}"]
[[workers]]
id = "w1"
url = "{engine}"
kind = "vllm"
slots = 64
[[models]]
id = "m1"
[probes]
interval = 0
[shutdown]
readiness_delay = 0
[database]
url = "{url}"
[[tenants]]
id = "asking"
keys = [{{id = "{key_id}", hash = "{key_hash}"}}]
"""
KEY_ID, KEY, KEY_HASH = (
    new_key()
)  # of the file: a gateway that starts while the database is away knows no other

Outage = Callable[[], Awaitable[None]]


class Seen:
    """What was seen of exchanges.

    Attributes:
        whole: by id, as a client had it in its head: whether the answer was whole.
        refused: answers that were none.
        kills: that were done.
    """

    def __init__(self) -> None:
        self.whole: dict[str, bool] = {}
        self.refused = 0
        self.kills = 0

    async def ask_on(self, port: int) -> None:
        """Be a client until nobody answers."""
        while True:
            try:
                with await RawClient.connect(("127.0.0.1", port)) as client:
                    await client.send(chat_request(key=KEY))
                    head = await client.read_head()
                    if head.status != 200:
                        self.refused += 1
                        continue
                    name = head.header("x-request-id") or ""
                    self.whole[name] = False
                    self.whole[name] = (await client.read_to_end()).ended == "complete"
            except (OSError, MessageError):
                return


def run(options: Options) -> Report:
    """Kill gateways under load; see the module's docstring."""
    report = Report("ledger_kills", ("database", "kills", "records", "completed", "crashed"))
    kills = options.some(KILLS)
    with tempfile.TemporaryDirectory(prefix="bench-ledger-") as folder:
        url = f"sqlite:///{folder}/records.db"
        _judge(report, "SQLite", url, *trio.run(_story, Path(folder, "sqlite"), url, 1, kills, None))
        bin_folder = programs()
        if bin_folder is None:
            report.notes.append("no PostgreSQL server is installed: its half is left out")
            return report
        with postgres_server(bin_folder) as server:
            url = server.make_database("records")

            async def outage() -> None:
                await _stop_for(server, AWAY_S / 10 if options.brief else AWAY_S)

            halves = max(kills // 2, 1)
            story = trio.run(_story, Path(folder, "postgres"), url, 2, halves, outage)
            _judge(report, "PostgreSQL, two gateways", url, *story)
    return report


async def _stop_for(server: PostgresServer, seconds: float) -> None:
    await trio.sleep(3)
    progress(f"PostgreSQL is stopped for {seconds:.0f} s")
    await trio.to_thread.run_sync(server.stop)
    await trio.sleep(seconds)
    await trio.to_thread.run_sync(server.start)
    progress("PostgreSQL is back")


async def _story(
    folder: Path, url: str, gateways: int, kills: int, outage: Outage | None
) -> tuple[Seen, set[str]]:
    """Kill each gateway so often, then let all start and end once more.

    Answers what clients saw, and the ids that the engine saw.
    """
    seen, dice = Seen(), random.Random(SEED)
    async with open_engine(lambda _: dice.choice(SCRIPTS)) as engine:
        async with trio.open_nursery() as nursery:
            if outage is not None:
                nursery.start_soon(outage)
            for number in range(gateways):
                place = folder / str(number)
                await trio.Path(place).mkdir(parents=True)
                nursery.start_soon(_kill_on, place, url, engine, seen, dice, kills)
        for number in range(gateways):
            async with _serving(folder / str(number), url, engine) as gateway:
                await trio.to_thread.run_sync(_wait_replayed, gateway)
        ids = {request.header("x-request-id") or "" for request in engine.requests}
        return seen, {attempt.rpartition("-")[0] for attempt in ids}


async def _kill_on(
    folder: Path, url: str, engine: ScriptedEngine, seen: Seen, dice: random.Random, kills: int
) -> None:
    for number in range(1, kills + 1):
        async with _serving(folder, url, engine) as gateway, trio.open_nursery() as nursery:
            for _ in range(CLIENTS):
                nursery.start_soon(seen.ask_on, gateway.port)
            await trio.sleep(dice.uniform(*BEFORE_KILL))
            await trio.to_thread.run_sync(gateway.child.kill)
            seen.kills += 1
        if number % 10 == 0:
            progress(f"gateway {folder.name} was killed {number} times")


@asynccontextmanager
async def _serving(folder: Path, url: str, engine: ScriptedEngine) -> AsyncIterator[peers.Gateway]:
    """Run a gateway whose journal stands in a folder; end it after the block, if it still runs."""
    ports = {name: free_port() for name in ("port", "admin_port")}
    config = trio.Path(folder / "gateway.toml")
    await config.write_text(
        CONFIG.format(**ports, engine=engine.url, url=url, key_id=KEY_ID, key_hash=KEY_HASH)
    )
    with ExitStack() as stack:
        serve = [*peers.gateway_command(), "serve", "--config", str(config)]
        child = stack.enter_context(Child(serve, name="gateway", talks=False))
        await trio.to_thread.run_sync(peers.wait_ready, child, ports["port"], "/livez")
        yield peers.Gateway("gateway", ports["port"], child, ports["admin_port"])
        await trio.to_thread.run_sync(child.stop)


def _wait_replayed(gateway: peers.Gateway) -> None:
    def done() -> bool:
        figures = gateway.statistics()["ledger"]
        return figures["crashed"] is not None and not figures["behind_bytes"]

    peers.eventually(done, 30, 0.1)


def _judge(report: Report, name: str, url: str, seen: Seen, attempted: set[str]) -> None:
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    with engine.connect() as connection:
        rows: list[Any] = list(connection.execute(sa.text("SELECT exchange_id, outcome FROM exchanges")))
    outcomes = {row.exchange_id: row.outcome for row in rows}
    counts = Counter(outcomes.values())
    wrong = Counter(
        outcomes.get(each)
        for each, whole in seen.whole.items()
        if whole and outcomes.get(each) not in ("completed", "gateway_crashed")
    )
    crashed_whole = sum(
        whole and outcomes.get(each) == "gateway_crashed" for each, whole in seen.whole.items()
    )
    figures = (seen.kills, len(rows), counts["completed"], counts["gateway_crashed"])
    report.rows.append((name, *map(str, figures)))
    report.notes += [
        f"{name}: {len(seen.whole)} answers begun, {sum(seen.whole.values())} whole; outcomes {dict(counts)}",
        f"{name}: {crashed_whole} whole answers had no record yet when the kill came",
    ]
    report.raw[name] = {"kills": seen.kills, "outcomes": dict(counts), "whole": sum(seen.whole.values())}
    heard = attempted | seen.whole.keys()
    report.checks += [
        Check.exactly(f"{name}: refused", seen.refused, 0, "requests"),
        Check.exactly(f"{name}: heard of, and without a record", len(heard - outcomes.keys()), 0, "requests"),
        Check.exactly(f"{name}: records beyond one each", len(rows) - len(outcomes), 0, "records"),
        Check.exactly(f"{name}: still open", counts[None], 0, "records"),
        Check.exactly(f"{name}: whole, but recorded as something else", wrong.total(), 0, "records"),
        Check.at_least(f"{name}: crashed, or nothing was shown", counts["gateway_crashed"], 1, "records"),
        Check.at_most(f"{name}: crashed", counts["gateway_crashed"], seen.kills * CLIENTS, "records"),
    ]


if __name__ == "__main__":
    sys.exit(main("ledger_kills"))
