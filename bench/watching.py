"""Load on a fleet while something is done to it, and the gateway's account of itself meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import trio

from . import peers
from .askers import CUT, REFUSED, WHOLE, WRONG, Askers, Told
from .fleet import Fleet
from .report import Check, Report

INTERVAL: Final = 0.1  # seconds between readings
KINDS: Final = (WHOLE, CUT, REFUSED, WRONG)
COLUMNS: Final = ("answers", "number", "codes")


class Watch:
    """Looks at the equations of conservation again and again.

    Attributes:
        readings: how many there were.
        broken: equations that did not hold, in the words of the gateway.
        most_held: slots of one worker in use at a time, draining ones included.
    """

    def __init__(self, gateway: peers.Gateway) -> None:
        self._gateway = gateway
        self.readings = 0
        self.broken: list[str] = []
        self.most_held = 0

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            statistics = await trio.to_thread.run_sync(self._gateway.statistics)
            self.readings += 1
            self.broken += statistics["conservation"]["errors"]
            held = (each["held"] + each["draining"] for each in statistics["workers"])
            self.most_held = max(self.most_held, *held, 0)
            await trio.sleep(INTERVAL)

    def checks(self, statistics: dict[str, Any]) -> Iterator[Check]:
        """Judge what was seen, and what the gateway holds now, at rest."""
        leases = statistics["leases"]
        still = statistics["waiting"] + statistics["running"] + statistics["buffered_bytes"]
        zeros = {
            "equations that did not hold": len(self.broken) + len(statistics["conservation"]["errors"]),
            "leases held or draining at the end": leases["held"] + leases["draining"],
            "leases not returned": leases["granted"] - leases["returned"],
            "leases returned twice": leases["double_releases"],
            "waiting, running or buffered at the end": still,
        }
        for what, value in zeros.items():
            yield Check.exactly(what, value, 0, "")


@dataclass(frozen=True)
class Seen:
    """What a load saw: each answer, the account meanwhile, and the account at rest afterwards."""

    told: Sequence[Told]
    watch: Watch
    statistics: dict[str, Any]

    def count(self, kind: str) -> int:
        """Answers of one kind."""
        return sum(each.kind == kind for each in self.told)

    def describe(self, report: Report) -> None:
        """Write the table, and the raw figures."""
        for kind in KINDS:
            codes = Counter(each.code for each in self.told if each.kind == kind and each.code)
            words = ", ".join(f"{code} {count}" for code, count in codes.items())
            report.rows.append((kind, str(self.count(kind)), words or "-"))
        retries = {key[0]: count for key, count in peers.counts_of(self.statistics, "retries").items()}
        report.notes += [
            f"retries: {retries or 'none'}",
            f"{self.watch.readings} readings of the account",
            *(f"{each.kind}: {each.code} {each.detail}" for each in self._odd()),
        ]
        report.raw |= {
            "kinds": {kind: self.count(kind) for kind in KINDS},
            "odd": [vars(each) for each in self._odd()],
            "statistics": {name: value for name, value in self.statistics.items() if name != "recent"},
        }

    def _odd(self) -> list[Told]:
        return [each for each in self.told if each.kind in (REFUSED, WRONG)][:20]


async def under_load(running: Fleet, clients: int, seed: int, disturb: Callable[[], Awaitable[None]]) -> Seen:
    """Let clients ask without a pause while ``disturb`` runs, then wait for rest."""
    askers, watch = Askers(running.gateway.port, seed), Watch(running.gateway)
    await askers.learn()
    async with trio.open_nursery() as watching:
        watching.start_soon(watch.run)
        async with trio.open_nursery() as asking:
            for _ in range(clients):
                asking.start_soon(askers.ask_on)
            await disturb()
            askers.stop()
        await trio.to_thread.run_sync(running.gateway.wait_idle)
        watching.cancel_scope.cancel(reason="the load is over")
    return Seen(askers.told, watch, await trio.to_thread.run_sync(running.gateway.statistics))
