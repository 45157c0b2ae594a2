"""Those who are refused come back one behind the other, at the pace of the queue."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_gateway.admission._returns import HORIZON, JITTER, LONGEST, SOONEST, Returns

NOW = 1000.25


def told(count: int, *, waiting: int = 0, pace: float = 1.0, dice: float = 0.0) -> list[float]:
    returns = Returns()
    return [returns.book(waiting, pace, NOW, dice) for _ in range(count)]


def test_each_is_told_the_turn_behind_the_one_before() -> None:
    assert told(4, waiting=2, pace=0.5) == pytest.approx([6.0, 8.0, 10.0, 12.0])
    assert told(4, waiting=20, pace=10.0) == pytest.approx([2.1, 2.2, 2.3, 2.4])


def test_nobody_is_told_less_than_a_second_and_the_next_ones_not_the_same() -> None:
    assert told(3, pace=100.0) == pytest.approx([1.0, 1.01, 1.02], abs=0.011)


def test_dice_add_up_to_a_quarter() -> None:
    assert told(1, waiting=7, dice=1.0) == pytest.approx([8.0 * (1 + JITTER)])


def test_time_takes_promises_away() -> None:
    returns = Returns()
    for _ in range(10):
        returns.book(0, 1.0, NOW, 0.0)
    assert returns.book(0, 1.0, NOW + 4, 0.0) == pytest.approx(7.0, abs=1.0)
    assert returns.book(0, 1.0, NOW + 500, 0.0) == pytest.approx(SOONEST, abs=1.0)


def test_a_queue_that_moves_slower_than_a_place_a_second_keeps_its_promises_apart() -> None:
    assert told(3, pace=0.1) == pytest.approx([10.0, 20.0, 30.0])


def test_who_finds_no_place_within_the_horizon_is_spread_behind_half_of_it() -> None:
    returns = Returns()
    while returns.peek(0, 2.0, NOW, 0.0) < LONGEST:
        returns.book(0, 2.0, NOW, 0.0)
    assert [returns.book(0, 2.0, NOW, dice) for dice in (0.0, 0.5, 1.0)] == [30.0, 45.0, 60.0]
    assert [returns.book(80, 2.0, NOW, dice) for dice in (0.0, 1.0)] == [40.0, 60.0]
    assert [returns.book(500, 2.0, NOW, dice) for dice in (0.0, 1.0)] == [HORIZON, 60.0]


def test_looking_promises_nothing() -> None:
    returns = Returns()
    assert [returns.peek(4, 1.0, NOW, 0.0) for _ in range(3)] == [5.0] * 3
    assert returns.book(4, 1.0, NOW, 0.0) == 5.0
    assert returns.peek(4, 1.0, NOW, 1.0) == pytest.approx(6.0 * (1 + JITTER))


def test_a_pace_that_was_thought_too_slow_leaves_no_second_with_two_fillings() -> None:
    """The worst case of a process that has just begun: promises of a slow pace, then those of a fast one."""
    returns = Returns()
    moments = [NOW + returns.book(20, pace, NOW, 0.0) for pace in (4.0, 8.0, 16.0, 32.0) for _ in range(60)]
    for second in range(int(NOW), int(max(moments)) + 1):
        assert sum(second <= moment < second + 1 for moment in moments) <= 33


def test_a_step_back_of_the_clock_forgets_nothing() -> None:
    returns = Returns()
    first = returns.book(0, 1.0, NOW, 0.0)
    assert returns.book(0, 1.0, NOW - 0.2, 0.0) > first


@given(st.integers(0, 500), st.floats(1e-6, 1e6), st.floats(0, 1e9), st.floats(0, 1), st.integers(1, 20))
def test_nobody_is_told_to_come_sooner_than_a_second_or_later_than_a_minute(
    waiting: int, pace: float, now: float, dice: float, count: int
) -> None:
    returns = Returns()
    for _ in range(count):
        assert SOONEST <= returns.peek(waiting, pace, now, dice) <= LONGEST
        assert SOONEST <= returns.book(waiting, pace, now, dice) <= LONGEST


@given(st.floats(0.5, 200), st.floats(0, 3), st.integers(0, 400), st.integers(1, 600), st.floats(0, 1))
def test_of_those_that_were_promised_no_second_gets_more_than_the_pace(
    pace: float, over: float, waiting: int, count: int, start: float
) -> None:
    """However the refusals are spread over time; by a place, or one that the second before left over."""
    returns, moments = Returns(), []
    for number in range(count):
        now = 1000 + start + number * over / count
        if returns.peek(waiting, pace, now, 0.0) < LONGEST:
            moments.append(now + returns.book(waiting, pace, now, 0.0))
    for second in range(1000, 1070):
        assert sum(second <= moment < second + 1 for moment in moments) <= pace + 1


@given(st.floats(20, 200), st.integers(100, 2000), st.integers(0, 1000))
def test_with_dice_no_second_at_all_gets_half_as_much_again(pace: float, count: int, seed: int) -> None:
    dice, returns = random.Random(seed), Returns()
    refused = [1000.5 + number / count for number in range(count)]
    moments = sorted(
        now + returns.book(round(pace), pace, now, dice.random())
        for now in refused
        if returns.peek(round(pace), pace, now, 0.0) < LONGEST
    )
    first = 0
    for number, moment in enumerate(moments):
        while moments[first] <= moment - 1:
            first += 1
        assert number - first + 1 <= 1.5 * pace + 6
