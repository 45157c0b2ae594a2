"""Amounts a minute: never more than the limit allows, and never told to come back too soon or too late."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_gateway.tenancy import FailedKeys
from trio_gateway.tenancy._rates import MINUTE, Bucket

SLACK = 1e-5  # seconds' worth of an amount that rounding may add or take
sizes = st.integers(1, 1_000_000)
starts = st.floats(0, 1e7)
pauses = st.lists(st.floats(0, 100), max_size=40)


def test_a_bucket_is_full_at_first() -> None:
    bucket = Bucket(60)
    assert (bucket.level(5.0), bucket.until_full(5.0), bucket.wait(60, 5.0)) == (60, 0, 0)


def test_what_is_taken_refills_evenly_within_a_minute() -> None:
    bucket = Bucket(60)
    bucket.take(60, 0.0)
    assert [bucket.level(now) for now in (0.0, 15.0, 60.0, 100.0)] == [0, 15, 60, 60]
    assert [bucket.wait(15, now) for now in (0.0, 10.0, 15.0)] == [15, 5, 0]


def test_whoever_wants_more_than_it_holds_waits_until_it_is_full() -> None:
    bucket = Bucket(60)
    bucket.take(1, 0.0)
    assert bucket.wait(1000, 0.0) == 1.0


def test_more_can_be_used_than_there_was_and_is_then_missing() -> None:
    bucket = Bucket(60)
    bucket.take(90, 0.0)
    assert bucket.level(0.0) == -30
    assert bucket.wait(1, 0.0) == 31.0


def test_what_is_given_back_late_is_not_given_on_top_of_what_has_refilled() -> None:
    bucket = Bucket(60)
    bucket.take(30, 0.0)
    assert bucket.level(40.0) == 60
    bucket.give(30)
    assert bucket.level(40.0) == 60
    bucket.take(60, 40.0)
    assert bucket.level(40.0) == 0


@given(sizes, starts, pauses, st.data())
def test_no_stretch_of_time_has_more_than_its_share_and_one_full_amount(
    size: int, start: float, steps: list[float], data: st.DataObject
) -> None:
    bucket, now = Bucket(size), start
    taken: list[tuple[float, int]] = []
    for step in steps:
        now += step
        amount = data.draw(st.integers(1, size))
        if not bucket.wait(amount, now):
            bucket.take(amount, now)
            taken.append((now, amount))
    for first in range(len(taken)):
        for last in range(first, len(taken)):
            span = taken[last][0] - taken[first][0]
            used = sum(amount for _, amount in taken[first : last + 1])
            assert used <= size * (1 + (span + SLACK * len(taken)) / MINUTE)


@given(sizes, starts, st.lists(st.floats(0, 1), min_size=1, max_size=10), st.floats(0.001, 1))
def test_it_is_possible_after_the_wait_that_was_told_and_not_before(
    size: int, start: float, shares: list[float], wanted: float
) -> None:
    bucket = Bucket(size)
    for share in shares:
        bucket.take(share * size, start)
    wait = bucket.wait(wanted * size, start)
    assert wait <= MINUTE * len(shares)
    assert bucket.wait(wanted * size, start + wait) <= SLACK
    if wait > 2 * SLACK:
        assert bucket.wait(wanted * size, start + wait - 2 * SLACK) > 0


@given(sizes, starts, st.lists(st.floats(0, 1), max_size=20))
def test_what_is_given_back_at_once_leaves_no_trace(size: int, start: float, shares: list[float]) -> None:
    bucket = Bucket(size)
    bucket.take(size, start)
    before = bucket.until_full(start)
    for share in shares:
        bucket.take(share * size, start)
    for share in shares:
        bucket.give(share * size)
    assert bucket.until_full(start) == pytest.approx(before, abs=SLACK)


# Failed keys ------------------------------------------------------------------------------------------------


def test_those_who_are_refused_together_are_told_the_moments_of_one_token_after_the_other() -> None:
    bucket = Bucket(60)
    bucket.take(60, 0.0)
    assert [bucket.promise(1, 0.0, 0.0) for _ in range(3)] == pytest.approx([1, 2, 3])
    assert bucket.promise(5, 0.0, 0.0) == pytest.approx(8)
    assert bucket.promise(1, 4.0, 0.0) == pytest.approx(5)
    assert bucket.promise(1, 30.0, 0.0) == 0  # nobody who was told a moment is still to come
    assert bucket.level(30.0) == 30  # promising takes nothing


def test_dice_add_a_quarter_to_a_promise() -> None:
    bucket = Bucket(60)
    bucket.take(60, 0.0)
    assert bucket.promise(4, 0.0, 1.0) == pytest.approx(5)


def test_who_is_promised_nothing_within_a_minute_comes_in_its_second_half() -> None:
    bucket = Bucket(2)
    bucket.take(2, 0.0)
    assert [bucket.promise(1, 0.0, 0.0) for _ in range(2)] == pytest.approx([30, 60])
    assert [bucket.promise(1, 0.0, dice) for dice in (0.0, 0.5, 1.0)] == pytest.approx([30, 45, 60])
    assert bucket.promise(1, 30.0, 0.0) == pytest.approx(60)


def test_what_is_missing_for_more_than_a_minute_is_told_and_spread_too() -> None:
    bucket = Bucket(60)
    bucket.take(139, 0.0)
    assert [bucket.promise(1, 0.0, dice) for dice in (0.0, 0.0, 1.0)] == pytest.approx([80, 80, 100])


@given(
    sizes,
    st.floats(0, 3),
    st.lists(st.tuples(st.integers(1, 2_000_000), st.floats(0, 40), st.floats(0, 1)), max_size=40),
)
def test_nobody_is_promised_what_will_not_be_there_nor_much_later(
    size: int, used: float, story: list[tuple[int, float, float]]
) -> None:
    bucket, now = Bucket(size), 1000.0
    bucket.take(size * used, now)
    for amount, pause, dice in story:
        now += pause
        wait = bucket.wait(amount, now)
        told = bucket.promise(amount, now, dice)
        assert wait - 1e-6 <= told <= max(wait, MINUTE) * 1.25 + 1e-6


def test_a_few_failures_a_minute_are_nothing_and_more_are_told_when_to_return() -> None:
    failed = FailedKeys(a_minute=3)
    assert [failed.note("a", 0.0) for _ in range(4)] == [0, 0, 0, pytest.approx(20.0)]
    assert failed.note("a", 19.0) == pytest.approx(1.0)
    assert failed.note("a", 20.0) == 0
    assert failed.note("a", 20.0) == pytest.approx(20.0)


def test_the_failures_of_one_address_are_not_those_of_another() -> None:
    failed = FailedKeys(a_minute=1)
    assert (failed.note("a", 0.0), failed.note("a", 0.0), failed.note("b", 0.0)) == (0, 60.0, 0)


@given(st.integers(1, 20), st.lists(st.integers(0, 100).map(str), max_size=200))
def test_no_more_addresses_are_remembered_than_there_is_room_for(most: int, addresses: list[str]) -> None:
    failed = FailedKeys(most, 1)
    latest: dict[str, None] = {}
    for address in addresses:
        expected_wait = address in latest
        latest.pop(address, None)
        latest[address] = None
        if len(latest) > most:
            del latest[next(iter(latest))]
        assert (failed.note(address, 0.0) > 0) is expected_wait
        assert len(failed) == len(latest) <= most


# Another size -----------------------------------------------------------------------------------------------


@given(sizes, sizes, starts, st.floats(0, 2), st.floats(0, 100))
def test_another_size_leaves_what_was_used_and_no_more_than_a_minute_to_wait(
    size: int, other: int, start: float, share: float, pause: float
) -> None:
    bucket = Bucket(size)
    bucket.take(share * size, start)
    now = start + pause
    used = size - bucket.level(now)
    bucket.resize(other, now)
    assert bucket.level(now) == pytest.approx(max(other - used, 0), abs=SLACK * other, rel=1e-6)
    assert bucket.until_full(now) <= MINUTE + SLACK


def test_what_was_taken_before_another_size_can_be_given_back_after_it() -> None:
    bucket = Bucket(100)
    bucket.take(40, 0.0)
    bucket.resize(200, 0.0)
    assert bucket.level(0.0) == 160
    bucket.give(40)
    assert bucket.level(0.0) == 200
    bucket.take(40, 0.0)
    bucket.resize(10, 0.0)
    bucket.give(40)
    assert bucket.level(0.0) == 10
