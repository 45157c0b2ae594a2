"""The slots of an engine, as its agent counts them: taken before any work, free when the engine let go."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from ..wire import RunningRequest

if TYPE_CHECKING:
    from ._engine import EngineStream


class DuplicateAttempt(Exception):
    """The attempt holds a slot already."""


class Slot:
    """The right to one place in the engine.

    Attributes:
        number: from 0; the lowest that was free.
        credential: name of the gateway that sent the attempt.
        stream: the engine's side, once it has taken the request.
        cancelled: nobody wants the answer any more.
        paused: the engine waits for the reader.
    """

    def __init__(self, number: int, request_id: str, attempt: int, credential: str) -> None:
        self.number = number
        self.request_id = request_id
        self.attempt = attempt
        self.credential = credential
        self.stream: EngineStream | None = None
        self.cancelled = False
        self.paused = False
        self._scope: trio.CancelScope | None = None

    @property
    def generated(self) -> int:
        """Tokens that the engine generated for it so far."""
        return 0 if self.stream is None else self.stream.generated

    def ends_with(self, scope: trio.CancelScope) -> None:
        """Name what serves the attempt and ends when it is cancelled."""
        self._scope = scope

    def cancel(self) -> None:
        """Stop the engine and whoever serves the attempt. Idempotent, never waits."""
        self.cancelled = True
        if self.stream is not None:
            self.stream.cancel()
        if self._scope is not None:
            self._scope.cancel(reason="the gateway cancelled the attempt")


class Slots:
    """All slots of one engine."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, int], Slot] = {}
        self._emptied = trio.lowlevel.ParkingLot()

    def __len__(self) -> int:
        """How many are held, by attempts that run and by those whose engine has not let go."""
        return len(self._held)

    def take(self, request_id: str, attempt: int, credential: str) -> Slot:
        """Take the lowest free slot; whether there is one was judged before.

        Raises:
            DuplicateAttempt: nothing was taken.
        """
        key = (request_id, attempt)
        if key in self._held:
            raise DuplicateAttempt
        taken = {slot.number for slot in self._held.values()}
        number = next(n for n in range(len(taken) + 1) if n not in taken)
        slot = self._held[key] = Slot(number, request_id, attempt, credential)
        return slot

    def give_back(self, slot: Slot) -> bool:
        """Free a slot; answers whether it was held, so that a second time is no harm."""
        held = self._held.get((slot.request_id, slot.attempt)) is slot
        if held:
            del self._held[slot.request_id, slot.attempt]
            if not self._held:
                self._emptied.unpark_all()
        return held

    def find(self, request_id: str, attempt: int) -> Slot | None:
        """Answer the slot that an attempt holds."""
        return self._held.get((request_id, attempt))

    def running(self) -> list[RunningRequest]:
        """Name all attempts that hold a slot."""
        return [RunningRequest(s.request_id, s.attempt, s.generated, s.paused) for s in self._held.values()]

    def cancel_all(self) -> None:
        """Cancel every attempt."""
        for slot in list(self._held.values()):
            slot.cancel()

    async def wait_none(self) -> None:
        """Wait until no slot is held."""
        await trio.lowlevel.checkpoint_if_cancelled()
        while self._held:
            await self._emptied.park()
