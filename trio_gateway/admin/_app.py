"""The operators' application: every route of `_routes`, with what it asks of a request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import trio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..errors import Refused
from ..flow import in_steps
from ..wire import read_object
from ._access import Access
from ._feed import Feed
from ._guard import Bug, Guard, Handler, actor_if_known, actor_of, answering, as_json, intake_of, told
from ._openapi import document
from ._port import AdminPort, RequestFilter, answered, refusal
from ._routes import ACTS, LIVEZ, METRICS, PREFIX, READS, WHO, Act, Read
from ._schema import Schema, complaints
from ._shapes import SHAPES

Statistics = dict[str, Any]
JSON: Final = "application/json"
MOST_VALUES: Final = 4096  # in a body


@dataclass(frozen=True, slots=True)
class Page:
    """A page of the gateway's own, without data; whoever can connect gets it.

    Attributes:
        policy: its Content-Security-Policy.
    """

    body: bytes
    media_type: str
    policy: str


@dataclass(frozen=True, slots=True)
class Metrics:
    """How metrics are written.

    Attributes:
        render: writes statistics, in pieces between which others run: a thread would hold up the loop
            too, and for longer where the processors are busy.
        media_type: of what it writes.
    """

    render: Callable[[Statistics], Iterator[bytes]]
    media_type: str


def make_admin_app(
    port: AdminPort,
    access: Access,
    metrics: Metrics,
    bug: Bug,
    pages: Mapping[str, Page] = MappingProxyType({}),
) -> Starlette:
    """Build the application.

    Args:
        bug: takes an exception that should not have happened.
        pages: by their paths.
    """
    feed = Feed(port, access)

    # Starlette would run plain functions in threads of another event loop.
    async def livez(request: Request) -> Response:  # noqa: ASYNC124
        return as_json({"status": "ok"})

    async def write_metrics(request: Request) -> Response:
        pieces = await in_steps(metrics.render(await answered(port.statistics())), 1)
        return Response(b"".join(pieces), headers={"content-type": metrics.media_type})

    async def openapi(request: Request) -> Response:  # noqa: ASYNC124
        return as_json(document(port.version()["version"]))

    async def who(request: Request) -> Response:  # noqa: ASYNC124
        actor = actor_if_known(request)
        return as_json({"id": actor and actor.id, "role": actor and actor.role})

    async def live(request: Request) -> Response:  # noqa: ASYNC124
        _query(request, {})
        return feed.answer()

    async def snapshot(request: Request) -> Response:
        _query(request, {})
        return Response(await feed.latest(trio.current_time()), media_type=JSON)

    reading = {
        LIVEZ: livez,
        METRICS: write_metrics,
        f"{PREFIX}/openapi.json": openapi,
        f"{PREFIX}/feed": live,
        WHO: who,
        **{PREFIX + read.path: _reader(port, read) for read in READS},
        f"{PREFIX}/snapshot": snapshot,  # one for all who ask within a second: rates are since the last
        **{path: _page(page) for path, page in pages.items()},
    }
    acting = {PREFIX + act.path: _actor(port, act) for act in ACTS}
    app = Starlette(
        routes=[_route(path, reading, acting, bug) for path in {**reading, **acting}],
        middleware=[Middleware(Guard, access, pages)],
        exception_handlers={HTTPException: _not_routed},
    )
    app.router.redirect_slashes = False
    return app


def _route(path: str, reading: Mapping[str, Handler], acting: Mapping[str, Handler], bug: Bug) -> Route:
    """Make one route of a path, so that Starlette can name all its methods to who asks with another."""
    handlers = {
        method: answering(found[path], bug)
        for method, found in (("GET", reading), ("POST", acting))
        if path in found
    }

    async def handle(request: Request) -> Response:
        return await handlers["POST" if request.method == "POST" else "GET"](request)

    return Route(path, handle, methods=list(handlers))


# Reading ----------------------------------------------------------------------------------------------------


def _reader(port: AdminPort, read: Read) -> Handler:
    method = getattr(port, read.name)

    async def handle(request: Request) -> Response:
        answer = await answered(method(*_arguments(request, read)))
        return as_json({read.member: answer} if read.member else answer)

    return handle


def _arguments(request: Request, read: Read) -> tuple[object, ...]:
    asked = _query(request, read.query)
    if read.name == "requests":
        return (RequestFilter(**asked),)
    if "limit" in read.query:
        return (asked.get("limit", 100),)
    return tuple(request.path_params.values())


def _query(request: Request, known: Mapping[str, Schema]) -> dict[str, Any]:
    """Read parameters strictly: one that is not known, or there twice, was meant to do something."""
    asked: dict[str, Any] = {}
    for name, value in request.query_params.multi_items():
        if name not in known:
            raise refusal(
                "unknown_field", f"the parameters are: {', '.join(known) or 'none'}", param=name[:64]
            )
        if name in asked:
            raise refusal("invalid_value", "is there twice", param=name)
        whole = known[name]["type"] == "integer" and value.isascii() and value.isdigit() and len(value) < 10
        asked[name] = int(value) if whole else value
        _check(asked[name], known[name], name)
    return asked


# Acting -----------------------------------------------------------------------------------------------------


def _actor(port: AdminPort, act: Act) -> Handler:
    async def handle(request: Request) -> Response:
        actor, target = actor_of(request), request.path_params.get("id")
        refused: Refused | None = None
        try:
            if actor.role != "operator":
                raise refusal("role_not_allowed", f"the token {actor.id} may read, but not act")
            _query(request, {})
            arguments = await _body(request, act)
        except Refused as why:
            refused = why
        if refused is not None:
            await port.refused(actor, act.action, target, refused.problem.code)
            raise refused
        result = await port.act(actor, act.action, target, arguments)
        return as_json({"done": result.done, "before": result.before, "after": result.after})

    return handle


async def _body(request: Request, act: Act) -> dict[str, Any]:
    """Read the body of an action. A form of another site's page can not have this content type."""
    kind, _, _ = request.headers.get("content-type", "").partition(";")
    if kind.strip().lower() != JSON:
        raise refusal("unsupported_media_type", f"the body must be {JSON}")
    # As strict as with clients: what is no number in JSON would be a null to whoever it is passed on to.
    value = read_object(await intake_of(request).body(), MOST_VALUES).value
    _check(value, SHAPES[act.shape])
    return value


def _check(value: object, schema: Schema, path: str = "") -> None:
    for where, why in complaints(value, schema, SHAPES, path):
        code = {"is not known": "unknown_field", "must be given": "missing_field"}.get(why, "invalid_value")
        raise refusal(code, f"{where[:64]} {why}", param=where[:64])


# Others -----------------------------------------------------------------------------------------------------


def _page(page: Page) -> Handler:
    async def handle(request: Request) -> Response:  # noqa: ASYNC124
        headers = {"content-security-policy": page.policy}
        return Response(page.body, headers=headers, media_type=page.media_type)

    return handle


async def _not_routed(request: Request, exc: Exception) -> Response:  # noqa: ASYNC124
    """Say in our words what Starlette found no route for."""
    if isinstance(exc, HTTPException) and exc.status_code == 405:
        problem = refusal("method_not_allowed", "the path is there, but not for this method").problem
        return told(problem, exc.headers)
    return told(refusal("unknown_route", "there is no such path").problem)
