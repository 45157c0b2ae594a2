"""Asks the other processes for a request that is not here: its owner may have come to any of them.

One connection and one line of JSON for each question, at sockets that nobody else can reach.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import msgspec
import trio

from ._place import Place

LIMIT: Final = 1.0  # seconds for all of them; one that hangs is as one that has it not
LONGEST: Final = 64 * 1024  # bytes of a line

Answer = dict[str, Any] | None
Look = Callable[[str, str, bool], Answer]


class Owners:
    """See the module's docstring. `run` is one task of the gateway.

    Args:
        look: answers how a request of a tenant stands here, after it was cancelled if that is asked; None:
            it is not here.
    """

    def __init__(self, place: Place, look: Look) -> None:
        self._place = place
        self._look = look

    async def ask(self, request_id: str, tenant: str, cancel: bool) -> Answer:
        """Answer how a request stands at another process; None: it is at none of them."""
        found: list[dict[str, Any]] = []
        question = msgspec.json.encode([request_id, tenant, cancel]) + b"\n"

        async def one(number: int) -> None:
            with contextlib.suppress(OSError, trio.BrokenResourceError, msgspec.DecodeError):
                async with await trio.open_unix_socket(self._place.owners_path(number)) as stream:
                    await stream.send_all(question)
                    answer: Answer = msgspec.json.decode(await _line(stream))
                    if answer is not None:
                        found.append(answer)

        with trio.move_on_after(LIMIT):
            async with trio.open_nursery() as nursery:
                for number in range(self._place.of):
                    if number != self._place.number:
                        nursery.start_soon(one, number)
        return found[0] if found else None

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
                request_id, tenant, cancel = msgspec.json.decode(await _line(stream))
                await stream.send_all(msgspec.json.encode(self._look(request_id, tenant, cancel)) + b"\n")


async def _line(stream: trio.SocketStream) -> bytes:
    data = b""
    while not data.endswith(b"\n") and len(data) <= LONGEST and (more := await stream.receive_some()):
        data += more
    return data
