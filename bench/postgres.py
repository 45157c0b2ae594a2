"""A real PostgreSQL in a folder of its own, that can be stopped and started again."""

from __future__ import annotations

import contextlib
import getpass
import glob
import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import sqlalchemy as sa

START_LIMIT: Final = 30.0  # seconds
USERS: Final = ("postgres", "nobody")  # PostgreSQL refuses to run as root

# Everything here may be lost with the machine, and nothing else.
OPTIONS: Final = ("fsync=off", "listen_addresses=127.0.0.1", "max_connections=20", "shared_buffers=8MB")


def programs() -> Path | None:
    """Where the server's programs are; Debian keeps them out of the path."""
    found = shutil.which("postgres")
    if found is not None:
        return Path(os.path.realpath(found)).parent
    folders = sorted(glob.glob("/usr/lib/postgresql/*/bin/postgres"))
    return Path(folders[-1]).parent if folders else None


class PostgresServer:
    """A server process, made by `postgres_server`."""

    def __init__(self, folder: Path, bin_folder: Path) -> None:
        self._folder = folder
        self._bin = bin_folder
        self._user = _unprivileged()
        self._process: subprocess.Popen[bytes] | None = None
        self.port: int = _lasting_port()
        if self._user is not None:
            shutil.chown(folder, self._user)
        self._run(
            "initdb", "--auth=trust", "--username=gateway", "--no-sync", "--encoding=UTF8", "--locale=C"
        )

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(self._bin / program), "-D", str(self._folder / "data"), *arguments]
        subprocess.run(
            command, user=self._user, cwd=self._folder, check=True, stdout=subprocess.DEVNULL, timeout=60
        )

    def url(self, database: str = "postgres") -> str:
        """Where a database of this server is."""
        return f"postgresql+psycopg://gateway@127.0.0.1:{self.port}/{database}"

    def start(self) -> None:
        """Start it, and wait until it answers."""
        options = [part for option in OPTIONS for part in ("-c", option)]
        sockets = ["-k", str(self._folder), "-p", str(self.port)]
        self._process = subprocess.Popen(
            [str(self._bin / "postgres"), "-D", str(self._folder / "data"), *sockets, *options],
            user=self._user,
            cwd=self._folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        limit = time.monotonic() + START_LIMIT
        engine = sa.create_engine(self.url(), poolclass=sa.NullPool)
        while True:
            try:
                engine.connect().close()
            except sa.exc.OperationalError:
                if time.monotonic() > limit:
                    raise
                time.sleep(0.02)
            else:
                return

    def stop(self) -> None:
        """Have it cut all connections and end."""
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait(timeout=30)
            self._process = None

    def make_database(self, name: str) -> str:
        """Make an empty database; answers its URL."""
        engine = sa.create_engine(self.url(), poolclass=sa.NullPool, isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.execute(sa.text(f'CREATE DATABASE "{name}"'))
        return self.url(name)


def _lasting_port() -> int:
    """Find a free port of those that the kernel gives to nobody.

    While the server is stopped, one of the others may become the near end of a connection; even of one
    to this very port, whose connecting then succeeds, with itself.
    """
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    dice = random.Random()
    while True:
        port = dice.randrange(max(lowest - 16_000, 1024), lowest)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _unprivileged() -> str | None:
    """The user to run as; None: whoever runs the tests."""
    if getpass.getuser() != "root" and os.getuid() != 0:
        return None
    known = {entry.pw_name for entry in pwd.getpwall()}
    return next(name for name in USERS if name in known)


@contextmanager
def postgres_server(bin_folder: Path) -> Iterator[PostgresServer]:
    """Run a server for the length of the block."""
    # Not pytest's own folder, which other users can not enter.
    with tempfile.TemporaryDirectory(prefix="pg-") as folder:
        server = PostgresServer(Path(folder), bin_folder)
        server.start()
        try:
            yield server
        finally:
            server.stop()
