"""Whether a certificate and its key can be served, and whether clients will accept them.

The second is found out by shaking hands with oneself, in memory: what a client's library thinks of a
certificate, only such a library knows.
"""

from __future__ import annotations

import re
import ssl
from pathlib import Path as FilePath
from typing import Final

MAX_PEM: Final = 1024 * 1024  # of a chain of certificates, or a key; what is larger is another kind of file

_CERTIFICATE: Final = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
_ROUNDS: Final = 8  # of a handshake; three are enough
# OpenSSL looks for a certificate of the key's type first, hence the last.
_OF_ANOTHER: Final = frozenset({"KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED"})
_TOO_WEAK: Final = frozenset({"EE_KEY_TOO_SMALL", "CA_KEY_TOO_SMALL", "CA_MD_TOO_WEAK"})


def what_is_wrong(certificate: FilePath, key: FilePath) -> dict[str, str]:
    """Judge a file of certificates and one with a private key, each by itself and then as a pair.

    Answers messages under ``certificate`` and ``key``; none: they can be served.
    """
    found = {}
    for name, path, check in (("certificate", certificate, _check_certificate), ("key", key, _check_key)):
        try:
            check(path)
        except ValueError as error:
            found[name] = str(error)
    if not found:
        try:
            _check_pair(certificate, key)
        except ValueError as error:
            found["key"] = str(error)
    return found


def certificate_complaint(certificate: str, key: str, *, as_client: bool = False) -> str | None:
    """Say why clients that trust the authority will refuse a certificate now; None: they will not.

    Names are not compared: nobody knows here by which one clients connect.

    Args:
        certificate: path of a file with which nothing is wrong.
        key: path of its key.
        as_client: a client shows it, and servers look at it.

    Raises:
        ValueError: one of them was changed since.
        ssl.SSLError: likewise.
    """
    first, *others = _certificates(FilePath(certificate))
    client = _client_context(others or [first])
    server = _server_context(FilePath(certificate), FilePath(key))
    if as_client:
        client.verify_mode = ssl.CERT_NONE
        client.load_cert_chain(certificate, key)
        server.verify_mode = ssl.CERT_REQUIRED
        server.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        server.load_verify_locations(cadata="\n".join(others or [first]))
    error = _shake_hands(client, server)
    return None if error is None else _spoken(error)


def _check_certificate(path: FilePath) -> None:
    try:
        _client_context(_certificates(path))
    except ssl.SSLError:
        raise ValueError("holds no PEM certificate") from None


def _check_key(path: FilePath) -> None:
    if "PRIVATE KEY-----" not in _read(path):
        raise ValueError("holds no PEM private key")


def _check_pair(certificate: FilePath, key: FilePath) -> None:
    try:
        _server_context(certificate, key)
    except ssl.SSLError as error:
        if error.reason in _OF_ANOTHER:
            raise ValueError("does not belong to the certificate") from None
        if error.reason in _TOO_WEAK:
            raise ValueError(f"is the key of a certificate that OpenSSL refuses: {_spoken(error)}") from None
        raise ValueError("holds no PEM private key") from None


def _shake_hands(client: ssl.SSLContext, server: ssl.SSLContext) -> ssl.SSLError | None:
    """Let two contexts meet, and answer what they could not agree on."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = client.wrap_bio(down, up)
    answering = server.wrap_bio(up, down, server_side=True)
    for _ in range(_ROUNDS):
        for side in (asking, answering):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLError as error:
                return error
    return None


def _spoken(error: ssl.SSLError) -> str:
    message = getattr(error, "verify_message", None) or error.reason or "no reason given"
    return message.lower().replace("_", " ")


def _client_context(trusted: list[str]) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # an intermediate authority is trusted as it stands
    context.load_verify_locations(cadata="\n".join(trusted))
    return context


def _server_context(certificate: FilePath, key: FilePath) -> ssl.SSLContext:
    def no_password() -> str:
        raise ValueError("is encrypted, and nobody is there to be asked for the password")

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key, no_password)
    return context


def _certificates(path: FilePath) -> list[str]:
    found = _CERTIFICATE.findall(_read(path))
    if not found:
        raise ValueError("holds no PEM certificate")
    return found


def _read(path: FilePath) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_PEM + 1)
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None
    if len(data) > MAX_PEM:
        raise ValueError(f"has more than {MAX_PEM} bytes")
    return data.decode("ascii", "replace")
