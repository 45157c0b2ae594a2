"""The demo from top to bottom.

One nursery owns everything: the processes of engine, gateway and simulated workers,
and the client. However the demo ends, by its own end, Ctrl-C, SIGTERM, or because a
child died, that nursery is cancelled and all children are gone before `run_demo`
returns.
"""

from __future__ import annotations

import importlib.util
import json
import secrets
import tempfile
from pathlib import Path
from typing import Final

import trio

from ..testing import MODEL_NAME, MODEL_TITLE, missing_parts, model_file
from ._ending import STOP_SIGNALS, Cause, DemoError, Ending
from ._fleet import SimulatedFleet
from ._processes import (
    JOINING_FILE,
    Ports,
    choose_ports,
    gateway_config,
    start_engine,
    start_gateway,
    wait_ready,
)
from ._screen import Screen

# A request that fails because a child died fails a little before that death is reported, which explains it.
TELLING_CAUSE_WITHIN: Final = 0.5  # seconds


def run_demo(once: bool, workers: int = 0) -> int:
    """Show a real model answering through the gateway.

    Args:
        once: end after the answer; else stay up until Ctrl-C.
        workers: simulated ones, which register beside the real engine; one of several is killed.

    Returns:
        the exit status: 0 after an answer, 1 after a failure, 128 plus the signal's
        number where one came before the answer.
    """
    screen = Screen()
    missing = missing_parts() or _missing_sdk()
    if missing is not None:
        screen.error(missing)
        return 1
    return trio.run(_demo, once, workers, screen)


def _missing_sdk() -> str | None:
    if importlib.util.find_spec("openai") is not None:
        return None
    return "the OpenAI SDK is not installed; pip install 'trio-gateway[local]'"


async def _demo(once: bool, workers: int, screen: Screen) -> int:
    ending = Ending()
    with (
        tempfile.TemporaryDirectory(prefix="trio-gateway-demo-") as folder,
        trio.open_signal_receiver(*STOP_SIGNALS) as signals,
        ending.scope,
    ):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ending.watch, signals)
            ending.end(await _run(nursery, ending, Path(folder), once, workers, screen))
    cause = ending.cause or Cause(1, "the demo was cancelled")
    if cause.message:
        screen.error(cause.message, cause.details)
    return cause.status


async def _run(
    nursery: trio.Nursery, ending: Ending, folder: Path, once: bool, workers: int, screen: Screen
) -> Cause:
    """Everything the user sees; answers why it ended, where it ends by itself."""
    ports = choose_ports()
    url, admin_url = f"http://127.0.0.1:{ports.public}", f"http://127.0.0.1:{ports.admin}"
    fleet = SimulatedFleet(nursery, ending, folder, ports, screen)
    try:
        await _start(nursery, ending, folder, ports, screen, registering=workers > 0)
        if workers:
            await fleet.start(workers)
        await _ask(url, admin_url, screen)
        if workers:
            await fleet.show()
    except DemoError as exc:
        await trio.sleep(TELLING_CAUSE_WITHIN)
        return Cause(1, str(exc))
    ending.answered = True
    if not once:
        _explain(url, admin_url, screen)
        await trio.sleep_forever()
    return Cause(0)


async def _start(
    nursery: trio.Nursery,
    ending: Ending,
    folder: Path,
    ports: Ports,
    screen: Screen,
    *,
    registering: bool,
) -> None:
    """Start engine and gateway."""
    size = model_file().stat().st_size / 1e6
    started = trio.current_time()
    with screen.working(f"Loading {MODEL_TITLE} ({size:.0f} MB) into llama.cpp"):
        engine_url = await start_engine(nursery, ending, folder / "engine.log")
    screen.done(f"llama.cpp serves it on {engine_url} after {trio.current_time() - started:.1f} s")

    url = f"http://127.0.0.1:{ports.public}"
    config = folder / "gateway.toml"
    await trio.Path(config).write_text(gateway_config(engine_url, ports, registering=registering), "utf-8")
    await trio.Path(folder / JOINING_FILE).write_text(secrets.token_hex(16))
    with screen.working("Starting the gateway in front of it"):
        await start_gateway(nursery, ending, config, folder / "gateway.log")
        await wait_ready(url)
    screen.done(f"the gateway is ready on {url}")


async def _ask(url: str, admin_url: str, screen: Screen) -> None:
    """Ask through the gateway, show the answer and what the gateway wrote down.

    Raises:
        DemoError: there was no whole answer, or no record.
    """
    from ._question import QUESTION, ask, find_record  # the SDK takes half a second: the engine came first

    screen.heading(f"The OpenAI SDK asks {MODEL_NAME}: {QUESTION}")
    try:
        exchange_id = await ask(url, screen.token)
    finally:
        screen.line()
    record = await find_record(admin_url, exchange_id)
    screen.heading("What the gateway wrote down about it")
    screen.json(record)


def _explain(url: str, admin_url: str, screen: Screen) -> None:
    """Tell how to go on by oneself."""
    messages = [{"role": "user", "content": "Tell me a story about a lighthouse."}]
    body = json.dumps({"model": MODEL_NAME, "stream": True, "messages": messages})
    screen.heading("Talk to it yourself, from another terminal")
    screen.line(f"curl -N {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'")
    screen.line()
    screen.line(f"curl {admin_url}/admin/v1/statistics")
    screen.line()
    screen.line("Ctrl-C ends the demo.")
