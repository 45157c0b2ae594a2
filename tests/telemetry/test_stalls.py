"""When a silent loop is told of: once each time, and never because the process was stopped as a whole."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trio_gateway.telemetry._stalls import StallJudge

LIMIT, EVERY = 0.25, 0.125


def test_a_loop_that_beats_is_never_told_of() -> None:
    judge = StallJudge(LIMIT, EVERY, 0.0)
    assert [judge.look(n * EVERY, n * EVERY, n * EVERY) for n in range(1, 50)] == [None] * 49


def test_a_stall_is_told_once_and_the_next_one_again() -> None:
    judge = StallJudge(LIMIT, EVERY, 0.0)
    looks = [judge.look(n * EVERY, 0.0, n * EVERY) for n in range(1, 10)]
    assert looks == [None, None, 0.375, *[None] * 6]
    assert judge.look(10 * EVERY, 10 * EVERY, 1.25) is None
    assert judge.look(13 * EVERY, 10 * EVERY, 1.5) == 0.375


def test_a_process_that_was_stopped_is_no_stall_but_one_that_hangs_on_afterwards_is() -> None:
    judge = StallJudge(LIMIT, EVERY, 0.0)
    assert judge.look(EVERY, 0.1, 0.01) is None
    assert judge.look(60.0, 0.1, 0.02) is None  # a minute in which nothing ran
    assert judge.look(60.0 + EVERY, 0.1, 0.02) is None
    assert judge.look(60.0 + 3 * EVERY, 0.1, 0.03) == 0.375


def test_code_that_lets_no_thread_run_is_told_of_when_it_is_over() -> None:
    judge = StallJudge(LIMIT, EVERY, 0.0)
    assert judge.look(EVERY, 0.1, 0.1) is None
    assert judge.look(2.0, 0.1, 1.9) == 1.9


@given(st.lists(st.tuples(st.floats(0, 5), st.booleans(), st.floats(0, 5)), max_size=40))
def test_nothing_is_told_twice_for_one_beat_nor_below_the_limit(
    story: list[tuple[float, bool, float]],
) -> None:
    judge = StallJudge(LIMIT, EVERY, 0.0)
    now = beat = spent = 0.0
    told: list[float] = []
    for passed, beats, busy in story:
        now, spent = now + passed, spent + busy
        beat = now if beats else beat
        silent = judge.look(now, beat, spent)
        if silent is not None:
            assert LIMIT < silent <= now - beat
            told.append(beat)
    assert len(told) == len(set(told))
