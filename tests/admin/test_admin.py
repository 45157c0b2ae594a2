"""What operators are told, and that no operator's connection can harm the gateway."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.serving import Serving, open_descriptors, serving, tenant
from trio_gateway.admin._server import MOST_OPERATORS
from trio_gateway.testing import (
    Answer,
    CloseFin,
    RawClient,
    WaitFor,
    chat_request,
    chat_stream,
    error_answer,
    good_answer,
    open_engine,
)

STATISTICS = "/admin/v1/statistics"


async def ask_admin(gateway: Serving, path: str, method: str = "GET") -> Answer:
    with trio.fail_after(10), await RawClient.connect(gateway.admin_address) as client:
        await client.request(method, path)
        return await client.read_to_end()


async def statistics(gateway: Serving) -> dict[str, Any]:
    answer = await ask_admin(gateway, STATISTICS)
    assert (answer.status, answer.header("content-type")) == (200, "application/json")
    return dict(answer.json())


async def metrics(gateway: Serving) -> dict[str, dict[tuple[str, ...], float]]:
    """Every sample by its name, then by the values of its labels in the order of their names."""
    answer = await ask_admin(gateway, "/metrics")
    assert answer.status == 200
    assert (answer.header("content-type") or "").startswith("text/plain")
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(answer.body.decode()):
        for sample in family.samples:
            labels = tuple(value for _, value in sorted(sample.labels.items()))
            found.setdefault(sample.name.removeprefix("trio_gateway_"), {})[labels] = sample.value
    return found


async def test_it_is_alive() -> None:
    async with serving(models=[]) as gateway:
        answer = await ask_admin(gateway, "/livez")
        assert (answer.status, answer.json()) == (200, {"status": "ok"})
        assert (await ask_admin(gateway, "/nowhere")).status == 404
        assert (await ask_admin(gateway, STATISTICS, "DELETE")).status == 405


async def test_the_public_listener_knows_nothing_of_it() -> None:
    async with serving(models=[]) as gateway:
        for path in (STATISTICS, "/metrics"):
            assert (await gateway.get(path)).status == 404


async def test_statistics_tell_what_happens_right_now(nursery: trio.Nursery) -> None:
    go = trio.Event()
    async with (
        open_engine((WaitFor(go), *chat_stream("ok"))) as engine,
        serving(engine, worker={"slots": 1}, tenants=[tenant("acme", "k")]) as gateway,
    ):
        nursery.start_soon(gateway.ask, chat_request(key="k"))
        await engine.wait_open(1)
        nursery.start_soon(gateway.ask, chat_request("x" * 500, key="k"))
        await gateway.queued(1)
        assert (await gateway.ask(chat_request())).status == 401
        now = await statistics(gateway)
        assert (now["arrived"], now["accepted"], now["running"], now["waiting"]) == (3, 2, 1, 1)
        assert now["turned_away"] == {"invalid_api_key": 1}
        assert now["leases"] | {"scope": ""} == {
            "granted": 1,
            "held": 1,
            "draining": 0,
            "returned": 0,
            "double_releases": 0,
            "scope": "",
        }
        assert (now["queue"]["depth"], now["queue"]["tenants"]) == (1, {"acme": 1})
        assert now["queue"]["bytes"] > 500
        assert now["conservation"] == {"ok": True, "errors": [], "leaks": 0}
        (worker,) = now["workers"]
        assert (worker["id"], worker["slots"], worker["held"], worker["attempts"]) == ("w1", 1, 1, 1)
        go.set()
        await gateway.settled(2)
        now = await statistics(gateway)
        assert (now["running"], now["waiting"], now["outcomes"]["completed"]) == (0, 0, 2)
        assert [record["outcome"] for record in now["recent"]] == ["completed"] * 2
        assert [record["exchange_id"] for record in now["recent"]] == [
            record.exchange_id for record in gateway.records
        ]


async def test_faults_and_attempts_are_told_by_worker() -> None:
    async with (
        open_engine(error_answer(500)) as first,
        open_engine() as second,
        serving(first, second) as gateway,
    ):
        await gateway.ask(chat_request())
        now = await statistics(gateway)
        assert [(w["id"], w["attempts"], w["faults"]) for w in now["workers"]] == [("w1", 1, 1), ("w2", 1, 0)]


async def test_no_key_and_no_prompt_is_told_to_operators() -> None:
    async with open_engine() as engine, serving(engine, tenants=[tenant("acme", "secret-key")]) as gateway:
        await gateway.ask(chat_request("secret-prompt", key="secret-key"))
        await gateway.settled()
        for path in (STATISTICS, "/metrics"):
            body = (await ask_admin(gateway, path)).body
            assert b"secret" not in body
    assert "secret" not in gateway.log.getvalue()


async def test_metrics_count_what_ended_and_show_what_runs(nursery: trio.Nursery) -> None:
    go = trio.Event()
    broken = (*chat_stream("a", finish=None, done=False, end=False), CloseFin())
    scripts = [
        chat_stream("a", "b", usage=(3, 2)),
        broken,
        error_answer(400),
        (WaitFor(go), *chat_stream("c")),
    ]
    async with open_engine(*scripts) as engine, serving(engine) as gateway:
        for number in (1, 2, 3):
            await gateway.ask(chat_request())
            await gateway.settled(number)
        await gateway.ask(chat_request(model="unknown"))
        nursery.start_soon(gateway.ask, chat_request())
        await engine.request(4)
        found = await metrics(gateway)
        labels = {"model": "m1", "operation": "chat.completions", "tenant": "anonymous"}
        assert {key: value for key, value in found["requests_total"].items() if value} == {
            (labels["model"], labels["operation"], outcome, labels["tenant"]): 1.0
            for outcome in ("completed", "upstream_failed", "refused")
        }
        assert found["turned_away_total"] == {("model_not_found",): 1.0}
        assert found["leases"][("held", "w1")] == 1.0
        assert found["running"][()] == 1.0
        assert found["worker_attempts_total"][("w1",)] == 4.0
        assert found["worker_faults_total"][("w1",)] == 1.0
        assert found["conservation_error"][()] == 0.0
        for kind in ("prompt", "generated"):
            told = [getattr(record, f"tokens_{kind}") for record in gateway.records]
            assert sum(told) > 0
            assert found["tokens_total"][(kind, "m1", "anonymous")] == sum(told)
        go.set()
        await gateway.settled(4)


# Requests that end a stock Hypercorn, or try to.
MALFORMED: dict[str, bytes] = {
    "noise": b"\x00\xff\x80\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
    "no version": b"GET /\r\n\r\n",
    "a bad length": b"GET /livez HTTP/1.1\r\nhost: a\r\ncontent-length: x\r\n\r\n",
    "a bad chunk": b"POST /livez HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    "a target that is no URL": b"GET //[ HTTP/1.1\r\nhost: a\r\n\r\n",
    "a target beyond ASCII": b"GET /\xff HTTP/1.1\r\nhost: a\r\n\r\n",
    "a host beyond ASCII": b"GET /livez HTTP/1.1\r\nhost: \xff\r\n\r\n",
    "h2c with bad settings": (
        b"GET / HTTP/1.1\r\nhost: a\r\nconnection: upgrade, http2-settings\r\nupgrade: h2c\r\n"
        b"http2-settings: a\r\n\r\n"
    ),
    "a WebSocket with a bad protocol": (
        b"GET / HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
        b"sec-websocket-version: 13\r\n"
        b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-protocol: \xff\r\n\r\n"
    ),
    "a WebSocket that speaks first": (
        b"GET / HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
        b"sec-websocket-version: 13\r\n"
        b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n\x81\x85\x00\x00\x00\x00hello"
    ),
    "HTTP/2 with a bad path": (
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"
        b"\x00\x00\x11\x01\x05\x00\x00\x00\x01\x82\x86\x04\x02/\xff\x41\x01a" + b"\x00" * 6
    ),
    "half a head": b"GET /livez HTTP/1.1\r\nhost: a",
    "nothing": b"",
}


@pytest.mark.parametrize("raw", MALFORMED.values(), ids=MALFORMED.keys())
async def test_whatever_an_operators_connection_sends_the_gateway_lives(raw: bytes) -> None:
    go = trio.Event()
    stream = chat_stream("a", "b")
    async with (
        open_engine((*stream[:3], WaitFor(go), *stream[3:]), good_answer) as engine,
        serving(engine) as gateway,
    ):
        with trio.fail_after(10), await gateway.connect() as running:
            await running.send(chat_request())
            await running.read_events(2)
            for how in ("wait", "fin", "reset"):
                client = await RawClient.connect(gateway.admin_address)
                with client:
                    await client.send(raw)
                    if how == "wait":
                        with trio.move_on_after(0.1):
                            await client.read_closed()
                    elif how == "fin":
                        client.leave_fin()
                    else:
                        client.leave_reset()
            assert (await ask_admin(gateway, "/livez")).status == 200
            go.set()
            assert (await running.read_to_end()).chat().text == "ab"
        assert (await gateway.ask(chat_request())).chat().text == "ok"


async def everything_from(gateway: Serving, greeting: bytes) -> bytes:
    """Answer all that an operator's connection gets, until it is closed."""
    assert isinstance(gateway.admin_address, tuple)
    stream = await trio.open_tcp_stream(*gateway.admin_address)
    got = bytearray()
    async with stream:
        await stream.send_all(greeting)
        with trio.fail_after(5):
            while more := await stream.receive_some():
                got += more
    return bytes(got)


async def test_operators_speak_http_1_1_only() -> None:
    async with serving(models=[]) as gateway:
        greeting = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"
        assert await everything_from(gateway, greeting) == b""
        assert (await ask_admin(gateway, "/livez")).status == 200


@pytest.mark.parametrize(
    "offer", [b"upgrade: h2c\r\n", b"UPGRADE:  H2C \r\n", b"upgrade: x\r\nupgrade: h2c\r\n"]
)
async def test_an_offer_of_http_2_is_not_taken_up(offer: bytes) -> None:
    async with serving(models=[]) as gateway:
        greeting = (
            b"GET /livez HTTP/1.1\r\nhost: a\r\nconnection: upgrade, http2-settings\r\n"
            + offer
            + b"http2-settings: AAMAAABkAAQAAP__\r\n\r\n"
        )
        last = b"GET /livez HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
        got = await everything_from(gateway, greeting + last)
        assert got.startswith(b"HTTP/1.1 200 ")
        assert got.count(b'{"status":"ok"}') == got.count(b"HTTP/1.1 ") == 2


async def test_an_operator_that_does_not_read_is_closed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("trio_gateway.admin._server.STUCK", 0.2)
    unix = {"bind": [f"unix:{tmp_path / 'admin.sock'}"]}  # whose buffers are small
    async with open_engine() as engine, serving(engine, admin=unix) as gateway:
        for number in range(1, 11):
            await gateway.ask(chat_request())
            await gateway.settled(number)
        await gateway.until(
            lambda: gateway.gateway.server.open == 0
        )  # callers' connections end a little later
        before = open_descriptors()
        with trio.fail_after(20), await RawClient.connect(tmp_path / "admin.sock") as client:
            await client.send(b"GET %b HTTP/1.1\r\nhost: a\r\n\r\n" % STATISTICS.encode() * 200)
            await gateway.until(lambda: open_descriptors() == before + 2)  # ours and theirs
            await gateway.until(lambda: open_descriptors() == before + 1)
        with trio.fail_after(10), await RawClient.connect(tmp_path / "admin.sock") as client:
            await client.request("GET", "/livez")
            assert (await client.read_to_end()).status == 200


@pytest.mark.parametrize("sent", [b"", b"GET /livez HT", b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n"])
async def test_an_operator_that_left_costs_nothing_any_more(sent: bytes) -> None:
    async with serving(models=[]) as gateway:
        before = open_descriptors()
        for _ in range(5):
            with await RawClient.connect(gateway.admin_address) as client:
                await client.send(sent)
                client.half_close()
                with trio.fail_after(10):
                    await client.read_closed()
        await gateway.until(lambda: open_descriptors() == before)


async def test_of_operators_beyond_their_number_who_was_idle_for_longest_gives_way() -> None:
    async with serving(models=[]) as gateway:
        with ExitStack() as operators, trio.fail_after(20):
            clients = [
                operators.enter_context(await RawClient.connect(gateway.admin_address))
                for _ in range(MOST_OPERATORS)
            ]
            for client in [*clients, clients[0]]:  # the second is the one that says nothing for longest now
                await client.request("GET", "/livez")
                assert (await client.read_to_end()).status == 200
            with await RawClient.connect(gateway.admin_address) as further:
                await further.request("GET", "/livez")
                assert (await further.read_to_end()).status == 200
                assert await clients[1].read_closed() == "fin"
            for client in (clients[0], *clients[2:]):
                await client.request("GET", "/livez")
                assert (await client.read_to_end()).status == 200
            assert (await gateway.get("/livez")).status == 200


async def test_it_can_listen_on_a_unix_socket(tmp_path: Path) -> None:
    bind = f"unix:{tmp_path / 'admin.sock'}"
    async with serving(models=[], admin={"bind": [bind]}) as gateway:
        with trio.fail_after(10), await RawClient.connect(tmp_path / "admin.sock") as client:
            await client.request("GET", STATISTICS)
            body = (await client.read_to_end()).body
            assert json.loads(body)["arrived"] == 0
    assert gateway.logged("listening")[0]["admin"] == [bind]  # as `--url` of the commands takes it
