"""One attempt beside its engine: admitted a second time, streamed under a cap, let go of.

Two tasks and a byte channel: the pump takes records from the engine, the writer
gives lines to the socket. A full channel pauses an engine that can pause; one
that can not is cancelled when its reader takes nothing for too long. However an
attempt ends, its slot is held until the engine has let go.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import trio

from ..contract import OPERATIONS
from ..flow import BufferPool, ByteChannel
from ..units import KiB
from ..wire import (
    READER_STALLED,
    REJECTIONS,
    Accepted,
    AnswerForm,
    End,
    Failed,
    OutOfGrammar,
    Ping,
    Record,
    RecordWriter,
    Rejection,
    ReleasedRequest,
    WorkerReport,
    write_message,
)
from ._admission import why_not
from ._connection import Connection, Gone, Refusal
from ._engine import AgentEngine, EngineStream, Rejected, Released, Work
from ._releases import Releases
from ._settings import AgentSettings
from ._slots import DuplicateAttempt, Slot, Slots

LATE: Final = 1.0  # seconds beyond the deadline: the gateway, which has the same one, ends first
LAST_WORD: Final = 30.0  # seconds for a reader that was given up to take the reason; its slot is free before
WRITE_SIZE: Final = 16 * KiB
STALLED: Final = Failed(READER_STALLED, "the reader took nothing for too long", "never")


class Generations:
    """Serves attempts.

    Args:
        report: how the worker is right now, without its requests.
        slots_in_all: places in the engine.
        keepers: nursery in which slots are held until the engine lets go.
    """

    def __init__(
        self,
        engine: AgentEngine,
        settings: AgentSettings,
        slots: Slots,
        releases: Releases,
        report: Callable[[], WorkerReport],
        keepers: trio.Nursery,
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._slots = slots
        self._releases = releases
        self._report = report
        self._keepers = keepers
        self._pool = BufferPool(settings.total_buffer_bytes)
        self._serving = 0
        self._served = trio.lowlevel.ParkingLot()

    @property
    def buffered(self) -> int:
        """Bytes that wait for readers."""
        return self._pool.used

    async def wait_none(self) -> None:
        """Wait until every answer is with its reader: slots are free before that."""
        await trio.lowlevel.checkpoint_if_cancelled()
        while self._serving:
            await self._served.park()

    async def serve(self, work: Work, credential: str, connection: Connection) -> None:
        """Answer one attempt: a rejection, or its stream.

        Raises:
            Refusal: the attempt holds a slot already.
            Gone: the gateway left before it heard a rejection.
        """
        report, status = self._report(), self._engine.status()
        code = why_not(
            status,
            report.state,
            slots=report.slots,
            # An engine may know of more than its agent: what was given up while it was being sent.
            held=max(len(self._slots), status.running),
            model=work.model,
            remaining=work.remaining,
        )
        if code is not None:
            await self._reject(code, connection)
            return
        try:
            slot = self._slots.take(work.request_id, work.attempt, credential)
        except DuplicateAttempt:
            raise Refusal(409, "the attempt is being served") from None
        code = None
        self._serving += 1
        try:
            with trio.CancelScope(deadline=trio.current_time() + work.remaining + LATE) as scope:
                slot.ends_with(scope)
                code = await self._run(slot, work, connection)
            if scope.cancelled_caught:
                connection.close()
        finally:
            self._let_go(slot)
            self._serving -= 1
            if not self._serving:
                self._served.unpark_all()
        if code is not None:
            await self._reject(code, connection)

    async def _reject(self, code: str, connection: Connection) -> None:
        body = write_message(Rejection(code, self._report()))
        await connection.respond(REJECTIONS[code], body)

    async def _run(self, slot: Slot, work: Work, connection: Connection) -> str | None:
        """Have the engine do it while somebody listens; answers the engine's rejection, if it is one."""
        code: str | None = None
        async with trio.open_nursery() as nursery:

            async def leave_with_the_reader() -> None:
                await connection.watch()
                connection.close()
                nursery.cancel_scope.cancel(reason="the gateway left")

            nursery.start_soon(leave_with_the_reader)
            try:
                slot.stream = await self._engine.open(work)
            except Rejected as rejected:
                code = rejected.code
            else:
                await Generation(
                    self._engine.can_pause, self._settings, self._pool, slot, work, connection, self._free
                ).run()
            nursery.cancel_scope.cancel(reason="the attempt is over")
        return code

    def _let_go(self, slot: Slot) -> None:
        """Give the slot back when the engine has let go, whoever is still there."""
        if slot.stream is None:
            self._free(slot, Released(0, kv_released=True))
        elif self._slots.find(slot.request_id, slot.attempt) is slot:
            slot.stream.cancel()
            self._keepers.start_soon(self._keep, slot, slot.stream)

    async def _keep(self, slot: Slot, stream: EngineStream) -> None:
        self._free(slot, await stream.wait_released())

    def _free(self, slot: Slot, released: Released) -> None:
        if self._slots.give_back(slot):
            told = ReleasedRequest(slot.request_id, slot.attempt, released.generated, released.kv_released)
            self._releases.push(slot.credential, told)


class Generation:
    """One attempt that the engine has taken.

    Args:
        free: gives the slot back, with what the engine let go of.
    """

    def __init__(
        self,
        can_pause: bool,
        settings: AgentSettings,
        pool: BufferPool,
        slot: Slot,
        work: Work,
        connection: Connection,
        free: Callable[[Slot, Released], None],
    ) -> None:
        assert slot.stream is not None
        self._stream = slot.stream
        self._can_pause = can_pause
        self._settings = settings
        self._slot = slot
        self._connection = connection
        self._free = free
        operation = next(each for each in OPERATIONS if each.name == work.operation)
        self._writer = RecordWriter(AnswerForm.of(operation, work.stream), work.choices)
        self._channel = ByteChannel(settings.buffer_bytes, pool)
        self._pumping = trio.CancelScope()
        self._sending = False
        self._put_at = self._taken_at = trio.current_time()

    async def run(self) -> None:
        """Move the answer from the engine to the gateway; a connection that breaks is closed."""
        self._put_now(Accepted(self._slot.number))
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._ping)
                nursery.start_soon(self._watch_the_reader)
                nursery.start_soon(self._pump)
                try:
                    await self._write()
                except Gone:
                    self._connection.close()
                nursery.cancel_scope.cancel(reason="the answer is written")
        finally:
            self._channel.clear()

    # -- from the engine

    async def _pump(self) -> None:
        with self._pumping:
            try:
                while (record := await self._stream.receive()) is not None:
                    if isinstance(record, Failed):
                        await self._fail(record)
                        return
                    await self._put(record)
                await self._released()
                self._put_now(End())
                self._channel.close()
            except OutOfGrammar as exc:
                self._stream.cancel()
                await self._fail(Failed("engine_protocol_error", str(exc), "elsewhere"))

    async def _put(self, record: Record) -> None:
        line = self._writer.write(record)
        if self._can_pause and self._channel.used + len(line) > self._settings.buffer_bytes:
            await self._pause()
        await self._channel.put(line)
        self._put_at = trio.current_time()

    async def _pause(self) -> None:
        """Hold the engine until half of what waits was taken, so that it does not start for every token.

        The reader hears of it behind what it has not taken yet, so that it knows what it waited for.
        """
        self._slot.paused = True
        self._stream.pause()
        if self._writer.open:
            self._put_now(Ping(self._stream.generated, True))
        try:
            await self._channel.wait_room(self._settings.buffer_bytes // 2)
        finally:
            self._stream.resume()
            self._slot.paused = False

    def _put_now(self, record: Record) -> None:
        self._channel.put_nowait(self._writer.write(record))
        self._put_at = trio.current_time()

    async def _fail(self, failed: Failed) -> None:
        await self._released()
        if not self._writer.over:
            self._put_now(failed)
        self._channel.close()

    async def _released(self) -> None:
        """Wait a little for the engine to let go, so that the end of an answer means a free slot."""
        with trio.move_on_after(self._settings.release_patience):
            self._free(self._slot, await self._stream.wait_released())

    # -- to the gateway

    async def _write(self) -> None:
        waiting = self._connection.begin()
        while True:
            await self._channel.wait()
            lines = self._channel.take(WRITE_SIZE)
            last = self._channel.closed and not self._channel.used
            self._taken_at, self._sending = trio.current_time(), True
            await self._connection.send(waiting + self._connection.piece(lines, last=last), self._taken)
            waiting, self._sending = b"", False
            if last:
                return

    def _taken(self) -> None:
        self._taken_at = trio.current_time()

    async def _ping(self) -> None:
        """Say that nothing is wrong, whenever there was nothing to say for a while."""
        interval = self._settings.ping_interval
        while True:
            await trio.sleep_until(self._put_at + interval)
            if trio.current_time() < self._put_at + interval:
                continue
            if self._channel.closed:
                return
            if not self._channel.used and self._writer.open:
                self._channel.put_nowait(self._writer.write(Ping(self._stream.generated, self._slot.paused)))
            self._put_at = trio.current_time()

    async def _watch_the_reader(self) -> None:
        """Give up on a reader that takes nothing; an engine that pauses waits, until the deadline."""
        if self._can_pause:
            return
        limit = self._settings.stall_timeout
        while True:
            await trio.sleep_until(self._taken_at + limit)
            if trio.current_time() < self._taken_at + limit:
                continue
            if self._sending or self._channel.used:
                break
            self._taken_at = trio.current_time()
        self._pumping.cancel(reason="the reader takes nothing")
        self._stream.cancel()
        self._channel.clear()
        if not self._writer.over:
            self._put_now(STALLED)
        self._channel.close()
        with trio.move_on_after(LAST_WORD):
            self._free(self._slot, await self._stream.wait_released())
            await trio.sleep_forever()
        self._connection.close(reset=True)  # a FIN would wait behind what nobody takes
