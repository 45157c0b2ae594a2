"""The runbooks name only what there is (codes, metrics, events, settings, commands), and forget no alarm."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any, Final

import pytest

from tests.docs.pages import column, page, setting_defaults, table, words
from tests.docs.test_commands import COMMANDS
from tests.docs.test_logs import written
from trio_gateway.admin import SHAPES
from trio_gateway.admission import REASONS
from trio_gateway.contract import Phase
from trio_gateway.errors import CODES
from trio_gateway.wire import REJECTIONS

FAILURES: Final = "how-to/failures.md"
WAITING: Final = "how-to/why-waiting.md"
RUNBOOKS: Final = (
    FAILURES,
    WAITING,
    "how-to/capacity.md",
    "how-to/cold-start.md",
    "how-to/rolling-restart.md",
)
PARTS: Final = re.findall(r"^## (.+)$", page(FAILURES), re.MULTILINE)
COMMAND: Final = re.compile(r"trio-gateway ((?:(?:admin|keys|tenants) )?[a-z][\w-]*)")
SETTING: Final = re.compile(r"[a-z]+(?:\.[a-z_]+)+")
FENCED: Final = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LABEL_WORDS: Final = {"held", "draining", "dropped", "overloaded", "first_token", "no_progress"}


def fields(schema: Mapping[str, Any]) -> set[str]:
    """The names and the words of a shape, those of the shapes inside it too."""
    inner: list[Any] = [*schema.get("properties", {}).values(), *schema.get("anyOf", ())]
    found = {*schema.get("properties", {}), *schema.get("enum", ())}
    for each in (*inner, schema.get("items"), schema.get("additionalProperties")):
        if isinstance(each, dict):
            found |= fields(each)
    return {name for name in found if isinstance(name, str)}


@functools.cache
def events() -> dict[str, str]:
    """The events of the log, each with its level."""
    return {event: level for event, (level, _) in written().items()}


def metrics() -> set[str]:
    return set(column("reference/metrics.md", "Metrics", "Metric"))


@functools.cache
def known() -> frozenset[str]:
    """All names that a runbook may write in code style."""
    names = {*CODES, *events(), *metrics(), *REASONS, *REJECTIONS, *setting_defaults()}
    names |= {*column("reference/records.md", "Outcomes", "Outcome"), *(phase.value for phase in Phase)}
    names |= set(column("reference/statistics.md", "Keys", "Key"))
    names |= set(column("reference/worker-protocol.md", "Log lines", "Event"))
    names |= {word for schema in SHAPES.values() for word in fields(schema)}
    names |= set(column("reference/http-api.md", "Headers that are sent", "Header"))
    names |= set(column("reference/http-api.md", "One's own requests", "Field"))
    names |= {"/livez", "/readyz"}
    names |= {option for command in COMMANDS.values() for each in command.params for option in each.opts}
    return frozenset(names)


@pytest.mark.parametrize("heading", PARTS)
def test_what_the_table_of_failures_names_exists(heading: str) -> None:
    names = known() | LABEL_WORDS
    for row in table(FAILURES, heading):
        for word in words(" ".join(row.values())):
            if word.startswith(("trio-gateway ", "process_", "rejected.", "LimitNOFILE", "batch")):
                continue
            assert word in names, row["What fails"]


@pytest.mark.parametrize("heading", PARTS)
def test_every_failure_says_what_is_seen_and_what_to_do(heading: str) -> None:
    rows = table(FAILURES, heading)
    assert rows
    for row in rows:
        assert list(row) == ["What fails", "Clients get", "You see", "What to do"]
        assert all(row.values()), row


def test_every_code_that_is_not_the_callers_own_fault_stands_in_the_table() -> None:
    told = {
        word for heading in PARTS for row in table(FAILURES, heading) for word in words(row["Clients get"])
    }
    ours = {code for code, info in CODES.items() if info.status >= 500 or info.status in (401, 408, 429)}
    assert ours - told == set()


def test_every_warning_and_error_of_the_log_stands_in_the_table() -> None:
    seen = {word for heading in PARTS for row in table(FAILURES, heading) for word in words(row["You see"])}
    alarms = {event for event, level in events().items() if level in {"warning", "error"}}
    assert alarms - seen == set()


@pytest.mark.parametrize("name", RUNBOOKS)
def test_the_commands_of_a_runbook_exist(name: str) -> None:
    named = set(COMMAND.findall(page(name))) - {"worker"}
    assert named - COMMANDS.keys() <= {"check-config"}


@pytest.mark.parametrize("name", RUNBOOKS)
def test_settings_and_metrics_of_a_runbook_exist(name: str) -> None:
    settings = setting_defaults()
    sections = {key.partition(".")[0] for key in settings}
    text = page(name)
    histograms = {
        row["Metric"].strip("`")
        for row in table("reference/metrics.md", "Metrics")
        if row["Type"] == "histogram"
    }
    series = metrics() | {name + part for name in histograms for part in ("_bucket", "_sum", "_count")}
    assert set(re.findall(r"trio_gateway_[a-z_]+[a-z]", text)) <= series
    for word in words(FENCED.sub("", text)):
        if SETTING.fullmatch(word) and word.partition(".")[0] in sections:
            assert word in known() or word.startswith("admission.tiers.batch."), word


def test_the_defaults_in_brackets_are_the_defaults() -> None:
    settings = setting_defaults()
    sizes = {key: value.strip('"') for key, value in settings.items()}
    for name in RUNBOOKS:
        for setting, default in re.findall(r"`([a-z]+\.[a-z_]+)` \[([^\]]+)\](?!\()", page(name)):
            assert sizes[setting] == default, (name, setting)


def test_every_reason_for_waiting_has_its_row_in_the_order_of_the_code() -> None:
    assert column(WAITING, "What `why` says", "`why`") == list(REASONS)


def test_the_steps_of_the_timeline_are_those_that_are_noted() -> None:
    steps = set(SHAPES["Timeline"]["properties"]["timeline"]["items"]["properties"]["what"]["enum"])
    told = [row["The last step"] for row in table(WAITING, "It has a worker")]
    assert {word for cell in told for word in words(cell)} <= steps
