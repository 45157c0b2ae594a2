"""The live feed, on a fake clock: the newest snapshot for each who looks, and every ending once."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import trio
from starlette.types import Message

from tests.admin.door import OPERATOR, TOKENS, VIEWER, code_of, door, expect_shape
from trio_gateway.admin import Access, Metrics, make_admin_app
from trio_gateway.admin._feed import MOST_FEEDS, Feed
from trio_gateway.errors import Refused
from trio_gateway.testing import FakeAdminPort, RawClient, until

SCOPE: dict[str, Any] = {
    "type": "http",
    "http_version": "1.1",
    "method": "GET",
    "path": "/admin/v1/feed",
    "raw_path": b"/admin/v1/feed",
    "query_string": b"",
    "root_path": "",
    "scheme": "http",
    "headers": [(b"host", b"localhost")],
    "client": ("127.0.0.1", 1),
    "server": ("127.0.0.1", 2),
}


def never(*_: object) -> Any:
    raise AssertionError


class Watcher:
    """Looks at a feed without a socket, and can stop taking what it is told.

    Attributes:
        events: names and data of the events that came.
        takes: what each writing waits for.
        headers: that it sends beside the others.
        over: its answer has ended.
    """

    def __init__(self, port: FakeAdminPort, access: Access | None = None) -> None:
        self.app = make_admin_app(port, access or Access(), Metrics(never, "text/plain"), never)
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.takes = trio.Event()
        self.takes.set()
        self.head: Message = {}
        self.left = trio.Event()
        self.headers: list[tuple[bytes, bytes]] = []
        self.over = False

    async def look(self) -> None:
        sent = False

        async def receive() -> Message:
            nonlocal sent
            if not sent:
                sent = True
                return {"type": "http.request", "body": b"", "more_body": False}
            await self.left.wait()
            return {"type": "http.disconnect"}

        await self.app(SCOPE | {"headers": [*SCOPE["headers"], *self.headers]}, receive, self.take)
        self.over = True

    async def take(self, message: Message) -> None:
        await self.takes.wait()
        if message["type"] == "http.response.start":
            self.head = message
        for event in message.get("body", b"").decode().split("\n\n"):
            if event.startswith("event: "):
                name, value = event.removeprefix("event: ").split("\ndata: ")
                self.events.append((name, json.loads(value)))

    def of(self, name: str) -> list[dict[str, Any]]:
        return [value for kind, value in self.events if kind == name]

    async def until(self, holds: Callable[[], bool]) -> None:
        with trio.fail_after(60):
            await until(holds)


async def test_a_snapshot_comes_at_once_and_then_every_second(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    watcher = Watcher(FakeAdminPort())
    nursery.start_soon(watcher.look)
    await trio.sleep(0.5)
    assert [name for name, _ in watcher.events] == ["snapshot"]
    expect_shape(watcher.events[0][1], "Snapshot")
    assert dict(watcher.head["headers"])[b"content-type"] == b"text/event-stream"
    assert b"content-length" not in dict(watcher.head["headers"])
    await trio.sleep(3)
    assert [value["at"] for value in watcher.of("snapshot")] == [1, 2, 3, 4]
    nursery.cancel_scope.cancel()


async def test_all_who_look_share_one_snapshot(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    port = FakeAdminPort()
    first, second = Watcher(port), Watcher(port)
    second.app = first.app
    nursery.start_soon(first.look)
    nursery.start_soon(second.look)
    await trio.sleep(2.5)
    assert first.of("snapshot") == second.of("snapshot")
    assert port.snapshots == 3
    nursery.cancel_scope.cancel()


async def test_a_snapshot_can_be_asked_for_and_is_that_of_the_feed(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    port = FakeAdminPort()
    watcher = Watcher(port)
    nursery.start_soon(watcher.look)
    await trio.sleep(1.5)
    for _ in range(2):
        told: list[bytes] = []

        async def take(message: Message) -> None:
            await trio.lowlevel.checkpoint()
            told.append(message.get("body", b""))  # noqa: B023

        async def receive() -> Message:
            await trio.lowlevel.checkpoint()
            return {"type": "http.request", "body": b"", "more_body": False}

        path = "/admin/v1/snapshot"
        await watcher.app({**SCOPE, "path": path, "raw_path": path.encode()}, receive, take)
        assert json.loads(b"".join(told)) == watcher.of("snapshot")[-1]
    assert port.snapshots == 2
    nursery.cancel_scope.cancel()


async def test_each_ending_comes_once_and_those_before_do_not(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    port = FakeAdminPort()
    watcher = Watcher(port)
    nursery.start_soon(watcher.look)
    await trio.sleep(1.5)
    assert watcher.of("ending") == []
    port.ended += 2
    await trio.sleep(1)
    port.ended += 1
    await trio.sleep(2)
    assert [row["id"] for row in watcher.of("ending")] == [f"{number:032x}" for number in (4, 5, 6)]
    expect_shape(watcher.of("ending")[0], "Ending")
    nursery.cancel_scope.cancel()


async def test_who_is_slow_gets_the_newest_and_nothing_waits_for_it(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    port = FakeAdminPort()
    slow, other = Watcher(port), Watcher(port)
    other.app = slow.app
    nursery.start_soon(slow.look)
    nursery.start_soon(other.look)
    await trio.sleep(0.5)
    slow.takes = trio.Event()
    await trio.sleep(10)
    assert len(other.of("snapshot")) == 11
    port.ended += 500
    slow.takes.set()
    await trio.sleep(1)
    # The one that was on its way, and the newest; of the endings the latest hundred.
    assert [value["at"] for value in slow.of("snapshot")] == [1, 2, 12]
    assert len(slow.of("ending")) == 100
    nursery.cancel_scope.cancel()


async def test_who_leaves_is_told_no_more(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    port = FakeAdminPort()
    watcher = Watcher(port)
    ended = trio.Event()

    async def look() -> None:
        await watcher.look()
        ended.set()

    nursery.start_soon(look)
    await trio.sleep(0.5)
    watcher.left.set()
    with trio.fail_after(0.1):
        await ended.wait()
    await trio.sleep(5)
    assert port.snapshots == 1


async def test_a_token_that_is_taken_away_ends_its_feeds_and_no_others(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    access = Access(TOKENS)
    eyes, ops = Watcher(FakeAdminPort(), access), Watcher(FakeAdminPort(), access)
    eyes.headers = [(b"authorization", f"Bearer {VIEWER}".encode())]
    ops.headers = [(b"authorization", f"Bearer {OPERATOR}".encode())]
    nursery.start_soon(eyes.look)
    nursery.start_soon(ops.look)
    await trio.sleep(1.5)
    access.admit(each for each in TOKENS if each.id != "eyes")
    await trio.sleep(2)
    assert (len(eyes.of("snapshot")), eyes.over) == (2, True)
    assert (len(ops.of("snapshot")), ops.over) == (4, False)
    nursery.cancel_scope.cancel()


def test_only_so_many_feeds_are_open() -> None:
    feed = Feed(FakeAdminPort(), Access(), most=1)
    feed.enter()
    with pytest.raises(Refused) as caught:
        feed.answer()
    assert caught.value.problem.code == "feed_limit_reached"
    feed.leave()
    feed.answer()
    assert feed.open == 0


async def test_more_feeds_than_may_be_open_are_refused_and_questions_are_answered() -> None:
    async with door() as opened, trio.open_nursery() as nursery:
        for _ in range(MOST_FEEDS):
            client = await RawClient.connect(opened.address)
            nursery.start_soon(hold, client)
            auth = (("authorization", f"Bearer {VIEWER}"),)
            await client.request("GET", "/admin/v1/feed", headers=auth, host="localhost")
            with trio.fail_after(10):
                assert (await client.read_head()).status == 200
        refused = await opened.ask("GET", "/admin/v1/feed", VIEWER)
        assert code_of(refused) == (503, "feed_limit_reached")
        assert refused.header("retry-after") == "1"
        assert (await opened.ask("HEAD", "/admin/v1/feed", VIEWER)).status == 503
        assert (await opened.ask("GET", "/admin/v1/workers", VIEWER)).status == 200
        nursery.cancel_scope.cancel()


async def hold(client: RawClient) -> None:
    with client:
        await trio.sleep_forever()


async def test_a_head_of_the_feed_ends_at_once() -> None:
    async with door() as opened:
        answer = await opened.ask("HEAD", "/admin/v1/feed", VIEWER)
        assert (answer.status, answer.header("content-type")) == (200, "text/event-stream")
        assert code_of(await opened.ask("GET", "/admin/v1/feed?x=1", VIEWER)) == (400, "unknown_field")
