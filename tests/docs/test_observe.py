"""Dashboard and alerts name metrics and labels that there are, and Prometheus' own tool takes them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from typing import Final

import pytest

from tests.docs.pages import DOCS, PACKAGE, section, table, words
from tests.telemetry.test_metrics import STATISTICS
from trio_gateway.telemetry import render_metrics

FOLDER: Final = DOCS / "how-to" / "observe"
DASHBOARD: Final = json.loads((FOLDER / "dashboard.json").read_text("utf-8"))
# Each rule as its text; promtool reads them as what they are.
RULES: Final = (FOLDER / "alerts.yml").read_text("utf-8").split("- alert: ")[1:]
METRIC: Final = re.compile(r"\b(?:trio_gateway|process)_[a-z_]+\b")
# One metric with what is asked of its labels.
ASKED: Final = re.compile(r"\b((?:trio_gateway|process)_[a-z_]+)\{([^}]*)\}")
GROUPED: Final = re.compile(r"by \(([^)]*)\)")
SCRAPED: Final = {"instance", "job"}  # labels that Prometheus adds

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian: apt-get install prometheus)"
)


def known() -> dict[str, set[str]]:
    """Labels of each metric, by the names that queries use."""
    found: dict[str, set[str]] = {}
    for row in table("reference/metrics.md", "Metrics"):
        name, labels = words(row["Metric"])[0], set(words(row["Labels"]))
        if row["Type"] == "histogram":
            found |= {f"{name}_bucket": labels, f"{name}_sum": labels, f"{name}_count": labels}
        else:
            found[name] = labels
    page = b"".join(render_metrics(STATISTICS)).decode()
    return found | {name: set() for name in re.findall(r"^# TYPE (process_\w+)", page, re.MULTILINE)}


def expressions() -> list[str]:
    """Every query of dashboard and alerts."""
    panels = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    variables = [
        each["query"]["query"] for each in DASHBOARD["templating"]["list"] if each["type"] == "query"
    ]
    rules = [re.search(r"expr:(.*?)\n +(?:for|labels):", rule, re.DOTALL) for rule in RULES]
    return [*panels, *variables, *(found[1] for found in rules if found is not None)]


@pytest.mark.parametrize("expression", expressions())
def test_a_query_asks_for_metrics_and_labels_that_there_are(expression: str) -> None:
    metrics = known()
    named = METRIC.findall(expression)
    assert named
    assert set(named) <= metrics.keys()
    for name, matchers in ASKED.findall(expression):
        assert set(re.findall(r"(\w+)=", matchers)) <= metrics[name] | SCRAPED
    for group in GROUPED.findall(expression):
        labels = set(group.replace(" ", "").split(","))
        assert labels <= set().union(*(metrics[name] for name in named)) | SCRAPED


def test_the_dashboard_shows_every_metric() -> None:
    shown = set(METRIC.findall(json.dumps(DASHBOARD)))
    missing = {
        name
        for row in table("reference/metrics.md", "Metrics")
        if not shown & {name := words(row["Metric"])[0], f"{name}_bucket"}
    }
    assert missing == set()


def test_panels_do_not_overlap_and_each_says_what_it_shows() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        taken |= cells
        assert panel["type"] == "row" or panel["description"]
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))


def test_the_queries_of_the_page_on_watching_are_real_too() -> None:
    named = set(METRIC.findall(section("how-to/watch.md", "Scrape it with Prometheus")))
    assert named <= known().keys()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.partition("\n")[0])
def test_an_alert_says_how_urgent_it_is_and_what_it_means(rule: str) -> None:
    assert re.search(r"labels: \{severity: (page|ticket)\}", rule)
    assert METRIC.search(rule)
    assert [re.search(rf"^ +{key}: \S", rule, re.MULTILINE) for key in ("summary", "description")].count(
        None
    ) == 0


def test_the_attributes_of_spans_are_described() -> None:
    source = (PACKAGE / "telemetry" / "_spans.py").read_text("utf-8")
    written = set(re.findall(r'"((?:gen_ai|trio_gateway|server|http|error)\.[a-z_.]+)"', source))
    described = {
        word for row in table("how-to/observe/README.md", "Traces") for word in words(row["Attributes"])
    }
    assert described == written


@needs_promtool
def test_prometheus_own_tool_takes_the_rules_and_they_do_what_their_tests_say() -> None:
    for arguments in (("check", "rules", "alerts.yml"), ("test", "rules", "alerts.test.yml")):
        done = subprocess.run(
            ["promtool", *arguments], cwd=FOLDER, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_prometheus_own_tool_finds_no_fault_with_the_page_of_metrics() -> None:
    done = subprocess.run(
        ["promtool", "check", "metrics"],
        input=b"".join(render_metrics(STATISTICS)),
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")
