"""The promises of `AdmissionPort`, `TicketPort` and `LeasePort`, seen as an exchange sees them.

Whatever stands behind the port (this process, a broker, a cluster) adds itself to `OPENINGS` and keeps them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final, Protocol

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from trio_gateway.admission import AdmissionLimits
from trio_gateway.contract import AdmissionPort, FleetPort, LeasePort, Rejection, TicketPort
from trio_gateway.errors import Problem, Refused
from trio_gateway.testing import WorkerSet, make_request, make_worker
from trio_gateway.units import MiB

NO_ROOM: Final = Problem.of("engine_overloaded", "the engine has no room")


class Door(Protocol):
    """An admission with a fleet behind it, and a look at whether anything is left of its work."""

    admission: AdmissionPort
    fleet: FleetPort

    def left_over(self) -> list[str]:
        """Name what is held, draining or waiting."""


class InProcess:
    """The admission controller of one process."""

    def __init__(self, workers: WorkerSet) -> None:
        self.admission: AdmissionPort = workers.admission
        self.fleet: FleetPort = workers.fleet
        self.left_over = workers.left_over


@asynccontextmanager
async def _in_process(slots: int, workers: int, max_queued: int, max_wait: float) -> AsyncIterator[Door]:
    names = [f"w{number}" for number in range(1, workers + 1)]
    workers_ = WorkerSet(
        *(make_worker(name, slots=slots) for name in names),
        limits=AdmissionLimits(max_queued, MiB, max_wait),
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(workers_.run)  # noqa: ASYNC113 - it keeps time from its first step on
        yield InProcess(workers_)
        nursery.cancel_scope.cancel()


Opening = Callable[[int, int, int, float], AbstractAsyncContextManager[Door]]
OPENINGS: Final[dict[str, Opening]] = {"in process": _in_process}


@pytest.fixture(params=list(OPENINGS))
def opening(request: pytest.FixtureRequest) -> Callable[..., AbstractAsyncContextManager[Door]]:
    """Opens a door with some workers of some slots."""
    open_ = OPENINGS[request.param]

    def opened(
        *, slots: int = 1, workers: int = 1, max_queued: int = 10, max_wait: float = 60.0
    ) -> AbstractAsyncContextManager[Door]:
        return open_(slots, workers, max_queued, max_wait)

    return opened


Doors = Callable[..., AbstractAsyncContextManager[Door]]


async def lease_of(door: Door, **request: Any) -> LeasePort:
    with trio.fail_after(1):
        return await door.admission.enter(make_request(**request)).wait()


def wait_for(ticket: TicketPort, nursery: trio.Nursery) -> list[LeasePort | Problem]:
    """Wait in the background; the answer gets what came of it."""
    result: list[LeasePort | Problem] = []

    async def wait() -> None:
        try:
            result.append(await ticket.wait())
        except Refused as refused:
            result.append(refused.problem)

    nursery.start_soon(wait)
    return result


async def test_a_free_slot_is_given_at_once_and_comes_back(opening: Doors, autojump_clock: MockClock) -> None:
    async with opening() as door:
        ticket = door.admission.enter(make_request())
        assert (ticket.waiting, ticket.place) == (False, None)
        lease = await ticket.wait()
        assert lease.worker.id == "w1"
        with lease:
            assert door.left_over() != []
        assert door.left_over() == []


async def test_waiting_ends_with_a_slot_in_the_order_of_arrival(
    opening: Doors, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    async with opening() as door:
        lease = await lease_of(door)
        tickets = [door.admission.enter(make_request()) for _ in range(3)]
        assert [(ticket.waiting, ticket.place) for ticket in tickets] == [(True, 1), (True, 2), (True, 3)]
        results = [wait_for(ticket, nursery) for ticket in tickets]
        for number, result in enumerate(results):
            with lease:
                pass
            await wait_all_tasks_blocked()
            assert [bool(found) for found in results] == [other <= number for other in range(3)]
            (found,) = result
            assert not isinstance(found, Problem)
            lease = found
        with lease:
            pass
        assert door.left_over() == []


async def test_a_refusal_takes_nothing(opening: Doors, autojump_clock: MockClock) -> None:
    async with opening(max_queued=0) as door:
        with await lease_of(door), pytest.raises(Refused) as refused:
            door.admission.enter(make_request())
        assert refused.value.problem.status == 429
        assert (refused.value.problem.retry_after or 0) >= 1
        assert door.left_over() == []


async def test_leaving_gives_back_whatever_there_was(opening: Doors, autojump_clock: MockClock) -> None:
    async with opening() as door:
        placed = door.admission.enter(make_request())
        waiting = door.admission.enter(make_request())
        waiting.leave()
        placed.leave()
        waiting.leave()
        placed.leave()
        assert door.left_over() == []
        with await lease_of(door):
            pass


async def test_a_cancelled_wait_gives_the_position_back(opening: Doors, autojump_clock: MockClock) -> None:
    async with opening() as door:
        with await lease_of(door):
            ticket = door.admission.enter(make_request())
            with trio.move_on_after(1) as scope:
                await ticket.wait()
            assert scope.cancelled_caught
            assert not ticket.waiting
        assert door.left_over() == []


async def test_a_wait_that_is_too_long_ends_with_a_reason(opening: Doors, autojump_clock: MockClock) -> None:
    async with opening(max_wait=5.0) as door:
        with await lease_of(door):
            began = trio.current_time()
            with pytest.raises(Refused) as refused:
                await door.admission.enter(make_request()).wait()
            assert trio.current_time() == began + 5
            assert refused.value.problem.code == "queue_timeout"
        assert door.left_over() == []


async def test_an_engine_that_may_still_be_working_keeps_the_slot_for_a_while(
    opening: Doors, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    async with opening() as door:
        lease = await lease_of(door)
        assert not lease.engine_asked
        lease.engine_started("attempt")
        assert lease.engine_asked
        result = wait_for(door.admission.enter(make_request()), nursery)
        with lease:
            pass
        await wait_all_tasks_blocked()
        assert result == []
        await trio.sleep(lease.worker.cancel_grace)
        await wait_all_tasks_blocked()
        (found,) = result
        assert not isinstance(found, Problem)
        found.engine_started("attempt")
        found.engine_done()
        assert found.engine_asked
        with found:
            pass
        assert door.left_over() == []


async def test_one_that_is_sent_back_is_in_front_of_those_who_came_later(
    opening: Doors, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    async with opening() as door:
        first = door.admission.enter(make_request())
        lease = await first.wait()
        second = door.admission.enter(make_request())
        assert first.back(without=None, last=NO_ROOM)
        assert (first.place, second.place) == (1, 2)
        with lease:
            pass
        with await first.wait():
            assert second.waiting
        with await second.wait():
            pass
        assert door.left_over() == []


async def test_one_that_is_sent_back_gets_another_worker_or_is_told_that_there_is_none(
    opening: Doors, autojump_clock: MockClock
) -> None:
    async with opening(workers=2) as door:
        ticket = door.admission.enter(make_request())
        with await ticket.wait() as first:
            assert ticket.back(without=first.worker, last=NO_ROOM)
        with await ticket.wait() as second:
            assert second.worker.id != first.worker.id
            assert not ticket.back(without=second.worker, last=NO_ROOM)
            assert not ticket.waiting
        assert door.left_over() == []


async def test_a_worker_that_said_it_has_no_room_is_left_alone_until_its_time_or_its_output(
    opening: Doors, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    async with opening(slots=2) as door:
        began = trio.current_time()
        lease = await lease_of(door)
        door.fleet.attempted(lease.worker)
        door.fleet.rejected(lease.worker, make_request(), Rejection("capacity", 503, 5.0, began))
        with lease:
            pass
        results = [wait_for(door.admission.enter(make_request()), nursery) for _ in range(2)]
        await trio.sleep(4.9)
        assert results == [[], []]
        await trio.sleep(0.2)
        assert [len(result) for result in results] == [1, 0]  # one tries first
        door.fleet.output(lease.worker, make_request())
        await wait_all_tasks_blocked()
        for (found,) in results:
            assert not isinstance(found, Problem)
            with found:
                pass
        assert door.left_over() == []


async def test_final_429_and_503_say_when_to_come_back_and_no_others_do(
    opening: Doors, autojump_clock: MockClock
) -> None:
    async with opening() as door:
        told = door.admission.with_retry_after(NO_ROOM, "m1")
        assert (told.code, told.status) == (NO_ROOM.code, NO_ROOM.status)
        assert (told.retry_after or 0) >= 1
        for code in ("engine_failed", "invalid_value", "operator_cancelled"):
            problem = Problem.of(code, "as it is")
            assert door.admission.with_retry_after(problem, "m1") == problem
