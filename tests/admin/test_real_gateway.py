"""The door of a real gateway: every answer has its shape, and a signal ends it whoever hangs on."""

from __future__ import annotations

import json
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import trio

from tests.admin.door import OPERATOR, TOKENS, VIEWER, Door, code_of, expect_shape
from tests.e2e.process import process_serving
from tests.e2e.serving import parse_address, serving, tenant
from trio_gateway.admin import ACTS, PREFIX, READS
from trio_gateway.testing import (
    FakeAdminPort,
    RawClient,
    WaitFor,
    chat_request,
    chat_stream,
    http_request,
    open_engine,
)

ADMIN: dict[str, Any] = {
    "bind": ["127.0.0.1:0"],
    "tokens": [
        {"id": token.id, "hash": f"sha256:{token.digest.hex()}", "role": token.role} for token in TOKENS
    ],
}


async def first_events(door: Door, number: int) -> list[tuple[str, Any]]:
    """The first events of the feed."""
    with trio.fail_after(20), await RawClient.connect(door.address) as client:
        headers = (("authorization", f"Bearer {VIEWER}"),)
        await client.request("GET", "/admin/v1/feed", headers=headers, host="localhost")
        await client.read_events(number)
        (answer,) = client.answers
        events = answer.events
        assert events is not None
        return [(event.name or "", json.loads(event.data)) for event in events.events[:number]]


async def test_every_answer_of_a_real_gateway_has_its_shape(tmp_path: Path, nursery: trio.Nursery) -> None:
    go = trio.Event()
    stream = chat_stream("a", "b", usage=(3, 2))
    scripts = (chat_stream("ok", usage=(3, 2)), (*stream[:3], WaitFor(go), *stream[3:]), chat_stream("ok"))
    async with (
        open_engine(*scripts) as engine,
        serving(
            engine,
            admin=ADMIN,
            worker={"slots": 1},
            tenants=[tenant("acme", "k", requests_per_minute=100)],
            database={"url": f"sqlite:///{tmp_path}/records.db", "journal": str(tmp_path / "journal")},
        ) as gateway,
    ):
        door = Door(FakeAdminPort(), gateway.admin_address)
        await gateway.until(lambda: gateway.gateway.keyring.complete)
        assert (await gateway.ask(chat_request(key="k"))).status == 200
        nursery.start_soon(gateway.ask, chat_request(key="k"))
        await engine.request(2)
        nursery.start_soon(gateway.ask, chat_request(key="k"))
        await gateway.queued(1)
        assert (await door.act("/tenants/acme/freeze", OPERATOR)).status == 200
        states: dict[str, str] = {}
        for read in READS:
            for id_ in states or {"": ""}:
                answer = await door.ask("GET", PREFIX + read.path.replace("{id}", id_), VIEWER)
                assert answer.status == 200, (read.path, answer.body)
                expect_shape(answer.json(), read.shape)
                if read.name == "requests":
                    rows = json.loads(answer.body)["requests"]
                    states = {row["id"]: row["state"] for row in rows}
        assert sorted(states.values()) == ["ended", "running", "waiting"]
        assert code_of(await door.ask("GET", f"{PREFIX}/requests/none", VIEWER)) == (404, "not_found")
        ((name, snapshot),) = await first_events(door, 1)
        assert name == "snapshot"
        expect_shape(snapshot, "Snapshot")
        assert (snapshot["running"], snapshot["waiting"]) == (1, 1)
        assert (await door.act("/tenants/acme/thaw", OPERATOR)).status == 200
        go.set()
        await gateway.settled(3)


async def test_every_act_of_a_real_gateway_is_done_or_refused_in_its_shape(tmp_path: Path) -> None:
    arguments: dict[str, dict[str, Any]] = {
        "breakers.reset": {},
        "breakers.force": {"model": "m1", "state": "closed"},
        "limits.set": {"set": {"admission.max_queued": 7}},
        "keys.rotate": {"tenant": "acme", "id": "none"},
        "log_level.set": {"level": "warning"},
    }
    targets = {"tenant": "acme", "worker": "w1", "request": "none"}
    refused = {
        "requests.cancel": "not_found",
        "keys.rotate": "not_found",
        "processes.replace": "not_possible",
    }
    async with (
        open_engine() as engine,
        serving(engine, admin=ADMIN, tenants=[tenant("acme", "k")]) as gateway,
    ):
        door = Door(FakeAdminPort(), gateway.admin_address)
        outcomes = []
        for act in ACTS:
            path = act.path.replace("{id}", targets[act.of] if act.of else "")
            for _ in range(2):  # again, it does nothing more
                answer = await door.act(path, OPERATOR, **arguments.get(act.action, {}))
                if act.action in refused:
                    assert answer.status != 200, (act.action, answer.body)
                    assert code_of(answer)[1] == refused[act.action], act.action
                else:
                    assert answer.status == 200, (act.action, answer.body)
                    expect_shape(answer.json(), "Act")
            outcomes.append((act.action, json.loads(answer.body).get("done")))
        assert all(not done for _, done in outcomes), outcomes
        audit = json.loads((await door.ask("GET", f"{PREFIX}/audit", VIEWER)).body)
        expect_shape(audit, "Audit")
        assert [row["action"] for row in audit["audit"]] == [
            act.action for act in reversed(ACTS) for _ in (1, 2)
        ]
        assert {row["actor"] for row in audit["audit"]} == {"ops"}


async def test_no_answer_holds_a_credential(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("upstream-key-0123456789")
    secrets = (b"upstream-key-0123456789", b"client-key", OPERATOR.encode(), VIEWER.encode())
    hidden = [TOKENS[0].digest.hex().encode()]
    async with (
        open_engine() as engine,
        serving(
            engine,
            admin=ADMIN,
            worker={"api_key_file": str(tmp_path / "key")},
            tenants=[tenant("acme", "client-key")],
        ) as gateway,
    ):
        door = Door(FakeAdminPort(), gateway.admin_address)
        await gateway.ask(chat_request(key="client-key"))
        id_ = (await gateway.settled()).exchange_id
        for path in [*(PREFIX + read.path.replace("{id}", id_) for read in READS), "/metrics"]:
            answer = await door.ask("GET", path, OPERATOR)
            assert answer.status == 200
            assert not [secret for secret in (*secrets, *hidden) if secret in answer.body], path
            for stranger in ("client-key", "upstream-key-0123456789", None):
                assert code_of(await door.ask("GET", path, stranger)) == (401, "invalid_admin_token")
    log = gateway.log.getvalue().encode()
    assert not [secret for secret in secrets if secret in log]


async def test_a_signal_ends_the_process_whoever_hangs_on_to_the_operators_door(tmp_path: Path) -> None:
    go = trio.Event()
    stream = chat_stream("a", "b")
    limits = {"readiness_delay": 0, "grace": 20}
    bearer = (("authorization", f"Bearer {VIEWER}"),)
    async with (
        open_engine((*stream[:3], WaitFor(go), *stream[3:])) as engine,
        process_serving(engine, folder=tmp_path, shutdown=limits, admin=ADMIN) as gateway,
    ):
        (line,) = (line for line in gateway.lines if line["event"] == "listening")
        address = parse_address(line["admin"][0])
        with ExitStack() as hanging, trio.fail_after(30), await gateway.connect() as client:
            await client.send(chat_request())
            await client.read_events(2)
            feed = http_request("GET", "/admin/v1/feed", headers=bearer, host="localhost")
            statistics = http_request("GET", "/admin/v1/statistics", headers=bearer, host="localhost")
            for greeting in (b"", b"GET /admin", feed, statistics * 500) * 3:
                operator = hanging.enter_context(await RawClient.connect(address, receive_buffer=4096))
                await operator.send(greeting)
            looking = hanging.enter_context(await RawClient.connect(address))
            await looking.send(feed)
            await looking.read_events(1)
            gateway.send(signal.SIGTERM)
            await gateway.logged("shutting_down")
            await looking.read_until(b'"stopping":true')  # who looks sees the end coming
            go.set()
            assert (await client.read_to_end()).chat().text == "ab"
            assert await gateway.exit_code() == 0
            assert await looking.read_closed() in ("fin", "reset")
