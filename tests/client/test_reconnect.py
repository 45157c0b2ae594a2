"""When another socket makes sense, and when it is tried."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_gateway.client._reconnect import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    Pauses,
    may_ask_again,
    may_come_back,
)


@pytest.mark.parametrize("code", [None, 1000, 1001, 1006, 1011, 1012, 1013])
def test_another_socket_may_do_better_after_a_loss(code: int | None) -> None:
    assert may_come_back(code)


@pytest.mark.parametrize("code", [1002, 1003, 1007, 1008, 1009, 4400, 4401, 4403, 4408, 4429])
def test_no_other_socket_is_tried_where_it_would_end_the_same_way(code: int) -> None:
    assert not may_come_back(code)


def test_a_handshake_is_repeated_only_after_answers_that_pass() -> None:
    assert all(map(may_ask_again, (429, 502, 503, 504)))
    assert not any(map(may_ask_again, (400, 401, 403, 404, 426, 508)))


def test_the_first_attempt_is_made_at_once_and_the_next_ones_wait_longer() -> None:
    pauses = Pauses(1000.0, random.Random(1))
    waits = [pauses.next(0.0, None) for _ in range(40)]
    assert waits[0] == 0.0
    for number, wait in enumerate(waits[1:]):
        full = min(FIRST_PAUSE * 2**number, LONGEST_PAUSE)
        assert wait is not None
        assert full / 2 <= wait <= full


def test_the_gateways_wish_is_kept() -> None:
    pauses = Pauses(10.0, random.Random(1))
    assert pauses.next(0.0, 3.0) == 3.0
    assert pauses.next(3.0, 8.0) is None


@given(st.floats(0, 100), st.lists(st.floats(0, 5), max_size=30))
def test_no_attempt_is_made_after_the_window(window: float, delays: list[float]) -> None:
    pauses = Pauses(window, random.Random(2))
    now = 7.0
    limit: float | None = None
    for delay in delays:
        now += delay
        limit = now + window if limit is None else limit
        pause = pauses.next(now, None)
        assert pause is None or now + pause <= limit


def test_after_something_moved_a_loss_is_a_new_one() -> None:
    pauses = Pauses(5.0, random.Random(1))
    assert pauses.next(0.0, None) == 0.0
    assert pauses.next(6.0, None) is None
    pauses.reset()
    assert pauses.next(6.0, None) == 0.0
