"""Bounded acceptance: who gets a position, who is refused at once, and what a leaver gives back."""

from __future__ import annotations

import pytest
import trio

from tests.e2e.serving import Leaving, Serving, error_code, leave, serving, tenant
from trio_gateway.testing import (
    Answer,
    Script,
    WaitFor,
    chat_request,
    chat_stream,
    error_answer,
    good_answer,
    open_engine,
)

ONE_SLOT = {"slots": 1}


def waiting_for(event: trio.Event) -> Script:
    """An answer that begins when the event is set."""
    return (WaitFor(event), *chat_stream("late"))


async def ask_in_background(gateway: Serving, nursery: trio.Nursery, request: bytes) -> list[Answer]:
    """Send a request that will have to wait; answers where its answer will be."""
    answers: list[Answer] = []
    depth = gateway.depth

    async def ask() -> None:
        answers.append(await gateway.ask(request))

    nursery.start_soon(ask)
    await gateway.queued(depth + 1)
    return answers


async def test_with_all_slots_held_and_the_queue_full_the_next_request_is_refused_at_once(
    nursery: trio.Nursery,
) -> None:
    go = trio.Event()
    async with (
        open_engine(waiting_for(go)) as engine,
        serving(engine, worker={"slots": 2}, admission={"max_queued": 3}) as gateway,
    ):
        for number in (1, 2):
            nursery.start_soon(gateway.ask, chat_request())
            await engine.wait_open(number)
        waiting = [await ask_in_background(gateway, nursery, chat_request()) for _ in range(3)]
        for stream in (True, False):
            refused = await gateway.ask(chat_request(stream=stream))
            assert (refused.status, error_code(refused)) == (429, "queue_full")
            assert refused.error()["type"] == "rate_limit_error"
            assert int(refused.header("retry-after") or "") >= 1
            assert int(refused.header("retry-after-ms") or "") >= 1000
            assert refused.header("x-should-retry") is None
            assert refused.header("x-request-id")
        assert gateway.depth == 3
        assert gateway.turned_away() == {"queue_full": 2}
        assert engine.statistics().requests == 2
        go.set()
        await gateway.settled(5)
        assert [answers[0].chat().text for answers in waiting] == ["late"] * 3
        assert engine.statistics().most_open == 2


async def test_without_a_queue_a_request_is_served_or_refused(nursery: trio.Nursery) -> None:
    go = trio.Event()
    async with (
        open_engine(waiting_for(go)) as engine,
        serving(engine, worker=ONE_SLOT, admission={"max_queued": 0}) as gateway,
    ):
        nursery.start_soon(gateway.ask, chat_request())
        await engine.wait_open(1)
        assert error_code(await gateway.ask(chat_request())) == "queue_full"
        go.set()
        await gateway.settled()
        assert (await gateway.ask(chat_request())).chat().text == "late"


@pytest.mark.parametrize("how", ["fin", "reset"])
async def test_a_waiter_that_leaves_gives_back_its_position_and_its_bytes(
    how: Leaving, nursery: trio.Nursery
) -> None:
    go = trio.Event()
    async with (
        open_engine(waiting_for(go)) as engine,
        serving(engine, worker=ONE_SLOT, admission={"max_queued": 1}) as gateway,
    ):
        nursery.start_soon(gateway.ask, chat_request())
        await engine.wait_open(1)
        with await gateway.connect() as client:
            await client.send(chat_request("x" * 5000))
            await gateway.queued(1)
            assert gateway.gateway.admission.statistics().queued_bytes > 5000
            assert gateway.gateway.server.room.used > 5000
            leave(client, how)
            await gateway.queued(0)
            assert gateway.gateway.admission.statistics().queued_bytes == 0
            record = await gateway.settled()
        assert (record.outcome, record.phase, record.attempts) == ("client_gone", "queued", 0)
        assert (record.worker, record.placed_at, record.status) == (None, None, None)
        waiting = await ask_in_background(gateway, nursery, chat_request())
        go.set()
        await gateway.settled(3)
        assert waiting[0].chat().text == "late"
        assert engine.statistics().requests == 2


async def test_the_queue_is_bounded_in_bytes_too(nursery: trio.Nursery) -> None:
    go = trio.Event()
    async with (
        open_engine(waiting_for(go)) as engine,
        serving(engine, worker=ONE_SLOT, admission={"max_queued_bytes": 3000}) as gateway,
    ):
        nursery.start_soon(gateway.ask, chat_request())
        await engine.wait_open(1)
        await ask_in_background(gateway, nursery, chat_request("x" * 2000))
        refused = await gateway.ask(chat_request("x" * 2000))
        assert (refused.status, error_code(refused)) == (429, "queue_full")
        await ask_in_background(gateway, nursery, chat_request("x" * 100))
        assert gateway.depth == 2
        go.set()
        await gateway.settled(3)


async def test_who_waits_too_long_is_told_to_come_back_later(nursery: trio.Nursery) -> None:
    go = trio.Event()
    async with (
        open_engine(waiting_for(go)) as engine,
        serving(engine, worker=ONE_SLOT, admission={"max_wait": 0.1}) as gateway,
    ):
        nursery.start_soon(gateway.ask, chat_request())
        await engine.wait_open(1)
        answer = await gateway.ask(chat_request())
        assert (answer.status, error_code(answer)) == (503, "queue_timeout")
        assert int(answer.header("retry-after") or "") >= 1
        record = await gateway.settled()
        assert (record.outcome, record.phase, record.code) == ("refused", "queued", "queue_timeout")
        go.set()
        await gateway.settled(2)


async def test_waiting_spends_from_the_deadline(nursery: trio.Nursery) -> None:
    go = trio.Event()
    async with open_engine(waiting_for(go)) as engine, serving(engine, worker=ONE_SLOT) as gateway:
        nursery.start_soon(gateway.ask, chat_request())
        await engine.wait_open(1)
        answer = await gateway.ask(chat_request(headers=(("x-gateway-timeout-ms", "100"),)))
        assert (answer.status, error_code(answer)) == (504, "deadline_exceeded")
        assert answer.error()["gateway"] == {
            "request_id": answer.header("x-request-id"),
            "outcome": "deadline_exceeded",
            "phase": "queued",
            "tokens_delivered": 0,
            "retryable": True,
        }
        record = await gateway.settled()
        assert (record.outcome, record.phase, record.status) == ("deadline_exceeded", "queued", 504)
        go.set()
        await gateway.settled(2)


async def test_a_full_model_does_not_block_another(nursery: trio.Nursery) -> None:
    go = trio.Event()
    async with (
        open_engine(waiting_for(go)) as full,
        open_engine() as free,
        serving(
            full,
            free,
            worker=ONE_SLOT,
            models=[{"id": "m1", "workers": ["w1"]}, {"id": "m2", "workers": ["w2"]}],
        ) as gateway,
    ):
        nursery.start_soon(gateway.ask, chat_request())
        await full.wait_open(1)
        await ask_in_background(gateway, nursery, chat_request())
        assert (await gateway.ask(chat_request(model="m2"))).chat().text == "ok"
        assert gateway.depth == 1
        go.set()
        await gateway.settled(3)


async def test_waiters_of_one_model_are_served_in_the_order_in_which_they_came(nursery: trio.Nursery) -> None:
    go = trio.Event()
    async with open_engine(waiting_for(go)) as engine, serving(engine, worker=ONE_SLOT) as gateway:
        nursery.start_soon(gateway.ask, chat_request("first"))
        await engine.wait_open(1)
        for text in ("second", "third", "fourth"):
            await ask_in_background(gateway, nursery, chat_request(text))
        go.set()
        await gateway.settled(4)
        assert [request.json()["messages"] for request in engine.requests] == [
            [{"role": "user", "content": text}] for text in ("first", "second", "third", "fourth")
        ]


async def test_equal_workers_are_taken_by_load_and_then_in_file_order(nursery: trio.Nursery) -> None:
    go = trio.Event()
    async with (
        open_engine(waiting_for(go)) as first,
        open_engine(waiting_for(go)) as second,
        serving(first, second) as gateway,
    ):
        for number, engine in enumerate((first, second, first, second), 2):
            nursery.start_soon(gateway.ask, chat_request())
            await engine.wait_open(number // 2)
        go.set()
        await gateway.settled(4)


async def test_choices_take_as_many_slots_where_the_engine_needs_it(nursery: trio.Nursery) -> None:
    go = trio.Event()
    script = (WaitFor(go), *chat_stream("a", choices=3))
    async with (
        open_engine(script, good_answer) as engine,
        serving(engine, worker={"kind": "llamacpp", "slots": 3}) as gateway,
    ):
        nursery.start_soon(gateway.ask, chat_request(n=3))
        await engine.wait_open(1)
        waiting = await ask_in_background(gateway, nursery, chat_request())
        go.set()
        await gateway.settled(2)
        assert waiting[0].chat().text == "ok"
        refused = await gateway.ask(chat_request(n=4))
        assert (refused.status, error_code(refused), refused.error()["param"]) == (400, "invalid_value", "n")


async def test_a_tenant_is_held_to_its_own_concurrency_and_queue(nursery: trio.Nursery) -> None:
    go = trio.Event()
    tenants = [tenant("acme", "key-a", max_concurrency=1, max_queued=1), tenant("zeta", "key-z")]
    async with open_engine(waiting_for(go)) as engine, serving(engine, tenants=tenants) as gateway:
        nursery.start_soon(gateway.ask, chat_request(key="key-a"))
        await engine.wait_open(1)
        await ask_in_background(gateway, nursery, chat_request(key="key-a"))
        refused = await gateway.ask(chat_request(key="key-a"))
        assert (refused.status, error_code(refused)) == (429, "rate_limit_exceeded")
        assert int(refused.header("retry-after") or "") >= 1
        nursery.start_soon(gateway.ask, chat_request(key="key-z"))
        await engine.wait_open(2)
        assert gateway.gateway.admission.statistics().queued_by_tenant == {"acme": 1}
        go.set()
        await gateway.settled(3)
        assert engine.statistics().most_open == 2


async def test_a_tenant_whose_queue_is_full_while_workers_are_is_told_of_the_queue(
    nursery: trio.Nursery,
) -> None:
    go = trio.Event()
    tenants = [tenant("acme", "key-a", max_queued=1), tenant("zeta", "key-z")]
    async with (
        open_engine(waiting_for(go)) as engine,
        serving(engine, tenants=tenants, worker=ONE_SLOT) as gateway,
    ):
        nursery.start_soon(gateway.ask, chat_request(key="key-z"))
        await engine.wait_open(1)
        await ask_in_background(gateway, nursery, chat_request(key="key-a"))
        refused = await gateway.ask(chat_request(key="key-a"))
        assert (refused.status, error_code(refused)) == (429, "queue_full")
        await ask_in_background(gateway, nursery, chat_request(key="key-z"))
        go.set()
        await gateway.settled(3)


async def test_a_draining_lease_counts_against_the_worker_but_not_against_the_tenant(
    nursery: trio.Nursery,
) -> None:
    tenants = [tenant("acme", "key-a", max_concurrency=1)]
    script = chat_stream("one", finish=None, done=False, end=False)
    async with (
        open_engine(script, good_answer) as engine,
        open_engine() as other,
        serving(engine, other, tenants=tenants, worker={"slots": 1, "cancel_grace": 1.5}) as gateway,
    ):
        with await gateway.connect() as client:
            await client.send(chat_request(key="key-a"))
            await client.read_events(2)
            leave(client, "reset")
        await gateway.settled()
        book = gateway.gateway.fleet.books["w1"]
        assert (book.held, book.draining) == (0, 1)
        assert (await gateway.ask(chat_request(key="key-a"))).chat().text == "ok"
        assert other.statistics().requests == 1
        assert (book.held, book.draining) == (0, 1)


async def test_a_request_sent_back_keeps_its_place_in_front(nursery: trio.Nursery) -> None:
    go = trio.Event()
    busy = (WaitFor(go), *error_answer(503))
    async with (
        open_engine(busy, good_answer) as engine,
        serving(engine, worker=ONE_SLOT, retry={"backoff": 0.05}) as gateway,
    ):
        nursery.start_soon(gateway.ask, chat_request("first"))
        await engine.wait_open(1)
        second = await ask_in_background(gateway, nursery, chat_request("second"))
        go.set()
        await gateway.settled(2)
        assert second[0].chat().text == "ok"
        texts = [request.json()["messages"] for request in engine.requests]
        assert texts == [[{"role": "user", "content": text}] for text in ("first", "first", "second")]
