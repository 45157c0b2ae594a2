"""The watchdog names the function that holds the loop, and counts how late the loop is."""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

import trio
import trio.testing

from trio_gateway.telemetry import LoopWatch
from trio_gateway.telemetry._watchdog import BEAT, MOST_FRAMES, stack_of

PATIENCE = 20


class Lines:
    """Takes log lines from any thread."""

    def __init__(self) -> None:
        self.found: queue.Queue[tuple[str, str, dict[str, Any]]] = queue.Queue()

    def write(self, level: str, event: str, **fields: Any) -> None:
        self.found.put((level, event, fields))


def hold_the_loop(lines: Lines) -> tuple[str, str, dict[str, Any]]:
    """Hold the loop until somebody complains."""
    return lines.found.get(timeout=PATIENCE)


def take_long() -> None:
    """Hold the loop for longer than a beat."""
    time.sleep(BEAT + 0.02)


async def test_whoever_holds_the_loop_is_named_while_it_does(nursery: trio.Nursery) -> None:
    lines = Lines()
    watch = LoopWatch(0.1, lines)
    nursery.start_soon(watch.run)
    frames: list[str] = []
    while not any(frame.endswith(" hold_the_loop") for frame in frames):
        await trio.sleep(0.01)  # on a busy machine the loop may have been late by itself
        level, event, fields = hold_the_loop(lines)
        if event == "loop_stalled":
            assert level == "warning"
            assert fields["seconds"] > 0.1
            frames = fields["frames"]
    assert any(frame.startswith("test_watchdog.py:") for frame in frames)
    while event != "loop_resumed":
        await trio.sleep(0.01)
        if not lines.found.empty():
            level, event, fields = lines.found.get_nowait()
    assert level == "info"
    assert watch.stalls >= 1
    assert watch.stalled > 0.1


async def test_the_thread_ends_with_the_task() -> None:
    before = set(threading.enumerate())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(LoopWatch(0.02, Lines()).run)
        await trio.testing.wait_all_tasks_blocked()
        (dog,) = set(threading.enumerate()) - before
        nursery.cancel_scope.cancel()
    dog.join(PATIENCE)
    assert not dog.is_alive()


async def test_without_a_limit_the_lag_is_measured_and_nobody_looks(nursery: trio.Nursery) -> None:
    lines = Lines()
    watch = LoopWatch(0.0, lines)
    before = set(threading.enumerate())
    nursery.start_soon(watch.run)
    await trio.testing.wait_all_tasks_blocked()
    assert set(threading.enumerate()) == before
    take_long()
    while not watch.figures()["lag"]["seconds"]:  # noqa: ASYNC110 - a beat is nobody's event
        await trio.sleep(0.01)
    assert sum(watch.figures()["lag"]["counts"]) >= 1
    assert (watch.stalls, watch.stalled) == (0, 0.0)
    assert lines.found.empty()


def test_a_stack_names_its_innermost_functions_and_a_thread_that_is_gone_has_none() -> None:
    def dive(depth: int) -> list[str]:
        return dive(depth - 1) if depth else stack_of(threading.get_ident())

    names = dive(30)
    assert len(names) == MOST_FRAMES
    assert names[-1].endswith(" stack_of")
    assert names[-2].endswith(" dive")
    assert stack_of(-1) == []
