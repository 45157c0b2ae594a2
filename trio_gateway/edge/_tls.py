"""TLS on a client's connection: a session between two memory buffers, and the connection that speaks it.

An exchange writes synchronously, as far as the client's socket takes bytes.
`trio.SSLStream` can only wait, and hides how far it came. Here OpenSSL works on
memory and never sees the socket: each piece is encrypted once, the socket gets
what it takes, and the rest of that one piece waits.

How an answer ended can be told apart by the client: a proper end is followed by
``close_notify`` (RFC 8446 section 6.1), a cut one never is.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections import deque
from collections.abc import Callable
from typing import Final, final

import trio

from ..errors import ClientGone
from ._connection import Connection
from ._watch import Hangup

# What OpenSSL's buffers were once filled with they keep until the connection ends; larger reads gain nothing.
SEALED_READ: Final = 16 * 1024
# A piece of the delivery with its head and chunk framing is less: two records, one write.
PIECE: Final = 32 * 1024
# Bytes of further requests that are decrypted during an answer, to see whether the client ends behind them.
READ_AHEAD: Final = 16 * 1024
# Ciphertext that may wait: a piece, and what OpenSSL has to say. Who makes it speak and never reads is gone.
MOST_WAITING: Final = PIECE + 8 * 1024

_RECORDS: Final = 256  # ends of records kept before the kernel is asked which are past
_PLAINTEXT: Final = 16 * 1024  # of one record at most (RFC 8446 section 5.1)


def server_context(certificate: str, key: str) -> ssl.SSLContext:
    """Make what all connections of a listener share.

    TLS 1.2 and 1.3 with the ciphers that Python chooses, no renegotiation, no
    compression; the only protocol inside is HTTP/1.1. Names that clients ask for
    (SNI) do not matter: there is one certificate.

    Args:
        certificate: path of a PEM file: the server's certificate, then those that vouch for it.
        key: path of a PEM file with its private key, not encrypted.

    Raises:
        OSError: a file can not be read, holds something else, or the two do not belong together
            (`ssl.SSLError` is one).
        ValueError: the key is encrypted.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    context.set_alpn_protocols(["http/1.1"])
    context.load_cert_chain(certificate, key, password=_no_password)
    return context


def _no_password() -> str:
    raise ValueError("the private key is encrypted")  # without this, OpenSSL would ask at the terminal


class TlsBroken(Exception):
    """The peer's bytes are no TLS, or none that a session can be had with; `take` may say why to the peer."""


@final
class TlsSession:
    """The server's side of one TLS session. Sans-IO.

    Attributes:
        established: the handshake is done.
        ended: the peer sent ``close_notify``; what it sends after that is ignored.
    """

    def __init__(self, context: ssl.SSLContext) -> None:
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self.established = False
        self.ended = False

    def feed(self, data: bytes) -> bytes:
        """Take in what the peer sent; answers the plaintext of all records that are whole now.

        Raises:
            TlsBroken: the session is over.
        """
        self._incoming.write(data)
        try:
            if not self.established:
                self._tls.do_handshake()
                self.established = True
            return self._open()
        except ssl.SSLWantReadError:
            return b""
        except ssl.SSLError as exc:
            raise TlsBroken(exc.reason) from None

    def seal(self, data: bytes) -> bytes:
        """Encrypt; answers everything that has to be sent now, in order.

        Raises:
            TlsBroken: the session is over, or the peer stopped in the middle of a handshake message.
        """
        try:
            self._tls.write(data)
        except ssl.SSLError as exc:
            raise TlsBroken(exc.reason) from None
        return self._outgoing.read()

    def take(self) -> bytes:
        """Answer what TLS itself has to say: handshake messages, tickets, alerts."""
        return self._outgoing.read()

    def end(self) -> bytes:
        """Encrypt that nothing more will come; nothing can be sealed after it."""
        if self.established:
            with contextlib.suppress(ssl.SSLError):  # it would like to wait for the peer's
                self._tls.unwrap()
        return self._outgoing.read()

    def _open(self) -> bytes:
        pieces = []
        while not self.ended and (self._incoming.pending or self._tls.pending()):
            try:
                piece = self._tls.read(_PLAINTEXT)
            except ssl.SSLWantReadError:
                break  # half of a record
            if piece:
                pieces.append(piece)
            else:
                self.ended = True
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class SpokeInClear(Exception):
    """A client began with an HTTP request instead of a handshake."""


@final
class TlsConnection(Connection):
    """A client's socket with a TLS session on it. See Connection.

    `written` counts plaintext; what waits, and what the kernel tells, is
    ciphertext. A client that ends its sending is gone: ``close_notify`` closes
    both directions in TLS 1.2 (RFC 5246 section 7.2.1), and a FIN without it is
    an end that nobody vouches for.

    Args:
        context: of `server_context`.
    """

    buffers = True
    asks_after_fin = False

    def __init__(self, sock: socket.socket, hangup: Hangup, max_head: int, context: ssl.SSLContext) -> None:
        super().__init__(sock, hangup, max_head)
        self._max_head = max_head
        self._session = TlsSession(context)
        self._sealed = b""  # not accepted by the socket yet
        self._sealed_end = 0  # all ciphertext that was made
        self._accepted = 0  # of it, by the socket
        self._records: deque[tuple[int, int]] = deque()  # ends of pieces: in ciphertext, in `written`
        self._confirmed = 0
        self._opened = b""  # plaintext for `receive`

    async def shake_hands(self) -> None:
        """Agree on a session. The caller bounds the time.

        Raises:
            SpokeInClear: this is HTTP. `in_clear` can answer it.
            ClientGone: the client left, or no session can be had and it was told why.
        """
        data = await self._receive_raw(SEALED_READ)
        if data[:1].isalpha():  # a record begins with a byte below 32 (RFC 8446 section 5.1)
            raise SpokeInClear
        while True:
            self._take_in(data)
            while self._sealed:
                await self.wait_writable()
                self._send_sealed()
            if self._session.established:
                return
            data = await self._receive_raw(SEALED_READ)

    def in_clear(self) -> Connection:
        """Answer the connection as it is below TLS; both must not be used."""
        return Connection(self._socket, self.hangup, self._max_head)

    @property
    def waiting(self) -> int:
        """See Connection."""
        return len(self._sealed)

    def receive_now(self) -> bytes | None:
        """See Connection. What is here may be half a record."""
        return None

    async def receive(self) -> bytes:
        """See Connection. A connection that ends without ``close_notify`` was lost, or cut by somebody else.

        Raises:
            ClientGone: that, or a reset, or bytes that are no TLS.
        """
        if self._opened or self._session.ended:
            await trio.lowlevel.checkpoint()
        while not (self._opened or self._session.ended):
            if self.hangup.gone:
                raise ClientGone  # perhaps for what it sent, and then it waits for us
            self._take_in(await self._receive_raw(SEALED_READ))
        data, self._opened = self._opened, b""
        return data

    def on_leaving(self, told: Callable[[], None] | None) -> None:
        """See Connection. At once: who waits for ``close_notify`` has to read."""
        if told is not None:
            told()

    async def wait_end(self) -> None:
        """See Connection. Decrypts a little of what follows: ``close_notify`` looks like any other record."""
        try:
            while not self._session.ended and len(self._opened) < READ_AHEAD:
                self._take_in(await self._receive_raw(SEALED_READ))
        except ClientGone:
            return
        if not self._session.ended:
            await self.hangup.wait_fin()

    def write(self, data: bytes) -> int:
        """See Connection. Takes all of a piece or nothing: what the socket does not take waits here."""
        if self._sealed:
            self._send_sealed()
            if self._sealed:
                return 0
        if not data:
            return 0
        piece = data if len(data) <= PIECE else data[:PIECE]
        try:
            sealed = self._session.seal(piece)
        except TlsBroken:
            self.hangup.lost()
            raise ClientGone from None
        self.written += len(piece)
        self._put(sealed)
        self._records.append((self._sealed_end, self.written))
        if len(self._records) > _RECORDS:
            self.acknowledged()
        return len(piece)

    def progress(self) -> int:
        """See Connection."""
        return 2 * self._accepted - (self.unacknowledged() or 0)

    def acknowledged(self) -> int:
        """See Connection. Counts whole pieces: a part of a record can not be read by anybody."""
        done = self._accepted - (self.unacknowledged() or 0)
        while self._records and self._records[0][0] <= done:
            self._confirmed = self._records.popleft()[1]
        return self._confirmed

    async def finish_sending(self) -> None:
        """See Connection. Sends ``close_notify``, so call it for proper ends only."""
        if not self.closed:
            self._put(self._session.end())
            while self._sealed:
                await self.wait_writable()
                self._send_sealed()
        await super().finish_sending()

    def _take_in(self, data: bytes) -> None:
        """Decrypt, and say what TLS has to say to that."""
        if not data:
            raise ClientGone
        try:
            self._opened += self._session.feed(data)
        except TlsBroken:
            with contextlib.suppress(ClientGone):
                self._put(self._session.take())  # why; if it can be told at once
            self.hangup.lost()
            raise ClientGone from None
        if reply := self._session.take():
            self._put(reply)

    def _put(self, sealed: bytes) -> None:
        self._sealed_end += len(sealed)
        self._sealed = self._sealed + sealed if self._sealed else sealed
        self._send_sealed()
        if len(self._sealed) > MOST_WAITING:
            self.hangup.lost()
            raise ClientGone

    def _send_sealed(self) -> None:
        count = self._send(self._sealed)
        self._accepted += count
        self._sealed = self._sealed[count:] if count < len(self._sealed) else b""
