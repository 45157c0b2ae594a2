"""Incidents that a gateway recorded over real sockets, saved by an operator, and played once more."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from typer.testing import CliRunner

from tests.e2e.serving import LIMIT, Serving, serving
from trio_gateway.cli import app
from trio_gateway.testing import (
    CloseReset,
    Head,
    RawClient,
    Recorded,
    Repeat,
    Script,
    Step,
    Wait,
    chat_answer,
    chat_chunk,
    chat_request,
    chat_stream,
    error_answer,
    open_engine,
    replay_at_once,
)

WORD = chat_chunk({"content": "word "})
PAGE = chat_chunk({"content": "x" * 2000})
GOOD = chat_stream("a", "b", "c", usage=(3, 30))


async def fetch(gateway: Serving, request_id: str, status: int = 200) -> Any:
    """Save the recording as an operator does."""
    with trio.fail_after(LIMIT), await RawClient.connect(gateway.admin_address) as client:
        await client.request("GET", f"/admin/v1/flights/{request_id}", host="localhost")
        answer = await client.read_to_end()
    assert answer.status == status
    return json.loads(answer.body)


async def record(
    *scripts: Script,
    act: Callable[[Serving, RawClient], Awaitable[object]] | None = None,
    stream: bool = True,
    receive_buffer: int | None = None,
    **sections: Any,
) -> Any:
    """Let one request meet an engine, and answer its recording, as the file that an operator has."""
    async with (
        open_engine(*scripts, send_buffer=4096) as engine,
        serving(engine, engine.url, **sections) as gateway,  # two workers, so that there is one to try again
    ):
        with await gateway.connect(receive_buffer=receive_buffer) as client:
            await client.send(chat_request(stream=stream))
            with trio.fail_after(LIMIT):
                await act(gateway, client) if act is not None else await client.read_to_end()
        settled = await gateway.settled()
        return await fetch(gateway, settled.exchange_id)


def ending(flight: Any) -> tuple[str, str, str | None]:
    return flight["ending"]["outcome"], flight["ending"]["phase"], flight["ending"]["code"]


async def leave_after_some(gateway: Serving, client: RawClient) -> None:
    await client.read_events(5)
    client.leave_reset()


async def never_read(gateway: Serving, client: RawClient) -> None:
    await gateway.settled()


async def read_late(gateway: Serving, client: RawClient) -> None:
    """Take nothing until the gateway's buffer is full, then everything."""
    await gateway.until(lambda: gateway.gateway.live.held_up == 1)
    await client.read_to_end()


async def be_cancelled(gateway: Serving, client: RawClient) -> None:
    await client.read_events(5)
    (exchange,) = gateway.gateway.live
    path = f"/admin/v1/requests/{exchange.request.exchange_id}/cancel"
    with await RawClient.connect(gateway.admin_address) as operator:
        await operator.request(
            "POST", path, headers=(("content-type", "application/json"),), body=b"{}", host="localhost"
        )
        assert (await operator.read_to_end()).status == 200
    await client.read_to_end()


SLOW_ENGINE: tuple[Step, ...] = (Head(), Repeat((WORD,), every=0.02))
LONG: tuple[Step, ...] = (Head(), Repeat((PAGE,), times=400), *GOOD[1:])
INCIDENTS: dict[str, tuple[dict[str, Any], tuple[str, str, str | None]]] = {
    "an engine cut after commit": (
        {"scripts": [(Head(), WORD, Wait(0.05), WORD, WORD, CloseReset())]},
        ("upstream_failed", "after_content", "engine_failed"),
    ),
    "a retry that works": ({"scripts": [error_answer(500), GOOD]}, ("completed", "after_content", None)),
    "a retry that does not": (
        {"scripts": [error_answer(500), (Head(), CloseReset())]},
        ("upstream_failed", "before_headers", "engine_failed"),
    ),
    "an engine that is silent": (
        {"scripts": [(Head(), WORD, Wait(60))], "deadlines": {"between_events": 0.2}},
        ("upstream_failed", "after_content", "engine_failed"),
    ),
    "a refusal": ({"scripts": [error_answer(400)]}, ("refused", "before_headers", "invalid_value")),
    "a deadline": (
        {"scripts": [SLOW_ENGINE], "deadlines": {"default": 0.3}},
        ("deadline_exceeded", "after_content", "deadline_exceeded"),
    ),
    "a client that left": (
        {"scripts": [SLOW_ENGINE], "act": leave_after_some},
        ("client_gone", "after_content", None),
    ),
    "a client that never reads": (
        {
            "scripts": [(Head(), Repeat((PAGE,)))],
            "act": never_read,
            "receive_buffer": 4096,
            "delivery": {"buffer_bytes": 65536, "stall_timeout": 0.6},
        },
        ("client_stalled", "after_content", None),
    ),
    "a client that reads late": (
        {
            "scripts": [LONG],
            "act": read_late,
            "receive_buffer": 4096,
            "delivery": {"buffer_bytes": 65536},
        },
        ("completed", "after_content", None),
    ),
    "an operator's cancel": (
        {"scripts": [SLOW_ENGINE], "act": be_cancelled},
        ("operator_cancelled", "after_content", "operator_cancelled"),
    ),
    "a good stream": ({"scripts": [GOOD]}, ("completed", "after_content", None)),
    "a good buffered answer": (
        {"scripts": [chat_answer("fine")], "stream": False},
        ("completed", "after_content", None),
    ),
}


@pytest.mark.parametrize("incident", INCIDENTS)
async def test_a_recorded_incident_ends_the_same_when_it_is_played(incident: str) -> None:
    options, expected = INCIDENTS[incident]
    options = dict(options)
    flight = await record(*options.pop("scripts"), **options)
    assert ending(flight) == expected
    replayed = await trio.to_thread.run_sync(replay_at_once, Recorded(flight))
    assert replayed.differences == {}
    assert (replayed.record.outcome, replayed.record.phase, replayed.record.code) == expected
    assert replayed.record.tokens_delivered == flight["ending"]["tokens_delivered"]


async def test_a_recording_names_nobody_and_says_nothing() -> None:
    flight = await record(chat_stream("secret"), worker={"labels": ["here"]})
    text = json.dumps(flight)
    assert not [word for word in ("secret", "127.0.0.1", "anonymous", "m1", "here") if word in text]
    assert flight["flight"] == 1
    assert [step["what"] for step in flight["steps"]][:3] == ["arrived", "accepted", "placed"]


async def test_what_was_not_recorded_can_not_be_saved() -> None:
    async with open_engine(GOOD) as engine, serving(engine, telemetry={"flights": 0}) as gateway:
        await gateway.ask(chat_request(stream=True))
        settled = await gateway.settled()
        problem = await fetch(gateway, settled.exchange_id, 404)
    assert problem["error"]["code"] == "not_found"


async def test_the_command_plays_a_file_and_tells_whether_it_ends_the_same(tmp_path: Path) -> None:
    flight = await record((Head(), WORD, CloseReset()))
    file = tmp_path / "incident.json"

    def run(*options: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["replay", str(file), *options])
        return result.exit_code, result.output

    file.write_text(json.dumps(flight))
    status, output = await trio.to_thread.run_sync(run)
    assert (status, output.splitlines()[-1]) == (0, "the ending is the same")
    assert "engine_failed" in output
    flight["ending"]["code"] = "deadline_exceeded"
    file.write_text(json.dumps(flight))
    status, output = await trio.to_thread.run_sync(run, "--json")
    assert (status, json.loads(output)["differences"]) == (1, ["code"])
    flight["flight"] = 2
    file.write_text(json.dumps(flight))
    assert (await trio.to_thread.run_sync(run))[0] == 2
