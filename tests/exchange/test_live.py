"""The exchanges of a process: found by their id, ended by it, remembered for a while."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.exchange.rig import rigged
from trio_gateway.contract import Ending, Outcome
from trio_gateway.errors import Problem
from trio_gateway.testing import Hold, Wait, WorkerSet, chat_stream, make_request, make_worker

OWNER = Ending(Outcome.CLIENT_CANCELLED, Problem.of("request_cancelled", "its owner cancelled it"))


async def test_an_exchange_stands_where_it_is(autojump_clock: MockClock) -> None:
    workers = WorkerSet(make_worker(slots=1))
    async with rigged((Wait(5), *chat_stream("x")), workers=workers) as rig:
        first = rig.start(make_request(tenant="acme"))
        await wait_all_tasks_blocked()
        second, third = rig.start(), rig.start()
        await wait_all_tasks_blocked()
        one = rig.live.standing(first.exchange.request.exchange_id)
        assert one is not None
        assert (one.tenant, one.state, one.position, one.outcome) == ("acme", "running", None, None)
        waiting = [rig.live.standing(r.exchange.request.exchange_id) for r in (second, third)]
        assert sorted((w.state, w.position) for w in waiting if w) == [("waiting", 1), ("waiting", 2)]
        assert all(w is not None and (w.eta or 0) > 0 for w in waiting)
        await third.over.wait()
        await second.over.wait()
        ended = rig.live.standing(first.exchange.request.exchange_id)
        assert ended is not None
        assert (ended.tenant, ended.state, ended.outcome) == ("acme", "ended", "completed")


async def test_the_ended_are_remembered_for_a_minute(autojump_clock: MockClock) -> None:
    async with rigged() as rig:
        running = await rig.run()
        name = running.exchange.request.exchange_id
        await trio.sleep(59)
        assert rig.live.standing(name) is not None
        await trio.sleep(2)
        assert rig.live.standing(name) is None


async def test_nobody_knows_of_a_stranger(autojump_clock: MockClock) -> None:
    async with rigged() as rig:
        assert rig.live.standing("stranger") is None
        rig.live.end("stranger", OWNER)
        await rig.live.wait_none()


@pytest.mark.parametrize("waits", [True, False])
async def test_one_is_ended_by_its_id_and_the_others_go_on(waits: bool, autojump_clock: MockClock) -> None:
    workers = WorkerSet(make_worker(slots=1 if waits else 2))
    async with rigged((Wait(5), *chat_stream("x")), (Hold(),), workers=workers) as rig:
        other = rig.start()
        await wait_all_tasks_blocked()
        running = rig.start()
        await trio.sleep(1)
        rig.live.end(running.exchange.request.exchange_id, OWNER)
        with trio.fail_after(0.01):
            await running.over.wait()
        assert running.client.problem is not None
        assert (running.client.problem.code, running.client.problem.status) == ("request_cancelled", 409)
        await other.over.wait()
        assert sorted(record.outcome for record in rig.records) == ["client_cancelled", "completed"]
