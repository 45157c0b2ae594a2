"""Watching workers: probes, gauges, lists of models, and what agents say they let go of.

One task for each worker (and one more for an agent's events) in one nursery of the
gateway. What is learnt goes to the fleet; nobody waits for it.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import trio

from ..contract import Worker
from ..errors import UpstreamFailed
from ..wire import (
    EVENTS,
    Gauges,
    ReleaseReader,
    attempt_name,
    cancel_path,
    read_gauges,
    read_llamacpp_slots,
    read_sglang_loads,
)
from ._book import WorkerBook
from ._drain import DrainKeeper
from ._registry import Fleet

AT_LEAST: Final = 0.25  # seconds between two probes, however much somebody wants one
LIST_EVERY: Final = 30.0  # seconds between two looks at a worker's list of models
AGAIN: Final = (0.1, 2.0)  # seconds until a broken stream of events is asked for again, doubling to the last
LOOK_EVERY: Final = 1.0  # seconds between two looks whether a worker is still watched
CHASE_EVERY: Final = 1.0  # seconds after which an agent is told again that an attempt is over
MOST_CHASED: Final = 64  # attempts at a time
MOST_MODELS: Final = 1024
NO_SUCH_PAGE: Final = (404, 405, 501)

# Pages that cost the engine nothing.
HEALTH: Final = {
    "vllm": "/health",
    "sglang": "/health",
    "llamacpp": "/health",
    "tgi": "/health",
    "ollama": "/api/version",
    "openai": "/v1/models",
    "agent": "/readyz",
}
MODELS: Final = "/v1/models"
# How busy an engine is: pages and their readers; the first page that it has counts.
_SOURCES: Final[dict[str, tuple[tuple[str, Callable[[bytes], Gauges | None]], ...]]] = {
    "vllm": (("/metrics", partial(read_gauges, "vllm")),),
    "sglang": (("/v1/loads", read_sglang_loads), ("/metrics", partial(read_gauges, "sglang"))),
    "llamacpp": (("/slots", read_llamacpp_slots), ("/metrics", partial(read_gauges, "llamacpp"))),
    "tgi": (("/metrics", partial(read_gauges, "tgi")),),
}


@dataclass(frozen=True, slots=True)
class WatchSettings:
    """Seconds between probes (0: there are none), and for one."""

    interval: float
    timeout: float


@dataclass(frozen=True, slots=True)
class Ways:
    """How workers are asked: one small question, one small order, an answer that goes on.

    All raise UpstreamFailed.
    """

    ask: Callable[[Worker, str], Awaitable[tuple[int, bytes]]]
    order: Callable[[Worker, str], Awaitable[int]]
    follow: Callable[[Worker, str, Callable[[bytes], bool]], Awaitable[None]]


def _ignore(worker: str, detail: str) -> None:
    """Nobody listens."""


class FleetWatch:
    """Watches all workers of a fleet, those too that come later.

    Args:
        troubled: told worker and what went wrong, when its state changes.
        dice: numbers from 0 to 1.
    """

    def __init__(
        self,
        fleet: Fleet,
        drain: DrainKeeper,
        ways: Ways,
        settings: WatchSettings,
        troubled: Callable[[str, str], None] = _ignore,
        dice: Callable[[], float] = random.random,
    ) -> None:
        self._fleet = fleet
        self._drain = drain
        self._ways = ways
        self._settings = settings
        self._troubled = troubled
        self._dice = dice
        self._nursery: trio.Nursery | None = None
        self._watched: dict[WorkerBook, _Watched] = {}
        fleet.asked = self._hurry

    async def run(self) -> None:
        """Watch for ever."""
        async with trio.open_nursery() as self._nursery:
            for book in self._fleet.books.values():
                self.begin(book)
            await trio.sleep_forever()

    def begin(self, book: WorkerBook) -> None:
        """Watch one more worker, until it is removed and nothing of it drains."""
        if self._nursery is not None and book not in self._watched:
            watched = self._watched[book] = _Watched()
            self._nursery.start_soon(self._attend, book, watched)

    async def _attend(self, book: WorkerBook, watched: _Watched) -> None:
        """Do all that is done for one worker; what waits for it ends with it."""
        try:
            async with trio.open_nursery() as nursery:
                if self._settings.interval:
                    nursery.start_soon(self._watch, book, watched)
                if book.worker.dialect.agent:
                    nursery.start_soon(self._follow, book)
                    nursery.start_soon(self._chase, book)
                while self._is_of_interest(book):  # noqa: ASYNC110  (fleet and drain keeper tell nobody)
                    await trio.sleep(LOOK_EVERY)
                nursery.cancel_scope.cancel(reason="the worker is removed")
        finally:
            del self._watched[book]

    def _is_of_interest(self, book: WorkerBook) -> bool:
        return not book.removed or bool(self._drain.of_worker(book.worker))

    def _hurry(self, book: WorkerBook) -> None:
        if (watched := self._watched.get(book)) is not None:
            watched.wake.set()

    # -- probes

    async def _watch(self, book: WorkerBook, watched: _Watched) -> None:
        while not book.removed:
            watched.wake = trio.Event()
            await self._look_at(book, watched)
            await self._wait(book, watched, self._settings.interval * (1 if watched.begun else self._dice()))
            watched.begun = True

    async def _wait(self, book: WorkerBook, watched: _Watched, interval: float) -> None:
        """Wait until a probe is due: by time, since a breaker wants one, or since somebody asked.

        The first interval is a part of one, so that workers, and gateways, are not all asked at once.
        """
        begun = trio.current_time()
        wanted = self._fleet.wants_probe(book)
        due = min(begun + interval, math.inf if wanted is None else wanted)
        with trio.move_on_at(max(due, begun + AT_LEAST)):
            await watched.wake.wait()
            await trio.sleep_until(begun + AT_LEAST)

    async def _look_at(self, book: WorkerBook, watched: _Watched) -> None:
        if book.reporting and not book.snapshot.suspect and self._fleet.wants_probe(book) is None:
            return  # it says itself how it is
        path = "/livez" if book.reporting else HEALTH[book.worker.dialect.kind]
        status, body = await self._ask(book, path)
        healthy = status is not None and (status < 500 or status in NO_SUCH_PAGE)
        self._note(book, watched, healthy, status)
        self._fleet.probed(book, healthy)
        if not healthy:
            return
        if book.worker.dialect.agent:
            if not book.reporting and self._list_is_due(watched):
                book.snapshot = book.snapshot.listed()  # it has no list: it says no when it is asked again
            return
        await self._read_gauges(book, watched)
        if path == MODELS:
            self._take_models(book, watched, status, body)
        elif self._list_is_due(watched) or book.snapshot.missing or watched.useless:
            self._take_models(book, watched, *await self._ask(book, MODELS))

    @staticmethod
    def _list_is_due(watched: _Watched) -> bool:
        due = trio.current_time() >= watched.list_at
        if due:
            watched.list_at = trio.current_time() + LIST_EVERY
        return due

    async def _read_gauges(self, book: WorkerBook, watched: _Watched) -> None:
        """Read how busy it is. A source that it turned out not to have is not asked again soon."""
        for path, read in _SOURCES.get(book.worker.dialect.kind, ()):
            if watched.lacks.get(path, -math.inf) > trio.current_time():
                continue
            status, page = await self._ask(book, path)
            gauges = read(page) if status == 200 else None
            if gauges is not None:
                self._fleet.scraped(book, gauges)
                return
            watched.lacks[path] = trio.current_time() + LIST_EVERY

    async def _ask(self, book: WorkerBook, path: str) -> tuple[int | None, bytes]:
        with trio.move_on_after(self._settings.timeout):
            try:
                return await self._ways.ask(book.worker, path)
            except UpstreamFailed:
                return None, b""
        return None, b""

    def _note(self, book: WorkerBook, watched: _Watched, healthy: bool, status: int | None) -> None:
        if healthy is not watched.healthy:
            watched.healthy = healthy
            said = "no answer" if status is None else f"status {status}"
            self._troubled(book.worker.id, "healthy again" if healthy else f"probe: {said}")
        elif status in (401, 403) and not watched.refused:
            self._troubled(book.worker.id, f"probe: the worker refuses the credential with status {status}")
        watched.refused = status in (401, 403)

    def _take_models(self, book: WorkerBook, watched: _Watched, status: int | None, body: bytes) -> None:
        """Take the list; a worker that has none is believed to have whatever is configured.

        One in which no configured model stands is told once, and read again at each probe: whoever put a name
        right and started the engine again is not kept waiting.
        """
        names = model_names(body) if status == 200 else None
        if names is not None:
            useless = not self._fleet.asks_for_any(names)
            if useless and not watched.useless:
                shown = ", ".join(names[:5]) or "nothing"
                self._troubled(book.worker.id, f"it lists {shown}, which no model has as its `upstream`")
            watched.useless = useless
            self._fleet.report_models(book, names)
        else:
            book.snapshot = book.snapshot.listed()

    # -- what agents let go of

    async def _chase(self, book: WorkerBook) -> None:
        """Say again that an attempt is over whose engine has not let go long after its stream was closed."""
        while True:
            await trio.sleep(CHASE_EVERY)
            for attempt_id in self._drain.of_worker(book.worker, CHASE_EVERY)[:MOST_CHASED]:
                with trio.move_on_after(self._settings.timeout), contextlib.suppress(UpstreamFailed):
                    status = await self._ways.order(book.worker, cancel_path(attempt_id))
                    if status == 404:  # it is not known there: whatever it was, it is over
                        self._drain.released(book.worker, attempt_id)

    async def _follow(self, book: WorkerBook) -> None:
        wait = AGAIN[0]
        while True:
            reader = ReleaseReader()
            begun = trio.current_time()

            def take(data: bytes, reader: ReleaseReader = reader) -> bool:
                for each in reader.feed(data):
                    self._drain.released(book.worker, attempt_name(each.id, each.attempt), each.generated)
                return not reader.broken

            with contextlib.suppress(UpstreamFailed):
                await self._ways.follow(book.worker, EVENTS, take)
            wait = AGAIN[0] if trio.current_time() - begun > AGAIN[1] else min(wait * 2, AGAIN[1])
            await trio.sleep(wait)


class _Watched:
    """What the watching of one worker remembers."""

    def __init__(self) -> None:
        self.wake = trio.Event()
        self.begun = False
        self.healthy = True
        self.refused = False
        self.useless = False
        self.list_at = -math.inf
        self.lacks: dict[str, float] = {}  # sources that it has not, and until when that is believed


def model_names(body: bytes) -> list[str] | None:
    """Read the ids of an OpenAI list of models; None: it is none."""
    try:
        value: Any = json.loads(body)
        names = [item["id"] for item in value["data"]]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return [name for name in names if isinstance(name, str) and 0 < len(name) <= 512][:MOST_MODELS]
