"""A whole gateway whose workers are pods: found, used, drained, and lost, over real sockets."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.agent.authority import Authority
from tests.e2e.serving import serving
from trio_gateway.testing import (
    KubernetesServer,
    Script,
    WaitFor,
    chat_request,
    chat_stream,
    make_pod,
    open_engine,
    open_kubernetes,
)


@pytest.fixture
async def api() -> AsyncIterator[KubernetesServer]:
    async with open_kubernetes() as server:
        yield server


def sections(api: KubernetesServer, port: int, **more: Any) -> dict[str, Any]:
    """A gateway whose only entry stands for pods."""
    pods = {"id": "vllm", "url": f"http://engines.example:{port}", "kind": "vllm", "slots": 4}
    return {
        "workers": [{**pods, "pods": "app=vllm", "cancel_grace": 0.05}],
        "models": [{"id": "m1", "workers": ["vllm"]}],
        "kubernetes": {"api": api.url, "namespace": "models", **more},
    }


async def test_requests_go_to_pods_as_they_come_and_go(api: KubernetesServer) -> None:
    async with open_engine() as engine, serving(**sections(api, engine.port)) as gateway:
        assert (await gateway.get("/readyz")).status == 503
        api.put(make_pod("a", "127.0.0.1", annotations={"trio-gateway/slots": "7"}))
        await gateway.until(lambda: "vllm@a" in gateway.gateway.fleet.books)
        assert gateway.gateway.fleet.books["vllm@a"].slots == 7
        assert (await gateway.get("/readyz")).status == 200
        assert (await gateway.ask(chat_request())).status == 200
        assert engine.requests[0].header("host") == f"engines.example:{engine.port}"
        api.delete("a")
        await gateway.until(lambda: not gateway.gateway.fleet.books)
        answer = await gateway.ask(chat_request())
        assert answer.status == 503
    told = [line["detail"] for line in gateway.logged("worker") if line["worker"] == "vllm@a"]
    assert told == ["its pod is ready", "its pod is gone"]


async def test_a_pod_that_terminates_finishes_its_stream_and_gets_no_other(api: KubernetesServer) -> None:
    go_on = trio.Event()
    script: Script = chat_stream("hello", "world")
    held = (*script[:2], WaitFor(go_on), *script[2:])
    api.put(make_pod("a", "127.0.0.1"))
    async with open_engine(held) as engine, serving(**sections(api, engine.port)) as gateway:
        await gateway.until(lambda: "vllm@a" in gateway.gateway.fleet.books)
        with await gateway.connect() as client:
            await client.send(chat_request(stream=True))
            await gateway.until(lambda: gateway.held == 1)
            api.put(make_pod("a", "127.0.0.1", terminating=True))
            await gateway.until(lambda: gateway.gateway.fleet.books["vllm@a"].withheld == "terminating")
            assert (await gateway.get("/readyz")).status == 503
            api.delete("a")
            await gateway.until(lambda: not gateway.gateway.fleet.books)
            go_on.set()
            answer = await client.read_to_end()
        assert (answer.status, answer.chat().done) == (200, 1)
        record = await gateway.settled()
        assert (record.outcome, record.worker) == ("completed", "vllm@a")


async def test_the_api_is_verified_and_shown_the_token(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "cluster")
    files = authority.issue("api")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files["certificate"], files["key"])
    (tmp_path / "token").write_text("account")  # noqa: ASYNC240
    async with open_kubernetes(tls=context) as api, open_engine() as engine:
        api.token = "account"
        api.put(make_pod("a", "127.0.0.1"))
        access = {"token_file": str(tmp_path / "token"), "ca": authority.ca}
        async with serving(**sections(api, engine.port, **access)) as gateway:
            await gateway.until(lambda: "vllm@a" in gateway.gateway.fleet.books)
            assert (await gateway.ask(chat_request())).status == 200
        other = Authority(tmp_path, "other")
        asked = len(api.asked)
        access["ca"] = other.ca
        async with serving(**sections(api, engine.port, **access)) as gateway:
            await gateway.until(
                lambda: any("can not be followed" in line["detail"] for line in gateway.logged("worker"))
            )
        (line,) = gateway.logged("worker")
        assert "no TLS: its certificate is not accepted" in line["detail"]
        assert len(api.asked) == asked  # the token was not shown to it
