"""Metrics for Prometheus, rendered from the counters that exist anyway."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Final

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

METRICS_TYPE: Final = CONTENT_TYPE_LATEST
_PREFIX: Final = "trio_gateway_"


def render_metrics(statistics: dict[str, Any]) -> bytes:
    """Write the page of one moment.

    Args:
        statistics: as `Gateway.statistics` answers it; every label is from a
            configured or otherwise bounded set.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Snapshot(statistics))
    ProcessCollector(registry=registry)
    return generate_latest(registry)


class _Snapshot:
    """A collector over one set of figures."""

    def __init__(self, statistics: dict[str, Any]) -> None:
        self._now = statistics

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        now = self._now
        counts = now["counts"]
        yield _counter("requests", "Accepted requests that ended.", counts["requests"])
        yield _counter(
            "turned_away", "Requests that were answered or left before acceptance.", counts["turned_away"]
        )
        yield _counter("failures", "Exchanges that failed.", counts["failures"])
        yield _counter("cancellations", "Exchanges that were ended from outside.", counts["cancellations"])
        yield _counter("retries", "Attempts that went back to the queue.", counts["retries"])
        yield _counter("tokens", "Tokens by tenant, model and kind.", counts["tokens"])
        leases = GaugeMetricFamily(_PREFIX + "leases", "Slots in use.", labels=["worker", "state"])
        faults = CounterMetricFamily(
            _PREFIX + "worker_faults", "Attempts that failed by the worker.", labels=["worker"]
        )
        attempts = CounterMetricFamily(_PREFIX + "worker_attempts", "Attempts made.", labels=["worker"])
        for worker in now["workers"]:
            leases.add_metric([worker["id"], "held"], worker["held"])
            leases.add_metric([worker["id"], "draining"], worker["draining"])
            faults.add_metric([worker["id"]], worker["faults"])
            attempts.add_metric([worker["id"]], worker["attempts"])
        yield leases
        yield faults
        yield attempts
        yield from _worker_states(now["workers"])
        waiting = GaugeMetricFamily(_PREFIX + "queue_depth", "Requests that wait.", labels=["tier"])
        for tier, value in now["queue"]["tiers"].items():
            waiting.add_metric([tier], value)
        yield waiting
        yield _gauge("queue_bytes", "Bytes of bodies that wait.", now["queue"]["bytes"])
        depth = GaugeMetricFamily(
            _PREFIX + "tenant_queue_depth", "Requests that wait, by tenant.", labels=["tenant"]
        )
        for tenant, value in now["queue"]["tenants"].items():
            depth.add_metric([tenant], value)
        yield depth
        yield _gauge("running", "Exchanges that hold or held a worker and are not settled.", now["running"])
        yield _gauge("connections", "Open client connections.", now["connections"])
        yield _gauge("buffered_bytes", "Bytes of answers that wait for clients.", now["buffered_bytes"])
        most = GaugeMetricFamily(
            _PREFIX + "buffered_bytes_per_exchange", "Bytes that wait for one client.", labels=["stat"]
        )
        for stat, value in now["buffered_per_exchange"].items():
            most.add_metric([stat], value)
        yield most
        yield _gauge("held_up", "Exchanges whose engine waits for their client.", now["held_up"])
        for name, rows in now["times"].items():
            yield _histogram(name, rows)
        yield from _loop(now["loop"])
        yield from _sockets(now["sockets"])
        yield _count("log_lines_dropped", "Log lines that nobody took.", now["log_lines_dropped"])
        if now["ledger"] is not None:
            yield from _records(now["ledger"])
        if now["spans"] is not None:
            yield from _spans(now["spans"])
        yield _gauge(
            "conservation_error",
            "Equations that do not hold; 0, or a bug.",
            len(now["conservation"]["errors"]),
        )
        build = GaugeMetricFamily(_PREFIX + "build_info", "The running version.", labels=["version"])
        build.add_metric([now["version"]], 1)
        yield build


# What an exchange meets; larger lets less through.
_BREAKER_STATES: Final = {"closed": 0, "half_open": 1, "trying": 1, "probing": 2, "open": 2, "forced": 2}


def _worker_states(workers: list[dict[str, Any]]) -> Iterator[Metric]:
    ready = GaugeMetricFamily(_PREFIX + "worker_ready", "1: it takes work.", labels=["worker"])
    age = GaugeMetricFamily(
        _PREFIX + "worker_snapshot_age_seconds", "Age of what was last read of a worker.", labels=["worker"]
    )
    breakers = GaugeMetricFamily(
        _PREFIX + "breaker_state", "0 closed, 1 half-open, 2 open.", labels=["worker", "model"]
    )
    for worker in workers:
        ready.add_metric([worker["id"]], int(worker["ready"]))
        if worker["snapshot_age"] is not None:
            age.add_metric([worker["id"]], worker["snapshot_age"])
        for model, state in worker["breakers"].items():
            breakers.add_metric([worker["id"], model], _BREAKER_STATES[state])
    yield ready
    yield age
    yield breakers


_HISTOGRAMS: Final = {
    "admission_wait": ("tier", "From arrival until the first worker."),
    "time_to_first_content": ("model", "From arrival until the first content was handed to the client."),
    "stream_duration": ("model", "From the first content of a stream until its exchange was over."),
    "inter_event_gap": (
        None,
        "Between two reads of a stream that brought output, while the client keeps up.",
    ),
    "delivery_lag": (
        None,
        "For how long the oldest byte of a batch had waited when its client had taken it.",
    ),
    "lease_held": ("state", "How long slots were held, and drained afterwards."),
    "cancel_to_idle": (None, "From the end of an abandoned attempt until its slot was free."),
    "event_loop_lag": (None, "How late the loop came to a task whose time it was."),
}


def _histogram(name: str, rows: list[dict[str, Any]]) -> HistogramMetricFamily:
    label, text = _HISTOGRAMS[name]
    labels = [] if label is None else [label]
    family = HistogramMetricFamily(f"{_PREFIX}{name}_seconds", text, labels=labels)
    for row in rows:
        bounds = (*map(str, row["bounds"]), "+Inf")
        below = itertools.accumulate(row["counts"])
        values = [row["labels"][each] for each in labels]
        family.add_metric(values, list(zip(bounds, below, strict=True)), row["seconds"])
    return family


def _loop(loop: dict[str, Any]) -> Iterator[Metric]:
    yield _histogram("event_loop_lag", [loop["lag"]])
    yield _count("event_loop_stalls", "Times that the loop was late by more than its limit.", loop["stalls"])
    yield _count("event_loop_stalled_seconds", "Seconds of those times together.", loop["stalled_seconds"])


def _sockets(sockets: dict[str, int]) -> Iterator[Metric]:
    yield _gauge("sockets", "Open WebSockets.", sockets["open"])
    yield _gauge("socket_streams", "Generations on WebSockets that are not over.", sockets["streams"])
    yield _gauge("resumable_answers", "Answers that are kept for those who may resume.", sockets["resumable"])


def _records(ledger: dict[str, Any]) -> Iterator[Metric]:
    yield _gauge("journal_bytes", "Bytes of the journal of records.", ledger["journal_bytes"])
    yield _gauge("journal_limit_bytes", "From here on nothing is accepted.", ledger["journal_limit"])
    yield _gauge("journal_behind_bytes", "Of them not yet in the database.", ledger["behind_bytes"])
    yield _gauge("database_away", "1: records can not be written to it.", int(ledger["trouble"] is not None))
    yield _count("records_refused", "Requests that could not be recorded.", ledger["refused"])


def _spans(spans: dict[str, int]) -> Iterator[Metric]:
    family = CounterMetricFamily(_PREFIX + "exported_exchanges", "Exchanges for OTLP.", labels=["state"])
    for state, value in spans.items():
        family.add_metric([state], value)
    yield family


_LABELS: Final = {
    "requests": ["operation", "model", "tenant", "outcome"],
    "turned_away": ["code"],
    "failures": ["phase", "code"],
    "cancellations": ["cause", "phase"],
    "retries": ["reason"],
    "tokens": ["tenant", "model", "kind"],
}


def _counter(name: str, text: str, counts: list[tuple[list[str], int]]) -> CounterMetricFamily:
    family = CounterMetricFamily(_PREFIX + name, text, labels=_LABELS[name])
    for labels, value in counts:
        family.add_metric(labels, value)
    return family


def _count(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(_PREFIX + name, text, value=value)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(_PREFIX + name, text, value=value)
