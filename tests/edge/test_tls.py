"""TLS below HTTP: the session on bytes alone, the connection on real sockets, handshakes of every kind."""

from __future__ import annotations

import array
import fcntl
import re
import shutil
import ssl
import subprocess
import termios
import warnings
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import trio
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand
from hypothesis import given
from hypothesis import strategies as st

from tests.accepted import socket_of
from tests.e2e.serving import Serving, error_code, parse_address, serving
from tests.e2e.tls import NAME, Issued, TlsClient, issue
from trio_gateway.contract import AnswerHead
from trio_gateway.edge import HangupWatch, open_listeners, server_context
from trio_gateway.edge._http_client import HttpClient
from trio_gateway.edge._tls import (
    PIECE,
    READ_AHEAD,
    TlsBroken,
    TlsConnection,
    TlsSession,
)
from trio_gateway.edge._watch import Hangup
from trio_gateway.errors import ClientGone
from trio_gateway.testing import RawClient, http_request, until
from trio_gateway.wire import parse_request_head

KIB = 1024
LIVEZ = http_request("GET", "/livez")
REQUEST = parse_request_head(LIVEZ, 100)
SMALL = 4 * KIB  # of a client's kernel, so that it fills soon
VERSIONS = [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3]
VERSION = pytest.mark.parametrize("version", VERSIONS, ids=["1.2", "1.3"])


@pytest.fixture(scope="module")
def issued(tmp_path_factory: pytest.TempPathFactory) -> Issued:
    return issue(tmp_path_factory.mktemp("certificate"))


def only(context: ssl.SSLContext, version: ssl.TLSVersion) -> ssl.SSLContext:
    """Let a client speak one version."""
    context.minimum_version = context.maximum_version = version
    return context


def unread(sock: Any) -> int:
    """Bytes that the kernel holds for whoever reads from a socket."""
    count = array.array("i", [0])
    fcntl.ioctl(sock.fileno(), termios.FIONREAD, count)
    return count[0]


# The session, on bytes alone --------------------------------------------------------------------------------


class Peer:
    """The client's side of a session, in memory."""

    def __init__(self, trust: ssl.SSLContext) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = trust.wrap_bio(self._incoming, self._outgoing, server_hostname=NAME)

    def shake_hands(self, answer: bytes) -> bytes:
        """Take what the server said, and answer what is to be said to that."""
        self._incoming.write(answer)
        with suppress(ssl.SSLWantReadError):
            self.tls.do_handshake()
        return self._outgoing.read()

    def seal(self, data: bytes) -> bytes:
        self.tls.write(data)
        return self._outgoing.read()

    def notify(self) -> bytes:
        with pytest.raises(ssl.SSLWantReadError):
            self.tls.unwrap()
        return self._outgoing.read()

    def open(self, sealed: bytes) -> bytes:
        """Decrypt one record, or answer ``b""`` for ``close_notify``."""
        self._incoming.write(sealed)
        return self.tls.read(64 * KIB)


def agree(issued: Issued, version: ssl.TLSVersion, cuts: Iterable[int] = ()) -> tuple[TlsSession, Peer]:
    """Shake hands; what the client says is fed in pieces of these sizes, then whole."""
    session = TlsSession(server_context(str(issued.certificate), str(issued.key)))
    peer = Peer(only(issued.trust(), version))
    sizes = iter(cuts)
    answer = b""
    while not session.established:
        said = peer.shake_hands(answer)
        assert said
        answer = b""
        for piece in cut(said, sizes):
            assert session.feed(piece) == b""
            answer += session.take()
    assert peer.shake_hands(answer) == b""
    return session, peer


def cut(data: bytes, sizes: Iterable[int]) -> list[bytes]:
    pieces = []
    for size in sizes:
        if not data:
            break
        pieces.append(data[:size])
        data = data[size:]
    return [*pieces, data] if data else pieces


SIZES = st.lists(st.integers(1, 400), max_size=60)
MESSAGES = st.lists(st.binary(min_size=1, max_size=3000), min_size=1, max_size=5)


@given(version=st.sampled_from(VERSIONS), messages=MESSAGES, handshake=SIZES, sizes=SIZES)
def test_any_cut_of_the_ciphertext_gives_the_same_plaintext(
    issued: Issued, version: ssl.TLSVersion, messages: list[bytes], handshake: list[int], sizes: list[int]
) -> None:
    session, peer = agree(issued, version, handshake)
    sealed = b"".join(map(peer.seal, messages)) + peer.notify()
    assert b"".join(map(session.feed, cut(sealed, sizes))) == b"".join(messages)
    assert session.ended
    assert session.take() == b""


@given(
    version=st.sampled_from(VERSIONS),
    messages=MESSAGES,
    place=st.floats(0, 1, exclude_max=True),
    flip=st.integers(1, 255),
    sizes=SIZES,
)
def test_what_was_tampered_with_is_never_plaintext(
    issued: Issued,
    version: ssl.TLSVersion,
    messages: list[bytes],
    place: float,
    flip: int,
    sizes: list[int],
) -> None:
    session, peer = agree(issued, version)
    sealed = bytearray(b"".join(map(peer.seal, messages)))
    sealed[int(place * len(sealed))] ^= flip
    opened = b""
    try:
        for piece in cut(bytes(sealed), sizes):
            opened += session.feed(piece)
    except TlsBroken:
        with pytest.raises(TlsBroken):
            session.seal(b"anything")
    whole = b"".join(messages)
    assert whole.startswith(opened)
    assert len(opened) < len(whole)


@VERSION
def test_each_piece_can_be_read_as_soon_as_it_was_sealed(issued: Issued, version: ssl.TLSVersion) -> None:
    session, peer = agree(issued, version)
    for size in (1, 300, 16 * KIB):
        piece = bytes(size)
        sealed = session.seal(piece)
        assert size < len(sealed) <= size + 64
        assert peer.open(sealed) == piece


@VERSION
def test_the_end_is_said_once_and_nothing_follows_it(issued: Issued, version: ssl.TLSVersion) -> None:
    session, peer = agree(issued, version)
    session.feed(peer.seal(b"a request that nobody reads"))
    assert peer.open(session.end()) == b""
    with pytest.raises(TlsBroken):
        session.seal(b"more")


def test_what_comes_behind_the_clients_end_is_ignored(issued: Issued) -> None:
    session, peer = agree(issued, ssl.TLSVersion.TLSv1_3)
    assert session.feed(peer.seal(b"last") + peer.notify()) == b"last"
    assert session.feed(b"\x17\x03\x03\x00\x05noise") == b""
    assert peer.open(session.seal(b"still heard")) == b"still heard"


def test_a_session_that_was_never_agreed_on_has_nothing_to_end(issued: Issued) -> None:
    assert TlsSession(server_context(str(issued.certificate), str(issued.key))).end() == b""


def test_an_encrypted_key_asks_nobody(issued: Issued, tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    encrypted = tmp_path / "encrypted.key"
    command = ["openssl", "pkey", "-in", str(issued.key), "-aes128", "-passout", "pass:word"]
    encrypted.write_bytes(subprocess.run(command, check=True, capture_output=True).stdout)
    with pytest.raises(ValueError, match="the private key is encrypted"):
        server_context(str(issued.certificate), str(encrypted))


# The connection, on real sockets ----------------------------------------------------------------------------


@asynccontextmanager
async def connected(
    issued: Issued, *, receive_buffer: int | None = None, trust: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[TlsConnection, TlsClient]]:
    """Both ends of one connection."""
    context = server_context(str(issued.certificate), str(issued.key))
    watch = HangupWatch()
    (listener,) = await open_listeners(("127.0.0.1:0",))
    async with listener, trio.open_nursery() as nursery:
        address = listener.socket.getsockname()
        with trio.fail_after(10), await RawClient.connect(address, receive_buffer=receive_buffer) as plain:
            ours = socket_of(await listener.accept())
            with Hangup(watch, ours.fileno()) as hangup:
                connection = TlsConnection(ours, hangup, 64 * KIB, context)
                try:
                    nursery.start_soon(watch.run)  # noqa: ASYNC113 - it misses nothing by beginning late
                    async with trio.open_nursery() as hands:
                        hands.start_soon(connection.shake_hands)
                        client = await TlsClient.over(plain, trust or issued.trust())
                    client.secured.decrypt(await client.secured.sock.recv(64 * KIB))  # tickets
                    yield connection, client
                finally:
                    connection.close()
        nursery.cancel_scope.cancel()
    watch.close()


async def once_the_kernel_shows(holds: Callable[[], bool]) -> None:
    """Wait for what no task of this process changes."""
    while not holds():  # noqa: ASYNC110 - the kernel sets no event
        await trio.sleep(0.005)


async def take(client: TlsClient, size: int) -> bytes:
    """Take some ciphertext out of the client's kernel, and answer the plaintext that is whole with it."""
    return client.secured.decrypt(await client.secured.sock.recv(size))


async def flush(connection: TlsConnection) -> None:
    while connection.waiting:
        await connection.wait_writable()
        connection.write(b"")


async def test_a_piece_is_taken_whole_or_not_at_all_and_only_one_waits(issued: Issued) -> None:
    async with connected(issued, receive_buffer=SMALL) as (connection, client):
        pieces = [bytes([number]) * (12 * KIB) for number in range(100)]
        taken = []
        for piece in pieces:
            count = connection.write(piece)
            assert count in (0, len(piece))
            if not count:
                break
            taken.append(piece)
        assert 1 < len(taken) < len(pieces)
        assert 0 < connection.waiting <= 12 * KIB + 64
        assert connection.written == sum(map(len, taken))
        assert connection.write(b"") == connection.write(pieces[-1]) == 0

        received = bytearray()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(flush, connection)
            while len(received) < connection.written:
                received += await client.secured.recv(64 * KIB)
        assert bytes(received) == b"".join(taken)
        assert connection.waiting == 0
        await once_the_kernel_shows(lambda: connection.acknowledged() == connection.written)


async def test_much_is_taken_piece_by_piece(issued: Issued) -> None:
    async with connected(issued) as (connection, client):
        data = bytes(range(256)) * 4 * KIB

        received = bytearray()
        async with trio.open_nursery() as nursery:
            assert connection.write(data) == PIECE
            nursery.start_soon(connection.write_all, data[PIECE:])
            while len(received) < len(data):
                received += await client.secured.recv(64 * KIB)
        assert bytes(received) == data


async def test_nothing_waits_once_all_was_written(issued: Issued) -> None:
    async with connected(issued, receive_buffer=SMALL) as (connection, _):
        with trio.move_on_after(0.2) as blocked:
            while True:
                await connection.write_all(b"x" * 8000)
                assert connection.waiting == 0
        assert blocked.cancelled_caught
        assert connection.waiting > 0


async def test_an_answer_is_not_finished_while_a_part_of_it_waits(issued: Issued) -> None:
    body = b"x" * 16 * KIB
    async with connected(issued, receive_buffer=SMALL) as (connection, client):
        while True:  # until one answer does not fit into the kernel
            answer = HttpClient(connection, REQUEST, (), answer_limit=60, ask_every=60)
            answer.begin(AnswerHead(200, length=len(body)))
            answer.push(body, last=True)
            if answer.pending:
                break
        assert answer.pending == connection.waiting > 0
        assert (answer.ended, answer.finished) == (True, False)

        written, before = connection.written, answer.taken()
        opened = await take(client, SMALL)
        await once_the_kernel_shows(lambda: answer.taken() > before)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(answer.flush)
            while connection.waiting:
                opened += await take(client, SMALL)
        assert (answer.pending, answer.finished) == (0, True)
        while len(opened) < written:
            opened += await take(client, 64 * KIB)
        assert opened.count(b"HTTP/1.1 200") * len(body) == opened.count(b"x")


async def test_of_what_the_peer_has_little_is_remembered(issued: Issued) -> None:
    async with connected(issued) as (connection, client):
        for _ in range(3000):
            await connection.write_all(b"token")
            while unread(client.secured.sock):
                await take(client, 64 * KIB)
        assert len(connection._records) < 1000


async def test_what_counts_as_acknowledged_can_all_be_decrypted_by_the_client(issued: Issued) -> None:
    async with connected(issued, receive_buffer=SMALL) as (connection, client):
        while connection.write(b"x" * 1000):
            pass
        await once_the_kernel_shows(lambda: connection.acknowledged() > 0)
        confirmed = connection.acknowledged()
        opened = len(await take(client, unread(client.secured.sock)))
        assert 0 < confirmed <= opened < connection.written


async def test_progress_is_what_the_socket_takes_and_what_the_peer_acknowledges(issued: Issued) -> None:
    async with connected(issued, receive_buffer=SMALL) as (connection, client):
        seen = [connection.progress()]
        while connection.write(b"x" * 8000):
            seen.append(connection.progress())
        assert seen == sorted(set(seen))
        assert connection.write(b"x") == 0
        before = connection.progress()
        await client.secured.sock.recv(64 * KIB)
        await once_the_kernel_shows(lambda: connection.progress() > before)


async def test_the_clients_end_is_seen_behind_what_it_sent_and_eats_nothing_of_it(issued: Issued) -> None:
    async with connected(issued) as (connection, client):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(connection.wait_end)
            await client.send(b"the next ")
            await client.send(b"request")
            await client.secured.notify()
        received = await connection.receive()
        while b"request" not in received:
            received += await connection.receive()
        assert received == b"the next request"
        assert await connection.receive() == b""
        assert not connection.hangup.gone


@pytest.mark.parametrize("how", ["fin", "half", "reset", "garbage"])
async def test_whoever_leaves_without_a_word_is_seen_too(issued: Issued, how: str) -> None:
    async with connected(issued) as (connection, client):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(connection.wait_end)
            if how == "fin":
                client.leave_fin()
            elif how == "half":
                client.half_close()
            elif how == "reset":
                client.leave_reset()
            else:
                await client.secured.sock.send(b"GET / HTTP/1.1\r\n\r\n")
        with pytest.raises(ClientGone):
            await connection.receive()
        assert connection.hangup.gone == (how in ("reset", "garbage"))


async def test_no_more_than_a_little_is_read_ahead_and_a_fin_is_seen_all_the_same(issued: Issued) -> None:
    sent = bytes(range(256)) * 250  # fits into the kernel of the gateway, with the FIN behind it
    async with connected(issued) as (connection, client):
        server_socket = connection._socket
        async with trio.open_nursery() as nursery:
            nursery.start_soon(connection.wait_end)
            await client.send(sent)
            await until(lambda: len(connection._opened) >= READ_AHEAD)
            before = unread(server_socket)
            assert len(connection._opened) < READ_AHEAD + 64 * KIB
            client.half_close()
        assert unread(server_socket) >= before > 0
        received = bytearray()
        while len(received) < len(sent):
            received += await connection.receive()
        assert bytes(received) == sent
        with pytest.raises(ClientGone):  # the end was not announced: somebody may have cut it
            await connection.receive()


async def test_a_proper_end_is_announced_and_a_closed_connection_is_not(issued: Issued) -> None:
    async with connected(issued) as (connection, client):
        connection.write(b"whole")
        await connection.finish_sending()
        assert await client.secured.recv(KIB) == b"whole"
        assert await client.read_closed() == "fin"
        assert client.secured.notified
    async with connected(issued) as (connection, client):
        connection.write(b"ha")
        connection.close()
        with pytest.raises(ClientGone):
            connection.write(b"lf")
        assert await client.secured.recv(KIB) == b"ha"
        assert await client.read_closed() == "fin"
        assert not client.secured.notified


async def test_an_end_waits_for_what_the_socket_did_not_take(issued: Issued) -> None:
    async with connected(issued, receive_buffer=SMALL) as (connection, client):
        while connection.write(b"x" * 8000):
            pass
        received = 0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(connection.finish_sending)
            while piece := await client.secured.recv(64 * KIB):
                received += len(piece)
        assert client.secured.notified
        assert received == connection.written


async def test_a_client_that_was_lost_takes_no_more(issued: Issued) -> None:
    async with connected(issued) as (connection, client):
        client.leave_reset()
        await until(lambda: connection.hangup.gone)
        with pytest.raises(ClientGone):
            connection.write(b"anything")


async def test_after_an_end_what_still_arrives_is_dropped_unread(issued: Issued) -> None:
    async with connected(issued) as (connection, client):
        await connection.finish_sending()
        await client.send(b"x" * 1000)
        await client.secured.sock.send(b"noise that is no TLS")
        client.half_close()
        dropped = 0
        while count := await connection.discard():
            dropped += count
        assert dropped > 1000


class KeyUpdates:
    """A client's messages that ask for new keys (RFC 8446 section 4.6.3), made by hand: no library floods.

    Each brings new keys itself (section 7.2) and makes the other side answer.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def __next__(self) -> bytes:
        iv, key = self._expand(b"iv", 12), self._expand(b"key", 32)
        self._secret = self._expand(b"traffic upd", 48)
        inner = b"\x18\x00\x00\x01\x01" + b"\x16"  # key_update, update_requested; handshake
        header = b"\x17\x03\x03" + (len(inner) + 16).to_bytes(2)
        return header + AESGCM(key).encrypt(iv, inner, header)  # the first record of its keys: number 0

    def _expand(self, label: bytes, size: int) -> bytes:
        info = size.to_bytes(2) + bytes([6 + len(label)]) + b"tls13 " + label + b"\x00"
        return HKDFExpand(SHA384(), size, info).derive(self._secret)


async def test_a_client_that_makes_tls_speak_and_never_listens_is_bounded(
    issued: Issued, tmp_path: Path
) -> None:
    trust = only(issued.trust(), ssl.TLSVersion.TLSv1_3)
    trust.keylog_filename = str(tmp_path / "keys")
    async with connected(issued, trust=trust, receive_buffer=SMALL) as (connection, client):
        assert client.secured.tls.cipher()[0] == "TLS_AES_256_GCM_SHA384"  # type: ignore[index]
        (secret,) = re.findall(r"CLIENT_TRAFFIC_SECRET_0 \w+ (\w+)", (tmp_path / "keys").read_text())
        updates = KeyUpdates(bytes.fromhex(secret))

        async def flood() -> None:
            with suppress(OSError):
                for _ in range(100):
                    await client.secured.sock.send(b"".join(next(updates) for _ in range(200)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(flood)
            with pytest.raises(ClientGone):
                await connection.receive()
            assert connection.hangup.gone
            most = connection.waiting
            connection.close()
        assert PIECE < most < 64 * KIB


# Handshakes, with the whole gateway -------------------------------------------------------------------------


def serving_nothing(issued: Issued, **sections: Any) -> AbstractAsyncContextManager[Serving]:
    """A gateway without a worker."""
    return serving(models=[], server=sections.pop("server", issued.server), **sections)


async def ask(gateway: Serving, trust: ssl.SSLContext, **how: Any) -> ssl.SSLObject:
    """Ask whether it lives, and answer the session that carried the answer; `how` as `TlsClient.dial`."""
    with trio.fail_after(10), await TlsClient.dial(gateway.address, trust, **how) as client:
        await client.send(LIVEZ)
        assert (await client.read_to_end()).status == 200
        return client.secured.tls


@VERSION
async def test_a_client_is_served_over_tls(issued: Issued, version: ssl.TLSVersion) -> None:
    async with serving_nothing(issued) as gateway:
        assert gateway.gateway.addresses[0].startswith("https://127.0.0.1:")
        tls = await ask(gateway, only(issued.trust(), version))
        assert tls.version() == version.name.replace("_", ".")
        assert tls.compression() is None
        assert gateway.gateway.server.failed_handshakes == 0


@VERSION
async def test_a_session_can_be_resumed(issued: Issued, version: ssl.TLSVersion) -> None:
    trust = only(issued.trust(), version)
    async with serving_nothing(issued) as gateway:
        first = await ask(gateway, trust)
        again = await ask(gateway, trust, session=first.session)
    assert (first.session_reused, again.session_reused) == (False, True)


async def test_tls_1_1_is_refused(issued: Issued) -> None:
    trust = issued.trust()
    trust.set_ciphers("ALL:@SECLEVEL=0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        only(trust, ssl.TLSVersion.TLSv1_1)
    async with serving_nothing(issued) as gateway:
        with pytest.raises(ssl.SSLError, match="PROTOCOL_VERSION"):
            await ask(gateway, trust)
        await gateway.until(lambda: gateway.gateway.server.failed_handshakes == 1)


@pytest.mark.parametrize(
    ("offered", "chosen"),
    [(["h2", "http/1.1"], "http/1.1"), (["http/1.1"], "http/1.1"), (["h2"], None), ([], None)],
)
async def test_the_only_protocol_inside_is_http_1_1(
    issued: Issued, offered: list[str], chosen: str | None
) -> None:
    trust = issued.trust()
    if offered:
        trust.set_alpn_protocols(offered)
    async with serving_nothing(issued) as gateway:
        assert (await ask(gateway, trust)).selected_alpn_protocol() == chosen


@pytest.mark.parametrize("name", [None, "other.test", "a" * 63 + ".test"])
async def test_the_name_that_a_client_asks_for_does_not_matter(issued: Issued, name: str | None) -> None:
    trust = issued.trust()
    trust.check_hostname = False
    async with serving_nothing(issued) as gateway:
        await ask(gateway, trust, name=name)


@pytest.mark.parametrize("rest", [0, 500 * KIB])
async def test_http_in_clear_is_told_to_use_https(issued: Issued, rest: int) -> None:
    async with serving_nothing(issued) as gateway:
        with trio.fail_after(10), await gateway.connect() as client:
            await client.send(http_request("POST", "/v1/chat/completions", body=b"x" * rest))
            answer = await client.read_to_end()
            assert (answer.status, error_code(answer)) == (400, "bad_framing")
            assert "https" in str(answer.error()["message"])
            assert answer.header("connection") == "close"
            client.half_close()
            assert await client.read_closed() == "fin"
        await gateway.until(lambda: gateway.gateway.server.failed_handshakes == 1)
        assert gateway.turned_away() == {"bad_framing": 1}


NOISE = [
    b"\x00" * 100,
    b"\x16\x03\x01\x00\x05\x01\x00\x00\x01\x00",  # a handshake record without a hello in it
    b"\x16\x03\x01\xff\xff" + b"x" * 100,  # a record longer than any
    b"\x17\x03\x03\x00\x05hello",  # data before the handshake
    b"\x80\x2e\x01\x03\x01",  # the hello of SSL 2
    b"SSH-2.0-OpenSSH_9.9\r\n",
    b"\x15\x03\x01\x00\x02\x02\x28",  # an alert
]


@pytest.mark.parametrize("noise", NOISE, ids=range(len(NOISE)))
async def test_what_is_no_handshake_ends_that_connection(issued: Issued, noise: bytes) -> None:
    async with serving_nothing(issued) as gateway:
        with trio.fail_after(10), await gateway.connect() as client:
            await client.send(noise)
            client.half_close()
            await client.stall()
        await gateway.until(lambda: gateway.gateway.server.open == 0)
        assert gateway.gateway.server.failed_handshakes == 1
        await ask(gateway, issued.trust())


async def test_a_handshake_has_the_time_of_a_head(issued: Issued) -> None:
    hello = Peer(issued.trust()).shake_hands(b"")
    async with serving_nothing(issued, limits={"head_timeout": 0.2}) as gateway:

        async def begin(said: bytes, endless: bool) -> None:
            client = await gateway.connect()
            with client:
                await client.send(said)
                while endless and not client.closed_by_gateway:
                    try:
                        await client.send(b"\x16")
                    except OSError:
                        break
                    await trio.sleep(0.01)
                await client.stall()

        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                for said, endless in (
                    (b"", False),
                    (hello[:1], False),
                    (hello[:-1], False),
                    (hello, False),  # the finish is missing
                    (b"\x16\x03\x01\x40\x00", True),  # a hello that goes on and on
                ):
                    nursery.start_soon(begin, said, endless)
        await gateway.until(lambda: gateway.gateway.server.failed_handshakes == 5)
        assert gateway.turned_away() == {}


async def test_a_client_that_does_not_trust_the_certificate_leaves(issued: Issued, tmp_path: Path) -> None:
    async with serving_nothing(issued) as gateway:
        with pytest.raises(ssl.SSLCertVerificationError):
            await ask(gateway, issue(tmp_path).trust())
        await gateway.until(lambda: gateway.gateway.server.failed_handshakes == 1)


async def test_unix_sockets_stay_in_clear_beside_tls(issued: Issued, tmp_path: Path) -> None:
    binds = {"bind": ["127.0.0.1:0", f"unix:{tmp_path / 'gw.sock'}"]}
    async with serving_nothing(issued, server={**issued.server, **binds}) as gateway:
        await ask(gateway, issued.trust())
        tcp, unix = gateway.gateway.addresses
        assert (tcp[:8], unix) == ("https://", f"unix:{tmp_path / 'gw.sock'}")
        with trio.fail_after(10), await RawClient.connect(parse_address(unix)) as client:
            await client.send(LIVEZ)
            assert (await client.read_to_end()).status == 200


async def test_connections_in_a_handshake_count_and_are_given_back(issued: Issued) -> None:
    async with serving_nothing(issued, limits={"connections": 2, "head_timeout": 30}) as gateway:
        with trio.fail_after(10):
            silent = [await gateway.connect() for _ in range(2)]
            await gateway.until(lambda: gateway.gateway.server.open == 2)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask, gateway, issued.trust())  # there is no permit for it
                silent[0].leave_fin()
            silent[1].leave_reset()


async def test_renegotiation_is_refused(issued: Issued) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    async with serving_nothing(issued) as gateway:
        address = gateway.gateway.addresses[0].removeprefix("https://")
        command = ["openssl", "s_client", "-connect", address, "-tls1_2", "-CAfile", str(issued.authority)]
        with trio.fail_after(10):
            # The command reads a line "R" as: begin a new handshake inside the session.
            ended = await trio.run_process(
                command, stdin=b"R\n", check=False, capture_stdout=True, capture_stderr=True
            )
        assert b"no renegotiation" in ended.stderr
        await ask(gateway, issued.trust())
