"""From a public request to its exchange: reading, checking, and the identity that is ours."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import trio

from ..contract import InternalRequest, Operation, Style
from ..errors import ClientGone, Problem, Refused
from ..exchange import Exchange, LiveExchanges, Parts, admit
from ..fleet import Fleet, Route
from ..flow import BufferPool
from ..tenancy import Caller, Tenant
from ..wire import (
    ReadBody,
    RequestHead,
    forbidden_field,
    model_of,
    needs_thread,
    read_body,
    read_form_body,
    read_object,
    trace_context,
)
from ._head import rate_headers
from ._http_client import HttpClient
from ._http_server import Incoming
from ._kept import KeptAnswers
from ._resumable_client import KeepTerms, ResumableClient

_CLIENT_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
TIERS: Final = ("interactive", "standard", "batch")
_ASKED: Final = frozenset(
    {
        b"x-gateway-priority",
        b"x-gateway-session",
        b"x-gateway-timeout-ms",
        b"x-gateway-receipt",
        b"x-gateway-resumable",
        b"x-client-request-id",
        b"x-request-id",
        b"traceparent",
        b"content-type",
    }
)
KEPT_ANSWER: Final = 8 * 1024  # bytes that an ended answer takes beside its events (measured: 5 KiB)

Identity = tuple[tuple[str, str], ...]
Task = Callable[[], Awaitable[None]]


@dataclass(slots=True)  # frozen, its fields would be set by calls
class Asked:
    """What a caller says beside the body, whatever it said it in.

    Attributes:
        timeout_ms: milliseconds that the answer may take, as digits.
        priority: tier.
        session: what leads it to the same worker again.
        receipt: it wants a receipt of what was delivered.
        content_type: of a form.
        resumable: it may come back for the rest of a stream.
        envelope: fields of the body that are not the engine's.
        home: what leads it to the same worker again, if neither caller nor body say that.
    """

    timeout_ms: bytes | None = None
    priority: str | None = None
    session: str | None = None
    receipt: bool = False
    client_request_id: str | None = None
    trace: tuple[tuple[bytes, bytes], ...] = ()
    content_type: bytes = b""
    resumable: bool = False
    envelope: tuple[str, ...] = ()
    home: str | None = None


def asked_in(head: RequestHead) -> Asked:
    """Read it from the headers of a request."""
    found = head.firsts(_ASKED).get
    priority, session = found(b"x-gateway-priority"), found(b"x-gateway-session")
    traced = found(b"traceparent") is not None
    return Asked(
        timeout_ms=found(b"x-gateway-timeout-ms"),
        priority=None if priority is None else priority.decode("latin-1"),
        session=session.decode("latin-1") if session else None,
        receipt=found(b"x-gateway-receipt") == b"1",
        client_request_id=_echoed(found(b"x-client-request-id") or found(b"x-request-id")),
        trace=trace_context(head.all(b"traceparent"), head.all(b"tracestate")) if traced else (),
        content_type=found(b"content-type") or b"",
        resumable=found(b"x-gateway-resumable") == b"1",
    )


@dataclass(frozen=True, slots=True)
class GenerateSettings:
    """Bounds of what a caller may ask for; seconds, and values in one JSON body.

    Attributes:
        answer_limit: seconds without an acknowledgement until a reader counts as vanished.
        ask_every: seconds between two questions to a half-closed client.
        receipt: every stream gets a receipt, asked or not.
        keep: of streams that can be resumed.
    """

    default_timeout: float
    max_timeout: float
    json_values: int
    answer_limit: float
    ask_every: float
    keep: KeepTerms
    receipt: bool = False


def client_request_id(head: RequestHead) -> str | None:
    """Answer the caller's own name for its request, if it is one that can be echoed."""
    return _echoed(head.header(b"x-client-request-id") or head.header(b"x-request-id"))


def _echoed(value: bytes | None) -> str | None:
    return value.decode("ascii") if value is not None and _CLIENT_ID.fullmatch(value) else None


def identity_headers(exchange_id: str, client_id: str | None, *, anthropic: bool = False) -> Identity:
    """Headers that name an answer.

    Args:
        anthropic: the caller speaks Anthropic's API, whose SDKs look for the name elsewhere.
    """
    own: Identity = (("x-request-id", exchange_id),)
    if anthropic:
        own = (*own, ("request-id", exchange_id))
    return own if client_id is None else (*own, ("x-client-request-id", client_id))


def new_id() -> str:
    """Make an exchange id: 32 hexadecimal digits, so none is a prefix of another.

    The first 12 are the time, in milliseconds since the epoch; 80 bits are dice. New ones stand at
    the end of the database's index: anywhere in it, each would cost a page of its own.
    """
    return f"{time.time_ns() // 1_000_000:012x}{secrets.token_hex(10)}"


class Generator:
    """Turns requests for work into exchanges and runs them in the connection's task.

    Args:
        live: the exchanges of the process; kept up to date here.
        pool: counts what is kept of answers that can be resumed.
        spawn: runs a task in the gateway's own nursery.

    Attributes:
        kept: streams that can be resumed.
    """

    def __init__(
        self,
        fleet: Fleet,
        parts: Parts,
        settings: GenerateSettings,
        live: LiveExchanges,
        pool: BufferPool,
        spawn: Callable[[Task], None],
    ) -> None:
        self.kept: Final = KeptAnswers[ResumableClient](settings.keep.window, pool, KEPT_ANSWER)
        self._pool = pool
        self._spawn = spawn
        self._fleet = fleet
        self._parts = parts
        self._settings = settings
        self._live = live
        # Each thread that computes may keep the loop waiting for its turn, so there is one.
        self._readers = trio.CapacityLimiter(1)

    def use(self, parts: Parts, settings: GenerateSettings) -> None:
        """Make the requests that come from now on out of other parts, within other bounds."""
        self._parts = parts
        self._settings = settings
        self.kept.window = settings.keep.window

    async def run(
        self,
        incoming: Incoming,
        operation: Operation,
        caller: Caller,
        exchange_id: str,
        identity: Identity,
        accepted: Callable[[], None],
    ) -> bool:
        """Read, check and carry out one request; True: the connection may go on.

        Args:
            identity: headers of the answer, whatever it will be.
            accepted: called when the exchange takes over the accounting.

        Raises:
            Refused: before the exchange began; nothing was written.
            ClientGone: before the exchange began.
        """
        asked = asked_in(incoming.head)
        # The body has no name here: it is not needed beside its fields, for as long as the answer takes.
        request = await self.understand(
            asked, await incoming.read_body(), operation, caller, exchange_id, incoming.arrived
        )
        client = self._client(incoming, identity, operation, request.tenant, request.key_id)
        if asked.resumable and request.stream:
            await self._run_resumable(request, client, caller, incoming.placed, accepted)
        else:
            # Whoever is refused costs no exchange: in a flood nearly all are.
            admitted = admit(request, self._parts)
            exchange = Exchange(request, client, self._parts, incoming.placed, admitted=admitted)
            accepted()
            with self._live.holding(exchange):
                await exchange.run()
        if not client.finished:
            raise ClientGone
        return client.keep_alive

    def _client(
        self,
        incoming: Incoming,
        identity: Identity,
        operation: Operation,
        tenant: str,
        key_id: str | None,
    ) -> HttpClient:
        return HttpClient(
            incoming.connection,
            incoming.head,
            identity,
            self._settings.answer_limit,
            self._settings.ask_every,
            operation,
            lambda: rate_headers(self._parts.rates.standings(tenant, key_id)),
        )

    async def _run_resumable(
        self,
        request: InternalRequest,
        reader: HttpClient,
        caller: Caller,
        placed: Callable[[], None],
        accepted: Callable[[], None],
    ) -> None:
        """Let the exchange live in the gateway's nursery, and this connection only read."""
        keep = self._settings.keep
        client = ResumableClient(request.operation, keep, self._pool)
        exchange = Exchange(request, client, self._parts, placed, kept=keep.bytes)
        accepted()
        self.kept.add(request.exchange_id, client, caller)

        async def carry_out() -> None:
            try:
                with self._live.holding(exchange):
                    await exchange.run()
            finally:
                client.settle(accepted=exchange.accepted)

        self._spawn(carry_out)
        await client.serve(reader, 0)

    async def resume(
        self,
        incoming: Incoming,
        exchange_id: str,
        after: int,
        caller: Caller,
        identity: Identity,
        accepted: Callable[[], None],
    ) -> bool:
        """Go on with a stream behind the event ``after``; True: the connection may go on.

        Raises:
            Refused: this caller has no such stream, or what follows is not kept any more.
            ClientGone: it left.
        """
        found = self.kept.find(exchange_id, caller)
        if found is None:
            raise Refused(Problem.of("request_not_found", "there is no such stream to go on with"))
        found.seek(after)
        accepted()
        reader = self._client(incoming, identity, found.operation, caller.tenant.id, caller.key_id)
        await found.serve(reader, after)
        return reader.keep_alive

    async def understand(
        self,
        asked: Asked,
        body: bytes,
        operation: Operation,
        caller: Caller,
        exchange_id: str,
        arrived: float,
        *,
        stream: bool = False,
    ) -> InternalRequest:
        """Read and check one request.

        Args:
            arrived: Trio clock, seconds.
            stream: it is answered as a stream, whatever its body says of that.

        Raises:
            Refused: it can not be carried out.
        """
        tenant = caller.tenant

        def read_all() -> tuple[Route, ReadBody]:
            return self._read(asked, body, operation, tenant)

        if needs_thread(body):
            route, read = await trio.to_thread.run_sync(
                read_all, abandon_on_cancel=True, limiter=self._readers
            )
        else:
            route, read = read_all()
        route = self._fleet.route_or_fallback(route, tenant.may_use)
        for field in asked.envelope:
            read.members.pop(field, None)
        self._check_fields(read, route, tenant)
        if stream and not read.stream:
            read.members["stream"] = b"true"
        return InternalRequest(
            exchange_id=exchange_id,
            client_request_id=asked.client_request_id,
            tenant=tenant.id,
            key_id=caller.key_id,
            operation=operation,
            model=route.model,
            upstream_model=route.upstream,
            members=read.members,
            size=len(body),
            stream=stream or read.stream,
            choices=read.choices,
            n=read.n,
            wants_usage=read.wants_usage,
            wants_running_usage=read.wants_running_usage,
            arrived=arrived,
            deadline=arrived + self._timeout(asked, tenant),
            tier=_tier(asked, tenant),
            trace=asked.trace,
            receipt=self._settings.receipt or asked.receipt,
            form=read.form,
            output_limit=_output_limit(read, route),
            full_timeout=route.full_timeout,
            tokens=read.tokens,
            session=asked.session or read.session or asked.home,
            defaults=dict(route.defaults) if operation.style is not Style.PLAIN else {},
        )

    def _read(
        self, asked: Asked, body: bytes, operation: Operation, tenant: Tenant
    ) -> tuple[Route, ReadBody]:
        """Read a body in the order of judgement: its grammar, the model, all other fields."""
        if operation.multipart:
            read = read_form_body(body, asked.content_type)
            return self._route(read.model, tenant), read
        read_json = read_object(body, self._settings.json_values)
        route = self._route(model_of(read_json), tenant)
        return route, read_body(operation, read_json)

    def _route(self, model: str, tenant: Tenant) -> Route:
        """Find the model that was asked for, by its public name or an alias."""
        route = self._fleet.routes.get(model)
        if route is None:
            raise Refused(Problem.of("model_not_found", "the model does not exist here", param="model"))
        if not (tenant.may_use(model) or tenant.may_use(route.model)):
            raise Refused(Problem.of("model_not_allowed", "this key may not use the model", param="model"))
        return route

    def _check_fields(self, read: ReadBody, route: Route, tenant: Tenant) -> None:
        if tenant.engine_fields:
            return
        field = forbidden_field(read.members, self._fleet.engine_fields(route.model))
        if field is not None:
            raise Refused(Problem.of("field_not_allowed", f"'{field}' is the gateway's to set", param=field))

    def _timeout(self, asked: Asked, tenant: Tenant) -> float:
        """Answer the seconds that the request has, all attempts and waiting included."""
        if asked.timeout_ms is None:
            wanted = tenant.default_timeout or self._settings.default_timeout
        elif asked.timeout_ms.isdigit() and (digits := asked.timeout_ms.lstrip(b"0")):
            wanted = int(digits[:12]) / 1000
        else:
            raise Refused(
                Problem.of("invalid_value", "X-Gateway-Timeout-Ms is no whole number of milliseconds above 0")
            )
        return min(wanted, tenant.max_timeout or self._settings.max_timeout, self._settings.max_timeout)


def _output_limit(read: ReadBody, route: Route) -> int | None:
    """Answer the bound that a caller gets who named none; one who asks for more is told so."""
    limit = route.max_output_tokens
    if limit is not None and read.tokens is not None and read.tokens > limit:
        raise Refused(
            Problem.of("invalid_value", f"at most {limit} output tokens can be asked for", param="max_tokens")
        )
    return limit if read.tokens is None else None


def _tier(asked: Asked, tenant: Tenant) -> str:
    if asked.priority is None:
        return tenant.default_tier
    tier = asked.priority.strip().lower()
    if tier not in TIERS:
        raise Refused(Problem.of("invalid_value", f"X-Gateway-Priority is none of {', '.join(TIERS)}"))
    if tier not in tenant.tiers:
        raise Refused(Problem.of("priority_not_allowed", "this key may not ask for that priority"))
    return tier
