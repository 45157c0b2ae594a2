"""What admission has borrowed for tenants and tiers, and what it wants. Pure.

Slots are counted by the fleet, and go back as soon as nobody here needs them. What a tenant or a tier may
have at a time is kept, for the next of its requests, until another process waits for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

from ..contract import LenderPort, Want

_TENANT: Final = "tenant:"


def slots_of(worker: str) -> str:
    """Name the slots of a worker."""
    return f"slots:{worker}"


def tenant_of(tenant: str) -> str:
    """Name the right of a tenant to one exchange at a worker."""
    return f"{_TENANT}{tenant}"


def tier_of(tier: str, pool: str) -> str:
    """Name the right of a tier to one slot of a pool."""
    return f"tier:{tier}:{pool}"


class Loans:
    """See the module's docstring.

    Attributes:
        permits: what may be had at a time, by the name of the thing.
        short: tenants that wait for a permit, with the most that they may have in all processes.
        wants: all that is wanted, by name.
        workers: of which slots are wanted.
        scarce: models and tenants' permits of which the lender had none for one who was let stand beyond the
            bounds of a queue to wait for its word; while others wait for the same, no more are.
    """

    def __init__(self, lender: LenderPort) -> None:
        self.lender: Final = lender
        self.permits: Final = Counter[str]()
        self.short: Final[dict[str, int]] = {}
        self.wants: Final[dict[str, Want]] = {}
        self.scarce: Final = set[str]()
        self.workers: Final = set[str]()
        self._models: set[str] = set()

    def begin(self) -> None:
        """Begin to find out what is wanted."""
        self.wants.clear()
        self._models.clear()
        self.workers.clear()

    def forget_plenty(self) -> None:
        """Once all that is wanted is known: what nobody wants is not known to be scarce."""
        self.scarce.intersection_update([*self._models, *self.wants])

    def want_slots(self, model: str, workers: Iterable[str], units: int, count: int) -> None:
        """Want slots of any of some workers for requests of a model."""
        self._models.add(model)
        workers = tuple(workers)
        self.workers.update(workers)
        things = tuple(map(slots_of, workers))
        name = f"{model} {units} {' '.join(sorted(things))}"
        known = self.wants.get(name)
        if known is not None:
            things, count = known.things, known.count + count
        self.wants[name] = Want(things, units, count)

    def want_permit(self, thing: str, most: int, count: int) -> None:
        """Want the right to more of a thing, of which there are so many."""
        self.lender.describe(thing, most, 0.0)
        self.wants[thing] = Want((thing,), 1, min(count, most))

    def keep(self, thing: str, most: int) -> None:
        """Keep no more than so many permits of a thing."""
        surplus = self.permits[thing] - most
        if surplus > 0:
            self.permits[thing] -= surplus
            self.lender.give_back(thing, surplus)

    def tenants(self) -> list[str]:
        """Name those for whom something is borrowed."""
        return [
            thing.removeprefix(_TENANT)
            for thing, units in self.permits.items()
            if units and thing.startswith(_TENANT)
        ]

    def redescribe(self, thing: str, most: int) -> None:
        """Say how many there are now of a thing, if some of it were borrowed."""
        if self.permits[thing]:
            self.lender.describe(thing, most, 0.0)
