"""An agent beside a simulated engine: what it takes, what it answers, and when a slot is free again."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from tests.agent.rig import Running, envelope, records, running, said
from trio_gateway.agent import HowEnded
from trio_gateway.agent.engines import Limits, SimulatedEngine, Speed
from trio_gateway.testing import RawClient, until
from trio_gateway.wire import REJECTIONS

SLOW = Speed(decode=10.0)
LONG: dict[str, Any] = {"max_tokens": 4000, "simulate": {"tokens": 4000}}


def engine(slots: int = 2, **settings: Any) -> SimulatedEngine:
    return SimulatedEngine(("m",), limits=Limits(slots=slots), **settings)


def faulty(*faults: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"simulate": {"faults": list(faults)}, **fields}


async def released(events: RawClient) -> dict[str, Any]:
    """Read the first line of a stream of events."""
    await events.read_until(b'"released"')
    (line,) = (line for line in events.answers[0].body.splitlines() if line)
    told: dict[str, Any] = json.loads(line)["released"]
    return told


# Answers ----------------------------------------------------------------------------------------------------


async def test_a_stream_is_records_in_the_order_of_the_grammar(autojump_clock: MockClock) -> None:
    async with running(engine()) as run:
        answer = await run.generate(max_tokens=5)
        assert answer.status == 200
        assert answer.header("content-type") == "application/x-ndjson"
        assert answer.ended == "complete"
        kinds = [record["t"] for record in records(answer)]
        assert (kinds[0], kinds[-1]) == ("accepted", "end")
        assert kinds.count("delta") == 5
        assert kinds.count("finish") == 1
        assert records(answer)[0]["slot"] == 0


async def test_a_buffered_answer_is_a_result(autojump_clock: MockClock) -> None:
    async with running(engine()) as run:
        answer = await run.generate(stream=False, max_tokens=3)
        kinds = [record["t"] for record in records(answer)]
        assert kinds == ["accepted", "result", "end"]
        result = records(answer)[1]
        assert result["status"] == 200
        assert result["body"]["choices"][0]["finish_reason"] == "length"


async def test_attempts_follow_each_other_on_one_connection(autojump_clock: MockClock) -> None:
    async with running(engine()) as run:
        with await run.connect() as client:
            for number in range(1, 4):
                await run.ask(client, attempt=number, max_tokens=3)
                answer = await client.read_to_end()
                assert records(answer)[-1] == {"t": "end"}
                assert records(answer)[0]["slot"] == 0


async def test_choices_are_counted_from_the_body(autojump_clock: MockClock) -> None:
    async with running(engine()) as run:
        answer = await run.generate(max_tokens=2, n=2)
        assert {record["i"] for record in records(answer) if record["t"] == "finish"} == {0, 1}
        assert records(answer)[-1] == {"t": "end"}


async def test_an_engine_s_failure_is_the_last_record(autojump_clock: MockClock) -> None:
    async with running(engine()) as run:
        answer = await run.generate(**faulty({"kind": "die", "after": 2}))
        assert answer.ended == "complete"
        assert records(answer)[-1]["t"] == "error"
        assert [record["t"] for record in records(answer)].count("delta") == 2
        assert len(run.agent.slots) == 0


async def test_silence_is_filled_with_pings_that_count(autojump_clock: MockClock) -> None:
    async with running(engine(), ping_interval=5.0) as run:
        with await run.connect() as client:
            await run.ask(client, **faulty({"kind": "hang", "after": 3}))
            with trio.move_on_after(12):
                await client.read_to_end()
            pings = [record for record in records(client.answers[0]) if record["t"] == "ping"]
            assert pings == [{"t": "ping", "generated": 3, "paused": False}] * 2


# Admission --------------------------------------------------------------------------------------------------


async def rejected(run: Running, **changes: Any) -> tuple[int, str, dict[str, Any]]:
    answer = await run.generate(**changes)
    body: dict[str, Any] = answer.json()
    return answer.status, str(body["rejected"]), body["worker"]


async def test_a_full_worker_rejects_before_any_work_and_says_how_it_is(autojump_clock: MockClock) -> None:
    simulated = engine(slots=1)
    async with running(simulated) as run:
        with await run.connect() as client:
            await run.ask(client, **LONG)
            await client.read_until(b'"delta"')
            status, code, worker = await rejected(run, request_id="b")
            assert (status, code) == (429, "capacity")
            assert (worker["slots"], worker["running"], worker["state"]) == (1, 1, "ready")
            assert "requests" not in worker
            client.leave_fin()
        await run.agent.slots.wait_none()
        assert (await run.generate(request_id="b", max_tokens=1)).status == 200


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"model": "other"}, "model_not_loaded"),
        ({"model": "broken"}, "model_load_failed"),
        ({"deadline_ms": 0}, "deadline"),
        (faulty({"kind": "refuse"}), "capacity"),
    ],
)
async def test_what_can_not_be_served_has_a_typed_rejection(
    changes: dict[str, Any], code: str, autojump_clock: MockClock
) -> None:
    async with running(engine(failed_models=("broken",))) as run:
        status, told, worker = await rejected(run, **changes)
        assert (status, told) == (REJECTIONS[code], code)
        assert worker["models"] == ["m"]
        assert len(run.agent.slots) == 0


async def test_an_engine_that_still_loads_takes_nothing(autojump_clock: MockClock) -> None:
    async with running(engine(speed=Speed(load=30.0))) as run:
        assert run.agent.state == "starting"
        assert (await rejected(run))[:2] == (503, "engine_unready")
        assert (await run.answer("GET", "/readyz")).status == 503
        assert (await run.answer("GET", "/livez")).status == 200
        await trio.sleep(31)
        assert (await run.generate(max_tokens=1)).status == 200
        assert (await run.answer("GET", "/readyz")).status == 200


@pytest.mark.parametrize(
    ("load", "told"), [(2.0, ["engine_ready"]), (9.0, ["engine_not_ready", "engine_ready"])]
)
async def test_an_engine_that_takes_long_to_begin_is_logged_once(
    load: float, told: list[str], autojump_clock: MockClock
) -> None:
    async with running(engine(speed=Speed(load=load))) as run:
        await trio.sleep(20)
        assert [event for _, event, _ in run.said if event.startswith("engine_")] == told


async def test_numbers_of_reports_grow(autojump_clock: MockClock) -> None:
    async with running(engine()) as run:
        numbers = [(await rejected(run, model="other"))[2]["seq"] for _ in range(3)]
        assert numbers == sorted(set(numbers))


# Who may call, and what -------------------------------------------------------------------------------------


@pytest.mark.parametrize("secret", ["", "t" * 32, "s" * 31, "s" * 33])
async def test_only_who_has_the_secret_is_served(secret: str, autojump_clock: MockClock) -> None:
    async with running(engine()) as run:
        for method, path in (
            ("POST", "/internal/v1/generate"),
            ("GET", "/internal/v1/events"),
            ("POST", "/internal/v1/requests/a/1/cancel"),
        ):
            answer = await run.answer(method, path, envelope() if method == "POST" else None, secret=secret)
            assert answer.status == 401
            assert answer.header("connection") == "close"


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/internal/v1/generate", None, 404),
        ("POST", "/internal/v1/other", {}, 404),
        ("POST", "/internal/v1/generate", b"{", 400),
        ("POST", "/internal/v1/generate", envelope(attempt=0), 400),
        ("POST", "/internal/v1/generate", envelope(operation="dance"), 400),
        ("POST", "/internal/v1/generate", envelope(operation="embeddings"), 400),
        ("POST", "/internal/v1/generate", envelope(n="x"), 400),
        ("POST", "/internal/v1/generate", {**envelope(), "content_type": "multipart/form-data"}, 400),
        ("POST", "/internal/v1/generate", {**envelope(), "protocol": 2}, 400),
        ("POST", "/internal/v1/requests/a/0/cancel", {}, 404),
        ("POST", "/internal/v1/requests/a/1/cancel", {}, 404),
    ],
)
async def test_what_is_no_call_of_the_protocol_is_refused(
    method: str, path: str, body: object, status: int, autojump_clock: MockClock
) -> None:
    async with running(engine()) as run:
        assert (await run.answer(method, path, body)).status == status
        assert (await run.generate(max_tokens=1)).status == 200


async def test_a_body_over_the_bound_is_refused(autojump_clock: MockClock) -> None:
    async with running(engine(), body_bytes=1000) as run:
        assert (await run.generate(user="x" * 1000)).status == 413


async def test_bytes_that_are_no_http_are_answered_and_cut_off(autojump_clock: MockClock) -> None:
    async with running(engine()) as run:
        with await run.connect() as client:
            await client.send(b"hello\r\n\r\n")
            await client.read_closed()
            assert client.received.startswith(b"HTTP/1.1 400 ")


async def test_a_body_that_does_not_come_is_not_waited_for(autojump_clock: MockClock) -> None:
    async with running(engine()) as run:
        with await run.connect() as client:
            head = f"POST /internal/v1/generate HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {'s' * 32}\r\n"
            await client.send(head.encode() + b"content-length: 9\r\n\r\n{")
            await client.read_closed()
            assert client.received.startswith(b"HTTP/1.1 408 ")
        with await run.connect() as silent:
            await silent.read_closed()


async def test_one_attempt_is_served_once_at_a_time(autojump_clock: MockClock) -> None:
    async with running(engine()) as run:
        with await run.connect() as client:
            await run.ask(client, **LONG)
            await client.read_until(b'"delta"')
            assert (await run.generate()).status == 409
            assert (await run.generate(attempt=2, max_tokens=1)).status == 200


# Letting go -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["fin", "reset", "cancel"])
async def test_an_attempt_that_nobody_wants_is_cancelled_and_its_release_pushed(
    way: str, autojump_clock: MockClock
) -> None:
    simulated = engine(slots=1)
    async with running(simulated) as run:
        with await run.connect() as events, await run.connect() as client:
            await run.send(events, "GET", "/internal/v1/events")
            await events.read_head()
            await run.ask(client, **LONG)
            await client.read_until(b'"delta"')
            if way == "cancel":
                answer = await run.answer("POST", f"/internal/v1/requests/{'a' * 32}/1/cancel", {})
                assert (answer.status, answer.json()) == (202, {"known": True})
                assert await client.read_closed()
                assert client.answers[0].was_cut
            elif way == "fin":
                client.leave_fin()
            else:
                client.leave_reset()
            told = await released(events)
            assert (told["id"], told["attempt"], told["kv_released"]) == ("a" * 32, 1, True)
            assert 1 <= told["generated"] < 4000
            assert simulated.core.running == 0
            again = await run.answer("POST", f"/internal/v1/requests/{'a' * 32}/1/cancel", {})
            assert (again.status, again.json()) == (404, {"known": False})


async def test_a_slot_is_held_until_the_engine_has_let_go(autojump_clock: MockClock) -> None:
    simulated = engine(slots=1)
    async with running(simulated) as run:
        with await run.connect() as events, await run.connect() as client:
            await run.send(events, "GET", "/internal/v1/events")
            await events.read_head()
            await run.ask(client, **faulty({"kind": "late_release", "seconds": 20}, max_tokens=4000))
            await client.read_until(b'"delta"')
            client.leave_fin()
            await trio.sleep(10)
            assert [each.attempt for each in run.agent.report().requests or ()] == [1]
            assert (await rejected(run, request_id="b"))[1] == "capacity"
            assert simulated.core.running == 1
            await released(events)
            assert trio.current_time() >= 20
            assert run.agent.report().requests == []
            assert (await run.generate(request_id="b", max_tokens=1)).status == 200


async def test_the_end_of_an_answer_means_that_the_slot_is_free(autojump_clock: MockClock) -> None:
    async with running(engine(slots=1)) as run:
        with await run.connect() as client:
            await run.ask(client, max_tokens=3)
            await client.read_until(b'"end"')
            assert len(run.agent.slots) == 0


async def test_a_gateway_hears_only_of_its_own_attempts(autojump_clock: MockClock) -> None:
    async with running(engine()) as run:
        run.agent._credentials.learn("other", "o" * 32)
        with await run.connect() as events, await run.connect() as others:
            await run.send(events, "GET", "/internal/v1/events")
            await run.send(others, "GET", "/internal/v1/events", secret="o" * 32)
            await events.read_head()
            await others.read_head()
            await run.answer("POST", "/internal/v1/generate", envelope("b", max_tokens=1), secret="o" * 32)
            await run.generate(max_tokens=1)
            assert (await released(events))["id"] == "a" * 32
            assert (await released(others))["id"] == "b"


async def test_a_stream_of_events_stays_alive_with_blank_lines(autojump_clock: MockClock) -> None:
    async with running(engine()) as run:
        with await run.connect() as events:
            await run.send(events, "GET", "/internal/v1/events")
            with trio.move_on_after(25):
                await events.read_to_end()
            assert events.answers[0].body == b"\n\n\n"
            assert not events.answers[0].was_cut


async def test_the_deadline_ends_an_attempt_that_nobody_ends(autojump_clock: MockClock) -> None:
    async with running(engine(slots=1)) as run:
        began = trio.current_time()
        with await run.connect() as client:
            await run.ask(client, deadline_ms=5000, **faulty({"kind": "hang", "after": 1}))
            await client.read_closed()
            assert client.answers[0].was_cut
        await run.agent.slots.wait_none()
        assert 5 < trio.current_time() - began < 7


# Slow readers -----------------------------------------------------------------------------------------------

WORDY: dict[str, Any] = {"deadline_ms": 500_000, "max_tokens": 8000, "simulate": {"tokens": 8000}}


async def test_a_reader_that_takes_nothing_pauses_the_engine_and_loses_nothing(
    autojump_clock: MockClock,
) -> None:
    simulated = SimulatedEngine(("m",), limits=Limits(slots=1), speed=Speed(decode=1000.0))
    async with running(simulated, buffer_bytes=4096) as run:
        with await run.connect(receive_buffer=4096) as client:
            await run.ask(client, **WORDY)
            await trio.sleep(60)
            (generation,) = simulated.core.generations
            assert generation.paused
            stuck = generation.generated
            assert stuck < 8000
            await trio.sleep(20)
            assert generation.generated == stuck
            (told,) = run.agent.slots.running()
            assert (told.generated, told.paused) == (stuck, True)
            answer = await client.read_to_end()
            pauses = [record for record in records(answer) if record["t"] == "ping"]
            assert pauses
            assert all(pause["paused"] for pause in pauses)
            assert stuck in [pause["generated"] for pause in pauses]
            kinds = [record["t"] for record in records(answer)]
            assert kinds.count("delta") == 8000
            assert kinds[-1] == "end"
            assert said(answer).count(" ") > 5000


# Draining ---------------------------------------------------------------------------------------------------


async def test_a_drain_lets_run_what_runs_and_takes_nothing_new(autojump_clock: MockClock) -> None:
    async with running(engine()) as run:
        with await run.connect() as client:
            await run.ask(client, max_tokens=200, simulate={"tokens": 200})
            await client.read_until(b'"delta"')
            run.agent.drain()
            assert (await rejected(run, request_id="b"))[:2] == (503, "draining")
            assert (await run.answer("GET", "/readyz")).status == 503
            answer = await client.read_to_end()
            assert records(answer)[-1] == {"t": "end"}
            await run.over.wait()
            assert run.ended is HowEnded.DRAINED
            with pytest.raises(OSError, match="refused"):
                await run.connect()


@pytest.mark.parametrize("hurried", [True, False])
async def test_what_does_not_end_within_the_grace_is_cut(hurried: bool, autojump_clock: MockClock) -> None:
    async with running(engine(), grace=20.0) as run:
        began = trio.current_time()
        with await run.connect() as client:
            await run.ask(client, **faulty({"kind": "hang", "after": 1}))
            await client.read_until(b'"delta"')
            run.agent.drain()
            if hurried:
                await trio.sleep(1)
                run.agent.drain()
            await client.read_closed()
            assert client.answers[0].was_cut
            await run.over.wait()
        assert (1 if hurried else 20) <= trio.current_time() - began < (4 if hurried else 24)


async def test_late_requests_are_turned_away_while_the_agent_ends(autojump_clock: MockClock) -> None:
    async with running(engine()) as run:
        with await run.connect() as client:
            await client.request("GET", "/livez")
            await client.read_to_end()
            run.agent.drain()
            await until(lambda: run.agent.state == "stopping")
            await run.ask(client)
            answer = await client.read_to_end()
            assert answer.json()["rejected"] == "shutting_down"
        await run.over.wait()


async def test_an_answer_that_is_still_being_taken_keeps_the_agent_alive(autojump_clock: MockClock) -> None:
    simulated = SimulatedEngine(("m",), limits=Limits(slots=1), speed=Speed(decode=10_000.0))
    async with running(simulated) as run:
        with await run.connect(receive_buffer=4096) as client:
            await run.ask(client, max_tokens=6000, simulate={"tokens": 6000})
            await until(lambda: len(run.agent.slots) == 1)
            await run.agent.slots.wait_none()
            run.agent.drain()
            answer = await client.read_to_end()
            assert records(answer)[-1] == {"t": "end"}
        await run.over.wait()
