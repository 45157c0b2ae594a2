"""The public routes, and the order in which a request is judged."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio

from tests.e2e.serving import Headers, Serving, error_code, serving, tenant
from trio_gateway.testing import Answer, WaitFor, chat_request, chat_stream, good_answer, open_engine

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
TENANTS = [
    tenant("acme", "key-a", models=["org/small"], tiers=["standard", "batch"]),
    tenant("zeta", "key-z", engine_fields=True),
]
MODELS = [{"id": "org/small", "upstream": "s"}, {"id": "large"}]


def bearer(key: str) -> Headers:
    return (("authorization", f"Bearer {key}"),)


async def post(gateway: Serving, body: bytes | dict[str, Any], *headers: tuple[str, str]) -> Answer:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await gateway.fetch("POST", CHAT, headers=headers, body=raw)


# Health -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/livez", "/readyz"])
async def test_health_is_told_without_a_key(path: str) -> None:
    async with open_engine() as engine, serving(engine, tenants=TENANTS, models=MODELS) as gateway:
        answer = await gateway.get(path)
        assert (answer.status, answer.json()) == (200, {"status": "ok"})
        head = await gateway.fetch("HEAD", path)
        assert (head.status, head.body) == (200, b"")
        assert head.header("content-length") == str(len(answer.body))
        assert gateway.gateway.books.arrived == 0


async def test_a_gateway_without_workers_is_alive_but_not_ready() -> None:
    async with serving(models=[]) as gateway:
        assert (await gateway.get("/livez")).status == 200
        answer = await gateway.get("/readyz")
        assert (answer.status, answer.json()) == (
            503,
            {"status": "not ready", "reason": "there is no worker"},
        )


async def test_a_busy_gateway_is_ready(nursery: trio.Nursery) -> None:
    go = trio.Event()
    async with (
        open_engine((WaitFor(go), *chat_stream("ok"))) as engine,
        serving(engine, worker={"slots": 1}, admission={"max_queued": 0}) as gateway,
    ):
        nursery.start_soon(gateway.ask, chat_request())
        await engine.wait_open(1)
        assert (await gateway.get("/readyz")).status == 200
        go.set()
        await gateway.settled()


# Models -----------------------------------------------------------------------------------------------------


async def test_models_are_those_of_the_tenant_by_their_public_names() -> None:
    async with open_engine() as engine, serving(engine, tenants=TENANTS, models=MODELS) as gateway:
        for key, names in (("key-a", ["org/small"]), ("key-z", ["org/small", "large"])):
            answer = await gateway.fetch("GET", "/v1/models", headers=bearer(key))
            listed = answer.json()
            assert listed["object"] == "list"
            assert isinstance(listed["data"], list)
            assert [model["id"] for model in listed["data"]] == names
            assert all(model["object"] == "model" and model["created"] > 0 for model in listed["data"])
        assert engine.statistics().connections == 0


@pytest.mark.parametrize("path", ["org/small", "org%2Fsmall", "org%2fsmall"])
async def test_a_model_is_found_by_its_name_plain_or_encoded(path: str) -> None:
    async with open_engine() as engine, serving(engine, tenants=TENANTS, models=MODELS) as gateway:
        answer = await gateway.fetch("GET", f"/v1/models/{path}", headers=bearer("key-a"))
        assert (answer.status, answer.json()["id"]) == (200, "org/small")
        head = await gateway.fetch("HEAD", f"/v1/models/{path}", headers=bearer("key-a"))
        assert (head.status, head.body) == (200, b"")


@pytest.mark.parametrize("name", ["large", "nothing", "", "org", "../models", "%ff"])
async def test_a_model_that_the_tenant_may_not_use_is_like_one_that_is_not_there(name: str) -> None:
    async with open_engine() as engine, serving(engine, tenants=TENANTS, models=MODELS) as gateway:
        answer = await gateway.fetch("GET", f"/v1/models/{name}", headers=bearer("key-a"))
        assert (answer.status, error_code(answer)) == (404, "model_not_found")


# The order of judgement -------------------------------------------------------------------------------------


async def test_each_step_is_judged_before_the_next() -> None:
    good = {"model": "org/small", "messages": MESSAGES}
    steps: list[tuple[str, str, Headers, bytes, int, str]] = [
        ("PUT", "/v1/nothing", (("content-type", "a/b"),), b"x" * 3000, 404, "unknown_route"),
        ("PUT", CHAT, (("content-type", "a/b"),), b"x" * 3000, 405, "method_not_allowed"),
        ("POST", CHAT, (("content-type", "a/b"),), b"x" * 3000, 401, "invalid_api_key"),
        (
            "POST",
            CHAT,
            (*bearer("key-a"), ("content-type", "a/b")),
            b"x" * 3000,
            415,
            "unsupported_media_type",
        ),
        ("POST", CHAT, bearer("key-a"), b"x" * 3000, 413, "request_too_large"),
        ("POST", CHAT, bearer("key-a"), b"x", 400, "invalid_json"),
        ("POST", CHAT, bearer("key-a"), b'{"n":-1}', 400, "missing_field"),
        ("POST", CHAT, bearer("key-a"), b'{"n":-1,"model":"nothing"}', 404, "model_not_found"),
        ("POST", CHAT, bearer("key-a"), b'{"n":-1,"model":"large"}', 403, "model_not_allowed"),
        ("POST", CHAT, bearer("key-a"), b'{"n":-1,"model":"org/small"}', 400, "invalid_value"),
        ("POST", CHAT, bearer("key-a"), json.dumps(good).encode(), 200, ""),
    ]
    async with (
        open_engine() as engine,
        serving(engine, tenants=TENANTS, models=MODELS, limits={"body_bytes": 2000}) as gateway,
    ):
        for method, path, headers, body, status, code in steps:
            answer = await gateway.fetch(method, path, headers=headers, body=body)
            assert answer.status == status, (path, answer.body)
            if code:
                assert error_code(answer) == code
                assert answer.header("x-request-id")
        assert engine.statistics().requests == 1
        assert gateway.turned_away() == {step[5]: 1 for step in steps if step[5]}


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", CHAT, "POST"),
        ("HEAD", CHAT, "POST"),
        ("OPTIONS", "/v1/embeddings", "POST"),
        ("POST", "/livez", "GET, HEAD"),
        ("DELETE", "/v1/models", "GET, HEAD"),
        ("post", CHAT, "POST"),
    ],
)
async def test_a_wrong_method_is_told_the_right_ones(method: str, path: str, allowed: str) -> None:
    async with serving(models=[]) as gateway:
        answer = await gateway.fetch(method, path)
        assert (answer.status, answer.header("allow")) == (405, allowed)


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/v1",
        "/v1/",
        "/v1/chat/completions/",
        "//v1/chat/completions",
        "/v1/chat/../chat/completions",
        "/V1/models",
    ],
)
async def test_paths_are_taken_as_they_are(path: str) -> None:
    async with serving(models=[]) as gateway:
        answer = await gateway.fetch("POST", path)
        assert (answer.status, error_code(answer)) == (404, "unknown_route")


# Keys -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        (),
        bearer("wrong"),
        bearer(""),
        (("authorization", "Bearer"),),
        (("authorization", "Basic a2V5LWE="),),
        (("authorization", "key-a"),),
        (("x-api-key", "key-a "), ("authorization", "Basic x")),
        (("x-api-key", "KEY-A"),),
        bearer("k\u00e9y"),
    ],
)
async def test_a_key_that_is_not_known_is_a_401(headers: Headers) -> None:
    async with serving(models=[], tenants=TENANTS[1:]) as gateway:
        for path in (CHAT, "/v1/models"):
            answer = await gateway.fetch("POST" if path == CHAT else "GET", path, headers=headers)
            assert (answer.status, error_code(answer)) == (401, "invalid_api_key")
            assert answer.error()["type"] == "authentication_error"
            assert answer.header("www-authenticate") == "Bearer"
            assert answer.header("x-should-retry") == "false"


@pytest.mark.parametrize(
    "headers",
    [
        bearer("key-z"),
        (("authorization", "bearer key-z"),),
        (("x-api-key", "key-z"),),
        (("x-api-key", "key-z"), ("authorization", "Bearer key-z")),
        (("x-api-key", "key-z"), ("authorization", "Basic x")),
    ],
)
async def test_a_key_may_be_shown_in_either_header(headers: Headers) -> None:
    async with open_engine() as engine, serving(engine, tenants=TENANTS, models=MODELS) as gateway:
        answer = await post(gateway, {"model": "large", "messages": MESSAGES}, *headers)
        assert answer.status == 200
        record = await gateway.settled()
        assert (record.tenant, record.key_id) == ("zeta", "zeta-key")


async def test_without_tenants_any_credentials_are_ignored() -> None:
    async with open_engine() as engine, serving(engine) as gateway:
        assert (await gateway.ask(chat_request(key="whatever"))).status == 200
        record = await gateway.settled()
        assert (record.tenant, record.key_id) == ("anonymous", None)
        assert engine.requests[0].header("authorization") is None


# Bodies that can never succeed ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (b"", "invalid_json", None),
        (b"{", "invalid_json", None),
        (b"[]", "invalid_json", None),
        (b'{"model":"large","model":"large"}', "invalid_json", None),
        (b'{"model":"large","messages":[{"a":1,"a":1}]}', "invalid_json", None),
        (b'{"model":"large","x":NaN}', "invalid_json", None),
        (b'{"model":"large","x":1e999}', "invalid_json", None),
        (b'{"model":"large","x":"\xff"}', "invalid_json", None),
        (b'{"model":"large","x":"\\ud800"}', "invalid_json", None),
        (b'{"model":"large"} x', "invalid_json", None),
        (b'{"model":"large","x":' + b"[" * 101 + b"]" * 101 + b"}", "invalid_json", None),
        (b'{"model":"large","x":[' + b"0," * 200_000 + b"0]}", "invalid_json", None),
        (b"{}", "missing_field", "model"),
        (b'{"model":null}', "missing_field", "model"),
        (b'{"model":5}', "invalid_value", "model"),
        (b'{"model":""}', "invalid_value", "model"),
        (b'{"model":"large"}', "missing_field", "messages"),
        (b'{"model":"large","messages":[]}', "invalid_value", "messages"),
        (b'{"model":"large","messages":"hi"}', "invalid_value", "messages"),
        (b'{"model":"large","messages":[1]}', "invalid_value", "messages"),
        (b'{"model":"large","messages":[{}],"stream":"yes"}', "invalid_value", "stream"),
        (b'{"model":"large","messages":[{}],"stream":1}', "invalid_value", "stream"),
        (b'{"model":"large","messages":[{}],"n":0}', "invalid_value", "n"),
        (b'{"model":"large","messages":[{}],"n":true}', "invalid_value", "n"),
        (b'{"model":"large","messages":[{}],"n":1.5}', "invalid_value", "n"),
        (b'{"model":"large","messages":[{}],"max_tokens":0}', "invalid_value", "max_tokens"),
        (b'{"model":"large","messages":[{}],"max_tokens":99999999999}', "invalid_value", "max_tokens"),
        (b'{"model":"large","messages":[{}],"user":5}', "invalid_value", "user"),
        (
            b'{"model":"large","messages":[{}],"stream_options":{"include_usage":1}}',
            "invalid_value",
            "stream_options.include_usage",
        ),
        (b'{"model":"large","messages":[{}],"stream_options":[]}', "invalid_value", "stream_options"),
    ],
)
async def test_a_body_that_can_never_succeed_is_a_400_and_reaches_no_worker(
    body: bytes, code: str, param: str | None
) -> None:
    async with open_engine() as engine, serving(engine, models=MODELS) as gateway:
        answer = await post(gateway, body)
        assert (answer.status, error_code(answer), answer.error()["param"]) == (400, code, param)
        assert answer.header("x-should-retry") == "false"
        assert engine.statistics().connections == 0
        assert gateway.records == []


async def test_null_is_like_nothing_for_fields_that_may_be_left_out() -> None:
    body = {
        "model": "m1",
        "messages": MESSAGES,
        "n": None,
        "stream": None,
        "stream_options": None,
        "user": None,
    }
    async with open_engine() as engine, serving(engine) as gateway:
        assert (await post(gateway, body)).json()["object"] == "chat.completion"
        assert (await post(gateway, {**body, "stream": True})).chat().done == 1
        assert engine.requests[1].json()["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize(
    ("headers", "served"),
    [
        ((("content-type", "application/json"),), True),
        ((("content-type", "application/json; charset=utf-8"),), True),
        ((("content-type", "APPLICATION/JSON"),), True),
        ((), True),
        ((("content-encoding", "identity"),), True),
        ((("content-type", "text/plain"),), False),
        ((("content-type", "application/x-www-form-urlencoded"),), False),
        ((("content-encoding", "gzip"),), False),
        ((("content-encoding", "identity, gzip"),), False),
    ],
)
async def test_bodies_are_json_as_it_is(headers: Headers, served: bool) -> None:
    async with open_engine() as engine, serving(engine) as gateway:
        answer = await post(gateway, {"model": "m1", "messages": MESSAGES}, *headers)
        assert answer.status == (200 if served else 415)
        if not served:
            assert error_code(answer) == "unsupported_media_type"
            coded = headers[0][0] == "content-encoding"
            assert answer.header("accept-encoding") == ("identity" if coded else None)


# What a tenant may ask for ----------------------------------------------------------------------------------


ENGINE_FIELDS = [
    ("vllm", "request_id"),
    ("vllm", "priority"),
    ("vllm", "kv_transfer_params"),
    ("vllm", "cache_salt"),
    ("sglang", "rid"),
    ("sglang", "custom_logit_processor"),
    ("llamacpp", "id_slot"),
]


@pytest.mark.parametrize(("kind", "field"), ENGINE_FIELDS)
async def test_fields_that_steer_the_engine_are_for_tenants_that_may(kind: str, field: str) -> None:
    body = {"model": "large", "messages": MESSAGES, field: "x"}
    async with (
        open_engine(good_answer) as engine,
        serving(
            engine, tenants=[tenant("acme", "key-a"), TENANTS[1]], models=MODELS, worker={"kind": kind}
        ) as gateway,
    ):
        answer = await post(gateway, body, *bearer("key-a"))
        assert (answer.status, error_code(answer), answer.error()["param"]) == (
            400,
            "field_not_allowed",
            field,
        )
        assert (await post(gateway, {**body, field: None}, *bearer("key-a"))).status == 200
        assert (await post(gateway, body, *bearer("key-z"))).status == 200
        assert engine.statistics().requests == 2


async def test_an_engine_without_the_field_gets_it_as_any_other() -> None:
    async with open_engine() as engine, serving(engine, worker={"kind": "openai"}) as gateway:
        assert (await gateway.ask(chat_request(priority=3))).status == 200
        assert engine.requests[0].json()["priority"] == 3


async def test_each_tenant_has_a_cache_of_its_own_where_the_engine_knows_how() -> None:
    tenants = [tenant("acme", "key-a"), tenant("zeta", "key-z")]
    async with open_engine() as engine, serving(engine, tenants=tenants, worker={"kind": "vllm"}) as gateway:
        for key in ("key-a", "key-z", "key-a"):
            await gateway.ask(chat_request(key=key))
        first, second, third = [request.json()["cache_salt"] for request in engine.requests]
        assert first == third != second


@pytest.mark.parametrize(
    ("asked", "status"),
    [(None, 200), ("standard", 200), ("BATCH", 200), ("interactive", 403), ("urgent", 400), ("", 400)],
)
async def test_priorities_are_those_of_the_tenant(asked: str | None, status: int) -> None:
    headers = () if asked is None else (("x-gateway-priority", asked),)
    async with open_engine() as engine, serving(engine, tenants=TENANTS, models=MODELS) as gateway:
        answer = await gateway.ask(chat_request(model="org/small", key="key-a", headers=headers))
        assert answer.status == status
        if status == 200:
            assert (await gateway.settled()).tier == ("batch" if asked == "BATCH" else "standard")
        else:
            assert error_code(answer) == ("priority_not_allowed" if status == 403 else "invalid_value")


async def test_a_request_that_came_through_this_gateway_before_is_a_loop() -> None:
    async with open_engine() as engine, serving(engine) as gateway:
        via = f"1.1 proxy, 1.1 trio-gateway-{gateway.gateway.boot_id}"
        answer = await gateway.ask(chat_request(headers=(("via", via),)))
        assert (answer.status, error_code(answer)) == (508, "loop_detected")
        answer = await gateway.ask(chat_request(headers=(("via", "1.1 trio-gateway-0123456789abcdef"),)))
        assert answer.status == 200


async def test_gateways_may_stand_behind_each_other() -> None:
    async with open_engine() as engine, serving(engine) as inner:
        await inner.ask(chat_request())
        await inner.settled()  # so that the connection to the engine is there before the outer one counts
        async with serving(inner.gateway.addresses[0]) as outer:
            assert (await outer.ask(chat_request())).chat().text == "ok"
            assert (await outer.ask(chat_request(stream=False))).status == 200
