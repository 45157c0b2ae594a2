"""The C programs: compiled when their source is newer, run, and ended.

They are bounded on their own as well: each ends with the process that started it,
and after its ``--limit-s`` whatever happens.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from .processes import BenchError, Child

HERE: Final = Path(__file__).parent
SOURCES: Final = HERE / "native"
BUILD: Final = HERE / "build"
LIMIT_S: Final = 180  # no single run of the load client takes longer

Answer = dict[str, Any]


def program(name: str) -> Path:
    """Answer the path of ``engine``, ``client`` or ``arrivals``, compiling it first if it is stale."""
    source, header = SOURCES / f"{name}.c", SOURCES / "common.h"
    binary = BUILD / name
    newest = max(source.stat().st_mtime, header.stat().st_mtime)
    if binary.exists() and binary.stat().st_mtime > newest:
        return binary
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise BenchError("the bench needs a C compiler: apt-get install gcc libc6-dev")
    BUILD.mkdir(exist_ok=True)
    command = [compiler, "-O2", "-Wall", "-Wextra", "-Wno-format-truncation", "-o", str(binary)]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchError(f"{source.name} does not compile:\n{done.stderr}")
    return binary


def _arguments(options: Mapping[str, object]) -> list[str]:
    flat: list[str] = []
    for name, value in options.items():
        number = int(value) if isinstance(value, (bool, float)) else value
        flat += [f"--{name.replace('_', '-')}", str(number)]
    return flat


def load(mode: str, port: int, pids: Sequence[int] = (), **options: object) -> Answer:
    """Run the load client to its end and answer what it measured.

    Options are those of ``native/client.c`` with underscores; ``pids`` are the
    processes whose CPU it reads at both ends of its window.

    Raises:
        BenchError: it failed, or ran past ``limit_s`` seconds.
    """
    with loading(mode, port, pids, **options) as client:
        return result_of(client)


@contextmanager
def loading(mode: str, port: int, pids: Sequence[int] = (), **options: object) -> Iterator[Child]:
    """Run the load client while the block runs, beside what that does; see `load` and `result_of`.

    With the option ``processor``, a number, it runs on that one only.
    """
    options.setdefault("limit_s", LIMIT_S)
    processor = options.pop("processor", None)
    fixed = {"mode": mode, "port": port, "pids": ",".join(map(str, pids))}
    with Child([str(program("client")), *_arguments(fixed | options)], name="client") as client:
        if isinstance(processor, int):
            os.sched_setaffinity(client.pid, {processor})
        yield client


def arrivals(port: int, pids: Sequence[int] = (), **options: object) -> Answer:
    """Let clients come at a rate, served or not, and answer what they got.

    Options are those of ``native/arrivals.c`` with underscores.

    Raises:
        BenchError: it failed, or ran past ``limit_s`` seconds.
    """
    options.setdefault("limit_s", LIMIT_S)
    fixed = {"port": port, "pids": ",".join(map(str, pids))}
    with Child([str(program("arrivals")), *_arguments(fixed | options)], name="arrivals") as client:
        return result_of(client)


def result_of(client: Child) -> Answer:
    """Wait for a load client's own end and answer what it measured.

    Raises:
        BenchError: it failed, or ran past its limit.
    """
    output, code = client.finish(LIMIT_S + 10)
    if code:
        why = "ran past its limit" if code < 0 else f"exited with {code}"
        raise BenchError(f"the load client {why}: {client.log_tail()}")
    answer: Answer = json.loads(output.splitlines()[-1])
    return answer


@contextmanager
def holding(port: int, **options: object) -> Iterator[Child]:
    """Keep streams open that nobody reads, while the block runs.

    Enters when every request was written. They are closed at the end of the block,
    by reset where bytes are unread.
    """
    options.setdefault("limit_s", LIMIT_S)
    fixed = {"mode": "hold", "port": port, "hold_ms": LIMIT_S * 1000}
    arguments = [str(program("client")), *_arguments(fixed | options)]
    with Child(arguments, name="holder", stdin=True) as holder:
        if holder.read_line(60) != "ready":
            raise BenchError(f"the holding client did not get ready: {holder.log_tail()}")
        yield holder


def release(holder: Child) -> Answer:
    """End a holding client and answer what it saw; ``good`` = still open at the end."""
    holder.close_stdin()
    return result_of(holder)
