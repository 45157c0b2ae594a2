"""Puts what several processes answer together into what one would. Pure.

Sums where things are counted, the worst where one bad process is bad, and rows of the same worker, tenant
or pool as one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from ..admin import MOST_ROWS, RequestFilter, Row

Rows = Mapping[int, Any]
"""Answers by the number of the process."""

_SEVERITY: Final = ("closed", "trying", "half_open", "probing", "open", "forced")
_STANDINGS: Final = ("shared", "outside", "alone")
MOST_STEPS: Final = 20
_WORST: Final = ("wait_p50", "wait_p99", "ttfc_p50", "ttfc_p99", "gap_p50", "gap_p99")


# Rows -------------------------------------------------------------------------------------------------------


def by_id(lists: Iterable[Sequence[Row]], name: str = "id") -> list[list[Row]]:
    """Gather the rows of the same thing, in the order in which they are first met."""
    found: dict[Any, list[Row]] = {}
    for rows in lists:
        for row in rows:
            found.setdefault(row[name], []).append(row)
    return list(found.values())


def numbered(answers: Rows, rows: Callable[[Any], Sequence[Row]] = lambda answer: answer) -> list[Row]:
    """Answer all rows, each with the number of its process."""
    return [{**row, "process": number} for number, answer in answers.items() for row in rows(answer)]


def worker(rows: Sequence[Row], shares: bool) -> Row:
    """Put the rows of one worker together.

    Args:
        shares: each process tells all slots of the worker, and not a part.
    """
    newest = min(rows, key=lambda row: _or(row.get("snapshot_age"), float("inf")))
    merged = {**newest, **_short(rows, shares)}
    if "attempts" in merged:
        merged["attempts"] = _sum(rows, "attempts")
        merged["faults"] = _sum(rows, "faults")
        merged["alive"] = any(row["alive"] for row in rows)
        merged["suspect"] = all(row["suspect"] for row in rows)
    if "breaker_history" in merged:
        steps = [step for row in rows for step in row["breaker_history"]]
        merged["breaker_history"] = sorted(steps, key=lambda step: step["ago"])[:MOST_STEPS]
    return merged


def _short(rows: Sequence[Row], shares: bool) -> Row:
    slots = max(row["slots"] for row in rows) if shares else _sum(rows, "slots")
    held, draining, ready = _sum(rows, "held"), _sum(rows, "draining"), any(row["ready"] for row in rows)
    found: Row = {"slots": slots, "held": held, "draining": draining, "ready": ready}
    if "free" in rows[0]:
        found["free"] = max(slots - held - draining, 0) if ready else 0
    if "operator" in rows[0]:
        found["operator"] = next((row["operator"] for row in rows if row["operator"] != "none"), "none")
    models = dict.fromkeys(model for row in rows for model in row["breakers"])
    found["breakers"] = {
        model: max((row["breakers"].get(model, "closed") for row in rows), key=_SEVERITY.index)
        for model in models
    }
    return found


def tenant(rows: Sequence[Row]) -> Row:
    """Put the rows of one tenant together; what was split is whole again."""
    merged = dict(rows[0])
    for name in ("running", "queued", "max_queued"):
        merged[name] = _sum(rows, name)
    merged["counter"] = round(sum(row["counter"] for row in rows), 3)
    merged["frozen"] = any(row["frozen"] for row in rows)
    for name in ("requests_per_minute", "tokens_per_minute"):
        rates = [row[name] for row in rows if row[name] is not None]
        if rates:
            merged[name] = {"limit": _sum(rates, "limit"), "remaining": sum(r["remaining"] for r in rates)}
    merged["tokens"] = added([row["tokens"] for row in rows])
    return merged


def queues(answers: Rows, shares: bool) -> Row:
    """Put the queues together."""
    rows = list(answers.values())
    names = ("depth", "bytes", "max_queued", "max_queued_bytes")
    pools = by_id((row["pools"] for row in rows), "pool")
    return {**{name: _sum(rows, name) for name in names}, "pools": [_pool(each, shares) for each in pools]}


def _pool(rows: Sequence[Row], shares: bool) -> Row:
    paces = [row["pace"] for row in rows if row["pace"] is not None]
    waits = [row["oldest_wait"] for row in rows if row["oldest_wait"] is not None]
    return {
        **rows[0],
        "slots": max(row["slots"] for row in rows) if shares else _sum(rows, "slots"),
        "held": _sum(rows, "held"),
        "draining": _sum(rows, "draining"),
        "pace": round(sum(paces), 6) if paces else None,
        "tiers": added([row["tiers"] for row in rows]),
        "oldest_wait": max(waits, default=None),
    }


def requests(answers: Rows, asked: RequestFilter) -> Row:
    """Put pages that begin with the first row together, and cut out the page that was asked for."""
    rows = numbered(answers, lambda answer: answer["requests"])
    oldest = asked.order == "oldest"

    def place(row: Row) -> tuple[bool, float]:
        return row["state"] == "ended", -row["age"] if oldest else row["age"]

    page = sorted(rows, key=place)[asked.offset :][: asked.limit]
    return {
        "requests": page,
        "total": sum(answer["total"] for answer in answers.values()),
        "offset": asked.offset,
    }


def endings(answers: Rows, limit: int = MOST_ROWS) -> list[Row]:
    """Answer the latest endings of all, newest first."""
    return sorted(numbered(answers), key=lambda row: row["ended_ago"])[:limit]


def snapshot(answers: Rows, shares: bool) -> Row:
    """Put what the feed tells every second together. Of quantiles the worst counts."""
    rows = list(answers.values())
    workers = by_id(row["workers"] for row in rows)
    return {
        "at": max(row["at"] for row in rows),
        "throughput": added([row["throughput"] for row in rows]),
        "waiting": _sum(rows, "waiting"),
        "running": _sum(rows, "running"),
        **{name: max((r[name] for r in rows if r[name] is not None), default=None) for name in _WORST},
        "buffered_bytes": _sum(rows, "buffered_bytes"),
        "refusals": added([row["refusals"] for row in rows]),
        "service": added([row["service"] for row in rows]),
        "workers": [{**each[0], **_short(each, shares)} for each in workers],
        "ready": any(row["ready"] for row in rows),
        "stopping": any(row["stopping"] for row in rows),
    }


# Statistics -------------------------------------------------------------------------------------------------


def statistics(answers: Rows, shares: bool, ended: Sequence[Row] = ()) -> Row:
    """Put the figures together.

    Args:
        ended: what `lasting` kept of processes that are gone, so that counters never fall.
    """
    rows = list(answers.values())
    merged: Row = added([*rows, *ended])
    merged["leases"]["scope"] = "gateway"
    merged["queue"]["frozen"] = sorted({name for row in rows for name in row["queue"]["frozen"]})
    most = [row["buffered_per_exchange"] for row in rows]
    merged["buffered_per_exchange"] = {name: max(each[name] for each in most) for name in ("max", "p99")}
    merged["conservation"] = {
        "ok": all(row["conservation"]["ok"] for row in rows),
        "errors": [f"process {n}: {e}" for n, row in answers.items() for e in row["conservation"]["errors"]],
        "leaks": sum(row["conservation"]["leaks"] for row in rows),
    }
    merged["workers"] = [worker(each, shares) for each in by_id(row["workers"] for row in rows)]
    for each in merged["workers"]:
        before = [row for gone in ended for row in gone["workers"] if row["id"] == each["id"]]
        each["attempts"] += _sum(before, "attempts")
        each["faults"] += _sum(before, "faults")
    merged["times"] = {
        name: _histograms([each["times"][name] for each in (*rows, *ended)]) for name in rows[0]["times"]
    }
    merged["loop"] = {
        **added([{k: v for k, v in row["loop"].items() if k != "lag"} for row in rows]),
        "lag": _histograms([[row["loop"]["lag"]] for row in rows])[0],
    }
    merged["counts"] = {
        name: _counts([each["counts"][name] for each in (*rows, *ended)]) for name in rows[0]["counts"]
    }
    for name in ("ledger", "tenants"):
        found = [row[name] for row in rows if row[name] is not None]
        merged[name] = {**added(found), **_troubles(found)} if found else None
    replicas = [row["cluster"] for row in rows if row["cluster"] is not None]
    merged["cluster"] = _cluster(merged["cluster"], replicas) if replicas else None
    if merged["tenants"] is not None:
        merged["tenants"] = {**rows[0]["tenants"], **_troubles([row["tenants"] for row in rows])}
    merged["recent"] = []
    return merged


def _cluster(sums: Row, rows: Sequence[Row]) -> Row:
    """Put the standings of processes together, each of which is a replica: the worst counts."""
    worst = max(
        (each for row in rows for each, is_so in row["standing"].items() if is_so), key=_STANDINGS.index
    )
    return {
        **sums,
        "standing": {each: int(each == worst) for each in rows[0]["standing"]},
        "replicas": max((row["replicas"] for row in rows), key=len),
        "settling": any(row["settling"] for row in rows),
    }


def _troubles(rows: Sequence[Row]) -> Row:
    return {"trouble": next((row["trouble"] for row in rows if row["trouble"] is not None), None)}


def lasting(row: Row) -> Row:
    """Keep of a process that is gone what only ever grows."""
    kept = ("counts", "times", "arrived", "turned_away", "accepted", "outcomes", "delivery_lag")
    more = ("idle_after_cancel", "failed_handshakes", "log_lines_dropped")
    workers = [{key: each[key] for key in ("id", "attempts", "faults")} for each in row["workers"]]
    turns = ("turns", "turn_seconds", "losses", "granted")
    cluster = row["cluster"] and {name: row["cluster"][name] for name in turns}
    return {**{name: row[name] for name in (*kept, *more)}, "workers": workers, "cluster": cluster}


def lasting_together(rows: Sequence[Row]) -> Row:
    """Put what is kept of several processes together."""
    merged: Row = added(rows)
    merged["times"] = {name: _histograms([r["times"][name] for r in rows]) for name in rows[0]["times"]}
    merged["counts"] = {name: _counts([r["counts"][name] for r in rows]) for name in rows[0]["counts"]}
    workers = by_id(row["workers"] for row in rows)
    merged["workers"] = [
        {"id": each[0]["id"], "attempts": _sum(each, "attempts"), "faults": _sum(each, "faults")}
        for each in workers
    ]
    return merged


def added(values: Sequence[Any]) -> Any:
    """Add numbers, and what is inside of tables, by name; of anything else the first counts.

    What only some have is theirs. None is nothing.
    """
    there = [value for value in values if value is not None]
    if not there:
        return None
    first = there[0]
    if isinstance(first, bool) or not isinstance(first, int | float | dict):
        return first
    if isinstance(first, dict):
        names = dict.fromkeys(name for value in there for name in value)
        return {name: added([value[name] for value in there if name in value]) for name in names}
    total = sum(there)
    return round(total, 6) if isinstance(total, float) else total


def _histograms(lists: Sequence[Sequence[Row]]) -> list[Row]:
    """Add histograms of the same labels, bucket by bucket."""
    found: dict[tuple[tuple[str, str], ...], Row] = {}
    for row in (row for rows in lists for row in rows):
        key = tuple(sorted(row["labels"].items()))
        known = found.get(key)
        if known is None:
            found[key] = {**row, "counts": list(row["counts"])}
        else:
            known["counts"] = [a + b for a, b in zip(known["counts"], row["counts"], strict=True)]
            known["seconds"] += row["seconds"]
    return list(found.values())


def _counts(tables: Sequence[Row]) -> Row:
    """Add counters of the same labels."""
    found: dict[Any, int] = {}
    for table in tables:
        for label, value in zip(table["labels"], table["values"], strict=True):
            key = tuple(label) if isinstance(label, list) else label
            found[key] = found.get(key, 0) + value
    return {"labels": list(found), "values": list(found.values())}


def _sum(rows: Iterable[Row], name: str) -> Any:
    return sum(row[name] for row in rows)


def _or(value: Any, other: Any) -> Any:
    return other if value is None else value
