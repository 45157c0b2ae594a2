"""What the decision records promise that a test holds."""

from __future__ import annotations

import pytest
import trio
from hypercorn.trio import run as hypercorn_run

from tests.e2e.serving import Serving, error_code, serving
from trio_gateway.admin import make_app, serve_admin
from trio_gateway.testing import (
    Answer,
    RawClient,
    Script,
    WaitFor,
    chat_request,
    error_answer,
    http_request,
    open_engine,
    until,
)

# 8 and 9: a worker that says "no room"

LONGER_THAN_ANYBODY_WAITS = (("retry-after", "120"),)


async def ask_into(answers: list[Answer], gateway: Serving) -> None:
    answers.append(await gateway.ask(chat_request()))


@pytest.mark.parametrize("status", [429, 503])
async def test_one_attempt_reaches_a_worker_without_room_and_those_who_wait_are_told_what_it_said(
    status: int, nursery: trio.Nursery
) -> None:
    go = trio.Event()
    full: Script = (WaitFor(go), *error_answer(status, headers=LONGER_THAN_ANYBODY_WAITS))
    answers: list[Answer] = []
    async with open_engine(full) as engine, serving(engine, worker={"slots": 1}) as gateway:
        for _ in range(4):
            nursery.start_soon(ask_into, answers, gateway)
        await engine.wait_open(1)
        await gateway.queued(3)
        go.set()
        await gateway.until(lambda: len(answers) == 4)
        answers.append(await gateway.ask(chat_request()))
        assert engine.statistics().requests == 1
    assert [(answer.status, error_code(answer)) for answer in answers] == [(status, "engine_overloaded")] * 5
    assert all(60 < int(answer.header("retry-after") or "") <= 120 for answer in answers)
    assert gateway.gateway.fleet.books["w1"].attempts == 1


# 12: what counts as arrived


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/v1/models", "/v1/models/m1"])
async def test_a_health_check_or_a_list_that_was_answered_has_not_arrived(path: str) -> None:
    async with open_engine() as engine, serving(engine) as gateway:
        assert (await gateway.get(path)).status == 200
        assert gateway.gateway.books.arrived == 0
        await gateway.fetch("DELETE", path)
        assert gateway.gateway.books.arrived == 1
        assert gateway.turned_away() == {"method_not_allowed": 1}


# 14: the guard of the operators' listener

# Stock Hypercorn decodes this header without a net, and its server ends.
FATAL = http_request(
    "GET",
    "/livez",
    headers=(("connection", "upgrade, http2-settings"), ("upgrade", "h2c"), ("http2-settings", "AAA")),
)


async def test_a_request_that_ends_stock_hypercorn_ends_its_own_connection_only(
    nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = vars(hypercorn_run)
    monkeypatch.setitem(names, "TCPServer", names["TCPServer"])  # put back afterwards
    bugs: list[str] = []
    app = make_app(dict, lambda figures: b"", "text/plain")

    def note(where: str, exc: BaseException) -> None:
        bugs.append(where)

    async def serve(task_status: trio.TaskStatus[list[str]]) -> None:
        await serve_admin(app, ("127.0.0.1:0",), note, task_status=task_status)

    (url,) = await nursery.start(serve)
    address = ("127.0.0.1", int(url.rpartition(":")[2]))
    with trio.fail_after(10):
        with await RawClient.connect(address) as client:
            await client.send(FATAL)
            await client.read_closed()
        await until(lambda: bugs == ["admin connection"])
        with await RawClient.connect(address) as client:
            await client.send(http_request("GET", "/livez", headers=(("connection", "close"),)))
            assert (await client.read_to_end()).status == 200
    nursery.cancel_scope.cancel()
