"""Official SDKs, unmodified, as ways to ask a gateway: each fills in what it `Heard`, or raises.

Synchronous clients run in a thread; asynchronous ones on asyncio, in a thread too. No client
keeps a connection, so that none is left when its gateway has gone.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import anthropic
import httpx2
import openai
import trio
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import SecretStr

from tests.e2e.serving import LIMIT, Serving
from tests.e2e.voices import TEXT
from trio_gateway.testing import DONE, EndChunks, Head, Script, Step, chat_chunk

T = TypeVar("T")

_TLS: Final = ssl.create_default_context()  # made once: it takes longer than many a request
_TRANSPORT: Final[dict[str, Any]] = {
    "trust_env": False,  # a proxy of the machine is not ours to ask
    "verify": _TLS,
    "timeout": LIMIT,
    "limits": httpx2.Limits(max_keepalive_connections=0),
}
PROMPT: Final = "Say hello."
MESSAGES: Final[Any] = [{"role": "user", "content": PROMPT}]


def _tool_call() -> Iterator[Step]:
    """A call as engines stream it: id and name once, the arguments in pieces."""
    yield Head()
    yield chat_chunk({"role": "assistant", "content": None})
    function: dict[str, object] = {"name": "weather", "arguments": ""}
    yield chat_chunk({"tool_calls": [{"index": 0, "id": "call_1", "type": "function", "function": function}]})
    for piece in ('{"city":', '"Rome"}'):
        yield chat_chunk({"tool_calls": [{"index": 0, "function": {"arguments": piece}}]})
    yield chat_chunk({}, finish="tool_calls")
    yield DONE
    yield EndChunks()


STREAMED_TOOL_CALL: Final[Script] = tuple(_tool_call())


@dataclass(frozen=True, slots=True)
class Door:
    """Where and as whom to ask.

    Attributes:
        url: of the gateway, without a path.
        retries: how often the SDK may try again.
        headers: sent with each request.
        tokens: most tokens to ask for.
    """

    url: str
    key: str = "key-a"
    model: str = "m1"
    retries: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    tokens: int = 8


@dataclass(slots=True)
class Heard:
    """What an SDK handed to its user before it ended or raised.

    Attributes:
        finished: it said in the API's own words that the answer is whole.
    """

    text: str = ""
    finished: bool = False
    items: list[Any] = field(default_factory=list)

    def add(self, text: str | None) -> None:
        """Take in a piece of the answer."""
        self.text += text or ""

    def finish(self, reason: object) -> None:
        """Take in what says that the answer is whole, if it is there."""
        self.finished = self.finished or bool(reason)


# Clients ----------------------------------------------------------------------------------------------------


def openai_client(door: Door) -> openai.OpenAI:
    """Make OpenAI's client as its user would."""
    return openai.OpenAI(
        base_url=f"{door.url}/v1",
        api_key=door.key,
        max_retries=door.retries,
        default_headers=door.headers,
        http_client=openai.DefaultHttpxClient(**_TRANSPORT),
    )


def async_openai_client(door: Door) -> openai.AsyncOpenAI:
    """Make OpenAI's asynchronous client as its user would."""
    return openai.AsyncOpenAI(
        base_url=f"{door.url}/v1",
        api_key=door.key,
        max_retries=door.retries,
        default_headers=door.headers,
        http_client=openai.DefaultAsyncHttpxClient(**_TRANSPORT),
    )


def anthropic_client(door: Door) -> anthropic.Anthropic:
    """Make Anthropic's client as its user would."""
    return anthropic.Anthropic(
        base_url=door.url,
        api_key=door.key,
        max_retries=door.retries,
        default_headers=door.headers,
        http_client=anthropic.DefaultHttpxClient(**_TRANSPORT),
    )


def async_anthropic_client(door: Door) -> anthropic.AsyncAnthropic:
    """Make Anthropic's asynchronous client as its user would."""
    return anthropic.AsyncAnthropic(
        base_url=door.url,
        api_key=door.key,
        max_retries=door.retries,
        default_headers=door.headers,
        http_client=anthropic.DefaultAsyncHttpxClient(**_TRANSPORT),
    )


@contextmanager
def langchain_chat(door: Door, **more: Any) -> Iterator[ChatOpenAI]:
    """Make LangChain's chat model as its user would."""
    with openai.DefaultHttpxClient(**_TRANSPORT) as http:
        yield _langchain_chat(door, http_client=http, **more)


@asynccontextmanager
async def async_langchain_chat(door: Door) -> AsyncIterator[ChatOpenAI]:
    """Make LangChain's chat model as its asynchronous user would."""
    async with openai.DefaultAsyncHttpxClient(**_TRANSPORT) as http:
        yield _langchain_chat(door, http_async_client=http)


def _langchain_chat(door: Door, **more: Any) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=f"{door.url}/v1",
        api_key=SecretStr(door.key),
        model=door.model,
        max_retries=door.retries,
        default_headers=door.headers,
        max_completion_tokens=door.tokens,
        temperature=0,
        **more,
    )


@contextmanager
def langchain_embeddings(door: Door) -> Iterator[OpenAIEmbeddings]:
    """Make LangChain's embeddings; their check of lengths would fetch a tokenizer, and OpenAI's at that."""
    with openai.DefaultHttpxClient(**_TRANSPORT) as http:
        yield OpenAIEmbeddings(
            openai_api_base=f"{door.url}/v1",
            openai_api_key=SecretStr(door.key),
            model=door.model,
            max_retries=door.retries,
            default_headers=door.headers,
            check_embedding_ctx_length=False,
            http_client=http,
        )


# Ways to ask ------------------------------------------------------------------------------------------------

Asking = Callable[[Door, Heard], None]


@dataclass(frozen=True, slots=True)
class Way:
    """One way to ask through one SDK.

    Attributes:
        name: of SDK, operation and manner.
        stream: whether the answer is streamed.
        choices: whether the answer has choices, each with a finish reason.
        unfinished: whether a buffered answer can lack the sign that it is whole.
    """

    name: str
    ask: Asking
    stream: bool = False
    choices: bool = False
    unfinished: bool = True

    @property
    def anthropic(self) -> bool:
        """Whether it speaks Anthropic's API."""
        return self.name.startswith("anthropic")


def on_asyncio(ask: Callable[[Door, Heard], Awaitable[None]]) -> Asking:
    """Make an asynchronous way synchronous."""

    def run(door: Door, heard: Heard) -> None:
        async def main() -> None:
            await ask(door, heard)

        asyncio.run(main())

    return run


def openai_chat(door: Door, heard: Heard) -> None:
    with openai_client(door) as client:
        answer = client.chat.completions.create(
            model=door.model, messages=MESSAGES, max_tokens=door.tokens, temperature=0
        )
    heard.add(answer.choices[0].message.content)
    heard.finish(answer.choices[0].finish_reason)


def openai_chat_stream(door: Door, heard: Heard) -> None:
    with openai_client(door) as client:
        for chunk in client.chat.completions.create(
            model=door.model, messages=MESSAGES, max_tokens=door.tokens, temperature=0, stream=True
        ):
            for choice in chunk.choices:
                heard.add(choice.delta.content)
                heard.finish(choice.finish_reason)


async def async_openai_chat(door: Door, heard: Heard) -> None:
    async with async_openai_client(door) as client:
        answer = await client.chat.completions.create(
            model=door.model, messages=MESSAGES, max_tokens=door.tokens, temperature=0
        )
    heard.add(answer.choices[0].message.content)
    heard.finish(answer.choices[0].finish_reason)


async def async_openai_chat_stream(door: Door, heard: Heard) -> None:
    async with async_openai_client(door) as client:
        async for chunk in await client.chat.completions.create(
            model=door.model, messages=MESSAGES, max_tokens=door.tokens, temperature=0, stream=True
        ):
            for choice in chunk.choices:
                heard.add(choice.delta.content)
                heard.finish(choice.finish_reason)


def openai_completions(door: Door, heard: Heard) -> None:
    with openai_client(door) as client:
        answer = client.completions.create(
            model=door.model, prompt=PROMPT, max_tokens=door.tokens, temperature=0
        )
    heard.add(answer.choices[0].text)
    heard.finish(answer.choices[0].finish_reason)


def openai_completions_stream(door: Door, heard: Heard) -> None:
    with openai_client(door) as client:
        for chunk in client.completions.create(
            model=door.model, prompt=PROMPT, max_tokens=door.tokens, temperature=0, stream=True
        ):
            for choice in chunk.choices:
                heard.add(choice.text)
                heard.finish(choice.finish_reason)


def openai_responses(door: Door, heard: Heard) -> None:
    with openai_client(door) as client:
        answer = client.responses.create(
            model=door.model, input=PROMPT, max_output_tokens=door.tokens, temperature=0
        )
    heard.add(answer.output_text)
    heard.finish(answer.status in ("completed", "incomplete"))


def openai_responses_stream(door: Door, heard: Heard) -> None:
    with openai_client(door) as client:
        for event in client.responses.create(
            model=door.model, input=PROMPT, max_output_tokens=door.tokens, temperature=0, stream=True
        ):
            _hear_response(event, heard)


async def async_openai_responses_stream(door: Door, heard: Heard) -> None:
    async with async_openai_client(door) as client:
        async for event in await client.responses.create(
            model=door.model, input=PROMPT, max_output_tokens=door.tokens, temperature=0, stream=True
        ):
            _hear_response(event, heard)


def _hear_response(event: Any, heard: Heard) -> None:
    heard.items.append(event)
    if event.type == "response.output_text.delta":
        heard.add(event.delta)
    heard.finish(event.type in ("response.completed", "response.incomplete"))


def openai_embeddings(door: Door, heard: Heard) -> None:
    with openai_client(door) as client:
        answer = client.embeddings.create(model=door.model, input=PROMPT, encoding_format="float")
    heard.items += answer.data[0].embedding
    heard.finish(True)


async def async_openai_embeddings(door: Door, heard: Heard) -> None:
    async with async_openai_client(door) as client:
        answer = await client.embeddings.create(model=door.model, input=PROMPT, encoding_format="float")
    heard.items += answer.data[0].embedding
    heard.finish(True)


def anthropic_messages(door: Door, heard: Heard) -> None:
    with anthropic_client(door) as client:
        answer = client.messages.create(
            model=door.model, messages=MESSAGES, max_tokens=door.tokens, extra_body={"temperature": 0}
        )
    _hear_message(answer, heard)


def anthropic_messages_stream(door: Door, heard: Heard) -> None:
    with anthropic_client(door) as client:
        for event in client.messages.create(
            model=door.model,
            messages=MESSAGES,
            max_tokens=door.tokens,
            stream=True,
            extra_body={"temperature": 0},
        ):
            _hear_message_event(event, heard)


async def async_anthropic_messages(door: Door, heard: Heard) -> None:
    async with async_anthropic_client(door) as client:
        answer = await client.messages.create(
            model=door.model, messages=MESSAGES, max_tokens=door.tokens, extra_body={"temperature": 0}
        )
    _hear_message(answer, heard)


async def async_anthropic_messages_stream(door: Door, heard: Heard) -> None:
    async with (
        async_anthropic_client(door) as client,
        client.messages.stream(
            model=door.model, messages=MESSAGES, max_tokens=door.tokens, extra_body={"temperature": 0}
        ) as stream,
    ):
        async for event in stream:
            _hear_message_event(event, heard)


def _hear_message(message: Any, heard: Heard) -> None:
    for block in message.content:
        heard.add(block.text)
    heard.finish(message.stop_reason)


def _hear_message_event(event: Any, heard: Heard) -> None:
    heard.items.append(event)
    if event.type == "content_block_delta":
        heard.add(event.delta.text)
    if event.type == "message_delta":
        heard.finish(event.delta.stop_reason)


def langchain_invoke(door: Door, heard: Heard) -> None:
    with langchain_chat(door) as model:
        _hear_langchain(model.invoke(PROMPT), heard)


def langchain_stream(door: Door, heard: Heard) -> None:
    with langchain_chat(door) as model:
        for chunk in model.stream(PROMPT):
            _hear_langchain(chunk, heard)


async def langchain_ainvoke(door: Door, heard: Heard) -> None:
    async with async_langchain_chat(door) as model:
        _hear_langchain(await model.ainvoke(PROMPT), heard)


async def langchain_astream(door: Door, heard: Heard) -> None:
    async with async_langchain_chat(door) as model:
        async for chunk in model.astream(PROMPT):
            _hear_langchain(chunk, heard)


def langchain_responses_stream(door: Door, heard: Heard) -> None:
    with langchain_chat(door, use_responses_api=True) as model:
        for chunk in model.stream(PROMPT):
            _hear_langchain(chunk, heard)


def langchain_embed(door: Door, heard: Heard) -> None:
    with langchain_embeddings(door) as model:
        heard.items += model.embed_query(PROMPT)
    heard.finish(True)


def _hear_langchain(message: Any, heard: Heard) -> None:
    heard.items.append(message)
    heard.add(message.text)
    said = message.response_metadata
    heard.finish(said.get("finish_reason") or said.get("status") in ("completed", "incomplete"))


WAYS: Final = (
    Way("openai chat", openai_chat, choices=True),
    Way("openai chat stream", openai_chat_stream, stream=True, choices=True),
    Way("openai chat, async", on_asyncio(async_openai_chat), choices=True),
    Way("openai chat stream, async", on_asyncio(async_openai_chat_stream), stream=True, choices=True),
    Way("openai completions", openai_completions, choices=True),
    Way("openai completions stream", openai_completions_stream, stream=True, choices=True),
    Way("openai responses", openai_responses),
    Way("openai responses stream", openai_responses_stream, stream=True),
    Way("openai responses stream, async", on_asyncio(async_openai_responses_stream), stream=True),
    Way("openai embeddings", openai_embeddings, unfinished=False),
    Way("openai embeddings, async", on_asyncio(async_openai_embeddings), unfinished=False),
    Way("anthropic messages", anthropic_messages),
    Way("anthropic messages stream", anthropic_messages_stream, stream=True),
    Way("anthropic messages, async", on_asyncio(async_anthropic_messages)),
    Way("anthropic messages stream, async", on_asyncio(async_anthropic_messages_stream), stream=True),
    Way("langchain invoke", langchain_invoke, choices=True),
    Way("langchain stream", langchain_stream, stream=True, choices=True),
    Way("langchain ainvoke", on_asyncio(langchain_ainvoke), choices=True),
    Way("langchain astream", on_asyncio(langchain_astream), stream=True, choices=True),
    Way("langchain responses stream", langchain_responses_stream, stream=True),
    Way("langchain embeddings", langchain_embed, unfinished=False),
)


async def in_thread(run: Callable[[], T]) -> T:
    """Run something synchronous beside the loop, within bounds."""
    with trio.fail_after(3 * LIMIT):
        return await trio.to_thread.run_sync(run, abandon_on_cancel=True)


@dataclass(slots=True)
class Told:
    """What one way was told.

    Attributes:
        error: what its SDK raised; None: nothing.
    """

    way: Way
    heard: Heard
    error: Exception | None = None

    @property
    def whole(self) -> bool:
        """Whether a scripted engine's answer came as it was said, and to its end."""
        said = self.heard.items == [0.5, 1.5] if not self.way.unfinished else self.heard.text == TEXT
        return said and self.heard.finished and self.error is None


async def ask_by(way: Way, gateway: Serving, **door: Any) -> Told:
    """Ask a gateway by one way; arguments are those of a `Door`."""
    told = Told(way, Heard())

    def run() -> None:
        try:
            way.ask(Door(gateway.gateway.addresses[0], **door), told.heard)
        except Exception as exc:
            told.error = exc

    await in_thread(run)
    return told


async def ask_by_all(gateway: Serving, ways: Sequence[Way] = WAYS, **door: Any) -> list[Told]:
    """Ask a gateway by several ways at a time, each with a model of its own, as `models_for` has them."""
    answers: list[Told] = []

    async def ask(number: int, way: Way) -> None:
        answers.append(await ask_by(way, gateway, model=f"m{number}", **door))

    async with trio.open_nursery() as nursery:
        for number, way in enumerate(ways, 1):
            nursery.start_soon(ask, number, way)
    return answers


def models_for(ways: Sequence[Way]) -> list[dict[str, object]]:
    """Configure a model for each way, so that what fails for one is no matter to the others."""
    return [{"id": f"m{number}"} for number, _ in enumerate(ways, 1)]
