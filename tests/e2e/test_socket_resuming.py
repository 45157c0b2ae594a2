"""Streams of sockets that were lost go on over others: each delta exactly once, and nobody else's."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from tests.e2e.serving import LIMIT, Serving
from tests.e2e.sockets import Closed, Message, TokenSocket, handshake, opened, text_of
from tests.e2e.test_sockets import ENDLESS, FLOOD, KIB, counting, sockets
from trio_gateway.testing import Hold, WaitFor, chat_stream

TOTAL = 10
DELTAS = TOTAL + 2  # the role and the finish are deltas too


async def resume(
    client: TokenSocket, request_id: str, after: int, name: str = "again", **members: Any
) -> None:
    await client.send("resume", stream_id=name, request_id=request_id, after_seq=after, **members)


async def begin(client: TokenSocket, **members: Any) -> str:
    """Begin a resumable stream; answers its request id."""
    await client.generate(resumable=True, **members)
    accepted = await client.read_until(lambda m: m["type"] == "accepted")
    return str(accepted["request_id"])


async def read_with_a_cut(gateway: Serving, cut: int, given: dict[str, Any]) -> None:
    """Read a stream over two sockets, the first of which is lost behind so many deltas."""
    seen: list[Message] = []
    async with opened(gateway) as client:
        request_id = await begin(client, **given)
        while len(seen) < min(cut, DELTAS):
            message = await client.read()
            seen.append(message)
            if message["seq"] % 2:  # every second is acknowledged
                await client.ack(message["seq"], **given)
            elif given:
                await client.ack(message["seq"] - 1, credit=given["credit"] + 1)
        if cut > DELTAS:  # behind the end
            assert (await client.read_last())["type"] == "done"
        client.reset()
    async with opened(gateway) as client:
        await resume(client, request_id, len(seen), **given)
        accepted = await client.read()
        assert (accepted["type"], accepted["stream_id"]) == ("accepted", "again")
        assert accepted["request_id"] == request_id
        while (message := await client.read())["type"] == "delta":
            seen.append(message)
            await client.ack(message["seq"], "again", **given)
        assert message["type"] == "done"
        assert message["delivery"]["generated"] == message["delivery"]["delivered"] == TOTAL
    assert [delta["seq"] for delta in seen] == list(range(1, DELTAS + 1))
    assert text_of(seen) == "".join(f"{number} " for number in range(TOTAL))


@pytest.mark.parametrize("credit", [None, 1, 4, 1000])
async def test_wherever_a_stream_is_cut_each_delta_comes_once(credit: int | None) -> None:
    given: dict[str, Any] = {} if credit is None else {"credit": credit}
    async with sockets(counting(TOTAL), delivery={"resume_window": 2}) as (gateway, _):
        for cut in range(DELTAS + 2):
            await read_with_a_cut(gateway, cut, given)
            record = await gateway.settled(cut + 1)
            assert (record.outcome, record.tokens_delivered) == ("completed", TOTAL)


async def test_a_stream_goes_on_while_nobody_is_there_and_waits_when_its_buffer_is_full() -> None:
    limits = {"buffer_bytes": 64 * KIB, "resume_window": 1}
    async with sockets(FLOOD, delivery=limits, send_buffer=16 * KIB) as (gateway, engine):
        async with opened(gateway) as client:
            request_id = await begin(client, credit=1)
            await client.read_delta(1)
            client.reset()
        request = await engine.request()
        with trio.fail_after(LIMIT):
            await request.stalled.wait()
        assert 8 * KIB < gateway.gateway.buffers.used < 64 * KIB + 2 * 4200
        async with opened(gateway) as client:
            await resume(client, request_id, 1, credit=5)
            await client.read_delta(6, "again")
            await client.ack(6, "again")
            await client.read_delta(11, "again")
            assert [delta["seq"] for delta in client.deltas("again")] == list(range(2, 12))
            await client.send("cancel", stream_id="again")
            assert (await client.read_last("again"))["type"] == "cancelled"


async def test_without_acknowledgements_no_more_is_sent_than_is_kept() -> None:
    limits = {"buffer_bytes": 64 * KIB, "stall_timeout": 0.5}
    async with sockets(FLOOD, delivery=limits) as (gateway, _), opened(gateway) as client:
        await begin(client)
        last = await client.read_last()
        assert last["error"]["code"] == "client_stalled"
        assert 32 * KIB <= client.deltas()[-1]["bytes"] <= 32 * KIB + 4200
        assert (await gateway.settled()).outcome == "client_stalled"


async def test_nobody_comes_back_behind_what_was_acknowledged_or_before_it_was_sent() -> None:
    async with sockets(ENDLESS) as (gateway, _), opened(gateway) as client, opened(gateway) as other:
        request_id = await begin(client)
        await client.read_delta(2)
        await client.ack(2)
        for after, param in ((1, "after_seq"), (3, "after_seq")):
            await resume(other, request_id, after)
            refused = await other.read_last("again")
            assert refused["error"]["param"] == param
        assert [m["error"]["code"] for m in other.messages] == ["request_not_found", "invalid_value"]


async def test_another_s_stream_is_never_resumed_and_those_that_are_not_resumable_neither() -> None:
    async with sockets(ENDLESS) as (gateway, _), opened(gateway) as client:
        request_id = await begin(client)
        await client.generate("plain")
        accepted = await client.read_until(lambda m: m["type"] == "accepted")
        async with opened(gateway, handshake(key="key-b")) as thief:
            await resume(thief, request_id, 0)
            assert (await thief.read_last("again"))["error"]["code"] == "request_not_found"
        async with opened(gateway) as owner:
            await resume(owner, accepted["request_id"], 0)
            assert (await owner.read_last("again"))["error"]["code"] == "request_not_found"
            await resume(owner, "0" * 32, 0)
            assert (await owner.read_last("again"))["error"]["code"] == "request_not_found"
        await client.read_until(lambda m: m.get("seq") == 2)  # nothing was taken from it


async def test_a_stream_can_be_taken_over_while_its_first_socket_is_there() -> None:
    go = trio.Event()
    script = (
        *chat_stream("one", "two", finish=None, done=False, end=False),
        WaitFor(go),
        *chat_stream("3")[2:],
    )
    async with sockets(script) as (gateway, _), opened(gateway) as old, opened(gateway) as new:
        request_id = await begin(old)
        await old.read_delta(3)
        await resume(new, request_id, 1, "s1")
        await new.read_delta(3)
        await old.ack(1000)  # it is not there any more
        await old.send("cancel", stream_id="s1")
        await old.generate("s1")  # nor is its name in use
        await old.read_delta(1)
        go.set()
        assert (await new.read_last())["type"] == "done"
        assert new.text() == "onetwo3"
        assert (await old.read_last())["type"] == "done"
        assert await old.say_goodbye() == Closed(1000)


async def test_a_stream_can_be_gone_on_with_under_another_name_on_its_own_socket() -> None:
    async with sockets(ENDLESS) as (gateway, _), opened(gateway) as client:
        request_id = await begin(client)
        await client.read_delta(2)
        await resume(client, request_id, 0, "other")
        await client.read_delta(2, "other")
        await client.ack(7)  # of a name that nobody has
        assert gateway.gateway.sockets.streams == 1
        await client.send("cancel", stream_id="other")
        assert (await client.read_last("other"))["type"] == "cancelled"


async def test_a_resume_under_a_name_in_use_is_refused_and_takes_nothing_away() -> None:
    async with sockets(ENDLESS, worker={"slots": 2}) as (gateway, _), opened(gateway) as client:
        request_id = await begin(client)
        await client.read_delta(2)
        async with opened(gateway) as other:
            await other.generate("again")
            await other.read_delta(2, "again")
            await resume(other, request_id, 0)
            refused = await other.read_until(lambda m: m["type"] == "error")
            assert refused["error"]["param"] == "stream_id"
        await client.send("cancel", stream_id="s1")
        assert (await client.read_last())["type"] == "cancelled"


async def test_whoever_does_not_come_back_in_time_has_gone() -> None:
    async with sockets(ENDLESS) as (gateway, engine):
        async with opened(gateway) as client:
            request_id = await begin(client)
            await client.read_delta(2)
            client.reset()
        await gateway.until(lambda: len(gateway.gateway.sockets) == 0)
        assert not gateway.records
        record = await gateway.settled()
        assert (record.outcome, record.tokens_delivered) == ("client_gone", 1)
        await engine.wait_idle()
        async with opened(gateway) as client:
            await resume(client, request_id, 2)
            assert (await client.read_last("again"))["error"]["code"] == "request_not_found"


async def test_a_stream_that_waits_can_be_resumed_and_says_where_it_stands() -> None:
    go = trio.Event()
    held = (*chat_stream("x", finish=None, done=False, end=False), WaitFor(go), *chat_stream("y")[2:])
    async with (
        sockets(held, counting(TOTAL), worker={"slots": 1}, delivery={"resume_window": 2}) as (gateway, _),
        opened(gateway) as first,
    ):
        await first.generate()
        await first.read_delta(2)
        async with opened(gateway) as client:
            await client.generate("waits", resumable=True)
            queued = await client.read_until(lambda m: m["type"] == "queued")
            client.reset()
        async with opened(gateway) as client:
            await resume(client, queued["request_id"], 0)
            again = await client.read()
            assert (again["type"], again["position"]) == ("queued", 1)
            go.set()
            assert (await client.read_last("again"))["type"] == "done"
            assert client.types("again") == ["queued", "accepted", *["delta"] * DELTAS, "done"]


async def test_how_an_accepted_request_was_refused_can_be_read_again() -> None:
    limits: dict[str, Any] = {"worker": {"slots": 1}, "admission": {"max_wait": 0.2}}
    held = (*chat_stream("x", finish=None, done=False, end=False), Hold())
    async with sockets(held, delivery={"resume_window": 2}, **limits) as (gateway, _):
        async with opened(gateway) as client:
            await client.generate()
            await client.read_delta(2)
            await client.generate("waits", resumable=True)
            refused = await client.read_last("waits")
            assert refused["error"]["code"] == "queue_timeout"
            gateway.gateway.sockets.sweep()
            client.reset()
        async with opened(gateway) as client:
            await resume(client, refused["request_id"], 0)
            assert (await client.read_last("again"))["error"] == refused["error"]


async def test_of_requests_that_were_turned_away_nothing_is_kept() -> None:
    async with sockets(delivery={"resume_window": 600}) as (gateway, _), opened(gateway) as client:
        for number in range(20):
            await client.generate(f"s{number}", model="m9", resumable=True)
            assert (await client.read_last(f"s{number}"))["error"]["code"] == "model_not_found"
        gateway.gateway.sockets.sweep()
        assert gateway.gateway.kept_answers == gateway.gateway.kept_bytes == 0


async def test_when_memory_is_short_streams_go_on_and_can_not_be_resumed() -> None:
    limits = {"buffer_bytes": 64 * KIB, "total_buffer_bytes": 64 * KIB}
    sizes = {"answer_bytes": 60 * KIB, "event_bytes": 16 * KIB}
    async with (
        sockets(chat_stream(*["x" * 4000] * 20), delivery=limits, limits=sizes) as (gateway, _),
        opened(gateway) as client,
        opened(gateway) as other,
    ):
        for name in ("a", "b", "c", "d"):
            await client.generate(name, resumable=True)
        over = 0
        while over < 4:
            message = await client.read()
            over += message["type"] == "done"
            if message["type"] == "delta" and message["seq"] % 6 == 0:
                await client.ack(message["seq"], message["stream_id"])
        assert all(len(client.text(name)) == 80_000 for name in ("a", "b", "c", "d"))
        assert gateway.gateway.buffers.used <= 64 * KIB + 4200
        await resume(other, message["request_id"], 0)
        assert (await other.read_last("again"))["error"]["code"] == "request_not_found"


async def test_a_cancel_whose_message_was_lost_ends_the_stream_all_the_same() -> None:
    script = (*chat_stream("x", finish=None, done=False, end=False), Hold())
    async with sockets(script) as (gateway, engine):
        async with opened(gateway) as client:
            request_id = await begin(client)
            await client.read_delta(2)
            client.reset()
        path = f"/v1/requests/{request_id}"
        await gateway.fetch("DELETE", path, headers=(("authorization", "Bearer key-a"),))
        assert (await gateway.settled()).outcome == "client_cancelled"
        await engine.wait_idle()
