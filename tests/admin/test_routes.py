"""Everything that operators can read and do, by HTTP: for whom, in which shape, refused in which words."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio

from tests.admin.door import OPERATOR, VIEWER, Door, code_of, data, door, expect_shape
from trio_gateway.admin import (
    ACTS,
    ADMIN_CODES,
    LOCAL,
    PREFIX,
    READS,
    SHAPES,
    Act,
    Page,
    Read,
    complaints,
    refusal,
)
from trio_gateway.admin._app import MOST_VALUES
from trio_gateway.admin._guard import MOST_BYTES
from trio_gateway.admin._openapi import document
from trio_gateway.testing import RawClient, http_request

EXAMPLES: dict[str, dict[str, Any]] = {
    "Nothing": {},
    "ResetBreaker": {"model": "m1"},
    "ForceBreaker": {"model": "m1", "state": "open"},
    "SetLimits": {"set": {"admission.max_queued": 10}},
    "RotateKey": {"tenant": "acme", "id": "k1", "overlap": 60},
    "LogLevel": {"level": "debug"},
}
JSON = (("content-type", "application/json"),)


def path_of(route: Read | Act, id_: str = "acme") -> str:
    return PREFIX + route.path.replace("{id}", id_)


def a_request(opened: Door) -> str:
    return str(opened.port.rows[0]["id"])


# Reading ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("read", READS, ids=lambda read: read.name)
async def test_everyone_with_a_token_reads_everything_in_its_shape(read: Read) -> None:
    async with door() as opened:
        path = path_of(read, a_request(opened))
        for secret in (VIEWER, OPERATOR):
            answer = await opened.ask("GET", path, secret)
            assert (answer.status, answer.header("content-type")) == (200, "application/json")
            expect_shape(data(answer), read.shape)
            assert data(answer)
        head = await opened.ask("HEAD", path, VIEWER)
        assert (head.status, head.body) == (200, b"")
        assert code_of(await opened.ask("GET", path)) == (401, "invalid_admin_token")


async def test_requests_are_filtered_and_paged() -> None:
    async with door() as opened:
        asked = "/admin/v1/requests"
        everything = data(await opened.ask("GET", asked, VIEWER))
        assert (everything["total"], len(everything["requests"]), everything["offset"]) == (7, 7, 0)
        page = data(await opened.ask("GET", f"{asked}?limit=2&offset=3", VIEWER))
        assert [row["id"] for row in page["requests"]] == [row["id"] for row in everything["requests"][3:5]]
        assert (page["total"], page["offset"]) == (7, 3)
        eldest = data(await opened.ask("GET", f"{asked}?order=oldest", VIEWER))["requests"]
        assert eldest == sorted(eldest, key=lambda row: (row["state"] == "ended", -row["age"]))
        assert len(eldest) == 7
        assert code_of(await opened.ask("GET", f"{asked}?order=age", VIEWER)) == (400, "invalid_value")
        for name, value in {"state": "running", "tenant": "tenant-1", "model": "m2", "worker": "w2"}.items():
            found = data(await opened.ask("GET", f"{asked}?{name}={value}", VIEWER))
            assert found["requests"] == [row for row in everything["requests"] if row[name] == value]
            assert 0 < found["total"] < 7
        assert data(await opened.ask("GET", f"{asked}?search=nant-4", VIEWER))["total"] == 1


@pytest.mark.parametrize(
    ("query", "code", "param"),
    [
        ("limit=0", "invalid_value", "limit"),
        ("limit=1001", "invalid_value", "limit"),
        ("limit=x", "invalid_value", "limit"),
        ("limit=1.5", "invalid_value", "limit"),
        ("limit=-1", "invalid_value", "limit"),
        ("limit=%D9%A1", "invalid_value", "limit"),
        ("limit=99999999999", "invalid_value", "limit"),
        ("limit=1&limit=2", "invalid_value", "limit"),
        ("offset=-1", "invalid_value", "offset"),
        ("state=gone", "invalid_value", "state"),
        ("tennant=a", "unknown_field", "tennant"),
    ],
)
async def test_a_parameter_that_means_nothing_is_refused(query: str, code: str, param: str) -> None:
    async with door() as opened:
        answer = await opened.ask("GET", f"/admin/v1/requests?{query}", VIEWER)
        assert code_of(answer) == (400, code)
        assert data(answer)["error"]["param"] == param


async def test_what_is_not_there_is_not_found() -> None:
    async with door() as opened:
        for path in ("/admin/v1/requests/0", "/admin/v1/flights/0"):
            assert code_of(await opened.ask("GET", path, VIEWER)) == (404, "not_found")
        for path in ("/nowhere", "/admin/v1", "/admin/v1/", "/admin/v2/workers", "/admin/v1/workers/"):
            assert code_of(await opened.ask("GET", path, VIEWER)) == (404, "unknown_route")


@pytest.mark.parametrize("method", ["PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW"])
async def test_a_method_that_a_path_does_not_have_is_told(method: str) -> None:
    async with door() as opened:
        answer = await opened.ask(method, "/admin/v1/workers", OPERATOR)
        assert code_of(answer) == (405, "method_not_allowed")
        assert set((answer.header("allow") or "").split(", ")) == {"GET", "HEAD"}


async def test_metrics_need_a_token_where_there_are_any() -> None:
    async with door() as opened:
        assert code_of(await opened.ask("GET", "/metrics")) == (401, "invalid_admin_token")
        answer = await opened.ask("GET", "/metrics", VIEWER)
        assert (answer.status, answer.body) == (200, b"arrived 7\n")
    async with door(tokens=()) as opened:
        assert (await opened.ask("GET", "/metrics")).status == 200


async def test_whether_it_lives_needs_neither_token_nor_name() -> None:
    async with door() as opened:
        answer = await opened.ask("GET", "/livez", host="pod.example")
        assert (answer.status, data(answer)) == (200, {"status": "ok"})


async def test_a_page_needs_no_token_and_brings_its_own_policy() -> None:
    page = Page(b"<p>hello", "text/html", "default-src 'self'")
    async with door(pages={"/": page}) as opened:
        answer = await opened.ask("GET", "/")
        assert (answer.status, answer.body) == (200, b"<p>hello")
        assert answer.header("content-security-policy") == "default-src 'self'"
        assert (answer.header("content-type") or "").startswith("text/html")
        assert code_of(await opened.ask("GET", "/", host="evil.example")) == (403, "host_not_allowed")


async def test_every_answer_carries_what_keeps_browsers_from_harm() -> None:
    async with door() as opened:
        seen = set()
        for path, secret in (("/livez", None), ("/admin/v1/workers", VIEWER), ("/admin/v1/workers", None)):
            answer = await opened.ask("GET", path, secret)
            assert answer.header("x-frame-options") == "DENY"
            assert answer.header("x-content-type-options") == "nosniff"
            assert answer.header("cache-control") == "no-store"
            assert answer.header("content-security-policy") == "default-src 'none'; frame-ancestors 'none'"
            assert answer.header("set-cookie") is None
            assert answer.header("access-control-allow-origin") is None
            seen.add(answer.header("x-request-id"))
        assert len(seen) == 3
        assert answer.header("www-authenticate") == "Bearer"


async def test_a_fault_of_ours_is_told_as_one_and_reported() -> None:
    async with door() as opened:
        opened.port.raises = ZeroDivisionError("secret")
        answer = await opened.ask("GET", "/admin/v1/statistics", VIEWER)
        assert code_of(answer) == (500, "internal_error")
        assert b"secret" not in answer.body
        assert opened.bugs == [opened.port.raises]
        answer = await opened.act("/reload", OPERATOR)
        assert code_of(answer) == (500, "internal_error")


# Acting -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.action)
async def test_an_operator_does_everything_and_a_viewer_nothing(act: Act) -> None:
    body = json.dumps(EXAMPLES[act.shape]).encode()
    target = "acme" if act.of else None
    async with door() as opened:
        answer = await opened.ask("POST", path_of(act), OPERATOR, body=body, headers=JSON)
        assert (answer.status, data(answer)["done"]) == (200, act.action != "tenants.thaw")
        expect_shape(data(answer), "Act")
        ((actor, action, on, arguments),) = opened.port.acts
        assert (actor.id, actor.role, actor.request_id) == ("ops", "operator", answer.header("x-request-id"))
        assert (action, on, arguments) == (act.action, target, EXAMPLES[act.shape])
        refused = await opened.ask("POST", path_of(act), VIEWER, body=body, headers=JSON)
        assert code_of(refused) == (403, "role_not_allowed")
        nobody = await opened.ask("POST", path_of(act), body=body, headers=JSON)
        assert code_of(nobody) == (401, "invalid_admin_token")
        assert len(opened.port.acts) == 1
        ((actor, action, on, code),) = opened.port.refusals
        assert (actor.id, action, on, code) == ("eyes", act.action, target, "role_not_allowed")


async def test_doing_it_again_does_nothing() -> None:
    async with door() as opened:
        first = data(await opened.act("/tenants/acme/freeze", OPERATOR))
        assert first == {"done": True, "before": {"frozen": False}, "after": {"frozen": True}}
        again = data(await opened.act("/tenants/acme/freeze", OPERATOR))
        assert again == {"done": False, "before": {"frozen": True}, "after": {"frozen": True}}


async def test_without_tokens_who_acts_is_called_local() -> None:
    async with door(tokens=()) as opened:
        assert (await opened.act("/reload")).status == 200
        assert opened.port.acts[0][0].id == LOCAL


async def test_what_the_gateway_refuses_is_told_in_its_words() -> None:
    async with door() as opened:
        assert code_of(await opened.act("/workers/nobody/drain", OPERATOR)) == (404, "not_found")
        opened.port.raises = refusal("not_possible", "there is no database", param="tenant")
        answer = await opened.act("/keys/rotate", OPERATOR, tenant="acme", id="k1")
        assert code_of(answer) == (409, "not_possible")
        assert data(answer)["error"]["message"] == "there is no database"
        assert opened.port.refusals == []  # the port itself notes what came to it


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (b"", "invalid_json", None),
        (b"{", "invalid_json", None),
        (b"[]", "invalid_json", None),
        (b"\xff", "invalid_json", None),
        (b'{"level": "debug", "level": "info"}', "invalid_json", None),
        (b'{"level": NaN}', "invalid_json", None),
        (b'{"level": 1e400}', "invalid_json", None),
        (b'{"a":' * 300 + b"1" + b"}" * 300, "invalid_json", None),
        (b'{"a": [%b0]}' % (b"0," * MOST_VALUES), "invalid_json", None),
        (b"{}", "missing_field", "level"),
        (b'{"level": "loud"}', "invalid_value", "level"),
        (b'{"level": null}', "invalid_value", "level"),
        (b'{"level": "info", "x": 1}', "unknown_field", "x"),
    ],
)
async def test_a_body_that_means_nothing_does_nothing_and_is_noted(
    body: bytes, code: str, param: str | None
) -> None:
    async with door() as opened:
        answer = await opened.ask("POST", "/admin/v1/log-level", OPERATOR, body=body, headers=JSON)
        assert code_of(answer) == (400, code)
        assert data(answer)["error"]["param"] == param
        assert opened.port.acts == []
        assert [(action, told) for _, action, _, told in opened.port.refusals] == [("log_level.set", code)]


@pytest.mark.parametrize(
    "number", [b"1e400", b"-1e400", b"[1, 1e400]", b'{"a": 1e400}', b"NaN", b"-Infinity"]
)
async def test_no_action_gets_a_number_that_json_has_no_word_for(number: bytes) -> None:
    """Who passes it on would write it as null, which takes a limit back."""
    async with door() as opened:
        body = b'{"set": {"admission.max_queued": %b}}' % number
        answer = await opened.ask("POST", "/admin/v1/limits", OPERATOR, body=body, headers=JSON)
        assert code_of(answer) == (400, "invalid_json")
        assert opened.port.acts == []


@pytest.mark.parametrize(
    "headers",
    [
        (),
        (("content-type", "text/plain"),),
        (("content-type", "application/x-www-form-urlencoded"),),
        (("content-type", "multipart/form-data; boundary=a"),),
        (("content-type", "text/plain; application/json"),),
    ],
)
async def test_a_body_that_a_form_of_any_page_could_send_is_refused(
    headers: tuple[tuple[str, str], ...],
) -> None:
    async with door(tokens=()) as opened:
        answer = await opened.ask("POST", "/admin/v1/reload", body=b"{}", headers=headers)
        assert code_of(answer) == (415, "unsupported_media_type")
        assert opened.port.acts == []


async def test_a_parameter_of_an_action_is_refused() -> None:
    async with door() as opened:
        answer = await opened.ask("POST", "/admin/v1/reload?force=1", OPERATOR, body=b"{}", headers=JSON)
        assert code_of(answer) == (400, "unknown_field")
        assert opened.port.acts == []


async def test_a_body_has_a_bound() -> None:
    async with door() as opened:
        body = b'{"level": "info"}'.ljust(MOST_BYTES)
        answer = await opened.ask("POST", "/admin/v1/log-level", OPERATOR, body=body, headers=JSON)
        assert answer.status == 200
        answer = await opened.ask("POST", "/admin/v1/log-level", OPERATOR, body=body + b" ", headers=JSON)
        assert code_of(answer) == (413, "request_too_large")


async def test_a_body_in_more_pieces_than_it_is_worth_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trio_gateway.admin._guard.MOST_PIECES", 3)
    headers = (*JSON, ("transfer-encoding", "chunked"), ("authorization", f"Bearer {OPERATOR}"))
    async with door() as opened:
        with trio.fail_after(10), await RawClient.connect(opened.address) as client:
            await client.send(http_request("POST", "/admin/v1/reload", headers=headers, host="localhost"))
            for _ in range(5):
                await client.send(b"1\r\n \r\n")
            answer = await client.read_to_end()
        assert code_of(answer) == (413, "request_too_large")


async def test_a_body_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trio_gateway.admin._guard.BODY_LIMIT", 0.05)
    headers = (*JSON, ("content-length", "2"), ("authorization", f"Bearer {OPERATOR}"))
    async with door() as opened:
        with trio.fail_after(10), await RawClient.connect(opened.address) as client:
            await client.send(http_request("POST", "/admin/v1/reload", headers=headers, host="localhost"))
            assert code_of(await client.read_to_end()) == (408, "request_timeout")
        assert opened.port.acts == []


async def test_one_connection_serves_many_requests() -> None:
    async with door() as opened:
        with trio.fail_after(10), await RawClient.connect(opened.address) as client:
            auth = ("authorization", f"Bearer {OPERATOR}")
            for _ in range(3):
                await client.request("GET", "/admin/v1/workers", headers=(auth,), host="localhost")
                headers = (auth, *JSON)
                await client.request(
                    "POST", "/admin/v1/reload", headers=headers, body=b"{}", host="localhost"
                )
                assert [(await client.read_to_end()).status for _ in range(2)] == [200, 200]
        assert len(opened.port.acts) == 3


# The document -----------------------------------------------------------------------------------------------


async def test_the_document_names_every_route_with_its_methods_and_nothing_else() -> None:
    async with door() as opened:
        answer = await opened.ask("GET", "/admin/v1/openapi.json", VIEWER)
        described = data(answer)
        assert described == json.loads(json.dumps(document("1.2.3")))
        for path, methods in described["paths"].items():
            real = path.replace("{id}", "acme")
            allowed = (await opened.ask("BREW", real, OPERATOR)).header("allow") or ""
            assert {method.upper() for method in methods} == set(allowed.split(", ")) - {"HEAD"}, path
    served = {PREFIX + route.path for route in (*READS, *ACTS)}
    others = {f"{PREFIX}/feed", f"{PREFIX}/openapi.json", f"{PREFIX}/who", "/metrics", "/livez"}
    assert described["paths"].keys() == served | others


async def test_whoever_asks_is_told_who_that_is_and_a_page_without_a_token_that_it_needs_one() -> None:
    async with door() as opened:
        for secret, told in (
            (OPERATOR, {"id": "ops", "role": "operator"}),
            (VIEWER, {"id": "eyes", "role": "viewer"}),
            (None, {"id": None, "role": None}),
        ):
            answer = await opened.ask("GET", f"{PREFIX}/who", secret)
            assert (answer.status, data(answer)) == (200, told)
            expect_shape(data(answer), "Who")
        assert code_of(await opened.ask("GET", f"{PREFIX}/who", "tg_wrong")) == (401, "invalid_admin_token")
        foreign = (("origin", "https://evil.example"),)
        assert code_of(await opened.ask("GET", f"{PREFIX}/who", headers=foreign)) == (
            403,
            "origin_not_allowed",
        )
    async with door(tokens=()) as opened:
        assert data(await opened.ask("GET", f"{PREFIX}/who")) == {"id": LOCAL, "role": "operator"}


def references(value: Any) -> set[str]:
    if isinstance(value, dict):
        found = {value["$ref"].rpartition("/")[2]} if "$ref" in value else set()
        return found.union(*map(references, value.values()))
    return set().union(*map(references, value)) if isinstance(value, list | tuple) else set()


def test_the_document_names_no_shape_that_is_not_there_and_none_in_vain() -> None:
    written = json.loads(json.dumps(document("1")))
    assert references(written) | {"Ending", "Snapshot"} == SHAPES.keys()


def test_every_status_that_an_error_can_have_is_described_by_its_codes() -> None:
    described: dict[str, set[str]] = {}
    for path in document("1")["paths"].values():
        for operation in path.values():
            for status, answer in operation["responses"].items():
                described.setdefault(status, set()).update(answer["description"].split(", "))
    del described["200"]
    everywhere = {"method_not_allowed", "unknown_route", "internal_error"}  # of no operation of its own
    codes = {code for found in described.values() for code in found}
    assert codes | everywhere == ADMIN_CODES.keys()
    for status, found in described.items():
        assert {ADMIN_CODES[code].status for code in found} == {int(status)}


def test_examples_fit_the_shapes_that_actions_take() -> None:
    assert EXAMPLES.keys() == {act.shape for act in ACTS}
    for name, example in EXAMPLES.items():
        assert not list(complaints(example, SHAPES[name], SHAPES))
