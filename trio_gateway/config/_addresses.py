"""Addresses: where the gateway listens, where its workers are, and which web pages may call."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network
from typing import Final, Literal
from urllib.parse import unquote

# sun_path of unix(7) has 108 bytes with its final NUL.
MAX_SOCKET_PATH: Final = 107

# RFC 1123 2.1 names, and the underscores that container networks use.
_HOST_NAME: Final = re.compile(r"(?=.{1,253}\Z)[a-z0-9_]([a-z0-9_-]{0,62})(\.[a-z0-9_][a-z0-9_-]{0,62})*\.?")
# What RFC 3986 lets stand in a path, escapes included.
_PATH: Final = re.compile(r"(?:[A-Za-z0-9._~!$&'()*+,;=:@/-]|%[0-9A-Fa-f]{2})*")
_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Bind:
    """One address to listen on: either `host` and `port`, or `socket_path`.

    Attributes:
        host: name or IP address, without brackets.
        port: 0 lets the kernel choose.
        socket_path: relative paths count from the working directory of the process.
    """

    host: str | None = None
    port: int | None = None
    socket_path: str | None = None

    @property
    def local(self) -> bool:
        """Whether only this machine can reach it: a unix socket, a loopback address or ``localhost``."""
        if self.host is None or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        if self.host is None:
            return f"unix:{self.socket_path}"
        return f"{_bracketed(self.host)}:{self.port}"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The parts of a worker's URL.

    Attributes:
        host: name or IP address, without brackets; None for sockets.
        port: given or the scheme's own; None for sockets.
        socket_path: absolute; None for TCP.
        prefix: what stands before every path of the engine: empty, or ``/`` and more without a final
            ``/``. A final ``/v1`` is left out, because every path of the engine begins with it.
        authority: value of the Host header: IPv6 in brackets, no default port, ``localhost`` for sockets.
    """

    scheme: Literal["http", "https", "http+unix"]
    authority: str
    host: str | None = None
    port: int | None = None
    socket_path: str | None = None
    prefix: str = ""

    @property
    def named(self) -> bool:
        """Whether `host` is a name, which may mean several addresses, or other ones tomorrow."""
        if self.host is None:
            return False
        try:
            ipaddress.ip_address(self.host)
        except ValueError:
            return True
        return False


def parse_bind(text: str) -> Bind:
    """Read ``127.0.0.1:8080``, ``[::1]:8080``, ``localhost:0`` or ``unix:gateway.sock``.

    Raises:
        ValueError: none of these.
    """
    if text.startswith("unix:"):
        return Bind(socket_path=_socket_path(text.removeprefix("unix:")))
    host, colon, port = text.rpartition(":")
    if not colon or "/" in text:
        raise ValueError('must be "host:port", "[IPv6]:port" or "unix:path"')
    if host in ("", "*"):
        raise ValueError(f'names no host: write "0.0.0.0:{port}" or "[::]:{port}" to listen everywhere')
    return Bind(host=_host(host), port=_port(port, lowest=0))


def parse_url(text: str) -> Endpoint:
    """Read a worker's URL: ``http://host:8000/prefix``, ``https://...`` or ``http+unix:///run/engine.sock``.

    Raises:
        ValueError: another scheme; user info, a query or a fragment; no host, or no absolute socket path. The
            message does not repeat the URL, which may hold a password.
    """
    scheme, colon, rest = text.partition("://")
    scheme = scheme.lower()
    if not colon or scheme not in ("http", "https", "http+unix"):
        raise ValueError("must begin with http://, https:// or http+unix:///")
    if "?" in rest or "#" in rest:
        raise ValueError("must have no query and no fragment")
    # Not urllib.parse.urlsplit: it drops some characters silently and repeats others in its errors.
    authority, slash, path = rest.partition("/")
    if "@" in authority:
        raise ValueError("must have no user info: put the credential into a file and name it in api_key_file")
    if not _PATH.fullmatch(path):
        raise ValueError("has a character in its path that must be percent-encoded")
    if scheme == "http+unix":
        return _unix_endpoint(authority, slash + path)
    return _tcp_endpoint("https" if scheme == "https" else "http", authority, slash + path)


def parse_host(text: str) -> str:
    """Read the name of a machine, or an IP address, an IPv6 one in brackets; answers it in lower case.

    Raises:
        ValueError: neither.
    """
    return _host(text)


def has_path(url: str) -> bool:
    """Whether a worker's URL, which `parse_url` accepts, has a path of HTTP behind its host."""
    scheme, _, rest = url.partition("://")
    return scheme.lower() != "http+unix" and rest.partition("/")[2] != ""


def parse_origin(text: str) -> str:
    """Read ``*``, or an origin such as ``https://app.example``, and answer it as browsers send it.

    Browsers write scheme and host in lower case and no default port (RFC 6454, 6.2). Schemes other than http
    and https are those of applications and extensions, such as ``chrome-extension://<id>``.

    Raises:
        ValueError: neither, or ``null``, which every sandboxed page and every local file has for its origin.
    """
    if text == "*":
        return text
    if text == "null":
        raise ValueError('would let in every sandboxed page and local file: write "*" if all may call')
    scheme, colon, authority = text.partition("://")
    if not colon or not _SCHEME.fullmatch(scheme):
        raise ValueError('must be "https://host", "https://host:port" or "*"')
    if any(char in authority for char in "/?#"):
        raise ValueError('must end after the host or port, without a path or a final "/"')
    if "@" in authority:
        raise ValueError("must have no user info")
    if "*" in authority:
        raise ValueError('has a wildcard, which is not known here: list each origin, or write "*" alone')
    return _origin(scheme.lower(), authority)


def parse_network(text: str) -> IPv4Network | IPv6Network:
    """Read ``10.0.0.0/8`` or ``fd00::/8``; an address alone is a network of one.

    Raises:
        ValueError: neither, or an address inside of a network where the network itself belongs.
    """
    address, slash, length = text.partition("/")
    try:
        if "%" in address or (slash and not re.fullmatch("[0-9]{1,3}", length)):  # no zones, no masks
            raise ValueError
        network = ipaddress.ip_network(text, strict=False)
    except ValueError:
        raise ValueError('must be a network such as "10.0.0.0/8" or "fd00::/8"') from None
    if ipaddress.ip_address(address) != network.network_address:
        raise ValueError(f'is an address inside of a network: write "{network}" if all of it is meant')
    return network


def _origin(scheme: str, authority: str) -> str:
    name, port = _split_authority(authority)
    number = None if port is None else _port(port, lowest=1)
    suffix = "" if number is None or number == _DEFAULT_PORTS.get(scheme) else f":{number}"
    return f"{scheme}://{_bracketed(_host(name))}{suffix}"


def _unix_endpoint(authority: str, path: str) -> Endpoint:
    if authority:
        raise ValueError("needs three slashes and an absolute path: http+unix:///run/engine.sock")
    return Endpoint(
        "http+unix", "localhost", socket_path=_socket_path(unquote(path, errors="surrogateescape"))
    )


def _tcp_endpoint(scheme: Literal["http", "https"], authority: str, path: str) -> Endpoint:
    name, port = _split_authority(authority)
    host = _host(name)
    number = _DEFAULT_PORTS[scheme] if port is None else _port(port, lowest=1)
    suffix = "" if number == _DEFAULT_PORTS[scheme] else f":{number}"
    return Endpoint(scheme, _bracketed(host) + suffix, host, number, prefix=_prefix(path))


def _split_authority(authority: str) -> tuple[str, str | None]:
    """Part host and port, without judging either."""
    if authority.endswith("]"):
        return authority, None
    host, colon, port = authority.rpartition(":")
    return (host, port) if colon else (authority, None)


def _prefix(path: str) -> str:
    return path.rstrip("/").removesuffix("/v1").rstrip("/")


def _host(text: str) -> str:
    """Check a host and answer it without brackets, in lower case."""
    if text.startswith("[") and text.endswith("]"):
        return _ipv6(text[1:-1])
    if ":" in text:
        raise ValueError("an IPv6 address needs brackets, as in [::1]:8080")
    host = text.lower()
    if not _HOST_NAME.fullmatch(host):
        raise ValueError(
            "has no valid host (ASCII letters, digits, dots and hyphens; other names as punycode)"
        )
    if host.replace(".", "").isdigit():
        return _ipv4(host)
    return host


def _ipv6(text: str) -> str:
    if "%" in text:
        raise ValueError("has an IPv6 zone, which cannot be used here")
    try:
        return str(ipaddress.IPv6Address(text))
    except ValueError:
        raise ValueError("has no valid IPv6 address in its brackets") from None


def _ipv4(text: str) -> str:
    # "127.1" and "2130706433" are addresses for some resolvers and names for others.
    try:
        return str(ipaddress.IPv4Address(text))
    except ValueError:
        raise ValueError("has no valid IPv4 address (four numbers from 0 to 255)") from None


def _port(text: str, *, lowest: int) -> int:
    if not re.fullmatch("[0-9]{1,5}", text) or not lowest <= int(text) <= 65535:
        raise ValueError(f"needs a port from {lowest} to 65535 after the last colon")
    return int(text)


def _socket_path(path: str) -> str:
    if not path or path.endswith("/"):
        raise ValueError("names no socket file")
    if "\0" in path:
        raise ValueError("has a NUL byte in its path")
    if len(path.encode("utf-8", "surrogateescape")) > MAX_SOCKET_PATH:
        raise ValueError(f"has a socket path of more than {MAX_SOCKET_PATH} bytes, which no kernel accepts")
    return path


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
