"""Replicas in one process: admission, fleet and rates of each, sharing through a real store."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Final

import trio

from trio_gateway.admission import AdmissionLimits, TenantShare
from trio_gateway.cluster import (
    Connect,
    Link,
    Member,
    Replica,
    ReplicaSettings,
    StoreAddress,
    Vouching,
    connect,
)
from trio_gateway.errors import Refused
from trio_gateway.operations import SharedSecrets, Sharing
from trio_gateway.tenancy import RateBook, RateLimits
from trio_gateway.testing import WorkerSet, make_request, make_worker
from trio_gateway.units import MiB

LEASE: Final = 1.0
PATIENCE: Final = 0.3
_numbers = itertools.count()


class Engine:
    """What all replicas' requests end at: it counts how many run at a time, in all and at most."""

    def __init__(self) -> None:
        self.running = self.most = self.total = 0

    def begin(self) -> None:
        self.running += 1
        self.total += 1
        self.most = max(self.most, self.running)

    def end(self) -> None:
        self.running -= 1


class Gate:
    """A way to the store on which turns can be held up."""

    def __init__(self, port: int, prefix: str) -> None:
        self._address = StoreAddress("127.0.0.1", port, prefix=prefix)
        self.delay = 0.0

    @asynccontextmanager
    async def __call__(self) -> AsyncIterator[Link]:
        async with connect(replace(self._address, patience=PATIENCE + self.delay)) as link:
            yield _Slow(self, link)


class _Slow:
    """A link whose turns take longer."""

    def __init__(self, gate: Gate, link: Link) -> None:
        self._gate = gate
        self._link = link

    async def turn(self, told: bytes) -> bytes:
        await trio.sleep(self._gate.delay)
        return await self._link.turn(told)


class OneReplica:
    """A replica with one worker, whose engine all share."""

    def __init__(
        self,
        gate: Callable[[], Connect],
        engine: Engine,
        *,
        slots: int = 8,
        split: bool = True,
        shares: dict[str, TenantShare] | None = None,
        limits: dict[str, RateLimits] | None = None,
        token: str | None = None,
    ) -> None:
        self.name: Final = f"r{next(_numbers)}"
        self.engine = engine
        self.workers: Final = WorkerSet(
            make_worker("w1", slots=slots),
            limits=AdmissionLimits(10_000, 100 * MiB, 60.0),
            shares=shares,
        )
        self.admission: Final = self.workers.admission
        self.rates: Final = RateBook(limits or {}, clock=trio.current_time, dice=random.random)
        self.member: Final = Member(self.name, LEASE)
        self.notes: list[tuple[bool, str]] = []
        self.secrets: Final = None if token is None else SharedSecrets(Vouching(token, "test"))
        self.sharing: Final = Sharing(
            self.admission,
            self.workers.fleet,
            self.rates,
            self.member,
            split=split,
            secrets=self.secrets,
        )
        self.replica: Final = Replica(
            ReplicaSettings(LEASE, LEASE / 4),
            self.member,
            gate,
            self.sharing,
            lambda *note: self.notes.append(note),
        )
        self.served: Counter[str] = Counter()
        self.refused = 0

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.workers.run)
            nursery.start_soon(self.replica.run)
            await self.replica.tried.wait()
            task_status.started()

    async def serve(self, tenant: str, seconds: float, tokens: int = 10, **request: Any) -> None:
        """One request from beginning to end."""
        try:
            ticket = self.admission.enter(make_request(tenant=tenant, **request))
        except Refused:
            self.refused += 1
            await trio.sleep(0.005)
            return
        try:
            with await ticket.wait():
                self.engine.begin()
                try:
                    await trio.sleep(seconds)
                finally:
                    self.engine.end()
                    ticket.served(0, tokens)
            self.served[tenant] += tokens
        except Refused:
            self.refused += 1

    async def flood(self, tenant: str, width: int, seconds: float, tokens: int = 10) -> None:
        """Many requests of one tenant at a time, for ever."""

        async def again_and_again() -> None:
            while True:
                await self.serve(tenant, seconds, tokens)

        async with trio.open_nursery() as nursery:
            for _ in range(width):
                nursery.start_soon(again_and_again)


def jain(shares: Counter[str]) -> float:
    """Jain's index of fairness: 1 is even, 1/n is all for one of n."""
    values = list(shares.values())
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values))
