"""Writes what was measured into the documentation: tables and pictures of docs/explanation/performance.md.

``python -m bench.page`` takes the newest result of each scenario from ``results/``, keeps a copy beside the
page, and renders from the copies whatever stands between a marker and its end, such as
``<!-- figures: scale -->`` and ``<!-- end of figures -->``. ``--render`` does only the last, so that the page
can be made again from what is kept. ``--measure`` runs the scenarios first, on a machine that is quiet:
figures of a busy one are not for a page.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from .plot import Bar, BarChart, Chart, Line
from .report import RESULTS, Check, quartiles, with_quartiles
from .routers import SLOW

PAGE: Final = Path(__file__).parent.parent / "docs" / "explanation" / "performance.md"
KEPT: Final = PAGE.with_suffix("")  # a folder with the results and the pictures
SCENARIOS: Final = ("overhead", "scale", "memory", "websocket")
QUIET: Final = 0.3  # load average over a minute, below which a machine counts as quiet
MARKED: Final = re.compile(r"<!-- figures: ([a-z ]+) -->\n.*?<!-- end of figures -->", re.DOTALL)
NOTHING: Final = "Not measured yet."
OURS: Final = ("pass-through", "full")

Result = Mapping[str, Any]


# What is kept -----------------------------------------------------------------------------------------------


def newest(scenario: str) -> Path | None:
    """Answer the newest result of a scenario; None: there is none."""
    return max(RESULTS.glob(f"*Z-{scenario}-*.json"), default=None)


def keep(scenarios: Iterable[str]) -> None:
    """Copy the newest results beside the page."""
    KEPT.mkdir(exist_ok=True)
    for scenario in scenarios:
        if (path := newest(scenario)) is not None:
            (KEPT / f"{scenario}.json").write_text(path.read_text())


def kept() -> dict[str, Result]:
    """Answer the results that are kept, by scenario."""
    paths = {scenario: KEPT / f"{scenario}.json" for scenario in SCENARIOS}
    return {scenario: json.loads(path.read_text()) for scenario, path in paths.items() if path.exists()}


# Tables -----------------------------------------------------------------------------------------------------


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, figures: bool = True) -> str:
    """Answer a table; what is right of the first column are figures, or words."""
    lines = [columns, ["---", *("---:" if figures else "---" for _ in columns[1:])], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def overhead_table(result: Result) -> str:
    """Figures down, proxies across: median and quartiles."""
    found: Mapping[str, Mapping[str, Sequence[float]]] = result["raw"]["figures"]
    names = [*(name for name in found if name not in OURS), *(name for name in OURS if name in found)]
    # Two columns of the printed table have the unit behind the name of the figure.
    rows = [
        (column, *(with_quartiles(found[name].get(column.rpartition(",")[0], [])) for name in names))
        for column in result["columns"][1:]
    ]
    missing = [f"{name} could not be measured: {why}" for name, why in result["raw"]["missing"].items()]
    return "\n\n".join([table(["", *names], rows), *missing])


def whole_table(result: Result) -> str:
    return table([name or " " for name in result["columns"]], result["rows"])


def checks_table(results: Mapping[str, Result]) -> str:
    """Every promise of the scenarios, and whether it was kept."""
    rows = []
    for scenario, result in results.items():
        for told in result["checks"]:
            check = Check(**told)
            limit = f"{check.sense} {check.limit:.4g}"
            rows.append(
                (
                    scenario,
                    check.what,
                    f"{check.value:.4g}",
                    limit,
                    check.unit,
                    "yes" if check.kept else "**no**",
                )
            )
    columns = ["scenario", "promise", "measured", "limit", "unit", "kept"]
    return table(columns, rows, figures=False)


def machine_table(results: Mapping[str, Result]) -> str:
    rows = []
    for scenario, result in results.items():
        facts, options = result["machine"], result["options"]
        rows.append(
            (
                scenario,
                result["at"][:16].replace("T", " ") + " UTC",
                str(options["runs"]),
                f"{facts['cpu']}, {facts['cores']} cores",
                facts["kernel"],
                facts["python"],
                str(facts["nginx"]),
                str(facts["commit"]),
            )
        )
    columns = ["scenario", "when", "runs", "processor", "kernel", "Python", "nginx", "commit"]
    return table(columns, rows, figures=False)


# Pictures ---------------------------------------------------------------------------------------------------


def bar_charts(result: Result) -> dict[str, str]:
    """Answer SVG by file name: what each proxy spends, without those that need another scale."""
    found: Mapping[str, Mapping[str, Sequence[float]]] = result["raw"]["figures"]
    pictures = {}
    for what in ("paced token", "unpaced token", "buffered request"):
        bars = [
            Bar(name, *quartiles(figures[what]), ours=name in OURS)
            for name, figures in found.items()
            if name not in SLOW and figures.get(what)
        ]
        title = f"CPU of a {what}".replace("a unpaced", "an unpaced")
        if bars:
            pictures[f"{what.replace(' ', '-')}.svg"] = BarChart(title, "us", bars).svg()
    return pictures


def scale_charts(result: Result) -> dict[str, str]:
    """Answer SVG by file name: times the smallest number, over the number."""
    lines: dict[str, list[Line]] = {}
    for name, found in result["raw"].items():
        unit, _, grows = name.partition(" by ")
        middle = sorted((int(number), statistics.median(told)) for number, told in found.items())
        least = middle[0][1]
        points = [(float(number), value / least) for number, value in middle]
        lines.setdefault(grows, []).append(Line(unit, points))
    return {
        f"scale-{grows}.svg": Chart(
            f"CPU, in times the smallest number of {grows}", grows, "times", several, 1.5
        ).svg()
        for grows, several in lines.items()
    }


def pictures_of(results: Mapping[str, Result]) -> dict[str, str]:
    """Answer every picture of the page, by file name."""
    found: dict[str, str] = {}
    if "overhead" in results:
        found |= bar_charts(results["overhead"])
    if "scale" in results:
        found |= scale_charts(results["scale"])
    return found


def shown(names: Iterable[str]) -> str:
    """Answer the lines that show pictures, those that there are."""
    return "\n\n".join(f"![{Path(name).stem.replace('-', ' ')}]({KEPT.name}/{name})" for name in names)


# The page ---------------------------------------------------------------------------------------------------


def blocks(results: Mapping[str, Result]) -> dict[str, str]:
    """Answer what belongs between the markers, by their names."""
    makers: dict[str, tuple[str, Callable[[Result], str]]] = {
        "overhead": ("overhead", overhead_table),
        "overhead pictures": ("overhead", lambda result: shown(bar_charts(result))),
        "scale": ("scale", whole_table),
        "scale pictures": ("scale", lambda result: shown(scale_charts(result))),
        "memory": ("memory", whole_table),
        "websocket": ("websocket", whole_table),
    }
    found = {
        name: make(results[scenario]) if scenario in results else NOTHING
        for name, (scenario, make) in makers.items()
    }
    found["promises"] = checks_table(results) if results else NOTHING
    found["machine"] = machine_table(results) if results else NOTHING
    return found


def rendered(page: str, results: Mapping[str, Result]) -> str:
    """Answer the page with everything between markers made anew.

    Raises:
        KeyError: a marker has a name that no figures have.
    """
    known = blocks(results)
    return MARKED.sub(
        lambda found: f"<!-- figures: {found[1]} -->\n\n{known[found[1]]}\n\n<!-- end of figures -->", page
    )


def write() -> None:
    """Make the page and its pictures anew from what is kept."""
    results = kept()
    PAGE.write_text(rendered(PAGE.read_text(), results))
    for name, picture in pictures_of(results).items():
        (KEPT / name).write_text(picture)


def main() -> int:
    """Measure if asked to, keep and render; answer the exit status."""
    parser = argparse.ArgumentParser(prog="bench.page", description="Write what was measured into the page.")
    parser.add_argument("--measure", action="store_true", help="run the scenarios first")
    parser.add_argument("--render", action="store_true", help="only from what is kept beside the page")
    parser.add_argument("--busy", action="store_true", help="measure although the machine is not quiet")
    given, others = parser.parse_known_args()
    if given.measure:
        load = os.getloadavg()[0]
        if load > QUIET and not given.busy:
            print(
                f"the machine is busy: load average {load:.2f}; figures of it are not for a page",
                file=sys.stderr,
            )
            return 2
        measured = subprocess.run([sys.executable, "-m", "bench", *SCENARIOS, *others], check=False)
        if measured.returncode:
            print("not written: run what is missing, then `python -m bench.page`", file=sys.stderr)
            return measured.returncode
    if not given.render:
        keep(SCENARIOS)
    write()
    print(f"written: {PAGE.relative_to(Path.cwd()) if PAGE.is_relative_to(Path.cwd()) else PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
