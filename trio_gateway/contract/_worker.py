"""A worker as the rooms see it: where it is, and how its engine speaks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from ._request import CHAT, Operation

if TYPE_CHECKING:
    import ssl


@dataclass(frozen=True, slots=True)
class Dialect:
    """What is particular about one kind of engine (facts gathered per engine, one row each).

    Attributes:
        running_usage: knows ``stream_options.continuous_usage_stats``.
        request_id_header: header that carries our attempt id, if the engine takes one.
        request_id_field: body field that carries it, if the engine takes one.
        cache_salt: takes ``cache_salt``, so that tenants do not share prefix caches.
        slot_per_choice: ``n`` choices need ``n`` slots at once.
        cancel_grace: seconds until an abandoned attempt has surely let its slot go.
        engine_fields: body fields that steer the engine itself; callers may not send
            them unless their tenant has ``engine_fields``.
        agent: no engine but an agent before one, which speaks the worker protocol.
        native_chat: chat goes to ``/api/chat`` as NDJSON, since the engine's own /v1
            layer hides errors in the middle of a stream.
    """

    kind: str
    running_usage: bool
    request_id_header: bytes | None
    request_id_field: str | None
    cache_salt: bool
    slot_per_choice: bool
    cancel_grace: float
    engine_fields: frozenset[str]
    native_chat: bool = False
    agent: bool = False

    def native(self, operation: Operation) -> bool:
        """Whether the operation is asked for by the engine's own API, and its answer must be translated."""
        return self.native_chat and operation is CHAT


class TlsPort(Protocol):
    """What a TLS session is made with, if that may change while we run."""

    @property
    def context(self) -> ssl.SSLContext:
        """For who connects now."""


@dataclass(frozen=True, slots=True, eq=False)
class Worker:
    """One engine instance that can be routed to.

    Attributes:
        host, port: where to connect, unless ``socket_path`` names a unix socket.
        address: the one of ``host`` that this worker is; None: whichever answers first.
        authority: value of the Host header.
        prefix: path in front of every engine path, without a final slash.
        tls: context to connect with, for https, or what has it.
        api_key: credential of the gateway at this worker.
        slots: requests that it serves at a time; ``slots_unknown``: nobody configured them, so
            what it tells itself counts.
        cancel_grace: seconds a draining lease is kept.
    """

    id: str
    url: str
    dialect: Dialect
    host: str
    port: int
    authority: str
    prefix: str
    slots: int
    cancel_grace: float
    socket_path: str | None = None
    tls: ssl.SSLContext | TlsPort | None = field(default=None, repr=False)
    api_key: str | None = field(default=None, repr=False)
    weight: float = 1.0
    labels: frozenset[str] = frozenset()
    slots_unknown: bool = False
    address: str | None = None


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """What an agent says of its worker at one moment.

    Attributes:
        incarnation: grows with each start of the agent; ``seq`` with each report of one incarnation.
        state: starting, ready, draining or stopping.
        models: names that are loaded.
        running, queued: inside the engine, whoever sent them, draining ones included.
        kv_usage: share of its KV cache in use, 0 to 1.
        requests: ids of the attempts that hold a slot; None: it did not list them.
        paused: how many of them have an engine that waits for their reader.
    """

    incarnation: int
    seq: int
    state: Literal["starting", "ready", "draining", "stopping"]
    models: tuple[str, ...]
    slots: int
    running: int
    queued: int
    kv_usage: float | None = None
    tokens_per_second: float | None = None
    requests: frozenset[str] | None = None
    paused: int = 0


@dataclass(frozen=True, slots=True)
class Rejection:
    """A worker did not take a request, or gave it up before any output.

    Attributes:
        reason: of the worker protocol, or the same as an engine says it: capacity, draining,
            engine_unready, model_not_loaded, model_load_failed, deadline.
        status: 429 or 503, the class that callers are told.
        retry_after: seconds that the worker asked for.
        placed_at: when the attempt was placed.
    """

    reason: str
    status: int
    retry_after: float | None
    placed_at: float
