"""Metrics for Prometheus, rendered from the counters that exist anyway.

Lines are written as text, with no object for each sample: thousands of those would
have the collector of circles stop every thread while the page is written.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final

from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily

METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
PIECE: Final = 250  # lines of the page, or families
_PREFIX: Final = "trio_gateway_"

Row = tuple[Sequence[str], float]
"""Values of the labels, and of the figure."""


def render_metrics(statistics: dict[str, Any]) -> Iterator[bytes]:
    """Write the page of one moment piece by piece, each in less than a millisecond.

    Args:
        statistics: as `Gateway.statistics` answers it; every label is from a
            configured or otherwise bounded set.
    """
    pids = [each["pid"] for each in statistics.get("processes", ()) if each["pid"] is not None]
    lines = itertools.chain(_page(statistics), _process(pids))
    while piece := "".join(itertools.islice(lines, PIECE)):
        yield piece.encode()


def _page(now: dict[str, Any]) -> Iterator[str]:
    for name, (labels, text) in _COUNTERS.items():
        yield from _family("counter", f"{name}_total", text, labels, _counted(now["counts"][name]))
    yield from _workers(now["workers"])
    queue = now["queue"]
    yield from _gauge("queue_depth", "Requests that wait.", ("tier",), _rows(queue["tiers"]))
    yield from _single("queue_bytes", "Bytes of bodies that wait.", queue["bytes"])
    tenants = _rows(queue["tenants"])
    yield from _gauge("tenant_queue_depth", "Requests that wait, by tenant.", ("tenant",), tenants)
    running = "Exchanges that hold or held a worker and are not settled."
    yield from _single("running", running, now["running"])
    yield from _single("connections", "Open client connections.", now["connections"])
    yield from _single("buffered_bytes", "Bytes of answers that wait for clients.", now["buffered_bytes"])
    most = _rows(now["buffered_per_exchange"])
    yield from _gauge("buffered_bytes_per_exchange", "Bytes that wait for one client.", ("stat",), most)
    yield from _single("held_up", "Exchanges whose engine waits for their client.", now["held_up"])
    for name, rows in now["times"].items():
        yield from _histogram(name, rows)
    yield from _loop(now["loop"])
    yield from _sockets(now["sockets"])
    yield from _count("log_lines_dropped", "Log lines that nobody took.", now["log_lines_dropped"])
    if now["ledger"] is not None:
        yield from _records(now["ledger"])
    if now["cluster"] is not None:
        yield from _cluster(now["cluster"])
    if now["spans"] is not None:
        rows = _rows(now["spans"])
        text = "Sampled exchanges for the collector."
        yield from _family("counter", "exported_exchanges_total", text, ("state",), rows)
    yield from _processes(now.get("processes"))
    broken = "Equations that do not hold; 0, or a bug."
    yield from _single("conservation_error", broken, len(now["conservation"]["errors"]))
    leaks = "What is held for exchanges that are over, at the last look; 0, or a bug."
    yield from _single("leaks", leaks, now["conservation"]["leaks"])
    yield from _gauge("build_info", "The running version.", ("version",), [((now["version"],), 1)])


_COUNTERS: Final = {
    "requests": (("operation", "model", "tenant", "outcome"), "Accepted requests that ended."),
    "turned_away": (("code",), "Requests that were answered or left before acceptance."),
    "failures": (("phase", "code"), "Exchanges that failed."),
    "cancellations": (("cause", "phase"), "Exchanges that were ended from outside."),
    "retries": (("reason",), "Attempts that went back to the queue."),
    "tokens": (("tenant", "model", "kind"), "Tokens by tenant, model and kind."),
}

_HISTOGRAMS: Final = {
    "admission_wait": (("tier",), "From arrival until the first worker."),
    "time_to_first_content": (("model",), "From arrival until the first content was handed to the client."),
    "stream_duration": (("model",), "From the first content of a stream until its exchange was over."),
    "inter_event_gap": ((), "Between two reads of a stream that brought output, while the client keeps up."),
    "delivery_lag": ((), "For how long the oldest byte of a batch had waited when its client had taken it."),
    "lease_held": (("state",), "How long slots were held, and drained afterwards."),
    "cancel_to_idle": ((), "From the end of an abandoned attempt until its slot was free."),
    "event_loop_lag": ((), "How late the loop came to a task whose time it was."),
}

# What an exchange meets; larger lets less through.
_BREAKER_STATES: Final = {"closed": 0, "half_open": 1, "trying": 1, "probing": 2, "open": 2, "forced": 2}


def _workers(workers: list[dict[str, Any]]) -> Iterator[str]:
    leases = [((each["id"], state), each[state]) for each in workers for state in ("held", "draining")]
    yield from _gauge("leases", "Slots in use.", ("worker", "state"), leases)
    for name, text in (("faults", "Attempts that failed by the worker."), ("attempts", "Attempts made.")):
        rows = [((each["id"],), each[name]) for each in workers]
        yield from _family("counter", f"worker_{name}_total", text, ("worker",), rows)
    ready = [((each["id"],), int(each["ready"])) for each in workers]
    yield from _gauge("worker_ready", "1: it takes work.", ("worker",), ready)
    ages = [((each["id"],), each["snapshot_age"]) for each in workers if each["snapshot_age"] is not None]
    text = "Age of what was last read of a worker."
    yield from _gauge("worker_snapshot_age_seconds", text, ("worker",), ages)
    states = [
        ((each["id"], model), _BREAKER_STATES[state])
        for each in workers
        for model, state in each["breakers"].items()
    ]
    yield from _gauge("breaker_state", "0 closed, 1 half-open, 2 open.", ("worker", "model"), states)


def _loop(loop: dict[str, Any]) -> Iterator[str]:
    yield from _histogram("event_loop_lag", [loop["lag"]])
    stalls = "Times that the loop was late by more than its limit."
    yield from _count("event_loop_stalls", stalls, loop["stalls"])
    stalled = "Seconds of those times together."
    yield from _count("event_loop_stalled_seconds", stalled, loop["stalled_seconds"])


def _processes(processes: list[dict[str, Any]] | None) -> Iterator[str]:
    serving = 1 if processes is None else sum(each["ready"] for each in processes)
    yield from _single("processes", "Processes that serve clients.", serving)
    restarts = sum(each["restarts"] for each in processes or ())
    yield from _count("process_restarts", "Processes that were started again after they died.", restarts)


def _sockets(sockets: dict[str, int]) -> Iterator[str]:
    yield from _single("sockets", "Open WebSockets.", sockets["open"])
    yield from _single("socket_streams", "Generations on WebSockets that are not over.", sockets["streams"])
    kept = "Answers that are kept for those who may resume."
    yield from _single("resumable_answers", kept, sockets["resumable"])


def _records(ledger: dict[str, Any]) -> Iterator[str]:
    yield from _single("journal_bytes", "Bytes of the journal of records.", ledger["journal_bytes"])
    limit = "Size of the journal from which on nothing is accepted."
    yield from _single("journal_limit_bytes", limit, ledger["journal_limit"])
    behind = "Bytes of the journal that are not in the database."
    yield from _single("journal_behind_bytes", behind, ledger["behind_bytes"])
    away = int(ledger["trouble"] is not None)
    yield from _single("database_away", "1: records can not be written to it.", away)
    yield from _count("records_refused", "Requests that could not be recorded.", ledger["refused"])


def _cluster(figures: dict[str, Any]) -> Iterator[str]:
    text = "1: how this replica stands to the store of its cluster."
    yield from _gauge("cluster_standing", text, ("standing",), _rows(figures["standing"]))
    yield from _single("cluster_replicas", "Replicas that shared last.", len(figures["replicas"]))
    turns = _rows(figures["turns"])
    yield from _family("counter", "cluster_turns_total", "Turns at the store.", ("state",), turns)
    yield from _count("cluster_turn_seconds", "Seconds that turns took.", figures["turn_seconds"])
    yield from _count("cluster_losses", "Times that the store was lost.", figures["losses"])
    yield from _count("cluster_grants", "Placements that the store granted.", figures["granted"])


# The format -------------------------------------------------------------------------------------------------


def _rows(figures: dict[str, float]) -> list[Row]:
    return [((label,), value) for label, value in figures.items()]


def _counted(counts: dict[str, list[Any]]) -> Iterator[Row]:
    """The rows of a counter, whose one label may stand without a list around it."""
    for label, value in zip(counts["labels"], counts["values"], strict=True):
        yield (label,) if isinstance(label, str) else label, value


def _single(name: str, text: str, value: float) -> Iterator[str]:
    return _family("gauge", name, text, (), [((), value)])


def _gauge(name: str, text: str, labels: Sequence[str], rows: Iterable[Row]) -> Iterator[str]:
    return _family("gauge", name, text, labels, rows)


def _count(name: str, text: str, value: float) -> Iterator[str]:
    return _family("counter", f"{name}_total", text, (), [((), value)])


def _histogram(name: str, rows: list[dict[str, Any]]) -> Iterator[str]:
    labels, text = _HISTOGRAMS[name]
    yield _heading("histogram", f"{name}_seconds", text)
    for row in rows:
        given = ",".join(f'{label}="{_escaped(row["labels"][label])}"' for label in labels)
        start, before, whole = (
            f"{_PREFIX}{name}_seconds",
            given + "," * bool(given),
            f"{{{given}}}" * bool(given),
        )
        count = 0
        for bound, more in zip((*row["bounds"], "+Inf"), row["counts"], strict=True):
            count += more
            yield f'{start}_bucket{{{before}le="{bound}"}} {count}\n'
        yield f"{start}_sum{whole} {row['seconds']}\n{start}_count{whole} {count}\n"


def _family(kind: str, name: str, text: str, labels: Sequence[str], rows: Iterable[Row]) -> Iterator[str]:
    yield _heading(kind, name, text)
    if not labels:
        yield from (f"{_PREFIX}{name} {value}\n" for _, value in rows)
        return
    escaped = _Escaped()  # few words, in many rows
    line = _PREFIX + name + "{" + ",".join(f'{label}="%s"' for label in labels) + "} %s\n"
    for values, value in rows:
        yield line % (*[escaped[each] for each in values], value)


def _heading(kind: str, name: str, text: str, prefix: str = _PREFIX) -> str:
    return f"# HELP {prefix}{name} {text}\n# TYPE {prefix}{name} {kind}\n"


class _Escaped(dict[str, str]):
    """Values of labels, each escaped once."""

    def __missing__(self, text: str) -> str:
        self[text] = found = _escaped(text)
        return found


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _process(others: Sequence[int]) -> Iterator[str]:
    """What the kernel knows of this process, under the names that every client library uses.

    Args:
        others: of processes that are parts of the same gateway; what they have is added.
    """
    found: dict[str, list[Any]] = {}
    pids: tuple[int | str, ...] = ("self", *others)
    for pid in pids:
        for family in ProcessCollector(pid=partial(_same, pid), registry=None).collect():
            found.setdefault(family.name, []).append(family)
    for families in found.values():
        family = families[0]
        counter = isinstance(family, CounterMetricFamily)
        name = f"{family.name}_total" if counter else family.name
        yield _heading("counter" if counter else "gauge", name, family.documentation, prefix="")
        for at, sample in enumerate(family.samples):
            values = [each.samples[at].value for each in families]
            together = min(values) if name.endswith("start_time_seconds") else sum(values)
            yield f"{sample.name} {together}\n"


def _same(value: int | str) -> int | str:
    return value
