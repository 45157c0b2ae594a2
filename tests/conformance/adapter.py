"""Lets the external conformance runner play its cases against this gateway.

The runner gives a configuration in its own words and asks for a running gateway;
this module writes that configuration as the gateway's TOML file, starts
``trio-gateway serve``, and reads the gateway's state from its admin listener. It
translates and never judges. ``adapter`` is the runner's module of that name, which
the runner has imported before it loads this one.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from adapter import (  # type: ignore[import-not-found]  # the runner's, see above
    KEYS,
    CannotStart,
    Endpoints,
    ProcessAdapter,
    base_url,
    free_port,
    http_get,
    model_routes,
    upstream_names,
)

ADMIN_STATISTICS: Final = "/admin/v1/statistics"
ADMIN_HEADERS: Final = {"authorization": f"Bearer {KEYS['admin_key']}"}
SLOTS_FOR_ALL: Final = 256  # so that no case waits by accident
TENANTS: Final = ("client_key", "tenant_a", "tenant_b")
SHUTDOWN_MARGIN: Final = 10.0  # seconds between the end of the grace and the hard limit

# The runner's key, our section and key, and how the value is written.
SETTINGS: Final = (
    ("queue_len", "admission", "max_queued", 1),
    ("queue_timeout_ms", "admission", "max_wait", 0.001),
    ("retry_budget_ratio", "retry", "budget_ratio", 1),
    ("deadline_ms", "deadlines", "default", 0.001),
    ("deadline_ms", "deadlines", "maximum", 0.001),
    ("connect_timeout_ms", "deadlines", "connect", 0.001),
    ("idle_timeout_ms", "deadlines", "between_events", 0.001),
    ("write_stall_timeout_ms", "delivery", "stall_timeout", 0.001),
    ("channel_bytes", "delivery", "buffer_bytes", 1),
    ("heartbeat_ms", "stream", "heartbeat_after", 0.001),
    ("max_body_bytes", "limits", "body_bytes", 1),
    ("max_event_bytes", "limits", "event_bytes", 1),
    ("max_response_bytes", "limits", "answer_bytes", 1),
    ("body_read_timeout_ms", "limits", "body_timeout", 0.001),
    ("idle_conn_timeout_ms", "limits", "head_timeout", 0.001),
    ("idle_conn_timeout_ms", "limits", "keep_alive", 0.001),
    ("drain_timeout_ms", "shutdown", "grace", 0.001),
    ("breaker_threshold", "breaker", "consecutive_faults", 1),
    ("breaker_open_ms", "breaker", "cooldown", 0.001),
    ("health_interval_ms", "probes", "interval", 0.001),
    ("health_timeout_ms", "probes", "timeout", 0.001),
    ("health_fail_k", "probes", "failures", 1),
    ("ws_max_message_bytes", "websocket", "max_message_bytes", 1),
    ("ws_ping_interval_ms", "websocket", "ping_interval", 0.001),
    ("ws_ping_timeout_ms", "websocket", "ping_timeout", 0.001),
)
KINDS: Final = {"ndjson-worker": "agent"}
AGENT_PATIENCE: Final = 20.0  # seconds until a worker that was started is listed
PORT_TRIES: Final = 3  # a port that was free may have been taken when the gateway comes to bind it
FIRST_TOKEN_KEYS: Final = ("first_byte_timeout_ms", "first_token_timeout_ms")  # one limit here

ALONE: Final = """
import functools, sys
from trio_gateway.cli import _app, main
_app.Gateway = functools.partial(_app.Gateway, read_together=False)
sys.exit(main())
"""
# Imports the gateway once, and forks an agent for each line of arguments. Their process group is its own.
LAUNCHER: Final = """
import json, os, signal, sys
from trio_gateway.cli import app
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print("ready", flush=True)
for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(nothing, number)
        try:
            app(json.loads(line))
        finally:
            os._exit(0)
    print(pid, flush=True)
"""

# The runner's names of what we call otherwise.
OUTCOMES: Final = {
    "completed": "success",
    "client_gone": "client_abort",
    "client_cancelled": "client_abort",
    "client_stalled": "client_stalled",
    "upstream_failed": "upstream_error",
    "deadline_exceeded": "timeout",
    "refused": "refused",
    "operator_cancelled": "operator_cancelled",
    "gateway_shutdown": "shutdown",
}


class Adapter(ProcessAdapter):  # type: ignore[misc]  # its base is not typed
    """One running gateway."""

    name = "trio-gateway"
    config_keys = frozenset(
        {
            *(key for key, *_ in SETTINGS),
            *FIRST_TOKEN_KEYS,
            "allowed_models",
            "cors_origins",
            "max_in_flight",
            "models",
            "pool_size",
            "retries",
            "routing",
            "rpm",
            "upstream_base",
            "upstream_host",
            "upstream_key",
            "upstream_scheme",
            "upstream_socket",
            "upstreams",
        }
    )
    dialects = frozenset({"openai", "ollama", "ndjson-worker"})
    features = frozenset(
        {
            "admin",
            "admin_key",
            "auth",
            "client_timeout",
            "ipv6",
            "models",
            "signal",
            "tenants",
            "tls",
            "unix",
            "ws",
        }
    )
    # The public listener has no such path: operators have their own, and tests of that one ask it the same.
    paths: Final = {
        "/health": "/livez",
        "/healthz": "/livez",
        "/v1/ws": "/v1/tokens",
        "/admin/workers": "/admin/v1/workers",
    }
    headers: Final = {"x-request-timeout-ms": "x-gateway-timeout-ms"}

    def __init__(self, workdir: str) -> None:
        super().__init__(workdir)
        self.agents: dict[tuple[str, int], int] = {}  # their process ids
        self.launcher: subprocess.Popen[str] | None = None
        self.told: set[tuple[str, int]] = set()  # those that were asked to end
        self.alone = 0  # configurations that no two cases may share

    def config_key(self, config: dict[str, Any]) -> object:
        """Say which configurations may share a gateway: equal keys do.

        What a case does to a worker makes the next one prefer another worker for a while. So a
        case that has a choice of workers has a gateway of its own.
        """
        key = [super().config_key(config), config.get("dialect")]
        if len(upstream_names(config)) > 1:
            self.alone += 1
            key.append(self.alone)
        return key

    def start(self, config: dict[str, Any], upstreams: dict[str, str]) -> Any:
        """Start a gateway with this configuration and answer where it listens."""
        for _ in range(PORT_TRIES - 1):
            try:
                return self._start(config, upstreams)
            except CannotStart:
                if "Address already in use" not in self.logs():
                    raise
        return self._start(config, upstreams)

    def _start(self, config: dict[str, Any], upstreams: dict[str, str]) -> Any:
        self.port, self.admin_port = free_port(), free_port()
        path = Path(self.workdir) / "gateway.toml"
        path.write_text(self._toml(config, upstreams), encoding="utf-8")
        self.spawn([*_command(), "serve", "--config", str(path)])
        if not upstream_names(config) and self.launcher is None:
            self._open_launcher()
        self.wait_ready("127.0.0.1", self.port, "/livez")
        self.wait_ready("127.0.0.1", self.admin_port, ADMIN_STATISTICS, headers=ADMIN_HEADERS)
        metrics = ("127.0.0.1", self.admin_port, "/metrics", ADMIN_HEADERS)
        return Endpoints("127.0.0.1", self.port, ("127.0.0.1", self.admin_port), dict(KEYS), metrics)

    def state(self) -> dict[str, Any]:
        """What the gateway tells of itself, in the runner's words; empty when it does not answer."""
        try:
            status, body = http_get("127.0.0.1", self.admin_port, ADMIN_STATISTICS, ADMIN_HEADERS)
        except (OSError, http.client.HTTPException):
            return {}
        return translate(json.loads(body)) if status == 200 else {}

    def ws_request(self, msg: dict[str, Any]) -> dict[str, Any]:
        """Say a request for a stream as the token protocol has it."""
        body = {key: value for key, value in msg.items() if key not in ("type", "id")}
        return {"type": "generate", "stream_id": msg.get("id", "r0"), "body": body}

    # -- workers at run time

    def register(self, url: str, models: list[str], ttl_ms: int | None = None) -> None:
        """Start an agent in front of a worker, and return when the gateway lists it."""
        del ttl_ms  # the gateway's setting; an agent that lives sends heartbeats
        self.deregister(url)
        name = f"agent-{len(self.agents)}"
        words = ["worker", "--engine", "openai", "--upstream", url, "--slots", str(SLOTS_FOR_ALL)]
        words += ["--gateway", f"http://127.0.0.1:{self.internal_port}", "--bind", "127.0.0.1:0"]
        words += ["--join-token-file", str(self.join_token), "--id", name]
        for model in models:
            words += ["--model", model]
        self.agents[url, len(self.agents)] = self._start_agent(words)
        self._wait_until_listed(name)

    def deregister(self, url: str) -> None:
        """Ask the agent in front of a worker to end; what streams there may finish."""
        for key, agent in self.agents.items():
            if key[0] == url and key not in self.told:  # a second signal would hurry it
                self.told.add(key)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(agent, signal.SIGTERM)

    def stop(self) -> None:
        """End the gateway, and the agents that are left."""
        if self.launcher is not None:
            os.killpg(self.launcher.pid, signal.SIGKILL)
            self.launcher.communicate()
        super().stop()

    def _start_agent(self, words: list[str]) -> int:
        """Start an agent and answer its process id."""
        assert self.launcher is not None
        assert self.launcher.stdin is not None
        assert self.launcher.stdout is not None
        self.launcher.stdin.write(json.dumps(words) + "\n")
        self.launcher.stdin.flush()
        return int(self.launcher.stdout.readline())

    def _open_launcher(self) -> None:
        """Have agents at hand before a case begins: its clock also runs while they start."""
        self.launcher = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.launcher.stdout is not None
        self.launcher.stdout.readline()

    def _wait_until_listed(self, name: str) -> None:
        until = time.monotonic() + AGENT_PATIENCE
        while time.monotonic() < until:
            status, body = http_get("127.0.0.1", self.admin_port, ADMIN_STATISTICS, ADMIN_HEADERS)
            workers = json.loads(body)["workers"] if status == 200 else []
            if any(worker["id"] == name and worker["ready"] for worker in workers):
                return
            time.sleep(0.02)
        raise CannotStart(f"the worker {name} was not listed within {AGENT_PATIENCE} s")

    # -- configuration

    def _toml(self, config: dict[str, Any], upstreams: dict[str, str]) -> str:
        sections = {name: dict(values) for name, values in _sections(config).items()}
        sections["server"] = {"bind": [f"127.0.0.1:{self.port}"]}
        if "cors_origins" in config:
            sections["server"]["cors_origins"] = config["cors_origins"]
        token = {"id": "runner", "hash": _hash_of("admin_key"), "role": "viewer"}
        sections["admin"] = {"bind": [f"127.0.0.1:{self.admin_port}"], "tokens": [token]}
        if not upstream_names(config):
            self.internal_port = free_port()
            self.join_token = self._key_file(secrets.token_hex(16))
            sections["internal"] = {
                "bind": [f"127.0.0.1:{self.internal_port}"],
                "join_token_file": self.join_token,
            }
        lines = []
        for name, values in sections.items():
            lines += [f"[{name}]", *_members(values), ""]
        for table, entries in (
            ("workers", self._workers(config, upstreams)),
            ("models", _models(config)),
            ("tenants", _tenants(config)),
        ):
            for entry in entries:
                lines += [f"[[{table}]]", *_members(entry), ""]
        return "\n".join(lines)

    def _workers(self, config: dict[str, Any], upstreams: dict[str, str]) -> Iterator[dict[str, Any]]:
        dialect = config.get("dialect", "openai")
        for name in upstream_names(config):
            worker = {
                "id": name,
                "url": _worker_url(config, upstreams[name]),
                "kind": KINDS.get(dialect, dialect),
                "slots": config.get("max_in_flight", config.get("pool_size", SLOTS_FOR_ALL)),
            }
            if worker["kind"] == "agent":
                worker["api_key_file"] = self._key_file(secrets.token_hex(16))
            if "upstream_key" in config:
                worker["api_key_file"] = self._key_file(config["upstream_key"])
            yield worker

    def _key_file(self, key: str) -> str:
        fd, path = tempfile.mkstemp(dir=self.workdir, suffix=".key")
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(key)
        return path


def translate(statistics: Mapping[str, Any]) -> dict[str, Any]:
    """Say the gateway's statistics in the runner's words."""
    leases, outcomes, workers = statistics["leases"], statistics["outcomes"], statistics["workers"]
    conservation = statistics["conservation"]
    state = {
        "in_flight": statistics["running"],
        "queued": statistics["waiting"],
        "leases": leases["held"] + leases["draining"],
        "workers": len(workers),
        "failures": {worker["id"]: worker["faults"] for worker in workers},
        "attempts": {worker["id"]: worker["attempts"] for worker in workers},
        "client_outcomes": dict.fromkeys(OUTCOMES.values(), 0),
        "usage_records": sum(outcomes.values()),
        "breaker": {worker["id"]: _breaker(worker) for worker in workers},
        "never_negative": (conservation["ok"], "; ".join(conservation["errors"]) or "all equations hold"),
    }
    for outcome, count in outcomes.items():
        state["client_outcomes"][OUTCOMES.get(outcome, outcome)] += count
    if statistics["recent"]:
        state["usage_last"] = _usage(statistics["recent"][-1])
    return state


def _breaker(worker: Mapping[str, Any]) -> str:
    """Say the state of a worker's breakers in one word: that of the one that lets least through."""
    states = set(worker["breakers"].values())
    if states & {"open", "probing", "forced"}:
        return "open"
    return "half-open" if states & {"half_open", "trying"} else "closed"


def _usage(record: Mapping[str, Any]) -> dict[str, Any]:
    counts = (record["tokens_prompt"], record["tokens_generated"])
    return {
        "total_tokens": None if None in counts else sum(counts),
        "outcome": OUTCOMES.get(record["outcome"], record["outcome"]),
        "chunks": record["events_delivered"],
    }


def _command() -> list[str]:
    """The gateway of the interpreter that runs the runner; ``READ_ALONE``: without its read loop."""
    if "READ_ALONE" in os.environ:
        return [sys.executable, "-c", ALONE]
    script = Path(sys.executable).with_name("trio-gateway")
    return [str(script)] if script.exists() else [sys.executable, "-m", "trio_gateway"]


def _sections(config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    sections: dict[str, dict[str, Any]] = {"shutdown": {"readiness_delay": 0}}
    for key, section, name, factor in SETTINGS:
        if key in config:
            sections.setdefault(section, {})[name] = config[key] * factor
    first_token = [config[key] for key in FIRST_TOKEN_KEYS if key in config]
    if first_token:
        sections.setdefault("deadlines", {})["first_token"] = min(first_token) / 1000
    # A case without retries means none; with n of them there are n + 1 attempts.
    retry = sections.setdefault("retry", {})
    retry["max_attempts"] = config.get("retries", 0) + 1
    if "retry_budget_ratio" not in config:
        # Cases share a gateway and follow each other within milliseconds: a worker that had no
        # room in one must be asked again in the next. Storms have a gateway of their own.
        retry["backoff"] = 0.01
    # For the same reason faults of one case must not spare its worker in the next.
    if "breaker_threshold" not in config:
        sections.setdefault("breaker", {}).update(consecutive_faults=10_000, window=0.001)
    sections.setdefault("probes", {}).setdefault("interval", 0.2)
    if "grace" in sections["shutdown"]:
        sections["shutdown"]["hard_limit"] = sections["shutdown"]["grace"] + SHUTDOWN_MARGIN
    return sections


def _worker_url(config: dict[str, Any], address: str) -> str:
    if "upstream_socket" in config:
        return "http+unix://" + quote(config["upstream_socket"])
    return f"{base_url(config, address)}{config.get('upstream_base', '')}"


def _models(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if not upstream_names(config):
        return  # nobody could serve them
    for model, routes in model_routes(config).items():
        yield {"id": model, "upstream": routes[0][1], "workers": [upstream for upstream, _ in routes]}


def _tenants(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for name in TENANTS:
        tenant = {"id": name, "keys": [{"id": name, "hash": _hash_of(name)}]}
        if "queue_len" in config:
            tenant["max_queued"] = config["queue_len"]
        if "rpm" in config:
            tenant["requests_per_minute"] = config["rpm"]
        yield tenant


def _hash_of(name: str) -> str:
    """Hash of one of the runner's credentials, as configurations have it."""
    return f"sha256:{hashlib.sha256(KEYS[name].encode()).hexdigest()}"


def _members(table: Mapping[str, Any]) -> Iterator[str]:
    return (f"{key} = {_toml_value(value)}" for key, value in table.items())


def _toml_value(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(_members(value)) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    if isinstance(value, float):
        return f"{value:.6f}"
    return json.dumps(value, ensure_ascii=False)  # strings, integers and booleans are written alike
