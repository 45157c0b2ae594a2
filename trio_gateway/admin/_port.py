"""What the operators' door knows of the process behind it, and nothing else.

Answers are JSON values: objects, lists, text, numbers and null. Their shapes stand in
`trio_gateway.admin._shapes`, times are seconds, and ages are relative to now. Synchronous
methods answer at once, from memory, within a few milliseconds, unless other processes have to be
asked. The others take longer: what they answer of a thousand requests was true while they looked, not
all of it at one moment.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

from ..errors import Problem, Refused

Role = Literal["viewer", "operator"]
Row = dict[str, Any]

MOST_ROWS: Final = 1000  # of one answer
LOCAL: Final = "local"  # who acts where no token is asked for

_INVALID: Final = "invalid_request_error"


class AdminCode(NamedTuple):
    """Status and type of an error code of the operators' door, and what it means."""

    status: int
    type: str
    meaning: str


ADMIN_CODES: Final[dict[str, AdminCode]] = {
    "invalid_json": AdminCode(400, _INVALID, "the body is no JSON object, or not by the strict rules"),
    "invalid_value": AdminCode(400, _INVALID, "a value can not be taken; `param` names it"),
    "missing_field": AdminCode(400, _INVALID, "a field is missing; `param` names it"),
    "unknown_field": AdminCode(400, _INVALID, "there is no such field; `param` names it"),
    "invalid_configuration": AdminCode(400, _INVALID, "the file has problems; nothing was changed"),
    "bad_request": AdminCode(400, _INVALID, "the request's target, head or body can not be taken"),
    "invalid_admin_token": AdminCode(401, "authentication_error", "no token that is known was sent"),
    "role_not_allowed": AdminCode(403, "permission_error", "the token's role may read, but not act"),
    "host_not_allowed": AdminCode(403, "permission_error", "`Host` is no name of this listener"),
    "origin_not_allowed": AdminCode(403, "permission_error", "a page of another origin asked"),
    "unknown_route": AdminCode(404, _INVALID, "there is no such path"),
    "not_found": AdminCode(404, _INVALID, "there is no such request, tenant, worker or key"),
    "method_not_allowed": AdminCode(405, _INVALID, "the path is there, but not for this method"),
    "request_timeout": AdminCode(408, _INVALID, "the body did not come in time"),
    "not_possible": AdminCode(
        409, _INVALID, "it can not be done in the present state, or a process that has to be asked is silent"
    ),
    "request_too_large": AdminCode(413, _INVALID, "the body is longer than 64 KiB"),
    "unsupported_media_type": AdminCode(415, _INVALID, "the body is not `application/json`"),
    "rate_limit_exceeded": AdminCode(429, "rate_limit_error", "too many bad tokens from one address"),
    "internal_error": AdminCode(500, "server_error", "a fault of the gateway, which the log describes"),
    "feed_limit_reached": AdminCode(503, "overloaded_error", "too many live feeds are open"),
    "database_unavailable": AdminCode(503, "overloaded_error", "the database can not be asked"),
}


def refusal(
    code: str, message: str, *, param: str | None = None, retry_after: float | None = None
) -> Refused:
    """Make what is raised instead of an answer.

    Args:
        code: a key of `ADMIN_CODES`.
        message: for people; holds no secret.
        param: the field at fault, as a dotted path.
    """
    info = ADMIN_CODES[code]
    return Refused(Problem(code, message, info.status, info.type, param, retry_after))


@dataclass(frozen=True, slots=True)
class RequestFilter:
    """Which requests are asked for. Those that ended stand behind those that wait or run.

    Attributes:
        order: of each of the two.
        search: text that stands in an id, tenant, key id, model or worker.
        limit: rows of the answer, 1 to `MOST_ROWS`.
        offset: rows that are skipped.
    """

    state: Literal["waiting", "running", "ended"] | None = None
    tenant: str | None = None
    model: str | None = None
    worker: str | None = None
    search: str | None = None
    order: Literal["newest", "oldest"] = "newest"
    limit: int = 100
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Actor:
    """Who acts.

    Attributes:
        id: of the token, or `LOCAL`.
        request_id: of the HTTP request, for the audit table.
    """

    id: str
    role: Role
    request_id: str


@dataclass(frozen=True, slots=True)
class ActResult:
    """What an action did.

    Attributes:
        done: False if there was nothing to do.
        before: what it changed, as it was; a JSON value.
        after: the same, as it is.
    """

    done: bool
    before: Any = None
    after: Any = None


Action = Literal[
    "requests.cancel",
    "tenants.cancel",
    "tenants.freeze",
    "tenants.thaw",
    "workers.drain",
    "workers.resume",
    "workers.eject",
    "breakers.reset",
    "breakers.force",
    "limits.set",
    "keys.rotate",
    "reload",
    "processes.replace",
    "log_level.set",
]


T = TypeVar("T")
Soon: TypeAlias = T | Awaitable[T]
"""An answer, at once or after others were asked; see `answered`."""


async def answered(answer: Soon[T]) -> T:
    """Wait for an answer that is not there yet."""
    if inspect.isawaitable(answer):
        found: T = await answer
        return found
    return answer


class AdminPort(Protocol):
    """What operators can see and do. Anything may raise `Refused`, made by `refusal`."""

    # -- reading; synchronous in one process

    def statistics(self) -> Soon[Row]:
        """Answer the figures of this moment."""
        ...

    def timeline(self, request_id: str) -> Soon[Row]:
        """Answer ``{"request": row, "timeline": steps}``; the id is an exchange's. ``not_found``."""
        ...

    async def tenants(self) -> list[Row]:
        """Answer a row for each tenant."""
        ...

    def queues(self) -> Soon[Row]:
        """Answer the queue and its pools."""
        ...

    def workers(self) -> Soon[list[Row]]:
        """Answer a row for each worker."""
        ...

    async def limits(self) -> Row:
        """Answer ``{"limits": {dotted name: {"value", "source", "applies"}}}``."""
        ...

    def endings(self, limit: int) -> Soon[list[Row]]:
        """Answer the latest endings, newest first."""
        ...

    def endings_after(self, number: int) -> Soon[tuple[int, list[Row]]]:
        """Answer how many endings there were since start, and those behind a number, oldest first.

        At most 100 rows, the latest; a number that is not reached yet has none.
        """
        ...

    def version(self) -> Row:
        """Answer ``{"version", "boot_id", "python", "trio", "uptime"}``."""
        ...

    async def configuration(self) -> Row:
        """Answer what is in force, nested as in the file, secrets hidden."""
        ...

    def snapshot(self) -> Soon[Row]:
        """Answer what the live feed tells every second."""
        ...

    # -- reading; in steps, between which others run, or from a database

    async def requests(self, asked: RequestFilter) -> Row:
        """Answer ``{"requests": rows, "total": of all that match, "offset": of the first row}``."""
        ...

    async def tasks(self) -> list[Row]:
        """Answer the tree of tasks by exchange."""
        ...

    async def self_audit(self) -> Row:
        """Answer ``{"ok", "equations", "leaks"}``."""
        ...

    async def audit(self, limit: int) -> list[Row]:
        """Answer the latest actions, newest first."""
        ...

    async def flight(self, request_id: str) -> Row:
        """Answer the recorded exchange, as ``trio-gateway replay`` takes it. ``not_found``."""
        ...

    # -- acting

    async def act(
        self, actor: Actor, action: Action, target: str | None, arguments: Mapping[str, Any]
    ) -> ActResult:
        """Do something, once, and note it in the audit table, also if it is refused.

        Args:
            target: id of the request, tenant or worker; None for the other actions.
            arguments: the body, whose fields and types are those of the action's shape; values are not
                judged yet.
        """
        ...

    async def refused(self, actor: Actor, action: Action, target: str | None, code: str) -> None:
        """Note in the audit table an action that was refused before it came here: for its role or body."""
        ...
