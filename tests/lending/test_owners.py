"""Whoever comes to another process than the one that has what it wants is found, or handed over."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from trio_gateway.lending import Owners, Place
from trio_gateway.testing import until

KEPT = ("r1", "acme", "k1")


class Process:
    """One of several processes; what it adopted stands in `adopted`."""

    def __init__(self, place: Place, *kept: tuple[str, str, str | None]) -> None:
        self.adopted: list[tuple[trio.SocketStream, bytes]] = []
        self.owners = Owners(
            place,
            lambda request_id, tenant, cancel: (
                {"here": place.number} if (request_id, tenant) in known else None
            ),
            lambda *asked: asked in kept,
            lambda stream, begun: self.adopted.append((stream, begun)),
        )
        known = {each[:2] for each in kept}


@asynccontextmanager
async def three(folder: Path, *kept: tuple[str, str, str | None]) -> AsyncIterator[list[Process]]:
    """Run three processes, of which the last keeps something."""
    places = [Place(number, 3, "shared", (), -1, -1, str(folder), "") for number in range(3)]
    found = [Process(place, *(kept if place.number == 2 else ())) for place in places]
    async with trio.open_nursery() as nursery:
        for each in found:
            await nursery.start(each.owners.run)
        yield found
        nursery.cancel_scope.cancel()


async def test_a_question_is_answered_by_whoever_has_the_request(tmp_path: Path) -> None:
    async with three(tmp_path, KEPT) as found:
        assert await found[0].owners.ask("r1", "acme", cancel=False) == {"here": 2}
        assert await found[0].owners.ask("r1", "other", cancel=False) is None


@pytest.mark.parametrize("size", [1, 300_000])
async def test_a_connection_is_handed_over_with_all_that_was_read_of_it(tmp_path: Path, size: int) -> None:
    client, accepted = socket.socketpair()
    begun = bytes(range(256)) * (size // 256) + b"x"
    async with three(tmp_path, KEPT) as found:
        with client:
            with accepted:
                assert await found[0].owners.hand_over(*KEPT, accepted.fileno(), begun)
            with trio.fail_after(5):
                await until(lambda: bool(found[2].adopted))
            ((stream, read),) = found[2].adopted
            assert read == begun
            async with stream:
                await stream.send_all(b"served")
                assert client.recv(10) == b"served"
            assert client.recv(10) == b""


@pytest.mark.parametrize("asked", [("r2", "acme", "k1"), ("r1", "other", "k1"), ("r1", "acme", None)])
async def test_nobody_is_handed_over_for_what_is_not_theirs(
    tmp_path: Path, asked: tuple[str, str, str | None]
) -> None:
    client, accepted = socket.socketpair()
    with client, accepted:
        async with three(tmp_path, KEPT) as found:
            assert not await found[0].owners.hand_over(*asked, accepted.fileno(), b"x")
            assert not await found[2].owners.hand_over(*KEPT, accepted.fileno(), b"x")  # it asks others alone
            assert not any(each.adopted for each in found)
        accepted.send(b"still here")
        assert client.recv(10) == b"still here"


async def test_a_process_that_does_not_answer_is_as_one_that_keeps_nothing(tmp_path: Path) -> None:
    async with three(tmp_path) as found:
        (tmp_path / "owners-1.sock").unlink()
        with socket.socket() as accepted:
            assert not await found[0].owners.hand_over(*KEPT, accepted.fileno(), b"x")
