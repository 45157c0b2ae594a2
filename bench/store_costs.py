"""What one turn costs a real store: CPU of redis-server for the package's own script."""

from __future__ import annotations

import json
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from io import BufferedReader
from typing import Any, Final

from trio_gateway.cluster import Turn, Want

from .processes import BenchError, Child, cpu_ns, free_port

SERVERS: Final = ("redis-server", "valkey-server")
ROOT: Final = "bench"
LEASE: Final = 600_000  # milliseconds: nobody's ends while this measures
MEASURED: Final = 0.4  # seconds of turns, at least two
START_PATIENCE_S: Final = 10.0
SLOTS: Final = 8  # of each worker


@dataclass(frozen=True)
class Crowded:
    """All slots are in use, and tenants wait at every replica."""

    replicas: int
    workers: int
    tenants: int = 12


def server() -> str | None:
    """The program of a store; None: there is none."""
    return next((found for name in SERVERS if (found := shutil.which(name))), None)


class Store:
    """A connection to a store, which speaks just enough of its protocol."""

    def __init__(self, port: int, pid: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._lines: BufferedReader = self._socket.makefile("rb")
        self._pid = pid
        script = resources.files("trio_gateway.cluster").joinpath("turn.lua").read_bytes()
        self._script = self.say(b"SCRIPT", b"LOAD", script)

    def say(self, *words: bytes) -> Any:
        """Send a command; answers what came."""
        parts = [b"*%d\r\n" % len(words), *(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)]
        self._socket.sendall(b"".join(parts))
        return self._read()

    def _read(self) -> Any:
        line = self._lines.readline().rstrip()
        match line[:1]:
            case b"$":
                return self._lines.read(int(line[1:]) + 2)[:-2]
            case b"*":
                return [self._read() for _ in range(int(line[1:]))]
            case b"-":
                raise BenchError(f"the store says {line.decode()}")
        return line[1:]

    def turn(self, turn: Turn) -> dict[str, Any]:
        """Make a turn."""
        reply: dict[str, Any] = json.loads(
            self.say(b"EVALSHA", self._script, b"1", ROOT.encode(), turn.encode())
        )
        return reply

    def turn_while_crowded(self, crowded: Crowded) -> float:
        """Seconds of CPU that one turn costs which grants nothing, since nothing is free."""
        self.say(b"FLUSHALL")
        workers = tuple(f"worker-{number:04d}" for number in range(crowded.workers))
        names = [f"tenant-{number}" for number in range(crowded.tenants)]
        want = {
            name: Want(count=5, group="g", tenant=name, rest="\n".join(workers), cost=100.0) for name in names
        }
        epochs = []
        for number in range(crowded.replicas):
            mine = workers[number :: crowded.replicas]
            first = Turn(
                f"replica-{number}",
                epoch=0,
                seq=1,
                lease=LEASE,
                known=crowded.replicas,
                whole=True,
                caps=dict.fromkeys(workers, SLOTS) if number == 0 else {},
                have=dict.fromkeys(mine, SLOTS),
                want=want,
            )
            epochs.append(self.turn(first)["epoch"])
        begun, before, count = time.monotonic(), cpu_ns([self._pid]), 0
        while count < 2 or time.monotonic() < begun + MEASURED:
            at = count % crowded.replicas
            seq = 2 + count // crowded.replicas
            self.turn(Turn(f"replica-{at}", epochs[at], seq, LEASE, known=crowded.replicas))
            count += 1
        return (cpu_ns([self._pid]) - before) / count / 1e9

    def close(self) -> None:
        self._lines.close()
        self._socket.close()


@contextmanager
def store() -> Iterator[Store]:
    """Run a store that keeps nothing; end it after the block.

    Raises:
        BenchError: there is no program for it, or it did not start.
    """
    program = server()
    if program is None:
        raise BenchError(f"no {' or '.join(SERVERS)} is installed")
    port = free_port()
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    with Child(command, name="store", talks=False) as child:
        ends = time.monotonic() + START_PATIENCE_S
        while True:
            try:
                found = Store(port, child.pid)
                break
            except OSError as refused:
                if time.monotonic() > ends or not child.running:
                    raise BenchError(f"the store did not start:\n{child.log_tail()}") from refused
                time.sleep(0.05)
        try:
            yield found
        finally:
            found.close()
