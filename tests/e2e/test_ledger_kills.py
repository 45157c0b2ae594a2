"""``kill -9`` of gateways under load: afterwards every accepted request has exactly one record.

The long version is the scenario `ledger_kills` of the bench.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import trio

from bench.postgres import PostgresServer
from tests.e2e.process import GatewayProcess, process_serving
from tests.ledger.databases import postgres as postgres
from tests.ledger.databases import rows_at
from tests.ledger.databases import url as url
from trio_gateway.testing import (
    MessageError,
    ScriptedEngine,
    Wait,
    chat_request,
    chat_stream,
    open_engine,
)

KILLS = 5
CLIENTS = 6
STREAM = tuple(chat_stream("a", "b", "c", usage=(3, 3)))
SLOW = (*STREAM[:3], Wait(0.1), *STREAM[3:])
QUICK = chat_stream("a", usage=(3, 1))


class Seen:
    """What clients saw of exchanges, by id: whether the answer was whole."""

    def __init__(self) -> None:
        self.whole: dict[str, bool] = {}

    async def ask_on(self, gateway: GatewayProcess) -> None:
        """Ask without a pause until the gateway is dead."""
        while True:
            try:
                with await gateway.connect() as client:
                    await client.send(chat_request())
                    head = await client.read_head()
                    name = head.header("x-request-id")
                    assert head.status == 200
                    assert name is not None
                    self.whole[name] = False
                    self.whole[name] = (await client.read_to_end()).ended == "complete"
            except (OSError, MessageError):
                return


def attempted(engine: ScriptedEngine) -> set[str]:
    """The exchanges of which the engine has heard."""
    ids = {request.header("x-request-id") for request in engine.requests}
    return {name.rpartition("-")[0] for name in ids if name is not None}


def check(url: str, seen: Seen, engine: ScriptedEngine) -> None:
    rows = {row["exchange_id"]: row for row in rows_at(url)}
    assert len(rows) == len(rows_at(url))
    assert seen.whole.keys() <= attempted(engine) <= rows.keys()
    outcomes = {name: row["outcome"] for name, row in rows.items()}
    assert set(outcomes.values()) <= {"completed", "gateway_crashed", "gateway_shutdown", "client_gone"}
    crashed = {name for name, outcome in outcomes.items() if outcome == "gateway_crashed"}
    assert crashed, "no request was running when a gateway was killed"
    # Whoever got it all may have had its last byte a moment before the record was written.
    assert len(crashed) <= KILLS * CLIENTS
    got_it_all = {name for name, whole in seen.whole.items() if whole}
    assert {outcomes[name] for name in got_it_all} <= {"completed", "gateway_crashed"}
    assert len(got_it_all) > len(crashed)
    assert len(got_it_all) < len(seen.whole), "no answer was under way when a gateway was killed"


async def serve_and_die(
    engine: ScriptedEngine, folder: Path, url: str, seen: Seen, dice: random.Random, kills: int
) -> None:
    """Start a gateway, have it killed under load, start it again; let the last one end as it should."""
    for _ in range(kills):
        async with (
            process_serving(engine, folder=folder, **sections(url)) as gateway,
            trio.open_nursery() as nursery,
        ):
            for _ in range(CLIENTS):
                nursery.start_soon(seen.ask_on, gateway)
            await trio.sleep(dice.uniform(0.2, 1.0))  # the moment of a kill is no synchronisation
            gateway.process.kill()
            await gateway.exit_code()
    async with process_serving(engine, folder=folder, **sections(url)) as gateway:
        with trio.fail_after(30):
            await gateway.logged("exchanges_crashed")
            gateway.process.terminate()
            assert await gateway.exit_code() == 0


def sections(url: str) -> dict[str, object]:
    return {
        "database": {"url": url},
        "worker": {"kind": "vllm", "slots": 8},
        "shutdown": {"readiness_delay": 0},
    }


@pytest.mark.slow
async def test_gateways_that_are_killed_leave_one_record_of_each_accepted_request(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'records.db'}"
    seen, dice = Seen(), random.Random(5)
    async with open_engine(lambda _: dice.choice((SLOW, QUICK))) as engine:
        await serve_and_die(engine, tmp_path, url, seen, dice, KILLS)
        check(url, seen, engine)


@pytest.mark.slow
async def test_gateways_that_share_a_database_close_only_what_was_theirs(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    url = postgres.make_database("shared")
    seen, dice = Seen(), random.Random(6)
    async with open_engine(lambda _: dice.choice((SLOW, QUICK))) as engine:
        folders: Sequence[Path] = [tmp_path / "one", tmp_path / "two"]
        async with trio.open_nursery() as nursery:
            for folder in folders:
                folder.mkdir()
                nursery.start_soon(serve_and_die, engine, folder, url, seen, dice, 2)
        check(url, seen, engine)
    assert {row["count"] for row in rows_at(url, "SELECT count(DISTINCT gateway_id) FROM exchanges")} == {2}
