"""Tenants and keys of a database while a gateway runs: what changes counts soon, and breaks nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
import trio
import trio.testing
from typer.testing import CliRunner

from bench.postgres import PostgresServer
from tests.docs.pages import column
from tests.e2e.serving import Serving, configuration, error_code, serving, tenant
from tests.ledger.databases import postgres as postgres
from tests.ledger.databases import url as url
from trio_gateway.cli import app
from trio_gateway.testing import Answer, WaitFor, chat_request, chat_stream, good_answer, open_engine

LIMIT = 20.0  # seconds; a wait that takes longer has failed
POLL = 0.02  # seconds; a thread is waited for, which no event tells of


class Operator:
    """Uses the commands while the gateway runs."""

    def __init__(self, folder: Path, url: str, **sections: Any) -> None:
        self._file = folder / "operator.toml"
        self._file.write_text(configuration(database={"url": url}, **sections), encoding="utf-8")

    async def run(self, *arguments: str) -> str:
        """Run a command, in a thread as another process would; answers what it prints."""

        def invoke() -> str:
            result = CliRunner().invoke(app, [*arguments, "--config", str(self._file)])
            assert result.exit_code == 0, result.output
            return result.stdout.strip()

        return await trio.to_thread.run_sync(invoke)

    async def key(self, tenant: str, *options: str) -> str:
        """Make a key."""
        return await self.run("keys", "create", "--tenant", tenant, *options)


async def until(holds: Callable[[], bool]) -> None:
    with trio.fail_after(LIMIT):
        while not holds():  # noqa: ASYNC110 - a thread's work, see POLL
            await trio.sleep(POLL)


async def known(gateway: Serving, revision: int) -> None:
    """Wait until the gateway has read a revision of the database, and it counts."""

    def is_known() -> bool:
        return bool(gateway.gateway.statistics()["tenants"]["revision"] == revision)

    await until(is_known)
    await trio.testing.wait_all_tasks_blocked(0.01)


async def until_status(gateway: Serving, key: str, status: int) -> Answer:
    """Ask with a key until the answer has a status."""
    with trio.fail_after(LIMIT):
        while True:
            answer = await gateway.ask(chat_request(key=key))
            if answer.status == status:
                return answer
            await trio.sleep(POLL)


async def test_a_key_counts_while_the_gateway_runs_and_no_more_when_it_is_revoked(
    url: str, tmp_path: Path
) -> None:
    filed = [tenant("filed", "f")]
    operator = Operator(tmp_path, url, tenants=filed)
    async with (
        open_engine(good_answer) as engine,
        serving(engine, folder=tmp_path, database={"url": url}, tenants=filed) as gateway,
    ):
        await operator.run("tenants", "create", "acme")
        keys = [await operator.key("acme", "--id", "k1"), await operator.key("filed", "--id", "k2")]
        for key in keys:
            await until_status(gateway, key, 200)
        await gateway.settled(2)
        assert [(record.tenant, record.key_id) for record in gateway.records] == [
            ("acme", "k1"),
            ("filed", "k2"),
        ]
        await operator.run("keys", "revoke", "k1")
        refused = await until_status(gateway, keys[0], 401)
        assert error_code(refused) == "invalid_api_key"
        for key in (keys[1], "f"):
            assert (await gateway.ask(chat_request(key=key))).status == 200
        await operator.run("tenants", "remove", "acme")
        figures = gateway.gateway.statistics()["tenants"]
    assert list(figures) == column("reference/statistics.md", "Tenants", "Key")
    assert gateway.logged("tenants_read")


async def test_what_a_key_and_its_tenant_may_do_is_that_of_the_database(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'gateway.db'}"
    operator = Operator(tmp_path, url)
    await operator.run("tenants", "create", "acme", "--tiers", "batch", "--requests-per-minute", "100")
    good = await operator.key("acme", "--requests-per-minute", "2")
    poor = await operator.key("acme", "--models", "other")
    async with (
        open_engine(good_answer) as engine,
        serving(engine, folder=tmp_path, database={"url": url}) as gateway,
    ):
        answer = await gateway.ask(chat_request(key=good))
        assert (answer.status, answer.header("x-ratelimit-remaining-requests")) == (200, "1")
        assert (await gateway.settled()).tier == "batch"
        assert error_code(await gateway.ask(chat_request(key=poor))) == "model_not_allowed"
        wish = (("x-gateway-priority", "interactive"),)
        refused = await gateway.ask(chat_request(key=good, headers=wish))
        assert error_code(refused) == "priority_not_allowed"
        await operator.run("tenants", "set", "acme", "--tiers", "interactive,batch", "--models", "none")
        await known(gateway, 4)
        assert error_code(await gateway.ask(chat_request(key=good, headers=wish))) == "model_not_allowed"
        await operator.run("tenants", "set", "acme", "--unset", "models", "--requests-per-minute", "1")
        await known(gateway, 5)
        assert (await gateway.ask(chat_request(key=good, headers=wish))).status == 200
        limited = await gateway.ask(chat_request(key=good, headers=wish))
        assert (limited.status, error_code(limited)) == (429, "rate_limit_exceeded")
        assert "the tenant's limit of 1 requests" in str(limited.error()["message"])


async def test_bounds_and_weights_of_the_database_count_for_those_who_wait(
    tmp_path: Path, nursery: trio.Nursery
) -> None:
    url = f"sqlite:///{tmp_path / 'gateway.db'}"
    operator = Operator(tmp_path, url)
    await operator.run("tenants", "create", "acme", "--max-concurrency", "1", "--max-queued", "2")
    key = await operator.key("acme")
    go = trio.Event()
    waiting = (WaitFor(go), *chat_stream("a"))
    answers: list[Answer] = []
    async with (
        open_engine(*[waiting] * 4) as engine,
        serving(engine, folder=tmp_path, database={"url": url}) as gateway,
    ):

        async def ask() -> None:
            answers.append(await gateway.ask(chat_request(key=key)))

        for number in range(3):
            nursery.start_soon(ask)
            await gateway.until(lambda n=number: gateway.held + gateway.depth == n + 1)  # type: ignore[misc]
        assert (gateway.held, gateway.depth) == (1, 2)
        assert error_code(await gateway.ask(chat_request(key=key))) == "rate_limit_exceeded"
        await operator.run("tenants", "set", "acme", "--max-concurrency", "2", "--weight", "8")
        await until(lambda: gateway.held == 2)
        assert gateway.depth == 1
        assert gateway.gateway.admission._shares["acme"].weight == 8
        go.set()
        await gateway.settled(3)
    assert [answer.status for answer in answers] == [200] * 3


async def test_a_tenant_that_is_removed_takes_nothing_along_that_runs_or_waits(
    tmp_path: Path, nursery: trio.Nursery
) -> None:
    url = f"sqlite:///{tmp_path / 'gateway.db'}"
    operator = Operator(tmp_path, url)
    rates = ("--requests-per-minute", "50", "--tokens-per-minute", "5000")
    await operator.run("tenants", "create", "acme", "--max-concurrency", "1", *rates)
    await operator.run("tenants", "create", "stays")
    key = await operator.key("acme", *rates)
    go = trio.Event()
    answers: list[Answer] = []
    async with (
        open_engine(*[(WaitFor(go), *chat_stream("a", usage=(3, 1)))] * 3) as engine,
        serving(engine, folder=tmp_path, database={"url": url}, worker={"slots": 1}) as gateway,
    ):

        async def ask() -> None:
            answers.append(await gateway.ask(chat_request(key=key)))

        nursery.start_soon(ask)
        await gateway.until(lambda: gateway.held == 1)
        nursery.start_soon(ask)
        await gateway.queued(1)
        with await gateway.connect() as late:
            request = chat_request(key=key)
            await late.send(request[:-1])  # its key is good when it is judged, and gone when it is all there
            await gateway.until(lambda: gateway.gateway.books.reading == 1)
            await operator.run("tenants", "remove", "acme")
            await known(gateway, 4)
            await late.send(request[-1:])
            await gateway.until(lambda: gateway.depth == 2)
            assert (await gateway.ask(chat_request(key=key))).status == 401
            go.set()
            await gateway.settled(3)
            assert (await late.read_to_end()).status == 200
    assert [answer.status for answer in answers] == [200, 200]
    assert [(record.tenant, record.outcome) for record in gateway.records] == [("acme", "completed")] * 3


async def test_the_file_counts_before_the_database(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'gateway.db'}"
    operator = Operator(tmp_path, url)
    await operator.run("tenants", "create", "acme", "--models", "none")
    key = await operator.key("acme", "--id", "acme-key")  # as the file has one
    other = await operator.key("acme", "--id", "other")
    async with (
        open_engine(good_answer) as engine,
        serving(engine, folder=tmp_path, database={"url": url}, tenants=[tenant("acme", "f")]) as gateway,
    ):
        statuses = [(await gateway.ask(chat_request(key=each))).status for each in ("f", other, key)]
        assert gateway.gateway.statistics()["tenants"]["ignored"] == 2
    assert statuses == [200, 200, 401]
    assert [line["reason"] for line in gateway.logged("entry_ignored")] == [
        "tenant acme: the configuration file has one of that name",
        "key acme-key: the configuration file has it, or another one of that name",
    ]


async def test_without_tenants_everybody_is_served_until_there_is_one_and_never_again(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'gateway.db'}"
    operator = Operator(tmp_path, url)
    async with (
        open_engine(good_answer) as engine,
        serving(engine, folder=tmp_path, database={"url": url}) as gateway,
    ):
        assert (await gateway.ask(chat_request())).status == 200
        await operator.run("tenants", "create", "acme")
        await known(gateway, 1)
        assert (await gateway.ask(chat_request())).status == 401
        await operator.run("tenants", "remove", "acme")
        await known(gateway, 2)
        assert (await gateway.ask(chat_request())).status == 401
        assert (await gateway.settled()).tenant == "anonymous"
    async with open_engine() as engine, serving(engine, folder=tmp_path, database={"url": url}) as gateway:
        assert (await gateway.ask(chat_request())).status == 401


async def test_where_others_can_reach_it_nobody_is_served_without_a_key(tmp_path: Path) -> None:
    database = {"url": f"sqlite:///{tmp_path / 'gateway.db'}"}
    async with (
        open_engine() as engine,
        serving(engine, folder=tmp_path, database=database, server={"bind": ["0.0.0.0:0"]}) as gateway,
    ):
        gateway.gateway.addresses[0] = gateway.gateway.addresses[0].replace("0.0.0.0", "127.0.0.1")
        assert (await gateway.ask(chat_request())).status == 401


async def test_until_the_database_was_read_an_unknown_key_is_neither_good_nor_bad(tmp_path: Path) -> None:
    database = {"url": "sqlite:///later/gateway.db"}
    async with (
        open_engine(good_answer) as engine,
        serving(engine, folder=tmp_path, database=database, tenants=[tenant("filed", "f")]) as gateway,
    ):
        assert (await gateway.ask(chat_request(key="f"))).status == 200
        answer = await gateway.ask(chat_request(key="unknown"))
        assert (answer.status, error_code(answer)) == (503, "keys_unavailable")
        assert int(answer.header("retry-after") or 0) >= 2
        assert (await gateway.get("/readyz")).status == 200
        (tmp_path / "later").mkdir()
        await until_status(gateway, "unknown", 401)


async def test_without_a_tenant_in_the_file_it_is_ready_when_the_database_was_read(tmp_path: Path) -> None:
    database = {"url": "sqlite:///later/gateway.db"}
    async with (
        open_engine(good_answer) as engine,
        serving(engine, folder=tmp_path, database=database) as gateway,
    ):
        answer = await gateway.get("/readyz")
        assert (answer.status, b"tenants have not been read" in answer.body) == (503, True)
        assert error_code(await gateway.ask(chat_request())) == "keys_unavailable"
        (tmp_path / "later").mkdir()
        await known(gateway, 0)
        assert (await gateway.get("/readyz")).status == 200
        assert (await gateway.ask(chat_request())).status == 200


async def test_a_database_that_stops_leaves_keys_as_they_were_and_counts_when_it_is_back(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    url = postgres.make_database("stopping")
    operator = Operator(tmp_path, url)
    await operator.run("tenants", "create", "acme")
    keys = [await operator.key("acme", "--id", id_) for id_ in ("k1", "k2")]
    async with (
        open_engine(good_answer) as engine,
        serving(engine, folder=tmp_path, database={"url": url}) as gateway,
    ):
        await trio.to_thread.run_sync(postgres.stop)
        try:
            await until(lambda: gateway.gateway.statistics()["tenants"]["trouble"] is not None)
            for key in keys:
                assert (await gateway.ask(chat_request(key=key))).status == 200
            assert (await gateway.ask(chat_request(key="unknown"))).status == 401
        finally:
            with trio.move_on_after(LIMIT, shield=True):
                await trio.to_thread.run_sync(postgres.start)
        await operator.run("keys", "revoke", "k1")
        await until_status(gateway, keys[0], 401)
        assert (await gateway.ask(chat_request(key=keys[1]))).status == 200
        assert gateway.gateway.statistics()["tenants"]["trouble"] is None
    assert len(gateway.logged("tenants_away")) == len(gateway.logged("tenants_back")) == 1


async def test_two_gateways_follow_one_database(postgres: PostgresServer, tmp_path: Path) -> None:
    url = postgres.make_database("shared")
    operator = Operator(tmp_path, url)
    await operator.run("tenants", "create", "acme")

    def sections(name: str) -> dict[str, Any]:
        return {"folder": tmp_path, "database": {"url": url, "journal": name}}

    async with serving(**sections("one")) as first, serving(**sections("two")) as second:
        key = await operator.key("acme", "--id", "k1")
        for gateway in (first, second):
            await until_status(gateway, key, 503)  # it is let in, and there is no worker
        await operator.run("keys", "revoke", "k1")
        for gateway in (first, second):
            await until_status(gateway, key, 401)


@pytest.mark.parametrize("statement", ["DELETE FROM tenants", "UPDATE tenants SET tiers = 'nonsense'"])
async def test_whatever_somebody_writes_into_the_tables_the_rest_goes_on(
    statement: str, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path / 'gateway.db'}"
    operator = Operator(tmp_path, url)
    await operator.run("tenants", "create", "acme")
    key = await operator.key("acme")
    async with (
        open_engine(good_answer) as engine,
        serving(engine, folder=tmp_path, database={"url": url}, tenants=[tenant("filed", "f")]) as gateway,
    ):
        assert (await gateway.ask(chat_request(key=key))).status == 200
        database = sa.create_engine(url, poolclass=sa.NullPool)
        with database.begin() as connection:
            connection.execute(sa.text(statement))
            connection.execute(sa.text("UPDATE tenants_revision SET revision = revision + 1"))
        await until_status(gateway, key, 401)
        assert (await gateway.ask(chat_request(key="f"))).status == 200
    assert gateway.logged("entry_ignored")
