"""The peers before the engine, each started as its own documentation says, for one worker.

All of them are told to stay out of the way: the simplest policy, no retries, no log of requests, limits out
of reach. Each gets the same requests as the gateway.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Final

from . import installed
from .native import load
from .peers import MODEL, Server, eventually, nginx, wait_ready
from .processes import BenchError, Child, free_port

ANSWERS_S: Final = 20  # until its first answer: some learn of their worker only after they are up
KEY: Final = "sk-0123456789abcdef0123456789abcdef"
PLENTY: Final = "100000"  # requests at a time


@contextmanager
def smg(engine_port: int) -> Iterator[Server]:
    """Run smg, SGLang's model gateway (Rust)."""
    flags = ("--backend", "vllm", "--log-level", "warn", "--disable-retries", "--disable-circuit-breaker")
    with _router("smg", ("launch", *flags), engine_port) as server:
        yield server


@contextmanager
def vllm_router(engine_port: int) -> Iterator[Server]:
    """Run vllm-router (Rust)."""
    flags = ("--log-level", "warning", "--disable-retries", "--disable-circuit-breaker")
    limits = ("--max-concurrent-requests", PLENTY, "--queue-size", PLENTY)
    with _router("vllm-router", (*flags, *limits), engine_port) as server:
        yield server


@contextmanager
def _router(name: str, flags: Sequence[str], engine_port: int) -> Iterator[Server]:
    """Run one of the two routers that share most of their flags."""
    port, metrics_port = free_port(), free_port()
    command = [
        *(str(installed.program(name)), *flags),
        *("--worker-urls", f"http://127.0.0.1:{engine_port}", "--policy", "round_robin"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
        *("--worker-startup-check-interval", "1"),
    ]
    with Child(command, name=name, talks=False) as child:
        wait_ready(child, port, "/readiness")
        yield answering(Server(name, port, child))


@contextmanager
def litellm(engine_port: int) -> Iterator[Server]:
    """Run LiteLLM's proxy with one process and no database."""
    port = free_port()
    to = {"model": f"openai/{MODEL}", "api_base": f"http://127.0.0.1:{engine_port}/v1", "api_key": "none"}
    config = {
        "model_list": [{"model_name": MODEL, "litellm_params": to}],
        "router_settings": {"num_retries": 0, "disable_cooldowns": True},
        "litellm_settings": {"num_retries": 0, "telemetry": False},
        "general_settings": {"master_key": KEY},  # it does not start without one
    }
    quiet = {"LITELLM_LOG": "ERROR", "LITELLM_MODE": "PRODUCTION", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    with tempfile.TemporaryDirectory(prefix="bench-litellm-") as folder:
        path = Path(folder, "config.yaml")
        path.write_text(json.dumps(config))  # JSON is YAML
        command = [str(installed.program("litellm")), "--config", str(path)]
        where = ["--host", "127.0.0.1", "--port", str(port)]
        with Child([*command, *where], name="litellm", talks=False, environment=quiet) as child:
            wait_ready(child, port, "/health/liveliness", 120)
            yield answering(Server("litellm", port, child, load={"keys": KEY}))


@contextmanager
def portkey(engine_port: int) -> Iterator[Server]:
    """Run Portkey's gateway (Node). Each request says where it goes; unknown fields are dropped."""
    node = shutil.which("node")
    if node is None:
        raise BenchError("portkey needs node: apt-get install nodejs")
    port = free_port()
    command = [node, str(installed.program("portkey")), f"--port={port}", "--headless"]
    target = {"provider": "openai", "custom_host": f"http://127.0.0.1:{engine_port}/v1", "api_key": "none"}
    config = {**target, "retry": {"attempts": 0}}
    trusted = {"TRUSTED_CUSTOM_HOSTS": "127.0.0.1"}
    with Child(command, name="portkey", talks=False, environment=trusted) as child:
        wait_ready(child, port, "/")
        header = f"x-portkey-config: {json.dumps(config)}"
        yield answering(Server("portkey", port, child, load={"header": header, "in_user": "1"}))


def answering(server: Server) -> Server:
    """Answer the server once it has answered a whole stream.

    Raises:
        BenchError: it did not within ``ANSWERS_S``.
    """

    def whole() -> bool:
        return bool(load("stream", server.port, (), streams=1, tokens=3, **server.load)["good"])

    if not eventually(whole, ANSWERS_S, 0.5):
        said = load("stream", server.port, (), streams=1, tokens=3, **server.load)["broken"]
        raise BenchError(f"{server.name} answers no stream as asked ({said}): {server.child.log_tail()}")
    return server


Start = Callable[[int], AbstractContextManager[Server]]
PEERS: Final[dict[str, Start]] = {
    "nginx": nginx,
    "smg": smg,
    "vllm-router": vllm_router,
    "litellm": litellm,
    "portkey": portkey,
}
RUST: Final = ("smg", "vllm-router")  # the yardstick
SLOW: Final = ("litellm", "portkey")  # fifty times slower: they get less to do


def start(names: Sequence[str], engine_port: int, stack: ExitStack) -> tuple[list[Server], dict[str, str]]:
    """Start peers, to be ended by the stack; answers them, and why others could not be started, by name."""
    running, missing = [], {}
    for name in names:
        try:
            running.append(stack.enter_context(PEERS[name](engine_port)))
        except BenchError as error:
            missing[name] = str(error)
    return running, missing
