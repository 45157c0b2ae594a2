"""What stands before every route of the operators' door: heads are judged, bodies bounded, answers marked.

The server behind Starlette puts the pieces of a body into a queue of ten and waits there
when nobody takes them: an answer that goes out while a body still comes would leave a task
and a descriptor behind. So each request has a reader that takes whatever comes until the
answer is out, and keeps what fits. The same reader notices a client that left.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import msgspec
import trio
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import Problem, Refused
from ._access import UNIX, Access
from ._port import Actor, refusal
from ._routes import LIVEZ, WHO

MOST_BYTES: Final = 64 * 1024  # of a body
MOST_PIECES: Final = 4096  # of a body; smaller ones cost more than they carry
BODY_LIMIT: Final = 10.0  # seconds for it to come

# Nothing is unescaped or normalised: what could be written in two ways is no path of ours.
_PATH: Final = re.compile(rb"/|(?:/[A-Za-z0-9._~:@!$&'()*+,;=-]+)+")
_DOTS: Final = re.compile(rb"/\.{1,2}(?:/|\Z)")

_JSON_POLICY: Final = "default-src 'none'; frame-ancestors 'none'"
_MARKS: Final = {
    "cache-control": "no-store",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
_POLICY: Final = b"content-security-policy"


class Intake:
    """Takes what comes of one request.

    Attributes:
        gone: the client left, or the answer is out.
    """

    def __init__(self) -> None:
        self._body = bytearray()
        self._pieces = 0
        self._ended = trio.Event()
        self._too_large = False
        self.gone = False

    async def run(self, receive: Receive) -> None:
        """Take everything, until the server says that the request is over."""
        while not self.gone:
            message = await receive()
            if message["type"] == "http.request":
                self._take(message)
            else:
                self.gone = True
                self._ended.set()

    async def body(self) -> bytes:
        """Wait for the whole body.

        Raises:
            Refused: ``request_too_large``, or ``request_timeout`` after `BODY_LIMIT`.
        """
        with trio.move_on_after(BODY_LIMIT):
            await self._ended.wait()
            if self._too_large:
                raise refusal("request_too_large", f"the body is longer than {MOST_BYTES} bytes")
            return bytes(self._body)
        raise refusal("request_timeout", f"the body did not come within {BODY_LIMIT:g} s")

    def _take(self, message: Message) -> None:
        self._body += message.get("body", b"")
        self._pieces += 1
        if len(self._body) > MOST_BYTES or self._pieces > MOST_PIECES:
            self._too_large = True
            self._body.clear()
        if self._too_large or not message.get("more_body", False):
            self._ended.set()


class Guard:
    """An ASGI application around the routes.

    Args:
        app: what answers those who may come in.
        access: who that is.
        pages: paths of pages that hold nothing of ours, and need no token.
    """

    def __init__(self, app: ASGIApp, access: Access, pages: Mapping[str, object]) -> None:
        self._app = app
        self._access = access
        self._open = {LIVEZ, *pages}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "http":
            await self._serve(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
        else:
            await self._app(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        intake, request_id = Intake(), secrets.token_hex(8)
        answered = False

        async def marked(message: Message) -> None:
            nonlocal answered
            if message["type"] == "http.response.start":
                mark(message, request_id)
            elif not message.get("more_body", False):
                answered = True  # the server now ends the request; that must not end the writing
            await send(message)

        async with trio.open_nursery() as nursery:

            async def take() -> None:
                await intake.run(receive)
                if not answered:
                    nursery.cancel_scope.cancel()

            nursery.start_soon(take)
            try:
                self._judge(scope, request_id, intake)
            except Refused as refused:
                await told(refused.problem)(scope, receive, marked)
            else:
                await self._app(scope, receive, marked)
            nursery.cancel_scope.cancel()

    def _judge(self, scope: Scope, request_id: str, intake: Intake) -> None:
        path, address = scope["raw_path"], scope["client"][0] if scope["client"] else UNIX
        scope["state"] = {"intake": intake}
        if not _PATH.fullmatch(path) or _DOTS.search(path):
            raise refusal("unknown_route", "there is no such path")
        if path != LIVEZ.encode():
            self._access.check_page(scope["headers"], address)
        if path == WHO.encode() and self._access.asks_for_a_token(scope["headers"]):
            return
        if path.decode() not in self._open:
            who, role = self._access.who(scope["headers"], address, trio.current_time())
            scope["state"]["actor"] = Actor(who, role, request_id)


def mark(message: Message, request_id: str) -> None:
    """Add to the head of an answer what keeps browsers from doing harm with it."""
    headers = message["headers"] = list(message.get("headers", ()))
    headers += [(name.encode(), value.encode()) for name, value in _MARKS.items()]
    headers.append((b"x-request-id", request_id.encode()))
    if all(name != _POLICY for name, _ in headers):
        headers.append((_POLICY, _JSON_POLICY.encode()))


def told(problem: Problem, headers: Mapping[str, str] | None = None) -> Response:
    """Answer a refusal."""
    error = {
        "message": problem.message,
        "type": problem.type,
        "code": problem.code,
        "param": problem.param,
    }
    more = dict(headers or {})
    if problem.status == 401:
        more["www-authenticate"] = "Bearer"
    if problem.retry_after is not None:
        more["retry-after"] = str(max(1, round(problem.retry_after)))
    return as_json({"error": error}, problem.status, more)


def as_json(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Answer a value."""
    body = msgspec.json.encode(value, enc_hook=str)
    return Response(body, status, headers, media_type="application/json")


Handler = Callable[[Request], Awaitable[Response]]
Bug = Callable[[str, BaseException], None]


def answering(handler: Handler, bug: Bug) -> Handler:
    """Let a handler refuse by raising, and keep its faults to itself."""

    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except Refused as refused:
            return told(refused.problem)
        except Exception as exc:
            bug("admin route", exc)
            return told(
                refusal("internal_error", "this is a fault of the gateway; its log says more").problem
            )

    return handle


def actor_of(request: Request) -> Actor:
    """Who asks."""
    actor: Actor = request.scope["state"]["actor"]
    return actor


def actor_if_known(request: Request) -> Actor | None:
    """Who asks; None at `WHO`, where a token is needed and none was sent."""
    actor: Actor | None = request.scope["state"].get("actor")
    return actor


def intake_of(request: Request) -> Intake:
    """What takes the request's body."""
    intake: Intake = request.scope["state"]["intake"]
    return intake
