"""``/v1/tokens`` from outside: handshakes, keys, messages, how streams end, and how sockets do."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

from tests.e2e.serving import Serving, serving, tenant
from tests.e2e.sockets import Closed, opened
from trio_gateway.testing import ScriptedEngine, Scripting, chat_stream, open_engine

TENANTS: Final = [tenant("a", "key-a"), tenant("b", "key-b")]


@asynccontextmanager
async def sockets(*scripts: Scripting, **sections: Any) -> AsyncIterator[tuple[Serving, ScriptedEngine]]:
    """A gateway with two tenants before one engine."""
    delivery = {"resume_window": 0.2, **sections.pop("delivery", {})}
    async with open_engine(*scripts) as engine:
        async with serving(engine, tenants=TENANTS, delivery=delivery, **sections) as gateway:
            yield gateway, engine


async def test_a_stream_comes_as_numbered_deltas_and_ends_with_its_counts() -> None:
    async with sockets(chat_stream("one", "two", "three", usage=(3, 7))) as (gateway, _):
        async with opened(gateway) as client:
            await client.generate(credit=100)
            last = await client.read_last()
            assert client.types() == ["accepted", *["delta"] * 5, "done"]
            assert client.text() == "onetwothree"
            assert [delta["seq"] for delta in client.deltas()] == [1, 2, 3, 4, 5]
            assert last["finish_reasons"] == ["stop"]
            assert last["usage"] == {"prompt_tokens": 3, "completion_tokens": 7, "total_tokens": 10}
            assert last["delivery"] == {"generated": 7, "delivered": 7, "acknowledged": None}
            await client.ack(5)
            assert await client.say_goodbye() == Closed(1000)
        record = await gateway.settled()
        assert record.exchange_id == last["request_id"]
        assert (record.outcome, record.tokens_generated, record.tokens_delivered) == ("completed", 7, 7)
