"""What workers say is said to all processes; one that hangs, or words that are none, hold up nobody."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import pytest
import trio
from trio.testing import MockClock

from tests.admin.test_workers import PATH, TOKEN, registration
from tests.e2e.serving import parse_address
from tests.processes.test_operations import place_in
from trio_gateway.admin import serve_admin
from trio_gateway.processes._child import ASK_LIMIT, Child, NoAnswer
from trio_gateway.processes._internal import Said, WorkerDoor, make_internal_app
from trio_gateway.telemetry import Log
from trio_gateway.testing import Json, RawClient, ScriptedEngine, open_engine

TTL: Final = 5.0  # seconds
INTERVAL: Final = 1.0  # seconds
TAKEN: Final = {"secret": "the-secret-of-gpu-1", "heartbeat_interval": INTERVAL, "ttl": TTL}
REGISTERS: Final = Said("POST", PATH, {}, msgspec.json.encode(registration()))
BEATS: Final = Said("PUT", f"{PATH}/gpu-1", {}, b"{}")


class Hearing(Child):
    """A process that says when it heard something."""

    def __init__(self, folder: Path, number: int) -> None:
        super().__init__(place_in(folder, number))
        self.hears_workers = True
        self.hangs = False
        self.heard: list[float] = []

    async def pass_on(
        self, method: str, target: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, bytes]:
        if self.hangs:
            await trio.sleep(ASK_LIMIT)
            raise NoAnswer("it hangs")
        self.heard.append(trio.current_time())
        return 200, msgspec.json.encode(TAKEN)


async def test_a_process_that_hangs_keeps_no_worker_from_being_believed_by_the_others(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    one, other = children = [Hearing(tmp_path, number) for number in range(2)]
    log = Log(io.StringIO())
    door = WorkerDoor(lambda: children, TTL, INTERVAL, TOKEN, log)
    assert await door.pass_on(None, REGISTERS) is not None
    other.hangs = True
    for _ in range(5):
        assert await door.pass_on("gpu-1", BEATS) is not None
        await trio.sleep(INTERVAL)
    between = [after - before for before, after in zip(one.heard, one.heard[1:], strict=False)]
    assert 2 * max(between) < TTL  # one of them may be lost
    other.hangs = False
    assert await door.pass_on("gpu-1", BEATS) is not None
    assert len(other.heard) == 2
    await trio.to_thread.run_sync(log.close)
    for child in children:
        await child.close()


@asynccontextmanager
async def door_at(folder: Path) -> AsyncIterator[tuple[RawClient, ScriptedEngine]]:
    """A connection to the listener of a gateway of one process, and that."""
    child = Child(place_in(folder, 0))
    child.hears_workers = True
    log = Log(io.StringIO())
    app = make_internal_app(WorkerDoor(lambda: [child], TTL, INTERVAL, TOKEN, log))
    bugs: list[BaseException] = []
    pages = {"/": (Json(TAKEN),)}
    async with (
        open_engine(pages=pages, socket_path=Path(child.place.internal_path)) as process,
        trio.open_nursery() as nursery,
    ):
        serve = partial(serve_admin, app, ("127.0.0.1:0",), lambda where, bug: bugs.append(bug))
        (address,) = await nursery.start(serve)
        with trio.fail_after(10):
            client = await RawClient.connect(parse_address(address))
            with client:
                yield client, process
        nursery.cancel_scope.cancel()
    await child.close()
    await trio.to_thread.run_sync(log.close)
    assert bugs == []


async def ask(
    client: RawClient, start: bytes, secret: bytes, body: bytes = b"", *, size: int | None = None
) -> int:
    """Make a request of bytes as they are; answers the status."""
    lines = (
        b"%b HTTP/1.1",
        b"host: a",
        b"content-type: \xe9",
        b"authorization: Bearer %b",
        b"content-length: %d",
    )
    head = b"\r\n".join([*lines, b"", b""])
    await client.send(head % (start, secret, len(body) if size is None else size) + body)
    return (await client.read_to_end()).status


@pytest.mark.parametrize(
    "name",
    [b"%00", b"a%0d%0ab", b"%ff", b"a%3fb", b"'" * 30_000],
    ids=["null", "line", "byte", "query", "long"],
)
async def test_nobody_is_known_by_what_is_no_workers_name(tmp_path: Path, name: bytes) -> None:
    async with door_at(tmp_path) as (client, process):
        assert await ask(client, b"PUT %b/%b" % (PATH.encode(), name), b"the-secret-of-gpu-1") == 404
        assert process.page_requests == []


@pytest.mark.parametrize("secret", [b"another", b"\xe9\xff"], ids=["another", "beyond ASCII"])
@pytest.mark.parametrize("start", [f"POST {PATH}", f"PUT {PATH}/gpu-1", f"DELETE {PATH}/gpu-1"])
async def test_who_may_say_nothing_is_told_so_before_it_has_said_it(
    tmp_path: Path, start: str, secret: bytes
) -> None:
    async with door_at(tmp_path) as (client, process):
        registers = f"POST {PATH}".encode()
        assert await ask(client, registers, TOKEN.encode(), msgspec.json.encode(registration())) == 200
        assert await ask(client, start.encode(), secret, size=1024) == 401
        assert len(process.page_requests) == 1


async def test_a_worker_that_registered_is_passed_on_whatever_its_other_headers_are(tmp_path: Path) -> None:
    async with door_at(tmp_path) as (client, process):
        registers = f"POST {PATH}".encode()
        assert await ask(client, registers, TOKEN.encode(), msgspec.json.encode(registration())) == 200
        assert await ask(client, f"PUT {PATH}/gpu-1".encode(), b"the-secret-of-gpu-1", b"{}") == 200
        assert [each.method for each in process.page_requests] == ["POST", "PUT"]
