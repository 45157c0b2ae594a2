"""What is lent: never more than there is, never nothing while something is free, and nobody always first."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from trio_gateway.contract import Want
from trio_gateway.lending import LendingBook, Loan, Recall

THINGS = ("a", "b", "c")
NAMES = ("x", "y")
GRACE = 5.0


def book(**units: int) -> LendingBook:
    """A book in which two borrowers believe the same."""
    made = LendingBook()
    for thing, count in units.items():
        for borrower in (1, 2):
            made.describe(borrower, thing, count, GRACE)
    return made


def lent(made: LendingBook, borrower: int, thing: str) -> int:
    return made.lent().get(thing, {}).get(borrower, 0)


class Lending(RuleBasedStateMachine):
    """Any sequence of what borrowers say, and of their deaths."""

    def __init__(self) -> None:
        super().__init__()
        self.book = LendingBook()
        self.now = 0.0
        self.numbers = itertools.count()
        self.alive: list[int] = []
        self.told: dict[tuple[int, str], int] = {}
        self.wants: dict[tuple[int, str], Want] = {}
        self.has: Counter[tuple[int, str]] = Counter()
        self.buried: list[tuple[float, str, int]] = []
        self.recalled: set[tuple[int, str]] = set()
        self.most: dict[str, int] = {}
        self.unheard: dict[int, Counter[str]] = {}  # what was lent since each last said something

    def units(self, thing: str) -> int:
        told = {one: self.told[one, thing] for one in self.alive if (one, thing) in self.told}
        heeded = [units for one, units in told.items() if self.has[one, thing] or self.waits(one, thing)]
        return min(heeded or told.values(), default=0)

    def waits(self, one: int, thing: str) -> bool:
        return any(who == one and thing in want.things for (who, _), want in self.wants.items())

    def used(self, thing: str) -> int:
        mourned = sum(units for until, name, units in self.buried if name == thing and until > self.now)
        return mourned + sum(units for (_, name), units in self.has.items() if name == thing)

    def settle(self) -> None:
        before = {thing: self.used(thing) for thing in THINGS}
        self.lend()
        while self.book.passed:
            for borrower in tuple(self.book.passed):
                assert self.unheard[borrower]
                self.say(borrower)
            self.lend()
        for thing in THINGS:
            assert self.used(thing) <= max(self.units(thing), before[thing])
        for recall in self.book.recalls():
            assert ((recall.borrower, recall.thing) in self.recalled) is not recall.wanted
            if recall.wanted:
                self.recalled.add((recall.borrower, recall.thing))
            else:
                self.recalled.remove((recall.borrower, recall.thing))

    def say(self, borrower: int) -> None:
        self.unheard.pop(borrower, None)
        self.book.says(borrower)

    def lend(self) -> None:
        for loan in self.book.lend(self.now):
            unheard = self.unheard.setdefault(loan.borrower, Counter())
            assert not unheard[loan.thing] or unheard[loan.thing] + loan.units <= self.units(loan.thing) // 8
            unheard[loan.thing] += loan.units
            want = self.wants[loan.borrower, loan.name]
            assert loan.thing in want.things
            assert loan.units == want.units
            self.has[loan.borrower, loan.thing] += loan.units
            if want.count == 1:
                del self.wants[loan.borrower, loan.name]
            else:
                self.wants[loan.borrower, loan.name] = Want(want.things, want.units, want.count - 1)

    @rule()
    def come(self) -> None:
        self.alive.append(next(self.numbers))

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), thing=st.sampled_from(THINGS), units=st.one_of(st.integers(0, 5), st.just(24)))
    def describe(self, data: st.DataObject, thing: str, units: int) -> None:
        borrower = data.draw(st.sampled_from(self.alive))
        self.told[borrower, thing] = units
        self.book.describe(borrower, thing, units, GRACE)
        self.settle()

    @precondition(lambda self: self.alive)
    @rule(
        data=st.data(),
        name=st.sampled_from(NAMES),
        things=st.lists(st.sampled_from(THINGS), min_size=1, max_size=4),
        units=st.integers(1, 3),
        count=st.integers(1, 4),
    )
    def want(self, data: st.DataObject, name: str, things: list[str], units: int, count: int) -> None:
        borrower = data.draw(st.sampled_from(self.alive))
        self.wants[borrower, name] = Want(tuple(things), units, count)
        self.book.want(borrower, name, self.wants[borrower, name])
        self.settle()

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), name=st.sampled_from(NAMES))
    def want_no_more(self, data: st.DataObject, name: str) -> None:
        borrower = data.draw(st.sampled_from(self.alive))
        self.wants.pop((borrower, name), None)
        self.book.want(borrower, name, None)
        self.settle()

    @precondition(lambda self: any(self.has.values()))
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        borrower, thing = data.draw(st.sampled_from([key for key, units in self.has.items() if units]))
        units = data.draw(st.integers(1, self.has[borrower, thing]))
        self.has[borrower, thing] -= units
        self.book.give_back(borrower, thing, units)
        self.settle()

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        borrower = data.draw(st.sampled_from(self.alive))
        self.alive.remove(borrower)
        for thing in THINGS:
            self.told.pop((borrower, thing), None)
            self.recalled.discard((borrower, thing))
            if units := self.has.pop((borrower, thing), 0):
                self.buried.append((self.now + GRACE, thing, units))
        for name in NAMES:
            self.wants.pop((borrower, name), None)
        self.unheard.pop(borrower, None)
        self.book.leave(borrower, self.now)
        self.settle()

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def say_something(self, data: st.DataObject) -> None:
        self.say(data.draw(st.sampled_from(self.alive)))

    @rule(seconds=st.sampled_from((1.0, GRACE)))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        due = self.book.next_due()
        assert due == min((until for until, _, _ in self.buried if until > self.now - seconds), default=None)
        self.settle()

    @invariant()
    def nothing_is_free_that_would_do(self) -> None:
        for want in self.wants.values():
            for thing in want.things:
                assert self.units(thing) - self.used(thing) < want.units

    @invariant()
    def books_agree(self) -> None:
        said = {
            thing: {one: n for (one, name), n in self.has.items() if n and name == thing} for thing in THINGS
        }
        assert self.book.lent() == {thing: of for thing, of in said.items() if of}
        for thing, figures in self.book.figures().items():
            assert figures["units"] == self.units(thing)
            assert figures["lent"] + figures["mourned"] == self.used(thing)

    @invariant()
    def who_has_what_others_wait_for_was_told(self) -> None:
        expected = set()
        for (borrower, thing), units in self.has.items():
            others = {one for (one, _), want in self.wants.items() if thing in want.things} - {borrower}
            if units and (others or self.units(thing) < self.used(thing)):
                expected.add((borrower, thing))
        assert self.recalled == expected


TestLending = Lending.TestCase
TestLending.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def lend(made: LendingBook, now: float) -> list[Loan]:
    """Lend all that can be lent now, where everybody says something whenever that is waited for."""
    loans = made.lend(now)
    while made.passed:
        for borrower in tuple(made.passed):
            made.says(borrower)
        loans += made.lend(now)
    return loans


def served(made: LendingBook, weights: dict[int, int], rounds: int) -> Iterator[int]:
    """Give one unit back after the other, and tell who gets it; everybody always waits for as much."""
    for borrower, count in weights.items():
        made.want(borrower, "x", Want(("a",), 1, count))
    (first,) = lend(made, 0.0)
    holder = first.borrower
    for _ in range(rounds):
        made.says(holder)
        made.want(holder, "x", Want(("a",), 1, weights[holder]))
        made.give_back(holder, "a", 1)
        (loan,) = lend(made, 0.0)
        holder = loan.borrower
        yield holder


@given(st.dictionaries(st.integers(1, 6), st.integers(1, 20), min_size=2), st.integers(1, 300))
def test_whoever_always_waits_gets_a_share_by_what_waits_within_one_turn(
    weights: dict[int, int], rounds: int
) -> None:
    made = LendingBook()
    for borrower in weights:
        made.describe(borrower, "a", 1, 0.0)
    got = Counter(served(made, weights, rounds))
    for one, other in itertools.combinations(weights, 2):
        # The bound of start-time fair queueing: one unit of each.
        apart = abs(got[one] / weights[one] - got[other] / weights[other])
        assert apart <= 1 / weights[one] + 1 / weights[other] + 1e-9


def test_a_backlog_is_not_served_before_one_who_comes_later_and_waits_for_less() -> None:
    made = book(a=1)
    made.want(1, "x", Want(("a",), 1, 1000))
    assert [loan.borrower for loan in lend(made, 0.0)] == [1]
    for _ in range(50):
        made.give_back(1, "a", 1)
        lend(made, 0.0)
    made.want(2, "x", Want(("a",), 1, 1000))
    got = []
    for _ in range(10):
        holder = next(iter(made.lent()["a"]))
        made.give_back(holder, "a", 1)
        got += [loan.borrower for loan in lend(made, 0.0)]
    assert 5 <= got.count(2) <= 6


def test_the_best_of_what_would_do_is_lent() -> None:
    made = book(a=1, b=1, c=1)
    made.want(1, "x", Want(("b", "a"), 1, 2))
    assert lend(made, 0.0) == [Loan(1, "x", "b", 1), Loan(1, "x", "a", 1)]


def test_what_needs_more_at_once_waits_and_is_passed_by_what_fits() -> None:
    made = book(a=3)
    made.want(1, "x", Want(("a",), 2, 1))
    assert lend(made, 0.0) == [Loan(1, "x", "a", 2)]
    made.want(1, "x", Want(("a",), 2, 1))
    made.want(2, "x", Want(("a",), 1, 1))
    assert lend(made, 0.0) == [Loan(2, "x", "a", 1)]
    made.give_back(2, "a", 1)
    assert lend(made, 0.0) == []
    made.give_back(1, "a", 1)
    assert lend(made, 0.0) == [Loan(1, "x", "a", 2)]


def test_what_a_dead_borrower_had_comes_free_when_its_engine_can_have_noticed() -> None:
    made = book(a=2)
    made.want(1, "x", Want(("a",), 1, 2))
    lend(made, 0.0)
    made.want(2, "x", Want(("a",), 1, 1))
    assert lend(made, 0.0) == []
    assert made.recalls() == [Recall(1, "a", True)]
    made.leave(1, 10.0)
    assert lend(made, 10.0) == []
    assert made.next_due() == 15.0
    assert lend(made, 14.9) == []
    assert lend(made, 15.0) == [Loan(2, "x", "a", 1)]
    assert made.next_due() is None


def test_fewer_units_than_are_lent_are_called_back_and_not_lent_again() -> None:
    made = book(a=2)
    made.want(1, "x", Want(("a",), 1, 2))
    lend(made, 0.0)
    made.describe(1, "a", 1, GRACE)
    assert lend(made, 0.0) == []
    assert made.recalls() == [Recall(1, "a", True)]
    made.want(1, "x", Want(("a",), 1, 1))
    made.give_back(1, "a", 1)
    assert lend(made, 0.0) == []
    assert made.recalls() == [Recall(1, "a", False)]


def test_fewer_units_than_are_lent_are_called_back_for_whoever_waits_and_knows_of_it_first() -> None:
    made = book(a=2)
    made.want(1, "x", Want(("a",), 1, 2))
    assert len(lend(made, 0.0)) == 2
    made.describe(2, "a", 1, GRACE)
    made.want(2, "y", Want(("a",), 1, 1))
    assert lend(made, 0.0) == []
    assert made.recalls() == [Recall(1, "a", True)]
    made.give_back(1, "a", 1)
    assert lend(made, 0.0) == []  # there is one, and it is lent
    made.give_back(1, "a", 1)
    assert lend(made, 0.0) == [Loan(2, "y", "a", 1)]


def test_one_that_does_not_hear_gets_nothing_until_it_does_and_others_keep_what_they_have() -> None:
    made = book(a=2)
    made.want(2, "y", Want(("a",), 1, 2))
    made.hears(2, False)
    made.want(1, "x", Want(("a",), 1, 1))
    assert lend(made, 0.0) == [Loan(1, "x", "a", 1)]
    assert made.recalls() == []
    made.hears(2, True)
    assert lend(made, 0.0) == [Loan(2, "y", "a", 1)]
    assert made.recalls() == [Recall(1, "a", True)]
    made.hears(2, False)
    made.leave(2, 0.0)  # the next of that number, if there were one, would hear
    assert made.recalls() == [Recall(1, "a", False)]


def test_one_that_says_nothing_gets_an_eighth_of_what_comes_free_however_long_it_waits() -> None:
    made = book(a=16, b=16)
    made.want(1, "x", Want(("a", "b"), 1, 40))
    assert made.lend(0.0) == [Loan(1, "x", "a", 1)] * 2  # and not of b, which would do less well
    assert list(made.passed) == [1]
    made.want(2, "x", Want(("a",), 1, 40))
    for _ in range(20):
        for _ in made.lend(0.0):
            made.says(2)
            made.give_back(2, "a", 1)
    assert made.lent() == {"a": {1: 2}}
    made.want(2, "x", None)
    made.says(1)
    assert made.lend(0.0) == [Loan(1, "x", "a", 1)] * 2
    made.leave(1, 0.0)
    assert not made.passed


def test_one_that_says_something_may_have_been_lent_what_nobody_knows_any_more() -> None:
    made = LendingBook()
    made.describe(2, "a", 1, GRACE)
    made.want(1, "x", Want(("a",), 1, 1))
    assert made.lend(0.0) == [Loan(1, "x", "a", 1)]
    made.give_back(1, "a", 1)
    made.leave(2, 0.0)
    assert made.recalls() == []
    made.says(1)
    assert made.figures() == {}


def test_one_that_says_nothing_gets_one_at_least_of_what_there_is_little_of() -> None:
    made = book(a=3)
    made.want(1, "x", Want(("a",), 2, 1))
    made.want(1, "y", Want(("a",), 1, 1))
    assert made.lend(0.0) == [Loan(1, "x", "a", 2)]
    made.says(1)
    made.give_back(1, "a", 2)
    made.leave(2, 0.0)
    assert made.lend(0.0) == [Loan(1, "y", "a", 1)]


def test_what_one_believed_that_has_and_wants_nothing_now_keeps_nothing_from_others() -> None:
    made = book(a=1)
    made.describe(1, "a", 3, GRACE)
    made.want(1, "x", Want(("a",), 1, 2))
    assert lend(made, 0.0) == [Loan(1, "x", "a", 1)] * 2
    made.want(2, "y", Want(("a",), 1, 1))
    assert lend(made, 0.0) == []  # for it there is only one, and it will say so if there are more
    made.describe(2, "a", 3, GRACE)
    assert lend(made, 0.0) == [Loan(2, "y", "a", 1)]


def test_nothing_is_known_of_what_nobody_has_named_for_long() -> None:
    made = book(a=1)
    made.leave(1, 0.0)
    made.leave(2, 0.0)
    lend(made, 0.0)
    made.recalls()
    assert made.figures() == {}


@pytest.mark.parametrize(
    ("units", "grace"), [(-1, 0.0), (1, -1.0)], ids=["fewer than none", "before its end"]
)
def test_what_can_not_be_is_not_believed(units: int, grace: float) -> None:
    with pytest.raises(ValueError, match="0 units or more"):
        LendingBook().describe(1, "a", units, grace)


@pytest.mark.parametrize("want", [Want(()), Want(("a",), 0), Want(("a",), 1, 0)])
def test_a_want_of_nothing_is_refused(want: Want) -> None:
    with pytest.raises(ValueError, match="at least once"):
        LendingBook().want(1, "x", want)


@pytest.mark.parametrize("units", [0, 2])
def test_nobody_gives_back_what_it_has_not(units: int) -> None:
    made = book(a=2)
    made.want(1, "x", Want(("a",)))
    lend(made, 0.0)
    with pytest.raises(ValueError, match="and has 1"):
        made.give_back(1, "a", units)
    assert lent(made, 1, "a") == 1
