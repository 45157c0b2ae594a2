"""Simulated workers beside the real engine: they register, and one of them is killed on the way."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import trio

from ._ending import DemoError, Ending
from ._fetch import fetch
from ._processes import SIMULATED_MODEL, Ports, start_worker
from ._screen import Screen

REQUESTS_EACH: Final = 2  # at a time, for each worker
REGISTERS_WITHIN: Final = 60.0  # seconds
BEGIN_WITHIN: Final = 20.0  # seconds until all requests have a slot
UNTIL_KILLED: Final = 0.5  # seconds in which answers begin
POLL_SECONDS: Final = 0.05


@dataclass(frozen=True, slots=True)
class Answered:
    """What became of one request.

    Attributes:
        worker: that had it last.
        tokens: that were delivered.
        attempts: at how many workers it was tried.
        told: how the client learnt that the answer was cut; empty: it is whole.
    """

    worker: str
    tokens: int
    attempts: int
    told: str

    def __str__(self) -> str:
        if self.told:
            return f"{self.worker}: cut after {self.tokens} tokens, and the client was told: {self.told}"
        again = " at the second try" if self.attempts > 1 else ""
        return f"{self.worker}: whole{again}, {self.tokens} tokens"


class SimulatedFleet:
    """The workers, and what is shown of them.

    Args:
        nursery: that owns their processes.
        folder: with the join token; for their logs.
    """

    def __init__(
        self, nursery: trio.Nursery, ending: Ending, folder: Path, ports: Ports, screen: Screen
    ) -> None:
        self._nursery = nursery
        self._ending = ending
        self._folder = folder
        self._ports = ports
        self._screen = screen
        self._url = f"http://127.0.0.1:{ports.public}"
        self._admin_url = f"http://127.0.0.1:{ports.admin}"
        self._processes: dict[str, trio.Process] = {}

    # -- workers

    async def start(self, number: int) -> None:
        """Start so many workers, and wait until all have registered.

        Raises:
            DemoError: one of them has not.
        """
        began = trio.current_time()
        ids = [f"sim-{each}" for each in range(1, number + 1)]
        with self._screen.working(f"Starting {_listed(ids)}, simulated, which register with it"):
            for worker_id in ids:
                await self._start(worker_id)
            for worker_id in ids:
                await self._wait_registered(worker_id, None)
        verb = "has" if number == 1 else "have"
        self._screen.done(f"{_listed(ids)} {verb} registered after {trio.current_time() - began:.1f} s")

    async def _start(self, worker_id: str) -> None:
        started = await start_worker(self._nursery, self._ending, worker_id, self._folder, self._ports)
        self._processes[worker_id] = started

    async def _wait_registered(self, worker_id: str, before: str | None) -> None:
        """Wait until the gateway has a worker, at another address than ``before``."""
        with trio.move_on_after(REGISTERS_WITHIN):
            while True:
                known = (await self._workers()).get(worker_id)
                if known is not None and known["url"] != before:
                    return
                await trio.sleep(POLL_SECONDS)
        raise DemoError(f"{worker_id} did not register within {REGISTERS_WITHIN:.0f} seconds")

    async def _workers(self) -> dict[str, dict[str, Any]]:
        """Answer what the gateway knows of these workers; nothing, if it does not answer."""
        try:
            statistics = json.loads(await fetch(f"{self._admin_url}/admin/v1/statistics"))
        except OSError:
            return {}
        return {each["id"]: each for each in statistics["workers"] if each["id"] in self._processes}

    # -- what is shown

    async def show(self) -> None:
        """Ask all workers at once, kill the busiest of several meanwhile, and ask again.

        Raises:
            DemoError: an answer was lost that did not have to be.
        """
        each = REQUESTS_EACH * len(self._processes)
        if len(self._processes) == 1:
            self._screen.heading(f"{each} requests at once for {SIMULATED_MODEL}")
            await self._ask(range(each))
            return
        self._screen.heading(f"{each} requests at once for {SIMULATED_MODEL}, and a worker is killed")
        killed, before = await self._ask_and_kill(range(each))
        self._screen.heading(f"{each} more, while {killed} is gone")
        await self._ask(range(each, 2 * each))
        self._screen.line()
        with self._screen.working(f"Starting {killed} again"):
            await self._start(killed)
            await self._wait_registered(killed, before)
        self._screen.done(f"{killed} has registered again, and gets requests as before")

    async def _ask(self, numbers: Sequence[int]) -> None:
        answers: list[Answered | DemoError] = []
        async with trio.open_nursery() as asking:
            for number in numbers:
                asking.start_soon(self._ask_one, number, answers)
        self._tell(answers)

    async def _ask_and_kill(self, numbers: Sequence[int]) -> tuple[str, str]:
        """Ask, and kill a worker meanwhile; answers its id, and the address at which it was."""
        answers: list[Answered | DemoError] = []
        async with trio.open_nursery() as asking:
            for number in numbers:
                asking.start_soon(self._ask_one, number, answers)
            busiest = await self._busiest(len(numbers))
            if busiest is not None:
                self._kill(busiest["id"])
        if busiest is None:
            raise DemoError("the simulated workers got no requests")
        self._tell(answers, busiest["id"])
        return busiest["id"], busiest["url"]

    async def _ask_one(self, number: int, answers: list[Answered | DemoError]) -> None:
        """Ask one question; what becomes of it is added to ``answers``."""
        from ._question import ask_simulated, find_record

        try:
            exchange_id, told = await ask_simulated(self._url, number)
            record = await find_record(self._admin_url, exchange_id)
        except DemoError as exc:
            answers.append(exc)
            return
        if (record["outcome"] == "completed") is bool(told):
            answers.append(DemoError(f"the client took an answer for whole that was {record['outcome']}"))
            return
        worker, tokens = str(record["worker"]), int(record["tokens_delivered"] or 0)
        answers.append(Answered(worker, tokens, int(record["attempts"]), told))

    async def _busiest(self, requests: int) -> dict[str, Any] | None:
        """Wait until all requests have a slot and answers have begun; None: that takes too long."""
        with trio.move_on_after(BEGIN_WITHIN):
            while True:
                workers = list((await self._workers()).values())
                if sum(worker["held"] for worker in workers) == requests:
                    await trio.sleep(UNTIL_KILLED)
                    return max(workers, key=lambda worker: int(worker["held"]))
                await trio.sleep(POLL_SECONDS)
        return None

    def _kill(self, worker_id: str) -> None:
        process = self._processes[worker_id]
        self._ending.killed.add(process)
        process.kill()

    def _tell(self, answers: Iterable[Answered | DemoError], killed: str | None = None) -> None:
        """Show what became of requests.

        Raises:
            DemoError: one failed that did not have to.
        """
        good = []
        for answer in answers:
            if isinstance(answer, DemoError):
                raise answer
            if answer.told and answer.worker != killed:
                raise DemoError(f"nobody killed its worker, and yet {answer}")
            good.append(answer)
        for answer in sorted(good, key=str):
            self._screen.line(str(answer))


def _listed(words: Sequence[str]) -> str:
    """Write words as a list in a sentence."""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))
