"""A real redis-server for tests, on a free port of the loopback, without files."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from typing import Any, Final

import pytest

SERVER: Final = shutil.which("redis-server") or shutil.which("valkey-server")
needs_redis: Final = pytest.mark.skipif(
    SERVER is None, reason="needs redis-server (Debian: apt-get install redis-server)"
)


class RedisServer:
    """One server process, which can be killed, stopped and started again, always at the same address."""

    def __init__(self, *options: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> None:
        assert SERVER is not None
        fixed = ("--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no")
        command = [SERVER, *fixed, "--loglevel", "warning", *self._options]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(500):
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", self.port)).close()
                return
            assert self._process.poll() is None, "redis-server ended"
            time.sleep(0.01)
        raise AssertionError("redis-server does not listen")

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def __enter__(self) -> RedisServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()


class Plain:
    """The smallest client that waits: one connection, one command at a time."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._file = self._socket.makefile("rb")

    def __call__(self, *words: str | bytes | int) -> Any:
        sent = [word if isinstance(word, bytes) else str(word).encode() for word in words]
        parts = [b"$%d\r\n%s\r\n" % (len(word), word) for word in sent]
        self._socket.sendall(b"*%d\r\n" % len(parts) + b"".join(parts))
        return self._read()

    def _read(self) -> Any:
        line = self._file.readline()
        kind, rest = line[:1], line[1:-2]
        if kind == b"-":
            raise AssertionError(rest.decode())
        if kind == b"$":
            return None if rest == b"-1" else self._file.read(int(rest) + 2)[:-2]
        if kind == b"*":
            return [self._read() for _ in range(int(rest))]
        return int(rest) if kind == b":" else rest

    def close(self) -> None:
        self._file.close()
        self._socket.close()


def open_server(*options: str) -> Iterator[RedisServer]:
    with RedisServer(*options) as server:
        yield server
