"""Deltas that are joined, on other ways to a client: sockets with credit, and streams that are resumed."""

from __future__ import annotations

import json
from typing import Any, Final

import trio

from tests.e2e.serving import serving, tenant
from tests.e2e.sockets import opened
from trio_gateway.testing import chat_request, chat_stream, open_engine

KIB: Final = 1024
WORDS: Final = [f"[{number}]" for number in range(3000)]
TEXT: Final = "".join(WORDS)
RESUMABLE: Final = (("x-gateway-resumable", "1"),)


def text_of(blocks: list[bytes]) -> str:
    chunks = [json.loads(block.removeprefix(b"data: ")) for block in blocks]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


def joining(**delivery: Any) -> dict[str, Any]:
    return {"merge_deltas": True, "resume_window": 0.2, "buffer_bytes": 512 * KIB, **delivery}


async def test_each_delta_on_a_socket_tells_the_tokens_of_all_events_that_it_stands_for() -> None:
    script = chat_stream(*WORDS, usage=(3, 3000))
    tenants = [tenant("a", "key-a")]
    async with (
        open_engine(script) as engine,
        serving(engine, tenants=tenants, delivery=joining()) as gateway,
    ):
        async with opened(gateway) as client:
            await client.generate(credit=2)
            await client.read_delta(2)
            await gateway.until(lambda: gateway.held == 0)  # all of it is here, most of it joined
            await client.ack(2)
            while (message := await client.read())["type"] != "done":
                if message["type"] == "delta":
                    await client.ack(message["seq"])
            assert client.text() == TEXT
            deltas = client.deltas()
            assert len(deltas) < 500
            words = 0
            for delta in deltas:
                words += sum(
                    choice["delta"].get("content", "").count("[") for choice in delta["chunk"]["choices"]
                )
                assert delta["tokens"] == words
            assert message["delivery"]["generated"] == message["delivery"]["delivered"] == 3000
            await client.ack(deltas[-1]["seq"])
        record = await gateway.settled()
        assert (record.tokens_delivered, record.tokens_acknowledged) == (3000, 3000)


async def test_a_joined_event_is_one_event_for_who_goes_on_behind_it() -> None:
    """Numbers count the events that a client got; tokens count what the engine said."""
    async with (
        open_engine(chat_stream(*WORDS)) as engine,
        serving(engine, delivery=joining(resume_window=20.0)) as gateway,
    ):
        with trio.fail_after(20), await gateway.connect(receive_buffer=4 * KIB) as client:
            await client.send(chat_request(headers=RESUMABLE))
            head = await client.read_head()
            await gateway.until(lambda: gateway.held == 0)  # all of it is here, most of it joined
            await client.read_events(50)
            begun = head.body.rpartition(b"\n\n")[0].split(b"\n\n")
            client.leave_reset()
        name = head.header("x-request-id")
        rest = await gateway.get(f"/v1/requests/{name}/events?after={len(begun)}")
        assert rest.ended == "complete"
        blocks = [*begun, *rest.body.split(b"\n\n")[:-1]]
        assert len(blocks) < 1500
        assert (text_of(blocks[:-1]), blocks[-1]) == (TEXT, b"data: [DONE]")
        record = await gateway.settled()
        assert (record.outcome, record.tokens_delivered) == ("completed", 3000)
        gateway.gateway.generator.kept.window = 0.0
        gateway.gateway.generator.kept.sweep()
