"""The internal application: where agents register their workers, tell how they are, and sign off."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Final, TypeVar

import trio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..fleet import Registrations, Turned
from ..wire import Registration, WorkerReport, read_message, write_message

MOST_BYTES: Final = 16 * 1024 * 1024  # of a heartbeat that lists 65,536 requests
BODY_LIMIT: Final = 30.0  # seconds for it to come

Handler = Callable[[Request], Awaitable[Response]]
_M = TypeVar("_M", Registration, WorkerReport)


def make_internal_app(registrations: Registrations, join_token: str) -> Starlette:
    """Build the application.

    Args:
        join_token: what a new worker has to show.
    """

    async def register(request: Request) -> Response:
        if not hmac.compare_digest(bearer(request).encode(), join_token.encode()):
            raise Turned(401, "this is not the join token")
        asked = _read(await _body(request), Registration)
        return _answer(200, write_message(await registrations.register(asked)))

    async def report(request: Request) -> Response:
        worker_id, shown = request.path_params["worker_id"], bearer(request)
        registrations.recognise(worker_id, shown)  # before anybody's body takes memory
        told = _read(await _body(request), WorkerReport)
        registrations.report(worker_id, shown, told)
        return _answer(200, b"{}")

    async def remove(request: Request) -> Response:  # noqa: ASYNC124
        asked = request.query_params.get("incarnation", "")
        incarnation = int(asked) if asked.isascii() and asked.isdigit() and len(asked) < 20 else None
        registrations.remove(request.path_params["worker_id"], bearer(request), incarnation)
        return _answer(200, b"{}")

    async def livez(request: Request) -> Response:  # noqa: ASYNC124
        return _answer(200, b'{"status": "ok"}')

    workers = "/internal/v1/workers"
    return Starlette(
        routes=[
            Route("/livez", livez),
            Route(workers, _telling(register), methods=["POST"]),
            Route(f"{workers}/{{worker_id}}", _telling(report), methods=["PUT"]),
            Route(f"{workers}/{{worker_id}}", _telling(remove), methods=["DELETE"]),
        ]
    )


def _telling(handler: Handler) -> Handler:
    """Answer what is not taken with its status and reason."""

    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except Turned as turned:
            return _answer(turned.status, b'{"error": {"message": "%b"}}' % str(turned).encode())

    return handle


async def _body(request: Request) -> bytes:
    body = bytearray()
    with trio.move_on_after(BODY_LIMIT):
        async with aclosing(request.stream()) as pieces:
            async for piece in pieces:
                body += piece
                if len(body) > MOST_BYTES:
                    raise Turned(413, "the message is too large")
        return bytes(body)
    raise Turned(408, "the message did not come in time")


def _read(body: bytes, kind: type[_M]) -> _M:
    try:
        return read_message(body, kind)
    except ValueError:
        raise Turned(400, "the message can not be read") from None


def bearer(request: Request) -> str:
    """Answer the secret that a request shows; empty if none."""
    scheme, _, shown = request.headers.get("authorization", "").partition(" ")
    return shown.strip() if scheme.lower() == "bearer" else ""


def _answer(status: int, body: bytes) -> Response:
    return Response(body, status, media_type="application/json")
