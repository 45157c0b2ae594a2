"""The tree of Trio's tasks by exchange, and where in our code each of them waits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import trio

from ..admin import Row
from ..exchange import exchange_of

MOST_TASKS: Final = 5000  # that are described at a time
DEEPEST: Final = 64  # frames of one task that are looked at
_PACKAGE: Final = str(Path(__file__).resolve().parents[1]) + "/"


class TaskTree:
    """Describes the tasks that there are now. Costs about 2 us a task."""

    def __init__(self) -> None:
        self._names: dict[CodeType, str | None] = {}

    def rows(self, most: int = MOST_TASKS) -> list[Row]:
        """Answer the tasks of each exchange, and under ``None`` all others; how many more there are, too.

        A task of an exchange hangs below its parent if that is of the same exchange. How long a task has
        been where it is, Trio does not know.
        """
        found: dict[str | None, list[Row]] = {None: []}
        root = trio.lowlevel.current_root_task()
        more = 0
        waiting: list[tuple[trio.lowlevel.Task, str | None, list[Row]]] = []
        if root is not None:
            waiting.append((root, None, found[None]))
        described = 0
        while waiting:
            task, exchange, siblings = waiting.pop()
            if described == most:
                more += 1
                waiting += [(child, None, siblings) for child in _children(task)]
                continue
            described += 1
            children: list[Row] = []
            siblings.append(_row(task.name, self._doing(task), children))
            for child in _children(task):
                own = exchange_of(child)
                waiting.append((child, own, children if own == exchange else found.setdefault(own, [])))
        if more:
            found[None].append(_row(f"{more} further tasks", None, []))
        return [{"exchange": exchange, "tasks": tasks} for exchange, tasks in found.items()]

    def where(self, task: trio.lowlevel.Task) -> str | None:
        """Name the innermost place of ours in which a task is: file, line and function."""
        return self._doing(task)

    def _doing(self, task: trio.lowlevel.Task) -> str | None:
        found: tuple[str, int] | None = None
        for frame in _frames(task):
            code = frame.f_code
            name = self._names.get(code, "")
            if name == "":
                name = self._names[code] = _name_of(code)
            if name is not None:
                found = name, frame.f_lineno
        if found is None:
            return None
        file, function = found[0].split(" ", 1)
        return f"{file}:{found[1]} {function}"


def _row(name: str, doing: str | None, children: list[Row]) -> Row:
    return {"name": name, "doing": doing, "for": None, "children": children}


def _children(task: trio.lowlevel.Task) -> Iterator[trio.lowlevel.Task]:
    for nursery in task.child_nurseries:
        yield from nursery.child_tasks


def _frames(task: trio.lowlevel.Task) -> Iterator[FrameType]:
    """Follow what a task awaits, from the outside in. What is no coroutine or generator ends it."""
    waits: Any = task.coro
    for _ in range(DEEPEST):
        frame = getattr(waits, "cr_frame", None) or getattr(waits, "gi_frame", None)
        if frame is None:
            return
        yield frame
        waits = getattr(waits, "cr_await", None) or getattr(waits, "gi_yieldfrom", None)


def _name_of(code: CodeType) -> str | None:
    """Name a function of ours, with its file; None: it is another's."""
    if not code.co_filename.startswith(_PACKAGE):
        return None
    return f"{code.co_filename.removeprefix(_PACKAGE)} {code.co_qualname}"
