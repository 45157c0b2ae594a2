"""How long it takes until slots come free: a moving average, bounds, and a spread."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_gateway.admission._drain_rate import LONGEST, DrainRate


def rate_of(*moments: float) -> DrainRate:
    rate = DrainRate()
    for moment in moments:
        rate.returned(moment)
    return rate


@pytest.mark.parametrize(("places", "seconds"), [(0, 1.0), (1, 1.0), (5, 5.0), (48, 48.0), (1000, 48.0)])
def test_where_nothing_was_measured_a_slot_takes_a_second(places: int, seconds: float) -> None:
    assert rate_of().seconds_until(places, 100.0, 0.0) == seconds
    assert rate_of(100.0).seconds_until(places, 100.0, 0.0) == seconds


def test_a_steady_rate_is_what_it_is() -> None:
    rate = rate_of(*(100.0 + 2.0 * number for number in range(20)))
    assert rate.seconds_until(3, 138.0, 0.0) == pytest.approx(6.0)


def test_the_newest_gap_counts_a_fifth() -> None:
    assert rate_of(0.0, 2.0, 9.0).seconds_until(10, 9.0, 0.0) == pytest.approx(10 * (2.0 + 0.2 * 5.0))


def test_slots_that_come_free_together_are_fast() -> None:
    assert rate_of(100.0, 100.0, 100.0).seconds_until(1000, 100.0, 0.0) == 1.0


def test_silence_since_the_last_slot_counts_as_a_gap_that_is_not_over() -> None:
    rate = rate_of(0.0, 1.0, 2.0)
    assert rate.seconds_until(2, 2.0, 0.0) == pytest.approx(2.0)
    assert rate.seconds_until(2, 12.0, 0.0) == pytest.approx(10.0)
    assert rate.seconds_until(0, 12.0, 0.0) == 1.0
    assert rate.seconds_until(2, 10_000.0, 0.0) == LONGEST / 1.25


def test_dice_spread_the_answers_by_a_quarter() -> None:
    rate = rate_of(0.0, 1.0)
    assert [rate.seconds_until(8, 1.0, dice) for dice in (0.0, 0.5, 1.0)] == [8.0, 9.0, 10.0]
    assert rate.seconds_until(1000, 1.0, 1.0) == LONGEST


@given(
    st.lists(st.floats(0.0, 1e6), max_size=10).map(sorted),
    st.integers(0, 2000),
    st.floats(0.0, 1e6),
    st.floats(0.0, 1.0),
)
def test_nobody_comes_back_at_once_or_stays_away_for_ever(
    moments: list[float], places: int, later: float, dice: float
) -> None:
    now = moments[-1] + later if moments else later
    assert 1.0 <= rate_of(*moments).seconds_until(places, now, dice) <= LONGEST
