"""Every lever, on a running gateway: what it does, what it says, and that repeating it is safe."""

from __future__ import annotations

import contextlib
import dataclasses
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.e2e.serving import Serving, error_code, serving, tenant
from tests.operations.test_live_limits import ME, act, refused
from trio_gateway.admin import SHAPES, RequestFilter, complaints
from trio_gateway.errors import Refused
from trio_gateway.operations import _keys, _operations
from trio_gateway.operations._pulse import bucket_quantile, quantile
from trio_gateway.operations._requests import row_now
from trio_gateway.tenancy import new_key, open_roster
from trio_gateway.testing import Answer, WaitFor, chat_request, good_answer, open_engine


def expect_shape(value: object, name: str) -> None:
    assert list(complaints(value, SHAPES[name], SHAPES)) == []


class Held:
    """A gateway of two workers with one slot each, whose engines answer when they are let go."""

    def __init__(self, gateway: Serving, nursery: trio.Nursery, go: trio.Event) -> None:
        self.gateway = gateway
        self.go = go
        self.answers: list[Answer] = []
        self._nursery = nursery

    async def call(self, key: str = "key-a", *, waits: bool = False) -> str:
        """Send a request; answers its id once it has a worker, or a position."""

        async def run() -> None:
            self.answers.append(await self.gateway.ask(chat_request(key=key)))

        before = {exchange.request.exchange_id for exchange in self.gateway.gateway.live}
        self._nursery.start_soon(run)

        def new() -> set[str]:
            return {each.request.exchange_id for each in self.gateway.gateway.live} - before

        await self.gateway.until(lambda: bool(new()))
        (name,) = new()
        state = "waiting" if waits else "running"
        found = self.gateway.gateway.live
        await self.gateway.until(
            lambda: (one := found.find(name)) is not None and one.standing_word() == state
        )
        return name

    def statuses(self) -> list[int]:
        return sorted(answer.status or 0 for answer in self.answers)


@asynccontextmanager
async def held(**sections: Any) -> AsyncIterator[Held]:
    go = trio.Event()
    sections.setdefault("tenants", [tenant("a", "key-a"), tenant("b", "key-b")])
    async with (
        open_engine(lambda request: (WaitFor(go), *good_answer(request))) as one,
        open_engine(lambda request: (WaitFor(go), *good_answer(request))) as two,
        serving(
            one,
            two,
            worker={"slots": 1, "cancel_grace": 0.001},
            **sections,
        ) as gateway,
        trio.open_nursery() as nursery,
    ):
        yield Held(gateway, nursery, go)
        go.set()


# Requests and tenants ---------------------------------------------------------------------------------------


async def test_a_request_is_cancelled_once_and_then_there_is_nothing_to_do() -> None:
    async with held() as night:
        name = await night.call()
        result = await act(night.gateway, "requests.cancel", name)
        assert (result.done, result.before) == (True, {"state": "running"})
        assert result.after == {"state": "ended", "outcome": "operator_cancelled"}
        again = await act(night.gateway, "requests.cancel", name)
        assert not again.done
        await night.gateway.settled(1)
        again = await act(night.gateway, "requests.cancel", name)
        assert (again.done, again.after) == (False, {"state": "ended", "outcome": "operator_cancelled"})
        assert (await refused(night.gateway, "requests.cancel", "nobody")).code == "not_found"
    assert night.statuses() == [503]
    assert error_code(night.answers[0]) == "operator_cancelled"
    assert night.answers[0].header("x-should-retry") == "false"
    assert night.answers[0].header("retry-after") is None


async def test_all_requests_of_a_tenant_are_cancelled_and_no_others() -> None:
    async with held() as night:
        await night.call("key-a")
        await night.call("key-b")
        await night.call("key-a", waits=True)
        result = await act(night.gateway, "tenants.cancel", "a")
        assert (result.done, result.after["cancelled"]) == (True, 2)
        await night.gateway.settled(2)
        assert not (await act(night.gateway, "tenants.cancel", "a")).done
        assert (await refused(night.gateway, "tenants.cancel", "nobody")).code == "not_found"
    assert night.statuses() == [200, 503, 503]


async def test_those_of_a_tenant_that_wait_get_no_slot_of_those_that_are_cancelled_with_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_operations, "ENDED", 1)  # others run after each of them
    async with held() as night:
        running = [await night.call() for _ in range(2)]
        waiting = [await night.call(waits=True) for _ in range(20)]
        result = await act(night.gateway, "tenants.cancel", "a")
        assert (result.done, result.after["cancelled"]) == (True, 22)
        await night.gateway.settled(22)
        attempts = {record.exchange_id: record.attempts for record in night.gateway.records}
        assert attempts == {**dict.fromkeys(running, 1), **dict.fromkeys(waiting, 0)}


async def test_freezing_and_thawing_say_what_they_change() -> None:
    async with held() as night:
        assert (await act(night.gateway, "tenants.freeze", "a")).after == {"frozen": True}
        again = await act(night.gateway, "tenants.freeze", "a")
        assert (again.done, again.before) == (False, {"frozen": True})
        await night.call("key-a", waits=True)
        assert night.gateway.gateway.statistics()["queue"]["frozen"] == ["a"]
        assert (await refused(night.gateway, "tenants.freeze", "nobody")).code == "not_found"
        assert (await refused(night.gateway, "tenants.thaw", "nobody")).code == "not_found"
        assert (await act(night.gateway, "tenants.thaw", "a")).before == {"frozen": True}
        assert not (await act(night.gateway, "tenants.thaw", "a")).done
    assert night.statuses() == [200]


# Workers ----------------------------------------------------------------------------------------------------


async def test_a_drained_worker_finishes_and_an_ejected_one_does_not() -> None:
    async with held() as night:
        await night.call()
        await night.call()
        assert (await act(night.gateway, "workers.drain", "w1")).before == {"operator": "none"}
        assert not (await act(night.gateway, "workers.drain", "w1")).done
        await night.call(waits=True)
        result = await act(night.gateway, "workers.eject", "w2")
        assert result.after == {"operator": "ejected", "cancelled": 1}
        await night.gateway.settled(2)  # nobody is left who could take the one that waits
        assert not (await act(night.gateway, "workers.eject", "w2")).done
        assert (await night.gateway.get("/readyz")).status == 503
        assert (await act(night.gateway, "workers.resume", "w2")).done
        assert not (await act(night.gateway, "workers.resume", "w2")).done
        await night.call()
        for action in ("drain", "resume", "eject"):
            assert (await refused(night.gateway, f"workers.{action}", "w9")).code == "not_found"
    assert night.statuses() == [200, 200, 503, 503]
    assert sorted(map(str, map(error_code, night.answers[:2]))) == ["no_worker", "operator_cancelled"]


async def test_breakers_are_forced_and_reset_for_models_that_a_worker_serves() -> None:
    async with held() as night:
        gateway = night.gateway
        result = await act(gateway, "breakers.force", "w1", model="m1", state="open")
        assert (result.done, result.after) == (True, {"m1": "forced"})
        assert not (await act(gateway, "breakers.force", "w1", model="m1", state="open")).done
        (row,) = [row for row in gateway.gateway.operations.workers() if row["id"] == "w1"]
        assert [step["to"] for step in row["breaker_history"]] == ["forced", "forced"]
        assert not (await act(gateway, "breakers.reset", "w1", model="m9")).done
        assert (await act(gateway, "breakers.reset", "w1")).after == {"m1": "closed"}
        await act(gateway, "breakers.force", "w1", model="m1", state="open")
        result = await act(gateway, "breakers.force", "w1", model="m1", state="closed")
        assert result.after == {"m1": "closed"}
        await act(gateway, "breakers.force", "w1", model="m1", state="open")
        assert (await act(gateway, "breakers.reset", "w1", model="m1")).done
        for target, model in (("w1", "m9"), ("w9", "m1")):
            problem = await refused(gateway, "breakers.force", target, model=model, state="open")
            assert problem.code == "not_found"
        assert (await refused(gateway, "breakers.reset", "w9")).code == "not_found"


# Keys -------------------------------------------------------------------------------------------------------


async def test_a_key_of_the_database_is_replaced_and_shown_once(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'gateway.db'}"

    old = await trio.to_thread.run_sync(stored_key, url)
    database = {"url": url, "journal": str(tmp_path / "journal")}
    async with held(database=database) as night:
        gateway = night.gateway
        night.go.set()
        assert (await gateway.ask(chat_request(key=old))).status == 200
        made = (await act(gateway, "keys.rotate", tenant="c", id="old", overlap=60)).after
        assert set(made) == {"id", "tenant", "key", "replaces", "old_ends_in"}
        tries = [old, made["key"]]
        await gateway.until(lambda: made["id"] in gateway.gateway.keyring._by_id)
        assert [(await gateway.ask(chat_request(key=key))).status for key in tries] == [200, 200]
        (row,) = await gateway.gateway.operations.audit(9)
        assert made["key"] not in str(row)
        assert row["after"]["id"] == made["id"]
        second = (await act(gateway, "keys.rotate", tenant="c", id=made["id"])).after
        await gateway.until(lambda: second["id"] in gateway.gateway.keyring._by_id)
        tries = [made["key"], second["key"]]
        assert [(await gateway.ask(chat_request(key=key))).status for key in tries] == [401, 200]
        for arguments, code in (
            ({"tenant": "c", "id": made["id"]}, "not_possible"),
            ({"tenant": "c", "id": "nobody"}, "not_found"),
            ({"tenant": "a", "id": second["id"]}, "not_found"),
            ({"tenant": "a", "id": "a-key"}, "not_possible"),
            ({"tenant": "c", "id": second["id"], "overlap": -1}, "invalid_value"),
        ):
            assert (await refused(gateway, "keys.rotate", **arguments)).code == code


@pytest.mark.parametrize("trouble", ["gone", "no database", "locked"])
async def test_with_the_database_away_no_key_is_replaced_and_the_old_one_stays_good(
    trouble: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_keys, "LIMIT", 0.5)
    file, aside = tmp_path / "gateway.db", tmp_path / "aside.db"
    old = await trio.to_thread.run_sync(stored_key, f"sqlite:///{file}")
    settings = {"url": f"sqlite:///{file}", "journal": str(tmp_path / "journal")}
    async with held(database=settings) as night:
        gateway = night.gateway
        night.go.set()
        assert (await gateway.ask(chat_request(key=old))).status == 200
        with contextlib.ExitStack() as away:
            if trouble == "locked":
                other = away.enter_context(contextlib.closing(sqlite3.connect(file, isolation_level=None)))
                other.execute("BEGIN EXCLUSIVE")
            else:
                file.rename(aside)
                away.callback(aside.rename, file)
            if trouble == "gone":
                file.mkdir()
                away.callback(file.rmdir)
            elif trouble == "no database":
                file.write_bytes(b"nothing of the kind" * 1000)
            with trio.fail_after(5):
                problem = await refused(gateway, "keys.rotate", tenant="c", id="old")
            assert (problem.code, problem.status) == ("database_unavailable", 503)
            assert str(tmp_path) not in problem.message
            assert (await gateway.ask(chat_request(key=old))).status == 200
    (line,) = gateway.logged("operator_action")
    assert (line["action"], line["outcome"]) == ("keys.rotate", "refused")


async def test_a_key_that_was_replaced_for_somebody_who_left_is_in_the_trail(tmp_path: Path) -> None:
    file = tmp_path / "gateway.db"
    await trio.to_thread.run_sync(stored_key, f"sqlite:///{file}")
    settings = {"url": f"sqlite:///{file}", "journal": str(tmp_path / "journal")}
    async with held(database=settings) as night:
        night.go.set()
        operations = night.gateway.gateway.operations
        with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            async with trio.open_nursery() as leaving:
                leaving.start_soon(partial(act, night.gateway, "keys.rotate", tenant="c", id="old"))
                await night.gateway.until(lambda: operations._rotating.borrowed_tokens == 1)
                leaving.cancel_scope.cancel()
                other.execute("COMMIT")
        trail = await operations.audit(1)
    assert (trail[0]["action"], trail[0]["outcome"], trail[0]["after"]["replaces"]) == (
        "keys.rotate",
        "done",
        "old",
    )


def stored_key(url: str) -> str:
    """Store the tenant c with a key that is called old; answers that in full."""
    roster = open_roster(url)
    _, key, hash_ = new_key("old")
    roster.add_tenant("c", {}, 1.0)
    roster.add_key("old", "c", hash_, {}, 1.0)
    roster.close()
    return key


async def test_no_key_is_replaced_in_a_database_that_does_not_answer() -> None:
    url = "postgresql+psycopg://somebody:secret@127.0.0.1:1/gateway"
    with pytest.raises(Refused) as away:
        await _keys.rotate(url, "old", "c", 0.0, trio.CapacityLimiter(1))
    assert away.value.problem.code == "database_unavailable"
    assert "secret" not in away.value.problem.message


async def test_without_a_database_no_key_can_be_replaced() -> None:
    async with held() as night:
        assert (await refused(night.gateway, "keys.rotate", tenant="c", id="k")).code == "not_found"


# Reading ----------------------------------------------------------------------------------------------------


async def test_slots_of_a_worker_that_takes_nothing_are_not_free() -> None:
    async with held() as night:
        operations = night.gateway.gateway.operations
        one, _ = night.gateway.gateway.fleet.books.values()

        def free() -> list[int]:
            rows = operations.workers()
            assert [row["free"] for row in operations.snapshot()["workers"]] == [row["free"] for row in rows]
            return [row["free"] for row in rows]

        assert free() == [1, 1]
        one.snapshot = dataclasses.replace(one.snapshot, state="draining")
        assert free() == [0, 1]
        await act(night.gateway, "workers.drain", "w2")
        assert free() == [0, 0]
        await act(night.gateway, "workers.resume", "w2")
        await act(night.gateway, "breakers.force", "w2", model="m1", state="open")
        assert free() == [0, 0]


async def test_everything_that_can_be_read_has_its_shape() -> None:
    async with held() as night:
        name = await night.call()
        await night.call("key-b")
        waits = await night.call("key-b", waits=True)
        operations = night.gateway.gateway.operations
        expect_shape(await operations.requests(RequestFilter()), "Requests")
        for each in (name, waits):
            expect_shape(operations.timeline(each), "Timeline")
            expect_shape(await operations.flight(each), "Flight")
        expect_shape({"tenants": await operations.tenants()}, "Tenants")
        expect_shape(operations.queues(), "Queues")
        expect_shape({"workers": operations.workers()}, "Workers")
        expect_shape(await operations.limits(), "Limits")
        expect_shape({"tasks": await operations.tasks()}, "Tasks")
        expect_shape(await operations.self_audit(), "SelfAudit")
        expect_shape(operations.version(), "Version")
        expect_shape(operations.snapshot(), "Snapshot")
        await act(night.gateway, "requests.cancel", name)
        await night.gateway.settled(1)
        expect_shape(await operations.requests(RequestFilter(state="ended")), "Requests")
        expect_shape(operations.timeline(name), "Timeline")
        expect_shape({"endings": operations.endings(5)}, "Endings")
        expect_shape({"audit": await operations.audit(5)}, "Audit")
        with pytest.raises(Exception, match="not_found"):
            operations.timeline("nobody")


async def test_requests_are_found_by_what_they_are() -> None:
    async with held() as night:
        first = await night.call()
        second = await night.call("key-b")
        third = await night.call("key-b", waits=True)
        await act(night.gateway, "requests.cancel", first)
        await night.gateway.settled(1)
        await night.gateway.until(lambda: night.gateway.depth == 0)

        async def found(**asked: Any) -> list[str]:
            answer = await night.gateway.gateway.operations.requests(RequestFilter(**asked))
            return [row["id"] for row in answer["requests"]]

        assert await found() == [third, second, first]
        assert await found(state="ended") == [first]
        assert await found(state="running") == [third, second]
        assert await found(state="waiting") == []
        assert await found(tenant="b") == [third, second]
        assert await found(model="m1") == [third, second, first]
        assert await found(model="m2") == []
        assert await found(worker="w2") == [second]
        assert await found(worker="w1", state="ended") == [first]
        assert await found(search=second[8:20]) == [second]
        assert await found(search="a-key") == [first]
        assert await found(limit=1, offset=1) == [second]
        # Who waits or runs is not to be looked for behind what is over, whatever comes first.
        assert await found(order="oldest") == [second, third, first]
        assert await found(order="oldest", limit=1, offset=1) == [third]
        answer = await night.gateway.gateway.operations.requests(RequestFilter(limit=1))
        assert answer["total"] == 3


async def test_a_request_that_ends_while_the_rows_are_written_has_the_row_of_an_ended_one() -> None:
    async with held() as night:
        house = night.gateway.gateway.house
        (exchange,) = [house.live.find(await night.call())]
        assert exchange is not None
        running = row_now(exchange, house)
        assert running is not None
        assert running["state"] == "running"
        await act(night.gateway, "requests.cancel", exchange.request.exchange_id)
        await night.gateway.settled(1)
        ended = row_now(exchange, house)
        assert ended is not None
        assert (ended["state"], ended["id"]) == ("ended", running["id"])
        assert (running["outcome"], running["code"]) == (None, None)
        assert (ended["outcome"], ended["code"]) == ("operator_cancelled", "operator_cancelled")
        house.books.recent.clear()
        assert row_now(exchange, house) is None


async def test_the_feed_tells_endings_once_and_rates_since_the_last() -> None:
    async with held() as night:
        operations = night.gateway.gateway.operations
        reached, rows = operations.endings_after(2**62)
        assert (reached, rows) == (0, [])
        night.go.set()
        for _ in range(3):
            await night.gateway.ask(chat_request(key="key-a"))
        await night.gateway.settled(3)
        reached, rows = operations.endings_after(1)
        assert (reached, len(rows)) == (3, 2)
        assert [row["id"] for row in rows] == [record.exchange_id for record in night.gateway.records[1:]]
        assert operations.endings_after(3) == (3, [])
        await trio.sleep(0.15)
        told = operations.snapshot()
        assert told["throughput"]["requests_per_second"] > 0
        assert told["service"]["a"] > 0
        assert told["wait_p50"] is not None
        assert told["ttfc_p99"] >= told["wait_p50"]


def test_quantiles_are_values_that_were_seen() -> None:
    assert quantile([], 0.5) is None
    assert quantile([1.0], 0.99) == 1.0
    assert quantile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.0
    assert quantile([1.0, 2.0, 3.0, 4.0], 0.99) == 4.0
    assert bucket_quantile((1.0, 2.0), [0, 0, 0], 0.5) is None
    assert bucket_quantile((1.0, 2.0), [3, 1, 0], 0.5) == 1.0
    assert bucket_quantile((1.0, 2.0), [3, 1, 0], 0.99) == 2.0
    assert bucket_quantile((1.0, 2.0), [0, 0, 1], 0.5) == 2.0


async def test_an_act_that_breaks_is_in_the_trail_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async with held() as night:
        operations = night.gateway.gateway.operations
        monkeypatch.setattr(night.gateway.gateway.fleet, "touch", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await act(night.gateway, "workers.drain", "w1")
        await operations.refused(ME, "reload", None, "role_not_allowed")
        rows = await operations.audit(2)
        assert [(row["outcome"], row["after"]["code"]) for row in rows] == [
            ("refused", "role_not_allowed"),
            ("refused", "internal_error"),
        ]
