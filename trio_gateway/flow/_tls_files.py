"""TLS between gateways and workers, both sides: certificates from files that may be replaced at any time."""

from __future__ import annotations

import contextlib
import os
import ssl
from collections.abc import Callable
from typing import Final, Literal

import trio

from ..errors import spoken_tls

Side = Literal["client", "server"]
READ_AGAIN: Final = "read again"
LOOK_EVERY: Final = 5.0  # seconds between two looks whether a file was replaced
READ_LIMIT: Final = 10.0  # seconds for files to be read; one on a disk that is away may take for ever
HANDSHAKE: Final = 10.0  # seconds for a peer to agree on a session
_ALERT_LIMIT: Final = 1.0  # seconds to tell a peer why not


class TlsFiles:
    """A context made from files, and made anew as a whole when one of them was replaced.

    Never loaded into one that is in use: where that fails, half of it would be new.

    Args:
        side: a ``server`` shows its certificate, and demands one of its peers if there is a ``ca``; a
            ``client`` verifies name and authority, and shows a certificate if it has one.
        certificate: path of a PEM file: the own certificate, then those that vouch for it; None: none.
        key: path of a PEM file with its key, not encrypted.
        ca: path of a PEM file with the only authorities that may vouch for the peer; None: for a client
            those of the system, for a server nobody is asked.

    Raises:
        OSError: a file can not be read, or the two do not belong together (`ssl.SSLError` is one).
        ValueError: the key is encrypted.

    Attributes:
        context: for who connects from now on.
    """

    def __init__(self, side: Side, certificate: str | None, key: str | None, ca: str | None) -> None:
        self._side: Side = side
        self._certificate = certificate
        self._key = key
        self._ca = ca
        self._seen = self._look()
        self.context = self._make()

    @property
    def files(self) -> tuple[str, ...]:
        """Paths of the files."""
        return tuple(path for path in (self._certificate, self._key, self._ca) if path is not None)

    def refresh(self, *, anyway: bool = False) -> str | None:
        """Make the context anew if a file was replaced; blocks.

        Answers `READ_AGAIN`, or what is wrong with the new files; None: none was replaced. Files that can not
        be used leave the context as it is. A pair may be half replaced: it is looked at again when the other
        half is there.

        Args:
            anyway: also if none was.
        """
        seen = self._look()
        if seen == self._seen and not anyway:
            return None
        self._seen = seen
        try:
            self.context = self._make()
        except (OSError, ValueError) as exc:
            return spoken_tls(exc)
        return READ_AGAIN

    def _look(self) -> tuple[object, ...]:
        """Answer what changes when a file is replaced, or what it links to is."""
        return tuple(map(_stamp, self.files))

    def _make(self) -> ssl.SSLContext:
        for path in self.files:
            with open(path, "rb"):  # OpenSSL's errors name no file
                pass
        if self._side == "server":
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
            context.set_alpn_protocols(["http/1.1"])
            if self._ca is not None:
                context.verify_mode = ssl.CERT_REQUIRED
                context.load_verify_locations(self._ca)
        else:
            context = ssl.create_default_context(cafile=self._ca)
        if self._certificate is not None:
            context.load_cert_chain(self._certificate, self._key, password=_no_password)
        return context


def _stamp(path: str) -> object:
    try:
        found = os.stat(path)
    except OSError as exc:
        return exc.errno
    return found.st_ino, found.st_size, found.st_mtime_ns


def _no_password() -> str:
    raise ValueError("the private key is encrypted")  # without this, OpenSSL would ask at the terminal


class Certificates:
    """All files of certificates of a process; each set of them once."""

    def __init__(self) -> None:
        self._known: dict[tuple[Side, str | None, str | None, str | None], TlsFiles] = {}
        # Each look at files on a disk that is away would keep one thread more, until there is none left.
        self._turn = trio.CapacityLimiter(1)

    def get(self, side: Side, certificate: str | None, key: str | None, ca: str | None) -> TlsFiles:
        """Answer the context of some files, the same for the same files. Blocks for a moment.

        Raises:
            OSError: as `TlsFiles`.
            ValueError: likewise.
        """
        asked = side, certificate, key, ca
        if asked not in self._known:
            self._known[asked] = TlsFiles(side, certificate, key, ca)
        return self._known[asked]

    async def refresh(self, tell: Callable[[str, str], None], *, anyway: bool = False) -> None:
        """Look at all files, in a thread; tells paths and what was done of those that were replaced.

        Args:
            anyway: make all contexts anew.
        """

        def look() -> list[tuple[tuple[str, ...], str]]:
            news = ((each.files, each.refresh(anyway=anyway)) for each in tuple(self._known.values()))
            return [(files, done) for files, done in news if done is not None]

        found = None
        with trio.move_on_after(READ_LIMIT):
            found = await trio.to_thread.run_sync(look, abandon_on_cancel=True, limiter=self._turn)
        for files, done in dict.fromkeys(found or ()):  # what serves and calls with them has the same to say
            tell(", ".join(files), done)

    async def run(self, tell: Callable[[str, str], None]) -> None:
        """Look at all files again and again, for ever."""
        while True:
            await trio.sleep(LOOK_EVERY)
            await self.refresh(tell)


async def shake_hands(stream: trio.SSLStream[trio.SocketStream]) -> str | None:
    """Agree on a session within `HANDSHAKE`; answers why there is none, None: there is one.

    A peer that is refused is told why. `trio.SSLStream` keeps what OpenSSL has to say to that to itself, and
    a client would see nothing but a closed connection.
    """
    try:
        with trio.fail_after(HANDSHAKE):
            await stream.do_handshake()
    except trio.TooSlowError:
        return f"no handshake within {HANDSHAKE:g} s"
    except trio.BrokenResourceError as exc:
        with trio.move_on_after(_ALERT_LIMIT):
            with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await stream.transport_stream.send_all(stream._outgoing.read())
        return spoken_tls(exc.__cause__ or exc)
    return None
