"""The public routes, and the order in which a request is judged: route, method, key, size, room."""

from __future__ import annotations

import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from ..contract import OPERATIONS, Operation
from ..errors import ClientGone, Problem, Refused
from ..ledger import Books
from ..tenancy import Keyring
from ..wire import RequestHead, write_response_head
from ._authenticate import authenticate
from ._generate import Generator, client_request_id, identity_headers, new_id
from ._http_server import Incoming, write_within
from ._problems import JSON

_OPERATIONS: Final = {operation.path: operation for operation in OPERATIONS}
_READABLE: Final = ("GET", "HEAD")
_MODELS: Final = "/v1/models"


@dataclass(frozen=True, slots=True)
class DoorSettings:
    """What the door knows of the process.

    Attributes:
        via: our name in ``Via``; a request that carries it came from us.
        created: start of the process, seconds since the epoch.
    """

    via: str
    created: int


class Door:
    """Answers every public request. See Handler.

    Args:
        ready: why the gateway is not ready; None: it is.
        models: public names, in the order of the configuration.
        refusing: the problem that new work is refused with; None: it is welcome.
    """

    def __init__(
        self,
        settings: DoorSettings,
        keyring: Keyring,
        generator: Generator,
        books: Books,
        models: tuple[str, ...],
        ready: Callable[[], str | None],
        refusing: Callable[[], Problem | None],
    ) -> None:
        self._settings = settings
        self._keyring = keyring
        self._generator = generator
        self._books = books
        self._models = models
        self._ready = ready
        self._refusing = refusing
        self._via = settings.via.encode("ascii")

    def malformed(self, code: str) -> None:
        """See Handler."""
        self._books.arrive()
        self._books.turn_away(code)

    async def answer(self, incoming: Incoming) -> bool:
        """See Handler."""
        exchange_id = new_id()
        self._books.arrive()
        pending = [True]  # not yet accounted for

        def accounted() -> None:
            pending.clear()

        try:
            return await self._answer(incoming, exchange_id, accounted)
        except Refused as refused:
            if pending:
                self._books.turn_away(refused.problem.code)
            identity = identity_headers(exchange_id, client_request_id(incoming.head))
            raise Refused(refused.problem.but(headers=(*identity, *refused.problem.headers))) from None
        except BaseException as exc:
            if pending:
                self._books.turn_away("client_gone" if isinstance(exc, ClientGone) else "internal_error")
            raise

    async def _answer(self, incoming: Incoming, exchange_id: str, accounted: Callable[[], None]) -> bool:
        head = incoming.head
        path = head.path
        if path in ("/livez", "/readyz"):
            _check_method(head, _READABLE)
            status, answer = self._health(path)
            return await self._reply(incoming, exchange_id, status, answer, accounted)
        if (problem := self._refusing()) is not None:
            raise Refused(problem)
        operation = _OPERATIONS.get(path)
        if operation is not None:
            _check_method(head, ("POST",))
            return await self._work(incoming, operation, exchange_id, accounted)
        if path == _MODELS or path.startswith(_MODELS + "/"):
            _check_method(head, _READABLE)
            return await self._reply(incoming, exchange_id, 200, self._list_models(head), accounted)
        raise Refused(Problem.of("unknown_route", "there is nothing at this path"))

    async def _work(
        self, incoming: Incoming, operation: Operation, exchange_id: str, accounted: Callable[[], None]
    ) -> bool:
        head = incoming.head
        caller = authenticate(head, self._keyring)
        _check_media_type(head)
        if any(self._via in value for value in head.all(b"via")):
            raise Refused(Problem.of("loop_detected", "the request has passed this gateway before"))
        return await self._generator.run(incoming, operation, caller, exchange_id, accounted)

    def _health(self, path: str) -> tuple[int, dict[str, object]]:
        reason = self._ready() if path == "/readyz" else None
        if reason is None:
            return 200, {"status": "ok"}
        return 503, {"status": "not ready", "reason": reason}

    def _list_models(self, head: RequestHead) -> dict[str, object]:
        tenant = authenticate(head, self._keyring).tenant
        models = {
            name: {
                "id": name,
                "object": "model",
                "created": self._settings.created,
                "owned_by": "trio-gateway",
            }
            for name in self._models
            if tenant.may_use(name)
        }
        if head.path == _MODELS:
            return {"object": "list", "data": list(models.values())}
        name = urllib.parse.unquote(head.path.removeprefix(_MODELS + "/"))
        if name not in models:
            raise Refused(Problem.of("model_not_found", "the model does not exist here", param="model"))
        return dict(models[name])

    async def _reply(
        self, incoming: Incoming, exchange_id: str, status: int, answer: object, accounted: Callable[[], None]
    ) -> bool:
        """Answer with JSON of our own."""
        head = incoming.head
        body = msgspec.json.encode(answer)
        headers = [
            *identity_headers(exchange_id, client_request_id(head)),
            ("content-type", JSON),
            ("content-length", str(len(body))),
        ]
        if not head.keep_alive:
            headers.append(("connection", "close"))
        raw = write_response_head(status, headers)
        accounted()
        self._books.forget()
        await write_within(incoming.connection, raw if head.method == "HEAD" else raw + body)
        return True


def _check_method(head: RequestHead, allowed: tuple[str, ...]) -> None:
    if head.method not in allowed:
        names = ", ".join(allowed)
        raise Refused(
            Problem.of("method_not_allowed", f"the method is none of {names}", headers=(("allow", names),))
        )


def _check_media_type(head: RequestHead) -> None:
    coding = (head.header(b"content-encoding") or b"identity").strip().lower()
    if coding != b"identity":
        raise Refused(
            Problem.of(
                "unsupported_media_type",
                "a coded body is not read here",
                headers=(("accept-encoding", "identity"),),
            )
        )
    kind = (head.header(b"content-type") or b"application/json").partition(b";")[0].strip().lower()
    if kind != b"application/json":
        raise Refused(Problem.of("unsupported_media_type", "the body has to be application/json"))
