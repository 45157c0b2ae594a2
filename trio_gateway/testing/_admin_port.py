"""A process without a gateway, for what shows one to operators: the door, its commands and its pages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import trio

from ..admin import Action, Actor, ActResult, RequestFilter, Row, refusal

TOKENS = {"prompt": 12, "generated": 34, "delivered": 30, "acknowledged": None}
STATES = ("waiting", "running", "ended")


def request_row(number: int) -> Row:
    """Make a row of the list of requests; every third one waits, runs or has ended."""
    state = STATES[number % 3]
    waits = state == "waiting"
    return {
        "id": f"{number:032x}",
        "client_request_id": None,
        "tenant": f"tenant-{number % 5}",
        "key_id": "k1",
        "operation": "chat.completions",
        "model": f"m{number % 2 + 1}",
        "tier": "standard",
        "stream": True,
        "state": state,
        "phase": "queued" if waits else "after_content",
        "outcome": "upstream_failed" if state == "ended" else None,
        "code": "engine_failed" if state == "ended" else None,
        "holder": None if state == "ended" else {"task": "connection", "doing": "edge/_x.py:1 serve"},
        "position": number + 1 if waits else None,
        "eta": 1.5 if waits else None,
        "why": "no_slot" if waits else None,
        "age": float(number),
        "deadline_in": None if state == "ended" else 500.0,
        "worker": None if waits else f"w{number % 4 + 1}",
        "attempt": 0 if waits else 1,
        "lag": None if waits else 0.25,
        "stalled_for": None,
        "buffered_bytes": 0 if waits else 4096,
        "tokens": dict.fromkeys(TOKENS) if waits else dict(TOKENS),
        "door": "http",
        "resumable": False,
    }


def ending_row(number: int) -> Row:
    """Make a row of the list of endings."""
    return {
        "id": f"{number:032x}",
        "outcome": "completed",
        "phase": "after_content",
        "code": None,
        "tenant": "acme",
        "model": "m1",
        "worker": "w1",
        "ended_ago": 1.0,
        "duration": 2.5,
        "tokens": dict(TOKENS),
    }


def worker_row(number: int) -> Row:
    """Make a row of the list of workers."""
    return {
        "id": f"w{number}",
        "url": f"http://127.0.0.1:800{number}",
        "kind": "vllm",
        "slots": 8,
        "held": 3,
        "draining": 1,
        "free": 4,
        "attempts": 100,
        "faults": 2,
        "ready": True,
        "state": None,
        "alive": True,
        "suspect": False,
        "registered": False,
        "incarnation": None,
        "snapshot_age": 0.5,
        "running": 3,
        "queued": 0,
        "paused": 0,
        "models": ["m1", "m2"],
        "breakers": {"m1": "closed"},
        "breaker_history": [{"ago": 60.0, "model": "m1", "from": "open", "to": "closed", "why": "probe"}],
        "operator": "none",
        "withheld": None,
    }


@dataclass
class FakeAdminPort:
    """Answers rows that were made up, and keeps what was done.

    Attributes:
        rows: the requests there are.
        ended: endings since start.
        frozen: tenants that are.
        acts: what reached `act`: actor, action, target and arguments.
        refusals: what reached `refused`: actor, action, target and code.
        raises: what `act` and `statistics` raise, if anything.
        snapshots: that were asked for.
    """

    rows: list[Row] = field(default_factory=lambda: [request_row(number) for number in range(7)])
    ended: int = 3
    frozen: set[str] = field(default_factory=set)
    acts: list[tuple[Actor, Action, str | None, dict[str, Any]]] = field(default_factory=list)
    refusals: list[tuple[Actor, Action, str | None, str]] = field(default_factory=list)
    raises: Exception | None = None
    snapshots: int = 0

    def statistics(self) -> Row:
        """Answer a few figures."""
        if self.raises is not None:
            raise self.raises
        return {"version": "1", "arrived": len(self.rows)}

    async def requests(self, asked: RequestFilter) -> Row:
        """Answer those rows that match; the first are the newest, and what ended is put behind the others."""
        await trio.lowlevel.checkpoint()
        found = [row for row in self.rows if _matches(row, asked)]
        if asked.order == "oldest":
            found.reverse()
            found.sort(key=lambda row: bool(row["state"] == "ended"))
        page = found[asked.offset : asked.offset + asked.limit]
        return {"requests": page, "total": len(found), "offset": asked.offset}

    def timeline(self, request_id: str) -> Row:
        """Answer a row with two steps."""
        steps: list[Row] = [
            {"at": 0.0, "what": "arrived", "detail": {}},
            {"at": 0.5, "what": "placed", "detail": {"worker": "w1"}},
        ]
        return {"request": self._row(request_id), "timeline": steps}

    async def tenants(self) -> list[Row]:
        """Answer one tenant."""
        return [
            {
                "id": "acme",
                "frozen": "acme" in self.frozen,
                "weight": 1.0,
                "running": 3,
                "queued": 2,
                "max_concurrency": 8,
                "max_queued": 64,
                "counter": 123.5,
                "requests_per_minute": {"limit": 600, "remaining": 590.0},
                "tokens_per_minute": None,
                "tokens": {"prompt": 100, "generated": 200},
            }
        ]

    def queues(self) -> Row:
        """Answer one pool."""
        pool = {
            "pool": "w1,w2",
            "models": ["m1"],
            "slots": 16,
            "held": 6,
            "draining": 2,
            "pace": 1.5,
            "tiers": {"interactive": 0, "standard": 2, "batch": 0},
            "oldest_wait": 3.0,
        }
        return {"depth": 2, "bytes": 700, "max_queued": 1024, "max_queued_bytes": 1 << 27, "pools": [pool]}

    def workers(self) -> list[Row]:
        """Answer two workers."""
        return [worker_row(1), worker_row(2)]

    async def limits(self) -> Row:
        """Answer one limit."""
        return {"limits": {"admission.max_queued": {"value": 1024, "source": "default", "applies": "now"}}}

    async def tasks(self) -> list[Row]:
        """Answer one task with a child."""
        await trio.lowlevel.checkpoint()
        child: Row = {"name": "pump", "doing": "exchange/_attempt.py:10 relay", "children": []}
        task: Row = {"name": "connection", "doing": None, "children": [child]}
        return [{"exchange": self.rows[0]["id"] if self.rows else None, "tasks": [task]}]

    async def self_audit(self) -> Row:
        """Answer one leak."""
        await trio.lowlevel.checkpoint()
        leak = {
            "kind": "lease",
            "holder": "x",
            "worker": "w1",
            "age": 9.0,
            "detail": "its exchange has ended",
        }
        return {"ok": False, "equations": [], "leaks": [leak]}

    def endings(self, limit: int) -> list[Row]:
        """Answer the last of `ended`."""
        return [ending_row(number) for number in range(self.ended, max(self.ended - limit, 0), -1)]

    def endings_after(self, number: int) -> tuple[int, list[Row]]:
        """Answer those behind a number."""
        first = max(number, self.ended - 100) + 1
        return self.ended, [ending_row(each) for each in range(first, self.ended + 1)]

    def version(self) -> Row:
        """Answer a version."""
        return {"version": "1.2.3", "boot_id": "b", "python": "3.11.7", "trio": "0.31.0", "uptime": 12.5}

    async def configuration(self) -> Row:
        """Answer a part of one."""
        return {"admin": {"tokens": [{"id": "ops", "hash": "***", "role": "operator"}]}}

    def snapshot(self) -> Row:
        """Answer a snapshot; `at` counts them."""
        self.snapshots += 1
        short = ("id", "slots", "held", "draining", "free", "ready", "breakers", "operator")
        return {
            "at": float(self.snapshots),
            "throughput": {"requests_per_second": 2.0, "tokens_per_second": 80.5},
            "waiting": 2,
            "running": 3,
            "wait_p50": 0.1,
            "wait_p99": 2.0,
            "ttfc_p50": 0.2,
            "ttfc_p99": 1.0,
            "gap_p50": 0.02,
            "gap_p99": None,
            "buffered_bytes": 4096,
            "refusals": {"queue_full": 1},
            "service": {"acme": 80.5},
            "workers": [{name: worker[name] for name in short} for worker in self.workers()],
            "ready": True,
            "stopping": False,
        }

    async def audit(self, limit: int) -> list[Row]:
        """Answer what was done, newest first."""
        await trio.lowlevel.checkpoint()
        rows = [
            {
                "at": "2027-01-31T00:00:00+00:00",
                "actor": actor.id,
                "role": actor.role,
                "action": action,
                "target": target,
                "before": None,
                "after": arguments,
                "outcome": "done",
                "request_id": actor.request_id,
            }
            for actor, action, target, arguments in reversed(self.acts)
        ]
        return rows[:limit]

    async def flight(self, request_id: str) -> Row:
        """Answer a recording without events."""
        await trio.lowlevel.checkpoint()
        return {"version": 1, "request": self._row(request_id), "events": []}

    async def act(
        self, actor: Actor, action: Action, target: str | None, arguments: Mapping[str, Any]
    ) -> ActResult:
        """Keep it; of freezing, do it, once."""
        await trio.lowlevel.checkpoint()
        self.acts.append((actor, action, target, dict(arguments)))
        if self.raises is not None:
            raise self.raises
        if target == "nobody":
            raise refusal("not_found", "there is no such one")
        if action in ("tenants.freeze", "tenants.thaw"):
            return self._freeze(str(target), frozen=action == "tenants.freeze")
        return ActResult(done=True, before=None, after=dict(arguments))

    async def refused(self, actor: Actor, action: Action, target: str | None, code: str) -> None:
        """Keep it."""
        await trio.lowlevel.checkpoint()
        self.refusals.append((actor, action, target, code))

    def _freeze(self, tenant: str, *, frozen: bool) -> ActResult:
        before = tenant in self.frozen
        (self.frozen.add if frozen else self.frozen.discard)(tenant)
        return ActResult(before != frozen, {"frozen": before}, {"frozen": frozen})

    def _row(self, request_id: str) -> Row:
        for row in self.rows:
            if row["id"] == request_id:
                return row
        raise refusal("not_found", "there is no such request")


def _matches(row: Row, asked: RequestFilter) -> bool:
    pairs = (
        ("state", asked.state),
        ("tenant", asked.tenant),
        ("model", asked.model),
        ("worker", asked.worker),
    )
    words = " ".join(str(row[name]) for name in ("id", "tenant", "key_id", "model", "worker"))
    return all(wanted in (None, row[name]) for name, wanted in pairs) and (asked.search or "") in words
