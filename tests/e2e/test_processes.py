"""Several processes before the same workers: together they are one gateway, and apart from each other when
one dies."""

from __future__ import annotations

import json
import os
import resource
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import trio

from tests.admin.test_workers import TOKEN
from tests.agent.authority import Authority
from tests.agent.rig import running
from tests.e2e.process import COMMAND, GatewayProcess, process_serving
from tests.e2e.serving import configuration, parse_address, tenant
from tests.e2e.test_fleet_agents import FAST
from tests.ledger.databases import rows_at
from trio_gateway.agent.engines import Limits, SimulatedEngine, SimulatedServer, Speed
from trio_gateway.testing import (
    Address,
    Answer,
    RawClient,
    ScriptedEngine,
    WaitFor,
    chat_request,
    chat_stream,
    open_engine,
)

LIMIT: Final = 60.0  # seconds; a machine that does much else starts processes slowly
GRACE: Final = 0.3  # seconds
STREAM: Final = chat_stream("one", "two")


class Processes:
    """A gateway of several processes, and what operators see of it."""

    def __init__(self, gateway: GatewayProcess, admin: Address) -> None:
        self.gateway = gateway
        self.admin = admin

    async def _operate(self, method: str, path: str, body: dict[str, Any] | None = None) -> Answer:
        content = None if body is None else json.dumps(body).encode()
        with await RawClient.connect(self.admin) as client:
            kind = (("content-type", "application/json"),)
            await client.request(method, path, headers=kind, body=content)
            return await client.read_to_end()

    async def read(self, path: str) -> Any:
        answer = await self._operate("GET", f"/admin/v1/{path}")
        assert answer.status == 200, answer.body
        return answer.json()

    async def act(self, path: str, **body: Any) -> Any:
        answer = await self._operate("POST", f"/admin/v1/{path}", body)
        assert answer.status == 200, answer.body
        return answer.json()

    async def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        answer = await self._operate("GET", "/metrics")
        lines = answer.body.decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.split("{")[0].split()[0] == name)

    async def own(self, method: str, request_id: str) -> Answer:
        """Ask as the owner of a request, on a connection of its own."""
        with await self.gateway.connect() as client:
            await client.request(method, f"/v1/requests/{request_id}")
            return await client.read_to_end()

    async def running(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = (await self.read("requests?state=running"))["requests"]
        return found

    async def until(self, holds: Callable[[Any], bool], path: str) -> Any:
        """Read until what is read is as it should be."""
        while True:
            if holds(found := await self.read(path)):
                return found
            await trio.sleep(0.02)

    async def served_by_all(self) -> None:
        """Wait until every process knows a worker."""
        while True:
            if {(await self.ask()).status for _ in range(12)} == {200}:
                return
            await trio.sleep(0.05)

    async def send(self, **request: Any) -> RawClient:
        """Send a request and leave its connection open."""
        client = await self.gateway.connect()
        await client.send(chat_request(**request))
        return client

    async def ask(self, **request: Any) -> Answer:
        with await self.send(**request) as client:
            return await client.read_to_end()


@asynccontextmanager
async def processes(
    *engines: ScriptedEngine | str,
    folder: Path,
    count: int = 2,
    capacity: str = "shared",
    hang_limit: float = 10.0,
    **sections: Any,
) -> AsyncIterator[Processes]:
    server = {"bind": ["127.0.0.1:0"], "processes": count, "capacity": capacity, "hang_limit": hang_limit}
    sections = {
        "worker": {"slots": 8, "cancel_grace": GRACE},
        "shutdown": {"readiness_delay": 0, "grace": 10},
        **sections,
    }
    with trio.fail_after(LIMIT):
        async with process_serving(*engines, folder=folder, server=server, **sections) as gateway:
            line = await gateway.logged("listening")
            yield Processes(gateway, parse_address(line["admin"][0]))


@asynccontextmanager
async def refusing_engine(slots: int) -> AsyncIterator[str]:
    """An engine that refuses whatever comes while all its slots are in use; answers its URL."""
    engine = SimulatedEngine(("m1",), limits=Limits(slots=slots, max_queued=0), speed=Speed(decode=100.0))
    server = SimulatedServer(engine, "vllm")
    async with trio.open_nursery() as nursery:
        await nursery.start(engine.run)
        await server.wait_answering()
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(server.serve, listeners)  # noqa: ASYNC113 - it waits for others
        yield f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}"
        nursery.cancel_scope.cancel()


async def test_processes_that_share_slots_never_use_more_than_there_are_and_all_of_them(
    tmp_path: Path,
) -> None:
    async with refusing_engine(slots=8) as url, processes(url, folder=tmp_path) as gateway:
        statuses: Counter[int] = Counter()

        async def client() -> None:
            for _ in range(6):
                statuses[(await gateway.ask(max_tokens=3)).status] += 1

        async with trio.open_nursery() as nursery:
            for _ in range(40):
                nursery.start_soon(client)
        assert statuses == {200: 240}
        assert await gateway.metric("trio_gateway_requests_total") == 240
        assert await gateway.metric("trio_gateway_worker_attempts_total") == 240
        assert await gateway.metric("trio_gateway_retries_total") == 0
        assert await gateway.metric("trio_gateway_time_to_first_content_seconds_count") == 240
        assert (await gateway.read("self-audit"))["ok"]
        free = {"units": 8, "lent": 0, "mourned": 0, "wanted": 0}
        found = await gateway.until(lambda found: found["lending"]["slots:w1"] == free, "statistics")
        assert found["leases"]["granted"] == found["leases"]["returned"] == 240
        rows = (await gateway.read("requests?limit=1000"))["requests"]
        assert {row["process"] for row in rows} == {0, 1}
        gateway.gateway.send(signal.SIGTERM)
        assert await gateway.gateway.exit_code() == 0


async def test_a_process_that_is_killed_takes_only_its_own_streams_with_it(tmp_path: Path) -> None:
    go = trio.Event()
    script = (*STREAM[:3], WaitFor(go), *STREAM[3:])
    async with (
        open_engine(script) as engine,
        processes(engine, folder=tmp_path, tenants=[tenant("a", "ka"), tenant("b", "kb")]) as gateway,
    ):
        clients = [await gateway.send(key="ka") for _ in range(8)]
        for client in clients:
            await client.read_events(1)
        rows = await gateway.running()
        of_process = Counter(row["process"] for row in rows)
        assert sum(of_process.values()) == 8
        victim = max(of_process, key=lambda number: of_process[number])
        await gateway.act("tenants/b/freeze")
        pids = {each["number"]: each["pid"] for each in (await gateway.read("statistics"))["processes"]}
        os.kill(pids[victim], signal.SIGKILL)
        ended = await gateway.gateway.logged("process_ended")
        assert (ended["process"], ended["status"]) == (victim, -signal.SIGKILL)
        # Its slots come back, but not before its engine can have seen that nobody reads.
        more = [await gateway.send(key="ka") for _ in range(of_process[victim])]
        for client in more:
            await client.read_events(1)
        # Those that were cut off stay open at this engine, which never looks whether anybody reads.
        go.set()
        ends = [(await client.read_to_end()).ended for client in clients]
        assert Counter(end == "complete" for end in ends)[False] == of_process[victim]
        assert [(await client.read_to_end()).ended for client in more] == ["complete"] * len(more)
        await gateway.until(lambda found: all(each["ready"] for each in found["processes"]), "statistics")
        # What lasts is known to the one that was started again.
        (row,) = [row for row in (await gateway.read("tenants"))["tenants"] if row["id"] == "b"]
        assert row["frozen"]
        frozen = [await gateway.send(key="kb") for _ in range(6)]
        waiting = await gateway.until(lambda found: found["total"] == 6, "requests?state=waiting")
        assert {row["why"] for row in waiting["requests"]} == {"tenant_frozen"}
        await gateway.act("tenants/b/thaw")
        for client in frozen:
            assert (await client.read_to_end()).status == 200
        for client in (*clients, *more, *frozen):
            client.__exit__(None, None, None)
        assert (await gateway.read("self-audit"))["ok"]


async def test_what_a_process_had_accepted_that_was_killed_is_settled_when_it_is_there_again(
    tmp_path: Path,
) -> None:
    go = trio.Event()
    script = (*STREAM[:3], WaitFor(go), *STREAM[3:])
    url = f"sqlite:///{tmp_path}/records.db"
    database = {"url": url, "journal": str(tmp_path / "journal"), "gateway_id": "gw"}
    async with (
        open_engine(script) as engine,
        processes(engine, folder=tmp_path, database=database) as gateway,
    ):
        clients = [await gateway.send() for _ in range(8)]
        for client in clients:
            await client.read_events(1)
        pids = {each["number"]: each["pid"] for each in (await gateway.read("statistics"))["processes"]}
        lost = {row["id"] for row in await gateway.running() if row["process"] == 1}
        os.kill(pids[1], signal.SIGKILL)
        await gateway.gateway.logged("exchanges_crashed", lambda line: line["process"] == 1)
        go.set()
        for client in clients:
            await client.read_to_end()
            client.__exit__(None, None, None)
        gateway.gateway.send(signal.SIGTERM)
        assert await gateway.gateway.exit_code() == 0
        rows = rows_at(url, "SELECT exchange_id, gateway_id, outcome FROM exchanges")
        assert len(rows) == 8
        assert {row["exchange_id"] for row in rows if row["outcome"] == "gateway_crashed"} == lost
        assert {row["gateway_id"] for row in rows} == {"gw", "gw-1"}
        assert {row["outcome"] for row in rows} == {"completed", "gateway_crashed"}


async def test_all_processes_take_a_new_configuration_or_none_does(tmp_path: Path) -> None:
    file = tmp_path / "gateway.toml"
    async with open_engine() as engine, processes(engine, folder=tmp_path) as gateway:
        text = file.read_text()
        file.write_text(text.replace('id = "m1"', 'id = "m2", upstream = "m1"'))
        gateway.gateway.send(signal.SIGHUP)
        told = await gateway.gateway.logged("reloaded")
        assert told["new_requests"] == ["models.m1", "models.m2"]
        assert {(await gateway.ask(model="m2")).status for _ in range(12)} == {200}
        assert {(await gateway.ask(model="m1")).status for _ in range(12)} == {404}
        rows = (await gateway.read("requests?state=ended"))["requests"]
        assert {row["process"] for row in rows} == {0, 1}
        file.write_text("nonsense = true")
        gateway.gateway.send(signal.SIGHUP)
        await gateway.gateway.logged("reload_refused")
        assert {(await gateway.ask(model="m2")).status for _ in range(12)} == {200}
        # A process that is started later has what is in force, not what stands in the file.
        (first, *_) = (await gateway.read("statistics"))["processes"]
        os.kill(first["pid"], signal.SIGKILL)
        await gateway.gateway.logged("process_ended")
        await gateway.until(lambda found: all(each["ready"] for each in found["processes"]), "statistics")
        assert {(await gateway.ask(model="m2")).status for _ in range(12)} == {200}
        # What was counted by the one that is gone is not forgotten, as far as it was seen.
        limits = await gateway.act("limits", set={"admission.max_queued": 10})
        assert limits["before"] == {"admission.max_queued": 1024}
        assert (await gateway.read("queues"))["max_queued"] == 10


async def test_a_process_for_which_nothing_is_left_is_tried_again_while_the_others_serve(
    tmp_path: Path,
) -> None:
    async with open_engine(STREAM) as engine, processes(engine, folder=tmp_path) as gateway:
        supervisor = gateway.gateway.process.pid
        before = resource.prlimit(supervisor, resource.RLIMIT_NOFILE)
        (first, *_) = (await gateway.read("statistics"))["processes"]
        resource.prlimit(supervisor, resource.RLIMIT_NOFILE, (3, before[1]))  # no descriptor more
        os.kill(first["pid"], signal.SIGKILL)
        line = await gateway.gateway.logged("process_not_started")
        assert (line["process"], "Too many open files" in line["reason"]) == (0, True)
        assert (await gateway.ask()).status == 200
        resource.prlimit(supervisor, resource.RLIMIT_NOFILE, before)
        await gateway.until(lambda found: all(each["ready"] for each in found["processes"]), "statistics")


async def test_running_requests_finish_and_queued_ones_are_refused_at_the_end(tmp_path: Path) -> None:
    go = trio.Event()
    script = (*STREAM[:3], WaitFor(go), *STREAM[3:])
    async with open_engine(script) as engine, processes(engine, folder=tmp_path) as gateway:
        running = [await gateway.send() for _ in range(8)]
        for client in running:
            await client.read_events(1)
        waiting = [await gateway.send() for _ in range(6)]
        await gateway.until(lambda found: found["depth"] == 6, "queues")
        gateway.gateway.send(signal.SIGTERM)
        for client in waiting:
            assert (await client.read_to_end()).status == 503
        go.set()
        for client in running:
            assert (await client.read_to_end()).ended == "complete"
        for client in (*running, *waiting):
            client.__exit__(None, None, None)
        assert await gateway.gateway.exit_code() == 0
        statuses = [line for line in gateway.gateway.lines if line["event"] == "process_ended"]
        assert not statuses


async def test_operators_reach_the_process_that_has_a_request_and_all_of_them_for_a_worker(
    tmp_path: Path,
) -> None:
    script = (*STREAM[:3], WaitFor(trio.Event()))
    async with open_engine(script) as engine, processes(engine, folder=tmp_path) as gateway:
        clients = [await gateway.send() for _ in range(8)]
        for client in clients:
            await client.read_events(1)
        rows = await gateway.running()
        assert len(rows) == 8
        assert {row["process"] for row in rows} == {0, 1}
        # Its owner finds a request wherever it asks, and nobody else does.
        (row, *rows) = rows
        asking = [await gateway.gateway.connect() for _ in range(4)]  # at a time, so at both processes
        for number, client in enumerate(asking):
            await client.request("GET", f"/v1/requests/{row['id'] if number < 3 else 'none'}")
        found = [await client.read_to_end() for client in asking]
        assert [answer.status for answer in found] == [200, 200, 200, 404]
        assert {answer.json()["state"] for answer in found[:3]} == {"running"}
        for client in asking:
            client.__exit__(None, None, None)
        assert (await gateway.own("DELETE", row["id"])).json()["outcome"] == "client_cancelled"
        for row in rows:
            result = await gateway.act(f"requests/{row['id']}/cancel")
            assert result["done"]
            assert (await gateway.read(f"requests/{row['id']}"))["request"]["process"] == row["process"]
        for client in clients:
            assert b"_cancelled" in (await client.read_to_end()).body
            client.__exit__(None, None, None)
        result = await gateway.act("workers/w1/drain")
        assert result == {"done": True, "before": {"operator": "none"}, "after": {"operator": "drained"}}
        (worker,) = (await gateway.read("workers"))["workers"]
        assert (worker["operator"], worker["slots"], worker["free"]) == ("drained", 8, 0)
        assert {(await gateway.ask()).status for _ in range(10)} == {503}
        await gateway.act("workers/w1/resume")
        (cancels, *rest) = [each["action"] for each in (await gateway.read("audit"))["audit"]][::-1][6:]
        assert (cancels, rest) == ("requests.cancel", ["workers.drain", "workers.resume"])
        audit = await gateway._operate("POST", "/admin/v1/requests/none/cancel", {})
        assert audit.status == 404


async def test_bounds_of_one_hold_in_all_processes_together(tmp_path: Path) -> None:
    go = trio.Event()
    script = (*STREAM[:3], WaitFor(go), *STREAM[3:])
    tenants = [tenant("one", "k1", max_concurrency=1), tenant("none", "k0", max_queued=0)]
    async with (
        open_engine(script) as engine,
        processes(
            engine, folder=tmp_path, tenants=tenants, worker={"slots": 3, "cancel_grace": GRACE}
        ) as gateway,
    ):
        clients = [await gateway.send(key="k1") for _ in range(8)]
        found = await gateway.until(
            lambda found: (found["running"], found["waiting"]) == (1, 7), "statistics"
        )
        assert found["lending"]["tenant:one"]["units"] == 1
        # There are two slots left, and no position: whoever comes is served as long as there are slots.
        others = [await gateway.send(key="k0") for _ in range(2)]
        for client in others:
            await client.read_events(1)
        assert [(await gateway.ask(key="k0")).status for _ in range(8)] == [429] * 8
        assert engine.statistics().most_open == 3
        go.set()
        for client in (*clients, *others):
            assert (await client.read_to_end()).status == 200
            client.__exit__(None, None, None)
        assert engine.statistics().most_open == 3
        assert (await gateway.read("self-audit"))["ok"]


async def test_processes_that_split_slots_have_all_of_them_and_end_with_their_supervisor(
    tmp_path: Path,
) -> None:
    script = (*STREAM[:3], WaitFor(trio.Event()))
    async with (
        open_engine(script) as engine,
        processes(
            engine, folder=tmp_path, capacity="split", worker={"slots": 5, "cancel_grace": GRACE}
        ) as gateway,
    ):
        clients = [await gateway.send() for _ in range(10)]
        while engine.statistics().open_requests < 5:  # one may have got few of those
            clients.append(await gateway.send())
            await trio.sleep(0.01)
        found = await gateway.until(lambda found: found["waiting"] == len(clients) - 5, "statistics")
        assert found["lending"] is None
        assert [(each["slots"], each["held"]) for each in found["workers"]] == [(5, 5)]
        assert engine.statistics().most_open == 5
        gateway.gateway.send(signal.SIGKILL)
        for client in clients:
            answer = await client.read_to_end()
            assert answer.status == 503 or b"gateway_shutdown" in answer.body or answer.ended != "complete"
            client.__exit__(None, None, None)
        await gateway.gateway.logged("stopped", lambda line: line["process"] == 0)
        await gateway.gateway.logged("stopped", lambda line: line["process"] == 1)


async def test_a_gateway_whose_processes_can_not_start_ends_and_says_why(tmp_path: Path) -> None:
    file = tmp_path / "gateway.toml"
    (tmp_path / "journal").write_text("no folder")
    database = {"url": f"sqlite:///{tmp_path}/records.db", "journal": str(tmp_path / "journal")}
    server = {"bind": ["127.0.0.1:0"], "processes": 2}
    file.write_text(configuration(server=server, workers=[], models=[], database=database))
    with trio.fail_after(LIMIT):
        ended = await trio.run_process(
            [*COMMAND, "serve", "--config", str(file)], capture_stdout=True, capture_stderr=True, check=False
        )
    assert ended.returncode == 1
    assert b"ended with status 1 at its start" in ended.stderr
    # Whichever comes first says what is wrong with its own folder: the first one's is the journal's own.
    assert any(why in ended.stderr for why in (b"[Errno 17] File exists", b"[Errno 20] Not a directory"))
    assert str(tmp_path / "journal").encode() in ended.stderr


@asynccontextmanager
async def registered(
    folder: Path, *, by_tls: bool = False, slots: int = 2, **sections: Any
) -> AsyncIterator[Processes]:
    """A gateway of two processes whose one worker has registered."""
    engine = SimulatedEngine(("m1",), limits=Limits(slots=slots), speed=FAST)
    (folder / "token").write_text(TOKEN)
    internal: dict[str, Any] = {"bind": ["127.0.0.1:0"], "join_token_file": "token"}
    shown: dict[str, Any] = {}
    if by_tls:
        authority = Authority(folder, "ours")
        internal["tls"] = {**authority.issue("gateway"), "ca": authority.ca}
        shown = {**authority.issue("agent"), "ca": authority.ca}
    async with processes(folder=folder, workers=[], models=[], internal=internal, **sections) as gateway:
        (line,) = [line for line in gateway.gateway.lines if line["event"] == "listening"]
        registering = {"gateways": tuple(line["internal"]), "join_token": TOKEN, "secret": None}
        async with running(engine, worker_id="gpu", **registering, **shown):
            ready = lambda found: [each["ready"] for each in found["workers"]] == [True]  # noqa: E731
            await gateway.until(ready, "workers")
            await gateway.served_by_all()
            yield gateway


@pytest.mark.parametrize("by_tls", [False, True], ids=["clear", "tls"])
async def test_a_worker_registers_with_all_processes_and_with_one_that_comes_later(
    tmp_path: Path, by_tls: bool
) -> None:
    async with registered(tmp_path, by_tls=by_tls) as gateway:
        (first, *_) = (await gateway.read("statistics"))["processes"]
        os.kill(first["pid"], signal.SIGKILL)
        await gateway.gateway.logged("process_ended")
        await gateway.until(lambda found: all(each["ready"] for each in found["processes"]), "statistics")
        await gateway.served_by_all()
