"""Exchanges are ended at every moment of their stories; each time nothing is held and all is settled.

The resources: place and lease of admission, bytes of the channel and of the pool, the engine's answer with
its connection, the drain keeper, the books with the record, and the body's unplaced bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pytest
import trio

from tests.exchange import rig as exchange_rig
from tests.exchange.rig import Rig, Running
from tests.sweeps.conftest import Report
from tests.sweeps.sweep import WAYS, Story, sweep
from trio_gateway.testing import (
    Chunk,
    CloseReset,
    EndChunks,
    Event,
    FakeScript,
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
)

Follow = Callable[[Running], None]
STOP: Final = chat_chunk({}, finish="stop")
DONE: Final = Event("[DONE]")
OPEN_JSON: Final = Head(200, (("content-type", "application/json"), ("transfer-encoding", "chunked")))


def words(*texts: str, pause: float = 1.0) -> FakeScript:
    """A stream with a pause after each word."""
    told = [step for text in texts for step in (chat_chunk({"content": text}), Wait(pause))]
    return (Wait(pause), Head(), chat_chunk({"role": "assistant"}), *told, STOP, DONE, EndChunks())


async def streamed(rig: Rig, follow: Follow) -> None:
    follow(rig.start())
    await trio.lowlevel.checkpoint()


async def buffered(rig: Rig, follow: Follow) -> None:
    follow(rig.start(make_request(stream=False)))
    await trio.lowlevel.checkpoint()


async def second_buffered(rig: Rig, follow: Follow) -> None:
    rig.start(make_request(stream=False))
    await trio.testing.wait_all_tasks_blocked()
    await buffered(rig, follow)


async def slow_client(rig: Rig, follow: Follow) -> None:
    client = RecordingClient(room=100)
    await rig.trickle(client, 400)
    follow(rig.start(client=client))


async def slow_client_of_large_events(rig: Rig, follow: Follow) -> None:
    client = RecordingClient(room=100)
    await rig.trickle(client, 11_000)
    follow(rig.start(client=client))


async def half_closed(rig: Rig, follow: Follow) -> None:
    client = RecordingClient()
    client.half_close()
    follow(rig.start(client=client))


async def queued(rig: Rig, follow: Follow) -> None:
    rig.start()
    await trio.testing.wait_all_tasks_blocked()
    follow(rig.start())


async def behind_a_trial(rig: Rig, follow: Follow) -> None:
    """Three exchanges wait for a worker that is out; one of them tries first."""
    rig.start()
    rig.start()
    await trio.testing.wait_all_tasks_blocked()
    follow(rig.start())


def _in_pieces(text: str) -> FakeScript:
    """A buffered answer that comes bit by bit."""
    opening, closing = b'{"choices":[{"index":0,"message":{"content":"', b'"},"finish_reason":"stop"}]}'
    half = len(text) // 2
    pieces = (opening, text[:half].encode(), text[half:].encode(), closing)
    return (OPEN_JSON, *(step for piece in pieces for step in (Chunk(piece), Wait(1))), EndChunks())


def one_slot() -> WorkerSet:
    return WorkerSet(make_worker(slots=1))


def one_worker() -> WorkerSet:
    return WorkerSet(make_worker())


FULL: Final = error_answer(503, headers=(("retry-after", "2"),))
BIG: Final = "x" * 700
HUGE: Final = "y" * 30_000

STORIES: Final = (
    Story("buffered answer", buffered, ((Wait(1), *chat_answer("hello")),), "hello"),
    Story(
        "buffered answer over a full pool",
        buffered,
        (_in_pieces("x" * 40_000),),
        "x" * 40_000,
        options={"total_buffer_bytes": 1000},
    ),
    Story(
        "buffered answer that waits for another's room",
        second_buffered,
        (_in_pieces("a" * 3000), _in_pieces("b" * 3000)),
        "b" * 3000,
        options={"total_buffer_bytes": 1000},
    ),
    Story("streamed answer", streamed, (words("one", "two", "three"),), "onetwothree"),
    Story(
        "slow client with a full channel",
        slow_client,
        (chat_stream(*[BIG] * 5),),
        BIG * 5,
        options={"buffer_bytes": 2000, "max_lag": 1000.0},
    ),
    Story(
        "slow client in a full process",
        slow_client,
        (chat_stream(*[BIG] * 5),),
        BIG * 5,
        options={"total_buffer_bytes": 2000, "max_lag": 1000.0},
    ),
    Story("slow client of large events", slow_client_of_large_events, (chat_stream(*[HUGE] * 2),), HUGE * 2),
    Story("503, then success", streamed, (FULL, words("ok")), "ok", workers=one_worker),
    Story("500, then success elsewhere", streamed, (error_answer(500), words("ok")), "ok"),
    Story(
        "silence, then success elsewhere",
        streamed,
        ((Hold(),), words("ok")),
        "ok",
        options={"first_token": 15.0},
    ),
    Story("queued, then placed", queued, (words("first"), words("second")), "second", workers=one_slot),
    Story("behind a trial", behind_a_trial, (FULL, words("ok")), "ok", workers=one_worker),
    Story("half-closed client", half_closed, (words("one", "two", pause=12.0),), "onetwo"),
    Story(
        "failure after commit",
        streamed,
        ((*chat_stream("one", "two", finish=None, done=False, end=False), Wait(1), CloseReset()),),
        "onetwo",
    ),
    Story(
        "early headers, then failure",
        streamed,
        ((Wait(15), *error_answer(500)),),
        "",
        workers=one_worker,
    ),
    Story("an engine that does not end its message", streamed, (chat_stream("one", end=False),), "one"),
)


@pytest.mark.parametrize("together", [True, False], ids=["together", "alone"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.name)
def test_whenever_an_exchange_is_ended_nothing_stays_held(
    story: Story, way: str, together: bool, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange_rig, "READ_TOGETHER", together)
    moments, unclean = sweep(story, way)
    report(story.name + ("" if together else ", read alone"), way, moments, len(unclean))
    assert moments > 10
    assert unclean == {}
