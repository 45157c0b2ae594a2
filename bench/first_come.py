"""The gateway with a plain queue in the place of its scheduler, to see what a scenario of fairness would say.

``python -m bench.first_come serve --config FILE`` is ``trio-gateway serve``, but that
whoever came first is placed first, whoever pays, whatever the tier, however old it
grows. Bounds, leases, rates and records stay as they are. Batch may take all slots only
if ``admission.tiers.batch.max_share`` says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trio_gateway.admission import _controller
from trio_gateway.admission._scheduler import Group, Scheduler, W
from trio_gateway.cli import main


class _First(Group[W]):
    """A group of one line, with the one that came first."""

    def __init__(self, first: W) -> None:
        super().__init__(lambda tenant: 1.0)
        self._first = first

    def lines(self) -> Iterator[list[W]]:
        """Answer its one line."""
        yield [self._first]


class FirstCome(Scheduler[W]):
    """First come, first served, over all tenants and tiers. No tenant may have a bound of its own."""

    def promote(self, now: float) -> None:
        """Let nobody rise: there is no order to rise in."""

    def groups(self, pool: str) -> Iterator[tuple[int, Group[W]]]:
        """Answer the one that came first, as if there were no tiers."""
        first = next((waiter for waiter in self if waiter.pool == pool), None)
        if first is not None:
            yield 0, _First(first)


if __name__ == "__main__":
    room: Any = _controller
    room.Scheduler = FirstCome
    main()
