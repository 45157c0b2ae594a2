"""An agent and those who call it over TLS: who is taken, who is not and why, and files that are replaced."""

from __future__ import annotations

import datetime
import json
import os
import shutil
from pathlib import Path
from typing import Final

import pytest
import trio

from tests.agent.authority import Authority
from tests.agent.rig import SECRET, Running, envelope, running
from trio_gateway.agent.engines import Limits, SimulatedEngine
from trio_gateway.contract import Worker
from trio_gateway.errors import UpstreamFailed
from trio_gateway.fleet import DIALECTS
from trio_gateway.flow import Certificates, TlsFiles
from trio_gateway.testing import until
from trio_gateway.upstream import ask

NOW: Final = datetime.datetime.now(datetime.UTC)
DAY: Final = datetime.timedelta(days=1)


@pytest.fixture
def ours(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "ours")


@pytest.fixture
def theirs(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "theirs")


def engine() -> SimulatedEngine:
    return SimulatedEngine(("m",), limits=Limits(slots=2))


def client(ca: str, certificate: str | None = None, key: str | None = None) -> TlsFiles:
    return TlsFiles("client", certificate, key, ca)


def worker_at(run: Running, tls: TlsFiles) -> Worker:
    """How a gateway knows the agent."""
    assert run.agent.address.startswith("https://")
    port = int(run.agent.address.rpartition(":")[2])
    return Worker(
        id="gpu-0",
        url=run.agent.address,
        dialect=DIALECTS["agent"],
        host="127.0.0.1",
        port=port,
        authority=f"127.0.0.1:{port}",
        prefix="",
        slots=2,
        cancel_grace=1.0,
        tls=tls,
        api_key=SECRET,
    )


async def said_by(run: Running, tls: TlsFiles) -> str:
    """What a gateway is told when it asks the agent; ``ready`` if it is answered."""
    try:
        status, _ = await ask(worker_at(run, tls), "/readyz")
    except UpstreamFailed as exc:
        return str(exc)
    assert status == 200
    return "ready"


def reasons(run: Running) -> list[str]:
    return [event["reason"] for event in run.events("handshake_refused")]


async def test_both_sides_show_who_they_are(ours: Authority) -> None:
    async with running(engine(), **ours.issue("agent"), ca=ours.ca) as run:
        assert await said_by(run, client(ours.ca, **ours.issue("gateway"))) == "ready"
        assert reasons(run) == []


async def test_a_gateway_without_a_certificate_is_not_taken_and_told_why(ours: Authority) -> None:
    async with running(engine(), **ours.issue("agent"), ca=ours.ca) as run:
        told = await said_by(run, client(ours.ca))
        assert "it does not accept our certificate: certificate required" in told
        assert reasons(run) == ["it shows no certificate"]


async def test_a_gateway_for_which_another_vouches_is_not_taken_and_told_why(
    ours: Authority, theirs: Authority
) -> None:
    async with running(engine(), **ours.issue("agent"), ca=ours.ca) as run:
        told = await said_by(run, client(ours.ca, **theirs.issue("gateway")))
        assert "it does not accept our certificate: unknown ca" in told
        (reason,) = reasons(run)
        assert reason.startswith("its certificate is not accepted: ")


async def test_an_agent_for_which_another_vouches_is_not_believed_and_hears_it(
    ours: Authority, theirs: Authority
) -> None:
    async with running(engine(), **theirs.issue("agent"), ca=ours.ca) as run:
        told = await said_by(run, client(ours.ca, **ours.issue("gateway")))
        assert "gpu-0: no TLS: its certificate is not accepted: " in told
        await until(lambda: reasons(run) != [])
    assert len(reasons(run)) == 1


@pytest.mark.parametrize("side", ["agent", "gateway"])
async def test_a_certificate_that_has_expired_is_not_accepted(ours: Authority, side: str) -> None:
    options = {"agent": {}, "gateway": {}, side: {"not_after": NOW - DAY}}
    async with running(engine(), **ours.issue("agent", **options["agent"]), ca=ours.ca) as run:
        told = await said_by(run, client(ours.ca, **ours.issue("gateway", **options["gateway"])))
        verdict = "its certificate is not accepted: certificate has expired"
        if side == "agent":
            assert verdict in told
        else:
            assert "it does not accept our certificate: certificate expired" in told
            assert reasons(run) == [verdict]


async def test_a_certificate_for_another_name_is_not_accepted(ours: Authority) -> None:
    async with running(engine(), **ours.issue("agent", "gpu.example"), ca=ours.ca) as run:
        told = await said_by(run, client(ours.ca, **ours.issue("gateway")))
        assert "its certificate is not accepted: IP address mismatch" in told


async def test_who_speaks_in_clear_text_or_not_at_all_is_let_go(
    ours: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trio_gateway.flow._tls_files.HANDSHAKE", 0.1)
    async with running(engine(), **ours.issue("agent"), ca=ours.ca) as run:
        port = int(run.agent.address.rpartition(":")[2])
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(b"GET /readyz HTTP/1.1\r\n\r\n")
            await until(lambda: len(reasons(run)) == 1)
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            assert await stream.receive_some() == b""
        assert reasons(run) == ["it speaks HTTP without TLS", "no handshake within 0.1 s"]


async def test_without_an_authority_the_secret_is_enough(ours: Authority) -> None:
    async with running(engine(), **ours.issue("agent")) as run:
        assert await said_by(run, client(ours.ca)) == "ready"


async def test_answers_stream_over_tls_and_a_gateway_that_leaves_frees_its_slot(ours: Authority) -> None:
    async with running(engine(), **ours.issue("agent"), ca=ours.ca) as run:
        port = int(run.agent.address.rpartition(":")[2])
        context = client(ours.ca, **ours.issue("gateway")).context
        stream = await trio.open_ssl_over_tcp_stream(
            "127.0.0.1", port, ssl_context=context, https_compatible=True
        )
        faults = {"faults": [{"kind": "hang", "after": 4}]}
        body = json.dumps(envelope(simulate=faults)).encode()
        head = f"POST /internal/v1/generate HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {SECRET}\r\n"
        await stream.send_all(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
        seen = b""
        while seen.count(b'"delta"') < 4:
            seen += await stream.receive_some()
        assert len(run.agent.slots) == 1
        await trio.aclose_forcefully(stream)
        await run.agent.slots.wait_none()


# Replaced files ---------------------------------------------------------------------------------------------


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let files be looked at all the time."""
    monkeypatch.setattr("trio_gateway.flow._tls_files.LOOK_EVERY", 0.02)


def remove(path: str) -> None:
    Path(path).unlink()


def replace(old: dict[str, str], new: dict[str, str]) -> None:
    for kind, path in new.items():
        shutil.copy(path, f"{old[kind]}.new")
        Path(f"{old[kind]}.new").rename(old[kind])


async def test_files_that_are_replaced_count_without_a_restart_at_both_sides(
    ours: Authority, theirs: Authority, often: None
) -> None:
    """The whole way from one authority to another, while neither side is started again."""
    agents = {**ours.issue("agent"), "ca": ours.ca}
    gateways = ours.issue("gateway")
    shutil.copy(ours.ca, gateways["certificate"] + ".ca")
    known = Certificates()
    tls = known.get("client", gateways["certificate"], gateways["key"], gateways["certificate"] + ".ca")
    told: list[tuple[str, str]] = []
    async with running(engine(), **agents) as run:
        assert await said_by(run, tls) == "ready"
        replace(agents, {**theirs.issue("agent"), "ca": theirs.ca})
        await until(lambda: len(run.events("certificates_read")) == 1)  # once, of listener and caller
        assert "its certificate is not accepted" in await said_by(run, tls)
        replace(gateways, theirs.issue("gateway"))
        shutil.copy(theirs.ca, gateways["certificate"] + ".ca")
        await known.refresh(lambda *news: told.append(news))
        assert [done for _, done in told] == ["read again"]
        assert await said_by(run, tls) == "ready"


async def test_files_that_can_not_be_used_leave_what_was_read_before(
    ours: Authority, theirs: Authority, often: None
) -> None:
    agents = {**ours.issue("agent"), "ca": ours.ca}
    tls = client(ours.ca, **ours.issue("gateway"))
    async with running(engine(), **agents) as run:
        new = theirs.issue("agent")
        replace(agents, {"certificate": new["certificate"]})  # and not its key
        await until(lambda: run.events("certificates_kept") != [])
        assert run.events("certificates_kept")[0]["reason"] == "key values mismatch"
        assert await said_by(run, tls) == "ready"
        remove(agents["key"])
        await until(lambda: "No such file" in run.events("certificates_kept")[-1]["reason"])
        assert await said_by(run, tls) == "ready"
        replace(agents, ours.issue("agent-2"))
        await until(lambda: run.events("certificates_read") != [])
        assert await said_by(run, tls) == "ready"


async def test_files_are_read_again_when_somebody_says_so(ours: Authority, tmp_path: Path) -> None:
    known = Certificates()
    files = ours.issue("agent")
    tls = known.get("client", files["certificate"], files["key"], ours.ca)
    assert known.get("client", files["certificate"], files["key"], ours.ca) is tls
    before, told = tls.context, list[tuple[str, str]]()
    await known.refresh(lambda *news: told.append(news))
    assert (tls.context is before, told) == (True, [])
    await known.refresh(lambda *news: told.append(news), anyway=True)
    assert tls.context is not before
    assert told == [(f"{files['certificate']}, {files['key']}, {ours.ca}", "read again")]


async def test_files_on_a_disk_that_is_away_take_no_thread_of_others(
    ours: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trio_gateway.flow._tls_files.READ_LIMIT", 0.05)
    pipe = tmp_path / "pipe.pem"
    shutil.copy(ours.ca, pipe)
    known = Certificates()
    tls = known.get("client", None, None, str(pipe))
    before, told = tls.context, list[tuple[str, str]]()
    pipe.unlink()
    os.mkfifo(pipe)  # whoever opens it waits for somebody who writes
    for _ in range(2):
        await known.refresh(lambda *news: told.append(news), anyway=True)
    assert (tls.context, told) == (before, [])
    assert trio.to_thread.current_default_thread_limiter().borrowed_tokens == 0
    writer = os.open(pipe, os.O_RDWR)
    pipe.unlink()
    shutil.copy(ours.ca, pipe)
    os.close(writer)
    monkeypatch.setattr("trio_gateway.flow._tls_files.READ_LIMIT", 10.0)
    await known.refresh(lambda *news: told.append(news), anyway=True)
    assert [done for _, done in told] == ["read again"]
