"""A real engine asked straight and through the gateway says the same, and is asked the same.

Requests are those that official SDKs were seen to send, and odd ones made by dice
(`tests.e2e.odd_requests`). A few are asked by default; for more of them::

    DIFFERENTIAL_REQUESTS=500 make test ARGS="tests/e2e/test_differential.py"

``DIFFERENTIAL_SEED`` makes others. What is compared is read by readers of its own:
none of the gateway's.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import pytest
import trio

from tests.e2e.odd_requests import OddRequest, make_request, recorded_requests
from tests.e2e.recorder import Passed, Recorder, open_recorder
from tests.e2e.serving import Serving, serving
from trio_gateway.errors import CODES
from trio_gateway.testing import Answer, LocalEngine, RawClient, StreamEvent, http_request, missing_parts

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(missing_parts() is not None, reason=str(missing_parts())),
]

PATIENCE: Final = 60.0  # seconds for one answer of a small model on a busy machine
SEED: Final = int(os.environ.get("DIFFERENTIAL_SEED", "1"))
BATCH: Final = 15
BATCHES: Final = -(-int(os.environ.get("DIFFERENTIAL_REQUESTS", "30")) // BATCH)
UPSTREAM: Final = LocalEngine.model
# Under its own name events pass as they come; under another, and by an alias, they are edited.
NAMES: Final = {UPSTREAM: UPSTREAM, "tiny": "tiny", "small": "tiny", "größe/1": "größe/1"}
STREAMS_OF_CHOICES: Final = ("/v1/chat/completions", "/v1/completions")

TIMES: Final = frozenset({"created", "created_at", "completed_at", "timings", "time_ms"})
IDS: Final = frozenset({"id", "item_id", "call_id"})


# Reading ----------------------------------------------------------------------------------------------------


class Members(tuple[tuple[str, Any], ...]):
    """The members of an object in their order, repeated ones kept."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Number:
    """A number as it is spelled."""

    text: str


def read(text: str) -> Any:
    """Read JSON and keep what ``json.loads`` would lose: order, repetitions, spelling of numbers."""
    return json.loads(
        text, object_pairs_hook=Members, parse_int=Number, parse_float=Number, parse_constant=Number
    )


def members_of(text: str) -> list[tuple[str, str]]:
    """Cut an object into its members, each value as it is spelled."""
    decoder, blank = json.JSONDecoder(), re.compile(r"[ \t\r\n]*")
    members: list[tuple[str, str]] = []

    def after_blanks(at: int) -> int:
        found = blank.match(text, at)
        assert found is not None
        return found.end()

    at = after_blanks(after_blanks(0) + 1)
    while text[at] != "}":
        key, at = decoder.raw_decode(text, at)
        at = after_blanks(at)
        assert text[at] == ":"
        start = after_blanks(at + 1)
        _, end = decoder.raw_decode(text, start)
        members.append((key, text[start:end]))
        at = after_blanks(end)
        if text[at] == ",":
            at = after_blanks(at + 1)
    assert after_blanks(at + 1) == len(text)
    return members


def without_its_own(value: Any, ids: dict[str, str]) -> Any:
    """Take times out, and put a number for each id: the same one wherever it is the same."""
    if isinstance(value, Members):
        return Members(
            (key, ids.setdefault(item, f"id {len(ids)}") if _is_id(key, item) else without_its_own(item, ids))
            for key, item in value
            if key not in TIMES
        )
    if isinstance(value, list | tuple):
        return [without_its_own(item, ids) for item in value]
    return value


def _is_id(key: str, value: object) -> bool:
    return key in IDS and isinstance(value, str)


def renamed(value: Any, public: str) -> Any:
    """Put the public name where the engine's stands: at ``model``, also of a response or message."""
    if not isinstance(value, Members):
        return value
    return Members(
        (
            key,
            public
            if (key, item) == ("model", UPSTREAM)
            else renamed(item, public)
            if key in HOLDERS
            else item,
        )
        for key, item in value
    )


HOLDERS: Final = ("response", "message")


def without_usage(events: list[Any]) -> list[Any]:
    """Take out the usage that was not asked for, and events that are nothing else."""
    kept = [event for event in events if not (_get(event, "usage") and not _get(event, "choices"))]
    return [
        Members((key, item) for key, item in event if key != "usage") if _get(event, "usage") else event
        for event in kept
    ]


def _get(event: Any, key: str) -> Any:
    return dict(event).get(key) if isinstance(event, Members) else None


# What is expected -------------------------------------------------------------------------------------------


def expected_body(request: OddRequest) -> list[tuple[str, str]]:
    """What has to reach the engine: the caller's body, and the question for usage."""
    members = members_of(request.body(UPSTREAM).decode())
    if request.path not in STREAMS_OF_CHOICES or not _is_stream(members):
        return members
    asked = dict(members)
    options = members_of(asked["stream_options"]) if asked.get("stream_options", "null") != "null" else []
    return _with(members, "stream_options", _with(options, "include_usage", "true"))


def _is_stream(members: list[tuple[str, str]]) -> bool:
    return dict(members).get("stream") == "true"


def _with(members: list[tuple[str, Any]], key: str, value: Any) -> list[tuple[str, Any]]:
    if any(name == key for name, _ in members):
        return [(name, value if name == key else item) for name, item in members]
    return [*members, (key, value)]


def reached(request: OddRequest, passed: Passed) -> list[tuple[str, Any]]:
    """What did reach it, cut as `expected_body` cuts."""
    members = members_of(passed.body.decode())
    if request.path not in STREAMS_OF_CHOICES or not _is_stream(members):
        return members
    return _with(members, "stream_options", members_of(dict(members)["stream_options"]))


def wants_usage(request: OddRequest) -> bool:
    body = json.loads(request.body(UPSTREAM))
    return bool((body.get("stream_options") or {}).get("include_usage"))


def expected_answer(request: OddRequest, straight: Answer, public: str) -> Any:
    """What the caller has to get, after what the engine says when it is asked straight."""
    if straight.status != 200:
        return expected_error(request, straight)
    if straight.events is None:
        return renamed(read(straight.body.decode()), public)
    events = [read_event(event, public) for event in straight.events.events if _is_meant_for_clients(event)]
    if request.path in STREAMS_OF_CHOICES and not wants_usage(request):
        bodies = without_usage([body for _, body in events])
        return [("message", body) for body in bodies]
    return begun(events, public) if request.path == "/v1/messages" else events


def begun(events: list[tuple[str, Any]], public: str) -> list[tuple[str, Any]]:
    """Begin a message that llama.cpp does not, since its first token is half a character."""
    if events[0][0] == "message_start":
        return events
    message: dict[str, Any] = {
        "id": "",
        "type": "message",
        "role": "assistant",
        "content": [],
        "model": public,
    }
    message |= {"stop_reason": None, "stop_sequence": None, "usage": {"input_tokens": 0, "output_tokens": 0}}
    start = "message_start", read(json.dumps({"type": "message_start", "message": message}))
    return [start, *events[events[0][0] == "content_block_stop" :]]


def _is_meant_for_clients(event: StreamEvent) -> bool:
    """Between two prompts of one request, llama.cpp says ``data: null``, on which clients stumble."""
    return event.is_done or event.data.startswith("{")


def read_event(event: StreamEvent, public: str) -> tuple[str, Any]:
    return event.name, event.data if event.is_done else renamed(read(event.data), public)


def expected_error(request: OddRequest, straight: Answer) -> tuple[int, str, str]:
    """Status, type and message of what the engine refuses or fails at, as the gateway promises them."""
    error = straight.error()
    status, message, kind = straight.status, str(error["message"]), str(error["type"])
    if status == 501:
        status = 400
    elif status >= 500:
        status, message, kind = 502, "the engine failed", "upstream_error"
    printable = re.sub(r"[^ -~\u00a1-\uffff]+", " ", message)[:1024]
    if request.path.startswith("/v1/messages"):
        kind = {400: "invalid_request_error", 502: "api_error"}[status]
    return status, kind, printable


def given_answer(answer: Answer) -> Any:
    """What the caller did get, in the form of `expected_answer`."""
    if answer.status != 200:
        error = answer.error()
        assert error["code"] in CODES
        return answer.status, error["type"], error["message"]
    if answer.events is None:
        return read(answer.body.decode())
    assert not answer.events.problems
    return [(event.name, event.data if event.is_done else read(event.data)) for event in answer.events.events]


def differences(
    request: OddRequest, public: str, straight: Answer, through: Answer, passed: Passed
) -> list[str]:
    """Say what is not as it should be."""
    found: list[str] = []
    if passed.target != request.path:
        found.append(f"asked at {passed.target}")
    if (one := expected_body(request)) != (other := reached(request, passed)):
        found.append(f"the body: {first_difference(one, other)}")
    if (straight.ended, through.ended) != ("complete", "complete"):
        found.append(f"the end: {straight.ended}, {through.ended}")
    said = without_its_own(expected_answer(request, straight, NAMES[public]), {})
    heard = without_its_own(given_answer(through), {})
    if said != heard:
        found.append(f"the answer ({straight.status}, {through.status}): {first_difference(said, heard)}")
    return [f"{request.name} as {public}: {what}\n  {request.text[:600]}" for what in found]


def first_difference(one: Any, other: Any) -> str:
    """Show where two values begin to differ, and no more."""
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        for left, right in zip(one, other, strict=True):
            if left != right:
                return first_difference(left, right)
    return f"\n  {str(one)[:600]}\n  {str(other)[:600]}"


# Running ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    with LocalEngine(slots=1, context=1024, cache=False) as engine:
        yield engine


@pytest.fixture(scope="module")
def second_engine() -> Iterator[LocalEngine]:
    """One that makes vectors too, and has the slots for two choices."""
    with LocalEngine(slots=2, context=512, cache=False, embeddings=True) as engine:
        yield engine


@dataclass(frozen=True, slots=True)
class Pair:
    """An engine, asked straight and through a gateway whose requests to it are recorded."""

    engine: LocalEngine
    recorder: Recorder
    gateway: Serving

    async def compare(self, request: OddRequest, public: str) -> list[str]:
        """Ask both ways and say what differs."""
        host, _, port = self.engine.url.rpartition("/")[2].rpartition(":")
        with trio.fail_after(PATIENCE), await RawClient.connect((host, int(port))) as client:
            straight = await ask(client, request, UPSTREAM)
        with trio.fail_after(PATIENCE), await self.gateway.connect() as client:
            through = await ask(client, request, public)
        passed, *more = self.recorder.requests or [Passed("nothing", {}, b"{}")]
        self.recorder.requests.clear()
        found = differences(request, public, straight, through, passed)
        return [*found, f"{request.name}: asked {len(more) + 1} times"] if more else found


async def ask(client: RawClient, request: OddRequest, model: str) -> Answer:
    headers = (("content-type", "application/json"),)
    await client.send(http_request("POST", request.path, headers=headers, body=request.body(model)))
    return await client.read_to_end()


@asynccontextmanager
async def before(engine: LocalEngine) -> AsyncIterator[Pair]:
    """Run a gateway with a recorder between it and the engine."""
    models = [
        {"id": UPSTREAM},
        {"id": "tiny", "upstream": UPSTREAM, "aliases": ["small"]},
        {"id": "größe/1", "upstream": UPSTREAM},
    ]
    worker = {"kind": "llamacpp", "slots": engine.slots, "cancel_grace": 0.1}
    async with (
        open_recorder(engine.url) as recorder,
        serving(recorder.url, worker=worker, models=models) as gateway,
    ):
        yield Pair(engine, recorder, gateway)


async def compare_all(requests: list[OddRequest], engine: LocalEngine, second: LocalEngine) -> None:
    found: list[str] = []
    async with before(engine) as first_pair, before(second) as second_pair:
        for number, request in enumerate(requests):
            elsewhere = request.choices > 1 or request.path == "/v1/embeddings"
            pair = second_pair if elsewhere else first_pair
            found += await pair.compare(request, list(NAMES)[number % len(NAMES)])
    assert not found, "\n".join(found)


@pytest.mark.parametrize("batch", range(BATCHES))
async def test_odd_requests_and_their_answers_are_the_same_straight_and_through_the_gateway(
    batch: int, engine: LocalEngine, second_engine: LocalEngine
) -> None:
    numbers = range(batch * BATCH, (batch + 1) * BATCH)
    await compare_all([make_request(SEED, number) for number in numbers], engine, second_engine)


@pytest.mark.parametrize("half", [0, 1])
async def test_what_sdks_send_is_the_same_straight_and_through_the_gateway(
    half: int, engine: LocalEngine, second_engine: LocalEngine
) -> None:
    await compare_all(recorded_requests()[half::2], engine, second_engine)
