"""Before anything was told, a failed attempt may go elsewhere: which, how often, and when."""

from __future__ import annotations

import time
from email.utils import formatdate

import pytest
import trio

from tests.e2e.serving import error_code, serving
from trio_gateway.testing import (
    DONE,
    Answer,
    CloseFin,
    CloseReset,
    EndChunks,
    Json,
    Script,
    ScriptedEngine,
    WaitFor,
    chat_answer,
    chat_chunk,
    chat_request,
    chat_stream,
    error_answer,
    error_event,
    good_answer,
    open_engine,
    refusing_port,
)

HEAD, ROLE, ONE = chat_stream("one")[:3]
BUSY = error_answer(503)
BROKEN = error_answer(500)
BACKOFF = {"backoff": 0.05}


def busy_for(seconds: float, status: int = 503) -> Script:
    return error_answer(status, headers=(("retry-after", f"{seconds:g}"),))


def attempts(*engines: ScriptedEngine) -> list[int]:
    return [engine.statistics().requests for engine in engines]


# Attempts that were not executed ----------------------------------------------------------------------------


UNEXECUTED: dict[str, Script] = {
    "503": BUSY,
    "429": error_answer(429),
    "503 in a stream": (HEAD, ROLE, error_event("full", code=503), DONE, EndChunks()),
    "429 in a stream": (HEAD, error_event("full", code=429), DONE, EndChunks()),
    "an abort": (HEAD, ROLE, chat_chunk({}, finish="abort"), DONE, EndChunks()),
}


@pytest.mark.parametrize("script", UNEXECUTED.values(), ids=UNEXECUTED.keys())
async def test_what_no_engine_executed_goes_to_another_and_costs_nothing(script: Script) -> None:
    async with (
        open_engine(script) as first,
        open_engine() as second,
        serving(first, second, retry={"budget_ratio": 0}) as gateway,
    ):
        answer = await gateway.ask(chat_request())
        reading = answer.chat()
        assert (reading.text, reading.done, reading.roles) == ("ok", 1, {0: 1})
        record = await gateway.settled()
        assert (record.outcome, record.attempts, record.worker) == ("completed", 2, "w2")
        assert gateway.gateway.fleet.books["w1"].faults == 0
        assert sum(gateway.gateway.books.retries.values()) == 1


async def test_a_worker_that_refuses_connections_is_passed_over() -> None:
    with refusing_port() as port:
        async with (
            open_engine() as second,
            serving(f"http://127.0.0.1:{port}", second, retry={"budget_ratio": 0}) as gateway,
        ):
            for stream in (True, False):
                answer = await gateway.ask(chat_request(stream=stream))
                assert answer.status == 200
            await gateway.settled(2)
            # The second one knows: a worker that failed is taken only where there is no other.
            assert [record.attempts for record in gateway.records] == [2, 1]
            assert gateway.gateway.fleet.books["w1"].faults == 1


async def test_a_worker_without_room_is_left_alone_for_a_while() -> None:
    async with (
        open_engine(BUSY) as first,
        open_engine() as second,
        serving(first, second, retry={"backoff": 60}) as gateway,
    ):
        for _ in range(3):
            assert (await gateway.ask(chat_request())).status == 200
        assert attempts(first, second) == [1, 3]


async def test_with_one_worker_the_exchange_waits_in_front_until_it_may_try_again() -> None:
    async with (
        open_engine(BUSY, good_answer) as engine,
        serving(engine, retry=BACKOFF) as gateway,
    ):
        assert (await gateway.ask(chat_request())).chat().text == "ok"
        first, second = engine.requests
        assert second.arrived - first.arrived >= 0.05
        record = await gateway.settled()
        assert (record.outcome, record.attempts) == ("completed", 2)


async def test_attempts_are_bounded_and_the_last_word_stays() -> None:
    async with open_engine(BUSY) as engine, serving(engine, retry=BACKOFF) as gateway:
        answer = await gateway.ask(chat_request())
        assert (answer.status, error_code(answer)) == (503, "engine_overloaded")
        assert int(answer.header("retry-after") or "") >= 1
        assert answer.header("x-should-retry") is None
        record = await gateway.settled()
        assert (record.outcome, record.attempts, record.code) == ("refused", 3, "engine_overloaded")
        assert engine.statistics().requests == 3


@pytest.mark.parametrize("form", ["seconds", "date"])
async def test_a_retry_after_is_honoured(form: str) -> None:
    # A date has whole seconds, so one that is two of them ahead may be little more than one away.
    asked = "1" if form == "seconds" else formatdate(time.time() + 2, usegmt=True)
    script = error_answer(503, headers=(("retry-after", asked),))
    async with open_engine(script, good_answer) as engine, serving(engine, retry=BACKOFF) as gateway:
        assert (await gateway.ask(chat_request())).chat().text == "ok"
        first, second = engine.requests
        assert second.arrived - first.arrived >= 1.0


@pytest.mark.parametrize("asked", ["soon", "-1", "", "1e3", "Thu, 01 Jan 1970 00:00:00 GMT"])
async def test_a_retry_after_that_says_nothing_counts_as_absent(asked: str) -> None:
    script = error_answer(503, headers=(("retry-after", asked),))
    async with open_engine(script, good_answer) as engine, serving(engine, retry=BACKOFF) as gateway:
        assert (await gateway.ask(chat_request())).chat().text == "ok"
        assert (await gateway.settled()).attempts == 2


async def test_if_no_worker_can_be_tried_in_time_the_answer_goes_out_at_once() -> None:
    async with (
        open_engine(busy_for(40)) as first,
        open_engine(busy_for(90, 429)) as second,
        serving(first, second) as gateway,
    ):
        for number in (1, 2):
            answer = await gateway.ask(chat_request(headers=(("x-gateway-timeout-ms", "30000"),)))
            assert (answer.status, error_code(answer)) == (429, "engine_overloaded")
            assert 80 <= int(answer.header("retry-after") or "") <= 90
            assert attempts(first, second) == [1, 1], number


async def test_after_an_outage_one_exchange_tries_first_and_the_others_follow_on_its_output(
    nursery: trio.Nursery,
) -> None:
    go = trio.Event()
    async with (
        open_engine(BUSY, (HEAD, WaitFor(go), *chat_stream("ok")[1:]), good_answer) as engine,
        serving(engine, retry=BACKOFF) as gateway,
    ):
        nursery.start_soon(gateway.ask, chat_request())
        await gateway.queued(1)
        for depth in (2, 3):
            nursery.start_soon(gateway.ask, chat_request())
            await gateway.queued(depth)
        await engine.request(2)
        with trio.move_on_after(0.2) as early:
            await engine.request(3)
        assert early.cancelled_caught
        assert gateway.depth == 2
        go.set()
        await gateway.settled(3)
        assert [record.outcome for record in gateway.records] == ["completed"] * 3


async def test_a_model_that_a_worker_does_not_know_is_asked_of_another() -> None:
    async with (
        open_engine(error_answer(404, "model m1 does not exist")) as first,
        open_engine() as second,
        serving(first, second) as gateway,
    ):
        assert (await gateway.ask(chat_request())).chat().text == "ok"
        second.rescript(error_answer(404, "nor here"))
        answer = await gateway.ask(chat_request())
        assert (answer.status, error_code(answer)) == (404, "model_not_found")
        assert answer.error()["message"] == "nor here"
        assert gateway.gateway.fleet.books["w1"].faults == 0


# Attempts that may have been executed -----------------------------------------------------------------------


FAILED_ONCE: dict[str, Script] = {
    "500": BROKEN,
    "closed": (CloseFin(),),
    "reset": (CloseReset(),),
    "cut after the role": (HEAD, ROLE, CloseFin()),
    "ended after the role": (HEAD, ROLE, EndChunks()),
    "done after the role": (HEAD, ROLE, DONE, EndChunks()),
    "an error event": (HEAD, ROLE, error_event(), DONE, EndChunks()),
    "another type": (Json({}),),
}


@pytest.mark.parametrize("script", FAILED_ONCE.values(), ids=FAILED_ONCE.keys())
async def test_other_failures_are_repeated_once_on_another_worker(script: Script) -> None:
    async with (
        open_engine(script) as first,
        open_engine() as second,
        serving(first, second) as gateway,
    ):
        reading = (await gateway.ask(chat_request())).chat()
        assert (reading.text, reading.done, reading.roles) == ("ok", 1, {0: 1})
        record = await gateway.settled()
        assert (record.outcome, record.attempts, record.worker) == ("completed", 2, "w2")
        assert gateway.gateway.fleet.books["w1"].faults == 1
        assert gateway.gateway.fleet.books["w2"].faults == 0


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "buffered"])
async def test_the_second_failure_is_the_last_word(stream: bool) -> None:
    async with (
        open_engine(BROKEN) as first,
        open_engine(BROKEN) as second,
        open_engine() as third,
        serving(first, second, third) as gateway,
    ):
        answer = await gateway.ask(chat_request(stream=stream))
        assert (answer.status, error_code(answer)) == (502, "engine_failed")
        assert answer.header("x-should-retry") == "false"
        assert answer.header("retry-after") is None
        assert attempts(first, second, third) == [1, 1, 0]


async def test_without_another_worker_a_failure_is_not_repeated() -> None:
    async with open_engine(BROKEN, good_answer) as engine, serving(engine) as gateway:
        answer = await gateway.ask(chat_request())
        assert (answer.status, answer.header("x-should-retry")) == (502, None)
        assert engine.statistics().requests == 1


async def test_an_unexecuted_attempt_does_not_use_up_the_one_repetition() -> None:
    async with (
        open_engine(BUSY) as first,
        open_engine(BROKEN) as second,
        open_engine() as third,
        serving(first, second, third) as gateway,
    ):
        assert (await gateway.ask(chat_request())).chat().text == "ok"
        assert attempts(first, second, third) == [1, 1, 1]


NEVER_REPEATED: dict[str, Script] = {
    "400": error_answer(400),
    "422": error_answer(422),
    "501": error_answer(501),
    "401": error_answer(401),
    "302": error_answer(302),
    "400 in a stream": (HEAD, error_event("bad", code=400), EndChunks()),
    "out of memory": error_answer(500, "CUDA out of memory"),
    "after content": (HEAD, ROLE, ONE, CloseFin()),
}


@pytest.mark.parametrize("script", NEVER_REPEATED.values(), ids=NEVER_REPEATED.keys())
async def test_what_would_fail_again_or_was_told_already_is_not_repeated(script: Script) -> None:
    async with (
        open_engine(script) as first,
        open_engine() as second,
        serving(first, second) as gateway,
    ):
        await gateway.ask(chat_request())
        assert attempts(first, second) == [1, 0]
        assert (await gateway.settled()).attempts == 1


async def test_repetitions_are_paid_from_a_budget() -> None:
    answers: list[Answer] = []
    async with (
        open_engine(BROKEN) as first,
        open_engine(BROKEN) as second,
        serving(
            first,
            second,
            worker={"slots": 64},
            retry={"budget_ratio": 0},
            breaker={"consecutive_faults": 1000, "window": 0.001},
        ) as gateway,
    ):

        async def ask() -> None:
            answers.append(await gateway.ask(chat_request(stream=False)))

        # All at once, so that what time fills in (3 a second) does not pay for all of them.
        async with trio.open_nursery() as asking:
            for _ in range(60):
                asking.start_soon(ask)
        repeated = gateway.gateway.books.retries["error"]
        assert [answer.status for answer in answers] == [502] * 60
        assert 10 <= repeated < 60
        assert first.statistics().requests + second.statistics().requests == 60 + repeated


async def test_a_stream_that_only_said_heartbeats_may_still_be_repeated() -> None:
    go = trio.Event()
    async with (
        open_engine((HEAD, ROLE, WaitFor(go), CloseReset())) as first,
        open_engine() as second,
        serving(first, second, stream={"heartbeat_after": 0.03}) as gateway,
    ):
        with trio.fail_after(10), await gateway.connect() as client:
            await client.send(chat_request())
            await client.read_until(b": keep-alive")
            go.set()
            reading = (await client.read_to_end()).chat()
        assert (reading.text, reading.done, reading.roles, reading.errors) == ("ok", 1, {0: 1}, [])
        assert (await gateway.settled()).attempts == 2


async def test_each_attempt_has_a_name_of_its_own() -> None:
    async with (
        open_engine(BROKEN) as first,
        open_engine() as second,
        serving(first, second, worker={"kind": "vllm"}) as gateway,
    ):
        answer = await gateway.ask(chat_request())
        exchange = answer.header("x-request-id")
        names = [engine.requests[0].header("x-request-id") for engine in (first, second)]
        assert names == [f"{exchange}-01", f"{exchange}-02"]


# A connection that died while nobody used it ----------------------------------------------------------------


@pytest.mark.parametrize("death", [CloseFin(), CloseReset()], ids=["fin", "reset"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "buffered"])
async def test_a_reused_connection_that_dies_before_any_byte_is_replaced_at_once(
    death: CloseFin | CloseReset, stream: bool
) -> None:
    answer = chat_stream("ok") if stream else chat_answer()
    async with open_engine(answer, (death,), answer) as engine, serving(engine) as gateway:
        for _ in range(2):
            assert (await gateway.ask(chat_request(stream=stream))).status == 200
        await gateway.settled(2)
        assert [request.connection for request in engine.requests] == [1, 1, 2]
        assert [record.attempts for record in gateway.records] == [1, 1]
        assert gateway.gateway.fleet.books["w1"].faults == 0
        assert not gateway.gateway.books.retries


async def test_if_the_fresh_connection_dies_too_it_is_a_fault() -> None:
    async with open_engine(chat_stream("ok"), (CloseFin(),)) as engine, serving(engine) as gateway:
        await gateway.ask(chat_request())
        answer = await gateway.ask(chat_request())
        assert (answer.status, error_code(answer)) == (502, "engine_failed")
        assert gateway.gateway.fleet.books["w1"].faults == 1
        assert engine.statistics().requests == 3


async def test_an_idle_connection_that_the_engine_closed_is_not_used() -> None:
    async with open_engine() as engine, serving(engine) as gateway:
        await gateway.ask(chat_request())
        await engine.wait_idle()
        engine.close_connections()
        await engine.wait_disconnected()
        assert (await gateway.ask(chat_request())).chat().text == "ok"
        assert [request.connection for request in engine.requests] == [1, 2]


async def test_a_reused_connection_that_dies_after_a_byte_is_a_failure() -> None:
    async with open_engine(chat_stream("ok"), (HEAD, CloseFin())) as engine, serving(engine) as gateway:
        await gateway.ask(chat_request())
        assert (await gateway.ask(chat_request())).status == 502
        assert engine.statistics().requests == 2
