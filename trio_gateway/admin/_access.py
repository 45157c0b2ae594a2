"""Who may come in at the operators' door, and from which pages."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from ..tenancy import FailedKeys
from ._port import LOCAL, Role, refusal

Headers = list[tuple[bytes, bytes]]
UNIX: Final = "unix"  # the address of all who come over a unix socket

_LOOPBACK_NAME: Final = "localhost"
# Where browsers say that another page asked (W3C Fetch Metadata). A link that is followed carries nothing.
_FOREIGN: Final = {b"cross-site", b"same-site"}


@dataclass(frozen=True, slots=True)
class AdminToken:
    """One token, stored as the SHA-256 of the whole."""

    id: str
    digest: bytes
    role: Role


class Access:
    """Judges the head of a request.

    Args:
        tokens: none: whoever can connect is an operator.
        hosts: names by which operators reach this listener, beside loopback's and addresses.
        local: whether only this machine reaches it. Else nobody comes in without a token, not even when the
            last one was taken away and the address that goes with it waits for a restart.
        fixed: the tokens are not those of the settings, and stay.
    """

    def __init__(
        self,
        tokens: Iterable[AdminToken] = (),
        hosts: Iterable[str] = (),
        *,
        local: bool = True,
        fixed: bool = False,
    ) -> None:
        self._fixed = fixed
        self._tokens = tuple(tokens)
        self._local = local
        self._hosts = {_LOOPBACK_NAME, *(host.lower() for host in hosts)}
        self._failed = FailedKeys()

    def admit(self, tokens: Iterable[AdminToken]) -> None:
        """Know these tokens, and no others, from now on."""
        if not self._fixed:
            self._tokens = tuple(tokens)

    def check_page(self, headers: Headers, address: str) -> None:
        """Refuse what a web page may have asked for that is not ours.

        A page whose name was made to point here (DNS rebinding) is known by ``Host``: it is that name. A page
        of another origin is known by ``Origin``, or by what browsers say beside it.

        Args:
            address: of who connected, or `UNIX`; no browser connects to a unix socket.

        Raises:
            Refused: ``host_not_allowed``, ``origin_not_allowed`` or ``bad_request``.
        """
        hosts = _all(headers, b"host")
        if len(hosts) > 1 or len(_all(headers, b"authorization")) > 1:
            raise refusal("bad_request", "a header is there twice")
        host = hosts[0].decode("latin-1").lower() if hosts else ""
        if address != UNIX and not self._is_ours(host):
            raise refusal("host_not_allowed", "this listener has no such name; admin.hosts may name it")
        for origin in _all(headers, b"origin"):
            if not host or origin.decode("latin-1").lower().partition("://")[2] != host:
                raise refusal("origin_not_allowed", "a page of another origin asked")
        sites, modes = _all(headers, b"sec-fetch-site"), _all(headers, b"sec-fetch-mode")
        if _FOREIGN.intersection(sites) and modes != [b"navigate"]:
            raise refusal("origin_not_allowed", "a page of another origin asked")

    def asks_for_a_token(self, headers: Headers) -> bool:
        """Whether a token is needed that this request does not even try to show."""
        return not self._open and not _all(headers, b"authorization")

    @property
    def _open(self) -> bool:
        return self._local and not self._tokens

    def who(self, headers: Headers, address: str, now: float) -> tuple[str, Role]:
        """Answer who asks, and as what. A good token is good however many bad ones came from its address.

        Args:
            now: of the Trio clock.

        Raises:
            Refused: ``invalid_admin_token``, or ``rate_limit_exceeded`` where that was said too often.
        """
        if self._open:
            return LOCAL, "operator"
        shown = _bearer(headers)
        if found := self._known(shown):
            return found[0].id, found[0].role
        if wait := self._failed.note(address, now):
            what = "too many requests without a good token came from this address"
            raise refusal("rate_limit_exceeded", what, retry_after=wait)
        what = "the token is not known" if shown else "no token was sent: Authorization: Bearer <token>"
        raise refusal("invalid_admin_token", what)

    def still_lets_in(self, headers: Headers) -> bool:
        """Whether who was let in would be so again: its token may have been taken away since."""
        return self._open or bool(self._known(_bearer(headers)))

    def _known(self, shown: bytes) -> list[AdminToken]:
        digest = hashlib.sha256(shown).digest()
        # All are compared, each in constant time: how long it takes tells nothing.
        found = [token for token in self._tokens if hmac.compare_digest(token.digest, digest)]
        return found if shown else []

    def _is_ours(self, host: str) -> bool:
        name, _, port = host.rpartition(":") if not host.endswith("]") else (host, "", "")
        name = name if port.isdigit() and port.isascii() else host
        # An address is no name that could be made to point here.
        return name in self._hosts or _is_address(name)


def _is_address(name: str) -> bool:
    try:
        if name.startswith("[") and name.endswith("]") and "%" not in name:
            ipaddress.IPv6Address(name[1:-1])
        else:
            ipaddress.IPv4Address(name)
    except ValueError:
        return False
    return True


def _all(headers: Headers, wanted: bytes) -> list[bytes]:
    return [value.strip() for name, value in headers if name.lower() == wanted]


def _bearer(headers: Headers) -> bytes:
    for value in _all(headers, b"authorization"):
        scheme, _, token = value.partition(b" ")
        if scheme.lower() == b"bearer":
            return token.strip()
    return b""
