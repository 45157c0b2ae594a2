"""Names of workers: asked at every connection, and any of their addresses will do."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio

from tests.e2e.serving import serving
from trio_gateway.testing import ScriptedEngine, chat_answer, chat_request, open_engine


class Resolver(trio.abc.HostnameResolver):
    """Answers every name with the addresses that stand in ``addresses`` at that moment."""

    def __init__(self) -> None:
        self.addresses: list[tuple[str, int]] = []
        self.asked = 0

    async def getaddrinfo(  # type: ignore[override]
        self, host: bytes | None, port: object, family: int = 0, type: int = 0, proto: int = 0, flags: int = 0
    ) -> list[tuple[int, int, int, str, Any]]:
        await trio.lowlevel.checkpoint()
        self.asked += 1
        return [
            (socket.AF_INET6 if ":" in ip else socket.AF_INET, socket.SOCK_STREAM, 0, "", (ip, number))
            for ip, number in self.addresses
        ]

    async def getnameinfo(self, sockaddr: Any, flags: int) -> tuple[str, str]:  # noqa: ASYNC124
        raise NotImplementedError


@pytest.fixture
async def resolver() -> AsyncIterator[Resolver]:
    mine = Resolver()
    before = trio.socket.set_custom_hostname_resolver(mine)
    yield mine
    trio.socket.set_custom_hostname_resolver(before)


def port_of(engine: ScriptedEngine) -> int:
    return int(engine.url.rpartition(":")[2])


async def test_a_name_is_asked_anew_for_every_connection(resolver: Resolver) -> None:
    closing = (("connection", "close"),)
    async with (
        open_engine(chat_answer("old")) as old,
        open_engine(chat_answer("new")) as new,
        serving("http://engine.test:9") as gateway,
    ):
        for engine, said in ((old, b"old"), (new, b"new")):
            resolver.addresses = [("127.0.0.1", port_of(engine))]
            answer = await gateway.ask(chat_request(stream=False, headers=closing))
            assert said in answer.body
            gateway.gateway.connections.close()
        assert resolver.asked == 2


async def test_an_address_that_refuses_gives_way_to_the_next(resolver: Resolver) -> None:
    """As `localhost` that means ::1 first, while the engine listens on 127.0.0.1 only."""
    async with open_engine(chat_answer("ok")) as engine, serving("http://engine.test:9") as gateway:
        resolver.addresses = [("127.0.0.1", 1), ("127.0.0.1", port_of(engine))]
        assert (await gateway.ask(chat_request(stream=False))).status == 200
        assert (await gateway.settled()).attempts == 1


async def test_an_address_that_swallows_packets_gives_way_to_the_next(resolver: Resolver) -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        silent = full.getsockname()
        # Whoever fills the backlog makes the kernel drop further handshakes.
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(silent)
        async with open_engine(chat_answer("ok")) as engine, serving("http://engine.test:9") as gateway:
            resolver.addresses = [silent, ("127.0.0.1", port_of(engine))]
            assert (await gateway.ask(chat_request(stream=False))).status == 200
        for filler in fillers:
            filler.close()


async def test_a_name_without_an_address_is_a_worker_that_can_not_be_reached(resolver: Resolver) -> None:
    async with serving("http://engine.test:9") as gateway:
        answer = await gateway.ask(chat_request(stream=False))
        assert answer.status == 502
        assert b"engine.test" not in answer.body
