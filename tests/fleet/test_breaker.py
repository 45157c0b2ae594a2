"""Breakers of one worker for one model: step by step, and stories against a model that keeps every result."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_gateway.fleet._breaker import MINIMUM, REMEMBERED, TRANSITIONS, Breaker, BreakerState, Step

CLOSED, OPEN, PROBING = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.PROBING
HALF_OPEN, TRYING, FORCED = BreakerState.HALF_OPEN, BreakerState.TRYING, BreakerState.FORCED
NEVER = 2.0  # a share of faults that no window has


def fail(breaker: Breaker, now: float, *names: str) -> None:
    """Attempts that are placed and fail at once."""
    for name in names:
        breaker.placed(name, now)
        breaker.fault(name, now)
        breaker.ended(name, now)


def answer(breaker: Breaker, now: float, *names: str) -> None:
    """Attempts that give output and end well at once."""
    for name in names:
        breaker.placed(name, now)
        breaker.output(name, now)
        breaker.ended(name, now)


def opened(now: float = 100.0, *, probed: bool = True) -> Breaker:
    breaker = Breaker(consecutive_faults=1, probed=probed)
    fail(breaker, now, "first")
    assert breaker.state(now) is OPEN
    return breaker


def half_open(now: float = 110.0) -> Breaker:
    breaker = opened(now - 10)
    breaker.probe(True, now)
    assert breaker.state(now) is HALF_OPEN
    return breaker


# Opening --------------------------------------------------------------------------------------------------


def test_a_worker_that_never_failed_gets_everything() -> None:
    breaker = Breaker()
    assert breaker.state(0.0) is CLOSED
    assert breaker.allows(0.0)
    assert not breaker.refuses(0.0)
    assert breaker.remaining(0.0) == 0.0
    assert breaker.opens_at() is None
    assert not breaker.wants_probe(0.0)


def test_five_faults_in_a_row_open_it_and_four_do_not() -> None:
    breaker = Breaker()
    fail(breaker, 100.0, "a", "b", "c", "d")
    assert breaker.allows(100.0)
    fail(breaker, 101.0, "e")
    assert not breaker.allows(101.0)
    assert breaker.refuses(101.0)
    assert breaker.remaining(101.0) == 10.0
    assert breaker.remaining(105.0) == 6.0
    assert breaker.opens_at() == 111.0


def test_output_in_between_breaks_the_row() -> None:
    breaker = Breaker(fault_ratio=NEVER)
    fail(breaker, 100.0, "a", "b", "c", "d")
    answer(breaker, 100.0, "e")
    fail(breaker, 100.0, "f", "g", "h", "i")
    assert breaker.allows(100.0)
    fail(breaker, 100.0, "j")
    assert not breaker.allows(100.0)


def test_a_worker_that_cuts_every_answer_has_a_row_of_faults_too() -> None:
    breaker = Breaker(fault_ratio=NEVER)
    for number in range(5):
        name = f"e{number}"
        breaker.placed(name, 100.0)
        breaker.output(name, 100.0)
        assert breaker.allows(100.0)
        breaker.fault(name, 100.0)
        breaker.ended(name, 100.0)
    assert not breaker.allows(100.0)


def test_output_that_stands_ends_a_row_although_an_older_answer_is_cut() -> None:
    breaker = Breaker(consecutive_faults=2, fault_ratio=NEVER)
    for name in ("a", "b"):
        breaker.placed(name, 100.0)
        breaker.output(name, 100.0)
    breaker.fault("a", 100.0)
    assert breaker.allows(100.0)


def test_half_of_the_results_of_the_window_open_it_once_there_are_enough() -> None:
    breaker = Breaker(consecutive_faults=99)
    for number in range(MINIMUM // 2 - 1):
        answer(breaker, 100.0, f"g{number}")
        fail(breaker, 100.0, f"b{number}")
    answer(breaker, 100.0, "last good")
    assert breaker.allows(100.0)  # nine results, four of them faults
    fail(breaker, 100.0, "last bad")
    assert not breaker.allows(100.0)


def test_a_cut_answer_counts_once_and_as_a_fault() -> None:
    breaker = Breaker(consecutive_faults=99, fault_ratio=0.6)
    answer(breaker, 100.0, *(f"g{number}" for number in range(4)))
    for number in range(5):
        name = f"c{number}"
        breaker.placed(name, 100.0)
        breaker.output(name, 100.0)
        breaker.fault(name, 100.0)
        breaker.ended(name, 100.0)
    assert breaker.allows(100.0)  # nine results, not fourteen
    fail(breaker, 100.0, "b")
    assert not breaker.allows(100.0)  # six faults of ten


def test_results_leave_the_window() -> None:
    breaker = Breaker(consecutive_faults=99)
    fail(breaker, 100.0, *(f"b{number}" for number in range(MINIMUM - 1)))
    answer(breaker, 131.0, *(f"g{number}" for number in range(MINIMUM)))
    fail(breaker, 131.0, "b")
    assert breaker.allows(131.0)


def test_an_output_that_left_the_window_is_not_taken_back_from_it() -> None:
    breaker = Breaker(consecutive_faults=99, window=10.0, fault_ratio=1.0)
    breaker.placed("long", 100.0)
    breaker.output("long", 100.0)
    answer(breaker, 120.0, "good")
    breaker.fault("long", 120.0)
    fail(breaker, 120.0, *(f"b{number}" for number in range(MINIMUM)))
    assert breaker.allows(120.0)  # the good one still counts


def test_only_the_first_output_of_an_attempt_counts() -> None:
    breaker = Breaker(consecutive_faults=99)
    breaker.placed("chatty", 100.0)
    for _ in range(MINIMUM):
        breaker.output("chatty", 100.0)
    fail(breaker, 100.0, *(f"b{number}" for number in range(MINIMUM - 2)))
    assert breaker.allows(100.0)  # nine results are too few
    fail(breaker, 100.0, "b")
    assert not breaker.allows(100.0)


def test_what_is_not_counted_changes_nothing() -> None:
    breaker = Breaker(consecutive_faults=1)
    breaker.placed("left", 100.0)
    breaker.ended("left", 100.0)
    breaker.fault("left", 100.0)  # late news of an attempt that is over
    breaker.output("nobody", 100.0)
    breaker.ended("nobody", 100.0)
    assert breaker.allows(100.0)
    assert not breaker.history


def test_attempts_placed_before_it_opened_tell_nothing_new() -> None:
    breaker = Breaker(consecutive_faults=2, fault_ratio=NEVER)
    for name in ("a", "b", "c", "d", "e"):
        breaker.placed(name, 99.0)
    breaker.fault("a", 100.0)
    breaker.fault("b", 100.0)
    breaker.fault("c", 105.0)
    assert breaker.remaining(105.0) == 5.0  # not prolonged
    breaker.output("d", 106.0)
    assert breaker.state(106.0) is OPEN
    breaker.probe(True, 110.0)
    breaker.placed("trial", 110.0)
    breaker.output("d", 110.0)
    assert breaker.state(110.0) is TRYING  # not the trial's output
    breaker.output("trial", 110.0)
    fail(breaker, 111.0, "f")
    breaker.fault("e", 111.0)
    assert breaker.state(111.0) is CLOSED


# Half-open ------------------------------------------------------------------------------------------------


def test_at_the_end_of_the_cooldown_a_probe_is_wanted_at_once_and_a_healthy_one_makes_it_half_open() -> None:
    breaker = opened(100.0)
    breaker.probe(True, 105.0)  # nobody asked
    assert breaker.state(109.9) is OPEN
    assert not breaker.wants_probe(109.9)
    assert breaker.wants_probe(110.0)
    assert not breaker.allows(110.0)
    breaker.probe(True, 110.2)
    assert not breaker.wants_probe(110.2)
    assert breaker.allows(110.2)


def test_an_unhealthy_probe_is_asked_again_after_a_cooldown_and_any_healthy_one_before_counts() -> None:
    breaker = opened(100.0)
    breaker.probe(False, 110.0)
    assert breaker.refuses(110.0)
    assert breaker.remaining(110.0) == 10.0
    assert breaker.opens_at() == 120.0
    assert not breaker.wants_probe(119.0)
    assert breaker.wants_probe(120.0)
    breaker.probe(False, 120.0)
    breaker.probe(True, 123.0)
    assert breaker.allows(123.0)


def test_a_worker_without_a_probe_counts_as_healthy() -> None:
    breaker = opened(100.0, probed=False)
    assert not breaker.allows(109.9)
    assert breaker.allows(110.0)
    assert not breaker.wants_probe(110.0)
    assert [step.at for step in breaker.history] == [100.0, 110.0, 110.0]


def test_exactly_one_exchange_goes_through_and_its_output_closes_it() -> None:
    breaker = half_open()
    breaker.placed("trial", 110.0)
    assert not breaker.allows(110.0)
    assert not breaker.refuses(110.0)  # others wait
    assert breaker.opens_at() is None
    breaker.output("trial", 111.0)
    assert breaker.allows(111.0)
    breaker.ended("trial", 112.0)
    assert breaker.state(112.0) is CLOSED


def test_a_trial_that_tells_nothing_frees_its_slot() -> None:
    breaker = half_open()
    for name in ("never made", "client left", "status 400"):
        breaker.placed(name, 110.0)
        breaker.ended(name, 110.0)
        assert breaker.state(110.0) is HALF_OPEN


def test_a_fault_of_the_trial_opens_it_again() -> None:
    breaker = half_open(110.0)
    breaker.placed("trial", 110.0)
    breaker.fault("trial", 112.0)
    breaker.ended("trial", 112.0)
    assert breaker.remaining(112.0) == 10.0


def test_faults_before_it_opened_are_forgotten_when_it_closes() -> None:
    breaker = Breaker(consecutive_faults=2, probed=False)
    fail(breaker, 100.0, "a", "b")
    answer(breaker, 110.0, "trial")
    fail(breaker, 110.0, "c")
    assert breaker.allows(110.0)


def test_results_before_it_opened_are_forgotten_too() -> None:
    breaker = Breaker(consecutive_faults=MINIMUM, cooldown=1.0, probed=False)
    fail(breaker, 100.0, *(f"b{number}" for number in range(MINIMUM)))
    answer(breaker, 101.0, "trial")
    fail(breaker, 101.0, "c")
    assert breaker.allows(101.0)


def test_an_exchange_that_was_placed_although_it_was_refused_tells_nothing() -> None:
    breaker = opened(100.0)
    breaker.placed("stray", 101.0)
    breaker.fault("stray", 101.0)
    breaker.output("stray", 101.0)
    assert breaker.remaining(101.0) == 9.0


# Operators ------------------------------------------------------------------------------------------------


def test_an_operator_opens_it_until_it_is_reset() -> None:
    breaker = Breaker()
    breaker.placed("running", 99.0)
    breaker.force_open(100.0)
    breaker.output("running", 101.0)
    breaker.probe(True, 200.0)
    assert breaker.refuses(1e6)
    assert breaker.remaining(1e6) == 10.0
    assert breaker.opens_at() is None
    breaker.reset(1e6)
    assert breaker.allows(1e6)


def test_a_reset_forgets_faults_and_what_ran_before() -> None:
    breaker = Breaker(consecutive_faults=2, fault_ratio=NEVER)
    for name in ("a", "b", "c"):
        breaker.placed(name, 100.0)
    breaker.fault("a", 100.0)
    breaker.reset(100.0)
    breaker.fault("b", 101.0)
    breaker.fault("c", 101.0)
    assert breaker.allows(101.0)


def test_the_last_transitions_can_be_read() -> None:
    breaker = Breaker(consecutive_faults=1, probed=False)
    for number in range(20):
        fail(breaker, 100.0 + 10 * number, f"e{number}")
    assert len(breaker.history) == REMEMBERED
    last = breaker.history[-1]
    assert (last.at, last.before, last.step, last.after) == (290.0, TRYING, Step.FAULT, OPEN)
    assert all(each.after is TRANSITIONS[each.before, each.step] for each in breaker.history)


# Any story ------------------------------------------------------------------------------------------------


class Model:
    """The rules as section 5 says them, with every attempt kept."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.until: float | None = None  # of the cooldown; None: not opened
        self.healthy = False
        self.trial: str | None = None
        self.live: dict[str, str] = {}  # attempt: "fresh" or "output", if it can tell anything
        self.told: list[str] = []  # results since it closed: name of who gave output, or ""

    def refused(self, now: float) -> bool:
        return self.until is not None and not self.healthy

    def allows(self, now: float) -> bool:
        return self.until is None or (self.healthy and self.trial is None)

    def open(self, now: float) -> None:
        self.until, self.healthy, self.trial, self.told = now + 10, False, None, []
        self.live = {}

    def placed(self, name: str) -> None:
        self.live[name] = "fresh"
        if self.until is not None:
            self.trial = name

    def output(self, name: str) -> None:
        if self.live.get(name) != "fresh":
            return
        self.live[name] = "output"
        if self.trial == name:
            self.until, self.trial = None, None
        self.told.append(name)

    def fault(self, name: str, now: float) -> None:
        if name not in self.live:
            return
        if self.trial == name:
            self.open(now)
            return
        if self.told and self.told.count(name) and self._latest_output() == name:
            self.told = [each for each in self.told if each != name]
        self.told.append("")
        if self._row() >= self.most:
            self.open(now)

    def _latest_output(self) -> str:
        return next((each for each in reversed(self.told) if each), "")

    def _row(self) -> int:
        row = 0
        for each in reversed(self.told):
            if each:
                break
            row += 1
        return row

    def ended(self, name: str) -> None:
        self.live.pop(name, None)
        if self.trial == name:
            self.trial = None

    def probe(self, healthy: bool, now: float) -> None:
        if self.until is not None and now >= self.until and healthy:
            self.healthy = True


STORIES = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.0, 1.0, 6.0]),
        st.sampled_from(["placed", "placed", "output", "fault", "fault", "ended", "well", "ill"]),
        st.sampled_from("abcd"),
    ),
    max_size=40,
)


@given(STORIES, st.integers(1, 3))
def test_any_story_goes_as_the_model_says(story: list[tuple[float, str, str]], most: int) -> None:
    breaker, model, now = Breaker(consecutive_faults=most, fault_ratio=NEVER), Model(most), 100.0
    placed: set[str] = set()
    cut: set[str] = set()  # an attempt fails at most once
    for wait, what, name in story:
        now += wait
        if what == "placed" and model.allows(now) and name not in placed:
            placed.add(name)
            cut.discard(name)
            breaker.placed(name, now)
            model.placed(name)
        elif what == "output" and name not in cut:
            breaker.output(name, now)
            model.output(name)
        elif what == "fault" and name in placed - cut:
            cut.add(name)
            breaker.fault(name, now)
            model.fault(name, now)
        elif what == "ended":
            placed.discard(name)
            breaker.ended(name, now)
            model.ended(name)
        elif what in ("well", "ill"):
            breaker.probe(what == "well", now)
            model.probe(what == "well", now)
        assert breaker.allows(now) is model.allows(now)
        assert breaker.refuses(now) is model.refused(now)
        assert (breaker.state(now) is TRYING) is (model.trial is not None)


@pytest.mark.parametrize("state", list(BreakerState))
def test_from_every_state_there_is_a_way_back_to_closed(state: BreakerState) -> None:
    seen, waiting = {state}, [state]
    while waiting:
        here = waiting.pop()
        steps = [after for (before, step), after in TRANSITIONS.items() if before is here]
        waiting += [after for after in steps if after not in seen]
        seen.update(steps)
    assert CLOSED in seen
