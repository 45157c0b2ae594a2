"""The way to the store: TLS, users with no more rights than they need, and what is said when it fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
import trustme

from tests.cluster.redis_server import Plain, RedisServer, needs_redis, open_server
from trio_gateway.cluster import Reply, StoreAddress, StoreLost, Turn, connect, decode_reply

pytestmark = needs_redis
RIGHTS = (
    "~{trio-gateway}*",
    *("+@connection", "+@scripting", "+@hash", "+@string", "+@sortedset", "+@keyspace", "+info", "+time"),
)


@pytest.fixture
def server() -> Iterator[RedisServer]:
    yield from open_server()


async def first_turn(address: StoreAddress) -> Reply:
    with trio.fail_after(5):
        async with connect(address) as link:
            return decode_reply(await link.turn(Turn("me", 0, 1, 1000).encode()))


async def test_a_user_with_the_documented_rights_can_take_turns(server: RedisServer) -> None:
    plain = Plain(server.port)
    plain("ACL", "SETUSER", "gate", "on", ">s3cr%t", *RIGHTS)
    plain.close()
    address = StoreAddress("127.0.0.1", server.port, user="gate", password="s3cr%t")
    assert (await first_turn(address)).members == ("me",)


async def test_the_documented_rights_are_those(server: RedisServer) -> None:
    page = Path(__file__).parents[2] / "docs" / "how-to" / "scale-replicas.md"
    assert " ".join(RIGHTS) in " ".join(page.read_text("utf-8").split())


async def test_a_wrong_password_is_told_without_being_shown(server: RedisServer) -> None:
    plain = Plain(server.port)
    plain("ACL", "SETUSER", "gate", "on", ">right", *RIGHTS)
    plain.close()
    with pytest.raises(StoreLost) as lost:
        await first_turn(StoreAddress("127.0.0.1", server.port, user="gate", password="wr0ng"))
    assert "wr0ng" not in str(lost.value)
    assert "\n" not in str(lost.value)


async def test_a_store_that_forgot_the_script_is_told_it_again(server: RedisServer) -> None:
    async with connect(StoreAddress("127.0.0.1", server.port)) as link:
        await link.turn(Turn("me", 0, 1, 1000).encode())
        plain = Plain(server.port)
        plain("SCRIPT", "FLUSH")
        plain.close()
        assert decode_reply(await link.turn(Turn("me", 1, 2, 1000).encode())).state == "joined"


async def test_a_store_that_is_not_there_is_lost(server: RedisServer) -> None:
    server.kill()
    with pytest.raises(StoreLost):
        await first_turn(StoreAddress("127.0.0.1", server.port))


async def test_the_stores_certificate_is_checked(tmp_path: Path) -> None:
    ours, others = trustme.CA(), trustme.CA()
    ours.cert_pem.write_to_path(tmp_path / "ca.pem")
    others.cert_pem.write_to_path(tmp_path / "other.pem")
    certificate = ours.issue_cert("localhost")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    with RedisServer() as plain:  # its port is free again when it ended, and the other needs one
        port = plain.port
    options = (
        "--tls-port",
        str(port),
        "--tls-auth-clients",
        "no",
        "--tls-ca-cert-file",
        str(tmp_path / "ca.pem"),
    )
    files = ("--tls-cert-file", str(tmp_path / "cert.pem"), "--tls-key-file", str(tmp_path / "key.pem"))
    with RedisServer(*options, *files):
        trusted = StoreAddress("localhost", port, tls=True, ca=str(tmp_path / "ca.pem"))
        assert (await first_turn(trusted)).state == "joined"
        for other in (
            StoreAddress("localhost", port, tls=True, ca=str(tmp_path / "other.pem")),
            StoreAddress("127.0.0.1", port, tls=True, ca=str(tmp_path / "ca.pem")),
        ):
            with pytest.raises(StoreLost) as lost:
                await first_turn(other)
            assert "certificate" in str(lost.value).lower()
