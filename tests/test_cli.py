"""The commands, as somebody types them."""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import trio
from typer.testing import CliRunner

from tests.e2e.process import COMMAND, process_serving
from tests.e2e.serving import configuration
from trio_gateway import __version__
from trio_gateway.cli import app
from trio_gateway.testing import chat_request, open_engine

GOOD = configuration("http://127.0.0.1:8000", server={"bind": ["127.0.0.1:18080"]})
BAD = '[server]\nbimd = ["127.0.0.1:0"]\n[limits]\nbody_bytes = "much"\n[websocket]\nmax_streems = 3\n'


def run(*arguments: str) -> tuple[int, str, str]:
    """Run a command inside this process; answers its exit code, output and errors."""
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.stdout, result.stderr


def write(folder: Path, text: str) -> str:
    file = folder / "gateway.toml"
    file.write_text(text, encoding="utf-8")
    return str(file)


def serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``serve`` as a process that ends by itself."""
    command = [*COMMAND, "serve", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


def test_without_a_command_it_says_what_there_is() -> None:
    code, out, err = run()
    assert code == 2
    for name in ("serve", "check-config", "demo", "version"):
        assert name in out + err


@pytest.mark.parametrize("word", ["version", "--version"])
def test_it_tells_its_version(word: str) -> None:
    assert run(word) == (0, f"{__version__}\n", "")


def test_a_good_configuration_is_explained(tmp_path: Path) -> None:
    code, out, err = run("check-config", write(tmp_path, GOOD))
    assert (code, err) == (0, "")
    assert "127.0.0.1:18080" in out
    assert "m1" in out


def test_every_problem_of_a_configuration_is_told_at_once_with_its_line(tmp_path: Path) -> None:
    code, out, err = run("check-config", write(tmp_path, BAD))
    assert (code, out) == (1, "")
    lines = err.splitlines()
    for number, word in ((2, "bind"), (4, "limits.body_bytes"), (6, "websocket")):
        assert any(f"gateway.toml:{number}:" in line and word in line for line in lines), (number, lines)


def test_values_can_be_laid_over_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path, GOOD)
    monkeypatch.setenv("TRIO_GATEWAY__LIMITS__BODY_BYTES", "a lot")
    code, _, err = run("check-config", file)
    assert code == 1
    assert "TRIO_GATEWAY__LIMITS__BODY_BYTES" in err
    code, _, err = run("check-config", file, "--set", "limits.body_bytes=1 MiB")
    assert (code, err) == (0, "")


@pytest.mark.parametrize("named", [(), ("--config",), ("-c",)])
@pytest.mark.parametrize("command", ["serve", "check-config"])
def test_a_file_that_is_not_there_is_told_and_not_a_traceback(
    command: str, named: tuple[str, ...], tmp_path: Path
) -> None:
    missing = str(tmp_path / "nothing.toml")
    code, out, err = run(command, *named, missing)
    assert code == (2 if command == "serve" else 1)
    assert out == ""
    assert "nothing.toml" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("command", ["serve", "check-config"])
def test_without_a_name_the_file_is_the_usual_one(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "trio-gateway.toml" in run(command)[2]


@pytest.mark.parametrize("command", ["serve", "check-config"])
def test_a_file_is_named_in_one_way(command: str, tmp_path: Path) -> None:
    file = write(tmp_path, GOOD)
    code, out, err = run(command, file, "--config", file)
    assert (code, out) == (2, "")
    assert "twice" in err


def test_a_new_key_is_shown_with_the_line_that_lets_it_in(tmp_path: Path) -> None:
    wanted = ("--tenant", "acme", "--id", "k1", "--expires", "90d", "--models", "a,b", "--models", "c")
    code, out, err = run("keys", "create", *wanted, "--tiers", "batch", "--requests-per-minute", "60")
    key, line = out.splitlines()
    assert (code, key[:6]) == (0, "tg_k1_")
    assert "acme" in err
    assert key not in line + err
    assert hashlib.sha256(key.encode()).hexdigest() in line
    text = f"[[tenants]]\nid = 'acme'\ntiers = ['batch']\nkeys = [{line}]\n"
    told = run("check-config", write(tmp_path, text))[1]
    assert 'models = ["a", "b", "c"], tiers = ["batch"], requests_per_minute = 60}' in told


@pytest.mark.parametrize(
    ("option", "value", "complaint"),
    [
        ("--expires", "yesterday", "trio-gateway: --expires must be days"),
        ("--expires", "2000-01-01", "trio-gateway: --expires must be in the future"),
        ("--tiers", "batch,fast", 'keys.k1.tiers[1]: must be "interactive"'),
        ("--tokens-per-minute", "0", "keys.k1.tokens_per_minute: must be greater"),
    ],
)
def test_a_key_that_the_file_would_not_take_is_not_made(option: str, value: str, complaint: str) -> None:
    code, out, err = run("keys", "create", "--tenant", "acme", "--id", "k1", option, value)
    assert (code, out) == (2, "")
    assert complaint in err


def test_serving_with_a_bad_configuration_ends_with_status_2(tmp_path: Path) -> None:
    ended = serve("--config", write(tmp_path, BAD))
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "gateway.toml:2:" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("section", ["server", "admin"])
def test_an_address_that_is_taken_ends_serving_with_status_1_and_one_line(
    section: str, tmp_path: Path
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = {"bind": [f"127.0.0.1:{other.getsockname()[1]}"]}
        file = write(tmp_path, configuration(models=[], **{section: taken}))
        ended = serve("--config", file)
    assert ended.returncode == 1
    assert len(ended.stderr.splitlines()) == 1
    assert "in use" in ended.stderr
    assert taken["bind"][0] in ended.stderr


def test_a_unix_socket_in_a_folder_that_is_not_there_ends_serving_with_status_1(tmp_path: Path) -> None:
    bind = f"unix:{tmp_path / 'nowhere' / 'gw.sock'}"
    ended = serve("--config", write(tmp_path, configuration(models=[], server={"bind": [bind]})))
    assert ended.returncode == 1
    assert bind in ended.stderr
    assert "Traceback" not in ended.stderr


def test_the_command_is_installed_under_its_name() -> None:
    script = Path(sys.executable).with_name("trio-gateway")
    if not script.exists():
        pytest.skip("the package is not installed in this environment")
    ended = subprocess.run([script, "version"], capture_output=True, text=True, timeout=30, check=True)
    assert ended.stdout == f"{__version__}\n"


async def test_serving_listens_where_the_overrides_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIO_GATEWAY__SERVER__BIND", f"unix:{tmp_path / 'gw.sock'}")
    async with open_engine() as engine, process_serving(engine, folder=tmp_path) as gateway:
        with trio.fail_after(20), await gateway.connect() as client:
            assert gateway.address == str(tmp_path / "gw.sock")
            await client.send(chat_request())
            assert (await client.read_to_end()).chat().text == "ok"


async def test_a_log_that_nobody_reads_any_more_does_not_stop_serving(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    bind = {"bind": [f"unix:{tmp_path / 'gw.sock'}"]}
    file = write(tmp_path, configuration(models=[], server=bind, shutdown={"readiness_delay": 0}))
    process = await trio.lowlevel.open_process([*COMMAND, "serve", "--config", file], stdout=writing)
    os.close(writing)
    try:
        with trio.fail_after(20):
            await trio.to_thread.run_sync(os.read, reading, 1)
            os.close(reading)
            for _ in range(3):
                stream = await trio.open_unix_socket(tmp_path / "gw.sock")
                async with stream:
                    await stream.send_all(
                        b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n{}"
                    )
                    assert (await stream.receive_some()).startswith(b"HTTP/1.1 400 ")
            process.terminate()
            assert await process.wait() == 0
    finally:
        process.kill()
        with trio.move_on_after(5, shield=True):
            await process.wait()
