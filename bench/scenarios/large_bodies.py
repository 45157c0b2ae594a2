"""How long may one large body keep everybody else waiting while it is read?

Question    A parser in C holds Python's interpreter until it is done, even in a thread.
            When bodies of 18 MB and of the most values are read, what is the longest
            time in which the loop could not run?
Load        each shape of `BODIES`, five times, read as the gateway reads: in a thread,
            with the gateway's switch interval, beside a task that wakes up every half
            millisecond.
Engines     none: what is measured is `trio_gateway.wire`, in this process.
Measures    CPU time of the process between two wake-ups of that task, less the time it
            meant to sleep; the greatest per reading, and of those the median of the runs.
            CPU time, not wall time: what other processes take is not the reader's doing. Where
            all cores are busy the loop waits for one while the reader goes on, and that counts.
            The first row reads nothing.
Baseline    jiter, which builds the whole body in one step.
Expect      at most 5 ms in every row.
Run         make bench SCENARIO=large_bodies     (about 1 min on 2 cores)
Output      bench/results/<date>-large_bodies-<commit>.json, with machine facts.
"""

from __future__ import annotations

import contextlib
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Final

import jiter
import trio

from trio_gateway.errors import Refused
from trio_gateway.gateway import SWITCH_INTERVAL
from trio_gateway.wire import read_form_body, read_object

from ..command import Options, main, progress
from ..report import Check, Report, spread

LIMIT_MS: Final = 5.0
MUCH: Final = 18_000_000  # bytes
MANY: Final = 189_000  # values
VALUES: Final = 200_000  # that a body may have
NAP: Final = 0.0005

Read = Callable[[bytes], object]


def _object(field: bytes) -> bytes:
    return b'{"model":"m","messages":[{"role":"user","content":"hi"}],"x":' + field + b"}"


def _form(file: bytes) -> bytes:
    head = b'--b\r\nContent-Disposition: form-data; name="'
    return head + b'model"\r\n\r\nm\r\n' + head + b'file"; filename="a"\r\n\r\n' + file + b"\r\n--b--\r\n"


BODIES: Final[dict[str, Callable[[], bytes]]] = {
    "nothing": lambda: b"{}",
    "one text": lambda: _object(b'"' + b"x" * MUCH + b'"'),
    "text of two-byte characters": lambda: _object(b'"' + "\u00e9".encode() * (MUCH // 2) + b'"'),
    "line ends, escaped": lambda: _object(b'"' + b"\\n" * (MUCH // 2) + b'"'),
    "characters, escaped": lambda: _object(b'"' + b"\\u00e9" * (MUCH // 6) + b'"'),
    "token ids": lambda: _object(b"[" + b",".join([b"151234"] * MANY) + b"]"),
    "fractions": lambda: _object(b"[" + b",".join([b"0.5"] * MANY) + b"]"),
    "texts": lambda: _object(b"[" + b",".join([b'"' + b"x" * 90 + b'"'] * MANY) + b"]"),
    "names": lambda: _object(b"{" + b",".join(b'"k%d":1' % at for at in range(MANY)) + b"}"),
    "objects": lambda: _object(b"[" + b",".join([b'{"a":1}'] * (MANY // 2)) + b"]"),
    "one number": lambda: _object(b"0." + b"7" * MUCH),
    "blanks": lambda: _object(b" " * MUCH + b"1"),
    "fields": lambda: _object(b"1," + b",".join(b'"k%d":1' % at for at in range(MANY))),
    "a form": lambda: _form(os.urandom(MUCH)),
    "a form that nearly ends often": lambda: _form(b"\r\n--" * (MUCH // 4)),
}


def run(options: Options) -> Report:
    """Read every shape; see the module's docstring."""
    report = Report("large_bodies", ("body", "ms without the loop", "jiter at once, ms", "whole, ms"))
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL)
    gc.freeze()  # as the gateway does
    try:
        for name, make in BODIES.items():
            progress(name)
            _measure(name, make(), options, report)
    finally:
        sys.setswitchinterval(before)
    return report


def _measure(name: str, body: bytes, options: Options, report: Report) -> None:
    pauses, wholes = [], []
    for _ in range(options.runs):
        began = time.perf_counter()
        pauses.append(trio.run(_longest_pause, body, _reader(name)))
        wholes.append((time.perf_counter() - began) * 1e3)
    jiter_ms = "" if name.startswith("a form") else f"{_at_once_ms(body):,.0f}"
    report.rows.append((name, spread(pauses), jiter_ms, spread(wholes, 0)))
    report.checks.append(Check.at_most(f"pause for {name}", statistics.median(pauses), LIMIT_MS, "ms"))
    report.raw[name] = {"pauses_ms": pauses, "whole_ms": wholes}


def _reader(name: str) -> Read:
    if name.startswith("a form"):
        return lambda body: read_form_body(body, b"multipart/form-data; boundary=b")
    return lambda body: read_object(body, VALUES)


async def _longest_pause(body: bytes, read: Read) -> float:
    """Milliseconds of CPU, at most, in which the watching task could not run."""
    longest = 0.0

    def read_or_refuse(body: bytes) -> None:
        with contextlib.suppress(Refused):
            read(body)

    async def watch() -> None:
        nonlocal longest
        while True:
            spent = time.process_time()
            await trio.sleep(NAP)
            longest = max(longest, time.process_time() - spent - NAP)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        await trio.to_thread.run_sync(read_or_refuse, body)
        await trio.sleep(4 * NAP)
        nursery.cancel_scope.cancel()
    return longest * 1e3


def _at_once_ms(body: bytes) -> float:
    began = time.thread_time()
    with contextlib.suppress(ValueError):
        jiter.from_json(body, catch_duplicate_keys=True)
    return (time.thread_time() - began) * 1e3


if __name__ == "__main__":
    sys.exit(main("large_bodies"))
