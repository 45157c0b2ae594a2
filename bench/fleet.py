"""Gateways and workers that register with them, each a process that can be killed and started again.

The workers are ``trio-gateway worker --engine simulated``: what a scenario does to
them is what happens to real ones.
"""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from . import peers
from .processes import BenchError, Child, free_port

MODEL: Final = "bench-model"
START_PATIENCE_S: Final = 60.0
END_PATIENCE_S: Final = 60.0

CONFIG: Final = """
[server]
bind = ["127.0.0.1:{port}"]
expose_worker = true
[admin]
bind = ["127.0.0.1:{admin_port}"]
[internal]
bind = ["127.0.0.1:{internal_port}"]
join_token_file = "join-token"
[shutdown]
readiness_delay = 0
grace = 1
hard_limit = 5
{extra}
"""


class Worker:
    """One worker: the same id after each start, another process and another port.

    Args:
        command: what is run, but for the options that every worker has.
        joining: options that name the gateways and the join token.
    """

    def __init__(self, worker_id: str, slots: int, command: Sequence[str], joining: Sequence[str]) -> None:
        self.id: Final = worker_id
        self.slots: Final = slots
        self._command = [*command, "--id", worker_id, "--slots", str(slots), *joining]
        self._child: Child | None = None

    @property
    def child(self) -> Child:
        """Its process, the last one it had."""
        assert self._child is not None, f"{self.id} was not started"
        return self._child

    def start(self) -> None:
        """Start it; it need not be registered yet when this returns."""
        self.stop()
        self._child = Child(self._command, name=self.id, talks=False)

    def kill(self) -> None:
        """Kill it outright."""
        self.child.kill()

    def stop(self) -> None:
        """End it, however it is."""
        if self._child is not None:
            self._child.stop()


class Fleet:
    """A running gateway and its workers, which it may share with others."""

    def __init__(self, gateway: peers.Gateway, workers: Sequence[Worker]) -> None:
        self.gateway: Final = gateway
        self.workers: Final = workers

    @property
    def slots(self) -> int:
        """Of all workers."""
        return sum(worker.slots for worker in self.workers)

    def urls(self) -> dict[str, str]:
        """Where the gateway believes each ready worker to be."""
        shown = self.gateway.statistics()["workers"]
        return {each["id"]: each["url"] for each in shown if each["ready"]}

    def wait_registered(self, worker: Worker, before: str | None = None) -> None:
        """Wait until the gateway has a worker, at another address than ``before``.

        Raises:
            BenchError: the worker ended, or took longer than it may.
        """

        def there() -> bool:
            if not worker.child.running:
                raise BenchError(f"{worker.id} ended at its start:\n{worker.child.log_tail()}")
            return self.urls().get(worker.id, before) != before

        if not peers.eventually(there, START_PATIENCE_S, 0.1):
            raise BenchError(f"{worker.id} did not register:\n{worker.child.log_tail()}")


def worker_command(*simulate: str) -> list[str]:
    """Answer the command of a worker before a simulated engine with these settings."""
    settings = [word for each in simulate for word in ("--simulate", each)]
    return [*peers.gateway_command(), "worker", "--engine", "simulated", "--model", MODEL, *settings]


@contextmanager
def fleet(
    command: Sequence[str],
    *,
    workers: int = 3,
    slots: int = 8,
    extra: str = "",
    gateway_program: Sequence[str] = (),
) -> Iterator[Fleet]:
    """Run a gateway and workers that have registered with it; end all of them after the block.

    Args:
        command: of one worker, such as `worker_command`.
        slots: of each.
        extra: more TOML for the gateway.
        gateway_program: what is run with ``serve``, if not the gateway as it is.
    """
    with fleets(
        command,
        gateways=1,
        workers=workers,
        slots=slots,
        extra=extra,
        gateway_program=gateway_program,
    ) as (only,):
        yield only


@contextmanager
def fleets(
    command: Sequence[str],
    *,
    gateways: int,
    workers: int,
    slots: int,
    extra: str = "",
    gateway_program: Sequence[str] = (),
) -> Iterator[list[Fleet]]:
    """Run gateways that do not know each other before the same workers; see `fleet`.

    Answers one fleet for each gateway, all with the same workers.
    """
    with tempfile.TemporaryDirectory(prefix="bench-fleet-") as folder, ExitStack() as stack:
        token = Path(folder, "join-token")
        token.write_text(secrets.token_hex(16))
        joining = ["--join-token-file", str(token)]
        running: list[Fleet] = []
        made: list[Worker] = []
        for number in range(gateways):
            ports = {name: free_port() for name in ("port", "admin_port", "internal_port")}
            config = Path(folder, f"gateway-{number}.toml")
            config.write_text(CONFIG.format(**ports, extra=extra))
            program = gateway_program or peers.gateway_command()
            serve = [*program, "serve", "--config", str(config)]
            child = stack.enter_context(Child(serve, name=f"gateway {number}", talks=False))
            gateway = peers.Gateway(child.name, ports["port"], child, ports["admin_port"])
            joining += ["--gateway", f"http://127.0.0.1:{ports['internal_port']}"]
            running.append(Fleet(gateway, made))
        for each in running:
            peers.wait_ready(each.gateway.child, each.gateway.port, "/livez")
        made += [Worker(f"sim-{number}", slots, command, joining) for number in range(1, workers + 1)]
        for worker in made:
            stack.callback(worker.stop)
            worker.start()
        for each in running:
            for worker in made:
                each.wait_registered(worker)
        yield running
