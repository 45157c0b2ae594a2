"""The command line: ``python -m fuzz [TARGET...] [--seconds N]``.

Each target runs in a process of its own, one after the other; then its corpus
is run again and again to see whether memory grows. Exit status: 0 nothing was
found, 1 something was, 2 it could not be run, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

from .target import TARGETS

FOLDER: Final = Path("build") / "fuzz"
HANG: Final = 20  # seconds until libFuzzer gives one input up
MEMORY_MIB: Final = 1024  # of a fuzzing process
PATIENCE: Final = 120  # seconds beyond its time until a process is ended
PULSE: Final = 30.0  # seconds between two words about the progress

_STATUS: Final = re.compile(r"cov: (\d+) ft: (\d+) corp: (\d+)/\S+ .*?rss: (\d+)Mb")
_FIGURES: Final = re.compile(r"^stat::(\w+): +(\d+)$", re.MULTILINE)


@dataclass(frozen=True)
class Result:
    """What came of one target.

    Attributes:
        coverage, features, corpus: at the beginning and at the end: edges of the code, what libFuzzer
            tells inputs apart by, inputs kept.
        findings: files with inputs that broke a promise, or what else was wrong.
    """

    name: str
    runs: int
    per_second: int
    coverage: tuple[int, int]
    features: tuple[int, int]
    corpus: tuple[int, int]
    peak_mib: int
    blocks: int | None
    rss_kib: int | None
    findings: tuple[str, ...]


def main() -> int:
    """See the module; answers the exit status."""
    parser = argparse.ArgumentParser(prog="fuzz", description="Fuzz what reads strangers' bytes.")
    parser.add_argument("targets", nargs="*", metavar="target", help=f"of: {', '.join(TARGETS)} [all]")
    parser.add_argument("--seconds", type=int, default=600, help="for each target [600]")
    given = parser.parse_args()
    unknown = [name for name in given.targets if name not in TARGETS]
    if unknown:
        parser.error(f"no target {unknown[0]}; there are {', '.join(TARGETS)}")
    if importlib.util.find_spec("atheris") is None:
        _say('fuzz: the package atheris is missing; `make fuzz` installs the extra "fuzz"')
        return 2
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        results = [_fuzz(name, given.seconds) for name in given.targets or TARGETS]
    except KeyboardInterrupt:
        _say("fuzz: stopped; every process it had started was ended")
        return 130
    print(table(results), flush=True)
    return int(any(result.findings for result in results))


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _fuzz(name: str, seconds: int) -> Result:
    """Fuzz one target; its corpus stays in `FOLDER` for the next run."""
    folder = FOLDER / name
    corpus, findings, log = folder / "corpus", folder / "findings", folder / "log"
    corpus.mkdir(parents=True, exist_ok=True)
    findings.mkdir(exist_ok=True)
    before = set(findings.iterdir())
    _say(f"-- {name}: {seconds} seconds")
    options = [
        f"-max_total_time={seconds}",
        f"-timeout={HANG}",
        f"-rss_limit_mb={MEMORY_MIB}",
        "-print_final_stats=1",
    ]
    status = _run(["-m", "fuzz.engine", name, str(corpus), str(findings), *options], log, seconds + PATIENCE)
    found = [str(path) for path in sorted(set(findings.iterdir()) - before)]
    if status and not found:
        found.append(f"exit status {status}, see {log}")
    growth: dict[str, int] = {}
    if not found:
        measured = folder / "growth"
        again = ["-m", "fuzz.endurance", name, str(corpus), str(max(seconds // 10, 1))]
        if _run(again, measured, seconds + PATIENCE):
            found.append(f"memory grows, or an input fails: see {measured}")
        growth = _last_json(measured)
    return read_log(name, log.read_text("utf-8", "replace"), growth, tuple(found))


def _run(arguments: Sequence[str], log: Path, limit: float) -> int:
    """Run a process of this interpreter, its words in a file; it is ended with this one, or at the limit."""
    with (
        log.open("wb") as words,
        subprocess.Popen([sys.executable, *arguments], stdout=words, stderr=subprocess.STDOUT) as process,
    ):
        try:
            until = time.monotonic() + limit
            while time.monotonic() < until:
                try:
                    return process.wait(PULSE)
                except subprocess.TimeoutExpired:
                    _say_progress(log)
            return -1
        finally:
            process.kill()


def _say_progress(log: Path) -> None:
    lines = [line for line in log.read_text("utf-8", "replace").splitlines() if line.startswith("#")]
    if lines:
        _say(f"   {lines[-1].split(' L: ')[0]}")


def _last_json(path: Path) -> dict[str, int]:
    lines = [line for line in path.read_text("utf-8", "replace").splitlines() if line.startswith("{")]
    return dict(json.loads(lines[-1])) if lines else {}


def read_log(name: str, log: str, growth: dict[str, int], findings: tuple[str, ...]) -> Result:
    """Read what libFuzzer said."""
    states = [[int(figure) for figure in found] for found in _STATUS.findall(log)] or [[0, 0, 0, 0]]
    figures = {key: int(value) for key, value in _FIGURES.findall(log)}
    first, last = states[0], states[-1]
    return Result(
        name=name,
        runs=figures.get("number_of_executed_units", 0),
        per_second=figures.get("average_exec_per_sec", 0),
        coverage=(first[0], last[0]),
        features=(first[1], last[1]),
        corpus=(first[2], last[2]),
        peak_mib=figures.get("peak_rss_mb", last[3]),
        blocks=growth.get("blocks"),
        rss_kib=growth.get("rss_kib"),
        findings=findings,
    )


_COLUMNS: Final = ("target", "runs", "runs/s", "edges", "features", "corpus", "peak MiB", "growth", "found")


def table(results: Sequence[Result]) -> str:
    """Write the results for people."""
    rows = [_COLUMNS, *(_row(result) for result in results)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    found = [f"{result.name}: {finding}" for result in results for finding in result.findings]
    return "\n".join([*(line.rstrip() for line in lines), *found])


def _row(result: Result) -> tuple[str, ...]:
    pairs = (result.coverage, result.features, result.corpus)
    growth = "" if result.blocks is None else f"{result.blocks:+,} blocks, {result.rss_kib:+,} KiB"
    return (
        result.name,
        f"{result.runs:,}",
        f"{result.per_second:,}",
        *(f"{first:,} > {last:,}" for first, last in pairs),
        f"{result.peak_mib:,}",
        growth,
        str(len(result.findings)),
    )
