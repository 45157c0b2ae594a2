"""Tenants and keys as a database keeps them, and what is asked of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

TENANT_MEMBERS: Final = (
    "weight",
    "tiers",
    "models",
    "max_concurrency",
    "max_queued",
    "requests_per_minute",
    "tokens_per_minute",
    "default_timeout",
    "max_timeout",
    "engine_fields",
)
"""What a tenant may have beside its id, each by the name that it has in the configuration."""

KEY_MEMBERS: Final = ("expires", "models", "tiers", "requests_per_minute", "tokens_per_minute")
"""What a key may have beside its id and hash, likewise."""

Members = Mapping[str, Any]
"""Values by name; who is not named has the default."""


class RosterRefused(Exception):
    """What was asked does not go with what is stored. The message is for operators."""


@dataclass(frozen=True, slots=True)
class StoredTenant:
    """One tenant.

    Attributes:
        members: some of `TENANT_MEMBERS`; nobody has judged them since they were read.
        created_at: seconds since the epoch.
    """

    id: str
    members: Members
    created_at: float

    @property
    def entry(self) -> dict[str, Any]:
        """The tenant as the configuration would have it, without keys."""
        return {"id": self.id, **self.members}


@dataclass(frozen=True, slots=True)
class StoredKey:
    """One key.

    Attributes:
        tenant: id of who has it, stored here or in a configuration file, or gone.
        hash: as the configuration writes it.
        members: some of `KEY_MEMBERS`, as above.
        created_at, revoked_at: seconds since the epoch.
    """

    id: str
    tenant: str
    hash: str
    members: Members
    created_at: float
    revoked_at: float | None = None

    @property
    def entry(self) -> dict[str, Any]:
        """The key as the configuration would have it."""
        return {"id": self.id, "hash": self.hash, **self.members}


@dataclass(frozen=True, slots=True)
class Stored:
    """All of it at some moment.

    Attributes:
        revision: another number after each change; 0 where never anything was stored.
        keys: those that are revoked are left out where nobody asks for them.
    """

    revision: int
    tenants: tuple[StoredTenant, ...]
    keys: tuple[StoredKey, ...]


class RosterPort(Protocol):
    """What whoever follows the changes asks of a database. All of it blocks, and raises `StoreFailed`."""

    def newer(self, revision: int | None) -> Stored | None:
        """Answer what is stored, without revoked keys, if that has another revision; None: it has not."""

    def close(self) -> None:
        """Let go of the connection; the next call makes a new one. Idempotent, never raises."""


class LogPort(Protocol):
    """Takes what operators should know, from any thread; never waits."""

    def write(self, level: str, event: str, **fields: Any) -> None:
        """Take a line."""
