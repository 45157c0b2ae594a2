"""The public doors over a rig's fakes, put together as the gateway does it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import trio

from tests.exchange.rig import Rig
from trio_gateway.edge import (
    Authenticator,
    Door,
    DoorSettings,
    GenerateSettings,
    Generator,
    HangupWatch,
    HttpServer,
    KeepTerms,
    ServerLimits,
    SocketLimits,
    Sockets,
    SocketSettings,
    SocketStreams,
    TokenSettings,
    UnplacedBytes,
)
from trio_gateway.tenancy import Keyring
from trio_gateway.units import KiB, MiB

LIMITS: Final = ServerLimits(16, 64 * KiB, 100, 5.0, MiB, 5.0, 5.0, MiB)
KEPT: Final = 8 * KiB  # bytes of a stream that can be resumed
WINDOW: Final = 0.01  # seconds that it can be


class Doors:
    """Everything that clients connect to."""

    def __init__(self, rig: Rig, watch: HangupWatch, nursery: trio.Nursery) -> None:
        self._rig = rig
        self._nursery = nursery
        keyring = Keyring([], [])
        authenticator = Authenticator(keyring)
        self.room: Final = UnplacedBytes(MiB)
        self.generator: Final = Generator(
            rig.workers.fleet,
            rig.parts,
            GenerateSettings(60.0, 60.0, 10_000, 60.0, 0.01, KeepTerms(KEPT, WINDOW)),
            rig.live,
            rig.pool,
            self._spawn,
        )
        self.sockets: Final = Sockets(
            SocketSettings(
                SocketLimits(MiB, 30.0, 30.0, 30.0), TokenSettings(8, MiB, KEPT, WINDOW), 5.0, 60.0
            ),
            authenticator,
            keyring,
            SocketStreams(
                self.generator, rig.parts, rig.live, rig.books, self.room, lambda: None, self._spawn
            ),
            rig.pool,
        )
        door = Door(
            DoorSettings("sweep", 0),
            authenticator,
            self.generator,
            rig.books,
            lambda: {"m1": "m1"},
            rig.live,
            lambda: None,
            lambda: None,
            rig.parts.rates,
            self.sockets,
        )
        self.server: Final = HttpServer(door, watch, LIMITS, self._note_bug, lambda: False, None, self.room)
        rig.kept = lambda: self.sockets.kept.bytes + self.generator.kept.bytes

    def left_over(self) -> list[str]:
        """Name what is still held."""
        figures = {
            "open connections": self.server.open,
            "open sockets": len(self.sockets),
            "unplaced bytes": self.room.used,
            "bugs": len(self._rig.bugs),
        }
        return [f"{name}: {value}" for name, value in figures.items() if value] + self._rig.left_over()

    async def forget(self) -> None:
        """Wait until nothing can be resumed any more."""
        while len(self.sockets.kept) + len(self.generator.kept):
            self.sockets.sweep()
            self.generator.kept.sweep()
            await trio.sleep(WINDOW / 4)

    def _spawn(self, task: Callable[[], Awaitable[None]]) -> None:
        async def contained() -> None:
            try:
                await task()
            except Exception as exc:
                self._note_bug("stream", exc)

        self._nursery.start_soon(contained)

    def _note_bug(self, where: str, exc: BaseException) -> None:
        self._rig.bugs.append((where, exc))
