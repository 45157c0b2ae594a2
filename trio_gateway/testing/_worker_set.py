"""Workers of one process without sockets: requests for them, their slots, and who places what."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import trio

from ..admission import Admission, AdmissionLimits, TenantShare
from ..contract import CHAT, InternalRequest, Operation, Worker
from ..fleet import DIALECTS, DrainKeeper, Fleet, FleetSettings, Route
from ..units import MiB

_numbers = itertools.count(1)


def make_worker(
    name: str = "w1", *, kind: str = "openai", slots: int = 4, cancel_grace: float = 0.5, **others: Any
) -> Worker:
    """Describe a worker; `others` are attributes of `Worker`."""
    where = {"url": f"http://{name}:1", "host": name, "port": 1, "authority": f"{name}:1", "prefix": ""}
    return Worker(
        id=name, dialect=DIALECTS[kind], slots=slots, cancel_grace=cancel_grace, **{**where, **others}
    )


def make_request(
    model: str = "m1",
    *,
    tenant: str = "t1",
    stream: bool = True,
    operation: Operation = CHAT,
    n: int = 1,
    seconds: float = 600.0,
    **others: Any,
) -> InternalRequest:
    """Make a request that arrives now; `others` are attributes of `InternalRequest`.

    Args:
        seconds: until its deadline.
    """
    now = trio.current_time()
    members = {"model": json.dumps(model).encode(), "messages": b'[{"role":"user","content":"hi"}]'}
    attributes: dict[str, Any] = {
        "exchange_id": f"{next(_numbers):032x}",
        "client_request_id": None,
        "key_id": None,
        "upstream_model": model,
        "members": members,
        "size": sum(map(len, members.values())),
        "choices": n if operation.choices else 0,
        "wants_usage": False,
        "wants_running_usage": False,
        **others,
    }
    return InternalRequest(
        tenant=tenant,
        operation=operation,
        model=model,
        stream=stream,
        n=n,
        arrived=now,
        deadline=now + seconds,
        **attributes,
    )


class WorkerSet:
    """Fleet, drain keeper and admission of one process, as its gateway puts them together.

    Args:
        workers: in the order of the file; all of them serve every model.
        models: public names, or a mapping from each to its workers' ids.
        limits: bounds of the queues.
        shares: bounds by tenant; a tenant that is not named here has `share`.
        first_pause: seconds that a worker without room is left alone at first.
        dice: random numbers from 0 to 1.
    """

    def __init__(
        self,
        *workers: Worker,
        models: Iterable[str] | Mapping[str, Iterable[str]] = ("m1",),
        limits: AdmissionLimits | None = None,
        shares: Mapping[str, TenantShare] | None = None,
        share: TenantShare | None = None,
        first_pause: float = 1.0,
        dice: Callable[[], float] = lambda: 0.0,
    ) -> None:
        everybody = tuple(worker.id for worker in workers)
        routes = (
            Route(model, model, tuple(models[model]) if isinstance(models, Mapping) else everybody)
            for model in models
        )
        self.fleet: Final = Fleet(workers, routes, trio.current_time, FleetSettings(first_pause), lambda: 0.5)
        self.drain: Final = DrainKeeper()
        self.admission: Final = Admission(
            self.fleet,
            limits or AdmissionLimits(1024, 256 * MiB, 60.0),
            _Shares(shares or {}, share or TenantShare(None, 64)),
            self.drain.keep,
            dice,
        )

    async def run(self) -> None:
        """Keep time for the drain keeper and for outages, for ever."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.drain.run)
            nursery.start_soon(self.admission.run)

    def unbalanced(self) -> list[str]:
        """Name what can not be at any moment: an equation of the leases, or slots counted wrongly."""
        counts = self.admission.statistics()
        wrong = []
        if counts.granted != counts.held + counts.draining + counts.returned:
            wrong.append(f"granted = held + draining + returned: {counts}")
        if counts.double_releases:
            wrong.append(f"{counts.double_releases} leases were released twice")
        return wrong + [
            f"{book.worker.id} of {book.worker.slots} slots: {book.held} held, {book.draining} draining"
            for book in self.fleet.books.values()
            if min(book.held, book.draining, book.free) < 0
        ]

    def left_over(self) -> list[str]:
        """Name what is still held or waiting; nothing, when nothing runs and nothing drains."""
        counts = self.admission.statistics()
        figures = {
            "held": counts.held,
            "draining": counts.draining,
            "queued": counts.queued,
            "queued bytes": counts.queued_bytes,
            "tenants in the queue": len(counts.queued_by_tenant),
        }
        for book in self.fleet.books.values():
            figures |= {
                f"held of {book.worker.id}": book.held,
                f"draining of {book.worker.id}": book.draining,
            }
        return [f"{name}: {value}" for name, value in figures.items() if value]


class _Shares(dict[str, TenantShare]):
    """Shares by tenant, with one for everybody who is not named."""

    def __init__(self, named: Mapping[str, TenantShare], other: TenantShare) -> None:
        super().__init__(named)
        self._other = other

    def __missing__(self, tenant: str) -> TenantShare:
        return self._other
