"""Long work on the loop lets others run after every step."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import trio

from trio_gateway.flow import in_steps


class Steps(trio.abc.Instrument):
    """Counts how often the loop has let a task run."""

    def __init__(self, task: trio.lowlevel.Task) -> None:
        self.count = 0
        self._task = task

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.count += task is self._task


async def test_others_may_run_after_every_so_many_and_none_is_left_out() -> None:
    steps = Steps(trio.lowlevel.current_task())
    trio.lowlevel.add_instrument(steps)
    looks: list[int] = []

    def look() -> Iterator[int | None]:
        for each in (1, None, 2, 3, None, 4):
            looks.append(steps.count)
            yield each

    try:
        assert await in_steps(look(), 2) == [1, 2, 3, 4]
    finally:
        trio.lowlevel.remove_instrument(steps)
    assert looks == [0, 0, 1, 1, 2, 2]


async def test_it_is_a_checkpoint_even_if_nothing_was_found() -> None:
    with trio.CancelScope() as scope:
        scope.cancel()
        with pytest.raises(trio.Cancelled):
            await in_steps(iter(()), 10)
