"""The page for Prometheus: every figure under its documented name, and labels that no text can break."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from trio_gateway.telemetry import METRICS_TYPE, render_metrics
from trio_gateway.telemetry._metrics import PIECE

SERIES = 5  # of such a histogram: three buckets, their count and their sum


def histogram(labels: dict[str, str]) -> dict[str, Any]:
    """Nine values, of which seven are at most 0.1 and eight at most 1."""
    return {"labels": labels, "bounds": (0.1, 1.0), "counts": [7, 1, 1], "seconds": 4.5}


STATISTICS: dict[str, Any] = {
    "version": "1.2.3",
    "connections": 7,
    "running": 3,
    "buffered_bytes": 4096,
    "buffered_per_exchange": {"max": 3000, "p99": 1000},
    "held_up": 2,
    "times": {
        "admission_wait": [histogram({"tier": "standard"}), histogram({"tier": "batch"})],
        "time_to_first_content": [histogram({"model": "m"})],
        "stream_duration": [],
        "inter_event_gap": [histogram({})],
        "delivery_lag": [histogram({})],
        "lease_held": [histogram({"state": "held"}), histogram({"state": "draining"})],
        "cancel_to_idle": [histogram({})],
    },
    "loop": {"lag": histogram({}), "stalls": 2, "stalled_seconds": 0.75},
    "sockets": {"open": 21, "streams": 22, "resumable": 23},
    "log_lines_dropped": 24,
    "ledger": {
        "journal_bytes": 100,
        "journal_limit": 1000,
        "behind_bytes": 10,
        "trouble": "away",
        "refused": 25,
    },
    "spans": {"sent": 26, "dropped": 27},
    "cluster": {
        "standing": {"outside": 0, "shared": 1, "alone": 0},
        "replicas": ["a", "b", "c"],
        "settling": False,
        "turns": {"joined": 30, "fenced": 1, "late": 0, "failed": 2},
        "turn_seconds": 1.5,
        "losses": 1,
        "granted": 28,
        "scope": "fleet",
    },
    "queue": {
        "depth": 5,
        "bytes": 500,
        "tiers": {"interactive": 0, "standard": 3, "batch": 2},
        "tenants": {"acme": 4, "other": 1},
    },
    "conservation": {"ok": True, "errors": [], "leaks": 2},
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
    "counts": {
        "requests": {"labels": [("chat.completions", "m", "acme", "completed")], "values": [11]},
        "turned_away": {"labels": ["queue_full", "bad_framing"], "values": [12, 1]},
        "failures": {"labels": [("before_headers", "engine_failed")], "values": [13]},
        "cancellations": {"labels": [("client_gone", "queued")], "values": [14]},
        "retries": {"labels": ["unreachable"], "values": [15]},
        "tokens": {"labels": [("acme", "m", "prompt"), ("acme", "m", "generated")], "values": [16, 17]},
    },
}


def samples(statistics: dict[str, Any]) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample of the page, by name and labels."""
    page = b"".join(render_metrics(statistics)).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name.startswith("trio_gateway_")
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
        ("admission_wait_seconds_count", {"tier": "batch"}, 9),
        ("admission_wait_seconds_bucket", {"tier": "standard", "le": "0.1"}, 7),
        ("time_to_first_content_seconds_sum", {"model": "m"}, 4.5),
        ("inter_event_gap_seconds_bucket", {"le": "1.0"}, 8),
        ("lease_held_seconds_count", {"state": "draining"}, 9),
        ("cancel_to_idle_seconds_count", {}, 9),
        ("event_loop_lag_seconds_count", {}, 9),
        ("event_loop_stalls_total", {}, 2),
        ("event_loop_stalled_seconds_total", {}, 0.75),
        ("sockets", {}, 21),
        ("socket_streams", {}, 22),
        ("resumable_answers", {}, 23),
        ("log_lines_dropped_total", {}, 24),
        ("journal_bytes", {}, 100),
        ("journal_limit_bytes", {}, 1000),
        ("journal_behind_bytes", {}, 10),
        ("database_away", {}, 1),
        ("records_refused_total", {}, 25),
        ("exported_exchanges_total", {"state": "sent"}, 26),
        ("exported_exchanges_total", {"state": "dropped"}, 27),
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
        ("leaks", {}, 2),
        ("cluster_standing", {"standing": "shared"}, 1),
        ("cluster_replicas", {}, 3),
        ("cluster_turns_total", {"state": "failed"}, 2),
        ("build_info", {"version": "1.2.3"}, 1),
    ],
)
def test_every_figure_has_its_name_and_labels(name: str, labels: dict[str, str], value: float) -> None:
    assert value_of(name, **labels) == value


def test_there_is_a_sample_for_each_figure_and_no_other() -> None:
    rows = sum(len(counts["values"]) for counts in STATISTICS["counts"].values())
    workers, tenants, single = len(STATISTICS["workers"]), len(STATISTICS["queue"]["tenants"]), 14
    ages, breakers, tiers, buffered, loop, records, exported = 1, 3, 3, 2, SERIES + 2, 5, 2
    times = SERIES * sum(map(len, STATISTICS["times"].values()))
    cluster = 3 + 4 + 4
    others = ages + breakers + tiers + tenants + buffered + loop + records + exported + times + single
    others += cluster
    assert len(samples(STATISTICS)) == rows + 5 * workers + others


def test_the_process_tells_of_itself_under_the_usual_names() -> None:
    page = b"".join(render_metrics(STATISTICS)).decode()
    families = {family.name for family in text_string_to_metric_families(page)}
    others = {name for name in families if not name.startswith("trio_gateway_")}
    assert {"process_cpu_seconds", "process_resident_memory_bytes", "process_open_fds"} <= others
    assert all(name.startswith("process_") for name in others)


def test_without_a_database_a_cluster_or_a_collector_nothing_is_told_of_them() -> None:
    plain = {**STATISTICS, "ledger": None, "cluster": None, "spans": None}
    gone = {name for name, _ in samples(STATISTICS)} - {name for name, _ in samples(plain)}
    assert gone == {
        f"trio_gateway_{name}"
        for name in (
            *("journal_bytes", "journal_limit_bytes", "journal_behind_bytes", "database_away"),
            *("records_refused_total", "exported_exchanges_total"),
            *("cluster_standing", "cluster_replicas", "cluster_turns_total", "cluster_turn_seconds_total"),
            *("cluster_losses_total", "cluster_grants_total"),
        )
    }


def test_a_broken_equation_shows() -> None:
    broken = copy.deepcopy(STATISTICS)
    broken["conservation"]["errors"] = ["a: 1 != 2", "b: 1 != 2"]
    assert value_of("conservation_error", broken) == 2


def test_a_process_that_did_nothing_yet_has_a_page_too() -> None:
    idle = copy.deepcopy(STATISTICS)
    idle["counts"] = {name: {"labels": [], "values": []} for name in idle["counts"]}
    idle["workers"], idle["queue"]["tenants"] = [], {}
    assert value_of("queue_depth", idle, tier="standard") == 3


@pytest.mark.parametrize("text", ['a"b', "a\\b", "a\nb", 'a{b="c"} 1', "\u00e9 \U0001f600", ""])
def test_no_text_breaks_out_of_its_label(text: str) -> None:
    odd = copy.deepcopy(STATISTICS)
    odd["counts"]["requests"] = {"labels": [("x", text, "acme", "completed")], "values": [1]}
    assert value_of("requests_total", odd, operation="x", model=text, tenant="acme", outcome="completed") == 1


def test_the_page_is_text() -> None:
    assert METRICS_TYPE.startswith("text/plain")


def test_a_long_page_is_written_in_pieces_of_so_many_lines() -> None:
    many = [("chat.completions", "m", f"tenant-{number}", "completed") for number in range(4 * PIECE)]
    counts = {**STATISTICS["counts"], "requests": {"labels": many, "values": [1] * len(many)}}
    pieces = list(render_metrics({**STATISTICS, "counts": counts}))
    assert len(pieces) >= 4
    sizes = [piece.count(b"trio_gateway_requests_total{") for piece in pieces]
    assert max(sizes) <= PIECE
    assert sum(sizes) == len(many)
