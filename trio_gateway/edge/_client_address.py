"""Which client is at the other end, where proxies may stand between."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import Final

from ..wire import RequestHead

Address = IPv4Address | IPv6Address
Networks = Sequence[IPv4Network | IPv6Network]

IPV6_CLIENT: Final = 64  # bits; whoever has one IPv6 address has all of its network (RFC 6177)
_FOR: Final = re.compile(r"""(?:^|;)\s*for\s*=\s*("[^"]*"|[^;\s]*)\s*(?=;|$)""", re.IGNORECASE)


def client_of(peer: str | None, head: RequestHead, trusted: Networks) -> str:
    """Name the client of a request, for counting what it does.

    Proxies append whom they got a request from, so the list is read from its end, and only as long as
    the one who wrote the entry is trusted: what stands before may be anybody's invention. Whoever is
    reached so is the client, and so is the last trusted one of whom the list tells nothing readable.

    Args:
        peer: address of the connection; None: a unix socket.
        trusted: where proxies stand whose word is taken.
    """
    client = None if peer is None else _read(peer)
    if client is None:
        return "unix socket"
    if _within(client, trusted):
        for told in _told(head):
            if told is None:
                break
            client = told
            if not _within(client, trusted):
                break
    return _network_of(client)


def _told(head: RequestHead) -> Iterator[Address | None]:
    """Answer the addresses that proxies tell, last first; None: something that is no address.

    A proxy writes one of both headers and may pass on a client's own other one, and which of them is
    the proxy's is not known: where both are there, neither counts.
    """
    old, new = _elements(head, b"x-forwarded-for"), _elements(head, b"forwarded")
    if old and new:
        return
    yield from (_read(element) for element in old)
    for element in new:
        found = _FOR.search(element)
        yield _read(found[1].strip('"')) if found else None


def _elements(head: RequestHead, name: bytes) -> list[str]:
    values = ",".join(value.decode("latin-1") for value in head.all(name))
    return [element.strip() for element in reversed(values.split(","))] if values else []


def _read(text: str) -> Address | None:
    """Read an address, with a port behind it or without."""
    host = text.partition("%")[0]  # a zone means something on one machine only
    if host.startswith("["):
        host = host[1:].partition("]")[0]
    elif host.count(":") == 1:
        host = host.partition(":")[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def _within(address: Address, networks: Networks) -> bool:
    return any(address in network for network in networks)


def _network_of(address: Address) -> str:
    if isinstance(address, IPv4Address):
        return str(address)
    return str(ipaddress.ip_network((address, IPV6_CLIENT), strict=False))
