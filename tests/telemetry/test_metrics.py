"""The page for Prometheus: every figure under its documented name, and labels that no text can break."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from trio_gateway.telemetry import METRICS_TYPE, render_metrics

STATISTICS: dict[str, Any] = {
    "version": "1.2.3",
    "connections": 7,
    "running": 3,
    "buffered_bytes": 4096,
    "buffered_per_exchange": {"max": 3000, "p99": 1000},
    "held_up": 2,
    "delivery_lag": {"batches": 9, "seconds": 4.5, "buckets": {"0.1": 7, "1.0": 8, "+Inf": 9}},
    "queue": {
        "depth": 5,
        "bytes": 500,
        "tiers": {"interactive": 0, "standard": 3, "batch": 2},
        "tenants": {"acme": 4, "other": 1},
    },
    "conservation": {"ok": True, "errors": []},
    "workers": [
        {
            "id": "gpu-0",
            "held": 3,
            "draining": 1,
            "faults": 2,
            "attempts": 9,
            "ready": True,
            "snapshot_age": 0.5,
            "breakers": {"m": "closed", "n": "trying"},
        },
        {
            "id": "gpu-1",
            "held": 0,
            "draining": 0,
            "faults": 0,
            "attempts": 1,
            "ready": False,
            "snapshot_age": None,
            "breakers": {"m": "open"},
        },
    ],
    "idle_after_cancel": {"confirmed": 3, "assumed": 1, "milliseconds": 1500},
    "counts": {
        "requests": [(["chat.completions", "m", "acme", "completed"], 11)],
        "turned_away": [(["queue_full"], 12), (["bad_framing"], 1)],
        "failures": [(["before_headers", "engine_failed"], 13)],
        "cancellations": [(["client_gone", "queued"], 14)],
        "retries": [(["unreachable"], 15)],
        "tokens": [(["acme", "m", "prompt"], 16), (["acme", "m", "generated"], 17)],
    },
}


def samples(statistics: dict[str, Any]) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample of the page, by name and labels."""
    page = render_metrics(statistics).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def value_of(name: str, statistics: dict[str, Any] = STATISTICS, /, **labels: str) -> float:
    return samples(statistics)["trio_gateway_" + name, tuple(sorted(labels.items()))]


@pytest.mark.parametrize(
    ("name", "labels", "value"),
    [
        (
            "requests_total",
            {"operation": "chat.completions", "model": "m", "tenant": "acme", "outcome": "completed"},
            11,
        ),
        ("turned_away_total", {"code": "queue_full"}, 12),
        ("turned_away_total", {"code": "bad_framing"}, 1),
        ("failures_total", {"phase": "before_headers", "code": "engine_failed"}, 13),
        ("cancellations_total", {"cause": "client_gone", "phase": "queued"}, 14),
        ("retries_total", {"reason": "unreachable"}, 15),
        ("tokens_total", {"tenant": "acme", "model": "m", "kind": "prompt"}, 16),
        ("tokens_total", {"tenant": "acme", "model": "m", "kind": "generated"}, 17),
        ("leases", {"worker": "gpu-0", "state": "held"}, 3),
        ("leases", {"worker": "gpu-0", "state": "draining"}, 1),
        ("leases", {"worker": "gpu-1", "state": "held"}, 0),
        ("worker_faults_total", {"worker": "gpu-0"}, 2),
        ("worker_attempts_total", {"worker": "gpu-0"}, 9),
        ("worker_attempts_total", {"worker": "gpu-1"}, 1),
        ("worker_ready", {"worker": "gpu-0"}, 1),
        ("worker_ready", {"worker": "gpu-1"}, 0),
        ("worker_snapshot_age_seconds", {"worker": "gpu-0"}, 0.5),
        ("breaker_state", {"worker": "gpu-0", "model": "m"}, 0),
        ("breaker_state", {"worker": "gpu-0", "model": "n"}, 1),
        ("breaker_state", {"worker": "gpu-1", "model": "m"}, 2),
        ("cancel_to_idle_seconds_count", {}, 4),
        ("cancel_to_idle_seconds_sum", {}, 1.5),
        ("queue_depth", {"tier": "standard"}, 3),
        ("queue_depth", {"tier": "interactive"}, 0),
        ("queue_bytes", {}, 500),
        ("tenant_queue_depth", {"tenant": "acme"}, 4),
        ("running", {}, 3),
        ("connections", {}, 7),
        ("buffered_bytes", {}, 4096),
        ("buffered_bytes_per_exchange", {"stat": "max"}, 3000),
        ("buffered_bytes_per_exchange", {"stat": "p99"}, 1000),
        ("held_up", {}, 2),
        ("delivery_lag_seconds_bucket", {"le": "0.1"}, 7),
        ("delivery_lag_seconds_bucket", {"le": "+Inf"}, 9),
        ("delivery_lag_seconds_sum", {}, 4.5),
        ("delivery_lag_seconds_count", {}, 9),
        ("conservation_error", {}, 0),
        ("build_info", {"version": "1.2.3"}, 1),
    ],
)
def test_every_figure_has_its_name_and_labels(name: str, labels: dict[str, str], value: float) -> None:
    assert value_of(name, **labels) == value


def test_there_is_a_sample_for_each_figure_and_no_other() -> None:
    rows = sum(map(len, STATISTICS["counts"].values()))
    workers, tenants, single = len(STATISTICS["workers"]), len(STATISTICS["queue"]["tenants"]), 7
    ages, breakers, idle, tiers, buffered, lag = 1, 3, 2, 3, 2, 5
    others = ages + breakers + idle + tiers + tenants + buffered + lag + single
    assert len(samples(STATISTICS)) == rows + 5 * workers + others
    assert all(name.startswith("trio_gateway_") for name, _ in samples(STATISTICS))


def test_a_broken_equation_shows() -> None:
    broken = copy.deepcopy(STATISTICS)
    broken["conservation"]["errors"] = ["a: 1 != 2", "b: 1 != 2"]
    assert value_of("conservation_error", broken) == 2


def test_a_process_that_did_nothing_yet_has_a_page_too() -> None:
    idle = copy.deepcopy(STATISTICS)
    idle["counts"] = {name: [] for name in idle["counts"]}
    idle["workers"], idle["queue"]["tenants"] = [], {}
    assert value_of("queue_depth", idle, tier="standard") == 3


@pytest.mark.parametrize("text", ['a"b', "a\\b", "a\nb", 'a{b="c"} 1', "\u00e9 \U0001f600", ""])
def test_no_text_breaks_out_of_its_label(text: str) -> None:
    odd = copy.deepcopy(STATISTICS)
    odd["counts"]["requests"] = [(["x", text, "acme", "completed"], 1)]
    assert value_of("requests_total", odd, operation="x", model=text, tenant="acme", outcome="completed") == 1


def test_the_page_is_text() -> None:
    assert METRICS_TYPE.startswith("text/plain")
