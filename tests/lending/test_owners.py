"""Whoever comes to another process than the one that has what it wants is found, or handed over."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from trio_gateway.errors import Refused
from trio_gateway.lending import Owners, Place
from trio_gateway.testing import until

KEPT = ("r1", "acme", "k1")


class Process:
    """One of several processes; what it adopted stands in `adopted`, and `permits` are for more."""

    def __init__(self, place: Place, *kept: tuple[str, str, str | None]) -> None:
        self.adopted: list[tuple[socket.socket, bytes]] = []
        self.permits = 1
        self.owners = Owners(
            place,
            lambda request_id, tenant, cancel: (
                {"here": place.number} if (request_id, tenant) in known else None
            ),
            lambda *asked: asked in kept,
            self,
        )
        known = {each[:2] for each in kept}

    def admit(self) -> bool:
        self.permits -= 1
        if self.permits < 0:
            self.permits = 0
            return False
        return True

    def dismiss(self) -> None:
        self.permits += 1

    def adopt(self, sock: socket.socket, begun: bytes) -> None:
        self.adopted.append((sock, begun))


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
            ((adopted, read),) = found[2].adopted
            assert read == begun
            with adopted:
                adopted.send(b"served")
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


async def test_a_process_that_is_not_there_is_as_one_that_keeps_nothing(tmp_path: Path) -> None:
    async with three(tmp_path) as found:
        (tmp_path / "owners-1.sock").unlink()
        assert await found[0].owners.ask("r1", "acme", cancel=False) is None
        with socket.socket() as accepted:
            assert not await found[0].owners.hand_over(*KEPT, accepted.fileno(), b"x")


async def test_a_process_that_hangs_does_not_keep_others_from_being_asked(tmp_path: Path) -> None:
    client, accepted = socket.socketpair()
    async with three(tmp_path, KEPT) as found:
        (tmp_path / "owners-1.sock").unlink()
        with client, accepted, socket.socket(socket.AF_UNIX) as hanging:
            hanging.bind(str(tmp_path / "owners-1.sock"))
            hanging.listen()
            assert await found[0].owners.ask("r1", "acme", cancel=False) == {"here": 2}
            assert await found[0].owners.hand_over(*KEPT, accepted.fileno(), b"x")
            with trio.fail_after(5):
                await until(lambda: bool(found[2].adopted))
            found[2].adopted[0][0].close()


async def test_who_wants_an_answer_of_a_process_without_a_permit_is_told_to_come_again(
    tmp_path: Path,
) -> None:
    client, accepted = socket.socketpair()
    with client, accepted:
        async with three(tmp_path, KEPT) as found:
            found[2].permits = 0
            with pytest.raises(Refused, match="queue_full") as refused:
                await found[0].owners.hand_over(*KEPT, accepted.fileno(), b"x")
            assert "the process that has this answer takes no connection" in refused.value.problem.message
            assert (found[2].adopted, found[2].permits) == ([], 0)
            assert not await found[0].owners.hand_over("r2", "acme", "k1", accepted.fileno(), b"x")


async def test_while_a_process_hangs_nobody_knows_that_a_request_or_an_answer_is_not_there(
    tmp_path: Path,
) -> None:
    async with three(tmp_path) as found:
        (tmp_path / "owners-1.sock").unlink()
        with socket.socket() as accepted, socket.socket(socket.AF_UNIX) as hanging:
            hanging.bind(str(tmp_path / "owners-1.sock"))
            hanging.listen()
            with pytest.raises(Refused, match="queue_full"):
                await found[0].owners.ask("r1", "acme", cancel=True)
            with pytest.raises(Refused, match="queue_full") as refused:
                await found[0].owners.hand_over(*KEPT, accepted.fileno(), b"x")
            assert "a process that may have this answer does not answer" in refused.value.problem.message


async def test_a_process_that_too_many_ask_may_have_an_answer(tmp_path: Path) -> None:
    path = str(tmp_path / "owners-1.sock")
    async with three(tmp_path) as found:
        (tmp_path / "owners-1.sock").unlink()
        with contextlib.ExitStack() as stack:
            accepted = stack.enter_context(socket.socket())
            hanging = stack.enter_context(socket.socket(socket.AF_UNIX))
            hanging.bind(path)
            hanging.listen(0)
            errors = [0]
            while errors[-1] == 0:
                asking = stack.enter_context(socket.socket(socket.AF_UNIX))
                asking.setblocking(False)
                errors.append(asking.connect_ex(path))
            assert errors[-1] == errno.EAGAIN  # its backlog is full
            with pytest.raises(Refused, match="queue_full"):
                await found[0].owners.ask("r1", "acme", cancel=False)
            with pytest.raises(Refused, match="queue_full"):
                await found[0].owners.hand_over(*KEPT, accepted.fileno(), b"x")


async def test_a_process_that_ends_while_it_is_asked_may_have_an_answer(tmp_path: Path) -> None:
    async def end(stream: trio.SocketStream) -> None:
        await stream.receive_some()

    async with three(tmp_path) as found:
        (tmp_path / "owners-1.sock").unlink()
        with trio.socket.socket(socket.AF_UNIX) as sock, socket.socket() as accepted:
            await sock.bind(str(tmp_path / "owners-1.sock"))
            sock.listen()
            async with trio.open_nursery() as nursery:
                await nursery.start(trio.serve_listeners, end, [trio.SocketListener(sock)])
                with pytest.raises(Refused, match="queue_full"):
                    await found[0].owners.ask("r1", "acme", cancel=False)
                with pytest.raises(Refused, match="queue_full"):
                    await found[0].owners.hand_over(*KEPT, accepted.fileno(), b"x")
                nursery.cancel_scope.cancel()


async def test_a_permit_is_given_back_if_the_connection_does_not_come(tmp_path: Path) -> None:
    async with three(tmp_path, KEPT) as found:
        async with await trio.open_unix_socket(str(tmp_path / "owners-2.sock")) as stream:
            await stream.send_all(b'["r1","acme","k1",5]\n')
            assert await stream.receive_some() == b"true\n"
            assert found[2].permits == 0
        with trio.fail_after(5):
            await until(lambda: found[2].permits == 1)


@pytest.mark.parametrize(
    "line",
    [
        b"5\n",
        b"[]\n",
        b"{}\n",
        b'["a"]\n',
        b'["a","b",1,2]\n',
        b'["a","b",true,"c"]\n',
        b"\xff\n",
        b"\n",
        b"",
    ],
)
async def test_what_is_no_question_is_not_answered(tmp_path: Path, line: bytes) -> None:
    async with three(tmp_path, KEPT) as found:
        async with await trio.open_unix_socket(str(tmp_path / "owners-2.sock")) as stream:
            await stream.send_all(line)
            await stream.send_eof()
            assert await stream.receive_some() == b""
        assert await found[0].owners.ask("r1", "acme", cancel=False) == {"here": 2}
