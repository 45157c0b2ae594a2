"""Certificates for tests of TLS."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Certificate:
    """A certificate of a private authority.

    Attributes:
        server: a context for the side that shows the certificate.
        authority: a PEM file with the authority, which makes clients trust it.
    """

    server: ssl.SSLContext
    authority: Path


def make_certificate(directory: Path, *names: str) -> Certificate:
    """Make an authority and a certificate for these names, ``127.0.0.1`` if none is given.

    Args:
        directory: where the authority's file is written.
        names: host names and IP addresses that the certificate is good for.

    Raises:
        ModuleNotFoundError: the package ``trustme`` (extra ``dev``) is missing.
    """
    import trustme  # only tests have it

    authority = trustme.CA()
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(*(names or ("127.0.0.1",))).configure_cert(server)
    path = directory / "authority.pem"
    authority.cert_pem.write_to_path(str(path))
    return Certificate(server, path)
