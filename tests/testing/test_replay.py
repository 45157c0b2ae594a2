"""Recordings of exchanges on a fake clock end the same when they are played, whatever happened to them."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.exchange.rig import Running, rigged
from trio_gateway.cli import app
from trio_gateway.exchange import OPERATOR, SHUT_DOWN, flight_file
from trio_gateway.testing import (
    DONE,
    Chunk,
    CloseFin,
    CloseReset,
    EndChunks,
    FakeScript,
    FakeScripting,
    Head,
    Hold,
    Json,
    Recorded,
    RecordingClient,
    Repeat,
    UnreadableFlight,
    Wait,
    WorkerSet,
    chat_answer,
    chat_chunk,
    chat_stream,
    error_answer,
    error_event,
    make_request,
    make_worker,
    replay_at_once,
    unreachable,
)

WORD = chat_chunk({"content": "x" * 900})
ROLE = chat_chunk({"role": "assistant", "content": ""})
LAST_WORD_ENDS_IT = (chat_chunk({"content": "z"}, finish="stop"), DONE, EndChunks())
JSON_HEAD = Head(200, (("content-type", "application/json"), ("transfer-encoding", "chunked")))
Act = Callable[[Running], Awaitable[object]]


async def leave(running: Running) -> None:
    await trio.sleep(3)
    running.client.leave()


async def operate(running: Running) -> None:
    await trio.sleep(3)
    running.exchange.end(OPERATOR)


async def shut_down(running: Running) -> None:
    await trio.sleep(3)
    running.exchange.end(SHUT_DOWN)


async def read_slowly(running: Running) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(running.client.trickle, 20_000.0)
        await running.over.wait()
        nursery.cancel_scope.cancel()


def record(
    *scripts: FakeScripting,
    room: float = float("inf"),
    act: Act | None = None,
    rig_options: dict[str, Any] | None = None,
    **asked: Any,
) -> Any:
    """Carry out one exchange on a fake clock, and answer its recording as it stands in a file."""

    async def carry_out() -> Any:
        async with rigged(*scripts, **(rig_options or {})) as rig:
            running = rig.start(make_request(**asked), RecordingClient(room=room))
            if act is not None:
                await act(running)
            await running.over.wait()
        return flight_file(running.exchange.request.exchange_id, running.exchange.flight)

    return json.loads(json.dumps(trio.run(carry_out, clock=trio.testing.MockClock(autojump_threshold=0))))


INCIDENTS: dict[str, tuple[tuple[FakeScripting, ...], dict[str, Any], tuple[str, str, str | None]]] = {
    "a whole stream": ((chat_stream("a", "b", usage=(3, 30)),), {}, ("completed", "after_content", None)),
    "with usage": (
        (chat_stream("a", "b", usage=(3, 30)),),
        {"wants_usage": True},
        ("completed", "after_content", None),
    ),
    "whose last output says why it ended": (
        ((Head(), ROLE, WORD, *LAST_WORD_ENDS_IT),),
        {},
        ("completed", "after_content", None),
    ),
    "two choices": ((chat_stream("a", "b", choices=2),), {"n": 2}, ("completed", "after_content", None)),
    "cut after content": (
        ((Head(), ROLE, WORD, Wait(1), WORD, CloseReset()),),
        {},
        ("upstream_failed", "after_content", "engine_failed"),
    ),
    "ended without a finish": (
        ((Head(), WORD, EndChunks()),),
        {},
        ("upstream_failed", "after_content", "engine_failed"),
    ),
    "an error in the stream": (
        ((Head(), WORD, error_event("no", code=500)),),
        {},
        ("upstream_failed", "after_content", "engine_failed"),
    ),
    "no room, said in the stream": (
        ((Head(), error_event("no", code=429)),),
        {"seconds": 3},
        ("refused", "before_headers", "engine_overloaded"),
    ),
    "one retry": ((error_answer(500), chat_stream("a")), {}, ("completed", "after_content", None)),
    "a retry after overload": (
        (error_answer(503), chat_stream("a")),
        {},
        ("completed", "after_content", None),
    ),
    "two failures": (
        ((Head(), ROLE, CloseFin()), (Wait(2), unreachable())),
        {},
        ("upstream_failed", "before_headers", "engine_failed"),
    ),
    "out of memory": (
        (error_answer(500, "CUDA out of memory"),),
        {},
        ("refused", "before_headers", "engine_out_of_memory"),
    ),
    "credentials": ((error_answer(401),), {}, ("upstream_failed", "before_headers", "engine_credentials")),
    "a refusal": ((error_answer(400),), {}, ("refused", "before_headers", "invalid_value")),
    "another content type": (
        ((Head(200, (("content-type", "text/html"), ("transfer-encoding", "chunked"))), Hold()),),
        {},
        ("upstream_failed", "before_headers", "engine_protocol_error"),
    ),
    "no first token": (
        ((Head(), Hold()),),
        {"rig_options": {"first_token": 20.0}},
        ("upstream_failed", "before_content", "first_token_timeout"),
    ),
    "no progress": (((Head(), WORD, Hold()),), {}, ("upstream_failed", "after_content", "engine_failed")),
    "a deadline": (
        ((Head(), Repeat((WORD,), every=0.7)),),
        {"seconds": 5},
        ("deadline_exceeded", "after_content", "deadline_exceeded"),
    ),
    "a client that left": (
        ((Head(), Repeat((WORD,), every=0.5)),),
        {"act": leave},
        ("client_gone", "after_content", None),
    ),
    "a client that left before headers": (
        ((Wait(60),),),
        {"act": leave},
        ("client_gone", "before_headers", None),
    ),
    "an operator": (
        ((Head(), Repeat((WORD,), every=0.5)),),
        {"act": operate},
        ("operator_cancelled", "after_content", "operator_cancelled"),
    ),
    "a shutdown": (
        ((Head(), Repeat((WORD,), every=0.5)),),
        {"act": shut_down},
        ("gateway_shutdown", "after_content", "gateway_draining"),
    ),
    "a client that stalled": (
        ((Head(), Repeat((WORD,), every=0.01)),),
        {"room": 50_000},
        ("client_stalled", "after_content", None),
    ),
    "a slow client": (
        ((Head(), *[WORD] * 400, *chat_stream("b", usage=(3, 500))[1:]),),
        {"room": 30_000, "act": read_slowly},
        ("completed", "after_content", None),
    ),
    "a buffered answer": ((chat_answer("fine"),), {"stream": False}, ("completed", "after_content", None)),
    "no answer": (
        ((Json({"no": "choices"}),),),
        {"stream": False},
        ("upstream_failed", "before_headers", "engine_failed"),
    ),
    "half an answer": (
        ((JSON_HEAD, Chunk(b'{"choices":'), Wait(1), CloseFin()),),
        {"stream": False},
        ("upstream_failed", "before_headers", "engine_failed"),
    ),
}


@pytest.mark.parametrize("incident", INCIDENTS)
def test_it_ends_as_it_did(incident: str) -> None:
    scripts, options, expected = INCIDENTS[incident]
    flight = record(*scripts, **options)
    ending = flight["ending"]
    assert (ending["outcome"], ending["phase"], ending["code"]) == expected
    replayed = replay_at_once(Recorded(flight))
    assert replayed.differences == {}
    assert replayed.ended[1] == pytest.approx(replayed.ended[0], abs=0.51)  # stalls are looked for so often


@pytest.mark.parametrize(
    ("act", "outcome"), [(None, "refused"), (leave, "client_gone"), (operate, "operator_cancelled")]
)
def test_one_that_never_had_a_worker_ends_as_it_did(act: Act | None, outcome: str) -> None:
    async def carry_out() -> Any:
        workers = WorkerSet(make_worker("w1", slots=1))
        async with rigged((Head(), Repeat((WORD,), every=1.0)), workers=workers) as rig:
            first = rig.start()
            await trio.sleep(1)
            running = rig.start()
            if act is not None:
                await act(running)
            await running.over.wait()
            first.client.leave()
        return flight_file(running.exchange.request.exchange_id, running.exchange.flight)

    flight = trio.run(carry_out, clock=trio.testing.MockClock(autojump_threshold=0))
    assert (flight["ending"]["outcome"], flight["ending"]["phase"]) == (outcome, "queued")
    assert replay_at_once(Recorded(flight)).differences == {}


PIECES = st.lists(
    st.sampled_from(
        [WORD, WORD, chat_chunk({"content": "a"}), Wait(0.3), Wait(2.0), Chunk(b": comment\n\n")]
    ),
    max_size=60,
)
ENDS = st.sampled_from(
    [
        (CloseReset(),),
        (EndChunks(),),
        (Hold(),),
        chat_stream("z")[2:],
        LAST_WORD_ENDS_IT,
        (error_event("no", code=500),),
    ]
)


@settings(max_examples=60, deadline=None)
@given(
    pieces=PIECES,
    end=ENDS,
    room=st.sampled_from([float("inf"), 0, 700, 20_000]),
    act=st.sampled_from([None, leave, operate, read_slowly]),
    retried=st.booleans(),
)
def test_whatever_happened_it_ends_as_it_did(
    pieces: list[Any], end: tuple[Any, ...], room: float, act: Act | None, retried: bool
) -> None:
    # Who is slow only when it is told why its answer ends is not recorded.
    assume(act is not operate or room in (0, float("inf")))
    script: FakeScript = (Head(), *pieces, *end)
    flight = record(*([error_answer(500)] if retried else []), script, room=room, act=act)
    assert replay_at_once(Recorded(flight)).differences == {}


def good() -> Any:
    return record(chat_stream("a"))


def with_row(row: list[Any]) -> Callable[[Any], Any]:
    """Put another row of bytes that moved in the place of the last."""

    def damage(flight: Any) -> Any:
        flight = copy.deepcopy(flight)
        flight["reads"][0]["rows"][-1] = row
        return flight

    return damage


def without(*path: str) -> Callable[[Any], Any]:
    """Leave out a member."""

    def damage(flight: Any) -> Any:
        flight = copy.deepcopy(flight)
        inner = flight
        for name in path[:-1]:
            inner = inner[name]
        del inner[path[-1]]
        return flight

    return damage


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda flight: [], "no recorded exchange"),
        (lambda flight: {**flight, "flight": 2}, "version 2"),
        (lambda flight: {**flight, "ending": None}, "had not ended"),
        (lambda flight: {**flight, "terms": None}, "telemetry.flights"),
        (lambda flight: {**flight, "reads": []}, "damaged"),
        (lambda flight: {**flight, "steps": flight["steps"][:3]}, "damaged"),
        (lambda flight: {**flight, "steps": 3}, "damaged"),
        (with_row([0.1, 1, 10**30]), r"damaged.*reads\[0\]\.rows"),
        (with_row([math.nan, 1, 1]), "damaged"),
        (with_row([-1.0, 1, 1]), "damaged"),
        (with_row([0.1, 1, "x"]), "damaged"),
        (with_row([1e9, 1, 1]), "damaged"),
        (with_row([0.1, 1, 0]), "not in order"),
        (with_row([100.0, 1, 2_000_000]), "more than can be played"),
        (with_row([100.0, 2**40, 9]), "more than can be played"),
        (without("terms", "limits", "between_events"), "damaged.*between_events"),
        (without("ending", "phase"), "damaged.*phase"),
    ],
)
def test_a_file_that_can_not_be_played_says_why(damage: Callable[[Any], Any], words: str) -> None:
    with pytest.raises(UnreadableFlight, match=words):
        Recorded(damage(good()))


def test_the_command_says_of_what_never_happened_that_it_contradicts_itself(tmp_path: Path) -> None:
    flight = good()
    flight["reads"][0]["rows"] = [[0.1, 5, 0]]  # bytes moved, and no event of the stream
    file = tmp_path / "flight.json"
    for text, words in ((json.dumps(flight), "contradicts itself"), ("[" * 20_000, "nested too deeply")):
        file.write_text(text)
        result = CliRunner().invoke(app, ["replay", str(file)])
        assert (result.exit_code, words in result.stderr, result.stdout) == (2, True, "")
