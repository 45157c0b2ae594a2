"""How it stands with tenants, queues and workers."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import trio

from ..admin import Row
from ..admission import PoolStatistics
from ..contract import RateStanding
from ..fleet import WorkerBook
from ..flow import in_steps
from ._house import House
from ._statistics import worker_figures

STEP = 32  # tenants that are described at a time
MOST_STEPS = 20  # of all breakers of a worker that are shown
KINDS = ("prompt", "generated", "queued", "delivered", "acknowledged")


async def tenants(house: House) -> list[Row]:
    """Answer a row for each tenant, in steps: there may be many thousand."""
    figures, running = house.admission.statistics(), house.admission.running_by_tenant()
    used: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for (tenant, _, kind), count in house.books.tokens.items():
        used[tenant][kind] += count

    def row(name: str) -> Row | None:
        if name not in house.keyring.tenants:
            return None  # it went between two steps
        share = house.admission.share_of(name)
        rates = {rate.kind: rate for rate in house.rates.standings(name, None)}
        return {
            "id": name,
            "frozen": name in house.admission.frozen,
            "weight": share.weight,
            "running": running.get(name, 0),
            "queued": figures.queued_by_tenant.get(name, 0),
            "max_concurrency": share.max_concurrency,
            "max_queued": share.max_queued,
            "counter": round(house.admission.service_of(name), 3),
            "requests_per_minute": _rate(rates.get("requests")),
            "tokens_per_minute": _rate(rates.get("tokens")),
            "tokens": {kind: used[name][kind] for kind in KINDS},
        }

    return await in_steps(map(row, list(house.keyring.tenants)), STEP)


def _rate(standing: RateStanding | None) -> Row | None:
    return None if standing is None else {"limit": standing.limit, "remaining": standing.remaining}


def queues(house: House) -> Row:
    """Answer the queue, and each pool of workers."""
    figures, limits, now = house.admission.statistics(), house.admission.limits, trio.current_time()
    known = {pool.pool: pool for pool in house.admission.pools()}
    names = dict.fromkeys((*map(house.fleet.pool_of, house.fleet.models), *known))
    return {
        "depth": figures.queued,
        "bytes": figures.queued_bytes,
        "max_queued": limits.max_queued,
        "max_queued_bytes": limits.max_queued_bytes,
        "pools": [_pool(house, name, known.get(name), now) for name in names],
    }


def _pool(house: House, name: str, known: PoolStatistics | None, now: float) -> Row:
    models, books = house.fleet.pool_members(name)
    oldest = None if known is None else known.oldest
    return {
        "pool": name,
        "models": models,
        "slots": house.fleet.pool_slots(name),
        "held": sum(book.held for book in books),
        "draining": sum(book.draining for book in books),
        "pace": None if known is None or known.pace is None else round(known.pace, 6),
        "tiers": {} if known is None else known.tiers,
        "oldest_wait": None if oldest is None else round(now - oldest, 6),
    }


def workers(house: House) -> list[Row]:
    """Answer a row for each worker."""
    now = trio.current_time()
    return [worker_row(book, now) for book in house.fleet.books.values()]


def worker_row(book: WorkerBook, now: float) -> Row:
    """Answer the row of one worker."""
    return {
        **worker_figures(book, now),
        "free": free_slots(book, now),
        "operator": book.operator,
        "withheld": book.withheld,
        "breaker_history": _history(book, now),
    }


def free_slots(book: WorkerBook, now: float) -> int:
    """Slots that could be given away now: a worker that takes nothing has none."""
    return max(book.free, 0) if book.ready(now) else 0


def _history(book: WorkerBook, now: float) -> list[dict[str, Any]]:
    """The last steps of all its breakers, newest first."""
    steps = [(step, model) for model, breaker in book.breakers.items() for step in breaker.history]
    steps.sort(key=lambda found: found[0].at, reverse=True)
    return [
        {
            "ago": round(now - step.at, 3),
            "model": model,
            "from": step.before.value,
            "to": step.after.value,
            "why": step.step.value,
        }
        for step, model in steps[:MOST_STEPS]
    ]


def short_row(book: WorkerBook, now: float) -> Row:
    """Answer of one worker what the feed tells every second."""
    return {
        "id": book.worker.id,
        "slots": book.size,
        "held": book.held,
        "draining": book.draining,
        "free": free_slots(book, now),
        "ready": book.ready(now),
        "breakers": {model: breaker.state(now).value for model, breaker in book.breakers.items()},
        "operator": book.operator,
    }
