"""A worker as the rooms see it: where it is, and how its engine speaks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

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

    def native(self, operation: Operation) -> bool:
        """Whether the operation is asked for by the engine's own API, and its answer must be translated."""
        return self.native_chat and operation is CHAT


@dataclass(frozen=True, slots=True, eq=False)
class Worker:
    """One engine instance that can be routed to.

    Attributes:
        host, port: where to connect, unless ``socket_path`` names a unix socket.
        authority: value of the Host header.
        prefix: path in front of every engine path, without a final slash.
        tls: context to connect with, for https.
        api_key: credential of the gateway at this worker.
        slots: requests that it serves at a time.
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
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    api_key: str | None = field(default=None, repr=False)
    weight: float = 1.0
    labels: frozenset[str] = frozenset()
