"""The programs that stand in a run: the engine, nginx, and the gateway.

nginx is what bytes through a proxy cost when nobody looks at them: one worker,
``proxy_buffering off``, HTTP/1.1 with kept connections to the same engine.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from . import native
from .processes import BenchError, Child, free_port, process_tree

MODEL: Final = "bench-model"
START_PATIENCE_S: Final = 30.0
Json = dict[str, Any]


def call(port: int, method: str, path: str, patience_s: float = 5.0) -> tuple[int, bytes]:
    """Make one request on a connection of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=patience_s)
    try:
        connection.request(method, path, headers={"Connection": "close"})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def eventually(holds: Callable[[], bool], patience_s: float, step_s: float = 0.02) -> bool:
    """Answer whether it came to hold within the time, asking every ``step_s``."""
    give_up = time.monotonic() + patience_s
    while not holds():
        if time.monotonic() > give_up:
            return False
        time.sleep(step_s)
    return True


@dataclass(frozen=True)
class Server:
    """A running server: its port on loopback, its process, and options of the load client that it needs."""

    name: str
    port: int
    child: Child
    load: Mapping[str, str] = field(default_factory=dict, kw_only=True)

    @property
    def pids(self) -> list[int]:
        return process_tree(self.child.pid)


@dataclass(frozen=True)
class Engine(Server):
    """The paced engine of ``native/engine.c``."""

    def stats(self, *, aborts: bool = False) -> Json:
        stats: Json = json.loads(call(self.port, "GET", "/stats/aborts" if aborts else "/stats")[1])
        return stats

    def reset(self) -> None:
        call(self.port, "POST", "/reset")

    def wait_idle(self, patience_s: float = 5.0) -> bool:
        """Answer whether no answer is being made any more."""
        return eventually(lambda: self.stats()["active"] == 0, patience_s)


@dataclass(frozen=True)
class Gateway(Server):
    """The gateway under test, with its operators' port."""

    admin_port: int

    def statistics(self, patience_s: float = 5.0) -> Json:
        """Ask ``GET /admin/v1/statistics``."""
        status, body = call(self.admin_port, "GET", "/admin/v1/statistics", patience_s)
        if status != 200:
            raise BenchError(f"/admin/v1/statistics answered {status}")
        statistics: Json = json.loads(body)
        return statistics

    def wait_idle(self, patience_s: float = 15.0) -> bool:
        """Answer whether nothing waits, runs, holds or drains any more."""
        return eventually(lambda: is_idle(self.statistics()), patience_s, 0.1)


def is_idle(statistics: Json) -> bool:
    """Nothing waits, nothing runs, and every slot is back."""
    leases = statistics["leases"]
    return not (statistics["waiting"] or statistics["running"] or leases["held"] or leases["draining"])


def counts_of(statistics: Json, name: str) -> dict[tuple[str, ...], int]:
    """Answer one family of ``counts``, by its labels."""
    family = statistics["counts"][name]
    return {tuple(labels): value for labels, value in zip(family["labels"], family["values"], strict=True)}


@contextmanager
def engine(limit_s: int = 2 * 3600, processor: int | None = None) -> Iterator[Engine]:
    """Run the paced engine on a free port, and on one processor only if that is named."""
    command = [str(native.program("engine")), "--limit-s", str(limit_s)]
    with Child(command, name="engine") as child:
        if processor is not None:
            os.sched_setaffinity(child.pid, {processor})
        yield Engine("engine", json.loads(child.read_line(5))["port"], child)


NGINX: Final = """
daemon off;
{user}
worker_processes {workers};
worker_rlimit_nofile 16384;
pid {dir}/nginx.pid;
error_log stderr error;
events {{ worker_connections 8192; }}
http {{
  access_log off;
  client_body_temp_path {dir}/body;
  proxy_temp_path {dir}/proxy;
  fastcgi_temp_path {dir}/fastcgi;
  uwsgi_temp_path {dir}/uwsgi;
  scgi_temp_path {dir}/scgi;
  keepalive_requests 1000000;
  upstream engine {{
    {engines}
    keepalive 1024;
    keepalive_requests 1000000;
  }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{
      proxy_pass http://engine;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
      proxy_next_upstream off;
      proxy_read_timeout 600s;
      send_timeout 600s;
    }}
  }}
}}
"""


@contextmanager
def nginx(*engine_ports: int, workers: int = 1) -> Iterator[Server]:
    """Run nginx before the engines, in so many processes; NGINX_BIN names another program."""
    path = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"))
    binary = os.environ.get("NGINX_BIN") or shutil.which("nginx", path=path)
    if binary is None:
        raise BenchError("no nginx to compare with: apt-get install nginx-light, or set NGINX_BIN")
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="bench-nginx-") as folder:
        user = "user root;" if os.geteuid() == 0 else ""
        config = Path(folder, "nginx.conf")
        engines = " ".join(f"server 127.0.0.1:{each};" for each in engine_ports)
        config.write_text(NGINX.format(dir=folder, user=user, port=port, engines=engines, workers=workers))
        with Child([binary, "-p", folder, "-c", str(config)], name="nginx", talks=False) as child:
            wait_ready(child, port, "/health")
            yield Server("nginx", port, child)


GATEWAY: Final = """
[server]
bind = ["127.0.0.1:{port}"]
[admin]
bind = ["127.0.0.1:{admin_port}"]
{workers}
[[models]]
id = "{model}"
upstream = "{upstream}"
[limits]
connections = {connections}
[admission]
max_queued = {queue}
max_wait = {max_wait}
[shutdown]
readiness_delay = 0
grace = 1
hard_limit = 5
{extra}
"""

WORKER: Final = """
[[workers]]
id = "{id}"
url = "http://127.0.0.1:{engine_port}"
kind = "{kind}"
slots = {slots}
"""


def gateway_command() -> list[str]:
    """Answer how to start the gateway: the environment's own, or TRIO_GATEWAY_BIN."""
    beside = Path(sys.executable).with_name("trio-gateway")
    binary = os.environ.get("TRIO_GATEWAY_BIN") or (
        beside if beside.exists() else shutil.which("trio-gateway")
    )
    if not binary:
        raise BenchError("trio-gateway is not installed here: run `make demo` or `pip install -e .` first")
    return [str(binary)]


def configuration(
    engine_port: int,
    port: int,
    admin_port: int,
    *,
    kind: str = "openai",
    slots: int = 1024,
    workers: int = 1,
    queue: int = 4096,
    max_wait: int = 30,
    connections: int = 8192,
    upstream: str = MODEL,
    extra: str = "",
) -> str:
    """Answer a configuration with every limit out of the way.

    Args:
        engine_port: where the paced engine listens.
        port, admin_port: where the gateway shall.
        kind: the dialect it is taken for; "vllm" also asks for usage in every event.
        slots: of each worker.
        workers: how many there are, all of them the one engine.
        queue: requests that may wait.
        max_wait: seconds that they may.
        connections: of clients at a time.
        upstream: what the engine calls the model.
        extra: more TOML, such as a ``[delivery]`` table.
    """
    ids = ["engine"] if workers == 1 else [f"engine-{number}" for number in range(workers)]
    rows = [WORKER.format(id=id_, engine_port=engine_port, kind=kind, slots=slots) for id_ in ids]
    return GATEWAY.format(
        port=port,
        admin_port=admin_port,
        workers="".join(rows),
        queue=queue,
        max_wait=max_wait,
        connections=connections,
        model=MODEL,
        upstream=upstream,
        extra=extra,
    )


@contextmanager
def gateway(engine_port: int, **settings: Any) -> Iterator[Gateway]:
    """Run ``trio-gateway serve`` before the engine; ``settings`` are those of `configuration`."""
    port, admin_port = free_port(), free_port()
    with tempfile.TemporaryDirectory(prefix="bench-gateway-") as folder:
        config = Path(folder, "gateway.toml")
        config.write_text(configuration(engine_port, port, admin_port, **settings))
        with Child(
            [*gateway_command(), "serve", "--config", str(config)], name="gateway", talks=False
        ) as child:
            wait_ready(child, port, "/readyz")
            yield Gateway("gateway", port, child, admin_port)


def wait_ready(child: Child, port: int, path: str, patience_s: float = START_PATIENCE_S) -> None:
    """Wait until a server answers a path with 200.

    Raises:
        BenchError: it ended, or took longer than it may.
    """

    def ready() -> bool:
        if not child.running:
            raise BenchError(f"{child.name} ended at its start:\n{child.log_tail()}")
        try:
            return call(port, "GET", path, 2)[0] == 200
        except OSError:
            return False

    if not eventually(ready, patience_s, 0.05):
        raise BenchError(f"{child.name} was not ready after {patience_s:.0f} s:\n{child.log_tail()}")
