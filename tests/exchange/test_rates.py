"""What an exchange costs of its tenant's rates: charged at acceptance, and corrected by how it ended."""

from __future__ import annotations

from dataclasses import replace

import pytest
import trio

from tests.exchange.rig import EXPECTED, Rig, rigged
from trio_gateway.admission import AdmissionLimits
from trio_gateway.tenancy import RateBook, RateLimits
from trio_gateway.testing import (
    Event,
    FakeScripting,
    Head,
    Hold,
    RecordingClient,
    WorkerSet,
    chat_answer,
    chat_stream,
    error_answer,
    make_request,
    make_worker,
    until,
)

WHOLE = (10, 1000)  # requests and tokens a minute
CONTENT = '{"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}'
GONE_AFTER_ONE: FakeScripting = (Head(), Event(CONTENT), Hold())


def rate(rig: Rig, requests: int = WHOLE[0]) -> RateBook:
    """Give the rig's tenant rates that do not refill, and an estimate of 150 tokens a request."""
    rig.rates = RateBook({"t1": RateLimits(requests, WHOLE[1])}, estimate=lambda request: EXPECTED)
    rig.parts = replace(rig.parts, rates=rig.rates)
    return rig.rates


def left(book: RateBook) -> tuple[int, ...]:
    return tuple(standing.remaining for standing in book.standings("t1", None))


@pytest.mark.parametrize(
    ("script", "stream", "expected"),
    [
        (chat_stream("a", usage=(70, 30)), True, (9, 900)),
        (chat_answer(usage=(70, 30)), False, (9, 900)),
        (chat_stream("a", "b"), True, (9, 898)),  # the prompt as estimated, the answer as counted
        (error_answer(400), True, WHOLE),
        (error_answer(429), True, WHOLE),
        (error_answer(500), True, (9, 900)),  # an engine that failed may have read the prompt
    ],
)
async def test_an_exchange_costs_what_it_used_unless_it_was_refused(
    script: FakeScripting, stream: bool, expected: tuple[int, int], autojump_clock: object
) -> None:
    async with rigged(script) as rig:
        book = rate(rig)
        await rig.run(make_request(stream=stream))
        assert left(book) == expected


async def test_while_it_runs_its_estimate_is_reserved(autojump_clock: object) -> None:
    async with rigged(GONE_AFTER_ONE) as rig:
        book = rate(rig)
        client = RecordingClient()
        running = rig.start(client=client)
        await until(lambda: len(client.events) == 1)
        assert left(book) == (9, 850)
        client.leave()
        await running.over.wait()
        assert rig.record.outcome == "client_gone"
        assert left(book) == (9, 899)


async def test_attempts_after_the_first_cost_nothing_more(autojump_clock: object) -> None:
    async with rigged(error_answer(503), chat_stream("a", usage=(70, 30))) as rig:
        book = rate(rig)
        await rig.run()
        assert rig.record.attempts == 2
        assert left(book) == (9, 900)


@pytest.mark.parametrize(
    ("seconds", "outcome", "expected"),
    [(600.0, "refused", WHOLE), (5.0, "deadline_exceeded", (9, WHOLE[1]))],
)
async def test_one_that_only_waited_used_no_tokens(
    seconds: float, outcome: str, expected: tuple[int, int], autojump_clock: object
) -> None:
    workers = WorkerSet(make_worker(slots=1), limits=AdmissionLimits(8, 10**6, 10.0))
    async with rigged((Hold(),), workers=workers, between_events=1000.0, first_token=1000.0) as rig:
        first = rig.start(make_request(tenant="other"))
        await until(lambda: rig.books.running == 1)
        book = rate(rig)
        await rig.run(make_request(seconds=seconds))
        assert rig.record.outcome == outcome
        assert left(book) == expected
        first.scope.cancel()


async def test_one_that_finds_the_queue_full_costs_nothing(autojump_clock: object) -> None:
    workers = WorkerSet(make_worker(slots=1), limits=AdmissionLimits(0, 0, 10.0))
    async with rigged((Hold(),), workers=workers) as rig:
        first = rig.start(make_request(tenant="other"))
        await until(lambda: rig.books.running == 1)
        book = rate(rig)
        await rig.run()
        assert rig.books.turned_away.total() == 1
        assert left(book) == WHOLE
        first.scope.cancel()


async def test_beyond_its_rate_it_takes_no_place_and_reaches_no_engine(autojump_clock: object) -> None:
    async with rigged() as rig:
        rate(rig, requests=1)
        await rig.run()
        refused = await rig.run()
        assert refused.client.problem is not None
        assert refused.client.problem.code == "rate_limit_exceeded"
        assert refused.client.problem.retry_after == 60.0
        assert dict(rig.books.turned_away) == {"rate_limit_exceeded": 1}
        assert len(rig.engine.attempts) == len(rig.records) == 1


async def test_cancelled_from_outside_it_is_settled_all_the_same(autojump_clock: object) -> None:
    async with rigged((Hold(),)) as rig:
        book = rate(rig)
        running = rig.start()
        await trio.sleep(1.0)
        assert left(book) == (9, 850)
        running.scope.cancel()
        await running.over.wait()
        assert left(book) == (9, 900)


async def test_cancelled_at_once_it_is_settled_or_was_never_charged(autojump_clock: object) -> None:
    async with rigged((Hold(),)) as rig:
        book = rate(rig)
        running = rig.start()
        running.scope.cancel()
        await running.over.wait()
        assert left(book) == (WHOLE if not rig.records else (9, WHOLE[1]))
