"""One task that reads for many: each hazard of that has a test here."""

from __future__ import annotations

import bisect
import itertools
import os
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from trio_gateway.flow import EpollPoller, ReadLoop
from trio_gateway.flow._read_loop import GATHER, GATHER_OF_SEVERAL, LAST_STEPS, STEPS_A_TURN, TURN
from trio_gateway.testing import FakePoller, until


class Stream:
    """Something to read: each step takes one of ``items``; an exception is raised, False ends it."""

    def __init__(self, loop: ReadLoop, poller: FakePoller, *items: object) -> None:
        self.number = poller.new_number()
        self.taken: list[object] = []
        self.told: list[bool] = []
        self.raised: list[BaseException] = []
        self._items = list(items)
        self._loop = loop
        self._poller = poller
        poller.set_readable(self.number, bool(items))

    def say(self, *items: object) -> None:
        self._items += items
        self._poller.set_readable(self.number, True)

    def step(self, now: float) -> bool:
        if not self._items:
            return True
        item = self._items.pop(0)
        self._poller.set_readable(self.number, bool(self._items))
        if isinstance(item, Exception):
            raise item
        self.taken.append(item)
        return item is not False

    async def read(self) -> None:
        try:
            self.told.append(await self._loop.read(self.number, self.step))
        except ValueError as exc:
            self.raised.append(exc)


Open = Callable[..., Stream]


@asynccontextmanager
async def looping(others: int = 0) -> AsyncIterator[tuple[ReadLoop, FakePoller, trio.Nursery]]:
    poller = FakePoller()
    loop = ReadLoop(poller, others)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(loop.run)  # noqa: ASYNC113 - it waits until it is there
        await wait_all_tasks_blocked()
        yield loop, poller, nursery
        nursery.cancel_scope.cancel()
    assert not loop
    assert not poller.watched


# What it is for ---------------------------------------------------------------------------------------------


async def test_what_is_ready_is_read_until_the_stream_wants_its_own_task(autojump_clock: MockClock) -> None:
    async with looping() as (loop, poller, nursery):
        stream = Stream(loop, poller, "a", "b")
        nursery.start_soon(stream.read)
        await trio.sleep(1)
        assert stream.taken == ["a", "b"]
        assert (len(loop), stream.told) == (1, [])
        stream.say("c", False, "not read")
        await trio.sleep(1)
        assert stream.taken == ["a", "b", "c", False]
        assert (len(loop), stream.told) == (0, [True])


@given(st.lists(st.lists(st.integers(0, 9), max_size=30), min_size=1, max_size=6))
def test_each_stream_gets_its_own_in_order_however_they_mix(told: list[list[int]]) -> None:
    async def run() -> None:
        async with looping() as (loop, poller, nursery):
            streams = [Stream(loop, poller, *items[::2]) for items in told]
            for stream in streams:
                nursery.start_soon(stream.read)
            await wait_all_tasks_blocked()
            for stream, items in zip(streams, told, strict=True):
                stream.say(*items[1::2], False)
            await trio.sleep(1)
            for stream, items in zip(streams, told, strict=True):
                assert stream.taken == [*items[::2], *items[1::2], False]
                assert stream.told == [True]

    trio.run(run, clock=MockClock(autojump_threshold=0))


# Errors -----------------------------------------------------------------------------------------------------


async def test_what_a_step_raises_is_raised_in_its_own_task_and_others_go_on(
    autojump_clock: MockClock,
) -> None:
    async with looping() as (loop, poller, nursery):
        bad, good = Stream(loop, poller, ValueError("bad")), Stream(loop, poller, "a")
        nursery.start_soon(bad.read)
        nursery.start_soon(good.read)
        await trio.sleep(1)
        good.say("b")
        await trio.sleep(1)
        assert [str(exc) for exc in bad.raised] == ["bad"]
        assert good.taken == ["a", "b"]
        assert len(loop) == 1


async def test_the_end_of_the_loop_wakes_everybody_who_was_read() -> None:
    poller = FakePoller()
    loop = ReadLoop(poller)
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            streams = [Stream(loop, poller) for _ in range(3)]

            async def run() -> None:
                with scope_of_loop:
                    await loop.run()

            scope_of_loop = trio.CancelScope()
            nursery.start_soon(run)
            await wait_all_tasks_blocked()
            for stream in streams:
                nursery.start_soon(stream.read)
            await wait_all_tasks_blocked()
            assert len(loop) == 3
            scope_of_loop.cancel()
    assert not scope.cancelled_caught
    assert [stream.told for stream in streams] == [[False]] * 3
    assert not poller.watched


async def test_a_poller_that_fails_ends_the_loop_loudly_and_wakes_everybody() -> None:
    class Failing(Exception):
        pass

    class FailingPoller:
        def __init__(self, inner: FakePoller) -> None:
            self.add, self.remove, self.wait, self.close = inner.add, inner.remove, inner.wait, inner.close

        def poll(self, most: int) -> list[tuple[int, int]]:
            raise Failing

    poller = FakePoller()
    loop = ReadLoop(FailingPoller(poller))
    stream = Stream(loop, poller)
    with pytest.RaisesGroup(Failing):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(loop.run)
            await wait_all_tasks_blocked()
            nursery.start_soon(stream.read)
            await wait_all_tasks_blocked()
            nursery.cancel_scope.shield = True
            stream.say("a")
    assert not loop


async def test_where_no_loop_runs_or_nothing_can_be_watched_the_caller_is_told_at_once(
    autojump_clock: MockClock,
) -> None:
    poller = FakePoller()
    stream = Stream(ReadLoop(poller), poller, "a")
    await stream.read()
    assert (stream.told, stream.taken) == ([False], [])
    async with looping() as (loop, poller, _):
        poller.broken = True
        stream = Stream(loop, poller, "a")
        await stream.read()
        assert (stream.told, stream.taken) == ([False], [])


# Leaving, and numbers that come again -----------------------------------------------------------------------


async def test_a_cancelled_reader_leaves_nothing_behind(autojump_clock: MockClock) -> None:
    async with looping() as (loop, poller, _):
        stream = Stream(loop, poller)
        with trio.move_on_after(1) as scope:
            await stream.read()
        assert scope.cancelled_caught
        assert (len(loop), poller.watched) == (0, set())
        stream.say("nobody takes this")
        await trio.sleep(1)
        assert stream.taken == []


async def test_one_that_is_forgotten_within_a_turn_gets_no_step_in_it(autojump_clock: MockClock) -> None:
    async with looping() as (loop, poller, nursery):
        first, second = Stream(loop, poller), Stream(loop, poller)
        step = first.step

        def forget_second(now: float) -> bool:
            loop.forget(second.number)
            loop.forget(second.number)  # again: nothing
            return step(now)

        first.step = forget_second  # type: ignore[method-assign]
        for stream in (first, second):
            nursery.start_soon(stream.read)
        await wait_all_tasks_blocked()
        first.say("a")
        second.say("b")
        await trio.sleep(1)
        assert (first.taken, second.taken, second.told) == (["a"], [], [False])


async def test_a_number_that_comes_again_within_a_turn_is_not_taken_for_the_old_one(
    autojump_clock: MockClock,
) -> None:
    """Matched by number, the readiness of the old stream would give a step to the new one."""
    async with looping() as (loop, poller, nursery):
        first, old, new = Stream(loop, poller), Stream(loop, poller), Stream(loop, poller)
        new.number = old.number
        step = first.step
        stepped: list[float] = []

        def replace(now: float) -> bool:
            loop.forget(old.number)
            poller.set_readable(old.number, False)
            nursery.start_soon(new.read)
            autojump_clock.jump(2 * TURN)  # others have their turn now, in the middle of what was ready
            return step(now)

        first.step = replace  # type: ignore[method-assign]
        new.step = lambda now: not stepped.append(now)  # type: ignore[method-assign, func-returns-value]
        for stream in (first, old):
            nursery.start_soon(stream.read)
        await wait_all_tasks_blocked()
        first.say("a")
        old.say("b")
        await until(lambda: bool(first.taken) and new.number in poller.watched)
        await wait_all_tasks_blocked()
        assert (old.told, old.taken, stepped, len(loop)) == ([False], [], [], 2)


async def test_a_descriptor_closed_without_a_word_does_not_keep_its_number_from_the_next() -> None:
    loop = ReadLoop()
    got: list[bytes] = []

    async with trio.open_nursery() as nursery:
        nursery.start_soon(loop.run)
        await wait_all_tasks_blocked()
        gone, far = socket.socketpair()
        number = gone.fileno()
        told: list[bool] = []

        async def read(step: Callable[[float], bool]) -> None:
            told.append(await loop.read(number, step))

        nursery.start_soon(read, lambda now: True)
        await wait_all_tasks_blocked()
        gone.close()  # without `forget`
        far.close()
        one, other = socket.socketpair()
        assert number in (one.fileno(), other.fileno())
        near, far = (one, other) if one.fileno() == number else (other, one)

        def take(now: float) -> bool:
            got.append(os.read(number, 10))
            return False

        nursery.start_soon(read, take)
        far.send(b"new")
        with trio.fail_after(5):
            await until(lambda: len(told) == 2)
        assert (told, got) == ([False, True], [b"new"])
        nursery.cancel_scope.cancel()
        near.close()
        far.close()
    loop.close()


# Fairness ---------------------------------------------------------------------------------------------------


class Steps(trio.abc.Instrument):
    """Counts what was taken of some streams in each step of a task."""

    def __init__(self, streams: list[Stream]) -> None:
        self._streams = streams
        self._before = 0
        self.each: list[int] = []

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        taken = sum(len(stream.taken) for stream in self._streams)
        self.each.append(taken - self._before)
        self._before = taken


async def test_streams_that_are_always_ready_leave_turns_to_other_tasks(autojump_clock: MockClock) -> None:
    async with looping() as (loop, poller, nursery):
        greedy = [Stream(loop, poller, *range(20)) for _ in range(STEPS_A_TURN + 10)]
        steps = Steps(greedy)
        trio.lowlevel.add_instrument(steps)
        for stream in greedy:
            nursery.start_soon(stream.read)
        while sum(len(stream.taken) for stream in greedy) < 20 * len(greedy):
            await trio.lowlevel.checkpoint()
            counts = [len(stream.taken) for stream in greedy]
            assert max(counts) - min(counts) <= 2  # and none of them waits long for the others
        trio.lowlevel.remove_instrument(steps)
        assert max(steps.each) == STEPS_A_TURN


async def ready_and_slow(
    streams: Sequence[Stream], clock: MockClock, seconds: float, nursery: trio.Nursery
) -> None:
    """Have streams read whose steps take so long, and something to read for each of them."""
    for stream in streams:

        def step(now: float, step: Callable[[float], bool] = stream.step) -> bool:
            clock.jump(seconds)
            return step(now)

        stream.step = step  # type: ignore[method-assign]
        nursery.start_soon(stream.read)
    await wait_all_tasks_blocked()
    for stream in streams:
        stream.say("a")


@pytest.mark.parametrize(
    ("others", "told", "steps"),
    [
        (0.0, max, {3}),
        (0.0002, min, {1}),
        (0.0004, min, {1}),
        (0.003, max, {3, 5}),
        (0.03, max, {10}),
    ],
)
async def test_a_turn_is_short_while_others_work_and_a_third_of_theirs_up_to_a_bound(
    others: float, told: Callable[[Sequence[int]], int], steps: set[int]
) -> None:
    """The others take that long between two turns, or twice in a row, or have none between them."""
    clock = MockClock()

    async def run() -> int:
        async with looping() as (loop, poller, nursery):
            streams = [Stream(loop, poller) for _ in range(60)]
            counted = Steps(streams)
            trio.lowlevel.add_instrument(counted)
            await ready_and_slow(streams, clock, 0.00041, nursery)
            while not all(stream.taken for stream in streams):
                clock.jump(others)
                await trio.lowlevel.checkpoint()
            trio.lowlevel.remove_instrument(counted)
            nursery.cancel_scope.cancel()
            turns = [taken for taken in counted.each if taken]
            before_last = bisect.bisect(list(itertools.accumulate(turns)), len(streams) - LAST_STEPS)
            return told(turns[1:before_last])

    assert await trio.to_thread.run_sync(lambda: trio.run(run, clock=clock)) in steps


def test_a_turn_ends_after_a_millisecond_even_if_few_streams_were_read() -> None:
    assert steps_of_turns(streams=20, seconds=0.0004) == [1, 3, 3, 3, 4, 4, 2]


@pytest.mark.parametrize(
    ("streams", "seconds", "steps"),
    [
        (17, 0.00003, [17]),
        (18, 0.00003, [9, 9]),
        (9, 0.00024, [3, 6]),
        (10, 0.00024, [3, 6, 1]),
        (9, 0.03, [1] * 9),
    ],
)
def test_the_last_steps_are_taken_in_the_same_turn_if_they_are_few_and_quick(
    streams: int, seconds: float, steps: list[int]
) -> None:
    assert steps_of_turns(streams, seconds) == steps


def steps_of_turns(streams: int, seconds: float) -> list[int]:
    """How many steps each turn of the loop had, if so many streams are ready whose steps take so long."""
    clock = MockClock()

    async def run() -> list[int]:
        async with looping() as (loop, poller, nursery):
            slow = [Stream(loop, poller) for _ in range(streams)]
            steps = Steps(slow)
            trio.lowlevel.add_instrument(steps)
            await ready_and_slow(slow, clock, seconds, nursery)
            await until(lambda: all(stream.taken for stream in slow))
            trio.lowlevel.remove_instrument(steps)
            return [each for each in steps.each if each]

    return trio.run(run, clock=clock)


async def test_a_lone_stream_is_read_at_once_and_dense_ones_are_gathered(autojump_clock: MockClock) -> None:
    async with looping() as (loop, poller, nursery):
        lone = Stream(loop, poller)
        nursery.start_soon(lone.read)
        for _ in range(5):
            await trio.sleep(0.01)
            lone.say("a")
            await wait_all_tasks_blocked()
            assert lone.taken[-1:] == ["a"]
            lone.taken.clear()
        lone.say("a")
        await wait_all_tasks_blocked()
        lone.say("b")  # within no time after the last
        await wait_all_tasks_blocked()
        assert lone.taken == ["a"]
        await trio.sleep(GATHER * 1.1)
        assert lone.taken == ["a", "b"]


@pytest.mark.parametrize(("others", "wait"), [(0, GATHER), (1, GATHER_OF_SEVERAL), (7, GATHER_OF_SEVERAL)])
async def test_each_of_several_processes_gathers_for_longer_than_a_single_one(
    autojump_clock: MockClock, others: int, wait: float
) -> None:
    async with looping(others) as (loop, poller, nursery):
        stream = Stream(loop, poller)
        nursery.start_soon(stream.read)
        await wait_all_tasks_blocked()
        for item in "ab":
            stream.say(item)
            await wait_all_tasks_blocked()
        stream.say("c")
        await trio.sleep(wait * 0.9)
        assert "c" not in stream.taken
        await trio.sleep(wait * 0.2)
        assert stream.taken == ["a", "b", "c"]


async def test_bursts_with_nothing_between_them_are_waited_after_less_and_less(
    autojump_clock: MockClock,
) -> None:
    async with looping() as (loop, poller, nursery):
        streams = [Stream(loop, poller) for _ in range(30)]
        for stream in streams:
            nursery.start_soon(stream.read)
        await wait_all_tasks_blocked()
        slept = []
        for _ in range(40):
            began = trio.current_time()
            for stream in streams:
                stream.say("a")
            await trio.sleep(GATHER * 3)
            # While the loop waits for more it does not wait for its poller.
            slept.append(poller.waited_since - began)
        waits = [number for number, seconds in enumerate(slept) if seconds > 0]
        gaps = [after - before for before, after in itertools.pairwise(waits)]
        assert gaps == sorted(gaps)
        assert len(waits) < 10
        assert all(len(stream.taken) == 40 for stream in streams)


# Real descriptors -------------------------------------------------------------------------------------------


async def test_epoll_tells_what_is_readable_by_level_and_the_end_too() -> None:
    poller = EpollPoller()
    near, far = socket.socketpair()
    with near, far:
        poller.add(near.fileno())
        assert poller.poll(10) == []
        far.send(b"ab")
        with trio.fail_after(5):
            await poller.wait()
        assert [fd for fd, _ in poller.poll(10)] == [near.fileno()]
        assert near.recv(1) == b"a"
        assert [fd for fd, _ in poller.poll(10)] == [near.fileno()]
        assert near.recv(1) == b"b"
        assert poller.poll(10) == []
        far.close()
        assert [fd for fd, _ in poller.poll(10)] == [near.fileno()]
        poller.remove(near.fileno())
        assert poller.poll(10) == []
        with pytest.raises(OSError, match="No such file"):
            poller.remove(near.fileno())
    poller.close()
