"""What the decision records promise that a test holds."""

from __future__ import annotations

import pytest
import trio

from tests.e2e.serving import Serving, error_code, serving
from trio_gateway.testing import (
    Answer,
    Script,
    WaitFor,
    chat_request,
    error_answer,
    open_engine,
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
