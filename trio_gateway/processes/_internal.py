"""The listener of workers that register: what they say is said to every process, and all must agree.

All processes make the same secret for a worker, so each knows it. One that is started later is told what
workers last said before it serves anybody, so that no client of it finds a worker missing. If one does not
know a worker all the same, it says so, the worker is told, and registers again, which changes nothing for the
others. One that hangs holds up nobody: the answers of the others count without it.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import trio
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from ..admin import MOST_WORKER_BYTES, WORKER_BODY_LIMIT, bearer_of_worker
from ..telemetry import Log
from ..wire import Registered, Registration, read_message
from ._child import Child, NoAnswer

# Of answers that differ the one that counts: whoever knows of a younger worker, then whoever knows of none.
_ORDER: Final = (409, 404, 401, 403, 400)
_PASSED: Final = ("authorization", "content-type")
TOLD_AT_ONCE: Final = 16  # workers that a process is told of at a time, before it serves


@dataclass(frozen=True, slots=True)
class Said:
    """Something that a worker said, and all processes took."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes


@dataclass(slots=True, eq=False)
class _Known:
    """A worker that all processes know.

    Attributes:
        secret: what it shows when it says something.
        heard_at: when it last said something.
        report: how it last said that it is.
        end: it has signed off.
    """

    registration: Said
    secret: str
    heard_at: float
    report: Said | None = None
    end: Said | None = None


class WorkerDoor:
    """Passes on what workers say, and tells it to a process that comes later.

    Args:
        children: answers all processes; those that hear workers are told.
        ttl: seconds for which a worker is believed.
        interval: seconds between two heartbeats of one.
        join_token: what a new worker has to show.
    """

    def __init__(
        self,
        children: Callable[[], Sequence[Child]],
        ttl: float,
        interval: float,
        join_token: str,
        log: Log,
    ) -> None:
        self._children = children
        self._join_token = join_token
        self._ttl = ttl
        # Else a worker would wait with its next heartbeat until nobody believes it any more: even if one
        # more is lost, the others hear of it in time.
        self._patience = (ttl - interval) / 4
        self._log = log
        self._known: dict[str, _Known] = {}

    def turned(self, worker_id: str | None, shown: str) -> tuple[int, bytes] | None:
        """Answer one who may not say anything, before its body takes memory; None: it may.

        A worker that is known to processes alone registers again, which changes nothing for them.

        Args:
            worker_id: None: it registers.
        """
        if worker_id is None:
            return None if _equal(self._join_token, shown) else (401, _says("this is not the join token"))
        if (known := self._known.get(worker_id)) is None:
            return 404, _says("the worker is not known here")
        return None if _equal(known.secret, shown) else (401, _says("this is not the worker's secret"))

    async def pass_on(self, worker_id: str | None, said: Said) -> tuple[int, bytes] | None:
        """Tell all processes; answers what counts of their answers, None if there was none.

        Once one has answered, the others have a moment. Who is told too late to answer in it may have heard
        all the same, and hears the next heartbeat.

        Args:
            worker_id: None: it stands in the body.
        """
        answers: list[tuple[int, bytes]] = []

        async def one(child: Child) -> None:
            answer = await self._tell(child, said)
            if answer is not None:
                answers.append(answer)
                scope = nursery.cancel_scope
                scope.deadline = min(scope.deadline, trio.current_time() + self._patience)

        async with trio.open_nursery() as nursery:
            for child in self._children():
                if child.hears_workers:
                    nursery.start_soon(one, child)
        if not answers:
            return None
        found = min(answers, key=lambda answer: _rank(answer[0], said.method))
        if found[0] == 200:
            self._remember(worker_id, said, found[1])
        return found

    async def welcome(self, child: Child) -> None:
        """Tell a process that is there now what workers said last; from then on it hears what others hear."""
        told: dict[str, tuple[_Known, bool]] = {}
        at_once = trio.Semaphore(TOLD_AT_ONCE)
        while True:
            self._forget()
            news = {
                name: now
                for name, each in self._known.items()
                if told.get(name) != (now := (each, each.end is not None))
            }
            if not news:
                child.hears_workers = True
                return
            told |= news
            async with trio.open_nursery() as nursery:
                for known, _ in news.values():
                    nursery.start_soon(self._tell_of, child, known, at_once)

    async def _tell_of(self, child: Child, known: _Known, at_once: trio.Semaphore) -> None:
        async with at_once:
            for said in (known.registration, known.report, known.end):
                if said is not None:
                    await self._tell(child, said)

    def _forget(self) -> None:
        """Forget workers that nobody believes any more."""
        until = trio.current_time() - self._ttl
        self._known = {name: each for name, each in self._known.items() if each.heard_at > until}

    async def _tell(self, child: Child, said: Said) -> tuple[int, bytes] | None:
        try:
            return await child.pass_on(said.method, said.target, said.headers, said.body)
        except NoAnswer as error:
            self._log.write("warning", "process_silent", process=child.number, reason=str(error))
            return None

    def _remember(self, worker_id: str | None, said: Said, answer: bytes) -> None:
        now = trio.current_time()
        if worker_id is None:
            self._forget()
            worker_id = read_message(said.body, Registration).worker_id
            self._known[worker_id] = _Known(said, read_message(answer, Registered).secret, now)
        elif (known := self._known.get(worker_id)) is not None:
            known.heard_at = now
            if said.method == "PUT":
                known.report = said
            else:
                known.end = said


def make_internal_app(door: WorkerDoor) -> Starlette:
    """Build the application."""

    async def pass_on(request: Request) -> Response:
        worker_id = request.path_params.get("worker_id")
        turned = door.turned(worker_id, bearer_of_worker(request))
        if turned is not None:
            return _answer(*turned)
        headers = {name: request.headers[name] for name in _PASSED if name in request.headers}
        body = await _body(request)
        if body is None:
            return _answer(413, _says("the body is too large, or did not come"))
        target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        said = Said(request.method, target, headers, body)
        answer = await door.pass_on(worker_id, said)
        if answer is None:
            return _answer(503, _says("no process answers at the moment"))
        return _answer(*answer)

    async def livez(request: Request) -> Response:  # noqa: ASYNC124
        return _answer(200, b'{"status": "ok"}')

    workers = "/internal/v1/workers"
    return Starlette(
        routes=[
            Route("/livez", livez),
            Route(workers, pass_on, methods=["POST"]),
            Route(f"{workers}/{{worker_id}}", pass_on, methods=["PUT", "DELETE"]),
        ]
    )


def _rank(status: int, method: str) -> int:
    if status == 404 and method == "DELETE":
        return len(_ORDER) + 1  # who never knew it has nothing to forget
    return _ORDER.index(status) if status in _ORDER else len(_ORDER)


async def _body(request: Request) -> bytes | None:
    body = bytearray()
    with trio.move_on_after(WORKER_BODY_LIMIT):
        try:
            async for piece in request.stream():
                body += piece
                if len(body) > MOST_WORKER_BYTES:
                    return None
        except ClientDisconnect:
            return None
        return bytes(body)
    return None


def _equal(secret: str, shown: str) -> bool:
    return hmac.compare_digest(secret.encode(), shown.encode())


def _says(message: str) -> bytes:
    return b'{"error": {"message": "%b"}}' % message.encode()


def _answer(status: int, body: bytes) -> Response:
    return Response(body, status, media_type="application/json")
