"""The real OpenAI SDK over its WebSocket, unmodified: scripted, simulated and real engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import openai
import pytest
import trio

from tests.e2e.sdks import Door, async_openai_client, in_thread, openai_client
from tests.e2e.serving import LIMIT, Serving, serving, tenant
from tests.e2e.test_fleet_agents import house
from tests.e2e.voices import TEXT, speak, voice_of
from trio_gateway.agent.engines import SimulatedEngine, SimulatedServer, Speed
from trio_gateway.testing import CloseFin, EngineRequest, LocalEngine, Script, missing_parts, open_engine

T = TypeVar("T")
TERMINAL: Final = ("response.completed", "response.incomplete", "error")
NO_PROXY: Final[Any] = {"proxy": None}  # one of the machine is not ours to ask
KINDS: Final = ("vllm", "sglang", "llamacpp", "openai", "agent")
TOOL: Final[Any] = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False}


async def with_socket(gateway: Serving, use: Callable[[Any], T], **door: Any) -> T:
    """Use the SDK's connection in a thread."""

    def run() -> T:
        with (
            openai_client(Door(gateway.gateway.addresses[0], **door)) as client,
            client.responses.connect(websocket_connection_options=NO_PROXY) as connection,
        ):
            return use(connection)

    return await in_thread(run)


def answer(connection: Any, model: str = "m1", count: int = 1, **fields: Any) -> list[Any]:
    """Ask once, and read until so many responses have ended."""
    connection.response.create(model=model, **{"input": "Say hello.", **fields})
    return read(connection, count)


def read(connection: Any, count: int = 1) -> list[Any]:
    """Read until so many responses have ended."""
    events: list[Any] = []
    while sum(event.type in TERMINAL for event in events) < count:
        events.append(connection.recv())
    return events


def text_of(events: list[Any]) -> str:
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")


def output_of(events: list[Any]) -> str:
    """The text of the whole response, in its last event."""
    parts = [part for item in events[-1].response.output for part in item.content or ()]
    return "".join(part.text for part in parts if part.type == "output_text")


# A scripted engine ------------------------------------------------------------------------------------------


async def test_turns_of_one_connection_follow_each_other() -> None:
    async with (
        open_engine(speak) as engine,
        serving(engine, tenants=[tenant("acme", "key-a")]) as gateway,
    ):
        turns = await with_socket(gateway, lambda connection: [answer(connection) for _ in range(3)])
        for events in turns:
            assert text_of(events) == output_of(events) == TEXT
            assert [event.sequence_number for event in events] == list(range(len(events)))
        await gateway.settled(3)
        assert [record.outcome for record in gateway.records] == ["completed"] * 3


async def test_lanes_are_told_apart() -> None:
    def use(connection: Any) -> list[Any]:
        for lane in ("a", "b", "a"):
            connection.response.create(model="m1", input="hi", stream_id=lane)
        return read(connection, 3)

    async with open_engine(speak) as engine, serving(engine) as gateway:
        events = await with_socket(gateway, use)
        texts = {lane: text_of([event for event in events if event.stream_id == lane]) for lane in "ab"}
        assert texts == {"a": 2 * TEXT, "b": TEXT}


async def test_an_error_is_an_event_with_a_code_and_the_connection_goes_on() -> None:
    def play(request: EngineRequest) -> Script:
        voice = voice_of(request)
        return (*voice.begun, CloseFin()) if request.json()["input"] == "cut" else voice.good

    def use(connection: Any) -> list[list[Any]]:
        return [
            answer(connection, model="other", stream_id="a"),
            answer(connection, input="cut"),
            answer(connection),
        ]

    async with open_engine(play) as engine, serving(engine) as gateway:
        refused, cut, good = await with_socket(gateway, use)
        (error,) = refused
        assert isinstance(error, openai.types.responses.responses_server_event.ResponseWsError)
        assert (error.status, error.error.code, error.error.param) == (404, "model_not_found", "model")
        assert error.stream_id == "a"
        assert error.error.headers is not None
        assert len(error.error.headers["x-request-id"]) == 32
        assert (text_of(cut), cut[-1].error.code, cut[-1].status) == (TEXT, "engine_failed", 502)
        assert (text_of(good), good[-1].type) == (TEXT, "response.completed")


async def test_dispatched_events_reach_handlers_and_an_error_raises() -> None:
    def use(connection: Any) -> tuple[str, str]:
        said: list[str] = []
        connection.on("response.output_text.delta", lambda event: said.append(event.delta))
        connection.on("response.completed", lambda _: connection.response.create(model="other", input="hi"))
        connection.response.create(model="m1", input="hi")
        with pytest.raises(openai.OpenAIError) as caught:
            connection.dispatch_events()
        return "".join(said), str(caught.value)

    async with open_engine(speak) as engine, serving(engine) as gateway:
        said, error = await with_socket(gateway, use)
        assert said == TEXT
        assert "model_not_found" in error


async def test_the_asynchronous_client_works_alike() -> None:
    async def main(door: Door) -> list[Any]:
        async with (
            async_openai_client(door) as client,
            client.responses.connect(websocket_connection_options=NO_PROXY) as connection,
        ):
            await connection.response.create(model="m1", input="hi", stream_id="a")
            events: list[Any] = []
            async for event in connection:
                events.append(event)
                if event.type in TERMINAL:
                    break
            return events

    async with open_engine(speak) as engine, serving(engine) as gateway:
        door = Door(gateway.gateway.addresses[0])
        events = await in_thread(lambda: asyncio.run(main(door)))
        assert text_of(events) == output_of(events) == TEXT


async def test_it_connects_anew_when_a_gateway_went_away() -> None:
    def use(door: Door) -> tuple[int, str]:
        codes: list[int] = []

        def again(event: Any) -> Any:
            codes.append(event.close_code)
            return {"abort": True}

        with (
            openai_client(door) as client,
            client.responses.connect(
                websocket_connection_options=NO_PROXY, on_reconnecting=again, initial_delay=0.01
            ) as connection,
        ):
            said = text_of(answer(connection))
            trio.from_thread.run_sync(told.set)
            assert list(connection) == []  # closed in order: nothing is lost
        return codes[0], said

    told = trio.Event()
    async with (
        open_engine(speak) as engine,
        serving(engine, shutdown={"readiness_delay": 0, "grace": 5}) as gateway,
        trio.open_nursery() as nursery,
    ):

        async def shut_down() -> None:
            await told.wait()
            await gateway.gateway.shut_down(trio.Event())

        nursery.start_soon(shut_down)
        assert await in_thread(lambda: use(Door(gateway.gateway.addresses[0]))) == (1001, TEXT)


# The simulated engine ---------------------------------------------------------------------------------------


@asynccontextmanager
async def simulated(kind: str) -> AsyncIterator[str]:
    """Serve a simulated engine over HTTP; answers its address."""
    engine = SimulatedEngine(("m1",), speed=Speed().times(20))
    async with trio.open_nursery() as nursery:
        await nursery.start(engine.run)
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        server = SimulatedServer(engine, kind)
        nursery.start_soon(server.serve, [listener])  # noqa: ASYNC113 - it listens already
        yield f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def before_simulated(kind: str, folder: Path) -> AsyncIterator[Serving]:
    """Run a gateway before a simulated engine that speaks like others, or stands behind an agent."""
    if kind == "agent":
        engine = SimulatedEngine(("m1",), speed=Speed().times(20))
        async with house(folder, engine) as at:
            yield at.gateway
    else:
        async with simulated(kind) as url, serving(url, worker={"kind": kind}) as gateway:
            yield gateway


@pytest.mark.parametrize("kind", KINDS)
async def test_the_simulated_engine_answers(kind: str, tmp_path: Path) -> None:
    def use(connection: Any) -> list[list[Any]]:
        return [
            answer(connection, metadata={"simulate": "tokens=20"}),
            answer(connection, metadata={"simulate": "tokens=20 reasoning=5"}),
            answer(connection, max_output_tokens=3),
            answer(connection, tools=[TOOL], tool_choice="required"),
            answer(connection, previous_response_id="resp_0"),
            answer(connection, metadata={"simulate": "tokens=20; die after=5"}),
        ]

    async with before_simulated(kind, tmp_path) as gateway:
        plain, thinking, short, called, unknown, died = await with_socket(gateway, use)
        assert plain[-1].type == thinking[-1].type == "response.completed"
        assert text_of(plain) == output_of(plain) != ""
        assert text_of(thinking) == output_of(thinking) != ""
        assert plain[-1].response.usage.output_tokens == 20
        thought = [event for event in thinking if event.type == "response.reasoning_text.delta"]
        assert (len(thought), thinking[-1].response.usage.output_tokens_details.reasoning_tokens) == (5, 5)
        assert short[-1].type == "response.incomplete"
        assert short[-1].response.incomplete_details.reason == "max_output_tokens"
        (call,) = called[-1].response.output
        assert (call.type, call.name) == ("function_call", "weather")
        pieces = [event.delta for event in called if event.type == "response.function_call_arguments.delta"]
        assert "".join(pieces) == call.arguments
        assert (unknown[-1].status, unknown[-1].error.message) == (
            404,
            "Response with id 'resp_0' not found.",
        )
        assert (died[-1].type, died[-1].status) == ("error", 502)
        for events in (plain, thinking, short, called):
            assert [event.sequence_number for event in events] == list(range(len(events)))
        await gateway.settled(6)
        outcomes = [record.outcome for record in gateway.records]
        assert outcomes == [*4 * ["completed"], "refused", "upstream_failed"]
        generated = [record.tokens_generated for record in gateway.records]
        assert generated[:3] == [20, 20, 3]


# The real one -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def local() -> Iterator[LocalEngine]:
    with LocalEngine(slots=2, context=512) as engine:
        yield engine


@pytest.mark.engine
@pytest.mark.skipif(missing_parts() is not None, reason=str(missing_parts()))
async def test_a_real_model_answers_in_two_lanes(local: LocalEngine) -> None:
    def use(connection: Any) -> list[Any]:
        for lane in ("a", "b", "a"):
            connection.response.create(
                model="tiny", input="Say hello.", stream_id=lane, max_output_tokens=16, temperature=0
            )
        return read(connection, 3)

    worker = {"kind": "llamacpp", "slots": 2, "cancel_grace": 0.1}
    models = [{"id": "tiny", "upstream": local.model}]
    async with serving(local.url, worker=worker, models=models) as gateway:
        with trio.fail_after(3 * LIMIT):
            events = await with_socket(gateway, use)
        first, second = ([event for event in events if event.stream_id == lane] for lane in "ab")
        assert text_of(second) != ""
        assert text_of(first) == 2 * text_of(second)
        ends = [event for event in events if event.type in TERMINAL]
        assert {event.type for event in ends} <= {"response.completed", "response.incomplete"}
        assert {event.response.model for event in ends} == {"tiny"}
        await gateway.settled(3)
        assert [record.outcome for record in gateway.records] == ["completed"] * 3
        assert all(record.tokens_generated for record in gateway.records)


@pytest.mark.engine
@pytest.mark.skipif(missing_parts() is not None, reason=str(missing_parts()))
async def test_a_real_models_refusals_come_in_its_own_words(local: LocalEngine) -> None:
    worker = {"kind": "llamacpp", "slots": 2, "cancel_grace": 0.1}
    models = [{"id": "tiny", "upstream": local.model}]
    async with serving(local.url, worker=worker, models=models) as gateway:
        too_long, fine = await with_socket(
            gateway,
            lambda connection: [
                answer(connection, model="tiny", input="word " * 1000),
                answer(connection, model="tiny", max_output_tokens=4),
            ],
        )
        assert (too_long[-1].status, too_long[-1].error.code) == (400, "context_length_exceeded")
        assert "context size" in too_long[-1].error.message
        assert fine[-1].type in ("response.completed", "response.incomplete")
