"""The routes of the operators' door, as data: what is read, what is done, and which shapes go with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Literal

from ._port import MOST_ROWS, Action
from ._schema import Schema, count, text, word

PREFIX: Final = "/admin/v1"
LIVEZ: Final = "/livez"
METRICS: Final = "/metrics"
WHO: Final = PREFIX + "/who"

_LIMIT: Final = MappingProxyType({"limit": count("rows [100]", least=1, most=MOST_ROWS)})


@dataclass(frozen=True, slots=True)
class Read:
    """Something that is read with GET, by every role.

    Attributes:
        path: behind `PREFIX`; ``{id}`` is one segment.
        name: of the method of the port, and of the operation in the document.
        shape: of the answer.
        member: where the port answers a list, the member of the answer that it stands in.
        query: parameters that may be given.
    """

    path: str
    name: str
    shape: str
    summary: str
    member: str | None = None
    query: Mapping[str, Schema] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Act:
    """Something that is done with POST, by operators.

    Attributes:
        path: behind `PREFIX`.
        shape: of the body.
        of: what the ``{id}`` of the path is.
    """

    path: str
    action: Action
    shape: str
    summary: str
    of: Literal["request", "tenant", "worker"] | None = None


READS: Final = (
    Read("/statistics", "statistics", "Statistics", "The figures of this moment"),
    Read(
        "/requests",
        "requests",
        "Requests",
        "Requests that wait or run, and the latest that ended",
        query=MappingProxyType(
            {
                "state": word("waiting", "running", "ended"),
                "tenant": text("only of this tenant"),
                "model": text("only for this model"),
                "worker": text("only at this worker"),
                "search": text("only those with this text in an id, tenant, key id, model or worker"),
                "order": word("newest", "oldest", meaning="which come first [newest]"),
                **_LIMIT,
                "offset": count("rows to skip [0]", most=10_000_000),
            }
        ),
    ),
    Read("/requests/{id}", "timeline", "Timeline", "One request and what happened to it"),
    Read("/tenants", "tenants", "Tenants", "What each tenant has, and may have", member="tenants"),
    Read("/queues", "queues", "Queues", "What waits, in total and in each pool"),
    Read("/workers", "workers", "Workers", "What each worker has and does", member="workers"),
    Read("/limits", "limits", "Limits", "The limits in force, and where they come from"),
    Read(
        "/tasks", "tasks", "Tasks", "The tasks of the process by exchange, and where each is", member="tasks"
    ),
    Read("/self-audit", "self_audit", "SelfAudit", "Whether all accounts are right, and what is left over"),
    Read("/snapshot", "snapshot", "Snapshot", "What the feed tells every second, once"),
    Read("/endings", "endings", "Endings", "The latest endings", member="endings", query=_LIMIT),
    Read("/version", "version", "Version", "What runs, and for how long"),
    Read("/configuration", "configuration", "Configuration", "The configuration in force, without secrets"),
    Read("/audit", "audit", "Audit", "What operators did", member="audit", query=_LIMIT),
    Read("/flights/{id}", "flight", "Flight", "A recorded exchange, for trio-gateway replay"),
)

ACTS: Final = (
    Act("/requests/{id}/cancel", "requests.cancel", "Nothing", "End a request", "request"),
    Act("/tenants/{id}/cancel", "tenants.cancel", "Nothing", "End all requests of a tenant", "tenant"),
    Act("/tenants/{id}/freeze", "tenants.freeze", "Nothing", "Place nothing of a tenant any more", "tenant"),
    Act("/tenants/{id}/thaw", "tenants.thaw", "Nothing", "Place what a tenant has again", "tenant"),
    Act(
        "/workers/{id}/drain",
        "workers.drain",
        "Nothing",
        "Place nothing at a worker; what runs goes on",
        "worker",
    ),
    Act("/workers/{id}/resume", "workers.resume", "Nothing", "Place requests at a worker again", "worker"),
    Act(
        "/workers/{id}/eject", "workers.eject", "Nothing", "Drain a worker, and end what runs there", "worker"
    ),
    Act(
        "/workers/{id}/breakers/reset",
        "breakers.reset",
        "ResetBreaker",
        "Close breakers of a worker and forget its faults",
        "worker",
    ),
    Act(
        "/workers/{id}/breakers/force",
        "breakers.force",
        "ForceBreaker",
        "Hold a breaker of a worker open until it is reset, or close it",
        "worker",
    ),
    Act("/limits", "limits.set", "SetLimits", "Change limits, all of them or none"),
    Act("/keys/rotate", "keys.rotate", "RotateKey", "Make a new key of the database for an old one"),
    Act("/reload", "reload", "Nothing", "Read the configuration file again"),
    Act("/processes/replace", "processes.replace", "Nothing", "Replace one process after the other"),
    Act("/log-level", "log_level.set", "LogLevel", "Change what is logged"),
)
