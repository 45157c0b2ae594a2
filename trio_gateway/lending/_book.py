"""What is lent to whom, and who is next. Pure: the moment is an argument, in seconds.

A thing has so many units, for all borrowers together: as many as the borrower says that believes in the
fewest, of those that have or want some. Units come free one after the other, and go to whoever of those that
wait has had the least of that thing for what waits there: start-time fair queueing (Goyal et al., SIGCOMM
1996), where the weight of a borrower is what it waits for at the moment. So none is served first because it
always has something waiting, and of equals comes first who came first.

What a borrower had that died stays in use for a grace: it may take as long until it really stops.

Whoever says something, hears. Since a borrower last did it is lent an eighth of a thing at most: one that
hangs while others serve could otherwise get all of it, a unit each time that one comes free.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from ..contract import Want

UNHEARD: Final = 8  # that part of a thing, and a unit at least, is lent to one that has said nothing since


class Loan(NamedTuple):
    """Units of a thing that are lent from now on, and the name of the want that they are for."""

    borrower: int
    name: str
    thing: str
    units: int


class Recall(NamedTuple):
    """Whether a borrower is to give back what comes free of a thing, instead of using it again."""

    borrower: int
    thing: str
    wanted: bool


@dataclass(slots=True)
class _Wanted:
    """A want of one borrower; ``count`` falls as it is served."""

    borrower: int
    name: str
    things: tuple[str, ...]
    units: int
    count: int


@dataclass(slots=True)
class _Thing:
    """One thing that is lent.

    Attributes:
        told: by borrower, how many units it believes there are, or believed when it last said something.
        lent: units by borrower.
        mourned: units of borrowers that died, until their grace is over.
        wanting: wants that it would do for, in the order in which they came.
        starts: by borrower, the virtual time at which it is served next.
        reached: virtual time of the one that was served last.
        recalled: those that were told to give back.
        unheard: by borrower, units that were lent to it since it last said something.
    """

    grace: float = 0.0
    told: dict[int, int] = field(default_factory=dict)
    lent: Counter[int] = field(default_factory=Counter)
    mourned: int = 0
    wanting: dict[tuple[int, str], _Wanted] = field(default_factory=dict)
    starts: dict[int, float] = field(default_factory=dict)
    reached: float = 0.0
    recalled: set[int] = field(default_factory=set)
    unheard: Counter[int] = field(default_factory=Counter)

    @property
    def units(self) -> int:
        """How many there are, as those believe who have or want some, and tell what changes."""
        heeded = self.lent.keys() | {borrower for borrower, _ in self.wanting}
        told = [units for borrower, units in self.told.items() if borrower in heeded]
        return min(told or self.told.values(), default=0)

    @property
    def free(self) -> int:
        """Units that nobody has; below 0 where there are fewer than there were."""
        return self.units - self.lent.total() - self.mourned

    def start_of(self, borrower: int) -> float:
        return max(self.starts.get(borrower, 0.0), self.reached)

    def weight_of(self, borrower: int) -> int:
        """Units that a borrower waits for, of this thing or another in its place."""
        return sum(each.count * each.units for each in self.wanting.values() if each.borrower == borrower)

    def next(self, passed: Collection[int]) -> _Wanted | None:
        """Answer the want that is served next, of those for which there is enough; None: there is none.

        Args:
            passed: borrowers that get nothing now.
        """
        waiting = [each for each in self.wanting.values() if each.borrower not in passed]
        free = self.free
        fitting = [each for each in waiting if each.units <= free]
        return min(fitting, key=lambda each: self.start_of(each.borrower), default=None)

    def goes_unheard(self, borrower: int, units: int) -> bool:
        """Whether a borrower that gets so many units has to say something first."""
        unheard = self.unheard[borrower]
        return unheard > 0 and unheard + units > self.units // UNHEARD

    def lend(self, wanted: _Wanted) -> None:
        start = self.start_of(wanted.borrower)
        self.starts[wanted.borrower] = start + wanted.units / self.weight_of(wanted.borrower)
        self.reached = start
        self.lent[wanted.borrower] += wanted.units
        self.unheard[wanted.borrower] += wanted.units

    def rest(self) -> None:
        """Once nobody waits all are equal again, whoever was served last."""
        if not self.wanting:
            self.reached = max(self.starts.values(), default=self.reached)
            self.starts.clear()

    def forget(self, borrower: int) -> None:
        """Know nothing more of a borrower that has none of it."""
        self.told.pop(borrower, None)
        self.starts.pop(borrower, None)
        self.recalled.discard(borrower)
        self.unheard.pop(borrower, None)


class LendingBook:
    """See the module's docstring. Borrowers are told apart by numbers, which are never used again.

    After whatever was said, `lend` answers what can be lent now, and `recalls` who is to be told what.
    """

    def __init__(self) -> None:
        self._things: dict[str, _Thing] = {}
        self._wants: dict[int, dict[str, _Wanted]] = {}  # by borrower and name
        self._mourning: list[tuple[float, int, str, int]] = []  # until when, unique, thing, units
        self._order: Final = itertools.count()
        self._changed: dict[str, None] = {}  # things of which more may be lent, or others be recalled
        self._deaf: set[int] = set()  # borrowers that would not hear of a loan
        self._unheard: dict[int, set[str]] = {}  # things lent since, by borrower
        self._passed: set[int] = set()  # borrowers that have to say something before they get more

    # -- what borrowers say

    def describe(self, borrower: int, thing: str, units: int, grace: float) -> None:
        """Take how many units of a thing there are, as a borrower believes, and how long it is mourned.

        Raises:
            ValueError: there is no such number.
        """
        if units < 0 or grace < 0:
            raise ValueError("a thing has 0 units or more, and a grace of 0 or more")
        known = self._thing(thing)
        known.told[borrower] = units
        known.grace = grace

    def want(self, borrower: int, name: str, want: Want | None) -> None:
        """Take what a borrower wants under a name, instead of what it wanted; None: nothing more.

        Raises:
            ValueError: it wants nothing of nothing.
        """
        if want is not None and (want.units < 1 or want.count < 1 or not want.things):
            raise ValueError("a want is of one unit or more, of something, at least once")
        wants = self._wants.setdefault(borrower, {})
        known = wants.get(name)
        things = () if want is None else tuple(dict.fromkeys(want.things))
        if known is not None and want is not None and known.things == things:
            known.units, known.count = want.units, want.count  # and keeps its place
            self._changed |= dict.fromkeys(known.things)
            return
        if known is not None:
            self._drop(known)
        if want is not None:
            wants[name] = wanted = _Wanted(borrower, name, things, want.units, want.count)
            for thing in things:
                self._thing(thing).wanting[borrower, name] = wanted

    def give_back(self, borrower: int, thing: str, units: int) -> None:
        """Take units back.

        Raises:
            ValueError: the borrower has not so many.
        """
        known = self._thing(thing)
        if not 0 < units <= known.lent[borrower]:
            raise ValueError(f"gives back {units} of {thing}, and has {known.lent[borrower]}")
        known.lent[borrower] -= units
        if not known.lent[borrower]:
            del known.lent[borrower]

    def hears(self, borrower: int, hears: bool) -> None:
        """Lend nothing to a borrower that does not hear, or again to one that does. What it wants stays."""
        if hears is (borrower not in self._deaf):
            return
        (self._deaf.discard if hears else self._deaf.add)(borrower)
        self._look_again_at(borrower)

    def says(self, borrower: int) -> None:
        """A borrower has said something, so it heard of what was lent to it."""
        for thing in self._unheard.pop(borrower, ()):
            if (known := self._things.get(thing)) is not None:
                known.unheard.pop(borrower, None)
        if borrower in self._passed:
            self._passed.discard(borrower)
            self._look_again_at(borrower)

    def leave(self, borrower: int, now: float) -> None:
        """A borrower is gone: it wants nothing more, and what it had comes free when its grace is over."""
        self.says(borrower)
        self._deaf.discard(borrower)
        for wanted in tuple(self._wants.get(borrower, {}).values()):
            self._drop(wanted)
        self._wants.pop(borrower, None)
        for name, thing in tuple(self._things.items()):
            if units := thing.lent.pop(borrower, 0):
                thing.mourned += units
                heapq.heappush(self._mourning, (now + thing.grace, next(self._order), name, units))
            thing.forget(borrower)
            self._changed[name] = None

    # -- what follows

    def lend(self, now: float) -> list[Loan]:
        """Lend all that can be lent now."""
        while self._mourning and self._mourning[0][0] <= now:
            _, _, name, units = heapq.heappop(self._mourning)
            self._thing(name).mourned -= units
        loans: list[Loan] = []
        while served := [loan for name in tuple(self._changed) if (loan := self._serve(name)) is not None]:
            loans += served
        for name in self._changed:
            self._things[name].rest()
        return loans

    def recalls(self) -> list[Recall]:
        """Say who is to give back, or may keep, what comes free: only what differs from the last time."""
        found: list[Recall] = []
        for name in self._changed:
            thing = self._things[name]
            found += self._recalls_of(name, thing)
            if not (thing.told or thing.lent or thing.mourned or thing.wanting):
                del self._things[name]
        self._changed.clear()
        return found

    def _recalls_of(self, name: str, thing: _Thing) -> Iterable[Recall]:
        wanting = {each.borrower for each in thing.wanting.values()} - self._deaf
        too_many = thing.free < 0
        for borrower in thing.lent.keys() | thing.recalled:
            wanted = borrower in thing.lent and (too_many or bool(wanting - {borrower}))
            if wanted and borrower not in thing.recalled:
                thing.recalled.add(borrower)
                yield Recall(borrower, name, True)
            elif not wanted and borrower in thing.recalled:
                thing.recalled.discard(borrower)
                yield Recall(borrower, name, False)

    def next_due(self) -> float | None:
        """When `lend` has more to lend because a grace is over."""
        return self._mourning[0][0] if self._mourning else None

    # -- what is known

    @property
    def passed(self) -> Collection[int]:
        """Borrowers that would be lent more if they said something: see the module's docstring."""
        return self._passed

    def lent(self) -> dict[str, dict[int, int]]:
        """Answer units that are lent, by thing and borrower."""
        return {name: dict(thing.lent) for name, thing in self._things.items() if thing.lent}

    def figures(self) -> dict[str, dict[str, int]]:
        """Answer by thing how many units there are, are lent, are mourned, and are waited for."""
        return {
            name: {
                "units": thing.units,
                "lent": thing.lent.total(),
                "mourned": thing.mourned,
                "wanted": sum(each.count * each.units for each in thing.wanting.values()),
            }
            for name, thing in self._things.items()
        }

    def _thing(self, name: str) -> _Thing:
        self._changed[name] = None
        known = self._things.get(name)
        if known is None:
            known = self._things[name] = _Thing()
        return known

    def _serve(self, name: str) -> Loan | None:
        """Serve one want that a thing would do for, with the thing that it prefers."""
        passed = {*self._deaf, *self._passed}
        while (wanted := self._things[name].next(passed)) is not None:
            best = next(each for each in wanted.things if self._things[each].free >= wanted.units)
            if not self._things[best].goes_unheard(wanted.borrower, wanted.units):
                return self._lend(wanted, best)
            passed.add(wanted.borrower)
            self._passed.add(wanted.borrower)
        return None

    def _lend(self, wanted: _Wanted, best: str) -> Loan:
        self._thing(best).lend(wanted)
        self._unheard.setdefault(wanted.borrower, set()).add(best)
        wanted.count -= 1
        if not wanted.count:
            self._drop(wanted)
        return Loan(wanted.borrower, wanted.name, best, wanted.units)

    def _look_again_at(self, borrower: int) -> None:
        for wanted in self._wants.get(borrower, {}).values():
            self._changed |= dict.fromkeys(wanted.things)

    def _drop(self, wanted: _Wanted) -> None:
        del self._wants[wanted.borrower][wanted.name]
        for thing in wanted.things:
            del self._thing(thing).wanting[wanted.borrower, wanted.name]
