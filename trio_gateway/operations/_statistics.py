"""The figures of this moment, as numbers: what metrics are rendered from."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import trio

from .. import __version__
from ..fleet import WorkerBook
from ..ledger import Books
from ._house import House


def statistics(house: House) -> dict[str, Any]:
    """Answer the figures of this moment, the equations of conservation included."""
    books, admission, now = house.books, house.admission.statistics(), trio.current_time()
    errors = house.equations()
    return {
        "version": __version__,
        "boot_id": house.boot_id,
        "uptime": round(now - house.started, 3),
        "connections": house.server.open,
        "failed_handshakes": house.server.failed_handshakes,
        "idle_upstream_connections": house.connections.idle,
        "unplaced_bytes": house.room.used,
        "sockets": {
            "open": len(house.sockets),
            "streams": house.sockets.streams,
            "resumable": house.kept_answers,
        },
        "arrived": books.arrived,
        "reading": books.reading,
        "turned_away": dict(books.turned_away),
        "accepted": books.accepted,
        "waiting": books.waiting,
        "running": books.running,
        "outcomes": dict(books.outcomes),
        "leases": {
            "granted": admission.granted,
            "held": admission.held,
            "draining": admission.draining,
            "returned": admission.returned,
            "double_releases": admission.double_releases,
            "scope": "process",
        },
        "queue": {
            "depth": admission.queued,
            "bytes": admission.queued_bytes,
            "tiers": admission.queued_by_tier,
            "tenants": admission.queued_by_tenant,
            "frozen": sorted(house.admission.frozen),
        },
        "buffered_bytes": house.buffers.used,
        "buffered_per_exchange": dict(zip(("max", "p99"), house.live.most_buffered(), strict=True)),
        "held_up": house.live.held_up,
        "delivery_lag": {
            "batches": books.lags.count,
            "seconds": round(books.lags.total, 6),
            "buckets": dict(books.lags.buckets()),
        },
        "conservation": {"ok": not errors, "errors": errors, "leaks": house.leaks},
        "workers": [worker_figures(book, now) for book in house.fleet.books.values()],
        "idle_after_cancel": dict(house.idle_times),
        "times": books.times.figures(),
        "loop": house.loop_watch.figures(),
        "counts": _counts(books),
        "ledger": None if house.ledger is None else house.ledger.statistics(),
        "tenants": None if house.follower is None else house.follower.statistics(),
        "cluster": None if house.replica is None else house.replica.figures(),
        "spans": None if house.exporter is None else house.exporter.figures(),
        "log_lines_dropped": house.log.dropped,
        "recent": list(books.recent) if house.borrower is None else [],  # thousands, to be sent every second
        "process": None if house.borrower is None else _place(house),
    }


def _place(house: House) -> dict[str, Any]:
    """Answer the place of this process among others, and what it has borrowed."""
    assert house.borrower is not None
    return {
        "number": house.part.number,
        "of": house.part.of,
        "capacity": house.capacity,
        "lent": dict(house.borrower.lent),
    }


def worker_figures(book: WorkerBook, now: float) -> dict[str, Any]:
    """Answer what is known of one worker."""
    snapshot = book.snapshot
    return {
        "id": book.worker.id,
        "url": book.worker.url,
        "kind": book.worker.dialect.kind,
        "slots": book.size,
        "held": book.held,
        "draining": book.draining,
        "attempts": book.attempts,
        "faults": book.faults,
        "ready": book.ready(now),
        "state": snapshot.state,
        "alive": book.probe.alive(now),
        "suspect": snapshot.suspect or book.progress.still(now),
        "registered": book.expires_at is not None,
        "incarnation": snapshot.incarnation,
        "snapshot_age": round(snapshot.age(now), 3) if math.isfinite(snapshot.age(now)) else None,
        "running": snapshot.running,
        "queued": snapshot.queued,
        "paused": snapshot.paused,
        "models": None if book.models is None else list(book.models),
        "breakers": {model: breaker.state(now).value for model, breaker in book.breakers.items()},
    }


def _counts(books: Books) -> dict[str, dict[str, list[Any]]]:
    """Copy the counters with their labels.

    As two lists each, and no pairs: thousands of new objects, on the loop, would call the collector of
    circles, which takes longer than all the rest of a scrape.
    """
    names = ("requests", "turned_away", "failures", "cancellations", "retries", "tokens")
    counters: dict[str, Counter[Any]] = {name: getattr(books, name) for name in names}
    return {
        name: {"labels": list(counter), "values": list(counter.values())}
        for name, counter in counters.items()
    }
