"""The sweep of an agent's slot: an attempt is ended at every moment of its story, and nothing stays held."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import trio
from trio.testing import MockClock

from tests.agent.rig import Running, records, running
from trio_gateway.agent.engines import Limits, SimulatedEngine, Speed
from trio_gateway.testing import RawClient

PATIENCE: Final = 500.0  # seconds of the fake clock

WAYS: Final = ("the gateway closes", "the gateway resets", "the attempt is cancelled")
STORIES: Final[dict[str, dict[str, Any]]] = {
    "a stream": {"max_tokens": 3},
    "a buffered answer": {"max_tokens": 3, "stream": False},
    "a late release": {"max_tokens": 3, "simulate": {"faults": [{"kind": "late_release", "seconds": 9}]}},
    "a lost cancel": {"max_tokens": 3, "simulate": {"faults": [{"kind": "lost_cancel"}]}},
    "a failure": {"simulate": {"faults": [{"kind": "die", "after": 2}]}},
    "a rejection": {"simulate": {"faults": [{"kind": "refuse"}]}},
}


class Sweeper(trio.abc.Instrument):
    """Counts steps of tasks from `begin` on, and acts at one of them."""

    def __init__(self, moment: int | None, act: Callable[[], None]) -> None:
        self._moment = moment
        self._act = act
        self._begun = False
        self.moments = 0

    def begin(self) -> None:
        self._begun = True

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if self._begun:
            self.moments += 1
            if self.moments == self._moment:
                self._act()


async def _tell(run: Running, client: RawClient, story: dict[str, Any]) -> list[str]:
    try:
        await run.ask(client, **story)
        answer = await client.read_to_end()
    except OSError:
        return []  # it was cut before its head
    if answer.status == 200 and answer.ended == "complete":
        last = records(answer)[-1]["t"]
        return [] if last in ("end", "error") else [f"a proper end behind {last}"]
    return []


async def _replay(story: dict[str, Any], way: str, moment: int | None) -> tuple[int, list[str]]:
    engine = SimulatedEngine(("m",), limits=Limits(slots=1), speed=Speed(decode=100.0))
    wrong: list[str] = []
    async with running(engine, buffer_bytes=200) as run:
        with await run.connect() as events, await run.connect() as client:
            await run.send(events, "GET", "/internal/v1/events")
            await events.read_head()
            telling = trio.CancelScope()
            cancelled = way == "the attempt is cancelled"
            sweeper = Sweeper(moment, run.agent.slots.cancel_all if cancelled else telling.cancel)
            trio.lowlevel.add_instrument(sweeper)
            with trio.move_on_after(PATIENCE) as patience:
                sweeper.begin()
                with telling:
                    wrong += await _tell(run, client, story)
                if telling.cancelled_caught:
                    client.leave_fin() if way == "the gateway closes" else client.leave_reset()
                await run.agent.slots.wait_none()
            trio.lowlevel.remove_instrument(sweeper)
            wrong += ["it did not end by itself"] * patience.cancelled_caught
            core = engine.core
            if (len(run.agent.slots), core.running, core.memory.held, core.generations) != (0, 0, 0, ()):
                wrong.append(f"held: {len(run.agent.slots)} slots, {core.generations}")
            answer = await run.generate(request_id="next", max_tokens=1)
            if answer.status != 200 or records(answer)[-1] != {"t": "end"}:
                wrong.append(f"the next one got {answer.status} {answer.body!r}")
            with trio.move_on_after(PATIENCE) as patience:
                await events.read_until(b'"next"')
            if patience.cancelled_caught:
                wrong.append("the next one's release was not told")
            told = bytes(events.received).count(b'"' + b"a" * 32 + b'"')
            if told > 1:
                wrong.append(f"told {told} times that it was released")
            if moment is None and story is not STORIES["a rejection"] and not told:
                wrong.append("its release was not told")
    return sweeper.moments, wrong


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("story", STORIES)
def test_nothing_stays_held_at_whatever_moment_an_attempt_ends(story: str, way: str) -> None:
    def run(moment: int | None) -> tuple[int, list[str]]:
        return trio.run(_replay, STORIES[story], way, moment, clock=MockClock(autojump_threshold=0))

    moments, wrong = run(None)
    assert not wrong
    unclean = {moment: wrong for moment in range(1, moments + 1) if (wrong := run(moment)[1])}
    assert not unclean
    assert moments > 5
