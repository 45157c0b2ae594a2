"""A worker's usual pace, and streams that stand still measured by it."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_gateway.fleet._progress import ENOUGH, SHORTEST, TIMES, Progress, UsualGap


def learnt(*gaps: float) -> UsualGap:
    usual = UsualGap()
    for gap in gaps:
        usual.learn(gap)
    return usual


def flowing(gap: float, events: int = 200, stream: str = "s") -> tuple[Progress, float]:
    """A worker with one stream that has delivered for a while, and the time of its last event."""
    progress, now = Progress(), 100.0
    progress.progressed(stream, now)
    for _ in range(events):
        now += gap
        progress.progressed(stream, now)
    return progress, now


def test_a_pace_is_unknown_until_enough_was_seen() -> None:
    assert learnt(*[0.02] * (ENOUGH - 1)).seconds == math.inf
    assert learnt(*[0.02] * ENOUGH).seconds == pytest.approx(0.02)


def test_the_usual_gap_covers_nearly_all_gaps_of_an_uneven_stream() -> None:
    rng = random.Random(1)
    gaps = [rng.lognormvariate(math.log(0.03), 0.5) for _ in range(5000)]
    usual = learnt(*gaps).seconds
    assert 0.95 < sum(gap <= usual for gap in gaps) / len(gaps) < 0.9995


def test_a_hang_hardly_becomes_usual_however_long_it_was() -> None:
    before = learnt(*[0.02] * 500).seconds
    assert learnt(*[0.02] * 500, 3600.0).seconds < 1.2 * before


def test_a_slow_first_gap_does_not_last() -> None:
    assert learnt(1.0, *[0.1] * ENOUGH).seconds < 0.5


def test_another_pace_is_learnt_soon() -> None:
    assert learnt(*[0.02] * 500, *[0.2] * 300).seconds == pytest.approx(0.2, rel=0.2)


@given(st.lists(st.floats(0, 1e6, allow_nan=False), min_size=ENOUGH, max_size=200))
def test_the_usual_gap_is_a_number_of_the_size_of_what_was_seen(gaps: list[float]) -> None:
    usual = learnt(*gaps).seconds
    assert 1e-7 < usual <= max(1e-6, *gaps) * math.e**4


def test_streams_stand_still_after_many_usual_gaps() -> None:
    progress, last = flowing(gap=0.5)
    limit = progress.limit
    assert limit == pytest.approx(TIMES * 0.5)
    assert not progress.still(last + limit)
    assert progress.still(last + limit + 0.01)


def test_a_short_silence_of_a_fast_worker_is_a_pause() -> None:
    progress, last = flowing(gap=0.001)
    assert not progress.still(last + SHORTEST)
    assert progress.still(last + SHORTEST + 0.01)


def test_one_stream_that_goes_on_proves_that_the_worker_works() -> None:
    progress, last = flowing(gap=0.1)
    progress.progressed("other", last + 60)
    assert not progress.still(last + 60)


def test_a_worker_without_streams_does_not_stand_still() -> None:
    progress, last = flowing(gap=0.1)
    progress.ended("s")
    progress.ended("nobody")
    assert not progress.still(last + 1e6)


def test_nothing_is_said_of_a_worker_whose_pace_is_unknown() -> None:
    progress, last = flowing(gap=0.1, events=ENOUGH - 1)
    assert not progress.still(last + 1e6)


def test_events_that_are_told_together_count_each() -> None:
    progress = Progress()
    for second in range(ENOUGH + 1):
        progress.progressed("s", float(second), events=50)
    assert progress.usual.seconds == pytest.approx(0.02)


def test_a_stream_that_was_not_read_for_a_while_teaches_no_gap() -> None:
    progress, last = flowing(gap=0.1)
    seen = progress.usual.seen
    progress.ended("s")
    progress.progressed("s", last + 600)
    assert progress.usual.seen == seen


def test_events_of_one_moment_are_no_gap() -> None:
    progress, last = flowing(gap=0.1)
    seen = progress.usual.seen
    progress.progressed("s", last)
    assert progress.usual.seen == seen


told = st.tuples(st.sampled_from("abcd"), st.none() | st.integers(0, 50))


@given(st.lists(told, max_size=300))
def test_streams_stand_still_by_the_newest_of_those_that_are_there(
    steps: list[tuple[str, int | None]],
) -> None:
    progress, last = Progress(), dict[str, int]()
    for stream, at in steps:
        if at is None:
            progress.ended(stream)
            last.pop(stream, None)
        else:
            progress.progressed(stream, at, events=1000)
            last[stream] = at
        if math.isfinite(limit := progress.limit):
            for now in (limit, limit + 25, limit + 50, limit + 51):
                assert progress.still(now) == (bool(last) and now - max(last.values()) > limit)


def test_what_is_remembered_of_streams_does_not_grow_with_what_they_deliver() -> None:
    progress, _ = flowing(gap=0.1, events=10_000)
    assert len(progress._newest) < 50
