"""Gaps between an engine's events: counted for each read that brought output, while the client keeps up."""

from __future__ import annotations

import dataclasses

import trio
from trio.testing import MockClock

from tests.exchange.rig import Rig, rigged
from trio_gateway.testing import (
    Chunk,
    EndChunks,
    Event,
    FakeScript,
    Head,
    RecordingClient,
    Wait,
    chat_chunk,
    error_answer,
)

WORD = chat_chunk({"content": "x" * 900})
END: FakeScript = (chat_chunk({}, finish="stop"), Event("[DONE]"), EndChunks())


def gaps_of(rig: Rig) -> list[float]:
    """Have the gaps told into a list."""
    gaps: list[float] = []
    attempts = dataclasses.replace(rig.parts.attempts, gapped=gaps.extend)
    rig.parts = dataclasses.replace(rig.parts, attempts=attempts)
    return gaps


async def test_a_gap_is_the_time_between_two_reads_that_brought_output(autojump_clock: MockClock) -> None:
    async with rigged((Head(), Wait(9), WORD, Wait(3), WORD, WORD, Wait(0.5), WORD, *END)) as rig:
        gaps = gaps_of(rig)
        await rig.run()
        assert gaps == [3.0, 0.5]  # what comes before the first is no gap


async def test_comments_are_no_output(autojump_clock: MockClock) -> None:
    async with rigged((Head(), WORD, Wait(2), Chunk(b": hi\n\n"), Wait(2), WORD, *END)) as rig:
        gaps = gaps_of(rig)
        await rig.run()
        assert gaps == [4.0]


async def test_time_between_two_attempts_is_no_gap(autojump_clock: MockClock) -> None:
    scripts = (error_answer(503), (Head(), Wait(5), WORD, Wait(1), WORD, *END))
    async with rigged(*scripts) as rig:
        gaps = gaps_of(rig)
        await rig.run()
        assert gaps == [1.0]


async def test_a_client_that_has_not_kept_up_says_nothing_of_its_engine(autojump_clock: MockClock) -> None:
    async with rigged((Head(), WORD, Wait(1), WORD, Wait(2), WORD, Wait(4), WORD, *END)) as rig:
        gaps = gaps_of(rig)
        client = RecordingClient(room=1200)
        running = rig.start(client=client)
        await rig.trickle(client, 400)
        await running.over.wait()
        assert gaps == [1.0]


async def test_gaps_are_told_some_at_a_time_and_when_somebody_looks(autojump_clock: MockClock) -> None:
    words: FakeScript = tuple(part for _ in range(40) for part in (WORD, Wait(1)))
    async with rigged((Head(), *words, Wait(60), *END)) as rig:
        gaps = gaps_of(rig)
        running = rig.start()
        await trio.sleep(38.5)
        assert len(gaps) == 32
        running.exchange.take_progress()
        assert gaps == [1.0] * 38
        await running.over.wait()
        assert gaps[:39] == [1.0] * 39
