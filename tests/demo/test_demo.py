"""The demo answers, and whatever happens to it, its children are gone afterwards."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest
import trio

from trio_gateway.config import parse_settings
from trio_gateway.demo._demo import run_demo
from trio_gateway.demo._ending import Cause, DemoError, Ending
from trio_gateway.demo._fetch import fetch
from trio_gateway.demo._fleet import Answered, SimulatedFleet
from trio_gateway.demo._processes import (
    JOINING_FILE,
    USUAL_PORT,
    Ports,
    _start,
    choose_ports,
    gateway_command,
    gateway_config,
)
from trio_gateway.demo._question import SIMULATED_TOKENS, ask, ask_simulated
from trio_gateway.demo._screen import Screen
from trio_gateway.testing import (
    EndChunks,
    WaitFor,
    chat_stream,
    error_answer,
    error_event,
    missing_parts,
    open_engine,
)

needs_engine = pytest.mark.skipif(missing_parts() is not None, reason=str(missing_parts()))
PORTS: Final = Ports(18080, 19090, 19091)
DEMO: Final = (gateway_command(Path())[:-3], "demo")


# Its parts


def test_its_configuration_is_one_that_the_gateway_accepts() -> None:
    settings = parse_settings(gateway_config("http://127.0.0.1:7000", PORTS))
    assert [(worker.url, worker.kind) for worker in settings.workers] == [
        ("http://127.0.0.1:7000", "llamacpp")
    ]
    assert [(model.id, model.workers) for model in settings.models] == [("smollm2", ("local",))]
    assert [bind.port for bind in (*settings.server.bind, *settings.admin.bind)] == [18080, 19090]
    assert settings.internal.bind == ()


def test_with_workers_its_configuration_lets_them_register(tmp_path: Path) -> None:
    (tmp_path / JOINING_FILE).write_text("0123456789abcdef")
    config = gateway_config("http://127.0.0.1:7000", PORTS, registering=True)
    settings = parse_settings(config, folder=tmp_path)
    assert [bind.port for bind in settings.internal.bind] == [19091]
    assert [(model.id, model.workers) for model in settings.models] == [
        ("smollm2", ("local",)),
        ("simulated", ("simulated",)),
    ]


def test_a_port_that_is_taken_is_not_chosen() -> None:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", USUAL_PORT))
            sock.listen()
        except OSError:
            pass  # taken by somebody else, which serves as well
        ports = choose_ports()
    assert ports.public != USUAL_PORT
    assert len({ports.public, ports.admin, ports.internal, 0}) == 4


def test_the_first_cause_counts() -> None:
    ending = Ending()
    ending.end(Cause(3, "first"))
    ending.end(Cause(4, "second"))
    assert ending.cause == Cause(3, "first")
    assert ending.scope.cancel_called


@pytest.mark.parametrize(
    ("number", "answered", "status"),
    [
        (signal.SIGINT, True, 0),
        (signal.SIGINT, False, 130),
        (signal.SIGTERM, True, 143),
        (signal.SIGTERM, False, 143),
    ],
)
async def test_only_ctrl_c_after_the_answer_is_a_good_end(number: int, answered: bool, status: int) -> None:
    ending = Ending()
    ending.answered = answered
    send, receive = trio.open_memory_channel[int](1)
    send.send_nowait(number)
    send.close()
    await ending.watch(receive)
    assert ending.cause == Cause(status)


async def test_a_child_that_ends_by_itself_ends_the_demo_with_its_last_words(tmp_path: Path) -> None:
    ending = Ending()
    script = "import sys; sys.stderr.write('last words'); sys.exit(3)"
    with ending.scope:
        async with trio.open_nursery() as nursery:
            await _start(nursery, "it", [sys.executable, "-c", script], tmp_path / "log", ending, piped=False)
            await trio.sleep_forever()
    assert ending.cause == Cause(1, "it ended by itself (with status 3)", "last words")


async def test_a_child_that_the_demo_itself_killed_does_not_end_it(tmp_path: Path) -> None:
    ending = Ending()
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    async with trio.open_nursery() as nursery:
        process = await _start(nursery, "it", command, tmp_path / "log", ending, piped=False)
        ending.killed.add(process)
        process.kill()
        with trio.fail_after(10):
            await process.wait()
    assert process.returncode == -signal.SIGKILL
    assert ending.cause is None


async def test_a_child_ends_with_the_nursery_that_owns_it(tmp_path: Path) -> None:
    ending = Ending()
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    async with trio.open_nursery() as nursery:
        process = await _start(nursery, "it", command, tmp_path / "log", ending, piped=False)
        nursery.cancel_scope.cancel()
    assert process.returncode == -signal.SIGTERM
    assert ending.cause is None


async def test_the_engine_is_ended_after_the_gateway(tmp_path: Path) -> None:
    """Else whoever still streams is told that the engine failed."""
    ending = Ending()
    told = tmp_path / "told"
    script = """
import signal, sys, time
def end(*_):
    time.sleep(float(sys.argv[3]))
    print(sys.argv[2], file=open(sys.argv[1], "a"))
    sys.exit()
signal.signal(signal.SIGTERM, end)
print(flush=True)
while True:
    signal.pause()
"""
    log = tmp_path / "log"
    async with trio.open_nursery() as nursery:

        async def start(name: str, seconds: str, *, last: bool) -> trio.Process:
            command = [sys.executable, "-c", script, str(told), name, seconds]
            process = await _start(nursery, name, command, log, ending, piped=True, last=last)
            assert process.stdout is not None
            await process.stdout.receive_some(1)
            return process

        await start("engine", "0", last=True)
        ending.before_engine.append(await start("gateway", "0.3", last=False))
        nursery.cancel_scope.cancel()
    assert told.read_text().split() == ["gateway", "engine"]


async def test_nothing_is_shown_of_a_question_that_was_given_up() -> None:
    shown: list[str] = []
    go = trio.Event()
    stream = chat_stream("Because", " of", " air.")
    async with open_engine((*stream[:3], WaitFor(go), *stream[3:])) as engine:
        with trio.CancelScope() as scope:

            def show(text: str) -> None:
                shown.append(text)
                if text == "Because":
                    trio.from_thread.run_sync(scope.cancel)

            await ask(engine.url, show)
        assert scope.cancelled_caught
        go.set()
        with trio.fail_after(10):
            await engine.wait_disconnected()  # the thread has hung up
    assert "".join(shown) == "Because"


async def test_the_sdk_shows_the_answer_token_by_token() -> None:
    shown: list[str] = []
    async with open_engine(chat_stream("Because", " of", " air.")) as engine:
        await ask(engine.url, shown.append)
    assert [text for text in shown if text] == ["Because", " of", " air."]


async def test_a_refused_or_cut_question_is_an_error_of_the_demo() -> None:
    cut = chat_stream("Bec", finish=None, done=False, end=False)
    async with open_engine(error_answer(503, "no room"), cut) as engine:
        with pytest.raises(DemoError, match="no room"):
            await ask(engine.url, lambda _: None)
        with pytest.raises(DemoError, match="no whole answer"):
            await ask(engine.url, lambda _: trio.from_thread.run_sync(engine.close_connections))


async def test_of_a_simulated_answer_that_was_cut_it_is_known_what_the_client_was_told() -> None:
    error = error_event("the engine's answer was cut")
    cut = chat_stream("Bec", finish=None, done=False, end=False)
    async with open_engine(chat_stream("all", " of", " it"), (*cut, error, EndChunks())) as engine:
        assert (await ask_simulated(engine.url, 1))[1] == ""
        assert (await ask_simulated(engine.url, 2))[1] == "the engine's answer was cut"
        assert [request.json()["max_tokens"] for request in engine.requests] == [SIMULATED_TOKENS] * 2


async def test_only_a_killed_worker_may_have_cut_an_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = Answered("sim-1", 40, 1, "")
    again = Answered("sim-2", 40, 2, "")
    cut = Answered("sim-3", 12, 1, "it was cut")
    async with trio.open_nursery() as nursery:
        fleet = SimulatedFleet(nursery, Ending(), tmp_path, PORTS, Screen())
        fleet._tell([cut, whole, again], "sim-3")
        assert capsys.readouterr().out.splitlines() == [
            "sim-1: whole, 40 tokens",
            "sim-2: whole at the second try, 40 tokens",
            "sim-3: cut after 12 tokens, and the client was told: it was cut",
        ]
        for killed in (None, "sim-1"):
            with pytest.raises(DemoError, match="sim-3: cut"):
                fleet._tell([whole, cut], killed)
        with pytest.raises(DemoError, match="refused"):
            fleet._tell([whole, DemoError("refused")], "sim-3")


async def test_a_page_that_nobody_serves_is_an_os_error() -> None:
    async with open_engine() as engine:
        assert json.loads(await fetch(f"{engine.url}/health")) == {"status": "ok"}
        with pytest.raises(OSError, match="404"):
            await fetch(f"{engine.url}/readyz")


def test_without_the_engine_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert run_demo(once=True) == 1
    assert "pip install" in capsys.readouterr().err


# The whole of it


@contextmanager
def running_demo(*options: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*DEMO[0], DEMO[1], *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    with process:
        try:
            yield process
        finally:
            process.terminate()  # not killed: it has children to end


def read_until(process: subprocess.Popen[str], marker: str) -> str:
    assert process.stdout is not None
    text = ""
    while marker not in text:
        line = process.stdout.readline()
        assert line, text
        text += line
    return text


def children_of(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return sorted(found)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.engine
@pytest.mark.slow
@needs_engine
def test_it_shows_an_answer_and_its_record_and_ends_well() -> None:
    with running_demo("--once") as process:
        output, _ = process.communicate(timeout=100)
    assert process.returncode == 0, output
    question, _, rest = output.partition("What the gateway wrote down about it")
    answer = question.partition("in two sentences.\n")[2]
    record = json.loads(rest)
    assert len(answer.split()) > 5
    assert (record["outcome"], record["model"], record["worker"]) == ("completed", "smollm2", "local")
    assert record["tokens_delivered"] == record["tokens_generated"] > 5


@pytest.mark.engine
@pytest.mark.slow
@needs_engine
def test_with_workers_it_shows_that_a_killed_one_is_done_without() -> None:
    with running_demo("--once", "--workers", "2") as process:
        output, _ = process.communicate(timeout=100)
    assert process.returncode == 0, output
    _, _, rest = output.partition("and a worker is killed\n")
    during, _, after = rest.partition(" more, while ")
    killed = after[: len("sim-1")]
    assert len(during.splitlines()) == 6, output  # with the blank line and the number of the next
    assert [line for line in during.splitlines() if line.startswith(f"{killed}: cut after")]
    others = [line for line in during.splitlines() if line.startswith("sim-") and killed not in line]
    assert all(": whole" in line for line in others)
    assert after.count(": whole, 40 tokens") == 4
    assert f"{killed} has registered again" in after


@pytest.mark.engine
@pytest.mark.slow
@needs_engine
@pytest.mark.parametrize(
    ("number", "moment", "status"),
    [
        (signal.SIGTERM, "llama.cpp serves it", 143),
        (signal.SIGINT, "The OpenAI SDK asks", 130),
        (signal.SIGINT, "Ctrl-C", 0),
        (signal.SIGTERM, "Ctrl-C", 143),
    ],
)
def test_a_signal_ends_it_and_its_children_at_any_moment(number: int, moment: str, status: int) -> None:
    with running_demo() as process:
        read_until(process, moment)
        children = children_of(process.pid)
        process.send_signal(number)
        output, _ = process.communicate(timeout=30)
    assert process.returncode == status, output
    assert children
    assert not [child for child in children if is_alive(child)]


@pytest.mark.engine
@pytest.mark.slow
@needs_engine
def test_whoever_streams_when_it_ends_is_not_told_that_the_engine_failed() -> None:
    with running_demo() as process:
        output = read_until(process, "Ctrl-C")
        line = next(line for line in output.splitlines() if line.startswith("curl -N"))
        _, _, url, _, header, _, data = shlex.split(line)
        body = json.dumps({**json.loads(data), "max_tokens": 1500})
        request = urllib.request.Request(url, body.encode())
        request.add_header(*header.split(": "))
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.read(300)
            process.send_signal(signal.SIGINT)
            rest = answer.read().decode()
        process.communicate(timeout=30)
    assert process.returncode == 0
    assert "upstream_failed" not in rest
    assert rest.endswith("data: [DONE]\n\n") or "gateway_shutdown" in rest


@pytest.mark.engine
@pytest.mark.slow
@needs_engine
@pytest.mark.parametrize(("victim", "name"), [(0, "the engine"), (1, "the gateway")])
def test_a_child_that_dies_ends_it_with_an_error(victim: int, name: str) -> None:
    with running_demo() as process:
        read_until(process, "Ctrl-C")
        children = children_of(process.pid)
        os.kill(children[victim], signal.SIGKILL)
        output, _ = process.communicate(timeout=30)
    assert process.returncode == 1
    assert f"error: {name} ended by itself (by signal 9)" in output
    assert not [child for child in children if is_alive(child)]


@pytest.mark.engine
@pytest.mark.slow
@needs_engine
def test_the_engine_does_not_outlive_a_demo_that_was_killed() -> None:
    with running_demo() as process:
        read_until(process, "Ctrl-C")
        engine, gateway = children_of(process.pid)
        process.kill()
    os.kill(gateway, signal.SIGTERM)  # nobody else does now
    while is_alive(engine):  # it notices by itself that its standard input has ended
        time.sleep(0.02)


@pytest.mark.engine
@pytest.mark.slow
@needs_engine
def test_the_curl_command_that_it_shows_works() -> None:
    with running_demo() as process:
        output = read_until(process, "Ctrl-C")
        line = next(line for line in output.splitlines() if line.startswith("curl -N"))
        _, _, url, _, header, _, data = shlex.split(line)
        request = urllib.request.Request(url, json.dumps({**json.loads(data), "max_tokens": 5}).encode())
        request.add_header(*header.split(": "))
        with urllib.request.urlopen(request, timeout=60) as answer:
            shown = answer.read().decode()
    assert shown.endswith("data: [DONE]\n\n")
