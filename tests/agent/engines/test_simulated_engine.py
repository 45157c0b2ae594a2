"""The simulated engine behind the agent's port, on a clock that jumps."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from trio_gateway.agent._engine import AgentEngine, EngineStream, Rejected, Work
from trio_gateway.agent.engines import Fault, Limits, PlannedFault, SimulatedEngine, Speed
from trio_gateway.contract import CHAT, COMPLETIONS, EMBEDDINGS
from trio_gateway.wire import (
    Delta,
    EngineRecord,
    Failed,
    Finish,
    Result,
    ToolCall,
    UsageCounts,
)

HELLO = [{"role": "user", "content": "What does the simulated engine say to that?"}]


@asynccontextmanager
async def running(*models: str, **settings: Any) -> AsyncIterator[SimulatedEngine]:
    """An engine that lives for the length of the block and holds nothing at its end."""
    engine = SimulatedEngine(models or ("m",), **settings)
    async with trio.open_nursery() as nursery:
        await nursery.start(engine.run)
        yield engine
        core = engine.core
        assert (core.running, core.waiting, core.memory.held, core.generations) == (0, 0, 0, ())
        nursery.cancel_scope.cancel()


def work(*, stream: bool = True, model: str = "m", operation: str = CHAT.name, **body: Any) -> Work:
    body = {"messages": HELLO, "prompt": "Say it.", **body}
    return Work("e" * 32, 1, operation, model, 60.0, "standard", stream, json.dumps(body).encode())


async def read(stream: EngineStream) -> list[EngineRecord]:
    """Read all records, and wait until nothing is held."""
    records = []
    while (record := await stream.receive()) is not None:
        records.append(record)
    await stream.wait_released()
    return records


def text(records: list[EngineRecord], choice: int = 0) -> str:
    return "".join(r.text for r in records if isinstance(r, Delta) and r.i == choice)


def result(records: list[EngineRecord]) -> Any:
    (record,) = records
    assert isinstance(record, Result)
    assert record.status == 200
    return msgspec.json.decode(record.body)


async def test_it_is_an_engine_as_the_agent_wants_them(autojump_clock: MockClock) -> None:
    engine: AgentEngine = SimulatedEngine(("m",))
    assert (engine.kind, engine.can_pause, bool(engine.version)) == ("simulated", True, True)


async def test_a_stream_has_deltas_a_finish_for_each_choice_and_usage(autojump_clock: MockClock) -> None:
    async with running() as engine:
        stream = await engine.open(work(n=2, max_tokens=5))
        records = await read(stream)
    assert [r.i for r in records if isinstance(r, Finish)] == [0, 1]
    assert {r.reason for r in records if isinstance(r, Finish)} == {"length"}
    assert sum(r.n for r in records if isinstance(r, Delta)) == stream.generated == 10
    assert text(records, 0) != text(records, 1)
    assert isinstance(records[-1], UsageCounts)
    assert records[-1].completion_tokens == 10


async def test_a_buffered_answer_says_what_the_stream_says(autojump_clock: MockClock) -> None:
    async with running() as engine:
        records = await read(await engine.open(work(n=2)))
        answer = result(await read(await engine.open(work(n=2, stream=False))))
    assert [choice["message"]["content"] for choice in answer["choices"]] == [
        text(records, 0),
        text(records, 1),
    ]
    assert answer["object"] == "chat.completion"
    assert answer["id"] == f"chatcmpl-{'e' * 32}-01"
    assert (
        answer["usage"]["total_tokens"]
        == answer["usage"]["prompt_tokens"] + answer["usage"]["completion_tokens"]
    )


async def test_a_repeated_prompt_is_reported_as_cached(autojump_clock: MockClock) -> None:
    async with running(limits=Limits(block_tokens=2)) as engine:
        first = result(await read(await engine.open(work(stream=False))))
        second = result(await read(await engine.open(work(stream=False))))
    assert first["choices"] == second["choices"]
    assert first["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= 4


async def test_a_completion_continues_its_prompt(autojump_clock: MockClock) -> None:
    async with running() as engine:
        records = await read(await engine.open(work(operation=COMPLETIONS.name)))
        answer = result(await read(await engine.open(work(operation=COMPLETIONS.name, stream=False))))
    assert answer["choices"][0]["text"] == text(records) != ""
    assert answer["usage"]["completion_tokens"] == 16


async def test_thinking_and_tool_calls_have_places_of_their_own(autojump_clock: MockClock) -> None:
    tools = [
        {
            "type": "function",
            "function": {
                "name": "weather",
                "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
            },
        }
    ]
    asked: dict[str, Any] = {"tools": tools, "tool_choice": "required"}
    async with running() as engine:
        thought = await read(await engine.open(work(simulate="tokens=6 reasoning=2")))
        called = await read(await engine.open(work(**asked)))
        whole = result(await read(await engine.open(work(stream=False, **asked))))
        both = result(await read(await engine.open(work(stream=False, simulate="tokens=6 reasoning=2"))))
    assert [bool(r.reasoning) for r in thought if isinstance(r, Delta)] == [True, True] + [False] * 4
    calls = [r for r in called if isinstance(r, ToolCall)]
    assert (calls[0].name, calls[1].name) == ("weather", msgspec.UNSET)
    (call,) = whole["choices"][0]["message"]["tool_calls"]
    assert call["function"]["arguments"] == "".join(r.arguments for r in calls)
    assert set(json.loads(call["function"]["arguments"])) == {"city"}
    assert call["id"] == calls[0].id
    assert whole["choices"][0]["finish_reason"] == "tool_calls"
    assert whole["choices"][0]["message"]["content"] is None
    assert both["choices"][0]["message"]["reasoning"].count(" ") == 1


async def test_tokens_that_are_held_back_are_counted_with_the_next_text(autojump_clock: MockClock) -> None:
    async with running() as engine:
        records = await read(
            await engine.open(work(stop=["never said by it"], max_tokens=20, ignore_eos=True))
        )
        free = await read(await engine.open(work(max_tokens=20, ignore_eos=True)))
    assert text(records) == text(free)
    deltas = [r for r in records if isinstance(r, Delta)]
    assert sum(r.n for r in deltas) == 20
    assert len(deltas) < 20


async def test_it_takes_the_time_that_its_speed_says(autojump_clock: MockClock) -> None:
    async with running(speed=Speed(decode=10, prefill=1e9).times(2)) as engine:
        began = trio.current_time()
        await read(await engine.open(work(max_tokens=21, ignore_eos=True)))
        assert trio.current_time() - began == pytest.approx(1.0)


async def test_its_status_counts_requests_that_run_and_wait(autojump_clock: MockClock) -> None:
    async with running(limits=Limits(slots=2)) as engine:
        streams = [await engine.open(work(max_tokens=50, n=2)) for _ in range(3)]
        await streams[0].receive()
        status = engine.status()
        assert (status.ready, status.models, status.slots) == (True, ("m",), 2)
        assert (status.running, status.queued) == (1, 2)
        assert status.kv_usage_ratio is not None
        assert 0 < status.kv_usage_ratio < 1
        for stream in streams:
            await read(stream)
        assert engine.status().tokens_per_second != 0


async def test_a_cancel_ends_the_stream_at_once_and_is_confirmed_when_the_slot_is_free(
    autojump_clock: MockClock,
) -> None:
    async with running() as engine:
        stream = await engine.open(work(simulate="late_release seconds=3", max_tokens=100, ignore_eos=True))
        await stream.receive()
        left = trio.current_time()
        stream.cancel()
        stream.cancel()
        assert await stream.receive() is None
        assert engine.status().running == 1
        released = await stream.wait_released()
        assert trio.current_time() - left == pytest.approx(3.0, abs=0.1)
        assert (released.generated, released.kv_released) == (stream.generated, True)
        assert await stream.wait_released() == released


async def test_a_cancel_wakes_who_waits_for_a_record(autojump_clock: MockClock) -> None:
    async with running() as engine, trio.open_nursery() as nursery:
        stream = await engine.open(work(simulate="hang"))
        nursery.start_soon(read, stream)
        await wait_all_tasks_blocked()
        stream.cancel()


async def test_a_lost_cancel_is_confirmed_only_at_the_natural_end(autojump_clock: MockClock) -> None:
    async with running() as engine:
        stream = await engine.open(work(simulate="lost_cancel", max_tokens=100, ignore_eos=True))
        stream.cancel()
        assert await stream.receive() is None
        assert (await stream.wait_released()).generated == 100


async def test_a_paused_stream_generates_nothing_until_it_is_resumed(autojump_clock: MockClock) -> None:
    async with running() as engine:
        stream = await engine.open(work(max_tokens=20, ignore_eos=True))
        await stream.receive()
        stream.pause()
        await trio.sleep(10)
        had = stream.generated
        assert had < 5
        stream.resume()
        await read(stream)
        assert stream.generated == 20


@pytest.mark.parametrize(
    ("fault", "code"),
    [("die", "engine_failed"), ("out_of_memory", "out_of_memory"), ("malformed", "engine_protocol_error")],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_fault_ends_the_answer_with_its_failure(
    fault: str, code: str, stream: bool, autojump_clock: MockClock
) -> None:
    async with running() as engine:
        asked = await engine.open(
            work(stream=stream, simulate=f"{fault} after=3", max_tokens=900, ignore_eos=True)
        )
        records = await read(asked)
        assert asked.generated in (3, 4)  # a malformed line ends it with the step that is under way
    last = records[-1]
    assert isinstance(last, Failed)
    assert last.code == code
    assert sum(isinstance(r, Delta) for r in records) == (3 if stream else 0)


@pytest.mark.parametrize(("fault", "code"), [("refuse", "capacity"), ("load_failure", "model_load_failed")])
async def test_a_refusal_is_a_typed_rejection(fault: str, code: str, autojump_clock: MockClock) -> None:
    async with running() as engine:
        with pytest.raises(Rejected) as rejected:
            await engine.open(work(simulate=fault))
    assert rejected.value.code == code


async def test_only_its_own_models_are_served(autojump_clock: MockClock) -> None:
    async with running("a", "b", failed_models=["c"]) as engine:
        for model, code in (("c", "model_load_failed"), ("d", "model_not_loaded")):
            with pytest.raises(Rejected) as rejected:
                await engine.open(work(model=model))
            assert rejected.value.code == code
        assert engine.status().failed_models == ("c",)
        await read(await engine.open(work(model="b")))


async def test_it_is_not_ready_before_its_model_is_loaded(autojump_clock: MockClock) -> None:
    async with running(speed=Speed(load=30)) as engine:
        assert (engine.status().ready, engine.status().models) == (False, ())
        with pytest.raises(Rejected) as rejected:
            await engine.open(work())
        assert rejected.value.code == "engine_unready"
        await trio.sleep(30)
        assert engine.status().ready
        await read(await engine.open(work()))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"operation": EMBEDDINGS.name}, "not simulated"),
        ({"max_tokens": 0}, "at least 1"),
        ({"messages": [{"role": "user", "content": "a b " * 9000}]}, "maximum context length"),
    ],
)
async def test_what_the_caller_did_wrong_is_said_to_him(
    wrong: dict[str, Any], says: str, autojump_clock: MockClock
) -> None:
    async with running() as engine:
        stream = await engine.open(work(**wrong))
        stream.pause()
        stream.resume()
        (record,) = await read(stream)
        assert isinstance(record, Failed)
        assert (record.status, record.retry, says in record.message) == (400, "never", True)
        left = await engine.open(work(**wrong))
        left.cancel()
        assert await read(left) == []
        assert left.generated == 0


@pytest.mark.parametrize("body", [b"{", b"[]", b"[" * 100_000])
async def test_a_body_that_is_no_object_is_the_callers_fault(body: bytes, autojump_clock: MockClock) -> None:
    async with running() as engine:
        (record,) = await read(await engine.open(Work("e", 1, CHAT.name, "m", 60.0, "standard", True, body)))
    assert isinstance(record, Failed)
    assert record.status == 400


async def test_a_caller_that_is_cancelled_while_it_opens_leaves_nothing(autojump_clock: MockClock) -> None:
    async with running() as engine:
        with trio.CancelScope() as scope:
            scope.cancel()
            await engine.open(work())
        assert scope.cancelled_caught
        assert engine.core.arrived == 0


async def test_an_engine_that_ends_fails_and_releases_what_is_open(autojump_clock: MockClock) -> None:
    engine = SimulatedEngine(["m"])
    async with trio.open_nursery() as nursery:
        await nursery.start(engine.run)
        stream = await engine.open(work())
        await stream.receive()
        nursery.cancel_scope.cancel()
    records = await read(stream)
    assert isinstance(records[-1], Failed)
    assert records[-1].code == "engine_failed"


async def test_a_plan_can_be_given_and_exchanged(autojump_clock: MockClock) -> None:
    async with running(plan=[PlannedFault(Fault("refuse"), request=1)]) as engine:
        with pytest.raises(Rejected):
            await engine.open(work())
        await read(await engine.open(work()))
        await trio.sleep(100)
        engine.plan_faults([PlannedFault(Fault("refuse"), start=5, end=6)])
        await read(await engine.open(work(max_tokens=1)))
        await trio.sleep(5.5)
        with pytest.raises(Rejected):
            await engine.open(work())
        await trio.sleep(1)
        await read(await engine.open(work()))


async def test_two_engines_of_one_seed_say_the_same_and_of_another_not(autojump_clock: MockClock) -> None:
    said = []
    for seed in (1, 1, 2):
        async with running(seed=seed) as engine:
            said.append(text(await read(await engine.open(work()))))
    assert said[0] == said[1] != said[2]


async def test_many_aborts_never_hold_more_than_the_slots_and_leave_nothing(
    autojump_clock: MockClock,
) -> None:
    slow = PlannedFault(Fault("late_release", seconds=0.5), probability=0.3)
    lost = PlannedFault(Fault("lost_cancel"), probability=0.1)
    async with running(limits=Limits(slots=5), plan=[slow, lost]) as engine:
        async with trio.open_nursery() as nursery:
            for number in range(500):
                nursery.start_soon(_abort, engine, number)
        core = engine.core
        assert core.high_water == 5
        assert max(step.running for step in core.steps) <= 5
        assert sum(core.outcomes.values()) == len(core.entries) == 500
        assert core.outcomes["cancelled"] > 250


async def _abort(engine: SimulatedEngine, number: int) -> None:
    await trio.sleep(number * 7919 % 1000 / 100)
    stream = await engine.open(work(user=str(number)))
    with trio.move_on_after(number * 104729 % 100 / 50):
        await read(stream)
    stream.cancel()
    await stream.wait_released()
