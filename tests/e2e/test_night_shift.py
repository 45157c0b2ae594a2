"""A night shift: an operator asks what waits and why, and steers, while streams run that nobody may break."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import trio

from tests.e2e.serving import LIMIT, Serving, configuration, error_code, serving, tenant
from trio_gateway.admin import SHAPES, complaints
from trio_gateway.operations import open_audit_table
from trio_gateway.testing import (
    Answer,
    EndChunks,
    Event,
    Head,
    RawClient,
    ScriptedEngine,
    Step,
    WaitFor,
    chat_chunk,
    chat_request,
    open_engine,
    until,
)

ACME, BULK = "tg_acme_0123456789abcdef", "tg_bulk_0123456789abcdef"
Headers = tuple[tuple[str, str], ...]


class Operator:
    """Somebody with a terminal at the operators' door, whose every act is counted.

    Attributes:
        acts: what was done: action, target and outcome, as the audit table should have it.
    """

    def __init__(self, gateway: Serving) -> None:
        self._address = gateway.admin_address
        self.acts: list[tuple[str, str | None, str]] = []

    async def _ask(self, method: str, path: str, body: bytes | None = None) -> Answer:
        kind: Headers = (("content-type", "application/json"),) if body is not None else ()
        with trio.fail_after(LIMIT), await RawClient.connect(self._address) as client:
            await client.request(method, f"/admin/v1{path}", headers=kind, body=body, host="localhost")
            return await client.read_to_end()

    async def read(self, path: str, shape: str) -> Any:
        answer = await self._ask("GET", path)
        assert answer.status == 200, answer.body
        found = json.loads(answer.body)
        assert list(complaints(found, SHAPES[shape], SHAPES)) == [], path
        return found

    async def act(
        self, path: str, action: str, target: str | None = None, /, *, outcome: str = "done", **arguments: Any
    ) -> Any:
        self.acts.append((action, target, outcome))
        answer = await self._ask("POST", path, json.dumps(arguments).encode())
        found = json.loads(answer.body)
        if outcome == "refused":
            assert answer.status is not None
            assert answer.status >= 400
            return found["error"]
        assert answer.status == 200, answer.body
        assert found["done"] is (outcome == "done"), (path, found)
        return found

    async def longest_waiter(self) -> Any:
        waiting = (await self.read("/requests?state=waiting", "Requests"))["requests"]
        return max(waiting, key=lambda row: row["age"])


class Caller:
    """A client with one request on its way."""

    def __init__(self, gateway: Serving, nursery: trio.Nursery, key: str, **fields: Any) -> None:
        self._gateway = gateway
        self._request = chat_request(key=key, **fields)
        self.answer: Answer | None = None
        nursery.start_soon(self._run)

    async def _run(self) -> None:
        with await self._gateway.connect() as client:
            await client.send(self._request)
            self.answer = await client.read_to_end()

    @property
    def whole(self) -> bool:
        """Whether it got its answer to the end."""
        return self.answer is not None and self.answer.status == 200 and b"[DONE]" in self.answer.body

    async def over(self) -> Answer:
        with trio.fail_after(LIMIT):
            await until(lambda: self.answer is not None)
        assert self.answer is not None
        return self.answer


def answering(go: trio.Event) -> tuple[Step, ...]:
    """Half an answer, and the rest once ``go`` is set."""
    return (
        Head(),
        chat_chunk({"content": "a"}),
        WaitFor(go),
        chat_chunk({"content": "b"}),
        chat_chunk({}, finish="stop"),
        Event("[DONE]"),
        EndChunks(),
    )


TENANTS = [tenant("acme", ACME), tenant("bulk", BULK, weight=2.0)]


def written(*engines: ScriptedEngine, folder: Path, **sections: Any) -> str:
    """The file as it is at the beginning of the night, but for some sections."""
    tables: dict[str, Any] = {
        "worker": {"slots": 2},
        "tenants": TENANTS,
        "database": {"url": f"sqlite:///{folder / 'gateway.db'}", "journal": str(folder / "journal")},
        **sections,
    }
    return configuration(*engines, **tables)


async def test_an_operator_steers_a_loaded_gateway_and_breaks_nothing_else(tmp_path: Path) -> None:
    go, file = trio.Event(), tmp_path / "gateway.toml"
    async with (
        open_engine(lambda request: answering(go)) as one,
        open_engine(lambda request: answering(go)) as two,
        serving(
            one,
            two,
            file=file,
            worker={"slots": 2},
            tenants=TENANTS,
            database={"url": f"sqlite:///{tmp_path / 'gateway.db'}", "journal": str(tmp_path / "journal")},
        ) as gateway,
        trio.open_nursery() as nursery,
    ):
        operator = Operator(gateway)

        async def calls(key: str, waits: bool) -> Caller:
            depth, held = gateway.depth, gateway.held
            caller = Caller(gateway, nursery, key)
            await gateway.until(lambda: (gateway.depth, gateway.held) == (depth + waits, held + (not waits)))
            return caller

        running = [await calls(key, waits=False) for key in (ACME, BULK, ACME, BULK)]
        waiting = [await calls(key, waits=True) for key in (BULK, BULK, ACME, ACME)]

        # What waits longest, and why?
        longest = await operator.longest_waiter()
        assert (longest["tenant"], longest["why"], longest["position"]) == ("bulk", "no_slot", 1)
        assert longest["holder"]["doing"] == "waits for a worker"
        story = await operator.read(f"/requests/{longest['id']}", "Timeline")
        assert [step["what"] for step in story["timeline"]] == ["arrived", "accepted"]
        queues = await operator.read("/queues", "Queues")
        (pool,) = queues["pools"]
        assert (queues["depth"], pool["slots"], pool["held"]) == (4, 4, 4)

        # A running one is stopped: its client is told, its engine is let go of.
        rows = (await operator.read("/requests?state=running&tenant=bulk", "Requests"))["requests"]
        victim = min(rows, key=lambda row: row["age"])
        assert (victim["worker"], victim["phase"]) == ("w2", "after_content")
        for outcome in ("done", "nothing_to_do"):
            path = f"/requests/{victim['id']}/cancel"
            await operator.act(path, "requests.cancel", victim["id"], outcome=outcome)
            await gateway.settled(1)
        stopped = running.pop(3)
        answer = await stopped.over()
        assert b"operator_cancelled" in answer.body
        assert not stopped.whole
        await gateway.until(lambda: two.statistics().open_requests == 2 and gateway.depth == 3)
        story = await operator.read(f"/requests/{victim['id']}", "Timeline")
        told = [step["what"] for step in story["timeline"]]
        assert told[:5] == ["arrived", "accepted", "placed", "opened", "first_content"]
        assert told[5:] == ["ended", "settled", "released"]

        # One that waits is stopped too.
        longest = await operator.longest_waiter()
        await operator.act(f"/requests/{longest['id']}/cancel", "requests.cancel", longest["id"])
        turned_off = [caller for caller in waiting if caller.answer is not None or await settles(caller)]
        (refused,) = turned_off
        answer = await refused.over()
        assert (answer.status, error_code(answer)) == (503, "operator_cancelled")
        assert answer.header("x-should-retry") == "false"
        waiting.remove(refused)

        # A tenant is frozen: what it has waits on.
        await operator.act("/tenants/acme/freeze", "tenants.freeze", "acme")
        await operator.act("/tenants/acme/freeze", "tenants.freeze", "acme", outcome="nothing_to_do")
        rows = (await operator.read("/requests?state=waiting", "Requests"))["requests"]
        assert {(row["tenant"], row["why"]) for row in rows} == {("acme", "tenant_frozen")}
        tenants = (await operator.read("/tenants", "Tenants"))["tenants"]
        assert {row["id"]: row["frozen"] for row in tenants} == {"acme": True, "bulk": False}

        # A worker is drained: what runs there goes on.
        await operator.act("/workers/w1/drain", "workers.drain", "w1")
        workers = (await operator.read("/workers", "Workers"))["workers"]
        assert [(row["operator"], row["held"], row["free"]) for row in workers] == [
            ("drained", 2, 0),
            ("none", 2, 0),
        ]

        # A limit is lowered below what there is: who waits stays, who comes is refused.
        changed = await operator.act("/limits", "limits.set", set={"admission.max_queued": 1})
        assert (changed["before"], changed["after"]) == (
            {"admission.max_queued": 1024},
            {"admission.max_queued": 1},
        )
        limits = (await operator.read("/limits", "Limits"))["limits"]
        assert limits["admission.max_queued"] == {"value": 1, "source": "live", "applies": "now"}
        assert error_code(await gateway.ask(chat_request(key=BULK))) == "queue_full"
        assert (gateway.depth, len(waiting)) == (2, 3)  # one of them runs by now
        problem = await operator.act(
            "/limits", "limits.set", outcome="refused", set={"admission.max_queued": -1}
        )
        assert (problem["code"], problem["param"]) == ("invalid_value", "admission.max_queued")

        # A file with an error changes nothing.
        before = await operator.read("/configuration", "Configuration")
        wrong = written(one, two, folder=tmp_path, admission={"max_wait": 50, "max_qeued": 7})
        file.write_text(wrong, encoding="utf-8")
        line = wrong.splitlines().index("admission = {max_wait = 50, max_qeued = 7}") + 1
        problem = await operator.act("/reload", "reload", outcome="refused")
        assert problem["code"] == "invalid_configuration"
        assert f"gateway.toml:{line}: admission.max_qeued" in problem["message"]
        assert await operator.read("/configuration", "Configuration") == before

        # And rightly: what can be is in force at once, and the live value stays.
        file.write_text(
            written(
                one,
                two,
                folder=tmp_path,
                admission={"max_wait": 50},
                retry={"max_attempts": 2},
                models=[{"id": "m1", "aliases": ["other"]}],
                probes={"interval": 7},
                tenants=[tenant("acme", ACME, max_concurrency=9), TENANTS[1]],
            ),
            encoding="utf-8",
        )
        told = (await operator.act("/reload", "reload"))["after"]
        assert told["applied"] == ["tenants.acme.max_concurrency"]
        assert told["new_requests"] == ["models.m1.aliases", "admission.max_wait", "retry.max_attempts"]
        assert told["restart"] == ["probes.interval"]
        limits = (await operator.read("/limits", "Limits"))["limits"]
        assert [limits[name]["value"] for name in ("admission.max_queued", "admission.max_wait")] == [1, 50.0]
        assert limits["probes.interval"]["value"] == 0

        # The same by a signal, which finds nothing new.
        os.kill(os.getpid(), signal.SIGHUP)
        await gateway.until(lambda: len(gateway.gateway.operations.trail) > len(operator.acts))
        operator.acts.append(("reload", None, "done"))

        # Everything back as it was; then all that was not meant to be broken is whole.
        await operator.act("/limits", "limits.set", set={"admission.max_queued": None})
        await operator.act("/workers/w1/resume", "workers.resume", "w1")
        await operator.act("/tenants/acme/thaw", "tenants.thaw", "acme")
        go.set()
        for caller in (*running, *waiting):
            await caller.over()
            assert caller.whole
        await gateway.settled(8)
        outcomes = Counter(record.outcome for record in gateway.records)
        assert outcomes == {"completed": 6, "operator_cancelled": 2}
        audit = await operator.read("/self-audit", "SelfAudit")
        assert audit["ok"]

        # Every step stands in the audit table.
        rows = (await operator.read("/audit?limit=1000", "Audit"))["audit"]
        assert [(row["action"], row["target"], row["outcome"]) for row in rows[::-1]] == operator.acts
        assert all(row["actor"] in ("local", "SIGHUP") for row in rows)
        assert await trio.to_thread.run_sync(stored, tmp_path) == rows
        frozen = next(row for row in rows if row["action"] == "tenants.freeze" and row["outcome"] == "done")
        assert (frozen["before"], frozen["after"]) == ({"frozen": False}, {"frozen": True})


def stored(folder: Path) -> list[dict[str, Any]]:
    """The audit table, as anybody can read it."""
    table = open_audit_table(f"sqlite:///{folder / 'gateway.db'}")
    try:
        return table.read(1000)
    finally:
        table.close()


async def settles(caller: Caller) -> bool:
    """Whether a caller gets its answer soon."""
    with trio.move_on_after(0.5):
        await until(lambda: caller.answer is not None)
    return caller.answer is not None
