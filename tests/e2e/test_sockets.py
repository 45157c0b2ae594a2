"""``/v1/tokens`` from outside: handshakes, keys, messages, how streams end, and how sockets do."""

from __future__ import annotations

import json
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final, NoReturn

import pytest
import trio

from tests.e2e.process import process_serving
from tests.e2e.serving import LIMIT, Serving, serving, tenant
from tests.e2e.sockets import (
    BINARY,
    CLOSE,
    CONTINUATION,
    PING,
    PONG,
    TEXT,
    Closed,
    Frame,
    TokenSocket,
    close_payload,
    connected,
    frame,
    handshake,
    opened,
)
from tests.e2e.tls import issue
from trio_gateway.tenancy import Keyring
from trio_gateway.testing import (
    CloseReset,
    Event,
    Hold,
    Repeat,
    Script,
    ScriptedEngine,
    Scripting,
    WaitFor,
    chat_stream,
    completion_stream,
    error_answer,
    open_engine,
)

KIB: Final = 1024
TENANTS: Final = [tenant("a", "key-a"), tenant("b", "key-b")]
ENDLESS: Final[Script] = (*chat_stream("x", finish=None, done=False, end=False), Hold())
HEAD, ROLE, ONE, FINISH, LAST, END = chat_stream("one")
BIG: Final = Event({"choices": [{"index": 0, "delta": {"content": "x" * 4000}, "finish_reason": None}]})
FLOOD: Final[Script] = (HEAD, ROLE, Repeat((BIG,)))


@asynccontextmanager
async def sockets(*scripts: Scripting, **sections: Any) -> AsyncIterator[tuple[Serving, ScriptedEngine]]:
    """A gateway with two tenants before one engine, whose streams can be resumed for a short time."""
    delivery = {"resume_window": 0.2, **sections.pop("delivery", {})}
    engine_options = {"send_buffer": sections.pop("send_buffer")} if "send_buffer" in sections else {}
    tenants = sections.pop("tenants", TENANTS)
    async with (
        open_engine(*scripts, **engine_options) as engine,
        serving(engine, tenants=tenants, delivery=delivery, **sections) as gateway,
    ):
        yield gateway, engine


def counting(total: int) -> Script:
    """A stream that counts."""
    return chat_stream(*(f"{number} " for number in range(total)), usage=(3, total))


# A stream ---------------------------------------------------------------------------------------------------


async def test_a_stream_comes_as_numbered_deltas_and_ends_with_its_counts() -> None:
    async with sockets(chat_stream("one", "two", "three", usage=(3, 7))) as (gateway, _):
        async with opened(gateway) as client:
            await client.generate(credit=100)
            last = await client.read_last()
            assert client.types() == ["accepted", *["delta"] * 5, "done"]
            assert client.text() == "onetwothree"
            assert [delta["seq"] for delta in client.deltas()] == [1, 2, 3, 4, 5]
            assert [delta["tokens"] for delta in client.deltas()] == [0, 1, 2, 3, 3]
            assert last["finish_reasons"] == ["stop"]
            assert last["usage"] == {"prompt_tokens": 3, "completion_tokens": 7, "total_tokens": 10}
            assert last["delivery"] == {"generated": 7, "delivered": 7, "acknowledged": None}
            await client.ack(5)
            assert await client.say_goodbye() == Closed(1000)
        record = await gateway.settled()
        assert record.exchange_id == last["request_id"]
        assert (record.outcome, record.tokens_generated, record.tokens_delivered) == ("completed", 7, 7)


async def test_who_acknowledges_all_has_all_of_it_in_the_record() -> None:
    async with sockets(counting(10)) as (gateway, _), opened(gateway) as client:
        await client.generate()
        await client.read_delta(1)
        await client.ack(1)
        await client.read_last()
        await client.ack(12)
        record = await gateway.settled()
        assert (record.outcome, record.tokens_acknowledged, record.tokens_delivered) == ("completed", 10, 10)


async def test_the_end_waits_for_acknowledgements_only_for_a_while() -> None:
    async with sockets(counting(10)) as (gateway, _), opened(gateway) as client:
        await client.generate(credit=6)
        await client.read_delta(6)
        await client.ack(6, credit=100)
        await client.read_last()
        record = await gateway.settled()
        assert (record.outcome, record.tokens_acknowledged, record.tokens_delivered) == ("completed", 5, 10)


async def test_chunks_are_the_engine_s_own_bytes_and_bytes_count_them() -> None:
    odd = (
        '{"choices": [{"index":0,"delta":{"content":"ü"},"finish_reason":null}],  "big":12345678901234567890}'
    )
    script = (HEAD, ROLE, Event(odd), FINISH, LAST, END)
    async with sockets(script) as (gateway, _), opened(gateway) as client:
        await client.generate()
        while True:
            found = await client.read_frame()
            if b'"seq":2' in found.payload:
                break
        assert f'"chunk":{odd},"tokens":1,"bytes":'.encode() in found.payload
        before = len(json.dumps(ROLE.data, separators=(",", ":")) if isinstance(ROLE, Event) else "")
        assert json.loads(found.payload)["bytes"] >= before + len(odd.encode())


async def test_other_operations_stream_too() -> None:
    async with sockets(completion_stream("ok", usage=(3, 1))) as (gateway, engine), opened(gateway) as client:
        await client.generate(operation="completions", body={"model": "m1", "prompt": "hi"})
        last = await client.read_last()
        assert (last["type"], last["finish_reasons"]) == ("done", ["stop"])
        assert "".join(
            delta["chunk"]["choices"][0]["text"] for delta in client.deltas() if delta["chunk"]["choices"]
        )
        assert (await engine.request()).target.endswith("/completions")


async def test_whatever_the_body_says_the_answer_is_a_stream() -> None:
    async with sockets() as (gateway, engine), opened(gateway) as client:
        body = {"model": "m1", "messages": [{"role": "user", "content": "hi"}], "stream": False, "seed": 7}
        await client.generate(body=body)
        assert (await client.read_last())["type"] == "done"
        sent = (await engine.request()).json()
        assert (sent["stream"], sent["seed"]) == (True, 7)


@pytest.mark.parametrize(
    ("message", "code", "param"),
    [
        ({"body": {"model": "m9", "messages": []}}, "model_not_found", "model"),
        ({"body": {"model": "m1"}}, "missing_field", "messages"),
        ({"body": [1]}, "invalid_json", None),
        ({"operation": "embeddings"}, "invalid_value", "operation"),
        ({"operation": "nothing"}, "invalid_value", "operation"),
        ({"priority": "royal"}, "invalid_value", "priority"),
    ],
)
async def test_what_can_not_be_carried_out_is_an_error_of_its_stream_and_of_nothing_else(
    message: dict[str, Any], code: str, param: str | None
) -> None:
    async with sockets() as (gateway, _), opened(gateway) as client:
        await client.generate("bad", **message)
        last = await client.read_last("bad")
        assert (last["type"], last["error"]["code"]) == ("error", code)
        assert last["delivery"] == {"generated": 0, "delivered": 0, "acknowledged": None}
        if param is not None and param != "priority":
            assert last["error"]["param"] == param
        await client.generate("good")
        assert (await client.read_last("good"))["type"] == "done"


async def test_a_failure_before_output_is_an_error_and_a_failure_after_it_comes_behind_all_deltas() -> None:
    cut = (*chat_stream("one", "two", finish=None, done=False, end=False), CloseReset())
    async with (
        sockets(error_answer(500), cut, retry={"max_attempts": 1}) as (gateway, _),
        opened(gateway) as client,
    ):
        await client.generate("first")
        last = await client.read_last("first")
        assert (last["error"]["code"], client.deltas("first")) == ("engine_failed", [])
        await client.generate("second")
        last = await client.read_last("second")
        assert client.text("second") == "onetwo"
        assert last["error"]["gateway"]["outcome"] == "upstream_failed"
        assert last["delivery"] == {"generated": 2, "delivered": 2, "acknowledged": None}
        record = await gateway.settled(2)
        assert (record.tokens_generated, record.tokens_delivered) == (2, 2)


async def test_a_stream_has_its_own_deadline() -> None:
    async with sockets(ENDLESS) as (gateway, _), opened(gateway) as client:
        await client.generate(timeout_ms=200)
        last = await client.read_last()
        assert (last["error"]["code"], client.text()) == ("deadline_exceeded", "x")
        assert (await gateway.settled()).outcome == "deadline_exceeded"


async def test_a_cancelled_stream_says_what_was_delivered_and_frees_its_worker() -> None:
    async with sockets(ENDLESS) as (gateway, engine), opened(gateway) as client:
        await client.generate(credit=10)
        await client.read_delta(2)
        await client.ack(2)
        await client.send("cancel", stream_id="s1")
        last = await client.read_last()
        assert last["type"] == "cancelled"
        assert last["delivery"] == {"generated": 1, "delivered": 1, "acknowledged": 1}
        record = await gateway.settled()
        assert (record.outcome, record.tokens_delivered, record.tokens_acknowledged) == (
            "client_cancelled",
            1,
            1,
        )
        await engine.wait_idle()
        await client.generate()  # of the same name
        await client.read_delta(1)


async def test_a_stream_that_waits_says_so_and_can_be_cancelled() -> None:
    async with sockets(ENDLESS, worker={"slots": 1}) as (gateway, _), opened(gateway) as client:
        await client.generate("first")
        await client.read_delta(1, "first")
        await client.generate("second")
        queued = await client.read_until(lambda m: m["type"] == "queued")
        assert (queued["stream_id"], queued["position"]) == ("second", 1)
        await client.send("cancel", stream_id="second")
        last = await client.read_last("second")
        assert (last["type"], last["request_id"]) == ("cancelled", queued["request_id"])
        await client.send("cancel", stream_id="first")
        assert (await client.read_last("first"))["type"] == "cancelled"


async def test_names_that_nobody_has_are_ignored_and_names_in_use_are_an_error() -> None:
    async with sockets(ENDLESS) as (gateway, _), opened(gateway) as client:
        await client.send("cancel", stream_id="nobody")
        await client.ack(7, "nobody")
        await client.generate()
        await client.read_delta(1)
        await client.generate()
        refused = await client.read_until(lambda m: m["type"] == "error")
        assert (refused["stream_id"], refused["error"]["param"]) == ("s1", "stream_id")
        await client.send("cancel", stream_id="s1")
        assert (await client.read_last())["type"] == "cancelled"
        await client.ack(100)  # of a stream that is over
        await client.send("cancel", stream_id="s1")
        await client.send_frame(PING, b"still here")
        assert await client.read_frame() == Frame(PONG, b"still here")


async def test_a_name_is_free_as_soon_as_its_stream_has_told_its_end() -> None:
    async with sockets(chat_stream("one")) as (gateway, _), opened(gateway) as client:
        ids = set()
        for _ in range(3):
            await client.generate(resumable=True)  # each waits a second for its acknowledgements
            ids.add((await client.read_last())["request_id"])
        assert len(ids) == 3
        assert {"error"}.isdisjoint(client.types())


async def test_a_bug_ends_its_stream_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **options: object) -> NoReturn:
        raise RuntimeError

    async with sockets(chat_stream("one")) as (gateway, _), opened(gateway) as client:
        gateway.may_report_bugs = True
        with monkeypatch.context() as patch:
            patch.setattr("trio_gateway.edge._socket_streams.Exchange", broken)
            await client.generate()
            assert (await client.read_last())["error"]["code"] == "internal_error"
        await client.generate()
        assert (await client.read_last())["type"] == "done"
        assert gateway.gateway.statistics()["turned_away"] == {"internal_error": 1}


async def test_the_owner_sees_and_ends_its_stream_over_http_too() -> None:
    async with sockets(ENDLESS) as (gateway, _), opened(gateway) as client:
        await client.generate()
        accepted = await client.read_until(lambda m: m["type"] == "accepted")
        path = f"/v1/requests/{accepted['request_id']}"
        standing = await gateway.get(path, authorization="Bearer key-a")
        assert standing.json()["state"] == "running"
        assert (await gateway.get(path, authorization="Bearer key-b")).status == 404
        await gateway.fetch("DELETE", path, headers=(("authorization", "Bearer key-a"),))
        assert (await client.read_last())["type"] == "cancelled"


# Credit and acknowledgements --------------------------------------------------------------------------------


@pytest.mark.parametrize("credit", [1, 2, 7, 64, 1000])
async def test_never_more_deltas_come_than_there_is_credit_for(credit: int) -> None:
    total = 80
    async with sockets(counting(total)) as (gateway, _), opened(gateway) as client:
        await client.generate(credit=credit)
        granted, acked = credit, 0
        while (message := await client.read())["type"] != "done":
            if message["type"] != "delta":
                continue
            assert message["seq"] <= granted
            if message["seq"] == granted or message["seq"] % 3 == 0:  # acknowledged in groups, some twice
                acked = message["seq"]
                await client.ack(acked)
                await client.ack(max(acked - 1, 0))
                granted = max(granted, acked + credit)
        assert client.text() == "".join(f"{number} " for number in range(total))
        record = await gateway.settled()
        assert record.outcome == "completed"
        assert record.tokens_acknowledged is not None
        assert record.tokens_acknowledged <= total


async def test_without_credit_nothing_comes_until_there_is_some() -> None:
    async with sockets(counting(10)) as (gateway, _), opened(gateway) as client:
        await client.generate(credit=2)
        await client.read_delta(2)
        await client.send_frame(PING, b"now")
        assert await client.read_frame() == Frame(PONG, b"now")
        await client.ack(0, credit=4)  # none of the lost ones: only more credit
        await client.read_delta(4)
        await client.ack(4)
        await client.read_delta(8)
        await client.ack(8, credit=1000)
        assert (await client.read_last())["type"] == "done"


async def test_acknowledging_what_was_not_sent_ends_the_socket() -> None:
    async with sockets(ENDLESS) as (gateway, _), opened(gateway) as client:
        await client.generate()
        await client.read_delta(2)
        await client.ack(3)
        assert (await client.read_closed()).code == 4400
        assert (await gateway.settled()).outcome == "client_gone"


async def test_of_32_streams_one_that_stalls_ends_alone_and_the_others_go_on() -> None:
    streams = 32
    limits = {"stall_timeout": 3}  # on a busy machine the others take their time
    async with (
        sockets(counting(300), delivery=limits, worker={"slots": streams + 1}) as (gateway, _),
        opened(gateway) as client,
    ):
        names = [f"s{number}" for number in range(streams)]
        for name in names:
            await client.generate(name, credit=1 if name == "s5" else 20)
        over: dict[str, Any] = {}
        while len(over) < streams:
            message = await client.read()
            name = message["stream_id"]
            if message["type"] == "delta" and name != "s5" and message["seq"] % 10 == 0:
                await client.ack(message["seq"], name)
            elif message["type"] in ("done", "error"):
                over[name] = message
        assert {name for name, last in over.items() if last["type"] == "done"} == set(names) - {"s5"}
        stalled = over["s5"]
        assert stalled["error"]["code"] == "client_stalled"
        assert stalled["delivery"]["delivered"] == 0  # its one delta names the role
        assert all(client.text(name).split() == [str(n) for n in range(300)] for name in set(names) - {"s5"})
        await gateway.returned()
        records = gateway.records
        assert sum(record.outcome == "client_stalled" for record in records) == 1
        await client.generate("s5")
        assert (await client.read_last("s5"))["type"] == "done"


# Keys and handshakes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "request_",
    [
        handshake(),
        handshake("x-api-key: key-a", key=""),
        handshake("sec-websocket-protocol: trio-gateway.tokens.v1, bearer.key-a", key=""),
        handshake("sec-websocket-protocol: bearer.key-a", key=""),
        handshake("sec-websocket-protocol: bearer.key-a"),
        handshake("sec-websocket-extensions: permessage-deflate; client_max_window_bits"),
        handshake("origin: http://gateway"),
        handshake("origin: HTTPS://GATEWAY"),
        handshake("upgrade: h2c"),
    ],
)
async def test_these_handshakes_are_accepted(request_: bytes) -> None:
    async with sockets() as (gateway, _), opened(gateway, request_) as client:
        assert "sec-websocket-extensions" not in client.headers
        offered = b"trio-gateway.tokens.v1" in request_
        assert client.headers.get("sec-websocket-protocol") == ("trio-gateway.tokens.v1" if offered else None)
        assert len(client.headers["x-request-id"]) == 32
        await client.generate()
        assert (await client.read_last())["type"] == "done"
        assert (await gateway.settled()).tenant == "a"


@pytest.mark.parametrize(
    ("request_", "status", "code"),
    [
        (handshake(key="wrong"), 401, "invalid_api_key"),
        (handshake("sec-websocket-protocol: bearer.wrong", key=""), 401, "invalid_api_key"),
        (handshake("sec-websocket-protocol: bearer.key-b"), 400, "bad_framing"),
        (handshake("sec-websocket-protocol: bearer.key-a, bearer.key-b", key=""), 400, "bad_framing"),
        (handshake(version="12"), 426, "upgrade_required"),
        (handshake().replace(b"upgrade: websocket\r\n", b""), 426, "upgrade_required"),
        (handshake().replace(b"connection: Upgrade", b"connection: close"), 400, "bad_framing"),
        (handshake("content-length: 3") + b"abc", 400, "bad_framing"),
        (handshake("sec-websocket-protocol: \xe4"), 400, "bad_framing"),
        (handshake("sec-websocket-extensions: \xff\xfe"), 400, "bad_framing"),
        (handshake("origin: http://elsewhere"), 403, "origin_not_allowed"),
        (handshake("origin: null"), 403, "origin_not_allowed"),
        (handshake("origin: http://[gateway"), 403, "origin_not_allowed"),
        (handshake("origin: http://gateway:81"), 403, "origin_not_allowed"),
        (handshake().replace(b"GET ", b"POST "), 405, "method_not_allowed"),
    ],
)
async def test_a_handshake_that_is_refused_is_answered_over_http(
    request_: bytes, status: int, code: str
) -> None:
    async with sockets() as (gateway, _), connected(gateway, request_) as client:
        assert (client.status, client.error_code) == (status, code)
        if status == 426:
            assert client.headers["upgrade"] == "websocket"
            assert client.headers["sec-websocket-version"] == "13"
    assert gateway.turned_away() == {code: 1}


@pytest.mark.parametrize("origins", [["https://app.example"], ["*"]])
async def test_pages_of_named_origins_may_open_sockets(origins: list[str]) -> None:
    async with sockets(server={"bind": ["127.0.0.1:0"], "cors_origins": origins}) as (gateway, _):
        async with opened(gateway, handshake("origin: https://app.example")) as client:
            assert client.headers["access-control-allow-origin"] == "https://app.example"
        status = 101 if origins == ["*"] else 403
        async with connected(gateway, handshake("origin: https://evil.example")) as client:
            assert client.status == status


async def test_a_first_message_may_bring_the_key() -> None:
    async with sockets() as (gateway, _), opened(gateway, handshake(key="")) as client:
        await client.send("auth", key="key-b")
        await client.generate()
        assert (await client.read_last())["type"] == "done"
        assert (await gateway.settled()).tenant == "b"
        await client.send("auth", key="key-b")
        assert (await client.read_closed()).code == 4400


@pytest.mark.parametrize(
    ("kind", "members"),
    [
        ("auth", {"key": "wrong"}),
        ("auth", {"key": ""}),
        ("auth", {"key": "ключ"}),
        ("cancel", {"stream_id": "s1"}),
        ("generate", {"stream_id": "s1", "body": {}}),
    ],
)
async def test_a_first_message_without_a_good_key_ends_the_socket(kind: str, members: dict[str, Any]) -> None:
    async with sockets() as (gateway, _), opened(gateway, handshake(key="")) as client:
        await client.send(kind, **members)
        assert (await client.read_closed()).code == 4401


async def test_a_client_that_shows_no_key_in_time_is_sent_away() -> None:
    async with (
        sockets(websocket={"auth_timeout": 0.1}) as (gateway, _),
        opened(gateway, handshake(key="")) as client,
        opened(gateway) as other,
    ):
        assert (await client.read_closed()).code == 4408
        await other.generate()
        assert (await other.read_last())["type"] == "done"


async def test_a_stranger_s_message_is_short_and_an_owner_s_as_long_as_any() -> None:
    async with sockets() as (gateway, _):
        async with opened(gateway, handshake(key="")) as client:
            await client.send("auth", key="x" * 16 * KIB)
            assert (await client.read_closed()).code == 1009
        async with opened(gateway, handshake(key="")) as client:
            await client.send("auth", key="key-a", padding="x" * 15 * KIB)
            await client.generate(padding="x" * 100 * KIB)
            assert (await client.read_last())["type"] == "done"


async def test_a_key_that_is_revoked_ends_its_sockets_and_their_streams() -> None:
    async with sockets(ENDLESS) as (gateway, _), opened(gateway) as client:
        await client.generate()
        await client.read_delta(1)
        gateway.gateway.keyring.become(Keyring([], [], closed=True))
        assert (await client.read_closed()).code == 4403
        assert (await gateway.settled()).outcome == "client_gone"


async def test_without_tenants_nobody_needs_a_key() -> None:
    async with sockets(tenants=[]) as (gateway, _), opened(gateway, handshake(key="")) as client:
        await client.generate()
        assert (await client.read_last())["type"] == "done"


async def test_messages_behind_the_handshake_are_read_though_they_came_with_it() -> None:
    body = {"model": "m1", "messages": [{"role": "user", "content": "hi"}]}
    message = json.dumps({"type": "generate", "stream_id": "s1", "body": body}).encode()
    async with sockets() as (gateway, _), opened(gateway, handshake() + frame(TEXT, message)) as client:
        assert (await client.read_last())["type"] == "done"


@pytest.mark.parametrize("how", ["tls", "unix"])
async def test_sockets_are_served_over_tls_and_unix_sockets(how: str, tmp_path: Path) -> None:
    issued = issue(tmp_path)
    server = issued.server if how == "tls" else {"bind": [f"unix:{tmp_path / 'gw'}"]}
    total = 400
    async with sockets(counting(total), server=server) as (gateway, _):
        trust = issued.trust() if how == "tls" else None
        async with opened(gateway, trust=trust, receive_buffer=4 * KIB) as client:
            await client.generate("s1", credit=7)
            await client.generate("s2")
            over = 0
            while over < 2:
                message = await client.read()
                over += message["type"] == "done"
                if message["type"] == "delta" and message["stream_id"] == "s1" and message["seq"] % 5 == 0:
                    await client.ack(message["seq"])
            assert client.text("s1") == client.text("s2") == "".join(f"{number} " for number in range(total))
            assert await client.say_goodbye() == Closed(1000)


# Malformed, oversized, too many -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (frame(TEXT, b"{"), 4400),
        (frame(TEXT, b"[]"), 4400),
        (frame(TEXT, b"null"), 4400),
        (frame(TEXT, b'{"type":"hello"}'), 4400),
        (frame(TEXT, b'{"type":"ack","stream_id":"s1"}'), 4400),
        (frame(TEXT, b'{"type":"ack","stream_id":"s1","seq":-1}'), 4400),
        (frame(TEXT, b'{"type":"ack","stream_id":"s1","seq":0,"credit":0}'), 4400),
        (frame(TEXT, b'{"type":"cancel","stream_id":""}'), 4400),
        (frame(TEXT, b'{"type":"cancel","stream_id":"' + b"x" * 129 + b'"}'), 4400),
        (frame(TEXT, b"[" * 100_000), 4400),
        (
            frame(
                TEXT,
                '{"type":"模模模模模模模模模模模模模模模模模模模模模模模模模模模模模模模模模模模模模模模模模模模模模模"}'.encode(),
            ),
            4400,
        ),
        (frame(TEXT, b"\xff\xfe"), 1007),
        (frame(TEXT, b"{}", mask=None), 1002),
        (frame(TEXT, b"{}", reserved=4), 1002),
        (frame(BINARY, b"{}"), 1003),
        (frame(CONTINUATION, b"{}"), 1002),
        (frame(PING, b"x" * 126), 1002),
        (frame(3), 1002),
        (frame(CLOSE, close_payload(1000)), 1000),
        (frame(CLOSE, close_payload(4321, b"bye")), 4321),
        (frame(CLOSE), 1000),
        (frame(CLOSE, close_payload(1005)), 1002),
        (frame(CLOSE, b"x"), 1002),
        (frame(CLOSE, close_payload(1000, b"\xff")), 1007),
    ],
)
async def test_what_ends_a_socket_is_told_by_its_code(data: bytes, code: int) -> None:
    async with sockets(ENDLESS) as (gateway, _), opened(gateway) as client:
        await client.generate("live")
        await client.read_delta(1, "live")
        await client.send_bytes(data)
        closed = await client.read_closed()
        assert closed.code == code
        assert len(closed.reason.encode()) <= 123
        assert (await gateway.settled()).outcome == "client_gone"


@pytest.mark.parametrize("fragments", [1, 10])
async def test_a_message_over_its_bound_is_refused_so_that_its_sender_can_read_why(fragments: int) -> None:
    most, size = 64 * KIB, 3_000_000
    async with sockets(websocket={"max_message_bytes": most}) as (gateway, _), opened(gateway) as client:
        piece = size // fragments
        async with trio.open_nursery() as nursery:

            async def send() -> None:
                for number in range(fragments):
                    opcode = CONTINUATION if number else TEXT
                    await client.send_frame(opcode, b" " * piece, fin=number == fragments - 1)

            nursery.start_soon(send)
            assert (await client.read_closed()).code == 1009
            nursery.cancel_scope.cancel()


async def test_a_message_up_to_its_bound_is_taken_in_any_fragments() -> None:
    async with (
        sockets(websocket={"max_message_bytes": 64 * KIB}) as (gateway, engine),
        opened(gateway) as client,
    ):
        body = {"model": "m1", "messages": [{"role": "user", "content": "ü" * 32_000}]}
        text = json.dumps({"type": "generate", "stream_id": "s1", "body": body}, ensure_ascii=False).encode()
        assert 64_000 < len(text) < 64 * KIB
        for at in range(0, len(text), 777):
            last = at + 777 >= len(text)
            await client.send_frame(CONTINUATION if at else TEXT, text[at : at + 777], fin=last)
            if at % 3 == 0:
                await client.send_frame(PING, b"%d" % at)
        assert (await client.read_last())["type"] == "done"
        assert (await engine.request()).json()["messages"] == body["messages"]


async def test_more_streams_than_one_socket_may_have_end_it() -> None:
    async with (
        sockets(ENDLESS, websocket={"max_streams": 3}, worker={"slots": 8}) as (gateway, _),
        opened(gateway) as client,
    ):
        for number in range(3):
            await client.generate(f"s{number}")
            await client.read_delta(1, f"s{number}")
        await client.send("cancel", stream_id="s0")
        await client.read_last("s0")
        await client.generate("s3")
        await client.read_delta(1, "s3")
        await client.generate("s4")
        assert (await client.read_closed()).code == 4429
        await gateway.until(lambda: len(gateway.records) == 4)
        assert sorted(record.outcome for record in gateway.records) == [
            "client_cancelled",
            *["client_gone"] * 3,
        ]


async def test_thousands_of_small_messages_in_one_go_are_answered_in_order() -> None:
    async with sockets() as (gateway, _), opened(gateway) as client:
        count = 2000
        message = b'{"type":"generate","stream_id":"%d","body":{},"operation":"no"}'
        async with trio.open_nursery() as nursery:
            data = b"".join(frame(TEXT, message % number) for number in range(count))
            nursery.start_soon(client.send_bytes, data)
            for number in range(count):
                answer = await client.read()
                assert (answer["type"], answer["stream_id"]) == ("error", str(number))


# Leaving ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["reset", "fin", "close frame"])
async def test_a_client_that_leaves_ends_all_of_its_streams(how: str) -> None:
    async with sockets(ENDLESS) as (gateway, engine):
        async with opened(gateway) as client:
            for number in range(3):
                await client.generate(f"s{number}")
                await client.read_delta(2, f"s{number}")
            if how == "reset":
                client.reset()
            elif how == "fin":
                client.raw.socket.close()
            else:
                await client.send_frame(CLOSE, close_payload(1001))
                assert await client.read_closed() == Closed(1001)
            await gateway.until(lambda: len(gateway.records) == 3)
        for record in gateway.records:
            assert (record.outcome, record.tokens_delivered, record.events_delivered) == ("client_gone", 1, 2)
        await engine.wait_idle()


async def test_a_client_that_answers_no_ping_is_gone() -> None:
    pings = {"ping_interval": 0.2, "ping_timeout": 0.3}
    async with sockets(ENDLESS, websocket=pings) as (gateway, _), opened(gateway) as client:
        await client.generate()
        for _ in range(3):
            found = await client.read_frame()
            while found.opcode != PING:
                found = await client.read_frame()
            await client.send_frame(PONG, found.payload)
        client.answers_pings = False
        assert await client.read_closed() == Closed(None)
        assert (await gateway.settled()).outcome == "client_gone"


async def test_a_client_that_says_something_else_is_there() -> None:
    pings = {"ping_interval": 0.1, "ping_timeout": 0.3}
    async with sockets(ENDLESS, websocket=pings) as (gateway, _), opened(gateway) as client:
        client.answers_pings = False
        await client.generate()
        await client.read_delta(2)
        with trio.move_on_after(1.0):
            while True:
                await client.ack(1)
                await trio.sleep(0.05)
        await client.send("cancel", stream_id="s1")
        assert (await client.read_last())["type"] == "cancelled"


@pytest.mark.parametrize("resumable", [False, True])
async def test_a_socket_that_takes_nothing_is_stalled_as_a_whole(resumable: bool) -> None:
    limits = {"stall_timeout": 0.5, "buffer_bytes": 64 * KIB, "resume_window": 0.2}
    async with (
        sockets(FLOOD, delivery=limits, send_buffer=16 * KIB) as (gateway, engine),
        opened(gateway, receive_buffer=4 * KIB) as client,
    ):
        await client.generate("s1", resumable=resumable)
        await client.generate("s2", resumable=resumable)
        await gateway.until(lambda: len(gateway.records) == 2)
        outcome = "client_gone" if resumable else "client_stalled"
        assert [record.outcome for record in gateway.records] == [outcome] * 2
        with trio.fail_after(LIMIT):
            await engine.wait_idle()
        await gateway.until(lambda: len(gateway.gateway.sockets) == 0)


async def test_what_stalled_sockets_hold_stays_within_the_bounds_of_their_streams() -> None:
    limits = {"stall_timeout": 0.5, "buffer_bytes": 128 * KIB}
    most = 0
    async with (
        sockets(FLOOD, delivery=limits, send_buffer=16 * KIB, worker={"slots": 16}) as (gateway, _),
        AsyncExitStack() as stack,
    ):
        for _ in range(4):
            client = await stack.enter_async_context(opened(gateway, receive_buffer=4 * KIB))
            for number in range(4):
                await client.generate(f"s{number}", resumable=number % 2 == 0)

        def held() -> bool:
            nonlocal most
            most = max(most, gateway.gateway.buffers.used)
            return len(gateway.records) == 16

        await gateway.until(held)
    assert 16 * 32 * KIB < most <= 16 * (128 * KIB + 2 * 4200)


# Shutdown ---------------------------------------------------------------------------------------------------


async def test_at_shutdown_idle_sockets_end_and_busy_ones_have_their_grace() -> None:
    go = trio.Event()
    script = (HEAD, ROLE, ONE, WaitFor(go), FINISH, LAST, END)
    async with (
        sockets(script, shutdown={"readiness_delay": 0, "grace": 10}) as (gateway, _),
        opened(gateway) as idle,
        opened(gateway) as busy,
    ):
        await busy.generate()
        await busy.read_delta(2)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(gateway.gateway.shut_down, trio.Event())
            assert (await idle.read_closed()).code == 1001
            going = await busy.read_until(lambda m: m["type"] == "going_away")
            assert going == {"type": "going_away", "deadline_ms": 10_000}
            await busy.generate("late")
            assert (await busy.read_last("late"))["error"]["code"] == "gateway_draining"
            go.set()
            assert (await busy.read_last())["type"] == "done"
            assert (await busy.read_closed()).code == 1001
        async with connected(gateway) as refused:
            assert (refused.status, refused.error_code) == (503, "gateway_draining")


async def test_what_runs_on_after_the_grace_is_told_why_it_ends() -> None:
    async with (
        sockets(ENDLESS, shutdown={"readiness_delay": 0, "grace": 0.2}) as (gateway, _),
        opened(gateway) as client,
    ):
        await client.generate(credit=1)
        await client.read_delta(1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(gateway.gateway.shut_down, trio.Event())
            last = await client.read_last()
            assert last["error"]["code"] == "gateway_draining"
            assert (await client.read_closed()).code == 1001
        assert (await gateway.settled()).outcome == "gateway_shutdown"


@pytest.mark.slow
async def test_a_process_with_open_sockets_exits_in_time(tmp_path: Path) -> None:
    limits = {"readiness_delay": 0, "grace": 0.5}
    async with (
        open_engine(ENDLESS) as engine,
        process_serving(engine, folder=tmp_path, shutdown=limits) as gateway,
    ):
        address = gateway.address
        assert isinstance(address, tuple)
        async with await trio.open_tcp_stream(*address) as raw:
            client = TokenSocket(raw, raw)
            await client.shake_hands(handshake(key=""))
            await client.generate()
            await client.read_delta(1)
            gateway.send(signal.SIGTERM)
            assert (await client.read_last())["error"]["code"] == "gateway_draining"
            assert (await client.read_closed()).code == 1001
            with trio.fail_after(LIMIT):
                assert await gateway.exit_code() == 0


# What is told of sockets ------------------------------------------------------------------------------------


async def test_statistics_count_sockets_and_their_streams() -> None:
    async with sockets(ENDLESS) as (gateway, _):

        def figures() -> object:
            return gateway.gateway.statistics()["sockets"]

        assert figures() == {"open": 0, "streams": 0, "resumable": 0}
        async with opened(gateway) as client, opened(gateway):
            await client.generate("s1")
            await client.generate("s2", resumable=True)
            await client.read_until(lambda _: bool(client.deltas("s1") and client.deltas("s2")))
            assert figures() == {"open": 2, "streams": 2, "resumable": 1}
        await gateway.until(lambda: figures() == {"open": 0, "streams": 0, "resumable": 0})
