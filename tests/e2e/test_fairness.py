"""Floods on real sockets: tenants share by weight, and small ones hardly wait.

First come, first served gives each flood the same, a Jain index of 0.78 by these weights.
"""

from __future__ import annotations

from collections import Counter

import trio

from tests.e2e.serving import Serving, serving, tenant
from trio_gateway.testing import chat_request, chat_stream, open_engine

SLOTS = 4
WEIGHTS = {"one": 1.0, "two": 2.0, "four": 4.0}
SMALL = ("small-1", "small-2")


def tenants() -> list[dict[str, object]]:
    floods = [tenant(name, f"key-{name}", weight=weight, max_queued=1000) for name, weight in WEIGHTS.items()]
    return floods + [tenant(name, f"key-{name}") for name in SMALL]


def jain(values: list[float]) -> float:
    """Jain's index: 1 if all are equal, 1/n if one has everything."""
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values))


class Flood:
    """Clients of one tenant that always have more waiting than there are slots."""

    def __init__(self, gateway: Serving, name: str, clients: int) -> None:
        self.gateway = gateway
        self.name = name
        self.clients = clients
        self.served = 0

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(self.clients):
                nursery.start_soon(self._ask_again_and_again)

    async def _ask_again_and_again(self) -> None:
        while True:
            answer = await self.gateway.ask(chat_request(key=f"key-{self.name}"))
            assert answer.status == 200
            self.served += 1


async def test_three_floods_share_by_weight_and_small_tenants_hardly_wait() -> None:
    script = chat_stream("a", "b", usage=(10, 2))
    waits: list[float] = []
    async with (
        open_engine(script) as engine,
        serving(engine, worker={"slots": SLOTS}, tenants=tenants()) as gateway,
    ):
        floods = [Flood(gateway, name, 3 * SLOTS) for name in WEIGHTS]
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                for flood in floods:
                    nursery.start_soon(flood.run)
                await gateway.until(lambda: all(flood.served >= 20 for flood in floods))
                before = Counter({flood.name: flood.served for flood in floods})
                for _ in range(20):
                    for name in SMALL:
                        begun = sum(flood.served for flood in floods)
                        answer = await gateway.ask(chat_request(key=f"key-{name}"))
                        assert answer.status == 200
                        waits.append(sum(flood.served for flood in floods) - begun)
                await gateway.until(lambda: sum(flood.served for flood in floods) - before.total() >= 700)
                gained = {flood.name: flood.served - before[flood.name] for flood in floods}
                nursery.cancel_scope.cancel()
    assert jain([gained[name] / weight for name, weight in WEIGHTS.items()]) >= 0.98, gained
    # In answers of others that were given in the meantime: those that ran, and a few that came first.
    assert sorted(waits)[len(waits) * 9 // 10] <= 4 * SLOTS, waits
