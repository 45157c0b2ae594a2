"""What a scenario hands back, how it is printed, and the file it leaves behind."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

RESULTS: Final = Path(__file__).parent / "results"
PACKAGES: Final = ("trio-gateway", "trio", "h11", "httptools", "pydantic", "msgspec", "jiter")


@dataclass(frozen=True)
class Check:
    """One promise: a measured value, the limit it must keep, in which sense, and whether it did."""

    what: str
    value: float
    limit: float
    unit: str
    kept: bool
    sense: str = "at most"

    @classmethod
    def at_most(cls, what: str, value: float, limit: float, unit: str) -> Check:
        return cls(what, value, limit, unit, value <= limit)

    @classmethod
    def at_least(cls, what: str, value: float, limit: float, unit: str) -> Check:
        return cls(what, value, limit, unit, value >= limit, "at least")

    @classmethod
    def exactly(cls, what: str, value: float, expected: float, unit: str) -> Check:
        return cls(what, value, expected, unit, value == expected, "must be")

    def __str__(self) -> str:
        figure = f"{self.value:,.5g} {self.unit}".strip()
        return f"{'ok    ' if self.kept else 'FAILED'} {self.what}: {figure} ({self.sense} {self.limit:,.5g})"


@dataclass
class Report:
    """A scenario's outcome: a table for people, checks for `--check`, raw figures for the file."""

    scenario: str
    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    raw: dict[str, Any] = field(default_factory=dict)

    @property
    def kept(self) -> bool:
        return all(check.kept for check in self.checks)

    def text(self) -> str:
        lines = [f"== {self.scenario}", *_aligned([self.columns, *self.rows]), ""]
        lines += map(str, self.checks)
        lines += (f"note {note}" for note in self.notes)
        return "\n".join(lines)

    def save(self, options: dict[str, Any]) -> Path:
        """Write a dated JSON file with the facts of the machine; answer its path."""
        now = datetime.datetime.now(datetime.UTC)
        facts = machine_facts()
        path = RESULTS / f"{now:%Y%m%dT%H%M%SZ}-{self.scenario}-{facts['commit'] or 'uncommitted'}.json"
        content = dataclasses.asdict(self) | {"at": now.isoformat(), "options": options, "machine": facts}
        RESULTS.mkdir(exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n")
        return path


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def spread(values: Iterable[float], digits: int = 1) -> str:
    """Write the median and, behind it, least and most: ``18.2 (17.9-18.8)``."""
    ordered = sorted(values)
    if not ordered:
        return "-"
    middle = statistics.median(ordered)
    return f"{middle:.{digits}f} ({ordered[0]:.{digits}f}-{ordered[-1]:.{digits}f})"


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Answer the first quartile, the median and the third one; of one value, that value."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def with_quartiles(values: Sequence[float]) -> str:
    """Write the median and, behind it, the quartiles, to three digits: ``18.2 (17.9-18.8)``; ``-``: none."""
    if not values:
        return "-"
    low, middle, high = quartiles(values)
    digits = max(0, 2 - math.floor(math.log10(middle))) if middle > 0 else 2
    return f"{middle:,.{digits}f} ({low:,.{digits}f}-{high:,.{digits}f})"


def quantile(values: Sequence[float], share: float) -> float:
    """Answer the smallest value that at least this share of the values do not exceed."""
    ordered = sorted(values)
    rank = max(1, -int(-share * len(ordered) // 1))
    return ordered[min(rank, len(ordered)) - 1]


def machine_facts() -> dict[str, Any]:
    """Answer what another run must share to be compared with this one."""
    return {
        "kernel": platform.release(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_kib": _first_number("/proc/meminfo"),
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "nginx": _nginx_version(),
        "commit": _commit(),
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _first_number(path: str) -> int:
    return int(Path(path).read_text().split()[1])


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _nginx_version() -> str | None:
    binary = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if binary is None:
        return None
    asked = subprocess.run([binary, "-v"], capture_output=True, text=True, check=False)
    return asked.stderr.strip().rpartition("/")[2] or None


def _commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return asked.stdout.strip() or None
