"""Who may register, what each call is answered, and what becomes of an old process when a new one comes."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from trio_gateway.contract import Worker
from trio_gateway.fleet import (
    DrainKeeper,
    Fleet,
    FleetSettings,
    Registrations,
    RegistrationSettings,
    Route,
    Turned,
    WorkerBook,
    make_secret,
)
from trio_gateway.testing import make_request, make_worker
from trio_gateway.upstream import resolve as really_resolve
from trio_gateway.wire import Registered, Registration, WorkerNews, WorkerReport, read_message

TTL = 15.0
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def networks(*shown: str) -> tuple[Network, ...]:
    return tuple(map(ipaddress.ip_network, shown))


async def as_written(host: str) -> list[str]:
    await trio.lowlevel.checkpoint()
    return [host]


class Gateway:
    """The registrations of one gateway, and what they told."""

    def __init__(
        self,
        *static: Worker,
        allowed: tuple[Network, ...] = networks("127.0.0.0/8"),
        resolve: Callable[[str], Awaitable[Sequence[str]]] = as_written,
        routes: tuple[Route, ...] = (),
        make_secret: Callable[[Registration], str] = make_secret,
    ) -> None:
        self.fleet = Fleet(static, routes, trio.current_time, FleetSettings(), lambda: 0.5)
        self.drain = DrainKeeper()
        self.begun: list[WorkerBook] = []
        self.told: list[str] = []
        self.registrations = Registrations(
            self.fleet,
            self.drain,
            RegistrationSettings(2.0, TTL, allowed),
            trio.current_time,
            resolve,
            self.begun.append,
            lambda worker, detail: self.told.append(detail),
            make_secret,
        )

    async def register(self, **changes: Any) -> Registered:
        return await self.registrations.register(registration(**changes))

    async def status(self, **changes: Any) -> int:
        """Register, and answer the status."""
        try:
            await self.register(**changes)
        except Turned as turned:
            return turned.status
        return 200

    def report_status(self, secret: str, worker_id: str = "gpu-1", **changes: Any) -> int:
        try:
            self.registrations.report(worker_id, secret, report(**changes))
        except Turned as turned:
            return turned.status
        return 200

    def remove_status(self, secret: str, incarnation: int | None = None, worker_id: str = "gpu-1") -> int:
        try:
            self.registrations.remove(worker_id, secret, incarnation)
        except Turned as turned:
            return turned.status
        return 200

    @property
    def book(self) -> WorkerBook:
        return self.fleet.books["gpu-1"]

    def sweep(self) -> None:
        """Forget whom nobody heard of for too long, as the gateway does once a second."""
        self.registrations.forget(self.fleet.expire())

    def drain_one(self, attempt_id: str, released: list[str]) -> None:
        self.drain.keep(self.book.worker, attempt_id, lambda: released.append(attempt_id))


def registration(**changes: Any) -> Registration:
    told = {
        "worker_id": "gpu-1",
        "incarnation": 10,
        "url": "http://127.0.0.1:9000",
        "models": ["m1"],
        "slots": 4,
        "engine": {"kind": "simulated"},
        "labels": ["gpu"],
        "protocol": 1,
        **changes,
    }
    return read_message(json.dumps(told).encode(), Registration)


def report(**changes: Any) -> WorkerReport:
    told = {
        "incarnation": 10,
        "seq": 1,
        "state": "ready",
        "models": ["m1"],
        "slots": 4,
        "running": 0,
        "queued": 0,
        "requests": [],
        **changes,
    }
    return read_message(json.dumps(told).encode(), WorkerReport)


# Who may ------------------------------------------------------------------------------------------------


async def test_a_worker_that_registers_is_one_that_can_be_placed_at(autojump_clock: MockClock) -> None:
    gateway = Gateway(routes=(Route("m1", "m1", ("gpu",)),))
    told = await gateway.register()
    assert (told.heartbeat_interval, told.ttl) == (2, TTL)
    assert len(told.secret) == 48
    worker = gateway.book.worker
    assert (worker.host, worker.port, worker.authority, worker.slots) == (
        "127.0.0.1",
        9000,
        "127.0.0.1:9000",
        4,
    )
    assert (worker.api_key, worker.dialect.agent, worker.labels) == (told.secret, True, frozenset({"gpu"}))
    assert gateway.begun == [gateway.book]
    assert gateway.report_status(told.secret) == 200
    assert gateway.fleet.choose(make_request(), frozenset()) is worker


async def test_nothing_is_placed_at_a_worker_before_it_has_shown_its_secret(
    autojump_clock: MockClock,
) -> None:
    """A request may overtake the answer that tells the secret, and would be taken for a stranger's."""
    gateway = Gateway()
    chosen: list[object] = []
    gateway.fleet.changed = lambda: chosen.append(gateway.fleet.choose(make_request(), frozenset()))
    told = await gateway.register()
    assert not gateway.fleet.ready()
    assert gateway.report_status("s" * 48) == 401
    assert set(chosen) == {None}
    assert gateway.report_status(told.secret) == 200
    assert chosen[-1] is gateway.book.worker
    assert gateway.fleet.ready()


async def test_secrets_differ(autojump_clock: MockClock) -> None:
    gateway = Gateway()
    assert len({(await gateway.register(worker_id=f"w{number}")).secret for number in range(20)}) == 20


@pytest.mark.parametrize(
    ("allowed", "host", "status"),
    [
        (("127.0.0.0/8",), "127.0.0.1", 200),
        (("10.0.0.0/8", "127.0.0.0/8"), "127.9.9.9", 200),
        (("10.0.0.0/8",), "127.0.0.1", 403),
        (("10.1.2.3/32",), "10.1.2.4", 403),
        ((), "127.0.0.1", 403),
        (("::1/128",), "[::1]", 200),
        (("fd00::/8",), "[::1]", 403),
        (("0.0.0.0/0",), "[::1]", 403),
        (("127.0.0.0/8",), "[::ffff:127.0.0.1]", 200),
        (("127.0.0.0/8",), "[::ffff:7f00:1]", 200),
        (("10.0.0.0/8",), "[::ffff:127.0.0.1]", 403),
        (("::/0",), "[::ffff:127.0.0.1]", 403),  # where it leads is an address of IPv4
    ],
)
async def test_a_worker_has_to_be_inside_the_allowed_networks(
    allowed: tuple[str, ...], host: str, status: int, autojump_clock: MockClock
) -> None:
    gateway = Gateway(allowed=networks(*allowed))
    assert await gateway.status(url=f"http://{host}:9000") == status
    assert len(gateway.fleet.books) == (status == 200)


@pytest.mark.parametrize(
    ("addresses", "called"),
    [
        (["127.0.0.1"], "127.0.0.1"),
        (["10.0.0.1", "127.0.0.1"], "127.0.0.1"),
        (["::1", "10.0.0.1", "127.0.0.2", "127.0.0.1"], "127.0.0.2"),
        (["fe80::1%lo", "127.0.0.1"], "127.0.0.1"),
        (["10.0.0.1", "::1"], None),
        ([], None),
    ],
)
async def test_of_a_names_addresses_the_first_that_is_allowed_is_called_and_kept(
    addresses: list[str], called: str | None, autojump_clock: MockClock
) -> None:
    """Else a name could lead elsewhere after it was looked at."""
    asked: list[str] = []

    async def resolve(host: str) -> list[str]:
        asked.append(host)
        return await as_written("") and addresses

    gateway = Gateway(resolve=resolve)
    status = await gateway.status(url="http://gpu.internal:9000/")
    assert asked == ["gpu.internal"]
    if called is None:
        assert status == 403
    else:
        assert (gateway.book.worker.address, gateway.book.worker.authority) == (called, "gpu.internal:9000")


@pytest.mark.parametrize(
    "host", ["localhost", "127.0.0.1", "[::1]", "a..b", "x" * 64, "-", "1.2.3.4.5", "[::1", "256.1.1.1", "0"]
)
async def test_whatever_a_host_looks_like_it_is_taken_or_turned_away(host: str) -> None:
    gateway = Gateway(allowed=networks("127.0.0.0/8", "::1/128"), resolve=really_resolve)
    expected = {"localhost": {200}, "127.0.0.1": {200}, "[::1]": {200, 403}}
    assert await gateway.status(url=f"http://{host}:9000") in expected.get(host, {400, 403})


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1", "http://127.0.0.1:0", "http://127.0.0.1:65536", "http://[]:1", "http://:80"]
)
async def test_a_url_without_a_host_and_port_is_none(url: str, autojump_clock: MockClock) -> None:
    assert await Gateway().status(url=url) == 400


async def test_the_name_of_a_configured_worker_is_taken(autojump_clock: MockClock) -> None:
    gateway = Gateway(make_worker("gpu-1"))
    assert await gateway.status() == 409
    assert await gateway.status(worker_id="gpu-2") == 200


async def test_an_older_incarnation_is_told_to_go(autojump_clock: MockClock) -> None:
    gateway = Gateway()
    secret = (await gateway.register(incarnation=10)).secret
    assert await gateway.status(incarnation=9) == 409
    assert gateway.report_status(secret, incarnation=9) == 409
    assert gateway.remove_status(secret, 9) == 409
    assert gateway.report_status(secret) == 200


async def test_an_older_incarnation_is_told_to_go_after_the_younger_left_too(
    autojump_clock: MockClock,
) -> None:
    gateway = Gateway()
    secret = (await gateway.register(incarnation=10)).secret
    assert gateway.remove_status(secret, 10) == 200
    assert await gateway.status(incarnation=9) == 409
    assert await gateway.status(incarnation=10) == 200
    await trio.sleep(TTL)
    gateway.sweep()
    assert gateway.fleet.books == {}
    assert await gateway.status(incarnation=9) == 409


async def test_of_those_that_left_only_so_many_are_remembered(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trio_gateway.fleet._registrations.MOST_REMEMBERED", 3)
    gateway = Gateway()
    for number in (1, 2, 1, 3, 4):  # the first is the second to have left, the last time
        secret = (await gateway.register(worker_id=f"w{number}", incarnation=10)).secret
        assert gateway.remove_status(secret, 10, f"w{number}") == 200
    told = [await gateway.status(worker_id=f"w{number}", incarnation=9) for number in (1, 2, 3, 4)]
    assert told == [409, 200, 409, 409]


async def test_of_the_names_that_nobody_reports_any_more_only_so_many_are_known(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trio_gateway.fleet._registry.MOST_NAMES_GONE", 3)
    gateway = Gateway()
    await gateway.register(worker_id="other", models=["kept"])
    for number in (1, 2, 3, 1, 4, 5):  # the first is the second to have been reported, the last time
        await gateway.register(models=[f"m{number}", "now"])
        await trio.sleep(0.1)
    assert sorted(gateway.fleet.models) == ["kept", "m1", "m3", "m4", "m5", "now"]


async def test_two_that_register_at_once_do_not_pass_each_other(autojump_clock: MockClock) -> None:
    """The younger one was faster; the older one was still asking for its address."""
    slow = trio.Event()

    async def resolve(host: str) -> list[str]:
        if host == "slow":
            await slow.wait()
        return ["127.0.0.1"]

    gateway = Gateway(resolve=resolve)
    told: list[int] = []

    async def older() -> None:
        told.append(await gateway.status(incarnation=9, url="http://slow:1"))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(older)
        await wait_all_tasks_blocked()
        assert await gateway.status(incarnation=10) == 200
        slow.set()
    assert told == [409]
    assert gateway.book.worker.port == 9000


# Heartbeats ---------------------------------------------------------------------------------------------


async def test_only_the_workers_own_secret_counts(autojump_clock: MockClock) -> None:
    gateway = Gateway()
    mine = (await gateway.register()).secret
    theirs = (await gateway.register(worker_id="gpu-2")).secret
    assert gateway.report_status(theirs) == 401
    assert gateway.report_status("") == 401
    assert gateway.report_status("é") == 401
    assert gateway.remove_status(theirs) == 401
    assert gateway.report_status(mine) == 200
    assert gateway.report_status(mine, "gpu-3") == 404
    assert gateway.remove_status(mine, None, "gpu-3") == 404


async def test_a_heartbeat_tells_how_the_worker_is(autojump_clock: MockClock) -> None:
    gateway = Gateway()
    secret = (await gateway.register()).secret
    gateway.report_status(secret, seq=1, slots=2, running=1, queued=1, kv_usage_ratio=0.5, models=["m2"])
    snapshot = gateway.book.snapshot
    assert (snapshot.running, snapshot.queued, snapshot.kv_usage, gateway.book.slots) == (1, 1, 0.5, 2)
    assert gateway.book.models == ("m2",)
    gateway.report_status(secret, seq=2, state="draining")
    assert not gateway.fleet.ready()


async def test_without_heartbeats_a_worker_is_forgotten_and_has_to_register_again(
    autojump_clock: MockClock,
) -> None:
    gateway = Gateway()
    secret = (await gateway.register()).secret
    for _ in range(5):
        await trio.sleep(TTL - 1)
        gateway.sweep()
        assert gateway.report_status(secret) == 200
    await trio.sleep(TTL)
    gateway.sweep()
    assert gateway.fleet.books == {}
    assert gateway.report_status(secret) == 404
    assert await gateway.status() == 200
    assert len(gateway.begun) == 2
    assert gateway.report_status(secret) == 401  # it has a new one


async def test_forgetting_an_old_book_leaves_the_new_worker_alone(autojump_clock: MockClock) -> None:
    gateway = Gateway()
    await gateway.register()
    await trio.sleep(TTL)
    expired = gateway.fleet.expire()
    secret = (await gateway.register(incarnation=11)).secret  # between the two steps of a sweep
    gateway.registrations.forget(expired)
    assert gateway.report_status(secret, incarnation=11) == 200


# Again, and anew ----------------------------------------------------------------------------------------


async def test_the_same_process_that_registers_again_keeps_its_book_and_secret(
    autojump_clock: MockClock,
) -> None:
    gateway = Gateway()
    before = await gateway.register()
    book, released = gateway.book, list[str]()
    request = make_request()
    gateway.fleet.hold(request, book.worker)
    gateway.drain_one("a" * 32 + "-01", released)
    await trio.sleep(10)
    after = await gateway.register(models=["m2", "m3"])
    assert (gateway.book, after.secret) == (book, before.secret)
    assert (book.held, book.models, released) == (1, ("m2", "m3"), [])
    assert gateway.begun == [book]
    await trio.sleep(10)
    gateway.sweep()
    assert gateway.fleet.books  # it counts as news of it


async def test_a_new_incarnation_is_another_process_and_what_drained_in_the_old_one_is_over(
    autojump_clock: MockClock,
) -> None:
    gateway = Gateway()
    before = await gateway.register()
    old, released = gateway.book, list[str]()
    gateway.report_status(before.secret, seq=50, running=4)
    request = make_request()
    slots = gateway.fleet.hold(request, old.worker)
    gateway.drain_one("a" * 32 + "-01", released)
    after = await gateway.register(incarnation=11, slots=2)
    new = gateway.book
    assert new is not old
    assert (old.removed, old.held, new.held, new.slots, new.snapshot.running) == (True, 1, 0, 2, 0)
    assert released == ["a" * 32 + "-01"]
    assert after.secret != before.secret
    assert gateway.report_status(before.secret) == 401
    assert gateway.report_status(after.secret, incarnation=11, seq=1, running=1) == 200
    assert new.snapshot.running == 1
    gateway.fleet.free(request, old.worker, slots, drained=False)
    assert (old.held, new.held) == (0, 0)
    assert gateway.begun == [old, new]


async def test_a_process_that_moved_gets_a_new_book_and_what_drains_at_the_old_address_goes_on(
    autojump_clock: MockClock,
) -> None:
    gateway = Gateway()
    await gateway.register()
    old, released = gateway.book, list[str]()
    gateway.drain_one("a" * 32 + "-01", released)
    await gateway.register(url="http://127.0.0.1:9001")
    assert gateway.book is not old
    assert gateway.book.worker.port == 9001
    assert released == []
    assert gateway.drain.of_worker(old.worker) == ["a" * 32 + "-01"]


async def test_a_worker_that_signs_off_gets_nothing_more_and_finishes_what_it_has(
    autojump_clock: MockClock,
) -> None:
    gateway = Gateway()
    secret = (await gateway.register()).secret
    book, released = gateway.book, list[str]()
    request = make_request()
    slots = gateway.fleet.hold(request, book.worker)
    gateway.drain_one("a" * 32 + "-01", released)
    assert gateway.remove_status(secret, 10) == 200
    assert gateway.fleet.choose(make_request(), frozenset()) is None
    assert (book.held, released) == (1, [])
    assert gateway.report_status(secret) == 404
    gateway.fleet.free(request, book.worker, slots, drained=False)
    assert gateway.remove_status(secret) == 404


# What drains --------------------------------------------------------------------------------------------


def running(exchange: str, attempt: int = 1) -> dict[str, object]:
    return {"id": exchange, "attempt": attempt, "generated": 3}


async def test_a_heartbeat_that_does_not_list_an_attempt_says_that_it_is_over(
    autojump_clock: MockClock,
) -> None:
    gateway = Gateway()
    secret = (await gateway.register()).secret
    released: list[str] = []
    for name in ("a", "b"):
        gateway.drain_one(name * 32 + "-01", released)
    await trio.sleep(0.5)
    gateway.report_status(secret, seq=1)
    assert released == []  # it may have been on its way when the attempt was
    await trio.sleep(1)
    gateway.drain_one("c" * 32 + "-01", released)
    gateway.report_status(secret, seq=2, running=2, requests=[running("b" * 32), running("a" * 32, 2)])
    assert released == ["a" * 32 + "-01"]
    gateway.report_status(secret, seq=3)
    assert released == ["a" * 32 + "-01", "b" * 32 + "-01"]


async def test_an_older_heartbeat_that_comes_late_ends_nothing(autojump_clock: MockClock) -> None:
    gateway = Gateway()
    secret = (await gateway.register()).secret
    released: list[str] = []
    gateway.drain_one("a" * 32 + "-01", released)
    await trio.sleep(2)
    gateway.report_status(secret, seq=2, running=1, requests=[running("a" * 32)])
    assert gateway.report_status(secret, seq=1) == 200
    assert released == []


async def test_a_heartbeat_without_a_list_says_it_by_running_nothing(autojump_clock: MockClock) -> None:
    gateway = Gateway()
    secret = (await gateway.register()).secret
    released: list[str] = []
    gateway.drain_one("a" * 32 + "-01", released)
    await trio.sleep(2)
    unlisted = report(running=1)
    told = {name: getattr(unlisted, name) for name in unlisted.__struct_fields__ if name != "requests"}
    gateway.registrations.report("gpu-1", secret, WorkerReport(**told))
    assert released == []
    gateway.registrations.report("gpu-1", secret, WorkerReport(**{**told, "running": 0, "queued": 1}))
    assert released == []
    gateway.registrations.report("gpu-1", secret, WorkerReport(**{**told, "running": 0}))
    assert released == ["a" * 32 + "-01"]


async def test_operators_are_told_of_a_worker_that_drains_and_signs_off(autojump_clock: MockClock) -> None:
    gateway = Gateway()
    secret = (await gateway.register()).secret
    for seq, state in enumerate(("ready", "ready", "draining", "draining"), 1):
        assert gateway.report_status(secret, seq=seq, state=state) == 200
    assert gateway.remove_status(secret) == 200
    assert gateway.told == ["it says that it is draining", "signed off"]


# What gateways tell each other ---------------------------------------------------------------------------


@asynccontextmanager
async def two_that_share(**settings: Any) -> AsyncIterator[tuple[Gateway, Gateway]]:
    """Gateways that make the same secrets; the other one takes in whom it is told of."""
    one, other = Gateway(make_secret=same_secret), Gateway(make_secret=same_secret, **settings)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(other.registrations.meet)
        yield one, other
        nursery.cancel_scope.cancel()


def same_secret(asked: Registration) -> str:
    return f"{asked.worker_id}-{asked.incarnation}".ljust(48, "x")


async def pass_on(one: Gateway, other: Gateway) -> None:
    for seen in one.registrations.news():
        other.registrations.told(seen.news, seen.left)
    await wait_all_tasks_blocked()


async def test_a_worker_that_reports_to_one_gateway_is_placed_at_by_another_that_was_told(
    autojump_clock: MockClock,
) -> None:
    async with two_that_share() as (one, other):
        secret = (await one.register()).secret
        assert one.registrations.news() == [], "it may not know its secret yet"
        assert one.report_status(secret, slots=6, models=["m1", "m2"]) == 200
        await pass_on(one, other)
        worker = other.fleet.choose(make_request(), frozenset())
        assert worker is not None
        assert (worker.api_key, worker.address, worker.labels) == (secret, "127.0.0.1", frozenset({"gpu"}))
        assert (other.book.size, other.book.models) == (6, ("m1", "m2"))
        assert other.begun == [other.book]
        assert other.registrations.news() == [], "what it only heard, it does not tell"
        # What is heard later counts at once; what others say is believed as long as they say it.
        assert one.report_status(secret, seq=2, state="draining") == 200
        await pass_on(one, other)
        assert other.book.snapshot.state == "draining"
        await trio.sleep(TTL - 1)
        await pass_on(one, other)
        other.sweep()
        assert other.fleet.books
        await trio.sleep(1)
        assert one.registrations.news() == []
        other.sweep()
        assert other.fleet.books == {}


async def test_what_a_worker_says_here_counts_over_what_others_were_told(autojump_clock: MockClock) -> None:
    async with two_that_share() as (one, other):
        secret = (await one.register()).secret
        assert one.report_status(secret, seq=1) == 200
        await other.register()
        assert other.report_status(secret, seq=2, running=3) == 200
        await pass_on(one, other)
        assert (other.book.snapshot.running, other.book.free) == (3, 1)
        await trio.sleep(5)
        assert one.report_status(secret, seq=3) == 200
        await pass_on(one, other)
        assert (other.book.snapshot.running, other.book.free) == (0, 4), "it says nothing here any more"
        other.fleet.probed(other.book, True)
        assert one.report_status(secret, seq=4, state="draining") == 200
        await pass_on(one, other)
        other.fleet.probed(other.book, True)
        assert other.book.snapshot.state == "draining", "a probe can not tell that"


async def test_a_worker_that_signs_off_at_one_gateway_or_came_back_younger_is_gone_at_others(
    autojump_clock: MockClock,
) -> None:
    async with two_that_share() as (one, other):
        secret = (await one.register()).secret
        one.report_status(secret)
        await pass_on(one, other)
        old = other.book
        secret = (await one.register(incarnation=11)).secret
        one.report_status(secret, incarnation=11)
        await pass_on(one, other)
        assert old.removed
        assert (other.book.worker.api_key, other.book.snapshot.incarnation) == (secret, 11)
        assert one.remove_status(secret, 11) == 200
        await pass_on(one, other)
        assert other.fleet.books == {}
        assert await other.status(incarnation=10) == 409
        await pass_on(one, other)
        assert [seen.news.gone for seen in one.registrations.news()] == [True]
        await trio.sleep(TTL)
        assert one.registrations.news() == []


async def test_while_others_can_not_be_heard_what_they_told_is_believed_and_what_was_heard_here_is_not(
    autojump_clock: MockClock,
) -> None:
    async with two_that_share() as (one, other):
        one.report_status((await one.register()).secret)
        other.report_status((await other.register(worker_id="here")).secret, "here")
        await pass_on(one, other)
        for _ in range(40):
            await trio.sleep(1)
            other.registrations.go_on_believing()
            other.sweep()
        assert list(other.fleet.books) == ["gpu-1"]
        await trio.sleep(TTL)
        other.sweep()
        assert other.fleet.books == {}


async def test_whom_a_gateway_would_not_let_register_it_does_not_take_in_either(
    autojump_clock: MockClock,
) -> None:
    slow = trio.Event()

    async def resolve(host: str) -> list[str]:
        if host == "slow":
            await slow.wait()
        return await as_written(host)

    async with two_that_share(resolve=resolve) as (one, other):
        one.registrations = Gateway(allowed=networks("0.0.0.0/0")).registrations
        for number, host in enumerate(("10.0.0.1", "127.0.0.1")):
            told = await one.register(worker_id=f"w{number}", url=f"http://{host}:9000")
            one.report_status(told.secret, f"w{number}")
        for _ in range(2):
            await pass_on(one, other)
        assert list(other.fleet.books) == ["w1"]
        assert len(other.told) == 1
        other.registrations.told(WorkerNews(registration(url="http://slow:1"), "ready", 1), TTL)
        await trio.sleep(6)
        assert list(other.fleet.books) == ["w1"]
        await other.register(incarnation=12)
        other.registrations.told(WorkerNews(registration(), "ready", 1), TTL)
        await wait_all_tasks_blocked()
        assert other.book.snapshot.state == "starting", "another incarnation's news"


async def test_of_those_that_may_not_be_here_only_so_many_are_remembered(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trio_gateway.fleet._registrations.MOST_REMEMBERED", 1)
    async with two_that_share(allowed=()) as (_, other):
        for name in ("w1", "w2", "w2", "w1"):
            other.registrations.told(WorkerNews(registration(worker_id=name), "ready", 1), TTL)
            await wait_all_tasks_blocked()
        assert len(other.told) == 3
