"""Where workers register: over real sockets, whatever is sent there, and however many come."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from tests.admin.test_admin import MALFORMED
from tests.e2e.serving import Serving, open_descriptors, parse_address, serving
from trio_gateway.admin._server import MOST_OPERATORS
from trio_gateway.admin._workers import MOST_BYTES
from trio_gateway.testing import (
    Answer,
    Chunk,
    Head,
    RawClient,
    ScriptedEngine,
    agent_rejection,
    agent_report,
    agent_stream,
    chat_request,
    open_engine,
)

TOKEN = "a-word-that-joins"
PATH = "/internal/v1/workers"
CALM: dict[str, Any] = {
    "models": [],
    "fleet": {"heartbeat_interval": 30, "ttl": 90},  # however busy the machine is
}
EVENTS = (Head(200, (("transfer-encoding", "chunked"),)), Chunk(b"\n"))


@asynccontextmanager
async def joinable(folder: Path, *engines: ScriptedEngine, **sections: Any) -> AsyncIterator[Serving]:
    """A gateway at which workers may register."""
    (folder / "token").write_text(TOKEN)
    internal = {
        "bind": ["127.0.0.1:0"],
        "join_token_file": "token",
        "allowed_networks": ["127.0.0.0/8"],
        **sections.pop("internal", {}),
    }
    async with serving(*engines, folder=folder, internal=internal, **{**CALM, **sections}) as gateway:
        yield gateway


@asynccontextmanager
async def agent_playing(*scripts: Any) -> AsyncIterator[ScriptedEngine]:
    """An agent that answers as told, and holds its stream of events."""
    async with open_engine(*scripts, pages={"/internal/v1/events": EVENTS}) as engine:
        yield engine


async def dial(gateway: Serving) -> RawClient:
    return await RawClient.connect(parse_address(gateway.gateway.internal_addresses[0]))


async def call(
    gateway: Serving, method: str, path: str = PATH, body: object = None, *, secret: str | None = TOKEN
) -> Answer:
    data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = () if secret is None else (("authorization", f"Bearer {secret}"),)
    with trio.fail_after(10), await dial(gateway) as client:
        await client.request(method, path, headers=headers, body=data)
        return await client.read_to_end()


def registration(url: str = "http://127.0.0.1:9", **changes: Any) -> dict[str, Any]:
    return {
        "protocol": 1,
        "worker_id": "gpu-1",
        "incarnation": 1,
        "url": url,
        "models": ["m1"],
        "slots": 4,
        "engine": {"kind": "simulated", "version": "1"},
        "labels": [],
        **changes,
    }


async def register(gateway: Serving, url: str = "http://127.0.0.1:9", **changes: Any) -> str:
    """Register, and answer the secret."""
    answer = await call(gateway, "POST", body=registration(url, **changes))
    assert answer.status == 200, answer.body
    told = answer.json()
    assert told.keys() == {"secret", "heartbeat_interval", "ttl"}
    return str(told["secret"])


async def heartbeat(gateway: Serving, secret: str, worker_id: str = "gpu-1", **changes: Any) -> Answer:
    report = {**agent_report(), "requests": [], **changes}
    return await call(gateway, "PUT", f"{PATH}/{worker_id}", report, secret=secret)


# From registering to signing off ---------------------------------------------------------------------------


async def test_a_worker_registers_serves_reports_and_signs_off(tmp_path: Path) -> None:
    async with agent_playing(agent_stream("hello")) as agent, joinable(tmp_path) as gateway:
        assert (await gateway.get("/readyz")).status == 503
        secret = await register(gateway, agent.url)
        assert (await gateway.get("/readyz")).status == 503  # nobody knows yet that it has heard its secret
        assert (await heartbeat(gateway, secret)).status == 200
        assert (await gateway.get("/readyz")).status == 200
        answer = await gateway.ask(chat_request())
        assert (answer.chat().text, answer.chat().done) == ("hello", 1)
        (request,) = agent.requests
        assert (request.method, request.target) == ("POST", "/internal/v1/generate")
        assert request.header("authorization") == f"Bearer {secret}"
        with trio.fail_after(10):
            events = await agent.page_request("/internal/v1/events")
        assert events.header("authorization") == f"Bearer {secret}"
        assert (await heartbeat(gateway, secret, seq=2, models=["m1", "m2"])).status == 200
        listed = (await gateway.get("/v1/models")).json()["data"]
        assert isinstance(listed, list)
        assert [model["id"] for model in listed] == ["m1", "m2"]
        assert (await call(gateway, "DELETE", f"{PATH}/gpu-1?incarnation=1", secret=secret)).status == 200
        gone = await gateway.ask(chat_request())
        assert (gone.status, gone.error()["code"]) == (503, "no_worker")
        assert (await gateway.ask(chat_request(model="never"))).status == 404
        assert (await heartbeat(gateway, secret)).status == 404
        with trio.fail_after(10):
            await events.closed.wait()  # nobody follows what is gone


async def test_a_worker_that_is_not_heard_of_is_forgotten(tmp_path: Path) -> None:
    fleet = {"heartbeat_interval": 0.1, "ttl": 0.3}
    async with joinable(tmp_path, fleet=fleet) as gateway:
        await register(gateway)
        await gateway.until(lambda: not gateway.gateway.fleet.books)
        assert (await gateway.ask(chat_request())).error()["code"] == "no_worker"
    details = [line["detail"] for line in gateway.logged("worker")]
    assert details == ["registered", "expired: it sent no heartbeat"]


async def test_what_a_rejection_tells_of_a_registered_worker_is_known_at_once(tmp_path: Path) -> None:
    rejection = agent_rejection("capacity", agent_report(5, slots=2, running=2))
    async with agent_playing(rejection) as agent, joinable(tmp_path, retry={"max_attempts": 1}) as gateway:
        secret = await register(gateway, agent.url)
        assert (await heartbeat(gateway, secret)).status == 200
        answer = await gateway.ask(chat_request())
        assert (answer.status, answer.error()["code"]) == (429, "engine_overloaded")
        book = gateway.gateway.fleet.books["gpu-1"]
        assert (book.snapshot.seq, book.slots, book.free) == (5, 2, 0)


# Answers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("secret", [None, "", "wrong", "é", TOKEN + " x", TOKEN[:-1]])
async def test_only_the_join_token_registers(secret: str | None, tmp_path: Path) -> None:
    async with joinable(tmp_path) as gateway:
        shown = None if secret is None else secret.encode().decode("latin-1")
        assert (await call(gateway, "POST", body=registration(), secret=shown)).status == 401
        assert gateway.gateway.fleet.books == {}


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({}, 200),
        ({"news": {"of": "later versions"}}, 200),
        ({"url": "http://10.0.0.1:9"}, 403),
        ({"worker_id": "w1"}, 409),
        ({"incarnation": 0}, 200),
        ({"protocol": 2}, 400),
        ({"worker_id": "a/b"}, 400),
        ({"worker_id": ""}, 400),
        ({"url": "https://127.0.0.1:9"}, 403),
        ({"url": "http://user@127.0.0.1:9"}, 400),
        ({"url": "http://127.0.0.1:9/path"}, 400),
        ({"url": "http://127.0.0.1"}, 400),
        ({"slots": -1}, 400),
        ({"slots": 1.5}, 400),
        ({"models": "m1"}, 400),
        ({"models": [""]}, 400),
        ({"incarnation": "1"}, 400),
        ({"labels": ["not a word"]}, 400),
        ({"engine": None}, 400),
    ],
)
async def test_registrations_are_judged(changes: dict[str, Any], status: int, tmp_path: Path) -> None:
    async with open_engine() as engine, joinable(tmp_path, engine, models=[{"id": "m1"}]) as gateway:
        answer = await call(gateway, "POST", body=registration(**changes))
        assert answer.status == status
        assert (len(gateway.gateway.fleet.books) == 2) is (status == 200)
        if status != 200:
            error = answer.json()["error"]
            assert isinstance(error, dict)
            assert error["message"]


async def test_heartbeats_and_goodbyes_are_judged(tmp_path: Path) -> None:
    async with joinable(tmp_path) as gateway:
        secret = await register(gateway, incarnation=5)
        other = await register(gateway, worker_id="gpu-2")
        assert (await heartbeat(gateway, secret, incarnation=5)).status == 200
        assert (await heartbeat(gateway, secret, incarnation=4)).status == 409
        assert (await heartbeat(gateway, other, incarnation=5)).status == 401
        assert (await heartbeat(gateway, TOKEN, incarnation=5)).status == 401
        assert (await heartbeat(gateway, secret, "gpu-9")).status == 404
        assert (await heartbeat(gateway, secret, state="asleep")).status == 400
        goodbye = f"{PATH}/gpu-1?incarnation="
        assert (await call(gateway, "DELETE", goodbye + "4", secret=secret)).status == 409
        assert (await call(gateway, "DELETE", goodbye + "5", secret=other)).status == 401
        for odd in ("x", "-1", "9" * 30, "²"):  # as if it said none
            again = await register(gateway, incarnation=5)
            path = goodbye + odd.encode().decode("latin-1")
            assert (await call(gateway, "DELETE", path, secret=again)).status in (200, 400)
        assert (await call(gateway, "DELETE", goodbye + "5", secret=secret)).status in (401, 404)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/livez", 200),
        ("GET", PATH, 405),
        ("PUT", PATH, 405),
        ("GET", PATH + "/gpu-1", 405),
        ("POST", PATH + "/gpu-1", 405),
        ("GET", "/admin/v1/statistics", 404),
        ("GET", "/metrics", 404),
        ("POST", "/v1/chat/completions", 404),
    ],
)
async def test_nothing_else_is_there(method: str, path: str, status: int, tmp_path: Path) -> None:
    async with joinable(tmp_path) as gateway:
        assert (await call(gateway, method, path)).status == status


async def test_without_a_place_to_join_there_is_none(tmp_path: Path) -> None:
    async with serving(models=[]) as gateway:
        assert gateway.gateway.internal_addresses == []
        assert (await gateway.fetch("POST", PATH, body=b"{}")).status == 404


# Whatever comes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"worker_id": "\xff"}',
        b'{"a": ' + b"[" * 100_000,
        b"[" * 1_000_000,
        b'{"incarnation": 1' + b"0" * 5000 + b"}",
        b"\x00" * 1000,
    ],
)
async def test_messages_that_can_not_be_read_are_turned_away(body: bytes, tmp_path: Path) -> None:
    async with joinable(tmp_path) as gateway:
        secret = await register(gateway)
        assert (await call(gateway, "POST", body=body)).status == 400
        assert (await call(gateway, "PUT", PATH + "/gpu-1", body, secret=secret)).status == 400
        assert (await heartbeat(gateway, secret)).status == 200


async def test_the_longest_heartbeat_is_taken_and_a_longer_one_is_not(tmp_path: Path) -> None:
    listed = [{"id": f"{number:032x}", "attempt": 1, "generated": 123_456} for number in range(65_536)]
    async with joinable(tmp_path) as gateway:
        secret = await register(gateway)
        assert (await heartbeat(gateway, secret, running=65_536, requests=listed)).status == 200
        assert gateway.gateway.fleet.books["gpu-1"].snapshot.running == 65_536
        assert (await heartbeat(gateway, secret, seq=2, requests=[*listed, listed[0]])).status == 400
        head = f"PUT {PATH}/gpu-1 HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {secret}\r\n"
        with trio.fail_after(20), await dial(gateway) as client:
            await client.send(f"{head}content-length: {MOST_BYTES + 1}\r\n\r\n".encode())
            try:
                for _ in range(MOST_BYTES // 65536 + 1):
                    await client.send(b" " * 65536)
                assert (await client.read_to_end()).status == 413
            except OSError:
                pass  # closed before all of it was sent
        assert (await heartbeat(gateway, secret, seq=3)).status == 200
        assert gateway.gateway.fleet.books["gpu-1"].snapshot.seq == 3


@pytest.mark.parametrize(("method", "path"), [("POST", PATH), ("PUT", PATH + "/gpu-1"), ("PUT", PATH + "/x")])
async def test_whoever_has_no_credential_is_answered_before_any_body_is_read(
    method: str, path: str, tmp_path: Path
) -> None:
    async with joinable(tmp_path) as gateway:
        await register(gateway)
        with trio.fail_after(10), await dial(gateway) as client:
            await client.send(
                f"{method} {path} HTTP/1.1\r\nhost: a\r\nauthorization: Bearer x\r\n"
                "content-length: 1000000\r\n\r\n".encode()
            )
            assert (await client.read_to_end()).status in (401, 404)


async def test_a_body_that_does_not_come_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trio_gateway.admin._workers.BODY_LIMIT", 0.2)
    async with joinable(tmp_path) as gateway:
        with trio.fail_after(10), await dial(gateway) as client:
            await client.send(
                f"POST {PATH} HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {TOKEN}\r\n"
                'content-length: 1000\r\n\r\n{"protocol"'.encode()
            )
            assert (await client.read_to_end()).status == 408
            await client.read_closed()
        await register(gateway)


@pytest.mark.parametrize("how", ["fin", "half", "reset"])
async def test_an_agent_that_leaves_within_its_message_is_no_bug(how: str, tmp_path: Path) -> None:
    async with joinable(tmp_path) as gateway:
        before = open_descriptors()
        with trio.fail_after(10), await dial(gateway) as client:
            await client.send(
                f"POST {PATH} HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {TOKEN}\r\n"
                'content-length: 1000\r\n\r\n{"protocol"'.encode()
            )
            await trio.testing.wait_all_tasks_blocked(0.02)  # the watchdog wakes up every 0.05 s
            if how == "half":
                client.half_close()
                await client.read_closed()
            elif how == "fin":
                client.leave_fin()
            else:
                client.leave_reset()
        await gateway.until(lambda: open_descriptors() == before)
        await register(gateway)


@pytest.mark.parametrize("raw", MALFORMED.values(), ids=MALFORMED.keys())
async def test_whatever_a_connection_sends_the_gateway_lives(raw: bytes, tmp_path: Path) -> None:
    async with joinable(tmp_path) as gateway:
        before = open_descriptors()
        for how in ("fin", "reset"):
            with await dial(gateway) as client:
                await client.send(raw)
                if how == "fin":
                    client.leave_fin()
                else:
                    client.leave_reset()
        secret = await register(gateway)
        assert (await heartbeat(gateway, secret)).status == 200
        await call(gateway, "DELETE", PATH + "/gpu-1", secret=secret)
        await gateway.until(lambda: open_descriptors() == before)


async def test_many_more_agents_than_operators_may_be_connected(tmp_path: Path) -> None:
    count = 4 * MOST_OPERATORS
    async with joinable(tmp_path) as gateway:
        secrets = {}
        with ExitStack() as connected:
            clients = [connected.enter_context(await dial(gateway)) for _ in range(count)]

            async def come(number: int, client: RawClient) -> None:
                headers = (("authorization", f"Bearer {TOKEN}"),)
                asked = registration(f"http://127.0.0.1:{number + 1}", worker_id=f"gpu-{number}")
                await client.request("POST", PATH, headers=headers, body=json.dumps(asked).encode())
                answer = await client.read_to_end()
                secrets[number] = answer.json()["secret"]

            with trio.fail_after(20):
                async with trio.open_nursery() as nursery:
                    for number, client in enumerate(clients):
                        nursery.start_soon(come, number, client)
                for number, client in enumerate(clients):  # all of them stay connected
                    headers = (("authorization", f"Bearer {secrets[number]}"),)
                    body = json.dumps({**agent_report(), "requests": []}).encode()
                    await client.request("PUT", f"{PATH}/gpu-{number}", headers=headers, body=body)
                    assert (await client.read_to_end()).status == 200
            assert len(gateway.gateway.fleet.books) == count
            with trio.fail_after(10), await RawClient.connect(gateway.admin_address) as operator:
                await operator.request("GET", "/livez")
                assert (await operator.read_to_end()).status == 200
