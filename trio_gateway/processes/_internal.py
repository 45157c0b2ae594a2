"""The listener of workers that register: what they say is said to every process, and all must agree.

All processes make the same secret for a worker, so each knows it. One that was started later does not know
the worker yet: it says so, the worker is told, and registers again, which changes nothing for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import trio
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from ..admin import MOST_WORKER_BYTES, WORKER_BODY_LIMIT
from ..telemetry import Log
from ._child import Child, NoAnswer

# Of answers that differ the one that counts: whoever knows of a younger worker, then whoever knows of none.
_ORDER: Final = (409, 404, 401, 403, 400)
_PASSED: Final = ("authorization", "content-type")


def make_internal_app(children: Callable[[], Sequence[Child]], log: Log) -> Starlette:
    """Build the application.

    Args:
        children: answers those that serve now.
    """

    async def pass_on(request: Request) -> Response:
        headers = {name: request.headers[name] for name in _PASSED if name in request.headers}
        body = await _body(request)
        if body is None:
            return _answer(413, b'{"error": {"message": "the body is too large, or did not come"}}')
        target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        answers: list[tuple[int, bytes]] = []

        async def one(child: Child) -> None:
            try:
                answers.append(await child.pass_on(request.method, target, headers, body))
            except NoAnswer as error:
                log.write("warning", "process_silent", process=child.number, reason=str(error))

        async with trio.open_nursery() as nursery:
            for child in children():
                nursery.start_soon(one, child)
        if not answers:
            return _answer(503, b'{"error": {"message": "no process answers at the moment"}}')
        return _answer(*min(answers, key=lambda answer: _rank(answer[0], request.method)))

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


def _answer(status: int, body: bytes) -> Response:
    return Response(body, status, media_type="application/json")
