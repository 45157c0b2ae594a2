"""Structured log lines, written by one thread so that a stuck reader never stops the loop."""

from __future__ import annotations

import contextlib
import datetime
import json
import queue
import threading
import time
import traceback
from typing import IO, Any, Final

import msgspec

LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40}
MAX_WAITING: Final = 10_000  # lines; further ones are dropped and counted
CLOSE_LIMIT: Final = 2.0  # seconds
GATHERING: Final = 0.05  # seconds for which lines wait for others, errors excepted


class Log:
    """Writes one line per event to a stream.

    Args:
        stream: None where the process was started without one: all lines are dropped.
        style: ``json``, or ``console`` for people.
        level: the least severe that is written.
        always: fields of every line.

    Attributes:
        dropped: lines that were lost because the stream does not take them.
    """

    def __init__(
        self, stream: IO[str] | None, style: str = "json", level: str = "info", **always: Any
    ) -> None:
        self._stream = stream
        self._always = always
        self._style = style
        self._least = LEVELS[level]
        # Members that follow others of a JSON object.
        self._always_members = (msgspec.json.encode(always).decode()[1:-1] + ",") if always else ""
        self._second, self._second_text = -1, ""  # the one that was written last
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._hurry = threading.Event()
        self.dropped = 0
        self._thread: threading.Thread | None = None
        if stream is not None:
            self._thread = threading.Thread(target=self._write, args=(stream,), name="log", daemon=True)
            self._thread.start()

    @property
    def level(self) -> str:
        """The least severe that is written."""
        return next(name for name, value in LEVELS.items() if value == self._least)

    def relevel(self, level: str) -> None:
        """Write what is at least as severe as this from now on."""
        self._least = LEVELS[level]

    def write(self, level: str, event: str, **fields: Any) -> None:
        """Queue a line; never waits."""
        if LEVELS[level] < self._least:
            return
        if self._stream is None:
            self.dropped += 1
            return
        line = {"at": self._now(), "level": level, "event": event, **self._always, **fields}
        self._queue(level, self._render(line))

    def write_object(self, level: str, event: str, fields: bytes) -> None:
        """Queue a line as `write` does, whose fields are a JSON object already, and not an empty one."""
        if self._style != "json":
            self.write(level, event, **msgspec.json.decode(fields))
        elif LEVELS[level] < self._least:
            return
        elif self._stream is None:
            self.dropped += 1
        else:
            members = fields.decode()[1:]
            begin = f'{{"at":"{self._now()}","level":"{level}","event":"{event}",'
            self._queue(level, f"{begin}{self._always_members}{members}")

    def _now(self) -> str:
        second, millisecond = divmod(time.time_ns() // 1_000_000, 1000)
        if second != self._second:
            self._second = second
            self._second_text = datetime.datetime.fromtimestamp(second, datetime.UTC).isoformat()[:-6]
        return f"{self._second_text}.{millisecond:03}+00:00"

    def _queue(self, level: str, line: str) -> None:
        if self._lines.qsize() >= MAX_WAITING:
            self.dropped += 1
        else:
            self._lines.put(line)
        if level == "error":
            self._hurry.set()

    def exception(self, event: str, exc: BaseException, **fields: Any) -> None:
        """Queue an error line that says where an exception came from, without its values' contents."""
        causes = _causes(exc)
        frames = [frame for each in (exc, *causes) for frame in _frames(each)]
        if causes:
            fields["causes"] = [type(cause).__name__ for cause in causes]
        self.write("error", event, error=type(exc).__name__, frames=frames[-12:], **fields)

    def close(self) -> None:
        """Write what waits, for a bounded time."""
        if self._thread is None:
            return
        self._lines.put(None)
        self._hurry.set()
        self._thread.join(CLOSE_LIMIT)

    def _render(self, line: dict[str, Any]) -> str:
        if self._style == "json":
            try:
                return msgspec.json.encode(line, enc_hook=str).decode()
            except UnicodeEncodeError:  # a lone surrogate, as in a path that is no UTF-8
                return json.dumps(line, default=str)
        rest = " ".join(
            f"{key}={_on_one_line(value)}"
            for key, value in line.items()
            if key not in ("at", "level", "event")
        )
        return f"{line['at']} {line['level']:<7} {line['event']} {rest}".rstrip()

    def _write(self, stream: IO[str]) -> None:
        while (line := self._lines.get()) is not None:
            try:
                stream.write(line + "\n")
                if self._lines.empty():
                    stream.flush()
            except (OSError, ValueError):
                self.dropped += 1
            if self._lines.empty():
                # To be woken up for each line costs more than to write it, and interrupts the loop each time.
                self._hurry.wait(GATHERING)
                self._hurry.clear()  # whoever set it has queued a line before
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def _on_one_line(value: object) -> str:
    text = str(value)
    return text if text.isprintable() else repr(text)


def _causes(exc: BaseException) -> list[BaseException]:
    """The exceptions inside a group and the groups in it."""
    if not isinstance(exc, BaseExceptionGroup):
        return []
    return [cause for inner in exc.exceptions for cause in (_causes(inner) or [inner])]


def _frames(exc: BaseException) -> list[str]:
    return [
        f"{frame.filename.rpartition('/')[2]}:{frame.lineno} {frame.name}"
        for frame in traceback.extract_tb(exc.__traceback__)
    ]
