"""From a presented key to its tenant, in time that does not depend on how close a guess was."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass

from ._tenant import ANONYMOUS, Tenant


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request.

    Attributes:
        tenant: as this key may act for it.
        expires: when the key ends, in seconds since the epoch; None: never.
    """

    tenant: Tenant
    key_id: str | None
    expires: float | None = None

    def expired(self, wall: float) -> bool:
        """Whether the key is over at a moment, in seconds since the epoch."""
        return self.expires is not None and wall >= self.expires


class Keyring:
    """All keys, stored as SHA-256 of the whole key.

    Args:
        keys: the SHA-256 of each, and who has it.
        tenants: all of them; none: everybody is anonymous.
        closed: nobody is, even if there is no tenant.
        complete: False if there may be keys that are not known yet.
    """

    def __init__(
        self,
        keys: Iterable[tuple[bytes, Caller]],
        tenants: Iterable[Tenant],
        *,
        closed: bool = False,
        complete: bool = True,
    ) -> None:
        self._callers = {stored: (stored, caller) for stored, caller in keys}
        self._by_id = {caller.key_id: caller for _, caller in self._callers.values()}
        self.complete = complete
        self.tenants = {tenant.id: tenant for tenant in tenants}
        self._anonymous = None if self.tenants or closed else Caller(Tenant(ANONYMOUS), None)
        if self._anonymous is not None:
            self.tenants[ANONYMOUS] = self._anonymous.tenant

    @property
    def open(self) -> bool:
        """Whether no key is asked for; credentials that clients send anyway are ignored."""
        return self._anonymous is not None

    def become(self, other: Keyring) -> None:
        """Hold from now on what another one holds. Whoever was let in before asks `is_good`."""
        self._callers, self._by_id, self._anonymous = other._callers, other._by_id, other._anonymous
        self.tenants, self.complete = other.tenants, other.complete

    def find(self, key: bytes | None) -> Caller | None:
        """Answer who a key belongs to, even if it has expired; None: nobody."""
        if self._anonymous is not None:
            return self._anonymous
        if key is None:
            return None
        digest = hashlib.sha256(key).digest()
        # The lookup sees hashes of high-entropy secrets only, so its timing tells nothing of a key.
        stored, caller = self._callers.get(digest, (b"", None))
        return caller if hmac.compare_digest(stored, digest) else None

    def is_good(self, caller: Caller, wall: float) -> bool:
        """Whether somebody who was let in would be let in again: the key is neither revoked nor over.

        Args:
            wall: seconds since the epoch.
        """
        if self._anonymous is not None:
            return True
        now = self._by_id.get(caller.key_id)
        return now is not None and now.tenant.id == caller.tenant.id and not now.expired(wall)
