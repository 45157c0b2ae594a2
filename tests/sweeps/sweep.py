"""The sweep: tell a story once and count its moments; then tell it again and end it at each of them.

A moment is the end of a step of any task: whatever can be cancelled is then suspended at some checkpoint.
After each replay nothing may be held, the equations hold, what the client got is whole, and the next request
is served.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final

import trio
from trio.testing import MockClock

from tests.exchange.rig import Rig, Running, text_of
from trio_gateway.contract import Ending, Outcome
from trio_gateway.errors import Problem
from trio_gateway.testing import (
    FakeAttempt,
    FakeEngine,
    FakeScript,
    FakeScripting,
    WorkerSet,
    chat_answer,
    chat_stream,
    make_request,
)

PATIENCE: Final = 2000.0  # seconds of the fake clock in which every story has to end by itself

FRESH: Final = "the next one" * 200

OPERATOR: Final = Ending(Outcome.OPERATOR_CANCELLED, Problem.of("operator_cancelled", "an operator ended it"))
SHUTDOWN: Final = Ending(Outcome.GATEWAY_SHUTDOWN, Problem.of("gateway_draining", "going", retry_after=1.0))

Way = Callable[[Rig, Running], None]
WAYS: Final[dict[str, Way]] = {
    "cancelled from outside": lambda rig, running: running.scope.cancel(),
    "ended by an operator": lambda rig, running: running.exchange.end(OPERATOR),
    "ended by shutdown": lambda rig, running: rig.live.end_all(SHUTDOWN),
    "the client leaves": lambda rig, running: running.client.leave(),
    "the client stops reading": lambda rig, running: running.client.stop_reading(),
}


@dataclass(frozen=True, slots=True)
class Story:
    """What happens to one exchange when nobody ends it.

    Attributes:
        tell: starts what stands around it, then starts it by its last argument.
        scripts: of the engine, in the order of attempts.
        text: what a client that got all of it has read.
    """

    name: str
    tell: Callable[[Rig, Callable[[Running], None]], Awaitable[None]]
    scripts: tuple[FakeScripting, ...]
    text: str
    workers: Callable[[], WorkerSet] | None = None
    options: dict[str, Any] = field(default_factory=dict)


class Sweeper(trio.abc.Instrument):
    """Counts the moments of one exchange, audits each, and acts at one of them.

    Args:
        moment: at which to act, from 1; None: only count.
    """

    def __init__(self, rig: Rig, way: Way, moment: int | None) -> None:
        self._rig = rig
        self._way = way
        self._moment = moment
        self.running: Running | None = None
        self.moments = 0
        self.wrong: list[str] = []

    def follow(self, running: Running) -> None:
        """Count from now on."""
        self.running = running

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        """See trio.abc.Instrument."""
        running = self.running
        if not self.wrong:
            self.wrong = self._rig.equations()
        if running is None or running.over.is_set():
            return
        self.moments += 1
        if self.moments == self._moment:
            try:
                self._way(self._rig, running)
            except Exception as exc:  # Trio would log it and go on without this instrument
                self.wrong.append(f"{exc!r} came out of ending it")


async def _replay(story: Story, way: Way, moment: int | None) -> tuple[int, list[str]]:
    told = iter(story.scripts)
    fresh: list[str] = []
    last: list[FakeScripting] = []

    def play(attempt: FakeAttempt) -> FakeScript | Exception:
        if attempt.request.exchange_id in fresh:
            return chat_stream(FRESH) if attempt.request.stream else chat_answer(FRESH)
        last.append(next(told, last[-1] if last else ()))
        scripting = last[-1]
        return scripting(attempt) if callable(scripting) else scripting

    async with trio.open_nursery() as nursery:
        workers = story.workers() if story.workers is not None else None
        rig = Rig(FakeEngine(play), nursery, workers=workers, **story.options)
        nursery.start_soon(rig.workers.run)
        sweeper = Sweeper(rig, way, moment)
        trio.lowlevel.add_instrument(sweeper)
        with trio.move_on_after(PATIENCE) as patience:
            await story.tell(rig, sweeper.follow)
            assert sweeper.running is not None
            await sweeper.running.over.wait()
            await rig.wind_down()
        wrong = ["it did not end by itself"] * patience.cancelled_caught + sweeper.wrong + rig.left_over()
        wrong += [f"a bug: {exc!r}" for _, exc in rig.bugs]
        if sweeper.running is not None:
            wrong += _promises_broken(story, rig, sweeper.running, ended=moment is not None)
        stream = sweeper.running is None or sweeper.running.exchange.request.stream
        next_one = rig.prepare(make_request(stream=stream))
        fresh.append(next_one.exchange.request.exchange_id)
        with trio.move_on_after(PATIENCE):
            await rig.carry_out(next_one)
            await rig.wind_down()
        if FRESH.encode() not in next_one.client.received or not next_one.client.finished:
            wrong.append(f"the next request was not served: {next_one.ending}")
        wrong += [line for line in rig.left_over() if line not in wrong]
        trio.lowlevel.remove_instrument(sweeper)
        nursery.cancel_scope.cancel()
    return sweeper.moments, wrong


def _promises_broken(story: Story, rig: Rig, running: Running, *, ended: bool) -> list[str]:
    """Judge what the client got and what was recorded."""
    client, request = running.client, running.exchange.request
    records = [record for record in rig.records if record.exchange_id == request.exchange_id]
    if len(records) != 1:
        return [f"{len(records)} records"]
    (record,) = records
    wrong = []
    if client.finished == client.was_cut:
        wrong.append(f"finished: {client.finished}, cut: {client.was_cut}")
    if not ended and record.outcome not in ("completed", "upstream_failed"):
        wrong.append(f"left alone it ends as {record.outcome}")
    if record.outcome == "completed" and not client.finished:
        wrong.append("completed, and the client has not got it")
    if record.bytes_delivered != len(client.received):
        wrong.append(f"{record.bytes_delivered} bytes recorded, {len(client.received)} taken")
    if client.head is not None:
        wrong += _stream_broken(story, running) if request.stream else _answer_broken(story, running)
    return wrong


def _stream_broken(story: Story, running: Running) -> list[str]:
    client = running.client
    text, events = text_of(client), client.events
    errors = [number for number, event in enumerate(events) if event.startswith(b'{"error"')]
    wrong = []
    if not story.text.startswith(text):
        wrong.append(f"text that nobody said: {text[:80]!r}")
    if b"[DONE]" in events and (text != story.text or errors or events[-1] != b"[DONE]"):
        wrong.append("a truncated answer that looks finished")
    if client.finished and not (events[-1:] == [b"[DONE]"] or errors):
        wrong.append("a proper end without a reason")
    if errors and errors != [len(events) - 1]:
        wrong.append(f"errors at {errors} of {len(events)} events")
    return wrong


def _answer_broken(story: Story, running: Running) -> list[str]:
    client = running.client
    if not client.finished:
        return []
    answer = json.loads(client.received)
    whole = answer["choices"][0]["message"]["content"] == story.text
    return [] if whole else ["an answer that nobody gave"]


def sweep(story: Story, way: str) -> tuple[int, dict[int, list[str]]]:
    """Tell a story and end it at each of its moments.

    Answers how many moments there were, and what was wrong at which of them.
    """

    def run(moment: int | None) -> tuple[int, list[str]]:
        return trio.run(_replay, story, WAYS[way], moment, clock=MockClock(autojump_threshold=0))

    moments, wrong = run(None)
    unclean = {0: wrong} if wrong else {}
    for moment in range(1, moments + 1):
        _, wrong = run(moment)
        if wrong:
            unclean[moment] = wrong
    return moments, unclean
