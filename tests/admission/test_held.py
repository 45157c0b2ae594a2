"""For how long leases are held: until they are returned, or begin to drain; told once for each."""

from __future__ import annotations

import trio
from trio.testing import MockClock

from trio_gateway.testing import WorkerSet, make_request, make_worker


async def test_a_lease_tells_once_for_how_long_it_was_held(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    workers = WorkerSet(make_worker(cancel_grace=5))
    nursery.start_soon(workers.run)
    told: list[float] = []
    workers.admission.note_held = told.append
    whole = await workers.admission.enter(make_request()).wait()
    left = await workers.admission.enter(make_request()).wait()
    await trio.sleep(2)
    whole.release()
    whole.release()  # harmless
    await trio.sleep(1)
    left.engine_started("attempt")
    left.drain()
    await trio.sleep(10)
    assert told == [2.0, 3.0]
