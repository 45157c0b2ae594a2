"""Workers that register, as real processes: killed, restarted and late, while clients ask without a pause.

The long versions, with figures, are the scenarios `failover`, `rolling_restart` and
`slow_releases` of the bench, whose clients these tests use.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import trio

from bench import simulated_worker
from bench.askers import CUT, WHOLE, Askers, Told
from bench.fleet import MODEL
from tests.e2e.serving import Serving, serving
from trio_gateway.testing import RawClient, chat_request, until

SLOTS: Final = 8
CLIENTS: Final = 6  # below the slots of all workers but one
LENGTHS: Final = (2, 12, 30)  # tokens of answers
COMMAND: Final = (sys.executable, "-m", "trio_gateway", "worker", "--engine", "simulated", "--model", MODEL)
SPEED: Final = ("--simulate", "decode=60")
START_LIMIT: Final = 60.0  # seconds; imports take two, on a busy machine more
END_LIMIT: Final = 30.0


class Workers:
    """Processes that register with a gateway, each under an id that it keeps."""

    def __init__(self, gateway: Serving, folder: Path, command: tuple[str, ...]) -> None:
        self._gateway = gateway
        self._command = command
        self._token = folder / "join-token"
        self.processes: dict[str, trio.Process] = {}

    async def busy(self, worker_id: str) -> None:
        """Wait until an attempt runs at a worker."""
        book = self._gateway.gateway.fleet.books[worker_id]
        await self._gateway.until(lambda: book.held > 0)

    async def start(self, *ids: str) -> None:
        """Start workers, and wait until they have registered: each in a book of its own."""
        books = self._gateway.gateway.fleet.books
        before = {worker_id: books.get(worker_id) for worker_id in ids}
        for worker_id in ids:
            options = ("--id", worker_id, "--slots", str(SLOTS), "--join-token-file", str(self._token))
            internal = ("--gateway", self._gateway.gateway.internal_addresses[0])
            self.processes[worker_id] = await trio.lowlevel.open_process(
                [*self._command, *options, *internal], stdout=subprocess.DEVNULL
            )

        def registered(worker_id: str) -> bool:
            book = books.get(worker_id)
            return book is not None and book is not before[worker_id] and book.ready(trio.current_time())

        with trio.fail_after(START_LIMIT):
            await until(lambda: all(map(registered, ids)))

    async def kill(self, worker_id: str) -> None:
        """Kill a worker as it is, without a word to anybody."""
        self.processes[worker_id].kill()
        await self.processes[worker_id].wait()

    async def end(self, worker_id: str) -> int:
        """Have a worker drain and end; answers its exit status."""
        self.processes[worker_id].send_signal(signal.SIGTERM)
        with trio.fail_after(END_LIMIT):
            return await self.processes[worker_id].wait()


@asynccontextmanager
async def fleet(
    number: int, folder: Path, command: tuple[str, ...] = (*COMMAND, *SPEED)
) -> AsyncIterator[tuple[Serving, Workers]]:
    """A gateway in this process and workers that have registered with it."""
    (folder / "join-token").write_text("0123456789abcdef")
    internal = {"bind": ["127.0.0.1:0"], "join_token_file": "join-token"}
    sections: dict[str, Any] = {
        "server": {"bind": ["127.0.0.1:0"], "expose_worker": True},
        "internal": internal,
    }
    async with serving(folder=folder, models=[{"id": MODEL}], **sections) as gateway:
        workers = Workers(gateway, folder, command)
        try:
            await workers.start(*(f"sim-{each}" for each in range(1, number + 1)))
            yield gateway, workers
            await gateway.expect_nothing_left()
        finally:
            for process in workers.processes.values():
                process.kill()
            with trio.move_on_after(END_LIMIT, shield=True):
                for process in workers.processes.values():
                    await process.wait()


async def told_while(gateway: Serving, happens: Callable[[], Awaitable[None]]) -> list[Told]:
    """What clients got who asked without a pause while something happened."""
    assert isinstance(gateway.address, tuple)
    askers = Askers(gateway.address[1], seed=1, lengths=LENGTHS)
    await askers.learn()
    async with trio.open_nursery() as nursery:
        for _ in range(CLIENTS):
            nursery.start_soon(askers.ask_on)
        await happens()
        askers.stop()
    return askers.told


async def test_a_worker_that_is_killed_costs_only_the_answers_that_had_begun_there(tmp_path: Path) -> None:
    async with fleet(3, tmp_path) as (gateway, workers):

        async def kill_one_after_the_other() -> None:
            for worker_id in ("sim-2", "sim-3"):
                await workers.busy(worker_id)
                await workers.kill(worker_id)
                await workers.start(worker_id)

        told = await told_while(gateway, kill_one_after_the_other)
        assert {each.kind for each in told} <= {WHOLE, CUT}, [each for each in told if each.kind != WHOLE]
        assert {each.worker for each in told if each.kind == CUT} <= {"sim-2", "sim-3"}
        records = gateway.records
        assert {record.outcome for record in records} <= {"completed", "upstream_failed"}
        # Whoever was there and had nothing yet was sent on, or had something and was told.
        assert any(record.attempts > 1 or record.outcome != "completed" for record in records)


async def test_workers_that_are_restarted_in_turn_lose_no_request(tmp_path: Path) -> None:
    async with fleet(2, tmp_path) as (gateway, workers):

        async def restart_each() -> None:
            for worker_id in ("sim-1", "sim-2"):
                await workers.busy(worker_id)
                assert await workers.end(worker_id) == 0
                await workers.start(worker_id)

        told = await told_while(gateway, restart_each)
        assert [each for each in told if each.kind != WHOLE] == []
        assert {each.worker for each in told} == {"sim-1", "sim-2"}


async def test_an_engine_never_runs_more_than_its_slots_however_late_it_lets_go(tmp_path: Path) -> None:
    """The engine has room for more: that it is not used is the doing of agent and gateway."""
    dice = random.Random(5)
    command = tuple(simulated_worker.command(tmp_path, prefill=400.0, decode=100.0))
    late: list[object] = [{"kind": "late_release", "seconds": 0.1}]
    faults: tuple[list[object], ...] = (late, [{"kind": "lost_cancel"}], [])

    async with fleet(1, tmp_path, command) as (gateway, _):

        async def leave(number: int) -> None:
            for turn in range(10):
                simulate = {"tokens": 20, "faults": faults[(number + turn) % 3]}
                with await RawClient.connect(gateway.address) as client:
                    await client.send(chat_request(f"{number}", model=MODEL, simulate=simulate))
                    with trio.move_on_after(dice.uniform(0, 0.15)):
                        await client.read_to_end()
                    if dice.random() < 0.5:
                        client.leave_reset()

        async with trio.open_nursery() as nursery:
            for number in range(16):
                nursery.start_soon(leave, number)
        await gateway.returned()
        told = await trio.to_thread.run_sync(simulated_worker.read_account, tmp_path, "sim-1")
        assert told["high_water"] == SLOTS
        assert told["arrived"] == told["released"] >= SLOTS
        assert told["running"] == told["waiting"] == told["open"] == told["held"] == 0
        assert gateway.gateway.idle_times["assumed"] == 0
