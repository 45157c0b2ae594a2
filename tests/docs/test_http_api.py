"""The page of the public HTTP API: its lists are those of the code, and its bounds answer as it says."""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Awaitable, Callable
from typing import Any, Final

import pytest
import trio

from tests.docs.pages import blocks, column, constants, modules, section, setting_defaults, table, words
from tests.e2e.serving import Serving, error_code, serving, tenant
from trio_gateway.contract import OPERATIONS
from trio_gateway.testing import (
    Answer,
    EndChunks,
    Event,
    Head,
    Hold,
    Json,
    Raw,
    RawClient,
    Script,
    chat_answer,
    chat_request,
    chat_stream,
    error_answer,
    http_request,
    json_request,
    open_engine,
    refusing_port,
)

PAGE: Final = "reference/http-api.md"
ON_A_FREE_PORT: Final = {"bind": ["127.0.0.1:0"]}
SOON_OVER: Final = (("x-gateway-timeout-ms", "400"),)  # of requests that only hold something


OF_AN_EMPTY_REQUEST: Final = ("missing_field", "unsupported_media_type", "request_not_found")
OF_A_BROWSER: Final = (
    ("origin", "https://page.example"),
    ("access-control-request-method", "POST"),
    ("access-control-request-headers", "x-api-key"),
)


# Routes ---------------------------------------------------------------------------------------------------


def test_every_route_is_described() -> None:
    (door,) = modules("edge/_routes.py").values()
    written = {text.rstrip("/") for text in constants(door, str) if text.startswith("/") and len(text) > 1}
    paths = written | {operation.path for operation in OPERATIONS}
    described = {path.replace("/v1/requests/{id}/", "/") for path in column(PAGE, "Routes", "Route")}
    assert {path.removesuffix("/{id}") for path in described} == paths


def test_every_operation_is_described_with_its_input() -> None:
    routes = {row["Operation"]: row["Route"] for row in table(PAGE, "Routes") if row["Operation"]}
    assert routes == {f"`{operation.name}`": f"`{operation.path}`" for operation in OPERATIONS}
    inputs = {
        row["Operation"].strip("`"): (row["Field"].strip("`"), words(row["Or any of"]))
        for row in table(PAGE, "The body", number=2)
    }
    assert inputs == {operation.name: (operation.input, list(operation.instead)) for operation in OPERATIONS}


def test_the_page_says_which_operations_can_be_streamed() -> None:
    for row in table(PAGE, "Routes"):
        for operation in OPERATIONS:
            if row["Operation"] == f"`{operation.name}`":
                assert ("streamed" in row["Answer"]) == operation.streams


async def test_every_route_has_the_listed_methods_and_no_others() -> None:
    async with open_engine() as engine, serving(engine) as gateway:
        for row in table(PAGE, "Routes"):
            path = row["Route"].strip("`").replace("{id}", "m1")
            answer = await gateway.fetch("PATCH", path)
            assert (answer.status, answer.header("allow")) == (405, row["Methods"])
            for method in row["Methods"].split(", "):
                answer = await gateway.fetch(method, path, body=b"{}" if method == "POST" else None)
                assert answer.status != 405, (method, path)
                if answer.status >= 400 and method != "HEAD":
                    assert error_code(answer) in (
                        "missing_field",
                        "unsupported_media_type",
                        "request_not_found",
                        "upgrade_required",
                    )


# Headers --------------------------------------------------------------------------------------------------

# Values of headers, and the scheme of a key, in code that compares bytes.
VALUES: Final = {"bearer", "identity", "close", "keep-alive", "chunked", "true"}
WRITERS: Final = (
    "edge/_generate.py",
    "edge/_head.py",
    "edge/_http_client.py",
    "edge/_http_server.py",
    "edge/_problems.py",
    "edge/_routes.py",
    "exchange/_exchange.py",
)
READERS: Final = (
    "edge/_authenticate.py",
    "edge/_client_address.py",
    "edge/_generate.py",
    "edge/_routes.py",
    "wire/_http1.py",
)


def is_header(text: str) -> bool:
    return text.replace("-", "").isalpha() and text.islower()


def test_every_header_that_is_read_is_described() -> None:
    read = {text for tree in modules(*READERS).values() for text in constants(tree, bytes) if is_header(text)}
    described = {name.lower() for name in column(PAGE, "Headers that are read", "Header")}
    assert described == read - VALUES


def test_every_header_that_can_be_sent_is_described() -> None:
    sent = {
        node.elts[0].value
        for tree in modules(*WRITERS).values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Tuple) and len(node.elts) == 2
        if isinstance(node.elts[0], ast.Constant) and isinstance(node.elts[0].value, str)
        if is_header(node.elts[0].value)
    }
    # 426 is reserved, and with it the header that would go with it.
    assert set(column(PAGE, "Headers that are sent", "Header")) == sent - {"upgrade"}


async def test_every_header_that_is_described_is_sent_and_no_other() -> None:
    scripts: tuple[Script, ...] = (chat_stream("a"), chat_answer(), error_answer(400))
    async with (
        open_engine(*scripts) as engine,
        serving(
            engine,
            server={"bind": ["127.0.0.1:0"], "expose_worker": True, "cors_origins": ["https://page.example"]},
            tenants=[
                tenant(
                    "t1",
                    "k",
                    max_queued=0,
                    max_concurrency=1,
                    requests_per_minute=100,
                    tokens_per_minute=100_000,
                )
            ],
        ) as gateway,
    ):
        named = (("x-client-request-id", "mine"),)
        answers = [
            await gateway.ask(chat_request(key="k", headers=named)),
            await gateway.ask(chat_request(key="k", stream=False)),
            await gateway.ask(chat_request(key="k")),
            await gateway.ask(chat_request()),
            await gateway.ask(http_request("GET", "/v1/completions")),
            await gateway.ask(http_request("GET", "/v1/messages")),
            await gateway.ask(chat_request(key="k", headers=(("content-encoding", "br"),))),
            await gateway.ask(http_request("GET", "/livez", headers=(("connection", "close"),))),
        ]
        question = (
            ("access-control-request-method", "POST"),
            ("access-control-request-headers", "x-api-key"),
        )
        page = (("origin", "https://page.example"),)
        answers.append(await gateway.ask(http_request("OPTIONS", "/v1/models", headers=(*page, *question))))
        engine.rescript((Hold(),))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(gateway.ask, chat_request(key="k", headers=SOON_OVER))
            await gateway.until(lambda: gateway.held == 1)
            answers.append(await gateway.ask(chat_request(key="k")))
    sent = {name for answer in answers for name, _ in answer.head.fields}
    assert sent == set(column(PAGE, "Headers that are sent", "Header"))


# The body -------------------------------------------------------------------------------------------------


def test_every_field_that_is_looked_at_is_described() -> None:
    (tree,) = modules("wire/_requests.py").values()
    classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}

    def fields_of(name: str) -> list[str]:
        return [
            item.target.id
            for item in classes[name].body
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        ]

    expected = set(fields_of("_Acted")) | {f"stream_options.{field}" for field in fields_of("_StreamOptions")}
    assert set(column(PAGE, "The body", "Field")) == expected


# Bounds ---------------------------------------------------------------------------------------------------


def bounds() -> dict[str, dict[str, str]]:
    return {row["Setting"].strip("`"): row for row in table(PAGE, "Bounds")}


def test_every_bound_stands_with_its_default() -> None:
    assert {setting: row["Default"].strip("`") for setting, row in bounds().items()} == {
        setting: default for setting, default in setting_defaults().items() if setting in bounds()
    }


def test_every_limit_on_clients_is_a_bound() -> None:
    limits = {name for name in setting_defaults() if name.startswith("limits.")}
    assert limits <= bounds().keys()


Sections = dict[str, Any]
Asking = Callable[[Serving], Awaitable[Answer]]

SLOW: Final[Script] = (Hold(),)
BIG_EVENT: Final[Script] = (Head(), Event("{" + " " * 2000 + "}"))
SILENT_BODY: Final[Script] = (
    Head(200, (("content-type", "application/json"), ("content-length", "9"))),
    Raw(b"{"),
    Hold(),
)


def asks(request: bytes) -> Asking:
    async def ask(gateway: Serving) -> Answer:
        return await gateway.ask(request)

    return ask


def asks_twice(request: bytes) -> Asking:
    async def ask(gateway: Serving) -> Answer:
        await gateway.ask(request)
        return await gateway.ask(request)

    return ask


def asks_beside_another(request: bytes) -> Asking:
    """Ask while another request holds the only slot."""

    async def ask(gateway: Serving) -> Answer:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(gateway.ask, chat_request(headers=SOON_OVER))
            await gateway.until(lambda: gateway.held == 1)
            answers = [await gateway.ask(request)]
        return answers[0]

    return ask


def asks_behind_a_waiter(request: bytes) -> Asking:
    """Ask while one request holds the only slot and another waits for it."""

    async def ask(gateway: Serving) -> Answer:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(asks_beside_another(chat_request(headers=SOON_OVER)), gateway)
            await gateway.queued(1)
            answers = [await gateway.ask(request)]
        return answers[0]

    return ask


def sends(part: bytes) -> Asking:
    """Send a part of a request and wait."""

    async def ask(gateway: Serving) -> Answer:
        with await gateway.connect() as client:
            await client.send(part)
            return await _first_answer(client)

    return ask


async def _first_answer(client: RawClient) -> Answer:
    with trio.fail_after(10):
        return await client.read_to_end()


HALF_BODY: Final = b"POST /v1/embeddings HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\n{"
ONE_SLOT: Final = {"slots": 1}

# Setting: value, script of the engine, what the client does, further sections.
CASES: Final[dict[str, tuple[object, Script, Asking, Sections]]] = {
    "limits.head_bytes": (256, SLOW, asks(http_request("GET", "/" + "x" * 300)), {}),
    "limits.head_count": (3, SLOW, asks(http_request("GET", "/", headers=(("a", "b"),) * 4)), {}),
    "limits.head_timeout": (0.05, SLOW, sends(b"GET / HTTP/1.1\r\n"), {}),
    "limits.body_bytes": (10, SLOW, asks(chat_request()), {}),
    "limits.body_timeout": (0.05, SLOW, sends(HALF_BODY), {}),
    "limits.unplaced_bytes": (
        150,
        SLOW,
        asks_behind_a_waiter(chat_request()),
        {"worker": ONE_SLOT, "limits": {"body_bytes": 150}},
    ),
    "limits.json_values": (2, SLOW, asks(chat_request()), {}),
    "limits.event_bytes": (1000, BIG_EVENT, asks(chat_request()), {}),
    "limits.answer_bytes": (10, chat_answer(), asks(chat_request(stream=False)), {}),
    "admission.max_queued": (0, SLOW, asks_beside_another(chat_request()), {"worker": ONE_SLOT}),
    "admission.max_queued_bytes": (10, SLOW, asks_beside_another(chat_request()), {"worker": ONE_SLOT}),
    "admission.max_wait": (0.05, SLOW, asks_beside_another(chat_request()), {"worker": ONE_SLOT}),
    "tenants.requests_per_minute": (1, chat_answer(), asks_twice(chat_request(key="k", stream=False)), {}),
    "tenants.tokens_per_minute": (10, chat_answer(), asks_twice(chat_request(key="k", stream=False)), {}),
    "deadlines.default": (0.05, SLOW, asks(chat_request()), {}),
    "deadlines.first_token": (0.05, SLOW, asks(chat_request()), {}),
}


@pytest.mark.parametrize("setting", CASES)
async def test_a_bound_has_the_answer_that_stands_on_the_page(setting: str) -> None:
    value, script, ask, sections = CASES[setting]
    group, _, key = setting.partition(".")
    if group == "tenants":
        sections = {"tenants": [tenant("t1", "k", **{key: value})]}
    else:
        sections = sections | {group: {key: value, **sections.get(group, {})}}
    async with open_engine(script) as engine, serving(engine, **sections) as gateway:
        answer = await ask(gateway)
        told = f"{answer.status} `{error_code(answer)}`"
        closes = answer.header("connection") == "close"
    described = bounds()[setting]["Answer"]
    assert told in described
    assert closes == ("then close" in described)


async def test_a_worker_that_refuses_connections_is_told_as_the_page_says() -> None:
    with refusing_port() as port:
        async with serving(f"http://127.0.0.1:{port}") as gateway:
            answer = await gateway.ask(chat_request())
    assert f"{answer.status} `{error_code(answer)}`" in bounds()["deadlines.connect"]["Answer"]


async def test_an_engine_that_falls_silent_is_told_as_the_page_says() -> None:
    silent_stream = (*chat_stream("a", done=False, finish=None, end=False), Hold())
    described = bounds()["deadlines.between_events"]["Answer"]
    async with (
        open_engine(silent_stream, SILENT_BODY) as engine,
        serving(engine, deadlines={"between_events": 0.05, "first_token": 9}) as gateway,
    ):
        streamed = await gateway.ask(chat_request())
        assert streamed.status == 200
        assert f"an error event `{streamed.chat().errors[0]['code']}`" in described
        buffered = await gateway.ask(chat_request(stream=False))
        assert f"buffered: {buffered.status} `{error_code(buffered)}`" in described


# What is told of streams ----------------------------------------------------------------------------------


async def test_an_error_ends_a_stream_in_the_form_that_stands_on_the_page() -> None:
    broken = chat_stream("a", done=False, finish=None)
    async with open_engine(broken) as engine, serving(engine) as gateway:
        answer = await gateway.ask(chat_request())
    reading = answer.chat()
    assert not reading.done
    (error,) = reading.errors
    (example,) = [
        line for line in section(PAGE, "Streamed answers").splitlines() if line.startswith("data: ")
    ]
    assert [key for key in error if f'"{key}":' in example] == list(error)
    assert (str(error["type"]), str(error["code"])) == ("upstream_error", "engine_failed")


async def test_the_error_of_an_accepted_request_has_the_fields_that_the_page_of_errors_lists() -> None:
    async with open_engine(error_answer(400)) as engine, serving(engine) as gateway:
        error = (await gateway.ask(chat_request())).error()
    gateway_fields = error["gateway"]
    assert isinstance(gateway_fields, dict)
    assert list(gateway_fields) == column("reference/errors.md", "Form", "Field")


async def test_a_request_that_was_turned_away_has_no_account_of_an_exchange() -> None:
    async with open_engine() as engine, serving(engine) as gateway:
        answer = await gateway.ask(json_request("/v1/chat/completions", {}))
    assert "gateway" not in answer.error()


async def test_an_error_of_messages_has_the_type_that_the_page_of_errors_gives_to_its_status() -> None:
    (tree,) = modules("edge/_problems.py").values()
    (found,) = [
        node.value
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "_ANTHROPIC_TYPES"
    ]
    listed = {
        row["HTTP"]: row["`error.type`"].strip("`")
        for row in table("reference/errors.md", "Under `/v1/messages`")
    }
    assert found is not None
    fixed = {str(status): kind for status, kind in ast.literal_eval(found).items()}
    assert {status: kind for status, kind in listed.items() if status.isdigit()} == fixed
    async with open_engine() as engine, serving(engine) as gateway:
        refused = await gateway.ask(json_request("/v1/messages", {"model": "m1"}))
        failed = await gateway.ask(
            json_request("/v1/messages", {"model": "m1", "messages": [{"role": "user", "content": "a"}]})
        )
    assert refused.json()["type"] == "error"
    assert refused.error()["type"] == listed["any other below 500"]
    assert (failed.status, failed.error()["type"]) == (502, listed["any other"])


async def test_an_error_ends_a_stream_of_responses_in_the_shape_that_stands_on_the_page() -> None:
    created = {"type": "response.created", "sequence_number": 0, "response": {"id": "r", "model": "m1"}}
    delta = {"type": "response.output_text.delta", "sequence_number": 6, "delta": "a"}
    broken: Script = (
        Head(),
        Event(created, "response.created"),
        Event(delta, "response.output_text.delta"),
        EndChunks(),
    )
    async with open_engine(broken) as engine, serving(engine) as gateway:
        answer = await gateway.ask(
            json_request("/v1/responses", {"model": "m1", "input": "a", "stream": True})
        )
    assert answer.events is not None
    last = answer.events.events[-1]
    (example,) = blocks(section("reference/errors.md", "In a stream of `/v1/responses`"), "json")
    shown, told = json.loads(example), json.loads(last.data)
    assert last.name == "error"
    assert list(told) == list(shown)
    assert [told[key] for key in ("type", "code", "param", "sequence_number")] == [
        shown[key] for key in ("type", "code", "param", "sequence_number")
    ]
    assert list(told["error"]) == list(shown["error"])
    assert [told["error"][key] for key in ("type", "code")] == [
        shown["error"][key] for key in ("type", "code")
    ]


async def test_a_receipt_can_be_checked_as_the_page_says() -> None:
    async with open_engine(chat_stream("a", "b")) as engine, serving(engine) as gateway:
        answer = await gateway.ask(chat_request(headers=(("x-gateway-receipt", "1"),)))
        record = await gateway.settled()
    assert answer.events is not None
    data = [event.data for event in answer.events.events if event.data != "[DONE]"]
    digest = hashlib.sha256("".join(f"{text}\n" for text in data).encode()).hexdigest()
    (form,) = blocks(section(PAGE, "Receipts"), "text")
    comment = form.strip().replace("<64 hexadecimal digits>", digest).replace("<number>", str(len(data)))
    assert f"{comment}\n\ndata: [DONE]\n\n".encode() in answer.body
    assert record.receipt == digest


# What else the page tells -----------------------------------------------------------------------------------


async def test_an_owner_is_told_the_listed_fields_and_can_cancel(nursery: trio.Nursery) -> None:
    fields = column(PAGE, "One's own requests", "Field")
    endless = (*chat_stream("a", finish=None, done=False, end=False), Hold())
    async with open_engine(endless) as engine, serving(engine) as gateway:
        with await gateway.connect() as client:
            await client.send(chat_request())
            with trio.fail_after(10):
                await client.read_events(2)
            (answer,) = client.answers
            path = f"/v1/requests/{answer.header('x-request-id')}"
            told = (await gateway.get(path)).json()
            assert (list(told), told["state"]) == (fields, "running")
            ended = (await gateway.fetch("DELETE", path)).json()
            assert (list(ended), ended["state"], ended["outcome"]) == (fields, "ended", "client_cancelled")
            with trio.fail_after(10):
                await client.read_to_end()
            assert answer.chat().errors[0]["code"] == "request_cancelled"


async def test_a_list_that_an_engine_answers_to_rerank_comes_back_though_the_model_is_renamed() -> None:
    scores = [{"index": 0, "score": 0.5}]
    models = [{"id": "m1", "upstream": "org/m1"}]
    async with open_engine((Json(scores),)) as engine, serving(engine, models=models) as gateway:
        answer = await gateway.ask(
            json_request("/v1/rerank", {"model": "m1", "query": "a", "documents": ["b"]})
        )
    assert (answer.status, json.loads(answer.body)) == (200, scores)
