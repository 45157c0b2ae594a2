"""Scripts of agents' answers are what the gateway's side reads, and pages stand beside the requests."""

from __future__ import annotations

import json

import pytest
import trio

from trio_gateway.contract import CHAT
from trio_gateway.testing import (
    Answer,
    Chunk,
    Hold,
    Json,
    RawClient,
    Script,
    ScriptedEngine,
    agent_failure,
    agent_rejection,
    agent_report,
    agent_result,
    agent_stream,
    open_engine,
)
from trio_gateway.wire import REJECTIONS, AgentAnswer, AgentRelay, StreamShape, rejection_of


def bytes_of(script: Script) -> bytes:
    return b"".join(step.data for step in script if isinstance(step, Chunk))


def relayed(script: Script, choices: int = 1) -> AgentRelay:
    shape = StreamShape(choices, True, False, "m1", "m1", 100_000, (), False)
    relay = AgentRelay(shape, CHAT, "chatcmpl-1", 0)
    relay.feed(bytes_of(script))
    return relay


def test_a_stream_is_whole() -> None:
    relay = relayed(agent_stream("a", "b", choices=2, usage=(3, 4)), 2)
    assert (relay.done, relay.fault, relay.content_events) == (True, None, 4)
    assert relay.usage is not None
    assert (relay.usage.prompt, relay.usage.generated) == (3, 4)


def test_a_stream_without_its_end_is_not_whole() -> None:
    relay = relayed(agent_stream("a", finish=None, last=None))
    assert (relay.done, relay.committed, relay.over) == (False, True, False)


def test_a_failure_ends_a_stream() -> None:
    relay = relayed(agent_failure("engine_failed", "a", message="broke", status=500))
    assert relay.fault is not None
    assert relay.fault.status == 500


def test_a_result_is_whole() -> None:
    answer = AgentAnswer(1, 10_000, ())
    answer.feed(bytes_of(agent_result({"a": 1}, 201)))
    assert answer.done
    assert answer.result is not None
    assert (answer.result.status, answer.body) == (201, b'{"a":1}')


@pytest.mark.parametrize("reason", REJECTIONS)
def test_every_rejection_is_read(reason: str) -> None:
    (step,) = agent_rejection(reason, agent_report(7, running=3), retry_after="4")
    assert isinstance(step, Json)
    found = rejection_of(json.dumps(step.body).encode())
    assert found is not None
    assert found[0].rejected == reason
    assert found[0].worker is not None
    assert (found[0].worker.seq, found[0].worker.running) == (7, 3)
    assert (step.status, step.headers) == (REJECTIONS[reason], (("retry-after", "4"),))


async def get(engine: ScriptedEngine, target: str, method: str = "GET") -> Answer:
    with trio.fail_after(10), await RawClient.connect(("127.0.0.1", engine.port)) as client:
        await client.request(method, target)
        return await client.read_to_end()


async def test_pages_stand_beside_requests() -> None:
    pages = {"/a": (Json(1),), "/b/": (Json(2),), "/b/c/": (Json(3),)}
    async with open_engine(pages=pages) as engine:
        said = [(await get(engine, target)).body for target in ("/a", "/b/x", "/b/c/x", "/b/c/d/e")]
        assert said == [b"1", b"2", b"3", b"3"]
        assert (await get(engine, "/b/x", "POST")).body == b"2"
        assert (await get(engine, "/b")).status == 404
        engine.pages["/b"] = (Json(4),)
        assert (await get(engine, "/b")).body == b"4"
        assert engine.requests == []
        assert [request.target for request in engine.page_requests] == [
            "/a",
            "/b/x",
            "/b/c/x",
            "/b/c/d/e",
            "/b/x",
            "/b",
        ]


async def test_a_page_may_hold_its_connection_and_be_waited_for() -> None:
    async with open_engine(pages={"/events": (Hold(),)}) as engine:
        with trio.fail_after(10), await RawClient.connect(("127.0.0.1", engine.port)) as client:
            await client.request("GET", "/events")
            request = await engine.page_request("/events")
            client.leave_fin()
            await request.closed.wait()
