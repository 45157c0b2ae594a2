"""The demo from top to bottom.

One nursery owns everything: the engine's process, the gateway's process and the
client. However the demo ends, by its own end, Ctrl-C, SIGTERM, or because a child
died, that nursery is cancelled and both children are gone before `run_demo`
returns.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
from pathlib import Path
from typing import Final

import trio

from ..testing import MODEL_NAME, MODEL_TITLE, missing_parts, model_file
from ._ending import STOP_SIGNALS, Cause, DemoError, Ending
from ._processes import choose_ports, gateway_config, start_engine, start_gateway, wait_ready
from ._screen import Screen

# A request that fails because a child died fails a little before that death is reported, which explains it.
TELLING_CAUSE_WITHIN: Final = 0.5  # seconds


def run_demo(once: bool) -> int:
    """Show a real model answering through the gateway.

    Args:
        once: end after the answer; else stay up until Ctrl-C.

    Returns:
        the exit status: 0 after an answer, 1 after a failure, 128 plus the signal's
        number where one came before the answer.
    """
    screen = Screen()
    missing = missing_parts() or _missing_sdk()
    if missing is not None:
        screen.error(missing)
        return 1
    return trio.run(_demo, once, screen)


def _missing_sdk() -> str | None:
    if importlib.util.find_spec("openai") is not None:
        return None
    return "the OpenAI SDK is not installed; pip install 'trio-gateway[local]'"


async def _demo(once: bool, screen: Screen) -> int:
    ending = Ending()
    with (
        tempfile.TemporaryDirectory(prefix="trio-gateway-demo-") as folder,
        trio.open_signal_receiver(*STOP_SIGNALS) as signals,
        ending.scope,
    ):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ending.watch, signals)
            ending.end(await _run(nursery, ending, Path(folder), once, screen))
    cause = ending.cause or Cause(1, "the demo was cancelled")
    if cause.message:
        screen.error(cause.message, cause.details)
    return cause.status


async def _run(nursery: trio.Nursery, ending: Ending, folder: Path, once: bool, screen: Screen) -> Cause:
    """Everything the user sees; answers why it ended, where it ends by itself."""
    try:
        url, admin_url = await _start(nursery, ending, folder, screen)
        await _ask(url, admin_url, screen)
    except DemoError as exc:
        await trio.sleep(TELLING_CAUSE_WITHIN)
        return Cause(1, str(exc))
    ending.answered = True
    if not once:
        _explain(url, admin_url, screen)
        await trio.sleep_forever()
    return Cause(0)


async def _start(nursery: trio.Nursery, ending: Ending, folder: Path, screen: Screen) -> tuple[str, str]:
    """Start engine and gateway, and answer the gateway's two base URLs."""
    size = model_file().stat().st_size / 1e6
    started = trio.current_time()
    with screen.working(f"Loading {MODEL_TITLE} ({size:.0f} MB) into llama.cpp"):
        engine_url = await start_engine(nursery, ending, folder / "engine.log")
    screen.done(f"llama.cpp serves it on {engine_url} after {trio.current_time() - started:.1f} s")

    port, admin_port = choose_ports()
    url, admin_url = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin_port}"
    config = folder / "gateway.toml"
    await trio.Path(config).write_text(gateway_config(engine_url, port, admin_port), "utf-8")
    with screen.working("Starting the gateway in front of it"):
        await start_gateway(nursery, ending, config, folder / "gateway.log")
        await wait_ready(url)
    screen.done(f"the gateway is ready on {url}")
    return url, admin_url


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
