"""Trying again: how often, where, paid by whom, and what stays when nobody is left to try."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.exchange.rig import error_of, is_whole, rigged, text_of
from trio_gateway.admission import AdmissionLimits
from trio_gateway.exchange import RetryBudget
from trio_gateway.testing import (
    CloseReset,
    FakeAttempt,
    FakeScript,
    Head,
    Hold,
    RecordingClient,
    Wait,
    WorkerSet,
    chat_chunk,
    chat_stream,
    error_answer,
    make_request,
    make_worker,
    unreachable,
)
from trio_gateway.units import MiB

BROKEN = error_answer(500)
FULL = error_answer(503)
SLOW_FULL = error_answer(503, headers=(("retry-after", "5"),))
GOOD = chat_stream("good")


def three_workers() -> WorkerSet:
    return WorkerSet(*(make_worker(f"w{number}") for number in (1, 2, 3)))


def one_worker(**options: object) -> WorkerSet:
    return WorkerSet(make_worker("w1"), **options)  # type: ignore[arg-type]


# Executed, perhaps ----------------------------------------------------------------------------------------


async def test_what_may_have_been_executed_is_tried_again_once(autojump_clock: MockClock) -> None:
    async with rigged(BROKEN, BROKEN, GOOD, workers=three_workers()) as rig:
        running = await rig.run()
        assert rig.engine.workers == ["w1", "w2"]
        problem = running.client.problem
        assert problem is not None
        assert (problem.code, problem.status, problem.final) == ("engine_failed", 502, True)
        assert rig.books.retries == {"error": 1}


async def test_without_a_retry_of_our_own_the_client_may_try(autojump_clock: MockClock) -> None:
    async with rigged(BROKEN, workers=one_worker()) as rig:
        running = await rig.run()
        assert rig.engine.workers == ["w1"]
        assert running.client.problem is not None
        assert running.client.problem.final is False


async def test_retries_are_paid_from_a_budget_that_all_exchanges_share(autojump_clock: MockClock) -> None:
    budget = RetryBudget(0.0, size=2.0, per_second=0.0)

    def play(attempt: FakeAttempt) -> FakeScript:
        return BROKEN if attempt.attempt_id.endswith("-01") else GOOD

    async with rigged(play, budget=budget) as rig:
        for _ in range(3):
            await rig.run()
        assert [record.outcome for record in rig.records] == ["completed", "completed", "upstream_failed"]
        assert rig.records[-1].attempts == 1
        assert rig.books.retries == {"error": 2}


async def test_requests_and_time_fill_the_budget(autojump_clock: MockClock) -> None:
    def play(attempt: FakeAttempt) -> FakeScript:
        return BROKEN if attempt.attempt_id.endswith("-01") else GOOD

    async with rigged(play, budget=RetryBudget(0.5, size=1.0, per_second=0.1)) as rig:
        for _ in range(3):
            await rig.run()
        assert [record.attempts for record in rig.records] == [2, 1, 2]
        await trio.sleep(11)
        await rig.run()
        assert rig.records[-1].attempts == 2


async def test_a_retry_that_can_not_be_made_is_not_paid_for(autojump_clock: MockClock) -> None:
    """A model with one failing worker must not use up the retries of all the others."""
    workers = WorkerSet(
        make_worker("w1"),
        make_worker("w2"),
        make_worker("w3"),
        models={"alone": ["w3"], "pair": ["w1", "w2"]},
    )

    def play(attempt: FakeAttempt) -> FakeScript:
        return GOOD if attempt.worker.id == "w2" else BROKEN

    async with rigged(play, workers=workers, budget=RetryBudget(0.0, size=1.0, per_second=0.0)) as rig:
        for _ in range(5):
            await rig.run(make_request("alone"))
        await rig.run(make_request("pair"))
        assert rig.records[-1].outcome == "completed"


# Not executed ---------------------------------------------------------------------------------------------


async def test_what_was_not_executed_costs_no_budget(autojump_clock: MockClock) -> None:
    empty = RetryBudget(0.0, size=0.0, per_second=0.0)
    async with rigged(FULL, unreachable(), GOOD, workers=three_workers(), budget=empty) as rig:
        running = await rig.run()
        assert is_whole(running.client)
        assert rig.engine.workers == ["w1", "w2", "w3"]
        assert rig.books.retries == {"overloaded": 1, "unreachable": 1}


async def test_every_try_counts_toward_the_most_that_are_made(autojump_clock: MockClock) -> None:
    async with rigged(FULL, workers=three_workers(), max_attempts=2) as rig:
        running = await rig.run()
        assert rig.engine.workers == ["w1", "w2"]
        assert running.client.problem is not None
        assert running.client.problem.code == "engine_overloaded"
        assert rig.record.attempts == 2


async def test_the_only_worker_is_tried_again_when_its_time_is_over(autojump_clock: MockClock) -> None:
    async with rigged(SLOW_FULL, GOOD, workers=one_worker()) as rig:
        running = await rig.run()
        assert is_whole(running.client)
        assert [attempt.at for attempt in rig.engine.attempts] == [0, 5]
        assert running.placed == 1
        assert rig.record.placed_at == rig.record.arrived_at  # the first time


async def test_between_two_tries_it_waits_and_holds_nothing(autojump_clock: MockClock) -> None:
    async with rigged(SLOW_FULL, GOOD, workers=one_worker()) as rig:
        running = rig.start()
        await trio.sleep(2)
        counts = rig.workers.admission.statistics()
        assert (counts.held, counts.draining, counts.queued) == (0, 0, 1)
        assert (rig.books.waiting, rig.books.running) == (1, 0)
        assert running.placed == 1


async def test_a_wait_that_is_too_long_is_not_begun(autojump_clock: MockClock) -> None:
    long = error_answer(429, "slow down", headers=(("retry-after", "90"),))
    workers = one_worker(limits=AdmissionLimits(10, MiB, 60.0))
    async with rigged(long, workers=workers) as rig:
        running = await rig.run()
        problem = running.client.problem
        assert problem is not None
        assert running.ended_after == 0
        assert (problem.status, problem.code, problem.type) == (429, "engine_overloaded", "rate_limit_error")
        assert problem.message == "slow down"
        assert problem.retry_after == 90
        assert rig.record.outcome == "refused"


async def test_who_is_refused_in_the_queue_after_a_try_gets_the_last_class_met(
    autojump_clock: MockClock,
) -> None:
    limit = error_answer(429, "slow down", headers=(("retry-after", "5"),))
    workers = one_worker(limits=AdmissionLimits(10, MiB, 12.0))
    async with rigged(limit, workers=workers, max_attempts=10, heartbeat_after=0) as rig:
        running = await rig.run()
        assert running.client.problem is not None
        assert (running.client.problem.status, running.client.problem.code) == (429, "engine_overloaded")
        assert [attempt.at for attempt in rig.engine.attempts] == [0, 5, 10]
        assert running.ended_after == 10  # the next try would come too late


async def test_who_waits_for_another_try_until_its_deadline_gets_the_last_class_met_too(
    autojump_clock: MockClock,
) -> None:
    """The worker is back, but its only slot is somebody else's for longer than this one has."""
    full = error_answer(429, "slow down", headers=(("retry-after", "2"),))

    def play(attempt: FakeAttempt) -> FakeScript:
        return full if attempt.request.model == "m1" else (Wait(60), *GOOD)

    workers = WorkerSet(make_worker("w1", slots=1), models=["m1", "m2"])
    async with rigged(play, workers=workers, heartbeat_after=0) as rig:
        refused = rig.start(make_request("m1", seconds=20))
        await trio.sleep(1)
        rig.start(make_request("m2"))
        await refused.over.wait()
        assert refused.ended_after == 20
        assert refused.client.problem is not None
        assert (refused.client.problem.status, refused.client.problem.code) == (429, "engine_overloaded")
        assert refused.client.problem.message == "slow down"
        assert (refused.client.problem.retry_after or 0) >= 1
        assert rig.records[0].outcome == "refused"


async def test_one_that_is_sent_back_stands_in_front_of_those_who_came_later(
    autojump_clock: MockClock,
) -> None:
    one_slot = WorkerSet(make_worker("w1", slots=1))
    async with rigged(SLOW_FULL, GOOD, workers=one_slot) as rig:
        first = rig.start()
        await wait_all_tasks_blocked()
        second = rig.start()
        await second.over.wait()
        ids = [attempt.request.exchange_id for attempt in rig.engine.attempts]
        assert ids == [r.exchange.request.exchange_id for r in (first, first, second)]


async def test_a_retry_after_date_is_read_by_the_wall_clock(autojump_clock: MockClock) -> None:
    date = error_answer(503, headers=(("retry-after", "Tue, 14 Nov 2023 22:13:27 GMT"),))
    async with rigged(date, GOOD, workers=one_worker()) as rig:
        await rig.run()
        assert [attempt.at for attempt in rig.engine.attempts] == [0, 7]


async def test_a_worker_without_room_is_not_offered_to_the_next_request(autojump_clock: MockClock) -> None:
    async with rigged(SLOW_FULL, GOOD) as rig:
        await rig.run()
        await rig.run()
        assert rig.engine.workers == ["w1", "w2", "w2"]
        await trio.sleep(5)
        await rig.run()
        assert rig.engine.workers[-1] == "w1"


async def test_the_trial_that_fails_puts_the_worker_out_again(autojump_clock: MockClock) -> None:
    async with rigged(FULL, FULL, FULL, GOOD, workers=one_worker(), max_attempts=9) as rig:
        running = await rig.run()
        assert is_whole(running.client)
        assert [attempt.at for attempt in rig.engine.attempts] == [0, 1, 3, 7]


async def test_a_trial_that_its_client_leaves_lets_the_next_one_try(autojump_clock: MockClock) -> None:
    async with rigged(SLOW_FULL, (Hold(),), GOOD, workers=one_worker()) as rig:
        trial = rig.start()
        await trio.sleep(6)
        assert len(rig.engine.attempts) == 2
        waiting = rig.start()
        await trio.sleep(1)
        assert len(rig.engine.attempts) == 2  # one exchange tries first
        trial.client.leave()
        await waiting.over.wait()
        assert is_whole(waiting.client)


async def test_with_no_worker_at_all_a_request_is_turned_away(autojump_clock: MockClock) -> None:
    async with rigged(workers=WorkerSet(models=["m1"])) as rig:
        running = await rig.run()
        assert running.client.problem is not None
        assert running.client.problem.code == "no_worker"
        assert running.client.extra is None  # it was never accepted
        assert rig.books.turned_away == {"no_worker": 1}
        assert (rig.books.accepted, rig.records) == (0, [])


# Early headers --------------------------------------------------------------------------------------------


async def test_after_early_headers_it_is_still_tried_again(autojump_clock: MockClock) -> None:
    slow_failure: FakeScript = (Wait(15), *BROKEN)
    async with rigged(slow_failure, GOOD) as rig:
        running = await rig.run()
        assert running.client.comments == 1
        assert text_of(running.client) == "good"
        assert is_whole(running.client)


async def test_a_role_of_a_failed_attempt_dies_with_it(autojump_clock: MockClock) -> None:
    role_only = (Head(), chat_chunk({"role": "assistant"}), Wait(15), CloseReset())
    async with rigged(role_only, GOOD) as rig:
        running = await rig.run()
        assert running.client.received.count(b'"role"') == 1
        assert is_whole(running.client)


async def test_after_early_headers_a_final_failure_is_an_event(autojump_clock: MockClock) -> None:
    async with rigged((Wait(15), *BROKEN)) as rig:
        running = await rig.run()
        assert running.client.problem is None
        assert error_of(running.client)["code"] == "engine_failed"
        assert error_of(running.client)["gateway"]["phase"] == "before_content"
        assert running.client.finished
        assert b"[DONE]" not in running.client.events
        record = rig.record
        assert (record.status, record.phase, record.outcome) == (200, "before_content", "upstream_failed")


async def test_after_early_headers_a_refusal_is_an_event_with_its_class(autojump_clock: MockClock) -> None:
    async with rigged((Wait(15), *error_answer(400, "too long"))) as rig:
        client = RecordingClient()
        await rig.run(client=client)
        assert error_of(client)["message"] == "too long"
        assert (rig.record.outcome, rig.record.code) == ("refused", "invalid_value")


@pytest.mark.parametrize("heartbeat_after", [0.0, 10.0])
async def test_waiting_for_the_first_time_the_client_gets_nothing(
    heartbeat_after: float, autojump_clock: MockClock
) -> None:
    one_slot = WorkerSet(make_worker("w1", slots=1))
    async with rigged((Wait(25), *GOOD), GOOD, workers=one_slot, heartbeat_after=heartbeat_after) as rig:
        first = rig.start()
        await wait_all_tasks_blocked()
        second = rig.start()
        await trio.sleep(24)
        assert first.client.comments == (2 if heartbeat_after else 0)
        assert not second.client.begun
