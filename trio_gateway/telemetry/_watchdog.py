"""Watches whether the loop runs, since one call that holds it holds every stream."""

from __future__ import annotations

import sys
import threading
import time
from types import FrameType
from typing import Any, Final, Protocol

import trio

from ..ledger import Histogram
from ._stalls import StallJudge

LAG_BOUNDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)  # seconds
BEAT: Final = 0.1  # seconds; with the thread, 0.3 % of a core where nothing else runs
MOST_FRAMES: Final = 12


class LogPort(Protocol):
    """Takes log lines."""

    def write(self, level: str, event: str, **fields: Any) -> None:
        """Queue a line; never waits."""


class LoopWatch:
    """Measures how late the loop runs, and tells where it hangs. `run` is one task, with a thread beside it.

    Args:
        limit: seconds without the loop that are worth a log line, once each time; 0: none is told.
        log: takes it.

    Attributes:
        lags: how late the loop came to a task whose time it was, 10 times a second.
        stalls, stalled: how often that was more than the limit, and the seconds of those times together.
    """

    def __init__(self, limit: float, log: LogPort) -> None:
        self._limit = limit
        self._log = log
        self._beat = time.perf_counter()
        self._told = False
        self._stop = threading.Event()
        self.lags: Final = Histogram(LAG_BOUNDS)
        self.stalls = 0
        self.stalled = 0.0

    async def run(self) -> None:
        """Beat for ever."""
        self._beat = time.perf_counter()
        if self._limit:
            arguments = (threading.get_ident(),)
            threading.Thread(target=self._look_on, args=arguments, name="watchdog", daemon=True).start()
        try:
            while True:
                await trio.sleep(BEAT)
                self._note_beat(time.perf_counter())
        finally:
            self._stop.set()

    def figures(self) -> dict[str, Any]:
        """Answer the counts of this moment."""
        return {"lag": self.lags.figures({}), "stalls": self.stalls, "stalled_seconds": self.stalled}

    def _note_beat(self, now: float) -> None:
        lag = max(now - self._beat - BEAT, 0.0)
        self.lags.see(lag)
        self._beat = now
        if self._limit and lag > self._limit:
            self.stalls += 1
            self.stalled += lag
        if self._told:
            self._told = False
            self._log.write("info", "loop_resumed", seconds=round(lag, 3))

    def _look_on(self, loop: int) -> None:
        every = self._limit / 2
        judge = StallJudge(self._limit + BEAT, every, time.perf_counter())
        while not self._stop.wait(every):
            silent = judge.look(time.perf_counter(), self._beat, time.process_time())
            if silent is not None:
                self._log.write("warning", "loop_stalled", seconds=round(silent, 3), frames=stack_of(loop))
                self._told = True


def stack_of(thread: int) -> list[str]:
    """Name the innermost functions that a thread is in, outermost first: files, lines and names only."""
    frame: FrameType | None = sys._current_frames().get(thread)
    names: list[str] = []
    while frame is not None and len(names) < MOST_FRAMES:
        code = frame.f_code
        names.append(f"{code.co_filename.rpartition('/')[2]}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back
    return names[::-1]
