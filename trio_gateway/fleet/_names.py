"""Workers behind a name: each of its addresses is one. A name that resolves no more keeps its last ones."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Final

import trio

from ..contract import Worker
from ._book import WorkerBook
from ._registry import Fleet

MOST: Final = 1024  # addresses of one name that are looked at


class NamedWorkers:
    """Keeps the workers of names up to date.

    Args:
        templates: one for each name, whose ``host`` it is; the workers are made like it.
        resolve: answers the addresses of a name; none if it does not resolve.
        begin: told of the book of each worker that is new.
        tell: told worker and detail of what operators may want to know.
    """

    def __init__(
        self,
        fleet: Fleet,
        templates: Sequence[Worker],
        interval: float,
        resolve: Callable[[str], Awaitable[Sequence[str]]],
        begin: Callable[[WorkerBook], None],
        tell: Callable[[str, str], None],
    ) -> None:
        self._fleet = fleet
        self._templates = templates
        self._interval = interval
        self._resolve = resolve
        self._begin = begin
        self._tell = tell
        self._known: dict[str, dict[str, str]] = {template.id: {} for template in templates}
        self._lost: set[str] = set()

    async def run(self) -> None:
        """Ask for all names again and again, for ever; each at its own pace."""
        async with trio.open_nursery() as nursery:
            for template in self._templates:
                nursery.start_soon(self._follow, template)

    async def _follow(self, template: Worker) -> None:
        while True:
            self.take(template, await self._resolve(template.host))
            await trio.sleep(self._interval)

    def take(self, template: Worker, addresses: Sequence[str]) -> None:
        """Bring the workers of a name in line with its addresses. Streams on dropped ones go on."""
        lost = not addresses
        if lost is not (template.id in self._lost):
            (self._lost.add if lost else self._lost.discard)(template.id)
            self._tell(template.id, "its name does not resolve" if lost else "its name resolves again")
        if lost:
            return
        known, wanted = self._known[template.id], sorted(set(addresses))[:MOST]
        for address in [each for each in known if each not in wanted]:
            self._fleet.remove(known.pop(address))
            self._tell(template.id, "an address is gone from its name")
        for address in wanted:
            if address not in known:
                worker = replace(
                    template,
                    id=f"{template.id}@{address}",
                    address=address,
                    labels=template.labels | {template.id},
                )
                known[address] = worker.id
                self._begin(self._fleet.add(worker))
