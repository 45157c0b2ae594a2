"""One scope through which an exchange ends: the first cause is the one that is recorded."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from trio_gateway.contract import Ending, Outcome
from trio_gateway.flow import RequestScope

GONE = Ending(Outcome.CLIENT_GONE)
STALLED = Ending(Outcome.CLIENT_STALLED)
TOO_LATE = Ending(Outcome.DEADLINE_EXCEEDED)


def scope_of(seconds: float = 60.0) -> RequestScope:
    return RequestScope(trio.current_time() + seconds, TOO_LATE)


def test_the_cancellation_that_it_causes_does_not_leave_it() -> None:
    async def story() -> Ending | None:
        scope = scope_of(5)
        async with scope:
            await trio.sleep_forever()
        return scope.ending

    # A run of its own: a test that ends cancelled would pass.
    assert trio.run(story, clock=MockClock(autojump_threshold=0)) == TOO_LATE


async def test_ending_cancels_all_that_is_left_and_the_block_is_left_quietly(
    autojump_clock: MockClock,
) -> None:
    scope = scope_of()
    async with scope:
        assert scope.end(GONE)
        await trio.sleep_forever()
    assert scope.ending == GONE


async def test_the_first_cause_wins(autojump_clock: MockClock) -> None:
    scope = scope_of()
    async with scope:
        assert scope.end(STALLED)
        assert not scope.end(GONE)
        assert not scope.note(TOO_LATE)
        await trio.sleep_forever()
    assert scope.ending == STALLED


async def test_a_noted_cause_does_not_cancel_but_is_first(autojump_clock: MockClock) -> None:
    scope = scope_of()
    passed = False
    async with scope:
        assert scope.note(STALLED)
        await trio.lowlevel.checkpoint()
        passed = True
        assert not scope.end(GONE)
        await trio.sleep_forever()
    assert passed
    assert scope.ending == STALLED


async def test_the_deadline_is_absolute_and_recorded(autojump_clock: MockClock) -> None:
    began = trio.current_time()
    scope = scope_of(5)
    await trio.sleep(2)
    async with scope:
        await trio.sleep_forever()
    assert trio.current_time() == began + 5
    assert scope.ending == TOO_LATE


async def test_a_cause_noted_before_the_deadline_stays(autojump_clock: MockClock) -> None:
    scope = scope_of(5)
    async with scope:
        scope.note(GONE)
        await trio.sleep_forever()
    assert scope.ending == GONE


async def test_a_block_that_is_left_in_time_has_no_cause(autojump_clock: MockClock) -> None:
    scope = scope_of(5)
    async with scope:
        await trio.sleep(4.9)
    assert scope.ending is None


async def test_a_cancellation_from_outside_is_somebody_elses_and_passes(autojump_clock: MockClock) -> None:
    scope = scope_of()
    after = False
    with trio.move_on_after(1) as outer:
        async with scope:
            await trio.sleep_forever()
        after = True
    assert outer.cancelled_caught
    assert not after
    assert scope.ending is None


async def test_a_task_of_the_block_ends_with_it(autojump_clock: MockClock) -> None:
    scope = scope_of()
    ended = []

    async def wait() -> None:
        try:
            await trio.sleep_forever()
        finally:
            ended.append(trio.current_time())

    async with scope as nursery:
        nursery.start_soon(wait)
        await trio.sleep(2)
        scope.end(GONE)
    assert ended == [trio.current_time()]
    assert scope.ending == GONE


async def test_it_is_over_from_its_deadline_or_end_on(autojump_clock: MockClock) -> None:
    ended, late = scope_of(), scope_of(5)
    assert not ended.over
    ended.end(GONE)
    assert ended.over
    async with late:
        assert not late.over
        with trio.CancelScope(shield=True):
            await trio.sleep(5)
        assert late.over
        await trio.lowlevel.checkpoint()
    assert late.ending == TOO_LATE


async def test_an_exception_passes_with_whatever_was_recorded(autojump_clock: MockClock) -> None:
    scope = scope_of()
    scope.note(GONE)
    with pytest.RaisesGroup(ZeroDivisionError):
        async with scope:
            raise ZeroDivisionError
    assert scope.ending == GONE


async def test_one_that_was_ended_before_it_began_ends_at_its_first_checkpoint(
    autojump_clock: MockClock,
) -> None:
    scope = scope_of()
    scope.end(GONE)
    reached = False
    async with scope:
        await trio.lowlevel.checkpoint()
        reached = True
    assert not reached
    assert scope.ending == GONE
