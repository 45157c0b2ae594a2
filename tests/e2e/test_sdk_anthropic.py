"""The real Anthropic SDK understands our answers, whole and streamed, with all that they can hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import anthropic
import pytest
import trio

from tests.e2e.sdks import MESSAGES, Door, anthropic_client, in_thread
from tests.e2e.serving import LIMIT, Serving, serving, tenant
from tests.e2e.voices import TEXT, refuse, speak, voice_of
from trio_gateway.testing import EndChunks, EngineRequest, Event, Head, Hold, Script, WaitFor, open_engine

T = TypeVar("T")
ASKED: Final[dict[str, Any]] = {"model": "m1", "messages": MESSAGES, "max_tokens": 8}
TOOL: Final[Any] = {"name": "weather", "input_schema": {"type": "object"}}


async def with_sdk(gateway: Serving, use: Callable[[anthropic.Anthropic], T], **door: Any) -> T:
    """Use the SDK's synchronous client in a thread."""

    def run() -> T:
        with anthropic_client(Door(gateway.gateway.addresses[0], **door)) as client:
            return use(client)

    return await in_thread(run)


async def test_its_key_is_taken_from_its_own_header() -> None:
    async with (
        open_engine(speak) as engine,
        serving(engine, tenants=[tenant("acme", "key-a")]) as gateway,
    ):
        answer = await with_sdk(gateway, lambda client: client.messages.create(**ASKED))
        assert answer.content[0].text == TEXT
        assert (await gateway.settled()).tenant == "acme"
        assert engine.requests[0].header("x-api-key") is None


async def test_every_answer_tells_its_request_id() -> None:
    async with open_engine(speak, refuse(400)) as engine, serving(engine) as gateway:
        answer = await with_sdk(gateway, lambda client: client.messages.create(**ASKED))
        assert answer._request_id == (await gateway.settled()).exchange_id
        with pytest.raises(anthropic.BadRequestError) as caught:
            await with_sdk(gateway, lambda client: client.messages.create(**ASKED))
        assert caught.value.request_id == (await gateway.settled(2)).exchange_id


async def test_a_stream_arrives_piece_by_piece_with_its_usage() -> None:
    def use(client: anthropic.Anthropic) -> tuple[list[str], Any]:
        with client.messages.stream(**ASKED) as stream:
            return list(stream.text_stream), stream.get_final_message()

    async with open_engine(speak) as engine, serving(engine) as gateway:
        pieces, message = await with_sdk(gateway, use)
        assert pieces == ["one", "two"]
        assert (message.content[0].text, message.stop_reason) == (TEXT, "end_turn")
        assert (message.usage.input_tokens, message.usage.output_tokens) == (3, 2)
        record = await gateway.settled()
        assert (record.tokens_prompt, record.tokens_generated) == (3, 2)


async def test_a_message_that_its_engine_does_not_begin_is_read_all_the_same() -> None:
    """llama.cpp leaves the beginning out where the first token is half a character."""

    def script(request: EngineRequest) -> Script:
        voice = voice_of(request)
        return (Head(), *voice.quiet[1:], *voice.words, *voice.last, EndChunks())

    def use(client: anthropic.Anthropic) -> Any:
        with client.messages.stream(**ASKED) as stream:
            return stream.get_final_message()

    async with open_engine(script) as engine, serving(engine) as gateway:
        message = await with_sdk(gateway, use)
        assert (message.content[0].text, message.stop_reason, message.model) == (TEXT, "end_turn", "m1")
        assert message.usage.output_tokens == 2
        record = await gateway.settled()
        assert message.id.startswith(f"msg_{record.exchange_id}")
        assert (record.outcome, record.tokens_generated) == ("completed", 2)


async def test_a_message_of_half_a_character_is_read_as_one_without_text() -> None:
    """llama.cpp then ends a message, and a block in it, of which it has begun neither."""

    def script(request: EngineRequest) -> Script:
        return (Head(), *voice_of(request).last, EndChunks())

    def use(client: anthropic.Anthropic) -> Any:
        with client.messages.stream(**ASKED) as stream:
            return stream.get_final_message()

    async with open_engine(script) as engine, serving(engine) as gateway:
        message = await with_sdk(gateway, use)
        assert (message.content, message.stop_reason, message.usage.output_tokens) == ([], "end_turn", 2)
        assert (await gateway.settled()).outcome == "completed"


async def test_heartbeats_do_not_disturb_it() -> None:
    go = trio.Event()

    def script(request: EngineRequest) -> Script:
        return (WaitFor(go), *voice_of(request).good)

    def use(client: anthropic.Anthropic) -> str:
        with client.messages.stream(**ASKED) as stream:
            return stream.get_final_text()

    async with (
        open_engine(script) as engine,
        serving(engine, stream={"heartbeat_after": 0.02}) as gateway,
        trio.open_nursery() as nursery,
    ):

        async def read() -> None:
            assert await with_sdk(gateway, use) == TEXT

        nursery.start_soon(read)
        await gateway.until(lambda: any(exchange.tally.headers for exchange in gateway.gateway.live))
        go.set()


async def test_a_tool_use_is_put_together_from_its_pieces() -> None:
    def script(request: EngineRequest) -> Script:
        voice = voice_of(request)
        use = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {}}
        begin = {"type": "content_block_start", "index": 0, "content_block": use}
        pieces = [{"type": "input_json_delta", "partial_json": piece} for piece in ('{"city":', '"Rome"}')]
        deltas = [{"type": "content_block_delta", "index": 0, "delta": piece} for piece in pieces]
        return (
            Head(),
            voice.quiet[0],
            *(Event(event, str(event["type"])) for event in (begin, *deltas)),
            *voice.last,
            EndChunks(),
        )

    def use(client: anthropic.Anthropic) -> Any:
        with client.messages.stream(**ASKED, tools=[TOOL]) as stream:
            return stream.get_final_message()

    async with open_engine(script) as engine, serving(engine) as gateway:
        (block,) = (await with_sdk(gateway, use)).content
        assert (block.type, block.name, block.input) == ("tool_use", "weather", {"city": "Rome"})
        assert engine.requests[0].json()["tools"] == [TOOL]


async def test_tokens_are_counted() -> None:
    async with open_engine(speak) as engine, serving(engine) as gateway:
        counted = await with_sdk(
            gateway, lambda client: client.messages.count_tokens(model="m1", messages=MESSAGES)
        )
        assert counted.input_tokens == 3


async def test_a_broken_stream_has_no_final_message() -> None:
    def script(request: EngineRequest) -> Script:
        return (*voice_of(request).begun, EndChunks())

    def use(client: anthropic.Anthropic) -> Any:
        with client.messages.stream(**ASKED) as stream:
            return stream.get_final_message()

    async with open_engine(script) as engine, serving(engine) as gateway:
        with pytest.raises(anthropic.APIStatusError) as caught:
            await with_sdk(gateway, use)
        body = caught.value.body
        assert isinstance(body, dict)
        assert (body["type"], body["error"]["type"]) == ("error", "api_error")


async def test_leaving_the_block_of_a_stream_frees_the_engine() -> None:
    def script(request: EngineRequest) -> Script:
        return (*voice_of(request).begun, Hold())

    def use(client: anthropic.Anthropic) -> str:
        with client.messages.stream(**ASKED) as stream:
            return next(iter(stream.text_stream))

    async with open_engine(script) as engine, serving(engine) as gateway:
        assert await with_sdk(gateway, use) == "one"
        assert (await gateway.settled()).outcome == "client_gone"
        with trio.fail_after(LIMIT):
            await engine.wait_idle()
