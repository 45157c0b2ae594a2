"""Gateway and agents that verify each other: registering, requests, and certificates that change."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Final

import pytest
import trio

from tests.admin.test_workers import TOKEN, joinable
from tests.agent.authority import Authority
from tests.agent.rig import SECRET, running
from tests.e2e.serving import serving
from tests.e2e.test_fleet_agents import engine, house, registering
from trio_gateway.admin import Actor
from trio_gateway.testing import chat_request

ACTOR: Final = Actor("test", "operator", "test")


@pytest.fixture
def ours(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "ours")


@pytest.fixture
def theirs(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "theirs")


def gateway_files(authority: Authority) -> dict[str, str]:
    return {**authority.issue("gateway"), "ca": authority.ca}


def agent_files(authority: Authority) -> dict[str, str]:
    return {**authority.issue("agent"), "ca": authority.ca}


@pytest.mark.parametrize("stream", [True, False])
async def test_a_question_goes_through_two_sessions_and_back(
    ours: Authority, tmp_path: Path, stream: bool
) -> None:
    internal = {"tls": gateway_files(ours)}
    async with house(tmp_path, engine(), agent=agent_files(ours), internal=internal) as at:
        assert at.gateway.gateway.internal_addresses[0].startswith("https://")
        assert at.book().worker.url.startswith("https://")
        answer = await at.ask(stream=stream, max_tokens=5)
        assert answer.status == 200
        record = await at.gateway.settled()
        assert (record.outcome, record.worker, record.tokens_generated) == ("completed", "gpu-0", 5)
    assert at.gateway.logged("handshake_refused") == []


async def test_a_client_that_leaves_frees_the_slot_at_once_over_tls_too(
    ours: Authority, tmp_path: Path
) -> None:
    """What the agent let go of comes over the stream of events."""
    internal = {"tls": gateway_files(ours)}
    async with house(tmp_path, engine(), agent=agent_files(ours), internal=internal) as at:
        with await at.gateway.connect() as client:
            await client.send(chat_request(max_tokens=4000, simulate={"tokens": 4000}))
            await client.read_until(b"data: ")
            client.leave_reset()
        await at.gateway.returned()
        assert at.idle == {"confirmed": 1}


async def refused(
    folder: Path, internal: dict[str, Any], agent: dict[str, str]
) -> tuple[list[str], list[str]]:
    """What a gateway logs of an agent that can not register, and what the agent does."""
    async with joinable(folder, internal=internal) as gateway:
        told = registering(0, gateway, **agent)
        async with running(engine(), **told) as run:

            def reasons() -> list[str]:
                return [event["detail"] for event in run.events("gateway_unreachable")] + [
                    event["detail"] for event in run.events("not_registered")
                ]

            await gateway.until(lambda: reasons() != [])
            run.agent.drain()
            await run.over.wait()
        assert not gateway.gateway.fleet.books
    return [line["reason"] for line in gateway.logged("handshake_refused")], reasons()


async def test_an_agent_without_a_certificate_can_not_even_show_its_token(
    ours: Authority, tmp_path: Path
) -> None:
    logged, said = await refused(tmp_path, {"tls": gateway_files(ours)}, {"ca": ours.ca})
    assert set(logged) == {"it shows no certificate"}
    assert said


async def test_an_agent_for_which_another_vouches_can_not_either(
    ours: Authority, theirs: Authority, tmp_path: Path
) -> None:
    agent = {**theirs.issue("agent"), "ca": ours.ca}
    logged, _ = await refused(tmp_path, {"tls": gateway_files(ours)}, agent)
    assert all(reason.startswith("its certificate is not accepted: ") for reason in logged)
    assert logged


async def test_an_agent_does_not_give_its_token_to_a_gateway_for_which_another_vouches(
    ours: Authority, theirs: Authority, tmp_path: Path
) -> None:
    logged, said = await refused(tmp_path, {"tls": gateway_files(theirs)}, agent_files(ours))
    assert said[0].startswith("no TLS: its certificate is not accepted: ")
    assert logged[0] == "it closed the connection, as some do that do not accept our certificate"


async def test_an_agent_in_clear_text_is_told_that_it_must_not_be(ours: Authority, tmp_path: Path) -> None:
    async with joinable(tmp_path, internal={"tls": gateway_files(ours)}) as gateway:
        told = registering(0, gateway)
        registration = {
            "protocol": 1,
            "worker_id": "gpu-0",
            "incarnation": 1,
            "url": "http://127.0.0.1:1",
            "models": ["m1"],
            "slots": 1,
            "engine": {"kind": "x", "version": "1"},
            "labels": [],
        }
        import httpx  # noqa: ASYNC127

        tls = gateway.gateway.certificates.get("client", *agent_files(ours).values())
        async with httpx.AsyncClient(verify=tls.context, trust_env=False) as client:
            answer = await client.post(
                f"{told['gateways'][0]}/internal/v1/workers",
                json=registration,
                headers={"authorization": f"Bearer {TOKEN}"},
            )
        assert answer.status_code == 403
        assert "must be https" in answer.json()["error"]["message"]


async def test_both_sides_go_to_another_authority_while_they_run(
    ours: Authority, theirs: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The listener, the calls to agents, and the agent: by a reload here, by looking at files there."""
    monkeypatch.setattr("trio_gateway.flow._tls_files.LOOK_EVERY", 0.05)
    gateways, agents = gateway_files(ours), agent_files(ours)
    mine = str(tmp_path / "mine.pem")
    shutil.copy(ours.ca, mine)
    gateways["ca"] = mine
    async with house(tmp_path, engine(), agent=agents, internal={"tls": gateways}) as at:
        for kind, path in agent_files(theirs).items():
            shutil.copy(path, agents[kind])
        for kind, path in theirs.issue("gateway").items():
            shutil.copy(path, gateways[kind])
        shutil.copy(theirs.ca, mine)
        await at.gateway.until(lambda: at.agents[0].events("certificates_read") != [])
        result = await at.gateway.gateway.operations.act(ACTOR, "reload", None, {})
        assert result.after["restart"] == []
        with trio.fail_after(10):
            while (await at.ask(max_tokens=2)).status != 200:  # noqa: ASYNC110
                await trio.sleep(0.05)
        seen = len(at.agents[0].events("gateway_unreachable"))
        beats = at.book().snapshot.seq
        await at.gateway.until(lambda: at.book().snapshot.seq > beats + 2)
        assert len(at.agents[0].events("gateway_unreachable")) == seen


async def test_a_worker_of_the_file_is_shown_a_certificate_that_is_renewed(
    ours: Authority, theirs: Authority, tmp_path: Path
) -> None:
    shown = ours.issue("gateway")
    async with running(engine(), **agent_files(ours)) as run:
        (tmp_path / "secret").write_text(SECRET)  # noqa: ASYNC240
        worker = {"kind": "agent", "api_key_file": "secret", "ca": ours.ca, **shown}
        async with serving(run.agent.address, folder=tmp_path, worker=worker) as gateway:
            assert (await gateway.ask(chat_request(max_tokens=2))).status == 200
            for kind, path in theirs.issue("gateway").items():
                shutil.copy(path, shown[kind])
            await gateway.gateway.operations.act(ACTOR, "reload", None, {})
            await gateway.until(lambda: not gateway.gateway.connections.idle)
            answer = await gateway.ask(chat_request(max_tokens=2))
            assert answer.status == 502
            for kind, path in ours.issue("gateway-2").items():
                shutil.copy(path, shown[kind])
            await gateway.gateway.operations.act(ACTOR, "reload", None, {})
            with trio.fail_after(10):
                while (await gateway.ask(chat_request(max_tokens=2))).status != 200:  # noqa: ASYNC110
                    await trio.sleep(0.05)
        assert (
            "it does not accept our certificate: unknown ca" in gateway.logged("attempt_failed")[0]["detail"]
        )
