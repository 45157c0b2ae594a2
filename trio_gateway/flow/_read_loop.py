"""One task that reads for many: the sockets of all streams, in one epoll set.

Waiting for a socket the usual way costs Trio a registration, a wake-up and a step of
a task for each token, several times what the token itself costs. Here a stream's task
parks once, and one task for all takes what is ready and hands it on, until a stream
has something that its own task must see to.

The rules that make that safe:

- Attaching and detaching are synchronous, so cancelling a task that is parked here
  leaves nothing behind. Readiness is matched by who was attached, never by a number:
  a descriptor's number comes again as soon as it is closed.
- What a step raises is raised in the task whose stream it is. No stream ends the loop,
  and if the loop ends, each that is attached goes on by itself.
- After 64 steps, or a quarter of a millisecond, all other tasks have their turn: a request is four turns from
  its first token. If they had nothing to do lately, the next turn may take a millisecond; if they had, it
  is as short, or a third of what they took, up to 4 ms: else a rush of requests, half a millisecond each,
  would leave tokens a tenth of the core. The last few steps may take a quarter of a millisecond more, since a
  turn of their own costs as much as they do.
- Where tokens come densely, the loop waits a millisecond before it looks again, so that one look finds
  several; what came while it read them can wait with the others. A lone stream never waits. Each of several
  processes, which share the tokens of one, waits three.
"""

from __future__ import annotations

import math
import select
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, Protocol, final

import trio

from ..units import MILLISECONDS

STEPS_A_TURN: Final = 64
TURN: Final = 1 * MILLISECONDS
SHORT_TURN: Final = 0.25 * MILLISECONDS
SHORT_FOR: Final = 3 * MILLISECONDS  # after others had work: what they asked for comes soon
LAST_STEPS: Final = 8  # of what was ready, for which a turn may take SHORT_TURN longer
LONGEST_TURN: Final = 4 * MILLISECONDS
SHARE: Final = 1 / 3  # of what the others took, that a turn may take at least
OTHERS_WORK: Final = 0.05 * MILLISECONDS  # that they took for their turn, from which on they had work
GATHER: Final = 1 * MILLISECONDS
GATHER_OF_SEVERAL: Final = 3 * MILLISECONDS  # in each of several processes, which find fewer tokens in a look
DENSE: Final = 2  # steps expected within that time, from which on it pays

MOST_WARY: Final = 63  # times in a row that it is not done, after it was in vain

Step = Callable[[float], bool]
"""Reads what is there and hands it on; told the time. False: the stream's own task is to go on."""


class Poller(Protocol):
    """A set of descriptors that may become readable, by level: what was not read is ready again."""

    def add(self, fd: int) -> None:
        """Watch a descriptor. Raises OSError: it can not be watched."""

    def remove(self, fd: int) -> None:
        """Stop to watch. Raises OSError: it was closed before."""

    def poll(self, most: int) -> Sequence[tuple[int, int]]:
        """Answer descriptors that are readable now, at most so many, those that waited longest first."""

    async def wait(self) -> None:
        """Wait until one is readable."""

    def close(self) -> None:
        """Give the set back."""


@final
class EpollPoller:
    """The poller of a running gateway. See Poller."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._poll = self._epoll.poll

    def add(self, fd: int) -> None:
        """See Poller."""
        self._epoll.register(fd, select.EPOLLIN)

    def remove(self, fd: int) -> None:
        """See Poller."""
        self._epoll.unregister(fd)

    def poll(self, most: int) -> Sequence[tuple[int, int]]:
        """See Poller."""
        return self._poll(0, most)

    async def wait(self) -> None:
        """See Poller."""
        await trio.lowlevel.wait_readable(self._epoll.fileno())

    def close(self) -> None:
        """See Poller."""
        self._epoll.close()


@final
class _Attached:
    """A stream that is read by the loop.

    Attributes:
        task: that waits; None once it is not read any more.
        told: why not: its step wants its own task, or not (see `ReadLoop.read`), or has raised something.
    """

    __slots__ = ("fd", "step", "task", "told")

    def __init__(self, fd: int, step: Step, task: trio.lowlevel.Task) -> None:
        self.fd = fd
        self.step = step
        self.task: trio.lowlevel.Task | None = task
        self.told: bool | Exception = False


class ReadLoop:
    """Reads for all streams of a process. `run` is one task of the gateway.

    Args:
        poller: closed by `close`.
        others: processes beside this one that read as many streams each: so that a look finds about as many
            tokens as that of a single process would, it waits longer.
    """

    def __init__(self, poller: Poller | None = None, others: int = 0) -> None:
        self._poller = poller or EpollPoller()
        self._gather = GATHER_OF_SEVERAL if others else GATHER
        self._attached: dict[int, _Attached] = {}
        self._running = False
        self._looked_at = -math.inf
        self._wary = 0  # times that it could gather and does not
        self._in_vain = 0
        self._gathers = False  # the last time it did, something was there
        self._turn = SHORT_TURN
        self._short_until = -math.inf

    def __len__(self) -> int:
        """How many streams it reads."""
        return len(self._attached)

    async def read(self, fd: int, step: Step) -> bool:
        """Have ``step`` called whenever the descriptor is readable, until it answers False.

        Whatever it raises is raised here. The descriptor must stay open meanwhile; whoever closes it
        all the same calls `forget` first.

        Answers False if nobody reads it any more, or never did: the loop does not run, or can not watch
        the descriptor, or it was closed.
        """
        attached = _Attached(fd, step, trio.lowlevel.current_task())
        if not self._running or not self._attach(attached):
            await trio.lowlevel.checkpoint()
            return False

        def abort(_: object) -> trio.lowlevel.Abort:
            self._detach(attached)
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)
        if isinstance(attached.told, Exception):
            raise attached.told
        return attached.told

    def forget(self, fd: int) -> None:
        """Stop to read a descriptor that is about to be closed. Idempotent."""
        attached = self._attached.get(fd)
        if attached is not None:
            self._wake(attached, False)

    async def run(self) -> None:
        """Read for ever."""
        self._running = True
        try:
            while True:
                await self._poller.wait()
                self._turn = SHORT_TURN
                await self._read_ready()
        finally:
            self._running = False
            for attached in list(self._attached.values()):
                self._wake(attached, False)

    def close(self) -> None:
        """Give the poller back, once `run` has ended or was never called."""
        self._poller.close()

    # -- reading

    async def _read_ready(self) -> None:
        """Read until nothing is ready, and nothing will be soon."""
        ready = self._ready()
        while ready:
            steps = 0
            while ready:
                await self._read_all(ready)
                steps += len(ready)
                if self._gathers and len(ready) < STEPS_A_TURN:
                    ready = []  # what came meanwhile is found with what comes soon
                elif ready := self._ready():
                    await self._let_others()
            if self._may_gather(steps):
                await trio.sleep(self._gather)
                self._turn = SHORT_TURN
                ready = self._ready()
                self._note_gathered(bool(ready))
            else:
                self._gathers = False

    def _may_gather(self, steps: int) -> bool:
        """Whether waiting for more pays, if so many steps were taken since this was last asked."""
        now = trio.current_time()
        passed, self._looked_at = now - self._looked_at, now
        if steps * self._gather < DENSE * passed:
            return False
        self._wary -= 1
        return self._wary < 0

    def _note_gathered(self, something: bool) -> None:
        """Who waits in vain waits less often: tokens may come in bursts, with nothing between them."""
        self._gathers = something
        self._in_vain = 0 if something else min(2 * self._in_vain + 1, MOST_WARY)
        self._wary = self._in_vain

    def _ready(self) -> list[_Attached]:
        """Answer who is ready, before any of them can be replaced by another with its number."""
        attached = self._attached
        return [attached[fd] for fd, _ in self._poller.poll(STEPS_A_TURN) if fd in attached]

    async def _read_all(self, ready: list[_Attached]) -> None:
        """Let each of them take a step; all other tasks have their turns in between."""
        clock = trio.lowlevel.current_clock().current_time
        now = clock()
        end = now + self._turn
        for left, attached in zip(range(len(ready), 0, -1), ready, strict=True):
            if now >= end and (left > LAST_STEPS or now >= end + SHORT_TURN):
                await self._let_others()
                now = clock()
                end = now + self._turn
            if attached.task is not None:
                try:
                    if not attached.step(now):
                        self._wake(attached, True)
                except Exception as exc:  # its own task's to judge
                    self._wake(attached, exc)
                now = clock()

    async def _let_others(self) -> None:
        """Let all other tasks have their turns; how long that took says how long the next of this one is."""
        left = trio.current_time()
        await trio.lowlevel.checkpoint()
        now = trio.current_time()
        took = now - left
        if took >= OTHERS_WORK:
            self._short_until = now + SHORT_FOR
        self._turn = min(max(SHORT_TURN if now < self._short_until else TURN, took * SHARE), LONGEST_TURN)

    # -- who is read

    def _attach(self, attached: _Attached) -> bool:
        self.forget(attached.fd)  # closed without a word: its number came again
        try:
            self._poller.add(attached.fd)
        except OSError:
            return False
        self._attached[attached.fd] = attached
        return True

    def _detach(self, attached: _Attached) -> None:
        attached.task = None
        del self._attached[attached.fd]
        with suppress(OSError):
            self._poller.remove(attached.fd)

    def _wake(self, attached: _Attached, told: bool | Exception) -> None:
        task = attached.task
        if task is not None:
            attached.told = told
            self._detach(attached)
            trio.lowlevel.reschedule(task)
