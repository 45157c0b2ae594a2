"""Clients that speak TLS, and the certificates that gateways under test show them."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import trio
import trustme

from trio_gateway.testing import Address, RawClient

NAME: Final = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate on disk, and who vouches for it.

    Attributes:
        authority: file that makes clients trust the certificate.
    """

    certificate: Path
    key: Path
    authority: Path

    @property
    def server(self) -> Mapping[str, Any]:
        """The section ``server`` of a gateway that shows it."""
        return {"bind": ["127.0.0.1:0"], "tls": {"certificate": self.certificate, "key": self.key}}

    def trust(self) -> ssl.SSLContext:
        """Make a context of a client that trusts the authority."""
        return ssl.create_default_context(cafile=self.authority)


def issue(folder: Path, **options: Any) -> Issued:
    """Make an authority and a certificate of it; `options` are those of `trustme.CA.issue_cert`."""
    authority = trustme.CA()
    leaf = authority.issue_cert(NAME, **options)
    issued = Issued(folder / "server.pem", folder / "server.key", folder / "authority.pem")
    issued.certificate.write_bytes(b"".join(blob.bytes() for blob in leaf.cert_chain_pems))
    leaf.private_key_pem.write_to_path(str(issued.key))
    authority.cert_pem.write_to_path(str(issued.authority))
    return issued


class TlsSocket:
    """A socket as `RawClient` uses one, with a TLS session on it.

    Attributes:
        notified: the gateway ended the session with ``close_notify``.
        tls: the session.
    """

    def __init__(
        self,
        sock: trio.socket.SocketType,
        trust: ssl.SSLContext,
        name: str | None,
        session: ssl.SSLSession | None,
    ) -> None:
        self.sock: Final = sock
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls: Final = trust.wrap_bio(
            self._incoming, self._outgoing, server_hostname=name, session=session
        )
        self.notified = False

    async def shake_hands(self) -> None:
        """Agree on a session."""
        while (failure := self._step()) is not None:
            await self._flush()  # an alert that says why, perhaps
            if not isinstance(failure, ssl.SSLWantReadError):
                raise failure
            if not await self._more(16 * 1024):
                raise ConnectionError("closed in the middle of the handshake")
        await self._flush()

    async def send(self, data: memoryview) -> int:
        """Encrypt and send."""
        self.tls.write(data)
        await self._flush()
        return len(data)

    async def notify(self) -> None:
        """Send ``close_notify``."""
        with suppress(ssl.SSLError):
            self.tls.unwrap()
        await self._flush()

    async def recv(self, size: int) -> bytes:
        """Receive plaintext, made of at most so many bytes of ciphertext at a time; ``b""``: it is over."""
        while True:
            try:
                data = self.tls.read(64 * 1024)
            except ssl.SSLWantReadError:
                if not await self._more(size):
                    return b""  # without close_notify
            except ssl.SSLZeroReturnError:
                self.notified = True
                return b""
            else:
                self.notified = not data
                return data

    def decrypt(self, sealed: bytes) -> bytes:
        """Answer the plaintext of all records that are whole now."""
        self._incoming.write(sealed)
        opened = bytearray()
        with suppress(ssl.SSLWantReadError):
            while True:
                opened += self.tls.read(64 * 1024)
        return bytes(opened)

    def shutdown(self, how: int) -> None:
        """As a socket does, without ``close_notify``."""
        self.sock.shutdown(how)

    def setsockopt(self, level: int, option: int, value: bytes) -> None:
        """As a socket does."""
        self.sock.setsockopt(level, option, value)

    def fileno(self) -> int:
        """As a socket does."""
        return self.sock.fileno()

    def close(self) -> None:
        """As a socket does, without ``close_notify``."""
        self.sock.close()

    def _step(self) -> ssl.SSLError | None:
        """Go on with the handshake, and answer what keeps it from being done."""
        try:
            self.tls.do_handshake()
        except ssl.SSLError as exc:
            return exc
        return None

    async def _more(self, size: int) -> bool:
        data = await self.sock.recv(size)
        self._incoming.write(data)
        return bool(data)

    async def _flush(self) -> None:
        rest = memoryview(self._outgoing.read())
        while rest:
            rest = rest[await self.sock.send(rest) :]


class TlsClient(RawClient):
    """A `RawClient` over TLS."""

    @classmethod
    async def dial(
        cls,
        address: Address,
        trust: ssl.SSLContext,
        *,
        name: str | None = NAME,
        session: ssl.SSLSession | None = None,
        receive_buffer: int | None = None,
    ) -> TlsClient:
        """Connect and agree on a session.

        Args:
            address: where the gateway listens.
            trust: context of a client.
            name: what is asked for by SNI and looked for in the certificate.
            session: an earlier one, to be resumed.
            receive_buffer: as `RawClient.connect` takes it.

        Raises:
            ssl.SSLError: there is no session that both want.
        """
        plain = await RawClient.connect(address, receive_buffer=receive_buffer)
        return await cls.over(plain, trust, name, session)

    @classmethod
    async def over(
        cls,
        plain: RawClient,
        trust: ssl.SSLContext,
        name: str | None = NAME,
        session: ssl.SSLSession | None = None,
    ) -> TlsClient:
        """Agree on a session over a connection, which is the answer's from now on."""
        sock = TlsSocket(plain._socket, trust, name, session)
        try:
            await sock.shake_hands()
        except BaseException:
            sock.close()
            raise
        return cls(cast(Any, sock))

    @property
    def secured(self) -> TlsSocket:
        """The socket with the session."""
        return cast(TlsSocket, self._socket)
