"""Gateways and agents together: in one process, over real sockets, before simulated engines.

What an agent says and what a gateway makes of it are tested apart from each other; here
they have to agree, above all on whose slots are free.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import trio

from tests.admin.test_workers import TOKEN, joinable
from tests.agent.rig import SECRET, Running, running
from tests.e2e.serving import Serving, error_code, serving
from trio_gateway.agent.engines import Limits, SimulatedEngine, Speed
from trio_gateway.fleet import WorkerBook
from trio_gateway.testing import Answer, chat_request, refusing_port

KIB: Final = 1024
FAST: Final = Speed(decode=2000.0)
SLOW: Final = Speed(decode=50.0)
LONG: Final[dict[str, Any]] = {"max_tokens": 4000, "simulate": {"tokens": 4000}}


def engine(slots: int = 2, speed: Speed = FAST, **settings: Any) -> SimulatedEngine:
    return SimulatedEngine(("m1",), limits=Limits(slots=slots), speed=speed, **settings)


def faulty(*faults: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"simulate": {"faults": list(faults)}, **fields}


class House:
    """A gateway, and the agents that registered with it."""

    def __init__(self, gateway: Serving, agents: list[Running]) -> None:
        self.gateway = gateway
        self.agents = agents

    def book(self, number: int = 0) -> WorkerBook:
        return self.gateway.gateway.fleet.books[f"gpu-{number}"]

    async def ask(self, **changes: Any) -> Answer:
        return await self.gateway.ask(chat_request(**changes))

    async def until(self, holds: Callable[[], bool]) -> None:
        await self.gateway.until(holds)

    @property
    def idle(self) -> dict[str, int]:
        """How often an engine was seen, or believed, to be idle after a cancel."""
        times = self.gateway.gateway.idle_times
        return {name: times[name] for name in ("confirmed", "assumed") if times[name]}


def registering(number: int, *gateways: Serving, **settings: Any) -> dict[str, Any]:
    """The settings of an agent that registers with gateways."""
    addresses = tuple(gateway.gateway.internal_addresses[0] for gateway in gateways)
    told = {"worker_id": f"gpu-{number}", "gateways": addresses, "join_token": TOKEN, "secret": None}
    return {**told, **settings}


@asynccontextmanager
async def house(
    folder: Path, *engines: SimulatedEngine, agent: dict[str, Any] | None = None, **sections: Any
) -> AsyncIterator[House]:
    """A gateway with an agent for each engine, all registered and ready; ``agent`` are settings of each."""
    fleet = {"heartbeat_interval": 0.2, "ttl": 5}
    changed = agent or {}
    async with joinable(folder, **{"fleet": fleet, "models": [{"id": "m1"}], **sections}) as gateway:
        async with AsyncExitStack() as stack:
            agents = [
                await stack.enter_async_context(running(each, **registering(number, gateway, **changed)))
                for number, each in enumerate(engines)
            ]
            found = House(gateway, agents)
            await found.until(lambda: len(gateway.gateway.fleet.books) == len(engines))
            await found.until(
                lambda: all(found.book(n).snapshot.state == "ready" for n in range(len(engines)))
            )
            yield found
            await gateway.returned()
            for each in agents:
                each.agent.drain()
            for each in agents:
                with trio.fail_after(10):
                    await each.over.wait()
        assert all(each.core.running == 0 for each in engines)


# Answers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
async def test_a_question_goes_through_both_to_the_engine_and_back(stream: bool, tmp_path: Path) -> None:
    async with house(tmp_path, engine()) as at:
        answer = await at.ask(stream=stream, max_tokens=5)
        assert answer.status == 200
        record = await at.gateway.settled()
        assert (record.outcome, record.worker, record.tokens_generated) == ("completed", "gpu-0", 5)
        if stream:
            assert (answer.chat().done, answer.chat().finishes) == (1, {0: "length"})


@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [
        ("refuse", 429, "engine_overloaded"),
        ("out_of_memory", 503, "engine_out_of_memory"),
        ("load_failure", 502, "engine_failed"),
        ("die", 502, "engine_failed"),
        ("malformed", 502, "engine_protocol_error"),
    ],
)
async def test_faults_of_an_engine_reach_its_callers_and_are_over_with_the_next_heartbeat(
    kind: str, status: int, code: str, tmp_path: Path
) -> None:
    async with house(tmp_path, engine(), retry={"max_attempts": 1}) as at:
        answer = await at.ask(**faulty({"kind": kind}))
        assert (answer.status, error_code(answer)) == (status, code)
        with trio.fail_after(5):
            while (await at.gateway.get("/readyz")).status != 200:  # noqa: ASYNC110
                await trio.sleep(0.02)
            while (await at.ask(max_tokens=2)).status != 200:  # noqa: ASYNC110
                await trio.sleep(0.02)


@pytest.mark.parametrize("kind", ["die", "malformed", "out_of_memory"])
async def test_a_fault_after_output_ends_the_stream_without_an_end(kind: str, tmp_path: Path) -> None:
    async with house(tmp_path, engine(), engine()) as at:
        reading = (await at.ask(max_tokens=50, **faulty({"kind": kind, "after": 3}))).chat()
        assert (reading.done, len(reading.errors)) == (0, 1)
        assert reading.text
        assert (await at.gateway.settled()).attempts == 1


# Slow readers -------------------------------------------------------------------------------------------


async def test_a_reader_that_stops_pauses_the_engine_and_gets_the_same_answer_when_it_reads_on(
    tmp_path: Path,
) -> None:
    simulated = engine(speed=Speed(decode=20_000.0))
    wordy: dict[str, Any] = {"max_tokens": 6000, "simulate": {"tokens": 6000}}
    delivery = {"buffer_bytes": 64 * KIB, "upstream_receive_buffer": 4 * KIB}
    async with house(tmp_path, simulated, agent={"buffer_bytes": 32 * KIB}, delivery=delivery) as at:
        whole = (await at.ask(**wordy)).chat().text

        def paused() -> bool:
            (worker,) = at.gateway.gateway.statistics()["workers"]
            return bool(worker["paused"] == 1)

        with trio.fail_after(20), await at.gateway.connect(receive_buffer=4 * KIB) as client:
            await client.send(chat_request(**wordy))
            await at.until(paused)
            (generation,) = simulated.core.generations
            stuck = generation.generated
            assert generation.paused
            assert stuck < 6000
            assert at.gateway.gateway.statistics()["held_up"] == 1
            beats = at.book().snapshot.seq
            await at.until(lambda: at.book().snapshot.seq >= beats + 2)
            assert generation.generated == stuck
            answer = await client.read_to_end()
        assert answer.chat().text == whole
        assert (answer.chat().done, generation.generated) == (1, 6000)
        await at.until(lambda: not paused())


# Whose slots are free -----------------------------------------------------------------------------------


async def leave(at: House, **body: Any) -> None:
    """Have a client leave as soon as it has read some output."""
    with trio.fail_after(10), await at.gateway.connect() as client:
        await client.send(chat_request(**{**LONG, **body}))
        await client.read_until(b'"content"')
        client.leave_reset()


async def test_the_agent_confirms_that_its_engine_let_go_long_before_the_grace_is_over(
    tmp_path: Path,
) -> None:
    async with house(tmp_path, engine()) as at:
        for number in range(1, 6):
            await leave(at)
            await at.gateway.settled(number)
        with trio.fail_after(3):  # the grace is five seconds
            await at.gateway.returned()
        assert at.idle == {"confirmed": 5}


async def test_a_slot_that_comes_back_late_is_not_given_away_before(tmp_path: Path) -> None:
    simulated = engine(slots=1)
    late = {"kind": "late_release", "seconds": 0.5}
    async with house(tmp_path, simulated) as at:
        await leave(at, **faulty(late))
        began = trio.current_time()
        answer = await at.ask(max_tokens=2)
        assert answer.status == 200
        assert trio.current_time() - began >= 0.3
        await at.gateway.settled(2)
        assert [record.attempts for record in at.gateway.records] == [1, 1]  # nobody had to be rejected
        assert at.idle == {"confirmed": 1}
        assert simulated.core.high_water <= 1


async def test_a_cancel_that_was_lost_is_chased_and_the_slot_comes_back_with_the_end(tmp_path: Path) -> None:
    async with house(tmp_path, engine(slots=1, speed=Speed(decode=100.0))) as at:
        lost = {"tokens": 60, "faults": [{"kind": "lost_cancel"}]}
        await leave(at, max_tokens=60, simulate=lost)
        assert (await at.ask(max_tokens=2)).status == 200
        assert at.idle == {"confirmed": 1}


async def test_two_gateways_before_one_agent_absorb_each_others_rejections(tmp_path: Path) -> None:
    """Each counts what it sent; the agent alone knows what there is, and says no."""
    simulated = engine(slots=3, speed=Speed(decode=200.0))
    fleet = {"heartbeat_interval": 30, "ttl": 90}  # so that neither hears of the other in time
    sections = {"fleet": fleet, "models": [{"id": "m1"}], "retry": {"backoff": 0.02, "max_attempts": 30}}
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    async with joinable(tmp_path / "a", **sections) as first, joinable(tmp_path / "b", **sections) as second:
        both = (first, second)
        async with running(simulated, **registering(0, *both)) as run:
            for gateway in both:
                await gateway.until(lambda gateway=gateway: gateway.gateway.fleet.ready())  # type: ignore[misc]
            statuses: list[int] = []

            async def ask(gateway: Serving) -> None:
                answer = await gateway.ask(chat_request(max_tokens=4, simulate={"tokens": 4}))
                statuses.append(answer.status)

            async with trio.open_nursery() as nursery:
                for number in range(24):
                    nursery.start_soon(ask, both[number % 2])
            assert statuses == [200] * 24
            assert sum(gateway.gateway.books.retries["overloaded"] for gateway in both) > 0
            assert simulated.core.high_water <= 3
            for gateway in both:
                gateway.gateway.connections.close()  # else the second would wait for the first's idle ones
            run.agent.drain()
            with trio.fail_after(10):
                await run.over.wait()


# Workers that come and go -------------------------------------------------------------------------------


async def test_an_agent_that_drains_finishes_its_streams_and_fails_nobody(tmp_path: Path) -> None:
    async with house(tmp_path, engine(speed=SLOW), engine(speed=SLOW)) as at:
        answers: list[Answer] = []

        async def ask() -> None:
            answers.append(await at.ask(max_tokens=10, simulate={"tokens": 10}))

        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(ask)
            await at.until(lambda: at.book(0).held == at.book(1).held == 2)
            at.agents[0].agent.drain()
            await at.until(
                lambda: (
                    "gpu-0" not in at.gateway.gateway.fleet.books or not at.book(0).ready(trio.current_time())
                )
            )
            for _ in range(4):
                nursery.start_soon(ask)
        assert [answer.chat().done for answer in answers] == [1] * 8
        assert all(record.outcome == "completed" for record in at.gateway.records)
        with trio.fail_after(10):
            await at.agents[0].over.wait()
        assert list(at.gateway.gateway.fleet.books) == ["gpu-1"]


async def test_an_agent_that_comes_back_is_another_process_with_books_of_its_own(tmp_path: Path) -> None:
    async with house(tmp_path, engine()) as at:
        old = at.book()
        assert (await at.ask(max_tokens=2)).status == 200
        at.agents[0].agent.drain()
        with trio.fail_after(10):
            await at.agents[0].over.wait()
        assert (await at.ask()).error()["code"] == "no_worker"
        async with running(engine(), **registering(0, at.gateway)) as again:
            await at.until(lambda: at.gateway.gateway.fleet.ready())
            assert at.book() is not old
            assert at.book().snapshot.incarnation > old.snapshot.incarnation
            assert (await at.ask(max_tokens=2)).status == 200
            assert (old.attempts, at.book().attempts) == (1, 1)
            again.agent.drain()
            with trio.fail_after(10):
                await again.over.wait()


async def test_a_configured_agent_serves_drains_and_serves_again(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(SECRET)
    worker = {"kind": "agent", "api_key_file": "secret"}
    with refusing_port() as port:
        bind = f"127.0.0.1:{port}"
    probes = {"interval": 0.1}
    async with serving(f"http://{bind}", folder=tmp_path, worker=worker, probes=probes) as gateway:
        for _ in range(2):
            async with running(engine(), bind=bind) as run:
                with trio.fail_after(5):
                    while (await gateway.ask(chat_request(max_tokens=3))).status != 200:  # noqa: ASYNC110
                        await trio.sleep(0.02)
                assert (await gateway.get("/readyz")).status == 200
                run.agent.drain()
                with trio.fail_after(10):
                    await run.over.wait()
            await gateway.until(lambda: not gateway.gateway.fleet.ready())
            assert (await gateway.ask(chat_request())).error()["code"] == "no_worker"
