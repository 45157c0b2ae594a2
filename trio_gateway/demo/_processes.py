"""The engine, the gateway and simulated workers as child processes of the demo.

The demo's nursery owns all: cancelling it sends each child SIGTERM, and SIGKILL
five seconds later if it is still there; the turn of engine and workers comes when the
gateway has ended, so that nobody is told that they failed. A child that ends by
itself ends the demo, with the last lines of its log; one that was killed on purpose
does not.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import trio

from ..testing import MODEL_NAME, LocalEngineError, engine_command, read_announcement
from ._ending import Cause, DemoError, Ending
from ._fetch import fetch

SLOTS: Final = 4
CONTEXT_TOKENS: Final = 2048  # of each slot; the model was trained for no more than 8192 in total
LOG_TAIL_LINES: Final = 20
USUAL_PORT: Final = 8080
USUAL_ADMIN_PORT: Final = 9090
USUAL_INTERNAL_PORT: Final = 9091
ENGINE_STARTS_WITHIN: Final = 120.0  # seconds; one is usual, a cold disk takes longer
GATEWAY_STARTS_WITHIN: Final = 30.0
READY_POLL_SECONDS: Final = 0.05
ENDS_WITHIN: Final = 5.0  # seconds from SIGTERM to SIGKILL
JOINING_FILE: Final = "join-token"
SIMULATED_MODEL: Final = "simulated"
SIMULATED_LABEL: Final = "simulated"
SIMULATED_SLOTS: Final = 8
SIMULATED_SPEED: Final = 20  # tokens a second, so that there is time to watch


async def start_engine(nursery: trio.Nursery, ending: Ending, log: Path) -> str:
    """Start llama.cpp with the small model and answer its base URL once it serves.

    Its standard input stays open as long as the demo lives: the engine ends itself
    when that closes, whatever happens to the demo.

    Raises:
        DemoError: it does not start; its end, if it ended, is reported to `ending` too.
    """
    command = engine_command(slots=SLOTS, context=CONTEXT_TOKENS)
    process = await _start(nursery, "the engine", command, log, ending, piped=True, last=True)
    with trio.move_on_after(ENGINE_STARTS_WITHIN):
        return await _read_address(process)
    raise DemoError(f"the engine did not load its model within {ENGINE_STARTS_WITHIN:.0f} seconds")


async def _read_address(process: trio.Process) -> str:
    assert process.stdout is not None
    line = bytearray()
    async for data in process.stdout:
        line += data
        if b"\n" in line:
            break
    try:
        return read_announcement(bytes(line))
    except LocalEngineError as exc:
        raise DemoError(str(exc)) from exc


def program() -> list[str]:
    """The command `trio-gateway` of this very environment."""
    script = Path(sys.executable).with_name("trio-gateway")
    return [str(script)] if script.exists() else [sys.executable, "-m", "trio_gateway"]


def gateway_command(config: Path) -> list[str]:
    """The command that runs the gateway."""
    return [*program(), "serve", "--config", str(config)]


def gateway_config(engine_url: str, ports: Ports, *, registering: bool = False) -> str:
    """The gateway's configuration as TOML: one worker, one model, everything else as it comes.

    Args:
        registering: also a listener for workers that register, and the model that they have.
    """
    config = f"""\
# Written by `trio-gateway demo`.
[server]
bind = ["127.0.0.1:{ports.public}"]

[admin]
bind = ["127.0.0.1:{ports.admin}"]

[[workers]]
id = "local"
url = {json.dumps(engine_url)}
kind = "llamacpp"
slots = {SLOTS}

[[models]]
id = "{MODEL_NAME}"
workers = ["local"]

[shutdown]  # nobody waits behind a load balancer here
readiness_delay = 0
grace = 1
"""
    return config + _for_workers(ports) if registering else config


def _for_workers(ports: Ports) -> str:
    return f"""
[internal]  # where workers register
bind = ["127.0.0.1:{ports.internal}"]
join_token_file = "{JOINING_FILE}"

[[models]]
id = "{SIMULATED_MODEL}"
workers = ["{SIMULATED_LABEL}"]  # all that have this label
"""


async def start_gateway(nursery: trio.Nursery, ending: Ending, config: Path, log: Path) -> None:
    """Start the gateway; it need not be ready yet when this returns."""
    process = await _start(nursery, "the gateway", gateway_command(config), log, ending, piped=False)
    ending.before_engine.append(process)


async def start_worker(
    nursery: trio.Nursery, ending: Ending, worker_id: str, folder: Path, ports: Ports
) -> trio.Process:
    """Start a worker with a simulated engine; it need not be registered yet when this returns."""
    command = [*program(), "worker", "--engine", "simulated", "--simulate", f"decode={SIMULATED_SPEED}"]
    command += ["--id", worker_id, "--model", SIMULATED_MODEL, "--slots", str(SIMULATED_SLOTS)]
    command += ["--label", SIMULATED_LABEL, "--gateway", f"http://127.0.0.1:{ports.internal}"]
    command += ["--join-token-file", str(folder / JOINING_FILE)]
    log = folder / f"{worker_id}.log"
    return await _start(nursery, f"the worker {worker_id}", command, log, ending, piped=False, last=True)


async def wait_ready(url: str) -> None:
    """Ask ``/readyz`` until it says yes.

    Raises:
        DemoError: that takes longer than it may.
    """
    with trio.move_on_after(GATEWAY_STARTS_WITHIN):
        while True:
            with suppress(OSError):  # refused, or a status that urllib takes for an error
                await fetch(f"{url}/readyz")
                return
            await trio.sleep(READY_POLL_SECONDS)
    raise DemoError(f"the gateway was not ready within {GATEWAY_STARTS_WITHIN:.0f} seconds")


@dataclass(frozen=True, slots=True)
class Ports:
    """Where the gateway listens: for clients, for operators, for workers."""

    public: int
    admin: int
    internal: int


def choose_ports() -> Ports:
    """Choose the gateway's ports: the usual ones if they are free."""
    with socket.socket() as public, socket.socket() as admin, socket.socket() as internal:
        return Ports(
            _take_port(public, USUAL_PORT),
            _take_port(admin, USUAL_ADMIN_PORT),
            _take_port(internal, USUAL_INTERNAL_PORT),
        )


def _take_port(sock: socket.socket, wanted: int) -> int:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(("127.0.0.1", wanted))
    except OSError:
        sock.bind(("127.0.0.1", 0))
    port: int = sock.getsockname()[1]
    return port


async def _start(
    nursery: trio.Nursery,
    name: str,
    command: Sequence[str],
    log: Path,
    ending: Ending,
    *,
    piped: bool,
    last: bool = False,
) -> trio.Process:
    """Start a child that lives as long as the nursery; its end before that ends the demo.

    Args:
        last: it is ended when all of `Ending.before_engine` have.
    """
    async with await trio.open_file(log, "wb") as sink:
        process: trio.Process = await nursery.start(
            partial(
                trio.run_process,
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if piped else sink.fileno(),
                stderr=sink.fileno(),
                check=False,
                start_new_session=True,  # Ctrl-C at the terminal is for the demo alone
                deliver_cancel=partial(_end, before=ending.before_engine if last else ()),
            )
        )
    nursery.start_soon(_watch, name, process, log, ending)
    return process


async def _end(process: trio.Process, before: Sequence[trio.Process]) -> None:
    """End a child. Trio calls this under a shield of its own, and cancels it when the child has ended."""
    with trio.move_on_after(2 * ENDS_WITHIN):
        for other in before:
            await other.wait()
    with suppress(OSError):  # it is gone
        process.terminate()
        await trio.sleep(ENDS_WITHIN)
        process.kill()


async def _watch(name: str, process: trio.Process, log: Path, ending: Ending) -> None:
    returncode = await process.wait()
    if process in ending.killed:
        return
    text = await trio.Path(log).read_text("utf-8", "replace")
    tail = "\n".join(text.splitlines()[-LOG_TAIL_LINES:])
    ending.end(Cause(1, f"{name} ended by itself ({_how(returncode)})", tail))


def _how(returncode: int) -> str:
    return f"by signal {-returncode}" if returncode < 0 else f"with status {returncode}"
