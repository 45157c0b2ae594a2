"""Workers in pods: found by a label selector, and followed by the watch of Kubernetes' API.

By the same connections as probes. If the API can not be had, the workers stay as they were
told of last: probes see for themselves who is dead.
"""

from __future__ import annotations

import random
import ssl
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import urlencode, urlsplit

import trio

from ..contract import EngineAnswer, Worker
from ..errors import UpstreamFailed
from ._book import WorkerBook
from ._dialects import DIALECTS
from ._pods import (
    GONE,
    Arrived,
    Decision,
    Described,
    Left,
    OutOfDate,
    PodWatch,
    Resumed,
    Withheld,
    pause_after,
    read_page,
)
from ._registry import Fleet

CALL_LIMIT: Final = 10.0  # seconds for a page of a list, or for the head of a watch
WATCH_SECONDS: Final = (240, 360)  # that a watch is asked to last, by dice, so that not all end at once
WATCH_SLACK: Final = 15.0  # seconds that the server may be late with its end
SETTLED: Final = 1.0  # seconds; a watch that lasts as long is a good one
STEP: Final = 16  # decisions at a time; each looks at all workers
PAGE: Final = 250  # pods of a list at a time
MOST_PAGE_BYTES: Final = 64 * 1024 * 1024
MOST_LINE: Final = 4 * 1024 * 1024  # bytes; etcd takes objects of 1.5 MiB at most
MOST_TOKEN: Final = 64 * 1024
MOST_WAIT: Final = 60.0  # seconds of a Retry-After that are believed
MOST_SAID: Final = 200  # characters of why a connection failed
READ_LIMIT: Final = 5.0  # for a file
MOST_AT_ONE: Final = 3  # failures in a row at one version, which may be what is wrong: all is listed again
HINTS: Final = {
    401: " (is the token good?)",
    403: " (may the service account list and watch pods there?)",
}


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class KubernetesAccess:
    """Where the API is, and how one gets in.

    Attributes:
        api: base URL.
        token_file: file with the service account's token, which is replaced from time to time; None: none.
        ca_file: PEM file with who vouches for an https API.
        namespace: of the pods; None: that in ``namespace_file``.
        slots_key: annotation or label of pods with their slots.
    """

    api: str
    token_file: str | None
    ca_file: str
    namespace: str | None
    namespace_file: str
    slots_key: str


class _Failed(Exception):
    """A call did not give what it should; ``wait`` is how long the server asks to be left alone."""

    def __init__(self, detail: str, wait: float = 0.0) -> None:
        super().__init__(detail)
        self.wait = wait


class PodWorkers:
    """Keeps the workers of label selectors up to date.

    Args:
        templates: a worker for each selector, like which the workers in pods are made.
        get: asks a worker, or what is described like one, and answers when the head is there; raises
            UpstreamFailed.
        begin: told of the book of each worker that is new.
        tell: told worker and detail of what operators may want to know.
        dice: numbers from 0 to 1.
    """

    def __init__(
        self,
        fleet: Fleet,
        templates: Sequence[tuple[Worker, str]],
        access: KubernetesAccess,
        get: Callable[[Worker, str], Awaitable[EngineAnswer]],
        begin: Callable[[WorkerBook], None],
        tell: Callable[[str, str], None],
        dice: Callable[[], float] = random.random,
    ) -> None:
        self._fleet = fleet
        self._templates = templates
        self._access = access
        self._get = get
        self._begin = begin
        self._tell = tell
        self._dice = dice
        self._turns: defaultdict[str, trio.CapacityLimiter] = defaultdict(lambda: trio.CapacityLimiter(1))

    async def run(self) -> None:
        """Follow all selectors, for ever."""
        async with trio.open_nursery() as nursery:
            for template, selector in self._templates:
                nursery.start_soon(self._follow, template, selector)

    async def _follow(self, template: Worker, selector: str) -> None:
        """List and watch again and again; failures are told once, and leave the workers as they are."""
        follower = _Follower(template, selector, PodWatch(self._access.slots_key))
        while True:
            detail, wait = "", 0.0
            follower.began = None
            try:
                await self._round(follower)
            except OutOfDate as exc:
                detail = str(exc)
            except _Failed as exc:
                detail, wait = str(exc), exc.wait
            if follower.lasted() >= SETTLED:
                follower.failures, follower.failed_at = 0, None
            elif not detail:
                detail = "the watch ended at once"
            follower.note(detail)
            if detail:
                self._complain(follower, detail)
                await trio.sleep(max(pause_after(follower.failures, self._dice()), wait))

    def _complain(self, follower: _Follower, detail: str) -> None:
        if follower.failures > 1 and detail != follower.told:  # one that is cut now and then worries nobody
            self._tell(follower.template.id, f"its pods can not be followed: {detail}")
            follower.told = detail

    def _begin_watch(self, follower: _Follower) -> None:
        follower.began = trio.current_time()
        if follower.told:
            self._tell(follower.template.id, "its pods are followed again")
            follower.told = ""

    async def _round(self, follower: _Follower) -> None:
        """List if need be, then watch until the watch ends."""
        watch = follower.watch
        namespace = self._access.namespace or await self._read_word(self._access.namespace_file)
        path = f"/api/v1/namespaces/{namespace}/pods?"
        api = await self._describe_api()
        while watch.version is None:
            decisions = await self._list(api, path, follower)
            for at in range(0, len(decisions), STEP):  # a thousand at once would hold up the loop for 40 ms
                self._apply(follower.template, decisions[at : at + STEP])
                await trio.lowlevel.checkpoint()
        await self._watch(api, path, follower)

    async def _list(self, api: Worker, path: str, follower: _Follower) -> list[Decision]:
        """Read the next page of the list; decides after the last."""
        watch = follower.watch
        asked = {"labelSelector": follower.selector, "limit": str(PAGE)}
        if watch.rest:
            asked["continue"] = watch.rest
        with trio.move_on_after(CALL_LIMIT):
            with await self._ask(api, path + urlencode(asked), watch) as answer:
                body = await _read_whole(answer)
            try:
                page = await trio.to_thread.run_sync(read_page, body, self._access.slots_key)
            except ValueError:
                raise _Failed("the answer is no list of pods") from None
            return watch.take_page(page)
        raise _Failed(f"no answer within {CALL_LIMIT:g} s")

    async def _watch(self, api: Worker, path: str, follower: _Follower) -> None:
        """Take what changes until the watch ends."""
        watch = follower.watch
        shortest, longest = WATCH_SECONDS
        seconds = round(shortest + (longest - shortest) * self._dice())
        asked = {
            "labelSelector": follower.selector,
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": watch.version or "",
            "timeoutSeconds": str(seconds),
        }
        with trio.move_on_after(CALL_LIMIT) as beginning:
            with await self._ask(api, path + urlencode(asked), watch) as answer:
                beginning.deadline += seconds + WATCH_SLACK
                self._begin_watch(follower)
                await self._read_lines(answer, watch, follower.template)
        if follower.began is None:
            raise _Failed(f"no answer within {CALL_LIMIT:g} s")

    async def _read_lines(self, answer: EngineAnswer, watch: PodWatch, template: Worker) -> None:
        buffer = bytearray()
        while piece := await _receive(answer):
            buffer += piece
            while (end := buffer.find(b"\n")) >= 0:
                line = bytes(buffer[:end]).strip()
                del buffer[: end + 1]
                if line:
                    self._take(line, watch, template)
            if len(buffer) > MOST_LINE:
                watch.start_anew()
                raise _Failed(f"a line of the watch has more than {MOST_LINE} bytes")

    def _take(self, line: bytes, watch: PodWatch, template: Worker) -> None:
        try:
            decisions = watch.take_line(line)
        except ValueError as exc:
            raise _Failed(str(exc)) from None
        self._apply(template, decisions)

    # -- what was decided

    def _apply(self, template: Worker, decisions: Sequence[Decision]) -> None:
        for decision in decisions:
            match decision:
                case Arrived(pod):
                    worker = _worker_in(template, pod.name, pod.address, pod.slots)
                    self._begin(self._fleet.add(worker))
                    self._tell(worker.id, "its pod is ready")
                case Described(pod):
                    self._fleet.describe(_worker_in(template, pod.name, pod.address, pod.slots))
                case Withheld(name, why):
                    self._fleet.withhold(f"{template.id}@{name}", why)
                    self._tell(f"{template.id}@{name}", f"its pod is {why}")
                case Resumed(name):
                    self._fleet.withhold(f"{template.id}@{name}", None)
                    self._tell(f"{template.id}@{name}", "its pod is ready again")
                case Left(name):
                    self._fleet.remove(f"{template.id}@{name}")
                    self._tell(f"{template.id}@{name}", "its pod is gone")

    # -- access

    async def _describe_api(self) -> Worker:
        """Describe the API as what connections are made to; anew for each round, with its authorities."""
        parts = urlsplit(self._access.api)
        secure = parts.scheme == "https"
        tls = None
        if secure:
            try:
                tls = await self._read(self._access.ca_file, _context)
            except (OSError, ValueError) as exc:
                raise _Failed(f"{self._access.ca_file}: {exc}") from None
        return Worker(
            id="kubernetes",
            url=self._access.api,
            dialect=DIALECTS["openai"],
            host=parts.hostname or "",
            port=parts.port or (443 if secure else 80),
            authority=parts.netloc,
            prefix="",
            slots=0,
            cancel_grace=0.0,
            tls=tls,
        )

    async def _ask(self, api: Worker, target: str, watch: PodWatch) -> EngineAnswer:
        """Ask the API something; answers what is a good answer by its status.

        Raises:
            _Failed: it is none, or there is none.
            OutOfDate: the version is too old.
        """
        if self._access.token_file is not None:
            api = replace(api, api_key=await self._read_word(self._access.token_file))
        try:
            answer = await self._get(api, target)
        except UpstreamFailed as exc:
            raise _Failed(str(exc)[:MOST_SAID]) from None
        if answer.status == 200:
            return answer
        with answer:
            if answer.status == GONE:
                watch.start_anew()
                raise OutOfDate("the version is too old")
            asked = (answer.header(b"retry-after") or b"").decode("ascii", "replace")
            wait = min(float(asked), MOST_WAIT) if asked.isascii() and asked.isdigit() else 0.0
            raise _Failed(f"the API answers with status {answer.status}{HINTS.get(answer.status, '')}", wait)

    async def _read_word(self, name: str) -> str:
        """Read a file that holds one word. Read each time: tokens are replaced while we run."""
        try:
            word = (await self._read(name, _content)).decode("ascii").strip()
        except (OSError, ValueError) as exc:
            reason = exc.strerror if isinstance(exc, OSError) else "holds more than one word"
            raise _Failed(f"{name}: {reason}") from None
        if not word or not word.isprintable() or " " in word:
            raise _Failed(f"{name}: holds no word, or more than one")
        return word

    async def _read(self, name: str, read: Callable[[str], T]) -> T:
        """Read a file in a thread.

        One for each at a time: on a disk that is away it would keep one thread more each time, until there is
        none left.
        """
        turn = self._turns[name]
        with trio.move_on_after(READ_LIMIT):
            return await trio.to_thread.run_sync(read, name, abandon_on_cancel=True, limiter=turn)
        raise _Failed(f"{name}: not read within {READ_LIMIT:g} s")


@dataclass(slots=True)
class _Follower:
    """One selector, and how it goes with it.

    Attributes:
        began: when the watch of this round did; None: it has not.
        failures: in a row.
        told: the trouble that operators know of; empty: none.
        failed_at: version at which the last round failed; None: it did not, or had none.
        failures_there: in a row at that version.
    """

    template: Worker
    selector: str
    watch: PodWatch
    began: float | None = None
    failures: int = 0
    told: str = ""
    failed_at: str | None = None
    failures_there: int = 0

    def note(self, detail: str) -> None:
        """Count what this round came to, a failure if there is a detail.

        A server that was set back to an earlier state refuses the version that is known until it has come as
        far again; so after some failures at one version all is listed again.
        """
        at = self.watch.version if detail else None
        self.failures += bool(detail)
        self.failures_there = self.failures_there + 1 if at is not None and at == self.failed_at else 1
        self.failed_at = at
        if at is not None and self.failures_there >= MOST_AT_ONE:
            self.watch.start_anew()

    def lasted(self) -> float:
        """Seconds since the watch of this round began; 0.0: it has not."""
        return 0.0 if self.began is None else trio.current_time() - self.began


def _worker_in(template: Worker, name: str, address: str, slots: int | None) -> Worker:
    return replace(
        template,
        id=f"{template.id}@{name}",
        address=address,
        labels=template.labels | {template.id},
        slots=slots or template.slots,
        slots_unknown=template.slots_unknown and slots is None,
    )


def _content(name: str) -> bytes:
    with Path(name).open("rb") as file:
        return file.read(MOST_TOKEN)


def _context(ca_file: str) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=ca_file)


async def _receive(answer: EngineAnswer) -> bytes:
    try:
        return await answer.receive()
    except UpstreamFailed as exc:
        raise _Failed(str(exc)[:MOST_SAID]) from None


async def _read_whole(answer: EngineAnswer) -> bytes:
    body = bytearray()
    while piece := await _receive(answer):
        body += piece
        if len(body) > MOST_PAGE_BYTES:
            raise _Failed(f"a page of the list has more than {MOST_PAGE_BYTES} bytes")
    return bytes(body)
