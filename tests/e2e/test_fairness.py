"""Floods on real sockets: tenants share by weight, and small ones hardly wait.

First come, first served gives each flood the same, a Jain index of 0.78 by these weights. And where
whoever has waited for long rose over its tier, small tenants would stand behind whole floods.
"""

from __future__ import annotations

from collections import Counter

import trio

from tests.e2e.serving import Serving, serving, tenant
from trio_gateway.ledger import Record
from trio_gateway.testing import Answer, chat_request, chat_stream, open_engine

SLOTS = 4
CLIENTS = 10 * SLOTS  # of each flood
PROMOTE_AFTER = 0.25  # seconds; floods wait longer, though something of each is placed all the time
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


def all_wait(gateway: Serving) -> bool:
    queued = gateway.gateway.admission.statistics().queued_by_tenant
    return all(queued.get(name, 0) >= CLIENTS // 2 for name in WEIGHTS)


async def placed_before(gateway: Serving, answer: Answer) -> int:
    """How many others were placed while a request waited, of those that are over."""
    found: list[Record] = []

    def is_settled() -> bool:
        found[:] = [
            record for record in gateway.records if record.exchange_id == answer.header("x-request-id")
        ]
        return bool(found)

    await gateway.until(is_settled)
    begun, ended = found[0].arrived_at, found[0].placed_at
    assert ended is not None
    return sum(begun < (record.placed_at or begun) < ended for record in gateway.records)


async def test_three_floods_share_by_weight_and_small_tenants_hardly_wait() -> None:
    script = chat_stream("a", "b", usage=(10, 2))
    waits: list[int] = []
    async with (
        open_engine(script) as engine,
        serving(
            engine,
            worker={"slots": SLOTS},
            admission={"promote_after": PROMOTE_AFTER},
            tenants=tenants(),
        ) as gateway,
    ):
        floods = [Flood(gateway, name, CLIENTS) for name in WEIGHTS]
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                for flood in floods:
                    nursery.start_soon(flood.run)
                await gateway.until(lambda: all(flood.served >= 20 for flood in floods))
                await gateway.until(lambda: all_wait(gateway))
                before = Counter({flood.name: flood.served for flood in floods})
                for _ in range(20):
                    for name in SMALL:
                        answer = await gateway.ask(chat_request(key=f"key-{name}"))
                        assert answer.status == 200
                        waits.append(await placed_before(gateway, answer))
                await gateway.until(lambda: sum(flood.served for flood in floods) - before.total() >= 700)
                gained = {flood.name: flood.served - before[flood.name] for flood in floods}
                nursery.cancel_scope.cancel()
    assert jain([gained[name] / weight for name, weight in WEIGHTS.items()]) >= 0.98, gained
    # Its turn is the next one, but for others' of which nobody knew yet how long they would be.
    assert sorted(waits)[len(waits) * 9 // 10] <= SLOTS, waits
