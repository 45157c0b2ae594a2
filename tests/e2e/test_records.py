"""One record for each accepted exchange, whatever its end; none for what was turned away."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import trio

from tests.e2e.serving import Serving, serving, tenant
from trio_gateway.ledger import Record
from trio_gateway.testing import (
    CloseFin,
    Event,
    Hold,
    RawClient,
    Repeat,
    Script,
    ScriptedEngine,
    chat_answer,
    chat_request,
    chat_stream,
    embedding_answer,
    error_answer,
    json_request,
    open_engine,
)

HEAD, ROLE, ONE = chat_stream("one")[:3]
BIG = Event({"choices": [{"index": 0, "delta": {"content": "x" * 4000}, "finish_reason": None}]})
KEY = "key-a"

# Moments in the order in which an exchange may reach them.
MOMENTS = (
    "arrived_at",
    "placed_at",
    "upstream_opened_at",
    "headers_at",
    "first_content_at",
    "last_content_at",
    "settled_at",
)


async def read(engine: ScriptedEngine, gateway: Serving, client: RawClient) -> None:
    await client.read_to_end()


async def leave_while_streaming(engine: ScriptedEngine, gateway: Serving, client: RawClient) -> None:
    await client.read_events(2)
    client.leave_reset()


async def leave_before_anything(engine: ScriptedEngine, gateway: Serving, client: RawClient) -> None:
    await engine.wait_open(1)
    client.leave_reset()


async def never_read(engine: ScriptedEngine, gateway: Serving, client: RawClient) -> None:
    await client.stall()


async def shut_down(engine: ScriptedEngine, gateway: Serving, client: RawClient) -> None:
    await client.read_events(2)
    hurry = trio.Event()
    hurry.set()
    await gateway.gateway.shut_down(hurry)


Act = Callable[[ScriptedEngine, Serving, RawClient], Awaitable[None]]


@dataclass(frozen=True)
class Story:
    """How one exchange goes, and what its record has to say.

    Attributes:
        reached: moments beside arrival and settling, as far as it came.
    """

    script: Script
    outcome: str
    phase: str
    status: int | None
    code: str | None = None
    reached: int = 4
    act: Act = read
    stream: bool = True
    sections: dict[str, Any] = field(default_factory=dict)


STORIES = {
    "completed": Story(chat_stream("one", usage=(7, 1)), "completed", "after_content", 200, reached=5),
    "completed, buffered": Story(chat_answer(usage=(7, 1)), "completed", "after_content", 200, stream=False),
    "refused by the engine": Story(error_answer(422), "refused", "before_headers", 422, "invalid_value", 2),
    "overloaded": Story(error_answer(503), "refused", "before_headers", 503, "engine_overloaded", 2),
    "failed before headers": Story(
        (CloseFin(),), "upstream_failed", "before_headers", 502, "engine_failed", 1
    ),
    "failed after content": Story(
        (HEAD, ROLE, ONE, CloseFin()), "upstream_failed", "after_content", 200, "engine_failed", 5
    ),
    "too slow": Story(
        (HEAD, Hold()),
        "upstream_failed",
        "before_headers",
        504,
        "first_token_timeout",
        2,
        sections={"deadlines": {"first_token": 0.1}},
    ),
    "deadline": Story(
        (HEAD, ROLE, ONE, Hold()),
        "deadline_exceeded",
        "after_content",
        200,
        "deadline_exceeded",
        5,
        sections={"deadlines": {"default": 0.2}},
    ),
    "gone before anything": Story(
        (Hold(),), "client_gone", "before_headers", None, None, 1, leave_before_anything
    ),
    "gone while streaming": Story(
        (HEAD, ROLE, ONE, Hold()), "client_gone", "after_content", 200, None, 5, leave_while_streaming
    ),
    "stalled": Story(
        (HEAD, ROLE, Repeat((BIG,))),
        "client_stalled",
        "after_content",
        200,
        None,
        5,
        never_read,
        sections={"delivery": {"stall_timeout": 0.2, "buffer_bytes": 32768}},
    ),
    "shutdown": Story(
        (HEAD, ROLE, ONE, Hold()), "gateway_shutdown", "after_content", 200, "gateway_draining", 5, shut_down
    ),
}


def check_moments(record: Record, reached: int) -> None:
    """What was reached has a time, in order; what was not has none."""
    times = [getattr(record, name) for name in MOMENTS]
    known = [time for time in times if time is not None]
    assert known == sorted(known)
    assert [name for name, time in zip(MOMENTS, times, strict=True) if time is None] == list(
        MOMENTS[reached + 1 : -1]
    )


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES.keys())
async def test_every_end_is_recorded_once_with_its_cause_and_its_times(story: Story) -> None:
    sections = {
        "tenants": [tenant("acme", KEY, tiers=["batch"])],
        "retry": {"max_attempts": 1},
        **story.sections,
    }
    headers = (("x-client-request-id", "mine"),)
    async with open_engine(story.script, send_buffer=16384) as engine, serving(engine, **sections) as gateway:
        with trio.fail_after(10), await gateway.connect(receive_buffer=4096) as client:
            await client.send(chat_request(stream=story.stream, key=KEY, headers=headers))
            await story.act(engine, gateway, client)
            record = await gateway.settled()
        assert (record.outcome, record.phase, record.status) == (story.outcome, story.phase, story.status)
        assert (record.code, record.stream, record.attempts, record.worker) == (
            story.code,
            story.stream,
            1,
            "w1",
        )
        assert (record.tenant, record.key_id, record.tier) == ("acme", "acme-key", "batch")
        assert (record.operation, record.model, record.client_request_id) == (
            "chat.completions",
            "m1",
            "mine",
        )
        assert record.boot_id == gateway.gateway.boot_id
        assert len(record.exchange_id) == 32
        check_moments(record, story.reached)
        if record.tokens_generated is not None:
            assert record.tokens_delivered is not None
            assert 0 <= record.tokens_delivered <= record.tokens_generated
        counts = {outcome: count for outcome, count in gateway.gateway.books.outcomes.items() if count}
        assert counts == {story.outcome: 1}
    (line,) = gateway.logged("exchange")
    assert {key: line[key] for key in record.as_dict()} == record.as_dict()


async def test_tokens_are_those_of_the_engine_where_it_tells_them_and_else_counted() -> None:
    details = {"cached_tokens": 4}
    usage = {"prompt_tokens": 7, "completion_tokens": 9, "total_tokens": 16, "prompt_tokens_details": details}
    told = (
        *chat_stream("a", "b", done=False, end=False),
        Event({"choices": [], "usage": usage}),
        *chat_stream()[-2:],
    )
    async with open_engine(told, chat_stream("a", "b", "c")) as engine, serving(engine) as gateway:
        for _ in range(2):
            await gateway.ask(chat_request())
        first, second = await gateway.settled(1), await gateway.settled(2)
        assert (first.tokens_prompt, first.tokens_cached, first.tokens_generated) == (7, 4, 9)
        assert (first.tokens_delivered, first.usage_source) == (9, "engine")
        assert (second.tokens_cached, second.tokens_generated, second.tokens_delivered) == (None, 3, 3)
        assert second.prompt_source == second.usage_source == "estimated"
        assert second.tokens_prompt is not None
        assert 5 < second.tokens_prompt < 100  # of a body of some 80 bytes
        # role, tokens and finish reason; usage that nobody asked for and [DONE] are no events of the answer
        assert (first.events_delivered, second.events_delivered) == (5, 6)


async def test_delivered_bytes_are_those_of_the_answer() -> None:
    async with open_engine(chat_stream("a"), chat_answer()) as engine, serving(engine) as gateway:
        for number, stream in ((1, True), (2, False)):
            with trio.fail_after(10), await gateway.connect() as client:
                await client.send(chat_request(stream=stream))
                await client.read_to_end()
                assert (await gateway.settled(number)).bytes_delivered == len(client.received)


async def test_embeddings_are_recorded_too() -> None:
    request = json_request("/v1/embeddings", {"model": "m1", "input": "a"})
    async with open_engine(embedding_answer([1.0], prompt_tokens=5)) as engine, serving(engine) as gateway:
        await gateway.ask(request)
        record = await gateway.settled()
        assert (record.operation, record.outcome, record.tokens_prompt) == ("embeddings", "completed", 5)
        assert record.tokens_generated is None


async def test_a_retry_is_one_record_with_the_last_worker() -> None:
    async with (
        open_engine(error_answer(503)) as first,
        open_engine() as second,
        serving(first, second) as gateway,
    ):
        await gateway.ask(chat_request())
        record = await gateway.settled()
        assert (record.attempts, record.worker, record.outcome) == (2, "w2", "completed")
        assert len(gateway.records) == 1


async def test_what_was_not_accepted_has_no_record() -> None:
    async with open_engine() as engine, serving(engine) as gateway:
        for request in (
            chat_request(model="nothing"),
            chat_request(n=0),
            b"GET /nowhere HTTP/1.1\r\nhost: a\r\n\r\n",
        ):
            await gateway.ask(request)
        assert gateway.records == []
        assert gateway.turned_away() == {"model_not_found": 1, "invalid_value": 1, "unknown_route": 1}
