"""Asks the other processes for a request that is not here: its owner may have come to any of them.

One connection and one line of JSON for each question, at sockets that nobody else can reach. Who wants to go
on with an answer that another process keeps is handed over to it, with its connection: the descriptor is
sent, and what was read of it.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final, Protocol

import msgspec
import trio

from ..errors import Problem, Refused
from ._place import Place

LIMIT: Final = 1.0  # seconds for all of them
LONGEST: Final = 64 * 1024  # bytes of a line
HEAD_LONGEST: Final = 1024 * 1024  # bytes of a connection that were read before it was handed over

Answer = dict[str, Any] | None
Look = Callable[[str, str, bool], Answer]
Keeps = Callable[[str, str, str | None], bool]
Hear = Callable[[trio.SocketStream, Any], Awaitable[bool | None]]


class Question(msgspec.Struct, array_like=True, frozen=True):
    """What one process asks another.

    Attributes:
        about: whether to cancel the request; or the key of who is handed over.
        size: bytes of what was read of a connection that is to be handed over; None: none is.
    """

    request_id: str
    tenant: str
    about: bool | str | None
    size: int | None = None


_read_question: Final = msgspec.json.Decoder(Question).decode


class Adopter(Protocol):
    """Who serves connections that other processes accepted."""

    def admit(self) -> bool:
        """Take a permit for one connection more, if there is any."""

    def dismiss(self) -> None:
        """Give it back: the connection did not come."""

    def adopt(self, sock: socket.socket, begun: bytes) -> None:
        """Serve a connection for which there is a permit, and own it; told what was read of it."""


class Owners:
    """See the module's docstring. `run` is one task of the gateway.

    Args:
        look: answers how a request of a tenant stands here, after it was cancelled if that is asked; None:
            it is not here.
        keeps: whether an answer of a tenant and a key, by the request's id, is kept here.
        adopter: serves who is handed over.
    """

    def __init__(self, place: Place, look: Look, keeps: Keeps, adopter: Adopter) -> None:
        self._place = place
        self._look = look
        self._keeps = keeps
        self._adopter = adopter

    async def ask(self, request_id: str, tenant: str, cancel: bool) -> Answer:
        """Answer how a request stands at another process; None: it is at none of them.

        Raises:
            Refused: one did not say in time whether it has it.
        """
        found: Answer = None

        async def hear(stream: trio.SocketStream, said: Any) -> bool | None:  # noqa: ASYNC124
            nonlocal found
            if not (said is None or isinstance(said, dict)):
                return None
            if said is not None:
                found = said
            return said is not None

        if not await self._ask_others(Question(request_id, tenant, cancel), hear):
            raise Refused(
                Problem.of("queue_full", "a process that may have this request does not answer now")
            )
        return found

    async def hand_over(
        self, request_id: str, tenant: str, key_id: str | None, connection: int, begun: bytes
    ) -> bool:
        """Hand a connection to the process that keeps an answer; False: none does, and nothing was done.

        Args:
            connection: descriptor; the caller closes its own, and does nothing else with it.
            begun: what was read of it and is to be served.

        Raises:
            Refused: the process that keeps it has no room for a connection, or one did not say in time
                whether it does; nothing was done.
        """
        handed = full = False

        async def hear(stream: trio.SocketStream, said: Any) -> bool | None:
            nonlocal handed, full
            full |= said is None
            if said is True and not handed:
                await _send(stream, connection, begun)
                handed = True  # from here on it is the other's, whatever comes
                return True
            return False if said is False else None

        if not await self._ask_others(Question(request_id, tenant, key_id, len(begun)), hear):
            why = (
                "the process that has this answer takes no connection now"
                if full
                else "a process that may have this answer does not answer now"
            )
            raise Refused(Problem.of("queue_full", why))
        return handed

    async def _ask_others(self, question: Question, hear: Hear) -> bool:
        """Ask all others at once, until one has it; False: none was found, and some may have it.

        Args:
            hear: told what one said; answers whether that one has it, and None if that is not known.
        """
        line = msgspec.json.encode(question) + b"\n"
        unsure = set(range(self._place.of)) - {self._place.number}
        with trio.move_on_after(LIMIT):
            async with trio.open_nursery() as nursery:

                async def one(number: int) -> None:
                    try:
                        async with await trio.open_unix_socket(self._place.owners_path(number)) as stream:
                            await stream.send_all(line)
                            has_it = await hear(stream, msgspec.json.decode(await _line(stream)))
                            if has_it is False:
                                unsure.discard(number)
                            elif has_it:
                                unsure.clear()
                                nursery.cancel_scope.cancel()
                    except (FileNotFoundError, ConnectionRefusedError):
                        unsure.discard(number)  # there is no such process now
                    except (OSError, trio.BrokenResourceError, msgspec.DecodeError):
                        pass  # too many ask it, or it ended meanwhile, or descriptors are short

                for number in tuple(unsure):
                    nursery.start_soon(one, number)
        return not unsure

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Answer the others, for ever."""
        path = self._place.owners_path(self._place.number)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # of the process that had this place before
        sock = trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_STREAM)
        with sock:
            await sock.bind(path)
            sock.listen(64)
            async with trio.open_nursery() as nursery:
                serving = partial(trio.serve_listeners, self._answer, [trio.SocketListener(sock)])
                await nursery.start(serving)
                task_status.started()

    async def _answer(self, stream: trio.SocketStream) -> None:
        with contextlib.suppress(OSError, trio.BrokenResourceError, msgspec.DecodeError):
            with trio.move_on_after(LIMIT):
                asked = _read_question(await _line(stream))
                if asked.size is not None:
                    await self._take_over(stream, asked, asked.size)
                else:
                    found = self._look(asked.request_id, asked.tenant, asked.about is True)
                    await stream.send_all(msgspec.json.encode(found) + b"\n")

    async def _take_over(self, stream: trio.SocketStream, asked: Question, size: int) -> None:
        key_id = asked.about if isinstance(asked.about, str) else None
        kept = size <= HEAD_LONGEST and self._keeps(asked.request_id, asked.tenant, key_id)
        if not (kept and self._adopter.admit()):
            await stream.send_all(b"null\n" if kept else b"false\n")
            return
        handed = None
        try:
            await stream.send_all(b"true\n")
            handed = await _receive(stream, size)
        finally:
            if handed is None:
                self._adopter.dismiss()
        if handed is not None:
            self._adopter.adopt(*handed)


async def _line(stream: trio.SocketStream) -> bytes:
    data = b""
    while not data.endswith(b"\n") and len(data) <= LONGEST and (more := await stream.receive_some()):
        data += more
    return data


async def _send(stream: trio.SocketStream, connection: int, begun: bytes) -> None:
    """Send a descriptor with one byte, then what was read of it; with the last of that it is the peer's."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [connection]))]
    await stream.socket.sendmsg([b"+"], rights)
    await stream.send_all(begun)


async def _receive(stream: trio.SocketStream, size: int) -> tuple[socket.socket, bytes] | None:
    """Receive what `_send` sends; None: it broke off. What comes is the caller's."""
    _, ancillary, _, _ = await stream.socket.recvmsg(1, socket.CMSG_SPACE(array.array("i").itemsize))
    descriptors = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(data)
    if not descriptors:
        return None
    sock = socket.socket(fileno=descriptors[0])
    try:
        begun = b""
        while len(begun) < size and (more := await stream.receive_some(size - len(begun))):
            begun += more
        if len(begun) < size:
            sock.close()
            return None
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock, begun
