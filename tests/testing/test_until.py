"""Waiting for a state sees it however shortly it lasts."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from trio_gateway.testing import until


async def test_a_state_that_holds_already_costs_one_checkpoint() -> None:
    with trio.testing.assert_checkpoints():
        await until(lambda: True)


async def test_a_state_of_a_moment_is_seen(nursery: trio.Nursery) -> None:
    state = {"on": False}

    async def blink() -> None:
        state["on"] = True
        await trio.lowlevel.checkpoint()
        state["on"] = False

    nursery.start_soon(blink)
    with trio.fail_after(5):
        await until(lambda: state["on"])


async def test_what_the_condition_raises_is_raised_to_the_waiter(nursery: trio.Nursery) -> None:
    states: list[bool] = []

    async def act() -> None:
        states.append(True)
        await trio.lowlevel.checkpoint()

    nursery.start_soon(act)
    with trio.fail_after(5), pytest.raises(ZeroDivisionError):
        await until(lambda: bool(states) and 1 // 0 > 0)


async def test_a_wait_that_is_cancelled_leaves_nothing_behind() -> None:
    asked: list[None] = []

    def ask() -> bool:
        asked.append(None)
        return False

    with trio.move_on_after(0):
        await until(ask)
    before = len(asked)
    await trio.lowlevel.checkpoint()
    assert before
    assert len(asked) == before
