"""However an engine fails, its caller gets the documented outcome, and never a false ``[DONE]``."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import pytest
import trio

from tests.e2e.serving import Serving, error_code, serving
from trio_gateway.testing import (
    DONE,
    SSE_HEADERS,
    Answer,
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
    chat_answer,
    chat_chunk,
    chat_request,
    chat_stream,
    completion_stream,
    error_answer,
    error_body,
    error_event,
    json_request,
    open_engine,
    refusing_port,
    silent_port,
)

HEAD, ROLE, ONE, TWO, FINISH = chat_stream("one", "two")[:5]
SIZED_JSON = (("content-type", "application/json"), ("content-length", "50"))
ADDRESS = "10.1.2.3:8000"


@dataclass(frozen=True)
class Told:
    """What the caller of a failed attempt is told, and what the record says."""

    status: int
    code: str
    outcome: str = "upstream_failed"
    fault: bool = True


FAILED = Told(502, "engine_failed")
UNREADABLE = Told(502, "engine_protocol_error")
CREDENTIALS = Told(502, "engine_credentials", fault=False)
OVERLOADED = Told(503, "engine_overloaded", "refused", fault=False)


def passed_on(status: int, code: str = "invalid_value") -> Told:
    return Told(status, code, "refused", fault=False)


def answered(status: int, headers: tuple[tuple[str, str], ...] = ()) -> Script:
    return error_answer(status, headers=headers)


# Before any content, a stream and a buffered answer fail alike.
BEFORE_HEADERS: dict[str, tuple[Script, Told]] = {
    "closes by FIN": ((CloseFin(),), FAILED),
    "closes by reset": ((CloseReset(),), FAILED),
    "closes within its head": ((Raw(b"HTTP/1.1 200 OK\r\ncontent-ty"), CloseFin()), FAILED),
    "says no HTTP": ((Raw(b"SSH-2.0-OpenSSH_9.2\r\n\r\n"), CloseFin()), UNREADABLE),
    "has a bare LF in its head": (
        (Raw(b"HTTP/1.1 200 OK\ncontent-length: 0\n\r\n\r\n"), CloseFin()),
        UNREADABLE,
    ),
    "has a NUL in its head": ((Raw(b"HTTP/1.1 200 OK\r\nx: a\x00b\r\n\r\n"), CloseFin()), UNREADABLE),
    "has an endless head": ((Raw(b"HTTP/1.1 200 OK\r\nx: " + b"a" * 70_000), Hold()), UNREADABLE),
    "has too many headers": (
        (Raw(b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 101 + b"\r\n"), Hold()),
        UNREADABLE,
    ),
    "frames its body twice": (
        (Raw(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n"), Hold()),
        UNREADABLE,
    ),
    "has two lengths": (
        (Raw(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n"), Hold()),
        UNREADABLE,
    ),
    "has a length that is no number": (
        (Raw(b"HTTP/1.1 200 OK\r\ncontent-length: +2\r\n\r\n"), Hold()),
        UNREADABLE,
    ),
    "upgrades": ((Raw(b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\n\r\n"), Hold()), UNREADABLE),
    "uses an unknown coding": (
        (Head(200, (*SSE_HEADERS, ("content-encoding", "br"))), Hold()),
        UNREADABLE,
    ),
    "answers with a page": (
        (Raw(b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 2\r\n\r\nhi"),),
        UNREADABLE,
    ),
    "answers without a type": ((Raw(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"),), UNREADABLE),
    "500": (answered(500), FAILED),
    "502": (answered(502), FAILED),
    "504": (answered(504), FAILED),
    "507": (answered(507), FAILED),
    "424": (answered(424), FAILED),
    "501": (answered(501), passed_on(400)),
    "400": (answered(400), passed_on(400)),
    "404": (answered(404), passed_on(404, "model_not_found")),
    "409": (answered(409), passed_on(409)),
    "413": (answered(413), passed_on(413, "request_too_large")),
    "422": (answered(422), passed_on(422)),
    "499": (answered(499), passed_on(499)),
    "401": (answered(401), CREDENTIALS),
    "403": (answered(403), CREDENTIALS),
    "301": (answered(301, (("location", "http://127.0.0.1:1/"),)), CREDENTIALS),
    "307": (answered(307, (("location", "http://127.0.0.1:1/"),)), CREDENTIALS),
    "204": ((Raw(b"HTTP/1.1 204 No Content\r\n\r\n"),), FAILED),
    "429": (answered(429), Told(429, "engine_overloaded", "refused", fault=False)),
    "503": (answered(503), OVERLOADED),
    "503 with a cut body": (
        (Raw(b"HTTP/1.1 503 Full\r\ncontent-length: 90\r\n\r\n{"), CloseFin()),
        OVERLOADED,
    ),
    "400 with a cut body": (
        (Raw(b"HTTP/1.1 400 Bad\r\ncontent-length: 90\r\n\r\n{"), CloseReset()),
        passed_on(400),
    ),
    "out of memory": (
        error_answer(500, "CUDA out of memory. Tried to allocate 2.00 GiB"),
        Told(503, "engine_out_of_memory", "refused", fault=False),
    ),
}


def encode(step: Step) -> bytes:
    """Write an event as the chunk that an engine would send."""
    assert isinstance(step, Event)
    data = f"data: {json.dumps(step.data)}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(data), data)


def check_refusal(answer: Answer, told: Told) -> None:
    assert (answer.status, error_code(answer)) == (told.status, told.code)
    assert answer.ended == "complete"
    assert answer.header("content-type") == "application/json"
    again_makes_sense = told.status in (429, 503) and told.code != "engine_out_of_memory"
    assert (answer.header("retry-after") is not None) == again_makes_sense
    if again_makes_sense:
        assert answer.header("x-should-retry") is None
    assert ADDRESS.encode() not in answer.body


async def check_record(gateway: Serving, told: Told, phase: str, attempts: int = 1) -> None:
    record = await gateway.settled()
    assert (record.outcome, record.phase, record.code) == (told.outcome, phase, told.code)
    assert record.attempts == attempts
    assert gateway.gateway.fleet.books["w1"].faults == int(told.fault)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "buffered"])
@pytest.mark.parametrize(("script", "told"), BEFORE_HEADERS.values(), ids=BEFORE_HEADERS.keys())
async def test_a_failure_before_the_answer_is_an_http_error(script: Script, told: Told, stream: bool) -> None:
    async with open_engine(script) as engine, serving(engine, retry={"max_attempts": 1}) as gateway:
        answer = await gateway.ask(chat_request(stream=stream))
        check_refusal(answer, told)
        about = answer.error()["gateway"]
        assert isinstance(about, dict)
        assert about["request_id"] == answer.header("x-request-id")
        assert (about["outcome"], about["phase"]) == (told.outcome, "before_headers")
        await check_record(gateway, told, "before_headers")
        assert engine.statistics().requests == 1


@pytest.mark.parametrize("port_of", [refusing_port, silent_port], ids=["refused", "silent"])
async def test_a_worker_that_can_not_be_reached_is_a_502_without_a_word_of_the_system(
    port_of: Callable[[], AbstractContextManager[int]],
) -> None:
    with port_of() as port:
        async with serving(f"http://127.0.0.1:{port}", deadlines={"connect": 0.2}) as gateway:
            answer = await gateway.ask(chat_request())
            check_refusal(answer, FAILED)
            assert str(port).encode() not in answer.body
            assert b"efused" not in answer.body
            await check_record(gateway, FAILED, "before_headers")


async def test_a_missing_unix_socket_is_a_502() -> None:
    async with serving("http+unix:///nowhere/engine.sock") as gateway:
        check_refusal(await gateway.ask(chat_request()), FAILED)
        await check_record(gateway, FAILED, "before_headers")


async def test_a_name_that_is_not_resolved_is_a_502() -> None:
    async with serving("http://engine.invalid:8000") as gateway:
        answer = await gateway.ask(chat_request())
        check_refusal(answer, FAILED)
        assert b"invalid" not in answer.body
        await check_record(gateway, FAILED, "before_headers")


# After the head of a stream, before content: still an HTTP error, for nothing was told yet.
BEFORE_CONTENT: dict[str, tuple[Script, Told]] = {
    "closes by FIN": ((HEAD, CloseFin()), FAILED),
    "closes by reset": ((HEAD, CloseReset()), FAILED),
    "ends properly": ((HEAD, EndChunks()), FAILED),
    "closes after the role": ((HEAD, ROLE, CloseFin()), FAILED),
    "resets after the role": ((HEAD, ROLE, CloseReset()), FAILED),
    "ends after the role": ((HEAD, ROLE, EndChunks()), FAILED),
    "is done after the role": ((HEAD, ROLE, DONE, EndChunks()), FAILED),
    "is done at once": ((HEAD, DONE, EndChunks()), FAILED),
    "cuts a chunk": ((HEAD, Raw(b"ff\r\ndata: {"), CloseFin()), FAILED),
    "breaks a chunk size": ((HEAD, ROLE, Raw(b"xyz\r\n"), Hold()), UNREADABLE),
    "overruns a chunk": ((HEAD, Raw(b"3\r\ndata: {\r\n"), Hold()), UNREADABLE),
    "says an error": ((HEAD, ROLE, error_event(), EndChunks()), FAILED),
    "says an error by name": ((HEAD, Event("not even JSON", "error"), EndChunks()), FAILED),
    "says an error as an object": ((HEAD, Event({"object": "error", "message": "x"}), EndChunks()), FAILED),
    "says an error of class 400": (
        (HEAD, error_event("bad", code=400), EndChunks()),
        passed_on(400),
    ),
    "says an error of class 503": ((HEAD, error_event("full", code=503), EndChunks()), OVERLOADED),
    "says an error of class 429 as text": (
        (HEAD, Event({"error": {"message": "full", "code": "429"}}), EndChunks()),
        Told(429, "engine_overloaded", "refused", fault=False),
    ),
    "runs out of memory": (
        (HEAD, error_event("CUDA out of memory"), EndChunks()),
        Told(503, "engine_out_of_memory", "refused", fault=False),
    ),
    "sends no JSON": ((HEAD, Event('{"choices": [}'), EndChunks()), UNREADABLE),
    "sends an endless event": ((HEAD, Chunk(b'data: {"' + b"x" * 5000), Hold()), UNREADABLE),
    "gives the request up": (
        (HEAD, ROLE, chat_chunk({}, finish="abort"), DONE, EndChunks()),
        OVERLOADED,
    ),
    "fails by a finish reason": ((HEAD, chat_chunk({}, finish="error"), DONE, EndChunks()), FAILED),
    "leaves a choice without a finish": ((HEAD, ROLE, chat_chunk({}, index=1), DONE, EndChunks()), FAILED),
}


@pytest.mark.parametrize(("script", "told"), BEFORE_CONTENT.values(), ids=BEFORE_CONTENT.keys())
async def test_a_failure_before_content_is_an_http_error_too(script: Script, told: Told) -> None:
    async with (
        open_engine(script) as engine,
        serving(engine, retry={"max_attempts": 1}, limits={"event_bytes": 4096}) as gateway,
    ):
        answer = await gateway.ask(chat_request())
        check_refusal(answer, told)
        await check_record(gateway, told, "before_headers")


# After content: all whole events, then the error event, and the body ends.
AFTER_CONTENT: dict[str, tuple[Script, str]] = {
    "closes by FIN": ((CloseFin(),), "engine_failed"),
    "closes by reset": ((CloseReset(),), "engine_failed"),
    "ends properly": ((EndChunks(),), "engine_failed"),
    "is done": ((DONE, EndChunks()), "engine_failed"),
    "is done and stays": ((DONE,), "engine_failed"),
    "cuts an event": (
        (Chunk(b'data: {"choices":[{"index":0,"delta":{"content":"thr'), CloseFin()),
        "engine_failed",
    ),
    "ends within an event": ((Chunk(b'data: {"choices":[]}'), EndChunks()), "engine_failed"),
    "cuts a chunk": ((Raw(b"ff\r\ndata: {"), CloseFin()), "engine_failed"),
    "breaks a chunk size": ((Raw(b"-1\r\n"), Hold()), "engine_protocol_error"),
    "says an error": ((error_event(), EndChunks()), "engine_failed"),
    "says an error and is done": ((error_event(), DONE, EndChunks()), "engine_failed"),
    "says an error of class 400": ((error_event("bad", code=400), DONE, EndChunks()), "invalid_value"),
    "says an error of class 503": ((error_event("full", code=503), DONE, EndChunks()), "engine_overloaded"),
    "sends no JSON": ((Event('{"finish_reason": '), DONE, EndChunks()), "engine_protocol_error"),
    "sends an endless event": ((Chunk(b'data: {"' + b"x" * 5000), Hold()), "engine_protocol_error"),
    "gives the request up": ((chat_chunk({}, finish="abort"), DONE, EndChunks()), "engine_overloaded"),
    "fails by a finish reason": ((chat_chunk({}, finish="error"), DONE, EndChunks()), "engine_failed"),
    "finishes another choice": ((chat_chunk({}, index=1, finish="stop"), CloseFin()), "engine_failed"),
}


@pytest.mark.parametrize(("script", "code"), AFTER_CONTENT.values(), ids=AFTER_CONTENT.keys())
async def test_after_content_all_whole_events_arrive_and_then_the_error(script: Script, code: str) -> None:
    begun = (HEAD, ROLE, ONE, TWO)
    async with (
        open_engine((*begun, *script)) as engine,
        serving(engine, limits={"event_bytes": 4096}) as gateway,
    ):
        answer = await gateway.ask(chat_request())
        reading = answer.chat()
        assert answer.ended == "complete"
        assert (reading.text, reading.done) == ("onetwo", 0)
        assert answer.events is not None
        assert (answer.events.problems, answer.events.fields) == ([], {"data"})
        (error,) = reading.errors
        assert answer.events.events[-1].json() == {"error": error}
        assert error["code"] == code
        about = error["gateway"]
        assert isinstance(about, dict)
        assert (about["outcome"], about["phase"], about["retryable"]) == (
            "upstream_failed",
            "after_content",
            False,
        )
        assert about["tokens_delivered"] == 2
        record = await gateway.settled()
        assert (record.outcome, record.phase, record.code, record.status) == (
            "upstream_failed",
            "after_content",
            code,
            200,
        )
        assert record.attempts == 1
        await gateway.returned()


@pytest.mark.parametrize(
    "fault",
    [b"xyz\r\n", b"5\r\nabcdefg\r\n", b"1005\r\ndata: {" + b"x" * 4093 + b"\r\n"],
    ids=["a malformed size", "an overrun chunk", "an endless event"],
)
async def test_whole_events_that_arrive_together_with_the_fault_are_delivered(fault: bytes) -> None:
    async with (
        open_engine((HEAD, ROLE, Raw(encode(ONE) + encode(TWO) + fault), Hold())) as engine,
        serving(engine, limits={"event_bytes": 4096}) as gateway,
    ):
        reading = (await gateway.ask(chat_request())).chat()
        assert (reading.text, reading.done) == ("onetwo", 0)
        assert [error["code"] for error in reading.errors] == ["engine_protocol_error"]


@pytest.mark.parametrize(
    "choice",
    [
        {"index": 0, "delta": {"reasoning_content": "hm"}, "finish_reason": None},
        {"index": 0, "delta": {"refusal": "no"}, "finish_reason": None},
        {"index": 0, "delta": {"tool_calls": [{"index": 0, "id": "a"}]}, "finish_reason": None},
        {"index": 0, "delta": {}, "logprobs": {"content": [{"token": "a"}]}, "finish_reason": None},
        {"index": 0, "delta": {}, "token_ids": [1], "finish_reason": None},
        {"index": 0, "delta": {}, "finish_reason": "length"},
    ],
    ids=["reasoning", "refusal", "tool call", "logprobs", "token ids", "finish"],
)
async def test_every_kind_of_output_commits(choice: dict[str, object]) -> None:
    script = (HEAD, ROLE, Event({"choices": [choice]}), CloseFin())
    async with open_engine(script) as engine, serving(engine) as gateway:
        answer = await gateway.ask(chat_request(n=2))
        assert answer.status == 200
        assert (len(answer.chat().errors), answer.chat().done) == (1, 0)
        assert (await gateway.settled()).phase == "after_content"


@pytest.mark.parametrize(
    "choice",
    [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None},
        {"index": 0, "delta": {"content": None}, "logprobs": None, "finish_reason": None},
        {"index": 0, "delta": {"tool_calls": []}, "finish_reason": None},
        {"index": 0, "delta": {}, "finish_reason": None},
    ],
    ids=["role", "null", "empty list", "empty"],
)
async def test_empty_deltas_do_not_commit(choice: dict[str, object]) -> None:
    script = (HEAD, Event({"choices": [choice]}), CloseFin())
    async with open_engine(script) as engine, serving(engine) as gateway:
        assert (await gateway.ask(chat_request())).status == 502


async def test_a_failure_after_a_heartbeat_is_an_error_event() -> None:
    go = trio.Event()
    async with (
        open_engine((HEAD, ROLE, WaitFor(go), CloseFin())) as engine,
        serving(engine, stream={"heartbeat_after": 0.03}) as gateway,
    ):
        with trio.fail_after(10), await gateway.connect() as client:
            await client.send(chat_request())
            await client.read_until(b": keep-alive")
            go.set()
            answer = await client.read_to_end()
        reading = answer.chat()
        assert (answer.status, answer.ended) == (200, "complete")
        assert (reading.text, reading.roles, reading.done) == ("", {}, 0)
        assert [error["code"] for error in reading.errors] == ["engine_failed"]
        await check_record(gateway, FAILED, "before_content")


@pytest.mark.parametrize("operation", ["chat", "completions"])
async def test_clients_that_only_look_at_finish_reasons_can_be_shown_one(operation: str) -> None:
    chat = operation == "chat"
    script = (
        *(chat_stream if chat else completion_stream)("one", finish=None, done=False, end=False),
        CloseFin(),
    )
    body = {"model": "m1", "stream": True, "prompt": "hi"}
    request = chat_request() if chat else json_request("/v1/completions", body)
    async with (
        open_engine(script) as engine,
        serving(engine, stream={"error_style": "finish_reason"}) as gateway,
    ):
        reading = (await gateway.ask(request)).chat()
        assert (reading.text, reading.finishes, reading.done) == ("one", {0: "error"}, 0)
        assert len(reading.errors) == 1


# Whole answers that are not what they should be.
BAD_BODIES: dict[str, tuple[Script, Told]] = {
    "is cut by FIN": ((Head(200, SIZED_JSON), Raw(b'{"a":'), CloseFin()), FAILED),
    "is cut by reset": ((Head(200, SIZED_JSON), Raw(b'{"a":'), CloseReset()), FAILED),
    "is cut within chunks": (
        (
            Head(200, (("content-type", "application/json"), ("transfer-encoding", "chunked"))),
            Chunk(b"{}"),
            CloseFin(),
        ),
        FAILED,
    ),
    "is no JSON": (
        (Raw(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{]"),),
        FAILED,
    ),
    "is no object": ((Json([1]),), FAILED),
    "has no choices": ((Json({"choices": []}),), FAILED),
    "has an unfinished choice": (
        (Json({"choices": [{"index": 0, "message": {"content": "x"}, "finish_reason": None}]}),),
        FAILED,
    ),
    "lacks a choice": (chat_answer(choices=1), FAILED),
    "was given up": (chat_answer("", choices=2, finish="abort"), OVERLOADED),
    "was given up in its middle": (chat_answer("x", choices=2, finish="abort"), FAILED),
    "failed by a finish reason": (chat_answer("", choices=2, finish="error"), FAILED),
    "is an error": ((Json(error_body("broke")),), FAILED),
    "is an error object": ((Json({"object": "error", "message": "bad", "code": 400}),), passed_on(400)),
    "is an error of class 429": (
        (Json(error_body("full", code=429)),),
        Told(429, "engine_overloaded", "refused", fault=False),
    ),
    "is an event stream": (chat_stream("one"), UNREADABLE),
    "is too large": (
        (Head(200, (("content-type", "application/json"), ("content-length", "90000"))), Raw(b" " * 90_000)),
        Told(502, "engine_protocol_error", fault=False),
    ),
}


@pytest.mark.parametrize(("script", "told"), BAD_BODIES.values(), ids=BAD_BODIES.keys())
async def test_a_buffered_answer_is_judged_before_its_head_is_sent(script: Script, told: Told) -> None:
    async with (
        open_engine(script) as engine,
        serving(engine, retry={"max_attempts": 1}, limits={"answer_bytes": 65536}) as gateway,
    ):
        answer = await gateway.ask(chat_request(stream=False, n=2))
        check_refusal(answer, told)
        await check_record(gateway, told, "before_headers")


# What engines say about their callers' mistakes.


async def test_an_engines_message_about_a_request_goes_to_its_caller() -> None:
    body = {
        "error": {
            "message": "bad temperature",
            "type": "BadRequestError",
            "param": "temperature",
            "code": 400,
        }
    }
    async with open_engine((Json(body, 400),)) as engine, serving(engine) as gateway:
        answer = await gateway.ask(chat_request(temperature=-1))
        error = answer.error()
        assert (answer.status, error["message"], error["type"], error["param"], error["code"]) == (
            400,
            "bad temperature",
            "BadRequestError",
            "temperature",
            "invalid_value",
        )
        assert answer.header("x-should-retry") == "false"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"object": "error", "message": "flat", "type": "BadRequestError"}, "flat"),
        ({"error": "a string"}, "a string"),
        ({"detail": "of FastAPI"}, "of FastAPI"),
        ({"error": {"message": "line\none\x1b[31m"}}, "line one [31m"),
        ({"error": {"message": "é" * 2000}}, "é" * 512),
    ],
    ids=["flat", "string", "detail", "control characters", "long"],
)
async def test_every_shape_of_an_engines_error_is_read(body: dict[str, object], message: str) -> None:
    async with open_engine((Json(body, 400),)) as engine, serving(engine) as gateway:
        assert (await gateway.ask(chat_request())).error()["message"] == message


async def test_a_message_that_names_the_worker_or_its_key_is_cleaned(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("very-secret-key")

    def script(request: EngineRequest) -> Script:
        where = request.header("host")
        return error_answer(400, f"call {where} at http://{where}/v1 with very-secret-key")

    async with (
        open_engine(script) as engine,
        serving(engine, folder=tmp_path, worker={"api_key_file": "key"}) as gateway,
    ):
        answer = await gateway.ask(chat_request())
        assert answer.status == 400
        assert str(engine.port).encode() not in answer.body
        assert b"very-secret-key" not in answer.body
        assert engine.requests[0].header("authorization") == "Bearer very-secret-key"


async def test_an_engines_401_is_not_shown() -> None:
    script = error_answer(401, "key hunter2 is wrong", headers=(("www-authenticate", "Basic"),))
    async with open_engine(script) as engine, serving(engine) as gateway:
        answer = await gateway.ask(chat_request())
        assert answer.status == 502
        assert b"hunter2" not in answer.body
        assert answer.header("www-authenticate") is None
        assert answer.header("x-should-retry") == "false"


async def test_an_error_body_is_read_only_to_a_bound() -> None:
    huge = (
        Head(400, (("content-type", "application/json"), ("transfer-encoding", "chunked"))),
        Chunk(b'{"error": {"message": "' + b"x" * 200_000),
        Hold(),
    )
    async with open_engine(huge) as engine, serving(engine) as gateway:
        answer = await gateway.ask(chat_request())
        assert answer.status == 400
        assert len(answer.body) < 2048


async def test_no_answer_header_of_an_engine_reaches_the_client() -> None:
    old = "Sun, 06 Nov 1994 08:49:37 GMT"
    own = (("set-cookie", "a=b"), ("x-secret", "1"), ("server", "uvicorn"), ("date", old))
    head = Head(200, (*SSE_HEADERS, *own))
    async with (
        open_engine((head, *chat_stream("one")[1:])) as engine,
        serving(engine) as gateway,
    ):
        answer = await gateway.ask(chat_request())
        assert answer.header("date") != old
        assert {name for name, _ in answer.head.fields} == {
            "date",
            "x-request-id",
            "x-gateway-queue-ms",
            "content-type",
            "cache-control",
            "x-accel-buffering",
            "transfer-encoding",
        }


async def test_an_operator_reads_why_a_worker_could_not_be_reached() -> None:
    with refusing_port() as port:
        url = f"http://127.0.0.1:{port}"
        async with serving(url) as gateway:
            answer = await gateway.ask(chat_request())
            assert answer.status == 502
            assert b"refused" not in answer.body
    (line,) = gateway.logged("attempt_failed")
    assert line["worker"] == "w1"
    assert "Connection refused" in line["detail"]
    assert line["exchange_id"] == gateway.records[0].exchange_id
