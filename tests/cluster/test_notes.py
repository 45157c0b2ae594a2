"""What is told of a store that is lost, and why it stays away."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import trio
import trio.testing

from trio_gateway.cluster import Heard, Link, Member, Replica, ReplicaSettings, Standing, StoreLost, Survey
from trio_gateway.testing import until

JOINED = msgspec.json.encode(
    {
        "state": "joined",
        "epoch": 1,
        "members": ["r1"],
        "grants": {},
        "rates": {},
        "settling": False,
        "version": 0,
        "born": "b",
        "contended": False,
        "news": {},
        "seen": 0,
    }
)


class Store:
    """A store that is lost for each of `troubles` in turn, and is there when none is left."""

    def __init__(self, *troubles: str) -> None:
        self.troubles = list(troubles)

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Link]:
        await trio.lowlevel.checkpoint()
        yield self

    async def turn(self, told: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        if self.troubles:
            raise StoreLost(self.troubles.pop(0))
        return JOINED


class Nobody:
    """A process that has nothing and wants nothing."""

    def survey(self) -> Survey:
        return Survey({}, {}, {})

    def use(self, heard: Heard) -> bool:
        return True

    def stand(self, standing: Standing, members: tuple[str, ...], poke: Callable[[bool], None]) -> None: ...


async def test_each_reason_for_which_the_store_is_away_is_told_once_until_it_is_found(
    autojump_clock: trio.testing.MockClock,
) -> None:
    store, notes = Store("refused", "refused", "wrong password", "refused"), list[tuple[bool, str]]()
    settings = ReplicaSettings(lease=5, heartbeat=1)
    replica = Replica(settings, Member("r1", 5), store.connect, Nobody(), lambda *note: notes.append(note))
    found, refused, password = (True, "replicas: 1"), (False, "refused"), (False, "wrong password")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(replica.run)
        with trio.fail_after(60):
            await until(lambda: found in notes)
            assert notes == [refused, password, found]
            store.troubles = ["no answer", "wrong password", *(f"refused at {at}" for at in range(20))]
            notes.clear()
            await until(lambda: found in notes)
        nursery.cancel_scope.cancel()
    assert notes[:2] == [(False, "no answer"), password]
    assert len(notes) == 8 + 1, "what differs each time is not told for ever"
