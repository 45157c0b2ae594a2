"""One process that serves clients, seen from the supervisor. The module that imports httpx here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import httpx  # noqa: ASYNC127 - the constraints pin it; httpx2 has the same API
import msgspec
import trio

from ..admin import PREFIX, Row
from ..errors import Problem, Refused
from ..lending import Place

ASK_LIMIT: Final = 10.0  # seconds for one answer of one process
ACT_LIMIT: Final = 30.0  # for a reload that reads files


class NoAnswer(Exception):
    """The process does not answer: it has ended, or hangs."""


class Child:
    """One process, and the ways to ask it. All of its sockets are in a folder that nobody else can enter.

    Attributes:
        place: its own.
        process: None: it has not been started, or has ended.
        ready: it serves.
        welcomed: it knows what operators have said so far, and is told what they say from now on.
        hears_workers: it knows the workers that have registered, and is told what they say from now on.
        served: it, or one before it, has served.
        boot_id: of the running process.
        started_at: Trio clock.
        restarts: times that it was started again after it had died.
        retiring: it is to end, and another one to take its place.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self.process: trio.Process | None = None
        self.borrower = 0
        self.ready = False
        self.welcomed = False
        self.hears_workers = False
        self.retiring = False
        self.served = trio.Event()
        self.boot_id: str | None = None
        self.started_at = 0.0
        self.restarts = 0
        self._news = trio.Event()
        self._operators = _client(place.admin_path, {"authorization": f"Bearer {place.secret}"})
        self._workers = _client(place.internal_path, {})

    @property
    def number(self) -> int:
        """From 0 on."""
        return self.place.number

    def leave(self) -> None:
        """It serves no more, and there is nothing to ask it."""
        self.ready = self.welcomed = self.hears_workers = False

    def tell(self) -> None:
        """Wake who waits: something is different."""
        self._news.set()
        self._news = trio.Event()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds of it."""
        while not holds():
            await self._news.wait()

    async def read(self, path: str, query: Mapping[str, Any] | None = None) -> Any:
        """Read something of the operators' API.

        Args:
            path: behind the prefix.

        Raises:
            NoAnswer: there was none.
            Refused: it was an error.
        """
        asked = {name: value for name, value in (query or {}).items() if value is not None}
        return await self._ask("GET", path, ASK_LIMIT, params=asked)

    async def act(self, path: str, arguments: Mapping[str, Any]) -> Row:
        """Do something; raises as `read` does."""
        headers = {"content-type": "application/json"}
        content = msgspec.json.encode(dict(arguments))
        row: Row = await self._ask("POST", path, ACT_LIMIT, content=content, headers=headers)
        return row

    async def _ask(self, method: str, path: str, limit: float, **more: Any) -> Any:
        answer = None
        with trio.move_on_after(limit):
            try:
                answer = await self._operators.request(method, PREFIX + path, **more)
            except (httpx.HTTPError, OSError) as error:
                raise NoAnswer(f"process {self.number} broke off: {type(error).__name__}") from error
        if answer is None:
            raise NoAnswer(f"process {self.number} did not answer within {limit:g} s")
        value = msgspec.json.decode(answer.content)
        if answer.status_code != 200:
            raise _refused(answer, value["error"])
        return value

    async def pass_on(
        self, method: str, target: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, bytes]:
        """Pass on what a worker says; answers status and body.

        Raises:
            NoAnswer: there was none.
        """
        answer = None
        lines = {name.encode(): value.encode("latin-1") for name, value in headers.items()}  # as they came
        with trio.move_on_after(ASK_LIMIT):
            try:
                answer = await self._workers.request(method, target, headers=lines, content=body)
            except (httpx.HTTPError, OSError) as error:
                raise NoAnswer(f"process {self.number} broke off: {type(error).__name__}") from error
        if answer is None:
            raise NoAnswer(f"process {self.number} did not answer within {ASK_LIMIT:g} s")
        return answer.status_code, answer.content

    async def close(self) -> None:
        """Close the connections to it."""
        await self._operators.aclose()
        await self._workers.aclose()


def _client(path: str, headers: Mapping[str, str]) -> httpx.AsyncClient:
    transport = httpx.AsyncHTTPTransport(uds=path, limits=httpx.Limits(max_connections=None), retries=1)
    # Limits of time are the callers' scopes.
    return httpx.AsyncClient(
        transport=transport,
        base_url="http://localhost",
        headers=dict(headers),
        timeout=None,  # noqa: S113
        trust_env=False,
    )


def _refused(answer: httpx.Response, error: Mapping[str, Any]) -> Refused:
    wait = answer.headers.get("retry-after")
    return Refused(
        Problem(
            error["code"],
            error["message"],
            answer.status_code,
            error["type"],
            error["param"],
            None if wait is None else float(wait),
        )
    )
