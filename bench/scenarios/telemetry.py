"""What do metrics cost a token, and a request?

Question    How much more does the gateway compute for a token, and for a request, when all metrics are
            on than when there are none, and what do traces add?
Load        exchanges in this process over recorded bytes (`replay.py`): no socket, no server, no JSON
            body, so that what metrics cost is not hidden behind them. token: each comes in a read of its
            own, as paced ones do. request: an exchange of two tokens.
            And scrapes (`scraping.py`): a gateway with 1,000 exchanges, 20 workers, and counts of 100 tenants
            with 5 models each is asked for its page of metrics, ten times.
Engines     none.
Measures    instructions, counted by callgrind in a process of its own, of each part between two marks;
            of a token, those of an exchange of so many tokens less those of a short one. Where there is
            no valgrind: CPU time, the least of 20 runs. `traces` is what exporting adds to the loop;
            encoding and sending are a thread's, and not in it. Nor is the watch over the loop: it costs by
            the second, at most 0.3 % of a core.
            Of scrapes: CPU of the snapshot, which the loop makes, and the longest time without the loop.
Baseline    the same exchanges with the equations of conservation alone.
Expect      on at most 1.05 times off for a token and 1.15 for a request; by time 1.10 and 1.15. Scraping
            stops the loop for at most 5 ms.
Run         make bench SCENARIO=telemetry     (about 3 min)
Output      bench/results/<date>-telemetry-<commit>.json, with machine facts.
"""

from __future__ import annotations

import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import trio

from .. import replay, scraping
from ..command import Options, main, progress
from ..processes import BenchError
from ..report import Check, Report

TOKEN_LIMIT: Final = 1.05  # times off, by instructions
TOKEN_LIMIT_BY_TIME: Final = 1.10
REQUEST_LIMIT: Final = 1.15
REQUESTS: Final = 100
TOKENS: Final = 2_000
RUNS_BY_TIME: Final = 20
PATIENCE: Final = 900  # seconds for callgrind, under which all is fifty times slower
SCRAPES: Final = 10
PAUSE_LIMIT_MS: Final = 5.0
MARK: Final = "getpgid"  # what `replay.mark` calls

Costs = dict[tuple[str, str], float]


def run(options: Options) -> Report:
    """Count; see the module's docstring."""
    requests, tokens = options.some(REQUESTS), options.some(TOKENS)
    if shutil.which("valgrind") is None:
        progress("no valgrind: by time")
        runs = options.some(RUNS_BY_TIME)
        wholes = trio.run(replay.least_us, runs, requests, tokens, progress)
        return _with_scrapes(_report(wholes, requests, tokens, "us", TOKEN_LIMIT_BY_TIME), options)
    progress("under callgrind; this takes a minute or two")
    counts = instructions(requests, tokens)
    return _with_scrapes(_report(counts, requests, tokens, "instructions", TOKEN_LIMIT), options)


def instructions(requests: int, tokens: int) -> Costs:
    """Answer the instructions of each part, the mean where it was played twice."""
    with tempfile.TemporaryDirectory(prefix="bench-telemetry-") as folder:
        command = [
            "valgrind",
            "--tool=callgrind",
            f"--dump-before={MARK}",
            "--combine-dumps=no",
            f"--callgrind-out-file={folder}/out",
            *(sys.executable, "-m", "bench.replay", str(requests), str(tokens)),
        ]
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
            )
        except subprocess.TimeoutExpired:
            raise BenchError(f"callgrind was not through after {PATIENCE} s") from None
        if done.returncode:
            raise BenchError(f"callgrind failed: {done.stderr[-500:]}")
        counts = [_total(path) for path in sorted(Path(folder).glob("out.*"), key=_number)]
    parts = replay.parts_of(requests, tokens)
    # The first dump is what came before the first mark, the last what came after the last one.
    if len(counts) < len(parts) + 1:
        raise BenchError(f"callgrind saw {len(counts)} parts, not {len(parts) + 1}: {MARK} was not seen")
    found: dict[tuple[str, str], list[int]] = {}
    for (unit, name, _, _), count in zip(parts, counts[1:], strict=False):
        found.setdefault((unit, name), []).append(count)
    return {key: sum(several) / len(several) for key, several in found.items()}


def _number(path: Path) -> int:
    return int(path.suffix.removeprefix("."))


def _total(path: Path) -> int:
    found = re.search(r"^(?:totals|summary): (\d+)", path.read_text("utf-8", "replace"), re.MULTILINE)
    if found is None:
        raise BenchError(f"callgrind left no total in {path.name}")
    return int(found[1])


def _report(wholes: Costs, requests: int, tokens: int, unit: str, token_limit: float) -> Report:
    report = Report("telemetry", (f"{unit} for one", "off", "on", "with traces", "times off", "limit"))
    names = ("off", "on", "traces")
    each = {
        "token": {name: (wholes["token", name] - wholes["one", name]) / tokens for name in names},
        "request": {name: wholes["request", name] / requests for name in names},
    }
    for what, limit in (("token", token_limit), ("request", REQUEST_LIMIT)):
        cost = each[what]
        ratio = cost["on"] / cost["off"]
        figures = [f"{cost[name]:,.1f}" for name in names]
        report.rows.append((what, *figures, f"{ratio:.3f}", f"{limit}"))
        report.checks.append(Check.at_most(f"{unit} a {what}", ratio, limit, "times off"))
        report.notes.append(f"{what}: with traces {cost['traces'] / cost['off']:.3f} times off")
    report.raw = {f"{part}, {name}": value for (part, name), value in wholes.items()}
    return report


def _with_scrapes(report: Report, options: Options) -> Report:
    progress("scrapes")
    runs = [trio.run(scraping.scrape, SCRAPES) for _ in range(options.runs)]
    snapshot, page, pause = (statistics.median(run[n] for run in runs) for n in range(3))
    report.checks.append(Check.at_most("longest pause of scrapes", pause, PAUSE_LIMIT_MS, "ms"))
    report.notes.append(
        f"a scrape of {runs[0][3] // 1024} KiB: {snapshot:.1f} ms for the snapshot, {page:.1f} ms in all"
    )
    report.raw["scrapes"] = runs
    return report


if __name__ == "__main__":
    sys.exit(main("telemetry"))
