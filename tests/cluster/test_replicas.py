"""Replicas with one real store: what they share, and what is left when it or one of them is lost."""

from __future__ import annotations

import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import pytest
import trio

from tests.cluster.redis_server import Plain, RedisServer, needs_redis, open_server
from tests.cluster.replicas import LEASE, PATIENCE, Engine, Gate, OneReplica, jain
from trio_gateway import testing
from trio_gateway.admission import TenantShare
from trio_gateway.cluster import Standing
from trio_gateway.errors import Refused
from trio_gateway.fleet import DRAINED, Turned
from trio_gateway.tenancy import RateLimits
from trio_gateway.testing import make_request
from trio_gateway.wire import EngineKind, Registration

pytestmark = [needs_redis, pytest.mark.slow]
TENANTS = "abcdef"
MANY = {tenant: TenantShare(None, 10_000) for tenant in TENANTS}


@pytest.fixture
def server() -> Iterator[RedisServer]:
    yield from open_server()


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def gate(server: RedisServer) -> Gate:
    return Gate(server.port, "test")


@asynccontextmanager
async def running(*replicas: OneReplica) -> AsyncIterator[trio.Nursery]:
    async with trio.open_nursery() as nursery:
        for replica in replicas:
            await nursery.start(replica.run)
        yield nursery
        nursery.cancel_scope.cancel()


async def until(true: Callable[[], bool], seconds: float = 5.0) -> None:
    with trio.fail_after(seconds):
        await testing.until(true)


def used(server: RedisServer) -> dict[str, int]:
    plain = Plain(server.port)
    try:
        flat = plain("HGETALL", "{test}:used")
        return {key.decode(): int(value) for key, value in zip(flat[::2], flat[1::2], strict=True)}
    finally:
        plain.close()


async def until_nothing_is_used(server: RedisServer) -> None:
    with trio.fail_after(5):
        while used(server):  # noqa: ASYNC110 - it is another process that changes
            await trio.sleep(0.02)


def all_shared(replicas: list[OneReplica]) -> Callable[[], bool]:
    return lambda: all(
        r.member.standing is Standing.SHARED and len(r.member.members) == len(replicas) for r in replicas
    )


async def test_ten_times_overload_never_exceeds_the_slots_and_is_fair_over_all_replicas(
    gate: Gate, engine: Engine
) -> None:
    replicas = [OneReplica(gate, engine, shares=MANY) for _ in range(3)]
    async with running(*replicas) as nursery:
        await until(all_shared(replicas))
        for at, replica in enumerate(replicas):
            for tenant in TENANTS[at : at + 4]:  # not every tenant comes to every replica
                nursery.start_soon(replica.flood, tenant, 8 if tenant < "d" else 5, 0.03)
        await trio.sleep(3)
        served = sum((replica.served for replica in replicas), Counter[str]())
    assert 4 < engine.most <= 8
    assert set(served) == set(TENANTS)
    assert jain(served) >= 0.97
    assert all(replica.refused == 0 for replica in replicas)


async def test_a_slot_that_was_given_back_is_used_again_without_a_turn_while_nobody_waits(
    gate: Gate, engine: Engine
) -> None:
    shares = {"a": TenantShare(4, 1000)}
    one, other = (OneReplica(gate, engine, slots=4, shares=shares) for _ in range(2))
    async with running(one, other) as nursery:
        await until(all_shared([one, other]))
        nursery.start_soon(one.flood, "a", 2, 0.01)
        await until(lambda: engine.total >= 200)
        assert one.replica.statistics.granted < 100
        # Of four slots one replica uses two, and keeps none of them from the other, which wants all.
        nursery.start_soon(other.flood, "a", 8, 0.01)
        await until(lambda: other.served["a"] >= 1000)
        assert engine.most <= 4


async def test_a_tenants_concurrency_is_counted_over_all_replicas(gate: Gate, engine: Engine) -> None:
    replicas = [OneReplica(gate, engine, shares={"a": TenantShare(3, 1000)}) for _ in range(3)]
    async with running(*replicas) as nursery:
        for replica in replicas:
            nursery.start_soon(replica.flood, "a", 5, 0.02)
        await until(lambda: engine.total > 60)
    assert engine.most == 3


async def test_rates_hold_over_all_replicas(gate: Gate, engine: Engine) -> None:
    limit = 3000
    replicas = [OneReplica(gate, engine, limits={"a": RateLimits(limit, None)}) for _ in range(3)]
    accepted = 0

    async def ask(replica: OneReplica) -> None:
        nonlocal accepted
        while True:
            try:
                replica.rates.charge(make_request(tenant="a"))
                accepted += 1
                replica.replica.poke(True)
            except Refused:
                pass
            await trio.sleep(0.001)

    async with running(*replicas) as nursery:
        begun = trio.current_time()
        for replica in replicas:
            nursery.start_soon(ask, replica)
            nursery.start_soon(ask, replica)
        await until(lambda: accepted >= limit, 20)
        await trio.sleep(1)
        expected = limit * (1 + (trio.current_time() - begun) / 60)
        assert accepted == pytest.approx(expected, rel=0.02)


async def test_what_operators_say_at_one_replica_holds_at_all_until_it_is_taken_back(
    gate: Gate, engine: Engine
) -> None:
    one, other = replicas = [OneReplica(gate, engine) for _ in range(2)]
    async with running(*replicas) as nursery:
        await until(all_shared(replicas))
        one.admission.freeze("a")
        one.workers.fleet.touch("w1", DRAINED)
        await until(
            lambda: other.admission.frozen == {"a"} and other.workers.fleet.books["w1"].operator == DRAINED
        )
        late = OneReplica(gate, engine)
        await nursery.start(late.run)
        await until(lambda: late.admission.frozen == {"a"})
        other.admission.thaw("a")
        other.workers.fleet.touch("w1", "none")
        for replica in (one, late):
            await until(lambda replica=replica: not replica.admission.frozen)  # type: ignore[misc]
            await until(lambda replica=replica: replica.workers.fleet.books["w1"].placeable)  # type: ignore[misc]


async def test_a_worker_that_a_breaker_spares_at_one_replica_comes_last_at_others_until_it_gives_output(
    gate: Gate, engine: Engine
) -> None:
    one, other = replicas = [OneReplica(gate, engine) for _ in range(2)]
    book = other.workers.fleet.books["w1"]
    async with running(*replicas):
        await until(all_shared(replicas))
        fail(one)
        await until(lambda: book.hinted("m1", trio.current_time()))
        late = OneReplica(gate, engine)
        async with running(late):
            await until(lambda: late.workers.fleet.books["w1"].hinted("m1", trio.current_time()))
        assert book.breaker("m1").allows(trio.current_time()), "it is a hint, not the truth"
        request = make_request(exchange_id="e9")
        worker = other.workers.fleet.open_worker(request, frozenset(), "w1")
        assert worker is not None
        other.workers.fleet.hold(request, worker)
        other.workers.fleet.output(worker, request)
        assert not book.hinted("m1", trio.current_time())
        other.workers.fleet.free(request, worker, 1, drained=False)


def fail(replica: OneReplica) -> None:
    """Let a worker fail until its breaker opens."""
    fleet = replica.workers.fleet
    for number in range(5):
        request = make_request(exchange_id=f"e{number}")
        worker = fleet.books["w1"].worker
        fleet.hold(request, worker)
        fleet.fault(worker, request)
        fleet.free(request, worker, 1, drained=False)
    assert [each[:2] for each in fleet.spared()] == [("w1", "m1")]


async def test_all_replicas_have_one_salt_also_after_the_store_lost_its_memory(
    server: RedisServer, gate: Gate, engine: Engine
) -> None:
    replicas = [OneReplica(gate, engine, token="t") for _ in range(3)]

    def salts() -> set[str | None]:
        return {replica.secrets.salt for replica in replicas if replica.secrets is not None}

    with pytest.raises(Turned) as turned:
        replicas[0].secrets.make(REGISTRATION)  # type: ignore[union-attr]
    assert turned.value.status == 503
    bystander = OneReplica(gate, engine)
    async with running(bystander, *replicas) as nursery:
        await until(lambda: None not in salts() and len(salts()) == 1)
        (salt,) = salts()
        server.kill()
        server.start()
        late = OneReplica(gate, engine, token="t")
        await until(all_shared([bystander, *replicas]))
        await nursery.start(late.run)
        replicas.append(late)
        await until(lambda: None not in salts() and len(salts()) == 1)
        assert salts() == {salt}
        assert len({replica.secrets.make(REGISTRATION) for replica in replicas if replica.secrets}) == 1


REGISTRATION = Registration("gpu-1", 10, "http://127.0.0.1:1", ["m1"], 1, EngineKind("simulated"))


async def test_slots_of_a_replica_that_vanishes_come_back_when_its_lease_is_over(
    server: RedisServer, gate: Gate, engine: Engine
) -> None:
    gone, other = OneReplica(gate, engine, slots=2), OneReplica(gate, engine, slots=2)
    async with running(other):
        async with running(gone) as nursery:
            nursery.start_soon(gone.serve, "t1", 60)
            nursery.start_soon(gone.serve, "t1", 60)
            await until(lambda: engine.running == 2)
        vanished = trio.current_time()
        await other.serve("t1", 0)
        assert other.served["t1"], "it was placed"
        assert trio.current_time() - vanished <= 2 * LEASE
        await until_nothing_is_used(server)


@pytest.mark.parametrize("how", ["killed", "stopped"])
async def test_a_lost_store_leaves_each_replica_its_share_and_running_streams_alone(
    server: RedisServer, gate: Gate, engine: Engine, how: str
) -> None:
    replicas = [OneReplica(gate, engine) for _ in range(3)]
    async with running(*replicas) as nursery:
        await until(all_shared(replicas))
        nursery.start_soon(replicas[0].serve, "t1", 3.0)
        await until(lambda: engine.running == 1)
        server.kill() if how == "killed" else server.send(signal.SIGSTOP)
        await until(lambda: all(r.member.standing is Standing.ALONE for r in replicas), 1.0)
        for replica in replicas:
            nursery.start_soon(replica.flood, "t2", 10, 0.05)
        engine.most, total = 0, engine.total
        await until(lambda: engine.total > total + 100)
        assert engine.most == 8, "all shares together are all slots"
        server.start() if how == "killed" else server.send(signal.SIGCONT)
        await until(all_shared(replicas))
        engine.most, total = 0, engine.total
        await until(lambda: engine.total > total + 100)
        assert engine.most <= 8
        await until(lambda: replicas[0].served["t1"] > 0)
    assert all(replica.refused == 0 for replica in replicas)


async def test_a_lost_store_refuses_what_is_new_if_it_is_told_to_and_places_who_waits_later(
    server: RedisServer, gate: Gate, engine: Engine
) -> None:
    replica = OneReplica(gate, engine, slots=1, split=False)
    async with running(replica) as nursery:
        nursery.start_soon(replica.serve, "t1", 0.6)
        await until(lambda: engine.running == 1)
        nursery.start_soon(replica.serve, "t1", 0.01)
        server.kill()
        await until(lambda: replica.member.standing is Standing.ALONE, 1.0)
        with pytest.raises(Refused) as refused:
            replica.admission.enter(make_request())
        assert (refused.value.problem.status, refused.value.problem.retry_after) == (503, 1.0)
        await until(lambda: engine.running == 0)
        assert engine.total == 1
        server.start()
        await until(lambda: replica.served["t1"] == 20)


async def test_a_replica_that_never_reached_the_store_serves_nobody(
    server: RedisServer, engine: Engine
) -> None:
    server.kill()
    replica = OneReplica(Gate(server.port, "test"), engine)
    async with running(replica):
        with pytest.raises(Refused):
            replica.admission.enter(make_request())
        server.start()
        await until(lambda: replica.member.standing is Standing.SHARED)
        await replica.serve("t1", 0)
        assert replica.served["t1"]


async def test_an_answer_that_comes_after_the_lease_is_over_gives_nothing(gate: Gate, engine: Engine) -> None:
    replica = OneReplica(gate, engine)
    async with running(replica):
        await until(lambda: replica.member.standing is Standing.SHARED)
        gate.delay = LEASE + 0.1
        await until(lambda: replica.member.standing is Standing.ALONE, 2 * LEASE + 1)
        gate.delay = 0.0
        await until(lambda: replica.member.standing is Standing.SHARED, 2 * LEASE + 1)


async def test_a_slow_store_makes_placing_slow_and_nothing_else(gate: Gate, engine: Engine) -> None:
    replicas = [OneReplica(gate, engine) for _ in range(2)]
    async with running(*replicas) as nursery:
        await until(all_shared(replicas))
        gate.delay = PATIENCE / 3
        for replica in replicas:
            nursery.start_soon(replica.flood, "t1", 10, 0.05)
        await until(lambda: engine.total > 40)
        assert all(r.member.standing is Standing.SHARED for r in replicas)
    assert engine.most <= 8


async def test_random_aborts_leave_nothing_at_the_store(
    server: RedisServer, gate: Gate, engine: Engine
) -> None:
    replicas = [OneReplica(gate, engine, shares=MANY) for _ in range(3)]
    dice = random.Random(1)
    left = 1500

    async def abort(replica: OneReplica) -> None:
        nonlocal left
        while left > 0:
            left -= 1
            with trio.move_on_after(dice.choice((0, 0.001, 0.005, 0.03))):
                await replica.serve(dice.choice(TENANTS), dice.random() * 0.01)

    async with running(*replicas):
        async with trio.open_nursery() as nursery:
            for replica in replicas:
                for _ in range(10):
                    nursery.start_soon(abort, replica)
        await until_nothing_is_used(server)
        for replica in replicas:
            assert replica.workers.left_over() == []
        plain = Plain(server.port)
        left_there = {key.decode().split(":")[1] for key in plain("KEYS", "{test}:*")}
        plain.close()
        assert not left_there & {"wants", "grants", "held"}
    assert engine.most <= 8
