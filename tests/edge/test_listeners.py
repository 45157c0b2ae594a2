"""Listening on TCP and unix sockets, and what their options are set to."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import trio

from tests.e2e.serving import has_ipv6, parse_address, serving
from trio_gateway.edge import open_listeners
from trio_gateway.testing import RawClient, chat_request, open_engine


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
async def test_a_gateway_listens_on_all_its_addresses(tmp_path: Path) -> None:
    binds = ["127.0.0.1:0", "[::1]:0", f"unix:{tmp_path / 'gw.sock'}"]
    async with open_engine() as engine, serving(engine, server={"bind": binds}) as gateway:
        tcp, tcp6, unix = gateway.gateway.addresses
        assert tcp.startswith("http://127.0.0.1:")
        assert tcp6.startswith("http://[::1]:")
        assert unix == f"unix:{tmp_path / 'gw.sock'}"
        for address in (tcp, unix):
            with trio.fail_after(10), await RawClient.connect(parse_address(address)) as client:
                await client.send(chat_request())
                assert (await client.read_to_end()).chat().text == "ok"
        host, port = "::1", int(tcp6.rpartition(":")[2])
        stream = await trio.open_tcp_stream(host, port)
        async with stream:
            await stream.send_all(b"GET /livez HTTP/1.1\r\nhost: [::1]\r\n\r\n")
            assert (await stream.receive_some()).startswith(b"HTTP/1.1 200 ")


async def test_a_socket_that_nobody_serves_any_more_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "gw.sock"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    (listener,) = await open_listeners((f"unix:{path}",))
    async with listener:
        stream = await trio.open_unix_socket(path)
        async with stream, await listener.accept():
            pass


async def test_a_socket_that_somebody_serves_is_not_taken_away(tmp_path: Path) -> None:
    path = tmp_path / "gw.sock"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        with pytest.raises(OSError, match="in use"):
            await open_listeners((f"unix:{path}",))
        assert path.is_socket()


async def test_a_file_is_never_taken_away(tmp_path: Path) -> None:
    path = tmp_path / "gw.sock"
    path.write_text("precious")
    with pytest.raises(OSError, match="in use"):
        await open_listeners((f"unix:{path}",))
    assert path.read_text() == "precious"


async def test_if_one_address_can_not_be_had_it_is_named_and_all_are_given_back() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        with pytest.raises(OSError, match=f"in use: '127.0.0.1:{taken}'"):
            await open_listeners(("127.0.0.1:0", f"127.0.0.1:{taken}"))
    assert len(os.listdir("/proc/self/fd")) == before


async def test_accepted_connections_are_bounded_and_watched_by_the_kernel() -> None:
    (listener,) = await open_listeners(("127.0.0.1:0",))
    async with listener:
        client = await trio.open_tcp_stream(*listener.socket.getsockname())
        async with client, await listener.accept() as stream:
            option = stream.socket.getsockopt
            assert option(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert [
                option(socket.IPPROTO_TCP, name)
                for name in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            ] == [15, 5, 3]
            assert option(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000
            assert option(socket.SOL_SOCKET, socket.SO_SNDBUF) <= 256 * 1024
            assert option(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
