"""The report of the sweeps, at the end of every test run that had some."""

from __future__ import annotations

from collections.abc import Callable

import pytest

ROWS: pytest.StashKey[dict[str, dict[str, tuple[int, int]]]] = pytest.StashKey()
Report = Callable[[str, str, int, int], None]


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Report:
    """Takes a story, a way to end it, how many moments were tried, and at how many something was left."""
    rows = request.config.stash.setdefault(ROWS, {})

    def write_down(story: str, way: str, moments: int, unclean: int) -> None:
        rows.setdefault(story, {})[way] = (moments, unclean)

    return write_down


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print one line for each story."""
    rows = config.stash.get(ROWS, {})
    if not rows:
        return
    terminalreporter.section("sweeps: ended at every moment of a story, then everything counted")
    width = max(map(len, rows))
    total = 0
    for story, ways in rows.items():
        moments, unclean = (sum(counts) for counts in zip(*ways.values(), strict=True))
        total += moments
        verdict = "all clean" if not unclean else f"{unclean} NOT CLEAN"
        terminalreporter.line(f"{story:<{width}}  {moments:>6} moments in {len(ways)} ways  {verdict}")
    terminalreporter.line(f"{'together':<{width}}  {total:>6} moments")
