"""The tree of Trio's tasks by exchange, and where in our code each of them waits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import CodeType, CoroutineType, GeneratorType
from typing import Any, Final

import trio

from ..admin import Row
from ..exchange import exchange_of
from ..flow import in_steps

MOST_TASKS: Final = 8000  # that are described at a time: those of some 1,500 streams, 2 MB
STEP: Final = 60  # tasks in one step on the loop
DEEPEST: Final = 64  # frames of one task that are looked at
_PACKAGE: Final = str(Path(__file__).resolve().parents[1]) + "/"


class TaskTree:
    """Describes the tasks that there are now. Costs about 5 us a task."""

    def __init__(self) -> None:
        self._names: dict[CodeType, tuple[str, str] | None] = {}

    async def rows(self, most: int = MOST_TASKS) -> list[Row]:
        """Answer the tasks of each exchange, and under ``None`` all others; how many more there are, too.

        A task of an exchange hangs below its parent if that is of the same exchange. How long a task has
        been where it is, Trio does not know.
        """
        found: dict[str | None, list[Row]] = {None: []}
        more = sum(await in_steps(self._described(found, most), STEP))
        if more:
            found[None].append(_row(f"{more} further tasks", None, []))
        return [{"exchange": exchange, "tasks": tasks} for exchange, tasks in found.items()]

    def _described(self, found: dict[str | None, list[Row]], most: int) -> Iterator[int]:
        """Describe the tasks that there are, and go on a while later: 0 for each, 1 for one too many."""
        root = trio.lowlevel.current_root_task()
        waiting: list[tuple[trio.lowlevel.Task, str | None, list[Row]]] = []
        if root is not None:
            waiting.append((root, None, found[None]))
        described = 0
        while waiting:
            task, exchange, siblings = waiting.pop()
            if has_ended(task):
                continue
            if described == most:
                waiting += [(child, None, siblings) for child in children_of(task)]
                yield 1
                continue
            described += 1
            children: list[Row] = []
            siblings.append(_row(task.name, self._doing(task), children))
            for child in children_of(task):
                own = exchange_of(child)
                waiting.append((child, own, children if own == exchange else found.setdefault(own, [])))
            yield 0

    def where(self, task: trio.lowlevel.Task) -> str | None:
        """Name the innermost place of ours in which a task is: file, line and function."""
        return self._doing(task)

    def _doing(self, task: trio.lowlevel.Task) -> str | None:
        """Follow what a task awaits, from the outside in. What is no coroutine or generator ends it.

        A frame is asked for only once, since Python makes an object of each that somebody asks for.
        """
        names, found = self._names, None
        waits: Any = task.coro
        for _ in range(DEEPEST):
            if isinstance(waits, CoroutineType):
                code, inner = waits.cr_code, waits.cr_await
            elif isinstance(waits, GeneratorType):
                code, inner = waits.gi_code, waits.gi_yieldfrom
            else:
                break
            if code not in names:
                names[code] = _name_of(code)
            if (name := names[code]) is not None:
                found = name, waits
            waits = inner
        return None if found is None else _place(*found)


def _row(name: str, doing: str | None, children: list[Row]) -> Row:
    return {"name": name, "doing": doing, "children": children}


def has_ended(task: trio.lowlevel.Task) -> bool:
    """Whether a task that was found a while ago is no more."""
    coro = task.coro
    return not (coro.cr_suspended or coro.cr_running) and coro.cr_frame is None


def children_of(task: trio.lowlevel.Task) -> Iterator[trio.lowlevel.Task]:
    """Answer the tasks in the nurseries of a task."""
    for nursery in task.child_nurseries:
        yield from nursery.child_tasks


def _place(name: tuple[str, str], waits: CoroutineType[Any, Any, Any] | GeneratorType[Any, Any, Any]) -> str:
    frame = waits.cr_frame if isinstance(waits, CoroutineType) else waits.gi_frame
    return f"{name[0]}:{0 if frame is None else frame.f_lineno} {name[1]}"


def _name_of(code: CodeType) -> tuple[str, str] | None:
    """Name a function of ours, with its file; None: it is another's."""
    if not code.co_filename.startswith(_PACKAGE):
        return None
    return code.co_filename.removeprefix(_PACKAGE), code.co_qualname
