"""What was used, on every ending: counted by the engine, or marked as estimated, and never made up.

The request of each row has 400 bytes, which are taken for 100 tokens where no engine counts them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import pytest
import trio
from trio.testing import MockClock

from tests.exchange.rig import Running, rigged
from trio_gateway.contract import Ending, Outcome
from trio_gateway.errors import Problem
from trio_gateway.testing import (
    CloseReset,
    Event,
    FakeScript,
    FakeScripting,
    Head,
    Hold,
    RecordingClient,
    Wait,
    WorkerSet,
    chat_answer,
    chat_chunk,
    chat_stream,
    error_answer,
    make_request,
    make_worker,
    unreachable,
)

OWNER: Final = Ending(Outcome.CLIENT_CANCELLED, Problem.of("request_cancelled", "its owner cancelled it"))
SHUTDOWN: Final = Ending(Outcome.GATEWAY_SHUTDOWN, Problem.of("gateway_draining", "going", retry_after=1.0))
WORDS: Final = chat_stream("a", "b", "c", finish=None, done=False, end=False)
HEAD_ONLY: Final[FakeScript] = (Head(), chat_chunk({"role": "assistant"}), Hold())
COUNTED: Final[FakeScript] = (  # as engines do that tell their usage with each event
    Head(),
    *(
        Event(
            {
                "choices": [{"index": 0, "delta": {"content": "x"}}],
                "usage": {"prompt_tokens": 7, "completion_tokens": 2 * number},
            }
        )
        for number in (1, 2, 3)
    ),
    Hold(),
)

Used = tuple[int | None, str, int | None, int | None, str]
ESTIMATED, ENGINE, NONE = "estimated", "engine", "none"
NOTHING: Final[Used] = (0, NONE, 0, 0, NONE)
PROMPT_ONLY: Final[Used] = (100, ESTIMATED, 0, 0, ESTIMATED)
THREE_WORDS: Final[Used] = (100, ESTIMATED, 3, 3, ESTIMATED)


def leave(running: Running) -> None:
    running.client.leave()


def end(ending: Ending) -> Callable[[Running], None]:
    return lambda running: running.exchange.end(ending)


def nothing(running: Running) -> None:
    """Let it end by itself."""


@dataclass(frozen=True, slots=True)
class Row:
    """One ending.

    Attributes:
        scripts: of the engines, one for each attempt.
        happens: after a second.
        used: prompt, who says so, generated, delivered, who says so.
    """

    outcome: str
    used: Used
    scripts: tuple[FakeScripting, ...]
    happens: Callable[[Running], None] = nothing
    stream: bool = True
    seconds: float = 600.0
    room: int | None = None
    limits: tuple[tuple[str, Any], ...] = ()


ROWS: Final = {
    "whole, counted": Row("completed", (5, ENGINE, 17, 17, ENGINE), (chat_stream("a", "b", usage=(5, 17)),)),
    "whole, not counted": Row("completed", (100, ESTIMATED, 2, 2, ESTIMATED), (chat_stream("a", "b"),)),
    "whole and buffered, counted": Row(
        "completed", (3, ENGINE, 90, 90, ENGINE), (chat_answer("x", usage=(3, 90)),), stream=False
    ),
    "left before any output": Row("client_gone", PROMPT_ONLY, ((Hold(),),), leave),
    "left after the head": Row("client_gone", PROMPT_ONLY, (HEAD_ONLY,), leave),
    "left amid the answer": Row("client_gone", THREE_WORDS, ((*WORDS, Hold()),), leave),
    "left amid a counted answer": Row("client_gone", (7, ENGINE, 6, 6, ENGINE), (COUNTED,), leave),
    "left a buffered answer": Row("client_gone", PROMPT_ONLY, ((Hold(),),), leave, stream=False),
    "cancelled before any output": Row("client_cancelled", PROMPT_ONLY, ((Hold(),),), end(OWNER)),
    "cancelled amid the answer": Row("client_cancelled", THREE_WORDS, ((*WORDS, Hold()),), end(OWNER)),
    "shut down amid the answer": Row("gateway_shutdown", THREE_WORDS, ((*WORDS, Hold()),), end(SHUTDOWN)),
    "too late, before any output": Row("deadline_exceeded", PROMPT_ONLY, ((Hold(),),), seconds=5),
    "too late, amid the answer": Row("deadline_exceeded", THREE_WORDS, ((*WORDS, Hold()),), seconds=5),
    "stalled": Row(
        "client_stalled",
        (100, ESTIMATED, 3, 1, ESTIMATED),
        ((*chat_stream(*["x" * 1000] * 3, finish=None, done=False, end=False), Hold()),),
        room=2000,
    ),
    "cut before any output": Row(
        "upstream_failed", PROMPT_ONLY, ((CloseReset(),),), limits=(("max_attempts", 1),)
    ),
    "cut amid the answer": Row("upstream_failed", THREE_WORDS, ((*WORDS, Wait(1), CloseReset()),)),
    "no first token in time": Row(
        "upstream_failed", PROMPT_ONLY, ((Hold(),),), limits=(("first_token", 5.0), ("max_attempts", 1))
    ),
    "failed with 500, twice": Row("upstream_failed", PROMPT_ONLY, (error_answer(500),)),
    "failed, then whole": Row(
        "completed", (5, ENGINE, 17, 17, ENGINE), ((CloseReset(),), chat_stream("a", usage=(5, 17)))
    ),
    "failed, then left": Row("client_gone", THREE_WORDS, ((CloseReset(),), (*WORDS, Hold())), leave),
    "nobody to be reached": Row("upstream_failed", NOTHING, (unreachable(),)),
    "rejected, then whole": Row(
        "completed", (5, ENGINE, 17, 17, ENGINE), (error_answer(503), chat_stream("a", usage=(5, 17)))
    ),
    "rejected, then left": Row("client_gone", PROMPT_ONLY, (error_answer(503), (Hold(),)), leave),
    "rejected by all": Row("refused", NOTHING, (error_answer(503),), seconds=3),
    "refused for what it was": Row("refused", NOTHING, (error_answer(400, "bad"),)),
    "out of memory": Row("refused", NOTHING, (error_answer(500, "CUDA out of memory"),)),
}


@pytest.mark.parametrize("name", ROWS)
async def test_every_ending_says_what_was_used(name: str, autojump_clock: MockClock) -> None:
    row = ROWS[name]
    async with rigged(*row.scripts, **dict(row.limits)) as rig:
        client = RecordingClient() if row.room is None else RecordingClient(room=row.room)
        running = rig.start(make_request(stream=row.stream, seconds=row.seconds, size=400), client)
        await trio.sleep(1)
        row.happens(running)
        await running.over.wait()
        record = rig.record
        assert record.outcome == row.outcome
        used = (
            record.tokens_prompt,
            record.prompt_source,
            record.tokens_generated,
            record.tokens_delivered,
            record.usage_source,
        )
        assert used == row.used
        counts = rig.books.tokens
        told = {kind: counts["t1", "m1", kind] for kind in ("prompt", "generated", "queued", "delivered")}
        assert told["prompt"] == (record.tokens_prompt or 0)
        assert told["generated"] >= told["queued"] + told["delivered"]


@pytest.mark.parametrize("happens", [leave, end(OWNER), end(SHUTDOWN)], ids=["left", "owner", "shutdown"])
async def test_what_waited_only_has_used_nothing(
    happens: Callable[[Running], None], autojump_clock: MockClock
) -> None:
    async with rigged((*WORDS, Hold()), workers=WorkerSet(make_worker("w1", slots=1))) as rig:
        before = rig.start()
        await trio.sleep(1)
        running = rig.start(make_request(size=400))
        await trio.sleep(1)
        happens(running)
        await running.over.wait()
        record = rig.record
        assert (record.phase, record.worker, record.attempts) == ("queued", None, 0)
        assert (record.tokens_prompt, record.prompt_source) == (0, "none")
        assert (record.tokens_generated, record.tokens_delivered, record.usage_source) == (0, 0, "none")
        before.client.leave()
        await before.over.wait()


async def test_what_waited_for_a_client_is_counted_as_queued(autojump_clock: MockClock) -> None:
    texts = ["x" * 1000] * 10
    script = (*chat_stream(*texts, finish=None, done=False, end=False), Hold())
    async with rigged(script) as rig:
        running = rig.start(client=RecordingClient(room=3600))
        await trio.sleep(1)
        running.client.leave()
        await running.over.wait()
        counts = rig.books.tokens
        assert [counts["t1", "m1", kind] for kind in ("generated", "delivered", "queued")] == [10, 2, 8]
