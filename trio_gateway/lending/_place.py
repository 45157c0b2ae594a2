"""What one of several processes knows of its place among them: told by the supervisor that starts it."""

from __future__ import annotations

import hashlib
import hmac
import os
import select
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

import msgspec
import trio

from ..units import Part
from ._crowd import Crowd

VARIABLE: Final = "TRIO_GATEWAY_PLACE"
ORPHAN_LIMIT: Final = 5.0  # seconds for a process without supervisor to end by itself


class Place(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The place of a process.

    Attributes:
        number: from 0 on; one that is started again has the same.
        of: how many there are.
        capacity: whether slots are lent by the supervisor, split by number, or granted by a cluster's store.
        listeners: descriptors of the public sockets, which all processes share.
        control: descriptor of the socket to the supervisor; its end is the end of the process.
        crowd: descriptor of the memory in which all count their connections.
        folder: of the gateway's sockets and the configuration in force, which nobody else can enter.
        secret: known to the supervisor and its processes.
    """

    number: int
    of: int
    capacity: Literal["shared", "split", "cluster"]
    listeners: tuple[int, ...]
    control: int
    crowd: int
    folder: str
    secret: str

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Place | None:
        """Read it from the variables of a process; None: it has no supervisor."""
        text = environ.get(VARIABLE)
        return None if text is None else msgspec.json.decode(text, type=cls)

    def variables(self) -> dict[str, str]:
        """Answer the variables for the process."""
        return {VARIABLE: msgspec.json.encode(self).decode()}

    @property
    def part(self) -> Part:
        """What it has of everything that is split by number."""
        return Part(self.number, self.of)

    @property
    def shares(self) -> bool:
        """Whether slots are lent."""
        return self.capacity == "shared"

    @property
    def admin_path(self) -> str:
        """Of the socket for what operators ask."""
        return str(Path(self.folder) / f"admin-{self.number}.sock")

    @property
    def internal_path(self) -> str:
        """Of the socket for what workers say that register."""
        return str(Path(self.folder) / f"internal-{self.number}.sock")

    def owners_path(self, number: int) -> str:
        """Of the socket at which a process is asked for requests by their ids."""
        return str(Path(self.folder) / f"owners-{number}.sock")

    @property
    def copy_path(self) -> str:
        """Of the configuration file's text that is in force."""
        return str(Path(self.folder) / "gateway.toml")

    @property
    def digest(self) -> bytes:
        """SHA-256 of the secret, by which the supervisor is known."""
        return hashlib.sha256(self.secret.encode()).digest()

    def end_with_supervisor(self) -> None:
        """See to it that this process ends when its supervisor has, even if its loop hangs.

        A thread waits for that, at no cost. Who hangs would keep the public sockets, and whoever starts
        next could not have their addresses.
        """
        control = os.dup(self.control)
        os.set_inheritable(control, False)
        threading.Thread(target=_end_after, args=(control,), name="supervisor-gone", daemon=True).start()

    def open_control(self) -> socket.socket:
        """Take the socket to the supervisor."""
        sock = socket.socket(fileno=self.control)
        sock.setblocking(False)
        os.set_inheritable(sock.fileno(), False)
        return sock

    def open_crowd(self) -> Crowd:
        """Take the memory in which all count their connections."""
        try:
            return Crowd(self.crowd, self.of, self.number)
        finally:
            os.close(self.crowd)

    def open_listeners(self) -> list[trio.SocketListener]:
        """Take the public sockets."""
        found = []
        for number in self.listeners:
            sock = socket.socket(fileno=number)
            os.set_inheritable(number, False)
            sock.setblocking(False)
            found.append(trio.SocketListener(trio.socket.from_stdlib_socket(sock)))
        return found

    def secret_for(self, *words: object) -> str:
        """Make a secret for some words, the same in every process."""
        said = msgspec.json.encode([str(word) for word in words])
        return hmac.new(self.secret.encode(), said, hashlib.sha256).hexdigest()[:48]


def _end_after(control: int) -> None:
    """End this process a while after the other end of a socket was closed."""
    poll = select.poll()
    poll.register(control, select.POLLRDHUP)
    poll.poll()
    time.sleep(ORPHAN_LIMIT)
    os._exit(1)
