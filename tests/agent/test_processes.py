"""An agent as its own process: how it is started, drained and killed, and with llama.cpp as its child."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import trio
from typer.testing import CliRunner

from tests.agent.authority import Authority
from tests.agent.rig import SECRET, Gateway, envelope, gateways, records, said
from trio_gateway.cli import SUPERSEDED, USAGE_ERROR, app
from trio_gateway.testing import MODEL_NAME, Answer, RawClient, missing_parts, model_file, until

COMMAND: Final = (sys.executable, "-m", "trio_gateway", "worker", "--id", "gpu-0")
START_LIMIT: Final = 30.0  # seconds; imports take one, a model another


class Process:
    """A running agent, and its log."""

    def __init__(self, process: trio.Process) -> None:
        self.process = process
        self.address = ("", 0)
        self._log = b""

    async def logged(self, event: str) -> dict[str, Any]:
        """Read the log up to a line about an event."""
        assert self.process.stdout is not None
        while True:
            *lines, self._log = self._log.split(b"\n")
            for at, line in enumerate(map(json.loads, lines)):
                if line["event"] == event:
                    self._log = b"\n".join([*lines[at + 1 :], self._log])
                    found: dict[str, Any] = line
                    return found
            data = await self.process.stdout.receive_some(4096)
            assert data, f"it ended without {event}"
            self._log += data

    async def connect(self) -> RawClient:
        return await RawClient.connect(self.address)

    async def ask(self, client: RawClient, **changes: Any) -> None:
        headers = (("authorization", f"Bearer {SECRET}"),)
        body = json.dumps(envelope(**changes)).encode()
        await client.request("POST", "/internal/v1/generate", headers=headers, body=body)

    async def generate(self, **changes: Any) -> Answer:
        with await self.connect() as client:
            await self.ask(client, **changes)
            return await client.read_to_end()


@asynccontextmanager
async def agent(folder: Path, *options: str) -> AsyncIterator[Process]:
    secret = folder / "secret"
    secret.write_text(SECRET + "\n")
    command = [*COMMAND, "--secret-file", str(secret), *options]
    with trio.fail_after(START_LIMIT * 3):
        process = await trio.lowlevel.open_process(command, stdout=subprocess.PIPE)
        try:
            worker = Process(process)
            told = await worker.logged("listening")
            host, _, port = told["address"].partition("://")[2].rpartition(":")
            worker.address = (host, int(port))
            assert (await worker.logged("engine_ready"))["models"]
            yield worker
        finally:
            if process.returncode is None:
                process.kill()
            with trio.move_on_after(START_LIMIT, shield=True):
                await process.wait()


SIMULATED: Final = ("--engine", "simulated", "--model", "m", "--slots", "2", "--simulate", "decode=100")
LONG: Final[dict[str, Any]] = {"max_tokens": 4000, "simulate": {"tokens": 4000}}


async def test_a_worker_serves_until_it_is_told_to_end(tmp_path: Path) -> None:
    async with agent(tmp_path, *SIMULATED) as worker:
        with await worker.connect() as client:
            await worker.ask(client, max_tokens=100, simulate={"tokens": 100})
            await client.read_until(b'"delta"')
            worker.process.send_signal(signal.SIGTERM)
            answer = await client.read_to_end()
            assert records(answer)[-1] == {"t": "end"}
        assert await worker.process.wait() == 0


async def test_sighup_has_certificates_read_again(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "ours")
    files = authority.issue("agent")
    options = (f"--certificate={files['certificate']}", f"--key={files['key']}", f"--ca={authority.ca}")
    async with agent(tmp_path, *SIMULATED, *options) as worker:
        worker.process.send_signal(signal.SIGHUP)
        told = await worker.logged("certificates_read")
        assert files["certificate"] in told["files"]
        worker.process.send_signal(signal.SIGTERM)
        assert await worker.process.wait() == 0


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--certificate={a}",), "a certificate and its key are given together"),
        (("--certificate={a}", "--key={b_key}"), "--certificate, --key, --ca: key values mismatch"),
        (("--certificate={a}", "--key=/nowhere"), "No such file or directory: '/nowhere'"),
        (("--ca={a_key}",), "--certificate, --key, --ca: no certificate or crl found"),
    ],
)
def test_certificates_that_can_not_be_used_are_told_at_the_start(
    tmp_path: Path, options: tuple[str, ...], complaint: str
) -> None:
    authority = Authority(tmp_path, "ours")
    one, other = authority.issue("one"), authority.issue("other")
    names = {"a": one["certificate"], "a_key": one["key"], "b_key": other["key"]}
    (tmp_path / "secret").write_text(SECRET)
    command = ["worker", "--id", "gpu-0", *SIMULATED, "--secret-file", str(tmp_path / "secret")]
    result = CliRunner().invoke(app, [*command, *(option.format(**names) for option in options)])
    assert result.exit_code == USAGE_ERROR
    assert complaint in result.output


async def test_a_second_signal_does_not_wait_for_what_runs(tmp_path: Path) -> None:
    async with agent(tmp_path, *SIMULATED) as worker:
        with await worker.connect() as client:
            await worker.ask(client, **LONG)
            await client.read_until(b'"delta"')
            worker.process.send_signal(signal.SIGINT)
            # It has taken the first one when it turns new work away.
            while (await worker.generate(request_id="b", max_tokens=1)).status == 200:
                pass
            worker.process.send_signal(signal.SIGTERM)
            await client.read_closed()
            assert client.answers[0].was_cut
        assert await worker.process.wait() == 0


async def test_a_worker_that_is_killed_cuts_its_answers(tmp_path: Path) -> None:
    async with agent(tmp_path, *SIMULATED) as worker:
        with await worker.connect() as client:
            await worker.ask(client, **LONG)
            await client.read_until(b'"delta"')
            worker.process.kill()
            await client.read_closed()
            assert client.answers[0].was_cut
        await worker.process.wait()
        with pytest.raises(OSError, match="refused"):
            await worker.connect()


async def test_an_old_incarnation_ends_with_a_status_of_its_own(tmp_path: Path) -> None:
    gateway = Gateway()
    token = tmp_path / "token"
    token.write_text("join-me")
    async with gateways(gateway):
        joining = ("--gateway", gateway.address, "--join-token-file", str(token))
        async with agent(tmp_path, *SIMULATED, *joining) as worker:
            await until(lambda: bool(gateway.named("PUT")))
            gateway.status["PUT"] = 409
            assert await worker.process.wait() == SUPERSEDED
            assert gateway.named("DELETE") == []


@pytest.mark.engine
@pytest.mark.skipif(missing_parts() is not None, reason=str(missing_parts()))
async def test_llama_cpp_is_a_child_that_ends_with_its_agent(tmp_path: Path) -> None:
    options = (
        "--engine",
        "llamacpp",
        "--model",
        MODEL_NAME,
        "--model-file",
        str(model_file()),
        "--slots",
        "2",
    )
    async with agent(tmp_path, *options) as worker:
        answer = await worker.generate(model=MODEL_NAME, max_tokens=8)
        kinds = [record["t"] for record in records(answer)]
        assert (kinds[0], kinds[-1]) == ("accepted", "end")
        assert said(answer)
        assert {"usage", "finish"} <= set(kinds)
        (child,) = _children(worker.process.pid)
        watching = os.pidfd_open(child)
        with await worker.connect() as client:
            await worker.ask(client, request_id="b", model=MODEL_NAME, max_tokens=2000, ignore_eos=True)
            await client.read_until(b'"delta"')
            worker.process.kill()
        await worker.process.wait()
        await trio.lowlevel.wait_readable(watching)  # the child has ended
        os.close(watching)


@pytest.mark.engine
@pytest.mark.skipif(missing_parts() is not None, reason=str(missing_parts()))
async def test_an_agent_ends_when_its_engine_does(tmp_path: Path) -> None:
    options = ("--engine", "llamacpp", "--model", MODEL_NAME, "--model-file", str(model_file()))
    async with agent(tmp_path, *options) as worker:
        (child,) = _children(worker.process.pid)
        os.kill(child, signal.SIGKILL)
        assert await worker.process.wait() == 1


def _children(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == pid:
                found.append(int(entry.name))
    return found


# What can not start -----------------------------------------------------------------------------------------


def refused(*options: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["worker", *options])
    return result.exit_code, result.stderr


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--id", "a"), "name a gateway"),
        (("--id", "a/b", "--secret-file", "{secret}"), "an id has"),
        (("--id", "a", "--gateway", "http://127.0.0.1:1"), "join token"),
        (("--id", "a", "--gateway", "x", "--join-token-file", "{secret}"), "no URL of a gateway"),
        (("--id", "a", "--secret-file", "{missing}"), "No such file"),
        (("--id", "a", "--secret-file", "{empty}"), "one secret"),
        (("--id", "a", "--secret-file", "{secret}", "--bind", "nowhere"), "host:port"),
        (("--id", "a", "--secret-file", "{secret}", "--simulate", "decode"), "has no value"),
        (("--id", "a", "--secret-file", "{secret}", "--simulate", "decode=x"), "name=number"),
        (("--id", "a", "--secret-file", "{secret}", "--simulate", "speed=3"), "called speed"),
        (("--id", "a", "--secret-file", "{secret}", "--engine", "openai"), "--upstream"),
        (("--id", "a", "--secret-file", "{secret}", "--engine", "llamacpp"), "--model-file"),
        (("--id", "a", "--secret-file", "{secret}", "--engine", "magic"), "no engine magic"),
    ],
)
def test_what_can_not_start_says_why(options: tuple[str, ...], why: str, tmp_path: Path) -> None:
    files = {"secret": tmp_path / "secret", "missing": tmp_path / "missing", "empty": tmp_path / "empty"}
    files["secret"].write_text(SECRET)
    files["empty"].write_text("\n")
    given = [option.format(**files) for option in options]
    if "--engine" not in given:
        given += ["--engine", "simulated"]
    status, said = refused(*given)
    assert (status, why in said) == (USAGE_ERROR, True), said


def test_an_address_that_is_taken_says_so(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        options = ("--engine", "simulated", "--id", "a", "--secret-file", str(secret))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        status, why = refused(*options, "--bind", address)
    assert status == 1
    assert "in use" in why
    assert address in why
