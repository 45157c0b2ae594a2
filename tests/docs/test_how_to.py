"""What the how-to guides tell to write down can be used as it stands."""

from __future__ import annotations

import ast
import configparser
import dataclasses
import functools
import json
import os
import re
import shlex
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import trio
import trustme
import typer

from bench.command import SCENARIOS
from tests.docs.pages import DOCS, assigned, blocks, page, table, words
from tests.e2e.serving import serving
from trio_gateway.cli import app
from trio_gateway.config import Settings, parse_settings
from trio_gateway.ledger import Record
from trio_gateway.testing import (
    Hold,
    WaitFor,
    chat_request,
    chat_stream,
    make_certificate,
    open_engine,
)

# Any: see test_commands.
WORKER: Final[Any] = typer.main.get_command(app).commands["worker"]  # type: ignore[attr-defined]
GUIDES: Final = sorted(path.name for path in (DOCS / "how-to").glob("*.md") if path.name != "README.md")
WITH_SETTINGS: Final = [name for name in GUIDES if blocks(page(f"how-to/{name}"), "toml")]
PEM: Final = re.compile(r'\bca = "(.*?)"')
SERVED: Final = re.compile(r'certificate = "(.*?)\.pem"')
KEY_FILE: Final = re.compile(r'^(?:api_key|join_token)_file = "(.*)"$', re.MULTILINE)


def settings_of(block: str, folder: Path) -> Settings:
    """Read an example, with the files that it names made first and its placeholder filled in."""
    for name in KEY_FILE.findall(block):
        (folder / name).write_text("sk-test-of-some-length\n")
    for name in PEM.findall(block):
        shutil.copy(make_certificate(folder, "gpu-7.internal").authority, folder / name)
    for name in SERVED.findall(block):
        certify(folder, name)
    block = re.sub(r"sha256:<[^>]*>", "sha256:" + "0" * 64, block)
    return parse_settings(block, folder=folder)


# Configuration --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in WITH_SETTINGS if name != "configure.md"])
def test_every_configuration_of_a_guide_is_accepted(name: str, tmp_path: Path) -> None:
    for block in blocks(page(f"how-to/{name}"), "toml"):
        settings_of(block, tmp_path)


@pytest.mark.parametrize(
    ("name", "kind", "flag"),
    [
        ("vllm.md", "vllm", "--max-num-seqs"),
        ("sglang.md", "sglang", "--max-running-requests"),
        ("llama-cpp.md", "llamacpp", "--parallel"),
    ],
)
def test_the_slots_of_a_worker_are_those_that_its_engine_is_started_with(
    name: str, kind: str, flag: str, tmp_path: Path
) -> None:
    text = page(f"how-to/{name}")
    arguments = shlex.split(blocks(text, "console")[0].replace("\\\n", " "))
    slots = int(arguments[arguments.index(flag) + 1])
    port = arguments[arguments.index("--port") + 1]
    for block in blocks(text, "toml"):
        (worker,) = settings_of(block, tmp_path).workers
        assert (worker.kind, worker.slots) == (kind, slots)
        assert worker.url.endswith(f":{port}")


# Shutting down --------------------------------------------------------------------------------------------


def shutdown_defaults() -> dict[str, float]:
    return {key: float(value) for key, value in Settings().shutdown}


def test_the_phases_of_a_shutdown_stand_with_their_defaults() -> None:
    told = " ".join(row["How long"] for row in table("how-to/shut-down.md", "What happens"))
    for key, default in shutdown_defaults().items():
        assert f"`shutdown.{key}` [{default:g}]" in told


def test_whoever_stops_the_process_waits_longer_than_its_hard_limit() -> None:
    limit = shutdown_defaults()["hard_limit"]
    patterns = (
        r"TimeoutStopSec=(\d+)",
        r"stop --time (\d+)",
        r"terminationGracePeriodSeconds: (\d+)",
    )
    for guide in ("shut-down.md", "container.md"):
        found = [int(n) for pattern in patterns for n in re.findall(pattern, page(f"how-to/{guide}"))]
        assert found
        assert min(found) > limit


def test_the_example_of_a_longer_grace_fits_into_its_hard_limit(tmp_path: Path) -> None:
    (block,) = blocks(page("how-to/shut-down.md"), "toml")
    shutdown = settings_of(block, tmp_path).shutdown
    assert shutdown.readiness_delay + shutdown.grace < shutdown.hard_limit


def unit_file(guide: str = "shut-down.md") -> str:
    (unit,) = blocks(page(f"how-to/{guide}"), "ini")
    return unit


def settings_of_unit(guide: str) -> configparser.SectionProxy:
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string(unit_file(guide))
    return unit["Service"]


def test_the_unit_allows_the_descriptors_that_the_default_connections_need() -> None:
    assert int(settings_of_unit("shut-down.md")["LimitNOFILE"]) > 2 * Settings().limits.connections


@pytest.mark.parametrize("guide", ["shut-down.md", "rolling-restart.md"])
def test_systemd_accepts_the_unit(guide: str, tmp_path: Path) -> None:
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("systemd-analyze is not installed")
    path = tmp_path / "trio-gateway.service"
    unit = re.sub(r"^ExecStart=\S+", f"ExecStart={sys.executable}", unit_file(guide), flags=re.MULTILINE)
    path.write_text(unit)
    done = subprocess.run([tool, "verify", str(path)], capture_output=True, text=True, check=False)
    complaints = [line for line in done.stderr.splitlines() if path.name in line]
    assert not complaints


# Restarting workers ---------------------------------------------------------------------------------------

RESTART: Final = "rolling-restart.md"


def test_the_agent_of_the_unit_can_be_started_and_may_end_in_its_own_time() -> None:
    service = settings_of_unit(RESTART)
    arguments = shlex.split(service["ExecStart"])
    grace = float(arguments[arguments.index("--grace") + 1])
    last_calls = float(ast.literal_eval(assigned("agent/_agent.py", "LAST_CALLS")))
    assert int(service["TimeoutStopSec"]) >= grace + 4 * last_calls
    options = {option for param in WORKER.params for option in param.opts}
    assert {word for word in arguments if word.startswith("--")} <= options
    assert {param.opts[0] for param in WORKER.params if param.required} <= set(arguments)


async def test_the_guide_waits_until_the_worker_takes_work(tmp_path: Path) -> None:
    tool = shutil.which("jq")
    if tool is None:
        pytest.skip("jq is not installed")
    loop, *_ = blocks(page(f"how-to/{RESTART}"), "console")
    (query,) = re.findall(r"jq -e --arg name \"\$name\" '(.*?)'", loop)
    async with open_engine() as engine, serving(engine) as gateway:
        statistics = gateway.gateway.statistics()

    async def ready(name: str, **changes: object) -> bool:
        told = {**statistics, "workers": [{**worker, **changes} for worker in statistics["workers"]]}
        ran = await trio.run_process(
            [tool, "-e", "--arg", "name", name, query],
            stdin=json.dumps(told).encode(),
            capture_stdout=True,
            check=False,
        )
        return ran.returncode == 0

    assert await ready("w1")
    assert not await ready("w2")
    assert not await ready("w1", ready=False)
    assert not await ready("w1", state="starting")


# Watching -------------------------------------------------------------------------------------------------


def test_every_metric_that_a_guide_names_exists() -> None:
    rows = table("reference/metrics.md", "Metrics")
    known = {row["Metric"].strip("`") for row in rows}
    known |= {
        row["Metric"].strip("`") + part
        for row in rows
        if row["Type"] == "histogram"
        for part in ("_bucket", "_sum", "_count")
    }
    named = {name for guide in GUIDES for name in re.findall(r"trio_gateway_\w+", page(f"how-to/{guide}"))}
    # In nginx's file it is the name of a group of servers.
    assert named - {"trio_gateway"} <= known
    assert len(named) > 5


def test_every_label_that_a_guide_names_belongs_to_its_metric() -> None:
    labels = {
        row["Metric"].strip("`"): set(words(row["Labels"]))
        for row in table("reference/metrics.md", "Metrics")
    }
    selectors = re.findall(r"(trio_gateway_\w+)\{(\w+)=", page("how-to/watch.md"))
    assert selectors
    for metric, label in selectors:
        assert label in labels[metric]


def queries() -> list[str]:
    return [
        query
        for block in blocks(page("how-to/watch.md"), "console")
        for query in re.findall(r"jq (?:-r )?'(.*?)'", block, re.DOTALL)
    ]


def test_every_field_that_a_query_of_the_log_names_is_in_a_line() -> None:
    fields = {field.name for field in dataclasses.fields(Record)} | {"at", "level", "event", "detail"}
    named = {name for query in queries() for name in re.findall(r"\.(\w+)", query)}
    assert len(named) > 5
    assert named <= fields


async def test_the_queries_of_the_log_run_on_a_real_line() -> None:
    tool = shutil.which("jq")
    if tool is None:
        pytest.skip("jq is not installed")
    async with open_engine() as engine, serving(engine) as gateway:
        await gateway.ask(chat_request())
    lines = gateway.log.getvalue()
    assert "exchange" in {json.loads(line)["event"] for line in lines.splitlines()}
    assert len(queries()) == 6
    for query in queries():
        await trio.run_process([tool, query], stdin=lines.encode(), capture_stdout=True)


# TLS ------------------------------------------------------------------------------------------------------

Secured = trio.SSLStream[trio.SocketStream]


@asynccontextmanager
async def open_nginx(folder: Path, gateway: tuple[str, int]) -> AsyncIterator[Secured]:
    """Run nginx with the guide's file for the length of the block, and connect to it by TLS.

    Only what differs from machine to machine is replaced: ports, name and certificate.
    """
    tool = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if tool is None:
        pytest.skip("nginx is not installed")
    trusted = certify(folder, "localhost")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        (folder / "nginx.conf").write_text(nginx_configuration(folder, port, gateway))
        async with trio.open_nursery() as nursery:
            # nginx takes over a socket that listens already, so there is nothing to wait for.
            run = functools.partial(
                trio.run_process,
                [tool, "-p", str(folder), "-c", str(folder / "nginx.conf")],
                env={**os.environ, "NGINX": f"{listener.fileno()};"},
                pass_fds=[listener.fileno()],
            )
            await nursery.start(run)
            stream = await trio.open_ssl_over_tcp_stream(
                "localhost", port, ssl_context=trusted, https_compatible=True
            )
            async with stream:
                yield stream
            nursery.cancel_scope.cancel()


def certify(folder: Path, name: str) -> ssl.SSLContext:
    """Write certificate and key of ``name`` beside each other, and answer what trusts them."""
    authority = trustme.CA()
    certificate = authority.issue_cert(name)
    certificate.private_key_pem.write_to_path(str(folder / f"{name}.key"))
    (folder / f"{name}.pem").write_bytes(b"".join(pem.bytes() for pem in certificate.cert_chain_pems))
    trusted = ssl.create_default_context()
    authority.configure_trust(trusted)
    return trusted


def nginx_configuration(folder: Path, port: int, gateway: tuple[str, int]) -> str:
    (site,) = blocks(page("how-to/tls.md"), "nginx")
    for ours, here in (
        ("127.0.0.1:8080", f"{gateway[0]}:{gateway[1]}"),
        ("listen 443 ", f"listen 127.0.0.1:{port} "),
        ("/etc/ssl/", f"{folder}/"),
        ("llm.example.com", "localhost"),
    ):
        assert ours in site
        site = site.replace(ours, here)
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    places = "".join(f"{kind}_temp_path {folder}/{kind};\n" for kind in kinds)
    return (
        f"daemon off;\npid {folder}/nginx.pid;\nerror_log stderr crit;\nworker_processes 1;\n"
        f"events {{}}\nhttp {{\naccess_log off;\n{places}{site}}}\n"
    )


async def read_until(stream: Secured, marker: bytes) -> None:
    seen = b""
    with trio.fail_after(10):
        while marker not in seen:
            piece = await stream.receive_some(4096)
            assert piece, seen
            seen += piece


async def test_events_pass_nginx_one_by_one_and_a_client_that_leaves_is_noticed(tmp_path: Path) -> None:
    go = trio.Event()
    first = chat_stream("first", finish=None, done=False, end=False)
    rest = chat_stream("second")[1:]
    async with (
        open_engine((*first, WaitFor(go), *rest), (*first, Hold())) as engine,
        serving(engine) as gateway,
    ):
        address = gateway.address
        assert isinstance(address, tuple)
        async with open_nginx(tmp_path, address) as stream:
            await stream.send_all(chat_request())
            await read_until(stream, b"first")  # while the engine still waits for us
            go.set()
            await read_until(stream, b"[DONE]")
            await stream.send_all(chat_request())
            await read_until(stream, b"first")
            await trio.aclose_forcefully(stream)
            assert (await gateway.settled(1)).outcome == "completed"
            assert (await gateway.settled(2)).outcome == "client_gone"


def test_every_scenario_of_the_bench_is_told_of_and_no_other() -> None:
    told = [words(row["Scenario"])[0] for row in table("how-to/benchmark.md", "Run")]
    assert sorted(told) == sorted(SCENARIOS)
