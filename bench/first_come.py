"""The gateway with a plain queue in the place of its scheduler, to see what a scenario of fairness would say.

``python -m bench.first_come serve --config FILE`` is ``trio-gateway serve``, but that
whoever came first is placed first, whoever pays, whatever the tier, however old it
grows. Bounds, leases, rates and records stay as they are. Batch may take all slots only
if ``admission.tiers.batch.max_share`` says so.
"""

from __future__ import annotations

from collections.abc import Iterator

from trio_gateway.admission.cores import Group, Scheduler, Waiter
from trio_gateway.cli import main


class _First(Group[Waiter]):
    """A group of one line, with the one that came first."""

    def __init__(self, first: Waiter) -> None:
        super().__init__(lambda tenant: 1.0)
        self._first = first

    def lines(self) -> Iterator[list[Waiter]]:
        """Answer its one line."""
        yield [self._first]


def groups(queue: Scheduler[Waiter], pool: str) -> Iterator[tuple[int, Group[Waiter]]]:
    """Answer the one that came first, over all tenants and tiers. No tenant may have a bound of its own."""
    first = next((waiter for waiter in queue if waiter.pool == pool), None)
    if first is not None:
        yield 0, _First(first)


def promote(queue: Scheduler[Waiter], now: float) -> None:
    """Let nobody rise: there is no order to rise in."""


if __name__ == "__main__":
    setattr(Scheduler, "groups", groups)  # noqa: B010, mypy has seen what a method is
    setattr(Scheduler, "promote", promote)  # noqa: B010
    main()
