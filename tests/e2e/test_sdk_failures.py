"""However an engine fails, official SDKs raise what their users expect, and nothing looks whole that is not.

Every failure meets every way to ask: OpenAI's and Anthropic's clients, synchronous and
asynchronous, streamed and buffered, and LangChain.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import anthropic
import httpx2
import openai
import pytest
import trio

from tests.e2e.sdks import WAYS, Told, Way, ask_by, ask_by_all, models_for
from tests.e2e.serving import Serving, serving, tenant
from tests.e2e.voices import TEXT, break_in_band, refuse, refuse_on_200, speak, voice_of
from trio_gateway.contract import Ending, Outcome
from trio_gateway.testing import (
    DONE,
    SSE_HEADERS,
    Chunk,
    CloseFin,
    CloseReset,
    EndChunks,
    EngineRequest,
    Event,
    Head,
    Hold,
    Json,
    Raw,
    Script,
    Step,
    WaitFor,
    chat_request,
    make_certificate,
    open_engine,
    refusing_port,
)

STREAMS: Final = tuple(way for way in WAYS if way.stream)
TENANTS: Final = [tenant("acme", "key-a")]

OPENAI_ERRORS: Final[dict[int, type[Exception]]] = {
    400: openai.BadRequestError,
    401: openai.AuthenticationError,
    403: openai.PermissionDeniedError,
    404: openai.NotFoundError,
    409: openai.ConflictError,
    413: openai.APIStatusError,
    422: openai.UnprocessableEntityError,
    429: openai.RateLimitError,
    502: openai.InternalServerError,
    503: openai.InternalServerError,
    504: openai.InternalServerError,
}
ANTHROPIC_ERRORS: Final[dict[int, type[Exception]]] = {
    400: anthropic.BadRequestError,
    401: anthropic.AuthenticationError,
    403: anthropic.PermissionDeniedError,
    404: anthropic.NotFoundError,
    409: anthropic.ConflictError,
    413: anthropic.APIStatusError,
    422: anthropic.UnprocessableEntityError,
    429: anthropic.RateLimitError,
    502: anthropic.InternalServerError,
    503: anthropic.APIStatusError,
    504: anthropic.APIStatusError,
}


def running(*engines: Any, **sections: Any) -> Any:
    """A gateway with room for all ways at a time, whose own retries are not what is looked at."""
    usual: dict[str, Any] = {
        "worker": {"slots": 4 * len(WAYS)},
        "tenants": TENANTS,
        "models": models_for(WAYS),
        "retry": {"max_attempts": 1},
    }
    return serving(*engines, **{**usual, **sections})


def expect_typed(told: Told, status: int, code: str | None = None) -> None:
    """Expect the SDK's own exception for a status, with our words in it."""
    error = told.error
    name = f"{told.way.name}: {error!r}"
    assert (told.heard.text, told.heard.finished) == ("", False), name
    assert isinstance(error, (ANTHROPIC_ERRORS if told.way.anthropic else OPENAI_ERRORS)[status]), name
    assert isinstance(error, openai.APIStatusError | anthropic.APIStatusError), name
    assert error.status_code == status, name
    assert error.request_id, name
    body = body_of(error)
    assert body["message"], name
    assert code is None or body["code"] == code, name


def body_of(error: openai.APIError | anthropic.APIError) -> dict[str, Any]:
    """The error object of what an SDK raised."""
    body = error.body
    assert isinstance(body, dict)
    return dict(body["error"] if isinstance(error, anthropic.APIError) else body)


def asked(gateway: Serving) -> int:
    """How many requests clients have made."""
    return gateway.gateway.books.arrived


# Before any content -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Failure:
    """How an engine fails before any content, and what it means to callers.

    Attributes:
        final: trying again makes no sense, and the SDK is told so.
        of: the ways that can meet it.
        patience: seconds that the gateway waits for a first token.
    """

    script: Callable[[EngineRequest], Script]
    status: int
    code: str
    final: bool = False
    of: Callable[[Way], bool] = bool
    patience: float = 10.0


def always(*steps: Step) -> Callable[[EngineRequest], Script]:
    return lambda _: steps


def refusing(status: int, **headers: str) -> Callable[[EngineRequest], Script]:
    return lambda _: refuse(status, **headers)


def in_band(status: int) -> Callable[[EngineRequest], Script]:
    return lambda request: refuse_on_200(request, status)


def gives_up(request: EngineRequest) -> Script:
    """End with a finish reason that is none."""
    voice = voice_of(request)
    if voice.streams:
        choice = {"index": 0, "delta": {}, "text": "", "finish_reason": "abort"}
        return (Head(), *voice.quiet, Event({"choices": [choice]}), DONE, EndChunks())
    return (Json({"choices": [{"index": 0, "message": {}, "text": "", "finish_reason": "abort"}]}),)


def lacks_its_end(request: EngineRequest) -> Script:
    """End properly, as if that were all."""
    voice = voice_of(request)
    if voice.streams:
        return (Head(), *voice.quiet, EndChunks())
    assert voice.unfinished is not None
    return (voice.unfinished,)


def garbled(request: EngineRequest) -> Script:
    if voice_of(request).streams:
        return (Head(), Event('{"choices": [}'), EndChunks())
    return (Raw(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{]"),)


def can_lack_its_end(way: Way) -> bool:
    return way.unfinished


def has_choices(way: Way) -> bool:
    return way.choices


FAILURES: Final[dict[str, Failure]] = {
    # 429 and 503, also in-band on a 200
    "429": Failure(refusing(429), 429, "engine_overloaded"),
    "503": Failure(refusing(503), 503, "engine_overloaded"),
    "429 in-band": Failure(in_band(429), 429, "engine_overloaded"),
    "503 in-band": Failure(in_band(503), 503, "engine_overloaded"),
    # finish_reason: abort with no content
    "abort with no content": Failure(gives_up, 503, "engine_overloaded", of=has_choices),
    # 404 for a listed model
    "404": Failure(refusing(404), 404, "model_not_found", final=True),
    # HTTP 500/502/424 and other 5xx (501 as 400)
    "500": Failure(refusing(500), 502, "engine_failed"),
    "502": Failure(refusing(502), 502, "engine_failed"),
    "424": Failure(refusing(424), 502, "engine_failed"),
    "507": Failure(refusing(507), 502, "engine_failed"),
    "500 in-band": Failure(in_band(500), 502, "engine_failed"),
    "501": Failure(refusing(501), 400, "invalid_value", final=True),
    # first-token timeout
    "no first token": Failure(always(Hold()), 504, "first_token_timeout", patience=0.3),
    # cut or malformed
    "cut by FIN": Failure(always(CloseFin()), 502, "engine_failed"),
    "cut by reset": Failure(always(CloseReset()), 502, "engine_failed"),
    "cut within the head": Failure(
        always(Raw(b"HTTP/1.1 200 OK\r\ncontent-ty"), CloseFin()), 502, "engine_failed"
    ),
    "cut within the body": Failure(
        always(Raw(b"HTTP/1.1 500 X\r\ncontent-length: 50\r\n\r\n{"), CloseFin()), 502, "engine_failed"
    ),
    "no finish for each choice": Failure(lacks_its_end, 502, "engine_failed", of=can_lack_its_end),
    "another content type": Failure(
        always(Raw(b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 2\r\n\r\nhi")),
        502,
        "engine_protocol_error",
    ),
    "an illegal head": Failure(always(Raw(b"SSH-2.0-x\r\n\r\n"), CloseFin()), 502, "engine_protocol_error"),
    "an unreadable coding": Failure(
        always(Head(200, (*SSE_HEADERS, ("content-encoding", "br"))), Chunk(b"\x8b\x02"), EndChunks()),
        502,
        "engine_protocol_error",
    ),
    "no JSON": Failure(garbled, 502, ""),
    # out of memory
    "out of memory": Failure(
        lambda _: refuse(500, "CUDA error: out of memory"), 503, "engine_out_of_memory", final=True
    ),
    # HTTP 400/404/413/422 and other 4xx, in-band 4xx
    "400": Failure(refusing(400), 400, "invalid_value", final=True),
    "409": Failure(refusing(409), 409, "invalid_value", final=True),
    "413": Failure(refusing(413), 413, "request_too_large", final=True),
    "422": Failure(refusing(422), 422, "invalid_value", final=True),
    "400 in-band": Failure(in_band(400), 400, "invalid_value", final=True),
    # 401/403/3xx from the engine
    "401": Failure(refusing(401), 502, "engine_credentials", final=True),
    "403": Failure(refusing(403), 502, "engine_credentials", final=True),
    "302": Failure(refusing(302, location="http://127.0.0.1:1/"), 502, "engine_credentials", final=True),
}


@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES.keys())
async def test_a_failure_before_any_content_is_a_typed_exception_in_every_sdk(failure: Failure) -> None:
    ways = [way for way in WAYS if failure.of(way)]
    async with (
        open_engine(failure.script) as engine,
        running(engine, deadlines={"first_token": failure.patience}) as gateway,
    ):
        # Where we say that it makes no sense, two more tries are allowed, and none is made.
        answers = await ask_by_all(gateway, ways, retries=2 if failure.final else 0)
        for told in answers:
            expect_typed(told, failure.status, failure.code or None)
        assert asked(gateway) == engine.statistics().requests == len(ways)


@pytest.mark.parametrize("how", ["refuses", "has a bad certificate", "has no socket"])
async def test_an_engine_that_cannot_be_reached_is_a_typed_exception_in_every_sdk(
    how: str, tmp_path: Path
) -> None:
    certificate = make_certificate(tmp_path, "localhost")
    async with open_engine(tls=certificate.server) as engine:
        with refusing_port() as port:
            url = {
                "refuses": f"http://127.0.0.1:{port}",
                "has a bad certificate": engine.url,
                "has no socket": f"http+unix://{tmp_path}/none.sock",
            }[how]
            async with running(url) as gateway:
                for told in await ask_by_all(gateway):
                    expect_typed(told, 502, "engine_failed")
        assert engine.statistics().requests == 0


async def test_a_kept_connection_that_died_unseen_is_nothing_that_an_sdk_notices() -> None:
    """The engine closes its kept connection at the second request, before any byte of an answer."""

    def script(request: EngineRequest) -> Script:
        return (CloseFin(),) if request.number % 2 == 0 else speak(request)

    async with open_engine(script) as engine, running(engine) as gateway:
        for number, way in enumerate(WAYS[:6], 1):
            told = await ask_by(way, gateway, model=f"m{number}")
            assert told.whole, told
        assert engine.statistics().requests > asked(gateway)
        assert {(record.outcome, record.attempts) for record in gateway.records} == {("completed", 1)}


# Retries ----------------------------------------------------------------------------------------------------


async def test_no_sdk_tries_again_after_our_own_retry() -> None:
    async with (
        open_engine(refuse(500)) as first,
        open_engine(refuse(500)) as second,
        running(first, second, retry={"max_attempts": 2, "budget_ratio": 1.0}) as gateway,
    ):
        for number, way in enumerate(WAYS, 1):
            expect_typed(await ask_by(way, gateway, model=f"m{number}", retries=2), 502, "engine_failed")
        assert asked(gateway) == len(WAYS)
        assert first.statistics().requests == second.statistics().requests == len(WAYS)


@pytest.mark.parametrize("status", [429, 503])
async def test_every_sdk_comes_back_when_we_say_when(status: int) -> None:
    refused: set[object] = set()

    def script(request: EngineRequest) -> Script:
        model = request.json()["model"]
        if model in refused:
            return speak(request)
        refused.add(model)
        return refuse(status, retry_after="1")

    async with open_engine(script) as engine, running(engine) as gateway:
        answers = await ask_by_all(gateway, retries=1)
        assert [told for told in answers if not told.whole] == []
        assert engine.statistics().requests == 2 * len(WAYS)
        await gateway.settled(2 * len(WAYS))  # the last client may know before its record is written
        arrivals: dict[str, list[float]] = {}
        for record in gateway.records:
            arrivals.setdefault(record.model, []).append(record.arrived_at)
        assert len(arrivals) == len(WAYS)
        # The engine asked for a second; by themselves these clients wait for half of one at most.
        waited = {model: max(times) - min(times) for model, times in arrivals.items()}
        assert {model: wait for model, wait in waited.items() if wait <= 0.6} == {}


async def test_every_sdk_gives_up_after_the_retries_that_it_was_given() -> None:
    limits = {"max_attempts": 1, "backoff": 0.05}
    async with open_engine(refuse(503)) as engine, running(engine, retry=limits) as gateway:
        for told in await ask_by_all(gateway, retries=1):
            expect_typed(told, 503, "engine_overloaded")
        assert asked(gateway) == engine.statistics().requests == 2 * len(WAYS)


# After content ----------------------------------------------------------------------------------------------


def then(*steps: Step) -> Callable[[EngineRequest], Script]:
    return lambda request: (*voice_of(request).begun, *steps)


BREAKS: Final[dict[str, tuple[Callable[[EngineRequest], Script], str]]] = {
    "cut by FIN": (then(CloseFin()), "engine_failed"),
    "cut by reset": (then(CloseReset()), "engine_failed"),
    "an end without a finish": (then(EndChunks()), "engine_failed"),
    "[DONE] without a finish": (then(DONE, EndChunks()), "engine_failed"),
    "an error in-band": (lambda request: (*then(break_in_band(request))(request), DONE), "engine_failed"),
    "an event that is no JSON": (then(Event('{"choices": [}, "error": }'), DONE), "engine_protocol_error"),
    "an illegal chunk": (then(Raw(b"zz\r\n")), "engine_protocol_error"),
    "no progress": (then(Hold()), "engine_failed"),
}


@pytest.mark.parametrize(("script", "code"), BREAKS.values(), ids=BREAKS.keys())
async def test_a_stream_that_breaks_raises_in_every_sdk_after_what_had_come(
    script: Callable[[EngineRequest], Script], code: str
) -> None:
    async with open_engine(script) as engine, running(engine, deadlines={"between_events": 1}) as gateway:
        for told in await ask_by_all(gateway, STREAMS, retries=2):
            expect_broken(told, TEXT, code, "after_content")
        assert asked(gateway) == engine.statistics().requests == len(STREAMS)
        assert {record.outcome for record in gateway.records} == {"upstream_failed"}


def expect_broken(told: Told, text: str, code: str, phase: str) -> None:
    """Expect what had come, and then the SDK's exception with the event that ended the stream."""
    name = f"{told.way.name}: {told.error!r}"
    assert (told.heard.text, told.heard.finished) == (text, False), name
    assert isinstance(told.error, openai.APIError | anthropic.APIError), name
    body = body_of(told.error)
    assert (body["code"], body["gateway"]["phase"]) == (code, phase), name


async def test_a_failure_after_heartbeats_raises_in_every_sdk_although_the_status_was_200() -> None:
    go = trio.Event()
    async with (
        open_engine((WaitFor(go), *refuse(500))) as engine,
        running(engine, stream={"heartbeat_after": 0.02}) as gateway,
        trio.open_nursery() as nursery,
    ):

        async def ask() -> None:
            for told in await ask_by_all(gateway, STREAMS):
                expect_broken(told, "", "engine_failed", "before_content")

        nursery.start_soon(ask)
        await gateway.until(
            lambda: sum(one.tally.headers is not None for one in live(gateway)) == len(STREAMS)
        )
        go.set()


@dataclass(frozen=True, slots=True)
class Cancelling:
    """How an exchange is ended by somebody else than its engine and client."""

    outcome: Outcome
    status: int
    code: str
    end: Callable[[Serving], Awaitable[None]]
    headers: dict[str, str] = field(default_factory=dict)


async def by_owner(gateway: Serving) -> None:
    key = {"authorization": "Bearer key-a"}
    for exchange in live(gateway):
        path = f"/v1/requests/{exchange.request.exchange_id}"
        assert (await gateway.fetch("DELETE", path, headers=tuple(key.items()))).status == 200


async def by_shutdown(gateway: Serving) -> None:
    hurry = trio.Event()
    hurry.set()
    await gateway.gateway.shut_down(hurry)


async def by_nobody(_: Serving) -> None:
    await trio.lowlevel.checkpoint()


CANCELLINGS: Final = {
    "its owner": Cancelling(Outcome.CLIENT_CANCELLED, 409, "request_cancelled", by_owner),
    "the shutdown": Cancelling(Outcome.GATEWAY_SHUTDOWN, 503, "gateway_draining", by_shutdown),
    "its deadline": Cancelling(
        Outcome.DEADLINE_EXCEEDED, 504, "deadline_exceeded", by_nobody, {"x-gateway-timeout-ms": "1500"}
    ),
}


def live(gateway: Serving) -> list[Any]:
    return list(gateway.gateway.live)


@pytest.mark.parametrize("cancelling", CANCELLINGS.values(), ids=CANCELLINGS.keys())
async def test_a_request_that_is_ended_before_content_is_a_typed_exception_in_every_sdk(
    cancelling: Cancelling,
) -> None:
    async with (
        open_engine((Hold(),)) as engine,
        running(engine) as gateway,
        trio.open_nursery() as nursery,
    ):

        async def ask() -> None:
            for told in await ask_by_all(gateway, headers=cancelling.headers):
                expect_typed(told, cancelling.status, cancelling.code)

        nursery.start_soon(ask)
        await engine.wait_open(len(WAYS))
        await cancelling.end(gateway)
        await gateway.until(lambda: len(gateway.records) == len(WAYS))
        assert {record.outcome for record in gateway.records} == {cancelling.outcome}


@pytest.mark.parametrize("cancelling", CANCELLINGS.values(), ids=CANCELLINGS.keys())
async def test_a_stream_that_is_ended_raises_in_every_sdk(cancelling: Cancelling) -> None:
    async with (
        open_engine(then(Hold())) as engine,
        running(engine) as gateway,
        trio.open_nursery() as nursery,
    ):

        async def ask() -> None:
            for told in await ask_by_all(gateway, STREAMS, headers=cancelling.headers):
                expect_broken(told, TEXT, cancelling.code, "after_content")

        nursery.start_soon(ask)
        await delivered(gateway)
        await cancelling.end(gateway)
        await gateway.until(lambda: len(gateway.records) == len(STREAMS))
        assert {record.outcome for record in gateway.records} == {cancelling.outcome}
        assert engine.statistics().requests == len(STREAMS)


WORDS: Final = 2  # of `TEXT`: an event for each


async def delivered(gateway: Serving) -> None:
    """Wait until all that was said has been written to every client."""
    await gateway.until(
        lambda: (
            len(found := live(gateway)) == len(STREAMS)
            and all(one.generated >= WORDS and one.buffered == 0 for one in found)
        )
    )


async def test_a_connection_that_is_cut_raises_in_every_sdk() -> None:
    async with (
        open_engine(then(Hold())) as engine,
        running(engine) as gateway,
        trio.open_nursery() as nursery,
    ):

        async def ask() -> None:
            for told in await ask_by_all(gateway, STREAMS, retries=2):
                assert (told.heard.text, told.heard.finished) == (TEXT, False), told
                # Anthropic's SDK leaves the transport's own error as it is.
                assert isinstance(told.error, openai.APIConnectionError | httpx2.RemoteProtocolError), told

        nursery.start_soon(ask)
        await delivered(gateway)
        gateway.gateway.live.end_all(Ending(Outcome.CLIENT_STALLED))
        await gateway.until(lambda: len(gateway.records) == len(STREAMS))
        assert {record.outcome for record in gateway.records} == {"client_stalled"}
        assert engine.statistics().requests == len(STREAMS)


# Our own refusals -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that we refuse, and how.

    Attributes:
        door: what is asked differently.
        sections: of the configuration.
    """

    status: int
    code: str
    door: dict[str, Any]
    sections: dict[str, Any]


REFUSALS: Final[dict[str, Refusal]] = {
    "a wrong key": Refusal(401, "invalid_api_key", {"key": "wrong"}, {}),
    "a model that is not allowed": Refusal(
        403, "model_not_allowed", {}, {"tenants": [tenant("acme", "key-a", models=["m99"])]}
    ),
    "a priority that is not allowed": Refusal(
        403, "priority_not_allowed", {"headers": {"x-gateway-priority": "batch"}}, {}
    ),
    "an unknown model": Refusal(404, "model_not_found", {}, {"models": [{"id": "m99"}]}),
    "a bad header": Refusal(400, "invalid_value", {"headers": {"x-gateway-timeout-ms": "soon"}}, {}),
    "a large body": Refusal(413, "request_too_large", {}, {"limits": {"body_bytes": 16}}),
}


@pytest.mark.parametrize("refusal", REFUSALS.values(), ids=REFUSALS.keys())
async def test_a_refusal_that_is_final_is_a_typed_exception_in_every_sdk_and_none_tries_again(
    refusal: Refusal,
) -> None:
    sections = refusal.sections
    if "tenants" in sections:
        sections = {**sections, "models": [*models_for(WAYS), {"id": "m99"}]}
    async with open_engine(speak) as engine, running(engine, **sections) as gateway:
        for told in await ask_by_all(gateway, retries=2, **refusal.door):
            expect_typed(told, refusal.status, refusal.code)
        assert gateway.turned_away() == {refusal.code: len(WAYS)}
        assert engine.statistics().requests == 0


@pytest.mark.parametrize("max_queued", [0, 100])
async def test_having_no_place_is_a_typed_exception_in_every_sdk(max_queued: int) -> None:
    status, code = (429, "queue_full") if max_queued == 0 else (503, "queue_timeout")
    async with (
        open_engine((Hold(),)) as engine,
        running(
            engine, worker={"slots": 1}, admission={"max_queued": max_queued, "max_wait": 0.1}
        ) as gateway,
        trio.open_nursery() as nursery,
    ):
        with await gateway.connect() as holder:
            await holder.send(chat_request(key="key-a"))
            await engine.request()
            for told in await ask_by_all(gateway):
                expect_typed(told, status, code)
                assert isinstance(told.error, openai.APIStatusError | anthropic.APIStatusError)
                headers = told.error.response.headers
                assert int(headers["retry-after"]) >= 1
                assert int(headers["retry-after-ms"]) > 0
                assert "x-should-retry" not in headers
            holder.leave_reset()
        await gateway.until(lambda: not live(gateway))
        nursery.cancel_scope.cancel()


async def test_a_gateway_that_is_leaving_is_a_typed_exception_in_every_sdk() -> None:
    async with open_engine(speak) as engine, running(engine) as gateway:
        await by_shutdown(gateway)
        for told in await ask_by_all(gateway):
            expect_typed(told, 503, "gateway_draining")
        assert engine.statistics().requests == 0
