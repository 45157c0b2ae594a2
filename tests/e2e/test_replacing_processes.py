"""Processes that are replaced, hang, or lose their supervisor: who notices, and what comes back."""

from __future__ import annotations

import os
import signal
import socket
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import trio

from tests.e2e.test_processes import STREAM, Processes, processes, refusing_engine, registered
from trio_gateway.testing import RawClient, WaitFor, chat_request, open_engine, until

CLIENTS: Final = 16
SHUTDOWN: Final = {"readiness_delay": 0.3, "grace": 10}


class Load:
    """Clients that ask without a pause, each on one connection for as long as that is kept open.

    Attributes:
        ended: how each answer ended: its status, or what else.
    """

    def __init__(self, gateway: Processes) -> None:
        self._gateway = gateway
        self._stopping = False
        self.ended: Counter[str | int] = Counter()

    async def client(self, number: int) -> None:
        """Be one client until `stop`."""
        while not self._stopping:
            try:
                connected = await self._gateway.gateway.connect()
            except OSError as error:  # the gateway has ended
                self.ended[str(error)] += 1
                return
            with connected as client:
                while not self._stopping:
                    answer = await self._ask(client, stream=bool(number % 2))
                    self.ended[answer] += 1
                    if client.closed_by_gateway or client.answers[-1].header("connection") == "close":
                        break

    @staticmethod
    async def _ask(client: RawClient, *, stream: bool) -> str | int:
        try:
            await client.send(chat_request(stream=stream, max_tokens=3))
            answer = await client.read_to_end()
        except OSError as error:
            return str(error)
        return answer.status if answer.ended == "complete" else f"{answer.status} {answer.ended}"

    def stop(self) -> None:
        """Let each client end after its answer."""
        self._stopping = True


async def pids(gateway: Processes) -> list[int]:
    return [each["pid"] for each in (await gateway.read("statistics"))["processes"]]


def _is_in_force(most: int, found: Any) -> bool:
    return bool(found["max_queued"] == most)


async def ended(pid: int) -> None:
    """Wait until a process is gone that is nobody's here."""
    while True:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        await trio.sleep(0.02)


async def test_processes_are_replaced_one_after_the_other_and_no_request_is_lost(tmp_path: Path) -> None:
    async with (
        refusing_engine(slots=4) as url,
        processes(url, folder=tmp_path, worker={"slots": 4}, shutdown=SHUTDOWN) as gateway,
    ):
        load, before = Load(gateway), await pids(gateway)
        async with trio.open_nursery() as nursery:
            for number in range(CLIENTS):
                nursery.start_soon(load.client, number)
            await gateway.until(lambda found: found["waiting"] > 0, "statistics")
            gateway.gateway.send(signal.SIGUSR2)
            await gateway.gateway.logged("replaced")
            after = await pids(gateway)
            result = await gateway.act("processes/replace")
            assert result == {"done": True, "before": None, "after": {"processes": 2}}
            assert not (await gateway.act("processes/replace"))["done"]  # it is under way
            await gateway.until(
                lambda found: (
                    not {each["pid"] for each in found["processes"]} & {*before, *after}
                    and all(each["ready"] for each in found["processes"])
                ),
                "statistics",
            )
            load.stop()
        assert not set(before) & set(after)
        asked = load.ended.total()
        assert load.ended == {200: asked}
        found = await gateway.read("statistics")
        assert [each["restarts"] for each in found["processes"]] == [0, 0]
        assert await gateway.metric("trio_gateway_requests_total") == asked
        assert await gateway.metric("trio_gateway_retries_total") == 0
        assert (await gateway.read("self-audit"))["ok"]
        gateway.gateway.send(signal.SIGTERM)
        assert await gateway.gateway.exit_code() == 0
        assert not [line for line in gateway.gateway.lines if line["event"] in ("bug", "process_ended")]


async def test_a_worker_that_registered_is_missing_in_no_process_that_takes_the_place_of_another(
    tmp_path: Path,
) -> None:
    async with registered(tmp_path, slots=4, shutdown=SHUTDOWN) as gateway:
        load = Load(gateway)
        async with trio.open_nursery() as nursery:
            for number in range(CLIENTS):
                nursery.start_soon(load.client, number)
            gateway.gateway.send(signal.SIGUSR2)
            await gateway.gateway.logged("replaced")
            load.stop()
        assert load.ended == {200: load.ended.total()}
        assert (await gateway.read("self-audit"))["ok"]


async def test_what_was_said_of_a_worker_that_registered_holds_in_new_processes(tmp_path: Path) -> None:
    async with registered(tmp_path) as gateway:
        await gateway.act("workers/gpu/drain")
        gateway.gateway.send(signal.SIGUSR2)
        await gateway.gateway.logged("replaced")
        assert {(await gateway.ask()).status for _ in range(12)} == {503}
        assert not [line for line in gateway.gateway.lines if line["event"] == "order_lost"]


async def test_a_reload_under_load_loses_nothing_and_a_signal_finishes_what_was_begun(tmp_path: Path) -> None:
    file = tmp_path / "gateway.toml"
    async with (
        refusing_engine(slots=4) as url,
        processes(url, folder=tmp_path, worker={"slots": 4}, shutdown=SHUTDOWN) as gateway,
    ):
        load = Load(gateway)
        async with trio.open_nursery() as nursery:
            for number in range(CLIENTS):
                nursery.start_soon(load.client, number)
            text = file.read_text()
            for most in (70, 80, 90):
                file.write_text(f"admission = {{max_queued = {most}}}\n{text}")
                gateway.gateway.send(signal.SIGHUP)
                await gateway.until(partial(_is_in_force, most), "queues")
            before = load.ended.total()
            assert load.ended == {200: before}
            assert before > 0
            gateway.gateway.send(signal.SIGTERM)
            await gateway.gateway.logged("shutting_down")
            await until(lambda: load.ended.total() >= before + CLIENTS)
            load.stop()
        # Who had an answer has all of it; who came too late was told so, or found nobody there.
        kinds = {kind for kind in load.ended if kind not in (200, 503)}
        assert not [kind for kind in kinds if not str(kind).startswith(("closed by", "[Errno"))]
        assert await gateway.gateway.exit_code() == 0


async def test_who_is_served_by_others_does_not_notice_that_a_process_is_killed(tmp_path: Path) -> None:
    async with (
        refusing_engine(slots=4) as url,
        processes(url, folder=tmp_path, worker={"slots": 4, "cancel_grace": 0.2}) as gateway,
    ):
        load = Load(gateway)
        async with trio.open_nursery() as nursery:
            for number in range(CLIENTS):
                nursery.start_soon(load.client, number)
            await gateway.until(lambda found: found["waiting"] > 0, "statistics")
            rows = (await gateway.read("statistics"))["processes"]
            os.kill(rows[0]["pid"], signal.SIGKILL)
            await gateway.gateway.logged("process_ended")
            await gateway.until(lambda found: all(each["ready"] for each in found["processes"]), "statistics")
            load.stop()
        # Each client had one request at a time, and half of them, about, were at the other process.
        lost = load.ended.total() - load.ended[200]
        assert 0 < lost < CLIENTS
        assert not [kind for kind in load.ended if isinstance(kind, int) and kind != 200]
        free = {"units": 4, "lent": 0, "mourned": 0, "wanted": 0}
        await gateway.until(lambda found: found["lending"]["slots:w1"] == free, "statistics")


async def test_a_process_that_hangs_is_replaced_and_its_slots_come_back(tmp_path: Path) -> None:
    go = trio.Event()
    script = (*STREAM[:3], WaitFor(go), *STREAM[3:])
    async with (
        open_engine(script) as engine,
        processes(engine, folder=tmp_path, hang_limit=1.0) as gateway,
    ):
        clients = [await gateway.send() for _ in range(8)]
        for client in clients:
            await client.read_events(1)
        of_process = Counter(row["process"] for row in await gateway.running())
        stopped = (await pids(gateway))[0]
        os.kill(stopped, signal.SIGSTOP)
        told = await gateway.gateway.logged("process_hangs")
        assert (told["process"], told["pid"]) == (0, stopped)
        died = await gateway.gateway.logged("process_ended")
        assert (died["process"], died["status"]) == (0, -signal.SIGKILL)
        more = [await gateway.send() for _ in range(of_process[0])]
        for client in more:
            await client.read_events(1)
        go.set()
        ends = Counter([(await client.read_to_end()).ended for client in (*clients, *more)])
        assert ends["complete"] == 8
        assert sum(ends.values()) == 8 + of_process[0]
        for client in (*clients, *more):
            client.__exit__(None, None, None)
        await gateway.until(lambda found: all(each["ready"] for each in found["processes"]), "statistics")
        free = {"units": 8, "lent": 0, "mourned": 0, "wanted": 0}
        await gateway.until(lambda found: found["lending"]["slots:w1"] == free, "statistics")
        assert len([line for line in gateway.gateway.lines if line["event"] == "process_hangs"]) == 1


async def test_a_process_that_hangs_does_not_get_every_slot_that_comes_free(tmp_path: Path) -> None:
    async with (
        refusing_engine(slots=16) as url,  # its answers take 30 ms
        processes(url, folder=tmp_path, worker={"slots": 16, "cancel_grace": 0.2}) as gateway,
    ):
        load = Load(gateway)
        async with trio.open_nursery() as nursery:
            for number in range(64):
                nursery.start_soon(load.client, number)
            await gateway.until(lambda found: found["waiting"] > 40, "statistics")
            stopped = (await pids(gateway))[0]
            os.kill(stopped, signal.SIGSTOP)
            # More than 16 slots could answer until it is known to be silent, which takes half a second.
            enough = load.ended[200] + 400
            await until(lambda: load.ended[200] >= enough)
            assert not [line for line in gateway.gateway.lines if line["event"] == "process_hangs"]
            os.kill(stopped, signal.SIGCONT)
            load.stop()
        assert set(load.ended) == {200}
        free = {"units": 16, "lent": 0, "mourned": 0, "wanted": 0}
        await gateway.until(lambda found: found["lending"]["slots:w1"] == free, "statistics")


async def test_a_process_that_hangs_while_it_retires_is_not_waited_for(tmp_path: Path) -> None:
    go = trio.Event()
    script = (*STREAM[:3], WaitFor(go), *STREAM[3:])
    patient = {"readiness_delay": 0, "grace": 3000, "hard_limit": 3600}
    async with (
        open_engine(script) as engine,
        processes(engine, folder=tmp_path, hang_limit=1.0, shutdown=patient) as gateway,
    ):
        clients = [await gateway.send() for _ in range(8)]
        for client in clients:
            await client.read_events(1)
        before = await pids(gateway)
        assert (await gateway.act("processes/replace"))["done"]
        await gateway.gateway.logged("replacing")
        os.kill(before[0], signal.SIGSTOP)
        assert (await gateway.gateway.logged("process_hangs"))["pid"] == before[0]
        go.set()
        for client in clients:
            with client:
                await client.read_to_end()
        await gateway.gateway.logged("replaced")
        assert not set(before) & set(await pids(gateway))


async def test_no_process_outlives_its_supervisor(tmp_path: Path) -> None:
    async with open_engine(STREAM) as engine, processes(engine, folder=tmp_path, hang_limit=60.0) as gateway:
        address = gateway.gateway.address
        assert isinstance(address, tuple)
        found = await pids(gateway)
        gateway.gateway.send(signal.SIGKILL)
        await gateway.gateway.process.wait()
        for pid in found:
            await ended(pid)
        with socket.create_server(address, reuse_port=False):  # nobody has it any more
            pass


@pytest.mark.parametrize("hurried", [False, True])
async def test_a_signal_while_processes_are_replaced_ends_all_of_them(tmp_path: Path, hurried: bool) -> None:
    go = trio.Event()
    script = (*STREAM[:3], WaitFor(go), *STREAM[3:])
    async with (
        open_engine(script) as engine,
        processes(engine, folder=tmp_path, shutdown={"readiness_delay": 0.1, "grace": 10}) as gateway,
    ):
        clients = [await gateway.send() for _ in range(8)]
        for client in clients:
            await client.read_events(1)
        gateway.gateway.send(signal.SIGUSR2)
        await gateway.gateway.logged("retiring")
        gateway.gateway.send(signal.SIGTERM)
        await gateway.gateway.logged("shutting_down", lambda line: line.get("process") == 0)
        await gateway.gateway.logged("shutting_down", lambda line: line.get("process") == 1)
        if hurried:
            gateway.gateway.send(signal.SIGTERM)
        else:
            go.set()
        ends = [b"gateway_draining" in (await client.read_to_end()).body for client in clients]
        assert ends == [hurried] * 8
        for client in clients:
            client.__exit__(None, None, None)
        assert await gateway.gateway.exit_code() == 0
        assert not [line for line in gateway.gateway.lines if line["event"] in ("bug", "process_ended")]


async def test_one_process_alone_is_not_replaced(tmp_path: Path) -> None:
    async with open_engine(STREAM) as engine, processes(engine, folder=tmp_path, count=1) as gateway:
        answer = await gateway._operate("POST", "/admin/v1/processes/replace", {})
        assert (answer.status, b"server.processes" in answer.body) == (409, True)
