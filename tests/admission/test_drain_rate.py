"""How long leases last, and how fast they come back: early, in bunches, idle, and for ever."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_gateway.admission._drain_rate import ENOUGH, FIRST, DrainRate


def rate_of(out: int, now: float = 0.0) -> DrainRate:
    rate = DrainRate()
    for _ in range(out):
        rate.granted(now)
    return rate


def served(rate: DrainRate, rounds: int, seconds: float, began: float = 0.0) -> float:
    """Let all leases that are out come back together and go out again; answers the time it is then."""
    now, out = began, rate.out
    for _ in range(rounds):
        now += seconds
        for _ in range(out):
            rate.returned(now, seconds)
        for _ in range(out):
            rate.granted(now)
    return now


def test_as_long_as_nothing_is_known_a_lease_lasts_a_second() -> None:
    rate = DrainRate()
    assert rate.lasting(100.0) == FIRST
    assert rate.pace(100.0) == 1 / FIRST
    for _ in range(8):
        rate.granted(100.0)
    assert rate.lasting(100.0) == FIRST
    assert rate.pace(100.0) == 8 / FIRST


def test_leases_of_which_none_came_back_last_a_second_longer_than_they_are_out() -> None:
    assert rate_of(8).lasting(5.0) == pytest.approx(5.0 + FIRST)


def test_the_first_that_come_back_do_not_pass_for_all() -> None:
    rate = rate_of(8)
    rate.returned(0.5, 0.5)
    assert rate.lasting(6.0) > 5


@pytest.mark.parametrize("rounds", [1, 2, 5, 40])
def test_leases_that_come_back_in_bunches_count_as_many(rounds: int) -> None:
    rate = rate_of(8)
    now = served(rate, rounds, 10.0)
    assert rate.lasting(now) == pytest.approx(10.0)
    assert rate.lasting(now + 5) == pytest.approx(10.0)
    assert rate.pace(now) == pytest.approx(0.8)


def test_idle_time_makes_nothing_slower() -> None:
    rate = DrainRate()
    for number in range(100):  # one in ten seconds
        rate.granted(10.0 * number)
        rate.returned(10.0 * number + 0.25, 0.25)
    for _ in range(32):
        rate.granted(1000.0)
    assert rate.lasting(1000.0) == pytest.approx(0.25)
    assert rate.lasting(1000.2) == pytest.approx(0.25)
    served(rate, 1, 0.25, 1000.0)
    assert rate.pace(1000.25) == pytest.approx(128)


def test_what_lasts_longer_than_before_is_noticed_while_it_lasts() -> None:
    rate = rate_of(4)
    now = served(rate, 20, 1.0)
    assert rate.lasting(now + 100) > 10


def test_a_change_is_learnt_within_some_rounds() -> None:
    rate = rate_of(8)
    now = served(rate, 20, 1.0)
    now = served(rate, 20, 4.0, now)
    assert rate.lasting(now) == pytest.approx(4.0, rel=0.2)


def test_too_few_returns_predict_nothing() -> None:
    rate = rate_of(2)
    now = served(rate, ENOUGH // 2 - 1, 1.0)
    assert rate.predicted(4, now) is None
    now = served(rate, 1, 1.0, now)
    assert rate.predicted(4, now) == pytest.approx(2.0)


def test_leases_of_no_time_at_all_still_have_a_pace() -> None:
    rate = rate_of(2)
    now = served(rate, 40, 0.0)
    assert 0 < rate.pace(now) < float("inf")


@given(
    st.lists(st.tuples(st.booleans(), st.floats(-1.0, 1e4)), max_size=60),
    st.floats(0.0, 1e6),
)
def test_a_pace_is_always_a_number_above_zero(story: list[tuple[bool, float]], now: float) -> None:
    rate, out = DrainRate(), []
    for goes_out, later in story:
        now += later  # clocks of some kinds step back
        if goes_out:
            rate.granted(now)
            out.append(now)
        elif out:
            rate.returned(now, max(now - out.pop(0), 0.0))
    assert rate.out == len(out)
    assert 0 < rate.lasting(now) < float("inf")
    assert 0 < rate.pace(now) < float("inf")


@given(
    st.lists(st.floats(0.1, 20.0), min_size=60, max_size=60), st.integers(1, 6), st.sampled_from([0.0, 7.0])
)
def test_what_came_back_makes_an_average(lengths: list[float], slots: int, pause: float) -> None:
    rate = DrainRate()
    ends = [0.0] * slots
    events: list[tuple[float, bool, float]] = []
    for length in lengths:  # each slot takes the next as soon as it is free, or after a pause
        slot = min(range(slots), key=ends.__getitem__)
        events += [(ends[slot], True, length), (ends[slot] + length, False, length)]
        ends[slot] += length + pause
    for moment, goes_out, length in sorted(events, key=lambda event: event[0]):
        if goes_out:
            rate.granted(moment)
        else:
            rate.returned(moment, length)
    assert rate.out == 0
    assert min(lengths) <= rate.lasting(max(ends)) * (1 + 1e-9)
    assert rate.lasting(max(ends)) <= max(lengths) * (1 + 1e-9)
