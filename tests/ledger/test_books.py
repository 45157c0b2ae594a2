"""The books: whatever happens to requests, each stands in exactly one column, and a wrong column is named."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from tests.ledger.making import make_record
from trio_gateway.contract import Ending, Outcome
from trio_gateway.errors import Problem
from trio_gateway.ledger import Books, Tally, conservation_errors
from trio_gateway.wire import Usage

SQUARE = {"granted": 0, "held": 0, "draining": 0, "returned": 0, "buffered": 0, "sum_of_exchanges": 0}


def ending_with(outcome: Outcome) -> Ending:
    told = outcome in (Outcome.REFUSED, Outcome.UPSTREAM_FAILED, Outcome.DEADLINE_EXCEEDED)
    return Ending(outcome, Problem.of("engine_failed", "no") if told else None)


class Accounts(RuleBasedStateMachine):
    """Requests walk from column to column in every order that can happen; a naive count follows each."""

    reading = Bundle("reading")
    waiting = Bundle("waiting")
    running = Bundle("running")

    def __init__(self) -> None:
        super().__init__()
        self.books = Books()
        self.stand: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()

    def move(self, start: str, end: str) -> None:
        self.stand[start] -= 1
        self.stand[end] += 1

    @rule(target=reading)
    def arrives(self) -> str:
        self.books.arrive()
        self.stand["reading"] += 1
        return "request"

    @rule(request=consumes(reading))
    def is_no_work(self, request: str) -> None:
        self.books.forget()
        self.stand["reading"] -= 1

    @rule(request=consumes(reading), code=st.sampled_from(["queue_full", "client_gone"]))
    def is_turned_away(self, request: str, code: str) -> None:
        self.books.turn_away(code)
        self.move("reading", code)

    @rule(target=running, request=consumes(reading))
    def is_placed_at_once(self, request: str) -> str:
        self.books.accept(waiting=False)
        self.move("reading", "running")
        return request

    @rule(target=waiting, request=consumes(reading))
    def gets_a_position(self, request: str) -> str:
        self.books.accept(waiting=True)
        self.move("reading", "waiting")
        return request

    @rule(target=running, request=consumes(waiting))
    def is_placed(self, request: str) -> str:
        self.books.placed()
        self.move("waiting", "running")
        return request

    @rule(target=waiting, request=consumes(running))
    def is_sent_back(self, request: str) -> str:
        self.books.sent_back()
        self.move("running", "waiting")
        return request

    @rule(request=consumes(waiting), outcome=st.sampled_from(Outcome))
    def ends_in_the_queue(self, request: str, outcome: Outcome) -> None:
        self.books.settle(make_record(ending_with(outcome)), waiting=True)
        self.stand["waiting"] -= 1
        self.ended[outcome.value] += 1

    @rule(request=consumes(running), outcome=st.sampled_from(Outcome))
    def ends_at_a_worker(self, request: str, outcome: Outcome) -> None:
        self.books.settle(make_record(ending_with(outcome)), waiting=False)
        self.stand["running"] -= 1
        self.ended[outcome.value] += 1

    @invariant()
    def each_stands_in_one_column(self) -> None:
        books, stand = self.books, self.stand
        assert conservation_errors(books, **SQUARE) == []
        assert (books.reading, books.waiting, books.running) == (
            stand["reading"],
            stand["waiting"],
            stand["running"],
        )
        assert books.turned_away == Counter(
            {code: stand[code] for code in ("queue_full", "client_gone") if stand[code]}
        )
        assert +books.outcomes == self.ended
        ended = sum(self.ended.values())
        assert sum(books.requests.values()) == ended == books.accepted - books.waiting - books.running
        failed = self.ended["refused"] + self.ended["upstream_failed"]
        assert sum(books.failures.values()) == failed
        assert sum(books.cancellations.values()) == ended - failed - self.ended["completed"]


TestAccounts = Accounts.TestCase


def test_every_outcome_is_told_from_the_start() -> None:
    assert Books().outcomes == {outcome.value: 0 for outcome in Outcome}


def settled(outcome: Outcome, tally: Tally | None = None) -> Books:
    books = Books(accepted=1, arrived=1, running=1)
    books.settle(make_record(ending_with(outcome), tally), waiting=False)
    return books


@pytest.mark.parametrize("outcome", Outcome)
def test_an_ending_is_counted_as_what_it_is(outcome: Outcome) -> None:
    books = settled(outcome)
    assert books.requests == {("chat.completions", "m", "acme", outcome.value): 1}
    failure = outcome in (Outcome.REFUSED, Outcome.UPSTREAM_FAILED)
    cancellation = not failure and outcome is not Outcome.COMPLETED
    assert books.failures == ({("queued", "engine_failed"): 1} if failure else {})
    assert books.cancellations == ({(outcome.value, "queued"): 1} if cancellation else {})


@pytest.mark.parametrize("problem", [None, Problem("made_up_by_an_engine", "no", 400, "x")])
def test_only_our_own_codes_become_labels(problem: Problem | None) -> None:
    books = Books(running=1)
    books.settle(make_record(Ending(Outcome.UPSTREAM_FAILED, problem)), waiting=False)
    assert books.failures == {("queued", "other"): 1}


def test_tokens_are_counted_by_who_pays_for_what() -> None:
    tally = Tally()
    tally.usage = Usage(7, 3, 40)
    books = settled(Outcome.COMPLETED, tally)
    kinds = {"prompt": 7, "generated": 40, "delivered": 40, "acknowledged": 0}
    assert books.tokens == {("acme", "m", kind): count for kind, count in kinds.items()}
    tally.commit(110.0)
    tally.events = tally.content_events = 20
    tally.events_delivered, tally.acknowledged = 10, 5
    books = settled(Outcome.CLIENT_GONE, tally)
    kinds |= {"delivered": 20, "acknowledged": 10, "queued": 20}
    assert books.tokens == {("acme", "m", kind): count for kind, count in kinds.items()}
    assert sum(settled(Outcome.REFUSED).tokens.values()) == 0


def test_only_the_newest_records_are_kept() -> None:
    books = Books(running=300)
    records = [make_record() for _ in range(300)]
    for record in records:
        books.settle(record, waiting=False)
    assert len(books.recent) == 256
    assert books.recent[-1] is records[-1]
    assert books.recent[0] is records[-256]


# Finding what is wrong --------------------------------------------------------------------------------------

ARRIVED = "arrived = reading + turned_away + accepted"
ACCEPTED = "accepted = waiting + running + outcomes"
GRANTED = "granted = held + draining + returned"
BUFFERED = "buffered = sum over exchanges"
LEASES = {"granted": 9, "held": 2, "draining": 3, "returned": 4, "buffered": 50, "sum_of_exchanges": 50}


def square_books() -> Books:
    books = Books(arrived=31, reading=10, accepted=20, waiting=8, running=11)
    books.turned_away["queue_full"] = 1
    books.outcomes["completed"] = 1
    return books


def test_books_that_are_square_have_no_errors() -> None:
    assert conservation_errors(square_books(), **LEASES) == []


@pytest.mark.parametrize(
    ("column", "equations"),
    [
        ("arrived", [ARRIVED]),
        ("reading", [ARRIVED]),
        ("accepted", [ARRIVED, ACCEPTED]),
        ("waiting", [ACCEPTED]),
        ("running", [ACCEPTED]),
    ],
)
@pytest.mark.parametrize("by", [-1, 1])
def test_a_wrong_column_breaks_the_equations_it_stands_in(column: str, equations: list[str], by: int) -> None:
    books = square_books()
    setattr(books, column, getattr(books, column) + by)
    errors = conservation_errors(books, **LEASES)
    assert [error.partition(":")[0] for error in errors] == equations
    assert all(" != " in error for error in errors)


@pytest.mark.parametrize(("counter", "equation"), [("turned_away", ARRIVED), ("outcomes", ACCEPTED)])
def test_a_wrong_count_of_endings_breaks_its_equation(counter: str, equation: str) -> None:
    books = square_books()
    getattr(books, counter)["client_gone"] += 1
    (error,) = conservation_errors(books, **LEASES)
    assert error.startswith(equation)


@pytest.mark.parametrize(
    ("column", "equation"),
    [
        ("granted", GRANTED),
        ("held", GRANTED),
        ("draining", GRANTED),
        ("returned", GRANTED),
        ("buffered", BUFFERED),
        ("sum_of_exchanges", BUFFERED),
    ],
)
def test_leases_and_bytes_are_checked_too(column: str, equation: str) -> None:
    (error,) = conservation_errors(square_books(), **(LEASES | {column: LEASES[column] + 1}))
    assert error.startswith(equation)


def test_the_figures_of_a_broken_equation_are_told() -> None:
    books = square_books()
    books.arrived = 32
    assert conservation_errors(books, **LEASES) == [f"{ARRIVED}: 32 != 31"]


@pytest.mark.parametrize(
    ("books", "leases", "names"),
    [
        ({"reading": -1, "arrived": 20}, {}, ["reading"]),
        ({"waiting": -1, "running": 20}, {}, ["waiting"]),
        ({"waiting": 20, "running": -1}, {}, ["running"]),
        ({}, {"held": -1, "granted": 6}, ["held"]),
        ({}, {"draining": -1, "granted": 5}, ["draining"]),
        ({}, {"buffered": -1, "sum_of_exchanges": -1}, ["buffered"]),
        ({}, {"held": -1, "draining": 6}, ["held"]),
    ],
)
def test_a_negative_count_is_named_even_where_equations_hold(
    books: dict[str, int], leases: dict[str, int], names: list[str]
) -> None:
    changed = square_books()
    for column, figure in books.items():
        setattr(changed, column, figure)
    errors = conservation_errors(changed, **(LEASES | leases))
    assert errors == [f"{name} is negative: {(books | leases)[name]}" for name in names]
