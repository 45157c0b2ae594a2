"""The durable ledger in a running gateway: every ending in the database, whatever that does meanwhile."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import trio
from typer.testing import CliRunner

from bench.fleet import MODEL
from bench.postgres import PostgresServer
from tests.docs.pages import column
from tests.e2e.process import process_serving
from tests.e2e.serving import Serving, configuration, error_code, leave, serving, tenant
from tests.e2e.test_workers_die import COMMAND, Workers
from tests.ledger.databases import postgres as postgres
from tests.ledger.databases import rows_at
from tests.ledger.databases import url as url
from tests.ledger.making import make_journal
from trio_gateway.cli import app
from trio_gateway.testing import (
    Answer,
    Hold,
    chat_answer,
    chat_request,
    chat_stream,
    error_answer,
    good_answer,
    open_engine,
    silent_port,
)
from trio_gateway.units import MiB

LIMIT = 30.0  # seconds
LEFT = 5000  # exchanges; their lines have more than a MiB
POLL = 0.02  # seconds; a thread or another process is waited for, which no event tells of


async def until_true(holds: Any) -> None:
    with trio.fail_after(LIMIT):
        while not holds():  # noqa: ASYNC110 - a thread's work, see POLL
            await trio.sleep(POLL)


def replayed(gateway: Serving) -> bool:
    """Whether all that the journal has is in the database."""
    figures = gateway.gateway.statistics()["ledger"]
    return figures["behind_bytes"] == 0 and figures["unwritten"] == 0 and figures["crashed"] is not None


async def test_every_ending_is_in_the_database_as_it_is_in_the_record(url: str, tmp_path: Path) -> None:
    scripts = (
        chat_stream("a", "b", usage=(3, 2)),
        chat_answer(),
        error_answer(400),
        error_answer(500),
        (*chat_stream("a")[:3], Hold()),
    )
    async with (
        open_engine(*scripts) as engine,
        serving(
            engine,
            folder=tmp_path,
            database={"url": url},
            tenants=[tenant("t1", "k")],
            retry={"max_attempts": 1},
        ) as gateway,
    ):
        await gateway.ask(chat_request(key="k", headers=(("x-request-id", "mine"),)))
        await gateway.ask(chat_request(key="k", stream=False))
        for _ in range(2):
            await gateway.ask(chat_request(key="k"))
        with await gateway.connect() as client:
            await client.send(chat_request(key="k"))
            await client.read_events(2)
            leave(client, "reset")
            await gateway.settled(5)
        await gateway.ask(chat_request(key="wrong"))  # not accepted
        await until_true(lambda: replayed(gateway))
        rows = rows_at(url)
        records = gateway.records
    outcomes = ["completed", "completed", "refused", "upstream_failed", "client_gone"]
    assert [record.outcome for record in records] == outcomes
    assert [{field: row[field] for field in records[0].as_dict()} for row in rows] == [
        record.as_dict() for record in records
    ]
    assert len({row["gateway_id"] for row in rows}) == 1


async def test_without_a_database_there_is_no_ledger(tmp_path: Path) -> None:
    async with open_engine(good_answer) as engine, serving(engine, folder=tmp_path) as gateway:
        assert (await gateway.ask(chat_request())).status == 200
        assert gateway.gateway.statistics()["ledger"] is None
    assert not os.listdir(tmp_path)


async def test_every_key_of_the_ledgers_statistics_is_described(tmp_path: Path) -> None:
    database = {"url": "sqlite:///records.db", "gateway_id": "gw-1"}
    async with open_engine() as engine, serving(engine, folder=tmp_path, database=database) as gateway:
        figures = gateway.gateway.statistics()["ledger"]
    assert list(figures) == column("reference/statistics.md", "Ledger", "Key")
    assert figures["gateway_id"] == "gw-1"


async def test_what_waits_at_the_end_is_replayed_before_the_process_ends(tmp_path: Path) -> None:
    database = {"url": "sqlite:///records.db"}
    async with (
        open_engine(good_answer) as engine,
        serving(engine, folder=tmp_path, database=database) as gateway,
    ):
        for _ in range(3):
            await gateway.ask(chat_request())
    assert [row["outcome"] for row in rows_at(f"sqlite:///{tmp_path / 'records.db'}")] == ["completed"] * 3


async def test_a_database_that_is_away_is_not_noticed_by_requests(tmp_path: Path) -> None:
    database = {"url": "sqlite:///later/records.db"}
    async with (
        open_engine(good_answer) as engine,
        serving(engine, folder=tmp_path, database=database, tenants=[tenant("t1", "k")]) as gateway,
    ):
        await until_true(lambda: gateway.gateway.statistics()["ledger"]["trouble"])
        for _ in range(5):
            assert (await gateway.ask(chat_request(key="k"))).status == 200
        assert not replayed(gateway)
        (tmp_path / "later").mkdir()
        await until_true(lambda: replayed(gateway))
        assert len(rows_at(f"sqlite:///{tmp_path / 'later' / 'records.db'}")) == 5
        assert gateway.gateway.statistics()["ledger"]["trouble"] is None
    assert [line["event"] for line in map(dict, gateway.logged("database_away"))] == ["database_away"]
    assert "unable to open" in gateway.logged("database_away")[0]["reason"]
    assert gateway.logged("database_back")


async def test_a_full_journal_refuses_what_is_new_until_the_database_is_back(tmp_path: Path) -> None:
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal" / "0000000001.journal").write_bytes(make_journal(LEFT, "gw-1"))
    database = {"url": "sqlite:///later/records.db", "journal_bytes": MiB, "gateway_id": "gw-1"}
    async with (
        open_engine(good_answer) as engine,
        serving(engine, folder=tmp_path, database=database, tenants=[tenant("t1", "k")]) as gateway,
    ):
        answer = await gateway.ask(chat_request(key="k"))
        assert (answer.status, error_code(answer)) == (503, "records_unavailable")
        assert int(answer.header("retry-after") or 0) >= 5
        assert gateway.turned_away() == {"records_unavailable": 1}
        assert not engine.requests
        assert gateway.gateway.statistics()["ledger"]["refused"] == 1
        await until_true(lambda: "journal_full" in gateway.log.getvalue())
        (tmp_path / "later").mkdir()
        await until_true(lambda: replayed(gateway))
        assert (await gateway.ask(chat_request(key="k"))).status == 200
    outcomes = Counter(row["outcome"] for row in rows_at(f"sqlite:///{tmp_path / 'later' / 'records.db'}"))
    assert outcomes == {"gateway_crashed": LEFT, "completed": 1}
    assert gateway.logged("exchanges_crashed")[0]["count"] == LEFT


async def test_a_journal_has_one_owner(tmp_path: Path) -> None:
    database = {"url": "sqlite:///records.db"}
    async with open_engine() as engine, serving(engine, folder=tmp_path, database=database):
        with pytest.RaisesGroup(
            pytest.RaisesExc(OSError, match="in use by another process"),
            allow_unwrapped=True,
            flatten_subgroups=True,
        ):
            async with serving(engine, folder=tmp_path, database=database):
                pass


async def test_postgresql_that_stops_under_load_costs_no_record(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    url = postgres.make_database("stopped")
    answers: list[Answer] = []

    async def ask_on(gateway: Serving, stop: trio.Event) -> None:
        while not stop.is_set():
            answers.append(await gateway.ask(chat_request()))

    async with (
        open_engine(good_answer) as engine,
        serving(engine, folder=tmp_path, database={"url": url}, worker={"slots": 8}) as gateway,
    ):
        stop = trio.Event()
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(ask_on, gateway, stop)
            await until_true(lambda: gateway.gateway.statistics()["ledger"]["replayed"] > 20)
            await trio.to_thread.run_sync(postgres.stop)
            before = len(answers)
            await until_true(lambda: gateway.gateway.statistics()["ledger"]["trouble"])
            await until_true(lambda: len(answers) > before + 50)
            await trio.to_thread.run_sync(postgres.start)
            await until_true(lambda: gateway.gateway.statistics()["ledger"]["trouble"] is None)
            stop.set()
        await until_true(lambda: replayed(gateway))
    assert {answer.status for answer in answers} == {200}
    rows = rows_at(url)
    assert {row["exchange_id"] for row in rows} == {answer.header("x-request-id") for answer in answers}
    assert len(rows) == len(answers)
    assert {row["outcome"] for row in rows} == {"completed"}


async def test_a_database_that_never_answers_does_not_hold_up_the_end(tmp_path: Path) -> None:
    with silent_port() as port:
        database = {"url": f"postgresql+psycopg://gateway@127.0.0.1:{port}/records"}
        async with (
            open_engine(good_answer) as engine,
            process_serving(
                engine,
                folder=tmp_path,
                database=database,
                tenants=[tenant("t1", "k")],
                shutdown={"readiness_delay": 0},
            ) as gateway,
        ):
            with await gateway.connect() as client:
                await client.send(chat_request(key="k"))
                assert (await client.read_to_end()).status == 200
            gateway.send(signal.SIGTERM)
            with trio.fail_after(LIMIT):
                assert await gateway.exit_code() == 0
    # What it could not tell stays in the journal, for the next start.
    (segment,) = (tmp_path / "journal").glob("*.journal")
    lines = segment.read_text().splitlines()
    assert [json.loads(line[16:])["t"] for line in lines] == ["accepted", "settled"]


async def test_an_agents_last_word_completes_the_record(tmp_path: Path) -> None:
    (tmp_path / "join-token").write_text("0123456789abcdef")
    url = f"sqlite:///{tmp_path / 'records.db'}"
    sections: dict[str, Any] = {
        "models": [{"id": MODEL}],
        "internal": {"bind": ["127.0.0.1:0"], "join_token_file": "join-token"},
        "database": {"url": url},
    }
    async with serving(folder=tmp_path, **sections) as gateway:
        workers = Workers(gateway, tmp_path, (*COMMAND, "--simulate", "decode=100"))
        try:
            await workers.start("sim-1")
            with await gateway.connect() as client:
                await client.send(chat_request(model=MODEL, simulate={"tokens": 500}))
                await client.read_events(4)
                leave(client, "reset")
                record = await gateway.settled()
            await gateway.returned()
            await until_true(lambda: replayed(gateway))
            (row,) = rows_at(url)
            await gateway.expect_nothing_left()
        finally:
            workers.processes["sim-1"].kill()
            with trio.move_on_after(LIMIT, shield=True):
                await workers.processes["sim-1"].wait()
    assert row["outcome"] == record.outcome == "client_gone"
    assert row["released_at"] >= row["settled_at"] - 0.001
    assert row["usage_source"] == "engine"
    assert 500 > row["tokens_generated"] >= (record.tokens_generated or 0) > 0


# The command ------------------------------------------------------------------------------------------------


async def test_the_command_sums_up_what_was_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sections: dict[str, Any] = {
        "database": {"url": "sqlite:///records.db"},
        "tenants": [tenant("t1", "k1"), tenant("t2", "k2")],
    }
    async with open_engine(good_answer) as engine, serving(engine, folder=tmp_path, **sections) as gateway:
        for key in ("k1", "k1", "k2"):
            await gateway.ask(chat_request(key=key))
    file = trio.Path("trio-gateway.toml")
    await file.write_text(configuration(**sections), encoding="utf-8")

    def run(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["usage", *arguments])
        return result.exit_code, result.output

    status, page = run("--by", "tenant", "--format", "csv", "--since", "2026-01-01")
    assert status == 0
    rows = list(csv.DictReader(io.StringIO(page)))
    assert [(row["tenant"], row["requests"], row["generated"]) for row in rows] == [
        ("t1", "2", "2"),
        ("t2", "1", "1"),
    ]
    assert run()[1].splitlines()[1].split()[:4] == ["t1", "m1", "2", "2"]
    assert run("--until", "2026-01-01", "--format", "json", "--by", "day") == (0, "[]\n")
    assert run("--by", "mood")[0] == 2
    assert run("--format", "xml")[0] == 2
    assert run("--since", "soon")[0] == 2
    assert run("--set", 'database.url="sqlite:///nowhere/x.db"')[0] == 1
    await file.write_text("")
    assert run() == (2, "trio-gateway: the configuration names no database.url\n")
