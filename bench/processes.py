"""Processes that the bench starts, and what the kernel says about them.

Every process is owned by one `Child`; leaving its ``with`` block ends it by its own
id, politely first. Ctrl-C and SIGTERM reach the blocks as exceptions (`__main__`).
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

STOP_PATIENCE_S: Final = 10.0  # from SIGTERM to SIGKILL


class BenchError(Exception):
    """The bench could not measure; says what to do."""


class Child:
    """One process, ended when the block ends; its stderr goes to a file of its own.

    With ``talks`` its stdout is read here, otherwise it goes to that file too. ``environment`` adds to ours.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        name: str,
        stdin: bool = False,
        talks: bool = True,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by stop()
        # A session of its own: Ctrl-C is for the driver, which then ends each child.
        self._process = subprocess.Popen(
            [*_tied_to_us(), *command],
            stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE if talks else self._log,
            stderr=self._log,
            start_new_session=True,
            env=None if environment is None else {**os.environ, **environment},
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def read_line(self, patience_s: float) -> str:
        """Answer the next line of stdout, or what there is when time is up."""
        assert self._process.stdout is not None
        with _StopsAfter(self._process, patience_s):
            return self._process.stdout.readline().decode().strip()

    def close_stdin(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.stdin = None

    def finish(self, patience_s: float) -> tuple[str, int]:
        """Wait for its own end; answer stdout and exit status."""
        try:
            output, _ = self._process.communicate(timeout=patience_s)
        except subprocess.TimeoutExpired as late:
            raise BenchError(f"{self.name} did not end within {patience_s:.0f} s") from late
        return output.decode(), self._process.returncode

    def ask_to_end(self) -> None:
        """Send SIGTERM, and wait for nothing."""
        self._process.terminate()

    def wait(self, patience_s: float) -> int:
        """Wait for its own end; answer its exit status.

        Raises:
            BenchError: it takes longer.
        """
        try:
            return self._process.wait(patience_s)
        except subprocess.TimeoutExpired as late:
            raise BenchError(f"{self.name} did not end within {patience_s:.0f} s") from late

    def kill(self) -> None:
        """End it at once and without a word, as ``kill -9`` does."""
        self._process.kill()
        self._process.wait(STOP_PATIENCE_S)

    def log_tail(self, size: int = 2000) -> str:
        """Answer the end of what it wrote to stderr."""
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - size))
        return self._log.read().decode(errors="replace").strip()

    def stop(self) -> int:
        """End it: SIGTERM, then SIGKILL to whatever of its tree is left."""
        tree = process_tree(self.pid) if self.running else []
        if self.running:
            self._process.terminate()
            try:
                self._process.wait(STOP_PATIENCE_S)
            except subprocess.TimeoutExpired:
                for pid in tree:
                    _kill(pid)
                self._process.wait(STOP_PATIENCE_S)
        if self._process.stdout is not None:
            self._process.stdout.close()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._log.close()
        return self._process.returncode

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()


def _tied_to_us() -> list[str]:
    """Answer a prefix that lets a program end when the driver was killed outright."""
    setpriv = shutil.which("setpriv")  # of util-linux; it replaces itself by the program
    return [setpriv, "--pdeathsig", "TERM"] if setpriv else []


class _StopsAfter:
    """Ends a process that keeps a blocking read waiting for too long."""

    def __init__(self, process: subprocess.Popen[bytes], patience_s: float) -> None:
        self._timer = threading.Timer(patience_s, process.terminate)

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def free_port() -> int:
    """Answer a loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def process_tree(pid: int) -> list[int]:
    """Answer the process and all that descend from it; empty when it is gone."""
    found, todo = [], [pid]
    while todo:
        parent = todo.pop()
        try:
            tasks = os.listdir(f"/proc/{parent}/task")
        except FileNotFoundError:
            continue
        found.append(parent)
        for task in tasks:
            try:
                children = Path(f"/proc/{parent}/task/{task}/children").read_text()
            except FileNotFoundError:
                continue
            todo += map(int, children.split())
    return found


def cpu_ns(pids: Iterable[int]) -> int:
    """Answer user + system time of processes with all their threads, in ns.

    The sum that ``/proc/PID/stat`` gives in ticks of 10 ms, read from each process's
    CPU clock instead (the id is what clock_getcpuclockid(3) computes).
    """
    return sum(time.clock_gettime_ns((~pid << 3) | 2) for pid in pids)


def run_delay_ns(pids: Iterable[int]) -> int:
    """Answer how long processes could have run and had no core, by their main threads, in ns.

    What a busy machine takes from a measurement (second number of ``/proc/PID/schedstat``).
    """
    return sum(int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) for pid in pids)


def pss_bytes(pids: Iterable[int]) -> int:
    """Answer the proportional set size of processes: private pages plus their share of others."""
    total = 0
    for pid in pids:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        match = re.search(r"^Pss:\s+(\d+) kB", rollup, re.MULTILINE)
        assert match is not None, rollup
        total += int(match[1]) * 1024
    return total


def rss_bytes(pids: Iterable[int]) -> int:
    """Answer the resident memory of processes; cheap enough to be asked often."""
    return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids) * _PAGE


_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


def need_descriptors(least: int, wanted: int = 0) -> int:
    """Raise the limit of open files, for this process and what it starts from now on; answer what it is now.

    Args:
        least: without so many nothing can be measured.
        wanted: so many would be better.

    Raises:
        BenchError: there are fewer than ``least``.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for count in (max(least, wanted), hard, least):
        if soft == resource.RLIM_INFINITY or soft >= count:
            break
        with contextlib.suppress(OSError, ValueError):  # the hard one can be raised by few
            resource.setrlimit(resource.RLIMIT_NOFILE, (count, max(hard, count)))
            soft = count
    if soft != resource.RLIM_INFINITY and soft < least:
        raise BenchError(f"needs {least} open files, and may have {hard}: see `ulimit -Hn`")
    return soft if soft != resource.RLIM_INFINITY else sys.maxsize


def descriptors(pids: Iterable[int]) -> int:
    """Answer how many files and sockets the processes have open."""
    return sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)


def socket_memory(pids: Iterable[int]) -> dict[str, int]:
    """Answer the kernel memory of the processes' own TCP sockets, in bytes by ``ss`` field.

    From ``skmem:(r..,rb..,t..,tb..,f..,w..,o..,bl..,d..)`` these are memory in use and
    are counted: r received and unread, t handed down and not freed yet (on loopback
    the receiver owns it at once, so this is about 0), f reserved ahead, w written and
    not acknowledged, o options, bl backlog. rb and tb are limits, d is a count.
    Also ``sockets``, how many were found, and ``total``.
    """
    listing = subprocess.run(
        ["ss", "--tcp", "--all", "--numeric", "--memory", "--processes", "--oneline"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    wanted = set(pids)
    fields = dict.fromkeys(("r", "t", "f", "w", "o", "bl"), 0)
    sockets = 0
    for line in listing.splitlines():
        memory = re.search(r"skmem:\(([^)]*)\)", line)
        if memory is None or wanted.isdisjoint(map(int, re.findall(r"pid=(\d+)", line))):
            continue
        sockets += 1
        for name, size in re.findall(r"([a-z]+)(\d+)", memory[1]):
            if name in fields:
                fields[name] += int(size)
    return fields | {"sockets": sockets, "total": sum(fields.values())}
