"""Ways to an engine: TCP, TLS that is verified, unix sockets, and paths in front of the engine's own."""

from __future__ import annotations

import datetime
import ssl
from functools import partial
from pathlib import Path

import pytest
import trio
import trustme

from tests.e2e.serving import error_code, has_ipv6, serving
from trio_gateway.testing import (
    CloseFin,
    Hold,
    chat_request,
    chat_stream,
    make_certificate,
    open_engine,
)


async def test_an_engine_behind_tls_is_verified_against_its_own_authority(tmp_path: Path) -> None:
    certificate = make_certificate(tmp_path)
    async with (
        open_engine(tls=certificate.server) as engine,
        serving(engine, worker={"ca": str(certificate.authority)}) as gateway,
    ):
        for stream in (True, False):
            assert (await gateway.ask(chat_request("x" * 200_000, stream=stream))).status == 200
        assert [request.connection for request in engine.requests] == [1, 1]
        assert engine.requests[0].header("host") == f"127.0.0.1:{engine.port}"


async def test_an_authority_that_did_not_sign_is_not_believed(tmp_path: Path) -> None:
    certificate = make_certificate(tmp_path)
    (tmp_path / "other").mkdir()
    other = make_certificate(tmp_path / "other")
    async with (
        open_engine(tls=certificate.server) as engine,
        serving(engine, worker={"ca": str(other.authority)}) as gateway,
    ):
        answer = await gateway.ask(chat_request())
        assert (answer.status, error_code(answer)) == (502, "engine_failed")
        assert b"ertificate" not in answer.body
        await engine.wait_disconnected()
        statistics = engine.statistics()
        assert (statistics.requests, statistics.failed_handshakes) == (0, 1)
        assert gateway.gateway.fleet.books["w1"].faults == 1


async def test_without_an_authority_of_its_own_a_private_certificate_is_not_believed(tmp_path: Path) -> None:
    certificate = make_certificate(tmp_path)
    async with open_engine(tls=certificate.server) as engine, serving(engine) as gateway:
        assert (await gateway.ask(chat_request())).status == 502
        assert engine.statistics().requests == 0


async def test_a_certificate_for_another_name_is_not_believed(tmp_path: Path) -> None:
    certificate = make_certificate(tmp_path, "engine.example")
    async with (
        open_engine(tls=certificate.server) as engine,
        serving(engine, worker={"ca": str(certificate.authority)}) as gateway,
    ):
        assert (await gateway.ask(chat_request())).status == 502
        assert engine.statistics().requests == 0


async def test_a_certificate_that_has_expired_is_not_believed(tmp_path: Path) -> None:
    authority = trustme.CA()
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    yesterday = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
    authority.issue_cert("127.0.0.1", not_after=yesterday).configure_cert(server)
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    async with (
        open_engine(tls=server) as engine,
        serving(engine, worker={"ca": str(tmp_path / "ca.pem")}) as gateway,
    ):
        assert (await gateway.ask(chat_request())).status == 502
        assert engine.statistics().requests == 0


async def test_plain_text_is_no_tls_and_tls_is_no_plain_text(tmp_path: Path) -> None:
    certificate = make_certificate(tmp_path)
    async with (
        open_engine() as plain,
        open_engine(tls=certificate.server) as secure,
        serving(
            plain.url.replace("http://", "https://"),
            secure.url.replace("https://", "http://"),
            deadlines={"connect": 1},
            models=[{"id": "m1", "workers": ["w1"]}, {"id": "m2", "workers": ["w2"]}],
        ) as gateway,
    ):
        for model in ("m1", "m2"):
            assert (await gateway.ask(chat_request(model=model))).status == 502
        assert (plain.statistics().requests, secure.statistics().requests) == (0, 0)


async def test_a_handshake_that_takes_too_long_is_given_up() -> None:
    async with trio.open_nursery() as nursery:
        silent = await nursery.start(trio.serve_tcp, accept_and_wait, 0)
        port = silent[0].socket.getsockname()[1]
        async with serving(f"https://127.0.0.1:{port}", deadlines={"connect": 0.1}) as gateway:
            answer = await gateway.ask(chat_request())
            assert (answer.status, error_code(answer)) == (502, "engine_failed")
        nursery.cancel_scope.cancel()


async def accept_and_wait(stream: trio.SocketStream) -> None:
    async with stream:
        while await stream.receive_some():
            pass


@pytest.mark.parametrize("how", ["stream", "cut", "leave"])
async def test_streams_behind_tls_end_in_all_ways(how: str, tmp_path: Path) -> None:
    certificate = make_certificate(tmp_path)
    begun = chat_stream("one", finish=None, done=False, end=False)
    scripts = {"stream": chat_stream("one"), "cut": (*begun, CloseFin()), "leave": (*begun, Hold())}
    async with (
        open_engine(scripts[how], tls=certificate.server) as engine,
        serving(engine, worker={"ca": str(certificate.authority)}) as gateway,
    ):
        with trio.fail_after(10), await gateway.connect() as client:
            await client.send(chat_request())
            await client.read_events(2)
            if how == "leave":
                client.leave_reset()
                await engine.requests[0].closed.wait()
            else:
                reading = (await client.read_to_end()).chat()
                assert (reading.text, reading.done, len(reading.errors)) == (
                    "one",
                    how == "stream",
                    how == "cut",
                )
        outcomes = {"stream": "completed", "cut": "upstream_failed", "leave": "client_gone"}
        assert (await gateway.settled()).outcome == outcomes[how]


async def test_an_engine_behind_a_unix_socket_is_called_localhost(tmp_path: Path) -> None:
    async with open_engine(socket_path=tmp_path / "e.sock") as engine, serving(engine) as gateway:
        for stream in (True, False):
            assert (await gateway.ask(chat_request(stream=stream))).status == 200
        assert engine.requests[0].header("host") == "localhost"
        assert [request.connection for request in engine.requests] == [1, 1]


@pytest.mark.parametrize(
    ("path", "target"),
    [
        ("", "/v1/chat/completions"),
        ("/", "/v1/chat/completions"),
        ("/v1", "/v1/chat/completions"),
        ("/v1/", "/v1/chat/completions"),
        ("/llm", "/llm/v1/chat/completions"),
        ("/llm/v1", "/llm/v1/chat/completions"),
        ("/a/b/", "/a/b/v1/chat/completions"),
    ],
)
async def test_a_path_in_the_address_stands_before_the_engines_own(path: str, target: str) -> None:
    async with open_engine() as engine, serving(engine.url + path) as gateway:
        assert (await gateway.ask(chat_request())).status == 200
        assert engine.requests[0].target == target
        await gateway.expect_nothing_left()


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
async def test_an_address_of_ipv6_has_brackets_in_its_host() -> None:
    hosts: list[bytes] = []

    async def answer(stream: trio.SocketStream) -> None:
        async with stream:
            head = bytearray()
            while b"\r\n\r\n" not in head:
                head += await stream.receive_some()
            lines = bytes(head).lower().split(b"\r\n")
            hosts.extend(line for line in lines if line.startswith(b"host:"))
            await stream.send_all(b"HTTP/1.1 500 no\r\ncontent-length: 0\r\n\r\n")

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, answer, 0, host="::1"))
        port = listeners[0].socket.getsockname()[1]
        async with serving(f"http://[::1]:{port}") as gateway:
            assert (await gateway.ask(chat_request())).status == 502
        assert hosts == [b"host: [::1]:%d" % port]
        nursery.cancel_scope.cancel()
