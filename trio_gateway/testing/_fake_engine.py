"""An engine without a socket, for exchanges on a fake clock.

It plays the scripts that `ScriptedEngine` plays. Each step is played when the
answer is read, so a reader that waits makes the engine wait: back pressure with
no buffer in between. Bytes below the meaning of HTTP (`Raw`, `ReadOnly`) need a
socket; that a connection can not be had is said by an exception.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Self, TypeAlias, final

import trio

from ..contract import COMPLETIONS, EMBEDDINGS, InternalRequest, LeasePort, Worker
from ..errors import UpstreamFailed, UpstreamFault
from ..flow import ReadLoop
from ._answers import chat_answer, chat_stream, completion_answer, completion_stream, embedding_answer
from ._engine_connection import encode_event
from ._fake_poller import FakePoller
from ._steps import (
    Chunk,
    CloseFin,
    CloseReset,
    EndChunks,
    Event,
    Head,
    Hold,
    Json,
    Repeat,
    Step,
    Wait,
    WaitFor,
)

FakeScript: TypeAlias = Sequence[Step | Exception]


@dataclass(frozen=True, slots=True)
class FakeAttempt:
    """One attempt as the engine saw it; `at` is Trio clock seconds."""

    number: int
    attempt_id: str
    worker: Worker
    request: InternalRequest
    at: float


FakeScripting: TypeAlias = FakeScript | Exception | Callable[[FakeAttempt], FakeScript | Exception]


def plain_answer(attempt: FakeAttempt) -> FakeScript:
    """What a plain good engine answers: ``ok`` in the operation's own form, with usage."""
    operation, stream = attempt.request.operation, attempt.request.stream
    if operation is EMBEDDINGS:
        return embedding_answer([0.25, -0.5])
    if operation is COMPLETIONS:
        return completion_stream("ok", usage=(3, 1)) if stream else completion_answer()
    return chat_stream("ok", usage=(3, 1)) if stream else chat_answer()


def unreachable(detail: str = "connection refused") -> UpstreamFailed:
    """Script of a worker to which no connection can be made."""
    return UpstreamFailed(UpstreamFault.UNREACHABLE, detail)


@final
class FakeEngine:
    """The engines of all workers in one. See EnginePort.

    Args:
        scripts: the answers in the order of the attempts, the last one again and
            again; none means `plain_answer`. A script may be chosen by a function
            of the attempt. Where it is an exception, opening raises it; one that
            stands inside a script is raised when it is reached.

    Attributes:
        attempts: all that were made.
        reading: answers that are being waited for or read right now.
        kept: connections that would be reused, since their answer ended cleanly.
        closed: connections that were closed for any other reason.
    """

    def __init__(self, *scripts: FakeScripting) -> None:
        self._scripts: tuple[FakeScripting, ...] = scripts or (plain_answer,)
        self._together: tuple[ReadLoop, FakePoller] | None = None
        self.attempts: Final[list[FakeAttempt]] = []
        self.reading = 0
        self.kept = 0
        self.closed = 0

    def read_together(self, loop: ReadLoop, poller: FakePoller) -> None:
        """Have streams that are poured read by a loop, as in a gateway; else each is read by its own task."""
        self._together = loop, poller

    @property
    def workers(self) -> list[str]:
        """Which worker each attempt went to."""
        return [attempt.worker.id for attempt in self.attempts]

    async def open(
        self, request: InternalRequest, lease: LeasePort, attempt_id: str, nursery: trio.Nursery
    ) -> FakeAnswer:
        """See EnginePort. A fake has no body to send; what it plays for a loop is played in `nursery`."""
        number = len(self.attempts) + 1
        attempt = FakeAttempt(number, attempt_id, lease.worker, request, trio.current_time())
        self.attempts.append(attempt)
        script = self._script_of(attempt)
        await trio.lowlevel.checkpoint()  # connecting
        if isinstance(script, Exception):
            raise script
        lease.engine_started(attempt_id)
        player = _Player(script)
        self.reading += 1
        try:
            head = await player.play_head()
            answer = FakeAnswer(self, lease, head, player)
            if self._together is not None:
                answer.read_by(_Reading(*self._together, nursery))
            return answer
        except BaseException:
            self.left(clean=False)
            raise

    def left(self, *, clean: bool) -> None:
        """Count an answer that is not read any more; only answers call this."""
        self.reading -= 1
        self.kept += clean
        self.closed += not clean

    def _script_of(self, attempt: FakeAttempt) -> FakeScript | Exception:
        scripting = self._scripts[min(attempt.number, len(self._scripts)) - 1]
        return scripting(attempt) if callable(scripting) else scripting


@final
class FakeAnswer:
    """One answer of a `FakeEngine`. See EngineAnswer."""

    def __init__(self, engine: FakeEngine, lease: LeasePort, head: Head | Json, player: _Player) -> None:
        self.status: Final = head.status
        self._engine = engine
        self._lease = lease
        self._player = player
        self._headers = {name.lower(): value for name, value in head.headers}
        self._until_close = isinstance(head, Head) and "transfer-encoding" not in self._headers
        self._sized: bytes | None = None
        if isinstance(head, Json):
            self._headers.setdefault("content-type", "application/json")
            self._sized = json.dumps(head.body).encode()
        self._ended = False
        self._reading: _Reading | None = None

    def read_by(self, reading: _Reading) -> None:
        """Let a loop read it."""
        self._reading = reading

    def header(self, name: bytes) -> bytes | None:
        """See EngineAnswer."""
        value = self._headers.get(name.decode())
        return None if value is None else value.encode()

    @property
    def ended(self) -> bool:
        """See EngineAnswer."""
        return self._ended

    async def receive(self) -> bytes:
        """See EngineAnswer."""
        await trio.lowlevel.checkpoint()
        if self._ended:
            return b""
        if self._sized is not None:
            self._end()
            return self._sized
        data = await (self._play() if self._reading is None else self._reading.next(self._play))
        if not data:
            self._end()
        return data

    async def pour(
        self,
        take: Callable[[bytes, float], bool],
        take_lines: Callable[[list[bytes], float], bool] | None = None,
    ) -> bool:
        """See EngineAnswer. What a loop reads are lines wherever they may be."""
        wanted = True

        def step(data: bytes, now: float) -> bool:
            nonlocal wanted
            if not data:
                self._end()
                return False
            lines = None if take_lines is None or self._reading is None else _lines_of(data)
            wanted = take(data, now) if lines is None or take_lines is None else take_lines(lines, now)
            return wanted

        while wanted and not self._ended:
            reading = self._reading if self._sized is None else None
            if reading is None or not await reading.pour(self._play, step):
                step(await self.receive(), trio.current_time())
        await trio.lowlevel.checkpoint()
        return not wanted

    def __enter__(self) -> Self:
        """See EngineAnswer."""
        return self

    def __exit__(self, *exc: object) -> None:
        """See EngineAnswer."""
        if self._reading is not None:
            self._reading.stop()
        self._engine.left(clean=self._ended and not self._until_close)

    async def _play(self) -> bytes:
        return await self._player.play_body(until_close=self._until_close)

    def _end(self) -> None:
        self._ended = True
        self._lease.engine_done()


def _lines_of(data: bytes) -> list[bytes] | None:
    """Answer the lines of whole events, if each of them is one line with a blank one behind it."""
    lines = data.split(b"\n")
    return None if any(lines[1::2]) or len(lines) % 2 == 0 or lines[-1] else lines[:-1:2]


class _Reading:
    """Has an answer read by a loop: what the engine does next is played beside it, when somebody asks."""

    def __init__(self, loop: ReadLoop, poller: FakePoller, nursery: trio.Nursery) -> None:
        self._loop = loop
        self._poller = poller
        self._nursery = nursery
        self._number = poller.new_number()
        self._scope = trio.CancelScope()
        self._playing = False
        self._played: bytes | Exception | None = None
        self._there = trio.lowlevel.ParkingLot()

    async def next(self, play: Callable[[], Awaitable[bytes]]) -> bytes:
        """Answer what the engine says next."""
        self._ask(play)
        while self._played is None:
            await self._there.park()
        return self._take(self._played)

    async def pour(self, play: Callable[[], Awaitable[bytes]], take: Callable[[bytes, float], bool]) -> bool:
        """Have the loop give ``take`` what the engine says; see `ReadLoop.read`."""

        def step(now: float) -> bool:
            if self._played is None:
                return True
            if not take(self._take(self._played), now):
                return False
            self._ask(play)
            return True

        self._ask(play)
        return await self._loop.read(self._number, step)

    def stop(self) -> None:
        """Play no further."""
        self._loop.forget(self._number)
        self._poller.set_readable(self._number, False)
        self._scope.cancel(reason="the answer is not read any more")

    def _take(self, played: bytes | Exception) -> bytes:
        self._played = None
        self._poller.set_readable(self._number, False)
        if isinstance(played, Exception):
            raise played
        return played

    def _ask(self, play: Callable[[], Awaitable[bytes]]) -> None:
        if not self._playing and self._played is None:
            self._playing, self._scope = True, trio.CancelScope()
            self._nursery.start_soon(self._play, play)

    async def _play(self, play: Callable[[], Awaitable[bytes]]) -> None:
        with self._scope:
            try:
                self._played = await play()
            except Exception as exc:  # the reader's
                self._played = exc
            self._poller.set_readable(self._number, True)
            self._there.unpark_all()
        self._playing = False


class _Player:
    """Plays one script, as far as somebody reads."""

    def __init__(self, script: FakeScript) -> None:
        self._steps = _flat(script)

    async def play_head(self) -> Head | Json:
        """Play up to the head.

        Raises:
            UpstreamFailed: the connection is closed before one.
        """
        step = await self._next_output()
        if isinstance(step, Head | Json):
            return step
        if isinstance(step, CloseFin | CloseReset):
            raise UpstreamFailed(UpstreamFault.BROKEN, "closed before a whole response head")
        raise TypeError(f"{step} stands in front of the head")

    async def play_body(self, *, until_close: bool) -> bytes:
        """Play up to some bytes of the body; ``b""`` is its end.

        Raises:
            UpstreamFailed: the connection is closed before its end.
        """
        match await self._next_output():
            case Chunk(data):
                return data
            case Event() as event:
                return encode_event(event)
            case EndChunks():
                return b""
            case CloseFin() if until_close:
                return b""
            case CloseFin() | CloseReset():
                raise UpstreamFailed(UpstreamFault.BROKEN, "closed before the end of its message")
            case step:
                raise TypeError(f"{step} can not stand in a body without a socket")

    async def _next_output(self) -> Step:
        """Play what takes time until something leaves the engine; a script that is over holds for ever."""
        while True:
            match next(self._steps, Hold()):
                case Exception() as failure:
                    raise failure
                case Wait(seconds):
                    await trio.sleep(seconds)
                case WaitFor(event):
                    await event.wait()
                case Hold():
                    await trio.sleep_forever()
                case step:
                    return step


def _flat(script: FakeScript) -> Iterator[Step | Exception]:
    """Write repetitions out."""
    for step in script:
        if not isinstance(step, Repeat):
            yield step
            continue
        played = 0
        while step.times is None or played < step.times:
            yield from _flat(step.steps)
            if step.every:
                yield Wait(step.every)
            played += 1
