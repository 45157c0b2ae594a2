"""The public routes, and the order in which a request is judged: route, method, key, size, room."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from ..contract import OPERATIONS, RESPONSES, Operation, RatesPort
from ..errors import ClientGone, Problem, Refused
from ..exchange import OWNER, LiveExchanges
from ..ledger import Books
from ..tenancy import Caller
from ..wire import RequestHead
from ._authenticate import Authenticator
from ._generate import Generator, client_request_id, identity_headers, new_id
from ._head import answer_head, rate_headers
from ._http_server import Incoming, write_within
from ._problems import JSON
from ._sockets import Sockets

_OPERATIONS: Final = {operation.path: operation for operation in OPERATIONS}
_READABLE: Final = ("GET", "HEAD")
_MODELS: Final = "/v1/models"
_REQUESTS: Final = "/v1/requests/"
_EVENTS: Final = "/events"
_TOKENS: Final = "/v1/tokens"
_METHODS: Final = "GET, HEAD, POST, DELETE, OPTIONS"
_TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")

Headers = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class DoorSettings:
    """What the door knows of the process.

    Attributes:
        via: our name in ``Via``; a request that carries it came from us.
        created: start of the process, seconds since the epoch.
        origins: pages of these origins may call us; ``*``: of all.
    """

    via: str
    created: int
    origins: frozenset[str] = frozenset()


class Door:
    """Answers every public request. See Handler.

    Args:
        rates: whose standings go with every answer to a caller that is known.
        ready: why the gateway is not ready; None: it is.
        models: answers public names by every name that they have, in the order of the configuration.
        live: the exchanges of the process.
        refusing: the problem that new work is refused with; None: it is welcome.
        sockets: all WebSockets of the process.

    Attributes:
        elsewhere: asks other processes as `look` answers here, and refuses if one does not say; None: there
            are none.
        hand_over: hands a connection to the process that `keeps` an answer; told the request's id, tenant,
            key, descriptor and what was read; False: there is none.
    """

    elsewhere: Callable[[str, str, bool], Awaitable[dict[str, Any] | None]] | None = None
    hand_over: Callable[[str, str, str | None, int, bytes], Awaitable[bool]] | None = None

    def __init__(
        self,
        settings: DoorSettings,
        authenticator: Authenticator,
        generator: Generator,
        books: Books,
        models: Callable[[], Mapping[str, str]],
        live: LiveExchanges,
        ready: Callable[[], str | None],
        refusing: Callable[[], Problem | None],
        rates: RatesPort,
        sockets: Sockets,
    ) -> None:
        self._settings = settings
        self._authenticator = authenticator
        self._generator = generator
        self._books = books
        self._models = models
        self._live = live
        self._ready = ready
        self._refusing = refusing
        self._rates = rates
        self._sockets = sockets
        self._via = settings.via.encode("ascii")

    def malformed(self, code: str) -> None:
        """See Handler."""
        self._books.arrive()
        self._books.turn_away(code)

    async def answer(self, incoming: Incoming) -> bool:
        """See Handler."""
        head = incoming.head
        exchange_id = new_id()
        operation = _OPERATIONS.get(head.path)
        anthropic = operation is not None and operation.anthropic
        own = identity_headers(exchange_id, client_request_id(head), anthropic=anthropic)
        identity = (*own, *self._cors(head))
        visit = Visit(incoming, exchange_id, identity)
        self._books.arrive()
        try:
            return await self._answer(visit)
        except Refused as refused:
            if not visit.accounted:
                self._books.turn_away(refused.problem.code)
            headers = (*identity, *self._rate_headers(visit), *refused.problem.headers)
            raise Refused(refused.problem.but(headers=headers)) from None
        except BaseException as exc:
            if not visit.accounted:
                self._books.turn_away("client_gone" if isinstance(exc, ClientGone) else "internal_error")
            raise

    async def _answer(self, visit: Visit) -> bool:
        head = visit.incoming.head
        path = head.path
        if path in ("/livez", "/readyz"):
            _check_method(head, _READABLE)
            return await self._reply(visit, *self._health(path))
        if self._settings.origins and _is_preflight(head):
            return await self._preflight(visit)
        if (problem := self._refusing()) is not None:
            raise Refused(problem)
        if path == _TOKENS:
            _check_method(head, ("GET",))
            return await self._open_socket(visit, self._sockets.tokens)
        operation = _OPERATIONS.get(path)
        if operation is RESPONSES and head.method != "POST":
            _check_method(head, ("POST", "GET"))
            return await self._open_socket(visit, self._sockets.responses)
        if operation is not None:
            _check_method(head, ("POST",))
            return await self._work(visit, operation)
        if path == _MODELS or path.startswith(_MODELS + "/"):
            _check_method(head, _READABLE)
            return await self._reply(visit, 200, self._list_models(visit))
        if path.startswith(_REQUESTS) and path.endswith(_EVENTS):
            _check_method(head, ("GET",))
            return await self._resume(visit)
        if path.startswith(_REQUESTS) and "/" not in path.removeprefix(_REQUESTS):
            _check_method(head, (*_READABLE, "DELETE"))
            return await self._reply(visit, 200, await self._own_request(visit))
        raise Refused(Problem.of("unknown_route", "there is nothing at this path"))

    async def _work(self, visit: Visit, operation: Operation) -> bool:
        head = visit.incoming.head
        caller = self._authenticate(visit)
        _check_media_type(head, operation)
        if any(self._via in value for value in head.all(b"via")):
            raise Refused(Problem.of("loop_detected", "the request has passed this gateway before"))
        return await self._generator.run(
            visit.incoming, operation, caller, visit.exchange_id, visit.identity, visit.account
        )

    async def _open_socket(
        self, visit: Visit, speak: Callable[[Incoming, Headers, Callable[[], None]], Awaitable[None]]
    ) -> bool:
        """Speak a protocol over WebSocket; the connection ends with it."""
        await speak(visit.incoming, visit.identity, self._no_work(visit))
        return False

    async def _resume(self, visit: Visit) -> bool:
        """Go on with a stream whose connection was lost."""
        head = visit.incoming.head
        caller = self._authenticate(visit)
        exchange_id = head.path.removeprefix(_REQUESTS).removesuffix(_EVENTS)
        # It is the same request, and has its name.
        identity = (*identity_headers(exchange_id, None), *self._cors(head))
        after = _event_number(head)
        if await self._handed_over(visit, exchange_id, caller):
            return False
        return await self._generator.resume(
            visit.incoming, exchange_id, after, caller, identity, self._no_work(visit)
        )

    async def _handed_over(self, visit: Visit, exchange_id: str, caller: Caller) -> bool:
        """Hand the connection to the process that keeps the answer, if it is not here; not one under TLS."""
        connection = visit.incoming.connection
        descriptor = connection.descriptor
        if (
            self.hand_over is None
            or descriptor is None
            or self.keeps(exchange_id, caller.tenant.id, caller.key_id)
        ):
            return False
        begun = visit.incoming.head.encode() + bytes(connection.heads.peek())
        if not await self.hand_over(exchange_id, caller.tenant.id, caller.key_id, descriptor, begun):
            return False
        connection.close()
        self._no_work(visit)()
        return True

    def keeps(self, exchange_id: str, tenant: str, key_id: str | None) -> bool:
        """Whether an answer is kept here for this key."""
        return self._generator.kept.has(exchange_id, tenant, key_id)

    def _no_work(self, visit: Visit) -> Callable[[], None]:
        """Answer what is called once a request is known to be none for work."""

        def forget() -> None:
            visit.account()
            self._books.forget()

        return forget

    def _authenticate(self, visit: Visit) -> Caller:
        visit.caller = self._authenticator.authenticate(visit.incoming.head, visit.incoming.connection)
        return visit.caller

    def _rate_headers(self, visit: Visit) -> Headers:
        """Answer how a known caller stands; what is asked from here costs nothing of it."""
        caller = visit.caller
        return () if caller is None else rate_headers(self._rates.standings(caller.tenant.id, caller.key_id))

    async def _own_request(self, visit: Visit) -> dict[str, Any]:
        """Tell an owner where its request stands; by DELETE it is cancelled first."""
        head = visit.incoming.head
        tenant = self._authenticate(visit).tenant
        exchange_id, cancel = head.path.removeprefix(_REQUESTS), head.method == "DELETE"
        found = self.look(exchange_id, tenant.id, cancel)
        if found is None and self.elsewhere is not None:
            found = await self.elsewhere(exchange_id, tenant.id, cancel)
        if found is None:
            raise Refused(Problem.of("request_not_found", "there is no such request, or no longer"))
        return found

    def look(self, exchange_id: str, tenant: str, cancel: bool) -> dict[str, Any] | None:
        """Answer how a request of a tenant stands, cancelled first if that is asked; None: it is not here."""
        standing = self._live.standing(exchange_id)
        if standing is None or standing.tenant != tenant:
            return None
        if cancel:
            self._live.end(exchange_id, OWNER)
            standing = self._live.standing(exchange_id) or standing
        return {
            "id": exchange_id,
            "state": standing.state,
            "position": standing.position,
            "eta_ms": None if standing.eta is None else round(standing.eta * 1000),
            "outcome": standing.outcome,
        }

    def _cors(self, head: RequestHead) -> Headers:
        """Answer what lets a browser hand an answer to the page that asked."""
        if not self._settings.origins:
            return ()
        origin = (head.header(b"origin") or b"").decode("latin-1")
        if not origin or not self._settings.origins & {"*", origin.lower()}:
            return (("vary", "Origin"),)
        return (
            ("access-control-allow-origin", origin),
            ("access-control-expose-headers", "Retry-After, X-Request-Id"),
            ("vary", "Origin"),
        )

    async def _preflight(self, visit: Visit) -> bool:
        """Answer a browser that asks whether it may; needs no key, since none is sent with it."""
        asked = (visit.incoming.head.header(b"access-control-request-headers") or b"").decode("latin-1")
        names = [name.strip() for name in asked.split(",")]
        headers: Headers = (("access-control-allow-methods", _METHODS), ("access-control-max-age", "600"))
        if all(_TOKEN.fullmatch(name) for name in names):
            headers = (*headers, ("access-control-allow-headers", ", ".join(names)))
        return await self._reply(visit, 204, None, headers)

    def _health(self, path: str) -> tuple[int, dict[str, object]]:
        reason = self._ready() if path == "/readyz" else None
        if reason is None:
            return 200, {"status": "ok"}
        return 503, {"status": "not ready", "reason": reason}

    def _list_models(self, visit: Visit) -> dict[str, object]:
        head = visit.incoming.head
        tenant = self._authenticate(visit).tenant
        models = {
            name: {
                "id": name,
                "object": "model",
                "created": self._settings.created,
                "owned_by": "trio-gateway",
            }
            for name in dict.fromkeys(self._models().values())
            if tenant.may_use(name)
        }
        if head.path == _MODELS:
            return {"object": "list", "data": list(models.values())}
        asked = urllib.parse.unquote(head.path.removeprefix(_MODELS + "/"))
        name = self._models().get(asked, "")
        if name not in models:
            raise Refused(Problem.of("model_not_found", "the model does not exist here", param="model"))
        return dict(models[name])

    async def _reply(self, visit: Visit, status: int, answer: object, headers: Headers = ()) -> bool:
        """Answer with JSON of our own, or without a body."""
        head = visit.incoming.head
        body = b"" if answer is None else msgspec.json.encode(answer)
        lines = [*visit.identity, *self._rate_headers(visit), *headers]
        if answer is not None:
            lines += [("content-type", JSON), ("content-length", str(len(body)))]
        if not head.keep_alive:
            lines.append(("connection", "close"))
        raw = answer_head(status, lines)
        visit.account()
        self._books.forget()
        await write_within(visit.incoming.connection, raw if head.method == "HEAD" else raw + body)
        return True


@dataclass(slots=True, eq=False)
class Visit:
    """One request at the door.

    Attributes:
        identity: headers of its answer, whatever it will be.
        caller: who asks, once that is known.
        accounted: somebody else counts it from now on.
    """

    incoming: Incoming
    exchange_id: str
    identity: Headers
    caller: Caller | None = None
    accounted: bool = False

    def account(self) -> None:
        """Leave the accounting to others."""
        self.accounted = True


def _event_number(head: RequestHead) -> int:
    """Answer how many events a caller has already."""
    query = urllib.parse.parse_qs(head.target.partition("?")[2], keep_blank_values=True)
    given = query.get("after", ["0"])
    if len(given) != 1 or not re.fullmatch(r"[0-9]{1,15}", given[0]):
        raise Refused(Problem.of("invalid_value", "'after' has to be a number of events", param="after"))
    return int(given[0])


def _is_preflight(head: RequestHead) -> bool:
    return (
        head.method == "OPTIONS"
        and head.header(b"origin") is not None
        and head.header(b"access-control-request-method") is not None
    )


def _check_method(head: RequestHead, allowed: tuple[str, ...]) -> None:
    if head.method not in allowed:
        names = ", ".join(allowed)
        raise Refused(
            Problem.of("method_not_allowed", f"the method is none of {names}", headers=(("allow", names),))
        )


def _check_media_type(head: RequestHead, operation: Operation) -> None:
    coding = (head.header(b"content-encoding") or b"identity").strip().lower()
    if coding != b"identity":
        raise Refused(
            Problem.of(
                "unsupported_media_type",
                "a coded body is not read here",
                headers=(("accept-encoding", "identity"),),
            )
        )
    wanted = b"multipart/form-data" if operation.multipart else b"application/json"
    kind = (head.header(b"content-type") or b"application/json").partition(b";")[0].strip().lower()
    if kind != wanted:
        raise Refused(Problem.of("unsupported_media_type", f"the body has to be {wanted.decode('ascii')}"))
