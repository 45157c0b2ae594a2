"""A channel whose buffer is capped in bytes, between one pump and one writer.

Trio's memory channel counts items; one token may be 2 bytes or 20 kB, so a
count bounds nothing. This one parks the sender while the next block would take
the buffer over its cap. That stops the pump, which stops reading the engine's
socket: back pressure reaches the engine without a message of its own.

The cap of each channel is ``min(own cap, what the pool has left)``: nobody may hold
more than is still there for others (the dynamic threshold of Choudhury and Hahne,
IEEE/ACM ToN 6(2), 1998). So all channels together stay inside the pool, by at most one
block over, and with N that are full, a newcomer still finds about 1/(N + 1) of it. A
block larger than the cap passes when the buffer is empty; refusing it would deadlock a
stream that is legal.

What waits may be joined into less (`Joiner`), so that a slow receiver has less to
catch up with.

One sender, one receiver, no clones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Final, NamedTuple, Protocol, Self

import trio

from ..units import KiB

SMALL: Final = 2 * KiB  # bytes up to which blocks that come close to each other wait as one
AT_ONCE: Final = 0.25  # seconds between those; it is as much too old as the newest may be taken for
_STALE: Final = 64  # entries of those who do not wait any more, beside as many as wait


@dataclass(slots=True)
class _Waiter:
    """Who waits for bytes of a pool.

    Attributes:
        level: bytes that have to be free before it goes on.
        size: bytes of them that it then takes.
        lot: where it is parked; None once it is not any more.
    """

    level: int
    size: int
    lot: trio.lowlevel.ParkingLot | None


class BufferPool:
    """Bytes that all exchanges together may hold.

    When some come free, those go on who need the least to be free, which among channels are
    the emptiest, and no more than there is room for: a thousand may wait, and each write
    to a slow client gives some back.

    Args:
        total: bound in bytes (``delivery.total_buffer_bytes``).
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0
        self._peak = 0
        self._numbers = count()
        self._waiters: list[tuple[int, int, _Waiter]] = []  # a heap, with some that do not wait any more
        self._waiting = 0
        self._first: Gathering | None = None
        self._others: dict[Gathering, _Waiter] = {}  # gatherings that wait, in order

    @property
    def left(self) -> int:
        """Bytes that nobody holds; never negative."""
        return max(self.total - self.used, 0)

    @property
    def waiting(self) -> int:
        """How many wait for bytes to come free."""
        return self._waiting

    def take(self, size: int) -> None:
        """Count ``size`` bytes as held."""
        self.used += size
        self._peak = max(self._peak, self.used)

    def give(self, size: int) -> None:
        """Count ``size`` bytes as free again, and wake those who wait for them."""
        self.used -= size
        waiters, left = self._waiters, self.left
        while waiters and (waiters[0][2].lot is None or waiters[0][0] <= left):
            waiter = heappop(waiters)[2]
            if waiter.lot is not None:
                left -= waiter.size
                self._wake(waiter)

    def resize(self, total: int) -> None:
        """Have another bound from now on. What is held stays, and counts."""
        self.total = total
        self.give(0)

    def lets_over(self, gathering: Gathering) -> bool:
        """Whether this one may go on although there is no room: the first that asked, until it is through."""
        if self._first is None:
            self._first = gathering
        return self._first is gathering

    def through(self, gathering: Gathering) -> None:
        """Let another one go over the bound. Idempotent."""
        if self._first is gathering:
            self._first = next(iter(self._others), None)
            if self._first is not None:
                self._wake(self._others[self._first])

    def _wake(self, waiter: _Waiter) -> None:
        if waiter.lot is not None:
            waiter.lot.unpark_all()
            waiter.lot = None

    def has_calmed(self, worth: int) -> bool:
        """Whether at least ``worth`` bytes were held since this was last true, and nearly all came free."""
        calmed = self._peak >= worth and self.used <= self._peak // 8
        if calmed:
            self._peak = self.used
        return calmed

    async def wait_free(
        self, lot: trio.lowlevel.ParkingLot, size: int, level: int, gathering: Gathering | None = None
    ) -> None:
        """Park on ``lot``, to be woken also when there is room; whoever wakes looks again.

        Args:
            size: bytes that are to be taken.
            level: bytes that have to be free before, at least ``size``.
            gathering: that waits, and may also be let over the bound.
        """
        waiter = _Waiter(level, size, lot)
        self._waiting += 1
        if len(self._waiters) > 2 * self._waiting + _STALE:
            self._waiters = [entry for entry in self._waiters if entry[2].lot is not None]
            heapify(self._waiters)
        heappush(self._waiters, (level, next(self._numbers), waiter))
        if gathering is not None:
            self._others[gathering] = waiter
        try:
            await lot.park()
        finally:
            waiter.lot = None
            self._waiting -= 1
            if gathering is not None:
                del self._others[gathering]


class Gathering:
    """Bytes of one answer that is read whole before its client gets any of it.

    Several of them, each half read, could fill the pool and wait for each other
    for ever. So the first that finds no room goes on until it is whole, and the
    others wait: the pool is over its bound by at most one answer.

    Leaving the ``with`` block gives all bytes back.

    Attributes:
        held: bytes right now.
    """

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool
        self._lot = trio.lowlevel.ParkingLot()
        self.held = 0

    async def take(self, size: int) -> None:
        """Wait until ``size`` more bytes may be held, then hold them."""
        await trio.lowlevel.checkpoint_if_cancelled()
        while size > self._pool.left and not self._pool.lets_over(self):
            await self._pool.wait_free(self._lot, size, size, self)
        self._pool.take(size)
        self.held += size

    def __enter__(self) -> Self:
        """Hold nothing yet."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Give all back."""
        held, self.held = self.held, 0
        self._pool.give(held)
        self._pool.through(self)


@dataclass(frozen=True, slots=True)
class ChannelStatistics:
    """What a channel holds right now, in bytes, and since when (Trio seconds)."""

    used: int
    cap: int
    oldest_since: float | None
    sender_waiting: bool
    closed: bool


class Joiner(Protocol):
    """Says how events that wait can become fewer."""

    def join(self, last: bytes, block: bytes) -> Iterable[tuple[bytes, int, bool]]:
        """Answer what is to wait in the place of ``last`` and of ``block``, which follows it.

        Each as its bytes, how many events were joined to the one in them, and whether
        something of ``last`` is in them.
        """


class Block(NamedTuple):
    """What waits together.

    Attributes:
        since: when the oldest of it was put.
        more: events that were joined to the one in it.
    """

    data: bytes
    since: float
    more: int


class Taken(NamedTuple):
    """Where a block ends in the bytes that were taken, and what is known of it.

    Attributes:
        end: offset behind its last byte, of this part.
        since: when the oldest of it was put.
        more: events that were joined to the one that ends here; 0 for a part that is not the last.
    """

    end: int
    since: float
    more: int


class ByteChannel:
    """Blocks of whole events on their way from the pump to the client's writer.

    Args:
        cap: bytes that may wait (``delivery.buffer_bytes``).
        pool: shared with all other channels.
        joiner: joins blocks that are put to what waits; None: they stay as they are.
    """

    def __init__(self, cap: int, pool: BufferPool, joiner: Joiner | None = None) -> None:
        self._cap = cap
        self._pool = pool
        self._joiner = joiner
        # Most exchanges never wait for their client: what only that needs is made by then.
        self._blocks: deque[Block] | tuple[()] = ()
        self._offset = 0  # of the first block, already taken
        self._used = 0
        self._closed = False
        self._poked = False
        self._room: trio.lowlevel.ParkingLot | None = None
        self._filled: trio.lowlevel.ParkingLot | None = None

    @property
    def cap(self) -> int:
        """Bytes that may wait, as far as it is this channel's to say."""
        return self._cap

    @property
    def used(self) -> int:
        """Bytes that wait."""
        return self._used

    @property
    def closed(self) -> bool:
        """Whether nothing will be added any more."""
        return self._closed

    @property
    def oldest_since(self) -> float | None:
        """When the oldest waiting block was put; None while nothing waits."""
        return self._blocks[0].since if self._blocks else None

    def statistics(self) -> ChannelStatistics:
        """Tell what the channel holds."""
        return ChannelStatistics(self._used, self._cap, self.oldest_since, bool(self._room), self._closed)

    async def put(self, block: bytes) -> None:
        """Add a block of whole events once there is room. A cancelled put adds nothing.

        The block waits from now on, though it may not be counted yet.
        """
        since = trio.current_time()
        await self.wait_room(len(block))
        begun = self._offset if len(self._blocks) == 1 else 0
        if self._joiner is None or not self._blocks or begun or not block:
            self._add(block, since)
        else:
            self._join(self._joiner, block, since)

    async def wait_room(self, size: int) -> None:
        """Wait until ``size`` bytes fit, here and into the pool, or nothing waits here at all."""
        await trio.lowlevel.checkpoint_if_cancelled()
        while self._used and (level := self._used + size) > min(self._cap, self._pool.left):
            if level > self._cap:
                await self._room_lot().park()
            else:
                await self._pool.wait_free(self._room_lot(), size, level)

    def _room_lot(self) -> trio.lowlevel.ParkingLot:
        if self._room is None:
            self._room = trio.lowlevel.ParkingLot()
        return self._room

    def put_nowait(self, block: bytes) -> None:
        """Add a block, as it is, whatever the cap says: a last error event, or an answer already counted."""
        self._add(block, trio.current_time())

    def _add(self, block: bytes, since: float) -> None:
        if block:
            self._append(block, since)
            self._used += len(block)
            self._pool.take(len(block))
            _wake(self._filled)

    def _append(self, block: bytes, since: float) -> None:
        """Put a block behind the others, or what is small to what came just before it.

        A block costs 130 bytes that nobody counts: for tokens that is half of what they are themselves.
        """
        if self._blocks:
            last = self._blocks[-1]
            small = len(last.data) + len(block) <= SMALL
            if small and not last.more and since - last.since <= AT_ONCE:
                self._blocks[-1] = Block(last.data + block, last.since, 0)
                return
        if isinstance(self._blocks, tuple):
            self._blocks = deque()
        self._blocks.append(Block(block, since, 0))

    def _join(self, joiner: Joiner, block: bytes, since: float) -> None:
        """Put a block behind what waits, and let it become part of that."""
        assert not isinstance(self._blocks, tuple)
        last = self._blocks.pop()
        before = len(last.data)
        after = 0
        for data, more, old in joiner.join(last.data, block):
            self._blocks.append(Block(data, last.since if old else since, more))
            after += len(data)
        if after >= before:
            self._used += after - before
            self._pool.take(after - before)
        else:
            self._give_back(before - after)
        _wake(self._filled)

    def take(self, most: int) -> bytes:
        """Take up to ``most`` bytes: several small blocks, or a part of a big one. ``b""``: none wait."""
        return self.take_dated(most)[0]

    def take_dated(self, most: int) -> tuple[bytes, list[Taken]]:
        """Take as `take` does; answers also where in that each block ends."""
        ends: list[Taken] = []
        parts: list[bytes] = []
        size = 0
        while self._blocks and size < most:
            block, since, more = self._blocks[0]
            left = len(block) - self._offset
            if size and left > most - size:
                break  # keep whole blocks together where that costs nothing
            part = block[self._offset : self._offset + most - size] if left > most else block[self._offset :]
            parts.append(part)
            size += len(part)
            self._offset += len(part)
            whole = self._offset == len(block)
            ends.append(Taken(size, since, more if whole else 0))
            if whole:
                self._blocks.popleft()
                self._offset = 0
        self._give_back(size)
        return parts[0] if len(parts) == 1 else b"".join(parts), ends

    def keep_begun_event(self) -> None:
        """Drop what waits, but for the rest of an event that was already taken in part."""
        rest = b""
        if self._blocks and self._offset:
            block = self._blocks[0].data
            end = block.find(b"\n\n", max(self._offset - 1, 0))
            begun = block[self._offset - 2 : self._offset] != b"\n\n"
            rest = block[self._offset : end + 2] if begun and end >= 0 else b""
        self.clear()
        self.put_nowait(rest)

    def clear(self) -> None:
        """Drop all that waits."""
        if self._blocks:
            self._blocks.clear()
            self._offset = 0
            self._give_back(self._used)

    def close(self) -> None:
        """Say that nothing will be added; what waits can still be taken. Idempotent."""
        self._closed = True
        _wake(self._filled)

    def poke(self) -> None:
        """Wake the receiver although nothing was added."""
        self._poked = True
        _wake(self._filled)

    async def wait(self) -> None:
        """Wait until something can be taken, the channel is closed, or it was poked."""
        await trio.lowlevel.checkpoint_if_cancelled()
        while not (self._blocks or self._closed or self._poked):
            if self._filled is None:
                self._filled = trio.lowlevel.ParkingLot()
            await self._filled.park()
        self._poked = False

    def _give_back(self, size: int) -> None:
        self._used -= size
        if size:
            self._pool.give(size)
            _wake(self._room)


def _wake(lot: trio.lowlevel.ParkingLot | None) -> None:
    if lot is not None:
        lot.unpark_all()
