"""Accepting: some at a time, never more than there are permits, and on after a lack of descriptors."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager

import trio
import trio.testing

from trio_gateway.edge import AcceptLoop, open_listeners
from trio_gateway.lending import Crowd
from trio_gateway.testing import until

LIMIT = 20


class Door:
    """Holds every connection until it is told to let go."""

    def __init__(self) -> None:
        self.inside = 0
        self.served = 0
        self.most = 0
        self.complaints: list[OSError] = []
        self.let_go = trio.Event()

    async def serve(self, sock: socket.socket) -> None:
        self.inside += 1
        self.most = max(self.most, self.inside)
        await self.let_go.wait()
        sock.send(b"!")
        self.inside -= 1
        self.served += 1


@asynccontextmanager
async def accepting(door: Door, permits: int) -> AsyncIterator[tuple[trio.SocketListener, str, int]]:
    (listener,) = await open_listeners(("127.0.0.1:0",))
    host, port = listener.socket.getsockname()[:2]
    with trio.fail_after(LIMIT):
        async with trio.open_nursery() as nursery:
            loop = AcceptLoop(trio.Semaphore(permits), door.serve, door.complaints.append)
            nursery.start_soon(loop.run, listener, nursery)  # noqa: ASYNC113 - the backlog waits
            yield listener, host, port
            nursery.cancel_scope.cancel()
    listener.socket.close()


def connected(host: str, port: int, count: int) -> list[socket.socket]:
    return [socket.create_connection((host, port), timeout=LIMIT) for _ in range(count)]


async def test_no_more_are_served_than_there_are_permits_and_the_others_afterwards() -> None:
    door = Door()
    async with accepting(door, 7) as (_, host, port):
        clients = connected(host, port, 50)
        await until(lambda: door.inside == 7)
        door.let_go.set()
        await until(lambda: door.served == 50)
        assert door.most == 7
        for client in clients:
            assert client.recv(1) == b"!"
            client.close()


class Steps(trio.abc.Instrument):
    """Counts the steps of the accept loop."""

    def __init__(self) -> None:
        self.count = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        """See trio.abc.Instrument."""
        self.count += "AcceptLoop.run" in task.name


async def test_without_permits_it_rests_however_many_are_waiting() -> None:
    door, steps = Door(), Steps()
    async with accepting(door, 1) as (_, host, port):
        clients = connected(host, port, 5)
        await until(lambda: door.inside == 1)
        await trio.testing.wait_all_tasks_blocked()
        trio.lowlevel.add_instrument(steps)
        for _ in range(100):
            await trio.lowlevel.checkpoint()
        trio.lowlevel.remove_instrument(steps)
        door.let_go.set()
        await until(lambda: door.served == 5)
        for client in clients:
            client.close()
    assert steps.count == 0


async def test_a_rush_is_taken_in_few_rounds() -> None:
    door = Door()
    async with accepting(door, 1000) as (_, host, port):
        clients = connected(host, port, 60)
        for _ in range(12):  # one each would need sixty
            await trio.lowlevel.checkpoint()
        assert door.inside == 60
        for client in clients:
            client.close()
        door.let_go.set()


async def test_without_descriptors_it_complains_once_and_goes_on_when_there_are_some() -> None:
    door = Door()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with accepting(door, 100) as (_, host, port):
        clients = connected(host, port, 1)
        await until(lambda: door.inside == 1)
        late = socket.socket()
        late.settimeout(LIMIT)
        highest = late.fileno()
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
        try:
            late.connect((host, port))
            await until(lambda: bool(door.complaints))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        await until(lambda: door.inside == 2)
        assert len(door.complaints) == 1
        door.let_go.set()
        await until(lambda: door.served == 2)
        for client in (*clients, late):
            assert client.recv(1) == b"!"
            client.close()


async def test_it_ends_with_its_listener() -> None:
    door = Door()
    (listener,) = await open_listeners(("127.0.0.1:0",))
    with trio.fail_after(LIMIT):
        async with trio.open_nursery() as nursery:
            loop = AcceptLoop(trio.Semaphore(1), door.serve, door.complaints.append)
            nursery.start_soon(loop.run, listener, nursery)
            await trio.testing.wait_all_tasks_blocked()
            listener.socket.close()


async def test_who_accepts_at_the_same_socket_as_another_lets_it_first_while_that_has_fewer(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Two processes, as far as the kernel is concerned: each waits at a descriptor of its own.

    The clock stands while either has something to do: on a busy machine a courtesy could end unused.
    """
    descriptor = Crowd.make(2)
    doors, crowds = [Door(), Door()], [Crowd(descriptor, 2, number) for number in range(2)]
    (listener,) = await open_listeners(("127.0.0.1:0",))
    other = socket.socket(fileno=os.dup(listener.socket.fileno()))
    listeners = [listener, trio.SocketListener(trio.socket.from_stdlib_socket(other))]
    with ExitStack() as held:
        held.callback(os.close, descriptor)
        for each, crowd in zip(listeners, crowds, strict=True):
            held.callback(each.socket.close)
            held.callback(crowd.close)
        host, port = listener.socket.getsockname()[:2]
        for client in connected(host, port, 20):
            held.callback(client.close)
        async with trio.open_nursery() as nursery:
            for door, crowd, each in zip(doors, crowds, listeners, strict=True):
                crowd.enter()
                loop = AcceptLoop(trio.Semaphore(100), door.serve, door.complaints.append, crowd)
                nursery.start_soon(loop.run, each, nursery)
            with trio.fail_after(LIMIT):
                await until(lambda: doors[0].inside + doors[1].inside == 20)
                assert max(door.inside for door in doors) <= 11  # who waited in vain takes one
                for door in doors:
                    door.let_go.set()
                await until(lambda: doors[0].served + doors[1].served == 20)
                await until(lambda: not crowds[0].ahead() and not crowds[1].ahead())
            nursery.cancel_scope.cancel()
