"""An agent and its gateways: registering, heartbeats, being lost and found again, signing off."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import httpx  # noqa: ASYNC127 - the constraints pin it
import pytest
import trio
from trio.testing import MockClock

from tests.agent.rig import SECRET, Gateway, Running, gateways, records, running
from trio_gateway.agent import HowEnded
from trio_gateway.agent._register import Registrar, Superseded, _reason
from trio_gateway.agent.engines import Limits, SimulatedEngine, Speed
from trio_gateway.testing import refusing_port, until
from trio_gateway.wire import EngineKind, Registration, WorkerReport


def engine(**settings: Any) -> SimulatedEngine:
    return SimulatedEngine(("m",), limits=Limits(slots=2), **settings)


def joining(*those: Gateway) -> dict[str, Any]:
    return {"gateways": tuple(each.address for each in those), "join_token": "join-me", "secret": None}


async def beats(gateway: Gateway, count: int) -> list[dict[str, Any]]:
    await until(lambda: len(gateway.named("PUT")) >= count)
    return gateway.named("PUT")


async def beats_until(gateway: Gateway, state: str) -> list[dict[str, Any]]:
    await until(lambda: state in [beat["state"] for beat in gateway.named("PUT")])
    return gateway.named("PUT")


async def test_an_agent_registers_and_is_called_with_the_secret_it_got(autojump_clock: MockClock) -> None:
    gateway = Gateway()
    async with gateways(gateway), running(engine(), **joining(gateway), labels=("big",)) as run:
        await beats(gateway, 1)
        (registration,) = gateway.named("POST")
        assert registration == {
            "protocol": 1,
            "worker_id": "gpu-0",
            "incarnation": registration["incarnation"],
            "url": run.agent.address,
            "models": ["m"],
            "slots": 2,
            "engine": {"kind": "simulated", "version": registration["engine"]["version"]},
            "labels": ["big"],
        }
        assert (await run.generate(max_tokens=1)).status == 200
        assert (await run.answer("GET", "/internal/v1/events", secret="x" * 32)).status == 401


async def test_heartbeats_have_growing_numbers_and_name_what_runs(autojump_clock: MockClock) -> None:
    gateway = Gateway(interval=2.0)
    async with gateways(gateway), running(engine(), **joining(gateway)) as run:
        await beats(gateway, 1)
        with await run.connect() as client:
            await run.ask(client, simulate={"faults": [{"kind": "hang", "after": 4}]})
            await client.read_until(b'"delta"')
            began = trio.current_time()
            seen = await beats(gateway, 5)
            assert 4 <= trio.current_time() - began <= 9
            assert seen[-1]["requests"] == [{"id": "a" * 32, "attempt": 1, "generated": 4}]
            assert (seen[-1]["running"], seen[-1]["state"], seen[-1]["models"]) == (1, "ready", ["m"])
            client.leave_fin()
        await run.agent.slots.wait_none()
        seen = await beats(gateway, len(gateway.named("PUT")) + 1)
        assert (seen[-1]["requests"], seen[-1]["running"]) == ([], 0)
        numbers = [beat["seq"] for beat in seen]
        assert numbers == sorted(set(numbers))
        assert {beat["incarnation"] for beat in seen} == {gateway.named("POST")[0]["incarnation"]}


async def test_workers_that_start_together_do_not_tell_together(autojump_clock: MockClock) -> None:
    gateway = Gateway(interval=2.0)
    told: dict[str, list[float]] = {}

    async def beat(name: str, dice: float) -> None:
        registrar = Registrar(
            gateway.address, "join-me", Beating(told.setdefault(name, [])), quiet, quiet, lambda: dice
        )
        with pytest.raises(Superseded):
            await registrar.run()
        await registrar.close()

    async with gateways(gateway), trio.open_nursery() as nursery:
        nursery.start_soon(beat, "early", 0.1)
        nursery.start_soon(beat, "late", 0.9)
        await until(lambda: min(map(len, told.values()), default=0) >= 4)
        gateway.status["PUT"] = 409  # ends both
    for name, first in (("early", 0.2), ("late", 1.8)):
        gaps = [later - earlier for earlier, later in pairwise(told[name])]
        assert gaps[0] == pytest.approx(first, abs=0.2)
        assert gaps[1:3] == pytest.approx([2.0, 2.0], abs=0.2)


class Beating:
    """A worker that notes when it is asked how it is."""

    def __init__(self, told: list[float]) -> None:
        self.told = told

    def registration(self) -> Registration:
        return Registration("gpu-0", 1, "http://127.0.0.1:1", ["m"], 1, EngineKind("simulated", "1"))

    def report(self) -> WorkerReport:
        self.told.append(trio.current_time())
        return WorkerReport(1, len(self.told), "ready", ["m"], slots=1, running=0, queued=0)

    def news(self) -> object:
        return None


def quiet(*_: str) -> None:
    """Nobody wants to know."""


async def test_news_do_not_wait_for_the_next_heartbeat(autojump_clock: MockClock) -> None:
    gateway = Gateway(interval=600.0)
    async with gateways(gateway), running(engine(speed=Speed(load=50.0)), **joining(gateway)) as run:
        *before, last = await beats_until(gateway, "ready")
        assert trio.current_time() < 52
        assert {beat["state"] for beat in before} == {"starting"}
        assert [beat["models"] for beat in before] == [[]] * len(before)
        assert last["models"] == ["m"]
        began = trio.current_time()
        with await run.connect() as client:
            await run.ask(client, simulate={"faults": [{"kind": "hang", "after": 1}]})
            await client.read_until(b'"delta"')
            run.agent.drain()
            await beats_until(gateway, "draining")
            assert trio.current_time() < began + 2
            client.leave_fin()
            await run.over.wait()


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_a_gateway_that_has_lost_the_worker_gets_a_new_registration(
    status: int, autojump_clock: MockClock
) -> None:
    gateway = Gateway()
    async with gateways(gateway), running(engine(), **joining(gateway)) as run:
        await beats(gateway, 2)
        gateway.status["PUT"] = status
        await until(lambda: len(gateway.named("POST")) >= 2)
        gateway.status.clear()
        gateway.secret = "t" * 32
        await until(lambda: len(gateway.named("POST")) >= 3)
        first, *_, last = gateway.named("POST")
        assert first == last
        await beats(gateway, len(gateway.named("PUT")) + 1)
        answer = await run.answer("GET", "/internal/v1/generate", secret="t" * 32)
        assert answer.status == 404  # it is let in, and there is no such route
        assert (await run.answer("GET", "/internal/v1/generate", secret=SECRET)).status == 401


async def test_a_gateway_that_fails_now_and_then_is_told_all_the_same(autojump_clock: MockClock) -> None:
    gateway = Gateway(interval=2.0)
    async with gateways(gateway), running(engine(), **joining(gateway)):
        await beats(gateway, 1)
        gateway.status["PUT"] = 503
        await beats(gateway, 4)
        assert len(gateway.named("POST")) == 1


async def test_each_gateway_is_told_by_itself(autojump_clock: MockClock) -> None:
    one, other = Gateway("1" * 32), Gateway("2" * 32)
    async with gateways(one, other):
        with refusing_port() as port:
            there = joining(one, other)
            there["gateways"] += (f"http://127.0.0.1:{port}",)
        async with running(engine(), **there) as run:
            await beats(one, 2)
            await beats(other, 2)
            for secret in ("1" * 32, "2" * 32):
                answer = await run.answer("POST", "/internal/v1/requests/a/1/cancel", {}, secret=secret)
                assert answer.status == 404
            (detail,) = {event["detail"] for event in run.events("gateway_unreachable")}
            assert detail == f"ConnectError: all attempts to connect to 127.0.0.1:{port} failed"
            run.agent.drain()
            await run.over.wait()
            for gateway in (one, other):
                assert gateway.calls[-1][0] == "DELETE"


@pytest.mark.parametrize("status", [401, 403, 500])
async def test_a_refused_registration_is_tried_again(status: int, autojump_clock: MockClock) -> None:
    gateway = Gateway()
    gateway.status["POST"] = status
    async with gateways(gateway), running(engine(), **joining(gateway)) as run:
        await until(lambda: len(gateway.named("POST")) >= 4)
        assert trio.current_time() < 10
        gateway.status.clear()
        await beats(gateway, 1)
        assert run.events("not_registered")[0]["detail"] == f"status {status}"


async def test_why_a_registration_was_refused_is_logged(autojump_clock: MockClock) -> None:
    gateway = Gateway()
    gateway.status["POST"], gateway.reason = 403, "the address is not allowed" + "." * 1000
    async with gateways(gateway), running(engine(), **joining(gateway)) as run:
        await until(lambda: bool(run.events("not_registered")))
        detail = run.events("not_registered")[0]["detail"]
        assert detail.startswith("status 403: the address is not allowed..")
        assert len(detail) < 300
        gateway.status["POST"], gateway.reason = 409, "a worker of this name is configured"
        await run.over.wait()
        assert run.ended is HowEnded.SUPERSEDED
        assert [said["detail"] for said in run.events("superseded")] == [
            "a worker of this name is configured"
        ]


@pytest.mark.parametrize(
    "body", [b"", b"no", b"[]", b"\xff", b'{"error": 1}', b'{"error": {"message": 1}}', b"[" * 100_000]
)
def test_a_refusal_in_no_known_words_has_no_reason(body: bytes) -> None:
    assert _reason(httpx.Response(401, content=body)) == ""


async def test_an_old_incarnation_ends_without_signing_off(autojump_clock: MockClock) -> None:
    gateway = Gateway()
    async with gateways(gateway), running(engine(), **joining(gateway)) as run:
        await beats(gateway, 1)
        gateway.status["PUT"] = 409
        await run.over.wait()
        assert run.ended is HowEnded.SUPERSEDED
        assert gateway.named("DELETE") == []


async def test_an_old_incarnation_does_not_even_register(autojump_clock: MockClock) -> None:
    gateway = Gateway()
    gateway.status["POST"] = 409
    async with gateways(gateway), running(engine(), **joining(gateway)) as run:
        await run.over.wait()
        assert run.ended is HowEnded.SUPERSEDED


async def test_a_drain_says_so_lets_finish_and_signs_off(autojump_clock: MockClock) -> None:
    gateway = Gateway()
    async with gateways(gateway), running(engine(), **joining(gateway)) as run:
        await beats(gateway, 1)
        with await run.connect() as client:
            await run.ask(client, max_tokens=400, simulate={"tokens": 400})
            await client.read_until(b'"delta"')
            run.agent.drain()
            answer = await client.read_to_end()
        await run.over.wait()
        assert records(answer)[-1] == {"t": "end"}
        states = [beat["state"] for beat in gateway.named("PUT")]
        assert "draining" in states
        method, path, _ = gateway.calls[-1]
        incarnation = gateway.named("POST")[0]["incarnation"]
        assert (method, path) == ("DELETE", f"/internal/v1/workers/gpu-0?incarnation={incarnation}")


async def test_a_gateway_that_never_answers_does_not_hold_up_the_end(autojump_clock: MockClock) -> None:
    async def say_nothing(stream: trio.SocketStream) -> None:
        await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, say_nothing, [listener])
        address = f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
        settings = {"gateways": (address,), "join_token": "t"}
        async with running(engine(), **settings) as run:
            await until(lambda: bool(run.events("gateway_unreachable")))
            began = trio.current_time()
            run.agent.drain()
            await run.over.wait()
            assert trio.current_time() - began < 5
        nursery.cancel_scope.cancel()


def test_incarnations_grow_with_each_start_and_are_whole_in_any_json() -> None:
    async def main() -> list[int]:
        found = []
        for _ in range(3):
            async with running(engine()) as run:
                found.append(_incarnation(run))
        return found

    found = trio.run(main)
    assert found == sorted(set(found))
    assert found[-1] < 2**53


def _incarnation(run: Running) -> int:
    return run.agent.registration().incarnation
